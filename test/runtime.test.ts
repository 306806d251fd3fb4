/** workers/runtime.py over real sockets: test/fixtures/wire_worker.py, whose `encode` does what its text says. */
import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { Bus } from '../molt/bus.ts';
import { Launcher, logTail, nodeCommand, pythonCommand, type Worker } from '../molt/launch.ts';
import type { Json } from '../molt/types.ts';

const fixture = (name: string): string => fileURLToPath(new URL(`fixtures/${name}`, import.meta.url));
const HEARTBEAT_MS = 20;
vi.setConfig({ testTimeout: 30_000 }); // processes start slowly on a busy machine
let dir: string;
let bus: Bus;
let launcher: Launcher;
let printed: string[];

beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'molt-runtime-'));
  printed = [];
  bus = await Bus.listen({ heartbeatMs: HEARTBEAT_MS });
  launcher = new Launcher({
    bus,
    logDir: dir,
    silenceMs: 60_000,
    silenceReadyMs: 60_000,
    print: (text) => printed.push(text),
  });
});
afterEach(async () => {
  launcher.killAllNow();
  await launcher.stopAll();
  await bus.close();
  rmSync(dir, { recursive: true });
});

function start(options: Json = {}): Worker {
  return launcher.start({
    id: 'tokenizer-0',
    kind: 'tokenizer',
    command: pythonCommand(fixture('wire_worker.py')),
    options,
  });
}

async function ready(): Promise<Worker> {
  const worker = start();
  await worker.peer.ready;
  return worker;
}

async function say(worker: Worker, text: string): Promise<string> {
  const { frames } = await worker.peer.request('encode', { texts: [text] });
  return Buffer.from(Uint8Array.from(frames.ids)).toString();
}

/** Until the condition holds; the test's own time limit is the deadline. */
async function until(condition: () => boolean): Promise<void> {
  while (!condition()) await new Promise((resolve) => setTimeout(resolve, 5));
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    // A zombie still takes signals: who does not reap it is not our concern.
    return !/\) Z /.test(readFileSync(`/proc/${pid}/stat`, 'utf8'));
  } catch {
    return false;
  }
}

