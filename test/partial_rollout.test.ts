/**
 * Requests that live across refits, over real processes: every token has the logprob that the saved weights of its
 * version give, as transformers alone computes it, with old keys and without; and nothing is lost or doubled at the
 * moments where a refit, an abort, an ending and a dying engine meet. `npm run prove partial` does more of the same.
 */
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { Cell, type Kind, simulated, torch, torchMoe } from './contract.ts';
import { check, cross, type Findings, interleave, openWorld, randomOf, type World } from './interleavings.ts';

const TOLERANCE = 1e-4;

describe.each([
  { kind: simulated, cache: 'clear', numEngines: 2, count: 8, killEvery: 4 },
  { kind: torch, cache: 'clear', numEngines: 2, count: 4, killEvery: 4 },
  { kind: torch, cache: 'keep', numEngines: 1, count: 4, killEvery: 0 },
  { kind: torchMoe, cache: 'clear', numEngines: 1, count: 2, killEvery: 0 },
] satisfies { kind: Kind; cache: 'clear' | 'keep'; numEngines: number; count: number; killEvery: number }[])(
  'partial rollout with $kind.name engines and refit.cache $cache',
  ({ kind, cache, numEngines, count, killEvery }) => {
    let cell: Cell;
    let world: World;
    beforeAll(async () => {
      cell = await Cell.open();
      world = await openWorld(cell, kind, { name: `${kind.name}-${cache}`.replace(' ', '-'), cache, numEngines });
    }, kind.startMs);
    afterAll(async () => {
      await world?.close();
      await cell?.close();
    });

    test(
      'every token is of the version that its span names',
      async () => {
        const random = randomOf(17);
        await cross(world, random, [1, 1, 1]);
        for (let i = 0; i < count; i++) await interleave(world, random, killEvery > 0 && i % killEvery === 0);
        const found = await check(world, TOLERANCE);
        expect(found.worst).toBeLessThan(TOLERANCE);
        expectWorth(found, killEvery > 0);
      },
      2 * kind.startMs,
    );
  },
);

/** The test is worth something: requests did cross refits, and a boundary off by one would have been seen. */
function expectWorth(found: Findings, killed: boolean): void {
  for (const crossed of [1, 2, 3]) expect(found.crossed[crossed]).toBeGreaterThan(0);
  expect(found.telling).toBeGreaterThan(0.8 * found.boundaries);
  if (killed) expect(found.moved).toBeGreaterThan(0);
}
