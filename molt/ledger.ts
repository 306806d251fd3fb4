/**
 * The append-only record of everything that happened; resume and audit read it.
 *
 *   runs/<name>/ledger/000001.bin  000002.bin ...      a segment is records, one after another
 *   record = body bytes u32, CRC32 of the body u32, CRC32 of these 8 bytes u32 | body
 *   body   = header bytes u32, header (msgpack), raw little-endian arrays in the order that the header names
 *
 * Invariants
 *   1. `commit` resolves when everything recorded before it is on the disk (group commit: what comes while one write is
 *      synced goes with the next).
 *   2. A file is only ever appended to, by one process; a resumed run begins a new segment. What a crash tore off at the
 *      end of the last one is cut and reported; damage anywhere else is an error with its place, never passed over.
 *   3. A segment is deleted only when every group in it is decided, the oldest kept checkpoint covers its steps, and the
 *      ledger is larger than run.ledger_gb.
 * `npx tsx molt/ledger.ts RUN_DIR [KIND ...]` prints records as JSON lines, arrays as their lengths.
 * Called by loop.ts, pool.ts and report.ts (record), history.ts and audit.ts (read). Elsewhere called event log, journal.
 * Departure from the design: CRC32 (node:zlib) in place of CRC32C.
 */
import {
  closeSync,
  existsSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  readSync,
  realpathSync,
  rmSync,
  truncateSync,
} from 'node:fs';
import { type FileHandle, open } from 'node:fs/promises';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { crc32 } from 'node:zlib';
import { Packr } from 'msgpackr';
import type { Position } from './data.ts';
import type { DropReason, Json, Rollout } from './types.ts';

export const SCHEMA = 1;
const SEGMENT_BYTES = 64 * 1024 * 1024;
const FRAME_BYTES = 12;
const SLICE_BYTES = 4 * 1024 * 1024; // checksummed in one stretch

type Metrics = Readonly<Record<string, number | null>>;

export type LedgerEvent = Readonly<
  /** First of a segment, with the newest `meta` behind it: what is needed of the ones before it. */
  | { kind: 'segment'; schema: number; number: number; step: number; version: number }
  | {
      kind: 'meta';
      life: number; // processes that wrote here before
      options: Json;
      dataHash: string;
      resumedAt: number; // step of the checkpoint
    }
  | {
      kind: 'dispatched';
      groupId: string;
      source: string;
      epoch: number;
      index: number;
      hash: string; // of the prompt
      version: number;
      attempt: number; // 0 = first; a resumed run dispatches what was in flight once more
      members: readonly number[]; // rollouts that are to run
      size: number; // members of the whole group
      lanes: Position['lanes']; // of the data, behind this prompt
    }
  /** arrays: lengths, ids, loss_mask, logprobs, versions, turns (flat over trajectories), spans (6 numbers each) */
  | ({ kind: 'finished' } & Omit<Rollout, 'trajectories'>)
  | {
      kind: 'prompt_dropped'; // before it was dispatched
      split: 'train' | 'heldout';
      source: string;
      epoch: number;
      index: number;
      reason: 'prompt_too_long' | 'prompt_unrenderable';
      detail: number | string; // tokens, or the error of the chat template
    }
  | { kind: 'dropped'; groupId: string; reason: DropReason }
  /** arrays: advantages (of trained tokens, one for a whole sample where all are equal), counts (1, or one per token) */
  | {
      kind: 'batch';
      step: number;
      version: number;
      groups: readonly string[];
      rollouts: readonly string[]; // all of their trajectories are samples, in order
      sent: readonly number[]; // samples with credit, which the trainer gets
      denominator: number;
      lr: number;
      metrics: Metrics; // what was known before it was trained
    }
  | { kind: 'step'; step: number; metrics: Metrics }
  | {
      kind: 'refit';
      version: number;
      step: number;
      engine: string; // that verified it first
      of: number; // engines that were asked to take it
      checksum: number; // of all tensors, in order
      bytes: number;
      again: boolean; // of a version that was declared before: after a resume
    }
  | ({ kind: 'evaluated'; tokens: number } & Pick<
      Rollout,
      'rolloutId' | 'attempt' | 'reason' | 'detail' | 'reward' | 'score' | 'turns'
    >)
  | { kind: 'eval'; step: number; version: number; metrics: Metrics }
  | { kind: 'checkpoint'; step: number; path: string }
  | { kind: 'event'; name: string; detail: Readonly<Record<string, string | number>> }
>;

export type LedgerArray = Uint8Array | Int32Array | Float32Array;
export type LedgerArrays = Readonly<Record<string, LedgerArray>>;
/** Where a record is. */
export interface Place {
  readonly path: string;
  readonly offset: number;
  readonly bytes: number; // frame and body
}
export interface Entry {
  readonly event: LedgerEvent & { readonly time: number };
  readonly arrays: LedgerArrays;
  readonly place: Place;
}

