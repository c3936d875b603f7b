// The rows of a batch by line number: filtered, a page at a time, each to be opened.

import { getJson, NATIVE } from "../api.js";
import { app } from "../app.js";
import { h } from "../dom.js";
import { count, duration, size } from "../format.js";
import { choose, fileOf } from "../prompts.js";
import { alert, code as breakable } from "./parts.js";

const PAGE = matchMedia("(max-width: 720px)").matches ? 20 : 50; // a phone shows one row below the other
const RELOAD_MS = 5000; // at the soonest
const OUTCOMES = [
  ["", "All rows"],
  ["ok", "ok"],
  ["failed", "failed"],
  ["canceled", "canceled"],
];
const PIECE_CHARS = 5000;
const SHOWN_CHARS = 20_000; // of one text, until somebody asks for all of it

export class RowList {
  constructor(id) {
    Object.assign(this, { id, rows: [], outcome: "", after: 0, next: null, open: new Map() });
    Object.assign(this, { fault: "", isLoading: false, hasLoaded: false, loadedAt: 0, whole: new Set() });
  }

  async load() {
    const asked = `${this.after} ${this.outcome}`;
    this.isLoading = true;
    this.asked = asked;
    app.refresh();
    const query = new URLSearchParams({ after: this.after, limit: PAGE });
    if (this.outcome) query.set("outcome", this.outcome);
    try {
      const found = await getJson(`${NATIVE}/batches/${this.id}/rows?${query}`);
      if (this.asked !== asked) return;
      this.rows = found.data;
      await this.addPrompts(this.rows);
      this.next = found.next;
      this.fault = "";
    } catch (error) {
      this.fault = error.message;
    }
    this.isLoading = false;
    this.hasLoaded = true;
    this.loadedAt = Date.now();
    app.refresh();
  }

  // Prompts of ended rows are in the viewer's file alone.
  async addPrompts(rows) {
    const lines = rows.filter((row) => row.prompt === null).map((row) => row.line);
    const file = fileOf(this.id);
    if (!file || !lines.length) return;
    try {
      const found = await file.read(lines);
      for (const row of rows) Object.assign(row, found.get(row.line));
    } catch {
      this.fault = `${file.name} cannot be read any more. Choose it again.`;
    }
  }

  async takeFile(file) {
    if (!file) return;
    choose(this.id, file);
    this.open.clear();
    await this.load();
  }

  chooser() {
    const file = fileOf(this.id);
    if (!file && !this.rows.some((row) => row.prompt === null)) return false;
    const name = app.batches.get(this.id)?.name ?? "";
    const known = /\.[a-z]+$/i.test(name) ? h("bdi", {}, name) : "your file";
    const choice = file
      ? ["They are read here from ", h("bdi", {}, file.name), ", and nothing is uploaded. Another file: "]
      : ["Choose ", known, " again to see them; it is not uploaded. "];
    return h(
      "p",
      { key: "chooser", class: "chooser note" },
      "The server no longer has the prompts of ended rows. ",
      h("label", { for: "prompts" }, choice),
      h("input", { id: "prompts", type: "file", onchange: (event) => this.takeFile(event.target.files[0]) }),
    );
  }

  // The same page again, while the batch runs. Rows that are open for reading stay open.
  reload() {
    if (!this.isLoading && Date.now() - this.loadedAt > RELOAD_MS) this.load();
  }

  // The batch has ended: rows that were read before are read once more.
  loadEnds() {
    const hasOpen = this.rows.some((row) => row.outcome === "queued" || row.outcome === "running");
    if (this.isLoading || hasOpen || !this.rows.length) this.load();
  }

  async go(after, outcome = this.outcome) {
    Object.assign(this, { after, outcome, rows: [], hasLoaded: false });
    this.open.clear();
    await this.load();
  }

  async show(line) {
    await this.go(line - 1, "");
    if (this.rows.some((row) => row.line === line)) await this.toggle(line, true);
  }

  async toggle(line, isOpen = !this.open.has(line)) {
    if (!isOpen) {
      this.open.delete(line);
      app.refresh();
      return;
    }
    this.open.set(line, null);
    app.refresh();
    try {
      const found = await getJson(`${NATIVE}/batches/${this.id}/rows?after=${line - 1}&limit=1&full=1`);
      const row = found.data[0];
      if (row) await this.addPrompts([row]);
      if (this.open.has(line)) this.open.set(line, row ?? { fault: "This row is gone." });
    } catch (error) {
      this.open.set(line, { fault: error.message });
    }
    app.refresh();
  }

