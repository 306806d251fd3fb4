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

export interface Evaluation {
  readonly rewardMean: number;
  readonly passAtK: number; // share of prompts with at least one sample of reward >= 1
  readonly prompts: number;
  readonly rollouts: number;
  readonly unjudged: number;
  readonly samples: readonly Rollout[]; // the first rollout of the first prompts, to be looked at
}

export async function evaluate(args: {
  dispatch: Dispatch;
  prompts: readonly Prompt[];
  samplesPerPrompt: number;
  sampling: Sampling;
  seed: (prompt: number, sample: number) => number;
  limits: Job['limits'];
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
    samples: groups.slice(0, 3).flatMap((group) => group.slice(0, 1)),
  };
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
