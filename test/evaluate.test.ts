import { expect, test } from 'vitest';
import { constantBest, formatSample, saidRows } from '../molt/evaluate.ts';
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
  proofs: [],
  dispatchedVersion: 4,
};
const PROMPT: Prompt = { source: 's', epoch: 0, index: 0, input: 'What is\nthis?', label: null, tools: null };

test('saidRows cuts a rollout into turns of the policy and what was put between them, without the stop token', () => {
  expect(saidRows(ROLLOUT, new Set([2]))).toEqual([
    { policy: true, ids: Int32Array.of(90) },
    { policy: false, ids: Int32Array.of(50) },
    { policy: true, ids: Int32Array.of(91, 92) },
  ]);
  expect(saidRows({ ...ROLLOUT, trajectories: [] }, new Set([2]))).toEqual([]);
});

const said = (policy: boolean, text: string) => ({ policy, text });

test('formatSample is one line: the prompt, what was said, the score and an ending other than done', () => {
  const parts = [said(true, 'A "fox"\n'), said(false, '\nuser\nlower\n'), said(true, '')];
  expect(formatSample(PROMPT, ROLLOUT, parts)).toBe(
    '  What is\\nthis? -> A "fox"\\n -> [user\\nlower] -> (nothing)   (reward 0.5)',
  );
  const lost: Rollout = { ...ROLLOUT, reason: 'engine_lost', reward: null, score: null };
  expect(formatSample(PROMPT, lost, [])).toBe('  What is\\nthis?   (reward none, ended by engine_lost)');
});

test('formatSample shows the end of a long prompt, of messages the last one, and the start of a long turn', () => {
  const messages = [
    { role: 'system', content: 'Be brief.' },
    { role: 'user', content: `${'x'.repeat(200)} the end` },
  ];
  const line = formatSample({ ...PROMPT, input: messages }, ROLLOUT, [said(true, `the start ${'y'.repeat(200)}`)]);
  expect(line).toMatch(/^ {2}\.\.\.x+ the end -> the start y+\.\.\. {3}\(reward 0\.5\)$/);
  expect(line.length).toBeLessThan(240);
});
