"""How many processes share a GPU, and what each of them takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessDemand:
    """What one process takes of a GPU.

    Attributes:
        pytorch_bytes: what PyTorch has reserved at its peak; the device sees this, not what is
            allocated.
        context_bytes: CUDA context and libraries of the process.
        pytorch_source, context_source: where each figure comes from, for people.
        lowest_bytes: smallest reserved memory at which a replay of the trace still serves every
            request; None without a trace.
        lowest_conf: the setting that needs no more than that; "" for the recorded ones.
    """

    pytorch_bytes: int
    context_bytes: int
    pytorch_source: str
    context_source: str
    lowest_bytes: int | None = None
    lowest_conf: str = ""

    @property
    def total_bytes(self) -> int:
        """Everything that one process takes."""
        return self.pytorch_bytes + self.context_bytes


@dataclass(frozen=True, slots=True)
class SharingRow:
    """A number of processes on the GPU.

    Attributes:
        used_bytes: what they and others take together.
        left_bytes: of the usable memory; negative is missing.
        each_bytes: what PyTorch in each of them could have.
        throughput_share: of the throughput of ``n_asked`` (or of the most that fit) if all were
            always busy and none slowed another down: the most that running fewer can cost.
    """

    n: int
    used_bytes: int
    left_bytes: int
    each_bytes: int
    throughput_share: float

    @property
    def fits(self) -> bool:
        """Whether they fit with the headroom left free."""
        return self.left_bytes >= 0


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many processes fit.

    Attributes:
        gpu, total_bytes: the GPU and what CUDA reports of it.
        headroom_bytes: kept free for spikes, the driver and what no figure shows.
        others_bytes: held by processes that are not such trials.
        n_fit: how many fit; ``n_fit_tight`` without headroom, ``n_fit_lowest`` at the lowest
            reserved memory that a replay found (None without one).
        n_asked: how many were asked for, None if not given.
    """

    demand: ProcessDemand
    gpu: str
    total_bytes: int
    headroom_bytes: int
    others_bytes: int
    n_fit: int
    n_fit_tight: int
    n_fit_lowest: int | None
    n_asked: int | None
    rows: Sequence[SharingRow]
    notes: Sequence[str] = ()
