// Every block and segment over time. In state k (after k events) a block is allocated iff
// born <= k < freed, and active iff born <= k < done; a segment is there iff born <= k < done.

const CATEGORIES = ["parameters", "gradients", "optimizer state", "activations", "inputs", "temporaries", "kept", "unknown"];
const NO_LINE = -1;

class Lives {
  /**
   * @param {any} data what lives_data.py wrote
   * @param {(where: number[]) => Float64Array | null} array
   * @param {TextTables} text
   */
  constructor(data, array, text) {
    this.data = data;
    this.text = text;
    this.n = data.n_events;
    this.isComplete = data.complete;
    this.born = Int32Array.from(array(data.born));
    this.freed = Int32Array.from(array(data.kept));
    this.done = Int32Array.from(array(data.waited));
    this.size = array(data.size);
    this.slack = array(data.slack);
    this.stack = Int32Array.from(array(data.stack));
    this.address = array(data.address);
    this.category = data.category ? Uint8Array.from(array(data.category)) : null;
    // The names of blocks: for each row a 1-based place in ``paths``, or 0 for none.
    this.names = {};
    for (const [kind, { paths, of }] of Object.entries(data.names)) this.names[kind] = { paths, of: Int32Array.from(array(of)) };
    this.steps = Int32Array.from(array(data.steps));
    this.count = this.size.length;
    for (let i = 0; i < this.count; i++) {
      this.freed[i] += this.born[i];
      this.done[i] += this.freed[i];
    }
    const s = data.segments;
    this.segments = { groups: s.groups, group: array(s.group), address: array(s.address), size: array(s.size), page: array(s.page), born: array(s.born), done: array(s.kept) };
    for (let i = 0; i < this.segments.size.length; i++) this.segments.done[i] += this.segments.born[i];
    this.findLines();
  }

  // The user's line of each block, as a small number: 0 is "no stack recorded".
  findLines() {
    const ofStack = new Map([[-1, 0]]), ofFrame = new Map();
    this.lineFrame = [NO_LINE];
    this.line = new Int32Array(this.count);
    for (let i = 0; i < this.count; i++) {
      const stack = this.stack[i];
      let line = ofStack.get(stack);
      if (line === undefined) {
        const frame = this.text.userFrame(stack);
        line = frame === undefined ? 0 : ofFrame.get(frame);
        if (line === undefined) {
          line = this.lineFrame.push(frame) - 1;
          ofFrame.set(frame, line);
        }
        ofStack.set(stack, line);
      }
      this.line[i] = line;
    }
  }

  lineName(line) { return line === 0 ? "no stack recorded" : this.text.short(this.lineFrame[line]); }

  lineFull(line) {
    if (line === 0) return "no stack recorded";
    const frame = this.text.frame(this.lineFrame[line]);
    return `${frame.file} ${frame.name}`;
  }

  isAllocated(i, state) { return this.born[i] <= state && state < this.freed[i]; }

  allocatedAt(state) {
    const rows = [], { born, freed, count } = this;
    for (let i = 0; i < count; i++) if (born[i] <= state && state < freed[i]) rows.push(i);
    return rows;
  }

  // Allocated bytes in every state, and likewise active and reserved ones.
  curves() {
    const sum = (first, last, size) => {
      const total = new Float64Array(this.n + 3);
      for (let i = 0; i < size.length; i++) {
        total[first[i]] += size[i];
        total[last[i]] -= size[i];
      }
      for (let k = 1; k < total.length; k++) total[k] += total[k - 1];
      return total.subarray(0, this.n + 1);
    };
    return {
      allocated: sum(this.born, this.freed, this.size),
      active: sum(this.born, this.done, this.size),
      reserved: sum(this.segments.born, this.segments.done, this.segments.size),
    };
  }

  // What each event did: [kind, row of the block or of the segment], made once.
  eventTable() {
    if (!this.events) {
      const kind = new Uint8Array(this.n + 2).fill(ACTIONS.length - 1), row = new Int32Array(this.n + 2).fill(-1);
      const put = (state, what, i) => { if (state > 0 && state <= this.n) { kind[state] = what; row[state] = i; } };
      const s = this.segments;
      for (let i = 0; i < s.size.length; i++) {
        put(s.born[i], s.page[i] ? 5 : 3, i);
        put(s.done[i], s.page[i] ? 6 : 4, i);
      }
      for (let i = 0; i < this.count; i++) {
        if (this.done[i] !== this.freed[i]) put(this.done[i], 2, i);
        put(this.freed[i], 1, i);
        put(this.born[i], 0, i);
      }
      this.events = { kind, row };
    }
    return this.events;
  }

  eventAt(state) {
    const { kind, row } = this.eventTable(), i = row[state], what = kind[state];
    if (state < 1 || state > this.n || i < 0) return null;
    const isBlock = what <= 2;
    return { kind: what, block: isBlock ? i : -1, size: isBlock ? this.size[i] - this.slack[i] : this.segments.size[i], line: isBlock ? this.line[i] : -1 };
  }

