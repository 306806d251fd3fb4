/**
 * The trainer contract: the same assertions over real sockets for the simulated and the torch trainer. One rank, two
 * ranks of the same model, and an engine; every test begins with the weights of the same checkpoint.
 */
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, beforeEach, describe, expect, test, vi } from 'vitest';
import type { Worker } from '../molt/launch.ts';
import type { Fields, Frames, ReplyFields, RequestKind } from '../molt/protocol.ts';
import { flatRows, Trainer } from '../molt/trainer.ts';
import type { Sample } from '../molt/types.ts';
import { Cell, engineOptions, KINDS, largestGap, promptOf, startRanks, writeSegment } from './contract.ts';
import { EngineClient, refused } from './engine_client.ts';

const WAIT_MS = 60_000;
const NUM_ROWS = 7;
const LOSS: Fields<'run'>['loss'] = {
  clip_low: 0.2,
  clip_high: 0.28,
  is_level: 'off',
  is_mode: 'mask',
  is_low: 0.5,
  is_high: 2,
};

interface Row {
  readonly ids: Int32Array;
  readonly mask: Uint8Array;
  readonly rollout: Float32Array;
  readonly advantages: Float32Array;
  readonly old?: Float32Array;
  readonly stale?: Uint8Array;
}
type Split = readonly (readonly number[])[]; // row numbers per micro-batch

/** Ragged rows, each with a context, a trained stretch, a gap and another trained stretch. */
function rowIds(): Int32Array[] {
  return Array.from({ length: NUM_ROWS }, (_, i) => Int32Array.from(promptOf(9 + 5 * i, i)));
}
function maskOf(ids: Int32Array): Uint8Array {
  return Uint8Array.from(ids, (_, k) => (k > 2 && k % 5 !== 0 ? 1 : 0));
}

/** Sum over trained tokens of all rows. */
function sumOver(rows: readonly Row[], f: (row: Row, k: number) => number): number {
  let sum = 0;
  for (const row of rows) for (let k = 0; k < row.ids.length; k++) if (row.mask[k] === 1) sum += f(row, k);
  return sum;
}

function closeTo(actual: number | undefined, expected: number, relative = 1e-5): void {
  expect(Math.abs((actual ?? Number.NaN) - expected)).toBeLessThanOrEqual(relative * Math.max(1, Math.abs(expected)));
}

vi.setConfig({ testTimeout: WAIT_MS });

