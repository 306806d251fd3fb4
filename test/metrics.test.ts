import { existsSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { afterEach, beforeEach, describe, expect, test } from 'vitest';
import { formatStep, METRICS, MetricsWriter, type MetricValues, metricsTable, Progress } from '../molt/metrics.ts';

let runDir: string;
beforeEach(() => {
  runDir = mkdtempSync(join(tmpdir(), 'molt-metrics-'));
});
afterEach(() => rmSync(runDir, { recursive: true }));

const STEP: MetricValues = {
  step: 3,
  policy_version: 3,
  reward_mean: 0.5,
  logprob_mismatch_max: 2e-6,
  logprob_mismatch_mean: 1e-7,
  staleness_max: 0,
  tokens_trained: 1234,
  tokens_generated: 1300,
  time_generation_s: 0.6,
  time_train_s: 0.3,
  time_refit_s: 0.05,
  time_step_s: 1,
  grad_norm: 0.75,
  loss: -0.01234,
  loop_lag_ms_max: 4,
};
const EVALUATION: MetricValues = { step: 3, policy_version: 3, eval_reward_mean: 0.25, eval_num_prompts: 300 };

function lines(name = 'metrics.jsonl'): Record<string, unknown>[] {
  const text = readFileSync(join(runDir, name), 'utf8');
  expect(text === '' || text.endsWith('\n')).toBe(true);
  return text
    .split('\n')
    .filter(Boolean)
    .map((line) => JSON.parse(line));
}
function writeSteps(writer: MetricsWriter, from: number, to: number): void {
  for (let step = from; step <= to; step++) writer.write({ ...STEP, step });
}

describe('the writer', () => {
  test('appends one object a line, with the time', () => {
    const writer = new MetricsWriter(runDir, 0);
    writer.write(STEP);
    writer.write(EVALUATION);
    expect(lines()).toEqual([
      { ...STEP, time_unix_s: expect.any(Number) },
      { ...EVALUATION, time_unix_s: expect.any(Number) },
    ]);
  });

  test('writes NaN and infinity as null', () => {
    new MetricsWriter(runDir, 0).write({
      ...STEP,
      loss: Number.NaN,
      grad_norm: Number.POSITIVE_INFINITY,
      reward_mean: null,
    });
    expect(lines()[0]).toMatchObject({ loss: null, grad_norm: null, reward_mean: null });
  });

  test('refuses names that are not in the table, and takes those of agents', () => {
    const writer = new MetricsWriter(runDir, 0);
    expect(() => writer.write({ ...STEP, reward_men: 1, tostring: 2 })).toThrow(
      'not in the table of metrics.ts: reward_men, tostring',
    );
    writer.write({ ...STEP, info_tool_calls: 2, dropped_stale: 1, dropped_agent_error: 1 });
    expect(lines()).toHaveLength(1);
  });

  test('refuses a line without what every line has', () => {
    const writer = new MetricsWriter(runDir, 0);
    const { loss: _, ...rest } = STEP;
    expect(() => writer.write(rest)).toThrow('Metrics missing from step 3: loss');
    expect(() => writer.write({ step: 1, eval_reward_mean: 1 })).toThrow(
      'missing from step 1: policy_version, eval_num_prompts',
    );
  });

  test('keeps nothing over 10,000 steps', () => {
    const writer = new MetricsWriter(runDir, 0);
    const names = Object.keys(METRICS);
    const wide = Object.fromEntries(names.filter((name) => !name.startsWith('eval_')).map((name) => [name, 1.5]));
    writeSteps(writer, 1, 1);
    const before = usedHeap();
    for (let step = 1; step <= 10_000; step++) {
      writer.write({ ...wide, step });
      formatStep({ ...wide, step }, 10_000);
    }
    expect(usedHeap() - before).toBeLessThan(4 * 1024 * 1024); // the file is above 10 MB
  });
});

/** Bytes in use after a full collection. */
function usedHeap(): number {
  setFlagsFromString('--expose-gc');
  runInNewContext('gc')();
  return process.memoryUsage().heapUsed;
}

describe('resuming', () => {
  test('keeps lines up to the step, moves later and torn ones aside', () => {
    const writer = new MetricsWriter(runDir, 0);
    writeSteps(writer, 1, 2);
    writer.write({ ...EVALUATION, step: 2 });
    writeSteps(writer, 3, 4);
    writeFileSync(join(runDir, 'metrics.jsonl'), '{"step": 5, "rew', { flag: 'a' });

    const resumed = new MetricsWriter(runDir, 2);
    expect(lines().map(({ step }) => step)).toEqual([1, 2, 2]);
    expect(
      readFileSync(join(runDir, 'metrics.1.jsonl'), 'utf8').match(/"step":3.*"step":4.*\{"step": 5, "rew\n$/s),
    ).not.toBeNull();
    writeSteps(resumed, 3, 5);
    expect(lines().map(({ step }) => step)).toEqual([1, 2, 2, 3, 4, 5]);

    new MetricsWriter(runDir, 4);
    expect(lines('metrics.2.jsonl').map(({ step }) => step)).toEqual([5]);
  });

  test('changes nothing when nothing came later', () => {
    writeSteps(new MetricsWriter(runDir, 0), 1, 3);
    new MetricsWriter(runDir, 3);
    expect(lines()).toHaveLength(3);
    expect(existsSync(join(runDir, 'metrics.1.jsonl'))).toBe(false);
  });

  test('from the beginning moves everything, the evaluation at step 0 too', () => {
    const writer = new MetricsWriter(runDir, 0);
    writer.write({ ...EVALUATION, step: 0 });
    writeSteps(writer, 1, 1);
    new MetricsWriter(runDir, 0);
    expect(lines()).toEqual([]);
    expect(lines('metrics.1.jsonl')).toHaveLength(2);
  });
});

describe('the table', () => {
  test('has what the project promises', () => {
    const promised = [...Object.keys(STEP), ...Object.keys(EVALUATION)];
    const more =
      'lr entropy clip_ratio is_filter_ratio reward_std group_reward_std group_all_equal_ratio turns_mean response_tokens_mean truncated_ratio ' +
      'cached_token_ratio rollouts groups engine_idle_s trainer_idle_s retries restarts eval_greedy_reward_mean eval_constant_best ' +
      'dropped_stale dropped_incomplete_group dropped_deadline dropped_engine_lost';
    for (const name of [...promised, ...more.split(' ')]) expect(METRICS, name).toHaveProperty(name);
  });

  test('has only what the loop writes', () => {
    const loop = ['loop', 'batch', 'pool', 'report', 'estimators']
      .map((name) => readFileSync(join(import.meta.dirname, `../molt/${name}.ts`), 'utf8'))
      .join('');
    const own = new Set(['time_unix_s']); // the writer's
    const unwritten = Object.keys(METRICS).filter(
      (name) => !name.startsWith('dropped_') && !own.has(name) && !loop.includes(name),
    );
    expect(unwritten).toEqual([]);
  });

  test('as Markdown has five columns in every row', () => {
    const rows = metricsTable().split('\n');
    expect(rows).toHaveLength(Object.keys(METRICS).length + 2);
    for (const text of rows) expect(text.replaceAll('\\|', '').split('|'), text).toHaveLength(7);
  });
});

describe('the step line', () => {
  test('is one readable line', () => {
    expect(formatStep(STEP, 100)).toBe(
      'step   3/100  reward 0.500  loss -0.0123  grad 0.750  mismatch 2.0e-6  tokens 1234  1.00 s (gen 0.60 train 0.30 refit 0.05)',
    );
  });

  test('has no mismatch where no token was of the version trained', () => {
    expect(formatStep({ ...STEP, logprob_mismatch_max: null }, 100)).toContain('  mismatch -  ');
    expect(formatStep({ ...STEP, logprob_mismatch_max: Number.NaN }, 100)).toContain('  mismatch ?  ');
  });

  test('says what was dropped, and that a step was skipped', () => {
    const line = formatStep({ ...STEP, dropped_stale: 2, dropped_deadline: 1, skipped: 1, loss: Number.NaN }, 9);
    expect(line).toMatch(/^step 3\/9 {2}reward 0\.500 {2}loss {7}\? .* {2}dropped 3 {2}SKIPPED: not finite$/);
  });
});

describe('progress', () => {
  function recorded(isTTY: boolean, columns = 80) {
    const written: string[] = [];
    const clock = { ms: 0 };
    const output = { isTTY, columns, write: (text: string) => written.push(text) };
    return { written, clock, progress: new Progress(output, () => clock.ms) };
  }

  test('draws a bar on a terminal, at most ten times a second, and clears it', () => {
    const { written, clock, progress } = recorded(true);
    progress.show('step 1: 4/8 groups', 0.5);
    clock.ms = 50;
    progress.show('too soon', 0.6);
    clock.ms = 2100;
    progress.show('step 1: 8/8 groups', 2);
    progress.clear();
    progress.clear();
    expect(written).toEqual([
      '\r\x1b[2K[##########..........] step 1: 4/8 groups  0 s',
      '\r\x1b[2K[####################] step 1: 8/8 groups  2 s',
      '\r\x1b[2K',
    ]);
  });

  test('stays within the width of the terminal', () => {
    const { written, progress } = recorded(true, 30);
    progress.show('a long description of what is waited for', 0);
    expect(written[0]?.replace('\r\x1b[2K', '')).toHaveLength(29);
  });

  test('writes a plain line every 30 s elsewhere, and none for a short wait', () => {
    const { written, clock, progress } = recorded(false);
    for (clock.ms = 0; clock.ms < 20_000; clock.ms += 1000) progress.show('short', 0);
    progress.clear();
    for (let end = clock.ms + 65_000; clock.ms <= end; clock.ms += 1000) progress.show('long', 0);
    progress.clear();
    expect(written).toEqual(['long (30 s)\n', 'long (60 s)\n']);
  });
});
