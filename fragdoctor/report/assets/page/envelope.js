// Highest and lowest values at coarser and coarser steps, so that a pixel needs only a few entries.
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

  // Covers buckets first..last inclusive: coarse entries inside, fine ones at the edges.
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

  // The position of the highest value of first..last; stretches that are all lower are skipped.
  highestIn(first, last) {
    const { levels } = this, { high } = levels[0], { top } = this.range(first, last);
    for (let i = first; i < last;) {
      let level = 0, n = 1;
      while (level + 1 < levels.length && i % (4 * n) === 0 && i + 4 * n <= last && levels[level + 1].high[i / (4 * n)] < top) { level++; n *= 4; }
      if (level === 0 && high[i] === top) return i;
      i += n;
    }
    return last;
  }
}

// The number of values in an ascending array that are not above a given value.
function upperBound(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}
