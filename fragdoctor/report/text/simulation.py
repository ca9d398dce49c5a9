"""The table of what-ifs: fits or not, at which peak, with how much work for the driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.model.simulation import ReplayResult, Simulation
from fragdoctor.report import escape
from fragdoctor.report.base import RenderOptions, Verbosity
from fragdoctor.report.phrases import fidelity_text
from fragdoctor.report.text.page import Cell, Column, Page
from fragdoctor.units import format_count, format_size, plural

# From here on the table has room for one more column of figures.
WIDE: Final = 100


def render_simulation(simulation: Simulation, options: RenderOptions) -> str:
    """Return the replay's results as text; with ``Verbosity.QUIET`` its first sentence."""
    sentence = answer(simulation)
    if options.verbosity is Verbosity.QUIET:
        return escape.terminal(sentence) + "\n"
    page = Page(options)
    page.paragraph((sentence, "bold"), indent=0)
    if simulation.pareto:
        _write_sweep(page, simulation)
    else:
        page.heading("Replay", f"GPU {simulation.device}, {_replayed(simulation)}")
        _write_table(page, simulation, [simulation.baseline, *simulation.results])
    _write_remarks(page, simulation)
    return page.render()


def answer(simulation: Simulation) -> str:
    """Return what the replay says in one sentence or two, with the numbers."""
    as_recorded = f"As recorded the run {_outcome(simulation.baseline)}."
    results = simulation.results
    if not results:
        return as_recorded
    if len(results) == 1:
        return f"With {_name(results[0])} the run {_outcome(results[0])}. {as_recorded}"
    fitting = [r for r in results if r.fits and r.is_conclusive]
    count = f"{len(fitting)} of {len(results)} variants {'fits' if len(fitting) == 1 else 'fit'}"
    if not fitting:
        n_open = sum(not r.is_conclusive for r in results)
        none = f"None of {len(results)} variants fits."
        is_open = f"Whether {n_open} of {len(results)} variants fit is not known."
        return f"{is_open if n_open else none} {as_recorded}"
    if simulation.best is not None:
        best = simulation.best
        return f"The cheapest that fits is {_name(best)}: {_price(best)}; {count}. {as_recorded}"
    if simulation.pareto:
        reason = (
            "No setting is needed: the recorded ones fit with margin"
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
        return "may fit or not: the file does not tell"
    if result.fits:
        return f"fits with a peak of {format_size(result.peak_reserved_bytes)} reserved{of}"
    return f"runs out of memory{_failure(result)}"


def _failure(result: ReplayResult) -> str:
    if result.oom_event is None:
        return ""
    asked = "" if result.oom_bytes is None else f" asking {format_size(result.oom_bytes)}"
    return f" at event {format_count(result.oom_event)}{asked}"


def _write_sweep(page: Page, simulation: Simulation) -> None:
    """Write the settings worth choosing between; with --verbose all that were tried."""
    verbose = page.options.verbosity is Verbosity.VERBOSE
    page.heading("Best trade-offs", "no other setting beats these in both peak and calls")
    _write_table(page, simulation, [simulation.baseline, *simulation.pareto])
    n_tried = len(simulation.results)
    if verbose:
        page.heading("All that were tried", f"GPU {simulation.device}, {_replayed(simulation)}")
        _write_table(page, simulation, [simulation.baseline, *simulation.results])
    else:
        tried = plural(n_tried, "setting")
        page.paragraph((f"{tried} tried over {_replayed(simulation)}; all with --verbose", "dim"))


def _write_table(page: Page, simulation: Simulation, rows: Sequence[ReplayResult]) -> None:
    has_smallest = any(r.smallest_capacity_bytes is not None for r in rows)
    with_smallest = has_smallest and page.width >= WIDE
    columns = [
        Column(title="fits"),
        Column(title="peak", align="right"),
        Column(title="margin", align="right"),
        Column(title="retries", align="right"),
        Column(title="calls", align="right"),
        *([Column(title="smallest", align="right")] if with_smallest else []),
        Column("list", title="setting"),
    ]
    cells = [_row(r, is_baseline=i == 0, with_smallest=with_smallest) for i, r in enumerate(rows)]
    page.table(columns, cells, below=[_below(r, simulation, with_smallest) for r in rows])
    meaning = (
        "peak: highest reserved memory; margin: capacity less peak; calls: cudaMalloc, cudaFree, "
        "map and unmap, a measure of slow-down"
    )
    if with_smallest:
        meaning += "; smallest: the smallest capacity at which the run fits"
    page.paragraph((f"{meaning}.", "dim"))


def _replayed(simulation: Simulation) -> str:
    capacity = simulation.baseline.capacity_bytes
    limit = "no limit" if capacity is None else f"capacity {format_size(capacity)}"
    asked = _shared_capacity(simulation)
    asked_for = f" as recorded, {_capacity(asked)} asked for" if asked is not None else ""
    return f"{plural(simulation.baseline.n_replayed, 'request')}, {limit}{asked_for}"


def _shared_capacity(simulation: Simulation) -> ReplayResult | None:
    """Return a result that stands for all, if they share a capacity that is not the recorded."""
    capacities = {r.capacity_bytes for r in simulation.results}
    if len(capacities) != 1 or capacities == {simulation.baseline.capacity_bytes}:
        return None
    return simulation.results[0]


def _fits(result: ReplayResult) -> Cell:
    if not result.is_conclusive:
        return ("?", "bold yellow")
    return ("yes", "bold green") if result.fits else ("NO", "bold red")


def _row(result: ReplayResult, *, is_baseline: bool, with_smallest: bool) -> list[Cell]:
    margin = result.margin_bytes
    name = _name(result)
    return [
        _fits(result),
        format_size(result.peak_reserved_bytes),
        format_size(margin) if margin is not None and result.fits else "-",
        format_count(result.retries),
        format_count(result.driver_calls),
        *([_size(result.smallest_capacity_bytes)] if with_smallest else []),
        [(name, "bold"), ("  as recorded", "dim")] if is_baseline else name,
    ]


def _size(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else format_size(n_bytes)


def _capacity(result: ReplayResult) -> str:
    return "unlimited" if result.capacity_bytes is None else format_size(result.capacity_bytes)


def _name(result: ReplayResult) -> str:
    parts = [result.conf or ("" if result.edit else "default settings"), result.edit]
    if result.memory_fraction is not None and "memory_fraction" not in result.conf:
        parts.append(f"memory fraction {result.memory_fraction:g}")
    if result.torch_version:
        parts.append(f"torch {result.torch_version}")
    return ", ".join(p for p in parts if p)


def _below(result: ReplayResult, simulation: Simulation, with_smallest: bool) -> Sequence[Cell]:
    lines: list[Cell] = []
    differs = result.capacity_bytes != simulation.baseline.capacity_bytes
    if differs and _shared_capacity(simulation) is None:
        lines.append((f"within {_capacity(result)}", "dim"))
    if not result.fits and result.oom_event is not None:
        lines.append((f"fails{_failure(result)}", "dim"))
    if result.smallest_capacity_bytes is not None and not with_smallest:
        smallest = format_size(result.smallest_capacity_bytes)
        lines.append((f"smallest capacity at which it fits: {smallest}", "dim"))
    lines += [(note, "dim") for note in (result.smallest_capacity_note, result.note) if note]
    return lines


def _write_remarks(page: Page, simulation: Simulation) -> None:
    sentences = []
    if simulation.lower_bound_bytes:
        sentences.append(
            f"No allocator can reserve less than {format_size(simulation.lower_bound_bytes)}, the "
            "highest memory in use at one moment."
        )
    fidelity = fidelity_text(simulation.fidelity)
    if fidelity:
        sentences.append(fidelity)
    if simulation.method != "replay":
        sentences.append(
            "These figures are estimates: the model does not reproduce the recorded run."
        )
    sentences += simulation.notes
    page.heading("About this replay")
    for sentence in sentences:
        page.labelled("-", sentence, indent=2, label_width=2)
