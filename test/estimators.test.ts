import { describe, expect, test } from 'vitest';
import {
  type CreditOptions,
  credit,
  discountedReturns,
  type Estimator,
  grpo,
  minusMean,
  reinforce,
  rloo,
  standardDeviation,
} from '../molt/estimators.ts';
import type { Group, Rollout, Trajectory } from '../molt/types.ts';

const ESTIMATORS: readonly Estimator[] = ['grpo', 'rloo', 'reinforce_baseline', 'dr_grpo', 'reinforce'];
const OPTIONS: CreditOptions = { estimator: 'grpo', gamma: 1, whiten: true, clipRange: [-10, 10] };

/** A trajectory of one context token and then these loss masks. */
function trajectory(...lossMask: number[]): Trajectory {
  const n = lossMask.length + 1;
  return {
    ids: Int32Array.from({ length: n }, (_, i) => i),
    lossMask: Uint8Array.from([0, ...lossMask]),
    logprobs: new Float32Array(n),
    versions: new Int32Array(n),
    turns: new Int32Array(n),
    spans: [],
  };
}
let numGroups = 0;
/** A group with one rollout per reward, of one trained token unless `trajectories` says otherwise. */
function group(rewards: readonly (number | null)[], trajectories: readonly (readonly Trajectory[])[] = []): Group {
  const groupId = `g${numGroups++}`;
  const rollouts = rewards.map(
    (reward, index): Rollout => ({
      rolloutId: `${groupId}-${index}`,
      groupId,
      index,
      attempt: 0,
      reason: 'done',
      detail: null,
      reward,
      score: reward,
      truncated: false,
      info: {},
      turns: 1,
      trajectories: trajectories[index] ?? [trajectory(1)],
      proofs: [],
      dispatchedVersion: 0,
    }),
  );
  return { groupId, prompt: { source: 's', epoch: 0, index: 0, input: 'x', label: null, tools: null }, rollouts };
}
/** The advantage of the last token of every sample. */
async function lastAdvantages(groups: readonly Group[], options: Partial<CreditOptions>): Promise<number[]> {
  return (await credit(groups, { ...OPTIONS, ...options })).samples.map((sample) => sample.advantages.at(-1) as number);
}
function expectClose(actual: ArrayLike<number>, expected: readonly number[], digits = 6): void {
  expect(actual.length).toBe(expected.length);
  for (const [i, value] of expected.entries()) expect(actual[i]).toBeCloseTo(value, digits);
}

