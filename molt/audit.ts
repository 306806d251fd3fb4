/**
 * Proves from the ledger alone what a run must have kept:  npx tsx molt/audit.ts RUN_DIR
 *
 *   records, in order -> one fold -> a line for each invariant (exit 0), or the first record that breaks one (exit 1)
 *
 *   | invariant (DESIGN.md, 3) | proved by                                                                              |
 *   |--------------------------|----------------------------------------------------------------------------------------|
 *   | 1  token identity        | CRC32 of what engines were asked and gave, against the ids of the trajectories          |
 *   | 2  trained once          | a turn has loss mask 1 in one trajectory of its rollout                                 |
 *   | 3  version semantics     | versions of tokens against declared ones, staleness, temperature, importance correction |
 *   | 6  exactly once          | groups: dispatched -> finished -> trained or dropped; batches without gap or repetition |
 *   | 7  one clock             | refits: one for each batch, each of the next version, verified by an engine              |
 *   | 10 global denominators   | the count of lossMask over the batch, and that what has credit was sent                  |
 *
 * It shares the reader of ledger.ts with the run and nothing else: what history.ts and buffer.ts conclude is concluded
 * here a second time, from the records. Kept in memory: groups in flight, 4 bytes for each decided one, and the prompts of
 * one epoch. Of a ledger whose first segments were deleted (run.ledger_gb), what came before is taken as given. A torn tail
 * is told and no violation. It does not prove what no record holds: that an engine computed right, that a reward is just.
 */
import { realpathSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { crc32 } from 'node:zlib';
import { type Entry, hasLedger, LedgerError, type LedgerEvent, readLedger, SCHEMA } from './ledger.ts';
import { type Json, type Proof, SCORED_REASONS } from './types.ts';

const INVARIANTS = {
  1: 'token identity',
  2: 'trained once',
  3: 'version semantics',
  6: 'exactly once',
  7: 'one clock',
  10: 'global denominators',
} as const;
export type Invariant = keyof typeof INVARIANTS;

type Of<K extends LedgerEvent['kind']> = Extract<LedgerEvent, { readonly kind: K }>;

/** What a record says against what it must say. */
export class Violation extends Error {
  readonly invariant: Invariant;
  readonly entry: Entry;
  constructor(invariant: Invariant, entry: Entry, what: string) {
    const { path, offset } = entry.place;
    super(
      `Invariant ${invariant} (${INVARIANTS[invariant]}) is broken: ${path}, byte ${offset}, ${nameOf(entry)}: ${what}`,
    );
    this.invariant = invariant;
    this.entry = entry;
  }
}

function nameOf({ event }: Entry): string {
  switch (event.kind) {
    case 'finished':
    case 'evaluated':
      return `${event.kind} ${event.rolloutId} (attempt ${event.attempt})`;
    case 'dispatched':
      return `dispatched ${event.groupId} (attempt ${event.attempt})`;
    case 'dropped':
      return `dropped ${event.groupId} (${event.reason})`;
    case 'refit':
      return `refit to version ${event.version} after step ${event.step}`;
    case 'batch':
    case 'step':
    case 'eval':
    case 'checkpoint':
      return `${event.kind} of step ${event.step}`;
    case 'segment':
      return `segment ${event.number}`;
    case 'meta':
      return `meta of life ${event.life}`;
    default:
      return event.kind;
  }
}

/** Throws Violation. `expected` and `found` are only looked at when it does. */
function mustBe(entry: Entry, invariant: Invariant, what: string, found: unknown, expected: unknown): void {
  if (found === expected) return;
  throw new Violation(invariant, entry, `${what}: expected ${show(expected)}, found ${show(found)}`);
}

function show(value: unknown): string {
  return typeof value === 'string' || typeof value === 'number' || value === undefined
    ? String(value)
    : JSON.stringify(value);
}

// ---- One rollout: invariants 1, 2 and 3 ----

/** What is remembered of a finished rollout until its group is decided. */
interface Member {
  readonly rolloutId: string;
  readonly isJudged: boolean;
  readonly isCancelled: boolean;
  readonly masks: readonly number[]; // tokens with loss mask 1, by trajectory
  readonly oldest: number; // versions that sampled them
  readonly newest: number;
}

/** What a rollout may say of versions and of the distribution. */
interface Bounds {
  readonly from: number; // versions that may have sampled it
  readonly to: number;
  readonly temperature: Json;
  readonly isPartial: boolean; // trajectories may cross a refit
}

interface Columns {
  readonly lengths: Int32Array;
  readonly ids: Int32Array;
  readonly mask: Uint8Array;
  readonly logprobs: Float32Array;
  readonly versions: Int32Array;
  readonly turns: Int32Array;
  readonly spans: Int32Array;
}

/** Sampled tokens of one turn: [from, to) of a trajectory. */
interface Sampled {
  readonly turn: number;
  readonly from: number;
  to: number;
}

function checkRollout(entry: Entry, event: Of<'finished'>, bounds: Bounds): Member {
  const columns = columnsOf(entry);
  const proofs = proofsByTurn(entry, event.proofs);
  const trained = new Set<number>(); // turns
  const masks: number[] = [];
  let [oldest, newest] = [Number.POSITIVE_INFINITY, -1];
  let at = 0;
  for (const [row, length] of columns.lengths.entries()) {
    const part = slice(columns, row, at, length);
    at += length;
    const sampled = checkSpans(entry, row, part);
    checkTokens(entry, row, part, bounds);
    checkProofs(entry, row, part, { sampled, proofs, trained, temperature: bounds.temperature });
    let count = 0;
    for (const { from, to } of sampled) {
      count += to - from;
      oldest = Math.min(oldest, part.versions[from] as number); // they never fall, says checkTokens
      newest = Math.max(newest, part.versions[to - 1] as number);
    }
    masks.push(count);
  }
  const isJudged = event.reward !== null && masks.length > 0 && SCORED_REASONS.has(event.reason);
  if (isJudged) {
    if (!Number.isFinite(event.reward)) mustBe(entry, 1, 'reward', event.reward, 'a finite number');
    mustBe(entry, 1, 'turns of a judged rollout', event.turns, event.proofs.length);
    for (const proof of event.proofs) {
      const isLost = proof.sampled.tokens > 0 && proof.plain && !trained.has(proof.turn);
      if (isLost) mustBe(entry, 1, `trained tokens of turn ${proof.turn}`, 0, proof.sampled.tokens);
    }
  }
  if (!bounds.isPartial && oldest < newest)
    mustBe(entry, 3, 'versions of a rollout without train.partial_rollout_enable', [oldest, newest], 'one');
  return { rolloutId: event.rolloutId, isJudged, isCancelled: event.reason === 'cancelled', masks, oldest, newest };
}

function columnsOf(entry: Entry): Columns {
  const { lengths, ids, loss_mask: mask, logprobs, versions, turns, spans } = entry.arrays;
  const all = { lengths, ids, mask, logprobs, versions, turns, spans };
  for (const [name, array] of Object.entries(all)) {
    const type = name === 'mask' ? Uint8Array : name === 'logprobs' ? Float32Array : Int32Array;
    mustBe(entry, 1, `column ${name}`, array?.constructor.name ?? 'none', type.name);
  }
  const columns = all as unknown as Columns; // as the loop above has proved
  const total = columns.lengths.reduce((a, b) => a + b, 0);
  for (const name of ['ids', 'mask', 'logprobs', 'versions', 'turns'] as const)
    mustBe(entry, 1, `length of column ${name}`, columns[name].length, total);
  mustBe(entry, 1, 'numbers in spans, modulo 6', columns.spans.length % 6, 0);
  for (let i = 0; i < columns.spans.length; i += 6) {
    const row = columns.spans[i] as number;
    if (!(row in columns.lengths))
      mustBe(entry, 1, `trajectory of span ${i / 6}`, row, `0 to ${columns.lengths.length - 1}`);
  }
  return columns;
}

/** One trajectory. Its spans are those of its row. */
function slice(all: Columns, row: number, at: number, length: number): Columns {
  return {
    lengths: Int32Array.of(length),
    ids: all.ids.subarray(at, at + length),
    mask: all.mask.subarray(at, at + length),
    logprobs: all.logprobs.subarray(at, at + length),
    versions: all.versions.subarray(at, at + length),
    turns: all.turns.subarray(at, at + length),
    spans: all.spans.filter((_, i) => all.spans[i - (i % 6)] === row),
  };
}

function proofsByTurn(entry: Entry, proofs: readonly Proof[]): Map<number, Proof> {
  const byTurn = new Map<number, Proof>();
  for (const proof of proofs) {
    if (byTurn.has(proof.turn)) mustBe(entry, 1, `proofs of turn ${proof.turn}`, 2, 1);
    if (proof.sampled.tokens > proof.maxTokens)
      mustBe(entry, 1, `tokens of turn ${proof.turn}`, proof.sampled.tokens, `at most ${proof.maxTokens}`);
    byTurn.set(proof.turn, proof);
  }
  return byTurn;
}

/** Spans tile the columns and agree with them. Returns the runs of sampled tokens, one for each turn. */
function checkSpans(entry: Entry, row: number, part: Columns): Sampled[] {
  const { mask, versions, turns, spans } = part;
  const sampled: Sampled[] = [];
  let end = 0;
  for (let i = 0; i < spans.length; i += 6) {
    const [, policy, version, turn, from, to] = spans.subarray(i, i + 6) as unknown as number[] & { length: 6 };
    const name = `span ${i / 6} of trajectory ${row}`;
    mustBe(entry, 1, `beginning of ${name}`, from, end);
    if (!((to as number) > end)) mustBe(entry, 1, `end of ${name}`, to, `more than ${end}`);
    if (policy !== 1) mustBe(entry, 3, `version of ${name}, which is context`, version, -1);
    for (let k = end; k < (to as number); k++) {
      if (mask[k] !== policy) mustBe(entry, 1, `lossMask of token ${k} in ${name}`, mask[k], policy);
      if (turns[k] !== turn) mustBe(entry, 1, `turn of token ${k} in ${name}`, turns[k], turn);
      if (versions[k] !== version) mustBe(entry, 3, `version of token ${k} in ${name}`, versions[k], version);
    }
    const last = sampled.at(-1);
    if (policy === 1 && last?.turn === turn && last?.to === end) last.to = to as number;
    else if (policy === 1) sampled.push({ turn: turn as number, from: end, to: to as number });
    end = to as number;
  }
  mustBe(entry, 1, `tokens that the spans of trajectory ${row} cover`, end, mask.length);
  return sampled;
}

function checkTokens(entry: Entry, row: number, { mask, logprobs, versions }: Columns, bounds: Bounds): void {
  let before = bounds.from;
  for (let k = 0; k < mask.length; k++) {
    const [logprob, version] = [logprobs[k] as number, versions[k] as number];
    const name = `of token ${k} of trajectory ${row}`;
    if (mask[k] === 0) {
      if (logprob !== 0) mustBe(entry, 1, `logprob ${name}, which is context`, logprob, 0);
      if (version !== -1) mustBe(entry, 3, `version ${name}, which is context`, version, -1);
      continue;
    }
    if (k === 0) mustBe(entry, 1, `lossMask ${name}, which nothing predicts`, 1, 0);
    if (!(Number.isFinite(logprob) && logprob <= 0))
      mustBe(entry, 1, `logprob ${name}`, logprob, 'finite and at most 0');
    if (version > bounds.to) mustBe(entry, 3, `version ${name}`, version, `at most ${bounds.to}, the newest declared`);
    if (version < bounds.from) mustBe(entry, 3, `version ${name}`, version, `at least ${bounds.from}, of its dispatch`);
    if (version < before) mustBe(entry, 7, `version ${name}`, version, `at least ${before}, as the token before it`);
    before = version;
  }
}

/** The tokens of each turn are what an engine gave, and those before them what it was asked with. */
function checkProofs(
  entry: Entry,
  row: number,
  { ids, logprobs, versions }: Columns,
  args: { sampled: readonly Sampled[]; proofs: Map<number, Proof>; trained: Set<number>; temperature: Json },
): void {
  let [before, at] = [0, 0]; // CRC32 of ids[0, at)
  for (const { turn, from, to } of args.sampled) {
    const name = `turn ${turn} in trajectory ${row}`;
    if (args.trained.has(turn)) mustBe(entry, 2, `times that ${name} has loss mask 1 in its rollout`, 2, 1);
    args.trained.add(turn);
    const proof = args.proofs.get(turn);
    if (!proof) throw new Violation(1, entry, `${name}: expected a proof of its sampling, found none`);
    mustBe(entry, 1, `tokens before ${name}, as the engine was asked`, from, proof.prompt.tokens);
    before = crc32(bytesOf(ids.subarray(at, from)), before);
    at = from;
    mustBe(entry, 1, `checksum of the ids before ${name}, as the engine was asked`, before, proof.prompt.crc);
    mustBe(entry, 1, `tokens of ${name}, as the engine gave them`, to - from, proof.sampled.tokens);
    const sum = [ids, logprobs, versions].reduce((crc, column) => crc32(bytesOf(column.subarray(from, to)), crc), 0);
    mustBe(entry, 1, `checksum of ids, logprobs and versions of ${name}`, sum, proof.sampled.crc);
    mustBe(entry, 3, `temperature of ${name}`, proof.temperature, args.temperature);
    mustBe(entry, 3, `${name} was drawn from softmax(logits / temperature) alone`, proof.plain, true);
  }
}

function bytesOf({ buffer, byteOffset, byteLength }: Int32Array | Float32Array): Uint8Array {
  return new Uint8Array(buffer, byteOffset, byteLength);
}

// ---- The run: invariants 3, 6, 7 and 10 ----

interface Group {
  dispatched: Of<'dispatched'>; // the newest time
  life: number; // of the process that dispatched it
  readonly firstLife: number; // of the one that did so first
  readonly ended: Map<number, Member>; // by index: the last one that finished
  readonly running: Map<number, string>; // by index: id of the rollout that may finish next
}

export class Audit {
  readonly counts = {
    rollouts: 0,
    trajectories: 0,
    turns: 0,
    tokens: 0, // sampled
    trainedTokens: 0,
    trainedRollouts: 0,
    samples: 0,
    dispatched: 0,
    trained: 0,
    dropped: 0,
    refits: 0,
    again: 0,
    batches: 0,
    partly: 0, // batches with groups from before the ledger
    mixed: 0, // batches with tokens of older versions
    staleness: 0, // largest
  };
  readonly #open = new Map<string, Group>();
  #fate = new Int32Array(1024); // by number of the group: step that trained it, -1 = dropped, 0 = not decided
  readonly #prompts = new Map<string, { epoch: number; seen: Set<number> }>(); // by source
  #last: Entry | null = null;
  #first = 0; // segment
  #segment = 0;
  #life = -1;
  #options: Readonly<Record<string, Json>> = {}; // of the newest meta record
  #firstGroup: number | null = null; // number of the first one that was dispatched here
  #nextGroup = 0;
  #version = 0; // newest declared
  #batch = 0; // step of the newest batch
  #refitted = 0; // step of the newest refit
  #step = 0; // newest step record
  #mayRefitAgain = false; // a process has taken over
  #mustRefitAgain = false; // and its engines have not got the weights
  #mustTakeUp = false; // nor has it begun anything: groups in flight come first

  get #isPruned(): boolean {
    return this.#first > 1;
  }

  /** The next record. Throws Violation. */
  add(entry: Entry): void {
    try {
      this.#add(entry);
    } catch (error) {
      if (error instanceof Violation) throw error;
      throw new Violation(6, entry, `it is not what such a record holds: ${(error as Error).message}`);
    }
    this.#last = entry;
  }

  #add(entry: Entry): void {
    const { event } = entry;
    if (entry.place.path !== this.#last?.place.path)
      mustBe(entry, 6, 'first record of a segment', event.kind, 'segment');
    switch (event.kind) {
      case 'segment':
        return this.#onSegment(entry, event);
      case 'meta':
        return this.#onMeta(entry, event);
      case 'dispatched':
        return this.#onDispatched(entry, event);
      case 'finished':
        return this.#onFinished(entry, event);
      case 'dropped':
        if (this.#groupOf(entry, event.groupId)) this.counts.dropped++;
        return this.#decide(event.groupId, -1);
      case 'batch':
        return this.#onBatch(entry, event);
      case 'refit':
        return this.#onRefit(entry, event);
      case 'step':
        return this.#onStep(entry, event);
      case 'eval':
        return mustBe(entry, 7, 'version that was evaluated', event.version, this.#version);
      case 'checkpoint':
        return mustBe(entry, 6, 'step of a checkpoint', event.step, this.#step);
      default: // prompt_dropped, evaluated, event: nothing follows from them
    }
  }

  /** After the last record. Throws Violation where a run that has ended left groups undecided. */
  end(): void {
    const steps = this.#options['train.num_steps'];
    if (!this.#last || typeof steps !== 'number' || this.#step < steps) return;
    for (const [groupId, { firstLife }] of this.#open) {
      if (firstLife < this.#life) continue; // what an earlier process left may be more than the steps that were left could train
      const what = `fate of group ${groupId} when all ${steps} steps were done`;
      mustBe(this.#last, 6, what, 'none', 'trained or dropped');
    }
  }

  /** One for each invariant. */
  lines(): string[] {
    const n = this.counts;
    const bound = this.#options['train.max_staleness'];
    const correction = this.#options['algo.advantage.is_correction_level'];
    const text: Record<Invariant, string> = {
      1: `${n.tokens} sampled tokens of ${n.rollouts} rollouts (${n.trajectories} trajectories) are what engines gave in ${n.turns} turns, and what stands before them is what they were asked`,
      2: `each of these tokens has loss mask 1 in one trajectory of its rollout`,
      3: `${n.trainedTokens} tokens were trained at most ${n.staleness} refits after they were sampled, allowed are ${show(bound)}; importance correction ${show(correction)}, ${n.mixed} batches have tokens of older versions`,
      6: `${n.dispatched} groups dispatched${this.#isPruned ? ' or taken as given' : ''}: ${n.trained} trained, ${n.dropped} dropped, ${this.#open.size} in flight at the end; batches up to step ${this.#batch}, none twice or left out`,
      7: `${n.refits} refits, one for each step, to version ${this.#version}${n.again > 0 ? `; ${n.again} declared again after a resume` : ''}`,
      10: `${n.batches} batches of ${n.trainedRollouts} rollouts (${n.samples} samples): the denominators are their ${n.trainedTokens} tokens with loss mask 1, and every sample with credit was sent${n.partly > 0 ? `; ${n.partly} batches have groups from before the ledger, and were checked in part` : ''}`,
    };
    const names = Object.entries(INVARIANTS) as unknown as [Invariant, string][];
    const lines = names.map(([number, name]) => `${`${number} ${name}`.padEnd(22)} ok: ${text[number]}`);
    if (this.#isPruned)
      lines.push(`The ledger begins with segment ${this.#first}; what came before it is taken as given`);
    return lines;
  }

  #onSegment(entry: Entry, event: Of<'segment'>): void {
    mustBe(entry, 6, 'schema', event.schema, SCHEMA);
    mustBe(
      entry,
      6,
      'number, as of its file',
      event.number,
      Number.parseInt(entry.place.path.split('/').at(-1) ?? '', 10),
    );
    if (this.#last === null) {
      this.#first = event.number;
      if (this.#isPruned)
        [this.#step, this.#batch, this.#refitted, this.#version] = [event.step, event.step, event.step, event.version];
    } else if (event.number <= this.#segment) mustBe(entry, 6, 'number', event.number, `more than ${this.#segment}`);
    this.#segment = event.number;
    mustBe(entry, 6, 'step', event.step, this.#step);
    mustBe(entry, 7, 'version', event.version, this.#version);
  }

  /** Of a process that begins; or the same one again, at the head of a segment. */
  #onMeta(entry: Entry, event: Of<'meta'>): void {
    const isRepeated = event.life === this.#life;
    if (!isRepeated && !(this.#isPruned && this.#life < 0)) mustBe(entry, 6, 'life', event.life, this.#life + 1);
    const options = event.options as Readonly<Record<string, Json>>;
    const staleness = options['train.max_staleness'];
    const isOff = options['algo.advantage.is_correction_level'] === 'off';
    if (isOff && (staleness !== 0 || options['train.partial_rollout_enable'] === true))
      mustBe(entry, 3, `importance correction with train.max_staleness ${show(staleness)}`, 'off', 'on');
    if (!isRepeated) this.#mustTakeUp = true;
    if (!isRepeated && this.#batch > 0) {
      this.#mayRefitAgain = true;
      this.#mustRefitAgain = this.#life >= 0; // else it may be the same process, whose first records are gone
    }
    this.#life = event.life;
    this.#options = options;
  }

  // ---- Groups ----

  #onDispatched(entry: Entry, event: Of<'dispatched'>): void {
    this.#mustHaveBegun(entry);
    const { groupId, attempt, members, size, version } = event;
    const all = Array.from({ length: size }, (_, index) => index);
    const isSynchronous = this.#options['train.max_staleness'] === 0;
    const newest = this.#version + (isSynchronous && attempt === 0 ? 1 : 0); // its turns may be held until the refit
    if (!(version >= 0 && version <= newest)) mustBe(entry, 3, 'version', version, `0 to ${newest}`);
    if (attempt > 0) return this.#onDispatchedAgain(entry, event);
    this.#mustHaveTakenUp(entry);
    const number = numberOf(entry, groupId);
    if (this.#open.has(groupId)) mustBe(entry, 6, `dispatches of ${groupId} as attempt 0`, 2, 1);
    if (this.#firstGroup === null) this.#firstGroup = this.#nextGroup = this.#isPruned ? number : 0;
    mustBe(entry, 6, 'number of the group', number, this.#nextGroup);
    this.#nextGroup = number + 1;
    if (version < this.#version) mustBe(entry, 3, 'version of a new group', version, this.#version);
    mustBe(entry, 6, 'size of the group', size, this.#options['rollout.n_samples_per_prompt']);
    mustBe(entry, 6, 'members', members.join(' '), all.join(' '));
    this.#onPrompt(entry, event);
    this.counts.dispatched++;
    const running = new Map(all.map((index) => [index, `${groupId}-${index}`]));
    this.#open.set(groupId, { dispatched: event, life: this.#life, firstLife: this.#life, ended: new Map(), running });
  }

  /** Every prompt of a source once in an epoch; epochs follow each other. */
  #onPrompt(entry: Entry, { source, epoch, index }: Of<'dispatched'>): void {
    let of = this.#prompts.get(source);
    if (!of || epoch > of.epoch) {
      of = { epoch, seen: new Set() };
      this.#prompts.set(source, of);
    }
    if (epoch < of.epoch) mustBe(entry, 6, `epoch of ${source}`, epoch, `at least ${of.epoch}`);
    if (of.seen.has(index)) mustBe(entry, 6, `groups of prompt ${index} of ${source} in epoch ${epoch}`, 2, 1);
    of.seen.add(index);
  }

  /** What had not finished when a process ended, by the next one. */
  #onDispatchedAgain(entry: Entry, event: Of<'dispatched'>): void {
    const { groupId, attempt, members } = event;
    const group = this.#groupOf(entry, groupId);
    if (!group) return; // its first dispatch is from before the ledger
    const before = group.dispatched;
    if (group.life === this.#life) mustBe(entry, 6, `dispatches of ${groupId} by one process`, 2, 1);
    mustBe(entry, 6, 'attempt', attempt, before.attempt + 1);
    for (const key of ['source', 'epoch', 'index', 'hash', 'size'] as const)
      mustBe(entry, 6, key, event[key], before[key]);
    mustBe(entry, 6, 'members that had not finished', members.join(' '), missingOf(group).join(' '));
    const oldest = Math.min(this.#version, ...[...group.ended.values()].map((member) => member.oldest));
    if (event.version > oldest) mustBe(entry, 3, 'version', event.version, `at most ${oldest}, of its oldest token`);
    const running = new Map(members.map((index) => [index, `${groupId}-${index}`]));
    this.#open.set(groupId, { ...group, dispatched: event, life: this.#life, running });
  }

  /** A process goes on with everything that was in flight before it begins anything. */
  #mustHaveTakenUp(entry: Entry): void {
    if (!this.#mustTakeUp) return;
    this.#mustTakeUp = false;
    for (const [groupId, group] of this.#open) {
      const missing = missingOf(group);
      if (group.life === this.#life || missing.length === 0) continue;
      const what = `members ${missing.join(' ')} of group ${groupId}, which were in flight when the run was resumed`;
      mustBe(entry, 6, what, 'forgotten', 'dispatched again');
    }
  }

  #onFinished(entry: Entry, event: Of<'finished'>): void {
    this.#mustHaveBegun(entry);
    this.#mustHaveTakenUp(entry);
    const { groupId, rolloutId, index } = event;
    const number = numberOf(entry, groupId);
    const isDropped = this.#fate[number] === -1; // it was cancelled, or ended with it
    const group = isDropped ? null : this.#groupOf(entry, groupId);
    if (group) {
      const refill = this.#options['rollout.failed_members'] === 'refill' ? refillOf(group, index) : null;
      const expected = group.running.get(index) ?? refill ?? 'none, all tries of this member have finished';
      mustBe(entry, 6, `rollout of ${groupId}, member ${index}`, rolloutId, expected);
      group.running.delete(index);
    } else if (rolloutId.replace(/r\d+$/, '') !== `${groupId}-${index}`)
      mustBe(entry, 6, `rollout of ${groupId}, member ${index}`, rolloutId, `${groupId}-${index}`);
    if (!(event.dispatchedVersion >= 0 && event.dispatchedVersion <= this.#version))
      mustBe(entry, 3, 'version at its dispatch', event.dispatchedVersion, `0 to ${this.#version}`);
    const member = checkRollout(entry, event, {
      from: Math.max(event.dispatchedVersion, group?.dispatched.version ?? 0),
      to: this.#version,
      temperature: this.#options['rollout.temperature'] ?? null,
      isPartial: this.#options['train.partial_rollout_enable'] === true,
    });
    this.counts.rollouts++;
    this.counts.trajectories += member.masks.length;
    this.counts.turns += event.proofs.length;
    this.counts.tokens += sumOf(member.masks);
    group?.ended.set(index, member);
  }

  /** An undecided group; null where it is from before the ledger. Throws Violation for any other. */
  #groupOf(entry: Entry, groupId: string): Group | null {
    const number = numberOf(entry, groupId);
    const group = this.#open.get(groupId);
    if (group) return group;
    const fate = this.#fate[number] ?? 0;
    if (fate !== 0) {
      const was = fate < 0 ? 'dropped before' : `trained in step ${fate}`;
      throw new Violation(6, entry, `group ${groupId}: expected it to be in flight, found it ${was}`);
    }
    if (this.#isPruned && number < (this.#firstGroup ?? Number.POSITIVE_INFINITY)) return null;
    throw new Violation(6, entry, `group ${groupId}: expected it to be dispatched before, found that it never was`);
  }

  #decide(groupId: string, fate: number): void {
    const number = Number(groupId.slice(1));
    if (number >= this.#fate.length) {
      const larger = new Int32Array(2 * (number + 1));
      larger.set(this.#fate);
      this.#fate = larger;
    }
    this.#fate[number] = fate;
    this.#open.delete(groupId);
  }

  // ---- Steps ----

  #onBatch(entry: Entry, event: Of<'batch'>): void {
    this.#mustHaveBegun(entry);
    this.#mustHaveTakenUp(entry);
    const { step, version, groups, rollouts } = event;
    mustBe(entry, 6, 'step', step, this.#batch + 1);
    mustBe(entry, 7, 'step of the refit before it', this.#refitted, this.#batch);
    mustBe(entry, 6, 'step record before it', this.#step, this.#batch);
    mustBe(entry, 3, 'version that is trained', version, this.#version);
    const size = this.#options['train.batch_size'] as number;
    if (!(groups.length >= 1 && groups.length <= size)) mustBe(entry, 6, 'groups', groups.length, `1 to ${size}`);
    const members: Member[] = [];
    let given = 0;
    for (const groupId of groups) {
      const group = this.#groupOf(entry, groupId);
      this.#decide(groupId, step);
      if (group) members.push(...judgedOf(entry, groupId, group));
      else given++;
    }
    this.#batch = step;
    this.#mayRefitAgain = false;
    this.counts.batches++;
    this.counts.trained += groups.length;
    if (given > 0) {
      this.counts.partly++;
      this.counts.dispatched += given;
      const here = new Set(rollouts);
      for (const { rolloutId } of members) mustBe(entry, 6, `rollout ${rolloutId} in it`, here.has(rolloutId), true);
    } else {
      const most = Math.max(members.length, rollouts.length);
      for (let i = 0; i < most; i++)
        mustBe(entry, 6, `rollout ${i} of its groups, in order`, rollouts[i], members[i]?.rolloutId);
      this.#checkCredit(entry, event, members);
    }
    const staleness = this.#checkVersions(entry, version, members);
    const told = event.metrics.staleness_max;
    if (given === 0 && told !== undefined) mustBe(entry, 3, 'metric staleness_max', told, staleness);
    this.counts.trainedRollouts += rollouts.length;
  }

  /** Returns the largest staleness. */
  #checkVersions(entry: Entry, version: number, members: readonly Member[]): number {
    const bound = this.#options['train.max_staleness'] as number;
    let largest = 0;
    for (const { rolloutId, oldest } of members) {
      const staleness = version - oldest;
      if (staleness > bound) mustBe(entry, 3, `staleness of rollout ${rolloutId}`, staleness, `at most ${bound}`);
      largest = Math.max(largest, staleness);
    }
    this.counts.staleness = Math.max(this.counts.staleness, largest);
    if (largest === 0) return 0;
    this.counts.mixed++;
    if (this.#options['algo.advantage.is_correction_level'] === 'off')
      mustBe(entry, 3, 'importance correction of a batch with tokens of older versions', 'off', 'on');
    return largest;
  }

  #checkCredit(entry: Entry, event: Of<'batch'>, members: readonly Member[]): void {
    const { denominator, sent } = event;
    const masks = members.flatMap((member) => member.masks);
    const total = sumOf(masks);
    mustBe(entry, 10, 'denominator, the tokens with loss mask 1', denominator, total);
    mustBe(entry, 10, 'metric tokens_trained', event.metrics.tokens_trained, total);
    const { advantages = new Float32Array(), counts = new Int32Array() } = entry.arrays;
    mustBe(entry, 10, 'samples with an advantage', counts.length, masks.length);
    const isSent = new Set(sent);
    mustBe(entry, 10, 'sent: samples, each once', isSent.size, sent.length);
    for (const i of sent)
      if (!(i in masks)) mustBe(entry, 10, 'sent: number of a sample', i, `0 to ${masks.length - 1}`);
    if (sent.length === 0) mustBe(entry, 10, 'samples that were sent', 0, 'at least one');
    let at = 0;
    for (const [i, count] of counts.entries()) {
      if (count !== 1 && count !== masks[i]) mustBe(entry, 10, `advantages of sample ${i}`, count, `1 or ${masks[i]}`);
      let hasCredit = false;
      for (const end = at + count; at < end; at++) {
        const value = advantages[at] as number;
        if (!Number.isFinite(value)) mustBe(entry, 10, `advantage ${at} (of sample ${i})`, value, 'a finite number');
        hasCredit ||= value !== 0;
      }
      if (hasCredit) mustBe(entry, 10, `sample ${i}, which has credit, was sent`, isSent.has(i), true);
    }
    mustBe(entry, 10, 'advantages', advantages.length, at);
    this.counts.samples += masks.length;
    this.counts.trainedTokens += total;
  }

  #onRefit(entry: Entry, event: Of<'refit'>): void {
    const { version, step, engine, again } = event;
    if (!engine) mustBe(entry, 7, 'engine that verified it', engine, 'one');
    this.#mayBeGiven(step);
    mustBe(entry, 7, 'step', step, this.#batch);
    if (again) mustBe(entry, 7, 'declared again, by a process that has taken over', this.#mayRefitAgain, true);
    mustBe(entry, 7, 'version', version, again ? this.#version : this.#version + 1);
    if (!this.#mayRefitAgain && this.#refitted === step) mustBe(entry, 7, `refits after step ${step}`, 2, 1);
    this.counts[again ? 'again' : 'refits']++;
    this.#version = version;
    this.#refitted = step;
    this.#mayRefitAgain = this.#mustRefitAgain = false;
  }

  #onStep(entry: Entry, { step, metrics }: Of<'step'>): void {
    this.#mayBeGiven(step);
    if (this.#isPruned && this.counts.refits + this.counts.again === 0) this.#refitted = this.#batch;
    mustBe(entry, 6, 'step, after its batch', step, this.#batch);
    mustBe(entry, 6, 'step record before it', this.#step, step - 1);
    const version = metrics.policy_version;
    if (version !== undefined) mustBe(entry, 7, 'metric policy_version', version, this.#version);
    this.#step = step;
  }

  /** The batch that was in training where a pruned ledger begins. */
  #mayBeGiven(step: number): void {
    if (this.#isPruned && this.counts.batches === 0 && step === this.#batch + 1) this.#batch = step;
  }

  #mustHaveBegun(entry: Entry): void {
    if (this.#life < 0) throw new Violation(6, entry, 'expected a meta record before it, found none');
    if (this.#mustRefitAgain)
      throw new Violation(
        7,
        entry,
        'expected a refit after the run was resumed, since engines begin with other weights, found none',
      );
  }
}

function numberOf(entry: Entry, groupId: string): number {
  if (!/^g\d+$/.test(groupId)) mustBe(entry, 6, 'id of a group', groupId, 'g and a number');
  return Number(groupId.slice(1));
}

/** Members that have not finished, or were cancelled, which is the same to a process that goes on. */
function missingOf({ dispatched, ended }: Group): number[] {
  const all = Array.from({ length: dispatched.size }, (_, index) => index);
  return all.filter((index) => ended.get(index)?.isCancelled ?? true);
}

/** The rollout that may come after the last one of a member, where nobody judged that. */
function refillOf({ dispatched, ended }: Group, index: number): string | null {
  const last = ended.get(index);
  if (!last || last.isJudged) return null;
  return `${dispatched.groupId}-${index}r${Number(/r(\d+)$/.exec(last.rolloutId)?.[1] ?? 0) + 1}`;
}

/** Members of a group that is trained, in order. */
function judgedOf(entry: Entry, groupId: string, { dispatched, ended }: Group): Member[] {
  const members: Member[] = [];
  for (let index = 0; index < dispatched.size; index++) {
    const member = ended.get(index);
    if (!member)
      throw new Violation(
        6,
        entry,
        `member ${index} of group ${groupId}: expected it to have finished, found no record`,
      );
    if (member.isJudged) members.push(member);
  }
  return members;
}

function sumOf(values: readonly number[]): number {
  return values.reduce((a, b) => a + b, 0);
}

// ---- Entry ----

/** Throws Violation, or LedgerError where the bytes are damaged. */
export function audit(runDir: string): { readonly counts: Audit['counts']; readonly lines: readonly string[] } {
  const fold = new Audit();
  const torn: string[] = [];
  for (const entry of readLedger(runDir, ({ path, offset, bytes }, problem) =>
    torn.push(`${path} ends with a torn record: ${bytes} bytes from byte ${offset} on (${problem})`),
  ))
    fold.add(entry);
  fold.end();
  return { counts: fold.counts, lines: [...fold.lines(), ...torn] };
}

function main([runDir, ...more]: readonly string[]): number {
  if (!runDir || more.length > 0 || !hasLedger(runDir)) {
    console.error(`Usage: npx tsx molt/audit.ts RUN_DIR${runDir ? `   (no ledger in ${runDir})` : ''}`);
    return 2;
  }
  try {
    for (const line of audit(runDir).lines) console.log(line);
    return 0;
  } catch (error) {
    if (!(error instanceof Violation || error instanceof LedgerError)) throw error;
    console.error(error.message);
    return 1;
  }
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url))
  process.exitCode = main(process.argv.slice(2));
