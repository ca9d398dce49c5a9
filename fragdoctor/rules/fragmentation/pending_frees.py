"""FD106: freed blocks wait for work on other streams."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.failed_request import FULL_SLACK_SHARE
from fragdoctor.rules.rule import Context, Findings, Found, needed, rule
from fragdoctor.units import format_size


@rule("FD106", Severity.INFO)
def pending_frees(context: Context) -> Findings:
    """Freed blocks wait for work on other streams.

    What it finds. Memory that is active but no longer allocated, and blocks whose wait ended only
    in the flush before a failure.

    Why it costs memory. A tensor that another stream uses (record_stream, side-stream copies, FSDP
    prefetch) is reusable only when that stream's work is done. After its last flush the allocator
    does not search its cache again.

    Evidence used. Block states of the snapshot, active and allocated bytes of the statistics, free
    events right before the failure.

    What to do. Synchronize the streams before the large allocation, use fewer record_stream calls,
    limit_all_gathers for FSDP, or repeat the failed call once.

    What it can get wrong. A snapshot taken in the middle of overlapping work always shows some.

    Example. 898 MiB is waiting for a side stream when 800 MiB is requested.

    References. torch.Tensor.record_stream; CUDA semantics: CUDA streams.
    """
    none = "neither a snapshot nor statistics with active bytes were given"
    totals, source = needed(context.totals, none)
    pending = needed(totals.active_bytes, none) - needed(totals.allocated_bytes, none)
    r = context.failed_request
    late = r.late_free_bytes if r is not None else 0
    if late and r is not None and late >= r.requested_bytes:
        yield Found(
            f"{format_size(late)} came free only in the flush before the failure of "
            f"{format_size(r.requested_bytes)}, after which the cache is not searched again.",
            severity=Severity.WARNING,
            confidence=Confidence.LIKELY,
            n_bytes=late,
            evidence=(Evidence("late frees", late, "bytes", "trace"),),
            key="late",
        )
    if pending <= 0 or pending < FULL_SLACK_SHARE * (totals.reserved_bytes or 0):
        return
    yield Found(
        f"{format_size(pending)} is freed but waiting for other streams.",
        severity=Severity.WARNING if r is not None and not r.is_caught else Severity.INFO,
        confidence=Confidence.PROVEN,
        n_bytes=pending,
        evidence=(Evidence("pending", pending, "bytes", source),),
    )
