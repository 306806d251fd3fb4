/**
 * Every message of molt, once (twin: workers/protocol.py; a test compares this text and the table).
 *
 * One controller ROUTER, one DEALER per worker. A message is a msgpack header map, then zero or more raw
 * little-endian tensor frames. The header is {v, kind, seq, id | re, deadline_ms?, frames: [{name, dtype,
 * shape}], ...fields}. `seq` counts from 0 per direction and process. A request carries `id` and gets exactly
 * one reply, `ok` or `error`, that carries it back as `re`; a message with neither is an event. Nothing is
 * pickled. Fields and frames are exactly those of the table: a missing, extra or mistyped one is an error
 * that names it. Integers stay within 2^53 (JavaScript sends those from 2^32 on as whole floats); floats are
 * finite and are coerced on receipt, since 1.0 travels as the integer 1; null means absent and is legal only
 * where the type ends in `?`. NaN and infinity travel only inside frames. A message is at most 64 MiB.
 * What is sent at about the same time travels as one ZeroMQ message, header and frames of each back to back.
 *
 * Types: str int float bool json, `?` = may be null; {name: type} = record; {"*": type} = map;
 * {"?": type} = it or null; [type] = list.
 * Frames: the dtype of a one-dimensional tensor, `?` = may be left out. C controller, W any worker, E engine,
 * T trainer rank, K tokenizer, R runner.
 *
 *   message         from -> to  reply                      when
 *   hello           W -> C      none (welcome or refused)  first message of a process
 *   welcome         C -> W      none (ready)               the worker is who it says it is; carries its options
 *   refused         C -> W      none                       protocol versions or secrets differ
 *   ready           W -> C      none                       model loaded, requests may come
 *   heartbeat       W -> C      none                       every heartbeat_ms from welcome on, with statistics
 *   ping            C -> W      {}                         answered by the I/O thread at any time
 *   stacks          C -> W      {text}                     all thread stacks; answered by the I/O thread
 *   stats           C -> W      {stats}                    what the work thread last published
 *   cancel          C -> W      {}                         ends the request with that id, as `cancelled`
 *   stop            C -> W      {}                         finish what runs, then exit 0
 *   generate        C -> E      {handle}                   sample a turn; the tokens come as `tokens`
 *   tokens          E -> C      none                       at most one per engine step, one policy version each
 *   abort           C -> E      {}                         ends handles with reason abort
 *   pause           C -> E      totals per live handle     its reply is the last message of the old version
 *   stage_weights   C -> E      {verify_ms}                at any time: a head start on load_weights
 *   load_weights    C -> E      {loaded, ...}              only while paused; all or nothing
 *   resume          C -> E      {}                         go on under the loaded version
 *   score           C -> E      logprobs                   temperature-1 logprobs of given ids
 *   rows            C -> T      {}                         part of a step's rows, kept until `run`
 *   run             C -> T      {sums, maxima}             one optimizer step over the rows
 *   logprobs        C -> T      logprobs                   forward only
 *   push_weights    C -> T      {tensors}                  write hub-named tensors where engines read them
 *   save            C -> T      {}                         every rank writes its share of a checkpoint
 *   restore         C -> T      {}                         the other way round
 *   export          C -> T      {}                         a Hugging Face directory
 *   render          C,R -> K    ids per item               whole conversation by the chat template
 *   suffix          C,R -> K    ids per item               what follows a sampled turn
 *   encode          C,R -> K    ids per item               text, no special tokens added
 *   decode          C,R -> K    {texts}                    ids to text
 *   parse           C,R -> K    {items}                    a sampled turn into content, reasoning, tool calls
 *   start           C -> R      {}                         begin a rollout
 *   turn            R -> C      tokens of the turn         sample for a rollout; answered when the turn ended
 *   abort_turn      R -> C      none                       the rollout no longer wants its running turn
 *   cancel_rollout  C -> R      none                       end a rollout with this reason
 *   rollout_done    R -> C      {}                         the whole rollout; sent again until answered
 */
import { Packr } from 'msgpackr';
import type { Json } from './types.ts';

export const PROTOCOL_VERSION = 2;
export const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;

// ---- Types of fields ----

type Scalar = 'str' | 'int' | 'float' | 'bool' | 'json';
export type Spec = Scalar | `${Scalar}?` | readonly [Spec] | { readonly [key: string]: Spec };
export type Dtype = 'u8' | 'i16' | 'i32' | 'i64' | 'f32' | 'f64' | 'bf16';
type FrameSpec = Dtype | `${Dtype}?`;

