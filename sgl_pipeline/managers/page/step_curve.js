// What a step takes by its decodes, and what it gains to share the running ones out over the steps.

import { byId, color, duration, figure, percent } from "./look.js";

const Plot = window.uPlot;

export class StepCurve {
  constructor(model) {
    this.model = model;
    this.place = byId("curve-chart");
    new ResizeObserver(() => this.plot?.setSize(this.#size())).observe(this.place);
  }

  /** It is drawn anew, in the colors of the theme. */
  clear() {
    this.plot?.destroy();
    this.plot = null;
    this.shown = null;
  }

  update() {
    const { curve, tick } = this.model;
    byId("curve-card").hidden = !curve;
    if (!curve || !tick) return;
    if (this.shown !== curve) {
      this.shown = curve;
      this.plot ??= new Plot(this.#options(), curve, this.place);
      this.plot.setData(curve);
    }
    byId("curve-text").textContent = gain(curve, tick.decoding, tick.layers.length);
  }

  #size() { return { width: Math.max(120, this.place.clientWidth), height: 106 }; }

  #options() {
    const axis = { stroke: color("muted"), grid: { stroke: color("faint"), width: 1 }, ticks: { show: false },
      font: "11px system-ui, sans-serif" };
    const whole = (plot, ticks) => ticks.map((value) => (value === null ? "" : figure(value)));
    return {
      ...this.#size(),
      padding: [6, 24, 0, 0],
      cursor: { drag: { setScale: false, x: false, y: false }, points: { size: 6 } },
      scales: { x: { time: false, distr: 3, log: 2 }, y: { range: (plot, low, high) => [0, 1.1 * high] } },
      axes: [{ ...axis, size: 24, values: whole }, { ...axis, size: 46, space: 28, values: whole }],
      series: [
        { label: "decodes", value: (plot, rows) => figure(rows) },
        { label: "a step, ms", stroke: color("accent"), width: 1.5, value: (plot, ms) => figure(ms, 1) },
      ],
    };
  }
}

/** Milliseconds of a step with that many decodes, straight between the points. */
export function stepMs([decodes, times], count) {
  const above = decodes.findIndex((one) => one >= count);
  if (above === 0) return times[0];
  if (above < 0) return times.at(-1) * (count / decodes.at(-1));
  const share = (count - decodes[above - 1]) / (decodes[above] - decodes[above - 1]);
  return times[above - 1] + share * (times[above] - times[above - 1]);
}

function gain(curve, running, depth) {
  if (!running) return "No request decodes.";
  const share = Math.ceil(running / depth), shared = stepMs(curve, share), together = stepMs(curve, running);
  const now = `${figure(running)} decode, ${figure(share)} a step: ${duration(shared)}`;
  return depth === 1 ? `${now}.`
    : `${now}. All in one step would take ${duration(together)}, ${percent(together / shared - 1)} longer, with the others empty.`;
}
