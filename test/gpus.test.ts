import { afterEach, describe, expect, test, vi } from 'vitest';
import { gpusOfFiles, placeWorkers } from '../molt/gpus.ts';
import { OPTIONS, type Options, optionNames } from '../molt/options.ts';
import { namedGpus } from '../molt/python.ts';

const DEFAULTS = Object.fromEntries(optionNames().map((name) => [name, OPTIONS[name].default])) as unknown as Options;
const place = (gpus: number, more: Partial<Options>) =>
  placeWorkers(
    { ...DEFAULTS, 'engine.kind': 'vllm', 'engine.device': 'cuda', 'trainer.device': 'cuda', ...more },
    Array.from({ length: gpus }, (_, i) => `${i}`),
  );

describe('placement on GPUs', () => {
  test('ranks take the first, engines the next ones, none is given twice where there are enough', () => {
    const more = { 'trainer.num_ranks': 2, 'engine.num_engines': 3, 'engine.tensor_parallel_size': 2 };
    expect(place(8, more)).toEqual({ ranks: ['0', '1'], engines: ['2,3', '4,5', '6,7'] });
  });

  test('where there are too few, engines and ranks share them from the first one on', () => {
    const more = { 'trainer.num_ranks': 2, 'engine.num_engines': 2, 'engine.tensor_parallel_size': 1 };
    expect(place(2, more)).toEqual({ ranks: ['0', '1'], engines: ['0', '1'] });
    expect(place(1, more)).toEqual({ ranks: ['0', '0'], engines: ['0', '0'] });
  });

  test('an engine of more GPUs than there are sees all of them', () => {
    expect(place(2, { 'engine.tensor_parallel_size': 4 }).engines).toEqual(['0,1']);
  });

  test('a pipeline of two and two copies of it are four GPUs of a vllm, and one of a torch engine', () => {
    const more = { 'engine.pipeline_parallel_size': 2, 'engine.data_parallel_size': 2 };
    expect(place(8, more).engines).toEqual(['1,2,3,4']);
    expect(place(8, { 'engine.kind': 'torch' }).engines).toEqual(['1']);
  });

  test('what runs on the CPU is told nothing, and takes none from the others', () => {
    expect(place(4, { 'trainer.device': 'cpu', 'engine.num_engines': 2 })).toEqual({
      ranks: [null],
      engines: ['0', '1'],
    });
    expect(place(4, { 'engine.device': 'cpu' })).toEqual({ ranks: ['0'], engines: [null] });
    expect(place(0, {})).toEqual({ ranks: [null], engines: [null] });
  });
});

describe('names of GPUs', () => {
  afterEach(() => vi.unstubAllEnvs());

  test('are those of CUDA_VISIBLE_DEVICES, up to the first that CUDA would not take', () => {
    for (const [value, names] of [
      ['2, 0', ['2', '0']],
      ['0,1,', ['0', '1']],
      ['1,-1,2', ['1']],
      ['-1,0', []],
      ['NoDevFiles', []],
      ['GPU-5a1f,MIG-77c0', ['GPU-5a1f', 'MIG-77c0']],
    ] as const) {
      vi.stubEnv('CUDA_VISIBLE_DEVICES', value);
      expect(namedGpus(), value).toEqual(names);
    }
  });

  test('count from 0 where a container was given some of the GPUs of its host', () => {
    expect(gpusOfFiles(['nvidia3', 'nvidia7', 'nvidiactl', 'nvidia-uvm'])).toEqual(['0', '1']);
  });
});
