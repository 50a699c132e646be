// The shell: signing in, rail, routes, theme, keys, connection. One view is mounted at a time; each view is a module of its own.

import { del, Follower, get, post, Problem } from "./api.js";
import { Asks } from "./asks.js";
import { count, glyph, h, now, put, span, still } from "./dom.js";
import { Samples } from "./samples.js";
import { TreeStore } from "./store.js";
import { Talks } from "./talks.js";
import { approvals } from "./views/approvals.js";
import { chat } from "./views/chat.js";
import { health } from "./views/health.js";
import { jobs } from "./views/jobs.js";
import { keys } from "./views/keys.js";
import { outbox } from "./views/outbox.js";
import { runs } from "./views/runs.js";
import { sessions } from "./views/sessions.js";
import { signIn } from "./views/signin.js";
import { timeline } from "./views/timeline.js";
import { tree } from "./views/tree.js";

/** Name: [title, view, the scope that it needs, the part of the server that it needs]. */
const VIEWS = {
  tree: ["Tree", tree, "runs", ""],
  timeline: ["Timeline", timeline, "runs", ""],
  approvals: ["Approvals", approvals, "runs", ""],
  chat: ["Chat", chat, "chat", "web"],
  sessions: ["Sessions", sessions, "sessions", ""],
  runs: ["Runs", runs, "runs", ""],
  jobs: ["Jobs", jobs, "admin", "jobs"],
  outbox: ["Outbox", outbox, "admin", ""],
  keys: ["Keys", keys, "admin", ""],
  health: ["Health", health, "", ""],
};
const HELP = [
  ["j k", "down, up"], ["h l", "collapse, expand"], ["Enter", "open the details"], ["x x", "stop the node and all below it"],
  ["f", "follow its session"], ["w", "next warning"], ["/", "search"], ["1 – 9", "views"], ["t", "light or dark"], ["Esc", "back"],
];

// One page for both addresses: `/` is the console, `/chat` the chat alone.
const root = document.documentElement, alone = location.pathname.endsWith("/chat");
if (alone) root.dataset.page = "chat";
const main = document.querySelector("main"), rail = document.querySelector(".rail"), status = document.querySelector(".live");
const store = new TreeStore(), link = { state: "connecting", at: 0, next: 0, word: "" };
const ctx = {
  store, link, me: null, samples: new Samples(), asks: new Asks(), talks: null,
  go: (path) => { location.hash = "#/" + path; },
  announce: (words) => put(status, words),
  /** Say what went wrong, in the server's words. */
  fail: (error) => { tell(error instanceof Problem ? error.message : "The server does not answer.", "bad"); if (error.status === 401) signedOut(); },
  tell,
};
let view = null, follower = null, links = [], visible = [];

// -- theme
function turnTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = (root.dataset.theme ?? (dark ? "dark" : "light")) === "dark" ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
}
const kept = localStorage.getItem("theme");
if (kept === "dark" || kept === "light") root.dataset.theme = kept;

// -- short messages
const toast = h("div", { class: "toast", role: "alert", hidden: true });
let toastTimer = 0;
function tell(words, look = "") {
  toast.className = `toast ${look}`;
  toast.replaceChildren(glyph(look === "bad" ? "warn" : "check"), h("span", null, words));
  toast.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { toast.hidden = true; }, 6000);
}

// -- signing in
async function begin() {
  const [, name, code] = location.hash.split("/");
  if (name === "sign-in" && code) {
    history.replaceState(null, "", location.pathname); // the code is used up, and does not stay in the history
    try {
      await post("/v1/console/session", { code });
    } catch (error) {
      return showSignIn(error.message);
    }
  }
  try {
    const me = await get("/v1/console/session");
    if (me.signed_in) enter(me);
    else showSignIn("");
  } catch (error) {
    if (error instanceof Problem) showSignIn(error.message);
    else setTimeout(begin, 2000);
  }
}
function showSignIn(problem) {
  rail.replaceChildren();
  root.dataset.signed = "out";
  document.title = "Sign in · hermes-trio";
  main.replaceChildren(signIn(problem, async (key) => enter(await post("/v1/console/session", { key }))));
  main.querySelector("input")?.focus();
}
function leave() {
  follower?.close();
  follower = null;
  ctx.talks?.close();
  view?.leave?.();
  view = null;
  ctx.me = null;
}
function signedOut() {
  leave();
  showSignIn("The session is over. Sign in again.");
}
async function signOut() {
  // Nothing is asked any more before the cookie is gone: what came after it would be refused.
  leave();
  try {
    await del("/v1/console/session");
  } catch (error) {
    return showSignIn(error instanceof Problem && error.status === 401 ? "The session is over. Sign in again." : "The server does not answer: the session is not ended yet. Open this page again and sign out.");
  }
  location.reload(); // nothing that this person saw stays in the page
}
const may = (scope) => scope === "" || ctx.me.admin || ctx.me.scopes.includes(scope);

