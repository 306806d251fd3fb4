/**
 * Kill -9 of random processes at random moments, until the run has come to its end all the same:
 *
 *   npm run prove chaos [simulated KILLS] [real KILLS] [seed N]        (100 and 12)
 *
 * One run in an endless loop of trouble: every now and then a kind of process is drawn (controller, engine, trainer, runner,
 * tokenizer) and one of it ends with SIGKILL. A controller that is gone is started again with --resume, one that gave up
 * (exit 1) too. When all kills are done the run may finish; then the audit looks at its ledger.
 *
 *   lost     rollouts that had ended more than a second before a kill (the agent notes each in a synced file of its own) and
 *            are in the ledger neither as finished nor as evaluated, nor of a group that was dropped with a reason
 *   doubled  groups that were trained twice
 *   hangs    times that no step was done for HANG_S
 *
 * No process may be left that writes to a log of the run.
 * The last line of each part is JSON {kills, lost, doubled, hangs}.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, readlinkSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { readLedger } from '../molt/ledger.ts';
import { random } from '../test/pool_cases.ts';

const KINDS = ['controller', 'engine', 'trainer', 'runner', 'tokenizer'] as const;
type Kind = (typeof KINDS)[number];
const HANG_S = 90;
const OLD_MS = 1000;
const ORPHAN_MS = 3000;
const AUDIT = 'molt/audit.ts';

export interface Part {
  readonly name: string;
  readonly recipe: string;
  readonly args: readonly string[];
  readonly kills: number;
  readonly everyMs: readonly [number, number]; // between kills
  readonly seed: number;
  readonly reward: number; // held-out, at the end, at least
}

export interface Outcome {
  readonly kills: number;
  readonly lost: number;
  readonly doubled: number;
  readonly hangs: number;
  readonly isGood: boolean;
}

export async function chaos(part: Part, say: (line: string) => void = console.log): Promise<Outcome> {
  const draw = random(part.seed);
  const dir = mkdtempSync(join(tmpdir(), 'molt-chaos-'));
  const runDir = join(dir, 'run');
  const notes = join(dir, 'ended.txt');
  const counts = new Map<Kind, number>();
  const lost = new Set<string>();
  const times: number[] = []; // of kills
  let [kills, hangs, lives, gaveUp] = [0, 0, 0, 0];
  let run: Run | null = null;
  try {
    for (;;) {
      run ??= start(part, runDir, notes, lives++ > 0);
      const [low, high] = part.everyMs;
      if (kills < part.kills) await Promise.race([sleep(low + draw() * (high - low)), run.exit]);
      else await Promise.race([run.exit, hung(runDir)]);
      const code = run.exited;
      if (code === 0) break;
      if (code !== null) {
        if (code !== 'SIGKILL') {
          gaveUp++;
          say(
            `the run gave up with ${code}: ${/^(The run stopped|Cannot|--)[\s\S]{0,300}/m.exec(run.out)?.[0] ?? run.out.slice(-500)}`,
          );
        }
        if (gaveUp > 5) throw new Error(`The run gave up ${gaveUp} times; last:\n${run.out}`);
        run = null;
        continue;
      }
      if (kills >= part.kills) {
        hangs++;
        say(`no step for ${HANG_S} s; the run said last:\n${run.out.slice(-4000)}`);
        run.child.kill('SIGKILL');
        await run.exit;
        run = null;
        if (hangs > 3) break;
        continue;
      }
      const kind = KINDS[Math.floor(draw() * KINDS.length)] as Kind;
      const victims = kind === 'controller' ? [run.child.pid ?? 0] : workersOf(run.child.pid ?? 0, kind);
      const victim = victims[Math.floor(draw() * victims.length)];
      if (victim === undefined) continue; // it is being started: another time
      const at = Date.now();
      try {
        process.kill(victim, 'SIGKILL');
      } catch {
        continue; // it had just ended
      }
      kills++;
      counts.set(kind, (counts.get(kind) ?? 0) + 1);
      if (kind === 'controller') await run.exit;
      times.push(at);
      for (const id of missing(runDir, notes, times)) lost.add(id);
    }
    const { doubled, steps, reward } = result(runDir);
    const orphans = await orphansOf(runDir);
    const audit = existsSync(AUDIT) ? await audited(runDir) : 'not there';
    const isGood =
      lost.size === 0 &&
      doubled === 0 &&
      hangs === 0 &&
      orphans.length === 0 &&
      reward >= part.reward &&
      audit === 'ok';
    const who = [...counts].map(([kind, n]) => `${n} ${kind}`).join(', ');
    say(
      `prove chaos ${part.name}: ${kills} kills (${who}), ${lives} lives, ${gaveUp} of them gave up, ${steps} steps, held-out ${reward.toFixed(3)}, audit ${audit}, left behind ${orphans.join(' ') || 'nothing'}${lost.size > 0 ? `, lost ${[...lost].slice(0, 5).join(' ')}` : ''}`,
    );
    say(JSON.stringify({ kills, lost: lost.size, doubled, hangs }));
    return { kills, lost: lost.size, doubled, hangs, isGood };
  } finally {
    run?.child.kill('SIGKILL');
    if (process.env.MOLT_DEBUG) say(`kept ${dir}`);
    else rmSync(dir, { recursive: true, force: true });
  }
}

// ---- The run ----

interface Run {
  readonly child: ChildProcess;
  readonly exit: Promise<void>;
  exited: number | string | null;
  out: string;
}

function start(part: Part, runDir: string, notes: string, isResumed: boolean): Run {
  // A controller that was killed before it had made its directory begins anew.
  const resume = isResumed && existsSync(join(runDir, 'config.json')) ? ['--resume'] : [];
  if (resume.length === 0) rmSync(runDir, { recursive: true, force: true });
  const args = ['--import', 'tsx', 'molt/loop.ts', part.recipe, '--run.dir', runDir, ...part.args, ...resume];
  const child = spawn(process.execPath, args, { env: { ...process.env, MOLT_ENDED: notes } });
  const run: Run = { child, exit: new Promise((done) => child.once('close', () => done())), exited: null, out: '' };
  for (const stream of [child.stdout, child.stderr]) {
    stream?.on('data', (data: Buffer) => {
      run.out = (run.out + data.toString()).slice(-20_000);
    });
  }
  child.once('exit', (code, signal) => {
    run.exited = code ?? signal ?? 'gone';
  });
  return run;
}

/** Process ids of the workers of a kind that a controller has now. */
function workersOf(controller: number, kind: Kind): number[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .map(Number)
    .filter((pid) => {
      try {
        const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
        const [state, parent] = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
        if (Number(parent) !== controller || state === 'Z') return false;
        return readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes(`\0--worker-id\0${kind}-`);
      } catch {
        return false; // it ended while we looked
      }
    });
}

