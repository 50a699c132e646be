// The load of the last minutes: a sample every two seconds, from the tree and from the server's metrics.

import { now } from "./dom.js";

const EVERY = 2, KEPT = 180;

/** The values of some series in the text that Prometheus reads; labels are summed up. @param {string} text @param {string[]} names @returns {Record<string, number>} */
export function readMetrics(text, names) {
  const found = Object.fromEntries(names.map((name) => [name, 0]));
  for (const line of text.split("\n")) {
    if (line.startsWith("#") || line === "") continue;
    const name = /^[^{ ]+/.exec(line)[0];
    if (name in found) found[name] += Number(line.slice(line.lastIndexOf(" ") + 1));
  }
  return found;
}

/** The load of the last minutes. */
export class Samples {
  /** @param {import("./store.js").TreeStore} store */
  constructor(store) {
    this.store = store;
    this.all = [];
    this.next = 0;
    this.wanted = false; // whether somebody looks: only then the metrics are fetched
    this.metrics = null;
  }

  /** Take a sample, if it is time for one. */
  take() {
    const at = now();
    if (at < this.next) return;
    this.next = at + EVERY;
    const kinds = Object.fromEntries(this.store.kinds), last = this.all.at(-1);
    this.all.push({ kinds, nodes: this.store.size, turns: kinds.turn ?? 0, requests: last?.requests ?? 0, lag: last?.lag ?? 0, outbox: last?.outbox ?? 0 });
    if (this.all.length > KEPT) this.all.shift();
    if (this.wanted) this._ask(this.all.at(-1));
  }

  async _ask(sample) {
    const began = performance.now();
    try {
      const [answer, health] = await Promise.all([fetch("/metrics", { cache: "no-store" }), fetch("/health/detailed", { cache: "no-store" })]);
      if (!answer.ok || !health.ok) return;
      sample.outbox = (await health.json()).readiness.checks.background_queues.outbox ?? 0;
      const text = await answer.text(), took = performance.now() - began;
      const read = readMetrics(text, ["hermes_http_requests_total"]);
      const total = read.hermes_http_requests_total;
      if (this.metrics) sample.requests = Math.max(0, (total - this.metrics.total) / ((began - this.metrics.at) / 1000));
      this.metrics = { total, at: began };
      sample.lag = took;
    } catch {
      // The next sample tries again.
    }
  }
}
