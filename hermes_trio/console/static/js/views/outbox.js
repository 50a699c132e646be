// Replies that wait for a platform, and those that were given up; and the other way round, messages that could not be handled.

import { get, post } from "../api.js";
import { count, glyph, h, put, span } from "../dom.js";

const STATES = [["pending", "Waits"], ["dead", "Given up"], ["sent", "Sent"], ["inbox", "Not handled"]];
const EMPTY = {
  pending: ["Nothing waits", "A reply is written down with the end of its turn, and sent afterwards."],
  dead: ["Nothing was given up", "A reply that a platform refuses for good is kept here, and can be sent again."],
  sent: ["Nothing is kept", "A reply is written down with the end of its turn, and sent afterwards."],
  inbox: ["Everything was handled", "A message or notice that could not become a turn after three attempts is kept here, and can be let in again."],
};

/** @param {import("../types.js").Context} ctx @returns {import("../types.js").View} */
export function outbox({ head, body, announce, fail }) {
  const sum = h("span", { class: "sum" });
  let state = "pending", rows = [];
  const tabs = STATES.map(([name, words]) => h("button", { class: "tog", "aria-pressed": String(name === state), onclick: () => { state = name; for (const [i, one] of STATES.entries()) tabs[i].setAttribute("aria-pressed", String(one[0] === state)); load(); } }, words));
  head.append(sum, h("span", { class: "push" }), h("div", { role: "toolbar", "aria-label": "State" }, tabs));
  const list = h("ol", { class: "plain-rows" });
  body.append(h("div", { class: "scroll pad", tabindex: "-1", "data-home": "" }, list));
  async function load() {
    try {
      ({ data: rows } = await get(state === "inbox" ? "/admin/inbox?state=dead&limit=100" : `/admin/outbox?state=${state}&limit=100`));
      draw();
    } catch (error) {
      fail(error);
    }
  }
  async function retry(row) {
    try {
      await post(`/admin/${state === "inbox" ? "inbox" : "outbox"}/${row.id}/retry`);
      announce(state === "inbox" ? "It waits again: its conversation takes it." : "Queued again.");
      await load();
    } catch (error) {
      fail(error);
    }
  }
  function draw() {
    const at = Date.now() / 1000;
    list.replaceChildren(...rows.map((row) => h("li", { class: "entry" }, h("span", { class: `dot ${state === "dead" || state === "inbox" ? "bad" : state === "sent" ? "off" : row.attempts > 0 ? "warn" : ""}` }),
      h("div", { class: "what" }, h("strong", null, row.platform ?? row.inbox), " ", h("code", { class: "faint" }, row.target ? Object.values(row.target).filter(Boolean).join(" · ") : `${row.kind} · ${row.session_key}`), h("p", { class: "dim cut", title: row.text }, row.text), row.error || row.reason ? h("p", { class: "problem" }, row.error ?? row.reason) : null),
      h("div", { class: "times" }, h("span", { class: "num" }, state === "pending" ? (row.next_at > at ? `next try in ${span(row.next_at - at)}` : "due") : count(row.attempts, "attempt")), h("span", { class: "faint num" }, `${span(Math.max(0, at - row.created_at))} old`), row.maybe_duplicate ? h("span", { class: "chip warn" }, "may arrive twice") : null),
      h("div", { class: "acts" }, state === "dead" || state === "inbox" ? h("button", { class: "btn", onclick: () => retry(row) }, "Try again") : null))));
    const [title, words] = EMPTY[state];
    if (rows.length === 0) list.append(h("li", { class: "empty" }, glyph(state === "inbox" ? "receiver" : "sender"), h("h2", null, title), h("p", null, words)));
    put(sum, rows.length ? `${rows.length}${rows.length === 100 ? " or more" : ""}` : "");
  }
  let next = 0;
  load();
  return { tick: () => { if (performance.now() > next) { if (next) load(); next = performance.now() + 5000; } }, regain: load };
}
