/**
 * Start, watch and stop worker processes on this host.
 *
 *   start -> spawn (own process group, secret on stdin) -> hello, ready (bus.ts) -> stop | kill | exit seen
 *
 * Invariants
 *   1. Every child leads its own process group and holds the other end of a stdin pipe: when this process dies, in
 *      whatever way, each child sees end-of-file and kills its group.
 *   2. Whenever a child is gone, its whole group is killed, so that what it started goes too.
 *   3. A child that exits is a lost peer at once, with exit code or signal and the last line of its log; the process
 *      of a peer that was lost in any other way is killed.
 *   4. A silent child is killed only after silenceMs (silenceReadyMs until `ready`), counted in turns of this
 *      process's own clock: time in which this event loop was held up counts for nobody.
 * `npx tsx molt/launch.ts --doctor RECIPE` only checks whether a run could start (preflight.ts).
 * The secret travels by stdin, never by argv or environment. Children are not reached by a terminal's Ctrl-C: whoever
 * handles signals calls stopAll or killAllNow. Not here: other hosts, restarts (generator.ts, dispatch.ts decide them).
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import {
  closeSync,
  existsSync,
  fstatSync,
  mkdirSync,
  openSync,
  readdirSync,
  readSync,
  realpathSync,
  rmSync,
} from 'node:fs';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { isAbsolute, join } from 'node:path';
import type { Readable } from 'node:stream';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath, pathToFileURL } from 'node:url';
import { type Bus, EXIT_BAD_INPUT, type Peer } from './bus.ts';
import { pythonProgram, ROOT } from './python.ts';
import { invariant, type Json } from './types.ts';

const STOP_GRACE_MS = 10_000;
const STACKS_MS = 2_000;
const SUPERVISE_MS = 500;
/** An exit is often seen before the last message of that process has passed through the socket. */
const LAST_WORDS_MS = 50;
const LOG_TAIL_BYTES = 64 * 1024;
/** One thread per process, nothing from the network, nothing buffered. `spec.env` adds to it. */
const WORKER_ENV = {
  OMP_NUM_THREADS: '1',
  MKL_NUM_THREADS: '1',
  TOKENIZERS_PARALLELISM: 'false',
  HF_HUB_OFFLINE: '1',
  PYTHONUNBUFFERED: '1',
};

export interface WorkerSpec {
  readonly id: string;
  readonly kind: 'engine' | 'trainer' | 'tokenizer' | 'runner';
  readonly command: readonly string[]; // pythonCommand, nodeCommand
  readonly options: Json; // travel in `welcome`
  readonly env?: Readonly<Record<string, string>>;
}

export interface Exit {
  readonly code: number | null;
  readonly signal: string | null; // both null: the program could not be started
}

/** A started worker. Several share one process when they came from startMany. */
export interface Worker {
  readonly spec: WorkerSpec;
  readonly peer: Peer;
  readonly pid: number; // -1 when the program could not be started
  readonly exited: Promise<Exit>; // never rejects
  readonly log: { readonly path: string; readonly from: number }; // from: where this process began to write
}

interface Process {
  readonly child: ChildProcess;
  readonly workers: readonly Worker[];
  readonly silentMs: Map<Worker, { heard: number; silent: number }>;
  isExited: boolean;
  isStopping: boolean; // was asked to stop
  isCondemned: boolean; // found silent; being killed
}

export interface LauncherArgs {
  readonly bus: Bus;
  readonly logDir: string;
  readonly silenceMs: number;
  readonly silenceReadyMs: number;
  readonly print?: (text: string) => void; // what a person should see; default stderr
}

/** Owns the worker processes. End it with stopAll, before the bus is closed. */
export class Launcher {
  readonly #args: LauncherArgs;
  readonly #print: (text: string) => void;
  /** What workers said that ended with EXIT_BAD_INPUT: the user's to mend. */
  readonly refusals: string[] = [];
  readonly #processes = new Set<Process>();
  #timer: NodeJS.Timeout | undefined;
  #lastTick = 0;

  constructor(args: LauncherArgs) {
    this.#args = args;
    this.#print = args.print ?? ((text) => void process.stderr.write(`${text}\n`));
    mkdirSync(args.logDir, { recursive: true });
  }

