/** Bus, Peer and WorkerLink against scripted raw sockets, which may say what no honest twin would. */
import { randomBytes } from 'node:crypto';
import { afterEach, describe, expect, test } from 'vitest';
import { Dealer, Router } from 'zeromq';
import { Bus, type ConnectArgs, type ListenOptions, type Peer, RefusedError, WorkerLink } from '../molt/bus.ts';
import {
  type Decoded,
  decodeBody,
  encode,
  type Kind,
  type Opened,
  type Outgoing,
  openMessages,
  RemoteError,
} from '../molt/protocol.ts';
import type { Json } from '../molt/types.ts';

const SECRET = 'a secret';
const FOR_EVER_MS = 600_000;
const NONE = { fields: {}, frames: {} };
const closers: (() => unknown)[] = [];
afterEach(async () => {
  for (const close of closers.splice(0).reverse()) await close();
});

async function listen(options: ListenOptions = {}): Promise<Bus> {
  const bus = await Bus.listen({ heartbeatMs: FOR_EVER_MS, ...options });
  closers.push(() => bus.close());
  return bus;
}

/** A DEALER that sends what it is told to, with any header. */
class RawWorker {
  readonly socket: Dealer;
  readonly id: string;
  arrived: Opened[] = []; // with a message that was taken
  seq = 0;

  constructor(bus: Bus, id: string) {
    this.id = id;
    this.socket = new Dealer({
      routingId: `${id}.${randomBytes(16).toString('hex')}`,
      linger: 400,
      receiveTimeout: 10_000,
    });
    this.socket.connect(bus.endpoint);
    closers.push(() => this.socket.close());
  }

  async send(message: Omit<Outgoing, 'seq'> & { seq?: number }, answers: Kind | null = null): Promise<void> {
    await this.socket.send(encode({ seq: this.seq++, ...message }, answers));
  }

  hello(change: Record<string, Json> = {}): Promise<void> {
    const fields = {
      protocol_version: 2,
      worker_kind: 'engine',
      worker_id: this.id,
      pid: 1,
      host: 'here',
      secret: SECRET,
      capabilities: {},
    };
    return this.send({ kind: 'hello', fields: { ...fields, ...change } });
  }

  /** The next message; `answers` is the kind that an `ok` would answer. */
  async next(answers: Kind = 'ping'): Promise<Decoded> {
    if (this.arrived.length === 0) this.arrived = [...openMessages(await this.socket.receive())];
    const opened = this.arrived.shift() as Opened;
    return decodeBody(opened, opened.kind === 'ok' ? answers : null);
  }

  /** The next request, which must be of this kind. */
  async nextId(kind: Kind): Promise<number> {
    const message = await this.next();
    expect(message.kind).toBe(kind);
    return message.id as number;
  }

  ok(re: number, answers: Kind, fields = {}, frames = {}): Promise<void> {
    return this.send({ kind: 'ok', re, fields, frames }, answers);
  }

  error(re: number, type: string, more: Record<string, Json> = {}): Promise<void> {
    const fields = { type, message: `it ${type}`, field: null, traceback: null, retry_after_ms: null };
    return this.send({ kind: 'error', re, fields: { ...fields, ...more } });
  }
}

/** A worker past its handshake. */
async function connected(bus: Bus, kind = 'engine'): Promise<{ peer: Peer; raw: RawWorker }> {
  const peer = bus.expect(`${kind}-0`, SECRET, { depth: 3 });
  const raw = new RawWorker(bus, `${kind}-0`);
  await raw.hello({ worker_kind: kind });
  expect((await raw.next()).kind).toBe('welcome');
  return { peer, raw };
}

/** Everything sent before was handled once this is answered: order is first in, first out. */
async function roundTrip(peer: Peer, raw: RawWorker): Promise<void> {
  const answered = peer.request('ping', {});
  await raw.ok(await raw.nextId('ping'), 'ping');
  await answered;
}

const score = { ids: Int32Array.of(1, 2), lengths: Int32Array.of(2) };
const scored = [{ version: 1 }, { logprobs: Float32Array.of(0, -1) }] as const;

