/**
 * Channel: what two processes know of their conversation, the same on both sides of the wire.
 *
 *   request -> id -> encode -> transmit ... receive -> seq -> re -> the promise of that id
 *
 * Invariants
 *   1. A message that does not fit the table (protocol.ts) never reaches a handler: `receive` throws.
 *   2. Messages are handled in order; a repeat is dropped and counted, a gap throws.
 *   3. A request settles exactly once: with its reply, its deadline, its cancellation, or the loss of the other side.
 *   4. Each request has exactly one reply, so one that nobody waits for any more is still expected, and counted.
 *   5. Only this file retries, and only what is safe: pure kinds after `failed`, any kind after `overloaded`.
 * Knows nothing of sockets, processes and the handshake: bus.ts owns a channel per peer.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import {
  type Decoded,
  decodeBody,
  ERROR_TYPES,
  type EventKind,
  encode,
  type Fields,
  type FrameArray,
  type Frames,
  type Kind,
  MESSAGES,
  type Opened,
  type Outgoing,
  ProtocolError,
  RemoteError,
  type ReplyFields,
  type ReplyFrames,
  type RequestKind,
} from './protocol.ts';

/** A side that took nothing of this much is not alive. */
const MAX_UNSENT_BYTES = 256 * 1024 * 1024;
const OVERLOADED_WAIT_MS = 100; // where the error names no time
const MAX_FAILED_RETRIES = 2;
/** Longest delay a timer takes. */
const MAX_TIMER_MS = 2 ** 31 - 1;
/** Kinds whose answer depends on nothing but the request and the weights, so a second try is harmless. */
const PURE_KINDS: ReadonlySet<Kind> = new Set(['render', 'suffix', 'encode', 'decode', 'parse', 'score', 'logprobs']);
export interface Answer<K extends RequestKind> {
  readonly fields: ReplyFields<K>;
  readonly frames: ReplyFrames<K>;
}
export interface RequestOptions {
  readonly deadlineMs?: number | undefined; // over all tries
  readonly signal?: AbortSignal | undefined; // withdraws the request: the worker gets `cancel`
}
export type EventHandler<K extends EventKind> = (fields: Fields<K>, frames: Frames<K>) => void;
export type RequestHandler<K extends RequestKind> = (
  fields: Fields<K>,
  frames: Frames<K>,
  signal: AbortSignal, // aborted by `cancel`, by the deadline of the request, and when the requester is lost
) => Promise<Answer<K>>;

export type AnyFields = Readonly<Record<string, unknown>>;
export type AnyFrames = Readonly<Record<string, FrameArray | undefined>>;
interface AnyAnswer {
  readonly fields: AnyFields;
  readonly frames: AnyFrames;
}
// Handlers of all kinds stand in one map, so their types end at `on` and `handle`; decodeBody has checked what they get.
type AnyEventHandler = (fields: AnyFields, frames: AnyFrames) => void;
type AnyRequestHandler = (fields: AnyFields, frames: AnyFrames, signal: AbortSignal) => Promise<AnyAnswer>;
export type Counters = Record<string, number>;

export function newCounters(): Counters {
  return {
    repeated_seq: 0,
    refused: 0, // processes that were not welcome
    after_end: 0, // messages from refused or lost processes
    late_reply: 0, // the requester had stopped waiting
    unknown_reply: 0,
    unhandled_event: 0,
    retries: 0,
    deadlines: 0,
    cancelled: 0,
    sent_to_lost: 0, // events, dropped
    lost: 0,
  };
}

export function add(counters: Counters, key: string): void {
  counters[key] = (counters[key] ?? 0) + 1;
}

interface Pending {
  readonly kind: Kind;
  readonly seq: number;
  readonly settle: (outcome: AnyAnswer | Error) => void;
  abandoned: boolean; // nobody waits any more, but its one reply is still to come
}

interface ChannelArgs {
  readonly letter: string; // who this side is, as the table spells it
  readonly peerName: string; // for error messages
  readonly counters: Counters;
  readonly onError: (error: Error) => void;
  readonly onBroken: (reason: string) => void;
  readonly hold: boolean; // keep requests and events, but for lanes and the handshake, until `release`
}

