"""What a bundle of ``fragdoctor run`` knows beside snapshot, message and statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fragdoctor.model.oom import OtherProcess


@dataclass(frozen=True, slots=True)
class BundleDevice:
    """One GPU at the moment of the bundle; None = not known there.

    Attributes:
        index: PyTorch's device number.
        name: name of the GPU; hostile text.
        total_bytes: size of the device as the driver tells it.
        free_bytes: free for everybody.
        reserved_bytes: held by PyTorch's cache.
        process_bytes: all memory of this process as the driver counts it.
        other_processes: processes on the GPU that have another id. In a container, where the ids
            of the driver are the host's, this process is among them and ``process_bytes`` is None.
        memory_fraction: of ``set_per_process_memory_fraction``; None = not known or not set.
    """

    index: int
    name: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    other_processes: Sequence[OtherProcess] = ()
    memory_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class BundleFacts:
    """The manifest of a bundle, checked; all text is hostile.

    Attributes:
        reason: ``oom``, ``exit``, ``signal`` or ``block`` (end of ``fragdoctor.record``).
        time: when it was written, ISO 8601 in UTC.
        pid: process id, as the program saw it.
        rank, local_rank, world_size: where it was one of many.
        host: name of the machine.
        command: the program's command line.
        versions: ``python``, ``torch``, ``cuda``, ``hip``, ``driver`` where known.
        environment: the variables that matter to memory, as they were.
        devices: the GPUs on which PyTorch held memory.
        n_ooms: failures of the process up to then; n_skipped: those without a bundle.
        max_entries: events kept per GPU; None = the program recorded by itself.
        stacks: ``python`` or ``all``; "" = the program recorded by itself.
        signal: name of the signal, "" without one.
        exception: type of the exception that ended the program, "" without one.
        oom_device: the device of the failure; None without one.
        ended_program: whether this failure ended the program.
        problems: what could not be recorded.
        unusable: files that are there and cannot be read, each with the reason.
    """

    reason: str
    time: str = ""
    pid: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    host: str = ""
    command: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: Sequence[BundleDevice] = ()
    n_ooms: int = 0
    n_skipped: int = 0
    max_entries: int | None = None
    stacks: str = ""
    signal: str = ""
    exception: str = ""
    oom_device: int | None = None
    ended_program: bool = False
    problems: Sequence[str] = ()
    unusable: Sequence[str] = ()

    def device(self, index: int | None) -> BundleDevice | None:
        """Return the facts of a device, None where the bundle has none."""
        return next((d for d in self.devices if d.index == index), None)
