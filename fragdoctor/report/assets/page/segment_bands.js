// Reserved memory as bands: each segment is a band over time, in use below and cached above.
//
// Pages of expandable segments come and go one by one, so all of a kind share a band that grows and
// shrinks; segments thinner than the level of detail share one too. Heights are exact.

class SegmentBands {
  constructor(lives) {
    this.lives = lives;
    const { born } = lives.segments;
    this.rows = Int32Array.from(born.keys()).sort((a, b) => born[a] - born[b] || a - b);
  }

  /**
   * Sort segments into columns, and sum up what is in use in each.
   * @param {Int32Array} states of the columns, ascending
   * @param {number} least the fewest bytes that get their own band
   * @param {any} coloring
   */
  lay(states, least, coloring) {
    const { born, done, size, page, group, groups } = this.lives.segments, w = states.length, column = columnFinder(states);
    const band = (row, first, last) => ({ row, first, last, size: new Float64Array(last - first + 1), used: new Float64Array(last - first + 1) });
    const thin = band(-1, 0, w), expandable = groups.map(() => null), bandOf = new Array(size.length).fill(null);
    this.bands = [thin];
    const put = (to, values, a, b, bytes) => {
      values[Math.max(0, a - to.first)] += bytes;
      values[Math.min(b, to.last) - to.first] -= bytes;
    };
    for (const row of this.rows) {
      const a = column(born[row]), b = column(done[row]);
      if (a >= b) continue;
      let found = thin;
      if (page[row]) {
        found = expandable[group[row]];
        if (!found) this.bands.push((found = expandable[group[row]] = band(row, 0, w)));
      } else if (size[row] >= least) this.bands.push((found = band(row, a, b)));
      bandOf[row] = found;
      put(found, found.size, a, b, size[row]);
    }
    const { lives } = this, owner = lives.segmentOf();
    for (let i = 0; i < lives.count; i++) {
      const a = column(lives.born[i]), b = column(lives.done[i]), to = a < b && owner[i] >= 0 ? bandOf[owner[i]] : null;
      if (to) put(to, to.used, a, b, lives.size[i]);
    }
    for (const { size: total, used } of this.bands) for (let c = 1; c < total.length; c++) { total[c] += total[c - 1]; used[c] += used[c - 1]; }
    this.bands.sort((a, b) => a.first - b.first || (a.row < 0 ? -1 : 0) - (b.row < 0 ? -1 : 0));
    this.states = states;
    this.least = least;
    this.coloring = coloring;
  }

  /** The bands of a column, from the bottom: each with its height so far. */
  *column(c, bands = this.bands) {
    let y = 0;
    for (const band of bands) {
      if (band.first > c) return;
      if (band.last <= c) continue;
      const size = band.size[c - band.first], used = Math.min(size, band.used[c - band.first]);
      if (size > 0) yield { band, y, size, used };
      y += size;
    }
  }

  /**
   * @param {ImageData} image
   * @param {number} bytesPerPixel
   * @param {{floor: number}} look
   */
  paint(image, bytesPerPixel, look) {
    const fill = columnFiller(image), { paper } = theme.colors;
    const [used, cached] = this.coloring.colors().map((color) => [pixelOf(color), pixelOf(color, paper, 0.6)]);
    let there = [], next = 0;
    for (let c = 0; c < image.width; c++) {
      there = there.filter((band) => band.last > c);
      while (next < this.bands.length && this.bands[next].first <= c) there.push(this.bands[next++]);
      for (const { band, y, size, used: bytes } of this.column(c, there)) {
        const bottom = (y - look.floor) / bytesPerPixel, isFirst = band.first === c && c > 0 && band.last - c > 4;
        fill(c, bottom + bytes / bytesPerPixel, bottom + size / bytesPerPixel, cached[0], cached[1], isFirst);
        fill(c, bottom, bottom + bytes / bytesPerPixel, used[0], bytes === size ? used[1] : used[0], isFirst);
      }
    }
  }

  at(c, bytes) {
    for (const { band, y, size, used } of this.column(c)) {
      if (bytes >= y + size) continue;
      const { page, group, groups } = this.lives.segments, { row } = band;
      const { kind, stream, pool } = row < 0 ? { kind: "", stream: "", pool: null } : groups[group[row]];
      const what = row < 0 ? `segments under ${formatSize(this.least)}` : `${page[row] ? "expandable" : "segment"}, ${kind} blocks, ${stream} stream${pool ? `, private pool ${pool}` : ""}`;
      return { block: -1, said: `${what}: ${formatSize(size)}, ${formatSize(used)} in use, ${formatSize(size - used)} cached` };
    }
    return null;
  }
}

const segmentColoring = { names: ["in use", "cached"], group: [0, 1], colors: () => ["--live", "--cached"].map(cssColor) };
