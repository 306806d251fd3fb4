/**
 * An engine as the tests see it: every token with its logprob and version, every ending, and the requests by short names.
 * What breaks the order of the wire (tokens after an end, counts that do not add up) throws in the handler, so the run fails.
 */
import type { Peer } from '../molt/bus.ts';
import type { Fields, Frames } from '../molt/protocol.ts';
import { RemoteError } from '../molt/protocol.ts';
import { flatRows } from '../molt/trainer.ts';
import { invariant, type Sampling } from '../molt/types.ts';
import type { TensorTable } from './contract.ts';

const WAIT_MS = 30_000;
/** Temperature 1, nothing filtered, no stop. */
export const PLAIN: Sampling = {
  temperature: 1,
  top_p: 1,
  top_k: 0,
  max_tokens: 24,
  seed: 7,
  stop: [],
  stop_token_ids: [],
};

/** The error that a request is expected to be answered with. */
export async function refused(work: Promise<unknown>): Promise<RemoteError> {
  const error = await work.then(
    () => null,
    (cause: unknown) => cause,
  );
  invariant(error instanceof RemoteError, `expected a RemoteError, got ${String(error)}`);
  return error;
}

/** One request as its caller sees it. */
export interface Turn {
  handle: number;
  prompt: Int32Array;
  readonly ids: number[];
  readonly logprobs: number[];
  readonly versions: number[];
  readonly counts: number[]; // ids per event
  text: string;
  ended: Fields<'tokens'>['ended'][number] | null;
}

/** Records all that an engine says, in order. */
export class EngineClient {
  readonly peer: Peer;
  readonly turns = new Map<number, Turn>();
  events = 0;
  #watchers = new Set<() => void>();

  constructor(peer: Peer) {
    this.peer = peer;
    peer.on('tokens', (fields, frames) => this.#onTokens(fields, frames));
    void peer.lost.then(() => this.#notify());
  }

  #turn(handle: number): Turn {
    const turn = this.turns.get(handle) ?? {
      handle,
      prompt: new Int32Array(),
      ids: [],
      logprobs: [],
      versions: [],
      counts: [],
      text: '',
      ended: null,
    };
    this.turns.set(handle, turn);
    return turn;
  }

  #onTokens(fields: Fields<'tokens'>, frames: Frames<'tokens'>): void {
    this.events += 1;
    let at = 0;
    for (const [i, handle] of frames.handles.entries()) {
      const turn = this.#turn(handle);
      invariant(turn.ended === null, `tokens of ${handle} after its end`);
      for (const end = at + (frames.counts[i] as number); at < end; at++) {
        turn.ids.push(frames.ids[at] as number);
        turn.logprobs.push(frames.logprobs[at] as number);
        turn.versions.push(fields.version);
      }
      turn.counts.push(frames.counts[i] as number);
      turn.text += fields.texts[i] ?? '';
    }
    invariant(at === frames.ids.length, `counts add up to ${at} of ${frames.ids.length} ids`);
    for (const ended of fields.ended) {
      const turn = this.#turn(ended.handle);
      invariant(turn.ended === null, `${ended.handle} ended twice`);
      turn.ended = ended;
    }
    this.#notify();
  }

  #notify(): void {
    for (const watcher of this.#watchers) watcher();
  }

  /** Resolves when the condition holds; asked after every event. */
  async until(condition: () => boolean): Promise<void> {
    await new Promise<void>((resolve, reject) => {
      const watcher = (): void => {
        if (!condition() && !this.peer.isLost) return;
        this.#watchers.delete(watcher);
        if (condition()) resolve();
        else reject(new Error('engine lost'));
      };
      this.#watchers.add(watcher);
      watcher();
    });
  }

  async start(
    prompt: ArrayLike<number>,
    sampling: Partial<Sampling> = {},
    more: Partial<Fields<'generate'>> = {},
  ): Promise<Turn> {
    const { fields } = await this.peer.request(
      'generate',
      {
        rollout_id: 'r',
        attempt: 0,
        turn: 0,
        session_id: `s${this.turns.size}`,
        already: 0,
        want_text: false,
        heads: 0,
        want_routes: false,
        ...more,
        sampling: { ...PLAIN, ...sampling },
      },
      { prompt: Int32Array.from(prompt) },
      { deadlineMs: WAIT_MS },
    );
    const turn = this.#turn(fields.handle);
    turn.prompt = Int32Array.from(prompt);
    return turn;
  }

  async generate(
    prompt: ArrayLike<number>,
    sampling: Partial<Sampling> = {},
    more: Partial<Fields<'generate'>> = {},
  ): Promise<Turn> {
    const turn = await this.start(prompt, sampling, more);
    await this.until(() => turn.ended !== null);
    return turn;
  }

  async abort(turns: readonly Turn[]): Promise<void> {
    await this.peer.request('abort', { handles: turns.map((t) => t.handle) });
    await this.until(() => turns.every((t) => t.ended !== null));
  }

  async score(rows: readonly Int32Array[]): Promise<Float32Array> {
    return (await this.peer.request('score', {}, flatRows(rows))).frames.logprobs;
  }

  /** Temperature-1 logprobs of a turn's sampled ids under the engine's weights of now. */
  async scoreTurn(turn: Turn): Promise<Float32Array> {
    return (await this.score([Int32Array.from([...turn.prompt, ...turn.ids])])).subarray(turn.prompt.length);
  }

  pause(epoch: number, mode: string, clear_cache = true) {
    return this.peer.request('pause', { epoch, mode, clear_cache }, undefined, { deadlineMs: WAIT_MS });
  }

  resume(epoch: number) {
    return this.peer.request('resume', { epoch });
  }

  stage(version: number, path: string, tensors: TensorTable) {
    return this.peer.request('stage_weights', { version, source: { transport: 'file', path }, tensors });
  }

  load(version: number, path: string, tensors: TensorTable, more: Partial<Fields<'load_weights'>> = {}) {
    return this.peer.request('load_weights', {
      version,
      source: { transport: 'file', path },
      tensors,
      last: true,
      ...more,
    });
  }
}
