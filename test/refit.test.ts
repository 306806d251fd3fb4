/**
 * Refit over real processes: engine and trainer agree after every push; damaged bytes and damaged layout are refused,
 * the engine is killed, and a new one takes its place with sound weights.
 */
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { crc32 } from 'node:zlib';
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import type { Engine, TurnRequest, TurnResult } from '../molt/generator.ts';
import { Generator } from '../molt/generator.ts';
import type { Worker } from '../molt/launch.ts';
import { Refit } from '../molt/refit.ts';
import { flatRows, type TensorTable, Trainer, TrainerLost } from '../molt/trainer.ts';
import type { Json, Sample, Sampling } from '../molt/types.ts';
import { Cell, corruptLast, engineOptions, type Kind, simulated, startRanks, swapLayout, torch } from './contract.ts';

type Damage = (path: string, table: TensorTable) => TensorTable;

/** A trainer whose next push is damaged on its way, or slow. */
class LeakyTrainer extends Trainer {
  damage: Damage | null = null;
  slow: () => Promise<unknown> = async () => {};
  before: () => Promise<unknown> = async () => {};
  tensors: TensorTable = []; // of the last push
  override async pushWeights(version: number, path: string) {
    await this.before();
    const pushed = await super.pushWeights(version, path);
    this.tensors = pushed.tensors;
    await this.slow();
    const damage = this.damage;
    this.damage = null;
    return damage ? { ...pushed, tensors: damage(path, pushed.tensors) } : pushed;
  }
}

const BYTES: Damage = (path, table) => {
  corruptLast(path, table);
  return table;
};
const LAYOUT: Damage = (path, table) => swapLayout(path, table);

interface Opened {
  readonly numEngines?: number;
  readonly script?: Json;
  readonly deadlineMs?: number;
  readonly maxRequests?: number;
  readonly stageFromBytes?: number;
}

/** Engines of this test have names of their own. */
async function openRefit(
  cell: Cell,
  kind: Kind,
  model: string,
  name: string,
  { numEngines = 1, script, maxRequests = 64, ...more }: Opened = {},
) {
  const events: string[] = [];
  const ranks = await startRanks(cell, kind, { name, model, worldSize: 1 });
  const trainer = new LeakyTrainer({
    start: () => ranks,
    launcher: cell.launcher,
    loss: { clipLowHigh: [0.2, 0.2], isLevel: 'off', isMode: 'mask', isThreshold: [0.5, 5] },
    temperature: 1,
    packed: false,
  });
  const generator: Generator = new Generator({
    launcher: cell.launcher,
    spec: (index) => ({
      id: `engine-${name}${index}`,
      kind: 'engine',
      command: kind.command('engine'),
      options: engineOptions(kind, model, script === undefined ? {} : { script }),
    }),
    maxRequests,
    maxRestarts: 2,
    hooks: { join: (engine: Engine) => refit.join(engine), event: (event) => events.push(event) },
  });
  const refit: Refit = new Refit({
    generator,
    trainer,
    runDir: join(cell.dir, name),
    verifyEvery: 10,
    tolerance: 1e-4,
    cache: 'clear',
    deadlineMs: 60_000,
    ...more,
  });
  refit.probes = [Int32Array.from([5, 9, 40, 3, 77, 12]), Int32Array.from([1, 2, 3])];
  await Promise.all(Array.from({ length: numEngines }, (_, i) => generator.startEngine(i)));
  let step = 0;
  const train = () =>
    trainer.step({
      step: ++step,
      version: refit.version,
      samples: [SAMPLE],
      plan: PLAN,
      denominator: 3,
      lr: 0.05,
      old: null,
    });
  const close = async () => {
    generator.close();
    trainer.close();
    await Promise.all([...generator.engines].map((engine) => cell.launcher.kill(engine.worker)));
    await Promise.all(ranks.map((rank) => cell.launcher.kill(rank)));
  };
  return { generator, refit, trainer, train, events, ranks, close };
}

