"""Frees that wait for other streams."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import CURES, HELPS, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.units import format_size


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose to end waits earlier, or to try again."""
    r = plan.refusal
    if r is None or plan.cause is not Cause.PENDING_FREES:
        return
    waiting = max(r.pending_bytes, r.n_late_free_bytes)
    yield propose(
        "wait-for-streams",
        "Wait for side streams before the large allocation",
        weight=CURES,
        confidence=Confidence.LIKELY,
        change="torch.cuda.synchronize() or stream.synchronize() before it; fewer record_stream "
        "calls; limit_all_gathers=True for FSDP",
        why=f"{format_size(waiting)} were freed but waited for other streams.",
        cost="A synchronisation costs overlap of copy and compute.",
        verify="active - allocated stays small.",
        saves_bytes=waiting,
    )
    yield propose(
        "retry-once",
        "Catch the error and repeat the allocation once",
        weight=HELPS,
        confidence=Confidence.POSSIBLE,
        change="except torch.cuda.OutOfMemoryError: repeat the same call once",
        why="After the flush of the failed attempt the waits are over and the blocks are free.",
        cost="One failed attempt.",
        caveats=("Helps only if the waits were the reason.",),
        verify="The second attempt succeeds.",
    )
