/**
 * What a step reports: rollouts, sums of the ranks and counts of the engines become the numbers of metrics.ts, and
 * records of the ledger.
 *
 * A mean is taken once, here: the trainer gives sums over the tokens it was sent, groups give rollouts. Called by loop.ts.
 */
import type { Filter } from './data.ts';
import { standardDeviation } from './estimators.ts';
import type { Generator } from './generator.ts';
import type { Ledger, LedgerArray, LedgerArrays, LedgerEvent } from './ledger.ts';
import type { Progress } from './metrics.ts';
import type { Split } from './sources.ts';
import { Stretch } from './stretch.ts';
import type { StepResult } from './trainer.ts';
import type { Group, Rollout, Trajectory } from './types.ts';

// ---- Numbers ----

type MetricLine = Readonly<Record<string, number | null>>;

/** What the rollouts of a batch were like. Means are over rollouts, so a rollout in many pieces counts once. */
export async function batchMetrics(groups: readonly Group[], version: number): Promise<Record<string, number>> {
  const stretch = new Stretch();
  const rollouts = groups.flatMap((group) => group.rollouts);
  const rewards = rollouts.map((rollout) => rollout.reward ?? 0);
  let oldest = version;
  let responseTokens = 0;
  let staleness = 0; // of all trained tokens
  for (const { trajectories } of rollouts) {
    for (const { versions, lossMask } of trajectories) {
      for (let k = 0; k < versions.length; k++) {
        if (!lossMask[k]) continue;
        responseTokens++;
        oldest = Math.min(oldest, versions[k] as number);
        staleness += version - (versions[k] as number);
      }
      await stretch.pause();
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
    staleness_mean: responseTokens > 0 ? staleness / responseTokens : 0,
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

/**
 * The trainer's sums over the tokens it was sent become means here, once. Engine and trainer can be compared only on tokens
 * of the version trained: the mismatch of a step without any is null, as is the drift of one without a stale token.
 */
export function stepMetrics({ sums, maxima }: StepResult) {
  const perToken = (key: string) => (sums[key] ?? 0) / (sums.tokens ?? 0);
  const fresh = sums.fresh_tokens ?? 0;
  const stale = (sums.tokens ?? 0) - fresh;
  const perFresh = (key: string) => (fresh > 0 ? (sums[key] ?? 0) / fresh : null);
  return {
    loss: sums.loss ?? 0,
    grad_norm: maxima.grad_norm ?? 0,
    logprob_mismatch_mean: perFresh('mismatch_abs'),
    logprob_mismatch_max: fresh > 0 ? (maxima.mismatch_abs ?? 0) : null,
    logprob_mismatch_k3: perFresh('mismatch_k3'),
    policy_drift_mean: stale > 0 ? (sums.drift_abs ?? 0) / stale : null,
    entropy: perToken('entropy'),
    clip_ratio: perToken('clipped'),
    is_filter_ratio: perToken('is_filtered'),
    is_weight_mean: perToken('is_weight'),
    skipped: maxima.skipped ?? 0,
  };
}

/** What the first pass over a batch saw of engine and trainer, everything else of the last. */
export function withMismatchOf(first: StepResult, last: StepResult): StepResult {
  const only = (values: StepResult['sums']) =>
    Object.fromEntries(Object.entries(values).filter(([key]) => /^(mismatch|fresh|drift|is_weight)/.test(key)));
  return { sums: { ...last.sums, ...only(first.sums) }, maxima: { ...last.maxima, ...only(first.maxima) } };
}

export function generatorMetrics(generator: Generator, seconds: number) {
  const counts = generator.takeCounts();
  return {
    tokens_generated: counts.tokens,
    cached_token_ratio: counts.promptTokens > 0 ? counts.cachedTokens / counts.promptTokens : 0,
    engine_idle_s: Math.max(0, seconds - counts.busy_s),
    engine_limit_mean: counts.limitMean,
    engine_preemptions: counts.preemptions,
    engines_killed: counts.killed,
  };
}

/** A finished rollout as the ledger keeps it (history.ts reads it). */
export function rolloutRecord(rollout: Rollout): [LedgerEvent, LedgerArrays] {
  const { trajectories, ...fields } = rollout;
  const column = <A extends LedgerArray>(type: new (n: number) => A, of: (t: Trajectory) => A): A => {
    const out = new type(trajectories.reduce((n, t) => n + t.ids.length, 0));
    let at = 0;
    for (const trajectory of trajectories) {
      out.set(of(trajectory), at);
      at += trajectory.ids.length;
    }
    return out;
  };
  const spans = trajectories.flatMap((t, row) =>
    t.spans.flatMap(({ source, version, turn, from, to }) => [
      row,
      source === 'policy' ? 1 : 0,
      version,
      turn,
      from,
      to,
    ]),
  );
  return [
    { kind: 'finished', ...fields },
    {
      lengths: Int32Array.from(trajectories, (t) => t.ids.length),
      ids: column(Int32Array, (t) => t.ids),
      loss_mask: column(Uint8Array, (t) => t.lossMask),
      logprobs: column(Float32Array, (t) => t.logprobs),
      versions: column(Int32Array, (t) => t.versions),
      turns: column(Int32Array, (t) => t.turns),
      spans: Int32Array.from(spans),
    },
  ];
}

/** Of an evaluation: what became of it, without its tokens. */
export function evaluationRecord(rollout: Rollout): LedgerEvent {
  const { rolloutId, attempt, reason, detail, reward, score, turns } = rollout;
  return { kind: 'evaluated', rolloutId, attempt, reason, detail, reward, score, turns, tokens: tokensOf(rollout) };
}

/** What is the same on every machine must come out the same: the largest relative difference, and of which metric. */
export function differenceOf(computed: MetricLine, recorded: MetricLine): { name: string; difference: number } {
  let worst = { name: '', difference: 0 };
  for (const [name, value] of Object.entries(computed)) {
    const before = recorded[name];
    if (value === before || typeof value !== 'number' || typeof before !== 'number') continue;
    const difference = Math.abs(value - before) / Math.max(Math.abs(before), Math.abs(value)); // at most 2
    if (difference > worst.difference) worst = { name, difference };
  }
  return worst;
}

/** Tokens the policy sampled for it. */
export function tokensOf(rollout: Rollout): number {
  return rollout.trajectories.reduce((n, t) => n + sum(t.lossMask), 0);
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
