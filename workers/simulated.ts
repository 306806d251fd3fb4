/**
 * Simulated workers: engines, trainer ranks and a tokenizer over the real wire, several identities in one process.
 *
 *   npx tsx workers/simulated.ts --endpoint tcp://127.0.0.1:PORT --worker-id engine-0 [--worker-id trainer-0 ...]
 *
 * The only stand-in of the project. It passes the contract tests of the real workers (test/engine_contract.test.ts and
 * its sisters) and learns: simulated_model.ts is a small but true language model with a true gradient. What it adds is
 * a script, in `welcome.options.script`, that says when to be slow and when to fail:
 *
 *   {"latency_ms": {"step": 5, "run": 20, "*": 1},        per request kind; step = an engine's tick
 *    "tokens_per_step": 4,
 *    "reply": [{"when": "2+2=", "texts": ["4", "5"]}],    turns whose prompt ends so; the seed chooses the text
 *    "failures": [{"worker": "engine-1", "what": "exit", "on": "generate", "nth": 3}]}
 *
 * Decisions
 *   - The kind is the worker id up to its first dash.
 *   - `exit` ends the process, so all identities it hosts: give a worker that is to die its own process.
 *   - A scripted reply decides the tokens; their logprobs stay those of the model.
 *   - All ranks of a `rendezvous` must live in one process: their all-reduce is a shared object.
 * Started by launch.ts (startMany). `model_path`: `simulated`, `simulated:SEED`, or a directory with a
 * model.safetensors that `export` wrote.
 */
import { mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { crc32 } from 'node:zlib';
import { readWorkerArgs, WorkerLink } from '../molt/bus.ts';
import type { Fields, Frames, ReplyFields, ReplyFrames, RequestKind } from '../molt/protocol.ts';
import { RemoteError } from '../molt/protocol.ts';
import type { Json } from '../molt/types.ts';
import {
  adamStep,
  argmax,
  decodeIds,
  drawFrom,
  encodeText,
  gradNorm,
  IM_END,
  initialWeights,
  type LossNumbers,
  logitsAt,
  newOptimState,
  NUM_PARAMETERS,
  packWeights,
  type OptimOptions,
  type OptimState,
  parseTurn,
  pick,
  policyLoss,
  type Row,
  renderText,
  STOP_TOKEN_IDS,
  scoreIds,
  suffixText,
  TemplateError,
  TENSORS,
  TextStream,
  uniform,
  unpackWeights,
  VOCAB_SIZE,
} from './simulated_model.ts';

const RETRY_AFTER_MS = 20;
const ALIGN_BYTES = 64;
/** Seen in the log and the exit status of a worker that died by its script. */
const SCRIPTED_EXIT = 86;

const badRequest = (field: string, message: string): RemoteError => new RemoteError('bad_request', message, { field });
const unsupported = (field: string, message: string): RemoteError => new RemoteError('unsupported', message, { field });

// ---- Script ----

interface FailureRule {
  readonly worker?: string; // absent: every identity with this script
  readonly incarnation?: number; // absent: the first, so that a restarted worker is well
  readonly what: 'exit' | 'stall' | 'slow' | 'corrupt' | 'swap_layout';
  readonly on: string; // a request kind, or `step` (tick of an engine)
  readonly nth: number; // counted from 1 per identity and `on`; slow: from this one on
  readonly ms?: number; // slow
}
interface Script {
  readonly latency_ms?: Readonly<Record<string, number>>;
  readonly tokens_per_step?: number;
  readonly reply?: readonly { readonly when: string; readonly texts: readonly string[] }[];
  readonly failures?: readonly FailureRule[];
}
const SCRIPT_KEYS = ['latency_ms', 'tokens_per_step', 'reply', 'failures'];
const FAILURE_KEYS = ['worker', 'incarnation', 'what', 'on', 'nth', 'ms'];

/** What happens to an identity when a message or tick comes. The last two act on the bytes of a weight transfer, below. */
const FAILURES: Record<FailureRule['what'], (rule: FailureRule) => Promise<void> | null> = {
  exit: () => process.exit(SCRIPTED_EXIT),
  stall: () => new Promise(() => {}), // and all later ones wait behind it; heartbeats go on
  slow: (rule) => sleep(rule.ms ?? 0),
  corrupt: () => null,
  swap_layout: () => null,
};
/**
 * On a copy of a tensor. `corrupt` strikes between the two checksums, so the reader finds it. `swap_layout` strikes outside
 * of them: a transposed square matrix has right bytes, name and shape and a wrong meaning, which only `score` finds.
 */
const DAMAGE = {
  corrupt: (bytes: Buffer) => void bytes.writeUInt8(bytes.readUInt8(0) ^ 1, 0),
  swap_layout: (bytes: Buffer) => transpose(new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4), VOCAB_SIZE),
} as const;
const DAMAGED_TENSOR = 'model.bigram.weight'; // square

function transpose(square: Float32Array, rows: number): void {
  const old = square.slice();
  for (let i = 0; i < square.length; i++) square[i] = old[(i % rows) * rows + Math.floor(i / rows)] as number;
}

