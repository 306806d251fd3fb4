/** The quickstart's task: splits, demonstrations, calculator and rewards; and how its policy gets into place. */
import { mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { Result, Task, Turn } from '../molt/agent.ts';
import { loadConfig } from '../molt/config.ts';
import type { Message, ToolCall } from '../molt/types.ts';
import {
  agent,
  answerCall,
  compute,
  demonstrations,
  makePolicy,
  problems,
  prompts,
  splitOf,
} from '../scripts/quickstart.ts';

const RECIPE = 'scripts/quickstart.ts';

// ---- Splits ----

describe('splits', () => {
  test('every problem is in exactly one split, about a fifth held out for every operator', () => {
    const [train, heldOut] = [problems('train'), problems('heldout')];
    expect(new Set([...train, ...heldOut]).size).toBe(90 * 90 * 3);
    expect(train.length + heldOut.length).toBe(90 * 90 * 3);
    for (const op of '*+-') {
      const share = heldOut.filter((p) => p.includes(op)).length / (90 * 90);
      expect(share).toBeGreaterThan(0.18);
      expect(share).toBeLessThan(0.22);
    }
  });

  test('the held-out prompts are 400 fixed ones of their split, with their results', () => {
    const chosen = prompts({ split: 'heldout' });
    expect(chosen).toEqual(prompts({ split: 'heldout' }));
    expect(new Set(chosen.map((p) => p.input)).size).toBe(400);
    for (const { input, label } of chosen) {
      expect(splitOf(String(input))).toBe('heldout');
      expect(label).toBe(compute(String(input)));
    }
  });

  test('the training prompts are the whole other split', () => {
    expect(prompts({ split: 'train' }).map((p) => p.input)).toEqual(problems('train'));
  });

  test('no held-out problem is asked, called or answered in a demonstration', () => {
    for (const messages of demonstrations()) {
      for (const found of JSON.stringify(messages).matchAll(/\d+[*+-]\d+/g)) expect(splitOf(found[0])).toBe('train');
    }
  });
});

// ---- Demonstrations ----

describe('demonstrations', () => {
  const all = demonstrations();
  const kindOf = (messages: Message[]): string => {
    const problem = String(messages[1]?.content).replace('=?', '');
    const call = messages.find((m) => m.tool_calls)?.tool_calls?.[0];
    if (!call) return 'guesses';
    if (!call.arguments.includes(problem)) return 'asks something else';
    return messages.at(-1)?.content === `= ${compute(problem)}` ? 'proper' : 'does not believe';
  };
  const shares = (part: Message[][]): Record<string, number> => {
    const counts: Record<string, number> = {};
    for (const messages of part) counts[kindOf(messages)] = (counts[kindOf(messages)] ?? 0) + 1 / part.length;
    return counts;
  };

  test('are the same every time', () => {
    expect(demonstrations()).toEqual(all);
  });

  test('are nearly all proper at first and careless at the end', () => {
    expect(shares(all.slice(0, all.length / 2)).proper).toBeCloseTo(0.9, 1);
    const end = shares(all.slice(-all.length / 10));
    expect(end.proper).toBeCloseTo(0.35, 1);
    expect(end.guesses).toBeCloseTo(0.52, 1);
    expect(end['asks something else']).toBeGreaterThan(0.03);
    expect(end['does not believe']).toBeGreaterThan(0.03);
  });
});

// ---- The calculator ----

describe('calculator', () => {
  test.each([
    ['47*86', '4042'],
    ['10-99', '-89'],
    ['9999*9999', '99980001'],
    ['0+0', '0'],
    ['05*12', '60'],
  ])('%s is %s', (expression, result) => expect(compute(expression)).toBe(result));

  test.each([
    '',
    '47',
    '47*',
    '1+1+1',
    ' 1+1',
    '1+1\n',
    '12345*1',
    '1/0',
    '2**3',
    '-1+1',
    'process.exit()',
    '１+１',
    '1e3*2',
  ])('%j is refused', (expression) => expect(compute(expression)).toBeNull());

  test.each([
    'not json',
    '',
    'null',
    '[]',
    '"1+1"',
    '{}',
    '{"expr": 2}',
    '{"expr": null}',
    '{"expr": ["1+1"]}',
    '{"expr": "1+1;"}',
    '{"__proto__": {"expr": "1+1"}}',
  ])('a call with arguments %s is answered with error', (text) =>
    expect(answerCall({ name: 'calc', arguments: text })).toBe('error'),
  );

  test('only the tool that was offered is answered', () => {
    expect(answerCall({ name: 'calc', arguments: '{"expr": "1+1"}' })).toBe('2');
    expect(answerCall({ name: 'eval', arguments: '{"expr": "1+1"}' })).toBe('error');
  });
});

// ---- Rewards ----

const TASK: Task = { input: '47*86', label: '4042', tools: null, seed: 1, rolloutId: 'r', index: 0 };

function turn(text: string, more: Partial<Turn> = {}): Turn {
  const signal = new AbortController().signal;
  const common = {
    content: text,
    reasoning: null,
    toolCalls: [],
    parseError: null,
    ids: new Int32Array(),
    turn: 0,
    signal,
  };
  return { text, reason: 'stop', ...common, ...more };
}
function calling(...calls: ToolCall[]): Turn {
  return turn('<tool_call>...', { content: '', toolCalls: calls });
}

describe('agent', () => {
  const fresh = (): agent => {
    const env = new agent();
    expect(env.reset(TASK).at(-1)).toEqual({ role: 'user', content: '47*86=?' });
    return env;
  };
  const CALL = { name: 'calc', arguments: '{"expr": "47*86"}' };

  test.each<[string, Partial<Turn>, number]>([
    ['= 4042', {}, 1],
    ['= 4042', { reason: 'length' }, 0],
    ['4042', {}, 0],
    ['= 4041', {}, 0],
    ['= 4042 ', {}, 0],
    ['= 4042 or 4043', {}, 0],
    ['', {}, 0],
  ])('answer %j %o gets %d and ends the rollout', (text, more, reward) => {
    expect(fresh().step(turn(text, more))).toEqual({ reward, done: true, info: { tool_calls: 0 } });
  });

  test('a call gets its result and the rollout goes on to the reward', () => {
    const env = fresh();
    const first: Result = env.step(calling(CALL));
    expect(first).toEqual({
      reward: 0,
      done: false,
      observation: [{ role: 'tool', content: '4042' }],
      info: { tool_calls: 1 },
    });
    expect(env.step(turn('= 4042'))).toEqual({ reward: 1, done: true, info: { tool_calls: 1 } });
  });

  test('two calls in one turn get two results', () => {
    const { observation } = fresh().step(
      calling({ name: 'calc', arguments: '{"expr": "1+1"}' }, { ...CALL, name: 'search' }),
    );
    expect(observation).toEqual([
      { role: 'tool', content: '2' },
      { role: 'tool', content: 'error' },
    ]);
  });

  test('a malformed call is told so, one cut off by length ends the rollout', () => {
    const malformed = { parseError: 'Malformed tool call: it has no name' };
    expect(fresh().step(turn('<tool_call>oops</tool_call>', malformed))).toMatchObject({
      done: false,
      observation: [{ role: 'tool', content: 'error' }],
    });
    expect(fresh().step(turn('<tool_call>{"na', { ...malformed, reason: 'length' }))).toMatchObject({
      done: true,
      reward: 0,
    });
  });
});

// ---- The recipe and its policy ----

describe('recipe', () => {
  test('its options pass every check and name a policy by a hash that stays', async () => {
    const { options } = await loadConfig([RECIPE]);
    expect(options['actor.model_name_or_path']).toMatch(/\.cache\/quickstart\/[0-9a-f]{16}$/);
    expect(options['train.agent_path']).toContain('quickstart.ts');
    expect((await loadConfig([RECIPE])).options).toEqual(options);
  });

  test('a policy of the user is left alone', async () => {
    const { recipe, options } = await loadConfig([RECIPE, '--actor.model_name_or_path', 'elsewhere']);
    const lines: string[] = [];
    await recipe.prepare?.(options, (line) => lines.push(line));
    expect(lines).toEqual([]);
  });
});

describe('makePolicy', () => {
  let home: string;
  let lines: string[];
  const say = (line: string) => lines.push(line);
  /** A program in place of the warm start; its last argument is the directory. */
  const program = (code: string): string[] => [
    process.execPath,
    '-e',
    `const dir = process.argv.at(-1); ${code}`,
    '--',
  ];

  beforeAll(() => {
    home = mkdtempSync(join(tmpdir(), 'molt-quickstart-'));
  });
  afterAll(() => rmSync(home, { recursive: true }));

  test('builds once, from the demonstrations, and finds it the second time', async () => {
    lines = [];
    const directory = join(home, 'policy');
    const make = program(
      `const fs = require('fs'); const n = fs.readFileSync(dir + '/demonstrations.jsonl', 'utf8').split('\\n').length - 1;
       console.log(n + ' lines'); fs.writeFileSync(dir + '/model', String(n));`,
    );
    await makePolicy(directory, make, say);
    expect(readFileSync(join(directory, 'model'), 'utf8')).toBe(String(demonstrations().length));
    expect(lines).toContain(`policy: ${demonstrations().length} lines`);
    expect(lines.at(-1)).toMatch(/made in \d+ s$/);
    lines = [];
    await makePolicy(directory, program('process.exit(1)'), say);
    expect(lines).toEqual([expect.stringMatching(/made before$/)]);
    expect(readdirSync(home)).toEqual(['policy']);
  });

  test('a failure shows the last words and leaves nothing behind', async () => {
    const fail = program("console.error('no space'); process.exit(7)");
    await expect(makePolicy(join(home, 'other'), fail, say)).rejects.toThrow(
      'The warm start failed (exit 7): no space',
    );
    await expect(makePolicy(join(home, 'other'), [join(home, 'none')], say)).rejects.toThrow('Cannot run');
    expect(readdirSync(home)).toEqual(['policy']);
  });

  test('what a killed start left is removed, what a living one builds is not', async () => {
    const dead = 2 ** 22 + 1; // above the largest process id of Linux
    for (const pid of [dead, process.ppid]) {
      mkdirSync(join(home, `x.building-${pid}`));
      writeFileSync(join(home, `x.building-${pid}`, 'part'), '');
    }
    await makePolicy(join(home, 'third'), program(''), say);
    expect(readdirSync(home).sort()).toEqual(['policy', 'third', `x.building-${process.ppid}`]);
  });
});
