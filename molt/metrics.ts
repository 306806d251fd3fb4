/**
 * Metrics: every number a run reports, once, with its formula, unit, reduction and healthy range.
 *
 *   loop.ts -> MetricsWriter.write -> runs/<name>/metrics.jsonl     one object per step, one per evaluation
 *           -> formatStep          -> one line on the terminal      Progress fills the time between
 *
 * Invariants
 *   1. A name that is not in the table cannot be written, and a step lacks none of the names every step has.
 *   2. NaN and infinity are written as null: the file is always JSON.
 *   3. Nothing is kept: memory does not grow with the number of steps.
 *   4. After a resume metrics.jsonl holds each step once; lines of steps that are run again move to metrics.<n>.jsonl.
 * A mean is over rollouts, tokens or groups as its row says: a rollout in many trajectories counts once.
 * Called by loop.ts; the README's table is `metricsTable`. Elsewhere called logging, stats.
 */
import { appendFileSync, existsSync, readFileSync, renameSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { END_REASONS, type EndReason } from './types.ts';

/** How the parts of a step (rollouts, tokens, ranks, engines) make one number. */
export type Reduction =
  | 'last'
  | 'sum'
  | 'max'
  | 'mean of rollouts'
  | 'mean of trained tokens'
  | 'mean of credited tokens'
  | 'mean of fresh tokens'
  | 'mean of stale tokens'
  | 'mean of groups'
  | 'mean of engines'
  | 'mean of prompts'
  | 'ratio of sums';

export interface Metric {
  readonly unit: string; // '1' for ratios
  readonly reduction: Reduction;
  readonly healthy: string;
  readonly meaning: string;
}

function row(unit: string, reduction: Reduction, healthy: string, meaning: string): Metric {
  return { unit, reduction, healthy, meaning };
}

// ---- The table ----

const TABLE = {
  step: row('steps', 'last', 'rises by 1', 'optimizer steps done'),
  policy_version: row(
    'refits',
    'last',
    'rises by 1',
    'version the engines serve; of an evaluation: the version evaluated',
  ),
  time_unix_s: row('s', 'last', 'rises', 'wall clock when the line was written'),

  reward_mean: row('reward', 'mean of rollouts', 'rises', 'reward before clipping, of the trained rollouts'),
  reward_std: row('reward', 'mean of rollouts', '> 0', 'deviation of those rewards, n - 1'),
  group_reward_std: row(
    'reward',
    'mean of groups',
    '> 0',
    'deviation of clipped rewards inside a group, n - 1; a group of one counts 0',
  ),
  group_all_equal_ratio: row(
    '1',
    'mean of groups',
    '< 0.8',
    'groups with equal rewards: they teach a group estimator nothing',
  ),
  reward_clipped_ratio: row('1', 'mean of rollouts', '0', 'rollouts whose reward reward.clip_range moved'),
  return_mean: row('reward', 'mean of trained tokens', 'near 0 with a baseline', 'advantage before whitening'),
  groups: row('groups', 'sum', 'train.batch_size', 'groups trained'),
  prompts_read: row('prompts', 'sum', 'train.batch_size', 'prompts dispatched or left out as dropped_prompt_*'),
  dropped_prompt_too_long: row('prompts', 'sum', '0', 'prompts longer than data.max_prompt_len, left out'),
  dropped_prompt_unrenderable: row('prompts', 'sum', '0', 'prompts that the chat template cannot render, left out'),
  rollouts: row('rollouts', 'sum', 'groups x rollout.n_samples_per_prompt', 'rollouts trained'),
  turns_mean: row('turns', 'mean of rollouts', 'as the task needs', 'turns of the policy'),
  response_tokens_mean: row('tokens', 'mean of rollouts', 'steady', 'tokens the policy sampled, all turns together'),
  refilled: row(
    'rollouts',
    'sum',
    '0',
    'rollouts that ended without a reward and were tried again (rollout.failed_members)',
  ),
  stale_tokens_mean: row(
    'tokens',
    'mean of rollouts',
    'as response_tokens_mean',
    'sampled for rollouts of groups dropped as stale: more than response_tokens_mean = long ones are lost',
  ),
  truncated_ratio: row('1', 'mean of rollouts', '< 0.2', 'rollouts cut by a token, turn or context limit'),

  loss: row('1', 'sum', 'near 0', 'policy loss over the trained tokens of the batch, normalised once over all ranks'),
  grad_norm: row('1', 'max', 'steady', 'global L2 norm of the gradient before clipping'),
  lr: row('1', 'last', 'as scheduled', 'learning rate of the step'),
  entropy: row(
    'nats',
    'mean of credited tokens',
    'falls slowly',
    'of the next-token distribution at the rollout temperature',
  ),
  clip_ratio: row(
    '1',
    'mean of credited tokens',
    '< 0.3',
    'tokens whose importance ratio left actor.eps_clip_low_high on the active side',
  ),
  is_filter_ratio: row(
    '1',
    'mean of credited tokens',
    '< 0.05',
    'tokens that the importance correction masked or clipped',
  ),
  is_weight_mean: row(
    '1',
    'mean of credited tokens',
    'near 1',
    'exp(trainer logprob before the step - rollout logprob), before it is masked or clipped',
  ),
  skipped: row('1', 'max', '0', '1 when loss or gradient was not finite and the step was not taken'),
  tokens_trained: row('tokens', 'sum', '> 0', 'tokens with lossMask 1, the denominator of the loss'),
  tokens_credited: row(
    'tokens',
    'sum',
    '> 0',
    'those of rows with an advantage other than 0; the others have no gradient and are not sent to the trainer',
  ),
  dummy_micro_batches: row('1', 'sum', 'few', 'empty micro-batches that ranks ran to keep step with the others'),

  logprob_mismatch_mean: row(
    'nats',
    'mean of fresh tokens',
    '< 1e-3 (bf16: 0.1)',
    '|trainer logprob before the step - rollout logprob| of credited tokens of the version trained; null without any',
  ),
  logprob_mismatch_max: row('nats', 'max', '< 1e-4 in float32', 'the same, worst token'),
  logprob_mismatch_k3: row(
    'nats',
    'mean of fresh tokens',
    'near 0',
    'exp(d) - 1 - d with d = trainer - rollout logprob',
  ),
  policy_drift_mean: row(
    'nats',
    'mean of stale tokens',
    'small',
    '|trainer logprob before the step - rollout logprob| of credited tokens of older versions; null without any',
  ),
  staleness_mean: row(
    'refits',
    'mean of trained tokens',
    'below staleness_max',
    'the same as staleness_max, on average',
  ),
  staleness_max: row('refits', 'max', '<= train.max_staleness', 'version trained minus version that sampled the token'),

  tokens_generated: row('tokens', 'sum', '> 0', 'tokens engines sampled during the step, dropped rollouts included'),
  cached_token_ratio: row(
    '1',
    'ratio of sums',
    '> 0 with several turns',
    'prompt tokens an engine had in its cache / prompt tokens',
  ),
  time_generation_s: row('s', 'sum', 'most of the step', 'waiting for the batch'),
  time_train_s: row('s', 'sum', 'steady', 'forward, backward and optimizer'),
  time_drain_s: row('s', 'sum', '0 when partial', 'waiting for rollouts to end before a refit'),
  time_refit_s: row('s', 'sum', 'small', 'push, load and verify'),
  time_refit_paused_s: row('s', 'max', 'smaller', 'the part of it in which engines stood still'),
  time_step_s: row('s', 'sum', 'steady', 'the whole step'),
  engine_idle_s: row('s', 'mean of engines', 'small', 'step time in which an engine sampled nothing'),
  trainer_idle_s: row('s', 'sum', 'small', 'step time in which the trainer computed nothing'),
  loop_lag_ms_max: row('ms', 'max', '< 20', 'longest time the controller could not answer'),
  engines_refitted: row('engines', 'last', 'engine.num_engines', 'engines that took the new weights'),
  refit_verified_max: row(
    'nats',
    'max',
    '< 1e-4 in float32',
    'engine against trainer logprobs of the probes, where probed',
  ),
  retries: row('requests', 'sum', '0', 'requests sent again by the bus'),
  engine_limit_mean: row(
    'requests',
    'mean of engines',
    'engine.max_requests',
    'requests an engine is given at once; fewer where its key/value cache was too small',
  ),
  engine_preemptions: row('requests', 'sum', '0', 'requests that lost their place in a full key/value cache'),
  engines_killed: row(
    'engines',
    'sum',
    '0',
    'engines killed for a stall, for lost tokens or for weights that were not verified',
  ),
  restarts: row('workers', 'sum', '0', 'workers started again since the run began'),

  eval_reward_mean: row(
    'reward',
    'mean of prompts',
    'rises',
    'held-out reward, sampled; a rollout nobody judged counts 0',
  ),
  eval_pass_at_k: row('1', 'mean of prompts', 'rises', 'held-out prompts with a sample of reward >= 1'),
  eval_greedy_reward_mean: row('reward', 'mean of prompts', 'rises', 'held-out reward at temperature 0'),
  eval_constant_best: row(
    '1',
    'last',
    'well below the policy',
    'held-out prompts that the best single answer would get right',
  ),
  eval_num_prompts: row('prompts', 'sum', '>= 300', 'held-out prompts'),
  eval_dropped_prompts: row(
    'prompts',
    'sum',
    '0',
    'held-out prompts left out of it: too long, or the chat template cannot render them',
  ),
  eval_unjudged: row('rollouts', 'sum', '0', 'held-out rollouts that ended without a reward'),
  time_eval_s: row('s', 'sum', 'small', 'the whole evaluation'),
} as const satisfies Record<string, Metric>;

type Named = keyof typeof TABLE;
type DropReason = EndReason | 'stale' | 'filtered' | 'incomplete_group' | 'other_distribution' | 'invalid_trajectory';
export type MetricName = Named | `dropped_${DropReason}` | `info_${string}`;
export type MetricValues = Readonly<Record<string, number | null | undefined>>; // checked against the table at the writer

const DROP_MEANINGS: Readonly<Record<Exclude<DropReason, EndReason>, string>> = {
  stale: 'groups older than train.max_staleness',
  filtered: 'groups a filter removed',
  incomplete_group: 'groups with too few judged members',
  other_distribution: 'rollouts sampled from another distribution than the policy at its temperature',
  invalid_trajectory: 'rollouts without a token to train or with unaligned columns',
};
const DROPPED: Readonly<Record<string, Metric>> = Object.fromEntries([
  ...END_REASONS.map((reason) => [
    `dropped_${reason}`,
    row('rollouts', 'sum', '0', `rollouts that ended ${reason} and are not trained`),
  ]),
  ...Object.entries(DROP_MEANINGS).map(([reason, meaning]) => [`dropped_${reason}`, row('1', 'sum', '0', meaning)]),
]);

/** Every metric by name. Numbers that agents put into `Result.info` come besides, as `info_<key>`. */
export const METRICS: Readonly<Record<string, Metric>> = { ...TABLE, ...DROPPED };

/** What every line of a step has (null when it is not known). */
const EVERY_STEP = [
  'step',
  'policy_version',
  'reward_mean',
  'logprob_mismatch_max',
  'logprob_mismatch_mean',
  'staleness_max',
  'tokens_trained',
  'tokens_generated',
  'time_generation_s',
  'time_train_s',
  'time_refit_s',
  'time_step_s',
  'grad_norm',
  'loss',
  'loop_lag_ms_max',
] as const satisfies readonly Named[];
const EVERY_EVALUATION = [
  'step',
  'policy_version',
  'eval_reward_mean',
  'eval_num_prompts',
] as const satisfies readonly Named[];

/** The table of the README, in Markdown; a test compares them. */
export function metricsTable(): string {
  const rows = Object.entries(METRICS).map(
    ([name, m]) => `| \`${name}\` | ${m.meaning.replaceAll('|', '\\|')} | ${m.unit} | ${m.reduction} | ${m.healthy} |`,
  );
  return ['| metric | meaning | unit | reduction | healthy |', '|---|---|---|---|---|', ...rows].join('\n');
}

// ---- metrics.jsonl ----

/**
 * Appends to runs/<name>/metrics.jsonl. `step` is the one the run continues after: lines of later steps, and a line torn by
 * a crash, are moved aside when the writer is made. 0 begins anew.
 */
export class MetricsWriter {
  readonly #path: string;

  constructor(runDir: string, step: number) {
    this.#path = join(runDir, 'metrics.jsonl');
    if (existsSync(this.#path)) setAside(runDir, this.#path, step);
  }

  /** One line, of a step or (when it has eval_reward_mean) of an evaluation. Throws on names the table does not have. */
  write(values: MetricValues): void {
    const unknown = Object.keys(values).filter((name) => !Object.hasOwn(METRICS, name) && !name.startsWith('info_'));
    if (unknown.length > 0) throw new Error(`Metrics not in the table of metrics.ts: ${unknown.join(', ')}`);
    const required: readonly string[] = values.eval_reward_mean === undefined ? EVERY_STEP : EVERY_EVALUATION;
    const missing = required.filter((name) => values[name] === undefined);
    if (missing.length > 0) throw new Error(`Metrics missing from step ${values.step}: ${missing.join(', ')}`);
    // JSON.stringify writes NaN and infinity as null and leaves undefined out.
    try {
      appendFileSync(this.#path, `${JSON.stringify({ ...values, time_unix_s: Date.now() / 1000 })}\n`);
    } catch (error) {
      throw new Error(`Cannot write ${this.#path}: ${(error as Error).message}`);
    }
  }
}

function setAside(runDir: string, path: string, step: number): void {
  const kept: string[] = [];
  const moved: string[] = [];
  for (const line of readFileSync(path, 'utf8').split('\n')) {
    if (line === '') continue;
    const at = stepOf(line);
    (at !== null && at <= step && step > 0 ? kept : moved).push(`${line}\n`);
  }
  if (moved.length === 0) return;
  let n = 1;
  while (existsSync(join(runDir, `metrics.${n}.jsonl`))) n++;
  writeFileSync(join(runDir, `metrics.${n}.jsonl`), moved.join(''));
  writeFileSync(`${path}.new`, kept.join(''));
  renameSync(`${path}.new`, path);
}

/** null for a line that is not whole. */
function stepOf(line: string): number | null {
  try {
    const { step } = JSON.parse(line) as { step?: unknown };
    return typeof step === 'number' ? step : null;
  } catch {
    return null;
  }
}

// ---- Terminal ----

/** One readable line a step. */
export function formatStep(values: MetricValues, numSteps: number): string {
  const width = String(numSteps).length;
  const dropped = Object.entries(values).reduce(
    (n, [name, value]) => n + (/^dropped_(?!prompt_)/.test(name) ? (value ?? 0) : 0),
    0,
  );
  const time = (name: string) => fixed(values[name], 2);
  return [
    `step ${String(values.step).padStart(width)}/${numSteps}`,
    `reward ${fixed(values.reward_mean, 3)}`,
    `loss ${fixed(values.loss, 4).padStart(7)}`,
    `grad ${fixed(values.grad_norm, 3)}`,
    `mismatch ${values.logprob_mismatch_max === null ? '-' : exponential(values.logprob_mismatch_max)}`,
    `tokens ${values.tokens_trained ?? '?'}`,
    `${time('time_step_s')} s (gen ${time('time_generation_s')} train ${time('time_train_s')} refit ${time('time_refit_s')})`,
    ...(dropped > 0 ? [`dropped ${dropped}`] : []),
    ...(values.skipped ? ['SKIPPED: not finite'] : []),
  ].join('  ');
}

function fixed(value: number | null | undefined, digits: number): string {
  return typeof value === 'number' && Number.isFinite(value) ? value.toFixed(digits) : '?';
}

function exponential(value: number | null | undefined): string {
  return typeof value === 'number' && Number.isFinite(value) ? value.toExponential(1) : '?';
}

const BAR_CELLS = 20;
const REDRAW_MS = 100; // a terminal
const PLAIN_LINE_MS = 30_000; // a file or pipe, which keeps every line

export interface ProgressOutput {
  readonly isTTY?: boolean;
  readonly columns?: number;
  write(text: string): unknown;
}

/**
 * What is waited for, while it is waited for, on standard error: a bar that is redrawn on a terminal, a line every 30 s
 * elsewhere. It has no timer: `show` is called as things happen. `clear` comes before any other output.
 */
export class Progress {
  readonly #output: ProgressOutput;
  readonly #now: () => number; // ms
  #since: number | null = null; // first `show` after a `clear`
  #last = Number.NEGATIVE_INFINITY; // when something was written
  #drawn = false; // a bar stands on the terminal's last line

  constructor(output: ProgressOutput = process.stderr, now: () => number = () => performance.now()) {
    this.#output = output;
    this.#now = now;
  }

  /** `fraction` is clamped to 0..1. */
  show(text: string, fraction: number): void {
    const now = this.#now();
    // A wait that is over soon leaves no line in a file.
    if (this.#since === null) {
      this.#since = now;
      if (!this.#output.isTTY) this.#last = Math.max(this.#last, now);
    }
    if (now - this.#last < (this.#output.isTTY ? REDRAW_MS : PLAIN_LINE_MS)) return;
    this.#last = now;
    const seconds = `${Math.round((now - this.#since) / 1000)} s`;
    if (!this.#output.isTTY) {
      this.#output.write(`${text} (${seconds})\n`);
      return;
    }
    const cells = Math.round(Math.min(Math.max(fraction, 0), 1) * BAR_CELLS);
    const bar = `[${'#'.repeat(cells)}${'.'.repeat(BAR_CELLS - cells)}] ${text}  ${seconds}`;
    this.#output.write(`\r\x1b[2K${bar.slice(0, (this.#output.columns ?? 80) - 1)}`);
    this.#drawn = true;
  }

  clear(): void {
    if (this.#drawn) this.#output.write('\r\x1b[2K');
    this.#drawn = false;
    this.#since = null;
    if (this.#output.isTTY) this.#last = Number.NEGATIVE_INFINITY;
  }
}
