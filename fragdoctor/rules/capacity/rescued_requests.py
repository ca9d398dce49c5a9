"""FD205: requests succeeded only after the cache was flushed."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Findings, Found, needed, rule
from fragdoctor.units import plural


@rule("FD205", Severity.WARNING)
def rescued_requests(context: Context) -> Findings:
    """Requests succeeded only after the cache was flushed.

    What it finds. Allocation retries beyond the failures: the driver refused new memory, the
    allocator gave back its cache and asked again.

    Why it costs memory. It costs time (a device synchronization, cudaFree and cudaMalloc calls) and
    shows that the run is near its limit.

    Evidence used. num_alloc_retries and num_ooms of the statistics, or releases of segments right
    before new ones in the trace.

    What to do. Lower the peak a little, or make the cache fit better: steady shapes,
    expandable_segments:True.

    What it can get wrong. Retries inferred from a trace are an estimate: an empty_cache() right
    before an allocation on a full device looks the same.

    Example. 17 retries in 12,000 events of a cache that grows by concatenation.

    References. torch.cuda.memory_stats: num_alloc_retries.
    """
    n, source = needed(context.retries, "a message counts no retries; statistics or a trace do")
    rescued = n - (context.n_ooms or 0)
    if rescued <= 0:
        return
    about = "About " if source == "trace" else ""
    yield Found(
        f"{about}{plural(rescued, 'request was', 'requests were')} served only after the whole "
        "cache was flushed.",
        confidence=Confidence.LIKELY if source == "trace" else Confidence.PROVEN,
        evidence=(Evidence("retries", n, "count", source),),
    )
