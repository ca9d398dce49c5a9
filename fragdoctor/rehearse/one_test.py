"""One test of pytest in a prepared process: pytest again, for this test alone."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fragdoctor.rehearse.launch import CannotRehearse, outcome_of
from fragdoctor.rehearse.machines import rehearsed_gpu
from fragdoctor.rehearse.process import Conditions, Runs
from fragdoctor.rehearse.programs import Program


def rehearse_test(
    args: Sequence[str], gpu: str | None, reports_variable: str
) -> tuple[list[dict[str, Any]], str]:
    """Run pytest in a prepared process.

    Args:
        args: its arguments.
        gpu: the GPU that the test sees, of its size; None = kernels of an H100 and no limit.
        reports_variable: the environment variable that names the file for its reports.

    Returns:
        its reports as pytest serializes them, and why there are none, "".

    Raises:
        ConfigError: there is no such GPU.
    """
    program = Program("pytest", is_module=True, args=args, pythons=[sys.executable])
    with tempfile.TemporaryDirectory(prefix="fragdoctor-") as kept, Runs() as runs:
        reports = Path(kept) / "reports"
        conditions = Conditions(
            gpu=rehearsed_gpu(gpu, None, is_unlimited=gpu is None),
            stops_by_itself=False,
            variables={reports_variable: str(reports)},
        )
        code, tail = runs.run(program, conditions, sys.executable)
        found = reports.read_text(encoding="utf-8").splitlines() if reports.is_file() else []
        if found:
            return [json.loads(line) for line in found], ""
        try:
            outcome_of(runs.place)
        except CannotRehearse as err:
            return [], f"{err.message} {err.hint}"
        return [], tail or f"pytest ended with code {code}"
