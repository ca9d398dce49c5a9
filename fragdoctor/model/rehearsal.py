"""Results of a rehearsal: a program run without a GPU; the allocator model serves its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Location


class RehearsedOom(Struct, frozen=True):
    """The failed request that ended the program.

    Attributes:
        device: the GPU.
        step: steps completed before it.
        event: index of the request in the trace of the GPU.
        requested_bytes: what the program asked for.
        location: innermost line in the user's own files, None if none is on the stack.
        stack: stack of the request, innermost frame first.
        message: PyTorch's message.
    """

    device: int
    step: int
    event: int
    requested_bytes: int
    location: Location | None
    stack: Sequence[Location]
    message: str


class Assumed(Struct, frozen=True):
    """An assumption about a value that only a GPU would have, made ``count`` times at one line."""

    location: Location | None
    operation: str
    assumed: str
    count: int


class Unmodelled(Struct, frozen=True):
    """Memory that a rehearsal does not see; ``n_bytes`` is None if no size is documented."""

    what: str
    n_bytes: int | None = None


class RehearsedDevice(Struct, frozen=True):
    """Figures of one GPU."""

    device: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    retries: int
    n_events: int


class Rehearsal(Struct, frozen=True):
    """One rehearsal.

    Attributes:
        gpu: the GPU whose kernels were assumed.
        is_known_gpu: whether that GPU's size was assumed too.
        capacity_bytes: how much PyTorch could have; None means without a limit.
        conf: settings of the allocator, as PyTorch writes them.
        fits: whether no failed request ended the program.
        steps: completed steps, each from one run of the optimizer to the next.
        stopped: why the rehearsal was stopped, "" if the program ended by itself.
        peak_allocated_bytes, peak_reserved_bytes: peaks of the GPU that reserved the most.
        out_of_memory: the failed request that ended the program; None means it fits.
        n_ooms: failed requests, including those that the program caught.
        devices: figures of each GPU.
        assumptions: what was assumed about values.
        unmodelled: what takes memory outside the allocator.
        notes: sentences about the rehearsal as a whole.
        snapshot: path of the memory snapshot that it left; "" means none was asked for.
        torch_version: PyTorch version whose allocator was modeled.
        python: the program's Python.
        batch: the batch size in the program's arguments; None if none was asked for.
        is_partial: whether the rehearsal missed a part of the program that may need more memory.
        partial_reason: why it missed that part, or "".
        n_skipped: skipped iterations of loops; they would request the same memory as others.
        traits: what the program uses, if that was asked for: ``engine/treatments/traits.py``.
    """

    gpu: str
    is_known_gpu: bool
    capacity_bytes: int | None
    conf: str
    fits: bool
    steps: int
    stopped: str
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    out_of_memory: RehearsedOom | None
    n_ooms: int
    devices: Sequence[RehearsedDevice]
    assumptions: Sequence[Assumed]
    unmodelled: Sequence[Unmodelled]
    notes: Sequence[str]
    snapshot: str
    torch_version: str
    python: str
    batch: int | None = None
    is_partial: bool = False
    partial_reason: str = ""
    n_skipped: int = 0
    traits: Mapping[str, Any] = field(default_factory=dict)


class RehearsalResult(Struct, frozen=True):
    """A rehearsal with the diagnosis of its snapshot.

    Attributes:
        diagnosis: diagnosis of the snapshot.
        rehearsal: result of the rehearsal.
        needs_bytes: the least that PyTorch must have for the rehearsed steps to fit, by replay;
            None if the program did not get that far.
        fitting_gpus: names of the known GPUs that have that much, smallest first.
    """

    diagnosis: Diagnosis
    rehearsal: Rehearsal
    needs_bytes: int | None = None
    fitting_gpus: Sequence[str] = ()


class FailedRehearsal(Struct, frozen=True):
    """One of several rehearsals that gave no result, and why."""

    gpu: str
    conf: str
    batch: int | None
    message: str


class LargestBatch(Struct, frozen=True):
    """The largest batch size that fits on one GPU under one setting.

    Attributes:
        gpu: the GPU, as in the rehearsals.
        conf: the setting, as in the rehearsals.
        batch: the largest batch that fits; None means none that was tried fits.
        fails_at: the smallest batch that does not fit; None means every batch that was tried fits.
    """

    gpu: str
    conf: str
    batch: int | None
    fails_at: int | None


class RehearsalSweep(Struct, frozen=True):
    """One program rehearsed several times, with other GPUs, settings or batch sizes.

    Attributes:
        program: the script or module.
        rehearsals: rehearsals in the order that was asked for.
        failed: rehearsals that gave no result.
        largest_batches: one for each GPU and setting, if batch sizes were asked for.
        is_search: whether batch sizes were searched; then some of them must fail.
        notes: sentences about all rehearsals.
    """

    program: str
    rehearsals: Sequence[Rehearsal]
    failed: Sequence[FailedRehearsal] = ()
    largest_batches: Sequence[LargestBatch] = ()
    is_search: bool = False
    notes: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        """Whether every rehearsal fits; in a search, whether each GPU and setting has a batch.

        False if nothing could be rehearsed.
        """
        if self.is_search:
            return all(found.batch is not None for found in self.largest_batches)
        return bool(self.rehearsals) and all(found.fits for found in self.rehearsals)
