/**
 * What is saved, when it is complete, how a run resumes.
 *
 *   checkpoints/step-N.tmp/{trainer/..., loop.json} -> manifest.json (file sizes, synced) -> renamed to step-N
 *
 * Invariants
 *   1. A directory without `.tmp` and with a manifest whose files have the sizes it names is complete; nothing else
 *      is ever restored.
 *   2. Saving never touches an older checkpoint; pruning happens after the rename.
 * The trainer writes its share (weights, optimizer, RNG); loop.json holds what the controller needs: step, policy
 * version, position in the data, its hash. Called by loop.ts.
 */
import {
  closeSync,
  existsSync,
  fsyncSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { join, relative } from 'node:path';
import type { Position } from './data.ts';
import { type Trainer, TrainerLost } from './trainer.ts';

export interface LoopState {
  readonly step: number; // steps done
  readonly version: number;
  readonly data: Position; // of the prompt stream, with the hash of what it reads
  readonly heldOutHash: string; // of what is evaluated; '' when nothing is
  readonly dispatched: number; // groups ever admitted, which numbers them
}

interface Manifest {
  readonly step: number;
  readonly files: readonly { readonly path: string; readonly bytes: number }[];
}

/** Save a complete checkpoint; returns its directory. Rejects with the path when the disk does not take it. */
export async function saveCheckpoint(args: {
  runDir: string;
  trainer: Trainer;
  state: LoopState;
  keep: number;
  exportHf: boolean;
}): Promise<string> {
  const { runDir, trainer, state, keep, exportHf } = args;
  const final = join(runDir, 'checkpoints', `step-${state.step}`);
  const temporary = `${final}.tmp`;
  rmSync(temporary, { recursive: true, force: true });
  mkdirSync(join(temporary, 'trainer'), { recursive: true });
  try {
    await trainer.save(state.step, join(temporary, 'trainer'));
    if (exportHf) await trainer.export(join(temporary, 'hf'));
    writeSynced(join(temporary, 'loop.json'), state);
    const files = listFiles(temporary).map((path) => ({ path: relative(temporary, path), bytes: statSync(path).size }));
    writeSynced(join(temporary, 'manifest.json'), { step: state.step, files } satisfies Manifest);
  } catch (error) {
    if (error instanceof TrainerLost) throw error; // it is saved again once the trainer is back
    throw new Error(`Cannot save checkpoint ${final}: ${(error as Error).message}`);
  }
  rmSync(final, { recursive: true, force: true }); // the same step saved before a resume
  renameSync(temporary, final);
  syncDirectory(join(runDir, 'checkpoints'));
  prune(runDir, keep, state.step);
  return final;
}

export interface Checkpoint {
  readonly path: string;
  readonly state: LoopState;
}

/** The newest complete checkpoint of a run, null when there is none. `onSkipped`: incomplete ones, with what is wrong. */
export function newestCheckpoint(runDir: string, onSkipped: (line: string) => void = () => {}): Checkpoint | null {
  for (const { path } of stepDirectories(runDir).reverse()) {
    const problem = incomplete(path);
    if (problem === null)
      return { path, state: JSON.parse(readFileSync(join(path, 'loop.json'), 'utf8')) as LoopState };
    onSkipped(`${path}: ${problem}`);
  }
  return null;
}

/** Step of the oldest checkpoint that is kept: a resume never needs what came before it. */
export function oldestCheckpointStep(runDir: string): number {
  return stepDirectories(runDir)[0]?.step ?? 0;
}

/** What is wrong with a checkpoint directory, null when it is complete. */
function incomplete(path: string): string | null {
  if (!existsSync(join(path, 'manifest.json'))) return 'no manifest.json';
  let name = 'manifest.json';
  let files: Manifest['files'];
  try {
    ({ files } = JSON.parse(readFileSync(join(path, name), 'utf8')) as Manifest);
    name = 'loop.json';
    if (existsSync(join(path, name))) JSON.parse(readFileSync(join(path, name), 'utf8'));
  } catch (error) {
    return `${name} does not parse: ${(error as Error).message}`;
  }
  for (const file of files) {
    const at = join(path, file.path);
    if (!existsSync(at)) return `${file.path} is missing`;
    const bytes = statSync(at).size;
    if (bytes !== file.bytes) return `${file.path} has ${bytes} bytes, expected ${file.bytes}`;
  }
  return null;
}

function prune(runDir: string, keep: number, newest: number): void {
  if (keep <= 0) return;
  const older = stepDirectories(runDir).filter((d) => d.step < newest);
  for (const { path } of older.slice(0, Math.max(0, older.length - (keep - 1))))
    rmSync(path, { recursive: true, force: true });
}

/** Ascending by step. */
function stepDirectories(runDir: string): { step: number; path: string }[] {
  const dir = join(runDir, 'checkpoints');
  if (!existsSync(dir)) return [];
  return readdirSync(dir)
    .flatMap((name) => {
      const step = /^step-(\d+)$/.exec(name)?.[1];
      return step === undefined ? [] : [{ step: Number(step), path: join(dir, name) }];
    })
    .sort((a, b) => a.step - b.step);
}

function listFiles(dir: string): string[] {
  return readdirSync(dir, { withFileTypes: true }).flatMap((entry) => {
    const path = join(dir, entry.name);
    return entry.isDirectory() ? listFiles(path) : [path];
  });
}

/** Write JSON and wait until it is on the disk. */
export function writeSynced(path: string, value: unknown): void {
  writeFileSync(path, `${JSON.stringify(value, null, 2)}\n`, { flush: true });
}

function syncDirectory(path: string): void {
  const fd = openSync(path, 'r');
  try {
    fsyncSync(fd);
  } finally {
    closeSync(fd);
  }
}
