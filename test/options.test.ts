/**
 * For every option some value changes what a run on simulated workers does, or is refused there. (That each is read by
 * some code and stands in the README: config.test.ts and readme.test.ts.)
 */
import { spawn } from 'node:child_process';
import { cpSync, existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { OptionName } from '../molt/config.ts';
import { readLedger } from '../molt/ledger.ts';

const RECIPE = 'test/fixtures/recipe_simulated.ts';
const LIMIT_MS = 60_000;

let dir: string;
beforeAll(() => {
  dir = mkdtempSync(join(tmpdir(), 'molt-options-'));
});
afterAll(() => rmSync(dir, { recursive: true, force: true }));

// ---- What a run did ----

interface Ran {
  readonly dir: string;
  readonly exit: number | null;
  readonly printed: string; // without times
  readonly metrics: readonly Readonly<Record<string, number | null>>[];
  readonly numbers: string; // of the metrics, without times
  readonly files: readonly string[]; // in the run directory
  readonly order: string; // the prompts given out
}
type Seen = 'exit' | 'numbers' | 'files' | 'order' | 'printed';

let runs = 0;
async function run(
  words: readonly string[],
  more: { runDir?: string; onOutput?: (out: string, pid: number) => void } = {},
): Promise<Ran> {
  const runDir = more.runDir ?? join(dir, `run-${runs++}`);
  const place = words.includes('--run.dir') ? [] : ['--run.dir', runDir];
  const child = spawn(process.execPath, ['--import', 'tsx', 'molt/loop.ts', RECIPE, ...place, ...words]);
  let out = '';
  for (const stream of [child.stdout, child.stderr])
    stream.on('data', (data: Buffer) => {
      out += data.toString();
      more.onOutput?.(out, child.pid ?? 0);
    });
  const poll = setInterval(() => more.onOutput?.(out, child.pid ?? 0), 20);
  const exit = await new Promise<number | null>((done) => child.on('close', done));
  clearInterval(poll);
  const path = join(runDir, 'metrics.jsonl');
  const lines = existsSync(path) ? readFileSync(path, 'utf8').trim().split('\n').filter(Boolean) : [];
  const metrics = lines.map((line) => JSON.parse(line) as Record<string, number | null>);
  const numbers = metrics.map((line) =>
    Object.entries(line).filter(([key]) => !/^time_|idle|lag|^cached|^engine|^restarts|^retries/.test(key)),
  );
  const dispatched = [...readLedger(runDir)].filter(({ event }) => event.kind === 'dispatched');
  return {
    dir: runDir,
    exit,
    order: dispatched.map(({ event }) => JSON.stringify({ ...event, time: 0 })).join('\n'),
    printed: out
      .replaceAll(runDir, 'RUN')
      .replace(/^Recipe .*$/m, '')
      .replace(/[\d.]+ s\b/g, '')
      .replace(/\(gen.*\)/g, ''),
    metrics,
    numbers: JSON.stringify(numbers),
    files: existsSync(runDir) ? (readdirSync(runDir, { recursive: true }) as string[]).sort() : [],
  };
}

/** Runs without the option under test, made once for each set of other words. */
const baselines = new Map<string, Promise<Ran>>();
function baseline(words: readonly string[]): Promise<Ran> {
  const key = words.join(' ');
  const made = baselines.get(key) ?? run(words);
  baselines.set(key, made);
  return made;
}

// ---- The table ----

interface Changes {
  readonly to: readonly string[]; // the value
  readonly also?: readonly string[]; // words of this run and of the one it is compared with
  readonly seen: Seen;
}
interface Refused {
  readonly refused: readonly string[]; // a value that simulated workers cannot take
}
type Effect = Changes | Refused | 'own test';

const SHORT = ['--train.num_steps', '2', '--eval.dataset', 'none'];
const EVALUATED = ['--train.num_steps', '2'];
const TWO_RANKS = [...SHORT, '--trainer.num_ranks', '2'];
const MANY_EPOCHS = [...SHORT, '--train.max_epochs', '3'];
const LINEAR = [...SHORT, '--actor.lr_scheduler', 'linear'];
const REINFORCE = [...SHORT, '--algo.advantage.estimator', 'reinforce'];
const CORRECTED = [...SHORT, '--algo.advantage.is_correction_level', 'token'];
const ALL_REJECTED = ['--algo.advantage.is_correction_threshold', '1.5', '5'];
const script = (value: unknown) => ['--simulated.script', JSON.stringify(value)];
const fixture = (name: string, content: string): string => {
  const path = join(tmpdir(), `molt-options-${process.pid}-${name}`);
  writeFileSync(path, content);
  return path;
};
const made: string[] = [];
const file = (name: string, content: string): string => {
  const path = fixture(name, content);
  made.push(path);
  return path;
};
afterAll(() => {
  for (const path of made) rmSync(path, { force: true });
});
const rows = (make: (i: number) => unknown) =>
  Array.from({ length: 8 }, (_, i) => `${JSON.stringify(make(i))}\n`).join('');
const NEVER_DONE = file(
  'never.jsonl',
  rows((i) => ({ input: `case ${i}`, label: 'never done' })),
);
const TWO_LENGTHS = file(
  'lengths.jsonl',
  rows((i) => ({ input: i % 2 ? 'short' : 'a prompt that is longer', label: 'even' })),
);
const COLUMNS = file(
  'columns.jsonl',
  rows((i) => ({
    input: `case ${i}`,
    label: 'even',
    question: `another, longer case ${i}`,
    kind: 'three turns',
    functions: [{ type: 'function', function: { name: 'calc', parameters: {} } }],
  })),
);
const FILE = [...SHORT, '--data.prompt_dataset', COLUMNS];
const SLOW_PROGRAM = file(
  'slow.py',
  'import json, time\nfor i in range(8):\n    time.sleep(0.1 if i else 0.6)\n    print(json.dumps({"input": str(i)}), flush=True)\n',
);
/** Pays for a long prompt and for tools, so that what the data says is seen in the reward. */
const READING_AGENT = file(
  'reading.mjs',
  'export const agent = () => ({ reset(t) { this.r = String(t.input).length / 100 + (t.tools ? 1 : 0) + String(t.label).length / 1000; return "x"; }, step() { return { reward: this.r, done: true }; } });',
);
const CONSTANT_AGENT = file(
  'agent.mjs',
  'export const agent = () => ({ reset: () => "x", step: () => ({ reward: 0.25, done: true }) });',
);
const READ = [...FILE, '--train.agent_path', READING_AGENT];
/** Holds the event loop for a second in its first rollout. */
const SLOW_AGENT = file(
  'slow.mjs',
  'export const agent = () => ({ reset(t) { this.id = t.rolloutId; return "x"; }, step() { if (this.id === "g0-0") for (const end = Date.now() + 1000; Date.now() < end; ); return { reward: 1, done: true }; } });',
);
const QUARTER_FAILS = file(
  'quarter.mjs',
  'export const agent = () => ({ reset(t) { this.i = t.index; return "x"; }, step() { if (this.i === 3) throw new Error("third"); return { reward: this.i, done: true }; } });',
);
/** Groups of odd prompts have equal rewards, the others do not. */
const HALF_EQUAL = [
  ...FILE,
  '--train.agent_path',
  file(
    'half.mjs',
    'export const agent = () => ({ reset(t) { this.r = Number(/\\d+/.exec(t.input)[0]) % 2 || t.index % 2; return "x"; }, step() { return { reward: this.r, done: true }; } });',
  ),
];
const DIES = [...SHORT, ...script({ failures: [{ worker: 'engine-0', what: 'exit', on: 'generate', nth: 7 }] })];
const SLOW_LOAD = [...SHORT, ...script({ latency_ms: { load_weights: 400 } })];
const WRONG_WEIGHTS = [
  ...['--eval.dataset', 'none', '--train.num_steps', '8', '--refit.verify_every', '100'],
  ...script({
    failures: [4, 5, 6, 7].map((nth) => ({ worker: 'engine-0', what: 'swap_layout', on: 'load_weights', nth })),
  }),
];

const EFFECTS: Record<OptionName, Effect> = {
  'run.dir': 'own test',
  'run.resume': 'own test',
  'run.replay': 'own test', // async.test.ts
  'run.ledger_gb': 'own test', // ledger.test.ts
  'train.num_steps': { to: ['3'], also: ['--eval.dataset', 'none'], seen: 'numbers' },
  'train.batch_size': { to: ['3'], also: SHORT, seen: 'numbers' },
  'train.seed': { to: ['2'], also: SHORT, seen: 'numbers' },
  'train.agent_path': { to: [CONSTANT_AGENT], also: SHORT, seen: 'numbers' },
  'train.micro_batch_size': { to: ['3'], also: TWO_RANKS, seen: 'numbers' },
  'train.max_tokens_per_gpu': { to: ['100'], also: TWO_RANKS, seen: 'numbers' },
  'train.max_epochs': { to: ['2'], also: SHORT, seen: 'numbers' },
  'train.max_staleness': { to: ['1'], also: CORRECTED, seen: 'order' },
  'train.partial_rollout_enable': 'own test', // async.test.ts
  'train.batch_order': 'own test', // async.test.ts
  'train.late': 'own test', // async.test.ts
  'actor.model_name_or_path': { to: ['simulated:3'], also: SHORT, seen: 'numbers' },
  'actor.adam.lr': { to: ['0.01'], also: SHORT, seen: 'numbers' },
  'actor.adam.betas': { to: ['0.5', '0.5'], also: ['--eval.dataset', 'none'], seen: 'numbers' },
  'actor.adam.eps': { to: ['0.1'], also: SHORT, seen: 'numbers' },
  'actor.adam.weight_decay': { to: ['5'], also: SHORT, seen: 'numbers' },
  'actor.lr_scheduler': { to: ['linear'], also: SHORT, seen: 'numbers' },
  'actor.lr_warmup_ratio': { to: ['1'], also: SHORT, seen: 'numbers' },
  'actor.min_lr_ratio': { to: ['0.5'], also: LINEAR, seen: 'numbers' },
  'actor.max_norm': { to: ['1e-9'], also: SHORT, seen: 'numbers' },
  'actor.eps_clip_low_high': { to: ['0.01', '0.01'], also: MANY_EPOCHS, seen: 'numbers' },
  'actor.gradient_checkpoint': { refused: ['full'] },
  'algo.advantage.estimator': { to: ['dr_grpo'], also: SHORT, seen: 'numbers' },
  'algo.advantage.gamma': { to: ['0.5'], also: REINFORCE, seen: 'numbers' },
  'algo.advantage.no_whiten': { to: ['true'], also: REINFORCE, seen: 'numbers' },
  'algo.advantage.is_correction_level': { to: ['token', ...ALL_REJECTED], also: SHORT, seen: 'numbers' },
  'algo.advantage.is_correction_mode': { to: ['clip'], also: [...CORRECTED, ...ALL_REJECTED], seen: 'numbers' },
  'algo.advantage.is_correction_threshold': { to: ['1.5', '5'], also: CORRECTED, seen: 'numbers' },
  'algo.dynamic_filtering_enable': { to: ['true'], also: HALF_EQUAL, seen: 'order' },
  'algo.dynamic_filtering_range': {
    to: ['0.6', '1.5'],
    also: [...HALF_EQUAL, '--algo.dynamic_filtering_enable', 'true'],
    seen: 'numbers',
  },
  'reward.clip_range': { to: ['0', '0.1'], also: SHORT, seen: 'numbers' },
  'rollout.n_samples_per_prompt': { to: ['2'], also: SHORT, seen: 'numbers' },
  'rollout.temperature': { to: ['0.5'], also: SHORT, seen: 'numbers' },
  'rollout.max_new_tokens': { to: ['6'], also: SHORT, seen: 'numbers' },
  'rollout.max_turns': { to: ['2'], also: [...SHORT, '--data.prompt_dataset', NEVER_DONE], seen: 'numbers' },
  'rollout.deadline_s': { to: ['0.05'], also: [...SHORT, ...script({ latency_ms: { step: 20 } })], seen: 'exit' },
  'rollout.turn_deadline_s': { to: ['0.05'], also: [...SHORT, ...script({ latency_ms: { step: 20 } })], seen: 'exit' },
  'rollout.block_s': { to: ['0.2'], also: [...SHORT, '--train.agent_path', SLOW_AGENT], seen: 'numbers' },
  'rollout.num_runners': { to: ['2'], also: SHORT, seen: 'files' },
  'rollout.failed_members': {
    to: ['refill'],
    also: [...SHORT, '--train.agent_path', QUARTER_FAILS, '--rollout.max_failure_rate', '1'],
    seen: 'numbers',
  },
  'rollout.max_failure_rate': {
    to: ['0.1'],
    also: ['--eval.dataset', 'none', '--train.agent_path', QUARTER_FAILS],
    seen: 'exit',
  },
  'rollout.mismatch_stop': { to: ['off'], also: WRONG_WEIGHTS, seen: 'exit' },
  'data.prompt_dataset': { to: [COLUMNS], also: SHORT, seen: 'numbers' },
  'data.input_key': { to: ['question'], also: READ, seen: 'numbers' },
  'data.label_key': { to: ['kind'], also: READ, seen: 'numbers' },
  'data.tools_key': { to: ['functions'], also: READ, seen: 'numbers' },
  'data.max_len': { to: ['80'], also: [...SHORT, '--data.prompt_dataset', NEVER_DONE], seen: 'numbers' },
  'data.prompt_probs': {
    to: ['3,1'],
    also: [...SHORT, '--data.prompt_dataset', `${COLUMNS},${NEVER_DONE}`],
    seen: 'order',
  },
  'data.max_prompt_len': { to: ['30'], also: [...SHORT, '--data.prompt_dataset', TWO_LENGTHS], seen: 'order' },
  'data.silence_s': { to: ['0.2'], also: [...SHORT, '--data.prompt_dataset', SLOW_PROGRAM], seen: 'exit' },
  'data.max_samples': { to: ['2'], also: SHORT, seen: 'order' },
  'data.num_epochs': {
    to: ['1'],
    also: ['--eval.dataset', 'none', '--train.num_steps', '4', '--data.prompt_dataset', COLUMNS],
    seen: 'numbers',
  },
  'data.shuffle': { to: ['false'], also: SHORT, seen: 'order' },
  'eval.dataset': { to: ['none'], also: EVALUATED, seen: 'numbers' },
  'eval.steps': { to: ['1'], also: EVALUATED, seen: 'numbers' },
  'eval.eval_at_start': { to: ['false'], also: EVALUATED, seen: 'numbers' },
  'eval.max_samples': { to: ['3'], also: EVALUATED, seen: 'numbers' },
  'eval.n_samples_per_prompt': { to: ['2'], also: EVALUATED, seen: 'numbers' },
  'eval.temperature': { to: ['0.2'], also: EVALUATED, seen: 'numbers' },
  'eval.greedy': { to: ['false'], also: EVALUATED, seen: 'numbers' },
  'eval.show_samples': { to: ['2'], also: EVALUATED, seen: 'printed' },
  'engine.kind': { refused: ['vllm'] },
  'engine.num_engines': { to: ['2'], also: SHORT, seen: 'files' },
  'engine.max_requests': 'own test',
  'engine.stall_s': 'own test',
  'engine.max_len': { refused: ['100'] },
  'engine.prefill_tokens': { refused: ['16'] },
  'engine.dtype': { refused: ['bfloat16'] },
  'engine.device': { refused: ['cpu'] },
  // What those of vllm change: vllm_options.test.ts
  'engine.tensor_parallel_size': { refused: ['2'] },
  'engine.pipeline_parallel_size': { refused: ['2'] },
  'engine.data_parallel_size': { refused: ['2'] },
  'engine.enable_expert_parallel': { refused: ['true'] },
  'engine.gpu_memory_utilization': { refused: ['0.5'] },
  'engine.kv_cache_gb': { refused: ['2'] },
  'engine.enable_prefix_caching': { refused: ['false'] },
  'engine.enforce_eager': { refused: ['true'] },
  'engine.attention_backend': { refused: ['FLASH_ATTN'] },
  'engine.moe_backend': { refused: ['triton'] },
  'engine.speculation': { refused: ['mtp'] },
  'engine.num_speculative_tokens': { refused: ['2'] },
  'engine.draft_model': { refused: ['draft'] },
  'engine.vllm_args': { refused: ['{"nnodes": 2}'] },
  'trainer.kind': { refused: ['torch'] },
  'trainer.num_ranks': { to: ['2'], also: [...SHORT, '--train.micro_batch_size', '3'], seen: 'numbers' },
  'trainer.device': { refused: ['cpu'] },
  'trainer.deadline_s': 'own test', // supervision.test.ts
  'trainer.num_threads': { refused: ['2'] },
  'trainer.logprob_chunk': { refused: ['16'] },
  'fsdp.param_dtype': { refused: ['bfloat16'] },
  'fsdp.packing_samples': { to: ['false'], also: [...TWO_RANKS, '--train.max_tokens_per_gpu', '100'], seen: 'numbers' },
  'tokenizer.kind': { refused: ['python'] },
  'tokenizer.tool_parser': { refused: ['hermes'] },
  'tokenizer.reasoning_parser': { refused: ['qwen3'] },
  'refit.verify_every': { to: ['1'], also: ['--eval.dataset', 'none'], seen: 'numbers' },
  'refit.cache': { refused: ['keep'] },
  'refit.transport': { refused: ['nccl'] },
  'refit.deadline_s': { to: ['0.1'], also: SLOW_LOAD, seen: 'exit' },
  'ckpt.save_steps': { to: ['1'], also: SHORT, seen: 'files' },
  'ckpt.max_num': { to: ['1'], also: [...SHORT, '--ckpt.save_steps', '1'], seen: 'files' },
  'ckpt.save_hf': { to: ['true'], also: SHORT, seen: 'files' },
  'ckpt.disable_final_save': { to: ['true'], also: SHORT, seen: 'files' },
  'launch.port': 'own test',
  'launch.silence_s': 'own test',
  'launch.ready_s': 'own test',
  'launch.stall_s': 'own test', // supervision.test.ts
  'launch.max_restarts': { to: ['0'], also: DIES, seen: 'exit' },
  'launch.python': { refused: ['python3'] },
  'simulated.script': { to: [JSON.stringify({ reply: [{ when: '', texts: ['aa'] }] })], also: SHORT, seen: 'numbers' },
  'simulated.engines_per_process': { to: ['2'], also: [...SHORT, '--engine.num_engines', '2'], seen: 'files' },
};

describe('every option', () => {
  test.each(
    Object.entries(EFFECTS).filter(
      (entry): entry is [string, Refused] => typeof entry[1] === 'object' && 'refused' in entry[1],
    ),
  )(
    '%s is refused where it cannot act',
    async (name, { refused }) => {
      const { exit, printed } = await run([`--${name}`, ...refused]);
      expect(exit, printed).toBe(2);
      expect(printed).toMatch(new RegExp(`^--(${name.replaceAll('.', '\\.')}|actor\\.model_name_or_path) `, 'm'));
    },
    LIMIT_MS,
  );

  test.each(
    Object.entries(EFFECTS).filter(
      (entry): entry is [string, Changes] => typeof entry[1] === 'object' && 'to' in entry[1],
    ),
  )(
    '%s changes the run',
    async (name, { to, also = [], seen }) => {
      const [before, after] = [await baseline(also), await run([...also, `--${name}`, ...to])];
      if (seen !== 'exit') expect([before.exit, after.exit], after.printed).toEqual([0, 0]);
      expect(after[seen]).not.toEqual(before[seen]);
    },
    LIMIT_MS,
  );

  test(
    'a run that is started twice is the same: what differs above is the option',
    async () => {
      const [one, two] = [await baseline(SHORT), await run(SHORT)];
      expect([two.numbers, two.files, two.exit, two.order]).toEqual([one.numbers, one.files, one.exit, one.order]);
    },
    LIMIT_MS,
  );
});

describe('options with a test of their own', () => {
  test(
    'run.dir names the directory, run.resume goes on in it',
    async () => {
      const place = join(dir, 'named', 'deep');
      const first = await run([...SHORT, '--run.dir', place], { runDir: place });
      expect(first.files).toContain('metrics.jsonl');
      const copy = join(dir, 'copy');
      cpSync(place, copy, { recursive: true });
      const more = await run(['--eval.dataset', 'none', '--train.num_steps', '3', '--run.dir', copy, '--run.resume'], {
        runDir: copy,
      });
      expect(more.exit, more.printed).toBe(0);
      expect(more.printed).toContain('Resumed at step 2');
      expect(more.metrics.map((line) => line.step)).toEqual([1, 2, 3]);
    },
    LIMIT_MS,
  );

  test(
    'engine.max_requests bounds what an engine samples at once',
    async () => {
      // 32 rollouts of at most 12 tokens: some 30 steps of an engine that samples all of a batch at once, over 100 of one
      // that samples two. It dies at its 86th step, which only the second reaches; parity at the start takes 16.
      const dies = { failures: [{ worker: 'engine-0', what: 'exit', on: 'step', nth: 86 }] };
      const also = [...SHORT, ...script({ ...dies, latency_ms: { step: 5 } })];
      const [wide, narrow] = [await baseline(also), await run([...also, '--engine.max_requests', '2'])];
      expect(narrow.numbers).toBe(wide.numbers);
      const restarts = ({ metrics }: Ran) => metrics.at(-1)?.restarts;
      expect([restarts(wide), restarts(narrow)]).toEqual([0, 1]);
    },
    LIMIT_MS,
  );

  test(
    'launch.port is where the controller listens',
    async () => {
      const { createServer } = await import('node:net');
      const server = createServer();
      await new Promise<void>((done) => server.listen(0, '127.0.0.1', done));
      const { port } = server.address() as { port: number };
      await new Promise((done) => server.close(done));
      let commands = '';
      const { exit, printed } = await run([...SHORT, '--launch.port', String(port)], {
        onOutput: (out, pid) => {
          if (/^step +1\//m.test(out)) commands ||= childrenOf(pid).map(commandOf).join('\n');
        },
      });
      expect(exit, printed).toBe(0);
      expect(commands).toContain(`tcp://127.0.0.1:${port}`);
    },
    LIMIT_MS,
  );

  /** SIGSTOP for the engine of a run, once it has said `text`. */
  const stopEngine = (text: RegExp) => {
    let stopped = false;
    return (out: string, pid: number) => {
      if (stopped || !text.test(out)) return;
      const engine = childrenOf(pid).find((child) => commandOf(child).includes('engine-0'));
      if (engine === undefined) return;
      stopped = true;
      process.kill(engine, 'SIGSTOP');
    };
  };

  test(
    'launch.silence_s is how long a worker may say nothing; another one takes its place',
    async () => {
      const slow = script({ latency_ms: { step: 20 } });
      const { exit, printed } = await run(
        ['--eval.dataset', 'none', '--train.num_steps', '3', ...slow, '--launch.silence_s', '2'],
        { onOutput: stopEngine(/^step +1\//m) },
      );
      expect(printed).toMatch(/engine-0 was silent for\s+and is killed/);
      expect(exit, printed).toBe(0);
    },
    LIMIT_MS,
  );

  test(
    'engine.stall_s is how long an engine with requests may make no step; another one takes its place',
    async () => {
      const stall = script({ failures: [{ worker: 'engine-0', what: 'stall', on: 'step', nth: 25 }] });
      const { exit, printed, metrics } = await run([...SHORT, ...stall, '--engine.stall_s', '2']);
      expect(printed).toMatch(/engine-0 made no step for\s+and is killed\. Its stacks:/);
      expect(exit, printed).toBe(0);
      expect(metrics.map((line) => [line.rollouts, line.engines_killed, line.restarts])).toEqual([
        [16, 1, 1],
        [16, 0, 1],
      ]);
    },
    LIMIT_MS,
  );

  test(
    'launch.ready_s is the same before a worker is ready; the run says which one it was',
    async () => {
      const { exit, printed } = await run([...SHORT, '--launch.ready_s', '2'], {
        onOutput: stopEngine(/starting workers/),
      });
      expect(printed).toMatch(/engine-0 was silent for\s+and is killed/);
      expect(exit, printed).toBe(1);
    },
    LIMIT_MS,
  );
});

function commandOf(pid: number): string {
  try {
    return readFileSync(`/proc/${pid}/cmdline`, 'utf8');
  } catch {
    return ''; // it ended while we looked
  }
}

function childrenOf(pid: number): number[] {
  return readdirSync('/proc')
    .filter((name) => /^\d+$/.test(name))
    .flatMap((name) => {
      try {
        const stat = readFileSync(`/proc/${name}/stat`, 'utf8');
        return Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[1]) === pid ? [Number(name)] : [];
      } catch {
        return []; // it ended while we looked
      }
    });
}
