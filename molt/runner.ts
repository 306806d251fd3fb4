/**
 * The process that hosts agents: hundreds of rollouts on one event loop.
 *
 *   start -> runEnv (agent.ts) -> turn, render, suffix, parse (asked of the controller) -> rollout_done
 *
 * Decisions
 *   - Tokenizer calls of all rollouts are batched: while one message of a kind is in flight the next one collects.
 *   - A finished rollout is kept and sent again until the controller says that it has recorded it.
 *   - A failure inside molt (not in the environment) ends the process: the controller starts another one and
 *     tries the rollouts again. What an environment does to the process ends its own rollout (isolation.ts).
 *   - What the tokenizer refuses as a batch is asked again one by one, so that one rollout's messages harm no other's.
 * Talks to dispatch.ts (protocol.ts: start, turn, abort_turn, cancel_rollout, rollout_done). Started by launch.ts.
 */
import { realpathSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import type { AgentFactory, Outcome, ParsedTurn, Services, TurnAnswer } from './agent.ts';
import { Ended, loadAgent, runEnv } from './agent.ts';
import { EXIT_BAD_INPUT, readWorkerArgs, WorkerLink } from './bus.ts';
import { type Guest, Isolation } from './isolation.ts';
import type { Fields, Frames } from './protocol.ts';
import { RemoteError } from './protocol.ts';
import type { Json, Message, Sampling } from './types.ts';
import { invariant } from './types.ts';

/** A rollout is offered again this long after an attempt to deliver it failed. */
const REDELIVER_MS = 500;

interface RunnerOptions {
  readonly agent_path: string;
  readonly template_kwargs: Json;
  readonly block_ms: number;
  readonly turn_deadline_ms: number; // 0 = none
}

async function main(): Promise<void> {
  const args = await readWorkerArgs();
  const workerId = args.workerIds[0];
  invariant(workerId, 'a runner needs --worker-id');
  const link = await WorkerLink.connect({
    endpoint: args.endpoint,
    workerId,
    secret: args.secrets[workerId] ?? '',
    workerKind: 'runner',
    capabilities: {},
  });
  const options = link.options as unknown as RunnerOptions;
  const make = await loadAgent(options.agent_path).catch((error: Error) => {
    console.error(`--train.agent_path: ${error.message}`);
    process.exit(EXIT_BAD_INPUT);
  });
  const runner = new Runner(link, make, options);
  link.ready({ agent: options.agent_path });
  await link.stopped;
  runner.cancelAll();
  await link.close();
  process.exit(0);
}

class Runner {
  readonly #link: WorkerLink;
  readonly #make: AgentFactory;
  readonly #tokenizer: TokenizerClient;
  readonly #isolation: Isolation;
  readonly #turnDeadlineMs: number;
  readonly #running = new Map<string, AbortController>(); // by rollout and attempt

  constructor(link: WorkerLink, make: AgentFactory, options: RunnerOptions) {
    this.#link = link;
    this.#make = make;
    this.#tokenizer = new TokenizerClient(link, options.template_kwargs);
    this.#turnDeadlineMs = options.turn_deadline_ms;
    link.stats.late_errors = 0;
    this.#isolation = new Isolation({
      blockMs: options.block_ms,
      onLate: () => {
        link.stats.late_errors = (link.stats.late_errors ?? 0) + 1;
      },
    });
    link.handle('start', async (job) => {
      void this.#run(job).catch(crash); // a rollout outlives the request that started it
      return { fields: {}, frames: {} };
    });
    link.on('cancel_rollout', ({ rollout_id, attempt }) => {
      this.#running.get(`${rollout_id}/${attempt}`)?.abort(new Ended('cancelled', null));
    });
  }

  cancelAll(): void {
    for (const stop of this.#running.values()) stop.abort(new Ended('cancelled', null));
  }

  async #run(job: Fields<'start'>): Promise<void> {
    const key = `${job.rollout_id}/${job.attempt}`;
    const stop = new AbortController();
    const guest = this.#isolation.admit(job.rollout_id, job.attempt, (why) => stop.abort(why));
    this.#running.set(key, stop);
    this.#link.stats.running = this.#running.size;
    try {
      const outcome = await runEnv(
        this.#make,
        {
          input: job.prompt,
          label: job.label,
          tools: job.tools as readonly Json[] | null,
          seed: job.seed,
          rolloutId: job.rollout_id,
          index: job.index,
        },
        job.sampling,
        { maxTurns: job.limits.max_turns, maxTokens: job.limits.max_tokens, deadlineMs: job.limits.deadline_ms },
        this.#services(job, guest),
        stop.signal,
      );
      await this.#deliver(job, outcome);
    } finally {
      this.#running.delete(key);
      this.#link.stats.running = this.#running.size;
    }
  }

  #services(job: Fields<'start'>, guest: Guest): Services {
    const isolation = this.#isolation;
    const identity = { rollout_id: job.rollout_id, attempt: job.attempt };
    return {
      render: (messages, tools) => this.#tokenizer.render(messages, tools),
      suffix: (stub, added, tools, lastIds) => this.#tokenizer.suffix(stub, added, tools, lastIds),
      parse: (ids, tools) => this.#tokenizer.parse(ids, tools),
      sample: (request) => this.#sample(identity, request),
      turn: () => isolation.turn(),
      inside: (code) => isolation.inside(guest, code),
      over: () => {
        guest.isOver = true;
      },
    };
  }

  async #sample(
    identity: { rollout_id: string; attempt: number },
    request: { turn: number; prompt: Int32Array; sampling: Sampling; signal: AbortSignal },
  ): Promise<TurnAnswer> {
    const { turn, prompt, sampling } = request;
    request.signal.throwIfAborted();
    const deadline = new AbortController();
    const seconds = this.#turnDeadlineMs / 1000;
    const timer =
      seconds > 0 && // waiting for an engine and pauses for a refit included
      setTimeout(() => {
        const detail = `turn ${turn} was not sampled within ${seconds} s (rollout.turn_deadline_s)`;
        deadline.abort(new Ended('deadline', detail));
      }, this.#turnDeadlineMs);
    const signal = AbortSignal.any([request.signal, deadline.signal]);
    const stop = () => this.#link.send('abort_turn', { ...identity, turn });
    signal.addEventListener('abort', stop, { once: true });
    try {
      const session_id = identity.rollout_id; // an Env is one chain
      // Not waited for beyond the end: an engine that hangs does not answer the abort either.
      const answer = await this.#link.request(
        'turn',
        { ...identity, turn, session_id, sampling },
        { prompt },
        { signal },
      );
      return {
        ids: answer.frames.ids,
        logprobs: answer.frames.logprobs,
        spans: answer.fields.spans,
        reason: answer.fields.reason as TurnAnswer['reason'],
        detail: answer.fields.detail,
        cachedTokens: answer.fields.cached_tokens,
      };
    } catch (error) {
      signal.throwIfAborted();
      // The engine refused this request (too long, a field it does not know): the rollout's fault, not the runner's.
      if (error instanceof RemoteError && error.type !== 'lost') throw new Ended('engine_lost', error.message);
      throw error;
    } finally {
      if (timer) clearTimeout(timer);
      signal.removeEventListener('abort', stop);
    }
  }

  /** Until the controller has recorded it. Gives up only with the process. */
  async #deliver(job: Fields<'start'>, outcome: Outcome): Promise<void> {
    const [fields, frames] = rolloutMessage(job, outcome);
    for (;;) {
      try {
        await this.#link.request('rollout_done', fields, frames);
        return;
      } catch (error) {
        // Lost, or a message that cannot be sent at all.
        if (!(error instanceof RemoteError) || error.type === 'lost') throw error;
        console.error(`Rollout ${job.rollout_id} was not recorded (${(error as Error).message}); sending it again`);
        await sleep(REDELIVER_MS);
      }
    }
  }
}

