// The card of drafts: how many tokens were guessed, how many of them were right, and why none are now.

import { byId, element, figure, legend, percent, shares } from "./look.js";

/** Whether decodes may have drafts, in a few words: the rule by which none has one is a word like those of prompts. */
export const draftsNow = (drafts) => (drafts.rule ? `none · ${drafts.rule}` : `up to ${figure(drafts.most_each)} each`);

/** Fills the card from the newest tick; it is hidden where the server has no drafts. */
export function showDrafts(model) {
  const { drafts } = model.tick;
  byId("drafts-card").hidden = !drafts;
  if (!drafts) return;
  byId("drafts-what").textContent = drafts.why ? `none now: ${drafts.why}` : `at most ${figure(drafts.most_each)} tokens each`;
  const recent = model.recentDrafts();
  const wrong = recent.drafted - recent.accepted;
  shares(byId("drafts"), [["draft", recent.accepted, "right"], ["free", wrong, "wrong or behind a wrong one"]]);
  legend(byId("drafts-legend"), [["draft", ["right", element("b", {}, figure(recent.accepted))]],
    ["free", ["wrong or behind a wrong one", element("b", {}, figure(wrong))]]]);
  const rows = [["last second", recent], ["since the start", drafts]];
  byId("drafts-table").tBodies[0].replaceChildren(...rows.map(([name, { steps, drafted, accepted }]) => element("tr", {},
    ...[name, figure(drafted), figure(accepted), percent(drafted ? accepted / drafted : null), figure(steps ? 1 + accepted / steps : null, 2)]
      .map((text) => element("td", {}, text)))));
}
