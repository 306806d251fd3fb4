/** Rollouts of a real runner process, over a simulated engine and tokenizer: what ends them and what they leave. */
import { execFile } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { loadAgent } from '../molt/agent.ts';
import type { Job } from '../molt/dispatch.ts';
import type { Json, Rollout } from '../molt/types.ts';
import { IM_END } from '../workers/simulated_model.ts';
import { RolloutCell } from './rollouts.ts';

const LIMIT_MS = 60_000;

let cell: RolloutCell;
const run = (label: Json, over: Partial<Job['limits']> = {}, maxTokens = 8): Promise<Rollout> =>
  cell.run(label, over, maxTokens);

beforeAll(async () => {
  cell = await RolloutCell.open({ agentPath: 'test/fixtures/agent_cases.ts', maxRestarts: 4 });
}, LIMIT_MS);
afterAll(() => cell?.close());

describe('a rollout', () => {
  test('of several turns adds up rewards, keeps the last info, and is one chain of exact tokens', async () => {
    const rollout = await run('three turns');
    expect(rollout).toMatchObject({ reward: 1, score: 1, turns: 3, attempt: 0, info: { seen: 2 } });
    expect(['done', 'length']).toContain(rollout.reason);
    expect(rollout.trajectories).toHaveLength(1);
    const [t] = rollout.trajectories;
    const policy = t?.spans.filter((span) => span.source === 'policy') ?? [];
    expect(policy.map((span) => span.turn)).toEqual([0, 1, 2]);
    for (const [k, mask] of t?.lossMask.entries() ?? []) {
      const sampled = policy.some((span) => span.from <= k && k < span.to);
      expect(mask).toBe(sampled ? 1 : 0);
      expect(t?.versions[k]).toBe(sampled ? 0 : -1);
      if (!sampled) expect(t?.logprobs[k]).toBe(0);
    }
  });

  test('closes a turn that ran into its token limit exactly once before the observation', async () => {
    const rollout = await run('tool', {}, 1); // one token a turn: mostly not the stop token
    const [t] = rollout.trajectories;
    const [first] = t?.spans.filter((span) => span.source === 'policy') ?? [];
    const sampled = Array.from(t?.ids.slice(first?.from, first?.to) ?? []);
    const next = t?.ids[first?.to ?? 0];
    expect(sampled).toHaveLength(1);
    expect(next === IM_END).toBe(sampled[0] !== IM_END);
    expect(rollout.truncated).toBe(true);
  });

  test.each([
    ['reset throws', 'agent_error', 'no such room'],
    ['step throws', 'agent_error', 'the lamp is broken'],
    ['nan reward', 'invalid_reward', 'expected a finite number'],
    ['no result', 'agent_error', 'expected { reward, done, observation? }'],
  ])('whose environment does "%s" ends %s, says why, and has no reward', async (label, reason, detail) => {
    const rollout = await run(label);
    expect(rollout).toMatchObject({ reason, reward: null });
    expect(rollout.detail).toContain(detail);
  });

  test('whose step never settles ends at its deadline', async () => {
    expect(await run('hangs', { deadlineMs: 300 })).toMatchObject({ reason: 'deadline', reward: null });
  });

  test('that is never done ends at the turn limit, judged and truncated', async () => {
    expect(await run('never done', { maxTurns: 3 })).toMatchObject({
      reason: 'turns',
      turns: 3,
      reward: 0,
      truncated: true,
    });
  });

  test('without room for another turn ends "context"; its trajectory stays within the limit', async () => {
    const rollout = await run('never done', { maxTokens: 60, maxTurns: 100 });
    expect(rollout).toMatchObject({ reason: 'context', truncated: true });
    expect(rollout.trajectories[0]?.ids.length).toBeLessThanOrEqual(60);
  });

  test('whose prompt does not fit has no trajectory and no reward', async () => {
    expect(await run('even', { maxTokens: 3 })).toMatchObject({ reason: 'context', reward: null, trajectories: [] });
  });

  test('can be cancelled, and comes back', async () => {
    const rollout = run('hangs');
    const id = `r${cell.count - 1}`;
    await new Promise((resolve) => setTimeout(resolve, 50));
    cell.dispatch.cancel((job) => job.rolloutId === id, 'cancelled');
    expect(await rollout).toMatchObject({ reason: 'cancelled', reward: null });
  });

  test(
    'keeps its reward when close() throws or never ends, and says that it did',
    async () => {
      expect(await run('close throws')).toMatchObject({ info: { close_failed: 1 } });
      expect(await run('close hangs')).toMatchObject({ info: { close_failed: 1 } });
    },
    LIMIT_MS,
  );
});

