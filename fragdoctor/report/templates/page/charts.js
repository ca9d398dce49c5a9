// Pages without a recording: their charts respond to the pointer and to keys.

const SVG = "http://www.w3.org/2000/svg", CHART_WIDTH = 1104, CHART_TOP = 18, CHART_BOTTOM = 306;

class StaticChart {
  constructor(svg, data) {
    this.svg = svg;
    this.data = data;
    this.cursor = document.createElementNS(SVG, "line");
    this.cursor.setAttribute("class", "cursor");
    this.cursor.setAttribute("y1", String(CHART_TOP));
    this.cursor.setAttribute("y2", String(CHART_BOTTOM));
    this.cursor.setAttribute("visibility", "hidden");
    svg.append(this.cursor);
    svg.setAttribute("tabindex", "0");
    this.readout = element("dl", { class: "readout", "aria-live": "polite" });
    svg.closest(".scroll").after(this.readout);
    const places = data.series.flatMap((s) => s.x);
    this.low = Math.min(...places);
    this.high = Math.max(...places);
    this.at = null;
    svg.addEventListener("pointermove", (e) => {
      const box = svg.getBoundingClientRect();
      this.show((((e.clientX - box.left) / box.width) * CHART_WIDTH - data.across[0]) / data.across[1]);
    });
    svg.addEventListener("pointerleave", () => this.show(null));
    svg.addEventListener("keydown", (e) => {
      const step = ((e.shiftKey ? 20 : 1) * (this.high - this.low)) / 400, here = this.at ?? this.low;
      const to = { ArrowRight: here + step, ArrowLeft: here - step, Home: this.low, End: this.high }[e.key];
      if (to === undefined || e.ctrlKey || e.metaKey || e.altKey) return;
      e.preventDefault();
      this.show(to);
    });
    this.show(null);
  }

  show(x) {
    this.at = x === null ? null : Math.max(this.low, Math.min(this.high, x));
    this.cursor.setAttribute("visibility", this.at === null ? "hidden" : "visible");
    if (this.at === null) {
      this.readout.replaceChildren(element("div", { class: "wide" }, element("dt", null, "Point at the chart to read it; arrow keys move along it.")));
      return;
    }
    const place = this.data.across[0] + this.data.across[1] * this.at;
    this.cursor.setAttribute("x1", String(place));
    this.cursor.setAttribute("x2", String(place));
    const pairs = [["At", formatCount(this.at)]];
    for (const s of this.data.series) {
      const i = upperBound(s.x, this.at) - 1;
      const isOver = i < 0 || (i === s.x.length - 1 && this.at > s.x[i]);
      pairs.push([s.name, isOver ? "ended" : formatSize(s.y[i]), `r${s.number % 8}`]);
    }
    this.readout.replaceChildren(...definitions(pairs));
  }
}

// "rank 5" in a heading links to its row of the table.
function linkRanks() {
  const rows = new Map();
  for (const row of /** @type {NodeListOf<HTMLTableRowElement>} */ (document.querySelectorAll("#ranks tbody tr"))) {
    const name = row.cells[0] ? row.cells[0].textContent.trim() : "";
    if (!name || rows.has(name)) continue;
    rows.set(name, row);
    row.id = `row-${rows.size}`;
  }
  for (const head of document.querySelectorAll("#odd h3 b, #odd .body > p b")) {
    const row = rows.get(head.textContent.trim());
    if (!row || head.querySelector("a")) continue; // already links to the rank's page
    head.replaceChildren(element("a", { href: `#${row.id}`, title: "To its row in the table of ranks" }, head.textContent));
  }
}

setUpTheme(() => {});
setUpCopying();
for (const table of document.querySelectorAll("section table")) makeSortable(table);
{
  const charts = JSON.parse(byId("data").textContent || "[]");
  document.querySelectorAll("svg.chart").forEach((svg, i) => { if (charts[i]) new StaticChart(svg, charts[i]); });
  linkRanks();
}
/** @type {any} */ (window).fragdoctor = { ready: true };
