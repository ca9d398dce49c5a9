"""FD507: a failure of the device that no OOM explains."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Evidence, Severity
from fragdoctor.model.story import SceneKind
from fragdoctor.rules.rule import Context, Found, needed, rule
from fragdoctor.units import format_count


@rule("FD507", Severity.WARNING)
def separate_failure(context: Context) -> Iterator[Found]:
    """A failure of the device that no OOM explains.

    What it finds. Device-side asserts, illegal accesses and CUDA errors that come before the first
    OOM, or in another rank, process or trial.

    Why it costs memory. It does not; but more memory will not cure it, and later errors of that
    process follow from it.

    Evidence used. Order of the lines, ranks, process ids, trials and restarts as printed.

    What to do. Run again with CUDA_LAUNCH_BLOCKING=1: the traceback then names the line. Most
    asserts are indices out of range (labels, tokens, embedding sizes).

    What it can get wrong. A log that prints no ranks or trials may mix processes.

    Example. Assertion `srcIndex < srcSelectDimSize` failed, and 200 lines later an OOM.

    References. torch.cuda: Asynchronous execution; CUDA_LAUNCH_BLOCKING.
    """
    seen: set[SceneKind] = set()
    for event in needed(context.story, "no log with several events was given").events:
        is_own = event.caused_by is None and event.kind in (
            SceneKind.DEVICE_ASSERT,
            SceneKind.ILLEGAL_ACCESS,
            SceneKind.CUDA_ERROR,
        )
        if not is_own or event.kind in seen:
            continue
        seen.add(event.kind)
        why = event.reason or "no OOM of its process came before it"
        yield Found(
            f"The {event.kind.value} in line {format_count(event.line)} does not follow from "
            f"an OOM: {why}.",
            confidence=Confidence.LIKELY,
            evidence=(Evidence("line", event.line, "count", "log"),),
            key=event.kind.value,
        )
