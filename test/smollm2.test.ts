/** The recipe on a pretrained model: rewards, splits, options. The model itself is for `npm run prove smollm2`. */
import { describe, expect, test } from 'vitest';
import type { Task, Turn } from '../molt/agent.ts';
import { loadConfig } from '../molt/config.ts';
import { agent, prompts } from '../scripts/smollm2.ts';
import { agent as needleAgent } from '../scripts/smollm2_reasoning_gym.ts';

const RECIPES = ['scripts/smollm2.ts', 'scripts/smollm2_reasoning_gym.ts'];
const SIMULATED = ['engine', 'trainer', 'tokenizer'].flatMap((kind) => [`--${kind}.kind`, 'simulated']);

function turn(text: string, reason: 'stop' | 'length' = 'stop'): Turn {
  const signal = new AbortController().signal;
  const rest = { reasoning: null, toolCalls: [], parseError: null, ids: new Int32Array(), turn: 0, signal };
  return { text, content: text, reason, ...rest };
}

describe('reward', () => {
  const task: Task = {
    input: 'Rosa, 38, lives in Dublin.',
    label: { name: 'Rosa', age: 38, city: 'Dublin' },
    tools: null,
    seed: 1,
    rolloutId: 'r',
    index: 0,
  };
  const rewardOf = (reply: Turn) => {
    const env = new agent();
    expect(env.reset(task).at(-1)).toEqual({ role: 'user', content: 'Rosa, 38, lives in Dublin.' });
    const { reward, done } = env.step(reply);
    expect(done).toBe(true);
    return reward;
  };

  test.each([
    '{"name": "Rosa", "age": 38, "city": "Dublin"}',
    '{"name":"Rosa","age":38,"city":"Dublin"}',
    ' {"city": "Dublin",\n"name": "Rosa", "age": 38} ',
  ])('%j is right', (text) => expect(rewardOf(turn(text))).toBe(1));

  test.each([
    '',
    'Rosa',
    '{"name": "Rosa", "age": 39, "city": "Dublin"}',
    '{"name": "Rosa", "age": "38", "city": "Dublin"}',
    '{"name": "rosa", "age": 38, "city": "Dublin"}',
    '{"name": "Rosa", "age": 38}',
    '{"name": "Rosa", "age": 38, "city": "Dublin", "country": "Ireland"}',
    '[{"name": "Rosa", "age": 38, "city": "Dublin"}]',
    '{"name": "Rosa", "age": 38, "city": "Dublin"} Here you are.',
    '```json\n{"name": "Rosa", "age": 38, "city": "Dublin"}\n```',
    '{"name": "Lena", "age": 52, "city": "Bern"}',
    'null',
  ])('%j is wrong', (text) => expect(rewardOf(turn(text))).toBe(0));

  test('what the token limit cut off is wrong', () =>
    expect(rewardOf(turn('{"name": "Rosa", "age": 38, "city": "Dublin"}', 'length'))).toBe(0));
});

test.each<[string, number, ('stop' | 'length')?]>([
  ['Ayan', 1],
  [' Ayan\n', 1],
  ['Ayan', 0, 'length'],
  ['ayan', 0],
  ['Ayan.', 0],
  ['Ayan bears playing rugby.', 0],
  ['Tayo', 0],
  ['', 0],
])('the needle: %j gets %d', (text, reward, reason) => {
  const env = new needleAgent();
  const input = 'Tayo accepts the color red. Ayan bears playing rugby. \nWho bears playing rugby?';
  const messages = env.reset({ input, label: 'Ayan', tools: null, seed: 1, rolloutId: 'r', index: 0 });
  expect(messages.at(-1)).toEqual({ role: 'user', content: input });
  expect(env.step(turn(text, reason))).toEqual({ reward, done: true });
});

describe('sentences', () => {
  const [train, heldOut] = [prompts({ split: 'train' }), prompts({ split: 'heldout' })];
  const values = (list: typeof train, key: string) =>
    new Set(list.map(({ label }) => (label as Record<string, string | number>)[key]));

  test('are the same every time, each once, and hold their answers', () => {
    expect(prompts({ split: 'train' })).toEqual(train);
    expect(new Set(train.map((p) => p.input)).size).toBe(2000);
    expect(new Set(heldOut.map((p) => p.input)).size).toBe(100);
    for (const { input, label } of [...train, ...heldOut]) {
      for (const value of Object.values(label as object)) expect(input).toContain(String(value));
    }
  });

  test('no name and no city of a held-out sentence is in a training sentence', () => {
    for (const key of ['name', 'city']) {
      for (const value of values(heldOut, key)) for (const p of train) expect(p.input).not.toContain(String(value));
    }
  });
});

describe.each(RECIPES)('recipe %s', (recipePath) => {
  test('its options pass every check, on real and on simulated workers', async () => {
    const { options } = await loadConfig([recipePath]);
    expect(options['actor.model_name_or_path']).toMatch(/\.cache\/smollm2\/[0-9a-f]{16}$/);
    expect((await loadConfig([recipePath, ...SIMULATED])).options['train.agent_path']).toBe(recipePath);
  });

  test.each([[SIMULATED], [['--actor.model_name_or_path', 'elsewhere']]])(
    'nothing is downloaded with %j',
    async (args) => {
      const { recipe, options } = await loadConfig([recipePath, ...args]);
      const lines: string[] = [];
      const prompts = { 'data.prompt_dataset': 'mine.jsonl', 'eval.dataset': '' };
      await recipe.prepare?.({ ...options, ...prompts }, (line) => lines.push(line));
      expect(lines).toEqual([]);
    },
  );
});
