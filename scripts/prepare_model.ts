/**
 * Make the model directory of a recipe, once.
 *
 *   DIRECTORY.building-PID -> fill -> command DIRECTORY.building-PID -> renamed to DIRECTORY
 *
 * Invariants
 *   1. A directory that exists is complete: it is built next to its place and renamed. Starts at the same time each
 *      build one, and the first to finish wins; so DIRECTORY is named by a hash of everything that decides its content.
 *   2. Nothing half-made stays: what failed is removed now, what a killed start left by the next one.
 *   3. The command ends when this process does.
 * Called by `prepare` of recipes (quickstart.ts, smollm2.ts).
 */
import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, renameSync, rmSync } from 'node:fs';
import { dirname, relative, resolve } from 'node:path';
import { createInterface } from 'node:readline';
import type { Options } from '../molt/config.ts';

export interface Model {
  readonly directory: string;
  readonly command: readonly string[]; // gets `--end-with-stdin` and the directory as its last arguments
  readonly fill?: (building: string) => void; // what the command finds in the directory
  readonly announce: string; // what is about to happen, and how long it takes
  readonly name: string; // of the command, for "NAME failed (exit 1)"
}

/** Whether the run needs the recipe's own policy: not with another one, and not when nothing loads a model. */
export function needsModel(options: Options, directory: string): boolean {
  const kinds = [options['engine.kind'], options['trainer.kind'], options['tokenizer.kind']];
  return resolve(options['actor.model_name_or_path']) === directory && kinds.some((kind) => kind !== 'simulated');
}

/** 16 hexadecimal digits of the texts and of the files' content. */
export function hashOf(texts: readonly string[], files: readonly string[]): string {
  const hash = createHash('sha256');
  for (const text of texts) hash.update(text);
  for (const file of files) hash.update(existsSync(file) ? readFileSync(file) : '');
  return hash.digest('hex').slice(0, 16);
}

/** Make the model unless it is there. Throws with the command's last words when that fails. */
export async function makeModel(model: Model, say: (line: string) => void): Promise<void> {
  const { directory } = model;
  const place = relative(process.cwd(), directory);
  if (existsSync(directory)) return say(`policy: ${place}, made before`);
  const started = Date.now();
  removeAbandoned(dirname(directory));
  const building = `${directory}.building-${process.pid}`;
  mkdirSync(building, { recursive: true });
  try {
    say(`policy: ${model.announce}`);
    model.fill?.(building);
    await run(model.name, [...model.command, '--end-with-stdin', building], (line) => say(`policy: ${line}`));
    try {
      renameSync(building, directory);
    } catch (error) {
      if (!existsSync(directory)) throw error; // else another start was faster, with the same result
    }
    say(`policy: ${place}, made in ${((Date.now() - started) / 1000).toFixed(0)} s`);
  } finally {
    rmSync(building, { recursive: true, force: true });
  }
}

/** What starts that were killed have left. */
function removeAbandoned(parent: string): void {
  if (!existsSync(parent)) return;
  for (const name of readdirSync(parent)) {
    const pid = Number(/\.building-(\d+)$/.exec(name)?.[1]);
    if (Number.isInteger(pid) && !isAlive(pid)) rmSync(`${parent}/${name}`, { recursive: true, force: true });
  }
}

function isAlive(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code !== 'ESRCH';
  }
}

/** Each line of output goes to `say`. Rejects with the last lines of stderr. */
export function run(name: string, command: readonly string[], say: (line: string) => void): Promise<void> {
  const [program = '', ...args] = command;
  const settings = {
    OMP_NUM_THREADS: '1',
    TOKENIZERS_PARALLELISM: 'false',
    HF_HUB_OFFLINE: '1',
    PYTHONUNBUFFERED: '1',
  };
  const child = spawn(program, args, { env: { ...process.env, ...settings }, stdio: ['pipe', 'pipe', 'pipe'] });
  const errors: string[] = [];
  createInterface({ input: child.stdout }).on('line', say);
  createInterface({ input: child.stderr }).on('line', (line) => errors.push(line));
  return new Promise((done, fail) => {
    child.on('error', (error) => fail(new Error(`Cannot run ${program}: ${error.message}`)));
    child.on('close', (code, signal) => {
      const words = errors.slice(-20).join('\n');
      if (code === 0) done();
      else fail(new Error(`${name} failed (${signal ?? `exit ${code}`}):${errors.length > 1 ? '\n' : ' '}${words}`));
    });
  });
}
