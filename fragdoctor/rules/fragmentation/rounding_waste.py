"""FD108: blocks are much larger than what was asked for."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Findings, Found, Skip, rule
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
    waste, active, source = _waste(context)
    if not waste or waste < ROUNDING_SHARE * active:
        return
    yield Found(
        f"{format_size(waste)} ({format_share(waste, active)} of active memory) is rounding: "
        "blocks are larger than what was asked for.",
        confidence=Confidence.PROVEN,
        n_bytes=waste,
        evidence=(Evidence("rounding", waste, "bytes", source),),
    )


def _waste(context: Context) -> tuple[int, int, str]:
    analysis = context.analysis
    if analysis is not None and analysis.requested_bytes:
        active = analysis.active_bytes
        return max(0, active - analysis.requested_bytes), active, "snapshot"
    for s in context.stats[-1:]:
        if s.requested_bytes is not None and s.active_bytes is not None:
            return max(0, s.active_bytes - s.requested_bytes), s.active_bytes, s.origin
    raise Skip("no input records requested sizes (PyTorch 2.0 and later do)")
