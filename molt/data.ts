/**
 * Data: where prompts come from and the order they are given out in.
 *
 *   file or module -> checked prompts -> max_samples of them -> epoch 0 order, epoch 1 order, ...
 *
 * A source is a .jsonl file (an object per line), a .json file (a list of objects), or a TypeScript module that exports
 * `prompts({ split, seed })` (`PromptsFunction` below). Everything is read once, before any worker starts.
 *
 * Invariants
 *   1. The order of an epoch is a function of the seed, the epoch and the data, and of nothing else.
 *   2. An epoch gives out every prompt once; the next one follows without a gap, in another order.
 *   3. A position is bound to the data and the seed it was taken with: any change makes restoring it an error.
 * A bad file is refused with its line numbers, several at once, as a ConfigError that names the option.
 * Called by loop.ts. Elsewhere called dataset, dataloader, sampler; the position is the cursor or loader state.
 */
import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { readFile, stat } from 'node:fs/promises';
import { resolve } from 'node:path';
import { createInterface } from 'node:readline';
import { ConfigError } from './config.ts';
import type { Json, Prompt } from './types.ts';
import { failureText, importUserModule } from './user_module.ts';

export type Split = 'train' | 'heldout';

/** One prompt as a module gives it. */
export interface PromptInput {
  readonly input: Json; // text or chat messages
  readonly label?: Json; // what the agent judges by; null when left out
  readonly tools?: readonly Json[]; // JSON schemas offered to the template
}

/** The `prompts` export of a module. Finite. The held-out prompts should not depend on the seed, or scores do not compare. */
export type PromptsFunction = (args: { readonly split: Split; readonly seed: number }) => Prompts | Promise<Prompts>;
type Prompts = Iterable<PromptInput> | AsyncIterable<PromptInput>;

export interface DataOptions {
  readonly path: string;
  readonly split: Split; // also says which option a problem is reported under
  readonly seed: number;
  readonly inputKey: string; // columns of files; a module has its own fields
  readonly labelKey: string; // '' = no labels
  readonly toolsKey: string; // '' = no tools
  readonly maxSamples: number; // 0 = all
  readonly shuffle: boolean; // false: maxSamples takes the first ones, true: a seeded draw
}

/** Checked prompts in source order; `sha256` covers all of them. */
export interface PromptSet {
  readonly source: string;
  readonly items: readonly Item[];
  readonly sha256: string;
}
interface Item {
  readonly index: number; // position in the source, from 0
  readonly input: Json;
  readonly label: Json;
  readonly tools: readonly Json[] | null;
}

const MAX_PROMPTS = 10_000_000; // a module that never ends is told so
const SHOWN_PROBLEMS = 10;

/** Reads and checks a whole source. Throws ConfigError. */
export async function loadPrompts(options: DataOptions): Promise<PromptSet> {
  const problems = new Problems(options);
  const items: Item[] = [];
  let labels: { kind: string; where: string } | null = null;
  for await (const { where, record } of records(options, problems)) {
    const item = readItem(record, where, items.length, options, problems);
    if (item === null) continue;
    // A label that is text on one line and a number on another makes an exact comparison fail on half the data.
    const kind = kindOf(item.label);
    if (labels !== null && kind !== 'null' && kind !== labels.kind) {
      problems.add(`${where}: label is ${kind}, but ${labels.kind} at ${labels.where}`);
    }
    if (labels === null && kind !== 'null') labels = { kind, where };
    items.push(item);
  }
  if (items.length === 0 && problems.count === 0) problems.add('has no prompts');
  problems.throwIfAny();
  const chosen = choose(items, options);
  return { source: options.path, items: chosen, sha256: hashOf(chosen) };
}

/** All prompts once, in source order: what an evaluation runs over. */
export function promptsOf(set: PromptSet): Prompt[] {
  return set.items.map((item) => ({ source: set.source, epoch: 0, ...item }));
}

