/** The streaming pool in 10,000 random runs (pool_cases.ts). */
import { expect, test } from 'vitest';
import { checkCase, drawCase, runCase } from './pool_cases.ts';

const CASES = 10_000;

test(`exactly once: every dispatched group is trained once or dropped once, in bounds, to the end, in ${CASES} random runs`, async () => {
  let [groups, dropped, mixed] = [0, 0, 0];
  for (let seed = 1; seed <= CASES; seed++) {
    const c = drawCase(seed);
    try {
      const trace = await runCase(c);
      checkCase(c, trace);
      groups += trace.counts.admitted;
      dropped += trace.counts.dropped;
      mixed += trace.batches
        .flatMap((b) => b.groups)
        .flatMap((g) => g.rollouts)
        .filter((r) => r.trajectories[0]?.versions[1] !== r.trajectories[0]?.versions[2]).length;
    } catch (error) {
      throw new Error(`Case ${JSON.stringify(c)}: ${(error as Error).message}`, { cause: error });
    }
  }
  // The cases are worth something: many groups, many of them dropped, many rollouts across a refit.
  expect(groups).toBeGreaterThan(50_000);
  expect(dropped).toBeGreaterThan(5_000);
  expect(mixed).toBeGreaterThan(5_000);
}, 180_000);

test('the same seed gives the same order of events', async () => {
  for (const seed of [3, 14, 159]) {
    const [one, two] = [await runCase(drawCase(seed)), await runCase(drawCase(seed))];
    expect(two.happened).toEqual(one.happened);
  }
});
