"""FD202: a single request is larger than all that PyTorch could have."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.failed_request import SIZE_BUG_BYTES
from fragdoctor.rules.rule import Context, Findings, Found, Skip, rule
from fragdoctor.units import format_size


@rule("FD202", Severity.ERROR)
def request_beyond_device(context: Context) -> Findings:
    """A single request is larger than all that PyTorch could have.

    What it finds. A refused request above the size of the device, or above what PyTorch could have
    on it, and requests so large that their size must be a mistake.

    Why it costs memory. No state of the cache could serve it.

    Evidence used. The request, the size of the device, reserved and driver-free memory.

    What to do. Look at that one tensor: its shape, its dtype, an attention matrix over the whole
    sequence, an image that was not resized, a negative size.

    What it can get wrong. Without the size of the device it compares with what this process could
    have; another process may hold the rest.

    Example. An attention matrix of 112.89 GiB on a device of 79 GiB.

    References. FAQ: My model reports "cuda runtime error(2): out of memory".
    """
    r = context.need_request()
    bound = r.total_bytes if r.total_bytes is not None else r.available_bytes
    is_bug = r.requested_bytes >= SIZE_BUG_BYTES
    if bound is None and not is_bug:
        raise Skip("no input says how large the device is")
    if not is_bug and bound is not None and r.requested_bytes <= bound:
        return
    against = "any device" if bound is None else format_size(bound)
    yield Found(
        f"One request of {format_size(r.requested_bytes)} exceeds {against}.",
        severity=Severity.WARNING if r.is_caught else Severity.ERROR,
        confidence=Confidence.PROVEN,
        n_bytes=r.requested_bytes,
        evidence=(Evidence("requested", r.requested_bytes, "bytes", r.source),),
        key="size-bug" if is_bug else "",
    )
