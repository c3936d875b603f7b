// All batches, the newest first.

import { getJson, NATIVE } from "../api.js";
import { app, speedNow } from "../app.js";
import { h } from "../dom.js";
import { count, rate } from "../format.js";
import { alert, cached, command, HELD, idOf, left, nameOf, NO_BATCH, NO_WORKER, progress, state, tile, time } from "./parts.js";

const PAGE = 50;
let older = [];
let hasMore = true;
let next = "";
let isLoading = false;
let fault = "";

export const title = () => "Batches";

export function enter() {
  older = [];
  hasMore = true;
  next = "";
  fault = "";
}

export function render() {
  const batches = shownBatches();
  return [
    h("h1", { tabindex: -1 }, "Batches"),
    totals(batches),
    app.hasState && !batches.length ? empty() : table(batches),
    !app.hasState && h("p", { class: "empty" }, "Loading …"),
    alert(fault),
    batches.length >= PAGE &&
      hasMore &&
      h(
        "button",
        { key: "older", type: "button", onclick: loadOlder, disabled: isLoading },
        isLoading ? "Loading …" : "Show older batches",
      ),
  ];
}

function shownBatches() {
  const now = app.order.map((id) => app.batches.get(id));
  const known = new Set(app.order);
  return [...now, ...older.filter((batch) => !known.has(idOf(batch)))];
}

function totals(batches) {
  const live = app.workers.filter((worker) => !worker.is_away);
  const speeds = live.map(speedNow);
  const known = speeds.reduce((all, one) => all + (one ?? 0), 0);
  const isUnknown = !known && speeds.includes(undefined); // its first rows are under way
  const open = batches.filter((batch) => !batch.is_done);
  const sum = (items, field) => items.reduce((all, item) => all + (item[field] ?? 0), 0);
  return h(
    "dl",
    { key: "tiles", class: "tiles" },
    tile("Speed", rate(isUnknown ? null : known)),
    tile("Rows held", count(sum(open, "running")), "", HELD),
    tile("Rows queued", count(sum(open, "queued"))),
    tile("Workers", count(live.length), workerNote(live)),
  );
}

function workerNote(live) {
  const away = app.workers.length - live.length;
  return away ? `and ${count(away)} away` : "";
}

function empty() {
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "No batches yet"),
    h("p", {}, h("a", { href: "#/new" }, "Choose a file"), ", or queue one in a terminal:"),
    command(NO_BATCH),
    !app.workers.length && [h("p", {}, "A worker computes it:"), command(NO_WORKER)],
  );
}

function table(batches) {
  if (!batches.length) return false;
  const heads = ["Batch", "State", "Progress", "Rows", "Failed", "Speed", "Time left", "Cached", "Created"];
  return h(
    "table",
    { key: "table", class: "cards" },
    h("caption", { class: "hidden" }, "Batches, the newest first"),
    h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, batches.map(row)),
  );
}

function row(batch) {
  return h(
    "tr",
    { key: idOf(batch) },
    h(
      "th",
      { scope: "row" },
      h("a", { href: `#/batches/${idOf(batch)}` }, h("bdi", {}, nameOf(batch))),
      h("span", { class: "note block" }, h("bdi", {}, batch.model)),
    ),
    h("td", { "data-label": "State" }, state(batch)),
    h(
      "td",
      { "data-label": "Progress" },
      progress(batch, `Progress of ${nameOf(batch)}`),
      h("span", { class: "note" }, `${batch.percent_done} %`),
    ),
    h("td", { "data-label": "Rows", class: "num" }, count(batch.total)),
    h(
      "td",
      { "data-label": "Failed", class: "num" },
      batch.failed
        ? h("a", { class: "failed-count", href: `#/batches/${idOf(batch)}` }, count(batch.failed))
        : "0",
    ),
    h("td", { "data-label": "Speed", class: "num" }, rate(batch.tokens_per_second)),
    h("td", { "data-label": "Time left", class: "num" }, left(batch)),
    h("td", { "data-label": "Cached", class: "num" }, cached(batch)),
    h("td", { "data-label": "Created", class: "num" }, time(batch.created)),
  );
}

async function loadOlder() {
  const after = next || idOf(shownBatches().at(-1));
  isLoading = true;
  app.refresh();
  try {
    const found = await getJson(`${NATIVE}/batches?limit=${PAGE}&after=${after}`);
    older = [...older, ...found.data];
    hasMore = found.has_more;
    next = found.next;
    fault = "";
  } catch (error) {
    fault = error.message;
  } finally {
    isLoading = false;
    app.refresh();
  }
}
