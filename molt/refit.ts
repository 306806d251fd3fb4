/**
 * Refit: make every engine serve the trainer's newest weights.
 *
 *   stage (trainer writes, each engine checks the bytes; all sample) -> pause -> load -> verify -> version += 1 -> resume
 *                                                                       `----------- each engine stands still -----------'
 *
 * Invariants
 *   1. `version` rises by exactly one per refit in which at least one engine verified the new weights, and only here.
 *   2. An engine that fails to load, whose checksums differ, whose logprobs differ from the trainer's or that takes
 *      longer than the deadline is killed: no token is ever sampled from mixed or misplaced weights. A new process takes
 *      its place, from the same file.
 *   3. Two files take turns, so that a restarting engine always finds the current version whole; none is written
 *      while an engine joins. That version, and not the one after it, is what a failed refit leaves to those that join.
 *   4. An engine samples a version only after it was declared, and each refit reaches every engine that has joined.
 * Engines do not wait for one another (except in a broadcast): the first that has verified the weights declares the version, and each goes on by
 * itself. Requests live on across it: what was sampled stays, with the version that sampled it, and the rest comes from the
 * new one. `cache` clear computes the keys of what is there again, by the new weights; keep goes on with the old keys,
 * which no other request may use. Checksums prove the bytes (by the engine, every refit); `score` of two probes against
 * the trainer's logprobs proves their layout (first three refits, then every `verifyEvery`): bytes can be right and layout
 * wrong.
 * With transport nccl or ipc the load takes the same bytes from the trainer's memory, by the table of the file, which is
 * then only for engines that join: the trainer may have stepped on, and a run that waits for its last engine must not wait
 * for the next refit. A broadcast (broadcast.ts) ties its engines together: they load at once, and fail together.
 * Called by loop.ts after an optimizer step. Talks to engines and trainer ranks (protocol.ts: push_weights, pause,
 * stage_weights, load_weights, score, resume). Elsewhere called weight sync, update_weights, broadcast.
 */
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { crc32 } from 'node:zlib';
import { Broadcast } from './broadcast.ts';
import type { Engine, Generator } from './generator.ts';
import { RemoteError } from './protocol.ts';
import type { TensorTable, Trainer } from './trainer.ts';
import { flatRows } from './trainer.ts';
import { invariant } from './types.ts';

/** Refits whose layout is always proved. */
const ALWAYS_VERIFIED = 3;
/** Bytes from which a round trip to check them ahead is shorter than the check: less is checked in the pause. */
const STAGE_FROM_BYTES = 4 * 1024 * 1024;
/** Of a broadcast: what is packed and sent at a time. */
const BUCKET_BYTES = 256 * 1024 * 1024;

/** How weights get into engines that sample. A new engine always reads the file. */
export type Transport = 'file' | 'nccl' | 'ipc';

/** What became of one refit. */
export interface RefitTimes {
  readonly stageMs: number; // the trainer writes and engines check, while they sample; until the last one pauses
  readonly pauseMs: number; // longest that one engine stood still: pause, load, verify, resume
  readonly engines: number; // that were asked to take it
  readonly took: number; // of them, those that did; never 0
  readonly bytes: number;
  readonly checksum: number; // of the whole weights: crc32 of the tensors' crc32 (u32, little-endian) in their order
  readonly verified: number | null; // largest |dlogp| of the probes, null when the layout was not due
}

/** A version that an engine has verified and that engines sample from now on. */
export interface Declared {
  readonly version: number;
  readonly engine: string; // that verified it
  readonly of: number; // engines that are asked to take it
  readonly checksum: number; // as in RefitTimes
  readonly bytes: number;
}

/** Where an engine finds the weights; with nccl once all engines stand still. */
type Source = (engine: Engine) => Promise<string>;
interface Way {
  readonly transport: Transport;
  readonly source: Source;
  readonly broadcast?: Broadcast;
}