async function until(condition: () => boolean): Promise<void> {
  while (!condition()) await sleep(2);
}

describe.each([simulated, torch])('refit with $name workers', (kind: Kind) => {
  let cell: Cell;
  let model: string;
  beforeAll(async () => {
    cell = await Cell.open();
    [model] = await kind.makeModels(cell.dir);
  }, kind.startMs);
  afterAll(() => cell?.close());

  const open = (name: string, more?: Opened) => openRefit(cell, kind, model, name, more);
  // A torch engine and trainer take seconds to start: what is the controller's work alone is shown on simulated ones.
  const isCheap = kind === simulated;

  test(
    'raises the version by one and leaves engine and trainer with the same logprobs, three times running',
    async () => {
      const { refit, train, close, generator } = await open('plain');
      expect((await refit.parity()).max).toBeLessThanOrEqual(1e-5);
      for (const version of [1, 2, 3]) {
        await train();
        const times = await refit.push();
        expect(refit.version).toBe(version);
        expect(times.verified).toBeLessThanOrEqual(1e-5);
        expect(times.bytes).toBeGreaterThan(0);
      }
      expect((await refit.parity()).max).toBeLessThanOrEqual(1e-5);
      expect(generator.restarts).toBe(0);
      await close();
    },
    kind.startMs,
  );

  test.each<readonly [string, Damage]>([
    ...(isCheap ? [['one flipped bit', BYTES] as const] : []),
    ['a transposed matrix with a matching checksum', LAYOUT],
  ])(
    'refuses %s: the engine is killed and a new one serves sound weights',
    async (name, damage) => {
      const { refit, train, trainer, generator, events, close } = await open(`bad${name.length}-`);
      const [first] = generator.engines;
      await train();
      trainer.damage = damage;
      await refit.push();
      expect(events).toContain('engine_killed');
      expect(generator.restarts).toBe(1);
      expect(refit.version).toBe(1); // one refit, one version, though it took two engines
      await first?.worker.exited;
      await expect.poll(() => generator.engines.length).toBe(1);
      expect(generator.engines[0]?.worker.pid).not.toBe(first?.worker.pid);
      expect((await refit.parity()).max).toBeLessThanOrEqual(1e-5);
      await close();
    },
    kind.startMs,
  );

  test.runIf(isCheap)(
    'engines sample while weights are staged, stand still one by one, and requests go on under the new version',
    async () => {
      const { refit, train, trainer, generator, close } = await open('live', { numEngines: 2 });
      const turns = Array.from({ length: 4 }, (_, i) => generator.generate(request(`r${i}`, { max_tokens: 300 })));
      await until(() => generator.tokens > 8);
      await train();
      let during = 0;
      trainer.slow = async () => {
        const before = generator.tokens;
        await until(() => generator.tokens > before + 20);
        during = generator.tokens - before;
      };
      const times = await refit.push();
      expect(during).toBeGreaterThan(20);
      expect([times.took, times.engines]).toEqual([2, 2]);
      expect(times.pauseMs).toBeGreaterThan(0);
      const sums = trainer.tensors.map((tensor) => tensor.crc32);
      expect(times.checksum).toBe(crc32(Buffer.from(Uint32Array.from(sums).buffer)));
      trainer.slow = async () => {};
      // Each of the turns has tokens of each version.
      const moved = async () => {
        const before = generator.tokens;
        await until(() => generator.tokens > before + 40);
      };
      await moved();
      expect((await refit.push()).checksum).toBe(times.checksum); // the same weights again
      await moved();
      await train();
      expect((await refit.push()).checksum).not.toBe(times.checksum);
      for (const { ids, spans, reason } of await Promise.all(turns)) {
        expect([reason, ids.length]).toEqual(['length', 300]);
        expect(spans.map(({ version }) => version)).toEqual([0, 1, 2, 3]);
        expect(spans.map(({ from }) => from).slice(1)).toEqual(spans.map(({ to }) => to).slice(0, -1));
      }
      await close();
    },
    kind.startMs,
  );

  test.each<readonly [string, Damage]>([['one flipped bit', BYTES]])(
    'an engine that is to check weights ahead pauses after it has, and refuses %s without a pause',
    async (_, damage) => {
      const { refit, train, trainer, generator, events, close } = await open('ahead', { stageFromBytes: 0 });
      const asked: string[] = [];
      const { peer } = generator.engines[0] as Engine;
      const request = peer.request.bind(peer);
      vi.spyOn(peer, 'request').mockImplementation((kind, ...rest) => {
        asked.push(kind);
        return request(kind, ...rest);
      });
      await train();
      expect((await refit.push()).verified).toBeLessThanOrEqual(1e-5);
      expect(asked).toEqual(['stage_weights', 'pause', 'load_weights', 'score', 'resume']);
      await train();
      trainer.damage = damage;
      await refit.push();
      expect(asked.slice(5)).toEqual(['stage_weights']);
      expect(events).toContain('engine_killed');
      expect(refit.version).toBe(2);
      await expect.poll(() => generator.engines.length).toBe(1);
      expect((await refit.parity()).max).toBeLessThanOrEqual(1e-5);
      await close();
    },
    kind.startMs,
  );

  test.runIf(isCheap)(
    'an engine that hangs is killed after the deadline, the other does not wait for it, and its requests go on there',
    async () => {
      const { refit, train, generator, events, close } = await open('hung', { numEngines: 2, deadlineMs: 3000 });
      const print = vi.spyOn(process.stderr, 'write').mockReturnValue(true);
      const turns = Array.from({ length: 4 }, (_, i) => generator.generate(request(`r${i}`, { max_tokens: 100 })));
      await until(() => generator.tokens > 8);
      await train();
      const [first, second] = generator.engines as [Engine, Engine];
      process.kill(first.worker.pid, 'SIGSTOP');
      const push = refit.push();
      await until(() => refit.version === 1);
      expect(first.peer.isLost).toBe(false); // it has time left
      const times = await push;
      const printed = print.mock.calls.map(([text]) => text).join('');
      print.mockRestore();
      expect([times.took, times.engines]).toEqual([1, 2]);
      expect(times.pauseMs).toBeLessThan(3000);
      expect(events).toContain('engine_killed');
      expect(printed).toContain(
        `${first.worker.spec.id} took longer than refit.deadline_s, 3 s, to take weights and is killed`,
      );
      for (const { ids, spans, engine } of await Promise.all(turns)) {
        expect([ids.length, engine]).toEqual([100, second.worker.spec.id]);
        expect(spans.map(({ version }) => version)).toEqual([0, 1]);
      }
      await close();
    },
    kind.startMs,
  );

  test.runIf(isCheap)(
    'an engine that hangs in the parity at the start is killed after the deadline, and its successor is asked',
    async () => {
      const script = { failures: [{ worker: 'engine-stuck0', what: 'stall', on: 'score', nth: 1 }] };
      const { refit, generator, events, close } = await open('stuck', { deadlineMs: 500, script });
      const print = vi.spyOn(process.stderr, 'write').mockReturnValue(true);
      expect((await refit.parity()).max).toBeLessThanOrEqual(1e-5);
      const printed = print.mock.calls.map(([text]) => text).join('');
      print.mockRestore();
      expect(printed).toContain('engine-stuck0 took longer than refit.deadline_s, 0.5 s, to score and is killed');
      expect([events.includes('engine_killed'), generator.restarts]).toEqual([true, 1]);
      await close();
    },
    kind.startMs,
  );

  test.runIf(isCheap)(
    'an engine killed between refits comes back with the current version',
    async () => {
      const { refit, train, generator, close } = await open('killed');
      await train();
      await refit.push();
      const [old] = generator.engines;
      process.kill(old?.worker.pid ?? 0, 'SIGKILL');
      await old?.worker.peer.lost;
      await expect.poll(() => generator.engines.length, { timeout: kind.startMs }).toBe(1);
      expect(generator.engines[0]?.worker.pid).not.toBe(old?.worker.pid);
      expect((await refit.parity()).max).toBeLessThanOrEqual(1e-5);
      expect(refit.version).toBe(1);
      const turn = await generator.generate(request('r', { max_tokens: 4 }));
      expect(new Set(turn.spans.map((span) => span.version))).toEqual(new Set([1]));
      await close();
    },
    kind.startMs,
  );
});

