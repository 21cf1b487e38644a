// The page's requests to the gateway, and its token.
//
// The token is behind the `#` of the address, which a browser does not send, or is typed in once.
// It is kept for this tab only. URLs are relative: a proxy may serve the gateway below a path.

const KEY = "palisade-token";
/** How long a response may take before the gateway counts as unreachable. */
const PATIENCE = 10_000;
/** The gateway sends something at least every 15 s on an open stream. */
const SILENCE = 40_000;

/** The error of a request. Without a response its status is 0. */
export class Problem extends Error {
  constructor(status, code, detail) {
    super(detail);
    Object.assign(this, { status, code });
  }
}

/** The offset of the gateway's clock from this one, by the dates of its responses. */
let ahead = 0;

/** The time at the gateway. */
export function now() {
  return Date.now() + ahead;
}

/**
 * The token of a link that was opened in a tab with another one. Whoever made the link could have
 * chosen it, so it is only offered, and only when the gateway does not accept the tab's own.
 */
let offered = null;

/** Takes a token from the address and removes it there; returns whether the tab has it now. */
export function takeToken() {
  const fragment = location.hash.slice(1);
  if (fragment === "" || fragment.startsWith("/")) return false;
  history.replaceState(null, "", `${location.pathname}${location.search}#/locks`);
  const token = fragment.replace(/^token=/, "");
  if (hasToken()) {
    offered = token;
    return false;
  }
  setToken(token);
  return true;
}

/** The token of the last link, if the tab had another one. */
export function offeredToken() {
  return offered;
}

export function setToken(token) {
  offered = null;
  if (token === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, token.trim());
}

export function hasToken() {
  return sessionStorage.getItem(KEY) !== null;
}

async function send(method, path, body, signal) {
  const headers = {};
  const token = sessionStorage.getItem(KEY);
  if (token !== null) headers.authorization = `Bearer ${token}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method,
      headers,
      signal,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      referrerPolicy: "no-referrer",
    });
  } catch {
    throw new Problem(0, "no_answer", "the gateway does not answer");
  }
  const date = Date.parse(response.headers.get("date"));
  // The header has whole seconds: smaller differences are ignored.
  if (!Number.isNaN(date) && Math.abs(date - now()) > 2000) ahead = date - Date.now();
  if (response.ok) return response;
  const problem = await response.json().catch(() => ({}));
  const detail = problem.detail ?? `the gateway answered ${response.status}`;
  throw new Problem(response.status, problem.code ?? "unknown", detail);
}

async function whole(method, path, body, patience, read) {
  const response = await send(method, path, body, AbortSignal.timeout(patience));
  try {
    return await read(response);
  } catch {
    throw new Problem(0, "no_answer", "the gateway's answer was cut off");
  }
}

/** A document. */
export function get(path) {
  return whole("GET", path, undefined, PATIENCE, (response) => response.json());
}

/** A text. */
export function getText(path) {
  return whole("GET", path, undefined, PATIENCE, (response) => response.text());
}

export function post(path, body, patience = PATIENCE) {
  return whole("POST", path, body, patience, (response) => response.json());
}

/** Every line that this principal may see, in as many requests as needed. */
export async function lines() {
  const found = [];
  let after = "";
  for (;;) {
    const page = await get(`v1/lines?limit=10000&after=${encodeURIComponent(after)}`);
    found.push(...page.lines);
    if (page.next === null || page.next === undefined) return found;
    after = page.next;
  }
}

/** The line of one name, or `null`. */
export async function line(name) {
  const page = await get(`v1/lines?name=${encodeURIComponent(name)}`);
  return page.lines[0] ?? null;
}

/** Calls `heard` when the gateway's stream opens and for every event; throws when it ends. */
export async function listen(heard, signal) {
  const silence = new AbortController();
  const response = await send("GET", "v1/events", undefined, AbortSignal.any([signal, silence.signal]));
  heard("open");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let timer;
  let rest = "";
  try {
    for (;;) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE);
      const { value, done } = await reader.read();
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const name = /^event: (.*)$/m.exec(event)?.[1];
        if (name !== undefined) heard(name);
      }
    }
  } catch {
    // Told below.
  } finally {
    clearTimeout(timer);
  }
  throw new Problem(0, "no_answer", "the gateway closed the stream of events");
}
