/**
 * Long computations in stretches, so that sockets, timers and signals get their turn.
 *
 * The controller's thread never runs over 20 ms at a time: workers would look silent, and a Ctrl-C that is not answered
 * is turned into SIGKILL by the program that starts us. Called wherever a loop runs over all tokens of a batch.
 */
import { setImmediate as nextTurn } from 'node:timers/promises';

const STRETCH_MS = 8;

export class Stretch {
  #since = performance.now();

  /** Await it often, between pieces of about a millisecond. */
  async pause(): Promise<void> {
    if (performance.now() - this.#since < STRETCH_MS) return;
    await nextTurn();
    this.#since = performance.now();
  }
}
