/**
 * Isolation: whose code is running, in a process that hundreds of rollouts share, and what that code may not do to it.
 *
 *   an error that nobody catches    \
 *   process.exit, abort, kill(self)  >  of which rollout? (AsyncLocalStorage)  ->  that one ends `agent_error`
 *   a loop that stands still        /   (the same, seen by watchdog.ts)        ->  that one ends `agent_blocked`
 *
 * Invariants
 *   1. Code of a rollout runs in its own async context, which timers, promises and callbacks inherit; molt's own code
 *      runs in none.
 *   2. What code does after its rollout has ended changes nothing: it is counted, and said once for each rollout.
 *   3. Between the first pieces of code of two calls the event loop turns once, so that a call that never returns holds
 *      it alone.
 * An error of no rollout (code that an agent's module started by itself, a bug in molt) ends the process, as it would have
 * without this file. It is no sandbox: whoever wants to leave it can.
 * Called by runner.ts.
 */
import { AsyncLocalStorage, createHook } from 'node:async_hooks';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { describe, Ended } from './agent.ts';
import { placeOf } from './modules.ts';
import { SLOT, startWatchdog, TURNS, type Watchdog, WHERE } from './watchdog.ts';

/** A rollout in this process. */
export interface Guest {
  readonly rolloutId: string;
  readonly slot: number; // its name for the watchdog
  readonly end: (why: Ended) => void;
  isOver: boolean;
  lateErrors: number;
}

const STACK_LINES = 8;
/** What a refused process.exit throws, to unwind the code that called it. */
class Refused extends Error {}

/** One for a process: it replaces functions of `process` and listens to errors that nobody catches, for good. */
export class Isolation {
  readonly #storage = new AsyncLocalStorage<Guest>();
  readonly #watchdog: Watchdog;
  readonly #onLate: () => void;
  readonly #exit = process.exit.bind(process);
  #numSlots = 0;
  #slot = 0; // whose code runs now
  #outer: number[] = []; // whose code ran before, where callbacks are nested
  #gate: Promise<unknown> = Promise.resolve();

  constructor(args: { readonly blockMs: number; readonly onLate: () => void }) {
    this.#onLate = args.onLate;
    this.#watchdog = startWatchdog(args.blockMs);
    this.#follow();
    this.#listen();
    this.#replace();
  }

  admit(rolloutId: string, attempt: number, end: (why: Ended) => void): Guest {
    const slot = ++this.#numSlots;
    this.#watchdog.name(slot, rolloutId, attempt);
    return { rolloutId, slot, end, isOver: false, lateErrors: 0 };
  }

  /** Run code in the rollout's context. Throws what it throws. */
  inside<T>(guest: Guest, code: () => T): T {
    const before = this.#slot;
    this.#enter(guest.slot);
    try {
      return this.#storage.run(guest, code);
    } finally {
      this.#enter(before);
    }
  }

  /** Resolves when it is the caller's turn on the event loop (invariant 3). */
  turn(): Promise<void> {
    const mine = this.#gate.then(() => nextTurn());
    this.#gate = mine;
    return mine;
  }

  // ---- Whose code runs ----

  #enter(slot: number): void {
    this.#slot = slot;
    Atomics.store(this.#watchdog.shared, SLOT, slot);
  }

  /** Around every callback and every continuation of a promise. */
  #follow(): void {
    const { shared, periodMs } = this.#watchdog;
    createHook({
      before: () => {
        this.#outer.push(this.#slot);
        this.#enter(this.#storage.getStore()?.slot ?? 0);
      },
      after: () => this.#enter(this.#outer.pop() ?? 0),
    }).enable();
    setInterval(() => {
      Atomics.add(shared, TURNS, 1);
      this.#outer = []; // nothing is around this callback, whatever an error has left behind
    }, periodMs).unref();
    Object.assign(globalThis, {
      [Symbol.for(WHERE)]: () => {
        const stack = new Error().stack ?? '';
        const lines = stack.split('\n').filter((line) => /^\s+at /.test(line) && !/eval at|isolation\.ts/.test(line));
        const text = placeOf({ stack: lines.join('\n') }) && lines.slice(0, STACK_LINES).join('\n');
        return JSON.stringify({ slot: this.#storage.getStore()?.slot ?? 0, stack: text });
      },
    });
  }

  // ---- What nobody catches ----

  #listen(): void {
    process.on('uncaughtException', (error, origin) => this.#stray(error, `Uncaught, nothing awaits it (${origin})`));
    process.on('unhandledRejection', (error) => this.#stray(error, 'A promise that nobody awaits rejected'));
    // Node reports what a microtask throws outside of any context.
    const queue = globalThis.queueMicrotask;
    globalThis.queueMicrotask = (callback) => {
      if (typeof callback !== 'function') return queue(callback); // throws
      queue(() => {
        try {
          callback();
        } catch (error) {
          this.#stray(error, 'Uncaught, nothing awaits it (queueMicrotask)');
        }
      });
    };
  }

  #stray(error: unknown, how: string): void {
    if (error instanceof Refused) return; // its rollout knows
    const text = `${how}: ${describe(error)}`;
    const guest = this.#storage.getStore();
    if (guest) return this.#end(guest, text);
    if (error instanceof Error) console.error(error);
    console.error(`This runner ends, since no rollout can be named: ${text.split('\n')[0]}`); // what the controller quotes
    this.#exit(1);
  }

  #end(guest: Guest, text: string): void {
    if (!guest.isOver) {
      guest.isOver = true;
      guest.end(new Ended('agent_error', text));
      return;
    }
    this.#onLate();
    if (guest.lateErrors++ === 0) console.error(`Rollout ${guest.rolloutId} had ended before this: ${text}`);
  }

  // ---- What would end the process ----

  #replace(): void {
    const { exit, abort, kill } = process;
    const inner = process as unknown as { reallyExit: (code?: number) => never };
    const { reallyExit } = inner;
    process.exit = (code) => {
      this.#refuse('process.exit', code === undefined ? [] : [code], process.exit);
      return exit.call(process, code);
    };
    inner.reallyExit = (code) => {
      this.#refuse('process.reallyExit', code === undefined ? [] : [code], inner.reallyExit);
      return reallyExit.call(process, code);
    };
    process.abort = () => {
      this.#refuse('process.abort', [], process.abort);
      return abort.call(process);
    };
    process.kill = (pid, signal) => {
      const own = [process.pid, process.ppid].flatMap((each) => [each, -each]);
      if (signal !== 0 && [0, -1, ...own].includes(Number(pid)))
        this.#refuse('process.kill', signal === undefined ? [pid] : [pid, signal], process.kill);
      return kill.call(process, pid, signal);
    };
  }

  /** Throws where it is code of a rollout that calls, also of one that has ended. */
  #refuse(name: string, args: readonly unknown[], from: (...args: never[]) => unknown): void {
    const guest = this.#storage.getStore();
    if (!guest) return;
    const shown = `${name}(${args.map(describe).join(', ')})`;
    const refused = new Refused(`${shown} was called: it would have ended the runner`);
    Error.captureStackTrace(refused, from);
    const at = placeOf(refused);
    this.#end(guest, `called ${shown}${at && ` (${at})`}`);
    throw refused;
  }
}