/** How many prompts of `a` have an input that is also in `b`: held-out data must give 0. */
export function sharedInputs(a: PromptSet, b: PromptSet): number {
  const inputs = new Set(b.items.map((item) => JSON.stringify(item.input)));
  return a.items.filter((item) => inputs.has(JSON.stringify(item.input))).length;
}

// ---- Order ----

/** Where a stream stands: `index` prompts of `epoch` were given out. Goes into checkpoints as it is. */
export interface Position {
  readonly epoch: number;
  readonly index: number;
  readonly seed: number;
  readonly shuffle: boolean;
  readonly sha256: string;
}

/** Prompts without end, epoch after epoch. */
export class PromptStream {
  readonly #set: PromptSet;
  readonly #seed: number;
  readonly #shuffle: boolean;
  #epoch = 0;
  #index = 0;
  #order: Int32Array; // of #epoch

  constructor(set: PromptSet, args: { readonly seed: number; readonly shuffle: boolean }) {
    this.#set = set;
    this.#seed = args.seed;
    this.#shuffle = args.shuffle;
    this.#order = this.#orderOf(0);
  }

  /** Prompts of one epoch. */
  get size(): number {
    return this.#set.items.length;
  }

  next(): Prompt {
    if (this.#index === this.#order.length) {
      this.#epoch += 1;
      this.#index = 0;
      this.#order = this.#orderOf(this.#epoch);
    }
    const item = this.#set.items[this.#order[this.#index] as number] as Item;
    this.#index += 1;
    return { source: this.#set.source, epoch: this.#epoch, ...item };
  }

  get position(): Position {
    return {
      epoch: this.#epoch,
      index: this.#index,
      seed: this.#seed,
      shuffle: this.#shuffle,
      sha256: this.#set.sha256,
    };
  }

  /** Continues where `position` was taken. Throws ConfigError when it was taken on other data, seed or order. */
  restore(position: Position): void {
    const now = this.position;
    const changes: string[] = [];
    if (position.sha256 !== now.sha256)
      changes.push(`the prompts are not those of the checkpoint (sha256 ${position.sha256}, now ${now.sha256})`);
    if (position.seed !== now.seed) changes.push(`--train.seed was ${position.seed}, is ${now.seed}`);
    if (position.shuffle !== now.shuffle) changes.push(`--data.shuffle was ${position.shuffle}, is ${now.shuffle}`);
    if (changes.length > 0)
      throw new ConfigError(changes.map((change) => `Cannot resume ${this.#set.source}: ${change}`));
    const { epoch, index } = position;
    if (
      !Number.isSafeInteger(epoch) ||
      epoch < 0 ||
      !Number.isSafeInteger(index) ||
      index < 0 ||
      index > this.#order.length
    ) {
      throw new ConfigError([`Cannot resume ${this.#set.source}: no position at epoch ${epoch}, index ${index}`]);
    }
    this.#epoch = epoch;
    this.#index = index;
    this.#order = this.#orderOf(epoch);
  }

  #orderOf(epoch: number): Int32Array {
    const n = this.#set.items.length;
    return this.#shuffle
      ? shuffled(n, `epoch ${epoch} seed ${this.#seed}`)
      : Int32Array.from({ length: n }, (_, i) => i);
  }
}

function choose(items: readonly Item[], options: DataOptions): readonly Item[] {
  if (options.maxSamples === 0 || options.maxSamples >= items.length) return items;
  if (!options.shuffle) return items.slice(0, options.maxSamples);
  const drawn = shuffled(items.length, `sample seed ${options.seed}`).subarray(0, options.maxSamples).sort();
  return Array.from(drawn, (i) => items[i] as Item);
}

