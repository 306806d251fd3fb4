/** What hangs is found: by whom it is seen, what is printed, how the run goes on. Real runs on simulated workers. */
import { type ChildProcess, spawn } from 'node:child_process';
import { closeSync, mkdtempSync, openSync, readdirSync, readFileSync, rmSync, writeSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { Health } from '../molt/health.ts';
import { nodeCommand } from '../molt/launch.ts';
import { readLedger } from '../molt/ledger.ts';
import { Tokenizer } from '../molt/tokenizer.ts';
import { Cell } from './contract.ts';

const RECIPE = 'test/fixtures/recipe_simulated.ts';
const LIMIT_MS = 60_000;
const NONE = ['--eval.dataset', 'none'];

let dir: string;
beforeAll(() => {
  dir = mkdtempSync(join(tmpdir(), 'molt-supervision-'));
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

interface Ran {
  readonly exit: number | string;
  readonly out: string;
}

function start(
  command: readonly string[],
  onOutput: (out: string, child: ChildProcess) => void = () => {},
): Promise<Ran> {
  const child = spawn(process.execPath, ['--import', 'tsx', ...command]);
  let out = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (data: Buffer) => {
      out += data.toString();
      onOutput(out, child);
    });
  }
  return new Promise((resolve) => child.on('close', (code, signal) => resolve({ exit: code ?? signal ?? '', out })));
}

const run = (name: string, args: readonly string[], onOutput?: (out: string, child: ChildProcess) => void) =>
  start(['molt/loop.ts', RECIPE, '--run.dir', join(dir, name), ...args], onOutput);
const script = (value: unknown) => ['--simulated.script', JSON.stringify(value)];
const metrics = (name: string) =>
  readFileSync(join(dir, name, 'metrics.jsonl'), 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as Record<string, number | null>);

test(
  'launch.stall_s: a run in which nothing happens says who waits on whom, with the stacks of all processes, and goes on',
  async () => {
    const slow = script({ failures: [{ worker: 'trainer-0', what: 'slow', on: 'run', nth: 2, ms: 4000 }] });
    const { exit, out } = await run('stall', [...NONE, ...slow, '--train.num_steps', '2', '--launch.stall_s', '1']);
    expect(exit, out).toBe(0);
    expect(out).toMatch(/Nothing has happened for [12] s\. The loop waits for the trainer, with step 2\./);
    expect(out).toMatch(/\d+ turns wait for an engine/);
    for (const worker of ['trainer-0', 'engine-0', 'tokenizer-0', 'runner-0'])
      expect(out).toContain(`${worker}: Its stacks`);
    expect(out.match(/Nothing has happened for .*with step 2/g)?.length).toBe(1); // once a stall
  },
  LIMIT_MS,
);

test(
  'trainer.deadline_s: a rank that does not answer is killed, with its stacks, and the group starts again',
  async () => {
    const hangs = script({ failures: [{ worker: 'trainer-0', what: 'stall', on: 'run', nth: 3 }] });
    const { exit, out } = await run('deadline', [
      ...NONE,
      ...hangs,
      '--train.num_steps',
      '4',
      '--trainer.deadline_s',
      '2',
    ]);
    expect(exit, out).toBe(0);
    expect(out).toMatch(/trainer-0 did not answer within trainer\.deadline_s, 2 s and is killed\. Its stacks:/);
    expect(out).toContain('Trainer ranks are back at step 2');
    expect(metrics('deadline').map((line) => line.policy_version)).toEqual([1, 2, 3, 4]);
  },
  LIMIT_MS,
);

test('steps that were skipped because loss or gradient was not finite stop the run when three come running', () => {
  const health = new Health({ dtype: 'float32', stop: true, say: () => {} });
  const step = (skipped: number) => health.check({ skipped, logprob_mismatch_mean: 0, tokens_credited: 1 });
  for (const skipped of [1, 1, 0, 1, 1]) expect(step(skipped)).toBe('fine');
  expect(() => step(1)).toThrow('Loss or gradient was not finite on 3 steps running');
});

test('what is asked of a tokenizer that is being started again waits for it', async () => {
  const cell = await Cell.open();
  const script = { failures: [{ worker: 'tokenizer-0', what: 'exit', on: 'encode', nth: 2 }] };
  let later: Promise<unknown> = Promise.resolve();
  const tokenizer = new Tokenizer({
    launcher: cell.launcher,
    spec: () => ({
      id: 'tokenizer-0',
      kind: 'tokenizer',
      command: nodeCommand('workers/simulated.ts'),
      options: { model_path: 'simulated', script },
    }),
    maxRestarts: 1,
    // Once the new process is there, before it has said hello.
    event: () => setTimeout(() => (later = tokenizer.request('encode', { texts: ['later'] })), 1),
  });
  try {
    await tokenizer.ready;
    const lengths = async (text: string) => [...(await tokenizer.request('encode', { texts: [text] })).frames.lengths];
    expect(await lengths('ab')).toEqual([2]);
    expect(await lengths('abc')).toEqual([3]); // it dies of this, and answers it
    await expect(later).resolves.toMatchObject({ fields: { errors: [null] } });
    expect(tokenizer.restarts).toBe(1);
  } finally {
    tokenizer.close();
    await cell.close();
  }
});

test(
  'a damaged ledger stops a resume with its place and the last good step; nothing is changed',
  async () => {
    const first = await run('damaged', [...NONE, '--train.num_steps', '3', '--ckpt.save_steps', '2']);
    expect(first.exit, first.out).toBe(0);
    const [segment = ''] = readdirSync(join(dir, 'damaged', 'ledger'));
    const path = join(dir, 'damaged', 'ledger', segment);
    const places = [...readLedger(join(dir, 'damaged'))].map(({ place }) => place);
    const middle = places[Math.floor(places.length / 2)];
    const file = openSync(path, 'r+');
    writeSync(file, Buffer.from([255, 255]), 0, 2, (middle?.offset ?? 0) + 40);
    closeSync(file);
    const { exit, out } = await run('damaged', [...NONE, '--train.num_steps', '4', '--resume']);
    expect(exit, out).toBe(2);
    expect(out).toContain(`${path}, byte ${middle?.offset}`);
    expect(out).toMatch(/Last good checkpoint: step 3 \(.*step-3\)/);
  },
  LIMIT_MS,
);

test(
  'Ctrl-C is answered while the advantages of 1,024 rollouts of 32K tokens are computed',
  async () => {
    let isSent = false;
    const { exit, out } = await start(['test/fixtures/big_credit.ts'], (text, child) => {
      if (isSent || !text.includes('computing advantages')) return;
      isSent = true;
      setTimeout(() => child.kill('SIGINT'), 500);
    });
    expect(exit, out).toBe(130);
    const [, stretch] = /stopped by SIGINT, longest stretch (\d+) ms/.exec(out) ?? [];
    expect(Number(stretch)).toBeLessThan(1000); // far from the seconds that it takes as a whole
  },
  LIMIT_MS,
);
