/**
 * What an environment does is its own rollout's outcome and harms no other, and a run in which all do it stops: real
 * runners, real runs. The cases are in fixtures/agent_misbehaves.ts.
 */
import { spawn } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { afterAll, afterEach, beforeAll, describe, expect, test } from 'vitest';
import { FailureWindow } from '../molt/health.ts';
import type { EndReason, Rollout } from '../molt/types.ts';
import { readBlocked } from '../molt/watchdog.ts';
import { RolloutCell, type RolloutCellArgs } from './rollouts.ts';

const LIMIT_MS = 60_000;
const SCORED = ['done', 'length'];
const AGENT = 'test/fixtures/agent_misbehaves.ts';
const BLOCK_MS = 600;

let cell: RolloutCell | undefined;
afterEach(async () => {
  await cell?.close();
  cell = undefined;
});
async function open(over: Partial<RolloutCellArgs> = {}): Promise<RolloutCell> {
  cell = await RolloutCell.open({ agentPath: AGENT, maxRestarts: 0, ...over });
  return cell;
}

/** Label, reason, and what the detail says. */
const ENDINGS: readonly (readonly [string, EndReason, string])[] = [
  ['reset throws text', 'agent_error', 'threw "just text", which is no error'],
  ['reset rejects with undefined', 'agent_error', 'threw undefined, which is no error'],
  ['reset gives nothing', 'agent_error', 'reset() gave undefined, expected text or a list of messages with roles'],
  ['reset gives a circle', 'agent_error', 'circular'],
  ['reset gives a number no wire carries', 'agent_error', 'must be JSON, got 1152921504606847000'],
  ['reset gives a trap', 'agent_error', 'Error: trapped'],
  ['reset hangs', 'deadline', 'no end within 1500 ms'],
  ['throws a trap', 'agent_error', 'a value of type object that cannot be shown'],
  ['throws nothing', 'agent_error', 'threw null, which is no error'],
  ['gives a trap', 'agent_error', 'Error: trapped'],
  ['has a getter that throws', 'agent_error', 'Error: no reward here'],
  ['has a then that throws', 'agent_error', 'Error: no then here'],
  ['rejects with undefined', 'agent_error', 'threw undefined, which is no error'],
  ['gives text', 'agent_error', 'step() returned "right", expected { reward, done, observation? }'],
  ['gives a reward of text', 'invalid_reward', 'step() returned reward "1", expected a finite number'],
  ['gives a reward of NaN', 'invalid_reward', 'step() returned reward NaN, expected a finite number'],
  ['gives a reward of 5n', 'invalid_reward', 'step() returned reward 5, expected a finite number'],
  ['gives too much', 'invalid_reward', 'rewards add up to Infinity, expected a finite number'],
  ['gives an observation of traps', 'agent_error', 'Error: trapped'],
  ['calls exit', 'agent_error', 'called process.exit(3) (test/fixtures/agent_misbehaves.ts:'],
  ['calls exit and goes on', 'agent_error', 'called process.exit(3) (test/fixtures/agent_misbehaves.ts:'],
  ['calls exit later', 'agent_error', 'called process.exit(3) (test/fixtures/agent_misbehaves.ts:'],
  ['calls reallyExit', 'agent_error', 'called process.reallyExit(4) (test/fixtures/agent_misbehaves.ts:'],
  ['calls abort', 'agent_error', 'called process.abort() (test/fixtures/agent_misbehaves.ts:'],
  ['kills itself', 'agent_error', '"SIGKILL") (test/fixtures/agent_misbehaves.ts:'],
  ['throws in a timer', 'agent_error', 'Uncaught, nothing awaits it (uncaughtException): Error: tick'],
  ['throws in a microtask', 'agent_error', 'Uncaught, nothing awaits it (queueMicrotask): Error: micro'],
  ['throws in an emitter', 'agent_error', 'Uncaught, nothing awaits it (uncaughtException): Error: no listener'],
  ['rejects unawaited', 'agent_error', 'A promise that nobody awaits rejected: Error: nobody looks'],
  ['rejects unawaited and later', 'agent_error', 'A promise that nobody awaits rejected: Error: nobody looks later'],
  ['throws when its time is up', 'deadline', 'no end within 1500 ms'],
  ['hangs', 'deadline', 'no end within 1500 ms'],
];
const FINE = ['fine', 'fine by proxy', 'fine, slowly', 'looks whether it lives', 'changes the ids'];

