import { Cell, engineOptions, VLLM_OPTIONS, vllmMtp, promptOf } from './test/contract.ts';
import { EngineClient } from './test/engine_client.ts';
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
const [speculation, guesses] = [process.argv[2]!, Number(process.argv[3])];
const cell = await Cell.open();
const t0 = performance.now();
const log = (...a: unknown[]) => console.log(((performance.now() - t0) / 1000).toFixed(1), ...a);
const dump = () => { for (const f of readdirSync(cell.dir)) if (f.endsWith('.log')) log(f, readFileSync(join(cell.dir, f), 'utf8').slice(-6000)); };
setTimeout(async () => { dump(); await cell.close(); process.exit(1); }, 60000);
try {
  const models = await vllmMtp.makeModels(cell.dir);
  const options = engineOptions(vllmMtp, models[0], { vllm: { ...VLLM_OPTIONS, speculation, num_speculative_tokens: guesses } });
  const worker = await cell.start({ id: 'engine-0', kind: 'engine', command: vllmMtp.command('engine'), options });
  log('ready');
  const engine = new EngineClient(worker.peer);
  const one = await engine.generate(promptOf(10, 1), { temperature: 0, max_tokens: 40 });
  log(one.counts.join(''), one.ended, one.logprobs.slice(0, 5));
  log((await worker.peer.request('stats', {})).fields.stats);
  const all = await Promise.all(Array.from({ length: 8 }, (_, i) => engine.generate(promptOf(3 + 7 * i, i), { temperature: 0, max_tokens: 40 })));
  log(all.map((t) => t.counts.join('')));
  log((await worker.peer.request('stats', {})).fields.stats);
} catch (e) { log(e); }
dump();
await cell.close();
process.exit(0);
