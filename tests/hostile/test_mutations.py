"""A sample of mutated recordings through the whole command line; tools/ runs any number."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutate_recordings import main


@pytest.mark.parametrize("seed", [1, 2])
def test_no_mutated_recording_breaks_a_command(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--files", "25", "--seed", str(seed), "--out", str(tmp_path)])

    assert code == 0, capsys.readouterr().out
