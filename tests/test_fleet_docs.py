"""What docs/fleet.md shows is run as it stands, or at least understood by those it is for."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import fleets
import pytest
from cli_fixtures import run as run  # noqa: PLC0414 - a fixture
from command_line import Run

from fragdoctor.cli.analyze import DEFAULT_TIMEOUT_S
from fragdoctor.cli.commands import whole_group
from fragdoctor.cli.configuration import configure
from fragdoctor.fleet.engine import _ALONE_BYTES, MAX_CHUNK
from fragdoctor.model.fleet import MAX_SUMMARY_BYTES

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).resolve().parents[1] / "docs/fleet.md").read_text(encoding="utf-8")


def lines(language: str) -> list[str]:
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fleets.write_job(tmp_path / "job", 4)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", lines("sh"))
def test_shell_example_runs(line: str, place: Path, run: Run) -> None:
    program, *words = shlex.split(line)

    outcome = run(*words)

    assert program == "fragdoctor"
    assert outcome.code == 0, outcome.err


def test_python_example_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec("\n".join(lines("python")), {})

    assert "healthy" in capsys.readouterr().out


@pytest.mark.parametrize("line", [w for w in lines("bash") if w.startswith("fragdoctor")])
def test_example_that_needs_a_cluster_or_a_store_is_understood(line: str) -> None:
    _, name, *words = shlex.split(line)

    configure(whole_group()).commands[name].make_context(name, words)


@pytest.mark.parametrize("line", [w for w in lines("bash") if w.startswith("dask")])
def test_example_for_dask_names_options_of_dask(line: str) -> None:
    pytest.importorskip("distributed")
    from distributed.cli import dask_scheduler, dask_worker

    _, name, *words = shlex.split(line)
    command = {"scheduler": dask_scheduler, "worker": dask_worker}[name].main
    known = {o for p in command.params for o in p.opts}

    assert {w for w in words if w.startswith("--")} <= known


def test_page_names_only_options_that_exist_and_true_figures() -> None:
    group = configure(whole_group())
    known = {o for c in group.commands.values() for p in c.params for o in p.opts}
    of_dask = {"--scheduler-file", "--nworkers", "--nthreads", "--memory-limit"}
    of_benchmark = {"--large", "--docs"}

    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) <= known | of_dask | of_benchmark
    assert f"{DEFAULT_TIMEOUT_S:.0f} by default" in PAGE
    assert f"up to {MAX_CHUNK} names" in PAGE
    assert f"less than {MAX_SUMMARY_BYTES // 1000} KB" in PAGE
    assert f"up to {_ALONE_BYTES >> 20} MiB in all" in PAGE
