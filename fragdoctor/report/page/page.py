"""The interactive page: the document of a diagnosis, with graphics that respond to the mouse.

The graphics' data travels in a compressed blob; its text reaches the page only as text nodes and
canvas text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from markupsafe import Markup
from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.analysis.result import DeviceAnalysis
from fragdoctor.errors import ConfigError
from fragdoctor.model.arrays import GroupSums, largest_groups
from fragdoctor.model.census import Census
from fragdoctor.model.comparison import Comparison, RunSide
from fragdoctor.model.diagnosis import DeviceFigures, Diagnosis, MomentFigures, Recommendation
from fragdoctor.model.hooks import report_progress
from fragdoctor.model.rehearsal import RehearsalResult
from fragdoctor.report import escape, html
from fragdoctor.report.document import Graphic, Paragraph, ReportDocument
from fragdoctor.report.markup import Child, ours, tag
from fragdoctor.report.page.blob import Sink
from fragdoctor.report.page.lives_data import MAX_BLOCKS, lives_data, segment_map_data
from fragdoctor.report.page.timeline_data import timeline_data
from fragdoctor.report.views.advice import VARIABLE, promise_of
from fragdoctor.trace.lives import Lives
from fragdoctor.units import format_size

WITHOUT_GRAPHICS: Final = (
    tag(
        "noscript",
        tag(
            "p",
            "The graphics need JavaScript; every figure is in the tables as well.",
            class_="none",
        ),
    ),
    tag(
        "p",
        "The graphics could not be drawn in this browser; every figure is in the tables as well.",
        class_="none",
        id="trouble",
        hidden=True,
    ),
)
"""What is said where no script runs."""


def explorer(graphics: Mapping[str, str]) -> Markup:
    """Return the place of all graphics; ``graphics`` says for each what stands there without it."""

    def graphic(name: str) -> Child:
        return (
            tag("div", class_="graphic", id=f"{name}-graphic", hidden=True),
            tag("p", graphics[name], class_="none", id=f"{name}-none", hidden=True),
        )

    def titled(title: str, name: str, note: str = "") -> Child:
        unit = [" ", tag("span", note, class_="unit")] if note else None
        return [tag("h3", title, unit), graphic(name)]

    unit = tag("span", class_="unit", id="timeline-unit")
    controls = tag(
        "div", class_="controls", id="explorer-bar", role="group", aria_label="Explorer controls"
    )
    panel = tag(
        "aside",
        class_="panel",
        id="explorer-panel",
        aria_label="What is held, and the chosen block",
    )
    note = "the same requests replayed under other settings"
    return tag(
        "section",
        tag("div", tag("h2", "Explorer ", unit), controls, class_="head"),
        tag("div", tag("div", graphic("timeline")), panel, class_="stage"),
        titled("What if", "whatif", note) if "whatif" in graphics else None,
        tag(
            "div",
            tag("div", titled("Segments", "map")),
            tag("div", titled("Events", "events")),
            class_="stage",
        ),
        titled("Who holds it", "icicle"),
        titled("Blocks", "blocks"),
        id="explorer",
        class_="explorer",
    )


def device_switch(labels: Mapping[str, str]) -> Markup:
    """Return the buttons that choose what the explorer shows."""
    buttons = [
        tag("button", label, type="button", data_show=key, aria_pressed="false")
        for key, label in labels.items()
    ]
    return tag(
        "div", buttons, class_="switch js", id="devices", role="group", aria_label="What is shown"
    )


def drop_area() -> Markup:
    """Return the place that takes files and pasted messages."""
    files = tag("input", type="file", id="files", multiple=True, hidden=True)
    return tag(
        "section",
        tag("p", tag("strong", "Drop files here"), ", or paste a message."),
        tag("p", tag("button", "Choose files", type="button", id="choose"), files),
        tag("p", id="state", class_="none", role="status"),
        id="drop",
        class_="drop",
        tabindex=0,
        aria_label="Drop files here",
    )


TIMELINE_BUDGET: Final = 1_500_000
"""The most compressed bytes of all timelines; base64 makes them 1.33 times as large in the file."""

LIVES_BUDGET: Final = 2_200_000
"""The most compressed bytes of all blocks over time."""

MAX_DEVICES: Final = 64

MAX_STACKS: Final = 4000
"""The most stacks in one picture; what the others hold is shown as one sum."""

_MAX_TEXT: Final = 200


class ShownDevice(Struct, frozen=True):
    """One subject of the explorer: a device, or one run of a comparison.

    Attributes:
        key: its name in the page's address.
        label: its name on the switch.
        moment: the moment that the report is about, where the graphics open.
    """

    key: str
    label: str
    analysis: DeviceAnalysis
    capacity_bytes: int | None
    moment: MomentFigures | None
    censuses: Sequence[Census] = ()


def shown_devices(diagnosis: Diagnosis) -> list[ShownDevice]:
    """Return the devices that have graphics."""
    shown = []
    for device, analysis in sorted(diagnosis.analyses.items())[:MAX_DEVICES]:
        f = diagnosis.figures_of(device) or DeviceFigures(device=device)
        name, censuses = f"GPU {device}", diagnosis.case.censuses
        one = ShownDevice(str(device), name, analysis, f.allowed_bytes, f.moment, censuses)
        shown.append(one)
    return shown


def encode_payload(diagnosis: Diagnosis, scale: float = 1.0, *, is_live: bool = False) -> str:
    """Return the data of all graphics, "" without a recording; a scale below 1 is coarser."""
    shown = shown_devices(diagnosis)
    wanted = str(diagnosis.verdict.device)
    return _encoded(
        shown,
        scale,
        device=next((s.key for s in shown if s.key == wanted), shown[0].key if shown else ""),
        whatif=whatif_data(diagnosis, is_live=is_live),
    )


def _encoded(shown: Sequence[ShownDevice], scale: float, **head: Any) -> str:
    """Return the data of what is shown, with further head entries, or "" if nothing is shown."""
    if not shown:
        return ""
    first = shown[0].analysis.trace
    sink = Sink.of(first.snapshot, first.stacks, scale)
    report_progress("Drawing the page")
    devices = {}
    for one in shown:
        trace = one.analysis.trace
        own = trace.snapshot is first.snapshot
        into = sink if own else sink.beside(trace.snapshot, trace.stacks)
        devices[one.key] = _device_data(one, into, scale / len(shown))
    head = {"devices": devices, **head, "text": sink.tables.encode(sink.blob)}
    return sink.blob.encode(head)


def _device_data(one: ShownDevice, sink: Sink, share: float) -> dict[str, Any]:
    """Return the JSON part of one device; ``share`` is its share of the page's budget."""
    # The icicle and the map come first: their stacks matter most if the tables fill up.
    data: dict[str, Any] = {
        "icicle": icicle_data(one.analysis, sink, one.moment),
        "map": segment_map_data(one.analysis, sink, int(MAX_BLOCKS * share)),
        "lives": lives_data(one.analysis, sink, int(LIVES_BUDGET * share), one.censuses),
        "capacity": one.capacity_bytes,
        **opening(one.moment),
    }
    budget = None if data["lives"] and data["lives"]["complete"] else TIMELINE_BUDGET * share
    return {**data, "timeline": timeline_data(one.analysis, sink, budget)}


