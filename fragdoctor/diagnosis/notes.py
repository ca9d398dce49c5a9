"""What a reader should know about the inputs: cuts, contradictions, and unequal devices.

If the inputs know the capacity, ``--capacity`` is a question about another card, never a fact. If
the GPUs of one process differ, a note says which one is odd, and what usually causes that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from fragdoctor.diagnosis.bench import Bench
from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.future.whatif import WhatIf
from fragdoctor.model.case import BundleFacts, Case, OomMessage
from fragdoctor.model.diagnosis import IDLE_SHARE, DeviceFigures, HostMemoryReport, Moment, Verdict
from fragdoctor.model.simulation import OutlookState
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.rules.failed_request import CONTEXT_ALLOWANCE_BYTES, rounding_bytes
from fragdoctor.rules.request_sources import is_about
from fragdoctor.rules.rule import Context
from fragdoctor.units import format_count, format_size

_MOST_HOST_LINES: Final = 3
"""The most source lines to name that hold the host's memory."""

NO_EVENT = (
    "The snapshot holds no out-of-memory event: it was not taken at the moment of the message."
)


def find_notes(
    case: Case,
    contexts: Sequence[Context],
    leader: Context,
    host: HostMemoryReport | None,
) -> tuple[str, ...]:
    """Return one sentence for each cut, mismatch and omission."""
    notes: list[str] = []
    for context in contexts:
        if context.analysis is not None:
            prefix = f"Device {context.device}: " if len(contexts) > 1 else ""
            notes.extend(f"{prefix}{note}" for note in context.analysis.capture.notes)
    notes.extend(_mismatch(leader))
    if case.bundle is not None:
        notes.extend(_of_bundle(case.bundle))
    if case.oom is not None and case.oom.damage:
        notes.append(case.oom.damage)
    missing = [] if leader.message is None else _missing_figures(leader.message)
    if missing and leader.analysis is None:
        notes.append(f"The message is cut off; missing: {', '.join(missing)}.")
    if leader.message is not None and case.oom is not None:
        notes.extend(_of_visible(leader.message.device_index, case.oom.settings.visible_gpus))
    if len(contexts) > 1:
        notes.append(
            f"{len(contexts)} devices are in the snapshot; the verdict is about device "
            f"{leader.device}."
        )
    if host is not None:
        notes.extend(_of_host(host))
    return tuple(dict.fromkeys(notes))


def _of_visible(device: int | None, visible: str) -> list[str]:
    """Say which GPU a message means where the text makes only some of them visible."""
    ids = visible.split(",") if visible else []
    if device is None or device >= len(ids) or ids[device] == str(device):
        return []
    which = "the first visible GPU" if device == 0 else f"number {device + 1} of the visible GPUs"
    note = (
        f"GPU {device} means {which}: GPU {ids[device]} in nvidia-smi if CUDA_VISIBLE_DEVICES="
        f"{visible} took effect (it must be set before the program uses CUDA)."
    )
    return [note]


def _missing_figures(message: OomMessage) -> list[str]:
    """Return the figures that a message lacks although its kind prints them.

    One with a finer kind was not measured: more than 1 EB is refused before that.
    """
    prints_all = message.is_of_caching_allocator and message.backend in ("cuda", "rocm")
    if not prints_all or message.sub_kind:
        return []
    figures = {
        "device size": message.total_bytes,
        "free": message.free_bytes,
        "allocated": message.allocated_bytes,
    }
    return [name for name, value in figures.items() if value is None]


def _of_host(host: HostMemoryReport) -> list[str]:
    """Describe the host's page-locked memory, which PyTorch 2.15 records beside the GPUs'."""
    cached = f", {format_size(host.cached_bytes)} of it cached for reuse"
    held = f"The host has {format_size(host.reserved_bytes)} page-locked (pinned)"
    notes = [f"{held}{cached if host.cached_bytes else ''}: no figure here includes it."]
    if host.moment is None:
        return notes
    when = f"at the {host.moment}"
    lines = "; ".join(
        f"{format_size(h.n_bytes)} by {h.location or 'lines that were not recorded'}"
        for h in host.holders[:_MOST_HOST_LINES]
    )
    notes.append(
        f"Host tensors held {format_size(host.held_bytes)} of page-locked memory {when}"
        f"{f' ({lines})' if lines else ''}, and {format_size(host.peak_bytes)} at most."
    )
    notes.extend(
        f"Page-locked memory of the host grows at {g.location or 'a line that was not recorded'}: "
        f"{format_size(g.bytes_per_step)} a step, {format_size(g.survivor_bytes)} by the end. It "
        "is the computer's memory, not a GPU's."
        for g in host.growth[:_MOST_HOST_LINES]
    )
    return notes if host.reserved_bytes else notes[1:]


