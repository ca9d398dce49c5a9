"""FD303: max_split_size_mb and expandable_segments are both set."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.rule import Context, Findings, Found, needed, rule
from fragdoctor.units import format_size


@rule("FD303", Severity.WARNING)
def split_limit_with_expandable(context: Context) -> Findings:
    """max_split_size_mb and expandable_segments are both set.

    What it finds. The two settings together in a snapshot.

    Why it costs memory. Expandable segments split blocks regardless of the limit, but the search
    for a free block still obeys it: large free blocks are passed over and new pages mapped, so that
    reserved memory can grow without bound.

    Evidence used. Recorded settings.

    What to do. Remove max_split_size_mb.

    What it can get wrong. Programs whose requests all stay below the limit are not harmed.

    Example. expandable_segments:True,max_split_size_mb:128 with requests of 200 MiB.

    References. CUDA semantics: max_split_size_mb; expandable_segments.
    """
    settings = needed(context.settings, "no input records the allocator settings")
    if not settings.expandable_segments or settings.max_split_bytes is None:
        return
    yield Found(
        f"max_split_size_mb ({format_size(settings.max_split_bytes)}) beside "
        "expandable_segments makes the cache pass over large free blocks.",
        confidence=Confidence.LIKELY,
        evidence=(Evidence("max split size", settings.max_split_bytes, "bytes", "snapshot"),),
    )
