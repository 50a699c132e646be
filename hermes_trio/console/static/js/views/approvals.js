// Everything that waits for a person, the oldest first, with the exact command. One click answers.

import { glyph, h, place, put, span } from "../dom.js";

const CHOICES = [["once", "Allow once", "o", "primary"], ["session", "For this session", "s", ""], ["always", "Always", "a", ""], ["deny", "Deny", "d", "danger"]];
const SAID = { once: "Allowed once", session: "Allowed for the session", always: "Always allowed", deny: "Denied", expired: "Nobody answered: refused" };
const wall = () => Date.now() / 1000;

/**
 * The card of one question; also used by the chat.
 * @param {import("../types.js").Approval} approval @param {(approval: object, choice: string) => void} answer @returns {HTMLElement}
 */
export function card(approval, answer) {
  const left = h("span", { class: "num" }), meter = h("i", { class: "meter" }), [where, chat] = place(approval.session_key || approval.run_id);
  const offered = CHOICES.filter(([choice]) => approval.choices.includes(choice));
  const el = h("article", { class: "card", "aria-label": `Approval ${approval.approval_id}`, tabindex: "0" },
    h("header", null, glyph("person", "k-person"), h("strong", { class: "cut" }, [where, chat].filter(Boolean).join(" · ") || "this conversation"), approval.tenant ? h("span", { class: "chip" }, approval.tenant) : null, h("span", { class: "left" }, left)),
    h("pre", null, approval.command),
    h("p", { class: "why" }, approval.description || "This command needs a person.", approval.pattern_keys.map((key) => [" ", h("span", { class: "chip warn" }, key)])), meter,
    h("footer", null, offered.map(([choice, words, key, look]) => h("button", { class: `btn ${look}`, onclick: () => choose(choice) }, words, h("kbd", null, key)))));
  const choose = (choice) => { for (const button of el.querySelectorAll("button")) button.disabled = true; answer(approval, choice); };
  el.tick = () => {
    const rest = approval.expires_at - wall();
    put(left, `refused in ${span(Math.max(0, rest))}`);
    meter.style.setProperty("--part", Math.max(0, rest / (approval.expires_at - approval.requested_at)).toFixed(3));
    meter.classList.toggle("soon", rest < 30);
  };
  el.addEventListener("keydown", (event) => {
    const found = offered.find(([, , key]) => key === event.key);
    if (found && event.target === el) { event.stopPropagation(); choose(found[0]); }
  });
  el.tick();
  return el;
}

/** @param {import("../types.js").Context} ctx @returns {import("../types.js").View} */
export function approvals({ asks, head, body, announce, fail }) {
  const sum = h("span", { class: "sum" }), waiting = h("div", { class: "cards" }), past = h("ol", { class: "answered" });
  head.append(sum);
  body.append(h("div", { class: "scroll pad", tabindex: "-1", "data-home": "" }, waiting, h("h3", null, "Answered"), past));
  let drawn = -1;
  const answer = async (approval, choice) => {
    try {
      await asks.answer(approval.approval_id, choice);
      announce(SAID[choice]);
    } catch (error) {
      fail(error);
    }
    asks.load();
  };
  function row(one) {
    const no = one.state !== "approved", words = one.state === "expired" ? (one.reason === "timeout" || !one.reason ? SAID.expired : `Withdrawn: ${one.reason}`) : SAID[one.choice] ?? one.state;
    return h("li", { class: no ? "no" : "" }, glyph(one.state === "denied" ? "close" : no ? "job" : "check"),
      h("code", { class: "cut", title: one.command }, one.command), h("span", { class: "dim" }, words),
      h("span", { class: "faint cut" }, place(one.session_key || one.run_id).filter(Boolean).join(" · ")), h("span", { class: "num faint" }, one.answered_at ? "after " + span(one.answered_at - one.requested_at) : ""));
  }
  function tick() {
    const { pending, answered } = asks;
    put(sum, pending.length === 0 ? "nobody is kept waiting" : `${pending.length} waiting, the oldest for ${span(wall() - pending[0].requested_at)}`);
    if (asks.version !== drawn) {
      const had = document.activeElement?.getAttribute("aria-label");
      drawn = asks.version;
      waiting.replaceChildren(...pending.map((one) => card(one, answer)));
      if (pending.length === 0) waiting.append(h("div", { class: "empty" }, glyph("approvals"), h("h2", null, "Nothing waits for you"), h("p", null, "A command that the guard flags stops here until somebody answers, or is refused when its time is over.")));
      past.replaceChildren(...answered.map(row));
      const again = [...waiting.children].find((el) => el.getAttribute("aria-label") === had);
      (again ?? (had?.startsWith("Approval ") ? waiting.querySelector(".card") : null))?.focus();
    }
    for (const el of waiting.children) el.tick?.();
  }
  function key(event) {
    const cards = [...waiting.querySelectorAll(".card")], at = cards.indexOf(document.activeElement), by = { j: 1, ArrowDown: 1, k: -1, ArrowUp: -1 }[event.key];
    if (by) cards[Math.min(cards.length - 1, Math.max(0, at + by))]?.focus();
    return Boolean(by);
  }
  asks.load();
  tick();
  waiting.querySelector(".card")?.focus({ preventScroll: true });
  return { tick, key };
}
