/**
 * The code blocks of README.md, to be run as they stand there.
 *
 * A block of bash, ts or json has a comment in the line above that says what becomes of it:
 *
 *   <!-- run -->          test/readme_commands.test.ts runs it
 *   <!-- prove -->        `npm run prove readme` does: it takes minutes
 *   <!-- file: PATH -->   it is the content of that file, for the commands behind it
 *   <!-- shown: WHY -->   nobody runs it, because
 *
 * Commands run in a copy of the repository, since a reader types them into one. Called by that test and by prove.ts.
 */
import { spawn } from 'node:child_process';
import { cpSync, existsSync, mkdirSync, mkdtempSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, relative, resolve } from 'node:path';

export interface Block {
  readonly language: string;
  readonly mark: string | null; // what stands in the comment; null where there is none
  readonly text: string;
  readonly line: number; // of the README, from 1
}

/** All blocks that a reader could take for something to run. */
export function readBlocks(readme: string): Block[] {
  const pattern = /(?:<!-- ([^\n]*?) -->\n)?```(bash|ts|json)\n([\s\S]*?)```/g;
  return Array.from(readme.matchAll(pattern), ({ 1: mark, 2: language = '', 3: text = '', index }) => ({
    language,
    mark: mark ?? null,
    text,
    line: readme.slice(0, index).split('\n').length,
  }));
}

const ROOT = resolve(import.meta.dirname, '..');
const INSTALLED = ['node_modules', '.venv', '.cache']; // shared with the copy
const OURS = new Set([...INSTALLED, '.git', 'runs', '.pytest_cache', '.ruff_cache']);

/** A copy of the repository as a reader has it. */
export function workingCopy(): { readonly dir: string; readonly remove: () => void } {
  const dir = mkdtempSync(join(tmpdir(), 'molt-readme-'));
  cpSync(ROOT, dir, { recursive: true, filter: (path) => !OURS.has(relative(ROOT, path)) });
  for (const name of INSTALLED) if (existsSync(join(ROOT, name))) symlinkSync(join(ROOT, name), join(dir, name));
  return { dir, remove: () => rmSync(dir, { recursive: true, force: true }) };
}

/** Writes the file that a block is. */
export function writeBlock(block: Block, dir: string): void {
  const path = join(dir, (block.mark ?? '').replace('file: ', ''));
  mkdirSync(dirname(path), { recursive: true });
  writeFileSync(path, block.text);
}

/** Runs a block of shell commands; the first that fails ends it. */
export function runBlock(text: string, cwd: string): Promise<{ code: number | null; output: string }> {
  const child = spawn('bash', ['-euo', 'pipefail', '-c', text], { cwd, stdio: ['ignore', 'pipe', 'pipe'] });
  let output = '';
  for (const stream of [child.stdout, child.stderr])
    stream.on('data', (data: Buffer) => {
      output += data.toString();
    });
  return new Promise((done) => child.on('close', (code) => done({ code, output })));
}
