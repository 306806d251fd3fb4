import { mkdirSync, mkdtempSync, rmSync, statSync, truncateSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { newestCheckpoint } from '../molt/checkpoint.ts';

let run: string;
beforeEach(() => {
  run = mkdtempSync(join(tmpdir(), 'molt-checkpoint-'));
});
afterEach(() => rmSync(run, { recursive: true, force: true }));

/** A checkpoint as saveCheckpoint leaves it. */
function complete(step: number): string {
  const dir = join(run, 'checkpoints', `step-${step}`);
  mkdirSync(join(dir, 'trainer'), { recursive: true });
  writeFileSync(join(dir, 'trainer', 'weights.bin'), Buffer.alloc(100));
  const loop = JSON.stringify({ step, version: step, data: {}, dispatched: step * 16 });
  writeFileSync(join(dir, 'loop.json'), loop);
  const files = [
    { path: 'trainer/weights.bin', bytes: 100 },
    { path: 'loop.json', bytes: loop.length },
  ];
  writeFileSync(join(dir, 'manifest.json'), JSON.stringify({ step, files }));
  return dir;
}

describe('newestCheckpoint', () => {
  test('is null where nothing was saved', () => {
    expect(newestCheckpoint(run)).toBeNull();
  });

  test('orders by step, not by name', () => {
    complete(9);
    complete(10);
    expect(newestCheckpoint(run)?.state).toMatchObject({ step: 10, version: 10, dispatched: 160 });
  });

  test('passes over a directory that was never renamed', () => {
    complete(4);
    mkdirSync(join(run, 'checkpoints', 'step-8.tmp', 'trainer'), { recursive: true });
    expect(newestCheckpoint(run)?.state.step).toBe(4);
  });

  test('passes over a truncated file, a missing file and a missing manifest, and names them', () => {
    complete(1);
    truncateSync(join(complete(2), 'trainer', 'weights.bin'), 99);
    rmSync(join(complete(3), 'trainer', 'weights.bin'));
    rmSync(join(complete(4), 'manifest.json'));
    truncateSync(join(complete(5), 'manifest.json'), 15);
    const state = join(complete(6), 'loop.json');
    writeFileSync(state, Buffer.alloc(statSync(state).size)); // as a file system may leave it after a power cut
    const skipped: string[] = [];
    expect(newestCheckpoint(run, (line) => skipped.push(line))?.state.step).toBe(1);
    expect(skipped.map((line) => line.replace(/^.*step-/, '').replace(/(parse):.*/, '$1'))).toEqual([
      '6: loop.json does not parse',
      '5: manifest.json does not parse',
      '4: no manifest.json',
      '3: trainer/weights.bin is missing',
      '2: trainer/weights.bin has 99 bytes, expected 100',
    ]);
  });
});
