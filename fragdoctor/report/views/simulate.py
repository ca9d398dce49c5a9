"""What ``fragdoctor simulate`` says: whether it fits, at what peak, with how much work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.model.simulation import OutlookState, Promise, ReplayResult, Simulation
from fragdoctor.report import document as doc
from fragdoctor.report.document import Detail, Style, bad, code, dim, good, strong, warn
from fragdoctor.report.words import fidelity_text, outlook_text
from fragdoctor.units import format_count, format_size, plural

_MEANING: Final = (
    "peak: highest reserved memory; margin: capacity less peak; calls: cudaMalloc, cudaFree, map "
    "and unmap, a measure of slow-down."
)


def document(simulation: Simulation) -> doc.ReportDocument:
    """Return the document of a replay."""
    sentence = answer(simulation)
    headline, stop, rest = sentence.partition(". ")
    return doc.ReportDocument(
        title="What if",
        headline=strong(headline + stop.rstrip()),
        brief=[sentence],
        lead=[doc.Paragraph(rest)],
        sections=[*_tables(simulation), _about(simulation)],
        tone=None if simulation.best is None else Style.GOOD,
        kicker=f"GPU {simulation.device}, {_replayed(simulation)}",
    )


def answer(simulation: Simulation) -> str:
    """Return the result of the replay in one or two sentences, with the numbers."""
    as_recorded = f"As recorded, the run {_outcome(simulation.baseline)}."
    results = simulation.results
    if not results:
        return as_recorded
    if len(results) == 1:
        name = _name(results[0])
        variant = name.capitalize() if name.startswith("without ") else f"With {name}"
        return f"{variant}, the run {_outcome(results[0])}. {as_recorded}"
    fitting = [r for r in results if r.fits and r.is_conclusive]
    count = f"{len(fitting)} of {len(results)} variants {'fits' if len(fitting) == 1 else 'fit'}"
    if not fitting:
        n_open = sum(not r.is_conclusive for r in results)
        none = f"None of {len(results)} variants fits."
        is_open = f"It is unknown whether {n_open} of {len(results)} variants fit."
        return f"{is_open if n_open else none} {as_recorded}"
    if simulation.best is not None:
        best, promise = simulation.best, ""
        if best.outlook is not None:
            promise = f"; {Promise.of(best.fits, best.outlook)}"
        return f"The best is {_name(best)}: {_price(best)}{promise}; {count}. {as_recorded}"
    if simulation.pareto:
        reason = (
            "No setting is needed: the recorded ones fit without a retry"
            if simulation.is_fine
            else "No setting gains on the recorded ones"
        )
        return f"{reason}; {count}. {as_recorded}"
    lowest = min(fitting, key=lambda r: (r.peak_reserved_bytes, r.driver_calls))
    return f"{count}, lowest with {_name(lowest)}: {_price(lowest)}. {as_recorded}"


def _price(result: ReplayResult) -> str:
    of = "" if result.capacity_bytes is None else f" of {format_size(result.capacity_bytes)}"
    retries = plural(result.retries, "retry", "retries")
    calls = plural(result.driver_calls, "driver call")
    return f"peak reserved {format_size(result.peak_reserved_bytes)}{of}, {retries}, {calls}"


def _outcome(result: ReplayResult) -> str:
    of = "" if result.capacity_bytes is None else f" of {format_size(result.capacity_bytes)}"
    if not result.is_conclusive:
        return "may fit or not: the file does not say"
    if result.fits:
        peak = f"with a peak of {format_size(result.peak_reserved_bytes)} reserved{of}"
        if result.outlook is None:
            return f"fits {peak}"
        outlook = outlook_text(result.outlook)
        if result.outlook.state is OutlookState.HOLDS:
            return f"fits {peak} and {outlook}"
        joined = ", but" if result.outlook.state is OutlookState.FAILS else ";"
        return f"serves the recorded part {peak}{joined} {outlook}"
    return f"runs out of memory{_failure(result)}"


def _failure(result: ReplayResult) -> str:
    if result.oom_event is None:
        return ""
    asked = "" if result.oom_bytes is None else f", asking for {format_size(result.oom_bytes)}"
    return f" at event {format_count(result.oom_event)}{asked}"


def _tables(simulation: Simulation) -> list[doc.Section]:
    every = [simulation.baseline, *simulation.results]
    note = f"GPU {simulation.device}, {_replayed(simulation)}"
    if not simulation.pareto:
        return [doc.Section("Replay", _table(simulation, every), note, "replay")]
    chosen = list(simulation.pareto)
    if simulation.best is not None and simulation.best.conf not in {r.conf for r in chosen}:
        chosen = sorted([*chosen, simulation.best], key=lambda r: r.peak_reserved_bytes)
    tried = f"{plural(len(simulation.results), 'setting')} tried over {_replayed(simulation)}"
    best = [
        *_table(simulation, [simulation.baseline, *chosen]),
        doc.Paragraph(dim(f"{tried}; all with --full"), detail=Detail.SHORT),
    ]
    why = "the best, and those that no other beats in both peak and calls"
    if simulation.best is None:
        why = "no other setting beats these in both peak and calls"
    return [
        doc.Section("Best trade-offs", best, why, "best"),
        doc.Section(
            "All that were tried", _table(simulation, every), note, "all", detail=Detail.FULL
        ),
    ]


def _table(simulation: Simulation, results: Sequence[ReplayResult]) -> list[doc.DocumentBlock]:
    whole = max((r.capacity_bytes or r.peak_reserved_bytes for r in results), default=0) or 1
    best = None if simulation.best is None else simulation.best.conf
    same = _same_outlook(results)

    def named(r: ReplayResult) -> doc.Content:
        if r is simulation.baseline:
            return [strong(_name(r)), dim("  as recorded")]
        return code(_name(r))

    table = doc.tabled(
        results,
        doc.Column("fits", _fits),
        doc.Column("peak", "peak_reserved_bytes"),
        doc.Column("", lambda r: doc.Gauge(min(1.0, r.peak_reserved_bytes / whole)),
                   from_width=100),
        doc.Column("margin", lambda r: doc.size(r.margin_bytes if r.fits else None), "right"),
        doc.Column("retries", "retries"),
        doc.Column("calls", "driver_calls"),
        doc.Column("setting", named, "list"),
        notes=lambda r: [dim(note) for note in _notes(r, simulation) if note != same],
        style=lambda r: (
            Style.GOOD if r.conf == best and r is not simulation.baseline else None
        ),
    )  # fmt: skip
    once = [doc.Paragraph(dim(f"Where it fits, {same}."))] if same else []
    return [table, *once, doc.Paragraph(dim(_MEANING))]


def _same_outlook(results: Sequence[ReplayResult]) -> str:
    """Return the outlook of all results that fit, if several do and it is the same for all."""
    outlooks = [_open_outlook(r) for r in results if r.fits]
    return outlooks[0] if len(outlooks) > 1 and len(set(outlooks)) == 1 else ""


def _open_outlook(result: ReplayResult) -> str:
    outlook = result.outlook if result.fits else None
    holds = outlook is None or outlook.state is OutlookState.HOLDS
    return "" if outlook is None or holds else outlook_text(outlook)


def _fits(result: ReplayResult) -> doc.Content:
    if not result.is_conclusive:
        return warn("?")
    return good("yes") if result.fits else bad("NO")


def _notes(result: ReplayResult, simulation: Simulation) -> list[str]:
    lines: list[str] = []
    usual = _shared_capacity(simulation) or simulation.baseline
    if result.capacity_bytes not in (usual.capacity_bytes, simulation.baseline.capacity_bytes):
        lines.append(f"within {_capacity(result)}")
    if not result.fits and result.oom_event is not None:
        lines.append(f"fails{_failure(result)}")
    if outlook := _open_outlook(result):
        lines.append(outlook)
    if result.smallest_capacity_bytes is not None:
        smallest = format_size(result.smallest_capacity_bytes)
        lines.append(f"smallest capacity at which it fits: {smallest}")
    return [*lines, *(n for n in (result.smallest_capacity_note, result.note) if n)]


def _replayed(simulation: Simulation) -> str:
    capacity = simulation.baseline.capacity_bytes
    limit = "no limit" if capacity is None else f"capacity {format_size(capacity)}"
    asked = _shared_capacity(simulation)
    asked_for = f" as recorded, {_capacity(asked)} asked for" if asked is not None else ""
    return f"{plural(simulation.baseline.n_replayed, 'request')}, {limit}{asked_for}"


def _shared_capacity(simulation: Simulation) -> ReplayResult | None:
    """Return a result with a requested capacity that differs from the recorded one.

    All results have that capacity, except those whose settings limit them to a fraction of it.
    """
    whole = [r for r in simulation.results if "memory_fraction" not in r.conf]
    capacities = {r.capacity_bytes for r in whole}
    is_asked = len(capacities) == 1 and capacities != {simulation.baseline.capacity_bytes}
    return whole[0] if is_asked else None


def _capacity(result: ReplayResult) -> str:
    return "unlimited" if result.capacity_bytes is None else format_size(result.capacity_bytes)


def _name(result: ReplayResult) -> str:
    parts = [result.conf or ("" if result.edit else "default settings"), result.edit]
    if result.memory_fraction is not None and "memory_fraction" not in result.conf:
        parts.append(f"memory fraction {result.memory_fraction:g}")
    if result.torch_version:
        parts.append(f"torch {result.torch_version}")
    return ", ".join(p for p in parts if p)


def _about(simulation: Simulation) -> doc.Section:
    bound = (
        f"No allocator can reserve less than {format_size(simulation.lower_bound_bytes)}, the "
        "highest memory in use at one moment."
    )
    estimated = "These figures are estimates: the model does not reproduce the recorded run."
    said = doc.bullets(
        bound if simulation.lower_bound_bytes else "",
        fidelity_text(simulation.fidelity),
        estimated if simulation.method != "replay" else "",
        *simulation.notes,
    )
    return doc.Section("About this replay", [said], id="about")
