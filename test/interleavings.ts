/**
 * Random moments at which requests come, end, are aborted, are cut by a refit and lose their engine; and what every token
 * then must be: drawn from the version that its span names, with the logprob that the saved weights of that version give.
 *
 *   openWorld -> interleave, interleave, ... -> check     one world: a trainer, engines, the real Generator and Refit
 *
 * Used by partial_rollout.test.ts and, with more of it, by scripts/prove.ts.
 */
import { execFile } from 'node:child_process';
import { copyFileSync, mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Generator, type TurnRequest, type TurnResult } from '../molt/generator.ts';
import { pythonCommand, type Worker } from '../molt/launch.ts';
import { Refit } from '../molt/refit.ts';
import { type TensorTable, Trainer } from '../molt/trainer.ts';
import type { Sample } from '../molt/types.ts';
import { invariant } from '../molt/types.ts';
import { NUM_PARAMETERS, scoreIds, TENSORS } from '../workers/simulated_model.ts';
import { type Cell, engineOptions, type Kind, promptOf, simulated, startRanks } from './contract.ts';

const MAX_LEN = 1024;
const VOCAB = 256; // ids that every tokenizer here has
const PREFILL_TOKENS = 24; // of a step: prompts, and requests whose keys are made anew, take several
const UNDECIDED_SHARE = 0.1; // of tokens, at most, that come after a tie of experts
const LONG = 900; // tokens of requests that shall cross refits
const MOST_TRIES = 10;
const LR = 0.02; // moves a logprob by far more than the tolerance
const PROBES = [Int32Array.from([5, 9, 40, 3, 77, 12]), Int32Array.from([1, 2, 3])];

type Cache = 'clear' | 'keep';

/** A run of sampled ids of one version; `fresh`: all keys before it are of that version too. */
interface Piece {
  readonly from: number;
  readonly to: number;
  readonly version: number;
  readonly fresh: boolean;
}
interface Case {
  readonly prompt: readonly number[];
  readonly ids: readonly number[];
  readonly temperature: number;
  readonly pieces: readonly Piece[];
  readonly logprobs: Float32Array; // as sampled
}

/** What `check` found, over all that the world did. */
export interface Findings {
  readonly turns: number;
  readonly tokens: number;
  readonly boundaries: number; // inside a turn, between two versions
  readonly crossed: readonly number[]; // turns by how many refits they crossed
  readonly moved: number; // turns that went on on another engine
  readonly aborted: number;
  readonly worst: number; // largest |dlogp| between a token and the reference of its version
  readonly telling: number; // boundaries where one token earlier or later would have shown, by 10 times the worst gap allowed
}

/** A trainer that keeps what it pushes. */
class KeepingTrainer extends Trainer {
  readonly segments: Record<string, { path: string; tensors: TensorTable }> = {};
  dir = '';
  override async pushWeights(version: number, path: string) {
    const pushed = await super.pushWeights(version, path);
    const kept = join(this.dir, `version-${version}.bin`);
    copyFileSync(path, kept);
    this.segments[version] = { path: kept, tensors: pushed.tensors };
    return pushed;
  }
}

export interface World {
  readonly kind: Kind;
  readonly model: string;
  readonly cache: Cache;
  readonly trainer: KeepingTrainer;
  readonly generator: Generator;
  readonly refit: Refit;
  readonly start: string; // checkpoint
  readonly already: Map<string, Set<number>>; // by rollout: where a request was sent anew
  readonly cases: Case[];
  readonly counts: { aborted: number; moved: number; crossed: number[] };
  steps: number;
  readonly close: () => Promise<void>;
}

