from __future__ import annotations

import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import diagnoses
import pytest
from command_line import Run
from training_runs import training

from fragdoctor.model.hooks import report_progress
from fragdoctor.model.simulation import Simulation

SNAPSHOT: dict[str, Any] = {"segments": [], "device_traces": [[]]}


class FakeReplay:
    """Stands in for the allocator model: remembers the question, answers with fixed figures."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.device: int | None = None

    def trace_of(self, snapshot: object, device: int | None) -> object:
        self.device = device
        return snapshot

    def simulate(self, trace: object, **asked: Any) -> Simulation:
        self.asked = {"trace": trace, "device": self.device, **asked}
        report_progress("Replaying", 1, 2)
        return diagnoses.simulation()


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> FakeReplay:
    fake = FakeReplay()
    module = types.ModuleType("fragdoctor.future.simulator")
    module.simulate = fake.simulate  # type: ignore[attr-defined]
    module.trace_of = fake.trace_of  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fragdoctor.future.simulator", module)
    return fake


@pytest.fixture
def snapshot(tmp_path: Path) -> str:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    return str(path)


def test_simulate_question_reaches_the_model(run: Run, replay: FakeReplay, snapshot: str) -> None:
    run(
        "simulate", snapshot, "--conf", "a:1", "--conf", "b:2", "--conf", "a:1",
        "--capacity", "24GiB", "--memory-fraction", "0.5", "--torch-version", "2.4.1",
        "--device", "1", "--smallest-capacity",
    )  # fmt: skip

    asked = replay.asked
    assert asked["confs"] == ("a:1", "b:2")
    assert asked["capacity_bytes"] == 24 * 2**30
    assert (asked["memory_fraction"], asked["torch_version"]) == (0.5, "2.4.1")
    assert (asked["device"], asked["smallest_capacity"]) == (1, True)


def test_simulate_text_answers_first(run: Run, replay: FakeReplay, snapshot: str) -> None:
    done = run("simulate", snapshot, "--conf", "expandable_segments:True")

    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("2 of 3 variants fit, lowest with expandable_segments:True")


def test_simulate_quiet_is_one_line(run: Run, replay: FakeReplay, snapshot: str) -> None:
    assert run("simulate", snapshot, "-q").out.count("\n") == 1


def test_simulate_statistics_are_no_trace(run: Run, replay: FakeReplay, tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    path.write_text('{"allocated_bytes.all.current": 1, "num_ooms": 0}')

    done = run("simulate", str(path))

    assert done.code == 2
    assert "is memory statistics, not a memory snapshot." in done.err


@pytest.mark.shared
def test_simulate_recording_end_to_end(run: Run, shared: Path) -> None:
    path = shared / "snapshots" / "frag_gpt_varlen" / "snapshot.pickle"

    done = run("simulate", str(path), "--conf", "expandable_segments:True", "--format", "json")

    document = json.loads(done.out)
    assert document["baseline"]["fits"] is False
    assert document["results"][0]["fits"] is True
    assert document["fidelity"]["share"] == 1.0


def test_capacity_may_be_a_multiple_of_what_the_recording_had(run: Run, samples: Path) -> None:
    failed = str(samples / "fragmentation_oom.pickle")
    recorded = json.loads(run("simulate", failed, "--format", "json").out)["baseline"]

    told = json.loads(run("simulate", failed, "--capacity", "1.2x", "--format", "json").out)

    (result,) = told["results"]
    assert result["capacity_bytes"] == round(1.2 * recorded["capacity_bytes"])
    assert result["fits"] is True
    assert run("simulate", failed, "--capacity", "0x").code == 2
    healthy = str(samples / "healthy_training.pickle.gz")
    assert "no request failed" in run("simulate", healthy, "--capacity", "2x").err


def test_a_cut_off_run_is_continued_with_another_recording(run: Run, tmp_path: Path) -> None:
    failed, other = tmp_path / "failed.pickle", tmp_path / "rehearsal.pickle"
    failed.write_bytes(pickle.dumps(training(2, n_steps=1).data()))
    other.write_bytes(pickle.dumps(training(2, n_steps=8, leak=2**23).data()))

    asked = ("simulate", str(failed), "--capacity", "256MiB", "--format", "json")
    alone = json.loads(run(*asked).out)["results"][0]["outlook"]
    found = json.loads(run(*asked, "--continue-with", str(other)).out)
    swept = json.loads(run(*asked, "--sweep", "--continue-with", str(other)).out)

    outlook = found["results"][0]["outlook"]
    assert alone["state"] == "open"
    assert (outlook["state"], outlook["likely"], outlook["basis"]) == ("open", "fails", "complete")
    assert outlook["growth_bytes_per_step"] == 2**23
    assert any("other recording" in note for note in found["notes"])
    assert all(r["outlook"]["likely"] == "fails" for r in swept["results"])
    assert run(*asked, "--continue-with", str(tmp_path / "none.pickle")).code == 2


@pytest.mark.parametrize("command", ["analyze", "simulate"])
def test_the_other_recording_is_not_overwritten(run: Run, tmp_path: Path, command: str) -> None:
    failed, other = tmp_path / "failed.pickle", tmp_path / "rehearsal.pickle"
    for path, n_steps in ((failed, 1), (other, 8)):
        path.write_bytes(pickle.dumps(training(2, n_steps=n_steps).data()))
    before = other.read_bytes()

    options = "--continue-with", str(other), "--format", "text", "-o", str(other), "--force"
    done = run(command, str(failed), *options)

    assert done.code == 2
    assert "is an input; it is not overwritten" in done.err
    assert other.read_bytes() == before
