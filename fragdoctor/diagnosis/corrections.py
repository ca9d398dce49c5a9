"""Popular claims that are wrong, corrected if they apply to this case.

The rejected remedies and the checklist correct others: that ``empty_cache()`` or the message's own
hint helps, that a gap of 30 % is a problem.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fragdoctor.diagnosis.remedies.remedy import JudgedCase
from fragdoctor.model.diagnosis import Cause
from fragdoctor.units import MIB, format_size

LAST_STRAW_SHARE: Final = 0.02
"""A request below this share of live memory is not what filled the device."""


def find_corrections(case: JudgedCase) -> tuple[str, ...]:
    """Return one or two sentences for each popular claim that is wrong here."""
    return tuple(text for check in CORRECTIONS if (text := check(case)))


def _last_straw(case: JudgedCase) -> str:
    r = case.failed_request
    if r is None or not r.live_bytes or r.source == "user":
        return ""
    if case.cause not in (Cause.CAPACITY, Cause.LEAK, Cause.TRANSIENT_PEAK):
        return ""
    if r.requested_bytes >= LAST_STRAW_SHARE * r.live_bytes:
        return ""
    return (
        f"The line of the traceback is not the culprit: it asked for "
        f"{format_size(r.block_bytes or r.requested_bytes)} when {format_size(r.live_bytes)} were "
        "already live."
    )


def _twenty_mib(case: JudgedCase) -> str:
    r = case.failed_request
    if r is None or r.block_bytes is not None or case.backend not in ("cuda", "rocm"):
        return ""
    if case.kind != "pytorch-caching-allocator":
        return ""
    asking = {20 * MIB: "over 1 MiB and below 10 MiB", 2 * MIB: "up to 1 MiB"}
    if r.requested_bytes not in asking:
        return ""
    return (
        f"The tensor is not necessarily {format_size(r.requested_bytes)}: every request "
        f"{asking[r.requested_bytes]} asks the driver for a segment of that size, and that is what "
        "the message prints."
    )


def _private_pools(case: JudgedCase) -> str:
    message = case.message
    if message is None or not message.private_pools_bytes:
        return ""
    return (
        f"'{format_size(message.private_pools_bytes)} allocated in private pools' is not live "
        "memory: it is free cache inside these pools, included in the allocated figure."
    )


def _split_size(case: JudgedCase) -> str:
    settings = case.settings
    if settings is None or settings.max_split_bytes is None:
        return ""
    return (
        f"max_split_size_mb does not cut blocks to {format_size(settings.max_split_bytes)}: it "
        "forbids splitting blocks of that size and more. A higher number is closer to the default "
        "and has less effect."
    )


def _retries(case: JudgedCase) -> str:
    known = case.context.retries
    if known is None or known[0] < 2:
        return ""
    return (
        "A retry does not run Python's garbage collector: it flushes the cache and asks the driver "
        "again. Cycles that hold tensors need gc.collect()."
    )


def _new_name(case: JudgedCase) -> str:
    if case.message is None or case.message.variant != "torch-2.9":
        return ""
    return (
        "PYTORCH_ALLOC_CONF, which this version's message recommends, silently ignores some keys "
        "in 2.9: use PYTORCH_CUDA_ALLOC_CONF."
    )


def _smaller_batch(case: JudgedCase) -> str:
    reasons = {
        Cause.LEAK: "the leak fills any room eventually",
        Cause.OTHER_PROCESS: "another process holds the memory",
        Cause.PRIVATE_POOLS: "the memory lies free in private pools",
        Cause.SIZE_BUG: "the size itself is wrong",
        Cause.HOST_MEMORY: "it is not the GPU's memory",
    }
    reason = reasons.get(case.cause)
    return "" if reason is None else f'"A smaller batch always solves it" is wrong here: {reason}.'


CORRECTIONS: Final[tuple[Callable[[JudgedCase], str], ...]] = (
    _smaller_batch,
    _last_straw,
    _twenty_mib,
    _private_pools,
    _split_size,
    _retries,
    _new_name,
)
