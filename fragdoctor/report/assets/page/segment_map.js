// The segment map: all segments of a pool flow like words in a paragraph, each a bar of blocks to
// scale. Only the visible part is drawn, so scrolling stays smooth with thousands of segments.

const BAR = 18, ROW = 26, HEAD = 46, GAP = 3, LEAST = 3;
const STATES = ["free", "allocated", "freed, waits for another stream", "unknown state"];

class SegmentMap {
  constructor(root, columns, text) {
    this.root = root;
    this.text = text;
    this.order = "free";
    this.factor = 1;
    /** @type {(block: number) => void} */
    this.onChoose = () => {};
    this.draw = onFrame(() => this.paint());
    this.build();
    this.load(columns, "at the end");
    new ResizeObserver(() => this.arrange()).observe(this.viewport);
  }

  // The columns of segment_map_data in lives_data.py, as ``load`` takes them.
  static decoded(data, array) {
    const columns = { groups: data.groups, nEvents: data.n_events, nHidden: data.n_hidden, hiddenBytes: data.hidden_bytes, start: null, row: null };
    for (const name of ["group", "total", "page", "size", "requested", "state", "stack", "stranders"]) columns[name] = array(data[name]);
    return { ...columns, blockStart: array(data.block_start), addressHigh: array(data.address_high), addressLow: array(data.address_low), allocRow: array(data.alloc_row) };
  }

  /**
   * Show the segments of one moment; ``when`` says which.
   * @param {Record<string, any>} columns
   * @param {string} when
   */
  load(columns, when) {
    this.groups = columns.groups;
    this.nEvents = columns.nEvents;
    this.nHidden = columns.nHidden;
    this.hiddenBytes = columns.hiddenBytes;
    this.group = columns.group;
    this.total = columns.total;
    this.page = columns.page;
    this.size = columns.size;
    this.requested = columns.requested;
    this.state = columns.state;
    this.stack = columns.stack;
    this.stranders = columns.stranders;
    this.blockStart = columns.blockStart;
    this.addressHigh = columns.addressHigh;
    this.addressLow = columns.addressLow;
    this.allocRow = columns.allocRow;
    this.start = columns.start;
    this.row = columns.row;
    this.nSegments = this.total.length;
    this.free = new Float64Array(this.nSegments);
    this.offset = new Float64Array(this.size.length);
    this.segmentOf = new Int32Array(this.size.length);
    for (let s = 0; s < this.nSegments; s++) {
      for (let b = this.blockStart[s], at = 0; b < this.blockStart[s + 1]; b++) {
        this.offset[b] = at;
        this.segmentOf[b] = s;
        at += this.size[b];
        if (this.state[b] === 0) this.free[s] += this.size[b];
      }
    }
    this.stranded = this.free.slice();
    for (let b = 0; b < this.size.length; b++) {
      const back = this.releasable(b);
      if (back) this.stranded[this.segmentOf[b]] -= back[1] - back[0];
    }
    this.hover = null;
    this.chosen = null;
    const free = sumOf(this.free), nStranders = sumOf(this.stranders);
    const how = nStranders ? `stranded by ${plural(nStranders, "block")}` : "not returned on demand"; // as in private pools
    this.summary = `${plural(this.nSegments, "segment")} ${when}: ${formatSize(sumOf(this.total))} reserved, ${formatSize(free)} free inside, ${formatSize(sumOf(this.stranded))} of it ${how}`;
    this.about.textContent = this.summary;
    this.canvas.setAttribute("aria-label", `${this.summary}. Arrow keys move from block to block, up and down from segment to segment.`);
    this.hiddenNote.hidden = !this.nHidden;
    this.hiddenNote.textContent = this.nHidden ? `${plural(this.nHidden, "further segment")} (${formatSize(this.hiddenBytes)}) with the least free space are left out to keep this file small.` : "";
    this.describe(null);
    this.arrange();
  }

  // The stretch of a free block that the allocator can return: a whole segment, or, in
  // expandable segments, whole pages. Private pools return nothing while they are in use.
  releasable(b) {
    const s = this.segmentOf[b], page = this.page[s];
    if (this.state[b] !== 0 || this.groups[this.group[s]].pool) return null;
    if (!page) return this.free[s] === this.total[s] ? [this.offset[b], this.offset[b] + this.size[b]] : null;
    const from = Math.ceil(this.offset[b] / page) * page, to = Math.floor((this.offset[b] + this.size[b]) / page) * page;
    return to > from ? [from, to] : null;
  }

