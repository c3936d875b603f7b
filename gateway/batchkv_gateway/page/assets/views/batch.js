// One batch: its progress, what failed and why, its charts, and its rows.

import { getJson, NATIVE, sendJson } from "../api.js";
import { app } from "../app.js";
import { histogram, timeChart } from "../charts.js";
import { confirmed } from "../dialog.js";
import { h } from "../dom.js";
import { count, duration, percent, plural, rate, short } from "../format.js";
import { alert, cached, code, command, HELD, left, nameOf, numEnded, progress, shareOf, state, tile, time } from "./parts.js";
import { RowList } from "./rows.js";

const POLL_MS = 5000; // of a batch that the events do not have, and of rows while a batch runs
const FACTS_MS = 30_000;
const MAX_ROWS_UNASKED = 20_000; // more rows take seconds to count
const SECONDS_A_ROW = 45e-6;
const SAY_STEP = 10; // per cent between two announcements

let view = null;

export const title = (id) => (view?.status ? nameOf(view.status) : `Batch ${id}`);

export function enter(id) {
  view = {
    id,
    status: app.batches.get(id) ?? null,
    detail: null,
    facts: null,
    factsAt: 0,
    isCounting: false,
    failures: [],
    unanswered: null, // counts of rows without an answer, and for how many failed rows they hold
    fault: "",
    note: "",
    link: false,
    again: null, // of the last retry: how many rows it queued, and how many failed ones it left
    isBusy: false,
    said: -1,
    rows: new RowList(id),
    timer: 0,
  };
  look(view);
  view.rows.load();
}

export function leave() {
  clearTimeout(view.timer);
  view = null;
}

// Read what the events do not have, now and then while the batch runs.
async function look(own) {
  clearTimeout(own.timer);
  const base = `${NATIVE}/batches/${own.id}`;
  const { again } = own;
  try {
    const found = await getJson(base);
    if (own !== view) return;
    if (again && again === own.again && found.is_done) endRetry(own, found);
    const before = own.detail;
    own.detail = found;
    own.fault = "";
    if (found.is_done) own.rows.loadEnds();
    else if (!own.rows.rows.length || (before && numEnded(before) !== numEnded(found))) own.rows.reload();
    if (before && !before.is_done && found.is_done) own.factsAt = 0;
    if (found.failed !== before?.failed && found.failed) {
      own.failures = (await getJson(`${base}/failures`)).data;
    }
    await countUnanswered(own, found);
    app.refresh();
    if (own === view && (found.total <= MAX_ROWS_UNASKED || found.in_queue === false)) await readFacts(own);
  } catch (error) {
    if (own !== view) return;
    own.fault = error.message;
    app.refresh();
    if (error.status === 404) return; // somebody has deleted it: it does not come back
  }
  const isOver = own.detail?.is_done && own.factsAt;
  if (own === view && !isOver) own.timer = setTimeout(() => look(own), POLL_MS);
}

// Which failed rows can be retried. The gateway reads all results for it, so it waits for the end.
async function countUnanswered(own, found) {
  const isKnown = own.unanswered?.of === found.failed;
  if (isKnown || !found.is_done || !found.failed || found.total > MAX_ROWS_UNASKED) return;
  own.unanswered = { ...(await getJson(`${NATIVE}/batches/${own.id}/unanswered`)), of: found.failed };
}

// The facts of charts, which the gateway makes of all results.
async function readFacts(own) {
  if (Date.now() - own.factsAt < FACTS_MS || own.isCounting || !numEnded(own.detail)) return;
  own.isCounting = true;
  app.refresh();
  try {
    const found = await getJson(`/page/facts/${own.id}`);
    if (own === view) own.facts = found;
    own.factsAt = Date.now();
  } catch (error) {
    if (own.detail.in_queue !== false || error.status !== 404) throw error;
    own.factsAt = Date.now(); // an older gateway kept none of them
  } finally {
    own.isCounting = false;
    app.refresh();
  }
}

