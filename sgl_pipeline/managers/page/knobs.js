// The throttle's knobs, where the server has /pipeline/throttle: shown, changed, undone, and proposed
// from the last minutes where it has /pipeline/tune.

import { adminKey, call, refusal } from "./api.js";
import { byId, duration, element, percent } from "./look.js";

const ROUTE = "pipeline/throttle", TUNE_ROUTE = "pipeline/tune";
const POLL_MS = 5000;
const NAMES = {
  policy: "policy", prefill_spread_steps: "spread over steps, #T", max_prefill_tokens: "most prompt tokens, #MaxP",
  min_prefill_tokens: "fewest prompt tokens, #MinP", pause_free_share: "pause below free share", accounting: "accounting",
  dynamic_chunking: "chunks of equal time", ttft_weight: "weight of first tokens",
  target_tpot_ms: "target per token, ms", target_ttft_ms: "target first token, ms",
};

export class Knobs {
  constructor(model) {
    this.model = model;
    this.values = null;
    this.canBe = { shown: false, tuned: false };
    const onSubmit = (id, act) => byId(id).addEventListener("submit", (event) => {
      event.preventDefault();
      act();
    });
    onSubmit("knobs-form", () => this.apply());
    onSubmit("tune-form", () => this.tune());
    onSubmit("admin-form", () => {
      adminKey.value = byId("admin-key").value.trim();
      this.load();
    });
    byId("undo").addEventListener("click", () => this.#send({ undo: true }, "undone"));
    setInterval(() => {
      if (this.canBe.shown && !document.hidden && byId("admin-form").hidden) this.load();
    }, POLL_MS);
  }

  async hello(facts) {
    const routes = facts.routes ?? [];
    this.canBe = { shown: routes.includes(`/${ROUTE}`), tuned: routes.includes(`/${TUNE_ROUTE}`) };
    this.values = null;
    this.seen = new Set();
    byId("knobs-card").hidden = !this.canBe.shown;
    byId("tune-form").hidden = !this.canBe.tuned;
    if (this.canBe.shown) await this.load();
  }

  /** Shows the knobs in use. */
  async load() {
    const reply = await call(ROUTE, { isAdmin: true }).catch(() => null);
    if (!reply) return;
    byId("admin-form").hidden = reply.status !== 401;
    if (reply.ok) this.#take(await reply.json());
    else if (reply.status !== 401) this.#note(await refusal(reply), true);
  }

  /** Sends what differs from the knobs in use. */
  async apply() {
    const changes = {};
    for (const input of this.#inputs()) {
      const value = valueOf(input);
      if (value !== this.values[input.name]) changes[input.name] = value;
    }
    if (!Object.keys(changes).length) {
      this.#note("Nothing has changed.");
      return;
    }
    const revert = Number(byId("revert").value);
    await this.#send(revert ? { ...changes, revert_after_s: revert } : changes, wordsOf(changes));
  }

  /** Asks for knobs that would meet the targets, and puts them into the fields. */
  async tune() {
    const note = byId("tune-note"), button = byId("propose");
    button.disabled = true;
    note.textContent = "The simulator runs the last minutes again; a minute at most.";
    const body = { ttft_ms: Number(byId("ttft").value), tpot_ms: Number(byId("tpot").value) };
    const reply = await call(TUNE_ROUTE, { isAdmin: true, method: "POST", body: JSON.stringify(body) }).catch(() => null);
    button.disabled = false;
    if (!reply?.ok) {
      note.textContent = reply ? await refusal(reply) : "no connection";
      return;
    }
    const told = await reply.json();
    const knobs = told.knobs ?? {};
    for (const input of this.#inputs()) {
      if (input.name in knobs) this.#fill(input, knobs[input.name]);
    }
    this.#markUnread();
    note.textContent = Object.keys(knobs).length
      ? `Proposed: ${wordsOf(knobs)}. Predicted ${outcome(told.proposed)}; now ${outcome(told.now)}. Apply sets it.`
      : `Nothing better was found; predicted now: ${outcome(told.now)}.`;
  }

  async #send(body, text) {
    const reply = await call(ROUTE, { isAdmin: true, method: "PATCH", body: JSON.stringify(body) }).catch(() => null);
    if (!reply?.ok) {
      this.#note(reply ? await refusal(reply) : "no connection", true);
      return;
    }
    const told = await reply.json();
    this.#note(body.undo ? "The newest change is undone." : `Applied: ${text}. The lanes show where.`);
    if (!told.history) this.model.marks.push({ at: this.model.now(), text });
    if (told.policy) this.#take(told, true);
    else await this.load();
  }

