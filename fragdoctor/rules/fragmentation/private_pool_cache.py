"""FD105: free memory lies in private pools."""

from __future__ import annotations

from fragdoctor.model.finding import WORTH_SAYING, Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Findings, Found, Skip, rule
from fragdoctor.units import format_share, format_size


@rule("FD105", Severity.INFO)
def private_pool_cache(context: Context) -> Findings:
    """Free memory lies in private pools.

    What it finds. Free cached memory in the pools of CUDA graphs and of torch.cuda.MemPool.

    Why it costs memory. Blocks never leave their pool. While the graph or pool lives, its free
    memory serves no other request and is not returned.

    Evidence used. The pool ids of the segments in a snapshot, or the figure for private pools in a
    message of PyTorch 2.4 or later.

    What to do. Capture graphs into one shared pool, capture fewer shapes, delete pools that are
    done, or create them with use_on_oom=True (2.8 and later).

    What it can get wrong. Memory that a graph uses when it replays shows as free in a snapshot:
    it is not waste, only unavailable.

    Example. 180 MiB free inside a MemPool while the default pool lacks 200 MiB.

    References. CUDA semantics: CUDA Graphs, Graph memory management; Using custom memory
    allocators.
    """
    if context.analysis is not None:
        free = context.analysis.free_space.private_pools_free_bytes
        reserved, source = context.analysis.reserved_bytes, "snapshot"
    elif context.message is not None and context.message.reserved_bytes:
        free = context.message.private_pools_bytes or 0
        reserved, source = context.message.reserved_bytes, "oom message"
    else:
        raise Skip("neither a snapshot nor an allocator's message was given")
    if free < WORTH_SAYING * reserved or not free:
        return
    r = context.failed_request
    was_wanted = r is not None and free + (r.free_bytes or 0) >= r.requested_bytes
    yield Found(
        f"{format_size(free)} ({format_share(free, reserved)} of reserved memory) is free "
        "inside private pools of graphs or MemPools, usable by them alone.",
        severity=Severity.WARNING if was_wanted else Severity.INFO,
        confidence=Confidence.PROVEN,
        n_bytes=free,
        evidence=(Evidence("free in private pools", free, "bytes", source),),
    )
