"""The verbs of the Python API take paths, and refuse nonsense in one sentence."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from training_runs import training

import fragdoctor
from fragdoctor.errors import ConfigError, FragdoctorError, InputError
from fragdoctor.model.diagnosis import Cause

SETTING = "expandable_segments:True"


@pytest.fixture
def oom(samples: Path) -> Path:
    return samples / "fragmentation_oom.pickle"


def test_paths_give_the_same_diagnosis_as_what_they_hold(oom: Path, samples: Path) -> None:
    text = (samples / "fragmentation_oom.txt").read_text()

    of_values = fragdoctor.diagnose(fragdoctor.load(oom), text)

    assert of_values.verdict == fragdoctor.diagnose(oom, oom.with_suffix(".txt")).verdict
    assert of_values.verdict == fragdoctor.diagnose(str(oom), text).verdict


def test_what_the_caller_says_counts_for_paths_too(oom: Path) -> None:
    found = fragdoctor.diagnose(oom, capacity_bytes=80 * 2**30)

    assert found.case.overrides.capacity_bytes == 80 * 2**30


@pytest.mark.parametrize("prefix", ["", "PYTORCH_CUDA_ALLOC_CONF=", "export PYTORCH_ALLOC_CONF="])
def test_simulate_takes_a_path_and_its_own_advice(oom: Path, prefix: str) -> None:
    (result,) = fragdoctor.simulate(oom, [prefix + SETTING]).results

    assert (True, SETTING) == (result.fits, result.conf)


def test_a_cut_off_run_is_continued_with_another(tmp_path: Path) -> None:
    failed, other = tmp_path / "failed.pickle", tmp_path / "rehearsal.pickle"
    failed.write_bytes(pickle.dumps(training(2, n_steps=1).data()))
    other.write_bytes(pickle.dumps(training(2, n_steps=8, leak=2**23).data()))

    simulated = fragdoctor.simulate(failed, capacity_bytes=2**28, continue_with=str(other))
    notes = fragdoctor.diagnose(failed, continue_with=fragdoctor.load(other)).replay_notes

    outlook = simulated.results[0].outlook
    assert outlook is not None
    assert outlook.growth_bytes_per_step == 2**23
    assert simulated.notes[-1] in notes
    with pytest.raises(ConfigError, match="diagnose"):
        fragdoctor.diagnose(failed, continue_with=3)  # type: ignore[arg-type]


def test_compare_takes_paths(oom: Path, samples: Path) -> None:
    found = fragdoctor.compare(oom, str(samples / "fragmentation_cured.pickle.gz"))

    assert "The settings did it" in found.summary
    assert str(oom) == found.runs[0].name


def test_check_judges_paths_and_folders(oom: Path, samples: Path) -> None:
    cured = samples / "fragmentation_cured.pickle.gz"

    assert 0 == fragdoctor.check(cured, max_peak="70GiB").exit_code
    assert 1 == fragdoctor.check([cured], max_peak=2**30).exit_code
    assert 1 == fragdoctor.check([cured, oom]).exit_code


def test_estimate_says_what_fits() -> None:
    (fit,) = fragdoctor.estimate(params="7B", dtype="bf16", gpu="a100-40g").fits

    assert not fit.fits


def test_diagnosis_writes_its_page(oom: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    diagnosis = fragdoctor.diagnose(oom)

    page = diagnosis.to_html(target)

    assert page.startswith("<!DOCTYPE html>")
    assert page == target.read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"report\.html exists"):
        diagnosis.to_html(target)
    diagnosis.to_html(target, overwrite=True)


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: fragdoctor.diagnose("hello"), InputError, "neither a file nor"),
        (lambda: fragdoctor.diagnose("nowhere.pickle"), InputError, "does not exist"),
        (lambda: fragdoctor.diagnose(5), ConfigError, "value of type int"),
        (fragdoctor.diagnose, ConfigError, "given nothing"),
        (lambda: fragdoctor.load(5), ConfigError, "value of type int"),
        (lambda: fragdoctor.simulate(3), ConfigError, "value of type int"),
        (lambda: fragdoctor.simulate(fragdoctor.Case()), ConfigError, "without a snapshot"),
        (lambda: fragdoctor.simulate("nowhere.pickle"), InputError, "does not exist"),
        (lambda: fragdoctor.compare("a.pickle", "b.pickle"), InputError, "does not exist"),
        (lambda: fragdoctor.compare(1, 2), ConfigError, "compare"),
        (lambda: fragdoctor.check("x", max_peak="24"), ConfigError, "no unit"),
        (lambda: fragdoctor.check("x", fail_on="often"), ConfigError, "fail_on"),
        (lambda: fragdoctor.check("x", select=["ZZ"]), ConfigError, "No rule"),
        (lambda: fragdoctor.estimate(params="many"), ConfigError, "not a parameter count"),
        (lambda: fragdoctor.estimate(params="7B", colour=1), ConfigError, "no option 'colour'"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(call, kind, words) -> None:
    with pytest.raises(FragdoctorError, match=words) as caught:
        call()

    assert isinstance(caught.value, kind)
    assert caught.value.hint
    assert os.linesep not in str(caught.value)


def test_text_without_a_failure_is_still_a_text() -> None:
    found = fragdoctor.diagnose("step 1, loss 0.5\nstep 2, loss 0.4\n")

    assert found.verdict.cause in (Cause.UNKNOWN, Cause.NOT_MEMORY)


@pytest.mark.parametrize("value", [None, 5, b"x", "", ["a", 3], []], ids=repr)
@pytest.mark.parametrize("verb", ["check", "compare", "diagnose", "estimate", "simulate"])
def test_verb_refuses_nonsense_with_a_sentence(verb, value) -> None:
    given = (value, value) if verb == "compare" else (value,)

    with pytest.raises(fragdoctor.FragdoctorError, match=r"^.{10,80}[.] ?") as caught:
        getattr(fragdoctor, verb)(*given)

    assert caught.value.hint
