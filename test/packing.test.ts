import { describe, expect, test } from 'vitest';
import {
  type BatchPlan,
  type PackingOptions,
  partition,
  partitionEvenly,
  planBatch,
  rowColumns,
  staleColumn,
} from '../molt/packing.ts';
import type { Sample } from '../molt/types.ts';

const BUDGET: PackingOptions = { numRanks: 1, microBatchSize: 0, maxTokens: 100, packed: true };

/** Lengths of `n` samples in 1..max, the same for the same seed. */
function randomLengths(n: number, max: number, seed: number): number[] {
  let state = seed;
  return Array.from({ length: n }, () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return 1 + (state % max);
  });
}
/** Tokens one micro-batch puts through the model. */
function cost(batch: readonly number[], lengths: readonly number[], packed: boolean): number {
  const sizes = batch.map((index) => lengths[index] as number);
  return packed ? sizes.reduce((a, b) => a + b, 0) : sizes.length * Math.max(0, ...sizes);
}
/** Sample indices of each micro-batch of each rank. */
function batchesOf(plan: BatchPlan): number[][][] {
  return plan.ranks.map((rank) => rank.microBatches.map((rows) => rows.map((row) => rank.samples[row] as number)));
}

describe('largest differencing', () => {
  const vectors: readonly (readonly [number[], number, boolean, number[][]])[] = [
    [
      [10, 9, 8, 7, 6, 5, 4, 3],
      4,
      true,
      [
        [3, 4],
        [2, 5],
        [1, 6],
        [0, 7],
      ],
    ],
    [
      [8, 7, 6, 5, 4],
      2,
      false,
      [
        [1, 3, 4],
        [0, 2],
      ],
    ],
    [
      [1, 1, 1, 1],
      2,
      true,
      [
        [0, 3],
        [1, 2],
      ],
    ],
    [
      [100, 1, 1, 1, 1, 1],
      3,
      true,
      [
        [0, 1],
        [2, 5],
        [3, 4],
      ],
    ],
    [[5], 3, false, [[0], [], []]],
    [[], 2, false, [[], []]],
  ];
  test.each(vectors)('of %j in %i parts (equal counts %s)', (lengths, k, equal, expected) => {
    expect(partition(lengths, k, equal)).toEqual(expected);
  });

  test('counts that do not divide differ by one, and no item is lost', () => {
    for (let n = 0; n <= 20; n++) {
      for (let k = 1; k <= 6; k++) {
        const parts = partitionEvenly(randomLengths(n, 50, n * 7 + k), k);
        expect(parts.flat().sort((a, b) => a - b)).toEqual(Array.from({ length: n }, (_, i) => i));
        const counts = parts.map((part) => part.length);
        expect(Math.max(...counts) - Math.min(...counts)).toBeLessThanOrEqual(1);
      }
    }
  });

  test('sums are closer than those of dealing in turn', () => {
    const lengths = randomLengths(64, 1000, 3);
    const spread = (parts: number[][]) => {
      const sums = parts.map((part) => cost(part, lengths, true));
      return Math.max(...sums) - Math.min(...sums);
    };
    const dealt = Array.from({ length: 8 }, (_, k) => lengths.map((_, i) => i).filter((i) => i % 8 === k));
    expect(spread(partition(lengths, 8, true))).toBeLessThan(spread(dealt) / 20);
  });
});

