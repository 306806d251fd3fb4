/**
 * The streaming pool: prompts become groups of running rollouts, ended groups become batches, all the time.
 *
 *   capacity (buffer.ts) -> prompt (data.ts) -> dispatched -> rollouts (dispatch.ts) -> finished -> verdict -> batch
 *
 * Invariants
 *   1. Whatever happens to a rollout or a group is in the ledger before anything follows from it.
 *   2. Admission follows capacity by itself, also while a batch is trained; only `drain` and `stop` end it.
 *   3. `nextBatch` ends: with a batch, with null when nothing more comes or the run is to stop, or with the error.
 * What is decided is in buffer.ts; here is what is done about it. Called by loop.ts.
 */
import type { Buffer, Verdict } from './buffer.ts';
import type { PromptStream } from './data.ts';
import type { Job } from './dispatch.ts';
import type { History } from './history.ts';
import { readRollout } from './history.ts';
import { type Ledger, LedgerError } from './ledger.ts';
import { rolloutRecord, tokensOf } from './report.ts';
import { type EndReason, type Group, invariant, type Prompt, type Rollout } from './types.ts';

/** Groups dropped in a row, for each one of a batch and at least, after which no batch is hoped for. */
const MOST_IN_VAIN = 50;
const LEAST_IN_VAIN = 500;

export interface PoolArgs {
  readonly buffer: Buffer;
  readonly stream: PromptStream;
  readonly ledger: Pick<Ledger, 'record'>;
  readonly groupSize: number;
  readonly version: () => number; // policy version now
  readonly run: (job: Job) => Promise<Rollout>; // never rejects
  readonly cancel: (matches: (job: Job) => boolean, reason: EndReason) => void;
  readonly job: (rolloutId: string, groupId: string, index: number, prompt: Prompt) => Job;
  readonly onRollout: (rollout: Rollout) => void;
  readonly onPrompt: () => void;
  readonly fail: (error: Error) => void; // of ours, that nobody awaits
}

export class Pool {
  readonly #args: PoolArgs;
  #dispatched = 0; // groups ever, which numbers them
  #pumping = false;
  #isDraining = false;
  #isStopped = false;
  #error: Error | null = null;
  #wake: () => void = () => {};
  #drops = new Map<string, number>();
  #inVain = new Map<string, number>(); // groups dropped since one was kept, by reason; not those that came too late
  #staleTokens: number[] = []; // sampled for rollouts of groups that were dropped as stale
  readonly #stale = new Map<string, number>(); // such groups, with the rollouts that have not come back

  constructor(args: PoolArgs) {
    this.#args = args;
  }

  get dispatched(): number {
    return this.#dispatched;
  }

  // ---- Admission ----

