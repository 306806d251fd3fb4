/**
 * The tokenizer process: its requests are pure, so one that dies is started again and asked again.
 *
 * Invariants
 *   1. A request is answered by some process or rejects with the worker's own error; a death under way is not seen.
 *   2. After `maxRestarts` deaths the run ends with the cause: a request that kills whoever reads it would go on for ever.
 * Called by dispatch.ts (for runners) and loop.ts. Talks to workers/tokenizer.py (protocol.ts: render, suffix, encode, decode,
 * parse). The only client of it in this process.
 */
import type { Answer } from './bus.ts';
import { type Launcher, lastWords, type Worker, type WorkerSpec, wasKilled } from './launch.ts';
import { type Fields, type Frames, RemoteError } from './protocol.ts';

/** A request that takes longer is a tokenizer that hangs: it is killed, and the request asked again. */
const DEADLINE_MS = 120_000;

type Kind = 'render' | 'suffix' | 'encode' | 'decode' | 'parse';

/** What it says of the chat template when it is ready. */
export interface TemplateFacts {
  readonly stop_token_ids: readonly number[];
  readonly suffix_exact: boolean;
  readonly suffix_note: string;
}

export class Tokenizer {
  readonly #launcher: Launcher;
  readonly #spec: () => WorkerSpec;
  readonly #maxRestarts: number;
  readonly #event: (name: string, detail: Record<string, string | number>) => void;
  #worker: Worker;
  #closed = false;
  #reject: (error: Error) => void = () => {};
  restarts = 0;
  answers = 0; // so far
  /** Rejects when it may not be started again. Never resolves. */
  readonly failed: Promise<never>;

  constructor(args: {
    launcher: Launcher;
    spec: () => WorkerSpec;
    maxRestarts: number;
    event: (name: string, detail: Record<string, string | number>) => void;
  }) {
    this.#launcher = args.launcher;
    this.#spec = args.spec;
    this.#maxRestarts = args.maxRestarts;
    this.#event = args.event;
    this.failed = new Promise((_, reject) => {
      this.#reject = reject;
    });
    this.failed.catch(() => {}); // a run that ends for another reason never looks at it
    this.#worker = this.#start();
  }

  /** Rejects only as `failed` does. */
  get ready(): Promise<TemplateFacts> {
    return this.#ready();
  }

  async #ready(): Promise<TemplateFacts> {
    for (;;) {
      const worker = this.#worker;
      try {
        return (await worker.peer.ready) as unknown as TemplateFacts;
      } catch {
        await worker.peer.lost; // #onLost comes first: another one is in its place, or none may be
        if (worker === this.#worker) return this.failed;
      }
    }
  }

  async request<K extends Kind>(kind: K, fields: Fields<K>, frames?: Frames<K>): Promise<Answer<K>> {
    for (;;) {
      const worker = this.#worker;
      if (!worker.peer.isReady) await this.ready; // one that has taken a dead one's place
      if (worker !== this.#worker) continue;
      try {
        const answer = await worker.peer.request(kind, fields, frames, { deadlineMs: DEADLINE_MS });
        this.answers++;
        return answer;
      } catch (error) {
        const type = error instanceof RemoteError ? error.type : null;
        if (this.#closed || (type !== 'lost' && type !== 'fatal' && type !== 'deadline')) throw error;
        if (type === 'deadline') await this.#launcher.kill(worker);
        await worker.peer.lost; // #onLost has put another one in its place
        await this.ready;
      }
    }
  }

  close(): void {
    this.#closed = true;
  }

  #start(): Worker {
    const worker = this.#launcher.start(this.#spec());
    worker.peer.ready.catch(() => {}); // its loss tells
    void worker.peer.lost.then((reason) => this.#onLost(worker, reason)); // lost never rejects
    return worker;
  }

  #onLost(worker: Worker, reason: Error): void {
    if (this.#closed) return;
    if ((!worker.peer.isReady && !wasKilled(reason)) || this.restarts >= this.#maxRestarts) {
      const after = this.restarts > 0 ? ` after ${this.restarts} restarts` : '';
      return this.#reject(new Error(`The tokenizer is gone${after}: ${reason.message}\n${lastWords(worker)}`));
    }
    this.restarts++;
    this.#event('tokenizer_restart', { restart: this.restarts, reason: reason.message });
    this.#worker = this.#start();
  }
}
