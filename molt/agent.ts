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
 * touches no other; isolation.ts sees to what cannot be caught here. Everything of the environment, getters of what it
 * returns included, is touched inside `userCode`, and only copies leave it. It is not a sandbox: code of the environment
 * runs in the runner's process.
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
  readonly signal: AbortSignal; // aborted when the rollout ends before its environment: at a deadline, or cancelled
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
    await closed(probe as Env, { turn: async () => {}, inside: (code) => code() });
  } catch (error) {
    throw new Error(`Agent ${path}: close() of an Env that was never used throws: ${whatWasThrown(error)}`, {
      cause: error,
    });
  }
  return make;
}

// ---- How it is run ----

/** Where code of the environment runs (isolation.ts). */
export interface Host {
  /** Resolves when it is this rollout's turn on the event loop. */
  turn(): Promise<void>;
  /** Run code in the context of this rollout. Throws what it throws. */
  inside<T>(code: () => T): T;
  /** What the environment's code does from here on changes nothing. */
  over(): void;
}

/** Everything a rollout needs from outside; runner.ts wires it to the controller. */
export interface Services extends Host {
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
  readonly #detail: string | null;
  constructor(reason: EndReason, detail: string | null) {
    super(detail ?? reason);
    this.reason = reason;
    this.#detail = detail;
  }
  get detail(): string | null {
    return this.#detail;
  }
  /** As instanceof, but it runs no code of what it looks at, which may be a Proxy. */
  static is(error: unknown): error is Ended {
    return typeof error === 'object' && error !== null && #detail in error;
  }
}

const CLOSE_MS = 5_000;
/** Last ids of a turn that decide how its markup is closed. */
const TAIL = 8;

interface State {
  reward: number | null;
  score: number | null;
  truncated: boolean;
  info: Record<string, number>;
}

/**
 * Run one rollout. What the environment, the deadline or an engine does wrong is in the outcome; it throws only on
 * a breach inside molt. `signal` ends it from outside; its reason is an Ended.
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
  const state: State = { reward: null, score: null, truncated: false, info: {} };
  const deadline = new AbortController();
  const timer = setTimeout(() => {
    deadline.abort(new Ended('deadline', `no end within ${limits.deadlineMs} ms`));
  }, limits.deadlineMs);
  const stop = AbortSignal.any([signal, deadline.signal]);
  let env: Env | null = null;
  let reason: EndReason;
  let detail: string | null = null;
  try {
    // Wrapped, since a promise would take an Env that has a `then` for another promise.
    const made = await userCode(services, () => ({ env: make() }), stop);
    env = made.env;
    reason = await turnLoop(env, task, sampling, limits, services, stop, session, state);
  } catch (error) {
    const why: unknown = stop.aborted ? stop.reason : error;
    if (!Ended.is(why)) throw error; // ours, not the environment's
    reason = why.reason;
    detail = why.detail;
    state.reward = null; // nobody judged the whole rollout
    state.score = null;
  }
  clearTimeout(timer);
  services.over();
  try {
    if (env) await closed(env, services);
  } catch (error) {
    state.info.close_failed = 1;
    detail ??= `close() failed: ${services.inside(() => describe(error))}`;
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
  state: State,
): Promise<EndReason> {
  const shown = abortedInside(stop, services);
  const { first, tools } = await userCode(
    services,
    () => env.reset(task),
    stop,
    (value) => ({ first: readMessages(value, 'reset'), tools: task.tools ?? readTools(env) }),
  );
  let context = await services.render(first, tools);
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
    const stub: Message = {
      role: 'assistant',
      content: parsed.content,
      ...(parsed.toolCalls.length > 0 && { tool_calls: parsed.toolCalls }),
    };
    const isLast = turn + 1 >= limits.maxTurns;
    const result = await userCode(
      services,
      () =>
        env.step({
          text: parsed.text,
          content: parsed.content,
          reasoning: parsed.reasoning,
          toolCalls: structuredClone(parsed.toolCalls), // what is trained is not the environment's to change
          parseError: parsed.error,
          ids: answer.ids.slice(),
          reason: answer.reason === 'length' ? 'length' : 'stop',
          turn,
          signal: shown,
        }),
      stop,
      (value) => readResult(value, isLast),
    );
    absorb(result, state);
    state.truncated ||= answer.reason === 'length';
    if (result.done) return answer.reason === 'length' ? 'length' : 'done';
    if (isLast) {
      state.truncated = true;
      return 'turns';
    }
    context = await services.suffix(stub, result.observation, tools, Array.from(answer.ids.subarray(-TAIL)));
  }
}

/** Fold a step's result into the rollout. */
function absorb(result: Read, state: State): void {
  state.reward = (state.reward ?? 0) + result.reward;
  if (!Number.isFinite(state.reward))
    throw new Ended('invalid_reward', `rewards add up to ${state.reward}, expected a finite number`);
  state.score = result.score ?? state.reward;
  state.truncated ||= result.truncated;
  Object.assign(state.info, result.info);
}

// ---- What an environment gave, read once and copied ----

interface Read {
  readonly reward: number;
  readonly done: boolean;
  readonly observation: readonly Message[]; // none where no turn follows
  readonly truncated: boolean;
  readonly score: number | undefined;
  readonly info: Readonly<Record<string, number>>;
}

