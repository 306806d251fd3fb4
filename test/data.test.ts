import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { ConfigError } from '../molt/config.ts';
import { type DataOptions, loadPrompts, type PromptSet, PromptStream, promptsOf, sharedInputs } from '../molt/data.ts';

let directory: string;
beforeAll(() => {
  directory = mkdtempSync(join(tmpdir(), 'molt-data-'));
});
afterAll(() => rmSync(directory, { recursive: true }));

const OPTIONS: DataOptions = {
  path: '',
  split: 'train',
  seed: 1,
  inputKey: 'input',
  labelKey: 'label',
  toolsKey: '',
  maxSamples: 0,
  shuffle: true,
};
let numFiles = 0;
function file(text: string, ending = 'jsonl'): string {
  const path = join(directory, `data-${numFiles++}.${ending}`);
  writeFileSync(path, text);
  return path;
}
function load(path: string, more: Partial<DataOptions> = {}): Promise<PromptSet> {
  return loadPrompts({ ...OPTIONS, path, ...more });
}
/** n prompts p0, p1, ... with their number as the label. */
function numbered(n: number): string {
  return file(Array.from({ length: n }, (_, i) => `${JSON.stringify({ input: `p${i}`, label: i })}\n`).join(''));
}
async function problemsOf(path: string, more: Partial<DataOptions> = {}): Promise<string[]> {
  const error = await load(path, more).then(
    () => null,
    (reason: unknown) => reason,
  );
  expect(error).toBeInstanceOf(ConfigError);
  return (error as ConfigError).lines.map((line) => line.replace(path, 'FILE'));
}
function take(stream: PromptStream, n: number): number[] {
  return Array.from({ length: n }, () => stream.next().index);
}
const ORDER = { seed: 1, shuffle: true };

