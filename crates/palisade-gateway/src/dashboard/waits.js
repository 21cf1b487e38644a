// The page of waits: who waits for which lock, and who holds it, as a graph. Deadlocks are red.
//
// Agents are boxes and locks are pills: an arrow leads from a waiter to the lock, and from the lock
// to the claims ahead of it. The gateway decides what is a deadlock, not the graph.

import { h, lockAddress, s, setText } from "./dom.js";
import { deadlocks, lookForDeadlocks, sentence } from "./deadlocks.js";
import { age, feed, subscribe } from "./feed.js";
import { count, place, plural, seconds, title, who } from "./format.js";
import { arrow, layout } from "./graph.js";

/** How many locks are drawn, those with the most waiters first, and how many waiters of each. */
const LOCKS = 60;
const WAITERS = 6;
const [BOX_WIDTH, BOX_HEIGHT, PILL_HEIGHT] = [196, 46, 30];

function agentKey(claim) {
  return `agent ${JSON.stringify([claim.owner ?? claim.id, claim.host, claim.pid, claim.agent])}`;
}

function cut(text, length) {
  return text.length > length ? `${text.slice(0, length - 1)}…` : text;
}

/** The claims of all deadlocks, by their ids. */
function stuckClaims() {
  const stuck = new Set();
  for (const agent of deadlocks.found.flatMap((found) => found.agents)) {
    for (const claim of [...agent.holds, ...agent.waits]) stuck.add(claim.id);
  }
  return stuck;
}

/** The graph of the lines that have waiters. */
function build() {
  const stuck = stuckClaims();
  const isStuck = (line) => [...line.holders, ...line.waiters].some((claim) => stuck.has(claim.id));
  const contended = [...feed.lines.values()].filter((line) => line.waiters.length > 0);
  const weight = (line) => (isStuck(line) ? 1e9 : 0) + line.waiters.length;
  contended.sort((one, other) => weight(other) - weight(one) || (one.name < other.name ? -1 : 1));
  const drawn = contended.slice(0, LOCKS);
  // Agents that are in one line only can be omitted from the graph and counted instead.
  const lines = new Map();
  for (const line of drawn) {
    for (const claim of [...line.holders, ...line.waiters]) {
      const key = agentKey(claim);
      lines.set(key, (lines.get(key) ?? new Set()).add(line.name));
    }
  }
  const [nodes, edges] = [new Map(), new Map()];
  const agents = new Map();
  const agent = (claim) => {
    const key = agentKey(claim);
    if (!nodes.has(key)) {
      nodes.set(key, { key, title: title(claim), about: place(claim), width: BOX_WIDTH, height: BOX_HEIGHT, bad: false });
    }
    agents.set(claim.id, key);
    return key;
  };
  const edge = (from, to, bad, kind) => {
    const known = edges.get(`${from}\n${to}`);
    edges.set(`${from}\n${to}`, { from, to, kind, bad: bad || known?.bad === true });
  };
  for (const line of drawn) {
    const lock = `lock ${line.name}`;
    const short = cut(line.name, 28);
    nodes.set(lock, { key: lock, title: short, lock: line.name, width: 34 + 7.3 * short.length, height: PILL_HEIGHT, bad: false });
    for (const claim of line.holders) edge(lock, agent(claim), false, "held");
    let more = 0;
    line.waiters.forEach((claim, at) => {
      const alone = lines.get(agentKey(claim)).size === 1 && !stuck.has(claim.id);
      if (at >= WAITERS && alone) more += 1;
      else edge(agent(claim), lock, false, "waits");
    });
    if (more > 0) {
      const key = `more ${line.name}`;
      nodes.set(key, { key, title: `${count(more)} more`, about: "", width: 96, height: PILL_HEIGHT, bad: false });
      edge(key, lock, false, "waits");
    }
  }
  // A run inside another: the outer one ends only after it.
  for (const claim of drawn.flatMap((line) => [...line.holders, ...line.waiters])) {
    const [parent, child] = [agents.get(claim.parent), agents.get(claim.id)];
    if (parent !== undefined && child !== undefined && parent !== child) edge(parent, child, false, "runs");
  }
  for (const found of deadlocks.found) redden(found, agents, nodes, edges, edge);
  const bad = [...nodes.values()].filter((node) => node.bad);
  const calm = [...nodes.values()].filter((node) => !node.bad);
  return { nodes: [...bad, ...calm], edges: [...edges.values()], contended, drawn };
}

/** Marks the agents, locks and arrows of a deadlock. */
function redden(found, agents, nodes, edges, edge) {
  const keys = found.agents.map((one) => [...one.waits, ...one.holds].map((claim) => agents.get(claim.id)).find(Boolean));
  found.agents.forEach((one, at) => {
    const me = keys[at];
    if (me === undefined) return;
    nodes.get(me).bad = true;
    for (const number of one.behind) {
      const other = found.agents[number];
      const theirs = new Set([...other.holds, ...other.waits].map((claim) => claim.name));
      for (const claim of one.waits) {
        const lock = `lock ${claim.name}`;
        if (!theirs.has(claim.name) || !nodes.has(lock) || keys[number] === undefined) continue;
        nodes.get(lock).bad = true;
        edge(me, lock, true, "waits");
        edge(lock, keys[number], true, "held");
      }
    }
    for (const number of one.children) {
      if (keys[number] !== undefined && keys[number] !== me) edge(me, keys[number], true, "runs");
    }
  });
}

