// Formatting of numbers, times and claims.

/** `850ms`, `7s`, `2m 05s`, `3h 12m`, `4d 2h`. */
export function duration(ms) {
  if (ms < 1000) return `${Math.max(0, Math.round(ms))}ms`;
  const seconds = Math.floor(ms / 1000);
  const two = (number) => String(number).padStart(2, "0");
  if (seconds < 60) return `${seconds}s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)}m ${two(seconds % 60)}s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)}h ${two(minutes % 60)}m`;
  const hours = Math.floor((minutes % 1440) / 60);
  return `${Math.floor(minutes / 1440)}d${hours > 0 ? ` ${hours}h` : ""}`;
}

/** The same in whole seconds, for values that are refreshed once a second. */
export function seconds(ms) {
  return duration(Math.max(0, Math.floor(ms / 1000)) * 1000).replace(/^0ms$/, "0s");
}

/** Seconds as a latency: `420 µs`, `3.1 ms`, `1.2 s`. */
export function latency(value) {
  if (value < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${(value * 1000).toPrecision(value < 0.01 ? 2 : 3)} ms`;
  return `${value.toPrecision(2)} s`;
}

/** `10,000`. */
export function count(number) {
  return Number(number).toLocaleString("en");
}

/** `3 locks`, `1 lock`. */
export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** `14:03:07`, in the reader's own time zone. */
export function clock(at) {
  return new Date(at).toLocaleTimeString("en-GB");
}

/** The name of a claim: its label, agent or owner. A foreign tool's claim has only an id. */
export function title(claim) {
  return claim.label || claim.agent || claim.owner || `foreign ${claim.id}`;
}

/** Where it is: `db1 · 4711`. */
export function place(claim) {
  return [claim.host, claim.pid].filter((part) => part !== null && part !== undefined && part !== "").join(" · ");
}

/** Both in one piece: `nightly · db1 · 4711`. */
export function who(claim) {
  return [title(claim), place(claim)].filter(Boolean).join(" · ");
}

/** What a line is and how much of it is taken: `lock`, `shared 3`, `permits 2/5`. */
export function kind(line) {
  if (line.kind === "permits") {
    const taken = line.holders.reduce((sum, claim) => sum + (claim.weight ?? line.capacity), 0);
    return `permits ${taken}/${line.capacity}`;
  }
  const shared = line.holders.filter((claim) => claim.mode === "shared").length;
  return shared > 0 ? `shared ${shared}` : "lock";
}
