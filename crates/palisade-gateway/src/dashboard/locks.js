// The page of all locks: one row for each, live, with a filter and an order.

import { h, lockAddress, setAttribute, setText } from "./dom.js";
import { age, feed, left, leftPart, subscribe } from "./feed.js";
import { count, kind, place, plural, seconds, title, who } from "./format.js";
import { VirtualList } from "./list.js";

/** The filter and the order are kept while other pages are shown. */
const chosen = { filter: "", order: "name", down: false };

/** The smallest time left among a line's holders; those without a lease come last. */
function leastLeft(line) {
  return Math.min(Infinity, ...line.holders.map((claim) => left(claim) ?? Infinity));
}

function oldest(line) {
  return Math.max(-1, ...line.holders.map((claim) => age(claim) ?? -1));
}

function firstToken(line) {
  return BigInt(line.holders[0]?.token ?? 0);
}

function compareText(one, other) {
  return one < other ? -1 : one > other ? 1 : 0;
}

/** The title and the sort key of each column; numbers are sorted in descending order first. */
const COLUMNS = [
  { id: "name", title: "Lock", value: (line) => line.name },
  { id: "kind", title: "Kind", value: (line) => kind(line) },
  { id: "holder", title: "Held by", value: (line) => (line.holders[0] ? who(line.holders[0]) : "") },
  { id: "token", title: "Token", value: firstToken, number: true, down: true },
  { id: "age", title: "Age", value: oldest, number: true, down: true },
  { id: "left", title: "Time left", value: leastLeft, number: true },
  { id: "waiting", title: "Waiting", value: (line) => line.waiters.length, down: true },
];

const searched = new WeakMap();

/** The text that the filter searches, built once for each survey. */
function text(line) {
  let found = searched.get(line);
  if (found === undefined) {
    const claims = [...line.holders, ...line.waiters].flatMap((claim) => [who(claim), claim.owner, claim.token]);
    found = [line.name, ...claims].join("\n").toLowerCase();
    searched.set(line, found);
  }
  return found;
}

function chosenLines() {
  const words = chosen.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (const line of feed.lines.values()) {
    if (words.every((word) => text(line).includes(word))) found.push(line);
  }
  const { value } = COLUMNS.find((column) => column.id === chosen.order);
  const sign = chosen.down ? -1 : 1;
  const keyed = found.map((line) => [value(line), line]);
  keyed.sort((one, other) => sign * compareText(one[0], other[0]) || compareText(one[1].name, other[1].name));
  return keyed.map(([, line]) => line);
}

function makeRow() {
  const cell = (name, ...children) => h("div", { class: `cell ${name}`, role: "gridcell" }, ...children);
  const link = h("a", { tabindex: -1 });
  const bar = h("span", { class: "bar-fill" });
  const row = h("div", { class: "row", role: "row" },
    cell("name", link), cell("kind"),
    cell("holder", h("span", { class: "who" }), h("span", { class: "place" }), h("span", { class: "more" })),
    cell("token"), cell("age"),
    cell("left", h("span", { class: "bar-track", "aria-hidden": "true" }, bar), h("span", { class: "bar-text" })),
    cell("waiting", h("span", { class: "number" }), h("span", { class: "who" })));
  const part = (selector) => row.querySelector(selector);
  row.parts = {
    link, bar, kind: part(".kind"), holder: part(".holder .who"), place: part(".place"), more: part(".more"), token: part(".token"),
    age: part(".age"), left: part(".bar-text"), track: part(".bar-track"), waiting: part(".waiting .number"),
    waiters: part(".waiting .who"),
  };
  return row;
}

function fillRow(row, line) {
  const { parts } = row;
  const [holder] = line.holders;
  setText(parts.link, line.name);
  setAttribute(parts.link, "href", lockAddress(line.name));
  setAttribute(parts.link, "title", line.name);
  setText(parts.kind, kind(line));
  setText(parts.holder, holder === undefined ? "nobody" : title(holder));
  setText(parts.place, holder === undefined ? "" : place(holder));
  setText(parts.more, line.holders.length > 1 ? `+${count(line.holders.length - 1)}` : "");
  setText(parts.token, holder?.token ?? "");
  const old = holder === undefined ? null : age(holder);
  setText(parts.age, old === null ? "" : seconds(old));
  fillBar(parts, holder);
  setText(parts.waiting, line.waiters.length === 0 ? "" : count(line.waiters.length));
  setText(parts.waiters, line.waiters.slice(0, 3).map(title).join(", "));
  row.classList.toggle("free", holder === undefined);
  row.classList.toggle("evicted", holder?.evicted === true);
}