export async function openWorld(
  cell: Cell,
  kind: Kind,
  args: { name: string; cache: Cache; numEngines: number; stageFromBytes?: number },
): Promise<World> {
  const { name, cache, numEngines } = args;
  const [model] = await kind.makeModels(cell.dir);
  const dir = join(cell.dir, name);
  const start = join(dir, 'start');
  mkdirSync(start, { recursive: true });
  const already = new Map<string, Set<number>>();
  const starting = startRanks(cell, kind, { name, model, worldSize: 1 });
  const generator: Generator = new Generator({
    launcher: cell.launcher,
    spec: (index) => ({
      id: `engine-${name}${index}`,
      kind: 'engine',
      command: kind.command('engine'),
      options: engineOptions(kind, model, { max_len: MAX_LEN, prefill_tokens: PREFILL_TOKENS }),
    }),
    maxRequests: 64,
    maxRestarts: 1000,
    hooks: {
      join: async (engine) => {
        listen(engine.worker, already);
        await starting;
        await refit.join(engine);
      },
      event: () => {},
    },
  });
  const engines = Promise.all(Array.from({ length: numEngines }, (_, i) => generator.startEngine(i)));
  const ranks = await starting;
  const trainer = new KeepingTrainer({
    start: () => ranks,
    launcher: cell.launcher,
    loss: { clipLowHigh: [0.2, 0.2], isLevel: 'off', isMode: 'mask', isThreshold: [0.5, 5] },
    temperature: 1,
    packed: true,
  });
  trainer.dir = dir;
  const refit: Refit = new Refit({
    generator,
    trainer,
    runDir: dir,
    verifyEvery: 10,
    tolerance: 1e-4,
    cache,
    deadlineMs: 60_000,
    ...(args.stageFromBytes !== undefined && { stageFromBytes: args.stageFromBytes }),
  });
  refit.probes = PROBES;
  await engines;
  await trainer.save(0, start);
  const close = async () => {
    generator.close();
    trainer.close();
    await Promise.all([...generator.engines.map(({ worker }) => worker), ...ranks].map((w) => cell.launcher.kill(w)));
  };
  const counts = { aborted: 0, moved: 0, crossed: [] };
  return { kind, model, cache, trainer, generator, refit, start, already, cases: [], counts, steps: 0, close };
}

/** Notes with how many tokens of its own each request is sent: from there on an engine makes every key anew. */
function listen({ peer }: Worker, already: Map<string, Set<number>>): void {
  const send = peer.request.bind(peer);
  const noting: typeof send = (kind, fields, frames, options) => {
    if (kind === 'generate') {
      const sent = fields as { rollout_id: string; already: number };
      const at = already.get(sent.rollout_id) ?? new Set();
      already.set(sent.rollout_id, at.add(sent.already));
    }
    return send(kind, fields, frames, options);
  };
  (peer as { request: typeof send }).request = noting;
}

// ---- What is done ----

export type Random = () => number;

/** mulberry32, uniform in [0, 1). */
export function randomOf(seed: number): Random {
  let state = seed | 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}
const below = (random: Random, n: number): number => Math.floor(random() * n);

function requestOf(random: Random, rolloutId: string, maxTokens: number): TurnRequest {
  const stops = random() < 0.3 ? [below(random, VOCAB)] : [];
  return {
    rolloutId,
    attempt: 0,
    turn: 0,
    sessionId: rolloutId,
    sampling: {
      temperature: random() < 0.7 ? 1 : 0.8,
      top_p: 1,
      top_k: 0,
      max_tokens: maxTokens,
      seed: below(random, 2 ** 31),
      stop: [],
      stop_token_ids: stops,
    },
    // Prompts that begin alike, so that prefixes are shared.
    prompt: Int32Array.from([...promptOf(20, 1), ...promptOf(30, below(random, 4))].slice(20 - below(random, 20))),
  };
}

/** One optimizer step on random ids, so that every version is another policy. */
async function train(world: World, random: Random): Promise<void> {
  const ids = Int32Array.from({ length: 24 }, () => below(random, VOCAB));
  const policy = (k: number): boolean => k > 2;
  const sample: Sample = {
    rolloutId: 'r',
    groupId: 'g',
    trajectory: {
      ids,
      lossMask: Uint8Array.from(ids, (_, k) => (policy(k) ? 1 : 0)),
      logprobs: Float32Array.from(ids, (_, k) => (policy(k) ? -5 : 0)),
      versions: Int32Array.from(ids, (_, k) => (policy(k) ? world.refit.version : -1)),
      turns: new Int32Array(ids.length),
      spans: [],
    },
    advantages: Float32Array.from(ids, (_, k) => (policy(k) ? (random() < 0.5 ? 1 : -1) : 0)),
  };
  await world.trainer.step({
    step: ++world.steps,
    version: world.refit.version,
    samples: [sample],
    plan: { ranks: [{ samples: [0], microBatches: [[0]], tokens: 24 }], numMicroBatches: 1, numDummies: 0 },
    denominator: 21,
    lr: LR,
    old: null,
  });
}