/** Workers that are still there a while after the last controller has ended, by the log they write to. */
async function orphansOf(runDir: string): Promise<number[]> {
  await sleep(ORPHAN_MS);
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .map(Number)
    .filter((pid) => {
      try {
        return readlinkSync(`/proc/${pid}/fd/1`).startsWith(join(runDir, 'logs'));
      } catch {
        return false; // it ended while we looked
      }
    });
}

/** Resolves when no step was done for HANG_S. */
async function hung(runDir: string): Promise<void> {
  for (let [last, since] = ['', Date.now()]; Date.now() - since < HANG_S * 1000; ) {
    const path = join(runDir, 'metrics.jsonl');
    const now = existsSync(path) ? readFileSync(path, 'utf8') : '';
    if (now !== last) [last, since] = [now, Date.now()];
    await sleep(500);
  }
}

// ---- What became of it ----

/** Rollouts that had ended, with no kill within OLD_MS after it, and that the ledger does not know. */
function missing(runDir: string, notes: string, kills: readonly number[]): string[] {
  if (!existsSync(notes)) return [];
  const known = new Set<string>();
  const dropped = new Set<string>();
  for (const { event } of readLedger(runDir)) {
    if (event.kind === 'finished' || event.kind === 'evaluated') known.add(event.rolloutId);
    if (event.kind === 'dropped') dropped.add(event.groupId);
  }
  return readFileSync(notes, 'utf8')
    .split('\n')
    .flatMap((line) => {
      const [id = '', time = ''] = line.split(' ');
      const isFresh = kills.some((kill) => Number(time) > kill - OLD_MS && Number(time) <= kill + OLD_MS);
      if (
        id === '' ||
        isFresh ||
        Number(time) > Date.now() - OLD_MS ||
        known.has(id) ||
        dropped.has(id.replace(/-\d+(r\d+)?$/, ''))
      )
        return [];
      return [id];
    });
}

function result(runDir: string): { doubled: number; steps: number; reward: number } {
  const trained = new Map<string, number>();
  for (const { event } of readLedger(runDir))
    if (event.kind === 'batch') for (const id of event.groups) trained.set(id, (trained.get(id) ?? 0) + 1);
  const lines = readFileSync(join(runDir, 'metrics.jsonl'), 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as Record<string, number | null>);
  return {
    doubled: [...trained.values()].filter((n) => n > 1).length,
    steps: lines.filter((line) => line.eval_reward_mean === undefined).length,
    reward: lines.findLast((line) => typeof line.eval_reward_mean === 'number')?.eval_reward_mean ?? Number.NaN,
  };
}

async function audited(runDir: string): Promise<string> {
  const child = spawn(process.execPath, ['--import', 'tsx', AUDIT, runDir]);
  let out = '';
  child.stdout.on('data', (data: Buffer) => {
    out += data.toString();
  });
  child.stderr.on('data', (data: Buffer) => {
    out += data.toString();
  });
  const code = await new Promise((done) => child.once('close', done));
  return code === 0 ? 'ok' : `FAILED:\n${out}`;
}
