/**
 * The story, and the entry point:  npx tsx molt/loop.ts RECIPE [--option value ...]
 *
 *   prompts -> admit -> rollout -> buffer -> batch -> credit -> train -> refit -> (evaluate, checkpoint) -> again
 *
 * | stage      | consumes              | produces                 | waits for                        |
 * |------------|-----------------------|--------------------------|----------------------------------|
 * | admit      | prompts (data.ts)     | groups of N rollouts     | capacity (buffer.ts), lengths    |
 * | rollout    | prompt, policy tokens | reward and trajectories  | runners, tokenizer, engines      |
 * | batch      | finished groups       | train.batch_size groups  | that many groups                 |
 * | credit     | rewards               | advantages per token     | nothing                          |
 * | train      | samples               | one optimizer step       | every trainer rank               |
 * | refit      | trainer weights       | policy version + 1       | every engine                     |
 *
 * This version is synchronous (max_staleness 0): what is trained at version V was sampled by version V.
 *
 * Exit codes: 0 done; 1 failed, with the cause on the terminal; 2 bad input (options, data, model, agent, environment):
 * nothing was trained; 130 and 143 stopped by SIGINT or SIGTERM: the step was finished and a checkpoint saved. A second
 * signal stops at once and leaves the last checkpoint to resume from.
 */
