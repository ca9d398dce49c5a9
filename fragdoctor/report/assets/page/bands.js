// Active memory as bands: each allocation is a band over time; small ones are gathered by group.
//
// Each column of pixels shows its moment with the most allocated memory, so that no peak is lost
// and the top of the bands is the true highest value. Blocks thinner than the level of detail go
// to the gathered bands at the bottom, which are for the same moment and are exact.

const DETAIL = { groups: Infinity, coarse: 6, fine: 1.5, finest: 0.5 };
/** @type {[string, number][]} */
const SIZE_CLASSES = [["under 1 MiB", 1], ["1 to 16 MiB", 16], ["16 to 128 MiB", 128], ["128 MiB to 1 GiB", 1024], ["1 GiB and more", Infinity]];
const LIFE_CLASSES = ["from before the recording", "never freed", "a tenth of the recording or more", "1% to 10%", "under 1% of the recording"];
const NAMED_LINES = 14;

// The band color of each block, and the names of the colors.
class Coloring {
  constructor(lives, mode, peakState) {
    this.mode = mode;
    this.lives = lives;
    const n = lives.count;
    this.group = new Uint8Array(n);
    if (mode === "category") {
      this.names = CATEGORIES;
      this.group.set(lives.category);
    } else if (mode === "size") {
      this.names = SIZE_CLASSES.map((c) => c[0]);
      for (let i = 0; i < n; i++) this.group[i] = SIZE_CLASSES.findIndex((c) => lives.size[i] < c[1] * MIB);
    } else if (mode === "lifetime") {
      this.names = LIFE_CLASSES;
      for (let i = 0; i < n; i++) {
        const span = lives.freed[i] - lives.born[i];
        this.group[i] = lives.born[i] === 0 ? 0 : lives.freed[i] > lives.n ? 1 : span >= lives.n / 10 ? 2 : span >= lives.n / 100 ? 3 : 4;
      }
    } else {
      // The lines that hold most at the peak get their own colors.
      const named = lives.holdersAt(peakState, NAMED_LINES).map((h) => h.line);
      this.lines = named;
      const of = new Uint8Array(lives.lineFrame.length).fill(named.length);
      named.forEach((line, i) => { of[line] = i; });
      this.names = [...named.map((l) => lives.lineName(l)), "other lines"];
      for (let i = 0; i < n; i++) this.group[i] = of[lives.line[i]];
    }
  }

  // CSS colors of the theme.
  colors() {
    const dark = isDark();
    if (this.mode === "category") return ["--c-parameters", "--c-gradients", "--c-optimizer", "--c-activations", "--c-inputs", "--c-temporaries", "--c-kept", "--c-unknown"].map(cssColor);
    if (this.mode === "size" || this.mode === "lifetime") return this.names.map((_, i) => cssColor(`--scale${i}`));
    return this.names.map((_, i) => (i === this.names.length - 1 ? cssColor("--c-unknown") : `hsl(${(205 + i * 137.5) % 360} ${dark ? 42 : 48}% ${(dark ? 46 : 52) + (i % 3) * 7}%)`));
  }
}

