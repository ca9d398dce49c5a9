"""Read the out-of-memory messages of a text or a whole log as numbers, with their surroundings.

The table of all wordings is here; if several match the same words, the first one's hit counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from fragdoctor.inputs.ledger import fullest_gpu, ledger_of
from fragdoctor.inputs.log_streams import LogStream, windows
from fragdoctor.inputs.quoted_code import quoted_code
from fragdoctor.inputs.scenes import line_starts, scan
from fragdoctor.inputs.server_budget import server_budget
from fragdoctor.inputs.told_failures import told_failure, told_kill_or_load
from fragdoctor.inputs.told_settings import told_settings
from fragdoctor.inputs.tracebacks import MAX_MESSAGES, with_tracebacks
from fragdoctor.inputs.wordings.allocator_message import CLAUSES, hits
from fragdoctor.inputs.wordings.backends import CUDA_ASYNC, JAX_AND_TENSORFLOW, MPS
from fragdoctor.inputs.wordings.driver import DRIVERS, LIBRARIES
from fragdoctor.inputs.wordings.frameworks import FRAMEWORKS, KV_CACHE_CHECKS
from fragdoctor.inputs.wordings.not_device import HOST_MEMORY, NOT_DEVICE_MEMORY
from fragdoctor.inputs.wordings.wording import (
    ALLOCATOR,
    DRIVER,
    HOST,
    NEGATIVE,
    SHARED_MEMORY,
    Hit,
    Needles,
    Wording,
    matches,
)
from fragdoctor.inputs.xla_program import xla_program
from fragdoctor.model.case import (
    AFTER_ANY_FAILURE,
    GPU_EMPTY,
    GPU_TABLE,
    NO_FAILURE,
    LogMarker,
    OomLog,
    OomMessage,
    QuotedCode,
)
from fragdoctor.model.frameworks import frameworks_in
from fragdoctor.model.gpus import FULL_SHARE
from fragdoctor.model.ledger import Ledger

# If two families match the same words, the earlier one wins.
WORDINGS: Final[tuple[Wording, ...]] = (
    *MPS,
    *CUDA_ASYNC,
    *KV_CACHE_CHECKS,
    *JAX_AND_TENSORFLOW,
    *FRAMEWORKS,
    *LIBRARIES,
    *HOST_MEMORY,
    *DRIVERS,
    *NOT_DEVICE_MEMORY,
)


@cache
def _needles() -> Needles:
    return Needles([*(w.pattern for w in WORDINGS), *(p for _, p in (*CLAUSES, *_MARKERS))])


_GROUP_GAP: Final = 900  # the most squeezed characters between two parts of one report


def hits_of(stream: LogStream) -> Iterator[Hit]:
    """Yield the hits of a stream in order; of overlapping hits, only the first family's."""
    ranked: list[tuple[int, int, Hit]] = [(-1, hit.start, hit) for hit in hits(stream)]
    for priority, wording in enumerate(WORDINGS):
        ranked.extend((priority, hit.start, hit) for hit in wording.hits(stream))
    yield from _grouped(_without_overlaps(ranked))


def _without_overlaps(ranked: Iterable[tuple[int, int, Hit]]) -> list[Hit]:
    kept: list[tuple[int, Hit]] = []
    for priority, _start, hit in sorted(ranked, key=lambda item: (item[1], item[0])):
        if kept and hit.start < kept[-1][1].end:
            # MPS and cudaMallocAsync also say "Tried to allocate": the more specific family wins.
            # A title above a message is nothing of its own.
            is_first = kept[-1][0] == -1 and hit.start <= kept[-1][1].start
            if is_first and priority >= 0 and hit.message.variant != "bare":
                kept[-1] = (priority, hit)
            continue
        kept.append((priority, hit))
    return [hit for _priority, hit in kept]


