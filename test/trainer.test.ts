import { describe, expect, test } from 'vitest';
import { flatRows, learningRate } from '../molt/trainer.ts';

describe('learningRate', () => {
  const base = { steps: 10, lr: 1, warmupRatio: 0, minRatio: 0.1 } as const;
  const curve = (over: Partial<Parameters<typeof learningRate>[0]>) =>
    Array.from({ length: 10 }, (_, step) => learningRate({ ...base, schedule: 'linear', step, ...over }));

  test('linear starts at the peak and ends one step short of min ratio', () => {
    const lrs = curve({});
    expect(lrs[0]).toBe(1);
    expect(lrs[5]).toBeCloseTo(0.55, 12);
    expect(lrs[9]).toBeCloseTo(0.19, 12);
  });

  test('cosine is half way at half time', () => {
    expect(curve({ schedule: 'cosine' })[5]).toBeCloseTo(0.55, 12);
  });

  test('warm-up rises linearly and never starts at zero, constant stays there', () => {
    const lrs = curve({ schedule: 'constant', warmupRatio: 0.4 });
    expect(lrs.slice(0, 5)).toEqual([0.25, 0.5, 0.75, 1, 1]);
    expect(lrs[9]).toBe(1);
  });

  test('a warm-up shorter than a step is none', () => {
    expect(curve({ schedule: 'constant', warmupRatio: 0.03 })[0]).toBe(1);
  });
});

test('flatRows puts rows back to back and keeps their lengths', () => {
  const { ids, lengths } = flatRows([Int32Array.from([1, 2]), Int32Array.from([]), Int32Array.from([3])]);
  expect(Array.from(ids)).toEqual([1, 2, 3]);
  expect(Array.from(lengths)).toEqual([2, 0, 1]);
});
