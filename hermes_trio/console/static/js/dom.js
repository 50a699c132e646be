// Making elements and words. Text only ever enters the page as text nodes: there is no innerHTML in this program.

const SVG = "http://www.w3.org/2000/svg";

function fill(el, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) el.addEventListener(name.slice(2), value);
    else if (name === "class") el.setAttribute("class", value);
    else if (name in el && typeof value !== "string" && !(el instanceof SVGElement)) el[name] = value;
    else el.setAttribute(name, value === true ? "" : value);
  }
  el.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return el;
}

/** An element. Texts become text nodes, `on…` listeners. @param {string} tag @param {object|null} props @param {...any} children @returns {HTMLElement} */
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);
/** The same in SVG. @param {string} tag @param {object|null} props @param {...any} children @returns {SVGElement} */
export const s = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/** Write text only when it changed: a row that stands still costs no layout. @param {HTMLElement} el @param {string} text */
export function put(el, text) {
  if (el.lastText === text) return;
  el.lastText = text;
  if (el.firstChild === null) el.append(text);
  else el.firstChild.data = text;
}

const PATHS = {
  runtime: "M8 2.5a5.5 5.5 0 1 0 0 11a5.5 5.5 0 0 0 0-11ZM8 6.8a1.2 1.2 0 1 0 0 2.4a1.2 1.2 0 0 0 0-2.4Z",
  group: "M3 4h10M5.500 8h7.500M5.500 12h7.500M3 4v8M3 8h2M3 12h2", lane: "M2.500 5.500h11M2.500 10.500h11",
  session: "M2.500 3.500h11v7.500H8L5 13.500V11H2.500z", turn: "M4.500 3l8 5-8 5z", model: "M8 2l6 6-6 6-6-6z", tool: "M3.500 3.500h9v9h-9z",
  process: "M2.500 4l4.500 4-4.500 4M8.500 12.500h5", child: "M4.500 2.500v11M4.500 11c5 0 7-1.500 7-6M9 6.500l2.500-2.500L14 6.500", thread: "M2 8c2-5.500 4-5.500 6 0s4 5.500 6 0",
  receiver: "M13.500 8h-10M7.500 4l-4 4 4 4", sender: "M2.500 8h10M8.500 4l4 4-4 4", mcp: "M5.500 2.500v4M10.500 2.500v4M3.500 6.500h9v2a4.500 4.500 0 0 1-9 0zM8 13v1.500",
  abandoned: "M4 4l8 8M8 2.500a5.500 5.500 0 1 0 0 11a5.500 5.500 0 0 0 0-11z", person: "M8 2.800a2.300 2.300 0 1 0 0 4.600a2.300 2.300 0 0 0 0-4.600zM3.500 13.300c0-2.600 2-4.200 4.500-4.200s4.500 1.600 4.500 4.200",
  warn: "M8 2.500l6.200 11H1.800zM8 6.500v3.200M8 11.600v.2", tree: "M3 3.500h4M5 3.500v9h4M5 8h4M9.500 8h4M9.500 12.500h4", timeline: "M2.500 4h6M5 8h6M8 12h5.500",
  approvals: "M8 2l5 2v4c0 3-2 4.800-5 6-3-1.200-5-3-5-6V4zM5.700 8l1.700 1.700L10.500 6.400", chat: "M2.500 3.500h11v7.500H8L5 13.500V11H2.500z", sessions: "M3 4h10M3 8h10M3 12h6",
  runs: "M4 3l8 5-8 5zM2 3v10", jobs: "M8 2.500a5.500 5.500 0 1 0 0 11a5.500 5.500 0 0 0 0-11zM8 5v3.200l2 1.500", outbox: "M2.500 9v4h11V9M8 10V2.500M5 5.500l3-3 3 3", keys: "M6 8a3 3 0 1 0 0 .1zM6 8h8M11 8v3M14 8v2",
  health: "M1.500 8.500h3l2-5.500 3 10 1.700-4.500h3.300", open: "M6 4l4 4-4 4", close: "M4 4l8 8M12 4l-8 8", check: "M3 8.500l3.200 3L13 4.500", stop: "M4.500 4.500h7v7h-7z", job: "M8 2.500a5.500 5.500 0 1 0 0 11a5.500 5.500 0 0 0 0-11zM8 5v3.200l2 1.500",
};
const SOLID = new Set(["turn", "model", "tool", "stop"]);

/** The picture of a kind, a view or an action. @param {string} name @param {string} [kind] @returns {SVGElement} */
export function glyph(name, kind = "") {
  const path = PATHS[name] ?? PATHS.group;
  return s("svg", { class: `glyph ${SOLID.has(name) ? "solid" : ""} ${kind}`, viewBox: "0 0 16 16", "aria-hidden": "true" }, s("path", { d: path }));
}

/** Change the glyph of a recycled row without making a new element. @param {SVGElement} el @param {string} name @param {string} kind */
export function reglyph(el, name, kind) {
  el.setAttribute("class", `glyph ${SOLID.has(name) ? "solid" : ""} ${kind}`);
  el.firstChild.setAttribute("d", PATHS[name] ?? PATHS.group);
}

/** Seconds since the page was opened. @returns {number} */
export const now = () => performance.now() / 1000;

/** 0.42 s, 3.1 s, 58 s, 4 m 08, 2 h 14, 3 d 04: never more than six characters, so that columns stand still. @param {number} seconds @returns {string} */
export function span(seconds) {
  const t = Math.abs(seconds), sign = seconds < 0 ? "−" : "";
  if (t < 1) return `${sign}${t.toFixed(2)} s`;
  if (t < 10) return `${sign}${t.toFixed(1)} s`;
  if (t < 60) return `${sign}${Math.floor(t)} s`;
  const two = (big, small, b, sm) => `${sign}${Math.floor(t / big)} ${b} ${String(Math.floor((t % big) / small)).padStart(2, "0")}${sm}`;
  if (t < 3600) return two(60, 1, "m", "");
  if (t < 86400) return two(3600, 60, "h", "");
  return two(86400, 3600, "d", "");
}
/** Milliseconds in words. @param {number} value @returns {string} */
export const ms = (value) => (value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en")) + " ms";
/** The time of day. @param {Date} date @returns {string} */
export const clock = (date) => date.toTimeString().slice(0, 8);
/** A number of things. @param {number} n @param {string} word @param {string} [more] @returns {string} */
export const count = (n, word, more = word + "s") => `${n.toLocaleString("en")} ${n === 1 ? word : more}`;

/** agent:main:telegram:dm:42 becomes ["telegram", "dm 42"], api:acme:run_1 becomes ["acme", "run_1"]; what has no platform is shown as it is. @param {string} owner @returns {string[]} */
export function place(owner) {
  const parts = owner.split(":");
  if (parts[0] === "api" && parts.length > 2) return [parts[1] || "api", parts.slice(2).join(" ")];
  return parts[0] === "agent" && parts.length > 3 ? [parts[2], parts.slice(3).join(" ")] : ["", owner];
}

/** Whether motion is not wanted. */
export const still = matchMedia("(prefers-reduced-motion: reduce)");
/** Whether the page is as narrow as a phone. */
export const narrow = matchMedia("(max-width: 760px)");
