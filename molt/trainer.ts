/**
 * The FSDP2 ranks as one: optimizer steps, forward passes, weights, checkpoints.
 *
 * Invariants
 *   1. Every rank gets the same number of micro-batches and the same global denominators, so the gradient does not
 *      depend on how the batch is split.
 *   2. Replies are sums and maxima, never means: sums add up over ranks, maxima are compared.
 *   3. The first rank that fails or exits ends the whole group, with its traceback.
 * Called by loop.ts, refit.ts and checkpoint.ts. Talks to workers/trainer.py (protocol.ts: rows, run, logprobs,
 * push_weights, save, restore, export). Elsewhere called: learner, actor worker group.
 */
import { orFailure } from './failure.ts';
import type { Launcher, Worker } from './launch.ts';
import { lastWords } from './launch.ts';
import { type BatchPlan, rowColumns } from './packing.ts';
import type { Frames, ReplyFields } from './protocol.ts';
import type { Sample } from './types.ts';
import { invariant } from './types.ts';

/** Tokens per `rows` message: 17 bytes each, far below the message limit. */
const PART_TOKENS = 1_000_000;

export interface LossOptions {
  readonly clipLowHigh: readonly [number, number];
  readonly isLevel: 'off' | 'token';
  readonly isMode: 'mask' | 'clip' | 'trunc';
  readonly isThreshold: readonly [number, number];
}

export interface StepResult {
  readonly sums: Readonly<Record<string, number>>;
  readonly maxima: Readonly<Record<string, number>>;
}

export type TensorTable = ReplyFields<'push_weights'>['tensors'];

export class Trainer {
  readonly #ranks: readonly Worker[];
  readonly #launcher: Launcher;
  readonly #loss: LossOptions;
  readonly #temperature: number;
  readonly #packed: boolean;
  #reject: (error: Error) => void = () => {};
  #closing = false;
  /** Rejects when a rank is lost, with its last words. Never resolves. */
  readonly failed: Promise<never>;
  readonly #orFailed: ReturnType<typeof orFailure>;
  #busyMs = 0;

  constructor(args: {
    ranks: readonly Worker[];
    launcher: Launcher;
    loss: LossOptions;
    temperature: number;
    packed: boolean;
  }) {
    this.#ranks = args.ranks;
    this.#launcher = args.launcher;
    this.#loss = args.loss;
    this.#temperature = args.temperature;
    this.#packed = args.packed;
    this.failed = new Promise((_, reject) => {
      this.#reject = reject;
    });
    this.failed.catch(() => {}); // a run that ends for another reason never looks at it
    this.#orFailed = orFailure(this.failed);
    for (const rank of this.#ranks) void rank.peer.lost.then((reason) => this.#onLost(rank, reason)); // lost never rejects
  }

  /** All ranks have loaded the model. Rejects with the first cause. */
  async ready(): Promise<void> {
    await this.#or(Promise.all(this.#ranks.map((rank) => rank.peer.ready)));
  }

  /** Seconds that requests took since the last call. */
  takeBusy(): number {
    const seconds = this.#busyMs / 1000;
    this.#busyMs = 0;
    return seconds;
  }

  /**
   * One optimizer step over all samples of `plan`. `denominator` is the batch's count of trained tokens; `old` (by
   * sample) is left out when this is the only step on the batch, for then the ratio is 1.
   */
  async step(args: {
    step: number;
    version: number;
    samples: readonly Sample[];
    plan: BatchPlan;
    denominator: number;
    lr: number;
    old: readonly Float32Array[] | null;
  }): Promise<StepResult> {
    const { step, version, samples, plan, denominator, lr, old } = args;
    invariant(
      plan.ranks.length === this.#ranks.length,
      `plan for ${plan.ranks.length} ranks, there are ${this.#ranks.length}`,
    );
    const [low, high] = this.#loss.clipLowHigh;
    const [isLow, isHigh] = this.#loss.isThreshold;
    const replies = await this.#timed(
      this.#ranks.map(async (rank, r) => {
        const share = plan.ranks[r];
        invariant(share, `no plan for rank ${r}`);
        const parts = rowParts(share.samples, samples, old);
        const sent = parts.map((frames, part) => rank.peer.request('rows', { step, part, of: parts.length }, frames));
        const run = rank.peer.request('run', {
          step,
          version,
          micro_batches: share.microBatches,
          packed: this.#packed,
          denominators: { tokens: denominator },
          lr,
          temperature: this.#temperature,
          loss: {
            clip_low: low,
            clip_high: high,
            is_level: this.#loss.isLevel,
            is_mode: this.#loss.isMode,
            is_low: isLow,
            is_high: isHigh,
          },
        });
        return (await Promise.all([run, ...sent]))[0].fields;
      }),
    );
    return merge(replies);
  }

  /** Logprobs of every sample before the first optimizer step on its batch, by sample. Each rank does its share. */
  async oldLogprobs(samples: readonly Sample[], plan: BatchPlan): Promise<Float32Array[]> {
    const out: Float32Array[] = new Array(samples.length);
    await this.#timed(
      this.#ranks.map(async (rank, r) => {
        const mine = plan.ranks[r]?.samples ?? [];
        const rows = mine.map((i) => (samples[i] as Sample).trajectory.ids);
        const { frames } = await rank.peer.request(
          'logprobs',
          { which: 'policy', temperature: this.#temperature },
          flatRows(rows),
        );
        let at = 0;
        for (const [k, row] of rows.entries()) {
          out[mine[k] as number] = frames.logprobs.slice(at, at + row.length);
          at += row.length;
        }
      }),
    );
    return out;
  }

  /** Logprobs of whole rows under the trainer's weights; position k belongs to token k, the first of a row is 0. */
  async logprobs(rows: readonly Int32Array[], temperature: number): Promise<Float32Array> {
    const frames = flatRows(rows);
    // Every rank does the same forward, since a sharded model computes together.
    const replies = await this.#timed(
      this.#ranks.map((rank) => rank.peer.request('logprobs', { which: 'policy', temperature }, frames)),
    );
    return (replies[0] as { frames: { logprobs: Float32Array } }).frames.logprobs;
  }

  /** Write hub-named weights to `path`. */
  async pushWeights(version: number, path: string): Promise<{ tensors: TensorTable; bytes: number }> {
    const replies = await this.#timed(
      this.#ranks.map((rank) => rank.peer.request('push_weights', { version, transport: 'file', path })),
    );
    const first = replies[0]?.fields;
    invariant(first && first.tensors.length > 0, 'the trainer pushed no tensors');
    return first;
  }

  async save(step: number, path: string): Promise<void> {
    await this.#timed(this.#ranks.map((rank) => rank.peer.request('save', { step, path })));
  }

  /** The step that the checkpoint was saved at. */
  async restore(path: string): Promise<number> {
    const replies = await this.#timed(this.#ranks.map((rank) => rank.peer.request('restore', { path })));
    return (replies[0] as { fields: { step: number } }).fields.step;
  }

  async export(path: string): Promise<void> {
    await this.#timed(this.#ranks.map((rank) => rank.peer.request('export', { path })));
  }

  close(): void {
    this.#closing = true;
  }

  async #timed<T>(requests: Promise<T>[]): Promise<T[]> {
    const start = performance.now();
    try {
      return await this.#or(Promise.all(requests));
    } finally {
      this.#busyMs += performance.now() - start;
    }
  }

  /** A rank that dies must not leave us waiting for the ranks that wait for it. */
  #or<T>(work: Promise<T>): Promise<T> {
    return this.#orFailed(work);
  }

  #onLost(rank: Worker, reason: Error): void {
    if (this.#closing) return;
    this.#closing = true;
    this.#reject(new Error(`Trainer rank ${rank.spec.id} is gone: ${reason.message}\n${lastWords(rank)}`));
    for (const other of this.#ranks) if (other !== rank) void this.#launcher.kill(other); // they wait in a collective
  }
}

