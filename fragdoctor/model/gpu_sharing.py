"""How many processes can share a GPU, what each of them takes, and how that adds up.

Each process has its own CUDA context and its own caching allocator: memory that one process has
reserved is not available to the others, whether it holds tensors or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

HEADROOM_SHARE: Final = 0.05
"""Share of the GPU to keep free for spikes and for workspaces that no PyTorch figure shows."""
_MAX_PROCESSES: Final = 1000


class ProcessDemand(Struct, frozen=True):
    """How much of a GPU one process takes.

    Attributes:
        pytorch_bytes: peak of PyTorch's reserved memory, which is what the device sees.
        context_bytes: CUDA context and libraries of the process.
        pytorch_source, context_source: where each figure comes from, for people.
    """

    pytorch_bytes: int
    context_bytes: int
    pytorch_source: str
    context_source: str

    @property
    def total_bytes(self) -> int:
        """Everything that one process takes."""
        return self.pytorch_bytes + self.context_bytes


class SharingRow(Struct, frozen=True):
    """What happens with a given number of processes on the GPU.

    Attributes:
        used_bytes: what these processes take together.
        left_bytes: usable memory that is left; if negative, memory that is missing.
        each_bytes: how much PyTorch in each process could have.
    """

    n: int
    used_bytes: int
    left_bytes: int
    each_bytes: int

    @property
    def fits(self) -> bool:
        """Whether they fit with the headroom left free."""
        return self.left_bytes >= 0


class Sharing(Struct, frozen=True):
    """How many processes fit.

    Attributes:
        gpu, total_bytes: the GPU and its memory as CUDA reports it.
        headroom_bytes: kept free for spikes, the driver and memory that no figure shows.
        n_fit: how many processes fit.
        n_fit_tight: how many fit without headroom.
        n_asked: how many the user asked for, None if not given.
    """

    demand: ProcessDemand
    gpu: str
    total_bytes: int
    headroom_bytes: int
    n_fit: int
    n_fit_tight: int
    n_asked: int | None
    rows: Sequence[SharingRow]
    notes: Sequence[str] = ()


def share_gpu(
    demand: ProcessDemand,
    *,
    gpu: str,
    total_bytes: int,
    n_asked: int | None = None,
    notes: Sequence[str] = (),
) -> Sharing:
    """Return how many such processes fit on a GPU, and what running one fewer costs and saves."""
    headroom = round(HEADROOM_SHARE * total_bytes)
    usable = max(0, total_bytes - headroom)
    n_fit = _fitting(usable, demand.total_bytes)
    sharing_of = n_asked or n_fit or 1
    return Sharing(
        demand=demand,
        gpu=gpu,
        total_bytes=total_bytes,
        headroom_bytes=headroom,
        n_fit=n_fit,
        n_fit_tight=_fitting(total_bytes, demand.total_bytes),
        n_asked=n_asked,
        rows=tuple(_rows(demand, usable, n_fit, sharing_of)),
        notes=tuple(notes),
    )


def _fitting(usable: int, each: int) -> int:
    return min(_MAX_PROCESSES, usable // max(1, each))


def _rows(demand: ProcessDemand, usable: int, n_fit: int, n_whole: int) -> Iterator[SharingRow]:
    """Yield rows for the numbers around ``n_whole`` and ``n_fit``, largest number first."""
    top = max(n_whole, n_fit + 1)
    wanted = {top, top - 1, n_whole, n_whole - 1, n_fit, n_fit - 1}
    for n in sorted((n for n in wanted if n > 0), reverse=True):
        used = n * demand.total_bytes
        yield SharingRow(
            n=n,
            used_bytes=used,
            left_bytes=usable - used,
            each_bytes=max(0, usable // n - demand.context_bytes),
        )
