import { execFileSync } from 'node:child_process';
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { describe, expect, test } from 'vitest';
import { pythonCommand } from '../molt/launch.ts';
import {
  decode,
  ERROR_TYPES,
  encode,
  type FrameArray,
  type Kind,
  MAX_MESSAGE_BYTES,
  MESSAGES,
  type Outgoing,
  PROTOCOL_VERSION,
  ProtocolError,
} from '../molt/protocol.ts';
import { frameParts, goldenMessages, type Malformed, plain, unframeParts, WIRE_DIR } from './fixtures/make_wire.ts';

const goldens = goldenMessages();
const readWire = (file: string): Buffer[] => unframeParts(readFileSync(join(WIRE_DIR, file)));
const malformed = JSON.parse(readFileSync(join(WIRE_DIR, 'malformed.json'), 'utf8')) as Malformed[];

function runPython(what: 'table' | 'reencode'): Record<string, unknown> {
  const [python, ...args] = pythonCommand(fileURLToPath(new URL('fixtures/wire_python.py', import.meta.url)));
  return JSON.parse(execFileSync(python as string, [...args, what], { encoding: 'utf8', maxBuffer: 2 ** 26 }));
}

/** A decoded message as something that can be encoded again. */
function outgoing(parts: readonly Uint8Array[], answers: Kind | null): Outgoing {
  const { kind, seq, id, re, deadlineMs, fields, frames } = decode(parts, () => answers);
  return {
    kind,
    seq,
    fields,
    frames,
    ...(id !== null && { id }),
    ...(re !== null && { re }),
    ...(deadlineMs !== null && { deadlineMs }),
  };
}

function errorOf(run: () => unknown): ProtocolError {
  try {
    run();
  } catch (error) {
    expect(error).toBeInstanceOf(ProtocolError);
    return error as ProtocolError;
  }
  throw new Error('It was accepted');
}

describe('golden messages', () => {
  test('there is one per kind, one per reply, one error, and nothing else', () => {
    const files = readdirSync(WIRE_DIR).filter((file) => file.endsWith('.bin'));
    expect(files.sort()).toEqual(goldens.map((golden) => golden.file).sort());
    for (const [kind, entry] of Object.entries(MESSAGES)) {
      expect(files).toContain(`${kind}.bin`);
      if ('reply' in entry) expect(files).toContain(`ok.${kind}.bin`);
    }
  });

  test.each(goldens)('$file is what encode makes, and decodes to bytes that are the same again', (golden) => {
    const bytes = readFileSync(join(WIRE_DIR, golden.file));
    expect(frameParts(encode(golden.message, golden.answers)).equals(bytes)).toBe(true);
    expect(frameParts(encode(outgoing(unframeParts(bytes), golden.answers), golden.answers)).equals(bytes)).toBe(true);
  });

  test('golden.json says what the files say', () => {
    const expected = JSON.parse(JSON.stringify(goldens.map(plain)));
    expect(JSON.parse(readFileSync(join(WIRE_DIR, 'golden.json'), 'utf8'))).toEqual(expected);
  });

  test('what Python makes of them decodes to the same messages', () => {
    const python = runPython('reencode') as Record<string, string>;
    for (const golden of goldens) {
      const parts = unframeParts(Buffer.from(python[golden.file] as string, 'hex'));
      const message = outgoing(parts, golden.answers);
      expect(plain({ ...golden, message })).toEqual(plain(golden));
    }
  });
});

describe('malformed messages', () => {
  test('every file is listed', () => {
    expect(readdirSync(join(WIRE_DIR, 'malformed')).sort()).toEqual(malformed.map(({ file }) => file).sort());
  });

  test.each(malformed.filter((entry) => entry.refused))('$file is refused and $field is named', (entry) => {
    const error = errorOf(() => decode(readWire(`malformed/${entry.file}`), () => entry.answers));
    expect(error.field).toBe(entry.field);
    expect(error.message.length).toBeGreaterThan(10);
  });

  test.each(malformed.filter((entry) => !entry.refused))('$file is accepted', (entry) => {
    expect(decode(readWire(`malformed/${entry.file}`)).kind).toBeTruthy();
  });

  test('a message of another version names both versions', () => {
    const error = errorOf(() => decode(readWire('malformed/other-version.bin')));
    expect(error.message).toBe('Protocol version 3, this side speaks 2');
  });
});

