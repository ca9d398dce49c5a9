"""``--edit``: code changes by name, such as ``empty-cache`` or ``batch:0.9``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.units import parse_size

if TYPE_CHECKING:
    from fragdoctor.trace.edits import Edit
    from fragdoctor.trace.trace import Trace

Maker = Callable[["Trace", str], "Edit"]


def parse_edit(text: str, trace: Trace) -> Edit:
    """Return the change that ``NAME`` or ``NAME:VALUE`` means for the trace of a device.

    Raises:
        ConfigError: there is no such change, or its value is none.
        SimulationError: the trace does not say enough for it.
    """
    name, _, value = text.partition(":")
    maker = EDITS.get(name)
    if maker is None:
        near = difflib.get_close_matches(name, EDITS, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"There is no change {name!r} to try.", hint=f"{hint}There are: {', '.join(EDITS)}."
        )
    return maker(trace, value)


def _empty_cache(_trace: Trace, value: str) -> Edit:
    from fragdoctor.trace.edits import empty_cache_at, empty_cache_each_step

    if not value:
        return empty_cache_each_step()
    return empty_cache_at([_whole("empty-cache", one) for one in value.split(",")])


def _largest_first(_trace: Trace, value: str) -> Edit:
    from fragdoctor.trace.edits import largest_step_first

    _refuse_value("largest-first", value)
    return largest_step_first()


def _pad(_trace: Trace, value: str) -> Edit:
    from fragdoctor.trace.edits import sizes_padded

    if not value:
        raise ConfigError("pad needs a size.", hint="Write for example --edit pad:2MiB.")
    return sizes_padded(parse_size(value))


def _batch(_trace: Trace, value: str) -> Edit:
    from fragdoctor.trace.edits import batch_scaled

    try:
        factor = float(value)
    except ValueError as e:
        raise ConfigError(
            f"batch needs a factor, not {value!r}.", hint="Write for example --edit batch:0.9."
        ) from e
    return batch_scaled(factor)


def _no_leak(trace: Trace, value: str) -> Edit:
    from fragdoctor.trace.edits import leak_removed

    _refuse_value("no-leak", value)
    return leak_removed(_leaked(trace))


def _no_pins(trace: Trace, value: str) -> Edit:
    from fragdoctor.trace.edits import blocks_freed

    return blocks_freed(_pinning(trace, value))


def _move_pins(trace: Trace, value: str) -> Edit:
    from fragdoctor.trace.edits import blocks_moved_to_start

    return blocks_moved_to_start(_pinning(trace, value))


EDITS: Final[Mapping[str, Maker]] = MappingProxyType(
    {
        "empty-cache": _empty_cache,
        "largest-first": _largest_first,
        "pad": _pad,
        "batch": _batch,
        "no-leak": _no_leak,
        "no-pins": _no_pins,
        "move-pins": _move_pins,
    }
)


def _pinning(trace: Trace, value: str) -> list[int]:
    """Return the blocks of the ``value`` worst groups of pins, of the worst one if not given."""
    from fragdoctor.analysis.pins import find_pins

    n_groups = _whole("The number of groups", value) if value else 1
    pins = [p for p in find_pins(trace) if p.pinned_bytes > 0][:n_groups]
    if not pins:
        raise SimulationError(f"No live block of GPU {trace.device} pins free memory.")
    return [address for pin in pins for address in pin.addresses]


def _leaked(trace: Trace) -> list[int]:
    """Return the live blocks of all lines that grow step by step."""
    from fragdoctor.analysis.device import analyze_trace

    growing = [g.frame for g in analyze_trace(trace).growth]
    if not growing:
        raise SimulationError(f"No line of GPU {trace.device} keeps more memory with each step.")
    return [int(address) for address in trace.live_blocks_of(growing)]


def _whole(what: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{what} needs a whole number, not {text!r}.")
    return int(text[:18])


def _refuse_value(name: str, value: str) -> None:
    if value:
        raise ConfigError(f"{name} takes no value.", hint=f"Write --edit {name}.")
