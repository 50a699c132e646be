// Replies that wait for a platform, and those that were given up.

import { get, post } from "../api.js";
import { glyph, h, put, span } from "../dom.js";

const STATES = [["pending", "Waits"], ["dead", "Given up"], ["sent", "Sent"]];

export function outbox({ head, body, announce, fail }) {
  const sum = h("span", { class: "sum" });
  let state = "pending", rows = [];
  const tabs = STATES.map(([name, words]) => h("button", { class: "tog", "aria-pressed": String(name === state), onclick: () => { state = name; for (const [i, one] of STATES.entries()) tabs[i].setAttribute("aria-pressed", String(one[0] === state)); load(); } }, words));
  head.append(sum, h("span", { class: "push" }), h("div", { role: "toolbar", "aria-label": "State" }, tabs));
  const list = h("ol", { class: "plain-rows" });
  body.append(h("div", { class: "scroll pad", tabindex: "-1", "data-home": "" }, list));
  async function load() {
    try {
      ({ data: rows } = await get(`/admin/outbox?state=${state}&limit=100`));
      draw();
    } catch (error) {
      fail(error);
    }
  }
  async function retry(row) {
    try {
      await post(`/admin/outbox/${row.id}/retry`);
      announce("Queued again.");
      await load();
    } catch (error) {
      fail(error);
    }
  }
  function draw() {
    const at = Date.now() / 1000;
    list.replaceChildren(...rows.map((row) => h("li", { class: "entry" }, h("span", { class: `dot ${state === "dead" ? "bad" : state === "sent" ? "off" : row.attempts > 0 ? "warn" : ""}` }),
      h("div", { class: "what" }, h("strong", null, row.platform), " ", h("code", { class: "faint" }, Object.values(row.target).filter(Boolean).join(" · ")), h("p", { class: "dim cut", title: row.text }, row.text), row.error ? h("p", { class: "problem" }, row.error) : null),
      h("div", { class: "times" }, h("span", { class: "num" }, state === "pending" ? (row.next_at > at ? `next try in ${span(row.next_at - at)}` : "due") : `${row.attempts} attempts`), h("span", { class: "faint num" }, `${span(Math.max(0, at - row.created_at))} old`), row.maybe_duplicate ? h("span", { class: "chip warn" }, "may arrive twice") : null),
      h("div", { class: "acts" }, state === "dead" ? h("button", { class: "btn", onclick: () => retry(row) }, "Try again") : null))));
    if (rows.length === 0) list.append(h("li", { class: "empty" }, glyph("sender"), h("h2", null, { pending: "Nothing waits", dead: "Nothing was given up", sent: "Nothing is kept" }[state]), h("p", null, state === "dead" ? "A reply that a platform refuses for good is kept here, and can be sent again." : "A reply is written down with the end of its turn, and sent afterwards.")));
    put(sum, rows.length ? `${rows.length}${rows.length === 100 ? " or more" : ""}` : "");
  }
  let next = 0;
  load();
  return { tick: () => { if (performance.now() > next) { if (next) load(); next = performance.now() + 5000; } }, regain: load };
}
