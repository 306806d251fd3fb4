/**
 * Simulated trainer ranks: the loss, gradient and optimizer of simulated_model.ts behind the trainer's wire.
 *
 *   rows* -> run: policyLoss per micro-batch -> all ranks meet: gradients added, one AdamW step -> {sums, maxima}
 *
 * Same contract as trainer.py, held to it by the same tests (test/trainer_contract.test.ts). Every rank sees its own rows
 * only. The model is held once: all ranks of a `rendezvous` live in one process, and their collectives are a shared
 * object that waits for the last of them.
 * Started by simulated.ts; talks to trainer.ts and refit.ts.
 */
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { crc32 } from 'node:zlib';
import type { Answer } from '../molt/bus.ts';
import type { Fields, Frames } from '../molt/protocol.ts';
import { RemoteError } from '../molt/protocol.ts';
import {
  adamStep,
  gradNorm,
  type LossNumbers,
  NUM_PARAMETERS,
  newOptimState,
  type OptimOptions,
  type OptimState,
  packWeights,
  policyLoss,
  type Row,
  TENSORS,
  unpackWeights,
  VOCAB_SIZE,
} from './simulated_model.ts';
import {
  badRequest,
  checkIds,
  cut,
  loadModel,
  NOTHING,
  type SimulatedWorker,
  scoreRows,
  unsupported,
  WEIGHTS_FILE,
} from './simulated_worker.ts';

const ALIGN_BYTES = 64;
const TRAINER_FILE = 'trainer.json';
const MOMENT_FILES = ['first.safetensors', 'second.safetensors'] as const;

interface TrainerOptions {
  readonly model_path: string;
  readonly rank: number;
  readonly world_size: number;
  readonly rendezvous: string;
  readonly optim: OptimOptions;
}

interface Waiting {
  readonly name: string;
  readonly part: unknown;
  readonly resolve: (result: unknown) => void;
  readonly reject: (error: unknown) => void;
}

/** What the ranks of one rendezvous share: the model, the optimizer, and a place to meet. */
class TrainerGroup {
  static readonly #groups = new Map<string, TrainerGroup>();
  readonly worldSize: number;
  readonly weights: Float32Array;
  readonly optim: OptimState = newOptimState();
  readonly #waiting = new Map<number, Waiting>(); // by rank: a rank does one thing at a time

  static of(options: TrainerOptions): TrainerGroup {
    const group = TrainerGroup.#groups.get(options.rendezvous) ?? new TrainerGroup(options);
    TrainerGroup.#groups.set(options.rendezvous, group);
    return group;
  }

  private constructor(options: TrainerOptions) {
    this.worldSize = options.world_size;
    this.weights = loadModel(options.model_path);
  }

