// All graphics share one moment, one view and one search, kept in the page's address.

const STATE_KEYS = ["color", "detail"];

const KEYS = [
  ["P", "the peak"], ["O", "the next failed request"], ["F", "the next flush of the cache"], ["S", "the next step"], ["G", "the steepest rise"],
  [", and .", "one event back, one on"], ["M", "mark this moment"], ["D", "what changed since the mark"], ["/", "search"],
  ["+ and -", "zoom in, zoom out"], ["[ and ]", "zoom in height"], ["arrows", "move"],
];

class Explorer {
  /**
   * @param {any} data of one device
   * @param {any} decoded the page's blob
   * @param {string} device its key: a number, or the letter of a run
   */
  constructor(data, decoded, device) {
    const { array, text } = decoded;
    this.data = data;
    this.text = text;
    this.lives = data.lives ? new Lives(data.lives, array, text) : null;
    this.canTravel = Boolean(this.lives && this.lives.isComplete);
    // The report's moment: the failure or the peak, if that is not the end of the file.
    this.usual = data.moment ? data.moment.state : null;
    this.moment = this.usual;
    this.anchor = null;
    this.selected = -1;
    this.query = "";
    this.finalMap = data.map ? SegmentMap.decoded(data.map, array) : null;
    this.timeline = place("timeline", data.timeline, (root) => new Timeline(root, data.timeline, data.capacity, array, text, this.lives));
    const twin = decoded.head.twins ? decoded.head.twins[device] : null;
    this.twin = twin && this.timeline ? new Twin(`run ${twin}`, decoded.head.devices[twin], decoded, this.lives) : null;
    if (this.twin) this.timeline.showTwin(this.twin);
    const map = this.finalMap || (this.canTravel ? this.lives.layoutAt(this.lives.n) : null);
    this.map = place("map", map, (root) => new SegmentMap(root, map, text));
    this.icicle = place("icicle", data.icicle, (root) => new Icicle(root, data.icicle, array, text, this.canTravel ? this.lives : null, data.opens));
    this.events = place("events", this.canTravel ? this.lives : null, (root) => new EventList(root, this.lives, this.timeline ? this.timeline.data.ooms : [], (state) => this.goTo(state)));
    this.blocks = place("blocks", this.lives, (root) => new BlockTable(root, this.lives, (row) => this.select(row)));
    this.whatIf = place("whatif", decoded.head.whatif && String(decoded.head.whatif.device) === device ? decoded.head.whatif : null, (root) => new WhatIf(root, decoded.head.whatif, (bytes) => this.tryCapacity(bytes)));
    this.panel = byId("explorer-panel");
    this.followSoon = onFrame(() => this.follow());
    this.buildBar();
    if (this.timeline) {
      this.timeline.onMoment = (state, pointed) => { this.setMoment(state); if (pointed && pointed.block >= 0) this.select(pointed.block); };
      this.timeline.onHover = (state, pointed) => this.describe(state, pointed);
      this.timeline.onView = () => this.followSoon();
    }
    if (this.map) this.map.onChoose = (b) => { const row = this.lifeOf(b); if (row >= 0) this.select(row); };
    if (this.icicle) this.icicle.onView = () => this.followSoon();
    if (this.blocks) this.blocks.onView = () => this.followSoon();
    if (this.timeline) this.timeline.cursor = this.moment;
    this.describe(null, null);
    this.follow();
    // Sort while nobody is waiting, so that it is done before the first click.
    if (this.canTravel) setTimeout(() => this.lives.byAddress(), 300);
  }

  // --- the bar ------------------------------------------------------------------------------

