/**
 * The table of options: name, type, default, range, meaning, and when it has an effect.
 *
 * Important options first in each group; an option exists only if something reads it. What is done with the table
 * (recipes, command line, checks, help) is in config.ts. Adding one: a row here, a line in test/options.test.ts that shows
 * what it changes, and `npx tsx scripts/readme_tables.ts`.
 */

// ---- The shape of a row ----

/** One thing that must hold for an option to matter; a rule is a list of which any suffices. */
export interface Condition {
  readonly option: string;
  readonly is?: readonly (string | number | boolean)[];
  readonly not?: readonly (string | number | boolean)[];
  readonly ends?: readonly string[]; // a source it names ends in one of these
}
export interface Range {
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
interface List extends Row, Range {
  readonly type: 'ints' | 'floats'; // any number of them, each within the range; one word with commas
  readonly default: readonly number[];
}
export type Spec = Plain | Bool | Num | Choice | Pair | List;

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
const ints = (value: readonly number[], help: string, more: Effect & Range = {}): List => ({
  type: 'ints',
  default: value,
  help,
  ...more,
});
const floats = (value: readonly number[], help: string, more: Effect & Range = {}): List => ({
  type: 'floats',
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

const ASYNCHRONOUS = [{ option: 'train.max_staleness', not: [0] }] as const;
const FILTERED = [{ option: 'algo.dynamic_filtering_enable', is: [true] }] as const;
const REINFORCE = [{ option: 'algo.advantage.estimator', is: ['reinforce'] }] as const;
const WHITENED = [{ option: 'algo.advantage.estimator', is: ['reinforce', 'reinforce_baseline'] }] as const;
const CORRECTED = [{ option: 'algo.advantage.is_correction_level', is: ['token'] }] as const;
const PARTIAL = [{ option: 'train.partial_rollout_enable', is: [true] }] as const;
const DECAYING = [{ option: 'actor.lr_scheduler', is: ['linear', 'cosine'] }] as const;
const EVALUATED = [{ option: 'eval.dataset', not: ['', 'none'] }] as const;
const ENGINE_REAL = [{ option: 'engine.kind', is: ['torch', 'vllm'] }] as const;
const VLLM = [{ option: 'engine.kind', is: ['vllm'] }] as const;
const SPECULATIVE = [{ option: 'engine.speculation', not: ['off'] }] as const;
const TOKENIZER_PYTHON = [{ option: 'tokenizer.kind', is: ['python'] }] as const;
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
export const PYTHON = [
  { option: 'engine.kind', not: ['simulated'] },
  { option: 'trainer.kind', not: ['simulated'] },
  { option: 'tokenizer.kind', not: ['simulated'] },
] as const;
const PROGRAMS = [
  { option: 'data.prompt_dataset', ends: ['.py'] },
  { option: 'eval.dataset', ends: ['.py'] },
] as const;
const SAVED = [
  { option: 'ckpt.save_steps', not: [0] },
  { option: 'ckpt.disable_final_save', is: [false] },
] as const;

// ---- The table ----

/** Titles of the groups of --help, in the order the table has them. */
export const GROUPS: Readonly<Record<string, string>> = {
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
  'run.resume': bool(
    false,
    'continue the run in run.dir: its newest complete checkpoint, then what the ledger has beyond it (also --resume)',
  ),
  'run.replay': text('', 'train the recorded batches of this run directory again, nothing else (also --replay)'),
  'run.ledger_gb': float(20, 'size of the ledger above which parts that every kept checkpoint covers are deleted', {
    min: 0,
  }),

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
  'train.max_staleness': int(0, 'refits between sampling and training of a token, at most; 0 = synchronous', {
    min: 0,
    max: 1000,
  }),
  'train.partial_rollout_enable': bool(
    false,
    'requests go on across a refit, so that a trajectory may hold tokens of several versions; false = the pool drains first',
    { effect: ASYNCHRONOUS },
  ),
  'train.batch_order': choice(
    ['first_finished', 'dispatch_order'],
    'first_finished',
    'groups of the next batch: those that finished first, or those that began first (no bias to short ones, longer waits)',
    { effect: ASYNCHRONOUS },
  ),
  'train.late': choice(
    ['wait', 'drop'],
    'wait',
    'unfinished groups that would be too old for any later step: the batch waits for them, or they are dropped as stale',
    { effect: ASYNCHRONOUS },
  ),

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
    'rewards to advantages; formulas in molt/estimators.ts',
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

  'algo.dynamic_filtering_enable': bool(
    false,
    'drop groups whose mean score is outside algo.dynamic_filtering_range, and sample others in their place',
  ),
  'algo.dynamic_filtering_range': pair(
    [0, 1],
    'mean score of a group that is trained lies between these, both excluded',
    {
      effect: FILTERED,
    },
  ),

  'reward.clip_range': pair([-10, 10], 'rewards are clipped to this before any baseline'),

  'rollout.n_samples_per_prompt': int(8, 'rollouts of one prompt, the size of a group', { min: 1 }),
  'rollout.temperature': float(1, 'sampling temperature of training rollouts', { above: 0 }),
  'rollout.max_new_tokens': int(512, 'tokens the policy may sample in one turn', { min: 1 }),
  'rollout.max_turns': int(8, 'turns of the policy in one rollout', { min: 1 }),
  'rollout.deadline_s': float(600, 'seconds a rollout may take before it ends with reason deadline', {
    above: 0,
    max: 2_000_000,
  }),
  'rollout.turn_deadline_s': float(
    0,
    'the same for one turn of it: from asking for a turn until it is sampled, waiting for an engine and pauses for a refit included; 0 = none',
    { min: 0, max: 2_000_000 },
  ),
  'rollout.block_s': float(
    10,
    'seconds code of a rollout may hold the event loop of its runner; then it ends with reason agent_blocked and the others begin again in a new runner',
    { above: 0, max: 2_000_000 },
  ),
  'rollout.num_runners': int(1, 'processes that host the agents', { min: 1, max: 256 }),
  'rollout.failed_members': choice(
    ['keep', 'refill', 'drop'],
    'keep',
    'a group with a rollout that ended without a reward: trained with the others (two at least), the rollout is tried ' +
      'again up to three times, or the group is dropped',
  ),
  'rollout.max_failure_rate': float(
    0.5,
    'share of recent rollouts that may end without a reward before the run stops with the commonest cause; 1 = it never stops for that',
    { min: 0, max: 1 },
  ),
  'rollout.mismatch_stop': choice(
    ['on', 'off'],
    'on',
    'stop when engine and trainer disagree on logprobs at the start or on three steps running',
  ),

  'data.prompt_dataset': text(
    '',
    'training prompts: one source or several with commas between them, each a .jsonl or .json file, a module that ' +
      'exports `prompts`, or a Python program that prints them (FILE.py and its arguments); empty = the recipe',
  ),
  'data.prompt_probs': floats(
    [],
    'shares of the sources, one number each with commas between them; empty = all prompts together, each once an epoch',
    { above: 0 },
  ),
  'data.input_key': text('input', 'column with the text or the chat messages of a prompt', { effect: FILES }),
  'data.label_key': text('label', 'column with the label the agent is given; empty = none', { effect: FILES }),
  'data.tools_key': text('', 'column with the JSON schemas of the tools; empty = none', { effect: FILES }),
  'data.max_len': int(2048, 'tokens of a whole trajectory, prompt included', { min: 2 }),
  'data.max_prompt_len': int(
    0,
    'tokens of a prompt as the data gives it, by the chat template and with its tools; longer ones, and those that the ' +
      'template cannot render, are left out of training and evaluation and counted; 0 = data.max_len - ' +
      'rollout.max_new_tokens; -1 = none is measured (an agent may make another prompt of it in reset)',
    { min: -1 },
  ),
  'data.max_samples': ints(
    [0],
    'prompts to train on from each source (one number for all, or one each with commas between them), drawn by ' +
      'train.seed, or the first ones without data.shuffle; 0 = all',
    { min: 0 },
  ),
  'data.num_epochs': int(0, 'times that each prompt is given out before the run ends; 0 = as train.num_steps needs', {
    min: 0,
  }),
  'data.shuffle': bool(true, 'another order of the prompts in each epoch, by train.seed; false = as they come'),
  'data.silence_s': float(300, 'seconds without a line after which a Python program that prints prompts is killed', {
    above: 0,
    max: 2_000_000,
    effect: PROGRAMS,
  }),

  'eval.dataset': text(
    '',
    "held-out prompts, as data.prompt_dataset; empty = the recipe's own if it exports `prompts`; none = no evaluation",
  ),
  'eval.steps': int(0, 'steps between evaluations; 0 = only at the start and at the end', {
    min: 0,
    effect: EVALUATED,
  }),
  'eval.eval_at_start': bool(true, 'evaluate before the first step of a new run', { effect: EVALUATED }),
  'eval.max_samples': ints([0], 'prompts to evaluate from each source, as data.max_samples; drawn by train.seed once', {
    min: 0,
    effect: EVALUATED,
  }),
  'eval.n_samples_per_prompt': int(1, 'rollouts of one prompt in an evaluation', { min: 1, effect: EVALUATED }),
  'eval.temperature': float(1, 'sampling temperature of evaluation', { min: 0, effect: EVALUATED }),
  'eval.greedy': bool(true, 'one more pass at temperature 0, at the start and at the end', { effect: EVALUATED }),
  'eval.show_samples': int(0, 'prompts of each evaluation whose first sampled rollout is printed as text', {
    min: 0,
    effect: EVALUATED,
  }),

  'engine.kind': choice(
    ['auto', 'torch', 'vllm', 'simulated'],
    'auto',
    'what samples tokens; auto = vllm where engines run on a GPU and launch.python can import a vLLM for it, else torch',
  ),
  'engine.num_engines': int(1, 'engine processes', { min: 1, max: 1024 }),
  'engine.max_requests': int(256, 'turns sampled at once by one engine; more wait in line', { min: 1 }),
  'engine.max_len': int(0, 'tokens an engine can hold for one request; 0 = data.max_len', { min: 0 }),
  'engine.stall_s': float(120, 'seconds without a step, while it has requests, after which an engine is killed', {
    above: 0,
    max: 2_000_000,
  }),
  'engine.prefill_tokens': int(
    4096,
    'prompt tokens one engine step takes in at most; of vllm all tokens of a step (its max_num_batched_tokens)',
    { min: 1, effect: ENGINE_REAL },
  ),
  'engine.dtype': choice(['float32', 'bfloat16'], 'float32', 'type of the weights in the engine', {
    effect: ENGINE_REAL,
  }),
  'engine.device': choice(['auto', 'cpu', 'cuda'], 'auto', 'where engines run; auto = cuda when there is one', {
    effect: ENGINE_REAL,
  }),
  'engine.tensor_parallel_size': int(1, 'GPUs of one engine that share each layer', {
    min: 1,
    max: 1024,
    effect: VLLM,
  }),
  'engine.pipeline_parallel_size': int(1, 'stages of layers of one engine, each on GPUs of its own', {
    min: 1,
    max: 1024,
    effect: VLLM,
  }),
  'engine.data_parallel_size': int(1, 'copies of the model inside one engine, which share its requests', {
    min: 1,
    max: 1024,
    effect: VLLM,
  }),
  'engine.enable_expert_parallel': bool(
    false,
    'whole experts on the GPUs of engine.tensor_parallel_size x engine.data_parallel_size, instead of a slice of each',
    { effect: VLLM },
  ),
  'engine.gpu_memory_utilization': float(0.9, 'share of the memory of its GPU that an engine may take', {
    above: 0,
    max: 1,
    effect: VLLM,
  }),
  'engine.kv_cache_gb': float(
    0,
    'GiB for the keys and values of an engine, on each of its GPUs; 0 = what engine.gpu_memory_utilization leaves, on a CPU 1',
    { min: 0, effect: VLLM },
  ),
  'engine.enable_prefix_caching': bool(
    true,
    'requests that begin alike share keys and values, within one policy version',
    { effect: VLLM },
  ),
  'engine.enforce_eager': bool(false, 'no CUDA graphs and no compilation: a quicker start, slower steps', {
    effect: VLLM,
  }),
  'engine.attention_backend': text('', 'attention of vLLM by its name there, as FLASH_ATTN; empty = vLLM chooses', {
    effect: VLLM,
  }),
  'engine.moe_backend': text('', 'experts of vLLM by the name of its kernels, as triton; empty = vLLM chooses', {
    effect: VLLM,
  }),
  'engine.speculation': choice(
    ['off', 'ngram', 'mtp', 'draft'],
    'off',
    'guess tokens ahead, then sample them in one step: from what was said before, by heads of the model, or by a small model',
    { effect: VLLM },
  ),
  'engine.num_speculative_tokens': int(1, 'tokens guessed ahead in one step', { min: 1, effect: SPECULATIVE }),
  'engine.draft_model': text('', 'directory of the small model, in Hugging Face format, with the same tokenizer', {
    effect: [{ option: 'engine.speculation', is: ['draft'] }],
  }),
  'engine.vllm_args': text(
    '',
    'further arguments of AsyncEngineArgs by name, as {"nnodes": 2}: JSON text or the path of a JSON file',
    { effect: VLLM },
  ),

  'trainer.kind': choice(['torch', 'simulated'], 'torch', 'what computes gradients'),
  'trainer.num_ranks': int(1, 'trainer processes that share the batch', { min: 1, max: 4096 }),
  'trainer.device': choice(['auto', 'cpu', 'cuda'], 'auto', 'where trainer ranks run; auto = cuda when there is one', {
    effect: TRAINER_TORCH,
  }),
  'trainer.deadline_s': float(
    3600,
    'seconds a rank may take for one request (a step, a checkpoint) before all ranks are started again',
    { above: 0, max: 2_000_000 },
  ),
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
  'tokenizer.tool_parser': text(
    'auto',
    'what reads tool calls: auto = JSON in tool_call tags (Qwen3, Hermes), else a name that vLLM has for --tool-call-parser',
    { effect: TOKENIZER_PYTHON },
  ),
  'tokenizer.reasoning_parser': text(
    'auto',
    'what reads reasoning: auto = text in think tags, else a name that vLLM has for --reasoning-parser',
    { effect: TOKENIZER_PYTHON },
  ),

  'refit.verify_every': int(
    10,
    'refits between probes that engine and trainer give the same logprobs; the first three are always probed',
    { min: 1 },
  ),
  'refit.cache': choice(
    ['clear', 'keep'],
    'clear',
    'keys of requests that cross a refit: computed again by the new weights, or kept as the old ones made them',
    { effect: PARTIAL },
  ),
  'refit.transport': choice(
    ['auto', 'file', 'nccl', 'ipc'],
    'auto',
    'how weights reach engines that sample: a file, a broadcast (over gloo on CPUs), the memory of a shared GPU; auto = ipc or nccl where trainer and engines are on one GPU or on different ones, else file',
    { effect: ENGINE_REAL },
  ),
  'refit.deadline_s': float(600, 'seconds an engine may take to pause, load and resume before it is killed', {
    above: 0,
    max: 2_000_000,
  }),

  'ckpt.save_steps': int(0, 'steps between checkpoints; 0 = only at the end', { min: 0 }),
  'ckpt.max_num': int(3, 'checkpoints kept, the newest ones', {
    min: 1,
    effect: [{ option: 'ckpt.save_steps', not: [0] }],
  }),
  'ckpt.save_hf': bool(false, 'a Hugging Face directory next to each checkpoint', { effect: SAVED }),
  'ckpt.disable_final_save': bool(false, 'no checkpoint at the end of the run'),

  'launch.port': int(0, 'port of the controller on the loopback interface; 0 = any free one', { min: 0, max: 65535 }),
  'launch.silence_s': float(60, 'seconds without a sign of life after which a worker is killed', { above: 0 }),
  'launch.ready_s': float(600, 'the same while it loads its model', { above: 0 }),
  'launch.stall_s': float(
    120,
    'seconds in which nothing happens after which the run prints who waits on whom, and stacks',
    {
      above: 0,
      max: 2_000_000,
    },
  ),
  'launch.max_restarts': int(
    3,
    'restarts of one engine or runner before the run goes on without it; of the trainer or the tokenizer before it ends',
    { min: 0 },
  ),
  'launch.python': text('', 'interpreter of Python workers and prompts; empty = .venv of the repository', {
    effect: [...PYTHON, ...PROGRAMS],
  }),

  'simulated.script': text(
    '',
    'latencies, tokens and failures: JSON text or the path of a JSON file (workers/simulated.ts)',
    { effect: SIMULATED },
  ),
  'simulated.engines_per_process': int(1, 'simulated engines that share a process, and die with it', {
    min: 1,
    max: 1024,
    effect: [{ option: 'engine.kind', is: ['simulated'] }],
  }),
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
        : S extends { readonly type: 'pair' }
          ? readonly [number, number]
          : readonly number[];
/** Every option with its value, under its dotted name. */
export type Options = { readonly [K in OptionName]: ValueOf<(typeof OPTIONS)[K]> };
/** The same as a recipe writes it: a list of one may be a plain number. */
export type RecipeOptions = {
  readonly [K in OptionName]?:
    | Options[K]
    | ((typeof OPTIONS)[K] extends { readonly type: 'ints' | 'floats' } ? number : never)
    | undefined;
};
export type Source = 'default' | 'recipe' | 'cli';

/** What one option cannot see by itself. */
export interface Check {
  readonly options: readonly OptionName[]; // the first is the one reported; skipped while any of them is unreadable
  readonly problem: (o: Options) => string | null;
}

export function optionNames(): OptionName[] {
  return Object.keys(OPTIONS) as OptionName[];
}