let before = ""; // the key that this page was opened with
function enter(me) {
  if (before !== "" && before !== me.key_id) return location.reload(); // what the other key saw is not this one's
  before = me.key_id;
  ctx.me = me;
  delete root.dataset.signed;
  visible = Object.keys(VIEWS).filter((name) => {
    const [, , scope, feature] = VIEWS[name];
    return may(scope) && (feature === "" || me.features.includes(feature)) && (!alone || name === "chat");
  });
  buildRail();
  const whole = may("runs") && !alone;
  ctx.watched = whole ? () => {} : watch; // where there is no tree, the chat's stream says whether there is a server
  ctx.talks?.close();
  ctx.talks = visible.includes("chat") ? new Talks(ctx) : null;
  follower?.close();
  if (whole) follow();
  else if (!ctx.talks) link.state = "live";
  ctx.asks.enabled = may("runs");
  route();
}

// -- the stream: snapshot, then differences. While it is lost, what is shown is the last thing known, and says so.
let host = ""; // the node of the store whose tree is followed, where there are several: a load balancer may pass each request to another one
function follow() {
  follower?.close();
  follower = new Follower(() => "/v1/tree/events" + (host ? `?node=${encodeURIComponent(host)}` : ""), {
    hear: (event) => { store.apply(event); host = store.cluster.length > 1 ? store.host : ""; if (link.state === "connecting") { link.state = "live"; if (view === null) route(); } }, // a view that is there may hold what was typed
    state: (name, more) => {
      if (name === "refused" && more.code === "unknown_node") return leaveHost(); // it is gone
      if (name === "lost" && store.moving) return leaveHost("That node does not answer."); // the one that was shown still does
      if (name !== "live" || link.state === "lost") watch(name, more); // connected is who has a snapshot
    },
  });
}
function leaveHost(words = "") {
  host = store.moving ? store.host : "";
  store.moving = false;
  if (words) tell(words, "bad");
  follow();
}
/** Show the tree of another node of the store. @param {string} incarnation */
ctx.visit = (incarnation) => {
  if (incarnation === store.host || store.frozen !== null) return;
  host = incarnation;
  store.moving = true;
  follow();
};
function watch(name, more) {
  if (name === "live") link.state === "lost" ? regain() : (link.state = "live");
  else if (name === "lost") lose(more);
  else if (name === "refused") more.status === 401 ? signedOut() : lose(30);
}
function lose(seconds) {
  if (link.state === "live") {
    link.at = now();
    store.frozen = now();
    root.dataset.link = "lost";
  }
  link.state = link.state === "connecting" ? "connecting" : "lost";
  link.next = now() + seconds;
}
function regain() {
  link.state = "live";
  store.frozen = null;
  delete root.dataset.link;
  ctx.announce("Connected again. This page is up to date.");
  view?.regain?.();
}
store.restarted = (moved) => {
  ctx.samples.clear();
  if (moved) ctx.announce("The tree is now that of another node.");
  else tell(store.cluster.length > 1 ? "The node that was shown is gone. This page shows another one, and is up to date." : "The server was started again. What ran before it has ended; this page is up to date.");
  view?.regain?.();
};

// -- the rail
const counts = {}, linkWords = h("span"), linkDot = h("span", { class: "dot beat" });
const help = h("dialog", { "aria-label": "Keys" }, h("h2", null, "Keys"),
  h("dl", null, HELP.map(([key, words]) => [h("dt", null, key.split(" ").map((one) => (one === "–" ? " – " : [h("kbd", null, one), " "]))), h("dd", null, words)])));
document.body.append(help, toast);