export function render(id) {
  const status = { ...view.detail, ...app.batches.get(id) };
  if (!status.batch_id) {
    return [
      h("h1", { tabindex: -1 }, `Batch ${id}`),
      view.fault ? alert(view.fault) : h("p", { class: "empty" }, "Loading …"),
      h("p", {}, h("a", { href: "#/" }, "All batches")),
    ];
  }
  view.status = status;
  announce(status);
  return [
    h("p", { class: "crumbs" }, h("a", { href: "#/" }, "Batches"), " /"),
    h("h1", { tabindex: -1 }, h("bdi", {}, nameOf(status)), " ", state(status)),
    progress(status, "Progress"),
    h("p", { class: "sum", title: HELD }, sum(status)),
    tiles(status),
    alert(view.fault),
    view.note && h("p", { class: "note-box", role: "status" }, view.note, " ", view.link),
    wrongLines(status),
    waiting(status),
    actions(status),
    failures(status),
    charts(status),
    facts(status),
    !isUnqueued(status) && h("section", { key: "rows", "aria-labelledby": "rows-title" }, view.rows.render()),
  ];
}

function announce(status) {
  const step = Math.floor(status.percent_done / SAY_STEP);
  if (step !== view.said && view.said >= 0) {
    app.say(`${status.percent_done} % done, ${count(status.failed)} failed`);
  }
  view.said = step;
}

function sum(status) {
  const parts = [
    `${count(status.ok)} ok`,
    `${count(status.failed)} failed`,
    `${count(status.canceled)} canceled`,
    `${count(status.queued)} queued`,
    `${count(status.running)} held`,
  ];
  return `${plural(status.total, "row")} = ${parts.join(" + ")}`;
}

function tiles(status) {
  return h(
    "dl",
    { key: "tiles", class: "tiles" },
    tile("Done", isUnqueued(status) ? "–" : `${status.percent_done} %`),
    tile("Speed", rate(speed(status)), hasPauses(status) && "pauses included"),
    !status.is_done && tile("Time left", left(status)),
    tile("Prompt", short(status.prompt_tokens), "tokens"),
    tile("Cached", cached(status), "of the prompt"),
    tile("Generated", short(status.completion_tokens), "tokens"),
  );
}

// That of the last minute, else that of the time in which rows were under way, as the report has it.
const speed = (status) => status.tokens_per_second ?? view.facts?.tokens_per_second ?? view.detail?.tokens_per_second;

// The gateway knows the pauses of a batch with many rows once it has counted the results.
function hasPauses(status) {
  return status.is_done && !view.facts && status.total > MAX_ROWS_UNASKED && Boolean(speed(status));
}

function waiting(status) {
  const reason = view.detail?.waits_for;
  if (reason) return h("p", { class: "note-box" }, reason);
  if (status.is_done || !status.queued || status.num_workers) return false;
  return h(
    "section",
    { class: "note-box" },
    h("p", {}, "No worker serves this batch. This command starts one:"),
    command(`batchkv worker -m ${status.model}`),
  );
}

// Whether a batch of OpenAI's API failed before any of its rows was queued.
const isUnqueued = (status) => status.openai_status === "failed" && !status.total;

// Why it did.
function wrongLines(status) {
  const errors = status.openai_errors;
  if (!errors?.length) return false;
  return h(
    "div",
    { key: "wrong", class: "alert" },
    h("p", {}, "This batch failed before any row was queued:"),
    h("ul", {}, errors.slice(0, 20).map((one) => h("li", {}, one.line && `Line ${count(one.line)}: `, h("bdi", {}, one.message)))),
    errors.length > 20 && h("p", {}, `and ${count(errors.length - 20)} more`),
  );
}

// ---- changes ----

function actions(status) {
  const base = `${NATIVE}/batches/${view.id}`;
  const hasRows = status.in_queue !== false;
  const isOwn = !status.openai_id;
  const button = (name, isShown, act, kind) =>
    isShown &&
    h("button", { key: name, type: "button", class: kind, disabled: view.isBusy, onclick: act }, name);
  const download = (name, query, isShown) =>
    isShown &&
    h(
      "a",
      { key: name, class: "button", href: `${base}/results${query}`, download: `${view.id}${query ? ".errors" : ""}.jsonl` },
      name,
    );
  return h(
    "div",
    { key: "actions", class: "actions", role: "group", "aria-label": "What to do with this batch" },
    status.in_queue === false && files(status),
    download("Download results", "", hasRows && status.ok > 0),
    download("Download failures", "?outcome=failed", hasRows && status.failed > 0),
    (hasRows || view.facts) &&
      numEnded(status) > 0 &&
      h("a", { key: "report", class: "button", href: `/page/report/${view.id}`, download: `${view.id}.report.html` }, "Download a report"),
    retryButton(status, (name) => button(name, isOwn || isOver(status), () => retry(status))),
    button("Cancel", !status.is_done, () => cancel(status), "danger"),
    button("Forget", isOwn || isOver(status) || status.openai_status === "failed", () => forget(status), "danger"),
    beyondRetry(status),
  );
}

