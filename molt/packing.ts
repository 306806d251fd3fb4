/**
 * Packing: samples to rows per trainer rank and micro-batches per step.
 *
 *   lengths -> partition over ranks (equal counts, near-equal tokens) -> micro-batches within the token budget
 *
 *   rank 0   rows [s4 s1 s7]   micro-batches [[0] [1 2]]
 *   rank 1   rows [s2 s6]      micro-batches [[0 1] []]      [] = a dummy: collectives need the same number everywhere
 *
 * Invariants
 *   1. Every sample is in exactly one micro-batch of exactly one rank; nothing is dropped, however the counts divide.
 *   2. Every rank runs the same number of micro-batches; fewer samples than ranks leave ranks with dummies only.
 *   3. No micro-batch is over the token budget, except a single sample that is longer than it.
 *   4. The same lengths give the same plan.
 * Within a rank the heaviest micro-batch comes first, so that the k-th of every rank take about equally long.
 * Pure. Called by trainer.ts; `run.micro_batches` of protocol.ts carries row numbers. Elsewhere called sequence-length
 * balancing, dynamic batching; the partition is Karmarkar-Karp's largest differencing, k-way.
 */
import { invariant, type Sample } from './types.ts';

export interface PackingOptions {
  readonly numRanks: number;
  readonly microBatchSize: number; // samples; 0 = by maxTokens
  readonly maxTokens: number; // of one micro-batch on one rank
  readonly packed: boolean; // false: rows are padded to the longest of their micro-batch, and the padding counts
}

/** What one rank gets: `samples` are indices into the batch, row r of the rank is samples[r]. */
export interface RankPlan {
  readonly samples: readonly number[];
  readonly microBatches: readonly (readonly number[])[]; // row numbers
  readonly tokens: number; // without padding
}

export interface BatchPlan {
  readonly ranks: readonly RankPlan[];
  readonly numMicroBatches: number; // of each rank, dummies included
  readonly numDummies: number; // of all ranks
}

/** Plans one optimizer step. `lengths` are tokens of each sample. */
export function planBatch(lengths: readonly number[], options: PackingOptions): BatchPlan {
  invariant(options.numRanks >= 1, `packing for ${options.numRanks} ranks`);
  const shares = partitionEvenly(lengths, options.numRanks);
  const batches = shares.map((share) => microBatches(share, lengths, options));
  const numMicroBatches = Math.max(...batches.map((list) => list.length));
  return {
    ranks: batches.map((list) => rankPlan(list, numMicroBatches, lengths)),
    numMicroBatches,
    numDummies: total(batches.map((list) => numMicroBatches - list.length)),
  };
}

/** Numbers the rows in the order they are run and fills up with dummies. */
function rankPlan(
  batches: readonly (readonly number[])[],
  numMicroBatches: number,
  lengths: readonly number[],
): RankPlan {
  const samples = batches.flat();
  let row = 0;
  const numbered: number[][] = batches.map((batch) => batch.map(() => row++));
  while (numbered.length < numMicroBatches) numbered.push([]);
  return { samples, microBatches: numbered, tokens: total(samples.map((index) => lengths[index] as number)) };
}

// ---- Micro-batches of one rank ----

function microBatches(share: readonly number[], lengths: readonly number[], options: PackingOptions): number[][] {
  const longestFirst = [...share].sort((a, b) => (lengths[b] as number) - (lengths[a] as number) || a - b);
  if (options.microBatchSize > 0) return chunks(longestFirst, options.microBatchSize);
  const batches = options.packed
    ? packedBatches(longestFirst, lengths, options.maxTokens)
    : paddedBatches(longestFirst, lengths, options.maxTokens);
  return heaviestFirst(batches, lengths, options.packed);
}

/** Padded rows cost count x longest, so neighbours in length belong together: consecutive runs, longest first. */
function paddedBatches(longestFirst: readonly number[], lengths: readonly number[], maxTokens: number): number[][] {
  const batches: number[][] = [];
  let room = 0; // rows that still fit beside the longest of the last batch
  for (const index of longestFirst) {
    if (room === 0) {
      batches.push([]);
      room = Math.max(1, Math.floor(maxTokens / (lengths[index] as number)));
    }
    batches.at(-1)?.push(index);
    room -= 1;
  }
  return batches;
}

