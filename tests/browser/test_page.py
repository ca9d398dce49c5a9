"""The page in a real browser: it runs clean, asks for nothing, and answers to mouse and keys."""

from __future__ import annotations

from pathlib import Path

import diagnoses
import pytest
from analysis.training_loop import TrainingLoop
from msgspec.structs import replace
from page_samples import MIB, of_snapshot, tiny, tiny_diagnosis
from stock import from_python

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import Case
from fragdoctor.report.page.blob import BlobWriter

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).parents[2] / "sample_snapshots"
HOSTILE = (
    "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>"
    "<svg onload=window.pwned=1>{{window.pwned=1}}${window.pwned=1}'\"`--><!--\u202e\u2066\x1b[31m"
    "https://evil.example/x.png"
)
SAMPLES = ("empty", "frag_gpt_varlen", "leak_losses", "two_devices_oom_on_1", "expandable_retries",
           "no_history", "state_only", "cuda_graph_pool", "stacks_all_oom")  # fmt: skip


def two_devices():
    one, two = tiny(), tiny(device=1)
    both = {**one, "segments": one["segments"] + two["segments"][:1]}
    both["device_traces"] = [one["device_traces"][0], two["device_traces"][1]]
    return of_snapshot(from_python(both))


def assert_clean(page):
    assert page.complaints() == []
    assert page.requests() == []
    assert page.evaluate("document.getElementById('trouble').hidden")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", diagnoses.ALL)
