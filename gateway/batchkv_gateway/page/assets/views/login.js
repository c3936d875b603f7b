// Signing in with a key.

import { sendJson } from "../api.js";
import { app } from "../app.js";
import { h } from "../dom.js";

let fault = "";
let isBusy = false;
let signedIn = () => {};

export const title = () => "Sign in";

export function onSignedIn(then) {
  signedIn = then;
}

export function explain(text) {
  fault = text;
}

export function render() {
  return [
    h(
      "section",
      { class: "card narrow" },
      h("h1", { tabindex: -1 }, "Sign in"),
      h("p", {}, "This gateway needs a key. Its operator makes one with ", h("code", {}, "batchkv keys add NAME"), "."),
      h(
        "form",
        { onsubmit: send },
        h("label", { for: "key" }, "Key"),
        h("input", {
          id: "key",
          name: "key",
          type: "password",
          autocomplete: "current-password",
          required: true,
          spellcheck: "false",
          placeholder: "bkv-…",
          "data-focus": true,
          "aria-describedby": fault ? "login-fault" : null,
        }),
        fault && h("p", { id: "login-fault", class: "alert", role: "alert" }, fault),
        h("button", { class: "main", disabled: isBusy }, isBusy ? "Signing in …" : "Sign in"),
      ),
    ),
  ];
}

async function send(event) {
  event.preventDefault();
  const field = event.target.elements.key;
  isBusy = true;
  app.refresh();
  try {
    await sendJson("POST", "/page/login", { key: field.value.trim() });
    field.value = "";
    fault = "";
    await signedIn();
  } catch (error) {
    fault = error.message;
    field.focus();
  } finally {
    isBusy = false;
    app.refresh();
  }
}
