/**
 * Engines as one: sample a turn somewhere, whatever happens to the engine that does it.
 *
 *   turn -> queue -> engine (affinity, then least loaded) -> tokens... -> ended -> turn result
 *                      |
 *                      +-- engine lost or stalled: the request continues elsewhere from the tokens it already has
 *
 * Invariants
 *   1. A request ends exactly once; its ids are the concatenation of what engines streamed, in order.
 *   2. Every sampled token carries the version in the event that brought it (never the version of now).
 *   3. No engine gets more than its limit (concurrency.ts); the rest wait here, first come first served.
 *   4. A (re)started engine takes part only after `join` has given it the current weights.
 *   5. An engine that has requests and makes no step for stallMs, by this process's own clock, is killed.
 *   6. What a paused engine says it sampled is what came from it, or it is killed.
 *   7. Expert routes of a turn are all of one engine, which sampled all of its tokens, or there are none: what a lost engine
 *      sampled was routed by weights and numerics that no other can repeat.
 * Called by dispatch.ts (turns), refit.ts (pause, load, resume) and loop.ts (start, close). Talks to engines
 * (protocol.ts: generate, tokens, abort). Elsewhere called: router, inference client, rollout engine.
 */
import { setTimeout as sleep } from 'node:timers/promises';
import type { Peer } from './bus.ts';
import { ConcurrencyLimit } from './concurrency.ts';
import type { Launcher, Worker, WorkerSpec } from './launch.ts';
import { lastWords } from './launch.ts';
import type { Fields, Frames, ReplyFrames } from './protocol.ts';
import { RemoteError } from './protocol.ts';
import type { SampledTurn } from './session.ts';
import type { Sampling } from './types.ts';
import { invariant } from './types.ts';

/** Prefer the engine that served the session unless it has this many more requests than the emptiest one. */
const AFFINITY_SLACK = 8;
/** Longest turn of the clock that looks for stalled engines. However late one comes, it counts as one. */
const WATCH_MS = 500;
/** Requests of evaluations have ids that begin so (evaluate.ts); their tokens are not counted. */
const EVALUATION = 'eval';
const FIRST_CAPACITY = 512; // tokens; a longer turn doubles it

export interface TurnRequest {
  readonly rolloutId: string;
  readonly attempt: number;
  readonly turn: number;
  readonly sessionId: string;
  readonly sampling: Sampling;
  readonly prompt: Int32Array;
  readonly wantRoutes?: boolean; // default: no. Engines that have none refuse it
}

/** Expert ids of every token of a turn, its prompt included, but the last: a blob (protocol.ts). */
type Routes = Fields<'tokens'>['ended'][number]['routes'];

export interface TurnResult extends SampledTurn {
  readonly reason: 'stop' | 'length' | 'abort' | 'error';
  readonly detail: string | null;
  readonly engine: string;
  readonly cachedTokens: number;
  readonly routes: Routes; // null = not wanted, or missing (invariant 7), which is an event
}

/** A request that has not ended, with the tokens it has so far. */
interface Live {
  readonly request: TurnRequest;
  readonly resolve: (result: TurnResult) => void;
  readonly sampled: Sampled;
  readonly maxTokens: number;
  readonly spans: { readonly version: number; readonly from: number; to: number }[]; // `to`: closeSpan
  version: number; // of the last span, -1 = none yet
  readonly only: Engine | null; // the one that may sample it, null = any
  readonly isCounted: boolean;
  cachedTokens: number;
  aborted: boolean;
  engine: Engine | null;
  already: number; // tokens it had when it was sent to that engine
  handle: number | null; // known once the engine has answered
}

/**
 * Tokens of a request. Thousands of requests grow by one token many times a second, so an event must touch little memory of
 * each: id and logprob lie side by side in one array, which doubles when it is full.
 */
class Sampled {
  #pairs: Int32Array; // id, bits of the logprob
  length = 0;

  constructor(capacity: number) {
    this.#pairs = new Int32Array(2 * capacity);
  }