type ScalarValue<S> = S extends 'str' ? string : S extends 'int' | 'float' ? number : S extends 'bool' ? boolean : Json;
/** The TypeScript type of a field with this spec. */
export type Value<S> = S extends `${infer B extends Scalar}?`
  ? ScalarValue<B> | null
  : S extends Scalar
    ? ScalarValue<S>
    : S extends readonly [infer E]
      ? readonly Value<E>[]
      : S extends { readonly '*': infer E }
        ? { readonly [key: string]: Value<E> }
        : S extends { readonly '?': infer E }
          ? Value<E> | null
          : { readonly [K in keyof S]: Value<S[K]> };

/** bf16 travels as its raw bits. */
type ArrayOf<D> = D extends 'u8'
  ? Uint8Array
  : D extends 'i16'
    ? Int16Array
    : D extends 'i32'
      ? Int32Array
      : D extends 'i64'
        ? BigInt64Array
        : D extends 'f32'
          ? Float32Array
          : D extends 'f64'
            ? Float64Array
            : Uint16Array;
export type FrameArray =
  | Uint8Array
  | Int16Array
  | Int32Array
  | BigInt64Array
  | Float32Array
  | Float64Array
  | Uint16Array;
type FramesOf<F> = { readonly [K in keyof F as F[K] extends `${string}?` ? never : K]: ArrayOf<F[K]> } & {
  readonly [K in keyof F as F[K] extends `${string}?` ? K : never]?: F[K] extends `${infer D}?` ? ArrayOf<D> : never;
};

interface Part {
  readonly fields: { readonly [key: string]: Spec };
  readonly frames: { readonly [key: string]: FrameSpec };
}
interface Entry extends Part {
  readonly from: string; // letters of the senders
  readonly to: string;
  readonly reply?: Part; // absent: an event, or a message answered by another event
  readonly io?: true; // answered by the worker's I/O thread at any time
}

// ---- The table ----

const NONE = { fields: {}, frames: {} } as const;
const SAMPLING = {
  temperature: 'float', // 0 = greedy
  top_p: 'float', // 1 = off
  top_k: 'int', // 0 = off
  max_tokens: 'int',
  seed: 'int',
  stop: ['str'],
  stop_token_ids: ['int'],
} as const;
const SPAN = { version: 'int', from: 'int', to: 'int' } as const; // offsets into the turn's sampled ids
const BLOB = { sha256: 'str', dtype: 'str', shape: ['int'] } as const; // file of that name among the run's blobs
const TENSORS = [{ name: 'str', dtype: 'str', shape: ['int'], offset: 'int', bytes: 'int', crc32: 'int' }] as const;
/** transport: file, nccl, ipc; path: of the segment, of a group (workers/transport.py), of a file of handles */
const SOURCE = { transport: 'str', path: 'str' } as const;
const ITEM_IDS = { fields: { errors: ['str?'] }, frames: { ids: 'i32', lengths: 'i32' } } as const; // errors[i] null = fine

