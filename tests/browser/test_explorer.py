"""The explorer in a real browser: bands, time travel, search, tables, the address, downloads."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from page_samples import MIB, named, of_snapshot, tiny, tiny_diagnosis
from served import served
from stock import from_python

from fragdoctor.cli.pages import Shown, ViewReplays
from fragdoctor.cli.view import Viewer
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.cases import read_case
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case, Overrides
from fragdoctor.model.simulation import Promise
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.page import page as page_module
from fragdoctor.report.page.page import render_page
from fragdoctor.report.views.analyze import document
from fragdoctor.trace.trace import Trace

pytestmark = pytest.mark.slow

SAMPLES = Path(__file__).parents[2] / "sample_snapshots"
X = "fragdoctor.explorer"


def diagnosis_of(name):
    return of_snapshot(read_snapshot(SAMPLES / name))


@pytest.fixture
def opened(open_page):
    return open_page(diagnosis_of("fragmentation_oom.pickle"))


def panel(page):
    return page.evaluate("document.getElementById('explorer-panel').innerText")


def click(page, x, y):
    page.mouse("mouseMoved", x, y)
    for kind in ("mousePressed", "mouseReleased"):
        page.mouse(kind, x, y, button="left", clickCount=1)
    page.settle()


def point_of(page, block, state):
    """Return where a block is drawn at a state, in the window."""
    place = page.box("#timeline-graphic canvas")
    x, y = page.evaluate(f"""(() => {{
      const t = {X}.timeline, b = t.bands, c = Math.floor((t.xOf({state}) - LEFT) * t.ratio);
      let low = 0;
      for (const g of b.gathered) low += g[c];
      for (let k = 0; b.chosen[k] !== {block}; k++) {{
        if (b.first[k] <= c && c < b.last[k]) low += t.lives.size[b.chosen[k]];
      }}
      const middle = low + t.lives.size[{block}] / 2;
      return [LEFT + (c + 0.5) / t.ratio, t.area.bottom - (middle / t.high) * t.area.height];
    }})()""")
    return place["x"] + x, place["y"] + y


@pytest.mark.parametrize(
    "name",
    ["fragmentation_oom.pickle", "expandable_oom.pickle", "private_pool_oom.pickle",
     "small_holes_oom.pickle", "two_devices_oom.pickle", "truncated_history.pickle",
     "kvcache_retries.pickle.gz"],
)  # fmt: skip
def test_segments_of_any_moment_are_those_of_the_trace(open_page, name):
    snapshot = read_snapshot(SAMPLES / name)
    trace = Trace.of(snapshot, snapshot.devices[0])
    page = open_page(of_snapshot(snapshot))
    states = np.unique(np.linspace(0, trace.n_events, 9).astype(int)).tolist()

    for state in states:
        shown = page.evaluate(f"""(() => {{
          const m = {X}.lives.layoutAt({state});
          return {{start: m.start, total: m.total, size: m.size, state: m.state,
                   first: m.blockStart, row: m.row}};
        }})()""")
        layout = trace.layout_at(state)
        assert layout.segment_address.tolist() == shown["start"]
        assert layout.segment_bytes.tolist() == shown["total"]
        free = [s for s, kind in zip(shown["size"], shown["state"], strict=True) if kind == 0]
        assert layout.free_bytes.tolist() == free
        live = [r for r, kind in zip(shown["row"], shown["state"], strict=True) if kind]
        assert layout.live_row.tolist() == live
        pending = [kind == 2 for kind in shown["state"] if kind]
        assert layout.live_is_pending.tolist() == pending


def test_curves_summed_from_the_blocks_are_the_totals(open_page):
    diagnosis = diagnosis_of("small_holes_oom.pickle")
    totals = diagnosis.analyses[0].trace.totals
    page = open_page(diagnosis)

    for name in ("allocated", "active", "reserved"):
        curve = page.evaluate(f"Array.from({X}.timeline.{name}.levels[0].high)")
        assert getattr(totals, f"{name}_bytes").tolist() == curve


def test_bands_reach_exactly_to_what_is_allocated(opened):
    wrong = opened.evaluate(f"""(() => {{
      const t = {X}.timeline, b = t.bands, wrong = [];
      for (let c = 0; c < b.states.length; c++) {{
        let sum = 0;
        for (const g of b.gathered) sum += g[c];
        b.chosen.forEach((i, k) => {{
          if (b.first[k] <= c && c < b.last[k]) sum += t.lives.size[i];
        }});
        if (sum !== t.allocated.levels[0].high[b.states[c]]) wrong.push(c);
      }}
      return wrong;
    }})()""")

    assert wrong == []


@pytest.mark.parametrize(
    "name", ["fragmentation_oom.pickle", "expandable_oom.pickle", "kvcache_retries.pickle.gz"]
)
def test_bands_of_segments_are_those_of_the_trace(open_page, name):
    snapshot = read_snapshot(SAMPLES / name)
    trace = Trace.of(snapshot, snapshot.devices[0])
    page = open_page(of_snapshot(snapshot))
    columns = page.evaluate(f"""(() => {{
      const t = {X}.timeline;
      t.choose("detail", "finest");
      t.choose("color", "segments");
      return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => {{
        const s = t.lives.segments, b = t.bands;
        done(Array.from(b.states, (state, c) => [state, Array.from(b.column(c), (x) => [
          x.band.row < 0 || s.page[x.band.row] ? -1 : s.address[x.band.row], x.size, x.used])]));
      }})));
    }})()""")

    totals, n_own = trace.totals, 0
    for state, bands in columns[:: len(columns) // 40]:
        layout = trace.layout_at(state)
        used = (layout.segment_bytes - layout.free_of_segment).tolist()
        known = zip(
            layout.segment_address.tolist(), layout.segment_bytes.tolist(), used, strict=True
        )
        assert sum(size for _, size, _ in bands) == totals.reserved_bytes[state]
        assert sum(used for _, _, used in bands) == totals.active_bytes[state]
        own = {tuple(band) for band in bands if band[0] >= 0}
        assert own <= set(known)
        n_own += len(own)
    assert n_own > 0 or "expandable" in name
    assert page.complaints() == []


def test_pointing_at_a_segment_says_what_is_cached_in_it(opened):
    opened.evaluate(f"{X}.timeline.choose('color', 'segments')")
    opened.settle()
    canvas = opened.box("#timeline-graphic canvas")
    x = opened.evaluate(f"{X}.timeline.xOf(6000)")
    y = opened.evaluate(f"{X}.timeline.area.bottom - 0.6 * {X}.timeline.area.height")
    opened.mouse("mouseMoved", canvas["x"] + x, canvas["y"] + y)
    opened.settle()

    assert re.search(
        r"Here: segment, large blocks, default stream: .* in use, .* cached\.", panel(opened)
    )


def test_bands_are_painted_as_high_as_they_are(opened):
    painted, wanted = opened.evaluate(f"""(() => {{
      const t = {X}.timeline, c = Math.floor((t.xOf(6000) - LEFT) * t.ratio);
      const {{height}} = t.sheet;
      const column = t.sheet.getContext("2d").getImageData(c, 0, 1, height).data;
      let n = 0;
      for (let y = 0; y < height; y++) if (column[4 * y + 3]) n++;
      return [n, t.allocated.levels[0].high[t.bands.states[c]] / (t.high / height)];
    }})()""")

    assert painted == pytest.approx(wanted, abs=2)


def test_hover_shows_the_holders_of_that_moment_and_click_keeps_the_block(opened):
    page = opened
    block = page.evaluate(
        f"""(() => {{ const l = {X}.lives, t = {X}.timeline, peak = t.data.peak_state;
        return l.allocatedAt(peak).sort((a, b) => l.size[b] - l.size[a])[0]; }})()"""
    )
    state = page.evaluate(f"{X}.timeline.data.peak_state")
    size = page.evaluate(f"formatSize({X}.lives.size[{block}])")
    x, y = point_of(page, block, state)

    page.mouse("mouseMoved", x, y)
    page.settle()
    hovered = panel(page)
    click(page, x, y)

    assert f"Here: block of {size}" in hovered
    assert "scenarios.py:52 forward" in hovered
    assert page.evaluate(f"{X}.selected") == block
    kept = panel(page)
    assert f"Block of {size}" in kept
    for word in ("Asked for", "Lived", "Made in", "Category", "Address"):
        assert word in kept
    assert page.evaluate(f"{X}.moment") == pytest.approx(state, abs=20)
    assert page.complaints() == []


def test_pressing_a_jump_goes_to_peak_failure_flush_and_rise(opened):
    page = opened

    def press(title):
        page.evaluate(
            "[...document.querySelectorAll('#explorer-bar button')]"
            f".find((b) => b.textContent === '{title}').click()"
        )
        page.settle()
        return page.evaluate(f"{X}.moment")

    data = page.evaluate(f"{X}.timeline.data")
    assert press("Peak") == data["peak_state"]
    assert press("OOM") == data["ooms"][0][0]
    assert press("Flush") == data["flushes"][0][0]
    steps = page.evaluate(f"Array.from({X}.lives.steps)")
    assert press("Step") - 1 in steps
    low, high = page.evaluate(f"{X}.timeline.steepestRise()")
    assert press("Steepest rise") == high
    assert page.evaluate(f"{X}.anchor") == low


def test_steepest_rise_is_that_of_a_plain_search(open_page):
    diagnosis = diagnosis_of("small_holes_oom.pickle")
    allocated = diagnosis.analyses[0].trace.totals.allocated_bytes
    width = max(16, len(allocated) // 50)
    best = max(
        int(allocated[k] - allocated[max(0, k - width) : k + 1].min())
        for k in range(len(allocated))
    )
    page = open_page(diagnosis)

    low, high = page.evaluate(f"{X}.timeline.steepestRise()")

    assert int(allocated[high] - allocated[low]) == best
    assert 0 < high - low <= width


def test_arrow_keys_step_through_events_and_the_map_follows(opened):
    page = opened
    page.evaluate(f"{X}.goTo(5000)")
    page.evaluate("document.querySelector('.events').focus()")
    page.settle()

    page.key("ArrowDown")
    page.key("ArrowDown")
    page.key("ArrowUp")
    page.settle()

    assert page.evaluate(f"{X}.moment") == 5001
    row = page.evaluate("document.querySelector('.events [aria-selected=true]').dataset.state")
    assert row == "5001"
    reserved = page.evaluate(f"sumOf({X}.map.total)")
    assert reserved == page.evaluate(f"{X}.timeline.reserved.levels[0].high[5001]")
    assert "after event 5,001" in page.evaluate("document.getElementById('map-graphic').innerText")
    page.key("End")
    page.settle()
    assert "at the end" in page.evaluate("document.getElementById('map-graphic').innerText")


def test_full_stop_and_comma_step_anywhere(opened):
    opened.evaluate(f"{X}.goTo(100)")
    opened.key(".")
    opened.key(".")
    opened.key(",")

    assert opened.evaluate(f"{X}.moment") == 101


def test_difference_of_two_moments_adds_up(opened):
    page = opened
    page.evaluate(f"{X}.goTo(4000)")
    page.key("m")
    page.evaluate(f"{X}.goTo(6000)")
    page.key("d")
    page.until(
        f"{X}.icicle.at === 6000 && {X}.icicle.tree.label.includes('4,000 (marked) to 6,000')"
    )

    change = page.evaluate(f"""(() => {{
      const sum = (name) => {X}.icicle.tree.children.filter((n) => n.label.startsWith(name))
        .reduce((a, n) => a + n.bytes, 0);
      return sum("more") - sum("less");
    }})()""")
    curve = page.evaluate(f"Array.from({X}.timeline.allocated.levels[0].high)")
    assert page.evaluate(f"{X}.icicle.moment") == "change"
    assert change == curve[6000] - curve[4000]


def test_difference_without_a_mark_is_that_over_the_stretch_in_view(opened):
    page = opened
    page.evaluate(f"{X}.timeline.show(4000, 6000)")
    page.settle()
    page.key("d")
    page.until(f"{X}.icicle.tree.label.includes('4,000 to 6,000, the range in view')")

    assert page.evaluate(f"{X}.moment") is None
    page.evaluate(f"{X}.timeline.show(2000, 6000)")
    page.until(f"{X}.icicle.tree.label.includes('2,000 to 6,000')")


@pytest.mark.parametrize("asked", ["step:3", "STEP:7", "event:1200"])
def test_search_goes_to_the_moments_that_the_command_line_knows(opened, asked):
    snapshot = read_snapshot(SAMPLES / "fragmentation_oom.pickle")
    expected = diagnose(Case(snapshot=snapshot), replays=False, at=asked).moment.event

    opened.evaluate(f"{X}.find({asked!r})")
    opened.settle()

    assert opened.evaluate(f"{X}.moment") == expected
    assert opened.evaluate(f"[{X}.timeline.found, {X}.search.value]") == [None, asked]
    assert opened.evaluate(f"{X}.address().get('q')") is None
    opened.evaluate(f"{X}.find('step:99')")
    assert opened.evaluate(f"{X}.moment") == expected


TREE = """(() => {
  const line = (node) => [node.label, node.bytes / MIB, ...node.children.map(line)];
  return fragdoctor.icicle.tree.children.map(line);
})()"""


def test_icicle_by_module_and_by_owner(open_page):
    page = open_page(named())
    page.evaluate("fragdoctor.icicle.choose('end')")
    unnamed = [4, ["train.py:13 step train.py", 4]]

    page.evaluate("fragdoctor.icicle.chooseBy('module')")
    assert page.evaluate(TREE) == [
        ["no module recorded", *unnamed],
        ["layers", 2, ["1", 2, ["mlp", 2, ["train.py:12 step train.py", 2]]]],
    ]
    page.until("location.hash.includes('by=module')")
    page.evaluate("fragdoctor.icicle.chooseBy('owner')")
    assert page.evaluate(TREE) == [
        ["no name found", *unnamed],
        ["agent.buffer (list of 3)", 2, ["train.py:12 step train.py", 2]],
    ]
    page.evaluate("fragdoctor.icicle.choose('peak')")
    assert page.evaluate("fragdoctor.icicle.tree.bytes") == 14 * MIB
    assert page.complaints() == []


def test_address_keeps_by_what_the_icicle_is(open_page):
    page = open_page(named(), fragment="by=owner")

    assert page.evaluate("fragdoctor.icicle.choices.value") == "owner"
    assert page.evaluate("fragdoctor.icicle.tree.children[0].label") == "no name found"


def test_icicle_of_the_stretch_in_view_counts_what_it_made(opened):
    page = opened
    page.evaluate(f"{X}.timeline.show(1000, 2000)")
    page.evaluate(f"{X}.icicle.choose('made')")
    page.until(f"{X}.icicle.tree.label.includes('events 1,001 to 2,000')")

    made = page.evaluate(f"{X}.icicle.tree.bytes")
    wanted = page.evaluate(f"""(() => {{ const l = {X}.lives; let sum = 0;
      for (let i = 0; i < l.count; i++) if (l.born[i] > 1000 && l.born[i] <= 2000) sum += l.size[i];
      return sum; }})()""")
    assert made == wanted > 0


@pytest.mark.parametrize(
    ("query", "test"),
    [
        ("loss_fn", "l.text.stack(l.stack[i]).some((f) => l.text.short(f).includes('loss_fn'))"),
        (">100MiB", "l.size[i] > 100 * MIB"),
        ("forward <1MiB", "l.size[i] < MIB"),
        ("activations", "CATEGORIES[l.category[i]] === 'activations'"),
    ],
)
def test_search_finds_blocks(opened, query, test):
    opened.evaluate(f"{X}.find('{query}')")

    found, agrees = opened.evaluate(f"""(() => {{
      const l = {X}.lives, rows = Array.from({X}.timeline.found.keys())
        .filter((i) => {X}.timeline.found[i]);
      return [rows.length, rows.every((i) => {test})];
    }})()""")
    assert found > 0
    assert agrees


def test_search_finds_the_blocks_at_an_address(opened):
    address = opened.evaluate(f"'0x' + ({X}.lives.address[40] + 10).toString(16)")

    opened.evaluate(f"{X}.find('{address}')")

    assert opened.evaluate(f"{X}.timeline.found[40]") == 1
    assert opened.evaluate(
        f"Array.from({X}.timeline.found.keys()).filter((i) => {X}.timeline.found[i])"
        f".every((i) => {X}.lives.address[i] <= {address} && "
        f"{address} < {X}.lives.address[i] + {X}.lives.size[i])"
    )


def test_typing_a_search_dims_what_does_not_fit(opened):
    page = opened
    page.key("/")
    for letter in "loss_fn":
        page.key(letter)
    page.until(f"{X}.timeline.found !== null && {X}.query === 'loss_fn'")
    page.until(f"{X}.timeline.paintedFound === {X}.timeline.found")

    assert page.evaluate("document.activeElement.value") == "loss_fn"
    hits = page.evaluate("document.querySelector('#explorer-bar .from').textContent")
    assert hits.endswith("blocks")


def test_table_of_blocks_is_there_without_scrolling_to_it(opened):
    opened.until("document.querySelectorAll('table.blocks tbody tr').length > 0")

    assert opened.evaluate("document.querySelectorAll('table.blocks tbody tr').length") == 10


def test_small_window_names_each_figure_of_a_block(open_page):
    page = open_page(diagnosis_of("expandable_oom.pickle"), width=390)
    page.until("document.querySelectorAll('table.blocks tbody tr').length > 0")

    size = "document.querySelector('table.blocks tbody td.n')"
    assert page.evaluate(f"getComputedStyle({size}, '::before').content") == '"Size "'


def test_table_of_two_columns_needs_no_scrolling(open_page):
    case = Case(snapshot=read_snapshot(SAMPLES / "leak_oom.pickle.gz"))
    page = open_page(diagnose(case), width=390)

    table = "document.querySelector('#rejected .scroll')"
    assert page.evaluate(f"{table}.scrollWidth <= {table}.clientWidth")


def test_table_of_blocks_sorts_and_a_row_selects(opened):
    page = opened
    page.evaluate(f"{X}.goTo({X}.timeline.data.peak_state)")
    page.settle()
    page.evaluate(f"{X}.blocks.paint()")
    rows = "[...document.querySelectorAll('#blocks-graphic tbody tr')].map((r) => +r.dataset.row)"
    largest = page.evaluate(rows)
    sizes = page.evaluate(f"{rows}.map((i) => {X}.lives.size[i])")

    page.evaluate("document.querySelector('#blocks-graphic th[data-column=born] button').click()")
    page.evaluate("document.querySelector('#blocks-graphic th[data-column=born] button').click()")
    born = page.evaluate(f"{rows}.map((i) => {X}.lives.born[i])")
    page.evaluate("document.querySelector('#blocks-graphic tbody tr').click()")
    page.settle()

    assert sizes == sorted(sizes, reverse=True)
    everything = page.evaluate(f"{X}.lives.allocatedAt({X}.moment).map((i) => {X}.lives.size[i])")
    assert sizes == sorted(everything, reverse=True)[: len(sizes)]
    assert len(largest) == 10
    assert born == sorted(born)
    assert page.evaluate(f"{X}.selected") == page.evaluate(rows)[0]
    head = page.evaluate("document.querySelector('#blocks-graphic th[data-column=born]').ariaSort")
    assert head == "ascending"


def test_tables_of_the_report_sort_by_size(opened):
    page = opened
    cells = (
        "[...document.querySelectorAll('#holders tbody tr')]"
        ".map((r) => cellValue(r.cells[1].textContent))"
    )
    page.evaluate("document.querySelectorAll('#holders thead button')[1].click()")
    down = page.evaluate(cells)
    page.evaluate("document.querySelectorAll('#holders thead button')[1].click()")

    assert down == sorted(down, reverse=True)
    assert page.evaluate(cells) == sorted(down)


def test_address_keeps_the_view_and_a_link_shows_the_same(chromium, opened, tmp_path):
    page = opened
    page.evaluate(f"""(() => {{ const x = {X};
      x.timeline.show(2000, 5000); x.timeline.choose("color", "size"); x.goTo(3000); x.mark();
      x.goTo(4000); x.find("forward"); x.select(7); x.icicle.choose("change");
      x.blocks.sort = "born"; x.blocks.changed(); }})()""")
    state = f"{X}.address().toString()"
    page.until(f"location.hash.slice(1) === {state}")
    before, address = page.evaluate(state), page.evaluate("location.hash.slice(1)")

    again = chromium.page(tmp_path / "page-0.html", fragment=address)
    after = again.evaluate(state)
    lit = again.evaluate(f"sumOf({X}.timeline.found)")
    again.close()

    assert before == after == address
    assert "at=4000" in address
    assert "view=2000-5000" in address
    assert lit > 0


def test_nonsense_in_the_address_is_survived(chromium, opened, tmp_path):
    nonsense = "at=1e99&a=-4&view=9-1&block=77777777&color=%3Cimg%3E&tree=x&sort=__proto__&show=8"

    page = chromium.page(tmp_path / "page-0.html", fragment=nonsense)

    assert page.evaluate(f"{X}.moment") == page.evaluate(f"{X}.timeline.n - 1")
    assert page.evaluate(f"{X}.selected") == -1
    assert page.evaluate(f"{X}.blocks.sort") == "-size"
    assert page.evaluate("document.getElementById('trouble').hidden")
    assert page.complaints() == []
    page.close()


def test_link_to_a_section_is_no_view(chromium, opened, tmp_path):
    page = chromium.page(tmp_path / "page-0.html", fragment="checklist")
    page.evaluate("new Promise((r) => setTimeout(r, 200))")  # longer than saving waits

    assert page.evaluate("location.hash") == "#checklist"
    page.close()


def test_downloads_hold_what_is_seen(opened):
    page = opened
    page.evaluate("""HTMLAnchorElement.prototype.click = function () {
      window.saved = (window.saved || []).concat([[this.download, fetchless(this.href)]]); };
      window.blobs = {}; window.fetchless = (u) => window.blobs[u];
      const make = URL.createObjectURL;
      URL.createObjectURL = (b) => { const u = make(b); window.blobs[u] = b; return u; };""")
    page.evaluate(f"{X}.goTo({X}.timeline.data.peak_state)")
    page.settle()
    page.evaluate(f"{X}.blocks.save(); {X}.events.save()")
    page.evaluate(f"savePicture({X}.timeline.canvas, 'a.png')")
    page.until("(window.saved || []).length === 3")

    names = page.evaluate("saved.map((s) => s[0])")
    table = page.evaluate("saved[0][1].text()").splitlines()
    kind, n_bytes = page.evaluate("[saved[2][1].type, saved[2][1].size]")
    assert names == ["fragdoctor-blocks.csv", "fragdoctor-events.csv", "a.png"]
    assert table[0] == "bytes,line,category,born,freed,lived,address"
    total = sum(int(line.split(",")[0]) for line in table[1:])
    assert total == page.evaluate(f"{X}.timeline.allocated.levels[0].high[{X}.moment]")
    assert kind == "image/png"
    assert n_bytes > 10_000


def test_svg_downloads_are_pictures_of_what_is_seen(opened):
    for name in ("timeline", "map"):
        text = opened.evaluate(f"{X}.{name}.svg().text()")
        root = ET.fromstring(text)

        width = opened.evaluate(f"{X}.{name}.width")
        drawn = [*root.iter("{http://www.w3.org/2000/svg}text")]
        assert float(root.attrib["width"]) == width
        assert len([*root.iter()]) > 30
        assert drawn
        assert not opened.complaints()


def test_cells_that_a_spreadsheet_would_run_are_defused(open_page):
    page = open_page(tiny_diagnosis())

    cells = page.evaluate("['=1+1', '+1', '@x', '-x', 'a,\"b\"', 'plain', -5].map(csvCell)")

    assert cells == ["'=1+1", "'+1", "'@x", "'-x", '"a,""b"""', "plain", "-5"]


