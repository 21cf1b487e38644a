// The page of one lock: its line as a picture, what happened to it, and the way to end a hold.

import { h, setAttribute, setText } from "./dom.js";
import { evict } from "./evict.js";
import { age, feed, subscribe } from "./feed.js";
import { clock, count, kind, plural, seconds, title, who } from "./format.js";
import { eventsOf } from "./history.js";
import { fillBar } from "./locks.js";
import { mayOperate } from "./principal.js";

/** How many waiters are drawn; the rest is shown as a number. */
const DRAWN = 60;

function fact(title, value, className) {
  if (value === null || value === undefined || value === "") return null;
  return [h("dt", {}, title), h("dd", { class: className }, value)];
}

/** One claim as a card. Its times are filled by `tick`. */
function card(name, claim, holds, operate) {
  const bar = h("span", { class: "bar-fill" });
  const track = h("span", { class: "bar-track", "aria-hidden": "true" }, bar);
  const left = h("span", { class: "bar-text" });
  const aged = h("dd", { class: "mono" });
  const node = h("li", { class: `claim ${holds ? "holds" : "waits"} ${claim.evicted ? "evicted" : ""}` },
    h("div", { class: "claim-head" },
      h("span", { class: "turn" }, holds ? "holds" : `${claim.position}`),
      h("strong", { class: "wrap" }, title(claim)),
      claim.evicted ? h("span", { class: "tag bad" }, "asked to let go") : null,
      operate ? h("button", { type: "button", class: "danger small", onclick: () => evict(name, claim) }, "Evict…") : null),
    h("dl", {},
      fact("Host", claim.host), fact("Process", claim.pid, "mono"), fact("Principal", claim.principal),
      fact("Mode", claim.weight && claim.mode === "permits" ? `${claim.mode}, ${claim.weight}` : claim.mode),
      fact("Token", claim.token, "mono"), fact("Value", claim.value, "wrap"), fact("Owner", claim.owner, "mono wrap"),
      fact("Trace", claim.traceparent, "mono wrap"),
      h("dt", {}, holds ? "Age" : "Waits"), aged,
      claim.expires_in_ms === null ? null : [h("dt", {}, "Time left"), h("dd", { class: "left" }, track, left)]));
  node.tick = () => {
    const old = age(claim);
    setText(aged, old === null ? "unknown" : seconds(old));
    fillBar({ bar, track, left }, claim);
  };
  node.tick();
  return node;
}

/** How much of the capacity each holder has. */
function meter(line) {
  if (line.kind !== "permits") return null;
  const taken = line.holders.map((claim) => claim.weight ?? line.capacity);
  const free = line.capacity - taken.reduce((sum, weight) => sum + weight, 0);
  return h("div", { class: "meter", role: "img", "aria-label": `${plural(free, "permit")} of ${count(line.capacity)} free` },
    taken.map((weight) => h("span", { class: "taken", style: { flexGrow: weight } })),
    free > 0 ? h("span", { class: "unused", style: { flexGrow: free } }) : null);
}

export function lockPage(main, name) {
  const heading = h("h1", { class: "wrap" }, name);
  const what = h("span", { class: "tag" });
  const actions = h("span", { class: "actions" });
  const picture = h("div", { class: "line" });
  const happened = h("ol", { class: "events" });
  const nothing = h("p", { class: "quiet" });
  main.append(h("div", { class: "page lock" },
    h("div", { class: "tools" }, h("a", { href: "#/locks", class: "back" }, "‹ Locks"), heading, what, actions),
    h("section", { "aria-label": "The line" }, picture),
    h("section", {}, h("h2", {}, "What happened since this page was opened"), nothing, happened)));
  let cards = [];
  let drawn;

  function draw() {
    const line = feed.lines.get(name) ?? { name, kind: "lock", capacity: null, holders: [], waiters: [] };
    const operate = mayOperate(name);
    setText(what, line.holders.length + line.waiters.length === 0 ? "free" : kind(line));
    // `tick` fills in values that change with time; for other changes the cards are rebuilt.
    const lasting = JSON.stringify([line, operate], (key, value) => (key === "expires_in_ms" ? value === null : value));
    if (lasting !== drawn) rebuild(line, operate);
    drawn = lasting;
    const claims = new Map([...line.holders, ...line.waiters].map((claim) => [claim.id, claim]));
    for (const one of cards) Object.assign(one.claim, claims.get(one.claim.id));
    tick();
    drawEvents();
  }

  function rebuild(line, operate) {
    // A card has a copy of its claim, which later surveys update.
    const make = (holds) => (claim) => {
      const copy = { ...claim };
      const node = card(name, copy, holds, operate);
      return { claim: copy, node };
    };
    const holders = line.holders.map(make(true));
    const waiters = line.waiters.slice(0, DRAWN).map(make(false));
    cards = [...holders, ...waiters];
    const more = line.waiters.length - waiters.length;
    const free = h("p", { class: "quiet" }, feed.surveyed === 0 ? "" : "Nobody holds it.");
    picture.replaceChildren(
      h("div", { class: "stage" },
        h("h2", {}, ["Free", "Held"][line.holders.length] ?? `Held by ${count(line.holders.length)}`), meter(line) ?? "",
        holders.length > 0 ? h("ul", { class: "claims" }, holders.map((one) => one.node)) : free),
      h("div", { class: "queue" },
        h("h2", {}, line.waiters.length > 0 ? `${count(line.waiters.length)} in line` : "Nobody in line"),
        h("ol", { class: "claims" }, waiters.map((one) => one.node)),
        more > 0 ? h("p", { class: "quiet" }, `and ${count(more)} more behind them`) : ""));
    actions.replaceChildren(...(operate && line.holders.length > 1
      ? [h("button", { type: "button", class: "danger small", onclick: () => evict(name) }, "Evict all holders…")] : []));
  }

  function drawEvents() {
    const events = eventsOf(name).slice(0, 200);
    nothing.hidden = events.length > 0;
    setText(nothing, "Nothing yet. What comes and goes within one refresh is not seen.");
    const newest = events[0];
    if (happened.newest === newest) return;
    happened.newest = newest;
    happened.replaceChildren(...events.map((event) => h("li", { class: event.what },
      h("time", { class: "mono", datetime: new Date(event.at).toISOString() }, clock(event.at)),
      h("span", { class: "wrap" }, h("strong", {}, who(event.claim)), ` ${event.text}`))));
  }

  function tick() {
    for (const one of cards) one.node.tick();
  }

  const unsubscribe = subscribe(draw);
  const ticking = setInterval(tick, 1000);
  setAttribute(heading, "title", name);
  draw();
  return {
    title: name,
    focus: () => main.focus({ preventScroll: true }),
    close: () => {
      unsubscribe();
      clearInterval(ticking);
    },
  };
}