export const MESSAGES = {
  hello: {
    from: 'W',
    to: 'C',
    fields: {
      protocol_version: 'int',
      worker_kind: 'str',
      worker_id: 'str',
      pid: 'int',
      host: 'str',
      secret: 'str',
      capabilities: 'json',
    },
    frames: {},
  },
  welcome: { from: 'C', to: 'W', fields: { incarnation: 'int', options: 'json', heartbeat_ms: 'int' }, frames: {} },
  refused: { from: 'C', to: 'W', fields: { reason: 'str' }, frames: {} },
  ready: { from: 'W', to: 'C', fields: { info: 'json' }, frames: {} },
  heartbeat: {
    from: 'W',
    to: 'C',
    fields: { received: 'int', stats: { '*': 'float' } }, // received: highest seq seen, -1 = none; beyond it is unsent
    frames: {},
  },
  ping: { from: 'C', to: 'W', fields: {}, frames: {}, reply: NONE, io: true },
  stacks: { from: 'C', to: 'W', fields: {}, frames: {}, reply: { fields: { text: 'str' }, frames: {} }, io: true },
  stats: {
    from: 'C',
    to: 'W',
    fields: {},
    frames: {},
    reply: { fields: { stats: { '*': 'float' } }, frames: {} },
    io: true,
  },
  cancel: { from: 'C', to: 'W', fields: { request: 'int' }, frames: {}, reply: NONE, io: true },
  stop: { from: 'C', to: 'W', fields: {}, frames: {}, reply: NONE, io: true },

  generate: {
    from: 'C',
    to: 'E',
    fields: {
      rollout_id: 'str',
      attempt: 'int',
      turn: 'int',
      session_id: 'str', // requests of one conversation share it: a hint for prefix reuse
      sampling: SAMPLING,
      already: 'int', // trailing prompt ids this request sampled earlier; max_tokens is what is still to come
      want_text: 'bool',
      heads: 'int', // top-k heads per token; 0 = none
      want_routes: 'bool',
    },
    frames: { prompt: 'i32' },
    reply: { fields: { handle: 'int' }, frames: {} },
  },
  tokens: {
    from: 'E',
    to: 'C',
    fields: {
      version: 'int', // sampled all of these
      texts: ['str'], // new text per handle; empty list when no request asked for text
      ended: [
        {
          handle: 'int',
          reason: 'str', // stop length abort error
          detail: 'str?',
          cached_tokens: 'int',
          routes: { '?': BLOB }, // expert ids (tokens, MoE layers, k) of all ids but the last; null = not wanted
        },
      ],
    },
    frames: { handles: 'i32', counts: 'i32', ids: 'i32', logprobs: 'f32' },
  },
  abort: { from: 'C', to: 'E', fields: { handles: ['int'] }, frames: {}, reply: NONE },
  pause: {
    from: 'C',
    to: 'E',
    fields: { epoch: 'int', mode: 'str', clear_cache: 'bool' }, // keep, drain, abort
    frames: {},
    reply: { fields: { version: 'int' }, frames: { handles: 'i32', totals: 'i32' } }, // tokens sampled so far
  },
  stage_weights: {
    from: 'C',
    to: 'E',
    fields: { version: 'int', source: SOURCE, tensors: TENSORS }, // the load_weights of all this then only swaps
    frames: {},
    reply: { fields: { verify_ms: 'float' }, frames: {} },
  },
  load_weights: {
    from: 'C',
    to: 'E',
    fields: { version: 'int', source: SOURCE, tensors: TENSORS, last: 'bool' },
    frames: {},
    reply: { fields: { loaded: 'int', verify_ms: 'float', load_ms: 'float' }, frames: {} },
  },
  resume: { from: 'C', to: 'E', fields: { epoch: 'int' }, frames: {}, reply: NONE },
  score: {
    from: 'C',
    to: 'E',
    fields: {},
    frames: { ids: 'i32', lengths: 'i32' },
    reply: { fields: { version: 'int' }, frames: { logprobs: 'f32' } }, // first token of each row: 0
  },

  rows: {
    from: 'C',
    to: 'T',
    fields: { step: 'int', part: 'int', of: 'int' },
    frames: {
      ids: 'i32',
      lengths: 'i32',
      loss_mask: 'u8',
      stale: 'u8?', // 1 = not sampled by the version being trained; left out when no trained token is
      rollout_logprobs: 'f32',
      old_logprobs: 'f32?', // left out when one optimizer step per batch makes the ratio 1
      advantages: 'f32',
    },
    reply: NONE,
  },
  run: {
    from: 'C',
    to: 'T',
    fields: {
      step: 'int',
      version: 'int',
      micro_batches: [['int']], // row numbers; [] = a dummy, so that every rank runs the same number
      packed: 'bool', // one packed row per micro-batch, or padded rows
      denominators: { tokens: 'float' }, // over the whole batch and all ranks
      lr: 'float',
      temperature: 'float',
      loss: {
        clip_low: 'float',
        clip_high: 'float',
        is_level: 'str', // off, token
        is_mode: 'str', // mask, clip, trunc
        is_low: 'float',
        is_high: 'float',
      },
    },
    frames: {},
    reply: { fields: { sums: { '*': 'float' }, maxima: { '*': 'float' } }, frames: {} }, // of this rank; never means
  },
  logprobs: {
    from: 'C',
    to: 'T',
    fields: { which: 'str', temperature: 'float' }, // which: policy
    frames: { ids: 'i32', lengths: 'i32' },
    reply: { fields: {}, frames: { logprobs: 'f32' } }, // first token of each row: 0
  },
  push_weights: {
    from: 'C',
    to: 'T',
    fields: { version: 'int', transport: 'str', path: 'str' }, // as in load_weights; only `file` answers tensors
    frames: {},
    reply: { fields: { tensors: TENSORS, bytes: 'int' }, frames: {} }, // ranks other than 0 answer with an empty list
  },
  save: { from: 'C', to: 'T', fields: { step: 'int', path: 'str' }, frames: {}, reply: NONE },
  restore: { from: 'C', to: 'T', fields: { path: 'str' }, frames: {}, reply: { fields: { step: 'int' }, frames: {} } },
  export: { from: 'C', to: 'T', fields: { path: 'str' }, frames: {}, reply: NONE },

  render: {
    from: 'CR',
    to: 'CK',
    fields: {
      items: [{ messages: 'json', tools: 'json', template_kwargs: 'json', add_generation_prompt: 'bool' }],
    },
    frames: {},
    reply: ITEM_IDS,
  },
  suffix: {
    from: 'CR',
    to: 'CK',
    fields: {
      items: [
        {
          stub: 'json', // the assistant turn just sampled, as a message with its tool calls
          new_messages: 'json',
          tools: 'json',
          template_kwargs: 'json',
          last_ids: ['int'], // last ids of the sampled turn, the stop token among them when it was sampled
        },
      ],
    },
    frames: {},
    reply: ITEM_IDS,
  },
  encode: { from: 'CR', to: 'CK', fields: { texts: ['str'] }, frames: {}, reply: ITEM_IDS },
  decode: {
    from: 'CR',
    to: 'CK',
    fields: { skip_special: 'bool' },
    frames: { ids: 'i32', lengths: 'i32' },
    reply: { fields: { texts: ['str'] }, frames: {} },
  },
  parse: {
    from: 'CR',
    to: 'CK',
    fields: { tools: ['json'] }, // per item; [] = calls are left in the content
    frames: { ids: 'i32', lengths: 'i32' },
    reply: {
      fields: {
        items: [
          {
            text: 'str', // decoded, special tokens kept, the final stop token left out
            content: 'str',
            reasoning: 'str?',
            tool_calls: [{ name: 'str', arguments: 'str' }],
            error: 'str?', // markup that looks like a call but is not one; then it stays in content
          },
        ],
      },
      frames: {},
    },
  },

  start: {
    from: 'C',
    to: 'R',
    fields: {
      rollout_id: 'str',
      attempt: 'int',
      group_id: 'str',
      index: 'int',
      prompt: 'json',
      label: 'json',
      tools: 'json',
      seed: 'int',
      limits: { max_turns: 'int', max_tokens: 'int', deadline_ms: 'int' }, // max_tokens: of a trajectory, prompt included
      sampling: SAMPLING,
    },
    frames: {},
    reply: NONE,
  },
  turn: {
    from: 'R',
    to: 'C',
    fields: { rollout_id: 'str', attempt: 'int', turn: 'int', session_id: 'str', sampling: SAMPLING },
    frames: { prompt: 'i32' },
    reply: {
      fields: { reason: 'str', detail: 'str?', engine: 'str', cached_tokens: 'int', spans: [SPAN] },
      frames: { ids: 'i32', logprobs: 'f32' },
    },
  },
  abort_turn: { from: 'R', to: 'C', fields: { rollout_id: 'str', attempt: 'int', turn: 'int' }, frames: {} },
  cancel_rollout: { from: 'C', to: 'R', fields: { rollout_id: 'str', attempt: 'int', reason: 'str' }, frames: {} },
  rollout_done: {
    from: 'R',
    to: 'C',
    fields: {
      rollout_id: 'str',
      attempt: 'int',
      reason: 'str',
      detail: 'str?',
      reward: 'float?',
      score: 'float?',
      truncated: 'bool',
      info: { '*': 'float' },
      turns: 'int',
      spans: [[{ source: 'str', version: 'int', turn: 'int', from: 'int', to: 'int' }]], // per trajectory
    },
    frames: { lengths: 'i32', ids: 'i32', loss_mask: 'u8', logprobs: 'f32', versions: 'i32', turns_of: 'i32' },
    reply: NONE,
  },
} as const satisfies Record<string, Entry>;

