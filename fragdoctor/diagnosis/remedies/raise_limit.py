"""The process's own limit: raise it, by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import CURES, HELPS, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.refusal import Refusal


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose a higher limit where the limit refused and the device has room."""
    if not plan.supports(Cause.MEMORY_LIMIT):
        return
    is_main = plan.cause is Cause.MEMORY_LIMIT
    if plan.backend == "mps":
        yield _mps(is_main=is_main)
        return
    if plan.kind == "kv-cache":
        return
    r = plan.refusal
    is_room_known = r is not None and (r.free_bytes is None or r.is_covered_by_free)
    if not is_room_known and not is_main:
        return
    fraction = _fraction(r)
    number = "" if fraction is None else f" to at least {fraction:.2f}"
    yield propose(
        "raise-memory-limit",
        f"Raise the memory fraction{number}",
        weight=CURES + 5 if is_main else HELPS,
        confidence=Confidence.LIKELY if is_main else Confidence.POSSIBLE,
        change="torch.cuda.set_per_process_memory_fraction"
        f"({'...' if fraction is None else f'{fraction:.2f}'}), or remove the call; from 2.10 on "
        "also per_process_memory_fraction in PYTORCH_CUDA_ALLOC_CONF",
        why=plan.verdict.summary
        if is_main
        else "The device had more free than was asked; a limit of this process would explain it.",
        cost="Less room for others on this device.",
        caveats=("Someone may have set the limit to share the device.",),
        verify="The message no longer prints 'allowed', or a larger figure.",
        predicted=Predicted(fits=True, method="arithmetic")
        if r is not None and r.limit_is_binding and r.is_covered_by_free
        else None,
    )


def _fraction(r: Refusal | None) -> float | None:
    """Return the least fraction that admits the request, rounded up to a hundredth."""
    if r is None or r.total_bytes is None or r.reserved_bytes is None:
        return None
    share = (r.reserved_bytes + r.requested_bytes + r.tolerance_bytes) / r.total_bytes
    return math.ceil(share * 100) / 100 if share <= 1 else None


def _mps(*, is_main: bool) -> Proposal:
    return propose(
        "raise-mps-watermark",
        "Raise the high watermark of MPS, or free unified memory",
        weight=HELPS if is_main else HELPS - 20,
        confidence=Confidence.POSSIBLE,
        setting="PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",
        change="close other programs; torch.mps.empty_cache() after large steps",
        why="MPS refuses at a share of the recommended working set, not at the end of memory.",
        cost="Without the limit the whole machine may run out of memory.",
        caveats=(
            "Metal's other allocations are driver and graph caches: fixed shapes shrink them.",
        ),
        verify="The message's 'max allowed' disappears or grows.",
    )
