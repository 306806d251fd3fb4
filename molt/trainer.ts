/**
 * The FSDP2 ranks as one: optimizer steps, forward passes, weights, checkpoints.
 *
 * Invariants
 *   1. Every rank gets the same number of micro-batches and the same global denominators, so the gradient does not
 *      depend on how the batch is split.
 *   2. Replies are sums and maxima, never means: sums add up over ranks, maxima are compared.
 *   3. The first rank that exits ends the whole group, with its traceback: requests reject with TrainerLost, until
 *      `restart`. What the weights had learned is then in the checkpoint and the ledger, and loop.ts trains it again.
 * Called by batch.ts, loop.ts, refit.ts and checkpoint.ts. Talks to workers/trainer.py (protocol.ts: rows, run, logprobs,
 * push_weights, save, restore, export). Elsewhere called: learner, actor worker group.
 */
import { orFailure } from './failure.ts';
import type { Launcher, Worker } from './launch.ts';
import { lastWords } from './launch.ts';
import { type BatchPlan, rowColumns, staleColumn } from './packing.ts';
import { type Frames, RemoteError, type ReplyFields } from './protocol.ts';
import { Stretch } from './stretch.ts';
import type { Sample } from './types.ts';
import { invariant } from './types.ts';

/** Tokens per `rows` message. */
const PART_TOKENS = 250_000; // gathered in a few milliseconds

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

/** A rank is gone, and with it what the weights of the group had learned since the last checkpoint. */
export class TrainerLost extends Error {}

export class Trainer {
  readonly #start: (life: number) => readonly Worker[];
  readonly #launcher: Launcher;
  readonly #loss: LossOptions;
  readonly #temperature: number;
  readonly #packed: boolean;
  readonly #keepsKeys: boolean;
  readonly #deadline: { readonly deadlineMs?: number };
  #ranks: readonly Worker[];
  #lost: TrainerLost | null = null;
  #failed: Promise<never> = new Promise(() => {});
  #orFailed: ReturnType<typeof orFailure> = orFailure(this.#failed);
  #life = 0;
  #closing = false;
  #busyMs = 0;
  answers = 0; // so far
  info: unknown = null; // what rank 0 said when it was ready

  /** `start` starts the processes of all ranks; `life` counts how often. */
  constructor(args: {
    start: (life: number) => readonly Worker[];
    launcher: Launcher;
    loss: LossOptions;
    temperature: number;
    packed: boolean;
    keepsKeys?: boolean; // refit.cache keep
    deadlineMs?: number; // of one request; absent = none
  }) {
    this.#start = args.start;
    this.#launcher = args.launcher;
    this.#loss = args.loss;
    this.#temperature = args.temperature;
    this.#packed = args.packed;
    this.#keepsKeys = args.keepsKeys ?? false;
    this.#deadline = args.deadlineMs === undefined ? {} : { deadlineMs: args.deadlineMs };
    this.#ranks = this.#watched();
  }

  /** Why the group is gone, null while it lives. */
  get lost(): TrainerLost | null {
    return this.#lost;
  }
  get restarts(): number {
    return this.#life;
  }

  /** All ranks have loaded the model. Rejects with TrainerLost and the first cause. */
  async ready(): Promise<void> {
    [this.info] = await this.#or(Promise.all(this.#ranks.map((rank) => rank.peer.ready)));
  }

