"""``fragdoctor simulate``: what would have happened under other settings and capacities."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.errors import SimulationError

if TYPE_CHECKING:
    from fragdoctor.model.snapshot import Snapshot

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

    simulation = replay(
        recorded,
        device=chosen_device(recorded, device),
        confs=_unique(conf or []),
        capacity_bytes=capacity,
        memory_fraction=memory_fraction,
        torch_version=torch_version,
        smallest_capacity=smallest_capacity,
    )
    if output_format is options.SimulationFormat.JSON:
        report = dumps(simulation_document(simulation))
    else:
        report = render_simulation(simulation, look)
    console.write_report(report, output, force=force)
    return OK


def chosen_device(snapshot: Snapshot, wanted: int | None) -> int:
    """Return the device to replay: the wanted one, or the one with the story.

    That is the device of the last ``oom`` event, else the one with most events.

    Raises:
        SimulationError: the device, or any, has no events.
    """
    import numpy as np

    from fragdoctor.model.snapshot import Action

    offsets = snapshot.events.offsets
    counts = np.diff(offsets)
    with_events = [int(d) for d in np.nonzero(counts)[0]]
    if not with_events:
        raise SimulationError(
            "The snapshot holds no events to replay.",
            hint="Record with torch.cuda.memory._record_memory_history(max_entries=100000).",
        )
    if wanted is not None:
        if wanted not in with_events:
            there = ", ".join(str(d) for d in with_events)
            raise SimulationError(
                f"GPU {wanted} has no events in this snapshot.", hint=f"With events: {there}."
            )
        return wanted
    rows = np.nonzero(snapshot.events.action == Action.OOM)[0]
    if len(rows):
        return int(np.searchsorted(offsets, int(rows[-1]), side="right")) - 1
    best = int(np.argmax(counts))
    if len(with_events) > 1:
        sys.stderr.write(f"Replaying GPU {best}, which has most events; --device N picks another.\n")
    return best


def _unique(confs: list[str]) -> list[str]:
    return list(dict.fromkeys(confs))
