// The timeline: each pixel shows the true highest and lowest value of its events.

const ACTIONS = ["alloc", "free requested", "free completed", "segment alloc", "segment free", "segment map",
  "segment unmap", "snapshot", "OOM", "annotate", "other"];
const LANE = 16, TOP = 8, BOTTOM = 26, LEFT = 64, RIGHT = 12;

class Timeline {
  constructor(root, data, capacity, array, text, lives) {
    this.root = root;
    this.lives = lives;
    this.blockBands = lives ? new Bands(lives) : null;
    /** @type {any} */
    this.bands = this.blockBands; // or those of segments
    this.twin = null;
    this.found = null;
    this.selected = -1;
    this.moment = null;
    this.anchor = null;
    this.heights = null;
    /** @type {(state: number, block: any) => void} */
    this.onMoment = () => {};
    /** @type {(state: number | null, block: any) => void} */
    this.onHover = () => {};
    this.onView = () => {};
    this.data = data;
    this.capacity = capacity;
    this.text = text;
    this.n = data.n_events + 1;
    this.bucket = data.bucket;
    const curves = data.allocated ? null : lives.curves();
    const envelope = (name) => new Envelope(curves ? curves[name] : array(data[name]), array(data[`${name}_drop`]));
    this.allocated = envelope("allocated");
    this.active = envelope("active");
    this.reserved = envelope("reserved");
    this.width = 0;
    this.ratio = 1;
    this.area = { top: 0, bottom: 0, height: 0 };
    this.low = this.high = 0;
    this.lastBucket = this.allocated.levels[0].high.length - 1;
    this.time = data.time ? { state: array(data.time.state), us: array(data.time.us) } : null;
    this.phases = { name: array(data.phases.name), first: array(data.phases.first), last: array(data.phases.last), depth: array(data.phases.depth) };
    this.rangeLanes = this.phases.depth.length ? Math.max(...this.phases.depth) + 1 : 0;
    this.training = data.training ? { names: data.training.names, label: array(data.training.label), first: array(data.training.first) } : null;
    this.lanes = this.rangeLanes + (this.training ? 1 : 0);
    this.byTime = false;
    this.view = { from: 0, to: Math.max(1, this.n - 1) };
    this.cursor = null;
    this.drag = null;
    this.reservedPeak = this.reserved.range(0, this.lastBucket).top;
    this.color = lives ? (lives.category ? "category" : "line") : "totals";
    this.detail = "fine";
    this.draw = onFrame(() => timelinePainting.paint.call(this));
    this.build();
  }

