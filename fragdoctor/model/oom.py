"""An out-of-memory message as numbers. Field names are a contract (JSON of ``fragdoctor oom``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fragdoctor.model.story import Scene

NO_FAILURE: Final = "no-failure"
"""``sub_kind`` of the message of kind ``negative`` that stands for a text without any failure."""


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A ``Process PID has X memory in use`` sentence. In a container this may be ourselves."""

    pid: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class OomMessage:
    """One message; None means "not printed and not computable".

    Attributes:
        kind: ``pytorch-caching-allocator``, ``driver-no-figures``, ``cublas``, ``cudnn``, ``nccl``,
            ``kv-cache``, ``jax``, ``tf``, ``ggml``, ``other-framework``, ``host-ram``,
            ``shared-memory`` or ``negative``.
        backend: ``cuda``, ``rocm``, ``xpu``, ``mps``, ``npu``, ``musa``, ``vulkan``, ``cpu``, or
            the framework where that is all one knows (``jax``, ``tf``, ``vllm``, ...).
        is_device_oom: device memory ran out (or was refused); False for host memory, on-chip
            shared memory and errors that are not about memory.
        requested_bytes: size asked for; for PyTorch >= 2.1 the segment size, not the tensor's.
        allocated_bytes: as printed; holds ``private_pools_bytes`` since 2.4 (see ``live_bytes``).
        reserved_bytes: allocated + reserved but unallocated.
        limit_bytes: memory fraction (``allowed``), MPS ``max allowed``, KV-cache budget, ...
        rank: rank printed on the line of the message.
        line: 1-based line in the input where the message starts.
        variant: which wording it is, for example ``torch-1.4``, ``torch-2.1``, ``cudaMallocAsync``,
            ``mps``; stable names, listed in ``inputs/messages.py``.
        version_low, version_high: PyTorch versions that print this wording ("" = open end).
        sub_kind: finer than kind, for example ``size-bug`` (more than 1EB),
            ``fraction-rejected``, ``pinned-host``, ``oom-killer``, ``dev-shm``, ``device-assert``.
        free_allocated_hint: the settings that the message's own advice proposes, or "".
        other_allocations_bytes: MPS only: memory of Metal outside PyTorch's heaps.
        is_warning: printed by the framework as a warning, not as a failure.
        text: the message itself, white space folded, at most 2,000 characters; hostile text.
    """

    kind: str
    backend: str
    is_device_oom: bool
    device_index: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    process_bytes: int | None = None
    other_processes: Sequence[OtherProcess] = ()
    private_pools_bytes: int | None = None
    limit_bytes: int | None = None
    rank: int | None = None
    line: int = 1
    variant: str = ""
    version_low: str = ""
    version_high: str = ""
    sub_kind: str = ""
    free_allocated_hint: str = ""
    other_allocations_bytes: int | None = None
    active_bytes: int | None = None
    is_warning: bool = False
    expandable_is_on: bool | None = None
    kv_tokens_requested: int | None = None
    kv_tokens_capacity: int | None = None
    text: str = ""

    @property
    def live_bytes(self) -> int | None:
        """Bytes that live tensors hold: allocated less the private pools' free cache (>= 2.4)."""
        if self.allocated_bytes is None:
            return None
        return max(0, self.allocated_bytes - (self.private_pools_bytes or 0))

    @property
    def is_of_caching_allocator(self) -> bool:
        """Whether it has the figures of PyTorch's caching allocator; MPS has an allocator apart."""
        return self.kind == "pytorch-caching-allocator" and self.backend != "mps"


@dataclass(frozen=True, slots=True)
class LogMarker:
    """A line of a log that is no memory failure but belongs to the story.

    Attributes:
        kind: ``device-assert``, ``restart``, ``cache-flush`` (DeepSpeed), ``cudamalloc-warning``
            (2.13), ``killed``, ``nvml-unavailable``, ...
        line: 1-based line.
        rank: rank printed on that line.
        text: the line, white space folded, at most 500 characters; hostile text.
    """

    kind: str
    line: int
    rank: int | None
    text: str


@dataclass(frozen=True, slots=True)
class OomLog:
    """All messages of one text in the order of the text, and the markers around them.

    ``primary`` indexes the first cause: the message that a diagnosis should be about. ``scenes``
    are the lines of its story, in order: progress, trials, figures, retries, failures.
    """

    messages: Sequence[OomMessage]
    markers: Sequence[LogMarker] = ()
    primary: int = 0
    n_lines: int = 0
    n_bytes: int = 0
    scenes: Sequence[Scene] = ()
