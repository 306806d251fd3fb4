/** The simulated model by itself: vocabulary, template, sampler, gradient, optimizer (workers/simulated_model.ts). */
import { describe, expect, test } from 'vitest';
import {
  adamStep,
  Distributions,
  decodeIds,
  drawFrom,
  encodeText,
  gradNorm,
  IM_END,
  initialWeights,
  type LossOptions,
  logitsAt,
  logSoftmax,
  NUM_PARAMETERS,
  newOptimState,
  packWeights,
  parseTurn,
  pick,
  pickFrom,
  policyLoss,
  type Row,
  rawValue,
  renderText,
  scoreIds,
  suffixText,
  TextStream,
  uniform,
  unpackWeights,
  VOCAB_SIZE,
} from '../workers/simulated_model.ts';

const weights = initialWeights(1);
const OPEN: LossOptions = { clip_low: 0.2, clip_high: 0.28, is_level: 'off', is_mode: 'mask', is_low: 0.5, is_high: 2 };

function row(ids: number[], advantages: number[], rollout?: number[], old?: number[], stale?: number[]): Row {
  return {
    ids: Int32Array.from(ids),
    lossMask: Uint8Array.from(ids, (_, k) => (k === 0 ? 0 : 1)),
    rolloutLogprobs: rollout ? Float32Array.from(rollout) : scoreIds(weights, ids),
    advantages: Float32Array.from(advantages),
    oldLogprobs: old ? Float32Array.from(old) : null,
    stale: stale ? Uint8Array.from(stale) : null,
  };
}

describe('vocabulary', () => {
  test('decode gives back every text, specials and characters of four bytes among them', () => {
    for (const text of [
      '',
      'a\n\tb',
      'naïve 猫 🐈‍⬛',
      '<|im_start|>user\nx<|im_end|>',
      '</tool_call><tool_call>',
      '\ufeffbom',
    ]) {
      expect(decodeIds(encodeText(text))).toBe(text);
    }
  });

  test('a stream holds back an unfinished character and its pieces join to the whole', () => {
    const ids = encodeText('a🐈b<|im_end|>');
    const stream = new TextStream();
    const pieces = ids.map((id) => stream.push([id]));
    expect(pieces.slice(0, 5)).toEqual(['a', '', '', '', '🐈']);
    expect(pieces.join('') + stream.end()).toBe('a🐈b<|im_end|>');
  });
});

describe('template', () => {
  const user = { role: 'user', content: 'hi' };
  const call = { role: 'assistant', content: 'ok', tool_calls: [{ name: 'f', arguments: '{"x": 1.0}' }] };
  const tool = { role: 'tool', content: '2' };

  test('render of a prefix, the sampled turn and the suffix are the full render', () => {
    const full = renderText([user, call, tool], null, true);
    const prompt = renderText([user], null, true);
    const turn = full.slice(prompt.length, full.indexOf('<|im_end|>\n<|im_start|>tool'));
    expect(prompt + turn + suffixText([tool], undefined)).toBe(full);
    expect(`${prompt + turn}<|im_end|>${suffixText([tool], IM_END)}`).toBe(full);
  });

  test('bad messages are refused with the place', () => {
    expect(() => renderText('x', null, true)).toThrow('messages must be a list');
    expect(() => renderText([user, { content: 'x' }], null, true)).toThrow('messages[1].role must be a string');
    expect(() => renderText([{ role: 'user', content: 5 }], null, true)).toThrow('messages[0].content');
  });
});

