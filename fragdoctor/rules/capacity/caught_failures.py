"""FD206: the program caught out-of-memory errors and went on."""

from __future__ import annotations

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.rules.request_sources import last_request
from fragdoctor.rules.rule import Context, Findings, Found, rule
from fragdoctor.units import format_size, plural


@rule("FD206", Severity.INFO)
def caught_failures(context: Context) -> Findings:
    """The program caught out-of-memory errors and went on.

    What it finds. Out-of-memory events after which the same trace goes on allocating.

    Why it costs memory. It need not: searching for the largest batch works so. But each failure
    flushes the cache, and a handler that keeps the exception keeps the frames' tensors alive.

    Evidence used. The order of events in the trace.

    What to do. Leave the except block before trying again, so that the traceback is released; then
    call gc.collect() if tensors are still held.

    What it can get wrong. Another thread that goes on while the failing one ends looks the same.

    Example. Three batch sizes are tried, 4000, 2000 and 1000 MiB; the fourth fits.

    References. FAQ: My out of memory exception handler can't allocate memory.
    """
    analysis = context.need_trace()
    last = last_request(analysis.trace)
    caught = [event for event in analysis.ooms if event.row < last]
    if not caught:
        return
    n = len(caught)
    largest = max(e.rounded_bytes for e in caught)
    yield Found(
        f"{plural(n, 'failed request was', 'failed requests were')} survived, the largest "
        f"of {format_size(largest)}.",
        confidence=Confidence.PROVEN,
        n_bytes=largest,
        evidence=(Evidence("caught failures", n, "count", "trace"),),
        locations=context.user_stack(caught[-1].stack),
    )
