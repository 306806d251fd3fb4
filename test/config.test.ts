import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import {
  type Config,
  ConfigError,
  changedOptions,
  configJson,
  defineRecipe,
  editDistance,
  formatConfig,
  HelpRequested,
  helpText,
  loadConfig,
  nearest,
  OPTIONS,
  type OptionName,
  optionNames,
  simulatedScript,
  splitSources,
} from '../molt/config.ts';

let directory: string;
beforeAll(() => {
  directory = mkdtempSync(join(tmpdir(), 'molt-config-'));
});
afterAll(() => rmSync(directory, { recursive: true }));

const WHOLE = 'export const agent = {};\nexport function prompts() { return []; }\n';
let numRecipes = 0;

/** A recipe file with these options; `rest` are its other lines. */
function recipe(options: object = {}, rest = WHOLE): string {
  return recipeText(
    `export default { options: ${JSON.stringify({ 'actor.model_name_or_path': 'model', ...options })} };\n${rest}`,
  );
}
function recipeText(text: string): string {
  const path = join(directory, `recipe-${numRecipes++}.ts`);
  writeFileSync(path, text);
  return path;
}
async function problemsOf(argv: readonly string[]): Promise<readonly string[]> {
  const error = await loadConfig(argv).then(
    () => null,
    (reason: unknown) => reason,
  );
  if (error === null) return [];
  expect(error).toBeInstanceOf(ConfigError);
  return (error as ConfigError).lines;
}

describe('the table', () => {
  test('every default passes the check of its own row', async () => {
    for (const name of optionNames()) {
      const value = OPTIONS[name].default;
      // '' and `none` mean something by themselves; everything else may be set to its default
      if (value !== '')
        expect(
          await problemsOf([recipe({ [name]: value })]).then((lines) => lines.filter((l) => l.includes('must be'))),
        ).toEqual([]);
    }
  });

  test('every rule names options that exist', () => {
    for (const name of optionNames()) {
      const rule = (OPTIONS[name] as { effect?: readonly { option: string }[] }).effect ?? [];
      for (const condition of rule) expect(optionNames()).toContain(condition.option);
    }
  });

  test('every option is read by another module of molt/', () => {
    const molt = join(import.meta.dirname, '../molt');
    const readers = readdirSync(molt).filter(
      (name) => name.endsWith('.ts') && !['config.ts', 'options.ts'].includes(name),
    );
    const source = readers.map((name) => readFileSync(join(molt, name), 'utf8')).join('\n');
    // One goes through simulatedScript; the other is always refused in this version.
    const elsewhere = ['simulated.script', 'train.partial_rollout_enable'];
    const unread = optionNames().filter((name) => !source.includes(`'${name}'`) && !elsewhere.includes(name));
    expect(unread).toEqual([]);
    expect(source).toContain('simulatedScript(');
  });

  test('help shows every option once, under the title of its group, with its default', () => {
    const help = helpText();
    for (const name of optionNames()) expect(help.split(`  --${name} `).length, name).toBe(2);
    expect(help).toMatch(/\nTraining:\n {2}--train\.num_steps +an integer >= 1 \(default 100\)\n/);
    expect(help).toMatch(/\nCheckpoints:\n {2}--ckpt\.save_steps/);
    expect(help).toContain('[has an effect only when algo.advantage.estimator is reinforce]');
    for (const line of help.split('\n')) if (!line.startsWith('  --')) expect(line.length).toBeLessThanOrEqual(125);
  });

  test('a recipe is typed by the table', () => {
    defineRecipe({
      options: {
        'train.num_steps': 5,
        'algo.advantage.estimator': 'rloo',
        'reward.clip_range': [0, 1],
        'data.max_samples': 100,
        'eval.max_samples': [1, 2],
      },
    });
    // @ts-expect-error numbers are wanted
    defineRecipe({ options: { 'data.prompt_probs': '1,2' } });
    // @ts-expect-error a number is wanted
    defineRecipe({ options: { 'train.num_steps': '5' } });
    // @ts-expect-error no such estimator
    defineRecipe({ options: { 'algo.advantage.estimator': 'ppo' } });
    // @ts-expect-error no such option
    defineRecipe({ options: { 'train.nun_steps': 5 } });
  });
});