describe('parse', () => {
  test('a call keeps the text of its arguments', () => {
    const turn = encodeText(
      '<think>hm</think>Sure\n<tool_call>\n{"name": "f", "arguments": {"x": 1.0, "y":[1,2]}}\n</tool_call><|im_end|>',
    );
    expect(parseTurn(turn)).toEqual({
      text: decodeIds(turn.slice(0, -1)),
      content: 'Sure',
      reasoning: 'hm',
      tool_calls: [{ name: 'f', arguments: '{"x": 1.0, "y":[1,2]}' }],
      error: null,
    });
  });

  test.each([
    ['<tool_call>{"name": "f"</tool_call>', 'not JSON'],
    ['<tool_call>{"arguments": {}}</tool_call>', 'no name'],
    ['<tool_call>{"name": "f", "arguments": 3}</tool_call>', 'not an object'],
    ['<tool_call>{"name": "f", "arguments": {}}', 'not closed'],
  ])('markup that is no call stays in the content: %s', (text, error) => {
    const parsed = parseTurn(encodeText(text));
    expect(parsed).toMatchObject({ content: text, tool_calls: [] });
    expect(parsed.error).toContain(error);
  });

  test('the raw value of a key ignores braces, commas and keys inside strings and nested values', () => {
    expect(rawValue('{"a": {"b": "}, \\"b\\": 9"}, "b" : [ {"c":1} , 2 ] , "z": 0}', 'b')).toBe('[ {"c":1} , 2 ]');
  });
});

describe('sampling', () => {
  const logits = (): Float64Array => logitsAt(weights, encodeText('ab'), 2, new Float64Array(VOCAB_SIZE));

  test('the uniform of a seed and an index is always the same and spread evenly', () => {
    expect(uniform(7, 3)).toBe(uniform(7, 3));
    expect(uniform(2 ** 40 + 7, 3)).not.toBe(uniform(7, 3));
    expect(uniform(-1, 0)).not.toBe(uniform(1, 0));
    const draws = Array.from({ length: 4000 }, (_, i) => uniform(i % 40, Math.floor(i / 40)));
    for (const edge of [0.1, 0.5, 0.9]) expect(draws.filter((u) => u < edge).length / 4000).toBeCloseTo(edge, 1);
  });

  test('draws follow the distribution', () => {
    const logprobs = drawFrom(logits(), { temperature: 1, top_k: 3, top_p: 1 });
    const counts = new Map<number, number>();
    for (let i = 0; i < 4000; i++) {
      const id = pick(logprobs, uniform(5, i));
      counts.set(id, (counts.get(id) ?? 0) + 1);
    }
    expect(counts.size).toBe(3);
    for (const [id, n] of counts) expect(n / 4000).toBeCloseTo(Math.exp(logprobs[id] as number), 1);
  });

  test('a distribution that is kept draws the same tokens with the same logprobs', () => {
    const kept = new Distributions(weights);
    for (let i = 0; i < 300; i++) {
      const ids = [i % 7, (i * 31) % 256, (i * 17) % VOCAB_SIZE].slice(0, 1 + (i % 3));
      const temperature = i % 2 ? 1 : 0.7;
      const fresh = logitsAt(weights, ids, ids.length, new Float64Array(VOCAB_SIZE));
      drawFrom(fresh, { temperature, top_k: 0, top_p: 1 });
      const known = kept.at(ids, ids.length, temperature);
      expect(known.logprobs).toEqual(Float32Array.from(fresh));
      for (const u of [uniform(i, 0), uniform(i, 1), 1 - 2 ** -53]) expect(pickFrom(known, u)).toBe(pick(fresh, u));
    }
  });

  test('temperature divides the logits, zero leaves them', () => {
    const half = drawFrom(logits(), { temperature: 0.5, top_k: 0, top_p: 1 });
    expect(half).toEqual(logSoftmax(logits().map((x) => x * 2)));
    const greedy = drawFrom(logits(), { temperature: 0, top_k: 0, top_p: 1 });
    expect(greedy).toEqual(logSoftmax(logits()));
  });

  test('top_p keeps the fewest tokens that reach the mass', () => {
    const all = drawFrom(logits(), { temperature: 1, top_k: 0, top_p: 1 });
    const cut = drawFrom(logits(), { temperature: 1, top_k: 0, top_p: 0.5 });
    const kept = [...cut.keys()].filter((v) => cut[v] !== -Infinity);
    const mass = kept.map((v) => Math.exp(all[v] as number)).sort((a, b) => b - a);
    const total = mass.reduce((a, b) => a + b, 0);
    expect(total).toBeGreaterThanOrEqual(0.5);
    expect(total - (mass.at(-1) as number)).toBeLessThan(0.5);
  });

  test('a turn is printable and ends after a few tokens', () => {
    const lengths = Array.from({ length: 50 }, (_, seed) => {
      const ids = encodeText('<|im_start|>assistant\n');
      const start = ids.length;
      while (ids.at(-1) !== IM_END && ids.length < start + 200) {
        const at = logitsAt(weights, ids, ids.length, new Float64Array(VOCAB_SIZE));
        ids.push(pick(drawFrom(at, { temperature: 1, top_k: 0, top_p: 1 }), uniform(seed, ids.length - start)));
      }
      return ids.length - start;
    });
    const mean = lengths.reduce((a, b) => a + b, 0) / lengths.length;
    expect(mean).toBeGreaterThan(2);
    expect(mean).toBeLessThan(20);
  });
});

