// The web chat: conversations, streamed answers, folded tools, approvals in place, attachments, and notices that come back later.

import { clock, glyph, h, put, span } from "../dom.js";
import { css, look } from "../kinds.js";
import { card } from "./approvals.js";

const KINDS = { terminal: "process", process: "process", delegate_task: "delegation" };
const hour = (at) => clock(new Date(1000 * at)).slice(0, 5);

const BAD = /^The server stopped|exit code (?!0\b)|was lost|timed out/; // notices of work that did not end well
const MOST_FILES = 8, MOST_BYTES = 5e6, MOST_TOGETHER = 7e6; // what the server takes in one message
const size = (bytes) => (bytes < 1000 ? `${bytes} B` : bytes < 1e6 ? `${Math.round(bytes / 1000)} kB` : `${(bytes / 1e6).toFixed(1)} MB`);

/** A file of this computer, as it is sent: in base64. */
async function encode(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return { name: file.name, media: file.type, bytes: bytes.length, data: btoa(text) };
}

/** The files of a message: pictures as pictures, the rest as something to keep. */
const attached = (files) => (files?.length ? h("ul", { class: "files", "aria-label": "Attachments" }, files.map((file) => h("li", null,
  file.url && file.media.startsWith("image/") ? h("a", { href: file.url, target: "_blank", rel: "noopener" }, h("img", { src: file.url, alt: file.name, loading: "lazy" })) : null,
  file.url ? h("a", { class: "cut", href: file.url, download: file.name }, file.name) : h("span", { class: "cut" }, file.name), h("span", { class: "num faint" }, size(file.bytes))))) : null);

