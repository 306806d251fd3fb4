/**
 * Preflight: quick checks of everything a run depends on, before any worker starts.
 *
 *   options (config.ts) -> python, run directory, port, agent -> prepare -> model, memory, disk -> prompts -> workers
 *
 * Every launch runs them; `npx tsx molt/launch.ts --doctor RECIPE` runs them, starts the workers for the parity of engine
 * and trainer, and prints a table instead of training.
 *
 * Invariants
 *   1. A problem is something with which the run cannot work. What may work is a warning.
 *   2. All problems of a stage are found before any is reported, each in one line that names option, value and remedy.
 *   3. Nothing is left behind: a directory that a check made to see whether it can be made is removed again.
 * Estimates of memory and disk count what is certain to be needed (weights, gradients, optimizer, one checkpoint), so
 * a run that is refused could not have worked; activations and caches come on top.
 * Called by loop.ts. Whether weights fit their config and a template renders, the workers tell (they end with
 * EXIT_BAD_INPUT, bus.ts): only they have the libraries for it.
 */
import {
  accessSync,
  closeSync,
  constants,
  existsSync,
  fstatSync,
  mkdirSync,
  openSync,
  readdirSync,
  readFileSync,
  readSync,
  rmdirSync,
  rmSync,
  statfsSync,
  statSync,
  writeFileSync,
} from 'node:fs';
import { createServer } from 'node:net';
import { availableParallelism, freemem, totalmem } from 'node:os';
import { dirname, join, resolve } from 'node:path';
import { loadAgent } from './agent.ts';
import { type Options, splitSources } from './config.ts';
import { oneLine } from './modules.ts';
import { askPython, findVllm, isOnCpu, pythonProgram, ROOT } from './python.ts';

/** What one check found. `text` is one line; a problem's begins with the option. */
export interface Finding {
  readonly check: string;
  readonly status: 'ok' | 'warning' | 'problem' | 'skipped';
  readonly text: string;
}

/** Twin of FAMILIES in workers/model.py, which imports too much to be asked here; a test compares them. */
export const FAMILIES: readonly string[] = ['qwen3', 'qwen3_moe', 'llama'];
const REQUIREMENTS = join(ROOT, 'workers', 'requirements.txt');
const VLLM_TESTED = '0.32.0';
const PYTHON_NEEDED = [3, 11] as const;
const MB = 1024 ** 2;
/** Resident memory before there is a model: Python with torch, both processes of vLLM, Python alone, Node. Measured. */
const PROCESS_BYTES = { torch: 350 * MB, vllm: 1300 * MB, python: 120 * MB, node: 90 * MB } as const;
/** Per parameter of the trainer: weight, gradient, two moments, all fp32; the engine has the weight alone. */
const TRAINER_BYTES = 16;
const CHECKPOINT_BYTES = 12; // weight and two moments
const LOG_BYTES = 16 * MB; // logs, ledger and metrics of a short run

const ok = (check: string, text: string): Finding => ({ check, status: 'ok', text });
const warning = (check: string, text: string): Finding => ({ check, status: 'warning', text });
const problem = (check: string, text: string): Finding => ({ check, status: 'problem', text });
const skipped = (check: string, text: string): Finding => ({ check, status: 'skipped', text });

// ---- The two stages ----

/** What needs no model: before the recipe's `prepare`, which may take minutes to make one. */
export async function checkSurroundings(options: Options): Promise<Finding[]> {
  return [
    ...(await checkPython(options)),
    checkRunDir(options),
    await checkPort(options),
    await checkAgent(options),
    checkCores(options),
  ];
}

/** The model directory, and whether memory and disk can hold what is made of it. */
export function checkModel(options: Options): Finding[] {
  if (isSimulated(options)) return [skipped('model', 'all workers are simulated'), checkDisk(options, 0)];
  const read = readModel(options['actor.model_name_or_path']);
  if (read.problems.length > 0) {
    return read.problems.map((text) =>
      problem('model', `--actor.model_name_or_path ${options['actor.model_name_or_path']}: ${text}`),
    );
  }
  const { parameters, modelType } = read;
  return [
    ok('model', `${options['actor.model_name_or_path']}: ${modelType}, ${millions(parameters)} parameters`),
    checkMemory(options, parameters),
    checkDisk(options, parameters),
  ];
}

function isSimulated(options: Options): boolean {
  return [options['engine.kind'], options['trainer.kind'], options['tokenizer.kind']].every(
    (kind) => kind === 'simulated',
  );
}

// ---- Python ----

const PROBE = `
import sys, json
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        found[name] = None
print(json.dumps({"version": list(sys.version_info[:3]), "packages": found}))
`;

