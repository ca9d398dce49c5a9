"""What holds the memory: source lines, names of the program, stranders, segments."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from msgspec.structs import replace

from fragdoctor.model.census import HoldingKind, Owner
from fragdoctor.model.diagnosis import (
    Cause,
    Diagnosis,
    FunctionHolder,
    HolderReport,
    Moment,
    OwnerReport,
)
from fragdoctor.model.finding import WORTH_SAYING, Location
from fragdoctor.model.gpus import CUBLAS_WORKSPACES
from fragdoctor.model.phases import Category
from fragdoctor.report import document as doc
from fragdoctor.report.document import Detail, Style, dim, location_text
from fragdoctor.report.views.device_memory import MIN_SHOWN_SHARE, graphic, moment_of, when
from fragdoctor.report.words import CATEGORY_NAMES, LIVE_WHEN, by_device
from fragdoctor.trace.stacks import USER, classify_file
from fragdoctor.units import format_count, format_size, plural

_MAX_HOLDERS: Final = 3
_MAX_SEGMENTS: Final = 5


def short_holders(diagnosis: Diagnosis) -> doc.Section:
    """Return the lines that hold most memory, and what they strand: at most three."""
    device = diagnosis.verdict.device
    mine = [h for h in diagnosis.holders if device in (None, h.device) and h.held_bytes]
    one = _main_function(diagnosis, mine)
    has_names = any(
        o.owner.kind is not HoldingKind.UNNAMED
        for o in diagnosis.owners
        if device in (None, o.device)
    )
    if has_names and diagnosis.verdict.cause is not Cause.FRAGMENTATION:
        return short_owners(diagnosis, one)
    rows: list[HolderReport | FunctionHolder] = [] if one is None else [one]
    rest = [h for h in mine if one is None or not one.has(h)]
    rows += sorted(rest, key=lambda h: -h.held_bytes)[: _MAX_HOLDERS - len(rows)]
    stranded = Counter[Location | None]()
    for strander in diagnosis.stranders:
        if device in (None, strander.device):
            stranded[strander.location] += strander.stranded_bytes

    def strands(row: HolderReport | FunctionHolder) -> str:
        lines = [h for h in mine if row.has(h)] if isinstance(row, FunctionHolder) else [row]
        n_bytes = sum(stranded[place] for place in {h.location for h in lines})
        return f"strands {format_size(n_bytes)}" if n_bytes else ""

    shows_stranders = diagnosis.verdict.cause is Cause.FRAGMENTATION and any(map(strands, rows))
    table = doc.tabled(
        rows,
        doc.Column("", lambda h: doc.strong(format_size(h.held_bytes)), "right"),
        *([doc.Column("", strands, style=Style.DIM)] if shows_stranders else []),
        doc.Column("", _place, "path"),
        notes=lambda h: (
            [*_held_by(diagnosis, h), *_within(h)] if isinstance(h, HolderReport) else []
        ),
    )
    moment = rows[0].moment if rows else Moment.END
    more = "; strands: the free memory held back" if shows_stranders else ""
    note = f"live {LIVE_WHEN[moment]}{more}"
    return doc.Section("Who holds it", [table], note, detail=Detail.SHORT)


_MOST: Final = 0.5
"""Share of what all lines hold: a function with more is named as a single holder."""


def _main_function(diagnosis: Diagnosis, holders: Sequence[HolderReport]) -> FunctionHolder | None:
    """Return the function whose lines together hold most of the memory, or None."""
    total = sum(h.held_bytes for h in holders)
    return next(
        (
            f
            for f in diagnosis.functions
            if f.held_bytes > _MOST * total and f.device in {h.device for h in holders}
        ),
        None,
    )


def _place(row: HolderReport | FunctionHolder) -> doc.Content:
    """Return a line of the program, or a function and its lines."""
    return doc.code(row.short if isinstance(row, FunctionHolder) else location_text(row.location))


def _held_by(diagnosis: Diagnosis, holder: HolderReport) -> list[doc.Content]:
    """Return which name of the program holds most of what a line made, if one does."""
    return [
        [dim("held by "), *owner_text(o.owner)]
        for o in diagnosis.owners
        if o.owner.kind is not HoldingKind.UNNAMED
        and (o.device, o.location) == (holder.device, holder.location)
        and 2 * o.held_bytes > holder.held_bytes
    ]


def _within(holder: HolderReport) -> list[doc.Content]:
    """Return where in the model and in a library most of it was made, if that adds something."""
    places = []
    if holder.module:
        places.append(f"the module {holder.module}")
    if holder.within is not None and holder.within != holder.location:
        name = re.split(r"[/\\](?:site|dist)-packages[/\\]", holder.within.filename)[-1]
        places.append(str(replace(holder.within, filename=name)))
    if places:
        return [dim(f"most in {', '.join(places)}")]
    if holder.location is None and holder.held_bytes in CUBLAS_WORKSPACES:
        return [dim("the size of a workspace of cuBLAS")]
    if not holder.categories or not set(holder.categories) <= set(_TELLING):
        return []
    return [dim(f"most of it {' and '.join(CATEGORY_NAMES[c] for c in holder.categories)}")]


_TELLING: Final = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
"""Categories worth naming for a line that does not show them: a trainer's call, a C++ thread."""


