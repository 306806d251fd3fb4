/**
 * What the controller bears:   npx tsx scripts/bench_controller.ts [--part turns|memory] [--steps 10000] [--seconds 15]
 *
 *   runner process (4,096 rollouts) --turn--> controller (bus, dispatch, generator) --generate--> 64 engines in 2 processes
 *
 * tokens_per_s: tokens sampled while 4,096 rollouts are at it. A rollout is two turns of 128 to 384 tokens;
 *   when it ends another begins. The controller is this process, as in a run: Bus, Launcher, Dispatch, Generator. Engines are
 *   simulated, one token per request and step; a step takes 16 ms and what it computes, which offers 256K tokens/s: more than
 *   two cores bear, so this is the ceiling.
 * tokens_per_cpu_s: the same per second of CPU that controller, runner and engines used together: what is left of the number
 *   above where others use the machine, too.
 * turn_p99_ms: what controller and wire add to a turn, the 99th percentile, at steps of 40 ms (100K tokens/s offered; at the
 *   ceiling it would be the length of a queue): from the runner's request to its answer, less the time from the engine's taking
 *   the request to its sending of the last token (`report_ms`). So everything counts that is not the engine's: both
 *   directions of both sockets, queues and event loops on the way, also those of runner and engines. Of turns asked for
 *   after the warm-up.
 * rss_slope_mb_per_1k: growth of the controller's resident memory per 1,000 steps, by least squares over the last half of a
 *   run of molt/loop.ts (a process of its own) on simulated workers, 8 rollouts a step.
 *
 * Measured on two cores that others used, too: 181K tokens/s with 1.8 of them. The controller took 0.7 of one, of which a
 * quarter is ZeroMQ taking frames (five a message, 64 tokens in one), a fifth putting tokens to their requests, a tenth
 * collecting garbage, a tenth messages (decode, check, encode), a fifteenth finding a runner for a rollout; the rest is small.
 * So no one thing limits it: engines, runner and controller share the cores.
 *
 * `--profile` prints where this process spent the seconds of the first part. The last line is one JSON object with what was
 * measured. Needs Linux (/proc); keeps nothing. This file is also the runner, and the recipe of the second part.
 */
import { spawn } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, realpathSync, rmSync } from 'node:fs';
import { type Profiler, Session } from 'node:inspector/promises';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';
import type { Env, Result } from '../molt/agent.ts';
import { Bus, readWorkerArgs, WorkerLink } from '../molt/bus.ts';
import { defineRecipe } from '../molt/config.ts';
import { Dispatch } from '../molt/dispatch.ts';
import { Generator } from '../molt/generator.ts';
import { Launcher, nodeCommand } from '../molt/launch.ts';
import type { Fields } from '../molt/protocol.ts';
import { invariant } from '../molt/types.ts';

const FILE = fileURLToPath(import.meta.url);
const ROLLOUTS = 4096;
const ENGINES = 64;
const ENGINE_PROCESSES = 2;
const TURNS = 2;
const TURN_TOKENS = [128, 384] as const; // of the shortest and the longest turn, so that turns do not end all at once
const PROMPT_TOKENS = 64; // of the first turn, and what is said between two
const STEP_MS = { ceiling: 16, latency: 40 };
const WARM_UP_S = 8;
const TICKS_PER_S = 100; // of /proc/PID/stat

// ---- Turns: the controller ----

interface Turns {
  readonly tokens_per_s: number;
  readonly tokens_per_cpu_s: number;
  readonly turn_p99_ms: number;
}