function rolloutMessage(job: Fields<'start'>, outcome: Outcome): [Fields<'rollout_done'>, Frames<'rollout_done'>] {
  const { trajectories, reason, detail, reward, score, truncated, info, turns } = outcome;
  return [
    {
      rollout_id: job.rollout_id,
      attempt: job.attempt,
      reason,
      detail,
      reward,
      score,
      truncated,
      info,
      turns,
      spans: trajectories.map((t) => t.spans.map((s) => ({ ...s }))),
    },
    {
      lengths: Int32Array.from(trajectories, (t) => t.ids.length),
      ids: concat(
        Int32Array,
        trajectories.map((t) => t.ids),
      ),
      loss_mask: concat(
        Uint8Array,
        trajectories.map((t) => t.lossMask),
      ),
      logprobs: concat(
        Float32Array,
        trajectories.map((t) => t.logprobs),
      ),
      versions: concat(
        Int32Array,
        trajectories.map((t) => t.versions),
      ),
      turns_of: concat(
        Int32Array,
        trajectories.map((t) => t.turns),
      ),
    },
  ];
}

/** One array after another. */
function concat<A extends Int32Array | Uint8Array | Float32Array>(type: new (n: number) => A, parts: readonly A[]): A {
  const out = new type(parts.reduce((n, part) => n + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part as never, at);
    at += part.length;
  }
  return out;
}

// ---- Tokenizer, batched ----

