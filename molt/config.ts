/**
 * Configuration: the table of options.ts drives types, defaults, --help, checks, the "has effect when" rule and the saved
 * config.json.
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
import { existsSync, readdirSync, readFileSync, statSync } from 'node:fs';
import { join, relative, resolve } from 'node:path';
import yargs from 'yargs';
import { importModule } from './modules.ts';
import {
  type Check,
  type Condition,
  GROUPS,
  OPTIONS,
  type OptionName,
  type Options,
  optionNames,
  PYTHON,
  type Range,
  type RecipeOptions,
  type Source,
  type Spec,
} from './options.ts';
import { isOnCpu } from './python.ts';
import type { Json } from './types.ts';
import { resolveEngine, VLLM_CHECKS } from './vllm.ts';

export { OPTIONS, type OptionName, type Options, optionNames } from './options.ts';

// ---- What one option cannot see ----

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
    options: ['train.max_staleness', 'algo.advantage.is_correction_level'],
    problem: (o) =>
      o['train.max_staleness'] > 0 && o['algo.advantage.is_correction_level'] === 'off'
        ? 'tokens of older versions need importance correction (--algo.advantage.is_correction_level token)'
        : null,
  },
  {
    options: ['data.num_epochs', 'data.prompt_probs'],
    problem: (o) =>
      o['data.num_epochs'] > 0 && o['data.prompt_probs'].length > 0
        ? 'an epoch is not defined for sources with weights'
        : null,
  },
  {
    options: ['algo.dynamic_filtering_range'],
    problem: (o) => {
      const [low, high] = o['algo.dynamic_filtering_range'];
      return low < high ? null : 'the first number must be < the second';
    },
  },
  {
    options: ['train.late', 'train.batch_order'],
    problem: (o) =>
      o['train.late'] === 'drop' && o['train.batch_order'] === 'dispatch_order'
        ? 'has no effect: --train.batch_order dispatch_order waits for the oldest groups by itself'
        : null,
  },
  {
    options: ['refit.cache', 'engine.kind'],
    problem: (o) =>
      o['refit.cache'] === 'keep' && o['engine.kind'] === 'simulated'
        ? 'has no effect: simulated engines keep no keys and values'
        : null,
  },
  {
    options: ['refit.transport', 'engine.kind', 'trainer.kind', 'engine.device', 'trainer.device'],
    problem: (o) => {
      const transport = o['refit.transport'];
      if (transport === 'auto' || transport === 'file') return null;
      if (o['trainer.kind'] === 'simulated') return 'a simulated trainer knows file only';
      if (transport === 'nccl') return null;
      if (o['engine.kind'] !== 'vllm') return `${o['engine.kind']} engines know file and nccl only`;
      return isOnCpu(o['engine.device']) || isOnCpu(o['trainer.device'])
        ? 'shares the memory of a GPU, not of a CPU'
        : null;
    },
  },
  {
    options: ['run.replay', 'run.resume'],
    problem: (o) => {
      if (o['run.replay'] === '') return null;
      if (o['run.resume']) return 'replays into a new directory, --resume goes on with an old one';
      return existsSync(join(o['run.replay'], 'ledger')) ? null : `no ledger in ${o['run.replay']}`;
    },
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
    options: ['rollout.turn_deadline_s', 'rollout.deadline_s'],
    problem: (o) =>
      o['rollout.turn_deadline_s'] < o['rollout.deadline_s']
        ? null
        : `has no effect: rollout.deadline_s ${o['rollout.deadline_s']} ends the whole rollout before`,
  },
  {
    options: ['rollout.block_s', 'launch.silence_s'],
    problem: (o) =>
      o['rollout.block_s'] < o['launch.silence_s'] || o['rollout.block_s'] === OPTIONS['rollout.block_s'].default
        ? null
        : `has no effect: a runner is killed when it is silent for launch.silence_s ${o['launch.silence_s']}`,
  },
  {
    options: ['data.prompt_dataset'],
    problem: (o) => (o['data.prompt_dataset'] === '' ? 'required, because the recipe does not export `prompts`' : null),
  },
  { options: ['data.prompt_dataset'], problem: (o) => emptySource(o['data.prompt_dataset']) },
  { options: ['eval.dataset'], problem: (o) => emptySource(o['eval.dataset']) },
  {
    options: ['data.prompt_probs', 'data.prompt_dataset'],
    problem: (o) => {
      const [weights, sources] = [o['data.prompt_probs'].length, splitSources(o['data.prompt_dataset']).length];
      if (weights === 0 || sources === 0) return null;
      if (sources === 1) return 'has no effect with one source';
      return weights === sources ? null : `has ${weights} weights for ${sources} sources`;
    },
  },
  {
    options: ['data.max_samples', 'data.prompt_dataset'],
    problem: (o) => oneOrEach(o['data.max_samples'], o['data.prompt_dataset']),
  },
  {
    options: ['eval.max_samples', 'eval.dataset'],
    problem: (o) => oneOrEach(o['eval.max_samples'], o['eval.dataset']),
  },
  {
    options: ['data.max_prompt_len', 'data.max_len'],
    problem: (o) =>
      o['data.max_prompt_len'] < o['data.max_len']
        ? null
        : `must be < data.max_len (${o['data.max_len']}), or a prompt leaves no room to answer`,
  },
  {
    options: ['actor.model_name_or_path', 'engine.kind', 'trainer.kind', 'tokenizer.kind'],
    problem: (o) =>
      o['actor.model_name_or_path'] === '' && PYTHON.some((condition) => holds(condition, o))
        ? 'required: a directory in Hugging Face format (README, "Your model"); the quickstart keeps its own in .cache/quickstart'
        : null,
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
  ...VLLM_CHECKS,
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

function emptySource(list: string): string | null {
  return splitSources(list).some(({ text }) => text === '') ? 'names an empty source (a comma too many)' : null;
}

function oneOrEach(numbers: readonly number[], list: string): string | null {
  const sources = splitSources(list).length;
  if (sources === 0 || numbers.length === 1 || numbers.length === sources) return null;
  return `has ${numbers.length} numbers for ${sources} source${sources === 1 ? '' : 's'}; give one, or one for each source`;
}

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

/**
 * What a recipe decides. `prepare` runs once, before any worker: it may make the model or install packages. What it makes
 * is checked after it, everything else (agent, run directory, Python) before.
 */
