/**
 * The audit against ledgers of real runs: as they are, and with one record changed under right checksums. Every damage is
 * something a bug in the run could have written.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { crc32 } from 'node:zlib';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { audit, type Invariant, Violation } from '../molt/audit.ts';
import { Ledger, type LedgerArray, LedgerError, type LedgerEvent, type Place, readLedger } from '../molt/ledger.ts';

const RECIPE = 'test/fixtures/recipe_simulated.ts';
const LIMIT_MS = 180_000;

type Of<K extends LedgerEvent['kind']> = Extract<LedgerEvent, { readonly kind: K }>;
type Writable<T> = { -readonly [K in keyof T]: T[K] };
/** A record that may be changed. */
interface Row<K extends LedgerEvent['kind'] = LedgerEvent['kind']> {
  event: Writable<Of<K>>;
  arrays: Record<string, LedgerArray>;
}

let dir: string;
beforeAll(async () => {
  dir = mkdtempSync(join(tmpdir(), 'molt-audit-'));
  const labels = ['even', 'three turns', 'tool', 'half throw', 'step throws'];
  const lines = Array.from({ length: 60 }, (_, i) => JSON.stringify({ input: `mixed ${i}`, label: labels[i % 5] }));
  writeFileSync(join(dir, 'mixed.jsonl'), lines.join('\n'));
  const killed = async () => {
    const first = start('killed', ...ASYNC, '--ckpt.save_steps', '2', '--train.num_steps', '8');
    await first.printed('step 3/8');
    first.child.kill('SIGKILL');
    await first.exit;
    cpSync(join(dir, 'killed'), join(dir, 'unfinished'), { recursive: true });
    await done(start('killed', ...ASYNC, '--resume', '--ckpt.save_steps', '2', '--train.num_steps', '8'));
  };
  await Promise.all([
    done(start('sync', '--eval.dataset', 'none', '--train.num_steps', '4')),
    done(start('async', ...ASYNC, '--train.num_steps', '5')),
    killed(),
  ]);
}, LIMIT_MS);
afterAll(() => rmSync(dir, { recursive: true, force: true }));

/** Several turns, failed members tried again, groups dropped, tokens of three versions in one trajectory. */
const ASYNC = [
  ...['--train.max_staleness', '2', '--train.partial_rollout_enable', 'true', '--eval.dataset', 'none'],
  ...['--algo.advantage.is_correction_level', 'token', '--rollout.mismatch_stop', 'off', '--engine.num_engines', '2'],
  ...['--rollout.failed_members', 'refill', '--rollout.max_failure_rate', '1'],
  ...['--simulated.script', JSON.stringify({ latency_ms: { step: 3 } })],
];

interface Started {
  readonly child: ChildProcess;
  readonly exit: Promise<number | null>;
  readonly printed: (text: string) => Promise<void>;
  readonly out: () => string;
}
function start(name: string, ...args: string[]): Started {
  const prompts = name === 'sync' || name === 'pruned' ? [] : ['--data.prompt_dataset', join(dir, 'mixed.jsonl')];
  const child = spawn(
    process.execPath,
    ['--import', 'tsx', 'molt/loop.ts', RECIPE, '--run.dir', join(dir, name), ...prompts, ...args],
    { stdio: ['ignore', 'pipe', 'pipe'] },
  );
  let out = '';
  const look = new Set<() => void>();
  for (const stream of [child.stdout, child.stderr])
    stream.on('data', (data: Buffer) => {
      out += data.toString();
      for (const each of look) each();
    });
  const exit = new Promise<number | null>((resolve) => child.on('exit', resolve));
  const printed = (text: string) =>
    new Promise<void>((resolve, reject) => {
      look.add(() => out.includes(text) && resolve());
      void exit.then(() => reject(new Error(`Ended without printing "${text}":\n${out}`)));
    });
  return { child, exit, printed, out: () => out };
}
async function done(run: Started): Promise<string> {
  expect(await run.exit, run.out()).toBe(0);
  return run.out();
}

function rowsOf(name: string): Row[] {
  return [...readLedger(join(dir, name))].flatMap(({ event: { time: _time, ...event }, arrays }) =>
    event.kind === 'segment' ? [] : [{ event: event as LedgerEvent, arrays: { ...arrays } }],
  );
}
/** A run directory with these records, written as a run writes them. */
async function rewritten(name: string, rows: readonly Row[], segmentBytes?: number, pruneAt?: number): Promise<string> {
  const run = join(dir, 'rewritten', name);
  rmSync(run, { recursive: true, force: true });
  const fail = (error: Error) => {
    throw error;
  };
  const ledger = new Ledger(run, fail, [], segmentBytes);
  for (const { event, arrays } of rows) ledger.record(event, arrays);
  await ledger.commit();
  if (pruneAt !== undefined) ledger.prune(pruneAt, 0);
  await ledger.close();
  return run;
}

const ofKind = <K extends LedgerEvent['kind']>(rows: readonly Row[], kind: K) =>
  rows.filter((row): row is Row<K> => row.event.kind === kind);
const indexOf = (rows: readonly Row[], row: Row) => rows.indexOf(row);
/** The record of a step. */
function at<K extends 'batch' | 'refit' | 'step'>(rows: readonly Row[], kind: K, step: number): Row<K> {
  const row = ofKind(rows, kind).find(({ event }) => (event as { step: number }).step === step);
  if (!row) throw new Error(`No ${kind} of step ${step}`);
  return row;
}
/** Finished rollouts of the batch of a step, its first ones first. */
function trainedIn(rows: readonly Row[], step: number): Row<'finished'>[] {
  const { rollouts } = at(rows, 'batch', step).event;
  return rollouts.map((id) => ofKind(rows, 'finished').find(({ event }) => event.rolloutId === id) as Row<'finished'>);
}
const sampledAt = ({ arrays }: Row, nth = 0) =>
  Array.from(arrays.loss_mask ?? []).flatMap((mask, k) => (mask === 1 ? [k] : []))[nth] as number;
