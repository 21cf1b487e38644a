// The gateway's data about its engine and this principal, kept up to date for all pages.

import { get } from "./gateway.js";

export const engine = { known: null, problem: null };

/** Requests it again; returns what is known. */
export async function lookAtEngine() {
  try {
    engine.known = await get("v1/engine");
    engine.problem = null;
  } catch (problem) {
    engine.problem = problem;
  }
  return engine;
}

/** Whether this principal may evict from a lock. Only for display; the gateway decides. */
export function mayOperate(name) {
  const prefixes = engine.known?.you?.operate ?? [];
  return prefixes.some((prefix) => name.startsWith(prefix));
}
