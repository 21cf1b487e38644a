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
/** By how much more than the time of a survey a lease must have grown to count as renewed, in ms. */
const SLACK = 50;

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
/** Of each claim: how long its lease still ran at the last survey, and the full length of its bar,
 * 0 while that is unknown: until a renewal is seen, unless the claim is new. */
let leases = new Map();
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

/** The same as a fraction of the longest lease; `null` while that is unknown. */
export function leftPart(claim) {
  const [now, full] = [left(claim), leases.get(claim.id)?.full ?? 0];
  return now === null || full === 0 ? null : Math.min(1, now / full);
}

/** The full length of a claim's bar, as far as this survey shows it. */
function fullLease(claim, elapsed, slack) {
  const [now, before] = [claim.expires_in_ms, leases.get(claim.id)];
  const isNew = before === undefined && feed.surveyed > 0;
  const isRenewed = before !== undefined && now > before.now - elapsed + slack;
  return isNew || isRenewed || before?.full > 0 ? Math.max(now, before?.full ?? 0) : 0;
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
  const [now, seen] = [performance.now(), new Map()];
  for (const line of found) {
    for (const claim of [...line.holders, ...line.waiters]) {
      if (typeof claim.expires_in_ms !== "number") continue;
      // The answer was made at some time since the request was sent.
      const full = fullLease(claim, now - feed.surveyed, now - started + SLACK);
      seen.set(claim.id, { now: claim.expires_in_ms, full });
    }
  }
  leases = seen;
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