describe('handshake', () => {
  test('hello is answered by welcome with options, and ready gives its info', async () => {
    const bus = await listen({ heartbeatMs: 1234 });
    const peer = bus.expect('engine-0', SECRET, { depth: 3 });
    const raw = new RawWorker(bus, 'engine-0');
    await raw.hello({ capabilities: { heads: 0 } });
    const welcome = await raw.next();
    expect(welcome).toMatchObject({
      kind: 'welcome',
      seq: 0,
      fields: { incarnation: 0, options: { depth: 3 }, heartbeat_ms: 1234 },
    });
    expect((await peer.hello).capabilities).toEqual({ heads: 0 });
    expect(peer.isReady).toBe(false);
    await raw.send({ kind: 'ready', fields: { info: { max_len: 64 } } });
    expect(await peer.ready).toEqual({ max_len: 64 });
    expect([peer.isReady, peer.isConnected, peer.isLost]).toEqual([true, true, false]);
  });

  test.each([
    ['a wrong secret', { secret: 'another' }, 'Wrong secret'],
    ['an unknown worker', { worker_id: 'engine-9' }, 'No worker engine-9'],
    ['an unknown kind', { worker_kind: 'poet' }, 'Unknown worker kind poet'],
    ['another version', { protocol_version: 3 }, 'Protocol version 3, this side speaks 2'],
  ])('%s is refused', async (_, change, reason) => {
    const bus = await listen();
    const peer = bus.expect('engine-0', SECRET, null);
    const raw = new RawWorker(bus, 'engine-0');
    await raw.hello(change);
    const refused = await raw.next();
    expect(refused.kind).toBe('refused');
    expect(refused.fields.reason).toContain(reason);
    expect([peer.isConnected, peer.isLost, bus.counters.refused]).toEqual([false, false, 1]);
  });

  test('a header of another version is refused by a reason that names both versions', async () => {
    const bus = await listen();
    const raw = new RawWorker(bus, 'engine-0');
    await raw.socket.send(Buffer.from('83a17603a46b696e64a568656c6c6fa373657100', 'hex')); // {v: 3, kind: hello, seq: 0}
    expect((await raw.next()).fields.reason).toBe('Protocol version 3, this side speaks 2');
  });

  test('whoever speaks before welcome is refused and not heard again', async () => {
    const bus = await listen();
    const peer = bus.expect('engine-0', SECRET, null);
    const raw = new RawWorker(bus, 'engine-0');
    await raw.send({ kind: 'ready', fields: { info: {} } });
    expect((await raw.next()).fields.reason).toBe('Expected hello, got ready');
    await raw.hello();
    const other = new RawWorker(bus, 'engine-0');
    await other.hello();
    expect((await other.next()).kind).toBe('welcome');
    expect([peer.isConnected, bus.counters.after_end]).toEqual([true, 1]);
  });

  test('a second process of a connected worker is refused', async () => {
    const bus = await listen();
    await connected(bus);
    const other = new RawWorker(bus, 'engine-0');
    await other.hello();
    expect((await other.next()).fields.reason).toBe('engine-0 is already connected');
  });

  test('expecting an id again loses the process before and counts incarnations', async () => {
    const bus = await listen();
    const { peer } = await connected(bus);
    const next = bus.expect('engine-0', SECRET, null);
    expect((await peer.lost).message).toBe('engine-0: replaced by a new process');
    expect([peer.incarnation, next.incarnation]).toEqual([0, 1]);
    const raw = new RawWorker(bus, 'engine-0');
    await raw.hello();
    expect((await raw.next()).fields.incarnation).toBe(1);
  });

  test('options that cannot travel are an error of the caller', async () => {
    const bus = await listen();
    expect(() => bus.expect('engine-0', SECRET, { lr: Number.NaN })).toThrow('Field welcome.options.lr must be JSON');
  });

  test('only loopback is served', async () => {
    for (const endpoint of [
      'tcp://0.0.0.0:*',
      'tcp://*:*',
      'tcp://10.0.0.1:5000',
      'ipc:///tmp/x',
      'tcp://127.0.0.1.example.org:1',
    ]) {
      await expect(Bus.listen({ endpoint })).rejects.toThrow('Cannot listen on');
    }
  });
});

