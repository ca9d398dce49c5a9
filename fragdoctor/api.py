"""The functions of the Python API: they do what the commands do, without a terminal."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeGuard

from msgspec.structs import replace

from fragdoctor.errors import ConfigError, InputError, path_text, unusable
from fragdoctor.model.case import Case, MemoryStats, OomLog, OomMessage, Overrides, StatsSeries
from fragdoctor.model.hooks import draw_with
from fragdoctor.model.settings import conf_of
from fragdoctor.model.snapshot import Snapshot

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from fragdoctor.limits import Limits
    from fragdoctor.model.comparison import Comparison
    from fragdoctor.model.diagnosis import Diagnosis
    from fragdoctor.model.fleet import FleetReport
    from fragdoctor.model.memory_estimate import Estimate
    from fragdoctor.model.simulation import Simulation

    Part = Case | Snapshot | OomLog | OomMessage | StatsSeries | MemoryStats | PathLike[str] | str

MAX_PATH: Final = 4096
"""Text longer than this is not a path."""


_CARDS: Final = "fragdoctor.report.card"

draw_with("Snapshot", _CARDS, "snapshot_card")
draw_with("Diagnosis", _CARDS, "diagnosis_card")
draw_with("Diagnosis", _CARDS, "diagnosis_page", as_page=True)


def load(
    source: str | PathLike[str] | BinaryIO | bytes, *, limits: Limits | None = None
) -> Snapshot:
    """Return the memory snapshot in a path, ``-`` (stdin), an open file, or bytes.

    Reads pickle, JSON or an HTML page with a snapshot inside, plain or compressed by gzip or zstd.
    Nothing in the input is executed, and memory use is proportional to the bytes read.

    Raises:
        InputError: the input cannot be read, is something else, or is refused; the subclasses in
            ``fragdoctor.errors`` say which.
        ConfigError: ``source`` has another type.
    """
    from fragdoctor.inputs.snapshot_reader import read_snapshot  # noqa: PLC0415
    from fragdoctor.limits import DEFAULT_LIMITS  # noqa: PLC0415 - numpy is heavy

    if not isinstance(source, str | PathLike | bytes) and not hasattr(source, "read"):
        raise unusable("load", source, "Give it a path, an open file, or bytes.")
    return read_snapshot(source, limits=limits or DEFAULT_LIMITS)


def diagnose(  # noqa: PLR0913 - what may be known besides, all by keyword
    *parts: Part,
    capacity_bytes: int | None = None,
    device: int | None = None,
    memory_fraction: float | None = None,
    torch_version: str | None = None,
    batch_size: int | None = None,
    at: str | None = None,
    continue_with: Snapshot | PathLike[str] | str | None = None,
) -> Diagnosis:
    """Return the diagnosis of everything known about one process.

    Args:
        parts: snapshots, messages and statistics of one process in any order, or the paths of
            files that hold them; other text is searched for messages. A ``Case`` stands alone.
        capacity_bytes: size of the device, if the inputs do not say.
        device: look at this device only.
        memory_fraction: ``set_per_process_memory_fraction`` of the process.
        torch_version: version that settings are checked against.
        batch_size: samples in one forward pass, so that advice can name a smaller number.
        at: the moment that ``Diagnosis.moment`` describes: ``step:3`` (its peak), ``event:1200``,
            ``peak``, ``oom`` or ``end``.
        continue_with: another recording of the program, or its path (a rehearsal, a healthy run);
            it says how a failed run would have gone on.

    Raises:
        ConfigError: there is no part, two of one kind or one of no known kind; or no such moment.
        InputError: a path has nothing that can be used; the subclasses say why.
        SimulationError: the recording to continue with is of another program.
    """
    from fragdoctor.diagnosis.pipeline import diagnose as run  # noqa: PLC0415 - numpy is heavy

    overrides = Overrides(capacity_bytes, device, memory_fraction, torch_version, batch_size)
    further = None if continue_with is None else _snapshot_of(continue_with, "diagnose")
    return run(_case("diagnose", parts, overrides), continue_with=further, at=at)


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
    """Return the report on many ranks: groups, the odd ranks, and one verdict for the job.

    The report is the same for every executor, chunk size and order of the paths.

    Args:
        paths: directories, patterns and files; URLs are opened by the workers.
        executor: any ``concurrent.futures.Executor``; None means this process. Its workers need
            fragdoctor and access to the paths.
        chunk_size: ranks per task; None chooses by the number of ranks.
        replays: whose advice is tested: ``none``, one rank of each of the ``groups``, or ``all``.
        capacity_bytes: size of the devices, if the inputs do not say.
        memory_fraction: ``set_per_process_memory_fraction`` of the processes.
        torch_version: version that settings are checked against.
        timeout_s: a rank that takes longer becomes a row that says so.
        progress: called with the number of finished ranks and the total number.

    Raises:
        InputError: no rank could be read.
        ConfigError: ``replays`` has another value.
    """
    from fragdoctor.fleet.examine import Replays, examine, share_out  # noqa: PLC0415 - numpy is heavy
    from fragdoctor.inputs.discovery import discover, inputs_of  # noqa: PLC0415 - numpy is heavy
    from fragdoctor.model.fleet import SummaryOptions  # noqa: PLC0415

    if replays not in list(Replays):
        raise ConfigError(f"replays is {replays!r}.", hint="Give none, groups or all.")
    names = [fspath(p) for p in ([paths] if isinstance(paths, str | PathLike) else paths)]
    found = discover(names)
    ranks, notes = share_out(found)
    known = Overrides(capacity_bytes, None, memory_fraction, torch_version)
    return examine(
        ranks or inputs_of(found.case_names),
        executor=executor,
        chunk_size=chunk_size,
        progress=progress,
        options=SummaryOptions(known, timeout_s=timeout_s),
        replays=Replays(replays),
        notes=notes,
    )


def simulate(  # noqa: PLR0913 - the questions of one what-if, all by keyword
    snapshot: Snapshot | Case | PathLike[str] | str,
    confs: Sequence[str] = (),
    *,
    device: int | None = None,
    capacity_bytes: int | None = None,
    memory_fraction: float | None = None,
    torch_version: str | None = None,
    smallest_capacity: bool = False,
    continue_with: Snapshot | PathLike[str] | str | None = None,
) -> Simulation:
    """Return what the allocator model does with a trace under other settings.

    Args:
        snapshot: a snapshot with a trace, or its path.
        confs: ``PYTORCH_CUDA_ALLOC_CONF`` strings to try in addition to the recorded settings.
        device: device whose trace is replayed; None means the device that ran out of memory.
        capacity_bytes: how much PyTorch can have; None means the recorded capacity.
        memory_fraction: ``set_per_process_memory_fraction`` of the process.
        torch_version: version whose allocator is modeled; None means the best-fitting version.
        smallest_capacity: for each setting, find the smallest capacity with which the run fits.
        continue_with: another recording of the program, as for :func:`diagnose`.

    Raises:
        SimulationError: the snapshot has no trace that can be replayed, or the recording to
            continue with is of another program.
        ConfigError: a setting is not valid, or ``snapshot`` is something else.
        InputError: the path does not lead to a snapshot.
    """
    from fragdoctor.future.simulator import simulate as run  # noqa: PLC0415 - numpy is heavy

    if isinstance(confs, str):
        confs = (confs,)
    return run(
        _snapshot_of(snapshot),
        device=device,
        confs=[conf_of(text) for text in confs],
        capacity_bytes=capacity_bytes,
        memory_fraction=memory_fraction,
        torch_version=torch_version,
        smallest_capacity=smallest_capacity,
        continue_with=None if continue_with is None else _snapshot_of(continue_with),
    )


def compare(
    *runs: Part,
    steps: Sequence[float] | None = None,
    capacity_bytes: int | None = None,
) -> Comparison:
    """Return what changed between the first and the last of several runs in time order.

    With three or more runs, growth is fitted over them too.

    Args:
        runs: two or more runs, or paths of their files; a ``Case`` holds several inputs of one run.
        steps: position of each run on the axis of growth.
        capacity_bytes: the capacity that growth runs into, if the inputs do not say.

    Raises:
        ConfigError: there are fewer than two runs, or steps do not match them.
    """
    from fragdoctor.comparison.compare_cases import compare_cases  # noqa: PLC0415 - numpy is heavy

    cases = [_case("compare", (run,), Overrides()) for run in runs]
    named = ((_name(case), case) for case in cases)
    return compare_cases(named, steps=steps, capacity_bytes=capacity_bytes)


def _name(case: Case) -> str:
    if case.sources:
        return case.sources[0]
    return case.snapshot.provenance.source if case.snapshot is not None else ""


def estimate(  # noqa: PLR0913 - the options of one estimate, all by keyword
    *inputs: str | PathLike[str],
    params: str | int = "",
    dtype: str = "",
    optimizer: str = "adamw",
    batch: int = 1,
    seq: int = 0,
    checkpointing: str = "none",
    lora_rank: int = 0,
    zero_stage: int = 0,
    world_size: int = 1,
    inference: bool = False,
    gpu: str | Sequence[str] = (),
    **more: Any,
) -> Estimate:
    """Return how much memory the training or inference of a model needs, and whether it fits.

    Args:
        inputs: ``config.json``, or its folder; not needed if ``params`` says how large the model
            is.
        params: number of parameters, such as ``"7B"``.
        dtype: parameters' dtype: ``fp32``, ``bf16``, ``fp16``, ``amp-bf16``, ``int8``, ``int4``.
        optimizer: ``adamw``, ``sgd``, ``adafactor``, ...
        batch: sequences per pass.
        seq: tokens per sequence; 0 means the model's own length.
        checkpointing: ``none``, ``full`` or ``every-N``.
        lora_rank: rank of the adapters; 0 trains all parameters.
        zero_stage: stage of ZeRO; 3 is FSDP.
        world_size: number of GPUs that share the work.
        inference: whether to run the model without a training step.
        gpu: names such as ``"h100"``, or sizes such as ``"24GiB"``.
        more: further options, listed in ``fragdoctor.estimation.request.OPTIONS``.

    Raises:
        ConfigError: an option does not have such a value.
        InputError: an input is not a model.
    """
    from fragdoctor.estimation.judge import judged  # noqa: PLC0415 - numpy is heavy
    from fragdoctor.estimation.request import workload_of  # noqa: PLC0415
    from fragdoctor.model.gpus import gpu_of  # noqa: PLC0415

    gpus = [gpu_of(name) for name in dict.fromkeys([gpu] if isinstance(gpu, str) else gpu)]
    more.setdefault("compute", gpus[0].compute if gpus else "")
    workload = workload_of(
        [path_text("estimate", path, _OF_MODELS) for path in inputs],
        str(params),
        dtype=dtype,
        optimizer=optimizer,
        batch=batch,
        seq=seq,
        checkpointing=checkpointing,
        lora_rank=lora_rank,
        zero_stage=zero_stage,
        world_size=world_size,
        inference=inference,
        **more,
    )
    return judged(workload, gpus)


_OF_MODELS: Final = "Give it a config.json, or the folder of a model with one."


def _snapshot_of(given: object, what: str = "simulate") -> Snapshot:
    from fragdoctor.inputs.cases import read_snapshot  # noqa: PLC0415 - numpy is heavy

    hint = "Give it a Snapshot, or the path of one."
    if isinstance(given, str | PathLike):
        return read_snapshot(path_text(what, given, hint))
    found = given.snapshot if isinstance(given, Case) else given
    if isinstance(found, Snapshot):
        return found
    if isinstance(given, Case):
        raise ConfigError(f"{what}() cannot use a Case without a snapshot.", hint=hint)
    raise unusable(what, given, hint)


def _case(verb: str, parts: Sequence[object], overrides: Overrides) -> Case:
    if len(parts) == 1 and isinstance(parts[0], Case):
        return parts[0]
    if not parts:
        raise ConfigError(f"{verb}() was given nothing.", hint="Give it a snapshot or its path.")
    names = [fspath(part) for part in parts if _is_path(part)]
    found: dict[str, Any] = {}
    if names:
        from fragdoctor.inputs.cases import read_case  # noqa: PLC0415 - numpy is heavy

        read = read_case(names, overrides)
        given = ((name, getattr(read, name)) for name in read.__struct_fields__)
        found = {name: value for name, value in given if value is not None}
    for part in parts:
        if _is_path(part):
            continue
        kind, value = _sorted_in(verb, part)
        if kind in found:
            raise ConfigError(f"{verb}() was given two inputs of one kind: {kind}.")
        found[kind] = value
    return replace(Case(overrides=overrides), **found)


def _is_path(part: object) -> TypeGuard[str | PathLike[str]]:
    """Return whether an input is a file name: one word that looks like it, or an existing file."""
    if not isinstance(part, str):
        return isinstance(part, PathLike)
    if len(part.splitlines()) != 1 or len(part) > MAX_PATH:
        return False
    looks_so = len(part.split()) == 1 and ("/" in part or "." in part)
    return looks_so or os.path.lexists(part)


def _sorted_in(verb: str, part: object) -> tuple[str, object]:
    """Return (field of a case, value) for one input."""
    from fragdoctor.inputs.messages import find_messages  # noqa: PLC0415

    if isinstance(part, Snapshot):
        return "snapshot", part
    if isinstance(part, OomLog):
        return "oom", part
    if isinstance(part, OomMessage):
        return "oom", OomLog((part,))
    if isinstance(part, str):
        log = find_messages(part)
        if not log.messages and not log.markers and len(part.splitlines()) < 2:
            raise InputError(
                f"{part[:80]!r} is neither a file nor an out-of-memory message.",
                hint="Give a path that exists, or the text of the exception.",
            )
        return "oom", log
    if isinstance(part, StatsSeries):
        return "stats", part
    if isinstance(part, MemoryStats):
        return "stats", StatsSeries((part,))
    hint = "Give it a path, a Snapshot, an OomLog, a StatsSeries, text, or one Case."
    raise unusable(verb, part, hint)