/** @param {import("../types.js").Context} ctx @returns {import("../types.js").View} */
export function chat({ talks, head, body, rest, go, announce, tell }) {
  let open = talks.find(rest[0]) ?? null, drawn = "", wanted = rest[0] ?? "", files = [];
  const people = h("ol", { class: "talks scroll", "aria-label": "Conversations" }), flow = h("ol", { class: "flow", "aria-label": "Messages", role: "log" });
  const scroll = h("div", { class: "scroll talk", tabindex: "0", "data-home": "", "aria-label": "Conversation" }, flow);
  const input = h("textarea", { rows: 1, placeholder: "Write a message, or /stop", "aria-label": "Message", onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } }, onpaste: (event) => { if (event.clipboardData.files.length) { event.preventDefault(); attach(event.clipboardData.files); } } });
  const chooser = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files", onchange: () => { attach(chooser.files); chooser.value = ""; } }), tray = h("ul", { class: "files tray", "aria-label": "Files to send" });
  const stop = h("button", { class: "btn danger", type: "button", hidden: true, onclick: () => talks.say(open, "/stop") }, glyph("stop"), "Stop");
  const bell = h("button", { class: "btn quiet", hidden: !("Notification" in globalThis) || Notification.permission !== "default", onclick: async () => { await Notification.requestPermission(); bell.hidden = Notification.permission !== "default"; } }, "Notify me");
  head.append(h("span", { class: "sum wide" }, "what you start here comes back here, also when the tab was closed"), h("span", { class: "push" }), bell, h("button", { class: "btn", onclick: () => choose(talks.make()) }, "New conversation"));
  body.append(people, h("section", { class: "room", "aria-label": "Messages" }, scroll, h("form", { class: "write", onsubmit: (event) => { event.preventDefault(); send(); }, ondragover: (event) => event.preventDefault(), ondrop: (event) => { event.preventDefault(); attach(event.dataTransfer.files); } }, tray, chooser, h("button", { class: "btn quiet", type: "button", title: "Pictures, and text files", onclick: () => chooser.click() }, "Attach"), input, stop, h("button", { class: "btn primary" }, "Send"))));

  async function attach(more) {
    const chosen = [], refused = [];
    let together = files.reduce((sum, one) => sum + one.bytes, 0);
    // Looked at before it is read: a file that the server would refuse may be larger than this page's memory.
    for (const file of more) {
      const fits = file.size <= MOST_BYTES && together + file.size <= MOST_TOGETHER && files.length + chosen.length < MOST_FILES;
      (fits ? chosen : refused).push(file);
      if (fits) together += file.size;
    }
    if (refused.length) tell(`Not attached: ${refused.map((file) => `${file.name.slice(0, 60)} (${size(file.size)})`).slice(0, 3).join(", ")}${refused.length > 3 ? ", …" : ""}. A message can have ${MOST_FILES} files of at most ${size(MOST_BYTES)} each, ${size(MOST_TOGETHER)} together.`, "bad");
    try {
      files = [...files, ...(await Promise.all(chosen.map(encode)))];
    } catch {
      tell("A file cannot be read any more: nothing was attached.", "bad");
    }
    drawTray();
    input.focus();
  }
  function drawTray() {
    tray.replaceChildren(...files.map((file) => h("li", null, h("span", { class: "cut" }, file.name), h("span", { class: "num faint" }, size(file.bytes)), h("button", { class: "btn quiet", type: "button", "aria-label": `Take ${file.name} out`, onclick: () => { files = files.filter((one) => one !== file); drawTray(); } }, glyph("close")))));
  }
  async function send() {
    const text = input.value.trim(), sent = files;
    if (!text && sent.length === 0) return;
    if (!open) choose(talks.find(wanted) ?? talks.make(wanted || undefined));
    input.value = "";
    files = [];
    drawTray();
    if (!(await talks.say(open, text, sent))) { input.value = text; files = sent; drawTray(); }
  }
  function choose(one) {
    open = one;
    wanted = one.id;
    talks.shown = one;
    drawn = "";
    history.replaceState(null, "", `#/chat/${one.id}`);
    talks.read(one);
    tick();
    input.focus();
  }
  function bubble(message) {
    const when = h("time", { class: "num faint" }, hour(message.at));
    if (message.who === "tool") {
      const kind = KINDS[message.name] ?? "tool";
      return h("li", { class: "did" }, h("details", null, h("summary", null, glyph("open", "turns"), glyph(look(kind)[0], css(kind)), h("span", null, message.name), h("code", { class: "cut" }, message.text), h("span", { class: "num faint" }, message.seconds === null ? "works…" : span(message.seconds))), h("pre", null, message.output || "no output yet")));
    }
    const bad = message.who === "notice" && BAD.test(message.text);
    if (message.who === "notice") return h("li", { class: `notice ${bad ? "bad" : ""}` }, glyph(bad ? "warn" : "check"), h("div", null, h("details", null, h("summary", null, message.text.replace(/^\[IMPORTANT: /, "").split("\n")[0].replace(/\]$/, "")), h("pre", null, message.text))), h("span", { class: `chip ${bad ? "warn" : "good"}`, title: "The notice was committed with the end of the work and has reached this conversation" }, "delivered ", when));
    return h("li", { class: message.who }, h("div", { class: "words" }, message.text || message.live ? h("p", null, message.text, message.live ? h("i", { class: "caret" }) : null) : null, attached(message.files)), when);
  }
  function tick() {
    if (open === null && talks.loaded) {
      // A conversation whose first turn runs is in no list yet: it is read by its name.
      const first = talks.find(wanted) ?? (wanted ? talks.make(wanted) : talks.all[0]);
      if (first) return choose(first);
    }
    const mark = `${open?.id}|${talks.version}|${talks.unread}`;
    if (mark !== drawn) {
      const near = !drawn.startsWith(`${open?.id}|`) || scroll.scrollTop + scroll.clientHeight > scroll.scrollHeight - 80;
      drawn = mark;
      people.replaceChildren(...talks.all.map((one) => {
        const last = one.live.at(-1) ?? one.messages.at(-1), { unread } = one;
        return h("li", null, h("button", { class: "pick", "aria-current": one === open ? "true" : null, onclick: () => choose(one) }, h("span", { class: "cut" }, one.title || "New conversation"), h("span", { class: "faint cut" }, one.asks.length ? "waits for your answer" : last?.text ?? ""), unread > 0 ? h("span", { class: "count", "aria-label": `${unread} unread` }, String(unread)) : h("span", { class: "num faint" }, hour(one.at))));
      }));
      const shown = open ? [...open.messages, ...open.live] : [];
      const opened = new Set([...flow.querySelectorAll("details[open]")].map((el) => el.closest("li").index));
      flow.replaceChildren(...shown.map(bubble), ...(open?.asks ?? []).map((one) => h("li", null, card(one, (approval, choice) => { talks.answer(open, approval, choice); announce(`Answered: ${choice}`); }))));
      [...flow.children].forEach((el, i) => { el.index = i; if (opened.has(i)) el.querySelector("details")?.setAttribute("open", ""); });
      if (shown.length === 0 && (open?.asks.length ?? 0) === 0) flow.append(h("li", { class: "empty" }, glyph("chat"), h("h2", null, "Say something"), h("p", null, "Answers come as they are written. What the agent starts in the background comes back to this conversation when it ends.")));
      stop.hidden = !open?.busy;
      if (near) requestAnimationFrame(() => { scroll.scrollTop = scroll.scrollHeight; });
    }
    for (const el of flow.querySelectorAll(".card")) el.tick();
  }
  if (open) choose(open);
  else if (wanted === "") tick();
  return { tick, regain: () => talks.load(), leave: () => { talks.shown = null; } };
}