const clone = <R extends Row>(row: R): R => structuredClone(row);
function set(array: LedgerArray | undefined, k: number, value: number): void {
  (array as LedgerArray)[k] = value;
}
/** With proofs that fit what the columns say now: an engine that did it, not a trajectory that lost it. */
function proved({ event, arrays }: Row<'finished'>): void {
  const { ids, logprobs, versions, loss_mask: mask, turns } = arrays as Record<string, Int32Array>;
  event.proofs = event.proofs.map((proof) => {
    const [from, to] = [0, 1].map((end) => {
      const all = Array.from(mask as Int32Array).flatMap((m, k) => (m === 1 && turns?.[k] === proof.turn ? [k] : []));
      return end === 0 ? (all[0] as number) : (all.at(-1) as number) + 1;
    }) as [number, number];
    const bytes = (column?: Int32Array) => {
      const part = (column as Int32Array).subarray(from, to);
      return Buffer.from(part.buffer, part.byteOffset, part.byteLength);
    };
    const crc = crc32(Buffer.concat([bytes(ids), bytes(logprobs), bytes(versions)]));
    return { ...proof, sampled: { tokens: to - from, crc } };
  });
}
/** Spans of 6 numbers: row, sampled, version, turn, from, to. */
const spansOf = ({ arrays }: Row) => arrays.spans as Int32Array;
function setVersions(row: Row<'finished'>, of: (k: number, old: number) => number): void {
  const versions = row.arrays.versions as Int32Array;
  row.arrays.versions = versions.map((old, k) => (old < 0 ? old : of(k, old)));
  const columns = row.arrays as Record<string, Int32Array>;
  const spans: number[] = [];
  let begin = 0;
  for (let k = 1; k <= versions.length; k++) {
    const same = ['loss_mask', 'versions', 'turns'].every((name) => columns[name]?.[k] === columns[name]?.[begin]);
    if (k < versions.length && same) continue;
    const [mask, version, turn] = ['loss_mask', 'versions', 'turns'].map((name) => columns[name]?.[begin] as number);
    spans.push(0, mask as number, version as number, turn as number, begin, k);
    begin = k;
  }
  row.arrays.spans = Int32Array.from(spans);
}

interface Damage {
  readonly of: 'sync' | 'async' | 'killed';
  readonly invariant: Invariant;
  readonly says: RegExp;
  /** Changes the rows in place. Returns the one that the violation must name. */
  readonly change: (rows: Row[]) => Row;
}