describe('the twins', () => {
  const table = runPython('table');
  const head = readFileSync(fileURLToPath(new URL('../molt/protocol.ts', import.meta.url)), 'utf8');

  test('protocol.py and protocol.ts have the same table', () => {
    expect(table.messages).toEqual(JSON.parse(JSON.stringify(MESSAGES)));
    expect(Object.keys(table.messages as object)).toEqual(Object.keys(MESSAGES));
  });

  test('versions, limits and error types are the same', () => {
    expect(table).toMatchObject({
      version: PROTOCOL_VERSION,
      max_message_bytes: MAX_MESSAGE_BYTES,
      error_types: ERROR_TYPES,
    });
  });

  test('their opening paragraphs and printed tables are the same', () => {
    const comment = head.slice(head.indexOf('/**') + 3, head.indexOf(' */')).replace(/^ \* ?/gm, '');
    const twin = (table.doc as string).replace('molt/protocol.ts', 'workers/protocol.py');
    expect(twin.trim()).toBe(comment.trim());
  });

  test('the printed table lists every kind of the table, in order', () => {
    const printed = [...head.matchAll(/^ \* {3}(\w+) +[CWETKR,]+ -> [CWETKR]/gm)].map((match) => match[1]);
    expect(printed).toEqual(Object.keys(MESSAGES));
  });
});

describe('encode', () => {
  const beat = (stats: Record<string, unknown>) => ({
    kind: 'heartbeat' as const,
    seq: 0,
    fields: { received: 0, stats },
  });

  test('refuses what the table does not allow, at the sender', () => {
    expect(errorOf(() => encode(beat({ loss: Number.NaN }))).field).toBe('heartbeat.stats.loss');
    expect(errorOf(() => encode(beat({ loss: undefined }))).field).toBe('heartbeat.stats.loss');
    expect(errorOf(() => encode({ kind: 'ready', seq: 0, fields: { info: { at: new Date(0) } } })).field).toBe(
      'ready.info.at',
    );
    expect(errorOf(() => encode({ kind: 'ready', seq: 0, fields: { info: undefined } })).field).toBe('ready.info');
    const score = (frames: Record<string, FrameArray>) => encode({ kind: 'score', seq: 0, id: 1, fields: {}, frames });
    expect(errorOf(() => score({ ids: Int32Array.of(1) })).field).toBe('lengths');
    expect(errorOf(() => score({ ids: Float32Array.of(1), lengths: Int32Array.of(1) })).field).toBe('ids');
  });

  test('refuses a message over 64 MiB', () => {
    const frames = { ids: new Int32Array(MAX_MESSAGE_BYTES / 4), lengths: Int32Array.of(1) };
    expect(errorOf(() => encode({ kind: 'score', seq: 0, id: 1, fields: {}, frames })).message).toContain('at most');
  });

  test('keeps NaN and infinity inside frames', () => {
    const logprobs = Float32Array.of(Number.NaN, Number.NEGATIVE_INFINITY);
    const parts = encode({ kind: 'ok', seq: 0, re: 1, fields: {}, frames: { logprobs } }, 'logprobs');
    expect(decode(parts, () => 'logprobs').frames.logprobs).toEqual(logprobs);
  });

  test('decodes frames at odd offsets', () => {
    const parts = encode({
      kind: 'score',
      seq: 0,
      id: 1,
      fields: {},
      frames: { ids: Int32Array.of(7), lengths: Int32Array.of(1) },
    });
    const shifted = parts.map((part) => Buffer.concat([Buffer.alloc(1), part]).subarray(1));
    expect(decode(shifted).frames.ids).toEqual(Int32Array.of(7));
  });
});
