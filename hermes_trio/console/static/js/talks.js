// The conversations of the web chat: their messages from the store, and what happens in them as it happens.

import { Follower, get, post } from "./api.js";

const NOTICE = /^(\[IMPORTANT: |The server stopped while this message was being worked on)/; // how a notice begins in a transcript

/**
 * @typedef {{name: string, media: string, bytes: number, url: string}} Attached A file of a message; `url` is empty where it cannot be fetched.
 * @typedef {{who: string, text: string, at: number, files?: Attached[], live?: boolean, said?: string, name?: string, output?: string,
 *   seconds?: number|null, call?: string}} Line One line of a conversation: of "you", the "agent", a "tool" or a "notice".
 * @typedef {{id: string, title: string, count: number, at: number, unread: number, mark: string, messages: Line[], live: Line[],
 *   asks: object[], loaded: boolean, busy: boolean}} Talk One conversation.
 */

const HEARD = 500;

/** Whether an event came after another of the same server; an id is `epoch-number`. Null if they are of different servers. */
function isAfter(id, other) {
  const [epoch, number] = id.split("-"), [known, last] = other.split("-");
  return epoch === known ? Number(number) > Number(last) : null;
}

/** A name for a new conversation. */
const name = () => Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte.toString(16).padStart(2, "0")).join("");
const pathOf = (talk) => `/v1/web/conversations/${encodeURIComponent(talk.id)}`;
const fresh = (id) => ({ id, title: "", count: 0, at: Date.now() / 1000, unread: 0, mark: "", messages: [], live: [], asks: [], loaded: false, busy: false });

/** All conversations of this key's tenant, and the stream of what happens in them. */
export class Talks {
  /** @param {object} ctx What the views share. */
  constructor(ctx) {
    this.ctx = ctx;
    /** @type {Talk[]} */
    this.all = [];
    this.version = 0;
    this.loaded = false;
    this.shown = null; // the conversation that is on the screen
    this.heard = []; // the newest events with their ids: a conversation that is read anew takes up those that came meanwhile
    this.follower = new Follower("/v1/web/events", { hear: ({ id, data }) => this.hear(data, id), state: (state, more) => { ctx.watched(state, more); if (state === "live") this.load(); } });
    this.looked = () => { if (!document.hidden && this.shown) this.saw(this.shown); };
    document.addEventListener("visibilitychange", this.looked);
  }

  /** Let go of the stream. */
  close() {
    this.follower.close();
    document.removeEventListener("visibilitychange", this.looked);
  }

  /** How many answers nobody with this key has read. */
  get unread() { return this.all.reduce((sum, one) => sum + one.unread, 0); }

  /** @param {string} id @returns {Talk|undefined} */
  find(id) { return this.all.find((one) => one.id === id); }

  /** A new conversation, or the one of this name that has not ended its first turn. @param {string} [id] @returns {Talk} */
  make(id = name()) {
    const talk = fresh(id);
    this.all.unshift(talk);
    this.version += 1;
    return talk;
  }

  /** Read the list anew. What is unread comes from the server: for this key, in whatever browser. */
  async load() {
    let data;
    try {
      ({ data } = await get("/v1/web/conversations"));
    } catch (error) {
      return this.ctx.fail(error);
    }
    const known = new Map(this.all.map((one) => [one.id, one])), there = new Set(data.map((row) => row.id));
    const rows = data.map((row) => Object.assign(known.get(row.id) ?? fresh(row.id), { title: row.title, count: row.message_count, at: row.last_active, unread: row.unread }));
    this.all = [...this.all.filter((one) => !there.has(one.id) && (one.count === 0 || one === this.shown)), ...rows];
    this.loaded = true;
    if (this.shown) await this.read(this.shown);
    this.version += 1;
  }

  /** Read a conversation anew: the store is right, and what happened since is behind it. @param {Talk} talk */
  async read(talk) {
    let found;
    try {
      found = await get(`${pathOf(talk)}/messages`);
    } catch (error) {
      return this.ctx.fail(error);
    }
    const kept = found.data.flatMap((one) => stored(one, pathOf(talk)));
    talk.messages = [...kept, ...found.asides.map((one) => ({ who: "agent", text: one.text, at: one.timestamp }))].sort((a, b) => a.at - b.at);
    results(talk.messages, found.data);
    talk.count = found.data.length;
    talk.mark = found.mark;
    talk.live = [];
    talk.busy = false;
    talk.asks = found.approvals;
    talk.loaded = true;
    for (const event of found.live) this.take(talk, event);
    talk.read = found.event_id;
    for (const [id, event] of this.heard) if (event.conversation === talk.id && isAfter(id, talk.read) === true) this.take(talk, event);
    if (talk === this.shown) this.saw(talk);
    this.version += 1;
  }

  /** The person has read what is shown of a conversation: told to the server, if it does not know. @param {Talk} talk */
  async saw(talk) {
    if (document.hidden || !talk.mark || talk.mark === talk.told) return;
    talk.told = talk.mark;
    talk.unread = 0;
    this.version += 1;
    try {
      await post(`${pathOf(talk)}/seen`, { mark: talk.mark });
    } catch {
      talk.told = ""; // the next read says it again
    }
  }

  /** Take an event of the stream. @param {object} event @param {string} [id] */
  hear(event, id = "") {
    this.heard.push([id, event]);
    if (this.heard.length > HEARD) this.heard.shift();
    if (event.event === "resync") return this.load();
    const talk = this.find(event.conversation);
    if (!talk) return this.meet(event);
    if (event.event === "seen") return talk === this.shown ? undefined : this.load();
    if (event.event === "message") return event.turn ? undefined : this.changed(talk, event.text);
    if (!talk.read || isAfter(id, talk.read) !== false) this.take(talk, event);
    if (event.event === "turn.ended") this.changed(talk, "");
    else if (event.event === "approval.request") this.notify(talk, "waits for your answer");
    this.version += 1;
  }

