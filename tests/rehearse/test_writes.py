"""What the program changes stays in a scratch folder, and the program does not notice."""

from __future__ import annotations

import pytest
from rehearsal_stage import Stage

WRITES = """
    import glob, os, pathlib, shutil, torch

    net = torch.nn.Linear(512, 512).cuda()
    os.makedirs("ck/sub", exist_ok=True)
    torch.save({"net": net.state_dict(), "step": 3}, "ck/sub/3.pt")
    assert glob.glob("ck/**/*.pt") == ["ck/sub/3.pt"] and os.listdir("ck") == ["sub"]
    found = torch.load("ck/sub/3.pt")
    assert found["step"] == 3 and found["net"]["weight"].is_cuda
    net.load_state_dict(found["net"])
    with open("log.txt", "a") as log:
        log.write("more")
    assert open("log.txt").read() == "old more"
    pathlib.Path("a.json").write_text("{}")
    os.rename("a.json", "b.json")
    assert not os.path.exists("a.json") and "b.json" in os.listdir(".")
    os.remove("old.txt")
    shutil.rmtree("old")
    assert not os.path.exists("old.txt") and not os.path.exists("old")
    shutil.rmtree("ck")
    assert not os.path.exists("ck/sub/3.pt")
"""


def prepared(stage: Stage) -> dict[str, str]:
    (stage.home / "old").mkdir()
    for name, text in {"old.txt": "kept", "old/in.txt": "kept", "log.txt": "old "}.items():
        (stage.home / name).write_text(text)
    stage.script(WRITES)
    return {str(p.relative_to(stage.home)): p.read_text() for p in files(stage)}


def files(stage: Stage) -> list:
    return sorted(p for p in stage.home.rglob("*") if p.is_file() and p.suffix != ".pickle")


def test_nothing_is_changed_outside_of_the_scratch_folder(stage: Stage) -> None:
    before = prepared(stage)

    found = stage.json("train.py", apart=True)

    assert {str(p.relative_to(stage.home)): p.read_text() for p in files(stage)} == before
    assert "Checkpoints are written without the values of tensors." in found["rehearsal"]["notes"]


@pytest.mark.slow
def test_with_leave_files_are_changed(stage: Stage) -> None:
    prepared(stage)

    stage.json("train.py", "--allow-writes")

    assert [p.name for p in files(stage)] == ["b.json", "log.txt", "train.py"]
    assert (stage.home / "log.txt").read_text() == "old more"


@pytest.mark.slow
def test_what_cannot_be_led_elsewhere_is_refused(stage: Stage) -> None:
    stage.must_pass(
        """
        import sqlite3, torch
        torch.ones(1, device="cuda")
        try:
            sqlite3.connect("trials.sqlite")
        except PermissionError as error:
            assert "--allow-writes" in str(error)
        else:
            raise AssertionError("a database was made")
        """
    )

    assert not (stage.home / "trials.sqlite").exists()
