/** What README.md tells the reader to type, typed: in a copy of the repository, with real workers and a tiny model. */
import { readFileSync, symlinkSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { readBlocks, runBlock, workingCopy, writeBlock } from '../scripts/readme_blocks.ts';
import { torch } from './contract.ts';

const LIMIT_MS = 120_000;
const blocks = readBlocks(readFileSync('README.md', 'utf8'));
const copy = workingCopy();

beforeAll(async () => {
  const [model] = await torch.makeModels('');
  symlinkSync(model, join(copy.dir, 'my-model')); // the directory that the README's commands name
}, LIMIT_MS);
afterAll(copy.remove);

test('every block says whether it is run, and there are some', () => {
  for (const { mark, line } of blocks)
    expect(mark, `README.md, line ${line}`).toMatch(/^(run|prove|file: [\w./-]+|shown: .+)$/);
  expect(blocks.filter(({ mark }) => mark === 'run').length).toBeGreaterThanOrEqual(3);
  expect(blocks.filter(({ mark }) => mark?.startsWith('file: ')).length).toBeGreaterThanOrEqual(2);
});

test('nothing is left to be filled in', () => {
  expect(readFileSync('README.md', 'utf8')).not.toMatch(/@@|TODO|TBD/);
});

test('the agent has 20 lines at most', () => {
  const agent = blocks.find(({ mark }) => mark === 'file: scripts/mine.ts');
  expect(agent?.text.trim().split('\n').length).toBeLessThanOrEqual(20);
});

describe('as written', () => {
  for (const block of blocks) {
    if (block.mark?.startsWith('file: ')) test(`line ${block.line} is a file`, () => writeBlock(block, copy.dir));
    if (block.mark !== 'run') continue;
    test(
      `line ${block.line}: ${block.text.split('\n')[0]}`,
      async () => {
        const { code, output } = await runBlock(block.text, copy.dir);
        expect(code, output).toBe(0);
        expect(output).not.toMatch(/error/i);
        expect(output).toMatch(/^Done: 3 steps|\d+ ok, \d+ warnings, 0 problems/m);
      },
      LIMIT_MS,
    );
  }
});
