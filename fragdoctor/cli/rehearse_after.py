"""After a failure on the GPU: rehearse the command, continue the recording, try cures."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.model.gpus import known_gpu
from fragdoctor.rehearsal.programs import LAUNCHERS, SUFFIX, after_python

if TYPE_CHECKING:
    from fragdoctor.model.case import Case
    from fragdoctor.model.diagnosis import Diagnosis
    from fragdoctor.model.prescription import Prescription

DEFAULT_TIME: Final = "5m"  # as for rehearse --cure
_MAX_LINE: Final = 256  # the kernel reads no more of a script's first line


def program_of(words: Sequence[str]) -> tuple[Sequence[str], bool, str | None]:
    """Return a recorded command in the form that a rehearsal takes.

    The result is the script or module with its arguments, whether it is a module, and its Python.

    Raises:
        ConfigError: the command does not start a Python program.
    """
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
    from fragdoctor.cli.rehearse import RehearseOptions, asked_of
    from fragdoctor.diagnosis.pipeline import diagnose
    from fragdoctor.inputs.snapshot_reader import read_snapshot
    from fragdoctor.rehearsal.prescription.search import CureSearch
    from fragdoctor.rules.request_sources import find_failed_request
    from fragdoctor.units import parse_seconds

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
