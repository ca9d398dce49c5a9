"""FD201: live memory and the request exceed what PyTorch could have."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Severity, in_bytes
from fragdoctor.rules.rule import Context, Findings, Found, needed, rule


@rule("FD201", Severity.ERROR)
def device_full(context: Context) -> Findings:
    """Live memory and the request exceed what PyTorch could have.

    What it finds. A refused request that would not fit even if the cache were packed perfectly.

    Why it costs memory. It is not a matter of the allocator: the tensors themselves are too large.

    Evidence used. Live bytes, the request, reserved and driver-free memory at the failure.

    What to do. Less live memory: smaller batch, checkpointing, lower precision, sharding,
    offloading, freeing what is not needed. No allocator setting helps.

    What it can get wrong. Figures of a message are rounded; within that rounding the finding says
    likely. What made live memory so large is the question of other rules.

    Example. 2.91 GiB live and a request of 48 MiB on 2.93 GiB.

    References. FAQ: My model reports "cuda runtime error(2): out of memory".
    """
    r = context.need_request()
    missing = -needed(r.margin_bytes, "the message does not print live and free memory")
    if missing <= 0:
        return
    yield Found(
        f"{r.excess_text}.",
        severity=Severity.WARNING if r.is_caught else Severity.ERROR,
        confidence=Confidence.PROVEN if missing > r.tolerance_bytes else Confidence.LIKELY,
        n_bytes=missing,
        evidence=in_bytes({"live": r.live_bytes, "available": r.available_bytes}, r.source),
    )
