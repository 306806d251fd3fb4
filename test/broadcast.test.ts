/**
 * Refits by broadcast, with real trainers and torch engines over gloo: equal weights, and what becomes of the group when
 * one of it is lost or frozen. (The bytes themselves, and vLLM: test_transport.py.)
 */
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test, vi } from 'vitest';
import type { Engine } from '../molt/generator.ts';
import { Generator } from '../molt/generator.ts';
import { Refit } from '../molt/refit.ts';
import { Trainer } from '../molt/trainer.ts';
import type { Sample } from '../molt/types.ts';
import { Cell, engineOptions, startRanks, torch } from './contract.ts';

const LIMIT_MS = torch.startMs;
const DEADLINE_MS = 6000;
let cell: Cell;
let world: Awaited<ReturnType<typeof open>>; // of all tests in turn, since starting one takes most of the time
beforeAll(async () => {
  cell = await Cell.open();
  world = await open();
}, LIMIT_MS);
afterAll(async () => {
  await world?.close();
  await cell?.close();
});

/** Two trainer ranks, two engines. */
async function open() {
  const killed: unknown[] = []; // engines by name
  const [model] = await torch.makeModels(cell.dir);
  const ranks = await startRanks(cell, torch, { name: 'broadcast', model, worldSize: 2 });
  const trainer = new Trainer({
    start: () => ranks,
    launcher: cell.launcher,
    loss: { clipLowHigh: [0.2, 0.2], isLevel: 'off', isMode: 'mask', isThreshold: [0.5, 5] },
    temperature: 1,
    packed: false,
  });
  await trainer.ready();
  const generator: Generator = new Generator({
    launcher: cell.launcher,
    spec: (index) => ({
      id: `engine-${index}`,
      kind: 'engine',
      command: torch.command('engine'),
      options: engineOptions(torch, model),
    }),
    maxRequests: 64,
    maxRestarts: 8,
    hooks: {
      join: (engine: Engine) => refit.join(engine),
      event: (event, { engine }) => {
        if (event === 'engine_killed') killed.push(engine);
      },
    },
  });
  const refit: Refit = new Refit({
    generator,
    trainer,
    runDir: join(cell.dir, 'run'),
    verifyEvery: 10,
    tolerance: 1e-4,
    cache: 'clear',
    deadlineMs: DEADLINE_MS,
    transport: 'nccl',
    bucketBytes: 64 * 1024,
  });
  refit.probes = [Int32Array.from([5, 9, 40, 3, 77, 12]), Int32Array.from([1, 2, 3])];
  await Promise.all([0, 1].map((i) => generator.startEngine(i)));
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
  /** Both engines serve what the trainer has. */
  const healed = async () => {
    await expect.poll(() => generator.engines.length, { timeout: LIMIT_MS }).toBe(2);
    expect((await refit.parity()).max).toBeLessThanOrEqual(1e-5);
    return generator.engines as [Engine, Engine];
  };
  const close = async () => {
    generator.close();
    trainer.close();
    await Promise.all([...generator.engines].map((engine) => cell.launcher.kill(engine.worker)));
    await Promise.all(ranks.map((rank) => cell.launcher.kill(rank)));
  };
  return { refit, train, healed, killed, trainer, close };
}

test(
  'three refits by broadcast from two ranks to two engines; an engine killed between them comes back by the file',
  async () => {
    const { refit, train, healed, killed } = world;
    for (const version of [1, 2, 3]) {
      await train();
      const times = await refit.push();
      expect([refit.version, times.took, times.engines]).toEqual([version, 2, 2]);
      expect(times.verified).toBeLessThanOrEqual(1e-5);
      const [first] = await healed();
      if (version !== 2) continue;
      process.kill(first.worker.pid, 'SIGKILL');
      await first.peer.lost;
      await healed();
    }
    expect(killed).toEqual([]);
  },
  LIMIT_MS,
);

test(
  'an engine that does not pause is killed after half the deadline and does not hold the other up longer',
  async () => {
    const { refit, train, healed, killed } = world;
    const [first, second] = await healed();
    killed.length = 0;
    const print = vi.spyOn(process.stderr, 'write').mockReturnValue(true);
    await train();
    process.kill(first.worker.pid, 'SIGSTOP');
    const times = await refit.push();
    print.mockRestore();
    expect([times.took, times.engines]).toEqual([1, 2]);
    expect(times.pauseMs).toBeLessThan(DEADLINE_MS);
    expect(killed).toEqual([first.worker.spec.id]);
    expect(second.peer.isLost).toBe(false);
    await healed();
  },
  LIMIT_MS,
);

test(
  'an engine that is lost while another one has not paused has no part in the group: the other takes the weights',
  async () => {
    const { refit, train, healed, killed } = world;
    const [first, second] = await healed();
    killed.length = 0;
    await train();
    const version = refit.version + 1;
    process.kill(second.worker.pid, 'SIGSTOP');
    const push = refit.push();
    await vi.waitUntil(() => first.paused, { timeout: DEADLINE_MS, interval: 1 });
    process.kill(first.worker.pid, 'SIGKILL');
    await first.peer.lost;
    process.kill(second.worker.pid, 'SIGCONT');
    const times = await push;
    expect([refit.version, times.took, times.engines]).toEqual([version, 1, 2]);
    expect([killed, second.peer.isLost]).toEqual([[], false]);
    await healed();
  },
  LIMIT_MS,
);

test(
  'a broadcast that is called off before the trainer has begun with it leaves its ranks together',
  async () => {
    const { refit, train, healed, trainer } = world;
    await healed();
    const written = trainer.pushWeights(0, join(cell.dir, 'other'));
    const stop = new AbortController();
    const address = `tcp://${trainer.store}/none?size=2&rank=0&bucket=65536&timeout=60`;
    const sent = trainer.sendWeights(0, 'nccl', address, stop.signal);
    stop.abort();
    await expect(sent).rejects.toThrow('was cancelled');
    await written;
    await train();
    expect(await refit.push()).toMatchObject({ took: 2, engines: 2 });
    await healed();
  },
  LIMIT_MS,
);

test.each(['SIGSTOP', 'SIGKILL'] as const)(
  'after %s of an engine in the group all of it are killed, new ones take the version, and the next refit is as any',
  async (signal) => {
    const { refit, train, healed, killed } = world;
    const [first, second] = await healed();
    killed.length = 0;
    const print = vi.spyOn(process.stderr, 'write').mockReturnValue(true);
    await train();
    const version = refit.version + 1;
    const push = refit.push();
    await vi.waitUntil(() => first.paused, { timeout: DEADLINE_MS, interval: 1 });
    process.kill(first.worker.pid, signal);
    const times = await push;
    print.mockRestore();
    expect([refit.version, times.took]).toEqual([version, 1]);
    expect(first.peer.isLost).toBe(true);
    // Lost before the second one paused, it has no part in the group.
    if (signal === 'SIGSTOP') expect(killed).toContain(second.worker.spec.id);
    await healed();
    await train();
    expect(await refit.push()).toMatchObject({ took: 2, engines: 2 });
    await healed();
  },
  LIMIT_MS,
);

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
/** The second rank runs a dummy. */
const PLAN = {
  ranks: [
    { samples: [0], microBatches: [[0]], tokens: 5 },
    { samples: [], microBatches: [[]], tokens: 0 },
  ],
  numMicroBatches: 1,
  numDummies: 1,
};
