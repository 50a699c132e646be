// API keys: which there are, a new one (its secret is shown once), and revoking.

import { del, get, post } from "../api.js";
import { glyph, h, put, span } from "../dom.js";
import { twice } from "../twice.js";

const SCOPES = ["chat", "runs", "sessions", "admin"];

/** @param {import("../types.js").Context} ctx @returns {import("../types.js").View} */
export function keys({ head, body, me, announce, fail, tell }) {
  const sum = h("span", { class: "sum" }), list = h("ol", { class: "plain-rows" }), fresh = h("div", { class: "fresh-key", role: "status" });
  head.append(sum);
  const boxes = SCOPES.map((scope) => h("label", { class: "check" }, h("input", { type: "checkbox", name: scope, checked: scope === "chat" || scope === "runs" }), scope));
  const form = h("form", { class: "make", onsubmit: (event) => { event.preventDefault(); make(); } },
    h("input", { class: "field", name: "name", placeholder: "Name", "aria-label": "Name", required: true, maxlength: "100" }), h("input", { class: "field", name: "tenant", placeholder: "Tenant (empty: one of its own)", "aria-label": "Tenant" }),
    h("input", { class: "field short", name: "days", type: "number", min: "1", placeholder: "Days (for ever)", "aria-label": "Days" }), h("fieldset", null, h("legend", { class: "label" }, "May use"), boxes), h("button", { class: "btn primary" }, "Make a key"));
  body.append(h("div", { class: "scroll pad", tabindex: "-1", "data-home": "" }, fresh, list, h("h3", null, "New key"), form));
  let rows = [];
  async function load() {
    try {
      ({ data: rows } = await get("/admin/keys"));
      draw();
    } catch (error) {
      fail(error);
    }
  }
  async function make() {
    const { name, tenant, days } = form.elements, scopes = SCOPES.filter((scope) => form.elements[scope].checked);
    try {
      const made = await post("/admin/keys", { name: name.value, tenant: tenant.value, scopes, ...(days.value ? { days: Number(days.value) } : {}) });
      fresh.replaceChildren(h("h2", null, `The key ${made.name}, shown this once`), h("code", { class: "secret" }, made.key),
        h("button", { class: "btn", onclick: async () => { try { await navigator.clipboard.writeText(made.key); tell("Copied."); } catch { tell("The browser does not allow copying: select the text.", "bad"); } } }, "Copy"), h("button", { class: "btn quiet", onclick: () => fresh.replaceChildren() }, "I have it"));
      form.reset();
      announce("A key was made. It is shown once.");
      await load();
    } catch (error) {
      fail(error);
    }
  }
  function draw() {
    const at = Date.now() / 1000, force = rows.filter((key) => !key.revoked_at);
    put(sum, `${force.length} in force`);
    list.replaceChildren(...[...force, ...rows.filter((key) => key.revoked_at)].map((key) => {
      const over = key.revoked_at || (key.expires_at && key.expires_at < at);
      return h("li", { class: "entry" + (over ? " over" : "") }, h("span", { class: `dot ${over ? "off" : ""}` }),
        h("div", { class: "what" }, h("strong", null, key.name), " ", h("code", { class: "faint" }, key.id), h("p", { class: "dim" }, key.tenant, " ", key.scopes.map((scope) => [h("span", { class: "chip" + (scope === "admin" ? " warn" : "") }, scope), " "]))),
        h("div", { class: "times" }, h("span", { class: "num" }, key.revoked_at ? "revoked" : key.expires_at ? (key.expires_at < at ? "expired" : `ends in ${span(key.expires_at - at)}`) : "no end"), h("span", { class: "faint num" }, key.last_used_at ? `used ${span(Math.max(0, at - key.last_used_at))} ago` : "never used")),
        h("div", { class: "acts" }, over ? null : twice("Revoke", key.id === me.key_id ? "Revoke the key of this page" : "Revoke at once", async () => { try { await del(`/admin/keys/${encodeURIComponent(key.id)}`); announce("Revoked."); await load(); } catch (error) { fail(error); } })));
    }));
    if (rows.length === 0) list.append(h("li", { class: "empty" }, glyph("keys"), h("h2", null, "Only the admin key"), h("p", null, "Give each program a key of its own: it sees only what it made, and can be revoked alone.")));
  }
  load();
  return { regain: load };
}