  /** Go on where another process ended: prompts were given out up to `dispatched`. */
  readmit(history: History): { groups: number; finished: number; again: number } {
    const { buffer, stream, ledger } = this.#args;
    this.#dispatched = Math.max(this.#dispatched, history.dispatched);
    const counts = { groups: 0, finished: 0, again: 0 };
    for (const [groupId, { dispatched, attempts, finished }] of history.open) {
      const prompt = stream.find(dispatched);
      if (!prompt)
        throw new LedgerError(`prompt ${dispatched.index} of ${dispatched.source} is not what group ${groupId} had`);
      const ended = [...finished.values()].map(readRollout).filter(({ reason }) => reason !== 'cancelled');
      const refills = new Map(
        ended.flatMap((rollout) => {
          const nth = buffer.refillAfter(rollout, triesOf(rollout));
          return nth === null ? [] : [[rollout.index, nth] as const];
        }),
      );
      const has = new Set(ended.map(({ index }) => index));
      const members = Array.from({ length: dispatched.size }, (_, index) => index).filter((index) => !has.has(index));
      const version = Math.min(this.#args.version(), ...ended.map(oldestVersion));
      if (members.length > 0) {
        const { kind: _kind, ...event } = dispatched;
        ledger.record({ kind: 'dispatched', ...event, version, attempt: attempts, members });
      }
      const kept = ended.filter(({ index }) => !refills.has(index));
      const verdict = buffer.readmit(groupId, prompt, { size: dispatched.size, version, ended: kept, refills });
      this.#decided(groupId, verdict);
      if (verdict.kind === 'running') {
        for (const index of members) this.#run(`${groupId}-${index}`, groupId, index, prompt);
        for (const [index, nth] of refills) this.#run(`${groupId}-${index}r${nth}`, groupId, index, prompt);
      }
      counts.groups++;
      counts.finished += kept.length;
      counts.again += members.length + refills.size;
    }
    return counts;
  }

  /** Admit what there is room for. Returns at once; prompts may have to be measured first. */
  #pump(): void {
    if (this.#pumping) return;
    this.#pumping = true;
    void this.#admit(); // handles its own errors
  }

  async #admit(): Promise<void> {
    const { buffer, stream, version } = this.#args;
    try {
      while (buffer.capacity > 0 && !this.#isDraining && !this.#isStopped) {
        if (!stream.isAhead(buffer.capacity)) {
          await stream.ahead(buffer.capacity);
          continue; // rollouts may have ended meanwhile
        }
        if (!this.#next(version(), false)) return;
      }
      // Meanwhile, for what comes then; it comes upon the error again.
      stream.ahead(2 * buffer.batchSize).catch(() => {});
    } catch (error) {
      this.#error = error as Error;
      this.#wake();
    } finally {
      this.#pumping = false; // in the turn that looked last: a place that is freed right after it must be seen
    }
  }

  /** Groups of the next batch while this one is trained; the caller holds their turns until the refit. */
  admitHeld(): void {
    const { buffer, stream, version } = this.#args;
    while (buffer.heldCapacity > 0 && stream.isAhead(1)) if (!this.#next(version() + 1, true)) return;
  }

  /** False when there are no more prompts. */
  #next(version: number, isHeld: boolean): boolean {
    const { buffer, stream, ledger, groupSize } = this.#args;
    const prompt = stream.next();
    if (!prompt) {
      buffer.close();
      this.#wake(); // the last batch may be whole
      return false;
    }
    this.#args.onPrompt();
    const groupId = `g${this.#dispatched++}`;
    buffer.admit(groupId, prompt, { size: groupSize, version, isHeld });
    const members = Array.from({ length: groupSize }, (_, index) => index);
    const { source, epoch, index } = prompt;
    const { lanes } = stream.position;
    const hash = stream.hashOf(prompt);
    ledger.record({
      kind: 'dispatched',
      groupId,
      source,
      epoch,
      index,
      hash,
      version,
      attempt: 0,
      members,
      size: groupSize,
      lanes,
    });
    for (const member of members) this.#run(`${groupId}-${member}`, groupId, member, prompt);
    return true;
  }

  #run(rolloutId: string, groupId: string, index: number, prompt: Prompt): void {
    const { run, job, fail } = this.#args;
    run(job(rolloutId, groupId, index, prompt))
      .then((rollout) => this.#book(rollout))
      .catch(fail);
  }

  // ---- What ends ----

  #book(rollout: Rollout): void {
    if (this.#isStopped) return; // it is dispatched once more when the run goes on
    const { buffer, ledger, onRollout } = this.#args;
    ledger.record(...rolloutRecord(rollout));
    onRollout(rollout);
    const verdict = buffer.end(rollout);
    if (verdict) this.#decided(rollout.groupId, verdict);
    else this.#cameBack(rollout);
    this.#pump();
    this.#wake();
  }

  #cameBack(rollout: Rollout): void {
    const left = this.#stale.get(rollout.groupId);
    if (left === undefined) return;
    this.#staleTokens.push(tokensOf(rollout));
    if (left > 1) this.#stale.set(rollout.groupId, left - 1);
    else this.#stale.delete(rollout.groupId);
  }

