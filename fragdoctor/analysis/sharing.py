"""The arithmetic of several processes on one GPU.

Each process has a CUDA context of its own and a caching allocator of its own: memory that one has
reserved is gone for the others whether tensors are in it or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fragdoctor.model.gpu_sharing import ProcessDemand, Sharing, SharingRow
from fragdoctor.units import MIB

HEADROOM_SHARE: Final = 0.05
"""A twentieth of the GPU stays free: peaks of processes do not come at the same moment, and
libraries take workspaces that no figure of PyTorch shows."""

TYPICAL_CONTEXT_BYTES: Final = 450 * MIB
"""CUDA context of a process with cuBLAS: 300 to 620 MiB on GPUs from Pascal to Blackwell."""

_MAX_PROCESSES: Final = 1000


def share_gpu(  # noqa: PLR0913 - the figures of one question, all by keyword
    demand: ProcessDemand,
    *,
    gpu: str,
    total_bytes: int,
    headroom_bytes: int | None = None,
    others_bytes: int = 0,
    n_asked: int | None = None,
    notes: Sequence[str] = (),
) -> Sharing:
    """Return how many such processes fit on a GPU and what one fewer costs and gives.

    ``headroom_bytes`` is ``HEADROOM_SHARE`` of the GPU where None.
    """
    headroom = round(HEADROOM_SHARE * total_bytes) if headroom_bytes is None else headroom_bytes
    usable = max(0, total_bytes - headroom - others_bytes)
    n_fit = _fitting(usable, demand.total_bytes)
    lowest = demand.lowest_bytes
    sharing_of = n_asked or n_fit or 1
    return Sharing(
        demand=demand,
        gpu=gpu,
        total_bytes=total_bytes,
        headroom_bytes=headroom,
        others_bytes=others_bytes,
        n_fit=n_fit,
        n_fit_tight=_fitting(max(0, total_bytes - others_bytes), demand.total_bytes),
        n_fit_lowest=None if lowest is None else _fitting(usable, lowest + demand.context_bytes),
        n_asked=n_asked,
        rows=tuple(_rows(demand, usable, others_bytes, n_fit, sharing_of)),
        notes=tuple(notes),
    )


def _fitting(usable: int, each: int) -> int:
    return min(_MAX_PROCESSES, usable // max(1, each))


def _rows(
    demand: ProcessDemand, usable: int, others: int, n_fit: int, n_whole: int
) -> Iterator[SharingRow]:
    """Yield the number asked for (or one more than fits), and down to one fewer than fits."""
    top = max(n_whole, n_fit + 1)
    wanted = {top, top - 1, n_whole, n_whole - 1, n_fit, n_fit - 1}
    for n in sorted((n for n in wanted if n > 0), reverse=True):
        used = n * demand.total_bytes
        yield SharingRow(
            n=n,
            used_bytes=used + others,
            left_bytes=usable - used,
            each_bytes=max(0, usable // n - demand.context_bytes),
            throughput_share=n / n_whole,
        )
