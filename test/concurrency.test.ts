/** The limit of one engine against hand-made heartbeats (molt/concurrency.ts). */
import { expect, test } from 'vitest';
import { ConcurrencyLimit } from '../molt/concurrency.ts';

test('a rise of preemptions cuts the limit to four fifths of what ran', () => {
  const limit = new ConcurrencyLimit(64);
  expect(limit.learn({ preemptions: 0, running: 64 }, 64, 0)).toBe(0);
  expect(limit.value).toBe(64);
  expect(limit.learn({ preemptions: 3, running: 20 }, 64, 0)).toBe(3);
  expect(limit.value).toBe(16);
});

test('one overload cuts once: nothing is learned until the engine has come down', () => {
  const limit = new ConcurrencyLimit(64);
  limit.learn({ preemptions: 3, running: 20 }, 64, 0);
  expect(limit.learn({ preemptions: 9, running: 20 }, 17, 47)).toBe(6);
  expect(limit.value).toBe(16);
  expect(limit.learn({ preemptions: 10, running: 15 }, 16, 48)).toBe(1);
  expect(limit.value).toBe(12);
});

test('it grows after a generation of requests in which it was reached and nothing was short', () => {
  const limit = new ConcurrencyLimit(64);
  let ended = 0;
  limit.learn({ preemptions: 1, running: 20 }, 64, ended); // 16
  /** 16 requests end between two heartbeats, or one after the other. */
  const generation = (stats: Record<string, number>, sent = limit.value, beats = 4) => {
    for (let i = 0; i < beats; i++) {
      ended += limit.value / beats;
      limit.learn({ preemptions: 1, running: sent, ...(i === 1 ? stats : {}) }, sent, ended);
    }
    return limit.value;
  };
  expect(generation({ cache_use: 0.95 })).toBe(16);
  expect(generation({ waiting: 2 })).toBe(16);
  expect(generation({}, 15)).toBe(16);
  expect(generation({ cache_use: 0.5 })).toBe(20);
  for (let i = 0; i < 100; i++) generation({});
  expect(limit.value).toBe(64);
});

test('it stays at least 1, and at its most where the engine says nothing', () => {
  const limit = new ConcurrencyLimit(2);
  limit.learn({ preemptions: 1, running: 1 }, 2, 0);
  expect(limit.value).toBe(1);
  const silent = new ConcurrencyLimit(8);
  expect(silent.learn({ waiting: 30, cache_use: 1, running: 4 }, 8, 0)).toBe(0);
  expect(silent.value).toBe(8);
});