def test_heights_zoom_shows_small_blocks(opened):
    page = opened
    before = page.evaluate(f"{X}.timeline.bands.least")
    page.evaluate("document.querySelector('#timeline-graphic canvas').focus()")
    for _ in range(4):
        page.key("]")

    assert page.evaluate(f"{X}.timeline.bands.least") < before / 10
    page.key("[")
    assert page.evaluate(f"{X}.timeline.heights !== null")


@pytest.mark.parametrize("color", ["category", "line", "size", "lifetime", "segments", "totals"])
def test_each_colouring_names_its_colours(opened, color):
    opened.evaluate(f"{X}.timeline.choose('color', '{color}')")
    opened.settle()

    shown = opened.evaluate("document.querySelector('#timeline-graphic .chartkey').innerText")
    expected = {
        "category": "activations", "line": "scenarios.py:52 forward", "size": "16 to 128 MiB",
        "lifetime": "never freed", "segments": "cached", "totals": "allocated",
    }  # fmt: skip
    assert expected[color] in shown
    assert opened.complaints() == []


def test_hostile_names_stay_text_in_every_list(open_page):
    text = "<img src=x onerror=window.pwned=1>=cmd|' /C calc'!A0"
    page = open_page(of_snapshot(from_python(tiny(text))), width=390)

    for action in ("goTo(7)", "find('onerror')", "select(0)", "mark()", "goTo(2)",
                   "showDifference()", "blocks.paint()"):  # fmt: skip
        page.evaluate(f"{X}.{action}")
        page.settle()

    assert "onerror" in panel(page)
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.complaints() == []


