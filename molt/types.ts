/**
 * The nouns of molt, each with the arrays it is made of.
 *
 * One prompt gives a group of N rollouts; a rollout gives one or more trajectories; a trajectory is a list of
 * token columns of equal length. Position k of every column belongs to token k. The first token of a row has no
 * logprob and is never trained.
 *
 * Worked example: prompt `47*86=?` (3 tokens here), the policy calls a tool (2 tokens), the tool answers
 * (2 tokens, appended by the environment), the policy replies (2 tokens). Nothing was refitted meanwhile.
 *
 *   k          0     1     2    | 3     4    | 5     6    | 7     8
 *   ids        11    12    13   | 90    2    | 50    51   | 91    2
 *   lossMask   0     0     0    | 1     1    | 0     0    | 1     1
 *   logprobs   0     0     0    | -.3   -.1  | 0     0    | -.2   -.1
 *   versions   -1    -1    -1   | 4     4    | -1    -1   | 4     4
 *   turns      0     0     0    | 0     0    | 1     1    | 1     1
 *   spans      {context 0..3} {policy v4 turn 0 3..5} {context 5..7} {policy v4 turn 1 7..9}
 *
 * Elsewhere called: rollout = episode; trajectory = segment, step sample; lossMask = action mask.
 */

/** Anything msgpack and JSON both carry. Numbers are finite. */
export type Json = null | boolean | number | string | readonly Json[] | { readonly [key: string]: Json };

/** A chat message as the model's template reads it. */
export interface Message {
  readonly role: string;
  readonly content?: string | null;
  readonly tool_calls?: readonly ToolCall[];
  readonly [key: string]: Json | undefined | readonly ToolCall[];
}

/** A call the policy made. `arguments` is the text it wrote, never parsed and printed again (1.0 must stay 1.0). */
export interface ToolCall {
  readonly name: string;
  readonly arguments: string;
}

/** How tokens are drawn. Training turns use temperature alone (invariant 5); evaluation may use all. */
export interface Sampling {
  readonly temperature: number; // 0 = greedy
  readonly top_p: number; // 1 = off
  readonly top_k: number; // 0 = off
  readonly max_tokens: number; // new tokens of this turn
  readonly seed: number;
  readonly stop: readonly string[];
  readonly stop_token_ids: readonly number[];
}

/** Tokens [from, to) of one source and, when the policy sampled them, of one policy version and one turn. */
export interface Span {
  readonly source: 'context' | 'policy';
  readonly version: number; // -1 for context
  readonly turn: number;
  readonly from: number;
  readonly to: number;
}

/** One token-exact sequence of a rollout. All columns have the same length. */
export interface Trajectory {
  readonly ids: Int32Array;
  readonly lossMask: Uint8Array; // 1 = the policy sampled this token and it is trained here
  readonly logprobs: Float32Array; // under the distribution the token was drawn from; 0 where lossMask is 0
  readonly versions: Int32Array; // policy version that sampled the token; -1 = context
  readonly turns: Int32Array;
  readonly spans: readonly Span[];
}

/** Why a rollout ended. One enum for agents, engines, runners and the loop. */
export const END_REASONS = [
  'done', // the environment said so
  'length', // the last turn hit its token limit and the environment ended there
  'turns', // turn limit
  'context', // no room for another turn
  'deadline',
  'agent_error',
  'agent_blocked',
  'invalid_reward',
  'engine_lost',
  'runner_lost',
  'cancelled',
] as const;
export type EndReason = (typeof END_REASONS)[number];

/** A rollout with one of these was judged by its environment, so it may be trained. */
export const SCORED_REASONS: ReadonlySet<EndReason> = new Set(['done', 'length', 'turns', 'context']);

/** Why something that was dispatched is not trained. */
export type DropReason =
  | EndReason
  | 'stale'
  | 'filtered'
  | 'incomplete_group'
  | 'other_distribution'
  | 'invalid_trajectory';

/**
 * What an engine was asked and what it gave, as the controller saw it: from this the audit proves that a trajectory holds
 * exactly these tokens. CRC32 over little-endian bytes.
 */
export interface Proof {
  readonly turn: number;
  readonly engine: string; // that sampled the last of it
  readonly seed: number;
  readonly temperature: number;
  readonly plain: boolean; // no top_p, no top_k: softmax(logits / temperature) and nothing else
  readonly maxTokens: number;
  readonly prompt: { readonly tokens: number; readonly crc: number }; // i32 ids
  readonly sampled: { readonly tokens: number; readonly crc: number }; // i32 ids, f32 logprobs, i32 versions
}

/** One attempt of the agent at one prompt, ended. */
export interface Rollout {
  readonly rolloutId: string;
  readonly groupId: string;
  readonly index: number; // member of the group, 0..groupSize-1
  readonly attempt: number;
  readonly reason: EndReason;
  readonly detail: string | null; // the error text, for reasons that have one
  readonly reward: number | null; // null when no environment judged it
  readonly score: number | null; // what evaluation reports; the reward unless the environment gave another number
  readonly truncated: boolean;
  readonly info: Readonly<Record<string, number>>;
  readonly turns: number;
  readonly trajectories: readonly Trajectory[];
  readonly proofs: readonly Proof[]; // one for each turn of this attempt
  readonly dispatchedVersion: number;
}

/** One prompt as the data source gave it. */
export interface Prompt {
  readonly source: string; // file or generator it came from
  readonly epoch: number;
  readonly index: number; // position in the source, before shuffling
  readonly input: Json; // text or chat messages
  readonly label: Json;
  readonly tools: readonly Json[] | null; // JSON schemas offered to the template
}

/** The N rollouts of one prompt. */
export interface Group {
  readonly groupId: string;
  readonly prompt: Prompt;
  readonly rollouts: readonly Rollout[];
}

/** A trajectory with its credit, ready to train. */
export interface Sample {
  readonly trajectory: Trajectory;
  readonly rolloutId: string;
  readonly groupId: string;
  readonly advantages: Float32Array; // per token, 0 where lossMask is 0
}

/** Internal breach: not for bad input, which gets an error that names the option or field. */
export function invariant(condition: unknown, message: string): asserts condition {
  if (!condition) throw new Error(`Invariant broken: ${message}`);
}

export function assertNever(value: never): never {
  throw new Error(`Unexpected value: ${JSON.stringify(value)}`);
}
