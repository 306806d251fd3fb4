/**
 * Data: which prompts a run has and the order they are given out in.
 *
 *   sources (sources.ts) -> max_samples of each -> lanes, each with epoch 0 order, epoch 1 order, ... -> length filter
 *
 * Without weights all sources together are one lane: an epoch gives out every prompt once. With weights each source is a
 * lane of its own, with its own epochs, and Tijdeman's rule says whose turn it is (`turnOf`): after n prompts every source
 * has given n * weight of them, to less than one prompt. The turns depend on the weights alone, the order in a lane
 * on the seed.
 *
 * Invariants
 *   1. The order of an epoch is a function of the seed, the epoch and the data, and of nothing else.
 *   2. An epoch of a lane passes every prompt once; the next one follows without a gap, in another order.
 *   3. A position is bound to the data, weights and seed it was taken with: any change makes restoring it an error.
 *   4. A prompt is given out only when it was measured and fits. One that does not is passed over by the next of its
 *      lane and told to `onDropped`, at every pass; so what is given out never depends on how far ahead was measured.
 * Bad data is a ConfigError that names option, source and line, all problems at once.
 * Called by loop.ts. Elsewhere called dataset, dataloader, sampler; the position is the cursor or loader state.
 */
import { createHash } from 'node:crypto';
import { existsSync, realpathSync } from 'node:fs';
import { ConfigError, splitSources } from './config.ts';
import { type Item, Problems, type ReadOptions, readSource } from './sources.ts';
import { invariant, type Prompt } from './types.ts';

export interface DataOptions extends ReadOptions {
  readonly sources: string; // with commas between them
  readonly maxSamples: readonly number[]; // one for all sources or one each; 0 = all
  readonly shuffle: boolean; // false: maxSamples takes the first ones, true: a seeded draw
}

/** Checked prompts in source order; `sha256` covers all of them and which source each is of. */
export interface PromptSet {
  readonly sources: readonly { readonly name: string; readonly items: readonly Item[] }[];
  readonly sha256: string;
}

/** Reads and checks whole sources. Throws ConfigError. */
export async function loadPrompts(options: DataOptions): Promise<PromptSet> {
  const lines: string[] = [];
  const sources: { name: string; items: readonly Item[] }[] = [];
  const seen = new Set<string>();
  for (const [i, source] of splitSources(options.sources).entries()) {
    const problems = new Problems(options.split, source.text);
    const file = existsSync(source.path) ? realpathSync(source.path) : source.path;
    const key = JSON.stringify([file, ...source.args]);
    if (seen.has(key)) problems.add('is named twice');
    seen.add(key);
    const items = problems.count > 0 ? [] : await readSource(source, options, problems);
    lines.push(...problems.lines);
    sources.push({ name: source.text, items: choose(items, i, options) });
  }
  if (lines.length > 0) throw new ConfigError(lines);
  return { sources, sha256: hashOf(sources.map(({ items }) => items)) };
}

/** All prompts once, in source order: what an evaluation runs over. */
export function promptsOf(set: PromptSet): Prompt[] {
  return set.sources.flatMap(({ name, items }) => items.map((item) => ({ source: name, epoch: 0, ...item })));
}

