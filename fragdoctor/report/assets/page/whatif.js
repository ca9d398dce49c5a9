// Settings and capacities to try: those that the diagnosis replayed and, if a server is behind
// the page, any others, replayed as the sliders move.

/** @type {[string, string, string[][]][]} */
const KNOBS = [
  ["expandable_segments", "Expandable segments", [["", "off"], ["True", "on"]]],
  ["max_split_size_mb", "Largest block to split", [["", "any"], ["512", "512 MiB"], ["256", "256 MiB"], ["128", "128 MiB"], ["64", "64 MiB"], ["32", "32 MiB"]]],
  ["garbage_collection_threshold", "Collect from", [["", "never"], ["0.6", "60%"], ["0.8", "80%"], ["0.9", "90%"]]],
  ["roundup_power2_divisions", "Round sizes up", [["", "no"], ["8", "1/8 of a power of two"], ["4", "1/4 of a power of two"], ["2", "1/2 of a power of two"]]],
];
const SLIDER_STEPS = 400;
const FIRST_VARIANTS = 7;
const MOST_TIMES = 3; // the width of the bars, in capacities of the recorded run

// The promise, in the words of the report; for the recorded run, how it ended.
function verdictOf(row) {
  if (row.isRecorded) return row.fits ? ["dim", "ran"] : ["bad", "failed"];
  return row.said || ["dim", "not known"];
}

class WhatIf {
  constructor(root, data, onCapacity) {
    this.data = data;
    this.recordedCapacity = data.capacity;
    this.capacity = data.capacity;
    this.onCapacity = onCapacity;
    this.live = null;
    this.kept = [];
    this.asked = 0;
    this.list = element("ul", { class: "variants" });
    this.limit = FIRST_VARIANTS;
    this.more = button("Show more", "Show all that was replayed", () => { this.limit = Infinity; this.paint(); });
    root.replaceChildren(...(data.live ? [this.form()] : []), this.list, this.more);
    if (!data.live) root.append(element("p", { class: "from" }, "These were replayed when the file was written. fragdoctor view FILE tries any capacity and setting."));
    this.paint();
  }

  form() {
    const low = Math.max(1, this.data.least || 0), top = 2 * Math.max(this.capacity || 0, this.data.recorded.peak || 0, low);
    this.sizeAt = (step) => Math.round((low + ((top - low) * step) / SLIDER_STEPS) / (2 * MIB)) * 2 * MIB;
    this.slider = element("input", { type: "range", min: "0", max: String(SLIDER_STEPS), step: "1", "aria-label": "Capacity" });
    this.slider.value = String(Math.round(((Math.max(low, this.capacity || top / 2) - low) / (top - low)) * SLIDER_STEPS));
    this.sliderText = element("output", null, this.capacity ? formatSize(this.capacity) : "unlimited");
    this.slider.addEventListener("input", () => {
      this.capacity = this.sizeAt(Number(this.slider.value));
      this.sliderText.textContent = formatSize(this.capacity);
      this.onCapacity(this.capacity);
      this.askSoon();
    });
    this.knobs = KNOBS.map(([key, label, values]) => {
      const select = element("select", { "data-key": key }, ...values.map(([value, word]) => element("option", { value }, word)));
      select.addEventListener("change", () => { this.isRecorded.checked = false; this.askSoon(); });
      return element("label", null, `${label} `, select);
    });
    this.isRecorded = element("input", { type: "checkbox" });
    this.isRecorded.checked = true;
    this.isRecorded.addEventListener("change", () => this.askSoon());
    return element("div", { class: "controls", role: "group", "aria-label": "What to try" },
      element("label", { class: "slide" }, "Capacity ", this.slider, this.sliderText),
      element("label", null, this.isRecorded, "recorded settings"), ...this.knobs,
      button("Recorded capacity", "Back to the capacity of the recorded run", () => this.resetCapacity()),
      button("Smallest capacity", "Find the smallest capacity at which this fits", () => this.ask(true)),
      button("Keep", "Keep this result in the list", () => { if (this.live && !this.live.error) { this.kept.unshift(this.live); this.paint(); } }));
  }

  resetCapacity() {
    this.capacity = this.recordedCapacity;
    this.sliderText.textContent = this.capacity ? formatSize(this.capacity) : "unlimited";
    this.onCapacity(this.capacity);
    this.askSoon();
  }

