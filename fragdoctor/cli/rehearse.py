"""``fragdoctor rehearse``: the unchanged program, without a GPU, with its real memory."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from fragdoctor.cli import console, options
from fragdoctor.cli.check import report_targets, write_reports
from fragdoctor.cli.exit import FINDINGS, OK, USAGE, say
from fragdoctor.errors import ConfigError
from fragdoctor.model.gpus import known_gpu
from fragdoctor.model.settings import parse_conf
from fragdoctor.opening import first_free
from fragdoctor.report.base import RenderOptions, ReportFormat, check_format, render
from fragdoctor.units import format_size, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fragdoctor.model.case import Case
    from fragdoctor.model.diagnosis import Diagnosis
    from fragdoctor.model.prescription import Prescription
    from fragdoctor.model.rehearsal import Rehearsal, RehearsalResult, RehearsalSweep
    from fragdoctor.rehearsal.process import OnStep
    from fragdoctor.rehearsal.programs import Launched, Program
    from fragdoctor.rehearsal.sweep import Sweep


DEFAULT_TIME: Final = "5m"
_OF_CI: Final = ("sarif", "junit", "github")
MAX_DEVICES: Final = 64
GPUS_OF_A_NODE: Final = 8
ASSUMED: Final = ("nonzero", "unique")
_program, _program_flag = options.under(options.PROGRAM)


@options.taken
class RehearseOptions(options.FullOutput):
    """Options of the command."""

    words: list[str] = options.argument(
        "SCRIPT [-- ARGS]...",
        "A script or notebook, or with -m a module; its own arguments follow --",
    )
    is_module: bool = options.IS_MODULE
    gpu: list[str] | None = options.option(
        "LIST", "Choose the GPU: a100-40g, h100, 24GiB; several after commas make a table"
    )
    batch: str | None = options.option(
        "LIST|N..M",
        "Replace {batch} in ARGS with these batch sizes: 8,16,32, or 1..512 to search",
        group=options.INPUT,
    )
    capacity: int | None = options.CAPACITY
    unlimited: bool = options.flag("Never run out of memory, to learn the need")
    fits_on: int | None = options.option(
        "SIZE", "Exit with 1 unless it fits if PyTorch can have this much"
    )
    conf: list[str] | None = options.option(
        "SETTINGS", "Set PYTORCH_CUDA_ALLOC_CONF for the program; several make a table"
    )
    torch_version: str | None = options.TORCH_VERSION
    steps: int | None = options.option(
        "N", "Stop after N steps; by default, when their memory repeats", min=1
    )
    time_limit: float | None = _program("SECONDS", "End each rehearsal after this much wall time")
    devices: int | None = _program("N", "Show the program N such GPUs", min=1, max=MAX_DEVICES)
    world_size: int | None = _program("N", "Rehearse one rank of N, as torchrun starts it", min=1)
    rank: int | None = _program("R", "Choose the rank for --world-size; 0 by default", min=0)
    python: str | None = _program("PATH", "Choose the program's Python; by default the one on PATH")
    snapshot: Path | None = options.option(
        "FILE", "Leave the memory snapshot here; a folder for several; else none"
    )
    cure: bool = options.flag(
        "Try changes of the program until one lets it fit", group=options.CURE
    )
    time: str = options.option(
        "TIME", "Search for a cure this long: 90s, 5m", default=DEFAULT_TIME, group=options.CURE
    )
    assume: list[str] | None = _program(
        "KIND=SHARE",
        "Assume how much nonzero (and masks) or unique keep: nonzero=0.5; all by default",
    )
    allow_writes: bool = _program_flag("Let the program change files, as in a normal run")
    output_format: ReportFormat = options.FORMAT
    report: list[str] | None = options.REPORTS


def rehearse(chosen: RehearseOptions) -> int:
    """Rehearse a program, print the diagnosis of its memory, and fail if it does not fit."""
    look = console.look_of(chosen)
    targets = report_targets(chosen, chosen.words[:1])
    asked = asked_of(chosen)
    if chosen.cure:
        return _cured(chosen, asked, look)
    result: RehearsalResult | RehearsalSweep
    if asked.is_one:
        kept = None
        if chosen.snapshot is not None:
            kept = _snapshot_path(chosen.snapshot, asked.program, force=chosen.force)
        result = diagnosed(asked, kept)
        code = _code(chosen, [result.rehearsal], fits=result.rehearsal.fits)
    else:
        result = swept(asked, _folder_of(chosen.snapshot))
        code = USAGE if result.failed else _code(chosen, result.rehearsals, fits=result.fits)

    def report_of(name: str, look: RenderOptions) -> str:
        if name not in _OF_CI:
            return render("rehearse", name, result, look)
        from fragdoctor.report.views.rehearse import judged

        return render("check", name, judged(result, is_gate=_is_gate(chosen)), look)

    write_reports(chosen, targets, look, report_of)
    return code


def _code(chosen: RehearseOptions, found: Sequence[Rehearsal], *, fits: bool) -> int:
    """Return the exit code: a gate passes no part that was not seen, unless asked to."""
    if not fits:
        return FINDINGS
    return USAGE if _is_gate(chosen) and any(r.is_partial for r in found) else OK


def _is_gate(chosen: RehearseOptions) -> bool:
    """Return whether the question is about the whole program, so that a part is no answer."""
    return chosen.fits_on is not None and chosen.steps is None


def asked_of(chosen: RehearseOptions) -> Sweep:
    """Return what to run and how.

    Raises:
        ConfigError: the program does not exist, or options exclude each other.
    """
    from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
    from fragdoctor.rehearsal.programs import Program, after_python, launched
    from fragdoctor.rehearsal.sweep import Sweep, parse_batches

    limits = {
        "--capacity": chosen.capacity,
        "--fits-on": chosen.fits_on,
        "--unlimited": chosen.unlimited or None,
    }
    given = [name for name, value in limits.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other.", hint="Give one of them.")
    seconds = chosen.time_limit
    if seconds is not None and not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ConfigError("--time-limit takes seconds.", hint="Write for example --time-limit 600")
    names: list[str | None] = [n.strip() for text in chosen.gpu or [] for n in text.split(",")]
    gpus = [
        rehearsed_gpu(name, chosen.capacity or chosen.fits_on, is_unlimited=chosen.unlimited)
        for name in list(dict.fromkeys(names)) or [None]
    ]
    by_python = None if chosen.is_module else after_python(chosen.words)
    words, is_module, python = by_python or (chosen.words, chosen.is_module, None)
    by_launcher = launched(words)
    confs: list[str | None] = [*dict.fromkeys(chosen.conf or [])]
    for conf in confs:
        parse_conf(conf or "")
    rank, world_size, n_devices = _place_in_run(chosen, by_launcher)
    note = ""
    if by_launcher is not None:
        words, is_module = [*by_launcher.words], by_launcher.is_module
        note = f"{by_launcher.launcher} was skipped: rank {rank} of {world_size} was rehearsed."
    python = chosen.python or python
    program = Program.found(words[0], words[1:], python, is_module=is_module, note=note)
    base = RehearsalConditions(
        gpu=gpus[0],
        n_devices=n_devices,
        rank=rank,
        world_size=world_size,
        conf=confs[0] if confs else None,
        torch_version=chosen.torch_version or "",
        n_steps=chosen.steps,
        assumed_shares=_shares(chosen.assume or []),
        allows_writes=chosen.allow_writes,
        shows_output=chosen.verbose,
        time_limit_s=chosen.time_limit,
        variables={} if by_launcher is None else by_launcher.variables,
    )
    batches = None if chosen.batch is None else parse_batches(chosen.batch)
    return Sweep(program, base, gpus, confs or [None], batches)


def _place_in_run(
    chosen: RehearseOptions, by_launcher: Launched | None
) -> tuple[int | None, int, int]:
    """Return the rank, the number of ranks, and the number of GPUs it sees on its machine.

    Raises:
        ConfigError: the rank does not exist, or options contradict each other.
    """
    if by_launcher is not None:
        if chosen.world_size is not None:
            raise ConfigError(
                f"--world-size and {by_launcher.launcher} both say how many ranks there are.",
                hint="Leave --world-size out.",
            )
        n_local = by_launcher.n_local or chosen.devices
        if n_local is None:
            raise ConfigError(
                f"{by_launcher.launcher} starts a rank for each GPU, but there is none here.",
                hint="Say how many the machine has: --devices 8.",
            )
        return *_rank(chosen.rank, n_local * by_launcher.n_machines), n_local
    if chosen.world_size is None:
        if chosen.rank is not None:
            raise ConfigError("--rank needs --world-size.", hint="Say how many ranks there are.")
        started = os.environ.get("LOCAL_WORLD_SIZE", "")
        seen = int(started) if started.isdecimal() and "RANK" in os.environ else 1
        return None, 1, chosen.devices or min(max(seen, 1), MAX_DEVICES)
    n_devices = chosen.devices or min(chosen.world_size, GPUS_OF_A_NODE)
    return *_rank(chosen.rank, chosen.world_size), n_devices


def _rank(rank: int | None, world_size: int) -> tuple[int, int]:
    """Return the rank (the first if none is given) and the number of ranks."""
    if (rank or 0) >= world_size:
        raise ConfigError(
            f"There is no rank {rank} of {world_size}.",
            hint=f"Ranks are counted from 0; the last is {world_size - 1}.",
        )
    return rank or 0, world_size


def _shares(values: list[str]) -> dict[str, float]:
    """Return the shares that ``--assume`` gives.

    Raises:
        ConfigError: a value is malformed.
    """
    found = {}
    for value in values:
        kind, _, share = value.partition("=")
        try:
            found[kind] = float(share)
        except ValueError:
            found[kind] = -1.0
        if kind not in ASSUMED or not 0 <= found[kind] <= 1:
            raise ConfigError(
                f"{value!r} is not an assumption.",
                hint=f"Write for example nonzero=0.5; kinds are {' and '.join(ASSUMED)}.",
            )
    return found


def _snapshot_path(place: Path, program: Program, *, force: bool) -> Path:
    """Return the path of the snapshot: the requested file, or a new file in the requested folder.

    Raises:
        ConfigError: the snapshot cannot be written there.
    """
    if not place.is_dir():
        console.check_output(place, force=force, inputs=[program.target])
        return place
    if not os.access(place, os.W_OK):
        raise ConfigError(
            f"The snapshot cannot be written to {place}.", hint="Choose a place: --snapshot FILE"
        )
    stem = (
        Path(program.target).name.removesuffix(".py").removesuffix(".ipynb").rpartition(".")[2]
        or "program"
    )
    return first_free(place, f"{stem}-rehearsal", ".pickle")


def diagnosed(asked: Sweep, kept: Path | None = None) -> RehearsalResult:
    """Rehearse once, and diagnose the snapshot, which is kept if a path is given."""
    from fragdoctor.rehearsal import runner
    from fragdoctor.rehearsal.sweep import with_batch

    program, batch = asked.program, None
    if asked.batches is not None:
        batch = asked.batches.sizes[0]
        program = with_batch(program, batch)
    with _progress() as progress:
        return runner.diagnosed(program, asked.base, kept, _on_step(progress), batch)


def _cured(chosen: RehearseOptions, asked: Sweep, look: RenderOptions) -> int:
    """Search for the cheapest change that lets the program fit, and print what was found.

    Raises:
        ConfigError: options contradict each other, or the program cannot be rehearsed.
    """
    from fragdoctor.rehearsal.prescription.search import CureSearch

    check_format("prescription", chosen.output_format)
    if not asked.is_one or chosen.snapshot is not None or chosen.report:
        raise ConfigError(
            "--cure works on one program on one GPU.",
            hint="Leave out lists, --snapshot and --report.",
        )
    batch = None if asked.batches is None else asked.batches.sizes[0]
    seconds = parse_seconds(chosen.time)
    with _progress() as progress:
        found = CureSearch(
            asked.program, asked.base, batch, seconds,
            lambda title: progress.show(f"Rehearsing {title}", 0, 0),
        ).run()  # fmt: skip
    console.give(chosen, "prescription", found, look)
    if found.fits:
        return USAGE if found.is_partial else OK
    return FINDINGS


def _folder_of(keep: Path | None) -> Path | None:
    """Return the folder for the snapshots of several rehearsals, creating it if needed.

    Raises:
        ConfigError: something other than a folder is there.
    """
    if keep is not None:
        if keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
            raise ConfigError(
                f"{keep} exists and is not an empty folder.",
                hint="Name a new or an empty folder: each rehearsal leaves a snapshot.",
            )
        keep.mkdir(parents=True, exist_ok=True)
    return keep


def swept(asked: Sweep, keep: Path | None = None) -> RehearsalSweep:
    """Rehearse several times."""
    with console.Progress("Rehearsing") as progress:
        on_case = partial(_on_step, progress)
        return replace(asked, keep=keep, on_case=on_case).run()


def _on_step(progress: console.Progress, case: str = "") -> OnStep:
    """Return what shows the steps of a rehearsal; ``case`` names one of several."""

    def on_step(number: int, n_bytes: int) -> None:
        step = f"{case}: step" if case else "step"
        progress.show(f"Rehearsed {step} {number}, {format_size(n_bytes)} allocated", 0, 0)

    return on_step


@contextmanager
def _progress() -> Iterator[console.Progress]:
    """Show progress; if the program fails, print its last output, made safe for a terminal."""
    from fragdoctor.rehearsal.runner import ProgramFailed

    with console.Progress("Rehearsing") as progress:
        try:
            yield progress
        except ProgramFailed as err:
            progress.clear()
            say(*err.output.splitlines())
            raise


_MAX_LINE: Final = 256  # the kernel reads no more of a script's first line


def program_of(words: Sequence[str]) -> tuple[Sequence[str], bool, str | None]:
    """Return a recorded command in the form that a rehearsal takes.

    The result is the script or module with its arguments, whether it is a module, and its Python.

    Raises:
        ConfigError: the command does not start a Python program.
    """
    from fragdoctor.rehearsal.programs import after_python

    if not words:
        raise ConfigError(
            "The recording does not say which command was run.",
            hint="Rehearse it yourself: fragdoctor rehearse train.py --unlimited --snapshot FILE",
        )
    return after_python(words) or ([_script(words[0]), *words[1:]], False, None)


def _script(name: str) -> str:
    """Return the script that a command runs: its own name, or where it is found on PATH.

    Raises:
        ConfigError: it is none of Python.
    """
    from fragdoctor.rehearsal.programs import LAUNCHERS, SUFFIX

    if name.endswith((".py", SUFFIX)) or Path(name).name in LAUNCHERS:
        return name
    found = shutil.which(name)
    if found is not None:
        with Path(found).open("rb") as file:
            if b"python" in file.readline(_MAX_LINE):
                return found
    raise ConfigError(
        f"{name} is not a Python script.",
        hint="Rehearse the script that it starts: fragdoctor rehearse train.py --cure",
    )


def follow(
    case: Case, diagnosis: Diagnosis, command: Sequence[str], time: str, say: Callable[[str], None]
) -> tuple[Diagnosis, Prescription]:
    """Rehearse the command that failed, continue its recording, and try changes.

    Args:
        case: the recording.
        diagnosis: the diagnosis of the recording alone.
        command: the command that was run.
        time: how long it may take in all, such as ``5m``.
        say: called with progress messages.

    Returns:
        The diagnosis of the recording continued with the rehearsal, and the changes tried.

    Raises:
        ConfigError: the command cannot be rehearsed, or the recording is of another program.
    """
    from fragdoctor.diagnosis.pipeline import diagnose
    from fragdoctor.inputs.snapshot_reader import read_snapshot
    from fragdoctor.rehearsal.prescription.search import CureSearch
    from fragdoctor.rehearsal.programs import LAUNCHERS
    from fragdoctor.rules.request_sources import find_failed_request

    number = diagnosis.verdict.device
    figures = diagnosis.figures_of(number)
    total_bytes = None if figures is None else figures.capacity_bytes
    analysis = None if number is None else diagnosis.analyses.get(number)
    failed = find_failed_request(case, analysis, case.primary_message)
    # A memory fraction, other processes and CUDA itself leave less than the whole device.
    available_bytes = None if failed is None else failed.available_bytes
    capacity_bytes = total_bytes if available_bytes is None else available_bytes
    if capacity_bytes is None:
        raise ConfigError(
            "It is unknown how much of the GPU PyTorch could have.",
            hint="Give it: --capacity 24GiB",
        )
    device = None if case.bundle is None else case.bundle.device(number)
    known = None if device is None else known_gpu(device.name or "")
    words, is_module, python = program_of(command)
    starts_ranks = bool(words) and Path(words[0]).name in LAUNCHERS
    seconds = parse_seconds(time)
    options = RehearseOptions(
        words=list(words),
        is_module=is_module,
        python=python,
        gpu=[known.name] if known is not None and known.capability is not None else None,
        capacity=capacity_bytes,
        time_limit=seconds / 2,  # the other half is for the changes
        devices=len(diagnosis.devices) if starts_ranks else None,
    )
    asked = asked_of(options)
    # The program may allow itself a share of the whole device.
    whole_bytes = max(total_bytes or 0, capacity_bytes)
    base = replace(asked.base, gpu=replace(asked.base.gpu, total_bytes=whole_bytes))
    with TemporaryDirectory(prefix="fragdoctor-") as scratch:
        kept = Path(scratch) / "rehearsed.pickle"
        found = CureSearch(asked.program, base, None, seconds, say).run(kept)
        continued = diagnose(case, continue_with=read_snapshot(kept))
    return continued, found
