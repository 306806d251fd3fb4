/**
 * Modules of the user (recipe, agent, prompts): import one, or say in one line what is wrong with it and where.
 *
 *   x.ts:2:18: Expected "}" but found "1"     it does not parse
 *   throws on import: no lamp (x.ts:3:7)      it does not run
 *
 * Called by config.ts, agent.ts and sources.ts, which put the option and the file in front.
 */
import { relative, resolve } from 'node:path';
import { fileURLToPath, pathToFileURL } from 'node:url';

/** The exports of a TypeScript or JavaScript module. Rejects with an error of one line; its cause has the stack. */
export async function importModule(path: string): Promise<Readonly<Record<string, unknown>>> {
  try {
    return (await import(pathToFileURL(resolve(path)).href)) as Record<string, unknown>;
  } catch (error) {
    throw new Error(whatIsWrong(error), { cause: error });
  }
}

function whatIsWrong(error: unknown): string {
  const message = error instanceof Error ? error.message : String(error);
  // esbuild, under tsx:  Transform failed with 1 error:\n/path/x.ts:2:18: ERROR: Expected ...
  const parse = /^Transform failed[^\n]*\n(.*?):(\d+:\d+): ERROR: ([^\n]*)/.exec(message);
  if (parse) return `${shortPath(parse[1] ?? '')}:${parse[2]}: ${parse[3]}`;
  if (error instanceof SyntaxError) return `does not parse: ${oneLine(message)}`;
  if (/^Cannot find (module|package)/.test(message)) return oneLine(message.split('\nRequire stack:')[0] ?? '');
  return `throws on import: ${whatWasThrown(error)}`;
}

/** Message of an error that code of the user threw, and where, in one line. */
export function whatWasThrown(error: unknown): string {
  if (!(error instanceof Error)) return oneLine(String(error));
  const place = placeOf(error);
  const name = error.name === 'Error' ? '' : `${error.name}: `;
  return `${name}${oneLine(error.message) || 'an error without a message'}${place && ` (${place})`}`;
}

/** The topmost frame that is neither Node nor a package: `x.ts:3:7`, '' when there is none. */
function placeOf(error: Error): string {
  for (const line of error.stack?.split('\n') ?? []) {
    const frame = /^\s+at .*?\(?((?:file:\/\/)?\/[^()]*):(\d+:\d+)\)?$/.exec(line);
    if (!frame?.[1] || frame[1].includes('/node_modules/')) continue;
    const path = frame[1].startsWith('file:') ? fileURLToPath(frame[1].replace(/\?.*$/, '')) : frame[1];
    return `${shortPath(path)}:${frame[2]}`;
  }
  return '';
}

/** Relative where that is inside the working directory. */
function shortPath(path: string): string {
  const near = relative(process.cwd(), path);
  return near === '' || near.startsWith('..') ? path : near;
}

function oneLine(text: string): string {
  return text
    .split('\n')
    .map((line) => line.trim())
    .filter(Boolean)
    .join(' ');
}
