// The server's API as this page uses it: JSON requests, and event streams that resume.

/** An error that the server answered with, in its own words. */
export class Problem extends Error {
  /** @param {number} status @param {string} code @param {string} message */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

async function problemOf(answer) {
  try {
    const { error } = await answer.json();
    return new Problem(answer.status, error.code ?? "", error.message ?? answer.statusText);
  } catch {
    return new Problem(answer.status, "", `The server answered ${answer.status}.`);
  }
}

/**
 * Ask for JSON. Throws `Problem`, or a TypeError when there is no server.
 * @param {string} method @param {string} path @param {object} [body] @returns {Promise<any>}
 */
export async function ask(method, path, body) {
  const options = { method, headers: {}, cache: "no-store" };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const answer = await fetch(path, options);
  if (!answer.ok) throw await problemOf(answer);
  return answer.json();
}
/** @param {string} path @returns {Promise<any>} */
export const get = (path) => ask("GET", path);
/** @param {string} path @param {object} [body] @returns {Promise<any>} */
export const post = (path, body) => ask("POST", path, body);
/** @param {string} path @returns {Promise<any>} */
export const del = (path) => ask("DELETE", path);
/** @param {string} path @param {object} [body] @returns {Promise<any>} */
export const patch = (path, body) => ask("PATCH", path, body);

/** Split the text of an event stream into events. Feed it pieces; it calls `hear({name, id, data})` for each whole event. */
export class EventParser {
  /** @param {(event: {name: string, id: string, data: any}) => void} hear */
  constructor(hear) {
    this.hear = hear;
    this.rest = "";
  }

  /** @param {string} text The next piece. */
  feed(text) {
    const blocks = (this.rest + text).split("\n\n");
    this.rest = blocks.pop();
    for (const block of blocks) this._one(block);
  }

  _one(block) {
    const event = { name: "", id: "", data: [] };
    for (const line of block.split("\n")) {
      const at = line.indexOf(":");
      if (at <= 0) continue;
      const field = line.slice(0, at), value = line.slice(at + 1).replace(/^ /, "");
      if (field === "data") event.data.push(value);
      else if (field === "event") event.name = value;
      else if (field === "id") event.id = value;
    }
    if (event.data.length > 0) this.hear({ name: event.name, id: event.id, data: JSON.parse(event.data.join("\n")) });
  }
}

/**
 * Read one event stream to its end. `hear` gets each event; `open` is called with the first byte.
 * @param {string} path
 * @param {{method?: string, body?: object, last?: string, signal?: AbortSignal, hear: Function, open?: () => void}} options
 * @returns {Promise<void>}
 */
export async function stream(path, { method = "GET", body, last = "", signal, hear, open = () => {} }) {
  const headers = { Accept: "text/event-stream" };
  if (last) headers["Last-Event-ID"] = last;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, { method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body) });
  if (!answer.ok) throw await problemOf(answer);
  open();
  const parser = new EventParser(hear), decoder = new TextDecoder(), reader = answer.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    parser.feed(decoder.decode(value, { stream: true }));
  }
}

const WAITS = [0.5, 1, 2, 4, 8]; // seconds between two attempts

/**
 * A stream that goes on until `finished(problem)` says that nothing more is to come (`problem` is null if the server ended it): reconnects, and resumes with the id of the last event. `state(name, seconds)` is told
 * "live", "lost" (with the seconds to the next attempt), "refused" (with the problem) or "over".
 */
export class Follower {
  /** @param {string|(() => string)} path The address, or what returns it for each attempt. @param {{hear: Function, state?: Function, finished?: (problem: Error|null) => boolean}} options */
  constructor(path, { hear, state = () => {}, finished = () => false }) {
    Object.assign(this, { path, hear, state, finished, last: "", tries: 0, closed: false, abort: null, wake: null });
    this.run();
  }

  async run() {
    while (!this.closed) {
      this.abort = new AbortController();
      let problem = null;
      try {
        await stream(typeof this.path === "string" ? this.path : this.path(), {
          last: this.last,
          signal: this.abort.signal,
          open: () => { this.tries = 0; this.state("live"); },
          hear: (event) => { if (this.closed) return; if (event.id) this.last = event.id; this.hear(event); },
        });
      } catch (error) {
        problem = error;
      }
      if (this.closed) return;
      if (this.finished(problem)) return this.state("over");
      if (problem instanceof Problem && problem.status < 500 && problem.status !== 429) {
        this.closed = true;
        return this.state("refused", problem);
      }
      const seconds = WAITS[Math.min(this.tries, WAITS.length - 1)];
      this.tries += 1;
      this.state("lost", seconds);
      await new Promise((go) => { this.wake = go; setTimeout(go, 1000 * seconds); });
    }
  }

  /** Try now instead of later. */
  now() { this.wake?.(); }

  close() {
    this.closed = true;
    this.abort?.abort();
    this.wake?.();
  }
}

/**
 * Stop the work of a node of the tree that the host `on` has: a load balancer may pass the request to another host. `line` gets each line of the receipt as it comes; returns the receipt.
 * @param {number} key @param {string} on @param {(line: object) => void} line @returns {Promise<object|null>}
 */
export async function stopNode(key, on, line) {
  let receipt = null;
  await stream(`/v1/tree/${key}/stop?node=${encodeURIComponent(on)}`, { method: "POST", hear: ({ name, data }) => { if (name === "line") line(data); else if (name === "receipt") receipt = data; } });
  return receipt;
}
