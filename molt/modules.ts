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

/** Outside a package of type module tsx takes a .ts file for CommonJS. */
const ESM_HINT = 'name the file .mts, or put a package.json with "type": "module" beside it';

/** Codes of Node for a module, or one that it imports, that is not there or is none. */
const NO_MODULE =
  /^(MODULE_NOT_FOUND|ERR_(MODULE_NOT_FOUND|UNSUPPORTED_DIR_IMPORT|UNKNOWN_FILE_EXTENSION|PACKAGE_.*))$/;

function whatIsWrong(error: unknown): string {
  if (!(error instanceof Error)) return `throws on import: ${whatWasThrown(error)}`;
  const { message } = error;
  // esbuild, under tsx:  Transform failed with 1 error:\n/path/x.ts:2:18: ERROR: Expected ...
  const transform = /^Transform failed[^\n]*\n(.*?):(\d+:\d+): ERROR: ([^\n]*)/.exec(message);
  if (transform) {
    const hint = transform[3]?.includes('Top-level await') ? ` (${ESM_HINT})` : '';
    return `${shortPath(transform[1] ?? '')}:${transform[2]}: ${transform[3]}${hint}`;
  }
  // Node:  the stack begins with  file:///path/x.js:2
  const [place] = error.stack?.split('\n') ?? [];
  if (error instanceof SyntaxError) {
    const at = /^((?:file:\/\/)?\/.*):(\d+)$/.exec(place ?? '');
    return `${at ? `${pathOf(at[1] ?? '')}:${at[2]}: ` : ''}${oneLine(message)}`;
  }
  const { code, requireStack } = error as { code?: unknown; requireStack?: unknown };
  if (typeof code === 'string' && NO_MODULE.test(code)) {
    const from = Array.isArray(requireStack) && typeof requireStack[0] === 'string' ? requireStack[0] : null;
    return `${oneLine(message.split('\nRequire stack:')[0] ?? '')}${from ? ` imported from ${shortPath(from)}` : ''}`;
  }
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
export function placeOf(error: { readonly stack?: string }): string {
  for (const line of error.stack?.split('\n') ?? []) {
    const frame = /^\s+at (?:async |.*\()?((?:file:\/\/)?\/[^()]*):(\d+:\d+)\)?$/.exec(line);
    if (frame?.[1] && !frame[1].includes('/node_modules/')) return `${pathOf(frame[1])}:${frame[2]}`;
  }
  return '';
}

/** Of a path or a file URL, as short as it can be said. */
function pathOf(place: string): string {
  return shortPath(place.startsWith('file:') ? fileURLToPath(place.replace(/\?.*$/, '')) : place);
}

/** Relative where that is inside the working directory. */
function shortPath(path: string): string {
  const near = relative(process.cwd(), path);
  return near === '' || near.startsWith('..') ? path : near;
}

export function oneLine(text: string): string {
  return text
    .split('\n')
    .map((line) => line.trim())
    .filter(Boolean)
    .join(' ');
}