  buildBar() {
    const bar = byId("explorer-bar");
    if (!this.timeline) { bar.replaceChildren(); return; }
    const { timeline, lives } = this, { data } = timeline;
    const jumps = [button("Peak", "Go to the peak (P)", () => timeline.goTo(data.peak_state))];
    if (data.ooms.length) jumps.push(button("OOM", "Go to the next failed request (O)", () => timeline.nextOom()));
    if (data.flushes.length) jumps.push(button("Flush", "Go to the next flush of the cache (F)", () => timeline.nextOf(data.flushes.map((f) => f[0]))));
    if (lives && lives.steps.length) jumps.push(button("Step", "Go to the next step of the program (S)", () => timeline.nextOf(Array.from(lives.steps, (r) => r + 1))));
    jumps.push(button("Steepest rise", "Show the largest rise of allocated memory (G)", () => this.showRise()));
    if (lives && lives.data.growth) jumps.push(button("Leak", "Show the line that grows most, from its first block that stays to its last", () => this.showGrowth()));
    this.jumps = element("div", { class: "switch", role: "group", "aria-label": "Jump to" }, ...jumps);
    this.marks = element("div", { class: "switch", role: "group", "aria-label": "Compare two moments" },
      button("Mark", "Mark this moment, to compare another with it (M)", () => this.mark()),
      button("Difference", "Show what changed between the mark and the moment, or over the range in view (D)", () => this.showDifference()));
    const parts = [this.jumps];
    if (this.canTravel) parts.push(this.marks);
    if (lives) {
      this.search = element("input", { type: "search", placeholder: "Search: file, >9MiB, step:3", "aria-label": "Search blocks by file, function, category, size or address (/)", title: "Words of a path or a function; a category; >100MiB, <1MiB, =512KiB; an address. All words must fit. step:3 goes to the peak of step 3, event:1200 to an event. (/)" });
      this.search.addEventListener("input", () => { clearTimeout(this.typing); this.typing = setTimeout(() => this.find(this.search.value), 120); });
      this.hits = element("span", { class: "from", "aria-live": "polite" });
      parts.push(this.search, this.hits);
    }
    parts.push(element("span", { class: "gap" }), ...saveButtons("", "timeline", timeline));
    if (this.map) parts.push(...saveButtons("Map ", "segments", this.map));
    parts.push(element("details", { class: "keys" }, element("summary", { "aria-label": "Keys" }, "?"), element("dl", null, ...definitions(KEYS))));
    bar.replaceChildren(...parts);
  }

  key(e) {
    const field = e.target instanceof HTMLInputElement || e.target instanceof HTMLSelectElement;
    if (field || e.ctrlKey || e.metaKey || e.altKey || !this.timeline) return;
    const here = this.moment ?? this.timeline.n - 1;
    const moves = {
      "/": () => { if (this.search) this.search.focus(); }, ",": () => this.goTo(here - 1), ".": () => this.goTo(here + 1),
      m: () => this.mark(), d: () => this.showDifference(), g: () => this.showRise(),
      f: () => this.timeline.nextOf(this.timeline.data.flushes.map((m) => m[0])), s: () => { if (this.lives) this.timeline.nextOf(Array.from(this.lives.steps, (r) => r + 1)); },
      p: () => this.timeline.goTo(this.timeline.data.peak_state), o: () => this.timeline.nextOom(),
    };
    const move = moves[e.key.toLowerCase()];
    if (!move || e.defaultPrevented) return;
    e.preventDefault();
    move();
  }

  showRise() {
    const [from, to] = this.timeline.steepestRise(), margin = Math.max(8, (to - from) * 0.1);
    this.anchor = from;
    this.timeline.show(from - margin, to + margin);
    this.timeline.setCursor(to);
  }

  showGrowth() {
    const [from, to] = this.lives.data.growth, margin = Math.max(8, (to - from) * 0.1);
    this.anchor = Math.max(0, from - 1);
    this.timeline.show(from - margin, to + margin);
    this.timeline.setCursor(to);
    this.showDifference();
  }

  mark() {
    this.anchor = this.anchor === this.moment ? null : this.moment;
    this.followSoon();
  }

  showDifference() {
    if (!this.icicle || !this.canTravel) return;
    this.icicle.choose("change");
    this.icicle.root.scrollIntoView({ block: "nearest" });
  }

  // The moments that the command line accepts: the peak of a step, or an event.
  momentOf(query) {
    const asked = /^(step|event):(\d{1,15})$/i.exec(query.trim()), number = asked ? Number(asked[2]) : 0;
    if (!asked || !this.lives) return null;
    if (asked[1].toLowerCase() === "event") return number <= this.lives.n ? number : null;
    const { steps } = this.lives;
    return number >= 1 && number <= steps.length ? this.timeline.highestAfter(steps[number - 1], number < steps.length ? steps[number] : this.lives.n) : null;
  }

