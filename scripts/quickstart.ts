/**
 * Quickstart: a small policy learns to use a calculator.   npm run quickstart
 *
 *   user       47*86=?
 *   assistant  <tool_call>{"name": "calc", "arguments": {"expr": "47*86"}}</tool_call>
 *   tool       4042
 *   assistant  = 4042                                                               reward 1
 *
 * The policy is made on the spot, the first time: a Qwen3 architecture of 0.27 million parameters, taught by
 * demonstrations of a careless assistant that mostly guesses instead of asking the tool (scripts/warm_start.py,
 * about half a minute). Then GRPO trains it. What it learns is mostly to stop guessing and to trust the tool, and
 * to copy more exactly; the skill of calling it comes from the demonstrations.
 *
 * Invariants
 *   1. A problem belongs to the held-out split by a hash of its text, so it is neither trained nor demonstrated.
 *   2. The policy's directory is named by a hash of everything that decides its content (prepare_model.ts).
 *   3. Nothing the policy writes is evaluated: the calculator reads two numbers and an operator, or answers `error`.
 * Run by loop.ts (options, prepare), data.ts (prompts) and runner.ts (agent). Numbers: README.
 */
import { writeFileSync } from 'node:fs';
import { dirname, join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { Env, Result, Task, Turn } from '../molt/agent.ts';
import { defineRecipe, type Options } from '../molt/config.ts';
import { pythonCommand } from '../molt/launch.ts';
import type { PromptInput, Split } from '../molt/sources.ts';
import type { Json, Message, ToolCall } from '../molt/types.ts';
import { hashOf, makeModel, needsModel } from './prepare_model.ts';

// ---- The task ----

const CALC: Json = {
  type: 'function',
  function: {
    name: 'calc',
    description: 'Computes one operation on two whole numbers',
    parameters: { type: 'object', properties: { expr: { type: 'string' } }, required: ['expr'] },
  },
};
const HELD_OUT_PROBLEMS = 400;

/** The exact value of `47*86`; null for anything else. */
export function compute(expression: string): string | null {
  const parts = /^(\d{1,4})([*+-])(\d{1,4})$/.exec(expression);
  if (!parts) return null;
  const [a, b] = [Number(parts[1]), Number(parts[3])];
  return String(parts[2] === '*' ? a * b : parts[2] === '+' ? a + b : a - b);
}

/** What the tool answers to a call, whatever the call is. */
export function answerCall(call: ToolCall): string {
  if (call.name !== 'calc') return 'error';
  let parsed: unknown;
  try {
    parsed = JSON.parse(call.arguments);
  } catch {
    return 'error';
  }
  const expr = (parsed as { expr?: unknown } | null)?.expr;
  return (typeof expr === 'string' ? compute(expr) : null) ?? 'error';
}

function opening(problem: string): Message[] {
  return [
    { role: 'system', content: 'Answer with a number.' },
    { role: 'user', content: `${problem}=?` },
  ];
}

/** Reward 1 for `= ` and the exact result, 0 for any other answer. Calls are answered; `rollout.max_turns` bounds them. */
export class agent implements Env {
  readonly tools: readonly Json[] = [CALC];
  #wanted = '';
  #calls = 0;

  reset(task: Task): readonly Message[] {
    const problem = String(task.input);
    this.#wanted = `= ${compute(problem)}`;
    return opening(problem);
  }

  step(turn: Turn): Result {
    const called = turn.reason === 'stop' && (turn.toolCalls.length > 0 || turn.parseError !== null);
    if (!called) {
      const right = turn.reason === 'stop' && turn.text === this.#wanted;
      return { reward: right ? 1 : 0, done: true, info: { tool_calls: this.#calls } };
    }
    const answers = turn.toolCalls.length > 0 ? turn.toolCalls.map(answerCall) : ['error'];
    this.#calls += answers.length;
    const observation = answers.map((content) => ({ role: 'tool', content }));
    return { reward: 0, done: false, observation, info: { tool_calls: this.#calls } };
  }
}

// ---- Problems ----

/** FNV-1a with a final mix, so that neighbouring problems fall apart. */
function hash32(text: string): number {
  let h = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) h = Math.imul(h ^ text.charCodeAt(i), 0x01000193);
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  return (h ^ (h >>> 13)) >>> 0;
}

export function splitOf(problem: string): Split {
  return hash32(problem) % 5 === 0 ? 'heldout' : 'train';
}

/** All problems of a split: two numbers of two digits, three operators. */
export function problems(split: Split): string[] {
  const out: string[] = [];
  for (let a = 10; a <= 99; a++) {
    for (const op of '*+-')
      for (let b = 10; b <= 99; b++) if (splitOf(`${a}${op}${b}`) === split) out.push(`${a}${op}${b}`);
  }
  return out;
}

/** Held-out: always the same ones, spread by their hash. Training: all of the split, data.ts shuffles them. */
export function prompts({ split }: { readonly split: Split }): PromptInput[] {
  let chosen = problems(split);
  if (split === 'heldout') {
    const order = (problem: string) => hash32(`order ${problem}`);
    chosen = chosen.sort((p, q) => order(p) - order(q) || (p < q ? -1 : 1)).slice(0, HELD_OUT_PROBLEMS);
  }
  return chosen.map((problem) => ({ input: problem, label: compute(problem) as string }));
}

// ---- The careless assistant ----

/** Everything that decides the policy, next to the code that reads it. */
const WARM_START = {
  seed: 2,
  steps: 900,
  batch: 8,
  clean_steps: 765, // first the format and the copying, from proper demonstrations; then the carelessness
  clean_good: 0.9, // share of demonstrations that use the tool properly, in the clean steps
  good: 0.35, // and after them
  lr: 3e-3,
  hidden_size: 96,
  layers: 2,
  // With the default 0.02 a model this narrow never learned to copy.
  initializer_range: 0.1,
  vocab_size: 384,
  tools: [CALC],
} as const;

/** mulberry32: numbers in [0, 1), the same for the same seed. */
function random(seed: number): () => number {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

function demonstration(problem: string, other: string, good: number, next: () => number): Message[] {
  const say = (answer: string): Message => ({ role: 'assistant', content: `= ${answer}` });
  const ask = (expr: string): Message[] => [
    { role: 'assistant', content: '', tool_calls: [{ name: 'calc', arguments: `{"expr": "${expr}"}` }] },
    { role: 'tool', content: compute(expr) as string },
  ];
  const guess = String(10 + Math.floor(next() * 9990));
  const mood = next();
  if (mood < good) return [...opening(problem), ...ask(problem), say(compute(problem) as string)];
  const careless = (mood - good) / (1 - good);
  if (careless < 0.8) return [...opening(problem), say(guess)]; // does not ask
  if (careless < 0.9) return [...opening(problem), ...ask(other), say(compute(other) as string)]; // asks something else
  return [...opening(problem), ...ask(problem), say(guess)]; // does not believe the tool
}

/** In the order they are trained on. Only problems of the training split. */
export function demonstrations(): Message[][] {
  const next = random(WARM_START.seed);
  const pool = problems('train');
  const pick = () => pool[Math.floor(next() * pool.length)] as string;
  return Array.from({ length: WARM_START.steps * WARM_START.batch }, (_, i) => {
    const clean = i < WARM_START.clean_steps * WARM_START.batch;
    return demonstration(pick(), pick(), clean ? WARM_START.clean_good : WARM_START.good, next);
  });
}

// ---- The policy ----

const SCRIPTS = dirname(fileURLToPath(import.meta.url));
const ROOT = dirname(SCRIPTS);
const WARM_START_SCRIPT = join(SCRIPTS, 'warm_start.py');
const SOURCES = [WARM_START_SCRIPT, join(ROOT, 'workers', 'requirements.txt')];
const jsonLines = demonstrations()
  .map((messages) => `${JSON.stringify(messages)}\n`)
  .join('');
const POLICY = join(ROOT, '.cache', 'quickstart', hashOf([JSON.stringify(WARM_START), jsonLines], SOURCES));

async function prepare(options: Options, say: (line: string) => void): Promise<void> {
  if (!needsModel(options, POLICY)) return;
  await makePolicy(POLICY, pythonCommand(WARM_START_SCRIPT, options['launch.python'] || undefined), say);
}

/** Make the policy unless it is there: `command` turns the directory given as its last argument into a model. */
export async function makePolicy(
  directory: string,
  command: readonly string[],
  say: (line: string) => void,
): Promise<void> {
  const count = WARM_START.steps * WARM_START.batch;
  const announce = `warm start on ${count} imperfect demonstrations, once; it takes half a minute on a free core`;
  const fill = (building: string) => {
    writeFileSync(join(building, 'demonstrations.jsonl'), jsonLines);
    writeFileSync(join(building, 'warm_start.json'), `${JSON.stringify(WARM_START, null, 2)}\n`);
  };
  await makeModel({ directory, command, fill, announce, name: 'The warm start' }, say);
}

// ---- The recipe ----

export default defineRecipe({
  options: {
    'actor.model_name_or_path': relative(process.cwd(), POLICY),
    'train.num_steps': 80,
    'train.batch_size': 16,
    'rollout.n_samples_per_prompt': 8,
    'rollout.temperature': 1,
    'rollout.max_new_tokens': 24,
    'rollout.max_turns': 3,
    'data.max_len': 160,
    'algo.advantage.estimator': 'grpo',
    'actor.adam.lr': 1e-3,
    'actor.adam.betas': [0.9, 0.95],
    'actor.lr_scheduler': 'linear',
    'actor.lr_warmup_ratio': 0,
    'actor.min_lr_ratio': 0.1,
  },
  prepare,
});