export interface Recipe {
  readonly options?: RecipeOptions;
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
  const engineProblem = await chooseEngine(values, unreadable);
  // Without its recipe every path is missing; saying so would bury the cause.
  const exported = ` (it exports ${module.exports.join(', ')})`;
  if (module.loaded) {
    const found = combinationProblems(options, typedSources, unreadable);
    problems.push(...found.map((line) => (/does not export `\w+`$/.test(line) ? `${line}${exported}` : line)));
  }
  if (engineProblem !== null) problems.push(`${given('engine.kind', options, typedSources)}: ${engineProblem}`);
  if (problems.length > 0) throw new ConfigError(problems);
  return { recipePath, options, sources: typedSources, recipe: module.recipe };
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
    .option('help', { type: 'boolean', alias: 'h' })
    .option('run.resume', { type: 'string', alias: 'resume' })
    .option('run.replay', { type: 'string', alias: 'replay' });
  for (const name of optionNames()) {
    if (name === 'run.resume' || name === 'run.replay') continue;
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
      const commas =
        name.endsWith('dataset') && Array.isArray(raw) ? '; several sources are one value with commas' : '';
      problems.push(`--${name} ${show(raw)}: ${read.problem}${commas}`);
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
  if (spec.type === 'ints' || spec.type === 'floats') {
    return checkValue(text.trim() === '' ? [] : text.split(',').map((word) => toNumber(word.trim())), spec);
  }
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
  readonly exports: readonly string[];
}
const NO_RECIPE: RecipeModule = { loaded: false, recipe: {}, hasAgent: false, hasPrompts: false, exports: [] };

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
  if (!statSync(path).isFile()) return refuse('is not a file');
  if (!/\.[cm]?[jt]s$/.test(path)) return refuse('a recipe is a .ts or .js module; data goes to --data.prompt_dataset');
  let module: Readonly<Record<string, unknown>>;
  try {
    module = await importModule(path);
  } catch (error) {
    return refuse(`cannot be loaded: ${messageOf(error)}`);
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
    exports: Object.keys(module),
  };
}