def _of_bundle(facts: BundleFacts) -> list[str]:
    """Say when and where a bundle was written, and what it leaves out."""
    of_rank = "" if facts.rank is None else f" of rank {facts.rank}"
    moment = {
        "oom": "at an out-of-memory error",
        "exit": "at the program's exit",
        "block": "at the end of a recorded block",
        "request": "while it ran, for fragdoctor attach",
        "signal": f"at {facts.signal or 'a signal'}",
    }.get(facts.reason, "")
    notes = [f"The bundle{of_rank} was written {moment}."] if moment else []
    if facts.n_ooms > 1:
        left_out = f", {format_count(facts.n_skipped)} of them without a bundle"
        notes.append(
            f"The process had run out of memory {format_count(facts.n_ooms)} times by then"
            f"{left_out if facts.n_skipped else ''}."
        )
    notes.extend(f"Not in the bundle: {problem}." for problem in facts.problems[:3])
    notes.extend(f"Of the bundle {problem}." for problem in facts.unusable)
    return notes


def _mismatch(leader: Context) -> list[str]:
    """Say so if message and snapshot are not about the same failure."""
    message, analysis = leader.message, leader.analysis
    if message is None or analysis is None or message.requested_bytes is None:
        return []
    if not analysis.ooms:
        return [NO_EVENT]
    if any(is_about(event, message) for event in analysis.ooms):
        return []
    asked = format_size(message.requested_bytes)
    text = f"No out-of-memory event of the snapshot is about the {asked} of the message"
    return [f"{text}: they may be from different runs."]


def capacity_note(context: Context, bench: Bench | None) -> str:
    """Return which size the report uses, and what the run would do with the given size.

    Returns "" if no size was given, or if the inputs alone do not tell the size.
    """
    given = context.case.overrides.capacity_bytes
    if given is None or context.uses_given_capacity:
        return ""
    own, proven = context.total_bytes, context.proven_capacity_bytes
    if own is not None and abs(given - own) <= rounding_bytes(own):
        return ""
    size = format_size(given)
    if own is not None:
        used = f"the input says that the device has {format_size(own)}"
    elif proven is not None:
        used = f"the failed request proves that PyTorch could have {format_size(proven)}"
        if 0 <= given - proven <= CONTEXT_ALLOWANCE_BYTES:
            return (
                f"The capacity given, {size}, is not used: {used}, and the rest is not PyTorch's."
            )
    else:
        used = f"the run reserved {format_size(context.peak_reserved_bytes)}"
    answer = _answer(bench, given)
    return f"The capacity given, {size}, is not used: {used}.{f' {answer}' if answer else ''}"


def _answer(bench: Bench | None, given: int) -> str:
    """Return the result of a replay with this much memory for PyTorch, or "" without one."""
    try:
        result = None
        if bench is not None and bench.is_usable:
            result = bench.fair_replay.replay(WhatIf(capacity_bytes=given))
    except (SimulationError, ConfigError):
        return ""
    if result is None or not result.is_conclusive:
        return ""
    outlook, room = result.outlook, format_size(max(0, given - result.peak_reserved_bytes))
    if not result.fits:
        would = "run out of memory"
    elif outlook is None or outlook.state is OutlookState.HOLDS:
        would = f"fit, {room} to spare"
    elif outlook.fails:
        would = f"get further, and {'' if outlook.likely is None else 'likely '}fail later"
    else:
        would = f"get past its recorded part, {room} to spare; the rest is not known"
    return f"With {format_size(given)} for PyTorch this run would {would}."


UNLIKE: Final = 2
"""The fullest device holds this many times what the next one does; one sample more is less."""

# torch/nn/parallel: replicas run in parallel_apply, and scatter_gather collects their outputs.
_DATA_PARALLEL: Final = ("data_parallel.py", "parallel_apply.py", "scatter_gather.py")


def balance_note(
    devices: Sequence[DeviceFigures], verdict: Verdict, snapshot: Snapshot | None
) -> str:
    """Return what the devices held when one of them failed, or "" if they are alike or idle."""
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
    note = f"The GPUs differ: when GPU {verdict.device} failed, they held {each}."
    if not any(s.endswith(_DATA_PARALLEL) and "parallel" in s for s in snapshot.strings):
        return note
    if odd == min(busy):
        return (
            f"{note} DataParallel gathers outputs on GPU {odd}: use DistributedDataParallel, which "
            "does not, or compute the loss inside the module."
        )
    return (
        f"{note} DataParallel splits a batch by count, not by size: GPU {odd} had the largest "
        "samples. Sort or pack them by size."
    )
