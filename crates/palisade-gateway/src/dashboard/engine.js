// The page of the engine: its capability in words; unsafe settings, each with a remedy; rates and
// latencies of this gateway; its sessions.

import { h, setText } from "./dom.js";
import { count, duration, latency, plural } from "./format.js";
import { sample, samples } from "./metrics.js";
import { plot } from "./plot.js";
import { engine, lookAtEngine } from "./principal.js";

const CLASSES = {
  A: "Consensus: exclusion and tokens survive lost nodes and stepped clocks.",
  B: "One durable node: tokens survive; exclusion assumes that its clock is not stepped.",
  C: "Timed: exclusion and tokens assume correct clocks and no data loss.",
};

/** The capability, as sentences: whether it is so, and what that means. */
function abilities(can) {
  const tokens = {
    durable: [true, "Fencing tokens never go back."],
    floored: [true, "Fencing tokens go back only if counter and clock are lost."],
    none: [false, "There are no fencing tokens."],
  };
  const permits = {
    weighted: [true, "Permits of any weight."],
    slots: [true, "Permits one by one."],
    none: [false, "No permits."],
  };
  return [
    tokens[can.tokens],
    can.early_loss ? [true, "A holder learns that its lease is ending before the next grant."] : [false, "A holder may learn of its loss only after the next grant."],
    can.fair ? [true, "Waiters are served in order of arrival."] : [false, "Waiters are served in no particular order."],
    can.waiters_visible ? [true, "It shows who waits, so deadlocks are found."] : [false, "It does not show who waits, so waiters and deadlocks are not shown."],
    can.shared ? [true, "Readers hold concurrently."] : [false, "No read-write locks."],
    permits[can.permits],
    [true, `A ttl of ${duration(can.ttl_ms.min)} to ${duration(can.ttl_ms.max)}.`],
  ];
}

function drawEngine(known) {
  const drift = known.clock_ahead_us;
  const clock = drift === null || drift === undefined ? null : `Its clock is ${latency(Math.abs(drift) / 1e6)} ${drift < 0 ? "behind" : "ahead of"} the gateway's.`;
  const version = known.version ? ` ${known.version}` : "";
  return [
    h("h2", {}, "Engine"),
    h("p", { class: "big wrap" }, `${known.engine}${version}`),
    h("p", {}, CLASSES[known.capability.class] ?? `Class ${known.capability.class}.`),
    h("ul", { class: "abilities" }, abilities(known.capability).filter(Boolean).map(([yes, text]) =>
      h("li", { class: yes ? "yes" : "no" }, h("span", { class: "sign", role: "img", "aria-label": yes ? "yes" : "no" }, yes ? "✓" : "–"), text))),
    clock === null ? null : h("p", { class: "quiet" }, clock),
    known.passable === false ? h("p", { class: "tag bad" }, "Claims through this gateway are refused: this engine ends a hold with the gateway's process.") : null,
    known.you ? h("p", { class: "quiet" }, `You are ${known.you.name}. You may ${rights(known.you)}.`) : null,
  ].filter(Boolean);
}

function rights(you) {
  const where = (prefixes) => (prefixes.includes("") ? "everything" : prefixes.join(", "));
  const parts = [["see", you.see], ["use", you.use], ["evict from", you.operate]].filter(([, prefixes]) => prefixes.length > 0);
  return parts.map(([verb, prefixes]) => `${verb} ${where(prefixes)}`).join("; ") || "do nothing";
}

function drawFindings(findings) {
  if (findings.length === 0) return [h("h2", {}, "Findings"), h("p", { class: "quiet" }, "Nothing unsafe was found in its settings.")];
  return [h("h2", {}, "Findings"), h("ul", { class: "findings" }, findings.map((finding) =>
    h("li", { class: finding.severity }, h("span", { class: "tag" }, finding.severity),
      h("div", {}, h("p", {}, finding.message), h("p", { class: "quiet" }, finding.remedy)))))];
}

