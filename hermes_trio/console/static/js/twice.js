// A button for what cannot be undone: the first press arms it for a moment, the second does it.

import { h } from "./dom.js";

const ARMED = 4000; // milliseconds in which a second press means it

/** @param {string} words @param {string} sure What it says when armed. @param {() => void} act @returns {HTMLElement} */
export function twice(words, sure, act) {
  let timer = 0;
  const calm = () => { clearTimeout(timer); timer = 0; el.classList.remove("armed"); el.replaceChildren(words); };
  const el = h("button", { class: "btn danger", onclick: () => {
    if (timer) { calm(); act(); return; }
    el.classList.add("armed");
    el.replaceChildren(sure);
    timer = setTimeout(calm, ARMED);
  }, onkeydown: (event) => { if (event.key === "Escape" && timer) { event.stopPropagation(); calm(); } } }, words);
  return el;
}
