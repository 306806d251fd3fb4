/**
 * Work, or the failure that makes it pointless, whichever comes first.
 *
 * Not Promise.race: each call of it stays in the promise that never settles, with its result, until the run ends. A run of
 * ten thousand steps would keep what every step waited for.
 * Called by workers.ts and trainer.ts. Pure.
 */

/** Makes a function that gives what its promise gives, or rejects as soon as `failed` does. `failed` never resolves. */
export function orFailure(failed: Promise<never>): <T>(work: Promise<T>) => Promise<T> {
  const waiting = new Set<(cause: unknown) => void>();
  let hasFailed = false;
  failed.catch((cause: unknown) => {
    hasFailed = true;
    for (const reject of waiting) reject(cause);
    waiting.clear();
  });
  return (work) =>
    new Promise((resolve, reject) => {
      waiting.add(reject);
      void work.then(resolve, reject).finally(() => waiting.delete(reject)); // this chain never rejects
      if (hasFailed) failed.catch(reject);
    });
}
