/**
 * What a step reports: rollouts, sums of the ranks and counts of the engines become the numbers of metrics.ts, and
 * records of the ledger.
 *
 * A mean is taken once, here: the trainer gives sums over the tokens it was sent, groups give rollouts. Called by loop.ts.
 */
import type { Filter } from './data.ts';
import { standardDeviation } from './estimators.ts';
import type { Generator } from './generator.ts';
import type { Ledger } from './ledger.ts';
import type { Progress } from './metrics.ts';
import type { Split } from './sources.ts';
import type { StepResult } from './trainer.ts';
import type { Group, Rollout } from './types.ts';

// ---- Numbers ----

/** What the rollouts of a batch were like. Means are over rollouts, so a rollout in many pieces counts once. */
export function batchMetrics(groups: readonly Group[], version: number): Record<string, number> {
  const rollouts = groups.flatMap((group) => group.rollouts);
  const rewards = rollouts.map((rollout) => rollout.reward ?? 0);
  let oldest = version;
  let responseTokens = 0;
  for (const { trajectories } of rollouts) {
    for (const { versions, lossMask } of trajectories) {
      for (let k = 0; k < versions.length; k++) {
        if (!lossMask[k]) continue;
        responseTokens++;
        oldest = Math.min(oldest, versions[k] as number);
      }
    }
  }
  const n = rollouts.length;
  return {
    groups: groups.length,
    rollouts: n,
    reward_mean: sum(rewards) / n,
    reward_std: standardDeviation(rewards),
    turns_mean: sum(rollouts.map((r) => r.turns)) / n,
    response_tokens_mean: responseTokens / n,
    truncated_ratio: rollouts.filter((r) => r.truncated).length / n,
    staleness_max: version - oldest,
    ...infoMeans(rollouts),
  };
}

/** Numbers of the environment: the mean over the rollouts that gave one. */
function infoMeans(rollouts: readonly Rollout[]): Record<string, number> {
  const values = new Map<string, number[]>();
  for (const { info } of rollouts) {
    for (const [key, value] of Object.entries(info)) values.set(key, [...(values.get(key) ?? []), value]);
  }
  return Object.fromEntries([...values].map(([key, list]) => [`info_${key}`, sum(list) / list.length]));
}

/** The trainer's sums over the tokens it was sent become means here, once. */
export function stepMetrics({ sums, maxima }: StepResult): Record<string, number> {
  const perToken = (key: string) => (sums[key] ?? 0) / (sums.tokens ?? 0);
  return {
    loss: sums.loss ?? 0,
    grad_norm: maxima.grad_norm ?? 0,
    logprob_mismatch_mean: perToken('mismatch_abs'),
    logprob_mismatch_max: maxima.mismatch_abs ?? 0,
    logprob_mismatch_k3: perToken('mismatch_k3'),
    entropy: perToken('entropy'),
    clip_ratio: perToken('clipped'),
    is_filter_ratio: perToken('is_filtered'),
    skipped: maxima.skipped ?? 0,
  };
}

export function withMismatchOf(first: StepResult, last: StepResult): StepResult {
  const only = (values: StepResult['sums']) =>
    Object.fromEntries(Object.entries(values).filter(([key]) => key.startsWith('mismatch')));
  return { sums: { ...last.sums, ...only(first.sums) }, maxima: { ...last.maxima, ...only(first.maxima) } };
}

export function generatorMetrics(generator: Generator, stepSeconds: number): Record<string, number> {
  const counts = generator.takeCounts();
  return {
    tokens_generated: counts.tokens,
    cached_token_ratio: counts.promptTokens > 0 ? counts.cachedTokens / counts.promptTokens : 0,
    engine_idle_s: Math.max(0, stepSeconds - counts.busy_s),
    engine_limit_mean: counts.limitMean,
    engine_preemptions: counts.preemptions,
    engines_killed: counts.killed,
  };
}

export function recordRollout(ledger: Ledger, rollout: Rollout): void {
  const versions = rollout.trajectories.flatMap((t) =>
    t.spans.filter((s) => s.source === 'policy').map((s) => s.version),
  );
  ledger.record({
    kind: 'finished',
    rolloutId: rollout.rolloutId,
    groupId: rollout.groupId,
    attempt: rollout.attempt,
    reason: rollout.reason,
    detail: rollout.detail,
    reward: rollout.reward,
    turns: rollout.turns,
    tokens: rollout.trajectories.reduce((n, t) => n + sum(t.lossMask), 0),
    versions: versions.length > 0 ? [Math.min(...versions), Math.max(...versions)] : [],
  });
}

// ---- Prompts that are left out ----

interface PromptLogArgs {
  readonly ledger: Ledger;
  readonly progress: Progress;
  readonly maxPromptLen: number;
  readonly say: (line: string) => void;
}
type PromptDrop = 'prompt_too_long' | 'prompt_unrenderable';

/** What became of the prompts that data.ts passed: counts for the step and for the end; the first of a kind is said at once. */
export class PromptLog {
  read = 0; // training prompts since the last step, dispatched or left out
  #readBefore = 0;
  readonly #args: PromptLogArgs;
  readonly #counts: Record<Split, Map<PromptDrop, number>> = { train: new Map(), heldout: new Map() };
  #step = new Map<PromptDrop, number>();

  constructor(args: PromptLogArgs) {
    this.#args = args;
  }

  dropped(split: Split, { prompt, length }: Parameters<Filter['onDropped']>[0]): void {
    const { ledger, maxPromptLen, progress, say } = this.#args;
    const { source, epoch, index } = prompt;
    const reason = typeof length === 'number' ? 'prompt_too_long' : 'prompt_unrenderable';
    ledger.record({ kind: 'prompt_dropped', split, source, epoch, index, reason, detail: length });
    const counts = this.#counts[split];
    if (!counts.has(reason)) {
      const why =
        typeof length === 'number'
          ? `it has ${length} tokens, data.max_prompt_len is ${maxPromptLen}`
          : `the chat template cannot render it: ${length}`;
      progress.clear();
      say(`Left out prompt ${index + 1} of ${source}: ${why}; more of them are counted`);
    }
    counts.set(reason, (counts.get(reason) ?? 0) + 1);
    if (split === 'heldout') return;
    this.read++;
    this.#step.set(reason, (this.#step.get(reason) ?? 0) + 1);
  }

  /** Metrics of a step. */
  takeStep(): Record<string, number> {
    const counts = Object.fromEntries([...this.#step].map(([reason, count]) => [`dropped_${reason}`, count]));
    const out = { prompts_read: this.read, ...counts };
    this.#readBefore += this.read;
    this.read = 0;
    this.#step = new Map();
    return out;
  }

  get totalRead(): number {
    return this.#readBefore + this.read;
  }

  get hasDropped(): boolean {
    return this.#counts.train.size > 0;
  }

  summary(split: Split, of: number): string {
    const { maxPromptLen } = this.#args;
    const [long, odd] = [
      this.#counts[split].get('prompt_too_long') ?? 0,
      this.#counts[split].get('prompt_unrenderable') ?? 0,
    ];
    const kind = split === 'train' ? 'training prompts read' : 'held-out prompts';
    return `Left out ${long + odd} of ${of} ${kind}: ${long} longer than ${maxPromptLen} tokens, ${odd} that the chat template cannot render`;
  }
}

export function sum(values: ArrayLike<number>): number {
  let total = 0;
  for (let i = 0; i < values.length; i++) total += values[i] as number;
  return total;
}
