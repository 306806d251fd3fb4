/**
 * The record of everything that happened: one `record(event)` for the whole run, one JSON line each in
 * runs/<name>/ledger/events.jsonl. Token columns are not kept here.
 *
 * Lines are appended together every FLUSH_MS and at `close`; a line that does not parse at the end of the file is
 * the torn tail of a crash. Called by loop.ts alone, so that a reader finds every cause in one place.
 */
import { appendFileSync, mkdirSync } from 'node:fs';
import { join } from 'node:path';
import type { DropReason, EndReason, Json } from './types.ts';

const FLUSH_MS = 250;

export type LedgerEvent =
  | { readonly kind: 'meta'; readonly options: Json; readonly dataHash: string; readonly resumedAt: number }
  | {
      readonly kind: 'dispatched';
      readonly groupId: string;
      readonly source: string;
      readonly epoch: number;
      readonly index: number;
      readonly version: number;
    }
  | {
      readonly kind: 'finished';
      readonly rolloutId: string;
      readonly groupId: string;
      readonly attempt: number;
      readonly reason: EndReason;
      readonly detail: string | null;
      readonly reward: number | null;
      readonly turns: number;
      readonly tokens: number;
      readonly versions: readonly number[]; // oldest and newest that sampled it
    }
  | {
      readonly kind: 'prompt_dropped'; // before it was dispatched
      readonly split: 'train' | 'heldout';
      readonly source: string;
      readonly epoch: number;
      readonly index: number;
      readonly reason: 'prompt_too_long' | 'prompt_unrenderable';
      readonly detail: number | string; // tokens, or the error of the chat template
    }
  | { readonly kind: 'dropped'; readonly groupId: string; readonly reason: DropReason }
  | {
      readonly kind: 'batch';
      readonly step: number;
      readonly version: number;
      readonly groups: readonly string[];
      readonly denominator: number;
      readonly lr: number;
    }
  | { readonly kind: 'step'; readonly step: number }
  | { readonly kind: 'refit'; readonly version: number; readonly bytes: number; readonly verified: number | null }
  | { readonly kind: 'eval'; readonly step: number; readonly version: number; readonly reward: number | null }
  | { readonly kind: 'checkpoint'; readonly step: number; readonly path: string }
  | { readonly kind: 'event'; readonly name: string; readonly detail: Readonly<Record<string, string | number>> };

export class Ledger {
  readonly #path: string;
  #lines: string[] = [];
  readonly #timer: NodeJS.Timeout;

  /** `onError`: the disk does not take it; a run that cannot keep its record must not go on. */
  constructor(runDir: string, onError: (error: Error) => void) {
    const dir = join(runDir, 'ledger');
    mkdirSync(dir, { recursive: true });
    this.#path = join(dir, 'events.jsonl');
    this.#timer = setInterval(() => {
      try {
        this.flush();
      } catch (error) {
        clearInterval(this.#timer);
        onError(error as Error);
      }
    }, FLUSH_MS);
    this.#timer.unref();
  }

  record(event: LedgerEvent): void {
    this.#lines.push(`${JSON.stringify({ time: Date.now(), ...event })}\n`);
  }

  /** Throws with the path when the disk does not take it. */
  flush(): void {
    if (this.#lines.length === 0) return;
    try {
      appendFileSync(this.#path, this.#lines.join(''));
    } catch (error) {
      throw new Error(`Cannot write ${this.#path}: ${(error as Error).message}`);
    }
    this.#lines = [];
  }

  close(): void {
    clearInterval(this.#timer);
    this.flush();
  }
}