def _grouped(hits: Iterable[Hit]) -> Iterator[Hit]:
    """Yield hits, with the parts of one report merged into its first hit."""
    last: Hit | None = None
    for hit in hits:
        if last and hit.group and hit.group == last.group and hit.start - last.end < _GROUP_GAP:
            last = replace(last, end=hit.end, message=_filled(last.message, hit.message))
            continue
        if last:
            yield last
        last = hit
    if last:
        yield last


_FILLABLE: Final = (
    "device_index", "requested_bytes", "total_bytes", "free_bytes", "allocated_bytes",
    "reserved_bytes", "limit_bytes",
)  # fmt: skip


_TELL_WHY: Final = frozenset({"kernel", "slurm", "evicted"})
"""Variants of kill messages that give the reason; a shell's "Killed" and an exit code do not."""


def _filled(first: OomMessage, second: OomMessage) -> OomMessage:
    if (
        second.variant in _TELL_WHY
        and first.variant not in _TELL_WHY
        and first.sub_kind == "oom-killer"
    ):
        return replace(second, line=first.line)
    missing = {name: getattr(second, name) for name in _FILLABLE if getattr(first, name) is None}
    return replace(first, **missing)


def parse_oom(text: str) -> OomMessage | None:
    """Return the first message in a text, or None if the text holds nothing known.

    For a text that only looks like a lack of memory (device assert, illegal access, a training
    log), the message's kind is ``negative``.
    """
    log = find_messages(text)
    return log.messages[0] if log.messages else None


def find_messages(text: str) -> OomLog:
    """Return all messages of a text or log in the order of the text, and the markers.

    A message that is printed twice, such as by a traceback and again by a summary, is listed twice,
    each time with its line. Lines that are parts of one report are one message: llama.cpp's two
    lines for one buffer, NCCL's warning and the exception's ``Last error``, the kernel's lines for
    one kill. If only a failure of another kind is found, one message of kind ``negative`` says
    which.

    ``primary`` is the first cause: the earliest failure of device memory that printed figures (its
    repetition, if a title cut it); else the earliest without figures; else the earliest failure of
    the host's memory, first one that says why; else the earliest warning; else the first message.
    Timeouts, asserts and kills that follow an out-of-memory error are its consequences.
    """
    found = _Found()
    for window in windows(text, lambda part: _needles().may_be_in(part)):
        hits: list[tuple[int, int, Hit]] = []
        for stream in window.streams():
            found.markers.extend(markers_of(stream, window.report_before))
            for hit in hits_of(stream):
                first = stream.ordinal_at(hit.start)
                if window.report_before is not None and first >= window.report_before:
                    continue
                if first > found.consumed or hit.is_whole:
                    hits.append((first, stream.ordinal_at(max(hit.start, hit.end - 1)), hit))
        for _first, last, hit in sorted(hits, key=lambda item: (item[0], item[2].start)):
            found.add(hit, last)
    messages = (
        _without_echoes(found.messages)
        or found.warnings
        or found.negative[:1]
        or list(filter(None, [fullest_gpu(text) or told_failure(text) or told_kill_or_load(text)]))
        or _look_alike(text)
    )
    ledger = ledger_of(text)
    messages = _with_table(messages, text, ledger)
    starts = line_starts(text, sorted({m.line for m in messages[:MAX_MESSAGES]}))
    messages = with_tracebacks(text, messages, starts)
    if messages and (code := quoted_code(text)) != QuotedCode():
        messages = [replace(m, code=code) for m in messages]
    program, parts = xla_program(text)
    messages = [replace(m, **program) if m.kind == "jax" else m for m in messages]
    by_place = {(m.line, m.kind): m for m in reversed(found.markers)}
    markers = tuple(by_place[place] for place in sorted(by_place))
    return OomLog(
        messages=tuple(messages),
        markers=markers,
        primary=_primary(messages),
        n_lines=text.count("\n") + (not text.endswith("\n") and bool(text)),
        scenes=scan(text, messages, markers),
        server=server_budget(text),
        frameworks=tuple(f.name for f in frameworks_in((), text[:_LOOK_ALIKE_CHARS])),
        settings=told_settings(text),
        ledger=ledger,
        program=parts,
    )


