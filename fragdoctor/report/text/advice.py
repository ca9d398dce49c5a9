"""What to do, best first, and what would not help."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.diagnosis import Diagnosis, Recommendation
from fragdoctor.report.base import Verbosity
from fragdoctor.report.phrases import evidence_text, location_text, predicted_text
from fragdoctor.report.text.page import INDENT, Column, Page
from fragdoctor.units import format_count, format_size

_SHOWN: Final = 5
_LABEL_WIDTH: Final = 11


def write_recommendations(page: Page, diagnosis: Diagnosis) -> None:
    """Write the ranked recommendations, each with its reason, proof, price and check."""
    advice = diagnosis.recommendations
    if not advice:
        return
    page.heading("What to do", "best first")
    verbose = page.options.verbosity is Verbosity.VERBOSE
    shown = advice if verbose else advice[:_SHOWN]
    number_width = len(str(len(shown))) + 2
    for i, one in enumerate(shown):
        if i:
            page.blank()
        _write_one(page, one, number_width)
    if len(advice) > len(shown):
        page.blank()
        n_more = format_count(len(advice) - len(shown))
        page.paragraph((f"{n_more} more with --verbose", "dim"))


def write_rejected(page: Page, diagnosis: Diagnosis) -> None:
    """Write the popular settings that would not help here, with the number that shows it."""
    if not diagnosis.rejected:
        return
    page.heading("Would not help here")
    rows = [
        [r.setting.removeprefix("PYTORCH_CUDA_ALLOC_CONF=") or r.title or r.change, _reason(r)]
        for r in diagnosis.rejected
    ]
    shown = rows if page.options.verbosity is Verbosity.VERBOSE else rows[:_SHOWN]
    columns = [Column("list", max_width=max(24, page.width * 3 // 7)), Column("wrap")]
    page.table(columns, [[setting, (reason, "dim")] for setting, reason in shown])
    if len(rows) > len(shown):
        n_more = format_count(len(rows) - len(shown))
        page.paragraph((f"{n_more} more with --verbose", "dim"))


def _reason(rejected: Recommendation) -> str:
    # What was replayed says its outcome in "why" already.
    is_said = rejected.predicted.method in {"replay", "estimate"}
    predicted = "" if is_said else predicted_text(rejected.predicted)
    return "; ".join(x for x in (rejected.why.rstrip("."), predicted) if x) or "-"


def _write_one(page: Page, one: Recommendation, number_width: int) -> None:
    page.labelled(
        (f"{one.rank}.", "bold"),
        [(one.title, "bold"), (f"  ({one.confidence})", "dim")],
        indent=INDENT,
        label_width=number_width,
    )
    indent = INDENT + number_width
    if one.setting:
        page.verbatim((one.setting, "bold cyan"), indent=indent)
    if one.change:
        page.paragraph((one.change, "cyan"), indent=indent)
    verbose = page.options.verbosity is Verbosity.VERBOSE
    lines: list[tuple[str, str]] = [("Why", one.why), ("Predicted", predicted_text(one.predicted))]
    if one.saves_bytes and one.predicted.method == "none":
        lines.append(("Saves", f"up to {format_size(one.saves_bytes)} (not replayed)"))
    places = one.locations if verbose else one.locations[:1]
    lines += [("At", location_text(place)) for place in places]
    lines.append(("Cost", one.cost))
    lines += [("Mind", caveat) for caveat in one.caveats]
    lines.append(("Verify", one.verify))
    if verbose:
        lines.append(("Evidence", "; ".join(evidence_text(e) for e in one.evidence)))
    for label, body in lines:
        if body:
            page.labelled(
                (label, "dim"),
                body,
                indent=indent,
                label_width=_LABEL_WIDTH,
                path=label == "At",
            )
