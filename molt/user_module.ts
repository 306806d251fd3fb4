/**
 * Modules that users write (recipes, agents, prompts): import one, or say in one line why it cannot be loaded.
 *
 * A module that is broken is bad input and not a failure of ours: the line names the place in the user's file and what is
 * wrong there, without a stack. Called by config.ts, agent.ts and data.ts.
 */
import { existsSync, statSync } from 'node:fs';
import { resolve } from 'node:path';
import { pathToFileURL } from 'node:url';

/** A message is cut there: a bundler may quote a whole file. */
const MAX_LENGTH = 400;
const ESM_HINT = 'name the file .mts, or put a package.json with "type": "module" beside it';

/** The exports of a module. Throws an Error whose message is one line, without the path given. */
export async function importUserModule(path: string): Promise<Record<string, unknown>> {
  if (!existsSync(path)) throw new Error('no such file');
  if (!statSync(path).isFile()) throw new Error('is not a file');
  try {
    return (await import(pathToFileURL(resolve(path)).href)) as Record<string, unknown>;
  } catch (error) {
    throw new Error(`cannot be loaded: ${failureText(error, resolve(path))}`);
  }
}

/** What the module at `path` (absolute) threw, in one line: `line 3: Expected "}" but found end of file`. */
export function failureText(error: unknown, path: string): string {
  if (!(error instanceof Error)) return `it threw ${oneLine(String(error))}`;
  const syntax = /^(.*?):(\d+):(\d+): ERROR: (.*)$/m.exec(error.message); // as esbuild writes it
  if (syntax) {
    const [, file, line, , what = ''] = syntax;
    const hint = what.includes('Top-level await') ? ` (${ESM_HINT})` : '';
    return `${file === path ? '' : `${file} `}line ${line}: ${what}${hint}`;
  }
  const name = error.name === 'Error' ? '' : `${error.name}: `;
  return `${placeOf(error, path)}${name}${oneLine(error.message)}`;
}

/** `line 7: ` of the user's own file where the stack passes through it, else nothing. */
export function placeOf(error: { readonly stack?: string }, path: string): string {
  const frame = (error.stack ?? '').split('\n').find((line) => line.includes(`${path}:`));
  const line = frame && new RegExp(`${escaped(path)}:(\\d+)`).exec(frame)?.[1];
  return line ? `line ${line}: ` : '';
}

export function oneLine(text: string): string {
  const line = text.trim().replace(/\s*\n\s*/g, '; ');
  return line.length > MAX_LENGTH ? `${line.slice(0, MAX_LENGTH)}...` : line;
}

function escaped(text: string): string {
  return text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
}