  build() {
    const order = element("select", { "aria-label": "Order of the segments" });
    for (const [value, label] of [["free", "stranded free space"], ["address", "address"], ["size", "size"]]) order.append(element("option", { value }, label));
    order.addEventListener("change", () => { this.order = order.value; this.arrange(); });
    this.controls = element("div", { class: "controls", role: "group", "aria-label": "Segment map controls" },
      element("label", null, "Order by ", order),
      button("Larger", "Draw at a larger scale (+)", () => this.scale(2)), button("Smaller", "Draw at a smaller scale (-)", () => this.scale(0.5)));
    this.key = element("ul", { class: "chartkey" }, ...[["k-live", "allocated"], ["k-pending", "waits for a stream"], ["k-free", "free, but stranded"], ["k-whole", "free, returned on demand"], ["k-strander", "stranding block"]]
      .map(([k, word]) => element("li", null, element("i", { class: k }), word)));
    this.canvas = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": "map" });
    this.about = element("p", { class: "from", "aria-live": "polite" });
    this.hiddenNote = element("p", { class: "from" });
    this.spacer = element("div", { class: "spacer" });
    this.viewport = element("div", { class: "viewport" }, this.canvas, this.spacer);
    this.panel = element("div", { class: "panel", "aria-live": "polite" });
    this.root.replaceChildren(this.about, this.controls, this.key, element("div", { class: "mapgrid" }, this.viewport, this.panel), this.hiddenNote);
    this.listen();
  }