def _with_table(messages: list[OomMessage], text: str, ledger: Ledger) -> list[OomMessage]:
    """Add to errors without figures what the text shows: a full GPU, or one with room."""
    is_bare = {
        (m.kind == DRIVER and not m.sub_kind) or m.variant in AFTER_ANY_FAILURE for m in messages
    }
    if is_bare != {True}:
        return messages
    table = fullest_gpu(text, has_failed=True)
    if ledger.is_wsl or ledger.has_room:
        kind = "pinned-host" if ledger.is_wsl else GPU_EMPTY
        return [replace(m, sub_kind=kind) if m.kind == DRIVER else m for m in messages]
    if table is None or not table.total_bytes or not table.process_bytes:
        return messages
    if table.process_bytes < FULL_SHARE * table.total_bytes:
        return messages
    return [
        replace(
            m,
            sub_kind=GPU_TABLE if m.kind == DRIVER else m.sub_kind,
            device_index=table.device_index,
            total_bytes=table.total_bytes,
            process_bytes=table.process_bytes,
        )
        for m in messages
    ]


class _Found(Struct):
    """What the windows of a text have yielded so far."""

    messages: list[OomMessage] = field(default_factory=list)
    markers: list[LogMarker] = field(default_factory=list)
    negative: list[OomMessage] = field(default_factory=list)
    warnings: list[OomMessage] = field(default_factory=list)
    consumed: int = -1  # ordinal of the last raw line that a message covers

    def add(self, hit: Hit, last: int) -> None:
        """Add one hit to the list where it belongs."""
        message = hit.message
        if message.variant in AFTER_ANY_FAILURE and any(
            m.kind in ("device-assert", "index-error") for m in self.markers
        ):
            message = replace(message, kind=NEGATIVE, sub_kind="device-assert", is_device_oom=False)
            hit = replace(hit, message=message, is_marker=True)
        is_consequence = message.variant in _CONSEQUENCES and any(
            m.is_device_oom and not m.is_warning for m in self.messages
        )
        if message.sub_kind == "size-bug" and any(m.sub_kind in _GARBLE for m in self.negative):
            return  # the size was never received, or was read from corrupt memory
        if not hit.is_marker and not is_consequence:
            self.consumed = max(self.consumed, last)
            self.messages.append(message)
            return
        kind = "killed" if is_consequence else message.sub_kind
        self.markers.append(LogMarker(kind, message.line, message.rank, message.text[:500]))
        if message.is_warning:
            self.warnings.append(message)
        elif not is_consequence:
            self.negative.append(replace(message, rank=None))


def _without_echoes(messages: list[OomMessage]) -> list[OomMessage]:
    """Return messages without those that another message states better.

    People quote "tried to allocate 8 GiB", which without its beginning could be any library's, or
    give the heading "CUDA error: out of memory" although the traceback below shows that it was host
    memory.
    """
    told = {m.requested_bytes for m in messages if m.kind != ALLOCATOR}
    on_host = {m.variant for m in messages if m.kind == HOST}
    return [
        m
        for m in messages
        if not (m.kind == DRIVER and m.variant in on_host)
        and (
            m.variant != "torch"
            or m.requested_bytes not in told
            or "out of memory" in f"{m.intro} {m.text}".lower()
        )
    ]


# Peers die after one rank fails; such a line on its own means the host's OOM killer.
_CONSEQUENCES: Final = frozenset({"exit-code", "sigkill", "killed"})


_GARBLE: Final = frozenset({"collective-timeout", "nccl-error", "illegal-access"})
"""Failures after which the sizes that a program continues with are garbage."""


