/**
 * Options: one table drives types, defaults, --help, checks, the "has effect when" rule and the saved config.json.
 *
 *   default  <  recipe (`defineRecipe({ options })`)  <  command line (`--dotted.name value`)
 *
 * Invariants
 *   1. Every problem is found before any process starts, and all are reported at once, one line each.
 *   2. A name is accepted only in full: no abbreviation, no prefix, and given once (a second time is refused).
 *   3. Setting an option that has no effect in the combination is an error that says why; a default never is.
 *      The word `default` as a value takes back what the recipe set (`--algo.advantage.gamma default`).
 *   4. An option exists only if something reads it.
 * A recipe is a TypeScript module: its default export holds options and `prepare`; it may also export `agent`
 * (then `train.agent_path` is the recipe itself) and `prompts` (then so are `data.prompt_dataset` and `eval.dataset`).
 * Paths are relative to the working directory. Called by loop.ts, and by recipes for `defineRecipe`.
 * Elsewhere called flags, arguments, hyper-parameters.
 */
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { join, relative, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';
import yargs from 'yargs';
import type { Json } from './types.ts';

// ---- The shape of a row ----

/** One thing that must hold for an option to matter; a rule is a list of which any suffices. */
interface Condition {
  readonly option: string;
  readonly is?: readonly (string | number | boolean)[];
  readonly not?: readonly (string | number | boolean)[];
  readonly ends?: readonly string[]; // the value, a path, ends in one of these
}
interface Range {
  readonly min?: number;
  readonly max?: number;
  readonly above?: number; // exclusive
  readonly below?: number; // exclusive
}
interface Row {
  readonly help: string; // meaning and unit
  readonly effect?: readonly Condition[];
}
interface Plain extends Row {
  readonly type: 'string';
  readonly default: string;
}
interface Bool extends Row {
  readonly type: 'bool';
  readonly default: boolean;
}
interface Num extends Row, Range {
  readonly type: 'int' | 'float';
  readonly default: number;
}
interface Choice<C extends string = string> extends Row {
  readonly type: 'choice';
  readonly choices: readonly C[];
  readonly default: C;
}
interface Pair extends Row, Range {
  readonly type: 'pair'; // two numbers, both within the range
  readonly default: readonly [number, number];
}
type Spec = Plain | Bool | Num | Choice | Pair;

type Effect = Pick<Row, 'effect'>;
const text = (value: string, help: string, more: Effect = {}): Plain => ({
  type: 'string',
  default: value,
  help,
  ...more,
});
const bool = (value: boolean, help: string, more: Effect = {}): Bool => ({
  type: 'bool',
  default: value,
  help,
  ...more,
});
const int = (value: number, help: string, more: Effect & Range = {}): Num => ({
  type: 'int',
  default: value,
  help,
  ...more,
});
const float = (value: number, help: string, more: Effect & Range = {}): Num => ({
  type: 'float',
  default: value,
  help,
  ...more,
});
const pair = (value: readonly [number, number], help: string, more: Effect & Range = {}): Pair => ({
  type: 'pair',
  default: value,
  help,
  ...more,
});
const choice = <const C extends string>(
  choices: readonly C[],
  value: C,
  help: string,
  more: Effect = {},
): Choice<C> => ({
  type: 'choice',
  choices,
  default: value,
  help,
  ...more,
});

const REINFORCE = [{ option: 'algo.advantage.estimator', is: ['reinforce'] }] as const;
const WHITENED = [{ option: 'algo.advantage.estimator', is: ['reinforce', 'reinforce_baseline'] }] as const;
const CORRECTED = [{ option: 'algo.advantage.is_correction_level', is: ['token'] }] as const;
const DECAYING = [{ option: 'actor.lr_scheduler', is: ['linear', 'cosine'] }] as const;
const EVALUATED = [{ option: 'eval.dataset', not: [''] }] as const;
const ENGINE_TORCH = [{ option: 'engine.kind', is: ['torch'] }] as const;
const TRAINER_TORCH = [{ option: 'trainer.kind', is: ['torch'] }] as const;
const FILES = [
  { option: 'data.prompt_dataset', ends: ['.jsonl', '.json'] },
  { option: 'eval.dataset', ends: ['.jsonl', '.json'] },
] as const;
const SIMULATED = [
  { option: 'engine.kind', is: ['simulated'] },
  { option: 'trainer.kind', is: ['simulated'] },
  { option: 'tokenizer.kind', is: ['simulated'] },
] as const;
const PYTHON = [
  { option: 'engine.kind', not: ['simulated'] },
  { option: 'trainer.kind', not: ['simulated'] },
  { option: 'tokenizer.kind', not: ['simulated'] },
] as const;
const SAVED = [
  { option: 'ckpt.save_steps', not: [0] },
  { option: 'ckpt.disable_final_save', is: [false] },
] as const;

// ---- The table ----

/** Titles of the groups of --help, in the order the table has them. */
const GROUPS: Readonly<Record<string, string>> = {
  run: 'Run',
  train: 'Training',
  actor: 'Policy model and optimizer',
  algo: 'Algorithm',
  reward: 'Reward',
  rollout: 'Rollouts',
  data: 'Prompts',
  eval: 'Evaluation',
  engine: 'Engines (generation)',
  trainer: 'Trainer ranks',
  fsdp: 'FSDP',
  tokenizer: 'Tokenizer',
  refit: 'Refit (trainer weights into engines)',
  ckpt: 'Checkpoints',
  launch: 'Processes',
  simulated: 'Simulated workers (tests)',
};

export const OPTIONS = {
  'run.dir': text('', 'directory of the run; empty = a new numbered one, runs/<recipe>-NNN'),
  'run.resume': bool(false, 'continue the run in run.dir from its newest complete checkpoint (also --resume)'),

  'train.num_steps': int(100, 'optimizer steps of the whole run', { min: 1 }),
  'train.batch_size': int(16, 'prompt groups in one optimizer step', { min: 1 }),
  'train.seed': int(42, 'seeds prompt order, sampling and initial state', { min: 0, max: 2 ** 31 - 1 }),
  'train.agent_path': text('', 'module that exports `agent`; empty = the recipe'),
  'train.micro_batch_size': int(
    0,
    'samples in one forward pass of a rank; 0 = as many as train.max_tokens_per_gpu allows',
    { min: 0 },
  ),
  'train.max_tokens_per_gpu': int(
    16384,
    'tokens in one forward pass of a rank, padding included; a longer sample goes alone',
    { min: 1, effect: [{ option: 'train.micro_batch_size', is: [0] }] },
  ),
  'train.max_epochs': int(1, 'optimizer steps on each batch; more than one makes the importance ratio differ from 1', {
    min: 1,
  }),
  'train.max_staleness': int(0, 'refits between sampling and training of a token; 0 = synchronous', { min: 0 }),

  'actor.model_name_or_path': text('', 'directory of the policy in Hugging Face format'),
  'actor.adam.lr': float(1e-6, 'peak learning rate of AdamW', { above: 0 }),
  'actor.adam.betas': pair([0.9, 0.95], 'decay of the first and second moment of AdamW', { min: 0, below: 1 }),
  'actor.adam.eps': float(1e-8, 'added to the root of the second moment', { above: 0 }),
  'actor.adam.weight_decay': float(0, 'decoupled weight decay per step, times the learning rate', { min: 0 }),
  'actor.lr_scheduler': choice(
    ['constant', 'linear', 'cosine'],
    'constant',
    'learning rate after the warm-up, over the rest of train.num_steps',
  ),
  'actor.lr_warmup_ratio': float(0.03, 'share of train.num_steps that rises linearly to the peak', { min: 0, max: 1 }),
  'actor.min_lr_ratio': float(0.1, 'learning rate of the last step, as a share of the peak', {
    min: 0,
    max: 1,
    effect: DECAYING,
  }),
  'actor.max_norm': float(1, 'gradients are scaled down to this global L2 norm', { above: 0 }),
  'actor.eps_clip_low_high': pair([0.2, 0.2], 'importance ratio is clipped to [1 - low, 1 + high]', {
    min: 0,
    effect: [{ option: 'train.max_epochs', not: [1] }], // with one step on a batch the ratio is 1
  }),
  'actor.gradient_checkpoint': choice(
    ['none', 'full'],
    'none',
    'full = recompute every layer in the backward pass: less memory, about a third slower',
    { effect: TRAINER_TORCH },
  ),

  'algo.advantage.estimator': choice(
    ['grpo', 'rloo', 'reinforce_baseline', 'dr_grpo', 'reinforce'],
    'grpo',
    'rewards to advantages; formulas in estimators.ts',
  ),
  'algo.advantage.gamma': float(1, 'discount per token', { min: 0, max: 1, effect: REINFORCE }),
  'algo.advantage.no_whiten': bool(false, 'leave the advantages of the batch at their own mean and scale', {
    effect: WHITENED,
  }),
  'algo.advantage.is_correction_level': choice(
    ['off', 'token'],
    'off',
    'correct the gap between rollout and trainer logprobs by importance ratio: not, or per token',
  ),
  'algo.advantage.is_correction_mode': choice(
    ['mask', 'clip', 'trunc'],
    'mask',
    'tokens outside the threshold: dropped from the loss, ratio clipped at both ends, or only from above',
    { effect: CORRECTED },
  ),
  'algo.advantage.is_correction_threshold': pair([0.5, 5], 'lowest and highest importance ratio left as it is', {
    min: 0,
    effect: CORRECTED,
  }),

  'reward.clip_range': pair([-10, 10], 'rewards are clipped to this before any baseline'),

  'rollout.n_samples_per_prompt': int(8, 'rollouts of one prompt, the size of a group', { min: 1 }),
  'rollout.temperature': float(1, 'sampling temperature of training rollouts', { above: 0 }),
  'rollout.max_new_tokens': int(512, 'tokens the policy may sample in one turn', { min: 1 }),
  'rollout.max_turns': int(8, 'turns of the policy in one rollout', { min: 1 }),
  'rollout.deadline_s': float(600, 'seconds a rollout may take before it ends with reason deadline', {
    above: 0,
    max: 2_000_000,
  }),
  'rollout.num_runners': int(1, 'processes that host the agents', { min: 1, max: 256 }),
  'rollout.max_failure_rate': float(
    0.5,
    'share of recent rollouts that may end without a reward before the run stops with the commonest cause',
    { min: 0, max: 1 },
  ),
  'rollout.mismatch_stop': choice(
    ['on', 'off'],
    'on',
    'stop when engine and trainer disagree on logprobs at the start or on three steps running',
  ),

  'data.prompt_dataset': text(
    '',
    'training prompts: a .jsonl or .json file, or a module that exports `prompts`; empty = the recipe',
  ),
  'data.input_key': text('input', 'column with the text or the chat messages of a prompt', { effect: FILES }),
  'data.label_key': text('label', 'column with the label the agent is given; empty = none', { effect: FILES }),
  'data.tools_key': text('', 'column with the JSON schemas of the tools; empty = none', { effect: FILES }),
  'data.max_len': int(2048, 'tokens of a whole trajectory, prompt included', { min: 2 }),
  'data.max_samples': int(
    0,
    'prompts to train on, drawn by train.seed, or the first ones without data.shuffle; 0 = all',
    { min: 0 },
  ),
  'data.shuffle': bool(true, 'another order of the prompts in each epoch, by train.seed; false = as they come'),

  'eval.dataset': text(
    '',
    "held-out prompts, as data.prompt_dataset; empty = the recipe's own if it exports `prompts`; none = no evaluation",
  ),
  'eval.steps': int(0, 'steps between evaluations; 0 = only at the start and at the end', {
    min: 0,
    effect: EVALUATED,
  }),
  'eval.eval_at_start': bool(true, 'evaluate before the first step of a new run', { effect: EVALUATED }),
  'eval.max_samples': int(0, 'prompts to evaluate, drawn by train.seed once; 0 = all', { min: 0, effect: EVALUATED }),
  'eval.n_samples_per_prompt': int(1, 'rollouts of one prompt in an evaluation', { min: 1, effect: EVALUATED }),
  'eval.temperature': float(1, 'sampling temperature of evaluation', { min: 0, effect: EVALUATED }),
  'eval.greedy': bool(true, 'one more pass at temperature 0, at the start and at the end', { effect: EVALUATED }),

  'engine.kind': choice(['torch', 'vllm', 'simulated'], 'torch', 'what samples tokens'),
  'engine.num_engines': int(1, 'engine processes', { min: 1, max: 1024 }),
  'engine.max_requests': int(256, 'turns sampled at once by one engine; more wait in line', { min: 1 }),
  'engine.max_len': int(0, 'tokens an engine can hold for one request; 0 = data.max_len', { min: 0 }),
  'engine.prefill_tokens': int(4096, 'prompt tokens one engine step takes in at most', {
    min: 1,
    effect: ENGINE_TORCH,
  }),
  'engine.dtype': choice(['float32', 'bfloat16'], 'float32', 'type of the weights in the engine', {
    effect: ENGINE_TORCH,
  }),
  'engine.device': choice(['auto', 'cpu', 'cuda'], 'auto', 'where engines run; auto = cuda when there is one', {
    effect: ENGINE_TORCH,
  }),
  'trainer.kind': choice(['torch', 'simulated'], 'torch', 'what computes gradients'),
  'trainer.num_ranks': int(1, 'trainer processes that share the batch', { min: 1, max: 4096 }),
  'trainer.device': choice(['auto', 'cpu', 'cuda'], 'auto', 'where trainer ranks run; auto = cuda when there is one', {
    effect: TRAINER_TORCH,
  }),
  'trainer.num_threads': int(1, 'CPU threads of a rank; 0 = its share of the cores, at most 8, as sampling rests', {
    min: 0,
    max: 1024,
    effect: TRAINER_TORCH,
  }),
  'trainer.logprob_chunk': int(1024, 'tokens whose logits exist at once; smaller = less memory', {
    min: 1,
    effect: TRAINER_TORCH,
  }),

  'fsdp.param_dtype': choice(
    ['float32', 'bfloat16'],
    'float32',
    'type the trainer computes in; master weights are float32',
    { effect: TRAINER_TORCH },
  ),
  'fsdp.packing_samples': bool(true, 'one packed row per micro-batch instead of padded rows'),

  'tokenizer.kind': choice(['python', 'simulated'], 'python', 'what renders the chat template and encodes text'),

  'refit.verify_every': int(
    10,
    'refits between probes that engine and trainer give the same logprobs; the first three are always probed',
    { min: 1 },
  ),

  'ckpt.save_steps': int(0, 'steps between checkpoints; 0 = only at the end', { min: 0 }),
  'ckpt.max_num': int(3, 'checkpoints kept, the newest ones', {
    min: 1,
    effect: [{ option: 'ckpt.save_steps', not: [0] }],
  }),
  'ckpt.save_hf': bool(false, 'a Hugging Face directory next to each checkpoint', { effect: SAVED }),
  'ckpt.disable_final_save': bool(false, 'no checkpoint at the end of the run'),

  'launch.silence_s': float(60, 'seconds without a sign of life after which a worker is killed', { above: 0 }),
  'launch.ready_s': float(600, 'the same while it loads its model', { above: 0 }),
  'launch.max_restarts': int(3, 'restarts of one engine or runner before the run goes on without it', { min: 0 }),
  'launch.python': text('', 'interpreter of the Python workers; empty = .venv of the repository', { effect: PYTHON }),

  'simulated.script': text(
    '',
    'latencies, tokens and failures: JSON text or the path of a JSON file (workers/simulated.ts)',
    { effect: SIMULATED },
  ),
} satisfies Record<string, Spec>;

export type OptionName = keyof typeof OPTIONS;
type ValueOf<S> = S extends { readonly type: 'string' }
  ? string
  : S extends { readonly type: 'bool' }
    ? boolean
    : S extends { readonly type: 'int' | 'float' }
      ? number
      : S extends { readonly type: 'choice'; readonly choices: readonly (infer C)[] }
        ? C
        : readonly [number, number];
/** Every option with its value, under its dotted name. */
export type Options = { readonly [K in OptionName]: ValueOf<(typeof OPTIONS)[K]> };
export type Source = 'default' | 'recipe' | 'cli';

// ---- What one option cannot see ----

interface Check {
  readonly options: readonly OptionName[]; // the first is the one reported; skipped while any of them is unreadable
  readonly problem: (o: Options) => string | null;
}
const GROUP_ESTIMATORS: ReadonlySet<string> = new Set(['grpo', 'rloo', 'reinforce_baseline', 'dr_grpo']);

const CHECKS: readonly Check[] = [
  {
    options: ['run.resume', 'run.dir'],
    problem: (o) => {
      if (!o['run.resume']) return null;
      if (o['run.dir'] === '') return 'needs --run.dir, the directory of the run to continue';
      return existsSync(join(o['run.dir'], 'config.json'))
        ? null
        : `finds no run in ${o['run.dir']} (no config.json there)`;
    },
  },
  {
    options: ['run.dir', 'run.resume'],
    problem: (o) =>
      !o['run.resume'] && o['run.dir'] !== '' && isFilled(o['run.dir'])
        ? 'exists and is not empty; continue it with --resume or name another directory'
        : null,
  },
  {
    options: ['train.max_staleness'],
    problem: (o) =>
      o['train.max_staleness'] > 0 ? 'sync only: asynchronous training is not available, allowed is 0' : null,
  },
  {
    options: ['train.agent_path'],
    problem: (o) => {
      const path = o['train.agent_path'];
      if (path === '') return 'required, because the recipe does not export `agent`';
      return existsSync(path) ? null : 'no such file';
    },
  },
  {
    options: ['data.prompt_dataset'],
    problem: (o) => (o['data.prompt_dataset'] === '' ? 'required, because the recipe does not export `prompts`' : null),
  },
  {
    options: ['actor.model_name_or_path', 'engine.kind', 'trainer.kind', 'tokenizer.kind'],
    problem: (o) =>
      o['actor.model_name_or_path'] === '' && PYTHON.some((condition) => holds(condition, o))
        ? 'required, unless engine, trainer and tokenizer are all simulated'
        : null,
  },
  {
    options: ['engine.kind'],
    problem: (o) =>
      o['engine.kind'] === 'vllm' ? 'not available: this version samples with torch or simulated engines' : null,
  },
  {
    options: ['algo.advantage.estimator', 'rollout.n_samples_per_prompt'],
    problem: (o) =>
      GROUP_ESTIMATORS.has(o['algo.advantage.estimator']) && o['rollout.n_samples_per_prompt'] < 2
        ? 'compares the rollouts of a group: needs --rollout.n_samples_per_prompt > 1, got 1'
        : null,
  },
  { options: ['reward.clip_range'], problem: (o) => ordered(o['reward.clip_range']) },
  {
    options: ['algo.advantage.is_correction_threshold'],
    problem: (o) => ordered(o['algo.advantage.is_correction_threshold']),
  },
  {
    options: ['actor.eps_clip_low_high'],
    problem: (o) => (o['actor.eps_clip_low_high'][0] < 1 ? null : 'low must be < 1, for 1 - low is the lowest ratio'),
  },
  {
    options: ['rollout.max_new_tokens', 'data.max_len'],
    problem: (o) =>
      o['rollout.max_new_tokens'] < o['data.max_len']
        ? null
        : `must be < data.max_len (${o['data.max_len']}), or no prompt fits`,
  },
  {
    options: ['engine.max_len', 'data.max_len'],
    problem: (o) =>
      o['engine.max_len'] < o['data.max_len'] ? `must be 0 or >= data.max_len (${o['data.max_len']})` : null,
  },
  {
    options: ['simulated.script'],
    problem: (o) => {
      try {
        simulatedScript(o);
        return null;
      } catch (error) {
        return `must be JSON text or the path of a JSON file: ${messageOf(error)}`;
      }
    },
  },
];

function ordered([low, high]: readonly [number, number]): string | null {
  return low < high ? null : 'the first number must be < the second';
}

function isFilled(directory: string): boolean {
  if (!existsSync(directory)) return false;
  try {
    return readdirSync(directory).length > 0;
  } catch {
    return true; // a file of that name, or not ours to read: not a place for a new run either
  }
}

// ---- Recipes ----

/** What a recipe decides. `prepare` runs once after the checks and before any process, for example to make a model. */
export interface Recipe {
  readonly options?: Partial<Options>;
  readonly prepare?: (options: Options, say: (line: string) => void) => void | Promise<void>;
}

/** Types the default export of a recipe module. */
export function defineRecipe(recipe: Recipe): Recipe {
  return recipe;
}

export interface Config {
  readonly recipePath: string; // absolute
  readonly options: Options; // resolved: no empty path where the recipe is meant, no 0 where another option is meant
  readonly sources: Readonly<Record<OptionName, Source>>;
  readonly recipe: Recipe;
}

/** Options that cannot be run; `lines` has one problem each, for the terminal. The caller exits with status 2. */
export class ConfigError extends Error {
  readonly lines: readonly string[];
  constructor(lines: readonly string[]) {
    super(lines.join('\n'));
    this.name = 'ConfigError';
    this.lines = lines;
  }
}

/** --help was given; `text` is for standard output, status 0. */
export class HelpRequested extends Error {
  readonly text: string;
  constructor(text: string) {
    super('Help was requested');
    this.name = 'HelpRequested';
    this.text = text;
  }
}

/**
 * Reads the recipe and the command line (`argv` without node and script) into checked options. Imports the recipe, starts
 * nothing else. Throws ConfigError or HelpRequested.
 */
export async function loadConfig(argv: readonly string[]): Promise<Config> {
  const problems: string[] = [];
  const cli = await parseCommandLine(argv, problems);
  const recipePath = resolve(cli.recipe ?? '');
  const module = await importRecipe(cli.recipe, recipePath, problems);

  const values: Record<string, unknown> = {};
  const sources: Record<string, Source> = {};
  const unreadable = new Set<string>();
  for (const name of optionNames()) {
    values[name] = OPTIONS[name].default;
    sources[name] = 'default';
  }
  const set = (name: OptionName, value: unknown, source: Source): void => {
    values[name] = value;
    sources[name] = source;
  };
  readRecipeOptions(module.recipe, set, unreadable, problems);
  readCommandLineOptions(cli.given, set, unreadable, problems);
  fillDefaults(values, recipePath, module);

  const options = values as Options;
  const typedSources = sources as Record<OptionName, Source>;
  // Without its recipe every path is missing; saying so would bury the cause.
  if (module.loaded) problems.push(...combinationProblems(options, typedSources, unreadable));
  if (problems.length > 0) throw new ConfigError(problems);
  return { recipePath, options, sources: typedSources, recipe: module.recipe };
}

export function optionNames(): OptionName[] {
  return Object.keys(OPTIONS) as OptionName[];
}

// ---- Command line ----

interface CommandLine {
  readonly recipe: string | null;
  readonly given: ReadonlyMap<OptionName, unknown>; // text as typed, or several of them
}

/**
 * yargs splits the words; every value stays text, so that `1e-6x` or `--run.resume=yes` is refused below and not coerced.
 * A pair takes two words (`--actor.adam.betas 0.9 0.95`), a bare switch means true.
 */
async function parseCommandLine(argv: readonly string[], problems: string[]): Promise<CommandLine> {
  const complaints: string[] = [];
  const parser = yargs([...argv])
    .parserConfiguration({
      'dot-notation': false,
      'camel-case-expansion': false,
      'boolean-negation': false,
      'parse-numbers': false,
      'parse-positional-numbers': false,
      'short-option-groups': false,
      'flatten-duplicate-arrays': false, // a pair given twice stays two lists
      'strip-aliased': true,
    })
    .help(false)
    .version(false)
    .exitProcess(false)
    .strict()
    .fail((message, error) => void complaints.push(message || messageOf(error)))
    .command('$0 [recipe]', 'run a recipe', (command) => command.positional('recipe', { type: 'string' }))
    .option('help', { type: 'boolean' })
    .option('run.resume', { type: 'string', alias: 'resume' });
  for (const name of optionNames()) {
    if (name === 'run.resume') continue;
    parser.option(name, OPTIONS[name].type === 'pair' ? { type: 'array', string: true } : { type: 'string' });
  }

  let parsed: Record<string, unknown>;
  try {
    parsed = { ...(await parser.parse()) };
  } catch (error) {
    throw new ConfigError([`Cannot read the command line: ${messageOf(error)}`]);
  }
  if (parsed.help === true) throw new HelpRequested(helpText());

  const before = problems.length;
  const given = new Map<OptionName, unknown>();
  const words = (parsed._ as unknown[]).map(String);
  for (const word of words)
    problems.push(`Unexpected argument "${word}": values follow an option, the recipe comes first`);
  for (const [name, value] of Object.entries(parsed)) {
    if (name === '_' || name === '$0' || name === 'recipe' || name === 'help') continue;
    if (isOption(name)) given.set(name, value);
    else problems.push(`--${name} ${show(value)}: unknown option${suggestion(name)}`);
  }
  // Anything else yargs refuses (it also names what is already listed).
  if (problems.length === before) problems.push(...complaints);
  return { recipe: typeof parsed.recipe === 'string' && parsed.recipe !== '' ? parsed.recipe : null, given };
}

function isOption(name: string): name is OptionName {
  return Object.hasOwn(OPTIONS, name);
}

type SetOption = (name: OptionName, value: unknown, source: Source) => void;

function readCommandLineOptions(
  given: ReadonlyMap<OptionName, unknown>,
  set: SetOption,
  unreadable: Set<string>,
  problems: string[],
): void {
  for (const [name, raw] of given) {
    const spec: Spec = OPTIONS[name];
    if (raw === 'default' || (Array.isArray(raw) && raw.length === 1 && raw[0] === 'default')) {
      unreadable.delete(name);
      set(name, spec.default, 'default');
      continue;
    }
    const read = readWords(raw, spec);
    if (read.problem === null) {
      unreadable.delete(name);
      set(name, read.value, 'cli');
    } else {
      unreadable.add(name);
      problems.push(`--${name} ${show(raw)}: ${read.problem}`);
    }
  }
}

type Read = { readonly value: unknown; readonly problem: null } | { readonly problem: string };

/** `raw` is a text, a list of texts (a pair, or something given twice) or a list of lists (a pair given twice). */
function readWords(raw: unknown, spec: Spec): Read {
  const repeated = Array.isArray(raw) && (spec.type !== 'pair' || raw.some((item) => Array.isArray(item)));
  if (repeated) return { problem: `given ${raw.length} times, allowed once` };
  if (spec.type === 'pair') {
    const numbers = (Array.isArray(raw) ? raw : [raw]).flatMap((word) => String(word).split(',')).map(toNumber);
    return checkValue(numbers, spec);
  }
  const text = String(raw);
  if (spec.type === 'bool')
    return checkValue(text === '' || text === 'true' ? true : text === 'false' ? false : text, spec);
  if (spec.type === 'int' || spec.type === 'float') return checkValue(toNumber(text), spec);
  return checkValue(text, spec);
}

const DECIMAL = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i;
function toNumber(text: string): number | string {
  return DECIMAL.test(text) ? Number(text) : text;
}

// ---- Recipe ----

interface RecipeModule {
  readonly loaded: boolean;
  readonly recipe: Recipe;
  readonly hasAgent: boolean;
  readonly hasPrompts: boolean;
}
const NO_RECIPE: RecipeModule = { loaded: false, recipe: {}, hasAgent: false, hasPrompts: false };

async function importRecipe(name: string | null, path: string, problems: string[]): Promise<RecipeModule> {
  if (name === null) {
    problems.unshift('Missing the recipe: npx tsx molt/loop.ts RECIPE [--option value ...]');
    return NO_RECIPE;
  }
  const refuse = (why: string): RecipeModule => {
    problems.push(`Recipe ${name}: ${why}`);
    return NO_RECIPE;
  };
  if (!existsSync(path)) return refuse('no such file');
  let module: Record<string, unknown>;
  try {
    module = (await import(pathToFileURL(path).href)) as Record<string, unknown>;
  } catch (error) {
    return refuse(`cannot be loaded: ${error instanceof Error ? (error.stack ?? error.message) : String(error)}`);
  }
  const recipe = module.default;
  if (!isRecord(recipe)) return refuse('must have `export default defineRecipe({ ... })`');
  for (const key of Object.keys(recipe)) {
    if (key !== 'options' && key !== 'prepare')
      problems.push(`Recipe ${name}: unknown field ${key}, allowed are options and prepare`);
  }
  if (recipe.options !== undefined && !isRecord(recipe.options))
    return refuse('options must be a record of dotted names');
  if (recipe.prepare !== undefined && typeof recipe.prepare !== 'function') return refuse('prepare must be a function');
  return {
    loaded: true,
    recipe: recipe as Recipe,
    hasAgent: module.agent !== undefined,
    hasPrompts: module.prompts !== undefined,
  };
}

function readRecipeOptions(recipe: Recipe, set: SetOption, unreadable: Set<string>, problems: string[]): void {
  for (const [name, value] of Object.entries(recipe.options ?? {})) {
    if (value === undefined) continue;
    if (!isOption(name)) {
      problems.push(`--${name} ${JSON.stringify(value)} (recipe): unknown option${suggestion(name)}`);
      continue;
    }
    const read = checkValue(value, OPTIONS[name]);
    if (read.problem === null) {
      set(name, read.value, 'recipe');
    } else {
      unreadable.add(name);
      problems.push(`--${name} ${JSON.stringify(value)} (recipe): ${read.problem}`);
    }
  }
}

/** Values that mean "the recipe" or "another option" get what they mean, so that readers never have to know. */
function fillDefaults(values: Record<string, unknown>, recipePath: string, module: RecipeModule): void {
  const here = relative(process.cwd(), recipePath) || recipePath;
  if (values['train.agent_path'] === '' && module.hasAgent) values['train.agent_path'] = here;
  if (values['data.prompt_dataset'] === '' && module.hasPrompts) values['data.prompt_dataset'] = here;
  if (values['eval.dataset'] === '' && module.hasPrompts) values['eval.dataset'] = here;
  if (values['eval.dataset'] === 'none') values['eval.dataset'] = '';
  if (values['engine.max_len'] === 0) values['engine.max_len'] = values['data.max_len'];
}

// ---- Checks ----

function checkValue(value: unknown, spec: Spec): Read {
  return accepts(value, spec)
    ? { value, problem: null }
    : { problem: `must be ${allowed(spec)}${valueSuggestion(value, spec)}` };
}

function accepts(value: unknown, spec: Spec): boolean {
  switch (spec.type) {
    case 'string':
      return typeof value === 'string';
    case 'bool':
      return typeof value === 'boolean';
    case 'choice':
      return typeof value === 'string' && spec.choices.includes(value);
    case 'int':
      return Number.isSafeInteger(value) && within(value as number, spec);
    case 'float':
      return typeof value === 'number' && within(value, spec);
    case 'pair':
      return (
        Array.isArray(value) &&
        value.length === 2 &&
        value.every((item) => typeof item === 'number' && within(item, spec))
      );
  }
}

function within(value: number, range: Range): boolean {
  return (
    Number.isFinite(value) &&
    (range.min === undefined || value >= range.min) &&
    (range.max === undefined || value <= range.max) &&
    (range.above === undefined || value > range.above) &&
    (range.below === undefined || value < range.below)
  );
}

/** What a value may be, in words. */
function allowed(spec: Spec): string {
  switch (spec.type) {
    case 'string':
      return 'text';
    case 'bool':
      return 'true or false';
    case 'choice':
      return `one of ${spec.choices.join(', ')}`;
    case 'int':
      return `an integer${rangeText(spec)}`;
    case 'float':
      return `a number${rangeText(spec)}`;
    case 'pair':
      return `two numbers${rangeText(spec)}`;
  }
}

function rangeText(range: Range): string {
  const parts: string[] = [];
  if (range.min !== undefined) parts.push(`>= ${range.min}`);
  if (range.above !== undefined) parts.push(`> ${range.above}`);
  if (range.max !== undefined) parts.push(`<= ${range.max}`);
  if (range.below !== undefined) parts.push(`< ${range.below}`);
  return parts.length > 0 ? ` ${parts.join(' and ')}` : '';
}

function combinationProblems(
  options: Options,
  sources: Record<OptionName, Source>,
  unreadable: ReadonlySet<string>,
): string[] {
  const problems: string[] = [];
  for (const name of optionNames()) {
    const rule = effectOf(name);
    if (rule === undefined || sources[name] === 'default' || unreadable.has(name)) continue;
    if (rule.some((condition) => unreadable.has(condition.option) || holds(condition, options))) continue;
    const wayOut = sources[name] === 'recipe' ? `; --${name} default takes it back` : '';
    problems.push(`${given(name, options, sources)}: has no effect; it has one only when ${ruleText(rule)}${wayOut}`);
  }
  for (const check of CHECKS) {
    if (check.options.some((name) => unreadable.has(name))) continue;
    const problem = check.problem(options);
    if (problem !== null) problems.push(`${given(check.options[0] as OptionName, options, sources)}: ${problem}`);
  }
  return problems;
}

function effectOf(name: OptionName): readonly Condition[] | undefined {
  const spec: Spec = OPTIONS[name];
  return spec.effect;
}

function holds(condition: Condition, options: Options): boolean {
  const value = options[condition.option as OptionName] as string | number | boolean;
  if (condition.is !== undefined && !condition.is.includes(value)) return false;
  if (condition.not?.includes(value)) return false;
  return condition.ends === undefined || condition.ends.some((ending) => String(value).endsWith(ending));
}

function ruleText(rule: readonly Condition[]): string {
  return rule
    .map((condition) => {
      if (condition.is !== undefined) return `${condition.option} is ${condition.is.join(' or ')}`;
      if (condition.not !== undefined)
        return condition.not[0] === ''
          ? `${condition.option} is set`
          : `${condition.option} is not ${condition.not.join(' or ')}`;
      return `${condition.option} ends in ${condition.ends?.join(' or ')}`;
    })
    .join(', or ');
}

/** How a problem names an option: as it was given, with where it came from. */
function given(name: OptionName, options: Options, sources: Record<OptionName, Source>): string {
  const where = sources[name] === 'cli' ? '' : ` (${sources[name]})`;
  return `--${name} ${show(options[name])}${where}`;
}

function show(value: unknown): string {
  if (typeof value === 'string') return value === '' ? "''" : value;
  if (Array.isArray(value)) return value.map(show).join(' ');
  return typeof value === 'number' || typeof value === 'boolean'
    ? String(value)
    : (JSON.stringify(value) ?? String(value));
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value);
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

// ---- Nearest names ----

/** Fewest insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`. */
export function editDistance(a: string, b: string): number {
  let before: number[] = [];
  let last = Array.from({ length: b.length + 1 }, (_, j) => j);
  for (let i = 1; i <= a.length; i++) {
    const row = [i];
    for (let j = 1; j <= b.length; j++) {
      const same = a[i - 1] === b[j - 1] ? 0 : 1;
      let best = Math.min((last[j] as number) + 1, (row[j - 1] as number) + 1, (last[j - 1] as number) + same);
      if (i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1])
        best = Math.min(best, (before[j - 2] as number) + 1);
      row.push(best);
    }
    before = last;
    last = row;
  }
  return last[b.length] as number;
}