  append(ids: Int32Array, bits: Int32Array, from: number, to: number): void {
    const length = this.length + to - from;
    if (2 * length > this.#pairs.length) this.#reserve(2 * length);
    const pairs = this.#pairs;
    for (let k = from, at = 2 * this.length; k < to; k++) {
      pairs[at++] = ids[k] as number;
      pairs[at++] = bits[k] as number;
    }
    this.length = length;
  }

  #reserve(capacity: number): void {
    const old = this.#pairs;
    this.#pairs = new Int32Array(2 * capacity);
    this.#pairs.set(old);
  }

  get ids(): Int32Array {
    return this.#column(0);
  }
  get logprobs(): Float32Array {
    return new Float32Array(this.#column(1).buffer);
  }

  #column(at: 0 | 1): Int32Array {
    const out = new Int32Array(this.length);
    for (let k = 0; k < out.length; k++) out[k] = this.#pairs[2 * k + at] as number;
    return out;
  }
}

export class Engine {
  readonly worker: Worker;
  readonly index: number;
  readonly limit: ConcurrencyLimit;
  readonly sent = new Set<Live>();
  readonly byHandle = new Map<number, Live>();
  accepting = false; // has the current weights and is not being stopped
  joined = false; // was accepting once: only then is its loss news to us, before that to whoever starts it
  paused = false;
  steps = 0; // as of its last heartbeat
  ended = 0; // requests
  stuckMs = 0; // since its last step, while it had something to do

  constructor(worker: Worker, index: number, maxRequests: number) {
    this.worker = worker;
    this.index = index;
    this.limit = new ConcurrencyLimit(maxRequests);
  }
  get peer(): Peer {
    return this.worker.peer;
  }
}

export interface GeneratorHooks {
  /** Bring a new engine to the current weights. Rejects when that fails: the engine is then killed. */
  readonly join: (engine: Engine) => Promise<void>;
  readonly event: (name: string, detail: Record<string, string | number>) => void;
}

export class Generator {
  readonly #launcher: Launcher;
  readonly #spec: (index: number) => WorkerSpec;
  readonly #hooks: GeneratorHooks;
  readonly #maxRestarts: number;
  readonly #maxRequests: number; // of one engine; it refuses more
  readonly #stallMs: number;
  readonly #watchMs: number;
  readonly #watch: NodeJS.Timeout;
  #lastWatch = performance.now();
  readonly #engines = new Set<Engine>();
  readonly #affinity = new Map<string, number>(); // session -> engine index
  readonly #live = new Map<string, Live>(); // by rollout, attempt and turn
  #queue: Live[] = [];
  readonly #restarts = new Map<number, number>(); // by engine index
  #starting = 0; // restarts under way
  #closed = false;
  #held = false;
  #reject: (error: Error) => void = () => {};
  /** Rejects when sampling cannot go on: no engine is left and none may be started. Never resolves. */
  readonly failed: Promise<never>;

  // Since the last `takeCounts`; those of tokens without evaluations
  #tokens = 0;
  #cachedTokens = 0;
  #promptTokens = 0;
  #preemptions = 0;
  #killed = 0;
  #busySince: number | null = null;
  #busyMs = 0;

  constructor(args: {
    launcher: Launcher;
    spec: (index: number) => WorkerSpec;
    maxRequests: number;
    maxRestarts: number;
    stallMs?: number; // default: an engine may take as long as it likes
    hooks: GeneratorHooks;
  }) {
    this.#launcher = args.launcher;
    this.#spec = args.spec;
    this.#maxRestarts = args.maxRestarts;
    this.#maxRequests = args.maxRequests;
    this.#hooks = args.hooks;
    this.#stallMs = args.stallMs ?? Number.POSITIVE_INFINITY;
    this.#watchMs = Math.min(WATCH_MS, this.#stallMs / 4);
    this.#watch = setInterval(() => this.#findStalled(), this.#watchMs).unref();
    this.failed = new Promise((_, reject) => {
      this.#reject = reject;
    });
    this.failed.catch(() => {}); // a run that ends for another reason never looks at it
  }

