/**
 * Parity of sampling: every engine samples a few tokens, and the trainer judges them.
 *
 *   starts of the probes -> engine samples at rollout.temperature -> trainer's logprobs of what came
 *
 *   1. mean |logprob reported - logprob of the trainer|      within the bound of the other parity (health.ts)
 *   2. likelihood at another temperature / at the right one  below NUM_ALTERNATIVES / FALSE_ALARM
 *
 * Equal logprobs of given rows (refit.ts) show that engine and trainer have the same model, not that the engine draws from
 * it. The first test here is about what the engine says of its own draws; a sampler can also draw from something else and
 * report the right logprobs of what it drew (speculation that accepts what it should not). For the second test: where each
 * token x is drawn from p given those before it, the product over all tokens of q(x) / p(x) has mean 1 for any distribution q, so by
 * Markov's inequality it exceeds 1 / a with a probability of at most a, whatever the model and the number of tokens. With
 * q the same logits at half and at twice the temperature it becomes large when tokens are too likely, or too surprising.
 * An engine whose logprobs differ from the trainer's by rounding draws from a p that is nearer to the trainer's than to
 * either q, so that the product shrinks all the same.
 *
 * What is sampled here counts nowhere: no metric, no session, no ledger. Called by health.ts and start.ts; samples through
 * generator.ts. Tokens of a simulated engine may be scripted, so only the first test holds for it.
 */
import type { Engine, Generator, TurnRequest } from './generator.ts';
import type { Trainer } from './trainer.ts';
import { invariant } from './types.ts';

const NUM_PROMPTS = 4;
const PROMPT_TOKENS = 16;
const SAMPLED_TOKENS = 16; // of each prompt
/** Probability at most that an engine which samples as it should is refused by the second test. */
const FALSE_ALARM = 1e-6;
const HALF_AND_TWICE = [0.5, 2] as const; // of the temperature
const LOG_RATIO_BOUND = Math.log(HALF_AND_TWICE.length / FALSE_ALARM); // 14.5

/** Of one engine. A NaN stays one, and is over every bound. */
export interface SampledParity {
  readonly engine: string;
  readonly tokens: number;
  readonly mean: number; // of |dlogp| between what it reports and the trainer
  readonly max: number;
  readonly logRatio: number; // the larger one of both alternatives, natural logarithm
  readonly failure: string | null; // why it did not sample all that was asked
}

export interface ParityArgs {
  readonly generator: Generator;
  readonly trainer: Trainer;
  readonly probes: readonly Int32Array[];
  readonly temperature: number;
  readonly maxLen: number; // tokens of prompt and answer, at most
}

/** Every engine that there is, one after the other. An engine that is lost meanwhile is judged as its successor. */
export async function sampledParity(args: ParityArgs): Promise<readonly SampledParity[]> {
  for (;;) {
    await args.generator.anyEngine();
    const judged: SampledParity[] = [];
    const engines = args.generator.engines;
    for (const engine of engines) {
      const found = await judge(engine, args);
      if (found) judged.push(found);
    }
    if (judged.length === engines.length) return judged;
  }
}

/** What is wrong, naming engine, values and bound; null = nothing. `drawn`: whether the second test holds for it. */
export function samplingProblem(found: SampledParity, bound: number, drawn: boolean): string | null {
  const { engine, tokens, mean, max, logRatio, failure } = found;
  if (failure !== null) return `${engine} could not sample from the probes: ${failure}`;
  if (!(mean <= bound))
    return `${engine} reports other logprobs of the ${tokens} tokens it sampled than the trainer: mean |dlogp| ${mean}, max ${max}, at most ${bound} is allowed in the mean`;
  if (drawn && !(logRatio <= LOG_RATIO_BOUND))
    return `${engine} does not sample from the distribution whose logprobs it reports: at another temperature its ${tokens} tokens are exp(${logRatio.toFixed(1)}) times as likely, at most exp(${LOG_RATIO_BOUND.toFixed(1)}) is allowed`;
  return null;
}

/** Null when the engine is lost. */
async function judge(engine: Engine, args: ParityArgs): Promise<SampledParity | null> {
  const { generator, trainer, temperature } = args;
  const requests = requestsOf(args);
  const turns = await Promise.all(requests.map((request) => generator.generateOn(engine, request)));
  if (engine.peer.isLost) return null;
  const name = engine.worker.spec.id;
  const failed = turns.find(({ reason }) => reason !== 'length');
  const none = { engine: name, tokens: 0, mean: Number.NaN, max: Number.NaN, logRatio: Number.NaN };
  if (failed) return { ...none, failure: failed.detail ?? failed.reason };

  const rows = turns.map(({ ids }, i) => Int32Array.from([...(requests[i] as TurnRequest).prompt, ...ids]));
  const lengths = turns.map(({ ids }) => ids.length);
  const logprobsAt = async (t: number) => endsOf(await trainer.logprobs(rows, t), rows, lengths);
  const right = await logprobsAt(temperature);
  const reported = turns.flatMap(({ logprobs }) => [...logprobs]);
  invariant(reported.length === right.length, 'one logprob of each for every token');
  const gaps = reported.map((logprob, k) => Math.abs(logprob - (right[k] as number)));
  const ratios: number[] = [];
  for (const factor of HALF_AND_TWICE) {
    const other = await logprobsAt(factor * temperature);
    ratios.push(other.reduce((sum, logprob, k) => sum + logprob - (right[k] as number), 0));
  }
  return {
    engine: name,
    tokens: right.length,
    mean: gaps.reduce((a, b) => a + b, 0) / gaps.length,
    max: Math.max(...gaps),
    logRatio: Math.max(...ratios),
    failure: null,
  };
}

/** Starts of the probes in turn, each time with another seed. */
function requestsOf({ probes, temperature, maxLen }: ParityArgs): TurnRequest[] {
  const max_tokens = Math.min(SAMPLED_TOKENS, maxLen - 1);
  const length = Math.min(PROMPT_TOKENS, maxLen - max_tokens);
  return Array.from({ length: NUM_PROMPTS }, (_, i) => {
    const probe = probes[i % probes.length];
    invariant(probe, 'there are probes');
    return {
      rolloutId: `parity-${i}`,
      attempt: 0,
      turn: 0,
      sessionId: `parity-${i}`,
      sampling: { temperature, top_p: 1, top_k: 0, max_tokens, seed: i + 1, stop: [], stop_token_ids: [] },
      prompt: probe.subarray(0, length),
    };
  });
}

/** Of values of whole rows those that belong to the last tokens of each. */
function endsOf(values: Float32Array, rows: readonly Int32Array[], lengths: readonly number[]): number[] {
  let end = 0;
  return rows.flatMap((row, i) => {
    end += row.length;
    return [...values.subarray(end - (lengths[i] as number), end)];
  });
}
