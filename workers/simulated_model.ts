/**
 * The simulated policy: a language model, its sampler, its gradient and its chat template, without torch.
 *
 *   logits(next | ids) = bigram[last id] + context[hash of the last three ids] + bias
 *
 * It is small, but nothing in it is pretended: logprobs are those of the distribution the tokens were drawn from, a
 * policy-gradient step changes the weights the way the formula says, and the vocabulary is exact (ids 0..255 are the
 * bytes of UTF-8, a few specials follow), so decode(encode(x)) is x for every text.
 *
 * Invariants
 *   1. Everything is a function of its arguments: no clock, no global random state. Engine and trainer call the same
 *      `logitsAt`, so with equal weights their logprobs are equal to the last bit.
 *   2. A draw depends on (seed, token index) alone, never on the batch.
 *   3. render(messages + turn + more) = render(messages) + the turn's ids + suffix(turn, more).
 * Called by simulated.ts. Pure; the processes and the wire are there.
 */
import { invariant, type Json, type Message, type Sampling, type ToolCall } from '../molt/types.ts';

// ---- Vocabulary ----

export const SPECIALS = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<tool_call>', '</tool_call>'] as const;
export const END_OF_TEXT = 256;
export const IM_END = 258;
export const VOCAB_SIZE = 256 + SPECIALS.length;
export const STOP_TOKEN_IDS: readonly number[] = [IM_END, END_OF_TEXT];
const SPECIAL_PATTERN = new RegExp(`(${SPECIALS.map((s) => s.replaceAll('|', '\\|')).join('|')})`);

/** Text that spells a special token becomes that token, as Hugging Face tokenizers do. */
export function encodeText(text: string): number[] {
  const ids: number[] = [];
  for (const piece of text.split(SPECIAL_PATTERN)) {
    const special = SPECIALS.indexOf(piece as (typeof SPECIALS)[number]);
    if (special >= 0) ids.push(256 + special);
    else for (const byte of Buffer.from(piece, 'utf8')) ids.push(byte);
  }
  return ids;
}

export function decodeIds(ids: Iterable<number>, skipSpecial = false): string {
  const stream = new TextStream(skipSpecial);
  return stream.push(ids) + stream.end();
}

/** Decodes ids as they come; holds back the bytes of an unfinished character. Broken bytes become U+FFFD. */
export class TextStream {
  readonly #skipSpecial: boolean;
  readonly #decoder = new TextDecoder('utf-8', { ignoreBOM: true });

  constructor(skipSpecial = false) {
    this.#skipSpecial = skipSpecial;
  }

  push(ids: Iterable<number>): string {
    let text = '';
    let bytes: number[] = [];
    for (const id of ids) {
      if (id < 256) {
        bytes.push(id);
        continue;
      }
      text += this.#decoder.decode(Uint8Array.from(bytes), { stream: false });
      text += this.#skipSpecial ? '' : SPECIALS[id - 256];
      bytes = [];
    }
    return text + this.#decoder.decode(Uint8Array.from(bytes), { stream: true });
  }

  end(): string {
    return this.#decoder.decode();
  }
}

// ---- Chat template (ChatML) ----

/** Bad input of one tokenizer item; becomes that item's `errors` entry. */
export class TemplateError extends Error {}

/** The whole conversation as text. Throws TemplateError on messages the template does not know. */
export function renderText(messages: Json, tools: Json, addGenerationPrompt: boolean): string {
  if (!Array.isArray(messages)) throw new TemplateError('messages must be a list');
  let text = '';
  if (Array.isArray(tools) && tools.length > 0) {
    text += `<|im_start|>system\nTools:\n${tools.map((t) => JSON.stringify(t)).join('\n')}<|im_end|>\n`;
  }
  for (const [i, message] of messages.entries()) text += `${messageText(message as Json, i)}<|im_end|>\n`;
  return addGenerationPrompt ? `${text}<|im_start|>assistant\n` : text;
}

function messageText(value: Json, index: number): string {
  const message = (value ?? {}) as Message;
  if (typeof message.role !== 'string') throw new TemplateError(`messages[${index}].role must be a string`);
  const content = message.content ?? '';
  if (typeof content !== 'string') throw new TemplateError(`messages[${index}].content must be a string or null`);
  const calls = (message.tool_calls ?? []).map((call) => callText(call, index)).join('\n');
  return `<|im_start|>${message.role}\n${content}${content && calls ? '\n' : ''}${calls}`;
}

