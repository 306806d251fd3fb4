/**
 * The engine contract: the same assertions over real sockets for every kind of engine. One engine per kind serves all
 * tests of a file in turn; tests that end in its death start their own.
 */
import { join } from 'node:path';
import { afterAll, beforeAll, describe, expect, test, vi } from 'vitest';
import type { Worker } from '../molt/launch.ts';
import type { Fields } from '../molt/protocol.ts';
import { flatRows } from '../molt/trainer.ts';
import type { Sampling } from '../molt/types.ts';
import {
  Cell,
  corruptLast,
  ENGINE_KINDS,
  engineOptions,
  fillNaN,
  largestGap,
  promptOf,
  swapLayout,
  type TensorTable,
  vllm,
  writeSegment,
} from './contract.ts';
import { EngineClient, PLAIN, refused, type Turn } from './engine_client.ts';

const MAX_REQUESTS = 64;
const MAX_LEN = 2048;
const LONG = 1900; // tokens of a request that has not ended by itself when a test looks at it: seconds of work
const WAIT_MS = 30_000;

function logSoftmax(x: readonly number[]): number[] {
  const max = Math.max(...x);
  const total = max + Math.log(x.reduce((sum, v) => sum + Math.exp(v - max), 0));
  return x.map((v) => v - total);
}

vi.setConfig({ testTimeout: WAIT_MS });