async function measureTurns(args: { seconds: number; stepMs: number; profile: boolean }): Promise<Turns> {
  const name = `${ROLLOUTS} rollouts, ${ENGINES} engines, steps of ${args.stepMs} ms`;
  const dir = mkdtempSync(join(tmpdir(), 'molt-bench-'));
  const bus = await Bus.listen();
  const launcher = new Launcher({ bus, logDir: join(dir, 'logs'), silenceMs: 60_000, silenceReadyMs: 60_000 });
  const event = (name: string, detail: object) => console.log(name, detail);
  const each = ENGINES / ENGINE_PROCESSES;
  const maxLen = TURNS * (PROMPT_TOKENS + TURN_TOKENS[1]);
  const script = { latency_ms: { step: args.stepMs }, report_ms: true };
  const generator = new Generator({
    launcher,
    spec: (index) => ({
      id: `engine-${index}`,
      kind: 'engine',
      command: nodeCommand('workers/simulated.ts'),
      options: { model_path: 'simulated', max_requests: ROLLOUTS / ENGINES, max_len: maxLen, script },
    }),
    maxRequests: ROLLOUTS / ENGINES,
    maxRestarts: 0,
    hooks: { join: async () => {}, event },
  });
  const dispatch = new Dispatch({
    launcher,
    spec: (index) => ({ id: `runner-${index}`, kind: 'runner', command: nodeCommand(FILE), options: {} }),
    generator,
    tokenizer: { request: () => Promise.reject(new Error('Rollouts of this program ask no tokenizer')) },
    maxRestarts: 0,
    hooks: { version: () => 0, recorded: async () => {}, event },
  });
  const processes = Array.from({ length: ENGINE_PROCESSES }, (_, p) =>
    Array.from({ length: each }, (_, i) => p * each + i),
  );
  await Promise.all([dispatch.startRunner(0), ...processes.map((indexes) => generator.startEngines(indexes))]);

  const added: number[] = []; // ms, by turn
  let countedFrom = Number.POSITIVE_INFINITY; // of the wall clock
  let running = true;
  let started = 0;
  const chains = Array.from({ length: ROLLOUTS }, async () => {
    while (running) {
      const { reason, detail, info } = await dispatch.run(jobOf(started++));
      invariant(reason === 'done', `a rollout ended ${reason}: ${detail}`);
      for (let turn = 0; turn < TURNS; turn++)
        if ((info[`asked_${turn}`] ?? 0) >= countedFrom) added.push(info[`added_${turn}`] ?? Number.NaN);
    }
  });
  await Promise.race([sleep(WARM_UP_S * 1000), generator.failed, dispatch.failed]);
  const profiler = args.profile ? await startProfile() : null;
  generator.takeCounts();
  countedFrom = Date.now();
  const cpu = childrenCpu();
  const own = process.cpuUsage();
  const begun = performance.now();
  await Promise.race([sleep(args.seconds * 1000), generator.failed, dispatch.failed]);
  const seconds = (performance.now() - begun) / 1000;
  const { tokens } = generator.takeCounts();
  const { user, system } = process.cpuUsage(own);
  const children = [...childrenCpu()].map(([worker, used]) => [worker, used - (cpu.get(worker) ?? 0)] as const);
  const allCpu = children.reduce((sum, [, used]) => sum + used, (user + system) / 1e6);
  const share = (cpuSeconds: number) => `${((100 * cpuSeconds) / seconds).toFixed(0)} %`;
  const others = children.map(([worker, used]) => `${worker} ${share(used)}`);
  const sorted = Float64Array.from(added).sort();
  const quantile = (q: number) => sorted[Math.floor(q * (sorted.length - 1))] ?? Number.NaN;
  console.log(
    `${name}: ${Math.round(tokens / seconds)} tokens/s, ` +
      `${Math.round(sorted.length / seconds)} turns/s, added to a turn: median ${quantile(0.5).toFixed(1)} ms, ` +
      `p99 ${quantile(0.99).toFixed(1)} ms, most ${quantile(1).toFixed(1)} ms; ` +
      `cores: controller ${share((user + system) / 1e6)}, ${others.join(', ')}`,
  );
  if (profiler) for (const line of await profiler()) console.log(line);
  running = false;
  generator.close();
  dispatch.close();
  await launcher.stopAll(0);
  await bus.close();
  void chains; // they wait for a process that is gone
  rmSync(dir, { recursive: true, force: true });
  return {
    tokens_per_cpu_s: Math.round(tokens / allCpu),
    tokens_per_s: Math.round(tokens / seconds),
    turn_p99_ms: Number(quantile(0.99).toFixed(2)),
  };
}

function jobOf(n: number): Parameters<Dispatch['run']>[0] {
  return {
    rolloutId: `g${n}-0`,
    groupId: `g${n}`,
    index: 0,
    prompt: { source: 'bench', epoch: 0, index: n, input: 'x', label: null, tools: null },
    seed: n,
    sampling: { temperature: 1, top_p: 1, top_k: 0, max_tokens: TURN_TOKENS[1], seed: n, stop: [], stop_token_ids: [] },
    limits: { maxTurns: TURNS, maxTokens: 1_000_000, deadlineMs: 600_000 },
  };
}

/** Seconds of CPU of the worker processes so far, by the first worker of each. */
function childrenCpu(): Map<string, number> {
  const found = new Map<string, number>();
  for (const pid of readdirSync('/proc').filter((name) => /^\d+$/.test(name))) {
    try {
      const fields = readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ')[1]?.split(' ') ?? [];
      const command = readFileSync(`/proc/${pid}/cmdline`, 'utf8').split('\0');
      if (Number(fields[1]) !== process.pid || !command.includes('--worker-id')) continue;
      const ticks = Number(fields[11]) + Number(fields[12]);
      found.set(command[command.indexOf('--worker-id') + 1] ?? pid, ticks / TICKS_PER_S);
    } catch {
      // it ended while we looked
    }
  }
  return found;
}