def _look_alike(text: str) -> list[OomMessage]:
    """Return a message of kind ``negative`` for a text about devices that reports no failure."""
    head = text[:_LOOK_ALIKE_CHARS].lower()
    for words, backend in _TOPICS:
        if any(word in head for word in words):
            return [
                OomMessage(
                    kind=NEGATIVE,
                    backend=backend,
                    is_device_oom=False,
                    sub_kind=NO_FAILURE,
                    text=" ".join(text[:_LOOK_ALIKE_CHARS].split())[:500],
                )
            ]
    return []


_LOOK_ALIKE_CHARS: Final = 256 * 1024
_TOPICS: Final = (
    (("vllm", "gpu_memory_utilization"), "vllm"),
    (("sglang", "mem-fraction-static"), "sglang"),
    (("mps backend", "torch.mps", "apple m"), "mps"),
    (("torch.xpu", "intel_extension_for_pytorch", "xpu:"), "xpu"),
    (("rocm", "hip error", "miopen"), "rocm"),
    (("torch_npu", "ascend"), "npu"),
    (("torch", "cuda", "gpu", "nvidia", "nccl", "triton", "cudnn", "cublas"), "cuda"),
    (("jaxlib", "jax."), "jax"),
    (("tensorflow",), "tf"),
    (("out of memory", "memory"), "cpu"),
)


def _primary(messages: list[OomMessage]) -> int:
    def tier(message: OomMessage) -> float:
        if message.kind in {NEGATIVE, SHARED_MEMORY}:
            return 5
        if message.is_warning:
            return 4
        if not message.is_device_oom:
            return 2 if message.variant in _TELL_WHY else 3
        figures = message.requested_bytes, message.total_bytes, message.kv_tokens_requested
        if any(f is not None for f in figures):
            return 0
        # Words of people and of titles say less than what a program printed.
        return 1 if message.variant in ("bare", "told") else 0.5

    first = min(range(len(messages)), key=lambda i: (tier(messages[i]), i), default=0)
    whole = (i for i, m in enumerate(messages) if _is_whole_of(messages[first], m))
    return next(whole, first)


def _is_whole_of(cut: OomMessage, message: OomMessage) -> bool:
    """Return whether a message repeats one that was cut, as a title is, with all its figures."""
    told = [name for name in _FILLABLE if getattr(cut, name) is not None]
    return (
        cut.is_of_caching_allocator
        and cut.allocated_bytes is None
        and cut.requested_bytes is not None
        and message.allocated_bytes is not None
        and all(getattr(cut, name) == getattr(message, name) for name in ("kind", *told))
    )


_MARKERS: Final = (
    ("cache-flush", r"allocatorcacheflushes"),
    ("device-assert", r"thread:\[\d{1,6},\d{1,6},\d{1,6}\]assertion`"),
    ("index-error", r"indexoutofrangeinself"),
    ("restart", r"restartingworker(?:s|group)"),
    ("restart", r"willrestartworkergroup"),
    ("expandable-unsupported", r"expandable_segmentsnotsupportedonthisplatform"),
    (
        "expandable-unsupported",
        r"expandable_segments[^.]{0,80}(?:unavailable|incompatible|(?:cannot|can't)beused)",
    ),
    ("killed", r"closingsignalsigterm"),
    ("killed", r"failed\(exitcode:-?\d{1,4}\)"),
    ("killed", r"dataloaderworker\S{0,80}exitedun"),
    ("killed", r"signal15\(sigterm\)"),
)


def markers_of(stream: LogStream, report_before: int | None) -> Iterator[LogMarker]:
    """Yield the markers in a stream, except for those that belong to the next window."""
    for kind, pattern in _MARKERS:
        line = 0
        for match in matches(pattern, stream.squeezed):
            at = match.start()
            if report_before is not None and stream.ordinal_at(at) >= report_before:
                continue
            number = stream.line_at(at)
            if number != line:
                line = number
                yield LogMarker(kind, number, stream.rank_at(at), stream.line_text(at))
