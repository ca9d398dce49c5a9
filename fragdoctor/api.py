"""The verbs of the Python API: what the commands do, without a terminal."""

from __future__ import annotations

from os import PathLike, fspath
from typing import TYPE_CHECKING

from fragdoctor.errors import ConfigError
from fragdoctor.model.case import Case, MemoryStats, Overrides, StatsSeries
from fragdoctor.model.hooks import draw_with
from fragdoctor.model.oom import OomLog, OomMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor
    from typing import BinaryIO

    from fragdoctor.limits import Limits
    from fragdoctor.model.comparison import Comparison
    from fragdoctor.model.diagnosis import Diagnosis
    from fragdoctor.model.fleet import FleetReport
    from fragdoctor.model.simulation import Simulation
    from fragdoctor.model.snapshot import Snapshot


def _snapshot_card(snapshot: Snapshot) -> str:
    from fragdoctor.report.card import snapshot_card  # noqa: PLC0415 - numpy is heavy

    return snapshot_card(snapshot)


def _diagnosis_card(diagnosis: Diagnosis) -> str:
    from fragdoctor.report.card import diagnosis_card  # noqa: PLC0415 - numpy is heavy

    return diagnosis_card(diagnosis)


draw_with("Snapshot", _snapshot_card)
draw_with("Diagnosis", _diagnosis_card)


def load(
    source: str | PathLike[str] | BinaryIO | bytes, *, limits: Limits | None = None
) -> Snapshot:
    """Return the memory snapshot in a path, ``-`` (stdin), an open file, or bytes.

    Pickle, JSON or an HTML page with a snapshot inside, plain, gzip or zstd. Nothing of the input
    is executed, and memory stays in proportion to the bytes read.

    Raises:
        InputError: the input cannot be read, is something else, or is refused; the subclasses in
            ``fragdoctor.errors`` say which.
    """
    from fragdoctor.inputs.snapshot_reader import read_snapshot  # noqa: PLC0415
    from fragdoctor.limits import DEFAULT_LIMITS  # noqa: PLC0415 - numpy is heavy

    return read_snapshot(source, limits=limits or DEFAULT_LIMITS)


def diagnose(
    *parts: Case | Snapshot | OomLog | OomMessage | StatsSeries | MemoryStats | str,
    capacity_bytes: int | None = None,
    request_bytes: int | None = None,
    device: int | None = None,
    memory_fraction: float | None = None,
    torch_version: str | None = None,
) -> Diagnosis:
    """Return the diagnosis of everything known about one process.

    Args:
        parts: a snapshot, messages and statistics in any order, at most one of each; text is
            searched for messages. A ``Case`` stands alone.
        capacity_bytes: size of the device, where the inputs do not say.
        request_bytes: the size that was refused, where the inputs do not say.
        device: look at this device only.
        memory_fraction: ``set_per_process_memory_fraction`` of the process.
        torch_version: version that settings are checked against.

    Raises:
        ConfigError: two parts of one kind, or nothing at all.
    """
    from fragdoctor.diagnosis.pipeline import diagnose as run  # noqa: PLC0415 - numpy is heavy

    overrides = Overrides(capacity_bytes, request_bytes, device, memory_fraction, torch_version)
    return run(_case(parts, overrides))


