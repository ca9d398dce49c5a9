"""Private pools of CUDA graphs and MemPool."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.diagnosis.remedies.plan import CURES, MAY_HELP, Plan, Proposal, propose
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.units import format_size


def remedies(plan: Plan) -> Iterator[Proposal]:
    """Propose to share or drop private pools where their free memory was wanted."""
    r = plan.refusal
    if r is None or not plan.supports(Cause.PRIVATE_POOLS):
        return
    is_main = plan.cause is Cause.PRIVATE_POOLS
    yield propose(
        "share-graph-pools",
        "Share one pool among graphs, or drop graphs that are not needed",
        weight=CURES if is_main else MAY_HELP,
        confidence=Confidence.LIKELY if is_main else Confidence.POSSIBLE,
        change="pass pool=first_graph.pool() to every torch.cuda.graph(...), capture fewer shapes, "
        "delete graphs and MemPools that are done; torch.cuda.MemPool(use_on_oom=True) from 2.8 on",
        why=f"{format_size(r.pools_free_bytes)} lie free inside private pools, where ordinary "
        "requests cannot use them.",
        cost="Graphs that share a pool must run in the order of their capture.",
        caveats=("Memory of a live graph's pool stays until graph and pool are gone.",),
        verify="'allocated in private pools' in the message, or the private segments of a "
        "snapshot, shrink.",
        saves_bytes=r.pools_free_bytes,
    )
