// The timeline: what each pixel shows is the true highest and lowest value of its events.

const SERIES = ["allocated", "active", "reserved"];
const ACTIONS = ["alloc", "free requested", "free completed", "segment alloc", "segment free", "segment map",
  "segment unmap", "snapshot", "OOM", "annotate", "other"];
const LANE = 16, TOP = 8, BOTTOM = 26, LEFT = 64, RIGHT = 12;

// Highest and lowest values at ever coarser steps, so that a pixel asks for a few entries only.
class Envelope {
  constructor(high, drop) {
    const low = drop ? high.map((v, i) => v - drop[i]) : high;
    this.levels = [{ high, low }];
    while (this.levels[this.levels.length - 1].high.length > 64) {
      this.levels.push(Envelope.coarser(this.levels[this.levels.length - 1]));
    }
  }

  static coarser({ high, low }) {
    const n = Math.ceil(high.length / 4), up = new Float64Array(n), down = new Float64Array(n);
    for (let i = 0; i < n; i++) {
      const end = Math.min(high.length, 4 * i + 4);
      let top = -Infinity, bottom = Infinity;
      for (let j = 4 * i; j < end; j++) {
        if (high[j] > top) top = high[j];
        if (low[j] < bottom) bottom = low[j];
      }
      up[i] = top;
      down[i] = bottom;
    }
    return { high: up, low: down };
  }

  // Over buckets first..last, both included. Whole coarse entries inside, fine ones at the edges.
  range(first, last) {
    let top = -Infinity, bottom = Infinity;
    const look = (level, i) => {
      const { high, low } = this.levels[level];
      if (high[i] > top) top = high[i];
      if (low[i] < bottom) bottom = low[i];
    };
    let level = 0;
    while (first <= last) {
      if (level + 1 >= this.levels.length || last - first < 8) {
        for (let i = first; i <= last; i++) look(level, i);
        break;
      }
      while (first % 4 && first <= last) look(level, first++);
      while (last % 4 !== 3 && last >= first) look(level, last--);
      if (first > last) break;
      first /= 4;
      last = (last - 3) / 4;
      level++;
    }
    return { top, bottom };
  }

  highestIn(first, last) {
    const { high } = this.levels[0];
    let best = first;
    for (let i = first; i <= last; i++) if (high[i] > high[best]) best = i;
    return best;
  }
}

class Timeline {
  constructor(root, data, capacity, array, text) {
    this.root = root;
    this.data = data;
    this.capacity = capacity;
    this.text = text;
    this.n = data.n_events + 1;
    this.bucket = data.bucket;
    for (const name of SERIES) this[name] = new Envelope(array(data[name]), array(data[`${name}_drop`]));
    this.lastBucket = this.allocated.levels[0].high.length - 1;
    this.time = data.time ? { state: array(data.time.state), us: array(data.time.us) } : null;
    this.events = data.events ? { action: array(data.events.action), size: array(data.events.size), line: array(data.events.line) } : null;
    this.phases = { name: array(data.phases.name), first: array(data.phases.first), last: array(data.phases.last), depth: array(data.phases.depth) };
    this.lanes = this.phases.depth.length ? Math.max(...this.phases.depth) + 1 : 0;
    this.byTime = false;
    this.view = { from: 0, to: Math.max(1, this.n - 1) };
    this.cursor = null;
    this.drag = null;
    this.reservedPeak = this.reserved.range(0, this.lastBucket).top;
    this.draw = onFrame(() => this.paint());
    this.build();
  }

