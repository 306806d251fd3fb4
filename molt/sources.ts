/**
 * Sources of prompts: each is read and checked here, whole, before any worker starts.
 *
 *   .jsonl   an object per line               columns named by data.input_key, label_key, tools_key
 *   .json    a list of objects                the same
 *   .ts .js  exports `prompts({split, seed})` a list, iterable or async iterable of {input, label, tools}
 *   .py      prints an object per line        run as  python FILE.py ARGS --split train|heldout --seed N
 *
 * Invariants
 *   1. What is wrong is a line that names option, source and place, several at once; nothing is skipped.
 *   2. Text is UTF-8; a line ends in LF or CRLF and nowhere else (JSON may hold U+2028); a byte-order mark is dropped.
 *   3. Memory is bounded: MAX_PROMPTS and MAX_BYTES of a source, MAX_LINE_BYTES of a line.
 *   4. A program runs to its end, with status 0, or its source is refused; it never outlives this process.
 * A program gets PYTHONHASHSEED=0, so that one which goes through a set prints the same prompts when a run is resumed.
 * Called by data.ts. Elsewhere called dataset loader, generator.
 */
import { isUtf8 } from 'node:buffer';
import { createReadStream } from 'node:fs';
import { readFile, stat } from 'node:fs/promises';
import type { Readable } from 'node:stream';
import { getHeapStatistics } from 'node:v8';
import type { PromptSource } from './config.ts';
import { pythonCommand, startProgram } from './launch.ts';
import { importModule, whatWasThrown } from './modules.ts';
import type { Json } from './types.ts';

export type Split = 'train' | 'heldout';

/** One prompt as a module or a program gives it. */
export interface PromptInput {
  readonly input: Json; // text or chat messages
  readonly label?: Json; // what the agent judges by; null when left out
  readonly tools?: readonly Json[]; // JSON schemas offered to the template
}

/** The `prompts` export of a module. Finite. The held-out prompts should not depend on the seed, or scores do not compare. */
export type PromptsFunction = (args: { readonly split: Split; readonly seed: number }) => Prompts | Promise<Prompts>;
type Prompts = Iterable<PromptInput> | AsyncIterable<PromptInput>;

/** One prompt, checked. */
export interface Item {
  readonly index: number; // position in its source, from 0
  readonly input: Json;
  readonly label: Json;
  readonly tools: readonly Json[] | null;
}

export interface ReadOptions {
  readonly split: Split;
  readonly seed: number;
  readonly inputKey: string; // columns of files; modules and programs have fields of fixed names
  readonly labelKey: string; // '' = no labels
  readonly toolsKey: string; // '' = no tools
  readonly python: string; // interpreter of programs; '' = that of the repository
  readonly silenceMs: number; // a program without a new line for this long is killed
  readonly warn: (line: string) => void; // what programs say on stderr
}

const MAX_PROMPTS = 10_000_000; // a module or program that never ends is told so
const MAX_BYTES = getHeapStatistics().heap_size_limit / 4; // text takes up to twice its bytes, and the records come on top
const MAX_LINE_BYTES = 64 * 1024 * 1024; // more than that is no message either (protocol.ts)
const MAX_DEPTH = 1000; // of nested JSON
const LAST_WORDS = 5; // lines of a program's stderr in an error
const SHOWN_PROBLEMS = 10;

/** Collects what is wrong with a source, so that it is all said at once. */
export class Problems {
  count = 0;
  readonly #lines: string[] = [];
  readonly #name: string;

  constructor(split: Split, source: string) {
    this.#name = `--${split === 'train' ? 'data.prompt_dataset' : 'eval.dataset'} ${source}`;
  }