def held_at(lives: Lives, state: int) -> GroupSums:
    """Return the allocated bytes after ``state`` events, by stack id (-1: none recorded)."""
    rows = lives.allocated_at(state)
    return largest_groups(lives.stack[rows], lives.size_bytes[rows])


def opening(moment: MomentFigures | None) -> dict[str, Any]:
    """Return the report's moment, at which the graphics open; no state means the end."""
    if moment is None:
        return {}
    name = moment.moment.value
    is_end = moment.is_end or moment.event is None
    return {
        "moment": {"name": name, "state": None if is_end else moment.event},
        "opens": "end" if is_end else name,
    }


def icicle_data(
    analysis: DeviceAnalysis, sink: Sink, moment: MomentFigures | None
) -> dict[str, Any] | None:
    """Return the JSON part of one device's icicles, or None if nothing was ever live."""
    states = {"end": analysis.n_events}
    if analysis.timeline is not None and analysis.n_events:
        states = {"peak": analysis.timeline.peak_allocated_state, **states}
    if moment is not None and moment.event is not None and not moment.is_end:
        states = {moment.moment.value: moment.event, **states}
    moments: dict[str, Any] = {}
    for name, state in states.items():
        held = held_at(analysis.trace.lives, state)
        if held.n_bytes.any():
            moments[name] = {"state": state, **_encode(held, sink)}
    return moments or None