  find(query) {
    if (this.search && this.search.value !== query) this.search.value = query;
    const moment = this.timeline ? this.momentOf(query) : null;
    if (moment !== null) {
      this.goTo(moment);
      query = "";
    }
    this.query = query;
    const found = this.lives ? this.lives.search(query) : null;
    if (this.timeline) this.timeline.found = found;
    if (this.hits) this.hits.textContent = found ? plural(sumOf(found), "block") : "";
    if (this.blocks) this.blocks.show({ found });
    this.followSoon();
  }

  // The timeline shows the capacity that is being tried.
  tryCapacity(bytes) {
    if (!this.timeline) return;
    this.timeline.capacity = bytes;
    this.timeline.painted = "";
    this.timeline.draw();
  }

  // --- time ---------------------------------------------------------------------------------

  goTo(state) { this.timeline.setCursor(state); }

  setMoment(state) {
    this.moment = state;
    this.followSoon();
  }

  /** Make all graphics show the moment, the marks and the view. */
  follow() {
    const { timeline } = this;
    if (timeline) {
      Object.assign(timeline, { moment: this.moment, anchor: this.anchor, selected: this.selected });
      timeline.draw();
    }
    if (this.map && this.canTravel && this.shown !== this.moment) {
      this.shown = this.moment;
      const isEnd = this.moment === null || this.moment >= this.lives.n;
      this.map.load(isEnd && this.finalMap ? this.finalMap : this.lives.layoutAt(isEnd ? this.lives.n : this.moment), isEnd ? "at the end" : `after event ${formatCount(this.moment)}`);
    }
    if (this.icicle && timeline) this.icicle.follow(this.moment, this.anchor, timeline.view);
    if (this.events) this.events.show(this.moment ?? this.lives.n);
    if (this.blocks && timeline) this.blocks.show({ moment: this.moment ?? this.lives.n, view: timeline.view });
    this.describe(null, null);
    saveAddress();
  }

  lifeOf(b) {
    if (this.map.row) return this.map.row[b];
    const row = this.map.allocRow[b], event = row >= 0 && this.lives ? this.lives.eventAt(row + 1) : null;
    return event ? event.block : -1;
  }

  select(row) {
    this.selected = this.selected === row ? -1 : row;
    this.followSoon();
  }

  // --- the panel ----------------------------------------------------------------------------

  describe(state, pointed) {
    if (!this.timeline || !this.panel) return;
    const shown = state ?? this.moment ?? this.timeline.n - 1, { timeline, lives } = this, bucket = timeline.bucketOf(shown);
    const value = (name) => timeline[name].levels[0].high[bucket];
    const children = [element("h4", null, state === null ? this.nameOf(shown) : `After event ${formatCount(shown)}`),
      element("dl", null, ...definitions([["Allocated", formatSize(value("allocated"))], ["Reserved", formatSize(value("reserved"))], ...this.twinFigures(shown)]))];
    if (lives) children.push(this.holders(shown, value("allocated")));
    if (pointed && pointed.block < 0) children.push(element("p", { class: "from" }, pointed.said ? `Here: ${pointed.said}.` : `Here: ${timeline.coloring.names[pointed.group]}, ${formatSize(pointed.bytes)}${pointed.least < Infinity ? ` in blocks under ${formatSize(pointed.least)}, too thin to draw one by one` : ""}.`));
    const block = pointed && pointed.block >= 0 ? pointed.block : this.selected;
    if (lives && block >= 0) children.push(...this.blockDetails(block, block === this.selected));
    this.panel.replaceChildren(...children);
  }

  twinFigures(state) {
    if (!this.twin) return [];
    const bytes = this.twin.allocatedAt(state);
    return [[`Allocated in ${this.twin.name}`, bytes === null ? "it has ended" : formatSize(bytes)]];
  }

  // The other run's position at this run's moment; null if nobody chose a moment.
  placeInTwin() {
    const place = this.twin && this.moment !== this.usual ? this.twin.stateAt(this.moment) : null;
    return place === null ? null : Math.round(place);
  }

  nameOf(state) {
    if (this.usual !== null && state === this.usual) return `At the ${this.data.moment.name}`;
    if (state !== this.timeline.n - 1) return `After event ${formatCount(state)}`;
    return this.data.moment && this.data.moment.state === null ? `At the ${this.data.moment.name}` : "At the end";
  }