const logOf = (runner = 'runner-0') => readFileSync(join(cell?.cell.dir ?? '', `${runner}.log`), 'utf8');

test(
  'whatever an environment throws, calls or gives ends its own rollout with the cause; the runner and the others go on',
  async () => {
    const { run, events, dispatch } = bound(await open());
    const fine = FINE.map((label) => run(label));
    const late = run('throws after its end');
    const ended = await Promise.all(ENDINGS.map(([label]) => run(label, { deadlineMs: 1500 })));
    for (const [i, [label, reason, detail]] of ENDINGS.entries()) {
      expect(ended[i], label).toMatchObject({ reason, reward: null, attempt: 0 });
      expect(ended[i]?.detail, label).toContain(detail);
    }
    for (const [i, rollout] of (await Promise.all(fine)).entries()) {
      expect(SCORED, `${FINE[i]}: ${rollout.detail}`).toContain(rollout.reason);
      expect(rollout).toMatchObject({ reward: 1, attempt: 0 });
    }
    const changed = (await fine[FINE.indexOf('changes the ids')]) as Rollout;
    const [span] = changed.trajectories[0]?.spans.filter((each) => each.source === 'policy') ?? [];
    expect(changed.trajectories[0]?.ids.slice(span?.from, span?.to).some((id) => id !== 0)).toBe(true);
    expect(SCORED).toContain((await late).reason);
    expect((await late).reward).toBe(1);
    await expect.poll(() => logOf()).toMatch(/Rollout r5 had ended before this: Uncaught.*Error: late/);
    expect(events).toEqual([]);
    expect(dispatch.restarts).toBe(0);
  },
  LIMIT_MS,
);
function bound(open: RolloutCell) {
  const run: RolloutCell['run'] = (...args) => open.run(...args);
  return { run, events: open.events, dispatch: open.dispatch, cell: open.cell };
}

const BLOCKERS = ['blocks', 'blocks after an await', 'blocks in a timer', 'blocks in promises', 'blocks in a program'];

describe('code that blocks the event loop', () => {
  test(
    'ends its own rollout with the place; the others begin again, however often, and no restart is counted',
    async () => {
      const { run, events, dispatch } = bound(await open({ blockMs: BLOCK_MS }));
      const innocent = Array.from({ length: 4 }, () => run('fine, slowly'));
      const culprits = await Promise.all([...BLOCKERS, 'blocks in a getter'].map((label) => run(label)));
      for (const [i, rollout] of culprits.entries()) {
        expect(rollout, BLOCKERS[i]).toMatchObject({ reason: 'agent_blocked', reward: null });
        expect(rollout.detail).toContain('blocked the event loop for more than 0.6 s');
      }
      for (const i of [0, 1, 2, 5])
        expect(culprits[i]?.detail).toMatch(/\n +at .*\bspin .*agent_misbehaves\.ts:\d+:\d+\)/);
      expect(culprits[3]?.detail).toContain('agent_misbehaves.ts');
      expect(culprits[4]?.detail).toContain('its stack cannot be read');
      for (const rollout of await Promise.all(innocent)) {
        expect(rollout.reward, rollout.detail ?? '').toBe(1);
        expect(rollout.attempt).toBe(culprits.length); // more than MAX_ATTEMPTS
      }
      expect(events.filter(({ name }) => name === 'agent_blocked')).toHaveLength(culprits.length);
      expect(events.filter(({ name }) => name === 'runner_lost')).toEqual([]);
      expect(dispatch.restarts).toBe(culprits.length); // of which maxRestarts allows none
    },
    LIMIT_MS,
  );

  test(
    'after its rollout has ended changes that one no more; many short pieces of many rollouts are no blocking',
    async () => {
      const { run, events } = bound(await open({ blockMs: BLOCK_MS }));
      const many = await Promise.all(Array.from({ length: 30 }, () => run('holds the loop for a moment')));
      expect(many.map(({ reward, attempt }) => [reward, attempt])).toEqual(many.map(() => [1, 0]));
      expect(events).toEqual([]);
      const counted = await Promise.all(Array.from({ length: 60 }, () => run('counts calls')));
      expect(Math.max(...counted.map(({ info }) => info.together ?? 0))).toBeLessThanOrEqual(2); // the loop turned between
      const other = run('fine, slowly');
      expect((await run('blocks after its end')).reward).toBe(1);
      expect(await other).toMatchObject({ reward: 1, attempt: 1 });
      expect(events.map(({ name }) => name)).toEqual(['agent_blocked', 'runner_restart']);
    },
    LIMIT_MS,
  );

  test(
    'is not what a stopped process does',
    async () => {
      const { run, events, cell } = bound(await open({ blockMs: 2500 }));
      const pid = runnerOf(cell.bus.endpoint);
      const rollout = run('works for a moment');
      await expect.poll(() => logOf(), { interval: 10, timeout: 10_000 }).toContain('working');
      process.kill(pid, 'SIGSTOP');
      await sleep(3000);
      process.kill(pid, 'SIGCONT');
      expect(await rollout, logOf()).toMatchObject({ reward: 1, attempt: 0 });
      expect(events).toEqual([]);
    },
    LIMIT_MS,
  );
});

