"""Words for training phases and categories of memory, shared by all formats."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Final

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Confidence
from fragdoctor.model.phases import Category, CategoryShare, Phase, PhaseFigures, PhaseReport
from fragdoctor.report.phrases import location_text, shown_first
from fragdoctor.units import format_count, format_size

PHASE_NAMES: Final = {
    Phase.SETUP: "setup",
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "backward",
    Phase.OPTIMIZER: "optimizer",
    Phase.FORWARD_BACKWARD: "fwd + bwd",
    Phase.UNKNOWN: "unknown",
}

CATEGORY_NAMES: Final = {
    Category.PARAMETERS: "parameters",
    Category.GRADIENTS: "gradients",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.ACTIVATIONS: "activations",
    Category.INPUTS: "inputs",
    Category.TEMPORARIES: "temporaries",
    Category.KEPT: "kept",
    Category.UNKNOWN: "unknown",
}


KEPT_MEANS: Final = (
    "Kept: outlives its step and is none of the others, as workspaces of libraries, caches, copies "
    "of weights, or a leak."
)


def shown_phases(diagnosis: Diagnosis) -> list[PhaseReport]:
    """Return the reports with anything to show, in the order of the report's devices."""
    found = {p.device: p for p in diagnosis.phases if len(p.phases) > 1}
    return [found[d] for d in shown_first(diagnosis, list(found))]


def sureness(share: CategoryShare) -> str:
    """Return how sure a category is, "-" for what is unknown."""
    if share.category is Category.UNKNOWN:
        return "-"
    return "likely" if share.confidence is Confidence.LIKELY else "possible"


def main_line(share: CategoryShare) -> str:
    """Return the line that holds most of a category, without the folders of its file."""
    place = share.lines[0].location if share.lines else None
    if place is not None:
        place = replace(place, filename=re.split(r"[/\\]", place.filename)[-1])
    return location_text(place)


def peak_sentence(report: PhaseReport) -> str:
    """Return which phase holds the peak, "" where that is unknown."""
    if report.peak_phase is Phase.UNKNOWN:
        return ""
    part = {
        Phase.SETUP: "the setup",
        Phase.OPTIMIZER: "the optimizer step",
        Phase.FORWARD_BACKWARD: "the forward or the backward pass",
    }.get(report.peak_phase, f"the {PHASE_NAMES[report.peak_phase]} pass")
    return f"The peak of {format_size(report.peak_bytes)} is in {part}."


def passes_text(figures: PhaseFigures) -> tuple[str, str]:
    """Return the number of passes and their usual peak, "unknown" and "-" without."""
    if figures.n_passes is None:
        return "unknown", "-"
    return format_count(figures.n_passes), format_size(figures.median_peak_bytes)


def limits_sentence(report: PhaseReport) -> str:
    """Return what could not be told and why, "" where nothing is missing."""
    if not report.reason:
        return ""
    if report.method == "lifetimes":
        return f"Forward and backward are not told apart: {report.reason}."
    return f"Activations and caches are not told apart: {report.reason}."
