"""``fragdoctor.rehearse`` and ``fragdoctor.cure``."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest
from rehearsal_stage import TRAINING, Stage

import fragdoctor
from fragdoctor.units import MIB

pytestmark = pytest.mark.usefixtures("prepared")


def test_script_is_rehearsed_and_diagnosed(stage: Stage) -> None:
    script = stage.script(TRAINING + "\n    train(3)\n")

    fits = fragdoctor.rehearse(script, python=sys.executable)
    fails = fragdoctor.rehearse(script, capacity_bytes=60 * MIB, python=sys.executable)

    assert fits.rehearsal.fits
    assert fits.needs_bytes is not None
    assert not fails.rehearsal.fits
    assert fails.diagnosis.verdict.cause is fragdoctor.Cause.CAPACITY


def test_cure_says_what_lets_it_fit(stage: Stage) -> None:
    script = stage.script(TRAINING + "\n    import sys\n    train(3, int(sys.argv[1]))\n")
    least = fragdoctor.rehearse(script, ["1"], python=sys.executable).needs_bytes
    assert least is not None

    found = fragdoctor.cure(
        script, ["{batch}"], capacity_bytes=least + 16 * MIB, batch=8192, python=sys.executable
    )

    assert not found.fits
    assert found.cure is not None
    assert found.cure.fits
    assert found.cure.treatments[0].lines


def test_function_is_rehearsed_in_a_process_of_its_own(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.script(TRAINING + "\n    def run(): train(3)\n").rename(stage.home / "for_function.py")
    monkeypatch.syspath_prepend(stage.home)
    run = importlib.import_module("for_function").run

    found = fragdoctor.cure(run, capacity_bytes=60 * MIB, time_s=1, python=sys.executable)

    assert not found.fits
    assert Path(found.target).name == "run.py"


def test_function_must_be_one_that_another_process_can_import() -> None:
    n = 3

    def closure() -> int:
        return n

    for given in (closure, lambda: n, partial(print, n)):
        with pytest.raises(fragdoctor.ConfigError, match="not at the top of a file"):
            fragdoctor.cure(given, gpu="24GiB")


def test_script_must_exist_and_have_a_limit(stage: Stage) -> None:
    with pytest.raises(fragdoctor.ConfigError, match="does not exist"):
        fragdoctor.rehearse("none.py")
    with pytest.raises(fragdoctor.ConfigError, match="Without a limit"):
        fragdoctor.cure(stage.script("pass"), python=sys.executable)
