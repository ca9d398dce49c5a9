"""``fragdoctor simulate``: what would have happened under other settings and capacities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK

if TYPE_CHECKING:
    from fragdoctor.model.simulation import Simulation
    from fragdoctor.model.snapshot import Snapshot
    from fragdoctor.trace.edits import Edit
    from fragdoctor.trace.trace import Trace

SnapshotPath = Annotated[
    str,  # a Path would take one slash of a URL away
    typer.Argument(metavar="SNAPSHOT", help="A memory snapshot with a trace; - is standard input"),
]
Confs = Annotated[
    list[str] | None,
    typer.Option(
        "--conf",
        metavar="SETTINGS",
        help="Try a PYTORCH_CUDA_ALLOC_CONF string; may be repeated",
        show_default=False,
    ),
]
Edits = Annotated[
    list[str] | None,
    typer.Option(
        "--edit",
        metavar="CHANGE",
        help="Try a change of the code: empty-cache[:EVENT,...], largest-first, pad:SIZE, "
        "batch:FACTOR, no-leak, no-pins[:N], move-pins[:N]; may be repeated",
        show_default=False,
    ),
]
Sweep = Annotated[
    bool, typer.Option("--sweep", help="Try each setting alone and the sensible pairs")
]
Smallest = Annotated[
    bool,
    typer.Option("--smallest-capacity", help="Find the smallest capacity at which the run fits"),
]


StepsAhead = Annotated[
    int | None,
    typer.Option(
        "--steps",
        metavar="N",
        min=0,
        max=100_000,
        help="Look on over N whole steps after the one under way; without it until they repeat, "
        "at most 100",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked of the replay."""

    confs: tuple[str, ...]
    edits: tuple[str, ...]
    sweep: bool
    device: int | None
    capacity_bytes: int | None
    memory_fraction: float | None
    torch_version: str | None
    smallest_capacity: bool
    steps: int | None = None


def simulate(
    snapshot: SnapshotPath,
    conf: Confs = None,
    edit: Edits = None,
    sweep: Sweep = False,
    capacity: options.Capacity = None,
    smallest_capacity: Smallest = False,
    steps: StepsAhead = None,
    memory_fraction: options.MemoryFraction = None,
    torch_version: options.TorchVersion = None,
    device: options.Device = None,
    output_format: options.DocumentFormats = options.DocumentFormat.TEXT,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    no_color: options.NoColor = False,
) -> int:
    """Replay the trace and print what would have happened."""
    look = console.render_options(
        quiet=quiet, verbose=verbose, no_color=no_color, to_file=output is not None
    )
    console.check_output(output, force=force, inputs=[snapshot])

    from fragdoctor.inputs.cases import read_snapshot
    from fragdoctor.model.settings import conf_of
    from fragdoctor.report.base import render

    question = Question(
        confs=tuple(dict.fromkeys(conf_of(text) for text in conf or ())),
        edits=tuple(dict.fromkeys(edit or ())),
        sweep=sweep,
        device=device,
        capacity_bytes=capacity,
        memory_fraction=memory_fraction,
        torch_version=torch_version,
        smallest_capacity=smallest_capacity,
        steps=steps,
    )
    with console.Progress("Reading"):
        simulation = answered(read_snapshot(snapshot), question)
    report = render("simulate", output_format.value, simulation, look)
    console.write_report(report, output, force=force)
    return OK


def answered(snapshot: Snapshot, question: Question) -> Simulation:
    """Return the replay of everything that was asked: the settings, then the sweep."""
    from fragdoctor.trace.simulate import simulate as replay
    from fragdoctor.trace.simulate import trace_of

    trace = trace_of(snapshot, question.device)
    if question.sweep:
        return _swept(trace, question)
    return replay(
        trace,
        confs=question.confs,
        capacity_bytes=question.capacity_bytes,
        memory_fraction=question.memory_fraction,
        torch_version=question.torch_version,
        edits=_edits(trace, question),
        smallest_capacity=question.smallest_capacity,
        steps=question.steps,
    )


def _edits(trace: Trace, question: Question) -> list[Edit]:
    if not question.edits:
        return []
    from fragdoctor.cli.edits import parse_edit

    return [parse_edit(text, trace) for text in question.edits]


def _swept(trace: Trace, question: Question) -> Simulation:
    """Return a search over all sensible settings, those that were named included."""
    from fragdoctor.errors import ConfigError
    from fragdoctor.trace.candidates import sweep_candidates
    from fragdoctor.trace.search import capacity_of, search_settings
    from fragdoctor.trace.simulate import reproduce, simulation_of
    from fragdoctor.trace.whatif import WhatIf, check_version, with_smallest_capacity

    if question.edits:
        raise ConfigError(
            "--sweep and --edit exclude each other.",
            hint="Sweep first, then try the change under the best setting with --conf.",
        )
    version = check_version(question.torch_version)
    reproduction = reproduce(trace)
    what_if = WhatIf(
        capacity_bytes=question.capacity_bytes,
        memory_fraction=question.memory_fraction,
        torch_version=version,
    )
    candidates = sweep_candidates(reproduction, version or None)
    if capacity_of(reproduction, what_if) is None:
        # A fraction of a device of unknown size is no limit.
        candidates = tuple(c for c in candidates if "memory_fraction" not in c)
    confs = dict.fromkeys((*question.confs, *candidates))
    found = search_settings(reproduction, tuple(confs), what_if=what_if, steps=question.steps)
    pareto = tuple(found.pareto)
    if question.smallest_capacity:
        pareto = tuple(
            with_smallest_capacity(reproduction, replace(what_if, conf=r.conf), r) for r in pareto
        )
    refined = {r.conf: r for r in pareto}
    results = [refined.get(r.conf, r) for r in found.results]
    simulation = simulation_of(reproduction, results)
    best = refined.get(found.best.conf, found.best) if found.best else None
    return replace(simulation, best=best, pareto=pareto, is_fine=found.recorded_fits)