/** One conversation. Made closed; `open` starts it, `close` ends it for good. */
export class Channel {
  readonly #args: ChannelArgs;
  readonly #pending = new Map<number, Pending>();
  readonly #running = new Map<number, AbortController>(); // requests of the other side that are being answered here
  readonly #events = new Map<string, AnyEventHandler[]>();
  readonly #handlers = new Map<string, AnyRequestHandler>();
  readonly #unsent: { readonly seq: number; readonly bytes: number }[] = []; // in order of seq
  #transmit: ((parts: Buffer[]) => void) | null = null;
  #otherLetter = '';
  #nextSeq = 0;
  #expectedSeq = 0;
  #nextId = 0;
  #held: Decoded[] | null; // arrived before `release`; null = released
  #lost: string | null = null;
  unsentBytes = 0;

  constructor(args: ChannelArgs) {
    this.#args = args;
    this.#held = args.hold ? [] : null;
  }

  /** The other side is known: from here on messages flow. */
  open(transmit: (parts: Buffer[]) => void, otherLetter: string, expectedSeq: number): void {
    this.#transmit = transmit;
    this.#otherLetter = otherLetter;
    this.#expectedSeq = expectedSeq;
  }

  get isOpen(): boolean {
    return this.#transmit !== null && this.#lost === null;
  }

  /** Highest seq that arrived, -1 = none. */
  get received(): number {
    return this.#expectedSeq - 1;
  }

  on<K extends EventKind>(kind: K, handler: EventHandler<K>): void {
    const handlers = this.#events.get(kind) ?? [];
    this.#events.set(kind, [...handlers, handler as unknown as AnyEventHandler]);
  }

  handle<K extends RequestKind>(kind: K, handler: RequestHandler<K>): void {
    this.#handlers.set(kind, handler as unknown as AnyRequestHandler);
  }

