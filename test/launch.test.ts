import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest';
import { Bus, type Peer } from '../molt/bus.ts';
import { Launcher, type LauncherArgs, logTail, nodeCommand, pythonCommand, type WorkerSpec } from '../molt/launch.ts';

const WORKER = nodeCommand(fileURLToPath(new URL('fixtures/wire_worker.ts', import.meta.url)));
const FOR_EVER_MS = 600_000;
vi.setConfig({ testTimeout: 30_000 }); // processes start slowly on a busy machine
let dir: string;
let bus: Bus;
let printed: string[];
const launchers: Launcher[] = [];

beforeEach(async () => {
  dir = mkdtempSync(join(tmpdir(), 'molt-launch-'));
  printed = [];
  bus = await Bus.listen({ heartbeatMs: 50 });
});
afterEach(async () => {
  for (const launcher of launchers.splice(0)) {
    launcher.killAllNow();
    await launcher.stopAll();
  }
  await bus.close();
  rmSync(dir, { recursive: true });
});

function newLauncher(args: Partial<LauncherArgs> = {}): Launcher {
  const launcher = new Launcher({
    bus,
    logDir: join(dir, 'logs'),
    silenceMs: FOR_EVER_MS,
    silenceReadyMs: FOR_EVER_MS,
    print: (text) => printed.push(text),
    ...args,
  });
  launchers.push(launcher);
  return launcher;
}

function spec(id: string, command: readonly string[] = WORKER): WorkerSpec {
  return { id, kind: 'tokenizer', command, options: {} };
}

/** A program in JavaScript that is no worker. */
function program(source: string): string[] {
  return [process.execPath, '-e', source, '--'];
}

async function say(peer: Peer, text: string): Promise<string> {
  const { frames } = await peer.request('encode', { texts: [text] });
  return Buffer.from(Uint8Array.from(frames.ids)).toString();
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return !/\) Z /.test(readFileSync(`/proc/${pid}/stat`, 'utf8')); // a zombie still takes signals
  } catch {
    return false;
  }
}

async function until(condition: () => boolean): Promise<void> {
  while (!condition()) await new Promise((resolve) => setTimeout(resolve, 5));
}

async function isFree(endpoint: string): Promise<boolean> {
  const port = Number(endpoint.split(':').pop());
  const server = createServer();
  return new Promise((resolve) => {
    server.once('error', () => resolve(false));
    server.listen({ port, host: '127.0.0.1', exclusive: true }, () => server.close(() => resolve(true)));
  });
}

describe('exit', () => {
  test('is a lost peer at once, with the code and the last line of the log', async () => {
    const worker = newLauncher().start(spec('engine-0', program('console.error("why\\nthe cause"); process.exit(7)')));
    expect(await worker.exited).toEqual({ code: 7, signal: null });
    expect((await worker.peer.lost).message).toBe('engine-0: the process exited with code 7: the cause');
    await expect(worker.peer.ready).rejects.toThrow('the cause');
    expect(logTail(worker, 10)).toBe('why\nthe cause');
  });

  test('by a signal names the signal', async () => {
    const worker = newLauncher().start(
      spec('engine-0', program('process.kill(process.pid, "SIGTERM"); setTimeout(() => {}, 1e6)')),
    );
    expect((await worker.peer.lost).message).toBe('engine-0: the process was ended by SIGTERM');
  });

  test('of a program that does not exist is a lost peer, not an exception', async () => {
    const worker = newLauncher().start(spec('engine-0', [join(dir, 'no-such-program')]));
    expect((await worker.peer.lost).message).toContain('could not be started');
    expect([worker.pid, await worker.exited]).toEqual([-1, { code: null, signal: null }]);
  });

  test('takes with it what the process started', async () => {
    const source =
      'console.log(require("child_process").spawn("sleep", ["600"]).pid); setTimeout(() => process.exit(0), 50)';
    const worker = newLauncher().start(spec('engine-0', program(source)));
    await worker.peer.lost;
    const grandchild = Number(logTail(worker, 1));
    expect(grandchild).toBeGreaterThan(0);
    await until(() => !isAlive(grandchild));
  });

  test('a process whose peer broke the protocol is killed', async () => {
    const worker = newLauncher().start(spec('tokenizer-0'));
    await worker.peer.ready;
    worker.peer.declareLost('it broke the protocol');
    expect(await worker.exited).toEqual({ code: null, signal: 'SIGKILL' });
    expect((await worker.peer.lost).message).toBe('tokenizer-0: it broke the protocol');
  });
});

