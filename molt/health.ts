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
import { ConfigError, type Options } from './config.ts';
import type { MetricValues } from './metrics.ts';
import { placeOf } from './modules.ts';
import { sampledParity, samplingProblem } from './parity.ts';
import type { Rollout } from './types.ts';
import type { Workers } from './workers.ts';

/** Parity bounds (DESIGN, invariant 3.4): mean |dlogp| of a step or of the probes at the start. */
export const MISMATCH_BOUND = { float32: 1e-3, bfloat16: 0.1 } as const;
const MISMATCH_STEPS = 3; // above the bound on so many steps running, of those that can tell = stop
const FAILURE_WINDOW = 64; // rollouts over which the failure rate is taken
const FAILED_IN_A_ROW = 16; // rollouts
const OTHER_CAUSES = 3; // said beside the commonest
const SKIPPED_STEPS = 3; // non-finite steps running = stop
const FLAT_STEPS = 3; // steps running in which every advantage was 0 = a warning

type Dtype = keyof typeof MISMATCH_BOUND;

/**
 * Stop when too many of the recent rollouts were judged by nobody, with the commonest cause.
 *
 *   FAILURE_WINDOW rollouts   more than maxRate of them failed
 *   FAILED_IN_A_ROW           all of them failed, and more than maxRate of those that ended so far
 *   a quarter as many         all of them blocked their runner: each takes rollout.block_s of everybody's time
 *
 * A row is of more than one group, where there is more than one: a prompt that always fails is no reason to stop. Rollouts
 * that still run count as if they ended well, since what fails is done first. A maxRate above 1/2 makes the row longer, so
 * that chance is as unlikely to bring it about as it is at 1/2. A maxRate of 1 never stops. Cancelled rollouts count as
 * nothing.
 */
export class FailureWindow {
  readonly #maxRate: number;
  readonly #agentPath: string;
  readonly #running: () => readonly string[];
  readonly #rowLength: number;
  #recent: Ending[] = [];
  #hasJudged = false;

  /** `running` gives the group of every rollout that runs. */
  constructor(args: {
    readonly maxRate: number;
    readonly agentPath: string;
    readonly running: () => readonly string[];
  }) {
    this.#maxRate = args.maxRate;
    this.#agentPath = args.agentPath;
    this.#running = args.running;
    this.#rowLength = rowLength(args.maxRate);
  }

