/**
 * Which GPU of this host each worker sees: ranks of the trainer first, then the engines, one after the other.
 *
 *   8 GPUs, 2 ranks, 3 engines of 2   ->   ranks 0 1   engines 2,3 4,5 6,7
 *
 * Where there are too few for all, engines and ranks share: both are laid out from the first one on. A worker sees its own
 * only (CUDA_VISIBLE_DEVICES), so that nobody takes the memory of another one's by default.
 * Pure but for `visibleGpus`. Called by workers.ts.
 */
import { existsSync, readdirSync } from 'node:fs';
import type { Options } from './options.ts';
import { hasCuda, isOnCpu, namedGpus } from './python.ts';

export interface Placement {
  readonly ranks: readonly (string | null)[]; // value of CUDA_VISIBLE_DEVICES; null = on the CPU, nothing is set
  readonly engines: readonly (string | null)[];
}

/** Names as CUDA_VISIBLE_DEVICES has them. */
export function visibleGpus(): string[] {
  if (!hasCuda()) return [];
  return [...(namedGpus() ?? gpusOfFiles(existsSync('/dev') ? readdirSync('/dev') : []))];
}

/** CUDA counts the GPUs that are there: a container that was given /dev/nvidia3 alone calls it 0. */
export function gpusOfFiles(files: readonly string[]): string[] {
  return files.filter((name) => /^nvidia\d+$/.test(name)).map((_, i) => `${i}`);
}

export function gpusOfEngine(o: Options): number {
  if (o['engine.kind'] !== 'vllm') return 1;
  return o['engine.tensor_parallel_size'] * o['engine.pipeline_parallel_size'] * o['engine.data_parallel_size'];
}

/** `gpus` as of `visibleGpus`. An engine with more GPUs than there are sees all: vLLM says what it needs. */
export function placeWorkers(o: Options, gpus: readonly string[]): Placement {
  const each = gpusOfEngine(o);
  const numRanks = o['trainer.kind'] === 'torch' && !isOnCpu(o['trainer.device']) ? o['trainer.num_ranks'] : 0;
  const onGpu = o['engine.kind'] !== 'simulated' && !isOnCpu(o['engine.device']);
  const numEngines = onGpu ? o['engine.num_engines'] : 0;
  const first = numRanks + numEngines * each <= gpus.length ? numRanks : 0;
  const name = (i: number): string => gpus[i % gpus.length] ?? '';
  const slice = (from: number): string =>
    each >= gpus.length ? gpus.join(',') : Array.from({ length: each }, (_, i) => name(from + i)).join(',');
  const list = (count: number, placed: number, of: (i: number) => string) =>
    Array.from({ length: count }, (_, i) => (gpus.length > 0 && placed > 0 ? of(i) : null));
  return {
    ranks: list(o['trainer.num_ranks'], numRanks, name),
    engines: list(o['engine.num_engines'], numEngines, (i) => slice(first + i * each)),
  };
}
