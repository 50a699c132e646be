// The sessions, the newest activity first, the messages that a search finds, and the transcript of one.

import { del, get, patch, post } from "../api.js";
import { count, glyph, h, put, span } from "../dom.js";
import { twice } from "../twice.js";

const ago = (at) => `${span(Math.max(1, Date.now() / 1000 - at))} ago`;

/** A snippet of a search as nodes: what matched stands between >>> and <<<. @param {string} text */
const marked = (text) => text.split(/(>>>.*?<<<)/s).map((part) => (part.startsWith(">>>") && part.endsWith("<<<") ? h("mark", null, part.slice(3, -3)) : part));

/** The text of a message, whatever its parts are. @param {string|object[]} content @returns {string} */
export function textOf(content) {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return "";
  return content.map((part) => part.text ?? `[${part.type ?? "part"}]`).join("\n");
}

/** One line of a transcript; a tool's result is folded. @param {object} one @returns {HTMLElement|null} */
export function message(one) {
  if (one.role === "tool") {
    const terminal = one.tool_name === "terminal";
    return h("li", { class: "did", "data-message": String(one.id) }, h("details", null, h("summary", null, glyph("open", "turns"), glyph(terminal ? "process" : "tool", terminal ? "k-process" : "k-tool"), h("span", null, one.tool_name ?? "tool"), h("code", { class: "cut" }, textOf(one.content).slice(0, 160))), h("pre", null, textOf(one.content))));
  }
  const text = textOf(one.content);
  return text ? h("li", { class: "line", "data-message": String(one.id) }, h("span", { class: "label" }, one.role), h("p", null, text)) : null;
}

const PAUSE = 250; // milliseconds without a key before the server is asked
const AGAIN = 3000; // and after which it is asked again: a message is found a moment after it was said

