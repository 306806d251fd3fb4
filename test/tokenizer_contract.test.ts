/** The tokenizer contract: the same assertions over real sockets for the simulated and the Python tokenizer. */
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import type { Peer } from '../molt/bus.ts';
import { RemoteError } from '../molt/protocol.ts';
import { flatRows } from '../molt/trainer.ts';
import type { Json } from '../molt/types.ts';
import { Cell, KINDS } from './contract.ts';

interface Info {
  readonly vocab_size: number;
  readonly eos_token_id: number;
  readonly stop_token_ids: readonly number[];
  readonly template_hash: string;
  readonly suffix_exact: boolean;
}

const USER = { role: 'user', content: 'What is 47*86?' };
const CALL = {
  role: 'assistant',
  content: 'Let me see',
  tool_calls: [{ name: 'calc', arguments: '{"expr": "47*86", "scale": 1.0}' }],
};
const TOOL = { role: 'tool', content: '4042' };
const ANSWER = { role: 'assistant', content: '= 4042 ✓' };
const AGAIN = { role: 'user', content: 'And 猫?\n' };
const CALC = {
  type: 'function',
  function: { name: 'calc', parameters: { type: 'object', properties: { expr: { type: 'string' } } } },
};

vi.setConfig({ testTimeout: 30_000 });

