// What a run or a turn did: spans on a time axis, and its events beside them. Pointing at one shows the other.

import { Follower, get } from "../api.js";
import { glyph, h, now, place, put, span } from "../dom.js";
import { css, look } from "../kinds.js";
import { RunSpans, transcriptSpans } from "../spans.js";

const SHOWN = 140; // at most so many spans and events; the newest of a very long run
const STATUS = { running: "", queued: "", waiting_for_approval: "warn", completed: "good", finished: "good", cancelled: "bad", failed: "bad" };
const WORDS = { model: "model", process: "processes", person: "waits for a person", thread: "threads" };
const KEYS = { model: "model", process: "process", wait: "person", thread: "thread" };

/** What a run is about, in one line. */
const titleOf = (run) => (run.input_preview || run.output || run.error || "").split("\n")[0];

/** @param {import("../types.js").Context} ctx @returns {import("../types.js").View} */
export function timeline(ctx) {
  const { store, head, body, rest, fail } = ctx;
  let work = null, drawn = "", stored = [], follower = null, asked = "";
  const sum = h("span", { class: "sum" }), list = h("ol", { class: "runs scroll", "aria-label": "Turns and runs" });
  const axis = h("div", { class: "axis", "aria-hidden": "true" }), spans = h("ol", { class: "spans", "aria-label": "Spans" });
  const events = h("ol", { class: "events scroll", "aria-label": "Events", tabindex: "0" });
  const title = h("h2", { class: "cut" }), facts = h("div", { class: "facts" }), mix = h("div", { class: "mix", role: "img" });
  const line = h("i", { class: "nowline" });
  const fall = h("section", { class: "fall scroll", tabindex: "0", "data-home": "", "aria-label": "Timeline" }, h("div", { class: "runhead" }, title, facts, mix), h("div", { class: "chart" }, axis, spans, line));
  const nothing = h("div", { class: "empty" }, glyph("timeline"), h("h2", null, "No turns yet"), h("p", null, "A turn appears here when it begins."), h("code", null, "hermes-trio chat"));
  head.append(sum);
  body.append(list, fall, events, nothing);

  /** Both clocks: turns that the page saw count from its start, stored runs from 1970. */
  const clockOf = (one) => (one.stored ? Date.now() / 1000 : store.now());
  const light = (id) => { for (const el of body.querySelectorAll("[data-span]")) el.classList.toggle("lit", id !== "" && el.dataset.span === id); };
  const all = () => [...[...store.turns.values()].filter((one) => one.end === null).reverse(), ...stored, ...[...store.turns.values()].filter((one) => one.end !== null && !one.owner.includes("run_")).reverse()];

  async function loadRuns() {
    try {
      const { data } = await get("/v1/runs?limit=30");
      stored = data.filter((one) => one.ended_at).map((run) => ({ stored: true, run, id: run.run_id, name: titleOf(run) || run.run_id, owner: run.session_id, start: run.created_at, end: run.ended_at, status: run.status, spans: [], events: [] }));
      drawn = "";
      if (work === null) first();
    } catch (error) {
      fail(error);
    }
  }
  function first() {
    const every = all();
    const found = every.find((one) => String(one.id) === asked) ?? every.find((one) => one.end === null) ?? every[0];
    if (found) choose(found);
  }
  function openRun(run) {
    const one = Object.assign(new RunSpans(run), { stored: true, run });
    one.name = titleOf(run) || run.run_id;
    follower = new Follower(`/v1/runs/${encodeURIComponent(run.run_id)}/events`, {
      hear: ({ data }) => { one.take(data); drawn = ""; },
      finished: (problem) => one.over || (problem === null && run.ended_at),
      state: (name, problem) => { if (name === "refused") fail(problem); },
    });
    return one;
  }
  function choose(one) {
    follower?.close();
    follower = null;
    work = one.stored && one.run && one.spans.length === 0 ? openRun(one.run) : one;
    drawn = "";
    draw();
    list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  }

  function draw() {
    const every = all();
    nothing.hidden = work !== null;
    for (const el of [list, fall, events]) el.hidden = work === null;
    put(sum, `${every.filter((one) => one.end === null).length} live · ${every.length} shown`);
    if (work === null) return;
    const until = work.end ?? clockOf(work), long = Math.max(0.5, until - work.start);
    // 1. the list and what does not move
    const mark = `${work.id}${work.spans.length}${work.events?.length}${work.status}${every.map((one) => one.id + (one.end === null)).join()}`;
    if (mark !== drawn) {
      drawn = mark;
      list.replaceChildren(...every.map((one) => h("li", null, h("button", { class: "pick", "aria-current": one.id === work.id ? "true" : null, onclick: () => choose(one) },
        h("span", { class: `dot ${one.end ? "off" : ""}` }), h("span", { class: "cut" }, one.name || one.id), h("span", { class: "faint cut" }, place(one.owner).filter(Boolean).join(" · ")), h("span", { class: "num faint len" })))));
      list.drawn = every;
      put(title, work.name || String(work.id));
      const state = work.status ?? (work.end === null ? "running" : work.how);
      facts.replaceChildren(h("code", null, String(work.id)), h("span", { class: `chip ${STATUS[state] ?? ""}` }, state.replaceAll("_", " ")), h("span", { class: "dim" }, place(work.owner).filter(Boolean).join(" · ")), h("span", { class: "num dim long" }));
      const shown = work.spans.slice(0, SHOWN);
      spans.replaceChildren(...shown.map((one) => {
        const kind = one.kind === "wait" ? "k-person" : css(one.kind);
        return h("li", { class: one.kind === "wait" ? "k-person wait" : kind, "data-span": one.id, onmouseenter: () => light(one.id), onmouseleave: () => light("") },
          h("span", { class: "name cut" }, h("span", { class: "in" }), glyph(one.kind === "wait" ? "person" : look(one.kind)[0], kind), h("span", { class: "cut" + (one.kind === "process" ? " mono" : ""), title: one.label }, one.label)),
          h("span", { class: "lane" }, h("i", { class: "bar" }), h("span", { class: "num len" })));
      }));
      shown.forEach((one, i) => { spans.children[i].one = one; spans.children[i].querySelector(".in").style.width = `${one.depth * 12}px`; });
      const said = work.events?.length ? work.events : work.spans.map((one) => ({ at: one.start, event: one.kind, text: one.label }));
      const atEnd = events.scrollTop + events.clientHeight > events.scrollHeight - 40;
      events.replaceChildren(...said.slice(-SHOWN).map((one) => h("li", { class: one.event.startsWith("approval") ? "warn" : "" }, h("span", { class: "num faint" }, "+" + span(Math.max(0, one.at - work.start))), h("span", { class: "mono cut" }, one.event), h("span", { class: "dim cut" }, one.text))));
      if (atEnd) events.scrollTop = events.scrollHeight;
    }
    // 2. what moves while the work is alive
    const step = [0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 21600, 86400].find((one) => long / one <= 8) ?? 604800;
    const ticks = Array.from({ length: Math.floor((long * 0.95) / step) + 1 }, (_, i) => i * step);
    while (axis.children.length < ticks.length) axis.append(h("span", null, h("b")));
    while (axis.children.length > ticks.length) axis.lastChild.remove();
    ticks.forEach((at, i) => { axis.children[i].style.left = `${(100 * at) / long}%`; put(axis.children[i].firstChild, at === 0 ? "0" : at >= 60 ? `${Math.floor(at / 60)}:${String(Math.round(at % 60)).padStart(2, "0")}` : `${Number(at.toFixed(1))} s`); });
    const total = {};
    for (const el of spans.children) {
      const { one } = el, end = one.end ?? until, from = Math.max(0, (one.start - work.start) / long), wide = (end - one.start) / long, bar = el.querySelector(".bar"), len = el.querySelector(".len");
      bar.style.left = `${100 * from}%`;
      bar.style.width = `max(2px, ${100 * wide}%)`;
      el.classList.toggle("alive", one.end === null);
      put(len, span(end - one.start));
      len.style.left = from + wide > 0.86 ? "" : `calc(${100 * (from + wide)}% + 6px)`;
      len.style.right = from + wide > 0.86 ? `calc(${100 * (1 - from)}% + 6px)` : "";
      len.classList.toggle("inside", from + wide > 0.86 && from < 0.1);
      if (KEYS[one.kind]) total[KEYS[one.kind]] = (total[KEYS[one.kind]] ?? 0) + end - one.start;
    }
    const parts = Object.entries(total);
    if (mix.children.length !== parts.length) mix.replaceChildren(...parts.map(([key]) => h("span", { class: "k-" + key }, h("i"), h("span"))));
    parts.forEach(([key, seconds], i) => { put(mix.children[i].lastChild, `${WORDS[key]} ${span(seconds)}`); mix.children[i].className = "k-" + key; });
    mix.setAttribute("aria-label", parts.map(([key, seconds]) => `${WORDS[key]} ${span(seconds)}`).join(", ") || "no time spent yet");
    put(facts.querySelector(".long"), span(until - work.start));
    line.hidden = work.end !== null;
    for (const [i, one] of (list.drawn ?? []).entries()) { const el = list.children[i]?.querySelector(".len"); if (el) put(el, span((one.end ?? clockOf(one)) - one.start)); }
  }

  async function openSession(id) {
    try {
      const [{ session }, { data }] = await Promise.all([get(`/api/sessions/${encodeURIComponent(id)}`), get(`/api/sessions/${encodeURIComponent(id)}/messages`)]);
      choose(Object.assign(transcriptSpans(session, data), { stored: true, run: null }));
    } catch (error) {
      fail(error);
    }
  }
  async function openStored(id) {
    try {
      choose({ stored: true, run: await get(`/v1/runs/${encodeURIComponent(id)}`), spans: [] });
    } catch (error) {
      fail(error);
    }
  }

  if (rest[0] === "session") openSession(rest[1]);
  else if (rest[0]?.startsWith("run_")) openStored(rest[0]);
  else asked = rest[0] ?? "";
  loadRuns();
  if (rest.length === 0 || !rest[0]) first();
  draw();
  return {
    tick: draw,
    regain: loadRuns,
    leave: () => follower?.close(),
    key: (event) => {
      const by = { j: 1, k: -1, ArrowDown: 1, ArrowUp: -1 }[event.key], every = all();
      if (by && work && every.length > 0) choose(every[Math.min(every.length - 1, Math.max(0, every.findIndex((one) => one.id === work.id) + by))]);
      return Boolean(by);
    },
  };
}
