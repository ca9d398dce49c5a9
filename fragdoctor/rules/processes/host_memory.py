"""FD505: the host's memory ran out, not the GPU's."""

from __future__ import annotations

from collections.abc import Iterator

from fragdoctor.model.finding import Confidence, Severity
from fragdoctor.rules.rule import Context, Found, rule


@rule("FD505", Severity.ERROR)
def host_memory(context: Context) -> Iterator[Found]:
    """The host's memory ran out, not the GPU's.

    What it finds. Kills by the operating system, failed CPU allocations, a full /dev/shm,
    page-locked memory that could not be allocated.

    Why it costs memory. Data loading, checkpoints and page-locked buffers live in host memory; no
    GPU setting changes that.

    Evidence used. The text of the log: exit codes, signals, the CPU allocator's message.

    What to do. Fewer workers, lazy loading of checkpoints, a larger /dev/shm, a higher limit of the
    container.

    What it can get wrong. A SIGKILL may come from a person or a scheduler for another reason; only
    the kernel's log proves it.

    Example. exitcode: -9 without any traceback.

    References. torch.utils.data: Multi-process data loading.
    """
    message = context.need_message()
    if message.kind != "host-ram" and message.sub_kind != "pinned-host":
        return
    yield Found(
        f"Line {message.line} is about host memory ({message.sub_kind or message.variant}).",
        confidence=Confidence.LIKELY,
        n_bytes=message.requested_bytes or 0,
        key=message.sub_kind,
    )
