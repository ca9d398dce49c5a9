"""The lines of source that go into a bundle."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

from fragdoctor.recording.source_lines import passed_through, user_lines, write_sources


def of_frames(*frames: tuple[str, int]) -> dict[str, object]:
    stack = [{"filename": f, "line": n, "name": "f"} for f, n in frames]
    return {"device_traces": [[{"action": "alloc", "frames": stack}]], "segments": []}


def test_only_lines_of_the_user_are_wanted():
    lines = user_lines(
        of_frames(
            ("/venv/lib/python3.11/site-packages/torch/nn/linear.py", 3), ("/work/train.py", 7),
            ("/work/train.py", 9), ("??", 0), (os.__file__, 4),
        )
    )  # fmt: skip

    assert lines == {"/work/train.py": {7, 9}}


def test_lines_stand_with_those_around_them(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("".join(f"line{n}\n" for n in range(1, 10)), encoding="utf-8")

    write_sources(str(tmp_path / "sources.json"), {str(script): {5, 9}}, time.time() + 60)

    (lines,) = json.loads((tmp_path / "sources.json").read_text())["files"].values()
    assert list(lines) == ["3", "4", "5", "6", "7", "8", "9"]
    assert lines["5"] == "line5"


def test_file_that_changed_since_is_not_what_ran(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("changed\n", encoding="utf-8")

    write_sources(str(tmp_path / "sources.json"), {str(script): {1}}, time.time() - 60)

    assert json.loads((tmp_path / "sources.json").read_text())["files"] == {}


def test_snapshot_is_changed_and_the_function_put_back():
    def make() -> dict[str, int]:
        return {"a": 1}

    memory = SimpleNamespace(_snapshot=make)
    with passed_through(memory, lambda snapshot: {**snapshot, "b": 2}):
        assert memory._snapshot() == {"a": 1, "b": 2}

    assert memory._snapshot is make
