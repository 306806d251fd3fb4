/**
 * What the loop costs beside sampling and training:   npx tsx scripts/bench_loop.ts [async]
 *
 *   real step  --record-->  the same turns to a second engine, the same batch to a second trainer  -->  next real step
 *
 * sync_efficiency = (pure generation + pure training) / step, the median over steps, for the quickstart and (`_large`) for a
 * random 4-layer, 256-wide model with steps of several seconds.
 *   - Step: loop.ts itself, in this process, from the end of one refit to the end of the next.
 *   - Pure generation: what the engine was asked in that step (prompts, seeds, lengths, the order of turns within a rollout),
 *     sent again to an engine with the same weights, each turn at once after the one before it: no tokenizer, runner or
 *     environment. Pure training: the batch of that step to a trainer that is where the first one was. Both through the clients
 *     and the wire that the loop uses.
 *   - The two twins are processes of their own, started as the loop started the first ones and asleep during real steps, as the
 *     first ones are during replays. Real and pure alternate step by step, so a busy machine slows both.
 * engine_vs_generate_N = tokens per second of the torch engine / of transformers `generate` at N requests
 * (bench_engine_generate.py: the engine itself, without the socket).
 *
 * async_efficiency = longer of generation and training / step, at max_staleness 1; async_vs_sync = step at max_staleness 1 /
 * step at 0. Both with two simulated engines and a simulated trainer that sleep ASYNC.latencyMs for the work of a step, as
 * if on machines of their own: every turn is scripted, so the work of a step is always the same. Generation and training are what
 * the script says and not what a timer makes of it, so the efficiency is rather too low. Steps are counted by the wall clock,
 * from one line of metrics.jsonl to another. The argument `async` measures these two alone (half a minute, no Python). Null
 * where this version refuses max_staleness 1.
 *
 * Prints what it measured; the last line is one JSON object. Takes about three minutes on two free cores, needs the policy of
 * `npm run quickstart`, keeps nothing. Seconds of CPU are read from /proc and absent elsewhere. This file is also the recipe
 * of the large model: `agent` and `prompts` below.
 */
import { spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, realpathSync, rmSync } from 'node:fs';
import { cpus, loadavg, tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { Env, Result, Turn } from '../molt/agent.ts';
import { Bus } from '../molt/bus.ts';
import { ConfigError, defineRecipe, loadConfig, type Options } from '../molt/config.ts';
import { Generator, type TurnRequest, type TurnResult } from '../molt/generator.ts';
import { Launcher, pythonCommand, type Worker, type WorkerSpec } from '../molt/launch.ts';
import { main as runLoop } from '../molt/loop.ts';
import { Refit } from '../molt/refit.ts';
import { type StepResult, type TensorTable, Trainer } from '../molt/trainer.ts';
import { invariant } from '../molt/types.ts';
import quickstart from './quickstart.ts';

const FILE = fileURLToPath(import.meta.url);
const GENERATE = fileURLToPath(new URL('bench_engine_generate.py', import.meta.url));
const TICKS_PER_S = 100; // of /proc/PID/stat
const STEPS = { quickstart: 40, large: 4 };
const WARM_UP = { quickstart: 19, large: 1 }; // steps that do not count
const ASYNC = { latencyMs: 800, steps: 14, warmUp: 4 };
const LARGE_TURNS = 2;
const LARGE_TOKENS = 24; // of a turn

// ---- The recipe of the large model ----

/** Every rollout takes LARGE_TURNS turns; the reward is as good as a coin. */
export class agent implements Env {
  reset() {
    return 'Say something.';
  }
  step({ turn, ids }: Turn): Result {
    const done = turn + 1 === LARGE_TURNS;
    return { reward: done ? (ids[0] ?? 0) % 2 : 0, done, observation: 'Go on.' };
  }
}
export const prompts = () => Array.from({ length: 100 }, (_, i) => ({ input: `Prompt ${i}`, label: i }));
export default defineRecipe({
  options: {
    'train.batch_size': 16,
    'rollout.n_samples_per_prompt': 8,
    'rollout.max_turns': LARGE_TURNS,
    'rollout.max_new_tokens': LARGE_TOKENS,
    'data.max_len': 256,
    'actor.adam.lr': 1e-5,
  },
});

// ---- Taps: what the loop does, as it does it ----

interface Recorded {
  readonly turns: { readonly request: TurnRequest; readonly result: TurnResult }[];
  readonly batch: Parameters<Trainer['step']>[0] | null;
  readonly trained: StepResult | null;
}
interface Segment {
  readonly path: string;
  readonly tensors: TensorTable;
}

/** Tells `onStep` after each refit what the step did, and holds the loop until it is done. Returns how to take the taps out. */
function tapLoop(
  onStart: (worker: Worker) => void,
  onStep: (recorded: Recorded, segments: ReadonlyMap<number, Segment>) => Promise<void>,
): () => void {
  const { start } = Launcher.prototype;
  const { generate } = Generator.prototype;
  const { step, pushWeights } = Trainer.prototype;
  const { push } = Refit.prototype;
  const segments = new Map<number, Segment>(); // by version
  let recorded: Recorded = { turns: [], batch: null, trained: null };
  let replaying = false; // the twins pass through the same classes
  Launcher.prototype.start = function (spec) {
    const worker = start.call(this, spec);
    if (!replaying) onStart(worker);
    return worker;
  };
  Generator.prototype.generate = async function (request) {
    const result = await generate.call(this, request);
    if (!replaying) recorded.turns.push({ request, result });
    return result;
  };
  Trainer.prototype.step = async function (args) {
    const result = await step.call(this, args);
    if (!replaying) recorded = { ...recorded, batch: args, trained: result };
    return result;
  };
  Trainer.prototype.pushWeights = async function (version, path) {
    const pushed = await pushWeights.call(this, version, path);
    segments.set(version, { path, tensors: pushed.tensors });
    return pushed;
  };
  Refit.prototype.push = async function (...args) {
    const times = await push.apply(this, args);
    replaying = true;
    await onStep(recorded, segments);
    replaying = false;
    recorded = { turns: [], batch: null, trained: null };
    return times;
  };
  return () => {
    Object.assign(Launcher.prototype, { start });
    Object.assign(Generator.prototype, { generate });
    Object.assign(Trainer.prototype, { step, pushWeights });
    Object.assign(Refit.prototype, { push });
  };
}

// ---- Twins ----

/** An engine and a trainer like the loop's, for replays. */
interface Twins {
  readonly launcher: Launcher;
  readonly bus: Bus;
  readonly generator: Generator;
  readonly engine: Worker;
  readonly trainer: Trainer;
}

async function startTwins(specs: readonly WorkerSpec[], options: Options, dir: string): Promise<Twins> {
  const bus = await Bus.listen();
  const launcher = new Launcher({ bus, logDir: join(dir, 'logs'), silenceMs: 60_000, silenceReadyMs: 600_000 });
  const find = (kind: WorkerSpec['kind']) => {
    const spec = specs.find((each) => each.kind === kind);
    invariant(spec, `the loop started no ${kind}`);
    return spec;
  };
  const engine = launcher.start(find('engine'));
  const rank = find('trainer');
  const rendezvous = `file://${join(dir, 'rendezvous')}`;
  const generator = new Generator({
    launcher,
    spec: () => find('engine'),
    maxRequests: options['engine.max_requests'],
    maxRestarts: 0,
    hooks: { join: async () => {}, event: (name, detail) => console.error(name, detail) },
  });
  const trainer = new Trainer({
    start: () => [launcher.start({ ...rank, options: { ...(rank.options as object), rendezvous } })],
    launcher,
    loss: {
      clipLowHigh: options['actor.eps_clip_low_high'],
      isLevel: options['algo.advantage.is_correction_level'],
      isMode: options['algo.advantage.is_correction_mode'],
      isThreshold: options['algo.advantage.is_correction_threshold'],
    },
    temperature: options['rollout.temperature'],
    packed: options['fsdp.packing_samples'],
  });
  await Promise.all([generator.adopt(engine, 0), trainer.ready()]);
  return { launcher, bus, generator, engine, trainer };
}

async function stopTwins({ launcher, bus, generator, trainer }: Twins): Promise<void> {
  generator.close();
  trainer.close();
  await launcher.stopAll();
  await bus.close();
}

/** Seconds that the recorded turns take when each is asked at once after the one before it in its rollout. */
async function replayTurns(twins: Twins, recorded: Recorded): Promise<{ seconds: number; tokens: number }> {
  const chains = new Map<string, Recorded['turns']>(); // by rollout
  for (const turn of recorded.turns) {
    const { rolloutId } = turn.request;
    chains.set(rolloutId, [...(chains.get(rolloutId) ?? []), turn]);
  }
  const begun = performance.now();
  const tokens = await Promise.all(
    [...chains.values()].map(async (chain) => {
      let same = 0;
      for (const { request, result } of chain.sort((a, b) => a.request.turn - b.request.turn)) {
        const sampling = { ...request.sampling, max_tokens: result.ids.length, stop_token_ids: [] };
        const again = await twins.generator.generate({ ...request, sampling });
        invariant(again.ids.length === result.ids.length, `${again.ids.length} tokens, ${result.ids.length} before`);
        same += again.ids.filter((id, k) => id === result.ids[k]).length;
      }
      return same;
    }),
  );
  return { seconds: (performance.now() - begun) / 1000, tokens: tokens.reduce((a, b) => a + b, 0) };
}

async function loadVersion({ engine }: Twins, version: number, segment: Segment): Promise<void> {
  const { peer } = engine;
  await peer.request('pause', { epoch: version, mode: 'keep', clear_cache: true });
  const source = { transport: 'file', path: segment.path };
  await peer.request('load_weights', { version, source, tensors: segment.tensors, last: true });
  await peer.request('resume', { epoch: version });
}

// ---- One loop, measured ----

interface Step {
  readonly seconds: number;
  readonly generation: number; // pure
  readonly training: number; // pure
  readonly tokens: number; // sampled
  readonly turns: number;
  readonly cpu: Readonly<Record<string, number>> | null; // seconds by kind of process
  readonly idleCpu: number | null; // CPU seconds of all workers per second without work
}

/** Runs loop.ts with these arguments; every step is recorded and replayed. */
async function measureLoop(name: string, argv: readonly string[], dir: string): Promise<Step[]> {
  const { options } = await loadConfig(argv);
  const workers: Worker[] = [];
  const steps: Step[] = [];
  let twins: Twins | null = null;
  let same = 0;
  let begun = 0;
  let cpuBegun = cpuSeconds([]);
  const untap = tapLoop(
    (worker) => workers.push(worker),
    async (recorded, segments) => {
      const seconds = (performance.now() - begun) / 1000;
      const cpu = cpuSeconds(workers);
      const { batch, trained } = recorded;
      invariant(batch && trained, 'a step trains a batch');
      const { version } = batch;
      const segment = segments.get(version);
      twins ??= await startTwins(
        workers.map((worker) => worker.spec),
        options,
        join(dir, 'twins'),
      );
      if (segment) await loadVersion(twins, version, segment);
      const idleFrom = performance.now();
      const idleCpu = cpuSeconds(workers);
      const generation = await replayTurns(twins, recorded);
      const trainingFrom = performance.now();
      const again = await twins.trainer.step(batch);
      const ended = performance.now();
      invariant(again.sums.loss === trained.sums.loss, `loss ${again.sums.loss}, ${trained.sums.loss} before`);
      const tokens = recorded.turns.reduce((n, { result }) => n + result.ids.length, 0);
      same += generation.tokens / tokens;
      steps.push({
        seconds,
        generation: generation.seconds,
        training: (ended - trainingFrom) / 1000,
        tokens,
        turns: recorded.turns.length,
        cpu: cpu && cpuBegun && difference(cpu, cpuBegun),
        idleCpu: idleShare(cpuSeconds(workers), idleCpu, (ended - idleFrom) / 1000),
      });
      cpuBegun = cpuSeconds(workers);
      begun = performance.now();
    },
  );
  try {
    const code = await runLoop(argv);
    if (code !== 0) throw new Error(`The loop of ${name} exited with ${code}`);
  } finally {
    untap();
    if (twins) await stopTwins(twins);
  }
  console.log(`${name}: replays sampled ${((100 * same) / steps.length).toFixed(2)} % of the tokens again`);
  return steps;
}

/** User and system time by kind of process; null where there is no /proc. */
function cpuSeconds(workers: readonly Worker[]): Record<string, number> | null {
  if (!existsSync('/proc/self/stat')) return null;
  const own = process.cpuUsage();
  const out: Record<string, number> = { controller: (own.user + own.system) / 1e6 };
  for (const { spec, pid } of workers) {
    const fields = readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ')[1]?.split(' ') ?? [];
    out[spec.kind] = (out[spec.kind] ?? 0) + (Number(fields[11]) + Number(fields[12])) / TICKS_PER_S;
  }
  return out;
}

function difference(to: Record<string, number>, from: Record<string, number>): Record<string, number> {
  return Object.fromEntries(Object.entries(to).map(([kind, value]) => [kind, value - (from[kind] ?? 0)]));
}

/** The controller is left out: it drives the replay. */
function idleShare(to: Record<string, number> | null, from: Record<string, number> | null, seconds: number) {
  if (!to || !from) return null;
  const used = { ...difference(to, from), controller: 0 };
  return Object.values(used).reduce((a, b) => a + b, 0) / seconds;
}

/** Medians over the steps that count. */
function summary(steps: readonly Step[], suffix: string): Record<string, number> {
  const of = (value: (step: Step) => number) => round(median(steps.map(value)));
  const kinds = Object.keys(steps[0]?.cpu ?? {});
  return {
    [`sync_efficiency${suffix}`]: of((step) => (step.generation + step.training) / step.seconds),
    [`step_s${suffix}`]: of((step) => step.seconds),
    [`pure_generation_s${suffix}`]: of((step) => step.generation),
    [`pure_training_s${suffix}`]: of((step) => step.training),
    [`tokens_per_s${suffix}`]: of((step) => step.tokens / step.seconds),
    [`turns${suffix}`]: of((step) => step.turns),
    ...Object.fromEntries(kinds.map((kind) => [`cpu_${kind}_s${suffix}`, of((step) => step.cpu?.[kind] ?? 0)])),
    ...(kinds.length > 0 && { [`idle_workers_cpu${suffix}`]: of((step) => step.idleCpu ?? 0) }),
  };
}

// ---- The asynchronous loop ----

interface SimulatedStep {
  readonly step: number; // seconds
  readonly generation: number;
  readonly training: number;
}

/** A step of a run on simulated workers; null where the options are refused. */
async function simulatedStep(name: string, words: readonly string[], dir: string): Promise<SimulatedStep | null> {
  const texts = ['abc', 'bcd']; // four tokens with the end; one is rewarded
  const tokens = LARGE_TURNS * ((texts[0] ?? '').length + 1);
  const script = {
    latency_ms: { step: ASYNC.latencyMs / tokens, run: ASYNC.latencyMs },
    reply: [{ when: '', texts }],
  };
  const kinds = ['engine', 'trainer', 'tokenizer'].flatMap((kind) => [`--${kind}.kind`, 'simulated']);
  const runDir = join(dir, name);
  const argv = [FILE, ...kinds, '--simulated.script', JSON.stringify(script), '--engine.num_engines', '2'];
  argv.push('--train.batch_size', '4', '--rollout.n_samples_per_prompt', '4', '--refit.verify_every', '1000');
  argv.push('--run.dir', runDir, '--train.num_steps', String(ASYNC.steps), '--eval.dataset', 'none');
  argv.push('--ckpt.disable_final_save', 'true', ...words);
  try {
    await loadConfig(argv);
  } catch (error) {
    if (!(error instanceof ConfigError)) throw error;
    console.log(`${name} is refused by this version: ${error.lines.join('; ')}`);
    return null;
  }
  const code = await runLoop(argv);
  if (code !== 0) throw new Error(`The loop of ${name} exited with ${code}`);
  const lines = readFileSync(join(runDir, 'metrics.jsonl'), 'utf8').trim().split('\n');
  const steps = lines.map((line) => JSON.parse(line) as Record<string, number>).slice(ASYNC.warmUp);
  const median = (name: string) =>
    steps.map((step) => step[name] ?? Number.NaN).sort((a, b) => a - b)[steps.length >> 1];
  const [first = Number.NaN, last = Number.NaN] = [steps[0]?.time_unix_s, steps.at(-1)?.time_unix_s];
  return {
    step: (last - first) / (steps.length - 1),
    generation: median('time_generation_s') ?? Number.NaN,
    training: median('time_train_s') ?? Number.NaN,
  };
}

async function measureAsync(dir: string): Promise<Record<string, number | null>> {
  const sync = await simulatedStep('simulated-sync', [], dir);
  const late = ['--train.max_staleness', '1', '--train.partial_rollout_enable', 'true'];
  late.push('--algo.advantage.is_correction_level', 'token');
  const async = await simulatedStep('simulated-async', late, dir);
  invariant(sync, 'the synchronous loop is always there');
  // In the synchronous run nothing else goes on while it samples, nor while it trains.
  const longer = Math.max(sync.generation, sync.training);
  return {
    simulated_step_s: round(sync.step),
    simulated_generation_s: round(sync.generation),
    simulated_training_s: round(sync.training),
    async_step_s: async && round(async.step),
    async_efficiency: async && round(longer / async.step),
    async_vs_sync: async && round(async.step / sync.step),
  };
}

// ---- The engine against generate ----

async function againstGenerate(model: string, concurrencies: readonly number[]): Promise<Record<string, number>> {
  const text = await python([model, ...concurrencies.map(String)]);
  const results = JSON.parse(text.trim().split('\n').at(-1) ?? '') as Record<string, { ratio: number }>;
  for (const [n, numbers] of Object.entries(results)) console.log(`${model} at ${n}: ${JSON.stringify(numbers)}`);
  return Object.fromEntries(Object.entries(results).map(([n, { ratio }]) => [n, round(ratio)]));
}

/** Runs bench_engine_generate.py; resolves with what it printed. */
function python(args: readonly string[]): Promise<string> {
  const [program = '', ...rest] = pythonCommand(GENERATE);
  const env = { ...process.env, OMP_NUM_THREADS: '1', HF_HUB_OFFLINE: '1' };
  const child = spawn(program, [...rest, ...args], { env, stdio: ['ignore', 'pipe', 'inherit'] });
  process.once('exit', () => child.kill('SIGKILL'));
  let out = '';
  child.stdout.on('data', (data: Buffer) => {
    out += data.toString();
  });
  return new Promise((resolve, reject) => {
    child.on('error', reject);
    child.on('close', (code) => {
      if (code === 0) resolve(out);
      else reject(new Error(`${GENERATE} ${args.join(' ')} exited with ${code}`));
    });
  });
}

// ---- Small things ----

function median(values: readonly number[]): number {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2
    ? (sorted[middle] as number)
    : ((sorted[middle - 1] as number) + (sorted[middle] as number)) / 2;
}

function round(value: number): number {
  return Number(value.toPrecision(4));
}

async function bench(): Promise<void> {
  const dir = mkdtempSync(join(tmpdir(), 'molt-bench-'));
  process.once('exit', () => rmSync(dir, { recursive: true, force: true }));
  const simulated = await measureAsync(dir);
  for (const [key, value] of Object.entries(simulated)) console.log(`${key.padEnd(32)} ${value}`);
  if (process.argv[2] === 'async') return console.log(JSON.stringify(simulated));
  const policy = String(quickstart.options?.['actor.model_name_or_path']);
  if (!existsSync(policy)) throw new Error(`There is no ${policy}: run npm run quickstart first`);
  const large = join(dir, 'large-model');
  await python(['--make', large, '--like', policy]);
  const loop = (name: 'quickstart' | 'large', recipe: string, ...more: string[]) => {
    const run = ['--run.dir', join(dir, name), '--train.num_steps', String(STEPS[name]), '--eval.dataset', 'none'];
    return measureLoop(name, [recipe, ...run, '--ckpt.disable_final_save', 'true', ...more], join(dir, name));
  };
  const small = await loop('quickstart', fileURLToPath(new URL('quickstart.ts', import.meta.url)));
  const big = await loop('large', FILE, '--actor.model_name_or_path', large);
  const loops = {
    ...summary(small.slice(WARM_UP.quickstart), ''),
    ...summary(big.slice(WARM_UP.large), '_large'),
  };
  for (const [key, value] of Object.entries(loops)) console.log(`${key.padEnd(32)} ${value}`);
  const generate = await againstGenerate(large, [1, 16, 64]);
  const tiny = await againstGenerate(policy, [64]);
  const result = {
    ...loops,
    ...simulated,
    ...Object.fromEntries(Object.entries(generate).map(([n, ratio]) => [`engine_vs_generate_${n}`, ratio])),
    engine_vs_generate_tiny_64: tiny[64] ?? 0,
    cores: cpus().length,
    load_1_min: round(loadavg()[0] ?? 0),
  };
  console.log(JSON.stringify(result));
}

if (process.argv[1] && realpathSync(process.argv[1]) === FILE) {
  // Not awaited here: the loop imports this very module as a recipe, and would wait for its end.
  bench().then(
    () => process.exit(0),
    (error: unknown) => {
      console.error(error);
      process.exit(1);
    },
  );
}