  build() {
    const ooms = this.data.ooms.length;
    this.axis = ["events", "time"].map((kind) => {
      const b = button(kind === "time" ? "Time" : "Events", `Let the axis count ${kind}`, () => this.setAxis(kind === "time"));
      b.setAttribute("aria-pressed", kind === "events" ? "true" : "false");
      return b;
    });
    const axis = element("div", { class: "switch", role: "group", "aria-label": "Axis" }, ...this.axis);
    axis.hidden = !this.time;
    this.controls = element("div", { class: "controls", role: "group", "aria-label": "Timeline controls" });
    if (this.lives) this.controls.append(this.choice("Show ", "color", [...(this.lives.category ? [["category", "blocks by category"]] : []), ["line", "blocks by line"], ["size", "blocks by size"], ["lifetime", "blocks by age"], ["segments", "segments, used and cached"], ["totals", "totals"]]),
      this.choice("Detail ", "detail", [["groups", "groups"], ["coarse", "large"], ["fine", "most"], ["finest", "every pixel"]]));
    this.controls.append(
      button("Zoom in", "Zoom in (+)", () => this.zoom(0.5)), button("Zoom out", "Zoom out (-)", () => this.zoom(2)),
      button("Whole trace", "Show the whole trace (0)", () => this.show(0, this.n - 1)));
    this.controls.append(element("span", { class: "gap" }), axis);
    this.key = element("ul", { class: "chartkey" });
    this.legend();
    this.canvas = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": "chart",
      "aria-label": `Memory over ${plural(this.data.n_events, "event")}. Peak allocated ${formatSize(this.valueAt("allocated", this.data.peak_state))}, peak reserved ${formatSize(this.reservedPeak)}. Arrow keys move the cursor, plus and minus zoom, 0 shows the whole trace, P goes to the peak, comma and full stop step by one event. The table below has the main moments.` });
    this.overview = element("canvas", { "aria-hidden": "true" });
    this.readout = element("dl", { class: "readout", "aria-live": "polite" });
    this.root.replaceChildren(this.key, this.controls, this.canvas, this.overview, this.readout);
    this.listen();
    this.describe(null);
    new ResizeObserver(this.draw).observe(this.canvas.parentElement);
  }

  // Choices that the page's address keeps: the name of each field and its values.
  choice(label, field, options) {
    const select = element("select", null, ...options.map(([value, word]) => element("option", { value }, word)));
    select.dataset.field = field;
    select.value = this[field];
    select.addEventListener("change", () => this.choose(field, select.value));
    return element("label", null, label, select);
  }

  choose(field, value) {
    const select = this.controls.querySelector(`select[data-field=${field}]`);
    if (!select || ![...select.options].some((o) => o.value === value)) return;
    select.value = value;
    this[field] = value;
    this.legend();
    this.draw();
    this.onView();
  }

  showTwin(twin) {
    this.twin = twin;
    this.legend();
  }

  legend() {
    const ooms = this.data.ooms.length, key = [];
    this.coloring = null;
    if (this.color === "totals") key.push(["k-live", "allocated"], ["k-pending", "freed, waits for a stream"]);
    else {
      const isSegments = this.color === "segments";
      if (isSegments && !this.segmentBands) this.segmentBands = new SegmentBands(this.lives);
      this.bands = isSegments ? this.segmentBands : this.blockBands;
      this.coloring = isSegments ? segmentColoring : new Coloring(this.lives, this.color, this.data.peak_state);
      const there = new Set(this.coloring.group);
      this.coloring.colors().forEach((color, i) => { if (there.has(i)) key.push([null, this.coloring.names[i], color]); });
      if (this.detail !== "groups" && !isSegments) key.push(["k-thin", "faint: blocks too thin to draw one by one"]);
    }
    if (this.coloring && !this.lives.isComplete) key.push(["k-live", `${plural(this.lives.data.n_left_out, "smaller block")} not in this file`]);
    key.push(["k-reserved", "reserved"]);
    if (this.twin) key.push(["k-twin", `allocated in ${this.twin.name}, by ${this.twin.bySteps ? "step" : "event"}`]);
    if (this.capacity) key.push(["k-capacity", "capacity"]);
    if (ooms) key.push(["k-oom", plural(this.data.n_ooms, "OOM")]);
    const { retries, others } = this.data.n_flushes;
    if (retries) key.push(["k-retry", plural(retries, "retry after a flush", "retries after a flush")]);
    if (others) key.push(["k-flush", plural(others, "other flush", "other flushes")]);
    if (this.training) {
      const there = new Set(this.training.label);
      this.training.names.forEach((name, i) => { if (there.has(i)) key.push([`k-${name}`, name]); });
    }
    this.key.replaceChildren(...key.map(([k, word, color]) => {
      const swatch = element("i", k ? { class: k } : null);
      if (color) swatch.style.background = color;
      return element("li", null, swatch, word);
    }));
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (e) => this.pointerMove(e));
    canvas.addEventListener("pointerleave", () => { if (!this.drag) { this.cursor = this.moment; this.pointed = null; this.describe(this.moment === null ? null : this.bucketOf(this.moment)); this.onHover(null, null); this.draw(); } });
    canvas.addEventListener("pointerdown", (e) => {
      if (e.button !== 0) return;
      this.drag = { from: e.offsetX, to: e.offsetX };
      canvas.setPointerCapture(e.pointerId);
    });
    canvas.addEventListener("pointerup", () => this.endDrag());
    canvas.addEventListener("pointercancel", () => { this.drag = null; this.draw(); });
    canvas.addEventListener("dblclick", () => this.show(0, this.n - 1));
    canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    canvas.addEventListener("keydown", (e) => this.key_(e));
    let grab = null;
    const pick = (e) => {
      const at = Math.min(1, Math.max(0, (e.offsetX - LEFT) / (this.width - LEFT - RIGHT))) * (this.n - 1);
      if (grab === null) grab = at > this.view.from && at < this.view.to ? at - this.view.from : (this.view.to - this.view.from) / 2;
      this.show(at - grab, at - grab + this.view.to - this.view.from);
    };
    this.overview.addEventListener("pointerdown", (e) => { grab = null; this.overview.setPointerCapture(e.pointerId); pick(e); });
    this.overview.addEventListener("pointermove", (e) => { if (grab !== null) pick(e); });
    this.overview.addEventListener("pointerup", () => { grab = null; });
  }

  // --- positions ----------------------------------------------------------------------------

  timeOf(state) {
    const { state: at, us } = this.time;
    const i = upperBound(at, state);
    if (i <= 0) return us[0];
    if (i >= at.length) return us[us.length - 1];
    return us[i - 1] + ((us[i] - us[i - 1]) * (state - at[i - 1])) / (at[i] - at[i - 1]);
  }

  stateOf(time) {
    const { state: at, us } = this.time;
    const i = upperBound(us, time);
    if (i <= 0) return at[0];
    if (i >= us.length) return at[at.length - 1];
    return at[i - 1] + ((at[i] - at[i - 1]) * (time - us[i - 1])) / Math.max(1e-9, us[i] - us[i - 1]);
  }

  stateAtX(x, view = this.view) {
    const share = (x - LEFT) / (this.width - LEFT - RIGHT);
    if (!this.byTime) return view.from + share * (view.to - view.from);
    const t0 = this.timeOf(view.from), t1 = this.timeOf(view.to);
    return this.stateOf(t0 + share * (t1 - t0));
  }

  xOf(state, view = this.view) {
    let share = (state - view.from) / (view.to - view.from);
    if (this.byTime) {
      const t0 = this.timeOf(view.from), t1 = this.timeOf(view.to);
      share = (this.timeOf(state) - t0) / Math.max(1e-9, t1 - t0);
    }
    return LEFT + share * (this.width - LEFT - RIGHT);
  }

  // The training pass that a state is in; state k is the state after k events.
  passAt(state) { return Math.max(0, Math.min(this.training.label.length - 1, upperBound(this.training.first, Math.max(0, state - 1)) - 1)); }

  bucketOf(state) { return Math.max(0, Math.min(this.lastBucket, Math.floor(state / this.bucket))); }

  valueAt(name, state) { return this[name].levels[0].high[this.bucketOf(state)]; }

  // The buckets drawn in the pixel that starts at x.
  bucketsAt(x, view = this.view) {
    const first = this.bucketOf(this.stateAtX(x, view) + 0.5), next = this.bucketOf(this.stateAtX(x + 1, view) + 0.5);
    return [first, Math.max(first, next - 1)];
  }

  // --- moving -------------------------------------------------------------------------------

  show(from, to) {
    const whole = this.n - 1;
    const least = Math.min(whole, 16 * this.bucket);
    const span = Math.max(least, Math.min(whole, to - from));
    const middle = (from + to) / 2;
    let start = Math.max(0, Math.min(whole - span, to - from === span ? from : middle - span / 2));
    this.view = { from: start, to: start + Math.max(span, 1e-9) };
    this.draw();
    this.onView();
  }

  zoom(factor, about) {
    const center = about ?? this.cursor ?? (this.view.from + this.view.to) / 2;
    this.show(center - (center - this.view.from) * factor, center + (this.view.to - center) * factor);
  }

  goTo(state) {
    const span = Math.min((this.n - 1) / 20, this.view.to - this.view.from);
    this.show(state - span / 2, state + span / 2);
    this.setCursor(state);
  }

  /** The first mark after the moment; after the last mark, the first of all. */
  nextOf(states) {
    if (states.length) this.goTo(states.find((s) => s > (this.moment ?? -1)) ?? states[0]);
  }

  /** The two states, at most a fiftieth of the trace apart, with the largest increase. */
  steepestRise() {
    const { high } = this.allocated.levels[0], width = Math.max(16, Math.floor(high.length / 50));
    const lowest = new Int32Array(high.length); // states of rising values: the first is the lowest
    let first = 0, last = 0, best = [0, 0];
    for (let k = 0; k < high.length; k++) {
      while (last > first && high[lowest[last - 1]] >= high[k]) last--;
      lowest[last++] = k;
      while (lowest[first] < k - width) first++;
      if (high[k] - high[lowest[first]] > high[best[1]] - high[best[0]]) best = [lowest[first], k];
    }
    return best.map((k) => k * this.bucket);
  }

  /** The state with the most allocated memory after ``first`` and up to ``last``. */
  highestAfter(first, last) { return this.allocated.highestIn(this.bucketOf(first + 1), this.bucketOf(last)) * this.bucket; }

  nextOom() { this.nextOf(this.data.ooms.map((o) => o[0])); }

  setAxis(byTime) {
    this.byTime = byTime;
    this.axis.forEach((b, i) => b.setAttribute("aria-pressed", String(Boolean(i) === byTime)));
    this.draw();
    this.onView();
  }

  // The range of bytes that the chart shows; null means all.
  stretch(factor, about) {
    const top = this.top(), { low, high } = this.heights || { low: 0, high: top };
    const from = about - (about - low) * factor, to = about + (high - about) * factor;
    this.heights = to - from >= top ? null : { low: Math.max(0, from), high: Math.min(top, Math.max(to, from + 4096)) };
    this.draw();
    this.onView();
  }

  top() {
    const showsCapacity = this.capacity && this.capacity <= 2.5 * this.reservedPeak;
    return Math.max(this.reservedPeak, this.twin ? this.twin.peak : 0, showsCapacity ? this.capacity : 0, 1) * 1.06;
  }

  wheel(e) {
    if (e.shiftKey) {
      e.preventDefault();
      this.stretch(Math.exp(Math.max(-1, Math.min(1, (e.deltaY || e.deltaX) / 300))), this.bytesAtY(e.offsetY));
      return;
    }
    const isWhole = this.view.to - this.view.from >= this.n - 1;
    if (e.ctrlKey || e.metaKey) e.preventDefault();
    else if (isPageScrolling() || (isWhole && e.deltaY > 0)) return;
    e.preventDefault();
    if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      const move = (e.deltaX / this.width) * (this.view.to - this.view.from);
      this.show(this.view.from + move, this.view.to + move);
    } else this.zoom(Math.exp(Math.max(-1, Math.min(1, e.deltaY / 300))), this.stateAtX(e.offsetX));
  }

  pointerMove(e) {
    if (this.drag) this.drag.to = e.offsetX;
    this.setCursorAtX(e.offsetX, e.offsetY);
  }

  endDrag() {
    const drag = this.drag;
    this.drag = null;
    if (drag && Math.abs(drag.to - drag.from) > 5) {
      const a = this.stateAtX(Math.min(drag.from, drag.to)), b = this.stateAtX(Math.max(drag.from, drag.to));
      this.show(Math.max(0, a), Math.min(this.n - 1, b));
    } else if (drag && this.cursor !== null) this.onMoment(this.cursor, this.pointed);
    this.draw();
  }

  key_(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const middle = this.heights ? (this.heights.low + this.heights.high) / 2 : this.top() / 4;
    const step = (e.shiftKey ? 20 : 1) * Math.max(1, (this.view.to - this.view.from) / this.width);
    const here = this.cursor ?? (this.view.from + this.view.to) / 2, span = this.view.to - this.view.from;
    const moves = {
      ArrowRight: () => this.setCursor(here + step), ArrowLeft: () => this.setCursor(here - step),
      Home: () => this.setCursor(0), End: () => this.setCursor(this.n - 1),
      PageDown: () => this.show(this.view.from + span, this.view.to + span), PageUp: () => this.show(this.view.from - span, this.view.to - span),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.show(0, this.n - 1),
      p: () => this.goTo(this.data.peak_state), P: () => this.goTo(this.data.peak_state), o: () => this.data.ooms.length && this.nextOom(),
      O: () => this.data.ooms.length && this.nextOom(), Escape: () => this.show(0, this.n - 1),
      "]": () => this.stretch(0.5, middle), "[": () => this.stretch(2, middle),
    };
    if (!moves[e.key]) return;
    e.preventDefault();
    moves[e.key]();
  }

  bytesAtY(y) { return this.low + ((this.area.bottom - y) / this.area.height) * (this.high - this.low); }

  // The cursor goes to the highest point of the pixel, which is the one that is drawn.
  setCursorAtX(x, y) {
    if (x < LEFT || x > this.width - RIGHT) return;
    const [first, last] = this.bucketsAt(x);
    const at = this.allocated.highestIn(first, last);
    this.cursor = Math.min(this.n - 1, this.bucket === 1 ? at : Math.max(at * this.bucket, Math.round(this.stateAtX(x))));
    this.pointed = null;
    if (this.coloring && this.bands.states && y !== undefined) {
      const c = Math.max(0, Math.min(this.bands.states.length - 1, Math.floor((x - LEFT) * this.ratio)));
      this.cursor = this.bands.states[c];
      this.pointed = this.bands.at(c, this.bytesAtY(y));
    }
    this.describe(this.bucketOf(this.cursor));
    this.onHover(this.cursor, this.pointed);
    this.draw();
  }

  // Moves the moment that the whole page shows.
  setCursor(state) {
    this.cursor = Math.max(0, Math.min(this.n - 1, Math.round(state)));
    this.pointed = null;
    this.bringIntoView(this.cursor);
    this.describe(this.bucketOf(this.cursor));
    this.draw();
    this.onMoment(this.cursor, null);
  }

  bringIntoView(state) {
    const span = this.view.to - this.view.from;
    if (state < this.view.from || state > this.view.to) this.show(state - span / 2, state + span / 2);
  }

  describe(bucket) {
    if (bucket === null) {
      this.readout.replaceChildren(element("div", { class: "wide" }, element("dt", null, "Point at the chart to read it. Click to stop time there: segments, events and holders follow. Drag, turn the wheel or press + to zoom, with Shift or [ ] in height; arrow keys move, double click shows all.")));
      return;
    }
    const first = bucket * this.bucket, last = Math.min(this.n - 1, first + this.bucket - 1);
    const value = (name) => this[name].levels[0].high[bucket];
    const pairs = [[this.bucket === 1 ? "After event" : "Events", this.bucket === 1 ? formatCount(first) : `${formatCount(first)}–${formatCount(last)}`]];
    if (this.time) pairs.push(["Time", `${this.time.state.length < this.n ? "≈ " : ""}${formatTime(this.timeOf(first))}`]);
    const upTo = this.bucket === 1 ? "" : ", at most";
    pairs.push([`Allocated${upTo}`, formatSize(value("allocated"))], [`Active${upTo}`, formatSize(value("active"))], [`Reserved${upTo}`, formatSize(value("reserved"))]);
    if (this.bucket === 1) pairs.push(["Cached", formatSize(value("reserved") - value("active"))]);
    const said = this.eventText(first);
    if (said) pairs.push(["Event", said, "wide"]);
    this.readout.replaceChildren(...definitions(pairs));
  }

  eventText(state) {
    const parts = [], known = this.lives ? this.lives.eventAt(state) : null;
    if (known) parts.push(`${ACTIONS[known.kind]} ${formatSize(known.size)}${known.line >= 0 ? `  ${this.lives.lineFull(known.line)}` : ""}`);
    const oom = this.data.ooms.find((o) => o[0] === state);
    if (oom) parts.push(`out of memory: ${formatSize(oom[1])} requested${oom[2] === null ? "" : `, ${formatSize(oom[2])} free at the driver`}`);
    let inner = null;
    for (let i = 0; i < this.phases.first.length; i++) {
      if (this.phases.first[i] <= state && state < this.phases.last[i] && (inner === null || this.phases.depth[i] > this.phases.depth[inner])) inner = i;
    }
    if (this.training) parts.push(this.training.names[this.training.label[this.passAt(state)]]);
    if (inner !== null) parts.push(`in ${this.text.strings[this.phases.name[inner]]}`);
    return parts.join(" · ");
  }
}
