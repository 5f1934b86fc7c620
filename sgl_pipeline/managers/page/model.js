// What the page knows: the newest steps, and series over the last minutes. Moments are microseconds
// of the server's monotonic clock, in which all its processes stamp.

const MAX_STEPS = 12_000;
const SERIES_S = 120;
const RECENT_STEPS = 256;
const RATE_WINDOW_US = 1_000_000;
const LATENCY_WINDOW_US = 15_000_000;
const CAUSES = ["busy", "activations", "metadata", "slot"];

export const SERIES = ["time", "prefill", "decode", "ttft50", "ttft99", "tpot50", "waiting",
  "naiveWaiting", "free", "naiveFree", "held", "cached", "unused"];

/** How long a stage spent on what in one step: [cause, from, to] in us from the step's scheduling. */
export function spans(step, stage, bookedBefore) {
  const [free, inputs, activations, done, sent] = step.stages[stage];
  const decided = Math.max(free, 0);
  const all = [];
  if (bookedBefore !== null) {
    const waited = Math.min(decided, bookedBefore - step.start);
    if (waited > free) all.push(["slot", free, waited]);
  }
  all.push(["metadata", decided, inputs], ["activations", inputs, activations]);
  all.push(["busy", activations, done], ["slot", done, sent]);
  return all;
}

function percentile(sorted, share) {
  return sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;
}

export class Model {
  constructor() { this.reset({}); }

  reset(facts) {
    this.facts = facts;
    this.tick = null;
    this.steps = [];
    this.moves = [];
    this.recoveries = [];
    this.marks = [];
    this.queue = [];
    this.curve = null;
    this.own = new Map();
    this.ended = [];
    this.totals = [];
    this.series = Object.fromEntries(SERIES.map((name) => [name, []]));
    this.clockOffsetMs = null;
    this.missedSteps = 0;
  }

  apply(tick) {
    const offsetMs = Date.now() - tick.now / 1e3;
    this.clockOffsetMs = Math.min(this.clockOffsetMs ?? Infinity, offsetMs);
    for (const step of tick.steps) this.#addStep(step);
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    if (tick.moves) this.moves = tick.moves;
    if (tick.recoveries) this.recoveries = tick.recoveries;
    if (tick.queue) this.queue = tick.queue;
    if (tick.curve) this.curve = tick.curve;
    for (const carried of tick.carried) this.#carry(carried);
    for (const one of tick.followed) this.#follow(one);
    for (const one of tick.ended) this.#end(one);
    this.tick = tick;
    this.#extendSeries(tick);
  }

  /** The server's time now, in us. */
  now() {
    return this.clockOffsetMs === null ? 0 : (Date.now() - this.clockOffsetMs) * 1e3;
  }

  /** When a step began, if it is still known. */
  startOf(id) {
    const first = this.steps[0]?.id;
    if (id === undefined || first === undefined || id < first) return null;
    return (this.steps[id - first]?.id === id ? this.steps[id - first] : this.steps.find((step) => step.id === id))?.start ?? null;
  }

  ownRequest(id) {
    if (!this.own.has(id)) this.own.set(id, { id, steps: new Map(), state: null, ended: null });
    return this.own.get(id);
  }

  /** Mean milliseconds and shares of time of each stage over the newest steps of the plan in use. */
  stageTimes() {
    const epoch = this.tick?.epoch;
    const first = Math.max(0, this.steps.length - RECENT_STEPS);
    const stages = (this.tick?.layers ?? []).map(() => ({ busy: 0, activations: 0, metadata: 0, slot: 0, steps: 0 }));
    for (let i = first; i < this.steps.length; i++) {
      const step = this.steps[i];
      if (step.epoch !== epoch || step.stages.length !== stages.length) continue;
      stages.forEach((total, stage) => {
        total.steps += 1;
        const before = i > first ? this.steps[i - 1].booked : null;
        for (const [cause, from, to] of spans(step, stage, before)) total[cause] += to - from;
      });
    }
    return stages.map((total) => {
      const whole = CAUSES.reduce((sum, cause) => sum + total[cause], 0) || 1;
      const shares = Object.fromEntries(CAUSES.map((cause) => [cause, total[cause] / whole]));
      return { ms: total.steps ? total.busy / total.steps / 1e3 : null, shares };
    });
  }

