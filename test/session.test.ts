import { describe, expect, test } from 'vitest';
import { type SampledTurn, Session } from '../molt/session.ts';

const ids = (...values: number[]) => Int32Array.from(values);
const sampled = (values: number[], logprobs: number[], version = 0): SampledTurn => ({
  ids: Int32Array.from(values),
  logprobs: Float32Array.from(logprobs),
  spans: [{ version, from: 0, to: values.length }],
});
const list = (array: ArrayLike<number>) => Array.from(array);
const rounded = (array: ArrayLike<number>) => Array.from(array, (x) => Math.round(x * 1e4) / 1e4);

describe('a chain of turns', () => {
  test('gives the worked example of types.ts', () => {
    const session = new Session();
    const first = session.commit(null, ids(11, 12, 13), sampled([90, 2], [-0.3, -0.1], 4));
    session.commit(first, ids(50, 51), sampled([91, 2], [-0.2, -0.1], 4));
    const [t, ...rest] = session.trajectories();
    expect(rest).toEqual([]);
    expect(list(t!.ids)).toEqual([11, 12, 13, 90, 2, 50, 51, 91, 2]);
    expect(list(t!.lossMask)).toEqual([0, 0, 0, 1, 1, 0, 0, 1, 1]);
    expect(rounded(t!.logprobs)).toEqual([0, 0, 0, -0.3, -0.1, 0, 0, -0.2, -0.1]);
    expect(list(t!.versions)).toEqual([-1, -1, -1, 4, 4, -1, -1, 4, 4]);
    expect(list(t!.turns)).toEqual([0, 0, 0, 0, 0, 1, 1, 1, 1]);
    expect(t!.spans).toEqual([
      { source: 'context', version: -1, turn: 0, from: 0, to: 3 },
      { source: 'policy', version: 4, turn: 0, from: 3, to: 5 },
      { source: 'context', version: -1, turn: 1, from: 5, to: 7 },
      { source: 'policy', version: 4, turn: 1, from: 7, to: 9 },
    ]);
  });

  test('prompts with exactly what was sampled before, then the suffix', () => {
    const session = new Session();
    expect(list(session.prompt(null, ids(1, 2)))).toEqual([1, 2]);
    const a = session.commit(null, ids(1, 2), sampled([7, 8], [-1, -1]));
    const b = session.commit(a, ids(3), sampled([9], [-1]));
    expect(list(session.prompt(b, ids(4, 5)))).toEqual([1, 2, 7, 8, 3, 9, 4, 5]);
  });

  test('keeps one span for each policy version of a turn', () => {
    const session = new Session();
    session.commit(null, ids(1), {
      ids: ids(5, 6, 7),
      logprobs: Float32Array.from([-1, -2, -3]),
      spans: [
        { version: 3, from: 0, to: 2 },
        { version: 4, from: 2, to: 3 },
      ],
    });
    const [t] = session.trajectories();
    expect(list(t!.versions)).toEqual([-1, 3, 3, 4]);
    expect(t!.spans.slice(1).map((s) => [s.version, s.from, s.to])).toEqual([
      [3, 1, 3],
      [4, 3, 4],
    ]);
  });

  test('is empty when nothing was sampled', () => {
    expect(new Session().trajectories()).toEqual([]);
  });
});

describe('a fork', () => {
  test('trains a shared turn in exactly one branch; elsewhere it is context', () => {
    const session = new Session();
    const root = session.commit(null, ids(1), sampled([10, 11], [-0.5, -0.6], 2));
    session.commit(root, ids(2), sampled([20], [-0.7], 2));
    session.commit(root, ids(3), sampled([30, 31], [-0.8, -0.9], 3));
    const [left, right] = session.trajectories();
    expect(list(left!.ids)).toEqual([1, 10, 11, 2, 20]);
    expect(list(left!.lossMask)).toEqual([0, 1, 1, 0, 1]);
    expect(list(right!.ids)).toEqual([1, 10, 11, 3, 30, 31]);
    expect(list(right!.lossMask)).toEqual([0, 0, 0, 0, 1, 1]);
    expect(rounded(right!.logprobs)).toEqual([0, 0, 0, 0, -0.8, -0.9]);
    expect(list(right!.versions)).toEqual([-1, -1, -1, -1, 3, 3]);
    const masks = list(left!.lossMask).concat(list(right!.lossMask));
    expect(masks.reduce((a, b) => a + b)).toBe(5); // every sampled token once
  });
});

describe('commit', () => {
  test('refuses arrays that do not agree', () => {
    const session = new Session();
    expect(() => session.commit(null, ids(1), sampled([5, 6], [-1]))).toThrow('2 ids but 1 logprobs');
  });

  test('refuses spans that leave a gap or do not cover the ids', () => {
    const session = new Session();
    const turn = { ids: ids(5, 6), logprobs: Float32Array.from([-1, -1]) };
    expect(() => session.commit(null, ids(1), { ...turn, spans: [{ version: 0, from: 1, to: 2 }] })).toThrow(
      'does not follow 0',
    );
    expect(() => session.commit(null, ids(1), { ...turn, spans: [{ version: 0, from: 0, to: 1 }] })).toThrow(
      'cover 1 of 2',
    );
  });
});
