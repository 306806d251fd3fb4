/**
 * The story, and the entry point:  npx tsx molt/loop.ts RECIPE [--option value ...]
 *
 *   prompts -> admit -> rollout -> buffer -> batch -> credit -> train -> refit -> (evaluate, checkpoint) -> again
 *
 * | stage      | consumes              | produces                 | waits for                        |
 * |------------|-----------------------|--------------------------|----------------------------------|
 * | admit      | prompts (data.ts)     | groups of N rollouts     | capacity (buffer.ts)             |
 * | rollout    | prompt, policy tokens | reward and trajectories  | runners, tokenizer, engines      |
 * | batch      | finished groups       | train.batch_size groups  | that many groups                 |
 * | credit     | rewards               | advantages per token     | nothing                          |
 * | train      | samples               | one optimizer step       | every trainer rank               |
 * | refit      | trainer weights       | policy version + 1       | every engine                     |
 *
 * This version is synchronous (max_staleness 0): what is trained at version V was sampled by version V.
 *
 * Exit codes: 0 done; 1 failed, with the cause on the terminal; 2 bad options, nothing was started; 130 and 143
 * stopped by SIGINT or SIGTERM: the step was finished and a checkpoint saved. A second signal stops at once and leaves
 * the last checkpoint to resume from.
 */
import { createHash } from 'node:crypto';
import { existsSync, mkdirSync, readdirSync, readFileSync, realpathSync, rmSync, writeFileSync } from 'node:fs';
import { basename, join, resolve } from 'node:path';
import { monitorEventLoopDelay } from 'node:perf_hooks';
import { fileURLToPath } from 'node:url';
import { loadAgent } from './agent.ts';
import { Buffer, isTrainable } from './buffer.ts';
import { Bus } from './bus.ts';
import { type Checkpoint, newestCheckpoint, saveCheckpoint, writeSynced } from './checkpoint.ts';
import type { Config, Options } from './config.ts';
import { ConfigError, changedOptions, configJson, formatConfig, HelpRequested, loadConfig } from './config.ts';
import { loadPrompts, PromptStream, promptsOf, sharedInputs } from './data.ts';
import type { Job } from './dispatch.ts';
import { credit, standardDeviation } from './estimators.ts';
import { constantBest, type Evaluation, evaluate } from './evaluate.ts';
import type { Generator } from './generator.ts';
import { Launcher, type Worker } from './launch.ts';
import { Ledger } from './ledger.ts';
import { formatStep, MetricsWriter, Progress } from './metrics.ts';
import { planBatch } from './packing.ts';
import type { Refit } from './refit.ts';
import { learningRate, type StepResult } from './trainer.ts';
import { type Group, invariant, type Prompt, type Rollout, type Sampling } from './types.ts';
import { openWorkers, type Workers } from './workers.ts';

/** Parity bounds (DESIGN, invariant 3.4): mean |dlogp| of a step or of the probes at the start. */
const MISMATCH_BOUND = { float32: 1e-3, bfloat16: 0.1 } as const;
const MISMATCH_STEPS = 3; // above the bound this often running = stop
const FAILURE_WINDOW = 64; // rollouts over which the failure rate is taken
const SKIPPED_STEPS = 3; // non-finite steps running = stop
const RELAYED_MS = 500; // a signal this soon after the first is the same Ctrl-C
const STOP_GRACE_MS = 10_000;
const PROBE_IDS = 48;

/** What a signal asked for. The first asks to finish the step; the second never returns. */
interface Stopper {
  signal: 'SIGINT' | 'SIGTERM' | null;
  hasSteps: boolean; // there is something to finish and to save
  onFirst: () => void;
}
const EXIT_CODES = { SIGINT: 130, SIGTERM: 143 } as const;

// ---- Entry ----