async function checkPython(options: Options): Promise<Finding[]> {
  if (isSimulated(options)) return [skipped('python', 'all workers are simulated')];
  const own = options['launch.python'];
  const program = pythonProgram(own);
  if (program === null)
    return [problem('python', '--launch.python: there is no .venv; run `bash scripts/setup.sh run`, or name one')];
  const name =
    own === ''
      ? `--launch.python (${process.env.MOLT_PYTHON ? 'MOLT_PYTHON' : 'default'}) ${program}`
      : `--launch.python ${own}`;
  const pins = readPins();
  const answer = await askPython(program, PROBE, [...pins.keys()]);
  if (typeof answer === 'string') return [problem('python', `${name}: ${answer}`)];
  const said = answer as Probed;
  if (!Array.isArray(said?.version))
    return [problem('python', `${name}: is no working Python (it printed ${oneLine(JSON.stringify(answer))})`)];
  const version = said.version.join('.');
  const [major = 0, minor = 0] = said.version;
  if (major < PYTHON_NEEDED[0] || (major === PYTHON_NEEDED[0] && minor < PYTHON_NEEDED[1]))
    return [problem('python', `${name}: is Python ${version}, needed is ${PYTHON_NEEDED.join('.')} or newer`)];
  const missing = [...pins.keys()].filter((pin) => !said.packages[pin]);
  if (missing.length > 0) {
    const remedy = own === '' ? 'bash scripts/setup.sh run' : `${program} -m pip install -r workers/requirements.txt`;
    return [problem('python', `${name}: has no ${missing.join(', no ')}; install them with \`${remedy}\``)];
  }
  const others = [...pins].filter(([pin, wanted]) => publicVersion(said.packages[pin] ?? '') !== wanted);
  const list = (names: readonly string[]) => names.map((pin) => `${pin} ${said.packages[pin]}`).join(', ');
  const findings = [ok('python', `${version}, ${list(['torch', 'transformers', 'pyzmq'])}`)];
  if (options['engine.kind'] === 'vllm') findings.push(await checkVllm(program));
  if (others.length > 0)
    findings.push(
      warning(
        'python',
        `${list(others.map(([pin]) => pin))}; tested with ${others.map((pair) => pair.join(' ')).join(', ')}`,
      ),
    );
  return findings;
}

/** It can be imported, or config.ts had refused. */
async function checkVllm(program: string): Promise<Finding> {
  const vllm = await findVllm(program);
  if (!vllm) return problem('vllm', `--engine.kind vllm: ${program} can no longer import vllm`);
  const text = `${vllm.version}, the ${vllm.build === 'cpu' ? 'CPU build' : 'build for GPUs'}`;
  return publicVersion(vllm.version) === VLLM_TESTED
    ? ok('vllm', text)
    : warning('vllm', `${text}; tested with ${VLLM_TESTED}`);
}

/** 2.13.0+cpu is 2.13.0. */
function publicVersion(version: string): string {
  return version.split('+')[0] as string;
}

