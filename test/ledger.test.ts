/** The ledger as bytes: what goes in comes out, in order, or the damage is named with its place. */
import { spawn } from 'node:child_process';
import {
  appendFileSync,
  copyFileSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import { readHistory } from '../molt/history.ts';
import {
  cutTail,
  type Entry,
  Ledger,
  type LedgerArrays,
  LedgerError,
  type LedgerEvent,
  type Place,
  readEntry,
  readLedger,
} from '../molt/ledger.ts';

const LIMIT_MS = 60_000;
vi.setConfig({ testTimeout: LIMIT_MS });
let dir: string;
beforeAll(() => {
  dir = mkdtempSync(join(tmpdir(), 'molt-ledger-'));
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

const fail = (error: Error) => {
  throw error;
};
const count = (i: number): LedgerEvent => ({ kind: 'event', name: 'count', detail: { i } });
const segmentFiles = (run: string) => readdirSync(join(run, 'ledger')).sort();
const pathOf = (run: string, number: number) => join(run, 'ledger', `${String(number).padStart(6, '0')}.bin`);

/** Records without `segment`, as they were given. */
function eventsOf(entries: Iterable<Entry>): { event: LedgerEvent; arrays: LedgerArrays }[] {
  const out: { event: LedgerEvent; arrays: LedgerArrays }[] = [];
  for (const { event, arrays } of entries) {
    const { time, ...rest } = event;
    expect(time).toBeGreaterThan(1.6e12);
    if (rest.kind !== 'segment') out.push({ event: rest as LedgerEvent, arrays });
  }
  return out;
}
const numbersOf = (run: string) =>
  eventsOf(readLedger(run)).map(({ event }) => (event.kind === 'event' ? event.detail.i : event.kind));

async function written(name: string, events: readonly LedgerEvent[], segmentBytes?: number): Promise<string> {
  const run = join(dir, name);
  const ledger = new Ledger(run, fail, [], segmentBytes);
  for (const event of events) ledger.record(event);
  await ledger.close();
  return run;
}
const counts = (n: number) => Array.from({ length: n }, (_, i) => count(i));

/** One of each kind, with what is odd about its fields. */
const EVERY_KIND: readonly { event: LedgerEvent; arrays: LedgerArrays }[] = [
  {
    event: {
      kind: 'meta',
      life: 0,
      options: { 'train.seed': 1, a: [1, null, 'x'], b: true },
      dataHash: 'ab',
      resumedAt: 0,
    },
    arrays: {},
  },
  {
    event: {
      kind: 'dispatched',
      groupId: 'g0',
      source: 'prompts/ü.jsonl',
      epoch: 0,
      index: 7,
      hash: '01',
      version: 0,
      attempt: 0,
      members: [0, 1],
      size: 2,
      lanes: [{ epoch: 0, index: 1, given: 1 }],
    },
    arrays: {},
  },
  {
    event: {
      kind: 'finished',
      rolloutId: 'g0-0',
      groupId: 'g0',
      index: 0,
      attempt: 0,
      reason: 'done',
      detail: 'line\n🙂',
      reward: 0.1,
      score: null,
      truncated: false,
      info: { seen: 2 ** 53 - 1 },
      turns: 1,
      dispatchedVersion: 0,
      proofs: [
        {
          turn: 0,
          engine: 'engine-0',
          seed: 2 ** 53 - 111,
          temperature: 0.7,
          plain: true,
          maxTokens: 12,
          prompt: { tokens: 1, crc: 0xffffffff },
          sampled: { tokens: 1, crc: 0x80000000 },
        },
      ],
    },
    arrays: {
      lengths: Int32Array.of(2),
      ids: Int32Array.of(2 ** 31 - 1, -(2 ** 31)),
      loss_mask: Uint8Array.of(0, 255),
      logprobs: Float32Array.of(-0, -1e-45),
      versions: Int32Array.of(-1, 0),
      turns: Int32Array.of(0, 0),
      spans: new Int32Array(),
    },
  },
  {
    event: {
      kind: 'prompt_dropped',
      split: 'heldout',
      source: 's',
      epoch: 1,
      index: 3,
      reason: 'prompt_too_long',
      detail: 300,
    },
    arrays: {},
  },
  { event: { kind: 'dropped', groupId: 'g0', reason: 'stale' }, arrays: {} },
  {
    event: {
      kind: 'batch',
      step: 1,
      version: 0,
      groups: ['g0'],
      rollouts: ['g0-0'],
      sent: [0],
      denominator: 1,
      lr: 1e-6,
      metrics: { loss: null, x: -1.5 },
    },
    arrays: { advantages: Float32Array.of(Number.NaN, Number.NEGATIVE_INFINITY, 1 / 3), counts: Int32Array.of(3) },
  },
  { event: { kind: 'step', step: 1, metrics: { loss: 1e300, flag: 0 } }, arrays: {} },
  {
    event: {
      kind: 'refit',
      version: 1,
      step: 1,
      engine: 'engine-0',
      of: 2,
      checksum: 0xfffffffe,
      bytes: 2 ** 40,
      again: false,
    },
    arrays: {},
  },
  {
    event: {
      kind: 'evaluated',
      rolloutId: 'eval0-1-0',
      attempt: 2,
      reason: 'agent_error',
      detail: null,
      reward: null,
      score: null,
      turns: 0,
      tokens: 0,
    },
    arrays: {},
  },
  { event: { kind: 'eval', step: 1, version: 1, metrics: { eval_reward_mean: 0 } }, arrays: {} },
  { event: { kind: 'checkpoint', step: 1, path: '/x' }, arrays: {} },
  { event: { kind: 'event', name: 'retry', detail: { n: 1, why: 'a' } }, arrays: {} },
];

describe('a record', () => {
  test('of every kind and every array type comes out as it went in, also when read alone', async () => {
    const run = join(dir, 'kinds');
    const ledger = new Ledger(run, fail);
    for (const { event, arrays } of EVERY_KIND) ledger.record(event, arrays);
    await ledger.close();
    const entries = [...readLedger(run)];
    expect(entries[0]?.event).toMatchObject({ kind: 'segment', number: 1, step: 0, version: 0 });
    expect(eventsOf(entries)).toEqual(EVERY_KIND);
    for (const entry of entries) expect(readEntry(entry.place)).toEqual(entry);
    expect(Object.is(entries[3]?.arrays.logprobs?.[0], -0)).toBe(true);
  });

  test('holds arrays that are views into others, and ones of some megabytes', async () => {
    const run = join(dir, 'large');
    const ledger = new Ledger(run, fail);
    const whole = Int32Array.from({ length: 3_000_001 }, (_, i) => i);
    const part = whole.subarray(1, 3_000_000);
    ledger.record(count(0), { part, odd: new Uint8Array(3).fill(7), after: Float32Array.of(0.5) });
    ledger.record(count(1));
    await ledger.close();
    const [first] = eventsOf(readLedger(run));
    expect(first?.arrays.part?.length).toBe(part.length);
    expect(
      Buffer.compare(Buffer.from(first?.arrays.part?.buffer as ArrayBuffer), Buffer.from(part.slice().buffer)),
    ).toBe(0);
    expect(first?.arrays.after).toEqual(Float32Array.of(0.5));
    expect(numbersOf(run)).toEqual([0, 1]);
  });
});

describe('commit', () => {
  test('resolves when what was recorded before it can be read, also while somebody records without a pause', async () => {
    const run = join(dir, 'commit');
    const ledger = new Ledger(run, fail, [], 100_000);
    let [next, isOver] = [0, false];
    const begun = performance.now();
    const busy = (async () => {
      for (; performance.now() - begun < 3000 && !isOver; await new Promise(setImmediate)) ledger.record(count(next++));
      return 'over';
    })();
    for (let round = 0; round < 2; round++) {
      const recorded = next;
      expect(await Promise.race([ledger.commit(), busy]), `round ${round}`).toBeUndefined();
      const found = numbersOf(run);
      expect(found.length).toBeGreaterThanOrEqual(recorded);
      expect(found).toEqual(Array.from(found, (_, i) => i));
    }
    isOver = true;
    await busy;
    await ledger.close();
    expect(numbersOf(run)).toEqual(Array.from({ length: next }, (_, i) => i));
  });

  test('keeps the order of many that run at once', async () => {
    const run = join(dir, 'order');
    const ledger = new Ledger(run, fail);
    const answered: number[] = [];
    await Promise.all(
      Array.from({ length: 300 }, async (_, i) => {
        if (i % 3 === 0) await new Promise(setImmediate);
        ledger.record(count(i));
        await ledger.commit();
        answered.push(i);
      }),
    );
    await ledger.commit(); // nothing new: at once
    await ledger.close();
    const found = numbersOf(run);
    expect(answered).toEqual(found);
    expect([...found].sort((a, b) => Number(a) - Number(b))).toEqual(Array.from({ length: 300 }, (_, i) => i));
  });
});

describe('segments', () => {
  test('end when they are full; each says what was before it and repeats the newest options', async () => {
    const run = join(dir, 'rotate');
    const ledger = new Ledger(run, fail, [], 400);
    const meta: LedgerEvent = { kind: 'meta', life: 0, options: { a: 1 }, dataHash: '', resumedAt: 0 };
    ledger.record(meta);
    for (let step = 1; step <= 6; step++) {
      for (let i = 0; i < 5; i++) ledger.record(count(i));
      ledger.record({
        kind: 'refit',
        version: step,
        step,
        engine: 'engine-0',
        of: 1,
        checksum: 0,
        bytes: 0,
        again: false,
      });
      ledger.record({ kind: 'step', step, metrics: {} });
    }
    await ledger.close();
    const files = segmentFiles(run);
    expect(files.length).toBeGreaterThan(4);
    expect(files).toEqual(files.map((_, i) => `${String(i + 1).padStart(6, '0')}.bin`));
    let [step, version] = [0, 0];
    let path = '';
    const kinds: string[] = [];
    for (const { event, place } of readLedger(run)) {
      if (place.path !== path) {
        expect(event).toMatchObject({ kind: 'segment', step, version });
        path = place.path;
      }
      if (event.kind === 'step') step = event.step;
      if (event.kind === 'refit') version = event.version;
      kinds.push(event.kind);
    }
    expect(kinds.filter((kind, i) => kind === 'meta' && kinds[i - 1] === 'segment')).toHaveLength(files.length);
    expect(eventsOf(readLedger(run)).filter(({ event }) => event.kind === 'event')).toHaveLength(30);
  });

  test('are never appended to by another process: a resumed run begins its own and goes on counting', async () => {
    const run = await written('resumed', [
      { kind: 'refit', version: 3, step: 3, engine: 'engine-0', of: 1, checksum: 0, bytes: 0, again: false },
      { kind: 'step', step: 3, metrics: {} },
    ]);
    const before = readFileSync(pathOf(run, 1));
    const ledger = new Ledger(run, fail, readLedger(run));
    ledger.record(count(0));
    await ledger.close();
    expect(readFileSync(pathOf(run, 1)).equals(before)).toBe(true);
    expect([...readLedger(run)].find(({ place }) => place.path === pathOf(run, 2))?.event).toMatchObject({
      kind: 'segment',
      number: 2,
      step: 3,
      version: 3,
    });
  });
});

describe('retention', () => {
  const dispatched = (groupId: string): LedgerEvent => ({
    kind: 'dispatched',
    groupId,
    source: 's',
    epoch: 0,
    index: 0,
    hash: '',
    version: 0,
    attempt: 0,
    members: [0],
    size: 1,
    lanes: [],
  });
  const batch = (step: number, ...groups: string[]): LedgerEvent => ({
    kind: 'batch',
    step,
    version: step - 1,
    groups,
    rollouts: [],
    sent: [],
    denominator: 0,
    lr: 0,
    metrics: {},
  });
  const step = (n: number): LedgerEvent => ({ kind: 'step', step: n, metrics: {} });
  /** Every record in a segment of its own; returns the first one that is left. */
  async function firstLeft(name: string, events: readonly LedgerEvent[], upTo: number, keepBytes = 0): Promise<number> {
    const run = join(dir, name);
    const ledger = new Ledger(run, fail, [], 1);
    for (const event of events) ledger.record(event);
    await ledger.commit();
    ledger.prune(upTo, keepBytes);
    await ledger.close();
    for (const _ of readLedger(run)); // whole
    return Number.parseInt(segmentFiles(run)[0] ?? '', 10);
  }
  const life = [dispatched('g0'), dispatched('g1'), batch(1, 'g0'), step(1), batch(2, 'g1'), step(2), count(0)];

  test('never deletes a segment with a group that is not decided', async () => {
    expect(await firstLeft('open', life.slice(0, 4), 9)).toBe(2); // g1 is in flight
    expect(
      await firstLeft('dropped', [...life.slice(0, 4), { kind: 'dropped', groupId: 'g1', reason: 'stale' }], 9),
    ).toBe(5);
  });

  test('never deletes what trained a step behind the oldest checkpoint', async () => {
    expect(await firstLeft('step-0', life, 0)).toBe(1);
    expect(await firstLeft('step-1', life, 1)).toBe(2); // g1 belongs to step 2
    expect(await firstLeft('step-2', life, 2)).toBe(7); // the last one is written to
  });

  test('keeps what there is room for', async () => {
    expect(await firstLeft('room', life, 2, 1e9)).toBe(1);
    const run = join(dir, 'room');
    const bytes = segmentFiles(run).map((name) => statSync(join(run, 'ledger', name)).size);
    const three = bytes.slice(-3).reduce((a, b) => a + b, 0);
    expect(await firstLeft('some-room', life, 2, three)).toBe(bytes.length - 2);
  });

  test('knows after a resume which groups are open, and deletes a segment that a crash left empty', async () => {
    const run = await written('empty', life.slice(0, 4), 1);
    writeFileSync(pathOf(run, 5), ''); // cut to nothing
    const ledger = new Ledger(run, fail, readLedger(run), 1);
    for (const event of life.slice(4)) ledger.record(event);
    await ledger.commit();
    ledger.prune(1, 0);
    expect(segmentFiles(run)[0]).toBe('000002.bin');
    ledger.prune(2, 0);
    await ledger.close();
    expect(segmentFiles(run)).toEqual(['000008.bin']);
    const again = new Ledger(run, fail, readLedger(run), 1);
    again.record(count(1));
    await again.close();
    expect([...readLedger(run)].at(-2)?.event).toMatchObject({ kind: 'segment', step: 2 });
  });
});

describe('damage', () => {
  /** A copy whose segment holds these bytes. */
  function copied(name: string, from: string, number: number, bytes: Uint8Array): string {
    const run = join(dir, name);
    rmSync(run, { recursive: true, force: true });
    mkdirSync(join(run, 'ledger'), { recursive: true });
    for (const file of segmentFiles(from)) copyFileSync(join(from, 'ledger', file), join(run, 'ledger', file));
    writeFileSync(pathOf(run, number), bytes);
    return run;
  }

  test('at the end is cut, whatever byte the crash came at', async () => {
    const run = await written('torn', counts(3));
    const bytes = readFileSync(pathOf(run, 1));
    const last = [...readLedger(run)].at(-1)?.place as Place;
    for (let end = last.offset; end <= bytes.length; end++) {
      const copy = copied('torn-copy', run, 1, bytes.subarray(0, end));
      const torn: Place[] = [];
      const found = [...readLedger(copy, (place) => torn.push(place))];
      const isWhole = end === bytes.length;
      expect(found).toHaveLength(isWhole ? 4 : 3);
      const place = { path: pathOf(copy, 1), offset: last.offset, bytes: end - last.offset };
      expect(torn).toEqual(isWhole || end === last.offset ? [] : [place]);
      for (const at of torn) cutTail(at);
      const ledger = new Ledger(copy, fail, readLedger(copy));
      ledger.record(count(9));
      await ledger.close();
      expect(numbersOf(copy)).toEqual([0, 1, ...(isWhole ? [2] : []), 9]);
    }
  });

  test('of blocks that a file system filled with zeros is a torn tail too', async () => {
    const run = await written('zeros', counts(2));
    appendFileSync(pathOf(run, 1), new Uint8Array(4096));
    const torn: string[] = [];
    expect([...readLedger(run, (_, problem) => torn.push(problem))]).toHaveLength(3);
    expect(torn).toHaveLength(1);
  });

  test('anywhere else is an error with the file and the byte, for any byte', async () => {
    const run = await written('flipped', counts(3), 200); // two segments
    const bytes = readFileSync(pathOf(run, 1));
    expect(segmentFiles(run).length).toBeGreaterThan(1);
    const offsets = [...readLedger(run)]
      .filter(({ place }) => place.path === pathOf(run, 1))
      .map(({ place }) => place.offset);
    for (let at = 0; at < bytes.length; at++) {
      const flipped = Uint8Array.from(bytes);
      flipped[at] = (flipped[at] as number) ^ 0x10;
      const copy = copied('flipped-copy', run, 1, flipped);
      const record = offsets.findLast((offset) => offset <= at) as number;
      expect(() => [...readLedger(copy)], `byte ${at}`).toThrow(LedgerError);
      expect(() => [...readLedger(copy)]).toThrow(`${pathOf(copy, 1)}, byte ${record}: damaged record`);
    }
  });

  test('of a record that is read alone is an error with its place', async () => {
    const run = await written('alone', counts(2));
    const { place } = [...readLedger(run)][1] as Entry;
    const bytes = readFileSync(place.path);
    bytes[place.offset + 30] = 255 - (bytes[place.offset + 30] as number);
    writeFileSync(place.path, bytes);
    expect(() => readEntry(place)).toThrow(`${place.path}, byte ${place.offset}: its checksum differs`);
  });

  test('of a segment that is missing in the middle names it; the first ones may be gone', async () => {
    const run = await written('missing', counts(4), 1);
    rmSync(pathOf(run, 1));
    expect(numbersOf(run)).toEqual([1, 2, 3]);
    rmSync(pathOf(run, 3));
    expect(() => numbersOf(run)).toThrow(`${pathOf(run, 4)}: segment 3 is missing before it`);
  });
});

describe('a disk that takes no more', () => {
  /** The writer as a process of its own, with what it printed. */
  async function writer(args: readonly string[], limitBlocks?: number): Promise<string> {
    const node = `${process.execPath} --import tsx test/fixtures/ledger_writer.ts ${args.join(' ')}`;
    const limit = limitBlocks === undefined ? '' : `ulimit -f ${limitBlocks}; `;
    const child = spawn('bash', ['-c', `${limit}exec ${node}`]);
    let out = '';
    child.stdout.on('data', (data: Buffer) => {
      out += data.toString();
    });
    child.stderr.on('data', (data: Buffer) => {
      out += data.toString();
    });
    expect(await new Promise((resolve) => child.on('exit', resolve)), out).toBe(0);
    return out;
  }

  test('is told once, with the path; every commit rejects, and what was committed is there', async () => {
    const run = join(dir, 'full');
    const out = await writer([run, '1000', '1000000'], 64); // files of at most 64 KiB
    const error = `Cannot write ${pathOf(run, 1)}: EFBIG`;
    expect(out.match(/onError \d+/g)).toEqual(['onError 1']);
    expect(out).toContain(`onError 1: ${error}`);
    expect(out).toContain(`rejected: ${error}`);
    expect(out).toContain(`close: ${error}`);
    const committed = Number(
      out
        .match(/committed (\d+)/g)
        ?.at(-1)
        ?.slice(10),
    );
    expect(committed).toBeGreaterThan(50);
    expect(numbersOf(run).slice(0, committed)).toEqual(Array.from({ length: committed }, (_, i) => i + 1));
  });

  test('or has no directory any more: the same', async () => {
    const run = join(dir, 'gone');
    const errors: string[] = [];
    const ledger = new Ledger(run, (error) => errors.push(error.message));
    rmSync(run, { recursive: true });
    ledger.record(count(0));
    const waits = [ledger.commit(), ledger.commit()];
    for (const wait of waits) await expect(wait).rejects.toThrow(`Cannot write ${pathOf(run, 1)}: ENOENT`);
    ledger.record(count(1));
    await expect(ledger.commit()).rejects.toThrow('ENOENT');
    await expect(ledger.close()).rejects.toThrow('ENOENT');
    expect(errors).toHaveLength(1);
  });
});

test('another process reads along: always a prefix, never less than was committed, also when the writer is killed', async () => {
  const run = join(dir, 'tail');
  const child = spawn(process.execPath, ['--import', 'tsx', 'test/fixtures/ledger_writer.ts', run, '100000', '20000']);
  let out = '';
  child.stdout.on('data', (data: Buffer) => {
    out += data.toString();
  });
  const committed = () =>
    Number(
      out
        .match(/committed (\d+)/g)
        ?.at(-1)
        ?.slice(10) ?? 0,
    );
  const exit = new Promise((resolve) => child.on('exit', resolve));
  await expect.poll(committed, { timeout: 30_000 }).toBeGreaterThan(0);
  for (let round = 0; round < 20; round++) {
    const least = committed();
    const found = numbersOf(run);
    expect(found.length).toBeGreaterThanOrEqual(least);
    expect(found).toEqual(Array.from(found, (_, i) => i + 1));
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  child.kill('SIGKILL');
  await exit;
  const found = numbersOf(run);
  expect(found.length).toBeGreaterThanOrEqual(committed());
  expect(found).toEqual(Array.from(found, (_, i) => i + 1));
  expect(segmentFiles(run).length).toBeGreaterThan(1);
  expect(readHistory(readLedger(run), 0).dispatched).toBe(0);
});