/**
 * As few micro-batches as first-fit finds, of near-equal tokens. The differencing partition does not know the budget; where it
 * oversteps it (3 3 2 2 2 in two of 6: 7 and 5), the first-fit bins themselves are taken.
 */
function packedBatches(longestFirst: readonly number[], lengths: readonly number[], maxTokens: number): number[][] {
  const bins = firstFit(longestFirst, lengths, maxTokens);
  const sizes = longestFirst.map((index) => lengths[index] as number);
  const balanced = partition(sizes, bins.length).map((part) => part.map((i) => longestFirst[i] as number));
  return balanced.every((batch) => batch.length === 1 || cost(batch, lengths, true) <= maxTokens) ? balanced : bins;
}

function firstFit(longestFirst: readonly number[], lengths: readonly number[], maxTokens: number): number[][] {
  const bins: { indices: number[]; tokens: number }[] = [];
  for (const index of longestFirst) {
    const length = lengths[index] as number;
    const bin = bins.find(({ tokens }) => tokens + length <= maxTokens);
    if (bin === undefined) {
      bins.push({ indices: [index], tokens: length });
    } else {
      bin.indices.push(index);
      bin.tokens += length;
    }
  }
  return bins.map(({ indices }) => indices);
}

function heaviestFirst(batches: readonly number[][], lengths: readonly number[], packed: boolean): number[][] {
  const weighed = batches.map((batch) => ({ batch, tokens: cost(batch, lengths, packed) }));
  weighed.sort((a, b) => b.tokens - a.tokens || (a.batch[0] as number) - (b.batch[0] as number));
  return weighed.map(({ batch }) => batch);
}

/** Tokens one micro-batch puts through the model, padding included. */
function cost(batch: readonly number[], lengths: readonly number[], packed: boolean): number {
  const sizes = batch.map((index) => lengths[index] as number);
  return packed ? total(sizes) : sizes.length * Math.max(...sizes);
}

function chunks(indices: readonly number[], size: number): number[][] {
  const out: number[][] = [];
  for (let from = 0; from < indices.length; from += size) out.push(indices.slice(from, from + size));
  return out;
}

// ---- Largest differencing ----

/** Like `partition`, with counts that differ by at most one: empty items fill up to a multiple of k and are taken out again. */
export function partitionEvenly(lengths: readonly number[], k: number): number[][] {
  const fillers = (k - (lengths.length % k)) % k;
  const parts = partition([...lengths, ...Array<number>(fillers).fill(0)], k, true);
  return parts.map((part) => part.filter((index) => index < lengths.length));
}

interface Part {
  sum: number;
  items: number[]; // indices, in the order they were merged
}

/** Up to k parts, the largest first; parts left out are empty. */
type State = readonly Part[];

/**
 * k parts of near-equal sums, each ascending by index, the largest first. Starts from one state per item (or, with
 * `equalCounts`, per k neighbours in length); the two states of widest spread are merged, largest part with smallest, until one
 * is left.
 */
export function partition(lengths: readonly number[], k: number, equalCounts = false): number[][] {
  invariant(!equalCounts || lengths.length % k === 0, `${lengths.length} items in ${k} equal parts`);
  const ascending = lengths
    .map((_, index) => index)
    .sort((a, b) => (lengths[a] as number) - (lengths[b] as number) || a - b);
  const larger = (a: Part, b: Part): number => compareParts(b, a, lengths);
  const states: State[] = chunks(ascending, equalCounts ? k : 1).map((group) =>
    group.map((index) => ({ sum: lengths[index] as number, items: [index] })).sort(larger),
  );
  // Ascending: the widest spread, then the larger first part, is at the end.
  const priority = (a: State, b: State): number => spread(a, k) - spread(b, k) || larger(b[0] as Part, a[0] as Part);
  states.sort(priority);
  while (states.length > 1) {
    const merged = merge(states.pop() as State, states.pop() as State, k).sort(larger);
    states.splice(insertionPoint(states, merged, priority), 0, merged);
  }
  const parts = (states[0] ?? []).map((part) => part.items.sort((a, b) => a - b));
  while (parts.length < k) parts.push([]);
  return parts;
}

