/**
 * Simulated workers: engines, trainer ranks and a tokenizer over the real wire, several in one process, no Python.
 *
 *   npx tsx workers/simulated.ts --endpoint tcp://127.0.0.1:PORT --worker-id engine-0 [--worker-id trainer-0 ...]
 *
 * The only stand-in of the project. It passes the contract tests of the real workers and learns: simulated_model.ts is a
 * small but true language model with a true gradient. What it adds is a script that says when to be slow and when to
 * fail (simulated_worker.ts), and with it tests of everything that the controller must survive.
 *
 * Decisions
 *   - The kind of a worker is its id up to the first dash.
 *   - Workers of one process die together, as one process does: give one that is to die a process of its own.
 * Here: the process and the tokenizer. Engines are in simulated_engine.ts, ranks in simulated_trainer.ts.
 * Started by launch.ts (start, startMany).
 */
import { type Answer, EXIT_BAD_INPUT, readWorkerArgs, WorkerLink } from '../molt/bus.ts';
import type { Json } from '../molt/types.ts';
import { SimulatedEngine } from './simulated_engine.ts';
import {
  decodeIds,
  encodeText,
  IM_END,
  parseTurn,
  renderText,
  STOP_TOKEN_IDS,
  suffixText,
  TemplateError,
  VOCAB_SIZE,
} from './simulated_model.ts';
import { SimulatedRank } from './simulated_trainer.ts';
import { badRequest, checkIds, cut, InputError, SimulatedWorker, Wire } from './simulated_worker.ts';

// ---- Tokenizer ----

function startTokenizer(worker: SimulatedWorker): void {
  worker.serve('render', ({ items }) =>
    encodeItems(items.map((i) => () => renderText(i.messages, i.tools, i.add_generation_prompt))),
  );
  worker.serve('suffix', ({ items }) =>
    encodeItems(items.map((i) => () => suffixText(i.new_messages, i.last_ids.at(-1)))),
  );
  worker.serve('encode', ({ texts }) => encodeItems(texts.map((text) => () => text)));
  worker.serve('decode', ({ skip_special }, frames) => {
    checkIds(frames.ids, 'ids');
    return {
      fields: { texts: cut(frames.ids, frames.lengths, 'ids').map((ids) => decodeIds(ids, skip_special)) },
      frames: {},
    };
  });
  worker.serve('parse', ({ tools }, frames) => {
    checkIds(frames.ids, 'ids');
    if (tools.length !== frames.lengths.length)
      throw badRequest('tools', `${tools.length} tools for ${frames.lengths.length} items`);
    const items = cut(frames.ids, frames.lengths, 'ids').map((ids, i) => parseTurn([...ids], !isEmptyList(tools[i])));
    return { fields: { items }, frames: {} };
  });
  worker.link.ready({
    model_path: worker.options.model_path ?? '',
    vocab_size: VOCAB_SIZE,
    eos_token_id: IM_END,
    stop_token_ids: STOP_TOKEN_IDS,
    template_hash: 'simulated-chatml',
    suffix_exact: true,
    suffix_note: 'exact by construction',
  });
}

const isEmptyList = (value: Json | undefined): boolean => Array.isArray(value) && value.length === 0;

/** A bad item has its own error and no ids; the others are not its concern. */
function encodeItems(texts: readonly (() => string)[]): Answer<'encode'> {
  const errors: (string | null)[] = [];
  const rows = texts.map((text) => {
    try {
      const ids = encodeText(text());
      errors.push(null);
      return ids;
    } catch (error) {
      if (!(error instanceof TemplateError)) throw error;
      errors.push(error.message);
      return [];
    }
  });
  return {
    fields: { errors },
    frames: { ids: Int32Array.from(rows.flat()), lengths: Int32Array.from(rows, (row) => row.length) },
  };
}

// ---- Process ----

const CAPABILITIES: Record<string, Json> = {
  engine: { max_requests: null, transports: ['file'], logprobs: true, heads: 0, routes: false },
  trainer: { transports: ['file'] },
  tokenizer: {},
};

interface Hosted {
  readonly link: WorkerLink;
  readonly finished: () => Promise<void>; // resolves when what runs has ended
}

/** Connects and starts one worker. `all` are the ids of this process. */
async function host(endpoint: string, workerId: string, secret: string, all: readonly string[]): Promise<Hosted> {
  const kind = workerId.split('-')[0] as string;
  const capabilities = CAPABILITIES[kind];
  if (capabilities === undefined) {
    throw new Error(`Worker id ${workerId} must begin with one of ${Object.keys(CAPABILITIES).join(', ')}`);
  }
  const wire = new Wire();
  const copies = () => wire.copies();
  const link = await WorkerLink.connect({ endpoint, workerId, secret, workerKind: kind, capabilities, copies });
  const worker = new SimulatedWorker(link, workerId, wire);
  if (kind === 'engine') {
    const engine = new SimulatedEngine(worker);
    return { link, finished: () => engine.finished() };
  }
  if (kind === 'trainer') startRank(worker, all);
  else startTokenizer(worker);
  return { link, finished: () => worker.finished() };
}

function startRank(worker: SimulatedWorker, all: readonly string[]): void {
  const ranks = all.filter((id) => id.startsWith('trainer')).length;
  const worldSize = worker.options.world_size as number;
  if (ranks < worldSize)
    throw new Error(`This process hosts ${ranks} of ${worldSize} trainer ranks: all must live in one`);
  new SimulatedRank(worker);
}

const { endpoint, workerIds, secrets } = await readWorkerArgs();
const hosted = await Promise.all(workerIds.map((id) => host(endpoint, id, secrets[id] ?? '', workerIds))).catch(
  (error: Error) => {
    if (!(error instanceof InputError)) throw error;
    console.error(error.message);
    process.exit(EXIT_BAD_INPUT);
  },
);
await Promise.all(
  hosted.map(async ({ link, finished }) => {
    await link.stopped;
    await finished();
    await link.close();
  }),
);
process.exit(0);
