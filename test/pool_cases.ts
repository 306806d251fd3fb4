/**
 * Random runs of the streaming pool: prompts, sizes, staleness, rules, failures, filters, epochs and the order in which
 * everything ends are drawn from a seed; the run itself is Pool, Buffer and PromptStream as the loop has them.
 *
 * Time is a list of things that may happen next (a rollout ends, a step is trained), of which the seed picks one. A run that
 * waits while the list is empty hangs. Used by pool.test.ts and by `npm run prove accounting`.
 */
import { setImmediate as nextTurn } from 'node:timers/promises';
import { Buffer, type BufferOptions } from '../molt/buffer.ts';
import { type PromptSet, PromptStream } from '../molt/data.ts';
import type { Job } from '../molt/dispatch.ts';
import type { LedgerEvent } from '../molt/ledger.ts';
import { Pool } from '../molt/pool.ts';
import type { Group, Rollout, Sampling } from '../molt/types.ts';

/** Mulberry32. */
export function random(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

export interface Case extends BufferOptions {
  readonly seed: number;
  readonly prompts: number;
  readonly epochs: number;
  readonly groupSize: number;
  readonly failRate: number;
  readonly drains: boolean; // no request lives across a refit
  readonly jumps: boolean; // the version may rise by two, as when a run is resumed with other weights
}

export function drawCase(seed: number): Case {
  const draw = random(seed);
  const pick = <T>(values: readonly T[]): T => values[Math.floor(draw() * values.length)] as T;
  const groupSize = pick([1, 2, 2, 3, 4]);
  return {
    seed,
    prompts: pick([1, 2, 3, 5, 8, 13]),
    epochs: pick([0, 0, 1, 2, 3]),
    groupSize,
    failRate: pick([0, 0, 0.1, 0.4]),
    drains: draw() < 0.3,
    jumps: draw() < 0.1,
    batch: pick([1, 2, 3, 4]),
    steps: pick([1, 2, 3, 5, 8]),
    maxStaleness: pick([0, 0, 1, 2, 4]),
    late: pick(['wait', 'drop']),
    order: pick(['first_finished', 'first_finished', 'dispatch_order']),
    failed: pick(['keep', 'refill', 'drop']),
    // The scores of one rollout are 0 or 1, so no group of one would ever pass.
    band: groupSize === 1 ? null : pick([null, null, [0, 1], [0.2, 0.9]] as const),
  };
}

export interface Trace {
  readonly events: readonly LedgerEvent[];
  readonly batches: readonly { readonly version: number; readonly groups: readonly Group[] }[];
  readonly maxLive: number;
  readonly counts: Buffer['counts'];
  readonly capacity: number; // at the end
  readonly happened: readonly string[]; // the whole order, for a case that is run twice
}

const SAMPLING: Sampling = { temperature: 1, top_p: 1, top_k: 0, max_tokens: 4, seed: 0, stop: [], stop_token_ids: [] };
const LIMITS = { maxTurns: 1, maxTokens: 16, deadlineMs: 1000 };
const MAX_EVENTS = 20_000;

/** Runs a case to its end. Throws when it hangs or breaks an invariant of the pool. */
export async function runCase(c: Case, Accounting: typeof Buffer = Buffer): Promise<Trace> {
  const draw = random(c.seed ^ 0x9e3779b9);
  const items = Array.from({ length: c.prompts }, (_, index) => ({
    index,
    input: `p${index}`,
    label: null,
    tools: null,
  }));
  const set: PromptSet = { sources: [{ name: 's', items }], sha256: 'x' };
  const stream = new PromptStream(set, { seed: c.seed, shuffle: true, weights: [], epochs: c.epochs });
  const buffer = new Accounting(c);
  const isSynchronous = c.maxStaleness === 0;
  const events: LedgerEvent[] = [];
  const batches: { version: number; groups: readonly Group[] }[] = [];
  const happened: string[] = [];
  interface Live {
    readonly job: Job;
    readonly resolve: (rollout: Rollout) => void;
    from: number; // version of its first token; -1 while its turns are held
    cancelled: boolean;
  }
  const live = new Map<string, Live>();
  let [version, held, maxLive] = [0, false, 0];
  let train: (() => void) | null = null; // the step that is being trained may end
  let error: unknown = null;
  let isWaiting = false;

  const pool = new Pool({
    buffer,
    stream,
    groupSize: c.groupSize,
    ledger: {
      record: (event) => {
        events.push(event);
        happened.push(
          `${event.kind} ${'rolloutId' in event ? event.rolloutId : 'groupId' in event ? event.groupId : ''}`,
        );
      },
    },
    version: () => version,
    run: (job) =>
      new Promise((resolve) => {
        if (live.has(job.rolloutId)) throw new Error(`rollout ${job.rolloutId} runs twice`);
        live.set(job.rolloutId, { job, resolve, from: held ? -1 : version, cancelled: false });
      }),
    cancel: (matches) => {
      for (const rollout of live.values()) if (matches(rollout.job)) rollout.cancelled = true;
    },
    job: (rolloutId, groupId, index, prompt) => ({
      rolloutId,
      groupId,
      index,
      prompt,
      seed: 0,
      sampling: SAMPLING,
      limits: LIMITS,
    }),
    onRollout: () => {},
    onPrompt: () => {},
    fail: (cause) => {
      error ??= cause;
    },
  });

  /** Ends one rollout in a way that the seed decides. */
  const endOne = (id: string) => {
    const { job, resolve, from, cancelled } = live.get(id) as Live;
    live.delete(id);
    const isFailed = cancelled || draw() < c.failRate;
    // Two tokens: the first by the version it began with, the last by that of now.
    const [oldest, newest] = [from < 0 ? version : from, version];
    const score = draw() < 0.5 ? 1 : 0;
    const trajectory = {
      ids: Int32Array.of(1, 2, 3),
      lossMask: Uint8Array.of(0, 1, 1),
      logprobs: Float32Array.of(0, -1, -1),
      versions: Int32Array.of(-1, oldest, newest),
      turns: Int32Array.of(0, 0, 0),
      spans: [],
    };
    resolve({
      rolloutId: id,
      groupId: job.groupId,
      index: job.index,
      attempt: 0,
      reason: cancelled ? 'cancelled' : isFailed ? 'agent_error' : 'done',
      detail: null,
      reward: isFailed ? null : score,
      score: isFailed ? null : score,
      truncated: false,
      info: {},
      turns: 1,
      trajectories: isFailed ? [] : [trajectory],
      proofs: [],
      dispatchedVersion: version,
    });
  };

  /** Dropped as stale were no more than later batches could not have taken. */
  let looked = 0;
  const checkDrops = () => {
    const versions = new Map<string, number>();
    for (const e of events) if (e.kind === 'dispatched') versions.set(e.groupId, e.version);
    const left = new Map(versions);
    for (const e of events) if (e.kind === 'dropped') left.delete(e.groupId);
    for (const { groups } of batches) for (const { groupId } of groups) left.delete(groupId);
    for (const e of events.slice(looked)) {
      if (e.kind !== 'dropped' || e.reason !== 'stale') continue;
      const oldest = versions.get(e.groupId) as number;
      const batchesLater = oldest - (version - c.maxStaleness);
      const older = [...left.values()].filter((other) => other <= oldest).length;
      if (older < batchesLater * c.batch) throw new Error(`${e.groupId} was dropped though it could have been trained`);
    }
    looked = events.length;
  };

  // The loop as loop.ts has it, without what computes.
  const loop = async () => {
    for (let step = 0; step < c.steps; step++) {
      isWaiting = true;
      const groups = await pool.nextBatch(() => {});
      isWaiting = false;
      if (!groups) break;
      batches.push({ version, groups });
      if (!c.jumps) checkDrops();
      happened.push(`batch ${groups.map((group) => group.groupId).join()}`);
      if (isSynchronous) {
        held = true;
        pool.admitHeld();
      }
      await new Promise<void>((resolve) => {
        train = resolve;
      });
      if (!isSynchronous && c.drains) await pool.drain(() => {});
      version += c.jumps && draw() < 0.3 ? 2 : 1;
      held = false;
      for (const rollout of live.values()) if (rollout.from < 0) rollout.from = version;
      pool.trained();
    }
  };
  let isOver = false;
  const done = loop().then(
    () => {
      isOver = true;
    },
    (cause: unknown) => {
      error ??= cause;
      isOver = true;
    },
  );

  for (let n = 0; !isOver && error === null; n++) {
    await nextTurn();
    if (n > MAX_EVENTS) throw new Error('the run does not end');
    const { running, waiting, training } = buffer.counts;
    // Groups whose turns are held sample nothing while the batch before them is trained.
    if (isWaiting && c.late === 'drop' && c.order === 'first_finished' && waiting >= c.batch)
      throw new Error(`${waiting} groups wait and no batch of ${c.batch} is made`);
    maxLive = Math.max(maxLive, running + waiting + (held ? 0 : training));
    const choices = [...live.keys()].filter((id) => (live.get(id) as Live).from >= 0 || live.get(id)?.cancelled);
    const canTrain = train !== null;
    if (choices.length === 0 && !canTrain) {
      if (isOver) break;
      await nextTurn();
      if (isOver || error !== null) break;
      if (live.size === 0 && train === null) throw new Error(`the run hangs: ${JSON.stringify(buffer.counts)}`);
      continue;
    }
    const k = Math.floor(draw() * (choices.length + (canTrain ? 1 : 0)));
    if (k < choices.length) endOne(choices[k] as string);
    else {
      const go = train as unknown as () => void;
      train = null;
      go();
    }
  }
  if (error !== null) throw error;
  await done;
  // Cancelled rollouts of dropped groups may still be out; nobody waits for them.
  return { events, batches, maxLive, counts: buffer.counts, capacity: buffer.capacity, happened };
}

/** Throws where a trace breaks what the pool promises. */
export function checkCase(c: Case, { events, batches, maxLive, counts, capacity }: Trace): void {
  const check = (condition: boolean, what: string) => {
    if (!condition) throw new Error(what);
  };
  const dispatched = events.flatMap((e) => (e.kind === 'dispatched' ? [e] : []));
  const dropped = events.flatMap((e) => (e.kind === 'dropped' ? [e] : []));
  const ends = new Map<string, number>();
  for (const { groupId } of dispatched) {
    check(!ends.has(groupId), `${groupId} was dispatched twice`);
    ends.set(groupId, 0);
  }
  const decide = (groupId: string) => ends.set(groupId, (ends.get(groupId) ?? 10) + 1);
  for (const { groupId } of dropped) decide(groupId);
  for (const { groups } of batches) for (const { groupId } of groups) decide(groupId);
  for (const [groupId, times] of ends) check(times === 1, `${groupId} was decided ${times} times`);
  check(counts.admitted === dispatched.length, `${counts.admitted} admitted, ${dispatched.length} dispatched`);
  check(counts.dropped === dropped.length, `${counts.dropped} counted as dropped, ${dropped.length} are`);
  check(counts.trained === batches.flatMap((b) => b.groups).length, `${counts.trained} counted as trained`);
  check(counts.running + counts.waiting + counts.training === 0, 'something waits at the end');
  check(capacity === 0, `${capacity} groups could be admitted at the end`);
  const finished = events.flatMap((e) => (e.kind === 'finished' ? [e.rolloutId] : []));
  check(new Set(finished).size === finished.length, 'a rollout finished twice');
  // Staleness
  for (const { version, groups } of batches) {
    for (const { rollouts, groupId } of groups) {
      check(rollouts.length >= Math.min(2, c.groupSize), `${groupId} has ${rollouts.length} rollouts`);
      for (const { trajectories, reward } of rollouts) {
        check(reward !== null, `${groupId} trains a rollout that nobody judged`);
        const oldest = Math.min(...trajectories.map((t) => t.versions[1] as number));
        check(version - oldest <= c.maxStaleness, `${groupId} is ${version - oldest} refits old`);
        const [a, b] = [trajectories[0]?.versions[1], trajectories[0]?.versions[2]];
        check(
          !c.drains || c.maxStaleness === 0 || a === b,
          `${groupId} mixes versions ${a} and ${b} though the pool drains`,
        );
      }
      if (c.band) {
        const mean = rollouts.reduce((n, r) => n + (r.score ?? 0), 0) / rollouts.length;
        check(mean > c.band[0] && mean < c.band[1], `${groupId} has mean score ${mean}`);
      }
      if (c.failed === 'drop') check(rollouts.length === c.groupSize, `${groupId} lost a member and was not dropped`);
    }
  }
  check(maxLive <= (c.maxStaleness + 1) * c.batch, `${maxLive} groups were live`);
  const isStale = dropped.some(({ reason }) => reason === 'stale');
  check(
    !isStale || c.jumps || (c.late === 'drop' && c.maxStaleness > 0 && c.order === 'first_finished'),
    'a group was dropped as stale',
  );
  // The end of the data, and whole batches before it
  const short = batches.findIndex(({ groups }) => groups.length < c.batch);
  check(short < 0 || short === batches.length - 1, 'a batch before the last one is short');
  if (c.epochs === 0) check(short < 0 && batches.length === c.steps, `${batches.length} of ${c.steps} steps`);
  else if (batches.length < c.steps || short >= 0)
    check(
      dispatched.length === c.epochs * c.prompts,
      `ended after ${dispatched.length} of ${c.epochs * c.prompts} prompts`,
    );
  if (c.order === 'dispatch_order' && c.failed === 'keep' && c.failRate === 0 && !c.band) {
    const order = batches.flatMap((b) => b.groups.map((g) => Number(g.groupId.slice(1))));
    check(
      order.every((n, i) => i === 0 || n > (order[i - 1] as number)),
      `trained in the order ${order.join()}`,
    );
  }
}
