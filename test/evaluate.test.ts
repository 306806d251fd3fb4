import { expect, test } from 'vitest';
import { constantBest } from '../molt/evaluate.ts';

test('constantBest is the share of the most frequent label, whatever its type', () => {
  expect(constantBest(['7', '8', '7', 7])).toBe(0.5);
  expect(constantBest([{ a: 1 }, { a: 1 }, null])).toBeCloseTo(2 / 3, 12);
  expect(constantBest([])).toBe(0);
});