/** How many prompts of `a` are also in `b`, with the same label: held-out data must give 0. */
export function sharedPrompts(a: PromptSet, b: PromptSet): number {
  const counts = new Map<string, number>();
  for (const { input, label } of itemsOf(a)) {
    const key = JSON.stringify([input, label]);
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  let shared = 0;
  for (const { input, label } of itemsOf(b)) {
    const key = JSON.stringify([input, label]);
    shared += counts.get(key) ?? 0;
    counts.delete(key);
  }
  return shared;
}

function* itemsOf(set: PromptSet): Generator<Item> {
  for (const { items } of set.sources) yield* items;
}

function choose(items: readonly Item[], source: number, options: DataOptions): readonly Item[] {
  const { maxSamples } = options;
  const most = (maxSamples.length === 1 ? maxSamples[0] : maxSamples[source]) ?? 0;
  if (most === 0 || most >= items.length) return items;
  if (!options.shuffle) return items.slice(0, most);
  const drawn = shuffled(items.length, `sample seed ${options.seed} source ${source}`).subarray(0, most).sort();
  return Array.from(drawn, (i) => items[i] as Item);
}

function hashOf(sources: readonly (readonly Item[])[]): string {
  const hash = createHash('sha256');
  for (const items of sources) {
    for (const { index, input, label, tools } of items)
      hash.update(`${JSON.stringify([index, input, label, tools])}\n`);
    hash.update('\n'); // a prompt that moves to another source is another set
  }
  return hash.digest('hex');
}

// ---- Order ----

/** Where a lane stands: `index` prompts of `epoch` were passed, `given` of all so far given out. */
interface LanePosition {
  readonly epoch: number;
  readonly index: number;
  readonly given: number;
}

/** Where a stream stands. Goes into checkpoints as it is. */
export interface Position {
  readonly lanes: readonly LanePosition[];
  readonly weights: readonly number[]; // [] = one lane
  readonly seed: number;
  readonly shuffle: boolean;
  readonly sha256: string;
}

type Cursor = { -readonly [K in keyof LanePosition]: LanePosition[K] };

/** Prompts that take turns among themselves: one source, or all of them. */
interface Lane {
  readonly name: string;
  readonly weight: number; // share of the prompts that are given out
  readonly from: number; // its prompts are `from` to `from + length - 1` of the set
  readonly length: number;
  readonly key: string; // what decides its orders, besides the epoch
  readonly orders: Map<number, Int32Array>; // by epoch, the last two made
}

/**
 * Prompts without end, or of so many epochs. Without `filter` everything is given out; with it, await `ahead(n)` before n
 * times `next`.
 */
export class PromptStream {
  readonly #set: PromptSet;
  readonly #seed: number;
  readonly #shuffle: boolean;
  readonly #weights: readonly number[];
  readonly #epochs: number;
  readonly #items: readonly Item[]; // of all sources
  readonly #lanes: readonly Lane[];
  #cursors: Cursor[];
  #misfits: number[]; // by lane: so many prompts behind its cursor are known not to fit, so as not to look again
  #lengths: Lengths | null = null;
  #measuring: Promise<void> | null = null;

  /** `weights`: one for each source, or none. `epochs`: 0 = without end. */
  constructor(
    set: PromptSet,
    args: {
      readonly seed: number;
      readonly shuffle: boolean;
      readonly weights: readonly number[];
      readonly epochs?: number;
    },
  ) {
    this.#set = set;
    this.#seed = args.seed;
    this.#shuffle = args.shuffle;
    this.#weights = args.weights;
    this.#epochs = args.epochs || Number.POSITIVE_INFINITY;
    this.#items = [...itemsOf(set)];
    this.#lanes = lanesOf(set, args.weights, `seed ${args.seed}`);
    this.#cursors = this.#lanes.map(() => ({ epoch: 0, index: 0, given: 0 }));
    this.#misfits = this.#lanes.map(() => 0);
  }

  /** The first prompt as the sources have them, whatever the order. */
  get first(): Prompt {
    return { source: this.#sourceOf(0), epoch: 0, ...(this.#items[0] as Item) };
  }

  /** Prompts of all sources. */
  get size(): number {
    return this.#items.length;
  }

  /** The prompt that a group was made of: the same content at the same place, or null. */
  find(at: {
    readonly source: string;
    readonly index: number;
    readonly epoch: number;
    readonly hash: string;
  }): Prompt | null {
    const { items } = this.#set.sources.find(({ name }) => name === at.source) ?? {};
    const item = items?.find(({ index }) => index === at.index);
    if (!item) return null;
    const prompt = { source: at.source, epoch: at.epoch, ...item };
    return this.hashOf(prompt) === at.hash ? prompt : null;
  }

  /** Of what it says, wherever it stands. */
  hashOf({ input, label, tools }: Prompt): string {
    return createHash('sha256')
      .update(JSON.stringify([input, label, tools]))
      .digest('hex')
      .slice(0, 16);
  }

  /** Null when all epochs are over. */
  next(): Prompt | null {
    const turn = turnOf(this.#lanes, this.#cursors);
    const [lane, cursor] = [this.#lanes[turn] as Lane, this.#cursors[turn] as Cursor];
    this.#misfits[turn] = 0;
    for (;;) {
      if (this.#isOver(lane, cursor)) return null;
      const at = this.#pass(lane, cursor);
      const prompt = { source: this.#sourceOf(at), epoch: cursor.epoch, ...(this.#items[at] as Item) };
      const length = this.#lengths?.of(at);
      invariant(length !== null, 'a prompt that was not measured is not given out: `ahead` comes first');
      if (this.#lengths && length !== undefined && !this.#lengths.fits(length)) {
        this.#lengths.filter.onDropped({ prompt, length });
        continue; // some prompt of the lane fits, or `ahead` had thrown
      }
      cursor.given += 1;
      return prompt;
    }
  }

  #isOver(lane: Lane, { epoch, index }: Cursor): boolean {
    return epoch + (index === lane.length ? 1 : 0) >= this.#epochs;
  }

  /** Passes one prompt of a lane; which one of all. */
  #pass(lane: Lane, cursor: Cursor): number {
    if (cursor.index === lane.length) {
      cursor.epoch += 1;
      cursor.index = 0;
    }
    const place = cursor.index++;
    return lane.from + (this.#shuffle ? (orderOf(lane, cursor.epoch)[place] as number) : place);
  }

  #sourceOf(at: number): string {
    let from = 0;
    for (const { name, items } of this.#set.sources) {
      from += items.length;
      if (at < from) return name;
    }
    throw new Error(`Invariant broken: no prompt ${at}`);
  }

  // -- length --

  /** From now on gives out only what fits. */
  set filter(filter: Filter) {
    this.#lengths = new Lengths(filter, this.#items.length);
    this.#misfits = this.#lanes.map(() => 0);
  }

  /** The next `n` prompts can be given out without waiting. */
  isAhead(n: number): boolean {
    return this.#unmeasured(n).length === 0;
  }

  /** Measures until they can. May run beside itself. Rejects when nothing of a lane fits. */
  async ahead(n: number): Promise<void> {
    for (;;) {
      if (this.#measuring === null) {
        const wanted = this.#unmeasured(n);
        if (wanted.length === 0) return;
        this.#measuring = this.#measure(wanted).finally(() => {
          this.#measuring = null;
        });
      }
      await this.#measuring;
    }
  }

  async #measure(wanted: readonly number[]): Promise<void> {
    const items = wanted.map((at) => this.#items[at] as Item);
    const answers = (await this.#lengths?.filter.measure(items)) ?? [];
    for (const [i, at] of wanted.entries()) this.#lengths?.set(at, answers[i] as Length);
  }

  /**
   * Prompts to measure before `n` more can be given out, as many as are measured at once; none when all lengths are
   * known. Goes ahead on copies of the cursors, as if what is not known would fit.
   */
  #unmeasured(n: number): number[] {
    const lengths = this.#lengths;
    if (!lengths) return [];
    const cursors = this.#cursors.map((cursor) => ({ ...cursor }));
    const wanted = new Set<number>();
    const room = new BatchRoom();
    // Once something is to be measured, later prompts go along.
    for (let given = 0; given < n || (wanted.size > 0 && given < n + BATCH_ITEMS); given++) {
      const turn = turnOf(this.#lanes, cursors);
      const [lane, cursor] = [this.#lanes[turn] as Lane, cursors[turn] as Cursor];
      const isFirst = cursor.given === this.#cursors[turn]?.given;
      let passed = isFirst ? (this.#misfits[turn] as number) : 0;
      skip(lane, cursor, passed);
      cursor.given += 1;
      for (; ; passed++) {
        if (isFirst) this.#misfits[turn] = passed;
        // Two epochs hold a whole one, in which every prompt came by.
        if (passed === 2 * lane.length) throw this.#noneFits(lane, lengths);
        if (this.#isOver(lane, cursor)) {
          if (given === 0 && wanted.size === 0 && this.#cursors[turn]?.given === 0) throw this.#noneFits(lane, lengths);
          return [...wanted];
        }
        const at = this.#pass(lane, cursor);
        const length = lengths.of(at);
        if (length !== null && !lengths.fits(length)) continue;
        if (length === null && !wanted.has(at)) {
          if (!room.takes(this.#items[at] as Item)) return [...wanted];
          wanted.add(at);
        }
        break;
      }
    }
    return [...wanted];
  }

  #noneFits(lane: Lane, lengths: Lengths): Error {
    const all = Array.from({ length: lane.length }, (_, i) => lengths.of(lane.from + i) as Length);
    return noneFits('data.prompt_dataset', lane.name, all, lengths.filter.limit);
  }

  // -- position --

  get position(): Position {
    return {
      lanes: this.#cursors.map((cursor) => ({ ...cursor })),
      weights: this.#weights,
      seed: this.#seed,
      shuffle: this.#shuffle,
      sha256: this.#set.sha256,
    };
  }

  /** Continues where `position` was taken. Throws ConfigError when it was taken on other data, weights, seed or order. */
  restore(position: Position): void {
    const now = this.position;
    const changes: string[] = [];
    if (position.sha256 !== now.sha256)
      changes.push(`the prompts are not those of the checkpoint (sha256 ${position.sha256}, now ${now.sha256})`);
    if (position.seed !== now.seed) changes.push(`--train.seed was ${position.seed}, is ${now.seed}`);
    if (position.shuffle !== now.shuffle) changes.push(`--data.shuffle was ${position.shuffle}, is ${now.shuffle}`);
    const [before, after] = [position.weights?.join() ?? '', now.weights.join()];
    if (before !== after) changes.push(`--data.prompt_probs was ${before || "''"}, is ${after || "''"}`);
    if (changes.length === 0 && !this.#isPlace(position.lanes))
      changes.push(`no position at ${JSON.stringify(position.lanes)}`);
    if (changes.length > 0)
      throw new ConfigError(changes.map((change) => `Cannot resume --data.prompt_dataset ${this.#names}: ${change}`));
    this.#cursors = position.lanes.map(({ epoch, index, given }) => ({ epoch, index, given }));
    this.#misfits = this.#lanes.map(() => 0);
  }

  #isPlace(lanes: unknown): boolean {
    const isCount = (value: unknown) => Number.isSafeInteger(value) && (value as number) >= 0;
    return (
      Array.isArray(lanes) &&
      lanes.length === this.#lanes.length &&
      lanes.every(({ epoch, index, given }, i) => {
        const { length } = this.#lanes[i] as Lane;
        return isCount(epoch) && isCount(index) && isCount(given) && index <= length && given <= epoch * length + index;
      })
    );
  }

  get #names(): string {
    return this.#set.sources.map(({ name }) => name).join(',');
  }
}

function lanesOf({ sources }: PromptSet, weights: readonly number[], key: string): Lane[] {
  invariant(weights.length === 0 || weights.length === sources.length, 'a weight for each source, or none');
  const largest = Math.max(...weights); // so that no sum overflows
  const total = weights.reduce((sum, weight) => sum + weight / largest, 0);
  let end = 0;
  const lanes = sources.map(({ name, items }, i): Lane => {
    const [from, length] = [end, items.length];
    end += length;
    return {
      name,
      weight: (weights[i] ?? 0) / largest / total,
      from,
      length,
      key: `${key} source ${i}`,
      orders: new Map(),
    };
  });
  const name = sources.map((source) => source.name).join(',');
  return weights.length > 0 ? lanes : [{ name, weight: 1, from: 0, length: end, key, orders: new Map() }];
}

/**
 * Whose turn it is (R. Tijdeman, The chairman assignment problem, 1980). With k lanes and n prompts given, lane i may give
 * the next one when w_i (n + 1) - given_i >= 1 / (2k - 2); of those, the one that would first be late. Then, for every n,
 *   |given_i - n w_i| <= 1 - 1 / (2k - 2)
 * Giving to the lane that is furthest behind looks the same but lets lanes fall behind by more than one.
 */
function turnOf(lanes: readonly Lane[], cursors: readonly Cursor[]): number {
  if (lanes.length === 1) return 0;
  const next = cursors.reduce((sum, { given }) => sum + given, 1);
  const slack = 1 / (2 * lanes.length - 2);
  let [turn, soonest] = [-1, Number.POSITIVE_INFINITY];
  let [last, furthest] = [0, Number.NEGATIVE_INFINITY];
  for (const [i, { weight }] of lanes.entries()) {
    const { given } = cursors[i] as Cursor;
    const behind = weight * next - given;
    const late = (given + 1 - slack) / weight; // the n at which it would be
    if (behind >= slack && late < soonest) [turn, soonest] = [i, late];
    if (behind > furthest) [last, furthest] = [i, behind];
  }
  // Together they are behind by 1, so one of k is by 1/k >= slack; but for rounding, where two lanes are by 1/2 both.
  return turn >= 0 ? turn : last;
}

function skip(lane: Lane, cursor: Cursor, prompts: number): void {
  cursor.index += prompts;
  while (cursor.index > lane.length) {
    cursor.epoch += 1;
    cursor.index -= lane.length;
  }
}

function orderOf(lane: Lane, epoch: number): Int32Array {
  let order = lane.orders.get(epoch);
  if (order) return order;
  order = shuffled(lane.length, `epoch ${epoch} ${lane.key}`);
  const [oldest] = lane.orders.keys();
  if (lane.orders.size > 1 && oldest !== undefined) lane.orders.delete(oldest);
  lane.orders.set(epoch, order);
  return order;
}

/** 0..n-1 in an order that `key` alone decides (Fisher-Yates). */
function shuffled(n: number, key: string): Int32Array {
  const random = generator(key);
  const order = new Int32Array(n);
  for (let i = 0; i < n; i++) order[i] = i;
  for (let i = n - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    const other = order[j] as number;
    order[j] = order[i] as number;
    order[i] = other;
  }
  return order;
}

/** sfc32 (Doty-Humphrey), seeded with 128 bits of the key's hash: [0, 1). */
function generator(key: string): () => number {
  const seed = createHash('sha256').update(key).digest();
  let [a, b, c, d] = [0, 4, 8, 12].map((at) => seed.readInt32LE(at)) as [number, number, number, number];
  return () => {
    const out = (((a + b) | 0) + d) | 0;
    d = (d + 1) | 0;
    a = b ^ (b >>> 9);
    b = (c + (c << 3)) | 0;
    c = (((c << 21) | (c >>> 11)) + out) | 0;
    return (out >>> 0) / 2 ** 32;
  };
}

// ---- Length ----

/** Tokens of a rendered prompt, or why the chat template cannot render it. */
export type Length = number | string;

export interface Filter {
  readonly limit: number; // tokens, data.max_prompt_len
  readonly measure: (prompts: readonly Pick<Prompt, 'input' | 'tools'>[]) => Promise<readonly Length[]>;
  readonly onDropped: (dropped: { readonly prompt: Prompt; readonly length: Length }) => void;
}

/** Held-out prompts that fit. Rejects when none does. */
export async function fitting(prompts: readonly Prompt[], filter: Filter): Promise<Prompt[]> {
  const lengths: Length[] = [];
  while (lengths.length < prompts.length) {
    const room = new BatchRoom();
    const from = lengths.length;
    let to = from;
    while (to < prompts.length && room.takes(prompts[to] as Prompt)) to++;
    lengths.push(...(await filter.measure(prompts.slice(from, to))));
  }
  const kept = prompts.filter((prompt, i) => {
    const length = lengths[i] as Length;
    if (isWithin(length, filter.limit)) return true;
    filter.onDropped({ prompt, length });
    return false;
  });
  const names = [...new Set(prompts.map(({ source }) => source))].join(',');
  if (kept.length === 0 && prompts.length > 0) throw noneFits('eval.dataset', names, lengths, filter.limit);
  return kept;
}

function isWithin(length: Length, limit: number): boolean {
  return typeof length === 'number' && length <= limit;
}

function noneFits(option: string, name: string, lengths: readonly Length[], limit: number): ConfigError {
  const shortest = lengths.reduce(
    (least: number, n) => (typeof n === 'number' ? Math.min(least, n) : least),
    Number.POSITIVE_INFINITY,
  );
  const refused = lengths.filter((length) => typeof length === 'string');
  const why = [];
  if (Number.isFinite(shortest)) why.push(`the shortest has ${shortest} tokens`);
  if (refused.length > 0) why.push(`the chat template cannot render ${refused.length} of them: ${refused[0]}`);
  return new ConfigError([
    `--data.max_prompt_len ${limit}: none of the ${lengths.length} prompts of --${option} ${name} fits; ${why.join('; ')}`,
  ]);
}

const BATCH_ITEMS = 256; // measured in one request
const BATCH_CHARS = 1_000_000; // and no more than this: other requests wait behind it

/** How much of a request for lengths is left. The first prompt always has room. */
class BatchRoom {
  #items = 0;
  #chars = 0;

  takes({ input, tools }: Pick<Prompt, 'input' | 'tools'>): boolean {
    this.#chars += JSON.stringify(input).length + (tools ? JSON.stringify(tools).length : 0);
    this.#items += 1;
    return this.#items === 1 || (this.#items <= BATCH_ITEMS && this.#chars <= BATCH_CHARS);
  }
}

/** What is known of the lengths of a set, by place in it. */
class Lengths {
  readonly filter: Filter;
  readonly #tokens: Int32Array; // -1 = not known, -2 = cannot be rendered
  readonly #errors = new Map<number, string>();

  constructor(filter: Filter, n: number) {
    this.filter = filter;
    this.#tokens = new Int32Array(n).fill(-1);
  }

  /** null: not known. */
  of(at: number): Length | null {
    const tokens = this.#tokens[at] as number;
    if (tokens === -2) return this.#errors.get(at) ?? '';
    return tokens < 0 ? null : tokens;
  }

  fits(length: Length): boolean {
    return isWithin(length, this.filter.limit);
  }

  set(at: number, length: Length): void {
    this.#tokens[at] = typeof length === 'number' ? length : -2;
    if (typeof length === 'string') this.#errors.set(at, length);
  }
}
