// The swim lanes: tokens of each step, stages over time with their bubbles, the rule of each step,
// and marks for layer moves, recoveries and changed knobs. Drawn by hand on one canvas.

import { CAUSES, RULES, color, duration, figure, percent, promptBudget } from "./look.js";
import { spans } from "./model.js";

export const WINDOWS_MS = [50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000];
const FIRST_WINDOW = 5;
// The newest data is a tick old; the picture runs so much behind the server's clock.
const BEHIND_US = 450_000;
const TOKENS_PX = 46, GAP_PX = 8, RULE_PX = 12, AXIS_PX = 20, TOP_PX = 16;
const RING_PX = 20; // what the ring of one's own request takes at the end of a step
const COLORS = ["accent", "decode", "draft", "card", "line", "faint", "text", "muted", "bad", "good",
  ...Object.keys(CAUSES), ...Object.keys(RULES).map((rule) => `rule-${rule}`)];

/** The width of a block with a gap behind it; where many share a pixel, its own, for true shades. */
const spaced = (px) => (px > 2 ? px - 0.5 : Math.max(px, 0.15));

export class Lanes {
  constructor(canvas, model) {
    this.canvas = canvas;
    this.model = model;
    this.window = FIRST_WINDOW;
    this.end = null; // fixed right edge in us while paused
    this.selected = null; // {id, stage} of the step that the readout describes
    this.readColors();
  }

  get windowMs() { return WINDOWS_MS[this.window]; }
  get isPaused() { return this.end !== null; }
  get rightEdge() { return this.end ?? this.model.now() - BEHIND_US; }

  readColors() { this.colors = Object.fromEntries(COLORS.map((name) => [name, color(name)])); }

  pause() { this.end = this.rightEdge; }
  resume() { this.end = null; this.selected = null; }

  zoom(by) { this.window = Math.max(0, Math.min(WINDOWS_MS.length - 1, this.window + by)); }

  pan(share) {
    if (!this.isPaused) this.pause();
    this.end = Math.min(this.end + share * this.windowMs * 1e3, this.model.now());
  }

  /** Stops at the newest step. */
  showLast(ids = null) {
    const steps = ids ? this.model.steps.filter((step) => ids.has(step.id)) : this.model.steps.slice(-1);
    if (!steps.length) return;
    const width = steps.at(-1).end - steps[0].start;
    while (ids && this.windowMs * 1e3 < width * 1.1 && this.window < WINDOWS_MS.length - 1) this.window += 1;
    this.end = steps.at(-1).end + (this.windowMs * 1e3 - Math.min(width, this.windowMs * 1e3)) * (ids ? 0.3 : 0.05);
    this.selected = { id: steps.at(-1).id, stage: 0 };
  }

  /** Selects the step `by` places after the selected one. */
  select(by) {
    if (!this.isPaused) this.pause();
    const { steps } = this.model;
    if (!steps.length) return;
    let place = steps.findIndex((step) => step.id === this.selected?.id);
    place = place < 0 ? this.#firstAfter(this.end) - 1 : place + by;
    const step = steps[Math.max(0, Math.min(steps.length - 1, place))];
    this.selected = { id: step.id, stage: Math.min(this.selected?.stage ?? 0, step.stages.length - 1) };
    if (step.end > this.end) this.end = step.end;
    if (step.start < this.end - this.windowMs * 1e3) this.end = step.start + this.windowMs * 1e3;
  }