export type Kind = keyof typeof MESSAGES;
export type Fields<K extends Kind> = Value<(typeof MESSAGES)[K]['fields']>;
export type Frames<K extends Kind> = FramesOf<(typeof MESSAGES)[K]['frames']>;
type ReplyPart<K extends Kind> = (typeof MESSAGES)[K] extends { readonly reply: infer R extends Part }
  ? R
  : typeof NONE;
export type ReplyFields<K extends Kind> = Value<ReplyPart<K>['fields']>;
export type ReplyFrames<K extends Kind> = FramesOf<ReplyPart<K>['frames']>;
/** Kinds that have a reply. */
export type RequestKind = { [K in Kind]: (typeof MESSAGES)[K] extends { readonly reply: Part } ? K : never }[Kind];
export type EventKind = Exclude<Kind, RequestKind>;

/** Types of an `error` reply. Only channel.ts tries again: `failed` of pure kinds, and `overloaded`. */
export const ERROR_TYPES = [
  'bad_request',
  'unsupported',
  'cancelled',
  'deadline',
  'overloaded',
  'failed',
  'fatal',
  'lost',
] as const;
export type ErrorType = (typeof ERROR_TYPES)[number];
const ERROR_PART = {
  fields: { type: 'str', message: 'str', field: 'str?', traceback: 'str?', retry_after_ms: 'int?' },
  frames: {},
} as const;

