"""FD305: native settings under another backend."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Finding, Severity
from fragdoctor.rules.rule import Context, Rule


class IgnoredNativeSettings(Rule):
    """cudaMallocAsync ignores settings of the native allocator.

    What it finds. max_split_size_mb, roundup_power2_divisions or garbage_collection_threshold
    beside backend:cudaMallocAsync.

    Why it costs memory. It does not; the settings have no effect, and advice about them is void.

    Evidence used. The recorded setting string.

    What to do. Drop them, or go back to the native backend.

    What it can get wrong. Nothing known: PyTorch itself warns in the same words.

    Example. backend:cudaMallocAsync,max_split_size_mb:128.

    References. CUDA semantics: backend.
    """

    code = "FD305"
    severity = Severity.WARNING

    def check(self, context: Context) -> Iterator[Finding]:
        """Yield one finding with the ignored keys."""
        settings = context.need_settings()
        if settings.backend == "native":
            return
        ignored = [
            key
            for key, is_set in (
                ("max_split_size_mb", settings.max_split_bytes is not None),
                ("roundup_power2_divisions", settings.roundup_is_on),
                ("garbage_collection_threshold", settings.garbage_collection_threshold > 0),
            )
            if is_set
        ]
        if ignored:
            yield self.finding(
                context,
                f"backend:cudaMallocAsync ignores {', '.join(ignored)}.",
                confidence=Confidence.PROVEN,
            )
