/** Accounting of groups: each rule by hand. All of it together, in 10,000 random runs, is in pool.test.ts. */
import { describe, expect, test } from 'vitest';
import { Buffer, type BufferOptions } from '../molt/buffer.ts';
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
function rollout(groupId: string, index: number, reason: EndReason = 'done', score = 1): Rollout {
  return {
    rolloutId: `${groupId}-${index}`,
    groupId,
    index,
    attempt: 0,
    reason,
    detail: null,
    reward: reason === 'agent_error' ? null : score,
    score,
    truncated: false,
    info: {},
    turns: 1,
    trajectories: reason === 'agent_error' ? [] : [trajectory],
    proofs: [],
    dispatchedVersion: 0,
  };
}
const make = (over: Partial<BufferOptions> = {}) =>
  new Buffer({
    batch: 2,
    steps: 100,
    maxStaleness: 0,
    late: 'wait',
    order: 'first_finished',
    failed: 'keep',
    band: null,
    ...over,
  });
const admit = (buffer: Buffer, groupId: string, version = 0, size = 2) =>
  buffer.admit(groupId, prompt, { size, version });
const finish = (buffer: Buffer, groupId: string, size = 2) => {
  for (let index = 0; index < size; index++) buffer.end(rollout(groupId, index));
};
const ids = (groups: readonly { groupId: string }[]) => groups.map((group) => group.groupId);

describe('capacity', () => {
  test('counts running, waiting and training groups, and returns when the refit is over', () => {
    const buffer = make();
    for (const id of ['a', 'b']) admit(buffer, id);
    expect(buffer.capacity).toBe(0);
    for (const id of ['a', 'b']) finish(buffer, id);
    expect(buffer.capacity).toBe(0);
    buffer.take(0);
    expect(buffer.capacity).toBe(0);
    expect(buffer.heldCapacity).toBe(2); // for groups whose turns wait for the refit
    buffer.trained();
    expect(buffer.capacity).toBe(2);
  });

  test('grows by a batch with each version of staleness, and never beyond the steps that are left', () => {
    expect(make({ maxStaleness: 3 }).capacity).toBe(8);
    expect(make({ maxStaleness: 3, steps: 2 }).capacity).toBe(4);
    const last = make({ steps: 1 });
    for (const id of ['a', 'b']) admit(last, id);
    for (const id of ['a', 'b']) finish(last, id);
    last.take(0);
    last.trained();
    expect(last.capacity).toBe(0);
    expect(last.isDone).toBe(true);
  });
});

describe('a group', () => {
  test('is decided when its last member has ended, with members in order', () => {
    const buffer = make({ batch: 1 });
    admit(buffer, 'a');
    expect(buffer.end(rollout('a', 1))).toEqual({ kind: 'running' });
    expect(buffer.isReady(0)).toBe(false);
    expect(buffer.end(rollout('a', 0))).toMatchObject({ kind: 'waiting' });
    expect(buffer.take(0)[0]?.rollouts.map((r) => r.index)).toEqual([0, 1]);
  });

  test('keep: goes on with its survivors, of which there must be two', () => {
    const buffer = make({ batch: 1 });
    admit(buffer, 'a', 0, 3);
    buffer.end(rollout('a', 0));
    buffer.end(rollout('a', 1, 'agent_error'));
    expect(buffer.end(rollout('a', 2))).toMatchObject({ kind: 'waiting', lost: [{ index: 1 }] });
    expect(buffer.take(0)[0]?.rollouts.map((r) => r.index)).toEqual([0, 2]);
    buffer.trained();
    admit(buffer, 'b');
    buffer.end(rollout('b', 0, 'agent_error'));
    expect(buffer.end(rollout('b', 1))).toMatchObject({ kind: 'dropped', reason: 'incomplete_group' });
    expect(buffer.capacity).toBe(1); // its place is free again
  });

  test('drop: is given up at the first failure', () => {
    const buffer = make({ failed: 'drop' });
    admit(buffer, 'a');
    expect(buffer.end(rollout('a', 1, 'agent_error'))).toMatchObject({ kind: 'dropped', reason: 'incomplete_group' });
    expect(buffer.end(rollout('a', 0))).toBeNull(); // came too late
    expect(buffer.counts).toMatchObject({ admitted: 1, dropped: 1, running: 0 });
  });

  test('refill: tries a failed member again, three times, and then goes on without it', () => {
    const buffer = make({ failed: 'refill' });
    admit(buffer, 'a', 0, 3);
    for (const nth of [1, 2, 3])
      expect(buffer.end(rollout('a', 0, 'agent_error'))).toMatchObject({ kind: 'refill', index: 0, nth });
    expect(buffer.end(rollout('a', 0, 'agent_error'))).toEqual({ kind: 'running' });
    buffer.end(rollout('a', 1));
    expect(buffer.end(rollout('a', 2))).toMatchObject({ kind: 'waiting', lost: [{ index: 0 }] });
  });

  test('outside the band of mean scores is filtered, at both ends, and its place is free again', () => {
    const buffer = make({ band: [0, 1] });
    for (const [id, scores] of Object.entries({ a: [1, 1], b: [0, 0], c: [0, 1] })) {
      admit(buffer, id);
      buffer.end(rollout(id, 0, 'done', scores[0]));
      const verdict = buffer.end(rollout(id, 1, 'done', scores[1]));
      expect(verdict).toMatchObject(id === 'c' ? { kind: 'waiting' } : { kind: 'dropped', reason: 'filtered' });
    }
    expect(buffer.capacity).toBe(1);
  });

  test('cannot be admitted twice, nor a rollout end twice', () => {
    const buffer = make();
    admit(buffer, 'a');
    expect(() => admit(buffer, 'a')).toThrow('admitted twice');
    buffer.end(rollout('a', 0));
    expect(() => buffer.end(rollout('a', 0))).toThrow('ended twice');
  });
});

