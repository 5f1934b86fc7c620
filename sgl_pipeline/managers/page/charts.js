// Live charts with uPlot: time on the x axis, the newest two minutes.

import { color, figure } from "./look.js";

const Plot = window.uPlot;
const SERIES = {
  rates: [["decode", "output", "accent", 0], ["prefill", "prompt", "activations", 0]],
  latencies: [["ttft50", "first token p50", "accent", 0], ["ttft99", "p99", "activations", 0],
    ["tpot50", "per token p50", "good", 1]],
  "waiting-chart": [["waiting", "exact", "accent", 0], ["naiveWaiting", "naive", "activations", 0]],
  "free-chart": [["free", "exact", "accent", 0], ["naiveFree", "naive", "activations", 0]],
  "pages-chart": [["held", "held", "accent", 0], ["cached", "cached", "activations", 0]],
};

const FROM_ZERO = { range: (plot, low, high) => [0, Math.max(1, (high ?? 1) * 1.1)] };
const powerBelow = (value) => 10 ** Math.floor(Math.log10(Math.max(value ?? 1, 0.1)));
const SCALES = {
  "free-chart": { range: [0, 100] },
  // First tokens take a hundred times as long as the others: logarithmic.
  latencies: { distr: 3, range: (plot, low, high) => [powerBelow(low), 10 * powerBelow(high ?? 100)] },
};

export class Charts {
  constructor(model) {
    this.model = model;
    this.plots = new Map();
    this.sizes = new ResizeObserver((entries) => {
      for (const { target } of entries) this.plots.get(target.id)?.setSize(sizeOf(target));
    });
  }

  /** Makes all of them anew, in the colors of the theme. */
  build() {
    this.sizes.disconnect();
    for (const plot of this.plots.values()) plot.destroy();
    this.plots.clear();
    for (const [id, series] of Object.entries(SERIES)) {
      const place = document.getElementById(id);
      const plot = new Plot(options(place, series, SCALES[id] ?? FROM_ZERO), this.#data(series), place);
      this.plots.set(id, plot);
      this.sizes.observe(place);
    }
  }

  update() {
    for (const [id, plot] of this.plots) plot.setData(this.#data(SERIES[id]));
  }

  #data(series) {
    return [this.model.series.time, ...series.map(([name]) => this.model.series[name])];
  }
}

function sizeOf(place) {
  return { width: Math.max(120, place.clientWidth), height: place.classList.contains("low") ? 106 : 146 };
}

function options(place, series, scale) {
  const axis = { stroke: color("muted"), grid: { stroke: color("faint"), width: 1 }, ticks: { show: false },
    font: "11px system-ui, sans-serif" };
  return {
    ...sizeOf(place),
    padding: [6, 24, 0, 0],
    cursor: { drag: { setScale: false, x: false, y: false }, points: { size: 6 } },
    legend: { live: true },
    scales: { y: scale },
    axes: [
      { ...axis, size: 24, space: 70, values: (plot, ticks) => ticks.map(clock) },
      { ...axis, size: 46, space: 28, values: (plot, ticks) => ticks.map(short) },
    ],
    series: [
      { label: "time", value: (plot, time) => (time === null ? "" : clock(time)), class: "hidden-series" },
      ...series.map(([, label, tint, digits]) => ({
        label, stroke: color(tint), width: 1.5, points: { show: false },
        value: (plot, value) => figure(value ?? lastOf(plot, label), digits),
      })),
    ],
  };
}

/** Without a pointer on the chart the legend shows the newest value. */
function lastOf(plot, label) {
  const place = plot.series?.findIndex((one) => one.label === label) ?? -1;
  return place > 0 ? plot.data?.[place]?.at(-1) : null;
}

function clock(seconds) {
  return new Date(seconds * 1e3).toLocaleTimeString("en-GB");
}

function short(value) {
  if (value === null) return ""; // a tick of a logarithmic axis that has no room
  return value >= 10_000 ? `${figure(value / 1000)}k` : figure(value, value > 0 && value < 1 ? 1 : 0);
}
