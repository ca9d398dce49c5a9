"""What ``fragdoctor rehearse --cure`` says: the cheapest change that fits, others, failed tries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from fragdoctor.model.prescription import (
    Numerics,
    Place,
    Prescription,
    Tried,
    by_place,
    lines_of,
)
from fragdoctor.report import document as doc
from fragdoctor.report.document import Style
from fragdoctor.units import format_share, format_size

NUMERICS: Final = {
    Numerics.EXACT: "exact gradients",
    Numerics.ROUNDING: "other precision",
    Numerics.DIFFERENT: "other results",
}
_AT: Final = {
    Place.BEFORE_OPTIMIZER: "Before ", Place.AFTER_OPTIMIZER: "After ", Place.OPTIMIZER: "In "
}  # fmt: skip
_PARTIAL: Final = "Not all of the program was rehearsed: what was not seen may need more."
_CUT_SHORT: Final = "Time ran out before all were tried; --time gives more."
_HOW: Final = (
    "Each line is a rehearsal of your unchanged program with that change made from outside; what "
    "it needs is replayed. Added compute counts matrix products, convolutions and attention. "
    "It is not time: on an H200, small programs took 1.3 times as long in smaller batches and 3.6 "
    "times with saved tensors on the host."
)


def document(found: Prescription) -> doc.ReportDocument:
    """Return the document of a search for changes."""
    answer, style = _answer(found)
    cure = found.cure
    lead: list[doc.DocumentBlock] = []
    if cure is not None and not found.fits:
        lead = [
            doc.Paragraph(["Cheapest change that fits: ", doc.strong(cure.title), "."]),
            doc.Paragraph(f"{_figures(found, cure)}."),
            *(_diff(found) if found.diff else _lines(found, cure)),
        ]
    rest = [one for one in shown(found.tried) if one is not cure]
    also: list[doc.DocumentBlock] = [_table(found, (one for one in rest if one.fits))]
    fails = (one for one in rest if not one.fits)
    simple = (one for one in rest if _is_plain(one))
    shorter = next((one for one in simple if cure is not None and _is_shorter(one, cure)), None)
    if shorter is not None:
        also += [doc.Paragraph(["In fewer lines: ", doc.strong(shorter.title), "."])]
        also += _lines(found, shorter)
    return doc.ReportDocument(
        title="Prescription",
        headline=doc.Span(answer, style),
        brief=[answer, *([cure.title] if cure is not None else [])],
        lead=lead,
        sections=[
            doc.Section("Also fits", also, id="also-fits"),
            doc.Section("Does not fit", [_table(found, fails)], id="fails"),
            doc.Section("Not tried", [_left_out(found)], id="not-tried", detail=doc.Detail.FULL),
            doc.Section("", [_notes(found)]),
        ],
        tone=style,
        kicker=found.target,
    )


def shown(tried: Sequence[Tried]) -> list[Tried]:
    """Return the most telling change of each kind: the cheapest that fits, or the lowest peak.

    A change that fits in fewer than half as many lines is a kind of its own. ``tried`` is in the
    order in which a reader would choose.
    """
    kinds: dict[tuple[str, ...], Tried] = {}
    for one in tried:
        kind = tuple(part.code for part in one.treatments)
        best = kinds.get(kind)
        if best is not None and _is_shorter(one, best):
            kind = (*kind, "shorter")
            best = kinds.get(kind)
        if best is None or (not best.fits and _need(one) < _need(best)):
            kinds[kind] = one
    return list(kinds.values())


def _is_shorter(one: Tried, other: Tried) -> bool:
    return one.fits and 2 * one.n_lines < other.n_lines


def _is_plain(one: Tried) -> bool:
    """Whether it is known where its lines go and what they cost, and the results stay."""
    is_known = one.extra_compute is not None and not one.is_open
    return is_known and one.numerics is Numerics.EXACT


def _need(one: Tried) -> float:
    return float("inf") if one.needs_bytes is None else one.needs_bytes


def _answer(found: Prescription) -> tuple[str, Style]:
    where = format_size(found.capacity_bytes)
    if found.gpu:
        where = f"the {where} that PyTorch has on {found.gpu}"
    needs = format_size(found.needs_bytes)
    if found.fits:
        end = " as far as it was rehearsed" if found.is_partial else ""
        return f"Fits in {where} as it is{end}: {needs} would be enough.", Style.GOOD
    if found.cure is None:
        return (
            f"Does not fit in {where} (needs {needs}), and no change tried makes it fit.",
            Style.BAD,
        )
    return f"Does not fit in {where} (needs {needs}).", Style.BAD


def needs_text(one: Tried) -> str:
    """Return what a change needs: at least what was seen, if its rehearsal was stopped there."""
    return f"{'at least ' if one.is_lower_bound else ''}{doc.size(one.needs_bytes)}"


def compute_text(one: Tried) -> str:
    """Return the compute cost of a change: ``+11% compute``."""
    if one.extra_compute is None:
        return "copies to the host"
    return f"+{format_share(one.extra_compute, 1)} compute" if one.extra_compute else "same compute"


def _results(found: Prescription, one: Tried) -> str:
    """Return what a change makes of the results; without training there are no gradients."""
    is_same = one.numerics is Numerics.EXACT and not found.trains
    return "same results" if is_same else NUMERICS[one.numerics]


def _figures(found: Prescription, one: Tried) -> str:
    if one.needs_bytes is None:
        return one.error
    each = " on each GPU" if one.n_gpus > 1 else ""
    needs = f"Needs {format_size(one.needs_bytes)}{each}"
    return f"{needs}, {compute_text(one)}, {_results(found, one)}"


def _diff(found: Prescription) -> list[doc.DocumentBlock]:
    said = "A copy of the program with these lines in it was rehearsed: it needs the same."
    return [doc.Code(found.diff), doc.Paragraph(doc.dim(said))]


def _lines(found: Prescription, one: Tried) -> list[doc.DocumentBlock]:
    """Return the code to write, or the framework's terms if code would only be a sketch."""
    at = found.optimizer_place
    blocks: list[doc.DocumentBlock] = []
    groups = by_place(one.treatments)
    for place, parts in groups:
        if at is not None and place in _AT:
            line = doc.code(at.at)
            blocks.append(doc.Paragraph([_AT[place], line, ", where the optimizer is made:"]))
        elif len(groups) > 1:  # lines with a place of their own
            blocks.append(doc.Paragraph([doc.strong(parts[0].title), ":"]))
        is_sketch = place is Place.OPEN and bool(parts[0].instead)
        if not is_sketch:
            blocks.append(doc.Code(lines_of(parts)))
        for part in (part for part in parts if part.instead):
            verb = "Write " if is_sketch else f"Or, to {part.title}, " if parts[1:] else "Or "
            blocks.append(doc.Paragraph([verb, doc.code(part.instead), "."]))
    return blocks


def _table(found: Prescription, tried: Iterable[Tried]) -> doc.Table:
    return doc.tabled(
        tried,
        doc.Column("", "title", "wrap"),
        doc.Column("needs", needs_text, "right"),
        doc.Column("", compute_text, from_width=70),
        doc.Column("", lambda one: _results(found, one), from_width=90),
        notes=lambda one: [doc.dim(one.error)] if one.error else [],
    )


def _left_out(found: Prescription) -> doc.Table:
    rows = [] if found.fits else found.left_out
    return doc.tabled(
        rows,
        doc.Column("", "code", "wrap"),
        doc.Column("", "reason", "wrap", style=Style.DIM),
    )


def _notes(found: Prescription) -> doc.Bullets:
    return doc.bullets(
        *map(doc.dim, found.notes),
        _PARTIAL if found.is_partial else "",
        _CUT_SHORT if found.is_cut_short else "",
        doc.dim("" if found.fits else _HOW),
    )