describe('learning', () => {
  const options = { loss: OPEN, temperature: 0.7, tokens: 6 };

  test('weights survive their file, and another file is refused', () => {
    expect(Buffer.from(unpackWeights(packWeights(weights)).buffer).equals(Buffer.from(weights.buffer))).toBe(true);
    expect(() => unpackWeights(packWeights(weights).subarray(0, -4))).toThrow('Not weights');
  });

  test('the gradient equals finite differences', () => {
    const ids = encodeText('abcabc<|im_end|>');
    const old = [...scoreIds(weights, ids, 0.7)].map((x, k) => x + 0.05 * Math.sin(k));
    const rows = [row(ids, [0, 1, -2, 0.5, 1, 1, -1], old, old)];
    const grad = new Float64Array(NUM_PARAMETERS);
    policyLoss(weights, rows, options, grad);
    const loss = (w: Float32Array): number =>
      policyLoss(w, rows, options, new Float64Array(NUM_PARAMETERS)).sums.loss as number;
    const touched = [...grad.keys()].filter((i) => Math.abs(grad[i] as number) > 0.01);
    expect(touched.length).toBeGreaterThan(5);
    for (const i of touched) {
      const [up, down] = [1, -1].map((sign) => {
        const w = weights.slice();
        w[i] = (w[i] as number) + sign * 2 ** -8;
        return loss(w);
      }) as [number, number];
      expect((up - down) / 2 ** -7).toBeCloseTo(grad[i] as number, 4);
    }
  });

  test('ratios beyond the clip band give no gradient on the active side', () => {
    const ids = encodeText('ab');
    const now = scoreIds(weights, ids)[1] as number;
    const options = { loss: OPEN, temperature: 1, tokens: 1 };
    const at = (advantage: number, logRatio: number): [number, number, number] => {
      const grad = new Float64Array(NUM_PARAMETERS);
      const { sums } = policyLoss(weights, [row(ids, [0, advantage], [0, now], [0, now - logRatio])], options, grad);
      return [sums.loss as number, sums.clipped as number, gradNorm(grad)];
    };
    expect(at(1, 1)[0]).toBeCloseTo(-1.28, 5);
    expect(at(1, 1).slice(1)).toEqual([1, 0]);
    expect(at(-1, -1)[0]).toBeCloseTo(0.8, 5);
    expect(at(-1, 1)[1]).toBe(0);
    expect(at(1, -1)[2]).toBeGreaterThan(0);
  });

  test.each([
    ['mask', 'token', -0, 1],
    ['clip', 'token', -2, 1],
    ['trunc', 'token', -2, 1],
    ['mask', 'off', -1, 0],
  ] as const)('importance correction %s at level %s: a ratio of 10 weighs %d', (is_mode, is_level, loss, filtered) => {
    const ids = encodeText('ab');
    const now = scoreIds(weights, ids)[1] as number;
    const rows = [row(ids, [0, 1], [0, now - Math.log(10)])];
    const all = { loss: { ...OPEN, is_mode, is_level }, temperature: 1, tokens: 1 };
    const { sums, maxima } = policyLoss(weights, rows, all, new Float64Array(NUM_PARAMETERS));
    expect(sums.loss).toBeCloseTo(loss, 5);
    expect(sums.is_filtered).toBe(filtered);
    expect(maxima.mismatch_abs).toBeCloseTo(Math.log(10), 4);
    expect(sums.mismatch_k3).toBeCloseTo(10 - 1 - Math.log(10), 2);
  });

  test('of stale tokens the difference is drift, not mismatch; they weigh as sampled and stay in the denominator', () => {
    const ids = encodeText('abcd');
    const now = [...scoreIds(weights, ids)] as [number, number, number, number];
    // trainer - rollout: 0.1 fresh, ln 3 stale (out of the band), -0.5 stale
    const gaps = [0, 0.1, Math.log(3), -0.5];
    const rollout = now.map((x, k) => x - (gaps[k] as number));
    const loss: LossOptions = { ...OPEN, is_level: 'token', is_mode: 'mask', is_low: 0.5, is_high: 2 };
    const of = (stale?: number[], old?: number[]) =>
      policyLoss(
        weights,
        [row(ids, [0, 1, 1, 1], rollout, old, stale)],
        { loss, temperature: 1, tokens: 3 },
        new Float64Array(NUM_PARAMETERS),
      );
    const { sums, maxima } = of([0, 0, 1, 1]);
    expect(sums.fresh_tokens).toBe(1);
    expect(sums.mismatch_abs).toBeCloseTo(0.1, 4);
    expect(sums.mismatch_k3).toBeCloseTo(Math.exp(0.1) - 1 - 0.1, 5);
    expect(maxima.mismatch_abs).toBeCloseTo(0.1, 4);
    expect(sums.drift_abs).toBeCloseTo(Math.log(3) + 0.5, 4);
    expect(sums.is_weight).toBeCloseTo(Math.exp(0.1) + 3 + Math.exp(-0.5), 4);
    expect(sums.loss).toBeCloseTo(-(Math.exp(0.1) + Math.exp(-0.5)) / 3, 4); // the rejected one counts in the 3
    expect(sums.is_filtered).toBe(1);
    expect(of().sums).toMatchObject({ loss: sums.loss, fresh_tokens: 3, drift_abs: 0 });
    // A later pass over the batch: the weight is of where the first one began, the ratio of now.
    const start = now.map((x) => x - 0.05);
    const later = of([0, 0, 1, 1], start).sums;
    const weighed = Math.exp(0.05) + Math.exp(-0.55);
    expect(later.is_weight).toBeCloseTo(weighed + 3 * Math.exp(-0.05), 4);
    expect(later.drift_abs).toBeCloseTo(Math.log(3) - 0.05 + 0.55, 4);
    expect(later.loss).toBeCloseTo((-weighed * Math.exp(0.05)) / 3, 4);
  });

  test('steps raise the probability of what earned an advantage', () => {
    const w = weights.slice();
    const state = newOptimState();
    const good = encodeText('?a');
    const bad = encodeText('?b');
    const before = [scoreIds(w, good)[1], scoreIds(w, bad)[1]] as [number, number];
    for (let i = 0; i < 5; i++) {
      const grad = new Float64Array(NUM_PARAMETERS);
      policyLoss(w, [row(good, [0, 1]), row(bad, [0, -1])], { loss: OPEN, temperature: 1, tokens: 2 }, grad);
      adamStep(w, grad, gradNorm(grad), state, {
        lr: 0.05,
        betas: [0.9, 0.95],
        eps: 1e-8,
        weight_decay: 0,
        max_norm: 1,
      });
    }
    expect(scoreIds(w, good)[1]).toBeGreaterThan(before[0] + 0.3);
    expect(scoreIds(w, bad)[1]).toBeLessThan(before[1] - 0.3);
  });
});
