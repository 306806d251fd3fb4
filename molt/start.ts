/**
 * From a command line to a prepared run with living workers, and back to an exit code.
 *
 *   prepare: options, every check, prompts, what an earlier process left  ->  withWorkers: bus, ledger, workers, signals
 *
 * Everything that can be found wrong is found before a worker starts, all problems of a stage at once.
 * Called by loop.ts (a run) and launch.ts (the doctor).
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setImmediate as nextTurn } from 'node:timers/promises';
import { Bus } from './bus.ts';
import { type Checkpoint, newestCheckpoint } from './checkpoint.ts';
import type { Config, Options } from './config.ts';
import { ConfigError, formatConfig, HelpRequested, loadConfig } from './config.ts';
import { loadPrompts, type PromptSet, PromptStream, promptsOf, sharedPrompts } from './data.ts';
import { checkParity } from './health.ts';
import { type History, readHistory } from './history.ts';
import { Launcher } from './launch.ts';
import { cutTail, Ledger, LedgerError, readLedger } from './ledger.ts';
import { Progress } from './metrics.ts';
import { checkModel, checkPromptFiles, checkSurroundings, type Finding, findingsTable } from './preflight.ts';
import { closeRunDir, discardRunDir, refuseInUse } from './run_dir.ts';
import type { Tokenizer } from './tokenizer.ts';
import { invariant, type Prompt } from './types.ts';
import { openWorkers, type Workers } from './workers.ts';

const RELAYED_MS = 500; // a signal this soon after the first is the same Ctrl-C
const STOP_GRACE_MS = 10_000;
const PROBE_IDS = 48;

/** What a signal asked for. The first asks to finish the step; the second never returns. */
export interface Stopper {
  signal: 'SIGINT' | 'SIGTERM' | null;
  hasSteps: boolean; // there is something to finish and to save
  hasTrained: boolean; // a step in this process: what fails from here on is no bad input
  onFirst: () => void;
}
export const EXIT_CODES = { SIGINT: 130, SIGTERM: 143 } as const;

/** What a run is made of, checked; no worker runs yet. */
export interface Prepared {
  readonly argv: readonly string[];
  readonly config: Config;
  readonly prompts: Prompts;
  readonly from: Checkpoint | null;
  readonly history: History | null; // of the run that goes on
}

/** A prepared run with its workers. */
export interface Context extends Prepared {
  readonly runDir: string;
  readonly bus: Bus;
  readonly launcher: Launcher;
  readonly workers: Workers;
  readonly ledger: Ledger;
  readonly stopper: Stopper;
  readonly progress: Progress;
}

export interface Prompts {
  readonly stream: PromptStream;
  readonly heldOut: readonly Prompt[]; // empty = no evaluation; not measured yet
  readonly heldOutHash: string;
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
      const parity = await workers.orFatal(checkParity(workers, config.options));
      const agree = { check: 'parity', status: 'ok', text: `${parity.scored}; sampled: ${parity.sampled}` } as const;
      const differ = parity.problems.map((text): Finding => ({ check: 'parity', status: 'problem', text }));
      findings.push(...(differ.length > 0 ? differ : [agree]));
      return 0;
    });
    if (code !== 0) findings.push({ check: 'workers', status: 'problem', text: 'the start failed, as said above' });
    console.log(findingsTable(findings));
    return code !== 0 ? code : findings.some(({ status }) => status === 'problem') ? 2 : 0;
  } catch (error) {
    if (findings.length > 0) console.log(findingsTable(findings));
    return findings.some(({ status }) => status === 'problem') ? 2 : refused(error);
  } finally {
    rmSync(runDir, { recursive: true, force: true });
  }
}

/** Throws ConfigError with every problem of a stage, or HelpRequested. What was found is also in `findings`. */
export async function prepare(argv: readonly string[], findings: Finding[]): Promise<Prepared> {
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
  if (options['run.resume']) refuseInUse(options['run.dir']);
  const skipped = (line: string) => say(`Skipped an incomplete checkpoint: ${line}`);
  const from = options['run.resume'] ? newestCheckpoint(options['run.dir'], skipped) : null;
  const history = options['run.resume'] ? recall(options['run.dir'], from, prompts.stream) : null;
  say(
    `Checks passed in ${((performance.now() - begun) / 1000).toFixed(1)} s: ${findings.map((f) => f.check).join(', ')}`,
  );
  return { argv, config, prompts, from, history };
}