  add(problem: string): void {
    this.count += 1;
    if (this.#lines.length < SHOWN_PROBLEMS) this.#lines.push(`${this.#name}: ${problem}`);
  }

  get lines(): readonly string[] {
    const more = this.count - this.#lines.length;
    return more > 0 ? [...this.#lines, `${this.#name}: ${more} more problems`] : this.#lines;
  }
}

/** All prompts of a source in its order; what cannot be used is in `problems`. */
export async function readSource(source: PromptSource, options: ReadOptions, problems: Problems): Promise<Item[]> {
  const items: Item[] = [];
  let labels: { kind: string; where: string } | null = null;
  let records = 0;
  for await (const { where, record } of recordsOf(source, options, problems)) {
    if (++records > MAX_PROMPTS) {
      problems.add(`gives more than ${MAX_PROMPTS} prompts, more than are ever kept`);
      break;
    }
    const item = readItem(record, where, items.length, keysOf(source, options), problems);
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
  return items;
}

// ---- Records ----

interface Found {
  readonly where: string; // for messages: `line 3`
  readonly record: unknown;
}

async function* recordsOf(source: PromptSource, options: ReadOptions, problems: Problems): AsyncGenerator<Found> {
  const { path } = source;
  const found = await stat(path).catch(() => null);
  if (found === null) return problems.add('no such file');
  if (!found.isFile()) return problems.add(found.isDirectory() ? 'is a directory, not a file' : 'is not a file');
  if (path.endsWith('.jsonl')) yield* fileLines(path, problems);
  else if (path.endsWith('.json')) yield* fileList(path, problems);
  else if (path.endsWith('.py')) yield* programLines(source, options, problems);
  else if (/\.[cm]?[jt]s$/.test(path)) yield* moduleItems(path, options, problems);
  else
    problems.add(
      'must be a .jsonl file, a .json file, a module (.ts, .js) that exports `prompts`, or a Python program (.py)',
    );
}

async function* fileLines(path: string, problems: Problems): AsyncGenerator<Found> {
  try {
    for await (const line of linesOf(createReadStream(path), problems)) yield* parsed(line, problems);
  } catch (error) {
    problems.add(`cannot be read: ${(error as Error).message}`);
  }
}

function* parsed({ text, number }: Line, problems: Problems): Generator<Found> {
  const where = `line ${number}`;
  if (text === null) return problems.add(`${where}: is not UTF-8`);
  if (text.trim() === '') return;
  let record: unknown;
  try {
    record = JSON.parse(text);
  } catch (error) {
    return problems.add(`${where}: not JSON: ${(error as SyntaxError).message}`);
  }
  yield { where, record };
}

async function* fileList(path: string, problems: Problems): AsyncGenerator<Found> {
  let list: unknown;
  let text = '';
  try {
    const bytes = await readFile(path);
    if (!isUtf8(bytes)) return problems.add('is not UTF-8');
    text = bytes.toString('utf8').replace(/^\uFEFF/, '');
    list = JSON.parse(text);
  } catch (error) {
    if (!(error instanceof SyntaxError)) return problems.add(`cannot be read: ${(error as Error).message}`);
    const at = /position (\d+)/.exec(error.message)?.[1];
    const line = at === undefined ? '' : `line ${text.slice(0, Number(at)).split('\n').length}: `;
    return problems.add(`${line}not JSON: ${error.message}`);
  }
  if (!Array.isArray(list)) return problems.add(`must hold a list of objects, got ${kindOf(list)}`);
  for (const [i, record] of list.entries()) yield { where: `item ${i + 1}`, record };
}

async function* moduleItems(path: string, options: ReadOptions, problems: Problems): AsyncGenerator<Found> {
  let number = 0;
  let exported: unknown;
  try {
    exported = (await importModule(path)).prompts;
  } catch (error) {
    return problems.add(`cannot be loaded: ${(error as Error).message}`);
  }
  if (typeof exported !== 'function') return problems.add('does not export a function `prompts`');
  try {
    const prompts = await (exported as PromptsFunction)({ split: options.split, seed: options.seed });
    if (!isIterable(prompts))
      return problems.add(`its \`prompts\` must give a list or another iterable, got ${kindOf(prompts)}`);
    for await (const record of prompts) yield* withKnownFields(`prompt ${++number}`, record, problems);
  } catch (error) {
    const after = number > 0 ? ` after prompt ${number}` : '';
    problems.add(`its \`prompts\` throws${after}: ${whatWasThrown(error)}`);
  }
}

function isIterable(value: unknown): value is Prompts {
  return typeof value === 'object' && value !== null && (Symbol.iterator in value || Symbol.asyncIterator in value);
}

const FIELDS = new Set(['input', 'label', 'tools']);

/** Of modules and programs: a misspelt field would otherwise be a prompt without it. */
function* withKnownFields(where: string, record: unknown, problems: Problems): Generator<Found> {
  for (const key of kindOf(record) === 'an object' ? Object.keys(record as object) : []) {
    if (!FIELDS.has(key)) problems.add(`${where}: unknown field ${key}, allowed are ${[...FIELDS].join(', ')}`);
  }
  yield { where, record };
}

// ---- Programs ----

async function* programLines(source: PromptSource, options: ReadOptions, problems: Problems): AsyncGenerator<Found> {
  const words = [...source.args, '--split', options.split, '--seed', String(options.seed)];
  let program: ReturnType<typeof startProgram>;
  try {
    program = startProgram([...pythonCommand('with_parent.py', options.python || undefined), source.path, ...words], {
      PYTHONUTF8: '1',
      PYTHONHASHSEED: '0',
    });
  } catch (error) {
    return problems.add((error as Error).message);
  }
  const said: string[] = [];
  const told = tell(program.stderr, source.path, options.warn, said).catch(() => {}); // a broken pipe has said enough
  const lastWords = () => (said.length > 0 ? `; it last said: ${said.join(' | ')}` : '');
  const { silenceMs } = options;
  let number = 0;
  let silent = false;
  const giveUp = () => {
    silent = true;
    program.kill();
  };
  let timer = setTimeout(giveUp, silenceMs);
  try {
    for await (const line of linesOf(program.stdout, problems)) {
      clearTimeout(timer);
      number = line.number;
      for (const { where, record } of parsed(line, problems)) yield* withKnownFields(where, record, problems);
      timer = setTimeout(giveUp, silenceMs);
    }
    if (!program.stdout.readableEnded) return; // too much, said already
    const { code, signal } = await program.exited;
    await told;
    const lines = `after ${number} ${number === 1 ? 'line' : 'lines'}`;
    if (silent)
      problems.add(`printed nothing for ${silenceMs / 1000} s ${lines} and was killed (data.silence_s)${lastWords()}`);
    else if (code === null && signal === null) problems.add(`could not be started with ${program.name}`);
    else if (code !== 0)
      problems.add(`${signal ? `was ended by ${signal}` : `exited with code ${code}`} ${lines}${lastWords()}`);
    else if (number === 0) problems.add(`printed nothing${lastWords()}`);
  } finally {
    clearTimeout(timer);
    program.kill();
  }
}

/** Passes on what a program says, keeping its last lines in `said`. Resolves when it has said everything. */
async function tell(stderr: Readable, name: string, warn: (line: string) => void, said: string[]): Promise<void> {
  let rest = '';
  const take = (line: string) => {
    if (line.trim() === '') return;
    said.push(line.trim());
    if (said.length > LAST_WORDS) said.shift();
    warn(`${name}: ${line}`);
  };
  stderr.setEncoding('utf8');
  for await (const chunk of stderr) {
    const lines = `${rest}${chunk}`.split(/[\r\n]/); // progress bars return without a new line
    rest = (lines.pop() ?? '').slice(-1000);
    for (const line of lines) take(line);
  }
  take(rest);
}

// ---- Lines ----

interface Line {
  readonly text: string | null; // null: not UTF-8
  readonly number: number; // from 1
}

/** Lines of a byte stream. Node's readline would also cut at U+2028 and repair what is not UTF-8, silently. */
async function* linesOf(stream: Readable, problems: Problems): AsyncGenerator<Line> {
  let number = 0;
  let pieces: Buffer[] = []; // of the line that has not ended
  let bytes = 0;
  let total = 0;
  const line = (end: Buffer): Line => {
    const whole = pieces.length > 0 ? Buffer.concat([...pieces, end]) : end;
    pieces = [];
    bytes = 0;
    number += 1;
    if (!isUtf8(whole)) return { text: null, number };
    const text = whole.toString('utf8').replace(/\r$/, '');
    return { text: number === 1 ? text.replace(/^\uFEFF/, '') : text, number };
  };
  for await (const chunk of stream as AsyncIterable<Buffer>) {
    total += chunk.length;
    if (total > MAX_BYTES) {
      const size = `${Math.round(MAX_BYTES / 1e6)} MB`;
      return problems.add(
        `more than ${size}, a quarter of what Node may use (NODE_OPTIONS=--max-old-space-size=MB raises it)`,
      );
    }
    let from = 0;
    for (let at = chunk.indexOf(10); at >= 0; at = chunk.indexOf(10, from)) {
      yield line(chunk.subarray(from, at));
      from = at + 1;
    }
    if (from < chunk.length) pieces.push(chunk.subarray(from));
    bytes += chunk.length - from;
    if (bytes > MAX_LINE_BYTES) return problems.add(`line ${number + 1}: longer than ${MAX_LINE_BYTES} bytes`);
  }
  if (bytes > 0) yield line(Buffer.alloc(0));
}

// ---- Checking ----

interface Keys {
  readonly input: string;
  readonly label: string;
  readonly tools: string;
  readonly areColumns: boolean; // named by options and all required
}

function keysOf({ path }: PromptSource, options: ReadOptions): Keys {
  return /\.jsonl?$/.test(path)
    ? { input: options.inputKey, label: options.labelKey, tools: options.toolsKey, areColumns: true }
    : { input: 'input', label: 'label', tools: 'tools', areColumns: false };
}

function readItem(record: unknown, where: string, index: number, keys: Keys, problems: Problems): Item | null {
  if (kindOf(record) !== 'an object') {
    problems.add(`${where}: must be an object, got ${kindOf(record)}`);
    return null;
  }
  const columns = record as Record<string, unknown>;
  const before = problems.count;
  const read = (field: 'input' | 'label' | 'tools'): unknown => {
    const name = keys[field];
    if (keys.areColumns && name !== '' && !Object.hasOwn(columns, name)) {
      problems.add(
        `${where}: no column ${name} (--data.${field}_key); it has ${Object.keys(columns).join(', ') || 'none'}${field === 'label' ? "; --data.label_key '' if there are no labels" : ''}`,
      );
    }
    return name !== '' && Object.hasOwn(columns, name) ? columns[name] : null;
  };
  const input = read('input');
  const label = read('label') ?? null;
  const tools = read('tools') ?? null;
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

/** Survives JSON unchanged: a file always does, what a module computes may not (a cycle, for one). */
function isJson(value: unknown, depth = 0): boolean {
  if (value === null || typeof value === 'string' || typeof value === 'boolean') return true;
  if (typeof value === 'number') return Number.isFinite(value);
  if (depth > MAX_DEPTH) return false;
  const members = Array.isArray(value) ? value : kindOf(value) === 'an object' ? Object.values(value as object) : null;
  return members?.every((member) => isJson(member, depth + 1)) ?? false;
}

function kindOf(value: unknown): string {
  if (value === null) return 'null';
  if (Array.isArray(value)) return 'a list';
  if (typeof value === 'string') return 'text';
  if (typeof value === 'object')
    return Object.getPrototypeOf(value) === Object.prototype ? 'an object' : `a ${value.constructor?.name ?? 'class'}`;
  return typeof value === 'number' && !Number.isFinite(value) ? String(value) : `a ${typeof value}`;
}