// ---- Bytes ----

const packr = new Packr({ useRecords: false, mapsAsObjects: true, variableMapSize: true, int64AsType: 'number' });
const ARRAYS = { u8: Uint8Array, i32: Int32Array, f32: Float32Array } as const;

/** Frame, header and arrays; the checksums are not there yet (`sealed`). */
function encode(event: LedgerEvent, arrays: LedgerArrays): Buffer[] {
  const table = Object.entries(arrays).map(([name, array]) => {
    const dtype = Object.entries(ARRAYS).find(([, type]) => array instanceof type)?.[0];
    return [name, dtype, array.length];
  });
  const header = packr.pack({ ...event, time: Date.now(), arrays: table });
  const head = Buffer.alloc(FRAME_BYTES + 4);
  head.writeUInt32LE(header.length, FRAME_BYTES);
  const parts = Object.values(arrays).map((a) => Buffer.from(a.buffer, a.byteOffset, a.byteLength));
  return [head, header, ...parts];
}

/** Fills in length and checksums, in stretches that leave the event loop its turn. */
async function sealed(record: Buffer[]): Promise<Buffer[]> {
  const [head, ...rest] = record as [Buffer, ...Buffer[]];
  let [sum, bytes, since] = [crc32(head.subarray(FRAME_BYTES)), 4, 0];
  for (const part of rest) {
    for (let at = 0; at < part.length; at += SLICE_BYTES) {
      sum = crc32(part.subarray(at, at + SLICE_BYTES), sum);
      since += Math.min(SLICE_BYTES, part.length - at);
      if (since < SLICE_BYTES) continue;
      since = 0;
      await nextTurn();
    }
    bytes += part.length;
  }
  head.writeUInt32LE(bytes, 0);
  head.writeUInt32LE(sum, 4);
  head.writeUInt32LE(crc32(head.subarray(0, 8)), 8);
  return record;
}

type Framed = { readonly body: Buffer; readonly end: number } | { readonly problem: string; readonly isTorn: boolean };

/** The record at `at`, or what is wrong there; torn = nothing whole can follow. */
function frameAt(file: Buffer, at: number): Framed {
  const rest = file.length - at;
  if (rest < FRAME_BYTES) return { problem: `${rest} bytes, a record has more`, isTorn: true };
  const bytes = file.readUInt32LE(at);
  if (crc32(file.subarray(at, at + 8)) !== file.readUInt32LE(at + 8))
    return { problem: 'its length is damaged', isTorn: file.subarray(at).every((byte) => byte === 0) };
  const end = at + FRAME_BYTES + bytes;
  if (end > file.length) return { problem: `ends at byte ${end}, the file at ${file.length}`, isTorn: true };
  const body = file.subarray(at + FRAME_BYTES, end);
  if (crc32(body) !== file.readUInt32LE(at + 4))
    return { problem: 'its checksum differs', isTorn: end === file.length };
  return { body, end };
}

function decode(body: Buffer, place: Place): Entry {
  const headerEnd = 4 + body.readUInt32LE(0);
  const { arrays: table, ...event } = packr.unpack(body.subarray(4, headerEnd)) as Entry['event'] & {
    arrays: [string, keyof typeof ARRAYS, number][];
  };
  const arrays: Record<string, LedgerArray> = {};
  let at = headerEnd;
  for (const [name, dtype, length] of table) {
    const bytes = Uint8Array.from(body.subarray(at, at + length * ARRAYS[dtype].BYTES_PER_ELEMENT)); // aligned
    arrays[name] = new ARRAYS[dtype](bytes.buffer, 0, length);
    at += bytes.length;
  }
  return { event: event as Entry['event'], arrays, place };
}

// ---- Reading ----

/** Damage that no crash explains. */
export class LedgerError extends Error {}

export function hasLedger(runDir: string): boolean {
  return segmentsOf(runDir).length > 0;
}

function segmentsOf(runDir: string): { number: number; path: string }[] {
  const dir = join(runDir, 'ledger');
  if (!existsSync(dir)) return [];
  return readdirSync(dir)
    .flatMap((name) => (/^\d+\.bin$/.test(name) ? [{ number: Number.parseInt(name, 10), path: join(dir, name) }] : []))
    .sort((a, b) => a.number - b.number);
}

/**
 * All records in order. A torn tail of the last segment ends it and is told to `onTorn`. Throws LedgerError with the
 * place of any other damage.
 */