  holders(state, total) {
    const list = element("ol", { class: "holders" }), coloring = this.timeline.coloring;
    const colors = coloring && coloring.lines ? coloring.colors() : null;
    const others = this.twin ? this.twin.heldByFrame(state) : null;
    for (const { line, bytes, blocks } of this.lives.holdersAt(state, 6)) {
      const swatch = element("i");
      const at = colors ? coloring.lines.indexOf(line) : -1;
      swatch.style.background = colors ? colors[at >= 0 ? at : colors.length - 1] : "transparent";
      const bar = element("span", { class: "share" });
      bar.style.width = `${Math.max(1, (100 * bytes) / Math.max(1, total))}%`;
      list.append(element("li", { title: `${this.lives.lineFull(line)}: ${plural(blocks, "block")}` }, swatch, element("b", null, formatSize(bytes)), element("span", null, this.lives.lineName(line)), bar));
      const other = others ? others.get(this.lives.lineFrame[line]) || 0 : bytes;
      if (other !== bytes) list.lastChild.append(element("span", { class: "other" }, `${this.twin.name}: ${formatSize(other)}`));
    }
    return list;
  }

  blockDetails(i, isSelected) {
    const { lives, timeline } = this, { n } = lives, time = (state) => (timeline.time && state > 0 && state <= n ? ` (${formatTime(timeline.timeOf(state))})` : "");
    const born = lives.born[i], freed = lives.freed[i];
    const pairs = [["Asked for", formatSize(lives.size[i] - lives.slack[i])],
      ["Allocated", born === 0 ? "before the recording" : `event ${formatCount(born)}${time(born)}`],
      ["Freed", freed > n ? "never" : `event ${formatCount(freed)}${time(freed)}`],
      ["Lived", plural(Math.min(freed, n) - born, "event")]];
    if (lives.done[i] > freed && freed <= n) pairs.push(["Waited for a stream", plural(Math.min(lives.done[i], n) - freed, "event")]);
    if (timeline.training && born > 0) pairs.push(["Made in", timeline.training.names[timeline.training.label[timeline.passAt(born)]]]);
    if (lives.category) pairs.push(["Category", CATEGORIES[lives.category[i]]]);
    pairs.push(["Address", `0x${lives.address[i].toString(16)}`]);
    const children = [element("h4", null, `${isSelected ? "Block" : "Here: block"} of ${formatSize(lives.size[i])}`), element("dl", null, ...definitions(pairs))];
    if (isSelected) {
      const held = this.heldBy(i);
      if (held) children.push(element("p", null, held));
      const row = element("div", { class: "controls" });
      if (born > 0) row.append(button("Go to its birth", "Go to the event that allocated it", () => this.goTo(born)));
      if (freed <= n) row.append(button("To its end", "Go to the event that freed it", () => this.goTo(freed)));
      row.append(button("Its life", "Zoom to the life of this block", () => { const m = Math.max(8, (Math.min(freed, n) - born) * 0.1); timeline.show(born - m, Math.min(freed, n) + m); }));
      children.push(row);
    }
    children.push(lives.stack[i] >= 0 ? panelStack(this.text, lives.stack[i]) : element("p", { class: "from" }, "No stack recorded."));
    return children;
  }

  // The effect of the block on its segment at the moment.
  heldBy(i) {
    if (!this.map || !this.canTravel) return "";
    const b = this.map.row ? this.map.row.indexOf(i) : this.map.allocRow.indexOf(this.lives.born[i] - 1);
    if (b < 0) return this.lives.isAllocated(i, this.moment ?? this.lives.n) ? "" : "It is not allocated at this moment.";
    const s = this.map.segmentOf[b], free = this.map.free[s], live = this.map.blockStart[s + 1] - this.map.blockStart[s];
    if (!free) return `Its segment of ${formatSize(this.map.total[s])} is full.`;
    return `It lies in a segment of ${formatSize(this.map.total[s])} with ${formatSize(free)} free${this.map.stranders[b] ? `, which ${live > 2 ? "it and its neighbors keep" : "it keeps"} from going back` : ""}.`;
  }

  // --- the address --------------------------------------------------------------------------

