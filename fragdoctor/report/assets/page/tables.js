// Lists of the explorer (the events around the moment, and the blocks), and tables that sort.

class EventList {
  // `ooms`: [state, bytes, free at the driver or null, line] of each failed request.
  constructor(root, lives, ooms, go) {
    this.root = root;
    this.lives = lives;
    this.ooms = new Map(ooms.map((o) => [o[0], o]));
    this.go = go;
    this.list = element("ol", { class: "events", tabindex: "0", role: "listbox", "aria-label": "Events around the moment. Arrow keys step through them." });
    this.list.addEventListener("keydown", (e) => {
      const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 100, PageUp: -100, Home: -Infinity, End: Infinity }[e.key];
      if (by === undefined || e.ctrlKey || e.metaKey || e.altKey) return;
      e.preventDefault();
      this.go(Math.max(0, Math.min(lives.n, this.state + by)));
    });
    this.list.addEventListener("click", (e) => {
      const row = e.target instanceof Element ? e.target.closest("li") : null;
      if (row) this.go(Number(row.dataset.state));
    });
    const csv = button("CSV", "Save these events as a table", () => this.save());
    root.replaceChildren(element("div", { class: "controls" },
      button("◀", "One event back (,)", () => this.go(Math.max(0, this.state - 1))), button("▶", "One event on (.)", () => this.go(Math.min(lives.n, this.state + 1))),
      element("span", { class: "gap" }), csv), this.list);
  }

  show(state) {
    this.state = state;
    const n = 21, first = Math.max(1, Math.min(state - 10, this.lives.n - n + 1));
    const rows = [];
    for (let at = first; at <= Math.min(this.lives.n, first + n - 1); at++) {
      const event = this.lives.eventAt(at), oom = this.ooms.get(at);
      if (oom) {
        rows.push(element("li", { role: "option", "aria-selected": String(at === state), "data-state": String(at), class: "oom" },
          element("span", { class: "num" }, formatCount(at)), element("span", null, "OOM"), element("b", null, formatSize(oom[1])), element("span", { class: "where" }, oom[3])));
        continue;
      }
      const sign = event ? { 0: "+", 3: "+", 5: "+", 1: "−", 4: "−", 6: "−" }[event.kind] || "" : "";
      const row = element("li", { role: "option", "aria-selected": String(at === state), "data-state": String(at), class: event ? `e${event.kind}` : "e10" },
        element("span", { class: "num" }, formatCount(at)), element("span", null, event ? ACTIONS[event.kind] : "other event"), element("b", null, event ? `${sign}${formatSize(event.size)}` : ""),
        element("span", { class: "where" }, event && event.line >= 0 ? this.lives.lineName(event.line) : ""));
      rows.push(row);
    }
    this.list.replaceChildren(...rows);
    // On a small screen the list scrolls to the event of the moment, which is its purpose.
    const here = rows[state - first];
    if (here) this.list.scrollTop = here.offsetTop - this.list.offsetTop - this.list.clientHeight / 2;
  }

  save() {
    const rows = [];
    for (let at = Math.max(1, this.state - 500); at <= Math.min(this.lives.n, this.state + 500); at++) {
      const e = this.lives.eventAt(at), oom = this.ooms.get(at);
      if (oom) rows.push([at, "OOM", oom[1], oom[3]]);
      else rows.push([at, e ? ACTIONS[e.kind] : "other event", e ? e.size : "", e && e.line >= 0 ? this.lives.lineFull(e.line) : ""]);
    }
    saveTable(["event", "action", "bytes", "line"], rows, "fragdoctor-events.csv");
  }
}

/** @type {[string, string, (lives: any, row: number) => number, (lives: any, row: number) => string][]} */
const BLOCK_COLUMNS = [
  ["size", "Size", (l, i) => l.size[i], (l, i) => formatSize(l.size[i])],
  ["line", "Allocated at", (l, i) => l.line[i], (l, i) => l.lineFull(l.line[i])],
  ["category", "Category", (l, i) => (l.category ? l.category[i] : 0), (l, i) => (l.category ? CATEGORIES[l.category[i]] : "")],
  ["born", "From event", (l, i) => l.born[i], (l, i) => (l.born[i] ? formatCount(l.born[i]) : "before")],
  ["freed", "To event", (l, i) => l.freed[i], (l, i) => (l.freed[i] > l.n ? "never freed" : formatCount(l.freed[i]))],
  ["lived", "Lived", (l, i) => Math.min(l.freed[i], l.n) - l.born[i], (l, i) => formatCount(Math.min(l.freed[i], l.n) - l.born[i])],
  ["address", "Address", (l, i) => l.address[i], (l, i) => `0x${l.address[i].toString(16)}`],
];

