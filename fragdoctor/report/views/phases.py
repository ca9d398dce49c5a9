"""The phases of training: the peak of each, and what it is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.phases import (
    Category,
    CategoryShare,
    PhaseFigures,
    PhaseReport,
    TrainingPhase,
)
from fragdoctor.report import document as doc
from fragdoctor.report.document import NO_STACK, Detail, Style, code, dim, location_text, strong
from fragdoctor.report.words import CATEGORY_NAMES, PHASE_NAMES, shown_first, sureness
from fragdoctor.units import format_count, format_share, format_size

# A phase's row names what it holds down to this share of its peak.
_MIN_HELD_SHARE: Final = 0.05
_MAX_HELD: Final = 2
_PEAK_PLACES: Final = {
    TrainingPhase.UNKNOWN: "",
    TrainingPhase.SETUP: "the setup",
    TrainingPhase.FORWARD: "the forward pass",
    TrainingPhase.BACKWARD: "the backward pass",
    TrainingPhase.OPTIMIZER: "the optimizer step",
    TrainingPhase.FORWARD_BACKWARD: "the forward or the backward pass",
}
_KEPT_MEANS: Final = (
    "Kept: outlives its step and is none of the others, as workspaces of libraries, caches, copies "
    "of weights, or a leak."
)


def phase_sections(diagnosis: Diagnosis) -> list[doc.Section]:
    """Return the training phases of each device: the peak of each, and what it is made of."""
    found = {p.device: p for p in diagnosis.phases if len(p.phases) > 1}
    return [_phases(found[d]) for d in shown_first(diagnosis, list(found))]


def _phases(report: PhaseReport) -> doc.Section:
    def marked(phase: PhaseFigures, text: str) -> doc.Content:
        return strong(text) if phase.phase is report.peak_phase else text

    table = doc.tabled(
        report.phases,
        doc.Column("phase", lambda p: marked(p, PHASE_NAMES[p.phase])),
        doc.Column("passes", _n_passes, "right"),
        doc.Column("usual peak", _usual_peak, "right"),
        doc.Column("worst", lambda p: marked(p, format_size(p.worst_peak_bytes)), "right"),
        doc.Column("mostly", lambda p: _held(p.held), "wrap"),
        label="Training phases",
        detail=Detail.FULL,
    )
    place = _PEAK_PLACES[report.peak_phase]
    peak = f"The peak of {format_size(report.peak_bytes)} is in {place}." if place else ""
    said = " ".join(s for s in (peak, _limits(report)) if s)
    has_kept = any(
        s.category is Category.KEPT and s.n_bytes >= _MIN_HELD_SHARE * report.peak_bytes
        for s in (*report.at_peak, *report.at_rest)
    )
    blocks = (
        table,
        doc.Paragraph(said, detail=Detail.FULL),
        _categories(report),
        doc.Paragraph(dim(_KEPT_MEANS) if has_kept else "", detail=Detail.FULL),
    )
    note = f"GPU {report.device}, allocated memory by phase of a training step"
    return doc.Section("Phases", blocks, note, f"phases-{report.device}", report.device)


def _n_passes(p: PhaseFigures) -> str:
    return "unknown" if p.n_passes is None else format_count(p.n_passes)


def _usual_peak(p: PhaseFigures) -> str:
    return "-" if p.n_passes is None else format_size(p.median_peak_bytes)


def _held(shares: Sequence[CategoryShare]) -> str:
    """Return what holds most of a peak, in a few words."""
    total = sum(s.n_bytes for s in shares)
    large = [s for s in shares if s.n_bytes >= _MIN_HELD_SHARE * total][:_MAX_HELD]
    return ", ".join(
        f"{CATEGORY_NAMES[s.category]} {format_share(s.n_bytes, total)}" for s in large
    )


def _categories(report: PhaseReport) -> doc.Table:
    peak = {s.category: s.n_bytes for s in report.at_peak}
    rest = {s.category: s.n_bytes for s in report.at_rest}

    def between_steps(share: CategoryShare) -> str:
        return format_size(rest.get(share.category, 0)) if report.at_rest else "-"

    return doc.tabled(
        [*report.at_peak, *(s for s in report.at_rest if s.category not in peak)],
        doc.Column("memory", lambda s: CATEGORY_NAMES[s.category]),
        doc.Column("at peak", lambda s: format_size(peak.get(s.category, 0)), "right",
                   style=Style.STRONG),
        doc.Column("between steps", between_steps, "right"),
        doc.Column("sure", sureness),
        doc.Column("mostly from", lambda s: code(_main_line(s)), "path"),
        notes=lambda s: [dim(location_text(x.location)) for x in s.lines[1:]],
        label="Memory at the peak by category",
        detail=Detail.FULL,
    )  # fmt: skip


def _main_line(share: CategoryShare) -> str:
    """Return the line that holds most of a category, without the folders of its file."""
    place = share.lines[0].location if share.lines else None
    return NO_STACK if place is None else place.short


def _limits(report: PhaseReport) -> str:
    """Return what could not be distinguished and why, "" where nothing is missing."""
    if not report.reason:
        return ""
    what = "Forward and backward" if report.method == "lifetimes" else "Activations and caches"
    return f"{what} cannot be distinguished: {report.reason}."