  render() {
    return [
      h("h2", { id: "rows-title" }, "Rows"),
      this.filters(),
      this.chooser(),
      alert(this.fault),
      this.rows.length > 0 && this.table(),
      !this.rows.length && h("p", { class: "empty" }, this.hasLoaded ? this.none() : "Loading …"),
      this.pages(),
    ];
  }

  none() {
    return this.outcome || this.after ? "No such rows from here on." : "No rows yet.";
  }

  filters() {
    return h(
      "div",
      { key: "filters", class: "filters" },
      h(
        "div",
        { role: "group", "aria-label": "Rows to show", class: "choices" },
        OUTCOMES.map(([value, name]) =>
          h(
            "button",
            {
              key: value,
              type: "button",
              class: "choice",
              "aria-pressed": this.outcome === value ? "true" : "false",
              onclick: () => this.go(0, value),
            },
            name,
          ),
        ),
      ),
      h(
        "form",
        { class: "goto", onsubmit: (event) => this.jump(event) },
        h("label", { for: "line" }, "Line"),
        h("input", { id: "line", name: "line", type: "number", min: 1, inputmode: "numeric", required: true }),
        h("button", {}, "Go"),
      ),
    );
  }

  jump(event) {
    event.preventDefault();
    const line = Number(event.target.elements.line.value);
    if (line >= 1) this.go(line - 1);
  }

  table() {
    const heads = ["Line", "Outcome", "Prompt", "Answer", "Tokens", "Time", "Worker"];
    return h(
      "table",
      { key: "table", class: "cards rows", "aria-busy": this.isLoading ? "true" : "false" },
      h("caption", { class: "hidden" }, "Rows by line number"),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, this.rows.flatMap((row) => [this.line(row), this.detail(row)])),
    );
  }

  line(row) {
    const isOpen = this.open.has(row.line);
    const tokens = row.completion_tokens ? count(row.completion_tokens) : "–";
    const said = row.error?.message ?? row.answer;
    return h(
      "tr",
      { key: `r${row.line}`, id: `row-${row.line}` },
      h(
        "th",
        { scope: "row" },
        h(
          "button",
          {
            type: "button",
            class: "link",
            "aria-expanded": isOpen ? "true" : "false",
            "aria-controls": isOpen ? `detail-${row.line}` : null,
            "aria-label": `Line ${row.line}`,
            onclick: () => this.toggle(row.line),
          },
          h("span", { class: "caret", "aria-hidden": "true" }, isOpen ? "▾ " : "▸ "),
          count(row.line),
        ),
        row.custom_id && h("span", { class: "note block" }, h("bdi", {}, row.custom_id)),
      ),
      h("td", { "data-label": "Outcome" }, outcome(row)),
      h("td", { "data-label": "Prompt", class: "clip" }, text(row.prompt ?? contentOf(row.messages?.at(-1) ?? {}))),
      h("td", { "data-label": "Answer", class: said ? "clip" : "clip none" }, text(said)),
      h("td", { "data-label": "Tokens", class: "num" }, tokens),
      h("td", { "data-label": "Time", class: "num" }, row.busy_ms ? duration(row.busy_ms / 1000) : "–"),
      h("td", { "data-label": "Worker", class: "clip narrow" }, h("bdi", {}, row.worker || "–")),
    );
  }

  detail(row) {
    if (!this.open.has(row.line)) return [];
    const full = this.open.get(row.line);
    return h(
      "tr",
      { key: `d${row.line}`, class: "detail", id: `detail-${row.line}` },
      h("td", { colspan: 7 }, full === null ? "Loading …" : full.fault ? alert(full.fault) : this.sides(full)),
    );
  }

  sides(row) {
    const { code, message } = row.error ?? {};
    return [
      row.error && h("p", { class: "alert" }, h("code", {}, code), ": ", h("bdi", { class: "text" }, message)),
      h(
        "div",
        { class: "sides" },
        h("section", {}, h("h3", {}, "Prompt"), this.messages(row)),
        h(
          "section",
          {},
          h("h3", {}, "Answer"),
          row.reasoning && folded("Reasoning", this.block(`reasoning ${row.line}`, row.reasoning)),
          row.answer ? this.block(`answer ${row.line}`, row.answer) : !row.tool_calls?.length && h("p", { class: "empty" }, noAnswer(row)),
          (row.tool_calls ?? []).map((call, index) => this.call(row, call, index)),
        ),
      ),
      h("p", { class: "note" }, details(row)),
    ];
  }

  // A prompt is text, or messages with roles.
  messages(row) {
    if (!row.messages?.length) {
      if (row.prompt !== null) return this.block(`prompt ${row.line}`, row.prompt);
      return h("p", { class: "empty" }, "The server no longer has this prompt. Choose your file above to see it.");
    }
    return row.messages.map((message, index) =>
      h(
        "div",
        { class: "message" },
        h("h4", {}, String(message.role ?? "message")),
        this.block(`prompt ${row.line} ${index}`, contentOf(message)),
      ),
    );
  }

  call(row, call, index) {
    return folded(["Call of ", h("code", {}, call.name)], this.block(`call ${row.line} ${index}`, call.arguments));
  }

  // Text in full up to a length, and the rest when somebody asks for it.
  block(id, value) {
    const whole = value ?? "";
    const isCut = whole.length > SHOWN_CHARS && !this.whole.has(id);
    const shown = isCut ? whole.slice(0, SHOWN_CHARS) : whole;
    return [
      h("pre", { key: id, class: "text", dir: "auto", tabindex: 0 }, shown.length > SHOWN_CHARS ? pieces(shown) : shown),
      isCut &&
        h(
          "button",
          {
            key: `${id} all`,
            type: "button",
            onclick: () => {
              this.whole.add(id);
              app.refresh();
            },
          },
          `Show all ${size(new Blob([whole]).size)}`,
        ),
    ];
  }

  pages() {
    const isFirst = this.after === 0;
    if (isFirst && !this.next) return false;
    return h(
      "nav",
      { key: "pages", class: "actions", "aria-label": "Pages of rows" },
      h("button", { type: "button", disabled: isFirst, onclick: () => this.go(0) }, "First rows"),
      h("button", { type: "button", disabled: !this.next, onclick: () => this.go(this.next) }, "Next rows"),
    );
  }
}

