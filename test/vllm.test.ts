/**
 * vLLM as an engine, beyond the contract that all engines pass (engine_contract.test.ts): refits of every layout that its
 * CPU build packs, expert routes, speculation, and the death of any of its processes. `npm run prove vllm` does more of it.
 */
import { createHash } from 'node:crypto';
import { readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { Generator } from '../molt/generator.ts';
import { logTail } from '../molt/launch.ts';
import type { Sampling } from '../molt/types.ts';
import {
  Cell,
  engineOptions,
  hasVllm,
  largestGap,
  promptOf,
  type TensorTable,
  torch,
  torchMoe,
  VLLM_OPTIONS,
  vllm,
  vllmMoe,
  vllmMoeTwo,
  vllmMtp,
  vllmTwo,
  vllmUntied,
  writeSegment,
} from './contract.ts';
import { EngineClient, type Turn } from './engine_client.ts';
import { askTransformers, check, cross, openWorld, randomOf } from './interleavings.ts';

const START_MS = 120_000;
const TOLERANCE = 1e-4;

/** The daily tests do less than `npm run prove vllm`. */
const IN_FULL = process.env.MOLT_VLLM === 'all';

/** The first daily, all of them in full. */
function some<T>(...all: T[]): T[] {
  return IN_FULL ? all : all.slice(0, 1);
}

let cell: Cell;
beforeEach(async () => {
  cell = await Cell.open();
});
afterEach(() => cell.close());

describe.skipIf(!hasVllm)('refits of vllm', () => {
  test.each(
    some(
      { kind: vllmMoe, cache: 'clear' } as const,
      { kind: vllm, cache: 'keep' } as const,
      { kind: vllmUntied, cache: 'keep' } as const,
      { kind: vllmMoe, cache: 'keep' } as const,
      { kind: vllmTwo, cache: 'keep' } as const,
      { kind: vllmMoeTwo, cache: 'keep' } as const,
    ),
  )(
    'three in a row under 16 requests with $kind.name and refit.cache $cache: each token is of its version',
    async ({ kind, cache }) => {
      const world = await openWorld(cell, kind, { name: 'refits', cache, numEngines: 1, stageFromBytes: 0 });
      await cross(world, randomOf(3), [16, 0, 0]);
      const found = await check(world, TOLERANCE);
      expect(found.crossed[3]).toBeGreaterThanOrEqual(16);
      expect(found.worst).toBeLessThan(TOLERANCE);
      expect(found.telling).toBeGreaterThan(0.8 * found.boundaries);
      await world.close();
    },
    4 * START_MS, // ranks spin while they wait for each other
  );

  test.each(some({ kind: vllmMoe, judge: torchMoe }, { kind: vllm, judge: torch }))(
    'of $kind.name are wrong without what vllm_extension.py mends',
    async ({ kind, judge }) => {
      const models = await kind.makeModels(cell.dir);
      const start = (name: string, of: typeof kind, model: string, env: Record<string, string>) =>
        cell.start({
          id: `engine-${name}`,
          kind: 'engine',
          command: of.command('engine'),
          options: engineOptions(of, model),
          env,
        });
      const [raw, right] = await Promise.all([
        start('raw', kind, models[0], { MOLT_VLLM_UNMENDED: '1' }),
        start('right', judge, models[1], {}),
      ]);
      const engine = new EngineClient(raw.peer);
      const path = join(cell.dir, 'segment.bin');
      await engine.pause(1, 'keep');
      await engine.load(1, path, writeSegment(models[1], path));
      await engine.resume(1);
      const probe = [Int32Array.from(promptOf(40, 17))];
      const gap = largestGap(await engine.score(probe), await new EngineClient(right.peer).score(probe));
      expect(gap).toBeGreaterThan(1);
    },
    START_MS,
  );
});

describe.skipIf(!hasVllm)('expert routes of vllm', () => {
  test.each(some({ kind: vllmMoe }, { kind: vllmMoeTwo }))(
    'of $kind.name come with the ending of a turn, as a blob with a row for every token that ran; a pause waits for them, a load does not trip',
    async ({ kind }) => {
      const [model] = await kind.makeModels(cell.dir);
      const blobs = join(cell.dir, 'blobs');
      const options = engineOptions(kind, model, { blob_dir: blobs });
      const worker = await cell.start({ id: 'engine-0', kind: 'engine', command: kind.command('engine'), options });
      const engine = new EngineClient(worker.peer);
      const read = (turn: Turn): Uint8Array => {
        const { routes } = turn.ended as NonNullable<Turn['ended']>;
        expect(routes).toMatchObject({ dtype: 'u8', shape: [turn.prompt.length + turn.ids.length - 1, 2, 2] });
        const bytes = readFileSync(join(blobs, routes?.sha256 as string));
        expect(createHash('sha256').update(bytes).digest('hex')).toBe(routes?.sha256);
        return bytes;
      };
      const want = { want_routes: true };
      const first = await engine.generate(promptOf(50, 1), { max_tokens: 30, seed: 1 }, want);
      const second = await engine.generate([...first.prompt, ...first.ids, 7], { max_tokens: 5, seed: 2 }, want);
      expect(second.ended?.cached_tokens).toBeGreaterThan(0);
      const rows = first.prompt.length + first.ids.length - 1;
      expect(read(second).subarray(0, 4 * rows)).toEqual(read(first));
      const without = await engine.generate(promptOf(50, 2), { max_tokens: 3 });
      expect(without.ended?.routes).toBeNull();

      const [drained, aborted] = await Promise.all([
        engine.start(promptOf(9, 3), { max_tokens: 20, seed: 3 }, want),
        engine.start(promptOf(9, 4), { max_tokens: 400, seed: 4 }, want),
      ]);
      await engine.until(() => aborted.ids.length > 0);
      await engine.abort([aborted]);
      read(aborted);
      const answer = await engine.pause(1, 'drain');
      expect([...answer.frames.handles]).toEqual([]);
      read(drained);

      // Those that have sampled nothing start over with the new weights: an abort may come in the middle of that.
      await engine.resume(1);
      const path = join(cell.dir, 'segment.bin');
      const tensors = writeSegment(model, path);
      const prompts = Array.from({ length: 14 }, (_, i) => promptOf(400, 10 + i));
      const starting = Promise.all(prompts.map((prompt) => engine.start(prompt, { max_tokens: 8 }, want)));
      await engine.pause(2, 'keep');
      const unsampled = (await starting).filter((turn) => turn.ids.length === 0);
      expect(unsampled.length).toBeGreaterThan(4);
      const loading = engine.load(1, path, tensors);
      const aborting = unsampled.reverse().map(async (turn, i) => {
        await sleep(4 * i);
        await engine.abort([turn]);
      });
      await Promise.all([loading, ...aborting]);
      await engine.resume(2);
      const after = await engine.generate(promptOf(9, 5), { max_tokens: 3 }, want);
      read(after);
      for (const turn of unsampled) expect([turn.ended?.reason, turn.ended?.routes]).toEqual(['abort', null]);
    },
    2 * START_MS,
  );

  test.runIf(IN_FULL)(
    'of a model without experts are refused at the start, with the reason',
    async () => {
      const [model] = await vllm.makeModels(cell.dir);
      const options = engineOptions(vllm, model, { blob_dir: join(cell.dir, 'blobs') });
      const start = cell.start({ id: 'engine-0', kind: 'engine', command: vllm.command('engine'), options });
      await expect(start).rejects.toThrow(/This model has no expert routes/);
    },
    START_MS,
  );
});

describe.skipIf(!hasVllm)('a vllm that cannot start', () => {
  test.each(
    some(
      {
        args: { block_sise: 32 },
        says: /--engine\.vllm_args: AsyncEngineArgs has no field block_sise; did you mean block_size\?/,
      },
      { attention_backend: 'NOPE', says: /--engine\.attention_backend NOPE: Unknown attention backend/ },
      { kv_cache_gb: 0.0001, says: /--engine\.kv_cache_gb 0\.0001: To serve at least one request/ },
      { kv_cache_gb: 0.00002, says: /--engine\.kv_cache_gb 2e-05: No available memory/ },
      { args: { kv_cache_dtype: 'banana' }, says: /--engine\.vllm_args \{"kv_cache_dtype": "banana"\}: / },
      // Positions beyond the model's have no rotation there: their logits would be NaN.
      { max_len: 4096, says: /--engine\.max_len 4096: .*max_position_embeddings=2048/ },
    ),
  )(
    'says why in one line: $says',
    async ({ says, max_len = 512, ...more }) => {
      const [model] = await vllm.makeModels(cell.dir);
      const options = engineOptions(vllm, model, { vllm: { ...VLLM_OPTIONS, ...more }, max_len });
      const spec = { id: 'engine-0', kind: 'engine', command: vllm.command('engine'), options } as const;
      const worker = cell.launcher.start(spec);
      expect((await worker.exited).code).toBe(4);
      expect(logTail(worker, 1)).toMatch(says);
    },
    START_MS,
  );
});

describe.skipIf(!hasVllm)('speculation of vllm at temperature 0', () => {
  test.each(
    some(
      { speculation: 'mtp', guesses: 1, hitsAfterRefit: 10 },
      { speculation: 'ngram', guesses: 4, hitsAfterRefit: 10 },
      { speculation: 'draft', guesses: 3, hitsAfterRefit: 0 },
    ),
  )(
    'by $speculation: each token is the likeliest of its version, and turns end where they would without',
    async ({ speculation, guesses, hitsAfterRefit }) => {
      const models = await vllmMtp.makeModels(cell.dir);
      const options = engineOptions(vllmMtp, models[0], {
        vllm: {
          ...VLLM_OPTIONS,
          speculation,
          num_speculative_tokens: guesses,
          draft_model: models[0], // right until the first refit
        },
      });
      const worker = await cell.start({ id: 'engine-0', kind: 'engine', command: vllmMtp.command('engine'), options });
      const engine = new EngineClient(worker.peer);
      const greedy = (prompt: ArrayLike<number>, more: Partial<Sampling> = {}) =>
        engine.generate(prompt, { temperature: 0, max_tokens: 40, ...more });
      const accepted = async () => (await worker.peer.request('stats', {})).fields.stats.spec_accepted as number;

      // What was said once is asked for again, so that n-grams find it.
      const first = await Promise.all(Array.from({ length: 8 }, (_, i) => greedy(promptOf(3 + 7 * i, i))));
      const prompts = first.map(({ prompt, ids }) => [...prompt, ...ids, prompt.at(-1) as number]);
      const again = await Promise.all(prompts.map((prompt) => greedy(prompt)));
      for (const { ended, ids } of [...first, ...again]) expect([ended?.reason, ids.length]).toEqual(['length', 40]);
      expect(await accepted()).toBeGreaterThan(50);

      // Ends inside what one step gave: at the limit, and at a stop id where it comes for the first time.
      const insides = again.flatMap((turn) => acceptedAt(turn).map((at) => ({ turn, at })));
      const stops = insides.filter(({ turn: { ids }, at }) => ids.indexOf(ids[at] as number) === at);
      expect(stops.length).toBeGreaterThan(10);
      const limited = insides.map(async ({ turn: { prompt, ids }, at }) => {
        const turn = await greedy(prompt, { max_tokens: at + 1 });
        expect([turn.ended?.reason, turn.ids]).toEqual(['length', ids.slice(0, at + 1)]);
      });
      await Promise.all(limited);
      const stopped = stops.map(async ({ turn: { prompt, ids }, at }) => {
        const turn = await greedy(prompt, { stop_token_ids: [ids[at] as number] });
        expect([turn.ended?.reason, turn.ids]).toEqual(['stop', ids.slice(0, at + 1)]);
        expect(turn.logprobs.length).toBe(at + 1);
      });
      await Promise.all(stopped);

      // Two refits inside a turn, by a trainer that has no layer which guesses.
      const long = await Promise.all(
        first.map(({ prompt }) => engine.start(prompt, { temperature: 0, max_tokens: 300 })),
      );
      const segments: Record<number, { path: string; tensors: TensorTable }> = {};
      const probe = promptOf(50, 99);
      const refit = async (version: number, clear: boolean) => {
        const path = join(cell.dir, `segment-${version}.bin`);
        const tensors = writeSegment(models[version % 2] as string, path, (name) => !name.includes('.layers.2.'));
        segments[version] = { path, tensors };
        const before = long.map(({ ids }) => ids.length);
        await engine.until(() => long.every(({ ids }, i) => ids.length > 20 + (before[i] as number)));
        const { frames } = await engine.pause(version, 'keep', clear);
        expect([...frames.totals]).toEqual(long.map(({ ids }) => ids.length));
        await engine.load(version, path, tensors);
        const scored = await engine.score([Int32Array.from(probe)]);
        await engine.resume(version);
        return scored.subarray(1);
      };
      const scored = await refit(1, true);
      const before = await accepted();
      const between = await Promise.all(prompts.map((prompt) => greedy(prompt)));
      // Head and embedding of multi-token prediction are the model's own, and so new; its layer is the old one.
      expect((await accepted()) - before).toBeGreaterThanOrEqual(hitsAfterRefit);
      await refit(2, false);
      await engine.until(() => long.every(({ ended }) => ended !== null));
      expect(long.map(({ ids }) => ids.length)).toEqual(long.map(() => 300));
      expect(long.map(({ versions }) => new Set(versions).size)).toEqual(long.map(() => 3));

      const turns = [...first, ...again, ...between, ...long];
      const cases = turns.map(({ prompt, ids, versions }) => {
        const pieces = [...new Set(versions)].map((version) => ({
          from: versions.indexOf(version),
          to: versions.lastIndexOf(version) + 1,
          version,
          fresh: version < 2,
        }));
        return { prompt: [...prompt], ids, temperature: 1, pieces };
      });
      const [start, ...rest] = probe as [number, ...number[]];
      const whole = { from: 0, to: rest.length, version: 1, fresh: true };
      cases.push({ prompt: [start], ids: rest, temperature: 1, pieces: [whole] });
      const judged = await askTransformers({ model: models[0], segments, cases });
      let undecided = 0;
      for (const [i, { ids, logprobs }] of turns.entries()) {
        const isDecided = (_: unknown, k: number) => judged.decided[i]?.[k] === true; // else after a tie of experts
        const of = (all: readonly number[] | undefined) => (all ?? []).filter(isDecided);
        undecided += ids.length - ids.filter(isDecided).length;
        expect(of(ids)).toEqual(of(judged.likeliest[i]));
        const gap = largestGap(of(logprobs), of(judged.logprobs[i]));
        expect(gap).toBeLessThan(TOLERANCE);
      }
      expect(undecided).toBeLessThan(0.1 * turns.reduce((sum, { ids }) => sum + ids.length, 0));
      expect(largestGap(scored, judged.logprobs.at(-1) as number[])).toBeLessThan(TOLERANCE);
    },
    2 * START_MS,
  );
});

describe.skipIf(!hasVllm)('the death of vllm', () => {
  test.each(
    some({ victim: 'EngineCore', kind: vllm }, { victim: 'worker', kind: vllm }, { victim: 'rank', kind: vllmTwo }),
  )(
    'by a killed $victim with 8 requests under way loses none of them and leaves nothing behind',
    async ({ victim, kind }) => {
      const before = leftovers();
      const [model] = await kind.makeModels(cell.dir);
      const events: string[] = [];
      const generator: Generator = new Generator({
        launcher: cell.launcher,
        spec: (index) => ({
          id: `engine-${index}`,
          kind: 'engine',
          command: kind.command('engine'),
          options: engineOptions(kind, model, { max_len: 2048 }),
        }),
        maxRequests: 64,
        maxRestarts: 1,
        hooks: { join: async () => {}, event: (name) => events.push(name) },
      });
      const { worker } = await generator.startEngine(0);
      const turns = Array.from({ length: 8 }, (_, i) =>
        generator.generate({
          rolloutId: `r${i}`,
          attempt: 0,
          turn: 0,
          sessionId: `r${i}`,
          sampling: { temperature: 1, top_p: 1, top_k: 0, max_tokens: 1200, seed: i, stop: [], stop_token_ids: [] },
          prompt: Int32Array.from(promptOf(12, i)),
        }),
      );
      while (generator.tokens < 400) await sleep(5);
      const group = processesOf(worker.pid);
      const core = group.find(({ parent, name }) => parent === worker.pid && name.includes('EngineCore'));
      const rank = group.find(({ name }) => name.includes('Worker_TP1'));
      const pid = { EngineCore: core?.pid, worker: worker.pid, rank: rank?.pid }[victim] as number;
      expect(pid).toBeGreaterThan(0);
      const killed = performance.now();
      process.kill(pid, 'SIGKILL');
      await worker.peer.lost;
      expect(performance.now() - killed).toBeLessThan(1000);
      const results = await Promise.all(turns);
      expect(results.map(({ reason, ids }) => `${reason} ${ids.length}`)).toEqual(turns.map(() => 'length 1200'));
      expect(events).toEqual(['engine_lost', 'engine_restart']);
      generator.close();
      const survivors = generator.engines.map((engine) => engine.worker);
      const second = survivors.flatMap(({ pid }) => processesOf(pid));
      await Promise.all(survivors.map((one) => cell.launcher.kill(one)));
      await sleep(200);
      expect([...group, ...second].filter(({ pid }) => isAlive(pid))).toEqual([]);
      const ours = [worker, ...survivors].map(({ pid }) => `molt-tmp-${pid}-`); // other files run vLLM, too
      // Of collectives between CPUs, which only these tests run: vLLM leaves them, by names of its own.
      for (const path of leftovers().filter((path) => /vllm_dist_.*cpushm/.test(path))) rmSync(path);
      const left = leftovers().filter((path) => !path.includes('molt-tmp') || ours.some((name) => path.includes(name)));
      expect(left.filter((path) => !before.includes(path))).toEqual([]);
    },
    4 * START_MS,
  );
});

/** Where tokens came that were not the last of their step: they had been guessed. */
function acceptedAt({ ids, counts }: Turn): number[] {
  const lasts = new Set<number>();
  let at = -1;
  for (const count of counts) {
    at += count;
    lasts.add(at);
  }
  return [...ids.keys()].filter((k) => !lasts.has(k));
}

/** Of the process group that a worker leads. */
function processesOf(group: number): { pid: number; parent: number; name: string }[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .flatMap((pid) => {
      try {
        const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
        const name = readFileSync(`/proc/${pid}/cmdline`, 'utf8').replaceAll('\0', ' ');
        const [, parent, pgrp] = stat
          .slice(stat.lastIndexOf(')') + 2)
          .split(' ')
          .map(Number);
        return pgrp === group ? [{ pid: Number(pid), parent: parent as number, name }] : [];
      } catch {
        return []; // ended meanwhile
      }
    });
}

function isAlive(pid: number): boolean {
  try {
    return !/\) Z/.test(readFileSync(`/proc/${pid}/stat`, 'utf8'));
  } catch {
    return false;
  }
}

/** What vLLM leaves where it is killed. */
function leftovers(): string[] {
  const all = ['/dev/shm', tmpdir()].flatMap((dir) => readdirSync(dir).map((name) => join(dir, name)));
  return all.filter((path) => /sem\.mp|psm_|vllm|molt-tmp/.test(path));
}
