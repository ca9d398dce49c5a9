from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import fleets
import pytest
from command_line import Run

from fragdoctor.cli import console
from fragdoctor.diagnosis import pipeline
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Diagnosis

RANKS = str(Path(__file__).parents[2] / "sample_snapshots" / "ranks")
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 1.00 GiB is free."
)
ONE = str(Path(__file__).parents[2] / "sample_snapshots" / "capacity_oom.pickle")


def test_page_of_the_job_leads_to_a_page_of_each_rank(run: Run, tmp_path: Path) -> None:
    job, folder = tmp_path / "job.html", tmp_path / "pages"

    done = run("analyze", RANKS, "-o", str(job), "--rank-pages", str(folder), "--workers", "1")

    links = re.findall(r'<a class="to" href="([^"]+)">(rank \d)</a>', job.read_text())
    assert done.code == 0, done.err
    assert {label for _, label in links} == {"rank 0", "rank 1", "rank 2", "rank 3"}
    for address, label in links:
        page = (tmp_path / address).read_text()
        assert label.replace(" ", "") in page
        assert ("Fragmentation" in page[:9000]) is (label == "rank 2")


def test_each_rank_is_read_and_diagnosed_once_and_its_page_knows_all_of_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def counted(case: Case, *, replays: bool = True, **more: Any) -> Diagnosis:
        asked.append(replays)
        return diagnose(case, replays=replays, **more)

    monkeypatch.setattr(pipeline, "diagnose", counted)
    ranks = fleets.write_job(tmp_path / "job", 3)
    (ranks / "rank1.log").write_text(MESSAGE)
    folder = tmp_path / "pages"

    done = run("analyze", str(ranks), "-o", str(tmp_path / "job.html"), "--rank-pages", str(folder))

    assert done.code == 0, done.err
    assert asked == [True] * 3
    pages = sorted(folder.iterdir())
    assert [p.name for p in pages] == [f"000{i}-rank-{i}.html" for i in range(3)]
    assert ["2.00 GiB" in p.read_text() for p in pages] == [False, True, False]


def test_a_page_that_no_worker_could_write_is_written_by_the_one_who_asks(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, folder = fleets.write_job(tmp_path / "job", 2), tmp_path / "pages"
    refusals = [OSError("no such disk")]
    write = console.write_report

    def refused_once(text: str, output: Path | None, *, force: bool = False) -> None:
        if refusals:
            raise refusals.pop()
        write(text, output, force=force)

    monkeypatch.setattr(console, "write_report", refused_once)

    done = run("analyze", str(ranks), "-o", str(tmp_path / "job.html"), "--rank-pages", str(folder))

    assert done.code == 0, done.err
    assert len(list(folder.iterdir())) == 2


def test_pages_are_written_by_workers(run: Run, tmp_path: Path) -> None:
    ranks, folder = fleets.write_job(tmp_path / "job", 3), tmp_path / "pages"
    job = str(tmp_path / "job.html")

    done = run("analyze", str(ranks), "-o", job, "--rank-pages", str(folder), "--workers", "2")

    assert done.code == 0, done.err
    assert [p.name for p in sorted(folder.iterdir())] == [f"000{i}-rank-{i}.html" for i in range(3)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((RANKS, "--rank-pages", "new"), "belongs to a page"),
        ((ONE, "--rank-pages", "new"), "about several ranks"),
        ((RANKS, "--rank-pages", "{taken}", "-o", "{taken}/../job.html"), "is not empty"),
        ((RANKS, "--at", "peak"), "about one recording"),
    ],
)
def test_what_does_not_go_together_is_refused_and_nothing_is_written(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")

    done = run("analyze", *(a.format(taken=taken) for a in arguments))

    assert done.code == 2
    assert said in done.err
    assert [p.name for p in taken.iterdir()] == ["mine.txt"]
