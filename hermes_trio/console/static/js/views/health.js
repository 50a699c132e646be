// How the server is: one sentence, the checks, the platforms, and the last six minutes as small charts.

import { get, post } from "../api.js";
import { glyph, h, put, s, span } from "../dom.js";
import { twice } from "../twice.js";

const W = 320, H = 64;
const STACK = ["turn", "model", "tool", "process", "delegation", "thread"], COLOUR = { delegation: "child" };

/** A chart of one series: a line, its area, the newest value in words. */
function chart(title, read, words, limit = 0) {
  const value = h("strong", { class: "num" }), area = s("path", { class: "area" }), line = s("path", { class: "line" }), top = h("span", { class: "num faint top" });
  const el = h("figure", { class: "tile" }, h("figcaption", null, h("span", { class: "dim" }, title), value), h("div", { class: "plot" }, s("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": title }, s("path", { class: "grid", d: `M0 .5H${W}M0 ${H / 2}H${W}M0 ${H - 0.5}H${W}` }), area, line), top));
  el.draw = (samples) => {
    const all = samples.map(read), high = Math.max(limit, ...all) * 1.1 || 1;
    const d = all.map((y, i) => `${i ? "L" : "M"}${((W * i) / Math.max(1, all.length - 1)).toFixed(1)} ${(H - (H * y) / high).toFixed(1)}`).join("");
    line.setAttribute("d", d);
    area.setAttribute("d", `${d}L${W} ${H}L0 ${H}Z`);
    put(value, words(all.at(-1) ?? 0));
    put(top, words(high / 1.1));
  };
  return el;
}

/** Nodes by kind, stacked, in the colours of the tree. */
function stacked() {
  const paths = STACK.map((kind) => s("path", { class: "layer k-" + (COLOUR[kind] ?? kind) })), value = h("strong", { class: "num" });
  const el = h("figure", { class: "tile wide" }, h("figcaption", null, h("span", { class: "dim" }, "Work in the tree, by kind"), value),
    h("div", { class: "plot" }, s("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": "Nodes by kind" }, s("path", { class: "grid", d: `M0 .5H${W}M0 ${H / 2}H${W}M0 ${H - 0.5}H${W}` }), paths)),
    h("div", { class: "legend" }, STACK.map((kind) => h("span", { class: "k-" + (COLOUR[kind] ?? kind) }, h("i"), kind))));
  el.draw = (samples) => {
    const base = samples.map(() => 0), high = Math.max(1, ...samples.map(({ kinds }) => STACK.reduce((sum, kind) => sum + (kinds[kind] ?? 0), 0))) * 1.08;
    const point = (i) => `${((W * i) / Math.max(1, samples.length - 1)).toFixed(1)} ${(H - (H * base[i]) / high).toFixed(1)}`;
    STACK.forEach((kind, k) => {
      const under = samples.map((_, i) => point(i)).reverse();
      samples.forEach(({ kinds }, i) => { base[i] += kinds[kind] ?? 0; });
      paths[k].setAttribute("d", `M${samples.map((_, i) => point(i)).join("L")}L${under.join("L")}Z`);
    });
    put(value, `${base.at(-1) ?? 0} nodes`);
  };
  return el;
}

const bytes = (n) => (n >= 1e12 ? `${(n / 1e12).toFixed(1)} TB` : n >= 1e9 ? `${(n / 1e9).toFixed(0)} GB` : `${(n / 1e6).toFixed(0)} MB`);
const NAMES = { state_db: "Store", config: "Configuration", model: "Model", disk: "Disk", gateway: "Gateway", background_queues: "Queues", confinement: "Commands", mcp: "MCP", ends: "Ends", nodes: "Nodes" };

function wordsOf(name, check) {
  if (name === "disk" && check.used !== undefined) return `${Math.round(100 * check.used)} % used, ${bytes(check.free_bytes)} free`;
  if (name === "background_queues") return `${check.active_api_runs} runs, ${check.outbox ?? 0} replies and ${check.inbox ?? 0} messages wait`;
  if (name === "confinement") return `profile ${check.profile}, ${check.status === "ok" ? "every protection is active" : `${check.missing?.length ?? 0} missing`}`;
  if (name === "nodes" && check.count !== undefined) return `${check.count} share the store`;
  if (name === "ends") return `${check.count} ends could not be written yet`;
  return check.detail ?? (check.status === "ok" ? "well" : check.status);
}

