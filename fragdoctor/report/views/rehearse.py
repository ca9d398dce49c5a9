"""What ``fragdoctor rehearse`` says: whether it fits, where it ends, then the whole diagnosis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.gate.budgets import BudgetResult, Outcome, Reason
from fragdoctor.gate.judgement import CheckReport, FileJudgement
from fragdoctor.model.gpus import GPUS
from fragdoctor.model.rehearsal import (
    FailedRehearsal,
    LargestBatch,
    Rehearsal,
    RehearsalResult,
    RehearsalSweep,
)
from fragdoctor.report import document as doc
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.document import Style, code, dim
from fragdoctor.report.views import analyze
from fragdoctor.units import GIB, format_size, plural

_MOST_GPUS: Final = 6
_NEXT: Final = "Add --cure to try changes until one fits, or --unlimited to see how much it needs."


def document(
    result: RehearsalResult | RehearsalSweep, options: RenderOptions
) -> doc.ReportDocument:
    """Return a rehearsal's result and the diagnosis of its snapshot, or a table of several."""
    if isinstance(result, RehearsalSweep):
        return _table_of(result)
    found = result.rehearsal
    diagnosed = analyze.document(result.diagnosis, options, is_rehearsed=True)
    answer = _answer(found, result.needs_bytes)
    return replace(
        diagnosed,
        title="Rehearsal",
        headline=doc.Span(answer, _style(found)),
        brief=[answer, *diagnosed.brief],
        lead=[
            _facts(result),
            doc.Gap(),
            *([doc.Paragraph(diagnosed.headline)] if found.fits else []),  # else the answer says it
            *diagnosed.lead,
        ],
        sections=[*diagnosed.sections, _assumed(found), _unmodelled(found)],
        tone=_style(found),
        kicker=f"{diagnosed.kicker}, rehearsed without a GPU",
    )


def _style(found: Rehearsal) -> Style:
    if not found.fits:
        return Style.BAD
    return Style.WARN if found.is_partial else Style.GOOD


def _answer(found: Rehearsal, needs_bytes: int | None) -> str:
    """Return the answer in one sentence."""
    oom = found.out_of_memory
    if oom is not None:
        where = "" if oom.location is None else f" at {oom.location.short}"
        return (
            f"Does not fit in {_budget(found)}: runs out of memory in step {oom.step + 1}{where}, "
            f"asking for {format_size(oom.requested_bytes)}."
        )
    needs = needs_bytes or found.peak_reserved_bytes
    if found.is_partial:
        said = (
            f"Needs {format_size(needs)} or more, CUDA context not counted"
            if found.capacity_bytes is None
            else f"Fits in {_budget(found)} as far as it was rehearsed"
        )
        return f"{said}: not all of it was, as {found.partial_reason}."
    if found.capacity_bytes is None:
        return f"Needs {format_size(needs)}, CUDA context not counted."
    return f"Fits in {_budget(found)}; {format_size(needs)} would be enough."


def _budget(found: Rehearsal) -> str:
    size = format_size(found.capacity_bytes or 0)
    return f"the {size} that PyTorch has on {found.gpu}" if found.is_known_gpu else size


def _facts(result: RehearsalResult) -> doc.Facts:
    found = result.rehearsal
    steps = plural(found.steps, "step") if found.steps else "no whole step"
    if found.n_skipped:
        steps += f", {plural(found.n_skipped, 'round')} of its loops skipped as identical to others"
    end = f", until {found.stopped}" if found.stopped else ", to the program's end"
    if found.out_of_memory is not None:
        end = " before it ran out of memory"
    peak = (
        f"{format_size(found.peak_allocated_bytes)} allocated, "
        f"{format_size(found.peak_reserved_bytes)} reserved"
    )
    return doc.facts(
        ("Rehearsed", f"{steps}{end}, on PyTorch {found.torch_version}"),
        ("Peak", peak if found.fits else f"{peak} up to there"),
        ("Fits on", "" if result.needs_bytes is None else _gpus(result)),
        ("Settings", code(found.conf)),
        ("Snapshot", code(found.snapshot)),
        *(("Note", note) for note in found.notes),
        ("Next", "" if found.fits else _NEXT),
    )


