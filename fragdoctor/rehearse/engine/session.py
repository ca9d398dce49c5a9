"""The one rehearsal that goes on in a process: its GPUs, what it recorded, what it assumed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fragdoctor.allocator.oom_message import oom_message
from fragdoctor.model.settings import parse_version
from fragdoctor.rehearse.engine.gpu import Budget, Gpus
from fragdoctor.rehearse.engine.snapshot import History
from fragdoctor.rehearse.engine.stacks import Stacks
from fragdoctor.units import KIB, MIB


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What ``torch.cuda`` says of the GPU.

    Attributes:
        name: as ``get_device_name`` says it.
        capability: compute capability; decides about kernels and workspaces.
        n_multiprocessors: decides about the scratch memory of reductions.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    capability: tuple[int, int] = (9, 0)
    n_multiprocessors: int = 132


@dataclass(slots=True)
class Session:
    """State of a rehearsal.

    Attributes:
        gpus: the fake GPUs.
        n_devices: how many.
        facts: of every one of them.
        budget: of every one of them.
        stacks: where requests came from.
        on_oom: called with (device, requested bytes) before the error is raised.
    """

    gpus: Gpus
    n_devices: int
    facts: GpuFacts
    budget: Budget
    stacks: Stacks = field(default_factory=Stacks)
    on_oom: list[Callable[[int, int], Any]] = field(default_factory=list)
    history: History | None = None
    fractions: dict[int, float] = field(default_factory=dict)
    captures: list[Any] = field(default_factory=list)
    asked_for_memory: bool = False

    def start(self) -> None:
        """CUDA is initialised."""

    def reset_peaks(self, device: int) -> None:
        pass

    def reset_sums(self, device: int) -> None:
        pass

    def changed_settings(self, text):
        raise NotImplementedError

    @property
    def version(self) -> tuple[int, int, int]:
        """The version of PyTorch."""
        return parse_version(self.budget.torch_version)

    @property
    def blas_workspace_bytes(self) -> int:
        """cuBLAS's workspace of one handle (PyTorch's ``getChosenWorkspaceSize``)."""
        return 32 * MIB if self.facts.capability >= (9, 0) else 2 * 4096 * KIB + 8 * 16 * KIB

    def out_of_memory(self, device: int) -> torch.OutOfMemoryError:
        """Return the error that PyTorch raises for the request that just failed on a device."""
        figures = self.gpus.oom_figures(device)
        if not figures["alloc_bytes"]:
            return torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate more than 1EB memory."
            )
        for tell in self.on_oom:
            tell(device, figures["requested_bytes"] or 0)
        return torch.OutOfMemoryError(oom_message(figures, self.version, device=device))


_current: list[Session] = []


def current() -> Session:
    """Return the rehearsal that goes on.

    Raises:
        IndexError: there is none.
    """
    return _current[-1]


def begin(session: Session) -> None:
    """Make a rehearsal the current one."""
    _current.append(session)


def end() -> None:
    """Leave the current rehearsal."""
    _current.pop()