  address() {
    const parts = new URLSearchParams(), { timeline } = this;
    const put = (name, value, usual) => { if (value !== null && value !== undefined && value !== usual) parts.set(name, String(value)); };
    put("at", this.moment, this.usual);
    put("a", this.anchor);
    put("block", this.selected, -1);
    put("q", this.query, "");
    if (timeline) {
      if (timeline.view.from > 0 || timeline.view.to < timeline.n - 1) put("view", `${Math.round(timeline.view.from)}-${Math.round(timeline.view.to)}`);
      if (timeline.heights) put("heights", `${Math.round(timeline.heights.low)}-${Math.round(timeline.heights.high)}`);
      if (timeline.byTime) put("axis", "time");
      put("color", timeline.color, this.lives ? (this.lives.category ? "category" : "line") : "totals");
      put("detail", timeline.detail, "fine");
    }
    if (this.icicle) {
      put("tree", this.icicle.moment, this.icicle.usual);
      put("by", this.icicle.by, "stack");
    }
    if (this.blocks) {
      put("scope", this.blocks.scope, "moment");
      put("sort", this.blocks.sort, "-size");
    }
    return parts;
  }

  restore(parts) {
    const number = (name) => { const v = Number(parts.get(name)); return parts.has(name) && Number.isFinite(v) ? v : null; };
    const range = (name) => { const m = /^(\d+)-(\d+)$/.exec(parts.get(name) || ""); return m ? [Number(m[1]), Number(m[2])] : null; };
    const { timeline } = this;
    if (!timeline) return;
    const inside = (state) => (state === null ? null : Math.max(0, Math.min(timeline.n - 1, Math.round(state))));
    const view = range("view"), heights = range("heights");
    for (const name of STATE_KEYS) if (parts.has(name)) timeline.choose(name, parts.get(name));
    timeline.setAxis(parts.get("axis") === "time" && Boolean(timeline.time));
    if (view && view[1] > view[0]) timeline.show(...view);
    else timeline.show(0, timeline.n - 1);
    timeline.heights = heights && heights[1] > heights[0] ? { low: heights[0], high: heights[1] } : null;
    this.anchor = inside(number("a"));
    const block = number("block");
    this.selected = this.lives && block !== null && block >= 0 && block < this.lives.count ? Math.floor(block) : -1;
    this.moment = parts.has("at") ? inside(number("at")) : this.usual;
    timeline.cursor = this.moment;
    timeline.describe(this.moment === null ? null : timeline.bucketOf(this.moment));
    if (this.blocks) this.blocks.restore(parts);
    this.find((parts.get("q") || "").slice(0, 200));
    if (this.icicle && parts.has("tree")) this.icicle.choose(parts.get("tree"));
    if (this.icicle) this.icicle.chooseBy(parts.get("by") || "stack");
    this.follow();
  }

  paint() { for (const graphic of [this.timeline, this.map, this.icicle]) if (graphic) graphic.paint(); }

  redraw() {
    if (this.timeline) this.timeline.legend();
    for (const graphic of [this.timeline, this.map, this.icicle]) if (graphic) graphic.draw();
    this.describe(null, null);
  }
}

function saveButtons(label, name, graphic) {
  const title = `Save the ${name} as seen`;
  return [
    button(`${label}PNG`, `${title}, in pixels`, () => savePicture(graphic.canvas, `fragdoctor-${name}.png`)),
    button(`${label}SVG`, `${title}, as shapes and text`, () => saveFile(graphic.svg(), `fragdoctor-${name}.svg`)),
  ];
}

function savePicture(canvas, name) {
  const copy = element("canvas", { width: canvas.width, height: canvas.height }), c = copy.getContext("2d");
  c.fillStyle = theme.colors.paper;
  c.fillRect(0, 0, copy.width, copy.height);
  c.drawImage(canvas, 0, 0);
  copy.toBlob((blob) => saveFile(blob, name));
}

function saveFile(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

// Keeps a spreadsheet from taking a cell for a formula.
function csvCell(value) {
  const text = String(value), safe = /^[=+\-@\t\r]/.test(text) && typeof value !== "number" ? `'${text}` : text;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function saveTable(head, rows, name) {
  const lines = [head, ...rows].map((row) => row.map(csvCell).join(","));
  saveFile(new Blob([`${lines.join("\r\n")}\r\n`], { type: "text/csv" }), name);
}
