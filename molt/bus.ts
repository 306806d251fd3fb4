/**
 * The bus: messages between the controller and its workers, over one ROUTER and one DEALER per worker.
 *
 *   Bus (controller) --expect--> Peer  <== hello, welcome, requests, replies, events ==>  WorkerLink (worker process)
 *
 * Invariants
 *   1. Nobody is heard before a `hello` with the right version, id and secret; whoever breaks the protocol (channel.ts)
 *      is lost. Neither is heard again.
 *   2. A peer is lost once, with one reason. Everything pending on it then rejects as `lost`.
 *   3. Code that awaits a reply runs before the next message is handled, so an event behind a reply finds the state
 *      that the reply made.
 *   4. A send never waits: what a worker has not yet taken is counted, and too much of it means lost. Messages to one process
 *      leave in order, together where they are made together: a ZeroMQ message each would cost more than what is in it.
 *   5. An error thrown by an event handler is a bug of this process: it ends it, unless `onError` takes it.
 * Frames are sent without a copy: do not write into them afterwards. Not here: encryption, so only loopback is served;
 * reconnecting: a worker whose link breaks ends, and a new process says hello.
 * Called by generator.ts, trainer.ts, dispatch.ts, refit.ts, launch.ts (controller), runner.ts and simulated.ts (worker).
 * Python's side is workers/runtime.py.
 */
import { randomBytes, timingSafeEqual } from 'node:crypto';
import { readSync } from 'node:fs';
import { hostname } from 'node:os';
import { setImmediate as nextTurn, setTimeout as sleep } from 'node:timers/promises';
import { Worker } from 'node:worker_threads';
import { Dealer, Router } from 'zeromq';
import {
  type Answer,
  type AnyFields,
  type AnyFrames,
  add,
  asError,
  Channel,
  type Counters,
  type EventHandler,
  newCounters,
  type RequestHandler,
  type RequestOptions,
} from './channel.ts';
import {
  decodeBody,
  type EventKind,
  encode,
  type Fields,
  type Frames,
  type Opened,
  openMessages,
  PROTOCOL_VERSION,
  ProtocolError,
  type RequestKind,
} from './protocol.ts';
import { invariant, type Json } from './types.ts';

export type { Answer, RequestOptions } from './channel.ts';

const HEARTBEAT_MS = 1000;
const ZMTP_HEARTBEAT_MS = 2_000;
const ZMTP_TIMEOUT_MS = 20_000;
/** A worker tells early what it has received after this much, so that bulk transfers do not count as unsent. */
const ACK_BYTES = 16 * 1024 * 1024;
/** Messages are handled for this long before what they caused is sent, and timers and other sockets get their turn. */
const SLICE_MS = 2;
/** Messages that travel together: so much is sent before the end of the slice. */
const TOGETHER_BYTES = 1024 * 1024;
/**
 * How long a closed socket may still send. Two asserts of libzmq 4.3.5 end the whole process otherwise. Not 0: a socket
 * that closes without lingering aborts when a connection breaks under a half-sent message (session_base.cpp,
 * clean_pipes). And less than ZMTP_HEARTBEAT_MS: a heartbeat of a lingering socket whose connection broke aborts
 * (github.com/zeromq/libzmq/issues/4841).
 */
const BUS_LINGER_MS = 400;
const LINK_LINGER_MS = 1_500;
const CLOSE_MS = 1_000;
/** A send that finds nobody mostly means that the process has ended: how it ended says more, and is known a little later. */
const LINK_GONE_MS = 500;
const EXIT_REFUSED = 3;
/** A worker that cannot use what it was given (a model, an agent, a script) prints one line and exits with this. */
export const EXIT_BAD_INPUT = 4;
const LINK_GONE = 'the link to the controller is gone';

const LETTERS: Readonly<Record<string, string>> = { engine: 'E', trainer: 'T', tokenizer: 'K', runner: 'R' };

/** Messages to one process on their way to the socket. */
class Outbox {
  readonly #hand: (parts: Buffer[]) => void;
  #parts: Buffer[] = [];
  #bytes = 0;
  #scheduled = false;

  constructor(hand: (parts: Buffer[]) => void) {
    this.#hand = hand;
  }