describe('sequence', () => {
  test('a repeated message is dropped and counted', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const seen: number[] = [];
    peer.on('heartbeat', ({ received }) => seen.push(received));
    await raw.send({ kind: 'heartbeat', fields: { received: 0, stats: {} } });
    await raw.send({ kind: 'heartbeat', fields: { received: 5, stats: {} }, seq: 1 });
    raw.seq = 2;
    await roundTrip(peer, raw);
    expect(seen).toEqual([0]);
    expect([bus.counters.repeated_seq, peer.isLost]).toEqual([1, false]);
  });

  test('a gap means lost', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    await raw.send({ kind: 'heartbeat', fields: { received: 0, stats: {} }, seq: 2 });
    expect((await peer.lost).message).toBe('engine-0: Expected message 1 of engine-0, got 2');
  });

  test('a message that does not fit the table means lost, and what follows is not heard', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    await raw.socket.send(Buffer.from('84a17601a46b696e64a66272656174ffa373657101a66672616d657390', 'hex'));
    await peer.lost;
    await raw.send({ kind: 'ready', fields: { info: {} } });
    await expect(peer.ready).rejects.toThrow('engine-0');
    const other = bus.expect('engine-1', SECRET, null);
    const next = new RawWorker(bus, 'engine-1');
    await next.hello();
    await other.hello;
    expect(bus.counters).toMatchObject({ lost: 1, after_end: 1 });
  });

  test('a message that this kind of worker may not send means lost', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    await raw.send({ kind: 'abort_turn', fields: { rollout_id: 'r', attempt: 0, turn: 0 } });
    expect((await peer.lost).message).toContain('abort_turn does not go from engine-0 to here');
  });
});