  /** Throws when a row of failures is long enough. An agent that never worked is bad input, a ConfigError. */
  add(rollout: Rollout): void {
    const { reason, detail, groupId } = rollout;
    if (reason === 'cancelled') return;
    const failed = !isTrainable(rollout);
    this.#hasJudged ||= !failed;
    this.#recent.push({
      failed,
      groupId,
      blocked: reason === 'agent_blocked',
      cause: `${reason}${detail ? `: ${detail}` : ''}`,
    });
    if (this.#recent.length > FAILURE_WINDOW) this.#recent.shift();
    const row = this.#row((ending) => ending.failed);
    const blocked = this.#row((ending) => ending.blocked);
    if (blocked.length >= this.#rowLength / 4 && this.#isWide(blocked)) this.#stop(blocked, blocked.length);
    const failures = this.#recent.filter((ending) => ending.failed).length;
    if (
      row.length >= this.#rowLength &&
      failures > this.#maxRate * this.#recent.length &&
      row.length > this.#maxRate * (row.length + this.#running().length) &&
      this.#isWide(row)
    )
      this.#stop(row, row.length);
  }

  /** Throws when too many of the window failed, in the same way. */
  check(): void {
    const failed = this.#recent.filter((ending) => ending.failed);
    if (this.#recent.length < FAILURE_WINDOW || failed.length / this.#recent.length <= this.#maxRate) return;
    this.#stop(failed, this.#recent.length);
  }

  /** The endings since the last one that is not so. */
  #row(isSo: (ending: Ending) => boolean): readonly Ending[] {
    return this.#recent.slice(this.#recent.findLastIndex((ending) => !isSo(ending)) + 1);
  }

  /** Of more than one group, where there is more than one. */
  #isWide(row: readonly Ending[]): boolean {
    const groups = (endings: readonly Ending[]) => endings.map((ending) => ending.groupId);
    const all = new Set([...groups(this.#recent), ...this.#running()]);
    return new Set(groups(row)).size > 1 || all.size === 1;
  }

  #stop(failed: readonly Ending[], of: number): never {
    const causes = byFrequency(failed);
    const [{ cause, times }] = causes as [Cause];
    if (!this.#hasJudged && /^(agent_error|agent_blocked|invalid_reward)/.test(cause)) {
      const place = placeOf({ stack: cause });
      const line = `none of its first ${failed.length} rollouts ended with a reward: ${cause.split('\n')[0]}`;
      throw new ConfigError([`--train.agent_path ${this.#agentPath}: ${line}${place && ` (${place})`}`]);
    }
    const others = causes.slice(1, 1 + OTHER_CAUSES).map((c) => `${c.times} times: ${c.cause.split('\n')[0]}`);
    const rate = `rollout.max_failure_rate ${this.#maxRate} allows`;
    const share = `${failed.length} of the last ${of} rollouts failed, more than ${rate}`;
    throw new Error([`${share}. Commonest cause (${times} times):`, cause, ...others].join('\n'));
  }
}

/** Rollouts in a row: 16 up to a rate of 1/2, above it as many as are as unlikely at that rate. */
function rowLength(maxRate: number): number {
  if (maxRate === 1) return Number.POSITIVE_INFINITY;
  if (maxRate <= 0.5) return FAILED_IN_A_ROW;
  return Math.min(FAILURE_WINDOW, Math.ceil((FAILED_IN_A_ROW * Math.log(0.5)) / Math.log(maxRate)));
}

interface Ending {
  readonly failed: boolean;
  readonly groupId: string;
  readonly blocked: boolean;
  readonly cause: string;
}
interface Cause {
  readonly cause: string; // the first of its kind, whole
  times: number;
}

/** Causes that differ in numbers only, or in their stacks, are one. */
function byFrequency(failed: readonly Ending[]): Cause[] {
  const causes = new Map<string, Cause>();
  for (const { cause } of failed) {
    const kind = (cause.split('\n')[0] as string).replace(/\d+/g, '0');
    const known = causes.get(kind);
    if (known) known.times++;
    else causes.set(kind, { cause, times: 1 });
  }
  return [...causes.values()].sort((a, b) => b.times - a.times);
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

/** What `checkParity` found. */
export interface Agreement {
  readonly scored: string; // both on the same rows
  readonly sampled: string; // what engines sampled, by the trainer
  readonly problems: readonly string[];
}

/** Whether engine and trainer are the same model, and engines sample from it. Rejects only where it cannot be told. */
export async function checkParity(
  { refit, generator, trainer, dtype }: Pick<Workers, 'refit' | 'generator' | 'trainer' | 'dtype'>,
  options: Options,
): Promise<Agreement> {
  const bound = MISMATCH_BOUND[dtype];
  const problems: string[] = [];
  const { mean, max } = await refit.parity();
  if (!(mean <= bound))
    problems.push(
      `Engine and trainer do not agree on the model: mean |dlogp| ${mean}, at most ${bound} is allowed in ${dtype}`,
    );
  const engines = await sampledParity({
    generator,
    trainer,
    probes: refit.probes,
    temperature: options['rollout.temperature'],
    maxLen: options['engine.max_len'],
  });
  const drawn = options['engine.kind'] !== 'simulated';
  for (const engine of engines) {
    const problem = samplingProblem(engine, bound, drawn);
    if (problem !== null) problems.push(problem);
  }
  const worst = engines.reduce((a, b) => (b.mean <= a.mean ? a : b)); // NaN is the worst
  return {
    scored: `mean |dlogp| ${mean.toExponential(1)}, max ${max.toExponential(1)}, allowed ${bound} (${dtype})`,
    sampled: `mean |dlogp| ${worst.mean.toExponential(1)}, max ${worst.max.toExponential(1)} of ${worst.tokens} tokens`,
    problems,
  };
}
