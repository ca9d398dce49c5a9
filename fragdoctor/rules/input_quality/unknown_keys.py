"""FD906: the file has unknown keys or values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Found, rule
from fragdoctor.units import format_count

MAX_NAMES: Final = 5
"""The most names to list; the others are only counted."""


@rule("FD906", Severity.INFO)
def unknown_keys(context: Context) -> Iterator[Found]:
    """The file has unknown keys or values.

    What it finds. Keys of a newer PyTorch, or of a derived one, that the reader counted and
    ignored.

    Why it costs memory. It does not; part of the file may not be understood.

    Evidence used. What the reader found.

    What to do. Update fragdoctor, or tell us about the file.

    What it can get wrong. Unknown keys are mostly harmless additions.

    Example. An action of a version that came out after this program.

    References. torch.cuda.memory: Snapshotting memory.
    """
    snapshot = context.need_analysis().trace.snapshot
    if context.device not in (None, *snapshot.devices[:1]):
        return
    origin = snapshot.provenance
    unknown = {**origin.unknown_keys, **origin.unknown_values}
    if not unknown:
        return
    names = ", ".join(sorted(unknown)[:MAX_NAMES])
    more = len(unknown) - MAX_NAMES
    yield Found(
        f"{format_count(len(unknown))} keys or values are unknown and were ignored: "
        f"{names}{f' and {more} more' if more > 0 else ''}.",
        confidence=Confidence.PROVEN,
        evidence=(Evidence("occurrences", sum(unknown.values()), "count", "snapshot"),),
    )
