"""``torch.cuda.memory_stats`` from the model's figures."""

from __future__ import annotations

from ctypes import c_int64
from typing import Any, Final

from fragdoctor.rehearse.engine.session import Session

POOLS: Final = ("all", "large_pool", "small_pool")
KINDS: Final = (
    "allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes",
    "active_bytes", "inactive_split_bytes", "requested_bytes",
)  # fmt: skip
FIGURES: Final = ("current", "peak", "allocated", "freed")
N_STATISTICS: Final = len(KINDS) * len(POOLS) + 2


def statistics(now: Session, device: int) -> dict[str, Any]:
    """Return the nested statistics of a device, as ``torch._C._cuda_memoryStats`` does."""
    values = (c_int64 * (len(FIGURES) * N_STATISTICS))()
    now.gpus.statistics(device, values)
    width = len(FIGURES)
    rows = [
        dict(zip(FIGURES, values[at : at + width], strict=True))
        for at in range(0, len(values), width)
    ]
    found: dict[str, Any] = {
        kind: {pool: rows[len(POOLS) * k + p] for p, pool in enumerate(POOLS)}
        for k, kind in enumerate(KINDS)
    }
    figures = now.gpus.figures(device)
    limit = now.budget.settings.max_split_bytes
    return {
        **found,
        "oversize_allocations": rows[-2],
        "oversize_segments": rows[-1],
        "max_split_size": -1 if limit is None else limit,
        "num_alloc_retries": figures["retries"],
        "num_device_alloc": figures["n_malloc"] + figures["n_map"],
        "num_device_free": figures["n_free"] + figures["n_unmap"],
        "num_ooms": figures["ooms"],
        "num_sync_all_streams": 0,
    }
