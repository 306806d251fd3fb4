/**
 * The watchdog of a runner: a thread that sees the event loop stand still, and in whose code.
 *
 *   event loop   TURNS += 1 every period; SLOT = the rollout whose code runs now (isolation.ts), 0 = none
 *   this thread  TURNS stands still, SLOT the same for blockMs -> name and stack to the log -> SIGKILL to the process
 *   controller   readBlocked(log of the lost runner) -> that rollout ends `agent_blocked` (dispatch.ts)
 *
 * Invariants
 *   1. Time is counted in ticks of this thread, each at most one period: a process or a machine that was stopped as a
 *      whole has blocked nothing.
 *   2. A rollout answers for the time in which its own code ran, summed since the event loop last turned. Time of molt's
 *      code is nobody's: a loop that stands still there is silent, which launch.ts sees.
 *   3. Nothing is asked of the event loop but shared memory, and the log is written by this thread: it works while the
 *      loop is inside a native call. The stack comes from the inspector, which needs the loop to run JavaScript; it is
 *      left out where that does not answer.
 * Called by isolation.ts (startWatchdog) and dispatch.ts (readBlocked).
 */
import { Worker } from 'node:worker_threads';

/** Places in the shared memory. */
export const TURNS = 0;
export const SLOT = 1;
const MAX_PERIOD_MS = 250;
/** Periods in blockMs, where that is short. */
const PERIODS = 8;
/** How long the thread waits for the stack of the event loop. */
const LOOK_MS = 2_000;
/** The key under which the event loop's side says where it is: JSON of `{ slot, stack }`, for code of the inspector. */
export const WHERE = 'molt.where';
const MARK = 'molt-blocked';

/** A rollout whose code held the event loop of its runner, as the runner's log says. */
export interface Blocked {
  readonly rolloutId: string;
  readonly attempt: number;
  readonly detail: string; // how long, then its stack where there is one
}

export interface Watchdog {
  readonly shared: Int32Array;
  readonly periodMs: number; // the event loop raises TURNS this often
  /** Tell who has a slot, before its code runs. */
  readonly name: (slot: number, rolloutId: string, attempt: number) => void;
}

/** Start the thread. It does not keep the process alive. */
export function startWatchdog(blockMs: number): Watchdog {
  const shared = new Int32Array(new SharedArrayBuffer(8));
  const periodMs = Math.min(MAX_PERIOD_MS, blockMs / PERIODS);
  // As text, so that the thread starts without a loader; esbuild calls __name on functions that it compiles.
  const program = `const __name = (code) => code;\n(${watch.toString()})(require);`;
  const constants = { TURNS, SLOT, LOOK_MS, WHERE, MARK };
  const workerData = { shared, blockMs, periodMs, ...constants };
  const thread = new Worker(program, { eval: true, execArgv: [], env: {}, workerData });
  thread.on('error', (error) => console.error('The watchdog thread ended:', error));
  thread.unref();
  return {
    shared,
    periodMs,
    name: (slot, rolloutId, attempt) => thread.postMessage({ slot, rolloutId, attempt }),
  };
}

/** Who blocked the runner that wrote this, the last one; null when nobody did. */
export function readBlocked(log: string): Blocked | null {
  const line = log.split('\n').findLast((each) => each.startsWith(`${MARK} `));
  if (line === undefined) return null;
  try {
    const said = JSON.parse(line.slice(MARK.length)) as Partial<Blocked> | null;
    const { rolloutId, attempt, detail } = said ?? {};
    if (typeof rolloutId !== 'string' || typeof attempt !== 'number' || typeof detail !== 'string') return null;
    return { rolloutId, attempt, detail };
  } catch {
    return null; // cut off
  }
}

interface WatchData {
  readonly shared: Int32Array;
  readonly blockMs: number;
  readonly periodMs: number;
  readonly TURNS: number;
  readonly SLOT: number;
  readonly LOOK_MS: number;
  readonly WHERE: string;
  readonly MARK: string;
}

/** The thread. It is passed on as text, so it sees nothing of this module. */
function watch(load: NodeJS.Require): void {
  const { parentPort, workerData } = load('node:worker_threads') as typeof import('node:worker_threads');
  const { writeSync } = load('node:fs') as typeof import('node:fs');
  const { Session } = load('node:inspector') as typeof import('node:inspector');
  const { shared, blockMs, periodMs, TURNS, SLOT, LOOK_MS, WHERE, MARK } = workerData as WatchData;
  const names = new Map<number, { rolloutId: string; attempt: number }>();
  const blocked = new Map<number, number>(); // milliseconds by slot, since the event loop turned
  let turns = -1;
  let lastTick = performance.now();
  parentPort?.on('message', ({ slot, ...name }: { slot: number; rolloutId: string; attempt: number }) => {
    names.set(slot, name);
  });
  const timer = setInterval(() => {
    const now = performance.now();
    const tick = Math.min(now - lastTick, periodMs);
    lastTick = now;
    const slot = Atomics.load(shared, SLOT);
    if (Atomics.load(shared, TURNS) !== turns) {
      turns = Atomics.load(shared, TURNS);
      blocked.clear();
      return;
    }
    const name = names.get(slot);
    if (!name) return;
    const sum = (blocked.get(slot) ?? 0) + tick;
    blocked.set(slot, sum);
    if (sum < blockMs) return;
    clearInterval(timer);
    look(slot, (stack) => {
      const what = `blocked the event loop for more than ${blockMs / 1000} s`;
      const detail = stack
        ? `${what}\n${stack}`
        : `${what}; its stack cannot be read, as in a call that does not return`;
      const report = `${MARK} ${JSON.stringify({ ...name, detail })}`;
      writeSync(2, `\n${report}\nRollout ${name.rolloutId} ${what}; this runner ends\n`);
      process.kill(process.pid, 'SIGKILL');
    });
  }, periodMs);

  /** The stack of the event loop, '' where it is not to be had. Looks again where only Node's own code is on it. */
  function look(slot: number, done: (stack: string) => void): void {
    let stack = '';
    setTimeout(() => done(stack), LOOK_MS);
    try {
      const session = new Session();
      session.connectToMainThread();
      session.on('Debugger.paused', ({ params }) => {
        const callFrameId = params.callFrames[0]?.callFrameId ?? '';
        const expression = `globalThis[Symbol.for(${JSON.stringify(WHERE)})]()`;
        session.post('Debugger.evaluateOnCallFrame', { callFrameId, expression, returnByValue: true }, (_, reply) => {
          const seen = JSON.parse(String(reply?.result.value ?? 'null')) as { slot: number; stack: string } | null;
          if (seen?.slot === slot) stack = seen.stack;
          if (stack) return done(stack);
          session.post('Debugger.stepOut'); // the next function, where this one has no caller
        });
      });
      session.post('Debugger.enable');
      session.post('Debugger.pause');
    } catch {
      done(stack); // a Node without the inspector
    }
  }
}