describe('requests', () => {
  test('replies find their requests in any order', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const first = peer.request('score', {}, score);
    const second = peer.request('score', {}, score);
    const ids = [await raw.nextId('score'), await raw.nextId('score')] as const;
    expect(ids[0]).not.toBe(ids[1]);
    await raw.ok(ids[1], 'score', { version: 2 }, scored[1]);
    await raw.ok(ids[0], 'score', ...scored);
    expect((await first).fields.version).toBe(1);
    expect((await second).fields.version).toBe(2);
    expect((await first).frames.logprobs).toEqual(Float32Array.of(0, -1));
  });

  test('an ill-formed request is an error of the sender and takes no seq', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    await expect(peer.request('resume', { epoch: 0.5 })).rejects.toThrow('resume.epoch must be an integer');
    expect(() => peer.send('cancel_rollout', {} as never)).toThrow('Missing field');
    await roundTrip(peer, raw);
  });

  test('an error reply rejects with its type, field and traceback', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const answer = peer.request('resume', { epoch: 1 });
    await raw.error(await raw.nextId('resume'), 'unsupported', { field: 'resume.epoch', traceback: 'line 1' });
    await expect(answer).rejects.toMatchObject({ type: 'unsupported', field: 'resume.epoch', traceback: 'line 1' });
  });

  test('awaiting code runs before the event behind the reply is handled', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const order: string[] = [];
    peer.on('tokens', () => order.push('tokens'));
    const caller = (async () => (await (async () => peer.request('ping', {}))()).fields)();
    const done = caller.then(() => order.push('reply'));
    const id = await raw.nextId('ping');
    await Promise.all([
      raw.ok(id, 'ping'),
      raw.send({
        kind: 'tokens',
        fields: { version: 0, texts: [], ended: [] },
        frames: {
          handles: new Int32Array(),
          counts: new Int32Array(),
          ids: new Int32Array(),
          logprobs: new Float32Array(),
        },
      }),
    ]);
    await roundTrip(peer, raw);
    await done;
    expect(order).toEqual(['reply', 'tokens']);
  });

  test('messages made together travel together, and in order', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const answered = Promise.all([peer.request('ping', {}), peer.request('stats', {}), peer.request('ping', {})]);
    const first = await raw.next();
    expect([first, ...raw.arrived].map(({ kind }) => kind)).toEqual(['ping', 'stats', 'ping']);
    const ids = [first, ...raw.arrived].map(({ id }) => id as number);
    await raw.ok(ids[0] as number, 'ping');
    await raw.ok(ids[1] as number, 'stats', { stats: {} });
    await raw.ok(ids[2] as number, 'ping');
    await answered;
  });

  test('a reply and the event behind it in one ZeroMQ message are handled apart', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const order: string[] = [];
    peer.on('heartbeat', () => order.push('event'));
    const done = peer.request('ping', {}).then(() => order.push('reply'));
    const ok = encode({ kind: 'ok', seq: raw.seq++, re: await raw.nextId('ping'), fields: {} }, 'ping');
    const beat = encode({ kind: 'heartbeat', seq: raw.seq++, fields: { received: 0, stats: {} } });
    await raw.socket.send([...ok, ...beat]);
    await done;
    await roundTrip(peer, raw);
    expect(order).toEqual(['reply', 'event']);
  });

  test('what stands before a malformed message is handled, what stands behind it is not', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const beat = () => encode({ kind: 'heartbeat', seq: raw.seq++, fields: { received: 0, stats: {} } });
    const beats: number[] = [];
    peer.on('heartbeat', ({ received }) => beats.push(received));
    await raw.socket.send([...beat(), Buffer.from([0xc1]), ...beat()]);
    expect((await peer.lost).message).toContain('Header is not msgpack');
    expect(beats).toEqual([0]);
  });

  test('a reply to an unknown id is counted and changes nothing', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    await raw.ok(999, 'ping');
    await roundTrip(peer, raw);
    await raw.ok(0, 'ping'); // answered before
    await roundTrip(peer, raw);
    expect([bus.counters.unknown_reply, peer.isLost]).toEqual([2, false]);
  });

  test('a deadline rejects, cancels at the worker, and its late reply is counted', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const answer = peer.request('resume', { epoch: 1 }, {}, { deadlineMs: 20 });
    const request = await raw.next();
    expect(request.deadlineMs).toBeGreaterThan(0);
    await expect(answer).rejects.toMatchObject({ type: 'deadline' });
    const cancel = await raw.next();
    expect(cancel).toMatchObject({ kind: 'cancel', fields: { request: request.id } });
    await raw.ok(cancel.id as number, 'cancel');
    await raw.ok(request.id as number, 'resume');
    await roundTrip(peer, raw);
    expect(bus.counters).toMatchObject({ deadlines: 1, late_reply: 1, unknown_reply: 0 });
  });

  test('an abort signal rejects and sends cancel', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const stop = new AbortController();
    const answer = peer.request('resume', { epoch: 1 }, {}, { signal: stop.signal });
    const id = await raw.nextId('resume');
    stop.abort();
    await expect(answer).rejects.toMatchObject({ type: 'cancelled' });
    expect(await raw.next()).toMatchObject({ kind: 'cancel', fields: { request: id } });
    await expect(peer.request('ping', {}, {}, { signal: stop.signal })).rejects.toMatchObject({ type: 'cancelled' });
  });

  test('pure kinds are tried three times after failed, others once', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const answer = peer.request('score', {}, score);
    const ids = new Set<number>();
    for (let i = 0; i < 3; i++) {
      const id = await raw.nextId('score');
      ids.add(id);
      await raw.error(id, 'failed');
    }
    await expect(answer).rejects.toMatchObject({ type: 'failed' });
    expect([ids.size, bus.counters.retries]).toEqual([3, 2]);
    const once = peer.request('resume', { epoch: 1 });
    await raw.error(await raw.nextId('resume'), 'failed');
    await expect(once).rejects.toMatchObject({ type: 'failed' });
    expect(bus.counters.retries).toBe(2);
  });

  test.each(['bad_request', 'unsupported', 'fatal', 'cancelled', 'deadline'])(
    '%s is never tried again',
    async (type) => {
      const bus = await listen();
      const { peer, raw } = await connected(bus);
      const answer = peer.request('score', {}, score);
      await raw.error(await raw.nextId('score'), type);
      await expect(answer).rejects.toMatchObject({ type });
      expect(bus.counters.retries).toBe(0);
    },
  );

  test('overloaded is tried again after the time it names, for any kind, within the deadline', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const answer = peer.request('resume', { epoch: 1 });
    await raw.error(await raw.nextId('resume'), 'overloaded', { retry_after_ms: 1 });
    await raw.error(await raw.nextId('resume'), 'overloaded', { retry_after_ms: 1 });
    await raw.ok(await raw.nextId('resume'), 'resume');
    await answer;
    expect(bus.counters.retries).toBe(2);
    const late = peer.request('resume', { epoch: 2 }, {}, { deadlineMs: 5_000 });
    await raw.error(await raw.nextId('resume'), 'overloaded', { retry_after_ms: 6_000 });
    await expect(late).rejects.toMatchObject({ type: 'overloaded' });
  });
});

