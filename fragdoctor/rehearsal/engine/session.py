"""The current rehearsal of a process: its GPUs, what it recorded, what it assumed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fragdoctor.errors import ConfigError
from fragdoctor.model.conf_keys import parse_version
from fragdoctor.model.gpus import GpuModel
from fragdoctor.model.settings import AllocatorSettings, parse_conf
from fragdoctor.rehearsal.engine.gpu import Gpus
from fragdoctor.rehearsal.engine.known import Known
from fragdoctor.rehearsal.engine.loops import Loops
from fragdoctor.rehearsal.engine.marks import Marks
from fragdoctor.rehearsal.engine.memory_history import History, RecordedStacks
from fragdoctor.rehearsal.engine.module_notes import ModuleNotes
from fragdoctor.trace.oom_message import oom_message


@dataclass(frozen=True, slots=True)
class Assumption:
    """One thing assumed at one line.

    Attributes:
        filename, line: the line in the program's own code, or in a library if there is none.
        operation: the operation that needed a value.
        assumed: the assumption, in words.
    """

    filename: str
    line: int
    operation: str
    assumed: str


@dataclass(slots=True)
class Assumptions:
    """Everything assumed in a rehearsal, each assumption once.

    Attributes:
        made: assumptions in the order of first occurrence, with how often each was made.
        read: the last number that the user's code read, if it was made up.
        shares: the share kept by operations whose results depend on values, by kind; 1 = all.
        notes: sentences about the rehearsal as a whole.
    """

    made: dict[Assumption, int] = field(default_factory=dict)
    read: float | None = None
    notes: dict[str, None] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)

    def make(self, assumption: Assumption) -> int:
        """Note an assumption; return how often it has been made so far."""
        self.made[assumption] = n = self.made.get(assumption, 0) + 1
        return n

    def note(self, sentence: str) -> None:
        """Note something about the rehearsal as a whole."""
        self.notes[sentence] = None


@dataclass(frozen=True, slots=True)
class SeenOom:
    """A request that could not be served, and the state at that moment.

    Attributes:
        device: the GPU.
        requested_bytes: what the program asked for.
        n_events: number of events of each device, this one included.
        segments: the segments of each device.
        step: number of steps completed before it.
        stack: number of the stack of the request.
        n_marks: number of marks up to it.
    """

    device: int
    requested_bytes: int
    n_events: tuple[int, ...]
    segments: tuple[tuple[Any, ...], ...]
    step: int
    stack: int
    n_marks: int


@dataclass(slots=True)
class Session:
    """State of a rehearsal.

    Attributes:
        gpus: the fake GPUs.
        n_devices: how many.
        facts: the GPU model whose kernels all of them have.
        capacity_bytes: what the driver has for PyTorch on each of them, without the context and
            other processes; None = unlimited.
        total_bytes: memory of each.
        settings: the allocator's settings.
        torch_version: the PyTorch version whose allocator is modeled.
        stacks: where requests came from.
        progress: its steps, a :class:`.step_watch.Steps`, which is told what the program does.
        marks: marks of what the program does.
        on_oom: called with (device, requested bytes) before the error is raised.
        known: the known values of tensors on the GPUs.
        fractions: the memory fraction that the program set, by device.
        loops: the loops of the user's own code.
        modules: the program's modules, and what they hold.
        libraries: how many handles of each library exist, by its name in ``gpu_table.OUTSIDE``.
    """

    gpus: Gpus
    n_devices: int
    facts: GpuModel
    capacity_bytes: int | None
    total_bytes: int
    settings: AllocatorSettings
    torch_version: str
    stacks: RecordedStacks = field(default_factory=RecordedStacks)
    on_oom: list[Callable[[int, int], Any]] = field(default_factory=list)
    history: History | None = None
    fractions: dict[int, float] = field(default_factory=dict)
    captures: list[Any] = field(default_factory=list)
    progress: Any = field(init=False)
    marks: Marks = field(default_factory=Marks)
    libraries: dict[str, int] = field(default_factory=dict)
    is_started: bool = False
    seen_ooms: list[SeenOom] = field(default_factory=list)
    assumptions: Assumptions = field(default_factory=Assumptions)
    known: Known = field(default_factory=Known)
    loops: Loops = field(default_factory=Loops)
    modules: ModuleNotes = field(default_factory=ModuleNotes)

    def start(self) -> None:
        """Initialize CUDA: the environment's settings are read now.

        Raises:
            RuntimeError: the settings are wrong.
        """
        if self.is_started:
            return
        self.is_started = True
        names = ["PYTORCH_CUDA_ALLOC_CONF"]  # it comes first
        if self.version >= (2, 9, 0):
            names.append("PYTORCH_ALLOC_CONF")
        text = next((os.environ[name] for name in names if name in os.environ), "")
        self.settings = self._parsed(text)
        device = self.gpus.device()
        self.start_gpus()
        self.gpus.set_device(device)

    def start_gpus(self) -> None:
        """Let the GPUs begin empty, with the memory and settings that they have now."""
        self.gpus.start(
            self.n_devices, self.capacity_bytes, self.total_bytes, self.settings, self.torch_version
        )

    def start_all(self) -> None:
        """Initialize CUDA as its first use does; C++ does so only once in a process."""
        torch.cuda._lazy_init()
        self.start()

    def _parsed(self, text: str) -> AllocatorSettings:
        try:
            settings = parse_conf(text, self.torch_version)
        except ConfigError as err:
            raise RuntimeError(err.message) from err
        if settings.backend != "native":
            self.assumptions.note(f"backend:{settings.backend} was simulated as the native one")
        if settings.memory_fraction is not None:
            for device in range(self.n_devices):
                self.fractions[device] = settings.memory_fraction
            if self.is_unlimited:
                settings = settings.changed(memory_fraction=None)
        return settings

    @property
    def is_unlimited(self) -> bool:
        """Whether no request fails: then the program's own limits are noted, but not in force."""
        return self.capacity_bytes is None

    @property
    def allowed_bytes(self) -> int | None:
        """The least that the program lets PyTorch reserve on a GPU; None = it sets no limit."""
        return min((int(f * self.total_bytes) for f in self.fractions.values()), default=None)

    def change_settings(self, text: str) -> None:
        """Change settings at run time, as ``torch.cuda.memory._set_allocator_settings`` does.

        Raises:
            RuntimeError: the settings are wrong.
        """
        self.settings = self._parsed(text).over(self.settings)
        for device in range(self.n_devices):
            self.gpus.change_settings(device, self.settings)

    @property
    def version(self) -> tuple[int, int, int]:
        """The version of PyTorch."""
        return parse_version(self.torch_version)

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPUs."""
        major, minor = self.facts.compute.split(".")
        return int(major), int(minor)

    @property
    def blas_workspace_bytes(self) -> int:
        """CuBLAS's workspace of one handle (PyTorch's ``getChosenWorkspaceSize``)."""
        return self.facts.generation.blas_workspace_bytes

    def out_of_memory(self, device: int) -> torch.OutOfMemoryError:
        """Return the error that PyTorch raises for the request that just failed on a device."""
        figures = self.gpus.oom_figures(device)
        if not figures["alloc_bytes"]:
            return torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate more than 1EB memory."
            )
        n_bytes, devices = figures["requested_bytes"] or 0, range(self.n_devices)
        seen = SeenOom(
            device,
            n_bytes,
            tuple(self.gpus.figures(d)["events"] for d in devices),
            tuple(tuple(self.gpus.segments(d)) for d in devices),
            self.progress.n_complete,
            self.stacks.last,
            len(self.marks.annotations),
        )
        self.seen_ooms.append(seen)
        for tell in self.on_oom:
            tell(device, n_bytes)
        return torch.OutOfMemoryError(oom_message(figures, self.version, device=device))


_current: list[Session] = []


def current() -> Session:
    """Return the current rehearsal.

    Raises:
        IndexError: there is none.
    """
    return _current[-1]


def note(sentence: str) -> None:
    """Note something about the current rehearsal."""
    current().assumptions.note(sentence)


def begin(session: Session) -> None:
    """Make a rehearsal the current one."""
    _current.append(session)
