// The client's copy of the tree: a snapshot, then differences, as GET /v1/tree/events sends them. Knows nothing of the page.

import { now } from "./dom.js";
import { isWork, warningOf } from "./kinds.js";

const LINGER = 1.2; // seconds for which an ended node stays visible, with how it ended
const CALM = 2000; // above so many nodes nothing lingers
const TURNS = 60; // turns whose spans are remembered

/** See above. Reads `snapshot`, `difference` and `nodes` events; `rows()` is what a list shows. */
export class TreeStore {
  constructor() {
    this.nodes = new Map();
    this.root = null;
    this.epoch = "";
    this.host = ""; // the incarnation of the node of the store whose tree this is
    this.moving = false; // whether the next snapshot is of another node because a person asked for it
    this.collapsed = new Set();
    this.filter = { text: "", kinds: new Set(), owner: "", warning: "" };
    this.leaving = [];
    this.frozen = null;
    this.restarted = () => {};
    this.kinds = new Map(); // how many nodes there are of each kind
    this.turns = new Map(); // what each turn did, as far as this page saw it
    this.cluster = []; // the nodes that share the store, where several do
    this.changed = 0; // counts every difference; a reader compares it with the one that it drew
    this.shape = 0; // counts the differences after which the list of rows is another
  }

  /** The time to show: it stands still while the connection is lost. */
  now() { return this.frozen ?? now(); }

  get size() { return this.nodes.size; }

  /** Take an event of the stream. @param {{name: string, data: any}} event */
  apply({ name, data }) {
    this.changed += 1;
    if (name === "snapshot") this._snapshot(data);
    else if (name === "difference") this._difference(data);
    else if (name === "nodes") this.cluster = data.nodes.map((one) => ({ ...one, at: now() }));
  }

  _snapshot({ epoch, tree, node: host }) {
    const again = this.epoch !== "" && this.epoch !== epoch, moved = this.moving;
    this.host = host;
    this.moving = false;
    if (again && moved) this.turns.clear();
    else if (again) for (const turn of this.turns.values()) this._cut(turn);
    this.epoch = epoch;
    const kept = again ? new Map() : this.nodes;
    this.nodes = new Map();
    this.kinds.clear();
    this.leaving = [];
    this.root = null;
    const at = now(), pending = [[tree, null]];
    while (pending.length > 0) {
      const [described, above] = pending.pop();
      const node = this._add(described, above, at, kept.get(described.key));
      for (let i = described.children.length - 1; i >= 0; i -= 1) pending.push([described.children[i], node]);
    }
    if (!again) for (const [key, node] of kept) if (!this.nodes.has(key)) this._ended(node, "ended while this page was away");
    this.shape += 1;
    if (again) this.restarted(moved);
  }

  _difference({ nodes, closed }) {
    const at = now(), fresh = [];
    // First all that is new, then where it belongs: a node may come before its parent.
    for (const described of nodes) {
      const node = this.nodes.get(described.key);
      if (node === undefined) fresh.push([this._make(described, at), described.parent]);
      else {
        this._describe(node, described, at);
        const parent = this.nodes.get(described.parent);
        if (parent !== undefined && parent !== node.parent) this._move(node, parent);
      }
    }
    for (const [node, above] of fresh) {
      const parent = this.nodes.get(above);
      if (parent === undefined) { this._forget(node); continue; }
      node.parent = parent;
      parent.children.add(node);
      this._began(node);
      this.shape += 1;
    }
    for (const [key, how] of closed) this._close(this.nodes.get(key), how);
  }

  _make(described, at, old) {
    const node = old ?? { key: described.key, children: new Set(), log: [], seenAt: at, waits: "", spans: null };
    Object.assign(node, { parent: null, closedAt: null, how: "", depth: 0 });
    node.children.clear();
    this._describe(node, described, at);
    this.nodes.set(node.key, node);
    this.kinds.set(node.kind, (this.kinds.get(node.kind) ?? 0) + 1);
    return node;
  }

  _add(described, parent, at, old) {
    const node = this._make(described, at, old);
    node.parent = parent;
    if (parent) parent.children.add(node);
    else this.root = node;
    if (!old) this._began(node);
    return node;
  }

  _describe(node, described, at) {
    node.id = described.id;
    node.kind = described.kind;
    node.name = described.name;
    node.owner = described.owner;
    node.tenant = described.tenant;
    node.note = described.note;
    node.stops = described.stops;
    node.openedAt = at - described.age;
    node.saidAt = at - described.since;
    node.deadlineAt = described.deadline === null ? null : at + described.deadline;
    if (node.waits !== described.waits_on) {
      node.waits = described.waits_on;
      node.log.push([node.saidAt, node.waits]); // what it waited on, as far as this page saw it
      if (node.log.length > 12) node.log.shift();
      this._wait(node, at);
    }
  }

  _move(node, parent) {
    node.parent?.children.delete(node);
    node.parent = parent;
    parent.children.add(node);
    this.shape += 1;
  }

  _close(node, how) {
    if (node === undefined || node.closedAt !== null) return;
    Object.assign(node, { closedAt: now(), how, waits: "" });
    this._ended(node, how);
    if (this.nodes.size > CALM) this._remove(node);
    else this.leaving.push(node);
  }

