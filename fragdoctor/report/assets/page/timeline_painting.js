// How the timeline is drawn; timeline.js says where everything is.

const timelinePainting = {

  // Everything that does not follow the pointer is painted once and kept.
  paint() {
    this.width = this.root.clientWidth;
    if (this.width < 80) return;
    this.ratio = Math.min(window.devicePixelRatio || 1, 3);
    const lanes = this.lanes * LANE, height = (this.width < 600 ? 240 : this.width < 1100 ? 340 : 420) + lanes;
    const area = this.area = { top: TOP + lanes + 12, bottom: height - BOTTOM, height: height - BOTTOM - TOP - lanes - 12 };
    const { low, high } = this.heights || { low: 0, high: this.top() };
    this.low = low;
    this.high = high;
    const y = (bytes) => area.bottom - ((bytes - low) / (high - low)) * area.height;
    const key = [this.width, height, this.ratio, this.view.from, this.view.to, this.byTime, this.color, this.detail, low, high, this.selected, theme.colors.paper].join();
    if (key !== this.painted || this.found !== this.paintedFound) {
      this.painted = key;
      this.paintedFound = this.found;
      this.base = this.base || element("canvas");
      this.paintBase(prepare(this.base, this.width, height), area, y);
      this.paintOverview();
    }
    const c = prepare(this.canvas, this.width, height);
    c.drawImage(this.base, 0, 0, this.width, height);
    this.paintCursor(c, area, y);
  },

  /** @returns {Blob} the visible part, as an SVG */
  svg() {
    const c = new VectorContext(this.width, this.area.bottom + BOTTOM);
    const y = (bytes) => this.area.bottom - ((bytes - this.low) / (this.high - this.low)) * this.area.height;
    this.paintBase(c, this.area, y);
    this.paintCursor(c, this.area, y);
    return c.blob();
  },

  paintBase(c, area, y) {
    this.paintGrid(c, area, y);
    c.save();
    c.beginPath();
    c.rect(LEFT, this.heights ? area.top : 0, this.width - RIGHT - LEFT, area.bottom - (this.heights ? area.top : 0));
    c.clip();
    this.paintCurves(c, area.bottom, y, this.view, LEFT, this.width - RIGHT, Boolean(this.coloring && this.lives.isComplete));
    if (this.coloring) {
      this.paintBands(c, area);
      if (this.lives.isComplete) this.strokeReserved(c);
    }
    if (this.twin) this.paintTwin(c, y);
    c.restore();
    const showsCapacity = this.capacity && this.capacity <= this.high && this.capacity >= this.low;
    this.paintCapacity(c, y, showsCapacity);
    this.paintPhases(c, area);
    this.paintTraining(c);
    this.paintMarks(c, area, y);
  },

  // One column of blocks for each pixel of the screen, painted as pixels: a million events take
  // as long as a thousand paths would.
  paintBands(c, area) {
    const left = LEFT, right = this.width - RIGHT, width = Math.round((right - left) * this.ratio), height = Math.round(area.height * this.ratio);
    const states = () => {
      const found = new Int32Array(width);
      let next = this.bucketOf(this.stateAtX(left) + 0.5);
      for (let i = 0; i < width; i++) {
        const first = next;
        next = Math.max(first, this.bucketOf(this.stateAtX(left + (i + 1) / this.ratio) + 0.5));
        const at = this.allocated.highestIn(first, Math.max(first, next - 1));
        found[i] = this.bucket === 1 ? at : Math.min(this.n - 1, at * this.bucket);
      }
      return found;
    };
    const perPixel = (this.high - this.low) / height, least = DETAIL[this.detail] * perPixel;
    // A search or a selected block changes how blocks look, not where they are.
    const laid = [left, right, this.ratio, this.view.from, this.view.to, this.byTime, least].join();
    if (laid !== this.laid || this.bands.coloring !== this.coloring) this.bands.lay(states(), least, this.coloring);
    this.laid = laid;
    const image = new ImageData(width, height);
    this.bands.paint(image, perPixel, { found: this.found, selected: this.selected, floor: this.low });
    const sheet = this.sheet = this.sheet || element("canvas");
    sheet.width = width;
    sheet.height = height;
    sheet.getContext("2d").putImageData(image, 0, 0);
    c.imageSmoothingEnabled = false;
    c.drawImage(sheet, left, area.top, right - left, area.height);
  },

  paintGrid(c, area, y) {
    const { line, soft } = theme.colors;
    c.lineWidth = 1;
    c.textAlign = "right";
    for (const tick of sizeTicks(this.high, ((area.height / 56) * this.high) / (this.high - this.low)).filter((t) => t >= this.low)) {
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
      const times = countTicks(t0, t1, count), step = times.length > 1 ? times[1] - times[0] : t1 - t0;
      ticks = times.map((t) => [LEFT + ((t - t0) / Math.max(1e-9, t1 - t0)) * (this.width - LEFT - RIGHT), tickTime(t, step)]);
    }
    c.textAlign = "center";
    for (const [x, label] of ticks) {
      if (x < LEFT - 1 || x > this.width - RIGHT + 1) continue;
      c.fillStyle = soft;
      c.fillText(label, Math.max(LEFT + 4, Math.min(this.width - RIGHT - 18, x)), area.bottom + 15);
      c.fillRect(Math.round(x), area.bottom, 1, 4);
    }
  },

  paintCurves(c, bottom, y, view, left, right, hasBands) {
    const { live, pending, free } = theme.colors;
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
      line.push([x, y(r.bottom), y(r.top)]);
      if (hasBands) continue;
      c.fillStyle = live;
      c.globalAlpha = 0.65;
      c.fillRect(x, y(a.top), 1, y(a.bottom) - y(a.top));
      c.globalAlpha = 1;
      c.fillRect(x, y(a.bottom), 1, bottom - y(a.bottom));
    }
    this.reservedLine = line;
    if (!hasBands) this.strokeReserved(c);
  },

  strokeReserved(c) {
    c.strokeStyle = theme.colors.reserved;
    c.lineWidth = 1.5;
    c.lineJoin = "round";
    c.beginPath();
    let before = null;
    for (const [x, low, high] of this.reservedLine) {
      // First go through the end that is nearer to the previous point, so that both ends are drawn.
      const [near, far] = before !== null && Math.abs(before - low) < Math.abs(before - high) ? [low, high] : [high, low];
      if (before === null) c.moveTo(x, near);
      c.lineTo(x, near);
      if (far !== near) c.lineTo(x + 0.5, far);
      c.lineTo(x + 1, far);
      before = far;
    }
    c.stroke();
  },

  // A line that stands out from the bands beneath it.
  paintTwin(c, y) {
    c.beginPath();
    for (let x = LEFT, isDrawing = false; x < this.width - RIGHT; x++) {
      const range = this.twin.between(this.stateAtX(x), this.stateAtX(x + 1));
      if (!range) break;
      if (isDrawing) c.lineTo(x + 0.5, y(range.top));
      else c.moveTo(x + 0.5, y(range.top));
      c.lineTo(x + 0.5, y(range.bottom));
      isDrawing = true;
    }
    c.lineJoin = "round";
    for (const [color, width] of [[theme.colors.paper, 3.5], [theme.colors.ink, 1.4]]) {
      c.strokeStyle = color;
      c.lineWidth = width;
      c.stroke();
    }
  },

  paintCapacity(c, y, isInside) {
    if (!this.capacity) return;
    const at = isInside ? y(this.capacity) : 0;
    const label = `capacity ${formatSize(this.capacity)}${isInside ? "" : ", above this chart"}`;
    // Use the side with more room next to the marks of the peak and the failures.
    const marks = [this.data.peak_state, ...this.data.ooms.map((oom) => oom[0])].map((state) => this.xOf(state))
      .filter((x) => x >= LEFT && x <= this.width - RIGHT);
    const isLeft = Math.min(...marks) - LEFT > this.width - RIGHT - Math.max(...marks);
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
  },

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
    if (this.rangeLanes) {
      c.fillStyle = soft;
      c.textAlign = "right";
      c.fillText("ranges", LEFT - 8, TOP + LANE / 2 - 1);
    }
    void area;
  },

  // One band per pass; if passes are narrower than a pixel, a band that says so.
  paintTraining(c) {
    if (!this.training) return;
    const { label, first, names } = this.training, { soft, ink, line, phase0, phase1, phase2, phase3 } = theme.colors;
    const colors = [phase0, phase1, phase2, phase3]; // grays: colors stand for what memory is for
    const top = TOP + this.rangeLanes * LANE, left = LEFT, right = this.width - RIGHT;
    c.fillStyle = soft;
    c.textAlign = "right";
    c.fillText("phase", LEFT - 8, top + LANE / 2 - 1);
    c.font = `11px ${theme.font}`;
    c.textAlign = "left";
    const from = this.passAt(this.view.from + 1), to = this.passAt(this.view.to);
    if (to - from > (right - left) / 2) {
      c.fillStyle = line;
      c.fillRect(left, top, right - left, LANE - 3);
      c.fillStyle = soft;
      c.fillText(fitted(c, `${formatCount(to - from + 1)} passes: zoom in to see them`, right - left - 8), left + 5, top + LANE / 2 - 1);
    } else {
      for (let i = from; i <= to; i++) {
        const x0 = Math.max(left, this.xOf(first[i])), x1 = Math.min(right, this.xOf(first[i + 1]));
        if (x1 <= x0) continue;
        c.fillStyle = colors[label[i]];
        c.fillRect(x0, top, Math.max(0.5, x1 - x0 - 0.5), LANE - 3);
        c.fillStyle = ink;
        const name = names[label[i]];
        if (c.measureText(name).width + 8 < x1 - x0) c.fillText(name, x0 + 4, top + LANE / 2 - 1);
      }
    }
    c.font = `12px ${theme.font}`;
  },

  paintMarks(c, area, y) {
    const { bad, pools, ink, paper } = theme.colors;
    const seen = new Set();
    for (const [state, , cause] of this.data.flushes) {
      const x = Math.round(this.xOf(state));
      if (x < LEFT || x > this.width - RIGHT || seen.has(x)) continue;
      seen.add(x);
      c.fillStyle = pools;
      // Below the axis, where there is nothing else.
      if (cause !== "retry") { c.fillRect(x - 1, area.bottom + 1, 2, 8); continue; }
      c.beginPath();
      c.arc(x, area.bottom + 5, 4, 0, 7);
      c.fill();
    }
    for (const [state] of this.data.ooms) {
      const x = Math.round(this.xOf(state));
      if (x < LEFT - 1 || x > this.width - RIGHT + 1) continue;
      c.fillStyle = bad;
      c.fillRect(x - 1.5, area.top - 8, 3, area.bottom - area.top + 8);
      c.beginPath();
      c.moveTo(x - 7, area.top - 11);
      c.lineTo(x + 7, area.top - 11);
      c.lineTo(x, area.top - 1);
      c.fill();
    }
    const last = this.data.ooms[this.data.ooms.length - 1], lastX = last ? Math.round(this.xOf(last[0])) : -1;
    if (last && lastX >= LEFT && lastX <= this.width - RIGHT) {
      const said = `OOM: ${formatSize(last[1])} requested`, width = c.measureText(said).width + 10;
      const left = lastX + width + 4 > this.width - RIGHT ? lastX - width - 3 : lastX + 3;
      c.fillStyle = bad;
      c.fillRect(left, area.top + 2, width, 17);
      c.fillStyle = paper;
      c.textAlign = "left";
      c.fillText(said, left + 5, area.top + 11);
    }
    const peak = this.data.peak_state, x = this.xOf(peak), value = this.valueAt("allocated", peak);
    if (x < LEFT || x > this.width - RIGHT || value < this.low || value > this.high) return;
    c.beginPath();
    c.arc(x, y(value), 3.5, 0, 7);
    c.fillStyle = paper;
    c.fill();
    c.strokeStyle = ink;
    c.lineWidth = 1.5;
    c.stroke();
    const label = `peak ${formatSize(value)}`, width = c.measureText(label).width + 10;
    const isLeft = x + width + 8 > this.width - RIGHT, at = isLeft ? x - width - 7 : x + 7;
    const middle = Math.max(y(value), area.top + (last ? 30 : 18)); // below the label of a failure
    c.fillStyle = paper;
    c.globalAlpha = 0.88;
    c.fillRect(at, middle - 9, width, 18);
    c.globalAlpha = 1;
    c.fillStyle = ink;
    c.textAlign = "left";
    c.fillText(label, at + 5, middle + 0.5);
  },

  paintCursor(c, area, y) {
    const { ink, accent } = theme.colors;
    if (this.drag && Math.abs(this.drag.to - this.drag.from) > 3) {
      c.fillStyle = accent;
      c.globalAlpha = 0.16;
      c.fillRect(Math.min(this.drag.from, this.drag.to), area.top, Math.abs(this.drag.to - this.drag.from), area.height);
      c.globalAlpha = 1;
    }
    for (const [state, name] of [[this.moment, ""], [this.anchor, "M"]]) {
      if (state === null) continue;
      const x = Math.round(this.xOf(state));
      if (x < LEFT - 1 || x > this.width - RIGHT + 1) continue;
      c.fillStyle = accent;
      c.fillRect(x - 0.5, area.top - 10, 2, area.height + 10);
      c.fillRect(x - 4, area.top - 12, 9, name ? 14 : 6);
      c.fillStyle = theme.colors.paper;
      c.textAlign = "center";
      c.fillText(name, x + 0.5, area.top - 5);
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
  },

  paintOverview() {
    const height = 46, c = prepare(this.overview, this.width, height);
    const whole = { from: 0, to: Math.max(1, this.n - 1) }, right = this.width - RIGHT, top = this.top();
    const y = (bytes) => height - 4 - (bytes / top) * (height - 8);
    const wasByTime = this.byTime, line = this.reservedLine, key = [this.width, this.ratio, top, theme.colors.paper].join();
    this.byTime = false;
    if (key !== this.overviewKey) {
      this.overviewKey = key;
      this.overviewBase = this.overviewBase || element("canvas");
      this.paintCurves(prepare(this.overviewBase, this.width, height), height - 4, y, whole, LEFT, right);
      this.reservedLine = line; // the chart's reserved line
    }
    c.drawImage(this.overviewBase, 0, 0, this.width, height);
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
  },
};

Object.assign(Timeline.prototype, timelinePainting);
