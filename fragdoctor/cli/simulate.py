"""``fragdoctor simulate``: what would have happened under other settings and capacities."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK

SnapshotPath = Annotated[
    Path,
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
Sweep = Annotated[
    bool, typer.Option("--sweep", help="Try each setting alone and the sensible pairs")
]
Smallest = Annotated[
    bool,
    typer.Option("--smallest-capacity", help="Find the smallest capacity at which the run fits"),
]


def simulate(
    snapshot: SnapshotPath,
    conf: Confs = None,
    sweep: Sweep = False,
    capacity: options.Capacity = None,
    smallest_capacity: Smallest = False,
    memory_fraction: options.MemoryFraction = None,
    torch_version: options.TorchVersion = None,
    device: options.Device = None,
    output_format: options.SimFormat = options.SimulationFormat.TEXT,
    output: options.Output = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> int:
    """Replay the trace and print what would have happened."""
    look = console.render_options(quiet=quiet, no_color=no_color, to_file=output is not None)
    console.check_output(output, force=force, inputs=[str(snapshot)])

    from fragdoctor.cli.inputs import read_snapshot
    from fragdoctor.report.json import dumps, simulation_document
    from fragdoctor.report.text.simulation import render_simulation

    recorded = read_snapshot(str(snapshot))

    from fragdoctor.allocator.simulate import simulate as replay

    with console.Progress("Replaying") as progress:
        simulation = replay(
            recorded,
            device=device,
            confs=_unique(conf or []),
            capacity_bytes=capacity,
            memory_fraction=memory_fraction,
            torch_version=torch_version,
            smallest_capacity=smallest_capacity,
            progress=progress.update,
        )
    if output_format is options.SimulationFormat.JSON:
        report = dumps(simulation_document(simulation))
    else:
        report = render_simulation(simulation, look)
    console.write_report(report, output, force=force)
    return OK


def _unique(confs: list[str]) -> list[str]:
    return list(dict.fromkeys(confs))