/** A message that does not fit the table. `field` is a path such as `generate.sampling.temperature`. */
export class ProtocolError extends Error {
  readonly field: string | null;
  constructor(message: string, field: string | null = null) {
    super(message);
    this.name = 'ProtocolError';
    this.field = field;
  }
}

/** An `error` reply, as the requester sees it. */
export class RemoteError extends Error {
  readonly type: ErrorType;
  readonly field: string | null;
  readonly traceback: string | null;
  readonly retryAfterMs: number | null;
  constructor(
    type: ErrorType,
    message: string,
    more: { field?: string | null; traceback?: string | null; retryAfterMs?: number | null } = {},
  ) {
    super(message);
    this.name = 'RemoteError';
    this.type = type;
    this.field = more.field ?? null;
    this.traceback = more.traceback ?? null;
    this.retryAfterMs = more.retryAfterMs ?? null;
  }
}

// ---- Messages as programs see them ----

export interface Envelope {
  readonly kind: Kind | 'ok' | 'error';
  readonly seq: number;
  readonly id: number | null; // set on requests
  readonly re: number | null; // set on replies
  readonly deadlineMs: number | null; // relative, since clocks differ
}
/** Decoded and checked against the table; the bus narrows it by kind. */
export interface Decoded extends Envelope {
  readonly fields: Readonly<Record<string, unknown>>;
  readonly frames: Readonly<Record<string, FrameArray>>;
}
export interface Outgoing {
  readonly kind: Kind | 'ok' | 'error';
  readonly seq: number;
  readonly id?: number;
  readonly re?: number;
  readonly deadlineMs?: number;
  readonly fields: Readonly<Record<string, unknown>>;
  readonly frames?: Readonly<Record<string, FrameArray | undefined>>;
}

// int64AsType: Python sends integers from 2^32 on as 64-bit ones, which would otherwise arrive as bigint; beyond 2^53 they come out unsafe and are refused.
const packr = new Packr({ useRecords: false, mapsAsObjects: true, variableMapSize: true, int64AsType: 'number' });
const RESERVED = ['v', 'kind', 'seq', 'id', 're', 'deadline_ms', 'frames'];
const ITEM_BYTES: Record<Dtype, number> = { u8: 1, i16: 2, i32: 4, i64: 8, f32: 4, f64: 8, bf16: 2 };
const ARRAYS = {
  u8: Uint8Array,
  i16: Int16Array,
  i32: Int32Array,
  i64: BigInt64Array,
  f32: Float32Array,
  f64: Float64Array,
  bf16: Uint16Array,
} as const;

/** `ok` is checked against the reply of the request it answers, so its kind must be known. */
function partOf(kind: Kind | 'ok' | 'error', answers: Kind | null): Part {
  if (kind === 'error') return ERROR_PART;
  if (kind === 'ok') {
    const entry: Entry | undefined = answers ? MESSAGES[answers] : undefined;
    if (!entry?.reply)
      throw new ProtocolError(`Cannot use an ok reply to ${answers ?? 'an unknown request'}: that kind has no reply`);
    return entry.reply;
  }
  const entry: Entry | undefined = Object.hasOwn(MESSAGES, kind) ? MESSAGES[kind] : undefined;
  if (!entry) throw new ProtocolError(`Unknown message kind: ${JSON.stringify(kind)}`, 'kind');
  return entry;
}

