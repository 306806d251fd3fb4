/**
 * The simulated engine: continuous batching without keys and values.
 *
 *   generate -> running (queue while paused) -> one token per tick for all -> `tokens` event -> ended
 *
 * Same contract as engine_torch.py, held to it by the same tests (test/engine_contract.test.ts).
 *
 * Invariants
 *   1. A step is synchronous and weights change only between steps: an event never spans two versions.
 *   2. A pause is answered after the last event of the old version, and none follows it.
 *   3. Weights are held until the last tensor is there and verified; an error before that is fatal. What was staged is
 *      this engine's own copy: what happens to the file afterwards changes nothing.
 *   4. A scripted reply decides the tokens; their logprobs stay those of the model.
 *   5. With `cache_tokens` requests keep their place in the order they came. Those at the end that no longer fit are
 *      preempted; coming back costs `latency_ms.recompute`, as a real engine computes their keys and values again.
 * Started by simulated.ts; talks to generator.ts and refit.ts.
 */
import { readFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { isDeepStrictEqual } from 'node:util';
import { crc32 } from 'node:zlib';
import type { Answer } from '../molt/bus.ts';
import type { Fields, RequestKind } from '../molt/protocol.ts';
import { RemoteError } from '../molt/protocol.ts';
import {
  argmax,
  Distributions,
  decodeIds,
  drawFrom,
  encodeText,
  IM_END,
  logitsAt,
  NUM_PARAMETERS,
  pick,
  pickFrom,
  TENSORS,
  TextStream,
  uniform,
  VOCAB_SIZE,
} from './simulated_model.ts';
import {
  badRequest,
  checkIds,
  loadModel,
  NOTHING,
  type SimulatedWorker,
  scoreRows,
  unsupported,
} from './simulated_worker.ts';

const RETRY_AFTER_MS = 20;
const MODES = ['keep', 'drain', 'abort'];

type Source = Fields<'load_weights'>['source'];
type Tensors = ReadonlyMap<string, Float32Array>;
type Ending = 'stop' | 'length' | 'abort' | 'error';
interface Live {
  readonly handle: number;
  readonly fields: Fields<'generate'>;
  readonly ids: number[]; // prompt, then what is sampled here
  readonly promptLength: number;
  readonly stream: TextStream | null; // where text is wanted
  readonly reply: readonly number[] | null; // scripted tokens, from the first one of the turn on
  readonly stopBytes: number; // length of the longest stop string
  readonly begun: number; // ms
  place: 'new' | 'holds' | 'preempted'; // in the cache
  cachedTokens: number;
}

/** What a step adds, laid out as it travels. */
class Moved {
  requests = 0;
  length = 0; // tokens
  readonly texts: string[] = []; // of all requests when one of them wants text, else none
  readonly #wantsText: boolean;
  readonly #handles: Int32Array;
  readonly #counts: Int32Array;
  readonly #ids: Int32Array;
  readonly #logprobs: Float32Array;

  constructor(requests: readonly Live[], perStep: number) {
    this.#wantsText = requests.some((live) => live.stream);
    this.#handles = new Int32Array(requests.length);
    this.#counts = new Int32Array(requests.length);
    this.#ids = new Int32Array(requests.length * perStep);
    this.#logprobs = new Float32Array(requests.length * perStep);
  }

  add(id: number, logprob: number): void {
    this.#ids[this.length] = id;
    this.#logprobs[this.length++] = logprob;
  }

  /** All tokens of this request are there; they begin at `from`. */
  close({ handle, stream }: Live, from: number, isEnded: boolean): void {
    this.#handles[this.requests] = handle;
    this.#counts[this.requests++] = this.length - from;
    if (!this.#wantsText) return;
    this.texts.push(stream ? stream.push(this.#ids.subarray(from, this.length)) + (isEnded ? stream.end() : '') : '');
  }

  get frames() {
    return {
      handles: this.#handles,
      counts: this.#counts,
      ids: this.#ids.subarray(0, this.length),
      logprobs: this.#logprobs.subarray(0, this.length),
    };
  }
}

/** Engines of one process that serve the same weights share what was computed of them; nobody writes into them. */
const MODELS = new Map<string, Float32Array>();
const DISTRIBUTIONS = new WeakMap<Float32Array, Distributions>();

function sharedModel(path: string): Float32Array {
  const weights = MODELS.get(path) ?? loadModel(path);
  MODELS.set(path, weights);
  return weights;
}

function distributionsOf(weights: Float32Array): Distributions {
  const made = DISTRIBUTIONS.get(weights) ?? new Distributions(weights);
  DISTRIBUTIONS.set(weights, made);
  return made;
}

export class SimulatedEngine {
  readonly #worker: SimulatedWorker;
  readonly #maxRequests: number;
  readonly #maxLen: number;
  readonly #row = new Float64Array(VOCAB_SIZE);
  #logprob = 0; // of the token that was sampled last
  readonly #cacheTokens: number; // infinite = no limit
  #weights: Float32Array;
  #distributions: Distributions;
  #version = 0;
  #running: Live[] = []; // in the order they came
  #preempted = 0; // at the end of `running`
  #recomputeMs = 0; // owed by the next tick
  #queue: Live[] = []; // came while paused
  #prefixes: { readonly ids: readonly number[]; readonly version: number }[] = []; // what a key/value cache would hold
  #paused = false;
  #draining: ((drained: boolean) => void) | null = null;
  #onIdle: () => void = () => {};
  #pause: { epoch: number; answer: Promise<Answer<'pause'>> } | null = null;
  #staged: { readonly fields: Fields<'stage_weights'>; readonly tensors: Tensors } | null = null; // ahead of its load
  #parts: Tensors = new Map(); // loaded, the last one has not come
  #nextHandle = 1;
  #ticking = false;
  #stats: {
    steps: number;
    tokens: number;
    running: number;
    waiting: number;
    preemptions?: number;
    cache_use?: number;
  } = {
    steps: 0,
    tokens: 0,
    running: 0,
    waiting: 0,
  };

  constructor(worker: SimulatedWorker) {
    const options = worker.options as { model_path: string; max_requests: number; max_len: number };
    this.#worker = worker;
    this.#cacheTokens = worker.script.cache_tokens ?? Number.POSITIVE_INFINITY;
    this.#weights = sharedModel(options.model_path);
    this.#distributions = distributionsOf(this.#weights);
    this.#maxRequests = options.max_requests;
    this.#maxLen = options.max_len;
    this.#listen();
    this.#publish();
    const { model_path: model, max_requests, max_len } = options;
    worker.link.ready({ model, vocab_size: VOCAB_SIZE, dtype: 'float32', max_len, max_requests });
  }

  #listen(): void {
    const w = this.#worker;
    w.serve('generate', (fields, { prompt }) => this.#generate(fields, prompt), true);
    w.serve('abort', ({ handles }) => this.#abort(handles), true);
    w.serve('pause', (fields, _, signal) => this.#onPause(fields, signal), true);
    w.serve('stage_weights', (fields) => this.#stage(fields), true);
    w.serve('load_weights', (fields) => this.#load(fields), true);
    w.serve('resume', ({ epoch }) => this.#resume(epoch), true);
    w.serve(
      'score',
      (_, frames) => ({
        fields: { version: this.#version },
        frames: { logprobs: scoreRows(this.#weights, frames, 1) },
      }),
      true,
    );
  }

  /** Resolves when nothing runs any more: what is paused or waits for a resume never will. */
  async finished(): Promise<void> {
    await this.#worker.finished();
    if (this.#paused || this.#running.length === 0) return;
    await new Promise<void>((resolve) => {
      this.#onIdle = resolve;
    });
  }

  /** As engine_torch.py: what a pause holds back counts as waiting. */
  #publish(): void {
    const live = this.#running.length + this.#queue.length;
    this.#stats.running = this.#paused ? 0 : Math.max(0, this.#running.length - this.#preempted);
    this.#stats.waiting = live - this.#stats.running;
    this.#worker.link.stats = { ...this.#stats };
  }

  // ---- Requests ----

  #generate(fields: Fields<'generate'>, prompt: Int32Array): Answer<'generate'> {
    this.#check(fields, prompt);
    if (this.#running.length + this.#queue.length >= this.#maxRequests) {
      throw new RemoteError('overloaded', `Engine has ${this.#maxRequests} requests, its limit`, {
        retryAfterMs: RETRY_AFTER_MS,
      });
    }
    const live: Live = {
      handle: this.#nextHandle++,
      fields,
      ids: [...prompt],
      promptLength: prompt.length,
      stream: fields.want_text ? new TextStream() : null,
      reply: this.#scripted(fields, prompt),
      stopBytes: Math.max(0, ...fields.sampling.stop.map((s) => Buffer.byteLength(s))),
      begun: performance.now(),
      place: 'new',
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
    if (!(s.temperature >= 0))
      throw badRequest('sampling.temperature', `temperature must be at least 0, got ${s.temperature}`);
    if (!(s.top_p > 0 && s.top_p <= 1)) throw badRequest('sampling.top_p', `top_p must be in (0, 1], got ${s.top_p}`);
    if (s.top_k < 0) throw badRequest('sampling.top_k', `top_k must be at least 0, got ${s.top_k}`);
    if (s.max_tokens < 1) throw badRequest('sampling.max_tokens', `max_tokens must be at least 1, got ${s.max_tokens}`);
    if (prompt.length >= this.#maxLen) {
      throw badRequest('prompt', `A prompt of ${prompt.length} tokens leaves no room in max_len ${this.#maxLen}`);
    }
    if (length > this.#maxLen) {
      throw badRequest(
        'sampling.max_tokens',
        `Prompt ${prompt.length} + max_tokens ${s.max_tokens} is over max_len ${this.#maxLen}`,
      );
    }
    if (s.stop.includes('')) throw badRequest('sampling.stop', 'A stop string is empty');
    checkIds(Int32Array.from(s.stop_token_ids), 'sampling.stop_token_ids');
  }

  #scripted(fields: Fields<'generate'>, prompt: Int32Array): number[] | null {
    const rules = this.#worker.script.reply ?? [];
    if (rules.length === 0) return null;
    const text = decodeIds(prompt.subarray(0, prompt.length - fields.already));
    const rule = rules.find(
      ({ when }) => text.endsWith(when) || text.endsWith(`${when}<|im_end|>\n<|im_start|>assistant\n`),
    );
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
    const endings = ended.map((live): [Live, Ending] => [live, 'abort']);
    const texts = ended.filter((live) => live.stream); // text held back goes out
    const moved = new Moved(texts, 0);
    for (const live of texts) moved.close(live, 0, true);
    this.#send(moved, endings);
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
    await this.#worker.arrive('step');
    if (this.#recomputeMs > 0) await sleep(this.#recomputeMs);
    this.#ticking = false;
    if (!this.#paused) this.#step();
    this.#wake();
  }

  /** One step: synchronous, so that all of its tokens are of one version. */
  #step(): void {
    const perStep = this.#worker.script.tokens_per_step ?? 1;
    const running = this.#fitting();
    const moved = new Moved(running, perStep);
    const ended: [Live, Ending][] = [];
    for (const live of running) {
      const from = moved.length;
      let ending: Ending | null = null;
      for (let i = 0; i < perStep && !ending; i++) {
        const id = this.#sample(live);
        if (!Number.isFinite(this.#logprob)) {
          ending = 'error';
          break;
        }
        moved.add(id, this.#logprob);
        live.ids.push(id);
        ending = this.#ending(live, id);
      }
      moved.close(live, from, ending !== null);
      if (ending) ended.push([live, ending]);
    }
    this.#stats.steps += 1;
    if (ended.length > 0) {
      const gone = new Set(ended.map(([live]) => live));
      for (const live of gone) this.#remember(live);
      this.#running = this.#running.filter((live) => !gone.has(live));
    }
    this.#send(moved, ended);
  }

  /** Those that the cache has room for. */
  #fitting(): readonly Live[] {
    this.#recomputeMs = 0;
    if (this.#cacheTokens === Number.POSITIVE_INFINITY) return this.#running;
    let held = 0;
    let fit = 0;
    let { preemptions = 0 } = this.#stats;
    for (const live of this.#running) {
      if (fit > 0 && held + live.ids.length >= this.#cacheTokens) break;
      if (live.place === 'preempted') this.#recomputeMs += this.#worker.script.latency_ms?.recompute ?? 0;
      live.place = 'holds';
      held += live.ids.length;
      fit++;
    }
    for (const live of this.#running.slice(fit)) {
      if (live.place !== 'holds') continue;
      live.place = 'preempted';
      preemptions++;
    }
    this.#preempted = this.#running.length - fit;
    this.#stats.preemptions = preemptions;
    this.#stats.cache_use = Math.min(1, held / this.#cacheTokens);
    return this.#running.slice(0, fit);
  }

  #sample(live: Live): number {
    const { sampling, already } = live.fields;
    const index = already + live.ids.length - live.promptLength;
    const scripted = live.reply?.[index];
    const isPlain = sampling.top_k === 0 && sampling.top_p === 1;
    if (sampling.temperature > 0 && (isPlain || scripted !== undefined)) {
      const known = this.#distributions.at(live.ids, live.ids.length, sampling.temperature);
      const drawn = scripted ?? pickFrom(known, uniform(sampling.seed, index));
      this.#logprob = known.logprobs[drawn] as number;
      return drawn;
    }
    const logits = logitsAt(this.#weights, live.ids, live.ids.length, this.#row);
    // top_k and top_p would give a scripted token probability 0.
    const logprobs = drawFrom(logits, scripted === undefined ? sampling : { ...sampling, top_k: 0, top_p: 1 });
    const id =
      scripted ?? (sampling.temperature === 0 ? argmax(logprobs) : pick(logprobs, uniform(sampling.seed, index)));
    this.#logprob = logprobs[id] as number;
    return id;
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

  #send(moved: Moved, ended: readonly [Live, Ending][]): void {
    if (moved.requests > 0 || ended.length > 0) {
      this.#stats.tokens += moved.length;
      const fields = {
        version: this.#version,
        texts: moved.texts,
        ended: ended.map(([live, reason]) => ({
          handle: live.handle,
          reason,
          detail: reason === 'error' ? 'the logits are not finite' : this.#report(live),
          cached_tokens: live.cachedTokens,
          routes: null,
        })),
      };
      this.#worker.link.send('tokens', fields, moved.frames);
    }
    if (this.#running.length === 0) {
      this.#draining?.(true);
      this.#onIdle();
    }
    this.#publish();
  }

  #report({ begun }: Live): string | null {
    return this.#worker.script.report_ms ? (performance.now() - begun).toFixed(3) : null;
  }

  // ---- Pause, load, resume ----

  #onPause({ epoch, mode, clear_cache }: Fields<'pause'>, signal: AbortSignal): Promise<Answer<'pause'>> {
    if (!MODES.includes(mode)) throw badRequest('mode', `mode must be ${MODES.join(', ')}, got ${mode}`);
    if (this.#pause && epoch < this.#pause.epoch) {
      throw badRequest('epoch', `Pause of epoch ${epoch} comes after epoch ${this.#pause.epoch}`);
    }
    if (this.#pause?.epoch !== epoch) this.#pause = { epoch, answer: this.#stop(mode, clear_cache, signal) };
    return this.#pause.answer;
  }

  async #stop(mode: string, clearCache: boolean, signal: AbortSignal): Promise<Answer<'pause'>> {
    this.#draining?.(true); // a newer pause ends the wait of an older one
    if (mode === 'abort') this.#abort([...this.#running, ...this.#queue].map((live) => live.handle));
    if (mode === 'drain' && !this.#paused && !(await this.#drain(signal))) {
      this.#pause = null;
      this.#goOn();
      throw new RemoteError('cancelled', 'The pause was cancelled while it drained');
    }
    this.#paused = true;
    if (clearCache) this.#prefixes = [];
    this.#publish();
    const live = [...this.#running, ...this.#queue];
    const extra = this.#worker.strikes('miscount', 'pause') ? 1 : 0;
    return {
      fields: { version: this.#version },
      frames: {
        handles: Int32Array.from(live, (l) => l.handle),
        totals: Int32Array.from(live, (l) => l.ids.length - l.promptLength + extra),
      },
    };
  }

  /** True when all that ran has ended; false when the pause was withdrawn before. */
  async #drain(signal: AbortSignal): Promise<boolean> {
    if (this.#running.length === 0) return true;
    const drained = await new Promise<boolean>((resolve) => {
      this.#draining = resolve;
      signal.addEventListener('abort', () => resolve(false), { once: true });
    });
    this.#draining = null;
    return drained;
  }

  #resume(epoch: number): Answer<'resume'> {
    if (epoch !== this.#pause?.epoch) {
      throw badRequest(
        'epoch',
        `Cannot resume epoch ${epoch}: the last pause was of epoch ${this.#pause?.epoch ?? 'none'}`,
      );
    }
    if (this.#draining) throw badRequest('epoch', `Cannot resume epoch ${epoch}: its pause still drains`);
    if (this.#parts.size > 0)
      throw new RemoteError('fatal', `Cannot resume: ${this.#parts.size} tensors were sent, the last one was not`);
    if (this.#paused) this.#goOn();
    return NOTHING;
  }

  #goOn(): void {
    this.#paused = false;
    for (const live of this.#queue.splice(0)) this.#admit(live);
    this.#wake();
  }

  #stage(fields: Fields<'stage_weights'>): Answer<'stage_weights'> {
    const { version, source, tensors } = fields;
    const started = performance.now();
    try {
      if (!isDeepStrictEqual(this.#staged?.fields, fields))
        this.#staged = { fields, tensors: this.#verified(source, tensors, 'stage_weights') };
      checkWhole(this.#staged?.tensors ?? new Map());
    } catch (error) {
      throw unlessTyped(error, `Cannot stage version ${version}`);
    }
    return { fields: { verify_ms: performance.now() - started }, frames: {} };
  }

  #load({ last, ...fields }: Fields<'load_weights'>): Answer<'load_weights'> {
    const { version, source, tensors } = fields;
    if (!this.#paused) throw badRequest('version', `Cannot load version ${version}: the engine is not paused`);
    const started = performance.now();
    try {
      const isStaged = last && isDeepStrictEqual(this.#staged?.fields, fields);
      const received = (isStaged && this.#staged?.tensors) || this.#verified(source, tensors, 'load_weights');
      this.#staged = null;
      const twice = [...received.keys()].find((name) => this.#parts.has(name));
      if (twice) throw new Error(`Tensor ${twice} was sent twice`);
      const verified = performance.now();
      this.#parts = new Map([...this.#parts, ...received]);
      if (last) this.#swap(version);
      return {
        fields: { loaded: tensors.length, verify_ms: verified - started, load_ms: performance.now() - verified },
        frames: {},
      };
    } catch (error) {
      throw unlessTyped(error, `Cannot load version ${version}`);
    }
  }

  /** A copy of these tensors of the file; their checksums hold. */
  #verified({ transport, path }: Source, table: Fields<'load_weights'>['tensors'], on: RequestKind): Tensors {
    if (transport !== 'file') throw unsupported('source.transport', `Transport ${transport} is not known, want file`);
    const file = readFileSync(path);
    const tensors = new Map<string, Float32Array>();
    for (const entry of table) {
      if (tensors.has(entry.name)) throw new Error(`Tensor ${entry.name} was sent twice`);
      tensors.set(entry.name, this.#read(entry, file, on));
    }
    return tensors;
  }

  #read(entry: Fields<'load_weights'>['tensors'][number], file: Buffer, on: RequestKind): Float32Array {
    const { name, offset, bytes } = entry;
    const spec = TENSORS.find((t) => t.name === name);
    if (!spec) throw new Error(`Tensor ${name} was sent but the model has none of that name`);
    if (entry.dtype !== 'f32' || String(entry.shape) !== String(spec.shape) || bytes !== spec.size * 4) {
      throw new Error(
        `Tensor ${name} was sent as ${entry.dtype} ${JSON.stringify(entry.shape)}, want f32 ${JSON.stringify(spec.shape)}`,
      );
    }
    if (offset + bytes > file.length)
      throw new Error(`Tensor ${name} ends at ${offset + bytes}, the file at ${file.length}`);
    const received = this.#worker.damage('corrupt', on, name, file.subarray(offset, offset + bytes));
    const sum = crc32(received);
    if (sum !== entry.crc32)
      throw new Error(`Checksum of ${name} is ${sum.toString(16)}, the trainer sent ${entry.crc32.toString(16)}`);
    const placed = this.#worker.damage('swap_layout', on, name, received);
    return new Float32Array(Uint8Array.from(placed).buffer);
  }

  /** All or nothing: the old weights serve until every tensor of the model is there. */
  #swap(version: number): void {
    checkWhole(this.#parts);
    const weights = new Float32Array(NUM_PARAMETERS);
    for (const { name, from } of TENSORS) weights.set(this.#parts.get(name) ?? [], from);
    this.#weights = weights;
    this.#distributions = distributionsOf(weights);
    this.#version = version;
    this.#parts = new Map();
  }
}

function checkWhole(tensors: Tensors): void {
  const missing = TENSORS.find(({ name }) => !tensors.has(name));
  if (missing) throw new Error(`Tensor ${missing.name} of the model was not sent`);
}

/** Weights that do not fit end the engine; a request that was wrong from the start does not. */
function unlessTyped(error: unknown, what: string): RemoteError {
  return error instanceof RemoteError ? error : new RemoteError('fatal', `${what}: ${(error as Error).message}`);
}