def _gpus(result: RehearsalResult) -> str:
    """Return the smallest GPUs that suffice, one of each size: the first in the table."""
    names = result.fitting_gpus
    of_sizes: dict[int, str] = {}
    for name, gpu in GPUS.items():
        if name in names:
            of_sizes.setdefault(round(gpu.total_bytes / GIB), name)
    named = [of_sizes[size] for size in sorted(of_sizes)][:_MOST_GPUS]
    more = len(names) - len(named)
    rest = f" and {plural(more, 'other')}" if more > 0 else ""
    return ", ".join(named) + rest if names else "none of the known GPUs"


def _assumed(found: Rehearsal) -> doc.Section:
    table = doc.tabled(
        found.assumptions,
        doc.Column("", "location"),
        doc.Column("operation", "operation"),
        doc.Column("assumed", "assumed", "wrap"),
        doc.Column("times", "count"),
        shown=5,
    )
    return doc.Section("Assumed about values", [table], "nothing is computed", "assumed")


def _unmodelled(found: Rehearsal) -> doc.Section:
    table = doc.tabled(
        found.unmodelled,
        doc.Column("", "n_bytes"),
        doc.Column("", "what", "wrap"),
    )
    said = doc.Paragraph(dim("The rehearsal sees what goes through PyTorch's caching allocator."))
    return doc.Section("Not in these figures", [table, said], id="unmodelled")


def _table_of(sweep: RehearsalSweep) -> doc.ReportDocument:
    """Return several rehearsals as one table."""
    answers = sweep_answers(sweep)
    tone = Style.GOOD if sweep.fits and not sweep.failed else Style.BAD
    blocks = [_cases(sweep), doc.Bullets([_failure(case) for case in sweep.failed])]
    return doc.ReportDocument(
        title="Rehearsals",
        headline=doc.Span(answers[0], tone),
        brief=answers,
        lead=[doc.Bullets(answers[1:])],
        sections=[doc.Section("Rehearsals", blocks, id="rehearsals"), *_common(sweep)],
        tone=tone,
        kicker=f"{sweep.program}, rehearsed without a GPU",
    )


def sweep_answers(sweep: RehearsalSweep) -> list[str]:
    """Return the conclusions from several rehearsals together, a sentence each."""
    if sweep.largest_batches:
        return [_largest(found, sweep.largest_batches) for found in sweep.largest_batches]
    said = []
    for answer, fits in (("Fits", True), ("Does not fit", False)):
        if cases := [_case(r, sweep) for r in sweep.rehearsals if r.fits is fits]:
            said.append(f"{answer}: {'; '.join(cases)}.")
    return said or ["None of them could be rehearsed."]


def _largest(found: LargestBatch, every: Sequence[LargestBatch]) -> str:
    parts = []
    if len({other.gpu for other in every}) > 1:
        parts.append(f" on {found.gpu}")
    if len({other.conf for other in every}) > 1:
        parts.append(f" with {found.conf or 'default settings'}")
    where = "".join(parts)
    if found.batch is None:
        return f"No batch that was tried fits{where}."
    if found.fails_at is None:
        return f"Every batch that was tried fits{where}, up to {found.batch:,}."
    if found.fails_at == found.batch + 1:
        return f"The largest batch that fits{where} is {found.batch:,}."
    return (
        f"The largest batch that fits{where} is {found.batch:,} of those tried; "
        f"{found.fails_at:,} does not."
    )