// A long text as blocks that end at a blank. The browser lays out those that are seen.
function pieces(text) {
  const found = [];
  for (let from = 0; from < text.length; ) {
    let to = Math.min(from + PIECE_CHARS, text.length);
    if (to < text.length) {
      const blank = Math.max(text.lastIndexOf("\n", to), text.lastIndexOf(" ", to));
      if (blank > from) to = blank + 1;
      else if (/[\uD800-\uDBFF]/.test(text[to - 1])) to -= 1;
    }
    found.push(h("span", { key: from, class: "piece", dir: "auto" }, text.slice(from, to)));
    from = to;
  }
  return found;
}

function outcome(row) {
  const kinds = { ok: "good", failed: "bad", running: "busy" };
  return [
    h("span", { class: `badge ${kinds[row.outcome] ?? "idle"}` }, row.outcome === "running" ? "held" : row.outcome),
    row.error && h("span", { class: "note block" }, breakable(row.error.code)),
  ];
}

function text(value) {
  return h("bdi", {}, value || "–");
}

function contentOf(message) {
  const content = message.content ?? "";
  return typeof content === "string" ? content : JSON.stringify(content, null, 2);
}

function noAnswer(row) {
  const words = { queued: "This row waits.", running: "A worker holds this row: it computes it now or next." };
  return words[row.outcome] ?? "There is no answer.";
}

function folded(name, ...content) {
  return h("details", {}, h("summary", {}, name), content);
}

function details(row) {
  const parts = [
    row.prompt_tokens && `${count(row.prompt_tokens)} prompt tokens`,
    row.cached_tokens && `${count(row.cached_tokens)} of them cached`,
    row.completion_tokens && `${count(row.completion_tokens)} generated`,
    row.finish_reason && `ended by ${row.finish_reason}`,
    row.reused && "reused: computed for an earlier batch",
    row.busy_ms > 0 && duration(row.busy_ms / 1000),
    row.worker && `on ${row.worker}`,
  ];
  return parts.filter(Boolean).join(" · ");
}
