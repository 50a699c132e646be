// The types that the modules share, for editors and readers. Nothing of this runs.

/**
 * @typedef {object} TreeNode A node of the tree as this page knows it; times are seconds of `performance.now()`.
 * @property {number} key Unique in its server's life.
 * @property {string} id
 * @property {string} kind turn, model, tool, process, delegation, thread, lane, …
 * @property {string} name
 * @property {string} owner The session that it works for.
 * @property {string} tenant
 * @property {string} waits What it waits on, in words; empty while it computes.
 * @property {string} note
 * @property {boolean} stops Whether it can be stopped by itself.
 * @property {number} openedAt
 * @property {number} saidAt
 * @property {number|null} deadlineAt
 * @property {number|null} closedAt
 * @property {string} how How it ended, once it has.
 * @property {TreeNode|null} parent
 * @property {Set<TreeNode>} children
 *
 * @typedef {object} Caller Who is signed in.
 * @property {string} name
 * @property {string} tenant
 * @property {string[]} scopes
 * @property {boolean} admin
 *
 * @typedef {object} Context What a view is given.
 * @property {import("./store.js").TreeStore} store
 * @property {import("./samples.js").Samples} samples
 * @property {import("./asks.js").Asks} asks
 * @property {import("./talks.js").Talks|null} talks
 * @property {Caller} me
 * @property {HTMLElement} head Where its title stands; a view adds its tools.
 * @property {HTMLElement} body Where it is drawn.
 * @property {string[]} rest What its address says behind its name.
 * @property {(path: string) => void} go
 * @property {(words: string) => void} announce Says something to a screen reader.
 * @property {(words: string, look?: string) => void} tell Shows something for a moment.
 * @property {(error: Error) => void} fail Shows what went wrong, in the server's words.
 *
 * @typedef {object} View What a view gives back; the shell calls it.
 * @property {() => void} [tick] Ten times a second while it is shown.
 * @property {() => void} [regain] The connection, or the server, is back.
 * @property {() => void} [leave] It is not shown any more.
 * @property {(event: KeyboardEvent) => boolean} [key] A key that no field took; true if it meant something.
 *
 * @typedef {object} Approval Something that waits for a person.
 * @property {string} approval_id
 * @property {string} command
 * @property {string} description
 * @property {string[]} pattern_keys
 * @property {string[]} choices
 * @property {number} requested_at
 * @property {number} expires_at
 * @property {string} session_key
 * @property {string} run_id
 */

export {};