describe('requests of a worker', () => {
  const turn = {
    kind: 'turn' as const,
    fields: {
      rollout_id: 'r',
      attempt: 0,
      turn: 0,
      session_id: 's',
      sampling: { temperature: 1, top_p: 1, top_k: 0, max_tokens: 4, seed: 1, stop: [], stop_token_ids: [] },
    },
    frames: { prompt: Int32Array.of(1) },
  };
  const answer = {
    fields: { reason: 'stop', detail: null, engine: 'engine-0', cached_tokens: 0, spans: [] },
    frames: { ids: Int32Array.of(9), logprobs: Float32Array.of(-1) },
  };

  test('are answered by their handler', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus, 'runner');
    peer.handle('turn', async ({ rollout_id }, { prompt }) => ({
      ...answer,
      fields: { ...answer.fields, detail: `${rollout_id} ${prompt[0]}` },
    }));
    await raw.send({ ...turn, id: 5 });
    expect(await raw.next('turn')).toMatchObject({ kind: 'ok', re: 5, fields: { detail: 'r 1' } });
  });

  test('errors of a handler travel: RemoteError as it is, lost as failed, others with their stack', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus, 'runner');
    const thrown = [
      new RemoteError('overloaded', 'later', { retryAfterMs: 7 }),
      new RemoteError('lost', 'the tokenizer is gone'),
      new TypeError('a bug'),
    ];
    peer.handle('turn', async () => {
      throw thrown.shift();
    });
    for (let id = 0; id < 3; id++) await raw.send({ ...turn, id });
    expect((await raw.next()).fields).toMatchObject({
      type: 'overloaded',
      message: 'later',
      retry_after_ms: 7,
      traceback: null,
    });
    expect((await raw.next()).fields).toMatchObject({ type: 'failed', message: 'the tokenizer is gone' });
    const bug = (await raw.next()).fields;
    expect(bug).toMatchObject({ type: 'failed', message: 'a bug' });
    expect(bug.traceback).toContain('bus.test.ts');
  });

  test('an answer that does not fit the table is a failed reply', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus, 'runner');
    peer.handle('turn', async () => ({ ...answer, fields: {} as never }));
    await raw.send({ ...turn, id: 0 });
    expect((await raw.next()).fields).toMatchObject({ type: 'failed', message: 'Missing field ok(turn).reason' });
  });

  test('nobody there to answer is unsupported', async () => {
    const bus = await listen();
    const { raw } = await connected(bus, 'runner');
    await raw.send({ ...turn, id: 0 });
    expect((await raw.next()).fields).toMatchObject({ type: 'unsupported', field: 'kind' });
  });

  test('their signal aborts when the worker is lost', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus, 'runner');
    const aborted = new Promise<void>((resolve) => {
      peer.handle('turn', async (_, __, signal) => {
        signal.addEventListener('abort', () => resolve());
        peer.declareLost('its process is gone');
        return answer;
      });
    });
    await raw.send({ ...turn, id: 0 });
    await aborted;
  });
});

describe('events', () => {
  test('an error of an event handler goes to onError and the bus goes on', async () => {
    const errors: Error[] = [];
    const bus = await listen({ onError: (error) => errors.push(error) });
    const { peer, raw } = await connected(bus, 'runner');
    peer.on('abort_turn', () => {
      throw new Error('a bug');
    });
    await raw.send({ kind: 'abort_turn', fields: { rollout_id: 'r', attempt: 0, turn: 0 } });
    await roundTrip(peer, raw);
    expect(errors.map((error) => error.message)).toEqual(['a bug']);
  });

  test('an event without a handler is counted', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus, 'runner');
    await raw.send({ kind: 'abort_turn', fields: { rollout_id: 'r', attempt: 0, turn: 0 } });
    await roundTrip(peer, raw);
    expect(bus.counters.unhandled_event).toBe(1);
  });

  test('a heartbeat updates statistics and when it was last heard', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const before = peer.lastHeard;
    await raw.send({ kind: 'heartbeat', fields: { received: 0, stats: { running: 3 } } });
    await roundTrip(peer, raw);
    expect(peer.stats).toEqual({ running: 3 });
    expect(peer.lastHeard).toBeGreaterThan(before);
  });
});

