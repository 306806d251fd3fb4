/**
 * All worker processes of a run, and the clients over them.
 *
 *   tokenizer, engines (generator.ts, refit.ts), trainer ranks (trainer.ts), runners (dispatch.ts)
 *
 * Started all at once, since each spends seconds on imports and on loading the model. What one kind of process is
 * started with stands here once, so that a restart is the same as a start.
 * Called by loop.ts; starts processes through launch.ts.
 */
import { availableParallelism } from 'node:os';
import { resolve } from 'node:path';
import type { Bus } from './bus.ts';
import { type Options, simulatedScript } from './config.ts';
import { Dispatch } from './dispatch.ts';
import { orFailure } from './failure.ts';
import { Generator } from './generator.ts';
import { placeWorkers, visibleGpus } from './gpus.ts';
import { type Launcher, nodeCommand, pythonCommand, type WorkerSpec, wasKilled } from './launch.ts';
import { Refit } from './refit.ts';
import { rendezvousPath } from './run_dir.ts';
import { Tokenizer } from './tokenizer.ts';
import { Trainer } from './trainer.ts';
import { invariant, type Json } from './types.ts';
import { vllmOptions } from './vllm.ts';

/** More do not pay for the models that are trained on a CPU. */
const MAX_THREADS = 8;
/** Largest |dlogp| of the refit probes: float32 agrees to rounding, bfloat16 does not. */
const LAYOUT_BOUND = { float32: 1e-4, bfloat16: 0.5 } as const;

export interface Workers {
  readonly tokenizer: Tokenizer;
  readonly trainer: Trainer;
  readonly generator: Generator;
  readonly refit: Refit;
  readonly dispatch: Dispatch;
  readonly numRanks: number;
  readonly dtype: keyof typeof LAYOUT_BOUND; // the coarser of engine and trainer
  /** What workers said of themselves, once all are ready. */
  readonly ready: Promise<Facts>;
  /** The work, or the failure that makes it pointless, whichever comes first. */
  readonly orFatal: <T>(work: Promise<T>) => Promise<T>;
  /** Makes `orFatal` reject: for an error of ours that nobody awaits. */
  readonly fail: (error: Error) => void;
  /** From here on a lost worker is no news. Processes are ended by launch.ts. */
  readonly close: () => void;
}

export interface Facts {
  readonly stopTokenIds: readonly number[];
  readonly vocabSize: number;
  readonly templateExact: boolean; // suffixes equal the template's own text on the tokenizer's test conversations
  readonly templateNote: string;
  readonly startup: string; // seconds until each kind was ready
}