interface Call<Item, Answer> {
  readonly item: Item;
  readonly resolve: (answer: Answer) => void;
  readonly reject: (error: unknown) => void;
}

/**
 * One message of a kind in flight; calls that come meanwhile travel together in the next. Where the message as a whole is
 * refused, each call travels alone, and the one that is refused then ends its rollout.
 */
class Batcher<Item, Answer> {
  readonly #send: (items: readonly Item[]) => Promise<readonly Answer[]>;
  #waiting: Call<Item, Answer>[] = [];
  #busy = false;

  constructor(send: (items: readonly Item[]) => Promise<readonly Answer[]>) {
    this.#send = send;
  }

  call(item: Item): Promise<Answer> {
    return new Promise((resolve, reject) => {
      this.#waiting.push({ item, resolve, reject });
      if (!this.#busy) {
        this.#busy = true;
        setImmediate(() => void this.#drain()); // all calls of this turn of the event loop
      }
    });
  }

  async #drain(): Promise<void> {
    while (this.#waiting.length > 0) {
      const batch = this.#waiting;
      this.#waiting = [];
      try {
        const answers = await this.#send(batch.map((call) => call.item));
        for (const [i, call] of batch.entries()) call.resolve(answers[i] as Answer);
      } catch (error) {
        if (error instanceof RemoteError && error.type === 'lost') for (const call of batch) call.reject(error);
        else for (const call of batch) await this.#alone(call);
      }
    }
    this.#busy = false;
  }

  async #alone({ item, resolve, reject }: Call<Item, Answer>): Promise<void> {
    try {
      resolve((await this.#send([item]))[0] as Answer);
    } catch (error) {
      if (error instanceof RemoteError && error.type === 'lost') return reject(error);
      reject(new Ended('agent_error', `The tokenizer cannot take this: ${(error as Error).message}`));
    }
  }
}

type Ids = { readonly ids: Int32Array; readonly error: string | null };

class TokenizerClient {
  readonly #kwargs: Json;
  readonly #render: Batcher<Fields<'render'>['items'][number], Ids>;
  readonly #suffix: Batcher<Fields<'suffix'>['items'][number], Ids>;
  readonly #parse: Batcher<{ ids: Int32Array; tools: Json }, ParsedTurn>;

  constructor(link: WorkerLink, kwargs: Json) {
    this.#kwargs = kwargs;
    this.#render = new Batcher(async (items) => idsOf(await link.request('render', { items })));
    this.#suffix = new Batcher(async (items) => idsOf(await link.request('suffix', { items })));
    this.#parse = new Batcher(async (items) => {
      const ids = concat(
        Int32Array,
        items.map((item) => item.ids),
      );
      const lengths = Int32Array.from(items, (item) => item.ids.length);
      const answer = await link.request('parse', { tools: items.map((item) => item.tools) }, { ids, lengths });
      return answer.fields.items.map((item) => ({
        text: item.text,
        content: item.content,
        reasoning: item.reasoning,
        toolCalls: item.tool_calls,
        error: item.error,
      }));
    });
  }

  async render(messages: readonly Message[], tools: readonly Json[] | null): Promise<Int32Array> {
    return checked(
      await this.#render.call({
        messages: messages as readonly Json[],
        tools,
        template_kwargs: this.#kwargs,
        add_generation_prompt: true,
      }),
    );
  }

  async suffix(
    stub: Message,
    added: readonly Message[],
    tools: readonly Json[] | null,
    lastIds: readonly number[],
  ): Promise<Int32Array> {
    return checked(
      await this.#suffix.call({
        stub: stub as Json,
        new_messages: added as readonly Json[],
        tools,
        template_kwargs: this.#kwargs,
        last_ids: lastIds,
      }),
    );
  }

  parse(ids: Int32Array, tools: readonly Json[] | null): Promise<ParsedTurn> {
    return this.#parse.call({ ids, tools });
  }
}

function idsOf(answer: {
  fields: { errors: readonly (string | null)[] };
  frames: { ids: Int32Array; lengths: Int32Array };
}): Ids[] {
  let at = 0;
  return answer.fields.errors.map((error, i) => {
    const length = answer.frames.lengths[i] ?? 0;
    at += length;
    return { ids: answer.frames.ids.slice(at - length, at), error };
  });
}

/** A template that cannot render the environment's messages is the environment's error. */
function checked({ ids, error }: Ids): Int32Array {
  if (error !== null) throw new Ended('agent_error', `The chat template cannot render these messages: ${error}`);
  return ids;
}

function crash(error: unknown): never {
  console.error(error);
  process.exit(1);
}

if (process.argv[1] && realpathSync(process.argv[1]) === fileURLToPath(import.meta.url)) {
  main().catch(crash);
}
