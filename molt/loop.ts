/**
 * The story, and the entry point:  npx tsx molt/loop.ts RECIPE [--option value ...]
 *
 *   prompts -> admit -> rollout -> buffer -> batch -> credit -> train -> refit -> (evaluate, checkpoint) -> again
 *
 * | stage      | consumes              | produces                 | waits for                        |
 * |------------|-----------------------|--------------------------|----------------------------------|
 * | admit      | prompts (data.ts)     | groups of N rollouts     | capacity (buffer.ts), lengths    |
 * | rollout    | prompt, policy tokens | reward and trajectories  | runners, tokenizer, engines      |
 * | batch      | finished groups       | train.batch_size groups  | that many groups, and all due    |
 * | credit     | rewards               | advantages per token     | nothing                          |
 * | train      | samples               | one optimizer step       | the ledger, every trainer rank   |
 * | refit      | trainer weights       | policy version + 1       | every engine                     |
 *
 * Admission and rollouts go on while a batch is trained (pool.ts), as far as train.max_staleness lets them; 0 is the
 * synchronous run, in which what is trained at version V was sampled by version V. Requests live across a refit with
 * train.partial_rollout_enable; without it the pool drains first.
 *
 * Exit codes: 0 done; 1 failed, with the cause on the terminal; 2 bad input (options, data, model, agent, environment):
 * nothing was trained; 130 and 143 stopped by SIGINT or SIGTERM: the step was finished and a checkpoint saved. A second
 * signal stops at once. Whatever the end, `--resume` goes on: rollouts that finished are in the ledger.
 */
import { createHash } from 'node:crypto';
import { realpathSync } from 'node:fs';
import { join } from 'node:path';
import { monitorEventLoopDelay } from 'node:perf_hooks';
import { fileURLToPath } from 'node:url';
import { type Batch, batchRecord, makeBatch, trainBatch } from './batch.ts';
import { Buffer } from './buffer.ts';
import { newestCheckpoint, oldestCheckpointStep, saveCheckpoint } from './checkpoint.ts';
import { type Filter, fitting, type Length } from './data.ts';
import type { Job } from './dispatch.ts';
import { constantBest, type Evaluation, evaluate, formatSample, saidRows } from './evaluate.ts';
import { checkParity, FailureWindow, Health } from './health.ts';
import { type History, readBatch, readHistory } from './history.ts';
import { readLedger } from './ledger.ts';
import { formatStep, MetricsWriter } from './metrics.ts';
import { Pool } from './pool.ts';
import type { Declared } from './refit.ts';
import { replay } from './replay.ts';
import { batchMetrics, differenceOf, evaluationRecord, generatorMetrics, PromptLog, stepMetrics } from './report.ts';
import { openRunDir } from './run_dir.ts';
import type { Split } from './sources.ts';
import { watchStalls } from './stalls.ts';
import { type Context, EXIT_CODES, prepare, probeRows, refused, renderItem, say, withWorkers } from './start.ts';
import type { Tokenizer } from './tokenizer.ts';
import { flatRows, learningRate, TrainerLost } from './trainer.ts';
import type { Prompt, Rollout, Sampling } from './types.ts';

export async function main(argv: readonly string[]): Promise<number> {
  try {
    const prepared = await prepare(argv, []);
    const runDir = openRunDir(prepared.config);
    if (prepared.config.options['run.replay'] !== '') return await replay(prepared.config.options, runDir, say);
    say(`Run directory ${runDir}; starting workers, their logs are in logs/`);
    return await withWorkers(prepared, runDir, async (context) => {
      await train(context);
      return context.stopper.signal ? EXIT_CODES[context.stopper.signal] : 0;
    });
  } catch (error) {
    return refused(error);
  }
}

