// The runs: which there are, what one says and did, its events as they come, and the stop with its receipt.

import { Follower, get, post } from "../api.js";
import { clock, glyph, h, put, span } from "../dom.js";
import { RunSpans } from "../spans.js";
import { twice } from "../twice.js";
import { card } from "./approvals.js";
import { Receipt } from "./panel.js";

const STATUS = { queued: "", running: "", stopping: "warn", waiting_for_approval: "warn", completed: "good", cancelled: "bad", failed: "bad" };

/** @param {import("../types.js").Context} ctx @returns {import("../types.js").View} */
export function runs({ head, body, rest, asks, store, go, announce, fail }) {
  const pick = h("select", { class: "field", "aria-label": "Status", onchange: () => load() }, ["", "running", "waiting_for_approval", "completed", "failed", "cancelled"].map((one) => h("option", { value: one }, one ? one.replaceAll("_", " ") : "all runs")));
  const sum = h("span", { class: "sum" });
  head.append(sum, h("span", { class: "push" }), pick);
  const list = h("ol", { class: "table scroll", "aria-label": "Runs", "data-home": "", tabindex: "-1" }), page = h("section", { class: "script scroll", "aria-label": "Run", tabindex: "0" });
  body.append(list, page);
  let rows = [], open = rest[0] ?? "", follower = null, one = null, drawn = "", parts = null, count = -1;

  async function load() {
    try {
      const { data, has_more: more } = await get(`/v1/runs?limit=100${pick.value ? `&status=${pick.value}` : ""}`);
      rows = data;
      put(sum, `${rows.length}${more ? " newest" : ""}`);
      if (!open && rows.length > 0) open = rows[0].run_id;
      draw();
      if (open !== one?.id) show();
    } catch (error) {
      fail(error);
    }
  }
  function draw() {
    list.replaceChildren(...rows.map((run) => h("li", null, h("button", { class: "pick", "aria-current": run.run_id === open ? "true" : null, onclick: () => { open = run.run_id; draw(); show(); } },
      h("span", { class: `dot ${run.ended_at ? "off" : run.status === "waiting_for_approval" ? "warn" : ""}` }), h("span", { class: "cut" }, (run.input_preview || run.output || run.error || "").split("\n")[0] || run.run_id), h("code", { class: "faint cut" }, run.run_id), h("span", { class: "num faint" }, clock(new Date(1000 * run.created_at))), h("span", { class: `chip ${STATUS[run.status] ?? ""}` }, run.status.replaceAll("_", " "))))));
    if (rows.length === 0) list.append(h("li", { class: "empty" }, glyph("runs"), h("h2", null, "No runs"), h("p", null, "POST /v1/runs starts one; so does every client of the run API.")));
  }
  async function show() {
    follower?.close();
    if (!open) return;
    let run;
    try {
      run = await get(`/v1/runs/${encodeURIComponent(open)}`);
    } catch (error) {
      return fail(error);
    }
    one = new RunSpans(run);
    if (run.ended_at) one.output = run.output ?? "";
    parts = { status: h("span", { class: "chip" }), long: h("span", { class: "num dim" }), output: h("pre", { class: "output" }), events: h("ol", { class: "events still" }), asked: h("div", { class: "cards" }), slot: h("div") };
    const stop = twice("Stop", "Stop it and all that it started", async () => {
      const receipt = new Receipt();
      parts.slot.replaceChildren(receipt.el);
      try {
        const { receipt: answer } = await post(`/v1/runs/${encodeURIComponent(run.run_id)}/stop?wait=true`);
        for (const line of answer?.lines ?? []) receipt.line(line);
        receipt.end(answer ?? { ok: true, lines: [], remaining: [], milliseconds: 0, already_ended: true });
        announce("Stopped.");
      } catch (error) {
        receipt.el.remove();
        fail(error);
      }
      load();
    });
    page.replaceChildren(
      h("header", null, h("div", null, h("h2", { class: "mono" }, run.run_id), h("p", { class: "facts" }, parts.status, parts.long, h("span", { class: "faint" }, run.model), h("code", { class: "faint cut" }, run.session_id))),
        h("div", { class: "acts" }, h("button", { class: "btn", onclick: () => go(`timeline/${encodeURIComponent(run.run_id)}`) }, "Timeline"), run.settled ? null : stop)),
      parts.slot, parts.asked, h("h3", null, "Output"), parts.output, h("h3", null, "Events"), parts.events);
    drawn = "";
    count = -1;
    follower = new Follower(`/v1/runs/${encodeURIComponent(run.run_id)}/events`, {
      hear: ({ data }) => one.take(data),
      finished: (problem) => one.over || (problem === null && run.ended_at),
      state: (name, problem) => { if (name === "refused") fail(problem); else if (name === "over") load(); },
    });
    tick();
  }
  function tick() {
    if (!one || !parts) return;
    put(parts.status, one.status.replaceAll("_", " "));
    parts.status.className = `chip ${STATUS[one.status] ?? ""}`;
    put(parts.long, span((one.end ?? Date.now() / 1000) - one.start));
    put(parts.output, one.output || (one.end === null ? "nothing yet" : "no output"));
    const mark = `${one.id}|${one.resets}|${one.events.length}`;
    if (mark !== drawn) {
      drawn = mark;
      parts.events.replaceChildren(...one.events.slice(-200).map((event) => h("li", { class: event.event.startsWith("approval") ? "warn" : "" }, h("span", { class: "num faint" }, "+" + span(Math.max(0, event.at - one.start))), h("span", { class: "mono cut" }, event.event), h("span", { class: "dim cut", title: event.text }, event.text))));
    }
    const mine = asks.pending.filter((ask) => ask.run_id === one.id);
    if (asks.version !== count) {
      count = asks.version;
      parts.asked.replaceChildren(...mine.map((ask) => card(ask, async (approval, choice) => { try { await asks.answer(approval.approval_id, choice); } catch (error) { fail(error); } asks.load(); })));
    }
    for (const el of parts.asked.children) el.tick?.();
  }
  let seen = -1, later = 0;
  load();
  return {
    tick: () => {
      // A turn that came or went may be a run: look again, but not more than once a second.
      const turns = store.kinds.get("turn") ?? 0;
      if (turns !== seen && performance.now() > later) { if (seen !== -1) load(); seen = turns; later = performance.now() + 1000; }
      tick();
    },
    regain: load,
    leave: () => follower?.close(),
    key: (event) => {
      const by = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!by || rows.length === 0) return false;
      open = rows[Math.min(rows.length - 1, Math.max(0, rows.findIndex((run) => run.run_id === open) + by))].run_id;
      draw();
      show();
      list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
      return true;
    },
  };
}