def test_page_of_each_kind_opens_clean_and_fits_the_window(open_page, name, width):
    page = open_page(diagnoses.ALL[name](), width=width)

    assert_clean(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_what_a_segment_lacks_fits_a_small_window(open_page):
    case = Case(snapshot=read_snapshot(RECORDED / "leak_oom.pickle.gz"))

    page = open_page(diagnose(case), width=390)

    assert "of a segment of" in page.evaluate("document.querySelector('.key-figures').innerText")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.shared
@pytest.mark.parametrize("name", SAMPLES)
def test_page_of_a_recording_opens_clean_and_draws(open_page, shared, name):
    snapshot = read_snapshot(shared / "snapshots" / name / "snapshot.pickle")

    page = open_page(of_snapshot(snapshot), width=390)

    assert_clean(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_hostile_text_in_every_field_runs_nothing_and_moves_nothing(open_page):
    hostile = of_snapshot(from_python(tiny(HOSTILE)))
    words = diagnoses.planted(diagnoses.fragmentation(), HOSTILE)
    names = ("verdict", "checklist", "findings", "skipped", "recommendations", "rejected")
    names += ("corrections", "notes", "fidelity")
    diagnosis = replace(
        hostile,
        case=replace(hostile.case, sources=(HOSTILE,)),
        **{name: getattr(words, name) for name in names},
    )

    page = open_page(diagnosis, width=390)
    for graphic in ("timeline", "map", "icicle"):
        place = page.box(f"#{graphic}-graphic canvas")
        for share in (0.2, 0.4, 0.6, 0.8):
            page.mouse("mouseMoved", place["x"] + share * place["width"], place["y"] + 60)
            page.settle()

    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.querySelectorAll('img, iframe, script').length") == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert_clean(page)


def test_script_decodes_what_was_written(open_page):
    diagnosis = tiny_diagnosis()
    page = open_page(diagnosis)

    sizes = page.evaluate("Array.from(fragdoctor.map.size)")
    curve = page.evaluate("Array.from(fragdoctor.timeline.reserved.levels[0].high)")

    assert diagnosis.case.snapshot.blocks.size_bytes.tolist() == sizes
    assert [MIB * n for n in (0, 20, 20, 20, 20, 20, 40, 40, 40)] == curve


def test_script_decodes_extreme_integers(open_page):
    values = [0, -1, 1, 2**52, -(2**52), 255, 256, 2**31, -(2**31), 2**32 - 1, 2**47, 0]
    blob = BlobWriter()
    heads = [blob.add(v) for v in ([], [0, 0, 0], values, [512 * v // 1024 for v in values])]
    encoded = blob.encode({"arrays": heads})
    page = open_page(tiny_diagnosis())

    decoded = page.evaluate(
        f"decodePage('{encoded}').then((d) => d.head.arrays.map((w) => Array.from(d.array(w))))"
    )

    assert decoded == [[], [0, 0, 0], values, [512 * v // 1024 for v in values]]


def test_envelope_range_equals_a_plain_search(open_page):
    page = open_page(tiny_diagnosis())

    wrong = page.evaluate("""(() => {
      let seed = 1;
      const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
      const high = Float64Array.from({length: 1237}, () => Math.floor(random() * 1e9));
      const drop = high.map((v) => Math.floor(random() * v));
      const envelope = new Envelope(high, drop);
      const few = high.map((v) => v % 7), coarse = new Envelope(few, null);
      let wrong = 0;
      for (let k = 0; k < 3000; k++) {
        const a = Math.floor(random() * 1237);
        const b = Math.min(1236, a + Math.floor(random() ** 3 * 1237));
        let top = -Infinity, bottom = Infinity;
        for (let i = a; i <= b; i++) {
          top = Math.max(top, high[i]);
          bottom = Math.min(bottom, high[i] - drop[i]);
        }
        const got = envelope.range(a, b);
        if (got.top !== top || got.bottom !== bottom) wrong++;
        if (envelope.highestIn(a, b) !== high.indexOf(top, a)) wrong++;
        const best = few.subarray(a, b + 1).reduce((m, v) => Math.max(m, v));
        if (coarse.highestIn(a, b) !== few.indexOf(best, a)) wrong++;
      }
      return wrong;
    })()""")

    assert wrong == 0


@pytest.fixture
def recording(open_page, shared):
    path = shared / "snapshots" / "frag_gpt_varlen" / "snapshot.pickle"
    return open_page(of_snapshot(read_snapshot(path)))


@pytest.mark.shared
def test_timeline_drag_wheel_keys_and_double_click_zoom(recording):
    page = recording
    span = "fragdoctor.timeline.view.to - fragdoctor.timeline.view.from"
    whole = page.evaluate(span)
    place = page.box("#timeline-graphic canvas")
    middle = place["y"] + place["height"] / 2

    page.drag((place["x"] + 300, middle), (place["x"] + 600, middle))
    dragged = page.evaluate(span)
    page.evaluate("pageScroll.last = 0")
    page.mouse("mouseWheel", place["x"] + 500, middle, deltaX=0, deltaY=-240)
    page.settle()
    wheeled = page.evaluate(span)
    page.evaluate("document.querySelector('#timeline-graphic canvas').focus()")
    page.key("+")
    keyed = page.evaluate(span)
    page.key("0")

    assert 0.2 * whole < dragged < 0.4 * whole
    assert wheeled < 0.6 * dragged
    assert keyed == pytest.approx(wheeled / 2)
    assert page.evaluate(span) == whole
    assert_clean(page)


@pytest.mark.shared
def test_timeline_peak_key_and_hover_read_the_exact_peak(recording):
    page = recording
    peak = page.evaluate("formatSize(Math.max(...fragdoctor.timeline.allocated.levels[0].high))")
    place = page.box("#timeline-graphic canvas")
    x = page.evaluate("fragdoctor.timeline.xOf(fragdoctor.timeline.data.peak_state)")

    page.mouse("mouseMoved", place["x"] + int(x), place["y"] + 150)
    page.settle()
    hovered = page.evaluate("document.querySelector('#timeline-graphic .readout').innerText")
    page.evaluate("document.querySelector('#timeline-graphic canvas').focus()")
    page.key("p")
    pressed = page.evaluate("document.querySelector('#timeline-graphic .readout').innerText")

    assert peak in hovered
    assert peak in pressed
    assert "alloc 423.00 MiB" in pressed


@pytest.mark.shared
def test_wheel_that_scrolls_the_page_past_the_chart_does_not_zoom(recording):
    page = recording
    place = page.box("#timeline-graphic canvas")

    page.mouse("mouseWheel", place["x"] + 500, place["y"] + 100, deltaX=0, deltaY=200)
    page.settle()

    assert page.evaluate("fragdoctor.timeline.view.from") == 0
    assert page.evaluate("fragdoctor.timeline.view.to") == page.evaluate(
        "fragdoctor.timeline.n - 1"
    )


def test_map_hover_and_keys_show_size_age_and_stack(open_page):
    page = open_page(tiny_diagnosis())
    place = page.box("#map-graphic canvas")
    x, y = page.evaluate("""(() => {
      const map = fragdoctor.map, b = map.stranders.indexOf(1), s = map.segmentOf[b];
      const middle = map.offset[b] + map.size[b] / 2;
      const piece = map.pieces.find((p) => p.s === s && p.from <= middle && middle < p.to);
      return [piece.x + (middle - piece.from) / piece.perPixel, piece.y + 8];
    })()""")

    page.mouse("mouseMoved", place["x"] + x, place["y"] + y)
    page.settle()
    hovered = page.evaluate("document.querySelector('#map-graphic .panel').innerText")
    page.mouse("mouseMoved", 5, 5)
    page.evaluate("document.querySelector('#map-graphic canvas').focus()")
    page.key("Home")
    page.key("ArrowRight")
    moved = page.evaluate("document.querySelector('#map-graphic .panel').innerText")

    assert "Stranding block" in hovered
    assert "2.00 MiB" in hovered
    assert "5 events" in hovered
    assert "/home/user/train.py:12 step train.py" in hovered
    assert "MiB" in moved
    assert page.evaluate("fragdoctor.map.chosen") is not None
    assert_clean(page)


def test_icicle_shows_both_moments_and_zooms(open_page):
    page = open_page(tiny_diagnosis())
    place = page.box("#icicle-graphic canvas")
    node = "fragdoctor.icicle.drawn.find((d) => d.node.label.includes(':11'))"
    x, y = page.evaluate(f"[{node}.x + 5, {node}.y + 5]")

    page.mouse("mouseMoved", place["x"] + x, place["y"] + y)
    page.settle()
    hovered = page.evaluate("document.querySelector('#icicle-graphic .readout').innerText")
    for kind in ("mousePressed", "mouseReleased"):
        page.mouse(kind, place["x"] + x, place["y"] + y, button="left", clickCount=1)
    page.settle()
    zoomed = page.evaluate("fragdoctor.icicle.zoomed.label")
    page.evaluate("document.querySelector('[data-moment=end]').click()")
    page.settle()

    assert "12.00 MiB" in hovered
    assert "train.py:11" in hovered
    assert "train.py:11" in zoomed
    assert page.evaluate("fragdoctor.icicle.tree.bytes") == 6 * MIB
    assert_clean(page)


def test_device_switch_changes_graphics_and_tables(open_page):
    page = open_page(two_devices())
    before = page.evaluate("fragdoctor.map.nSegments")

    page.evaluate("document.querySelector('[data-show=\"1\"]').click()")
    page.settle()

    shown = page.evaluate("""[...document.querySelectorAll('.device[data-device]')]
      .filter((e) => e.offsetParent !== null).map((e) => e.dataset.device)""")
    assert (before, page.evaluate("fragdoctor.map.nSegments")) == (2, 1)
    assert {"1"} == set(shown)
    assert page.evaluate("document.querySelector('[data-show=\"1\"]').ariaPressed") == "true"
    assert_clean(page)


def test_theme_follows_the_system_and_can_be_changed(open_page):
    page = open_page(tiny_diagnosis(), dark=True)
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)

    page.evaluate("document.getElementById('theme').click()")
    page.settle()

    assert dark == "rgb(20, 23, 26)"
    assert page.evaluate(background) == "rgb(252, 252, 251)"
    assert page.evaluate("theme.colors.paper") == "#fcfcfb"


def test_copy_button_copies_the_setting(open_page):
    page = open_page(tiny_diagnosis())
    page.evaluate(
        "navigator.clipboard.writeText = (t) => { window.copied = t; return Promise.resolve(); }"
    )

    page.evaluate("document.querySelector('button.copy').click()")
    page.settle()

    assert page.evaluate("window.copied") == (
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    )


def test_policy_stops_markup_that_would_slip_through(open_page):
    page = open_page(tiny_diagnosis())

    refused = page.evaluate("""(() => {
      try { document.body.innerHTML = '<img src=x onerror=window.pwned=1>'; return 'set'; }
      catch (error) { return error.name; }
    })()""")

    assert refused == "TypeError"
    assert page.evaluate("window.pwned") is None


def test_every_item_of_the_checklist_can_be_seen(open_page):
    page = open_page(diagnoses.nothing_known())

    boxes = page.evaluate("""[...document.querySelectorAll('#checklist tbody tr')].map((e) => {
      const r = e.getBoundingClientRect(); return r.left >= 0 && r.width > 200 && r.height > 20;
    })""")

    assert boxes == [True] * len(diagnoses.nothing_known().checklist)


def test_graphics_are_focusable_and_described(open_page):
    page = open_page(tiny_diagnosis())

    described = page.evaluate("""[...document.querySelectorAll('canvas[role]')]
      .map((c) => [c.tabIndex, c.getAttribute('aria-label').length > 40])""")

    assert described == [[0, True]] * 3
    assert (
        page.evaluate(
            "document.querySelectorAll('button:not([title]):not([aria-label]):not([data-show])').length"
        )
        == 0
    )


def test_print_opens_details_and_turns_light(open_page):
    page = open_page(tiny_diagnosis(), dark=True)
    page.evaluate("document.querySelector('main').append(document.createElement('details'))")

    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    during = page.evaluate(
        "[document.documentElement.dataset.theme, "
        "document.querySelectorAll('details:not([open]):not(.stack)').length]"
    )
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")

    assert during == ["light", 0]
    assert page.evaluate("document.documentElement.dataset.theme ?? null") is None
    assert page.evaluate("document.querySelectorAll('details:not([open])').length") > 0


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_training_phases_are_drawn_as_a_band_and_named_at_the_cursor(open_page, width, dark):
    loop = TrainingLoop()
    loop.build()
    for _ in range(3):
        loop.step()
    diagnosis = diagnose(Case(snapshot=loop.snapshot(), sources=("run.pickle",)))

    page = open_page(diagnosis, width=width, dark=dark)
    page.evaluate("fragdoctor.timeline.setCursor(fragdoctor.timeline.data.peak_state)")
    page.settle()

    assert_clean(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert "backward" in page.evaluate(
        "document.querySelector('#timeline-graphic .readout').innerText"
    )
    keys = page.evaluate("document.querySelector('#timeline-graphic .chartkey').innerText")
    assert [k for k in keys.split("\n") if k in {"setup", "forward", "backward", "optimizer"}] == [
        "setup", "forward", "backward", "optimizer",
    ]  # fmt: skip
    # The band: pixels of the lane differ between passes and are not the paper.
    n_colors = page.evaluate(
        """(() => { const t = fragdoctor.timeline, c = t.canvas, r = c.width / t.width;
        const y = Math.round((8 + t.rangeLanes * 16 + 1) * r), g = c.getContext("2d");
        const seen = new Set(t.training.label.map ? Array.from(t.training.label, (_, i) => {
          const x = (t.xOf(t.training.first[i]) + t.xOf(t.training.first[i + 1])) / 2;
          return Array.from(g.getImageData(Math.round(x * r), y, 1, 1).data).join();
        }) : []); return seen.size; })()"""
    )
    assert n_colors == 4


@pytest.mark.parametrize("width", [1280, 390])
def test_heading_that_a_link_leads_to_is_not_under_the_bar(open_page, width):
    page = open_page(diagnoses.ALL["fragmentation"](), width=width)

    page.evaluate("document.querySelector('html').style.scrollBehavior = 'auto'")
    page.evaluate("document.getElementById('checklist').scrollIntoView()")
    page.settle()

    bar = page.evaluate("document.querySelector('.top').getBoundingClientRect().bottom")
    heading = page.evaluate("document.getElementById('checklist').getBoundingClientRect().top")
    assert bar <= heading


@pytest.mark.parametrize("width", [390, 1440])
def test_everything_to_press_is_32_pixels_high(open_page, width):
    page = open_page(of_snapshot(read_snapshot(RECORDED / "fragmentation_oom.pickle")), width=width)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    small = page.evaluate("""
      [...document.querySelectorAll("button, select, summary, nav a, label, [type=search]")]
        .filter((e) => e.checkVisibility() && e.getBoundingClientRect().height < 31.5)
        .map((e) => `${e.tagName} ${e.textContent.trim()} ${e.getBoundingClientRect().height}`)
    """)

    assert small == []