/** 0..n-1 in an order that `key` alone decides (Fisher-Yates). */
function shuffled(n: number, key: string): Int32Array {
  const random = generator(key);
  const order = Int32Array.from({ length: n }, (_, i) => i);
  for (let i = n - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [order[i], order[j]] = [order[j] as number, order[i] as number];
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

function hashOf(items: readonly Item[]): string {
  const hash = createHash('sha256');
  for (const { index, input, label, tools } of items) hash.update(`${JSON.stringify([index, input, label, tools])}\n`);
  return hash.digest('hex');
}

// ---- Sources ----

interface Found {
  readonly where: string; // for messages: `line 3`
  readonly record: unknown;
}

async function* records(options: DataOptions, problems: Problems): AsyncGenerator<Found> {
  const { path } = options;
  const found = await stat(path).catch(() => null);
  if (!found?.isFile()) return problems.add(found === null ? 'no such file' : 'is not a file');
  if (path.endsWith('.jsonl')) yield* jsonLines(path, problems);
  else if (path.endsWith('.json')) yield* jsonList(path, problems);
  else if (/\.[cm]?[jt]s$/.test(path)) yield* moduleItems(options, problems);
  else problems.add('must be a .jsonl file, a .json file or a module (.ts, .js) that exports `prompts`');
}

async function* jsonLines(path: string, problems: Problems): AsyncGenerator<Found> {
  let number = 0;
  for await (const raw of createInterface({ input: createReadStream(path), crlfDelay: Number.POSITIVE_INFINITY })) {
    number += 1;
    const line = number === 1 ? raw.replace(/^\uFEFF/, '') : raw;
    if (line.trim() === '') continue;
    const where = `line ${number}`;
    try {
      yield { where, record: JSON.parse(line) };
    } catch (error) {
      if (!(error instanceof SyntaxError)) throw error;
      problems.add(`${where}: not JSON: ${error.message}`);
    }
  }
}

async function* jsonList(path: string, problems: Problems): AsyncGenerator<Found> {
  const text = (await readFile(path, 'utf8')).replace(/^\uFEFF/, '');
  let list: unknown;
  try {
    list = JSON.parse(text);
  } catch (error) {
    const { message } = error as SyntaxError;
    const at = /position (\d+)/.exec(message)?.[1];
    const line = at === undefined ? '' : `line ${text.slice(0, Number(at)).split('\n').length}: `;
    return problems.add(`${line}not JSON: ${message}`);
  }
  if (!Array.isArray(list)) return problems.add(`must hold a list of objects, got ${kindOf(list)}`);
  for (const [i, record] of list.entries()) yield { where: `item ${i + 1}`, record };
}

const MODULE_FIELDS = new Set(['input', 'label', 'tools']);

async function* moduleItems(options: DataOptions, problems: Problems): AsyncGenerator<Found> {
  let module: Record<string, unknown>;
  try {
    module = await importUserModule(options.path);
  } catch (error) {
    return problems.add((error as Error).message);
  }
  if (typeof module.prompts !== 'function') return problems.add('does not export a function `prompts`');
  try {
    yield* givenItems(
      await (module.prompts as PromptsFunction)({ split: options.split, seed: options.seed }),
      problems,
    );
  } catch (error) {
    problems.add(`its \`prompts\` failed: ${failureText(error, resolve(options.path))}`);
  }
}

async function* givenItems(prompts: unknown, problems: Problems): AsyncGenerator<Found> {
  if (
    typeof prompts !== 'object' ||
    prompts === null ||
    !(Symbol.iterator in prompts || Symbol.asyncIterator in prompts)
  ) {
    return problems.add(`its \`prompts\` must give a list or another iterable, got ${kindOf(prompts)}`);
  }
  let number = 0;
  for await (const record of prompts as Iterable<unknown>) {
    number += 1;
    if (number > MAX_PROMPTS) return problems.add(`gives more than ${MAX_PROMPTS} prompts; \`prompts\` must end`);
    const where = `prompt ${number}`;
    for (const key of Object.keys(kindOf(record) === 'an object' ? (record as object) : {})) {
      if (!MODULE_FIELDS.has(key))
        problems.add(`${where}: unknown field ${key}, allowed are ${[...MODULE_FIELDS].join(', ')}`);
    }
    yield { where, record };
  }
}

// ---- Checking ----

function readItem(
  record: unknown,
  where: string,
  index: number,
  options: DataOptions,
  problems: Problems,
): Item | null {
  if (kindOf(record) !== 'an object') {
    problems.add(`${where}: must be an object, got ${kindOf(record)}`);
    return null;
  }
  const columns = record as Record<string, unknown>;
  const before = problems.count;
  const isFile = /\.jsonl?$/.test(options.path);
  const read = (option: 'input_key' | 'label_key' | 'tools_key', key: string, field: string): unknown => {
    const name = isFile ? key : field;
    if (isFile && name !== '' && !Object.hasOwn(columns, name)) {
      problems.add(
        `${where}: no column ${name} (--data.${option}); it has ${Object.keys(columns).join(', ') || 'none'}`,
      );
    }
    return name !== '' && Object.hasOwn(columns, name) ? columns[name] : null;
  };
  const input = read('input_key', options.inputKey, 'input');
  const label = read('label_key', options.labelKey, 'label') ?? null;
  const tools = read('tools_key', options.toolsKey, 'tools') ?? null;
  if (problems.count === before) {
    if (!isInput(input))
      problems.add(`${where}: input must be text or a list of chat messages, not empty, got ${kindOf(input)}`);
    if (!isJson(label)) problems.add(`${where}: label must be plain JSON, got ${kindOf(label)}`);
    if (!isTools(tools)) problems.add(`${where}: tools must be a list of JSON schemas, got ${kindOf(tools)}`);
  }
  return problems.count === before
    ? { index, input: input as Json, label: label as Json, tools: tools as Json[] | null }
    : null;
}

function isInput(value: unknown): boolean {
  if (typeof value === 'string') return value.trim() !== '';
  const isMessage = (item: unknown): boolean =>
    kindOf(item) === 'an object' && typeof (item as { role?: unknown }).role === 'string';
  return Array.isArray(value) && value.length > 0 && value.every(isMessage) && isJson(value);
}

function isTools(value: unknown): boolean {
  return (
    value === null || (Array.isArray(value) && value.every((tool) => kindOf(tool) === 'an object') && isJson(value))
  );
}

/** Survives JSON unchanged: a file always does, what a module computes may not. */
function isJson(value: unknown): boolean {
  if (value === null || typeof value === 'string' || typeof value === 'boolean') return true;
  if (typeof value === 'number') return Number.isFinite(value);
  if (Array.isArray(value)) return value.every(isJson);
  return kindOf(value) === 'an object' && Object.values(value as object).every(isJson);
}

function kindOf(value: unknown): string {
  if (value === null) return 'null';
  if (Array.isArray(value)) return 'a list';
  if (typeof value === 'string') return 'text';
  if (typeof value === 'object')
    return Object.getPrototypeOf(value) === Object.prototype ? 'an object' : `a ${value.constructor?.name ?? 'class'}`;
  return typeof value === 'number' && !Number.isFinite(value) ? String(value) : `a ${typeof value}`;
}

/** Collects what is wrong with a source, so that it is all said at once. */
class Problems {
  count = 0;
  readonly #lines: string[] = [];
  readonly #name: string;

  constructor({ split, path }: DataOptions) {
    this.#name = `--${split === 'train' ? 'data.prompt_dataset' : 'eval.dataset'} ${path}`;
  }

  add(problem: string): void {
    this.count += 1;
    if (this.#lines.length < SHOWN_PROBLEMS) this.#lines.push(`${this.#name}: ${problem}`);
  }

  throwIfAny(): void {
    const more = this.count - this.#lines.length;
    if (this.count > 0)
      throw new ConfigError(more > 0 ? [...this.#lines, `${this.#name}: ${more} more problems`] : this.#lines);
  }
}