/** A bar of the time that a lease still runs. */
export function fillBar({ bar, track, left: shown }, claim) {
  const remaining = claim === undefined ? null : left(claim);
  track.hidden = remaining === null;
  setText(shown, remaining === null ? "" : seconds(remaining));
  if (remaining === null) return;
  const part = leftPart(claim);
  track.classList.toggle("unknown", part === null);
  const width = `${Math.round((part ?? 0) * 100)}%`;
  if (bar.style.width !== width) bar.style.width = width;
  bar.classList.toggle("low", part !== null && part < 0.25);
}

export function locksPage(main) {
  const filter = h("input", {
    type: "search", id: "filter", placeholder: "Filter by name, host, pid, label, token  ( / )",
    "aria-label": "Filter", value: chosen.filter, autocomplete: "off", spellcheck: "false",
  });
  const summary = h("p", { class: "summary", role: "status" });
  const list = new VirtualList({
    label: "Locks", make: makeRow, fill: fillRow, key: (line) => line.name,
    open: (line) => { location.hash = lockAddress(line.name); },
  });
  const heads = COLUMNS.map((column) => h("div", { class: `cell ${column.id}`, role: "columnheader" },
    h("button", { type: "button", onclick: () => order(column) }, column.title)));
  const select = h("select", { "aria-label": "Order", class: "order", onchange: () => {
    order(COLUMNS.find((column) => column.id === select.value));
  } }, COLUMNS.map((column) => h("option", { value: column.id }, `by ${column.title.toLowerCase()}`)));
  const empty = h("div", { class: "empty" });
  list.node.prepend(h("div", { class: "row head", role: "row", "aria-rowindex": 1 }, heads));
  main.append(h("div", { class: "page locks" },
    h("div", { class: "tools" }, h("h1", {}, "Locks"), filter, select, summary), empty, list.node));

  function order(column) {
    chosen.down = chosen.order === column.id ? !chosen.down : column.down === true;
    chosen.order = column.id;
    draw();
  }

  function draw() {
    const lines = chosenLines();
    const all = [...feed.lines.values()];
    const waiting = all.reduce((sum, line) => sum + line.waiters.length, 0);
    const shown = lines.length === all.length ? plural(all.length, "lock") : `${count(lines.length)} of ${plural(all.length, "lock")}`;
    setText(summary, feed.surveyed === 0 ? "" : `${shown}, ${plural(waiting, "waiter")}`);
    const none = feed.lines.size === 0
      ? "Nobody holds or waits for a lock. It appears here as soon as somebody does, such as by palisade run NAME -- COMMAND."
      : "No lock fits the filter.";
    setText(empty, feed.surveyed === 0 || lines.length > 0 ? "" : none);
    empty.hidden = empty.textContent === "";
    list.node.hidden = !empty.hidden;
    COLUMNS.forEach((column, at) => {
      const sorted = column.id === chosen.order ? (chosen.down ? "descending" : "ascending") : "none";
      setAttribute(heads[at], "aria-sort", sorted);
    });
    select.value = chosen.order;
    list.show(lines);
  }

  filter.addEventListener("input", () => {
    chosen.filter = filter.value;
    list.node.scrollTop = 0;
    draw();
  });
  filter.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowDown" && event.key !== "Enter") return;
    event.preventDefault();
    list.node.focus();
    list.mark(0);
  });
  const unsubscribe = subscribe(draw);
  const ticking = setInterval(() => list.draw(), 1000);
  draw();
  return {
    title: "Locks",
    focus: () => list.node.focus({ preventScroll: true }),
    close: () => {
      unsubscribe();
      clearInterval(ticking);
      list.close();
    },
  };
}
