"""Cell magics for notebooks: ``%load_ext fragdoctor``, then ``%%gpu_memory`` and ``%%cure``.

``%%gpu_memory`` runs a cell under the recorder and shows its diagnosis. ``%%cure 24GiB`` rehearses
the cell as a program of its own, without a GPU, and shows the cheapest change that makes it fit.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from fragdoctor.errors import ConfigError, FragdoctorError

USAGE: Final = "Write for example: %%cure 24GiB"


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
    """Rehearse a cell as a program; return the prescription for the capacity in the line.

    Raises:
        FragdoctorError: the line names no capacity, or the cell cannot be rehearsed.
    """
    import fragdoctor  # noqa: PLC0415
    from fragdoctor.units import parse_size  # noqa: PLC0415

    del ipython
    if not line.strip():
        raise ConfigError("%%cure needs what PyTorch can have.", hint=USAGE)
    capacity_bytes = parse_size(line.strip())
    with TemporaryDirectory(prefix="fragdoctor-") as scratch:
        script = Path(scratch) / "cell.py"
        script.write_text(cell, encoding="utf-8")
        return fragdoctor.cure(script, capacity_bytes=capacity_bytes, python=sys.executable)


def _guarded(magic: Any, ipython: Any) -> Any:
    """Return a magic that reports an error in one sentence, without a traceback."""

    def call(line: str, cell: str) -> Any:
        try:
            return magic(ipython, line, cell)
        except FragdoctorError as e:
            print(f"{e.message} {e.hint}".rstrip(), file=sys.stderr)  # noqa: T201 - in a notebook
            return None

    return call