// A batch of OpenAI's API ends once: its failed rows can be retried as a new one.
const isOver = (status) => ["completed", "expired", "cancelled"].includes(status.openai_status);

// The counts of rows without an answer, if they are those of these failed rows.
function unanswered(status) {
  return status.is_done && view.unanswered?.of === status.failed ? view.unanswered : null;
}

// A button with the number of rows that a retry would queue, where it is known. There is none if no
// row can be queued, or each would fail again.
function retryButton(status, button) {
  const known = unanswered(status);
  if (!status.failed || known?.failed === (known?.refused ?? 0)) return false;
  return button(known ? `Retry ${plural(known.failed, "failed row")}` : "Retry failed rows");
}

function beyondRetry(status) {
  const words = [failAgain(unanswered(status), status), whyNot(unanswered(status), status)].filter(Boolean).join(" ");
  return words ? h("p", { key: "beyond", class: "beyond" }, words) : false;
}

// A sentence about the rows of which another try fails again: too long, or refused by the model.
function failAgain(counts, { batch_id: id, openai_id: openaiId }) {
  const { failed = 0, refused = 0 } = counts ?? {};
  if (!refused) return "";
  const which = refused < failed ? `${count(refused)} of them` : plural(refused, "failed row");
  const why = `${refused === 1 ? "its line is" : "their lines are"} too long, or refused by the model`;
  const edit = openaiId ? "Edit them" : `Edit them (“batchkv failed ${id}” prints them)`;
  const command = `batchkv retry ${openaiId ? `${openaiId} --url ${location.origin}` : id}`;
  return `${which} would fail again: ${why}. ${edit}, and queue them as a new batch. Once a worker has more memory, “${command}” queues the same lines.`;
}

// Sentences about the rows that no retry queues, each with what helps; "" without any.
function whyNot(counts, { batch_id: id, openai_id: isOpenai }) {
  const { wrong = 0, expired = 0 } = counts ?? {};
  const parts = [
    wrong && `${plural(wrong, "row")} cannot be retried: ${wrong === 1 ? "its line is" : "their lines are"} wrong in the input. Correct the file and queue it as a new batch.`,
    expired && `${plural(expired, "row")} ${expired === 1 ? "has" : "have"} no ${isOpenai ? "input file" : "job in Redis"} any more: ${isOpenai ? "queue the file as a new batch." : `“batchkv retry ${id} --from FILE” queues ${expired === 1 ? "it" : "them"}.`}`,
  ];
  return parts.filter(Boolean).join(" ");
}

// The files of a batch of OpenAI's API, which has ended.
function files(status) {
  const pairs = [
    [status.output_file_id, "Download answers"],
    [status.error_file_id, "Download errors"],
  ];
  return pairs.map(
    ([id, name]) =>
      id && h("a", { key: name, class: "button", href: `/v1/files/${id}/content`, download: `${id}.jsonl` }, name),
  );
}

async function change(method, path, then) {
  view.isBusy = true;
  app.refresh();
  const own = view;
  try {
    const answer = await sendJson(method, path);
    if (own === view) view.note = then(answer);
    if (own === view) view.link = answer.openai_id && h("a", { href: `#/batches/${answer.openai_id}` }, "The new batch");
    app.say(own.note);
  } catch (error) {
    if (own === view) view.fault = error.message;
  } finally {
    own.isBusy = false;
    own.factsAt = 0;
    own.unanswered = null; // as many rows may fail again, for other reasons
    clearTimeout(own.timer);
    if (own === view) {
      look(own);
      own.rows.load();
    }
    app.refresh();
  }
}

// The rows of a retry have ended: the notice that they were queued makes way for what became of them.
function endRetry(own, found) {
  const { queued, others } = own.again;
  const num = Math.min(queued, found.failed - others);
  own.again = null;
  own.note = num > 0 ? failedAgain(num, queued) : "";
  app.say(own.note);
}

function failedAgain(num, queued) {
  if (queued === 1) return "The row that was queued again has failed again.";
  return `${count(num)} of the rows that were queued again ${num === 1 ? "has" : "have"} failed again.`;
}

async function retry(status) {
  const counts = unanswered(status);
  const own = view;
  await change("POST", `${NATIVE}/batches/${view.id}/retry`, ({ queued }) => {
    if (queued && !status.openai_id) own.again = { queued, others: status.failed - queued };
    const place = status.openai_id ? " as a new batch" : "";
    const again = queued ? `${plural(queued, "row")} ${queued === 1 ? "was" : "were"} queued again${place}.` : "No row was queued again.";
    const others = status.failed - queued;
    const why = whyNot(counts, status) || `${plural(others, "failed row")} cannot be retried: wrong in the input, or without a job in Redis.`;
    return others > 0 ? `${again} ${why}` : again;
  });
}

