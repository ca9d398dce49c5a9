"""How many processes can share a GPU, what each of them takes, and how that adds up.

Each process has its own CUDA context and its own caching allocator: memory that one process has
reserved is not available to the others, whether it holds tensors or not.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        n_asked: how many the user asked for, None if not given.
    """

    demand: ProcessDemand
    gpu: str
    total_bytes: int
    n_asked: int | None = None
    notes: Sequence[str] = ()

    @property
    def headroom_bytes(self) -> int:
        """Kept free for spikes, the driver and memory that no figure shows."""
        return round(HEADROOM_SHARE * self.total_bytes)

    @property
    def usable_bytes(self) -> int:
        """What the processes can share."""
        return max(0, self.total_bytes - self.headroom_bytes)

    @property
    def n_fit(self) -> int:
        """How many processes fit."""
        return self._fitting(self.usable_bytes)

    @property
    def n_fit_tight(self) -> int:
        """How many fit without headroom."""
        return self._fitting(self.total_bytes)

    def _fitting(self, n_bytes: int) -> int:
        return min(_MAX_PROCESSES, n_bytes // max(1, self.demand.total_bytes))

    @property
    def rows(self) -> Sequence[SharingRow]:
        """The numbers of processes around those asked for and those that fit, largest first."""
        usable, one, n_fit = self.usable_bytes, self.demand, self.n_fit
        whole = self.n_asked or n_fit or 1
        top = max(whole, n_fit + 1)
        wanted = {top, top - 1, whole, whole - 1, n_fit, n_fit - 1}
        return [
            SharingRow(
                n=n,
                used_bytes=n * one.total_bytes,
                left_bytes=usable - n * one.total_bytes,
                each_bytes=max(0, usable // n - one.context_bytes),
            )
            for n in sorted((n for n in wanted if n > 0), reverse=True)
        ]
