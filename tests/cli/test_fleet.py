from __future__ import annotations

import json
from pathlib import Path

import fleets
import pytest
from builders import MIB
from command_line import Run
from schemas import must_fit

from fragdoctor.report.views.job import MAX_TABLE

ODD = {5: {"held": {10: 900}, "refused_mib": 512}}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = fleets.write_job(tmp_path / "job", 8, ODD)
    (folder / "rank7.pickle").write_bytes(b"\x80\x04")
    return folder


def test_analyze_of_ranks_names_the_odd_one_and_the_unread_one(run: Run, job: Path) -> None:
    outcome = run("analyze", str(job))

    assert outcome.code == 0, outcome.err
    first = outcome.out.splitlines()[0]
    assert first == "Not enough capacity; rank 5 is odd  8 ranks, 1 out of memory, 1 unread"
    assert "836.00 MiB more at train.py:10 in f10" in outcome.out
    assert "rank 7  " in outcome.out
    assert "ends in the middle. (byte 2)" in outcome.out


@pytest.mark.parametrize("how", ["pattern", "files", "backwards"])
def test_report_does_not_depend_on_how_the_ranks_are_named(run: Run, job: Path, how: str) -> None:
    files = sorted(str(p) for p in job.iterdir())
    names = {"pattern": [f"{job}/*"], "files": files, "backwards": files[::-1]}[how]

    assert run("analyze", *names).out == run("analyze", str(job)).out


@pytest.mark.slow
def test_number_of_workers_does_not_change_the_report(run: Run, job: Path) -> None:
    alone = run("analyze", str(job), "--workers", "1", "--format", "json")
    two = run("analyze", str(job), "--workers", "2", "--format", "json")

    assert (alone.code, alone.out) == (two.code, two.out)


def test_json_fits_its_schema(run: Run, job: Path) -> None:
    outcome = run("analyze", str(job), "--format", "json")

    document = json.loads(outcome.out)
    must_fit(document, "fleet")
    assert document["verdict"]["odd"] == ["rank 5"]
    assert [r["is_read"] for r in document["ranks"]] == [True] * 7 + [False]
    (odd,) = (group for group in document["groups"] if group["is_odd"])
    difference = odd["differences"][0]
    assert (difference["kind"], difference["delta_bytes"]) == ("line", 836 * MIB)


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("n", [2, 8, 64])
def test_text_keeps_to_the_width_and_does_not_flood(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, n: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    fleets.write_job(tmp_path, n, {1: ODD[5]})

    lines = run("analyze", str(tmp_path), "--replay", "none").out.splitlines()

    paths = [line for line in lines if "PYTORCH_" in line or "fragdoctor analyze" in line]
    assert max(len(line) for line in lines if line not in paths) <= width
    assert len(lines) < 60
    assert any("--full" in line for line in lines) == (n > MAX_TABLE)


def test_verbose_lists_every_rank(run: Run, tmp_path: Path) -> None:
    fleets.write_job(tmp_path, 20)

    out = run("analyze", str(tmp_path), "--verbose").out

    assert all(f"  rank {i} " in out for i in range(20))


def test_quiet_is_one_line(run: Run, job: Path) -> None:
    out = run("analyze", str(job), "--quiet").out

    assert out.count("\n") == 1
    assert out.startswith("Not enough capacity, 8 ranks, 1 out of memory, 1 unread: Rank 5 is odd")


def test_fail_on_looks_at_all_ranks(run: Run, tmp_path: Path) -> None:
    sound = fleets.write_job(tmp_path / "sound", 2)
    unwell = fleets.write_job(tmp_path / "unwell", 3, {1: ODD[5]})

    assert run("analyze", str(sound), "--fail-on", "error").code == 0
    assert run("analyze", str(unwell), "--fail-on", "error").code == 1


def test_nothing_readable_is_an_error_with_the_commonest_reason(run: Run, tmp_path: Path) -> None:
    for i in range(3):
        (tmp_path / f"rank{i}.pickle").write_bytes(b"\x80\x04" if i else b"")

    outcome = run("analyze", str(tmp_path))

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("Error: None of the 3 ranks could be read.")
    assert "truncated snapshot, and 1 more like it" in outcome.err


@pytest.mark.parametrize("name", ["sarif", "junit", "github"])
def test_format_without_a_report_of_ranks_is_refused_early(run: Run, job: Path, name: str) -> None:
    outcome = run("analyze", str(job), "--format", name)

    assert outcome.code == 2
    assert f"There is no {name} report for several ranks." in outcome.err


def test_log_of_nobody_is_noted(run: Run, job: Path) -> None:
    (job / "train.log").write_text("CUDA out of memory. Tried to allocate 2.00 GiB.\n")

    assert "No rank could be matched with train.log." in run("analyze", str(job)).out


def test_log_of_the_job_is_shared_out_to_its_ranks(run: Run, tmp_path: Path) -> None:
    fleets.write_job(tmp_path, 4)
    (tmp_path / "train.log").write_text(
        "[rank0]: starting\n[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to "
        "allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free.\n"
    )

    document = json.loads(run("analyze", str(tmp_path), "--format", "json").out)

    assert document["verdict"]["failed"] == ["rank 2"]
    assert document["notes"] == []


def test_directory_of_one_snapshot_is_still_one_case(run: Run, tmp_path: Path) -> None:
    fleets.write_rank(tmp_path / "snapshot.pickle")

    out = run("analyze", str(tmp_path), "--format", "json").out

    assert "kind" not in json.loads(out)
