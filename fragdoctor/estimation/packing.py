"""Computes how many like processes fit on a GPU, from a number, a message or a snapshot."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from fragdoctor.analysis.device import analyze_device
from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.future.simulator import simulate
from fragdoctor.model.case import Case, OomMessage
from fragdoctor.model.gpu_sharing import ProcessDemand, Sharing, share_gpu
from fragdoctor.model.gpus import TYPICAL_CONTEXT_BYTES, GpuModel
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.trace.trace import Trace
from fragdoctor.units import GIB, format_size

_UNKNOWN_BYTES: Final = 1 << 60
_MAX_CONTEXT_BYTES: Final = 8 * GIB
TYPICAL: Final = "typical; 300 to 620 MiB from Pascal to Blackwell"
_MAY_BE_MORE: Final = (
    "The message is from a process that wanted more than it got, so its true peak may be higher. A "
    "snapshot or max_memory_reserved() of a run that fits shows it."
)
_HINT: Final = "Give the size of one process, as in: --per-process 6GB --gpu 24GiB"


class PackRequest(Struct, frozen=True):
    """What the user asked; None means "as the input says, or the default"."""

    per_process_bytes: int | None = None
    context_bytes: int | None = None
    headroom_bytes: int | None = None
    gpu: GpuModel | None = None
    n_processes: int | None = None


def processes_on_gpu(question: PackRequest, case: Case | None = None) -> Sharing:
    """Return how many processes fit.

    A number from the user overrides the inputs; in a case, the snapshot's peak overrides the
    message.

    Raises:
        ConfigError: neither a number nor an input says what one process takes or how large the
            GPU is.
    """
    message = None if case is None else case.primary_message
    snapshot = case.snapshot if case is not None else None
    n_bytes, source, notes = _reserved(question, snapshot, message)
    context_bytes, context_source = _context(question, message)
    demand = ProcessDemand(n_bytes, context_bytes, source, context_source)
    name, total = _gpu(question, message, case)
    others, n_asked = 0, question.n_processes
    if message is not None and question.gpu is None:
        others, n_alike, more = _others(message, demand)
        notes += more
        if n_asked is None and n_alike:
            n_asked = n_alike + 1
    return share_gpu(
        demand,
        gpu=name,
        total_bytes=total,
        headroom_bytes=question.headroom_bytes,
        others_bytes=others,
        n_asked=n_asked,
        notes=notes,
    )


def _known(n_bytes: int | None) -> int | None:
    return None if n_bytes is None or n_bytes >= _UNKNOWN_BYTES else n_bytes


def _gpu(question: PackRequest, message: OomMessage | None, case: Case | None) -> tuple[str, int]:
    if question.gpu is not None:
        return question.gpu.name, question.gpu.total_bytes
    total = _known(message.total_bytes) if message is not None else None
    devices = case.bundle.devices if case is not None and case.bundle is not None else ()
    if total is None and len(devices) == 1 and devices[0].total_bytes:
        return f"GPU {devices[0].index} of the bundle", devices[0].total_bytes
    if total is None:
        raise ConfigError("The size of the GPU is not known.", hint="Give it, as in: --gpu 24GiB")
    assert message is not None  # noqa: S101 - it gave the total
    device = "" if message.device_index is None else f" {message.device_index}"
    return f"GPU{device} of the message", total


_Reserved = tuple[int, str, tuple[str, ...]]
"""The bytes that PyTorch takes in one process, where that figure comes from, and notes on it."""


def _reserved(
    question: PackRequest, snapshot: Snapshot | None, message: OomMessage | None
) -> _Reserved:
    """Return what one process takes; one that ran out of memory needs its last request too."""
    if question.per_process_bytes is not None:
        return question.per_process_bytes, "as given", ()
    if snapshot is not None:
        return _of_snapshot(snapshot)
    live = None if message is None else _known(message.live_bytes)
    asked = None if message is None else _known(message.requested_bytes)
    if message is None or live is None or asked is None:
        raise ConfigError("No input says what one process takes.", hint=_HINT)
    reserved = _known(message.reserved_bytes) or 0
    if reserved >= live + asked:
        return reserved, "reserved in the message", (_MAY_BE_MORE,)
    return live + asked, "live memory and the request of the message", (_MAY_BE_MORE,)


def _of_snapshot(snapshot: Snapshot) -> _Reserved:
    """Return the peak of the fullest device, or more if the run failed for want of it."""
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


def _context(question: PackRequest, message: OomMessage | None) -> tuple[int, str]:
    """Return the bytes of a process outside PyTorch, and where that figure comes from."""
    if question.context_bytes is not None:
        return question.context_bytes, "as given"
    if message is not None:
        own, reserved = _known(message.process_bytes), _known(message.reserved_bytes)
        if own and reserved is not None and 0 < own - reserved < _MAX_CONTEXT_BYTES:
            source = "this process minus its reserved memory, in the message"
            return own - reserved, source
    if question.gpu is not None:
        kind = question.gpu.architecture
        source = f"typical of {kind.title()} GPUs" if kind else TYPICAL
        return question.gpu.context_bytes, source
    return TYPICAL_CONTEXT_BYTES, TYPICAL


def _others(message: OomMessage, demand: ProcessDemand) -> tuple[int, int, tuple[str, ...]]:
    """Return the bytes of listed processes that are not trials like this one, and how many are.

    A process of half to twice the size counts as another trial, one of those to be packed.
    """
    listed = [p for p in message.other_processes if p.n_bytes < _UNKNOWN_BYTES]
    own = demand.total_bytes
    alike = [p for p in listed if own / 2 <= p.n_bytes <= 2 * own]
    others = [p for p in listed if p not in alike]
    notes: list[str] = []
    if alike:
        pids = ", ".join(str(p.pid) for p in alike)
        held = ", ".join(format_size(p.n_bytes) for p in alike)
        who = "Process {} ({}) is" if len(alike) == 1 else "Processes {} ({}) are"
        notes.append(f"{who.format(pids, held)} assumed to be like this one.")
    if others:
        pids = ", ".join(str(p.pid) for p in others)
        held = format_size(sum(p.n_bytes for p in others))
        notes.append(f"Other processes ({pids}) keep {held}.")
    return sum(p.n_bytes for p in others), len(alike), tuple(notes)
