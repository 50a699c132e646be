// What the kinds of nodes look like and are called; one row for each kind that the runtime opens.

const KINDS = {
  runtime: ["runtime", "place"], turns: ["group", "place"], supervisor: ["group", "place"], abandoned: ["abandoned", "place"],
  receiver: ["receiver", "place"], adapter: ["receiver", "place"], sender: ["sender", "place"], send: ["sender", "place"], mcp: ["mcp", "tool"],
  lane: ["lane", "place"], session: ["session", "place"], turn: ["turn", "turn"], model: ["model", "model"], tool: ["tool", "tool"],
  process: ["process", "process"], delegation: ["child", "child"], thread: ["thread", "thread"], task: ["job", "place"], compaction: ["model", "model"],
};
/** Places hold work and end with the server; everything else is work. */
const PLACES = new Set(["runtime", "turns", "supervisor", "abandoned", "receiver", "adapter", "sender", "mcp"]);
const WORK = new Set(["turn", "model", "tool", "process", "delegation", "thread", "task", "compaction"]);
const STUCK = 60; // seconds after which an inbox in which messages wait does not move

/** Glyph and colour of a kind. @param {string} kind @returns {string[]} */
export const look = (kind) => KINDS[kind] ?? ["group", "place"];
/** The class that has its colour. @param {string} kind @returns {string} */
export const css = (kind) => "k-" + look(kind)[1];
/** Whether it holds everybody's work. @param {string} kind @returns {boolean} */
export const isPlace = (kind) => PLACES.has(kind);
/** Whether it is shown in a timeline. @param {string} kind @returns {boolean} */
export const isWork = (kind) => WORK.has(kind);
/** The kinds that the tree can be filtered by. */
export const FILTERS = ["turn", "model", "tool", "process", "delegation", "thread"];

/** The warnings, in the order in which they matter: [badness, words for one, words for several]. */
export const WARNINGS = {
  blocked: ["bad", "loop was blocked", "loop was blocked"],
  deaf: ["bad", "deaf thread", "deaf threads"],
  late: ["bad", "past its deadline", "past their deadline"],
  person: ["warn", "waits for a person", "wait for a person"],
  stuck: ["warn", "inbox does not move", "inboxes do not move"],
};

/** For a node that says nothing itself: where its work is. @param {import("./types.js").TreeNode} node @returns {string} */
export function inside(node) {
  if (node.kind === "lane" || node.kind === "session" || isPlace(node.kind)) return node.note;
  for (const child of node.children) if (child.closedAt === null) return `in ${child.name || child.id}`;
  return node.note === "" ? "works" : node.note;
}

/** The nearest node, from this one upwards, that can be stopped by itself; null if there is none. @param {import("./types.js").TreeNode} node @returns {import("./types.js").TreeNode|null} */
export function stoppable(node) {
  for (let up = node; up !== null; up = up.parent) if (up.stops && up.closedAt === null) return up;
  return null;
}

/** Which warning a node gives, if any. Only words that the wire carries are read. @param {import("./types.js").TreeNode} node @param {number} at @returns {string} */
export function warningOf(node, at) {
  if (node.closedAt !== null) return "";
  if (node.kind === "runtime" && node.note.includes("blocked")) return "blocked";
  if (node.note === "abandoned") return "deaf";
  if (node.deadlineAt !== null && node.deadlineAt < at) return "late";
  if (node.waits.startsWith("approval ")) return "person";
  if (node.kind === "lane" && node.note.includes("wait") && at - node.saidAt > STUCK) return "stuck";
  return "";
}