async function cancel(status) {
  const isSure = await confirmed({
    title: "Cancel this batch?",
    text: `${plural(status.queued + status.running, "row")} will not be computed. Answers that are there stay.`,
    action: "Cancel the batch",
  });
  if (isSure) await change("POST", `${NATIVE}/batches/${view.id}/cancel`, () => "The batch is canceled.");
}

async function forget(status) {
  const isSure = await confirmed({
    title: "Forget this batch?",
    text: `All ${plural(numEnded(status), "answer")} of ${nameOf(status)} will be deleted${status.openai_id ? ", with the files of them" : ""}. Nothing brings them back.`,
    action: "Delete everything",
  });
  if (!isSure) return;
  view.isBusy = true;
  try {
    await sendJson("DELETE", `${NATIVE}/batches/${view.id}`);
    location.hash = "#/";
  } catch (error) {
    view.fault = error.message;
    view.isBusy = false;
    app.refresh();
  }
}

// ---- failures ----

function failures(status) {
  const groups = newestFailures(status.failed);
  if (!status.failed) return false;
  return h(
    "section",
    { key: "failures", class: "card", "aria-labelledby": "failures-title" },
    h("h2", { id: "failures-title" }, `${plural(status.failed, "failed row")}`),
    groups.length
      ? h(
          "table",
          { class: "cards" },
          h("thead", {}, h("tr", {}, ["Code", "Rows", "Why", "Lines"].map((head) => h("th", { scope: "col" }, head)))),
          h("tbody", {}, groups.map(failure)),
        )
      : h("p", {}, "The rows below say why."),
  );
}

// The facts of charts have more examples, but may be half a minute older than the list of failures.
function newestFailures(failed) {
  const counted = view.facts?.failures ?? [];
  const isCurrent = counted.reduce((sum, one) => sum + one.count, 0) === failed;
  return counted.length && (isCurrent || !view.failures.length) ? counted : view.failures;
}

function failure(group) {
  return h(
    "tr",
    { key: group.code },
    h("th", { scope: "row" }, h("code", {}, code(group.code))),
    h("td", { "data-label": "Rows", class: "num" }, count(group.count)),
    h("td", { "data-label": "Why" }, h("div", {}, messagesOf(group).map((text) => h("bdi", { class: "text block" }, text)))),
    h(
      "td",
      { "data-label": "Lines" },
      h(
        "span",
        {},
        (group.lines ?? []).slice(0, 10).map((line) => [
          h(
            "button",
            { type: "button", class: "link", "aria-label": `Show line ${line}`, onclick: () => showLine(line) },
            count(line),
          ),
          " ",
        ]),
      ),
    ),
  );
}

async function showLine(line) {
  await view.rows.show(line);
  document.getElementById(`row-${line}`)?.scrollIntoView({ block: "center" });
  document.querySelector(`#row-${line} button`)?.focus();
}

function messagesOf(group) {
  if (group.examples) return group.examples.map((one) => `Line ${count(one.line)}: ${one.message}`);
  return [group.differ ? `Line ${count(group.lines[0])}: ${group.message}` : group.message];
}

// ---- charts ----

function charts(status) {
  const found = view.facts;
  if (view.isCounting && !found) return h("p", { key: "charts", class: "empty", role: "status" }, "Counting the results …");
  if (!found) return status.total > MAX_ROWS_UNASKED && numEnded(status) > 0 && countButton(status);
  const bins = found.throughput.bins;
  const points = (field) => bins.map((bin) => [bin.at, bin.seconds ? bin[field] / bin.seconds : 0]);
  return h(
    "section",
    { key: "charts", class: "charts", "aria-label": "Charts" },
    bins.length > 0 &&
      timeChart({
        id: "speed",
        title: "Tokens",
        note: "a second",
        series: [
          { name: "Generated", points: points("completion_tokens") },
          { name: "Prompt", points: points("prompt_tokens") },
          { name: "Cached", points: points("cached_tokens") },
        ],
        format: short,
      }),
    distribution("latency", "Time of a row", found.latency_ms, (ms) => duration(ms / 1000)),
    distribution("answers", "Length of an answer", found.answer_length, (tokens) => short(tokens), "tokens"),
    sources(found.sources),
    workers(found.workers),
  );
}

