/**
 * vLLM as an engine, beyond the contract that all engines pass (engine_contract.test.ts): refits of every layout that its
 * CPU build packs, and the death of any of its processes. `npm run prove vllm` does more of it.
 */
import { createHash } from 'node:crypto';
import { readdirSync, readFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { Generator } from '../molt/generator.ts';
import { logTail } from '../molt/launch.ts';
import {
  Cell,
  engineOptions,
  hasVllm,
  largestGap,
  promptOf,
  torch,
  torchMoe,
  VLLM_OPTIONS,
  vllm,
  vllmMoe,
  vllmUntied,
  writeSegment,
} from './contract.ts';
import { EngineClient, type Turn } from './engine_client.ts';
import { check, crossTogether, openWorld, randomOf } from './interleavings.ts';

const START_MS = 120_000;
const TOLERANCE = 1e-4;

/** The first in the daily tests, all in `npm run prove vllm`. */
function some<T>(...all: T[]): T[] {
  return process.env.MOLT_VLLM === 'all' ? all : all.slice(0, 1);
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
    ),
  )(
    'three in a row under 16 requests with $kind.name and refit.cache $cache: each token is of its version',
    async ({ kind, cache }) => {
      const world = await openWorld(cell, kind, { name: 'refits', cache, numEngines: 1 });
      await crossTogether(world, randomOf(3), 16, 3);
      const found = await check(world, TOLERANCE);
      expect(found.crossed).toEqual([undefined, undefined, undefined, 16]);
      expect(found.worst).toBeLessThan(TOLERANCE);
      expect(found.telling).toBeGreaterThan(0.8 * found.boundaries);
      await world.close();
    },
    START_MS,
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
  test(
    'come with the ending of a turn, as a blob with a row for every token that ran; a pause waits for them',
    async () => {
      const [model] = await vllmMoe.makeModels(cell.dir);
      const blobs = join(cell.dir, 'blobs');
      const options = engineOptions(vllmMoe, model, { blob_dir: blobs });
      const worker = await cell.start({ id: 'engine-0', kind: 'engine', command: vllmMoe.command('engine'), options });
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
    },
    START_MS,
  );

  test(
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
    ),
  )(
    'says why in one line: $says',
    async ({ says, ...more }) => {
      const [model] = await vllm.makeModels(cell.dir);
      const options = engineOptions(vllm, model, { vllm: { ...VLLM_OPTIONS, ...more } });
      const spec = { id: 'engine-0', kind: 'engine', command: vllm.command('engine'), options } as const;
      const worker = cell.launcher.start(spec);
      expect((await worker.exited).code).toBe(4);
      expect(logTail(worker, 1)).toMatch(says);
    },
    START_MS,
  );
});

describe.skipIf(!hasVllm)('the death of vllm', () => {
  test.each(some('EngineCore', 'worker'))(
    'by a killed %s with 8 requests under way loses none of them and leaves nothing behind',
    async (victim) => {
      const before = leftovers();
      const [model] = await vllm.makeModels(cell.dir);
      const events: string[] = [];
      const generator: Generator = new Generator({
        launcher: cell.launcher,
        spec: (index) => ({
          id: `engine-${index}`,
          kind: 'engine',
          command: vllm.command('engine'),
          options: engineOptions(vllm, model, { max_len: 2048 }),
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
      expect(core).toBeDefined();
      const killed = performance.now();
      process.kill(victim === 'worker' ? worker.pid : (core?.pid as number), 'SIGKILL');
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
      expect(leftovers().filter((path) => !before.includes(path))).toEqual([]);
    },
    START_MS,
  );
});

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
  return all.filter((path) => /sem\.(mp|molt)|psm_|vllm|molt-tmp/.test(path));
}
