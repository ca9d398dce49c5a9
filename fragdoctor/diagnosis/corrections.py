"""Popular claims that are wrong, corrected if they apply to this case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fragdoctor.diagnosis.checklist import RULE_OF_THUMB_SHARE, totals_of
from fragdoctor.diagnosis.decision import LAST_STRAW_SHARE
from fragdoctor.diagnosis.remedies.allocator_settings import beyond_holes
from fragdoctor.diagnosis.remedies.remedy import JudgedCase
from fragdoctor.model.diagnosis import Cause
from fragdoctor.units import MIB, format_share, format_size


def find_corrections(case: JudgedCase) -> tuple[str, ...]:
    """Return one or two sentences for each popular claim that is wrong here."""
    return tuple(text for check in CORRECTIONS if (text := check(case)))


def _hint(case: JudgedCase) -> str:
    r = case.failed_request
    if r is None or not r.hint.startswith(("expandable", "max_split")):
        return ""
    if r.hint.startswith("expandable") and case.expandable_is_on:
        return (
            "The message suggests expandable_segments:True, but that is on already: the hint is "
            "printed unconditionally."
        )
    hint = f"The message's own hint ({r.hint}) is printed unconditionally and cannot help here."
    return f"{hint} {why}" if (why := beyond_holes(case)) else ""


def _empty_cache(case: JudgedCase) -> str:
    if not case.is_allocator_case or case.failed_request is None:
        return ""
    if case.cause not in (Cause.CAPACITY, Cause.FRAGMENTATION, Cause.LEAK, Cause.TRANSIENT_PEAK):
        return ""
    return (
        '"Call torch.cuda.empty_cache() to fix it" is wrong here: the allocator returned every '
        "unused segment by itself and tried again before it raised the error."
    )


def _last_straw(case: JudgedCase) -> str:
    r = case.failed_request
    if r is None or not r.live_bytes:
        return ""
    if case.cause not in (Cause.CAPACITY, Cause.LEAK, Cause.TRANSIENT_PEAK):
        return ""
    if r.requested_bytes >= LAST_STRAW_SHARE * r.live_bytes:
        return ""
    return (
        f"The line of the traceback is not the culprit: it asked for "
        f"{format_size(r.block_bytes or r.requested_bytes)} when {format_size(r.live_bytes)} was "
        "already live."
    )


def _twenty_mib(case: JudgedCase) -> str:
    r = case.failed_request
    if r is None or r.block_bytes is not None or case.backend not in ("cuda", "rocm"):
        return ""
    if case.kind != "pytorch-caching-allocator":
        return ""
    which = {2 * MIB: "up to 1 MiB", 20 * MIB: "over 1 MiB and below 10 MiB"}.get(r.requested_bytes)
    if which is None:
        return ""
    size = f"{r.requested_bytes // MIB} MiB"
    return (
        f"The tensor is not necessarily {size}: every request {which} asks the driver for a "
        f"segment of {size}, and that is what the message prints."
    )


def _thirty_per_cent(case: JudgedCase) -> str:
    totals = totals_of(case.context)
    if totals is None or case.cause not in (Cause.HEALTHY, Cause.CAPACITY, Cause.LEAK):
        return ""
    rule = RULE_OF_THUMB_SHARE * totals.reserved_bytes
    if totals.returned_bytes is None or not totals.stuck_bytes < rule <= totals.gap_bytes:
        return ""
    return (
        f'"More than 30% reserved but unallocated means trouble" is wrong here: of the '
        f"{format_share(totals.gap_bytes, totals.reserved_bytes)} all but "
        f"{format_share(totals.stuck_bytes, totals.reserved_bytes)} is cache that is returned on "
        "demand."
    )


def _private_pools(case: JudgedCase) -> str:
    message = case.message
    if message is None or not message.private_pools_bytes:
        return ""
    return (
        f"'{format_size(message.private_pools_bytes)} allocated in private pools' is not live "
        "memory: it is free cache inside these pools, included in the allocated figure."
    )


def _own_process(case: JudgedCase) -> str:
    r = case.failed_request
    if r is None or r.own_pid is None:
        return ""
    return (
        f"Process {r.own_pid} is not another process: it holds what this PyTorch reserved plus a "
        "context. In a container its number differs from the one seen inside."
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
    _hint,
    _empty_cache,
    _smaller_batch,
    _last_straw,
    _twenty_mib,
    _thirty_per_cent,
    _private_pools,
    _own_process,
    _split_size,
    _retries,
    _new_name,
)
