// The load of the last minutes, as the server has sampled it: fetched while somebody looks.

import { get } from "./api.js";
import { now } from "./dom.js";

const KEPT = 180;

/** The load of the last minutes. */
export class Samples {
  constructor() {
    this.all = [];
    this.next = 0;
    this.wanted = false; // whether somebody looks
  }

  /** Fetch what is new, if somebody looks and it is time for it. */
  take() {
    if (!this.wanted || now() < this.next) return;
    this.next = now() + 2;
    this._ask();
  }

  /** Forget everything: another server counts from one. */
  clear() {
    this.all = [];
    this.next = 0;
  }

  async _ask() {
    const last = this.all.at(-1);
    try {
      const { data } = await get(`/health/load?after=${last?.number ?? 0}`);
      if (last === this.all.at(-1)) this.all = [...this.all, ...data].slice(-KEPT);
    } catch {
      // The next beat tries again.
    }
  }
}