interface Staged {
  readonly version: number;
  readonly path: string;
  readonly tensors: TensorTable;
  readonly bytes: number;
  readonly expected: Float32Array | null; // the trainer's logprobs of the probes, where the layout is to be proved
}

interface Outcome {
  readonly ok: boolean;
  readonly gap: number | null; // of the probes, null when the layout was not due
  readonly pausedAt: number;
  readonly ms: number; // from there
}

export class Refit {
  readonly #generator: Generator;
  readonly #trainer: Trainer;
  readonly #dir: string;
  readonly #verifyEvery: number;
  readonly #tolerance: number;
  readonly #clearsCache: boolean;
  readonly #deadlineMs: number;
  readonly #stageFromBytes: number;
  readonly #transport: Transport | 'auto';
  readonly #bucketBytes: number;
  readonly #members = new Set<Engine>(); // joined: every refit reaches them
  readonly #joins = new Set<Promise<void>>(); // in progress; none while a file is written
  #probes: readonly Int32Array[] = [];
  #staged: Staged | null = null; // what a new engine gets; null = nothing but what it loaded from the model directory
  #declared: Staged | null = null; // of it, what engines sample from: that of `version`
  #version = 0;
  #refits = 0;
  #broadcasts = 0;
  #staging: Promise<unknown> = Promise.resolve(); // the file being written, if any
  #onDeclared: (declared: Declared) => void = () => {};
  #onJoin: () => void = () => {}; // a new engine took the weights, or not: a refit without another waits for it