function readRecipeOptions(recipe: Recipe, set: SetOption, unreadable: Set<string>, problems: string[]): void {
  for (const [name, value] of Object.entries(recipe.options ?? {})) {
    if (value === undefined) continue;
    if (!isOption(name)) {
      problems.push(`--${name} ${JSON.stringify(value)} (recipe): unknown option${suggestion(name)}`);
      continue;
    }
    const spec: Spec = OPTIONS[name];
    const isOne = (spec.type === 'ints' || spec.type === 'floats') && typeof value === 'number';
    const read = checkValue(isOne ? [value] : value, spec);
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
  const source = here.includes(',') ? `"${here}"` : here;
  if (values['data.prompt_dataset'] === '' && module.hasPrompts) values['data.prompt_dataset'] = source;
  if (values['eval.dataset'] === '' && module.hasPrompts) values['eval.dataset'] = source;
  if (values['engine.max_len'] === 0) values['engine.max_len'] = values['data.max_len'];
  if (values['data.max_prompt_len'] === 0) {
    const room = (values['data.max_len'] as number) - (values['rollout.max_new_tokens'] as number);
    values['data.max_prompt_len'] = Math.max(1, room); // less is refused as rollout.max_new_tokens
  }
}

/** Puts the engine that runs in the place of `auto`. Returns why it cannot run, else null. */
async function chooseEngine(values: Record<string, unknown>, unreadable: Set<string>): Promise<string | null> {
  const names = ['engine.kind', 'engine.device', 'launch.python'];
  if (names.some((name) => unreadable.has(name))) {
    unreadable.add('engine.kind'); // which one runs is not known, so nothing that depends on it is judged
    return null;
  }
  const { kind, problem } = await resolveEngine(values as Options);
  values['engine.kind'] = kind;
  return problem;
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
    case 'ints':
      return Array.isArray(value) && value.every((item) => Number.isSafeInteger(item) && within(item, spec));
    case 'floats':
      return Array.isArray(value) && value.every((item) => typeof item === 'number' && within(item, spec));
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
    case 'ints':
      return `integers${rangeText(spec)} with commas between them`;
    case 'floats':
      return `numbers${rangeText(spec)} with commas between them`;
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
  const { ends } = condition;
  return ends === undefined || splitSources(String(value)).some(({ path }) => ends.some((e) => path.endsWith(e)));
}

function ruleText(rule: readonly Condition[]): string {
  return rule
    .map((condition) => {
      if (condition.is !== undefined) return `${condition.option} is ${condition.is.join(' or ')}`;
      if (condition.not !== undefined)
        return condition.not[0] === ''
          ? `${condition.option} is set`
          : `${condition.option} is not ${condition.not.join(' or ')}`;
      return `${condition.option} has a source that ends in ${condition.ends?.join(' or ')}`;
    })
    .join(', or ');
}

/** How a problem names an option: as it was given, with where it came from. */
function given(name: OptionName, options: Options, sources: Record<OptionName, Source>): string {
  const where = sources[name] === 'cli' ? '' : ` (${sources[name]})`;
  return `--${name} ${shown(name, options[name])}${where}`;
}

/** As it is typed: the numbers of a list have commas between them, those of a pair blanks. */
function shown(name: OptionName, value: unknown): string {
  const { type } = OPTIONS[name];
  const isList = (type === 'ints' || type === 'floats') && Array.isArray(value);
  return isList ? show(value.join(',')) : show(value);
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

/** What the same thing is called here: names that users of other systems type. */
const ONE_DISTRIBUTION =
  'training rollouts are sampled from softmax(logits / rollout.temperature) and nothing else, for that is what the loss assumes';
const ELSEWHERE: Readonly<Record<string, string>> = {
  doctor: 'the doctor is npx tsx molt/launch.ts --doctor RECIPE',
  version: 'package.json has it',
  'train.async_queue_size': 'the bound on asynchrony is --train.max_staleness, counted in refits',
  'rollout.batch_size': 'prompt groups of a step are --train.batch_size',
  'rollout.generate_max_len': 'it is --rollout.max_new_tokens, per turn',
  'train.num_episodes': 'the length of a run is --train.num_steps, or --data.num_epochs passes over the prompts',
  'train.force_sync_mode': 'synchronous is --train.max_staleness 0, the default',
  ...Object.fromEntries(
    [
      'top_p',
      'top_k',
      'min_p',
      'repetition_penalty',
      'presence_penalty',
      'frequency_penalty',
      'logit_bias',
      'min_tokens',
    ].map((name) => [`rollout.${name}`, ONE_DISTRIBUTION]),
  ),
};

function suggestion(name: string): string {
  const here = ELSEWHERE[name.replaceAll('-', '_')];
  if (here !== undefined) return `; ${here}`;
  const near = nearest(name, optionNames());
  return near === null ? ' (--help lists them all)' : `, did you mean --${near}?`;
}

function valueSuggestion(value: unknown, spec: Spec): string {
  const near = spec.type === 'choice' && typeof value === 'string' ? nearest(value, spec.choices) : null;
  return near === null ? '' : `, did you mean ${near}?`;
}

// ---- Sources of prompts ----

const NO_SOURCE = 'none'; // of eval.dataset: no evaluation

/** One entry of data.prompt_dataset or eval.dataset. */
export interface PromptSource {
  readonly text: string; // as it was given
  readonly path: string;
  readonly args: readonly string[]; // of a Python program
}

/**
 * The entries of a list with commas between them. Quotes around a path or an argument keep commas and blanks in it;
 * only behind a .py do blanks separate, for a path may have some.
 */
export function splitSources(list: string): PromptSource[] {
  if (['', NO_SOURCE].includes(list.trim())) return [];
  const QUOTED = /(['"])(.*?)\1(?=[\s,]|$)/y; // tried only where a word begins
  const entries: string[] = [''];
  for (let at = 0; at < list.length; ) {
    QUOTED.lastIndex = at;
    const quoted = at === 0 || /[\s,]/.test(list[at - 1] as string) ? QUOTED.exec(list)?.[0] : undefined;
    if (quoted === undefined && list[at] === ',') entries.push('');
    else entries.push(`${entries.pop()}${quoted ?? list[at]}`);
    at += quoted?.length ?? 1;
  }
  return entries.map((entry) => {
    const text = entry.trim();
    const words = (text.match(/(?<!\S)(['"]).*?\1(?!\S)|\S+/g) ?? []).map(unquoted);
    const [program = '', ...args] = words;
    return program.endsWith('.py') ? { text, path: program, args } : { text, path: unquoted(text), args: [] };
  });
}

function unquoted(word: string): string {
  return /^(['"])(.*)\1$/s.exec(word)?.[2] ?? word;
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
    .map((name) => `--${name} was ${shown(name, before[name])}, is ${shown(name, now.options[name])}`);
}

/** The resolved config in one line: what is not at its default, and the engine, whose default depends on the machine. */
export function formatConfig(config: Config): string {
  const set = optionNames().filter((name) => config.sources[name] !== 'default' || name === 'engine.kind');
  const parts = set.map(
    (name) => `${name}=${shown(name, config.options[name])}${config.sources[name] === 'cli' ? '*' : ''}`,
  );
  return `Recipe ${relative(process.cwd(), config.recipePath)}: ${parts.join(' ')}`;
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
    'line outrank those of the recipe; each is given once, by its full name. A pair takes two words, a list one with commas,',
    'a bare switch means true, and the word default takes back what the recipe set.',
    '',
    '  npx tsx molt/loop.ts scripts/quickstart.ts --train.num_steps 20 --train.seed 7',
    '  npx tsx molt/launch.ts --doctor scripts/quickstart.ts        checks everything, trains nothing',
    '',
    'A recipe sets at least actor.model_name_or_path; most also set train.num_steps, train.batch_size,',
    'rollout.n_samples_per_prompt, rollout.max_new_tokens, actor.adam.lr, data.prompt_dataset and eval.dataset.',
    'Results go to runs/<recipe>-NNN. Exit codes: 0 done, 1 failed, 2 bad input, 130 and 143 stopped. More: README.md.',
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
    return `| \`${name}\` | ${shown(name, spec.default)} | ${kind} | ${`${spec.help}${effect}`.replaceAll('|', '\\|')} |`;
  });
  return ['| option | default | allowed | meaning |', '|---|---|---|---|', ...rows].join('\n');
}

function optionHelp(name: OptionName): string[] {
  const spec: Spec = OPTIONS[name];
  const rule = effectOf(name);
  const effect = rule === undefined ? '' : ` [has an effect only when ${ruleText(rule)}]`;
  const head = `  --${name}`.padEnd(42);
  const kind = spec.type === 'choice' ? spec.choices.join(' | ') : allowed(spec);
  return [
    `${head} ${kind} (default ${shown(name, spec.default)})`,
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