/** Bytes of a message. Throws ProtocolError where it does not fit the table: a bug of the sender, found at the sender. */
export function encode(message: Outgoing, answers: Kind | null = null): Buffer[] {
  const part = partOf(message.kind, answers);
  const name = message.kind === 'ok' ? `ok(${answers})` : message.kind;
  check(message.fields, part.fields, name);
  const parts: Buffer[] = [];
  const frames: { name: string; dtype: string; shape: number[] }[] = [];
  for (const [key, spec] of Object.entries(part.frames)) {
    const dtype = spec.replace('?', '') as Dtype;
    const array = message.frames?.[key];
    if (array === undefined) {
      if (spec.endsWith('?')) continue;
      throw new ProtocolError(`Missing frame ${name}.${key}`, key);
    }
    if (!(array instanceof ARRAYS[dtype])) {
      throw new ProtocolError(`Frame ${name}.${key} must be ${dtype}, got ${array.constructor.name}`, key);
    }
    frames.push({ name: key, dtype, shape: [array.length] });
    parts.push(Buffer.from(array.buffer, array.byteOffset, array.byteLength));
  }
  for (const key of Object.keys(message.frames ?? {})) {
    if (!Object.hasOwn(part.frames, key)) throw new ProtocolError(`Unknown frame ${name}.${key}`, key);
  }
  const header: Record<string, unknown> = { v: PROTOCOL_VERSION, kind: message.kind, seq: message.seq };
  if (message.id !== undefined) header.id = message.id;
  if (message.re !== undefined) header.re = message.re;
  if (message.deadlineMs !== undefined) header.deadline_ms = Math.max(0, Math.ceil(message.deadlineMs));
  header.frames = frames;
  Object.assign(header, message.fields);
  const all = [Buffer.from(packr.pack(header)), ...parts];
  const bytes = all.reduce((sum, b) => sum + b.length, 0);
  if (bytes > MAX_MESSAGE_BYTES)
    throw new ProtocolError(`Cannot send ${name}: ${bytes} bytes, at most ${MAX_MESSAGE_BYTES}`);
  return all;
}

/** What a header says besides its fields: enough to check `seq` and to find the request it answers. Body unchecked. */
export interface Opened extends Omit<Envelope, 'kind'> {
  readonly kind: string;
  readonly header: Readonly<Record<string, unknown>>;
  readonly parts: readonly Uint8Array[];
}

/**
 * The messages of one ZeroMQ message, one by one: the caller handles each before the next is looked at. Throws ProtocolError;
 * the bus then counts the sender as lost.
 */
export function* openMessages(parts: readonly Uint8Array[]): Generator<Opened> {
  let at = 0;
  do {
    const header = unpack(parts[at]);
    const count = Array.isArray(header.frames) ? header.frames.length : parts.length;
    const end = Math.min(parts.length, at + 1 + count);
    yield openMessage(header, parts.slice(at, end));
    at = end;
  } while (at < parts.length);
}

function openMessage(header: Record<string, unknown>, parts: readonly Uint8Array[]): Opened {
  const bytes = parts.reduce((sum, b) => sum + b.length, 0);
  if (bytes > MAX_MESSAGE_BYTES) throw new ProtocolError(`Message of ${bytes} bytes, at most ${MAX_MESSAGE_BYTES}`);
  if (header.v !== PROTOCOL_VERSION) {
    throw new ProtocolError(`Protocol version ${show(header.v)}, this side speaks ${PROTOCOL_VERSION}`, 'v');
  }
  const { kind, seq, id = null, re = null, deadline_ms = null } = header;
  if (typeof kind !== 'string') throw new ProtocolError('Header has no kind', 'kind');
  for (const [key, value] of Object.entries({ seq, id, re, deadline_ms })) {
    if ((value !== null || key === 'seq') && !(Number.isSafeInteger(value) && (value as number) >= 0)) {
      throw new ProtocolError(`${kind}.${key} must be a whole number, got ${show(value)}`, key);
    }
  }
  if ((kind === 'ok' || kind === 'error') && re === null) throw new ProtocolError(`${kind} has no re`, 're');
  return {
    kind,
    seq: seq as number,
    id: id as number | null,
    re: re as number | null,
    deadlineMs: deadline_ms as number | null,
    header,
    parts: parts.slice(1),
  };
}