/** The arguments are the text the policy wrote, put back as they were. */
function callText(call: ToolCall, index: number): string {
  if (typeof call?.name !== 'string' || typeof call.arguments !== 'string') {
    throw new TemplateError(`messages[${index}].tool_calls must be {name, arguments} with arguments as text`);
  }
  return `<tool_call>\n{"name": ${JSON.stringify(call.name)}, "arguments": ${call.arguments}}\n</tool_call>`;
}

/** What the template writes after a sampled turn: its close unless it was sampled, then the new messages. */
export function suffixText(newMessages: Json, lastId: number | undefined): string {
  const rest = renderText(newMessages, null, true);
  return lastId === IM_END ? `\n${rest}` : `<|im_end|>\n${rest}`;
}

// ---- Parsing a sampled turn (Hermes tool calls) ----

export interface Parsed {
  readonly text: string;
  readonly content: string;
  readonly reasoning: string | null;
  readonly tool_calls: readonly ToolCall[];
  readonly error: string | null;
}

/** Calls are read unless `readCalls` is false: then no tools were offered and the markup is plain text. */
export function parseTurn(ids: readonly number[], readCalls = true): Parsed {
  const last = ids.at(-1);
  const text = decodeIds(last !== undefined && STOP_TOKEN_IDS.includes(last) ? ids.slice(0, -1) : ids);
  const think = /^\s*<think>([\s\S]*?)<\/think>\s*/.exec(text);
  const calls: ToolCall[] = [];
  let error: string | null = null;
  const said = text.slice(think?.[0].length ?? 0);
  const reasoning = think?.[1]?.trim() ?? null;
  if (!readCalls || !said.includes('<tool_call>'))
    return { text, content: said, reasoning, tool_calls: [], error: null };
  const content = said.replace(/\s*<tool_call>([\s\S]*?)<\/tool_call>/g, (all, body: string) => {
    const call = parseCall(body);
    if (typeof call !== 'string') calls.push(call);
    else error ??= call;
    return typeof call === 'string' ? all : '';
  });
  // What is left of the markup was no whole call: a broken body (said above) or a missing end.
  if (content.includes('<tool_call>')) error ??= 'Tool call is not closed';
  return { text, content: calls.length > 0 ? content.trim() : content, reasoning, tool_calls: calls, error };
}

/** A call, or why it is none. `arguments` keeps the policy's own spelling (1.0 stays 1.0). */
function parseCall(body: string): ToolCall | string {
  try {
    const value: unknown = JSON.parse(body);
    const name = (value as { name?: unknown } | null)?.name;
    const args = (value as { arguments?: unknown } | null)?.arguments;
    if (typeof name !== 'string' || name === '') return 'Tool call has no name';
    if (typeof args !== 'object' || args === null || Array.isArray(args))
      return 'Tool call arguments are not an object';
    return { name, arguments: rawValue(body, 'arguments') };
  } catch (cause) {
    return `Tool call is not JSON: ${(cause as Error).message}`;
  }
}

/** The source text of a top-level member of a JSON object (the last one of that name, as JSON.parse takes it). */
export function rawValue(json: string, name: string): string {
  let depth = 0;
  let key: string | null = null;
  let from = -1;
  let found = '';
  for (let i = 0; i < json.length; i++) {
    const c = json[i];
    if (c === '"') {
      const start = i++;
      while (json[i] !== '"') i += json[i] === '\\' ? 2 : 1;
      if (depth === 1 && key === null) key = JSON.parse(json.slice(start, i + 1)) as string;
    } else if (c === '{' || c === '[') depth += 1;
    else if (c === ':' && depth === 1) from = i + 1;
    else if (c === '}' || c === ']' || c === ',') {
      if (depth === 1 && key === name) found = json.slice(from, i).trim();
      if (depth === 1) key = null;
      if (c !== ',') depth -= 1;
    }
  }
  return found;
}

// ---- Weights ----