/** Ids back to back, with the length of each row. */
export function flatRows(rows: readonly Int32Array[]): { ids: Int32Array; lengths: Int32Array } {
  const ids = new Int32Array(rows.reduce((n, row) => n + row.length, 0));
  let at = 0;
  for (const row of rows) {
    ids.set(row, at);
    at += row.length;
  }
  return { ids, lengths: Int32Array.from(rows, (row) => row.length) };
}

/** The `rows` messages of one rank: at least one, each of at most PART_TOKENS tokens or one row. */
function rowParts(
  mine: readonly number[],
  samples: readonly Sample[],
  old: readonly Float32Array[] | null,
): Frames<'rows'>[] {
  const parts: number[][] = [[]];
  let tokens = 0;
  for (const i of mine) {
    const length = (samples[i] as Sample).trajectory.ids.length;
    if (tokens > 0 && tokens + length > PART_TOKENS) {
      parts.push([]);
      tokens = 0;
    }
    (parts.at(-1) as number[]).push(i);
    tokens += length;
  }
  return parts.map((part) => ({
    ...rowColumns(part.map((i) => samples[i] as Sample)),
    ...(old && { old_logprobs: Float32Array.from(part.flatMap((i) => Array.from(old[i] as Float32Array))) }),
  }));
}

function merge(replies: readonly ReplyFields<'run'>[]): StepResult {
  const sums: Record<string, number> = {};
  const maxima: Record<string, number> = {};
  for (const reply of replies) {
    for (const [key, value] of Object.entries(reply.sums)) sums[key] = (sums[key] ?? 0) + value;
    for (const [key, value] of Object.entries(reply.maxima))
      maxima[key] = Math.max(maxima[key] ?? Number.NEGATIVE_INFINITY, value);
  }
  return { sums, maxima };
}

/** The learning rate of a step: linear warm-up, then constant, or linear or cosine down to `minRatio` of `lr`. */
export function learningRate(args: {
  step: number; // 0 = first
  steps: number;
  lr: number;
  schedule: 'constant' | 'linear' | 'cosine';
  warmupRatio: number;
  minRatio: number;
}): number {
  const { step, steps, lr, schedule, warmupRatio, minRatio } = args;
  const warmup = Math.floor(steps * warmupRatio);
  if (step < warmup) return (lr * (step + 1)) / warmup;
  if (schedule === 'constant') return lr;
  const progress = Math.min(1, (step - warmup) / Math.max(1, steps - warmup));
  const shape = schedule === 'linear' ? 1 - progress : (1 + Math.cos(Math.PI * progress)) / 2;
  return lr * (minRatio + (1 - minRatio) * shape);
}