const DAMAGES: Record<string, Damage> = {
  // ---- Tokens ----
  'a flipped id of a sampled token': {
    of: 'sync',
    invariant: 1,
    says: /checksum of ids, logprobs and versions of turn 0 in trajectory 0: expected \d+, found \d+/,
    change: (rows) => {
      const row = trainedIn(rows, 2)[0] as Row<'finished'>;
      set(row.arrays.ids, sampledAt(row), (row.arrays.ids?.[sampledAt(row)] as number) ^ 1);
      return row;
    },
  },
  'another id in the prompt': {
    of: 'sync',
    invariant: 1,
    says: /checksum of the ids before turn 0 in trajectory 0, as the engine was asked/,
    change: (rows) => {
      const row = trainedIn(rows, 2)[3] as Row<'finished'>;
      set(row.arrays.ids, 1, 77);
      return row;
    },
  },
  'another id between two turns': {
    of: 'async',
    invariant: 1,
    says: /checksum of the ids before turn [12] in trajectory 0/,
    change: (rows) => {
      const row = ofKind(rows, 'finished').find(
        ({ event }) => event.turns > 1 && event.reward !== null,
      ) as Row<'finished'>;
      const second = (row.arrays.turns as Int32Array).lastIndexOf(1);
      const k = (row.arrays.turns as Int32Array).indexOf(1);
      expect(second).toBeGreaterThan(k);
      set(row.arrays.ids, k, 3 + (row.arrays.ids?.[k] as number));
      return row;
    },
  },
  'a logprob that is missing': {
    of: 'sync',
    invariant: 1,
    says: /logprob of token \d+ of trajectory 0: expected finite and at most 0, found NaN/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[1] as Row<'finished'>;
      set(row.arrays.logprobs, sampledAt(row), Number.NaN);
      return row;
    },
  },
  'a logprob of another token': {
    of: 'sync',
    invariant: 1,
    says: /checksum of ids, logprobs and versions of turn 0/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[1] as Row<'finished'>;
      set(row.arrays.logprobs, sampledAt(row), -0.5);
      return row;
    },
  },
  'a logprob on a context token': {
    of: 'sync',
    invariant: 1,
    says: /logprob of token 2 of trajectory 0, which is context: expected 0, found -1/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[1] as Row<'finished'>;
      set(row.arrays.logprobs, 2, -1);
      return row;
    },
  },
  'a column that is cut short': {
    of: 'sync',
    invariant: 1,
    says: /length of column logprobs: expected \d+, found \d+/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[1] as Row<'finished'>;
      row.arrays.logprobs = (row.arrays.logprobs as Float32Array).subarray(1);
      return row;
    },
  },
  'a loss mask on a context token': {
    of: 'sync',
    invariant: 1,
    says: /lossMask of token 3 in span 0 of trajectory 0: expected 0, found 1/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[2] as Row<'finished'>;
      set(row.arrays.loss_mask, 3, 1);
      return row;
    },
  },
  'a first token that is trained': {
    of: 'sync',
    invariant: 1,
    says: /lossMask of token 0 of trajectory 0, which nothing predicts: expected 0, found 1/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[2] as Row<'finished'>;
      (row.arrays.loss_mask as Uint8Array).fill(1);
      (row.arrays.versions as Int32Array).fill(0);
      row.arrays.spans = Int32Array.of(0, 1, 0, 0, 0, row.arrays.ids?.length as number);
      return row;
    },
  },
  'a turn that became context': {
    of: 'sync',
    invariant: 1,
    says: /trained tokens of turn 0: expected \d+, found 0/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[2] as Row<'finished'>;
      (row.arrays.loss_mask as Uint8Array).fill(0);
      (row.arrays.versions as Int32Array).fill(-1);
      (row.arrays.logprobs as Float32Array).fill(0);
      row.arrays.spans = Int32Array.of(0, 0, -1, 0, 0, row.arrays.ids?.length as number);
      return row;
    },
  },
  'a span that overlaps the one before it': {
    of: 'sync',
    invariant: 1,
    says: /beginning of span 1 of trajectory 0: expected \d+, found \d+/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[2] as Row<'finished'>;
      set(spansOf(row), 10, (spansOf(row)[10] as number) - 1);
      return row;
    },
  },
  'spans that end too early': {
    of: 'sync',
    invariant: 1,
    says: /tokens that the spans of trajectory 0 cover: expected \d+, found \d+/,
    change: (rows) => {
      const row = trainedIn(rows, 1).find((r) => sampledAt(r, 1)) as Row<'finished'>;
      set(spansOf(row), 11, (spansOf(row)[11] as number) - 1);
      return row;
    },
  },
  'a turn without a proof': {
    of: 'async',
    invariant: 1,
    says: /turns of a judged rollout|expected a proof of its sampling, found none/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[0] as Row<'finished'>;
      row.event.proofs = row.event.proofs.slice(1);
      return row;
    },
  },
  'more tokens than were asked for': {
    of: 'sync',
    invariant: 1,
    says: /tokens of turn 0: expected at most 0, found \d+/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[2] as Row<'finished'>;
      row.event.proofs = row.event.proofs.map((proof) => ({ ...proof, maxTokens: 0 }));
      return row;
    },
  },
  'a turn that is trained twice': {
    of: 'sync',
    invariant: 2,
    says: /times that turn 0 in trajectory 1 has loss mask 1 in its rollout: expected 1, found 2/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[2] as Row<'finished'>;
      for (const name of ['lengths', 'ids', 'loss_mask', 'logprobs', 'versions', 'turns']) {
        const array = row.arrays[name] as Int32Array;
        row.arrays[name] = new (array.constructor as typeof Int32Array)([...array, ...array]);
      }
      const again = spansOf(row).map((value, i) => (i % 6 === 0 ? 1 : value));
      row.arrays.spans = Int32Array.from([...spansOf(row), ...again]);
      return row;
    },
  },

  // ---- Versions ----
  'a version that no refit has declared yet': {
    of: 'sync',
    invariant: 3,
    says: /version of token \d+ of trajectory 0: expected at most 1, the newest declared, found 2/,
    change: (rows) => {
      const row = trainedIn(rows, 2)[1] as Row<'finished'>;
      setVersions(row, () => 2);
      proved(row);
      return row;
    },
  },
  'a version from before the dispatch': {
    of: 'sync',
    invariant: 3,
    says: /version of token \d+ of trajectory 0: expected at least 1, of its dispatch, found 0/,
    change: (rows) => {
      const row = trainedIn(rows, 2)[1] as Row<'finished'>;
      setVersions(row, () => 0);
      proved(row);
      return row;
    },
  },
  'the version of now in place of the one that sampled': {
    of: 'async',
    invariant: 1,
    says: /checksum of ids, logprobs and versions of turn 0/,
    change: (rows) => {
      const row = ofKind(rows, 'finished').find(
        (r) => sampledAt(r) && (r.arrays.versions?.[sampledAt(r)] as number) < newestAt(rows, r),
      ) as Row<'finished'>;
      setVersions(row, () => newestAt(rows, row));
      return row;
    },
  },
  'versions that spans and columns tell differently': {
    of: 'sync',
    invariant: 3,
    says: /version of token \d+ in span 1 of trajectory 0: expected 0, found 1/,
    change: (rows) => {
      const row = trainedIn(rows, 2)[1] as Row<'finished'>;
      set(spansOf(row), 8, 0);
      return row;
    },
  },
  'a version on a context token': {
    of: 'sync',
    invariant: 3,
    says: /version of token 0 in span 0 of trajectory 0: expected -1, found 0/,
    change: (rows) => {
      const row = trainedIn(rows, 1)[0] as Row<'finished'>;
      set(row.arrays.versions, 0, 0);
      return row;
    },
  },
  'an older version behind a newer one': {
    of: 'async',
    invariant: 7,
    says: /version of token \d+ of trajectory 0: expected at least \d+, as the token before it, found \d+/,
    change: (rows) => {
      const row = ofKind(rows, 'finished').find(
        (r) => sampledAt(r, 1) && r.event.turns === 1 && groupVersion(rows, r) < newestAt(rows, r),
      ) as Row<'finished'>;
      const first = sampledAt(row);
      setVersions(row, (k) => newestAt(rows, row) - (k === first ? 0 : 1));
      proved(row);
      return row;
    },
  },
  'a rollout across a refit where there are none': {
    of: 'async',
    invariant: 3,
    says: /versions of a rollout without train\.partial_rollout_enable: expected one, found \[\d,\d\]/,
    change: (rows) => {
      options(rows, { 'train.partial_rollout_enable': false });
      return rows.find((r) => r.event.kind === 'finished' && new Set(r.arrays.versions).size > 2) as Row;
    },
  },
  'tokens older than the bound': {
    of: 'async',
    invariant: 3,
    says: /staleness of rollout g\d+-\d.*: expected at most 1, found 2/,
    change: (rows) => {
      options(rows, { 'train.max_staleness': 1 });
      return ofKind(rows, 'batch').find((r) => r.event.metrics.staleness_max === 2) as Row;
    },
  },
  'mixed versions without importance correction': {
    of: 'async',
    invariant: 3,
    says: /importance correction with train\.max_staleness 2: expected on, found off/,
    change: (rows) => options(rows, { 'algo.advantage.is_correction_level': 'off' }),
  },
  'another temperature': {
    of: 'sync',
    invariant: 3,
    says: /temperature of turn 0 in trajectory 0: expected 1, found 0\.7/,
    change: (rows) => {
      const row = trainedIn(rows, 2)[1] as Row<'finished'>;
      row.event.proofs = row.event.proofs.map((proof) => ({ ...proof, temperature: 0.7 }));
      return row;
    },
  },
  'a turn under top_p': {
    of: 'sync',
    invariant: 3,
    says: /was drawn from softmax\(logits \/ temperature\) alone: expected true, found false/,
    change: (rows) => {
      const row = trainedIn(rows, 2)[1] as Row<'finished'>;
      row.event.proofs = row.event.proofs.map((proof) => ({ ...proof, plain: false }));
      return row;
    },
  },
  'a batch under another version': {
    of: 'sync',
    invariant: 3,
    says: /version that is trained: expected 1, found 0/,
    change: (rows) => {
      const row = at(rows, 'batch', 2);
      row.event.version = 0;
      return row;
    },
  },

  // ---- Groups ----
  'a group that is dispatched twice': {
    of: 'sync',
    invariant: 6,
    says: /dispatched g1 \(attempt 0\): dispatches of g1 as attempt 0: expected 1, found 2/,
    change: (rows) => {
      const row = ofKind(rows, 'dispatched')[1] as Row;
      const again = clone(row);
      rows.splice(indexOf(rows, row) + 1, 0, again);
      return again;
    },
  },
  'a group that is dispatched again by the same process': {
    of: 'sync',
    invariant: 6,
    says: /dispatched g1 \(attempt 1\): dispatches of g1 by one process: expected 1, found 2/,
    change: (rows) => {
      const row = ofKind(rows, 'dispatched')[1] as Row<'dispatched'>;
      const again = clone(row);
      again.event.attempt = 1;
      rows.splice(indexOf(rows, row) + 1, 0, again);
      return again;
    },
  },
  'a member that had finished and is dispatched again': {
    of: 'killed',
    invariant: 6,
    says: /members that had not finished: expected [\d ]*, found [\d ]+/,
    change: (rows) => {
      const row = ofKind(rows, 'dispatched').find((r) => r.event.attempt > 0) as Row<'dispatched'>;
      row.event.members = row.event.members.length === 4 ? [0, 1, 2] : [0, 1, 2, 3];
      return row;
    },
  },
  'a group in flight that a resumed run forgot': {
    of: 'killed',
    invariant: 6,
    says: /members [\d ]+ of group g\d+, which were in flight when the run was resumed: expected dispatched again, found forgotten/,
    change: (rows) => {
      const k = rows.findIndex(({ event }) => event.kind === 'dispatched' && event.attempt > 0);
      const row = rows.splice(k, 1)[0] as Row<'dispatched'>;
      return rows.find(
        ({ event }, i) =>
          i >= k &&
          (event.kind === 'finished' ||
            event.kind === 'batch' ||
            (event.kind === 'dispatched' && event.attempt === 0)) &&
          row.event.attempt > 0,
      ) as Row;
    },
  },
  'a group that was never dispatched': {
    of: 'sync',
    invariant: 6,
    says: /finished g2-\d \(attempt 0\): group g2: expected it to be dispatched before, found that it never was|number of the group: expected 2, found 3/,
    change: (rows) => {
      rows.splice(indexOf(rows, ofKind(rows, 'dispatched')[2] as Row), 1);
      return ofKind(rows, 'dispatched')[2] as Row;
    },
  },
  'a prompt that comes twice in an epoch': {
    of: 'sync',
    invariant: 6,
    says: /groups of prompt \d+ of .* in epoch 0: expected 1, found 2/,
    change: (rows) => {
      const [first, , third] = ofKind(rows, 'dispatched') as [Row<'dispatched'>, Row, Row<'dispatched'>];
      third.event.index = first.event.index;
      return third;
    },
  },
  'a group that is dropped and trained': {
    of: 'sync',
    invariant: 6,
    says: /batch of step 2: group g\d+: expected it to be in flight, found it dropped before/,
    change: (rows) => {
      const row = at(rows, 'batch', 2);
      const groupId = row.event.groups[1] as string;
      rows.splice(indexOf(rows, row), 0, { event: { kind: 'dropped', groupId, reason: 'filtered' }, arrays: {} });
      return row;
    },
  },
  'a group that is trained and dropped': {
    of: 'sync',
    invariant: 6,
    says: /dropped g\d+ \(stale\): group g\d+: expected it to be in flight, found it trained in step 2/,
    change: (rows) => {
      const row = at(rows, 'batch', 2);
      const groupId = row.event.groups[1] as string;
      const dropped: Row = { event: { kind: 'dropped', groupId, reason: 'stale' }, arrays: {} };
      rows.splice(indexOf(rows, row) + 1, 0, dropped);
      return dropped;
    },
  },
  'a group in two batches': {
    of: 'sync',
    invariant: 6,
    says: /batch of step 3: group g\d+: expected it to be in flight, found it trained in step 2/,
    change: (rows) => {
      const row = at(rows, 'batch', 3);
      row.event.groups = [at(rows, 'batch', 2).event.groups[0] as string, ...row.event.groups.slice(1)];
      return row;
    },
  },
  'a rollout that finishes after its batch': {
    of: 'sync',
    invariant: 6,
    says: /member \d of group g\d+: expected it to have finished, found no record/,
    change: (rows) => {
      const [row] = trainedIn(rows, 2) as [Row];
      rows.splice(indexOf(rows, row), 1);
      rows.splice(indexOf(rows, at(rows, 'batch', 2)) + 1, 0, row);
      return at(rows, 'batch', 2);
    },
  },
  'a rollout that finishes twice': {
    of: 'sync',
    invariant: 6,
    says: /rollout of g\d+, member 0: expected none, all tries of this member have finished, found g\d+-0/,
    change: (rows) => {
      const [row] = trainedIn(rows, 1) as [Row];
      const again = clone(row);
      rows.splice(indexOf(rows, row) + 1, 0, again);
      return again;
    },
  },
  'a rollout of a trained group that finishes once more': {
    of: 'sync',
    invariant: 6,
    says: /group g\d+: expected it to be in flight, found it trained in step 1/,
    change: (rows) => {
      const again = clone(trainedIn(rows, 1)[0] as Row);
      rows.splice(indexOf(rows, at(rows, 'batch', 1)) + 1, 0, again);
      return again;
    },
  },
  'a try again of a member that had been judged': {
    of: 'async',
    invariant: 6,
    says: /expected none, all tries of this member have finished, found g\d+-\dr1/,
    change: (rows) => {
      const row = ofKind(rows, 'finished').find(
        (r) => r.event.reward !== null && !/r/.test(r.event.rolloutId),
      ) as Row<'finished'>;
      const again = clone(row);
      again.event.rolloutId = `${row.event.rolloutId}r1`;
      rows.splice(indexOf(rows, row) + 1, 0, again);
      return again;
    },
  },
  'a group that is left over when all steps are done': {
    of: 'sync',
    invariant: 6,
    says: /checkpoint of step 4: fate of group g16 when all 4 steps were done: expected trained or dropped, found none/,
    change: (rows) => {
      const row = clone(ofKind(rows, 'dispatched')[15] as Row<'dispatched'>);
      row.event.groupId = 'g16';
      row.event.index = -1;
      row.event.version = 4;
      rows.splice(rows.length - 1, 0, row);
      return rows.at(-1) as Row;
    },
  },

  // ---- Batches ----
  'a batch twice': {
    of: 'sync',
    invariant: 6,
    says: /batch of step 2: step: expected 3, found 2/,
    change: (rows) => {
      const row = at(rows, 'batch', 2);
      const again = clone(row);
      rows.splice(indexOf(rows, row) + 1, 0, again);
      return again;
    },
  },
  'a batch that is missing': {
    of: 'sync',
    invariant: 7,
    says: /refit to version 2 after step 2: step: expected 1, found 2/,
    change: (rows) => {
      rows.splice(indexOf(rows, at(rows, 'batch', 2)), 1);
      return at(rows, 'refit', 2);
    },
  },
  'a step that is skipped': {
    of: 'sync',
    invariant: 6,
    says: /batch of step 4: step: expected 3, found 4/,
    change: (rows) => {
      const row = at(rows, 'batch', 3);
      row.event.step = 4;
      return row;
    },
  },
  'a step record that is missing': {
    of: 'sync',
    invariant: 6,
    says: /batch of step 3: step record before it: expected 2, found 1/,
    change: (rows) => {
      rows.splice(indexOf(rows, at(rows, 'step', 2)), 1);
      return at(rows, 'batch', 3);
    },
  },
  'a step record before its batch': {
    of: 'sync',
    invariant: 6,
    says: /step of step 2: step, after its batch: expected 1, found 2/,
    change: (rows) => {
      const row = at(rows, 'step', 2);
      rows.splice(indexOf(rows, row), 1);
      rows.splice(indexOf(rows, at(rows, 'batch', 2)), 0, row);
      return row;
    },
  },
  'a rollout that is missing from its batch': {
    of: 'sync',
    invariant: 6,
    says: /rollout 5 of its groups, in order: expected g\d+-1, found g\d+-2/,
    change: (rows) => {
      const row = at(rows, 'batch', 2);
      row.event.rollouts = row.event.rollouts.filter((_, i) => i !== 5);
      return row;
    },
  },
  'a rollout of another group': {
    of: 'sync',
    invariant: 6,
    says: /rollout 5 of its groups, in order: expected g\d+-1, found g0-1/,
    change: (rows) => {
      const row = at(rows, 'batch', 2);
      row.event.rollouts = row.event.rollouts.map((id, i) => (i === 5 ? 'g0-1' : id));
      return row;
    },
  },
  'a failed rollout in a batch': {
    of: 'async',
    invariant: 6,
    says: /rollout \d+ of its groups, in order: expected .*, found g\d+-\dr3/,
    change: (rows) => {
      const [failed, row] = ofKind(rows, 'finished').flatMap((r) => {
        const batch = ofKind(rows, 'batch').find(({ event }) => event.groups.includes(r.event.groupId));
        return batch && r.event.rolloutId.endsWith('r3') ? [[r, batch] as const] : [];
      })[0] as [Row<'finished'>, Row<'batch'>];
      const k = row.event.rollouts.findIndex((id) => id.startsWith(`${failed.event.groupId}-`));
      row.event.rollouts = row.event.rollouts.toSpliced(k + 1, 0, failed.event.rolloutId);
      return row;
    },
  },

  // ---- Denominators ----
  'a denominator of one rank': {
    of: 'sync',
    invariant: 10,
    says: /denominator, the tokens with loss mask 1: expected \d+, found \d+\.?5?/,
    change: (rows) => {
      const row = at(rows, 'batch', 2);
      row.event.denominator /= 2;
      return row;
    },
  },
  'a denominator of what was sent alone': {
    of: 'async',
    invariant: 10,
    says: /denominator, the tokens with loss mask 1: expected \d+, found \d+/,
    change: (rows) => {
      const row = ofKind(rows, 'batch').find(
        (r) => r.event.metrics.tokens_credited !== r.event.denominator,
      ) as Row<'batch'>;
      row.event.denominator = row.event.metrics.tokens_credited as number;
      return row;
    },
  },
  'an advantage that is not a number': {
    of: 'sync',
    invariant: 10,
    says: /advantage 3 \(of sample 3\): expected a finite number, found NaN/,
    change: (rows) => {
      const row = at(rows, 'batch', 3);
      set(row.arrays.advantages, 3, Number.NaN);
      return row;
    },
  },
  'an advantage too few': {
    of: 'sync',
    invariant: 10,
    says: /advantage 15 \(of sample 15\): expected a finite number, found none|samples with an advantage/,
    change: (rows) => {
      const row = at(rows, 'batch', 3);
      row.arrays.counts = (row.arrays.counts as Int32Array).subarray(1);
      return row;
    },
  },
  'a sample with credit that was not sent': {
    of: 'sync',
    invariant: 10,
    says: /sample \d+, which has credit, was sent: expected true, found false/,
    change: (rows) => {
      const row = at(rows, 'batch', 3);
      row.event.sent = row.event.sent.slice(1);
      return row;
    },
  },
  'a sample that was sent twice': {
    of: 'sync',
    invariant: 10,
    says: /sent: samples, each once: expected \d+, found \d+/,
    change: (rows) => {
      const row = at(rows, 'batch', 3);
      row.event.sent = [...row.event.sent, row.event.sent[0] as number];
      return row;
    },
  },
  'a sample that is not there': {
    of: 'sync',
    invariant: 10,
    says: /sent: number of a sample: expected 0 to 15, found 16/,
    change: (rows) => {
      const row = at(rows, 'batch', 3);
      row.event.sent = [...row.event.sent, 16];
      return row;
    },
  },

  // ---- Refits ----
  'a refit that is missing': {
    of: 'sync',
    invariant: 7,
    says: /step of step 2: metric policy_version: expected 1, found 2/,
    change: (rows) => {
      rows.splice(indexOf(rows, at(rows, 'refit', 2)), 1);
      return at(rows, 'step', 2);
    },
  },
  'a refit that skips a version': {
    of: 'sync',
    invariant: 7,
    says: /refit to version 3 after step 2: version: expected 2, found 3/,
    change: (rows) => {
      const row = at(rows, 'refit', 2);
      row.event.version = 3;
      return row;
    },
  },
  'two refits for one step': {
    of: 'sync',
    invariant: 7,
    says: /refits after step 2: expected 1, found 2/,
    change: (rows) => {
      const row = at(rows, 'refit', 2);
      const again = clone(row);
      again.event.version = 3;
      rows.splice(indexOf(rows, row) + 1, 0, again);
      return again;
    },
  },
  'a refit that no engine has verified': {
    of: 'sync',
    invariant: 7,
    says: /engine that verified it: expected one, found/,
    change: (rows) => {
      const row = at(rows, 'refit', 2);
      row.event.engine = '';
      return row;
    },
  },
  'a version that is declared again without a new process': {
    of: 'sync',
    invariant: 7,
    says: /declared again, by a process that has taken over: expected true, found false/,
    change: (rows) => {
      const row = clone(at(rows, 'refit', 2));
      row.event.again = true;
      rows.splice(indexOf(rows, at(rows, 'refit', 2)) + 1, 0, row);
      return row;
    },
  },
  'a resumed run whose engines got no weights': {
    of: 'killed',
    invariant: 7,
    says: /expected a refit after the run was resumed/,
    change: (rows) => {
      const second = indexOf(rows, ofKind(rows, 'meta')[1] as Row);
      const k = rows.findIndex((row, i) => i > second && row.event.kind === 'refit');
      rows.splice(k, 1);
      return rows.find((row, i) => i > second && /dispatched|finished|batch/.test(row.event.kind)) as Row;
    },
  },
  'a process whose beginning is missing': {
    of: 'sync',
    invariant: 6,
    says: /expected a meta record before it, found none/,
    change: (rows) => {
      rows.shift();
      return rows.find((row) => row.event.kind === 'dispatched') as Row;
    },
  },
  'metrics that tell another staleness': {
    of: 'async',
    invariant: 3,
    says: /metric staleness_max: expected [12], found 0/,
    change: (rows) => {
      const row = ofKind(rows, 'batch').find((r) => r.event.metrics.staleness_max !== 0) as Row<'batch'>;
      row.event.metrics = { ...row.event.metrics, staleness_max: 0 };
      return row;
    },
  },
  'metrics that tell another version': {
    of: 'sync',
    invariant: 7,
    says: /metric policy_version: expected 2, found 1/,
    change: (rows) => {
      const row = at(rows, 'step', 2);
      row.event.metrics = { ...row.event.metrics, policy_version: 1 };
      return row;
    },
  },
};