/** Check fields and frames. `answers` is the kind of the request that an `ok` belongs to. Throws ProtocolError. */
export function decodeBody(opened: Opened, answers: Kind | null = null): Decoded {
  const { seq, id, re, deadlineMs, header } = opened;
  const kind = opened.kind as Kind | 'ok' | 'error'; // partOf refuses unknown ones
  const part = partOf(kind, answers);
  const name = kind === 'ok' ? `ok(${answers})` : kind;
  if (kind !== 'ok' && kind !== 'error' && 'reply' in part !== (id !== null)) {
    throw new ProtocolError(`${kind}.id must be ${id === null ? 'present' : 'absent'}`, 'id');
  }
  const fields: Record<string, unknown> = {};
  for (const key of Object.keys(header)) if (!RESERVED.includes(key)) fields[key] = header[key];
  check(fields, part.fields, name);
  return { kind, seq, id, re, deadlineMs, fields, frames: decodeFrames(header.frames, opened.parts, part, name) };
}

/** One checked message. `requestKind` tells which request an id belongs to, for `ok` replies. Throws ProtocolError. */
export function decode(parts: readonly Uint8Array[], requestKind: (re: number) => Kind | null = () => null): Decoded {
  const opened = openMessage(unpack(parts[0]), parts);
  return decodeBody(opened, opened.kind === 'ok' && opened.re !== null ? requestKind(opened.re) : null);
}

function unpack(bytes: Uint8Array | undefined): Record<string, unknown> {
  if (!bytes) throw new ProtocolError('Empty message');
  try {
    refuseForeign(new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength), 0, false);
    const value: unknown = packr.unpack(bytes);
    if (!isRecord(value)) throw new Error('not a map');
    return value;
  } catch (error) {
    throw new ProtocolError(`Header is not msgpack: ${(error as Error).message}`);
  }
}

/**
 * Walks over one msgpack value and throws at what JSON has no word for: extension types (msgpackr would make dates,
 * sets and even records of them) and keys that are not strings (msgpackr would make them some). Gives the offset
 * behind the value.
 */
function refuseForeign(view: DataView, start: number, isKey: boolean): number {
  const code = view.getUint8(start);
  const at = start + 1;
  const isString = (code >= 0xa0 && code <= 0xbf) || (code >= 0xd9 && code <= 0xdb);
  if (isKey && !isString) throw new Error('a key is not a string');
  if (code <= 0x7f || code >= 0xe0) return at; // small integers
  if (code <= 0x9f) return refuseForeignIn(view, at, code & 15, code <= 0x8f);
  if (code <= 0xbf) return at + (code & 31);
  switch (code) {
    case 0xc0: // nil, false, true
    case 0xc2:
    case 0xc3:
      return at;
    case 0xcc: // numbers of 1, 2, 4 and 8 bytes
    case 0xd0:
      return at + 1;
    case 0xcd:
    case 0xd1:
      return at + 2;
    case 0xca:
    case 0xce:
    case 0xd2:
      return at + 4;
    case 0xcb:
    case 0xcf:
    case 0xd3:
      return at + 8;
    case 0xc4: // bytes and strings
    case 0xd9:
      return at + 1 + view.getUint8(at);
    case 0xc5:
    case 0xda:
      return at + 2 + view.getUint16(at);
    case 0xc6:
    case 0xdb:
      return at + 4 + view.getUint32(at);
    case 0xdc: // lists and maps
    case 0xde:
      return refuseForeignIn(view, at + 2, view.getUint16(at), code === 0xde);
    case 0xdd:
    case 0xdf:
      return refuseForeignIn(view, at + 4, view.getUint32(at), code === 0xdf);
    default:
      throw new Error('an extension type');
  }
}

function refuseForeignIn(view: DataView, start: number, entries: number, isMap: boolean): number {
  let at = start;
  for (let i = 0; i < entries; i++) {
    if (isMap) at = refuseForeign(view, at, true);
    at = refuseForeign(view, at, false);
  }
  return at;
}