test(
  'a turn that takes longer than its deadline ends the rollout, and its request at the engine; others are not touched',
  async () => {
    const { run, cell: open_ } = bound(
      await open({
        turnDeadlineMs: 900,
        engine: { script: { latency_ms: { step: 150 }, reply: [{ when: '', texts: ['a'.repeat(200)] }] } },
      }),
    );
    const [long, short] = await Promise.all([run('fine', {}, 380), run('fine', {}, 1)]);
    expect(short).toMatchObject({ reward: 1 });
    expect(long).toMatchObject({ reason: 'deadline', reward: null });
    expect(long.detail).toBe('turn 0 was not sampled within 0.9 s (rollout.turn_deadline_s)');
    const engine = cell?.generator.engines[0];
    await expect.poll(() => engine?.worker.peer.stats.running).toBe(0);
    expect(open_.bus.counters.lost).toBe(0);
  },
  LIMIT_MS,
);

test(
  'an error that no rollout can be named for ends the runner, which says what it was; its rollouts are tried three times',
  async () => {
    const { run, events } = bound(await open({ maxRestarts: 3 }));
    const other = run('fine, slowly');
    const rollout = await run('lets the module throw');
    const cause =
      'runner-0: the process exited with code 1: This runner ends, since no rollout can be named: Uncaught, nothing awaits it (uncaughtException): Error: of the module';
    expect(rollout).toMatchObject({ reason: 'runner_lost', reward: null, attempt: 3, detail: cause });
    expect(events.filter(({ name }) => name === 'runner_lost').map(({ detail }) => detail.reason)).toEqual([
      cause,
      cause,
      cause,
    ]);
    expect(logOf()).toMatch(/Error: of the module\n +at .*agent_misbehaves\.ts/);
    expect((await other).reason).toBe('runner_lost'); // shared all three attempts
  },
  LIMIT_MS,
);

/** The process of the runner on this bus. */
function runnerOf(endpoint: string): number {
  for (const name of readdirSync('/proc').filter((each) => /^\d+$/.test(each))) {
    try {
      const words = readFileSync(`/proc/${name}/cmdline`, 'utf8').split('\0');
      if (words.includes(endpoint) && words.includes('runner-0')) return Number(name);
    } catch {
      // it ended while we looked
    }
  }
  throw new Error('no runner');
}

// ---- Whole runs ----

