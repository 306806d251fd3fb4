/**
 * Runners as one: run a rollout somewhere and give back how it ended.
 *
 *   run(job) -> start -> runner -> turn (-> generator.ts), render/suffix/parse (-> tokenizer) -> rollout_done -> Rollout
 *
 * Invariants
 *   1. Every job ends with exactly one Rollout. Results of a dead attempt are dropped and counted.
 *   2. A runner that dies takes no rollout with it: each is tried again as attempt + 1, up to MAX_ATTEMPTS,
 *      then ends `runner_lost`. Where one blocked its event loop (watchdog.ts) that one ends `agent_blocked`, and for
 *      the others, and for the runner, it counts as no try.
 * Called by loop.ts and evaluate.ts. Talks to runner.ts (protocol.ts: start, turn, abort_turn, rollout_done).
 */
import { crc32 } from 'node:zlib';
import type { Generator, TurnResult } from './generator.ts';
import type { Launcher, Worker, WorkerSpec } from './launch.ts';
import { lastWords, logTail } from './launch.ts';
import type { Fields, Frames } from './protocol.ts';
import type { Tokenizer } from './tokenizer.ts';
import {
  END_REASONS,
  type EndReason,
  invariant,
  type Prompt,
  type Proof,
  type Rollout,
  type Sampling,
  type Span,
  type Trajectory,
} from './types.ts';
import { type Blocked, readBlocked } from './watchdog.ts';

/** Tries at one rollout whose runner dies under it. */
const MAX_ATTEMPTS = 3;
/** Lines at the end of a lost runner's log in which it may say who blocked it. */
const BLOCKED_LINES = 100;

export interface Job {
  readonly rolloutId: string;
  readonly groupId: string;
  readonly index: number;
  readonly prompt: Prompt;
  readonly seed: number;
  readonly sampling: Sampling;
  readonly limits: { readonly maxTurns: number; readonly maxTokens: number; readonly deadlineMs: number };
}

interface Running {
  readonly job: Job;
  readonly resolve: (rollout: Rollout) => void;
  readonly dispatchedVersion: number;
  attempt: number;
  losses: number; // attempts that count against MAX_ATTEMPTS
  runner: Worker | null;
  readonly turns: Set<number>; // being sampled now
  proofs: Proof[]; // of the turns of this attempt
  since: number; // performance.now() of its last beginning or end of something
}

export interface DispatchHooks {
  readonly version: () => number; // policy version now
  readonly recorded: () => Promise<void>; // what has ended so far is on the disk
  readonly event: (name: string, detail: Record<string, string | number>) => void;
}

export class Dispatch {
  readonly #launcher: Launcher;
  readonly #spec: (index: number) => WorkerSpec;
  readonly #generator: Generator;
  readonly #tokenizer: Pick<Tokenizer, 'request'>;
  readonly #hooks: DispatchHooks;
  readonly #maxRestarts: number;
  readonly #runners = new Map<number, Worker>();
  readonly #running = new Map<string, Running>();
  readonly #load = new Map<Worker, number>(); // rollouts of each runner
  readonly #restarts = new Map<number, number>(); // by runner index, those that count against maxRestarts
  #numRestarts = 0; // all
  #starting = 0; // restarts under way
  #closed = false;
  #reject: (error: Error) => void = () => {};
  /** Rejects when no runner is left and none may be started. Never resolves. */
  readonly failed: Promise<never>;

  constructor(args: {
    launcher: Launcher;
    spec: (index: number) => WorkerSpec;
    generator: Generator;
    tokenizer: Pick<Tokenizer, 'request'>;
    maxRestarts: number;
    hooks: DispatchHooks;
  }) {
    this.#launcher = args.launcher;
    this.#spec = args.spec;
    this.#generator = args.generator;
    this.#tokenizer = args.tokenizer;
    this.#maxRestarts = args.maxRestarts;
    this.#hooks = args.hooks;
    this.failed = new Promise((_, reject) => {
      this.#reject = reject;
    });
    this.failed.catch(() => {}); // a run that ends for another reason never looks at it
  }

