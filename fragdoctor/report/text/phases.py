"""Training phases: the peak of each, and what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.phases import Category, CategoryShare, PhaseReport
from fragdoctor.report.base import Verbosity
from fragdoctor.report.phase_words import (
    CATEGORY_NAMES,
    KEPT_MEANS,
    PHASE_NAMES,
    limits_sentence,
    main_line,
    passes_text,
    peak_sentence,
    shown_phases,
    sureness,
)
from fragdoctor.report.phrases import location_text
from fragdoctor.report.text.page import Cell, Column, Page
from fragdoctor.units import format_share, format_size

# A phase's row names what it holds down to this share of its peak.
_MIN_SHARE: Final = 0.05
_MAX_NAMED: Final = 2


def write_phases(page: Page, diagnosis: Diagnosis) -> None:
    """Write the phases of each device where a trace shows any of training."""
    for report in shown_phases(diagnosis):
        _write_device(page, report)


def _write_device(page: Page, report: PhaseReport) -> None:
    page.heading("Phases", f"GPU {report.device}, allocated memory by phase of a training step")
    rows: list[list[Cell]] = [
        [
            (PHASE_NAMES[p.phase], "bold" if p.phase is report.peak_phase else ""),
            *passes_text(p),
            (format_size(p.worst_peak_bytes), "bold" if p.phase is report.peak_phase else ""),
            _held(p.held),
        ]
        for p in report.phases
    ]
    columns = [
        Column(title="phase"),
        Column(title="passes", align="right"),
        Column(title="usual peak", align="right"),
        Column(title="worst", align="right"),
        Column("wrap", title="mostly"),
    ]
    page.table(columns, rows)
    said = [peak_sentence(report), limits_sentence(report)]
    page.paragraph(" ".join(s for s in said if s))
    _write_categories(page, report)


def _held(shares: Sequence[CategoryShare]) -> str:
    """Return what holds most of a peak, in a few words."""
    total = sum(s.n_bytes for s in shares)
    large = [s for s in shares if s.n_bytes >= _MIN_SHARE * total][:_MAX_NAMED]
    return ", ".join(
        f"{CATEGORY_NAMES[s.category]} {format_share(s.n_bytes, total)}" for s in large
    )


def _write_categories(page: Page, report: PhaseReport) -> None:
    rest = {s.category: s.n_bytes for s in report.at_rest}
    at_peak = {s.category for s in report.at_peak}
    shares = [
        *report.at_peak,
        *(s for s in report.at_rest if s.category not in at_peak),
    ]
    verbose = page.options.verbosity is Verbosity.VERBOSE
    rows: list[list[Cell]] = []
    below: list[list[Cell]] = []
    for s in shares:
        is_there = s.category in at_peak
        rows.append(
            [
                CATEGORY_NAMES[s.category],
                (format_size(s.n_bytes if is_there else 0), "bold"),
                "-" if not report.at_rest else format_size(rest.get(s.category, 0)),
                sureness(s),
                main_line(s),
            ]
        )
        below.append([(location_text(x.location), "dim") for x in s.lines[1:]] if verbose else [])
    columns = [
        Column(title="memory"),
        Column(title="at peak", align="right"),
        Column(title="between steps", align="right"),
        Column(title="sure"),
        Column("path", title="mostly from"),
    ]
    page.table(columns, rows, below=below if verbose else [])
    if any(
        s.category is Category.KEPT and s.n_bytes >= _MIN_SHARE * report.peak_bytes for s in shares
    ):
        page.paragraph((KEPT_MEANS, "dim"))