  /** A collective: when the last rank has come, `work` runs once on everyone's part, in rank order. */
  meet<P, R>(rank: number, name: string, part: P, work: (parts: P[]) => R): Promise<R> {
    return new Promise<R>((resolve, reject) => {
      this.#waiting.set(rank, { name, part, resolve: resolve as (result: unknown) => void, reject });
      if (this.#waiting.size < this.worldSize) return;
      const all = [...this.#waiting.entries()].sort(([a], [b]) => a - b).map(([, waiting]) => waiting);
      this.#waiting.clear();
      try {
        const other = all.find((waiting) => waiting.name !== name);
        if (other) throw new RemoteError('fatal', `Ranks have parted: one is in ${name}, one in ${other.name}`);
        const result = work(all.map((waiting) => waiting.part as P));
        for (const waiting of all) waiting.resolve(result);
      } catch (error) {
        for (const waiting of all) waiting.reject(error);
      }
    });
  }
}

export class SimulatedRank {
  readonly #worker: SimulatedWorker;
  readonly #rank: number;
  readonly #optim: OptimOptions;
  readonly #group: TrainerGroup;
  readonly #parts = new Map<number, { readonly of: number; readonly parts: Row[][] }>(); // by step, until `run`

  constructor(worker: SimulatedWorker) {
    const options = worker.options as unknown as TrainerOptions;
    this.#worker = worker;
    this.#rank = options.rank;
    this.#optim = options.optim;
    this.#group = TrainerGroup.of(options);
    this.#listen();
    worker.link.ready({
      model: options.model_path,
      vocab_size: VOCAB_SIZE,
      dtype: 'float32',
      parameters: NUM_PARAMETERS,
    });
  }

  #listen(): void {
    const w = this.#worker;
    w.serve('rows', (fields, frames) => this.#rows(fields, frames));
    w.serve('run', (fields) => this.#run(fields));
    w.serve('logprobs', ({ which, temperature }, frames) => {
      if (which !== 'policy') throw unsupported('which', `This trainer has no ${which} model`);
      if (!(temperature > 0)) throw badRequest('temperature', `temperature must be above 0, got ${temperature}`);
      return { fields: {}, frames: { logprobs: scoreRows(this.#group.weights, frames, temperature) } };
    });
    w.serve('push_weights', (fields) => this.#push(fields));
    w.serve('save', ({ step, path }) => this.#together('save', () => this.#save(step, path)));
    w.serve('restore', ({ path }) => {
      this.#parts.clear(); // rows of the life before
      return this.#together('restore', () => this.#restore(path));
    });
    w.serve('export', ({ path }) => this.#together('export', () => this.#export(path)));
  }

  /** The model is shared, so one rank acts for all, once all have come. */
  #together<R>(name: string, work: () => R): Promise<R> {
    return this.#group.meet(this.#rank, name, null, work);
  }

  // ---- Steps ----

  #rows({ step, part, of }: Fields<'rows'>, frames: Frames<'rows'>): Answer<'rows'> {
    const entry = this.#parts.get(step) ?? { of, parts: [] };
    if (part !== entry.parts.length || of !== entry.of || part >= of) {
      throw badRequest(
        'part',
        `Part ${part} of ${of} does not follow ${entry.parts.length} parts of ${entry.of} for step ${step}`,
      );
    }
    entry.parts.push(readRows(frames));
    this.#parts.set(step, entry);
    return NOTHING;
  }

  async #run(fields: Fields<'run'>): Promise<Answer<'run'>> {
    const rows = this.#takeRows(fields);
    const grad = new Float64Array(NUM_PARAMETERS);
    const options = { loss: fields.loss, temperature: fields.temperature, tokens: fields.denominators.tokens };
    const { sums, maxima } = addNumbers(
      fields.micro_batches.map((micro) =>
        policyLoss(
          this.#group.weights,
          micro.map((i) => rows[i] as Row),
          options,
          grad,
        ),
      ),
    );
    const mine = { grad, finite: Number.isFinite(sums.loss) };
    const { norm, skipped } = await this.#group.meet(this.#rank, `run of step ${fields.step}`, mine, (all) =>
      this.#step(all, fields.lr),
    );
    const numbers = { sums, maxima: { ...maxima, grad_norm: norm, skipped: skipped ? 1 : 0 } };
    return { fields: onlyFinite(numbers), frames: {} };
  }

  #takeRows({ step, micro_batches, temperature }: Fields<'run'>): Row[] {
    const entry = this.#parts.get(step);
    if (!entry || entry.parts.length !== entry.of) {
      throw badRequest(
        'step',
        `Step ${step} has ${entry?.parts.length ?? 0} of ${entry?.of ?? 'no'} parts of its rows`,
      );
    }
    const rows = entry.parts.flat();
    const used = micro_batches.flat().sort((a, b) => a - b);
    if (micro_batches.length === 0 || used.length !== rows.length || used.some((row, i) => row !== i)) {
      throw badRequest(
        'micro_batches',
        `Micro-batches must hold each of ${rows.length} rows once, got ${JSON.stringify(micro_batches)}`,
      );
    }
    if (!(temperature > 0)) throw badRequest('temperature', `temperature must be above 0, got ${temperature}`);
    this.#parts.delete(step);
    return rows;
  }

  /** The all-reduce and the optimizer step. All ranks skip together. */
  #step(all: readonly { grad: Float64Array; finite: boolean }[], lr: number): { norm: number; skipped: boolean } {
    const total = new Float64Array(NUM_PARAMETERS);
    for (const { grad } of all)
      for (let i = 0; i < total.length; i++) total[i] = (total[i] as number) + (grad[i] as number);
    const norm = gradNorm(total);
    const skipped = !Number.isFinite(norm) || all.some((part) => !part.finite);
    if (!skipped) adamStep(this.#group.weights, total, norm, this.#group.optim, { ...this.#optim, lr });
    return { norm, skipped };
  }

  // ---- Weights and checkpoints ----

  /** Segment: tensors back to back at multiples of 64 bytes. Rank 0 writes, after every rank has come. */
  #push({ version, transport, path }: Fields<'push_weights'>): Promise<Answer<'push_weights'>> {
    if (transport !== 'file') throw unsupported('transport', `Transport ${transport} is not known, want file`);
    return this.#together(`push of version ${version}`, () => null).then(() => {
      if (this.#rank !== 0) return { fields: { tensors: [], bytes: 0 }, frames: {} };
      const chunks: Buffer[] = [];
      let offset = 0;
      const tensors = TENSORS.map(({ name, shape, from, size }) => {
        const { buffer } = this.#group.weights.slice(from, from + size);
        const clean = Buffer.from(buffer);
        const bytes = this.#worker.damage('swap_layout', 'push_weights', name, clean);
        const padding = Buffer.alloc((ALIGN_BYTES - (bytes.length % ALIGN_BYTES)) % ALIGN_BYTES);
        chunks.push(this.#worker.damage('corrupt', 'push_weights', name, bytes), padding);
        const entry = { name, dtype: 'f32', shape, offset, bytes: bytes.length, crc32: crc32(bytes) };
        offset += bytes.length + padding.length;
        return entry;
      });
      writeFileSync(path, Buffer.concat(chunks));
      return { fields: { tensors, bytes: offset }, frames: {} };
    });
  }

  #save(step: number, path: string): Answer<'save'> {
    const { weights, optim, worldSize } = this.#group;
    mkdirSync(path, { recursive: true });
    if (existsSync(join(path, TRAINER_FILE)))
      throw badRequest('path', `Cannot save into ${path}: it holds a checkpoint already`);
    writeFileSync(join(path, WEIGHTS_FILE), packWeights(weights));
    writeFileSync(join(path, MOMENT_FILES[0]), packWeights(optim.first));
    writeFileSync(join(path, MOMENT_FILES[1]), packWeights(optim.second));
    writeFileSync(join(path, TRAINER_FILE), JSON.stringify({ step, count: optim.count, world_size: worldSize }));
    return NOTHING;
  }

  #restore(path: string): Answer<'restore'> {
    const { weights, optim } = this.#group;
    const read = (name: string): Float32Array => unpackWeights(readFileSync(join(path, name)));
    if (!existsSync(join(path, TRAINER_FILE)))
      throw badRequest('path', `Cannot restore ${path}: it holds no checkpoint`);
    const saved = JSON.parse(readFileSync(join(path, TRAINER_FILE), 'utf8')) as { step: number; count: number };
    weights.set(read(WEIGHTS_FILE));
    optim.first.set(read(MOMENT_FILES[0]));
    optim.second.set(read(MOMENT_FILES[1]));
    optim.count = saved.count;
    return { fields: { step: saved.step }, frames: {} };
  }

  /** A directory that `model_path` of an engine or trainer may name. */
  #export(path: string): Answer<'export'> {
    mkdirSync(path, { recursive: true });
    writeFileSync(join(path, WEIGHTS_FILE), packWeights(this.#group.weights));
    writeFileSync(join(path, 'config.json'), JSON.stringify({ model_type: 'simulated', vocab_size: VOCAB_SIZE }));
    return NOTHING;
  }
}

function addNumbers(parts: readonly LossNumbers[]): LossNumbers {
  const sums: Record<string, number> = {};
  const maxima: Record<string, number> = {};
  for (const part of parts) {
    for (const [key, value] of Object.entries(part.sums)) sums[key] = (sums[key] ?? 0) + value;
    for (const [key, value] of Object.entries(part.maxima)) maxima[key] = Math.max(maxima[key] ?? 0, value);
  }
  return { sums, maxima };
}

/** Floats on the wire are finite: what a skipped step could not compute is left out. */
function onlyFinite(numbers: LossNumbers): LossNumbers {
  const clean = (record: Record<string, number>): Record<string, number> =>
    Object.fromEntries(Object.entries(record).filter(([, value]) => Number.isFinite(value)));
  return { sums: clean(numbers.sums), maxima: clean(numbers.maxima) };
}

/** Rows of a message, checked so that nothing in them can stop the step later. */
function readRows(frames: Frames<'rows'>): Row[] {
  checkIds(frames.ids, 'ids');
  const column = <A extends Int32Array | Float32Array | Uint8Array>(array: A, name: string): A[] =>
    cut(array, frames.lengths, name);
  const masks = column(frames.loss_mask, 'loss_mask');
  const numbers = (name: 'rollout_logprobs' | 'advantages' | 'old_logprobs', array: Float32Array): Float32Array[] => {
    const rows = column(array, name);
    const bad = rows.findIndex((row, i) => row.some((x, k) => masks[i]?.[k] === 1 && !Number.isFinite(x)));
    if (bad >= 0) throw badRequest(name, `Row ${bad} has a non-finite value at a trained token`);
    return rows;
  };
  const first = masks.findIndex((mask) => mask[0] === 1);
  if (first >= 0) throw badRequest('loss_mask', `Row ${first} trains its first token, which nothing predicts`);
  const rollout = numbers('rollout_logprobs', frames.rollout_logprobs);
  const advantages = numbers('advantages', frames.advantages);
  const old = frames.old_logprobs ? numbers('old_logprobs', frames.old_logprobs) : null;
  const stale = frames.stale ? column(frames.stale, 'stale') : null;
  return column(frames.ids, 'ids').map((ids, i) => ({
    ids,
    lossMask: masks[i] as Uint8Array,
    rolloutLogprobs: rollout[i] as Float32Array,
    advantages: advantages[i] as Float32Array,
    oldLogprobs: old ? (old[i] as Float32Array) : null,
    stale: stale ? (stale[i] as Uint8Array) : null,
  }));
}
