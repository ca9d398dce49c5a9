"""``fragdoctor simulate``: what would have happened under other settings and capacities."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK

SnapshotPath = Annotated[
    Path, typer.Argument(metavar="SNAPSHOT", help="A memory snapshot with a trace")
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
    capacity: options.Capacity = None,
    memory_fraction: options.MemoryFraction = None,
    torch_version: options.TorchVersion = None,
    device: options.Device = None,
    sweep: Sweep = False,
    smallest_capacity: Smallest = False,
    output_format: options.SimFormat = options.SimulationFormat.TEXT,
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
    console.check_output(output, force=force, inputs=[str(snapshot)])
    raise NotImplementedError(conf, capacity, memory_fraction, torch_version, device, sweep, smallest_capacity, output_format, look)
    return OK
