/**
 * The token tree of one rollout: what was prompted, what was sampled, what is trained.
 *
 *   (root) --context--> turn 0 --context--> turn 1 --context--> turn 2      one chain for an Env
 *                              \--context--> turn 1'                        a fork, for agents that own their loop
 *
 * A node is one sampled turn: the context ids put before it (the rendered prompt, or the suffix that follows its
 * parent's sampled ids) and the ids the engine sampled. Ids go in once and are never rendered again.
 *
 * Invariants
 *   1. A trajectory is the concatenation of a path's ids: nothing is re-tokenized (token identity).
 *   2. A sampled token has loss mask 1 in exactly one trajectory; in other branches it is context (trained once).
 *   3. logprobs, versions and lossMask are set on the same tokens.
 * Called by agent.ts while a rollout runs. Pure: no I/O.
 */
import type { Span, Trajectory } from './types.ts';
import { invariant } from './types.ts';

/** What an engine answered for one turn. Spans are offsets into `ids`, one per policy version. */
export interface SampledTurn {
  readonly ids: Int32Array;
  readonly logprobs: Float32Array;
  readonly spans: readonly { readonly version: number; readonly from: number; readonly to: number }[];
}

export interface TurnNode extends SampledTurn {
  readonly parent: TurnNode | null;
  readonly context: Int32Array;
  readonly turn: number; // order of sampling within the rollout
  readonly length: number; // ids from the root to the end of this node
}

export class Session {
  readonly #nodes: TurnNode[] = [];
  readonly #parents = new Set<TurnNode>();

  get turns(): number {
    return this.#nodes.length;
  }

  /** Ids to send to an engine: everything up to `parent`, then `context`. */
  prompt(parent: TurnNode | null, context: Int32Array): Int32Array {
    const ids = new Int32Array((parent?.length ?? 0) + context.length);
    ids.set(context, ids.length - context.length);
    for (let node = parent, end = ids.length - context.length; node; node = node.parent) {
      ids.set(node.ids, end - node.ids.length);
      ids.set(node.context, end - node.ids.length - node.context.length);
      end = node.length - node.ids.length - node.context.length;
    }
    return ids;
  }

  /** Record a sampled turn. Throws when the engine's arrays do not agree with each other. */
  commit(parent: TurnNode | null, context: Int32Array, sampled: SampledTurn): TurnNode {
    invariant(
      sampled.ids.length === sampled.logprobs.length,
      `${sampled.ids.length} ids but ${sampled.logprobs.length} logprobs`,
    );
    let at = 0;
    for (const span of sampled.spans) {
      invariant(span.from === at && span.to > span.from, `span ${span.from}..${span.to} does not follow ${at}`);
      at = span.to;
    }
    invariant(at === sampled.ids.length, `spans cover ${at} of ${sampled.ids.length} sampled ids`);
    const length = (parent?.length ?? 0) + context.length + sampled.ids.length;
    const node: TurnNode = { parent, context, turn: this.#nodes.length, length, ...sampled };
    this.#nodes.push(node);
    if (parent) this.#parents.add(parent);
    return node;
  }

  /** One trajectory per leaf, in order of sampling. Empty when nothing was sampled. */
  trajectories(): Trajectory[] {
    const trained = new Set<TurnNode>();
    const leaves = this.#nodes.filter((node) => !this.#parents.has(node));
    return leaves.map((leaf) => cut(leaf, trained)).filter((t) => t.lossMask.includes(1));
  }
}

/** The columns from the root to `leaf`. Nodes already in `trained` become context; the others join it. */
function cut(leaf: TurnNode, trained: Set<TurnNode>): Trajectory {
  const path: TurnNode[] = [];
  for (let node: TurnNode | null = leaf; node; node = node.parent) path.unshift(node);
  const n = leaf.length;
  const out = {
    ids: new Int32Array(n),
    lossMask: new Uint8Array(n),
    logprobs: new Float32Array(n),
    versions: new Int32Array(n).fill(-1),
    turns: new Int32Array(n),
    spans: [] as Span[],
  };
  let at = 0;
  const context = (ids: Int32Array, turn: number) => {
    if (ids.length === 0) return;
    out.ids.set(ids, at);
    out.turns.fill(turn, at, at + ids.length);
    out.spans.push({ source: 'context', version: -1, turn, from: at, to: at + ids.length });
    at += ids.length;
  };
  for (const node of path) {
    context(node.context, node.turn);
    if (trained.has(node)) {
      context(node.ids, node.turn);
      continue;
    }
    trained.add(node);
    out.ids.set(node.ids, at);
    out.logprobs.set(node.logprobs, at);
    out.lossMask.fill(1, at, at + node.ids.length);
    out.turns.fill(node.turn, at, at + node.ids.length);
    for (const { version, from, to } of node.spans) {
      out.versions.fill(version, at + from, at + to);
      out.spans.push({ source: 'policy', version, turn: node.turn, from: at + from, to: at + to });
    }
    at += node.ids.length;
  }
  return out;
}