describe('requests at the moment of a refit', () => {
  let cell: Cell;
  let model: string;
  beforeAll(async () => {
    cell = await Cell.open();
    [model] = await simulated.makeModels(cell.dir);
  });
  afterAll(() => cell?.close());
  const versions = (turn: TurnResult) => turn.spans.map(({ version }) => version);

  test('while the engine stands still new ones wait, and an abort ends at once with what it has', async () => {
    const script = { latency_ms: { step: 2, score: 150 } }; // score: the last thing before the version rises
    const { refit, train, generator, close } = await openRefit(cell, simulated, model, 'still', { script });
    const live = [1, 2].map((i) => request(`live${i}`, { max_tokens: 200 }));
    const [goesOn, ends] = live.map((each) => generator.generate(each)) as [Promise<TurnResult>, Promise<TurnResult>];
    await until(() => generator.tokens > 8);
    await train();
    const push = refit.push();
    const [engine] = generator.engines as [Engine];
    for (let running = 2; running > 0; ) {
      const { fields } = await engine.peer.request('stats', {});
      running = fields.stats.running as number; // 0 when it is paused
    }
    const before = generator.tokens;
    const comes = generator.generate(request('comes', { max_tokens: 10 }));
    const gone = request('gone');
    const comesAndGoes = generator.generate(gone);
    generator.abort(live[1] as TurnRequest);
    generator.abort(gone);
    const [aborted, empty] = await Promise.all([ends, comesAndGoes]);
    expect([aborted.reason, versions(aborted), aborted.ids.length > 0]).toEqual(['abort', [0], true]);
    expect([empty.reason, empty.ids.length, empty.spans]).toEqual(['abort', 0, []]);
    await push;
    expect(versions(await comes)).toEqual([1]);
    const whole = await goesOn;
    expect([versions(whole), whole.ids.length, whole.spans[0]?.to]).toEqual([[0, 1], 200, before - aborted.ids.length]);
    await close();
  });

  test('one that waits in line for an engine is sampled by the new version alone', async () => {
    const { refit, train, generator, close } = await openRefit(cell, simulated, model, 'line', { maxRequests: 1 });
    const runs = generator.generate(request('runs', { max_tokens: 150 }));
    const waits = generator.generate(request('waits', { max_tokens: 10 }));
    const gone = request('gone');
    const leaves = generator.generate(gone);
    await until(() => generator.tokens > 8);
    await train();
    const push = refit.push();
    generator.abort(gone);
    expect([(await leaves).reason, generator.waiting]).toEqual(['abort', 1]);
    await push;
    expect(versions(await runs)).toEqual([0, 1]);
    expect(versions(await waits)).toEqual([1]);
    await close();
  });
});