  /** A message, which leaves before this turn of the event loop is over. */
  put(parts: readonly Buffer[]): void {
    for (const part of parts) this.#bytes += part.length;
    this.#parts.push(...parts);
    if (this.#bytes > TOGETHER_BYTES) return this.flush();
    if (this.#scheduled) return;
    this.#scheduled = true;
    setImmediate(() => {
      this.#scheduled = false;
      this.flush();
    });
  }

  flush(): void {
    if (this.#parts.length === 0) return;
    const parts = this.#parts;
    this.#parts = [];
    this.#bytes = 0;
    this.#hand(parts);
  }
}

// ---- Controller side ----

/** What the bus knows of one worker process; Peer is its public face. */
interface Seat {
  readonly workerId: string;
  readonly incarnation: number;
  readonly secret: string;
  readonly options: Json;
  readonly channel: Channel;
  readonly hello: Deferred<Fields<'hello'>>;
  readonly ready: Deferred<Json>;
  readonly lost: Deferred<Error>;
  readonly declareLost: (reason: string) => void;
  flush: () => void; // sends what still waits to leave together
  lostReason: Error | null;
  isReady: boolean;
  lastHeard: number;
  stats: Readonly<Record<string, number>>;
}

/** One process of one worker id, as the controller sees it. Made by Bus.expect. Methods may be called after its loss. */
export class Peer {
  readonly #seat: Seat;

  constructor(seat: Seat) {
    this.#seat = seat;
  }

  get workerId(): string {
    return this.#seat.workerId;
  }
  /** 0 for the first process of this id, one more for each that replaces it. */
  get incarnation(): number {
    return this.#seat.incarnation;
  }
  /** Resolves when the process was welcomed; rejects when it is lost before. */
  get hello(): Promise<Fields<'hello'>> {
    return this.#seat.hello.promise;
  }
  /** Resolves with the info of `ready`; rejects when it is lost before. */
  get ready(): Promise<Json> {
    return this.#seat.ready.promise;
  }
  /** Resolves once, with the reason. Never rejects. */
  get lost(): Promise<Error> {
    return this.#seat.lost.promise;
  }
  get isLost(): boolean {
    return this.#seat.lostReason !== null;
  }
  /** Said hello and was not lost since. */
  get isConnected(): boolean {
    return this.#seat.channel.isOpen;
  }
  get isReady(): boolean {
    return this.#seat.isReady;
  }
  /** performance.now() of its last message, or of Bus.expect. */
  get lastHeard(): number {
    return this.#seat.lastHeard;
  }
  /** What it last published, from heartbeats. */
  get stats(): Readonly<Record<string, number>> {
    return this.#seat.stats;
  }
  /** Bytes sent that it has not confirmed to have received. */
  get unsentBytes(): number {
    return this.#seat.channel.unsentBytes;
  }

  /** Rejects with RemoteError (`lost` when the peer is gone), or with ProtocolError when the request is ill-formed. */
  request<K extends RequestKind>(
    kind: K,
    fields: Fields<K>,
    frames?: Frames<K>,
    options: RequestOptions = {},
  ): Promise<Answer<K>> {
    return this.#seat.channel.request(kind, fields as AnyFields, (frames ?? {}) as AnyFrames, options) as Promise<
      Answer<K>
    >;
  }

  /** Events to a lost peer are dropped and counted. Throws ProtocolError when ill-formed. */
  send<K extends EventKind>(kind: K, fields: Fields<K>, frames?: Frames<K>): void {
    this.#seat.channel.send(kind, fields as AnyFields, frames as AnyFrames | undefined);
  }

  /** Handlers of one kind are called in the order they were added. They must not throw. */
  on<K extends EventKind>(kind: K, handler: EventHandler<K>): void {
    this.#seat.channel.on(kind, handler);
  }

  /** One handler per kind; calls start in the order of arrival and run concurrently. */
  handle<K extends RequestKind>(kind: K, handler: RequestHandler<K>): void {
    this.#seat.channel.handle(kind, handler);
  }

  /** For those who see what the bus cannot: a process that exited, a silence. May be called twice; the first counts. */
  declareLost(reason: string): void {
    this.#seat.declareLost(reason);
  }
}

export interface ListenOptions {
  readonly heartbeatMs?: number; // told to workers in `welcome`
  readonly endpoint?: string; // default: loopback
  readonly port?: number; // of the default endpoint; 0 or absent: a free one
  readonly onError?: (error: Error) => void; // errors of event handlers; default: end the process
}

/** The controller's end. `listen` starts it, `close` ends it; workers are launched elsewhere (launch.ts). */
export class Bus {
  readonly endpoint: string;
  readonly counters: Counters = newCounters();
  readonly #socket: Router;
  readonly #heartbeatMs: number;
  readonly #onError: (error: Error) => void;
  readonly #seats = new Map<string, Seat>(); // by worker id: its newest process
  readonly #links = new Map<string, Seat>(); // by routing id, from hello until lost
  readonly #ended = new Set<string>(); // routing ids refused or lost: nothing of theirs is read any more
  readonly #loop: Promise<void>;
  #closed = false;

  static async listen(options: ListenOptions = {}): Promise<Bus> {
    const endpoint = options.endpoint ?? `tcp://127.0.0.1:${options.port || '*'}`;
    if (!isLoopback(endpoint)) {
      throw new Error(`Cannot listen on ${endpoint}: without encryption only loopback addresses are served`);
    }
    const socket = new Router({
      mandatory: true,
      handover: true,
      linger: BUS_LINGER_MS,
      sendHighWaterMark: 0,
      receiveHighWaterMark: 0,
      sendTimeout: 0, // a send is handed over at once or fails, so no queue is needed here
      heartbeatInterval: ZMTP_HEARTBEAT_MS,
      heartbeatTimeout: ZMTP_TIMEOUT_MS,
    });
    await socket.bind(endpoint);
    return new Bus(socket, options);
  }

  /** Use Bus.listen. */
  constructor(socket: Router, options: ListenOptions) {
    invariant(socket.lastEndpoint, 'the bus is made of a bound socket');
    this.endpoint = socket.lastEndpoint;
    this.#socket = socket;
    this.#heartbeatMs = options.heartbeatMs ?? HEARTBEAT_MS;
    this.#onError = options.onError ?? crash;
    const loop = receiveAll(socket, (parts) => this.#onMessages(parts));
    this.#loop = loop.catch((error) => this.#onError(asError(error)));
  }

  /** Announce a worker before its process starts. The same id again replaces the process before it. */
  expect(workerId: string, secret: string, options: Json): Peer {
    // Ill-formed options are found here, at the caller, and not when the worker says hello.
    encode({ kind: 'welcome', seq: 0, fields: { incarnation: 0, options, heartbeat_ms: this.#heartbeatMs } });
    const before = this.#seats.get(workerId);
    before?.declareLost('replaced by a new process');
    const seat: Seat = {
      workerId,
      incarnation: before ? before.incarnation + 1 : 0,
      secret,
      options,
      channel: new Channel({
        letter: 'C',
        peerName: workerId,
        counters: this.counters,
        onError: this.#onError,
        onBroken: (reason) => this.#lose(seat, reason),
        hold: false,
      }),
      hello: deferred(),
      ready: deferred(),
      lost: deferred(),
      declareLost: (reason) => this.#lose(seat, reason),
      flush: () => {},
      lostReason: null,
      isReady: false,
      lastHeard: performance.now(),
      stats: {},
    };
    seat.channel.on('ready', ({ info }) => {
      seat.isReady = true;
      seat.ready.resolve(info);
    });
    seat.channel.on('heartbeat', ({ received, stats }) => {
      seat.stats = stats;
      seat.channel.acknowledge(received);
    });
    this.#seats.set(workerId, seat);
    return new Peer(seat);
  }

  #lose(seat: Seat, reason: string): void {
    if (seat.lostReason) return;
    seat.lostReason = new Error(`${seat.workerId}: ${reason}`);
    seat.flush();
    add(this.counters, 'lost');
    for (const [routingId, other] of this.#links) {
      if (other !== seat) continue;
      this.#links.delete(routingId);
      this.#ended.add(routingId);
    }
    seat.channel.close(seat.lostReason.message);
    seat.hello.reject(seat.lostReason);
    seat.ready.reject(seat.lostReason);
    seat.lost.resolve(seat.lostReason);
  }

  /** Yields after each message whether it was a reply. */
  *#onMessages([routing, ...parts]: Buffer[]): Generator<boolean> {
    invariant(routing, 'a ROUTER message starts with its routing id');
    const routingId = routing.toString('latin1');
    try {
      for (const opened of openMessages(parts)) {
        if (this.#ended.has(routingId)) {
          add(this.counters, 'after_end');
          continue;
        }
        const seat = this.#links.get(routingId);
        if (seat) seat.lastHeard = performance.now();
        else this.#welcome(routing, routingId, opened);
        yield seat ? seat.channel.receive(opened) : false;
      }
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      const seat = this.#links.get(routingId);
      if (seat) this.#lose(seat, error.message);
      else if (this.#ended.has(routingId)) add(this.counters, 'after_end');
      else this.#refuse(routing, routingId, error.message);
    }
  }

  /** The first message of a process. Throws ProtocolError when it is not welcome. */
  #welcome(routing: Buffer, routingId: string, opened: Opened): void {
    if (opened.kind !== 'hello' || opened.seq !== 0) throw new ProtocolError(`Expected hello, got ${opened.kind}`);
    const hello = decodeBody(opened).fields as unknown as Fields<'hello'>;
    if (hello.protocol_version !== PROTOCOL_VERSION) {
      throw new ProtocolError(`Protocol version ${hello.protocol_version}, this side speaks ${PROTOCOL_VERSION}`);
    }
    const seat = this.#seats.get(hello.worker_id);
    if (!seat || seat.lostReason) throw new ProtocolError(`No worker ${hello.worker_id} is expected`);
    if (!routingId.startsWith(`${hello.worker_id}.`)) throw new ProtocolError('Routing id and worker id differ');
    if (!equalSecrets(seat.secret, hello.secret)) throw new ProtocolError(`Wrong secret for ${hello.worker_id}`);
    if (seat.channel.isOpen) throw new ProtocolError(`${hello.worker_id} is already connected`);
    const letter = Object.hasOwn(LETTERS, hello.worker_kind) ? LETTERS[hello.worker_kind] : undefined;
    if (!letter) throw new ProtocolError(`Unknown worker kind ${hello.worker_kind}`);
    this.#links.set(routingId, seat);
    seat.lastHeard = performance.now();
    const outbox = new Outbox((parts) => this.#transmit(seat, [routing, ...parts]));
    seat.flush = () => outbox.flush();
    seat.channel.open((parts) => outbox.put(parts), letter, 1);
    const { incarnation, options } = seat;
    seat.channel.send('welcome', { incarnation, options, heartbeat_ms: this.#heartbeatMs });
    seat.hello.resolve(hello);
  }

  #refuse(routing: Buffer, routingId: string, reason: string): void {
    add(this.counters, 'refused');
    this.#ended.add(routingId);
    const message = [routing, ...encode({ kind: 'refused', seq: 0, fields: { reason } })];
    this.#socket.send(message).catch(() => {}); // it may be gone already
  }

  #transmit(seat: Seat, message: Buffer[]): void {
    if (this.#closed) return;
    this.#socket.send(message).catch((error: Error) => {
      setTimeout(() => this.#lose(seat, `its link is gone (${error.message})`), LINK_GONE_MS).unref();
    });
  }

  /** Every peer is lost afterwards; the port is free when it resolves. May be called twice. */
  async close(): Promise<void> {
    if (!this.#closed) {
      for (const seat of this.#seats.values()) this.#lose(seat, 'the bus was closed');
      this.#closed = true;
      // The I/O thread closes the port in its own time; unbind is no help, it races with the receive in progress.
      const freed = new Promise<void>((resolve) => this.#socket.events.on('end', () => resolve()));
      this.#socket.close();
      await Promise.race([freed, sleep(CLOSE_MS, undefined, { ref: false })]);
    }
    await this.#loop;
  }
}

// ---- Worker side ----

/** The controller did not want this process: other version, other secret, nobody of that name expected. */
export class RefusedError extends Error {}

export interface ConnectArgs {
  readonly endpoint: string;
  readonly workerId: string;
  readonly secret: string;
  readonly workerKind: string;
  readonly capabilities: Json;
  /** A lost link ends the process and its group, a refused one exits 3; unless this is given (tests). */
  readonly onLost?: (reason: string) => void;
  readonly onError?: (error: Error) => void; // errors of event handlers; default: end the process
  readonly copies?: () => number; // of the next message to the controller; a scripted failure loses or repeats some
}

/**
 * A worker's end, for workers written in TypeScript. `ping`, `stacks`, `stats`, `cancel` and `stop` are answered here.
 * Requests and events that arrive before `ready` wait for it, so handlers may be registered after `connect`.
 */
export class WorkerLink {
  /** Published with heartbeats; write into it or replace it. */
  stats: Record<string, number> = {};
  readonly counters: Counters = newCounters();
  readonly #args: ConnectArgs;
  readonly #socket: Dealer;
  readonly #outbox: Outbox;
  readonly #channel: Channel;
  readonly #welcomed = deferred<Fields<'welcome'>>();
  readonly #stopped = deferred<void>();
  #welcome: Fields<'welcome'> | null = null;
  #closed = false;
  #heartbeat: NodeJS.Timeout | undefined;
  #unacknowledged = 0; // bytes since the last heartbeat

  /** Resolves after `welcome`. A refusal prints its reason and exits 3. */
  static async connect(args: ConnectArgs): Promise<WorkerLink> {
    const link = new WorkerLink(args);
    await link.#welcomed.promise;
    return link;
  }

  /** Use WorkerLink.connect. */
  constructor(args: ConnectArgs) {
    this.#args = args;
    this.#socket = new Dealer({
      routingId: `${args.workerId}.${randomBytes(16).toString('hex')}`,
      linger: LINK_LINGER_MS,
      sendHighWaterMark: 0,
      receiveHighWaterMark: 0,
      sendTimeout: 0,
      heartbeatInterval: ZMTP_HEARTBEAT_MS,
      heartbeatTimeout: ZMTP_TIMEOUT_MS,
      reconnectInterval: -1,
    });
    const lose = (reason: string) => this.#lose(reason);
    this.#channel = new Channel({
      letter: LETTERS[args.workerKind] ?? '',
      peerName: 'the controller',
      counters: this.counters,
      onError: args.onError ?? crash,
      onBroken: lose,
      hold: true,
    });
    this.#outbox = new Outbox((parts) => this.#transmit(parts));
    const put = (parts: Buffer[]) => {
      for (let n = args.copies?.() ?? 1; n > 0; n--) this.#outbox.put(parts);
    };
    this.#channel.open(put, 'C', 0);
    this.#answerLanes();
    for (const event of ['disconnect', 'close'] as const) {
      this.#socket.events.on(event, () => lose(LINK_GONE));
    }
    this.#socket.connect(args.endpoint);
    this.#channel.send('hello', {
      protocol_version: PROTOCOL_VERSION,
      worker_kind: args.workerKind,
      worker_id: args.workerId,
      pid: process.pid,
      host: hostname(),
      secret: args.secret,
      capabilities: args.capabilities,
    });
    const loop = receiveAll(this.#socket, (parts) => this.#onMessages(parts));
    loop.catch((error) => (args.onError ?? crash)(asError(error)));
  }

  get options(): Json {
    invariant(this.#welcome, 'a link is given out after welcome');
    return this.#welcome.options;
  }
  get incarnation(): number {
    invariant(this.#welcome, 'a link is given out after welcome');
    return this.#welcome.incarnation;
  }
  /** Resolves when `stop` was received (and answered). The caller then finishes, closes and exits. */
  get stopped(): Promise<void> {
    return this.#stopped.promise;
  }

  /** Model loaded, handlers registered: what waited is handled now. */
  ready(info: Json): void {
    this.#channel.send('ready', { info });
    this.#channel.release();
  }

  /** As Peer.request; the signal stops the waiting here but tells the controller nothing. */
  request<K extends RequestKind>(
    kind: K,
    fields: Fields<K>,
    frames?: Frames<K>,
    options: RequestOptions = {},
  ): Promise<Answer<K>> {
    return this.#channel.request(kind, fields as AnyFields, (frames ?? {}) as AnyFrames, options) as Promise<Answer<K>>;
  }
  /** As Peer.send. */
  send<K extends EventKind>(kind: K, fields: Fields<K>, frames?: Frames<K>): void {
    this.#channel.send(kind, fields as AnyFields, frames as AnyFrames | undefined);
  }
  /** As Peer.on. */
  on<K extends EventKind>(kind: K, handler: EventHandler<K>): void {
    this.#channel.on(kind, handler);
  }
  /** As Peer.handle. */
  handle<K extends RequestKind>(kind: K, handler: RequestHandler<K>): void {
    this.#channel.handle(kind, handler);
  }

  /** No heartbeat from now on: a scripted failure. */
  mute(): void {
    clearInterval(this.#heartbeat);
  }

  /** What was sent before still goes out, even when the process exits next. May be called twice. */
  async close(): Promise<void> {
    if (this.#closed) return;
    this.#outbox.flush();
    this.#closed = true;
    clearInterval(this.#heartbeat);
    this.#channel.close('the link was closed');
    this.#socket.close();
  }

  #answerLanes(): void {
    const nothing = { fields: {}, frames: {} };
    this.#channel.on('welcome', (welcome) => {
      this.#welcome = welcome;
      this.#heartbeat = setInterval(() => this.#beat(), welcome.heartbeat_ms);
      this.#beat();
      this.#welcomed.resolve(welcome);
    });
    this.#channel.on('refused', ({ reason }) => this.#lose(reason));
    this.#channel.handle('ping', async () => nothing);
    this.#channel.handle('stacks', async () => ({
      fields: { text: `${this.#channel.describe()}\n${stacks()}` },
      frames: {},
    }));
    this.#channel.handle('stats', async () => ({ fields: { stats: this.#finiteStats() }, frames: {} }));
    this.#channel.handle('cancel', async ({ request }) => {
      this.#channel.cancelRunning(request);
      return nothing;
    });
    this.#channel.handle('stop', async () => {
      setImmediate(() => this.#stopped.resolve()); // the answer goes first
      return nothing;
    });
  }

  #beat(): void {
    this.#unacknowledged = 0;
    this.#channel.send('heartbeat', { received: this.#channel.received, stats: this.#finiteStats() });
  }

  #finiteStats(): Record<string, number> {
    const finite = Object.entries(this.stats).filter(([, value]) => Number.isFinite(value));
    const dropped = Object.keys(this.stats).length - finite.length;
    return { ...Object.fromEntries(finite), ...(dropped > 0 && { wire_stats_not_finite: dropped }) };
  }

  /** Yields after each message whether it was a reply. */
  *#onMessages(parts: Buffer[]): Generator<boolean> {
    this.#unacknowledged += parts.reduce((sum, part) => sum + part.length, 0);
    try {
      for (const opened of openMessages(parts)) yield this.#channel.receive(opened);
      if (this.#unacknowledged >= ACK_BYTES && this.#welcome) this.#beat();
    } catch (error) {
      if (!(error instanceof ProtocolError)) throw error;
      this.#lose(error.message); // before welcome most likely the other version, which the message names
    }
  }

  #transmit(parts: Buffer[]): void {
    // Without a limit on what is queued, a send fails only where nobody is connected.
    if (!this.#closed) this.#socket.send(parts).catch(() => this.#lose(LINK_GONE));
  }

  #lose(reason: string): void {
    if (this.#closed) return;
    const refused = this.#welcome === null;
    void this.close(); // never rejects
    this.#welcomed.reject(new RefusedError(reason));
    if (this.#args.onLost) return this.#args.onLost(reason);
    console.error(`${this.#args.workerId} ${refused ? 'refused' : 'ends'}: ${reason}`);
    if (refused) process.exit(EXIT_REFUSED);
    killOwnGroup();
  }
}

