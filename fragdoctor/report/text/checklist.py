"""The checklist: each step with its outcome, its figure, and the input that answered it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from fragdoctor.model.diagnosis import ChecklistItem, Diagnosis, Status
from fragdoctor.report.base import Verbosity
from fragdoctor.report.text.page import Cell, Column, Page
from fragdoctor.units import plural

# Short names for a narrow column; JSON and Markdown carry the full titles.
TITLES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "capacity": "Real capacity",
        "gap": "Gap",
        "retries": "Retries",
        "largest_free_block": "Largest free block",
        "fragmentation_ratio": "Fragmentation ratio",
        "outside_pytorch": "Outside PyTorch",
        "growth": "Growth",
        "size_diversity": "Variety of sizes",
        "capture_quality": "Recording",
        "settings": "Settings",
    }
)
_MARKS: Final[dict[Status, tuple[str, str]]] = {
    Status.PASS: ("ok", "green"),
    Status.WARN: ("warn", "yellow"),
    Status.FAIL: ("FAIL", "bold red"),
    Status.SKIP: ("skip", "dim"),
}
_DETAIL_INDENT: Final = 8
_SOURCES: Final = {"memory_stats": "stats", "oom message": "message", "user": "option"}


def write_checklist(page: Page, diagnosis: Diagnosis) -> None:
    """Write one line an item; details follow where an item is not simply passed."""
    items = diagnosis.checklist
    if not items:
        return
    page.heading("Checklist")
    verbose = page.options.verbosity is Verbosity.VERBOSE
    if not verbose and all(item.status is Status.SKIP for item in items):
        skipped = plural(len(items), "item")
        page.paragraph(
            [("skip  ", "dim"), f"all {skipped}: this input holds none of the figures they need"]
        )
        page.paragraph(("--verbose says for each what would answer it", "dim"), indent=8)
        return
    page.table(
        [Column(), Column(), Column("wrap"), Column()],
        [_row(item) for item in items],
        below=[_below(page, item) for item in items],
        below_indent=_DETAIL_INDENT,
    )


def _row(item: ChecklistItem) -> list[Cell]:
    value: Cell = item.value or "-"
    if item.status is Status.SKIP:
        # The reason is what there is to say.
        said = [x for x in (item.value, item.detail) if x]
        value = (". ".join(said) or "-", "dim")
    return [
        _MARKS[item.status],
        TITLES.get(item.id, item.title),
        value,
        (source_text(item.source), "dim"),
    ]


def source_text(source: str) -> str:
    """Return the inputs that answered an item, short enough for a column."""
    for long, short in _SOURCES.items():
        source = source.replace(long, short)
    return source.replace(" and ", ", ")


def _below(page: Page, item: ChecklistItem) -> list[Cell]:
    verbose = page.options.verbosity is Verbosity.VERBOSE
    shown = item.status in {Status.FAIL, Status.WARN} or (verbose and item.status is Status.PASS)
    return [(item.detail, "dim")] if item.detail and shown else []