describe('loss', () => {
  test('pending requests reject as lost, later ones too, events are dropped and counted', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus, 'runner');
    const pending = peer.request('ping', {});
    await raw.nextId('ping');
    peer.declareLost('exit code 7');
    peer.declareLost('again');
    await expect(pending).rejects.toMatchObject({ type: 'lost', message: 'runner-0: exit code 7' });
    await expect(peer.request('ping', {})).rejects.toMatchObject({ type: 'lost' });
    peer.send('cancel_rollout', { rollout_id: 'r', attempt: 0, reason: 'cancelled' });
    await expect(peer.ready).rejects.toThrow('exit code 7');
    expect((await peer.lost).message).toBe('runner-0: exit code 7');
    expect(bus.counters).toMatchObject({ lost: 1, sent_to_lost: 1 });
  });

  test('sending into a broken link loses the peer', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    raw.socket.close();
    // The ROUTER learns of it in its own time; until then sends are taken.
    const beat = setInterval(() => peer.isLost || peer.request('ping', {}).catch(() => {}), 5);
    closers.push(() => clearInterval(beat));
    expect((await peer.lost).message).toContain('its link is gone');
  });

  test('a worker that takes nothing is lost beyond 256 MiB', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const frames = { ids: new Int32Array(15 * 2 ** 20), lengths: Int32Array.of(0) }; // 60 MiB
    const requests = Array.from({ length: 5 }, () => peer.request('score', {}, frames));
    const settled = Promise.allSettled(requests);
    expect((await peer.lost).message).toContain('bytes are unsent');
    for (const result of await settled) expect(result).toMatchObject({ status: 'rejected', reason: { type: 'lost' } });
    raw.socket.close();
  });

  test('what a worker says it received is no longer unsent, and neither is what it answered', async () => {
    const bus = await listen();
    const { peer, raw } = await connected(bus);
    const [first, second] = [peer.request('score', {}, score), peer.request('ping', {})];
    const id = await raw.nextId('score');
    expect(peer.unsentBytes).toBeGreaterThan(100);
    const all = peer.unsentBytes;
    await raw.ok(id, 'score', ...scored);
    await first;
    expect(peer.unsentBytes).toBeLessThan(all);
    expect(peer.unsentBytes).toBeGreaterThan(0);
    await raw.send({ kind: 'heartbeat', fields: { received: 2, stats: {} } });
    await raw.ok(await raw.nextId('ping'), 'ping');
    await second;
    expect(peer.unsentBytes).toBe(0);
  });

  test('closing the bus loses everyone, frees the port, and may be done twice', async () => {
    const bus = await listen();
    const { peer } = await connected(bus);
    const never = bus.expect('engine-1', SECRET, null);
    await bus.close();
    await bus.close();
    expect([peer.isLost, never.isLost]).toEqual([true, true]);
    const again = await Bus.listen({ endpoint: bus.endpoint });
    expect(again.endpoint).toBe(bus.endpoint);
    await again.close();
  });
});

// ---- The worker's end ----

/** A ROUTER that plays the controller. */
class RawController {
  readonly socket: Router;
  routing: Buffer | null = null;
  arrived: Opened[] = []; // with a message that was taken
  seq = 0;

  private constructor(socket: Router) {
    this.socket = socket;
  }

  static async listen(): Promise<RawController> {
    const socket = new Router({ linger: 400, receiveTimeout: 10_000 });
    await socket.bind('tcp://127.0.0.1:*');
    closers.push(() => socket.close());
    return new RawController(socket);
  }

  async send(message: Omit<Outgoing, 'seq'> & { seq?: number }): Promise<void> {
    await this.socket.send([this.routing as Buffer, ...encode({ seq: this.seq++, ...message })]);
  }

