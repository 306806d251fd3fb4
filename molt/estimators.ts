/**
 * Estimators: rewards to advantages, in float64, one pure function each.
 *
 * r_i is the clipped reward of rollout i of a group of n; mean, std (n - 1 in the denominator) and sum are over the group.
 *
 *   grpo                 (r_i - mean) / (std + 1e-9)          a group of one: 0
 *   dr_grpo              r_i - mean                           a group of one: 0
 *   reinforce_baseline   r_i - mean, then whitened            a group of one: 0 before whitening
 *   rloo                 r_i - (sum - r_i) / (n - 1)          a group of one: r_i
 *   reinforce            G_t = r_t + gamma * G_t+1, then whitened; r_t = r_i on the last trained token, else 0
 *
 * A group value is the advantage of every trained token of the rollout. Whitening is over all trained tokens of the batch:
 * (A - mu) / sqrt(max(var, 1e-8)), var with n in the denominator.
 *
 * Invariants
 *   1. A rollout has one reward, whatever the number of its trajectories, and counts once in its group.
 *   2. Equal rewards give exactly 0. It is a test (max == min), because a rounded mean of 8 x 0.9 is not 0.9.
 *   3. Groups are found by id, of any size. Who belongs to a group is settled before: every rollout given here counts.
 *   4. The advantage of a token that is not trained is 0.
 * Departure: upstream sums in float32 and divides the rounding residual of an all-equal group by 1e-9.
 * One thread handles about half a million tokens in 20 ms, so batches are worked on in stretches (stretch.ts).
 * Called by batch.ts (credit). Elsewhere called advantage estimation; a group baseline is GRPO's "relative" part.
 */
import { Stretch } from './stretch.ts';
import { assertNever, type Group, invariant, type Rollout, type Sample } from './types.ts';

export type Estimator = 'grpo' | 'rloo' | 'reinforce_baseline' | 'dr_grpo' | 'reinforce';

export interface CreditOptions {
  readonly estimator: Estimator;
  readonly gamma: number; // per token; reinforce only
  readonly whiten: boolean; // reinforce and reinforce_baseline only
  readonly clipRange: readonly [number, number]; // of rewards, before any baseline
}

/** Of one batch; names as in metrics.ts. Ratios are of groups or rollouts, 0..1. */
export interface CreditMetrics {
  readonly group_reward_std: number; // mean over groups of the n - 1 deviation of clipped rewards; a group of one counts 0
  readonly group_all_equal_ratio: number; // groups that teach nothing under a group estimator
  readonly reward_clipped_ratio: number; // rollouts whose reward was moved by the clip range
  readonly return_mean: number; // per trained token, before whitening
}

export interface Credit {
  readonly samples: Sample[]; // every trajectory of every rollout, in order
  readonly metrics: CreditMetrics;
}

const GRPO_EPSILON = 1e-9;
const MIN_VARIANCE = 1e-8;

/**
 * Credits whole groups. Pure: the rollouts are not changed. Rejects when a rollout has no finite reward, which the caller
 * must have dropped.
 */
export async function credit(groups: readonly Group[], options: CreditOptions): Promise<Credit> {
  const stretch = new Stretch();
  const clipped = groups.map((group) => group.rollouts.map((rollout) => clip(rewardOf(rollout), options.clipRange)));
  const scalars = clipped.map((rewards) => groupAdvantages(rewards, options.estimator));

  const rows: Row[] = [];
  for (const [g, group] of groups.entries()) {
    for (const [i, rollout] of group.rollouts.entries()) {
      for (const trajectory of rollout.trajectories) {
        await stretch.pause();
        const values = tokenAdvantages(trajectory.lossMask, scalars[g]?.[i] as number, options);
        rows.push({ trajectory, rolloutId: rollout.rolloutId, groupId: group.groupId, values });
      }
    }
  }
  const range = await rangeOf(rows, stretch);
  const whitens = options.estimator === 'reinforce' || options.estimator === 'reinforce_baseline';
  if (whitens && options.whiten) await whiten(rows, range, stretch);
  const samples: Sample[] = [];
  for (const { values, ...row } of rows) {
    samples.push({ ...row, advantages: new Float32Array(values) });
    await stretch.pause();
  }
  return { samples, metrics: { ...groupMetrics(groups, clipped), return_mean: range.mean } };
}

/** A sample in the making: the wire takes float32, the sums here float64. */
interface Row extends Omit<Sample, 'advantages'> {
  readonly values: Float64Array;
}

// ---- One group to one number per rollout ----

function groupAdvantages(rewards: readonly number[], estimator: Estimator): number[] {
  switch (estimator) {
    case 'grpo':
      return grpo(rewards);
    case 'rloo':
      return rloo(rewards);
    case 'dr_grpo':
    case 'reinforce_baseline':
      return minusMean(rewards);
    case 'reinforce':
      return [...rewards]; // discounted per token below
    default:
      return assertNever(estimator);
  }
}

/** (r - mean) / (std + 1e-9), std with n - 1 (Shao et al. 2024, DeepSeekMath). */
export function grpo(rewards: readonly number[]): number[] {
  const scale = standardDeviation(rewards) + GRPO_EPSILON;
  return minusMean(rewards).map((value) => value / scale);
}

