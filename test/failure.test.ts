/** Work or failure, whichever comes first, and what is left of it (molt/failure.ts). */
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { expect, test } from 'vitest';
import { orFailure } from '../molt/failure.ts';

test('gives what the work gives, and rejects when the failure comes first or came before', async () => {
  let fail: (error: Error) => void = () => {};
  const or = orFailure(
    new Promise((_, reject) => {
      fail = reject;
    }),
  );
  expect(await or(Promise.resolve(3))).toBe(3);
  await expect(or(Promise.reject(new Error('its own')))).rejects.toThrow('its own');
  const never = or(new Promise(() => {}));
  fail(new Error('the end'));
  await expect(never).rejects.toThrow('the end');
  await expect(or(new Promise(() => {}))).rejects.toThrow('the end');
});

test('nothing of ended work is kept while the failure may still come', async () => {
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc') as () => void;
  const failed = new Promise<never>(() => {});
  const or = orFailure(failed);
  const results: WeakRef<object>[] = [];
  for (let i = 0; i < 100; i++) results.push(new WeakRef(await or(Promise.resolve({ step: i }))));
  await new Promise((done) => setTimeout(done, 10)); // a WeakRef holds until the end of its turn
  collect();
  expect(results.slice(0, 99).filter((ref) => ref.deref() !== undefined)).toEqual([]);
  expect(or).toBeTypeOf('function'); // it and `failed` are still there
  expect(failed).toBeInstanceOf(Promise);
});
