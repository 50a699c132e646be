// Signing in with a key. A link with a one-time code needs no page.

import { glyph, h, put } from "../dom.js";

/** The way in: a key, or how to get a link. @param {string} problem What was wrong before. @param {(key: string) => Promise<void>} enter @returns {HTMLElement} */
export function signIn(problem, enter) {
  const said = h("p", { class: "problem", role: "alert" }, problem);
  const key = h("input", { class: "field", type: "password", name: "key", autocomplete: "off", spellcheck: "false", "aria-label": "API key", placeholder: "ht-…", required: true });
  const button = h("button", { class: "btn primary" }, "Sign in");
  const submit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    try {
      await enter(key.value.trim());
    } catch (error) {
      put(said, error.message);
      button.disabled = false;
      key.select();
    }
  };
  return h("section", { class: "signin" },
    h("img", { src: "console/icon.svg", width: 40, height: 40, alt: "" }), h("h1", null, "hermes-trio"),
    h("p", { class: "dim" }, "Open the link that ", h("code", null, "hermes-trio console"), " prints, or paste a key. The page keeps a cookie that ends by itself, never the key."),
    h("form", { onsubmit: submit }, key, button), said,
    h("p", { class: "faint small" }, glyph("approvals"), "What the key may not do is not shown."));
}
