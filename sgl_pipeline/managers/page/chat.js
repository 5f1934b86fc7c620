// A small conversation with the model, and how each request traveled through the pipeline.

import { call, events, refusal } from "./api.js";
import { byId, duration, element, figure, shares } from "./look.js";

// The server tells of requests with such ids in full (`live_channel.FOLLOWED_PREFIX`).
const PREFIX = "ui-";

export class Chat {
  constructor(model, lanes, redraw) {
    this.model = model;
    this.lanes = lanes;
    this.redraw = redraw;
    this.turns = [];
    this.travels = [];
    this.abort = null;
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
  }

  async send() {
    const text = byId("prompt").value.trim();
    if (!text || this.abort) return;
    byId("prompt").value = "";
    this.abort = new AbortController();
    this.#busy(true);
    const id = PREFIX + Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");
    this.#message("mine", text);
    const answer = this.#message("model", "");
    const travel = element("div", { class: "travel" });
    byId("messages").append(travel);
    this.travels.push({ request: this.model.ownRequest(id), place: travel });
    const messages = [...this.turns, { role: "user", content: text }];
    try {
      await this.#stream(id, messages, answer);
      this.turns = [...messages, { role: "assistant", content: answer.textContent }];
    } catch (error) {
      if (error.name !== "AbortError") {
        answer.classList.add("error");
        answer.append(error instanceof TypeError ? "no connection to the server" : error.message);
      }
    } finally {
      this.abort = null;
      this.#busy(false);
      this.#scroll();
    }
  }

  update() {
    for (const travel of this.travels.slice(-8)) this.#travel(travel);
  }

  async #stream(id, messages, answer) {
    const reply = await call("v1/chat/completions", {
      method: "POST", signal: this.abort.signal,
      body: JSON.stringify({ model: this.model.facts.model ?? "default", rid: id, messages, stream: true }),
    });
    if (!reply.ok) throw new Error(await refusal(reply));
    for await (const { data } of events(reply)) {
      if (data === "[DONE]") return;
      if (data.error) throw new Error(data.error.message ?? "the request has failed");
      const delta = data.choices?.[0]?.delta ?? {};
      answer.append(delta.reasoning_content ?? "", delta.content ?? "");
      this.#scroll();
    }
  }

  /** Queue, prompt, answer as a bar, from the steps that carried the request. */
  #travel({ request, place }) {
    const { state, ended } = request;
    if (ended) {
      const parts = [["rule-MinP", ended.queueMs, "in the queue"], ["accent", ended.firstMs - ended.queueMs, "prompt"],
        ["decode", ended.totalMs - ended.firstMs, "answer"]];
      const bar = element("div", { class: "shares" });
      shares(bar, parts.map(([tint, ms, name]) => [tint, Math.max(ms, 0), `${name}: ${duration(ms)}`]));
      const show = element("button", { type: "button" }, `show its ${figure(request.steps.size)} steps`);
      show.addEventListener("click", () => {
        this.lanes.showLast(new Set(request.steps.keys()));
        this.redraw();
        byId("lanes").scrollIntoView({ block: "center" });
      });
      place.replaceChildren(bar, `queue ${duration(ended.queueMs)} · prompt ${duration(ended.firstMs - ended.queueMs)} `
        + `(${figure(ended.prompt)} tokens, ${figure(ended.cached)} cached) · answer ${duration(ended.totalMs - ended.firstMs)} `
        + `(${figure(ended.output)} tokens) · `, show);
      this.travels = this.travels.filter((one) => one.place !== place);
    } else if (state) {
      const where = state.state === "waiting" ? "waits" : state.computed < state.prompt ? "in prefill" : "decodes";
      place.textContent = state.state === "finished" ? "ended"
        : `${where}: ${figure(Math.min(state.computed, state.prompt))} of ${figure(state.prompt)} prompt tokens, `
          + `${figure(state.output)} out; ${state.text || "ready"}`;
    }
  }

  #message(kind, text) {
    const made = element("div", { class: `message ${kind}` }, text);
    byId("messages").append(made);
    this.#scroll();
    return made;
  }

  #busy(isBusy) {
    byId("send").disabled = isBusy;
    byId("stop").disabled = !isBusy;
  }

  #scroll() { byId("messages").scrollTop = byId("messages").scrollHeight; }
}
