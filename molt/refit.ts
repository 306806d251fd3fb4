/**
 * Refit: make every engine serve the trainer's newest weights.
 *
 *   stage (engines still sample) -> pause -> load -> verify -> version += 1 -> resume
 *
 * Invariants
 *   1. `version` rises by exactly one per refit in which at least one engine verified the new weights, and only here.
 *   2. An engine that fails to load, whose checksums differ or whose logprobs differ from the trainer's is killed:
 *      no token is ever sampled from mixed or misplaced weights. A new process takes its place, from the same file.
 *   3. Two files take turns, so that a restarting engine always finds the current version whole.
 * Checksums prove the bytes (by the engine, every refit); `score` of two probes against the trainer's logprobs proves
 * their layout (first three refits, then every `verifyEvery`): bytes can be right and layout wrong.
 * Called by loop.ts after an optimizer step. Talks to engines and trainer ranks (protocol.ts: push_weights, pause,
 * load_weights, score, resume). Elsewhere called weight sync, update_weights, broadcast.
 */
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import type { Engine, Generator } from './generator.ts';
import type { TensorTable, Trainer } from './trainer.ts';
import { flatRows } from './trainer.ts';
import { invariant } from './types.ts';

/** Refits whose layout is always proved. */
const ALWAYS_VERIFIED = 3;
/** Most that an engine may take to pause, load and resume together. */
const ENGINE_DEADLINE_MS = 600_000;

export interface RefitTimes {
  readonly stageMs: number;
  readonly pauseMs: number; // engines stand still: pause, load, verify, resume
  readonly bytes: number;
  readonly verified: number | null; // largest |dlogp| of the probes, null when the layout was not due
}

interface Staged {
  readonly version: number;
  readonly path: string;
  readonly tensors: TensorTable;
  readonly expected: Float32Array | null; // the trainer's logprobs of the probes, where the layout is to be proved
}

export class Refit {
  readonly #generator: Generator;
  readonly #trainer: Trainer;
  readonly #dir: string;
  readonly #verifyEvery: number;
  readonly #tolerance: number;
  #probes: readonly Int32Array[] = [];
  #staged: Staged | null = null; // null = engines have what they loaded from the model directory
  #version = 0;
  #refits = 0;
  #staging: Promise<unknown> = Promise.resolve(); // the file being written, if any
  #settled: Promise<void> = Promise.resolve(); // the refit in progress, if any
  #onJoin: ((verified: boolean) => void) | null = null; // a refit without a live engine waits for a new one

