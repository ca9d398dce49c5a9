"""FD103: the same lines keep asking for new sizes of large blocks."""

from __future__ import annotations

from fragdoctor.analysis.result import SizeDiversity
from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Findings, Found, needed, rule
from fragdoctor.units import plural


@rule("FD103", Severity.INFO)
def drifting_sizes(context: Context) -> Findings:
    """The same lines keep asking for new sizes of large blocks.

    What it finds. Lines that ask for large blocks whose size was not seen from them before, again
    and again until the end of the trace: variable sequence lengths, image sizes or batch sizes.

    Why it costs memory. A freed block serves a request only if it is at least as large; the rest is
    split off. With sizes that never repeat, the cache fills with remainders.

    Evidence used. Requested sizes and stacks of the allocation events.

    What to do. Pad to buckets, sort by length, run the largest shape first, round sizes with
    roundup_power2_divisions, or use expandable_segments:True.

    What it can get wrong. Variable sizes are harmless as long as there is room: without retries or
    failures this is only a remark. Warm-up with a few shapes looks the same in a short trace.

    Example. 86 different sizes in 2,047 large requests of a model trained without padding.

    References. CUDA semantics: Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF.
    """
    analysis = context.need_trace()
    sizes = needed(analysis.sizes, "the trace has no allocation events")
    if not sizes.drifting:
        return
    retries = context.retries
    is_tight = bool(analysis.ooms) or (retries is not None and retries[0] > 0)
    yield Found(
        f"{variety_text(sizes)}, and new ones keep coming.",
        severity=Severity.WARNING if is_tight else Severity.INFO,
        confidence=Confidence.LIKELY,
        evidence=(
            Evidence("distinct large sizes", sizes.n_distinct_large, "count", "trace"),
            Evidence("large requests", sizes.n_large_allocs, "count", "trace"),
        ),
    )


def variety_text(sizes: SizeDiversity) -> str:
    """Return how many sizes the large requests have."""
    large = plural(sizes.n_large_allocs, "large request has", "large requests have")
    return f"{large} {plural(sizes.n_distinct_large, 'size')}"