  /** What drafts did in the last second: steps with one, their tokens, and the right ones. */
  recentDrafts() {
    const now = this.tick?.drafts, since = this.totals[0]?.drafts;
    if (!now) return null;
    const counted = (name) => now[name] - (since?.[name] ?? 0);
    return { steps: counted("steps"), drafted: counted("drafted"), accepted: counted("accepted") };
  }

  /** How many of the newest steps each rule bound. */
  ruleCounts() {
    const counts = {};
    for (const step of this.steps.slice(-RECENT_STEPS)) counts[step.bound] = (counts[step.bound] ?? 0) + 1;
    return counts;
  }

  #addStep([id, epoch, prefill, decodes, drafts, waiting, running, free, prefillBudget, decodeBudget, budgetMs, bound, start, booked, stages]) {
    const last = this.steps.at(-1);
    if (last && id <= last.id) return;
    if (last && id > last.id + 1) this.missedSteps += id - last.id - 1;
    const end = start + Math.max(...stages.map((stage) => stage[4]));
    this.steps.push({ id, epoch, prefill, decodes, drafts, waiting, running, free, prefillBudget, decodeBudget, budgetMs, bound, start, booked, end, stages,
      before: last && id === last.id + 1 ? last.booked : null });
  }

  #carry([step, id, start, length, isDecode]) {
    this.ownRequest(id).steps.set(step, { start, length, isDecode });
  }

  #follow([id, state, prompt, cached, computed, output, inFlight, text]) {
    this.ownRequest(id).state = { state, prompt, cached, computed, output, inFlight, text };
  }

  #end([id, at, prompt, cached, output, retractions, queueMs, firstMs, totalMs]) {
    const tpotMs = output > 1 ? (totalMs - firstMs) / (output - 1) : null;
    const one = { at, prompt, cached, output, retractions, queueMs, firstMs, totalMs, tpotMs };
    this.ended.push(one);
    if (this.own.has(id)) this.own.get(id).ended = one;
  }

  #extendSeries(tick) {
    this.totals.push(tick);
    while (this.totals.length > 2 && this.totals[1].now <= tick.now - RATE_WINDOW_US) this.totals.shift();
    while (this.ended.length && this.ended[0].at < tick.now - LATENCY_WINDOW_US) this.ended.shift();
    const since = this.totals[0];
    const seconds = (tick.now - since.now) / 1e6;
    const rate = (name) => (seconds > 0 ? (tick[name] - since[name]) / seconds : null);
    const first = this.ended.map((one) => one.firstMs).sort((a, b) => a - b);
    const between = this.ended.filter((one) => one.tpotMs !== null).map((one) => one.tpotMs).sort((a, b) => a - b);
    const cached = tick.free_pages - tick.unused_pages;
    const point = {
      time: (tick.now / 1e3 + this.clockOffsetMs) / 1e3,
      prefill: rate("prefill_tokens"), decode: rate("decoded"),
      ttft50: percentile(first, 0.5), ttft99: percentile(first, 0.99), tpot50: percentile(between, 0.5),
      waiting: tick.waiting_tokens, naiveWaiting: tick.naive_waiting_tokens,
      free: (100 * tick.free_pages) / tick.total_pages, naiveFree: (100 * tick.unused_pages) / tick.total_pages,
      held: tick.total_pages - tick.free_pages, cached, unused: tick.unused_pages,
    };
    const drop = this.series.time.findIndex((time) => time >= point.time - SERIES_S);
    for (const name of SERIES) {
      if (drop > 0) this.series[name].splice(0, drop);
      this.series[name].push(point[name]);
    }
  }
}