describe.each(ENGINE_KINDS)('%s engine', (_, kind) => {
  let cell: Cell;
  let models: [string, string];
  let worker: Worker;
  let engine: EngineClient;
  let vocabSize: number;
  let epoch = 0; // rises with every pause of this engine
  let version = 0;

  function startEngine(): Promise<Worker> {
    const options = engineOptions(kind, models[0], { max_requests: MAX_REQUESTS, max_len: MAX_LEN });
    return cell.start({ id: 'engine-0', kind: 'engine', command: kind.command('engine'), options });
  }

  beforeAll(async () => {
    cell = await Cell.open();
    models = await kind.makeModels(cell.dir);
    worker = await startEngine();
    engine = new EngineClient(worker.peer);
    vocabSize = ((await worker.peer.ready) as { vocab_size: number }).vocab_size;
  }, kind.startMs);
  afterAll(() => cell?.close());

  /** Load the weights of a model as the next version, around a pause of its own. */
  async function loadModel(client: EngineClient, model: string): Promise<number> {
    const path = join(cell.dir, 'segment.bin');
    const tensors = writeSegment(model, path);
    await client.pause(++epoch, 'keep');
    const { fields } = await client.load(++version, path, tensors);
    expect(fields.loaded).toBe(tensors.length);
    await client.resume(epoch);
    return version;
  }

  /** Requests that go on until they are aborted, each with at least one token. */
  async function startLong(count: number): Promise<Turn[]> {
    const turns = await Promise.all(
      Array.from({ length: count }, (_, i) => engine.start(promptOf(5 + i, i), { seed: i, max_tokens: LONG })),
    );
    await engine.until(() => turns.every((turn) => turn.ids.length > 0));
    return turns;
  }

  describe('sampling', () => {
    test('logprobs at temperature 1 are those of score', async () => {
      const turns = await Promise.all(
        Array.from({ length: 12 }, (_, i) => engine.generate(promptOf(1 + 5 * i, i), { seed: i, max_tokens: 5 + i })),
      );
      const scored = await engine.score(turns.map((t) => Int32Array.from([...t.prompt, ...t.ids])));
      let at = 0;
      for (const turn of turns) {
        const row = scored.subarray(at, at + turn.prompt.length + turn.ids.length);
        expect(row[0]).toBe(0);
        expect(largestGap(turn.logprobs, row.subarray(turn.prompt.length))).toBeLessThan(1e-5);
        at += row.length;
      }
    });

    test.each([
      { temperature: 0.6, top_k: 0, top_p: 1 },
      { temperature: 0.9, top_k: 5, top_p: 1 },
      { temperature: 0.8, top_k: 0, top_p: 0.7 },
      { temperature: 0.7, top_k: 20, top_p: 0.8 },
    ])('logprobs at %o are those of the distribution drawn from', async (sampling) => {
      const turn = await engine.generate(promptOf(6, 3), { ...sampling, max_tokens: 3 });
      for (const [k, id] of turn.ids.entries()) {
        // The whole distribution at this position, by scoring every id of the vocabulary.
        const prefix = [...turn.prompt, ...turn.ids.slice(0, k)];
        const scored = await engine.score(Array.from({ length: vocabSize }, (_, v) => Int32Array.from([...prefix, v])));
        const scaled = Array.from(
          { length: vocabSize },
          (_, v) => (scored[v * (prefix.length + 1) + prefix.length] as number) / sampling.temperature,
        );
        const order = [...scaled.keys()].sort((a, b) => (scaled[b] as number) - (scaled[a] as number));
        const byK = sampling.top_k > 0 ? order.slice(0, sampling.top_k) : order;
        const probabilities = logSoftmax(byK.map((v) => scaled[v] as number)).map(Math.exp);
        let before = 0;
        const kept = byK.filter((_, rank) => {
          const keep = before < sampling.top_p;
          before += probabilities[rank] as number;
          return keep;
        });
        const logprobs = logSoftmax(kept.map((v) => scaled[v] as number));
        expect(kept).toContain(id);
        expect(Math.abs((turn.logprobs[k] as number) - (logprobs[kept.indexOf(id)] as number))).toBeLessThan(1e-5);
      }
    });

    test('temperature 0 takes the likeliest token, with the logprob of score', async () => {
      const turn = await engine.generate(promptOf(6, 4), { temperature: 0, max_tokens: 4 });
      const other = await engine.generate(promptOf(6, 4), { temperature: 0, max_tokens: 4, seed: 99 });
      expect(other.ids).toEqual(turn.ids);
      expect(largestGap(turn.logprobs, await engine.scoreTurn(turn))).toBeLessThan(1e-5);
      const scored = await engine.score(
        Array.from({ length: vocabSize }, (_, v) => Int32Array.from([...turn.prompt, v])),
      );
      const last = Array.from({ length: vocabSize }, (_, v) => scored[v * 7 + 6] as number);
      expect(turn.ids[0]).toBe(last.indexOf(Math.max(...last)));
    });

    test('a seed gives the same tokens alone and among 64 ragged requests', async () => {
      const requests = Array.from({ length: MAX_REQUESTS }, (_, i) => ({
        prompt: promptOf(1 + ((i * 13) % 90), i),
        seed: i * 1000,
        max_tokens: 4 + (i % 21),
      }));
      const together = await Promise.all(requests.map(({ prompt, ...sampling }) => engine.generate(prompt, sampling)));
      for (const i of [0, 31, 63]) {
        const { prompt, ...sampling } = requests[i] as (typeof requests)[number];
        const alone = await engine.generate(prompt, sampling);
        expect(alone.ids).toEqual(together[i]?.ids);
        expect(largestGap(alone.logprobs, together[i]?.logprobs ?? [])).toBeLessThan(1e-5);
      }
      const seeds = await Promise.all([1, 2].map((seed) => engine.generate(promptOf(9, 9), { seed })));
      expect(seeds[0]?.ids).not.toEqual(seeds[1]?.ids);
    });

    test('a second turn reuses the keys of the first and its logprobs stay those of score', async () => {
      const first = await engine.generate(promptOf(60, 21), {}, { session_id: 'chat' });
      expect(first.ended?.cached_tokens).toBeLessThan(60);
      const second = await engine.generate(
        [...first.prompt, ...first.ids, ...promptOf(9, 22)],
        {},
        { session_id: 'chat' },
      );
      expect(second.ended?.cached_tokens).toBeGreaterThanOrEqual(60);
      expect(second.ended?.cached_tokens).toBeLessThan(second.prompt.length);
      expect(largestGap(second.logprobs, await engine.scoreTurn(second))).toBeLessThan(1e-5);
    });
  });

  describe('endings', () => {
    test('max_tokens ends with length, exactly', async () => {
      const turn = await engine.generate(promptOf(5, 1), { max_tokens: 9 });
      expect(turn.ended?.reason).toBe('length');
      expect(turn.ids.length).toBe(9);
    });

    test('a stop id ends the turn and is its last id', async () => {
      const free = await engine.generate(promptOf(5, 2), { max_tokens: 24 });
      const stop = free.ids[8] as number;
      const turn = await engine.generate(promptOf(5, 2), { max_tokens: 24, stop_token_ids: [stop] });
      expect(turn.ended?.reason).toBe('stop');
      expect(turn.ids).toEqual(free.ids.slice(0, free.ids.indexOf(stop) + 1));
    });

    test('a stop string ends the turn at once and the ids hold all of it', async () => {
      const { free, stop } = await turnWithText();
      const sampling = { seed: free.seed, max_tokens: 120 };
      const turn = await engine.generate(
        promptOf(7, 5),
        { ...sampling, stop: ['never this', stop] },
        { want_text: true },
      );
      expect(turn.ended?.reason).toBe('stop');
      expect(turn.ids).toEqual(free.turn.ids.slice(0, turn.ids.length));
      expect(turn.text).toContain(stop);
      const shorter = await engine.generate(
        promptOf(7, 5),
        { ...sampling, max_tokens: turn.ids.length - 1 },
        { want_text: true },
      );
      expect(shorter.text).not.toContain(stop);
    });

    /** A turn and two neighbouring printable characters of its text, of two tokens. A random policy writes such soon. */
    async function turnWithText(): Promise<{ free: { turn: Turn; seed: number }; stop: string }> {
      for (let seed = 0; seed < 50; seed++) {
        const turn = await engine.generate(promptOf(7, 5), { seed, max_tokens: 120 }, { want_text: true });
        const text = turn.text.replace(/<[|/]?\w+[|]?>/g, ' '); // a special token is one token
        const found = /[!-;=-~]{2}/.exec(text.slice(8));
        if (found) return { free: { turn, seed }, stop: found[0] };
      }
      throw new Error('no readable text in 50 turns');
    }

    test('abort gives the partial turn with reason abort and leaves the others alone', async () => {
      const [aborted, kept] = (await startLong(2)) as [Turn, Turn];
      await engine.abort([aborted]);
      expect(aborted.ended?.reason).toBe('abort');
      expect(kept.ended).toBeNull();
      expect(aborted.ids.length).toBeGreaterThan(0);
      expect(largestGap(aborted.logprobs, await engine.scoreTurn(aborted))).toBeLessThan(1e-5);
      const again = await engine.generate(aborted.prompt, { seed: 0, max_tokens: aborted.ids.length });
      expect(again.ids).toEqual(aborted.ids);
      await engine.abort([kept, aborted]); // one that has ended already is no error
    });

    test('resumed from already it continues as if never interrupted', async () => {
      const whole = await engine.generate(promptOf(8, 6), { seed: 3, max_tokens: 30 });
      for (const already of [1, 13]) {
        const prompt = [...whole.prompt, ...whole.ids.slice(0, already)];
        const rest = await engine.generate(prompt, { seed: 3, max_tokens: 30 - already }, { already });
        expect(rest.ids).toEqual(whole.ids.slice(already));
        expect(largestGap(rest.logprobs, whole.logprobs.slice(already))).toBeLessThan(1e-5);
      }
    });

    test('a stop string that began before the interruption ends the resumed turn', async () => {
      const { free, stop } = await turnWithText();
      const whole = await engine.generate(promptOf(7, 5), { seed: free.seed, max_tokens: 120, stop: [stop] });
      expect(whole.text).toBe(''); // nobody wanted it
      const already = whole.ids.length - 1;
      const sampling = { seed: free.seed, max_tokens: 120 - already, stop: [stop] };
      const rest = await engine.generate([...whole.prompt, ...whole.ids.slice(0, already)], sampling, { already });
      expect(rest.ids).toEqual(whole.ids.slice(already));
      expect(rest.ended?.reason).toBe('stop');
    });
  });

  describe('refusals', () => {
    test.each<[string, Partial<Sampling>, Partial<Fields<'generate'>>, number[]]>([
      ['temperature', { temperature: -1 }, {}, [65]],
      ['top_p', { top_p: 0 }, {}, [65]],
      ['top_p', { top_p: 1.5 }, {}, [65]],
      ['top_k', { top_k: -1 }, {}, [65]],
      ['max_tokens', { max_tokens: 0 }, {}, [65]],
      ['max_tokens', { max_tokens: MAX_LEN }, {}, [65]],
      ['stop', { stop: [''] }, {}, [65]],
      ['stop_token_ids', { stop_token_ids: [1_000_000] }, {}, [65]],
      ['prompt', {}, {}, []],
      ['prompt', {}, {}, [-1]],
      ['prompt', {}, {}, [1_000_000]],
      ['prompt', {}, {}, promptOf(MAX_LEN, 0)],
      ['already', {}, { already: 2 }, [65]],
      ['heads', {}, { heads: 1 }, [65]],
      ['want_routes', {}, { want_routes: true }, [65]],
    ])('the error names the field %s for %o %o', async (field, sampling, more, prompt) => {
      const error = await refused(engine.start(prompt, sampling, more));
      expect(error.type).toBe(['heads', 'want_routes'].includes(field) ? 'unsupported' : 'bad_request');
      expect(error.field).toMatch(new RegExp(`(^|\\.)${field}$`));
    });

    test.runIf(kind === vllm)('temperatures that vllm would change or refuse are refused here', async () => {
      for (const temperature of [0.001, 2.5]) {
        const error = await refused(engine.start([65], { temperature }));
        expect(error).toMatchObject({ type: 'bad_request', field: 'sampling.temperature' });
      }
      expect((await engine.generate([65], { temperature: 2, max_tokens: 1 })).ids.length).toBe(1);
    });

    test('the longest request that fits is taken', async () => {
      const turn = await engine.start(promptOf(MAX_LEN - 3, 0), { max_tokens: 3 });
      await engine.until(() => turn.ended !== null);
      expect(turn.ids.length).toBe(3);
    });

    test('an unknown field does not leave the controller', async () => {
      const more = { min_p: 0.1 } as unknown as Partial<Fields<'generate'>>;
      await expect(engine.start([65], {}, more)).rejects.toMatchObject({
        field: expect.stringContaining('min_p') as string,
      });
      await expect(engine.start([65], { min_p: 0.1 } as Partial<Sampling>)).rejects.toMatchObject({
        field: expect.stringContaining('min_p') as string,
      });
    });

    test('score refuses lengths that do not add up and ids outside the vocabulary', async () => {
      const score = (ids: number[], lengths: number[]) =>
        engine.peer.request('score', {}, { ids: Int32Array.from(ids), lengths: Int32Array.from(lengths) });
      expect((await refused(score([1, 2, 3], [2]))).type).toBe('bad_request');
      expect((await refused(score([1, 1_000_000], [2]))).type).toBe('bad_request');
    });

    test('more than max_requests are overloaded', async () => {
      const turns = await startLong(MAX_REQUESTS);
      // bus.ts tries an overloaded request again, so it is the deadline or the last refusal that comes back.
      const error = await refused(
        engine.peer.request('generate', generateFields(), { prompt: Int32Array.of(65) }, { deadlineMs: 500 }),
      );
      expect(['overloaded', 'deadline']).toContain(error.type);
      await engine.abort(turns);
      expect((await engine.generate([65], { max_tokens: 1 })).ids.length).toBe(1);
    });
  });

  function generateFields(): Fields<'generate'> {
    return {
      rollout_id: 'r',
      attempt: 0,
      turn: 0,
      session_id: 's',
      already: 0,
      want_text: false,
      heads: 0,
      want_routes: false,
      sampling: PLAIN,
    };
  }

  describe('pause', () => {
    /** What has been said is all: a few round trips bring no token. */
    async function expectSilence(): Promise<void> {
      const { events } = engine;
      for (let i = 0; i < 3; i++) await engine.score([Int32Array.of(1, 2)]);
      expect(engine.events).toBe(events);
    }

    function expectTotals(answer: Awaited<ReturnType<EngineClient['pause']>>, turns: readonly Turn[]): void {
      expect([...answer.frames.handles].sort((a, b) => a - b)).toEqual(
        turns.map((t) => t.handle).sort((a, b) => a - b),
      );
      for (const [i, handle] of answer.frames.handles.entries()) {
        expect(engine.turns.get(handle)?.ids.length).toBe(answer.frames.totals[i]);
      }
    }

    test('keep stops with exact counts, and resume continues what a seed decides', async () => {
      const turns = await startLong(5);
      const answer = await engine.pause(++epoch, 'keep', false);
      expect(answer.fields.version).toBe(version);
      expectTotals(answer, turns);
      await expectSilence();
      // Said again it changes nothing, whatever else it says.
      expectTotals(await engine.pause(epoch, 'keep', false), turns);
      expectTotals(await engine.pause(epoch, 'abort', false), turns);
      expect(turns.map((turn) => turn.ended)).toEqual(turns.map(() => null));
      await engine.resume(epoch);
      const [first] = turns as [Turn];
      const paused = first.ids.length;
      await engine.until(() => first.ids.length > paused + 3);
      await engine.abort(turns);
      const again = await engine.generate(first.prompt, { seed: 0, max_tokens: first.ids.length });
      expect(again.ids).toEqual(first.ids);
      expect(largestGap(again.logprobs, first.logprobs)).toBeLessThan(1e-5);
    });

    test('drain answers when all have ended by themselves', async () => {
      const turns = await Promise.all(
        Array.from({ length: 4 }, (_, i) => engine.start(promptOf(4, i), { seed: i, max_tokens: 6 + i })),
      );
      const answer = await engine.pause(++epoch, 'drain');
      expect(turns.map((t) => t.ended?.reason)).toEqual(['length', 'length', 'length', 'length']);
      expect(answer.frames.handles.length).toBe(0);
      await engine.resume(epoch);
    });

    test('a drain that is withdrawn lets the engine go on', async () => {
      const turns = await startLong(2);
      const withdraw = new AbortController();
      const fields = { epoch: ++epoch, mode: 'drain', clear_cache: false };
      const pause = refused(engine.peer.request('pause', fields, undefined, { signal: withdraw.signal }));
      const late = await engine.start(promptOf(3, 3), { max_tokens: 2 });
      const before = turns[0]?.ids.length ?? 0;
      await engine.until(() => (turns[0]?.ids.length ?? 0) > before);
      expect(late.ids.length).toBe(0);
      withdraw.abort();
      expect((await pause).type).toBe('cancelled');
      await engine.until(() => late.ended !== null);
      expect(turns.map((turn) => turn.ended)).toEqual([null, null]);
      await engine.abort(turns);
    });

    test('a drain asked for while another pause takes effect does not outlive the resume', async () => {
      const turns = await startLong(1);
      await Promise.all([engine.pause(++epoch, 'keep'), engine.pause(++epoch, 'drain')]);
      await engine.resume(epoch);
      expect((await engine.generate(promptOf(3, 3), { max_tokens: 2 })).ids.length).toBe(2);
      await engine.abort(turns);
      expect((await engine.generate(promptOf(3, 3), { max_tokens: 2 })).ids.length).toBe(2);
    });

    test.runIf(kind === vllm)('a pause that is withdrawn before it holds lets the engine go on', async () => {
      const scoring = engine.score(Array.from({ length: 12 }, (_, i) => Int32Array.from(promptOf(1000, i))));
      const withdraw = new AbortController();
      const fields = { epoch: ++epoch, mode: 'keep', clear_cache: false };
      const pause = refused(engine.peer.request('pause', fields, undefined, { signal: withdraw.signal }));
      const waiting = await engine.start(promptOf(3, 3), { max_tokens: 2 });
      withdraw.abort();
      expect((await pause).type).toBe('cancelled');
      await scoring;
      await engine.until(() => waiting.ended !== null);
      expect(waiting.ids.length).toBe(2);
    });

    test('abort answers when all were ended with what they had', async () => {
      const turns = await startLong(4);
      const answer = await engine.pause(++epoch, 'abort');
      expect(turns.map((t) => t.ended?.reason)).toEqual(['abort', 'abort', 'abort', 'abort']);
      expect(answer.frames.handles.length).toBe(0);
      await expectSilence();
      await engine.resume(epoch);
    });

    test('a request that comes while paused waits for resume', async () => {
      await engine.pause(++epoch, 'keep');
      const turn = await engine.start(promptOf(5, 1), { max_tokens: 3 });
      await expectSilence();
      const answer = await engine.pause(++epoch, 'keep');
      expect([...answer.frames.handles]).toEqual([turn.handle]);
      expect([...answer.frames.totals]).toEqual([0]);
      await engine.resume(epoch);
      await engine.until(() => turn.ended !== null);
      expect(turn.ids.length).toBe(3);
    });

    test('a request aborted while it waits ends without a token', async () => {
      await engine.pause(++epoch, 'keep');
      const turn = await engine.start(promptOf(5, 1));
      await engine.abort([turn]);
      expect([turn.ended?.reason, turn.ids.length]).toEqual(['abort', 0]);
      await engine.resume(epoch);
    });

    test('an unknown mode and an epoch that is over are refused', async () => {
      expect(await refused(engine.pause(++epoch, 'stop'))).toMatchObject({ type: 'bad_request', field: 'mode' });
      await engine.pause(++epoch, 'keep');
      expect(await refused(engine.pause(epoch - 1, 'keep'))).toMatchObject({ type: 'bad_request', field: 'epoch' });
      expect(await refused(engine.resume(epoch - 1))).toMatchObject({ type: 'bad_request', field: 'epoch' });
      await engine.resume(epoch);
    });
  });

  describe('refit', () => {
    const probe = Int32Array.from(promptOf(40, 17));

    test('weights are refused unless the engine is paused, and nothing changes', async () => {
      const path = join(cell.dir, 'early.bin');
      const tensors = writeSegment(models[1], path);
      const before = await engine.score([probe]);
      const error = await refused(engine.load(version + 1, path, tensors));
      expect(error.type).toBe('bad_request');
      expect(await engine.score([probe])).toEqual(before);
    });

    test('a request in progress goes on under the new version and both parts have the logprobs of their own weights', async () => {
      const before = await engine.score([probe]);
      const old = version;
      const turns = await startLong(6);
      const path = join(cell.dir, 'next.bin');
      const tensors = writeSegment(models[1], path);
      const answer = await engine.pause(++epoch, 'keep');
      const scoredOld = await Promise.all(turns.map((turn) => engine.scoreTurn(turn)));
      await engine.load(++version, path, tensors);
      const { fields, frames } = await engine.peer.request('score', {}, flatRows([probe]));
      expect(fields.version).toBe(version);
      expect(largestGap(frames.logprobs, before)).toBeGreaterThan(0.01);
      await engine.resume(epoch);
      await engine.until(() => turns.every((turn) => turn.versions.at(-1) === version && turn.ids.length >= 8));
      await engine.abort(turns);
      for (const [i, handle] of answer.frames.handles.entries()) {
        const turn = engine.turns.get(handle) as Turn;
        const cut = answer.frames.totals[i] as number;
        expect(turn.versions).toEqual(turn.versions.map((_, k) => (k < cut ? old : version)));
        const scored = await engine.scoreTurn(turn);
        expect(largestGap(turn.logprobs.slice(cut), scored.subarray(cut))).toBeLessThan(1e-5);
        const mine = scoredOld[turns.indexOf(turn)] as Float32Array;
        expect(largestGap(turn.logprobs.slice(0, cut), mine)).toBeLessThan(1e-5);
      }
      await loadModel(engine, models[0]);
      expect(largestGap(await engine.score([probe]), before)).toBeLessThan(1e-6);
    });

    test.each([true, false])('a new request does not reuse keys of the old version (clear_cache %s)', async (clear) => {
      const prompt = promptOf(50, 30);
      const first = await engine.generate(prompt, {}, { session_id: 'again' });
      await engine.pause(++epoch, 'keep', clear);
      const path = join(cell.dir, 'other.bin');
      await engine.load(++version, path, writeSegment(models[1], path));
      await engine.resume(epoch);
      const second = await engine.generate([...prompt, ...first.ids], {}, { session_id: 'again' });
      expect(second.ended?.cached_tokens).toBe(0);
      expect(largestGap(second.logprobs, await engine.scoreTurn(second))).toBeLessThan(1e-5);
      await loadModel(engine, models[0]);
    });

    test('weights sent in parts count when the last part has come', async () => {
      const path = join(cell.dir, 'parts.bin');
      const tensors = writeSegment(models[1], path);
      const before = await engine.score([probe]);
      await engine.pause(++epoch, 'keep');
      await engine.load(++version, path, tensors.slice(0, 2), { last: false });
      expect(await engine.score([probe])).toEqual(before);
      await engine.load(version, path, tensors.slice(2), { last: true });
      const parts = await engine.score([probe]);
      await engine.resume(epoch);
      await loadModel(engine, models[1]);
      expect(await engine.score([probe])).toEqual(parts);
      await loadModel(engine, models[0]);
      expect(largestGap(await engine.score([probe]), before)).toBeLessThan(1e-6);
    });

    test('weights are staged while requests go on, and the load of them is that of the same bytes', async () => {
      const before = await engine.score([probe]);
      const turns = await startLong(4);
      const path = join(cell.dir, 'staged.bin');
      const tensors = writeSegment(models[1], path);
      const old = version++;
      const moved = async () => {
        const counts = turns.map((turn) => turn.ids.length);
        await engine.until(() => turns.every((turn, i) => turn.ids.length > (counts[i] as number)));
      };
      // Before its answer, after it, and after it was said again the engine samples, by the old weights.
      const [{ fields }] = await Promise.all([engine.stage(version, path, tensors), moved()]);
      expect(fields.verify_ms).toBeGreaterThan(0);
      await engine.stage(version, path, tensors);
      await moved();
      expect(turns.flatMap((turn) => turn.versions).every((each) => each === old)).toBe(true);
      expect(await engine.score([probe])).toEqual(before);
      const paused = await engine.pause(++epoch, 'keep');
      await engine.stage(version, path, tensors);
      expect((await engine.load(version, path, tensors)).fields.loaded).toBe(tensors.length);
      const staged = await engine.score([probe]);
      await engine.resume(epoch);
      await moved();
      await engine.abort(turns);
      for (const [i, handle] of paused.frames.handles.entries()) {
        const { versions } = engine.turns.get(handle) as Turn;
        expect(versions).toEqual(versions.map((_, k) => (k < (paused.frames.totals[i] as number) ? old : version)));
      }
      await loadModel(engine, models[1]); // not staged
      expect(await engine.score([probe])).toEqual(staged);
      await loadModel(engine, models[0]);
      expect(largestGap(await engine.score([probe]), before)).toBeLessThan(1e-6);
    });

    test('what is loaded is what load_weights names, whatever was staged before', async () => {
      const before = await engine.score([probe]);
      const [path, other] = [join(cell.dir, 'named.bin'), join(cell.dir, 'staged-only.bin')];
      const tensors = writeSegment(models[1], path);
      await engine.stage(version + 1, other, writeSegment(models[0], other));
      await engine.pause(++epoch, 'keep');
      await engine.load(++version, path, tensors);
      expect(largestGap(await engine.score([probe]), before)).toBeGreaterThan(0.01);
      await engine.resume(epoch);
      // Staged as one version, loaded as another one.
      await engine.stage(version + 2, other, writeSegment(models[0], other));
      await engine.pause(++epoch, 'keep');
      await engine.load(++version, other, writeSegment(models[0], other));
      await engine.resume(epoch);
      expect(largestGap(await engine.score([probe]), before)).toBeLessThan(1e-6);
    });

    test('a wrong layout passes the checksums and shows in score', async () => {
      const before = await engine.score([probe]);
      const path = join(cell.dir, 'swapped.bin');
      const tensors = swapLayout(path, writeSegment(models[0], path));
      await engine.pause(++epoch, 'keep');
      await engine.load(++version, path, tensors);
      expect(largestGap(await engine.score([probe]), before)).toBeGreaterThan(1e-3);
      await engine.resume(epoch);
      await loadModel(engine, models[0]);
      expect(largestGap(await engine.score([probe]), before)).toBeLessThan(1e-6);
    });

    test('weights that are not finite end requests with error, and not one token comes of them', async () => {
      const path = join(cell.dir, 'nan.bin');
      const turns = await startLong(2);
      await engine.pause(++epoch, 'keep');
      const totals = turns.map((turn) => turn.ids.length);
      await engine.load(++version, path, fillNaN(path, writeSegment(models[0], path)));
      await engine.resume(epoch);
      turns.push(await engine.start(promptOf(3, 3)));
      await engine.until(() => turns.every((turn) => turn.ended !== null));
      expect(turns.map((turn) => turn.ended?.reason)).toEqual(['error', 'error', 'error']);
      expect(turns.map((turn) => turn.ended?.detail)).not.toContain(null);
      expect(turns.map((turn) => turn.ids.length)).toEqual([...totals, 0]);
      await loadModel(engine, models[0]);
      expect((await engine.generate(promptOf(3, 3), { max_tokens: 2 })).ids.length).toBe(2);
    });

    /** The engine dies of the work; another one takes its place. */
    async function dies(work: () => Promise<unknown>, offender: string | undefined): Promise<void> {
      const error = await refused(work());
      expect(error.type).toBe('fatal');
      expect(error.message).toContain(offender);
      expect((await worker.exited).code).toBe(1);
      await worker.peer.lost;
      worker = await startEngine();
      engine = new EngineClient(worker.peer);
      epoch = version = 0;
    }

    test('damage that is found while it is staged ends the engine', { timeout: kind.startMs }, async () => {
      const path = join(cell.dir, 'staged-bad.bin');
      const tensors = writeSegment(models[1], path);
      corruptLast(path, tensors);
      await dies(() => engine.stage(version + 1, path, tensors), tensors.at(-1)?.name);
    });

    test('a file that is written after it was staged is never loaded', { timeout: kind.startMs }, async () => {
      const path = join(cell.dir, 'staged-late.bin');
      const tensors = writeSegment(models[1], path);
      await engine.stage(++version, path, tensors);
      corruptLast(path, tensors);
      await engine.pause(++epoch, 'keep');
      if (kind.stages === 'copy') {
        await engine.load(version, path, tensors);
        const loaded = await engine.score([probe]);
        await engine.resume(epoch);
        await loadModel(engine, models[1]);
        expect(await engine.score([probe])).toEqual(loaded);
      } else await dies(() => engine.load(version, path, tensors), `${path} was written after`);
    });

    test('keys of earlier weights are not taken for those of the same version', async () => {
      const prompt = promptOf(100, 3);
      for (const model of [models[1], models[0]]) {
        const path = join(cell.dir, 'segment.bin');
        const tensors = writeSegment(model, path);
        await engine.pause(++epoch, 'keep', false);
        await engine.load(version, path, tensors);
        await engine.resume(epoch);
        const turn = await engine.generate(prompt, { max_tokens: 3 });
        expect(largestGap(turn.logprobs, await engine.scoreTurn(turn))).toBeLessThan(1e-5);
      }
    });

    test('stop answers what was asked, and ends a paused engine with what it keeps', {
      timeout: kind.startMs,
    }, async () => {
      const own = await cell.start({
        id: 'engine-stopped',
        kind: 'engine',
        command: kind.command('engine'),
        options: engineOptions(kind, models[0], { max_len: MAX_LEN }),
      });
      const client = new EngineClient(own.peer);
      const turn = await client.start(promptOf(5, 0), { max_tokens: LONG });
      await client.until(() => turn.ids.length > 0);
      await client.pause(1, 'keep');
      const scoring = client.score([Int32Array.from(promptOf(1000, 1))]);
      await own.peer.request('stop', {});
      expect((await scoring).length).toBe(1000);
      expect((await own.exited).code).toBe(0);
    });

    // Last, since the engine dies of it, twice.
    test('a corrupted or missing tensor is fatal, the process exits, and a new one takes the good weights', {
      timeout: kind.startMs,
    }, async () => {
      await loadModel(engine, models[1]);
      const good = await engine.score([probe]);
      const path = join(cell.dir, 'bad.bin');
      const table = writeSegment(models[1], path);
      corruptLast(path, table);
      await expectDeath(path, table, table.at(-1)?.name);

      const before = worker.peer.incarnation;
      worker = await startEngine();
      engine = new EngineClient(worker.peer);
      epoch = version = 0;
      expect(worker.peer.incarnation).toBe(before + 1);
      await loadModel(engine, models[1]);
      expect(await engine.score([probe])).toEqual(good);

      await expectDeath(path, writeSegment(models[1], path).slice(0, -1), table.at(-1)?.name);
    });

    async function expectDeath(path: string, table: TensorTable, offender: string | undefined): Promise<void> {
      await engine.pause(++epoch, 'keep');
      const error = await refused(engine.load(++version, path, table));
      expect(error.type).toBe('fatal');
      expect(error.message).toContain(offender);
      expect((await worker.exited).code).toBe(1);
      await worker.peer.lost;
    }
  });
});
