// The layout of a directed graph.
//
// Each connected part is laid out by itself. In it, each strongly connected component forms a block
// whose nodes are put on a ring, so that a cycle is visible. Blocks are in columns, and every arrow
// between them points to the right. A pure function from sizes to positions.

const COLUMN_GAP = 70;
const ROW_GAP = 16;
const PART_GAP = 40;

function union(nodes, edges) {
  const parent = new Map(nodes.map((node) => [node.key, node.key]));
  const find = (key) => {
    while (parent.get(key) !== key) {
      parent.set(key, parent.get(parent.get(key)));
      key = parent.get(key);
    }
    return key;
  };
  for (const { from, to } of edges) parent.set(find(from), find(to));
  const parts = new Map();
  for (const node of nodes) {
    const root = find(node.key);
    if (!parts.has(root)) parts.set(root, []);
    parts.get(root).push(node);
  }
  return [...parts.values()];
}

/** Tarjan's strongly connected components, without recursion; sinks come first. */
export function components(keys, next) {
  const [index, low, onStack] = [new Map(), new Map(), new Set()];
  const [stack, found] = [[], []];
  for (const root of keys) {
    if (index.has(root)) continue;
    const work = [[root, 0]];
    while (work.length > 0) {
      const frame = work[work.length - 1];
      const [key, at] = frame;
      if (at === 0) {
        index.set(key, index.size);
        low.set(key, index.get(key));
        stack.push(key);
        onStack.add(key);
      }
      const to = next.get(key)[at];
      if (to !== undefined) {
        frame[1] += 1;
        if (!index.has(to)) work.push([to, 0]);
        else if (onStack.has(to)) low.set(key, Math.min(low.get(key), index.get(to)));
        continue;
      }
      work.pop();
      const above = work[work.length - 1]?.[0];
      if (above !== undefined) low.set(above, Math.min(low.get(above), low.get(key)));
      if (low.get(key) !== index.get(key)) continue;
      const component = [];
      let member;
      do {
        member = stack.pop();
        onStack.delete(member);
        component.push(member);
      } while (member !== key);
      found.push(component);
    }
  }
  return found;
}

/** The members of a block in the order of a walk along its arrows. */
function walk(members, next) {
  const inside = new Set(members);
  const order = [];
  const seen = new Set();
  const visit = (key) => {
    while (key !== undefined) {
      seen.add(key);
      order.push(key);
      key = next.get(key).find((to) => inside.has(to) && !seen.has(to));
    }
  };
  for (const key of members) if (!seen.has(key)) visit(key);
  return order;
}

/** Places a block around (0, 0); returns its size. */
function placeBlock(members, byKey, next) {
  if (members.length === 1) {
    const node = byKey.get(members[0]);
    Object.assign(node, { dx: 0, dy: 0, ring: null });
    return { width: node.width, height: node.height };
  }
  const order = walk(members, next);
  const widest = Math.max(...order.map((key) => byKey.get(key).width));
  const [rx, ry] = [Math.max(widest, order.length * 34), Math.max(84, order.length * 22)];
  order.forEach((key, at) => {
    const angle = Math.PI + (2 * Math.PI * at) / order.length;
    Object.assign(byKey.get(key), { dx: rx * Math.cos(angle), dy: ry * Math.sin(angle), ring: order });
  });
  return { width: 2 * rx + widest, height: 2 * ry + 60 };
}

/** Places one connected part with its upper left corner at (0, 0). */
function placePart(nodes, edges) {
  const byKey = new Map(nodes.map((node) => [node.key, node]));
  const next = new Map(nodes.map((node) => [node.key, []]));
  for (const { from, to } of edges) next.get(from).push(to);
  const blocks = components([...byKey.keys()], next).reverse()
    .map((members) => ({ members, ...placeBlock(members, byKey, next), column: 0, before: [] }));
  const blockOf = new Map(blocks.flatMap((block) => block.members.map((key) => [key, block])));
  // Sources come first now, so that a block's column is known before those of its successors.
  for (const block of blocks) {
    for (const to of block.members.flatMap((key) => next.get(key)).map((key) => blockOf.get(key))) {
      if (to === block) continue;
      to.column = Math.max(to.column, block.column + 1);
      to.before.push(block);
    }
  }
  const columns = [];
  for (const block of blocks) (columns[block.column] ??= []).push(block);
  let x = 0;
  let height = 0;
  for (const column of columns) {
    const wanted = (block) => block.before.reduce((sum, one) => sum + one.y, 0) / block.before.length || 0;
    column.sort((one, other) => wanted(one) - wanted(other));
    const width = Math.max(...column.map((block) => block.width));
    let y = 0;
    for (const block of column) {
      Object.assign(block, { x: x + width / 2, y: y + block.height / 2 });
      y += block.height + ROW_GAP;
    }
    height = Math.max(height, y - ROW_GAP);
    x += width + COLUMN_GAP;
  }
  for (const column of columns) {
    const last = column[column.length - 1];
    const shift = (height - (last.y + last.height / 2)) / 2;
    for (const block of column) block.y += shift;
  }
  for (const node of nodes) {
    const block = blockOf.get(node.key);
    Object.assign(node, { x: block.x + node.dx, y: block.y + node.dy });
  }
  return { width: x - COLUMN_GAP, height };
}

/** Where a line from the middle of a node towards (x, y) leaves it. */
function border(node, x, y, gap) {
  const [dx, dy] = [x - node.x, y - node.y];
  const scale = Math.min((node.width / 2 + gap) / Math.abs(dx || 1e-9), (node.height / 2 + gap) / Math.abs(dy || 1e-9));
  return [node.x + dx * scale, node.y + dy * scale];
}

/** The path of an arrow between two placed nodes. */
export function arrow(from, to) {
  const left = from.x + from.width / 2;
  const right = to.x - to.width / 2 - 8;
  if (from.ring !== to.ring || from.ring === null) {
    if (right > left) {
      const middle = (left + right) / 2;
      return `M${left} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${right} ${to.y}`;
    }
  }
  // On a ring each arrow is bent outwards, so that two opposite arrows don't overlap.
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const bend = Math.min(20, length / 9);
  const [mx, my] = [(from.x + to.x) / 2 + (dy / length) * bend, (from.y + to.y) / 2 - (dx / length) * bend];
  const start = border(from, mx, my, 0);
  const end = border(to, mx, my, 8);
  return `M${start[0]} ${start[1]}Q${mx} ${my} ${end[0]} ${end[1]}`;
}

/**
 * Places all nodes ({key, width, height}) so that the arrows ({from, to}) can be followed. Parts
 * come in the order of their first node. Returns the size of the whole.
 */
export function layout(nodes, edges) {
  let [width, height] = [0, 0];
  for (const part of union(nodes, edges)) {
    const keys = new Set(part.map((node) => node.key));
    const size = placePart(part, edges.filter((edge) => keys.has(edge.from)));
    for (const node of part) node.y += height;
    width = Math.max(width, size.width);
    height += size.height + PART_GAP;
  }
  return { width, height: Math.max(0, height - PART_GAP) };
}