/** Samples this process; the returned function gives lines: share of the time by function, the largest first. */
async function startProfile(): Promise<() => Promise<string[]>> {
  const session = new Session();
  session.connect();
  await session.post('Profiler.enable');
  await session.post('Profiler.start');
  return async () => {
    const { profile } = await session.post('Profiler.stop');
    session.disconnect();
    return summary(profile);
  };
}

function summary({ nodes, samples = [], timeDeltas = [] }: Profiler.Profile): string[] {
  const self = new Map<number, number>();
  for (const [i, id] of samples.entries()) self.set(id, (self.get(id) ?? 0) + (timeDeltas[i] ?? 0));
  const names = new Map<string, number>();
  let total = 0;
  for (const { id, callFrame } of nodes) {
    const time = self.get(id) ?? 0;
    const name = `${callFrame.functionName || 'anonymous'} ${basename(callFrame.url)}:${callFrame.lineNumber + 1}`;
    names.set(name, (names.get(name) ?? 0) + time);
    total += time;
  }
  const largest = [...names].sort((a, b) => b[1] - a[1]).slice(0, 30);
  return largest.map(([name, time]) => `${((100 * time) / total).toFixed(1).padStart(6)} %  ${name}`);
}

// ---- Turns: the runner ----

/** Plays rollouts: no agent, no tokenizer, so that the cores are the controller's and the engines'. */
async function runner(): Promise<void> {
  const { endpoint, workerIds, secrets } = await readWorkerArgs();
  const workerId = workerIds[0] ?? '';
  const secret = secrets[workerId] ?? '';
  const link = await WorkerLink.connect({ endpoint, workerId, secret, workerKind: 'runner', capabilities: {} });
  link.handle('start', async (job) => {
    void play(link, job); // an error is a bug and ends the process
    return { fields: {}, frames: {} };
  });
  link.ready({});
  await link.stopped;
  await link.close();
  process.exit(0);
}

async function play(link: WorkerLink, job: Fields<'start'>): Promise<void> {
  const { rollout_id, attempt, seed, sampling } = job;
  const info: Record<string, number> = {};
  const most = TURNS * (PROMPT_TOKENS + TURN_TOKENS[1]);
  const [ids, lossMask, logprobs] = [new Int32Array(most).fill(65), new Uint8Array(most), new Float32Array(most)];
  ids[PROMPT_TOKENS - 1] = seed % 256;
  let length = 0;
  for (let turn = 0; turn < TURNS; turn++) {
    length += PROMPT_TOKENS;
    const max_tokens = TURN_TOKENS[0] + ((seed * 7919 + turn * 104729) % (TURN_TOKENS[1] - TURN_TOKENS[0] + 1));
    const fields = { rollout_id, attempt, turn, session_id: rollout_id, sampling: { ...sampling, max_tokens } };
    const asked = performance.now();
    const answer = await link.request('turn', fields, { prompt: ids.slice(0, length) });
    info[`asked_${turn}`] = performance.timeOrigin + asked;
    info[`added_${turn}`] = performance.now() - asked - Number(answer.fields.detail);
    const sampled = answer.frames;
    invariant(sampled.ids.length === max_tokens, `${sampled.ids.length} tokens in a turn of ${max_tokens}`);
    ids.set(sampled.ids, length);
    logprobs.set(sampled.logprobs, length);
    lossMask.fill(1, length, length + max_tokens);
    length += max_tokens;
  }
  const columns = {
    lengths: Int32Array.of(length),
    ids: ids.subarray(0, length),
    loss_mask: lossMask.subarray(0, length),
    logprobs: logprobs.subarray(0, length),
    versions: new Int32Array(length),
    turns_of: new Int32Array(length),
  };
  const outcome = { detail: null, reward: 1, score: null, truncated: false, info, turns: TURNS, spans: [[]] };
  await link.request('rollout_done', { rollout_id, attempt, reason: 'done', ...outcome }, columns);
}

// ---- Memory ----

