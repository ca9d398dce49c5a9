"""Out-of-memory messages of a pasted text or a whole log as numbers.

The table of wordings is in ``wordings/``, one family a file; ``variants()`` lists their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from fragdoctor.model.oom import LogMarker, OomLog, OomMessage
from fragdoctor.readers.log import Stream, windows
from fragdoctor.readers.markers import markers_of
from fragdoctor.readers.wordings import (
    allocator,
    cuda_async,
    driver,
    frameworks,
    host,
    jax_tf,
    kv_cache,
    libraries,
    mps,
    names,
    negatives,
)
from fragdoctor.readers.wordings.base import Hit, Wording

# Earlier families win where two match the same words.
WORDINGS: Final[tuple[Wording, ...]] = (
    *mps.WORDINGS,
    *cuda_async.WORDINGS,
    *kv_cache.WORDINGS,
    *jax_tf.WORDINGS,
    *frameworks.WORDINGS,
    *libraries.WORDINGS,
    *host.WORDINGS,
    *driver.WORDINGS,
    *negatives.WORDINGS,
)
_GROUP_GAP: Final = 900


def variants() -> tuple[str, ...]:
    """Return the names of all wordings that stand in the table, sorted."""
    return tuple(sorted({w.variant for w in WORDINGS}))


def parse_oom(text: str) -> OomMessage | None:
    """Return the first message of a text; None where it holds nothing that we know.

    A text that only looks like a lack of memory (device assert, illegal access, a training log)
    gives a message of kind ``negative``.
    """
    log = find_messages(text)
    return log.messages[0] if log.messages else None


def find_messages(text: str) -> OomLog:
    """Return all messages of a text or log in the order of the text, and the markers.

    A message that is printed twice, as by a traceback and again by a summary, is listed twice,
    each with its line. Lines that are parts of one report are one message: llama.cpp's two lines
    for one buffer, NCCL's warning and the exception's ``Last error``, the kernel's lines for one
    kill. Where no message is found but a failure of another kind is, one message of kind
    ``negative`` says which.

    ``primary`` is the first cause: the earliest failure of device memory that printed figures;
    else the earliest other failure of memory; else the earliest warning; else the first message.
    Time-outs, asserts and kills that follow an out-of-memory error are its consequences.
    """
    messages: list[OomMessage] = []
    markers: list[LogMarker] = []
    negative: list[OomMessage] = []
    warnings: list[OomMessage] = []
    consumed = -1
    for window in windows(text):
        found: list[tuple[int, int, Hit]] = []
        for stream in window.streams():
            markers.extend(markers_of(stream, window.report_before))
            for hit in _hits(stream):
                first = stream.ordinal_at(hit.start)
                if window.report_before is not None and first >= window.report_before:
                    continue
                if first <= consumed and not hit.is_whole:
                    continue
                found.append((first, stream.ordinal_at(max(hit.start, hit.end - 1)), hit))
        for _first, last, hit in sorted(found, key=lambda item: (item[0], item[2].start)):
            message = hit.message
            if hit.is_marker:
                (warnings if message.is_warning else negative).append(message)
                kind = "cudamalloc-warning" if message.is_warning else message.sub_kind
                markers.append(LogMarker(kind, message.line, message.rank, message.text[:500]))
            else:
                consumed = max(consumed, last)
                messages.append(message)
    if not messages:
        messages = warnings or [replace(n, rank=None) for n in negative[:1]] or _look_alike(text)
    return OomLog(
        messages=tuple(messages),
        markers=tuple(sorted(markers, key=lambda m: m.line)),
        primary=_primary(messages),
        n_lines=text.count("\n") + (not text.endswith("\n") and bool(text)),
        n_bytes=len(text.encode("utf-8", "surrogatepass")),
    )


def _hits(stream: Stream) -> Iterator[Hit]:
    """Yield the hits of a stream in order, of overlapping ones the one whose family is first."""
    ranked: list[tuple[int, int, Hit]] = [(-1, hit.start, hit) for hit in allocator.hits(stream)]
    for priority, wording in enumerate(WORDINGS):
        ranked.extend((priority, hit.start, hit) for hit in wording.hits(stream))
    taken = _without_overlaps(ranked)
    yield from _grouped(taken)


def _without_overlaps(ranked: Iterable[tuple[int, int, Hit]]) -> list[Hit]:
    kept: list[tuple[int, Hit]] = []
    for priority, _start, hit in sorted(ranked, key=lambda item: (item[1], item[0])):
        if kept and hit.start < kept[-1][1].end:
            # MPS and cudaMallocAsync also say "Tried to allocate": the specific family wins
            if kept[-1][0] == -1 and priority >= 0 and hit.start <= kept[-1][1].start:
                kept[-1] = (priority, hit)
            continue
        kept.append((priority, hit))
    return [hit for _priority, hit in kept]


def _grouped(hits: Iterable[Hit]) -> Iterator[Hit]:
    """Yield hits, parts of one report merged into its first."""
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


def _look_alike(text: str) -> list[OomMessage]:
    """Return a message of kind ``negative`` for a text about devices without any failure."""
    head = text[:_LOOK_ALIKE_CHARS].lower()
    for words, backend in _TOPICS:
        if any(word in head for word in words):
            return [
                OomMessage(
                    kind=names.NEGATIVE,
                    backend=backend,
                    is_device_oom=False,
                    sub_kind="no-failure",
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
_FILLABLE: Final = (
    "device_index", "requested_bytes", "total_bytes", "free_bytes", "allocated_bytes",
    "reserved_bytes", "limit_bytes",
)  # fmt: skip


def _filled(first: OomMessage, second: OomMessage) -> OomMessage:
    missing = {name: getattr(second, name) for name in _FILLABLE if getattr(first, name) is None}
    return replace(first, **missing)


def _primary(messages: list[OomMessage]) -> int:
    def tier(message: OomMessage) -> int:
        if message.kind in {names.NEGATIVE, names.SHARED_MEMORY}:
            return 3
        if message.is_warning:
            return 2
        figures = message.requested_bytes, message.total_bytes, message.kv_tokens_requested
        return 0 if message.is_device_oom and any(f is not None for f in figures) else 1

    return min(range(len(messages)), key=lambda i: (tier(messages[i]), i), default=0)