def diagnose_fleet(  # noqa: PLR0913 - the choices of one run, all by keyword
    paths: str | PathLike[str] | Sequence[str | PathLike[str]],
    *,
    executor: Executor | None = None,
    chunk_size: int | None = None,
    replays: str = "groups",
    capacity_bytes: int | None = None,
    memory_fraction: float | None = None,
    torch_version: str | None = None,
    timeout_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> FleetReport:
    """Return the report of many ranks: groups, the odd ones, and one verdict for the job.

    The report is the same for every executor, chunk size and order of the paths.

    Args:
        paths: directories, patterns and files; URLs are opened by the workers.
        executor: any ``concurrent.futures.Executor``; None is this process. Its workers need
            fragdoctor and must see the paths.
        chunk_size: ranks of one task; chosen by their number where None.
        replays: whose advice is tested: ``none``, one rank of each of the ``groups``, or ``all``.
        capacity_bytes: size of the devices, where the inputs do not say.
        memory_fraction: ``set_per_process_memory_fraction`` of the processes.
        torch_version: version that settings are checked against.
        timeout_s: a rank that takes longer becomes a row that says so.
        progress: called with the ranks done and the ranks in all.

    Raises:
        InputError: no rank could be read.
        ConfigError: ``replays`` is something else.
    """
    from fragdoctor.fleet.examine import Replays, examine, share_out  # noqa: PLC0415 - numpy is heavy
    from fragdoctor.inputs.discovery import discover, inputs_of  # noqa: PLC0415 - numpy is heavy

    if replays not in list(Replays):
        raise ConfigError(f"replays is {replays!r}.", hint="Give none, groups or all.")
    names = [fspath(p) for p in ([paths] if isinstance(paths, str | PathLike) else paths)]
    found = discover(names)
    shared = share_out(found)
    return examine(
        shared.ranks or inputs_of(found.case_names),
        executor=executor,
        chunk_size=chunk_size,
        progress=progress,
        overrides=Overrides(capacity_bytes, None, None, memory_fraction, torch_version),
        replays=Replays(replays),
        notes=shared.notes,
        timeout_s=timeout_s,
    )


def simulate(  # noqa: PLR0913 - the questions of one what-if, all by keyword
    snapshot: Snapshot,
    confs: Sequence[str] = (),
    *,
    device: int | None = None,
    capacity_bytes: int | None = None,
    memory_fraction: float | None = None,
    torch_version: str | None = None,
    smallest_capacity: bool = False,
) -> Simulation:
    """Return what the allocator model does with a trace under other settings.

    Args:
        snapshot: a snapshot with a trace.
        confs: ``PYTORCH_CUDA_ALLOC_CONF`` strings to try beside the recorded settings.
        device: device whose trace is replayed; the one that ran out of memory where None.
        capacity_bytes: what PyTorch can have; the recorded capacity where None.
        memory_fraction: ``set_per_process_memory_fraction`` of the process.
        torch_version: version whose allocator is modelled; the best fitting where None.
        smallest_capacity: find the smallest capacity at which the run fits, for each.

    Raises:
        SimulationError: the snapshot has no trace that could be replayed.
        ConfigError: a setting is not one.
    """
    from fragdoctor.trace.simulate import simulate as run  # noqa: PLC0415 - numpy is heavy

    return run(
        snapshot,
        device=device,
        confs=confs,
        capacity_bytes=capacity_bytes,
        memory_fraction=memory_fraction,
        torch_version=torch_version,
        smallest_capacity=smallest_capacity,
    )


def compare(
    *runs: Case | Snapshot | OomLog | OomMessage | StatsSeries | MemoryStats | str,
    names: Sequence[str] | None = None,
    steps: Sequence[float] | None = None,
    capacity_bytes: int | None = None,
) -> Comparison:
    """Return what changed between runs, in time order: the first against the last.

    With three or more, growth is fitted over them too.

    Args:
        runs: two or more; a ``Case`` holds several inputs of one run.
        names: what reports call the runs; the names of their inputs where None.
        steps: where each run stands on the axis of growth.
        capacity_bytes: what growth runs into, where the inputs do not say.

    Raises:
        ConfigError: fewer than two runs, or names or steps that do not fit them.
    """
    from fragdoctor.comparison.compare_cases import compare_cases  # noqa: PLC0415 - numpy is heavy

    cases = [_case((run,), Overrides()) for run in runs]
    if names is not None and len(names) != len(cases):
        raise ConfigError(f"There are {len(cases)} runs and {len(names)} names.")
    named = names or [_name(case) for case in cases]
    return compare_cases(zip(named, cases, strict=True), steps=steps, capacity_bytes=capacity_bytes)


def _name(case: Case) -> str:
    if case.sources:
        return case.sources[0]
    return case.snapshot.provenance.source if case.snapshot is not None else ""


def _case(parts: Sequence[object], overrides: Overrides) -> Case:
    if len(parts) == 1 and isinstance(parts[0], Case):
        return parts[0]
    found: dict[str, object] = {}
    for part in parts:
        kind, value = _sorted_in(part)
        if kind in found:
            raise ConfigError(f"diagnose() was given two inputs of one kind: {kind}.")
        found[kind] = value
    if not found:
        raise ConfigError("diagnose() was given nothing.", hint="Give it a snapshot: load(path).")
    return Case(overrides=overrides, **found)  # type: ignore[arg-type]


def _sorted_in(part: object) -> tuple[str, object]:
    """Return (field of a case, value) for one input."""
    from fragdoctor.inputs.messages import find_messages  # noqa: PLC0415
    from fragdoctor.model.snapshot import Snapshot  # noqa: PLC0415 - numpy is heavy

    if isinstance(part, Snapshot):
        return "snapshot", part
    if isinstance(part, OomLog):
        return "oom", part
    if isinstance(part, OomMessage):
        return "oom", OomLog((part,))
    if isinstance(part, str):
        return "oom", find_messages(part)
    if isinstance(part, StatsSeries):
        return "stats", part
    if isinstance(part, MemoryStats):
        return "stats", StatsSeries((part,))
    raise ConfigError(
        f"diagnose() cannot use a {type(part).__name__}.",
        hint="Give it a Snapshot, an OomLog, a StatsSeries, text, or one Case.",
    )