describe('sources', () => {
  test('a .jsonl file, with a byte-order mark, CRLF, blank lines and falsy labels', async () => {
    const path = file('\uFEFF{"input": "a", "label": 0}\r\n\r\n{"input": "b", "label": 7}\n');
    const set = await load(path);
    expect(promptsOf(set)).toEqual([
      { source: path, epoch: 0, index: 0, input: 'a', label: 0, tools: null },
      { source: path, epoch: 0, index: 1, input: 'b', label: 7, tools: null },
    ]);
  });

  test('a .json list with other columns, chat messages and tools', async () => {
    const input = [{ role: 'user', content: 'hi' }];
    const tools = [{ type: 'function', function: { name: 'calc' } }];
    const path = file(JSON.stringify([{ question: input, schemas: tools, answer: 'x' }]), 'json');
    const set = await load(path, { inputKey: 'question', labelKey: '', toolsKey: 'schemas' });
    expect(set.items).toEqual([{ index: 0, input, label: null, tools }]);
  });

  test('a module is told split and seed and may be a generator', async () => {
    const path = file(
      'export async function* prompts({ split, seed }) { yield { input: split, label: seed }; yield { input: "b" }; }',
      'ts',
    );
    const set = await load(path, { split: 'heldout', seed: 9 });
    expect(set.items.map(({ input, label }) => [input, label])).toEqual([
      ['heldout', 9],
      ['b', null],
    ]);
  });

  test('a module may return a list', async () => {
    expect((await load(file('export const prompts = () => [{ input: "a", label: [1] }];', 'ts'))).items).toHaveLength(
      1,
    );
  });

  const broken: readonly (readonly [what: string, text: string, ending: string, lines: (string | RegExp)[]])[] = [
    ['an empty file', '', 'jsonl', ['--data.prompt_dataset FILE: has no prompts']],
    ['blank lines only', '\n\n', 'jsonl', ['--data.prompt_dataset FILE: has no prompts']],
    ['a broken line', '{"input": "a", "label": 1}\n{"input": \n', 'jsonl', [/FILE: line 2: not JSON: /]],
    [
      'a line that is no object',
      '[1]\n"x"\n',
      'jsonl',
      [/line 1: must be an object, got a list/, /line 2: must be an object, got text/],
    ],
    [
      'a missing column',
      '{"question": "a", "label": 1}',
      'jsonl',
      [/line 1: no column input \(--data\.input_key\); it has question, label$/],
    ],
    ['a missing label', '{"input": "a"}', 'jsonl', [/line 1: no column label \(--data\.label_key\); it has input$/]],
    [
      'an input that is a number',
      '{"input": 3, "label": 1}',
      'jsonl',
      [/line 1: input must be text or a list of chat messages, not empty, got a number/],
    ],
    ['an empty input', '{"input": " ", "label": 1}', 'jsonl', [/line 1: input must be text/]],
    ['messages without a role', '{"input": [{"content": "a"}], "label": 1}', 'jsonl', [/line 1: input must be text/]],
    [
      'labels of two types',
      '{"input": "a", "label": "4"}\n{"input": "b", "label": 4}',
      'jsonl',
      [/line 2: label is a number, but text at line 1/],
    ],
    ['broken JSON', '[\n {"input": "a"}\n {}]', 'json', [/FILE: line 3: not JSON: /]],
    ['JSON that is no list', '{"input": "a"}', 'json', [/must hold a list of objects, got an object/]],
    [
      'an item that is no object',
      '[{"input": "a", "label": 1}, null]',
      'json',
      [/item 2: must be an object, got null/],
    ],
    ['another ending', 'a,b', 'csv', [/must be a \.jsonl file, a \.json file or a module/]],
    ['a module without prompts', 'export const prompt = 1;', 'ts', [/does not export a function `prompts`/]],
    [
      'a module that gives no list',
      'export const prompts = () => 5;',
      'ts',
      [/must give a list or another iterable, got a number/],
    ],
    [
      'a field that is misspelt',
      'export const prompts = () => [{ input: "a", lable: 1 }];',
      'ts',
      [/prompt 1: unknown field lable, allowed are input, label, tools/],
    ],
    [
      'a label that is not JSON',
      'export const prompts = () => [{ input: "a", label: { x: NaN } }];',
      'ts',
      [/prompt 1: label must be plain JSON/],
    ],
    [
      'a label that is a date',
      'export const prompts = () => [{ input: "a", label: new Date(0) }];',
      'ts',
      [/label must be plain JSON, got a Date/],
    ],
    [
      'tools that are no schemas',
      'export const prompts = () => [{ input: "a", tools: ["calc"] }];',
      'ts',
      [/tools must be a list of JSON schemas, got a list/],
    ],
  ];
  test.each(broken)('%s is refused', async (_, text, ending, lines) => {
    const found = await problemsOf(file(text, ending));
    expect(found).toEqual(lines.map((line) => (typeof line === 'string' ? line : expect.stringMatching(line))));
  });

  test('a missing file and a directory are refused', async () => {
    expect(await problemsOf(join(directory, 'none.jsonl'))).toEqual(['--data.prompt_dataset FILE: no such file']);
    expect(await problemsOf(directory, { split: 'heldout' })).toEqual(['--eval.dataset FILE: is not a file']);
  });

  test('many problems are said at once, up to ten, the rest counted', async () => {
    const found = await problemsOf(file('{}\n'.repeat(30)));
    expect(found).toHaveLength(11);
    expect(found.at(-1)).toBe('--data.prompt_dataset FILE: 50 more problems'); // two missing columns a line
  });
});

