// The frame around the pages: which page is shown, the connection, the token, the keys.

import { h, setAttribute, setText } from "./dom.js";
import { deadlocks, lookForDeadlocks } from "./deadlocks.js";
import { enginePage } from "./engine.js";
import { feed, refresh, run, subscribe } from "./feed.js";
import { clock, count } from "./format.js";
import * as gateway from "./gateway.js";
import { lockPage } from "./lock.js";
import { locksPage } from "./locks.js";
import { sample } from "./metrics.js";
import { engine, lookAtEngine } from "./principal.js";
import { waitsPage } from "./waits.js";

const part = (id) => document.getElementById(id);
const main = part("main");
const PAGES = { locks: locksPage, lock: lockPage, waits: waitsPage, engine: enginePage };
let shown = null;

/** Shows the page that the address names. */
function route(moved) {
  if (gateway.takeToken()) {
    refresh();
    lookAtEngine().then(refresh);
  }
  const [, page = "locks", rest = ""] = location.hash.split("/");
  const make = PAGES[page] ?? PAGES.locks;
  let name = "";
  try {
    name = decodeURIComponent(rest);
  } catch {
    // A truncated URL: it names no lock.
  }
  shown?.close();
  main.replaceChildren();
  shown = make(main, name);
  document.title = `${shown.title} · palisade`;
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.dataset.page === page || (page === "lock" && link.dataset.page === "locks");
    setAttribute(link, "aria-current", here ? "page" : null);
  }
  if (moved) shown.focus();
}

/** The problem with the connection, as a sentence; `null` if there is none. */
function trouble() {
  const { problem } = feed;
  if (problem === null) return null;
  const since = ` since ${clock(problem.since)}`;
  const stale = feed.at > 0 ? ` What you see is from ${clock(feed.at)}.` : "";
  if (problem.status === 0) return `Cut off from the gateway${since}.${stale} Trying again…`;
  if (problem.status === 401) return null;
  if (problem.status === 503) return `The engine can't be reached${since}: ${problem.detail}.${stale} Trying again…`;
  return `The gateway refuses${since}: ${problem.detail}.${stale}`;
}

function drawFrame() {
  const { problem } = feed;
  const said = trouble();
  const banner = part("banner");
  setText(banner, said ?? "");
  banner.hidden = said === null;
  document.body.classList.toggle("stale", said !== null);
  const state = problem === null ? (feed.surveyed === 0 ? "connecting" : "live") : problem.status === 401 ? "locked" : "cut off";
  setAttribute(part("state"), "data-state", state.replace(" ", "-"));
  setText(part("state"), engine.known?.draining && state === "live" ? "live, draining" : state);
  setText(part("where"), engine.known?.engine ?? "");
  setAttribute(part("where"), "title", engine.known?.engine);
  const waiting = [...feed.lines.values()].reduce((sum, line) => sum + line.waiters.length, 0);
  setText(part("count-locks"), feed.surveyed === 0 ? "" : count(feed.lines.size));
  setText(part("count-waits"), waiting === 0 ? "" : count(waiting));
  part("count-waits").classList.toggle("bad", deadlocks.found.length > 0);
  askForToken(problem?.status === 401);
}

/** Shows the form for the token while one is needed. */
function askForToken(needed) {
  const open = document.querySelector("dialog.token");
  if (!needed) {
    open?.close();
    return;
  }
  const wrong = gateway.hasToken() ? "The gateway does not know this token." : "";
  const offered = gateway.offeredToken();
  const offer = offered === null ? "" : " The link that you opened has another one, which is filled in.";
  if (open !== null) {
    setText(open.querySelector(".failed"), wrong + offer);
    if (offered !== null && open.querySelector("input").value === "") open.querySelector("input").value = offered;
    return;
  }
  const token = h("input", { type: "password", id: "token", required: true, autocomplete: "off", spellcheck: "false" });
  const form = h("form", { method: "dialog" }, h("h2", {}, "Token"),
    h("p", {}, "This gateway requires a token. It is in the address that ", h("code", {}, "palisade serve"), " shows, or is the one that its operator gave you. Only this tab keeps it."),
    h("label", { for: "token" }, "Token"), token, h("p", { class: "failed", role: "alert" }, wrong + offer),
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "primary" }, "Show the locks")));
  token.value = offered ?? "";
  const dialog = h("dialog", { class: "token", "aria-label": "Token" }, form);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    gateway.setToken(token.value);
    token.value = "";
    refresh();
    lookAtEngine().then(refresh);
  });
  // Without a token there is no page behind the dialog.
  dialog.addEventListener("cancel", (event) => event.preventDefault());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  token.focus();
}

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  setAttribute(document.documentElement, "data-theme", theme === "system" ? null : theme);
  setText(part("theme"), { system: "◐", light: "○", dark: "●" }[theme]);
  setAttribute(part("theme"), "aria-label", `Theme: ${theme}`);
  localStorage.setItem("palisade-theme", theme);
}

function nextTheme() {
  const at = THEMES.indexOf(localStorage.getItem("palisade-theme") ?? "system");
  setTheme(THEMES[(at + 1) % THEMES.length]);
}

const KEYS = [
  ["1  2  3", "locks, waits, engine"], ["/", "filter"], ["↓ ↑  j k", "next and previous lock"], ["Enter", "open the lock"],
  ["Esc", "back to the locks"], ["t", "light, dark, or as the system has it"], ["?", "this list"],
];

function showKeys() {
  if (document.querySelector("dialog") !== null) return;
  const rows = KEYS.map(([key, does]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, does)]);
  const forget = h("button", { type: "button", onclick: () => {
    gateway.setToken(null);
    location.reload();
  } }, "Forget the token");
  const dialog = h("dialog", { class: "keys", "aria-label": "Keys" }, h("form", { method: "dialog" }, h("h2", {}, "Keys"),
    h("dl", {}, rows), h("div", { class: "buttons" }, gateway.hasToken() ? forget : null, h("button", { class: "primary" }, "Close"))));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function press(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog") !== null) return;
  const typing = event.target.matches("input, textarea, select");
  if (event.key === "Escape") {
    if (typing) event.target.blur();
    else if (location.hash.startsWith("#/lock/")) location.hash = "#/locks";
    return;
  }
  if (typing) return;
  const pages = { 1: "#/locks", 2: "#/waits", 3: "#/engine" };
  if (event.key in pages) location.hash = pages[event.key];
  else if (event.key === "/") {
    if (part("filter") === null) location.hash = "#/locks";
    // The page exists only after the address has changed.
    setTimeout(() => part("filter")?.focus(), 0);
  } else if (event.key === "t") nextTheme();
  else if (event.key === "?") showKeys();
  else return;
  event.preventDefault();
}

setTheme(THEMES.find((theme) => theme === localStorage.getItem("palisade-theme")) ?? "system");
part("theme").addEventListener("click", nextTheme);
part("keys").addEventListener("click", showKeys);
document.addEventListener("keydown", press);
// The link's address would be taken for that of a page.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
window.addEventListener("hashchange", () => route(true));
subscribe(drawFrame);
route(false);
drawFrame();
run();
lookAtEngine().then(refresh);
// Data that is shown on every page is refreshed less often than on its own page.
setInterval(() => lookForDeadlocks().then(drawFrame), 5000);
setInterval(() => {
  if (!document.hidden && feed.problem === null) lookAtEngine().then(drawFrame);
}, 30_000);
setInterval(sample, 10_000);
