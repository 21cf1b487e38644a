// Deadlocks as the gateway finds them: agents that wait for each other, confirmed by two surveys.

import { feed } from "./feed.js";
import { get } from "./gateway.js";

export const deadlocks = {
  found: [],
  /** Why deadlocks are not available, if so. */
  unsupported: null,
};

/** Asks again, if the page is visible and anybody waits. */
export async function lookForDeadlocks() {
  if (document.hidden) return;
  const waiting = [...feed.lines.values()].some((line) => line.waiters.length > 0);
  if (!waiting) {
    deadlocks.found = [];
    return;
  }
  try {
    const answer = await get("v1/deadlocks");
    deadlocks.found = answer.deadlocks;
    deadlocks.unsupported = null;
  } catch (problem) {
    if (problem.status === 501) deadlocks.unsupported = problem.message;
  }
}

/** A deadlock as a sentence. */
export function sentence(found) {
  const many = found.agents.length === 1 ? "one agent waits for itself" : `${found.agents.length} agents wait for each other`;
  const yielding = found.gives_way !== null && found.gives_way !== undefined;
  const then = yielding ? "one of them gives way" : found.likely ? "with --nested one of them would give way" : "none of them gives way: evict one";
  return `${found.likely ? "Likely deadlock, through nested runs" : "Deadlock"}: ${many}; ${then}.`;
}