def _gpu_column(diagnosis: Diagnosis) -> list[doc.Column]:
    several = len([d for d in diagnosis.devices if d.reserved_bytes]) > 1
    return [doc.Column("GPU", "device")] if several else []


def stranders_section(diagnosis: Diagnosis) -> doc.Section:
    """Return the live blocks that keep free memory in their segments, worst first."""
    stranders = [p for p in diagnosis.stranders if p.stranded_bytes]
    table = doc.tabled(
        sorted(stranders, key=by_device(diagnosis)),
        *_gpu_column(diagnosis),
        doc.Column("frees", "stranded_bytes", style=Style.STRONG),
        doc.Column("blocks", "n_blocks"),
        doc.Column("size", "block_bytes"),
        doc.Column("age in events", "age_events", from_width=80),
        doc.Column("allocated at", "location"),
        notes=lambda p: stack_lines(p.stack, p.location),
    )
    blocks: list[doc.DocumentBlock] = [table]
    if n_shared := len(diagnosis.stranders) - len(stranders):
        shared = plural(n_shared, "further group shares", "further groups share")
        text = f"{shared} segments with others: freeing just one of them returns nothing."
        blocks.append(doc.Paragraph(dim(text)))
    note = f"live blocks that keep free memory from being used{_stranders_when(diagnosis)}"
    return doc.Section("What strands memory", blocks, note, "stranders", detail=Detail.FULL)


def _stranders_when(diagnosis: Diagnosis) -> str:
    """Return a note that names the moment of the list, or "" if nothing happened after it."""
    moment = moment_of(diagnosis, diagnosis.verdict.device)
    if moment is None or moment.is_end:
        return ""
    return when(moment) if moment.moment is Moment.FAILURE else ", at the end"


def holders_section(diagnosis: Diagnosis) -> doc.Section:
    """Return live memory by source line at the failure, at the peak and at the end."""
    table = doc.tabled(
        sorted(diagnosis.holders, key=by_device(diagnosis)),
        *_gpu_column(diagnosis),
        *_moment_columns(diagnosis.holders),
        doc.Column("blocks", "n_blocks"),
        doc.Column("allocated at", "location"),
        notes=lambda h: [*_within(h), *stack_lines(h.stack, h.location)],
    )
    icicle = graphic(diagnosis, "icicle", "Nothing was allocated on this device.")
    blocks, note = [*icicle, table], "live memory by source line"
    return doc.Section("Holders", blocks, note, "holders", detail=Detail.FULL)


def _moment_columns(holders: Sequence[HolderReport]) -> list[doc.Column]:
    """Return a column for each moment that the input shows, the deciding one first."""
    has_peak = any(h.peak_bytes is not None for h in holders)
    of_failure = [h for h in holders if h.failure_bytes is not None]
    went_on = any(h.failure_bytes != h.now_bytes for h in of_failure)
    shown = [
        ("at failure", "failure_bytes") if of_failure else None,
        ("at peak", "peak_bytes") if has_peak else None,
        ("at the end" if has_peak else "now", "now_bytes") if went_on or not of_failure else None,
    ]
    found = [pair for pair in shown if pair is not None]
    return [
        doc.Column(title, name, style=Style.STRONG if i == 0 else None)
        for i, (title, name) in enumerate(found)
    ]


def stack_lines(stack: Sequence[Location], known: Location | None) -> list[doc.Content]:
    """Return the lines of a stack except the known one, innermost first, counting libraries'."""
    lines: list[doc.Content] = []
    others = [f for f in stack if f != known]
    for is_own, run in groupby(others, key=lambda f: classify_file(f.filename) == USER):
        frames = list(run)
        if is_own:
            lines += [dim(location_text(f)) for f in frames]
        else:
            lines.append(dim(plural(len(frames), "frame of a library", "frames of libraries")))
    return lines


def segments_section(diagnosis: Diagnosis) -> doc.Section:
    """Return the segments with most stranded free memory, if that is part of the story."""
    blocks = graphic(diagnosis, "map", "PyTorch holds no segment on this device.")
    worst = diagnosis.worst_segments
    if not worst or not _says_something(diagnosis):
        return doc.Section("Segments", blocks, id="segments")
    least = worst[0].stranded_bytes * MIN_SHOWN_SHARE
    shown = [s for s in worst[:_MAX_SEGMENTS] if s.stranded_bytes >= least]
    # If some of the free memory can be returned page by page, only the stranded part counts.
    is_paged = any(s.stranded_bytes != s.free_bytes for s in shown)
    freed = ("stranded", "stranded_bytes") if is_paged else ("free", "free_bytes")
    blocks.append(
        doc.tabled(
            shown,
            doc.Column("size", "total_bytes"),
            doc.Column(*freed),
            doc.Column("largest hole", "largest_hole_bytes"),
        )
    )
    count = format_count(diagnosis.n_stranded_segments)
    note = (
        f"GPU {shown[0].device}, the {len(shown)} of {count} with most stranded memory"
        f"{_stranders_when(diagnosis)}"
    )
    return doc.Section("Segments", blocks, note, "segments", detail=Detail.FULL)