describe('golden values', () => {
  const third = 1 / 3;
  const root3 = Math.sqrt(3);
  const cases: readonly (readonly [Estimator, boolean, number[]])[] = [
    ['grpo', true, [1.5, -0.5, -0.5, -0.5]], // mean .25, std .5
    ['dr_grpo', true, [0.75, -0.25, -0.25, -0.25]],
    ['rloo', true, [1, -third, -third, -third]],
    ['reinforce_baseline', false, [0.75, -0.25, -0.25, -0.25]],
    ['reinforce_baseline', true, [root3, -root3 / 3, -root3 / 3, -root3 / 3]], // population std sqrt(3)/4
    ['reinforce', false, [1, 0, 0, 0]],
    ['reinforce', true, [root3, -root3 / 3, -root3 / 3, -root3 / 3]],
  ];
  test.each(cases)('%s (whiten %s) of rewards 1 0 0 0', async (estimator, whiten, expected) => {
    expectClose(await lastAdvantages([group([1, 0, 0, 0])], { estimator, whiten }), expected);
  });

  test('groups [1 0] and [5 3] have baselines of their own', async () => {
    const groups = [group([1, 0]), group([5, 3])];
    expectClose(await lastAdvantages(groups, { estimator: 'dr_grpo' }), [0.5, -0.5, 1, -1]);
    expectClose(await lastAdvantages(groups, { estimator: 'rloo' }), [1, -1, 2, -2]);
    expectClose(await lastAdvantages(groups, { estimator: 'grpo' }), [
      Math.SQRT1_2,
      -Math.SQRT1_2,
      Math.SQRT1_2,
      -Math.SQRT1_2,
    ]);
  });

  test('groups of 4, 3 and 4 rollouts do not shift each other', async () => {
    const groups = [group([1, 0, 0, 0]), group([3, 0, 0]), group([0, 0, 0, 1])];
    expectClose(
      await lastAdvantages(groups, { estimator: 'dr_grpo' }),
      [0.75, -0.25, -0.25, -0.25, 2, -1, -1, -0.25, -0.25, -0.25, 0.75],
    );
  });

  test('reinforce with rewards 2 and -1 returns them on every token and whitens to 1 and -1', async () => {
    const groups = [group([2], [[trajectory(1, 1, 1)]]), group([-1], [[trajectory(1, 1, 1)]])];
    const raw = (await credit(groups, { ...OPTIONS, estimator: 'reinforce', whiten: false })).samples;
    expectClose(raw[0]?.advantages ?? [], [0, 2, 2, 2]);
    expectClose(raw[1]?.advantages ?? [], [0, -1, -1, -1]);
    const white = (await credit(groups, { ...OPTIONS, estimator: 'reinforce' })).samples;
    expectClose(white[0]?.advantages ?? [], [0, 1, 1, 1]);
    expectClose(white[1]?.advantages ?? [], [0, -1, -1, -1]);
  });

  // Token rewards of upstream's example: reward on the last trained token, minus .2 times the KL of trained tokens.
  const first = [-0.1, 0, 0.05, -0.15 + 2, 0];
  const second = [0, 0.1, -0.05 - 1, 0, 0];
  const returns: readonly (readonly [number, number[], number[]])[] = [
    [1, first, [1.8, 1.9, 1.9, 1.85, 0]],
    [0.75, first, [0.708594, 1.078125, 1.4375, 1.85, 0]],
    [1, second, [-0.95, -0.95, -1.05, 0, 0]],
    [0.75, second, [-0.515625, -0.6875, -1.05, 0, 0]],
  ];
  test.each(returns)('discounted returns at gamma %d of %j', async (gamma, rewards, expected) => {
    expectClose(discountedReturns(Float64Array.from(rewards), gamma), expected);
  });

  test('reinforce discounts over observations too, and gives them no advantage', async () => {
    // trained tokens 1 and 4; the reward travels 3 tokens back
    expectClose(reinforce(8, Uint8Array.from([0, 1, 0, 0, 1, 0]), 0.5), [0, 1, 0, 0, 8, 0]);
  });
});

describe('equal rewards', () => {
  const values = [0, 0.1, 0.11, 0.2, 0.3, 1 / 3, 0.5, 0.7, 0.85, 0.9, 1, -0.9, 1e-7, 9.99];
  test.each([2, 3, 4, 5, 7, 8, 16, 64])('give exactly 0 in groups of %i, whatever the value', async (n) => {
    for (const value of values) {
      const rewards = Array<number>(n).fill(value);
      for (const estimator of [grpo, minusMean, rloo]) expect(estimator(rewards)).toEqual(Array(n).fill(0));
      for (const estimator of ESTIMATORS) {
        const advantages = await lastAdvantages([group(rewards), group(rewards)], { estimator });
        expect(
          advantages.every((advantage) => advantage === 0),
          `${estimator} of ${n} x ${value}`,
        ).toBe(true);
      }
    }
  });

  test('the naive formula does not', async () => {
    const mean = (0.1 + 0.1 + 0.1) / 3;
    expect(0.1 - mean).not.toBe(0); // why the rule is a test and not arithmetic
  });

  test('rewards made equal by clipping count as equal', async () => {
    const { samples, metrics } = await credit([group([12, 15, 10])], { ...OPTIONS, clipRange: [-10, 10] });
    expect(samples.map((sample) => sample.advantages.at(-1))).toEqual([0, 0, 0]);
    expect(metrics.group_all_equal_ratio).toBe(1);
    expect(metrics.reward_clipped_ratio).toBeCloseTo(2 / 3);
  });

  test('a group without spread stays 0 beside one with spread, until whitening', async () => {
    const groups = [group([0.9, 0.9]), group([1, 0])];
    expect((await lastAdvantages(groups, { estimator: 'grpo' })).slice(0, 2)).toEqual([0, 0]);
    expect((await lastAdvantages(groups, { estimator: 'reinforce_baseline' })).slice(0, 2)).toEqual([0, 0]); // mean of all is 0 too
  });
});

