"""What ``fragdoctor rehearse`` says: fits or not, where it ends, then the whole diagnosis."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fragdoctor.model.rehearsal import Rehearsal, RehearsalResult
from fragdoctor.report import document as doc
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.document import Style, code, dim
from fragdoctor.report.views import analyze
from fragdoctor.units import format_size, plural

_MOST_GPUS: Final = 6


def document(result: RehearsalResult, options: RenderOptions) -> doc.ReportDocument:
    """Return what a rehearsal found, and the diagnosis of its snapshot."""
    found = result.rehearsal
    diagnosed = analyze.document(result.diagnosis, options)
    answer = summary(result)
    return replace(
        diagnosed,
        title="Rehearsal",
        headline=doc.Span(answer, Style.GOOD if found.fits else Style.BAD),
        brief=[answer, *diagnosed.brief],
        lead=[
            doc.Facts(_facts(result)),
            doc.Gap(),
            doc.Paragraph(diagnosed.headline),
            *diagnosed.lead,
        ],
        sections=[*diagnosed.sections, _assumed(found), _unmodelled(found)],
        tone=Style.GOOD if found.fits else Style.BAD,
        kicker=f"{diagnosed.kicker}, rehearsed without a GPU",
    )


def page(result: RehearsalResult, options: RenderOptions) -> str:
    """Return the document as a page with interactive graphics."""
    from fragdoctor.report.page.page import render_page  # noqa: PLC0415 - numpy and jinja2

    return render_page(result.diagnosis, document(result, options))


def summary(result: RehearsalResult) -> str:
    """Return the answer in one sentence."""
    found = result.rehearsal
    oom = found.out_of_memory
    if oom is not None:
        where = "" if oom.location is None else f" at {oom.location.short}"
        return (
            f"Does not fit in {_budget(found)}: runs out of memory in step {oom.step + 1}{where}, "
            f"asking for {format_size(oom.requested_bytes)}."
        )
    needs = result.needs_bytes or found.peak_reserved_bytes
    if found.capacity_bytes is None:
        return f"Needs {format_size(needs)}, CUDA context not counted."
    return f"Fits in {_budget(found)}; {format_size(needs)} would be enough."


def _budget(found: Rehearsal) -> str:
    size = format_size(found.capacity_bytes or 0)
    return f"the {size} that PyTorch has on {found.gpu}" if found.is_known_gpu else size


def _facts(result: RehearsalResult) -> list[tuple[str, doc.Content]]:
    found = result.rehearsal
    steps = plural(found.steps, "step") if found.steps else "no optimizer step"
    end = f", until {found.stopped}" if found.stopped else ", to the program's end"
    if found.out_of_memory is not None:
        end = " before it ran out of memory"
    peak = (
        f"{format_size(found.peak_allocated_bytes)} allocated, "
        f"{format_size(found.peak_reserved_bytes)} reserved"
    )
    facts: list[tuple[str, doc.Content]] = [
        ("Rehearsed", f"{steps}{end}, on PyTorch {found.torch_version}"),
        ("Peak", peak if found.fits else f"{peak} up to there"),
    ]
    if result.needs_bytes is not None:
        facts.append(("Fits on", _gpus(result)))
    if found.conf:
        facts.append(("Settings", code(found.conf)))
    facts.append(("Snapshot", code(found.snapshot)))
    facts += [("Note", note) for note in found.notes]
    return facts


def _gpus(result: RehearsalResult) -> str:
    names = result.fitting_gpus
    more = len(names) - _MOST_GPUS
    rest = f" and {plural(more, 'larger one')}" if more > 0 else ""
    return ", ".join(names[:_MOST_GPUS]) + rest if names else "none of the known GPUs"


def _assumed(found: Rehearsal) -> doc.Section:
    table = doc.tabled(
        found.assumptions,
        doc.Column("", "location"),
        doc.Column("operation", "operation"),
        doc.Column("assumed", "assumed", "wrap"),
        doc.Column("times", "count"),
        label="Assumed about values",
        shown=5,
    )
    return doc.Section("Assumed about values", [table], "nothing is computed", "assumed")


def _unmodelled(found: Rehearsal) -> doc.Section:
    table = doc.tabled(
        found.unmodelled,
        doc.Column("", lambda u: doc.size(u.n_bytes), "right"),
        doc.Column("", "what", "wrap"),
        label="Not in these figures",
    )
    said = doc.Paragraph(dim("The rehearsal sees what goes through PyTorch's caching allocator."))
    return doc.Section("Not in these figures", [table, said], id="unmodelled")
