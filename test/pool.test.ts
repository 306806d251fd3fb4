/** The streaming pool in 10,000 random runs (pool_cases.ts), and where a run begins or can only go in circles. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { expect, test } from 'vitest';
import { Buffer, type BufferOptions } from '../molt/buffer.ts';
import { PromptStream } from '../molt/data.ts';
import type { Job } from '../molt/dispatch.ts';
import { readHistory } from '../molt/history.ts';
import { Ledger, readLedger } from '../molt/ledger.ts';
import { Pool } from '../molt/pool.ts';
import type { Rollout, Sampling } from '../molt/types.ts';
import { checkCase, drawCase, runCase } from './pool_cases.ts';

const CASES = 10_000;

test(`exactly once: every dispatched group is trained once or dropped once, in bounds, to the end, in ${CASES} random runs`, async () => {
  let [groups, dropped, mixed] = [0, 0, 0];
  for (let seed = 1; seed <= CASES; seed++) {
    const c = drawCase(seed);
    try {
      const trace = await runCase(c);
      checkCase(c, trace);
      groups += trace.counts.admitted;
      dropped += trace.counts.dropped;
      mixed += trace.batches
        .flatMap((b) => b.groups)
        .flatMap((g) => g.rollouts)
        .filter((r) => r.trajectories[0]?.versions[1] !== r.trajectories[0]?.versions[2]).length;
    } catch (error) {
      throw new Error(`Case ${JSON.stringify(c)}: ${(error as Error).message}`, { cause: error });
    }
  }
  // The cases are worth something: many groups, many of them dropped, many rollouts across a refit.
  expect(groups).toBeGreaterThan(50_000);
  expect(dropped).toBeGreaterThan(5_000);
  expect(mixed).toBeGreaterThan(5_000);
}, 180_000);

test('the same seed gives the same order of events', async () => {
  for (const seed of [3, 14, 159]) {
    const [one, two] = [await runCase(drawCase(seed)), await runCase(drawCase(seed))];
    expect(two.happened).toEqual(one.happened);
  }
});

const SAMPLING: Sampling = { temperature: 1, top_p: 1, top_k: 0, max_tokens: 4, seed: 0, stop: [], stop_token_ids: [] };
const LIMITS = { maxTurns: 1, maxTokens: 16, deadlineMs: 1000 };
const OPTIONS: BufferOptions = {
  batch: 4,
  steps: 9,
  maxStaleness: 1,
  late: 'wait',
  order: 'first_finished',
  failed: 'keep',
  band: null,
};

/** A pool over two prompts whose rollouts end as `end` says, or never. */
function poolOf(args: {
  ledger: Pick<Ledger, 'record'>;
  options?: Partial<BufferOptions>;
  epochs: number;
  end: (job: Job) => Partial<Rollout> | null;
}) {
  const items = [0, 1].map((index) => ({ index, input: `p${index}`, label: null, tools: null }));
  const set = { sources: [{ name: 's', items }], sha256: 'x' };
  const stream = new PromptStream(set, { seed: 1, shuffle: false, weights: [], epochs: args.epochs });
  const ran: string[] = [];
  const pool = new Pool({
    buffer: new Buffer({ ...OPTIONS, ...args.options }),
    stream,
    ledger: args.ledger,
    groupSize: 2,
    version: () => 0,
    run: async (job) => {
      ran.push(job.rolloutId);
      const ended = args.end(job);
      if (!ended) return new Promise<Rollout>(() => {});
      await sleep(0);
      return rolloutOf(job, ended);
    },
    cancel: () => {},
    job: (rolloutId, groupId, index, prompt) => ({
      rolloutId,
      groupId,
      index,
      prompt,
      seed: 0,
      sampling: SAMPLING,
      limits: LIMITS,
    }),
    onRollout: () => {},
    onPrompt: () => {},
    fail: (error) => {
      throw error;
    },
  });
  return { pool, stream, ran };
}