def test_freed_block_says_when_and_how_long_it_lived(open_page):
    page = open_page(tiny_diagnosis())

    page.evaluate(f"{X}.goTo(3)")
    page.evaluate(f"{X}.select({X}.lives.size.indexOf({12 * MIB}))")
    page.settle()

    words = " ".join(panel(page).split())
    assert "Allocated event 2" in words
    assert "Freed event 4" in words
    assert "Lived 2 events" in words


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_explorer_fits_every_width(open_page, width, dark):
    page = open_page(diagnosis_of("expandable_oom.pickle"), width=width, dark=dark)
    page.evaluate(f"{X}.goTo(50)")
    page.settle()

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    used = page.evaluate("document.getElementById('explorer').getBoundingClientRect().width")
    assert used >= width - 80
    assert page.complaints() == []


@pytest.mark.parametrize("width", [700, 1280, 1440, 1920])
def test_answer_and_explorer_have_the_same_edges(open_page, width):
    page = open_page(diagnosis_of("fragmentation_oom.pickle"), width=width)
    edges = page.evaluate("""["#answer", "#explorer", ".folds"].map((name) => {
      const r = document.querySelector(name).getBoundingClientRect();
      return [r.left, r.right];
    })""")

    assert len({tuple(edge) for edge in edges}) == 1


