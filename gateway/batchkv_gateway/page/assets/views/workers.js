// The workers: what each does, how fast it is, and what it needs.

import { NATIVE, sendJson } from "../api.js";
import { app, speedNow } from "../app.js";
import { sparkline } from "../charts.js";
import { h } from "../dom.js";
import { ago, count, moment, percent, rate, size } from "../format.js";
import { alert, command, NO_WORKER } from "./parts.js";

const SLOW_SHARE = 0.6; // of the median speed of workers of the same model
const notes = new Map();

export const title = () => "Workers";

export function enter() {
  notes.clear();
}

export function render() {
  const found = app.workers;
  return [
    h("h1", { tabindex: -1 }, "Workers"),
    !app.hasState && h("p", { class: "empty" }, "Loading …"),
    app.hasState && !found.length && empty(),
    h("div", { key: "grid", class: "grid" }, found.map(card)),
  ];
}

function empty() {
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "No workers"),
    h("p", {}, "This command starts one on the machine where you type it:"),
    command(NO_WORKER),
  );
}

function card(worker) {
  const title = `worker-${worker.name}`;
  const slow = slowness(worker);
  return h(
    "section",
    { key: worker.name, class: "card worker", "aria-labelledby": title },
    h("h2", { id: title }, h("bdi", {}, worker.name)),
    h(
      "p",
      {},
      h("span", { class: `badge ${kindOf(worker)}` }, worker.shown_state || worker.state),
      slow && h("span", { class: "badge bad" }, slow),
    ),
    !isHost(worker) && h("p", { class: "speed" }, rate(speedNow(worker))),
    !isHost(worker) && speedOverTime(worker),
    h("dl", { class: "facts" }, facts(worker).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    app.session.sees_all && drainButton(worker),
    alert(notes.get(worker.name)),
  );
}

// A host has one worker for each model that it holds, and takes no rows itself.
function isHost(worker) {
  return worker.models?.length > 0;
}

function speedOverTime(worker) {
  const now = [Math.round(Date.now() / 1000), worker.is_away ? 0 : (speedNow(worker) ?? 0)];
  const points = [...(app.history[worker.name] ?? []), now];
  if (points.length < 3) return false;
  const most = Math.max(...points.map(([, value]) => value));
  if (!most) return false;
  const text = `since ${moment(points[0][0])}, at most ${rate(most)}`;
  return [sparkline(points, `Speed ${text}`), h("p", { class: "note" }, text)];
}

function kindOf(worker) {
  if (worker.is_away) return "bad";
  return worker.num_running ? "busy" : "idle";
}

// Which Mac is slow, compared with the others that serve the same model. The rate is of the last
// minute. Without some seconds of work in it, as the gateway says, it tells nothing.
function slowness(worker) {
  const isCompared = (one) => one.is_comparable && one.tokens_per_second && !one.is_away;
  const rates = app.workers
    .filter((one) => one.model === worker.model && isCompared(one))
    .map((one) => one.tokens_per_second)
    .sort((a, b) => a - b);
  if (rates.length < 2 || !isCompared(worker)) return "";
  const median = rates[Math.floor(rates.length / 2)];
  const share = worker.tokens_per_second / median;
  return share < SLOW_SHARE ? `slow: ${percent(share)} of the median` : "";
}

function facts(worker) {
  if (isHost(worker)) return hostFacts(worker);
  const pairs = [
    ["Rows held", count(worker.num_running)],
    worker.num_slots > 0 && ["Slots", slots(worker)],
    worker.memory_bytes > 0 && ["Memory", size(worker.memory_bytes)],
    worker.kv_budget > 0 && ["Keys and values", `${size(worker.kv_memory)} of ${size(worker.kv_budget)}`],
    worker.pressure && ["Memory pressure", worker.pressure],
    typeof worker.cached_share === "number" && ["Prompt from caches", percent(worker.cached_share)],
    ...hitRates(worker.hit_rates),
    ["Model", h("bdi", {}, worker.model || worker.queues.join(", "))],
    worker.adapters?.length > 0 && ["Adapters", worker.adapters.join(", ")],
    worker.scheme && ["KV scheme", worker.scheme],
    ["Rows ended", `${count(worker.num_successful)} ok, ${count(worker.num_failed)} failed`],
    ["Last seen", ago(Math.max(0, Date.now() / 1000 - worker.seen_at))],
    ["Machine", `${worker.hostname}, pid ${worker.pid}`],
    worker.version && ["Version", `batchkv ${worker.version}`],
  ];
  return pairs.filter(Boolean);
}

function hostFacts(worker) {
  return [
    ["Models", worker.models.map((model) => h("p", {}, h("bdi", {}, model)))],
    ...worker.held.map(([model, name]) => ["Holds", h("bdi", {}, `${model} in ${name}`)]),
    ["Last seen", ago(Math.max(0, Date.now() / 1000 - worker.seen_at))],
    ["Machine", `${worker.hostname}, pid ${worker.pid}`],
    worker.version && ["Version", `batchkv ${worker.version}`],
  ].filter(Boolean);
}

function slots(worker) {
  const used = worker.num_running ? worker.slots_used : 0; // its last figures may be of rows that ended
  return typeof worker.slots_used === "number" ? `${count(used)} of ${count(worker.num_slots)} in use` : count(worker.num_slots);
}

function hitRates(rates) {
  return Object.entries(rates ?? {}).map(([tier, share]) => [`Cache hits, ${tier}`, percent(share)]);
}

function drainButton(worker) {
  const isDraining = worker.is_drained;
  return h(
    "div",
    { key: "actions", class: "actions" },
    h(
      "button",
      { type: "button", onclick: () => send(worker, isDraining ? "resume" : "drain") },
      isDraining ? "Resume" : "Drain",
    ),
    h("span", { class: "note" }, isDraining ? "It takes no rows until it is resumed." : "It ends its rows and takes no new ones."),
  );
}

async function send(worker, order) {
  notes.delete(worker.name);
  try {
    await sendJson("POST", `${NATIVE}/workers/${encodeURIComponent(worker.name)}/${order}`);
    app.say(`${worker.name}: ${order}`);
  } catch (error) {
    notes.set(worker.name, error.message);
  }
  app.refresh();
}
