"""``empty_cache()``: for others, hardly ever for the process that calls it."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import HELPS, Plan, Proposal, propose, reject
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence

CODE = "empty-cache"
TITLE = "Call torch.cuda.empty_cache() before the failing line"
LIBRARIES = ("cublas", "cudnn", "nccl")


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose it where memory is wanted outside PyTorch's cache; reject it elsewhere."""
    if plan.kind in LIBRARIES:
        yield propose(
            CODE,
            "Call torch.cuda.empty_cache() before the library starts",
            weight=HELPS,
            confidence=Confidence.POSSIBLE,
            change="torch.cuda.empty_cache() before the first call of the library or the creation "
            "of the communicator",
            why="The library allocates outside PyTorch's cache, and nobody flushes the cache for "
            "it.",
            cost="The cache must be filled again; keep it out of the training loop.",
            verify="torch.cuda.mem_get_info() shows the free memory before the call.",
        )
        return
    if not plan.is_allocator_case or plan.refusal is None or plan.refusal.source == "user":
        return
    if plan.cause in (Cause.SIZE_BUG, Cause.UNKNOWN, Cause.PENDING_FREES):
        return
    yield reject(
        CODE,
        TITLE,
        confidence=Confidence.PROVEN,
        why="The allocator returned everything it could by itself before it raised the error; "
        "live tensors and pinned holes are untouched by it.",
    )