  // Bytes and blocks of each line among the allocated blocks, largest first.
  holdersAt(state, limit) {
    const bytes = new Float64Array(this.lineFrame.length), blocks = new Int32Array(this.lineFrame.length);
    const { born, freed, line, size, count } = this;
    for (let i = 0; i < count; i++) {
      if (born[i] > state || state >= freed[i]) continue;
      bytes[line[i]] += size[i];
      blocks[line[i]]++;
    }
    return Array.from(bytes.keys()).filter((l) => blocks[l]).sort((a, b) => bytes[b] - bytes[a]).slice(0, limit)
      .map((l) => ({ line: l, bytes: bytes[l], blocks: blocks[l] }));
  }

  // The names and the line of each block as one number, or else its stack.
  keysBy(kind) {
    if (kind === "stack") return this.stack;
    const of = kind === "category" ? this.category : this.names[kind].of, lines = this.lineFrame.length;
    return Float64Array.from(of, (name, i) => name * lines + this.line[i]);
  }

  // The reverse of ``keysBy``: the parts of the name, and the frame of the line or none.
  namesOf(kind, key) {
    const lines = this.lineFrame.length, name = Math.floor(key / lines), frame = this.lineFrame[key % lines];
    const parts = kind === "category" ? [CATEGORIES[name]] : name ? this.names[kind].paths[name - 1] : [];
    return { parts, frame };
  }

  // Bytes and blocks by key, for blocks that pass a test; factor -1 subtracts them.
  sumBy(keys, admits, into = new Map(), factor = 1) {
    for (let i = 0; i < this.count; i++) {
      if (!admits(i)) continue;
      let sum = into.get(keys[i]);
      if (!sum) into.set(keys[i], (sum = { bytes: 0, blocks: 0 }));
      sum.bytes += factor * this.size[i];
      sum.blocks += factor;
    }
    return into;
  }

  // The segments at a state, as the columns that the segment map takes.
  layoutAt(state) {
    const { segments: s, address, size, born, done, freed, stack } = this;
    const there = [];
    for (let i = 0; i < s.size.length; i++) if (s.born[i] <= state && state < s.done[i] && s.size[i] > 0) there.push(i);
    there.sort((a, b) => s.address[a] - s.address[b]);
    const group = [], start = [], total = [], page = [];
    for (const i of there) {
      const last = total.length - 1;
      // Pages of one expandable segment that lie side by side are one segment of the map.
      const joins = last >= 0 && s.page[i] && page[last] === s.page[i] && group[last] === s.group[i] && start[last] + total[last] === s.address[i];
      if (joins) total[last] += s.size[i];
      else { group.push(s.group[i]); start.push(s.address[i]); total.push(s.size[i]); page.push(s.page[i]); }
    }
    const live = [];
    const order = this.byAddress();
    for (let k = 0; k < order.length; k++) {
      const i = order[k];
      if (born[i] <= state && state < done[i]) live.push(i);
    }
    const blocks = { start: [0], size: [], state: [], row: [] };
    const put = (bytes, what, row) => { blocks.size.push(bytes); blocks.state.push(what); blocks.row.push(row); };
    for (let n = 0, k = 0; n < total.length; n++) {
      const end = start[n] + total[n];
      let at = start[n];
      while (k < live.length && address[live[k]] < at) k++;
      for (; k < live.length && address[live[k]] < end; k++) {
        const i = live[k];
        if (address[i] < at) continue; // overlaps its neighbor: the file is inconsistent
        if (address[i] > at) put(address[i] - at, 0, -1);
        const bytes = Math.min(size[i], end - address[i]);
        put(bytes, state < freed[i] ? 1 : 2, i);
        at = address[i] + bytes;
      }
      if (at < end) put(end - at, 0, -1);
      blocks.start.push(blocks.size.length);
    }
    const columns = {
      groups: s.groups, group, start, total, page, blockStart: blocks.start, size: blocks.size, state: blocks.state, row: blocks.row, nEvents: state,
      stack: blocks.row.map((i) => (i < 0 ? -1 : stack[i])), requested: blocks.row.map((i) => (i < 0 ? 0 : size[i] - this.slack[i])),
      allocRow: blocks.row.map((i) => (i < 0 ? -1 : born[i] - 1)),
    };
    columns.stranders = strandersOf(columns);
    return columns;
  }

  // The segment that each block began in, or -1; made once. Those that are there at one moment do not
  // overlap, so the moments are gone through in order.
  segmentOf() {
    if (this.owner) return this.owner;
    const { segments: s, born, address, count } = this, owner = this.owner = new Int32Array(count).fill(-1);
    const inOrder = (states) => Int32Array.from(states.keys()).sort((a, b) => states[a] - states[b]);
    const coming = inOrder(s.born), going = inOrder(s.done), there = [], starts = [];
    let came = 0, gone = 0;
    for (const i of inOrder(born)) {
      for (; came < coming.length && s.born[coming[came]] <= born[i]; came++) {
        const row = coming[came], at = upperBound(starts, s.address[row]);
        there.splice(at, 0, row);
        starts.splice(at, 0, s.address[row]);
      }
      for (; gone < going.length && s.done[going[gone]] <= born[i]; gone++) {
        const at = there.lastIndexOf(going[gone], upperBound(starts, s.address[going[gone]]) - 1);
        if (at < 0) continue;
        there.splice(at, 1);
        starts.splice(at, 1);
      }
      const row = there[upperBound(starts, address[i]) - 1];
      if (row !== undefined && address[i] < s.address[row] + s.size[row]) owner[i] = row;
    }
    return owner;
  }

