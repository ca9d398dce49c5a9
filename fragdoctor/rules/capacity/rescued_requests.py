"""FD205: requests that only a flush of the cache rescued."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.rule import Context, Rule, Skip
from fragdoctor.units import format_count


class RescuedRequests(Rule):
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

    code = "FD205"
    severity = Severity.WARNING

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding if there were more retries than failures."""
        known = context.retries
        if known is None:
            raise Skip("a message counts no retries; statistics or a trace do")
        n, source = known
        failures = [s.n_ooms for s in context.stats if s.n_ooms is not None]
        n_ooms = failures[-1] if failures else 0
        if not failures and context.analysis is not None:
            n_ooms = len(context.analysis.ooms)
        rescued = n - n_ooms
        if rescued <= 0:
            return
        about = "About " if source == "trace" else ""
        yield self.finding(
            context,
            f"{about}{format_count(rescued)} "
            f"{'request was' if rescued == 1 else 'requests were'} served only after the whole "
            "cache was flushed.",
            confidence=Confidence.LIKELY if source == "trace" else Confidence.PROVEN,
            evidence=(Evidence("retries", n, "count", source),),
        )