  /** An event of a conversation that this page has not heard of: begun in another one, or by its first turn. */
  async meet(event) {
    await this.load();
    const talk = this.find(event.conversation);
    if (event.event === "approval.request") this.notify(talk ?? fresh(event.conversation), "waits for your answer");
    else if (talk && (event.event === "turn.ended" || (event.event === "message" && !event.turn))) await this.changed(talk, event.text ?? "");
    this.version += 1;
  }

  /** There is more in the store than is shown. */
  async changed(talk, text) {
    await this.read(talk);
    if (talk !== this.shown || document.hidden) {
      await this.load();
      if (talk.unread > 0) this.notify(talk, text || (talk.messages.findLast((one) => one.who === "agent")?.text ?? ""));
    }
  }

  /** Tell the person through the platform, if that was allowed and the page is not looked at. */
  notify(talk, text) {
    const away = document.hidden || talk !== this.shown;
    if (away && text && "Notification" in globalThis && Notification.permission === "granted") new Notification(talk.title || "hermes-trio", { body: text.slice(0, 200), tag: talk.id });
  }

  /** What an event changes in what is shown live. */
  take(talk, event) {
    const at = Date.now() / 1000, live = talk.live;
    const say = ({ text, id, attachments }) => {
      if (!id || !live.some((one) => one.said === id)) live.push({ who: "you", text, at, said: id, files: (attachments ?? []).map((file) => ({ ...file, url: "" })) });
    };
    if (event.event === "said") say(event);
    else if (event.event === "turn.started") {
      talk.busy = true;
      if (event.said) say(event.said);
      for (const text of event.notices) live.push({ who: "notice", text, at });
    } else if (event.event === "message.delta") {
      const last = live.at(-1);
      if (last?.live) last.text += event.delta;
      else live.push({ who: "agent", text: event.delta, live: true, at });
    } else if (event.event === "tool.started") {
      if (live.at(-1)?.live) live.at(-1).live = false;
      live.push({ who: "tool", name: event.tool, text: event.preview, output: "", seconds: null, call: event.tool_call_id, at });
    } else if (event.event === "tool.completed") {
      const call = live.find((one) => one.call === event.tool_call_id);
      if (call) Object.assign(call, { seconds: event.duration, output: event.result ?? "" });
    } else if (event.event === "approval.request") {
      if (!talk.asks.some((one) => one.approval_id === event.approval_id)) talk.asks.push({ approval_id: event.approval_id, command: event.command, description: event.description, pattern_keys: event.pattern_keys, choices: event.choices, requested_at: at, expires_at: at + event.timeout, session_key: "", run_id: "", tenant: "" });
    } else if (event.event === "approval.responded" || event.event === "approval.expired") talk.asks = talk.asks.filter((one) => one.approval_id !== event.approval_id);
    else if (event.event === "turn.ended") talk.busy = false;
  }

  /**
   * Say something. Returns whether the server has taken it.
   * @param {Talk} talk @param {string} text @param {{name: string, media: string, data: string, bytes: number}[]} [files]
   */
  async say(talk, text, files = []) {
    const id = name();
    const shown = { who: "you", text, at: Date.now() / 1000, said: id, files: files.map((file) => ({ ...file, url: "" })) };
    if (text.startsWith("/")) talk.messages.push(shown);
    else talk.live.push(shown);
    this.version += 1;
    try {
      await post(`${pathOf(talk)}/messages`, { text, id, attachments: files.map(({ name, media, data }) => ({ name, media, data })) });
      if (!talk.title) talk.title = (text || files[0]?.name || "").slice(0, 80);
    } catch (error) {
      talk.live = talk.live.filter((one) => one !== shown);
      talk.messages = talk.messages.filter((one) => one !== shown);
      this.version += 1;
      this.ctx.fail(error);
      return false;
    }
    return true;
  }

  /** Answer a question in its conversation. @param {Talk} talk @param {object} approval @param {string} choice */
  async answer(talk, approval, choice) {
    try {
      await post(`${pathOf(talk)}/approvals/${encodeURIComponent(approval.approval_id)}`, { choice });
      talk.asks = talk.asks.filter((one) => one.approval_id !== approval.approval_id);
    } catch (error) {
      this.ctx.fail(error); // it waits as before, and can be answered again
    }
    this.version += 1;
  }
}

/** A message of the transcript as the page shows it. @returns {Line[]} */
function stored(one, path) {
  const at = one.timestamp;
  if (one.role === "tool") return [];
  const files = one.attachments.map((file) => ({ ...file, url: file.part === null ? "" : `${path}/messages/${one.place}/parts/${file.part}` }));
  if (one.role === "user") return [{ who: NOTICE.test(one.text) ? "notice" : "you", text: one.text, at, files }];
  const calls = one.calls.map((call) => ({ who: "tool", name: call.name, text: preview(call.arguments), output: "", seconds: 0, call: call.id, at }));
  return [...(one.text || files.length ? [{ who: "agent", text: one.text, at, files }] : []), ...calls];
}

function results(messages, data) {
  const calls = new Map(messages.filter((one) => one.who === "tool").map((one) => [one.call, one]));
  for (const one of data) {
    const call = one.role === "tool" ? calls.get(one.tool_call_id) : undefined;
    if (call) Object.assign(call, { output: one.text, seconds: Math.max(0, one.timestamp - call.at) });
  }
}

function preview(text) {
  try {
    const found = JSON.parse(text);
    return String(found.command ?? found.goal ?? Object.values(found)[0] ?? "");
  } catch {
    return "";
  }
}
