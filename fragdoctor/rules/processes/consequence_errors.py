"""FD506: errors follow from an earlier failure."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.model.story import FAILURES, Scene
from fragdoctor.rules.rule import Context, Found, needed, rule
from fragdoctor.units import format_count, plural


@rule("FD506", Severity.INFO)
def consequence_errors(context: Context) -> Iterator[Found]:
    """Errors follow from an earlier failure.

    What it finds. Asserts, CUDA errors, time-outs of collectives and kills that come after a
    failure of the same process, or of a rank that the others wait for.

    Why it costs memory. It does not: it costs time to chase what goes away with the first failure.

    Evidence used. Order of the lines, ranks, process ids, trials and restarts as printed.

    What to do. Cure the first failure. After a device-side assert or an illegal access the process
    is no longer usable: start a new one, do not catch the error and go on.

    What it can get wrong. A log that prints no ranks or trials may mix processes. An assert after a
    caught OOM may be a bug of its own that the smaller batch brought out.

    Example. OOM of rank 2, then a watchdog time-out of rank 0.

    References. CUDA Runtime API: errors from previous, asynchronous launches; NCCL watchdog.
    """
    events = needed(context.story, "no log with several events was given").events
    grouped: dict[int, list[Scene]] = {}
    for event in events:
        if event.caused_by is not None and event.kind in FAILURES:
            grouped.setdefault(event.caused_by, []).append(event)
    for cause, followers in grouped.items():
        first = events[cause]
        kinds = ", ".join(dict.fromkeys(e.kind.value for e in followers))
        is_sure = all(e.confidence is Confidence.PROVEN for e in followers)
        verb = "follows" if len(followers) == 1 else "follow"
        yield Found(
            f"{plural(len(followers), 'later error')} ({kinds}) {verb} from the "
            f"{first.kind.value} in line {format_count(first.line)}: {followers[0].reason}.",
            confidence=Confidence.PROVEN if is_sure else Confidence.LIKELY,
            evidence=(Evidence("consequences", len(followers), "count", "log"),),
            key=f"{first.kind.value} {kinds}",
        )
