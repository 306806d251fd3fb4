/**
 * Held-out prompts under the current policy: mean reward and pass@k, nothing trained.
 *
 * Every prompt is one unit: the mean over prompts of the mean over its samples. A rollout that no environment judged
 * counts as reward 0 and is counted apart, so that failures cannot raise the number. `constantBest` is the share of
 * prompts that one fixed answer would get right: the score of a policy that has learned nothing but the labels.
 * Called by loop.ts between steps, when nothing else samples.
 */
import type { Dispatch, Job } from './dispatch.ts';
import type { Json, Prompt, Rollout, Sampling } from './types.ts';

const SHOWN = 100; // characters of a prompt or a turn

export interface Evaluation {
  readonly rewardMean: number;
  readonly passAtK: number; // share of prompts with at least one sample of reward >= 1
  readonly prompts: number;
  readonly rollouts: number;
  readonly unjudged: number;
  readonly samples: readonly { readonly prompt: Prompt; readonly rollout: Rollout }[]; // to be read by people
}

export async function evaluate(args: {
  dispatch: Dispatch;
  prompts: readonly Prompt[];
  samplesPerPrompt: number;
  sampling: Sampling;
  seed: (prompt: number, sample: number) => number;
  limits: Job['limits'];
  samples: number; // first rollouts of the first prompts, to be returned
  name: string; // tells rollout ids of one evaluation from another's
  onRollout: (rollout: Rollout, done: number, of: number) => void;
}): Promise<Evaluation> {
  const { dispatch, prompts, samplesPerPrompt, sampling, seed, limits, name } = args;
  const total = prompts.length * samplesPerPrompt;
  let done = 0;
  const groups = await Promise.all(
    prompts.map((prompt, p) =>
      Promise.all(
        Array.from({ length: samplesPerPrompt }, async (_, s) => {
          const groupId = `${name}-${p}`;
          const rollout = await dispatch.run({
            rolloutId: `${groupId}-${s}`,
            groupId,
            index: s,
            prompt,
            seed: seed(p, s),
            sampling: { ...sampling, seed: seed(p, s) },
            limits,
          });
          args.onRollout(rollout, ++done, total);
          return rollout;
        }),
      ),
    ),
  );
  const scores = groups.map((group) => group.map((rollout) => rollout.score ?? 0));
  return {
    rewardMean: mean(scores.map(mean)),
    passAtK: mean(scores.map((group) => (group.some((score) => score >= 1) ? 1 : 0))),
    prompts: prompts.length,
    rollouts: total,
    unjudged: groups.flat().filter((rollout) => rollout.score === null).length,
    samples: prompts.slice(0, args.samples).map((prompt, p) => ({ prompt, rollout: groups[p]?.[0] as Rollout })),
  };
}

/** What follows the first prompt of a rollout, a row for each turn of the policy and for what was put between them. */
export function saidRows(rollout: Rollout, stopIds: ReadonlySet<number>): { policy: boolean; ids: Int32Array }[] {
  const [trajectory] = rollout.trajectories;
  if (!trajectory) return [];
  const { ids, lossMask } = trajectory;
  const rows: { policy: boolean; ids: Int32Array }[] = [];
  for (let from = lossMask.indexOf(1), to = from; from >= 0 && from < ids.length; from = to) {
    while (to < ids.length && lossMask[to] === lossMask[from]) to++;
    const policy = lossMask[from] === 1;
    const isStopped = policy && stopIds.has(ids[to - 1] as number);
    rows.push({ policy, ids: ids.slice(from, isStopped ? to - 1 : to) });
  }
  return rows;
}

/** One line for people: the end of the prompt, the policy's turns, in brackets what was put between them, the ending. */
export function formatSample(
  prompt: Prompt,
  rollout: Rollout,
  said: readonly { readonly policy: boolean; readonly text: string }[],
): string {
  const { input } = prompt;
  const last = Array.isArray(input) ? (input.at(-1) as { content?: Json }).content : input;
  const asked = oneLine(typeof last === 'string' ? last : JSON.stringify(last ?? null), 'end');
  const parts = said.map(({ policy, text }) =>
    policy ? oneLine(text, 'start') || '(nothing)' : `[${oneLine(text.trim(), 'start')}]`,
  );
  const ending = rollout.reason === 'done' ? '' : `, ended by ${rollout.reason}`;
  return `  ${[asked, ...parts].join(' -> ')}   (reward ${rollout.score ?? 'none'}${ending})`;
}

function oneLine(text: string, keep: 'start' | 'end'): string {
  const line = [...JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"')];
  if (line.length <= SHOWN) return line.join('');
  return keep === 'start' ? `${line.slice(0, SHOWN).join('')}...` : `...${line.slice(-SHOWN).join('')}`;
}

/** Share of prompts whose label is the most frequent one. */
export function constantBest(labels: readonly Json[]): number {
  const counts = new Map<string, number>();
  for (const label of labels) {
    const key = JSON.stringify(label);
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  return labels.length === 0 ? 0 : Math.max(...counts.values()) / labels.length;
}

function mean(values: readonly number[]): number {
  return values.length === 0 ? 0 : values.reduce((a, b) => a + b, 0) / values.length;
}
