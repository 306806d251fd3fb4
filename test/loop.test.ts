/** The loop as a user starts it, on simulated workers: real processes, real signals, files read back. */
import { type ChildProcess, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { readLedger } from '../molt/ledger.ts';

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
  return [...readLedger(join(dir, name))].map(({ event, arrays }) => ({
    ...event,
    tokens: sum(arrays.loss_mask ?? []),
  }));
}
const sum = (values: ArrayLike<number>) => Array.from(values).reduce((a, b) => a + b, 0);
/** What a step computed, without how long it took, what caches held and what was probed. */
function numbers(line: Line): Record<string, number | null> {
  return Object.fromEntries(
    Object.entries(line).filter(
      ([key]) => !/^time_|idle|lag|^cached|^refit_verified|^engines_refitted|^restarts|^retries/.test(key),
    ),
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
      expect(resumed.out).toContain('Restored step 3 from');
      const [, again] = /Trained steps 4 to (\d) again from the ledger: the same to the bit/.exec(resumed.out) ?? [];
      expect(Number(again)).toBeGreaterThanOrEqual(5);
      expect(resumed.out).toContain(`Resumed at step ${again}, policy version ${again}`);
      // Groups of the next batch may have been read and sampled by the process that was killed.
      const learned = (line: Line) => ({ ...numbers(line), prompts_read: 0, tokens_generated: 0 });
      expect(metrics('killed').steps.map(learned)).toEqual(metrics('whole').steps.map(learned));
      const late = readFileSync(join(dir, 'killed', 'metrics.1.jsonl'), 'utf8')
        .trim()
        .split('\n')
        .map((l) => JSON.parse(l) as Line);
      expect(late.map((l) => l.step).slice(0, 2)).toEqual([4, 5]);
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
      expect(more.out).toMatch(/Resumed at step [12]/);
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

describe('prompts', () => {
  /** A file of prompts with these inputs. */
  function prompts(name: string, inputs: readonly unknown[]): string {
    const path = join(dir, `${name}.jsonl`);
    writeFileSync(path, inputs.map((input) => `${JSON.stringify({ input, label: 'even' })}\n`).join(''));
    return path;
  }
  const long = (n: number) => 'x'.repeat(n);
  const odd = [{ role: 'user', content: 3 }]; // the template takes text only

  test(
    'of two sources come by their weights; what does not fit is left out, counted and named, also after a resume',
    async () => {
      const a = prompts(
        'mixed-a',
        Array.from({ length: 12 }, (_, i) => (i % 4 === 0 ? long(150) : `a${i}`)),
      );
      const b = prompts('mixed-b', ['b0', odd, 'b2', long(101), 'b4']);
      const held = prompts('mixed-held', ['h0', long(200), odd, 'h3']);
      const args = ['--data.prompt_dataset', `${a},${b}`, '--data.prompt_probs', '3,1', '--eval.dataset', held];
      args.push('--data.max_prompt_len', '100', '--actor.lr_warmup_ratio', '0', '--eval.greedy', 'false');
      const whole = run('mixed', ...args, '--train.num_steps', '6');
      expect(await whole.exit, whole.out).toBe(0);
      const dispatched = (name: string) =>
        ledger(name)
          .filter((e) => e.kind === 'dispatched')
          .map((e) => [e.source, e.epoch, e.index]);
      expect(dispatched('mixed').filter(([source]) => source === a)).toHaveLength(18); // 3/4 of 24
      const lost = ledger('mixed').filter((e) => e.kind === 'prompt_dropped');
      const kinds = new Set(lost.map((e) => [e.split, e.source, e.index, e.reason].join(' ')));
      expect([...kinds].sort()).toEqual(
        [
          ...[0, 4, 8].map((i) => `train ${a} ${i} prompt_too_long`),
          `train ${b} 1 prompt_unrenderable`,
          `train ${b} 3 prompt_too_long`,
          `heldout ${held} 1 prompt_too_long`,
          `heldout ${held} 2 prompt_unrenderable`,
        ].sort(),
      );
      const { steps, evals } = metrics('mixed');
      const total = (key: string) => steps.reduce((n, line) => n + (line[key] ?? 0), 0);
      const inTraining = (reason: string) => lost.filter((e) => e.split === 'train' && e.reason === reason).length;
      expect(total('dropped_prompt_too_long')).toBe(inTraining('prompt_too_long'));
      expect(total('dropped_prompt_unrenderable')).toBe(inTraining('prompt_unrenderable'));
      expect(total('prompts_read')).toBe(24 + lost.length - 2);
      expect(evals.map((l) => [l.eval_num_prompts, l.eval_dropped_prompts])).toEqual([
        [2, 2],
        [2, 2],
      ]);
      expect(whole.out).toMatch(/Left out prompt \d+ of .*: it has \d+ tokens, data\.max_prompt_len is 100;/);
      expect(whole.out).toContain(`Left out prompt 2 of ${b}: the chat template cannot render it:`);
      expect(whole.out).toContain(
        'Left out 2 of 4 held-out prompts: 1 longer than 100 tokens, 1 that the chat template cannot render',
      );
      expect(whole.out).toContain(`Left out ${lost.length - 2} of ${22 + lost.length} training prompts read`);

      const half = run('mixed-half', ...args, '--train.num_steps', '3');
      expect(await half.exit, half.out).toBe(0);
      const rest = run('mixed-half', '--resume', ...args, '--train.num_steps', '6');
      expect(await rest.exit, rest.out).toBe(0);
      expect(dispatched('mixed-half')).toEqual(dispatched('mixed'));
      expect(metrics('mixed-half').steps.map(numbers)).toEqual(steps.map(numbers));

      expect(rest.out).not.toContain('Changed since the run began: the held-out prompts');
      prompts('mixed-held', ['h0', 'h1']);
      const more = run('mixed-half', '--resume', ...args, '--train.num_steps', '7');
      expect(await more.exit, more.out).toBe(0);
      expect(more.out).toContain('Changed since the run began: the held-out prompts');
      prompts('mixed-b', ['b0', odd, 'b2', long(101), 'b5']);
      const other = run('mixed-half', '--resume', ...args, '--train.num_steps', '7');
      expect(await other.exit, other.out).toBe(2);
      expect(other.out).toContain('the prompts are not those of the checkpoint');
    },
    LIMIT_MS,
  );

  test(
    'of which none fits end the run with the option, the shortest and the limit',
    async () => {
      const path = prompts('none', [long(300), long(280)]);
      const it = run('none', '--data.prompt_dataset', path, '--eval.dataset', 'none');
      expect(await it.exit, it.out).toBe(2);
      expect(it.out).toMatch(
        /--data\.max_prompt_len 244: none of the 2 prompts of --data\.prompt_dataset .* fits; the shortest has \d+ tokens/,
      );
      // 249 tokens of 256 with the template, where a turn wants 12: nobody measures, so nothing is left out
      const tight = prompts('tight', [long(230), odd]);
      const all = ['--data.max_prompt_len', '-1', '--eval.dataset', 'none', '--train.num_steps', '1'];
      const unmeasured = run('tight', '--data.prompt_dataset', tight, ...all);
      expect(await unmeasured.exit, unmeasured.out).toBe(0);
      expect(ledger('tight').some((e) => e.kind === 'prompt_dropped')).toBe(false);
      const held = run('none-held', '--eval.dataset', path);
      expect(await held.exit, held.out).toBe(2);
      expect(held.out).toContain('none of the 2 prompts of --eval.dataset');
    },
    LIMIT_MS,
  );

  test(
    'of a program train a run; the program ends with the controller, however that ends',
    async () => {
      const program = join(dir, 'prompts.py');
      const head = 'import os, sys, time\n';
      const body = 'for i in range(20): print(f\'{{"input": "{sys.argv[-3]} {i}", "label": "even"}}\')\n';
      writeFileSync(program, `${head}${body}`);
      const args = ['--data.prompt_dataset', program, '--eval.dataset', `${program} --n 1`, '--eval.max_samples', '4'];
      const it = run('program', ...args, '--train.num_steps', '2');
      expect(await it.exit, it.out).toBe(0);
      expect(metrics('program').evals.map((l) => l.eval_num_prompts)).toEqual([4, 4]);

      const hangs = join(dir, 'hangs.py');
      writeFileSync(hangs, `${head}print("pid", os.getpid(), file=sys.stderr)\ntime.sleep(60)\n`);
      for (const signal of ['SIGKILL', 'SIGINT'] as const) {
        const hung = run(`hangs-${signal}`, '--data.prompt_dataset', hangs);
        await expect.poll(() => /pid (\d+)/.exec(hung.out), { timeout: 20_000 }).not.toBeNull();
        const pid = Number(/pid (\d+)/.exec(hung.out)?.[1]);
        expect(isGone(pid)).toBe(false);
        hung.child.kill(signal);
        await hung.exit;
        await expect.poll(() => isGone(pid), { timeout: 10_000 }).toBe(true);
      }
      const bad = run(
        'program-bad',
        '--data.prompt_dataset',
        hangs,
        '--data.silence_s',
        '0.5',
        '--eval.dataset',
        'no.py',
      );
      expect(await bad.exit).toBe(2);
      expect(bad.out).toContain(
        `--data.prompt_dataset ${hangs}: printed nothing for 0.5 s after 0 lines and was killed`,
      );
      expect(bad.out).toContain('--eval.dataset no.py: no such file');
      expect(existsSync(join(dir, 'program-bad'))).toBe(false);
    },
    LIMIT_MS,
  );
});

describe('failures', () => {
  const failing = (label: string) => `test/fixtures/prompts_${label}.ts`;

  test(
    'an environment that always fails is bad input: its error, status 2',
    async () => {
      const it = run('fails', '--data.prompt_dataset', failing('step_throws'), '--eval.dataset', 'none');
      expect(await it.exit, it.out).toBe(2);
      expect(it.out).toMatch(
        /--train\.agent_path .*agent_error: Error: the lamp is broken \(.*agent_cases\.ts:\d+:\d+\)/,
      );
    },
    LIMIT_MS,
  );

  test(
    'a resumed run that is refused keeps what was recorded, checkpoint or not',
    async () => {
      const none = ['--eval.dataset', 'none', '--train.num_steps'];
      const first = run('kept', ...none, '1', '--ckpt.disable_final_save');
      expect(await first.exit, first.out).toBe(0);
      const broken = join(dir, 'broken-step.mjs');
      writeFileSync(broken, 'export const agent = () => ({ reset: () => "x", step() { throw new Error("broken") } });');
      const again = run('kept', ...none, '2', '--resume', '--train.agent_path', broken);
      expect(await again.exit, again.out).toBe(2);
      expect(again.out).toContain('Trained steps 1 to 1 again from the ledger');
      expect(existsSync(join(dir, 'kept', 'metrics.1.jsonl'))).toBe(true);
      expect(existsSync(join(dir, 'kept', 'config.json'))).toBe(true);
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
        failures: [{ worker: 'engine-0', what: 'exit', on: 'step', nth: 76 }],
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
          { worker: 'engine-0', what: 'exit', on: 'generate', nth: 28 },
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
    'a trainer rank that dies starts again from the checkpoint and the ledger; the run is as if nothing had happened',
    async () => {
      const whole = run('rank-whole', '--eval.dataset', 'none');
      expect(await whole.exit, whole.out).toBe(0);
      // Its fourth step: after a checkpoint at 2 the third is trained again. And while it writes weights for a refit.
      for (const [on, nth] of [
        ['run', 4],
        ['push_weights', 4],
      ] as const) {
        const script = JSON.stringify({ failures: [{ worker: 'trainer-0', what: 'exit', on, nth }] });
        const it = run(`rank-${on}`, '--eval.dataset', 'none', '--simulated.script', script, '--ckpt.save_steps', '2');
        expect(await it.exit, it.out).toBe(0);
        expect(it.out).toContain('trainer_restart: Trainer rank trainer-0 is gone');
        expect(it.out).toMatch(/Trainer ranks are back at step [34]: .*step-2, then [12] steps of the ledger/);
        expect(metrics(`rank-${on}`).steps.map(numbers)).toEqual(metrics('rank-whole').steps.map(numbers));
        expect(metrics(`rank-${on}`).steps.at(-1)?.restarts).toBe(1);
      }
    },
    2 * LIMIT_MS,
  );

  test(
    'a trainer rank that dies every time ends the run with its last words, status 1, nothing left running',
    async () => {
      const failures = [0, 1].map((incarnation) => ({
        worker: 'trainer-0',
        what: 'exit',
        on: 'run',
        nth: 2,
        incarnation,
      }));
      const it = run('rank', '--simulated.script', JSON.stringify({ failures }), '--launch.max_restarts', '1');
      await it.printed('Workers are ready');
      const children = descendants(it.child.pid ?? 0);
      expect(await it.exit, it.out).toBe(1);
      expect(it.out).toContain('The run stopped: Trainer rank trainer-0 is gone');
      expect(children.filter((pid) => !isGone(pid))).toEqual([]);
    },
    LIMIT_MS,
  );

  test(
    'a trainer rank that dies while nobody asks it for anything is a restart like any other',
    async () => {
      const slow = JSON.stringify({ latency_ms: { step: 40 } }); // the evaluation before the first step
      const it = run('rank-idle', '--simulated.script', slow, '--launch.max_restarts', '0', '--train.num_steps', '1');
      await it.printed('Parity');
      const isTrainer = (pid: number) => readFileSync(`/proc/${pid}/cmdline`, 'utf8').includes('trainer-0');
      process.kill(descendants(it.child.pid ?? 0).find(isTrainer) as number, 'SIGKILL');
      expect(await it.exit, it.out).toBe(1);
      expect(it.out).toContain('The run stopped: Trainer rank trainer-0 is gone');
    },
    LIMIT_MS,
  );

  test(
    'a tokenizer that dies is started again and asked again; one that dies every time ends the run',
    async () => {
      const dies = (incarnations: readonly number[]) =>
        JSON.stringify({
          failures: incarnations.map((incarnation) => ({
            worker: 'tokenizer-0',
            what: 'exit',
            on: 'parse',
            nth: 2,
            incarnation,
          })),
        });
      const once = run('tokenizer', '--eval.dataset', 'none', '--simulated.script', dies([0]));
      expect(await once.exit, once.out).toBe(0);
      expect(once.out).toContain('tokenizer_restart: restart 1');
      expect(metrics('tokenizer').steps.map(numbers)).toEqual(metrics('rank-whole').steps.map(numbers));
      const always = run('tokenizers', '--simulated.script', dies([0, 1, 2]), '--launch.max_restarts', '1');
      expect(await always.exit, always.out).toBe(1);
      expect(always.out).toContain('The run stopped: The tokenizer is gone after 1 restarts');
    },
    LIMIT_MS,
  );

  test(
    'bad options are all named, with status 2, before anything starts',
    async () => {
      const noModel = run('no-model', '--tokenizer.kind', 'python', '--actor.model_name_or_path', 'test/fixtures');
      expect(await noModel.exit).toBe(2);
      expect(noModel.out).toContain('--actor.model_name_or_path test/fixtures: has no config.json');
      const broken = join(dir, 'broken.ts');
      writeFileSync(broken, 'export class agent {\n  reset( { return 1; }\n}\n');
      const noAgent = run('no-agent', '--train.agent_path', broken);
      expect(await noAgent.exit).toBe(2);
      const problem = `--train.agent_path: Cannot load agent ${broken}: ${broken}:2:18: Expected "}" but found "1"`;
      expect(noAgent.out.trim().split('\n').slice(1)).toEqual([problem]); // behind the line of the config
      const it = run('bad', '--train.num_stepz', '5', '--rollout.temperature', '-1');
      expect(await it.exit).toBe(2);
      expect(it.out).toContain('--train.num_steps');
      expect(it.out).toContain('--rollout.temperature');
      expect(existsSync(join(dir, 'bad'))).toBe(false);
    },
    LIMIT_MS,
  );
});