/** @param {import("../types.js").Context} ctx @returns {import("../types.js").View} */
export function sessions({ head, body, rest, store, me, go, announce, fail, tell }) {
  const search = h("input", { class: "field", type: "search", placeholder: "Search messages   /", "aria-label": "Search sessions and messages", oninput: () => { draw(); clearTimeout(timer); timer = setTimeout(() => find(), PAUSE); } }), sum = h("span", { class: "sum" });
  head.append(sum, h("span", { class: "push" }), search);
  const list = h("ol", { class: "table scroll", "aria-label": "Sessions", "data-home": "", tabindex: "-1" }), text = h("section", { class: "script scroll", "aria-label": "Transcript", tabindex: "0" });
  body.append(list, text);
  let rows = [], open = rest[0] ?? "", shown = "", more = false, hits = [], asked = "", timer = 0, wanted = null, later = 0;

  /** Ask for the messages that have the words. The answer to an older question is dropped. */
  async function find(again = false) {
    const words = search.value.trim();
    if (words === asked && !again) return;
    asked = words;
    later = performance.now() + AGAIN;
    try {
      const { data } = words ? await get(`/api/search?q=${encodeURIComponent(words)}&limit=50`) : { data: [] };
      if (asked !== words) return;
      // What is the same stays as it is, with the focus that it may have.
      const same = data.length === hits.length && data.every((hit, i) => hit.message_id === hits[i].message_id);
      hits = data;
      if (!same || !again) draw();
    } catch (error) {
      fail(error);
    }
  }

  async function load() {
    try {
      const found = await get("/api/sessions?limit=100");
      rows = found.data;
      more = found.has_more;
      if (!open && rows.length > 0) open = rows[0].id;
      draw();
      await show();
    } catch (error) {
      fail(error);
    }
  }
  const title = (row) => row.title || row.preview || row.id;
  function draw() {
    const words = search.value.toLowerCase(), found = rows.filter((row) => `${row.id} ${title(row)} ${row.source} ${row.user_id ?? ""} ${row.model ?? ""} ${row.end_reason ?? ""}`.toLowerCase().includes(words));
    const alive = new Set();
    for (const node of store.nodes.values()) if (node.closedAt === null && node.owner) alive.add(node.owner).add(node.id);
    put(sum, `${found.length} of ${rows.length}${more ? " newest" : ""}${hits.length ? ` · ${count(hits.length, "message")} found` : ""}`);
    list.replaceChildren(...found.map((row) => h("li", null, h("button", { class: "pick", "aria-current": row.id === open ? "true" : null, onclick: () => { open = row.id; wanted = null; draw(); show(); } },
      h("span", { class: `dot ${!row.ended_at && alive.has(row.id) ? "" : "off"}` }), h("span", { class: "cut" }, title(row)), h("span", { class: "faint cut" }, [row.source, row.user_id].filter(Boolean).join(" · ")), h("span", { class: "num faint" }, `${row.message_count} messages`), row.end_reason ? h("span", { class: "chip" }, row.end_reason) : h("span", { class: "num faint" }, ago(row.last_active ?? row.started_at))))));
    if (hits.length > 0) {
      list.append(h("li", { class: "label" }, "Messages"), ...hits.map((hit) => h("li", null, h("button", { class: "pick hit", "aria-current": hit.message_id === wanted ? "true" : null, onclick: () => { open = hit.session_id; wanted = hit.message_id; draw(); show(); } },
        h("span", { class: "dot off" }), h("span", { class: "snippet" }, marked(hit.snippet)), h("span", { class: "faint cut" }, [hit.role, hit.title || hit.source].filter(Boolean).join(" · ")), h("span", { class: "num faint" }, ago(hit.timestamp))))));
    }
    if (found.length === 0 && hits.length === 0) list.append(h("li", { class: "empty" }, glyph("sessions"), h("h2", null, rows.length ? "No session has these words" : "No sessions yet"), h("p", null, rows.length ? "" : "A conversation appears here with its first message.")));
  }
  async function show() {
    let row = rows.find((one) => one.id === open), data = [];
    try {
      // A session that a search found, or that an address names, may be older than the list.
      if (!row && open) ({ session: row } = await get(`/api/sessions/${encodeURIComponent(open)}`));
      if (!row) return text.replaceChildren();
      shown = row.id;
      ({ data } = await get(`/api/sessions/${encodeURIComponent(row.id)}/messages`));
    } catch (error) {
      return fail(error);
    }
    if (shown !== row.id) return;
    const path = `/api/sessions/${encodeURIComponent(row.id)}`;
    const act = (words, work, look = "") => h("button", { class: `btn ${look}`, onclick: async () => { try { await work(); await load(); } catch (error) { fail(error); } } }, words);
    text.replaceChildren(
      h("header", null, h("div", null, h("h2", null, title(row)), h("p", { class: "faint" }, [h("code", null, row.id), ` · ${(row.input_tokens + row.output_tokens).toLocaleString("en")} tokens`, row.model ? ` · ${row.model}` : "", row.has_system_prompt ? " · system prompt set, not shown" : ""])),
        h("div", { class: "acts" },
          me.admin || me.scopes.includes("runs") ? h("button", { class: "btn", onclick: () => go(`timeline/session/${encodeURIComponent(row.id)}`) }, "Timeline") : null,
          act("Fork", async () => { const { session } = await post(`${path}/fork`, {}); open = session.id; tell(`Forked as ${session.id}.`); }),
          row.ended_at ? null : twice("End", "End this session", async () => { try { await patch(path, { end_reason: "console" }); announce("Ended."); await load(); } catch (error) { fail(error); } }),
          twice("Delete", "Delete for good", async () => { try { await del(path); open = ""; announce("Deleted."); await load(); } catch (error) { fail(error); } }))),
      h("ol", null, data.map(message)));
    const place = wanted === null ? null : text.querySelector(`[data-message="${wanted}"]`);
    place?.querySelector("details")?.setAttribute("open", "");
    place?.classList.add("found");
    place?.scrollIntoView({ block: "center" });
    if (data.length === 0) text.append(h("p", { class: "faint" }, "No messages are kept of this session."));
  }
  load();
  return {
    regain: load,
    tick: () => { if (asked && performance.now() > later) find(true); },
    key: (event) => {
      const by = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!by || rows.length === 0) return false;
      open = rows[Math.min(rows.length - 1, Math.max(0, rows.findIndex((row) => row.id === open) + by))].id;
      draw();
      show();
      list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
      return true;
    },
  };
}