export async function main(argv: readonly string[]): Promise<number> {
  const say = (line: string) => console.log(line);
  let config: Config;
  let prompts: Prompts;
  let from: Checkpoint | null = null;
  let runDir: string;
  try {
    config = await loadConfig(argv);
    say(formatConfig(config));
    await loadAgent(config.options['train.agent_path']).catch((error: Error) => {
      throw new ConfigError([`--train.agent_path: ${error.message}`]);
    });
    await config.recipe.prepare?.(config.options, say);
    checkModel(config.options);
    prompts = await loadAllPrompts(config.options);
    if (config.options['run.resume']) {
      from = newestCheckpoint(config.options['run.dir']);
      if (from) prompts.stream.restore(from.state.data);
    }
    runDir = openRunDir(config);
  } catch (error) {
    if (error instanceof HelpRequested) {
      console.log(error.text);
      return 0;
    }
    const lines = error instanceof ConfigError ? error.lines : [`Cannot prepare the run: ${messageOf(error)}`];
    for (const line of lines) console.error(line);
    return 2;
  }
  say(`Run directory ${runDir}; starting workers, their logs are in logs/`);
  const bus = await Bus.listen();
  const launcher = new Launcher({
    bus,
    logDir: join(runDir, 'logs'),
    silenceMs: config.options['launch.silence_s'] * 1000,
    silenceReadyMs: config.options['launch.ready_s'] * 1000,
  });
  const ledger = new Ledger(runDir);
  const progress = new Progress();
  const event = (name: string, detail: Record<string, string | number>) => {
    progress.clear();
    ledger.record({ kind: 'event', name, detail });
    say(
      `${name}: ${Object.entries(detail)
        .map(([key, value]) => `${key} ${value}`)
        .join(', ')}`,
    );
  };
  const stopper = listenForSignals(launcher, runDir);
  const workers = openWorkers({ options: config.options, runDir, bus, launcher, event });
  try {
    await train({ config, prompts, from, runDir, bus, workers, ledger, stopper, progress, say });
    return stopper.signal ? EXIT_CODES[stopper.signal] : 0;
  } catch (error) {
    progress.clear();
    console.error(`The run stopped: ${messageOf(error)}`);
    console.error(
      `Continue it with: npx tsx molt/loop.ts ${[...resumable(argv), '--resume', '--run.dir', runDir].join(' ')}`,
    );
    return 1;
  } finally {
    workers.close();
    await launcher.stopAll(STOP_GRACE_MS);
    await bus.close();
    ledger.close();
    for (const name of ['weights', 'controller.pid', `rendezvous-${process.pid}`]) {
      rmSync(join(runDir, name), { recursive: true, force: true }); // of use to running workers only
    }
  }
}

/**
 * The first signal asks to finish the step; until there is one to finish, and the second time, it ends everything. One
 * Ctrl-C in a terminal reaches us up to three times within milliseconds: from the terminal, and again through npm and tsx.
 */
function listenForSignals(launcher: Launcher, runDir: string): Stopper {
  const stopper: Stopper = { signal: null, hasSteps: false, onFirst: () => {} };
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

/** Make or reopen the directory of the run, with config.json and controller.pid in it. Throws ConfigError. */
function openRunDir(config: Config): string {
  const { options } = config;
  let dir = options['run.dir'];
  try {
    if (dir === '') dir = newNumberedDir(basename(config.recipePath).replace(/\.[cm]?[jt]s$/, ''));
    mkdirSync(join(dir, 'logs'), { recursive: true });
    const pidFile = join(dir, 'controller.pid');
    if (existsSync(pidFile) && isAlive(Number(readFileSync(pidFile, 'utf8')))) {
      throw new ConfigError([`--run.dir ${dir}: in use by process ${readFileSync(pidFile, 'utf8').trim()}`]);
    }
    if (options['run.resume']) {
      const saved = JSON.parse(readFileSync(join(dir, 'config.json'), 'utf8'));
      for (const line of changedOptions(saved, config)) console.log(`Changed since the run began: ${line}`);
    }
    writeSynced(join(dir, 'config.json'), configJson(config));
    writeFileSync(pidFile, `${process.pid}\n`);
  } catch (error) {
    if (error instanceof ConfigError) throw error;
    throw new ConfigError([`--run.dir ${dir}: cannot be used: ${(error as Error).message}`]);
  }
  return resolve(dir);
}

function newNumberedDir(recipe: string): string {
  mkdirSync('runs', { recursive: true });
  const taken = readdirSync('runs').flatMap((name) =>
    name.startsWith(`${recipe}-`) ? [Number(name.slice(recipe.length + 1))] : [],
  );
  for (let n = Math.max(0, ...taken.filter(Number.isInteger)) + 1; ; n++) {
    const dir = join('runs', `${recipe}-${String(n).padStart(3, '0')}`);
    try {
      mkdirSync(dir); // fails when another run has just taken the number
      return dir;
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== 'EEXIST') throw error;
    }
  }
}

