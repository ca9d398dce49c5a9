"""FD108: blocks are much larger than what was asked for."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Findings, Found, needed, rule
from fragdoctor.units import format_share, format_size

ROUNDING_SHARE: Final = 0.05
"""Smallest share of active memory worth a finding; rounding to 512 bytes wastes far less."""


@rule("FD108", Severity.INFO)
def rounding_waste(context: Context) -> Findings:
    """Blocks are much larger than what was asked for.

    What it finds. The difference between active blocks and the bytes requested for them.

    Why it costs memory. roundup_power2_divisions rounds up by as much as one division, large blocks
    keep a remainder of up to 1 MiB (with max_split_size_mb up to 20 MiB), and every tiny tensor
    takes 512 bytes.

    Evidence used. Requested and active bytes of the snapshot or of the statistics (2.0 and later).

    What to do. Use more divisions, or none; join many tiny tensors into one.

    What it can get wrong. Nothing in the numbers; whether the waste matters depends on the room
    there is.

    Example. 12% of active memory is rounding under roundup_power2_divisions:4.

    References. CUDA semantics: Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF.
    """
    none = "no input records requested sizes (PyTorch 2.0 and later do)"
    totals, source = needed(context.totals, none)
    active = totals.active_bytes or 0
    waste = active - needed(totals.requested_bytes or (None if active else 0), none)
    if waste <= 0 or waste < ROUNDING_SHARE * active:
        return
    yield Found(
        f"{format_size(waste)} ({format_share(waste, active)} of active memory) is rounding: "
        "blocks are larger than what was asked for.",
        confidence=Confidence.PROVEN,
        n_bytes=waste,
        evidence=(Evidence("rounding", waste, "bytes", source),),
    )