  get engines(): readonly Engine[] {
    return [...this.#engines].filter((engine) => engine.accepting);
  }
  get restarts(): number {
    return [...this.#restarts.values()].reduce((a, b) => a + b, 0);
  }
  get waiting(): number {
    return this.#queue.length;
  }
  /** Sampled since the last `takeCounts`. */
  get tokens(): number {
    return this.#tokens;
  }
  /** Rises with every event of an engine. */
  activity = 0;

  /** Who waits for whom, a line for each engine. */
  describe(): string[] {
    const engines = [...this.#engines].map(({ worker, sent, accepting }) => {
      return `  ${worker.spec.id}: ${sent.size} requests${accepting ? '' : ', takes no new ones'}`;
    });
    return [
      `  ${this.#queue.length} turns wait for an engine${this.#held ? ', held until the refit' : ''}`,
      ...engines,
    ];
  }

  /** Resolves when there is one that samples; rejects when there can be none. */
  async anyEngine(): Promise<void> {
    while (this.engines.length === 0) await Promise.race([sleep(20), this.failed]);
  }

  /** Start an engine process. Resolves when it has joined; rejects with the cause when it cannot. */
  async startEngine(index: number): Promise<Engine> {
    const [engine] = await this.startEngines([index]);
    invariant(engine, 'one index makes one engine');
    return engine;
  }

  /** Several in one process, which simulated ones can be. */
  async startEngines(indexes: readonly number[]): Promise<Engine[]> {
    const workers = this.#launcher.startMany(indexes.map((index) => this.#spec(index)));
    return Promise.all(workers.map((worker, i) => this.adopt(worker, indexes[i] as number)));
  }

  /** As `startEngine`, for a process that launch.ts has already started. */
  async adopt(worker: Worker, index: number): Promise<Engine> {
    const lost = worker.peer.lost.then((reason) => {
      throw new Error(`Engine ${worker.spec.id} died while starting: ${reason.message}\n${lastWords(worker)}`);
    });
    lost.catch(() => {});
    await Promise.race([worker.peer.ready, lost]);
    const engine = new Engine(worker, index, this.#maxRequests);
    worker.peer.on('tokens', (fields, frames) => this.#onTokens(engine, fields, frames));
    worker.peer.on('heartbeat', ({ stats }) => this.#onHeartbeat(engine, stats));
    this.#engines.add(engine);
    void worker.peer.lost.then((reason) => this.#onLost(engine, reason)); // lost never rejects
    await this.#hooks.join(engine);
    if (worker.peer.isLost)
      throw new Error(`Engine ${worker.spec.id} died while joining: ${(await worker.peer.lost).message}`);
    engine.accepting = true;
    engine.joined = true;
    this.#pump();
    return engine;
  }

  /** Sample one turn. Resolves with reason abort after `abort`; never rejects. */
  generate(request: TurnRequest): Promise<TurnResult> {
    return this.#enqueue(request, null);
  }

  /** The same on this very engine, for checks of it: counted nowhere, no session. Ends with abort when the engine is lost. */
  generateOn(engine: Engine, request: TurnRequest): Promise<TurnResult> {
    return this.#enqueue(request, engine);
  }

  #enqueue(request: TurnRequest, only: Engine | null): Promise<TurnResult> {
    return new Promise((resolve) => {
      const live: Live = {
        request,
        resolve,
        sampled: new Sampled(Math.min(request.sampling.max_tokens, FIRST_CAPACITY)),
        maxTokens: request.sampling.max_tokens,
        spans: [],
        version: -1,
        only,
        isCounted: only === null && !request.rolloutId.startsWith(EVALUATION),
        cachedTokens: 0,
        aborted: false,
        engine: null,
        already: 0,
        handle: null,
      };
      this.#live.set(keyOf(request), live);
      if (only?.peer.isLost) return this.#end(live, 'abort', 'its engine was lost', '');
      this.#queue.push(live);
      if (live.isCounted) this.#promptTokens += request.prompt.length;
      if (!this.#held) this.#busySince ??= performance.now();
      this.#pump();
    });
  }

  /** Turns that come from now on wait here, whatever engines could do, until `release`. */
  hold(): void {
    this.#held = true;
  }

  release(): void {
    this.#held = false;
    if (this.#live.size > 0) this.#busySince ??= performance.now();
    this.#pump();
  }

  /** End a turn with what it has. No effect when it has already ended. */
  abort(request: { rolloutId: string; attempt: number; turn: number }): void {
    const live = this.#live.get(keyOf(request));
    if (!live) return;
    live.aborted = true;
    if (!live.engine) {
      this.#queue = this.#queue.filter((other) => other !== live);
      this.#end(live, 'abort', 'aborted while it waited for an engine', '');
    } else if (live.handle !== null) {
      this.#sendAbort(live.engine, live.handle);
    } // else: sent, handle not yet known; #send aborts when it is
  }

  /** Kill an engine whose weights cannot be trusted, after its stacks where it hangs. Its requests go on elsewhere. */
  async kill(engine: Engine, why: string, isHung = false): Promise<void> {
    engine.accepting = false;
    if (!engine.peer.isLost) {
      this.#killed++;
      this.#hooks.event('engine_killed', { engine: engine.worker.spec.id, why });
    }
    await (isHung ? this.#launcher.condemn(engine.worker, why) : this.#launcher.kill(engine.worker));
  }

  /**
   * After its reply to `pause`: for every request the engine must have sampled what has come from it. Throws where it has
   * not. Until `resumed` the engine makes no steps.
   */
  paused(engine: Engine, { handles, totals }: ReplyFrames<'pause'>): void {
    engine.paused = true;
    for (const [i, handle] of handles.entries()) {
      const live = engine.byHandle.get(handle);
      const came = live ? live.sampled.length - live.already : 'no such request';
      if (came !== totals[i])
        throw new Error(
          `Tokens of ${engine.worker.spec.id} are lost: handle ${handle} sampled ${totals[i]}, came: ${came}`,
        );
    }
    if (handles.length !== engine.byHandle.size)
      throw new Error(`${engine.worker.spec.id} knows ${handles.length} requests of ${engine.byHandle.size}`);
  }

  resumed(engine: Engine): void {
    engine.paused = false;
  }

  /** Statistics since the last call; times in seconds. */
  takeCounts(): {
    tokens: number;
    cachedTokens: number;
    promptTokens: number;
    busy_s: number;
    preemptions: number;
    killed: number;
    limitMean: number; // of now
  } {
    const now = performance.now();
    if (this.#busySince !== null) {
      this.#busyMs += now - this.#busySince;
      this.#busySince = now;
    }
    const limits = [...this.#engines].map(({ limit }) => limit.value);
    const out = {
      tokens: this.#tokens,
      cachedTokens: this.#cachedTokens,
      promptTokens: this.#promptTokens,
      busy_s: this.#busyMs / 1000,
      preemptions: this.#preemptions,
      killed: this.#killed,
      limitMean: limits.reduce((a, b) => a + b, 0) / Math.max(1, limits.length),
    };
    this.#tokens = this.#cachedTokens = this.#promptTokens = this.#busyMs = this.#preemptions = this.#killed = 0;
    return out;
  }

  close(): void {
    this.#closed = true;
    clearInterval(this.#watch);
    for (const live of [...this.#live.values()]) this.#end(live, 'abort', 'the run is ending', '');
    this.#queue = [];
  }

  // ---- Sending ----

  #pump(): void {
    while (this.#queue.length > 0 && !this.#held) {
      const engine = this.#choose(this.#queue[0] as Live);
      if (!engine) return;
      const live = this.#queue.shift() as Live;
      live.engine = engine;
      engine.sent.add(live);
      if (live.only === null) this.#affinity.set(live.request.sessionId, engine.index);
      void this.#send(engine, live); // handles its own errors
    }
  }

  #choose(live: Live): Engine | null {
    const { only } = live;
    if (only) return only.accepting && only.sent.size < only.limit.value ? only : null;
    let best: Engine | null = null;
    let same: Engine | null = null;
    const wanted = this.#affinity.get(live.request.sessionId);
    for (const engine of this.#engines) {
      if (!engine.accepting || engine.sent.size >= engine.limit.value) continue;
      if (!best || engine.sent.size < best.sent.size) best = engine;
      if (engine.index === wanted) same = engine;
    }
    return same && best && same.sent.size - best.sent.size <= AFFINITY_SLACK ? same : best;
  }

  async #send(engine: Engine, live: Live): Promise<void> {
    const { request } = live;
    const already = live.sampled.length;
    live.already = already;
    const prompt = already ? joined(request.prompt, live.sampled.ids) : request.prompt;
    try {
      const { fields } = await engine.peer.request(
        'generate',
        {
          rollout_id: request.rolloutId,
          attempt: request.attempt,
          turn: request.turn,
          session_id: request.sessionId,
          sampling: { ...request.sampling, max_tokens: request.sampling.max_tokens - already },
          already,
          want_text: false,
          heads: 0,
          want_routes: (request.wantRoutes ?? false) && already === 0,
        },
        { prompt },
      );
      if (!engine.sent.has(live)) return; // the engine was lost meanwhile; #onLost has moved the request
      live.handle = fields.handle;
      engine.byHandle.set(fields.handle, live);
      if (live.aborted && engine.sent.has(live)) this.#sendAbort(engine, fields.handle);
    } catch (error) {
      if (!engine.sent.delete(live)) return;
      if (error instanceof RemoteError && (error.type === 'lost' || error.type === 'overloaded'))
        return this.#requeue(live);
      this.#end(live, 'error', (error as Error).message, engine.worker.spec.id);
    }
  }

  #sendAbort(engine: Engine, handle: number): void {
    // A lost engine ends the request through #onLost, so an error here has nothing to add.
    engine.peer.request('abort', { handles: [handle] }).catch(() => {});
  }

  // ---- Receiving ----

  #onTokens(engine: Engine, fields: Fields<'tokens'>, frames: Frames<'tokens'>): void {
    this.activity++;
    engine.stuckMs = 0;
    const { handles, counts, ids, logprobs } = frames;
    const bits = new Int32Array(logprobs.buffer, logprobs.byteOffset, logprobs.length);
    let at = 0;
    for (let i = 0; i < handles.length; i++) {
      const from = at;
      at += counts[i] as number;
      const live = liveOf(engine, handles[i] as number);
      const { sampled } = live;
      if (live.version !== fields.version && at > from) openSpan(live, fields.version);
      sampled.append(ids, bits, from, at);
      if (live.isCounted) this.#tokens += at - from;
      if (sampled.length > live.maxTokens) throw new Error(`${sampled.length} tokens of at most ${live.maxTokens}`);
    }
    invariant(at === ids.length && at === bits.length, 'counts add up to the tokens of an event');
    for (const { handle, reason, detail, cached_tokens, routes } of fields.ended) {
      const live = liveOf(engine, handle);
      live.cachedTokens += cached_tokens;
      const rows = live.request.prompt.length + live.sampled.length - 1;
      if (routes && routes.shape[0] !== rows) throw new Error(`Routes of ${routes.shape[0]} tokens, want ${rows}`);
      this.#retire(engine, live);
      this.#end(live, reason as TurnResult['reason'], detail, engine.worker.spec.id, routes);
    }
  }

  #retire(engine: Engine, live: Live): void {
    engine.sent.delete(live);
    engine.ended++;
    if (live.handle !== null) engine.byHandle.delete(live.handle);
    this.#pump();
  }

  #end(live: Live, reason: TurnResult['reason'], detail: string | null, engine: string, routes: Routes = null): void {
    const { request } = live;
    if (!this.#live.delete(keyOf(request))) return;
    if (request.wantRoutes && !routes && live.sampled.length > 0 && !this.#closed)
      this.#hooks.event('routes_missing', { rollout: request.rolloutId, turn: request.turn, engine });
    if (live.isCounted) this.#cachedTokens += live.cachedTokens;
    if (this.#live.size === 0 && this.#busySince !== null) {
      this.#busyMs += performance.now() - this.#busySince;
      this.#busySince = null;
    }
    closeSpan(live);
    live.resolve({
      ids: live.sampled.ids,
      logprobs: live.sampled.logprobs,
      spans: live.spans,
      reason,
      detail,
      engine,
      cachedTokens: live.cachedTokens,
      routes,
    });
  }

  /** The sessions of ended rollouts need no affinity. */
  forget(sessionId: string): void {
    this.#affinity.delete(sessionId);
  }

  #onHeartbeat(engine: Engine, stats: Readonly<Record<string, number>>): void {
    const { steps = 0 } = stats;
    if (steps > engine.steps) engine.stuckMs = 0;
    engine.steps = steps;
    const before = engine.limit.value;
    this.#preemptions += engine.limit.learn(stats, engine.sent.size, engine.ended);
    if (engine.limit.value > before) this.#pump();
  }

  // ---- Losing ----

  #findStalled(): void {
    const now = performance.now();
    const turn = Math.min(now - this.#lastWatch, this.#watchMs);
    this.#lastWatch = now;
    for (const engine of this.#engines) {
      const isBusy = engine.accepting && !engine.paused && engine.sent.size > 0;
      engine.stuckMs = isBusy ? engine.stuckMs + turn : 0;
      if (engine.stuckMs <= this.#stallMs) continue;
      engine.accepting = false;
      const why = `made no step for ${Math.round(engine.stuckMs / 1000)} s`;
      this.#killed++;
      this.#hooks.event('engine_killed', { engine: engine.worker.spec.id, why });
      void this.#launcher.condemn(engine.worker, why); // never rejects; `#onLost` goes on from there
    }
  }

  #requeue(live: Live): void {
    live.engine = null;
    live.handle = null;
    if (live.aborted || live.only?.peer.isLost) return this.#end(live, 'abort', 'its engine was lost', '');
    this.#queue.unshift(live); // it has waited longest
    this.#pump();
  }

  #onLost(engine: Engine, reason: Error): void {
    engine.accepting = false;
    this.#engines.delete(engine);
    const orphans = [...engine.sent];
    engine.sent.clear();
    engine.byHandle.clear();
    if (this.#closed || !engine.joined) return;
    this.#hooks.event('engine_lost', {
      engine: engine.worker.spec.id,
      reason: reason.message,
      requests: orphans.length,
    });
    const waiting = this.#queue.filter((live) => live.only === engine);
    this.#queue = this.#queue.filter((live) => live.only !== engine);
    for (const live of [...waiting, ...orphans].reverse()) this.#requeue(live);
    void this.#restart(engine.index, reason); // handles its own errors
  }

  async #restart(index: number, reason: Error): Promise<void> {
    let cause = reason;
    for (let n = this.#restarts.get(index) ?? 0; !this.#closed && n < this.#maxRestarts; n++) {
      this.#restarts.set(index, n + 1);
      this.#hooks.event('engine_restart', { engine: index, restart: n + 1 });
      this.#starting++;
      try {
        await this.startEngine(index);
        return;
      } catch (error) {
        cause = error as Error;
      } finally {
        this.#starting--;
      }
    }
    // The run goes on with fewer engines, as long as there is one or one is coming.
    if (this.#closed || this.#starting > 0 || [...this.#engines].some((engine) => engine.joined)) return;
    this.#reject(new Error(`No engine is left after ${this.restarts} restarts. Last cause: ${cause.message}`));
  }
}

/** The reply with a handle is always read before its first tokens (channel.ts), and nothing follows an ending. */
function liveOf(engine: Engine, handle: number): Live {
  const live = engine.byHandle.get(handle);
  if (live) return live; // not by `invariant`: its message would be made for every token
  throw new Error(`${engine.worker.spec.id} sent tokens for handle ${handle}, which is not live`);
}

/** The tokens from here on are of this version. */
function openSpan(live: Live, version: number): void {
  closeSpan(live);
  live.spans.push({ version, from: live.sampled.length, to: live.sampled.length });
  live.version = version;
}

function closeSpan({ spans, sampled }: Live): void {
  const last = spans.at(-1);
  if (last) last.to = sampled.length;
}

function joined(a: Int32Array, b: Int32Array): Int32Array {
  const out = new Int32Array(a.length + b.length);
  out.set(a);
  out.set(b, a.length);
  return out;
}

function keyOf(request: { rolloutId: string; attempt: number; turn: number }): string {
  return `${request.rolloutId}/${request.attempt}/${request.turn}`;
}