/** Each rollout is one turn; the reward is as good as a coin. */
export class agent implements Env {
  reset() {
    return 'Say something.';
  }
  step({ ids }: { ids: readonly number[] | Int32Array }): Result {
    return { reward: (ids[0] ?? 0) % 2, done: true };
  }
}
export const prompts = () => Array.from({ length: 100 }, (_, i) => ({ input: `Prompt ${i}`, label: i }));
export default defineRecipe({
  options: {
    'engine.kind': 'simulated',
    'trainer.kind': 'simulated',
    'tokenizer.kind': 'simulated',
    'train.batch_size': 2,
    'rollout.n_samples_per_prompt': 4,
    'rollout.max_new_tokens': 8,
    'data.max_len': 128,
    'actor.adam.lr': 1e-4,
    'refit.verify_every': 100,
    'ckpt.disable_final_save': true,
    'eval.dataset': 'none',
  },
});

/** Runs the loop and looks at its memory after every SAMPLE_STEPS steps. */
async function measureMemory(steps: number): Promise<{ rss_slope_mb_per_1k: number; ms_per_step: number }> {
  const dir = mkdtempSync(join(tmpdir(), 'molt-bench-'));
  process.once('exit', () => rmSync(dir, { recursive: true, force: true }));
  const [program = '', ...args] = nodeCommand('molt/loop.ts');
  const words = [FILE, '--run.dir', join(dir, 'run'), '--train.num_steps', String(steps)];
  const child = spawn(program, [...args, ...words], { stdio: ['ignore', 'pipe', 'inherit'] });
  process.once('exit', () => child.kill('SIGTERM'));
  const exited = new Promise<number | null>((done) => child.once('exit', done));
  const every = Math.max(1, Math.round(steps / 500));
  const points: [step: number, mb: number][] = [];
  let begun = 0;
  for await (const line of createInterface(child.stdout)) {
    const step = Number(/^step +(\d+)\//.exec(line)?.[1] ?? Number.NaN);
    if (Number.isNaN(step)) continue;
    if (step === 1) begun = performance.now();
    if (step % every === 0 && step < steps) points.push([step, residentMb(child.pid ?? 0)]);
    if (step % Math.ceil(steps / 10) === 0)
      console.log(
        `step ${step}: ${points.at(-1)?.[1].toFixed(1)} MB, ${((performance.now() - begun) / step).toFixed(1)} ms a step`,
      );
  }
  const code = await exited;
  if (code !== 0) throw new Error(`The loop exited with ${code}`);
  const half = points.filter(([step]) => step > steps / 2);
  const slope = 1000 * leastSquares(half);
  return {
    rss_slope_mb_per_1k: Number(slope.toFixed(3)),
    ms_per_step: Number(((performance.now() - begun) / steps).toFixed(2)),
  };
}

function residentMb(pid: number): number {
  const kb = /^VmRSS:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, 'utf8'))?.[1];
  return Number(kb) / 1024;
}

/** Slope of the line through the points. */
function leastSquares(points: readonly (readonly [number, number])[]): number {
  const mean = (values: readonly number[]) => values.reduce((a, b) => a + b, 0) / values.length;
  const [x0, y0] = [mean(points.map(([x]) => x)), mean(points.map(([, y]) => y))];
  const covariance = points.reduce((sum, [x, y]) => sum + (x - x0) * (y - y0), 0);
  return covariance / points.reduce((sum, [x]) => sum + (x - x0) ** 2, 0);
}

// ---- Entry ----

async function bench(): Promise<void> {
  const { values } = parseArgs({
    options: {
      part: { type: 'string', default: 'all' },
      steps: { type: 'string', default: '10000' },
      seconds: { type: 'string', default: '15' },
      profile: { type: 'boolean', default: false },
    },
  });
  const { part, profile } = values;
  invariant(['all', 'turns', 'memory'].includes(part), `--part ${part}: must be turns or memory`);
  const turns = async () => {
    const seconds = Number(values.seconds);
    const { tokens_per_s, tokens_per_cpu_s } = await measureTurns({ seconds, stepMs: STEP_MS.ceiling, profile });
    const { turn_p99_ms } = await measureTurns({ seconds: 2 * seconds, stepMs: STEP_MS.latency, profile: false });
    return { tokens_per_s, tokens_per_cpu_s, turn_p99_ms };
  };
  const result = {
    ...(part !== 'memory' && (await turns())),
    ...(part !== 'turns' && (await measureMemory(Number(values.steps)))),
  };
  console.log(JSON.stringify(result));
}

if (process.argv[1] && realpathSync(process.argv[1]) === FILE) {
  const main = process.argv.includes('--endpoint') ? runner : bench;
  // Not awaited here: the loop imports this very module as a recipe.
  main().then(
    () => process.exit(0),
    (error: unknown) => {
      console.error(error);
      process.exit(1);
    },
  );
}
