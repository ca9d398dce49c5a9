"""FD302: garbage_collection_threshold without a memory fraction."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Finding, Severity
from fragdoctor.rules.rule import Context, Rule


class IdleCollection(Rule):
    """garbage_collection_threshold has no effect without a memory fraction.

    What it finds. The setting in a snapshot without any sign of a memory fraction.

    Why it costs memory. It does not; it promises what it does not do. The allocator compares with
    the threshold only where a fraction below 1 is set.

    Evidence used. Recorded settings, the message's limit, releases in the trace.

    What to do. Set a fraction (per_process_memory_fraction in the variable from 2.10 on, or
    torch.cuda.set_per_process_memory_fraction), or drop the setting.

    What it can get wrong. A snapshot does not record calls of set_per_process_memory_fraction; a
    collection in the trace, or a failed with room on the device, shows that one is set.

    Example. garbage_collection_threshold:0.8 alone: the run fails exactly as without it.

    References. CUDA semantics: garbage_collection_threshold.
    """

    code = "FD302"
    severity = Severity.WARNING

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding where the setting cannot act."""
        settings = context.need_settings()
        threshold = settings.garbage_collection_threshold
        if not threshold or context.has_memory_fraction:
            return
        yield self.finding(
            context,
            f"garbage_collection_threshold:{threshold:g} is set, but no memory fraction is in "
            "sight: without one it has no effect.",
            confidence=Confidence.LIKELY,
            evidence=(Evidence("threshold", threshold, "share", "snapshot"),),
        )
