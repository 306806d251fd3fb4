/**
 * Parity of what engines sample, over real processes: it passes on sound engines at any temperature, and tells one that
 * serves another model, one whose tokens are drawn from another distribution than it reports, and one that cannot sample.
 */
import { spawn } from 'node:child_process';
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { Options } from '../molt/config.ts';
import { Generator } from '../molt/generator.ts';
import { checkParity } from '../molt/health.ts';
import { type SampledParity, sampledParity, samplingProblem } from '../molt/parity.ts';
import { Refit } from '../molt/refit.ts';
import { Trainer } from '../molt/trainer.ts';
import type { Json } from '../molt/types.ts';
import { initialWeights, packWeights } from '../workers/simulated_model.ts';
import { Cell, engineOptions, hasVllm, type Kind, simulated, startRanks, torch, vllm } from './contract.ts';

const PROBES = [Int32Array.from({ length: 40 }, (_, k) => (k * 37 + 5) % 250), Int32Array.from([1, 2, 3])];
const BOUND = 1e-3; // of float32

async function open(
  cell: Cell,
  kind: Kind,
  models: { readonly engine: string; readonly trainer: string },
  name: string,
  more: { readonly numEngines?: number; readonly script?: Json } = {},
) {
  const ranks = await startRanks(cell, kind, { name, model: models.trainer, worldSize: 1 });
  const trainer = new Trainer({
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
      options: engineOptions(kind, models.engine, more.script === undefined ? {} : { script: more.script }),
    }),
    maxRequests: 64,
    maxRestarts: 2,
    hooks: { join: async () => {}, event: () => {} },
  });
  const refit = new Refit({
    generator,
    trainer,
    runDir: join(cell.dir, name),
    verifyEvery: 10,
    tolerance: 1e-4,
    cache: 'clear',
    deadlineMs: 60_000,
  });
  refit.probes = PROBES;
  await Promise.all(Array.from({ length: more.numEngines ?? 1 }, (_, i) => generator.startEngine(i)));
  const sampled = (temperature = 1, maxLen = 256) =>
    sampledParity({ generator, trainer, probes: PROBES, temperature, maxLen });
  const close = async () => {
    generator.close();
    trainer.close();
    await Promise.all(generator.engines.map((engine) => cell.launcher.kill(engine.worker)));
    await Promise.all(ranks.map((rank) => cell.launcher.kill(rank)));
  };
  return { generator, trainer, refit, sampled, close };
}

describe.each([simulated, torch])('with $name workers', (kind: Kind) => {
  let cell: Cell;
  let models: [string, string];
  beforeAll(async () => {
    cell = await Cell.open();
    models = await kind.makeModels(cell.dir);
  }, kind.startMs);
  afterAll(() => cell?.close());

  test(
    'sound engines pass at every temperature, and nothing is counted',
    async () => {
      const same = { engine: models[0], trainer: models[0] };
      const { generator, sampled, close } = await open(cell, kind, same, 'same', { numEngines: 2 });
      for (const temperature of [1, 0.2, 4]) {
        const found = await sampled(temperature);
        expect(found.map(({ engine, tokens }) => [engine, tokens]).sort()).toEqual([
          ['engine-same0', 64],
          ['engine-same1', 64],
        ]);
        for (const each of found) {
          expect(each.mean).toBeLessThanOrEqual(1e-5);
          expect(samplingProblem(each, BOUND, true)).toBeNull();
        }
      }
      // Room for one token of prompt and one of answer.
      expect((await sampled(1, 2)).map(({ tokens, failure }) => [tokens, failure])).toEqual([
        [4, null],
        [4, null],
      ]);
      const { tokens, promptTokens, cachedTokens } = generator.takeCounts();
      expect([tokens, promptTokens, cachedTokens, generator.waiting]).toEqual([0, 0, 0, 0]);
      await close();
    },
    kind.startMs,
  );

  test(
    'an engine with another model is told, by name, values and bound',
    async () => {
      const { generator, trainer, refit, close } = await open(
        cell,
        kind,
        { engine: models[1], trainer: models[0] },
        'other',
      );
      const options = { 'rollout.temperature': 1, 'engine.max_len': 256, 'engine.kind': 'torch' } as Options;
      const { problems } = await checkParity({ generator, trainer, refit, dtype: 'float32' }, options);
      expect(problems).toHaveLength(2);
      expect(problems[0]).toMatch(
        /^Engine and trainer do not agree on the model: mean \|dlogp\| [\d.]+, at most 0\.001/,
      );
      expect(problems[1]).toMatch(
        /^engine-other0 reports other logprobs of the 64 tokens it sampled than the trainer: mean \|dlogp\| [\d.]+, max [\d.]+, at most 0\.001/,
      );
      await close();
    },
    kind.startMs,
  );
});