  listen() {
    this.viewport.addEventListener("scroll", this.draw, { passive: true });
    this.canvas.addEventListener("pointermove", (e) => { if (e.pointerType !== "touch") this.point(this.blockAt(e.offsetX, e.offsetY)); });
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (e) => {
      const block = this.blockAt(e.offsetX, e.offsetY);
      this.chosen = block === this.chosen ? null : block;
      this.point(block);
      if (this.chosen !== null && this.state[block] !== 0) this.onChoose(block);
    });
    this.canvas.addEventListener("keydown", (e) => this.key_(e));
  }

  key_(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    if (!this.nSegments) return;
    const here = this.chosen ?? this.blockStart[this.sequence[0]];
    const place = this.sequence.indexOf(this.segmentOf[here]);
    const moves = {
      ArrowRight: () => this.step(here, place, 1), ArrowLeft: () => this.step(here, place, -1),
      ArrowDown: () => this.blockStart[this.sequence[Math.min(this.nSegments - 1, place + 1)]],
      ArrowUp: () => this.blockStart[this.sequence[Math.max(0, place - 1)]],
      Home: () => this.blockStart[this.sequence[0]], End: () => this.blockStart[this.sequence[this.nSegments - 1]],
    };
    if (e.key === "+" || e.key === "=") this.scale(2);
    else if (e.key === "-") this.scale(0.5);
    else if (e.key === "Escape") { this.chosen = null; this.point(null); } else if (moves[e.key]) {
      this.chosen = this.chosen === null ? here : moves[e.key]();
      this.reveal(this.chosen);
      this.point(this.chosen);
    } else if (e.key === "Enter" && this.chosen !== null && this.state[this.chosen] !== 0) this.onChoose(this.chosen);
    else return;
    e.preventDefault();
  }

  step(block, place, by) {
    const s = this.segmentOf[block], next = block + by;
    if (next >= this.blockStart[s] && next < this.blockStart[s + 1]) return next;
    const other = this.sequence[place + by];
    if (other === undefined) return block;
    return by > 0 ? this.blockStart[other] : this.blockStart[other + 1] - 1;
  }

  scale(by) {
    this.factor = Math.max(1 / 8, Math.min(256, this.factor * by));
    this.arrange();
  }

  // --- layout -------------------------------------------------------------------------------

  // Pieces are stretches of a segment within one row; a segment longer than a row is cut.
  arrange() {
    const width = this.viewport.clientWidth;
    if (width < 60) return;
    this.width = width;
    this.pieces = [];
    this.heads = [];
    this.sequence = [];
    let y = 0;
    for (const { g, members } of this.poolsInOrder()) {
      const perPixel = this.bytesPerPixel(members);
      this.heads.push({ y, group: g, members, perPixel });
      y = this.flow(members, perPixel, y + HEAD) + 14;
    }
    this.total_height = y;
    // Paper does not scroll, so print at most two pages of the map.
    this.window = Math.min(y, this.isPrinting ? 1800 : width < 600 ? 420 : 560);
    this.spacer.style.height = `${y - this.window}px`;
    this.draw();
  }

  print(isPrinting) {
    this.isPrinting = isPrinting;
    this.viewport.scrollTop = 0;
    this.arrange();
  }

  // The pool with most stranded space comes first, just like the segments within a pool.
  poolsInOrder() {
    const pools = this.groups.map((_, g) => ({ g, members: [], stranded: 0 }));
    for (let s = 0; s < this.nSegments; s++) {
      pools[this.group[s]].members.push(s);
      pools[this.group[s]].stranded += this.stranded[s];
    }
    if (this.order === "free") pools.sort((a, b) => b.stranded - a.stranded || a.g - b.g);
    return pools.filter((p) => p.members.length).map((p) => ({ g: p.g, members: this.ordered(p.members) }));
  }

  ordered(members) {
    if (this.order === "free") members.sort((a, b) => this.stranded[b] - this.stranded[a] || this.total[b] - this.total[a] || a - b);
    if (this.order === "size") members.sort((a, b) => this.total[b] - this.total[a] || a - b);
    return members;
  }

  // So that the group takes a screenful, its small segments stay visible, and its largest fit a
  // row, or a few rows if they hold many blocks.
  bytesPerPixel(members) {
    const sizes = members.map((s) => this.total[s]).sort((a, b) => a - b);
    const sum = sizes.reduce((a, b) => a + b, 0), largest = sizes[sizes.length - 1];
    const small = sizes[Math.floor(sizes.length / 4)];
    const crowded = Math.max(...members.map((s) => this.blockStart[s + 1] - this.blockStart[s]));
    const rows = largest > sum / 3 ? Math.max(1, Math.min(6, Math.ceil(crowded / 40))) : 1;
    const comfortable = Math.max(sum / (12 * this.width), largest / (rows * (this.width - 2)));
    const scale = Math.max(Math.min(comfortable, small / 10), sum / (40 * this.width)) / this.factor;
    // If one size is common, make a row fit a whole number of such segments.
    const usual = sizes[sizes.length >> 1], fit = Math.floor((this.width + GAP) / (usual / scale + GAP));
    return usual === largest && fit >= 1 ? usual / ((this.width + GAP) / (fit < 2 && this.factor <= 1 ? 2 : fit) - GAP) : scale;
  }

  flow(members, perPixel, top) {
    let x = 0, y = top;
    for (const s of members) {
      this.sequence.push(s);
      let left = this.total[s] / perPixel, from = 0;
      if (left + x > this.width && (left <= this.width || this.width - x < 60) && x > 0) { x = 0; y += ROW; }
      if (left < LEAST) {
        this.pieces.push({ s, x, y, width: LEAST, from: 0, to: this.total[s], perPixel: this.total[s] / LEAST });
        x += LEAST + GAP;
        continue;
      }
      while (left > 0.01) {
        const width = Math.min(left, this.width - x), to = Math.min(this.total[s], from + width * perPixel);
        this.pieces.push({ s, x, y, width, from, to, perPixel });
        left -= width;
        from = to;
        x += width + GAP;
        if (left > 0.01) { x = 0; y += ROW; }
      }
      if (x > this.width - 2) { x = 0; y += ROW; }
    }
    return x > 0 ? y + ROW : y;
  }

  firstPieceAt(y) {
    let low = 0, high = this.pieces.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.pieces[middle].y + BAR < y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  blockAt(x, canvasY) {
    const y = canvasY + this.viewport.scrollTop;
    for (let i = this.firstPieceAt(y); i < this.pieces.length && this.pieces[i].y <= y; i++) {
      const piece = this.pieces[i];
      if (x < piece.x - 1 || x > piece.x + piece.width + 1) continue;
      const at = Math.max(piece.from, Math.min(piece.to - 1, piece.from + (x - piece.x) * piece.perPixel));
      return this.nearStrander(piece, at) ?? this.blockHolding(piece.s, at);
    }
    return null;
  }

  blockHolding(s, at) {
    const first = this.blockStart[s], last = this.blockStart[s + 1];
    return Math.max(first, first + upperBound(this.offset.subarray(first, last), at) - 1);
  }

  // A strander is often hair-thin: a click within three pixels selects it.
  nearStrander(piece, at) {
    const reach = 3 * piece.perPixel, here = this.blockHolding(piece.s, at);
    for (let b = Math.max(this.blockStart[piece.s], here - 12); b < Math.min(this.blockStart[piece.s + 1], here + 13); b++) {
      if (this.stranders[b] && this.offset[b] - reach <= at && at <= this.offset[b] + this.size[b] + reach) return b;
    }
    return null;
  }

  reveal(block) {
    const s = this.segmentOf[block];
    const piece = this.pieces.find((p) => p.s === s && this.offset[block] < p.to) || this.pieces.find((p) => p.s === s);
    const top = this.viewport.scrollTop;
    if (piece.y < top + HEAD || piece.y + ROW > top + this.window) this.viewport.scrollTop = piece.y - this.window / 2;
  }

  point(block) {
    if (block === this.hover && block !== null) return;
    this.hover = block;
    this.describe(block ?? this.chosen);
    this.draw();
  }

  // --- drawing ------------------------------------------------------------------------------

  paint() { this.paintOn(prepare(this.canvas, this.width, this.window)); }

  /** @returns {Blob} the visible part, as an SVG */
  svg() {
    const c = new VectorContext(this.width, this.window);
    this.paintOn(c);
    return c.blob();
  }

  paintOn(c) {
    if (!this.pieces) return;
    const top = this.viewport.scrollTop;
    for (const head of this.heads) {
      if (head.y + HEAD >= top && head.y <= top + this.window) this.paintHead(c, head, head.y - top);
    }
    for (let i = this.firstPieceAt(top); i < this.pieces.length && this.pieces[i].y <= top + this.window; i++) {
      this.paintPiece(c, this.pieces[i], this.pieces[i].y - top);
    }
  }

  paintHead(c, head, y) {
    const group = this.groups[head.group];
    const total = head.members.reduce((a, s) => a + this.total[s], 0), free = head.members.reduce((a, s) => a + this.free[s], 0);
    c.textAlign = "left";
    c.fillStyle = theme.colors.ink;
    c.font = `600 13px ${theme.font}`;
    const name = `${group.kind === "unknown" ? "Segments" : `${group.kind[0].toUpperCase()}${group.kind.slice(1)} pool`}${group.pool ? `, private pool ${group.pool}` : ""}${group.stream === "default" ? "" : `, stream ${group.stream}`}`;
    c.fillText(name, 0, y + 14);
    const used = c.measureText(name).width + 14;
    c.font = `12px ${theme.font}`;
    c.fillStyle = theme.colors.soft;
    const about = `${plural(head.members.length, "segment")} · ${formatSize(total)} · ${formatSize(free)} free`;
    const scale = `a full row is ${formatSize(head.perPixel * this.width)}`;
    const fits = used + c.measureText(`${about}   ${scale}`).width < this.width;
    c.fillText(about, fits ? used : 0, fits ? y + 14 : y + 30);
    if (fits) {
      c.textAlign = "right";
      c.fillText(scale, this.width, y + 14);
    }
  }

  paintPiece(c, piece, y) {
    const { s, x, width, from, to, perPixel } = piece, k = theme.colors;
    c.fillStyle = k.stranded;
    c.fillRect(x, y, width, BAR);
    const marked = this.hover ?? this.chosen, stack = marked === null ? -1 : this.stack[marked];
    let drawn = x, stranders = [];
    for (let b = this.blockHolding(s, from); b < this.blockStart[s + 1] && this.offset[b] < to; b++) {
      if (this.state[b] === 0) { this.paintReleasable(c, piece, y, b); continue; }
      const x0 = x + Math.max(0, (this.offset[b] - from) / perPixel);
      const x1 = x + Math.min(width, (this.offset[b] + this.size[b] - from) / perPixel);
      if (this.stranders[b]) stranders.push([x0, x1, b]);
      const same = stack >= 0 && this.stack[b] === stack;
      // Blocks smaller than a pixel share it: if any of them is live, it shows.
      if (x1 < drawn + 0.5 && !same) continue;
      c.fillStyle = this.state[b] === 2 ? k.pending : k.live;
      c.globalAlpha = same || stack < 0 ? 1 : 0.62;
      const start = Math.max(x0, drawn === x ? x0 : drawn - 0.5);
      c.fillRect(start, y, Math.max(x1 - start, 0.75), BAR);
      c.globalAlpha = 1;
      if (x1 - x0 > 4) {
        c.fillStyle = k.paper;
        c.fillRect(x1 - 1, y, 1, BAR);
      }
      drawn = x1;
    }
    // A strander gets a cap; if it is thin compared to the space it strands, a full-height nail.
    c.fillStyle = k.strander;
    for (const [x0, x1] of stranders) {
      const thin = x1 - x0 < 5;
      c.fillRect(Math.min(x0, x + width - 2), y - 3, Math.max(2, x1 - x0 - (thin ? 0 : 1)), thin ? BAR + 3 : 4);
    }
    if (marked !== null && this.segmentOf[marked] === s) this.paintMarked(c, piece, y, marked);
  }

  paintReleasable(c, piece, y, b) {
    const back = this.releasable(b);
    if (!back) return;
    const x0 = piece.x + Math.max(0, (back[0] - piece.from) / piece.perPixel);
    const x1 = piece.x + Math.min(piece.width, (back[1] - piece.from) / piece.perPixel);
    if (x1 - x0 < 0.5) return;
    c.fillStyle = theme.colors.free;
    c.fillRect(x0, y, x1 - x0, BAR);
    hatch(c, x0, y, x1 - x0, BAR, theme.colors.releasable);
    c.strokeStyle = theme.colors.releasable;
    c.lineWidth = 1;
    c.strokeRect(x0 + 0.5, y + 0.5, Math.max(0.5, x1 - x0 - 1), BAR - 1);
  }

  paintMarked(c, piece, y, b) {
    const start = (this.offset[b] - piece.from) / piece.perPixel, end = start + this.size[b] / piece.perPixel;
    if (end < 0 || start > piece.width) return;
    const x0 = piece.x + Math.max(0, start), x1 = piece.x + Math.min(piece.width, end);
    c.strokeStyle = theme.colors.ink;
    c.lineWidth = 2;
    c.strokeRect(x0 - 1, y - 3, Math.max(4, x1 - x0 + 2), BAR + 6);
  }

  // --- text ---------------------------------------------------------------------------------

  address(s, offset) {
    if (this.start) return `0x${(this.start[s] + offset).toString(16)}`;
    return `0x${((BigInt(this.addressHigh[s]) << 32n) + BigInt(this.addressLow[s]) + BigInt(offset)).toString(16)}`;
  }

  describe(b) {
    if (b === null) {
      this.panel.replaceChildren(element("h4", null, "Point at a block"), element("p", { class: "from" }, "Its size, age and call stack appear here. Blocks with the same stack light up too. Click to keep one."));
      return;
    }
    const s = this.segmentOf[b], live = this.state[b] !== 0;
    const pairs = [["Size", formatSize(this.size[b])]];
    if (live && this.requested[b] && this.requested[b] !== this.size[b]) pairs.push(["Asked for", formatSize(this.requested[b])]);
    if (live) pairs.push(["Age", this.age(b)]);
    if (this.stack[b] >= 0) pairs.push(["Allocated by", this.text.short(this.text.userFrame(this.stack[b]))]);
    pairs.push(["Address", this.address(s, this.offset[b])], ["In segment of", `${formatSize(this.total[s])}${this.page[s] ? ", expandable" : ""}`], ["Free in segment", `${formatSize(this.free[s])} · ${formatShare(this.free[s], this.total[s])}`]);
    const back = this.releasable(b), isPrivate = this.groups[this.group[s]].pool;
    if (back && back[1] - back[0] < this.size[b]) pairs.push(["Returned on demand", formatSize(back[1] - back[0])]);
    const title = live ? `${this.stranders[b] ? "Stranding block" : "Block"}, ${STATES[this.state[b]] || STATES[3]}` : back ? "Free, returned on demand" : isPrivate ? "Free inside a private pool" : "Free, stranded by its neighbors";
    const children = [element("h4", null, title), element("dl", null, ...definitions(pairs))];
    if (live) children.push(this.stack[b] >= 0 ? panelStack(this.text, this.stack[b]) : element("p", { class: "from" }, "No stack recorded."));
    if (back) children.push(element("p", { class: "from" }, `The allocator returns ${this.page[s] ? "whole pages" : "this segment"} by itself when memory runs short.`));
    this.panel.replaceChildren(...children);
  }

  age(b) {
    if (this.allocRow[b] < 0) return this.nEvents ? "from before the trace" : "not recorded";
    return plural(this.nEvents - this.allocRow[b] - 1, "event");
  }
}
