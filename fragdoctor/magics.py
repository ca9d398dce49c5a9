"""Cell magics for notebooks: ``%load_ext fragdoctor``, then ``%%gpu_memory`` and ``%%cure``.

``%%gpu_memory`` runs a cell under the recorder and shows its diagnosis. ``%%cure 24GiB``, or
``%%cure rtx4090``, rehearses the cell as a program of its own, without a GPU, and shows the
cheapest change that makes it fit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from fragdoctor.errors import FragdoctorError

ALONE: Final = "The cell is rehearsed on its own: what other cells define is not there."


def load(ipython: Any) -> None:
    """Register both magics with an interactive shell."""
    ipython.register_magic_function(_guarded(gpu_memory, ipython), "cell", "gpu_memory")
    ipython.register_magic_function(_guarded(cure, ipython), "cell", "cure")


def gpu_memory(ipython: Any, line: str, cell: str) -> Any:
    """Run a cell under the recorder; return the diagnosis of the recording.

    Raises:
        FragdoctorError: nothing could be recorded or read.
    """
    import fragdoctor  # noqa: PLC0415 - loaded only when it is used

    del line
    with TemporaryDirectory(prefix="fragdoctor-") as scratch:
        bundle = Path(scratch) / "bundle"
        with fragdoctor.record(bundle):
            ipython.run_cell(cell)
        return fragdoctor.diagnose(bundle)


def cure(ipython: Any, line: str, cell: str) -> Any:
    """Rehearse a cell as a program; return the prescription for the GPU or capacity in the line.

    Raises:
        FragdoctorError: the line names neither, or the cell cannot be rehearsed.
    """
    import fragdoctor  # noqa: PLC0415
    from fragdoctor.model.gpus import gpu_of, known_gpu  # noqa: PLC0415
    from fragdoctor.rehearsal.programs import as_python  # noqa: PLC0415

    del ipython
    named = line.strip()
    is_model = known_gpu(named) is not None
    capacity_bytes = None if is_model else gpu_of(named).total_bytes
    with TemporaryDirectory(prefix="fragdoctor-") as scratch:
        script = Path(scratch) / "cell.py"  # whose numbers can be changed
        script.write_text(as_python(cell)[0], encoding="utf-8")  # without other magics
        return fragdoctor.cure(
            script,
            gpu=named if is_model else None,
            capacity_bytes=capacity_bytes,
            python=sys.executable,
        )


def _guarded(magic: Any, ipython: Any) -> Any:
    """Return a magic that reports an error without our traceback, but with the program's.

    A shell in a terminal shows no HTML: there the report is printed before the value.
    """

    def call(line: str, cell: str) -> Any:
        from fragdoctor.report import escape  # noqa: PLC0415

        try:
            found = magic(ipython, line, cell)
        except FragdoctorError as e:
            said = [*getattr(e, "output", "").splitlines(), f"{e.message} {e.hint}".rstrip()]
            if e.code == "program_failed":
                said.append(ALONE)
            for text in said:
                print(escape.terminal(text), file=sys.stderr)  # noqa: T201 - in a notebook
            return None
        if not hasattr(ipython, "kernel"):
            print(_report(found))  # noqa: T201 - in a terminal
        return found

    return call


def _report(found: Any) -> str:
    from fragdoctor.model.prescription import Prescription  # noqa: PLC0415
    from fragdoctor.report.base import RenderOptions, render  # noqa: PLC0415

    command = "prescription" if isinstance(found, Prescription) else "analyze"
    return render(command, "text", found, RenderOptions())