/** The name meant, or null when none is near. A right last part (`--batch_size`) counts as nearly right. */
export function nearest(word: string, names: readonly string[]): string | null {
  const wanted = word.replaceAll('-', '_');
  let best: string | null = null;
  let bestDistance = Math.max(2, Math.floor(word.length / 4)) + 1;
  for (const name of names) {
    const sameTail = tail(name) === tail(wanted) ? 1 : Number.POSITIVE_INFINITY;
    const distance = Math.min(editDistance(wanted, name), sameTail);
    if (distance < bestDistance) {
      best = name;
      bestDistance = distance;
    }
  }
  return best;
}

function tail(name: string): string {
  return name.slice(name.lastIndexOf('.') + 1);
}

function suggestion(name: string): string {
  const near = nearest(name, optionNames());
  return near === null ? ' (--help lists them all)' : `, did you mean --${near}?`;
}

function valueSuggestion(value: unknown, spec: Spec): string {
  const near = spec.type === 'choice' && typeof value === 'string' ? nearest(value, spec.choices) : null;
  return near === null ? '' : `, did you mean ${near}?`;
}

// ---- Saving and showing ----

/** config.json of a run: everything needed to see what was run and what decided it. */
export function configJson(config: Config): Json {
  return { recipe: config.recipePath, options: { ...config.options }, sources: { ...config.sources } };
}

