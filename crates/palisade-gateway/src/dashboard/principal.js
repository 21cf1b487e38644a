// What the gateway says of its engine and of who asks, kept up to date for all pages.

import { get } from "./gateway.js";

export const engine = { known: null, problem: null };

/** Asks again; answers what is known. */
export async function lookAtEngine() {
  try {
    engine.known = await get("v1/engine");
    engine.problem = null;
  } catch (problem) {
    engine.problem = problem;
  }
  return engine;
}

/** Whether this principal may evict from a lock: for what is shown, the gateway decides. */
export function mayOperate(name) {
  const prefixes = engine.known?.you?.operate ?? [];
  return prefixes.some((prefix) => name.startsWith(prefix));
}