function buildRail() {
  links = visible.map((name) => h("a", { href: "#/" + name, "data-view": name }, glyph(name), h("span", { class: "word" }, VIEWS[name][0]), (counts[name] = h("span", { class: "count" }))));
  const who = ctx.me.admin ? "admin" : ctx.me.tenant || ctx.me.name;
  rail.replaceChildren(
    h("div", { class: "brand" }, h("img", { src: "console/icon.svg", width: 18, height: 18, alt: "" }), "hermes-trio"),
    ...links,
    h("div", { class: "foot" }, h("div", { class: "link" }, linkDot, linkWords),
      h("div", { class: "who" }, h("span", { class: "cut", title: `Signed in with the key ${ctx.me.name}` }, who), h("button", { class: "btn quiet", onclick: signOut }, "Sign out")),
      h("div", { class: "pair" },
        h("button", { class: "btn quiet", onclick: turnTheme }, "Theme", h("kbd", null, "t")),
        h("button", { class: "btn quiet", onclick: () => help.showModal() }, "Keys", h("kbd", null, "?")))));
}

// -- routes
/** A part of the address; one that nobody encoded is taken as it is. */
function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
const banner = h("div", { class: "banner", role: "alert", hidden: true });
function route() {
  if (ctx.me === null) return;
  const [name, ...rest] = location.hash.replace(/^#\//, "").split("/").map(decoded);
  const known = visible.includes(name) ? name : visible[0];
  view?.leave?.();
  for (const one of links) {
    if (one.dataset.view === known) one.setAttribute("aria-current", "page");
    else one.removeAttribute("aria-current");
  }
  document.title = `${VIEWS[known][0]} · hermes-trio`;
  const head = h("header", { class: "head" }, h("h1", null, VIEWS[known][0])), body = h("div", { class: `view ${known}` });
  main.replaceChildren(head, banner, body);
  if (link.state === "connecting" && (known === "tree" || known === "timeline")) {
    const wide = ["w3", "w4 in1", "w5 in2", "w3 in2", "w4 in1", "w5 in2", "w4 in2", "w3"];
    body.append(h("div", { class: "bones", role: "status", "aria-label": "Waiting for the first snapshot" }, wide.map((one) => h("div", { class: "bone " + one }))));
    view = null;
  } else view = VIEWS[known][1]({ ...ctx, head, body, rest });
}
addEventListener("hashchange", () => { if (location.hash.startsWith("#/sign-in/")) begin(); else route(); });

// -- keys
addEventListener("keydown", (event) => {
  if (ctx.me === null) return;
  const typing = event.target.matches("input, textarea, select");
  if (event.key === "Escape" && typing) { event.target.blur(); main.querySelector("[data-home]")?.focus(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (view?.key?.(event)) event.preventDefault();
  else if (event.key === "?") help.showModal();
  else if (event.key === "t") turnTheme();
  else if (/^[1-9]$/.test(event.key) && visible[event.key - 1]) ctx.go(visible[event.key - 1]);
  else if (event.key === "/") { const search = main.querySelector("[type=search]"); if (search) { event.preventDefault(); search.focus(); } }
});

// -- the beat: ten times a second (once, where motion is not wanted). Hidden pages do nothing.
function badge(name, n, kind) {
  const el = counts[name];
  if (!el) return;
  put(el, n > 0 ? n.toLocaleString("en") : "");
  el.className = "count " + (n > 0 ? kind : "");
}
let told = 0;
function beat() {
  if (document.hidden || ctx.me === null) return;
  store.sweep();
  ctx.asks.follow(store.approvals());
  ctx.samples.take();
  const waits = ctx.asks.pending.length;
  badge("tree", store.size, "");
  badge("approvals", waits, "hot");
  badge("chat", ctx.talks?.unread ?? 0, "new");
  const lost = link.state === "lost";
  put(linkWords, link.state === "connecting" ? "connecting…" : lost ? "disconnected" : `live · ${location.host}`);
  linkDot.className = "dot " + (lost ? "bad" : link.state === "connecting" ? "off" : "beat");
  if (banner.hidden === lost) {
    banner.hidden = !lost;
    banner.replaceChildren(glyph("warn"), h("span"), h("button", { class: "btn", onclick: () => (follower ?? ctx.talks?.follower)?.now() }, "Try now"));
  }
  if (lost) put(banner.children[1], `The connection is lost. What you see is from ${span(now() - store.frozen)} ago and stands still. Next attempt in ${Math.max(0, Math.ceil(link.next - now()))} s.`);
  if (waits > told) ctx.announce(`${count(waits, "approval")} waiting for a person`);
  told = waits;
  view?.tick?.();
}
begin();
setInterval(beat, still.matches ? 1000 : 100);
globalThis.hermes = { store, link }; // for looking at things in the browser's own tools
