import { mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { ConfigError } from '../molt/config.ts';
import {
  type DataOptions,
  type Filter,
  fitting,
  type Length,
  loadPrompts,
  type PromptSet,
  PromptStream,
  promptsOf,
  sharedPrompts,
} from '../molt/data.ts';
import type { Item } from '../molt/sources.ts';
import type { Prompt } from '../molt/types.ts';

/** The next prompt of a stream that has no end. */
function given(stream: PromptStream): Prompt {
  const prompt = stream.next();
  if (!prompt) throw new Error('the stream is over');
  return prompt;
}

let directory: string;
beforeAll(() => {
  directory = mkdtempSync(join(tmpdir(), 'molt-data-'));
});
afterAll(() => rmSync(directory, { recursive: true }));

const OPTIONS: DataOptions = {
  sources: '',
  split: 'train',
  seed: 1,
  inputKey: 'input',
  labelKey: 'label',
  toolsKey: '',
  maxSamples: [0],
  shuffle: true,
  python: '',
  silenceMs: 60_000,
  warn: () => {},
};
let numFiles = 0;
function file(text: string, ending = 'jsonl'): string {
  const path = join(directory, `data-${numFiles++}.${ending}`);
  writeFileSync(path, text);
  return path;
}
function load(sources: string, more: Partial<DataOptions> = {}): Promise<PromptSet> {
  return loadPrompts({ ...OPTIONS, sources, ...more });
}
/** The prompts of a set of one source. */
async function loadItems(path: string, more: Partial<DataOptions> = {}): Promise<readonly Item[]> {
  const { sources } = await load(path, more);
  expect(sources).toHaveLength(1);
  return sources[0]?.items ?? [];
}
/** n prompts p0, p1, ... with their number as the label. */
function numbered(n: number, name = 'p'): string {
  return file(Array.from({ length: n }, (_, i) => `${JSON.stringify({ input: `${name}${i}`, label: i })}\n`).join(''));
}
async function problemsOf(path: string, more: Partial<DataOptions> = {}): Promise<string[]> {
  const error = await load(path, more).then(
    () => null,
    (reason: unknown) => reason,
  );
  expect(error).toBeInstanceOf(ConfigError);
  return (error as ConfigError).lines.map((line) => line.replaceAll(path, 'FILE'));
}
function take(stream: PromptStream, n: number): number[] {
  return Array.from({ length: n }, () => given(stream).index);
}
const ORDER = { seed: 1, shuffle: true, weights: [] };

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
    const items = await loadItems(path, { inputKey: 'question', labelKey: '', toolsKey: 'schemas' });
    expect(items).toEqual([{ index: 0, input, label: null, tools }]);
  });

  test('a module is told split and seed and may be a generator', async () => {
    const path = file(
      'export async function* prompts({ split, seed }) { yield { input: split, label: seed }; yield { input: "b" }; }',
      'ts',
    );
    const items = await loadItems(path, { split: 'heldout', seed: 9 });
    expect(items.map(({ input, label }) => [input, label])).toEqual([
      ['heldout', 9],
      ['b', null],
    ]);
  });

  test('a line ends in a line feed and nowhere else, and must be UTF-8', async () => {
    const text = '{"input": "a\u2028b\u2029c\u0085 \u00e9\u{1f642}", "label": 1}\n{"input": "last", "label": 2}';
    expect((await loadItems(file(text))).map(({ input }) => input)).toEqual([
      'a\u2028b\u2029c\u0085 \u00e9\u{1f642}',
      'last',
    ]);
    const path = file('');
    writeFileSync(path, Buffer.concat([Buffer.from('{"input": "a", "label": 1}\n"'), Buffer.from([0xff, 10, 0xfe])]));
    expect(await problemsOf(path)).toEqual([
      '--data.prompt_dataset FILE: line 2: is not UTF-8',
      '--data.prompt_dataset FILE: line 3: is not UTF-8',
    ]);
  });

  test('100K lines, some longer than what is read at once', async () => {
    const long = 'x'.repeat(200_000);
    const lines = Array.from({ length: 100_000 }, (_, i) =>
      JSON.stringify({ input: i % 9000 ? `p${i}` : long, label: i }),
    );
    const items = await loadItems(file(lines.join('\r\n')));
    expect(items.map(({ label }) => label)).toEqual(Array.from({ length: 100_000 }, (_, i) => i));
    expect(items[9000]?.input).toBe(long);
  });

  test('a module may return a list', async () => {
    expect(await loadItems(file('export const prompts = () => [{ input: "a", label: [1] }];', 'ts'))).toHaveLength(1);
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
    [
      'a missing label',
      '{"input": "a"}',
      'jsonl',
      [/line 1: no column label \(--data\.label_key\); it has input; --data\.label_key '' if there are no labels$/],
    ],
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
    [
      'another ending',
      'a,b',
      'csv',
      [/must be a \.jsonl file, a \.json file, a module \(\.ts, \.js\) that exports `prompts`, or a Python program/],
    ],
    ['a module without prompts', 'export const prompt = 1;', 'ts', [/does not export a function `prompts`/]],
    [
      'a module that does not parse',
      'export const prompts = () => [;\n',
      'ts',
      [/^--data\.prompt_dataset FILE: cannot be loaded: [^\n]*Unexpected[^\n]*$/],
    ],
    [
      'a module that throws on import',
      '\nthrow new Error("no\\nlamp");',
      'ts',
      [/^--data\.prompt_dataset FILE: cannot be loaded: throws on import: no lamp \(FILE:2:\d+\)$/],
    ],
    [
      'prompts that throw',
      'export function prompts() { throw new TypeError("no lamp"); }',
      'ts',
      [/^--data\.prompt_dataset FILE: its `prompts` throws: TypeError: no lamp \(FILE:1:\d+\)$/],
    ],
    [
      'an async generator that throws midway',
      'export async function* prompts() { yield { input: "a" }; throw new Error("the well is dry"); }',
      'ts',
      [/^--data\.prompt_dataset FILE: its `prompts` throws after prompt 1: the well is dry \(FILE:1:\d+\)$/],
    ],
    [
      'a label in a circle',
      'const o = {}; o.o = o; export const prompts = () => [{ input: "a", label: o }];',
      'ts',
      [/prompt 1: label must be plain JSON/],
    ],
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
    expect(await problemsOf(directory, { split: 'heldout' })).toEqual([
      '--eval.dataset FILE: is a directory, not a file',
    ]);
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
    expect(take(new PromptStream(set, { ...ORDER, seed: 2 }), 50)).not.toEqual(first);
    expect(first).not.toEqual([...first].sort((a, b) => a - b));
  });

  test('every epoch gives every prompt once, in an order of its own', async () => {
    const stream = new PromptStream(await load(numbered(20)), ORDER);
    const epochs = [0, 1, 2].map((epoch) => {
      const prompts = Array.from({ length: 20 }, () => given(stream));
      expect(new Set(prompts.map((prompt) => prompt.epoch))).toEqual(new Set([epoch]));
      return prompts.map((prompt) => prompt.index);
    });
    for (const indices of epochs)
      expect([...indices].sort((a, b) => a - b)).toEqual(Array.from({ length: 20 }, (_, i) => i));
    expect(new Set(epochs.map(String)).size).toBe(3);
  });

  test('without shuffling is that of the source, each epoch', async () => {
    expect(take(new PromptStream(await load(numbered(3)), { ...ORDER, shuffle: false }), 7)).toEqual([
      0, 1, 2, 0, 1, 2, 0,
    ]);
  });

  test('is fair: each prompt comes first about equally often', async () => {
    const set = await load(numbered(4));
    const firsts = [0, 0, 0, 0];
    for (let seed = 0; seed < 2000; seed++) {
      const index = given(new PromptStream(set, { ...ORDER, seed })).index;
      firsts[index] = (firsts[index] as number) + 1;
    }
    for (const count of firsts) expect(Math.abs(count - 500)).toBeLessThan(100); // 5 standard deviations
  });

  test('max_samples draws by the seed, and without shuffling takes the first', async () => {
    const path = numbered(40);
    const indices = async (more: Partial<DataOptions>) =>
      (await loadItems(path, { maxSamples: [5], ...more })).map((item) => item.index);
    const drawn = await indices({});
    expect(drawn).toHaveLength(5);
    expect(drawn).toEqual([...drawn].sort((a, b) => a - b));
    expect(await indices({})).toEqual(drawn);
    expect(await indices({ seed: 2 })).not.toEqual(drawn);
    expect(await indices({ shuffle: false })).toEqual([0, 1, 2, 3, 4]);
    expect(await indices({ maxSamples: [100] })).toHaveLength(40);
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
    expect(restore(set, { ...ORDER, seed: 3 })).toThrow(/--train\.seed was 1, is 3/);
    expect(restore(set, { ...ORDER, shuffle: false })).toThrow(/--data\.shuffle was true, is false/);
    expect(() =>
      new PromptStream(set, ORDER).restore({ ...position, lanes: [{ epoch: 0, index: 6, given: 6 }] }),
    ).toThrow(/no position at \[\{"epoch":0,"index":6,"given":6\}\]/);
    expect(() => new PromptStream(set, ORDER).restore({ ...position, lanes: [] })).toThrow(/no position at \[\]/);
  });

  test('the hash sees every label, and which prompts were drawn', async () => {
    const hash = async (text: string, more: Partial<DataOptions> = {}) => (await load(file(text), more)).sha256;
    const text = '{"input": "a", "label": 1}\n{"input": "b", "label": 2}';
    expect(await hash(text)).toBe(await hash(text));
    expect(await hash(text.replace('2', '3'))).not.toBe(await hash(text));
    expect(await hash(text, { maxSamples: [1] })).not.toBe(await hash(text));
  });
});

