import { expect, test } from 'vitest';
import { constantBest, formatSample, turnIds } from '../molt/evaluate.ts';
import type { Prompt, Rollout, Trajectory } from '../molt/types.ts';

test('constantBest is the share of the most frequent label, whatever its type', () => {
  expect(constantBest(['7', '8', '7', 7])).toBe(0.5);
  expect(constantBest([{ a: 1 }, { a: 1 }, null])).toBeCloseTo(2 / 3, 12);
  expect(constantBest([])).toBe(0);
});

const TRAJECTORY: Trajectory = {
  ids: Int32Array.of(11, 12, 90, 2, 50, 91, 92),
  lossMask: Uint8Array.of(0, 0, 1, 1, 0, 1, 1),
  logprobs: new Float32Array(7),
  versions: Int32Array.of(-1, -1, 4, 4, -1, 4, 5),
  turns: Int32Array.of(0, 0, 0, 0, 1, 1, 1),
  spans: [], // the turn of two versions has two
};
const ROLLOUT: Rollout = {
  rolloutId: 'r',
  groupId: 'g',
  index: 0,
  attempt: 0,
  reason: 'done',
  detail: null,
  reward: 0.5,
  score: 0.5,
  truncated: false,
  info: {},
  turns: 2,
  trajectories: [TRAJECTORY],
  dispatchedVersion: 4,
};
const PROMPT: Prompt = { source: 's', epoch: 0, index: 0, input: 'What is\nthis?', label: null, tools: null };

test('turnIds gives what the policy sampled, a row per turn', () => {
  expect(turnIds(ROLLOUT)).toEqual([Int32Array.of(90, 2), Int32Array.of(91, 92)]);
  expect(turnIds({ ...ROLLOUT, trajectories: [] })).toEqual([]);
});

test('formatSample is one line: the prompt, every turn, the score and an ending other than done', () => {
  expect(formatSample(PROMPT, ROLLOUT, ['A "fox"\n', 'no'])).toBe(
    '  What is\\nthis? -> A "fox"\\n -> no   (reward 0.5)',
  );
  const lost: Rollout = { ...ROLLOUT, reason: 'engine_lost', reward: null, score: null };
  expect(formatSample(PROMPT, lost, [])).toBe('  What is\\nthis?   (reward none, engine_lost)');
});

test('formatSample shows the end of a long prompt, of messages the last one, and the start of a long turn', () => {
  const messages = [
    { role: 'system', content: 'Be brief.' },
    { role: 'user', content: `${'x'.repeat(200)} the end` },
  ];
  const line = formatSample({ ...PROMPT, input: messages }, ROLLOUT, [`the start ${'y'.repeat(200)}`]);
  expect(line).toMatch(/^ {2}\.\.\.x+ the end -> the start y+\.\.\. {3}\(reward 0\.5\)$/);
  expect(line.length).toBeLessThan(240);
});
