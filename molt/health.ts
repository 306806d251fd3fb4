/**
 * What stops a run, and what is said of one that goes on badly.
 *
 *   too many rollouts that nobody judged     FailureWindow
 *   engine and trainer that disagree         checkParity at the start, Health over the steps
 *   losses that are not finite               Health
 *   steps without any credit                 Health: a warning
 *
 * Each throws with the cause. Called by loop.ts.
 */
import { isTrainable } from './buffer.ts';
import { ConfigError } from './config.ts';
import type { MetricValues } from './metrics.ts';
import { placeOf } from './modules.ts';
import type { Refit } from './refit.ts';
import type { Rollout } from './types.ts';

/** Parity bounds (DESIGN, invariant 3.4): mean |dlogp| of a step or of the probes at the start. */
export const MISMATCH_BOUND = { float32: 1e-3, bfloat16: 0.1 } as const;
const MISMATCH_STEPS = 3; // above the bound on so many steps running, of those that can tell = stop
const FAILURE_WINDOW = 64; // rollouts over which the failure rate is taken
const SKIPPED_STEPS = 3; // non-finite steps running = stop
const FLAT_STEPS = 3; // steps running in which every advantage was 0 = a warning

type Dtype = keyof typeof MISMATCH_BOUND;

/** Stop when too many of the recent rollouts were judged by nobody, with the commonest cause. */
export class FailureWindow {
  readonly #maxRate: number;
  readonly #agentPath: string;
  #recent: { failed: boolean; cause: string }[] = [];
  constructor(maxRate: number, agentPath: string) {
    this.#maxRate = maxRate;
    this.#agentPath = agentPath;
  }
  add(rollout: Rollout): void {
    const failed = !isTrainable(rollout);
    this.#recent.push({ failed, cause: `${rollout.reason}${rollout.detail ? `: ${rollout.detail}` : ''}` });
    if (this.#recent.length > FAILURE_WINDOW) this.#recent.shift();
  }
  /** Throws when it is so. An agent that never worked is bad input, a ConfigError. */
  check(hasTrained: boolean): void {
    const failed = this.#recent.filter((r) => r.failed);
    if (this.#recent.length < FAILURE_WINDOW || failed.length / this.#recent.length <= this.#maxRate) return;
    const causes = new Map<string, number>();
    for (const { cause } of failed) causes.set(cause, (causes.get(cause) ?? 0) + 1);
    const [cause, times] = [...causes].sort((a, b) => b[1] - a[1])[0] as [string, number];
    if (!hasTrained && failed.length === this.#recent.length && /^(agent_error|invalid_reward)/.test(cause)) {
      const place = placeOf({ stack: cause });
      const line = `none of its first ${failed.length} rollouts ended with a reward: ${cause.split('\n')[0]}`;
      throw new ConfigError([`--train.agent_path ${this.#agentPath}: ${line}${place && ` (${place})`}`]);
    }
    throw new Error(
      `${failed.length} of the last ${this.#recent.length} rollouts failed, more than rollout.max_failure_rate ${this.#maxRate} allows. Commonest cause (${times} times):\n${cause}`,
    );
  }
}

/** Over the steps of a run. `stop` is rollout.mismatch_stop. */
export class Health {
  readonly #dtype: Dtype;
  readonly #stop: boolean;
  readonly #say: (line: string) => void;
  #mismatched = 0; // steps running
  #skipped = 0;
  #flat = 0;

  constructor(args: { readonly dtype: Dtype; readonly stop: boolean; readonly say: (line: string) => void }) {
    this.#dtype = args.dtype;
    this.#stop = args.stop;
    this.#say = args.say;
  }

  /** Looks at the metrics of a step. `flat` when it has just warned of steps without credit. */
  check(line: MetricValues): 'fine' | 'flat' {
    const mismatch = line.logprob_mismatch_mean ?? null; // null: no token of the version trained, so nothing to compare
    const bound = MISMATCH_BOUND[this.#dtype];
    if (mismatch !== null) this.#mismatched = mismatch <= bound ? 0 : this.#mismatched + 1; // NaN counts as above
    if (this.#stop && mismatch !== null && this.#mismatched >= MISMATCH_STEPS) {
      throw new Error(
        `Engine and trainer disagree: mean |dlogp| ${mismatch.toExponential(1)} is above ${bound} on ${MISMATCH_STEPS} steps running (--rollout.mismatch_stop off goes on)`,
      );
    }
    this.#skipped = line.skipped ? this.#skipped + 1 : 0;
    if (this.#skipped >= SKIPPED_STEPS)
      throw new Error(`Loss or gradient was not finite on ${SKIPPED_STEPS} steps running`);
    this.#flat = line.tokens_credited === 0 ? this.#flat + 1 : 0;
    if (this.#flat !== FLAT_STEPS) return 'fine';
    this.#say(
      `Warning: every advantage was 0 on ${FLAT_STEPS} steps running, so there was nothing to learn from (mean reward ${line.reward_mean?.toFixed(3)}): is the task too hard, too easy, or the reward always the same?`,
    );
    return 'flat';
  }
}

/** Engine and trainer on the same rows. Returns a line about it; throws when they are not the same model and `stop`. */
export async function checkParity(refit: Refit, dtype: Dtype, stop: boolean): Promise<string> {
  const { mean, max } = await refit.parity();
  if (stop && !(mean <= MISMATCH_BOUND[dtype])) {
    throw new Error(
      `Engine and trainer do not agree on the model: mean |dlogp| ${mean}, at most ${MISMATCH_BOUND[dtype]} in ${dtype} (--rollout.mismatch_stop off goes on)`,
    );
  }
  return `Parity of engine and trainer at version ${refit.version}: mean |dlogp| ${mean.toExponential(1)}, max ${max.toExponential(1)}`;
}