describe('reading', () => {
  test('the command line outranks the recipe, the recipe outranks the default', async () => {
    const { options, sources } = await loadConfig([
      recipe({ 'train.num_steps': 7, 'train.seed': 1 }),
      '--train.seed',
      '2',
    ]);
    expect([options['train.num_steps'], sources['train.num_steps']]).toEqual([7, 'recipe']);
    expect([options['train.seed'], sources['train.seed']]).toEqual([2, 'cli']);
    expect([options['train.batch_size'], sources['train.batch_size']]).toEqual([16, 'default']);
  });

  test('words become the type of their option', async () => {
    const { options } = await loadConfig([
      recipe(),
      '--actor.adam.lr=3e-6',
      '--actor.adam.betas',
      '0.8',
      '0.99',
      '--reward.clip_range',
      '-1',
      '1',
      '--ckpt.save_hf',
      '--data.shuffle',
      'false',
      '--run.dir',
      '007',
    ]);
    expect(options['actor.adam.lr']).toBe(3e-6);
    expect(options['actor.adam.betas']).toEqual([0.8, 0.99]);
    expect(options['reward.clip_range']).toEqual([-1, 1]);
    expect(options['ckpt.save_hf']).toBe(true);
    expect(options['data.shuffle']).toBe(false);
    expect(options['run.dir']).toBe('007');
  });

  test('a pair may be one word with a comma', async () => {
    const { options } = await loadConfig([recipe(), '--reward.clip_range=-2,3']);
    expect(options['reward.clip_range']).toEqual([-2, 3]);
  });

  test('a list is one word with commas, and in a recipe one number or a list', async () => {
    const two = ['--data.prompt_dataset', 'a.jsonl, b.ts'];
    const { options } = await loadConfig([
      recipe({ 'data.max_samples': 5 }),
      ...two,
      '--data.prompt_probs',
      '1e-1, 2',
      '--eval.max_samples=7',
    ]);
    expect(options['data.max_samples']).toEqual([5]);
    expect(options['data.prompt_probs']).toEqual([0.1, 2]);
    expect(options['eval.max_samples']).toEqual([7]);
    const path = recipe({ 'data.max_samples': [5, 0], 'data.prompt_probs': [1, 2] });
    expect((await loadConfig([path, ...two])).options['data.max_samples']).toEqual([5, 0]);
    expect(await problemsOf([path])).toEqual([
      '--data.prompt_probs 1,2 (recipe): has no effect with one source',
      '--data.max_samples 5,0 (recipe): has 2 numbers for 1 source; give one, or one for each source',
    ]);
    expect(
      (await loadConfig([path, '--data.prompt_probs', 'default', '--data.max_samples', '9'])).options[
        'data.prompt_probs'
      ],
    ).toEqual([]);
  });

  test('a source may be a program with arguments; quotes keep commas and blanks', () => {
    const split = (list: string) => splitSources(list).map(({ path, args }) => [path, ...args]);
    expect(split('')).toEqual([]);
    expect(split('a.jsonl')).toEqual([['a.jsonl']]);
    expect(split(' my data.jsonl ,b.ts')).toEqual([['my data.jsonl'], ['b.ts']]);
    expect(split(`"a, b.json",'c d.ts'`)).toEqual([['a, b.json'], ['c d.ts']]);
    expect(split(`x.py --tasks "a,b" --text 'two words' -n 5,y.py`)).toEqual([
      ['x.py', '--tasks', 'a,b', '--text', 'two words', '-n', '5'],
      ['y.py'],
    ]);
    expect(split("bob's.jsonl,b's.json")).toEqual([["bob's.jsonl"], ["b's.json"]]); // a quote within a word is a letter
    expect(split("'open.jsonl,b.json")).toEqual([["'open.jsonl"], ['b.json']]);
    expect(split('a.jsonl,,')).toEqual([['a.jsonl'], [''], ['']]);
    expect(splitSources('x.py  --n 1')[0]?.text).toBe('x.py  --n 1');
  });

  test('columns matter when any source is a file, the interpreter also when one is a program', async () => {
    const { options } = await loadConfig([recipe(), '--data.prompt_dataset', 'a.ts,b.jsonl', '--data.input_key', 'q']);
    expect(options['data.input_key']).toBe('q');
    const simulated = ['engine', 'trainer', 'tokenizer'].flatMap((kind) => [`--${kind}.kind`, 'simulated']);
    const python = ['--launch.python', 'python3', ...simulated];
    expect((await problemsOf([recipe({ 'actor.model_name_or_path': '' }), ...python])).join()).toMatch(
      /launch\.python .*has no effect/,
    );
    expect(
      await problemsOf([recipe({ 'actor.model_name_or_path': '' }), ...python, '--eval.dataset', 'x.py -n 1']),
    ).toEqual([]);
  });

  test('data.max_prompt_len 0 leaves room for one whole turn', async () => {
    expect((await loadConfig([recipe(), '--data.max_prompt_len=-1'])).options['data.max_prompt_len']).toBe(-1);
    const sizes = ['--data.max_len', '1000', '--rollout.max_new_tokens', '300'];
    expect((await loadConfig([recipe(), ...sizes])).options['data.max_prompt_len']).toBe(700);
    expect(
      (await loadConfig([recipe(), ...sizes, '--data.max_prompt_len', '999'])).options['data.max_prompt_len'],
    ).toBe(999);
  });

  test('--resume is run.resume', async () => {
    const run = join(directory, 'run-to-resume');
    mkdirSync(run);
    writeFileSync(join(run, 'config.json'), '{}');
    const { options, sources } = await loadConfig([recipe(), '--resume', '--run.dir', run]);
    expect([options['run.resume'], sources['run.resume']]).toEqual([true, 'cli']);
  });

  test('--help is answered without a recipe', async () => {
    await expect(loadConfig(['--help'])).rejects.toBeInstanceOf(HelpRequested);
  });

  test('empty paths become the recipe that exports what they name, and 0 the option it stands for', async () => {
    const path = recipe({ 'data.max_len': 1000 });
    const { options, sources } = await loadConfig([path]);
    const here = options['train.agent_path'];
    expect(here.endsWith(path.slice(path.lastIndexOf('/')))).toBe(true);
    expect([options['data.prompt_dataset'], options['eval.dataset']]).toEqual([here, here]);
    expect(options['engine.max_len']).toBe(1000);
    expect([sources['train.agent_path'], sources['engine.max_len']]).toEqual(['default', 'default']);
  });

  test('eval.dataset none switches evaluation off', async () => {
    expect((await loadConfig([recipe(), '--eval.dataset', 'none'])).options['eval.dataset']).toBe('none');
    expect(splitSources('none')).toEqual([]);
  });

  test('the recipe keeps its prepare function', async () => {
    const { recipe: loaded } = await loadConfig([
      recipeText(
        `export default { options: { 'actor.model_name_or_path': 'm' }, prepare: async (o, say) => say(o['train.seed']) };\n${WHOLE}`,
      ),
    ]);
    const said: unknown[] = [];
    await loaded.prepare?.({ 'train.seed': 3 } as Config['options'], (line) => said.push(line));
    expect(said).toEqual([3]);
  });
});

