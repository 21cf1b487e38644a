// Eviction: its effect, the reason, and then the request. Only operators see the buttons; the
// gateway decides.

import { h, setText, toast } from "./dom.js";
import { refresh } from "./feed.js";
import { who } from "./format.js";
import { post } from "./gateway.js";

/** `ask` waits for the holder to let go, for at most 50 s. */
const PATIENCE = 60_000;

const MEANING = {
  ask: "The holder is notified at its next renewal and lets go. A holder that is not reached loses the lock when its lease ends. Nobody else is granted the lock before. This may take as long as the lease.",
  force: "The lock is free at once, and the next in line may be granted it while the old holder still works: the holder learns of the eviction only at its next renewal. Only storage that checks fencing tokens is safe from its late writes.",
};

/** Asks for a reason and evicts `claim` of the lock `name`, or all who hold it. */
export function evict(name, claim) {
  const reason = h("textarea", { id: "reason", rows: 2, required: true, maxlength: 500 });
  const meaning = h("p", { class: "meaning", "aria-live": "polite" }, MEANING.ask);
  const failed = h("p", { class: "failed", role: "alert" });
  const how = (value, title) => h("label", { class: "choice" },
    h("input", { type: "radio", name: "how", value, checked: value === "ask", onchange: () => setText(meaning, MEANING[value]) }),
    title);
  const button = h("button", { type: "submit", class: "danger" }, "Evict");
  const form = h("form", { method: "dialog" },
    h("h2", {}, "Evict"),
    h("p", {}, claim === undefined ? "All who hold " : `${who(claim)} from `, h("strong", { class: "wrap" }, name)),
    h("fieldset", {}, h("legend", {}, "How"), how("ask", "Ask to let go"), how("force", "Take it away at once"), meaning),
    h("label", { for: "reason" }, "Reason, for the audit log"), reason, failed,
    h("div", { class: "buttons" },
      h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), button));
  const dialog = h("dialog", { class: "evict", "aria-label": "Evict" }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const value = form.elements.namedItem("how").value;
    button.disabled = true;
    setText(button, value === "ask" ? "Waiting for it to let go…" : "Evicting…");
    setText(failed, "");
    try {
      const answer = await post("v1/evictions", { name, claim: claim?.id, how: value, reason: reason.value }, PATIENCE);
      toast(answer.evicted ? `Evicted from ${name}.` : `Asked to let go of ${name}; it has until its lease ends.`);
      dialog.close();
    } catch (problem) {
      setText(failed, `Not evicted: ${problem.message}.`);
    }
    button.disabled = false;
    setText(button, "Evict");
    refresh();
  });
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  reason.focus();
}
