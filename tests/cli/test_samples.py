"""The whole way on the project's own recordings: files in, reports out."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from attacks import assert_all_seen
from command_line import Run
from schemas import must_fit

from fragdoctor import diagnose
from fragdoctor.report.page.page import shown_devices

FOLDER = Path(__file__).resolve().parents[2] / "sample_snapshots"
SNAPSHOTS = sorted(p.name for p in FOLDER.glob("*.pickle*"))
TEXTS = sorted(p.name for p in FOLDER.glob("*oom*") if p.suffix in {".txt", ".log"})


def validated(text: str, name: str) -> dict[str, object]:
    document: dict[str, object] = json.loads(text)
    must_fit(document, name)
    return document


def test_samples_are_there() -> None:
    assert len(SNAPSHOTS) >= 10
    assert TEXTS


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_analyze_sample_json_fits_the_schema(name: str, run: Run, samples: Path) -> None:
    done = run("analyze", str(samples / name), "--format", "json")

    assert (done.code, done.err) == (0, "")
    validated(done.out, "diagnosis")


@pytest.mark.parametrize("width", ["80", "120"])
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_analyze_sample_text_reads_well(
    name: str, width: str, run: Run, samples: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)

    done = run("analyze", str(samples / name), "--verbose")

    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert done.out.isascii()
    assert_all_seen("".join(lines))
    copied = [ln for ln in lines if "_ALLOC_CONF=" in ln or ln.startswith("  fragdoctor ")]
    assert [line for line in lines if len(line) > int(width) and line not in copied] == []
    assert not any(a == b == "" for a, b in pairwise(lines))


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_analyze_sample_markdown_has_the_verdict_first(name: str, run: Run, samples: Path) -> None:
    done = run("analyze", str(samples / name), "--format", "markdown")

    assert done.out.startswith("## ")
    assert done.code == 0


@pytest.mark.parametrize("name", TEXTS)
def test_oom_sample_json_fits_the_schema(name: str, run: Run, samples: Path) -> None:
    done = run("oom", str(samples / name), "--format", "json")

    document = validated(done.out, "oom")
    assert document["messages"] or name.endswith(".summary.txt")  # a summary is no message


def test_limit_that_the_message_states_shows_that_a_setting_cures(run: Run, samples: Path) -> None:
    """On that GPU the program finished under expandable segments and the same limit."""
    both = [str(samples / f"h200_varlen.{end}") for end in ("pickle.gz", "txt")]

    found = json.loads(run("analyze", *both, "--format", "json").out)

    assert found["verdict"]["cause"] == "fragmentation"
    assert "549.43 MiB was free under the limit of 2.85 GiB" in found["verdict"]["summary"]
    limit_bytes = found["devices"][0]["limit_bytes"]
    assert [d.capacity_bytes for d in shown_devices(diagnose(*both))] == [limit_bytes]
    first = found["recommendations"][0]
    assert first["setting"] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert first["predicted"]["fits"]


def test_private_pools_before_2_12_are_reproduced_exactly(run: Run, samples: Path) -> None:
    found = json.loads(
        run("analyze", str(samples / "h200_graphs.pickle.gz"), "--format", "json").out
    )

    assert found["fidelity"]["share"] == 1.0
    assert found["fidelity"]["reason"] == ""
    assert found["verdict"]["cause"] == "private_pools"  # though a memory fraction is set
    assert found["recommendations"][0]["title"].startswith("Share one pool among graphs")


def test_simulate_sample_json_fits_the_schema(run: Run, samples: Path) -> None:
    path = str(samples / "fragmentation_oom.pickle")

    done = run("simulate", path, "--conf", "expandable_segments:True", "--format", "json")

    validated(done.out, "simulation")


def test_analyze_fragmentation_sample_is_the_screen_of_the_readme(run: Run, samples: Path) -> None:
    done = run("analyze", str(samples / "fragmentation_oom.pickle"))

    assert done.out.startswith("Out of memory on GPU 0 at scenarios.py:80 in loss_fn: ")
    assert "\nFragmentation (likely). Try:\n" in done.out
    for heading in ("Memory", "Timeline", "Who holds it", "Other options"):
        assert f"\n{heading}" in done.out
