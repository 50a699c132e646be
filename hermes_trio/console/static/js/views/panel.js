// The panel beside the tree: what a node is, what it waited on, and the stop with its receipt.

import { count, glyph, h, ms, place, put, span } from "../dom.js";
import { stopNode } from "../api.js";
import { css, inside, isPlace, look, stoppable, warningOf, WARNINGS } from "../kinds.js";

const ARMED = 4000; // milliseconds in which a second press means it

/** A receipt that fills line by line. Also used by the chat. */
export class Receipt {
  constructor() {
    this.sum = h("div", { class: "sum" }, "Stopping…");
    this.lines = h("ol");
    this.el = h("div", { class: "receipt", role: "log", "aria-label": "Receipt of the stop" }, this.sum, this.lines);
  }
  line({ node, kind, name, how, milliseconds }) {
    const still = how === "still running", harsh = how === "SIGKILL";
    this.lines.append(h("li", { class: still ? "still" : harsh ? "kill" : "" }, glyph(look(kind)[0], css(kind)), h("span", { class: "cut" }, h("span", { class: "mono" }, node), " ", h("span", { class: "faint" }, name)), h("span", { class: "how" }, how), h("span", { class: "num" }, ms(milliseconds))));
  }
  lost() { this.sum.replaceChildren(glyph("warn"), "The connection was lost. The stop goes on."); }
  end({ ok, milliseconds, remaining, lines, already_ended }) {
    this.el.classList.add(ok ? "ok" : "not");
    const words = already_ended ? "It had already ended" : ok ? `Stopped · ${count(lines.length, "node")} · empty` : `Not empty: ${remaining.join(", ")} still runs`;
    this.sum.replaceChildren(glyph(ok ? "check" : "warn"), words, h("span", { class: "push num" }, ms(milliseconds)));
  }
}

/** What is known of the chosen node, its history, and the stop with its receipts. */
export class Panel {
  /** @param {import("../types.js").Context} ctx @param {HTMLElement} body @param {object} acts */
  constructor(ctx, body, acts) {
    Object.assign(this, { ctx, body, acts, node: null, el: null, receipts: new Map(), armed: 0 });
  }

  show(node) {
    if (node === this.node) return;
    this.el?.remove();
    this.node = node;
    this.armed = 0;
    if (node === null) return;
    const [where, chat] = place(node.owner), code = node.kind === "process";
    this.now = h("div", { class: "now" });
    this.age = h("dd", { class: "num" });
    this.left = h("dd", { class: "num" });
    this.leftWords = h("span");
    this.meter = h("i", { class: "meter" });
    this.left.append(this.leftWords, this.meter);
    this.below = h("dd");
    this.note = h("dd");
    this.kids = h("ul", { class: "kids" });
    this.past = h("ol", { class: "past" });
    this.button = h("button", { class: "btn danger", onclick: () => this.stop() });
    this.hint = h("span", { class: "faint" });
    this.slot = h("section", { hidden: true }, h("h3", null, "Receipt"));
    const way = [];
    for (let up = node.parent; up; up = up.parent) way.unshift(h("button", { onclick: ((key) => () => this.acts.choose(key))(up.key) }, up.kind === "lane" ? "lane" : up.name && up.kind !== "process" && up.kind !== "turn" ? up.name : up.kind));
    const row = (word, value) => [h("dt", null, word), value];
    this.el = h("aside", { class: "panel", "aria-label": `Details of ${node.kind} ${node.id}` },
      h("header", null, glyph(look(node.kind)[0], css(node.kind)), h("span", { class: "dim" }, node.kind), h("code", { class: "faint cut" }, node.id === node.kind ? "" : node.id),
        h("button", { class: "btn quiet push", "aria-label": "Close the details", onclick: () => this.acts.close() }, glyph("close"))),
      h("div", { class: "body" },
        h(code ? "pre" : "h2", { class: "title" }, node.kind === "lane" ? place(node.id).filter(Boolean).join(" · ") : node.name || node.id), this.now,
        h("dl", null,
          node.owner ? row("Owner", h("dd", null, [where, chat].filter(Boolean).join(" · "), " ", h("button", { class: "btn quiet", onclick: () => this.acts.follow(node.owner) }, "Follow"))) : null,
          row("Age", this.age), row("Deadline", this.left), row("Below it", this.below), node.note ? row("Note", this.note) : null,
          way.length > 0 ? row("Inside", h("dd", { class: "path" }, way.map((one, i) => [i > 0 ? "›" : null, one]))) : null),
        this.slot, h("section", { class: "nest" }, h("h3", null, "Below it"), this.kids), h("section", null, h("h3", null, "What it waited on"), this.past)),
      h("footer", null, this.button, this.hint));
    const old = this.receipts.get(node.key);
    if (old) this._slip(old);
    this.body.append(this.el);
    this.tick();
  }