export function* readLedger(
  runDir: string,
  onTorn: (place: Place, problem: string) => void = () => {},
): Generator<Entry> {
  const segments = segmentsOf(runDir);
  for (const [i, { number, path }] of segments.entries()) {
    const wanted = (segments[0]?.number ?? 0) + i;
    if (number !== wanted) throw new LedgerError(`${path}: segment ${wanted} is missing before it`);
    const file = readFileSync(path);
    for (let at = 0; at < file.length; ) {
      const framed = frameAt(file, at);
      if ('problem' in framed) {
        const isLast = i === segments.length - 1;
        if (!isLast || !framed.isTorn) throw new LedgerError(`${path}, byte ${at}: damaged record: ${framed.problem}`);
        onTorn({ path, offset: at, bytes: file.length - at }, framed.problem);
        return;
      }
      yield decode(framed.body, { path, offset: at, bytes: framed.end - at });
      at = framed.end;
    }
  }
}

/** One record again. Throws LedgerError when it is no longer what it was. */
export function readEntry(place: Place): Entry {
  const file = openSync(place.path, 'r');
  try {
    const bytes = Buffer.alloc(place.bytes);
    const read = readSync(file, bytes, 0, bytes.length, place.offset);
    const framed = frameAt(bytes.subarray(0, read), 0);
    if ('problem' in framed) throw new LedgerError(`${place.path}, byte ${place.offset}: ${framed.problem}`);
    return decode(framed.body, place);
  } finally {
    closeSync(file);
  }
}

/** Cut off what `readLedger` told to be torn. */
export function cutTail({ path, offset }: Place): void {
  truncateSync(path, offset);
}

// ---- Writing ----

/** A file, and whether a run may do without it. */
interface Segment {
  readonly path: string;
  bytes: number;
  readonly open: Set<string>; // groups in it that are not decided
  lastStep: number; // that trained a group of it
}

interface Waiting {
  readonly until: number;
  readonly resolve: () => void;
  readonly reject: (error: Error) => void;
}

export class Ledger {
  readonly #dir: string;
  readonly #onError: (error: Error) => void;
  readonly #segmentBytes: number;
  readonly #segments: Segment[] = []; // the last one is recorded into
  #number: number; // of the next segment
  #isOpen = false; // there is a segment of this process
  #path = ''; // of the file that is written
  #file: FileHandle | null = null;
  #pending: (Buffer[] | string)[] = []; // records, and paths from which on they go into the next file
  #recorded = 0; // of both, ever
  #synced = 0;
  #waiting: Waiting[] = []; // for #synced to come so far
  #isWriting = false;
  #failed: Error | null = null;
  #step = 0;
  #version = 0;
  #meta: LedgerEvent | null = null; // the newest

