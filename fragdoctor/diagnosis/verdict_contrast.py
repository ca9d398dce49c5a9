"""What follows from what a text says a failure depends on: that is what takes the memory."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from fragdoctor.diagnosis.decision import Hypothesis, distinct
from fragdoctor.model.case import ContrastKind, OomMessage, ToldContrast, ToldSettings
from fragdoctor.model.diagnosis import Cause
from fragdoctor.rules.traceback_signs import (
    GENERATION,
    GROWTH,
    INFERENCE,
    LATE,
    LOSS,
    sign_of,
)

OPEN: Final = (Cause.CAPACITY, Cause.UNKNOWN, Cause.LEAK, Cause.HOST_MEMORY)
_WEAKER: Final = (INFERENCE, GROWTH, LATE, GENERATION)
"""Signs that say less than what the failure depends on."""
MAY_LEAK: Final = (ContrastKind.VERSION, ContrastKind.CHANGE, ContrastKind.COUNTED)
"""What has no size of its own; memory that grows with the others is no leak."""

_TOLD: Final = {
    ContrastKind.VERSION: "it fails with {fails} and not with {works}: the newer version keeps "
    "more, or no longer does by default what saved memory",
    ContrastKind.CHANGE: "it fails with {fails} and works without: that is what takes the memory",
    ContrastKind.RAISED: "it fails with {fails} {at}: memory grows with that number",
    ContrastKind.AMOUNT: "it works with {works} {fails} and fails with {at}: memory grows with "
    "that number",
    ContrastKind.DATA: "the same settings work with other data: a batch takes as much as its "
    "largest sample, and this data set has larger ones (longer, or with more pixels, objects or "
    "nodes)",
    ContrastKind.LARGE: "it fails with {fails}: memory grows with their size",
    ContrastKind.BUFFER: "there is a {fails}: it fills up to its limit, which is no leak, but may "
    "be more than there is memory for",
    ContrastKind.COUNTED: "the number of {fails} is large: memory grows with it",
}
_OF_TORCH: Final = ("pytorch-caching-allocator", "driver-no-figures")
_BY_TEXT: Final = "According to the text"
_UNSAID: Final = ", but not what filled it."


def contrast_of(message: OomMessage | None, told: ToldSettings) -> ToldContrast | None:
    """Return what a failure depends on, unless its figures, traceback or code show more."""
    contrast, kind, sign = told.contrast, told.contrast.kind, sign_of(message)
    if message is None or kind is None or message.kind == "kv-cache" or message.is_warning:
        return None
    if kind is ContrastKind.COUNTED:  # it may be the data set: figures say more
        is_open = sign is None and message.allocated_bytes is None
        is_open |= sign is not None and sign.name == LOSS and "vocab" in contrast.fails
    else:
        is_open = sign is None or sign.name in _WEAKER
    # A tensor larger than the device has a wrong shape, and this message names its own cure.
    is_huge = (message.requested_bytes or 0) > (message.total_bytes or float("inf"))
    is_else = is_huge or message.sub_kind == "worker-gone"
    is_else |= kind is ContrastKind.BUFFER and message.is_device_oom
    return contrast if is_open and not is_else else None


def with_contrast(
    found: Hypothesis, message: OomMessage | None, contrast: ToldContrast | None
) -> Hypothesis:
    """Return a hypothesis with what the text says the failure depends on."""
    if message is None or contrast is None or contrast.kind is None or found.cause not in OPEN:
        return found
    said = _TOLD[contrast.kind].format(
        fails=contrast.fails or "the new version",
        works=contrast.works or "the one before",
        at=contrast.at or "increased",
    )
    summary, cause = found.summary, found.cause
    is_bare = message.requested_bytes is None and message.sub_kind != "unread"
    if cause is Cause.UNKNOWN and is_bare and message.kind in _OF_TORCH:
        cause, summary = Cause.CAPACITY, f"The text says that the GPU ran out of memory{_UNSAID}"
    if summary.endswith(_UNSAID):
        summary = f"{summary.removesuffix(_UNSAID)}, and that {said}."
    elif summary.startswith(_BY_TEXT):
        summary = f"{summary} {said[0].upper()}{said[1:]}."
    else:
        summary = f"{summary} {_BY_TEXT}, {said}."
    also = distinct((found.cause, *found.also), cause)
    return replace(found, cause=cause, summary=summary, also=also)