export function openWorkers(args: {
  options: Options;
  runDir: string;
  bus: Bus;
  launcher: Launcher;
  event: (name: string, detail: Record<string, string | number>) => void;
  recorded: () => Promise<void>;
}): Workers {
  const { options, runDir, launcher, event } = args;
  const startedAt = performance.now();
  const specs = workerSpecs(options, runDir);
  const maxRestarts = options['launch.max_restarts'];
  const tokenizer = new Tokenizer({ launcher, spec: specs.tokenizer, maxRestarts, event });
  const trainer = openTrainer({ options, runDir, launcher });
  const generator = new Generator({
    launcher,
    spec: specs.engine,
    maxRequests: options['engine.max_requests'],
    maxRestarts,
    stallMs: options['engine.stall_s'] * 1000,
    hooks: { join: (engine) => refit.join(engine), event },
  });
  const dtype =
    options['engine.dtype'] === 'float32' && options['fsdp.param_dtype'] === 'float32' ? 'float32' : 'bfloat16';
  const refit = new Refit({
    generator,
    trainer,
    runDir,
    verifyEvery: options['refit.verify_every'],
    tolerance: LAYOUT_BOUND[dtype],
    cache: options['refit.cache'],
    deadlineMs: options['refit.deadline_s'] * 1000,
    transport: options['refit.transport'],
  });
  const dispatch = new Dispatch({
    launcher,
    spec: specs.runner,
    generator,
    tokenizer,
    maxRestarts,
    hooks: { version: () => refit.version, recorded: args.recorded, event },
  });
  let fail: (error: Error) => void = () => {};
  const broken = new Promise<never>((_, reject) => {
    fail = reject;
  });
  const fatal = Promise.race([broken, generator.failed, dispatch.failed, tokenizer.failed]);
  fatal.catch(() => {}); // also when the run ends as it should
  const orFatal = orFailure(fatal);

  const started: string[] = [];
  const timed = async (name: string, work: Promise<unknown>) => {
    await work;
    started.push(`${name} ${((performance.now() - startedAt) / 1000).toFixed(1)} s`);
  };
  /** What is killed while it starts is started again; what fails is not. */
  const surely = async (start: () => Promise<unknown>) => {
    for (let n = 1; ; n++) {
      try {
        return await start();
      } catch (error) {
        if (n > maxRestarts || !wasKilled(error as Error)) throw error;
        event('start_again', { attempt: n, reason: (error as Error).message.split('\n')[0] ?? '' });
      }
    }
  };
  let isFirst = true;
  const startTrainer = () => {
    if (!isFirst) return trainer.restart();
    isFirst = false;
    return trainer.ready();
  };
  const all = Promise.all([
    timed('tokenizer', tokenizer.ready),
    timed('trainer', surely(startTrainer)),
    timed(
      'engines',
      Promise.all(engineProcesses(options).map((indexes) => surely(() => generator.startEngines(indexes)))),
    ),
    timed(
      'runners',
      Promise.all(
        Array.from({ length: options['rollout.num_runners'] }, (_, i) => surely(() => dispatch.startRunner(i))),
      ),
    ),
  ]);
  const ready = orFatal(all).then(async (): Promise<Facts> => {
    const template = await tokenizer.ready;
    const { vocab_size } = trainer.info as { vocab_size: number };
    return {
      stopTokenIds: template.stop_token_ids,
      vocabSize: vocab_size,
      templateExact: template.suffix_exact,
      templateNote: template.suffix_note,
      startup: started.join(', '),
    };
  });
  const close = () => {
    tokenizer.close();
    generator.close();
    dispatch.close();
    trainer.close();
  };
  const numRanks = options['trainer.num_ranks'];
  return { tokenizer, trainer, generator, refit, dispatch, numRanks, dtype, ready, orFatal, fail, close };
}

/** Starts the ranks. */
export function openTrainer(args: { options: Options; runDir: string; launcher: Launcher }): Trainer {
  const { options, runDir, launcher } = args;
  const specs = workerSpecs(options, runDir);
  return new Trainer({
    start: (life) => {
      const ranks = Array.from({ length: options['trainer.num_ranks'] }, (_, rank) => specs.rank(rank, life));
      // Simulated ranks share their all-reduce, so they live in one process.
      return options['trainer.kind'] === 'simulated'
        ? launcher.startMany(ranks)
        : ranks.map((spec) => launcher.start(spec));
    },
    launcher,
    loss: {
      clipLowHigh: options['actor.eps_clip_low_high'],
      isLevel: options['algo.advantage.is_correction_level'],
      isMode: options['algo.advantage.is_correction_mode'],
      isThreshold: options['algo.advantage.is_correction_threshold'],
    },
    temperature: options['rollout.temperature'],
    packed: options['fsdp.packing_samples'],
    keepsKeys: options['refit.cache'] === 'keep',
    deadlineMs: options['trainer.deadline_s'] * 1000,
  });
}

// ---- What each process is started with ----

/** Indexes of the engines of each process. */
function engineProcesses(options: Options): number[][] {
  const each = options['simulated.engines_per_process'];
  const all = Array.from({ length: options['engine.num_engines'] }, (_, i) => i);
  return all.filter((i) => i % each === 0).map((first) => all.slice(first, first + each));
}

