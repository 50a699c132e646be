// Scheduled jobs: when each runs next, what became of its slots, run now, pause, and a new one.

import { del, get, post } from "../api.js";
import { glyph, h, put, span } from "../dom.js";
import { twice } from "../twice.js";

const when = (text) => {
  if (!text) return null;
  const at = typeof text === "number" ? text : Date.parse(text) / 1000;
  return Number.isFinite(at) ? at : null;
};

const STATE = { claimed: "", running: "", completed: "good", failed: "bad", cancelled: "bad", skipped: "warn", missed: "warn", interrupted: "bad" };

/** @param {import("../types.js").Context} ctx @returns {import("../types.js").View} */
export function jobs({ head, body, announce, fail }) {
  const sum = h("span", { class: "sum" });
  head.append(sum);
  const list = h("ol", { class: "plain-rows" }), field = (name, hint, more = {}) => h("input", { class: "field", name, placeholder: hint, "aria-label": hint, required: true, ...more });
  const form = h("form", { class: "make", onsubmit: (event) => { event.preventDefault(); make(); } }, field("name", "Name"), field("schedule", "Schedule: every 30m, 0 9 * * 1-5"), field("prompt", "What to ask", { class: "field grow" }), h("button", { class: "btn primary" }, "Make a job"));
  body.append(h("div", { class: "scroll pad", tabindex: "-1", "data-home": "" }, list, h("h3", null, "New job"), form));
  let rows = [];
  const histories = new Map(); // the slots of the jobs whose history is open
  async function history(job) {
    try {
      histories.set(job.id, (await get(`/api/jobs/${encodeURIComponent(job.id)}/executions?limit=50`)).data);
    } catch (error) {
      fail(error);
    }
  }
  function slot(one) {
    const began = when(one.started_at ?? one.claimed_at), ended = when(one.ended_at);
    return h("li", null, h("time", { class: "num", title: one.slot }, new Date(1000 * when(one.slot)).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })), h("span", { class: `chip ${STATE[one.state] ?? ""}` }, one.state),
      h("span", { class: "num faint" }, ended !== null && began !== null ? span(Math.max(0, ended - began)) : ""), h("span", { class: one.error ? "problem cut" : "dim cut", title: one.error ?? one.output }, one.error ?? one.output),
      one.session_id ? h("a", { href: `#/sessions/${encodeURIComponent(one.session_id)}` }, "Session") : h("span"));
  }
  async function load() {
    try {
      ({ jobs: rows } = await get("/api/jobs?include_disabled=true"));
      await Promise.all(rows.filter((job) => histories.has(job.id)).map(history));
      draw();
    } catch (error) {
      fail(error);
    }
  }
  async function make() {
    const values = Object.fromEntries(["name", "schedule", "prompt"].map((name) => [name, form.elements[name].value]));
    try {
      await post("/api/jobs", values);
      form.reset();
      announce("Made.");
      await load();
    } catch (error) {
      fail(error);
    }
  }
  function draw() {
    const act = (job, verb, words) => h("button", { class: "btn", onclick: async () => { try { await post(`/api/jobs/${encodeURIComponent(job.id)}/${verb}`); announce(`${words}: ${job.name}`); await load(); } catch (error) { fail(error); } } }, words);
    list.replaceChildren(...rows.map((job) => {
      const off = job.enabled === false, last = job.last_status ?? job.last_error ?? "";
      const el = h("li", { class: "entry", "data-job": job.id }, h("span", { class: `dot ${off ? "off" : job.last_status === "error" || job.last_error ? "bad" : ""}` }),
        h("div", { class: "what" }, h("strong", null, job.name), " ", h("code", { class: "faint" }, job.schedule_display ?? (typeof job.schedule === "string" ? job.schedule : JSON.stringify(job.schedule))), h("p", { class: "dim cut", title: job.prompt }, job.prompt)),
        h("div", { class: "times" }, h("span", { class: "num next" }), h("span", { class: "faint num" }, job.last_run_at ? `last ${span(Math.max(0, Date.now() / 1000 - when(job.last_run_at)))} ago${last ? ": " + last : ""}` : "never ran")),
        h("div", { class: "acts" }, h("button", { class: "btn", "aria-expanded": String(histories.has(job.id)), onclick: async () => { if (!histories.delete(job.id)) await history(job); draw(); list.querySelector(`[data-job="${job.id}"] [aria-expanded]`)?.focus(); } }, "History"), act(job, "run", "Run now"), off ? act(job, "resume", "Resume") : act(job, "pause", "Pause"), twice("Delete", "Delete for good", async () => { try { await del(`/api/jobs/${encodeURIComponent(job.id)}`); await load(); } catch (error) { fail(error); } })),
        histories.has(job.id) ? h("ol", { class: "slots", "aria-label": `Slots of ${job.name}` }, histories.get(job.id).length ? histories.get(job.id).map(slot) : h("li", { class: "faint" }, "No slot has come yet.")) : null);
      el.job = job;
      return el;
    }));
    if (rows.length === 0) list.append(h("li", { class: "empty" }, glyph("job"), h("h2", null, "No jobs"), h("p", null, "A job asks the agent by itself, and delivers the answer to a platform.")));
    put(sum, rows.length ? `${rows.filter((job) => job.enabled !== false).length} of ${rows.length} on` : "");
    tick();
  }
  let next = 0;
  function tick() {
    for (const el of list.children) {
      if (!el.job) continue;
      const at = when(el.job.next_run_at), left = at === null ? null : at - Date.now() / 1000;
      put(el.querySelector(".next"), el.job.enabled === false ? "paused" : left === null ? "no next run" : left <= 0 ? "now" : `in ${span(left)}`);
    }
    if (performance.now() > next) { if (next) load(); next = performance.now() + 10_000; }
  }
  load();
  return { tick, regain: load };
}
