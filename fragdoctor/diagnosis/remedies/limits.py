"""Remedies for a limit that the process set for itself."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from fragdoctor.diagnosis.bench import Attempt, Bench, Outcome
from fragdoctor.diagnosis.remedies.remedy import CURES, HELPS, JudgedCase, Proposal, Remedy
from fragdoctor.model.diagnosis import Cause, Predicted
from fragdoctor.model.finding import Confidence
from fragdoctor.rules.failed_request import FailedRequest
from fragdoctor.trace.whatif import WhatIf
from fragdoctor.units import format_size


class RaiseMemoryLimit(Remedy):
    """The process's own memory fraction: raise it, by how much."""

    code: ClassVar[str] = "raise-memory-limit"
    title: ClassVar[str] = "Raise the memory fraction"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose a higher limit where the limit forbade the request and the device has room."""
        if not case.supports(Cause.MEMORY_LIMIT):
            return
        if case.backend == "mps" or case.kind == "kv-cache":
            return
        is_main = case.cause is Cause.MEMORY_LIMIT
        r = case.failed_request
        is_room_known = r is not None and (r.free_bytes is None or r.is_covered_by_free)
        if not is_room_known and not is_main:
            return
        needed = None
        if r is not None and r.reserved_bytes is not None:
            needed = r.reserved_bytes + r.requested_bytes + r.tolerance_bytes
        proposal = self.proposal(
            weight=CURES + 5 if is_main else HELPS,
            confidence=Confidence.LIKELY if is_main else Confidence.POSSIBLE,
            why=case.verdict.summary
            if is_main
            else "The device had more free than was requested; a limit of this process would "
            "explain it.",
            cost="Less room for others on this device.",
            caveats=("Someone may have set the limit to share the device.",),
            verify="The message no longer prints 'allowed', or a larger figure.",
            predicted=Predicted(fits=True, method="arithmetic")
            if r is not None and r.limit_is_binding and r.is_covered_by_free
            else None,
        )
        yield _with_fraction(proposal, r, needed)

    def attempts(self, case: JudgedCase, bench: Bench, proposal: Proposal | None) -> list[Attempt]:
        """Try the whole device."""
        del bench
        r = case.failed_request
        if proposal is None or r is None or r.free_bytes is None or not r.reserved_bytes:
            return []
        whole = WhatIf(capacity_bytes=r.reserved_bytes + r.free_bytes, edit="without the limit")
        return [Attempt(whole)]

    def judged(
        self, case: JudgedCase, bench: Bench, proposal: Proposal | None, outcomes: Sequence[Outcome]
    ) -> Proposal | None:
        """Return it with the fraction that all recorded requests need."""
        judged = super().judged(case, bench, proposal, outcomes)
        result = outcomes[0].result
        if judged is None or not result.fits:
            return judged
        needed = _with_fraction(judged, case.failed_request, result.peak_reserved_bytes)
        return needed.with_caveat(
            "The prediction is without any limit: then the recorded run reserves "
            f"{format_size(result.peak_reserved_bytes)}."
        )


def _with_fraction(
    proposal: Proposal, r: FailedRequest | None, needed_bytes: int | None
) -> Proposal:
    """Return the proposal with the least fraction that admits some bytes, as far as known."""
    fraction = _fraction(r, needed_bytes)
    present = "" if r is None or not r.fraction else f" from {r.fraction:.2f}"
    r_ = proposal.recommendation
    number = "" if fraction is None else f"{present} to at least {fraction:g}"
    value = "..." if fraction is None else f"{fraction:g}"
    changed = replace(
        r_,
        title=f"{RaiseMemoryLimit.title}{number}",
        change=f"torch.cuda.set_per_process_memory_fraction({value}), or remove the call; from "
        "2.10 on also per_process_memory_fraction in PYTORCH_CUDA_ALLOC_CONF",
    )
    return replace(proposal, recommendation=changed)


def _fraction(r: FailedRequest | None, needed_bytes: int | None) -> float | None:
    """Return the least fraction that admits some bytes, in hundredths if they tell it apart."""
    if r is None or r.total_bytes is None or needed_bytes is None:
        return None
    share = needed_bytes / r.total_bytes
    if share > 1:
        return None
    present = r.fraction or 0.0
    for digits in (2, 3):
        fraction = math.ceil(share * 10**digits) / 10**digits
        if fraction >= present + 0.5 / 10**digits:
            break
    # Less than is set already is no advice: the sum of the figures leaves out what decided.
    return min(1.0, fraction) if min(1.0, fraction) > present else None


class RaiseMpsWatermark(Remedy):
    """MPS stops at a watermark."""

    code: ClassVar[str] = "raise-mps-watermark"
    title: ClassVar[str] = "Raise the high watermark of MPS, or free unified memory"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose it where the watermark is the limit."""
        if case.backend != "mps" or not case.supports(Cause.MEMORY_LIMIT):
            return
        yield self.proposal(
            weight=HELPS if case.cause is Cause.MEMORY_LIMIT else HELPS - 20,
            confidence=Confidence.POSSIBLE,
            setting="PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0",
            change="close other programs; torch.mps.empty_cache() after large steps",
            why="MPS stops at a share of the recommended working set, not at the end of memory.",
            cost="Without the limit the whole machine may run out of memory.",
            caveats=(
                "Metal's other allocations are driver and graph caches: fixed shapes shrink them.",
            ),
            verify="The message's 'max allowed' disappears or grows.",
        )