/** What each process is started with. One place, so that a restart is the same as a start. */
function workerSpecs(options: Options, runDir: string) {
  const model = options['actor.model_name_or_path'] || 'simulated';
  const script = simulatedScript(options);
  const gpus = placeWorkers(options, visibleGpus());
  const python = (file: string) => pythonCommand(file, options['launch.python'] || undefined);
  const simulated = () => nodeCommand('workers/simulated.ts');
  const engineCommand = () => {
    const kind = options['engine.kind'];
    invariant(kind !== 'auto', 'config.ts has put an engine in the place of auto');
    return kind === 'simulated' ? simulated() : python(`engine_${kind}.py`);
  };
  const spec = (
    kind: WorkerSpec['kind'],
    index: number,
    command: readonly string[],
    more: Record<string, Json>,
  ): WorkerSpec => ({
    id: `${kind}-${index}`,
    kind,
    command,
    options: { ...more, script },
  });
  return {
    tokenizer: () =>
      spec('tokenizer', 0, options['tokenizer.kind'] === 'simulated' ? simulated() : python('tokenizer.py'), {
        model_path: model,
        tool_parser: options['tokenizer.tool_parser'],
        reasoning_parser: options['tokenizer.reasoning_parser'],
      }),
    engine: (index: number): WorkerSpec => ({
      env: seeing(gpus.engines[index]),
      ...spec('engine', index, engineCommand(), {
        model_path: model,
        device: options['engine.device'],
        dtype: options['engine.dtype'],
        max_requests: options['engine.max_requests'],
        max_len: options['engine.max_len'],
        prefill_tokens: options['engine.prefill_tokens'],
        seed: options['train.seed'],
        ...(options['engine.kind'] === 'vllm' && vllmOptions(options)),
      }),
    }),
    rank: (rank: number, life: number): WorkerSpec => ({
      env: {
        ...threadsEnv(options['trainer.num_threads'] || trainerShare(options['trainer.num_ranks'])),
        ...seeing(gpus.ranks[rank]),
      },
      ...spec('trainer', rank, options['trainer.kind'] === 'simulated' ? simulated() : python('trainer.py'), {
        model_path: model,
        rank,
        world_size: options['trainer.num_ranks'],
        rendezvous: `file://${rendezvousPath(runDir)}-${life}`, // a store of one life only
        device: options['trainer.device'],
        param_dtype: options['fsdp.param_dtype'],
        attn_implementation: 'sdpa',
        gradient_checkpoint: options['actor.gradient_checkpoint'] === 'full',
        logprob_chunk: options['trainer.logprob_chunk'],
        optim: {
          lr: options['actor.adam.lr'],
          betas: options['actor.adam.betas'],
          eps: options['actor.adam.eps'],
          weight_decay: options['actor.adam.weight_decay'],
          max_norm: options['actor.max_norm'],
        },
        seed: options['train.seed'],
        deterministic: false,
      }),
    }),
    runner: (index: number) =>
      spec('runner', index, nodeCommand('molt/runner.ts'), {
        agent_path: resolve(options['train.agent_path']),
        template_kwargs: {},
        block_ms: options['rollout.block_s'] * 1000,
        turn_deadline_ms: options['rollout.turn_deadline_s'] * 1000,
      }),
  };
}

/** GPUs of one worker; null = it runs on the CPU. */
function seeing(gpus: string | null | undefined): Record<string, string> {
  return gpus ? { CUDA_VISIBLE_DEVICES: gpus } : {};
}

/** Sampling and training take turns, so the cores are the ranks' while they work. */
function trainerShare(numRanks: number): number {
  return Math.min(MAX_THREADS, Math.max(1, Math.floor(availableParallelism() / numRanks)));
}

/** Threads that have nothing to do sleep: one that spun would take the core from whoever it waits for. */
function threadsEnv(count: number): Record<string, string> {
  return { OMP_NUM_THREADS: `${count}`, MKL_NUM_THREADS: `${count}`, OMP_WAIT_POLICY: 'PASSIVE' };
}
