/**
 * Every line of the pool's accounting is needed:  npm run prove accounting
 *
 * molt/buffer.ts is taken apart line by line: each statement that changes what is counted is left out once, and the random
 * runs of test/pool_cases.ts must then fail. A mutant that survives is a line that nothing depends on, or a run that nobody
 * draws. Each mutant has a process of its own: some run in circles.
 */
import { spawn } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';
import type { Buffer } from '../molt/buffer.ts';
import { checkCase, drawCase, runCase } from '../test/pool_cases.ts';

const SOURCE = 'molt/buffer.ts';
const CASES = 4000;
const LIMIT_MS = 120_000; // one that is still at it runs in circles
const SURVIVED = 9;
const TYPES = `'${new URL('../molt/types.ts', import.meta.url).href}'`; // the only import of it that is more than types

/** Statements of one line that change state or end a rule early; declarations and branches are not lines to leave out. */
const STATEMENT =
  /^\s+(this\.#\w+( =|\+\+|--|\.(set|delete|push)\()|entry\.\w+\.(set|delete)\(|if \(.*\) return\b.*;$|due\.add|late\.add|required--)/;

export async function accounting(say: (line: string) => void): Promise<boolean> {
  const lines = readFileSync(SOURCE, 'utf8').split('\n');
  const survivors: string[] = [];
  let mutants = 0;
  const dir = mkdtempSync(join(tmpdir(), 'molt-accounting-'));
  for (const [i, line] of lines.entries()) {
    if (!STATEMENT.test(line) || line.includes('invariant(')) continue;
    mutants++;
    const path = join(dir, `without_line_${i + 1}.ts`);
    writeFileSync(
      path,
      lines
        .map((text, k) => (k === i ? '' : text))
        .join('\n')
        .replaceAll("'./types.ts'", TYPES),
    );
    const child = spawn(process.execPath, ['--import', 'tsx', fileURLToPath(import.meta.url), path], {
      stdio: 'ignore',
    });
    const limit = setTimeout(() => child.kill('SIGKILL'), LIMIT_MS);
    const code = await new Promise((done) => child.once('close', done));
    clearTimeout(limit);
    if (code === SURVIVED) survivors.push(`line ${i + 1}: ${line.trim()}`);
  }
  rmSync(dir, { recursive: true, force: true });
  for (const survivor of survivors) say(`not missed: ${survivor}`);
  say(`prove accounting: ${mutants - survivors.length} of ${mutants} lines of ${SOURCE} are missed when left out`);
  return survivors.length === 0 && mutants > 0;
}

/** The random runs with another buffer.ts: throws where one fails. */
async function tryMutant(path: string): Promise<void> {
  const module = (await import(pathToFileURL(resolve(path)).href)) as { Buffer: typeof Buffer };
  for (let seed = 1; seed <= CASES; seed++) {
    const c = drawCase(seed);
    checkCase(c, await runCase(c, module.Buffer));
  }
}

const [mutant] = process.argv.slice(2);
if (process.argv[1] === fileURLToPath(import.meta.url) && mutant) {
  await tryMutant(mutant);
  process.exit(SURVIVED);
}