// ---- The process of a worker written in TypeScript ----

export interface WorkerArgs {
  readonly endpoint: string;
  readonly workerIds: string[]; // several when one process hosts several workers
  readonly secrets: Record<string, string>; // by worker id
}

/**
 * Reads argv and the first line of stdin, then watches stdin for the end of the parent. Call it once, first thing in
 * main. SIGUSR1 prints the stack from here on, instead of opening Node's debugger.
 */
export async function readWorkerArgs(): Promise<WorkerArgs> {
  let endpoint = '';
  const workerIds: string[] = [];
  const argv = process.argv.slice(2);
  for (let i = 0; i < argv.length; i += 2) {
    const value = argv[i + 1] ?? '';
    if (argv[i] === '--endpoint') endpoint = value;
    else if (argv[i] === '--worker-id') workerIds.push(value);
    else throw new Error(`Unknown argument ${argv[i]}: a worker takes --endpoint and --worker-id`);
  }
  if (!endpoint || workerIds.length === 0) throw new Error('A worker needs --endpoint and --worker-id');
  process.on('SIGUSR1', () => console.error(stacks()));
  const line = JSON.parse(readFirstLine()) as { secret?: string; secrets?: Record<string, string> };
  const secrets = line.secrets ?? Object.fromEntries(workerIds.map((id) => [id, line.secret ?? '']));
  watchParent();
  return { endpoint, workerIds, secrets };
}