function decodeFrames(
  table: unknown,
  parts: readonly Uint8Array[],
  part: Part,
  name: string,
): Record<string, FrameArray> {
  if (!Array.isArray(table)) throw new ProtocolError(`${name}.frames must be a list`, 'frames');
  if (table.length !== parts.length) {
    throw new ProtocolError(`${name} names ${table.length} frames but carries ${parts.length}`, 'frames');
  }
  const out: Record<string, FrameArray> = {};
  for (const [i, entry] of table.entries()) {
    const bytes = parts[i] as Uint8Array;
    const frame = entry as { name?: unknown; dtype?: unknown; shape?: unknown };
    const key = String(frame.name);
    const spec = Object.hasOwn(part.frames, key) ? part.frames[key] : undefined;
    if (!spec || Object.hasOwn(out, key))
      throw new ProtocolError(`${spec ? 'Repeated' : 'Unknown'} frame ${name}.${key}`, key);
    const dtype = spec.replace('?', '') as Dtype;
    if (frame.dtype !== dtype)
      throw new ProtocolError(`Frame ${name}.${key} must be ${dtype}, got ${String(frame.dtype)}`, key);
    const shape = frame.shape;
    if (!Array.isArray(shape) || shape.length !== 1 || !Number.isSafeInteger(shape[0]) || shape[0] < 0) {
      throw new ProtocolError(`Frame ${name}.${key} must have one dimension, got shape ${JSON.stringify(shape)}`, key);
    }
    const size = shape[0] * ITEM_BYTES[dtype];
    if (size !== bytes.length) {
      throw new ProtocolError(`Frame ${name}.${key} has ${bytes.length} bytes, its shape needs ${size}`, key);
    }
    // A view at an odd offset throws for wider items, so such frames are copied.
    const aligned = bytes.byteOffset % ITEM_BYTES[dtype] === 0 ? bytes : Uint8Array.from(bytes);
    out[key] = new ARRAYS[dtype](aligned.buffer as ArrayBuffer, aligned.byteOffset, shape[0]);
  }
  for (const [key, spec] of Object.entries(part.frames)) {
    if (!spec.endsWith('?') && !Object.hasOwn(out, key)) throw new ProtocolError(`Missing frame ${name}.${key}`, key);
  }
  return out;
}

// ---- Checking ----

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && Object.getPrototypeOf(value) === Object.prototype;
}

function check(value: unknown, spec: Spec, path: string): void {
  if (typeof spec === 'string') return checkScalar(value, spec, path);
  if (Array.isArray(spec)) {
    if (!Array.isArray(value)) throw mistyped(path, 'a list', value);
    for (const [i, item] of value.entries()) check(item, spec[0] as Spec, `${path}[${i}]`);
    return;
  }
  const record = spec as { readonly [key: string]: Spec };
  const orNull = record['?'];
  if (orNull !== undefined) {
    if (value !== null) check(value, orNull, path);
    return;
  }
  if (!isRecord(value)) throw mistyped(path, 'a record', value);
  const any = record['*'];
  for (const key of Object.keys(value)) {
    if (any === undefined && !Object.hasOwn(record, key))
      throw new ProtocolError(`Unknown field ${path}.${key}`, `${path}.${key}`);
    if (any !== undefined) check(value[key], any, `${path}.${key}`);
  }
  if (any !== undefined) return;
  for (const key of Object.keys(record)) {
    if (!Object.hasOwn(value, key)) throw new ProtocolError(`Missing field ${path}.${key}`, `${path}.${key}`);
    check(value[key], record[key] as Spec, `${path}.${key}`);
  }
}

function checkScalar(value: unknown, spec: string, path: string): void {
  if (value === null && (spec.endsWith('?') || spec === 'json')) return;
  switch (spec.replace('?', '')) {
    case 'str':
      if (typeof value !== 'string') throw mistyped(path, 'a string', value);
      return;
    case 'bool':
      if (typeof value !== 'boolean') throw mistyped(path, 'true or false', value);
      return;
    case 'int':
      if (!Number.isSafeInteger(value)) throw mistyped(path, 'an integer within 2^53', value);
      return;
    case 'float':
      if (typeof value !== 'number' || !Number.isFinite(value)) throw mistyped(path, 'a finite number', value);
      return;
    default:
      return checkJson(value, path);
  }
}

function checkJson(value: unknown, path: string): void {
  if (value === null || typeof value === 'string' || typeof value === 'boolean') return;
  if (typeof value === 'number' && Number.isFinite(value) && (!Number.isInteger(value) || Number.isSafeInteger(value)))
    return;
  if (Array.isArray(value)) {
    for (const [i, item] of value.entries()) checkJson(item, `${path}[${i}]`);
    return;
  }
  if (!isRecord(value)) throw mistyped(path, 'JSON', value);
  for (const key of Object.keys(value)) checkJson(value[key], `${path}.${key}`);
}

function mistyped(path: string, wanted: string, value: unknown): ProtocolError {
  return new ProtocolError(`Field ${path} must be ${wanted}, got ${show(value).slice(0, 80)}`, path);
}

/** JSON as Python prints it too: NaN and infinity by their names. */
function show(value: unknown): string {
  return typeof value === 'number' || typeof value === 'bigint' ? `${value}` : (JSON.stringify(value) ?? 'null');
}