def _says_something(diagnosis: Diagnosis) -> bool:
    if diagnosis.verdict.cause is Cause.FRAGMENTATION:
        return True
    device = diagnosis.worst_segments[0].device
    return any(
        (f.stranded_free_bytes or 0) >= f.reserved_bytes * WORTH_SAYING
        for f in diagnosis.devices
        if f.device == device and f.reserved_bytes
    )


_MAX_OWNERS: Final = 4
_MIN_OWNER_SHARE: Final = 0.02
"""Share of the largest owner: a row with less only distracts."""


def short_owners(diagnosis: Diagnosis, function: FunctionHolder | None) -> doc.Section:
    """Return at most four rows: names that hold most memory, and lines for memory without a name.

    ``function`` allocates most of the memory over several lines, so a single line says little.
    """
    device = diagnosis.verdict.device
    mine = [o for o in diagnosis.owners if device in (None, o.device)]
    least = _MIN_OWNER_SHARE * max(o.held_bytes for o in mine)
    rows = sorted((o for o in mine if o.held_bytes >= least), key=lambda o: -o.held_bytes)
    table = doc.tabled(
        rows[:_MAX_OWNERS],
        doc.Column("", lambda o: doc.strong(format_size(o.held_bytes)), "right"),
        doc.Column("", lambda o: _owner_row(o, function), "wrap"),
        notes=_owner_notes,
    )
    when = f"live {LIVE_WHEN[mine[0].moment]}"
    return doc.Section("Who holds it", [table], when, detail=Detail.SHORT)


def _owner_row(row: OwnerReport, function: FunctionHolder | None) -> doc.Content:
    if row.owner.kind is HoldingKind.UNNAMED:
        return doc.code(doc.NO_STACK if row.location is None else row.location.short)
    made = ""
    if row.owner.kind is HoldingKind.GRAPH and function is not None and function.has(row):
        made = f", made in {function.short}"
    elif row.location is not None:
        made = f", made at {row.location.at}"
    return [*owner_text(row.owner), made]


def owner_text(owner: Owner) -> list[str | doc.Span]:
    """Return an owner of memory in words: ``agent.buffer`` (list of 4,096)."""
    if owner.kind is HoldingKind.UNNAMED:
        return [dim("no name found")]
    of_class = f" ({owner.class_name})" if owner.class_name and owner.name else ""
    inside = f" in {owner.scope}" if owner.scope else ""
    several = f" ({plural(owner.n_items, 'tensor')})" if owner.n_items > 1 else ""
    before, after = {
        HoldingKind.PARAMETERS: ("", f"{of_class}: parameters"),
        HoldingKind.GRADIENTS: ("", f"{of_class}: gradients"),
        HoldingKind.OPTIMIZER: ("", of_class),
        HoldingKind.CONTAINER: ("", f" ({owner.class_name} of {format_count(owner.n_items)})"),
        HoldingKind.GRAPH: ("autograd graph kept by ", f"{several}{inside}"),
        HoldingKind.CYCLE: ("reference cycle ", ""),
    }.get(owner.kind, ("", inside))
    return [before, doc.code(owner.name or f"a {owner.class_name}"), after]


def _owner_notes(found: OwnerReport) -> list[doc.Content]:
    """Return how items hold it, and its growth since the first census if that is most of it."""
    owner, through = found.owner, list[doc.Content]()
    if owner.through:
        through = [dim(f"through {', '.join(owner.through.split(' -> ')[1:])}")]
    if found.grown_bytes is None or 2 * found.grown_bytes < found.held_bytes:
        return through
    before, items = found.n_items_before or 0, ""
    if 0 < before < owner.n_items:
        items = f"from {format_count(before)} to {plural(owner.n_items, 'item')}, "
    return [
        *through,
        dim(f"has grown {items}by {format_size(found.grown_bytes)} since the first steps"),
    ]


def owners_section(diagnosis: Diagnosis) -> doc.Section:
    """Return all names that hold memory, or nothing without a census."""
    shown = sorted(diagnosis.owners, key=by_device(diagnosis))
    table = doc.tabled(
        shown if any(o.owner.kind is not HoldingKind.UNNAMED for o in shown) else [],
        *_gpu_column(diagnosis),
        doc.Column("held", "held_bytes", style=Style.STRONG),
        doc.Column("blocks", "n_blocks"),
        doc.Column("by", lambda o: owner_text(o.owner), "wrap"),
        doc.Column("allocated at", "location"),
        notes=_owner_notes,
    )
    when = f"live {LIVE_WHEN[shown[0].moment]}, by the program's own names" if shown else ""
    return doc.Section("Held by name", [table], when, "owners", detail=Detail.FULL)