describe.each(KINDS)('%s tokenizer', (_, kind) => {
  let cell: Cell;
  let peer: Peer;
  let info: Info;

  beforeAll(async () => {
    cell = await Cell.open();
    const [model] = await kind.makeModels(cell.dir);
    const worker = await cell.start({
      id: 'tokenizer-0',
      kind: 'tokenizer',
      command: kind.command('tokenizer'),
      options: { model_path: model },
    });
    peer = worker.peer;
    info = (await peer.ready) as unknown as Info;
  }, kind.startMs);
  afterAll(() => cell?.close());

  // ---- Calls with one item each, as lists of ids ----

  async function render(messages: Json, generate = true, tools: Json = null): Promise<number[]> {
    const { fields, frames } = await peer.request('render', {
      items: [{ messages, tools, template_kwargs: {}, add_generation_prompt: generate }],
    });
    expect(fields.errors).toEqual([null]);
    return [...frames.ids];
  }

  async function suffix(stub: Json, newMessages: Json, lastIds: number[], tools: Json = null): Promise<number[]> {
    const { fields, frames } = await peer.request('suffix', {
      items: [{ stub, new_messages: newMessages, tools, template_kwargs: {}, last_ids: lastIds }],
    });
    expect(fields.errors).toEqual([null]);
    return [...frames.ids];
  }

  async function encode(texts: string[]): Promise<number[][]> {
    const { fields, frames } = await peer.request('encode', { texts });
    expect(fields.errors).toEqual(texts.map(() => null));
    let at = 0;
    return [...frames.lengths].map((n) => {
      at += n;
      return [...frames.ids.subarray(at - n, at)];
    });
  }

  async function decode(rows: number[][], skipSpecial = false): Promise<readonly string[]> {
    return (await peer.request('decode', { skip_special: skipSpecial }, flatRows(rows.map((r) => Int32Array.from(r)))))
      .fields.texts;
  }

  async function parse(texts: string[], tools: Json = [CALC]) {
    const rows = (await encode(texts)).map((ids) => Int32Array.from(ids));
    return (await peer.request('parse', { tools: texts.map(() => tools) }, flatRows(rows))).fields.items;
  }

  // ---- Contract ----

  test('ready tells what others build on', () => {
    expect(info.stop_token_ids).toContain(info.eos_token_id);
    expect(info.vocab_size).toBeGreaterThan(info.eos_token_id);
    expect(info.template_hash).not.toBe('');
    expect(info.suffix_exact).toBe(true);
  });

  test('decode gives back every encoded text', async () => {
    const texts = ['', 'plain', ' leading and trailing ', 'a\n\n\tb', 'naïve 猫 🐈‍⬛', '{"x": 1.0}', "don 't , stop ."];
    expect(await decode(await encode(texts))).toEqual(texts);
  });

  test('special tokens are one id each and decode leaves them out when asked', async () => {
    const [ids = []] = await encode(['a<|im_end|>']);
    expect(ids.at(-1)).toBe(info.eos_token_id);
    expect(ids.length).toBe(2);
    expect(await decode([ids])).toEqual(['a<|im_end|>']);
    expect(await decode([ids], true)).toEqual(['a']);
  });

  /** The ids a policy would have sampled for this turn: what the full render has between prompt and close, and the close. */
  async function sampledTurn(
    history: Json[],
    turn: Json,
    tools: Json,
  ): Promise<{ prompt: number[]; sampled: number[] }> {
    const prompt = await render(history, true, tools);
    const whole = await render([...history, turn], false, tools);
    expect(whole.slice(0, prompt.length)).toEqual(prompt);
    const end = whole.lastIndexOf(info.eos_token_id);
    return { prompt, sampled: whole.slice(prompt.length, end + 1) };
  }

  test.each<[string, Json, Json, Json]>([
    ['a tool result after a call', CALL, [TOOL], [CALC]],
    ['a user after an answer', ANSWER, [AGAIN], null],
    ['two tool results and a user', CALL, [TOOL, { role: 'tool', content: '' }, AGAIN], [CALC]],
  ])('prompt, sampled turn and suffix are the full render: %s', async (_, turn, after, tools) => {
    const { prompt, sampled } = await sampledTurn([USER], turn, tools);
    const full = await render([USER, turn, ...(after as Json[])], true, tools);
    expect([...prompt, ...sampled, ...(await suffix(turn, after, sampled.slice(-8), tools))]).toEqual(full);
    const open = sampled.slice(0, -1); // ended by length: the close was not sampled
    expect([...prompt, ...open, ...(await suffix(turn, after, open.slice(-8), tools))]).toEqual(full);
  });

  test('three turns put together by suffixes are the full render', async () => {
    const first = await sampledTurn([USER], CALL, [CALC]);
    const second = await sampledTurn([USER, CALL, TOOL], ANSWER, [CALC]);
    const ids = [...first.prompt, ...first.sampled, ...(await suffix(CALL, [TOOL], first.sampled.slice(-8), [CALC]))];
    expect(ids).toEqual(second.prompt);
    ids.push(...second.sampled, ...(await suffix(ANSWER, [AGAIN], second.sampled.slice(-8), [CALC])));
    expect(ids).toEqual(await render([USER, CALL, TOOL, ANSWER, AGAIN], true, [CALC]));
  });

  test('the arguments of a call are rendered as they were written', async () => {
    const [text = ''] = await decode([await render([USER, CALL], false)]);
    expect(text).toContain('{"expr": "47*86", "scale": 1.0}');
  });

  test('parse finds a call, its raw arguments and the text before it', async () => {
    const [item] = await parse([
      'Sure\n<tool_call>\n{"name": "calc", "arguments": {"expr": "1+1", "scale": 1.0}}\n</tool_call><|im_end|>',
    ]);
    expect(item).toMatchObject({ content: 'Sure', reasoning: null, error: null });
    expect(item?.tool_calls).toEqual([{ name: 'calc', arguments: '{"expr": "1+1", "scale": 1.0}' }]);
    expect(item?.text).toBe(
      'Sure\n<tool_call>\n{"name": "calc", "arguments": {"expr": "1+1", "scale": 1.0}}\n</tool_call>',
    );
  });

  test('parse keeps two calls in order, and plain text as it is', async () => {
    const call = (x: number): string => `<tool_call>\n{"name": "calc", "arguments": {"x": ${x}}}\n</tool_call>`;
    const [two, plain] = await parse([`${call(1)}\n${call(2)}<|im_end|>`, 'no call\n']);
    expect(two?.tool_calls.map((c) => c.arguments)).toEqual(['{"x": 1}', '{"x": 2}']);
    expect(two?.content).toBe('');
    expect(plain).toEqual({ text: 'no call\n', content: 'no call\n', reasoning: null, tool_calls: [], error: null });
  });

  test.each([
    '<tool_call>\n{"name": "calc", "arguments": {"x": 1}\n</tool_call>',
    '<tool_call>\n{"name": "calc", "arguments": 3}\n</tool_call>',
    '<tool_call>\n{"arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "calc", "arguments": {}}',
  ])('markup that is no call stays in the content, with an error: %j', async (text) => {
    const [item] = await parse([`${text}<|im_end|>`]);
    expect(item).toMatchObject({ content: text, tool_calls: [] });
    expect(item?.error).toBeTruthy();
  });

  test('a think block at the start is reasoning, not content', async () => {
    const [item] = await parse(['<think>\nhm\n</think>\n\nyes<|im_end|>']);
    expect(item).toMatchObject({ content: 'yes', tool_calls: [], error: null });
    expect(item?.reasoning?.trim()).toBe('hm');
  });

  test('a bad item has its own error and no ids, the others are right', async () => {
    const item = (messages: Json) => ({ messages, tools: null, template_kwargs: {}, add_generation_prompt: true });
    const { fields, frames } = await peer.request('render', {
      items: [item([USER]), item('not a list'), item([{ content: 'no role' }]), item([USER])],
    });
    expect(fields.errors.map((e) => e === null)).toEqual([true, false, false, true]);
    const good = await render([USER]);
    expect([...frames.lengths]).toEqual([good.length, 0, 0, good.length]);
    expect([...frames.ids]).toEqual([...good, ...good]);
  });

  test('an empty batch is answered', async () => {
    const { fields, frames } = await peer.request('render', { items: [] });
    expect([fields.errors.length, frames.ids.length, frames.lengths.length]).toEqual([0, 0, 0]);
  });

  test('lengths that do not add up are refused', async () => {
    const wrong = { ids: Int32Array.of(1, 2), lengths: Int32Array.of(1) };
    const error = await peer.request('decode', { skip_special: false }, wrong).catch((cause: unknown) => cause);
    expect(error).toBeInstanceOf(RemoteError);
    expect(error).toMatchObject({ type: 'bad_request', field: 'lengths' });
  });
});
