// Who holds the memory: callers above, callees below, width is bytes.

const FLOOR = 23;
/** @type {Record<string, string>} */
const WITHOUT_NAME = { module: "no module recorded", owner: "no name found" };

class Icicle {
  constructor(root, data, array, text, lives, opens) {
    this.root = root;
    this.text = text;
    this.lives = lives;
    this.moments = {};
    for (const [name, m] of Object.entries(data)) this.moments[name] = { ...m, stack: array(m.stack), bytes: array(m.bytes), blocks: array(m.blocks) };
    this.usual = this.moments[opens] ? opens : this.moments.peak ? "peak" : "end";
    this.moment = this.usual;
    // What the rest of the page shows: the chosen moment, the mark, and the range in view.
    this.at = null;
    this.anchor = null;
    this.view = { from: 0, to: lives ? lives.n : 0 };
    this.onView = () => {};
    this.showLibrary = false;
    this.kinds = [["stack", "call stack"], ...(lives && lives.category ? [["category", "category"]] : []), ...Object.keys(lives ? lives.names : {}).map((kind) => [kind, kind])];
    this.by = this.keyed = "stack";
    this.keys = lives ? lives.keysBy("stack") : null;
    this.hover = null;
    this.focus = null;
    this.draw = onFrame(() => this.paint());
    this.build();
    this.plant();
  }