  async next(answers: Kind = 'ping'): Promise<Decoded> {
    if (this.arrived.length === 0) {
      const [routing, ...parts] = await this.socket.receive();
      this.routing = routing as Buffer;
      this.arrived = [...openMessages(parts)];
    }
    const opened = this.arrived.shift() as Opened;
    return decodeBody(opened, opened.kind === 'ok' ? answers : null);
  }

  welcome(): Promise<void> {
    return this.send({ kind: 'welcome', fields: { incarnation: 2, options: { depth: 3 }, heartbeat_ms: FOR_EVER_MS } });
  }
}

function connectArgs(controller: RawController, more: Partial<ConnectArgs> = {}): ConnectArgs {
  const endpoint = controller.socket.lastEndpoint as string;
  return {
    endpoint,
    workerId: 'runner-0',
    secret: SECRET,
    workerKind: 'runner',
    capabilities: { max: 1 },
    onLost: () => {},
    ...more,
  };
}

async function linked(more: Partial<ConnectArgs> = {}): Promise<{ controller: RawController; link: WorkerLink }> {
  const controller = await RawController.listen();
  const connecting = WorkerLink.connect(connectArgs(controller, more));
  const hello = await controller.next();
  expect(hello).toMatchObject({ kind: 'hello', seq: 0, fields: { secret: SECRET, capabilities: { max: 1 } } });
  await controller.welcome();
  const link = await connecting;
  closers.push(() => link.close());
  expect((await controller.next()).kind).toBe('heartbeat');
  return { controller, link };
}

