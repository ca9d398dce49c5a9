"""FD907: the message lacks figures that its kind prints."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.case import OomMessage
from fragdoctor.model.finding import Confidence, Severity
from fragdoctor.rules.rule import Context, Found, rule


def missing_figures(message: OomMessage) -> list[str]:
    """Return the figures that a message lacks although its kind prints them."""
    if message.kind != "pytorch-caching-allocator" or message.backend not in ("cuda", "rocm"):
        return []
    if message.sub_kind:  # more than 1 EB is refused before anything is measured
        return []
    figures = {
        "device size": message.total_bytes,
        "free": message.free_bytes,
        "allocated": message.allocated_bytes,
    }
    return [name for name, value in figures.items() if value is None]


@rule("FD907", Severity.INFO)
def cut_message(context: Context) -> Iterator[Found]:
    """The message lacks figures that its kind prints.

    What it finds. Allocator messages without allocated, reserved or free memory: cut by a log tool,
    retyped, or printed by a version with a defect.

    Why it costs memory. It does not; capacity and fragmentation cannot be told apart.

    Evidence used. The fields of the message.

    What to do. Give the whole message, up to the advice at its end.

    What it can get wrong. Some backends never print all figures (XPU before 2.9, MPS).

    Example. A log line that ends after "of which 448.00 KiB is free."

    References. CUDA semantics: Memory management.
    """
    message = context.need_message()
    missing = missing_figures(message)
    if missing:
        yield Found(
            f"The message in line {message.line} lacks: {', '.join(missing)}.",
            confidence=Confidence.PROVEN,
        )
