/** The loop as a user starts it, on simulated workers: real processes, real signals, files read back. */
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';

const RECIPE = 'test/fixtures/recipe_simulated.ts';
const LIMIT_MS = 60_000;

let dir: string;
beforeAll(() => {
  dir = mkdtempSync(join(tmpdir(), 'molt-loop-'));
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

/** A started run. `exit` resolves with its status; `out` is all it printed so far. */
class Run {
  readonly child: ChildProcess;
  readonly exit: Promise<number | string>;
  out = '';
  #watchers = new Set<() => void>();

  constructor(args: readonly string[], env: Record<string, string> = {}) {
    // Not through `npx tsx`: a signal must reach the controller alone.
    this.child = spawn(process.execPath, ['--import', 'tsx', 'molt/loop.ts', ...args], {
      env: { ...process.env, ...env },
    });
    for (const stream of [this.child.stdout, this.child.stderr]) {
      stream?.on('data', (data: Buffer) => {
        this.out += data.toString();
        for (const watcher of this.#watchers) watcher();
      });
    }
    this.exit = new Promise((resolve) => this.child.on('exit', (code, signal) => resolve(code ?? signal ?? '')));
  }

  /** Resolves when the text was printed; rejects with the output when the run ends without it. */
  printed(text: string): Promise<void> {
    return new Promise((resolve, reject) => {
      const look = () => {
        if (!this.out.includes(text)) return;
        this.#watchers.delete(look);
        resolve();
      };
      this.#watchers.add(look);
      look();
      void this.exit.then(() => reject(new Error(`Ended without printing "${text}":\n${this.out}`)));
    });
  }
}

const run = (name: string, ...args: string[]) => new Run([RECIPE, '--run.dir', join(dir, name), ...args]);

interface Line {
  readonly [key: string]: number | null;
}
function metrics(name: string): { steps: Line[]; evals: Line[] } {
  const lines = readFileSync(join(dir, name, 'metrics.jsonl'), 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as Line);
  return {
    steps: lines.filter((l) => l.eval_reward_mean === undefined),
    evals: lines.filter((l) => l.eval_reward_mean !== undefined),
  };
}
function ledger(name: string): Record<string, unknown>[] {
  return readFileSync(join(dir, name, 'ledger', 'events.jsonl'), 'utf8')
    .trim()
    .split('\n')
    .map((line) => JSON.parse(line) as Record<string, unknown>);
}
/** What a step computed, without how long it took, what caches held and what was probed. */
function numbers(line: Line): Record<string, number | null> {
  return Object.fromEntries(
    Object.entries(line).filter(([key]) => !/^time_|idle|lag|^cached|^refit_verified|^restarts|^retries/.test(key)),
  );
}
/** Processes whose command line names the run's bus. */
function descendants(root: number): number[] {
  const parents = new Map<number, number>();
  for (const name of readdirSync('/proc')) {
    if (!/^\d+$/.test(name)) continue;
    try {
      const stat = readFileSync(`/proc/${name}/stat`, 'utf8');
      parents.set(Number(name), Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[1]));
    } catch {
      // it ended while we looked
    }
  }
  const found: number[] = [];
  const visit = (pid: number) => {
    for (const [child, parent] of parents) {
      if (parent !== pid) continue;
      found.push(child);
      visit(child);
    }
  };
  visit(root);
  return found;
}
/** Dead or a zombie that nobody has reaped yet. */
function isGone(pid: number): boolean {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    return stat.slice(stat.lastIndexOf(')') + 2).startsWith('Z');
  } catch {
    return true;
  }
}

describe('a run', () => {
  test(
    'trains, evaluates before and after, saves, and reports what every step did',
    async () => {
      const it = run('plain', '--train.num_steps', '20', '--eval.steps', '10', '--eval.show_samples', '2');
      expect(await it.exit, it.out).toBe(0);
      expect(it.out.match(/^ {2}.* -> .* {3}\(reward [\d.]+(, length)?\)$/gm)).toHaveLength(2 * 3);
      const { steps, evals } = metrics('plain');
      expect(steps.map((l) => l.step)).toEqual(Array.from({ length: 20 }, (_, i) => i + 1));
      expect(evals.map((l) => [l.step, l.policy_version])).toEqual([
        [0, 0],
        [10, 10],
        [20, 20],
      ]);
      for (const line of steps) {
        expect(line.policy_version).toBe(line.step);
        expect(line.staleness_max).toBe(0);
        expect(line.logprob_mismatch_max).toBeLessThanOrEqual(1e-4);
        expect(line.rollouts).toBe(16);
        expect(line.tokens_trained).toBe(line.tokens_generated); // nothing was dropped
      }
      expect(evals.at(-1)?.eval_reward_mean).toBeGreaterThan(evals[0]?.eval_reward_mean ?? 1);
      expect(existsSync(join(dir, 'plain', 'checkpoints', 'step-20', 'manifest.json'))).toBe(true);
      expect(existsSync(join(dir, 'plain', 'controller.pid'))).toBe(false);
      const events = ledger('plain');
      const dispatched = events.filter((e) => e.kind === 'dispatched').map((e) => e.groupId);
      const trained = events.filter((e) => e.kind === 'batch').flatMap((e) => e.groups as string[]);
      expect(trained.toSorted()).toEqual(dispatched.toSorted()); // each once
      expect(new Set(trained).size).toBe(80);
    },
    LIMIT_MS,
  );

  test(
    'gives the same numbers for the same seed and others for another',
    async () => {
      const runs = [run('seed-a'), run('seed-b'), run('seed-c', '--train.seed', '2')];
      for (const it of runs) expect(await it.exit, it.out).toBe(0);
      const [a, b, c] = ['seed-a', 'seed-b', 'seed-c'].map((name) => metrics(name).steps.map(numbers));
      expect(b).toEqual(a);
      expect(c).not.toEqual(a);
    },
    LIMIT_MS,
  );

  test(
    'with two ranks and two engines computes what one of each computes',
    async () => {
      const runs = [run('one'), run('two', '--trainer.num_ranks', '2', '--engine.num_engines', '2')];
      for (const it of runs) expect(await it.exit, it.out).toBe(0);
      const [one, two] = ['one', 'two'].map((name) => metrics(name).steps);
      for (const [i, line] of (one ?? []).entries()) {
        expect(two?.[i]?.loss).toBeCloseTo(line.loss ?? Number.NaN, 5);
        expect(two?.[i]?.grad_norm).toBeCloseTo(line.grad_norm ?? Number.NaN, 5);
        expect(two?.[i]?.reward_mean).toBe(line.reward_mean);
      }
    },
    LIMIT_MS,
  );

  test(
    'takes several optimizer steps on a batch, with the ratio to where the first began',
    async () => {
      const it = run(
        'epochs',
        '--train.max_epochs',
        '3',
        '--actor.eps_clip_low_high',
        '0.01',
        '0.01',
        '--train.num_steps',
        '2',
      );
      expect(await it.exit, it.out).toBe(0);
      const { steps } = metrics('epochs');
      expect(steps[0]?.clip_ratio).toBeGreaterThan(0);
      expect(steps[0]?.logprob_mismatch_max).toBeLessThanOrEqual(1e-4); // of the first pass
      expect(steps.map((l) => l.policy_version)).toEqual([1, 2]);
    },
    LIMIT_MS,
  );
});

describe('stopping and resuming', () => {
  test(
    'kill -9 leaves no process; --resume repeats what an uninterrupted run did, to the bit',
    async () => {
      const whole = run('whole', '--ckpt.save_steps', '3', '--train.num_steps', '7');
      expect(await whole.exit, whole.out).toBe(0);
      const killed = run('killed', '--ckpt.save_steps', '3', '--train.num_steps', '7');
      await killed.printed('step 5/7');
      const children = descendants(killed.child.pid ?? 0);
      expect(children.length).toBeGreaterThanOrEqual(4);
      process.kill(Number(readFileSync(join(dir, 'killed', 'controller.pid'), 'utf8')), 'SIGKILL');
      expect(await killed.exit).toBe('SIGKILL');
      await expect.poll(() => children.filter((pid) => !isGone(pid)), { timeout: 10_000 }).toEqual([]);

      const resumed = run('killed', '--resume', '--ckpt.save_steps', '3', '--train.num_steps', '7');
      expect(await resumed.exit, resumed.out).toBe(0);
      expect(resumed.out).toContain('Resumed at step 3, policy version 3');
      expect(metrics('killed').steps.map(numbers)).toEqual(metrics('whole').steps.map(numbers));
      const late = readFileSync(join(dir, 'killed', 'metrics.1.jsonl'), 'utf8')
        .trim()
        .split('\n')
        .map((l) => JSON.parse(l) as Line);
      expect(late.map((l) => l.step)).toEqual([4, 5]);
    },
    LIMIT_MS,
  );

  test(
    'Ctrl-C once finishes the step, saves and exits 130 with no child left; it resumes at the next step',
    async () => {
      const it = run('once', '--train.num_steps', '500');
      await it.printed('step   2/500');
      const children = descendants(it.child.pid ?? 0);
      it.child.kill('SIGINT');
      await it.printed('finishing the step');
      it.child.kill('SIGINT'); // npm and tsx relay the same Ctrl-C again
      expect(await it.exit, it.out).toBe(130);
      expect(children.filter((pid) => !isGone(pid))).toEqual([]);
      const stopped = Number(/Stopped after step (\d+)/.exec(it.out)?.[1]);
      expect(existsSync(join(dir, 'once', 'checkpoints', `step-${stopped}`, 'manifest.json'))).toBe(true);
      const more = run('once', '--resume', '--train.num_steps', String(stopped + 1));
      expect(await more.exit, more.out).toBe(0);
      expect(metrics('once').steps.map((l) => l.step)).toEqual(Array.from({ length: stopped + 1 }, (_, i) => i + 1));
    },
    LIMIT_MS,
  );

  test(
    'Ctrl-C twice exits at once, with no child left, and is still resumable',
    async () => {
      const slow = JSON.stringify({ latency_ms: { run: 3000 } });
      const it = run('twice', '--simulated.script', slow, '--ckpt.save_steps', '1', '--train.num_steps', '500');
      await it.printed('step   1/500');
      const saved = join(dir, 'twice', 'checkpoints', 'step-1', 'manifest.json');
      await expect.poll(() => existsSync(saved), { timeout: 10_000 }).toBe(true);
      const children = descendants(it.child.pid ?? 0);
      it.child.kill('SIGINT');
      await it.printed('finishing the step');
      await new Promise((resolve) => setTimeout(resolve, 700)); // sooner it would be the same Ctrl-C, relayed by npm or tsx
      it.child.kill('SIGINT');
      expect(await it.exit, it.out).toBe(130);
      await expect.poll(() => children.filter((pid) => !isGone(pid)), { timeout: 10_000 }).toEqual([]);
      const more = run('twice', '--resume', '--train.num_steps', '2');
      expect(await more.exit, more.out).toBe(0);
      expect(more.out).toContain('Resumed at step 1');
    },
    LIMIT_MS,
  );

  test(
    'a used run directory without --resume, and one in use, are refused with status 2',
    async () => {
      const first = run('used', '--train.num_steps', '500');
      await first.printed('step   1/500');
      const other = run('used', '--resume', '--train.num_steps', '500');
      expect(await other.exit).toBe(2);
      expect(other.out).toContain('in use by process');
      first.child.kill('SIGTERM');
      expect(await first.exit, first.out).toBe(143);
      const again = run('used');
      expect(await again.exit).toBe(2);
      expect(again.out).toContain('--run.dir');
    },
    LIMIT_MS,
  );
});

describe('failures', () => {
  const failing = (label: string) => `test/fixtures/prompts_${label}.ts`;

  test(
    'an environment that always fails stops the run with its error, status 1',
    async () => {
      const it = run('fails', '--data.prompt_dataset', failing('step_throws'), '--eval.dataset', 'none');
      expect(await it.exit, it.out).toBe(1);
      expect(it.out).toContain('the lamp is broken');
      expect(it.out).toContain('rollout.max_failure_rate');
    },
    LIMIT_MS,
  );

  test(
    'members that fail are left out and counted, the rest of their group is trained',
    async () => {
      const it = run(
        'half',
        '--data.prompt_dataset',
        failing('half_throw'),
        '--eval.dataset',
        'none',
        '--train.num_steps',
        '2',
      );
      expect(await it.exit, it.out).toBe(0);
      expect(metrics('half').steps.map((l) => [l.rollouts, l.dropped_agent_error])).toEqual([
        [8, 8],
        [8, 8],
      ]);
    },
    LIMIT_MS,
  );

  test(
    'an engine that dies in mid-run is replaced and no rollout is lost',
    async () => {
      const script = JSON.stringify({
        latency_ms: { step: 2 },
        failures: [{ worker: 'engine-0', what: 'exit', on: 'step', nth: 60 }],
      });
      const it = run('engine', '--simulated.script', script, '--eval.dataset', 'none');
      expect(await it.exit, it.out).toBe(0);
      expect(it.out).toContain('engine_lost');
      const { steps } = metrics('engine');
      expect(steps.map((l) => l.rollouts)).toEqual([16, 16, 16, 16, 16, 16]);
      expect(steps.at(-1)?.restarts).toBe(1);
      expect(steps.every((l) => (l.logprob_mismatch_max ?? 1) <= 1e-4 && l.staleness_max === 0)).toBe(true);
    },
    LIMIT_MS,
  );

  test(
    'an engine whose successor dies while it joins is replaced again',
    async () => {
      const script = JSON.stringify({
        failures: [
          { worker: 'engine-0', what: 'exit', on: 'generate', nth: 24 },
          { worker: 'engine-0', incarnation: 1, what: 'exit', on: 'resume', nth: 1 },
          { worker: 'engine-0', incarnation: 2, what: 'exit', on: 'load_weights', nth: 1 },
        ],
      });
      const it = run('joins', '--simulated.script', script, '--eval.dataset', 'none', '--train.num_steps', '3');
      expect(await it.exit, it.out).toBe(0);
      expect(metrics('joins').steps.map((l) => [l.rollouts, l.restarts])).toEqual([
        [16, 0],
        [16, 3],
        [16, 3],
      ]);
    },
    LIMIT_MS,
  );

  test(
    'a runner that dies is replaced and its rollouts are tried again',
    async () => {
      const it = new Run(
        [
          RECIPE,
          '--run.dir',
          join(dir, 'runner'),
          '--data.prompt_dataset',
          failing('runner_once'),
          '--eval.dataset',
          'none',
          '--train.num_steps',
          '2',
        ],
        {
          MOLT_TEST_MARKER: join(dir, 'marker'),
        },
      );
      expect(await it.exit, it.out).toBe(0);
      expect(it.out).toContain('runner_lost');
      const finished = ledger('runner').filter((e) => e.kind === 'finished');
      expect(finished.map((e) => e.attempt)).toContain(1);
      expect(new Set(finished.map((e) => e.rolloutId)).size).toBe(finished.length);
    },
    LIMIT_MS,
  );

  test(
    'a trainer rank that dies ends the run with its last words, status 1, nothing left running',
    async () => {
      const script = JSON.stringify({ failures: [{ worker: 'trainer-0', what: 'exit', on: 'run', nth: 2 }] });
      const it = run('rank', '--simulated.script', script);
      await it.printed('Workers are ready');
      const children = descendants(it.child.pid ?? 0);
      expect(await it.exit, it.out).toBe(1);
      expect(it.out).toContain('Trainer rank trainer-0 is gone');
      expect(children.filter((pid) => !isGone(pid))).toEqual([]);
    },
    LIMIT_MS,
  );

  test(
    'bad options are all named, with status 2, before anything starts',
    async () => {
      const noModel = run('no-model', '--tokenizer.kind', 'python', '--actor.model_name_or_path', 'test/fixtures');
      expect(await noModel.exit).toBe(2);
      expect(noModel.out).toContain('--actor.model_name_or_path test/fixtures: has no config.json, no tokenizer.json');
      const it = run('bad', '--train.num_stepz', '5', '--rollout.temperature', '-1');
      expect(await it.exit).toBe(2);
      expect(it.out).toContain('--train.num_steps');
      expect(it.out).toContain('--rollout.temperature');
      expect(existsSync(join(dir, 'bad'))).toBe(false);
    },
    LIMIT_MS,
  );
});
