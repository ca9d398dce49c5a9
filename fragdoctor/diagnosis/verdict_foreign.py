"""Verdicts on allocators other than PyTorch's: arithmetic with the figures that they print.

What is not printed stays open: a cause that says who fills the device is then only possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fragdoctor.diagnosis.decision import OVERSIZED_ALONE_BYTES, Hypothesis
from fragdoctor.model.case import OomMessage
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.engines import NEXT_TO_NOTHING_BYTES, asked_bytes
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.failed_request import known
from fragdoctor.rules.told_weights import told_card_bytes
from fragdoctor.units import format_size

WATCH: Final = "nvidia-smi shows the device's size and whether another process is on it."


def watch(message: OomMessage) -> str:
    """Return how to see who is on the device, or "" if nothing shows it."""
    return "" if _is_tpu(message) or message.backend in ("cpu", "directml") else WATCH


def _is_tpu(message: OomMessage) -> bool:
    """Return whether a TPU printed a message: it belongs to one process (libtpu's lock file)."""
    return message.variant in ("jax-program", "jax-reserve")


def by_its_figures(name: str, message: OomMessage) -> Hypothesis:
    """Return what the figures of a message say about a program."""
    for row in _ROWS:
        if (found := row(name, message)) is not None:
            return found
    figures = (
        "the message gives no numbers"
        if message.free_bytes is None or message.total_bytes is None
        else f"{format_size(message.free_bytes)} of {format_size(message.total_bytes)} was free "
        "when it began"
    )
    text = f"{name} ran out of device memory; {figures}."
    return _open(Cause.CAPACITY, text, message)


def _open(
    cause: Cause, text: str, m: OomMessage, sure: Confidence = Confidence.POSSIBLE
) -> Hypothesis:
    """Return a hypothesis that leaves open who else is on the device."""
    also: tuple[Cause, ...] = () if _is_tpu(m) else (Cause.OTHER_PROCESS,)
    if cause is Cause.UNKNOWN:
        also = (Cause.CAPACITY, *also)
    return Hypothesis(cause, text, sure, watch(m), also=also)


def _needs_bytes(m: OomMessage) -> int | None:
    """Return the total that a compiled program needs, if the message prints it."""
    is_program = m.program_bytes is None and m.variant == "jax-program"
    return m.requested_bytes if is_program else m.program_bytes


def _largest(m: OomMessage) -> str:
    if m.largest_buffer_bytes is None:
        return ""
    return f" Its largest buffer takes {format_size(m.largest_buffer_bytes)}: {m.largest_buffer}."


def _by_size(n_bytes: int) -> Confidence:
    """Return how certain a shortage is by its size alone, compared with large cards."""
    return Confidence.LIKELY if n_bytes >= OVERSIZED_ALONE_BYTES else Confidence.POSSIBLE


# The rows, in order.


def _beyond_device(name: str, m: OomMessage) -> Hypothesis | None:
    whole = known(m.total_bytes) or known(m.limit_bytes)
    needs, wanted = _needs_bytes(m), asked_bytes(m)
    if whole is not None and needs is not None and needs > whole:
        text = f"The compiled program needs {format_size(needs)} of {format_size(whole)}."
        return Hypothesis(Cause.CAPACITY, text + _largest(m), Confidence.PROVEN)
    if whole is not None and wanted is not None and wanted > whole:
        text = (
            f"{name} asked for {format_size(wanted)} at once, more than the {format_size(whole)} "
            "available in total."
        )
        return Hypothesis(Cause.CAPACITY, text, Confidence.PROVEN)
    return None


def _program(_name: str, m: OomMessage) -> Hypothesis | None:
    needs = _needs_bytes(m)
    if needs is None:
        return None
    if needs > NEXT_TO_NOTHING_BYTES:
        text = f"The compiled program needs {format_size(needs)} at once.{_largest(m)}"
        return _open(Cause.CAPACITY, text, m, _by_size(needs))
    text = (
        f"The whole program needs {format_size(needs)}: so little is refused only if the GPU is "
        "already full, with this program's other arrays or another process."
    )
    return _open(Cause.UNKNOWN, text, m)


def _beyond_free(name: str, m: OomMessage) -> Hypothesis | None:
    free, used, wanted = m.free_bytes, known(m.allocated_bytes), asked_bytes(m)
    if free is None or wanted is None or wanted <= free:
        return None
    if used is not None and used > free:
        text = (
            f"{name} has {format_size(used)} allocated, {format_size(free)} is free, and "
            f"{format_size(wanted)} was asked for."
        )
        return _open(Cause.CAPACITY, text, m, Confidence.LIKELY)
    rest = (
        "on a TPU, which belongs to one process, this one's other arrays hold the rest"
        if _is_tpu(m)
        else "the message does not say who holds the rest"
    )
    text = f"{name} asked for {format_size(wanted)} with {format_size(free)} free; {rest}."
    return _open(Cause.CAPACITY, text, m, _by_size(wanted))


def _with_room(name: str, m: OomMessage) -> Hypothesis | None:
    free, wanted = m.free_bytes, asked_bytes(m)
    if free is None or wanted is None or wanted > free:
        return None
    text = (
        f"{name} was refused {format_size(wanted)} with {format_size(free)} free on the device: a "
        "full device does not explain it; possible causes are a limit of the driver or of virtual "
        "memory, free memory in pieces, or another process that has since freed its own."
    )
    return _open(Cause.UNKNOWN, text, m)


def _size_alone(name: str, m: OomMessage) -> Hypothesis | None:
    wanted = asked_bytes(m)
    if wanted is None:
        return None
    used = known(m.allocated_bytes)
    beside = "" if used is None else f" beside the {format_size(used)} that it has in use"
    text = f"{name} could not allocate {format_size(wanted)}{beside}."
    if wanted <= NEXT_TO_NOTHING_BYTES and m.kind in ("jax", "tf"):
        text += (
            " So little is refused only if the GPU is already full: with this program's own "
            "arrays, or another process."
        )
        return _open(Cause.UNKNOWN if m.kind == "jax" else Cause.CAPACITY, text, m)
    if (whole := told_card_bytes(m)) is not None and wanted > whole:
        text = f"{text[:-1]}, more than the {format_size(whole)} of the GPU that the text names."
        return Hypothesis(Cause.CAPACITY, text, Confidence.LIKELY)
    sure = Confidence.LIKELY if m.kind == "ggml" else _by_size(wanted)
    return _open(Cause.CAPACITY, text, m, sure)


_ROWS: Final[tuple[Callable[[str, OomMessage], Hypothesis | None], ...]] = (
    _beyond_device,
    _program,
    _beyond_free,
    _with_room,
    _size_alone,
)