const CONTEXTS = 64; // rows of the context table
export interface TensorSpec {
  readonly name: string;
  readonly shape: readonly number[];
  readonly from: number; // offset into the flat weights, in numbers
  readonly size: number;
}
export const TENSORS: readonly TensorSpec[] = layOut([
  ['model.bigram.weight', [VOCAB_SIZE, VOCAB_SIZE]],
  ['model.context.weight', [CONTEXTS, VOCAB_SIZE]],
  ['lm_head.bias', [VOCAB_SIZE]],
]);
export const NUM_PARAMETERS = TENSORS.reduce((sum, t) => sum + t.size, 0);
const [BIGRAM, CONTEXT, BIAS] = TENSORS.map((t) => t.from) as [number, number, number];

function layOut(shapes: readonly (readonly [string, readonly number[]])[]): TensorSpec[] {
  let from = 0;
  return shapes.map(([name, shape]) => {
    const size = shape.reduce((a, b) => a * b, 1);
    from += size;
    return { name, shape, from: from - size, size };
  });
}

/**
 * A policy that writes short printable text: of the printable characters none is likely, and about one token in eight
 * ends the turn, so that rollouts stay short.
 */
export function initialWeights(seed: number): Float32Array {
  const weights = new Float32Array(NUM_PARAMETERS);
  for (let i = 0; i < BIAS; i++) weights[i] = 2 * (uniform(seed, i) + uniform(seed, i + BIAS) - 1);
  for (let id = 0; id < VOCAB_SIZE; id++) {
    const printable = id === 10 || (id >= 32 && id < 127);
    weights[BIAS + id] = id === IM_END ? 3.3 : printable ? 0 : -8;
  }
  return weights;
}

/** A safetensors file, so that other tools read what is exported here. Bytes: header length, header, tensors. */
export function packWeights(weights: Float32Array): Buffer {
  const header = Object.fromEntries(
    TENSORS.map(({ name, shape, from, size }) => [
      name,
      { dtype: 'F32', shape, data_offsets: [4 * from, 4 * (from + size)] },
    ]),
  );
  const text = JSON.stringify(header);
  const head = Buffer.from(text.padEnd(8 * Math.ceil(text.length / 8)));
  const length = Buffer.alloc(8);
  length.writeBigUInt64LE(BigInt(head.length));
  return Buffer.concat([length, head, Buffer.from(weights.buffer, weights.byteOffset, weights.byteLength)]);
}

/** Throws when the file is not one of `packWeights`. */
export function unpackWeights(file: Buffer): Float32Array {
  const data = Uint8Array.from(file.subarray(8 + Number(file.readBigUInt64LE())));
  const weights = new Float32Array(NUM_PARAMETERS);
  if (
    data.length !== weights.byteLength ||
    !packWeights(weights).subarray(0, -data.length).equals(file.subarray(0, -data.length))
  ) {
    throw new Error(`Not weights of the simulated model: ${file.length} bytes`);
  }
  weights.set(new Float32Array(data.buffer));
  return weights;
}

// ---- Forward ----

/** Which rows of the two tables speak of the token at `end`: bigram * CONTEXTS + context. */
function contextOf(ids: ArrayLike<number>, end: number): number {
  const a = ids[end - 1] ?? END_OF_TEXT;
  const b = ids[end - 2] ?? END_OF_TEXT;
  const c = ids[end - 3] ?? END_OF_TEXT;
  return a * CONTEXTS + (mix32(a * 31 + b * 1009 + c * 65537) % CONTEXTS);
}

/** Where these rows begin in the weights. */
function rowsOf(ids: ArrayLike<number>, end: number): [number, number] {
  const rows = contextOf(ids, end);
  return [BIGRAM + Math.floor(rows / CONTEXTS) * VOCAB_SIZE, CONTEXT + (rows % CONTEXTS) * VOCAB_SIZE];
}

/** Logits of the token at position `end`, given ids[0..end). Written into `out`, (vocabulary). */
export function logitsAt(weights: Float32Array, ids: ArrayLike<number>, end: number, out: Float64Array): Float64Array {
  const [bigram, context] = rowsOf(ids, end);
  for (let v = 0; v < VOCAB_SIZE; v++) {
    out[v] = (weights[bigram + v] as number) + (weights[context + v] as number) + (weights[BIAS + v] as number);
  }
  return out;
}

