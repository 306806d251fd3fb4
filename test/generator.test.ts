/**
 * The generator over simulated engines in real processes: where turns go, what happens when an engine stalls or loses
 * tokens, and how many requests it is given.
 */
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { type Peer, WorkerLink } from '../molt/bus.ts';
import { Generator, type TurnRequest, type TurnResult } from '../molt/generator.ts';
import type { Fields } from '../molt/protocol.ts';
import { Refit } from '../molt/refit.ts';
import { Trainer } from '../molt/trainer.ts';
import type { Json } from '../molt/types.ts';
import { invariant } from '../molt/types.ts';
import { initialWeights, packWeights } from '../workers/simulated_model.ts';
import { Cell, engineOptions, simulated, startRanks, writeSegment } from './contract.ts';

const STALL_MS = 1000;

let cell: Cell;
let model: string;
let names = 0;
const generators: Generator[] = [];
beforeAll(async () => {
  cell = await Cell.open({ heartbeatMs: 25 });
  model = join(cell.dir, 'model');
  mkdirSync(model);
  writeFileSync(join(model, 'model.safetensors'), packWeights(initialWeights(1)));
});
afterAll(async () => {
  for (const generator of generators) generator.close();
  await cell.close();
});

interface Opened {
  readonly generator: Generator;
  readonly events: string[];
  readonly name: string; // engines are `engine-NAME-INDEX`
}

function open(script: (name: string) => Json, more: { maxRequests?: number; refit?: () => Refit } = {}): Opened {
  const name = `t${names++}`;
  const events: string[] = [];
  const generator = new Generator({
    launcher: cell.launcher,
    spec: (index) => ({
      id: `engine-${name}-${index}`,
      kind: 'engine',
      command: simulated.command('engine'),
      options: engineOptions(simulated, model, { script: script(name), max_len: 4096 }),
    }),
    maxRequests: more.maxRequests ?? 64,
    maxRestarts: 2,
    stallMs: STALL_MS,
    hooks: {
      join: async (engine) => more.refit?.().join(engine),
      event: (event, detail) => events.push(`${event} ${Object.values(detail).join(' ')}`),
    },
  });
  generators.push(generator);
  return { generator, events, name };
}

let rollouts = 0;
function turn(maxTokens: number, more: Partial<TurnRequest> = {}): TurnRequest {
  const rolloutId = `g${rollouts++}-0`;
  const sampling = {
    temperature: 1,
    top_p: 1,
    top_k: 0,
    max_tokens: maxTokens,
    seed: rollouts,
    stop: [],
    stop_token_ids: [],
  };
  return { rolloutId, attempt: 0, turn: 0, sessionId: rolloutId, sampling, prompt: Int32Array.of(65, 66, 67), ...more };
}

/** Tokens by the version that sampled them, in order. */
const versions = ({ spans }: TurnResult) => spans.map(({ version, from, to }) => [version, to - from]);

type Ending = Fields<'tokens'>['ended'][number];

interface Linked {
  readonly link: WorkerLink;
  readonly peer: Peer;
  readonly asked: Fields<'generate'>[]; // handles count from 1
}

/** An engine that is a link of this process: it takes requests, and says what a test makes it say. */
async function linked({ generator, name }: Opened, index: number): Promise<Linked> {
  const id = `engine-${name}-${index}`;
  const peer = cell.bus.expect(id, 'secret', {});
  const { endpoint } = cell.bus;
  const args = { endpoint, workerId: id, secret: 'secret', workerKind: 'engine', capabilities: {}, onLost: () => {} };
  const link = await WorkerLink.connect(args);
  const asked: Fields<'generate'>[] = [];
  link.handle('generate', async (fields) => ({ fields: { handle: asked.push(fields) }, frames: {} }));
  link.ready({});
  const spec = { id, kind: 'engine', command: [], options: {} } as const;
  const exited = Promise.resolve({ code: 0, signal: null });
  const worker = { spec, peer, pid: process.pid, exited, log: { path: join(cell.dir, 'none'), from: 0 } };
  await generator.adopt(worker, index);
  return { link, peer, asked };
}

/** It samples for its next request, and ends it unless `routes` is left out. */
async function sampled({ link, asked }: Linked, tokens: number, routes?: Ending['routes']): Promise<void> {
  const before = asked.length;
  await expect.poll(() => asked.length).toBeGreaterThan(before);
  const handle = asked.length;
  const ended = routes === undefined ? [] : [{ handle, reason: 'length', detail: null, cached_tokens: 0, routes }];
  const frames = { ids: new Int32Array(tokens).fill(65), logprobs: new Float32Array(tokens) };
  link.send(
    'tokens',
    { version: 0, texts: [], ended },
    { handles: Int32Array.of(handle), counts: Int32Array.of(tokens), ...frames },
  );
}