  /** Does not wait: `worker.peer.ready` tells. A program that cannot be started is a lost peer. */
  start(spec: WorkerSpec): Worker {
    const [worker] = this.startMany([spec]);
    invariant(worker, 'one spec makes one worker');
    return worker;
  }

  /** Several workers hosted by one process; the command and environment of the first count, its id names the log. */
  startMany(specs: readonly WorkerSpec[]): Worker[] {
    const first = specs[0];
    invariant(first, 'startMany needs at least one spec');
    const secrets = Object.fromEntries(specs.map((spec) => [spec.id, randomBytes(16).toString('hex')]));
    const peers = specs.map((spec) => this.#args.bus.expect(spec.id, secrets[spec.id] as string, spec.options));
    const path = join(this.#args.logDir, `${first.id}.log`);
    const log = openSync(path, 'a');
    const from = fstatSync(log).size;
    const child = this.#spawn(first, specs, log);
    closeSync(log); // the child has its own
    const exited = exitOf(child);
    const workers = specs.map((spec, i) => {
      return { spec, peer: peers[i] as Peer, pid: child.pid ?? -1, exited, log: { path, from } };
    });
    this.#watch(
      { child, workers, silentMs: new Map(), isExited: false, isStopping: false, isCondemned: false },
      exited,
    );
    child.stdin?.on('error', () => {}); // it may end before it has read its secret; its exit tells
    child.stdin?.write(`${JSON.stringify(specs.length === 1 ? { secret: secrets[first.id] } : { secrets })}\n`);
    return workers;
  }

  #spawn(first: WorkerSpec, specs: readonly WorkerSpec[], log: number): ChildProcess {
    const [program, ...args] = first.command;
    invariant(program, `the command of ${first.id} is empty`);
    const ids = specs.flatMap((spec) => ['--worker-id', spec.id]);
    return spawn(program, [...args, '--endpoint', this.#args.bus.endpoint, ...ids], {
      detached: true,
      stdio: ['pipe', log, log],
      env: { ...process.env, ...WORKER_ENV, ...first.env },
    });
  }

  #watch(proc: Process, exited: Promise<Exit>): void {
    this.#processes.add(proc);
    if (!this.#timer) {
      this.#lastTick = performance.now();
      this.#timer = setInterval(() => this.#supervise(), SUPERVISE_MS).unref();
    }
    for (const { peer } of proc.workers) {
      void peer.lost.then(() => proc.isExited || killGroup(proc.child)); // never rejects
    }
    void exited.then((exit) => this.#onExit(proc, exit)); // never rejects
  }

  async #onExit(proc: Process, { code, signal }: Exit): Promise<void> {
    proc.isExited = true;
    killGroup(proc.child); // what it started and left behind
    removeTemporary(proc.child.pid);
    this.#processes.delete(proc);
    if (this.#processes.size === 0) {
      clearInterval(this.#timer);
      this.#timer = undefined;
    }
    if (code === EXIT_BAD_INPUT) this.refusals.push(logTail(proc.workers[0] as Worker, 1));
    await sleep(LAST_WORDS_MS);
    const how = signal ? `was ended by ${signal}` : code === null ? 'could not be started' : `exited with code ${code}`;
    for (const worker of proc.workers.filter(({ peer }) => !peer.isLost)) {
      const cause = signal === 'SIGKILL' ? '' : logTail(worker, 1); // killed, it could not say why
      worker.peer.declareLost(`the process ${how}${cause && `: ${cause}`}`);
    }
  }

  // ---- Silence ----