/** A misspelled failure would be a test that tests nothing, so unknown words are errors. */
function readScript(value: Json | undefined): Script {
  const script = (value ?? {}) as Script;
  const failures = script.failures ?? [];
  for (const key of Object.keys(script)) if (!SCRIPT_KEYS.includes(key)) throw new Error(`Unknown key of script: ${key}`);
  for (const rule of failures) {
    for (const key of Object.keys(rule)) if (!FAILURE_KEYS.includes(key)) throw new Error(`Unknown key of a failure: ${key}`);
    if (!Object.hasOwn(FAILURES, rule.what)) throw new Error(`Unknown failure: ${rule.what}`);
    if (!(rule.nth >= 1) || !rule.on) throw new Error(`Failure ${rule.what} needs on and nth >= 1`);
  }
  return script;
}

/** One identity: its link, its place in the script, and its order of work. */
class Identity {
  readonly link: WorkerLink;
  readonly script: Script;
  readonly options: { readonly [key: string]: Json };
  readonly #failures: readonly FailureRule[];
  readonly #counts = new Map<string, number>();
  #tail: Promise<unknown> = Promise.resolve();
  #stalled: Promise<void> | null = null;

  constructor(link: WorkerLink, workerId: string) {
    this.link = link;
    this.options = link.options as { readonly [key: string]: Json };
    this.script = readScript(this.options.script);
    this.#failures = (this.script.failures ?? []).filter(
      (rule) => (rule.worker ?? workerId) === workerId && (rule.incarnation ?? 0) === link.incarnation,
    );
  }

  /** Counts this message or tick; null when the script has nothing to say about it, so that nothing waits. */
  arrive(on: string): Promise<void> | null {
    if (this.#stalled) return this.#stalled;
    const nth = (this.#counts.get(on) ?? 0) + 1;
    this.#counts.set(on, nth);
    const delays: Promise<void>[] = [];
    const latency = this.script.latency_ms?.[on] ?? (on === 'step' ? 0 : (this.script.latency_ms?.['*'] ?? 0));
    if (latency > 0) delays.push(sleep(latency));
    for (const rule of this.#failures) {
      if (rule.on !== on || (rule.what === 'slow' ? nth < rule.nth : nth !== rule.nth)) continue;
      const delay = FAILURES[rule.what](rule);
      if (delay) delays.push(delay);
      if (rule.what === 'stall') this.#stalled = delay;
    }
    return delays.length > 0 ? Promise.all(delays).then(() => {}) : null;
  }

  /** A tensor of the transfer in progress, damaged where the script says so. */
  damage(what: keyof typeof DAMAGE, on: RequestKind, name: string, bytes: Buffer): Buffer {
    const rule = this.#failures.find((r) => r.what === what && r.on === on && r.nth === this.#counts.get(on));
    if (!rule || name !== DAMAGED_TENSOR) return bytes;
    const copy = Buffer.from(Uint8Array.from(bytes).buffer);
    DAMAGE[what](copy);
    return copy;
  }

  /**
   * Requests start in the order they came. One at a time, as in a Python worker, unless `concurrent`: an engine goes on
   * answering while a pause drains.
   */
  serve<K extends RequestKind>(
    kind: K,
    answer: (fields: Fields<K>, frames: Frames<K>) => Answer<K> | Promise<Answer<K>>,
    concurrent = false,
  ): void {
    this.link.handle(kind, (fields, frames) => {
      const started = this.#tail.then(async () => {
        await this.arrive(kind);
        return { answer: answer(fields, frames) }; // boxed, so that the next one need not wait for it
      });
      const done = started.then((box) => box.answer);
      this.#tail = (concurrent ? started : done).catch(() => {});
      return done.catch((error: unknown) => this.#rethrow(error));
    });
  }

  /** A fatal error is sent, then the process ends: never a worker in an unknown state. */
  async #rethrow(error: unknown): Promise<never> {
    if (error instanceof RemoteError && error.type === 'fatal') {
      console.error(`fatal: ${error.message}`);
      setImmediate(() => void this.link.close().finally(() => process.exit(1)));
    }
    throw error;
  }
}
type Answer<K extends RequestKind> = { fields: ReplyFields<K>; frames: ReplyFrames<K> };
const NOTHING = { fields: {}, frames: {} } as const;

// ---- Rows on the wire ----

/** Ragged rows: `lengths` cuts every per-token array. */
function cut<A extends Int32Array | Float32Array | Uint8Array>(array: A, lengths: Int32Array, name: string): A[] {
  let at = 0;
  const rows: A[] = [];
  for (const n of lengths) {
    if (n < 0) throw badRequest('lengths', `Cannot cut ${name}: a row has length ${n}`);
    rows.push(array.subarray(at, at + n) as A);
    at += n;
  }
  if (at !== array.length) throw badRequest('lengths', `Cannot cut ${name}: lengths add up to ${at}, it has ${array.length}`);
  return rows;
}

function checkIds(ids: Int32Array, field: string): void {
  const bad = ids.find((id) => id < 0 || id >= VOCAB_SIZE);
  if (bad !== undefined) throw badRequest(field, `Token id ${bad} is outside the vocabulary of ${VOCAB_SIZE}`);
}