describe('WorkerLink', () => {
  test('connects and knows its options', async () => {
    const { link } = await linked();
    expect([link.options, link.incarnation]).toEqual([{ depth: 3 }, 2]);
  });

  test('its routing id is the worker id and 128 random bits', async () => {
    const { controller } = await linked();
    expect(controller.routing?.toString()).toMatch(/^runner-0\.[0-9a-f]{32}$/);
  });

  test('a refusal rejects with the reason', async () => {
    const controller = await RawController.listen();
    const connecting = WorkerLink.connect(connectArgs(controller));
    await controller.next();
    await controller.send({ kind: 'refused', fields: { reason: 'not you' } });
    await expect(connecting).rejects.toThrow(new RefusedError('not you'));
  });

  test('a controller of another version is a refusal that names both versions', async () => {
    const controller = await RawController.listen();
    const connecting = WorkerLink.connect(connectArgs(controller));
    await controller.next();
    const header = Buffer.from('83a17603a46b696e64a7726566757365 64a373657100'.replace(' ', ''), 'hex');
    await controller.socket.send([controller.routing as Buffer, header]);
    await expect(connecting).rejects.toThrow('Protocol version 3, this side speaks 2');
  });

  test('no controller there is a loss', async () => {
    const controller = await RawController.listen();
    const args = connectArgs(controller);
    controller.socket.close();
    await expect(WorkerLink.connect(args)).rejects.toThrow('the link to the controller is gone');
  });

  test('lanes are answered at once, requests wait for ready', async () => {
    const { controller, link } = await linked();
    const start = {
      rollout_id: 'r',
      attempt: 0,
      group_id: 'g',
      index: 0,
      prompt: 'p',
      label: null,
      tools: null,
      seed: 1,
      limits: { max_turns: 1, max_tokens: 1, deadline_ms: 1 },
      sampling: { temperature: 1, top_p: 1, top_k: 0, max_tokens: 4, seed: 1, stop: [], stop_token_ids: [] },
    };
    await controller.send({ kind: 'start', id: 1, fields: start });
    await controller.send({ kind: 'ping', id: 2, fields: {} });
    expect(await controller.next('ping')).toMatchObject({ kind: 'ok', re: 2 });
    link.handle('start', async () => NONE);
    link.ready({ agent: 'a' });
    expect(await controller.next()).toMatchObject({ kind: 'ready', fields: { info: { agent: 'a' } } });
    expect(await controller.next('start')).toMatchObject({ kind: 'ok', re: 1 });
  });

  test('stacks and stats say what goes on', async () => {
    const { controller, link } = await linked();
    link.stats = { running: 2, broken: Number.NaN };
    await controller.send({ kind: 'stats', id: 1, fields: {} });
    expect((await controller.next('stats')).fields).toEqual({ stats: { running: 2, wire_stats_not_finite: 1 } });
    await controller.send({ kind: 'stacks', id: 2, fields: {} });
    expect((await controller.next('stacks')).fields.text).toContain('Answers requests');
  });

  test('cancel aborts the handler of that request', async () => {
    const { controller, link } = await linked();
    link.handle(
      'start',
      (_, __, signal) =>
        new Promise((_resolve, reject) => {
          signal.addEventListener('abort', () => reject(new RemoteError('cancelled', 'as asked')));
        }),
    );
    link.ready({});
    await controller.next();
    const fields = {
      rollout_id: 'r',
      attempt: 0,
      group_id: 'g',
      index: 0,
      prompt: 'p',
      label: null,
      tools: null,
      seed: 1,
      limits: { max_turns: 1, max_tokens: 1, deadline_ms: 1 },
      sampling: { temperature: 1, top_p: 1, top_k: 0, max_tokens: 4, seed: 1, stop: [], stop_token_ids: [] },
    };
    await controller.send({ kind: 'start', id: 1, fields });
    await controller.send({ kind: 'cancel', id: 2, fields: { request: 1 } });
    const replies = [await controller.next('cancel'), await controller.next('cancel')];
    expect(replies.map(({ kind, re }) => [kind, re]).sort()).toEqual([
      ['error', 1],
      ['ok', 2],
    ]);
  });

  test('an ill-formed request is answered with the name of the field', async () => {
    const { controller } = await linked();
    const packed = Buffer.from(
      '86a17602a46b696e64a463616e63656c'.replace('a463616e63656c', 'a663616e63656c') +
        'a373657101a2696401a66672616d657390a772657175657374c0',
      'hex',
    );
    await controller.socket.send([controller.routing as Buffer, packed]);
    controller.seq++;
    expect((await controller.next()).fields).toMatchObject({ type: 'bad_request', field: 'cancel.request' });
  });

  test('stop is answered and resolves stopped', async () => {
    const { controller, link } = await linked();
    await controller.send({ kind: 'stop', id: 1, fields: {} });
    expect(await controller.next('stop')).toMatchObject({ kind: 'ok', re: 1 });
    await link.stopped;
  });

  test('a gap of the controller is a loss', async () => {
    const lost = new Promise<string>((resolve) => {
      void linked({ onLost: resolve }).then(({ controller }) =>
        controller.send({ kind: 'ping', id: 1, fields: {}, seq: 9 }),
      );
    });
    expect(await lost).toBe('Expected message 1 of the controller, got 9');
  });

  test('the end of the controller is a loss and rejects what is pending', async () => {
    let reason = '';
    const { controller, link } = await linked({
      onLost: (text) => {
        reason = text;
      },
    });
    link.ready({});
    const pending = link.request(
      'rollout_done',
      {
        rollout_id: 'r',
        attempt: 0,
        reason: 'done',
        detail: null,
        reward: 1,
        score: null,
        truncated: false,
        info: {},
        turns: 1,
        spans: [],
      },
      {
        lengths: new Int32Array(),
        ids: new Int32Array(),
        loss_mask: new Uint8Array(),
        logprobs: new Float32Array(),
        versions: new Int32Array(),
        turns_of: new Int32Array(),
      },
    );
    controller.socket.close();
    await expect(pending).rejects.toMatchObject({ type: 'lost' });
    expect(reason).toBe('the link to the controller is gone');
  });

  test('bulk that arrives is confirmed without waiting for the heartbeat', async () => {
    const controller = await RawController.listen();
    const connecting = WorkerLink.connect(connectArgs(controller, { workerKind: 'trainer', workerId: 'trainer-0' }));
    await controller.next();
    await controller.welcome();
    const link = await connecting;
    closers.push(() => link.close());
    expect(await controller.next()).toMatchObject({ kind: 'heartbeat', fields: { received: 0 } });
    const ids = new Int32Array(5 * 2 ** 20); // 20 MiB
    await controller.send({
      kind: 'logprobs',
      id: 1,
      fields: { which: 'policy', temperature: 1 },
      frames: { ids, lengths: Int32Array.of(1) },
    });
    expect(await controller.next()).toMatchObject({ kind: 'heartbeat', fields: { received: 1 } });
  });
});
