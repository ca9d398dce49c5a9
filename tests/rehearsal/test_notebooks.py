from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rehearsal_stage import Stage

from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.programs import read_notebook


def notebook(*cells: str, **metadata: Any) -> str:
    made = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    made.insert(1, {"cell_type": "markdown", "source": "%%bash"})
    return json.dumps({"nbformat": 4, "cells": made, "metadata": metadata})


def read(place: Path, *cells: str) -> tuple[list[str], str]:
    path = place / "a.ipynb"
    path.write_text(notebook(*cells))
    return read_notebook(path)


@pytest.mark.parametrize(
    ("cell", "plain"),
    [
        ("%matplotlib inline\nx = 1", "pass\nx = 1"),
        ("if x:\n    !ls -l \\\n  -a\ny = 2", "if x:\n    pass\n\ny = 2"),
        ("files = !ls\nt = %time f()", "files = []\nt = []"),
        ("torch.add?", "pass"),
        ("?torch", "pass"),
        ("%%time\nx = 1", "\nx = 1"),
        ("%%bash\nrm -r x", "\n"),
        ("%%\nx", "\n"),
    ],
)
def test_magics_are_left_out_and_lines_keep_their_numbers(tmp_path, cell, plain) -> None:
    sources, note = read(tmp_path, cell)

    assert sources == [plain]
    assert (note != "") == (not cell.startswith("%%time"))


def test_what_only_looks_like_a_magic_stays(tmp_path: Path) -> None:
    cell = 'text = """\n%matplotlib inline\n!ls\n"""\ny = (7\n% 4)\n'

    assert read(tmp_path, cell) == ([cell], "")


def test_errors_of_the_program_stay_for_the_program(tmp_path: Path) -> None:
    assert read(tmp_path, "x = = 1\n!ls") == (["x = = 1\n!ls"], "")


def test_note_names_a_few(tmp_path: Path) -> None:
    _, note = read(tmp_path, *["!ls"] * 7)

    assert note.startswith("Left out of the notebook: !ls (cell 1), !ls (cell 2)")
    assert note.endswith(" and 2 more")


@given(st.text())
def test_any_cell_keeps_its_lines_and_is_python_or_the_programs_error(text: str) -> None:
    from fragdoctor.rehearsal.programs import as_python

    plain, _ = as_python(text)

    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    assert plain.count("\n") == lines.count("\n")
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return
    assert plain == lines or text.lstrip().startswith("%%")


def test_cell_keeps_a_form_feed_within_a_string() -> None:
    from fragdoctor.rehearsal.programs import as_python

    assert as_python("x = 'a\x0cb'\n!ls") == ("x = 'a\x0cb'\npass", ["!ls"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "not a notebook"),
        ("[]", "not a notebook"),
        ('{"cells": 5}', "not a notebook"),
        ('{"cells": [{}]}', "not a notebook"),
        ("[" * 100_000, "not a notebook"),
        (notebook("x", language_info={"name": "R"}), "a notebook of r"),
    ],
)
def test_other_files_are_refused_in_a_sentence(tmp_path, text, sentence) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(text)

    with pytest.raises(ConfigError, match=sentence):
        read_notebook(path)


def test_notebook_is_rehearsed_and_its_cells_are_named(stage: Stage) -> None:
    (stage.home / "train.ipynb").write_text(
        notebook(
            "%load_ext autoreload\nimport torch",
            "def train(n):\n    !nvidia-smi\n    return torch.empty(n << 20, device='cuda')",
            "display(torch.cuda.get_device_name())\nkept = train(64)\nmore = train(64)",
        )
    )

    fits = stage.json("train.ipynb", "--fits-on", "1GiB")
    fails = stage.json("train.ipynb", "--fits-on", "300MiB", code=1)["rehearsal"]

    assert fits["rehearsal"]["peak_allocated_bytes"] == 512 << 20
    assert any("%load_ext autoreload (cell 1)" in note for note in fits["rehearsal"]["notes"])
    stack = fails["out_of_memory"]["stack"]
    frames = [(Path(frame["filename"]).name, frame["line"]) for frame in stack]
    assert frames[:2] == [("train.ipynb#cell-2", 3), ("train.ipynb#cell-3", 3)]
