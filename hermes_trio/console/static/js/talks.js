// The conversations of the web chat: their messages from the store, and what happens in them as it happens.

import { Follower, get, post } from "./api.js";

const NOTICE = /^\[IMPORTANT: /;
const KEY = "seen"; // which messages of each conversation this browser has shown

/** A name for a new conversation. */
const name = () => Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export class Talks {
  constructor(ctx) {
    this.ctx = ctx;
    this.all = [];
    this.version = 0;
    this.shown = null; // the conversation that is on the screen
    try {
      this.seen = JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      this.seen = {};
    }
    this.follower = new Follower("/v1/web/events", { hear: ({ data }) => this.hear(data), state: (state) => { if (state === "live") this.load(); } });
  }

  close() { this.follower.close(); }

  get unread() { return this.all.reduce((sum, one) => sum + this.unreadOf(one), 0); }

  unreadOf(talk) { return talk === this.shown && !document.hidden ? 0 : Math.max(0, talk.count - (this.seen[talk.id] ?? talk.count)); }

  find(id) { return this.all.find((one) => one.id === id); }

  make() {
    const talk = { id: name(), title: "", count: 0, at: Date.now() / 1000, messages: [], live: [], asks: [], loaded: true, busy: false };
    this.all.unshift(talk);
    this.version += 1;
    return talk;
  }

  async load() {
    let data;
    try {
      ({ data } = await get("/v1/web/conversations"));
    } catch (error) {
      return this.ctx.fail(error);
    }
    const known = new Map(this.all.map((one) => [one.id, one]));
    const fresh = this.all.filter((one) => one.count === 0 && !data.some((row) => row.id === one.id));
    this.all = [...fresh, ...data.map((row) => Object.assign(known.get(row.id) ?? { messages: [], live: [], asks: [], loaded: false, busy: false }, { id: row.id, title: row.title, count: row.message_count, at: row.last_active }))];
    for (const one of this.all) if (!(one.id in this.seen)) this.saw(one);
    if (this.shown) await this.read(this.shown);
    this.version += 1;
  }

  /** Read a conversation anew: the store is right, and what happened since is behind it. */
  async read(talk) {
    let found;
    try {
      found = await get(`/v1/web/conversations/${encodeURIComponent(talk.id)}/messages`);
    } catch (error) {
      return this.ctx.fail(error);
    }
    talk.messages = [...found.data.map(stored).flat(), ...found.asides.map((one) => ({ who: "agent", text: one.text, at: one.timestamp, aside: one.id }))].sort((a, b) => a.at - b.at);
    results(talk.messages, found.data);
    talk.count = found.data.length;
    talk.live = [];
    talk.busy = false;
    talk.asks = found.approvals;
    talk.loaded = true;
    for (const event of found.live) this.take(talk, event);
    if (talk === this.shown) this.saw(talk);
    this.version += 1;
  }

  saw(talk) {
    this.seen[talk.id] = talk.count;
    localStorage.setItem(KEY, JSON.stringify(this.seen));
  }

  hear(event) {
    if (event.event === "resync") return this.load();
    const talk = this.find(event.conversation);
    if (!talk) return this.load();
    this.take(talk, event);
    if (event.event === "turn.ended") this.ended(talk);
    this.version += 1;
  }

  async ended(talk) {
    const before = talk.count;
    await this.read(talk);
    if ((talk !== this.shown || document.hidden) && talk.count > before) this.notify(talk);
  }

  /** Tell the person through the platform, if that was allowed. */
  notify(talk) {
    const last = talk.messages.findLast((one) => one.who === "agent");
    if (last && "Notification" in globalThis && Notification.permission === "granted") new Notification(talk.title || "hermes-trio", { body: last.text.slice(0, 200), tag: talk.id });
  }

  take(talk, event) {
    const at = Date.now() / 1000, live = talk.live;
    if (event.event === "said") { if (!live.some((one) => one.said === event.id)) live.push({ who: "you", text: event.text, at, said: event.id }); }
    else if (event.event === "turn.started") { talk.busy = true; for (const text of event.notices) live.push({ who: "notice", text, at }); }
    else if (event.event === "message.delta") {
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
    else if (event.event === "message") { if (!talk.messages.some((one) => one.aside === event.id)) talk.messages.push({ who: "agent", text: event.text, at: event.timestamp, aside: event.id }); }
    else if (event.event === "turn.ended") talk.busy = false;
  }

  async say(talk, text) {
    const id = name();
    const command = text.startsWith("/");
    if (!command) talk.live.push({ who: "you", text, at: Date.now() / 1000, said: id });
    else talk.messages.push({ who: "you", text, at: Date.now() / 1000 });
    this.version += 1;
    try {
      await post(`/v1/web/conversations/${encodeURIComponent(talk.id)}/messages`, { text, id });
      if (!talk.title) talk.title = text.slice(0, 80);
    } catch (error) {
      talk.live = talk.live.filter((one) => one.said !== id);
      this.version += 1;
      this.ctx.fail(error);
      return false;
    }
    return true;
  }

  async answer(talk, approval, choice) {
    try {
      await post(`/v1/web/conversations/${encodeURIComponent(talk.id)}/approvals/${encodeURIComponent(approval.approval_id)}`, { choice });
    } catch (error) {
      this.ctx.fail(error);
    }
    talk.asks = talk.asks.filter((one) => one !== approval);
    this.version += 1;
  }
}

/** A message of the transcript as the page shows it. */
function stored(one) {
  const at = one.timestamp;
  if (one.role === "tool") return [];
  if (one.role === "user") return [{ who: NOTICE.test(one.text) ? "notice" : "you", text: one.text, at }];
  const calls = one.calls.map((call) => ({ who: "tool", name: call.name, text: preview(call.arguments), output: "", seconds: 0, call: call.id, at }));
  return [...(one.text ? [{ who: "agent", text: one.text, at }] : []), ...calls];
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
