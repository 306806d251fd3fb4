/**
 * What a ledger says of a run, folded into what a process needs to go on with it.
 *
 *   batches by step            to train again what came after the checkpoint
 *   groups not decided         finished members to keep, the others to dispatch once more
 *   position of the data, number of the next group, newest version and the checksum of its weights
 *
 * Records stay on the disk: kept here are their places. Called by loop.ts (resume, a trainer that starts again, --replay).
 */
import type { Batch } from './batch.ts';
import type { Position } from './data.ts';
import { type Entry, LedgerError, type LedgerEvent, type Place, readEntry } from './ledger.ts';
import type { Rollout, Sample, Span, Trajectory } from './types.ts';

type Of<K extends LedgerEvent['kind']> = Extract<LedgerEvent, { readonly kind: K }>;
type MetricLine = Of<'step'>['metrics'];

export interface OpenGroup {
  readonly dispatched: Of<'dispatched'>; // the first time
  readonly attempts: number; // times it was dispatched
  readonly finished: ReadonlyMap<number, Place>; // by member, judged or not
}

export interface History {
  readonly lives: number; // processes that wrote
  readonly dataHash: string; // of the prompts; '' when nothing was recorded
  readonly firstStep: number; // of the batches that are here; Infinity = none
  readonly stepBefore: number; // last step of parts that were deleted; 0 = it is here from its beginning
  readonly batches: ReadonlyMap<number, Place>; // by step
  readonly rollouts: ReadonlyMap<string, Place>; // of batches and open groups
  readonly open: ReadonlyMap<string, OpenGroup>;
  readonly steps: ReadonlyMap<number, MetricLine>;
  readonly evals: readonly { readonly step: number; readonly line: MetricLine }[];
  readonly refits: ReadonlyMap<number, Of<'refit'>>; // by step: the last one
  readonly version: number; // highest declared
  readonly dispatched: number; // groups ever
  readonly lanes: Position['lanes'] | null; // behind the last prompt that was given out
}

/** `afterStep`: batches up to it are not needed; their rollouts are forgotten. */
export function readHistory(entries: Iterable<Entry>, afterStep: number): History {
  const batches = new Map<number, Place>();
  const rollouts = new Map<string, Place>();
  const open = new Map<string, OpenGroup & { finished: Map<number, Place> }>();
  const steps = new Map<number, MetricLine>();
  const evals: { step: number; line: MetricLine }[] = [];
  const refits = new Map<number, Of<'refit'>>();
  const members = new Map<string, string[]>(); // group -> its rollouts here
  let [lives, version, dispatched] = [0, 0, 0];
  let lanes: Position['lanes'] | null = null;
  let dataHash = '';
  let stepBefore: number | null = null;
  const forget = (groupId: string) => {
    for (const rolloutId of members.get(groupId) ?? []) rollouts.delete(rolloutId);
    members.delete(groupId);
  };
  for (const { event, place } of entries) {
    switch (event.kind) {
      case 'segment':
        version = Math.max(version, event.version);
        stepBefore ??= event.step;
        break;
      case 'meta':
        lives = event.life + 1;
        dataHash = event.dataHash;
        break;
      case 'dispatched': {
        const before = open.get(event.groupId);
        open.set(event.groupId, {
          dispatched: before?.dispatched ?? event,
          attempts: event.attempt + 1,
          finished: before?.finished ?? new Map(),
        });
        if (event.attempt > 0) break;
        dispatched = Number(event.groupId.slice(1)) + 1;
        lanes = event.lanes;
        break;
      }
      case 'finished':
        if (!open.has(event.groupId)) break; // it was dropped meanwhile
        open.get(event.groupId)?.finished.set(event.index, place);
        rollouts.set(event.rolloutId, place);
        members.set(event.groupId, [...(members.get(event.groupId) ?? []), event.rolloutId]);
        break;
      case 'dropped':
        open.delete(event.groupId);
        forget(event.groupId);
        break;
      case 'batch':
        for (const groupId of event.groups) {
          open.delete(groupId);
          if (event.step <= afterStep) forget(groupId);
        }
        if (event.step > afterStep) batches.set(event.step, place);
        break;
      case 'step':
        steps.set(event.step, event.metrics);
        break;
      case 'eval':
        evals.push({ step: event.step, line: event.metrics });
        break;
      case 'refit':
        version = event.version;
        refits.set(event.step, event);
        break;
      default: // prompt_dropped, checkpoint, event: for readers
    }
  }
  const firstStep = Math.min(...batches.keys());
  return {
    lives,
    dataHash,
    firstStep,
    stepBefore: stepBefore ?? 0,
    batches,
    rollouts,
    open,
    steps,
    evals,
    refits,
    version,
    dispatched,
    lanes,
  };
}