  build() {
    const flushes = this.data.flushes.length, ooms = this.data.ooms.length;
    this.axisButton = button(this.time ? "Axis: events" : "Axis: events", "Switch the axis between events and time", () => this.switchAxis());
    this.axisButton.hidden = !this.time;
    this.controls = element("div", { class: "controls", role: "group", "aria-label": "Timeline controls" },
      button("Zoom in", "Zoom in (+)", () => this.zoom(0.5)), button("Zoom out", "Zoom out (-)", () => this.zoom(2)),
      button("Whole trace", "Show the whole trace (0)", () => this.show(0, this.n - 1)),
      button("Peak", "Go to the peak (P)", () => this.goTo(this.data.peak_state)));
    if (ooms) this.controls.append(button("OOM", "Go to the next OOM (O)", () => this.nextOom()));
    this.controls.append(element("span", { class: "gap" }), this.axisButton);
    const key = [["k-live", "allocated"], ["k-pending", "freed, waits for a stream"], ["k-reserved", "reserved"]];
    if (this.capacity) key.push(["k-capacity", "capacity"]);
    if (ooms) key.push(["k-oom", plural(this.data.n_ooms, "OOM")]);
    if (flushes) key.push(["k-flush", plural(this.data.n_flushes, "flush", "flushes")]);
    this.key = element("ul", { class: "chartkey" }, ...key.map(([k, word]) => element("li", null, element("i", { class: k }), word)));
    this.canvas = element("canvas", { tabindex: "0", role: "application", "aria-roledescription": "chart",
      "aria-label": `Memory over ${plural(this.data.n_events, "event")}. Peak allocated ${formatSize(this.valueAt("allocated", this.data.peak_state))}, peak reserved ${formatSize(this.reservedPeak)}. Arrow keys move the cursor, plus and minus zoom, 0 shows the whole trace, P goes to the peak. The table below has the main moments.` });
    this.overview = element("canvas", { "aria-hidden": "true" });
    this.readout = element("dl", { class: "readout", "aria-live": "polite" });
    this.root.replaceChildren(this.key, this.controls, this.canvas, this.overview, this.readout);
    this.listen();
    this.describe(null);
    new ResizeObserver(this.draw).observe(this.canvas.parentElement);
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (e) => this.pointerMove(e));
    canvas.addEventListener("pointerleave", () => { if (!this.drag) { this.cursor = null; this.describe(null); this.draw(); } });
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

  // --- where things are ---------------------------------------------------------------------

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

  bucketOf(state) { return Math.max(0, Math.min(this.lastBucket, Math.floor(state / this.bucket))); }

  valueAt(name, state) { return this[name].levels[0].high[this.bucketOf(state)]; }

  // Buckets drawn in the pixel that starts at x.
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

  nextOom() {
    const ooms = this.data.ooms.map((o) => o[0]);
    this.goTo(ooms.find((s) => s > (this.cursor ?? -1)) ?? ooms[0]);
  }

  switchAxis() {
    this.byTime = !this.byTime;
    this.axisButton.textContent = this.byTime ? "Axis: time" : "Axis: events";
    this.draw();
  }

  wheel(e) {
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
    this.setCursorAtX(e.offsetX);
  }

  endDrag() {
    const drag = this.drag;
    this.drag = null;
    if (drag && Math.abs(drag.to - drag.from) > 5) {
      const a = this.stateAtX(Math.min(drag.from, drag.to)), b = this.stateAtX(Math.max(drag.from, drag.to));
      this.show(Math.max(0, a), Math.min(this.n - 1, b));
    }
    this.draw();
  }

  key_(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const step = (e.shiftKey ? 20 : 1) * Math.max(1, (this.view.to - this.view.from) / this.width);
    const here = this.cursor ?? (this.view.from + this.view.to) / 2, span = this.view.to - this.view.from;
    const moves = {
      ArrowRight: () => this.setCursor(here + step), ArrowLeft: () => this.setCursor(here - step),
      Home: () => this.setCursor(0), End: () => this.setCursor(this.n - 1),
      PageDown: () => this.show(this.view.from + span, this.view.to + span), PageUp: () => this.show(this.view.from - span, this.view.to - span),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.show(0, this.n - 1),
      p: () => this.goTo(this.data.peak_state), P: () => this.goTo(this.data.peak_state), o: () => this.data.ooms.length && this.nextOom(),
      O: () => this.data.ooms.length && this.nextOom(), Escape: () => this.show(0, this.n - 1),
    };
    if (!moves[e.key]) return;
    e.preventDefault();
    moves[e.key]();
  }

  // The cursor goes to the highest point of the pixel: the one that is drawn.
  setCursorAtX(x) {
    if (x < LEFT || x > this.width - RIGHT) return;
    const [first, last] = this.bucketsAt(x);
    const at = last - first > 100000 ? first : this.allocated.highestIn(first, last);
    this.cursor = Math.min(this.n - 1, this.bucket === 1 ? at : Math.max(at * this.bucket, Math.round(this.stateAtX(x))));
    this.describe(at);
    this.draw();
  }

