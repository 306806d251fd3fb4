/**
 * Refit over real processes: engine and trainer agree after every push; damaged bytes and damaged layout are refused,
 * the engine is killed, and a new one takes its place with sound weights.
 */
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { Engine } from '../molt/generator.ts';
import { Generator } from '../molt/generator.ts';
import { Refit } from '../molt/refit.ts';
import { type TensorTable, Trainer } from '../molt/trainer.ts';
import type { Sample } from '../molt/types.ts';
import { Cell, corruptLast, engineOptions, type Kind, simulated, startRanks, swapLayout, torch } from './contract.ts';

type Damage = (path: string, table: TensorTable) => TensorTable;

/** A trainer whose next push is damaged on its way. */
class LeakyTrainer extends Trainer {
  damage: Damage | null = null;
  override async pushWeights(version: number, path: string) {
    const pushed = await super.pushWeights(version, path);
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

describe.each([simulated, torch])('refit with $name workers', (kind: Kind) => {
  let cell: Cell;
  let model: string;
  beforeAll(async () => {
    cell = await Cell.open();
    [model] = await kind.makeModels(cell.dir);
  }, kind.startMs);
  afterAll(() => cell?.close());

  /** Engines of this test have names of their own. */
  async function open(name: string, numEngines = 1) {
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
        options: engineOptions(kind, model),
      }),
      maxRequests: 64,
      maxRestarts: 2,
      hooks: { join: (engine: Engine) => refit.join(engine), event: (event) => events.push(event) },
    });
    const refit: Refit = new Refit({
      generator,
      trainer,
      runDir: join(cell.dir, name),
      verifyEvery: 10,
      tolerance: 1e-4,
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
    return { generator, refit, trainer, train, events, close };
  }

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

  test.each([
    ['one flipped bit', BYTES],
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

  test(
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
      const turn = await generator.generate({
        rolloutId: 'r',
        attempt: 0,
        turn: 0,
        sessionId: 'r',
        sampling: { temperature: 1, top_p: 1, top_k: 0, max_tokens: 4, seed: 1, stop: [], stop_token_ids: [] },
        prompt: Int32Array.from([5, 6, 7]),
      });
      expect(new Set(turn.spans.map((span) => span.version))).toEqual(new Set([1]));
      await close();
    },
    kind.startMs,
  );
});

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