  _forget(node) {
    this.nodes.delete(node.key);
    this.kinds.set(node.kind, this.kinds.get(node.kind) - 1);
  }

  _remove(node) {
    for (const child of node.children) this._remove(child);
    node.parent?.children.delete(node);
    if (this.nodes.has(node.key)) this._forget(node);
    this.shape += 1;
  }

  // -- what turns did, for the timeline ------------------------------------------------------------------------------

  _began(node) {
    if (!isWork(node.kind)) return;
    if (node.kind === "turn") {
      let up = node.parent;
      while (up && up.kind !== "turn" && up.kind !== "delegation") up = up.parent;
      if (!up) {
        node.turn = { key: node.key, id: node.id, name: node.name, owner: node.owner, start: node.openedAt, end: null, how: "", spans: [] };
        this.turns.set(node.key, node.turn);
        if (this.turns.size > TURNS) for (const [key, one] of this.turns) if (one.end !== null) { this.turns.delete(key); break; }
      }
    }
    node.turn ??= node.parent?.turn;
    if (!node.turn) return;
    let depth = 0;
    for (let up = node; up && up.key !== node.turn.key; up = up.parent) depth += 1;
    node.span = { kind: node.kind, label: node.name || node.id, id: String(node.key), start: node.openedAt, end: null, depth, how: "" };
    node.turn.spans.push(node.span);
    this._wait(node, node.openedAt);
  }

  _wait(node, at) {
    if (!node.span) return;
    if (node.waitSpan) { node.waitSpan.end = at; node.waitSpan = null; }
    const found = /approval (\S+)/.exec(node.waits);
    if (!found) return;
    node.waitSpan = { kind: "wait", label: `approval ${found[1]}`, id: found[1], start: node.saidAt, end: null, depth: node.span.depth + 1, how: "" };
    node.turn.spans.push(node.waitSpan);
  }

  _ended(node, how) {
    const at = node.closedAt ?? now();
    if (node.waitSpan) node.waitSpan.end = at;
    if (node.span) Object.assign(node.span, { end: at, how });
    if (node.turn?.key === node.key) Object.assign(node.turn, { end: at, how });
  }

  _cut(turn) {
    const at = now();
    if (turn.end === null) Object.assign(turn, { end: at, how: "the server ended" });
    for (const span of turn.spans) if (span.end === null) Object.assign(span, { end: at, how: "the server ended" });
  }

  /** Let go of what ended a moment ago. */
  sweep() {
    const at = now();
    while (this.leaving.length > 0 && this.leaving[0].closedAt + LINGER < at) this._remove(this.leaving.shift());
  }

  /** How many nodes live below one. @param {import("./types.js").TreeNode} node @returns {number} */
  below(node) {
    let n = 0;
    const pending = [...node.children];
    while (pending.length > 0) {
      const one = pending.pop();
      if (one.closedAt === null) n += 1;
      pending.push(...one.children);
    }
    return n;
  }

  /** Every node that gives a warning, grouped. @returns {Map<string, import("./types.js").TreeNode[]>} */
  warnings() {
    const at = this.now(), found = new Map();
    for (const node of this.nodes.values()) {
      const word = warningOf(node, at);
      if (word) found.has(word) ? found.get(word).push(node) : found.set(word, [node]);
    }
    return found;
  }

  /** The ids of the approvals that something in the tree waits for. @returns {string[]} */
  approvals() {
    const found = [];
    for (const node of this.nodes.values()) {
      const match = node.waits.startsWith("approval ") ? /approval (\S+?)(;|$)/.exec(node.waits) : null;
      if (match) found.push(match[1]);
    }
    return found.sort();
  }

  _matches(node, at) {
    const { text, kinds, owner, warning } = this.filter;
    if (kinds.size > 0 && !kinds.has(node.kind)) return false;
    if (owner && node.owner !== owner) return false;
    if (warning && warningOf(node, at) !== warning) return false;
    return !text || `${node.kind} ${node.id} ${node.name} ${node.owner} ${node.tenant} ${node.waits} ${node.note}`.toLowerCase().includes(text);
  }

  get filtering() {
    const { text, kinds, owner, warning } = this.filter;
    return Boolean(text || kinds.size > 0 || owner || warning);
  }

  /** The rows to show, parents first. With a filter: what matches, and the way to it (`faded`). @returns {import("./types.js").TreeNode[]} */
  rows() {
    const rows = [], filtering = this.filtering, at = this.now();
    if (this.root === null) return rows;
    const keep = filtering ? new Set() : null;
    if (filtering) {
      for (const node of this.nodes.values()) {
        node.hit = this._matches(node, at);
        if (node.hit) for (let up = node; up !== null && !keep.has(up); up = up.parent) keep.add(up);
      }
    }
    const pending = [this.root];
    while (pending.length > 0) {
      const node = pending.pop();
      if (keep !== null && !keep.has(node)) continue;
      if (node.kind === "abandoned" && node.children.size === 0) continue;
      node.depth = node.parent === null ? 0 : node.parent.depth + 1;
      node.faded = filtering && !node.hit;
      rows.push(node);
      if (node.children.size === 0 || (!filtering && this.collapsed.has(node.key))) continue;
      const children = [...node.children];
      for (let i = children.length - 1; i >= 0; i -= 1) pending.push(children[i]);
    }
    return rows;
  }
}
