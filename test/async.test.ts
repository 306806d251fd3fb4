/** The asynchronous loop as a user starts it, on simulated workers: staleness, partial rollout, late groups, replay, crashes. */
import { spawn } from 'node:child_process';
import {
  appendFileSync,
  cpSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  rmSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { type Entry, readLedger } from '../molt/ledger.ts';

const RECIPE = 'test/fixtures/recipe_simulated.ts';
const LIMIT_MS = 60_000;
const CORRECTED = ['--algo.advantage.is_correction_level', 'token'];
const PARTIAL = ['--train.partial_rollout_enable', 'true', ...CORRECTED];
const NONE = ['--eval.dataset', 'none'];

let dir: string;
beforeAll(() => {
  dir = mkdtempSync(join(tmpdir(), 'molt-async-'));
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

interface Line {
  readonly [key: string]: number | null;
}
interface Ran {
  readonly exit: number | string;
  readonly out: string;
}

/** `onOutput` gets all that was printed so far, and a way to end the controller at once. */
function run(
  name: string,
  args: readonly string[],
  onOutput: (out: string, kill: () => void) => void = () => {},
): Promise<Ran> {
  const child = spawn(process.execPath, [
    '--import',
    'tsx',
    'molt/loop.ts',
    RECIPE,
    '--run.dir',
    join(dir, name),
    ...args,
  ]);
  let out = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (data: Buffer) => {
      out += data.toString();
      onOutput(out, () => child.kill('SIGKILL'));
    });
  }
  return new Promise((resolve) => child.on('close', (code, signal) => resolve({ exit: code ?? signal ?? '', out })));
}

const lines = (name: string, file = 'metrics.jsonl') =>
  readFileSync(join(dir, name, file), 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as Line);
const steps = (name: string) => lines(name).filter((line) => line.eval_reward_mean === undefined);
const ledger = (name: string): Entry[] => [...readLedger(join(dir, name))];
type Kind<K extends Entry['event']['kind']> = Extract<Entry['event'], { kind: K }>;
const events = <K extends Entry['event']['kind']>(name: string, kind: K): Kind<K>[] =>
  ledger(name).flatMap(({ event }) => (event.kind === kind ? [event as Kind<K>] : []));
/** Versions of the sampled tokens of each finished rollout. */
const versionsOf = (name: string) =>
  ledger(name).flatMap(({ event, arrays }) =>
    event.kind === 'finished' ? [[...new Set(arrays.versions)].filter((version) => version >= 0)] : [],
  );
const slow = (latency: Record<string, number>) => ['--simulated.script', JSON.stringify({ latency_ms: latency })];

test(
  'partial rollout: trajectories cross refits, no token is older than the bound, every group is decided once',
  async () => {
    const args = [...NONE, ...PARTIAL, '--train.max_staleness', '2', '--train.num_steps', '8', ...slow({ step: 15 })];
    const { exit, out } = await run('partial', args);
    expect(exit, out).toBe(0);
    const versions = versionsOf('partial');
    expect(versions.some((list) => list.length > 1)).toBe(true);
    const staleness = steps('partial').map((line) => line.staleness_max ?? 9);
    expect(Math.max(...staleness)).toBeLessThanOrEqual(2);
    expect(Math.max(...staleness)).toBeGreaterThanOrEqual(1);
    expect(steps('partial').map((line) => line.policy_version)).toEqual([1, 2, 3, 4, 5, 6, 7, 8]);
    const dispatched = events('partial', 'dispatched').map((e) => e.groupId);
    const trained = events('partial', 'batch').flatMap((e) => e.groups);
    expect(trained.toSorted()).toEqual(dispatched.toSorted());
  },
  LIMIT_MS,
);

test(
  'without partial rollout the pool drains before a refit: every trajectory is of one version',
  async () => {
    const args = [...NONE, ...CORRECTED, '--train.max_staleness', '1', '--train.num_steps', '5', ...slow({ step: 5 })];
    const { exit, out } = await run('drain', args);
    expect(exit, out).toBe(0);
    expect(versionsOf('drain').every((list) => list.length === 1)).toBe(true);
    expect(steps('drain').some((line) => (line.staleness_max ?? 0) === 1)).toBe(true);
    expect(steps('drain').some((line) => (line.time_drain_s ?? 0) > 0)).toBe(true);
  },
  LIMIT_MS,
);

test(
  'batch_order and late decide what a batch holds',
  async () => {
    const base = [
      ...NONE,
      ...PARTIAL,
      '--train.max_staleness',
      '1',
      '--train.num_steps',
      '6',
      ...slow({ step: 5, run: 30 }),
    ];
    const orderOf = (name: string) => events(name, 'batch').flatMap((e) => e.groups.map((id) => Number(id.slice(1))));
    const inOrder = await run('ordered', [...base, '--train.batch_order', 'dispatch_order']);
    expect(inOrder.exit, inOrder.out).toBe(0);
    expect(orderOf('ordered')).toEqual(orderOf('ordered').toSorted((a, b) => a - b));
    // One prompt in four takes far longer than a step: with `drop` its groups are given up, and counted.
    const slowOnes = ['--data.prompt_dataset', 'test/fixtures/prompts_some_slow.ts'];
    const dropped = await run('late', [...base, ...slowOnes, '--train.late', 'drop']);
    expect(dropped.exit, dropped.out).toBe(0);
    const stale = events('late', 'dropped').filter((e) => e.reason === 'stale');
    expect(stale.length).toBeGreaterThan(0);
    const counted = steps('late').reduce((n, line) => n + (line.dropped_stale ?? 0), 0);
    expect(counted).toBe(stale.length);
    expect(steps('late').every((line) => (line.staleness_max ?? 9) <= 1)).toBe(true);
    expect(steps('late').some((line) => line.stale_tokens_mean !== undefined)).toBe(true);
  },
  2 * LIMIT_MS,
);

test(
  'killed after step 7 with a checkpoint at 4: steps 5 to 7 are trained again without a new token, to the bit',
  async () => {
    for (const [name, mode] of [
      ['sync', []],
      ['async', [...PARTIAL, '--train.max_staleness', '2']],
    ] as const) {
      const args = [
        ...mode,
        '--train.num_steps',
        '10',
        '--ckpt.save_steps',
        '4',
        '--eval.steps',
        '3',
        ...slow({ step: 3 }),
      ];
      const killed = await run(name, args, (out, kill) => /^step +7\//m.test(out) && kill());
      expect(killed.exit).toBe('SIGKILL');
      cpSync(join(dir, name), join(dir, `${name}-killed`), { recursive: true });
      const before = events(name, 'finished').map((e) => e.rolloutId);
      const { exit, out } = await run(name, [...args, '--resume']);
      expect(exit, out).toBe(0);
      expect(out).toMatch(/Trained steps 5 to [78] again from the ledger: the same to the bit/);
      const told = (line: Line) => Object.fromEntries(Object.entries(line).filter(([key]) => !key.startsWith('time_')));
      const was = steps(`${name}-killed`);
      const is = steps(name);
      expect(is.map((line) => line.step)).toEqual([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
      for (const line of was) expect(told(is[(line.step ?? 0) - 1] as Line)).toEqual(told(line));
      // No group is used twice, and no rollout that had finished is run again.
      const trained = events(name, 'batch').flatMap((e) => e.groups);
      expect(new Set(trained).size).toBe(trained.length);
      const finished = events(name, 'finished').map((e) => e.rolloutId);
      expect(new Set(finished).size).toBe(finished.length);
      expect(finished).toEqual(expect.arrayContaining(before));
    }
  },
  3 * LIMIT_MS,
);

test(
  '--replay trains the batches of a ledger again: the same to the bit, or as other options make of them',
  async () => {
    const first = await run('original', [...NONE, '--train.num_steps', '4']);
    expect(first.exit, first.out).toBe(0);
    const same = await run('replayed', [...NONE, '--train.num_steps', '4', '--replay', join(dir, 'original')]);
    expect(same.exit, same.out).toBe(0);
    expect(same.out).toContain(`Replayed 4 steps of ${join(dir, 'original')}: the same to the bit`);
    expect(same.out).toContain(`Run directory ${join(dir, 'replayed')}`);
    expect(steps('replayed').map((line) => line.loss)).toEqual(steps('original').map((line) => line.loss));
    const other = await run('otherwise', [
      ...NONE,
      '--train.num_steps',
      '4',
      '--actor.max_norm',
      '0.01',
      '--replay',
      join(dir, 'original'),
    ]);
    expect(other.exit, other.out).toBe(0);
    expect(other.out).toMatch(/Replayed 4 steps of .*: largest difference/);
    // A rank that dies is no bad input.
    const dies = JSON.stringify({ failures: [{ worker: 'trainer-0', what: 'exit', on: 'run', nth: 2 }] });
    const died = await run('died', [...NONE, '--simulated.script', dies, '--replay', join(dir, 'original')]);
    expect(died.exit, died.out).toBe(1);
    expect(died.out).toContain('The replay stopped: Trainer rank trainer-0 is gone');
    const nothing = await run('nothing', ['--replay', join(dir, 'no-such-run')]);
    expect(nothing.exit).toBe(2);
    expect(nothing.out).toContain(`--run.replay ${join(dir, 'no-such-run')}: no ledger`);
  },
  2 * LIMIT_MS,
);

test(
  'what an asynchronous run cannot do is refused at launch, all of it at once',
  async () => {
    const { exit, out } = await run('refused', [
      '--train.max_staleness',
      '1',
      '--algo.dynamic_filtering_range',
      '1',
      '0',
    ]);
    expect(exit).toBe(2);
    expect(out).toContain('needs importance correction (--algo.advantage.is_correction_level token)'.slice(6));
    const idle = await run('idle', ['--train.partial_rollout_enable', 'true', '--train.late', 'drop']);
    expect(idle.exit).toBe(2);
    expect(idle.out).toMatch(/--train\.partial_rollout_enable true: has no effect/);
    expect(idle.out).toMatch(/--train\.late drop: has no effect/);
  },
  LIMIT_MS,
);

test(
  'a ledger that is gone costs what was in flight, no number of a group; one that begins too late ends the run with the step',
  async () => {
    const args = [...NONE, '--train.num_steps', '4'];
    const first = await run('cut', [...NONE, '--train.num_steps', '2']);
    expect(first.exit, first.out).toBe(0);
    rmSync(join(dir, 'cut', 'ledger'), { recursive: true });
    mkdirSync(join(dir, 'cut', 'checkpoints', 'step-9.tmp')); // as a kill leaves it
    const second = await run('cut', [...args, '--resume']);
    expect(second.exit, second.out).toBe(0);
    expect(second.out).toContain('Warning (ledger): there is none');
    expect(events('cut', 'dispatched').map((e) => e.groupId)[0]).toBe('g8');
    expect(readdirSync(join(dir, 'cut', 'checkpoints'))).not.toContain('step-9.tmp');
    // Without a checkpoint nobody knows the weights before step 3.
    for (const step of [2, 4]) rmSync(join(dir, 'cut', 'checkpoints', `step-${step}`, 'manifest.json'));
    const third = await run('cut', [...args, '--resume']);
    expect(third.exit, third.out).toBe(2);
    expect(third.out).toMatch(/Skipped an incomplete checkpoint: .*step-4: no manifest\.json/);
    expect(third.out).toContain('its ledger begins with step 3, so step 1 is lost. Last good checkpoint: none');
  },
  2 * LIMIT_MS,
);

test(
  'a run that is still going is not resumed, and nothing of its ledger is cut off',
  async () => {
    const runDir = join(dir, 'busy');
    mkdirSync(join(runDir, 'ledger'), { recursive: true });
    writeFileSync(join(runDir, 'config.json'), '{}');
    writeFileSync(join(runDir, 'controller.pid'), `${process.pid}\n`);
    const segment = join(runDir, 'ledger', '000001.bin');
    appendFileSync(segment, 'half a record');
    const { exit, out } = await run('busy', [...NONE, '--resume']);
    expect(exit, out).toBe(2);
    expect(out).toContain(`--run.dir ${runDir}: in use by process ${process.pid}`);
    expect(statSync(segment).size).toBe(13);
  },
  LIMIT_MS,
);

test(
  'a run whose prompts are used up before anything was trained has failed',
  async () => {
    const filter = ['--algo.dynamic_filtering_enable', 'true', '--algo.dynamic_filtering_range', '5', '6'];
    const { exit, out } = await run('filtered', [...NONE, ...filter, '--data.num_epochs', '1']);
    expect(exit, out).toBe(1);
    expect(out).toContain(
      'Nothing was trained: the 1 epochs of prompts are used up and all 64 groups of them were dropped',
    );
  },
  LIMIT_MS,
);