/** A moment that has nothing to do with the steps of engines: now, a few milliseconds or a few tokens later. */
async function moment(world: World, random: Random): Promise<void> {
  const which = random();
  if (which < 0.2) return;
  if (which < 0.5) return void (await sleep(below(random, 12)));
  const target = world.generator.tokens + 1 + below(random, 40);
  for (const end = performance.now() + 300; world.generator.tokens < target && performance.now() < end; )
    await sleep(1);
}

/** Some requests, one to three refits, aborts, and where `kill` an engine that is lost; all at random moments. */
export async function interleave(world: World, random: Random, kill: boolean): Promise<void> {
  const { trainer, generator, refit } = world;
  await trainer.restore(world.start); // weights near those of the start, however many interleavings came before
  const first = refit.version;
  const aborted = new Set<string>();
  let name = 0;
  const turn = async (): Promise<void> => {
    await moment(world, random);
    const id = `${first}/${name++}`;
    const request = requestOf(random, id, 1 + below(random, random() < 0.3 ? 20 : 400));
    const result = generator.generate(request);
    if (random() < 0.25) {
      void moment(world, random).then(() => {
        aborted.add(id);
        generator.abort(request);
      }); // awaited through its turn
    }
    record(world, request, await result, { first, aborted: aborted.has(id) });
  };
  const refits = async (): Promise<void> => {
    for (let left = 1 + below(random, 3); left > 0; left--) {
      await moment(world, random);
      await train(world, random);
      await moment(world, random);
      await refit.push();
    }
  };
  const loss = async (): Promise<void> => {
    // One that is in the middle of something, while there is another.
    const busy = () => generator.engines.filter(({ sent }) => [...sent].some(({ sampled }) => sampled.length > 0));
    for (const end = performance.now() + 2000; performance.now() < end; await sleep(1)) {
      const [victim] = busy();
      if (!victim || generator.engines.length < 2) continue;
      await moment(world, random);
      if (busy().includes(victim)) return void process.kill(victim.worker.pid, 'SIGKILL');
    }
  };
  await Promise.all([refits(), ...Array.from({ length: 2 + below(random, 4) }, turn), ...(kill ? [loss()] : [])]);
}

/**
 * Refits in a row under long requests: `starts` has, for each refit, how many begin before it, and so cross it and all that
 * follow. Where the machine is so busy that some end before, others are tried; what has ended is checked as the rest.
 */
export async function cross(world: World, random: Random, starts: readonly number[]): Promise<void> {
  for (let tries = 0; tries < MOST_TRIES; tries++) if (await tryToCross(world, random, starts, tries)) return;
  throw new Error(`Requests of ${LONG} tokens ended before ${starts.length} refits were through, ${MOST_TRIES} times`);
}

async function tryToCross(world: World, random: Random, starts: readonly number[], tries: number): Promise<boolean> {
  const { generator, refit } = world;
  const first = refit.version;
  const running: { request: TurnRequest; result: Promise<TurnResult>; crosses: number }[] = [];
  let ended = 0;
  const more = async () => {
    const live = () => generator.engines.flatMap(({ sent }) => [...sent]);
    while (live().length < running.length && ended === 0) await sleep(1);
    const wanted = live().map((one) => ({ one, length: one.sampled.length + 5 }));
    while (wanted.some(({ one, length }) => one.sampled.length < length) && ended === 0) await sleep(1);
  };
  for (const [k, count] of starts.entries()) {
    for (let i = 0; i < count; i++) {
      const made = requestOf(random, `${first}.${tries}/crosses ${running.length}`, LONG);
      const request = { ...made, sampling: { ...made.sampling, stop_token_ids: [] } };
      const result = generator.generate(request);
      void result.then(() => ended++);
      running.push({ request, result, crosses: starts.length - k });
    }
    await more();
    if (ended > 0) break;
    await train(world, random);
    await refit.push();
    await more();
  }
  const isCrossed = ended === 0;
  for (const { request, result, crosses } of running) {
    generator.abort(request);
    const turn = await result;
    const crossed = turn.spans.length - 1;
    invariant(!isCrossed || crossed === crosses, `${crossed} refits crossed, want ${crosses}`);
    record(world, request, turn, { first, aborted: true });
  }
  return isCrossed;
}

