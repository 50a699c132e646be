// Spans from stored things: the events of a run, or the times in a transcript.

const ENDS = { "run.completed": "completed", "run.failed": "failed", "run.cancelled": "cancelled" };

/**
 * @typedef {{kind: string, label: string, id: string, start: number, end: number|null, depth: number, how: string}} Span One bar of a timeline;
 *   `end` is null while it goes on.
 */

/** What a run did, from its events. Feed it each event as it comes; times are seconds since 1970. */
export class RunSpans {
  /** @param {object} run The run as `GET /v1/runs/{id}` gives it. */
  constructor(run) {
    Object.assign(this, { id: run.run_id, name: "", owner: run.session_id === run.run_id ? "" : run.session_id, title: (run.input_preview || run.run_id).split("\n")[0], start: run.created_at, end: run.ended_at ?? null, status: run.status, over: false, resets: 0 });
    this._clear();
  }

  /** Begin anew: the server did not know the last event (it was not yet written when the server died), and tells all of them again. */
  _clear() {
    /** @type {Span[]} */
    this.spans = [{ kind: "turn", label: this.title, id: this.id, start: this.start, end: this.end, depth: 0, how: "" }];
    Object.assign(this, { events: [], open: new Map(), output: "" });
    this.resets += 1;
  }

  get live() { return this.end === null; }

  _open(kind, id, label, at, depth) {
    const span = { kind, label, id, start: at, end: null, depth, how: "" };
    this.open.set(id, span);
    this.spans.push(span);
  }

  _close(id, at, how = "") {
    const span = this.open.get(id);
    if (!span) return;
    Object.assign(span, { end: at, how });
    this.open.delete(id);
  }

  /** Take the next event of the stream. @param {object} event */
  take(event) {
    const at = event.timestamp, name = event.event;
    if (name === "message.delta") { this.output += event.delta; return; }
    if (name === "resync") {
      if (event.reason === "unknown_event_id") this._clear();
      else this.events.push({ at: this.events.at(-1)?.at ?? this.start, event: "gap", text: "some events are not kept any more" });
      return;
    }
    this.events.push({ at, event: name, text: words(event) });
    if (name === "model.started") { this.output = ""; this._open("model", event.request_id, event.model, at, 1); }
    else if (name === "model.completed") this._close(event.request_id, at, event.error ? "failed" : "");
    else if (name === "tool.started") this._open(event.tool === "delegate_task" ? "delegation" : event.tool === "terminal" ? "process" : "tool", event.tool_call_id, event.preview || event.tool, at, 1);
    else if (name === "tool.completed") this._close(event.tool_call_id, at, event.error ? "failed" : "");
    else if (name === "approval.request") { this.status = "waiting_for_approval"; this._open("wait", event.approval_id, `waits: ${event.command}`, at, 2); }
    else if (name === "approval.responded" || name === "approval.expired") { this.status = "running"; this._close(event.approval_id, at, event.choice ?? "expired"); }
    else if (ENDS[name]) {
      this.status = ENDS[name];
      this.end = this.spans[0].end = at;
      this.over = true;
      if (event.output) this.output = event.output;
      for (const id of [...this.open.keys()]) this._close(id, at, this.status);
    }
  }
}

function words(event) {
  if (event.event.startsWith("tool.")) return `${event.tool} ${event.preview ?? ""}`.trim();
  if (event.event === "model.completed") return `${event.model} · ${event.usage.input_tokens} in, ${event.usage.output_tokens} out`;
  if (event.event === "model.started") return event.model;
  if (event.event === "approval.request") return event.command;
  if (event.event.startsWith("approval.")) return event.choice ?? event.reason ?? "";
  if (event.event === "run.completed") return event.usage ? `${event.usage.input_tokens} in · ${event.usage.output_tokens} out` : "";
  return event.error ?? event.cause ?? event.text ?? event.detail ?? "";
}

/**
 * What a session did, from the times of its messages: answers as model spans, results as tool spans.
 * @param {object} session @param {object[]} messages @returns {{id: string, start: number, end: number, spans: Span[]}}
 */
export function transcriptSpans(session, messages) {
  const spans = [], calls = new Map();
  let before = messages[0]?.timestamp ?? session.started_at;
  for (const one of messages) {
    if (one.role === "assistant") {
      spans.push({ kind: "model", label: session.model ?? "model", id: `m${one.id}`, start: before, end: one.timestamp, depth: 1, how: "" });
      for (const call of one.tool_calls ?? []) calls.set(call.id, { start: one.timestamp, name: call.function?.name ?? call.name ?? "tool" });
    } else if (one.role === "tool") {
      const call = calls.get(one.tool_call_id);
      spans.push({ kind: "tool", label: one.tool_name ?? call?.name ?? "tool", id: `m${one.id}`, start: call?.start ?? before, end: one.timestamp, depth: 1, how: "" });
    } else if (one.role === "user") spans.push({ kind: "turn", label: String(one.content ?? "").slice(0, 120) || "a message", id: `m${one.id}`, start: one.timestamp, end: one.timestamp, depth: 0, how: "" });
    before = one.timestamp;
  }
  // A turn lasts until the last thing before the next one.
  let turn = null;
  for (const span of spans) {
    if (span.kind === "turn") turn = span;
    else if (turn) turn.end = Math.max(turn.end, span.end);
  }
  const start = spans[0]?.start ?? session.started_at;
  return { id: session.id, name: session.title || session.preview || session.id, owner: session.source, start, end: before, status: "completed", spans, events: [] };
}
