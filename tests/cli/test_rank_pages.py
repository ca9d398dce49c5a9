from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_line import Run

RANKS = str(Path(__file__).parents[2] / "sample_snapshots" / "ranks")
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