/** Options that differ from a saved config.json, one line each, for a resumed run to print. */
export function changedOptions(saved: Json, now: Config): string[] {
  const before = isRecord(saved) && isRecord(saved.options) ? saved.options : {};
  return optionNames()
    .filter((name) => name !== 'run.resume' && name !== 'run.dir')
    .filter((name) => JSON.stringify(before[name]) !== JSON.stringify(now.options[name]))
    .map((name) => `--${name} was ${show(before[name])}, is ${show(now.options[name])}`);
}

/** The resolved config in one line: what is not at its default. */
export function formatConfig(config: Config): string {
  const set = optionNames().filter((name) => config.sources[name] !== 'default');
  const parts = set.map((name) => `${name}=${show(config.options[name])}${config.sources[name] === 'cli' ? '*' : ''}`);
  return `Recipe ${relative(process.cwd(), config.recipePath)}: ${parts.join(' ') || 'all defaults'}`;
}

/** The script of simulated workers; {} when there is none. Throws when it is neither JSON nor the path of a JSON file. */
export function simulatedScript(options: Options): Json {
  const text = options['simulated.script'].trim();
  if (text === '') return {};
  return JSON.parse(text.startsWith('{') ? text : readFileSync(text, 'utf8')) as Json;
}

// ---- Help ----