describe('an engine that samples wrongly', () => {
  let cell: Cell;
  let model: string;
  beforeAll(async () => {
    cell = await Cell.open();
    [model] = await simulated.makeModels(cell.dir);
  });
  afterAll(() => cell?.close());
  const only = (found: readonly SampledParity[]) => found[0] as SampledParity;

  test('draws from another distribution than it reports: the second test tells, the first cannot', async () => {
    // Scripted replies have the logprobs of the model, which did not choose them.
    const script = { reply: [{ when: '', texts: ['xqzjvkwbpfghyumdlcrs', 'zzqqxxjjkkvvwwyyuuii'] }] };
    const { sampled, close } = await open(cell, simulated, { engine: model, trainer: model }, 'odd', { script });
    const odd = only(await sampled(0.2));
    expect(odd.mean).toBeLessThanOrEqual(1e-5);
    expect(samplingProblem(odd, BOUND, false)).toBeNull();
    expect(samplingProblem(odd, BOUND, true)).toMatch(
      /^engine-odd0 does not sample from the distribution whose logprobs it reports: .* 64 tokens are exp\([\d.]+\) times as likely, at most exp\(14\.5\)/,
    );
    await close();
  });

  test('cannot sample: why is said', async () => {
    const broken = join(cell.dir, 'nan');
    mkdirSync(broken);
    writeFileSync(join(broken, 'model.safetensors'), packWeights(initialWeights(1).fill(Number.NaN)));
    const { sampled, close } = await open(cell, simulated, { engine: broken, trainer: model }, 'nan');
    expect(samplingProblem(only(await sampled()), BOUND, true)).toBe(
      'engine-nan0 could not sample from the probes: the logits are not finite',
    );
    await close();
  });

  test('a NaN or a ratio that is none is over every bound', () => {
    const fine = { engine: 'engine-0', tokens: 64, mean: 1e-6, max: 1e-5, logRatio: -3, failure: null };
    expect(samplingProblem(fine, BOUND, true)).toBeNull();
    expect(samplingProblem({ ...fine, mean: Number.NaN }, BOUND, false)).toMatch(/mean \|dlogp\| NaN/);
    expect(samplingProblem({ ...fine, logRatio: Number.NaN }, BOUND, true)).toMatch(/exp\(NaN\)/);
    expect(samplingProblem({ ...fine, logRatio: 14.4 }, BOUND, true)).toBeNull();
    expect(samplingProblem({ ...fine, logRatio: 14.6 }, BOUND, true)).not.toBeNull();
  });

  test('dies meanwhile: its successor is judged in its place', async () => {
    const script = { latency_ms: { step: 20 } };
    const { generator, sampled, close } = await open(cell, simulated, { engine: model, trainer: model }, 'dies', {
      script,
      numEngines: 2,
    });
    const [first] = generator.engines;
    const found = sampled();
    await sleep(100); // some of 16 steps
    process.kill(first?.worker.pid ?? 0, 'SIGKILL');
    for (const each of await found) expect(samplingProblem(each, BOUND, true)).toBeNull();
    expect((await found).length).toBeGreaterThan(0);
    await expect.poll(() => generator.engines.length).toBe(2); // and the queue goes on
    expect((await sampled()).map(({ tokens }) => tokens)).toEqual([64, 64]);
    await close();
  });
});

// Of `npm run prove vllm`: it takes more than half a minute.
describe.runIf(hasVllm && process.env.MOLT_VLLM === 'all')('vllm on a CPU', () => {
  test(
    'with speculation, which it does wrongly above temperature 0: a run that was let through is stopped at its start',
    async () => {
      const dir = mkdtempSync(join(tmpdir(), 'molt-parity-'));
      try {
        const [model, draft] = await vllm.makeModels(dir);
        const recipe = join(dir, 'recipe.ts');
        writeFileSync(
          recipe,
          'export const agent = () => ({ reset: () => "x", step: () => ({ reward: 1, done: true }) });\n' +
            'export const prompts = () => [{ input: "a" }];\n' +
            `export default { options: { 'eval.dataset': 'none', 'data.max_len': 256, 'rollout.max_new_tokens': 16 } };\n`,
        );
        const words = ['--engine.kind', 'vllm', '--engine.device', 'cpu', '--actor.model_name_or_path', model];
        const speculation = ['--engine.speculation', 'draft', '--engine.draft_model', draft];
        const argv = [recipe, ...words, ...speculation, '--run.dir', join(dir, 'run')];
        const child = spawn(process.execPath, ['--import', 'tsx', 'molt/loop.ts', ...argv], {
          env: { ...process.env, MOLT_UNCHECKED: 'speculation' },
        });
        let out = '';
        for (const stream of [child.stdout, child.stderr])
          stream.on('data', (data: Buffer) => {
            out += data.toString();
          });
        const exit = await new Promise<number | null>((done) => child.on('close', done));
        expect(exit, out).toBe(1);
        expect(out).toMatch(/^The run stopped: .*engine-0 .*\(--rollout\.mismatch_stop off goes on\)$/m);
        expect(out).not.toMatch(/^step +1\//m);
      } finally {
        rmSync(dir, { recursive: true, force: true });
      }
    },
    vllm.startMs,
  );
});