import { createHash } from 'node:crypto';
import { existsSync, mkdtempSync, realpathSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { monitorEventLoopDelay } from 'node:perf_hooks';
import { fileURLToPath } from 'node:url';
import { Buffer } from './buffer.ts';
import { Bus } from './bus.ts';
import { type Checkpoint, newestCheckpoint, saveCheckpoint } from './checkpoint.ts';
import type { Config, Options } from './config.ts';
import { ConfigError, formatConfig, HelpRequested, loadConfig } from './config.ts';
import {
  type Filter,
  fitting,
  type Length,
  loadPrompts,
  type PromptSet,
  PromptStream,
  promptsOf,
  sharedPrompts,
} from './data.ts';
import type { Job } from './dispatch.ts';
import { credit } from './estimators.ts';
import { constantBest, type Evaluation, evaluate, formatSample, saidRows } from './evaluate.ts';
import { checkParity, FailureWindow, Health, MISMATCH_BOUND } from './health.ts';
import { Launcher, type Worker } from './launch.ts';
import { Ledger } from './ledger.ts';
import { formatStep, MetricsWriter, Progress } from './metrics.ts';
import { planBatch } from './packing.ts';
import { checkModel, checkPromptFiles, checkSurroundings, type Finding, findingsTable } from './preflight.ts';
import {
  batchMetrics,
  generatorMetrics,
  PromptLog,
  recordRollout,
  stepMetrics,
  sum,
  withMismatchOf,
} from './report.ts';
import { closeRunDir, discardRunDir, openRunDir } from './run_dir.ts';
import type { Split } from './sources.ts';
import { flatRows, learningRate, type StepResult } from './trainer.ts';
import { type Group, invariant, type Prompt, type Rollout, type Sampling } from './types.ts';
import { openWorkers, type Workers } from './workers.ts';

const RELAYED_MS = 500; // a signal this soon after the first is the same Ctrl-C
const STOP_GRACE_MS = 10_000;
const PROBE_IDS = 48;

/** What a signal asked for. The first asks to finish the step; the second never returns. */
interface Stopper {
  signal: 'SIGINT' | 'SIGTERM' | null;
  hasSteps: boolean; // there is something to finish and to save
  hasTrained: boolean; // a step in this process: what fails from here on is no bad input
  onFirst: () => void;
}
const EXIT_CODES = { SIGINT: 130, SIGTERM: 143 } as const;

// ---- Entry ----

export async function main(argv: readonly string[]): Promise<number> {
  try {
    const prepared = await prepare(argv, []);
    const runDir = openRunDir(prepared.config);
    say(`Run directory ${runDir}; starting workers, their logs are in logs/`);
    return await withWorkers(prepared, runDir, async (context) => {
      await train(context);
      return context.stopper.signal ? EXIT_CODES[context.stopper.signal] : 0;
    });
  } catch (error) {
    return refused(error);
  }
}

/** Everything short of training: every check, then the workers and the parity of engine and trainer. Prints a table. */
export async function doctor(argv: readonly string[]): Promise<number> {
  const findings: Finding[] = [];
  const runDir = mkdtempSync(join(tmpdir(), 'molt-doctor-'));
  try {
    const prepared = await prepare(argv, findings);
    const code = await withWorkers(prepared, runDir, async ({ config, prompts, workers }) => {
      const facts = await workers.ready;
      findings.push({ check: 'workers', status: 'ok', text: `ready after: ${facts.startup}` });
      findings.push({ check: 'template', status: facts.templateExact ? 'ok' : 'warning', text: facts.templateNote });
      workers.refit.probes = await probeRows(
        workers.tokenizer,
        prompts.stream.first,
        facts.vocabSize,
        config.options['data.max_len'],
      );
      const bound = MISMATCH_BOUND[workers.dtype];
      const { mean, max } = await workers.orFatal(workers.refit.parity());
      const text = `mean |dlogp| ${mean.toExponential(1)}, max ${max.toExponential(1)}, allowed ${bound} (${workers.dtype})`;
      findings.push({ check: 'parity', status: mean <= bound ? 'ok' : 'problem', text });
      return 0;
    });
    console.log(findingsTable(findings));
    return code !== 0 ? code : findings.some(({ status }) => status === 'problem') ? 2 : 0;
  } catch (error) {
    if (findings.length > 0) console.log(findingsTable(findings));
    return findings.some(({ status }) => status === 'problem') ? 2 : refused(error);
  } finally {
    rmSync(runDir, { recursive: true, force: true });
  }
}

/** What a run is made of, checked; no worker runs yet. */
interface Prepared {
  readonly argv: readonly string[];
  readonly config: Config;
  readonly prompts: Prompts;
  readonly from: Checkpoint | null;
}

/** Throws ConfigError with every problem of a stage, or HelpRequested. What was found is also in `findings`. */
async function prepare(argv: readonly string[], findings: Finding[]): Promise<Prepared> {
  const config = await loadConfig(argv);
  const { options, recipe } = config;
  say(formatConfig(config));
  let begun = performance.now();
  // A recipe's `prepare` may make the model; without one the model can be looked at together with the rest.
  let stage = [
    ...(await checkSurroundings(options)),
    ...(recipe.prepare ? checkPromptFiles(options) : checkModel(options)),
  ];
  if (recipe.prepare) {
    report(stage, findings);
    stage = [];
    const started = performance.now();
    try {
      await recipe.prepare(options, say);
    } catch (error) {
      throw new ConfigError([`Recipe ${argv[0]}: prepare failed: ${messageOf(error)}`]);
    }
    begun += performance.now() - started; // not a check
    stage = checkModel(options);
  }
  const [prompts, found] = await loadAllPrompts(options);
  report([...stage, ...found], findings);
  invariant(prompts, 'prompts without a problem are there');
  let from: Checkpoint | null = null;
  if (options['run.resume']) {
    from = newestCheckpoint(options['run.dir']);
    if (from) prompts.stream.restore(from.state.data);
  }
  say(
    `Checks passed in ${((performance.now() - begun) / 1000).toFixed(1)} s: ${findings.map((f) => f.check).join(', ')}`,
  );
  return { argv, config, prompts, from };
}

/** Keep what a stage found, print its warnings. Throws ConfigError when it has problems. */
function report(stage: readonly Finding[], findings: Finding[]): void {
  findings.push(...stage);
  for (const { check, status, text } of stage) if (status === 'warning') console.warn(`Warning (${check}): ${text}`);
  const problems = stage.filter(({ status }) => status === 'problem').map(({ text }) => text);
  if (problems.length > 0) throw new ConfigError(problems);
}

/** Print why nothing was started, one line for each problem. Returns the exit code. */
function refused(error: unknown): number {
  if (error instanceof HelpRequested) {
    console.log(error.text);
    return 0;
  }
  const lines = error instanceof ConfigError ? error.lines : [`Cannot prepare the run: ${messageOf(error)}`];
  for (const line of lines) console.error(line);
  return 2;
}

/**
 * Start the workers of a run, do `work` with them, stop them. Returns the exit code; a failure of the work is printed with
 * its cause. Workers that refuse what they were given (a model they cannot load) make it 2, as any other bad input.
 */
async function withWorkers(
  prepared: Prepared,
  runDir: string,
  work: (context: Context) => Promise<number>,
): Promise<number> {
  const { argv, config } = prepared;
  const bus = await Bus.listen({ port: config.options['launch.port'] });
  const launcher = new Launcher({
    bus,
    logDir: join(runDir, 'logs'),
    silenceMs: config.options['launch.silence_s'] * 1000,
    silenceReadyMs: config.options['launch.ready_s'] * 1000,
  });
  const stopper = listenForSignals(launcher, runDir);
  const progress = new Progress();
  let failLater: (error: Error) => void = () => {}; // the ledger is there before the workers
  const ledger = new Ledger(runDir, (error) => failLater(error));
  const event = (name: string, detail: Record<string, string | number>) => {
    progress.clear();
    ledger.record({ kind: 'event', name, detail });
    say(
      `${name}: ${Object.entries(detail)
        .map(([key, value]) => `${key} ${value}`)
        .join(', ')}`,
    );
  };
  const workers = openWorkers({ options: config.options, runDir, bus, launcher, event });
  failLater = workers.fail;
  let code = 1;
  try {
    code = await work({ ...prepared, runDir, bus, workers, ledger, stopper, progress });
  } catch (error) {
    progress.clear();
    if (error instanceof ConfigError && !stopper.hasTrained) code = refused(error);
    else if (launcher.refusals.length > 0)
      code = refused(new ConfigError(refusalLines(launcher.refusals, config.options)));
    else {
      console.error(`The run stopped: ${messageOf(error)}`);
      if (existsSync(join(runDir, 'checkpoints'))) {
        const resume = [...resumable(argv), '--resume', '--run.dir', runDir].join(' ');
        console.error(`Continue it with: npx tsx molt/loop.ts ${resume}`);
      }
    }
  } finally {
    workers.close();
    await launcher.stopAll(code === 2 ? 0 : STOP_GRACE_MS);
    await bus.close();
    try {
      ledger.close();
    } catch (error) {
      console.error(messageOf(error)); // of the disk that stopped the run
    }
    closeRunDir(runDir);
    // A resumed run keeps its directory, even one without a checkpoint: what was recorded there is not ours to remove.
    if (code === 2 && !config.options['run.resume'] && !process.env.MOLT_DEBUG) {
      discardRunDir(runDir);
      say(`Nothing was trained; ${runDir} is removed`);
    }
  }
  return code;
}

/** Refusals of workers, once each; what does not name its option is about the model. */
function refusalLines(refusals: readonly string[], options: Options): string[] {
  const model = `--actor.model_name_or_path ${options['actor.model_name_or_path']}`;
  return [...new Set(refusals)].map((line) => (line.startsWith('--') ? line : `${model}: ${line}`));
}

/**
 * The first signal asks to finish the step; until there is one to finish, and the second time, it ends everything. One
 * Ctrl-C in a terminal reaches us up to three times within milliseconds: from the terminal, and again through npm and tsx.
 */
function listenForSignals(launcher: Launcher, runDir: string): Stopper {
  const stopper: Stopper = { signal: null, hasSteps: false, hasTrained: false, onFirst: () => {} };
  let firstAt = 0;
  for (const signal of ['SIGINT', 'SIGTERM'] as const) {
    process.on(signal, () => {
      if (stopper.signal && performance.now() - firstAt < RELAYED_MS) return;
      if (stopper.signal || !stopper.hasSteps) {
        launcher.killAllNow();
        rmSync(join(runDir, 'controller.pid'), { force: true });
        process.exit(EXIT_CODES[signal]);
      }
      stopper.signal = signal;
      firstAt = performance.now();
      console.error(`\n${signal}: finishing the step, then saving; once more to stop at once`);
      stopper.onFirst();
    });
  }
  return stopper;
}

function say(line: string): void {
  console.log(line);
}

// ---- Prompts ----

interface Prompts {
  readonly stream: PromptStream;
  readonly heldOut: readonly Prompt[]; // empty = no evaluation; not measured yet
  readonly heldOutHash: string;
}

/** Everything is read and checked before any process starts. Null when there is a problem, which the finding tells. */
async function loadAllPrompts(options: Options): Promise<[Prompts | null, Finding[]]> {
  try {
    const prompts = await readAllPrompts(options);
    const text = `${prompts.stream.size} to train on, ${prompts.heldOut.length} held out`;
    return [prompts, [{ check: 'prompts', status: 'ok', text }]];
  } catch (error) {
    if (!(error instanceof ConfigError)) throw error;
    return [null, error.lines.map((text) => ({ check: 'prompts', status: 'problem', text }))];
  }
}

async function readAllPrompts(options: Options): Promise<Prompts> {
  const seed = options['train.seed'];
  const shuffle = options['data.shuffle'];
  const shared = {
    seed,
    inputKey: options['data.input_key'],
    labelKey: options['data.label_key'],
    toolsKey: options['data.tools_key'],
    python: options['launch.python'],
    silenceMs: options['data.silence_s'] * 1000,
    warn: (line: string) => console.error(line),
  };
  const problems: string[] = [];
  const load = (more: Pick<Parameters<typeof loadPrompts>[0], 'sources' | 'split' | 'maxSamples' | 'shuffle'>) =>
    loadPrompts({ ...shared, ...more }).catch((error: unknown): PromptSet => {
      if (!(error instanceof ConfigError)) throw error;
      problems.push(...error.lines);
      return { sources: [], sha256: '' };
    });
  const training = await load({
    sources: options['data.prompt_dataset'],
    split: 'train',
    maxSamples: options['data.max_samples'],
    shuffle,
  });
  const evaluated = await load({
    sources: options['eval.dataset'],
    split: 'heldout',
    maxSamples: options['eval.max_samples'],
    shuffle: true,
  });
  if (problems.length > 0) throw new ConfigError(problems);
  const heldOut = promptsOf(evaluated);
  const overlap = sharedPrompts(evaluated, training);
  if (overlap > 0) console.warn(`Warning: ${overlap} of ${heldOut.length} held-out prompts are also trained on`);
  const stream = new PromptStream(training, { seed, shuffle, weights: options['data.prompt_probs'] });
  return { stream, heldOut, heldOutHash: heldOut.length > 0 ? evaluated.sha256 : '' };
}

// ---- The loop ----

/** A prepared run with its workers. */
interface Context extends Prepared {
  readonly runDir: string;
  readonly bus: Bus;
  readonly workers: Workers;
  readonly ledger: Ledger;
  readonly stopper: Stopper;
  readonly progress: Progress;
}

async function train(args: Context): Promise<void> {
  const { runDir, from, bus, workers, ledger, stopper, progress } = args;
  const { options } = args.config;
  const { stream, heldOutHash } = args.prompts;
  const { trainer, generator, refit, dispatch, orFatal } = workers;
  const numSteps = options['train.num_steps'];
  const batchSize = options['train.batch_size'];
  const groupSize = options['rollout.n_samples_per_prompt'];
  const epochs = options['train.max_epochs'];
  const seed = options['train.seed'];

  const facts = await workers.ready;
  say(`Workers are ready: ${facts.startup}`);
  if (!facts.templateExact) say(`Warning (template): ${facts.templateNote}`);

  // Where to begin
  let step = 0;
  let dispatched = 0;
  if (options['run.resume']) {
    for (const line of from?.skipped ?? []) say(`Skipped an incomplete checkpoint: ${line}`);
    if (!from) say('No complete checkpoint: beginning again');
    const evaluated = from?.state.heldOutHash;
    if (evaluated && heldOutHash && evaluated !== heldOutHash)
      say('Changed since the run began: the held-out prompts, so scores before and after do not compare');
  }
  const metrics = new MetricsWriter(runDir, from?.state.step ?? 0);
  ledger.record({
    kind: 'meta',
    options: { ...options },
    dataHash: stream.position.sha256,
    resumedAt: from?.state.step ?? 0,
  });
  const maxPromptLen = options['data.max_prompt_len'];
  const promptLog = new PromptLog({ ledger, maxPromptLen, progress, say });
  let measured = 0;
  const filter = (split: Split): Filter => ({
    limit: maxPromptLen,
    measure: (prompts) => {
      measured += prompts.length;
      if (!stopper.hasSteps) progress.show(`measured ${measured} prompts`, 0); // many that do not fit take a while
      return measure(workers.tokenizer, prompts);
    },
    onDropped: (dropped) => promptLog.dropped(split, dropped),
  });
  if (maxPromptLen >= 0) stream.filter = filter('train');
  await orFatal(stream.ahead(batchSize)); // nothing that fits: say it now
  const heldOut =
    maxPromptLen >= 0 ? await orFatal(fitting(args.prompts.heldOut, filter('heldout'))) : args.prompts.heldOut;
  progress.clear();
  if (heldOut.length < args.prompts.heldOut.length) say(promptLog.summary('heldout', args.prompts.heldOut.length));
  refit.probes = await probeRows(workers.tokenizer, stream.first, facts.vocabSize, options['data.max_len']);
  if (from) {
    await orFatal(trainer.restore(join(from.path, 'trainer')));
    ({ step, dispatched } = from.state);
    await orFatal(refit.resumeAt(from.state.version));
    say(`Resumed at step ${step}, policy version ${refit.version}, from ${from.path}`);
  }
  const mismatchStops = options['rollout.mismatch_stop'] === 'on';
  say(await checkParity(refit, workers.dtype, mismatchStops));

  // Rollouts, for training and for evaluation alike
  const limits = {
    maxTurns: options['rollout.max_turns'],
    maxTokens: options['data.max_len'],
    deadlineMs: Math.round(options['rollout.deadline_s'] * 1000),
  };
  const sampling = (temperature: number, samplingSeed: number): Sampling => ({
    temperature,
    top_p: 1,
    top_k: 0,
    max_tokens: options['rollout.max_new_tokens'],
    seed: samplingSeed,
    stop: [],
    stop_token_ids: facts.stopTokenIds,
  });
  const buffer = new Buffer({
    batch: batchSize,
    groupSize,
    minMembers: groupSize > 1 ? 2 : 1,
    maxStaleness: options['train.max_staleness'],
  });
  const failures = new FailureWindow({
    maxRate: options['rollout.max_failure_rate'],
    agentPath: options['train.agent_path'],
    running: () => dispatch.runningGroups,
  });
  const drops = new Map<string, number>();
  let wake: () => void = () => {};

  /** Admit prompts while there is capacity. Every rollout that ends is booked and wakes the loop. */
  const admit = (isHeld = false) => {
    while ((isHeld ? buffer.heldCapacity : buffer.capacity) > 0) {
      const prompt = stream.next();
      promptLog.read++;
      const groupId = `g${dispatched++}`;
      buffer.admit(groupId, prompt, isHeld);
      ledger.record({
        kind: 'dispatched',
        groupId,
        source: prompt.source,
        epoch: prompt.epoch,
        index: prompt.index,
        version: refit.version,
      });
      for (let index = 0; index < groupSize; index++) {
        const rolloutSeed = seedOf(seed, 'train', groupId, index);
        const job: Job = {
          rolloutId: `${groupId}-${index}`,
          groupId,
          index,
          prompt,
          seed: rolloutSeed,
          sampling: sampling(options['rollout.temperature'], rolloutSeed),
          limits,
        };
        dispatch.run(job).then(book).catch(workers.fail);
      }
    }
  };
  const book = (rollout: Rollout) => {
    recordRollout(ledger, rollout);
    failures.add(rollout);
    const verdict = buffer.end(rollout);
    for (const lost of verdict?.lost ?? []) drops.set(lost.reason, (drops.get(lost.reason) ?? 0) + 1);
    if (verdict?.kind === 'dropped') {
      ledger.record({ kind: 'dropped', groupId: rollout.groupId, reason: verdict.reason });
      drops.set(verdict.reason, (drops.get(verdict.reason) ?? 0) + 1);
    }
    wake();
  };
  /** The next batch: whole groups, the first that finished. */
  const nextBatch = async (): Promise<readonly Group[]> => {
    while (!buffer.ready) {
      if (!stream.isAhead(buffer.capacity)) {
        await orFatal(stream.ahead(buffer.capacity));
        continue; // rollouts may have ended meanwhile
      }
      admit();
      failures.check();
      const { running, waiting } = buffer.counts;
      progress.show(`step ${step + 1}: ${waiting}/${batchSize} groups, ${running} running`, waiting / batchSize);
      await orFatal(
        new Promise<void>((done) => {
          wake = done;
        }),
      );
    }
    progress.clear();
    return buffer.take();
  };

  // Evaluation
  const evaluation = async (temperature: number, name: string): Promise<Evaluation> => {
    const result = await orFatal(
      evaluate({
        dispatch,
        prompts: heldOut,
        samplesPerPrompt: temperature === 0 ? 1 : options['eval.n_samples_per_prompt'],
        sampling: sampling(temperature, 0),
        seed: (p, s) => seedOf(seed, 'eval', p, s), // the same draws at every evaluation
        limits,
        samples: options['eval.show_samples'],
        name: `eval${step}${name}`,
        onRollout: (rollout, done, of) => {
          if (!stopper.hasTrained && !stopper.signal) failures.add(rollout);
          progress.show(`evaluation ${name}: ${done}/${of}`, done / of);
        },
      }),
    );
    progress.clear();
    return result;
  };
  const evaluateNow = async (withGreedy: boolean): Promise<void> => {
    if (heldOut.length === 0) return;
    const begun = performance.now();
    const sampled = await evaluation(options['eval.temperature'], 'sampled');
    const greedy = withGreedy && options['eval.greedy'] ? await evaluation(0, 'greedy') : null;
    generator.takeCounts(); // not of the next step
    if (stopper.signal) return; // cut short, so the numbers mean nothing
    const constant = constantBest(heldOut.map((prompt) => prompt.label));
    metrics.write({
      step,
      policy_version: refit.version,
      eval_reward_mean: sampled.rewardMean,
      eval_pass_at_k: sampled.passAtK,
      eval_num_prompts: sampled.prompts,
      eval_dropped_prompts: args.prompts.heldOut.length - heldOut.length,
      eval_unjudged: sampled.unjudged,
      eval_constant_best: constant,
      time_eval_s: (performance.now() - begun) / 1000,
      ...(greedy && { eval_greedy_reward_mean: greedy.rewardMean }),
    });
    ledger.record({ kind: 'eval', step, version: refit.version, reward: sampled.rewardMean });
    const parts = [`sampled ${sampled.rewardMean.toFixed(3)}`];
    if (greedy) parts.push(`greedy ${greedy.rewardMean.toFixed(3)}`);
    say(
      `Held-out at step ${step}: ${parts.join(', ')} (${sampled.prompts} prompts; best constant answer ${constant.toFixed(3)})`,
    );
    for (const line of await orFatal(sampleLines(workers.tokenizer, sampled.samples, facts.stopTokenIds))) say(line);
  };
  /** Where a resumed run goes on: before prompts that were given out for a step that is not done. */
  let goOn = { data: stream.position, dispatched };
  const checkpoint = async () => {
    const path = await orFatal(
      saveCheckpoint({
        runDir,
        trainer,
        state: { step, version: refit.version, heldOutHash, ...goOn },
        keep: options['ckpt.max_num'],
        exportHf: options['ckpt.save_hf'],
      }),
    );
    savedAt = step;
    ledger.record({ kind: 'checkpoint', step, path });
  };
  let savedAt = step;
  stopper.hasSteps = true;
  stopper.onFirst = () => dispatch.cancel((job) => job.groupId.startsWith('eval'), 'cancelled');

  if (!from && options['eval.eval_at_start']) {
    await evaluateNow(true);
    failures.check();
  }

  // Steps
  const lag = monitorEventLoopDelay({ resolution: 10 });
  lag.enable();
  const planOptions = {
    numRanks: workers.numRanks,
    microBatchSize: options['train.micro_batch_size'],
    maxTokens: options['train.max_tokens_per_gpu'],
    packed: options['fsdp.packing_samples'],
  };
  const health = new Health({ dtype: workers.dtype, stop: mismatchStops, say });
  generator.takeCounts();
  trainer.takeBusy();
  while (step < numSteps && !stopper.signal) {
    const begun = performance.now();
    const groups = await nextBatch();
    const generated = performance.now();
    const promptMetrics = promptLog.takeStep();
    goOn = { data: stream.position, dispatched };
    // The next batch begins while this one is trained: agents make their prompts, which are rendered. Sampling waits for
    // the refit.
    const isEvaluated = options['eval.steps'] > 0 && (step + 1) % options['eval.steps'] === 0;
    if (step + 1 < numSteps && !isEvaluated && !stopper.signal && stream.isAhead(batchSize)) {
      generator.hold();
      admit(true);
    }
    stream.ahead(2 * batchSize).catch(() => {}); // meanwhile, for what comes then, which comes upon the error again

    // Credit
    const { samples, metrics: creditMetrics } = credit(groups, {
      estimator: options['algo.advantage.estimator'],
      gamma: options['algo.advantage.gamma'],
      whiten: !options['algo.advantage.no_whiten'],
      clipRange: options['reward.clip_range'],
    });
    const denominator = samples.reduce((n, sample) => n + sum(sample.trajectory.lossMask), 0);
    const lr = learningRate({
      step,
      steps: numSteps,
      lr: options['actor.adam.lr'],
      schedule: options['actor.lr_scheduler'],
      warmupRatio: options['actor.lr_warmup_ratio'],
      minRatio: options['actor.min_lr_ratio'],
    });
    const version = refit.version;
    // A row without credit has no gradient. It stays in the denominator, so leaving it out changes no number.
    const credited = samples.filter((sample) => sample.advantages.some((advantage) => advantage !== 0));
    // Where no row has any, one group stands for all: the gradient is 0, and its numbers say how engine and trainer agree.
    const rows = credited.length > 0 ? credited : samples.slice(0, groupSize);
    ledger.record({ kind: 'batch', step: step + 1, version, groups: groups.map((g) => g.groupId), denominator, lr });

    // Train
    progress.show(`step ${step + 1}: training`, 1);
    const plan = planBatch(
      rows.map((sample) => sample.trajectory.ids.length),
      planOptions,
    );
    const trainStart = performance.now();
    // With several optimizer steps on one batch the ratio is taken to where the first one began.
    const old = epochs > 1 ? await orFatal(trainer.oldLogprobs(rows, plan)) : null;
    let result: StepResult | null = null;
    for (let epoch = 0; epoch < epochs; epoch++) {
      const next = await orFatal(trainer.step({ step: step + 1, version, samples: rows, plan, denominator, lr, old }));
      // How far engine and trainer are apart is what the first pass saw; everything else is of the last.
      result = result ? withMismatchOf(result, next) : next;
    }
    invariant(result, 'train.max_epochs is at least 1');
    buffer.trained();
    stopper.hasTrained = true;
    const trained = performance.now();

    // Refit
    const times = await orFatal(refit.push());
    ledger.record({ kind: 'refit', version: refit.version, bytes: times.bytes, verified: times.verified });
    const refitted = performance.now();
    step++;

    // Report
    const line = {
      step,
      policy_version: refit.version,
      ...batchMetrics(groups, version),
      ...creditMetrics,
      ...stepMetrics(result),
      ...generatorMetrics(generator, (performance.now() - begun) / 1000),
      trainer_idle_s: Math.max(0, (performance.now() - begun) / 1000 - trainer.takeBusy()),
      tokens_trained: denominator,
      tokens_credited: credited.reduce((n, sample) => n + sum(sample.trajectory.lossMask), 0),
      lr,
      time_generation_s: (generated - begun) / 1000,
      time_train_s: (trained - trainStart) / 1000,
      time_refit_s: (refitted - trained) / 1000,
      time_refit_paused_s: times.pauseMs / 1000,
      ...(times.verified !== null && { refit_verified_max: times.verified }),
      time_step_s: (performance.now() - begun) / 1000,
      loop_lag_ms_max: Math.max(0, lag.max / 1e6 - 10),
      restarts: generator.restarts + dispatch.restarts,
      retries: bus.counters.retries ?? 0,
      dummy_micro_batches: plan.numDummies,
      ...promptMetrics,
      ...Object.fromEntries([...drops].map(([reason, count]) => [`dropped_${reason}`, count])),
    };
    generator.release();
    lag.reset();
    drops.clear();
    progress.clear();
    metrics.write(line);
    ledger.record({ kind: 'step', step });
    say(formatStep(line, numSteps));
    if (health.check(line) === 'flat') {
      const samples = groups.slice(0, 2).map(({ prompt, rollouts }) => ({ prompt, rollout: rollouts[0] as Rollout }));
      say('What was said in two of its rollouts:');
      for (const text of await orFatal(sampleLines(workers.tokenizer, samples, facts.stopTokenIds))) say(text);
    }

    if (options['ckpt.save_steps'] > 0 && step % options['ckpt.save_steps'] === 0) await checkpoint();
    if (options['eval.steps'] > 0 && step % options['eval.steps'] === 0 && step < numSteps && !stopper.signal)
      await evaluateNow(false);
  }

  // The end
  if (savedAt !== step && (stopper.signal || !options['ckpt.disable_final_save'])) await checkpoint();
  if (!stopper.signal) await evaluateNow(true);
  if (promptLog.hasDropped) say(promptLog.summary('train', promptLog.totalRead));
  say(
    stopper.signal
      ? `Stopped after step ${step}, saved; the same command with --resume --run.dir ${runDir} goes on`
      : `Done: ${step} steps, policy version ${refit.version}`,
  );
  say(`Run directory ${runDir}`);
}

// ---- Small things ----

/** The length of each prompt as the chat template renders it, or why it cannot. */
async function measure(tokenizer: Worker, prompts: readonly Pick<Prompt, 'input' | 'tools'>[]): Promise<Length[]> {
  const { fields, frames } = await tokenizer.peer.request('render', { items: prompts.map(renderItem) });
  return fields.errors.map((error, i) => error ?? (frames.lengths[i] as number));
}

function renderItem({ input, tools }: Pick<Prompt, 'input' | 'tools'>) {
  const messages = typeof input === 'string' ? [{ role: 'user', content: input }] : input;
  return { messages, tools, template_kwargs: {}, add_generation_prompt: true };
}

/** Rows for parity: a real prompt where the template takes it, and ids that visit the whole vocabulary. */
async function probeRows(tokenizer: Worker, prompt: Prompt, vocabSize: number, maxLen: number): Promise<Int32Array[]> {
  const { frames } = await tokenizer.peer.request('render', { items: [renderItem({ ...prompt, tools: null })] });
  const spread = Int32Array.from({ length: PROBE_IDS }, (_, k) => (k * 7919 + 13) % vocabSize);
  return [frames.ids.slice(0, maxLen), spread.slice(0, maxLen)].filter((row) => row.length > 1);
}

/** What was said in some rollouts, one line each. Stop tokens are left out, other markup of the policy is shown. */
async function sampleLines(
  tokenizer: Worker,
  samples: Evaluation['samples'],
  stopIds: readonly number[],
): Promise<string[]> {
  const rows = samples.map(({ rollout }) => saidRows(rollout, new Set(stopIds)));
  const decode = async (policy: boolean) => {
    const ids = rows.flat().filter((row) => row.policy === policy);
    if (ids.length === 0) return [];
    const frames = flatRows(ids.map((row) => row.ids));
    return [...(await tokenizer.peer.request('decode', { skip_special: !policy }, frames)).fields.texts];
  };
  const texts = { true: await decode(true), false: await decode(false) };
  return samples.map(({ prompt, rollout }, i) => {
    const said = (rows[i] ?? []).map(({ policy }) => ({ policy, text: texts[`${policy}`].shift() ?? '' }));
    return formatSample(prompt, rollout, said);
  });
}

function messageOf(error: unknown): string {
  if (!(error instanceof Error)) return String(error);
  return (process.env.MOLT_DEBUG && error.stack) || error.message;
}

/** The command line without what names or resumes a run directory; words with spaces quoted. */
function resumable(argv: readonly string[]): string[] {
  const words = argv.filter(
    (word, i) => !/^--(run\.dir|run\.resume|resume)(=|$)/.test(word) && argv[i - 1] !== '--run.dir',
  );
  return words.map((word) => (/^[\w./:=,-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`));
}

/** A seed below 2^53 that depends on everything it is given. */
function seedOf(...parts: readonly (string | number)[]): number {
  const digest = createHash('sha256').update(parts.join('/')).digest();
  return Number(digest.readBigUInt64LE() >> 11n);
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  process.exit(await main(process.argv.slice(2)));
}