// ---- What must hold ----

/** Checks one turn as far as it needs no weights, and keeps it for `check`. */
function record(
  world: World,
  request: TurnRequest,
  turn: TurnResult,
  facts: { first: number; aborted: boolean },
): void {
  const { ids, logprobs, spans, reason, detail } = turn;
  const { max_tokens, stop_token_ids, temperature } = request.sampling;
  const about = `${request.rolloutId} (${reason}, ${ids.length} of ${max_tokens} tokens)`;
  invariant(ids.length === logprobs.length, `${about}: ${logprobs.length} logprobs`);
  invariant(ids.length <= max_tokens, `${about}: too many tokens`);
  invariant(reason !== 'length' || ids.length === max_tokens, `${about}: ended too early`);
  invariant(reason === 'stop' || reason === 'length' || (reason === 'abort' && facts.aborted), `${about}: ${detail}`);
  const stop = ids.findIndex((id) => stop_token_ids.includes(id));
  invariant(stop === (reason === 'stop' ? ids.length - 1 : -1), `${about}: a stop id at ${stop}`);
  let at = 0;
  let version = facts.first - 1;
  for (const span of spans) {
    invariant(span.from === at && span.to > at, `${about}: span ${span.from}..${span.to} does not follow ${at}`);
    invariant(span.version > version, `${about}: version ${span.version} follows ${version}`);
    at = span.to;
    version = span.version;
  }
  invariant(at === ids.length && version <= world.refit.version, `${about}: spans end at ${at}, version ${version}`);
  const sent = world.already.get(request.rolloutId) ?? new Set([0]);
  world.counts.aborted += reason === 'abort' ? 1 : 0;
  world.counts.moved += sent.size > 1 ? 1 : 0;
  if (ids.length === 0) return;
  world.counts.crossed[spans.length - 1] = (world.counts.crossed[spans.length - 1] ?? 0) + 1;
  world.cases.push({
    prompt: [...request.prompt],
    ids: [...ids],
    temperature,
    pieces: piecesOf(spans, sent, world.cache),
    logprobs,
  });
}

/** Spans, cut where a request was sent anew. A refit with `clear` has all keys made anew as well. */
function piecesOf(spans: TurnResult['spans'], sent: ReadonlySet<number>, cache: Cache): Piece[] {
  return spans.flatMap(({ version, from, to }) => {
    const cuts = [from, ...[...sent].filter((at) => at > from && at < to).sort((a, b) => a - b), to];
    return cuts.slice(0, -1).map((at, i) => {
      const fresh = cache === 'clear' || sent.has(at);
      return { from: at, to: cuts[i + 1] as number, version, fresh };
    });
  });
}

/** Every token against the saved weights of its version, but those that rounding may route to other experts. */
export async function check(world: World, tolerance: number): Promise<Findings> {
  const { cases, counts } = world;
  const { logprobs, decided, unchanged } = world.kind === simulated ? referenceHere(world) : await referenceOf(world);
  let worst = 0;
  let undecided = 0;
  let boundaries = 0;
  let telling = 0;
  for (const [i, { pieces, logprobs: sampled, ids }] of cases.entries()) {
    for (const k of ids.keys()) {
      if (decided[i]?.[k] === false) {
        undecided++;
        continue;
      }
      const gap = Math.abs((sampled[k] as number) - (logprobs[i]?.[k] as number));
      worst = Number.isNaN(gap) ? Number.NaN : Math.max(worst, gap);
    }
    for (const [j, piece] of pieces.slice(0, -1).entries()) {
      if (piece.version === pieces[j + 1]?.version) continue;
      boundaries++;
      const other = Math.abs((sampled[piece.to] as number) - (unchanged[i]?.[j] as number));
      if (other > 10 * tolerance) telling++;
    }
  }
  const tokens = cases.reduce((n, { ids }) => n + ids.length, 0);
  if (undecided > UNDECIDED_SHARE * tokens) throw new Error(`${undecided} of ${tokens} tokens follow a tie of experts`);
  return { turns: cases.length, tokens, boundaries, ...counts, worst, telling };
}

