"""What an allocator other than PyTorch's prints of itself: arithmetic with what there is.

What is not printed stays open: who fills the device is then only possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from fragdoctor.diagnosis.decision import OVERSIZED_ALONE_BYTES, Hypothesis
from fragdoctor.model.case import OomMessage
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.engines import NEXT_TO_NOTHING_BYTES, asked_bytes
from fragdoctor.model.finding import Confidence
from fragdoctor.model.gpus import monitor_of
from fragdoctor.rules.failed_request import known
from fragdoctor.units import format_size

WATCH: Final = "nvidia-smi shows the device's size and whether another process is on it."

CAPACITY_TOO: Final = Hypothesis(Cause.CAPACITY, Confidence.POSSIBLE, "")
_OTHER_TOO: Final = Hypothesis(Cause.OTHER_PROCESS, Confidence.POSSIBLE, "")


def watch(message: OomMessage) -> str:
    """Return what shows who is on the device, by its maker; "" where there is no such tool."""
    if message.variant == "jax-program" or message.backend in ("cpu", "directml"):
        return ""
    return WATCH.replace("nvidia-smi", monitor_of(message.backend))


def by_its_figures(name: str, message: OomMessage) -> list[Hypothesis]:
    """Return what the figures of a message say of a program, the best first; never empty."""
    for row in _ROWS:
        found = list(row(name, message))
        if found:
            return found
    text = f"{name} ran out of device memory; the message prints no figures."
    first = Hypothesis(Cause.CAPACITY, Confidence.POSSIBLE, text, watch(message))
    return [first, _OTHER_TOO]


def _whole_bytes(m: OomMessage) -> int | None:
    return known(m.total_bytes) or known(m.limit_bytes)


def _needs_bytes(m: OomMessage) -> int | None:
    """Return all that a compiled program needs, where it is printed."""
    is_program = m.program_bytes is None and m.variant == "jax-program"
    return m.requested_bytes if is_program else m.program_bytes


def _largest(m: OomMessage) -> str:
    if m.largest_buffer_bytes is None:
        return ""
    return f" Its largest buffer takes {format_size(m.largest_buffer_bytes)}: {m.largest_buffer}."


def _by_size(n_bytes: int) -> Confidence:
    """Return how sure a lack is by the size alone: of a large card, or of any."""
    return Confidence.LIKELY if n_bytes >= OVERSIZED_ALONE_BYTES else Confidence.POSSIBLE


# The rows, in their order.


def _beyond_device(name: str, m: OomMessage) -> Iterator[Hypothesis]:
    whole, needs, wanted = _whole_bytes(m), _needs_bytes(m), asked_bytes(m)
    if whole is None:
        return
    if needs is not None and needs > whole:
        text = f"The compiled program needs {format_size(needs)} of {format_size(whole)}."
        yield Hypothesis(Cause.CAPACITY, Confidence.PROVEN, text + _largest(m))
    elif wanted is not None and wanted > whole:
        text = (
            f"{name} asked for {format_size(wanted)} at once, more than the {format_size(whole)} "
            "that are there in all."
        )
        yield Hypothesis(Cause.CAPACITY, Confidence.PROVEN, text)


def _beside_its_own(name: str, m: OomMessage) -> Iterator[Hypothesis]:
    whole, used, wanted = _whole_bytes(m), known(m.allocated_bytes), asked_bytes(m)
    if whole is None or used is None or wanted is None or wanted + used <= whole:
        return
    text = (
        f"{name} had {format_size(used)} of {format_size(whole)} in use and asked for "
        f"{format_size(wanted)} more."
    )
    yield Hypothesis(Cause.CAPACITY, Confidence.LIKELY, text)


def _program(_name: str, m: OomMessage) -> Iterator[Hypothesis]:
    needs = _needs_bytes(m)
    if needs is None:
        return
    if needs > NEXT_TO_NOTHING_BYTES:
        text = f"The compiled program needs {format_size(needs)} at once.{_largest(m)}"
        yield Hypothesis(Cause.CAPACITY, _by_size(needs), text, watch(m))
    else:
        text = (
            f"The whole program needs {format_size(needs)}: so little is refused where the GPU is "
            "full already, of this program's other arrays or of another process."
        )
        yield Hypothesis(Cause.UNKNOWN, Confidence.POSSIBLE, text, watch(m))
        yield CAPACITY_TOO
    yield _OTHER_TOO


def _beyond_free(name: str, m: OomMessage) -> Iterator[Hypothesis]:
    free, used, wanted = m.free_bytes, known(m.allocated_bytes), asked_bytes(m)
    if free is None or wanted is None or wanted <= free:
        return
    if used is not None and used > free:
        text = (
            f"{name} has {format_size(used)} allocated, {format_size(free)} are free, and "
            f"{format_size(wanted)} were asked for."
        )
        yield Hypothesis(Cause.CAPACITY, Confidence.LIKELY, text, watch(m))
    else:
        text = (
            f"{name} asked for {format_size(wanted)} with {format_size(free)} free; the message "
            "does not say who holds the rest."
        )
        yield Hypothesis(Cause.CAPACITY, _by_size(wanted), text, watch(m))
    yield _OTHER_TOO


def _with_room(name: str, m: OomMessage) -> Iterator[Hypothesis]:
    free, wanted = m.free_bytes, asked_bytes(m)
    if free is None or wanted is None or wanted > free:
        return
    text = (
        f"{name} was refused {format_size(wanted)} with {format_size(free)} free on the device: a "
        "full device does not explain it; possible are a limit of the driver or of virtual "
        "memory, free memory in pieces, or a neighbour that has let go of its own since."
    )
    yield Hypothesis(Cause.UNKNOWN, Confidence.POSSIBLE, text, watch(m))
    yield CAPACITY_TOO
    yield _OTHER_TOO


def _size_alone(name: str, m: OomMessage) -> Iterator[Hypothesis]:
    wanted = asked_bytes(m)
    if wanted is None:
        return
    used = known(m.allocated_bytes)
    beside = "" if used is None else f" beside the {format_size(used)} that it has in use"
    text = f"{name} could not allocate {format_size(wanted)}{beside}."
    if wanted <= NEXT_TO_NOTHING_BYTES and m.kind in ("jax", "tf"):
        text += (
            " So little is refused where the GPU is full already: of this program's own arrays, or "
            "of another process."
        )
        cause = Cause.UNKNOWN if m.kind == "jax" else Cause.CAPACITY
        yield Hypothesis(cause, Confidence.POSSIBLE, text, watch(m))
        if cause is Cause.UNKNOWN:
            yield CAPACITY_TOO
    else:
        confidence = Confidence.LIKELY if m.kind == "ggml" else _by_size(wanted)
        yield Hypothesis(Cause.CAPACITY, confidence, text, watch(m))
    yield _OTHER_TOO


_ROWS: Final[tuple[Callable[[str, OomMessage], Iterator[Hypothesis]], ...]] = (
    _beyond_device,
    _beside_its_own,
    _program,
    _beyond_free,
    _with_room,
    _size_alone,
)
