"""``fragdoctor simulate``: what would have happened under other settings and capacities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.errors import ConfigError
from fragdoctor.model.settings import conf_of
from fragdoctor.report.base import DocumentFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fragdoctor.model.simulation import Simulation
    from fragdoctor.model.snapshot import Snapshot
    from fragdoctor.trace.trace import Trace


@options.taken
class SimulateOptions(options.FullOutput):
    """Options of the command."""

    # A str, since a Path would remove one slash of a URL.
    snapshot: str = options.argument(
        "SNAPSHOT", "A memory snapshot with a trace; - is standard input"
    )
    conf: list[str] | None = options.option(
        "SETTINGS", "Try a PYTORCH_CUDA_ALLOC_CONF string; may be repeated"
    )
    sweep: bool = options.flag("Try each setting alone and the sensible pairs")
    capacity: Any = options.option(
        "SIZE|FACTORx",
        "Set what PyTorch can have: device less context and other processes; 1.2x of what it had",
        group=options.INPUT,
    )
    smallest_capacity: bool = options.flag("Find the smallest capacity at which the run fits")
    steps: int | None = options.option(
        "N",
        "Look N whole steps beyond the current one; by default until they repeat, at most 100",
        min=0,
        max=100_000,
    )
    continue_with: str | None = options.CONTINUE_WITH
    memory_fraction: float | None = options.MEMORY_FRACTION
    torch_version: str | None = options.TORCH_VERSION
    device: int | None = options.DEVICE
    output_format: DocumentFormat = options.FORMAT


def simulate(asked: SimulateOptions) -> int:
    """Replay the trace and print what would have happened."""
    inputs = [name for name in (asked.snapshot, asked.continue_with) if name is not None]
    look = console.prepared(asked, inputs)

    from fragdoctor.inputs.cases import read_snapshot

    confs = tuple(dict.fromkeys(conf_of(text) for text in asked.conf or ()))
    with console.Progress("Reading"):
        snapshot = read_snapshot(asked.snapshot)
        further = None if asked.continue_with is None else read_snapshot(asked.continue_with)
        simulation = _answered(snapshot, further, asked, confs)
    console.give(asked, "simulate", simulation, look)
    return OK


def _answered(
    snapshot: Snapshot, further: Snapshot | None, asked: SimulateOptions, confs: Sequence[str]
) -> Simulation:
    """Return the replay of everything that was asked for: the settings, then the sweep."""
    from fragdoctor.future.simulator import simulate as replay
    from fragdoctor.future.simulator import trace_of

    trace = trace_of(snapshot, asked.device)
    capacity = asked.capacity
    if isinstance(capacity, float):
        capacity = _scaled_capacity(trace, capacity)
    return replay(
        trace,
        confs=confs,
        sweep=asked.sweep,
        capacity_bytes=capacity,
        memory_fraction=asked.memory_fraction,
        torch_version=asked.torch_version,
        smallest_capacity=asked.smallest_capacity,
        steps=asked.steps,
        continue_with=further,
    )


def _scaled_capacity(trace: Trace, factor: float) -> int:
    from fragdoctor.trace.reproduction import recorded_capacity

    recorded = recorded_capacity(trace)
    if recorded is None:
        raise ConfigError(
            "The recording does not say how much PyTorch could have: no request failed.",
            hint="Give a size, for example --capacity 24GiB.",
        )
    return round(recorded * factor)
