/**
 * What every simulated worker is made of: its script, its failures, its order of work, and rows off the wire.
 *
 * The script comes in `welcome.options.script`, as JSON:
 *
 *   {"latency_ms": {"step": 5, "run": 20, "*": 1},        per request kind; step = an engine's tick
 *    "tokens_per_step": 4,
 *    "cache_tokens": 4096,                                tokens that all requests of an engine may hold at once
 *    "report_ms": true,                                   the `detail` of an ending is the time its engine had it
 *    "reply": [{"when": "2+2=", "texts": ["4", "5"]}],    turns whose prompt ends so; the seed chooses the text
 *    "failures": [{"worker": "engine-1", "what": "exit", "on": "generate", "nth": 3}]}
 *
 * A new failure is a row of FAILURES (what happens when a message or tick comes) or of DAMAGE (bytes of a transfer).
 *
 *   exit       the process, with all workers in it          duplicate  the next message out is sent twice
 *   stall      this and all later work waits for ever       gap        the next message out is lost
 *   slow       this and all later work takes `ms` more      mute       no heartbeat any more; work goes on
 *   corrupt, swap_layout  a tensor in transfer              silence    nothing is sent any more; the process lives
 *   miscount   a pause tells one token too many
 * Used by simulated.ts, simulated_engine.ts and simulated_trainer.ts.
 */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Answer, WorkerLink } from '../molt/bus.ts';
import type { Fields, Frames, RequestKind } from '../molt/protocol.ts';
import { MESSAGES, RemoteError } from '../molt/protocol.ts';
import type { Json } from '../molt/types.ts';
import { initialWeights, scoreIds, unpackWeights, VOCAB_SIZE } from './simulated_model.ts';

/** Exit status of a worker that died by its script. */
const SCRIPTED_EXIT = 86;

// ---- Script ----

export interface Script {
  readonly latency_ms?: Readonly<Record<string, number>>;
  readonly tokens_per_step?: number;
  readonly cache_tokens?: number;
  readonly report_ms?: boolean;
  readonly reply?: readonly { readonly when: string; readonly texts: readonly string[] }[];
  readonly failures?: readonly Failure[];
}
export interface Failure {
  readonly worker?: string; // absent: every worker with this script
  readonly incarnation?: number; // absent: the first, so that a restarted worker is well
  readonly what: keyof typeof FAILURES | keyof typeof DAMAGE;
  readonly on: string; // a request kind, `step`, or `*` = any request
  readonly nth: number; // counted from 1 per worker and `on`; slow: from this one on
  readonly ms?: number; // slow
}
const SCRIPT_KEYS = ['latency_ms', 'tokens_per_step', 'cache_tokens', 'report_ms', 'reply', 'failures'];
const FAILURE_KEYS = ['worker', 'incarnation', 'what', 'on', 'nth', 'ms'];

/** Decides how often each message of one worker goes out. */
export class Wire {
  #next = 1; // copies of the next message
  #after = 1; // of all that follow

  copies(): number {
    const next = this.#next;
    this.#next = this.#after;
    return next;
  }

  send(next: number, after: number): void {
    this.#next = next;
    this.#after = after;
  }
}

/** What happens to a worker when the message or tick comes; when it resolves, that is dealt with. */
const FAILURES = {
  exit: (): Promise<void> => process.exit(SCRIPTED_EXIT), // all workers of this process
  stall: (): Promise<void> => new Promise(() => {}), // heartbeats go on
  slow: ({ ms = 0 }: Failure): Promise<void> => sleep(ms),
  duplicate: async (_: Failure, { wire }: SimulatedWorker): Promise<void> => wire.send(2, 1),
  gap: async (_: Failure, { wire }: SimulatedWorker): Promise<void> => wire.send(0, 1),
  mute: async (_: Failure, { link }: SimulatedWorker): Promise<void> => link.mute(),
  miscount: async (): Promise<void> => {}, // asked for by `strikes`
  silence: async (_: Failure, { wire }: SimulatedWorker): Promise<void> => wire.send(0, 0),
} as const;

/**
 * On a copy of a tensor in transfer. `corrupt` strikes between the two checksums, so the reader finds it. `swap_layout`
 * strikes outside of them: a transposed square matrix has right bytes, name and shape, and a wrong meaning that only
 * `score` finds.
 */
