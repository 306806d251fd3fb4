/**
 * The stall watchdog: when nothing has happened for a while, it says who waits on whom, with the stacks of every process.
 *
 * Nothing = no token, no rollout begun or ended, no answer of a trainer rank or of the tokenizer. Time is counted in ticks of
 * its own clock, each at most one period, so that a machine that slept is not a run that hangs. It ends nothing: whatever
 * can hang has a deadline of its own (rollout, engine, refit, trainer, tokenizer), and this is how one sees which comes.
 * Called by loop.ts.
 */
import type { Launcher } from './launch.ts';
import type { Workers } from './workers.ts';

const TICK_MS = 1000;

export interface Watchdog {
  /** What the loop waits for now, in words. */
  waitsFor: string;
  close(): void;
}

export function watchStalls(args: {
  readonly stallMs: number;
  readonly launcher: Launcher;
  readonly workers: Workers;
  readonly say: (text: string) => void;
  readonly tickMs?: number;
}): Watchdog {
  const { stallMs, launcher, workers, say, tickMs = TICK_MS } = args;
  const { dispatch, generator, trainer, tokenizer } = workers;
  let [before, quietMs, last] = ['', 0, performance.now()];
  const tick = () => {
    const now = performance.now();
    const signs = [generator.activity, dispatch.activity, trainer.answers, tokenizer.answers, dog.waitsFor].join();
    quietMs = signs === before ? quietMs + Math.min(now - last, tickMs) : 0;
    [before, last] = [signs, now];
    if (quietMs < stallMs) return;
    const seconds = Math.round(quietMs / 1000);
    quietMs = Number.NEGATIVE_INFINITY; // once a stall: anything that happens sets it back
    void launcher.allStacks().then((stacks) => {
      say(
        [
          `Nothing has happened for ${seconds} s. The loop waits for ${dog.waitsFor}.`,
          ...dispatch.describe(),
          ...generator.describe(),
          stacks,
        ].join('\n'),
      );
    });
  };
  const timer = setInterval(tick, tickMs);
  timer.unref();
  const dog: Watchdog = { waitsFor: 'nothing yet', close: () => clearInterval(timer) };
  return dog;
}