/** `name==version` lines of the requirements. */
function readPins(): Map<string, string> {
  const pins = [...readFileSync(REQUIREMENTS, 'utf8').matchAll(/^([\w.-]+)==([^\s#]+)/gm)];
  return new Map(pins.map(([, name, version]) => [name as string, version as string]));
}

interface Probed {
  readonly version: readonly number[];
  readonly packages: Readonly<Record<string, string | null>>;
}

// ---- The run directory ----

function checkRunDir(options: Options): Finding {
  const dir = options['run.dir'] || 'runs';
  const name = options['run.dir'] === '' ? '--run.dir (default) runs' : `--run.dir ${dir}`;
  const made: string[] = [];
  try {
    for (const path of missingDirectories(dir)) {
      mkdirSync(path); // one by one: a recursive mkdir never returns from some places that are no disk
      made.push(path);
    }
    accessSync(dir, constants.W_OK);
    const probe = join(dir, `.molt-probe-${process.pid}`);
    writeFileSync(probe, 'x');
    rmSync(probe);
    return ok('run directory', options['run.dir'] === '' ? 'a new one in runs/' : dir);
  } catch (error) {
    return problem('run directory', `${name}: cannot be written: ${whyNot(error, dir)}`);
  } finally {
    for (const path of made.reverse()) rmdirSync(path);
  }
}

/** The directories of `dir` that do not exist yet, outermost first. Throws where a part of it is a file. */
function missingDirectories(dir: string): string[] {
  const missing: string[] = [];
  let at = resolve(dir);
  while (!existsSync(at)) {
    missing.unshift(at);
    at = dirname(at);
  }
  if (!statSync(at).isDirectory()) throw new Error(`${at} is not a directory`);
  return missing;
}

function whyNot(error: unknown, dir: string): string {
  const { code, message } = error as NodeJS.ErrnoException;
  if (code === 'EACCES' || code === 'EPERM') return 'permission denied';
  if (code === 'EROFS') return 'the file system is read-only';
  if (code === 'ENOSPC') return `no space left on the disk of ${dir}`;
  if (code === 'ENOENT') return 'the file system takes no directories there';
  return oneLine(message);
}

// ---- Port ----

async function checkPort(options: Options): Promise<Finding> {
  const port = options['launch.port'];
  if (port === 0) return ok('port', 'any free one of the loopback interface');
  const code = await new Promise<string | null>((done) => {
    const server = createServer();
    server.once('error', (error: NodeJS.ErrnoException) => done(error.code ?? error.message));
    server.listen(port, '127.0.0.1', () => server.close(() => done(null)));
  });
  if (code === null) return ok('port', `127.0.0.1:${port}`);
  const why =
    code === 'EADDRINUSE' ? 'taken by another process' : code === 'EACCES' ? 'not allowed for this user' : code;
  return problem('port', `--launch.port ${port}: ${why}; 0 takes any free one`);
}

// ---- Agent ----

async function checkAgent(options: Options): Promise<Finding> {
  const path = options['train.agent_path'];
  try {
    await loadAgent(path);
    return ok('agent', path);
  } catch (error) {
    return problem('agent', `--train.agent_path: ${(error as Error).message}`);
  }
}

// ---- Prompts ----

/** Sources that are not there, found before a long `prepare`; reading them comes after it. */
export function checkPromptFiles(options: Options): Finding[] {
  return (['data.prompt_dataset', 'eval.dataset'] as const).flatMap((name) =>
    splitSources(options[name])
      .filter(({ path }) => !existsSync(path))
      .map(({ path }) => problem('prompts', `--${name} ${path}: no such file`)),
  );
}

// ---- Cores, memory, disk ----

function checkCores(options: Options): Finding {
  if (isSimulated(options)) return skipped('cores', 'all workers are simulated');
  const busy = Math.max(
    onCpu(options, 'engine') ? options['engine.num_engines'] : 0,
    onCpu(options, 'trainer') ? options['trainer.num_ranks'] : 0,
  );
  const cores = availableParallelism();
  const text = `${cores} cores, ${busy} of them computing at a time`;
  return busy > cores ? warning('cores', `${text}: they will wait for each other`) : ok('cores', text);
}

/** Whether this kind of worker computes on the CPU. */
function onCpu(options: Options, kind: 'engine' | 'trainer'): boolean {
  return options[`${kind}.kind`] !== 'simulated' && isOnCpu(options[`${kind}.device`]);
}

function checkMemory(options: Options, parameters: number): Finding {
  const kind = options['engine.kind'];
  const engineProcess = kind === 'torch' || kind === 'vllm' ? PROCESS_BYTES[kind] : 0;
  const engines = engineProcess > 0 ? options['engine.num_engines'] : 0;
  const ranks = options['trainer.kind'] === 'torch' ? options['trainer.num_ranks'] : 0;
  const tokenizers = options['tokenizer.kind'] === 'python' ? 1 : 0;
  const engineWeights = onCpu(options, 'engine') ? parameters * (options['engine.dtype'] === 'float32' ? 4 : 2) : 0;
  const trainerState = onCpu(options, 'trainer') ? (parameters * TRAINER_BYTES) / Math.max(1, ranks) : 0;
  const needed =
    engines * (engineProcess + engineWeights) +
    ranks * (PROCESS_BYTES.torch + trainerState) +
    tokenizers * PROCESS_BYTES.python +
    (1 + options['rollout.num_runners']) * PROCESS_BYTES.node;
  const limit = memoryLimit();
  const text = `at least ${gigabytes(needed)} are needed, ${gigabytes(limit.total)} are there, ${gigabytes(limit.free)} free`;
  if (needed > limit.total)
    return problem(
      'memory',
      `--actor.model_name_or_path ${options['actor.model_name_or_path']}: too large for this machine: ${text}`,
    );
  return needed > limit.free ? warning('memory', text) : ok('memory', text);
}

/** Bytes of this machine, or of the container that limits it. */
function memoryLimit(): { total: number; free: number } {
  const constrained = process.constrainedMemory();
  const total = constrained > 0 && constrained < totalmem() ? constrained : totalmem();
  const available = /^MemAvailable:\s+(\d+) kB/m.exec(
    existsSync('/proc/meminfo') ? readFileSync('/proc/meminfo', 'utf8') : '',
  );
  const free = available ? Number(available[1]) * 1024 : freemem();
  return { total, free: Math.min(total, free) };
}

function checkDisk(options: Options, parameters: number): Finding {
  const saves = !options['ckpt.disable_final_save'] || options['ckpt.save_steps'] > 0;
  const staged = 2 * parameters * 4; // the weights engines read and the ones being written
  const needed = LOG_BYTES + staged + (saves ? parameters * CHECKPOINT_BYTES : 0);
  let dir = resolve(options['run.dir'] || 'runs');
  while (!existsSync(dir)) dir = dirname(dir);
  const { bavail, bsize, blocks } = statfsSync(dir);
  if (blocks === 0) return skipped('disk', `${dir} is on no disk`);
  const free = bavail * bsize;
  const text = `at least ${gigabytes(needed)} are needed${saves ? ' with one checkpoint' : ''}, ${gigabytes(free)} are free`;
  return free < needed
    ? problem('disk', `--run.dir ${options['run.dir'] || 'runs'}: the disk is too full: ${text}`)
    : ok('disk', text);
}

function gigabytes(bytes: number): string {
  return bytes < 0.1 * 1024 ** 3 ? `${(bytes / MB).toFixed(1)} MB` : `${(bytes / 1024 ** 3).toFixed(1)} GB`;
}

function millions(count: number): string {
  return count < 1e9 ? `${(count / 1e6).toFixed(2)} M` : `${(count / 1e9).toFixed(2)} G`;
}

// ---- The model directory ----

interface ModelFacts {
  readonly problems: readonly string[];
  readonly parameters: number; // in the weight files; a tied head counts once
  readonly modelType: string;
}

/** Files of a Hugging Face directory, as far as they can be judged without loading anything large. */
export function readModel(dir: string): ModelFacts {
  const problems: string[] = [];
  const facts = (parameters = 0, modelType = '') => ({ problems, parameters, modelType });
  if (!existsSync(dir)) {
    problems.push('no such directory; molt downloads nothing, so a model is a directory on this machine');
    return facts();
  }
  if (!statSync(dir).isDirectory()) {
    problems.push('is not a directory');
    return facts();
  }
  const config = readJson(join(dir, 'config.json'), problems);
  const tokenizer = readJson(join(dir, 'tokenizer.json'), problems);
  const tensors = readTensors(dir, problems);
  if (tokenizer !== null) requireTemplate(dir, problems);
  if (config === null) return facts();
  if (typeof config.model_type !== 'string') problems.push('config.json has no model_type');
  else if (!FAMILIES.includes(config.model_type))
    problems.push(`config.json has model_type ${config.model_type}, known are ${FAMILIES.join(', ')}`);
  const vocabulary = config.vocab_size;
  if (typeof vocabulary !== 'number' || !Number.isInteger(vocabulary) || vocabulary < 1) {
    problems.push(
      `config.json has vocab_size ${JSON.stringify(vocabulary) ?? 'missing'}, needed is a positive integer`,
    );
  } else {
    const largest = tokenizer === null ? -1 : largestId(tokenizer);
    if (largest >= vocabulary)
      problems.push(
        `its vocabularies do not match: the tokenizer has ids up to ${largest}, vocab_size of config.json is ${vocabulary}`,
      );
    const embedding = [...tensors].find(([name]) => /(^|\.)embed_tokens\.weight$/.test(name));
    const rows = embedding?.[1].shape[0];
    if (rows !== undefined && rows !== vocabulary)
      problems.push(
        `its vocabularies do not match: ${embedding?.[0]} has ${rows} rows, vocab_size of config.json is ${vocabulary}`,
      );
  }
  let parameters = 0;
  for (const { shape } of tensors.values()) parameters += shape.reduce((a, b) => a * b, 1);
  return facts(parameters, String(config.model_type));
}

const LFS_POINTER = 'version https://git-lfs';

/** A JSON object, or null with a problem. */
function readJson(path: string, problems: string[]): Record<string, unknown> | null {
  const name = path.slice(path.lastIndexOf('/') + 1);
  if (!existsSync(path)) {
    problems.push(`has no ${name}`);
    return null;
  }
  const text = readFileSync(path, 'utf8');
  if (text.startsWith(LFS_POINTER)) {
    problems.push(`${name} is a Git LFS pointer and not the file: run \`git lfs pull\` there`);
    return null;
  }
  try {
    const value: unknown = JSON.parse(text);
    if (typeof value === 'object' && value !== null && !Array.isArray(value)) return value as Record<string, unknown>;
    problems.push(`${name} must hold an object`);
  } catch (error) {
    problems.push(`${name} is not JSON: ${oneLine((error as Error).message)}`);
  }
  return null;
}

/** tokenizer_config.json may be missing, and the template may lie beside it. */
function requireTemplate(dir: string, problems: string[]): void {
  if (
    ['chat_template.jinja', 'chat_template.json', 'additional_chat_templates'].some((name) =>
      existsSync(join(dir, name)),
    )
  )
    return;
  const path = join(dir, 'tokenizer_config.json');
  const before = problems.length;
  const config = existsSync(path) ? readJson(path, problems) : null;
  if (problems.length === before && !config?.chat_template)
    problems.push(
      'has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); molt trains chat models',
    );
}

function largestId(tokenizer: Record<string, unknown>): number {
  const vocabulary = (tokenizer.model as { vocab?: unknown } | undefined)?.vocab;
  const added = tokenizer.added_tokens;
  let largest = -1;
  if (Array.isArray(vocabulary))
    largest = vocabulary.length - 1; // unigram: a list of pieces
  else if (typeof vocabulary === 'object' && vocabulary !== null)
    for (const id of Object.values(vocabulary)) largest = Math.max(largest, Number(id));
  for (const token of Array.isArray(added) ? added : [])
    largest = Math.max(largest, Number((token as { id?: unknown }).id ?? -1));
  return largest;
}

interface Tensor {
  readonly shape: readonly number[];
}

/** Names and shapes of all weight files, from their headers. */
function readTensors(dir: string, problems: string[]): Map<string, Tensor> {
  const tensors = new Map<string, Tensor>();
  const files = new Set(readdirSync(dir).filter((name) => name.endsWith('.safetensors')));
  if (files.size === 0) problems.push('has no *.safetensors (weights in other formats are not read)');
  const index = join(dir, 'model.safetensors.index.json');
  if (existsSync(index)) {
    const map = readJson(index, problems)?.weight_map;
    const wanted = new Set(
      Object.values(typeof map === 'object' && map !== null ? (map as Record<string, string>) : {}),
    );
    const missing = [...wanted].filter((name) => !files.has(name));
    if (missing.length > 0) problems.push(`has no ${missing.join(', no ')}, which its index names`);
  }
  for (const name of [...files].sort()) {
    const read = readHeader(join(dir, name));
    if (typeof read === 'string') problems.push(`${name} ${read}`);
    else for (const [tensor, entry] of read) tensors.set(tensor, entry);
  }
  return tensors;
}

const MAX_HEADER_BYTES = 100 * MB; // the format's own limit

/** safetensors: u64 length, a JSON header, then the data it describes. Returns what is wrong as text. */
function readHeader(path: string): [string, Tensor][] | string {
  const file = openSync(path, 'r');
  try {
    const { size } = fstatSync(file);
    const head = Buffer.alloc(Math.min(size, LFS_POINTER.length));
    readSync(file, head, 0, head.length, 0);
    if (head.toString() === LFS_POINTER) return 'is a Git LFS pointer and not the file: run `git lfs pull` there';
    const length = size < 8 ? Number.NaN : Number(head.readBigUInt64LE());
    if (!(length <= Math.min(size - 8, MAX_HEADER_BYTES)))
      return `is not a safetensors file, or is cut (${size} bytes)`;
    const bytes = Buffer.alloc(length);
    readSync(file, bytes, 0, length, 8);
    const header = JSON.parse(bytes.toString()) as Record<string, { shape: number[]; data_offsets: [number, number] }>;
    const entries = Object.entries(header).filter(([name]) => name !== '__metadata__');
    const end = Math.max(0, ...entries.map(([, { data_offsets }]) => data_offsets[1]));
    if (8 + length + end !== size)
      return `is cut or damaged: it has ${size} bytes, its header tells of ${8 + length + end}`;
    return entries;
  } catch (error) {
    return `cannot be read: ${oneLine((error as Error).message)}`;
  } finally {
    closeSync(file);
  }
}

// ---- The table ----

/** Findings as the doctor prints them. */
export function findingsTable(findings: readonly Finding[]): string {
  const width = Math.max(...findings.map(({ check }) => check.length));
  const count = (status: Finding['status']) => findings.filter((finding) => finding.status === status).length;
  const rows = findings.map(({ check, status, text }) => `${check.padEnd(width)}  ${status.padEnd(7)}  ${text}`);
  const sum = `${count('ok')} ok, ${count('warning')} warnings, ${count('problem')} problems, ${count('skipped')} skipped`;
  return [...rows, sum].join('\n');
}