describe('order', () => {
  test('is that of the seed: the same for the same, another for another', async () => {
    const set = await load(numbered(50));
    const first = take(new PromptStream(set, ORDER), 50);
    expect(take(new PromptStream(set, ORDER), 50)).toEqual(first);
    expect(take(new PromptStream(set, { seed: 2, shuffle: true }), 50)).not.toEqual(first);
    expect(first).not.toEqual([...first].sort((a, b) => a - b));
  });

  test('every epoch gives every prompt once, in an order of its own', async () => {
    const stream = new PromptStream(await load(numbered(20)), ORDER);
    const epochs = [0, 1, 2].map((epoch) => {
      const prompts = Array.from({ length: 20 }, () => stream.next());
      expect(new Set(prompts.map((prompt) => prompt.epoch))).toEqual(new Set([epoch]));
      return prompts.map((prompt) => prompt.index);
    });
    for (const indices of epochs)
      expect([...indices].sort((a, b) => a - b)).toEqual(Array.from({ length: 20 }, (_, i) => i));
    expect(new Set(epochs.map(String)).size).toBe(3);
  });

  test('without shuffling is that of the source, each epoch', async () => {
    expect(take(new PromptStream(await load(numbered(3)), { seed: 1, shuffle: false }), 7)).toEqual([
      0, 1, 2, 0, 1, 2, 0,
    ]);
  });

  test('is fair: each prompt comes first about equally often', async () => {
    const set = await load(numbered(4));
    const firsts = [0, 0, 0, 0];
    for (let seed = 0; seed < 2000; seed++) {
      const index = new PromptStream(set, { seed, shuffle: true }).next().index;
      firsts[index] = (firsts[index] as number) + 1;
    }
    for (const count of firsts) expect(Math.abs(count - 500)).toBeLessThan(100); // 5 standard deviations
  });

  test('max_samples draws by the seed, and without shuffling takes the first', async () => {
    const path = numbered(40);
    const indices = async (more: Partial<DataOptions>) =>
      (await load(path, { maxSamples: 5, ...more })).items.map((item) => item.index);
    const drawn = await indices({});
    expect(drawn).toHaveLength(5);
    expect(drawn).toEqual([...drawn].sort((a, b) => a - b));
    expect(await indices({})).toEqual(drawn);
    expect(await indices({ seed: 2 })).not.toEqual(drawn);
    expect(await indices({ shuffle: false })).toEqual([0, 1, 2, 3, 4]);
    expect(await indices({ maxSamples: 100 })).toHaveLength(40);
  });
});

describe('positions', () => {
  test('restored anywhere, the stream goes on as if it had never stopped', async () => {
    const path = numbered(7);
    const whole = take(new PromptStream(await load(path), ORDER), 30);
    for (let stop = 0; stop <= 22; stop++) {
      const before = new PromptStream(await load(path), ORDER);
      take(before, stop);
      const position = JSON.parse(JSON.stringify(before.position));
      const after = new PromptStream(await load(path), ORDER);
      after.restore(position);
      expect(after.position).toEqual(position);
      expect(take(after, 8)).toEqual(whole.slice(stop, stop + 8));
    }
  });

  test('are bound to data, seed and order', async () => {
    const set = await load(numbered(5));
    const { position } = new PromptStream(set, ORDER);
    const restore =
      (other: PromptSet, order = ORDER) =>
      () =>
        new PromptStream(other, order).restore(position);
    expect(restore(set)).not.toThrow();
    const changed = await load(file('{"input": "a", "label": 1}'));
    expect(restore(changed)).toThrow(/Cannot resume .*the prompts are not those of the checkpoint/);
    expect(restore(set, { seed: 3, shuffle: true })).toThrow(/--train\.seed was 1, is 3/);
    expect(restore(set, { seed: 1, shuffle: false })).toThrow(/--data\.shuffle was true, is false/);
    expect(() => new PromptStream(set, ORDER).restore({ ...position, index: 6 })).toThrow(
      /no position at epoch 0, index 6/,
    );
  });

  test('the hash sees every label, and which prompts were drawn', async () => {
    const hash = async (text: string, more: Partial<DataOptions> = {}) => (await load(file(text), more)).sha256;
    const text = '{"input": "a", "label": 1}\n{"input": "b", "label": 2}';
    expect(await hash(text)).toBe(await hash(text));
    expect(await hash(text.replace('2', '3'))).not.toBe(await hash(text));
    expect(await hash(text, { maxSamples: 1 })).not.toBe(await hash(text));
  });
});

test('inputs in both of two sets are counted', async () => {
  const held = await load(file('{"input": "a", "label": 1}\n{"input": "b", "label": 2}'));
  const trained = await load(file('{"input": "b", "label": 9}\n{"input": "c", "label": 2}'));
  expect(sharedInputs(held, trained)).toBe(1);
  expect(sharedInputs(held, held)).toBe(2);
});
