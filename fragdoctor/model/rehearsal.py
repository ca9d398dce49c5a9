"""What came of a rehearsal: a program run without a GPU, its requests served by the model."""

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
        event: its place in the trace of the GPU.
        requested_bytes: what the program asked for.
        location: innermost line of the user's own files, None where none is on the stack.
        stack: innermost frame first.
        message: PyTorch's.
    """

    device: int
    step: int
    event: int
    requested_bytes: int
    location: Location | None
    stack: Sequence[Location]
    message: str


class Assumed(Struct, frozen=True):
    """What was assumed where values on the GPU would have decided; ``count`` times at one line."""

    location: Location | None
    operation: str
    assumed: str
    count: int


class Unmodelled(Struct, frozen=True):
    """Memory that a rehearsal does not see; ``n_bytes`` None where no size is documented."""

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
        gpu: whose kernels were taken; is_known_gpu: and whose size.
        capacity_bytes: what PyTorch could have; None = without a limit.
        conf: settings of the allocator, as PyTorch writes them.
        fits: whether no failed request ended the program.
        steps: steps that were completed, each from one run of the optimizer to the next.
        stopped: why it was stopped, "" where the program ended by itself.
        peak_allocated_bytes, peak_reserved_bytes: of the GPU that reserved most.
        out_of_memory: the failed request that ended the program; None = it fits.
        n_ooms: failed requests, those included that the program caught.
        devices: figures of each GPU.
        assumptions: what was assumed about values.
        unmodelled: what takes memory beside the allocator.
        notes: sentences on the rehearsal as a whole.
        snapshot: path of the memory snapshot that it left; "" = none was asked for.
        torch_version: whose allocator it was.
        python: the program's Python.
        batch: the batch size that stood in its arguments; None where none was asked for.
        is_partial: whether something of the program was not seen that may need more memory.
        partial_reason: why it was not, "" where all was seen.
        n_skipped: rounds of the program's loops that were skipped, as they would ask for the same
            memory as others.
        traits: what the program uses, where that was asked for: ``engine/treatments/traits.py``.
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
        diagnosis: of the snapshot.
        rehearsal: what came of it.
        needs_bytes: the least that PyTorch must have so that the steps rehearsed fit, by replay;
            None where the program did not come so far.
        fitting_gpus: names of the known GPUs that have so much, the smallest first.
    """

    diagnosis: Diagnosis
    rehearsal: Rehearsal
    needs_bytes: int | None = None
    fitting_gpus: Sequence[str] = ()


class FailedRehearsal(Struct, frozen=True):
    """One of several rehearsals that came to nothing, and why."""

    gpu: str
    conf: str
    batch: int | None
    message: str


class LargestBatch(Struct, frozen=True):
    """The largest batch size that fits on one GPU under one setting.

    Attributes:
        gpu: as in the rehearsals.
        conf: as in the rehearsals.
        batch: the largest that fits; None = none of those tried.
        fails_at: the smallest that does not fit; None = all that were tried do.
    """

    gpu: str
    conf: str
    batch: int | None
    fails_at: int | None


class RehearsalSweep(Struct, frozen=True):
    """One program rehearsed several times, with other GPUs, settings or batch sizes.

    Attributes:
        program: the script or module.
        rehearsals: in the order that was asked for.
        failed: those that could not be rehearsed to a result.
        largest_batches: one for each GPU and setting, where batch sizes were asked for.
        is_search: whether the batch sizes were searched: then some of them have to fail.
        notes: sentences on all of them.
    """

    program: str
    rehearsals: Sequence[Rehearsal]
    failed: Sequence[FailedRehearsal] = ()
    largest_batches: Sequence[LargestBatch] = ()
    is_search: bool = False
    notes: Sequence[str] = ()

    @property
    def fits(self) -> bool:
        """Whether each of them fits; of a search, whether each GPU and setting has a batch.

        None fits where none could be rehearsed.
        """
        if self.is_search:
            return all(found.batch is not None for found in self.largest_batches)
        return bool(self.rehearsals) and all(found.fits for found in self.rehearsals)
