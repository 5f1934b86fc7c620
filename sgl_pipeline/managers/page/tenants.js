// The card of tenants that share the server: the service that each has had lately.

import { byId, duration, element, figure, percent, shares } from "./look.js";

const WINDOW_US = 30_000_000;

export class Tenants {
  constructor() { this.past = []; }

  update(tick) {
    byId("tenants-card").hidden = !tick?.tenants;
    if (!tick?.tenants) return;
    const service = new Map(tick.tenants.map(([name, , , amount]) => [name, amount]));
    const unit = tick.tenants[0][2];
    const last = this.past.at(-1);
    // Another unit, or another server: what was counted before does not compare.
    if (last && (last.unit !== unit || last.now > tick.now)) this.past = [];
    this.past.push({ now: tick.now, unit, service });
    while (this.past[0].now < tick.now - WINDOW_US) this.past.shift();
    const before = this.past[0].service;
    const lately = (name) => service.get(name) - (before.get(name) ?? 0);
    const inAll = tick.tenants.reduce((sum, [name]) => sum + lately(name), 0);
    byId("tenants-what").textContent = "service of the last 30 s, by "
      + (unit === "ms" ? "predicted time" : "tokens: times are not known yet");
    const inUnit = (amount) => (unit === "ms" ? duration(amount) : `${figure(amount)} tokens`);
    byId("tenants").tBodies[0].replaceChildren(...tick.tenants.map(
      ([name, weight, , , lead, waiting, running, pages]) => {
        const bar = element("div", { class: "shares thin" });
        shares(bar, [["accent", lately(name), name], ["free", inAll - lately(name), "others"]]);
        return element("tr", {}, ...[name, figure(weight, weight % 1 ? 2 : 0),
          inAll ? percent(lately(name) / inAll) : "–", figure(waiting), figure(running), figure(pages),
          lead === null ? "–" : inUnit(lead)].map((text) => element("td", {}, text)), element("td", {}, bar));
      }));
  }
}
