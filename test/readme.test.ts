import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { expect, test } from 'vitest';
import { withTables } from '../scripts/readme_tables.ts';

const readme = readFileSync('README.md', 'utf8');

test('the tables of options and metrics are those of the code (npx tsx scripts/readme_tables.ts)', () => {
  expect(withTables(readme)).toBe(readme);
});

test('the file tree names every module and no other', () => {
  const named = new Set(
    Array.from(readme.matchAll(/^\| `((?:molt|workers|scripts)\/[^`]+)`/gm), (match) => match[1] ?? ''),
  );
  const present = ['molt', 'workers', 'scripts'].flatMap((dir) =>
    readdirSync(dir)
      .filter((name) => /\.(ts|py|sh)$/.test(name))
      .map((name) => `${dir}/${name}`),
  );
  expect(present.filter((path) => !named.has(path))).toEqual([]);
  expect([...named].filter((path) => !existsSync(path))).toEqual([]);
});