  /**
   * `tolerance`: largest |dlogp| between an engine and the trainer, 1e-4 in fp32, 0.5 in bf16. `deadlineMs`: most that an
   * engine may take to pause, load, verify and resume together, and most that it may take to stage. `stageFromBytes`: less
   * is not staged by engines.
   */
  constructor(args: {
    generator: Generator;
    trainer: Trainer;
    runDir: string;
    verifyEvery: number;
    tolerance: number;
    cache: 'clear' | 'keep';
    deadlineMs: number;
    stageFromBytes?: number;
    transport?: Transport | 'auto';
    bucketBytes?: number;
  }) {
    this.#generator = args.generator;
    this.#trainer = args.trainer;
    this.#dir = join(args.runDir, 'weights');
    this.#verifyEvery = args.verifyEvery;
    this.#tolerance = args.tolerance;
    this.#clearsCache = args.cache === 'clear';
    this.#deadlineMs = args.deadlineMs;
    this.#stageFromBytes = args.stageFromBytes ?? STAGE_FROM_BYTES;
    this.#transport = args.transport ?? 'file';
    this.#bucketBytes = args.bucketBytes ?? BUCKET_BYTES;
    mkdirSync(this.#dir, { recursive: true });
  }

  get version(): number {
    return this.#version;
  }

  /** Rows whose logprobs engine and trainer must agree on. Set once, before the first refit. */
  set probes(rows: readonly Int32Array[]) {
    this.#probes = rows;
  }

  get probes(): readonly Int32Array[] {
    return this.#probes;
  }

  /** Start-up parity: mean and maximum of |dlogp| over the probes, between every engine and the trainer. */
  async parity(): Promise<{ mean: number; max: number }> {
    const expected = await this.#trainer.logprobs(this.#probes, 1);
    for (;;) {
      await this.#generator.anyEngine();
      try {
        return await this.#gaps(this.#generator.engines, expected);
      } catch (error) {
        const isGone = error instanceof RemoteError && (error.type === 'lost' || error.type === 'deadline');
        if (!isGone) throw error; // else another one takes its place
      }
    }
  }

  async #gaps(engines: readonly Engine[], expected: Float32Array): Promise<{ mean: number; max: number }> {
    let sum = 0;
    let max = 0;
    for (const engine of engines) {
      for (const [k, value] of (await this.#scores(engine)).entries()) {
        const gap = Math.abs(value - (expected[k] as number));
        sum += gap;
        max = Number.isNaN(gap) ? Number.NaN : Math.max(max, gap);
      }
    }
    return { mean: sum / (expected.length * engines.length), max };
  }

  /** Of the probes. An engine that does not answer is killed. */
  async #scores(engine: Engine): Promise<Float32Array> {
    const left = { deadlineMs: this.#deadlineMs };
    try {
      return (await engine.peer.request('score', {}, flatRows(this.#probes), left)).frames.logprobs;
    } catch (error) {
      if (error instanceof RemoteError && error.type === 'deadline') await this.#kill(engine, error, 'to score');
      throw error;
    }
  }

  /**
   * After a resume: give engines the weights that the trainer has now, under the version that they had, or under the next one
   * where these are not the same to the bit. `checksum`: of what was served as `version`; null = nothing was.
   */
  async resumeAt(
    version: number,
    checksum: number | null,
    onDeclared: (declared: Declared) => void,
  ): Promise<RefitTimes> {
    this.#version = version - 1;
    return this.push(onDeclared, checksum);
  }

  /**
   * One refit. `onDeclared` is called before any engine samples the new version. Rejects when the trainer fails or when no
   * engine can take the weights. One at a time.
   */
  async push(onDeclared: (declared: Declared) => void = () => {}, expected: number | null = null): Promise<RefitTimes> {
    this.#onDeclared = onDeclared;
    const started = performance.now();
    let staged = await this.#stage(this.#version + 1);
    if (expected !== null && checksumOf(staged.tensors) !== expected) {
      this.#version++;
      staged = await this.#stage(this.#version + 1);
    }
    const { version } = staged;
    const writtenAt = performance.now();
    const engines = [...this.#members].filter(({ peer }) => !peer.isLost);
    const deadline = performance.now() + this.#deadlineMs;
    const way = await this.#way(engines, staged, deadline).catch((error: Error) => {
      this.#staged = this.#declared;
      throw error;
    });
    const results = await Promise.all(engines.map((engine) => this.#refit(engine, staged, deadline, way)));
    await way.broadcast?.ended;
    // Lets go of the memory. A trainer that is lost has let go, and is no failure of what engines have taken.
    if (way.transport === 'ipc') await this.#trainer.sendWeights(version, 'ipc', '').catch(() => {});
    await this.#verifiedByNewEngine(version);
    const took = results.filter((result) => result.ok);
    return {
      stageMs: Math.max(writtenAt, ...took.map((result) => result.pausedAt)) - started,
      pauseMs: took.length > 0 ? Math.max(...took.map((result) => result.ms)) : performance.now() - writtenAt,
      engines: engines.length,
      took: took.length || 1, // or the new process that took their place
      bytes: staged.bytes,
      checksum: checksumOf(staged.tensors),
      verified: took.reduce<number | null>(
        (max, { gap }) => (gap === null ? max : Math.max(max ?? Number.NEGATIVE_INFINITY, gap)),
        null,
      ),
    };
  }

  /** One engine, from its look at the bytes to resume. */
  async #refit(engine: Engine, staged: Staged, deadline: number, way: Way): Promise<Outcome> {
    const isReady =
      way.transport !== 'file' || staged.bytes < this.#stageFromBytes || (await this.#stageEngine(engine, staged));
    const pausedAt = performance.now();
    if (!isReady) return { ok: false, gap: null, pausedAt, ms: 0 };
    const until = way.broadcast ? deadline : pausedAt + this.#deadlineMs;
    const { ok, gap } = await this.#swap(engine, staged, until, way);
    if (ok) this.#verifiedBy(engine, staged);
    const isBack = ok && (await this.#resume(engine, staged.version, until));
    return { ok: isBack, gap, pausedAt, ms: performance.now() - pausedAt };
  }

  /** It checks the bytes while it samples, so that the pause need not. False when the engine is gone or had to go. */
  async #stageEngine(engine: Engine, staged: Staged): Promise<boolean> {
    try {
      await engine.peer.request('stage_weights', weightsOf(staged, 'file', staged.path), undefined, {
        deadlineMs: this.#deadlineMs,
      });
      return true;
    } catch (error) {
      await this.#kill(engine, error as Error);
      return false;
    }
  }

  /** How these engines get the weights of this refit. */
  async #way(engines: readonly Engine[], staged: Staged, deadline: number): Promise<Way> {
    const { version } = staged;
    const transport = this.#transport === 'auto' ? await this.#chosen(engines) : this.#transport;
    if (transport === 'file' || engines.length === 0) return fromFile(staged);
    if (transport === 'ipc') {
      const handles = join(this.#dir, 'handles.json');
      await this.#trainer.sendWeights(version, transport, handles);
      return { transport, source: async () => handles };
    }
    const name = `refit-${version}-${this.#broadcasts++}`;
    const [trainer, bucketBytes] = [this.#trainer, this.#bucketBytes];
    const broadcast = new Broadcast({ trainer, version, name, engines, bucketBytes, deadline });
    return { transport, source: (engine) => broadcast.enter(engine), broadcast };
  }

  /** auto: what the devices allow. Workers on a CPU name no GPU, nor do engines that only read files. */
  async #chosen(engines: readonly Engine[]): Promise<Transport> {
    const gpusOf = (info: unknown) => (info as { gpus?: readonly string[] }).gpus ?? [];
    const [trainer] = gpusOf(this.#trainer.info);
    const each = await Promise.all(engines.map(async ({ peer }) => gpusOf(await peer.ready)));
    if (trainer === undefined || each.some((gpus) => gpus.length === 0)) return 'file';
    if (each.every((gpus) => gpus.every((gpu) => gpu === trainer))) return 'ipc';
    const all = each.flat();
    // One GPU is one rank of a communicator.
    return all.includes(trainer) || new Set(all).size < all.length ? 'file' : 'nccl';
  }

  /** The first engine that has verified the new weights makes them the current version. Late ones change nothing. */
  #verifiedBy(engine: Engine, staged: Staged): void {
    const { version, tensors, bytes } = staged;
    if (version !== this.#version + 1) return;
    this.#version = version;
    this.#staged = this.#declared = staged;
    this.#refits++;
    this.#onDeclared({
      version,
      engine: engine.worker.spec.id,
      of: this.#members.size,
      checksum: checksumOf(tensors),
      bytes,
    });
  }

  /**
   * Bring a new engine to the current version; generator.ts routes to it afterwards. Rejects when it fails. A refit that
   * comes meanwhile waits for it, since an engine that only chased the newest version might never be done.
   */
  async join(engine: Engine): Promise<void> {
    for (let staging = null; staging !== this.#staging; ) {
      staging = this.#staging;
      await staging;
    }
    const joining = this.#joinNow(engine);
    this.#joins.add(joining);
    await joining.finally(() => this.#joins.delete(joining));
  }

  async #joinNow(engine: Engine): Promise<void> {
    const staged = this.#staged;
    if (staged) {
      const deadline = performance.now() + this.#deadlineMs;
      const { ok } = await this.#swap(engine, staged, deadline, fromFile(staged));
      if (ok) this.#verifiedBy(engine, staged); // of a refit that is under way, it may be the first
      this.#onJoin();
      if (!ok || !(await this.#resume(engine, staged.version, deadline)))
        throw new Error(`Engine ${engine.worker.spec.id} could not take version ${staged.version}`);
    }
    this.#members.add(engine);
    void engine.peer.lost.then(() => this.#members.delete(engine)); // lost never rejects
  }

  /** When every engine refused the weights: write them again until a new process takes them or none may be started. */
  async #verifiedByNewEngine(version: number): Promise<void> {
    while (this.#version !== version) {
      const outcome = new Promise<void>((resolve) => {
        this.#onJoin = resolve;
      });
      await this.#stage(version);
      if (this.#version !== version) await Promise.race([outcome, this.#generator.failed]);
    }
  }

  /**
   * From here on `version` is what a joining engine gets. When it fails they get the declared one: nobody may declare a
   * version outside of its refit, which is tried again.
   */
  #stage(version: number): Promise<Staged> {
    const stage = async () => {
      const path = join(this.#dir, `segment-${version % 2}.bin`);
      await Promise.allSettled([...this.#joins]);
      if (this.#declared && version === this.#version) return this.#declared; // one of these has taken it
      this.#staged = this.#declared;
      const { tensors } = await this.#trainer.pushWeights(version, path);
      const due = this.#refits < ALWAYS_VERIFIED || version % this.#verifyEvery === 0;
      const expected = due ? await this.#trainer.logprobs(this.#probes, 1) : null;
      const bytes = tensors.reduce((n, tensor) => n + tensor.bytes, 0);
      this.#staged = { version, path, tensors, bytes, expected };
      return this.#staged;
    };
    const staging = stage();
    this.#staging = staging.catch(() => {}); // `push` reports the failure
    return staging;
  }

  async #swap(
    engine: Engine,
    staged: Staged,
    deadline: number,
    way: Way,
  ): Promise<{ ok: boolean; gap: number | null }> {
    try {
      return { ok: true, gap: await this.#load(engine, staged, deadline, way) };
    } catch (error) {
      way.broadcast?.leave(engine, error as Error);
      await this.#kill(engine, error as Error);
      return { ok: false, gap: null };
    }
  }

  /** Pause, load, verify. Returns the largest gap of the probes, null when the layout is not due. */
  async #load(engine: Engine, staged: Staged, deadline: number, way: Way): Promise<number | null> {
    const left = (until = deadline) => ({ deadlineMs: Math.max(0, until - performance.now()) });
    const pause = { epoch: staged.version, mode: 'keep', clear_cache: this.#clearsCache };
    // In a broadcast the others wait for this one, and must have time left when it does not come.
    const pausedBy = way.broadcast ? deadline - this.#deadlineMs / 2 : deadline;
    this.#generator.paused(engine, (await engine.peer.request('pause', pause, undefined, left(pausedBy))).frames);
    const path = await way.source(engine);
    const loading = engine.peer.request(
      'load_weights',
      { ...weightsOf(staged, way.transport, path), last: true },
      undefined,
      left(),
    );
    const { fields } = await (way.broadcast ? way.broadcast.orBroken(loading) : loading);
    invariant(fields.loaded > 0, `engine ${engine.worker.spec.id} loaded no tensor`);
    const { expected } = staged;
    if (!expected) return null;
    const score = await engine.peer.request('score', {}, flatRows(this.#probes), left());
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

  /** False when the engine is gone or had to go. */
  async #resume(engine: Engine, version: number, deadline: number): Promise<boolean> {
    this.#generator.resumed(engine);
    const left = { deadlineMs: Math.max(0, deadline - performance.now()) };
    try {
      await engine.peer.request('resume', { epoch: version }, undefined, left);
      return true;
    } catch (error) {
      await this.#kill(engine, error as Error);
      return false;
    }
  }

  /** Its requests go on elsewhere. One that does not answer says first where it hangs. */
  async #kill(engine: Engine, error: Error, toDo = 'to take weights'): Promise<void> {
    this.#members.delete(engine);
    const type = error instanceof RemoteError ? error.type : null;
    if (type === 'lost') return; // generator.ts knows
    const isHung = type === 'deadline';
    const why = isHung ? `took longer than refit.deadline_s, ${this.#deadlineMs / 1000} s, ${toDo}` : error.message;
    await this.#generator.kill(engine, why, isHung);
  }
}

function weightsOf({ version, tensors }: Staged, transport: Transport, path: string) {
  return { version, source: { transport, path }, tensors };
}

function fromFile({ path }: Staged): Way {
  return { transport: 'file', source: async () => path };
}

function checksumOf(tensors: TensorTable): number {
  const sums = Buffer.alloc(4 * tensors.length);
  for (const [i, tensor] of tensors.entries()) sums.writeUInt32LE(tensor.crc32, 4 * i);
  return crc32(sums);
}
