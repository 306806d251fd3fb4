/**
 * Groups in flight and groups waiting: what may be admitted, what is handed to training, exactly once.
 *
 *   admit -> running -> (all members ended) -> waiting -> take -> training -> trained
 *                          |
 *                          +-- too few judged members -> dropped{reason}
 *
 * Invariants
 *   1. admitted = running + waiting + training + trained + dropped, always.
 *   2. capacity = (max_staleness + 1) * batch - (running + waiting + training). The policy version is not in it,
 *      so a skipped step can never shrink it. Groups whose turns are held until the next refit may be admitted as if
 *      the batch in training were gone (`heldCapacity`): no token of theirs is of the version before.
 *   3. Only whole groups leave: a group is decided once, when its last member has ended.
 * Called by loop.ts. Pure: no I/O, no clock.
 */
import type { DropReason, Group, Prompt, Rollout } from './types.ts';
import { invariant, SCORED_REASONS } from './types.ts';

interface Running {
  readonly prompt: Prompt;
  readonly ended: Rollout[];
}

/** What became of a group when its last member ended. */
export type Verdict =
  | { readonly kind: 'waiting'; readonly group: Group; readonly lost: readonly Rollout[] }
  | { readonly kind: 'dropped'; readonly reason: DropReason; readonly lost: readonly Rollout[] };

export class Buffer {
  readonly #batch: number; // groups per optimizer step
  readonly #groupSize: number;
  readonly #minMembers: number; // judged rollouts that a group needs to be trained
  readonly #maxStaleness: number;
  readonly #running = new Map<string, Running>();
  readonly #numbers = new Map<string, number>(); // order of admission, of groups that are running or waiting
  #waiting: Group[] = []; // in the order they finished
  #training: readonly Group[] = [];
  #admitted = 0;
  #trained = 0;
  readonly #dropped = new Map<DropReason, number>();

  constructor(args: { batch: number; groupSize: number; minMembers: number; maxStaleness: number }) {
    this.#batch = args.batch;
    this.#groupSize = args.groupSize;
    this.#minMembers = args.minMembers;
    this.#maxStaleness = args.maxStaleness;
  }

  /** Groups that may be admitted now. */
  get capacity(): number {
    return (this.#maxStaleness + 1) * this.#batch - (this.#running.size + this.#waiting.length + this.#training.length);
  }
  get heldCapacity(): number {
    return this.capacity + this.#training.length;
  }
  get ready(): boolean {
    return this.#waiting.length >= this.#batch;
  }
  get counts() {
    const dropped = [...this.#dropped.values()].reduce((a, b) => a + b, 0);
    return {
      admitted: this.#admitted,
      running: this.#running.size,
      waiting: this.#waiting.length,
      training: this.#training.length,
      trained: this.#trained,
      dropped,
    };
  }

  admit(groupId: string, prompt: Prompt, isHeld = false): void {
    invariant((isHeld ? this.heldCapacity : this.capacity) > 0, `no capacity for group ${groupId}`);
    invariant(!this.#running.has(groupId), `group ${groupId} admitted twice`);
    this.#running.set(groupId, { prompt, ended: [] });
    this.#numbers.set(groupId, this.#admitted++);
  }

  /** Book an ended rollout. A verdict when it was the last one of its group, null before that. */
  end(rollout: Rollout): Verdict | null {
    const running = this.#running.get(rollout.groupId);
    invariant(running, `rollout ${rollout.rolloutId} ended in a group that is not running`);
    invariant(
      !running.ended.some((r) => r.rolloutId === rollout.rolloutId),
      `rollout ${rollout.rolloutId} ended twice`,
    );
    running.ended.push(rollout);
    if (running.ended.length < this.#groupSize) return null;
    this.#running.delete(rollout.groupId);
    const members = running.ended.toSorted((a, b) => a.index - b.index);
    const judged = members.filter(isTrainable);
    const lost = members.filter((r) => !isTrainable(r));
    if (judged.length < this.#minMembers) {
      this.#numbers.delete(rollout.groupId);
      this.#drop('incomplete_group');
      return { kind: 'dropped', reason: 'incomplete_group', lost };
    }
    const group: Group = { groupId: rollout.groupId, prompt: running.prompt, rollouts: judged };
    this.#waiting.push(group);
    return { kind: 'waiting', group, lost };
  }

  /**
   * Hand over one batch: the groups that finished first, in the order they were admitted, so that the same groups give
   * the same sums. They count as training until `trained`.
   */
  take(): readonly Group[] {
    invariant(this.#training.length === 0, 'a batch is in training already');
    invariant(this.ready, `${this.#waiting.length} groups wait, a batch needs ${this.#batch}`);
    this.#training = this.#waiting.splice(0, this.#batch).sort((a, b) => this.#order(a) - this.#order(b));
    for (const group of this.#training) this.#numbers.delete(group.groupId);
    return this.#training;
  }

  trained(): void {
    this.#trained += this.#training.length;
    this.#training = [];
    const { admitted, running, waiting, training, trained, dropped } = this.counts;
    invariant(admitted === running + waiting + training + trained + dropped, 'groups were lost or counted twice');
  }

  #order(group: Group): number {
    return this.#numbers.get(group.groupId) ?? 0;
  }

  #drop(reason: DropReason): void {
    this.#dropped.set(reason, (this.#dropped.get(reason) ?? 0) + 1);
  }
}

/** Judged by its environment and with at least one sampled token. */
export function isTrainable(rollout: Rollout): boolean {
  return rollout.reward !== null && rollout.trajectories.length > 0 && SCORED_REASONS.has(rollout.reason);
}
