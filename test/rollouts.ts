/**
 * Rollouts of a real runner process, over a simulated engine and tokenizer; for tests of what environments do.
 *
 * Used by agent and isolation tests.
 */
import { Dispatch, type Job } from '../molt/dispatch.ts';
import { Generator } from '../molt/generator.ts';
import { nodeCommand } from '../molt/launch.ts';
import { Tokenizer } from '../molt/tokenizer.ts';
import type { Json, Rollout } from '../molt/types.ts';
import { IM_END } from '../workers/simulated_model.ts';
import { Cell, engineOptions, simulated } from './contract.ts';

export interface RolloutCellArgs {
  readonly agentPath: string;
  readonly maxRestarts: number;
  readonly blockMs?: number;
  readonly turnDeadlineMs?: number;
  readonly engine?: { readonly [key: string]: Json };
}

/** Bus, tokenizer, engine and runner. `close` ends them all. */
export class RolloutCell {
  readonly cell: Cell;
  readonly generator: Generator;
  readonly dispatch: Dispatch;
  readonly events: { readonly name: string; readonly detail: Readonly<Record<string, string | number>> }[];
  count = 0;

  static async open(args: RolloutCellArgs): Promise<RolloutCell> {
    const cell = await Cell.open();
    const [model] = await simulated.makeModels(cell.dir);
    const command = nodeCommand('workers/simulated.ts');
    const made = new RolloutCell(args, cell, model, command);
    await Promise.all([made.generator.startEngine(0), made.dispatch.startRunner(0)]);
    return made;
  }

  private constructor(args: RolloutCellArgs, cell: Cell, model: string, engineCommand: readonly string[]) {
    this.cell = cell;
    this.events = [];
    const event = (name: string, detail: Readonly<Record<string, string | number>>) =>
      this.events.push({ name, detail });
    this.generator = new Generator({
      launcher: cell.launcher,
      spec: (index) => ({
        id: `engine-${index}`,
        kind: 'engine',
        command: engineCommand,
        options: { ...(engineOptions(simulated, model) as { readonly [key: string]: Json }), ...args.engine },
      }),
      maxRequests: 64,
      maxRestarts: 1,
      hooks: { join: async () => {}, event },
    });
    const tokenizer = new Tokenizer({
      launcher: cell.launcher,
      spec: () => ({ id: 'tokenizer-0', kind: 'tokenizer', command: engineCommand, options: { model_path: model } }),
      maxRestarts: 1,
      event,
    });
    this.dispatch = new Dispatch({
      launcher: cell.launcher,
      spec: (index) => ({
        id: `runner-${index}`,
        kind: 'runner',
        command: nodeCommand('molt/runner.ts'),
        options: {
          agent_path: args.agentPath,
          template_kwargs: {},
          block_ms: args.blockMs ?? 10_000,
          turn_deadline_ms: args.turnDeadlineMs ?? 0,
        },
      }),
      generator: this.generator,
      tokenizer,
      maxRestarts: args.maxRestarts,
      hooks: { version: () => 0, recorded: async () => {}, event },
    });
  }

  /** One rollout; its label tells the agent what to do. */
  run(label: Json, over: Partial<Job['limits']> = {}, maxTokens = 8): Promise<Rollout> {
    const rolloutId = `r${this.count++}`;
    return this.dispatch.run({
      rolloutId,
      groupId: rolloutId,
      index: 0,
      prompt: { source: 'test', epoch: 0, index: 0, input: 'hello', label, tools: null },
      seed: this.count,
      sampling: {
        temperature: 1,
        top_p: 1,
        top_k: 0,
        max_tokens: maxTokens,
        seed: this.count,
        stop: [],
        stop_token_ids: [IM_END],
      },
      limits: { maxTurns: 4, maxTokens: 400, deadlineMs: 30_000, ...over },
    });
  }

  async close(): Promise<void> {
    this.generator.close();
    this.dispatch.close();
    await this.cell.close();
  }
}