describe('generator', () => {
  test('a stalled engine is killed with its stacks; its requests go on from the tokens they have', async () => {
    const { generator, events, name } = open((id) => ({
      latency_ms: { step: 2 },
      failures: [{ worker: `engine-${id}-0`, what: 'stall', on: 'step', nth: 20 }],
    }));
    const [one, two] = [await generator.startEngine(0), await generator.startEngine(1)];
    // The second one serves the same weights as another version.
    const segment = join(cell.dir, `${name}.bin`);
    const tensors = writeSegment(model, segment);
    await two.peer.request('pause', { epoch: 7, mode: 'keep', clear_cache: true });
    await two.peer.request('load_weights', {
      version: 7,
      source: { transport: 'file', path: segment },
      tensors,
      last: true,
    });
    await two.peer.request('resume', { epoch: 7 });
    const requests = Array.from({ length: 4 }, () => turn(400));
    const results = await Promise.all(requests.map((request) => generator.generate(request)));
    expect((await one.peer.lost).message).toBe(`engine-${name}-0: made no step for 1 s`);
    expect(events.map((event) => event.split(' ')[0])).toEqual(['engine_killed', 'engine_lost', 'engine_restart']);
    const moved = results.filter((result) => result.spans.length === 2);
    expect(moved.map(versions)).toEqual([
      [
        [0, 19],
        [7, 381],
      ],
      [
        [0, 19],
        [7, 381],
      ],
    ]);
    expect(generator.takeCounts()).toMatchObject({ tokens: 1600, killed: 1 });
    for (const [i, request] of requests.entries()) {
      const again = await generator.generate({
        ...request,
        turn: 1,
        sampling: { ...request.sampling, max_tokens: 40 },
      });
      expect(results[i]?.ids.subarray(0, 40)).toEqual(again.ids);
    }
  });

  test('a paused engine and one without requests are not stalled', async () => {
    const { generator } = open(() => ({ latency_ms: { step: 2 } }));
    const [engine] = await generator.startEngines([0, 1]);
    invariant(engine, 'it started');
    const result = generator.generate(turn(100));
    await expect.poll(() => generator.takeCounts().tokens).toBeGreaterThan(0);
    const { frames } = await engine.peer.request('pause', { epoch: 1, mode: 'keep', clear_cache: true });
    generator.paused(engine, frames);
    await sleep(1.6 * STALL_MS);
    expect(generator.engines).toHaveLength(2);
    generator.resumed(engine);
    await engine.peer.request('resume', { epoch: 1 });
    expect((await result).ids).toHaveLength(100);
  });

  test('steps that bring no token are progress, as in a long prefill; without them the engine has stalled', async () => {
    const opened = open(() => ({}));
    const { generator, events } = opened;
    process.once('SIGUSR1', () => {}); // sent with the question for its stacks
    const { link, peer } = await linked(opened, 0);
    void generator.generate(turn(10));
    let steps = 0;
    const prefill = setInterval(() => {
      link.stats = { steps: ++steps };
    }, 20);
    await sleep(1.6 * STALL_MS);
    expect(peer.isLost).toBe(false);
    clearInterval(prefill);
    expect((await peer.lost).message).toContain('made no step');
    expect(events[0]).toContain('engine_killed');
    await link.close();
  });

  test('routes come with a turn that one engine sampled; a turn that moved has none, and an event says so', async () => {
    const opened = open(() => ({}));
    const { generator, events, name } = opened;
    const engines = [await linked(opened, 0), await linked(opened, 1)] as const;
    const blob = { sha256: 'ab', dtype: 'u8', shape: [3 + 5 - 1, 2, 2] };

    const whole = generator.generate(turn(5, { wantRoutes: true }));
    await sampled(engines[0], 5, blob);
    expect((await whole).routes).toEqual(blob);
    const plain = generator.generate(turn(5));
    await sampled(engines[0], 5, null);
    expect((await plain).routes).toBe(null);
    expect(events).toEqual([]);

    const moved = turn(5, { wantRoutes: true });
    const result = generator.generate(moved);
    await sampled(engines[0], 2);
    await expect.poll(() => generator.tokens).toBe(12);
    engines[0].peer.declareLost('gone');
    await sampled(engines[1], 3, null);
    expect((await result).routes).toBe(null);
    expect(events.at(-1)).toBe(`routes_missing ${moved.rolloutId} 0 engine-${name}-1`);
    // What comes after a move could not be used, so it is not asked for.
    expect([...engines[0].asked, ...engines[1].asked].map((asked) => asked.want_routes)).toEqual([
      true,
      false,
      true,
      false,
    ]);

    generator.close();
    for (const { link } of engines) await link.close();
  });

  test('an engine whose totals are not what came is killed by the refit, and the turn is whole nevertheless', async () => {
    let refit: Refit | null = null;
    const { generator, events, name } = open(
      (id) => ({
        latency_ms: { step: 2 },
        failures: [{ worker: `engine-${id}-0`, what: 'miscount', on: 'pause', nth: 2 }],
      }),
      { refit: () => refit as Refit },
    );
    const ranks = await startRanks(cell, simulated, { name, model, worldSize: 1 });
    const trainer = new Trainer({
      start: () => ranks,
      launcher: cell.launcher,
      loss: { clipLowHigh: [0.2, 0.2], isLevel: 'off', isMode: 'mask', isThreshold: [0.5, 5] },
      temperature: 1,
      packed: false,
    });
    refit = new Refit({
      generator,
      trainer,
      runDir: join(cell.dir, name),
      verifyEvery: 10,
      tolerance: 1e-4,
      cache: 'clear',
      deadlineMs: 60_000,
    });
    refit.probes = [Int32Array.of(1, 2, 3)];
    await generator.startEngine(0);
    const result = generator.generate(turn(1000));
    await expect.poll(() => generator.takeCounts().tokens).toBeGreaterThan(0);
    await refit.push();
    expect(events).toEqual([]);
    generator.takeCounts();
    await expect.poll(() => generator.takeCounts().tokens).toBeGreaterThan(0); // of version 1
    await refit.push();
    expect(events[0]).toMatch(/^engine_killed .* Tokens of .* are lost: handle 1 sampled \d+, came: \d+$/);
    const whole = await result;
    expect([whole.ids.length, whole.spans.map((span) => span.version)]).toEqual([1000, [0, 1, 2]]);
    trainer.close();
  });

  test('turns of a session stay with its engine until it has 8 more than another; evaluations are not counted', async () => {
    const { generator } = open(() => ({ latency_ms: { step: 2 } }));
    await generator.startEngines([0, 1]);
    const first = await generator.generate(turn(5, { sessionId: 's' }));
    const more = Array.from({ length: 10 }, () => turn(60, { sessionId: 's' }));
    const engines = (await Promise.all(more.map((request) => generator.generate(request)))).map(({ engine }) => engine);
    expect(engines.slice(0, 9)).toEqual(Array(9).fill(first.engine));
    expect(engines[9]).not.toBe(first.engine);
    expect(generator.takeCounts()).toMatchObject({ tokens: 605, promptTokens: 33 });
    await generator.generate(turn(7, { rolloutId: 'eval3sampled-1-0' }));
    expect(generator.takeCounts()).toMatchObject({ tokens: 0, promptTokens: 0 });
  });

  test('where the cache is too small fewer requests are sent: preemptions end and no throughput is lost', async () => {
    // Some thousand tokens of a real request take as long as eight steps to compute again.
    const script = { cache_tokens: 1000, latency_ms: { step: 4, recompute: 32 } };
    const run = async (adapts: boolean) => {
      const { generator } = open(() => script, { maxRequests: 32 });
      const engine = await generator.startEngine(0);
      if (!adapts) Object.assign(engine.limit, { learn: () => 0 });
      const preempted = () => engine.peer.stats.preemptions ?? 0;
      let stopped = false;
      let tokens = 0;
      const chains = Array.from({ length: 32 }, async () => {
        while (!stopped) {
          const { ids } = await generator.generate(turn(60));
          tokens += ids.length;
        }
      });
      await sleep(1000); // it learns
      const [before, from] = [preempted(), performance.now()];
      tokens = 0;
      await sleep(3000);
      const out = { preemptions: preempted() - before, perSecond: (tokens * 1000) / (performance.now() - from) };
      stopped = true;
      const counts = generator.takeCounts();
      generator.close();
      await Promise.all(chains);
      return { ...out, counts };
    };
    const [fixed, adaptive] = await Promise.all([run(false), run(true)]);
    expect(adaptive.preemptions).toBeLessThan(fixed.preemptions / 4);
    expect(adaptive.perSecond).toBeGreaterThanOrEqual(fixed.perSecond);
    expect(adaptive.counts.preemptions).toBeGreaterThan(0);
    expect(adaptive.counts.limitMean).toBeLessThan(32);
  });
}, 60_000);