describe.each(KINDS)('%s trainer', (_, kind) => {
  let cell: Cell;
  let one: Worker[];
  let two: Worker[];
  let engine: Worker;
  let client: EngineClient;
  let start: string; // checkpoint
  let model: string;
  let step = 0;

  beforeAll(async () => {
    cell = await Cell.open();
    [model] = await kind.makeModels(cell.dir);
    const command = kind.command('engine');
    [one, two, engine] = await Promise.all([
      startRanks(cell, kind, { name: 'one', model, worldSize: 1 }),
      startRanks(cell, kind, { name: 'two', model, worldSize: 2 }),
      cell.start({ id: 'engine-0', kind: 'engine', command, options: engineOptions(kind, model) }),
    ]);
    client = new EngineClient(engine.peer);
    start = newDirectory('start');
    await all(one, 'save', { step: 0, path: start });
  }, 2 * kind.startMs);
  afterAll(() => cell?.close());
  beforeEach(async () => {
    await all(one, 'restore', { path: start });
  });

  // ---- Requests to all ranks ----

  function newDirectory(name: string): string {
    const path = join(cell.dir, name);
    mkdirSync(path);
    return path;
  }

  async function all<K extends RequestKind>(ranks: readonly Worker[], kind: K, fields: Fields<K>, frames?: Frames<K>) {
    return Promise.all(ranks.map((rank) => rank.peer.request(kind, fields, frames, { deadlineMs: WAIT_MS })));
  }

  async function logprobs(
    ranks: readonly Worker[],
    rows: readonly Int32Array[],
    temperature = 1,
  ): Promise<Float32Array[]> {
    const [first] = await all(ranks, 'logprobs', { which: 'policy', temperature }, flatRows(rows));
    let at = 0;
    return rows.map((row) => {
      at += row.length;
      return first?.frames.logprobs.subarray(at - row.length, at) ?? new Float32Array();
    });
  }

  /** Rows whose rollout logprobs are off the trainer's by what `noise` says. */
  async function makeRows(noise: (k: number) => number, temperature = 1): Promise<Row[]> {
    const ids = rowIds();
    const own = await logprobs(one, ids, temperature);
    return ids.map((row, i) => ({
      ids: row,
      mask: maskOf(row),
      rollout: Float32Array.from(own[i] as Float32Array, (x, k) => x + noise(k)),
      advantages: Float32Array.from(row, (_, k) => (maskOf(row)[k] === 1 ? (i % 3) - 0.8 : 0)),
    }));
  }

  function rowFrames(rows: readonly Row[]): Frames<'rows'> {
    const column = (get: (row: Row) => Float32Array): Float32Array =>
      Float32Array.from(rows.flatMap((row) => [...get(row)]));
    return {
      ...flatRows(rows.map((row) => row.ids)),
      loss_mask: Uint8Array.from(rows.flatMap((row) => [...row.mask])),
      rollout_logprobs: column((row) => row.rollout),
      advantages: column((row) => row.advantages),
      ...(rows.every((row) => row.old) && { old_logprobs: column((row) => row.old as Float32Array) }),
      ...(rows.some((row) => row.stale) && {
        stale: Uint8Array.from(rows.flatMap((row) => [...(row.stale ?? new Uint8Array(row.ids.length))])),
      }),
    };
  }

  function runFields(rows: readonly Row[], split: Split, more: Partial<Fields<'run'>> = {}): Fields<'run'> {
    const denominators = { tokens: sumOver(rows, () => 1) };
    return {
      step,
      version: 0,
      micro_batches: split,
      packed: true,
      denominators,
      lr: 0.01,
      temperature: 1,
      loss: LOSS,
      ...more,
    };
  }

  /** One optimizer step; `shares[r]` = rows of rank r, and `splits[r]` their micro-batches. Sums added, maxima compared. */
  async function train(
    ranks: readonly Worker[],
    rows: readonly Row[],
    shares: readonly (readonly number[])[],
    splits: readonly Split[],
    more = {},
  ) {
    step += 1;
    const replies = await Promise.all(
      ranks.map(async (rank, r) => {
        const mine = (shares[r] ?? []).map((i) => rows[i] as Row);
        const cut = Math.ceil(mine.length / 2);
        const parts = [mine.slice(0, cut), mine.slice(cut)].map((part, i) =>
          rank.peer.request('rows', { step, part: i, of: 2 }, rowFrames(part)),
        );
        const run = rank.peer.request('run', runFields(rows, splits[r] ?? [], more), undefined, {
          deadlineMs: WAIT_MS,
        });
        return (await Promise.all([run, ...parts]))[0].fields;
      }),
    );
    return merge(replies);
  }

  function merge(replies: readonly ReplyFields<'run'>[]) {
    const sums: Record<string, number> = {};
    for (const reply of replies)
      for (const [key, value] of Object.entries(reply.sums)) sums[key] = (sums[key] ?? 0) + value;
    return { sums, maxima: replies.map((reply) => reply.maxima) };
  }

  const EVERY = [[...Array(NUM_ROWS).keys()]];
  const HALVES: Split = [
    [0, 6, 1],
    [2, 3, 4, 5],
  ];
  const trainOne = (rows: readonly Row[], more = {}, split = HALVES) => train(one, rows, EVERY, [split], more);

  // ---- Contract ----

  test('logprobs equal the score of an engine with the same weights', async () => {
    const rows = rowIds();
    const own = await logprobs(one, rows);
    const { frames } = await engine.peer.request('score', {}, flatRows(rows));
    expect(
      largestGap(
        frames.logprobs,
        own.flatMap((x) => [...x]),
      ),
    ).toBeLessThan(1e-5);
    for (const row of own) expect(row[0]).toBe(0);
  });

  test.each([1, 0.6])('logprobs at temperature %d equal those that an engine sampled with', async (temperature) => {
    const prompt = Int32Array.from(promptOf(11, 3));
    const turn = await client.generate(prompt, { temperature, max_tokens: 20 });
    const [own] = await logprobs(one, [Int32Array.from([...prompt, ...turn.ids])], temperature);
    expect(largestGap(turn.logprobs, (own as Float32Array).subarray(prompt.length))).toBeLessThan(1e-5);
  });

  test('a step reports sums and maxima over trained tokens', async () => {
    const noise = (k: number): number => 0.01 * (k % 4);
    const rows = await makeRows(noise, 0.7);
    const { sums, maxima } = await trainOne(rows, { temperature: 0.7 });
    const tokens = sumOver(rows, () => 1);
    expect(sums.tokens).toBe(tokens);
    closeTo(sums.loss, -sumOver(rows, (row, k) => row.advantages[k] as number) / tokens);
    expect(sums.clipped).toBe(0);
    expect(sums.is_filtered).toBe(0);
    closeTo(
      sums.mismatch_abs,
      sumOver(rows, (_, k) => noise(k)),
      1e-4,
    );
    closeTo(
      sums.mismatch_k3,
      sumOver(rows, (_, k) => Math.exp(-noise(k)) - 1 + noise(k)),
      1e-4,
    );
    expect((sums.entropy ?? 0) / tokens).toBeGreaterThan(0.5);
    expect(Math.abs((maxima[0]?.mismatch_abs ?? 0) - 0.03)).toBeLessThan(1e-4);
    expect(maxima[0]?.grad_norm).toBeGreaterThan(0);
    expect(maxima[0]?.skipped).toBe(0);
  });

  test('a step raises the logprobs of tokens with an advantage and lowers the others', async () => {
    const rows = await makeRows(() => 0);
    const before = await logprobs(one, rowIds());
    await trainOne(rows);
    const after = await logprobs(one, rowIds());
    const gain = sumOver(rows, (row, k) => {
      const i = rows.indexOf(row);
      return (row.advantages[k] as number) * ((after[i]?.[k] as number) - (before[i]?.[k] as number));
    });
    expect(gain).toBeGreaterThan(0.1);
  });

  test('old logprobs make ratios, which are clipped', async () => {
    const rows = (await makeRows(() => 0)).map((row) => ({
      ...row,
      old: row.rollout.map((x, k) => x + [0.5, -0.5, 0.1][k % 3]!),
    }));
    const { sums } = await trainOne(rows);
    const ratio = (k: number): number => Math.exp(-[0.5, -0.5, 0.1][k % 3]!);
    const clipped = (k: number): number => Math.min(Math.max(ratio(k), 0.8), 1.28);
    const surrogate = (row: Row, k: number): number =>
      Math.min(ratio(k) * (row.advantages[k] as number), clipped(k) * (row.advantages[k] as number));
    closeTo(sums.loss, -sumOver(rows, surrogate) / sumOver(rows, () => 1), 1e-4);
    expect(sums.clipped).toBe(
      sumOver(rows, (row, k) => (surrogate(row, k) < ratio(k) * (row.advantages[k] as number) ? 1 : 0)),
    );
  });

  test.each([
    ['mask', (w: number) => (w < 0.5 || w > 2 ? 0 : w), (w: number) => w < 0.5 || w > 2],
    ['clip', (w: number) => Math.min(Math.max(w, 0.5), 2), (w: number) => w < 0.5 || w > 2],
    ['trunc', (w: number) => Math.min(w, 2), (w: number) => w > 2],
  ] as const)(
    'importance correction %s weighs each token and counts those out of band',
    async (is_mode, coefficient, isOut) => {
      const noise = (k: number): number => [1.5, -1.5, 0.2, 0][k % 4]!;
      const rows = await makeRows(noise);
      const { sums } = await trainOne(rows, { loss: { ...LOSS, is_level: 'token', is_mode } });
      const weight = (k: number): number => Math.exp(-noise(k));
      const tokens = sumOver(rows, () => 1);
      closeTo(
        sums.loss,
        -sumOver(rows, (row, k) => coefficient(weight(k)) * (row.advantages[k] as number)) / tokens,
        1e-4,
      );
      expect(sums.is_filtered).toBe(sumOver(rows, (_, k) => (isOut(weight(k)) ? 1 : 0)));
    },
  );

  /** Tokens of an older version, among them masked ones, in three of the rows. */
  const isStale = (rows: readonly Row[], row: Row, k: number): boolean => rows.indexOf(row) < 3 && k % 2 === 0;
  const withStale = (rows: readonly Row[]): Row[] =>
    rows.map((row, i) => (i < 3 ? { ...row, stale: Uint8Array.from(row.ids, (_, k) => (k % 2 === 0 ? 1 : 0)) } : row));

  test('mismatch is of fresh tokens, drift of stale ones; both are weighed as sampled, at the start of the step', async () => {
    const loss = { ...LOSS, is_level: 'token', is_mode: 'mask' };
    const noise = (k: number): number => [1.5, 0.01, -0.4, 0.02][k % 4]!; // odd tokens are nearly as sampled
    const rows = withStale(await makeRows(noise));
    for (const row of rows.slice(3)) for (const k of row.ids.keys()) row.rollout[k]! -= noise(k) - 0.03;
    const gap = (row: Row, k: number): number => (rows.indexOf(row) < 3 ? -noise(k) : -0.03);
    const over = (f: (x: number) => number, which: (row: Row, k: number) => boolean = () => true): number =>
      sumOver(rows, (row, k) => (which(row, k) ? f(gap(row, k)) : 0));
    const stale = (row: Row, k: number): boolean => isStale(rows, row, k);
    const fresh = (row: Row, k: number): boolean => !stale(row, k);
    const { sums, maxima } = await trainOne(rows, { loss });
    const tokens = sumOver(rows, () => 1);
    expect([sums.tokens, sums.fresh_tokens]).toEqual([tokens, over(() => 1, fresh)]);
    expect(sums.fresh_tokens).toBeLessThan(tokens);
    closeTo(sums.mismatch_abs, over(Math.abs, fresh), 1e-4);
    closeTo(
      sums.mismatch_k3,
      over((x) => Math.exp(x) - 1 - x, fresh),
      1e-4,
    );
    closeTo(sums.drift_abs, over(Math.abs, stale), 1e-4);
    closeTo(sums.is_weight, over(Math.exp), 1e-4);
    expect(Math.abs((maxima[0]?.mismatch_abs ?? 0) - 0.03)).toBeLessThan(1e-4);
    const weight = (row: Row, k: number): number => {
      const w = Math.exp(gap(row, k));
      return w < 0.5 || w > 2 ? 0 : w;
    };
    const rejected = sumOver(rows, (row, k) => (weight(row, k) === 0 ? 1 : 0));
    expect([sums.is_filtered, rejected > 0]).toEqual([rejected, true]);
    // The rejected ones are in the denominator.
    closeTo(sums.loss, -sumOver(rows, (row, k) => weight(row, k) * (row.advantages[k] as number)) / tokens, 1e-4);
  });

  test.each([false, true])('trainer.ts marks tokens of older versions (keys kept: %s)', async (keepsKeys) => {
    const ids = rowIds().slice(0, 3);
    const own = await logprobs(one, ids);
    const samples = ids.map(
      (row, i): Sample => ({
        rolloutId: `r${i}`,
        groupId: 'g',
        trajectory: {
          ids: row,
          lossMask: maskOf(row),
          logprobs: Float32Array.from(own[i] as Float32Array, (x) => x - 0.5),
          versions: row.map((_, k) => (maskOf(row)[k] === 0 ? -1 : i === 0 && k === 4 ? 6 : 7)),
          turns: row.map((_, k) => Math.floor(k / 5)),
          spans: [],
        },
        advantages: Float32Array.from(row, (_, k) => maskOf(row)[k] as number),
      }),
    );
    const trainer = new Trainer({
      start: () => one,
      launcher: cell.launcher,
      loss: { clipLowHigh: [0.2, 0.2], isLevel: 'off', isMode: 'mask', isThreshold: [0.5, 5] },
      temperature: 1,
      packed: true,
      keepsKeys,
    });
    const run = (version: number) =>
      trainer.step({
        step: ++step,
        version,
        samples,
        plan: {
          ranks: [{ samples: [2, 0, 1], microBatches: [[0], [1, 2]], tokens: 0 }],
          numMicroBatches: 2,
          numDummies: 0,
        },
        denominator: 1,
        lr: 0,
        old: null,
      });
    const tokens = samples.reduce((n, { trajectory }) => n + trajectory.lossMask.filter((x) => x === 1).length, 0);
    // Token 4 of the first row, the second token of its turn 0; no other of that turn follows it.
    const now = (await run(7)).sums;
    expect([now.tokens, now.fresh_tokens]).toEqual([tokens, tokens - 1]);
    closeTo(now.drift_abs, 0.5, 1e-4);
    const later = (await run(8)).sums;
    expect([later.fresh_tokens, later.mismatch_abs]).toEqual([0, 0]);
    closeTo(later.drift_abs, 0.5 * tokens, 1e-4);
    const turns = samples[0]?.trajectory.turns as Int32Array;
    turns.fill(0);
    const rest = [...maskOf(ids[0] as Int32Array)].filter((x, k) => x === 1 && k > 4).length;
    expect((await run(7)).sums.fresh_tokens).toBe(tokens - 1 - (keepsKeys ? rest : 0));
    expect(rest).toBeGreaterThan(1);
    trainer.close();
  });

  test('a second pass over stale tokens weighs them as the first did, and its ratio starts where the first began', async () => {
    const loss = { ...LOSS, is_level: 'token', is_mode: 'trunc' };
    const noise = (k: number): number => [-1.5, 0.1, -0.4, 0][k % 4]!;
    const own = await logprobs(one, rowIds());
    const rows = withStale(await makeRows(noise)).map((row, i) => ({ ...row, old: own[i] as Float32Array }));
    const first = await trainOne(rows, { loss });
    const after = await logprobs(one, rowIds());
    const second = await trainOne(rows, { loss });
    for (const key of ['is_weight', 'drift_abs', 'mismatch_abs', 'fresh_tokens'])
      closeTo(second.sums[key], first.sums[key] as number, 1e-6);
    const surrogate = (row: Row, k: number): number => {
      const i = rows.indexOf(row as (typeof rows)[number]);
      const ratio = Math.exp((after[i]?.[k] as number) - (row.old?.[k] as number));
      const a = row.advantages[k] as number;
      return Math.min(Math.exp(-noise(k)), 2) * Math.min(ratio * a, Math.min(Math.max(ratio, 0.8), 1.28) * a);
    };
    closeTo(second.sums.loss, -sumOver(rows, surrogate) / sumOver(rows, () => 1), 1e-4);
    expect(Math.abs((second.sums.loss as number) - (first.sums.loss as number))).toBeGreaterThan(1e-3);
  });

  test.each<[string, Split, boolean]>([
    ['one micro-batch', EVERY, true],
    ['a row each', EVERY[0]!.map((i) => [i]), true],
    ['with a dummy', [[3, 2, 1], [], [0, 4, 5, 6]], true],
    ['padded rows', HALVES, false],
  ])('the split into micro-batches does not change the step: %s', async (_, split, packed) => {
    const rows = await makeRows(() => 0.01);
    const usual = await trainOne(rows);
    const after = (await logprobs(one, rowIds())).flatMap((x) => [...x]);
    await all(one, 'restore', { path: start });
    const other = await trainOne(rows, { packed }, split);
    closeTo(other.sums.loss, usual.sums.loss as number, 1e-6);
    closeTo(other.maxima[0]?.grad_norm, usual.maxima[0]?.grad_norm as number, 1e-5);
    expect(
      largestGap(
        (await logprobs(one, rowIds())).flatMap((x) => [...x]),
        after,
      ),
    ).toBeLessThan(1e-4);
  });

  test('two ranks take the same step as one', async () => {
    const rows = withStale(await makeRows(() => 0.01));
    const single = await trainOne(rows);
    const after = await logprobs(one, rowIds());
    await all(two, 'restore', { path: start }); // saved by one rank
    const shared = await train(
      two,
      rows,
      [
        [0, 1, 2, 3, 4],
        [5, 6],
      ],
      [
        [
          [0, 1],
          [2, 3, 4],
        ],
        [[0, 1], []],
      ],
    );
    const keys = 'loss tokens mismatch_abs mismatch_k3 entropy fresh_tokens drift_abs is_weight';
    for (const key of keys.split(' ')) closeTo(shared.sums[key], single.sums[key] as number);
    for (const maxima of shared.maxima) {
      expect(maxima.skipped).toBe(0);
      closeTo((maxima.grad_norm as number) / (single.maxima[0]?.grad_norm as number), 1);
    }
    const theirs = await logprobs(two, rowIds());
    expect(
      largestGap(
        theirs.flatMap((x) => [...x]),
        after.flatMap((x) => [...x]),
      ),
    ).toBeLessThan(1e-4);
  });

  test.each([1, 2])('what %d ranks push is what an engine then serves', async (ranks) => {
    const group = ranks === 1 ? one : two;
    await all(group, 'restore', { path: start });
    const rows = await makeRows(() => 0);
    const shares =
      ranks === 1
        ? EVERY
        : [
            [0, 1, 2, 3],
            [4, 5, 6],
          ];
    // Another step than the one that the engine got before.
    await train(
      group,
      rows,
      shares,
      shares.map((share) => [[...share.keys()]]),
      { lr: 0.01 * ranks },
    );
    const own = await logprobs(group, rowIds());
    const before = await engine.peer.request('score', {}, flatRows(rowIds()));
    const path = join(cell.dir, `pushed-${ranks}.bin`);
    const pushed = await all(group, 'push_weights', { version: ranks, transport: 'file', path });
    for (const { fields } of pushed.slice(1)) expect(fields).toEqual({ tensors: [], bytes: 0 });
    const { tensors } = pushed[0]!.fields;
    await engine.peer.request('pause', { epoch: ranks, mode: 'keep', clear_cache: true });
    const loaded = await engine.peer.request('load_weights', {
      version: ranks,
      source: { transport: 'file', path },
      tensors,
      last: true,
    });
    expect(loaded.fields.loaded).toBe(tensors.length);
    const { fields, frames } = await engine.peer.request('score', {}, flatRows(rowIds()));
    await engine.peer.request('resume', { epoch: ranks });
    expect(fields.version).toBe(ranks);
    expect(
      largestGap(
        frames.logprobs,
        own.flatMap((x) => [...x]),
      ),
    ).toBeLessThan(1e-5);
    expect(largestGap(frames.logprobs, before.frames.logprobs)).toBeGreaterThan(1e-3);
  });

  test('an untouched model is pushed byte by byte as it lies on the disk', async () => {
    const path = join(cell.dir, 'pushed.bin');
    const [pushed] = await all(one, 'push_weights', { version: 1, transport: 'file', path });
    const byName = (table: readonly { name: string; crc32: number; shape: readonly number[] }[]) =>
      Object.fromEntries(table.map((t) => [t.name, [t.crc32, t.shape]]));
    expect(byName(pushed!.fields.tensors)).toEqual(byName(writeSegment(model, join(cell.dir, 'disk.bin'))));
    expect(pushed!.fields.bytes).toBeGreaterThan(0);
  });

  test('save and restore bring back weights, optimizer and step', async () => {
    const rows = await makeRows(() => 0);
    await trainOne(rows);
    const saved = newDirectory('saved');
    await all(one, 'save', { step: 41, path: saved });
    const first = await logprobs(one, rowIds());
    const next = await trainOne(rows, { lr: 0.02 });
    const second = await logprobs(one, rowIds());
    const [restored] = await all(one, 'restore', { path: saved });
    expect(restored?.fields.step).toBe(41);
    expect(await logprobs(one, rowIds())).toEqual(first);
    const again = await trainOne(rows, { lr: 0.02 });
    expect(again).toEqual(next);
    expect(await logprobs(one, rowIds())).toEqual(second); // only with the same moments
  });

  test('export writes a directory with the weights of now', async () => {
    await trainOne(await makeRows(() => 0));
    const path = join(cell.dir, 'exported');
    await all(one, 'export', { path });
    const [pushed] = await all(one, 'push_weights', {
      version: 1,
      transport: 'file',
      path: join(cell.dir, 'now.bin'),
    });
    const exported = writeSegment(path, join(cell.dir, 'exported.bin'));
    const sums = (table: readonly { name: string; crc32: number }[]) =>
      Object.fromEntries(table.map((t) => [t.name, t.crc32]));
    expect(sums(exported)).toEqual(sums(pushed!.fields.tensors));
  });

  test('a step that is not finite is skipped by all ranks alike and changes nothing', async () => {
    await all(two, 'restore', { path: start });
    const rows = await makeRows((k) => (k % 2 ? 0 : -25));
    rows[0]?.advantages.fill(3e38);
    const before = await logprobs(two, rowIds());
    const loss = { ...LOSS, is_level: 'token', is_mode: 'trunc', is_high: 1e12 };
    const { maxima } = await train(
      two,
      rows,
      [
        [0, 1, 2, 3],
        [4, 5, 6],
      ],
      [[[0, 1, 2, 3]], [[0, 1, 2]]],
      { loss },
    );
    expect(maxima.map((m) => m.skipped)).toEqual([1, 1]);
    expect(await logprobs(two, rowIds())).toEqual(before);
  });

  // ---- Refusals: nothing has changed, the rank goes on ----

  test('rows are refused that do not follow, do not add up, or are not finite', async () => {
    const rows = await makeRows(() => 0);
    const peer = one[0]!.peer;
    const send = (fields: Partial<Fields<'rows'>>, change: Partial<Frames<'rows'>> = {}) =>
      refused(peer.request('rows', { step: 900, part: 0, of: 2, ...fields }, { ...rowFrames(rows), ...change }));
    const { ids, advantages, loss_mask } = rowFrames(rows);
    expect(await send({ part: 1 })).toMatchObject({ type: 'bad_request', field: 'part' });
    expect(await send({}, { lengths: Int32Array.of(3) })).toMatchObject({ type: 'bad_request', field: 'lengths' });
    expect(await send({}, { advantages: advantages.slice(1) })).toMatchObject({ type: 'bad_request' });
    expect(await send({}, { stale: loss_mask.slice(1) })).toMatchObject({ type: 'bad_request' });
    expect(await send({}, { ids: ids.map(() => 1_000_000) })).toMatchObject({ type: 'bad_request', field: 'ids' });
    expect(await send({}, { advantages: advantages.map(() => Number.NaN) })).toMatchObject({
      type: 'bad_request',
      field: 'advantages',
    });
    expect(await send({}, { loss_mask: loss_mask.map(() => 1) })).toMatchObject({
      type: 'bad_request',
      field: 'loss_mask',
    });
  });

  test('a run is refused without its rows, or when its micro-batches do not hold each row once', async () => {
    const rows = await makeRows(() => 0);
    const peer = one[0]!.peer;
    expect(await refused(peer.request('run', { ...runFields(rows, EVERY), step: 901 }))).toMatchObject({
      type: 'bad_request',
      field: 'step',
    });
    await peer.request('rows', { step: 902, part: 0, of: 1 }, rowFrames(rows));
    for (const micro_batches of [[[0]], [...EVERY, [0]], [[...EVERY[0]!, NUM_ROWS]], []]) {
      const error = await refused(peer.request('run', { ...runFields(rows, EVERY), step: 902, micro_batches }));
      expect(error).toMatchObject({ type: 'bad_request', field: 'micro_batches' });
    }
    expect(await refused(peer.request('run', { ...runFields(rows, EVERY), step: 902, temperature: 0 }))).toMatchObject({
      type: 'bad_request',
      field: 'temperature',
    });
    expect((await peer.request('run', { ...runFields(rows, EVERY), step: 902 })).fields.maxima.skipped).toBe(0);
  });

  test('what this trainer does not have is unsupported or a bad path', async () => {
    const peer = one[0]!.peer;
    const rows = flatRows(rowIds());
    expect(await refused(peer.request('logprobs', { which: 'teacher', temperature: 1 }, rows))).toMatchObject({
      type: 'unsupported',
      field: 'which',
    });
    const push = peer.request('push_weights', { version: 1, transport: 'carrier', path: '' });
    expect(await refused(push)).toMatchObject({ type: 'unsupported', field: 'transport' });
    const nowhere = peer.request('restore', { path: join(cell.dir, 'nowhere') });
    expect(await refused(nowhere)).toMatchObject({ type: 'bad_request', field: 'path' });
  });

  // Last, since all are gone then.
  test('stop ends ranks and engine with status 0, and a turn in progress finishes first', async () => {
    const turn = await client.start(promptOf(5, 1), { max_tokens: 30 });
    const workers = [...one, ...two, engine];
    await Promise.all(workers.map((worker) => cell.launcher.stop(worker, WAIT_MS)));
    for (const worker of workers) expect(await worker.exited).toEqual({ code: 0, signal: null });
    expect([turn.ids.length, turn.ended?.reason]).toEqual([30, 'length']);
  });
});