/** Part i of one with part k-1-i of the other. */
function merge(a: State, b: State, k: number): Part[] {
  const alone = b.filter((_, j) => k - 1 - j >= a.length); // meets an empty part
  const met = a.map((part, i) => {
    const other = b[k - 1 - i];
    return other === undefined ? part : { sum: part.sum + other.sum, items: [...part.items, ...other.items] };
  });
  return [...met, ...alone];
}

function spread(state: State, k: number): number {
  const smallest = state.length < k ? 0 : (state[k - 1] as Part).sum;
  return (state[0] as Part).sum - smallest;
}

/** By sum, then count, then the items one by one (index, length): a total order, so that ties are settled alike everywhere. */
function compareParts(a: Part, b: Part, lengths: readonly number[]): number {
  if (a.sum !== b.sum) return a.sum - b.sum;
  if (a.items.length !== b.items.length) return a.items.length - b.items.length;
  for (const [i, item] of a.items.entries()) {
    const other = b.items[i] as number;
    if (item !== other) return item - other;
    const difference = (lengths[item] as number) - (lengths[other] as number);
    if (difference !== 0) return difference;
  }
  return 0;
}

function insertionPoint<T>(sorted: readonly T[], item: T, compare: (a: T, b: T) => number): number {
  let low = 0;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (compare(sorted[middle] as T, item) <= 0) low = middle + 1;
    else high = middle;
  }
  return low;
}

function total(values: readonly number[]): number {
  return values.reduce((sum, value) => sum + value, 0);
}

// ---- Rows as they travel ----

/** The frames of `rows` (protocol.ts): the columns of several samples, end to end. */
export interface RowColumns {
  readonly ids: Int32Array;
  readonly lengths: Int32Array;
  readonly loss_mask: Uint8Array;
  readonly rollout_logprobs: Float32Array;
  readonly advantages: Float32Array;
}

export function rowColumns(samples: readonly Sample[]): RowColumns {
  const lengths = Int32Array.from(samples, (sample) => sample.trajectory.ids.length);
  const tokens = lengths.reduce((sum, length) => sum + length, 0);
  const columns = {
    ids: new Int32Array(tokens),
    lengths,
    loss_mask: new Uint8Array(tokens),
    rollout_logprobs: new Float32Array(tokens),
    advantages: new Float32Array(tokens),
  };
  let at = 0;
  for (const { trajectory, advantages } of samples) {
    columns.ids.set(trajectory.ids, at);
    columns.loss_mask.set(trajectory.lossMask, at);
    columns.rollout_logprobs.set(trajectory.logprobs, at);
    columns.advantages.set(advantages, at);
    at += trajectory.ids.length;
  }
  return columns;
}

/**
 * The frame `stale` of `rows`: 1 where a trained token does not come from the weights of `version` alone, end to end; null
 * when none is. Under refit.cache keep a turn that crossed a refit attends to keys of the older version ever after, so
 * that the tokens after it are stale as well, whatever their version.
 */
export function staleColumn(samples: readonly Sample[], version: number, keepsKeys: boolean): Uint8Array | null {
  const stale = samples.flatMap(({ trajectory: { lossMask, versions, turns } }) => {
    let crossed = -1; // the turn that holds an older token
    return Array.from(lossMask, (trained, k) => {
      const isOlder = trained === 1 && (versions[k] as number) < version;
      if (isOlder) crossed = turns[k] as number;
      return isOlder || (keepsKeys && trained === 1 && turns[k] === crossed) ? 1 : 0;
    });
  });
  return stale.includes(1) ? Uint8Array.from(stale) : null;
}