def test_whole_chart_is_on_the_first_screen_of_a_laptop(open_page):
    case = read_case([str(SAMPLES / "fragmentation_oom.pickle")], Overrides())
    page = open_page(diagnose(case), width=1440, height=900)

    canvas = "document.querySelector('#timeline-graphic canvas').getBoundingClientRect()"
    assert page.evaluate(f"{canvas}.bottom") < 900


def test_page_without_room_for_all_blocks_says_so_and_keeps_the_curves(open_page, monkeypatch):
    monkeypatch.setattr(page_module, "LIVES_BUDGET", 3000)
    diagnosis = diagnosis_of("fragmentation_oom.pickle")
    peak = diagnosis.analyses[0].trace.totals.peak_allocated_bytes

    page = open_page(diagnosis)

    key = page.evaluate("document.querySelector('#timeline-graphic .chartkey').innerText")
    assert "smaller blocks not in this file" in key
    assert page.evaluate(f"{X}.canTravel") is False
    assert page.evaluate(f"Math.max(...{X}.timeline.allocated.levels[0].high)") == peak
    assert page.complaints() == []


def test_saved_page_lists_the_variants_that_were_replayed_and_asks_nobody(open_page):
    diagnosis = diagnose(read_case([str(SAMPLES / "fragmentation_oom.pickle")], Overrides()))
    page = open_page(diagnosis)

    shown = page.evaluate("document.getElementById('whatif-graphic').innerText")

    best = diagnosis.recommendations[0]
    assert "expandable_segments:True" in best.setting
    assert "expandable_segments:True" in shown
    assert page.evaluate(f"formatSize({best.predicted.peak_reserved_bytes})") in shown
    assert "as recorded" in shown
    # What serves the recorded requests alone is not called fitting.
    assert best.predicted.outlook is not None
    words = [promise.value for promise in Promise]
    line = next(row for row in shown.split("as recorded")[1].splitlines() if row in words)
    assert line == best.predicted.promise.value
    assert page.evaluate(f"{X}.whatIf.slider === undefined")
    assert page.evaluate("fetch('try').then(() => 'asked', () => 'refused')") == "refused"