  build() {
    const names = { failure: ["Failure", "What was allocated when the request failed"], peak: ["Peak", "What was allocated at the peak"], end: ["End", "What was allocated at the end"] };
    if (this.lives) Object.assign(names, { moment: ["Moment", "What was allocated at the moment chosen in the timeline"], made: ["Made in view", "What the range in view allocated, kept or not"], change: ["Mark to moment", "What changed between the mark and the moment"] });
    this.switches = Object.keys(names).filter((name) => this.moments[name] || (this.lives && !["failure", "peak", "end"].includes(name))).map((name) => {
      const b = button(names[name][0], names[name][1], () => this.choose(name));
      b.dataset.moment = name;
      return b;
    });
    const library = element("input", { type: "checkbox" });
    library.addEventListener("change", () => { this.showLibrary = library.checked; this.plant(); });
    this.library = element("label", null, library, "library frames");
    this.choices = element("select", { "aria-label": "By what" }, ...this.kinds.map(([kind, word]) => element("option", { value: kind }, word)));
    this.choices.addEventListener("change", () => this.chooseBy(this.choices.value));
    this.controls = element("div", { class: "controls", role: "group", "aria-label": "Icicle controls" },
      element("div", { class: "switch", role: "group", "aria-label": "Moment" }, ...this.switches),
      ...(this.kinds.length > 1 ? [element("label", null, "By ", this.choices)] : []), this.library, element("span", { class: "gap" }),
      this.up = button("All", "Back to the whole picture (Escape)", () => this.zoomTo(this.tree)));
    this.crumbs = element("p", { class: "crumbs" });
    this.canvas = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": "icicle chart" });
    this.readout = element("dl", { class: "readout", "aria-live": "polite" });
    this.root.replaceChildren(this.controls, this.crumbs, this.canvas, this.readout);
    this.canvas.addEventListener("pointermove", (e) => this.point(this.nodeAt(e.offsetX, e.offsetY)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (e) => {
      const node = this.nodeAt(e.offsetX, e.offsetY);
      if (node) this.zoomTo(node === this.zoomed && node.parent ? node.parent : node);
    });
    this.canvas.addEventListener("keydown", (e) => this.key_(e));
    new ResizeObserver(this.draw).observe(this.root);
  }

  key_(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const here = this.focus || this.zoomed, row = here.parent ? here.parent.children : [here], place = row.indexOf(here);
    const moves = {
      ArrowDown: () => this.setFocus(here.children[0] || here), ArrowUp: () => this.setFocus(here.parent || here),
      ArrowRight: () => this.setFocus(row[Math.min(row.length - 1, place + 1)]), ArrowLeft: () => this.setFocus(row[Math.max(0, place - 1)]),
      Enter: () => this.zoomTo(here), " ": () => this.zoomTo(here), Escape: () => this.zoomTo(this.tree), 0: () => this.zoomTo(this.tree),
    };
    if (!moves[e.key]) return;
    e.preventDefault();
    moves[e.key]();
  }

  setFocus(node) {
    let inside = node;
    while (inside && inside !== this.zoomed) inside = inside.parent;
    if (!inside) this.zoomed = node;
    this.focus = node;
    this.describe(node);
    this.draw();
  }

  choose(name) {
    if (!this.switches.some((b) => b.dataset.moment === name)) return;
    this.moment = name;
    this.plant();
    this.onView();
  }

  chooseBy(kind) {
    if (!this.kinds.some(([known]) => known === kind)) return;
    this.by = this.choices.value = kind;
    this.library.hidden = kind !== "stack";
    this.plant();
    this.onView();
  }

  /** Follow the page; hidden pictures are computed when they are asked for. */
  follow(at, anchor, view) {
    const made = view.from !== this.view.from || view.to !== this.view.to;
    const changed = { moment: at !== this.at, change: at !== this.at || anchor !== this.anchor || (at === null && anchor === null && made), made };
    Object.assign(this, { at, anchor, view: { ...view } });
    if (changed[this.moment]) this.plantSoon();
  }

  plantSoon() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.plant(), 60);
  }

  // --- the tree -----------------------------------------------------------------------------

  plant() {
    for (const b of this.switches) b.setAttribute("aria-pressed", b.dataset.moment === this.moment ? "true" : "false");
    this.tree = this.node("", -1, null);
    let total = 0, blocks = 0;
    if (this.moments[this.moment]) {
      const m = this.moments[this.moment];
      this.tree.label = `everything allocated at the ${this.moment}`;
      if (this.by !== "stack") this.growAll(this.tree, this.sums((i) => this.lives.isAllocated(i, m.state)));
      else for (let i = 0; i < m.stack.length; i++) this.grow(this.tree, m.stack[i], m.bytes[i], m.blocks[i]);
      if (this.by === "stack" && m.rest_bytes) this.leaf(this.tree, `${plural(m.rest_stacks, "further stack")}`, m.rest_bytes, 0);
      total = m.total;
      blocks = m.n_blocks;
    } else {
      this.growLives();
      total = this.tree.bytes;
      blocks = this.tree.blocks;
    }
    this.settle();
    this.canvas.setAttribute("aria-label", `${this.tree.label}: ${formatSize(total)} in ${plural(blocks, "block")} by ${this.by === "stack" ? "call stack, callers above callees" : `${this.by} and line`}. Arrow keys move, Enter enlarges, Escape goes back. The table below lists the source lines.`);
    this.focus = null;
    this.zoomTo(this.tree);
  }

  growLives() {
    // Without a moment and a mark, the change is over the range in view.
    const { lives } = this, isView = this.moment === "change" && this.at === null && this.anchor === null;
    const at = isView ? Math.floor(this.view.to) : this.at ?? lives.n, here = (i) => lives.isAllocated(i, at);
    if (this.moment === "moment") {
      this.tree.label = `everything allocated after event ${formatCount(at)}`;
      this.growAll(this.tree, this.sums(here));
    } else if (this.moment === "made") {
      const from = Math.ceil(this.view.from), to = Math.floor(this.view.to);
      this.tree.label = `all that events ${formatCount(from + 1)} to ${formatCount(to)} allocated, kept or not`;
      this.growAll(this.tree, this.sums((i) => lives.born[i] > from && lives.born[i] <= to));
    } else {
      const since = this.anchor ?? (isView ? Math.ceil(this.view.from) : 0);
      const from = this.anchor !== null ? " (marked)" : isView ? "" : " (set a mark to compare with another moment)";
      this.tree.label = `changes from event ${formatCount(since)}${from} to ${formatCount(at)}${isView ? ", the range in view" : ""}`;
      const sums = this.sums(here);
      this.sums((i) => lives.isAllocated(i, since), sums, -1);
      const less = new Map();
      for (const [stack, sum] of sums) if (sum.bytes < 0) less.set(stack, { bytes: -sum.bytes, blocks: -sum.blocks });
      this.growAll(this.child(this.tree, "more", "more than before"), sums);
      this.growAll(this.child(this.tree, "less", "less than before"), less);
      for (const node of this.tree.children) { this.tree.bytes += node.bytes; this.tree.blocks += node.blocks; }
      this.tree.children = this.tree.children.filter((node) => node.bytes);
    }
  }

  sums(admits, into, factor) {
    if (this.keyed !== this.by) Object.assign(this, { keyed: this.by, keys: this.lives.keysBy(this.by) });
    return this.lives.sumBy(this.keys, admits, into, factor);
  }

  growAll(parent, sums) {
    for (const [key, sum] of sums) {
      if (sum.bytes <= 0) continue;
      if (this.by === "stack") this.grow(parent, key, sum.bytes, Math.max(0, sum.blocks));
      else this.growNames(parent, key, sum.bytes, Math.max(0, sum.blocks));
    }
  }

  // The parts of a name from the outermost, with the line that allocated it below.
  growNames(root, key, bytes, blocks) {
    const { parts, frame } = this.lives.namesOf(this.by, key), path = [root];
    for (const part of parts) path.push(Object.assign(this.child(path[path.length - 1], part, part), { isName: true }));
    if (!parts.length) path.push(this.child(root, "", WITHOUT_NAME[this.by]));
    const last = path[path.length - 1];
    path.push(frame < 0 ? this.child(last, -1, "no stack recorded") : this.child(last, frame, null));
    for (const node of path) { node.bytes += bytes; node.blocks += blocks; }
  }

  node(label, frame, parent) { return { label, frame, bytes: 0, blocks: 0, parent, known: new Map(), children: [] }; }

  grow(root, stackId, bytes, blocks) {
    let frames = this.text.stack(stackId);
    if (!this.showLibrary) {
      const own = frames.filter((f) => this.text.isLibrary[f] === 0);
      frames = own.length ? own : frames.slice(0, 1);
    }
    if (!frames.length) { this.leaf(root, "no stack recorded", bytes, blocks); return; }
    let node = root;
    node.bytes += bytes;
    node.blocks += blocks;
    for (let i = frames.length - 1; i >= 0; i--) {
      node = this.child(node, frames[i], null);
      node.bytes += bytes;
      node.blocks += blocks;
    }
  }

  leaf(root, label, bytes, blocks) {
    const node = this.child(root, label, label);
    for (const n of [node, root]) { n.bytes += bytes; n.blocks += blocks; }
  }

  child(parent, key, label) {
    let node = parent.known.get(key);
    if (!node) {
      node = this.node(label || this.text.short(key), label ? -1 : key, parent);
      if (label === "less than before" || parent.isLess) node.isLess = true;
      parent.known.set(key, node);
      parent.children.push(node);
    }
    return node;
  }

  settle() {
    this.tree.start = 0;
    this.tree.depth = 0;
    this.depth = 0;
    const open = [this.tree];
    while (open.length) {
      const node = open.pop();
      this.depth = Math.max(this.depth, node.depth);
      // The layers of a model keep their order; everything else is sorted by size.
      node.children.sort((a, b) => (/^\d+$/.test(a.label) && /^\d+$/.test(b.label) ? Number(a.label) - Number(b.label) : b.bytes - a.bytes));
      let start = node.start;
      for (const next of node.children) {
        next.start = start;
        next.depth = node.depth + 1;
        start += next.bytes;
        open.push(next);
      }
    }
  }

  zoomTo(node) {
    this.zoomed = node;
    if (this.focus) this.focus = node;
    this.up.disabled = node === this.tree;
    const path = [];
    for (let n = node; n; n = n.parent) path.unshift(n.label);
    this.crumbs.textContent = path.length > 1 ? path.slice(1).join("  ›  ") : "";
    this.describe(this.hover || this.focus);
    this.draw();
  }

  // --- drawing ------------------------------------------------------------------------------

  paint() {
    this.width = this.root.clientWidth;
    if (this.width < 60) return;
    this.drawn = [];
    const floors = this.floorsShown();
    const c = prepare(this.canvas, this.width, floors * FLOOR + 1);
    const perByte = this.width / Math.max(1, this.zoomed.bytes);
    const path = [];
    for (let n = this.zoomed.parent; n; n = n.parent) path.unshift(n);
    path.forEach((node, floor) => this.paintNode(c, node, 0, this.width, floor, true));
    const open = [this.zoomed];
    while (open.length) {
      const node = open.pop();
      const x = (node.start - this.zoomed.start) * perByte, width = node.bytes * perByte;
      if (width < 0.7) continue;
      this.paintNode(c, node, x, width, node.depth, false);
      open.push(...node.children);
    }
  }

  floorsShown() {
    let deepest = this.zoomed.depth;
    const open = [this.zoomed], least = this.zoomed.bytes / this.width;
    while (open.length) {
      const node = open.pop();
      deepest = Math.max(deepest, node.depth);
      for (const next of node.children) if (next.bytes >= least * 0.7) open.push(next);
    }
    return deepest + 1;
  }

  paintNode(c, node, x, width, floor, isAncestor) {
    const k = theme.colors, y = floor * FLOOR, inner = Math.max(0.5, width - 1);
    this.drawn.push({ node, x, y, width });
    const isOwn = node.isName || (node.frame >= 0 && this.text.isLibrary[node.frame] === 0);
    c.fillStyle = k.panel;
    c.fillRect(x, y, inner, FLOOR - 1);
    c.fillStyle = node.isLess ? k.good : this.moment === "change" && node !== this.tree ? k.strander : isOwn ? k.live : k.outside;
    c.globalAlpha = isAncestor || node === this.tree ? 0.12 : isOwn ? 0.2 + 0.38 * (node.bytes / this.tree.bytes) : 0.2;
    c.fillRect(x, y, inner, FLOOR - 1);
    c.globalAlpha = 1;
    if (node.frame < 0 && !node.isName && node !== this.tree) hatch(c, x, y, inner, FLOOR - 1, k.line);
    if (node === this.hover || node === this.focus) {
      c.strokeStyle = k.ink;
      c.lineWidth = 1.5;
      c.strokeRect(x + 0.75, y + 0.75, Math.max(1, inner - 1.5), FLOOR - 2.5);
    }
    if (width < 34) return;
    c.textAlign = "left";
    c.fillStyle = k.ink;
    const size = formatSize(node.bytes), room = inner - 12, sizeWidth = c.measureText(size).width;
    const label = fitted(c, node.label, room > sizeWidth + 110 ? room - sizeWidth - 12 : room);
    c.fillText(label, x + 6, y + FLOOR / 2);
    if (room > sizeWidth + 110) {
      c.textAlign = "right";
      c.fillText(size, x + inner - 6, y + FLOOR / 2);
    }
  }

  nodeAt(x, y) {
    const hit = this.drawn && this.drawn.find((d) => y >= d.y && y < d.y + FLOOR && x >= d.x && x < d.x + Math.max(2, d.width));
    return hit ? hit.node : null;
  }

  point(node) {
    if (node === this.hover) return;
    this.hover = node;
    this.describe(node || this.focus);
    this.draw();
  }

  describe(node) {
    if (!node) {
      this.readout.replaceChildren(element("div", { class: "wide" }, element("dt", null, `${this.tree.label}: ${formatSize(this.tree.bytes)}. ${this.by === "stack" ? "Callers are above, what they call is below" : "Names are above, the lines that allocated are below"}; width is memory. Point to read, click to enlarge, click again to go back.`)));
      return;
    }
    const pairs = [["Memory", formatSize(node.bytes)], ["Of all", formatShare(node.bytes, this.tree.bytes)]];
    if (node.blocks) pairs.push(["Blocks", formatCount(node.blocks)]);
    const frame = node.frame >= 0 ? this.text.frame(node.frame) : null;
    pairs.push(["Line", frame ? `${frame.file} ${frame.name}` : node.label, "wide"]);
    this.readout.replaceChildren(...definitions(pairs));
  }
}
