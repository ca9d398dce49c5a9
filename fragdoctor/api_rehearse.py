"""``fragdoctor.rehearse`` and ``fragdoctor.cure``: a program without a GPU, from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.model.hooks import draw_with

if TYPE_CHECKING:
    from fragdoctor.model.prescription import Prescription
    from fragdoctor.model.rehearsal import RehearsalResult
    from fragdoctor.rehearsal.process import RehearsalConditions
    from fragdoctor.rehearsal.programs import Program


draw_with("Prescription", "fragdoctor.report.card", "prescription_card")

StrPath = str | PathLike[str]


def rehearse(  # noqa: PLR0913 - the conditions of one rehearsal, all by keyword
    script: StrPath,
    args: Sequence[str] = (),
    *,
    gpu: str | None = None,
    capacity_bytes: int | None = None,
    conf: str | None = None,
    steps: int | None = None,
    time_limit_s: float | None = None,
    python: str | None = None,
) -> RehearsalResult:
    """Run an unchanged script without a GPU, and return what its memory would do.

    Args:
        script: a script or notebook.
        args: its arguments.
        gpu: the GPU whose size and kernels it sees: ``"h100"``, ``"24GiB"``.
        capacity_bytes: how much PyTorch can have; without this and ``gpu``, there is no limit.
        conf: settings of the allocator; None means the environment's.
        steps: steps after which to stop; None stops when their memory repeats.
        time_limit_s: wall time after which the script is ended.
        python: the program's Python, which has PyTorch; None means the Python on PATH.

    Raises:
        ConfigError: there is no such script, or it cannot be rehearsed.
    """
    from fragdoctor.rehearsal import runner  # noqa: PLC0415 - numpy is heavy

    program, conditions = _asked(script, args, gpu, capacity_bytes, python)
    conditions = replace(conditions, conf=conf, n_steps=steps, time_limit_s=time_limit_s)
    return runner.diagnosed(program, conditions)


def cure(  # noqa: PLR0913 - the question, all by keyword
    script: StrPath | Callable[[], object],
    args: Sequence[str] = (),
    *,
    capacity_bytes: int | None = None,
    gpu: str | None = None,
    batch: int | None = None,
    time_s: float = 300.0,
    python: str | None = None,
) -> Prescription:
    """Return the cheapest change to a script that makes it fit, and what else was tried.

    Args:
        script: a script or notebook; or a function without arguments, which is called in a
            process of its own that imports its file.
        args: its arguments; ``{batch}`` stands for the batch size.
        capacity_bytes: how much PyTorch can have; or name the ``gpu``.
        gpu: the GPU whose size and kernels it sees.
        batch: the batch size that replaces ``{batch}``.
        time_s: how long to search.
        python: the program's Python, which has PyTorch; None means the Python on PATH.

    Raises:
        ConfigError: there is no such script or function, there is no limit, or it cannot be
            rehearsed.
    """
    from fragdoctor.rehearsal.prescription.search import CureSearch  # noqa: PLC0415 - numpy is heavy

    with _as_script(script) as path:
        program, conditions = _asked(path, args, gpu, capacity_bytes, python)
        return CureSearch(program, conditions, batch, time_s).run()


@contextmanager
def _as_script(script: StrPath | Callable[[], object]) -> Iterator[StrPath]:
    """Yield a script, or a new one that calls a function."""
    if not callable(script):
        yield script
        return
    name, source = getattr(script, "__qualname__", ""), None
    if name.isidentifier():
        source = inspect.getsourcefile(script)
    if source is None or not Path(source).is_file():
        raise ConfigError(
            f"{name or script!r} is not at the top of a file, from which it could be imported.",
            hint="Pass a function without arguments that a file defines, or a script's path.",
        )
    file = Path(source).resolve()
    folder = str(file.parent)
    with TemporaryDirectory(prefix="fragdoctor-") as scratch:
        path = Path(scratch) / f"{name}.py"
        lines = ["import sys", f"sys.path.insert(0, {folder!r})", f"from {file.stem} import {name}"]
        path.write_text("\n".join([*lines, f"{name}()"]), encoding="utf-8")
        yield path


def _asked(
    script: StrPath,
    args: Sequence[str],
    gpu: str | None,
    capacity_bytes: int | None,
    python: str | None,
) -> tuple[Program, RehearsalConditions]:
    from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu  # noqa: PLC0415
    from fragdoctor.rehearsal.programs import Program  # noqa: PLC0415

    program = Program.found(fspath(script), list(args), python, is_module=False)
    is_unlimited = gpu is None and capacity_bytes is None
    return program, RehearsalConditions(
        gpu=rehearsed_gpu(gpu, capacity_bytes, is_unlimited=is_unlimited)
    )