describe('a run', () => {
  let dir: string;
  beforeAll(() => {
    dir = mkdtempSync(join(tmpdir(), 'molt-isolation-'));
  });
  afterAll(() => {
    rmSync(dir, { recursive: true, force: true });
    rmSync(FAILING);
  });

  /** Prompts with these labels, in turn; not shuffled. */
  async function start(name: string, labels: readonly string[], ...args: string[]) {
    const prompts = join(dir, `${name}.jsonl`);
    const rows = Array.from({ length: 64 }, (_, i) => ({ input: `case ${i}`, label: labels[i % labels.length] }));
    writeFileSync(prompts, rows.map((row) => `${JSON.stringify(row)}\n`).join(''));
    const words = ['test/fixtures/recipe_simulated.ts', '--run.dir', join(dir, name), '--train.agent_path', AGENT];
    const heldOut = args.includes('--eval.dataset') ? [] : ['--eval.dataset', 'none'];
    const data = ['--data.prompt_dataset', prompts, '--data.shuffle', 'false', ...heldOut];
    const child = spawn(process.execPath, ['--import', 'tsx', 'molt/loop.ts', ...words, ...data, ...args]);
    let out = '';
    for (const stream of [child.stdout, child.stderr])
      stream.on('data', (text: Buffer) => {
        out += text.toString();
      });
    const exit = await new Promise<number | null>((done) => child.on('close', done));
    return { exit, out };
  }

  const FAILING = join(tmpdir(), `molt-isolation-${process.pid}.jsonl`);
  const failing = Array.from({ length: 64 }, (_, i) => ({ input: `held ${i}`, label: 'throws nothing' }));
  writeFileSync(FAILING, failing.map((row) => `${JSON.stringify(row)}\n`).join(''));

  const BLOCK = ['--rollout.block_s', '0.4'];
  test.concurrent.each<[string, readonly string[], readonly string[], number, RegExp]>([
    [
      'blocks',
      ['blocks after an await'],
      BLOCK,
      2,
      /^--train\.agent_path .*: none of its first [4-9] rollouts ended with a reward: agent_blocked: blocked the event loop for more than 0\.4 s \(.*agent_misbehaves\.ts:\d+:\d+\)$/m,
    ],
    [
      'blocks in one or throws in the other',
      ['blocks', 'blocks in a timer', 'throws in a timer', 'gives a reward of NaN'],
      BLOCK,
      2,
      /^--train\.agent_path .*: none of its first \d+ rollouts ended with a reward: agent_/m,
    ],
    [
      'exits',
      ['calls exit', 'calls exit', 'gives a reward of NaN', 'calls exit later'],
      [],
      2,
      /none of its first \d+ rollouts ended with a reward: agent_error: called process\.exit\(3\)/,
    ],
    [
      'fails before the first step, in an evaluation',
      ['fine'],
      ['--eval.dataset', FAILING, '--eval.max_samples', '20'],
      2,
      /none of its first 16 rollouts ended with a reward: agent_error: threw null, which is no error/,
    ],
    [
      'hangs',
      ['hangs'],
      ['--rollout.deadline_s', '0.5'],
      1,
      /^The run stopped: (\d+) of the last \1 rollouts failed, .*Commonest cause \(\1 times\):\ndeadline: no end within 500 ms$/m,
    ],
    [
      'is killed',
      ['is killed'],
      [],
      1,
      /No runner is left after 3 restarts|runner_lost: runner-0: the process was ended by SIGKILL/,
    ],
  ])(
    'whose every rollout %s stops non-zero with the commonest cause',
    async (name, labels, args, code, says) => {
      const { exit, out } = await start(name.replaceAll(/\W+/g, '-'), labels, ...args);
      expect(out).toMatch(says);
      expect(exit, out).toBe(code);
    },
    LIMIT_MS,
  );

  test(
    'with a prompt that always blocks and one that always exits goes on without them, and counts them',
    async () => {
      const labels = ['fine', 'calls exit', 'blocks', 'fine', 'fine', 'fine', 'fine', 'fine'];
      const { exit, out } = await start('some', labels, ...BLOCK, '--train.num_steps', '1');
      expect(exit, out).toBe(0);
      const lines = readFileSync(join(dir, 'some', 'metrics.jsonl'), 'utf8')
        .trim()
        .split('\n');
      const steps = lines.map((line) => JSON.parse(line) as Record<string, number>);
      const counts = steps.map((line) => [
        line.rollouts,
        line.dropped_agent_error,
        line.dropped_agent_blocked,
        line.dropped_incomplete_group,
        line.restarts,
      ]);
      expect(counts).toEqual([[16, 4, 4, 2, 4]]);
    },
    LIMIT_MS,
  );
});

// ---- What stops a run ----