async function train(args: Context): Promise<void> {
  const { runDir, from, history, bus, launcher, workers, ledger, stopper, progress } = args;
  const { options } = args.config;
  const { stream, heldOutHash } = args.prompts;
  const { trainer, tokenizer, generator, refit, dispatch, orFatal } = workers;
  const numSteps = options['train.num_steps'];
  const batchSize = options['train.batch_size'];
  const groupSize = options['rollout.n_samples_per_prompt'];
  const maxStaleness = options['train.max_staleness'];
  const seed = options['train.seed'];
  const isSynchronous = maxStaleness === 0;

  const watchdog = watchStalls({ stallMs: options['launch.stall_s'] * 1000, launcher, workers, say });
  watchdog.waitsFor = 'workers to be ready';
  const facts = await workers.ready;
  say(`Workers are ready: ${facts.startup}`);
  if (!facts.templateExact) say(`Warning (template): ${facts.templateNote}`);

  // Prompts that fit
  let step = from?.state.step ?? 0;
  const metrics = new MetricsWriter(runDir, step);
  const life = history?.lives ?? 0;
  ledger.record({ kind: 'meta', life, options: { ...options }, dataHash: stream.position.sha256, resumedAt: step });
  const maxPromptLen = options['data.max_prompt_len'];
  const promptLog = new PromptLog({ ledger, maxPromptLen, progress, say });
  let measured = 0;
  const filter = (split: Split): Filter => ({
    limit: maxPromptLen,
    measure: (prompts) => {
      measured += prompts.length;
      if (!stopper.hasSteps) progress.show(`measured ${measured} prompts`, 0); // many that do not fit take a while
      return measure(tokenizer, prompts);
    },
    onDropped: (dropped) => promptLog.dropped(split, dropped),
  });
  if (maxPromptLen >= 0) stream.filter = filter('train');
  await orFatal(stream.ahead(batchSize)); // nothing that fits: say it now
  const heldOut =
    maxPromptLen >= 0 ? await orFatal(fitting(args.prompts.heldOut, filter('heldout'))) : args.prompts.heldOut;
  progress.clear();
  if (heldOut.length < args.prompts.heldOut.length) say(promptLog.summary('heldout', args.prompts.heldOut.length));
  refit.probes = await probeRows(tokenizer, stream.first, facts.vocabSize, options['data.max_len']);

  // Training a batch, again where a trainer was lost
  const packing = {
    numRanks: workers.numRanks,
    microBatchSize: options['train.micro_batch_size'],
    maxTokens: options['train.max_tokens_per_gpu'],
    packed: options['fsdp.packing_samples'],
  };
  const learn = (batch: Batch) => trainBatch(trainer, batch, { packing, epochs: options['train.max_epochs'] });
  /** New ranks with the weights after `step`: of a checkpoint, and from there on trained again out of the ledger. */
  const revive = async (lost: TrainerLost) => {
    if (trainer.restarts >= options['launch.max_restarts']) throw lost;
    progress.clear();
    const [reason = ''] = lost.message.split('\n');
    ledger.record({ kind: 'event', name: 'trainer_restart', detail: { restart: trainer.restarts + 1, reason } });
    say(`trainer_restart: ${lost.message}`);
    await ledger.commit();
    await trainer.restart();
    const checkpoint = newestCheckpoint(runDir);
    if (checkpoint) await trainer.restore(join(checkpoint.path, 'trainer'));
    const start = checkpoint?.state.step ?? 0;
    const recorded = readHistory(readLedger(runDir), start);
    for (let s = start + 1; s <= step; s++) await learn(readBatch(recorded, s));
    progress.clear();
    say(
      `Trainer ranks are back at step ${step}: ${checkpoint?.path ?? 'the model directory'}, then ${step - start} steps of the ledger`,
    );
  };
  /** `work` needs the trainer; it is done again from its start when a rank is lost. */
  const withTrainer = async <T>(work: () => Promise<T>): Promise<T> => {
    for (;;) {
      try {
        if (trainer.lost) await orFatal(revive(trainer.lost)); // it may have died while nobody asked it for anything
        return await orFatal(work());
      } catch (error) {
        if (!(error instanceof TrainerLost) || trainer.restarts >= options['launch.max_restarts']) throw error;
      }
    }
  };
  const declared = (again: boolean) => (of: Declared) => ledger.record({ kind: 'refit', step, again, ...of });

  // Where an earlier process ended
  if (history) {
    const evaluated = from?.state.heldOutHash;
    if (evaluated && heldOutHash && evaluated !== heldOutHash)
      say('Changed since the run began: the held-out prompts, so scores before and after do not compare');
    if (from) await withTrainer(() => trainer.restore(join(from.path, 'trainer')));
    say(
      from ? `Restored step ${step} from ${from.path}` : 'No complete checkpoint: beginning with the model directory',
    );
    step = await trainAgain(history);
    const last = history.refits.get(step);
    const highest = Math.max(history.version, from?.state.version ?? 0);
    const isNew = !last && step > (from?.state.step ?? 0); // it crashed before its refit
    const version = last?.version ?? (isNew ? highest + 1 : highest);
    const onDeclared = (of: Declared) => declared(!isNew && of.version === version)(of);
    if (step > 0) await withTrainer(() => refit.resumeAt(version, last?.checksum ?? null, onDeclared));
    say(`Resumed at step ${step}, policy version ${refit.version}`);
  }
  const mismatchStops = options['rollout.mismatch_stop'] === 'on';
  const parity = await withTrainer(() => checkParity(workers, options));
  if (mismatchStops && parity.problems.length > 0)
    throw new Error(`${parity.problems.join('; ')} (--rollout.mismatch_stop off goes on)`);
  for (const problem of parity.problems) say(`Warning (parity): ${problem}`);
  say(`Parity of engine and trainer at version ${refit.version}: ${parity.scored}; sampled: ${parity.sampled}`);

  /** Batches after the checkpoint, as they were. Their metrics are written again. Returns the step it comes to. */
  async function trainAgain(past: History): Promise<number> {
    for (const { line } of past.evals.filter((e) => e.step === step && step === 0)) metrics.write(line);
    const first = step + 1;
    let worst = { name: '', step: 0, difference: 0 };
    for (; past.batches.has(step + 1); step++) {
      watchdog.waitsFor = `the trainer, with step ${step + 1} of the ledger`;
      const begun = performance.now();
      const batch = readBatch(past, step + 1);
      const { result, dummies } = await withTrainer(() => learn(batch));
      const computed = { ...batch.metrics, ...stepMetrics(result), dummy_micro_batches: dummies };
      const recorded = past.steps.get(step + 1);
      const here = differenceOf(computed, recorded ?? computed);
      if (here.difference > worst.difference) worst = { ...here, step: step + 1 };
      metrics.write({
        step: step + 1,
        policy_version: batch.version + 1,
        time_generation_s: 0,
        time_refit_s: 0,
        loop_lag_ms_max: 0,
        ...recorded,
        ...computed,
        time_train_s: (performance.now() - begun) / 1000,
        time_step_s: (performance.now() - begun) / 1000,
      });
      if (!recorded) ledger.record({ kind: 'step', step: step + 1, metrics: computed });
      for (const { line } of past.evals.filter((e) => e.step === step + 1)) metrics.write(line);
    }
    if (step < first) return step;
    const same =
      worst.difference === 0
        ? 'the same to the bit'
        : `the largest difference is ${worst.difference.toExponential(1)} (${worst.name} of step ${worst.step})`;
    say(`Trained steps ${first} to ${step} again from the ledger: ${same}`);
    const detail = { from: first, to: step, difference: worst.difference };
    ledger.record({ kind: 'event', name: 'trained_again', detail });
    return step;
  }

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
  const failures = new FailureWindow({
    maxRate: options['rollout.max_failure_rate'],
    agentPath: options['train.agent_path'],
    running: () => dispatch.runningGroups,
  });
  const buffer = new Buffer({
    batch: batchSize,
    steps: Math.max(0, numSteps - step),
    maxStaleness,
    late: options['train.late'],
    order: options['train.batch_order'],
    failed: options['rollout.failed_members'],
    band: options['algo.dynamic_filtering_enable'] ? options['algo.dynamic_filtering_range'] : null,
  });
  const pool = new Pool({
    buffer,
    stream,
    ledger,
    groupSize,
    version: () => refit.version,
    run: (job) => dispatch.run(job),
    cancel: (matches, reason) => dispatch.cancel(matches, reason),
    job: (rolloutId, groupId, index, prompt): Job => {
      const rolloutSeed = seedOf(seed, 'train', rolloutId);
      const drawn = sampling(options['rollout.temperature'], rolloutSeed);
      return { rolloutId, groupId, index, prompt, seed: rolloutSeed, sampling: drawn, limits };
    },
    onRollout: (rollout) => failures.add(rollout),
    onPrompt: () => {
      promptLog.read++;
    },
    fail: workers.fail,
  });
  if (history) {
    const { groups, finished, again } = pool.readmit(history);
    if (groups > 0)
      say(`Took up ${groups} groups that were in flight: ${finished} rollouts had finished, ${again} run again`);
  }
  const look = () => {
    failures.check();
    const { running, waiting } = buffer.counts;
    watchdog.waitsFor = `${buffer.batchSize} groups for step ${step + 1}: ${waiting} wait, ${running} run`;
    progress.show(`step ${step + 1}: ${waiting}/${batchSize} groups, ${running} running`, waiting / batchSize);
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
          ledger.record(evaluationRecord(rollout));
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
    const [at, version] = [step, refit.version];
    const sampled = await evaluation(options['eval.temperature'], 'sampled');
    const greedy = withGreedy && options['eval.greedy'] ? await evaluation(0, 'greedy') : null;
    if (stopper.signal) return; // cut short, so the numbers mean nothing
    const constant = constantBest(heldOut.map((prompt) => prompt.label));
    const line = {
      step: at,
      policy_version: version,
      eval_reward_mean: sampled.rewardMean,
      eval_pass_at_k: sampled.passAtK,
      eval_num_prompts: sampled.prompts,
      eval_dropped_prompts: args.prompts.heldOut.length - heldOut.length,
      eval_unjudged: sampled.unjudged,
      eval_constant_best: constant,
      time_eval_s: (performance.now() - begun) / 1000,
      ...(greedy && { eval_greedy_reward_mean: greedy.rewardMean }),
    };
    ledger.record({ kind: 'eval', step: at, version, metrics: line });
    await orFatal(ledger.commit());
    metrics.write(line);
    const parts = [`sampled ${sampled.rewardMean.toFixed(3)}`];
    if (greedy) parts.push(`greedy ${greedy.rewardMean.toFixed(3)}`);
    say(
      `Held-out at step ${at}: ${parts.join(', ')} (${sampled.prompts} prompts; best constant answer ${constant.toFixed(3)})`,
    );
    for (const text of await orFatal(sampleLines(tokenizer, sampled.samples, facts.stopTokenIds))) say(text);
  };
  let savedAt = from?.state.step === step ? step : -1;
  const checkpoint = async () => {
    const state = { step, version: refit.version, heldOutHash, data: stream.position, dispatched: pool.dispatched };
    const keep = options['ckpt.max_num'];
    await ledger.commit(); // a checkpoint never covers what the ledger does not hold
    const path = await withTrainer(() =>
      saveCheckpoint({ runDir, trainer, state, keep, exportHf: options['ckpt.save_hf'] }),
    );
    savedAt = step;
    ledger.record({ kind: 'checkpoint', step, path });
    ledger.prune(oldestCheckpointStep(runDir), options['run.ledger_gb'] * 1e9);
  };
  stopper.hasSteps = true;
  stopper.onFirst = () => {
    pool.stop();
    dispatch.cancel((job) => job.groupId.startsWith('eval'), 'cancelled');
  };

  if (options['eval.eval_at_start'] && step === 0 && !history?.evals.some((e) => e.step === 0)) {
    watchdog.waitsFor = 'the evaluation before the first step';
    await evaluateNow(true);
    failures.check();
  }
  const isEvaluatedAfter = (n: number) => options['eval.steps'] > 0 && n % options['eval.steps'] === 0 && n < numSteps;
  // The process before this one ended in the evaluation of its last step.
  if (history && step > 0 && isEvaluatedAfter(step) && !history.evals.some((e) => e.step === step))
    await evaluateNow(false);

  // Steps
  const lag = monitorEventLoopDelay({ resolution: 10 });
  lag.enable();
  const health = new Health({ dtype: workers.dtype, stop: mismatchStops, say });
  generator.takeCounts();
  trainer.takeBusy();
  let handedOver = performance.now();
  let evaluating: Promise<void> = Promise.resolve(); // beside training; a refit waits for it
  while (step < numSteps && !stopper.signal) {
    const begun = performance.now();
    const groups = await orFatal(pool.nextBatch(look));
    progress.clear();
    if (!groups) break;
    const generated = performance.now();
    const { engine_idle_s, ...sampled } = generatorMetrics(generator, (generated - handedOver) / 1000);
    const counts = { ...sampled, ...promptLog.takeStep(), ...pool.takeDrops() };
    handedOver = generated;
    // The next batch begins while this one is trained: agents make their prompts, which are rendered. In a synchronous run
    // sampling waits for the refit.
    if (isSynchronous && !isEvaluatedAfter(step + 1) && !stopper.signal) {
      generator.hold();
      pool.admitHeld();
    }

    // Credit
    const version = refit.version;
    const lr = learningRate({
      step,
      steps: numSteps,
      lr: options['actor.adam.lr'],
      schedule: options['actor.lr_scheduler'],
      warmupRatio: options['actor.lr_warmup_ratio'],
      minRatio: options['actor.min_lr_ratio'],
    });
    const batch = await makeBatch(groups, {
      step: step + 1,
      version,
      lr,
      credit: {
        estimator: options['algo.advantage.estimator'],
        gamma: options['algo.advantage.gamma'],
        whiten: !options['algo.advantage.no_whiten'],
        clipRange: options['reward.clip_range'],
      },
      metrics: { ...(await batchMetrics(groups, version)), ...counts },
    });
    ledger.record(...(await batchRecord(batch)));
    await orFatal(ledger.commit());

    // Train
    watchdog.waitsFor = `the trainer, with step ${step + 1}`;
    progress.show(`step ${step + 1}: training`, 1);
    const trainStart = performance.now();
    const { result, dummies } = await withTrainer(() => learn(batch));
    stopper.hasTrained = true;
    const trained = performance.now();

    // Refit
    step++;
    await orFatal(evaluating);
    if (!isSynchronous && !options['train.partial_rollout_enable']) await orFatal(pool.drain(look));
    const drained = performance.now();
    watchdog.waitsFor = `the refit after step ${step}`;
    const times = await withTrainer(() => refit.push(declared(false)));
    generator.release();
    pool.trained();
    const refitted = performance.now();

    // Report
    const line = {
      step,
      policy_version: refit.version,
      ...batch.metrics,
      ...stepMetrics(result),
      engine_idle_s,
      trainer_idle_s: Math.max(0, (performance.now() - begun) / 1000 - trainer.takeBusy()),
      time_generation_s: (generated - begun) / 1000,
      time_train_s: (trained - trainStart) / 1000,
      time_drain_s: (drained - trained) / 1000,
      time_refit_s: (refitted - drained) / 1000,
      time_refit_paused_s: times.pauseMs / 1000,
      engines_refitted: times.took,
      ...(times.verified !== null && { refit_verified_max: times.verified }),
      time_step_s: (performance.now() - begun) / 1000,
      loop_lag_ms_max: Math.max(0, lag.max / 1e6 - 10),
      restarts: generator.restarts + dispatch.restarts + trainer.restarts + tokenizer.restarts,
      retries: bus.counters.retries ?? 0,
      dummy_micro_batches: dummies,
    };
    lag.reset();
    progress.clear();
    ledger.record({ kind: 'step', step, metrics: line });
    await orFatal(ledger.commit()); // what is reported is never lost
    metrics.write(line);
    say(formatStep(line, numSteps));
    if (health.check(line) === 'flat') {
      const samples = groups.slice(0, 2).map(({ prompt, rollouts }) => ({ prompt, rollout: rollouts[0] as Rollout }));
      say('What was said in two of its rollouts:');
      for (const text of await orFatal(sampleLines(tokenizer, samples, facts.stopTokenIds))) say(text);
    }

    if (options['ckpt.save_steps'] > 0 && step % options['ckpt.save_steps'] === 0) await checkpoint();
    if (isEvaluatedAfter(step) && !stopper.signal) {
      watchdog.waitsFor = `the evaluation after step ${step}`;
      evaluating = evaluateNow(false);
      if (isSynchronous) await evaluating;
      else evaluating.catch(() => {}); // the next refit learns of it
    }
  }

  // The end
  pool.stop();
  await orFatal(evaluating);
  if (step === 0 && !stopper.signal)
    throw new Error(
      `Nothing was trained: the ${options['data.num_epochs']} epochs of prompts are used up and all ${buffer.counts.dropped} groups of them were dropped`,
    );
  if (savedAt !== step && (stopper.signal || !options['ckpt.disable_final_save'])) await checkpoint();
  watchdog.waitsFor = 'the last evaluation';
  if (!stopper.signal) await evaluateNow(true);
  if (stopper.signal && savedAt !== step) await checkpoint(); // it came during the evaluation
  watchdog.close();
  if (promptLog.hasDropped) say(promptLog.summary('train', promptLog.totalRead));
  const ran = step < numSteps ? `, since the ${options['data.num_epochs']} epochs of prompts are used up` : '';
  say(
    stopper.signal
      ? `Stopped after step ${step}, saved; the same command with --resume --run.dir ${runDir} goes on`
      : `Done: ${step} steps${ran}, policy version ${refit.version}`,
  );
  say(`Run directory ${runDir}`);
}