function drawNode(node) {
  const [x, y] = [node.x - node.width / 2, node.y - node.height / 2];
  const box = (rx) => s("rect", { x, y, width: node.width, height: node.height, rx });
  const label = (text, dy, className) => s("text", { x: node.x, y: node.y + dy, class: className }, text);
  const bad = node.bad ? "bad" : "";
  if (node.lock !== undefined) {
    return s("a", { href: lockAddress(node.lock), class: `node lock ${bad}` }, s("title", {}, node.lock), box(node.height / 2), label(node.title, 4, ""));
  }
  return s("g", { class: `node agent ${bad}` }, s("title", {}, `${node.title} ${node.about}`), box(7),
    label(cut(node.title, 26), node.about === "" ? 4 : -4, "title"), node.about === "" ? null : label(cut(node.about, 30), 13, "about"));
}

function drawGraph({ nodes, edges }) {
  const { width, height } = layout(nodes, edges);
  const byKey = new Map(nodes.map((node) => [node.key, node]));
  const marker = (id) => s("marker", { id, viewBox: "0 0 8 8", refX: 1, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto" },
    s("path", { d: "M0 0L8 4L0 8z" }));
  const path = (edge) => s("path", {
    d: arrow(byKey.get(edge.from), byKey.get(edge.to)), class: `edge ${edge.kind} ${edge.bad ? "bad" : ""}`,
    "marker-end": edge.bad ? "url(#head-bad)" : "url(#head)",
  });
  const red = edges.filter((edge) => edge.bad);
  const grey = edges.filter((edge) => !edge.bad);
  return s("svg", {
    viewBox: `-12 -12 ${width + 24} ${height + 24}`, width: width + 24, height: height + 24, role: "img",
    "aria-label": "Who waits for whom. The same is in the table below.",
  }, s("defs", {}, marker("head"), marker("head-bad")), grey.map(path), red.map(path), nodes.map(drawNode));
}

function drawDeadlock(found) {
  const names = (claims) => claims.flatMap((claim, at) => [at > 0 ? ", " : "", claim.hidden ? "a lock that you may not see" : h("a", { href: lockAddress(claim.name), class: "wrap" }, claim.name)]);
  return h("section", { class: "deadlock", role: "alert" }, h("h2", {}, sentence(found)),
    h("ol", {}, found.agents.map((agent) => h("li", {},
      h("strong", {}, agent.agent ?? "somebody"), agent.label ? ` (${agent.label})` : "",
      agent.host === null ? "" : ` on ${agent.host}, process ${agent.pid}`,
      agent.holds.length > 0 ? [" holds ", names(agent.holds)] : null,
      agent.waits.length > 0 ? [agent.holds.length > 0 ? " and waits for " : " waits for ", names(agent.waits)] : null))));
}

function drawRow(line) {
  const [first] = line.waiters;
  const old = age(first);
  return h("tr", {}, h("td", {}, h("a", { href: lockAddress(line.name), class: "wrap" }, line.name)),
    h("td", {}, line.holders.slice(0, 3).map(who).join(", ") || "nobody"),
    h("td", { class: "number" }, count(line.waiters.length)),
    h("td", {}, `${who(first)}${old === null ? "" : `, since ${seconds(old)}`}`));
}

export function waitsPage(main) {
  const summary = h("p", { class: "summary", role: "status" });
  const circles = h("div", { class: "deadlocks" });
  const note = h("p", { class: "quiet" });
  const picture = h("div", { class: "graph", tabindex: 0, role: "group", "aria-label": "Graph of waits" });
  const rows = h("tbody", {});
  const table = h("table", {}, h("thead", {}, h("tr", {}, ["Lock", "Held by", "Waiting", "Next"].map((title) => h("th", { scope: "col" }, title)))), rows);
  const empty = h("div", { class: "empty" }, "Nobody waits for a lock.");
  main.append(h("div", { class: "page waits" }, h("div", { class: "tools" }, h("h1", {}, "Waits"), summary), circles, note, empty, picture, table));
  let drawn;

  function draw() {
    const graph = build();
    const waiting = graph.contended.reduce((sum, line) => sum + line.waiters.length, 0);
    setText(summary, feed.surveyed === 0 ? "" : `${plural(waiting, "waiter")} for ${plural(graph.contended.length, "lock")}`);
    const hidden = graph.contended.length - graph.drawn.length;
    const notes = [deadlocks.unsupported, hidden > 0 ? `The ${LOCKS} locks with the most waiters are drawn; ${count(hidden)} more have waiters.` : null];
    setText(note, notes.filter(Boolean).join(" "));
    note.hidden = note.textContent === "";
    empty.hidden = graph.contended.length > 0 || feed.surveyed === 0;
    table.hidden = picture.hidden = graph.contended.length === 0;
    rows.replaceChildren(...graph.drawn.map(drawRow));
    const same = JSON.stringify([graph.nodes, graph.edges, deadlocks.found]);
    if (same === drawn) return;
    drawn = same;
    circles.replaceChildren(...deadlocks.found.map(drawDeadlock));
    picture.replaceChildren(graph.nodes.length > 0 ? drawGraph(graph) : "");
  }

  const unsubscribe = subscribe(draw);
  const looking = setInterval(() => lookForDeadlocks().then(draw), 2000);
  lookForDeadlocks().then(draw);
  draw();
  return {
    title: "Waits",
    focus: () => main.focus({ preventScroll: true }),
    close: () => {
      unsubscribe();
      clearInterval(looking);
    },
  };
}