  setCursor(state) {
    this.cursor = Math.max(0, Math.min(this.n - 1, Math.round(state)));
    const span = this.view.to - this.view.from;
    if (this.cursor < this.view.from || this.cursor > this.view.to) this.show(this.cursor - span / 2, this.cursor + span / 2);
    this.describe(this.bucketOf(this.cursor));
    this.draw();
  }

  describe(bucket) {
    if (bucket === null) {
      this.readout.replaceChildren(element("div", { class: "wide" }, element("dt", null, "Point at the chart to read it. Drag, turn the wheel or press + to zoom; arrow keys move, double click shows all.")));
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
    const parts = [];
    if (this.events && state > 0) {
      const i = state - 1, line = this.events.line[i], size = this.events.size[i];
      parts.push(`${ACTIONS[this.events.action[i]] || "other"}${size ? ` ${formatSize(size)}` : ""}${line >= 0 ? `  ${this.text.frame(line).file} ${this.text.frame(line).name}` : ""}`);
    }
    const oom = this.data.ooms.find((o) => o[0] === state);
    if (oom) parts.push(`out of memory: ${formatSize(oom[1])} asked${oom[2] === null ? "" : `, ${formatSize(oom[2])} free at the driver`}`);
    let inner = null;
    for (let i = 0; i < this.phases.first.length; i++) {
      if (this.phases.first[i] <= state && state < this.phases.last[i] && (inner === null || this.phases.depth[i] > this.phases.depth[inner])) inner = i;
    }
    if (inner !== null) parts.push(`in ${this.text.strings[this.phases.name[inner]]}`);
    return parts.join(" · ");
  }

  // --- drawing ------------------------------------------------------------------------------

  paint() {
    this.width = this.root.clientWidth;
    if (this.width < 80) return;
    const lanes = this.lanes * LANE, height = (this.width < 600 ? 240 : 320) + lanes;
    const c = prepare(this.canvas, this.width, height);
    const area = { top: TOP + lanes + 12, bottom: height - BOTTOM, height: height - BOTTOM - TOP - lanes - 12 };
    const showsCapacity = this.capacity && this.capacity <= 2.5 * this.reservedPeak;
    this.yMax = Math.max(this.reservedPeak, showsCapacity ? this.capacity : 0, 1) * 1.06;
    const y = (bytes) => area.bottom - (bytes / this.yMax) * area.height;
    this.paintGrid(c, area, y);
    this.paintCurves(c, area.bottom, y, this.view, LEFT, this.width - RIGHT);
    this.paintCapacity(c, y, showsCapacity);
    this.paintPhases(c, area);
    this.paintMarks(c, area, y);
    this.paintCursor(c, area, y);
    this.paintOverview();
  }

  paintGrid(c, area, y) {
    const { line, soft } = theme.colors;
    c.lineWidth = 1;
    c.textAlign = "right";
    for (const tick of sizeTicks(this.yMax, area.height / 56)) {
      c.strokeStyle = line;
      c.beginPath();
      c.moveTo(LEFT, Math.round(y(tick)) + 0.5);
      c.lineTo(this.width - RIGHT, Math.round(y(tick)) + 0.5);
      c.stroke();
      c.fillStyle = soft;
      c.fillText(tickSize(tick), LEFT - 8, y(tick));
    }
    const count = this.width / 130;
    let ticks = countTicks(this.view.from, this.view.to, count).filter((t) => Number.isInteger(t)).map((t) => [this.xOf(t), formatCount(t)]);
    if (this.byTime) {
      const t0 = this.timeOf(this.view.from), t1 = this.timeOf(this.view.to);
      ticks = countTicks(t0, t1, count).map((t) => [LEFT + ((t - t0) / Math.max(1e-9, t1 - t0)) * (this.width - LEFT - RIGHT), formatTime(t)]);
    }
    c.textAlign = "center";
    for (const [x, label] of ticks) {
      if (x < LEFT - 1 || x > this.width - RIGHT + 1) continue;
      c.fillStyle = soft;
      c.fillText(label, Math.max(LEFT + 4, Math.min(this.width - RIGHT - 18, x)), area.bottom + 15);
      c.fillRect(Math.round(x), area.bottom, 1, 4);
    }
  }

  paintCurves(c, bottom, y, view, left, right) {
    const { live, pending, reserved, free } = theme.colors;
    const line = [];
    for (let x = left; x < right; x++) {
      const [first, last] = this.bucketsAt(x, view);
      const a = this.allocated.range(first, last), b = this.active.range(first, last), r = this.reserved.range(first, last);
      c.fillStyle = free;
      c.fillRect(x, y(r.top), 1, bottom - y(r.top));
      if (b.top > a.top) {
        c.fillStyle = pending;
        c.fillRect(x, y(b.top), 1, y(a.top) - y(b.top));
      }
      c.fillStyle = live;
      c.globalAlpha = 0.65;
      c.fillRect(x, y(a.top), 1, y(a.bottom) - y(a.top));
      c.globalAlpha = 1;
      c.fillRect(x, y(a.bottom), 1, bottom - y(a.bottom));
      line.push([x, y(r.bottom), y(r.top)]);
    }
    c.strokeStyle = reserved;
    c.lineWidth = 1.5;
    c.lineJoin = "round";
    c.beginPath();
    let before = null;
    for (const [x, low, high] of line) {
      // Through the end nearer to where the line comes from first, so that both ends are drawn.
      const [near, far] = before !== null && Math.abs(before - low) < Math.abs(before - high) ? [low, high] : [high, low];
      if (before === null) c.moveTo(x, near);
      c.lineTo(x, near);
      if (far !== near) c.lineTo(x + 0.5, far);
      c.lineTo(x + 1, far);
      before = far;
    }
    c.stroke();
  }

  paintCapacity(c, y, isInside) {
    if (!this.capacity) return;
    const at = isInside ? y(this.capacity) : 0;
    const label = `capacity ${formatSize(this.capacity)}${isInside ? "" : ", above this chart"}`;
    // On the side away from the peak's own label.
    const isLeft = this.xOf(this.data.peak_state) > this.width / 2;
    c.fillStyle = theme.colors.ink;
    c.textAlign = isLeft ? "left" : "right";
    c.fillText(label, isLeft ? LEFT + 6 : this.width - RIGHT - 6, isInside ? Math.max(at - 8, TOP + this.lanes * LANE) : TOP + this.lanes * LANE + 4);
    if (!isInside) return;
    c.strokeStyle = theme.colors.ink;
    c.lineWidth = 1;
    c.setLineDash([5, 4]);
    c.beginPath();
    c.moveTo(LEFT, Math.round(at) + 0.5);
    c.lineTo(this.width - RIGHT, Math.round(at) + 0.5);
    c.stroke();
    c.setLineDash([]);
  }

  paintPhases(c, area) {
    const { panel, soft } = theme.colors, { name, first, last, depth } = this.phases;
    const lastX = new Map();
    for (let i = 0; i < first.length; i++) {
      if (last[i] < this.view.from || first[i] > this.view.to) continue;
      const x0 = Math.max(LEFT, this.xOf(first[i])), x1 = Math.min(this.width - RIGHT, Math.max(this.xOf(last[i]), x0 + 1));
      const pixel = depth[i] * 10000 + Math.round(x0);
      if (x1 - x0 < 2 && lastX.has(pixel)) continue;
      lastX.set(pixel, true);
      const top = TOP + depth[i] * LANE;
      c.fillStyle = panel;
      c.fillRect(x0, top, x1 - x0, LANE - 2);
      c.fillStyle = soft;
      c.fillRect(x0, top, 1, LANE - 2);
      c.fillRect(x0, top + LANE - 3, x1 - x0, 1);
      c.textAlign = "left";
      c.font = `11px ${theme.font}`;
      const label = fitted(c, this.text.strings[name[i]], x1 - x0 - 8);
      if (label) c.fillText(label, x0 + 5, top + LANE / 2 - 1);
    }
    c.font = `12px ${theme.font}`;
    if (this.lanes) {
      c.fillStyle = soft;
      c.textAlign = "right";
      c.fillText("phases", LEFT - 8, TOP + LANE / 2 - 1);
    }
    void area;
  }

  paintMarks(c, area, y) {
    const { bad, pools, ink, paper } = theme.colors;
    const seen = new Set();
    for (const [state, , cause] of this.data.flushes) {
      const x = Math.round(this.xOf(state));
      if (x < LEFT || x > this.width - RIGHT || seen.has(x)) continue;
      seen.add(x);
      c.fillStyle = pools;
      const size = cause === "retry" ? 12 : 8;
      c.fillRect(x - 1, area.bottom - size, 3, size);
    }
    for (const [state] of this.data.ooms) {
      const x = Math.round(this.xOf(state));
      if (x < LEFT - 1 || x > this.width - RIGHT + 1) continue;
      c.fillStyle = bad;
      c.fillRect(x - 0.75, area.top - 8, 1.5, area.bottom - area.top + 8);
      c.beginPath();
      c.moveTo(x - 5, area.top - 11);
      c.lineTo(x + 5, area.top - 11);
      c.lineTo(x, area.top - 3);
      c.fill();
    }
    const peak = this.data.peak_state, x = this.xOf(peak), value = this.valueAt("allocated", peak);
    if (x < LEFT || x > this.width - RIGHT) return;
    c.beginPath();
    c.arc(x, y(value), 3.5, 0, 7);
    c.fillStyle = paper;
    c.fill();
    c.strokeStyle = ink;
    c.lineWidth = 1.5;
    c.stroke();
    const label = `peak ${formatSize(value)}`, width = c.measureText(label).width + 10;
    const isLeft = x + width + 8 > this.width - RIGHT, at = isLeft ? x - width - 7 : x + 7;
    const middle = Math.max(y(value), area.top + 18);
    c.fillStyle = paper;
    c.globalAlpha = 0.88;
    c.fillRect(at, middle - 9, width, 18);
    c.globalAlpha = 1;
    c.fillStyle = ink;
    c.textAlign = "left";
    c.fillText(label, at + 5, middle + 0.5);
  }

  paintCursor(c, area, y) {
    const { ink, accent } = theme.colors;
    if (this.drag && Math.abs(this.drag.to - this.drag.from) > 3) {
      c.fillStyle = accent;
      c.globalAlpha = 0.16;
      c.fillRect(Math.min(this.drag.from, this.drag.to), area.top, Math.abs(this.drag.to - this.drag.from), area.height);
      c.globalAlpha = 1;
    }
    if (this.cursor === null) return;
    const x = this.xOf(this.cursor);
    if (x < LEFT - 1 || x > this.width - RIGHT + 1) return;
    c.fillStyle = ink;
    c.globalAlpha = 0.6;
    c.fillRect(Math.round(x), area.top - 6, 1, area.height + 6);
    c.globalAlpha = 1;
    for (const name of ["allocated", "reserved"]) {
      c.beginPath();
      c.arc(Math.round(x) + 0.5, y(this.valueAt(name, this.cursor)), 2.5, 0, 7);
      c.fill();
    }
  }

  paintOverview() {
    const height = 46, c = prepare(this.overview, this.width, height);
    const whole = { from: 0, to: Math.max(1, this.n - 1) }, right = this.width - RIGHT;
    const y = (bytes) => height - 4 - (bytes / this.yMax) * (height - 8);
    const wasByTime = this.byTime;
    this.byTime = false;
    this.paintCurves(c, height - 4, y, whole, LEFT, right);
    const x0 = this.xOf(this.view.from, whole), x1 = Math.max(this.xOf(this.view.to, whole), x0 + 3);
    for (const [state] of this.data.ooms) {
      c.fillStyle = theme.colors.bad;
      c.fillRect(this.xOf(state, whole) - 1, 2, 2, height - 6);
    }
    this.byTime = wasByTime;
    c.fillStyle = theme.colors.paper;
    c.globalAlpha = 0.66;
    c.fillRect(LEFT, 0, x0 - LEFT, height);
    c.fillRect(x1, 0, right - x1, height);
    c.globalAlpha = 1;
    c.strokeStyle = theme.colors.ink;
    c.lineWidth = 1;
    c.strokeRect(x0 + 0.5, 1.5, x1 - x0 - 1, height - 4);
  }
}

// The number of values not above the one asked for, in an ascending array.
function upperBound(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}