/** Byte by byte, so that nothing behind the line is lost to a buffer. */
function readFirstLine(): string {
  const byte = Buffer.alloc(1);
  const bytes: number[] = [];
  while (readSync(0, byte, 0, 1, null) === 1) {
    if (byte[0] === 0x0a) return Buffer.from(bytes).toString();
    bytes.push(byte[0] as number);
  }
  throw new Error('The parent closed stdin before it sent the secret');
}

/** With the link the controller may be gone, too: what this process started must not be left behind. */
function killOwnGroup(): void {
  try {
    process.kill(-process.pid, 'SIGKILL');
  } catch {
    process.exit(1); // it leads no group
  }
}

/** A thread of its own: the event loop may be held up by an agent's code just when the parent dies. */
function watchParent(): void {
  const program = `
    const { Socket } = require('node:net');
    const die = () => {
      try {
        process.kill(-process.pid, 'SIGKILL'); // the group: programs that the worker started, too
      } finally {
        process.kill(process.pid, 'SIGKILL'); // where the process leads no group
      }
    };
    new Socket({ fd: 0, readable: true, writable: false }).on('end', die).on('error', die).resume();`;
  new Worker(program, { eval: true, execArgv: [], env: {}, stdin: false }).unref();
}

function stacks(): string {
  return `Event loop of process ${process.pid}\n${new Error('now').stack}\nOpen: ${process.getActiveResourcesInfo().join(' ')}`;
}

