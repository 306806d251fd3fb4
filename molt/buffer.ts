/**
 * Groups in flight and groups waiting: what may be admitted, what is handed to training, exactly once.
 *
 *   admit -> running -> (all members ended) -> waiting -> take -> training -> trained
 *               |  ^                             |
 *               |  +-- refill: a failed member   +-- filtered, stale -> dropped{reason}
 *               +-- incomplete_group, stale -> dropped{reason}
 *
 * Invariants
 *   1. admitted = running + waiting + training + trained + dropped, always.
 *   2. capacity = (max_staleness + 1) * batch - (running + waiting + training). The policy version is not in it, so a skipped
 *      step can never shrink it. A batch counts as training until its refit is over: what is admitted between the two is
 *      sampled by the old version. (In a synchronous run the next batch may be admitted meanwhile if its turns are held
 *      until the refit: `heldCapacity`.) No more is admitted than the steps that are left can train.
 *   3. What is trained at version V was sampled by V - max_staleness or later. Groups that later batches could not all take
 *      in time are due: they go into this batch, or it waits for them (`late` wait), or they are dropped as stale (`late`
 *      drop). It is not enough to look at those that would be too old for the next batch: batches that prefer newer
 *      groups pile up more than one batch of them.
 *   4. Only whole groups leave: a group is decided once.
 *   5. Nothing waits at the end: when no more comes, the last batch may be short.
 * Called by pool.ts. Pure: no I/O, no clock.
 */
import type { DropReason, Group, Prompt, Rollout } from './types.ts';
import { invariant, SCORED_REASONS } from './types.ts';

/** Failed members that are tried again, for each place of a group. */
const MAX_REFILLS = 3;

export interface BufferOptions {
  readonly batch: number; // groups per optimizer step
  readonly steps: number; // that are still to be trained
  readonly maxStaleness: number;
  readonly late: 'wait' | 'drop';
  readonly order: 'first_finished' | 'dispatch_order';
  readonly failed: 'keep' | 'refill' | 'drop'; // what becomes of a group with a failed member
  readonly band: readonly [number, number] | null; // mean score of a group that is trained lies between, both excluded
}

interface Entry {
  readonly groupId: string;
  readonly number: number; // order of admission
  readonly prompt: Prompt;
  readonly size: number;
  readonly version: number; // oldest that may have sampled a token of it
  readonly ended: Map<number, Rollout>; // by member
  readonly refills: Map<number, number>;
}

/** What became of a group, or of the place of a member, when a rollout ended. */
export type Verdict =
  | { readonly kind: 'running' }
  | { readonly kind: 'refill'; readonly index: number; readonly nth: number; readonly prompt: Prompt }
  | { readonly kind: 'waiting'; readonly lost: readonly Rollout[] }
  | { readonly kind: 'dropped'; readonly reason: DropReason; readonly lost: readonly Rollout[] };

export class Buffer {
  readonly #options: BufferOptions;
  readonly #running = new Map<string, Entry>(); // in order of admission
  #waiting: Entry[] = []; // in the order they finished
  #training: readonly Entry[] = [];
  #admitted = 0;
  #trained = 0;
  #dropped = 0;
  #stepsLeft: number;
  #isClosed = false;

  constructor(options: BufferOptions) {
    this.#options = options;
    this.#stepsLeft = options.steps;
  }