function isAlive(pid: number): boolean {
  if (!Number.isInteger(pid) || pid <= 0 || pid === process.pid) return false;
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === 'EPERM';
  }
}

// ---- Model and prompts ----

/** What every model directory has; whether it loads, the workers tell. Throws ConfigError. */
function checkModel(options: Options): void {
  const kinds = [options['engine.kind'], options['trainer.kind'], options['tokenizer.kind']];
  if (kinds.every((kind) => kind === 'simulated')) return;
  const dir = options['actor.model_name_or_path'];
  const names = existsSync(dir) ? readdirSync(dir) : null;
  const problem = (text: string) => new ConfigError([`--actor.model_name_or_path ${dir}: ${text}`]);
  if (names === null) throw problem('no such directory');
  const wanted: [string, RegExp][] = [
    ['config.json', /^config\.json$/],
    ['tokenizer.json', /^tokenizer\.json$/],
    ['*.safetensors', /\.safetensors$/],
  ];
  const missing = wanted.filter(([, pattern]) => !names.some((name) => pattern.test(name))).map(([name]) => name);
  if (missing.length > 0)
    throw problem(`has no ${missing.join(', no ')}: a directory in Hugging Face format is needed`);
}

interface Prompts {
  readonly stream: PromptStream;
  readonly heldOut: readonly Prompt[]; // empty = no evaluation
  readonly example: Prompt; // for probes
}

/** Everything is read and checked before any process starts. Throws ConfigError. */
async function loadAllPrompts(options: Options): Promise<Prompts> {
  const seed = options['train.seed'];
  const shared = {
    seed,
    inputKey: options['data.input_key'],
    labelKey: options['data.label_key'],
    toolsKey: options['data.tools_key'],
  };
  const shuffle = options['data.shuffle'];
  const training = await loadPrompts({
    ...shared,
    path: options['data.prompt_dataset'],
    split: 'train',
    maxSamples: options['data.max_samples'],
    shuffle,
  });
  const stream = new PromptStream(training, { seed, shuffle });
  const example = promptsOf(training)[0] as Prompt; // loadPrompts refuses empty sources
  if (options['eval.dataset'] === '') return { stream, heldOut: [], example };
  const heldOut = await loadPrompts({
    ...shared,
    path: options['eval.dataset'],
    split: 'heldout',
    maxSamples: options['eval.max_samples'],
    shuffle: true,
  });
  const overlap = sharedInputs(heldOut, training);
  if (overlap > 0) console.warn(`Warning: ${overlap} of ${heldOut.items.length} held-out prompts are also trained on`);
  return { stream, heldOut: promptsOf(heldOut), example };
}

// ---- The loop ----

interface Train {
  readonly config: Config;
  readonly prompts: Prompts;
  readonly from: Checkpoint | null;
  readonly runDir: string;
  readonly bus: Bus;
  readonly workers: Workers;
  readonly ledger: Ledger;
  readonly stopper: Stopper;
  readonly progress: Progress;
  readonly say: (line: string) => void;
}

