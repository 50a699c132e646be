// The tree: dense live rows, filters, warnings, keys. Focus stays on the list; the selected row is its active descendant.

import { count, glyph, h, narrow, place, put, reglyph, span } from "../dom.js";
import { css, FILTERS, inside, isPlace, look, warningOf, WARNINGS } from "../kinds.js";
import { VirtualList } from "../virtual.js";
import { Panel } from "./panel.js";

const AGE_FULL = Math.log(1 + 3600); // the age bar is logarithmic and full after an hour

function bar(el, part) {
  const wide = part.toFixed(3);
  if (el.wide !== wide) el.style.transform = `scaleX(${(el.wide = wide)})`;
}

/** @param {import("../types.js").Context} ctx @returns {import("../types.js").View} */
export function tree(ctx) {
  const { store, head, body } = ctx;
  store.filter = { text: "", kinds: new Set(), owner: "", warning: "" }; // a filter lasts as long as the view that shows it
  let selected = null, drawn = -1, shaped = -1, warned = 0;

  // -- header and filters
  const sum = h("span", { class: "sum wide" });
  const search = h("input", { class: "field", type: "search", placeholder: "Search nodes, owners, waits   /", "aria-label": "Search the tree", oninput: () => { store.filter.text = search.value.trim().toLowerCase(); reshape(); } });
  head.append(sum, h("span", { class: "push" }), search);
  const kinds = FILTERS.map((kind) => {
    const n = h("span", { class: "num" });
    const el = h("button", { class: "tog", "aria-pressed": "false", onclick: () => { toggle(kind); el.setAttribute("aria-pressed", store.filter.kinds.has(kind)); reshape(); } }, glyph(look(kind)[0], css(kind)), kind, n);
    return { kind, n, el };
  });
  const toggle = (kind) => store.filter.kinds.delete(kind) || store.filter.kinds.add(kind);
  const warnings = h("div", { class: "tools-warn", role: "group", "aria-label": "Warnings" });
  const follow = h("button", { class: "tog", "aria-pressed": "true", hidden: true, onclick: () => setOwner("") });
  body.append(h("div", { class: "tools", role: "toolbar", "aria-label": "Filter" }, kinds.map((one) => one.el), follow, h("span", { class: "gap" }), warnings));

  // -- the nodes that share the store, where several do
  const cluster = h("ul", { class: "cluster", "aria-label": "Nodes that share the store: press one to see its tree", hidden: true });
  body.append(cluster);
  function drawCluster() {
    cluster.hidden = store.cluster.length < 2;
    if (cluster.hidden) return;
    const lines = store.cluster.map((one) => {
      const passed = store.now() - one.at, left = one.lease_seconds - passed;
      const state = left <= 0 ? "its lease has expired" : one.answers ? `lease ${span(Math.round(left))}` : "does not answer";
      const words = [one.name, `up ${span(Math.round(one.age_seconds + passed))}`, state, one.draining ? "draining" : "", count(one.turns, "turn"), count(one.jobs, "job"), `${count(one.sessions, "session")} bound`, (one.runs ?? []).join(", ")];
      return [words.filter(Boolean).join(" · "), left <= 0 || !one.answers, one.incarnation];
    });
    while (cluster.children.length > lines.length) cluster.lastChild.remove();
    while (cluster.children.length < lines.length) {
      const button = h("button", { onclick: () => { choose(null); ctx.visit(button.host); } });
      cluster.append(h("li", null, button));
    }
    lines.forEach(([words, bad, host], i) => {
      const button = cluster.children[i].firstChild;
      button.host = host;
      put(button, words);
      button.className = bad ? "cut bad" : "cut";
      if (host === store.host) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current");
    });
  }

  // -- the list
  body.append(h("div", { class: "cols", "aria-hidden": "true" }, ["Node", "Waits on", "Owner", "Age", "Deadline"].map((word) => h("span", null, word))));
  const list = h("div", { class: "list", role: "treegrid", "aria-label": "Task tree", tabindex: "0", "data-home": "", "aria-colcount": "5" });
  const nothing = h("div", { class: "empty", hidden: true });
  body.append(list, nothing, h("footer", { class: "keys" }, [["j k", "move"], ["h l", "fold"], ["Enter", "details"], ["x", "stop"], ["f", "follow session"], ["w", "next warning"], ["?", "all keys"]].map(([key, words]) => h("span", null, h("kbd", null, key), " " + words))));
  const rows = new VirtualList(list, makeRow, fillRow);
  const panel = new Panel(ctx, body, { close: () => choose(null), choose: (key) => choose(store.nodes.get(key), true), follow: (owner) => setOwner(owner) });
  list.addEventListener("click", (event) => {
    const el = event.target.closest(".row");
    if (!el) return;
    if (event.target.closest(".twist")) fold(el.row, !store.collapsed.has(el.row.key));
    else choose(el.row);
  });

  function makeRow() {
    const cell = (name, ...inner) => h("div", { class: name, role: "gridcell" }, ...inner);
    const el = h("div", { class: "row", role: "row" });
    Object.assign(el, { guide: h("span", { class: "in" }), glyph: glyph("turn"), what: h("span", { class: "what cut" }), nid: h("span", { class: "id mono cut" }), nbelow: h("span", { class: "below" }) });
    Object.assign(el, { sign: glyph("warn"), words: h("span", { class: "cut" }), chip: h("span", { class: "chip cut" }), age: h("span"), ageBar: h("b"), left: h("span"), leftBar: h("b") });
    el.append(cell("node", el.guide, h("button", { class: "twist", tabindex: "-1", "aria-hidden": "true" }, glyph("open")), el.glyph, el.what, el.nid, el.nbelow),
      (el.waitCell = cell("waits cut", el.sign, el.words)), cell("owner cut", el.chip), (el.ageCell = cell("time age", el.age, h("i", null, el.ageBar))), (el.leftCell = cell("time left", el.left, h("i", null, el.leftBar))));
    return el;
  }

  function fillRow(el, node, index, fresh) {
    const at = store.now(), folded = store.collapsed.has(node.key), gone = node.closedAt !== null, warning = warningOf(node, at);
    if (fresh) {
      el.id = "row" + index;
      el.removeAttribute("aria-label");
      el.setAttribute("aria-level", node.depth + 1);
      el.setAttribute("aria-rowindex", index + 1);
      const step = narrow.matches ? 8 : 16;
      el.guide.style.width = `${node.depth * step}px`;
      el.style.setProperty("--shift", `${node.depth * step + 56}px`);
      if (el.kind !== node.kind) reglyph(el.glyph, look((el.kind = node.kind))[0], css(node.kind));
      const [where, chat] = place(node.owner);
      put(el.chip, [where, chat].filter(Boolean).join(" · "));
      el.chip.hidden = node.owner === "";
      el.chip.classList.toggle("same", node.parent?.owner === node.owner); // said once, repeated quietly
    }
    put(el.what, node.kind === "lane" ? place(node.id).filter(Boolean).join(" · ") : node.name || node.id);
    el.what.classList.toggle("code", node.kind === "process");
    put(el.nid, node.name ? node.id : node.kind === node.id || node.kind === "lane" ? "" : node.kind);
    put(el.nbelow, folded && node.children.size > 0 ? `+ ${store.below(node)}` : "");
    if (node.children.size > 0) el.setAttribute("aria-expanded", String(!folded)); else el.removeAttribute("aria-expanded");
    el.setAttribute("aria-selected", String(node === selected));
    const badness = warning ? WARNINGS[warning][0] : "";
    const look_ = `row ${css(node.kind)} ${badness}${node.faded ? " faded" : ""}${gone ? " gone" : ""}${at - node.seenAt < 0.5 && at - node.openedAt < 1 ? " fresh" : ""}`;
    if (el.className !== look_) el.className = look_;
    const words = gone ? node.how : warning === "blocked" ? node.note : warning === "deaf" ? "deaf: does not listen to its cancellation" : node.waits || inside(node);
    put(el.words, words);
    el.waitCell.classList.toggle("idle", !gone && !warning && !node.waits);
    const sign = warning === "person" ? "person" : warning ? "warn" : "";
    if (el.signed !== sign) { el.signed = sign; el.sign.toggleAttribute("hidden", !sign); el.sign.classList.toggle("off", !sign); reglyph(el.sign, sign || "warn", sign ? "" : "off"); }
    const age = (gone ? node.closedAt : at) - node.openedAt;
    put(el.age, span(age));
    bar(el.ageBar, Math.min(1, Math.log(1 + age) / AGE_FULL));
    const none = node.deadlineAt === null || gone, left = none ? 0 : node.deadlineAt - at, part = none ? 0 : Math.max(0, left / (node.deadlineAt - node.openedAt));
    put(el.left, none ? "" : left < 0 ? `${span(-left)} over` : span(left));
    const leftLook = `time left${none ? " none" : left < 0 ? " over" : part < 0.2 ? " soon" : ""}`;
    if (el.leftCell.className !== leftLook) el.leftCell.className = leftLook;
    bar(el.leftBar, part);
    if (node !== selected) return;
    list.setAttribute("aria-activedescendant", el.id);
    const said = `${node.kind} ${node.name || node.id}, ${words || "holds others"}, age ${span(Math.round(age))}${badness ? ", warning" : ""}`;
    if (fresh || el.getAttribute("aria-label") === null) el.setAttribute("aria-label", said);
  }

  // -- what a person does
  function choose(node, bring = false) {
    selected = node ?? null;
    if (node) for (let up = node.parent; up; up = up.parent) if (store.collapsed.delete(up.key)) shaped = -1;
    panel.show(selected);
    body.classList.toggle("with-panel", selected !== null);
    if (shaped === -1) reshape();
    if (selected && bring) rows.reveal(rows.rows.indexOf(selected));
    rows.draw();
    if (!selected) list.focus({ preventScroll: true });
  }
  function fold(node, folded) {
    if (!node || node.children.size === 0) return;
    store.collapsed[folded ? "add" : "delete"](node.key);
    reshape();
  }
  function setOwner(owner) {
    store.filter.owner = owner;
    follow.hidden = owner === "";
    follow.replaceChildren(`follows ${place(owner).filter(Boolean).join(" · ")}`, glyph("close"));
    reshape();
  }
  function move(by) {
    const at = rows.rows.indexOf(selected), next = rows.rows[Math.min(rows.rows.length - 1, Math.max(0, at + by))];
    if (!next) return;
    selected = next;
    if (body.classList.contains("with-panel")) panel.show(next);
    rows.reveal(rows.rows.indexOf(next));
    rows.draw();
  }
  function nextWarning() {
    const all = [...store.warnings().values()].flat();
    if (all.length > 0) choose(all[warned++ % all.length], true);
  }
  function key(event) {
    const page = Math.floor(list.clientHeight / rows.height);
    const moves = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -1e6, End: 1e6, G: 1e6 };
    if (event.target.closest(".panel, .head, .tools, .rail") && !"jkxwf".includes(event.key) && event.key !== "Escape") return false;
    if (event.key in moves) move(moves[event.key]);
    else if (event.key === "h" || event.key === "ArrowLeft") selected?.children.size > 0 && !store.collapsed.has(selected.key) ? fold(selected, true) : selected?.parent && choose(selected.parent, true);
    else if (event.key === "l" || event.key === "ArrowRight") fold(selected, false);
    else if (event.key === "Enter" && selected) choose(selected);
    else if (event.key === "x" && selected) { choose(selected); panel.stop(); }
    else if (event.key === "f" && selected?.owner) setOwner(store.filter.owner ? "" : selected.owner);
    else if (event.key === "w") nextWarning();
    else if (event.key === "Escape") { if (!panel.disarm()) choose(null); } else return false;
    return true;
  }

  function reshape() {
    shaped = store.shape;
    const all = store.rows();
    list.setAttribute("aria-rowcount", all.length);
    const idle = all.length > 0 && !store.filtering && !all.some((node) => !isPlace(node.kind));
    nothing.hidden = all.length > 0 && !idle;
    nothing.classList.toggle("low", idle);
    list.hidden = all.length === 0;
    if (all.length === 0) nothing.replaceChildren(glyph("tree"), h("h2", null, "Nothing matches"), h("p", null, "No live node has these words. Ended work is in Sessions and Timeline."));
    else if (idle) nothing.replaceChildren(glyph("tree"), h("h2", null, "Nothing runs"), h("p", null, "The server listens. A message, a webhook, a job or a run appears here as it begins."), h("code", null, "hermes-trio chat"));
    rows.set(all);
  }
  function tick() {
    if (store.shape !== shaped || (store.filtering && store.changed !== drawn)) reshape();
    else rows.draw(); // ages, bars and words of the visible rows
    drawn = store.changed;
    panel.tick();
    drawCluster();
    const of = store.kinds;
    for (const one of kinds) put(one.n, (of.get(one.kind) ?? 0).toLocaleString("en"));
    put(sum, `${count(store.size, "node")} · ${count(of.get("turn") ?? 0, "turn")} · ${count(of.get("lane") ?? 0, "lane")}`);
    const found = store.warnings(), line = [...found].map(([id, nodes]) => id + nodes.length).join() + store.filter.warning;
    if (warnings.line === line) return;
    warnings.line = line;
    warnings.replaceChildren(...Object.entries(WARNINGS).filter(([id]) => found.has(id)).map(([id, [bad, one, more]]) => {
      const n = found.get(id).length;
      const press = () => { if (n === 1) return choose(found.get(id)[0], true); store.filter.warning = store.filter.warning === id ? "" : id; reshape(); };
      return h("button", { class: `tog ${bad}`, "aria-pressed": String(store.filter.warning === id), onclick: press }, glyph(id === "person" ? "person" : "warn"), id === "blocked" ? one : `${n} ${n === 1 ? one : more}`);
    }));
  }
  tick();
  list.focus({ preventScroll: true });
  return { tick, key, choose };
}