  /** New processes in place of a lost group, with the weights of the model directory. Resolves when they are ready. */
  async restart(): Promise<void> {
    await Promise.all(this.#ranks.map((rank) => this.#launcher.kill(rank)));
    this.#life++;
    this.#lost = null;
    this.#ranks = this.#watched();
    await this.ready();
  }

  #watched(): readonly Worker[] {
    const ranks = this.#start(this.#life);
    this.#failed = new Promise((_, reject) => {
      for (const rank of ranks) void rank.peer.lost.then((reason) => this.#onLost(ranks, rank, reason, reject)); // lost never rejects
    });
    this.#failed.catch(() => {}); // whoever asks for something learns of it
    this.#orFailed = orFailure(this.#failed);
    return ranks;
  }

  /** Seconds that requests took since the last call. */
  takeBusy(): number {
    const seconds = this.#busyMs / 1000;
    this.#busyMs = 0;
    return seconds;
  }

  /**
   * One optimizer step over all samples of `plan`, on the weights of `version`. `denominator` is the batch's count of trained tokens; `old` (by
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
        const parts = rowParts(share.samples, samples);
        const stretch = new Stretch();
        let sent: Promise<unknown> = Promise.resolve();
        for (const [part, rows] of parts.entries()) {
          await sent; // one part of a large batch exists at a time
          await stretch.pause();
          const frames = rowFrames(rows, samples, old);
          const stale = staleColumn(
            rows.map((i) => samples[i] as Sample),
            version,
            this.#keepsKeys,
          );
          sent = rank.peer.request('rows', { step, part, of: parts.length }, { ...frames, ...(stale && { stale }) });
        }
        const run = rank.peer.request(
          'run',
          {
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
          },
          undefined,
          this.#deadline,
        );
        return (await Promise.all([run, sent]))[0].fields;
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
          this.#deadline,
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
      this.#ranks.map((rank) =>
        rank.peer.request('logprobs', { which: 'policy', temperature }, frames, this.#deadline),
      ),
    );
    return (replies[0] as { frames: { logprobs: Float32Array } }).frames.logprobs;
  }

  /** Write hub-named weights to `path`. */
  async pushWeights(version: number, path: string): Promise<{ tensors: TensorTable; bytes: number }> {
    const replies = await this.#timed(
      this.#ranks.map((rank) =>
        rank.peer.request('push_weights', { version, transport: 'file', path }, undefined, this.#deadline),
      ),
    );
    const first = replies[0]?.fields;
    invariant(first && first.tensors.length > 0, 'the trainer pushed no tensors');
    return first;
  }

  /** Where the ranks of a broadcast meet, host:port (workers/transport.py). */
  get store(): string {
    return (this.info as { store: string }).store;
  }

  /** Send the weights that `pushWeights` wrote last once more, into the memory of engines. `signal` ends it early. */
  async sendWeights(version: number, transport: 'nccl' | 'ipc', path: string, signal?: AbortSignal): Promise<void> {
    const fields = { version, transport, path };
    // Only rank 0 sends: if it is called off, the others still gather to the end, as it does.
    const options = (rank: number) => (rank === 0 ? { ...this.#deadline, signal } : this.#deadline);
    await this.#timed(this.#ranks.map(({ peer }, r) => peer.request('push_weights', fields, undefined, options(r))));
  }

  async save(step: number, path: string): Promise<void> {
    await this.#timed(this.#ranks.map((rank) => rank.peer.request('save', { step, path }, undefined, this.#deadline)));
  }

  /** The step that the checkpoint was saved at. */
  async restore(path: string): Promise<number> {
    const replies = await this.#timed(
      this.#ranks.map((rank) => rank.peer.request('restore', { path }, undefined, this.#deadline)),
    );
    return (replies[0] as { fields: { step: number } }).fields.step;
  }

  async export(path: string): Promise<void> {
    await this.#timed(this.#ranks.map((rank) => rank.peer.request('export', { path }, undefined, this.#deadline)));
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
      this.answers++;
    }
  }

  /** A rank that dies must not leave us waiting for the ranks that wait for it. */
  #or<T>(work: Promise<T>): Promise<T> {
    const failed = this.#failed;
    const told = work.catch((error: unknown) => {
      const type = error instanceof RemoteError && !this.#closing ? error.type : null;
      if (type === 'deadline') this.#condemn();
      // What it says as the process ends has the whole cause.
      if (type === 'lost' || type === 'fatal' || type === 'deadline') return failed;
      throw error;
    });
    return this.#orFailed(told);
  }

  /** Which of them hangs the stacks tell: the others wait for it in a collective. */
  #condemn(): void {
    const why = `did not answer within trainer.deadline_s, ${(this.#deadline.deadlineMs ?? 0) / 1000} s`;
    for (const rank of this.#ranks) void this.#launcher.condemn(rank, why); // never rejects
  }

  #onLost(ranks: readonly Worker[], rank: Worker, reason: Error, reject: (error: Error) => void): void {
    if (this.#closing || this.#lost || ranks !== this.#ranks) return;
    this.#lost = new TrainerLost(`Trainer rank ${rank.spec.id} is gone: ${reason.message}\n${lastWords(rank)}`);
    reject(this.#lost);
    for (const other of ranks) if (other !== rank) void this.#launcher.kill(other); // they wait in a collective
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

/** The `rows` messages of one rank, as sample indices: at least one, each of at most PART_TOKENS tokens or one row. */
function rowParts(mine: readonly number[], samples: readonly Sample[]): readonly (readonly number[])[] {
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
  return parts;
}

function rowFrames(
  rows: readonly number[],
  samples: readonly Sample[],
  old: readonly Float32Array[] | null,
): Frames<'rows'> {
  const columns = rowColumns(rows.map((i) => samples[i] as Sample));
  if (!old) return columns;
  const flat = new Float32Array(columns.ids.length);
  let at = 0;
  for (const i of rows) {
    flat.set(old[i] as Float32Array, at);
    at += (old[i] as Float32Array).length;
  }
  return { ...columns, old_logprobs: flat };
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
