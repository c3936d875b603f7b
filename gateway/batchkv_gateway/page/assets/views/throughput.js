// A queue over the last day: what waited, and what was done each minute.

import { getJson, NATIVE } from "../api.js";
import { app } from "../app.js";
import { timeChart } from "../charts.js";
import { h } from "../dom.js";
import { count, plural, short } from "../format.js";
import { alert, command, NO_WORKER } from "./parts.js";

const RELOAD_MS = 30_000;
const DAY = 86_400;
const SPANS = [
  [3600, "1 hour"],
  [6 * 3600, "6 hours"],
  [DAY, "24 hours"],
];

let queue = "";
let span = 0; // chosen by the samples until the viewer chooses
let samples = [];
let fault = "";
let hasLoaded = false;
let timer = 0;

export const title = () => "Throughput";

export function enter() {
  hasLoaded = false;
  load();
}

export function leave() {
  clearTimeout(timer);
}

function queues() {
  const names = [...app.workers.flatMap((one) => one.queues), ...[...app.batches.values()].map((one) => one.queue)];
  return [...new Set(names)].filter(Boolean).sort();
}

async function load() {
  clearTimeout(timer);
  const known = queues();
  if (!known.includes(queue)) queue = known[0] ?? "";
  const asked = queue;
  if (asked) {
    try {
      const found = await getJson(`${NATIVE}/samples?queue=${encodeURIComponent(asked)}`);
      if (asked !== queue) return;
      samples = found.data;
      span ||= spanOf(samples);
      fault = "";
    } catch (error) {
      fault = error.message;
    }
    hasLoaded = true;
  }
  app.refresh();
  timer = setTimeout(load, asked ? RELOAD_MS : 1000);
}

export function render() {
  const known = queues();
  return [
    h("h1", { tabindex: -1 }, "Throughput"),
    known.length > 0 && controls(known),
    alert(fault),
    body(known),
  ];
}

function controls(known) {
  return h(
    "div",
    { key: "filters", class: "filters" },
    h(
      "label",
      {},
      "Queue ",
      h(
        "select",
        { onchange: (event) => choose(event.target.value) },
        known.map((name) => h("option", { key: name, value: name, selected: name === queue }, name)),
      ),
    ),
    h(
      "div",
      { role: "group", "aria-label": "Time to show", class: "choices" },
      SPANS.map(([seconds, name]) =>
        h(
          "button",
          {
            key: name,
            type: "button",
            class: "choice",
            "aria-pressed": span === seconds ? "true" : "false",
            onclick: () => {
              span = seconds;
              app.refresh();
            },
          },
          name,
        ),
      ),
    ),
  );
}

// The shortest time that has all samples.
function spanOf(found) {
  const age = Date.now() / 1000 - (found[0]?.at ?? 0);
  return SPANS.map(([seconds]) => seconds).find((seconds) => seconds >= age) ?? DAY;
}

function choose(name) {
  queue = name;
  samples = [];
  hasLoaded = false;
  load();
}

function body(known) {
  if (app.hasState && !known.length) {
    return h("section", { class: "card" }, h("p", {}, "No queue yet. A worker makes one:"), command(NO_WORKER));
  }
  if (!hasLoaded) return h("p", { class: "empty" }, "Loading …");
  const end = Math.max(Math.floor(Date.now() / 1000), samples.at(-1)?.at ?? 0);
  const begin = end - (span || DAY);
  const found = samples.filter((one) => one.at >= begin);
  if (!found.length) {
    return h("p", { class: "empty" }, "No figures in this time. Workers write one sample a minute.");
  }
  return [totals(found), charts(withGaps(found), [begin, end])];
}

function totals(found) {
  const sum = (field) => found.reduce((all, one) => all + one[field], 0);
  const text = [
    plural(sum("rows_done"), "row") + " done",
    `${count(sum("rows_failed"))} failed`,
    `${short(sum("completion_tokens"))} tokens generated`,
    `${short(sum("prompt_tokens"))} prompt tokens, ${short(sum("cached_tokens"))} of them cached`,
  ];
  return h("p", {}, text.join(" · "));
}

// Minutes without a worker have no sample. There the lines are interrupted.
function withGaps(found) {
  return found.flatMap((one, index) => {
    const before = found[index - 1];
    return before && one.at - before.at > 180 ? [{ at: before.at + 60 }, one] : [one];
  });
}

function charts(found, shown) {
  const points = (value) => found.map((one) => [one.at, one.rows_done === undefined ? null : value(one)]);
  const chart = (id, title, note, format, lines) =>
    timeChart({ id, title, note, format, span: shown, series: lines.map(([name, value]) => ({ name, points: points(value) })) });
  return h(
    "section",
    { class: "charts", "aria-label": "Charts" },
    chart("generated", "Generated tokens", "a second", short, [["Generated", (one) => one.completion_tokens / 60]]),
    chart("prompt", "Prompt tokens", "a second", short, [
      ["Computed", (one) => (one.prompt_tokens - one.cached_tokens) / 60],
      ["Cached", (one) => one.cached_tokens / 60],
    ]),
    chart("rows", "Rows", "a minute", short, [
      ["Done", (one) => one.rows_done],
      ["Failed", (one) => one.rows_failed],
    ]),
    chart("queue", "Queue", "rows", short, [
      ["Waiting", (one) => one.waiting],
      ["Held", (one) => one.running],
    ]),
    chart("workers", "Workers", "", count, [["Workers", (one) => one.workers]]),
  );
}