  byAddress() {
    if (!this.sorted) {
      const address = this.address.subarray(0, this.data.n_regular), n = address.length;
      const low = address.reduce((least, a) => Math.min(least, a), Infinity), high = address.reduce((most, a) => Math.max(most, a), 0);
      if (((high - low) / 512 + 1) * n < Number.MAX_SAFE_INTEGER && address.every((a) => a % 512 === low % 512)) {
        // Address and row in one number: sorting numbers is ten times faster than with a comparator.
        this.sorted = Int32Array.from(address.map((a, i) => ((a - low) / 512) * n + i).sort(), (key) => key % n);
      } else this.sorted = Int32Array.from(address.keys()).sort((a, b) => address[a] - address[b]);
    }
    return this.sorted;
  }

  // Rows whose file, function, size or address matches a query; null if the query is empty.
  search(query) {
    const tests = query.trim().split(/\s+/).filter(Boolean).map((word) => this.testOf(word));
    if (!tests.length) return null;
    const found = new Uint8Array(this.count).fill(1);
    for (const test of tests) for (let i = 0; i < this.count; i++) if (found[i] && !test(i)) found[i] = 0;
    return found;
  }

  testOf(word) {
    const size = /^([<>]=?|=)?(\d+(?:\.\d+)?)([kmgt]?)(i?b)?$/i.exec(word);
    if (size && (size[1] || size[3] || size[4])) {
      const bytes = Number(size[2]) * 1024 ** " kmgt".indexOf((size[3] || " ").toLowerCase());
      const near = Math.max(511, bytes * 0.005);
      const compare = { "<": (v) => v < bytes, "<=": (v) => v <= bytes, ">": (v) => v > bytes, ">=": (v) => v >= bytes }[size[1]] || ((v) => Math.abs(v - bytes) <= near);
      return (i) => compare(this.size[i]);
    }
    if (/^0x[0-9a-f]+$/i.test(word)) {
      const at = Number(word);
      return (i) => this.address[i] <= at && at < this.address[i] + this.size[i];
    }
    // Each stack is tested once, and each row looks up the answer: 0 not tested yet, 1 no, 2 yes.
    const wanted = word.toLowerCase(), frames = new Map(), { stack, category } = this;
    const known = new Uint8Array(2 + stack.reduce((most, s) => Math.max(most, s), -1));
    const fits = CATEGORIES.map((name) => name.startsWith(wanted));
    const names = (frame) => {
      let hit = frames.get(frame);
      if (hit === undefined) {
        const { file, name } = this.text.frame(frame);
        frames.set(frame, (hit = `${file} ${name}`.toLowerCase().includes(wanted)));
      }
      return hit;
    };
    return (i) => {
      const s = stack[i], at = s + 1;
      if (!known[at]) known[at] = (s >= 0 ? this.text.stack(s).some(names) : "no stack recorded".includes(wanted)) ? 2 : 1;
      return known[at] === 2 || (category !== null && fits[category[i]]);
    };
  }
}

// The live blocks that strand free memory: those in a segment, or in a page of an expandable
// segment, that is partly free (analysis/attribution.py). The fifty worst stacks are marked.
function strandersOf(map) {
  const stranders = new Uint8Array(map.size.length), kept = new Map();
  const hold = (b, free) => {
    stranders[b] = 1;
    kept.set(map.stack[b], (kept.get(map.stack[b]) || 0) + free);
  };
  for (let s = 0; s < map.total.length; s++) {
    if (map.groups[map.group[s]].pool) continue;
    const page = map.page[s] || map.total[s], units = Math.ceil(map.total[s] / page);
    const free = new Float64Array(units);
    let at = 0;
    for (let b = map.blockStart[s]; b < map.blockStart[s + 1]; b++) {
      const end = at + map.size[b];
      if (map.state[b] === 0) {
        for (let u = Math.floor(at / page); u * page < end; u++) free[u] += Math.min(end, (u + 1) * page) - Math.max(at, u * page);
      }
      at = end;
    }
    at = 0;
    for (let b = map.blockStart[s]; b < map.blockStart[s + 1]; b++) {
      const end = at + map.size[b];
      if (map.state[b] !== 0) {
        const first = free[Math.floor(at / page)], last = free[Math.ceil(end / page) - 1];
        if (first || last) hold(b, Math.max(first, last));
      }
      at = end;
    }
  }
  const most = new Set([...kept.keys()].sort((a, b) => kept.get(b) - kept.get(a)).slice(0, 50));
  for (let b = 0; b < stranders.length; b++) if (stranders[b] && !most.has(map.stack[b])) stranders[b] = 0;
  return stranders;
}
