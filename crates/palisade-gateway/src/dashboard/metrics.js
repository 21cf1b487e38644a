// Samples of /metrics: rates and latencies of the last minutes.
//
// Counters and histograms only rise; a sample is the difference from the previous one. A restarted
// gateway counts from zero, so its first sample is skipped.

import { getText } from "./gateway.js";

/** How much is kept. */
const KEPT = 150;

export const samples = [];
let last = null;

/** The text of Prometheus as series: name, labels, value. */
export function parse(text) {
  const series = [];
  for (const row of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(row);
    if (found === null) continue;
    const labels = {};
    for (const [, key, value] of (found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[key] = value;
    series.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return series;
}

function sum(series, name, fits = () => true) {
  return series.reduce((total, one) => (one.name === name && fits(one.labels) ? total + one.value : total), 0);
}

/** Cumulative counts of a histogram for each of its bounds, all labels together. */
function buckets(series, name) {
  const found = new Map();
  for (const one of series) {
    if (one.name !== `${name}_bucket`) continue;
    const end = one.labels.le === "+Inf" ? Infinity : Number(one.labels.le);
    found.set(end, (found.get(end) ?? 0) + one.value);
  }
  return found;
}

/** The quantile `part` of the values between two samples, or `null` if there were none. */
export function quantile(before, after, part) {
  const ends = [...after.keys()].sort((one, other) => one - other);
  const counts = ends.map((end) => after.get(end) - (before.get(end) ?? 0));
  const all = counts[counts.length - 1] ?? 0;
  if (all <= 0) return null;
  const at = counts.findIndex((count) => count >= part * all);
  const [low, below] = at === 0 ? [0, 0] : [ends[at - 1], counts[at - 1]];
  // Above the last bound only that bound is known.
  if (ends[at] === Infinity) return low;
  return low + ((ends[at] - low) * (part * all - below)) / Math.max(1, counts[at] - below);
}

const HISTOGRAMS = ["palisade_wait_seconds", "palisade_renew_seconds", "palisade_gateway_request_seconds"];
const COUNTERS = {
  held: ["palisade_acquire_total", (labels) => labels.outcome === "held"],
  notHeld: ["palisade_acquire_total", (labels) => labels.outcome !== "held"],
  renewed: ["palisade_renew_total", (labels) => labels.outcome === "held"],
  notRenewed: ["palisade_renew_total", (labels) => labels.outcome !== "held"],
  requests: ["palisade_gateway_requests_total"],
  errors: ["palisade_gateway_requests_total", (labels) => labels.status?.startsWith("5")],
  lost: ["palisade_lost_total", (labels) => labels.reason !== "evicted"],
};

/** Takes a sample. */
export async function sample() {
  if (document.hidden) return;
  let series;
  try {
    series = parse(await getText("metrics"));
  } catch {
    // Not allowed, or disconnected, which is shown elsewhere.
    return;
  }
  const now = { at: performance.now(), counts: {}, histograms: {} };
  for (const [key, [name, fits]] of Object.entries(COUNTERS)) now.counts[key] = sum(series, name, fits);
  for (const name of HISTOGRAMS) now.histograms[name] = buckets(series, name);
  const restarted = last !== null && now.counts.requests < last.counts.requests;
  if (last !== null && !restarted) samples.push(difference(last, now, series));
  if (samples.length > KEPT) samples.shift();
  last = now;
}

function difference(before, after, series) {
  const elapsed = (after.at - before.at) / 1000;
  const rates = {};
  for (const key of Object.keys(COUNTERS)) rates[key] = (after.counts[key] - before.counts[key]) / elapsed;
  const latencies = {};
  for (const name of HISTOGRAMS) {
    const at = (part) => quantile(before.histograms[name], after.histograms[name], part);
    latencies[name] = { half: at(0.5), most: at(0.99) };
  }
  const now = { holds: sum(series, "palisade_held"), waits: sum(series, "palisade_waiting"), sessions: sum(series, "palisade_gateway_sessions"), claims: sum(series, "palisade_gateway_claims") };
  return { at: after.at, rates, latencies, now, lost: after.counts.lost };
}
