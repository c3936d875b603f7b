// A new batch: choose a file, see what it would do, set its terms, and queue it.

import { NATIVE, upload } from "../api.js";
import { app, servedModels } from "../app.js";
import { h } from "../dom.js";
import { count, percent, plural, short, size } from "../format.js";
import { choose } from "../prompts.js";
import { alert } from "./parts.js";

const NO_GROUP = "none of 256 tokens or more"; // a block of the cache: shorter ones are no hits
const PRIORITIES = ["normal", "high", "low"];
const DEADLINES = [
  ["", "none"],
  ["1h", "1 hour"],
  ["8h", "8 hours"],
  ["1d", "1 day"],
  ["7d", "7 days"],
];

let file = null;
let plan = null;
let fault = "";
let isModelMissing = false;
let busy = ""; // what is being done
let share = 0;
let isOver = false;
let terms = {};

export const title = () => "New batch";

export function enter() {
  file = plan = null;
  fault = busy = "";
  isOver = isModelMissing = false;
  terms = {};
}

export function render() {
  return [h("h1", { tabindex: -1 }, "New batch"), drop(), alert(fault), busy && progressOf(), file && plan && review()];
}

function drop() {
  return h(
    "div",
    { key: "drop", class: `drop${isOver ? " over" : ""}`, ondragover: onOver, ondragleave: onOut, ondrop: onDrop },
    h("label", { for: "file" }, file ? "Another file: drop it here, or choose it" : "Drop a file here, or choose it"),
    h("input", { id: "file", type: "file", accept: ".jsonl,.ndjson,.json,.txt,.csv,.parquet,.gz,.zst", onchange: (event) => take(event.target.files[0]) }),
    h("p", { class: "note" }, "One prompt a line: JSONL with OpenAI's requests or with prompts, or plain text. Nothing is queued yet."),
  );
}

function onOver(event) {
  event.preventDefault();
  if (!isOver) {
    isOver = true;
    app.refresh();
  }
}

function onOut() {
  isOver = false;
  app.refresh();
}

function onDrop(event) {
  event.preventDefault();
  isOver = false;
  take(event.dataTransfer.files[0]);
}

async function take(chosen) {
  if (!chosen || busy) return;
  file = chosen;
  terms = {};
  isModelMissing = false;
  await tryOut();
}

function headers() {
  const suffix = /\.[A-Za-z0-9]+$/.exec(file.name)?.[0] ?? "";
  const files = [{ name: file.name, bytes: file.size, suffix }];
  const found = { "x-batchkv-files": encodeURIComponent(JSON.stringify(files)) };
  const given = { name: file.name, ...terms, model: terms.model ?? (plan && !plan.checked.model ? preset() : "") };
  for (const name of ["model", "priority", "expires", "name"]) {
    if (given[name]) found[`x-batchkv-${name}`] = encodeURIComponent(given[name]);
  }
  return found;
}

async function send(what, path) {
  busy = what;
  share = 0;
  fault = "";
  app.refresh();
  try {
    return await upload(path, file, headers(), (now) => {
      share = now;
      app.refresh();
    });
  } catch (error) {
    fault = error.message;
    return null;
  } finally {
    busy = "";
    app.refresh();
  }
}

async function tryOut() {
  plan = null; // without it no model is sent: the lines may name theirs
  plan = await send("Reading the file", `${NATIVE}/batches?dry_run=1`);
  app.refresh();
  if (plan) app.say(`${plural(plan.checked.total, "row")}, ${plural(plan.checked.num_bad, "wrong line")}`);
}

async function queue(event) {
  event.preventDefault();
  isModelMissing = !plan.checked.model && !(terms.model ?? preset()).trim();
  if (isModelMissing) {
    document.getElementById("model").focus();
    app.refresh();
    return;
  }
  const made = await send("Queueing", `${NATIVE}/batches`);
  if (!made) return;
  const id = made.submitted.batch_id;
  choose(id, file);
  location.hash = `#/batches/${id}`;
}