// ---- Small things ----

/** The length of each prompt as the chat template renders it, or why it cannot. */
async function measure(tokenizer: Tokenizer, prompts: readonly Pick<Prompt, 'input' | 'tools'>[]): Promise<Length[]> {
  const { fields, frames } = await tokenizer.request('render', { items: prompts.map(renderItem) });
  return fields.errors.map((error, i) => error ?? (frames.lengths[i] as number));
}

/** What was said in some rollouts, one line each. Stop tokens are left out, other markup of the policy is shown. */
async function sampleLines(
  tokenizer: Tokenizer,
  samples: Evaluation['samples'],
  stopIds: readonly number[],
): Promise<string[]> {
  const rows = samples.map(({ rollout }) => saidRows(rollout, new Set(stopIds)));
  const decode = async (policy: boolean) => {
    const ids = rows.flat().filter((row) => row.policy === policy);
    if (ids.length === 0) return [];
    const frames = flatRows(ids.map((row) => row.ids));
    return [...(await tokenizer.request('decode', { skip_special: !policy }, frames)).fields.texts];
  };
  const texts = { true: await decode(true), false: await decode(false) };
  return samples.map(({ prompt, rollout }, i) => {
    const said = (rows[i] ?? []).map(({ policy }) => ({ policy, text: texts[`${policy}`].shift() ?? '' }));
    return formatSample(prompt, rollout, said);
  });
}

/** A seed below 2^53 that depends on everything it is given. */
function seedOf(...parts: readonly (string | number)[]): number {
  const digest = createHash('sha256').update(parts.join('/')).digest();
  return Number(digest.readBigUInt64LE() >> 11n);
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  process.exit(await main(process.argv.slice(2)));
}
