"""FD301: the process's own memory limit refused the request."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Findings, Found, rule
from fragdoctor.units import format_size


@rule("FD301", Severity.ERROR)
def memory_limit(context: Context) -> Findings:
    """The process's own memory limit refused the request.

    What it finds. A request that the limit forbids, or one refused although the device had enough
    free memory for it.

    Why it costs memory. set_per_process_memory_fraction bounds reserved memory, however much the
    device has free.

    Evidence used. The "allowed" figure of the message, or driver-free memory at the failure.

    What to do. Raise or remove the fraction if the device is not shared.

    What it can get wrong. PyTorch 2.1 to 2.4 do not print the limit. Without the figure, a race
    with another process or the driver's own limits look the same.

    Example. 384 MiB refused with 13.07 GiB free: the fraction is 0.2 of 16 GiB.

    References. torch.cuda.set_per_process_memory_fraction.
    """
    r = context.need_request()
    if r.limit_bytes is not None and r.limit_is_binding:
        if r.total_bytes is not None and r.limit_bytes >= r.total_bytes:
            return
        yield Found(
            f"{format_size(r.reserved_bytes)} reserved and {format_size(r.requested_bytes)} "
            f"asked exceed the limit of {format_size(r.limit_bytes)}.",
            confidence=Confidence.PROVEN,
            n_bytes=r.requested_bytes,
            evidence=(Evidence("limit", r.limit_bytes, "bytes", r.source),),
        )
    elif r.is_exact and r.is_covered_by_free and not r.fails_by_pages:
        yield Found(
            f"The {r.request_text} failed with {format_size(r.free_bytes)} free on the device: a "
            "memory fraction is the usual reason.",
            confidence=Confidence.LIKELY,
            n_bytes=r.requested_bytes,
            evidence=(Evidence("device free", r.free_bytes or 0, "bytes", r.source),),
        )