  #take(told, isForced = false) {
    this.#mark(told.history ?? []);
    const isNew = Object.keys(NAMES).some((name) => told[name] !== this.values?.[name]);
    const isTyping = byId("knobs").contains(document.activeElement);
    if (isForced || (isNew && !isTyping) || !this.values) this.#show(told);
    const { facts } = this.model;
    facts.policy = told.policy ?? facts.policy;
    facts.accounting = told.accounting ?? facts.accounting;
    byId("reverts").textContent = told.revert ? `goes back in ${duration(1e3 * told.revert.in_s)}` : "";
  }

  /** All changes, whoever made them, are marks on the lanes. */
  #mark(history) {
    for (const one of history) {
      if (this.seen.has(one.change)) continue;
      this.seen.add(one.change);
      const at = (1e3 * one.at_unix_s - (this.model.clockOffsetMs ?? 0)) * 1e3;
      this.model.marks.push({ at, step: one.first_step, text: wordsOf(one.after) });
    }
  }

  #show(values) {
    this.values = values;
    byId("knobs").replaceChildren(...Object.keys(NAMES).filter((name) => name in values).flatMap((name) => {
      const range = values.ranges[name], isChoice = typeof range[0] !== "number";
      const input = isChoice
        ? element("select", { id: `knob-${name}`, name }, ...range.map((choice) => element("option", {}, shown(choice))))
        : element("input", { id: `knob-${name}`, name, type: "number", step: "any", title: `${range[0]} to ${range[1]}`,
          placeholder: name === "max_prefill_tokens" ? values.prefill_limit : name.startsWith("target") ? "none" : null });
      this.#fill(input, values[name]);
      input.addEventListener("input", () => {
        input.classList.toggle("changed", valueOf(input) !== values[name]);
        if (name === "policy") this.#markUnread();
      });
      return [element("label", { for: input.id }, NAMES[name]), input];
    }));
    this.#markUnread();
  }

  /** Dims the knobs that the selected policy does not read. */
  #markUnread() {
    const read = this.values.policy_knobs[byId("knob-policy").value];
    for (const input of this.#inputs()) {
      for (const label of input.labels) label.classList.toggle("unread", !read.includes(input.name));
    }
  }

  #fill(input, value) {
    input.value = shown(value) ?? "";
    input.classList.toggle("changed", value !== this.values[input.name]);
  }

  #inputs() { return byId("knobs").querySelectorAll("input, select"); }

  #note(text, isBad = false) {
    byId("knobs-note").textContent = text;
    byId("knobs-note").classList.toggle("bad", isBad);
  }
}

/** A switch is a choice of two words. */
function shown(value) { return typeof value === "boolean" ? (value ? "on" : "off") : value; }

/** A number, a name, a switch, or null for a field that was left empty. */
function valueOf(input) {
  if (input.name === "dynamic_chunking") return input.value === "on";
  if (input.type !== "number") return input.value;
  return input.value === "" ? null : Number(input.value);
}

function wordsOf(knobs) {
  return Object.entries(knobs).map(([name, value]) => `${name} ${shown(value) ?? "as the policy has it"}`).join(", ");
}

function outcome(told) {
  if (!told) return "nothing";
  const share = typeof told.target_share === "number" ? `${percent(told.target_share)} in time, ` : "";
  return `${share}first token p50 ${duration(told.ttft_ms?.p50)}, per token ${duration(told.tpot_ms?.p50)}`;
}
