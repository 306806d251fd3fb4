/**
 * What a user writes, and how it is run.
 *
 *   Env: molt owns the turn loop.   reset -> [ sample a turn -> step ] until done -> close
 *
 * An agent module exports `agent`: a class without constructor arguments or a factory function. Every rollout
 * gets a fresh one. The environment works with text and messages; tokens stay in session.ts, exactly as sampled:
 * only what the environment adds is rendered, as a suffix of what is already there.
 *
 * An environment that throws, returns nonsense or overruns its deadline ends its own rollout with a reason and
 * touches no other. It is not a sandbox: code of the environment runs in the runner's process.
 * Called by runner.ts, one call of `runEnv` per rollout. Elsewhere called: environment, verifier, reward function.
 */
import { importModule, whatWasThrown } from './modules.ts';
import type { SampledTurn, TurnNode } from './session.ts';
import { Session } from './session.ts';
import type { EndReason, Json, Message, Sampling, ToolCall, Trajectory } from './types.ts';

// ---- What a user writes ----

/** The prompt of a rollout, as the data source gave it. */
export interface Task {
  readonly input: Json;
  readonly label: Json;
  readonly tools: readonly Json[] | null;
  readonly seed: number; // differs between rollouts, the same again in a rerun
  readonly rolloutId: string;
  readonly index: number; // member of the group
}

/** One sampled turn. */
export interface Turn {
  readonly text: string; // as decoded, special tokens kept, without the final stop token
  readonly content: string; // without reasoning and tool-call markup
  readonly reasoning: string | null;
  readonly toolCalls: readonly ToolCall[];
  readonly parseError: string | null; // markup that looked like a tool call but was none
  readonly ids: Int32Array;
  readonly reason: 'stop' | 'length';
  readonly turn: number;
  readonly signal: AbortSignal; // aborted at the deadline
}

/** What the environment thinks of a turn. Rewards of a rollout's turns add up. */
export interface Result {
  readonly reward: number;
  readonly done: boolean;
  readonly observation?: string | readonly Message[]; // shown before the next turn; text becomes a user message
  readonly truncated?: boolean;
  readonly score?: number; // for evaluation, where it is not the reward
  readonly info?: Readonly<Record<string, number>>;
}

export interface Env {
  /** JSON schemas of the tools offered to the model, where the prompt brings none of its own. */
  readonly tools?: readonly Json[];
  reset(task: Task): string | readonly Message[] | Promise<string | readonly Message[]>;
  step(turn: Turn): Result | Promise<Result>;
  /** Called once, whatever happened. */
  close?(): void | Promise<void>;
}

export type AgentFactory = () => Env;

/** Import the module of `train.agent_path`. Throws an error of one line that names the file and what is wrong with it. */
export async function loadAgent(path: string): Promise<AgentFactory> {
  let module: Readonly<Record<string, unknown>>;
  try {
    module = await importModule(path);
  } catch (error) {
    throw new Error(`Cannot load agent ${path}: ${(error as Error).message}`, { cause: error });
  }
  const agent = module.agent;
  if (typeof agent !== 'function') {
    throw new Error(
      agent === undefined
        ? `Agent ${path} must export \`agent\`, a class or a function that makes an Env; it exports ${Object.keys(module).join(', ') || 'nothing'}`
        : `Agent ${path}: \`agent\` is ${typeof agent === 'object' ? 'an object' : `a ${typeof agent}`}, expected a class or a function that makes an Env (of which every rollout gets one)`,
    );
  }
  const make = /^class\b/.test(Function.prototype.toString.call(agent))
    ? () => new (agent as new () => Env)()
    : (agent as AgentFactory);
  let probe: unknown;
  try {
    probe = make();
  } catch (error) {
    throw new Error(`Agent ${path}: making an Env throws: ${whatWasThrown(error)}`, { cause: error });
  }
  if (probe instanceof Promise) {
    probe.catch(() => {}); // it is not looked at any further
    throw new Error(`Agent ${path} makes a promise, expected an Env at once`);
  }
  for (const method of ['reset', 'step']) {
    if (typeof (probe as Record<string, unknown> | null)?.[method] !== 'function') {
      throw new Error(`Agent ${path} has no ${method}(): an Env needs reset(task) and step(turn)`);
    }
  }
  try {
    await closed(probe as Env);
  } catch (error) {
    throw new Error(`Agent ${path}: close() of an Env that was never used throws: ${whatWasThrown(error)}`, {
      cause: error,
    });
  }
  return make;
}

// ---- How it is run ----

