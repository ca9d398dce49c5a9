"""Computes how many like processes fit on a GPU, from a number or a snapshot."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from fragdoctor.analysis.device import analyze_device
from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.future.simulator import simulate
from fragdoctor.model.case import Case
from fragdoctor.model.gpu_sharing import ProcessDemand, Sharing
from fragdoctor.model.gpus import TYPICAL_CONTEXT_BYTES, GpuModel
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.trace.trace import Trace

TYPICAL: Final = "typical; 300 to 620 MiB from Pascal to Blackwell"
_HINT: Final = "Give the size of one process, as in: --per-process 6GB --gpu 24GiB"


class PackRequest(Struct, frozen=True):
    """What the user asked; None means "as the input says, or the default"."""

    per_process_bytes: int | None = None
    context_bytes: int | None = None
    gpu: GpuModel | None = None
    n_processes: int | None = None


def processes_on_gpu(question: PackRequest, case: Case | None = None) -> Sharing:
    """Return how many processes fit; a number from the user overrides the snapshot.

    Raises:
        ConfigError: neither a number nor a snapshot says what one process takes, or nothing says
            how large the GPU is.
    """
    n_bytes, source, notes = _reserved(question, None if case is None else case.snapshot)
    context_bytes, context_source = _context(question)
    name, total = _gpu(question, case)
    return Sharing(
        ProcessDemand(n_bytes, context_bytes, source, context_source),
        gpu=name,
        total_bytes=total,
        n_asked=question.n_processes,
        notes=notes,
    )


def _gpu(question: PackRequest, case: Case | None) -> tuple[str, int]:
    if question.gpu is not None:
        return question.gpu.name, question.gpu.total_bytes
    devices = case.bundle.devices if case is not None and case.bundle is not None else ()
    if len(devices) == 1 and devices[0].total_bytes:
        return f"GPU {devices[0].index} of the bundle", devices[0].total_bytes
    raise ConfigError("The size of the GPU is not known.", hint="Give it, as in: --gpu 24GiB")


def _reserved(question: PackRequest, snapshot: Snapshot | None) -> tuple[int, str, tuple[str, ...]]:
    """Return the bytes that PyTorch takes in one process, where that figure comes from, and notes.

    Of a snapshot, it is the peak of the fullest device, or more if the run failed for want of it.
    """
    if question.per_process_bytes is not None:
        return question.per_process_bytes, "as given", ()
    if snapshot is None:
        raise ConfigError("No snapshot says what one process takes.", hint=_HINT)
    analyses = [analyze_device(snapshot, device) for device in snapshot.devices]
    peaks = [a.timeline.peak_reserved_bytes if a.timeline else a.reserved_bytes for a in analyses]
    peak = max(peaks, default=0)
    if not peak:
        raise ConfigError("The snapshot holds no memory of any device.", hint=_HINT)
    analysis = analyses[peaks.index(peak)]
    if not analysis.capture.has_trace:
        note = "Without a trace, the peak is not known; this is the state at the snapshot."
        return peak, "reserved in the snapshot", (note,)
    if not analysis.ooms:
        return peak, "peak reserved in the trace", ()
    smallest, why = _smallest(analysis.trace)
    if smallest > peak:
        return smallest, "smallest at which a replay of the failed run fits", why
    note = "The run of this snapshot ran out of memory, so it may need more than its peak."
    return peak, "peak reserved in the trace", (note, *why)


def _smallest(trace: Trace) -> tuple[int, tuple[str, ...]]:
    """Return the smallest capacity at which a replay serves every request, and notes on it."""
    try:
        simulation = simulate(trace, confs=[trace.settings.conf], smallest_capacity=True)
    except FragdoctorError as e:
        return 0, (f"Nothing was replayed: {e}",)
    (replay,) = simulation.results
    note = replay.smallest_capacity_note
    return replay.smallest_capacity_bytes or 0, (f"The smallest: {note}.",) if note else ()


def _context(question: PackRequest) -> tuple[int, str]:
    """Return the bytes of a process outside PyTorch, and where that figure comes from."""
    if question.context_bytes is not None:
        return question.context_bytes, "as given"
    if question.gpu is not None:
        kind = question.gpu.architecture
        source = f"typical of {kind.title()} GPUs" if kind else TYPICAL
        return question.gpu.context_bytes, source
    return TYPICAL_CONTEXT_BYTES, TYPICAL