class BlockTable {
  constructor(root, lives, select) {
    this.root = root;
    this.lives = lives;
    this.select = select;
    this.scope = "moment";
    this.sort = "-size";
    this.limit = 10;
    this.found = null;
    this.moment = lives.n;
    this.view = { from: 0, to: lives.n };
    this.onView = () => {};
    this.columns = BLOCK_COLUMNS.filter(([name]) => name !== "category" || lives.category);
    this.scopes = element("select", { "aria-label": "Which blocks" });
    for (const [value, label] of [["moment", "at the moment"], ["view", "in view"], ["all", "of the whole recording"]]) this.scopes.append(element("option", { value }, label));
    this.scopes.addEventListener("change", () => { this.scope = this.scopes.value; this.changed(); });
    this.about = element("span", { class: "from", "aria-live": "polite" });
    this.heads = this.columns.map(([name, title]) => {
      const b = button(title, `Sort by ${title.toLowerCase()}`, () => { this.sort = this.sort === `-${name}` ? name : `-${name}`; this.changed(); });
      return element("th", { scope: "col", "data-column": name, class: ["line", "category"].includes(name) ? "" : "n" }, b);
    });
    this.body = element("tbody");
    this.more = button("Show more", "Show a hundred more blocks", () => { this.limit += 100; this.paint(); });
    root.replaceChildren(element("div", { class: "controls" }, element("label", null, "Blocks ", this.scopes), this.about, element("span", { class: "gap" }), button("CSV", "Save all these blocks as a table", () => this.save())),
      element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Blocks" }, element("table", { class: "blocks" }, element("thead", null, element("tr", null, ...this.heads)), this.body)), this.more);
    this.body.addEventListener("click", (e) => {
      const row = e.target instanceof Element ? e.target.closest("tr") : null;
      if (row) this.select(Number(row.dataset.row));
    });
    this.body.addEventListener("keydown", (e) => {
      if (e.key === "Enter" && e.target instanceof HTMLElement && e.target.dataset.row) this.select(Number(e.target.dataset.row));
    });
    this.paintSoon();
  }

  // Sort only once the moment stops moving.
  paintSoon() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.paint(), 100);
  }

  show(changes) {
    const { moment, view } = this;
    Object.assign(this, changes);
    if (changes.view) this.view = { ...changes.view };
    if (!("found" in changes) && moment === this.moment && view.from === this.view.from && view.to === this.view.to) return;
    this.paintSoon();
  }

  changed() {
    this.paint();
    this.onView();
  }

  restore(parts) {
    if (["moment", "view", "all"].includes(parts.get("scope"))) this.scope = parts.get("scope");
    else this.scope = "moment";
    const sort = parts.get("sort") || "-size";
    this.sort = this.columns.some(([name]) => name === sort.replace("-", "")) ? sort : "-size";
    this.scopes.value = this.scope;
    this.paintSoon();
  }

  rows() {
    const { lives, found } = this, rows = [], { born, freed, count } = lives;
    const [from, to] = this.scope === "moment" ? [this.moment, this.moment] : this.scope === "view" ? [this.view.from, this.view.to] : [0, lives.n];
    for (let i = 0; i < count; i++) if (born[i] <= to && freed[i] > from && (!found || found[i])) rows.push(i);
    return rows;
  }

  // The rows in order, or only the first rows, which are kept while the others are scanned.
  sorted(limit = Infinity) {
    const rows = this.rows(), column = this.columns.find(([name]) => name === this.sort.replace("-", "")), sign = this.sort.startsWith("-") ? -1 : 1;
    const key = (i) => sign * column[2](this.lives, i), byKey = (a, b) => a.key - b.key || a.row - b.row;
    let best = [], worst = Infinity;
    for (const row of rows) {
      const k = key(row);
      if (k >= worst) continue;
      best.push({ key: k, row });
      if (best.length < 4 * limit + 100) continue;
      best = best.sort(byKey).slice(0, limit);
      worst = best[best.length - 1].key;
    }
    return { rows, first: best.sort(byKey).slice(0, limit).map((b) => b.row) };
  }

  paint() {
    const { rows, first } = this.sorted(this.limit), { size } = this.lives;
    let bytes = 0;
    for (const i of rows) bytes += size[i];
    this.about.textContent = `${plural(rows.length, "block")}, ${formatSize(bytes)}`;
    for (const head of this.heads) head.setAttribute("aria-sort", head.dataset.column === this.sort.replace("-", "") ? (this.sort.startsWith("-") ? "descending" : "ascending") : "none");
    this.body.replaceChildren(...first.map((i) => element("tr", { "data-row": String(i), tabindex: "0" },
      ...this.columns.map(([name, title, , text]) => element("td", { class: name === "line" ? "c-path" : name === "category" ? "" : "n", "data-title": title }, text(this.lives, i))))));
    this.more.hidden = rows.length <= this.limit;
  }

  save() {
    const plain = { size: true, born: true, freed: true, lived: true };
    const rows = this.sorted().first.map((i) => this.columns.map(([name, , value, text]) => (plain[name] ? value(this.lives, i) : text(this.lives, i))));
    saveTable(this.columns.map(([name]) => (name === "size" ? "bytes" : name)), rows, "fragdoctor-blocks.csv");
  }
}