/** Everything a rollout needs from outside; runner.ts wires it to the controller. */
export interface Services {
  sample(request: { turn: number; prompt: Int32Array; sampling: Sampling; signal: AbortSignal }): Promise<TurnAnswer>;
  render(messages: readonly Message[], tools: readonly Json[] | null): Promise<Int32Array>;
  suffix(
    stub: Message,
    added: readonly Message[],
    tools: readonly Json[] | null,
    lastIds: readonly number[],
  ): Promise<Int32Array>;
  parse(ids: Int32Array, tools: readonly Json[] | null): Promise<ParsedTurn>;
}
export interface TurnAnswer extends SampledTurn {
  readonly reason: 'stop' | 'length' | 'abort' | 'error';
  readonly detail: string | null;
  readonly cachedTokens: number;
}
export interface ParsedTurn {
  readonly text: string;
  readonly content: string;
  readonly reasoning: string | null;
  readonly toolCalls: readonly ToolCall[];
  readonly error: string | null;
}
export interface Limits {
  readonly maxTurns: number;
  readonly maxTokens: number; // of the trajectory, prompt included
  readonly deadlineMs: number;
}

/** A rollout as it ended; runner.ts adds the identity. */
export interface Outcome {
  readonly reason: EndReason;
  readonly detail: string | null;
  readonly reward: number | null;
  readonly score: number | null;
  readonly truncated: boolean;
  readonly info: Readonly<Record<string, number>>;
  readonly turns: number;
  readonly trajectories: readonly Trajectory[];
}

/** Ends the rollout with a reason; thrown by the pieces below and by services, caught once in `runEnv`. */
export class Ended extends Error {
  readonly reason: EndReason;
  constructor(reason: EndReason, detail: string | null) {
    super(detail ?? reason);
    this.reason = reason;
  }
}

const CLOSE_MS = 5_000;
/** Last ids of a turn that decide how its markup is closed. */
const TAIL = 8;

/**
 * Run one rollout. What the environment, the deadline or an engine does wrong is in the outcome; it throws only on
 * a breach inside molt. `signal` is the controller's cancel.
 */
export async function runEnv(
  make: AgentFactory,
  task: Task,
  sampling: Sampling,
  limits: Limits,
  services: Services,
  signal: AbortSignal,
): Promise<Outcome> {
  const session = new Session();
  const state: { reward: number | null; score: number | null; truncated: boolean; info: Record<string, number> } = {
    reward: null,
    score: null,
    truncated: false,
    info: {},
  };
  const deadline = AbortSignal.timeout(limits.deadlineMs);
  const stop = AbortSignal.any([signal, deadline]);
  let env: Env | null = null;
  let reason: EndReason;
  let detail: string | null = null;
  try {
    env = guarded(() => make());
    reason = await turnLoop(env, task, sampling, limits, services, stop, session, state);
  } catch (error) {
    if (deadline.aborted && !signal.aborted) {
      reason = 'deadline';
      detail = `no end within ${limits.deadlineMs} ms`;
    } else if (signal.aborted) {
      reason = 'cancelled';
    } else if (error instanceof Ended) {
      reason = error.reason;
      detail = error.message;
    } else {
      throw error; // ours, not the environment's
    }
    state.reward = null; // nobody judged the whole rollout
    state.score = null;
  }
  try {
    await closed(env);
  } catch (error) {
    state.info.close_failed = 1;
    detail ??= `close() failed: ${describe(error)}`;
  }
  return { reason, detail, ...state, turns: session.turns, trajectories: session.trajectories() };
}