/** In place: x -> log softmax(x / temperature). */
export function logSoftmax(x: Float64Array, temperature = 1): Float64Array {
  let max = -Infinity;
  for (let v = 0; v < x.length; v++) {
    x[v] = (x[v] as number) / temperature;
    max = Math.max(max, x[v] as number);
  }
  let sum = 0;
  for (const value of x) sum += Math.exp(value - max);
  const total = max + Math.log(sum);
  for (let v = 0; v < x.length; v++) x[v] = (x[v] as number) - total;
  return x;
}

/** Logprob of every id given those before it, (ids); the first has none and gets 0. */
export function scoreIds(weights: Float32Array, ids: ArrayLike<number>, temperature = 1): Float32Array {
  const out = new Float32Array(ids.length);
  const row = new Float64Array(VOCAB_SIZE);
  for (let k = 1; k < ids.length; k++) {
    out[k] = logSoftmax(logitsAt(weights, ids, k, row), temperature)[ids[k] as number] as number;
  }
  return out;
}

// ---- Sampling ----

/** Counter-based uniform in (0, 1): 53 bits from two mixes of (seed, index). */
export function uniform(seed: number, index: number): number {
  const high = Math.floor(seed / 2 ** 32) | 0;
  const a = mix32(mix32(mix32(seed | 0) ^ high) ^ index);
  const b = mix32(a ^ 0x9e3779b9);
  return ((a >>> 5) * 2 ** 26 + (b >>> 6) + 0.5) / 2 ** 53;
}

/** murmur3's finalizer: every input bit reaches every output bit. */
function mix32(x: number): number {
  let h = (x + 0x7f4a7c15) | 0;
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35);
  return (h ^ (h >>> 16)) >>> 0;
}

type Filters = Pick<Sampling, 'temperature' | 'top_k' | 'top_p'>;

/** In place: logits to the logprobs a token is drawn from; -Infinity where top_k or top_p cut. Greedy: the plain softmax. */
export function drawFrom(logits: Float64Array, sampling: Filters): Float64Array {
  logSoftmax(logits, sampling.temperature || 1);
  if (sampling.temperature === 0 || (sampling.top_k === 0 && sampling.top_p === 1)) return logits;
  const order = [...logits.keys()].sort((a, b) => (logits[b] as number) - (logits[a] as number));
  const kept = sampling.top_k > 0 ? Math.min(sampling.top_k, VOCAB_SIZE) : VOCAB_SIZE;
  let total = 0; // mass of the top_k, which top_p is a share of
  for (const v of order.slice(0, kept)) total += Math.exp(logits[v] as number);
  let before = 0;
  for (const [rank, v] of order.entries()) {
    const mass = Math.exp(logits[v] as number) / total;
    if (rank >= kept || (rank > 0 && before >= sampling.top_p)) logits[v] = -Infinity;
    before += mass;
  }
  return logSoftmax(logits);
}

/** The likeliest id; of equals the smallest. */
export function argmax(logprobs: Float64Array): number {
  return logprobs.reduce((best, value, v) => (value > (logprobs[best] as number) ? v : best), 0);
}

/** Inverse CDF: the first id whose cumulative probability exceeds u. */
export function pick(logprobs: Float64Array, u: number): number {
  let sum = 0;
  let last = 0;
  for (let v = 0; v < logprobs.length; v++) {
    const p = Math.exp(logprobs[v] as number);
    if (p === 0) continue;
    sum += p;
    last = v;
    if (u < sum) return v;
  }
  return last; // rounding left the sum just under u
}

interface Distribution {
  readonly logprobs: Float32Array; // as they travel
  readonly upTo: Float64Array; // cumulative probability
  readonly last: number; // the last id of any probability
}

/**
 * `drawFrom` and `pick` at temperatures above 0 with nothing filtered, each distribution computed once: the same tokens and
 * logprobs, for a binary search. Of weights that do not change.
 */
export class Distributions {
  readonly #weights: Float32Array;
  readonly #known = new Map<number, (Distribution | undefined)[]>(); // by temperature, then by rows

  constructor(weights: Float32Array) {
    this.#weights = weights;
  }