// ---- Programs ----

describe('a Python program', () => {
  const program = (text: string) => file(`import json, os, sys, time\n${text}`, 'py');

  test('is told split and seed after its own arguments, and prints an object a line', async () => {
    const path = program('print(json.dumps({"input": " ".join(sys.argv[1:]), "label": os.environ["PYTHONHASHSEED"]}))');
    const set = await load(`${path} --size 3 --name 'a, b'`, { split: 'heldout', seed: 9 });
    expect(promptsOf(set).map(({ input, label, source }) => [input, label, source])).toEqual([
      ['--size 3 --name a, b --split heldout --seed 9', '0', `${path} --size 3 --name 'a, b'`],
    ]);
  });

  test('may print a byte-order mark, CRLF, blank lines and any letters, the last line without an end', async () => {
    const path = program(
      'sys.stdout.buffer.write("\\ufeff{\\"input\\": \\"\\u00e9\\U0001f642\\u2028\\"}\\r\\n\\r\\n{\\"input\\": \\"b\\", \\"label\\": [1], \\"tools\\": [{}]}".encode())',
    );
    expect(await loadItems(path)).toEqual([
      { index: 0, input: '\u00e9\u{1f642}\u2028', label: null, tools: null },
      { index: 1, input: 'b', label: [1], tools: [{}] },
    ]);
    // print() is UTF-8 whatever the locale says.
    expect((await loadItems(program('print(\'{"input": "\u00e9\'+chr(0x1f642)+\'"}\')')))[0]?.input).toBe(
      '\u00e9\u{1f642}',
    );
  });

  test('may print 100K lines, and a line of a megabyte', async () => {
    const text =
      'for i in range(100000): print(json.dumps({"input": "p" * (1000000 if i == 70000 else 1), "label": i}))';
    const items = await loadItems(program(text));
    expect(items.map(({ label }) => label)).toEqual(Array.from({ length: 100_000 }, (_, i) => i));
    expect(items[70_000]?.input).toHaveLength(1_000_000);
  });

  test('what it says on stderr is passed on line by line', async () => {
    const warned: string[] = [];
    const path = program('print("one\\ntwo\\rthree", end="", file=sys.stderr); print(\'{"input": "a"}\')');
    await load(path, { warn: (line) => warned.push(line) });
    expect(warned).toEqual([`${path}: one`, `${path}: two`, `${path}: three`]);
  });

  const failures: readonly (readonly [what: string, text: string, lines: (string | RegExp)[]])[] = [
    [
      'a status other than 0',
      'print(\'{"input": "a"}\'); print("no", "lamp", file=sys.stderr); sys.exit(3)',
      ['--data.prompt_dataset FILE: exited with code 3 after 1 line; it last said: no lamp'],
    ],
    [
      'an exception',
      'print(\'{"input": "a"}\')\nraise ValueError("dim")',
      [/^--data\.prompt_dataset FILE: exited with code 1 after 1 line; it last said: Traceback .* \| ValueError: dim$/],
    ],
    ['a signal', 'os.kill(os.getpid(), 9)', ['--data.prompt_dataset FILE: was ended by SIGKILL after 0 lines']],
    [
      'lines that are not JSON',
      'print(\'{"input": "a"}\\nhello\\n[1]\')',
      [/^--data\.prompt_dataset FILE: line 2: not JSON: .*hello/, /line 3: must be an object, got a list/],
    ],
    [
      'an unknown field',
      'print(\'{"input": "a", "answer": 1}\')',
      ['--data.prompt_dataset FILE: line 1: unknown field answer, allowed are input, label, tools'],
    ],
    ['a line that is not UTF-8', 'sys.stdout.buffer.write(b"\\xff\\n")', [/line 1: is not UTF-8$/]],
    ['no output', 'print("nothing today", file=sys.stderr)', [/FILE: printed nothing; it last said: nothing today$/]],
    ['blank lines', 'print()', ['--data.prompt_dataset FILE: has no prompts']],
    ['a line without end', 'while True: sys.stdout.write("x" * 1000000)', [/line 1: longer than 67108864 bytes$/]],
  ];
  test.each(failures)('%s is refused', async (_, text, lines) => {
    const found = await problemsOf(program(text));
    expect(found).toEqual(lines.map((line) => (typeof line === 'string' ? line : expect.stringMatching(line))));
  });

  test('one that hangs is killed, with what it started, and named', async () => {
    const pids = join(directory, 'pids');
    const text = `import subprocess
child = subprocess.Popen(["sleep", "60"])
open(${JSON.stringify(pids)}, "w").write(f"{os.getpid()} {child.pid}")
print('{"input": "a"}')
print("thinking", file=sys.stderr)
time.sleep(60)`;
    const path = program(text);
    expect(await problemsOf(path, { silenceMs: 1500 })).toEqual([
      '--data.prompt_dataset FILE: printed nothing for 1.5 s after 1 line and was killed (data.silence_s); it last said: thinking',
    ]);
    const gone = () => readFileSync(pids, 'utf8').split(' ').map(Number).every(isGone);
    await expect.poll(gone, { timeout: 5000 }).toBe(true);
  });

  test('one that is slow but prints is waited for', async () => {
    const path = program('for i in range(6):\n  print(json.dumps({"input": str(i)}))\n  time.sleep(0.4)');
    expect(await loadItems(path, { silenceMs: 1500 })).toHaveLength(6);
  });

  test('what it leaves running does not hold the run', async () => {
    const path = program('import subprocess\nsubprocess.Popen(["sleep", "60"])\nprint(\'{"input": "a"}\')');
    expect(await loadItems(path)).toHaveLength(1);
  });

  test('without its interpreter it cannot be started', async () => {
    expect(await problemsOf(program(''), { python: '/no/python' })).toEqual([
      '--data.prompt_dataset FILE: could not be started with /no/python',
    ]);
  });

  test('the same program with other arguments is another source', async () => {
    const path = program('print(json.dumps({"input": sys.argv[1]}))');
    expect((await load(`${path} 1,${path} 2`)).sources).toHaveLength(2);
    expect(await problemsOf(`${path} 1,${path} 1`)).toEqual([`--data.prompt_dataset ${path} 1: is named twice`]);
  });
});