@pytest.fixture
def live(chromium):
    """Return a page that a viewer serves, and what was replayed for it."""
    diagnosis = diagnose(read_case([str(SAMPLES / "fragmentation_oom.pickle")], Overrides()))
    text = render_page(diagnosis, document(diagnosis, RenderOptions()), is_live=True)
    with served(Viewer(Shown(text.encode(), ViewReplays(diagnosis)))) as server:
        page = chromium.open(server.address)
        yield page
        page.close()


def test_live_what_if_replays_the_settings_chosen_and_the_capacity(live):
    page, tried = live, f"{X}.whatIf"

    page.evaluate(f"""(() => {{ const s = {tried}.knobs[0].querySelector('select');
      s.value = 'True'; s.dispatchEvent(new Event('change')); }})()""")
    page.until(f"{tried}.live !== null")
    cured = page.evaluate(f"{tried}.live")
    page.evaluate(f"""(() => {{ {tried}.slider.value = '0';
      {tried}.slider.dispatchEvent(new Event('input')); }})()""")
    page.until(f"{tried}.live.capacity === {tried}.capacity")
    tight = page.evaluate(f"{tried}.live")

    assert cured["fits"]
    assert cured["said"][1] in [promise.value for promise in Promise]
    assert "expandable_segments:True" in cured["name"]
    assert not tight["fits"]
    assert "fails at event" in tight["more"]
    assert page.evaluate(f"{X}.timeline.capacity") == tight["capacity"]
    assert page.complaints() == []
    assert {u.rpartition("/")[2] for u in page.requests()} == {"try"}