/** The batch of a step as it was recorded. Throws LedgerError when it is not there whole. */
export function readBatch(history: History, step: number): Batch {
  const place = history.batches.get(step);
  if (!place) throw new LedgerError(`the ledger does not hold the batch of step ${step}`);
  const { event, arrays } = readEntry(place) as Entry & { event: Of<'batch'> };
  const samples: Sample[] = [];
  let [at, row] = [0, 0];
  for (const rolloutId of event.rollouts) {
    const where = history.rollouts.get(rolloutId);
    if (!where) throw new LedgerError(`the ledger does not hold rollout ${rolloutId} of step ${step}`);
    const rollout = readRollout(where);
    for (const trajectory of rollout.trajectories) {
      const count = arrays.counts?.[row++] ?? 0;
      const values = arrays.advantages?.subarray(at, at + count) as Float32Array;
      at += count;
      samples.push({
        trajectory,
        rolloutId,
        groupId: rollout.groupId,
        advantages: spread(values, trajectory.lossMask),
      });
    }
  }
  const { version, groups, rollouts, sent, denominator, lr, metrics } = event;
  return { step, version, groups, rollouts, samples, sent, denominator, lr, metrics };
}

/** The other way round than `packed` of batch.ts: one value for all trained tokens, or one each. */
function spread(values: Float32Array, lossMask: Uint8Array): Float32Array {
  const out = new Float32Array(lossMask.length);
  let next = 0;
  for (let t = 0; t < out.length; t++)
    if (lossMask[t] === 1) out[t] = values[values.length === 1 ? 0 : next++] as number;
  return out;
}

/** Throws LedgerError when the record is damaged. */
export function readRollout(place: Place): Rollout {
  const { event, arrays } = readEntry(place) as Entry & { event: Of<'finished'> };
  const { kind: _kind, ...fields } = event;
  return { ...fields, trajectories: readTrajectories(arrays) };
}

/** From the columns of a `finished` record (report.ts writes them). */
function readTrajectories(arrays: Entry['arrays']): Trajectory[] {
  const { lengths = [], ids, loss_mask, logprobs, versions, turns, spans = new Int32Array() } = arrays;
  const all: Span[][] = Array.from(lengths, () => []);
  for (let i = 0; i < spans.length; i += 6) {
    const [row, sampled, version, turn, from, to] = spans.subarray(i, i + 6) as unknown as [
      number,
      number,
      number,
      number,
      number,
      number,
    ];
    all[row]?.push({ source: sampled ? 'policy' : 'context', version, turn, from, to });
  }
  let at = 0;
  return Array.from(lengths, (length, i) => {
    const part = <A>(column: unknown) => (column as Int32Array).subarray(at, at + length) as A;
    const trajectory: Trajectory = {
      ids: part(ids),
      lossMask: part(loss_mask),
      logprobs: part(logprobs),
      versions: part(versions),
      turns: part(turns),
      spans: all[i] ?? [],
    };
    at += length;
    return trajectory;
  });
}