test(
  'hundreds of rollouts run in one runner, failures among them touch no other',
  async () => {
    const labels = Array.from({ length: 300 }, (_, i) =>
      i % 10 === 0 ? 'step throws' : i % 10 === 1 ? 'nan reward' : 'three turns',
    );
    const rollouts = await Promise.all(labels.map((label) => run(label)));
    for (const [i, rollout] of rollouts.entries()) expect(rollout.reward).toBe(labels[i] === 'three turns' ? 1 : null);
  },
  LIMIT_MS,
);

test(
  'a rollout that keeps killing its runner ends runner_lost; the others are tried again',
  async () => {
    const [bad, ...good] = await Promise.all([
      run('crashes runner'),
      ...Array.from({ length: 8 }, () => run('three turns')),
    ]);
    expect(bad).toMatchObject({ reason: 'runner_lost', reward: null });
    // An innocent may share all three attempts with the culprit; what matters is that all end.
    for (const rollout of good) expect(['done', 'length', 'runner_lost']).toContain(rollout.reason);
    expect(cell.events.map((event) => event.name)).toContain('runner_lost');
  },
  LIMIT_MS,
);

describe('loadAgent', () => {
  const BROKEN: readonly (readonly [what: string, text: string, line: string])[] = [
    [
      'syntax',
      'export class agent {\n  reset( { return 1; }\n}',
      'Cannot load agent FILE: FILE:2:18: Expected "}" but found "1"',
    ],
    [
      'throws',
      "const x: number = 1;\nthrow new Error('no\\n  lamp');",
      'Cannot load agent FILE: throws on import: no lamp (FILE:2:7)',
    ],
    ['text', "throw 'just text';", 'Cannot load agent FILE: throws on import: just text'],
    [
      'reference',
      'export class agent extends Lamp {}',
      'Cannot load agent FILE: throws on import: ReferenceError: Lamp is not defined (FILE:1:28)',
    ],
    [
      'import',
      "import { a } from './nope.ts';\nexport const agent = a;",
      "Cannot load agent FILE: Cannot find module './nope.ts' imported from FILE",
    ],
    [
      'another',
      'export const agents = 1;',
      'Agent FILE must export `agent`, a class or a function that makes an Env; it exports agents',
    ],
    [
      'constructor',
      "export class agent {\n  constructor() { throw new TypeError('no key'); }\n}",
      'Agent FILE: making an Env throws: TypeError: no key (FILE:2:25)',
    ],
    [
      'no-step',
      "export class agent { reset() { return ''; } }",
      'Agent FILE has no step(): an Env needs reset(task) and step(turn)',
    ],
    ['null', 'export const agent = () => null;', 'Agent FILE has no reset(): an Env needs reset(task) and step(turn)'],
    [
      'promise',
      'export const agent = async () => ({ reset() {}, step() {} });',
      'Agent FILE makes a promise, expected an Env at once',
    ],
    [
      'close',
      "export class agent { reset() {} step() {} close() { throw new Error('stuck'); } }",
      'Agent FILE: close() of an Env that was never used throws: stuck (FILE:1:59)',
    ],
  ];

  test('says in one line what is wrong with a file', async () => {
    // Under tsx, as users have it: vitest words errors differently.
    const dir = mkdtempSync(join(tmpdir(), 'molt-agent-'));
    const paths = BROKEN.map(([name, text]) => {
      const path = join(dir, `${name}.ts`);
      writeFileSync(path, text);
      return path;
    });
    const program = `import { loadAgent } from './molt/agent.ts';
      const said = [];
      for (const path of ${JSON.stringify(paths)}) await loadAgent(path).catch((error) => said.push(error.message));
      console.log(JSON.stringify(said));`;
    const { stdout } = await promisify(execFile)(process.execPath, [
      '--import',
      'tsx',
      '--input-type=module',
      '-e',
      program,
    ]);
    rmSync(dir, { recursive: true });
    const said = (JSON.parse(stdout) as string[]).map((line, i) => line.replaceAll(paths[i] as string, 'FILE'));
    expect(said).toEqual(BROKEN.map(([, , line]) => line));
  });

  test('names the file and what is missing', async () => {
    await expect(loadAgent('test/fixtures/no_such_agent.ts')).rejects.toThrow(
      'Cannot load agent test/fixtures/no_such_agent.ts',
    );
    await expect(loadAgent('test/fixtures/prompts_half_throw.ts')).rejects.toThrow('must export `agent`');
  });
});