def _cases(sweep: RehearsalSweep) -> doc.Table:
    every = sweep.rehearsals
    columns = [
        doc.Column("GPU", "gpu"),
        doc.Column("batch", "batch"),
        doc.Column("settings", lambda r: code(r.conf or "(default)"), "list"),
    ]
    told = [len({getattr(r, name) for r in every}) > 1 for name in ("gpu", "batch", "conf")]
    return doc.tabled(
        every,
        *(column for column, is_told in zip(columns, told, strict=True) if is_told),
        doc.Column("fits", _fits),
        doc.Column("peak", lambda r: _peak(r, r.peak_allocated_bytes), "right"),
        doc.Column("reserved", lambda r: _peak(r, r.peak_reserved_bytes), "right"),
        doc.Column("of", "capacity_bytes"),
        notes=_failing_place,
    )


def _fits(found: Rehearsal) -> doc.Content:
    if not found.fits:
        return doc.bad("no")
    return doc.Span("so far", Style.WARN) if found.is_partial else doc.good("yes")


def _peak(found: Rehearsal, n_bytes: int) -> str:
    is_complete = found.fits and not found.is_partial
    return f"{'' if is_complete else '>= '}{format_size(n_bytes)}"


def _failing_place(found: Rehearsal) -> list[doc.Content]:
    oom = found.out_of_memory
    if oom is None:
        return []
    asks = f"fails in step {oom.step + 1}, asking for {format_size(oom.requested_bytes)}"
    return [asks if oom.location is None else [f"{asks} at ", code(oom.location.short)]]


def _failure(case: FailedRehearsal) -> str:
    parts = (case.gpu, case.conf, "" if case.batch is None else f"batch {case.batch}")
    return f"{', '.join(part for part in parts if part)}: {case.message}"


def _case(found: Rehearsal, sweep: RehearsalSweep) -> str:
    """Return what distinguishes one of several rehearsals from the others."""
    parts = [found.gpu]
    if len({r.conf for r in sweep.rehearsals}) > 1:
        parts.append(found.conf or "default settings")
    if found.batch is not None:
        parts.append(f"batch {found.batch}")
    return ", ".join(parts)


def _common(sweep: RehearsalSweep) -> list[doc.Section]:
    """Return what applies to all rehearsals: notes, assumptions, what the figures leave out."""
    if not sweep.rehearsals:
        return []
    notes = list(dict.fromkeys(note for r in sweep.rehearsals for note in r.notes))
    notes += sweep.notes
    last = sweep.rehearsals[-1]
    return [doc.Section("Notes", [doc.Bullets(notes)]), _assumed(last), _unmodelled(last)]


def judged(result: RehearsalResult | RehearsalSweep, *, is_gate: bool) -> CheckReport:
    """Return rehearsals in the form that CI formats need: one judgment for each.

    In a gate, a rehearsal with a part that was not seen counts as not judged.
    """
    if isinstance(result, RehearsalResult):
        found = result.rehearsal
        name = result.diagnosis.case.sources[0]
        return CheckReport([_judgement(found, name, result.needs_bytes, is_gate=is_gate)])
    files = [
        _judgement(r, f"{result.program} ({_case(r, result)})", is_gate=is_gate)
        for r in result.rehearsals
    ]
    for case in result.failed:
        error = ConfigError(case.message)
        name = f"{result.program} ({case.gpu})"
        files.append(FileJudgement(name, error=error))
    return CheckReport(files)


def _judgement(
    found: Rehearsal, name: str, needs_bytes: int | None = None, *, is_gate: bool
) -> FileJudgement:
    said, oom = _answer(found, needs_bytes), found.out_of_memory
    if oom is None and is_gate and found.is_partial:
        return FileJudgement(name, error=ConfigError(said))
    if oom is None:
        return FileJudgement(name, budgets=[BudgetResult("fits-on", Outcome.KEPT, said)])
    users = [] if oom.location is None else [oom.location]
    places = [*users, *(place for place in oom.stack if place not in users)]
    reason = Reason("fits-on", said, locations=places, fingerprint="rehearsed-out-of-memory")
    exceeded = BudgetResult("fits-on", Outcome.EXCEEDED, said, oom.device)
    return FileJudgement(name, [reason], [exceeded])