const DAMAGE = {
  corrupt: (bytes: Buffer): void => void bytes.writeUInt8(bytes.readUInt8(0) ^ 1, 0),
  swap_layout: (bytes: Buffer): void => {
    const old = new Float32Array(Uint8Array.from(bytes).buffer);
    for (let i = 0; i < old.length; i++) {
      bytes.writeFloatLE(old[(i % VOCAB_SIZE) * VOCAB_SIZE + Math.floor(i / VOCAB_SIZE)] as number, 4 * i);
    }
  },
} as const;
const DAMAGED_TENSOR = 'model.bigram.weight'; // square

/** The user's script or model is none for simulated workers; the message names the option. */
export class InputError extends Error {}

/** A misspelled failure would be a test that tests nothing, so unknown words are errors. */
function readScript(value: Json | undefined): Script {
  const script = (value ?? {}) as Script;
  const failures = script.failures ?? [];
  for (const key of Object.keys(script))
    if (!SCRIPT_KEYS.includes(key))
      throw new InputError(`--simulated.script: unknown key ${key}, allowed are ${SCRIPT_KEYS.join(', ')}`);
  for (const rule of failures) {
    for (const key of Object.keys(rule)) {
      if (!FAILURE_KEYS.includes(key))
        throw new InputError(
          `--simulated.script: unknown key ${key} of a failure, allowed are ${FAILURE_KEYS.join(', ')}`,
        );
    }
    if (!Object.hasOwn(FAILURES, rule.what) && !Object.hasOwn(DAMAGE, rule.what)) {
      throw new InputError(
        `unknown failure ${rule.what}, allowed are ${[...Object.keys(FAILURES), ...Object.keys(DAMAGE)].join(', ')}`,
      );
    }
    if (!(rule.nth >= 1) || !(rule.on === 'step' || rule.on === '*' || Object.hasOwn(MESSAGES, rule.on)))
      throw new InputError(
        `--simulated.script: failure ${rule.what} needs on (a request kind, step or *), and nth of at least 1`,
      );
  }
  return script;
}

// ---- Worker ----

type Handler<K extends RequestKind> = (
  fields: Fields<K>,
  frames: Frames<K>,
  signal: AbortSignal,
) => Answer<K> | Promise<Answer<K>>;

/** The reply of kinds that have none but `ok`. */
export const NOTHING = { fields: {}, frames: {} } as const;

/** One worker id: its link, its place in the script, and the order of its work. */
export class SimulatedWorker {
  readonly link: WorkerLink;
  readonly wire: Wire; // of that link
  readonly script: Script;
  readonly options: { readonly [key: string]: Json };
  readonly #failures: readonly Failure[];
  readonly #counts = new Map<string, number>();
  #tail: Promise<unknown> = Promise.resolve(); // the latest request
  #stalled: Promise<void> | null = null;

