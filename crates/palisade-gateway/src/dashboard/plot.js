// A small plot of one or two series over the last minutes, with its newest and greatest values.

import { h, s } from "./dom.js";

const [WIDTH, HEIGHT] = [300, 64];

function line(values, top) {
  const step = WIDTH / Math.max(1, values.length - 1);
  let path = "";
  let pen = "M";
  values.forEach((value, at) => {
    // Without events there is no latency: a gap.
    if (value === null) pen = "M";
    else {
      path += `${pen}${(at * step).toFixed(1)} ${(HEIGHT - 2 - (value / top) * (HEIGHT - 6)).toFixed(1)}`;
      pen = "L";
    }
  });
  return path;
}

/** `series` is a list of `{name, values, kind}`, all of the same length; `show` formats a value. */
export function plot(title, series, show) {
  const all = series.flatMap((one) => one.values).filter((value) => value !== null);
  const top = Math.max(...all, 0) || 1;
  const newest = (one) => one.values.filter((value) => value !== null).at(-1);
  const said = (one) => (newest(one) === undefined ? "–" : show(newest(one)));
  const words = series.map((one) => `${one.name} ${said(one)}`).join(", ");
  return h("figure", { class: "plot" },
    h("figcaption", {}, h("span", {}, title), h("span", { class: "top" }, all.length > 0 ? `max ${show(Math.max(...all))}` : "")),
    s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `${title}: ${words}` },
      s("path", { class: "base", d: `M0 ${HEIGHT - 2}H${WIDTH}` }),
      // A series without events has no curve.
      series.filter((one) => one.values.some((value) => value > 0)).map((one) => s("path", { class: `curve ${one.kind ?? ""}`, d: line(one.values, top) }))),
    h("div", { class: "legend" }, series.map((one) => h("span", { class: one.kind ?? "" }, `${one.name} `, h("b", {}, said(one))))));
}