  get running(): number {
    return this.#running.size;
  }
  /** Rises with everything that a rollout begins or ends. */
  activity = 0;

  /** Who waits for whom, a line for each rollout that runs. */
  describe(): string[] {
    const now = performance.now();
    return [...this.#running.values()].map(({ job, attempt, runner, turns, since }) => {
      const where = runner ? `in ${runner.spec.id}` : 'waiting for a runner';
      const turn = turns.size > 0 ? `sampling turn ${[...turns].join(', ')}` : 'in the agent or the tokenizer';
      return `  rollout ${job.rolloutId} attempt ${attempt} ${where}, ${turn}, for ${Math.round((now - since) / 1000)} s`;
    });
  }

  /** The group of every rollout that runs. */
  get runningGroups(): readonly string[] {
    return Array.from(this.#running.values(), ({ job }) => job.groupId);
  }

  get restarts(): number {
    return this.#numRestarts;
  }

  /** Start a runner process. Resolves when its agent is loaded; rejects with the cause when it cannot. */
  async startRunner(index: number): Promise<void> {
    const worker = this.#launcher.start(this.#spec(index));
    const { peer } = worker;
    const lost = peer.lost.then((reason) => {
      throw new Error(`Runner ${worker.spec.id} died while starting: ${reason.message}\n${lastWords(worker)}`);
    });
    lost.catch(() => {});
    peer.handle('turn', async (fields, frames) => this.#turn(fields, frames));
    peer.handle('rollout_done', async (fields, frames) => {
      this.#done(fields, frames);
      await this.#hooks.recorded();
      return { fields: {}, frames: {} };
    });
    peer.on('abort_turn', ({ rollout_id, attempt, turn }) =>
      this.#generator.abort({ rolloutId: rollout_id, attempt, turn }),
    );
    peer.handle('render', async (fields) => this.#tokenizer.request('render', fields));
    peer.handle('suffix', async (fields) => this.#tokenizer.request('suffix', fields));
    peer.handle('encode', async (fields) => this.#tokenizer.request('encode', fields));
    peer.handle('decode', async (fields, frames) => this.#tokenizer.request('decode', fields, frames));
    peer.handle('parse', async (fields, frames) => this.#tokenizer.request('parse', fields, frames));
    await Promise.race([peer.ready, lost]);
    this.#runners.set(index, worker);
    void peer.lost.then((reason) => this.#onLost(index, worker, reason)); // lost never rejects
    for (const running of this.#running.values()) if (!running.runner) this.#start(running);
  }

  /** Run one rollout to its end. Never rejects. */
  run(job: Job): Promise<Rollout> {
    return new Promise((resolve) => {
      const running: Running = {
        job,
        resolve,
        dispatchedVersion: this.#hooks.version(),
        attempt: 0,
        losses: 0,
        runner: null,
        turns: new Set(),
        proofs: [],
        since: performance.now(),
      };
      invariant(!this.#running.has(job.rolloutId), `rollout ${job.rolloutId} dispatched twice`);
      this.#running.set(job.rolloutId, running);
      this.#start(running);
    });
  }

  /** End running rollouts whose id passes; they come back as `cancelled`. */
  cancel(matches: (job: Job) => boolean, reason: EndReason): void {
    for (const running of [...this.#running.values()].filter(({ job }) => matches(job))) {
      const { job, attempt, runner } = running;
      if (runner) runner.peer.send('cancel_rollout', { rollout_id: job.rolloutId, attempt, reason });
      else this.#finish(running, failed(running, 'cancelled', 'while it waited for a runner'));
    }
  }

  close(): void {
    this.#closed = true;
  }

  #start(running: Running): void {
    const runner = this.#leastLoaded();
    running.runner = runner;
    if (runner) this.#load.set(runner, (this.#load.get(runner) ?? 0) + 1);
    if (!runner) return; // one is being started; startRunner begins what waits
    const { job } = running;
    const { maxTurns, maxTokens, deadlineMs } = job.limits;
    runner.peer
      .request('start', {
        rollout_id: job.rolloutId,
        attempt: running.attempt,
        group_id: job.groupId,
        index: job.index,
        prompt: job.prompt.input,
        label: job.prompt.label,
        tools: job.prompt.tools,
        seed: job.seed,
        limits: { max_turns: maxTurns, max_tokens: maxTokens, deadline_ms: deadlineMs },
        sampling: job.sampling,
      })
      .catch((error: Error) => {
        // A lost runner is #onLost's business; anything else means that this rollout can never start.
        if (!runner.peer.isLost) this.#finish(running, failed(running, 'agent_error', error.message));
      });
  }

  #leastLoaded(): Worker | null {
    let best: Worker | null = null;
    for (const worker of this.#runners.values())
      if (!best || (this.#load.get(worker) ?? 0) < (this.#load.get(best) ?? 0)) best = worker;
    return best;
  }

  async #turn(fields: Fields<'turn'>, frames: Frames<'turn'>) {
    const running = this.#running.get(fields.rollout_id);
    running?.turns.add(fields.turn);
    this.#happened(running);
    const result = await this.#generator.generate({
      rolloutId: fields.rollout_id,
      attempt: fields.attempt,
      turn: fields.turn,
      sessionId: fields.session_id,
      sampling: fields.sampling,
      prompt: frames.prompt,
    });
    running?.turns.delete(fields.turn);
    this.#happened(running);
    if (running?.attempt === fields.attempt) running.proofs.push(proofOf(fields, frames.prompt, result));
    return {
      fields: {
        reason: result.reason,
        detail: result.detail,
        engine: result.engine,
        cached_tokens: result.cachedTokens,
        spans: result.spans,
      },
      frames: { ids: result.ids, logprobs: result.logprobs },
    };
  }

  #happened(running: Running | undefined): void {
    this.activity++;
    if (running) running.since = performance.now();
  }

  #done(fields: Fields<'rollout_done'>, frames: Frames<'rollout_done'>): void {
    const running = this.#running.get(fields.rollout_id);
    if (!running || running.attempt !== fields.attempt) {
      this.#hooks.event('late_rollout', { rollout: fields.rollout_id, attempt: fields.attempt });
      return;
    }
    this.#finish(running, rolloutOf(running, fields, frames));
  }

  #finish(running: Running, rollout: Rollout): void {
    if (!this.#running.delete(running.job.rolloutId)) return;
    const { runner } = running;
    if (runner && this.#load.has(runner)) this.#load.set(runner, (this.#load.get(runner) as number) - 1);
    this.activity++;
    this.#generator.forget(running.job.rolloutId);
    running.resolve(rollout);
  }

  #onLost(index: number, worker: Worker, reason: Error): void {
    this.#runners.delete(index);
    this.#load.delete(worker);
    if (this.#closed) return;
    const orphans = [...this.#running.values()].filter((running) => running.runner === worker);
    const blocked = readBlocked(logTail(worker, BLOCKED_LINES));
    const { id } = worker.spec;
    if (blocked)
      this.#hooks.event('agent_blocked', { runner: id, rollout: blocked.rolloutId, others: orphans.length - 1 });
    else this.#hooks.event('runner_lost', { runner: id, reason: reason.message, rollouts: orphans.length });
    for (const running of orphans) {
      for (const turn of running.turns) {
        this.#generator.abort({ rolloutId: running.job.rolloutId, attempt: running.attempt, turn });
      }
      running.turns.clear();
      this.#again(running, blocked, reason);
    }
    void this.#restart(index, worker, reason, blocked !== null); // handles its own errors
  }

  /** Another attempt at a rollout whose runner is gone, or its end. */
  #again(running: Running, blocked: Blocked | null, reason: Error): void {
    const { rolloutId } = running.job;
    if (blocked?.rolloutId === rolloutId && blocked.attempt === running.attempt)
      return this.#finish(running, failed(running, 'agent_blocked', blocked.detail));
    running.proofs = [];
    running.attempt++;
    if (!blocked && ++running.losses >= MAX_ATTEMPTS)
      return this.#finish(running, failed(running, 'runner_lost', reason.message));
    this.#start(running);
  }

  /** `isFree`: the first start counts as no restart, since the runner was not at fault. */
  async #restart(index: number, worker: Worker, reason: Error, isFree: boolean): Promise<void> {
    let cause = `${reason.message}\n${lastWords(worker)}`;
    for (let free = isFree; !this.#closed; free = false) {
      const counted = this.#restarts.get(index) ?? 0;
      if (!free && counted >= this.#maxRestarts) break;
      if (!free) this.#restarts.set(index, counted + 1);
      this.#numRestarts++;
      this.#hooks.event('runner_restart', { runner: index, restart: this.#numRestarts });
      this.#starting++;
      try {
        await this.startRunner(index);
        return;
      } catch (error) {
        cause = (error as Error).message;
      } finally {
        this.#starting--;
      }
    }
    if (this.#closed || this.#starting > 0 || this.#runners.size > 0) return;
    this.#reject(new Error(`No runner is left after ${this.restarts} restarts. Last cause: ${cause}`));
  }
}

/** A rollout that no environment could judge. */
function failed(running: Running, reason: EndReason, detail: string): Rollout {
  const { job, attempt, dispatchedVersion } = running;
  const { rolloutId, groupId, index } = job;
  const nothing = { reward: null, score: null, truncated: false, info: {}, turns: 0, trajectories: [], proofs: [] };
  return { rolloutId, groupId, index, attempt, reason, detail, dispatchedVersion, ...nothing };
}

/** From wire to nouns. Throws on a breach by the runner: the request then fails and the runner offers it again. */
function rolloutOf(running: Running, fields: Fields<'rollout_done'>, frames: Frames<'rollout_done'>): Rollout {
  const { job, attempt, dispatchedVersion } = running;
  const reason = fields.reason as EndReason;
  invariant(END_REASONS.includes(reason), `unknown end reason ${reason}`);
  const trajectories: Trajectory[] = [];
  let at = 0;
  for (const [i, length] of frames.lengths.entries()) {
    const part = <A extends Int32Array | Uint8Array | Float32Array>(column: A) => column.slice(at, at + length) as A;
    trajectories.push({
      ids: part(frames.ids),
      lossMask: part(frames.loss_mask),
      logprobs: part(frames.logprobs),
      versions: part(frames.versions),
      turns: part(frames.turns_of),
      spans: fields.spans[i] as readonly Span[],
    });
    at += length;
  }
  invariant(
    at === frames.ids.length && at === frames.loss_mask.length,
    `lengths sum to ${at} of ${frames.ids.length} tokens`,
  );
  return {
    rolloutId: job.rolloutId,
    groupId: job.groupId,
    index: job.index,
    attempt,
    reason,
    detail: fields.detail,
    reward: fields.reward,
    score: fields.score,
    truncated: fields.truncated,
    info: fields.info,
    turns: fields.turns,
    trajectories,
    proofs: running.proofs,
    dispatchedVersion,
  };
}

/** What an engine was asked and gave, before the runner sees it. */
function proofOf(fields: Fields<'turn'>, prompt: Int32Array, result: TurnResult): Proof {
  const { temperature, top_p, top_k, seed, max_tokens } = fields.sampling;
  const versions = new Int32Array(result.ids.length);
  for (const { version, from, to } of result.spans) versions.fill(version, from, to);
  return {
    turn: fields.turn,
    engine: result.engine,
    seed,
    temperature,
    plain: top_p === 1 && top_k === 0,
    maxTokens: max_tokens,
    prompt: { tokens: prompt.length, crc: crcOf(prompt) },
    sampled: { tokens: result.ids.length, crc: crcOf(result.ids, result.logprobs, versions) },
  };
}

/** CRC32 over the bytes of these columns, one after another. */
export function crcOf(...columns: readonly (Int32Array | Float32Array)[]): number {
  let sum = 0;
  for (const { buffer, byteOffset, byteLength } of columns)
    sum = crc32(new Uint8Array(buffer, byteOffset, byteLength), sum);
  return sum;
}
