// Nodes of the page. Text only ever becomes a text node or an attribute, never markup: a lock may
// have any name. (The content security policy also forbids the browser to parse text as markup.)

const SVG = "http://www.w3.org/2000/svg";

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** An element, such as `h("a", {href: "#/locks"}, "Locks")`. */
export function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

/** An element of a picture. */
export function s(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets text if it differs: an unchanged page is not laid out again. */
export function setText(node, text) {
  const shown = String(text ?? "");
  if (node.textContent !== shown) node.textContent = shown;
}

/** Sets or removes an attribute if it differs. */
export function setAttribute(node, name, value) {
  if (value === null || value === undefined || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, value);
  }
}

/** The address of a lock's page. */
export function lockAddress(name) {
  return `#/lock/${encodeURIComponent(name)}`;
}

/** A short message that goes away. */
export function toast(text, bad = false) {
  const shown = h("div", { class: bad ? "toast bad" : "toast" }, text);
  document.getElementById("toasts").append(shown);
  setTimeout(() => shown.remove(), bad ? 10_000 : 5_000);
}
