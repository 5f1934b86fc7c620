// Wires the page: the stream of events into the model, the model into the panels, keys and buttons.

import { key } from "./api.js";
import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { follow } from "./feed.js";
import { Goodput } from "./goodput.js";
import { Knobs } from "./knobs.js";
import { Lanes } from "./lanes.js";
import { byId, duration, figure } from "./look.js";
import { Model } from "./model.js";
import { Panels } from "./panels.js";
import { StepCurve } from "./step_curve.js";

const PANEL_MS = 500;
const FRAME_MS = matchMedia("(prefers-reduced-motion: reduce)").matches ? 500 : 60;

const model = new Model();
const lanes = new Lanes(byId("lanes"), model);
const charts = new Charts(model);
const panels = new Panels(model);
const chat = new Chat(model, lanes, drawLanes);
const knobs = new Knobs(model);
const goodput = new Goodput(model);
const curve = new StepCurve(model);
let droppedEvents = 0;

function drawLanes() {
  byId("lanes").dataset.steps = lanes.draw();
  byId("readout").textContent = lanes.describe();
  byId("zoom-value").textContent = duration(lanes.windowMs);
  const pause = byId("pause");
  pause.textContent = lanes.isPaused ? "Live" : "Pause";
  pause.setAttribute("aria-pressed", lanes.isPaused);
}

let nextFrame = 0;
function frame(now) {
  // A slow machine draws less often.
  if (now >= nextFrame && !lanes.isPaused) {
    const started = performance.now();
    drawLanes();
    nextFrame = now + Math.max(FRAME_MS, 6 * (performance.now() - started));
  }
  requestAnimationFrame(frame);
}

function updatePanels() {
  if (document.hidden) return;
  panels.update();
  charts.update();
  curve.update();
  chat.update();
  goodput.update();
}

function notice() {
  const parts = [];
  const { tick } = model;
  if (tick?.missed) parts.push(`The server was too busy to send ${figure(tick.missed)} updates.`);
  if (droppedEvents) parts.push(`This page read too slowly: ${figure(droppedEvents)} updates were left out.`);
  byId("notice").textContent = parts.join(" ");
  byId("notice").hidden = !parts.length;
}

function askForKey() {
  const dialog = byId("key-dialog");
  byId("key-text").textContent = key.value
    ? "The server does not take this key. Try another." : "This server wants its key. It stays in this tab.";
  byId("key").value = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      key.value = byId("key").value.trim();
      resolve();
    }, { once: true });
  });
}

const toggle = () => { if (lanes.isPaused) lanes.resume(); else lanes.pause(); };
const KEYS = {
  " ": toggle,
  "+": () => lanes.zoom(-1), "=": () => lanes.zoom(-1), "-": () => lanes.zoom(1),
  ArrowLeft: () => lanes.pan(-0.2), ArrowRight: () => lanes.pan(0.2),
  "[": () => lanes.select(-1), "]": () => lanes.select(1),
  l: () => lanes.showLast(), End: () => lanes.resume(),
};

function onKey(event) {
  const isTyping = event.target.closest("input, select, textarea, dialog");
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "t") nextTheme();
  else if (event.key === "/") byId("prompt").focus();
  else if (event.key === " " && event.target.closest("button, a, summary")) return;
  else if (event.key.startsWith("Arrow") && event.target !== byId("lanes") && event.target !== document.body) return;
  else if (event.key in KEYS) KEYS[event.key]();
  else return;
  event.preventDefault();
  drawLanes();
}

function nextTheme() {
  window.theme.next();
  byId("theme").textContent = `Theme: ${window.theme.mode}`;
}

function wire() {
  byId("theme").textContent = `Theme: ${window.theme.mode}`;
  byId("theme").addEventListener("click", nextTheme);
  for (const [id, key] of [["pause", " "], ["zoom-in", "+"], ["zoom-out", "-"], ["last-activity", "l"]]) {
    byId(id).addEventListener("click", () => { KEYS[key](); drawLanes(); });
  }
  const canvas = byId("lanes");
  canvas.addEventListener("pointermove", (event) => {
    lanes.pick(event.offsetX, event.offsetY);
    if (lanes.isPaused) drawLanes();
  });
  canvas.addEventListener("click", (event) => {
    if (!lanes.isPaused) lanes.pause();
    lanes.pick(event.offsetX, event.offsetY);
    drawLanes();
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    lanes.zoom(Math.sign(event.deltaY || event.deltaX));
    drawLanes();
  }, { passive: false });
  document.addEventListener("keydown", onKey);
  document.addEventListener("themechange", () => { lanes.readColors(); charts.build(); curve.clear(); drawLanes(); });
  new ResizeObserver(drawLanes).observe(canvas.parentElement);
  byId("key-dialog").addEventListener("cancel", (event) => event.preventDefault());
}

wire();
charts.build();
drawLanes();
setInterval(updatePanels, PANEL_MS);
requestAnimationFrame(frame);
follow({
  hello(facts) {
    model.reset(facts);
    lanes.resume();
    droppedEvents = 0;
    panels.hello(facts);
    knobs.hello(facts);
    goodput.hello(facts);
  },
  tick(tick) {
    model.apply(tick);
    notice();
  },
  dropped(count) {
    droppedEvents += count;
    notice();
  },
  status(state, text) {
    byId("status").dataset.status = state;
    byId("status-text").textContent = text;
  },
  key: askForKey,
});