def _encode(held: GroupSums, sink: Sink) -> dict[str, Any]:
    rest = slice(MAX_STACKS, None)
    return {
        "total": int(held.n_bytes.sum()),
        "n_blocks": int(held.n_blocks.sum()),
        "rest_bytes": int(held.n_bytes[rest].sum()),
        "rest_stacks": len(held.group[rest]),
        "stack": sink.blob.add([sink.stacks.page_stack(int(s)) for s in held.group[:MAX_STACKS]]),
        "bytes": sink.blob.add(held.n_bytes[:MAX_STACKS]),
        "blocks": sink.blob.add(held.n_blocks[:MAX_STACKS]),
    }


def whatif_data(diagnosis: Diagnosis, *, is_live: bool) -> dict[str, Any] | None:
    """Return the recorded run and every replayed variant, or None if nothing was replayed.

    A served page (``is_live``) can ask for replays, so it needs no variants.
    """
    device = diagnosis.verdict.device
    if device is None and diagnosis.devices:
        device = diagnosis.devices[0].device
    figures = diagnosis.figures_of(device)
    tried = [
        r
        for r in (*diagnosis.recommendations, *diagnosis.rejected)
        if r.predicted.method in {"replay", "estimate"} and r.predicted.peak_reserved_bytes
    ]
    if figures is None or device not in diagnosis.analyses or not (tried or is_live):
        return None
    variants = [_variant(r, diagnosis) for r in tried]
    # Settings are replayed at what PyTorch could have: less than the device under a memory limit.
    allowed = min(
        (v["capacity"] for v in variants if v["capacity"] and not v["is_change"]),
        default=figures.allowed_bytes,
    )
    return {
        "device": device,
        "live": is_live,
        "capacity": allowed,
        "recorded": {
            "name": "as recorded",
            "fits": not figures.ooms,
            "peak": figures.peak_reserved_bytes,
            "retries": figures.alloc_retries,
        },
        "least": figures.peak_allocated_bytes,
        "variants": variants,
    }


def _variant(one: Recommendation, diagnosis: Diagnosis) -> dict[str, Any]:
    name = one.setting.removeprefix(VARIABLE) or one.title
    p, promise = one.predicted, promise_of(one, diagnosis)
    end = None if p.margin_bytes is None else (p.peak_reserved_bytes or 0) + p.margin_bytes
    return {
        "name": escape.visible(name[:_MAX_TEXT]),
        "is_change": not one.setting,
        "fits": p.fits,
        "peak": p.peak_reserved_bytes,
        "retries": p.retries,
        "margin": p.margin_bytes,
        "capacity": end,
        "calls": p.driver_calls,
        "said": [promise.style.value, promise.text],
    }


MAX_PAGE_BYTES: Final = 5_000_000
SCALES: Final = (1.0, 0.5, 0.2, 0.05)
SCRIPTS: Final = (
    "decode",
    "drawing",
    "vector",
    "common",
    "envelope",
    "lives",
    "twin",
    "bands",
    "segment_bands",
    "timeline",
    "timeline_painting",
    "segment_map",
    "icicle",
    "tables",
    "whatif",
    "explorer",
    "main",
)


READING_SCRIPTS: Final = ("drawing", "common", "reading")
DROP_SCRIPTS: Final = ("drawing", "common", "drop")
WITHOUT_TRACE: Final = {
    "events": "This recording has no events that can be stepped through.",
    "whatif": "Nothing was replayed: that needs a recording of a run that failed or was tight.",
    "blocks": "This recording does not say which blocks lived when.",
}
COMPARED_GRAPHICS: Final = {
    **dict.fromkeys(("timeline", "map", "icicle"), "This run has nothing to draw here."),
    **{name: said for name, said in WITHOUT_TRACE.items() if name != "whatif"},
}


def page_of(result: Any, document: ReportDocument) -> str:
    """Return the page of a command's result: the explorer if it has one, else tables that sort."""
    match result:
        case Diagnosis():
            return render_page(result, document)
        case RehearsalResult():
            return render_page(result.diagnosis, document)
        case Comparison():
            return render_compared_page(result.runs, document)
    return render_reading_page(document)


