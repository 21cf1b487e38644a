// What happened to lines since the page was opened, by comparing each survey with the one before.
// Changes that come and go between two surveys are missed.

import { duration } from "./format.js";

/** How many events are kept, for all lines together. */
const KEPT = 5_000;
const events = [];

/** The events of a line, the newest first. */
export function eventsOf(name) {
  return events.filter((event) => event.name === name).reverse();
}

function claims(line) {
  const found = new Map();
  for (const claim of line?.holders ?? []) found.set(claim.id, { claim, holds: true });
  for (const claim of line?.waiters ?? []) found.set(claim.id, { claim, holds: false });
  return found;
}

function waited(claim, at) {
  const since = Date.parse(claim.since);
  return Number.isNaN(since) ? "" : `, ${duration(Math.max(0, at - since))} after it asked`;
}

/** The change of one claim. */
function change(before, after, at) {
  if (before === undefined) {
    const { claim, holds } = after;
    return holds
      ? ["took", `holds it${claim.token ? `, token ${claim.token}` : ""}`]
      : ["waits", `waits as number ${claim.position}`];
  }
  if (after === undefined) {
    const { claim, holds } = before;
    if (!holds) return ["left", "left the line"];
    return claim.evicted ? ["evicted", "was evicted"] : ["freed", "released or lost it"];
  }
  if (!before.holds && after.holds) {
    const { claim } = after;
    const token = claim.token ? `, token ${claim.token}` : "";
    return ["took", `was granted it${waited(claim, at)}${token}`];
  }
  if (!before.claim.evicted && after.claim.evicted) return ["evicted", "was asked to let go"];
  if (before.claim.mode !== after.claim.mode) return ["took", `holds it ${after.claim.mode} now`];
  return null;
}

/** Records the differences between two surveys, given as maps from names to lines. */
export function compare(before, after, at) {
  const look = (name, old, young) => {
    if (old === young) return;
    const [was, is] = [claims(old), claims(young)];
    for (const id of new Set([...was.keys(), ...is.keys()])) {
      const changed = change(was.get(id), is.get(id), at);
      if (changed === null) continue;
      const [what, text] = changed;
      const { claim } = is.get(id) ?? was.get(id);
      events.push({ at, name, what, text, claim });
    }
  };
  for (const [name, line] of after) look(name, before.get(name), line);
  for (const [name, line] of before) if (!after.has(name)) look(name, line, undefined);
  if (events.length > KEPT) events.splice(0, events.length - KEPT);
}