function cssColor(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// Any CSS color as a pixel of an ImageData, little endian; ``toward`` mixes it with another.
const pixelOf = (() => {
  let context = null;
  const known = new Map();
  return (color, toward = null, share = 0) => {
    const key = `${color}|${toward}|${share}`;
    if (!known.has(key)) {
      if (!context) context = element("canvas", { width: "1", height: "1" }).getContext("2d", { willReadFrequently: true });
      const rgb = (c) => {
        context.clearRect(0, 0, 1, 1);
        context.fillStyle = c;
        context.fillRect(0, 0, 1, 1);
        return context.getImageData(0, 0, 1, 1).data;
      };
      const a = rgb(color), b = toward ? rgb(toward) : a;
      const mix = (i) => Math.round(a[i] * (1 - share) + b[i] * share);
      known.set(key, (255 << 24) | (mix(2) << 16) | (mix(1) << 8) | mix(0));
    }
    return known.get(key);
  };
})();

/**
 * Which columns something covers: from the first at or after a state up to the first at or after another.
 * @param {Int32Array} states of the columns, ascending
 */
function columnFinder(states) {
  const w = states.length, from = states[0], to = states[w - 1];
  const column = new Int32Array(to - from + 2).fill(w);
  for (let c = w - 1; c >= 0; c--) column[states[c] - from] = c;
  for (let k = to - from; k >= 0; k--) if (column[k] === w) column[k] = column[k + 1];
  return (state) => (state <= from ? 0 : state > to ? w : column[state - from]);
}

/** Fill part of a column of an image, whose rows count from the top, between two heights in pixels. */
function columnFiller({ data, width, height }) {
  const pixels = new Uint32Array(data.buffer);
  return (c, bottom, top, color, line, isFirst) => {
    // A band covers at least the row that its top is in.
    let y = Math.max(0, height - Math.round(top)), stop = Math.min(height, height - Math.round(bottom));
    if (y >= stop) return;
    const tall = stop - y;
    // If blocks are hardly higher than a line, lines between them would form their own pattern.
    if (tall >= 6) pixels[y++ * width + c] = line;
    const color2 = isFirst && tall >= 6 ? line : color;
    for (let at = y * width + c; y < stop; y++, at += width) pixels[at] = color2;
  };
}

class Bands {
  constructor(lives) {
    this.lives = lives;
    this.chosen = [];
  }

  /**
   * Sort blocks into columns.
   * @param {Int32Array} states of the columns, ascending
   * @param {number} least the fewest bytes that get their own band
   * @param {Coloring} coloring
   */
  lay(states, least, coloring) {
    const { born, freed, size, count } = this.lives, w = states.length, column = columnFinder(states);
    const groups = coloring.names.length;
    this.gathered = Array.from({ length: groups }, () => new Float64Array(w + 1));
    this.gatheredBlocks = new Float64Array(w + 1);
    const chosen = [], first = [], last = [];
    for (let i = 0; i < count; i++) {
      const a = column(born[i]), b = column(freed[i]);
      if (a >= b) continue;
      if (size[i] >= least) {
        chosen.push(i);
        first.push(a);
        last.push(b);
      } else {
        const sum = this.gathered[coloring.group[i]];
        sum[a] += size[i];
        sum[b] -= size[i];
        this.gatheredBlocks[a]++;
        this.gatheredBlocks[b]--;
      }
    }
    for (const sum of [...this.gathered, this.gatheredBlocks]) for (let c = 1; c <= w; c++) sum[c] += sum[c - 1];
    this.states = states;
    this.least = least;
    this.coloring = coloring;
    this.chosen = chosen;
    this.first = first;
    this.last = last;
  }

  /**
   * Paint into pixels: the image's columns are the columns laid out before.
   * @param {ImageData} image
   * @param {number} bytesPerPixel
   * @param {{found: Uint8Array | null, selected: number, floor: number}} look
   */
  paint(image, bytesPerPixel, look) {
    const { width, height } = image, fill = columnFiller(image);
    const { paper, ink, free } = theme.colors, colors = this.coloring.colors();
    const body = colors.map((c) => pixelOf(c)), edge = colors.map((c) => pixelOf(c, paper, 0.4));
    const thin = colors.map((c) => pixelOf(c, paper, 0.3));
    const faded = pixelOf(free, ink, 0.06), fadedEdge = pixelOf(free, paper, 0.6), marked = pixelOf(ink);
    const { chosen, first, last, gathered, coloring } = this, size = this.lives.size;
    let active = [], next = 0;
    for (let c = 0; c < width; c++) {
      while (next < chosen.length && first[next] <= c) active.push(next++);
      let y = -look.floor / bytesPerPixel, live = 0;
      for (let g = 0; g < gathered.length; g++) {
        const tall = gathered[g][c] / bytesPerPixel;
        if (tall > 0) fill(c, y, y + tall, look.found ? faded : this.least === Infinity ? body[g] : thin[g], look.found ? fadedEdge : edge[g], false);
        y += tall;
      }
      for (let k = 0; k < active.length; k++) {
        const a = active[k];
        if (last[a] <= c) continue;
        active[live++] = a;
        const i = chosen[a], g = coloring.group[i], tall = size[i] / bytesPerPixel;
        if (y < height && y + tall > 0) {
          const hidden = look.found && !look.found[i], chosenOne = i === look.selected;
          fill(c, y, y + tall, chosenOne ? marked : hidden ? faded : body[g], chosenOne ? marked : hidden ? fadedEdge : edge[g], first[a] === c && last[a] - c > 4);
        }
        y += tall;
      }
      active.length = live;
    }
  }

  // What is at a height in bytes in a column: a block, or a group of small blocks.
  at(c, bytes) {
    let y = 0;
    for (let g = 0; g < this.gathered.length; g++) {
      y += this.gathered[g][c];
      if (bytes < y) return { block: -1, group: g, bytes: this.gathered[g][c], least: this.least };
    }
    for (let k = 0; k < this.chosen.length && this.first[k] <= c; k++) {
      if (this.last[k] <= c) continue;
      y += this.lives.size[this.chosen[k]];
      if (bytes < y) return { block: this.chosen[k], group: this.coloring.group[this.chosen[k]] };
    }
    return null;
  }
}