interface Reference {
  readonly logprobs: readonly (readonly number[])[];
  readonly decided: readonly (readonly boolean[])[]; // false after a tie of experts
  readonly unchanged: readonly (readonly number[])[]; // per piece
}

/** The simulated model has no keys: only the version that a token was drawn from counts. */
function referenceHere({ cases, trainer, model }: World): Reference {
  const weights = new Map<number, Float32Array>();
  const weightsOf = (version: number): Float32Array => {
    const made = weights.get(version) ?? readWeights(trainer, model, version);
    weights.set(version, made);
    return made;
  };
  const rows = cases.map(({ prompt, ids, temperature, pieces }) => {
    const text = [...prompt, ...ids];
    const scored = pieces.map(({ version }) => scoreIds(weightsOf(version), text, temperature));
    return {
      logprobs: pieces.flatMap(({ from, to }, j) => [
        ...(scored[j] as Float32Array).slice(prompt.length + from, prompt.length + to),
      ]),
      unchanged: pieces.map(({ to }, j) => scored[j]?.[prompt.length + to] ?? 0),
    };
  });
  const decided = rows.map(({ logprobs }) => logprobs.map(() => true));
  return { logprobs: rows.map((row) => row.logprobs), decided, unchanged: rows.map((row) => row.unchanged) };
}

function readWeights(trainer: KeepingTrainer, model: string, version: number): Float32Array {
  const segment = trainer.segments[version];
  if (!segment) {
    const file = readFileSync(join(model, 'model.safetensors'));
    return new Float32Array(Uint8Array.from(file.subarray(-4 * NUM_PARAMETERS)).buffer);
  }
  const file = readFileSync(segment.path);
  const out = new Float32Array(NUM_PARAMETERS);
  for (const { name, from } of TENSORS) {
    const entry = segment.tensors.find((tensor) => tensor.name === name) as TensorTable[number];
    out.set(new Float32Array(Uint8Array.from(file.subarray(entry.offset, entry.offset + entry.bytes)).buffer), from);
  }
  return out;
}

function referenceOf({ cases, trainer, model }: World): Promise<Reference> {
  return askTransformers({ model, segments: trainer.segments, cases });
}

/** What reference_logprobs.py says. */
export function askTransformers(question: {
  readonly model: string;
  readonly segments: Readonly<Record<number, { readonly path: string; readonly tensors: TensorTable }>>;
  readonly cases: readonly Omit<Case, 'logprobs'>[];
}): Promise<Reference & { readonly likeliest: readonly (readonly number[])[] }> {
  const { model, segments, cases } = question;
  const [python, ...args] = pythonCommand('engine_torch.py') as [string, ...string[]];
  invariant(args.length > 0, 'an interpreter and a program');
  const env = { ...process.env, OMP_NUM_THREADS: '1', HF_HUB_OFFLINE: '1' };
  return new Promise((resolve, reject) => {
    const child = execFile(
      python,
      ['test/reference_logprobs.py'],
      { env, maxBuffer: 2 ** 30 },
      (error, stdout, stderr) => {
        if (error) reject(new Error(`${error.message}\n${stderr}`));
        else resolve(JSON.parse(stdout));
      },
    );
    const sent = cases.map(({ prompt, ids, temperature, pieces }) => ({ prompt, ids, temperature, pieces }));
    child.stdin?.end(JSON.stringify({ model, segments, cases: sent }));
  });
}
