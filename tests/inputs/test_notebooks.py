"""Notebooks, documents of other kinds, and lines that look like progress."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fragdoctor.errors import InputError
from fragdoctor.inputs.cases import read_case
from fragdoctor.inputs.scene_lines import place_of
from fragdoctor.model.case import Overrides

MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 15.77 GiB of "
    "which 1.02 GiB is free. Of the allocated memory 14.20 GiB is allocated by PyTorch, and "
    "101.00 MiB is reserved by PyTorch but unallocated."
)
TRACEBACK = [
    "-" * 75,
    "OutOfMemoryError                          Traceback (most recent call last)",
    (
        "Cell \x1b[0;32mIn[2], line 3\x1b[0m\n      1 for i in range(100):\n"
        "      2     out = model(x)\n----> 3     kept.append(out.sum())\n"
    ),
    f"OutOfMemoryError: {MESSAGE}",
]


def notebook(*outputs: dict[str, object]) -> str:
    cells = [{"cell_type": "code", "outputs": [o], "source": []} for o in outputs]
    return json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def test_error_of_a_cell_is_read_once_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    path.write_text(
        notebook(
            {"output_type": "stream", "name": "stdout", "text": ["step 1\n", "step 2\n"]},
            {
                "output_type": "error",
                "ename": "OutOfMemoryError",
                "evalue": MESSAGE,
                "traceback": TRACEBACK,
            },
        )
    )

    log = read_case([str(path)], Overrides()).oom

    assert log is not None
    assert len(log.messages) == 1
    assert log.messages[0].requested_bytes == 2 << 30
    assert log.messages[0].line > 2
    assert [f.line for f in log.messages[0].frames] == [3]


def test_error_without_its_traceback_is_read_by_its_value(tmp_path: Path) -> None:
    path = tmp_path / "train.ipynb"
    error = {"output_type": "error", "ename": "OutOfMemoryError", "evalue": MESSAGE}
    path.write_text(notebook(error | {"traceback": []}))

    log = read_case([str(path)], Overrides()).oom

    assert log is not None
    assert [m.requested_bytes for m in log.messages] == [2 << 30]


@pytest.mark.parametrize("text", ['{"traceEvents": [{"ts": 1}]}', "[1, 2, 3]"])
def test_document_of_another_kind_is_no_log(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)

    with pytest.raises(InputError, match="holds no out-of-memory message"):
        read_case([str(path)], Overrides())


def test_lines_of_json_are_a_log(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text('{"loss": 1.5}\n{"loss": 1.25}\n')

    assert read_case([str(path)], Overrides()).oom is not None


def test_step_of_slurm_is_no_step_of_the_training() -> None:
    assert not place_of("slurmstepd: error: *** STEP 4711.0 ON node01 CANCELLED ***")
    assert place_of("step 4711 loss 0.5") == "step 4711"