  conf() {
    if (this.isRecorded.checked) return null;
    const set = this.knobs.map((label) => label.querySelector("select")).filter((s) => s.value).map((s) => `${s.dataset.key}:${s.value}`);
    // Spell out every default: an empty string would mean the recorded settings.
    return set.join(",") || "expandable_segments:False";
  }

  askSoon() {
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.ask(false), 60);
  }

  async ask(smallest) {
    const number = ++this.asked, conf = this.conf(), capacity = this.capacity;
    let answer;
    try {
      const response = await fetch("try", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ device: this.data.device, conf, capacity_bytes: capacity || null, smallest }) });
      answer = await response.json();
    } catch {
      answer = { error: "The server does not answer: is fragdoctor view still running?", hint: "" };
    }
    if (number !== this.asked) return; // a newer question is on its way
    const name = `${conf === null ? "recorded settings" : conf}${capacity ? ` on ${formatSize(capacity)}` : ""}`;
    this.live = answer.error ? { name, error: `${answer.error} ${answer.hint}` } : {
      name, fits: answer.is_conclusive ? answer.fits : null, peak: answer.peak_reserved_bytes, retries: answer.retries, margin: answer.margin_bytes, calls: answer.driver_calls, capacity: answer.capacity_bytes || capacity, said: answer.is_conclusive ? answer.said : null,
      more: [answer.fits || answer.oom_event === null ? "" : `fails at event ${formatCount(answer.oom_event + 1)} (${formatSize(answer.oom_bytes)})`, answer.outlook,
        answer.smallest_capacity_bytes === null ? answer.smallest_capacity_note : `smallest capacity ${formatSize(answer.smallest_capacity_bytes)}`, answer.note].filter(Boolean).join("; "),
    };
    this.paint();
  }

  paint() {
    const rows = [...(this.live ? [{ ...this.live, isLive: true }] : []), ...this.kept, { ...this.data.recorded, isRecorded: true }, ...this.data.variants];
    const recorded = Math.max(this.capacity || 0, this.recordedCapacity || 0, this.data.recorded.peak || 0, 1);
    // Without a memory limit, a run may have many times as much: such a bar goes on beyond the edge.
    const scale = Math.min(Math.max(...rows.map((r) => Math.max(r.peak || 0, r.capacity || 0)), recorded), MOST_TIMES * recorded);
    this.list.replaceChildren(...rows.slice(0, this.limit).map((row) => this.row(row, scale)));
    this.more.hidden = rows.length <= this.limit;
  }

  row(row, scale) {
    if (row.error) return element("li", { class: "live" }, element("b", null, row.name), element("span", { class: "bad" }, row.error));
    const capacity = row.capacity || this.recordedCapacity;
    const [kind, said] = verdictOf(row);
    const verdict = element("span", { class: kind }, said);
    const bar = element("span", { class: "peakbar", "aria-hidden": "true" }), fill = element("i"), limit = element("u");
    const isSpare = row.fits && row.margin > 0 && capacity;
    fill.style.width = `${(100 * (row.peak || 0)) / scale}%`;
    if (row.fits === false) fill.classList.add("short");
    bar.append(fill);
    if (isSpare) { // people compare the free room
      const spare = element("i", { class: "spare" });
      spare.style.left = `${(100 * (capacity - row.margin)) / scale}%`;
      spare.style.width = `${(100 * row.margin) / scale}%`;
      bar.append(spare);
    }
    if (capacity > scale) bar.classList.add("beyond");
    else if (capacity) {
      limit.style.left = `${(100 * capacity) / scale}%`;
      bar.append(limit);
    }
    const hasMargin = row.fits && row.margin !== undefined && row.margin !== null;
    const name = row.name.split(/(?<=,)/).flatMap((part) => [part, element("wbr")]); // settings end at a comma
    const words = [...(hasMargin ? [`${formatSize(row.margin)} to spare`] : []), `peak ${formatSize(row.peak || 0)}`];
    if (row.retries) words.push(plural(row.retries, "retry", "retries"));
    if (row.calls) words.push(plural(row.calls, "driver call"));
    if (row.more) words.push(row.more);
    return element("li", { class: row.isLive ? "live" : "" }, verdict, element("b", { class: row.isRecorded || row.is_change ? "said" : "" }, ...name), bar, element("span", { class: "from" }, words.join(" · ")));
  }
}
