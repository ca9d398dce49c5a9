"""The phases of training, as the reports print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fragdoctor.analysis.result import CategorySum, PhaseAnalysis
from fragdoctor.model.finding import Confidence
from fragdoctor.model.phases import (
    Category,
    CategoryShare,
    LineBytes,
    Phase,
    PhaseFigures,
    PhaseReport,
    PhaseSpan,
)
from fragdoctor.rules.context import Context

MAX_SPANS: Final = 1000
# Share of the bytes of a category that must be likely for the whole to be called so.
MIN_LIKELY: Final = 0.9

PHASES: Final = (
    Phase.SETUP,
    Phase.FORWARD,
    Phase.BACKWARD,
    Phase.OPTIMIZER,
    Phase.FORWARD_BACKWARD,
)
"""In the order of the labels of ``analysis/passes.py``."""

CATEGORIES: Final = (
    Category.PARAMETERS,
    Category.GRADIENTS,
    Category.OPTIMIZER_STATE,
    Category.ACTIVATIONS,
    Category.INPUTS,
    Category.TEMPORARIES,
    Category.KEPT,
    Category.UNKNOWN,
)
"""In the order of the numbers of ``analysis/categories.py``."""


def phase_report(context: Context) -> PhaseReport | None:
    """Return the phases of one device; None without a trace."""
    if context.analysis is None or context.analysis.phases is None:
        return None
    found = context.analysis.phases
    at_peak = _shares(context, found.at_peak)
    unknown = sum(s.n_bytes for s in at_peak if s.category is Category.UNKNOWN)
    total = sum(s.n_bytes for s in at_peak)
    return PhaseReport(
        device=context.analysis.device,
        method=found.method,
        reason=found.reason,
        phases=tuple(
            PhaseFigures(
                phase=PHASES[p.label],
                n_passes=p.n_passes,
                median_peak_bytes=p.median_peak_bytes,
                worst_peak_bytes=p.worst_peak_bytes,
                worst_event=p.worst_state,
                held=_shares(context, p.held),
            )
            for p in found.phases
        ),
        peak_phase=Phase.UNKNOWN if found.peak_label < 0 else PHASES[found.peak_label],
        peak_bytes=found.peak_bytes,
        at_peak=at_peak,
        at_rest=_shares(context, found.at_rest),
        rest_bytes=found.rest_bytes,
        coverage=0.0 if not total else (total - unknown) / total,
        spans=_spans(found),
        n_spans=len(found.labels),
    )


def _shares(context: Context, sums: Sequence[CategorySum]) -> tuple[CategoryShare, ...]:
    return tuple(
        CategoryShare(
            category=CATEGORIES[s.category],
            n_bytes=s.n_bytes,
            n_blocks=s.n_blocks,
            confidence=(
                Confidence.LIKELY
                if s.likely_bytes >= MIN_LIKELY * s.n_bytes
                else Confidence.POSSIBLE
            ),
            lines=tuple(LineBytes(context.frame(f), n) for f, n in s.lines),
        )
        for s in sums
    )


def _spans(found: PhaseAnalysis) -> tuple[PhaseSpan, ...]:
    """Return the passes in order; of too many the longest."""
    length = np.diff(found.first)
    kept = np.sort(np.argsort(-length, kind="stable")[:MAX_SPANS])
    return tuple(
        PhaseSpan(
            PHASES[int(found.labels[i])],
            int(found.first[i]),
            int(found.first[i + 1]),
            int(found.pass_peak_bytes[i]),
        )
        for i in kept.tolist()
        if len(found.labels)
    )