function options(rows: readonly Row[], over: Record<string, string | number | boolean>): Row {
  const metas = ofKind(rows, 'meta');
  for (const { event } of metas) event.options = { ...(event.options as object), ...over };
  return metas[0] as Row;
}
/** Newest version that was declared before a record. */
function newestAt(rows: readonly Row[], row: Row): number {
  const before = rows.slice(0, indexOf(rows, row));
  return ofKind(before, 'refit').at(-1)?.event.version ?? 0;
}
function groupVersion(rows: readonly Row[], row: Row<'finished'>): number {
  return ofKind(rows, 'dispatched').find((r) => r.event.groupId === row.event.groupId)?.event.version ?? 0;
}

describe('a run as it was', () => {
  test('passes, and the lines say how much was looked at', () => {
    const { counts, lines } = audit(join(dir, 'sync'));
    expect(counts).toMatchObject({
      dispatched: 16,
      trained: 16,
      dropped: 0,
      rollouts: 64,
      refits: 4,
      batches: 4,
      staleness: 0,
    });
    expect(counts.tokens).toBe(counts.trainedTokens);
    expect(lines.map((line) => line.slice(0, 3))).toEqual(['1 t', '2 t', '3 v', '6 e', '7 o', '10 ']);
    expect(lines[3]).toContain(
      '16 groups dispatched: 16 trained, 0 dropped, 0 in flight at the end; batches up to step 4',
    );
  });

  test('passes with several turns, versions that mix, failed members and dropped groups', () => {
    const { counts } = audit(join(dir, 'async'));
    expect(counts).toMatchObject({ trained: 20, refits: 5, batches: 5 });
    expect(counts.dropped).toBeGreaterThan(0);
    expect(counts.mixed).toBeGreaterThan(0);
    expect(counts.staleness).toBe(2);
    expect(counts.turns).toBeGreaterThan(counts.trajectories);
    const rows = rowsOf('async');
    expect(ofKind(rows, 'finished').some(({ event }) => event.rolloutId.endsWith('r3'))).toBe(true);
    expect(ofKind(rows, 'finished').some(({ arrays }) => new Set(arrays.versions).size > 2)).toBe(true);
  });

  test('passes after a kill, with the groups in flight, and after the resume, which loses none of them', () => {
    const half = audit(join(dir, 'unfinished'));
    expect(half.lines.join('\n')).toMatch(/[1-9]\d* in flight at the end/);
    const { counts, lines } = audit(join(dir, 'killed'));
    expect(counts).toMatchObject({ trained: 32, batches: 8 });
    expect([8, 9]).toContain(counts.again + counts.refits); // it may be killed between training and refit
    expect(counts.dispatched).toBe(counts.trained + counts.dropped);
    expect(lines.join('\n')).toContain(', 0 in flight at the end');
    expect(ofKind(rowsOf('killed'), 'dispatched').some(({ event }) => event.attempt === 1)).toBe(true);
  });

  test.each(['sync', 'async', 'killed'])(
    'passes wherever its segments end, and whatever of them was deleted: %s',
    async (name) => {
      const rows = rowsOf(name);
      const { counts } = audit(join(dir, name));
      expect(audit(await rewritten('whole', rows)).counts).toEqual(counts);
      expect(audit(await rewritten('pieces', rows, 5000)).counts).toEqual(counts);
      for (const bytes of [1, 3000, 20_000])
        for (let step = 1; step <= 4; step += bytes === 1 ? 3 : 1) {
          const { lines, counts: left } = audit(await rewritten('pruned', rows, bytes, step));
          if (lines.length === 6) continue; // too little for a segment to go
          expect(lines.at(-1)).toMatch(/begins with segment \d+; what came before it is taken as given/);
          expect(left.batches).toBeLessThanOrEqual(counts.batches);
        }
    },
    LIMIT_MS,
  );
});