describe('a group of one', () => {
  const cases: readonly (readonly [Estimator, number])[] = [
    ['grpo', 0],
    ['dr_grpo', 0],
    ['reinforce_baseline', 0],
    ['rloo', 2],
  ];
  test.each(cases)('%s gives %d for reward 2', async (estimator, expected) => {
    expect(await lastAdvantages([group([2])], { estimator, whiten: false })).toEqual([expected]);
  });
});

describe('rollouts with several trajectories', () => {
  test('count once in the baseline, and share the advantage', async () => {
    // The mean is over 2 rollouts (.5), not over 4 trajectories (.75).
    const groups = [group([1, 0], [[trajectory(1), trajectory(1, 1), trajectory(0, 1)], [trajectory(1)]])];
    const { samples, metrics } = await credit(groups, { ...OPTIONS, estimator: 'dr_grpo' });
    expect(samples.map((sample) => [...sample.advantages])).toEqual([
      [0, 0.5],
      [0, 0.5, 0.5],
      [0, 0, 0.5],
      [0, -0.5],
    ]);
    expect(samples.map((sample) => sample.rolloutId)).toEqual(
      [0, 0, 0, 1].map((i) => groups[0]?.rollouts[i]?.rolloutId),
    );
    expect(metrics.group_reward_std).toBeCloseTo(Math.SQRT1_2);
  });

  test('whitening counts tokens, not rollouts', async () => {
    // Advantages 1 on three tokens and -1 on one: mean .5, population std sqrt(.75).
    const groups = [group([2, 0], [[trajectory(1, 1), trajectory(1)], [trajectory(1)]])];
    const { samples } = await credit(groups, { ...OPTIONS, estimator: 'reinforce_baseline' });
    const values = samples.flatMap((sample) => [...sample.advantages.slice(1)]);
    expectClose(
      values,
      [0.5, 0.5, 0.5, -1.5].map((value) => value / Math.sqrt(0.75)),
    );
    expect(values.reduce((a, b) => a + b)).toBeCloseTo(0);
  });
});

describe('bounds', () => {
  test('a token that is not trained has advantage 0 under every estimator', async () => {
    const groups = [group([1, 0], [[trajectory(1, 0, 0, 1, 0)], [trajectory(0, 1)]])];
    for (const estimator of ESTIMATORS) {
      for (const { trajectory: t, advantages } of (await credit(groups, { ...OPTIONS, estimator, gamma: 0.9 }))
        .samples) {
        expect(advantages.length).toBe(t.ids.length);
        for (const [k, trained] of t.lossMask.entries()) if (trained === 0) expect(advantages[k]).toBe(0);
      }
    }
  });

  test('rewards are clipped before the baseline', async () => {
    expect(await lastAdvantages([group([100, 0])], { estimator: 'dr_grpo' })).toEqual([5, -5]);
    expect(await lastAdvantages([group([100, 0])], { estimator: 'dr_grpo', clipRange: [-1, 1] })).toEqual([0.5, -0.5]);
  });

  test.each([null, Number.NaN, Number.POSITIVE_INFINITY])(
    'a rollout with reward %s is refused by name',
    async (reward) => {
      await expect(credit([group([1, reward])], OPTIONS)).rejects.toThrow(
        /rollout g\d+-1 ended done with reward .* not dropped before credit/,
      );
    },
  );

  test('no groups, and rollouts without a trained token, give no NaN', async () => {
    expect(await credit([], OPTIONS)).toEqual({
      samples: [],
      metrics: { group_reward_std: 0, group_all_equal_ratio: 0, reward_clipped_ratio: 0, return_mean: 0 },
    });
    for (const estimator of ESTIMATORS) {
      const { samples, metrics } = await credit([group([1, 0], [[trajectory(0)], [trajectory(0)]])], {
        ...OPTIONS,
        estimator,
      });
      for (const sample of samples) expect([...sample.advantages]).toEqual([0, 0]);
      expect(metrics.return_mean).toBe(0);
    }
  });

  test('the deviation divides by n - 1', async () => {
    expect(standardDeviation([1, 0, 0, 0])).toBe(0.5);
    expect(standardDeviation([7])).toBe(0);
    const { metrics } = await credit([group([1, 0, 0, 0]), group([2])], OPTIONS);
    expect(metrics.group_reward_std).toBe(0.25); // mean of .5 and 0
  });
});
