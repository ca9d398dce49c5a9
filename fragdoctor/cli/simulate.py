"""``fragdoctor simulate``: what would have happened under other settings and capacities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.cli.parameters import command_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fragdoctor.model.simulation import Simulation
    from fragdoctor.model.snapshot import Snapshot
    from fragdoctor.trace.edits import Edit
    from fragdoctor.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions(options.FullOutput):
    """What is asked of the replay."""

    snapshot: Annotated[
        str,  # a Path would take one slash of a URL away
        typer.Argument(
            metavar="SNAPSHOT", help="A memory snapshot with a trace; - is standard input"
        ),
    ]
    conf: Annotated[
        list[str] | None,
        typer.Option(
            "--conf",
            metavar="SETTINGS",
            help="Try a PYTORCH_CUDA_ALLOC_CONF string; may be repeated",
            show_default=False,
        ),
    ] = None
    edit: Annotated[
        list[str] | None,
        typer.Option(
            "--edit",
            metavar="CHANGE",
            help="Try a change of the code: empty-cache[:EVENT,...], largest-first, pad:SIZE, "
            "batch:FACTOR, no-leak, no-pins[:N], move-pins[:N]; may be repeated",
            show_default=False,
        ),
    ] = None
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Try each setting alone and the sensible pairs")
    ] = False
    capacity: options.Capacity = None
    smallest_capacity: Annotated[
        bool,
        typer.Option(
            "--smallest-capacity", help="Find the smallest capacity at which the run fits"
        ),
    ] = False
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            metavar="N",
            min=0,
            max=100_000,
            help="Look on over N whole steps after the one under way; without it until they "
            "repeat, at most 100",
            show_default=False,
        ),
    ] = None
    memory_fraction: options.MemoryFraction = None
    torch_version: options.TorchVersion = None
    device: options.Device = None
    output_format: options.DocumentFormats = options.DocumentFormat.TEXT


def simulate(asked: SimulateOptions) -> int:
    """Replay the trace and print what would have happened."""
    look = console.look_of(asked)
    console.check_output(asked.output, force=asked.force, inputs=[asked.snapshot])

    from fragdoctor.inputs.cases import read_snapshot
    from fragdoctor.model.settings import conf_of
    from fragdoctor.report.base import render

    confs = tuple(dict.fromkeys(conf_of(text) for text in asked.conf or ()))
    with console.Progress("Reading"):
        simulation = _answered(read_snapshot(asked.snapshot), asked, confs)
    report = render("simulate", asked.output_format.value, simulation, look)
    console.write_report(report, asked.output, force=asked.force)
    return OK


def _answered(snapshot: Snapshot, asked: SimulateOptions, confs: Sequence[str]) -> Simulation:
    """Return the replay of everything that was asked: the settings, then the sweep."""
    from fragdoctor.trace.simulate import simulate as replay
    from fragdoctor.trace.simulate import trace_of

    trace = trace_of(snapshot, asked.device)
    if asked.sweep:
        return _swept(trace, asked, confs)
    return replay(
        trace,
        confs=confs,
        capacity_bytes=asked.capacity,
        memory_fraction=asked.memory_fraction,
        torch_version=asked.torch_version,
        edits=_edits(trace, asked.edit),
        smallest_capacity=asked.smallest_capacity,
        steps=asked.steps,
    )


def _edits(trace: Trace, texts: Sequence[str] | None) -> list[Edit]:
    if not texts:
        return []
    from fragdoctor.cli.edits import parse_edit

    return [parse_edit(text, trace) for text in dict.fromkeys(texts)]


def _swept(trace: Trace, asked: SimulateOptions, confs: Sequence[str]) -> Simulation:
    """Return a search over all sensible settings, those that were named included."""
    from fragdoctor.errors import ConfigError
    from fragdoctor.trace.candidates import sweep_candidates
    from fragdoctor.trace.search import capacity_of, search_settings
    from fragdoctor.trace.simulate import reproduce, simulation_of
    from fragdoctor.trace.whatif import WhatIf, check_version, with_smallest_capacity

    if asked.edit:
        raise ConfigError(
            "--sweep and --edit exclude each other.",
            hint="Sweep first, then try the change under the best setting with --conf.",
        )
    version = check_version(asked.torch_version)
    reproduction = reproduce(trace)
    what_if = WhatIf(
        capacity_bytes=asked.capacity,
        memory_fraction=asked.memory_fraction,
        torch_version=version,
    )
    candidates = sweep_candidates(reproduction, version or None)
    if capacity_of(reproduction, what_if) is None:
        # A fraction of a device of unknown size is no limit.
        candidates = tuple(c for c in candidates if "memory_fraction" not in c)
    tried = dict.fromkeys((*confs, *candidates))
    found = search_settings(reproduction, tuple(tried), what_if=what_if, steps=asked.steps)
    pareto = tuple(found.pareto)
    if asked.smallest_capacity:
        pareto = tuple(
            with_smallest_capacity(reproduction, replace(what_if, conf=r.conf), r) for r in pareto
        )
    refined = {r.conf: r for r in pareto}
    results = [refined.get(r.conf, r) for r in found.results]
    simulation = simulation_of(reproduction, results)
    best = refined.get(found.best.conf, found.best) if found.best else None
    return replace(simulation, best=best, pareto=pareto, is_fine=found.recorded_fits)


command = command_of(SimulateOptions, simulate)