const HELP_WIDTH = 100;

export function helpText(): string {
  const lines = [
    'Usage: npx tsx molt/loop.ts RECIPE [--option value ...]',
    '',
    'Trains the policy of a recipe (a TypeScript module, see scripts/) by reinforcement learning. Options of the command',
    'line outrank those of the recipe; each is given once, by its full name. A pair takes two words, a bare switch means true,',
    'and the word default takes back what the recipe set.',
  ];
  let group = '';
  for (const name of optionNames()) {
    const prefix = name.slice(0, name.indexOf('.'));
    if (prefix !== group) lines.push('', `${GROUPS[prefix] ?? prefix}:`);
    group = prefix;
    lines.push(...optionHelp(name));
  }
  return `${lines.join('\n')}\n`;
}

/** The table of the README, in Markdown; a test compares them. */
export function optionsTable(): string {
  const rows = optionNames().map((name) => {
    const spec: Spec = OPTIONS[name];
    const rule = effectOf(name);
    const kind = spec.type === 'choice' ? spec.choices.join(', ') : allowed(spec);
    const effect = rule === undefined ? '' : `; only when ${ruleText(rule)}`;
    return `| \`${name}\` | ${show(spec.default) || "''"} | ${kind} | ${`${spec.help}${effect}`.replaceAll('|', '\\|')} |`;
  });
  return ['| option | default | allowed | meaning |', '|---|---|---|---|', ...rows].join('\n');
}

function optionHelp(name: OptionName): string[] {
  const spec: Spec = OPTIONS[name];
  const rule = effectOf(name);
  const effect = rule === undefined ? '' : ` [when ${ruleText(rule)}]`;
  const head = `  --${name}`.padEnd(42);
  const kind = spec.type === 'choice' ? spec.choices.join(' | ') : allowed(spec);
  return [
    `${head} ${kind} (default ${show(spec.default)})`,
    ...wrap(`${spec.help}${effect}`, HELP_WIDTH - 6).map((line) => `      ${line}`),
  ];
}

function wrap(text: string, width: number): string[] {
  const lines: string[] = [];
  let line = '';
  for (const word of text.split(' ')) {
    if (line !== '' && line.length + 1 + word.length > width) {
      lines.push(line);
      line = word;
    } else {
      line = line === '' ? word : `${line} ${word}`;
    }
  }
  return [...lines, line];
}
