/** What a step reports of engine and trainer, and when it stops a run (molt/report.ts, molt/health.ts). */
import { describe, expect, test } from 'vitest';
import { Health } from '../molt/health.ts';
import { batchMetrics, stepMetrics, withMismatchOf } from '../molt/report.ts';
import type { Group, Rollout, Trajectory } from '../molt/types.ts';

describe('the numbers of a step', () => {
  test('mismatch is a mean over fresh tokens, drift over stale ones, the weight over all', () => {
    const sums = { tokens: 10, fresh_tokens: 4, mismatch_abs: 0.4, mismatch_k3: 0.02, drift_abs: 3, is_weight: 11 };
    expect(stepMetrics({ sums, maxima: { mismatch_abs: 0.2 } })).toMatchObject({
      logprob_mismatch_mean: 0.1,
      logprob_mismatch_max: 0.2,
      logprob_mismatch_k3: 0.005,
      policy_drift_mean: 0.5,
      is_weight_mean: 1.1,
    });
  });

  test('without a fresh token there is no mismatch, without a stale one no drift', () => {
    const none = { logprob_mismatch_mean: null, logprob_mismatch_max: null, logprob_mismatch_k3: null };
    const sums = { tokens: 2, fresh_tokens: 0, mismatch_abs: 0, mismatch_k3: 0, drift_abs: 3, is_weight: 2 };
    expect(stepMetrics({ sums, maxima: { mismatch_abs: 0 } })).toMatchObject({ ...none, policy_drift_mean: 1.5 });
    const fresh = { ...sums, fresh_tokens: 2, drift_abs: 0 };
    expect(stepMetrics({ sums: fresh, maxima: {} })).toMatchObject({
      logprob_mismatch_mean: 0,
      policy_drift_mean: null,
    });
  });

  test('of several passes over a batch the first says how far engine and trainer were apart', () => {
    const pass = (n: number) => ({
      sums: { tokens: n, loss: n, fresh_tokens: n, mismatch_abs: n, drift_abs: n, is_weight: n },
      maxima: { mismatch_abs: n, grad_norm: n },
    });
    expect(withMismatchOf(pass(1), pass(2))).toEqual({
      sums: { tokens: 2, loss: 2, fresh_tokens: 1, mismatch_abs: 1, drift_abs: 1, is_weight: 1 },
      maxima: { mismatch_abs: 1, grad_norm: 2 },
    });
  });

  test('staleness is over trained tokens', async () => {
    const trajectory = { lossMask: [0, 1, 1, 1, 0], versions: [-1, 5, 5, 3, 1] } as unknown as Trajectory;
    const rollout = {
      reward: 1,
      turns: 1,
      truncated: false,
      info: {},
      trajectories: [trajectory],
    } as unknown as Rollout;
    const group = { rollouts: [rollout] } as unknown as Group;
    expect(await batchMetrics([group], 5)).toMatchObject({ staleness_max: 2, staleness_mean: 2 / 3 });
  });
});

describe('engine and trainer that disagree', () => {
  const health = () => new Health({ dtype: 'float32', stop: true, say: () => {} });
  const far = { logprob_mismatch_mean: 0.5 };
  const blind = { logprob_mismatch_mean: null };

  test('stop the run on the third step running', () => {
    const watch = health();
    watch.check(far);
    watch.check(far);
    expect(() => watch.check(far)).toThrow('disagree');
  });

  test('a step without fresh tokens neither agrees nor disagrees', () => {
    const watch = health();
    for (const line of [blind, blind, blind, blind, far, blind, far, blind]) watch.check(line);
    expect(() => watch.check(far)).toThrow('disagree');
    const other = health();
    for (const line of [far, far, { logprob_mismatch_mean: 1e-5 }, blind, far, far, blind]) other.check(line);
  });
});