/** What the ledger of the run holds beyond its checkpoint; the stream goes on where prompts were last given out. */
function recall(runDir: string, from: Checkpoint | null, stream: PromptStream): History {
  try {
    const entries = readLedger(runDir, (place, problem) => {
      console.warn(
        `Warning (ledger): ${place.path} ends at byte ${place.offset} with a torn record (${problem}); it is cut off`,
      );
      cutTail(place);
    });
    const history = readHistory(entries, from?.state.step ?? 0);
    checkReach(history, from);
    const start = from?.state.data ?? { ...stream.position, ...(history.dataHash && { sha256: history.dataHash }) };
    stream.restore({ ...start, lanes: history.lanes ?? start.lanes });
    // Where the segments that told of the last groups are deleted, the checkpoint knows how they were numbered.
    return { ...history, dispatched: Math.max(history.dispatched, from?.state.dispatched ?? 0) };
  } catch (error) {
    if (!(error instanceof LedgerError)) throw error;
    const good = from ? `step ${from.state.step} (${from.path})` : 'none';
    throw new ConfigError([`--run.dir ${runDir}: ${error.message}. Last good checkpoint: ${good}`]);
  }
}

/** Between the weights there are and the first batch of the ledger no step may be missing. */
function checkReach(history: History, from: Checkpoint | null): void {
  const { firstStep, stepBefore } = history;
  const step = from?.state.step ?? 0;
  const first = Math.min(firstStep, stepBefore > step ? stepBefore + 1 : Number.POSITIVE_INFINITY);
  if (Number.isFinite(first) && first > step + 1)
    throw new LedgerError(`its ledger begins with step ${first}, so step ${step + 1} is lost`);
  if (from && history.lives === 0)
    console.warn('Warning (ledger): there is none; what was in flight when the checkpoint was saved is lost');
}

/** Keep what a stage found, print its warnings. Throws ConfigError when it has problems. */
function report(stage: readonly Finding[], findings: Finding[]): void {
  findings.push(...stage);
  for (const { check, status, text } of stage) if (status === 'warning') console.warn(`Warning (${check}): ${text}`);
  const problems = stage.filter(({ status }) => status === 'problem').map(({ text }) => text);
  if (problems.length > 0) throw new ConfigError(problems);
}

/** Print why nothing was started, one line for each problem. Returns the exit code. */
export function refused(error: unknown): number {
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
export async function withWorkers(
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
  const before = prepared.history ? readLedger(runDir) : [];
  const ledger = new Ledger(runDir, (error) => failLater(error), before);
  const event = (name: string, detail: Record<string, string | number>) => {
    progress.clear();
    ledger.record({ kind: 'event', name, detail });
    say(
      `${name}: ${Object.entries(detail)
        .map(([key, value]) => `${key} ${value}`)
        .join(', ')}`,
    );
  };
  const recorded = async () => {
    await nextTurn(); // whoever waits for the rollout records it first
    await ledger.commit();
  };
  const workers = openWorkers({ options: config.options, runDir, bus, launcher, event, recorded });
  failLater = workers.fail;
  let code = 1;
  try {
    code = await work({ ...prepared, runDir, bus, launcher, workers, ledger, stopper, progress });
  } catch (error) {
    progress.clear();
    if (error instanceof ConfigError && !stopper.hasTrained) code = refused(error);
    else if (launcher.refusals.length > 0)
      code = refused(new ConfigError(refusalLines(launcher.refusals, config.options)));
    else {
      console.error(`The run stopped: ${messageOf(error)}`);
      if (stopper.hasSteps) {
        const resume = [...resumable(argv), '--resume', '--run.dir', runDir].join(' ');
        console.error(`Continue it with: npx tsx molt/loop.ts ${resume}`);
      }
    }
  } finally {
    workers.close();
    await launcher.stopAll(code === 2 ? 0 : STOP_GRACE_MS);
    await bus.close();
    try {
      await ledger.close();
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
        closeRunDir(runDir);
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

export function say(line: string): void {
  console.log(line);
}

// ---- Prompts ----

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
  const order = { seed, shuffle, weights: options['data.prompt_probs'], epochs: options['data.num_epochs'] };
  const stream = new PromptStream(training, order);
  return { stream, heldOut, heldOutHash: heldOut.length > 0 ? evaluated.sha256 : '' };
}

// ---- Small things ----

/** A prompt as the chat template gets it. */
export function renderItem({ input, tools }: Pick<Prompt, 'input' | 'tools'>) {
  const messages = typeof input === 'string' ? [{ role: 'user', content: input }] : input;
  return { messages, tools, template_kwargs: {}, add_generation_prompt: true };
}

/** Rows for parity: a real prompt where the template takes it, and ids that visit the whole vocabulary. */
export async function probeRows(
  tokenizer: Tokenizer,
  prompt: Prompt,
  vocabSize: number,
  maxLen: number,
): Promise<Int32Array[]> {
  const { frames } = await tokenizer.request('render', { items: [renderItem({ ...prompt, tools: null })] });
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
