"""``fragdoctor simulate``: what would have happened under other settings and capacities.

``--edit`` names code changes, such as ``empty-cache`` or ``batch:0.9``.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from fragdoctor.cli import console, options
from fragdoctor.cli.exit import OK
from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fragdoctor.future.edits import Edit
    from fragdoctor.model.simulation import Simulation
    from fragdoctor.model.snapshot import I64, Snapshot
    from fragdoctor.report.base import RenderOptions
    from fragdoctor.trace.trace import Trace


def parse_edit(text: str, trace: Trace) -> Edit:
    """Return the change that ``NAME`` or ``NAME:VALUE`` stands for in the trace of a device.

    Raises:
        ConfigError: the change does not exist, or its value is invalid.
        SimulationError: the trace does not have the information that the change needs.
    """
    from fragdoctor.future import edits, training_edits

    name, _, value = text.partition(":")
    if name not in EDITS:
        near = difflib.get_close_matches(name, EDITS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"There is no change {name!r} to try.", hint=f"{hint}There are: {', '.join(EDITS)}."
        )
    if value and name == "no-leak":
        raise ConfigError("no-leak takes no value.", hint="Write --edit no-leak.")
    match name:
        case "empty-cache" if value:
            return edits.empty_cache_at([_whole(name, one) for one in value.split(",")])
        case "empty-cache":
            return edits.empty_cache_each_step()
        case "pad":
            if not value:
                raise ConfigError("pad needs a size.", hint="Write for example --edit pad:2MiB.")
            return edits.sizes_padded(parse_size(value))
        case "batch":
            return training_edits.batch_scaled(_factor(value))
        case "no-leak":
            return edits.leak_removed(*_leak(trace))
        case _:
            return edits.blocks_freed(_stranding(trace, value))


EDITS: Final = ("empty-cache", "pad", "batch", "no-leak", "no-stranders")


def _factor(value: str) -> float:
    try:
        return float(value)
    except ValueError as e:
        raise ConfigError(
            f"batch needs a factor, not {value!r}.", hint="Write for example --edit batch:0.9."
        ) from e


def _leak(trace: Trace) -> tuple[I64, I64]:
    """Return the blocks that growing lines keep, and where each of them could be freed."""
    from fragdoctor.analysis.device import analyze_trace

    found = analyze_trace(trace)
    kept = found.kept or found.gathered
    if kept is None:
        raise SimulationError(f"No line of GPU {trace.device} keeps more memory with each step.")
    return kept.rows, kept.ends


def _stranding(trace: Trace, value: str) -> list[int]:
    """Return the blocks of the ``value`` worst stranders, or of the worst one by default."""
    from fragdoctor.analysis.attribution import find_stranders

    n_groups = _whole("The number of groups", value) if value else 1
    stranders = [p for p in find_stranders(trace, trace.layout) if p.stranded_bytes > 0][:n_groups]
    if not stranders:
        raise SimulationError(f"No live block of GPU {trace.device} strands free memory.")
    return [address for strander in stranders for address in strander.addresses]


def _whole(what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{what} needs a whole number, not {text!r}.")
    return int(text[:18])


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
    edit: list[str] | None = options.option(
        "CHANGE",
        "Try a change of the code: empty-cache[:EVENT,...], pad:SIZE, batch:FACTOR, no-leak, "
        "no-stranders[:N]; may be repeated",
    )
    sweep: bool = options.flag("Try each setting alone and the sensible pairs")
    capacity: Any = options.option(
        "SIZE|FACTORx",
        "Set what PyTorch can have: device less context and other processes; 1.2x of what it had",
        group=options.INPUT,
        parser=options.size_or_factor,
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
    output_format: options.DocumentFormat = options.DOCUMENT_FORMAT


def simulate(asked: SimulateOptions) -> int:
    """Replay the trace and print what would have happened."""
    inputs = [name for name in (asked.snapshot, asked.continue_with) if name is not None]
    console.answer(asked, inputs, lambda look: _report(asked, look))
    return OK


def _report(asked: SimulateOptions, look: RenderOptions) -> str:
    from fragdoctor.inputs.cases import read_snapshot
    from fragdoctor.model.settings import conf_of
    from fragdoctor.report.base import render

    confs = tuple(dict.fromkeys(conf_of(text) for text in asked.conf or ()))
    with console.Progress("Reading"):
        snapshot = read_snapshot(asked.snapshot)
        further = None if asked.continue_with is None else read_snapshot(asked.continue_with)
        simulation = _answered(snapshot, further, asked, confs)
    return render("simulate", asked.output_format.value, simulation, look)


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
    if asked.sweep:
        return _swept(trace, further, asked, confs, capacity)
    return replay(
        trace,
        confs=confs,
        capacity_bytes=capacity,
        memory_fraction=asked.memory_fraction,
        torch_version=asked.torch_version,
        edits=[parse_edit(text, trace) for text in dict.fromkeys(asked.edit or ())],
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


def _swept(
    trace: Trace,
    further: Snapshot | None,
    asked: SimulateOptions,
    confs: Sequence[str],
    capacity: int | None,
) -> Simulation:
    """Return a search over all sensible settings, including those that were named."""
    from fragdoctor.future.search import sweep_candidates, with_smallest_capacity
    from fragdoctor.future.simulator import continued_with, reproduce, search_settings
    from fragdoctor.future.whatif import WhatIf, check_version, default_capacity

    if asked.edit:
        raise ConfigError(
            "--sweep and --edit exclude each other.",
            hint="Sweep first, then try the change under the best setting with --conf.",
        )
    version = check_version(asked.torch_version)
    reproduction = reproduce(trace)
    what_if = WhatIf(
        capacity_bytes=capacity,
        memory_fraction=asked.memory_fraction,
        torch_version=version,
    )
    candidates = sweep_candidates(reproduction, version or None)
    if capacity is None and default_capacity(reproduction) is None:
        # A fraction of a device of unknown size does not set a limit.
        candidates = tuple(c for c in candidates if "memory_fraction" not in c)
    tried = dict.fromkeys((*confs, *candidates))
    steps, other = asked.steps, continued_with(reproduction, further, asked.steps)
    found = search_settings(reproduction, tuple(tried), what_if=what_if, steps=steps, other=other)
    if not asked.smallest_capacity:
        return found
    pareto = [
        with_smallest_capacity(reproduction, replace(what_if, conf=r.conf), r) for r in found.pareto
    ]
    refined = {r.conf: r for r in pareto}
    results = [refined.get(r.conf, r) for r in found.results]
    best = refined.get(found.best.conf, found.best) if found.best else None
    return replace(found, results=results, best=best, pareto=pareto)