  /**
   * `before`: the records that are there already, as read. `onError`: the disk does not take it; a run that cannot keep its
   * record must not go on. `segmentBytes`: a segment that is larger than this gets no more records.
   */
  constructor(
    runDir: string,
    onError: (error: Error) => void,
    before: Iterable<Entry> = [],
    segmentBytes = SEGMENT_BYTES,
  ) {
    this.#dir = join(runDir, 'ledger');
    this.#onError = onError;
    this.#segmentBytes = segmentBytes;
    mkdirSync(this.#dir, { recursive: true });
    const files = segmentsOf(runDir);
    const next = () => this.#begin((files[this.#segments.length] as { path: string }).path);
    for (const { event, place } of before) {
      while (this.#segments.at(-1)?.path !== place.path) next();
      this.#count(event, place.bytes);
    }
    while (this.#segments.length < files.length) next(); // a crash may leave one without a whole record
    this.#number = (files.at(-1)?.number ?? 0) + 1;
  }

  /** Does not wait: `commit` does. */
  record(event: LedgerEvent, arrays: LedgerArrays = {}): void {
    if (this.#failed) return;
    if (!this.#isOpen || (this.#segments.at(-1) as Segment).bytes > this.#segmentBytes) this.#nextSegment(event);
    this.#push(event, arrays);
    void this.#pump(); // handles its own errors
  }

  /** Resolves when what was recorded until now is on the disk. Rejects with the path when the disk does not take it. */
  commit(): Promise<void> {
    if (this.#failed) return Promise.reject(this.#failed);
    if (this.#synced === this.#recorded) return Promise.resolve();
    return new Promise((resolve, reject) => this.#waiting.push({ until: this.#recorded, resolve, reject }));
  }

  async close(): Promise<void> {
    try {
      while (this.#failed || this.#synced < this.#recorded) await this.commit();
    } finally {
      await this.#file?.close();
      this.#file = null;
    }
  }

  /** Delete the oldest segments that a checkpoint of `step` makes superfluous, while there are more than `keepBytes`. */
  prune(step: number, keepBytes: number): void {
    let total = this.#segments.reduce((n, segment) => n + segment.bytes, 0);
    while (this.#segments.length > 1 && total > keepBytes) {
      const [oldest] = this.#segments as [Segment];
      if (oldest.open.size > 0 || oldest.lastStep > step) return;
      rmSync(oldest.path, { force: true });
      total -= oldest.bytes;
      this.#segments.shift();
    }
  }

  /** It begins with what is needed of the ones before it, which may be deleted. */
  #nextSegment(first: LedgerEvent): void {
    const number = this.#number++;
    const path = join(this.#dir, `${String(number).padStart(6, '0')}.bin`);
    this.#begin(path);
    this.#isOpen = true;
    this.#pending.push(path);
    this.#recorded++;
    this.#push({ kind: 'segment', schema: SCHEMA, number, step: this.#step, version: this.#version }, {});
    if (this.#meta && first.kind !== 'meta') this.#push(this.#meta, {});
  }

  #push(event: LedgerEvent, arrays: LedgerArrays): void {
    const record = encode(event, arrays);
    this.#count(event, byteCount(record));
    this.#pending.push(record);
    this.#recorded++;
  }

  #begin(path: string): void {
    this.#segments.push({ path, bytes: 0, open: new Set(), lastStep: 0 });
  }

  #count(event: LedgerEvent, bytes: number): void {
    const last = this.#segments.at(-1) as Segment;
    last.bytes += bytes;
    if (event.kind === 'meta') this.#meta = event;
    if (event.kind === 'dispatched') last.open.add(event.groupId);
    // Of a group that was dropped meanwhile nothing is missed.
    if (event.kind === 'finished' && this.#segments.some(({ open }) => open.has(event.groupId)))
      last.open.add(event.groupId);
    if (event.kind === 'dropped') for (const { open } of this.#segments) open.delete(event.groupId);
    if (event.kind === 'step' || event.kind === 'segment') this.#step = event.step;
    if (event.kind === 'refit' || event.kind === 'segment') this.#version = event.version;
    if (event.kind !== 'batch') return;
    last.lastStep = event.step;
    for (const segment of this.#segments) {
      for (const groupId of event.groups) if (segment.open.delete(groupId)) segment.lastStep = event.step;
    }
  }

  /** One write at a time. Ends when nothing is pending, or with the first error. */
  async #pump(): Promise<void> {
    if (this.#isWriting) return;
    this.#isWriting = true;
    try {
      await nextTurn(); // what is recorded in this turn of the event loop goes together
      while (this.#pending.length > 0) {
        const records = this.#pending.splice(0);
        await this.#write(records);
        this.#synced += records.length;
        this.#answer(({ until }) => until <= this.#synced);
      }
    } catch (error) {
      this.#failed = new Error(`Cannot write ${this.#path}: ${(error as Error).message}`);
      this.#pending = [];
      this.#answer(() => true);
      this.#onError(this.#failed);
    }
    this.#isWriting = false;
  }

  #answer(isDue: (waiting: Waiting) => boolean): void {
    const due = this.#waiting.filter(isDue);
    this.#waiting = this.#waiting.filter((waiting) => !isDue(waiting));
    for (const { resolve, reject } of due) this.#failed ? reject(this.#failed) : resolve();
  }

  async #write(records: readonly (Buffer[] | string)[]): Promise<void> {
    let parts: Buffer[] = [];
    for (const record of records) {
      if (typeof record !== 'string') {
        parts.push(...(await sealed(record)));
        continue;
      }
      await this.#append(parts);
      parts = [];
      await this.#open(record);
    }
    await this.#append(parts);
  }

  async #append(parts: readonly Buffer[]): Promise<void> {
    if (parts.length === 0) return;
    const file = this.#file as FileHandle;
    const isSmall = byteCount(parts) <= SLICE_BYTES;
    for (const part of isSmall ? [Buffer.concat(parts)] : parts) await file.appendFile(part);
    await file.datasync();
  }

  async #open(path: string): Promise<void> {
    this.#path = path;
    await this.#file?.close();
    this.#file = await open(path, 'ax');
    const dir = await open(this.#dir, 'r');
    await dir.sync(); // the name itself
    await dir.close();
  }
}

function byteCount(parts: readonly Buffer[]): number {
  return parts.reduce((n, part) => n + part.length, 0);
}

// ---- Entry ----

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  const [runDir, ...kinds] = process.argv.slice(2);
  if (!runDir || !hasLedger(runDir)) {
    console.error(`Usage: npx tsx molt/ledger.ts RUN_DIR [KIND ...]${runDir ? `   (no ledger in ${runDir})` : ''}`);
    process.exit(2);
  }
  process.stdout.on('error', () => process.exit(0)); // whoever reads has seen enough
  for (const { event, arrays } of readLedger(runDir, ({ path, offset }) =>
    console.error(`${path}, byte ${offset}: a torn tail`),
  )) {
    if (kinds.length > 0 && !kinds.includes(event.kind)) continue;
    const lengths = Object.fromEntries(Object.entries(arrays).map(([name, { length }]) => [`${name}.length`, length]));
    console.log(JSON.stringify({ ...event, ...lengths }));
  }
}
