// The other run of a comparison at the same place: equally far into the same step if both runs
// have steps, else after the same number of events.

class Twin {
  /**
   * @param {string} name the page's name for the other run
   * @param {any} data of the other run
   * @param {any} decoded the page's blob
   * @param {Lives | null} lives of this run
   */
  constructor(name, data, decoded, lives) {
    const { array, text } = decoded;
    this.name = name;
    this.lives = data.lives ? new Lives(data.lives, array, text) : null;
    this.n = data.timeline.n_events;
    this.bucket = data.timeline.bucket;
    this.allocated = data.timeline.allocated ? new Envelope(array(data.timeline.allocated), array(data.timeline.allocated_drop)) : new Envelope(this.lives.curves().allocated, null);
    this.last = this.allocated.levels[0].high.length - 1;
    this.peak = this.allocated.range(0, this.last).top;
    // Corresponding states of both runs.
    this.here = [0];
    this.there = [0];
    const own = lives ? lives.steps : [], others = this.lives ? this.lives.steps : [];
    for (let k = 0; k < Math.min(own.length, others.length); k++) {
      if (own[k] <= this.here[this.here.length - 1] || others[k] <= this.there[this.there.length - 1]) continue;
      this.here.push(own[k]);
      this.there.push(others[k]);
    }
    this.bySteps = this.here.length > 1;
  }

  /** @returns {number | null} the other run's state for a state of this run; null after its end */
  stateAt(state) {
    const { here, there } = this, i = Math.max(1, upperBound(here, state));
    const rate = i < here.length ? (there[i] - there[i - 1]) / (here[i] - here[i - 1]) : 1;
    const found = there[i - 1] + (state - here[i - 1]) * rate;
    return found <= this.n ? Math.max(0, found) : null;
  }

  bucketOf(state) { return Math.max(0, Math.min(this.last, Math.floor(state / this.bucket))); }

  /** @returns {{top: number, bottom: number} | null} its allocated range between two states of this run */
  between(from, to) {
    const low = this.stateAt(from), high = this.stateAt(to);
    return low === null ? null : this.allocated.range(this.bucketOf(low), this.bucketOf(high === null ? this.n : high));
  }

  allocatedAt(state) {
    const there = this.stateAt(state);
    return there === null ? null : this.allocated.levels[0].high[this.bucketOf(there)];
  }

  // Bytes by the frame of the user's line; both runs share the frame ids of the text tables.
  heldByFrame(state) {
    const there = this.lives ? this.stateAt(state) : null;
    if (there === null) return null;
    const held = this.lives.holdersAt(Math.floor(there), Infinity);
    return new Map(held.map(({ line, bytes }) => [this.lives.lineFrame[line], bytes]));
  }
}