/** Dead or a zombie that nobody has reaped yet. */
function isGone(pid: number): boolean {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    return stat.slice(stat.lastIndexOf(')') + 2).startsWith('Z');
  } catch {
    return true;
  }
}

// ---- Several sources ----

describe('several sources', () => {
  const names = (set: PromptSet) => set.sources.map(({ name }) => name);
  /** Which of the sources each of the next n prompts is of. */
  const turns = (stream: PromptStream, set: PromptSet, n: number) =>
    Array.from({ length: n }, () => names(set).indexOf(given(stream).source));

  test('without weights are one: an epoch gives every prompt of all of them once', async () => {
    const set = await load(`${numbered(3, 'a')}, ${numbered(9, 'b')}`);
    const stream = new PromptStream(set, ORDER);
    for (const epoch of [0, 1, 2]) {
      const prompts = Array.from({ length: 12 }, () => given(stream));
      expect(prompts.every((prompt) => prompt.epoch === epoch)).toBe(true);
      expect(prompts.map(({ input }) => input).sort()).toEqual(
        promptsOf(set)
          .map(({ input }) => input)
          .sort(),
      );
      // Mixed, not one after the other.
      expect(turns(new PromptStream(set, ORDER), set, 12)).not.toEqual([0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
    }
    const inOrder = new PromptStream(set, { ...ORDER, shuffle: false });
    expect(turns(inOrder, set, 14)).toEqual([0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0]);
  });

  test('with weights take turns, by hand', async () => {
    const set = await load([numbered(5), numbered(5), numbered(5)].join());
    const mixed = (weights: readonly number[], n: number) =>
      turns(new PromptStream(set, { ...ORDER, weights }), set, n).join('');
    expect(mixed([1, 1, 1], 9)).toBe('012012012');
    // Shares 1/2, 1/4, 1/4; slack 1/4. n = 1: all may (1/2, 1/4, 1/4); late at 1.5, 3, 3: source 0. n = 2: 0 has
    // 1 - 1 = 0 < 1/4, the others 1/2: source 1. n = 3: 0 has 1/2, late at 3.5; 1 has -1/4; 2 has 3/4, late at 3:
    // source 2. n = 4: 0 has 1, source 1 has 0, source 2 has 0: source 0. Then all are even again.
    expect(mixed([2, 1, 1], 8)).toBe('01200120');
    expect(mixed([200, 100, 100], 8)).toBe('01200120'); // shares count, not their sum
  });

  test('with weights every prefix has each share to less than one prompt', async () => {
    for (const [i, weights] of [
      [1, 2],
      [0.7, 0.2, 0.1],
      [5, 1, 1, 1, 1, 1],
      [1e-3, 1, Math.PI, 17],
      [3, 3, 3],
    ].entries()) {
      const set = await load(weights.map(() => numbered(2 + i)).join());
      const total = weights.reduce((a, b) => a + b);
      const counts = weights.map(() => 0);
      for (const [n, turn] of turns(new PromptStream(set, { ...ORDER, weights }), set, 3000).entries()) {
        counts[turn] = (counts[turn] as number) + 1;
        for (const [k, weight] of weights.entries())
          expect(Math.abs((counts[k] as number) - ((n + 1) * weight) / total)).toBeLessThan(1);
      }
    }
  });

  test('rounding does not move the shares of two sources', async () => {
    const set = await load(`${numbered(2)},${numbered(3)}`);
    for (let i = 1; i <= 40; i++) {
      const weights = [i / 7, 41 - i];
      const share = i / 7 / (i / 7 + 41 - i);
      let first = 0;
      for (const [n, turn] of turns(new PromptStream(set, { ...ORDER, weights }), set, 2000).entries()) {
        if (turn === 0) first++;
        if (Math.abs(first - (n + 1) * share) >= 0.5 + 1e-9) expect.fail(`${weights} after ${n + 1} prompts: ${first}`);
      }
    }
    const huge = { ...ORDER, weights: [Number.MAX_VALUE, Number.MAX_VALUE] };
    expect(turns(new PromptStream(set, huge), set, 6)).toEqual([0, 1, 0, 1, 0, 1]);
  });

  test('with weights each has epochs and orders of its own', async () => {
    const [a, b] = [numbered(4, 'a'), numbered(4, 'b')];
    const set = await load(`${a},${b}`);
    const stream = new PromptStream(set, { ...ORDER, weights: [3, 1] });
    const prompts = Array.from({ length: 32 }, () => given(stream));
    const of = (name: string) => prompts.filter(({ source }) => source === name);
    expect(of(a).map(({ epoch }) => epoch)).toEqual([0, 1, 2, 3, 4, 5].flatMap((epoch) => Array(4).fill(epoch)));
    expect(of(b).map(({ epoch }) => epoch)).toEqual([0, 0, 0, 0, 1, 1, 1, 1]);
    const epochs = [...of(a), ...of(b)].map(({ index }) => index);
    const orders = Array.from({ length: 8 }, (_, i) => epochs.slice(4 * i, 4 * i + 4));
    for (const order of orders) expect([...order].sort()).toEqual([0, 1, 2, 3]);
    expect(new Set(orders.map(String)).size).toBeGreaterThan(4);
  });

  test('caps are one for all or one for each, drawn apart', async () => {
    const paths = [numbered(30, 'a'), numbered(30, 'b'), numbered(4, 'c')];
    const sizes = async (maxSamples: readonly number[]) =>
      (await load(paths.join(), { maxSamples })).sources.map(({ items }) => items.length);
    expect(await sizes([0])).toEqual([30, 30, 4]);
    expect(await sizes([7])).toEqual([7, 7, 4]);
    expect(await sizes([5, 0, 2])).toEqual([5, 30, 2]);
    const { sources } = await load(paths.join(), { maxSamples: [7] });
    const [a, b] = sources.map(({ items }) => items.map(({ index }) => index));
    expect(a).not.toEqual(b);
    const first = await load(paths.join(), { maxSamples: [2], shuffle: false });
    expect(first.sources.map(({ items }) => items.map(({ index }) => index))).toEqual([
      [0, 1],
      [0, 1],
      [0, 1],
    ]);
  });

  test('files, modules and quoted names go together; labels may differ between sources', async () => {
    const quoted = join(directory, 'a, b.jsonl');
    writeFileSync(quoted, '{"input": "x", "label": "text"}');
    const module = file('export const prompts = ({ split }) => [{ input: split, label: 3 }];', 'ts');
    const set = await load(`"${quoted}" , ${module}`);
    expect(promptsOf(set).map(({ input, label }) => [input, label])).toEqual([
      ['x', 'text'],
      ['train', 3],
    ]);
  });

  test('problems of all of them come at once, each under its own name', async () => {
    const [bad, good] = [file('{}'), numbered(1)];
    const link = join(directory, 'link.jsonl');
    symlinkSync(good, link);
    expect(await problemsOf([bad, good, 'none.json', link].join())).toEqual([
      `--data.prompt_dataset ${bad}: line 1: no column input (--data.input_key); it has none`,
      `--data.prompt_dataset ${bad}: line 1: no column label (--data.label_key); it has none; --data.label_key '' if there are no labels`,
      '--data.prompt_dataset none.json: no such file',
      `--data.prompt_dataset ${link}: is named twice`,
    ]);
  });

  test.each([[[]], [[1, 2]], [[0.3, 0.7]]])(
    'restored anywhere go on as if they had never stopped, weights %s',
    async (weights) => {
      const paths = `${numbered(7, 'a')},${numbered(4, 'b')}`;
      const order = { ...ORDER, weights };
      const inputs = (stream: PromptStream, n: number) => Array.from({ length: n }, () => given(stream));
      const whole = inputs(new PromptStream(await load(paths), order), 60);
      const before = new PromptStream(await load(paths), order);
      for (let stop = 0; stop < 50; stop++) {
        const position = JSON.parse(JSON.stringify(before.position));
        const after = new PromptStream(await load(paths), order);
        after.restore(position);
        expect(after.position).toEqual(position);
        expect(inputs(after, 10)).toEqual(whole.slice(stop, stop + 10));
        given(before);
      }
    },
  );

  test('a position is bound to every source and to the weights', async () => {
    const texts = ['{"input": "a", "label": 1}\n', '{"input": "b", "label": 2}\n'];
    const set = (of: readonly string[]) => load(of.map((text) => file(text)).join());
    const order = { ...ORDER, weights: [1, 2] };
    const { position } = new PromptStream(await set(texts), order);
    const restore = async (of: readonly string[], weights = order.weights) => {
      const other = await set(of);
      return () => new PromptStream(other, { ...ORDER, weights }).restore(position);
    };
    expect(await restore(texts)).not.toThrow();
    const changed = /Cannot resume --data\.prompt_dataset .*the prompts are not those of the checkpoint/;
    expect(await restore([texts[0] as string, '{"input": "b", "label": 3}\n'])).toThrow(changed);
    expect(await restore(texts.toReversed())).toThrow(changed);
    expect(await restore([texts.join(''), texts[1] as string])).toThrow(changed);
    expect(await restore(texts, [2, 1])).toThrow(/--data\.prompt_probs was 1,2, is 2,1/);
    expect(await restore(texts, [])).toThrow(/--data\.prompt_probs was 1,2, is ''/);
  });
});

// ---- Length ----

describe('the length filter', () => {
  /** An input `p12` has 12 tokens here; `odd` ones cannot be rendered. What was asked for is in `asked`. */
  function filter(limit: number) {
    const asked: string[] = [];
    const dropped: (readonly [Prompt['input'], Length])[] = [];
    const out: Filter = {
      limit,
      measure: async (prompts) => {
        asked.push(...prompts.map(({ input }) => String(input)));
        return prompts.map(({ input }) =>
          String(input).startsWith('odd') ? 'no such role' : Number(String(input).slice(1)),
        );
      },
      onDropped: ({ prompt, length }) => dropped.push([prompt.input, length]),
    };
    return { filter: out, asked, dropped };
  }
  const inputsOf = (stream: PromptStream, n: number) => Array.from({ length: n }, () => String(given(stream).input));
  async function nextOf(stream: PromptStream, n: number): Promise<string[]> {
    await stream.ahead(n);
    return inputsOf(stream, n);
  }

  test('gives what the stream without it gives, minus what is too long; told at every pass', async () => {
    const set = await load(numbered(20));
    const all = inputsOf(new PromptStream(set, ORDER), 40);
    const stream = new PromptStream(set, ORDER);
    const { filter: f, asked, dropped } = filter(14);
    stream.filter = f;
    const short = all.filter((input) => Number(input.slice(1)) <= 14);
    expect(await nextOf(stream, 30)).toEqual(short);
    expect(dropped.map(([input]) => input)).toEqual(
      all.slice(0, all.lastIndexOf(short.at(-1) as string)).filter((input) => !short.includes(input)),
    );
    expect(asked.toSorted()).toEqual(all.slice(0, 20).toSorted()); // each measured once
  });

  test('a prompt of just the limit stays, and one that cannot be rendered goes', async () => {
    const path = file(['p5', 'odd', 'p6'].map((input) => `${JSON.stringify({ input, label: 1 })}\n`).join(''));
    const stream = new PromptStream(await load(path), { ...ORDER, shuffle: false });
    const { filter: f, dropped } = filter(5);
    stream.filter = f;
    expect(await nextOf(stream, 2)).toEqual(['p5', 'p5']);
    expect(dropped).toEqual([
      ['odd', 'no such role'],
      ['p6', 6],
    ]);
  });

  test('measures a little ahead, not everything', async () => {
    const stream = new PromptStream(await load(numbered(5000)), ORDER);
    const { filter: f, asked } = filter(10_000);
    stream.filter = f;
    expect(stream.isAhead(1)).toBe(false);
    await stream.ahead(16);
    expect(stream.isAhead(16)).toBe(true);
    expect(asked.length).toBe(256);
    inputsOf(stream, 256);
    expect(() => given(stream)).toThrow(/not measured/);
    await Promise.all([stream.ahead(16), stream.ahead(300)]);
    expect(asked.length).toBe(new Set(asked).size);
  });

  test('shares of the weights hold for what is given out', async () => {
    const [long, short] = [numbered(40, 'p'), numbered(3, 'q')];
    const stream = new PromptStream(await load(`${long},${short}`), { ...ORDER, weights: [1, 1] });
    stream.filter = filter(3).filter; // 4 of 40, and all
    await stream.ahead(100);
    const drawn = Array.from({ length: 100 }, () => given(stream));
    expect(drawn.filter(({ source }) => source === long)).toHaveLength(50);
    expect(drawn.every(({ input }) => Number(String(input).slice(1)) <= 3)).toBe(true);
  });

  test.each([[[]], [[2, 1]]])(
    'restored anywhere goes on as if it had never stopped, however far ahead was measured, weights %s',
    async (weights) => {
      const set = await load(`${numbered(30)},${numbered(10)}`);
      const order = { ...ORDER, weights };
      const fresh = () => {
        const stream = new PromptStream(set, order);
        const made = filter(17);
        stream.filter = made.filter;
        return { stream, dropped: made.dropped };
      };
      const whole = fresh();
      const inputs = await nextOf(whole.stream, 80);
      const before = fresh();
      for (let stop = 0; stop < 70; stop++) {
        const after = fresh();
        after.stream.restore(JSON.parse(JSON.stringify(before.stream.position)));
        expect(await nextOf(after.stream, 1 + (stop % 10))).toEqual(inputs.slice(stop, stop + 1 + (stop % 10)));
        await nextOf(before.stream, 1);
        // What was left out before the stop and after it is what is left out in one go.
        if (stop === 40) expect([...before.dropped, ...after.dropped].length).toBeGreaterThan(0);
      }
      expect(whole.dropped.slice(0, before.dropped.length)).toEqual(before.dropped);
    },
  );

  test('nothing that fits ends in an error that says how much is missing', async () => {
    const none = async (path: string, weights: readonly number[], limit: number) => {
      const stream = new PromptStream(await load(path), { ...ORDER, weights });
      stream.filter = filter(limit).filter;
      return await stream.ahead(1000).then(
        () => '',
        (error: Error) => error.message,
      );
    };
    const path = file('{"input": "p9", "label": 1}\n{"input": "p7", "label": 1}\n{"input": "odd", "label": 1}\n');
    expect(await none(path, [], 6)).toBe(
      `--data.max_prompt_len 6: none of the 3 prompts of --data.prompt_dataset ${path} fits; the shortest has 7 tokens; the chat template cannot render 1 of them: no such role`,
    );
    expect(await none(path, [], 7)).toBe('');
    // With weights every source must have its share.
    const other = numbered(2);
    expect(await none(`${other},${path}`, [], 6)).toBe('');
    expect(await none(`${other},${path}`, [9, 1], 6)).toContain(
      `none of the 3 prompts of --data.prompt_dataset ${path} fits`,
    );
    expect(await none(numbered(1000, 'p9'), [], 6)).toContain('none of the 1000 prompts');
  });

  test('a measurement that fails is the error of everyone who waits', async () => {
    const stream = new PromptStream(await load(numbered(3)), ORDER);
    stream.filter = { ...filter(9).filter, measure: () => Promise.reject(new Error('the tokenizer is gone')) };
    const both = await Promise.allSettled([stream.ahead(1), stream.ahead(2)]);
    expect(both.map((each) => each.status)).toEqual(['rejected', 'rejected']);
  });

  test('held-out prompts: all measured, in batches, the others told', async () => {
    const prompts = promptsOf(await load(numbered(700)));
    const { filter: f, asked, dropped } = filter(99);
    expect((await fitting(prompts, f)).map(({ index }) => index)).toEqual(Array.from({ length: 100 }, (_, i) => i));
    expect([asked.length, dropped.length]).toEqual([700, 600]);
    expect(await fitting([], f)).toEqual([]);
    await expect(fitting(prompts.slice(200), f)).rejects.toThrow(
      /none of the 500 prompts of --eval\.dataset .* fits; the shortest has 200 tokens/,
    );
  });

  test('a batch of long prompts is cut by its characters', async () => {
    const path = file(
      Array.from({ length: 9 }, () => `${JSON.stringify({ input: 'x'.repeat(400_000), label: 1 })}\n`).join(''),
    );
    const sizes: number[] = [];
    const f: Filter = {
      limit: 1,
      measure: async (prompts) => {
        sizes.push(prompts.length);
        return prompts.map(() => 1);
      },
      onDropped: () => {},
    };
    const set = await load(path);
    await fitting(promptsOf(set), f);
    expect(sizes).toEqual([2, 2, 2, 2, 1]);
  });
});

test('prompts in both of two sets are counted, where input and label are the same', async () => {
  const held = await load(file('{"input": "a", "label": 1}\n{"input": "b", "label": 2}'));
  const trained = await load(file('{"input": "b", "label": 2}\n{"input": "a", "label": 2}'));
  expect(sharedPrompts(held, trained)).toBe(1);
  expect(sharedPrompts(held, held)).toBe(2);
});
