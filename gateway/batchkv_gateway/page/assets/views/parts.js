// Parts that several views have.

import { idOf } from "../app.js";
import { h } from "../dom.js";
import { count, duration, iso, moment, percent, plural, wholeMoment } from "../format.js";

export const shareOf = (part, all) => (all ? part / all : 0);
export const numEnded = (batch) => batch.ok + batch.failed + batch.canceled;
export const doneShare = (batch) => shareOf(numEnded(batch), batch.total);

export const HELD = "A worker has taken a held row: it computes it now or next.";

// The bar of a batch: its rows by outcome.
export function progress(batch, label) {
  const value = batch.percent_done;
  const words = [
    `${value} % done`,
    `${plural(batch.ok, "row")} ok`,
    batch.failed && `${count(batch.failed)} failed`,
    batch.canceled && `${count(batch.canceled)} canceled`,
    batch.running && `${count(batch.running)} held`,
    batch.queued && `${count(batch.queued)} queued`,
  ];
  const part = (name) => {
    const share = shareOf(batch[name], batch.total);
    return share > 0 && h("span", { key: name, class: `part ${name}`, "--share": share });
  };
  return h(
    "div",
    {
      class: "progress",
      role: "progressbar",
      "aria-label": label,
      "aria-valuemin": 0,
      "aria-valuemax": 100,
      "aria-valuenow": value,
      "aria-valuetext": words.filter(Boolean).join(", "),
    },
    ["ok", "failed", "canceled", "running"].map(part),
  );
}

const STATE_CLASSES = {
  done: "good",
  running: "busy",
  waiting: "idle",
  "being submitted": "idle",
  "being forgotten": "idle",
};

// States of OpenAI's API that the rows alone do not show.
const OPENAI_CLASSES = { failed: "bad", expired: "bad", cancelled: "idle", cancelling: "idle", validating: "idle" };

export function state(batch) {
  const own = OPENAI_CLASSES[batch.openai_status];
  if (own) return h("span", { class: `badge ${own}` }, batch.openai_status);
  const name = batch.state ?? (batch.is_done ? "done" : batch.running ? "running" : "waiting");
  const kind = name === "done" && batch.failed ? "bad" : (STATE_CLASSES[name] ?? "idle");
  return h("span", { class: `badge ${kind}` }, name);
}

export function time(seconds) {
  if (!seconds) return "–";
  return h("time", { datetime: iso(seconds), title: wholeMoment(seconds) }, moment(seconds));
}

export function left(batch) {
  if (batch.is_done) return "–";
  if (batch.seconds_left === null || batch.seconds_left === undefined) return "not known yet";
  const left = batch.seconds_left;
  return `about ${duration(left < 600 ? left : 60 * Math.round(left / 60))}`; // no seconds beside many minutes
}

export function cached(batch) {
  if (!batch.prompt_tokens) return "–";
  return percent(shareOf(batch.cached_tokens, batch.prompt_tokens));
}

// A code, which may be broken behind its underscores alone.
export function code(text) {
  return String(text ?? "").split(/(?<=_)/).flatMap((part, index) => (index ? [h("wbr", {}), part] : [part]));
}

export function command(text) {
  return h("pre", { class: "command" }, h("code", {}, text));
}

// A tile of a name and a large number.
export function tile(name, value, note, title) {
  return h(
    "div",
    { class: "tile", key: name },
    h("dt", { title }, name),
    h("dd", {}, value, note && h("span", { class: "note" }, ` ${note}`)),
  );
}

export function alert(text) {
  return text && h("p", { class: "alert", role: "alert" }, text);
}

export { idOf };
export const nameOf = (batch) => batch.name || idOf(batch);

// The commands that start what is missing.
export const NO_WORKER = "batchkv worker -m MODEL";
export const NO_BATCH = "batchkv submit prompts.jsonl -m MODEL";