  get #live(): number {
    return this.#running.size + this.#waiting.length;
  }

  /** Groups that may be admitted now. */
  get capacity(): number {
    const { batch, maxStaleness } = this.#options;
    return this.#room((maxStaleness + 1) * batch - this.#training.length);
  }
  get heldCapacity(): number {
    const { batch, maxStaleness } = this.#options;
    return this.#room((maxStaleness + 1) * batch);
  }
  #room(most: number): number {
    if (this.#isClosed) return 0;
    const stepsToCome = this.#stepsLeft - (this.#training.length > 0 ? 1 : 0);
    return Math.max(0, Math.min(most, stepsToCome * this.#options.batch) - this.#live);
  }

  /** Groups that a whole batch has. */
  get batchSize(): number {
    return this.#options.batch;
  }
  get counts() {
    return {
      admitted: this.#admitted,
      running: this.#running.size,
      waiting: this.#waiting.length,
      training: this.#training.length,
      trained: this.#trained,
      dropped: this.#dropped,
    };
  }
  /** Everything that was admitted is decided, and nothing more comes. */
  get isDone(): boolean {
    return (this.#isClosed || this.#stepsLeft === 0) && this.#live === 0;
  }

  /** `version`: of the first token it can have. */
  admit(groupId: string, prompt: Prompt, args: { size: number; version: number; isHeld?: boolean }): void {
    invariant((args.isHeld ? this.heldCapacity : this.capacity) > 0, `no capacity for group ${groupId}`);
    this.#enter(groupId, prompt, args.size, args.version, []);
  }

  /**
   * A group of a run that goes on, with what it had; there is no bound, since it was admitted before. `refills`: members
   * that are tried again, with the number of the try.
   */
  readmit(
    groupId: string,
    prompt: Prompt,
    args: { size: number; version: number; ended: readonly Rollout[]; refills: ReadonlyMap<number, number> },
  ): Verdict {
    this.#enter(groupId, prompt, args.size, args.version, args.ended, args.refills);
    return this.#decide(this.#running.get(groupId) as Entry);
  }

  /** The try that comes after `tries` others and this one; null when there is none, and the rollout counts as it is. */
  refillAfter(rollout: Rollout, tries: number): number | null {
    return this.#options.failed === 'refill' && !isTrainable(rollout) && tries < MAX_REFILLS ? tries + 1 : null;
  }

  #enter(
    groupId: string,
    prompt: Prompt,
    size: number,
    version: number,
    ended: readonly Rollout[],
    refills: ReadonlyMap<number, number> = new Map(),
  ): void {
    const isLive = this.#running.has(groupId) || this.#waiting.some((entry) => entry.groupId === groupId);
    invariant(!isLive, `group ${groupId} admitted twice`);
    const members = new Map(ended.map((rollout) => [rollout.index, rollout]));
    const number = this.#admitted++;
    this.#running.set(groupId, { groupId, number, prompt, size, version, ended: members, refills: new Map(refills) });
  }

  /** Book an ended rollout. Null when its group was decided before: what ends then was cancelled. */
  end(rollout: Rollout): Verdict | null {
    const entry = this.#running.get(rollout.groupId);
    if (!entry) return null;
    invariant(!entry.ended.has(rollout.index), `rollout ${rollout.rolloutId} ended twice`);
    const { failed } = this.#options;
    if (!isTrainable(rollout) && failed === 'drop') return this.#drop(entry, 'incomplete_group', [rollout]);
    const nth = this.refillAfter(rollout, entry.refills.get(rollout.index) ?? 0);
    if (nth !== null) {
      entry.refills.set(rollout.index, nth);
      return { kind: 'refill', index: rollout.index, nth, prompt: entry.prompt };
    }
    entry.ended.set(rollout.index, rollout);
    return this.#decide(entry);
  }

  #decide(entry: Entry): Verdict {
    if (entry.ended.size < entry.size) return { kind: 'running' };
    const lost = membersOf(entry).filter((rollout) => !isTrainable(rollout));
    const judged = entry.size - lost.length;
    if (judged < Math.min(2, entry.size)) return this.#drop(entry, 'incomplete_group', lost);
    if (!this.#isInBand(entry)) return this.#drop(entry, 'filtered', lost);
    this.#running.delete(entry.groupId);
    this.#waiting.push(entry);
    return { kind: 'waiting', lost };
  }

  #isInBand(entry: Entry): boolean {
    const { band } = this.#options;
    if (!band) return true;
    const scores = membersOf(entry)
      .filter(isTrainable)
      .map((rollout) => rollout.score ?? rollout.reward ?? 0);
    const mean = scores.reduce((a, b) => a + b, 0) / scores.length;
    return mean > band[0] && mean < band[1];
  }

  #drop(entry: Entry, reason: DropReason, lost: readonly Rollout[]): Verdict {
    this.#running.delete(entry.groupId);
    this.#waiting = this.#waiting.filter((other) => other !== entry);
    this.#dropped++;
    return { kind: 'dropped', reason, lost };
  }

  // ---- A batch ----

  /** A batch at this version can be taken: enough groups wait, and none that is due would be left out. */
  isReady(version: number): boolean {
    return this.#isFull && this.#due(version).late.length === 0;
  }

  /** Enough groups wait; whether they may go is another matter. */
  get #isFull(): boolean {
    const { batch, order } = this.#options;
    const isLast = this.#isClosed && this.#live < batch;
    if (isLast) return this.#running.size === 0 && this.#waiting.length > 0;
    if (order === 'first_finished') return this.#waiting.length >= batch;
    const first = this.#inOrder().slice(0, batch);
    return first.length === batch && first.every((entry) => !this.#running.has(entry.groupId));
  }

  /**
   * What this batch must hold so that every later one can keep the bound: of the groups that k more batches may still take,
   * all but k * batch. `late` are unfinished groups of which one each would have to be finished.
   */
  #due(version: number): { due: readonly Entry[]; late: readonly Entry[] } {
    const { batch, maxStaleness } = this.#options;
    const all = [...this.#waiting, ...this.#running.values()].sort((a, b) => a.version - b.version); // stable
    const due = new Set<Entry>();
    const late = new Set<Entry>();
    for (const [i, entry] of all.entries()) {
      if (all[i + 1]?.version === entry.version) continue; // the last of its version: all up to here are as old or older
      const batchesLater = Math.max(0, entry.version - (version - maxStaleness));
      let required = i + 1 - batchesLater * batch - due.size - late.size;
      for (const other of all.slice(0, i + 1)) {
        if (required <= 0) break;
        if (due.has(other) || late.has(other) || this.#running.has(other.groupId)) continue;
        due.add(other);
        required--;
      }
      for (const other of all.slice(0, i + 1)) {
        if (required <= 0) break;
        if (due.has(other) || late.has(other)) continue;
        late.add(other);
        required--;
      }
    }
    return { due: [...due], late: [...late] };
  }

  /**
   * Drop what may no longer be trained at this version: with `late` drop, unfinished groups that hold up a full batch; and
   * whatever is older than the bound (only a run that was resumed under another version has such).
   */
  dropStale(version: number): readonly { readonly groupId: string; readonly verdict: Verdict }[] {
    const { maxStaleness, late } = this.#options;
    const tooOld = [...this.#running.values(), ...this.#waiting].filter((e) => e.version < version - maxStaleness);
    const heldUp = late === 'drop' && this.#isFull ? this.#due(version).late : [];
    return [...new Set([...tooOld, ...heldUp])].map((entry) => ({
      groupId: entry.groupId,
      verdict: this.#drop(entry, 'stale', membersOf(entry)),
    }));
  }

  /**
   * Hand over one batch, in order of admission, so that the same groups give the same sums. It counts as training until
   * `trained`.
   */
  take(version: number): readonly Group[] {
    invariant(this.#training.length === 0, 'a batch is in training already');
    invariant(this.isReady(version), `${this.#waiting.length} groups wait, a batch needs ${this.#options.batch}`);
    const { batch, maxStaleness, order } = this.#options;
    const wanted = order === 'first_finished' ? [...this.#due(version).due, ...this.#waiting] : this.#inOrder();
    const chosen = new Set([...new Set(wanted)].slice(0, batch));
    this.#waiting = this.#waiting.filter((entry) => !chosen.has(entry));
    this.#training = [...chosen].sort((a, b) => a.number - b.number);
    for (const { groupId, version: oldest } of this.#training)
      invariant(version - oldest <= maxStaleness, `group ${groupId} of version ${oldest} in a batch of ${version}`);
    return this.#training.map((entry) => ({
      groupId: entry.groupId,
      prompt: entry.prompt,
      rollouts: membersOf(entry).filter(isTrainable),
    }));
  }

  /** The step is done and its refit over. */
  trained(): void {
    invariant(this.#training.length > 0, 'no batch is in training');
    this.#trained += this.#training.length;
    this.#training = [];
    this.#stepsLeft--;
    const { admitted, running, waiting, training, trained, dropped } = this.counts;
    invariant(admitted === running + waiting + training + trained + dropped, 'groups were lost or counted twice');
  }

  /** The prompts are used up. */
  close(): void {
    this.#isClosed = true;
  }

  #inOrder(): Entry[] {
    return [...this.#running.values(), ...this.#waiting].sort((a, b) => a.number - b.number);
  }
}

function membersOf(entry: Entry): Rollout[] {
  return [...entry.ended.values()].sort((a, b) => a.index - b.index);
}

/** Judged by its environment and with at least one sampled token. */
export function isTrainable(rollout: Rollout): boolean {
  return rollout.reward !== null && rollout.trajectories.length > 0 && SCORED_REASONS.has(rollout.reason);
}
