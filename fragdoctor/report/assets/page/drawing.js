// What the three graphics share: sizes as text, colors of the theme, sharp canvases, elements.

const KIB = 1024, MIB = KIB ** 2, GIB = KIB ** 3, TIB = KIB ** 4;

function formatSize(bytes) {
  const sign = bytes < 0 ? "-" : "", size = Math.abs(bytes);
  if (size < KIB) return `${sign}${Math.trunc(size)} B`;
  for (const [factor, unit] of /** @type {[number, string][]} */ ([[KIB, "KiB"], [MIB, "MiB"], [GIB, "GiB"]])) {
    if (size < 1023.995 * factor) return `${sign}${(size / factor).toFixed(2)} ${unit}`;
  }
  return `${sign}${(size / TIB).toFixed(2)} TiB`;
}

function formatCount(n) { return Math.round(n).toLocaleString("en-US"); }

function formatShare(part, whole) {
  const share = whole > 0 ? (100 * part) / whole : 0;
  return `${share >= 10 || share === 0 ? share.toFixed(0) : share.toFixed(1)}%`;
}

function formatTime(us) {
  const s = us / 1e6;
  if (s >= 600) return `${(s / 60).toFixed(1)} min`;
  if (s >= 1) return `${s.toFixed(s >= 100 ? 1 : 3)} s`;
  return us >= 1000 ? `${(us / 1000).toFixed(2)} ms` : `${us.toFixed(0)} µs`;
}

// Seconds with as many decimals as the steps between the ticks need.
function tickTime(us, step) {
  const decimals = Math.max(0, Math.min(6, Math.ceil(-Math.log10(Math.max(step, 1) / 1e6) - 1e-9)));
  return `${(us / 1e6).toFixed(decimals)} s`;
}

function sumOf(values) {
  let sum = 0;
  for (let i = 0; i < values.length; i++) sum += values[i];
  return sum;
}

function plural(n, one, many) { return `${formatCount(n)} ${n === 1 ? one : many || one + "s"}`; }

// Text from the input goes only through textContent and setAttribute, never through markup.
function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
  for (const child of children) node.append(child);
  return node;
}

function button(label, title, action) {
  const node = element("button", { type: "button", title }, label);
  node.addEventListener("click", action);
  return node;
}

function definitions(pairs) {
  const list = [];
  for (const [term, value, kind] of pairs) {
    list.push(element("div", kind ? { class: kind } : null, element("dt", null, term), element("dd", null, value)));
  }
  return list;
}

const theme = {
  colors: {},
  read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "panel", "ink", "soft", "line", "line-strong", "accent", "live", "pending", "stranded",
      "free", "strander", "releasable", "pools", "outside", "reserved", "good", "bad", "phase0", "phase1", "phase2", "phase3"]) {
      this.colors[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.font = style.getPropertyValue("--sans");
  },
};

// Make a canvas as sharp as the screen; returns its context, scaled to CSS pixels and cleared.
function prepare(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 3);
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.textBaseline = "middle";
  context.font = `12px ${theme.font}`;
  return context;
}

// Text cut to a width with an ellipsis, or "" if not even a few letters fit.
function fitted(context, text, width) {
  if (width < 24) return "";
  if (context.measureText(text).width <= width) return text;
  let low = 0, high = Math.min(text.length, Math.ceil(width / 2));
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
    else high = middle - 1;
  }
  return low >= 3 ? `${text.slice(0, low)}…` : "";
}

function hatch(context, x, y, width, height, color) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = color;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 5) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

// Ticks at round sizes: 1, 2, 5, 10, ... of a binary unit.
function sizeTicks(top, count) {
  const unit = top >= 2 * TIB ? TIB : top >= 2 * GIB ? GIB : top >= 2 * MIB ? MIB : top >= 2 * KIB ? KIB : 1;
  return countTicks(0, top / unit, count).map((t) => t * unit);
}

function countTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const ticks = [];
  for (let t = Math.ceil(low / step) * step; t <= high * (1 + 1e-9); t += step) ticks.push(t);
  return ticks;
}

function tickSize(bytes) {
  if (bytes === 0) return "0";
  const [factor, unit] = bytes >= TIB ? [TIB, "TiB"] : bytes >= GIB ? [GIB, "GiB"] : bytes >= MIB ? [MIB, "MiB"] : bytes >= KIB ? [KIB, "KiB"] : [1, "B"];
  return `${+(bytes / factor).toPrecision(3)} ${unit}`;
}

// Draw one frame, no matter how many events asked for it.
function onFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  };
}

// The wheel zooms the graphic under it, unless it only got there because the page was scrolling.
const pageScroll = { last: 0 };
window.addEventListener("scroll", () => { pageScroll.last = performance.now(); }, { passive: true });
function isPageScrolling() { return performance.now() - pageScroll.last < 300; }

function panelStack(text, stackId) {
  const list = element("ol"), frames = text.stack(stackId).slice(0, 64).map((id) => text.frame(id));
  // The source line that this is about, before the library frames above it.
  const own = frames.findIndex((frame) => !frame.isLibrary);
  if (own > 0) list.append(element("li", { class: "own" }, `${frames[own].file} ${frames[own].name}`));
  for (const frame of frames) {
    list.append(element("li", frame.isLibrary ? { class: "lib" } : null, `${frame.file} ${frame.name}`));
  }
  return list;
}
