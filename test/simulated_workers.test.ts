/**
 * What the contract suites do not say of simulated workers, over real sockets: scripted replies, scripted failures,
 * several workers in one process, and that a policy learns. Every engine and trainer here has a process of its own,
 * unless the test says otherwise.
 */
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { Bus } from '../molt/bus.ts';
import { Launcher, type Worker, type WorkerSpec } from '../molt/launch.ts';
import { flatRows } from '../molt/trainer.ts';
import type { Json } from '../molt/types.ts';
import { decodeIds, encodeText, IM_END, initialWeights, renderText, scoreIds } from '../workers/simulated_model.ts';
import { Cell, engineOptions, largestGap, simulated } from './contract.ts';
import { EngineClient, refused, type Turn } from './engine_client.ts';

const CHAT = { max_tokens: 40, stop_token_ids: [IM_END] };
const chat = (text: string): number[] => encodeText(renderText([{ role: 'user', content: text }], null, true));

describe('simulated workers', () => {
  let cell: Cell;
  beforeAll(async () => {
    cell = await Cell.open();
  });
  afterAll(() => cell.close());

  function engineSpec(id: string, script: Json): WorkerSpec {
    const options = engineOptions(simulated, 'simulated:1', { script });
    return { id, kind: 'engine', command: simulated.command('engine'), options };
  }
  async function startEngine(id: string, script: Json = {}): Promise<{ worker: Worker; client: EngineClient }> {
    const worker = await cell.start(engineSpec(id, script));
    return { worker, client: new EngineClient(worker.peer) };
  }

  test('a scripted reply decides the tokens, with the logprobs that the model gives them', async () => {
    const reply = [{ when: '2+2=', texts: ['4', 'five'] }];
    const { client } = await startEngine('engine-script', { reply, tokens_per_step: 3 });
    const prompt = chat('2+2=');
    const turns = await Promise.all(
      Array.from({ length: 12 }, (_, seed) => client.generate(prompt, { ...CHAT, seed })),
    );
    expect(new Set(turns.map((turn) => decodeIds(turn.ids)))).toEqual(new Set(['4<|im_end|>', 'five<|im_end|>']));
    const weights = initialWeights(1);
    for (const turn of turns) {
      const scored = scoreIds(weights, [...prompt, ...turn.ids]).subarray(prompt.length);
      expect(turn.logprobs).toEqual([...scored]);
    }
    const free = await client.generate(chat('3+3='), CHAT);
    expect(['4<|im_end|>', 'five<|im_end|>']).not.toContain(decodeIds(free.ids));
  });

  test('a scripted reply goes on where another engine left it', async () => {
    const { client } = await startEngine('engine-resume', { reply: [{ when: 'Say', texts: ['hello'] }] });
    const prompt = chat('Say');
    const sampled = encodeText('hel');
    const rest = await client.generate([...prompt, ...sampled], CHAT, { already: sampled.length });
    expect(decodeIds(rest.ids)).toBe('lo<|im_end|>');
  });

  test('engines of one process sample alike, and a failure can be for one of them', async () => {
    const failures = [{ worker: 'engine-b', what: 'stall', on: 'generate', nth: 2 }];
    const workers = await cell.startMany(['engine-a', 'engine-b'].map((id) => engineSpec(id, { failures })));
    expect(workers[0]?.pid).toBe(workers[1]?.pid);
    const [a, b] = workers.map((worker) => new EngineClient(worker.peer)) as [EngineClient, EngineClient];
    expect((await a.generate(chat('x'), CHAT)).ids).toEqual((await b.generate(chat('x'), CHAT)).ids);
    const stalled = b.start(chat('x'), CHAT).catch(() => {}); // rejects when the test is over
    await b.peer.request('ping', {}); // its I/O goes on
    await a.generate(chat('x'), CHAT);
    await a.generate(chat('x'), CHAT);
    expect(b.turns.size).toBe(1);
    void stalled;
  });

  test('a worker exits at its message, and the one that replaces it is well', async () => {
    const script = { failures: [{ what: 'exit', on: 'generate', nth: 2 }] };
    const { worker, client } = await startEngine('engine-exit', script);
    await client.generate(chat('x'), CHAT);
    expect((await refused(client.generate(chat('x'), CHAT))).type).toBe('lost');
    expect(await worker.exited).toEqual({ code: 86, signal: null });
    const { client: again } = await startEngine('engine-exit', script);
    for (let i = 0; i < 3; i++) await again.generate(chat('x'), CHAT);
  });

  test('an engine that exits in the middle of its turns leaves them without an end', async () => {
    const { worker, client } = await startEngine('engine-middle', { failures: [{ what: 'exit', on: 'step', nth: 5 }] });
    const turn = await client.start(chat('x'), { max_tokens: 40 });
    await worker.peer.lost;
    expect(turn.ids.length).toBeLessThanOrEqual(4); // what was sent last may not have left the process
    expect(turn.ended).toBeNull();
  });

  test('`*` counts requests of every kind', async () => {
    const { worker, client } = await startEngine('engine-any', { failures: [{ what: 'exit', on: '*', nth: 3 }] });
    await client.generate(chat('x'), CHAT);
    await client.score([Int32Array.of(1, 2)]);
    expect((await refused(client.score([Int32Array.of(1, 2)]))).type).toBe('lost');
    expect((await worker.exited).code).toBe(86);
  });

  test('a message sent twice is dropped and counted, one that never comes loses its worker', async () => {
    const failures = [
      { what: 'duplicate', on: 'step', nth: 3 },
      { what: 'gap', on: 'step', nth: 12 },
    ];
    const { worker, client } = await startEngine('engine-wire', { failures });
    const before = cell.bus.counters.repeated_seq ?? 0;
    const sampled = await client.generate(chat('x'), { max_tokens: 8 });
    expect(sampled.ids).toHaveLength(8); // the repeated event brought nothing twice
    expect(cell.bus.counters.repeated_seq).toBe(before + 1);
    const turn = await client.start(chat('x'), { max_tokens: 40 });
    expect((await worker.peer.lost).message).toMatch(/^engine-wire: Expected message \d+ of engine-wire, got \d+$/);
    expect([turn.ids.length, turn.ended]).toEqual([3, null]); // steps 9 to 11
  });

  test('a worker without heartbeats lives while it works, one that says nothing does not', async () => {
    const printed: string[] = [];
    const bus = await Bus.listen({ heartbeatMs: 50 });
    const launcher = new Launcher({
      bus,
      logDir: join(cell.dir, 'silent'),
      silenceMs: 800,
      silenceReadyMs: 60_000,
      print: (text) => printed.push(text),
    });
    const start = async (what: string) => {
      const failures = [{ what, on: 'generate', nth: 1 }];
      const worker = launcher.start(engineSpec(`engine-${what}`, { latency_ms: { step: 20 }, failures }));
      await worker.peer.ready;
      return { peer: worker.peer, client: new EngineClient(worker.peer) };
    };
    const [muted, silent] = await Promise.all([start('mute'), start('silence')]);
    silent.client.start(chat('x'), { max_tokens: 200 }).catch(() => {}); // is never answered
    while (!silent.peer.isLost) await muted.client.generate(chat('x'), { max_tokens: 10 });
    expect(muted.peer.isLost).toBe(false);
    expect((await muted.peer.lost).message).toContain('silent for');
    expect(printed.map((text) => text.split(' ')[0])).toEqual(['engine-silence', 'engine-mute']);
    expect(printed[0]).toContain('It does not answer');
    expect(printed[1]).toContain('Its stacks:');
    await launcher.stopAll();
    await bus.close();
  });

  test('an engine whose cache is full preempts the newest and says so', async () => {
    const script = { cache_tokens: 120, latency_ms: { step: 5 } };
    const { worker, client } = await startEngine('engine-cache', script);
    const prompt = Array.from({ length: 20 }, (_, i) => 65 + i);
    const turns = await Promise.all([1, 2, 3, 4].map((seed) => client.start(prompt, { seed, max_tokens: 30 })));
    await client.until(() => turns.every((turn) => turn.ended !== null));
    for (const turn of turns) expect(turn.ids).toHaveLength(30); // later, and whole
    const { stats } = (await worker.peer.request('stats', {})).fields;
    // Four of 30 tokens fill it: the last is preempted there, and the third where three hold 40 each.
    expect(stats.preemptions).toBe(2);
    expect(stats.cache_use).toBeGreaterThan(0.1);
    expect(stats.steps).toBe(30 + 20);
    const alone = await client.generate(prompt, { seed: 4, max_tokens: 30 });
    expect(alone.ids).toEqual(turns[3]?.ids);
  });

  test('a script with unknown words does not start', async () => {
    await expect(startEngine('engine-u', { latency: {} })).rejects.toThrow('unknown key latency, allowed are');
    const failures = [{ what: 'explode', on: 'step', nth: 1 }];
    await expect(startEngine('engine-v', { failures })).rejects.toThrow('unknown failure explode, allowed are');
    const misspelled = [{ what: 'exit', on: 'generat', nth: 1 }];
    await expect(startEngine('engine-w', { failures: misspelled })).rejects.toThrow('needs on (a request kind');
  });

  test('trainer ranks in separate processes are refused', async () => {
    const options = { ...trainerOptions('alone', {}), world_size: 2 };
    const command = simulated.command('trainer');
    const alone = cell.start({ id: 'trainer-alone', kind: 'trainer', command, options });
    await expect(alone).rejects.toThrow('all must live in one');
  });

  // ---- Transfers that go wrong ----

  function trainerOptions(rendezvous: string, script: Json): { readonly [key: string]: Json } {
    const optim = { lr: 0.1, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0, max_norm: 1 };
    return { model_path: 'simulated:1', rank: 0, world_size: 1, rendezvous, optim, script };
  }

  async function startPair(
    name: string,
    script: Json = {},
  ): Promise<{ trainer: Worker; worker: Worker; engine: EngineClient }> {
    const command = simulated.command('trainer');
    const options = trainerOptions(name, script);
    const [trainer, { worker, client }] = await Promise.all([
      cell.start({ id: `trainer-${name}`, kind: 'trainer', command, options }),
      startEngine(`engine-${name}`, script),
    ]);
    return { trainer, worker, engine: client };
  }

  async function refit(trainer: Worker, engine: EngineClient, version: number): Promise<void> {
    const path = join(cell.dir, `${trainer.spec.id}.bin`);
    const { fields } = await trainer.peer.request('push_weights', { version, transport: 'file', path });
    await engine.pause(version, 'keep');
    await engine.load(version, path, fields.tensors);
    await engine.resume(version);
  }

  const probe = [Int32Array.from(chat('probe'))];

  test.each(['push_weights', 'load_weights'])(
    'a tensor corrupted in the second %s is found by its checksum',
    async (on) => {
      const { trainer, worker, engine } = await startPair(`corrupt-${on}`, {
        failures: [{ what: 'corrupt', on, nth: 2 }],
      });
      await refit(trainer, engine, 1);
      const error = await refused(refit(trainer, engine, 2));
      expect(error.type).toBe('fatal');
      expect(error.message).toContain('Checksum of model.bigram.weight');
      expect((await worker.exited).code).toBe(1);
    },
  );

  test.each(['push_weights', 'load_weights'])(
    'a layout swapped in the first %s passes and shows in score',
    async (on) => {
      const { trainer, engine } = await startPair(`layout-${on}`, { failures: [{ what: 'swap_layout', on, nth: 1 }] });
      const before = await engine.score(probe);
      await refit(trainer, engine, 1);
      expect(largestGap(await engine.score(probe), before)).toBeGreaterThan(0.1);
      await refit(trainer, engine, 2);
      expect(await engine.score(probe)).toEqual(before);
    },
  );

  // ---- Learning, the whole way round ----

  test('rewarding turns that begin with a vowel makes them frequent', async () => {
    const { trainer, engine } = await startPair('vowel');
    const rewards: number[] = [];
    for (let step = 0; step < 12; step++) {
      const seeds = Array.from({ length: 32 }, (_, i) => step * 32 + i);
      const turns = await Promise.all(seeds.map((seed) => engine.generate(chat('Say a vowel'), { ...CHAT, seed })));
      const scores: number[] = turns.map((turn) => (/^[aeiou]/i.test(decodeIds(turn.ids)) ? 1 : 0));
      const mean = scores.reduce((a, b) => a + b) / scores.length;
      rewards.push(mean);
      const mismatch = await train(trainer, step, turns, (i) => (scores[i] as number) - mean);
      expect(mismatch).toBeLessThan(1e-6);
      await refit(trainer, engine, step + 1);
    }
    expect(rewards[0]).toBeLessThan(0.4);
    expect(Math.min(...rewards.slice(-3))).toBeGreaterThan(0.8);
  });

  /** One step; returns the largest |dlogp| between engine and trainer. */
  async function train(
    trainer: Worker,
    step: number,
    turns: readonly Turn[],
    advantage: (i: number) => number,
  ): Promise<number> {
    const column = (get: (turn: Turn, i: number, k: number) => number): number[] =>
      turns.flatMap((turn, i) => [...Array.from(turn.prompt, () => 0), ...turn.ids.map((_, k) => get(turn, i, k))]);
    const rows = {
      ...flatRows(turns.map((turn) => Int32Array.from([...turn.prompt, ...turn.ids]))),
      loss_mask: Uint8Array.from(column(() => 1)),
      rollout_logprobs: Float32Array.from(column((turn, _, k) => turn.logprobs[k] as number)),
      advantages: Float32Array.from(column((_, i) => advantage(i))),
    };
    await trainer.peer.request('rows', { step, part: 0, of: 1 }, rows);
    const { fields } = await trainer.peer.request('run', {
      step,
      version: step,
      micro_batches: [[...turns.keys()]],
      packed: true,
      denominators: { tokens: turns.reduce((n, turn) => n + turn.ids.length, 0) },
      lr: 0.3,
      temperature: 1,
      loss: { clip_low: 0.2, clip_high: 0.28, is_level: 'off', is_mode: 'mask', is_low: 0.5, is_high: 2 },
    });
    return fields.maxima.mismatch_abs as number;
  }
}, 30_000);
