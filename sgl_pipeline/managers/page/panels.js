// The tables and bars: tiles, throttle, pages, layer plan, queue with what each request waits for.

import { call, refusal } from "./api.js";
import { draftsNow, showDrafts } from "./drafts.js";
import { CAUSES, RULES, byId, duration, element, figure, legend, percent, promptBudget, shares } from "./look.js";
import { Tenants } from "./tenants.js";

export class Panels {
  constructor(model) {
    this.model = model;
    this.tenants = new Tenants();
    byId("explain-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.explain(byId("explain-id").value.trim());
    });
  }

  hello(facts) {
    byId("what").textContent = [facts.model, `${facts.num_stages} stage${facts.num_stages > 1 ? "s" : ""}`,
      facts.device, facts.dtype].filter(Boolean).join(" · ");
    this.canExplain = (facts.routes ?? []).some((route) => route.startsWith("/pipeline/explain/"));
    byId("explain-form").hidden = !this.canExplain;
    legend(byId("lanes-legend"), [["accent", "prompt tokens"], ["decode", "decodes"], ["draft", "draft tokens"],
      ...Object.entries(CAUSES).map(([cause, text]) => [cause, text]),
      ["text", "your request", "ring"], ["good", "layers move", "mark"], ["bad", "a stage recovers", "mark"]]);
  }

  update() {
    const { model } = this;
    const { tick, facts } = model;
    if (!tick) return;
    const times = model.stageTimes();
    const last = (name) => model.series[name].at(-1);
    const idle = times.length && model.steps.length
      ? times.reduce((sum, one) => sum + 1 - one.shares.busy, 0) / times.length : null;
    tiles([
      ["Output tokens/s", figure(last("decode"))], ["Prompt tokens/s", figure(last("prefill"))],
      ["Running", figure(tick.running), tick.paused ? "paused" : ""],
      ["Waiting", figure(tick.waiting), tick.compiling ? `+ ${tick.compiling} compile` : ""],
      ["First token, p50", duration(last("ttft50"))], ["Per token, p50", duration(last("tpot50"))],
      ["Pages free", percent(tick.free_pages / tick.total_pages)], ["Stages idle", percent(idle)],
      ...(tick.state_slots ? [["State slots", figure(tick.state_slots[0]),
        `of ${figure(tick.state_slots[2])}, + ${figure(tick.state_slots[1])} cached`]] : []),
    ]);
    this.#throttle(tick, facts);
    this.#pages(tick);
    this.#plan(tick, times);
    showDrafts(model);
    this.#store(tick.store);
    this.#rooms(tick.rooms);
    this.tenants.update(tick);
    this.#queue(tick);
  }

  async explain(id) {
    if (!id) return;
    const box = byId("explanation");
    box.hidden = false;
    const known = this.model.queue.find((line) => line[0] === id);
    if (!this.canExplain) {
      box.textContent = known ? `${id}: ${known[5]}` : `${id} waits no longer.`;
      return;
    }
    const reply = await call(`pipeline/explain/${encodeURIComponent(id)}`, { isAdmin: true }).catch(() => null);
    if (!reply?.ok) {
      box.textContent = reply ? await refusal(reply) : "no connection";
      return;
    }
    const told = await reply.json();
    const more = [`${told.state}, rule ${told.rule}`];
    if (told.behind) more.push(`behind ${told.behind}`);
    if (told.num_ahead) more.push(`${told.num_ahead} ahead`);
    if (told.drafts) more.push(`drafts: ${told.drafts.text}`);
    if (told.num_retractions) more.push(`${told.num_retractions} times retracted`);
    more.push(...estimates(told));
    box.replaceChildren(element("div", { class: "id" }, id), element("div", {}, told.text),
      element("div", { class: "muted small" }, more.join(" · ")));
  }

  #throttle(tick, facts) {
    byId("policy").textContent = `${facts.policy}, counts by ${facts.accounting}`;
    const step = this.model.steps.at(-1);
    const rows = [
      ["Waiting tokens", figure(tick.waiting_tokens), figure(tick.naive_waiting_tokens)],
      ["Free pages", percent(tick.free_pages / tick.total_pages), percent(tick.unused_pages / tick.total_pages)],
      ["Running decodes", figure(tick.decoding), ""],
      ["Steps in flight", figure(tick.in_flight), ""],
      ["Prompt budget", step ? `${promptBudget(step)} · ${step.bound}` : "–", "", "total"],
      ["Decode budget", step ? figure(step.decodeBudget) : "–", "", "total"],
    ];
    if (tick.drafts) rows.push(["Drafts now", draftsNow(tick.drafts), "", "total"]);
    // A budget is neither exact nor naive, and may be as wide as both columns.
    byId("inputs").tBodies[0].replaceChildren(...rows.map(([name, exact, naive, kind]) => element("tr", { class: kind },
      element("td", {}, name), ...(kind ? [element("td", { colspan: 2 }, exact)]
        : [exact, naive].map((text) => element("td", {}, text))))));
    const counts = this.model.ruleCounts();
    const sum = Object.values(counts).reduce((a, b) => a + b, 0);
    shares(byId("rules"), Object.keys(RULES).map((rule) => [`rule-${rule}`, counts[rule] ?? 0, rule]));
    legend(byId("rules-legend"), Object.entries(RULES).map(([rule, text]) => [`rule-${rule}`,
      [element("b", {}, rule), `${text} ${sum ? percent((counts[rule] ?? 0) / sum) : ""}`]]));
  }

  #pages(tick) {
    const held = tick.total_pages - tick.free_pages, cached = tick.free_pages - tick.unused_pages;
    const parts = [["accent", held, "held"], ["cached", cached, "cached"], ["free", tick.unused_pages, "free"]];
    shares(byId("pages"), parts);
    legend(byId("pages-legend"), parts.map(([tint, pages, name]) => [tint, [name, element("b", {}, figure(pages))]]));
  }

  #plan(tick, times) {
    const configured = this.model.facts.num_stages ?? tick.layers.length;
    byId("epoch").textContent = `plan ${tick.epoch}`
      + (tick.layers.length < configured ? `, ${tick.layers.length} of ${configured} stages` : "");
    byId("plan").tBodies[0].replaceChildren(...tick.layers.map((layers, stage) => {
      const { ms, shares: of } = times[stage];
      const bar = element("div", { class: "shares thin" });
      shares(bar, [["accent", of.busy, "busy"], ...Object.keys(CAUSES).map((cause) => [cause, of[cause], cause])]);
      return element("tr", {}, ...[`${stage}`, figure(layers), figure(ms, 2), percent(of.busy || null)]
        .map((text) => element("td", {}, text)), element("td", {}, bar));
    }));
    byId("moves").replaceChildren(...this.model.moves.slice(-3).reverse().map((move) => element("li", {},
      `${move.before.join(", ")} → ${move.after.join(", ")} · ${move.wanted_by} · ${move.outcome}`
      + (move.outcome === "done" ? ` in ${duration(move.total_ms)}, held a step up ${duration(move.patch_ms + move.wait_ms)}` : ""))));
  }

  #store(store) {
    byId("store-card").hidden = !store;
    if (!store) return;
    byId("store-what").textContent = `${store.backend} · ${figure(store.hits)} of ${figure(store.lookups)} lookups found pages`
      + (store.broken_pages ? ` · ${figure(store.broken_pages)} pages were broken` : "");
    const [cached, loading, compute] = store.waiting;
    const soon = store.loading_ms ? ` in ${duration(store.loading_ms)}` : "";
    const parts = [["cached", cached, "cached"], ["decode", loading, `to load${soon}`], ["accent", compute, "to compute"]];
    shares(byId("store-waiting"), parts);
    legend(byId("store-legend"), parts.map(([tint, tokens, name]) => [tint, [name, element("b", {}, figure(tokens))]]));
    byId("store").tBodies[0].replaceChildren(...[["loaded", store.missed], ["saved", store.dropped]].map(([name, lost], way) => {
      const rate = store.seconds[way] ? store.bytes[way] / store.seconds[way] / 1e6 : null;
      const why = Object.entries(lost).filter(([, tokens]) => tokens)
        .map(([reason, tokens]) => `${reason.replaceAll("_", " ")} ${figure(tokens)}`).join(", ");
      return element("tr", {}, ...[name, figure(store.under_way[way]), figure(store.tokens[way]), figure(rate), why || "–"]
        .map((text) => element("td", {}, text)));
    }));
  }

  #rooms(rooms) {
    byId("rooms-card").hidden = !rooms;
    if (!rooms) return;
    const isPrefill = rooms.mode === "prefill";
    const peers = `${isPrefill ? "decode" : "prefill"} server${rooms.peers === 1 ? "" : "s"}`;
    byId("rooms-what").textContent = `${rooms.mode} server · ${figure(rooms.peers)} ${peers} connected`;
    const [early, late] = rooms.failed, lent = rooms.offload;
    const each = rooms.done ? `${duration(rooms.done_ms)} each` : "";
    const failed = ["failed", early + late, null, [early && `${figure(early)} before the prompt was ready`,
      late && `${figure(late)} afterwards`, rooms.computed_here && `${figure(rooms.computed_here)} computed here`]
      .filter(Boolean).join(", ")];
    const rows = isPrefill ? [
      ["not asked for", rooms.waiting, null, ""],
      ["held to be read", rooms.moving, rooms.held_pages, ""],
      ["read", rooms.done, null, each], failed,
      ...(lent ? [["lent for attention", lent.rooms, lent.pages, ""]] : []),
    ] : [
      ["prompt not ready", rooms.waiting, null, ""],
      ["being loaded", rooms.moving, rooms.promised_pages,
        rooms.pending_pages ? `${figure(rooms.pending_pages)} more pages wait for room` : ""],
      ["loaded", rooms.done, rooms.loaded_pages, each], failed,
      ...(lent ? [["attention elsewhere", lent.requests, null,
        `${figure(lent.tokens)} tokens; ${figure(lent.offloaded)} requests since the start, ${figure(lent.ended_early)} of them came back`]] : []),
    ];
    byId("rooms").tBodies[0].replaceChildren(...rows.map(([name, number, pages, more]) => element("tr", {},
      ...[name, figure(number), figure(pages), more].map((text) => element("td", {}, text)))));
  }

  #queue(tick) {
    const lines = tick.waiting ? this.model.queue : [];
    byId("queue").hidden = !lines.length;
    byId("queue-empty").hidden = tick.waiting > 0;
    byId("queue-count").textContent = tick.waiting
      ? `${figure(tick.waiting)} wait, the first ${figure(Math.min(lines.length, tick.waiting))} are shown` : "";
    const body = byId("queue").tBodies[0];
    if (body.contains(document.activeElement) || this.shownQueue === lines) return; // not under a reader's hands
    this.shownQueue = lines;
    body.replaceChildren(...lines.map(([id, waited, tokens, retractions, rule, text, behind]) => {
      const name = element("button", { class: "id", type: "button", title: id }, id);
      name.addEventListener("click", () => this.explain(id));
      const why = behind ? `${text}; next: ${behind.slice(0, 8)}` : text;
      return element("tr", {}, element("td", {}, name), element("td", {}, duration(1e3 * waited)),
        element("td", {}, figure(tokens)), element("td", {}, element("span", { class: "tag" }, rule)),
        element("td", {}, retractions ? `${why} (retracted ${retractions} times)` : why));
    }));
  }
}

/** When a request may go on: `estimate_s`, or what `estimate` says of it in fields that end in _s. */
function estimates(told) {
  const all = Object.entries({ ...told.estimate, estimate_s: told.estimate_s });
  const times = all.filter(([name, value]) => name.endsWith("_s") && typeof value === "number")
    .map(([name, value]) => `${name.slice(0, -2).replaceAll("_", " ")} ${duration(1e3 * value)}`);
  return told.estimate?.reason ? [...times, told.estimate.reason] : times;
}

function tiles(entries) {
  const list = byId("tiles");
  if (list.children.length !== entries.length) {
    list.replaceChildren(...entries.map(([name]) => element("div", {}, element("dt", {}, name), element("dd", {}))));
  }
  entries.forEach(([, value, note], place) => {
    list.children[place].lastChild.replaceChildren(value, ...(note ? [element("small", {}, note)] : []));
  });
}
