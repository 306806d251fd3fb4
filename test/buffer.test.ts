import { describe, expect, test } from 'vitest';
import { Buffer } from '../molt/buffer.ts';
import type { EndReason, Prompt, Rollout, Trajectory } from '../molt/types.ts';

const prompt: Prompt = { source: 'test', epoch: 0, index: 0, input: 'x', label: null, tools: null };
const trajectory: Trajectory = {
  ids: Int32Array.from([1, 2]),
  lossMask: Uint8Array.from([0, 1]),
  logprobs: Float32Array.from([0, -1]),
  versions: Int32Array.from([-1, 0]),
  turns: Int32Array.from([0, 0]),
  spans: [],
};
function rollout(groupId: string, index: number, reason: EndReason = 'done'): Rollout {
  return {
    rolloutId: `${groupId}-${index}`,
    groupId,
    index,
    attempt: 0,
    reason,
    detail: null,
    reward: reason === 'agent_error' ? null : 1,
    score: 1,
    truncated: false,
    info: {},
    turns: 1,
    trajectories: reason === 'agent_error' ? [] : [trajectory],
    dispatchedVersion: 0,
  };
}
const make = (over: Partial<ConstructorParameters<typeof Buffer>[0]> = {}) =>
  new Buffer({ batch: 2, groupSize: 2, minMembers: 2, maxStaleness: 0, ...over });

describe('capacity', () => {
  test('counts running, waiting and training groups and returns after training', () => {
    const buffer = make();
    expect(buffer.capacity).toBe(2);
    buffer.admit('a', prompt);
    buffer.admit('b', prompt);
    expect(buffer.capacity).toBe(0);
    for (const id of ['a', 'b']) for (const i of [0, 1]) buffer.end(rollout(id, i));
    expect(buffer.capacity).toBe(0);
    buffer.take();
    expect(buffer.capacity).toBe(0);
    buffer.trained();
    expect(buffer.capacity).toBe(2);
  });

  test('is refused when it is used up', () => {
    const buffer = make();
    buffer.admit('a', prompt);
    buffer.admit('b', prompt);
    expect(() => buffer.admit('c', prompt)).toThrow('no capacity');
  });

  test('grows with max_staleness, in batches', () => {
    expect(make({ maxStaleness: 3 }).capacity).toBe(8);
  });
});

describe('a group', () => {
  test('waits when its last member has ended, members in order of index', () => {
    const buffer = make();
    buffer.admit('a', prompt);
    expect(buffer.end(rollout('a', 1))).toBeNull();
    const verdict = buffer.end(rollout('a', 0));
    expect(verdict?.kind).toBe('waiting');
    expect(verdict?.kind === 'waiting' && verdict.group.rollouts.map((r) => r.index)).toEqual([0, 1]);
  });

  test('keeps its survivors when a member failed and enough are left', () => {
    const buffer = make({ groupSize: 3 });
    buffer.admit('a', prompt);
    buffer.end(rollout('a', 0));
    buffer.end(rollout('a', 1, 'agent_error'));
    const verdict = buffer.end(rollout('a', 2));
    expect(verdict?.kind === 'waiting' && verdict.group.rollouts.map((r) => r.index)).toEqual([0, 2]);
    expect(verdict?.lost.map((r) => r.index)).toEqual([1]);
  });

  test('is dropped with a reason when too few are left, and its place is free again', () => {
    const buffer = make();
    buffer.admit('a', prompt);
    buffer.end(rollout('a', 0, 'agent_error'));
    expect(buffer.end(rollout('a', 1))).toMatchObject({ kind: 'dropped', reason: 'incomplete_group' });
    expect(buffer.capacity).toBe(2);
    expect(buffer.counts).toMatchObject({ admitted: 1, dropped: 1, running: 0 });
  });

  test('cannot be admitted twice, nor a rollout end twice', () => {
    const buffer = make();
    buffer.admit('a', prompt);
    expect(() => buffer.admit('a', prompt)).toThrow('admitted twice');
    buffer.end(rollout('a', 0));
    expect(() => buffer.end(rollout('a', 0))).toThrow('ended twice');
    expect(() => buffer.end(rollout('z', 0))).toThrow('not running');
  });
});

test('take hands over the groups that finished first, in order of admission, each once', () => {
  const buffer = make({ maxStaleness: 1 });
  for (const id of ['a', 'b', 'c', 'd']) buffer.admit(id, prompt);
  for (const id of ['c', 'a', 'd', 'b']) for (const i of [0, 1]) buffer.end(rollout(id, i));
  expect(buffer.take().map((g) => g.groupId)).toEqual(['a', 'c']);
  expect(() => buffer.take()).toThrow('in training already');
  buffer.trained();
  expect(buffer.take().map((g) => g.groupId)).toEqual(['b', 'd']);
  buffer.trained();
  expect(() => buffer.take()).toThrow('0 groups wait');
});