describe('an engine that joins during a refit', () => {
  let cell: Cell;
  let model: string;
  beforeAll(async () => {
    cell = await Cell.open();
    [model] = await simulated.makeModels(cell.dir);
  });
  afterAll(() => cell?.close());

  test('has the newest version when it takes part, though that was pushed while it joined', async () => {
    const slow = { worker: 'engine-late1', what: 'slow', on: 'resume', nth: 1, ms: 400 };
    const { refit, train, generator, close } = await openRefit(cell, simulated, model, 'late', {
      script: { failures: [slow] },
    });
    await train();
    await refit.push();
    // Pushes all the while, so that some fall between its load and its first request.
    let joined = false;
    const served = generator.startEngine(1).then(async ({ peer }) => {
      joined = true;
      const newest = refit.version;
      const { fields } = await peer.request('score', {}, flatRows([Int32Array.of(1, 2)]));
      return fields.version - newest;
    });
    while (!joined) {
      await train();
      await refit.push();
    }
    expect(await served).toBeGreaterThanOrEqual(0);
    expect((await refit.parity()).max).toBeLessThanOrEqual(1e-5);
    await close();
  });

  test('is waited for when there is no other, and is the one that makes the version', async () => {
    const { refit, train, generator, close } = await openRefit(cell, simulated, model, 'only');
    await train();
    await refit.push();
    const [first] = generator.engines;
    await train();
    await cell.launcher.kill((first as Engine).worker);
    expect((await refit.push()).engines).toBe(0);
    expect(refit.version).toBe(2);
    await expect.poll(() => generator.engines.length).toBe(1);
    expect((await refit.parity()).max).toBeLessThanOrEqual(1e-5);
    await close();
  });

  test('does not make the version of a refit that failed, which is tried again', async () => {
    // The engine dies as it loads, the trainer before it writes the weights for the next one.
    const exits = { worker: 'engine-again0', what: 'exit', on: 'load_weights', nth: 1 };
    const { refit, train, trainer, generator, ranks, close } = await openRefit(cell, simulated, model, 'again', {
      script: { failures: [exits] },
    });
    await train();
    let pushes = 0;
    trainer.before = async () => ++pushes === 2 && cell.launcher.kill(ranks[0] as Worker);
    await expect(refit.push()).rejects.toBeInstanceOf(TrainerLost);
    await expect.poll(() => generator.engines.length).toBe(1);
    expect(refit.version).toBe(0);
    const { spans } = await generator.generate(request('r'));
    expect(spans.map(({ version }) => version)).toEqual([0]);
    await close();
  });

  test('finds a whole file, however long it reads', async () => {
    const slow = { worker: 'engine-read1', what: 'slow', on: 'load_weights', nth: 1, ms: 100 };
    const { refit, train, generator, events, close } = await openRefit(cell, simulated, model, 'read', {
      script: { failures: [slow] },
    });
    await train();
    await refit.push();
    const joining = generator.startEngine(1);
    let joined = false;
    void joining.then(() => {
      joined = true;
    });
    while (!joined) {
      await train();
      await refit.push();
    }
    expect(events).not.toContain('engine_killed');
    await close();
  });
});

function request(rolloutId: string, more: Partial<Sampling> = {}): TurnRequest {
  const sampling = { temperature: 1, top_p: 1, top_k: 0, max_tokens: 4, seed: 1, stop: [], stop_token_ids: [] };
  const prompt = Int32Array.from([5, 6, 7]);
  return { rolloutId, attempt: 0, turn: 0, sessionId: rolloutId, sampling: { ...sampling, ...more }, prompt };
}

/** Three trained tokens with credit, so that every step moves the weights. */
const SAMPLE: Sample = {
  rolloutId: 'r',
  groupId: 'g',
  trajectory: {
    ids: Int32Array.from([5, 6, 7, 8, 9]),
    lossMask: Uint8Array.from([0, 0, 1, 1, 1]),
    logprobs: Float32Array.from([0, 0, -5, -5, -5]),
    versions: Int32Array.from([-1, -1, 0, 0, 0]),
    turns: new Int32Array(5),
    spans: [],
  },
  advantages: Float32Array.from([0, 0, 1, 1, -1]),
};
const PLAN = { ranks: [{ samples: [0], microBatches: [[0]], tokens: 5 }], numMicroBatches: 1, numDummies: 0 };