async function train(args: Train): Promise<void> {
  const { runDir, from, bus, workers, ledger, stopper, progress, say } = args;
  const { options } = args.config;
  const { stream, heldOut, example } = args.prompts;
  const { trainer, generator, refit, dispatch, orFatal } = workers;
  const numSteps = options['train.num_steps'];
  const batchSize = options['train.batch_size'];
  const groupSize = options['rollout.n_samples_per_prompt'];
  const epochs = options['train.max_epochs'];
  const seed = options['train.seed'];

  const facts = await workers.ready;
  say(`Workers are ready: ${facts.startup}`);
  if (facts.templateNote !== null) say(`Chat template: ${facts.templateNote}`);

  // Where to begin
  let step = 0;
  let dispatched = 0;
  if (options['run.resume']) {
    for (const line of from?.skipped ?? []) say(`Skipped an incomplete checkpoint: ${line}`);
    if (!from) say('No complete checkpoint: beginning again');
  }
  const metrics = new MetricsWriter(runDir, from?.state.step ?? 0);
  ledger.record({
    kind: 'meta',
    options: { ...options },
    dataHash: stream.position.sha256,
    resumedAt: from?.state.step ?? 0,
  });
  refit.probes = await probeRows(workers.tokenizer, example, facts.vocabSize, options['data.max_len']);
  if (from) {
    await orFatal(trainer.restore(join(from.path, 'trainer')));
    ({ step, dispatched } = from.state);
    await orFatal(refit.resumeAt(from.state.version));
    say(`Resumed at step ${step}, policy version ${refit.version}, from ${from.path}`);
  }
  await checkParity(refit, workers.dtype, options['rollout.mismatch_stop'] === 'on', say);

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
  const failures = new FailureWindow(options['rollout.max_failure_rate']);
  const drops = new Map<string, number>();
  let wake: () => void = () => {};

  /** Admit prompts while there is capacity. Every rollout that ends is booked and wakes the loop. */
  const admit = () => {
    while (buffer.capacity > 0) {
      const prompt = stream.next();
      const groupId = `g${dispatched++}`;
      buffer.admit(groupId, prompt);
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
        name: `eval${step}${name}`,
        onRollout: (done, of) => progress.show(`evaluation ${name}: ${done}/${of}`, done / of),
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
  };
  const checkpoint = async () => {
    const path = await orFatal(
      saveCheckpoint({
        runDir,
        trainer,
        state: { step, version: refit.version, data: stream.position, dispatched },
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

  if (!from && options['eval.eval_at_start']) await evaluateNow(true);

  // Steps
  const lag = monitorEventLoopDelay({ resolution: 10 });
  lag.enable();
  const planOptions = {
    numRanks: workers.numRanks,
    microBatchSize: options['train.micro_batch_size'],
    maxTokens: options['train.max_tokens_per_gpu'],
    packed: options['fsdp.packing_samples'],
  };
  const health = { mismatched: 0, skipped: 0 };
  generator.takeCounts();
  trainer.takeBusy();
  while (step < numSteps && !stopper.signal) {
    const begun = performance.now();
    const groups = await nextBatch();
    const generated = performance.now();

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
      ...Object.fromEntries([...drops].map(([reason, count]) => [`dropped_${reason}`, count])),
    };
    lag.reset();
    drops.clear();
    progress.clear();
    metrics.write(line);
    ledger.record({ kind: 'step', step });
    say(formatStep(line, numSteps));
    checkHealth(health, line, MISMATCH_BOUND[workers.dtype], options['rollout.mismatch_stop'] === 'on');

    if (options['ckpt.save_steps'] > 0 && step % options['ckpt.save_steps'] === 0) await checkpoint();
    if (options['eval.steps'] > 0 && step % options['eval.steps'] === 0 && step < numSteps && !stopper.signal)
      await evaluateNow(false);
  }

  // The end
  if (savedAt !== step && (stopper.signal || !options['ckpt.disable_final_save'])) await checkpoint();
  if (!stopper.signal) await evaluateNow(true);
  say(stopper.signal ? `Stopped after step ${step}` : `Done: ${step} steps, policy version ${refit.version}`);
  say(`Run directory ${runDir}`);
}

// ---- What a step reports ----

/** What the rollouts of a batch were like. Means are over rollouts, so a rollout in many pieces counts once. */
function batchMetrics(groups: readonly Group[], version: number): Record<string, number> {
  const rollouts = groups.flatMap((group) => group.rollouts);
  const rewards = rollouts.map((rollout) => rollout.reward ?? 0);
  let oldest = version;
  let responseTokens = 0;
  for (const { trajectories } of rollouts) {
    for (const { versions, lossMask } of trajectories) {
      for (let k = 0; k < versions.length; k++) {
        if (!lossMask[k]) continue;
        responseTokens++;
        oldest = Math.min(oldest, versions[k] as number);
      }
    }
  }
  const n = rollouts.length;
  return {
    groups: groups.length,
    rollouts: n,
    reward_mean: sum(rewards) / n,
    reward_std: standardDeviation(rewards),
    turns_mean: sum(rollouts.map((r) => r.turns)) / n,
    response_tokens_mean: responseTokens / n,
    truncated_ratio: rollouts.filter((r) => r.truncated).length / n,
    staleness_max: version - oldest,
    ...infoMeans(rollouts),
  };
}

/** Numbers of the environment: the mean over the rollouts that gave one. */
function infoMeans(rollouts: readonly Rollout[]): Record<string, number> {
  const values = new Map<string, number[]>();
  for (const { info } of rollouts) {
    for (const [key, value] of Object.entries(info)) values.set(key, [...(values.get(key) ?? []), value]);
  }
  return Object.fromEntries([...values].map(([key, list]) => [`info_${key}`, sum(list) / list.length]));
}

/** The trainer's sums over the tokens it was sent become means here, once. */
function stepMetrics({ sums, maxima }: StepResult): Record<string, number> {
  const perToken = (key: string) => (sums[key] ?? 0) / (sums.tokens ?? 0);
  return {
    loss: sums.loss ?? 0,
    tokens_credited: sums.tokens ?? 0,
    grad_norm: maxima.grad_norm ?? 0,
    logprob_mismatch_mean: perToken('mismatch_abs'),
    logprob_mismatch_max: maxima.mismatch_abs ?? 0,
    logprob_mismatch_k3: perToken('mismatch_k3'),
    entropy: perToken('entropy'),
    clip_ratio: perToken('clipped'),
    is_filter_ratio: perToken('is_filtered'),
    skipped: maxima.skipped ?? 0,
  };
}

function withMismatchOf(first: StepResult, last: StepResult): StepResult {
  const only = (values: StepResult['sums']) =>
    Object.fromEntries(Object.entries(values).filter(([key]) => key.startsWith('mismatch')));
  return { sums: { ...last.sums, ...only(first.sums) }, maxima: { ...last.maxima, ...only(first.maxima) } };
}

function generatorMetrics(generator: Generator, stepSeconds: number): Record<string, number> {
  const counts = generator.takeCounts();
  return {
    tokens_generated: counts.tokens,
    cached_token_ratio: counts.promptTokens > 0 ? counts.cachedTokens / counts.promptTokens : 0,
    engine_idle_s: Math.max(0, stepSeconds - counts.busy_s),
  };
}

function recordRollout(ledger: Ledger, rollout: Rollout): void {
  const versions = rollout.trajectories.flatMap((t) =>
    t.spans.filter((s) => s.source === 'policy').map((s) => s.version),
  );
  ledger.record({
    kind: 'finished',
    rolloutId: rollout.rolloutId,
    groupId: rollout.groupId,
    attempt: rollout.attempt,
    reason: rollout.reason,
    detail: rollout.detail,
    reward: rollout.reward,
    turns: rollout.turns,
    tokens: rollout.trajectories.reduce((n, t) => n + sum(t.lossMask), 0),
    versions: versions.length > 0 ? [Math.min(...versions), Math.max(...versions)] : [],
  });
}

// ---- What stops a run ----

/** Stop when too many of the recent rollouts were judged by nobody, with the commonest cause. */
class FailureWindow {
  readonly #maxRate: number;
  #recent: { failed: boolean; cause: string }[] = [];
  constructor(maxRate: number) {
    this.#maxRate = maxRate;
  }
  add(rollout: Rollout): void {
    const failed = !isTrainable(rollout);
    this.#recent.push({ failed, cause: `${rollout.reason}${rollout.detail ? `: ${rollout.detail}` : ''}` });
    if (this.#recent.length > FAILURE_WINDOW) this.#recent.shift();
  }
  check(): void {
    const failed = this.#recent.filter((r) => r.failed);
    if (this.#recent.length < FAILURE_WINDOW || failed.length / this.#recent.length <= this.#maxRate) return;
    const causes = new Map<string, number>();
    for (const { cause } of failed) causes.set(cause, (causes.get(cause) ?? 0) + 1);
    const [cause, times] = [...causes].sort((a, b) => b[1] - a[1])[0] as [string, number];
    throw new Error(
      `${failed.length} of the last ${this.#recent.length} rollouts failed, more than rollout.max_failure_rate ${this.#maxRate} allows. Commonest cause (${times} times):\n${cause}`,
    );
  }
}

function checkHealth(
  health: { mismatched: number; skipped: number },
  line: Readonly<Record<string, number>>,
  bound: number,
  stop: boolean,
): void {
  const mismatch = line.logprob_mismatch_mean ?? 0;
  health.mismatched = mismatch <= bound ? 0 : health.mismatched + 1; // NaN counts as above
  if (stop && health.mismatched >= MISMATCH_STEPS) {
    throw new Error(
      `Engine and trainer disagree: mean |dlogp| ${mismatch.toExponential(1)} is above ${bound} on ${MISMATCH_STEPS} steps running (--rollout.mismatch_stop off goes on)`,
    );
  }
  health.skipped = line.skipped ? health.skipped + 1 : 0;
  if (health.skipped >= SKIPPED_STEPS)
    throw new Error(`Loss or gradient was not finite on ${SKIPPED_STEPS} steps running`);
}

async function checkParity(
  refit: Refit,
  dtype: keyof typeof MISMATCH_BOUND,
  stop: boolean,
  say: (line: string) => void,
): Promise<void> {
  const { mean, max } = await refit.parity();
  say(
    `Parity of engine and trainer at version ${refit.version}: mean |dlogp| ${mean.toExponential(1)}, max ${max.toExponential(1)}`,
  );
  if (stop && !(mean <= MISMATCH_BOUND[dtype])) {
    throw new Error(
      `Engine and trainer do not agree on the model: mean |dlogp| ${mean}, at most ${MISMATCH_BOUND[dtype]} in ${dtype} (--rollout.mismatch_stop off goes on)`,
    );
  }
}

// ---- Small things ----

/** Rows for parity: a real prompt where the template takes it, and ids that visit the whole vocabulary. */
async function probeRows(tokenizer: Worker, prompt: Prompt, vocabSize: number, maxLen: number): Promise<Int32Array[]> {
  const { input } = prompt;
  const messages = typeof input === 'string' ? [{ role: 'user', content: input }] : input;
  const { frames } = await tokenizer.peer.request('render', {
    items: [{ messages, tools: null, template_kwargs: {}, add_generation_prompt: true }],
  });
  const spread = Int32Array.from({ length: PROBE_IDS }, (_, k) => (k * 7919 + 13) % vocabSize);
  return [frames.ids.slice(0, maxLen), spread.slice(0, maxLen)].filter((row) => row.length > 1);
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

function sum(values: ArrayLike<number>): number {
  let total = 0;
  for (let i = 0; i < values.length; i++) total += values[i] as number;
  return total;
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  process.exit(await main(process.argv.slice(2)));
}
