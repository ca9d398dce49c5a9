"""Several GPUs of one process that are unlike: which one is odd, and what usually makes it so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.model.diagnosis import DeviceFigures, Moment, Verdict
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.units import format_size

IDLE_SHARE: Final = 0.01
"""A device with less than this share of the fullest one's memory takes no part in the work."""

UNLIKE: Final = 2
"""The fullest device holds so many times what the next one does: more than one sample's worth."""

# torch/nn/parallel: replicas run in parallel_apply, outputs come together in scatter_gather.
_DATA_PARALLEL: Final = ("data_parallel.py", "parallel_apply.py", "scatter_gather.py")


def balance_note(
    devices: Sequence[DeviceFigures], verdict: Verdict, snapshot: Snapshot | None
) -> str:
    """Return what the devices held when one of them failed; "" where they are alike or idle."""
    held = {
        f.device: f.moment.allocated_bytes
        for f in devices
        if f.moment is not None and f.moment.moment is Moment.FAILURE
    }
    most = max(held.values(), default=0)
    busy = {d: n for d, n in sorted(held.items()) if n > IDLE_SHARE * most}
    if len(busy) < 2 or snapshot is None:
        return ""
    odd, next_one = sorted(busy, key=lambda d: -busy[d])[:2]
    if busy[odd] < UNLIKE * busy[next_one]:
        return ""
    each = ", ".join(f"GPU {d} {format_size(n)}" for d, n in busy.items())
    note = f"The GPUs are unlike: when GPU {verdict.device} failed, they held {each}."
    if not any(s.endswith(_DATA_PARALLEL) and "parallel" in s for s in snapshot.strings):
        return note
    if odd == min(busy):
        return (
            f"{note} DataParallel gathers outputs on GPU {odd}: DistributedDataParallel does not, "
            "or compute the loss inside of the module."
        )
    return (
        f"{note} DataParallel splits a batch by count, not by size: GPU {odd} had the largest "
        "samples. Sort or pack them by size."
    )
