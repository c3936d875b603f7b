// Starts the page: the session, the events, the view of the address, and the drawing of it.

import { Fault, getJson, onRefused, sendJson } from "./api.js";
import { app, takeEvent } from "./app.js";
import { h, patch } from "./dom.js";
import { Live } from "./live.js";
import * as ask from "./views/ask.js";
import * as batch from "./views/batch.js";
import * as batches from "./views/batches.js";
import * as login from "./views/login.js";
import * as submit from "./views/submit.js";
import * as throughput from "./views/throughput.js";
import * as workers from "./views/workers.js";

const VIEWS = [
  [/^$/, batches],
  [/^batches\/(\w+)$/, batch],
  [/^workers$/, workers],
  [/^throughput$/, throughput],
  [/^new$/, submit],
  [/^ask$/, ask],
];
const LINKS = [
  ["", "Batches"],
  ["workers", "Workers"],
  ["throughput", "Throughput"],
  ["new", "New batch"],
  ["ask", "Ask"],
];
const TICK_MS = 5000; // times such as "12 s ago" are drawn again

const main = document.getElementById("main");
let live = null;
let shown = null; // { view, args }
let isDue = false;

app.refresh = () => {
  if (isDue) return;
  isDue = true;
  // A page in the background draws nothing until it is seen again.
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
};

let saidAt = 0;
app.say = (text) => {
  const now = Date.now();
  if (now - saidAt < 3000) return;
  saidAt = now;
  document.getElementById("said").textContent = text;
};

function route() {
  const path = location.hash.replace(/^#\/?/, "");
  for (const [pattern, view] of VIEWS) {
    const found = pattern.exec(path);
    if (found) return { view, args: found.slice(1), path };
  }
  return { view: missing, args: [], path };
}

const missing = {
  title: () => "No such view",
  render: () => [
    h("h1", { tabindex: -1 }, "No such view"),
    h("p", {}, h("a", { href: "#/" }, "Go to the batches")),
  ],
};

function show() {
  if (!app.session) return;
  const next = app.session.is_signed_in ? route() : { view: login, args: [], path: "login" };
  const isFirst = shown === null;
  const isOther = shown?.path !== next.path;
  if (isOther) shown?.view.leave?.();
  shown = next;
  if (isOther) {
    patch(main, []);
    next.view.enter?.(...next.args);
  }
  draw();
  if (isOther) {
    window.scrollTo(0, 0);
    // The first view leaves the focus where the skip link is the next stop.
    (main.querySelector("[data-focus]") ?? (isFirst ? null : main.querySelector("h1")))?.focus();
  }
}

function draw() {
  if (!shown) return;
  document.title = `${shown.view.title(...shown.args)} · batchkv`;
  patch(main, shown.view.render(...shown.args));
  patch(document.getElementById("nav"), app.session.is_signed_in ? [navigation()] : []);
  patch(document.getElementById("session"), session());
  patch(document.getElementById("link"), linkNote());
}

function navigation() {
  const path = location.hash.replace(/^#\/?/, "");
  return h(
    "ul",
    {},
    LINKS.map(([to, name]) => {
      const isHere = to === path || (to === "" && path.startsWith("batches/"));
      return h(
        "li",
        { key: name },
        h("a", { href: `#/${to}`, "aria-current": isHere ? "page" : null }, name),
      );
    }),
  );
}

function session() {
  if (!app.session?.has_session || !app.session.is_signed_in) return [];
  return [
    h("span", { class: "note" }, app.session.name),
    h("button", { type: "button", class: "quiet", onclick: signOut }, "Sign out"),
  ];
}

function linkNote() {
  if (app.link === "lost") {
    return [h("p", { class: "alert" }, "The gateway does not answer. This page tries again. Figures are as of then.")];
  }
  return app.trouble ? [h("p", { class: "alert" }, app.trouble)] : [];
}

async function signOut() {
  try {
    await sendJson("POST", "/page/logout", {});
  } finally {
    location.reload();
  }
}

// Ask who we are, and open the events if we may.
export async function begin() {
  try {
    await useTicket();
    app.session = await getJson("/page/session");
  } catch (fault) {
    patch(main, [
      h("h1", { tabindex: -1 }, "batchkv"),
      h("p", { class: "alert", role: "alert" }, fault.message),
      h("button", { type: "button", onclick: begin }, "Try again"),
    ]);
    if (!(fault instanceof Fault)) throw fault;
    return;
  }
  if (app.session.is_signed_in && !live) {
    live = new Live("/page/events", takeEvent, onLink);
  }
  show();
}

login.onSignedIn(begin);

// `serve --open` opens the page with a ticket behind the #, which no server and no log sees.
let ticketFault = "";
async function useTicket() {
  const found = /^#ticket=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", "/");
  try {
    await sendJson("POST", "/page/exchange", { ticket: found[1] });
  } catch (fault) {
    ticketFault = fault.message;
    login.explain(ticketFault);
  }
}

// The gateway has refused a request: perhaps the session has ended, or the gateway has got its first key.
async function askAgain() {
  try {
    const now = await getJson("/page/session");
    if (now.is_signed_in || !app.session?.is_signed_in) return;
    login.explain(
      app.session.has_session
        ? "Your session has ended. Sign in again."
        : "This gateway has a key now. Sign in with it.",
    );
    app.session = now;
    live?.end();
    live = null;
    show();
  } catch {
    app.link = "lost";
    app.refresh();
  }
}

onRefused(askAgain);

async function onLink(state) {
  if (state === "closed") {
    await askAgain();
    return;
  }
  app.link = state;
  app.refresh();
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", show);
window.addEventListener("resize", app.refresh);
setInterval(app.refresh, TICK_MS);
begin();