describe('a Python worker', () => {
  test('says hello, gets its options and incarnation, and is ready', async () => {
    const worker = start({ depth: 3, big: 2 ** 40 });
    expect((await worker.peer.hello).capabilities).toEqual({ max_requests: 1 });
    const info = await worker.peer.ready;
    expect(info).toEqual({ pid: worker.pid, incarnation: 0, options: { depth: 3, big: 2 ** 40 } });
  });

  test('answers requests in order', async () => {
    const worker = await ready();
    const texts = Array.from({ length: 50 }, (_, i) => `text ${i}`);
    const order: string[] = [];
    await Promise.all(texts.map((text) => say(worker, text).then((back) => order.push(back))));
    expect(order).toEqual(texts);
  });

  test('with a loop of its own collects requests and answers them in any order', async () => {
    const worker = start({ in_reverse: 3 });
    await worker.peer.ready;
    const order: string[] = [];
    await Promise.all(['a', 'b', 'c'].map((text) => say(worker, text).then((back) => order.push(back))));
    expect(order).toEqual(['c', 'b', 'a']);
    await launcher.stop(worker);
    expect(await worker.exited).toEqual({ code: 0, signal: null });
  });

  test('answers ping, stats and stacks while its work thread is busy', async () => {
    const worker = await ready();
    const stop = new AbortController();
    const busy = worker.peer.request('encode', { texts: ['spin'] }, {}, { signal: stop.signal });
    busy.catch(() => {});
    let stats: Readonly<Record<string, number>> = {};
    while (stats.spinning !== 1) stats = (await worker.peer.request('stats', {})).fields.stats;
    await worker.peer.request('ping', {});
    const { text } = (await worker.peer.request('stacks', {})).fields;
    expect(text).toContain('Thread MainThread');
    expect(text).toContain('in encode');
    expect(text).toContain('Thread io');
    await until(() => worker.peer.stats.spinning === 1); // heartbeats go on, too
    stop.abort();
    await expect(busy).rejects.toMatchObject({ type: 'cancelled' });
    expect(await say(worker, 'free again')).toBe('free again');
  });

  test('cancels a queued request at once, which its work thread never sees', async () => {
    const worker = await ready();
    const [stopFirst, stopSecond] = [new AbortController(), new AbortController()];
    const first = worker.peer.request('encode', { texts: ['spin'] }, {}, { signal: stopFirst.signal });
    first.catch(() => {});
    const second = worker.peer.request('encode', { texts: ['exit'] }, {}, { signal: stopSecond.signal });
    second.catch(() => {});
    await until(() => worker.peer.stats.spinning === 1);
    stopSecond.abort();
    await worker.peer.request('ping', {}); // behind the cancel
    expect(bus.counters.late_reply).toBe(1); // its reply has come while the first one spins
    stopFirst.abort();
    expect(await say(worker, 'alive')).toBe('alive');
  });

  test('answers a request that waited beyond its deadline without running it', async () => {
    const worker = await ready();
    const stop = new AbortController();
    worker.peer.request('encode', { texts: ['spin'] }, {}, { signal: stop.signal }).catch(() => {});
    await until(() => worker.peer.stats.spinning === 1);
    const late = worker.peer.request('encode', { texts: ['exit'] }, {}, { deadlineMs: 1 });
    await expect(late).rejects.toMatchObject({ type: 'deadline' });
    stop.abort();
    expect(await say(worker, 'alive')).toBe('alive');
  });

  test('turns exceptions of a handler into failed with the traceback, and its own errors into what they say', async () => {
    const worker = await ready();
    const failure = worker.peer.request('encode', { texts: ['raise'] });
    await expect(failure).rejects.toMatchObject({ type: 'failed', message: 'ValueError: a text that raises' });
    await failure.catch((error) => expect(error.traceback).toContain('wire_worker.py'));
    expect(bus.counters.retries).toBe(2); // encode is pure
    const refusal = { type: 'bad_request', field: 'encode.texts[0]', traceback: null };
    await expect(say(worker, 'refuse')).rejects.toMatchObject(refusal);
    await expect(say(worker, 'ill-formed')).rejects.toMatchObject({
      type: 'failed',
      message: expect.stringContaining('ok(encode).errors'),
    });
    expect(await say(worker, 'alive')).toBe('alive');
    expect(logTail(worker, 100)).toContain('ValueError: a text that raises');
  });

  test('does not answer kinds it has no handler for, nor those of other workers', async () => {
    const worker = await ready();
    await expect(
      worker.peer.request('decode', { skip_special: true }, { ids: new Int32Array(), lengths: new Int32Array() }),
    ).rejects.toMatchObject({ type: 'unsupported', field: 'kind' });
    await expect(worker.peer.request('resume', { epoch: 1 })).rejects.toMatchObject({
      type: 'unsupported',
      field: 'kind',
    });
  });

  test('a fatal error is sent, then the process exits 1', async () => {
    const worker = await ready();
    await expect(say(worker, 'fatal')).rejects.toMatchObject({
      type: 'fatal',
      message: 'the state is not to be trusted',
    });
    expect(await worker.exited).toEqual({ code: 1, signal: null });
  });

  test('what escapes the work thread is a fatal reply, a traceback in the log, and exit code 1', async () => {
    const worker = await ready();
    const answer = say(worker, 'escape');
    await expect(answer).rejects.toMatchObject({ type: 'fatal', traceback: expect.stringContaining('in encode') });
    expect(await worker.exited).toEqual({ code: 1, signal: null });
    expect((await worker.peer.lost).message).toContain('exited with code 1: KeyboardInterrupt');
  });

  test('stop finishes what waits, then exits 0', async () => {
    const worker = await ready();
    const texts = Array.from({ length: 20 }, (_, i) => say(worker, `${i}`));
    await launcher.stop(worker);
    expect(await worker.exited).toEqual({ code: 0, signal: null });
    expect(await Promise.all(texts)).toEqual(texts.map((_, i) => `${i}`));
  });

  test('stop ends a worker that never became ready', async () => {
    const worker = start({ never_ready: true });
    await worker.peer.hello;
    await launcher.stop(worker);
    expect(await worker.exited).toEqual({ code: 0, signal: null });
  });

  test('a refused worker prints the reason and exits 3', async () => {
    const worker = start();
    bus.expect('tokenizer-0', 'another secret', {}); // what it has is no longer right
    expect(await worker.exited).toEqual({ code: null, signal: 'SIGKILL' }); // the launcher ends whoever is lost
    const [program, ...args] = pythonCommand(fixture('wire_worker.py')) as [string, ...string[]];
    const argv = [...args, '--endpoint', bus.endpoint, '--worker-id', 'tokenizer-0'];
    const child = spawn(program, argv, { stdio: ['pipe', 'ignore', 'pipe'], detached: true });
    child.stdin.write('{"secret": "wrong"}\n');
    let text = '';
    child.stderr.on('data', (chunk) => {
      text += chunk;
    });
    const code = await new Promise((resolve) => child.on('close', resolve));
    expect([code, text.trim()]).toEqual([3, 'tokenizer-0 refused: Wrong secret for tokenizer-0']);
  });

  test('ends when its link is gone', async () => {
    const worker = await ready();
    const { pid } = worker;
    await bus.close();
    await worker.exited;
    expect(isAlive(pid)).toBe(false);
  });

  test('SIGUSR1 writes all stacks to its log', async () => {
    const worker = await ready();
    process.kill(worker.pid, 'SIGUSR1');
    await until(() => logTail(worker, 1000).includes('Current thread') || logTail(worker, 1000).includes('Thread 0x'));
    expect(await say(worker, 'alive')).toBe('alive');
  });

  test('a round trip is handed over at once', async () => {
    const worker = await ready();
    for (let i = 0; i < 100; i++) await say(worker, 'warm'); // a thread that polled would need a period each time
    const begin = performance.now();
    for (let i = 0; i < 200; i++) await say(worker, 'x');
    expect((performance.now() - begin) / 200).toBeLessThan(50);
  });
});

describe('parent death', () => {
  test.each([
    ['a Python worker', 'wait', pythonCommand(fixture('wire_worker.py'))],
    ['a Node worker', 'wait', nodeCommand(fixture('wire_worker.ts'))],
    ['a Node worker whose event loop is held up', 'block', nodeCommand(fixture('wire_worker.ts'))],
  ])('kill -9 of the parent leaves neither %s nor the program it started', async (_, mode, command) => {
    const [program, ...args] = nodeCommand(fixture('wire_parent.ts')) as [string, ...string[]];
    const parent = spawn(program, [...args, mode, dir, ...command], { stdio: ['ignore', 'pipe', 'inherit'] });
    const line = await new Promise<string>((resolve) => parent.stdout.on('data', (chunk) => resolve(`${chunk}`)));
    const pids = JSON.parse(line) as number[];
    expect(pids.map(isAlive)).toEqual([true, true]);
    parent.kill('SIGKILL');
    await until(() => !pids.some(isAlive));
  });
});