describe('refusing', () => {
  const cases: readonly (readonly [what: string, argv: readonly string[], line: RegExp])[] = [
    [
      'an unknown option, with the nearest name',
      ['--train.batchsize', '4'],
      /^--train\.batchsize 4: unknown option, did you mean --train\.batch_size\?$/,
    ],
    ['a name without its group', ['--lr', '1'], /^--lr 1: unknown option, did you mean --actor\.adam\.lr\?$/],
    [
      'the name of another system with the same last part',
      ['--vllm.num_engines', '2'],
      /did you mean --engine\.num_engines\?$/,
    ],
    ['a name that is like nothing', ['--xyzzy', '2'], /^--xyzzy 2: unknown option \(--help lists them all\)$/],
    [
      'an abbreviation',
      ['--train.num_step', '2'],
      /^--train\.num_step 2: unknown option, did you mean --train\.num_steps\?$/,
    ],
    [
      'a negated switch',
      ['--no-data.shuffle'],
      /^--no-data\.shuffle true: unknown option, did you mean --data\.shuffle\?$/,
    ],
    ['a short option', ['-n', '3'], /^--n 3: unknown option/],
    ['a stray word', ['more'], /^Unexpected argument "more"/],
    [
      'an option given twice',
      ['--train.seed', '1', '--train.seed', '2'],
      /^--train\.seed 1 2: given 2 times, allowed once$/,
    ],
    ['a pair given twice', ['--actor.adam.betas', '0', '0', '--actor.adam.betas', '0', '0'], /given 2 times/],
    ['an option given by both its names', ['--resume', '--run.resume'], /^--run\.resume .*given 2 times/],
    ['an integer with a fraction', ['--train.num_steps', '1.5'], /^--train\.num_steps 1\.5: must be an integer >= 1$/],
    ['an integer with letters', ['--train.num_steps', '10k'], /^--train\.num_steps 10k: must be an integer >= 1$/],
    ['an integer without a value', ['--train.num_steps'], /^--train\.num_steps '': must be an integer >= 1$/],
    ['an integer below its range', ['--train.num_steps', '0'], /must be an integer >= 1$/],
    ['an integer above its range', ['--train.seed', '4294967296'], /must be an integer >= 0 and <= 2147483647$/],
    ['a number at an excluded bound', ['--rollout.temperature', '0'], /must be a number > 0$/],
    ['infinity', ['--actor.adam.lr', '1e999'], /must be a number > 0$/],
    ['NaN', ['--actor.adam.lr', 'NaN'], /^--actor\.adam\.lr NaN: must be a number > 0$/],
    ['a hexadecimal number', ['--train.seed', '0x10'], /must be an integer/],
    [
      'a choice that is none',
      ['--algo.advantage.estimator', 'grop'],
      /grop: must be one of grpo, rloo.*did you mean grpo\?$/,
    ],
    ['half a pair', ['--actor.adam.betas', '0.9'], /^--actor\.adam\.betas 0\.9: must be two numbers >= 0 and < 1$/],
    ['three numbers for a pair', ['--actor.adam.betas', '0.9', '0.9', '0.9'], /must be two numbers/],
    ['a pair out of range', ['--actor.adam.betas', '0.9', '1'], /must be two numbers >= 0 and < 1$/],
    ['a switch that is neither', ['--data.shuffle', 'yes'], /^--data\.shuffle yes: must be true or false$/],
    ['a switch that is neither, written with =', ['--data.shuffle=no'], /^--data\.shuffle no: must be true or false$/],
    ['old tokens without correction', ['--train.max_staleness', '1'], /need importance correction/],
    ['shared GPU', ['--refit.transport', 'ipc'], /^--refit\.transport ipc.*torch engines know file and nccl only/],
    [
      'a group of one under a group estimator',
      ['--rollout.n_samples_per_prompt', '1'],
      /^--algo\.advantage\.estimator grpo \(default\): .*n_samples_per_prompt > 1, got 1/,
    ],
    ['rewards clipped to nothing', ['--reward.clip_range', '1', '1'], /the first number must be < the second/],
    ['clipping below ratio 0', ['--train.max_epochs', '2', '--actor.eps_clip_low_high', '1', '0.2'], /low must be < 1/],
    [
      'a correction threshold upside down',
      ['--algo.advantage.is_correction_level', 'token', '--algo.advantage.is_correction_threshold', '5', '0.5'],
      /threshold 5 0\.5: the first number must be </,
    ],
    ['turns that fill the trajectory', ['--rollout.max_new_tokens', '2048'], /must be < data\.max_len \(2048\)/],
    ['engines that hold less than a trajectory', ['--engine.max_len', '100'], /must be 0 or >= data\.max_len \(2048\)/],
    [
      'an agent that is not there',
      ['--train.agent_path', 'no/agent.ts'],
      /^--train\.agent_path no\/agent\.ts: no such file$/,
    ],
    ['resuming without a directory', ['--resume'], /^--run\.resume true: needs --run\.dir/],
    ['resuming where no run is', ['--resume', '--run.dir', 'no/run'], /finds no run in no\/run/],
    [
      'gamma under grpo',
      ['--algo.advantage.gamma', '1'],
      /^--algo\.advantage\.gamma 1: has no effect; it has one only when algo\.advantage\.estimator is reinforce$/,
    ],
    [
      'whitening under rloo',
      ['--algo.advantage.estimator', 'rloo', '--algo.advantage.no_whiten'],
      /no_whiten true: has no effect; .* is reinforce or reinforce_baseline$/,
    ],
    [
      'a correction mode without correction',
      ['--algo.advantage.is_correction_mode', 'clip'],
      /has no effect; .*is_correction_level is token$/,
    ],
    [
      'an evaluation option without evaluation',
      ['--eval.dataset', 'none', '--eval.steps', '5'],
      /^--eval\.steps 5: has no effect; it has one only when eval\.dataset is set$/,
    ],
    [
      'a token budget beside a fixed micro-batch',
      ['--train.micro_batch_size', '2', '--train.max_tokens_per_gpu', '100'],
      /max_tokens_per_gpu 100: has no effect; .*micro_batch_size is 0$/,
    ],
    [
      'columns of a module',
      ['--data.input_key', 'question'],
      /input_key question: has no effect; .*data\.prompt_dataset has a source that ends in \.jsonl or \.json, or eval\.dataset has/,
    ],
    [
      'weights with one source',
      ['--data.prompt_probs', '1,2'],
      /^--data\.prompt_probs 1,2: has no effect with one source$/,
    ],
    [
      'another number of weights than of sources',
      ['--data.prompt_dataset', 'a.ts,b.ts,c.ts', '--data.prompt_probs', '1,2'],
      /^--data\.prompt_probs 1,2: has 2 weights for 3 sources$/,
    ],
    ...['0,1', '-1,1', 'NaN,1', '1,', 'half,1', '1;2', '1e999,1'].map(
      (value) =>
        [
          `weights ${value}`,
          ['--data.prompt_dataset', 'a.ts,b.ts', `--data.prompt_probs=${value}`],
          new RegExp(`^--data\\.prompt_probs ${value}: must be numbers > 0 with commas between them$`),
        ] as const,
    ),
    ['a cap with a fraction', ['--data.max_samples', '1.5'], /must be integers >= 0 with commas between them$/],
    [
      'caps for other sources than there are',
      ['--data.max_samples', '1,2'],
      /^--data\.max_samples 1,2: has 2 numbers for 1 source; give one, or one for each source$/,
    ],
    ['no cap', ['--eval.max_samples='], /^--eval\.max_samples '': has 0 numbers for 1 source/],
    [
      'a comma too many',
      ['--data.prompt_dataset', 'a.ts,,b.ts'],
      /a\.ts,,b\.ts: names an empty source \(a comma too many\)$/,
    ],
    ['a comma at the end', ['--eval.dataset', 'a.ts,'], /^--eval\.dataset a\.ts,: names an empty source/],
    [
      'prompts without room to answer',
      ['--data.max_prompt_len', '2048'],
      /must be < data\.max_len \(2048\), or a prompt/,
    ],
    ['a deadline for no program', ['--data.silence_s', '5'], /has no effect; .* has a source that ends in \.py/],
    ['a script without simulated workers', ['--simulated.script', '{}'], /has no effect/],
    [
      'a script that is not JSON',
      ['--engine.kind', 'simulated', '--simulated.script', '{x'],
      /must be JSON text or the path of a JSON file/,
    ],
  ];
  test.each(cases)('%s', async (_, argv, line) => {
    const lines = await problemsOf([recipe(), ...argv]);
    expect(lines).toHaveLength(1);
    expect(lines[0]).toMatch(line);
  });

  test('all problems come at once, of the recipe and of the command line', async () => {
    const noVllm = join(directory, 'no-vllm');
    writeFileSync(noVllm, '#!/bin/sh\necho "[false, null, null]"\n', { mode: 0o755 });
    const lines = await problemsOf([
      recipe({ 'train.num_steps': '5', 'train.nun_steps': 5 }, ''),
      '--rollout.max_turns',
      '0',
      '--engine.kind',
      'vllm',
      '--launch.python',
      noVllm,
    ]);
    expect(lines).toEqual([
      '--train.num_steps "5" (recipe): must be an integer >= 1',
      '--train.nun_steps 5 (recipe): unknown option, did you mean --train.num_steps?',
      '--rollout.max_turns 0: must be an integer >= 1',
      "--train.agent_path '' (default): required, because the recipe does not export `agent` (it exports default)",
      "--data.prompt_dataset '' (default): required, because the recipe does not export `prompts` (it exports default)",
      expect.stringMatching(/^--engine\.kind vllm: \S+ cannot import vllm; `.*setup\.sh/),
    ]);
  });

  test('what depends on an unreadable value is not judged', async () => {
    expect(await problemsOf([recipe({ 'rollout.max_new_tokens': 3000 }), '--data.max_len', '4k'])).toHaveLength(1);
    expect(
      await problemsOf([recipe(), '--algo.advantage.estimator', 'x', '--algo.advantage.gamma', '0.5']),
    ).toHaveLength(1);
  });

  test('a recipe option that lost its effect is refused and can be taken back', async () => {
    const path = recipe({ 'algo.advantage.estimator': 'reinforce', 'algo.advantage.gamma': 0.9 });
    expect(await problemsOf([path])).toEqual([]);
    expect(await problemsOf([path, '--algo.advantage.estimator', 'rloo'])).toEqual([
      '--algo.advantage.gamma 0.9 (recipe): has no effect; it has one only when algo.advantage.estimator is reinforce; --algo.advantage.gamma default takes it back',
    ]);
    const argv = [path, '--algo.advantage.estimator', 'rloo', '--algo.advantage.gamma', 'default'];
    expect((await loadConfig(argv)).sources['algo.advantage.gamma']).toBe('default');
  });

  test('a model is required unless every worker that would read it is simulated', async () => {
    const path = recipeText(`export default {};\n${WHOLE}`);
    expect((await problemsOf([path])).join()).toMatch(/actor\.model_name_or_path .*required/);
    const simulated = ['engine', 'trainer', 'tokenizer'].flatMap((kind) => [`--${kind}.kind`, 'simulated']);
    expect(await problemsOf([path, ...simulated])).toEqual([]);
  });

  test('a new run does not enter a directory that has something in it', async () => {
    const run = join(directory, 'taken');
    mkdirSync(run);
    expect(await problemsOf([recipe(), '--run.dir', run])).toEqual([]);
    writeFileSync(join(run, 'config.json'), '{}');
    expect((await problemsOf([recipe(), '--run.dir', run])).join()).toMatch(
      /exists and is not empty; continue it with --resume/,
    );
  });

  const broken: readonly (readonly [what: string, text: string, line: RegExp])[] = [
    ['no default export', 'export const agent = 1;', /must have `export default defineRecipe/],
    [
      'a field it does not know',
      `export default { option: {}, options: { 'actor.model_name_or_path': 'm' } };\n${WHOLE}`,
      /unknown field option/,
    ],
    ['options that are a list', 'export default { options: [] };', /options must be a record/],
    ['prepare that is no function', 'export default { prepare: 3 };', /prepare must be a function/],
    [
      'an error while it loads',
      'throw new Error("no model today"); export default {};',
      /cannot be loaded: .*no model today/,
    ],
  ];
  test.each(broken)('a recipe with %s', async (_, text, line) => {
    const lines = await problemsOf([recipeText(text)]);
    expect(lines).toHaveLength(1);
    expect(lines[0]).toMatch(line);
  });

  test('a recipe that is missing, or not named', async () => {
    expect(await problemsOf([join(directory, 'none.ts')])).toEqual([expect.stringMatching(/none\.ts: no such file$/)]);
    expect(await problemsOf([])).toEqual([expect.stringMatching(/^Missing the recipe: npx tsx/)]);
    expect(await problemsOf(['--train.seed', '-1'])).toHaveLength(2);
  });
});

describe('names', () => {
  const distances: readonly (readonly [string, string, number])[] = [
    ['', 'abc', 3],
    ['kitten', 'sitting', 3],
    ['grop', 'grpo', 1], // a swap is one step
    ['same', 'same', 0],
  ];
  test.each(distances)('edit distance of "%s" and "%s" is %i', (a, b, distance) => {
    expect(editDistance(a, b)).toBe(distance);
    expect(editDistance(b, a)).toBe(distance);
  });

  test('nothing is suggested for a word that is near nothing', () => {
    expect(nearest('wandb.project', optionNames())).toBeNull();
  });
});

describe('saving', () => {
  test('config.json has every option with its source, and differences are found in it', async () => {
    const before = await loadConfig([recipe({ 'train.seed': 1 })]);
    const saved = JSON.parse(JSON.stringify(configJson(before)));
    expect(Object.keys(saved.options)).toEqual(optionNames());
    expect(saved.sources['train.seed' satisfies OptionName]).toBe('recipe');
    expect(changedOptions(saved, before)).toEqual([]);
    const after = await loadConfig([before.recipePath, '--train.seed', '2', '--reward.clip_range', '0', '1']);
    expect(changedOptions(saved, after)).toEqual([
      '--train.seed was 1, is 2',
      '--reward.clip_range was -10 10, is 0 1',
    ]);
  });

  test('the resolved config is one line of what was set, the command line marked', async () => {
    const config = await loadConfig([recipe({ 'train.seed': 1, 'engine.kind': 'torch' }), '--train.num_steps', '3']);
    expect(formatConfig(config)).toMatch(
      /^Recipe .*: train\.num_steps=3\* train\.seed=1 actor\.model_name_or_path=model engine\.kind=torch$/,
    );
  });

  test('a simulated script is read from text or from a file', async () => {
    const path = join(directory, 'script.json');
    writeFileSync(path, '{"engine": {"token_ms": 1}}');
    const simulated = ['--engine.kind', 'simulated', '--simulated.script'];
    expect(simulatedScript((await loadConfig([recipe(), ...simulated, path])).options)).toEqual({
      engine: { token_ms: 1 },
    });
    expect(simulatedScript((await loadConfig([recipe(), ...simulated, '{"a": 1}'])).options)).toEqual({ a: 1 });
    expect(simulatedScript((await loadConfig([recipe()])).options)).toEqual({});
  });
});