/** @param {import("../types.js").Context} ctx @returns {import("../types.js").View} */
export function health({ samples, store, me, head, body, go, announce, fail }) {
  samples.wanted = true;
  const whole = (n) => String(Math.round(n));
  const charts = [stacked(), chart("Turns at once", (one) => one.kinds.turn ?? 0, whole, 10), chart("Requests a second", (one) => one.requests, (n) => n.toFixed(1), 8), chart("The loop is late by", (one) => one.late, (n) => `${n.toFixed(1)} ms`, 50), chart("Waits in the outbox", (one) => one.outbox, whole, 4)];
  const check = (name, words, look = "") => h("li", null, h("span", { class: `dot ${look}` }), h("span", { class: "cut" }, name), h("span", { class: "dim cut", title: words }, words));
  const sum = h("span", { class: "sum wide" }), verdict = h("section", { class: "verdict" }), checks = h("ul", { class: "checks" }), platforms = h("ul", { class: "checks" }), drain = h("div", { class: "drain" }), guards = h("ul", { class: "guards" });
  head.append(sum);
  body.append(h("div", { class: "scroll pad", tabindex: "-1", "data-home": "" }, verdict, h("div", { class: "tiles" }, charts),
    h("div", { class: "lists" }, h("section", null, h("h3", null, "Checks"), checks), h("section", null, h("h3", null, "Platforms"), platforms), h("section", null, h("h3", null, "Protections"), guards), me.admin ? h("section", null, h("h3", null, "Drain"), drain) : null)));
  const begin = () => twice("Drain the server…", "Refuse new work for good", async () => {
    drain.replaceChildren(h("p", { class: "dim" }, "Draining: turns may end, the rest is stopped."));
    try {
      showDrain(await post("/admin/drain"));
    } catch (error) {
      fail(error);
    }
  });
  function showDrain(found) {
    if (!found.draining) {
      drain.replaceChildren(h("p", { class: "dim" }, "New work is refused, turns may end, the rest is stopped, and the report says what became of each. Final: the server then waits to be stopped."), begin());
      return;
    }
    const { report } = found;
    if (!report) drain.replaceChildren(h("p", { class: "dim" }, `Drains: ${found.active_turns} turns still run.`));
    else {
      announce("The server has drained.");
      drain.replaceChildren(h("div", { class: `receipt ${report.ok ? "ok" : "not"}` }, h("div", { class: "sum" }, glyph(report.ok ? "check" : "warn"), report.ok ? `Drained · nothing runs` : `Not empty: ${report.remaining.join(", ")}`, h("span", { class: "push num" }, span(report.seconds))),
        h("ol", null, [["turns left", report.turns], ["jobs left", report.jobs], ["threads left", report.threads], ["turns cancelled", report.cancelled], ...Object.entries(report.backlog).map(([name, n]) => [`${name} kept in the store`, n])].map(([words, n]) => h("li", null, glyph("job"), h("span", null, words), h("span"), h("span", { class: "num" }, String(n)))))));
    }
  }
  async function load() {
    try {
      const found = await get("/health/detailed");
      put(sum, `version ${found.version} · pid ${found.pid} · up ${span(Date.now() / 1000 - found.started_at)}`);
      const bad = Object.entries(found.readiness.checks).filter(([, one]) => one.status !== "ok"), away = Object.entries(found.platforms).filter(([, one]) => one.state && one.state !== "connected");
      const blocked = store.root?.note.includes("blocked") ? store.root.note : "";
      const verdictWords = found.gateway_state === "draining" ? "Draining: no new work is taken" : away.length > 0 ? `Degraded: ${away.map(([name]) => name).join(", ")} not connected` : bad.length > 0 ? `Degraded: ${bad.map(([name]) => NAMES[name] ?? name).join(", ")}` : "All is well";
      const calm = verdictWords === "All is well";
      verdict.replaceChildren(h("span", { class: `dot ${calm ? "" : "warn"}` }), h("div", null, h("h2", null, verdictWords), h("p", { class: "dim" }, calm ? `${found.active_agents} turns run, ${found.tree_nodes.toLocaleString("en")} nodes in the tree.` : "Everything else is well. What was accepted is kept, and goes on when it can.")), h("button", { class: "btn", onclick: () => go("tree") }, "Show the tree"));
      checks.replaceChildren(...Object.entries(found.readiness.checks).map(([name, one]) => check(NAMES[name] ?? name, wordsOf(name, one), one.status === "ok" ? "" : "warn")), check("Loop", blocked || "was not blocked lately", blocked ? "warn" : ""));
      const words = found.readiness.checks.confinement?.words ?? ["commands: this server has no tools that run commands"];
      guards.replaceChildren(...words.map((line) => h("li", null, h("span", { class: `dot ${/degraded|as root|mend/.test(line) ? "warn" : ""}` }), h("span", null, line.replace(/^commands: /, "")))));
      const all = Object.entries(found.platforms);
      platforms.replaceChildren(...(all.length ? all.map(([name, one]) => check(name, [one.state, one.error ?? one.problem].filter(Boolean).join(": "), one.state === "connected" ? "" : "bad")) : [check("None", "no chat platform is configured", "off")]));
      if (me.admin) showDrain(await get("/admin/drain"));
    } catch (error) {
      fail(error);
    }
  }
  let drawn = null, next = 0;
  const tick = () => {
    if (performance.now() > next) { next = performance.now() + 5000; if (!drain.querySelector(".armed")) load(); }
    const last = samples.all.at(-1);
    if (last === undefined || last === drawn) return;
    drawn = last;
    for (const one of charts) one.draw(samples.all);
  };
  tick();
  return { tick, regain: load, leave: () => { samples.wanted = false; } };
}