/** r - mean: dr_grpo (Liu et al. 2025: no division by std), and reinforce_baseline before whitening. */
export function minusMean(rewards: readonly number[]): number[] {
  if (allEqual(rewards)) return rewards.map(() => 0);
  const mean = sum(rewards) / rewards.length;
  return rewards.map((reward) => reward - mean);
}

/** r - mean of the others (Ahmadian et al. 2024). Alone there are no others: the reward itself. */
export function rloo(rewards: readonly number[]): number[] {
  if (rewards.length === 1) return [...rewards];
  if (allEqual(rewards)) return rewards.map(() => 0);
  const total = sum(rewards);
  return rewards.map((reward) => reward - (total - reward) / (rewards.length - 1));
}

// ---- Tokens ----

/** (tokens): the value on every trained token, or for reinforce the discounted return; 0 where nothing is trained. */
function tokenAdvantages(lossMask: Uint8Array, value: number, options: CreditOptions): Float64Array {
  if (options.estimator === 'reinforce') return reinforce(value, lossMask, options.gamma);
  const advantages = new Float64Array(lossMask.length).fill(value);
  return zeroUntrained(advantages, lossMask);
}

/**
 * Returns of one trajectory: the reward arrives on its last trained token. A rollout of several trajectories ends each of
 * them with its one reward, since all of them led to it.
 */
export function reinforce(reward: number, lossMask: Uint8Array, gamma: number): Float64Array {
  const tokenRewards = new Float64Array(lossMask.length);
  const last = lossMask.lastIndexOf(1);
  if (last >= 0) tokenRewards[last] = reward;
  return zeroUntrained(discountedReturns(tokenRewards, gamma), lossMask);
}

/**
 * G_t = r_t + gamma * G_t+1. The recursion runs over every token of the row: an observation gives no reward, and discounts
 * like a token (upstream's rule, kept so that gamma means the same).
 */
export function discountedReturns(tokenRewards: Float64Array, gamma: number): Float64Array {
  const returns = new Float64Array(tokenRewards.length);
  let next = 0;
  for (let t = tokenRewards.length - 1; t >= 0; t--) {
    next = (tokenRewards[t] as number) + gamma * next;
    returns[t] = next;
  }
  return returns;
}

function zeroUntrained(values: Float64Array, lossMask: Uint8Array): Float64Array {
  for (let t = 0; t < values.length; t++) if (lossMask[t] !== 1) values[t] = 0;
  return values;
}

/** In place, over the trained tokens of all rows together; the others stay 0. Equal values become exactly 0. */
async function whiten(rows: readonly Row[], { count, mean, low, high }: Range, stretch: Stretch): Promise<void> {
  let squares = 0;
  for (const { values, trajectory } of rows) {
    const { lossMask } = trajectory;
    for (let t = 0; t < values.length; t++) if (lossMask[t] === 1) squares += ((values[t] as number) - mean) ** 2;
    await stretch.pause();
  }
  const scale = Math.sqrt(Math.max(squares / count, MIN_VARIANCE));
  for (const { values, trajectory } of rows) {
    const { lossMask } = trajectory;
    for (let t = 0; t < values.length; t++)
      if (lossMask[t] === 1) values[t] = low === high ? 0 : ((values[t] as number) - mean) / scale;
    await stretch.pause();
  }
}

interface Range {
  readonly count: number; // trained tokens
  readonly mean: number; // 0 when there are none
  readonly low: number;
  readonly high: number;
}

async function rangeOf(rows: readonly Row[], stretch: Stretch): Promise<Range> {
  let [count, total, low, high] = [0, 0, Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY];
  for (const { values, trajectory } of rows) {
    const { lossMask } = trajectory;
    for (let t = 0; t < values.length; t++) {
      if (lossMask[t] !== 1) continue;
      const value = values[t] as number;
      count += 1;
      total += value;
      if (value < low) low = value;
      if (value > high) high = value;
    }
    await stretch.pause();
  }
  return { count, mean: count > 0 ? total / count : 0, low, high };
}

// ---- Rewards ----

function rewardOf(rollout: Rollout): number {
  invariant(
    rollout.reward !== null && Number.isFinite(rollout.reward),
    `rollout ${rollout.rolloutId} ended ${rollout.reason} with reward ${rollout.reward} and was not dropped before credit`,
  );
  return rollout.reward;
}

function clip(reward: number, [low, high]: readonly [number, number]): number {
  return Math.min(Math.max(reward, low), high);
}

function groupMetrics(
  groups: readonly Group[],
  clipped: readonly (readonly number[])[],
): Omit<CreditMetrics, 'return_mean'> {
  const rollouts = sum(groups.map((group) => group.rollouts.length));
  const moved = sum(
    groups.map((group, g) => group.rollouts.filter((rollout, i) => rollout.reward !== clipped[g]?.[i]).length),
  );
  return {
    group_reward_std: sum(clipped.map(standardDeviation)) / Math.max(groups.length, 1),
    group_all_equal_ratio: clipped.filter(allEqual).length / Math.max(groups.length, 1),
    reward_clipped_ratio: moved / Math.max(rollouts, 1),
  };
}

/** Sample deviation (n - 1); 0 for one value and for equal values. */
export function standardDeviation(values: readonly number[]): number {
  if (values.length < 2 || allEqual(values)) return 0;
  const mean = sum(values) / values.length;
  return Math.sqrt(sum(values.map((value) => (value - mean) ** 2)) / (values.length - 1));
}

function allEqual(values: readonly number[]): boolean {
  return values.every((value) => value === values[0]);
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}