function scoreRows(weights: Float32Array, frames: { ids: Int32Array; lengths: Int32Array }, temperature: number): Float32Array {
  checkIds(frames.ids, 'ids');
  const out = new Float32Array(frames.ids.length);
  let at = 0;
  for (const ids of cut(frames.ids, frames.lengths, 'ids')) {
    out.set(scoreIds(weights, ids, temperature), at);
    at += ids.length;
  }
  return out;
}

// ---- Model files ----

const WEIGHTS_FILE = 'model.safetensors';

/** Weights of a `model_path`. A path that is neither a name of the model nor a directory is an error. */
function loadModel(path: string): Float32Array {
  const named = /^(?:simulated(?::(\d+))?)?$/.exec(path);
  return named ? initialWeights(Number(named[1] ?? 0)) : unpackWeights(readFileSync(join(path, WEIGHTS_FILE)));
}

// ---- Engine ----

type Ending = 'stop' | 'length' | 'abort' | 'error';
interface Live {
  readonly handle: number;
  readonly fields: Fields<'generate'>;
  readonly ids: number[]; // prompt, then what is sampled here
  readonly promptLength: number;
  readonly stream: TextStream | null; // where text is wanted
  readonly reply: readonly number[] | null; // scripted tokens, from the first one of the turn on
  readonly stopBytes: number; // length of the longest stop string
  cachedTokens: number;
}

class SimulatedEngine {
  readonly #identity: Identity;
  readonly #maxRequests: number;
  readonly #maxLen: number;
  readonly #row = new Float64Array(VOCAB_SIZE);
  #weights: Float32Array;
  #version = 0;
  #running: Live[] = [];
  #queue: Live[] = []; // came while paused
  #prefixes: { readonly ids: readonly number[]; readonly version: number }[] = []; // what a key/value cache would hold
  #paused = false;
  #draining: (() => void) | null = null;
  #pause: { epoch: number; answer: Promise<Answer<'pause'>> } | null = null;
  #staged = new Map<string, Float32Array>();
  #nextHandle = 1;
  #ticking = false;
  #stats = { steps: 0, running: 0, waiting: 0, paused: 0, tokens: 0 };

  constructor(identity: Identity) {
    const options = identity.options as { model_path: string; max_requests: number; max_len: number };
    this.#identity = identity;
    this.#weights = loadModel(options.model_path);
    this.#maxRequests = options.max_requests;
    this.#maxLen = options.max_len;
    this.#listen();
    this.#publish();
    const { model_path: model, max_requests, max_len } = options;
    identity.link.ready({ model, vocab_size: VOCAB_SIZE, dtype: 'float32', max_len, max_requests });
  }

