// A question to a model. Its answer appears as the model writes it.

import { ask, eventsOf } from "../api.js";
import { app } from "../app.js";
import { h } from "../dom.js";
import { count, duration, rate } from "../format.js";
import { alert, command, NO_WORKER } from "./parts.js";

const MIN_RATE_SECONDS = 0.1; // a shorter time says nothing about the speed

let running = null; // an AbortController
let answer = null; // { text, reasoning, calls, usage, firstMs, wholeMs, reason }
let fault = "";

export const title = () => "Ask";

export function leave() {
  running?.abort();
}

export function render() {
  const models = [...new Set(app.workers.filter((one) => !one.is_away && one.model).map((one) => one.model))];
  return [
    h("h1", { tabindex: -1 }, "Ask"),
    app.hasState && !models.length ? noModel() : form(models),
    alert(fault),
    answer && shown(),
  ];
}

function noModel() {
  return h("section", { class: "card" }, h("p", {}, "No worker serves a model now. This command starts one:"), command(NO_WORKER));
}

function form(models) {
  return h(
    "form",
    { key: "form", class: "terms wide", onsubmit: send },
    h("label", { for: "ask-model" }, "Model"),
    h("select", { id: "ask-model", name: "model" }, models.map((name) => h("option", { key: name, value: name }, name))),
    h("label", { for: "prompt" }, "Prompt"),
    h("textarea", { id: "prompt", name: "prompt", rows: 5, required: true, dir: "auto", onkeydown: onKey, "aria-describedby": "prompt-note" }),
    h("p", { class: "note", id: "prompt-note" }, "Ctrl+Enter or ⌘+Enter sends it. It is computed at once, also while batches run."),
    h("label", { for: "max-tokens" }, "Token limit"),
    h("input", { id: "max-tokens", name: "max", type: "number", min: 1, max: 100000, start: 512, inputmode: "numeric" }),
    h(
      "div",
      { class: "actions" },
      h("button", { class: "main", disabled: Boolean(running) }, running ? "Answering …" : "Send"),
      running && h("button", { type: "button", onclick: () => running.abort() }, "Stop"),
    ),
  );
}

function onKey(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
}

function shown() {
  return h(
    "section",
    { key: "answer", class: "card", "aria-labelledby": "answer-title", "aria-busy": running ? "true" : "false" },
    h("h2", { id: "answer-title" }, "Answer"),
    answer.reasoning && h("details", {}, h("summary", {}, "Reasoning"), h("pre", { class: "text", dir: "auto" }, answer.reasoning)),
    h("pre", { class: "text answer", dir: "auto", tabindex: 0 }, answer.text || (running ? "…" : "")),
    answer.calls.map((call, index) =>
      h("details", { key: index }, h("summary", {}, "Call of ", h("code", {}, call.name)), h("pre", { class: "text" }, call.text)),
    ),
    h("p", { class: "note" }, figures()),
  );
}

function figures() {
  const usage = answer.usage ?? {};
  const seconds = (answer.wholeMs - answer.firstMs) / 1000;
  const parts = [
    answer.firstMs && `first token after ${duration(answer.firstMs / 1000)}`,
    usage.prompt_tokens && `${count(usage.prompt_tokens)} prompt tokens`,
    usage.prompt_tokens_details?.cached_tokens && `${count(usage.prompt_tokens_details.cached_tokens)} of them cached`,
    usage.completion_tokens && `${count(usage.completion_tokens)} generated`,
    usage.completion_tokens > 1 && seconds >= MIN_RATE_SECONDS && rate((usage.completion_tokens - 1) / seconds),
    answer.reason && `ended by ${answer.reason}`,
  ];
  return parts.filter(Boolean).join(" · ");
}

async function send(event) {
  event.preventDefault();
  if (running) return;
  const { model, prompt, max } = event.target.elements;
  running = new AbortController();
  answer = { text: "", reasoning: "", calls: [], usage: null, firstMs: 0, wholeMs: 0, reason: "" };
  fault = "";
  app.refresh();
  const began = performance.now();
  const own = answer;
  try {
    const body = {
      model: model.value,
      messages: [{ role: "user", content: prompt.value }],
      max_tokens: Number(max.value) || 512,
      stream: true,
      stream_options: { include_usage: true },
    };
    const found = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    for await (const data of eventsOf(found)) {
      if (data === "[DONE]") break;
      take(own, JSON.parse(data), performance.now() - began);
      app.refresh();
    }
    app.say("The answer is complete.");
  } catch (error) {
    if (error.name !== "AbortError") fault = error.message;
    else own.reason = "you";
  } finally {
    own.wholeMs = performance.now() - began;
    running = null;
    app.refresh();
  }
}

function take(own, piece, ms) {
  if (piece.error) throw new Error(piece.error.message);
  if (piece.usage) own.usage = piece.usage;
  const choice = piece.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if (!own.firstMs && (content || reasoning || calls)) own.firstMs = ms;
  own.text += content ?? "";
  own.reasoning += reasoning ?? "";
  for (const call of calls ?? []) {
    const known = (own.calls[call.index ?? 0] ??= { name: "", text: "" });
    known.name += call.function?.name ?? "";
    known.text += call.function?.arguments ?? "";
  }
  if (choice.finish_reason) own.reason = choice.finish_reason;
}