  _slip(receipt) { this.slot.hidden = false; this.slot.replaceChildren(h("h3", null, "Receipt"), receipt.el); }

  tick() {
    const { node } = this, { store } = this.ctx;
    if (node === null) return;
    const at = store.now(), gone = node.closedAt !== null, warning = warningOf(node, at), below = store.below(node), left = node.deadlineAt === null || gone ? null : node.deadlineAt - at;
    const words = gone ? `Ended: ${node.how}` : warning === "deaf" ? "Deaf: it was told to end and did not listen" : warning === "blocked" ? node.note : warning === "person" ? `Waits for a person: ${node.waits}` : node.waits ? `Waits on ${node.waits}` : isPlace(node.kind) ? "Holds others" : inside(node).replace(/^./, (one) => one.toUpperCase()) || "Holds others";
    put(this.now, words);
    this.now.className = "now " + (warning ? WARNINGS[warning][0] : "");
    put(this.age, span((gone ? node.closedAt : at) - node.openedAt));
    put(this.leftWords, left === null ? "none" : left < 0 ? `${span(-left)} over` : `in ${span(left)}`);
    this.meter.style.setProperty("--part", left === null ? 0 : Math.max(0, left / (node.deadlineAt - node.openedAt)).toFixed(3));
    this.meter.hidden = left === null;
    put(this.below, below === 0 ? "nothing" : count(below, "node"));
    put(this.note, node.note);
    const kids = [...this._below(node)], shown = kids.map((one) => one.key + one.waits + one.closedAt).join();
    this.kids.parentNode.hidden = kids.length === 0;
    if (this.kids.shown !== shown) { this.kids.shown = shown; this.kids.replaceChildren(...kids.map((one) => h("li", null, h("button", { onclick: () => this.acts.choose(one.key) }, glyph(look(one.kind)[0], css(one.kind)), h("span", { class: "cut" + (one.kind === "process" ? " mono" : "") }, one.name || one.id), h("span", { class: "faint cut" }, one.waits || inside(one)))))); }
    const log = node.log.map(([when, what]) => `${span(at - when)}|${what ? "waits on " + what : "works"}`).reverse();
    if (this.past.log !== log.join()) { this.past.log = log.join(); this.past.replaceChildren(...(log.length ? log : ["nothing since this page looks"]).slice(0, 8).map((one) => h("li", { class: log.length ? "" : "none" }, ...one.split("|").map((part) => h("span", { class: "cut" }, part))))); }
    if (this.armed && performance.now() - this.armed > ARMED) this.armed = 0;
    const target = gone ? null : stoppable(node), can = target !== null && !this.receipts.has(target.key);
    this.button.hidden = !can;
    this.target = target;
    this.button.parentNode.hidden = gone || (target !== null && !can);
    this.button.classList.toggle("armed", this.armed > 0);
    const under = target === null ? 0 : store.below(target), kind = target === null ? "" : target === node ? node.kind : `${target.kind} ${target.kind === "tool" ? target.name : ""}`.trim();
    const label = this.armed ? `Press again to stop ${count(under + 1, "node")}` : under > 0 ? `Stop ${kind} and ${under} below` : `Stop ${kind}`;
    if (this.button.label !== label) { this.button.label = label; this.button.replaceChildren(glyph("stop"), label, h("kbd", null, "x")); }
    put(this.hint, can ? (this.armed ? "Esc: leave it" : "") : gone || target !== null ? "" : "Ends with the server; use a drain.");
  }

  *_below(node, room = { left: 8 }) {
    for (const child of node.children) if (child.closedAt === null && room.left-- > 0) { yield child; yield* this._below(child, room); }
  }

  disarm() { const was = this.armed > 0; this.armed = 0; this.tick(); return was; }

  async stop() {
    const node = this.target;
    if (this.node === null || this.button.hidden || !node) return;
    if (!this.armed) { this.armed = performance.now(); this.tick(); return; }
    this.armed = 0;
    const receipt = new Receipt();
    this.receipts.set(node.key, receipt);
    if (this.node !== node) this.acts.choose(node.key);
    else this._slip(receipt);
    this.tick();
    let answer;
    try {
      answer = await stopNode(node.key, this.ctx.store.host, (line) => receipt.line(line));
    } catch (error) {
      if (error.code !== "node_not_found") {
        this.receipts.delete(node.key);
        receipt.el.remove();
        return this.ctx.fail(error);
      }
      answer = { ok: true, milliseconds: 0, remaining: [], lines: [], already_ended: true };
    }
    if (answer === null) return receipt.lost();
    receipt.end(answer);
    this.ctx.announce(answer.ok ? `Stopped ${node.id}. Nothing of it runs.` : `${node.id} is not empty: ${answer.remaining.join(", ")} still runs.`);
  }
}