async function turnLoop(
  env: Env,
  task: Task,
  sampling: Sampling,
  limits: Limits,
  services: Services,
  stop: AbortSignal,
  session: Session,
  state: { reward: number | null; score: number | null; truncated: boolean; info: Record<string, number> },
): Promise<EndReason> {
  const first = await userCode(() => env.reset(task), stop);
  const tools = task.tools ?? env.tools ?? null;
  let context = await services.render(asMessages(first, 'reset'), tools);
  let parent: TurnNode | null = null;
  for (let turn = 0; ; turn++) {
    const prompt = session.prompt(parent, context);
    const room = limits.maxTokens - prompt.length;
    if (room <= 0) {
      state.truncated = true;
      return 'context';
    }
    const answer = await services.sample({
      turn,
      prompt,
      sampling: { ...sampling, max_tokens: Math.min(sampling.max_tokens, room), seed: turnSeed(sampling.seed, turn) },
      signal: stop,
    });
    if (answer.reason === 'error') throw new Ended('engine_lost', answer.detail);
    if (answer.reason === 'abort') throw new Ended('cancelled', answer.detail);
    parent = session.commit(parent, context, answer);
    const parsed = await services.parse(answer.ids, tools);
    const result = await userCode(
      () =>
        env.step({
          text: parsed.text,
          content: parsed.content,
          reasoning: parsed.reasoning,
          toolCalls: parsed.toolCalls,
          parseError: parsed.error,
          ids: answer.ids,
          reason: answer.reason === 'length' ? 'length' : 'stop',
          turn,
          signal: stop,
        }),
      stop,
    );
    absorb(result, state);
    state.truncated ||= answer.reason === 'length';
    if (result.done) return answer.reason === 'length' ? 'length' : 'done';
    if (turn + 1 >= limits.maxTurns) {
      state.truncated = true;
      return 'turns';
    }
    if (result.observation === undefined)
      throw new Ended('agent_error', 'step() gave no observation with done false: it is what the model sees next');
    const added = asMessages(result.observation, 'step');
    const stub: Message = {
      role: 'assistant',
      content: parsed.content,
      ...(parsed.toolCalls.length > 0 && { tool_calls: parsed.toolCalls }),
    };
    context = await services.suffix(stub, added, tools, Array.from(answer.ids.subarray(-TAIL)));
  }
}

/** Fold a step's result into the rollout. Throws Ended on values no trainer can use. */
function absorb(
  result: Result,
  state: { reward: number | null; score: number | null; truncated: boolean; info: Record<string, number> },
): void {
  if (typeof result !== 'object' || result === null)
    throw new Ended('agent_error', `step() returned ${describe(result)}, expected { reward, done, observation? }`);
  if (typeof result.reward !== 'number' || !Number.isFinite(result.reward)) {
    throw new Ended('invalid_reward', `step() returned reward ${describe(result.reward)}, expected a finite number`);
  }
  if (typeof result.done !== 'boolean')
    throw new Ended('agent_error', `step() returned done ${describe(result.done)}, expected true or false`);
  state.reward = (state.reward ?? 0) + result.reward;
  if (result.score !== undefined && !Number.isFinite(result.score)) {
    throw new Ended('invalid_reward', `step() returned score ${describe(result.score)}, expected a finite number`);
  }
  state.score = result.score ?? state.reward;
  state.truncated ||= result.truncated === true;
  for (const [key, value] of Object.entries(result.info ?? {})) {
    if (!Number.isFinite(value))
      throw new Ended('agent_error', `step() returned info.${key} ${describe(value)}, expected a finite number`);
    state.info[key] = value;
  }
}

function asMessages(value: string | readonly Message[] | undefined, from: string): readonly Message[] {
  if (typeof value === 'string') return [{ role: 'user', content: value }];
  if (Array.isArray(value) && value.length > 0 && value.every((m) => typeof (m as Message | null)?.role === 'string'))
    return value;
  throw new Ended('agent_error', `${from}() gave ${describe(value)}, expected text or a list of messages with roles`);
}

/** close() gets CLOSE_MS: it must not hold a rollout that has ended. */
async function closed(env: Env | null): Promise<void> {
  if (!env?.close) return;
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`no end within ${CLOSE_MS} ms`)), CLOSE_MS);
  });
  try {
    await Promise.race([env.close(), late]);
  } finally {
    clearTimeout(timer);
  }
}

function guarded<T>(code: () => T): T {
  try {
    return code();
  } catch (error) {
    throw new Ended('agent_error', describe(error));
  }
}

/** Await the environment, but not beyond the deadline: code that never settles must not hold the rollout. */
async function userCode<T>(code: () => T | Promise<T>, stop: AbortSignal): Promise<T> {
  stop.throwIfAborted();
  let onAbort = () => {};
  const aborted = new Promise<never>((_, reject) => {
    onAbort = () => reject(stop.reason);
    stop.addEventListener('abort', onAbort, { once: true });
  });
  try {
    return await Promise.race([Promise.resolve(guarded(code)), aborted]);
  } catch (error) {
    if (stop.aborted || error instanceof Ended) throw error;
    throw new Ended('agent_error', describe(error));
  } finally {
    stop.removeEventListener('abort', onAbort);
  }
}

/** Seeds of a rollout's turns differ, and stay within 2^53 (multiply-add modulo a prime below it). */
export function turnSeed(seed: number, turn: number): number {
  return Number((BigInt(seed) * 6364136223846793n + BigInt(turn + 1) * 1442695040888963n) % 9007199254740881n);
}

function describe(value: unknown): string {
  if (value instanceof Error) return (value.stack ?? value.message).split('\n').slice(0, 6).join('\n');
  return JSON.stringify(value)?.slice(0, 200) ?? String(value);
}