  #decided(groupId: string, verdict: Verdict): void {
    switch (verdict.kind) {
      case 'running':
        return;
      case 'refill':
        this.#count('refilled', 1);
        return this.#run(`${groupId}-${verdict.index}r${verdict.nth}`, groupId, verdict.index, verdict.prompt);
      case 'waiting':
        this.#inVain.clear();
        for (const { reason } of verdict.lost) this.#count(`dropped_${reason}`, 1);
        return;
      case 'dropped':
        this.#args.ledger.record({ kind: 'dropped', groupId, reason: verdict.reason });
        this.#count(`dropped_${verdict.reason}`, 1);
        if (verdict.reason === 'stale') {
          this.#staleTokens.push(...verdict.lost.map(tokensOf));
          const left = this.#args.groupSize - verdict.lost.length;
          if (left > 0) this.#stale.set(groupId, left);
        } else {
          this.#inVain.set(verdict.reason, (this.#inVain.get(verdict.reason) ?? 0) + 1);
          for (const { reason } of verdict.lost) this.#count(`dropped_${reason}`, 1);
        }
        this.#args.cancel((job) => job.groupId === groupId, 'cancelled');
    }
  }

  #count(name: string, n: number): void {
    this.#drops.set(name, (this.#drops.get(name) ?? 0) + n);
  }

  /** Metrics since the last call. */
  takeDrops(): Record<string, number> {
    const out = Object.fromEntries(this.#drops);
    const stale = this.#staleTokens;
    this.#drops = new Map();
    this.#staleTokens = [];
    return stale.length === 0 ? out : { ...out, stale_tokens_mean: stale.reduce((a, b) => a + b, 0) / stale.length };
  }

  // ---- Batches ----

  /** The next batch, or null when nothing more comes. `look` is called whenever something has happened; it may throw. */
  async nextBatch(look: () => void): Promise<readonly Group[] | null> {
    const { buffer, version } = this.#args;
    for (;;) {
      look();
      if (this.#error) throw this.#error;
      if (this.#isStopped) return null;
      for (const { groupId, verdict } of buffer.dropStale(version())) this.#decided(groupId, verdict);
      if (buffer.isReady(version())) return buffer.take(version());
      if (buffer.isDone) return null;
      this.#checkInVain();
      const happening = this.#happening(); // the pump may find at once that there are no more prompts
      this.#pump();
      await happening;
    }
  }

  /** The policy stays as it is until a batch is trained, so more of the same would not help. */
  #checkInVain(): void {
    const dropped = [...this.#inVain.values()].reduce((a, b) => a + b, 0);
    if (dropped < Math.max(LEAST_IN_VAIN, MOST_IN_VAIN * this.#args.buffer.batchSize)) return;
    const reasons = [...this.#inVain].map(([reason, n]) => `${n} ${reason}`).join(', ');
    throw new Error(
      `${dropped} groups in a row were dropped and none is left to train: ${reasons} (algo.dynamic_filtering_range, rollout.failed_members)`,
    );
  }

  /** Admit nothing more and resolve when nothing runs: after it, no trajectory crosses the refit. Ends with `trained`. */
  async drain(look: () => void): Promise<void> {
    this.#isDraining = true;
    while (this.#args.buffer.counts.running > 0 && !this.#isStopped) {
      look();
      await this.#happening();
    }
  }

  /** The step and its refit are over. */
  trained(): void {
    this.#isDraining = false;
    this.#args.buffer.trained();
    this.#pump();
  }

  /** Nothing that ends from now on is recorded: it is in flight, and dispatched again when the run goes on. */
  stop(): void {
    this.#isStopped = true;
    this.#wake();
  }

  #happening(): Promise<void> {
    return new Promise((resolve) => {
      this.#wake = resolve;
    });
  }
}

/** Refills of its place before it: they number the rollout. */
function triesOf({ rolloutId }: Rollout): number {
  return Number(/r(\d+)$/.exec(rolloutId)?.[1] ?? 0);
}

/** Of a rollout that has ended. */
function oldestVersion(rollout: Rollout): number {
  let oldest = Number.POSITIVE_INFINITY;
  for (const { spans } of rollout.trajectories)
    for (const span of spans) if (span.source === 'policy') oldest = Math.min(oldest, span.version);
  invariant(rollout.dispatchedVersion >= 0, `rollout ${rollout.rolloutId} was dispatched before there was a version`);
  return Number.isFinite(oldest) ? oldest : rollout.dispatchedVersion;
}