// ---- Helpers ----

/** Leave the stack of the receive loop, so that the process ends by an uncaught exception that shows the bug. */
function crash(error: Error): void {
  setImmediate(() => {
    throw error;
  });
}

interface Deferred<T> {
  readonly promise: Promise<T>;
  readonly resolve: (value: T) => void;
  readonly reject: (error: Error) => void;
}

function deferred<T>(): Deferred<T> {
  let resolve: (value: T) => void = () => {};
  let reject: (error: Error) => void = () => {};
  const promise = new Promise<T>((res, rej) => {
    resolve = res;
    reject = rej;
  });
  promise.catch(() => {}); // nobody has to await it
  return { promise, resolve, reject };
}

function isLoopback(endpoint: string): boolean {
  return /^tcp:\/\/(127\.\d+\.\d+\.\d+|localhost|\[::1\]):(\d+|\*)$/.test(endpoint);
}

function equalSecrets(a: string, b: string): boolean {
  const [left, right] = [Buffer.from(a), Buffer.from(b)];
  return left.length === right.length && timingSafeEqual(left, right);
}

/** Hands over what arrives until the socket is closed. `onMessages` yields after each message whether it was a reply. */
async function receiveAll(socket: Router | Dealer, onMessages: (parts: Buffer[]) => Iterable<boolean>): Promise<void> {
  let sliceEnd = 0;
  while (!socket.closed) {
    let parts: Buffer[];
    try {
      parts = await socket.receive();
    } catch (error) {
      if (socket.closed) return; // closing ends a receive in progress
      throw error;
    }
    for (const isReply of onMessages(parts)) {
      if (performance.now() > sliceEnd) {
        await nextTurn();
        sliceEnd = performance.now() + SLICE_MS;
      } else if (isReply) {
        await ticked(); // awaiting code goes first (invariant 3)
      }
    }
  }
}

/** Resolves when no promise is left whose turn has come: much cheaper than a turn of the event loop. */
function ticked(): Promise<void> {
  return new Promise((resolve) => process.nextTick(resolve));
}
