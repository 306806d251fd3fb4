/**
 * A task of reasoning-gym for the pretrained model of smollm2.ts: find who of two did it, answer with the name alone.
 *
 *   npx tsx molt/loop.ts scripts/smollm2_reasoning_gym.ts
 *
 *   user       Tayo accepts the color red. Ayan bears playing rugby.
 *              Who bears playing rugby? Reply only with a name.
 *   assistant  Ayan                                                                 reward 1
 *
 * Prompts and labels come from scripts/reasoning_gym_prompts.py, which keeps the questions of the splits apart.
 * Reward: 1 when the reply, blanks at its ends removed, is the label to the letter, else 0. The package's own judge is
 * not asked. For another task change TASK, CONFIG and EXAMPLES; a label must be the only right answer.
 * Run by loop.ts (options, prepare) and runner.ts (agent). Numbers: README.
 */
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { Env, Result, Task, Turn } from '../molt/agent.ts';
import { defineRecipe, type Options } from '../molt/config.ts';
import type { Json, Message } from '../molt/types.ts';
import { run } from './prepare_model.ts';
import { preparePolicy, SMOLLM2 } from './smollm2.ts';

const TASK = 'needle_haystack';
const CONFIG = { min_num_statements: 2, max_num_statements: 2 };
/** They make the model answer at all: without them it talks, and no reward is ever 1. */
const EXAMPLES: readonly Message[] = [
  { role: 'system', content: 'Reply with the name.' },
  { role: 'user', content: 'Ann likes tea. Tom hates jam. \nWho hates jam? Reply only with a name.' },
  { role: 'assistant', content: 'Tom' },
  { role: 'user', content: 'Max admires horses. Lea loves chess. \nWho admires horses? Reply only with a name.' },
  { role: 'assistant', content: 'Max' },
];

export class agent implements Env {
  #wanted: Json = null;

  reset(task: Task): readonly Message[] {
    this.#wanted = task.label;
    return [...EXAMPLES, { role: 'user', content: String(task.input) }];
  }

  step(turn: Turn): Result {
    const right = turn.reason === 'stop' && turn.text.trim() === this.#wanted;
    return { reward: right ? 1 : 0, done: true };
  }
}

// ---- The recipe ----

const SETUP = join(dirname(fileURLToPath(import.meta.url)), 'setup.sh');
const PROMPTS = `scripts/reasoning_gym_prompts.py --task ${TASK} --config '${JSON.stringify(CONFIG)}'`;

/** reasoning-gym goes into .venv; into another interpreter only its owner installs anything. */
async function prepare(options: Options, say: (line: string) => void): Promise<void> {
  const sources = [options['data.prompt_dataset'], options['eval.dataset']];
  if (options['launch.python'] === '' && sources.some((source) => source.includes('reasoning_gym_prompts.py')))
    await run('The installation of reasoning-gym', ['bash', SETUP, 'reasoning-gym'], say);
  await preparePolicy(options, say);
}

export default defineRecipe({
  options: {
    ...SMOLLM2,
    'data.prompt_dataset': `${PROMPTS} --size 2000`,
    'eval.dataset': `${PROMPTS} --heldout-size 100`,
    'train.num_steps': 10,
    'rollout.max_new_tokens': 12,
    'data.max_len': 192,
  },
  prepare,
});