  /** One turn of the clock. However late it comes, it counts as at most one period of silence (invariant 4). */
  #supervise(): void {
    const now = performance.now();
    const turn = Math.min(now - this.#lastTick, SUPERVISE_MS);
    this.#lastTick = now;
    for (const proc of this.#processes) {
      const worker = proc.isCondemned ? undefined : proc.workers.find((each) => this.#isTooSilent(proc, each, turn));
      if (!worker) continue;
      proc.isCondemned = true;
      const seconds = Math.round((proc.silentMs.get(worker)?.silent ?? 0) / 1000);
      void this.condemn(worker, `was silent for ${seconds} s`);
    }
  }

  #isTooSilent(proc: Process, worker: Worker, turnMs: number): boolean {
    if (worker.peer.isLost) return false;
    const { lastHeard } = worker.peer;
    const before = proc.silentMs.get(worker);
    const silent = before?.heard === lastHeard ? before.silent + turnMs : 0;
    proc.silentMs.set(worker, { heard: lastHeard, silent });
    return silent > (worker.peer.isReady ? this.#args.silenceMs : this.#args.silenceReadyMs);
  }

  /** Kill a worker that does not go on, after its stacks were printed. `what` it did: "was silent for 60 s". Never rejects. */
  async condemn(worker: Worker, what: string): Promise<void> {
    const stacks = await this.stacks(worker);
    this.#print(`${worker.spec.id} ${what} and is killed. ${stacks}`);
    worker.peer.declareLost(what);
    await this.kill(worker);
  }

  /** By both ways: the message needs a living I/O thread, the signal writes to the log even where that one hangs. */
  async stacks(worker: Worker): Promise<string> {
    if (!worker.peer.isConnected) return 'It never said hello.';
    signalProcess(worker.pid, 'SIGUSR1'); // after hello a handler is installed
    try {
      const { fields } = await worker.peer.request('stacks', {}, {}, { deadlineMs: STACKS_MS });
      return `Its stacks:\n${fields.text}`;
    } catch {
      return `It does not answer; its log ends with:\n${logTail(worker, 40)}`;
    }
  }

  /** The stacks of all workers, for a run that hangs. */
  async allStacks(): Promise<string> {
    const workers = [...this.#processes].flatMap((proc) => proc.workers);
    const stacks = await Promise.all(workers.map(async (worker) => `${worker.spec.id}: ${await this.stacks(worker)}`));
    return stacks.join('\n');
  }

  // ---- The end ----

  /**
   * Ask it to finish (with all that share its process); after graceMs kill its group. Resolves when it is reaped. May be
   * called twice.
   */
  async stop(worker: Worker, graceMs = STOP_GRACE_MS): Promise<void> {
    if (!worker.peer.isConnected) return this.kill(worker);
    const timer = setTimeout(() => void this.kill(worker), graceMs); // never rejects
    for (const proc of this.#processes) {
      if (!proc.workers.includes(worker) || proc.isStopping) continue;
      proc.isStopping = true;
      for (const { peer } of proc.workers) {
        peer.request('stop', {}, {}, { deadlineMs: graceMs }).catch(() => {}); // the timer kills what does not answer
      }
    }
    await Promise.all([worker.exited, worker.peer.lost]); // lost last, with the cause
    clearTimeout(timer);
  }

  /** SIGKILL to its group. Resolves when it is reaped; the peer is lost then. Never rejects. */
  async kill(worker: Worker): Promise<void> {
    for (const proc of this.#processes) if (proc.workers.includes(worker)) killGroup(proc.child);
    await worker.exited;
    worker.peer.declareLost('killed');
  }

  async stopAll(graceMs = STOP_GRACE_MS): Promise<void> {
    const workers = [...this.#processes].flatMap((proc) => proc.workers);
    await Promise.all(workers.map((worker) => this.stop(worker, graceMs)));
  }

  /** Synchronous, for a second Ctrl-C: nothing is waited for. */
  killAllNow(): void {
    for (const { child } of this.#processes) {
      killGroup(child);
      removeTemporary(child.pid);
    }
  }
}

function exitOf(child: ChildProcess): Promise<Exit> {
  return new Promise((done) => {
    child.once('exit', (code, signal) => done({ code, signal }));
    child.once('error', () => {
      if (child.pid === undefined) done({ code: null, signal: null }); // could not be started
    });
  });
}

function killGroup(child: ChildProcess): void {
  if (child.pid !== undefined) signalProcess(-child.pid, 'SIGKILL');
}

/** A process that is gone already is no error. */
function signalProcess(pid: number, signal: NodeJS.Signals): void {
  invariant(Math.abs(pid) > 1, 'a signal goes to one process or group, never to all of them');
  try {
    process.kill(pid, signal);
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code !== 'ESRCH') throw error;
  }
}

// ---- Programs ----

/** A child that is no worker: this process reads what it prints. */
export interface Program {
  readonly name: string;
  readonly stdout: Readable;
  readonly stderr: Readable;
  readonly exited: Promise<Exit>; // never rejects
  readonly kill: () => void; // its group; harmless when it is gone
}

/** Start one, as the leader of a group with a stdin pipe; under workers/with_parent.py it then ends when we do. */
export function startProgram(command: readonly string[], env: Readonly<Record<string, string>>): Program {
  const [program = '', ...args] = command;
  const settings = { ...process.env, PYTHONUNBUFFERED: '1', ...env };
  const child = spawn(program, args, { detached: true, stdio: ['pipe', 'pipe', 'pipe'], env: settings });
  child.stdin.on('error', () => {}); // its exit tells
  let isGone = false;
  const exited = exitOf(child).then((exit) => {
    killGroup(child); // what it started and left behind
    isGone = true;
    return exit;
  });
  return { name: program, stdout: child.stdout, stderr: child.stderr, exited, kill: () => isGone || killGroup(child) };
}

// ---- Commands ----

/** A script of workers/ under the interpreter of Python workers (python.ts). */
export function pythonCommand(script: string, python?: string): string[] {
  const program = pythonProgram(python);
  if (!program) throw new Error(`Cannot run ${script}: there is no .venv; run scripts/setup.sh, or set MOLT_PYTHON`);
  return [program, isAbsolute(script) ? script : join(ROOT, 'workers', script)];
}

/** What a process could not remove because it was killed: in /tmp and /dev/shm, by names with its id (engine_vllm.py). */
function removeTemporary(pid: number | undefined): void {
  for (const dir of [tmpdir(), '/dev/shm']) {
    const names = existsSync(dir) ? readdirSync(dir).filter((name) => name.includes(`molt-tmp-${pid}-`)) : [];
    for (const name of names) rmSync(join(dir, name), { recursive: true, force: true });
  }
}

/**
 * A TypeScript file, relative to the repository, under Node with tsx; works from any directory. Tests start hundreds:
 * MOLT_BUNDLES may name a directory in which check.sh has put one file for it, which starts in a third of the time.
 */
export function nodeCommand(script: string): string[] {
  const bundle = join(process.env.MOLT_BUNDLES ?? '', `${script.replaceAll('/', '-')}.mjs`);
  if (process.env.MOLT_BUNDLES && existsSync(bundle)) return [process.execPath, bundle];
  const tsx = pathToFileURL(createRequire(import.meta.url).resolve('tsx')).href;
  return [process.execPath, '--import', tsx, isAbsolute(script) ? script : join(ROOT, script)];
}

/** It did not fail by itself: someone ended it (or the system did, for its memory). From the reason of a lost peer. */
export function wasKilled(reason: Error): boolean {
  return /was ended by SIG/.test(reason.message);
}

const TRACE_LINES = 200;
const TAIL_LINES = 20;

/** What a dead process wrote last: its traceback whole where there is one, else a few lines. */
export function lastWords(worker: Worker): string {
  const lines = logTail(worker, TRACE_LINES).split('\n');
  // Chained exceptions are several tracebacks with a line between them that says so; the first one is the cause.
  const first = lines.findIndex((line) => line.startsWith('Traceback (most recent call last)'));
  return (first < 0 ? lines.slice(-TAIL_LINES) : lines.slice(first)).join('\n');
}

/** The last lines that this process wrote, for error messages; '' when it wrote nothing. */
export function logTail(worker: Worker, lines: number): string {
  const { path, from } = worker.log;
  if (!existsSync(path)) return `(its log ${path} is gone)`;
  const file = openSync(path, 'r');
  try {
    const { size } = fstatSync(file);
    const start = Math.max(from, size - LOG_TAIL_BYTES);
    const bytes = Buffer.alloc(Math.max(0, size - start));
    const read = readSync(file, bytes, 0, bytes.length, start);
    const text = bytes.toString('utf8', 0, read).trimEnd();
    return text.split('\n').slice(-lines).join('\n');
  } finally {
    closeSync(file);
  }
}

// ---- Entry ----

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  const words = process.argv.slice(2).filter((word) => word !== '--doctor');
  if (words.length === process.argv.length - 2) {
    console.error('Usage: npx tsx molt/launch.ts --doctor RECIPE [--option value ...]   (training: molt/loop.ts)');
    process.exit(2);
  }
  // start.ts imports this file, so it is loaded only once this one has been: by name, and not waited for here.
  void import(new URL('./start.ts', import.meta.url).href)
    .then(({ doctor }: { doctor: (argv: readonly string[]) => Promise<number> }) => doctor(words))
    .then((code) => process.exit(code));
}
