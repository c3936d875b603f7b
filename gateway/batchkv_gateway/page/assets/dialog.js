// A question before something that cannot be undone. Escape and "Keep" do nothing. The browser
// keeps the focus in the dialog, and returns it to the button at its end.

import { h, patch } from "./dom.js";

// Resolves to true if the viewer agrees.
export function confirmed({ title, text, action }) {
  return new Promise((resolve) => {
    const dialog = document.createElement("dialog");
    dialog.setAttribute("aria-labelledby", "dialog-title");
    dialog.setAttribute("aria-describedby", "dialog-text");
    dialog.onclose = () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    };
    patch(dialog, [
      h("h2", { id: "dialog-title" }, title),
      h("p", { id: "dialog-text" }, text),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", autofocus: true, onclick: () => dialog.close("no") }, "Keep"),
        h(
          "button",
          { type: "button", class: "danger", onclick: () => dialog.close("yes") },
          action,
        ),
      ),
    ]);
    document.body.append(dialog);
    dialog.showModal();
  });
}