test(
  'a resumed run deletes the segments that its checkpoint covers, goes on, and passes with what came before as given',
  async () => {
    const few = ['--eval.dataset', 'none', '--run.ledger_gb', '0', '--ckpt.save_steps', '1', '--ckpt.max_num', '1'];
    await done(start('pruned', ...few, '--train.num_steps', '2'));
    await done(start('pruned', ...few, '--resume', '--train.num_steps', '4'));
    expect(readdirSync(join(dir, 'pruned', 'ledger'))).toEqual(['000002.bin']);
    expect(audit(join(dir, 'pruned')).lines.at(-1)).toContain('begins with segment 2');
    await done(start('pruned', ...few, '--resume', '--train.num_steps', '5'));
    const { counts } = audit(join(dir, 'pruned'));
    expect(counts).toMatchObject({ trained: 4, batches: 1 });
    expect(ofKind(rowsOf('pruned'), 'dispatched').map(({ event }) => event.groupId)).toEqual([
      'g16',
      'g17',
      'g18',
      'g19',
    ]);
  },
  LIMIT_MS,
);

describe('a damage is found and named with its record:', () => {
  test.each(Object.entries(DAMAGES))('%s', async (_, { of, invariant, says, change }) => {
    const rows = rowsOf(of);
    const named = change(rows);
    const run = await rewritten('damaged', rows);
    let found: unknown;
    try {
      audit(run);
    } catch (error) {
      found = error;
    }
    expect(found).toBeInstanceOf(Violation);
    const { message, entry, invariant: broken } = found as Violation;
    expect(message).toMatch(says);
    expect(message).toContain(`${join(run, 'ledger', '000001.bin')}, byte ${entry.place.offset}, ${entry.event.kind}`);
    expect(broken).toBe(invariant);
    const place = [...readLedger(run)].filter(({ event }) => event.kind !== 'segment')[rows.indexOf(named)]?.place;
    expect(entry.place).toEqual(place);
  });

  test('there are enough of them', () => expect(Object.keys(DAMAGES).length).toBeGreaterThan(40));
});

