// A list of any length: only the visible rows are nodes of the page, and they are reused.
//
// All rows have the same height, which the style sheet sets (--row), so that a row's position
// follows from its index. The keyboard moves a mark through the rows; the focus stays on the list.

import { h, setAttribute } from "./dom.js";

/** Extra rows above and below the visible ones, so that scrolling shows no gaps. */
const SPARE = 6;

export class VirtualList {
  /**
   * `make()` answers a row's node, `fill(node, item)` shows an item in it, `open(item)` is called
   * for a row that is chosen, `key(item)` tells items apart when the list changes.
   */
  constructor({ label, make, fill, open, key }) {
    Object.assign(this, { make, fill, open, key, items: [], rows: [], marked: null });
    this.space = h("div", { class: "list-space", role: "presentation" });
    this.node = h("div", { class: "list", role: "grid", tabindex: 0, "aria-label": label }, this.space);
    this.node.addEventListener("scroll", () => this.draw(), { passive: true });
    this.node.addEventListener("keydown", (event) => this.press(event));
    this.node.addEventListener("click", (event) => this.click(event));
    this.sized = new ResizeObserver(() => this.draw());
    this.sized.observe(this.node);
  }

  close() {
    this.sized.disconnect();
  }

  show(items) {
    this.items = items;
    setAttribute(this.node, "aria-rowcount", items.length + 1);
    this.draw();
  }

  height() {
    return parseFloat(getComputedStyle(this.node).getPropertyValue("--row")) || 36;
  }

  draw() {
    const height = this.height();
    const total = `${this.items.length * height}px`;
    if (this.space.style.height !== total) this.space.style.height = total;
    const { scrollTop, clientHeight } = this.node;
    const first = Math.max(0, Math.floor(scrollTop / height) - SPARE);
    const end = Math.min(this.items.length, Math.ceil((scrollTop + clientHeight) / height) + SPARE);
    const count = Math.max(0, end - first);
    while (this.rows.length < count) {
      const row = this.make();
      row.id = `row-${this.rows.length}`;
      this.rows.push(row);
      this.space.append(row);
    }
    let active = null;
    this.rows.forEach((row, at) => {
      // An item keeps its node while it is visible: its index modulo the number of nodes.
      const { length } = this.rows;
      const number = first + ((((at - first) % length) + length) % length);
      row.hidden = number >= end;
      if (row.hidden) return;
      const item = this.items[number];
      const place = `translateY(${number * height}px)`;
      if (row.style.transform !== place) row.style.transform = place;
      row.dataset.number = number;
      setAttribute(row, "aria-rowindex", number + 2);
      const marked = this.marked !== null && this.key(item) === this.marked;
      if (marked) active = row.id;
      setAttribute(row, "aria-selected", String(marked));
      this.fill(row, item);
    });
    setAttribute(this.node, "aria-activedescendant", active);
  }

  /** The index of the marked row; -1 if there is none. */
  markedAt() {
    return this.marked === null ? -1 : this.items.findIndex((item) => this.key(item) === this.marked);
  }

  mark(number) {
    if (this.items.length === 0) return;
    const at = Math.max(0, Math.min(this.items.length - 1, number));
    this.marked = this.key(this.items[at]);
    const [height, top] = [this.height(), this.node.scrollTop];
    // The row of titles stays above the rows.
    const room = this.node.clientHeight - this.space.offsetTop - height;
    this.node.scrollTop = Math.max(at * height - room, Math.min(top, at * height));
    this.draw();
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = this.markedAt();
    const page = Math.max(1, Math.floor(this.node.clientHeight / this.height()) - 1);
    const moves = {
      ArrowDown: at + 1, j: at + 1, ArrowUp: at - 1, k: at - 1,
      PageDown: at + page, PageUp: at - page, Home: 0, End: this.items.length - 1,
    };
    if (event.key in moves) this.mark(moves[event.key]);
    else if (event.key === "Enter" && at >= 0) this.open(this.items[at]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  click(event) {
    const row = event.target.closest("[data-number]");
    // A link keeps its default action.
    if (row === null || event.target.closest("a") !== null) return;
    const item = this.items[Number(row.dataset.number)];
    if (item !== undefined) this.open(item);
  }
}
