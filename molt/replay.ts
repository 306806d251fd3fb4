/**
 * Train the batches of another run's ledger again, from its model directory, in order:  loop.ts RECIPE --replay RUN_DIR
 *
 * No engine, no agent: the samples, advantages, denominators and learning rates are those of the record, the loss and
 * the trainer are as the options say now. With the same options on a CPU every number comes out the same to the bit; with
 * others it shows what they would have made of the same rollouts. For a batch whose loss was not finite: where it breaks.
 * Called by loop.ts.
 */
import { join } from 'node:path';
import { trainBatch } from './batch.ts';
import { Bus } from './bus.ts';
import { ConfigError, type Options } from './config.ts';
import { readBatch, readHistory } from './history.ts';
import { Launcher } from './launch.ts';
import { LedgerError, readLedger } from './ledger.ts';
import { MetricsWriter } from './metrics.ts';
import { differenceOf, stepMetrics } from './report.ts';
import { closeRunDir } from './run_dir.ts';
import { TrainerLost } from './trainer.ts';
import { openTrainer } from './workers.ts';

/** Returns the exit code. Throws ConfigError when the ledger is not there from its beginning. */
export async function replay(options: Options, runDir: string, say: (line: string) => void): Promise<number> {
  const other = options['run.replay'];
  const bus = await Bus.listen({ port: options['launch.port'] });
  const launcher = new Launcher({
    bus,
    logDir: join(runDir, 'logs'),
    silenceMs: options['launch.silence_s'] * 1000,
    silenceReadyMs: options['launch.ready_s'] * 1000,
  });
  try {
    const history = readHistory(readLedger(other), 0);
    if (history.firstStep !== 1)
      throw new ConfigError([
        `--run.replay ${other}: its ledger has no batch of step 1, so the weights before it are not known`,
      ]);
    const trainer = openTrainer({ options, runDir, launcher });
    await trainer.ready();
    const metrics = new MetricsWriter(runDir, 0);
    const packing = {
      numRanks: options['trainer.num_ranks'],
      microBatchSize: options['train.micro_batch_size'],
      maxTokens: options['train.max_tokens_per_gpu'],
      packed: options['fsdp.packing_samples'],
    };
    let worst = { name: '', step: 0, difference: 0 };
    let step = 0;
    for (; history.batches.has(step + 1) && step < options['train.num_steps']; step++) {
      const begun = performance.now();
      const batch = readBatch(history, step + 1);
      const { result, dummies } = await trainBatch(trainer, batch, { packing, epochs: options['train.max_epochs'] });
      const computed = { ...batch.metrics, ...stepMetrics(result), dummy_micro_batches: dummies };
      const recorded = history.steps.get(step + 1);
      const here = differenceOf(computed, recorded ?? computed);
      if (here.difference > worst.difference) worst = { ...here, step: step + 1 };
      const seconds = (performance.now() - begun) / 1000;
      const known = { time_generation_s: 0, time_refit_s: 0, loop_lag_ms_max: 0, ...recorded };
      metrics.write({
        ...known,
        step: step + 1,
        policy_version: batch.version + 1,
        ...computed,
        time_train_s: seconds,
        time_step_s: seconds,
      });
      const found =
        here.difference === 0 ? 'as recorded' : `${here.name} differs by ${here.difference.toExponential(1)}`;
      say(`step ${step + 1}: loss ${computed.loss?.toFixed(4)} grad ${computed.grad_norm?.toFixed(3)}, ${found}`);
    }
    trainer.close();
    const same =
      worst.difference === 0
        ? 'the same to the bit'
        : `largest difference ${worst.difference.toExponential(1)} (${worst.name} of step ${worst.step})`;
    say(`Replayed ${step} steps of ${other}: ${same}`);
    say(`Run directory ${runDir}`);
    return 0;
  } catch (error) {
    if (error instanceof LedgerError) throw new ConfigError([`--run.replay ${other}: ${error.message}`]);
    if (launcher.refusals.length > 0) throw new ConfigError([...new Set(launcher.refusals)]);
    if (!(error instanceof TrainerLost)) throw error;
    console.error(`The replay stopped: ${error.message}`);
    return 1;
  } finally {
    await launcher.stopAll();
    await bus.close();
    closeRunDir(runDir);
  }
}