describe('a plan', () => {
  const shapes = [true, false].flatMap((packed) =>
    [0, 1, 3].flatMap((microBatchSize) => [1, 2, 5].map((numRanks) => ({ packed, microBatchSize, numRanks }))),
  );
  test.each(shapes)('places every sample once and keeps ranks in step: %j', (shape) => {
    for (const n of [0, 1, 2, 3, 7, 16, 41]) {
      const lengths = randomLengths(n, 130, n + 1); // some longer than the budget of 100
      const plan = planBatch(lengths, { ...BUDGET, ...shape });
      const batches = batchesOf(plan);
      expect(batches.flat(2).sort((a, b) => a - b)).toEqual(lengths.map((_, i) => i));
      expect(plan.ranks).toHaveLength(shape.numRanks);
      for (const rank of plan.ranks) {
        expect(rank.microBatches).toHaveLength(plan.numMicroBatches);
        expect(rank.microBatches.flat()).toEqual(rank.samples.map((_, row) => row)); // rows in the order they run
        expect(rank.tokens).toBe(cost(rank.samples, lengths, true));
      }
      expect(plan.numDummies).toBe(batches.flat().filter((batch) => batch.length === 0).length);
      for (const batch of batches.flat()) {
        if (shape.microBatchSize > 0) expect(batch.length).toBeLessThanOrEqual(shape.microBatchSize);
        else if (batch.length > 1) expect(cost(batch, lengths, shape.packed)).toBeLessThanOrEqual(100);
      }
    }
  });

  test('fewer samples than ranks leave ranks with dummies only', () => {
    expect(planBatch([5], { ...BUDGET, numRanks: 3 })).toEqual({
      ranks: [
        { samples: [0], microBatches: [[0]], tokens: 5 },
        { samples: [], microBatches: [[]], tokens: 0 },
        { samples: [], microBatches: [[]], tokens: 0 },
      ],
      numMicroBatches: 1,
      numDummies: 2,
    });
  });

  test('a sample longer than the budget goes alone', () => {
    expect(batchesOf(planBatch([150, 10, 20], BUDGET))).toEqual([[[0], [2, 1]]]);
    expect(batchesOf(planBatch([10, 150, 20], { ...BUDGET, packed: false }))).toEqual([[[1], [2, 0]]]);
  });

  test('the budget holds where near-equal sums would overstep it', () => {
    // Two parts of 3 3 2 2 2 by differencing are 7 and 5.
    expect(batchesOf(planBatch([3, 3, 2, 2, 2], { ...BUDGET, maxTokens: 6 }))).toEqual([
      [
        [0, 1],
        [2, 3, 4],
      ],
    ]);
  });

  test('padding counts against the budget of padded rows', () => {
    const lengths = [50, 10, 10, 10, 10];
    expect(batchesOf(planBatch(lengths, BUDGET))).toEqual([[[0, 1, 2, 3, 4]]]); // 90 tokens packed
    expect(batchesOf(planBatch(lengths, { ...BUDGET, packed: false }))).toEqual([
      [
        [0, 1],
        [2, 3, 4],
      ],
    ]); // 2 x 50, 3 x 10
  });

  test('a sample over the budget does not keep the others from being balanced', () => {
    // First-fit alone gives 60 + 40 and 30 + 30.
    const lengths = [150, 60, 30, 30, 40];
    const batches = batchesOf(planBatch(lengths, BUDGET))[0] ?? [];
    expect(batches.map((batch) => cost(batch, lengths, true))).toEqual([150, 90, 70]);
  });

  test('of padded rows the costliest micro-batch comes first, not the longest', () => {
    expect(batchesOf(planBatch([60, 30, 10, 10], { ...BUDGET, packed: false }))).toEqual([[[1, 2, 3], [0]]]);
  });

  const splits: readonly (readonly [number, number])[] = [
    [1, 8],
    [2, 4],
    [4, 2],
    [8, 1],
  ];
  test.each(splits)('micro-batches of %i samples make %i of eight', (microBatchSize, count) => {
    const plan = planBatch([4, 4, 4, 4, 4, 4, 4, 4], { ...BUDGET, microBatchSize });
    expect(plan.ranks[0]?.microBatches.map((batch) => batch.length)).toEqual(Array(count).fill(microBatchSize));
  });

  test('the heaviest micro-batch comes first on every rank', () => {
    const lengths = randomLengths(60, 90, 5);
    for (const batches of batchesOf(planBatch(lengths, { ...BUDGET, numRanks: 3 }))) {
      const costs = batches.map((batch) => cost(batch, lengths, true));
      expect(costs).toEqual([...costs].sort((a, b) => b - a));
    }
  });

  test('ranks get near-equal tokens', () => {
    const plan = planBatch(randomLengths(256, 2000, 9), { ...BUDGET, maxTokens: 8192, numRanks: 8 });
    const tokens = plan.ranks.map((rank) => rank.tokens);
    expect(Math.max(...tokens) / Math.min(...tokens)).toBeLessThan(1.01);
  });

  test('the same lengths give the same plan', () => {
    const lengths = Array.from({ length: 40 }, (_, i) => 10 + (i % 3)); // full of ties
    const plan = planBatch(lengths, { ...BUDGET, numRanks: 4 });
    expect(planBatch([...lengths], { ...BUDGET, numRanks: 4 })).toEqual(plan);
  });
});

describe('columns', () => {
  function sample(ids: number[], advantages: number[]): Sample {
    const n = ids.length;
    const trajectory = {
      ids: Int32Array.from(ids),
      lossMask: Uint8Array.from(ids, (_, k) => (k > 0 ? 1 : 0)),
      logprobs: Float32Array.from(ids, (_, k) => -k),
      versions: new Int32Array(n),
      turns: new Int32Array(n),
      spans: [],
    };
    return { trajectory, rolloutId: 'r', groupId: 'g', advantages: Float32Array.from(advantages) };
  }

  test('lie end to end, with the length of each row', () => {
    expect(rowColumns([sample([7, 8, 9], [0, 1, 2]), sample([5, 6], [0, 3])])).toEqual({
      ids: Int32Array.from([7, 8, 9, 5, 6]),
      lengths: Int32Array.from([3, 2]),
      loss_mask: Uint8Array.from([0, 1, 1, 0, 1]),
      rollout_logprobs: Float32Array.from([-0, -1, -2, -0, -1]),
      advantages: Float32Array.from([0, 1, 2, 0, 3]),
    });
  });

  test('stale are trained tokens of an older version; where keys are kept, what follows them in the turn too', () => {
    const one = (lossMask: number[], versions: number[], turns: number[]): Sample => {
      const made = sample(Array(lossMask.length).fill(1), Array(lossMask.length).fill(0));
      const columns = { lossMask: Uint8Array.from(lossMask), versions: Int32Array.from(versions) };
      return { ...made, trajectory: { ...made.trajectory, ...columns, turns: Int32Array.from(turns) } };
    };
    // context, turn 0 across a refit, context, turn 1 after it, and a turn that is not trained
    const crossed = one([0, 1, 1, 0, 1, 1, 0], [-1, 3, 4, -1, 4, 4, 2], [0, 0, 0, 1, 1, 1, 2]);
    const fresh = one([0, 1, 1], [-1, 4, 4], [0, 0, 0]);
    expect(staleColumn([crossed, fresh], 4, false)).toEqual(Uint8Array.from([0, 1, 0, 0, 0, 0, 0, 0, 0, 0]));
    expect(staleColumn([crossed, fresh], 4, true)).toEqual(Uint8Array.from([0, 1, 1, 0, 0, 0, 0, 0, 0, 0]));
    expect(staleColumn([fresh], 5, false)).toEqual(Uint8Array.from([0, 1, 1]));
    expect([staleColumn([fresh], 4, true), staleColumn([], 4, false)]).toEqual([null, null]);
  });

  test('of no rows are empty', () => {
    expect(rowColumns([]).ids).toHaveLength(0);
  });
});