  /** `tolerance`: largest |dlogp| between an engine and the trainer, 1e-4 in fp32, 0.5 in bf16. */
  constructor(args: {
    generator: Generator;
    trainer: Trainer;
    runDir: string;
    verifyEvery: number;
    tolerance: number;
  }) {
    this.#generator = args.generator;
    this.#trainer = args.trainer;
    this.#dir = join(args.runDir, 'weights');
    this.#verifyEvery = args.verifyEvery;
    this.#tolerance = args.tolerance;
    mkdirSync(this.#dir, { recursive: true });
  }

  get version(): number {
    return this.#version;
  }

  /** Rows whose logprobs engine and trainer must agree on. Set once, before the first refit. */
  set probes(rows: readonly Int32Array[]) {
    this.#probes = rows;
  }

  /** Start-up parity: mean and maximum of |dlogp| over the probes, between every engine and the trainer. */
  async parity(): Promise<{ mean: number; max: number }> {
    const expected = await this.#trainer.logprobs(this.#probes, 1);
    let sum = 0;
    let max = 0;
    const engines = this.#generator.engines;
    for (const engine of engines) {
      const { frames } = await engine.peer.request('score', {}, flatRows(this.#probes));
      for (const [k, value] of frames.logprobs.entries()) {
        const gap = Math.abs(value - (expected[k] as number));
        sum += gap;
        max = Number.isNaN(gap) ? Number.NaN : Math.max(max, gap);
      }
    }
    return { mean: sum / (expected.length * engines.length), max };
  }

  /** After a resume: give engines the restored weights, under the version that they had. */
  async resumeAt(version: number): Promise<RefitTimes> {
    this.#version = version - 1;
    return this.push();
  }

  /** One refit. Rejects when the trainer fails or when no engine can take the weights. */
  async push(): Promise<RefitTimes> {
    let settle = () => {};
    this.#settled = new Promise((resolve) => {
      settle = resolve;
    });
    try {
      return await this.#push();
    } finally {
      settle();
    }
  }

  async #push(): Promise<RefitTimes> {
    const version = this.#version + 1;
    const started = performance.now();
    const staged = await this.#stage(version);
    const stagedAt = performance.now();
    const engines = this.#generator.engines;
    const results = await Promise.all(engines.map((engine) => this.#swap(engine, staged)));
    if (!results.some((result) => result.ok)) await this.#verifiedByNewEngine(version);
    this.#version = version;
    this.#refits++;
    await Promise.all(results.map((result) => (result.ok ? this.#resume(result.engine, version) : null)));
    const gaps = results.flatMap((result) => (result.ok && result.gap !== null ? [result.gap] : []));
    return {
      stageMs: stagedAt - started,
      pauseMs: performance.now() - stagedAt,
      bytes: staged.tensors.reduce((n, tensor) => n + tensor.bytes, 0),
      verified: gaps.length > 0 ? Math.max(...gaps) : null,
    };
  }

  /** Bring a new engine to the current version; generator.ts routes to it afterwards. Rejects when it fails. */
  async join(engine: Engine): Promise<void> {
    for (;;) {
      await this.#staging;
      const staged = this.#staged;
      if (staged) {
        const { ok } = await this.#swap(engine, staged);
        this.#onJoin?.(ok);
        if (!ok) throw new Error(`Engine ${engine.worker.spec.id} could not take version ${staged.version}`);
      }
      await this.#settled; // it must not sample a version that the refit under way has not declared
      if (this.#staged !== staged) continue;
      if (staged) await this.#resume(engine, staged.version);
      return;
    }
  }

  /** Every engine refused the weights. Write them again until a new process verifies them or none may be started. */
  async #verifiedByNewEngine(version: number): Promise<void> {
    for (;;) {
      const outcome = new Promise<boolean>((resolve) => {
        this.#onJoin = resolve;
      });
      await this.#stage(version);
      const verified = await Promise.race([outcome, this.#generator.failed]);
      if (verified) {
        this.#onJoin = null;
        return;
      }
    }
  }

  /** From here on `version` is what a joining engine gets. */
  #stage(version: number): Promise<Staged> {
    const stage = async () => {
      const path = join(this.#dir, `segment-${version % 2}.bin`);
      const { tensors } = await this.#trainer.pushWeights(version, path);
      const due = this.#refits < ALWAYS_VERIFIED || version % this.#verifyEvery === 0;
      const expected = due ? await this.#trainer.logprobs(this.#probes, 1) : null;
      this.#staged = { version, path, tensors, expected };
      return this.#staged;
    };
    const staging = stage();
    this.#staging = staging.catch(() => {}); // `push` reports the failure
    return staging;
  }

  async #swap(engine: Engine, staged: Staged): Promise<{ engine: Engine; ok: boolean; gap: number | null }> {
    try {
      const gap = await this.#load(engine, staged);
      return { engine, ok: true, gap };
    } catch (error) {
      await this.#generator.kill(engine, (error as Error).message);
      return { engine, ok: false, gap: null };
    }
  }

  /** Pause, load, verify. Returns the largest gap of the probes, null when the layout is not due. */
  async #load(engine: Engine, staged: Staged): Promise<number | null> {
    const deadline = { deadlineMs: ENGINE_DEADLINE_MS };
    const pause = { epoch: staged.version, mode: 'keep', clear_cache: true };
    this.#generator.paused(engine, (await engine.peer.request('pause', pause, undefined, deadline)).frames);
    const { fields } = await engine.peer.request(
      'load_weights',
      {
        version: staged.version,
        source: { transport: 'file', path: staged.path },
        tensors: staged.tensors,
        last: true,
      },
      undefined,
      deadline,
    );
    invariant(fields.loaded > 0, `engine ${engine.worker.spec.id} loaded no tensor`);
    const { expected } = staged;
    if (!expected) return null;
    const score = await engine.peer.request('score', {}, flatRows(this.#probes), deadline);
    invariant(
      score.fields.version === staged.version,
      `scored by version ${score.fields.version}, expected ${staged.version}`,
    );
    let max = 0;
    for (const [k, value] of score.frames.logprobs.entries())
      max = Math.max(max, Math.abs(value - (expected[k] as number)));
    if (!(max <= this.#tolerance)) {
      throw new Error(
        `Cannot refit ${engine.worker.spec.id} to version ${staged.version}: its logprobs differ from the trainer's by ${max.toExponential(1)}, at most ${this.#tolerance} is allowed`,
      );
    }
    return max;
  }

  async #resume(engine: Engine, version: number): Promise<void> {
    this.#generator.resumed(engine);
    // A lost engine is generator.ts's business.
    await engine.peer.request('resume', { epoch: version }).catch((error: Error) => {
      if (!engine.peer.isLost) throw error;
    });
  }
}
