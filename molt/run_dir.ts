/**
 * The directory of a run: made or reopened, held by one controller at a time, given back when nothing was trained.
 *
 *   runs/<name>/  config.json  controller.pid  logs/  ledger/  metrics.jsonl  checkpoints/  weights/
 *
 * `controller.pid` names the process that writes here; another run is refused while that one lives. What only running
 * workers need (weights, rendezvous files) and what is half saved is removed at the end. Whether it can be written,
 * preflight.ts has checked. Called by loop.ts and start.ts.
 */
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { basename, dirname, join, resolve } from 'node:path';
import { writeSynced } from './checkpoint.ts';
import { type Config, ConfigError, changedOptions, configJson } from './config.ts';

/** Make or reopen it, with config.json and controller.pid in it. Returns its absolute path. Throws ConfigError. */
export function openRunDir(config: Config): string {
  const { options } = config;
  let dir = options['run.dir'];
  try {
    if (dir === '') dir = newNumberedDir(basename(config.recipePath).replace(/\.[cm]?[jt]s$/, ''));
    mkdirSync(join(dir, 'logs'), { recursive: true });
    refuseInUse(dir);
    if (options['run.resume']) {
      const saved = JSON.parse(readFileSync(join(dir, 'config.json'), 'utf8'));
      for (const line of changedOptions(saved, config)) console.log(`Changed since the run began: ${line}`);
    }
    removeLeftovers(dir); // of a controller that was killed
    writeSynced(join(dir, 'config.json'), configJson(config));
    writeFileSync(join(dir, 'controller.pid'), `${process.pid}\n`);
  } catch (error) {
    if (error instanceof ConfigError) throw error;
    throw new ConfigError([`--run.dir ${dir}: cannot be used: ${(error as Error).message}`]);
  }
  return resolve(dir);
}

/** Throws ConfigError while another controller lives that writes there. */
export function refuseInUse(dir: string): void {
  const pidFile = join(dir, 'controller.pid');
  const pid = existsSync(pidFile) ? readFileSync(pidFile, 'utf8').trim() : '';
  if (isAlive(Number(pid))) throw new ConfigError([`--run.dir ${dir}: in use by process ${pid}`]);
}

/** Once no worker runs any more. May be called twice. */
export function closeRunDir(runDir: string): void {
  removeLeftovers(runDir);
  rmSync(join(runDir, 'controller.pid'), { force: true });
}

/** Where the rendezvous file of this process's trainer ranks lies. */
export function rendezvousPath(runDir: string): string {
  return join(runDir, `rendezvous-${process.pid}`);
}

/** Take back a new directory in which nothing happened, so that its name can be used again. */
export function discardRunDir(runDir: string): void {
  for (const name of readdirSync(runDir)) rmSync(join(runDir, name), { recursive: true, force: true });
  rmSync(runDir, { recursive: true, force: true });
  const parent = dirname(runDir);
  if (basename(parent) === 'runs' && readdirSync(parent).length === 0) rmSync(parent, { recursive: true });
}

function removeLeftovers(runDir: string): void {
  for (const name of readdirSync(runDir)) {
    if (name === 'weights' || name.startsWith('rendezvous-'))
      rmSync(join(runDir, name), { recursive: true, force: true });
  }
  const checkpoints = join(runDir, 'checkpoints');
  for (const name of existsSync(checkpoints) ? readdirSync(checkpoints) : [])
    if (name.endsWith('.tmp')) rmSync(join(checkpoints, name), { recursive: true, force: true });
}

function newNumberedDir(recipe: string): string {
  mkdirSync('runs', { recursive: true });
  const taken = readdirSync('runs').flatMap((name) =>
    name.startsWith(`${recipe}-`) ? [Number(name.slice(recipe.length + 1))] : [],
  );
  for (let n = Math.max(0, ...taken.filter(Number.isInteger)) + 1; ; n++) {
    const dir = join('runs', `${recipe}-${String(n).padStart(3, '0')}`);
    try {
      mkdirSync(dir); // fails when another run has just taken the number
      return dir;
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== 'EEXIST') throw error;
    }
  }
}

function isAlive(pid: number): boolean {
  if (!Number.isInteger(pid) || pid <= 0 || pid === process.pid) return false;
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === 'EPERM';
  }
}