  constructor(link: WorkerLink, workerId: string, wire: Wire) {
    this.link = link;
    this.wire = wire;
    this.options = link.options as { readonly [key: string]: Json };
    this.script = readScript(this.options.script);
    this.#failures = (this.script.failures ?? []).filter(
      (rule) => (rule.worker ?? workerId) === workerId && (rule.incarnation ?? 0) === link.incarnation,
    );
  }

  /** Counts this message or tick and resolves when the script lets it go on. */
  async arrive(on: string): Promise<void> {
    if (this.#stalled !== null) return this.#stalled;
    const nth = this.#count(on);
    const nthOfAll = on === 'step' ? 0 : this.#count('*');
    const { latency_ms = {} } = this.script;
    const latency = latency_ms[on] ?? (on === 'step' ? 0 : (latency_ms['*'] ?? 0));
    if (latency > 0) await sleep(latency);
    for (const rule of this.#failures) {
      const n = rule.on === on ? nth : rule.on === '*' ? nthOfAll : 0;
      if (rule.what === 'slow' ? n < rule.nth : n !== rule.nth) continue;
      if (rule.what === 'corrupt' || rule.what === 'swap_layout') continue; // in `damage`
      const delay = FAILURES[rule.what](rule, this);
      if (rule.what === 'stall') this.#stalled = delay;
      await delay;
    }
  }

  #count(on: string): number {
    const n = (this.#counts.get(on) ?? 0) + 1;
    this.#counts.set(on, n);
    return n;
  }

  /** Whether this failure is for the message that has just come. */
  strikes(what: Failure['what'], on: string): boolean {
    return this.#failures.some((r) => r.what === what && r.on === on && r.nth === this.#counts.get(on));
  }

  /** A tensor of the transfer in progress, damaged where the script says so. */
  damage(what: keyof typeof DAMAGE, on: RequestKind, name: string, bytes: Buffer): Buffer {
    if (name !== DAMAGED_TENSOR || !this.strikes(what, on)) return bytes;
    const copy = Buffer.from(bytes);
    DAMAGE[what](copy);
    return copy;
  }

  /**
   * Requests start in the order they came. One at a time, as in a Python worker, unless `concurrent`: an engine goes on
   * answering while a pause drains.
   */
  serve<K extends RequestKind>(kind: K, answer: Handler<K>, concurrent = false): void {
    this.link.handle(kind, (fields, frames, signal) => {
      const started = this.#tail.then(async () => {
        await this.arrive(kind);
        return { answer: answer(fields, frames, signal) }; // boxed, so that the next one need not wait for it
      });
      const done = started.then((box) => box.answer);
      this.#tail = (concurrent ? started : done).catch(() => {});
      return done.catch((error: unknown) => this.#exitIfFatal(error));
    });
  }

  /** A fatal error is sent, then the process ends: never a worker in an unknown state. */
  #exitIfFatal(error: unknown): never {
    if (error instanceof RemoteError && error.type === 'fatal') {
      console.error(`fatal: ${error.message}`);
      setImmediate(() => void this.link.close().finally(() => process.exit(1))); // close never rejects
    }
    throw error;
  }

  /** Resolves when the requests that have come so far are answered. */
  async finished(): Promise<void> {
    await this.#tail;
  }
}

export const badRequest = (field: string, message: string): RemoteError =>
  new RemoteError('bad_request', message, { field });
export const unsupported = (field: string, message: string): RemoteError =>
  new RemoteError('unsupported', message, { field });

// ---- Rows on the wire ----

/** Ragged rows: `lengths` cuts every per-token array. */
export function cut<A extends Int32Array | Float32Array | Uint8Array>(
  array: A,
  lengths: Int32Array,
  name: string,
): A[] {
  let at = 0;
  const rows: A[] = [];
  for (const n of lengths) {
    if (n < 0) throw badRequest('lengths', `Cannot cut ${name}: a row has length ${n}`);
    rows.push(array.subarray(at, at + n) as A);
    at += n;
  }
  if (at !== array.length) {
    throw badRequest('lengths', `Cannot cut ${name}: lengths add up to ${at}, it has ${array.length}`);
  }
  return rows;
}

export function checkIds(ids: Int32Array, field: string): void {
  const bad = ids.find((id) => id < 0 || id >= VOCAB_SIZE);
  if (bad !== undefined) throw badRequest(field, `Token id ${bad} is outside the vocabulary of ${VOCAB_SIZE}`);
}

/** Logprobs of all rows, back to back; the first token of a row gets 0. */
export function scoreRows(
  weights: Float32Array,
  frames: { readonly ids: Int32Array; readonly lengths: Int32Array },
  temperature: number,
): Float32Array {
  checkIds(frames.ids, 'ids');
  const out = new Float32Array(frames.ids.length);
  let at = 0;
  for (const ids of cut(frames.ids, frames.lengths, 'ids')) {
    out.set(scoreIds(weights, ids, temperature), at);
    at += ids.length;
  }
  return out;
}

// ---- Model files ----

export const WEIGHTS_FILE = 'model.safetensors';

/** Weights of a `model_path`: `simulated`, `simulated:SEED`, or a directory that `export` wrote. Throws otherwise. */
export function loadModel(path: string): Float32Array {
  const named = /^(?:simulated(?::(\d+))?)?$/.exec(path);
  if (named) return initialWeights(Number(named[1] ?? 0));
  try {
    return unpackWeights(readFileSync(join(path, WEIGHTS_FILE)));
  } catch (error) {
    const wanted = 'simulated workers take simulated, simulated:SEED or a directory they exported';
    throw new InputError(`--actor.model_name_or_path ${path}: ${wanted} (${(error as Error).message})`);
  }
}