function drawSessions(known) {
  const sessions = known.open_sessions ?? [];
  const heading = h("h2", {}, `${plural(known.sessions, "session")} of this gateway`);
  if (sessions.length === 0) {
    const why = known.sessions > 0 ? "They are of principals whose locks you may not see." : "Clients of the gateway open them; programs that use the engine directly have none.";
    return [heading, h("p", { class: "quiet" }, why)];
  }
  const head = ["Session", "Principal", "Holds", "Waits", "Ttl", "Ends in"];
  const number = (text) => h("td", { class: "number" }, text);
  return [heading, h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((title, at) => h("th", { scope: "col", class: at > 1 ? "number" : "" }, title)))),
    h("tbody", {}, sessions.map((one) => h("tr", {}, h("td", { class: "mono" }, one.id), h("td", { class: "wrap" }, one.principal),
      number(count(one.holds)), number(count(one.waits)), number(duration(one.ttl_ms)), number(duration(one.ends_in_ms))))))),
  known.sessions > sessions.length ? h("p", { class: "quiet" }, `and ${count(known.sessions - sessions.length)} more`) : ""];
}

function drawPlots() {
  const rate = (key) => samples.map((one) => one.rates[key]);
  const slow = (name, part) => samples.map((one) => one.latencies[name][part]);
  const perSecond = (value) => (value === 0 || value >= 100 ? count(Math.round(value)) : value.toPrecision(2));
  const both = (title, name) => plot(title, [
    { name: "p99", values: slow(name, "most"), kind: "second" }, { name: "p50", values: slow(name, "half") },
  ], latency);
  const now = (key) => samples.map((one) => one.now[key]);
  const whole = (value) => count(value);
  return [
    plot("Acquires a second", [{ name: "not held", values: rate("notHeld"), kind: "second" }, { name: "held", values: rate("held") }], perSecond),
    both("Time to acquire", "palisade_wait_seconds"),
    plot("Renewals a second", [{ name: "failed", values: rate("notRenewed"), kind: "bad" }, { name: "renewed", values: rate("renewed") }], perSecond),
    both("Time to renew", "palisade_renew_seconds"),
    plot("Requests a second", [{ name: "5xx", values: rate("errors"), kind: "bad" }, { name: "all", values: rate("requests") }], perSecond),
    both("Time to answer", "palisade_gateway_request_seconds"),
    plot("Claims of this gateway", [{ name: "waiting", values: now("waits"), kind: "second" }, { name: "held", values: now("holds") }], whole),
    plot("Locks lost since its start", [{ name: "lost", values: samples.map((one) => one.lost), kind: "bad" }], whole),
  ];
}

export function enginePage(main) {
  const about = h("section", { class: "card about" });
  const findings = h("section", { class: "card" });
  const plots = h("div", { class: "plots" });
  const sessions = h("section", { class: "card wide" });
  const failed = h("p", { class: "failed", role: "alert", hidden: true });
  const plotted = h("section", { class: "card wide" }, h("h2", {}, "This gateway, the last minutes"), plots);
  main.append(h("div", { class: "page engine" }, h("div", { class: "tools" }, h("h1", {}, "Engine")), failed, h("div", { class: "cards" }, about, findings, plotted, sessions)));

  async function look() {
    if (!document.hidden) draw(await lookAtEngine());
  }

  function draw({ known, problem }) {
    failed.hidden = problem === null;
    setText(failed, problem === null ? "" : `The engine can't be checked: ${problem.message}`);
    for (const card of [about, findings, sessions]) card.hidden = known === null;
    if (known === null) return;
    about.replaceChildren(...drawEngine(known));
    findings.replaceChildren(...drawFindings(known.findings));
    sessions.replaceChildren(...drawSessions(known));
  }

  async function drawSamples() {
    await sample();
    if (samples.length === 0) plots.replaceChildren(h("p", { class: "quiet" }, "The first figures come in a few seconds."));
    else plots.replaceChildren(...drawPlots());
  }

  const timers = [setInterval(look, 5000), setInterval(drawSamples, 2000)];
  draw(engine);
  look();
  drawSamples();
  return {
    title: "Engine",
    focus: () => main.focus({ preventScroll: true }),
    close: () => timers.forEach(clearInterval),
  };
}