/** Throws Ended on values no trainer can use, and what getters of the environment throw. */
function readResult(value: unknown, isLast: boolean): Read {
  if (typeof value !== 'object' || value === null)
    throw new Ended('agent_error', `step() returned ${describe(value)}, expected { reward, done, observation? }`);
  const { reward, done, observation, truncated, score, info } = value as { readonly [key: string]: unknown };
  if (typeof reward !== 'number' || !Number.isFinite(reward))
    throw new Ended('invalid_reward', `step() returned reward ${describe(reward)}, expected a finite number`);
  if (typeof done !== 'boolean')
    throw new Ended('agent_error', `step() returned done ${describe(done)}, expected true or false`);
  if (score !== undefined && (typeof score !== 'number' || !Number.isFinite(score)))
    throw new Ended('invalid_reward', `step() returned score ${describe(score)}, expected a finite number`);
  if (!done && !isLast && observation === undefined)
    throw new Ended('agent_error', 'step() gave no observation with done false: it is what the model sees next');
  const numbers: Record<string, number> = {};
  for (const [key, number] of Object.entries(info ?? {})) {
    if (typeof number !== 'number' || !Number.isFinite(number))
      throw new Ended('agent_error', `step() returned info.${key} ${describe(number)}, expected a finite number`);
    numbers[key] = number;
  }
  return {
    reward,
    done,
    observation: done || isLast ? [] : readMessages(observation, 'step'),
    truncated: truncated === true,
    score,
    info: numbers,
  };
}

function readMessages(value: unknown, from: string): readonly Message[] {
  if (typeof value === 'string') return [{ role: 'user', content: value }];
  const copy = Array.isArray(value) ? plain(value) : null;
  const isMessage = (m: Json) => typeof (m as { readonly role?: Json } | null)?.role === 'string';
  if (Array.isArray(copy) && copy.length > 0 && copy.every(isMessage)) return copy as readonly Message[];
  throw new Ended('agent_error', `${from}() gave ${describe(value)}, expected text or a list of messages with roles`);
}

function readTools(env: Env): readonly Json[] | null {
  const { tools } = env;
  if (tools === undefined || tools === null) return null;
  if (Array.isArray(tools)) return plain(tools) as readonly Json[];
  throw new Ended('agent_error', `tools is ${describe(tools)}, expected a list of JSON schemas`);
}

/** What JSON cannot carry (undefined, functions) is left out, as JSON does. */
function plain(value: unknown): Json {
  return JSON.parse(JSON.stringify(value)) as Json;
}

// ---- Calling the environment ----

/** close() gets CLOSE_MS: it must not hold a rollout that has ended. */
async function closed(env: Env, host: Pick<Host, 'turn' | 'inside'>): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`no end within ${CLOSE_MS} ms`)), CLOSE_MS);
  });
  try {
    await host.turn();
    await Promise.race([host.inside(() => called(() => env.close?.())), late]);
  } finally {
    clearTimeout(timer);
  }
}

/**
 * Await the environment, but not beyond the end of the rollout: code that never settles must not hold it. Throws only Ended.
 * `read` takes what it gave apart, in its context too, since that may run code of it.
 */
async function userCode<T, R = T>(
  host: Host,
  code: () => T | Promise<T>,
  stop: AbortSignal,
  read: (value: T) => R = (value) => value as unknown as R,
): Promise<R> {
  await host.turn();
  stop.throwIfAborted();
  let onAbort = () => {};
  const aborted = new Promise<never>((_, reject) => {
    onAbort = () => reject(stop.reason);
    stop.addEventListener('abort', onAbort, { once: true });
  });
  const failed = (error: unknown): never => {
    throw Ended.is(error) ? error : new Ended('agent_error', whatItThrew(error));
  };
  try {
    // Where its code ends the rollout and goes on, the end comes first.
    return await Promise.race([host.inside(() => called(code).then(read).catch(failed)), aborted]);
  } finally {
    stop.removeEventListener('abort', onAbort);
  }
}

/** What it throws at once is a rejection as any other. */
function called<T>(code: () => T | Promise<T>): Promise<T> {
  return new Promise((resolve) => resolve(code()));
}

/** A signal that follows `stop`, whose listeners are the environment's and run in its context. */
function abortedInside(stop: AbortSignal, host: Host): AbortSignal {
  const shown = new AbortController();
  stop.addEventListener('abort', () => host.inside(() => shown.abort(stop.reason)), { once: true });
  return shown.signal;
}

/** Seeds of a rollout's turns differ, and stay within 2^53 (multiply-add modulo a prime below it). */
export function turnSeed(seed: number, turn: number): number {
  return Number((BigInt(seed) * 6364136223846793n + BigInt(turn + 1) * 1442695040888963n) % 9007199254740881n);
}

const SHOWN = 200; // characters of a value
const STACK = 4_000; // characters of an error

/** Never throws, whatever the value is. */
export function describe(value: unknown): string {
  try {
    if (value instanceof Error)
      return `${value.stack ?? value.message}`.split('\n').slice(0, 6).join('\n').slice(0, STACK);
    if (typeof value === 'number' || typeof value === 'bigint') return String(value);
    if (typeof value === 'function') return 'a function';
    return JSON.stringify(value)?.slice(0, SHOWN) ?? String(value);
  } catch {
    return `a value of type ${typeof value} that cannot be shown`;
  }
}

/** As `describe`; what is no error is said to be none. */
function whatItThrew(error: unknown): string {
  const text = describe(error);
  return typeof error === 'object' && error !== null ? text : `threw ${text}, which is no error`;
}
