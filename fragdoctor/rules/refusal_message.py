"""From an out-of-memory message to the figures of a refusal."""

from __future__ import annotations

from collections.abc import Sequence

from fragdoctor.model.oom import OomMessage, OtherProcess
from fragdoctor.rules.refusal import CONTEXT_ALLOWANCE_BYTES, Refusal, known, rounding_bytes


def refusal_from_message(message: OomMessage) -> Refusal | None:
    """Return the figures of an allocator message, None where it names no size."""
    requested = message.requested_bytes
    if requested is None:
        return None
    allocated = known(message.allocated_bytes)
    reserved = known(message.reserved_bytes)
    if reserved is None and message.backend != "mps":
        reserved = allocated
    unallocated = message.reserved_unallocated_bytes
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    own, others, own_pid = split_processes(
        known(message.process_bytes), message.other_processes, reserved
    )
    active = message.active_bytes
    live = message.live_bytes if known(message.allocated_bytes) is not None else None
    pending = max(0, active - live) if active is not None and live is not None else 0
    return Refusal(
        source="oom message",
        requested_bytes=requested,
        total_bytes=known(message.total_bytes),
        free_bytes=known(message.free_bytes),
        live_bytes=live if live is None else live + pending,
        unallocated_bytes=unallocated if unallocated is None else max(0, unallocated - pending),
        pools_free_bytes=message.private_pools_bytes or 0,
        pending_bytes=pending,
        reserved_bytes=reserved,
        limit_bytes=known(message.limit_bytes),
        process_bytes=own,
        other_processes=others,
        own_pid=own_pid,
        may_hide_limit=_may_hide_limit(message),
        expandable=message.expandable_is_on,
        backend=message.backend,
        device=message.device_index,
        hint=message.free_allocated_hint,
    )


def split_processes(
    own: int | None, listed: Sequence[OtherProcess], reserved: int | None
) -> tuple[int | None, tuple[OtherProcess, ...], int | None]:
    """Tell our own process from the others: in a container NVML's ids do not match ours.

    A process that holds what PyTorch reserved plus a context is this one; where several would do,
    the one that comes closest. Returned are our own bytes, the others, and our id in the list.
    """
    others = tuple(p for p in listed if known(p.n_bytes) is not None)
    if own is not None or reserved is None or reserved == 0:
        return own, others, None
    low = reserved - rounding_bytes(reserved) * 2
    fitting = [p for p in others if low <= p.n_bytes <= reserved + CONTEXT_ALLOWANCE_BYTES]
    if not fitting:
        return None, others, None
    ourselves = min(fitting, key=lambda p: abs(p.n_bytes - reserved))
    rest = tuple(p for p in others if p is not ourselves)
    return ourselves.n_bytes, rest, ourselves.pid


def _may_hide_limit(message: OomMessage) -> bool:
    """Tell whether this wording leaves out ``allowed`` though a fraction may be set (2.1-2.4)."""
    if message.limit_bytes is not None or message.backend not in ("cuda", "rocm"):
        return False
    low = _version(message.version_low)
    high = _version(message.version_high)
    return (low is None or low <= (2, 4)) and (high is None or high >= (2, 1))


def _version(text: str) -> tuple[int, int] | None:
    parts = text.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])
