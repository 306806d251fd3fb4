/**
 * One optimizer step's samples: everything that decides the step, as data.
 *
 *   groups -> credit (estimators.ts) -> Batch -> ledger            then trained
 *   ledger -> Batch (history.ts)                                   trained again, by the same function
 *
 * Invariants
 *   1. A batch is in the ledger, synced, before it is trained; training it again from there gives the same step.
 *   2. The denominator counts lossMask over the whole batch, whatever is sent: a row without credit has no gradient.
 * Called by loop.ts.
 */
import { type CreditOptions, credit } from './estimators.ts';
import type { LedgerArrays, LedgerEvent } from './ledger.ts';
import { type PackingOptions, planBatch } from './packing.ts';
import { sum, withMismatchOf } from './report.ts';
import { Stretch } from './stretch.ts';
import type { StepResult, Trainer } from './trainer.ts';
import { type Group, invariant, type Sample } from './types.ts';

export interface Batch {
  readonly step: number;
  readonly version: number; // of the trainer's weights before the step
  readonly groups: readonly string[];
  readonly rollouts: readonly string[];
  readonly samples: readonly Sample[]; // every trajectory of every rollout, in order
  readonly sent: readonly number[]; // samples the trainer gets
  readonly denominator: number;
  readonly lr: number;
  readonly metrics: Readonly<Record<string, number | null>>; // known before it is trained
}

/** Advantages for whole groups. Yields to the event loop, since a batch may hold millions of tokens. */
export async function makeBatch(
  groups: readonly Group[],
  args: { step: number; version: number; lr: number; credit: CreditOptions; metrics: Batch['metrics'] },
): Promise<Batch> {
  const { samples, metrics } = await credit(groups, args.credit);
  const stretch = new Stretch();
  const counts: number[] = [];
  const credited: number[] = [];
  for (const [i, sample] of samples.entries()) {
    counts.push(sum(sample.trajectory.lossMask));
    if (sample.advantages.some((value) => value !== 0)) credited.push(i);
    await stretch.pause();
  }
  // Where no row has any, one group stands for all: the gradient is 0, and its numbers say how engine and trainer agree.
  const [first] = groups;
  const standIn = samples.flatMap((sample, i) => (sample.groupId === first?.groupId ? [i] : []));
  return {
    step: args.step,
    version: args.version,
    groups: groups.map((group) => group.groupId),
    rollouts: groups.flatMap((group) => group.rollouts.map((rollout) => rollout.rolloutId)),
    samples,
    sent: credited.length > 0 ? credited : standIn,
    denominator: sum(counts),
    lr: args.lr,
    metrics: {
      ...args.metrics,
      ...metrics,
      lr: args.lr,
      tokens_trained: sum(counts),
      tokens_credited: sum(credited.map((i) => counts[i] as number)),
    },
  };
}

/** As it goes into the ledger; the samples are there already, in `finished` records. */
export async function batchRecord(batch: Batch): Promise<[LedgerEvent, LedgerArrays]> {
  const { samples, ...event } = batch;
  const stretch = new Stretch();
  const values: Float32Array[] = [];
  for (const sample of samples) {
    values.push(packed(sample));
    await stretch.pause();
  }
  const flat = new Float32Array(values.reduce((n, part) => n + part.length, 0));
  let at = 0;
  for (const part of values) {
    flat.set(part, at);
    at += part.length;
    await stretch.pause();
  }
  return [
    { kind: 'batch', ...event },
    { advantages: flat, counts: Int32Array.from(values, (part) => part.length) },
  ];
}

/** Advantages of the trained tokens, one where all are equal. */
function packed({ advantages, trajectory }: Sample): Float32Array {
  const { lossMask } = trajectory;
  const first = advantages[lossMask.indexOf(1)] ?? 0;
  if (advantages.every((value, t) => lossMask[t] !== 1 || value === first)) return Float32Array.of(first);
  return advantages.filter((_, t) => lossMask[t] === 1);
}

/** `epochs` optimizer steps on the batch. Rejects with TrainerLost when a rank is gone: train it again from the start. */
export async function trainBatch(
  trainer: Trainer,
  batch: Batch,
  args: { packing: PackingOptions; epochs: number },
): Promise<{ result: StepResult; dummies: number }> {
  const { step, version, denominator, lr } = batch;
  const samples = batch.sent.map((i) => batch.samples[i] as Sample);
  const plan = planBatch(
    samples.map((sample) => sample.trajectory.ids.length),
    args.packing,
  );
  // With several optimizer steps on one batch the ratio is taken to where the first one began.
  const old = args.epochs > 1 ? await trainer.oldLogprobs(samples, plan) : null;
  let result: StepResult | null = null;
  for (let epoch = 0; epoch < args.epochs; epoch++) {
    const next = await trainer.step({ step, version, samples, plan, denominator, lr, old });
    // How far engine and trainer are apart is what the first pass saw; everything else is of the last.
    result = result ? withMismatchOf(result, next) : next;
  }
  invariant(result, 'train.max_epochs is at least 1');
  return { result, dummies: plan.numDummies };
}