describe('bytes', () => {
  const copyOf = (name: string, bytes: Uint8Array) => {
    const run = join(dir, 'bytes', name);
    rmSync(run, { recursive: true, force: true });
    mkdirSync(join(run, 'ledger'), { recursive: true });
    writeFileSync(join(run, 'ledger', '000001.bin'), bytes);
    return run;
  };
  const original = () => readFileSync(join(dir, 'async', 'ledger', '000001.bin'));

  test(
    'that are flipped in the middle are an error with file and byte, no matter which',
    () => {
      const bytes = original();
      const last = [...readLedger(join(dir, 'async'))].at(-1)?.place.offset as number;
      for (let at = 3; at < last; at += Math.ceil(last / 50)) {
        const flipped = Uint8Array.from(bytes);
        flipped[at] = (flipped[at] as number) ^ 4;
        const run = copyOf('flipped', flipped);
        expect(() => audit(run)).toThrow(LedgerError);
        expect(() => audit(run)).toThrow(/000001\.bin, byte \d+: damaged record/);
      }
    },
    LIMIT_MS,
  );

  test(
    'that are torn off the last record, at any of them, are told and no violation',
    () => {
      const bytes = original();
      const last = [...readLedger(join(dir, 'async'))].at(-1)?.place;
      if (!last) throw new Error('The ledger is empty');
      for (let end = last.offset + 1; end < bytes.length; end++) {
        const { lines } = audit(copyOf('torn', bytes.subarray(0, end)));
        expect(lines.at(-1)).toContain(
          `ends with a torn record: ${end - last.offset} bytes from byte ${last.offset} on`,
        );
      }
    },
    LIMIT_MS,
  );

  test(
    'that are torn off are survived by --resume, wherever the run was',
    async () => {
      const path = join(dir, 'unfinished', 'ledger', '000001.bin');
      const bytes = readFileSync(path);
      const entries = [...readLedger(join(dir, 'unfinished'), () => {})];
      // What a checkpoint covers is on the disk before it; a crash may cut whatever came later.
      const covered = entries.findLastIndex(({ event }) => event.kind === 'checkpoint');
      const later = entries.slice(covered + 1).map(({ place }) => place);
      expect(later.length).toBeGreaterThan(10);
      const ends = [0.3, 0.6, 1].map((share, i) => {
        const { offset, bytes: length } = later[Math.floor(share * (later.length - 1))] as Place;
        return offset + ([1, Math.floor(length / 2), length - 1][i] as number);
      });
      for (const [i, end] of ends.entries()) {
        cpSync(join(dir, 'unfinished'), join(dir, `cut-${i}`), { recursive: true });
        writeFileSync(join(dir, `cut-${i}`, 'ledger', '000001.bin'), bytes.subarray(0, end));
      }
      for (const i of ends.keys()) {
        const out = await done(
          start(`cut-${i}`, ...ASYNC, '--resume', '--ckpt.save_steps', '2', '--train.num_steps', '5'),
        );
        expect(out).toContain('with a torn record');
        const { counts, lines } = audit(join(dir, `cut-${i}`));
        expect(counts.batches).toBe(5);
        expect(lines.join('\n')).not.toContain('torn');
        expect(readdirSync(join(dir, `cut-${i}`, 'ledger'))).toEqual(['000001.bin', '000002.bin']);
      }
    },
    LIMIT_MS,
  );
});