describe('a batch', () => {
  test('first_finished takes the groups that finished first, in order of admission, each once', () => {
    const buffer = make({ maxStaleness: 1 });
    for (const id of ['a', 'b', 'c', 'd']) admit(buffer, id);
    for (const id of ['c', 'a', 'd', 'b']) finish(buffer, id);
    expect(ids(buffer.take(0))).toEqual(['a', 'c']);
    expect(() => buffer.take(0)).toThrow('in training already');
    buffer.trained();
    expect(ids(buffer.take(1))).toEqual(['b', 'd']);
    buffer.trained();
    expect(() => buffer.take(2)).toThrow('0 groups wait');
  });

  test('dispatch_order waits for those that began first', () => {
    const buffer = make({ maxStaleness: 1, order: 'dispatch_order' });
    for (const id of ['a', 'b', 'c', 'd']) admit(buffer, id);
    for (const id of ['d', 'c', 'a']) finish(buffer, id);
    expect(buffer.isReady(0)).toBe(false);
    finish(buffer, 'b');
    expect(ids(buffer.take(0))).toEqual(['a', 'b']);
  });

  test('takes what is due before what finished earlier', () => {
    const buffer = make({ maxStaleness: 1, batch: 1 });
    admit(buffer, 'old', 0);
    admit(buffer, 'new', 1);
    for (const id of ['new', 'old']) finish(buffer, id);
    expect(ids(buffer.take(1))).toEqual(['old']); // at version 2 it would be two refits old
  });

  test('keeps room in later batches for groups that are not due yet', () => {
    const buffer = make({ maxStaleness: 2, batch: 1 });
    for (const id of ['a', 'b']) admit(buffer, id, 0);
    admit(buffer, 'new', 1);
    for (const id of ['new', 'a', 'b']) finish(buffer, id);
    // At version 1 neither is due by age, but versions 1 and 2 are the last two batches that may hold them.
    expect(ids(buffer.take(1))).toEqual(['a']);
    buffer.trained();
    expect(ids(buffer.take(2))).toEqual(['b']);
  });

  test('waits for an unfinished group that is due', () => {
    const buffer = make({ maxStaleness: 1, batch: 1 });
    admit(buffer, 'old', 0);
    admit(buffer, 'new', 1);
    finish(buffer, 'new');
    expect(buffer.isReady(0)).toBe(true);
    expect(buffer.isReady(1)).toBe(false);
    expect(buffer.dropStale(1)).toEqual([]);
    finish(buffer, 'old');
    expect(ids(buffer.take(1))).toEqual(['old']);
  });

  test('late drop: drops it as stale, but only when it holds up a full batch', () => {
    const buffer = make({ maxStaleness: 1, batch: 1, late: 'drop' });
    admit(buffer, 'old', 0);
    admit(buffer, 'new', 1);
    expect(buffer.dropStale(1)).toEqual([]); // nothing else is there to be trained
    buffer.end(rollout('old', 0));
    finish(buffer, 'new');
    expect(buffer.dropStale(1)).toMatchObject([
      { groupId: 'old', verdict: { kind: 'dropped', reason: 'stale', lost: [{ index: 0 }] } },
    ]);
    expect(ids(buffer.take(1))).toEqual(['new']);
    expect(buffer.end(rollout('old', 1))).toBeNull();
  });

  test('may be short only when the prompts are used up and nothing runs', () => {
    const buffer = make({ batch: 2, maxStaleness: 1 });
    for (const id of ['a', 'b', 'c']) admit(buffer, id);
    buffer.close();
    expect(buffer.capacity).toBe(0);
    for (const id of ['a', 'b']) finish(buffer, id);
    expect(ids(buffer.take(0))).toEqual(['a', 'b']);
    buffer.trained();
    expect(buffer.isReady(1)).toBe(false);
    expect(buffer.isDone).toBe(false);
    finish(buffer, 'c');
    expect(ids(buffer.take(1))).toEqual(['c']);
    buffer.trained();
    expect(buffer.isDone).toBe(true);
  });

  test('never holds what is older than the bound: a run resumed under a later version drops it', () => {
    const buffer = make({ maxStaleness: 1, batch: 1 });
    expect(
      buffer.readmit('a', prompt, {
        size: 2,
        version: 0,
        ended: [rollout('a', 0), rollout('a', 1)],
        refills: new Map(),
      }),
    ).toMatchObject({ kind: 'waiting' });
    expect(buffer.dropStale(1)).toEqual([]);
    expect(buffer.dropStale(2)).toMatchObject([{ groupId: 'a', verdict: { reason: 'stale' } }]);
  });
});