describe('silence', () => {
  test('of a process that never says hello is ended after silenceReadyMs', async () => {
    const worker = newLauncher({ silenceMs: 1, silenceReadyMs: 600 }).start(
      spec('engine-0', program('setInterval(() => {}, 1e6)')),
    );
    expect(await worker.exited).toEqual({ code: null, signal: 'SIGKILL' });
    expect((await worker.peer.lost).message).toContain('silent for');
    expect(printed.join()).toContain('It never said hello.');
  });

  test('of a ready worker is ended after silenceMs, and its log is shown', async () => {
    const worker = newLauncher({ silenceMs: 1500 }).start(spec('tokenizer-0'));
    await worker.peer.ready;
    process.kill(worker.pid, 'SIGSTOP');
    expect(await worker.exited).toEqual({ code: null, signal: 'SIGKILL' });
    expect((await worker.peer.lost).message).toContain('silent for');
    expect(printed.join()).toContain('It does not answer');
  });

  test('counts no time in which this process itself was held up', async () => {
    const worker = newLauncher({ silenceMs: 1500 }).start(spec('tokenizer-0'));
    await worker.peer.ready;
    const end = performance.now() + 2500;
    while (performance.now() < end);
    expect(await say(worker.peer, 'x')).toBe('tokenizer-0');
    expect([worker.peer.isLost, printed]).toEqual([false, []]);
  });
});

describe('startMany', () => {
  test('hosts several workers in one process, each with its own secret', async () => {
    const workers = newLauncher().startMany([spec('tokenizer-0'), spec('tokenizer-1'), spec('tokenizer-2')]);
    await Promise.all(workers.map(({ peer }) => peer.ready));
    expect(new Set(workers.map(({ pid }) => pid)).size).toBe(1);
    expect(await Promise.all(workers.map(({ peer }) => say(peer, 'who')))).toEqual(
      workers.map(({ spec: { id } }) => id),
    );
    const secrets = await Promise.all(workers.map(async ({ peer }) => (await peer.hello).secret));
    expect(new Set(secrets).size).toBe(3);
  });

  test('loses them all when the process ends', async () => {
    const launcher = newLauncher();
    const [first, second] = launcher.startMany([spec('tokenizer-0'), spec('tokenizer-1')]);
    await Promise.all([first?.peer.ready, second?.peer.ready]);
    await launcher.kill(first as NonNullable<typeof first>);
    expect((await second?.peer.lost)?.message).toContain('SIGKILL');
  });
});

