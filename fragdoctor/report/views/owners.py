"""What holds the memory, by the program's own names."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.census import HoldingKind, Owner
from fragdoctor.model.diagnosis import Diagnosis, FunctionHolder, OwnerReport
from fragdoctor.report import document as doc
from fragdoctor.report.document import Detail, Style, dim, location_text
from fragdoctor.report.words import LIVE_WHEN, shown_first
from fragdoctor.units import format_count, format_size, plural

_MAX_ROWS: Final = 4
_MIN_SHARE: Final = 0.02
"""Share of the largest owner: a row with less only distracts."""


def short_owners(diagnosis: Diagnosis, function: FunctionHolder | None) -> doc.Section:
    """Return at most four rows: names that hold most memory, and lines for memory without a name.

    ``function`` allocates most of the memory over several lines, so a single line says little.
    """
    device = diagnosis.verdict.device
    mine = [o for o in diagnosis.owners if device in (None, o.device)]
    least = _MIN_SHARE * max(o.held_bytes for o in mine)
    rows = sorted((o for o in mine if o.held_bytes >= least), key=lambda o: -o.held_bytes)
    table = doc.tabled(
        rows[:_MAX_ROWS],
        doc.Column("", lambda o: doc.strong(format_size(o.held_bytes)), "right"),
        doc.Column("", lambda o: _row(o, function), "wrap"),
        notes=_notes,
    )
    when = f"live {LIVE_WHEN[mine[0].moment]}"
    return doc.Section("Who holds it", [table], when, detail=Detail.SHORT)


def _row(row: OwnerReport, function: FunctionHolder | None) -> doc.Content:
    if row.owner.kind is HoldingKind.UNNAMED:
        return doc.code(location_text(row.location))
    made = ""
    if row.owner.kind is HoldingKind.GRAPH and function is not None and function.has(row):
        made = f", made in {function.short}"
    elif row.location is not None:
        made = f", made at {row.location.at}"
    return [*owner_text(row.owner), made]


def owner_text(owner: Owner) -> list[str | doc.Span]:  # noqa: PLR0911 - one a kind
    """Return an owner of memory in words: ``agent.buffer`` (list of 4,096)."""
    name = doc.code(owner.name or f"a {owner.class_name}")
    inside = f" in {owner.scope}" if owner.scope else ""
    of_class = f" ({owner.class_name})" if owner.class_name and owner.name else ""
    match owner.kind:
        case HoldingKind.PARAMETERS:
            return [name, f"{of_class}: parameters"]
        case HoldingKind.GRADIENTS:
            return [name, f"{of_class}: gradients"]
        case HoldingKind.OPTIMIZER:
            return [name, of_class]
        case HoldingKind.CONTAINER:
            return [name, f" ({owner.class_name} of {format_count(owner.n_items)})"]
        case HoldingKind.GRAPH:
            several = f" ({plural(owner.n_items, 'tensor')})" if owner.n_items > 1 else ""
            return ["autograd graph kept by ", name, f"{several}{inside}"]
        case HoldingKind.CYCLE:
            return ["reference cycle ", name]
        case HoldingKind.UNNAMED:
            return [dim("no name found")]
        case _:
            return [name, inside]


def _notes(found: OwnerReport) -> list[doc.Content]:
    """Return how items hold it, and its growth since the first census if that is most of it."""
    owner, through = found.owner, list[doc.Content]()
    if owner.through:
        through = [dim(f"through {', '.join(owner.through.split(' -> ')[1:])}")]
    if found.grown_bytes is None or 2 * found.grown_bytes < found.held_bytes:
        return through
    before = found.n_items_before or 0
    items = f"from {format_count(before)} to {plural(owner.n_items, 'item')}, " if before else ""
    return [
        *through,
        dim(f"has grown {items}by {format_size(found.grown_bytes)} since the first steps"),
    ]


def owners_section(diagnosis: Diagnosis) -> doc.Section:
    """Return all names that hold memory, or nothing without a census."""
    order = shown_first(diagnosis, [o.device for o in diagnosis.owners])
    shown = sorted(diagnosis.owners, key=lambda o: order.index(o.device))
    several = len({o.device for o in shown}) > 1
    table = doc.tabled(
        shown if any(o.owner.kind is not HoldingKind.UNNAMED for o in shown) else [],
        *([doc.Column("GPU", "device")] if several else []),
        doc.Column("held", "held_bytes", style=Style.STRONG),
        doc.Column("blocks", "n_blocks"),
        doc.Column("by", lambda o: owner_text(o.owner), "wrap"),
        doc.Column("allocated at", "location"),
        notes=_notes,
    )
    when = f"live {LIVE_WHEN[shown[0].moment]}, by the program's own names" if shown else ""
    return doc.Section("Held by name", [table], when, "owners", detail=Detail.FULL)