  at(ids: ArrayLike<number>, end: number, temperature: number): Distribution {
    let known = this.#known.get(temperature);
    if (!known) {
      known = new Array<Distribution | undefined>(VOCAB_SIZE * CONTEXTS).fill(undefined);
      this.#known.set(temperature, known);
    }
    const rows = contextOf(ids, end);
    const found = known[rows];
    if (found) return found;
    const logprobs = logSoftmax(logitsAt(this.#weights, ids, end, new Float64Array(VOCAB_SIZE)), temperature);
    const upTo = new Float64Array(VOCAB_SIZE);
    let sum = 0;
    let last = 0;
    for (let v = 0; v < VOCAB_SIZE; v++) {
      const p = Math.exp(logprobs[v] as number);
      if (p !== 0) last = v;
      sum += p;
      upTo[v] = sum;
    }
    const made = { logprobs: Float32Array.from(logprobs), upTo, last };
    known[rows] = made;
    return made;
  }
}

/** As `pick`. */
export function pickFrom({ upTo, last }: Distribution, u: number): number {
  let low = 0;
  let high = upTo.length; // the first id whose cumulative probability exceeds u is in low..high
  while (low < high) {
    const middle = (low + high) >> 1;
    if (u < (upTo[middle] as number)) high = middle;
    else low = middle + 1;
  }
  return low < upTo.length ? low : last; // rounding left the sum just under u
}

// ---- Learning ----

export interface Row {
  readonly ids: Int32Array;
  readonly lossMask: Uint8Array;
  readonly rolloutLogprobs: Float32Array;
  readonly advantages: Float32Array;
  readonly oldLogprobs: Float32Array | null; // null: one step per batch, so old = current and the ratio is 1
  readonly stale: Uint8Array | null; // 1 = sampled by an older version than the one trained; null: no token is
}
export interface LossOptions {
  readonly clip_low: number;
  readonly clip_high: number;
  readonly is_level: string; // off, token
  readonly is_mode: string; // mask, clip, trunc
  readonly is_low: number;
  readonly is_high: number;
}
export interface LossNumbers {
  readonly sums: Record<string, number>;
  readonly maxima: Record<string, number>;
}

const LOG_RATIO_LIMIT = 30;
const clamp = (x: number, low: number, high: number): number => Math.min(Math.max(x, low), high);

/** Importance correction by w = exp(old - rollout), detached. Out of band: mask 0, clip to the band, trunc to its top. */
function correction(w: number, o: LossOptions): { coef: number; filtered: boolean } {
  if (o.is_level === 'off') return { coef: 1, filtered: false };
  if (o.is_mode === 'trunc') return { coef: Math.min(w, o.is_high), filtered: w > o.is_high };
  const filtered = w < o.is_low || w > o.is_high;
  if (o.is_mode === 'clip') return { coef: clamp(w, o.is_low, o.is_high), filtered };
  return { coef: filtered ? 0 : w, filtered };
}

/**
 * PPO loss of some rows, its gradient added into `grad` (flat, as the weights).
 *
 *   loss = -sum_t coef_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) / tokens,   r = exp(logp - old)
 *   d logp / d logits_j = (1[j = id] - p_j) / temperature, and bigram row, context row and bias get the same.
 */
export function policyLoss(
  weights: Float32Array,
  rows: readonly Row[],
  options: { readonly loss: LossOptions; readonly temperature: number; readonly tokens: number },
  grad: Float64Array,
): LossNumbers {
  const sums = {
    loss: 0,
    tokens: 0,
    clipped: 0,
    is_filtered: 0,
    is_weight: 0,
    fresh_tokens: 0,
    mismatch_abs: 0,
    mismatch_k3: 0,
    drift_abs: 0,
    kl_old: 0,
    entropy: 0,
  };
  const denominator = Math.max(options.tokens, 1); // a batch without a trained token has loss 0
  const maxima = { mismatch_abs: 0 };
  const row = new Float64Array(VOCAB_SIZE); // logprobs of every id at one position
  for (const r of rows) {
    for (let k = 1; k < r.ids.length; k++) {
      if (r.lossMask[k] !== 1) continue;
      const id = r.ids[k] as number;
      logSoftmax(logitsAt(weights, r.ids, k, row), options.temperature);
      const logprob = row[id] as number;
      const old = r.oldLogprobs ? (r.oldLogprobs[k] as number) : logprob;
      const gap = old - (r.rolloutLogprobs[k] as number); // mismatch of a fresh token, policy drift of a stale one
      const weight = Math.exp(clamp(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT));
      const is = correction(weight, options.loss);
      const advantage = r.advantages[k] as number;
      const ratio = Math.exp(clamp(logprob - old, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT));
      const clippedRatio = clamp(ratio, 1 - options.loss.clip_low, 1 + options.loss.clip_high);
      const clipped = clippedRatio * advantage < ratio * advantage;
      // fp32, as in the real trainer: what overflows there does so here.
      sums.loss -= Math.fround(is.coef * Math.min(ratio * advantage, clippedRatio * advantage)) / denominator;
      sums.tokens += 1;
      sums.clipped += clipped ? 1 : 0;
      sums.is_filtered += is.filtered ? 1 : 0;
      sums.is_weight += weight;
      sums.kl_old += old - logprob;
      if (r.stale?.[k] === 1) sums.drift_abs += Math.abs(gap);
      else {
        sums.fresh_tokens += 1;
        sums.mismatch_abs += Math.abs(gap);
        sums.mismatch_k3 += weight - 1 - gap;
        maxima.mismatch_abs = Math.max(maxima.mismatch_abs, Math.abs(gap));
      }
      for (let v = 0; v < VOCAB_SIZE; v++) sums.entropy -= Math.exp(row[v] as number) * (row[v] as number);
      const byLogprob = clipped ? 0 : (-is.coef * advantage * ratio) / denominator;
      if (byLogprob !== 0) addGradient(grad, r.ids, k, row, byLogprob / options.temperature);
    }
  }
  return { sums, maxima };
}

function addGradient(grad: Float64Array, ids: Int32Array, k: number, logprobs: Float64Array, scale: number): void {
  const [bigram, context] = rowsOf(ids, k);
  const id = ids[k] as number;
  for (let v = 0; v < VOCAB_SIZE; v++) {
    const g = scale * ((v === id ? 1 : 0) - Math.exp(logprobs[v] as number));
    grad[bigram + v] = (grad[bigram + v] as number) + g;
    grad[context + v] = (grad[context + v] as number) + g;
    grad[BIAS + v] = (grad[BIAS + v] as number) + g;
  }
}

export interface OptimOptions {
  readonly betas: readonly [number, number];
  readonly eps: number;
  readonly weight_decay: number;
  readonly max_norm: number; // 0 = no clipping
}
/** AdamW's moments, flat as the weights. `count` = steps taken, for the bias correction. */
export interface OptimState {
  count: number;
  readonly first: Float32Array;
  readonly second: Float32Array;
}
export function newOptimState(): OptimState {
  return { count: 0, first: new Float32Array(NUM_PARAMETERS), second: new Float32Array(NUM_PARAMETERS) };
}

export function gradNorm(grad: Float64Array): number {
  let sum = 0;
  for (const g of grad) sum += g * g;
  return Math.sqrt(sum);
}

/** One AdamW step in place, after clipping to max_norm. `norm` = gradNorm(grad), finite. */
export function adamStep(
  weights: Float32Array,
  grad: Float64Array,
  norm: number,
  state: OptimState,
  options: OptimOptions & { readonly lr: number },
): void {
  invariant(Number.isFinite(norm), `a step needs a finite gradient norm, got ${norm}`);
  const [b1, b2] = options.betas;
  const scale = options.max_norm > 0 && norm > options.max_norm ? options.max_norm / norm : 1;
  state.count += 1;
  const c1 = 1 - b1 ** state.count;
  const c2 = 1 - b2 ** state.count;
  const { first, second } = state;
  for (let i = 0; i < weights.length; i++) {
    const g = (grad[i] as number) * scale;
    const m = b1 * (first[i] as number) + (1 - b1) * g;
    const s = b2 * (second[i] as number) + (1 - b2) * g * g;
    first[i] = m;
    second[i] = s;
    const w = (weights[i] as number) * (1 - options.lr * options.weight_decay);
    weights[i] = w - (options.lr * (m / c1)) / (Math.sqrt(s / c2) + options.eps);
  }
}