function progressOf() {
  return h(
    "p",
    { class: "note-box", role: "status" },
    `${busy} … ${share < 1 ? percent(share) : "the gateway checks it"}`,
  );
}

function review() {
  return h(
    "section",
    { key: "plan", class: "card", "aria-labelledby": "plan-title" },
    h("h2", { id: "plan-title" }, "Before it is queued"),
    h("dl", { class: "facts" }, pairs().flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
    plan.checked.num_bad > 0 && wrongLines(),
    form(),
  );
}

function pairs() {
  const { checked, estimate } = plan;
  const found = [
    ["File", [h("bdi", {}, file.name), `, ${size(file.size)}`]],
    ["Rows", count(checked.total)],
    ["Wrong lines", count(checked.num_bad)],
    checked.num_duplicates > 0 && ["Duplicates", count(checked.num_duplicates)],
    ["Prompt tokens", `about ${short(estimate.num_tokens)}`],
    ["Groups with a common prefix", estimate.num_groups ? `${count(estimate.num_groups)}, with ${plural(estimate.num_grouped, "row")}` : NO_GROUP],
    ["Expected cache hits", `${percent(estimate.hit_rate_one)} of the prompt tokens`],
    checked.model && ["Model of the lines", h("bdi", {}, checked.model)],
    checked.model_note && ["Note", h("bdi", {}, checked.model_note)],
  ];
  return found.filter(Boolean);
}

function wrongLines() {
  const { errors, num_bad: all } = plan.checked;
  return h(
    "section",
    { class: "alert", "aria-label": "Wrong lines" },
    h("p", {}, `${plural(all, "line")} would fail, and no other row would stop for it:`),
    h(
      "ul",
      {},
      errors.map((one) => h("li", { key: one.line }, `Line ${count(one.line)}: `, h("bdi", { class: "text" }, one.message))),
    ),
    all > errors.length && h("p", {}, `and ${count(all - errors.length)} more`),
  );
}

// The model in the field before anybody types: the one of the lines, else the only one that workers serve.
function preset() {
  const models = servedModels();
  return plan?.checked.model || (models.length === 1 ? models[0] : "");
}

function onModel(event) {
  terms.model = event.target.value;
  if (!isModelMissing) return;
  isModelMissing = false;
  app.refresh();
}

function form() {
  const models = servedModels();
  const notes = isModelMissing ? "model-fault model-note" : "model-note";
  return h(
    "form",
    { key: "terms", onsubmit: queue, class: "terms" },
    h("label", { for: "model" }, "Model"),
    h("input", { id: "model", list: "models", value: preset(), oninput: onModel, autocomplete: "off", spellcheck: "false", "aria-invalid": isModelMissing ? "true" : null, "aria-describedby": notes }),
    isModelMissing && h("p", { key: "model-fault", class: "alert", id: "model-fault", role: "alert" }, "Choose a model: the lines name none."),
    h("datalist", { id: "models" }, models.map((name) => h("option", { key: name, value: name }))),
    h("p", { class: "note", id: "model-note" }, models.length ? `Workers serve ${models.join(", ")}.` : "No worker runs now. The batch waits for one."),
    h("label", { for: "name" }, "Name"),
    h("input", { id: "name", start: file.name, oninput: keep("name"), maxlength: 200 }),
    h("label", { for: "priority" }, "Priority"),
    h("select", { id: "priority", onchange: keep("priority") }, PRIORITIES.map((name) => h("option", { key: name, value: name }, name))),
    h("label", { for: "expires" }, "Deadline"),
    h("select", { id: "expires", onchange: keep("expires") }, DEADLINES.map(([value, name]) => h("option", { key: name, value }, name))),
    h(
      "div",
      { class: "actions" },
      h("button", { class: "main", disabled: Boolean(busy) || !plan.checked.total }, `Queue ${plural(plan.checked.total, "row")}`),
      h("button", { type: "button", onclick: () => enter() || app.refresh() }, "Discard this file"),
    ),
  );
}

function keep(name) {
  return (event) => {
    terms[name] = event.target.value;
  };
}
