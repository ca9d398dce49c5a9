// A drawing context that writes what the graphics would draw on a canvas as an SVG of shapes and
// text. Text becomes text nodes; blocks that are painted as pixels become one picture.

const VECTOR_STATE = ["fillStyle", "strokeStyle", "globalAlpha", "lineWidth", "lineJoin", "font", "textAlign", "dash", "clipId"];

class VectorContext {
  constructor(width, height) {
    this.svg = this.shape("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
    this.fillStyle = this.strokeStyle = "#000";
    this.globalAlpha = this.lineWidth = 1;
    this.lineJoin = "miter";
    this.textAlign = "left";
    this.font = `12px ${theme.font}`;
    this.dash = "";
    this.clipId = "";
    this.nClips = 0;
    this.path = "";
    this.kept = [];
    this.measure = element("canvas").getContext("2d");
    this.imageSmoothingEnabled = true;
    this.fillRect(0, 0, width, height, theme.colors.paper);
  }

  shape(tag, attributes) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) if (value !== "" && name !== "xmlns") node.setAttribute(name, String(value));
    return node;
  }

  put(tag, attributes) {
    const clip = this.clipId ? `url(#${this.clipId})` : "", opacity = this.globalAlpha < 1 ? this.globalAlpha : "";
    return this.svg.appendChild(this.shape(tag, { ...attributes, "clip-path": clip, opacity }));
  }

  get lines() { return { fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth, "stroke-linejoin": this.lineJoin, "stroke-dasharray": this.dash }; }
  save() { this.kept.push(VECTOR_STATE.map((name) => this[name])); }
  restore() { this.kept.pop().forEach((value, i) => { this[VECTOR_STATE[i]] = value; }); }
  clearRect() { /* nothing was painted yet */ }
  setLineDash(dash) { this.dash = dash.join(" "); }
  beginPath() { this.path = ""; }
  moveTo(x, y) { this.path += `M${shortNumber(x)} ${shortNumber(y)}`; }
  lineTo(x, y) { this.path += `L${shortNumber(x)} ${shortNumber(y)}`; }
  rect(x, y, width, height) { this.path += `M${shortNumber(x)} ${shortNumber(y)}h${shortNumber(width)}v${shortNumber(height)}h${shortNumber(-width)}Z`; }
  // Only whole circles: no other arcs are drawn.
  arc(x, y, r) { this.path += `M${shortNumber(x - r)} ${shortNumber(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`; }
  fill() { this.put("path", { d: this.path, fill: this.fillStyle }); }
  stroke() { this.put("path", { d: this.path, ...this.lines }); }
  fillRect(x, y, width, height, fill = this.fillStyle) { this.put("rect", { ...boxOf(x, y, width, height), fill }); }
  strokeRect(x, y, width, height) { this.put("rect", { ...boxOf(x, y, width, height), ...this.lines }); }

  clip() {
    const id = `clip-${++this.nClips}`, node = this.shape("clipPath", { id });
    node.append(this.shape("path", { d: this.path }));
    this.svg.append(node);
    this.clipId = id;
  }

  measureText(text) {
    this.measure.font = this.font;
    return this.measure.measureText(text);
  }

  fillText(text, x, y) {
    const anchor = { right: "end", center: "middle" }[this.textAlign] || "";
    const [, weight, size, family] = /^(?:(\d+) )?([\d.]+)px (.*)$/.exec(this.font);
    const look = { fill: this.fillStyle, "text-anchor": anchor, "dominant-baseline": "central", "font-weight": weight || "", "font-size": size, "font-family": family };
    const node = this.put("text", { x: shortNumber(x), y: shortNumber(y), ...look });
    node.textContent = text;
  }

  drawImage(canvas, x, y, width, height) {
    const href = canvas.toDataURL("image/png");
    this.put("image", { ...boxOf(x, y, width, height), href, preserveAspectRatio: "none", "image-rendering": this.imageSmoothingEnabled ? "" : "pixelated" });
  }

  /** @returns {Blob} the picture as a file */
  blob() { return new Blob([new XMLSerializer().serializeToString(this.svg)], { type: "image/svg+xml" }); }
}

function shortNumber(value) { return +Number(value).toFixed(2); }

// A rectangle with a negative width or height is still drawn.
function boxOf(x, y, width, height) {
  return { x: shortNumber(Math.min(x, x + width)), y: shortNumber(Math.min(y, y + height)), width: shortNumber(Math.abs(width)), height: shortNumber(Math.abs(height)) };
}
