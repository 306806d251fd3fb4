/**
 * One broadcast of weights: trainer rank 0 to every rank of the engines of a refit.
 *
 *   engines pause, each for itself -> all stand still -> the trainer sends, all receive -> each goes on by itself
 *
 * Invariants
 *   1. The group is made of the engines that stand still when none is missing any more: one that is lost before does not
 *      hold the others up, one that comes later has no part in it.
 *   2. From then on all depend on each: when one is lost, or the trainer fails, the others have weights that are half new.
 *      `orBroken` then rejects for all that have not answered, and the trainer is told to let go.
 *   3. Whoever waits here is bounded by the deadline of the engines' own requests: one that does not come is reported by
 *      `leave`.
 * Called by refit.ts. Talks to trainer ranks (push_weights); the bytes pass workers/transport.py, which says what an
 * address is. Does not kill anybody. Elsewhere called weight sync group, update group.
 */
import { orFailure } from './failure.ts';
import type { Engine } from './generator.ts';
import { RemoteError } from './protocol.ts';
import type { Trainer } from './trainer.ts';

interface Waiting {
  readonly resolve: (address: string) => void;
  readonly reject: (error: Error) => void;
}

export class Broadcast {
  readonly #trainer: Trainer;
  readonly #version: number;
  readonly #name: string;
  readonly #bucketBytes: number;
  readonly #deadline: number;
  readonly #missing: Set<Engine>; // neither standing still nor lost
  readonly #ready = new Map<Engine, Waiting>(); // stand still; in the order of ranks
  readonly #stop = new AbortController();
  #break: (error: Error) => void = () => {};
  readonly #orBroken: <T>(work: Promise<T>) => Promise<T>;
  /** The trainer is done with it, one way or the other. Never rejects. */
  ended: Promise<void> = Promise.resolve();

  /** `name`: unlike that of any other group of this trainer. `deadline`: of performance.now(). */
  constructor(args: {
    trainer: Trainer;
    version: number;
    name: string;
    engines: readonly Engine[];
    bucketBytes: number;
    deadline: number;
  }) {
    this.#trainer = args.trainer;
    this.#version = args.version;
    this.#name = args.name;
    this.#bucketBytes = args.bucketBytes;
    this.#deadline = args.deadline;
    this.#missing = new Set(args.engines);
    const broken = new Promise<never>((_, reject) => {
      this.#break = reject;
    });
    broken.catch(() => {}); // engines that have answered do not look at it
    this.#orBroken = orFailure(broken);
  }

  /** This engine stands still. Resolves with the address for its `load_weights` when all others do, or are gone. */
  enter(engine: Engine): Promise<string> {
    const address = new Promise<string>((resolve, reject) => this.#ready.set(engine, { resolve, reject }));
    this.#missing.delete(engine);
    this.#startWhenComplete();
    return address;
  }

  /** This engine is lost or will be killed. May be called twice, and for one that has no part in it. */
  leave(engine: Engine, why: Error): void {
    if (this.#missing.delete(engine)) this.#startWhenComplete();
    else if (this.#ready.has(engine))
      this.#fail(new Error(`the broadcast of weights broke: ${engine.worker.spec.id}: ${why.message}`));
  }

  /** The answer of an engine that receives, or why there will be none. */
  orBroken<T>(work: Promise<T>): Promise<T> {
    return this.#orBroken(work);
  }

  #fail(error: Error): void {
    this.#stop.abort();
    this.#break(error);
  }

  #startWhenComplete(): void {
    if (this.#missing.size > 0) return;
    for (const [engine, { reject }] of this.#ready) {
      if (!engine.peer.isLost) continue;
      this.#ready.delete(engine);
      reject(new RemoteError('lost', `${engine.worker.spec.id} was lost while it stood still`));
    }
    if (this.#ready.size > 0) this.ended = this.#start();
  }

  async #start(): Promise<void> {
    try {
      const sizes = await Promise.all([...this.#ready.keys()].map(numRanks));
      const size = sizes.reduce((a, b) => a + b, 1);
      const address = (rank: number) => this.#address(rank, size);
      const sending = this.#trainer.sendWeights(this.#version, 'nccl', address(0), this.#stop.signal);
      let rank = 1;
      for (const [i, { resolve }] of [...this.#ready.values()].entries()) {
        resolve(address(rank));
        rank += sizes[i] as number;
      }
      await sending;
    } catch (error) {
      this.#fail(error as Error);
    }
  }

  #address(rank: number, size: number): string {
    const seconds = Math.max(1, (this.#deadline - performance.now()) / 1000).toFixed(1);
    return `tcp://${this.#trainer.store}/${this.#name}?size=${size}&rank=${rank}&bucket=${this.#bucketBytes}&timeout=${seconds}`;
  }
}

/** Of one engine: tensor, pipeline and data parallel ranks all receive. */
async function numRanks(engine: Engine): Promise<number> {
  return ((await engine.peer.ready) as { ranks?: number }).ranks ?? 1;
}