function rolloutOf({ rolloutId, groupId, index }: Job, ended: Partial<Rollout>): Rollout {
  const trajectory = {
    ids: Int32Array.of(1, 2),
    lossMask: Uint8Array.of(0, 1),
    logprobs: Float32Array.of(0, -1),
    versions: Int32Array.of(-1, 0),
    turns: Int32Array.of(0, 0),
    spans: [],
  };
  return {
    rolloutId,
    groupId,
    index,
    attempt: 0,
    reason: 'done',
    detail: null,
    reward: 1,
    score: 1,
    truncated: false,
    info: {},
    turns: 1,
    trajectories: [trajectory],
    proofs: [],
    dispatchedVersion: 0,
    ...ended,
  };
}

test('a run that goes on with whole groups and no further prompts has its last, short batch', async () => {
  const dir = mkdtempSync(join(tmpdir(), 'molt-pool-'));
  try {
    const onError = (error: Error) => {
      throw error;
    };
    const ledger = new Ledger(dir, onError);
    const before = poolOf({ ledger, options: { batch: 5 }, epochs: 2, end: () => ({}) });
    await before.pool.nextBatch(() => {}); // which is not recorded: it is killed before
    await ledger.close();
    const history = readHistory(readLedger(dir), 0);
    const { pool, stream } = poolOf({
      ledger: { record: () => {} },
      options: { batch: 5 },
      epochs: 2,
      end: () => null,
    });
    stream.restore({ ...stream.position, lanes: history.lanes ?? [] });
    expect(pool.readmit(history)).toEqual({ groups: 4, finished: 8, again: 0 });
    const batch = await Promise.race([pool.nextBatch(() => {}), sleep(2000)]);
    expect(batch?.map(({ groupId }) => groupId)).toEqual(['g0', 'g1', 'g2', 'g3']);
  } finally {
    rmSync(dir, { recursive: true, force: true });
  }
});

test('a run that goes on tries a failed member again where it was, and no more often than it may', async () => {
  const dir = mkdtempSync(join(tmpdir(), 'molt-pool-'));
  try {
    const onError = (error: Error) => {
      throw error;
    };
    const options = { failed: 'refill' } as const;
    const fails = { reason: 'agent_error', reward: null, score: null, trajectories: [] } as const;
    const ledger = new Ledger(dir, onError);
    // The first group is at its second refill when the process ends; the second group has used up all three.
    const end = ({ rolloutId }: Job) =>
      rolloutId === 'g0-1r2' || rolloutId === 'g1-0' ? null : /-1/.test(rolloutId) ? fails : {};
    const before = poolOf({ ledger, options, epochs: 1, end });
    void before.pool.nextBatch(() => {}); // never comes
    while (before.ran.length < 9) await sleep(1);
    expect(before.ran).toEqual(expect.arrayContaining(['g0-1r2', 'g1-1r3']));
    await sleep(20);
    await ledger.close();
    const { pool, stream, ran } = poolOf({ ledger: { record: () => {} }, options, epochs: 1, end: () => null });
    const history = readHistory(readLedger(dir), 0);
    stream.restore({ ...stream.position, lanes: history.lanes ?? [] });
    expect(pool.readmit(history)).toEqual({ groups: 2, finished: 2, again: 2 });
    expect(ran).toEqual(['g0-1r2', 'g1-0']);
  } finally {
    rmSync(dir, { recursive: true, force: true });
  }
});

test('a run of which every group is dropped ends with the reasons', async () => {
  const options = { band: [0, 1] } as const;
  const { pool } = poolOf({ ledger: { record: () => {} }, options, epochs: 0, end: () => ({}) });
  const batch = pool.nextBatch(() => {});
  await expect(batch).rejects.toThrow(
    /^5\d\d groups in a row were dropped and none is left to train: 5\d\d filtered \(/,
  );
});