  send(kind: Kind, fields: AnyFields, frames: AnyFrames = {}): void {
    if (this.#lost !== null) return add(this.#args.counters, 'sent_to_lost');
    this.#post({ kind, fields, frames });
  }

  async request(kind: Kind, fields: AnyFields, frames: AnyFrames, options: RequestOptions): Promise<AnyAnswer> {
    const end = performance.now() + (options.deadlineMs ?? Number.POSITIVE_INFINITY);
    for (let failures = 0; ; ) {
      try {
        return await this.#requestOnce(kind, fields, frames, end, options.signal);
      } catch (error) {
        const wait = retryAfter(error, PURE_KINDS.has(kind) && failures++ < MAX_FAILED_RETRIES);
        if (wait === null || performance.now() + wait >= end) throw error;
        add(this.#args.counters, 'retries');
        await sleep(wait, undefined, options.signal && { signal: options.signal }).catch(() => {}); // aborted: next try says so
      }
    }
  }

  /** `end` is in terms of performance.now(). */
  #requestOnce(
    kind: Kind,
    fields: AnyFields,
    frames: AnyFrames,
    end: number,
    signal?: AbortSignal,
  ): Promise<AnyAnswer> {
    return new Promise((resolve, reject) => {
      if (signal?.aborted) throw this.#cancelledError(kind);
      if (this.#lost !== null) throw new RemoteError('lost', this.#lost);
      const left = end - performance.now();
      const id = this.#nextId++;
      const deadline = left < Number.POSITIVE_INFINITY ? { deadlineMs: left } : {};
      const seq = this.#post({ kind, id, fields, frames, ...deadline });
      if (this.#lost !== null) throw new RemoteError('lost', this.#lost); // this very message was too much
      const onAbort = () => this.#abandon(id, 'cancelled', this.#cancelledError(kind));
      const timer =
        left <= MAX_TIMER_MS
          ? setTimeout(() => this.#abandon(id, 'deadlines', this.#deadlineError(kind)), Math.max(0, left))
          : undefined;
      signal?.addEventListener('abort', onAbort, { once: true });
      const settle = (outcome: AnyAnswer | Error) => {
        clearTimeout(timer);
        signal?.removeEventListener('abort', onAbort);
        if (outcome instanceof Error) reject(outcome);
        else resolve(outcome);
      };
      this.#pending.set(id, { kind, seq, settle, abandoned: false });
    });
  }

  #cancelledError(kind: Kind): RemoteError {
    return new RemoteError('cancelled', `${kind} to ${this.#args.peerName} was cancelled`);
  }

  #deadlineError(kind: Kind): RemoteError {
    return new RemoteError('deadline', `${kind} to ${this.#args.peerName} was not answered before its deadline`);
  }

  /** Stop waiting. The entry stays until the reply arrives: each request has exactly one, and it is counted. */
  #abandon(id: number, counter: string, error: RemoteError): void {
    const pending = this.#pending.get(id);
    if (!pending || pending.abandoned) return;
    pending.abandoned = true;
    add(this.#args.counters, counter);
    if (this.isOpen && this.#args.letter === 'C') {
      // Workers cannot cancel: what they ask of the controller has its own message for that (abort_turn).
      const cancelId = this.#nextId++;
      const seq = this.#post({ kind: 'cancel', id: cancelId, fields: { request: id } });
      this.#pending.set(cancelId, { kind: 'cancel', seq, settle: () => {}, abandoned: false });
    }
    pending.settle(error);
  }

  /** Throws ProtocolError when the other side broke the protocol. True when it was a reply (invariant 4). */
  receive(opened: Opened): boolean {
    const { counters, peerName } = this.#args;
    if (opened.seq < this.#expectedSeq) {
      add(counters, 'repeated_seq');
      return false;
    }
    if (opened.seq > this.#expectedSeq) {
      throw new ProtocolError(`Expected message ${this.#expectedSeq} of ${peerName}, got ${opened.seq}`, 'seq');
    }
    this.#expectedSeq++;
    if (opened.re !== null) {
      this.#onReply(opened, opened.re);
      return true;
    }
    const message = this.#checked(opened);
    if (message && this.#held && !isPrompt(message.kind as Kind)) this.#held.push(message);
    else if (message) this.#onCall(message);
    return false;
  }

  /** A worker answers an ill-formed request with the field's name; from a worker it is a broken protocol. */
  #checked(opened: Opened): Decoded | null {
    try {
      const message = decodeBody(opened);
      const { from, to } = MESSAGES[message.kind as Kind];
      if (!speaks(from, this.#otherLetter) || !speaks(to, this.#args.letter)) {
        throw new ProtocolError(`${message.kind} does not go from ${this.#args.peerName} to here`, 'kind');
      }
      return message;
    } catch (error) {
      if (!(error instanceof ProtocolError) || opened.id === null || this.#args.letter === 'C') throw error;
      const refusal = new RemoteError('bad_request', error.message, { field: error.field });
      this.#post({ kind: 'error', re: opened.id, fields: { ...errorFields(refusal) } });
      return null;
    }
  }

  /** Handlers are in place: what waited is handled now, in order. */
  release(): void {
    const held = this.#held ?? [];
    this.#held = null;
    for (const message of held) this.#onCall(message);
  }

  #onReply(opened: Opened, re: number): void {
    const pending = this.#pending.get(re);
    if (!pending) return add(this.#args.counters, 'unknown_reply');
    const { kind, fields, frames } = decodeBody(opened, pending.kind);
    if (kind !== 'ok' && kind !== 'error') throw new ProtocolError(`${kind}.re must be absent`, 're');
    this.#pending.delete(re);
    this.acknowledge(pending.seq); // messages are taken in order, so whatever came before it arrived too
    if (pending.abandoned) add(this.#args.counters, 'late_reply');
    else pending.settle(kind === 'ok' ? { fields, frames } : remoteError(fields as unknown as ErrorFields));
  }

  #onCall(message: Decoded): void {
    if (message.id !== null) return void this.#answer(message, message.id); // never rejects
    const handlers = this.#events.get(message.kind);
    if (!handlers) return add(this.#args.counters, 'unhandled_event');
    for (const handler of handlers) {
      try {
        handler(message.fields, message.frames);
      } catch (error) {
        this.#args.onError(asError(error));
      }
    }
  }

  async #answer({ kind, fields, frames, deadlineMs }: Decoded, id: number): Promise<void> {
    const controller = new AbortController();
    this.#running.set(id, controller);
    const timer =
      deadlineMs !== null && deadlineMs <= MAX_TIMER_MS ? setTimeout(() => controller.abort(), deadlineMs) : undefined;
    try {
      const handler = this.#handlers.get(kind);
      if (!handler) throw new RemoteError('unsupported', `Nothing here answers ${kind}`, { field: 'kind' });
      const answer = await handler(fields, frames, controller.signal);
      if (this.isOpen) this.#post({ kind: 'ok', re: id, fields: answer.fields, frames: answer.frames }, kind as Kind);
    } catch (error) {
      if (this.isOpen) this.#post({ kind: 'error', re: id, fields: { ...errorFields(asError(error)) } });
    } finally {
      clearTimeout(timer);
      this.#running.delete(id);
    }
  }

  /** `cancel` arrived. The request still gets its own reply, from its handler. */
  cancelRunning(id: number): void {
    this.#running.get(id)?.abort();
  }

  /** Gives the message its seq. Throws ProtocolError when it is ill-formed; it takes no seq then. */
  #post(message: Omit<Outgoing, 'seq'>, answers: Kind | null = null): number {
    const { kind } = message;
    if (!this.#transmit) throw new Error(`Cannot send ${kind} to ${this.#args.peerName}: it has not said hello`);
    const seq = this.#nextSeq;
    const parts = encode({ ...message, seq }, answers);
    this.#nextSeq++;
    const bytes = parts.reduce((sum, part) => sum + part.length, 0);
    this.#transmit(parts);
    if (this.#args.letter === 'C') {
      this.#unsent.push({ seq, bytes });
      this.unsentBytes += bytes;
      if (this.unsentBytes > MAX_UNSENT_BYTES) {
        this.#args.onBroken(`${this.unsentBytes} bytes are unsent, at most ${MAX_UNSENT_BYTES}`);
      }
    }
    return seq;
  }

  /** The other side has everything up to `seq`. */
  acknowledge(seq: number): void {
    let taken = 0;
    for (const entry of this.#unsent) {
      if (entry.seq > seq) break;
      this.unsentBytes -= entry.bytes;
      taken++;
    }
    this.#unsent.splice(0, taken);
  }

  /** What waits on whom, for a look at a process that seems to hang. */
  describe(): string {
    const waiting = [...this.#pending].map(([id, { kind }]) => `${kind} ${id}`).join(', ') || 'nothing';
    const running = [...this.#running.keys()].join(', ') || 'none';
    return `Waits for replies of ${this.#args.peerName}: ${waiting}. Answers requests: ${running}.`;
  }

  /** The other side is gone: everything pending rejects, everything running is told. */
  close(reason: string): void {
    if (this.#lost !== null) return;
    this.#lost = reason;
    for (const pending of this.#pending.values()) {
      if (!pending.abandoned) pending.settle(new RemoteError('lost', reason));
    }
    this.#pending.clear();
    this.#unsent.length = 0;
    this.unsentBytes = 0;
    for (const controller of this.#running.values()) controller.abort();
  }
}

/** Milliseconds to wait before another try; null: no other try. */
function retryAfter(error: unknown, mayFail: boolean): number | null {
  if (!(error instanceof RemoteError)) return null;
  if (error.type === 'overloaded') return error.retryAfterMs ?? OVERLOADED_WAIT_MS;
  return error.type === 'failed' && mayFail ? 0 : null;
}

/** Whether the letters of the table's `from` or `to` mean this side. */
function speaks(letters: string, letter: string): boolean {
  return letters.includes(letter) || (letters.includes('W') && letter !== 'C');
}

/** Lanes and the handshake do not wait for handlers. */
function isPrompt(kind: Kind): boolean {
  return 'io' in MESSAGES[kind] || kind === 'welcome' || kind === 'refused';
}

interface ErrorFields {
  readonly type: string;
  readonly message: string;
  readonly field: string | null;
  readonly traceback: string | null;
  readonly retry_after_ms: number | null;
}

function errorFields(error: Error): ErrorFields {
  if (!(error instanceof RemoteError)) {
    const traceback = error.stack ?? null;
    return { type: 'failed', message: error.message, field: null, traceback, retry_after_ms: null };
  }
  const { message, field, traceback, retryAfterMs } = error;
  // `lost` speaks of the link to some third process; passed on as it is, it would be taken for this link.
  const type = error.type === 'lost' ? 'failed' : error.type;
  return { type, message, field, traceback, retry_after_ms: retryAfterMs };
}

function remoteError({ type, message, field, traceback, retry_after_ms }: ErrorFields): RemoteError {
  const known = ERROR_TYPES.find((each) => each === type);
  if (!known) throw new ProtocolError(`Unknown error type ${type}`, 'error.type');
  return new RemoteError(known, message, { field, traceback, retryAfterMs: retry_after_ms });
}

export function asError(thrown: unknown): Error {
  return thrown instanceof Error ? thrown : new Error(String(thrown));
}
