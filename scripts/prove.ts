/**
 * The heavy evidence, one line of result each:   npm run prove [NAME] [-- ARGUMENTS]
 *
 *   seeds [FROM TO]   the quickstart with --train.seed FROM..TO (1..10): held-out reward before and after
 *   readme            the longer commands of README.md, as written
 *   ranks             the quickstart with two trainer ranks: it learns as well, the first step is the same
 *
 * Each proof ends with `prove NAME: ...` and the program exits non-zero when one fails. Too slow for `npm test`.
 */
import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { readBlocks, runBlock, workingCopy } from './readme_blocks.ts';

const HELD_OUT_BEFORE = 0.5; // at most, sampled
const HELD_OUT_AFTER = 0.9; // at least, sampled
const MISMATCH_MAX = 1e-4;
const SAME_STEP = 1e-5; // relative, between one rank and two

interface Line {
  readonly [metric: string]: number | null | undefined;
}
interface Outcome {
  readonly steps: readonly Line[];
  readonly evals: readonly Line[];
  readonly seconds: number; // of the steps, evaluations between them included
}

const PROOFS: Readonly<Record<string, (args: readonly string[]) => Promise<boolean>>> = { seeds, ranks, readme };

async function seeds(args: readonly string[]): Promise<boolean> {
  const [from = 1, to = 10] = args.map(Number);
  const finals: number[] = [];
  let good = 0;
  console.log(
    '| seed | held-out before | greedy before | held-out after | greedy after | mismatch max | RL s |\n|---|---|---|---|---|---|---|',
  );
  for (let seed = from; seed <= to; seed++) {
    const { steps, evals, seconds } = await quickstart(['--train.seed', String(seed)]);
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
  const one = await quickstart(['--train.num_steps', '1', '--eval.dataset', 'none']);
  const two = await quickstart(['--trainer.num_ranks', '2']);
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

/** Run the quickstart to its end and read what it reported. Throws with its output when it fails. */
async function quickstart(args: readonly string[]): Promise<Outcome> {
  const dir = mkdtempSync(join(tmpdir(), 'molt-prove-'));
  try {
    const runDir = join(dir, 'run');
    const child = spawn(process.execPath, [
      '--import',
      'tsx',
      'molt/loop.ts',
      'scripts/quickstart.ts',
      '--run.dir',
      runDir,
      ...args,
    ]);
    let out = '';
    for (const stream of [child.stdout, child.stderr]) stream.on('data', (data: Buffer) => (out += data.toString()));
    const code = await new Promise<number | null>((resolve) => child.on('exit', resolve));
    if (code !== 0) throw new Error(`The quickstart exited with ${code}:\n${out}`);
    const lines = readFileSync(join(runDir, 'metrics.jsonl'), 'utf8')
      .trim()
      .split('\n')
      .map((line) => JSON.parse(line) as Line);
    const steps = lines.filter((line) => line.eval_reward_mean === undefined);
    const seconds = steps.reduce((sum, line) => sum + (line.time_step_s ?? 0), 0);
    return { steps, evals: lines.filter((line) => line.eval_reward_mean !== undefined), seconds };
  } finally {
    rmSync(dir, { recursive: true, force: true });
  }
}

const [name, ...args] = process.argv.slice(2);
const chosen = name === undefined ? Object.keys(PROOFS) : [name];
let failed = 0;
for (const proof of chosen) {
  const run = PROOFS[proof];
  if (!run) {
    console.error(`No proof is called "${proof}": there are ${Object.keys(PROOFS).join(', ')}`);
    process.exit(2);
  }
  if (!(await run(args))) failed++;
}
process.exit(failed > 0 ? 1 : 0);