def render_page(diagnosis: Diagnosis, document: ReportDocument, *, is_live: bool = False) -> str:
    """Return the whole page, below 5 MB: graphics are made coarser until it fits.

    A live page asks its server to replay what-ifs.

    Raises:
        ConfigError: even the coarsest page is larger.
    """
    blocks = [b for s in document.sections for b in s.blocks if isinstance(b, Graphic)]
    if blocks and not any(f.reserved_bytes or f.n_events for f in diagnosis.devices):
        return render_reading_page(document)
    graphics = {**{b.name: b.absent for b in blocks}, **WITHOUT_TRACE} if blocks else {}
    if whatif_data(diagnosis, is_live=is_live):  # the explorer draws it
        document = replace(document, sections=[s for s in document.sections if s.id != "what-if"])
    labels = {s.key: s.label for s in shown_devices(diagnosis)}
    labels |= {str(f.device): f"GPU {f.device}" for f in diagnosis.devices}
    return _explorer_page(
        document,
        graphics,
        dict(sorted(labels.items(), key=lambda item: int(item[0]))),
        lambda scale: encode_payload(diagnosis, scale, is_live=is_live),
        is_live=is_live,
    )


def render_compared_page(runs: Sequence[RunSide], document: ReportDocument) -> str:
    """Return the page of a comparison: two runs with analyses share an explorer.

    Raises:
        ConfigError: the coarsest page is larger than 5 MB.
    """
    shown = [
        ShownDevice(r.letter, f"Run {r.letter}", r.analysis, r.capacity_bytes, r.moment)
        for r in runs
        if r.analysis is not None
    ]
    if len(shown) != 2 or any(one.analysis.timeline is None for one in shown):
        return render_reading_page(document)
    first, last = (one.key for one in shown)
    return _explorer_page(
        document,
        COMPARED_GRAPHICS,
        {one.key: one.label for one in shown},
        lambda scale: _encoded(
            shown, scale, device=first, whatif=None, twins={first: last, last: first}
        ),
    )


def _explorer_page(
    document: ReportDocument,
    graphics: Mapping[str, str],
    labels: Mapping[str, str],
    payload: Callable[[float], str],
    *,
    is_live: bool = False,
) -> str:
    page = ""
    for scale in SCALES:
        parts = html.Parts(
            script=_script(SCRIPTS),
            style=html.source("page/reading.css") + html.source("page/explorer.css"),
            may_ask=is_live,
            link=tag("a", "Explorer", href="#explorer") if graphics else None,
            tools=device_switch(labels) if len(labels) > 1 else None,
            middle=explorer(graphics) if graphics else None,
            end=WITHOUT_GRAPHICS,
            data=tag("script", ours(payload(scale)), type="text/plain", id="data"),
        )
        page = html.page(document, parts)
        if len(page.encode()) <= MAX_PAGE_BYTES:
            return page
    raise ConfigError(
        f"The page would be {format_size(len(page.encode()))}, above its limit of 5 MB.",
        hint="Choose one device with --device, or take --format json.",
    )


def render_reading_page(document: ReportDocument) -> str:
    """Return a page whose tables sort."""
    parts = html.Parts(script=_script(READING_SCRIPTS), style=html.source("page/reading.css"))
    return html.page(document, parts)


def render_drop_page() -> str:
    """Return the page that takes dropped files and hands them to its server."""
    document = ReportDocument(
        title="Open a recording",
        headline="Open a recording, a message or a log.",
        brief=(),
        sections=(),
        lead=(
            Paragraph(
                "A memory snapshot, with its out-of-memory message, statistics and log; or the "
                "snapshots of several ranks. They stay on this machine."
            ),
        ),
    )
    parts = html.Parts(
        script=_script(DROP_SCRIPTS),
        style=html.source("page/reading.css") + html.source("page/drop.css"),
        may_ask=True,
        has_menu=False,
        middle=drop_area(),
        foot="Served by fragdoctor view on this machine, to this machine only.",
    )
    return html.page(document, parts)


def _script(names: Sequence[str]) -> str:
    return "\n".join(html.source(f"page/{name}.js") for name in names)
