/**
 * How many requests an engine is given at once: what its key/value cache bears, learned from its heartbeats.
 *
 *   preemptions rose -> 0.8 of what ran
 *   a generation of requests in which the cache was nearly full or something waited in the engine -> hold
 *   a generation without either -> a little more
 *
 * An engine whose cache is full preempts a request and later computes all of its tokens again, so one request too many
 * slows all of them. How many fit depends on how long they grow, which nobody knows beforehand and which only whole requests
 * show: a generation is over when as many have ended as may run at once.
 *
 * Invariants
 *   1. 1 <= value <= max, and max is the engine's own limit (engine.max_requests).
 *   2. One overload cuts once: until the engine has come down to the limit, nothing new is learned.
 *      What the limit did not hold back teaches nothing either.
 *   3. An engine that publishes no `preemptions` keeps max.
 * Pure. Called by generator.ts. Elsewhere called AIMD (additive increase, multiplicative decrease), congestion control.
 */

const CUT = 0.8;
/** Above this the next tokens of what runs may not fit. */
const FULL = 0.9;
/** Generations without trouble from the lowest limit to the highest. */
const GENERATIONS = 16;

export class ConcurrencyLimit {
  readonly max: number;
  #value: number;
  #preemptions = 0; // as the engine counts them, since it started
  #since = 0; // requests that had ended when this generation began
  #isTight = false; // in this generation

  constructor(max: number) {
    this.max = max;
    this.#value = max;
  }

  get value(): number {
    return this.#value;
  }

  /**
   * One heartbeat of an engine that has `sent` requests and ended `ended` so far. Returns how many were preempted since the
   * last one.
   */
  learn(stats: Readonly<Record<string, number>>, sent: number, ended: number): number {
    const { preemptions, cache_use = 0, waiting = 0, running = sent } = stats;
    if (preemptions === undefined) return 0;
    const rise = preemptions - this.#preemptions;
    this.#preemptions = preemptions;
    if (rise > 0 && sent <= this.#value) this.#set(Math.floor(CUT * running), ended);
    this.#isTight ||= sent !== this.#value || waiting > 0 || cache_use >= FULL;
    if (ended - this.#since >= this.#value)
      this.#set(this.#isTight ? this.#value : this.#value + this.max / GENERATIONS, ended);
    return rise;
  }

  /** A new generation begins. */
  #set(value: number, ended: number): void {
    this.#value = Math.min(this.max, Math.max(1, Math.ceil(value)));
    this.#since = ended;
    this.#isTight = false;
  }
}
