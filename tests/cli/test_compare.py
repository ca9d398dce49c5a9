from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run
from msgspec.structs import replace
from runs import Ask, written

MODEL = Ask(10, 40, "build")
STEP = Ask(50, 60, kept=False)


@pytest.fixture
def before(tmp_path: Path) -> str:
    return written(tmp_path / "before.pickle", MODEL, STEP)


@pytest.fixture
def after(tmp_path: Path) -> str:
    return written(tmp_path / "after.pickle", MODEL, Ask(51, 70, kept=False))


def test_answer_comes_first(run: Run, before: str, after: str) -> None:
    outcome = run("compare", before, after)

    assert outcome.code == 0
    assert outcome.out.startswith("B peaks 10.00 MiB (+10%) higher: train.py:51 in step grew by")


def bundled(folder: Path, snapshot: str, rank: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "snapshot.pickle").write_bytes(Path(snapshot).read_bytes())
    facts = {"format": "fragdoctor-bundle", "version": 1, "rank": rank, "pid": 7 + rank}
    (folder / "bundle.json").write_text(json.dumps(facts))
    return folder


def test_folder_of_a_run_stands_for_its_bundle(
    run: Run, before: str, after: str, tmp_path: Path
) -> None:
    one = bundled(tmp_path / "run1" / "exit-pid7", before).parent
    other = bundled(tmp_path / "run2" / "exit-pid7", after).parent

    outcome = run("compare", str(one), str(other))

    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("B peaks 10.00 MiB (+10%) higher")


def test_folder_of_several_processes_is_a_sentence(
    run: Run, before: str, after: str, tmp_path: Path
) -> None:
    for rank in range(2):
        bundled(tmp_path / "run" / f"rank{rank}", before, rank)

    outcome = run("compare", str(tmp_path / "run"), after)

    assert (outcome.code, outcome.out) == (2, "")
    assert "run holds the bundles of 2 processes, but a run is only one of them." in outcome.err
    assert "rank0" in outcome.err


def test_identical_files_are_no_difference(run: Run, before: str) -> None:
    outcome = run("compare", before, before, "--fail-on-growth", "0", "-q")

    assert (outcome.code, outcome.out) == (0, "No difference: B peaks 100.00 MiB, as A does.\n")


@pytest.mark.parametrize(
    ("accepted", "code"), [("2%", 1), ("10%", 0), ("9MiB", 1), ("512MiB", 0), ("0", 1)]
)
def test_growth_beyond_what_is_accepted_fails(
    run: Run, before: str, after: str, accepted: str, code: int
) -> None:
    outcome = run("compare", before, after, "--fail-on-growth", accepted)

    assert outcome.code == code


def test_growth_that_is_not_known_is_an_error_after_the_report(
    run: Run, before: str, tmp_path: Path
) -> None:
    note = tmp_path / "oom.txt"
    note.write_text("RuntimeError: NCCL error: unhandled cuda error, out of memory\n")

    outcome = run("compare", str(note), before, "--fail-on-growth", "2%")

    assert outcome.code == 2
    assert "is unknown whether" in outcome.err


def test_json_of_growth_that_is_not_known_is_one_document(
    run: Run, before: str, tmp_path: Path
) -> None:
    note = tmp_path / "oom.txt"
    note.write_text("RuntimeError: NCCL error: unhandled cuda error, out of memory\n")
    words = ("compare", str(note), before, "--fail-on-growth", "2%", "--format", "json")

    outcome = run(*words)
    left = run(*words, "-o", str(tmp_path / "report.json"))

    assert outcome.code == left.code == 2
    assert "is unknown whether" in json.loads(outcome.out)["error"]["message"]
    assert "is unknown whether" in json.loads(left.out)["error"]["message"]
    assert json.loads((tmp_path / "report.json").read_text())["figures"]


def test_json_is_one_document_with_the_gate(run: Run, before: str, after: str) -> None:
    outcome = run("compare", before, after, "--format", "json", "--fail-on-growth", "2%")

    document = json.loads(outcome.out)
    assert document["growth"]["has_grown"] is True
    assert document["figures"][0]["delta"] == 10 * 2**20


def test_folder_of_one_recording_is_one_run(run: Run, tmp_path: Path, before: str) -> None:
    folder = tmp_path / "recording"
    folder.mkdir()
    written(folder / "snapshot.pickle", MODEL, STEP, Ask(80, 30))
    (folder / "stats.json").write_text(json.dumps({"num_alloc_retries": 7, "num_ooms": 0}))

    outcome = run("compare", before, str(folder), "--format", "json")

    retries = next(f for f in json.loads(outcome.out)["figures"] if f["id"] == "alloc_retries")
    assert retries["values"][1] == 7


def test_report_goes_to_a_file_and_is_not_overwritten(
    run: Run, before: str, after: str, tmp_path: Path
) -> None:
    target = tmp_path / "page.html"

    assert run("compare", before, after, "--format", "html", "-o", str(target)).code == 0
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert run("compare", before, after, "-o", str(target)).code == 2
    assert run("compare", before, after, "-o", str(target), "--force").code == 0


def test_three_runs_are_a_series(run: Run, before: str, after: str, tmp_path: Path) -> None:
    third = written(tmp_path / "third.pickle", MODEL, Ask(51, 80, kept=False))

    outcome = run("compare", before, after, third, "--steps", "100,200,300", "--capacity", "1GiB")

    assert outcome.code == 0
    assert outcome.out.startswith("Peak allocated memory grows by 102.40 KiB per step")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["A"], "One run cannot be compared"),
        (["A", "B", "--steps", "1,2,3"], "2 runs and 3 steps"),
        (["A", "B", "--steps", "1,x"], "not a list of numbers"),
        (["A", "B", "--steps", "1,nan"], "not a step"),
        (["A", "B", "--fail-on-growth", "much"], "neither a size nor a percentage"),
        (["A", "nowhere.pickle"], "does not exist"),
        (["-", "-"], "empty"),
    ],
)
def test_bad_question_is_one_sentence(
    run: Run, before: str, after: str, arguments: list[str], said: str
) -> None:
    named = [{"A": before, "B": after}.get(a, a) for a in arguments]

    outcome = run("compare", *named)

    assert outcome.code == 2
    assert said in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


def test_device_that_one_run_lacks_is_said_with_its_name(run: Run, tmp_path: Path) -> None:
    first = written(tmp_path / "a.pickle", MODEL, device=1)
    second = written(tmp_path / "b.pickle", MODEL)

    outcome = run("compare", first, second, "--device", "1")

    assert outcome.code == 2
    assert f"{second} holds nothing of device 1" in outcome.err


def test_run_that_differs_in_nothing_it_holds_gives_no_reason(run: Run, tmp_path: Path) -> None:
    first = written(tmp_path / "a.pickle", MODEL, STEP)
    renamed = [
        replace(ask, file="/home/a/proj/other.py", function=f"g{ask.line}") for ask in (MODEL, STEP)
    ]
    second = written(tmp_path / "b.pickle", *renamed)

    out = " ".join(run("compare", first, second).out.split())

    assert "as A does; the settings are the same." in out