function countButton(status) {
  return h(
    "p",
    { key: "charts" },
    h("button", { type: "button", onclick: () => readFacts(view).catch(explain) }, "Draw the charts"),
    h("span", { class: "note" }, ` This reads all ${plural(numEnded(status), "result")}, about ${duration(numEnded(status) * SECONDS_A_ROW)}.`),
  );
}

function explain(error) {
  if (view) view.fault = error.message;
  app.refresh();
}

function distribution(id, title, found, format, unit) {
  if (!found) return false;
  const bins = found.bars.map((bar) => ({ from: bar.low, to: bar.high, value: bar.count }));
  const note = `half within ${format(found.p50)}, 99 % within ${format(found.p99)}${unit ? ` ${unit}` : ""}`;
  return histogram({ id, title, note, bins, format, what: "rows" });
}

function sources(found) {
  const all = found.reduce((sum, one) => sum + one.tokens, 0);
  if (!all) return false;
  return shares("sources", "Prompt tokens by source", ["Source", "Tokens", "Share"], found.map((one) => ({
    name: one.name,
    cells: [count(one.tokens), percent(shareOf(one.tokens, all))],
    share: shareOf(one.tokens, all),
  })));
}

function workers(found) {
  if (!found.length) return false;
  const rows = (one) => one.ok + one.failed + one.canceled;
  const all = found.reduce((sum, one) => sum + rows(one), 0);
  const short = found.filter((one) => one.tokens_per_second && !one.relative_speed).map((one) => one.name);
  const note = found.length > 1 && short.length > 0 && `Too short to compare: the work of ${short.join(", ")}.`;
  return shares("workers", "Workers of this batch", ["Worker", "Rows", "Share", "Median row", "Speed"], found.map((one) => ({
    name: one.name,
    cells: [
      count(rows(one)),
      percent(shareOf(rows(one), all)),
      one.p50_ms ? duration(one.p50_ms / 1000) : "–",
      one.tokens_per_second ? rate(one.tokens_per_second) : "–",
    ],
    share: one.relative_speed,
  })), note);
}

// A table whose last cells have a bar.
function shares(id, title, heads, rows, note) {
  return h(
    "figure",
    { key: id, class: "chart" },
    h("figcaption", {}, title),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": title },
      h(
        "table",
        { class: "shares", "--cells": heads.length - 1 },
        h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
        h("tbody", {}, rows.map((row) => h(
          "tr",
          { key: row.name },
          h("th", { scope: "row" }, h("bdi", {}, row.name)),
          row.cells.map((cell, index) =>
            h("td", { class: "num" }, cell, index === row.cells.length - 1 && row.share > 0 && h("span", { class: "meter", "--share": row.share })),
          ),
        ))),
      ),
    ),
    note && h("p", { class: "note" }, h("bdi", {}, note)),
  );
}

function facts(status) {
  const pairs = [
    status.batch_id !== status.openai_id && ["Id", h("code", {}, status.batch_id)],
    status.openai_id && ["Id of OpenAI's API", h("code", {}, status.openai_id)],
    status.model && ["Model", h("bdi", {}, status.model)],
    status.scheme && ["KV scheme", status.scheme],
    status.dtype && ["dtype", status.dtype],
    status.fingerprint && ["Weights", h("code", {}, status.fingerprint.slice(0, 12))],
    ["Priority", status.priority],
    ["Created", time(status.created)],
    ...(view.facts?.settings ?? [])
      .filter((one) => /^(default |plain|thinking|time limit)/.test(one.name))
      .map((one) => [one.name, h("bdi", {}, one.value)]),
    status.expires > 0 && ["Deadline", time(status.expires)],
    status.kept_until > 0 && ["Kept until", time(status.kept_until)],
    status.saved_ms > 0 && ["Saved by the cache", duration(status.saved_ms / 1000)],
    status.copied > 0 && ["Duplicates", plural(status.copied, "row")],
    status.kept > 0 && ["Kept of an earlier batch", plural(status.kept, "row")],
    status.reused > 0 && ["Reused answers", plural(status.reused, "row")],
    status.cut > 0 && ["Cut at max_tokens", plural(status.cut, "row")],
    view.detail?.workers?.length > 0 && ["Workers", view.detail.workers.join(", ")],
  ];
  return h(
    "section",
    { key: "facts", class: "card" },
    h("h2", {}, "Facts"),
    h(
      "dl",
      { class: "facts" },
      pairs.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
    ),
  );
}
