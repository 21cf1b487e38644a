// The live state of all lines: hints from the gateway's stream, and surveys of the current state.
//
// A hint may be lost and a stream may end, so a survey is made every few seconds anyway. Only a
// failed survey means that the page is disconnected, and only a successful one that it is connected
// again. A hidden page sends no requests.

import { compare } from "./history.js";
import * as gateway from "./gateway.js";

/** The interval of surveys without hints: while the stream is open, and while it is not. */
const RECHECK = 5_000;
const POLL = 1_000;
/** The shortest time between surveys; after a slow survey it is three times its duration. */
const APART = 150;
/** The pause before a retry after a failure. */
const [RETRY_FIRST, RETRY_LAST] = [500, 5_000];

export const feed = {
  /** From names to lines, as the last survey found them. */
  lines: new Map(),
  /** When that was, by `performance.now()`; 0 before the first. */
  surveyed: 0,
  /** When the last survey arrived, by the wall clock. */
  at: 0,
  /** The error of the last survey; `null` if it succeeded. */
  problem: null,
};

const listeners = new Set();
/** The longest lease seen of each claim, the full length of its bar. */
let longest = new Map();
let stream = null;
let streaming = false;
let wake = () => {};
let dirty = false;
let retry = RETRY_FIRST;

/** Calls back after every survey and whenever the connection changes; returns how to stop it. */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function tell() {
  for (const listener of [...listeners]) listener();
}

/** Asks for a survey now. */
export function refresh() {
  dirty = true;
  wake();
}

/** How long a claim's lease still runs, in ms; `null` if unknown. */
export function left(claim) {
  if (claim.expires_in_ms === null || claim.expires_in_ms === undefined) return null;
  return Math.max(0, claim.expires_in_ms - (performance.now() - feed.surveyed));
}

/** The same as a fraction of the longest lease. */
export function leftPart(claim) {
  const now = left(claim);
  return now === null ? null : Math.min(1, now / Math.max(1, longest.get(claim.id) ?? now));
}

/** The age of a claim, in ms; `null` if unknown. */
export function age(claim) {
  const since = Date.parse(claim.since);
  return Number.isNaN(since) ? null : Math.max(0, gateway.now() - since);
}

async function survey() {
  const started = performance.now();
  const found = await gateway.lines();
  const lines = new Map(found.map((line) => [line.name, line]));
  const leases = new Map();
  for (const line of found) {
    for (const claim of [...line.holders, ...line.waiters]) {
      if (typeof claim.expires_in_ms === "number") {
        leases.set(claim.id, Math.max(claim.expires_in_ms, longest.get(claim.id) ?? 0));
      }
    }
  }
  longest = leases;
  if (feed.surveyed > 0) compare(feed.lines, lines, gateway.now());
  Object.assign(feed, { lines, surveyed: performance.now(), at: Date.now(), problem: null });
  return performance.now() - started;
}

/** Listens to the stream until it ends. */
async function listen() {
  if (stream !== null || document.hidden) return;
  stream = new AbortController();
  try {
    await gateway.listen(() => {
      streaming = true;
      refresh();
    }, stream.signal);
  } catch {
    streaming = false;
  }
  stream = null;
}

function pause(ms) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    wake = () => {
      clearTimeout(timer);
      resolve();
    };
    if (dirty) wake();
  });
}

function sleep(ms) {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

/** Runs for as long as the page is open. */
export async function run() {
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) stream?.abort();
    refresh();
  });
  for (const event of ["online", "offline"]) window.addEventListener(event, refresh);
  for (;;) {
    dirty = false;
    if (document.hidden) {
      await pause(60_000);
      continue;
    }
    try {
      const took = await survey();
      retry = RETRY_FIRST;
      tell();
      listen();
      await sleep(Math.max(APART, 3 * took));
      await pause(streaming ? RECHECK : POLL);
    } catch (problem) {
      if (!(problem instanceof gateway.Problem)) throw problem;
      const since = feed.problem?.since ?? Date.now();
      feed.problem = { status: problem.status, code: problem.code, detail: problem.message, since };
      tell();
      await sleep(200);
      // A retry with the same token would be refused again.
      await pause(problem.status === 401 ? 3_600_000 : retry);
      retry = Math.min(RETRY_LAST, 2 * retry);
    }
  }
}