  /** Selects what is at a point of the canvas, in CSS pixels. */
  pick(x, y) {
    const shape = this.shape();
    const at = this.rightEdge - ((shape.right - x) / shape.width) * this.windowMs * 1e3;
    const stage = Math.floor((y - shape.lanes) / shape.pitch);
    const isLane = stage >= 0 && stage < shape.stages;
    let best = null, nearest = Infinity;
    const { steps } = this.model;
    for (let i = Math.min(steps.length, this.#firstAfter(at + 5e6)) - 1; i >= 0 && steps[i].end > at - 5e6; i--) {
      const step = steps[i];
      if (isLane && stage >= step.stages.length) continue; // it ran on fewer stages
      const from = isLane ? step.start + step.stages[stage][2] : step.start;
      const to = isLane ? step.start + step.stages[stage][3] : step.end;
      const distance = Math.max(from - at, at - to, 0);
      if (distance < nearest) { nearest = distance; best = step; }
    }
    this.selected = best && nearest < (6 / shape.width) * this.windowMs * 1e3
      ? { id: best.id, stage: isLane ? stage : 0 } : null;
  }

  shape() {
    const stages = Math.max(1, this.model.tick?.layers.length ?? this.model.facts.num_stages ?? 1);
    const width = this.canvas.clientWidth;
    const left = width < 560 ? 46 : 64;
    const lane = stages > 12 ? 14 : stages > 6 ? 20 : 28;
    const lanes = TOP_PX + TOKENS_PX + GAP_PX;
    const pitch = lane + 5;
    const rule = lanes + stages * pitch + 3;
    return { stages, left, right: width - 2, width: width - 2 - left, lane, pitch, lanes, rule, height: rule + RULE_PX + AXIS_PX };
  }

  draw() {
    const shape = this.shape();
    const scale = window.devicePixelRatio || 1;
    const { canvas } = this;
    canvas.style.height = `${shape.height}px`;
    if (canvas.width !== Math.round(canvas.clientWidth * scale) || canvas.height !== Math.round(shape.height * scale)) {
      canvas.width = Math.round(canvas.clientWidth * scale);
      canvas.height = Math.round(shape.height * scale);
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, shape.height);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const end = this.rightEdge, begin = end - this.windowMs * 1e3;
    const x = (us) => shape.left + ((us - begin) / (end - begin)) * shape.width;
    this.#frame(context, shape, begin, end, x);
    context.save();
    context.beginPath();
    context.rect(shape.left, 0, shape.width, shape.height - AXIS_PX);
    context.clip();
    const shown = this.#shown(begin, end);
    const most = Math.max(32, ...shown.map((step) => step.prefill + step.decodes + step.drafts));
    for (const step of shown) this.#step(context, shape, step, x, most);
    this.#marks(context, shape, begin, end, x);
    context.restore();
    this.#labels(context, shape, most);
    if (!shown.length) this.#note(context, shape, this.model.tick ? "No step ran in this time. Press l for the newest steps." : "");
    return shown.length;
  }

  /** What the selected step did, in words. */
  describe() {
    const step = this.selected && this.model.steps.find((one) => one.id === this.selected.id);
    if (!step) return "Point at a step for its numbers, or press [ and ] to go from step to step.";
    const { stage } = this.selected;
    const of = spans(step, stage, step.before).map(([cause, from, to]) => [cause === "busy" ? "computes" : cause, to - from]);
    const times = of.filter(([, us]) => us > 0).map(([cause, us]) => `${cause} ${duration(us / 1e3)}`);
    const own = [...this.model.own.values()].find((one) => one.steps.has(step.id));
    return `Step ${figure(step.id)}: ${figure(step.prefill)} prompt tokens, allowed ${promptBudget(step)} (${step.bound}), `
      + `${figure(step.decodes)} decodes of ${figure(step.decodeBudget)}${step.drafts ? ` with ${figure(step.drafts)} draft tokens` : ""}; ${figure(step.waiting)} tokens waited, ${percent(step.free)} of the pages free. `
      + `Stage ${stage}: ${times.join(", ")}.${own ? " It carries your request." : ""}`;
  }

  #firstAfter(us) {
    const { steps } = this.model;
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle].start < us) low = middle + 1; else high = middle;
    }
    return low;
  }

  #shown(begin, end) {
    const { steps } = this.model;
    const last = this.#firstAfter(end);
    let first = last;
    // Steps end in the order in which they begin.
    while (first > 0 && steps[first - 1].end >= begin) first -= 1;
    return steps.slice(first, last);
  }

  #frame(context, shape, begin, end, x) {
    const { colors } = this;
    context.fillStyle = colors.faint;
    for (let stage = 0; stage < shape.stages; stage++) {
      context.fillRect(shape.left, shape.lanes + stage * shape.pitch, shape.width, shape.lane);
    }
    context.fillRect(shape.left, shape.rule, shape.width, RULE_PX);
    const wanted = ((end - begin) / shape.width) * 110;
    const every = [1, 2, 5].flatMap((digit) => [3, 4, 5, 6, 7].map((power) => digit * 10 ** power))
      .sort((a, b) => a - b).find((us) => us >= wanted) ?? 1e7;
    context.textAlign = "center";
    for (let ago = 0; ago <= end - begin; ago += every) {
      const at = end - ago;
      context.fillStyle = colors.line;
      context.fillRect(Math.round(x(at)), TOP_PX, 1, shape.height - AXIS_PX - TOP_PX);
      const name = every < 1e6 ? `−${figure(ago / 1e3)} ms` : `−${figure(ago / 1e6)} s`;
      const half = context.measureText(name).width / 2;
      if (x(at) - half < shape.left || x(at) + half > shape.right) continue;
      context.fillStyle = colors.muted;
      context.fillText(name, x(at), shape.height - AXIS_PX / 2 + 1);
    }
  }

  #step(context, shape, step, x, most) {
    const { colors } = this;
    const total = step.prefill + step.decodes + step.drafts || 1;
    const isSelected = step.id === this.selected?.id;
    const isOwn = this.#isOwn(step.id);
    const start = x(step.start);
    // Tokens and rule stand where the first stage computes.
    const from = x(step.start + step.stages[0][2]);
    const width = spaced(x(step.start + step.stages[0][3]) - from);
    const decodePx = (step.decodes / most) * TOKENS_PX, prefillPx = (step.prefill / most) * TOKENS_PX;
    const draftPx = (step.drafts / most) * TOKENS_PX;
    context.fillStyle = colors.decode;
    context.fillRect(from, TOP_PX + TOKENS_PX - decodePx, width, decodePx);
    context.fillStyle = colors.accent;
    context.fillRect(from, TOP_PX + TOKENS_PX - decodePx - prefillPx, width, prefillPx);
    context.fillStyle = colors.draft;
    context.fillRect(from, TOP_PX + TOKENS_PX - decodePx - prefillPx - draftPx, width, draftPx);
    context.fillStyle = colors[`rule-${step.bound}`] ?? colors.muted;
    context.fillRect(from, shape.rule, width, RULE_PX);
    for (let stage = 0; stage < shape.stages && stage < step.stages.length; stage++) {
      const top = shape.lanes + stage * shape.pitch;
      for (const [cause, fromUs, toUs] of spans(step, stage, step.before)) {
        const left = x(step.start + fromUs), px = x(step.start + toUs) - left;
        if (cause !== "busy") {
          if (px < 0.05) continue;
          context.fillStyle = colors[cause];
          context.fillRect(left, top + shape.lane * 0.39, px, shape.lane * 0.22);
          continue;
        }
        const block = spaced(px);
        const split = shape.lane * ((step.prefill + step.drafts) / total);
        context.fillStyle = step.drafts ? colors.draft : colors.accent;
        context.fillRect(left, top, block, split);
        context.fillStyle = colors.decode;
        context.fillRect(left, top + split, block, shape.lane - split);
        if (isSelected || isOwn) this.#outline(context, left, top, block, shape.lane, isOwn);
        if (px > 52 && shape.lane > 18) {
          const seen = Math.max(left, shape.left);
          const free = Math.min(left + px - (isOwn ? RING_PX : 0), shape.right) - seen;
          this.#inside(context, step, seen, top, shape.lane, free, split);
        }
      }
    }
    if (isSelected) {
      context.fillStyle = colors.text;
      context.fillRect(start, TOP_PX - 4, 1, 4);
    }
  }

  #isOwn(id) {
    for (const request of this.model.own.values()) if (request.steps.has(id)) return true;
    return false;
  }

  #outline(context, left, top, width, height, isOwn) {
    context.strokeStyle = this.colors.text;
    context.lineWidth = 1.5;
    if (width > 4) context.strokeRect(left + 0.75, top + 0.75, width - 1.5, height - 1.5);
    if (!isOwn) return;
    context.beginPath();
    context.arc(left + Math.max(width / 2, width - RING_PX / 2), top + height / 2, Math.min(4, height / 3), 0, 2 * Math.PI);
    context.fillStyle = this.colors.card;
    context.fill();
    context.stroke();
  }

  #inside(context, step, left, top, height, px, split) {
    const text = [step.prefill || step.drafts, step.decodes].filter(Boolean).join(" + ");
    if (context.measureText(text).width > px - 8) return;
    context.textAlign = "left";
    context.fillStyle = split > height / 2 ? this.colors.card : this.colors.text;
    context.fillText(text, left + 5, top + (split > 0 && split < height ? (split > height / 2 ? split / 2 : split + (height - split) / 2) : height / 2) + 0.5);
  }

  #marks(context, shape, begin, end, x) {
    const { colors } = this;
    const bottom = shape.rule + RULE_PX;
    const line = (at, tint, text) => {
      if (at < begin || at > end) return;
      context.fillStyle = tint;
      context.fillRect(x(at) - 1, 2, 2, bottom - 2);
      const width = context.measureText(text).width;
      const isRight = x(at) + width + 8 > shape.right;
      context.textAlign = isRight ? "right" : "left";
      context.fillText(text, x(at) + (isRight ? -5 : 5), 8);
    };
    for (const move of this.model.moves) {
      const over = move.over ?? this.model.now();
      if (over < begin || move.began > end) continue;
      context.fillStyle = colors.good;
      context.fillRect(x(move.began), TOP_PX - 2, Math.max(1, x(move.switched ?? over) - x(move.began)), 2);
      if (move.switched !== null) line(move.switched, colors.good, `layers ${move.after.join(", ")}`);
      else if (move.over !== null) line(move.over, colors.muted, "move abandoned");
    }
    for (const recovery of this.model.recoveries) {
      const over = recovery.over ?? this.model.now();
      if (over < begin || recovery.began > end) continue;
      context.fillStyle = colors.bad;
      context.globalAlpha = 0.18;
      context.fillRect(x(recovery.began), TOP_PX, x(over) - x(recovery.began), bottom - TOP_PX);
      context.globalAlpha = 1;
      line(recovery.began, colors.bad, recovery.text);
    }
    for (const mark of this.model.marks) line(this.model.startOf(mark.step) ?? mark.at, colors.accent, mark.text);
  }

  #labels(context, shape, most) {
    context.textAlign = "left";
    context.fillStyle = this.colors.muted;
    const isNarrow = shape.left < 60;
    context.fillText("tokens", 0, TOP_PX + TOKENS_PX - 8);
    context.fillText(figure(most), 0, TOP_PX + 5);
    for (let stage = 0; stage < shape.stages; stage++) {
      context.fillText(isNarrow ? `st. ${stage}` : `stage ${stage}`, 0, shape.lanes + stage * shape.pitch + shape.lane / 2 + 0.5);
    }
    context.fillText("rule", 0, shape.rule + RULE_PX / 2 + 0.5);
  }

  #note(context, shape, text) {
    context.textAlign = "center";
    context.fillStyle = this.colors.muted;
    context.fillText(text, shape.left + shape.width / 2, TOP_PX + TOKENS_PX / 2, shape.width - 16);
  }
}
