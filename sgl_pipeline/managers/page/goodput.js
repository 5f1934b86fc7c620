// Goodput: the share of the requests that ended lately within latencies that the operator types, or
// that the server was started with. The rule is that of sgl_pipeline/goodput.py.

import { byId, percent } from "./look.js";

const LIMITS = ["ttft", "tpot"];

/** The share of `ended` within both limits, in ms; null: no limit. Null without requests or limits. */
export function goodput(ended, ttftMs, tpotMs) {
  if (!ended.length || (ttftMs === null && tpotMs === null)) return null;
  const isLate = (value, limit) => limit !== null && value !== null && value > limit;
  return ended.filter((one) => !isLate(one.firstMs, ttftMs) && !isLate(one.tpotMs, tpotMs)).length / ended.length;
}

export class Goodput {
  constructor(model) {
    this.model = model;
    for (const name of LIMITS) {
      byId(`goodput-${name}`).addEventListener("input", (event) => {
        try { localStorage.setItem(`sgl-pipeline-goodput-${name}`, event.target.value); } catch { /* it holds for this visit */ }
        this.update();
      });
    }
  }

  hello(facts) {
    for (const name of LIMITS) {
      let typed = null;
      try { typed = localStorage.getItem(`sgl-pipeline-goodput-${name}`); } catch { /* as above */ }
      byId(`goodput-${name}`).value = typed ?? facts[`target_${name}_ms`] ?? "";
    }
  }

  update() {
    const [ttftMs, tpotMs] = LIMITS.map((name) => Number(byId(`goodput-${name}`).value) || null);
    byId("goodput").textContent = percent(goodput(this.model.ended, ttftMs, tpotMs));
  }
}
