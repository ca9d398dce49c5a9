"""The comparison of rehearsals with recordings of others counts what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import real_gpus

    return real_gpus


def test_requests_are_equal_at_the_same_place_or_in_common_runs(subject) -> None:
    assert subject.n_equal([1, 2, 3], [1, 9, 3]) == 2
    assert subject.n_equal([1, 2, 3, 4], [1, 3, 4]) == 3
    assert subject.n_equal([1, 2], []) == 0


def test_a_copy_is_edited_and_has_no_snapshot_of_its_own(subject, tmp_path: Path) -> None:
    clone = tmp_path / "clones" / "owner+name"
    clone.mkdir(parents=True)
    (clone / "train.py").write_text("N = 1\n", encoding="utf-8")
    (clone / "kept.pickle").write_bytes(b"recorded")
    for words in (["init", "-q"], ["add", "."],
                  ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):  # fmt: skip
        subprocess.run(["git", *words], cwd=clone, check=True)
    recording = subject.Recording(
        "owner/name", "HEAD", "train.py", "kept.pickle", "kept.pickle", "h100",
        edits=[subject.Edit("train.py", "N = 1", "N = 2")], paths=("train.py", "kept.pickle"),
    )  # fmt: skip
    home = tmp_path / "home"
    home.mkdir()

    tree = subject.check_out(recording, clone.parent, home)

    assert (tree / "train.py").read_text(encoding="utf-8") == "N = 2\n"
    assert not (tree / "kept.pickle").exists()
    assert (home / "recorded.pickle").read_bytes() == b"recorded"
    assert (clone / "train.py").read_text(encoding="utf-8") == "N = 1\n"
    stale = recording._replace(edits=[subject.Edit("train.py", "M", "2")])
    (tmp_path / "again").mkdir()
    with pytest.raises(SystemExit, match=r"is not in train\.py"):
        subject.check_out(stale, clone.parent, tmp_path / "again")
    assert sys.modules["real_gpus"] is subject