describe('FailureWindow', () => {
  let groups = 0;
  const rollout = (reason: EndReason, detail: string | null = null, groupId = `g${groups++}`): Rollout => ({
    rolloutId: 'r',
    groupId,
    index: 0,
    attempt: 0,
    reason,
    detail,
    reward: reason === 'done' ? 1 : null,
    score: null,
    truncated: false,
    info: {},
    turns: 1,
    trajectories: reason === 'done' ? [EMPTY] : [],
    proofs: [],
    dispatchedVersion: 0,
  });
  const window = (maxRate: number, running = 0) =>
    new FailureWindow({
      maxRate,
      agentPath: 'agent.ts',
      running: () => Array.from({ length: running }, (_, i) => `other${i}`),
    });
  /** How many of them it takes; null = it never stops. */
  const stopsAfter = (it: FailureWindow, reason: EndReason, tries = 200): number | null => {
    for (let n = 1; n <= tries; n++) {
      try {
        it.add(rollout(reason));
        it.check();
      } catch {
        return n;
      }
    }
    return null;
  };

  test('stops after 16 failures in a row, 4 blocked ones, later where max_failure_rate is high, never where it is 1', () => {
    expect([0, 0.1, 0.5, 0.7, 0.9, 1].map((rate) => stopsAfter(window(rate), 'deadline'))).toEqual([
      16,
      16,
      16,
      32,
      64,
      null,
    ]);
    expect([0, 0.5, 0.7, 0.9, 1].map((rate) => stopsAfter(window(rate), 'agent_blocked'))).toEqual([4, 4, 8, 16, null]);
  });

  test('waits for those that began with the row: what fails is done first', () => {
    expect(stopsAfter(window(0.5, 30), 'deadline')).toBe(31);
    expect(stopsAfter(window(0.1, 30), 'deadline')).toBe(16);
  });

  test('a row is broken by a rollout that was judged, not by one that was cancelled', () => {
    const it = window(0.5);
    for (let n = 0; n < 15; n++) it.add(rollout('deadline'));
    it.add(rollout('cancelled'));
    expect(() => it.add(rollout('deadline'))).toThrow('16 of the last 16 rollouts failed');
    const other = window(0.5);
    for (let n = 0; n < 15; n++) other.add(rollout('deadline'));
    other.add(rollout('done'));
    expect(stopsAfter(other, 'deadline')).toBe(16);
  });

  test('a row is no reason while less than max_failure_rate of what ended failed', () => {
    const it = window(0.5);
    for (let n = 0; n < 24; n++) it.add(rollout('done'));
    expect(stopsAfter(it, 'deadline')).toBe(25);
  });

  test('one prompt that always fails is no reason to stop, unless there is no other', () => {
    const it = window(0.5);
    it.add(rollout('done'));
    for (let n = 0; n < 8; n++) it.add(rollout('agent_blocked', null, 'same'));
    for (let n = 0; n < 40; n++) it.add(rollout('deadline', null, 'same'));
    expect(() => it.add(rollout('deadline'))).toThrow('rollouts failed');
    const alone = window(0.5);
    for (let n = 0; n < 3; n++) alone.add(rollout('agent_blocked', null, 'same'));
    expect(() => alone.add(rollout('agent_blocked', null, 'same'))).toThrow('none of its first 4 rollouts');
  });

  test('names the most frequent cause first, whatever numbers and stacks it differs in, then the others', () => {
    const it = window(0.5);
    it.add(rollout('done'));
    const all = () => {
      for (let n = 0; n < 16; n++)
        it.add(
          n % 3 === 0 ? rollout('deadline') : rollout('agent_error', `Error: prompt ${n}\n    at f (/x.ts:${n}:1)`),
        );
    };
    expect(all).toThrow(
      '16 of the last 16 rollouts failed, more than rollout.max_failure_rate 0.5 allows. Commonest cause (10 times):\nagent_error: Error: prompt 1\n    at f (/x.ts:1:1)\n6 times: deadline',
    );
  });
});
const EMPTY = {
  ids: new Int32Array(),
  lossMask: new Uint8Array(),
  logprobs: new Float32Array(),
  versions: new Int32Array(),
  turns: new Int32Array(),
  spans: [],
};

test('readBlocked finds the last whole report in a log, and none in one that was cut off', () => {
  const line = (rolloutId: string) => `molt-blocked ${JSON.stringify({ rolloutId, attempt: 2, detail: 'x' })}`;
  expect(readBlocked(`said\n${line('a')}\n${line('b')}\nmore\n`)).toEqual({ rolloutId: 'b', attempt: 2, detail: 'x' });
  expect(readBlocked(`said\n${line('a').slice(0, -4)}`)).toBeNull();
  expect(readBlocked('said\n')).toBeNull();
});