describe('the command', () => {
  const command = async (...args: string[]): Promise<{ code: number | null; out: string; err: string }> => {
    const child = spawn(process.execPath, ['--import', 'tsx', 'molt/audit.ts', ...args]);
    const text = { out: '', err: '' };
    child.stdout.on('data', (data: Buffer) => {
      text.out += data.toString();
    });
    child.stderr.on('data', (data: Buffer) => {
      text.err += data.toString();
    });
    const code = await new Promise<number | null>((resolve) => child.on('close', resolve));
    return { code, ...text };
  };

  test(
    'exits 0 with a line for each invariant, 1 with the first violation, 2 on bad usage',
    async () => {
      const good = await command(join(dir, 'sync'));
      expect([good.code, good.err]).toEqual([0, '']);
      expect(good.out.trim().split('\n')).toHaveLength(6);
      const rows = rowsOf('sync');
      at(rows, 'batch', 2).event.denominator = 1;
      const bad = await command(await rewritten('bad', rows));
      expect([bad.code, bad.out]).toEqual([1, '']);
      expect(bad.err).toMatch(
        /^Invariant 10 \(global denominators\) is broken: .*000001\.bin, byte \d+, batch of step 2: /,
      );
      for (const args of [[], [join(dir, 'nowhere')], [join(dir, 'sync'), 'more']]) {
        const usage = await command(...args);
        expect(usage.code).toBe(2);
        expect(usage.err).toContain('Usage: npx tsx molt/audit.ts RUN_DIR');
      }
    },
    LIMIT_MS,
  );
});
