// Words, numbers and colors, the same everywhere on the page.

export const CAUSES = {
  activations: "waits for rows of the stage before",
  metadata: "waits for the plan and its inputs",
  slot: "waits for room in the pipeline",
};

export const RULES = {
  WT: "waiting tokens over the spread",
  UT: "share of free pages",
  MinP: "fewest tokens worth a step",
  MaxP: "most tokens of a step",
  pause: "too few pages are free",
  TPOT: "target for the time between tokens",
  TTFT: "target for the time to the first token",
  "fair-step": "short steps where tenants share",
};

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "#888";
}

/** A number as people read it: 12,345; 0.37; 4.1; or a dash. */
export function figure(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function percent(share, digits = 0) {
  return share === null || share === undefined ? "–" : `${figure(100 * share, digits)} %`;
}

export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10) return `${figure(ms, 1)} ms`;
  if (ms < 1000) return `${figure(ms)} ms`;
  if (ms < 100_000) return `${figure(ms / 1000, 1)} s`;
  return `${figure(ms / 60_000)} min`;
}

/** What a step's policy let it prefill: tokens, or what its decodes left of a time. */
export function promptBudget(step) {
  if (step.budgetMs === null) return `${figure(step.prefillBudget)} tokens`;
  return `in ${figure(step.budgetMs, 1)} ms`;
}

/** An element with children: text or elements. `attributes.class` and the like. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** A legend: [color, text, kind]; kind is "", "ring" or "mark". */
export function legend(list, entries) {
  list.replaceChildren(...entries.map(([name, text, kind = ""]) => {
    const key = element("span", { class: `key ${kind}` });
    if (kind !== "ring") key.style.background = name.startsWith("#") ? name : `var(--${name})`;
    return element("li", {}, key, ...[text].flat());
  }));
}

/** A bar of shares: [color, amount]. */
export function shares(bar, entries) {
  const parts = entries.filter(([, amount]) => amount > 0);
  bar.replaceChildren(...parts.map(([name, amount, title]) => {
    const part = element("span", { title });
    part.style.flex = `${amount} 0 0`;
    part.style.background = `var(--${name})`;
    return part;
  }));
}

export const byId = (id) => document.getElementById(id);