describe('the end', () => {
  test('stopAll ends every worker in order, leaves nothing, and the port is free', async () => {
    const launcher = newLauncher();
    const workers = [
      launcher.start(spec('tokenizer-0')),
      ...launcher.startMany([spec('tokenizer-1'), spec('tokenizer-2')]),
    ];
    await Promise.all(workers.map(({ peer }) => peer.ready));
    const grandchild = Number(await say((workers[0] as (typeof workers)[0]).peer, 'spawn'));
    await launcher.stopAll();
    for (const worker of workers) expect(await worker.exited).toEqual({ code: 0, signal: null });
    await until(() => ![grandchild, ...workers.map(({ pid }) => pid)].some(isAlive));
    expect(await isFree(bus.endpoint)).toBe(false);
    await bus.close();
    expect(await isFree(bus.endpoint)).toBe(true);
  });

  test('a worker that does not stop in time is killed', async () => {
    const launcher = newLauncher();
    const worker = launcher.start(spec('tokenizer-0'));
    await worker.peer.ready;
    worker.peer.request('encode', { texts: ['block'] }).catch(() => {});
    await launcher.stop(worker, 300);
    expect(await worker.exited).toEqual({ code: null, signal: 'SIGKILL' });
  });

  test('a worker that has not said hello is killed by stop', async () => {
    const launcher = newLauncher();
    const worker = launcher.start(spec('engine-0', program('setInterval(() => {}, 1e6)')));
    await launcher.stop(worker);
    expect(await worker.exited).toEqual({ code: null, signal: 'SIGKILL' });
  });

  test('killAllNow needs no event loop, and leaves no temporary files of the killed', async () => {
    const launcher = newLauncher();
    const worker = launcher.start(spec('tokenizer-0'));
    await worker.peer.ready;
    const left = mkdtempSync(join(tmpdir(), `molt-tmp-${worker.pid}-`));
    launcher.killAllNow();
    expect(existsSync(left)).toBe(false);
    expect(await worker.exited).toEqual({ code: null, signal: 'SIGKILL' });
  });

  test('what a killed worker wrote last is not taken for the cause', async () => {
    const killed = newLauncher().start(
      spec('engine-0', program('console.error("all is well"); process.kill(process.pid, "SIGKILL")')),
    );
    expect((await killed.peer.lost).message).toBe('engine-0: the process was ended by SIGKILL');
  });

  test('stop of a worker that is gone returns', async () => {
    const launcher = newLauncher();
    const worker = launcher.start(spec('engine-0', program('')));
    await worker.peer.lost;
    await launcher.stop(worker);
    await launcher.kill(worker);
  });
});

describe('logs and commands', () => {
  test('a restart appends to the log, and the tail shows the new process only', async () => {
    const launcher = newLauncher();
    const first = launcher.start(spec('engine-0', program('console.log("first")')));
    await first.peer.lost;
    const second = launcher.start(spec('engine-0', program('console.log("second")')));
    await second.peer.lost;
    expect([first.peer.incarnation, second.peer.incarnation]).toEqual([0, 1]);
    expect(logTail(second, 10)).toBe('second');
    expect(readdirSync(join(dir, 'logs'))).toEqual(['engine-0.log']);
    expect(readFileSync(join(dir, 'logs', 'engine-0.log'), 'utf8')).toBe('first\nsecond\n');
  });

  test('workers get one thread, no network, and what the spec adds', async () => {
    const source = 'const e = process.env; console.log(e.OMP_NUM_THREADS, e.HF_HUB_OFFLINE, e.MORE)';
    const worker = newLauncher().start({ ...spec('engine-0', program(source)), env: { MORE: 'more' } });
    await worker.peer.lost;
    expect(logTail(worker, 1)).toBe('1 1 more');
  });

  test('the secret is in neither argv nor environment', async () => {
    const source =
      'console.log(JSON.stringify([process.argv, process.env])); process.stdin.once("data", (d) => { console.log(JSON.parse(d).secret); process.exit() })';
    const worker = newLauncher().start(spec('engine-0', program(source)));
    await worker.peer.lost;
    const [visible, secret] = logTail(worker, 2).split('\n') as [string, string];
    expect(secret).toMatch(/^[0-9a-f]{32}$/);
    expect(visible).not.toContain(secret);
  });

  test('nodeCommand runs TypeScript from any directory', async () => {
    const script = join(dir, 'program.ts');
    writeFileSync(script, 'const n: number = 41; console.log(n + 1);');
    const worker = newLauncher().start(
      spec('engine-0', ['sh', '-c', 'cd / && exec "$@"', 'sh', ...nodeCommand(script)]),
    );
    await worker.peer.lost;
    expect(logTail(worker, 1)).toBe('42');
    expect(nodeCommand('molt/runner.ts').at(-1)).toMatch(/^\/.*molt\/runner\.ts$/);
  });

  test('pythonCommand prefers what it is told, then MOLT_PYTHON', () => {
    const before = process.env.MOLT_PYTHON;
    process.env.MOLT_PYTHON = '/opt/python';
    expect(pythonCommand('trainer.py')[0]).toBe('/opt/python');
    expect(pythonCommand('trainer.py', '/usr/bin/python3')).toEqual([
      '/usr/bin/python3',
      expect.stringMatching(/workers\/trainer\.py$/),
    ]);
    if (before === undefined) delete process.env.MOLT_PYTHON;
    else process.env.MOLT_PYTHON = before;
  });
});
