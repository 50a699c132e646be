// What waits for a person. The tree says which approvals there are; their words are fetched when that changes.

import { get, post } from "./api.js";

/** What waits for a person, and what was answered lately. */
export class Asks {
  constructor() {
    this.pending = [];
    this.answered = [];
    this.enabled = false;
    this.version = 0;
    this.known = null;
    this.busy = false;
  }

  /** Fetch again if the ids of what waits are others than those that are known. @param {string[]} ids */
  follow(ids) {
    const mark = ids.join();
    if (!this.enabled || this.busy || mark === this.known) return;
    this.known = mark;
    this.load();
  }

  /** Fetch both lists. */
  async load() {
    this.busy = true;
    try {
      const [waiting, past] = await Promise.all([get("/v1/approvals"), get("/v1/approvals?state=answered&limit=20")]);
      this.pending = waiting.data;
      this.answered = past.data;
      this.version += 1;
    } catch {
      this.known = null; // the next beat asks again
    } finally {
      setTimeout(() => { this.busy = false; }, 250);
    }
  }

  /** Answer one. Whoever was faster has answered it: then it is fetched again. @param {string} id @param {string} choice */
  async answer(id, choice) {
    try {
      await post(`/v1/approvals/${encodeURIComponent(id)}`, { choice });
    } finally {
      this.known = null;
    }
  }
}
