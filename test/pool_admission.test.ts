/** Admission of the pool, with its real buffer, prompts and ledger; rollouts end when the test says so. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, test } from 'vitest';
import { Buffer, type BufferOptions } from '../molt/buffer.ts';
import { PromptStream } from '../molt/data.ts';
import type { Job } from '../molt/dispatch.ts';
import { Ledger } from '../molt/ledger.ts';
import { Pool } from '../molt/pool.ts';
import type { Rollout } from '../molt/types.ts';

const dir = mkdtempSync(join(tmpdir(), 'molt-pool-'));
const ledgers: Ledger[] = [];
afterAll(async () => {
  for (const ledger of ledgers) await ledger.close();
  rmSync(dir, { recursive: true, force: true });
});

const fail = (error: Error) => {
  throw error;
};
const NOTHING = { tools: null, score: null, truncated: false, info: {}, turns: 0, trajectories: [], proofs: [] };

function poolOf(prompts: number, over: Partial<BufferOptions>) {
  const items = Array.from({ length: prompts }, (_, index) => ({
    index,
    input: `p${index}`,
    label: null,
    tools: null,
  }));
  const stream = new PromptStream(
    { sources: [{ name: 's', items }], sha256: '' },
    { seed: 1, shuffle: false, weights: [], epochs: 1 },
  );
  const ends = new Map<string, () => void>(); // by rollout: it fails
  const options: BufferOptions = {
    batch: 2,
    steps: 1,
    maxStaleness: 0,
    late: 'wait',
    order: 'first_finished',
    failed: 'keep',
    band: null,
  };
  const buffer = new Buffer({ ...options, ...over });
  const failed = ({ rolloutId, groupId, index }: Job): Rollout => ({
    ...NOTHING,
    ...{
      rolloutId,
      groupId,
      index,
      attempt: 0,
      reason: 'agent_error',
      detail: null,
      reward: null,
      dispatchedVersion: 0,
    },
  });
  const ledger = new Ledger(mkdtempSync(join(dir, 'run-')), fail);
  ledgers.push(ledger);
  const pool = new Pool({
    buffer,
    stream,
    ledger,
    groupSize: 1,
    version: () => 0,
    run: (job) => new Promise((resolve) => ends.set(job.rolloutId, () => resolve(failed(job)))),
    cancel: () => {},
    job: (rolloutId, groupId, index, prompt) => ({ rolloutId, groupId, index, prompt }) as Job,
    onRollout: () => {},
    onPrompt: () => {},
    fail,
  });
  return { pool, buffer, ends };
}

test('places of groups that end in the same turn are all filled again, whatever the microtasks between them', async () => {
  for (let apart = 0; apart < 12; apart++) {
    const { pool, buffer, ends } = poolOf(6, {});
    const batch = pool.nextBatch(() => {});
    await new Promise(setImmediate);
    expect([...ends.keys()]).toEqual(['g0-0', 'g1-0']);
    ends.get('g0-0')?.(); // it is dropped, and g2 admitted
    for (let k = 0; k < apart; k++) await Promise.resolve();
    ends.get('g1-0')?.();
    await new Promise(setImmediate);
    expect(buffer.counts, `${apart} microtasks apart`).toMatchObject({ running: 2, dropped: 2 });
    pool.stop();
    expect(await batch).toBeNull();
  }
});

test('ends with null when no prompt is left and every group was dropped', async () => {
  const { pool, ends } = poolOf(3, {});
  const batch = pool.nextBatch(() => {});
  for (let g = 0; g < 3; g++) {
    await new Promise(setImmediate);
    ends.get(`g${g}-0`)?.();
  }
  expect(await batch).toBeNull();
});

test('ends with null at once when there are no prompts at all', async () => {
  const { pool } = poolOf(0, {});
  const never = new Promise((resolve) => setTimeout(resolve, 500, 'waits'));
  expect(await Promise.race([pool.nextBatch(() => {}), never])).toBeNull();
});
