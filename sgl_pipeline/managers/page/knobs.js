// The throttle's knobs, where the server has /pipeline/throttle: shown, changed, reverted.

import { call, refusal } from "./api.js";
import { byId, element } from "./look.js";

const ROUTE = "pipeline/throttle";
const CHOICES = {
  policy: ["throttle", "throttle-adaptive", "no-wt", "no-ut", "no-threshold", "sarathi", "greedy-queue"],
  accounting: ["radix", "radix-unshared", "radix-free-list", "gllm", "naive"],
};
const NAMES = {
  policy: "policy", prefill_spread_steps: "spread over steps, #T", max_prefill_tokens: "most prompt tokens, #MaxP",
  min_prefill_tokens: "fewest prompt tokens, #MinP", pause_free_share: "pause below free share", accounting: "accounting",
};

export class Knobs {
  constructor(model) {
    this.model = model;
    this.values = null;
    byId("knobs-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.apply();
    });
    byId("undo").addEventListener("click", () => this.#send({ undo: true }, "undone"));
  }

  async hello(facts) {
    if (!(facts.routes ?? []).includes("/" + ROUTE)) {
      byId("knobs-card").hidden = true;
      return;
    }
    await this.load();
  }

  async load() {
    const reply = await call(ROUTE).catch(() => null);
    byId("knobs-card").hidden = !reply || reply.status === 404;
    if (!reply) return;
    if (reply.ok) this.#show(await reply.json());
    else this.#note(reply.status === 401 ? "These need the administrator's key." : await refusal(reply), true);
  }

  /** Sends what differs from the values in use. */
  async apply() {
    const changes = {};
    for (const input of byId("knobs").querySelectorAll("input, select")) {
      const value = input.type === "number" ? Number(input.value) : input.value;
      if (value !== this.values[input.name]) changes[input.name] = value;
    }
    if (!Object.keys(changes).length) {
      this.#note("Nothing has changed.");
      return;
    }
    const revert = Number(byId("revert").value);
    await this.#send(revert ? { ...changes, revert_after_s: revert } : changes,
      Object.entries(changes).map(([name, value]) => `${name} ${value}`).join(", "));
    if (revert) setTimeout(() => this.load(), 1e3 * revert + 500);
  }

  async #send(body, text) {
    const reply = await call(ROUTE, { method: "PATCH", body: JSON.stringify(body) }).catch(() => null);
    if (!reply?.ok) {
      this.#note(reply ? await refusal(reply) : "no connection", true);
      return;
    }
    this.model.marks.push({ at: this.model.now(), text });
    this.#note(`Applied: ${text}. The lanes show where.`);
    await this.load();
  }

  #show(values) {
    this.values = values;
    byId("knobs").replaceChildren(...Object.keys(NAMES).filter((name) => name in values).flatMap((name) => {
      const input = name in CHOICES
        ? element("select", { id: `knob-${name}`, name }, ...CHOICES[name].map((choice) => element("option", {}, choice)))
        : element("input", { id: `knob-${name}`, name, type: "number", step: name === "pause_free_share" ? "any" : "1" });
      input.value = values[name];
      input.addEventListener("input", () => input.classList.toggle("changed", input.value !== String(values[name])));
      return [element("label", { for: input.id }, NAMES[name]), input];
    }));
  }

  #note(text, isBad = false) {
    byId("knobs-note").textContent = text;
    byId("knobs-note").classList.toggle("bad", isBad);
  }
}