  #listen(): void {
    const id = this.#identity;
    id.serve('generate', (fields, { prompt }) => this.#generate(fields, prompt), true);
    id.serve('abort', ({ handles }) => this.#abort(handles), true);
    id.serve('pause', (fields) => this.#onPause(fields), true);
    id.serve('load_weights', (fields) => this.#load(fields), true);
    id.serve('resume', ({ epoch }) => this.#resume(epoch), true);
    id.serve('score', (_, frames) => ({ fields: { version: this.#version }, frames: { logprobs: scoreRows(this.#weights, frames, 1) } }), true);
  }

  #publish(): void {
    const s = this.#stats;
    s.running = this.#running.length;
    s.waiting = this.#queue.length;
    s.paused = this.#paused ? 1 : 0;
    this.#identity.link.stats = { ...s };
  }

  // ---- Requests ----

  #generate(fields: Fields<'generate'>, prompt: Int32Array): Answer<'generate'> {
    this.#check(fields, prompt);
    if (this.#running.length + this.#queue.length >= this.#maxRequests) {
      throw new RemoteError('overloaded', `Engine has ${this.#maxRequests} requests, its limit`, { retryAfterMs: RETRY_AFTER_MS });
    }
    const live: Live = {
      handle: this.#nextHandle++,
      fields,
      ids: [...prompt],
      promptLength: prompt.length,
      stream: fields.want_text ? new TextStream() : null,
      reply: this.#scripted(fields, prompt),
      stopBytes: Math.max(0, ...fields.sampling.stop.map((s) => Buffer.byteLength(s))),
      cachedTokens: 0,
    };
    if (this.#paused || this.#draining) this.#queue.push(live);
    else this.#admit(live);
    this.#wake();
    return { fields: { handle: live.handle }, frames: {} };
  }

  #check(fields: Fields<'generate'>, prompt: Int32Array): void {
    const s = fields.sampling;
    const length = prompt.length + s.max_tokens;
    if (prompt.length === 0) throw badRequest('prompt', 'The prompt is empty');
    checkIds(prompt, 'prompt');
    if (fields.already < 0 || fields.already >= prompt.length) {
      throw badRequest('already', `already must be 0 to ${prompt.length - 1} for this prompt, got ${fields.already}`);
    }
    if (fields.heads !== 0) throw unsupported('heads', 'This engine returns no top-k heads');
    if (fields.want_routes) throw unsupported('want_routes', 'This model has no expert routes');
    if (!(s.temperature >= 0)) throw badRequest('sampling.temperature', `temperature must be at least 0, got ${s.temperature}`);
    if (!(s.top_p > 0 && s.top_p <= 1)) throw badRequest('sampling.top_p', `top_p must be in (0, 1], got ${s.top_p}`);
    if (s.top_k < 0) throw badRequest('sampling.top_k', `top_k must be at least 0, got ${s.top_k}`);
    if (s.max_tokens < 1) throw badRequest('sampling.max_tokens', `max_tokens must be at least 1, got ${s.max_tokens}`);
    if (prompt.length >= this.#maxLen) {
      throw badRequest('prompt', `A prompt of ${prompt.length} tokens leaves no room in max_len ${this.#maxLen}`);
    }
    if (length > this.#maxLen) {
      throw badRequest('sampling.max_tokens', `Prompt ${prompt.length} + max_tokens ${s.max_tokens} is over max_len ${this.#maxLen}`);
    }
    if (s.stop.includes('')) throw badRequest('sampling.stop', 'A stop string is empty');
    checkIds(Int32Array.from(s.stop_token_ids), 'sampling.stop_token_ids');
  }

  #scripted(fields: Fields<'generate'>, prompt: Int32Array): number[] | null {
    const rules = this.#identity.script.reply ?? [];
    if (rules.length === 0) return null;
    const text = decodeIds(prompt.subarray(0, prompt.length - fields.already));
    const rule = rules.find(({ when }) => text.endsWith(when) || text.endsWith(`${when}<|im_end|>\n<|im_start|>assistant\n`));
    if (!rule) return null;
    const choice = Math.floor(uniform(fields.sampling.seed, 0) * rule.texts.length);
    return [...encodeText(rule.texts[choice] ?? ''), IM_END];
  }

  /** The cache a real engine has: the longest prefix of the same version; the last prompt token always runs. */
  #admit(live: Live): void {
    for (const { ids, version } of this.#prefixes) {
      let n = 0;
      while (n < ids.length && n < live.promptLength - 1 && ids[n] === live.ids[n]) n++;
      if (version === this.#version) live.cachedTokens = Math.max(live.cachedTokens, n);
    }
    this.#running.push(live);
  }

  #abort(handles: readonly number[]): Answer<'abort'> {
    const gone = (live: Live): boolean => handles.includes(live.handle);
    const ended = [...this.#running, ...this.#queue].filter(gone);
    this.#running = this.#running.filter((live) => !gone(live));
    this.#queue = this.#queue.filter((live) => !gone(live));
    this.#send([], ended.map((live) => [live, 'abort']));
    return NOTHING;
  }

  // ---- Steps ----

  #wake(): void {
    this.#publish();
    if (this.#ticking || this.#paused || this.#running.length === 0) return;
    this.#ticking = true;
    // A turn of the event loop between ticks lets messages in. Not awaited: an error in a tick ends the process.
    setImmediate(() => void this.#tick());
  }

  async #tick(): Promise<void> {
    await this.#identity.arrive('step');
    this.#ticking = false;
    if (!this.#paused) this.#step();
    this.#wake();
  }

  /** One step: synchronous, so that all of its tokens are of one version. */
  #step(): void {
    const moved: [Live, number[], number[]][] = [];
    const ended: [Live, Ending][] = [];
    for (const live of this.#running) {
      const ids: number[] = [];
      const logprobs: number[] = [];
      let ending: Ending | null = null;
      for (let i = 0; i < (this.#identity.script.tokens_per_step ?? 1) && !ending; i++) {
        const [id, logprob] = this.#sample(live);
        ids.push(id);
        logprobs.push(logprob);
        live.ids.push(id);
        ending = this.#ending(live, id);
      }
      moved.push([live, ids, logprobs]);
      if (ending) ended.push([live, ending]);
    }
    this.#stats.steps += 1;
    for (const [live] of ended) this.#remember(live);
    this.#running = this.#running.filter((live) => !ended.some(([other]) => other === live));
    this.#send(moved, ended);
  }

  #sample(live: Live): [number, number] {
    const { sampling, already } = live.fields;
    const index = already + live.ids.length - live.promptLength;
    const scripted = live.reply?.[index];
    const logits = logitsAt(this.#weights, live.ids, live.ids.length, this.#row);
    // top_k and top_p would give a scripted token probability 0.
    const logprobs = drawFrom(logits, scripted === undefined ? sampling : { ...sampling, top_k: 0, top_p: 1 });
    const id = scripted ?? (sampling.temperature === 0 ? argmax(logprobs) : pick(logprobs, uniform(sampling.seed, index)));
    return [id, logprobs[id] as number];
  }

  /** Earlier tokens of the turn count: a stop string may have begun before the request was resumed here. */
  #ending(live: Live, id: number): Ending | null {
    const { sampling, already } = live.fields;
    if (sampling.stop_token_ids.includes(id)) return 'stop';
    if (live.stopBytes > 0) {
      const from = Math.max(live.promptLength - already, live.ids.length - live.stopBytes);
      const tail = decodeIds(live.ids.slice(from));
      if (sampling.stop.some((s) => tail.includes(s))) return 'stop';
    }
    return live.ids.length - live.promptLength >= sampling.max_tokens ? 'length' : null;
  }

  #remember(live: Live): void {
    this.#prefixes.push({ ids: live.ids.slice(0, -1), version: this.#version }); // the last token never ran
    if (this.#prefixes.length > this.#maxRequests) this.#prefixes.shift();
  }

  #send(moved: readonly [Live, number[], number[]][], ended: readonly [Live, Ending][]): void {
    if (moved.length > 0 || ended.length > 0) {
      const endings = new Map(ended);
      const wanted = moved.some(([live]) => live.stream);
      const text = ([live, ids]: [Live, number[], number[]]): string =>
        live.stream ? live.stream.push(ids) + (endings.has(live) ? live.stream.end() : '') : '';
      const ids = moved.flatMap(([, x]) => x);
      this.#stats.tokens += ids.length;
      this.#identity.link.send(
        'tokens',
        {
          version: this.#version,
          texts: wanted ? moved.map(text) : [],
          ended: ended.map(([live, reason]) => ({ handle: live.handle, reason, detail: null, cached_tokens: live.cachedTokens })),
        },
        {
          handles: Int32Array.from(moved, ([live]) => live.handle),
          counts: Int32Array.from(moved, ([, x]) => x.length),
          ids: Int32Array.from(ids),
          logprobs: Float32Array.from(moved.flatMap(([, , x]) => x)),
        },
      );
    }
    if (this.#running.length === 0) this.#draining?.();
    this.#publish();
  }

  // ---- Pause, load, resume ----

  #onPause({ epoch, mode, clear_cache }: Fields<'pause'>): Promise<Answer<'pause'>> {
    if (!['keep', 'drain', 'abort'].includes(mode)) throw badRequest('mode', `mode must be keep, drain or abort, got ${mode}`);
    if (this.#pause && epoch < this.#pause.epoch) {
      throw badRequest('epoch', `Pause of epoch ${epoch} comes after epoch ${this.#pause.epoch}`);
    }
    if (this.#pause?.epoch !== epoch) this.#pause = { epoch, answer: this.#stop(mode, clear_cache) };
    return this.#pause.answer;
  }

  async #stop(mode: string, clearCache: boolean): Promise<Answer<'pause'>> {
    this.#draining?.(); // a newer pause ends the wait of an older one
    if (mode === 'abort') this.#abort([...this.#running, ...this.#queue].map((live) => live.handle));
    if (mode === 'drain' && this.#running.length > 0 && !this.#paused) {
      await new Promise<void>((resolve) => {
        this.#draining = resolve;
      });
      this.#draining = null;
    }
    this.#paused = true;
    if (clearCache) this.#prefixes = [];
    this.#publish();
    const live = [...this.#running, ...this.#queue];
    return {
      fields: { version: this.#version },
      frames: {
        handles: Int32Array.from(live, (l) => l.handle),
        totals: Int32Array.from(live, (l) => l.ids.length - l.promptLength),
      },
    };
  }

  #resume(epoch: number): Answer<'resume'> {
    if (epoch !== this.#pause?.epoch) {
      throw badRequest('epoch', `Cannot resume epoch ${epoch}: the last pause was of epoch ${this.#pause?.epoch ?? 'none'}`);
    }
    if (this.#draining) throw badRequest('epoch', `Cannot resume epoch ${epoch}: its pause still drains`);
    if (this.#staged.size > 0) throw new RemoteError('fatal', `Cannot resume: ${this.#staged.size} tensors were sent, the last one was not`);
    if (this.#paused) {
      this.#paused = false;
      for (const live of this.#queue.splice(0)) this.#admit(live);
      this.#wake();
    }
    return NOTHING;
  }

  #load({ version, source, tensors, last }: Fields<'load_weights'>): Answer<'load_weights'> {
    if (!this.#paused) throw badRequest('version', `Cannot load version ${version}: the engine is not paused`);
    if (source.transport !== 'file') throw unsupported('source.transport', `Transport ${source.transport} is not known, want file`);
    const started = performance.now();
    try {
      const file = readFileSync(source.path);
      for (const entry of tensors) this.#stage(entry, file);
      const verified = performance.now();
      if (last) this.#swap(version);
      return { fields: { loaded: tensors.length, verify_ms: verified - started, load_ms: performance.now() - verified }, frames: {} };
    } catch (error) {
      throw new RemoteError('fatal', `Cannot load version ${version}: ${(error as Error).message}`);
    }
  }

  #stage(entry: Fields<'load_weights'>['tensors'][number], file: Buffer): void {
    const { name, offset, bytes } = entry;
    const spec = TENSORS.find((t) => t.name === name);
    if (!spec) throw new Error(`Tensor ${name} was sent but the model has none of that name`);
    if (entry.dtype !== 'f32' || String(entry.shape) !== String(spec.shape) || bytes !== spec.size * 4) {
      throw new Error(`Tensor ${name} was sent as ${entry.dtype} ${JSON.stringify(entry.shape)}, want f32 ${JSON.stringify(spec.shape)}`);
    }
    if (this.#staged.has(name)) throw new Error(`Tensor ${name} was sent twice`);
    if (offset + bytes > file.length) throw new Error(`Tensor ${name} ends at ${offset + bytes}, the file at ${file.length}`);
    const received = this.#identity.damage('corrupt', 'load_weights', name, file.subarray(offset, offset + bytes));
    const sum = crc32(received);
    if (sum !== entry.crc32) throw new Error(`Checksum of ${name} is ${sum.toString(16)}, the trainer sent ${entry.crc32.toString(16)}`);
    const placed = this.#identity.damage('swap_layout', 'load_weights', name, received);
    this.#staged.set(name, new Float32Array(Uint8Array.from(placed).buffer));
  }

  /** All or nothing: the old weights serve until every tensor of the model is there. */
  #swap(version: number): void {
    const weights = new Float32Array(NUM_PARAMETERS);
    for (const { name, from } of TENSORS) {
      const tensor = this.#staged.get(name);
      if (!tensor) throw new Error(`Tensor ${name} of the model was not sent`);
      weights.set(tensor, from);
    }
    this.#weights = weights;
    this.#version = version;
    this.#staged = new Map();
  }
}

// ---- Trainer ----

interface TrainerOptions {
  readonly model_path: string;
  readonly rank: number;
  readonly world_size: number;
  readonly rendezvous: string;
  readonly optim: OptimOptions;
}

interface Waiting {
  readonly name: string;
  readonly part: unknown;
  readonly resolve: (result: unknown) => void;
  readonly reject: (error: unknown) => void;
}

/** What the ranks of one rendezvous share: the model, the optimizer, and a place to meet. */
class TrainerGroup {
  static readonly #groups = new Map<string, TrainerGroup>();
  readonly worldSize: number;
  readonly weights: Float32Array;
  readonly optim: OptimState = newOptimState();
  readonly #waiting = new Map<number, Waiting>(); // by rank: a rank does one thing at a time

  static of(options: TrainerOptions): TrainerGroup {
    const group = TrainerGroup.#groups.get(options.rendezvous) ?? new TrainerGroup(options);
    TrainerGroup.#groups.set(options.rendezvous, group);
    return group;
  }

  private constructor(options: TrainerOptions) {
    this.worldSize = options.world_size;
    this.weights = loadModel(options.model_path);
  }

  /** A collective: when the last rank has come, `work` runs once on everyone's part, in rank order. */
  meet<P, R>(rank: number, name: string, part: P, work: (parts: P[]) => R): Promise<R> {
    return new Promise<R>((resolve, reject) => {
      this.#waiting.set(rank, { name, part, resolve: resolve as (result: unknown) => void, reject });
      if (this.#waiting.size < this.worldSize) return;
      const all = [...this.#waiting.entries()].sort(([a], [b]) => a - b).map(([, waiting]) => waiting);
      this.#waiting.clear();
      try {
        const other = all.find((waiting) => waiting.name !== name);
        if (other) throw new RemoteError('fatal', `Ranks have parted: one is in ${name}, one in ${other.name}`);
        const result = work(all.map((waiting) => waiting.part as P));
        for (const waiting of all) waiting.resolve(result);
      } catch (error) {
        for (const waiting of all) waiting.reject(error);
      }
    });
  }
}

class SimulatedRank {
  readonly #identity: Identity;
  readonly #rank: number;
  readonly #optim: OptimOptions;
  readonly #group: TrainerGroup;
  readonly #parts = new Map<number, { readonly of: number; readonly parts: Row[][] }>(); // by step, until `run`

  constructor(identity: Identity) {
    const options = identity.options as unknown as TrainerOptions;
    this.#identity = identity;
    this.#rank = options.rank;
    this.#optim = options.optim;
    this.#group = TrainerGroup.of(options);
    this.#listen();
    identity.link.ready({ model: options.model_path, vocab_size: VOCAB_SIZE, dtype: 'float32', parameters: NUM_PARAMETERS });
  }

  #listen(): void {
    const id = this.#identity;
    id.serve('rows', (fields, frames) => this.#rows(fields, frames));
    id.serve('run', (fields) => this.#run(fields));
    id.serve('logprobs', ({ which, temperature }, frames) => {
      if (which !== 'policy') throw unsupported('which', `This trainer has no ${which} model`);
      if (!(temperature > 0)) throw badRequest('temperature', `temperature must be above 0, got ${temperature}`);
      return { fields: {}, frames: { logprobs: scoreRows(this.#group.weights, frames, temperature) } };
    });
    id.serve('push_weights', (fields) => this.#push(fields));
    id.serve('save', ({ step, path }) => this.#together('save', () => this.#save(step, path)));
    id.serve('restore', ({ path }) => this.#together('restore', () => this.#restore(path)));
    id.serve('export', ({ path }) => this.#together('export', () => this.#export(path)));
  }

  /** The model is shared, so one rank acts for all, once all have come. */
  #together<R>(name: string, work: () => R): Promise<R> {
    return this.#group.meet(this.#rank, name, null, work);
  }

  // ---- Steps ----

  #rows({ step, part, of }: Fields<'rows'>, frames: Frames<'rows'>): Answer<'rows'> {
    const entry = this.#parts.get(step) ?? { of, parts: [] };
    if (part !== entry.parts.length || of !== entry.of || part >= of) {
      throw badRequest('part', `Part ${part} of ${of} does not follow ${entry.parts.length} parts of ${entry.of} for step ${step}`);
    }
    checkIds(frames.ids, 'ids');
    const column = <A extends Int32Array | Float32Array | Uint8Array>(array: A, name: string): A[] => cut(array, frames.lengths, name);
    const masks = column(frames.loss_mask, 'loss_mask');
    const logprobs = column(frames.rollout_logprobs, 'rollout_logprobs');
    const advantages = column(frames.advantages, 'advantages');
    const old = frames.old_logprobs ? column(frames.old_logprobs, 'old_logprobs') : null;
    entry.parts.push(
      column(frames.ids, 'ids').map((ids, i) => ({
        ids,
        lossMask: masks[i] as Uint8Array,
        rolloutLogprobs: logprobs[i] as Float32Array,
        advantages: advantages[i] as Float32Array,
        oldLogprobs: old ? (old[i] as Float32Array) : null,
      })),
    );
    this.#parts.set(step, entry);
    return NOTHING;
  }

  async #run(fields: Fields<'run'>): Promise<Answer<'run'>> {
    const rows = this.#takeRows(fields);
    const grad = new Float64Array(NUM_PARAMETERS);
    const options = { loss: fields.loss, temperature: fields.temperature, tokens: fields.denominators.tokens };
    const { sums, maxima } = addNumbers(
      fields.micro_batches.map((micro) => policyLoss(this.#group.weights, micro.map((i) => rows[i] as Row), options, grad)),
    );
    const mine = { grad, finite: Number.isFinite(sums.loss) };
    const { norm, skipped } = await this.#group.meet(this.#rank, `run of step ${fields.step}`, mine, (all) => this.#step(all, fields.lr));
    const numbers = { sums, maxima: { ...maxima, grad_norm: norm, skipped: skipped ? 1 : 0 } };
    return { fields: finite(numbers), frames: {} };
  }

  #takeRows({ step, micro_batches, temperature }: Fields<'run'>): Row[] {
    const entry = this.#parts.get(step);
    if (!entry || entry.parts.length !== entry.of) {
      throw badRequest('step', `Step ${step} has ${entry?.parts.length ?? 0} of ${entry?.of ?? 'no'} parts of its rows`);
    }
    const rows = entry.parts.flat();
    const used = micro_batches.flat().sort((a, b) => a - b);
    if (used.length !== rows.length || used.some((row, i) => row !== i)) {
      throw badRequest('micro_batches', `Micro-batches must hold each of ${rows.length} rows once, got ${JSON.stringify(micro_batches)}`);
    }
    if (!(temperature > 0)) throw badRequest('temperature', `temperature must be above 0, got ${temperature}`);
    this.#parts.delete(step);
    return rows;
  }

  /** The all-reduce and the optimizer step. All ranks skip together. */
  #step(all: readonly { grad: Float64Array; finite: boolean }[], lr: number): { norm: number; skipped: boolean } {
    const total = new Float64Array(NUM_PARAMETERS);
    for (const { grad } of all) for (let i = 0; i < total.length; i++) total[i] = (total[i] as number) + (grad[i] as number);
    const norm = gradNorm(total);
    const skipped = !Number.isFinite(norm) || all.some((part) => !part.finite);
    if (!skipped) adamStep(this.#group.weights, total, norm, this.#group.optim, { ...this.#optim, lr });
    return { norm, skipped };
  }

  // ---- Weights and checkpoints ----

  /** Segment: tensors back to back at multiples of 64 bytes. Rank 0 writes, after every rank has come. */
  #push({ version, transport, path }: Fields<'push_weights'>): Promise<Answer<'push_weights'>> {
    if (transport !== 'file') throw unsupported('transport', `Transport ${transport} is not known, want file`);
    return this.#together(`push of version ${version}`, () => null).then(() => {
      if (this.#rank !== 0) return { fields: { tensors: [], bytes: 0 }, frames: {} };
      const chunks: Buffer[] = [];
      let offset = 0;
      const tensors = TENSORS.map(({ name, shape, from, size }) => {
        const { buffer } = this.#group.weights.slice(from, from + size);
        const clean = Buffer.from(buffer);
        const bytes = this.#identity.damage('swap_layout', 'push_weights', name, clean);
        const padding = Buffer.alloc((ALIGN_BYTES - (bytes.length % ALIGN_BYTES)) % ALIGN_BYTES);
        chunks.push(this.#identity.damage('corrupt', 'push_weights', name, bytes), padding);
        const entry = { name, dtype: 'f32', shape, offset, bytes: bytes.length, crc32: crc32(bytes) };
        offset += bytes.length + padding.length;
        return entry;
      });
      writeFileSync(path, Buffer.concat(chunks));
      return { fields: { tensors, bytes: offset }, frames: {} };
    });
  }

  #save(step: number, path: string): Answer<'save'> {
    const { weights, optim, worldSize } = this.#group;
    mkdirSync(path, { recursive: true });
    writeFileSync(join(path, WEIGHTS_FILE), packWeights(weights));
    writeFileSync(join(path, 'first.safetensors'), packWeights(optim.first));
    writeFileSync(join(path, 'second.safetensors'), packWeights(optim.second));
    writeFileSync(join(path, 'trainer.json'), JSON.stringify({ step, count: optim.count, world_size: worldSize }));
    return NOTHING;
  }

  #restore(path: string): Answer<'restore'> {
    const { weights, optim } = this.#group;
    const read = (name: string): Float32Array => unpackWeights(readFileSync(join(path, name)));
    const saved = JSON.parse(readFileSync(join(path, 'trainer.json'), 'utf8')) as { step: number; count: number };
    weights.set(read(WEIGHTS_FILE));
    optim.first.set(read('first.safetensors'));
    optim.second.set(read('second.safetensors'));
    optim.count = saved.count;
    return { fields: { step: saved.step }, frames: {} };
  }

  /** A directory that `model_path` of an engine or trainer may name. */
  #export(path: string): Answer<'export'> {
    mkdirSync(path, { recursive: true });
    writeFileSync(join(path, WEIGHTS_FILE), packWeights(this.#group.weights));
    writeFileSync(join(path, 'config.json'), JSON.stringify({ model_type: 'simulated', vocab_size: VOCAB_SIZE }));
    return NOTHING;
  }
}

function addNumbers(parts: readonly LossNumbers[]): LossNumbers {
  const sums: Record<string, number> = {};
  const maxima: Record<string, number> = {};
  for (const part of parts) {
    for (const [key, value] of Object.entries(part.sums)) sums[key] = (sums[key] ?? 0) + value;
    for (const [key, value] of Object.entries(part.maxima)) maxima[key] = Math.max(maxima[key] ?? 0, value);
  }
  return { sums, maxima };
}

/** Floats on the wire are finite: what a skipped step could not compute counts 0. */
function finite(numbers: LossNumbers): LossNumbers {
  const clean = (record: Record<string, number>): Record<string, number> =>
    Object.fromEntries(Object.entries(record).map(([key, value]) => [key, Number.isFinite(value) ? value : 0]));
  return { sums: clean(numbers.sums), maxima: clean(numbers.maxima) };
}

// ---- Tokenizer ----

function startTokenizer(identity: Identity): void {
  identity.serve('render', ({ items }) => encodeItems(items.map((i) => () => renderText(i.messages, i.tools, i.add_generation_prompt))));
  identity.serve('suffix', ({ items }) => encodeItems(items.map((i) => () => suffixText(i.new_messages, i.last_ids.at(-1)))));
  identity.serve('encode', ({ texts }) => encodeItems(texts.map((text) => () => text)));
  identity.serve('decode', ({ skip_special }, frames) => {
    checkIds(frames.ids, 'ids');
    return { fields: { texts: cut(frames.ids, frames.lengths, 'ids').map((ids) => decodeIds(ids, skip_special)) }, frames: {} };
  });
  identity.serve('parse', ({ tools }, frames) => {
    checkIds(frames.ids, 'ids');
    if (tools.length !== frames.lengths.length) throw badRequest('tools', `${tools.length} tools for ${frames.lengths.length} items`);
    const items = cut(frames.ids, frames.lengths, 'ids').map((ids, i) => parseTurn([...ids], !isEmptyList(tools[i])));
    return { fields: { items }, frames: {} };
  });
  identity.link.ready({
    model_path: identity.options.model_path ?? '',
    vocab_size: VOCAB_SIZE,
    eos_token_id: IM_END,
    stop_token_ids: STOP_TOKEN_IDS,
    template_hash: 'simulated-chatml',
    suffix_exact: true,
    suffix_note: 'exact by construction',
  });
}

const isEmptyList = (value: Json | undefined): boolean => Array.isArray(value) && value.length === 0;

/** A bad item has its own error and no ids; the others are not its concern. */
function encodeItems(texts: readonly (() => string)[]): Answer<'encode'> {
  const errors: (string | null)[] = [];
  const rows = texts.map((text) => {
    try {
      const ids = encodeText(text());
      errors.push(null);
      return ids;
    } catch (error) {
      if (!(error instanceof TemplateError)) throw error;
      errors.push(error.message);
      return [];
    }
  });
  return { fields: { errors }, frames: { ids: Int32Array.from(rows.flat()), lengths: Int32Array.from(rows, (row) => row.length) } };
}

// ---- Process ----

const CAPABILITIES: Record<string, Json> = {
  engine: { max_requests: null, transports: ['file'], logprobs: true, heads: 0, routes: false },
  trainer: { transports: ['file'] },
  tokenizer: {},
};

async function host(endpoint: string, workerId: string, secret: string, hosted: readonly string[]): Promise<WorkerLink> {
  const workerKind = workerId.split('-')[0] as string;
  const capabilities = CAPABILITIES[workerKind];
  if (capabilities === undefined) throw new Error(`Worker id ${workerId} must begin with ${Object.keys(CAPABILITIES).join(', ')}`);
  const link = await WorkerLink.connect({ endpoint, workerId, secret, workerKind, capabilities });
  const identity = new Identity(link, workerId);
  if (workerKind === 'engine') new SimulatedEngine(identity);
  else if (workerKind === 'tokenizer') startTokenizer(identity);
  else {
    const ranks = hosted.filter((id) => id.startsWith('trainer')).length;
    const worldSize = identity.options.world_size as number;
    if (ranks < worldSize) throw new Error(`This process hosts ${ranks} trainer ranks of ${worldSize}: all must live in one`);
    new SimulatedRank(identity);
  }
  return link;
}

const args = await readWorkerArgs();
const links = await Promise.all(args.workerIds.map((id) => host(args.endpoint, id, args.secrets[id] ?? '', args.workerIds)));
await Promise.all(links.map((link) => link.stopped.then(() => link.close())));
process.exit(0);
