from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from rehearsal_stage import TRAINING, Stage
from schemas import must_fit

from fragdoctor.rehearsal import start
from fragdoctor.rehearsal.engine import program


def events(stage: Stage, found: dict[str, Any], action: str) -> int:
    made = pickle.loads((stage.home / found["rehearsal"]["snapshot"]).read_bytes())
    return [event["action"] for event in made["device_traces"][0]].count(action)


def test_training_fits_and_goes_on_to_its_end(training: Stage) -> None:
    found = training.json("train.py")
    rehearsal = found["rehearsal"]

    must_fit(found, "rehearsal")
    assert rehearsal["fits"]
    assert rehearsal["steps"] == 1000
    assert rehearsal["stopped"] == ""
    assert not rehearsal["is_partial"]
    assert 900 < rehearsal["n_skipped"] < 1000
    # Weights, gradients and two states of 32 MiB each, and the workspaces of cuBLAS.
    assert 4 * 32 << 20 < rehearsal["peak_allocated_bytes"] < 5 * 64 << 20
    assert rehearsal["out_of_memory"] is None
    assert "h100" in found["fitting_gpus"]
    assert found["needs_bytes"] <= rehearsal["peak_reserved_bytes"]
    assert found["verdict"]["cause"] == "healthy"
    assert found["fidelity"]["share"] == 1.0


def test_training_that_does_not_fit_ends_with_1_and_names_the_line(training: Stage) -> None:
    found = training.json("train.py", "--fits-on", "120MiB", code=1)
    oom = found["rehearsal"]["out_of_memory"]

    assert not found["rehearsal"]["fits"]
    assert oom["step"] == 0
    assert oom["location"]["filename"].endswith("train.py")
    assert oom["location"]["function"] == "train"
    assert oom["message"].startswith("CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has a")
    assert found["verdict"]["cause"] == "capacity"
    assert found["recommendations"]


@pytest.mark.slow
def test_a_first_layer_that_does_not_fit_is_told_to_try_a_smaller_batch(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.script("""
        import torch
        from torch import nn
        net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.GELU(), nn.Conv2d(64, 64, 3)).cuda()
        x = torch.randn(64, 3, 128, 128, device="cuda")
        x = x / 255  # what was loaded is freed: this is no building of a model
        net(x)
    """)

    found = stage.json("train.py", "--capacity", "700MiB", code=1)

    advice = {r["code"]: r for r in found["recommendations"]}
    assert "three quarters of the current batch" in advice["smaller-batch"]["title"]
    assert advice["smaller-batch"]["predicted"]["fits"]


@pytest.mark.slow
def test_another_fragdoctor_in_the_programs_environment_does_not_come_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[object] = []
    request = tmp_path / "request.json"
    request.write_text("{}")
    monkeypatch.setattr(program, "run", started.append)
    monkeypatch.setattr(sys, "argv", ["start.py", str(request)])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])

    start.main()

    assert started == [{}]
    first, places = sys.meta_path[0], [str(start.PACKAGE)]
    found = [first.find_spec("fragdoctor", None), first.find_spec("fragdoctor.units", places)]
    assert [spec and spec.origin for spec in found] == [
        str(start.PACKAGE / "__init__.py"),
        str(start.PACKAGE / "units.py"),
    ]
    assert first.find_spec("numpy", None) is None


@pytest.mark.slow
def test_text_report_says_the_answer_first_and_escapes(stage: Stage) -> None:
    stage.script(TRAINING + "\n    train()\n", name="tr\x1b[31main.py")

    done = stage.run("tr\x1b[31main.py", "--fits-on", "120MiB")

    assert done.returncode == 1
    assert done.stdout.startswith("Does not fit in 120.00 MiB: runs out of memory in step 1 at ")
    assert "Not enough capacity (proven)" in done.stdout
    assert "Add --cure to try changes" in done.stdout
    assert "--continue-with" not in done.stdout  # what was rehearsed is no recording to go on from
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.slow
def test_a_size_of_batch_is_found_by_catching_the_error(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import gc, torch
        batch = 1 << 20
        while True:
            try:
                x = torch.empty(batch, 1024, device="cuda")
                break
            except torch.OutOfMemoryError as error:
                assert isinstance(error, torch.cuda.OutOfMemoryError)
                assert "Tried to allocate" in str(error)
                batch //= 2
        assert batch == 1 << 14, batch
        assert torch.cuda.memory_stats()["num_ooms"] == 6
        """,
        "--capacity",
        "100MiB",
    )

    assert found["rehearsal"]["fits"]
    assert found["rehearsal"]["n_ooms"] == 6


@pytest.mark.slow
def test_steps_are_limited_and_end_with_the_optimizer(stage: Stage) -> None:
    body = """
        import torch
        net = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        kept = []
        for step in range(9):
            net(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            kept.append(torch.empty(4 << 20, device="cuda"))
    """
    found = stage.must_pass(body, "--steps", "3")
    failed = stage.json("train.py", "--capacity", "100MiB", code=1)

    assert found["rehearsal"]["steps"] == 3
    # What follows the third run of the optimizer is seen before it stops.
    assert found["rehearsal"]["peak_allocated_bytes"] >> 20 == 3 * 16 + 2 * 32
    assert failed["rehearsal"]["out_of_memory"]["step"] == 3
    assert failed["rehearsal"]["out_of_memory"]["location"]["line"] == 9


@pytest.mark.slow
def test_a_module_gets_its_arguments_and_the_settings(stage: Stage) -> None:
    (stage.home / "package").mkdir()
    stage.script("", name="package/__init__.py")
    stage.script(
        """
        import os, sys, torch
        assert sys.argv[1:] == ["--epochs", "1"], sys.argv
        assert __name__ == "__main__" and __package__ == "package"
        x = torch.ones(1 << 20, device="cuda")
        assert torch.cuda.get_device_name() == "NVIDIA A100 40 GB"
        assert torch.cuda.get_device_capability() == (8, 0)
        """,
        name="package/train.py",
    )

    options = ["--gpu", "a100-40g", "--conf", "expandable_segments:True"]
    found = stage.json(
        "-m", "package.train", *options, "--snapshot", "kept.pickle", "--", "--epochs", "1"
    )
    usual = stage.json(*options, sys.executable, "-u", "-m", "package.train", "--epochs", "1")

    assert usual["rehearsal"]["devices"] == found["rehearsal"]["devices"]
    assert found["rehearsal"]["conf"] == "expandable_segments:True"
    assert found["rehearsal"]["gpu"] == "a100-40g"
    assert events(stage, found, "segment_map") == 1


def test_a_program_that_fails_ends_with_2_and_its_traceback(stage: Stage) -> None:
    stage.script("import torch\ntorch.ones(3).cuda()\nraise ValueError('no \\x1b[31m data')\n")

    done = stage.run_apart("train.py", "--format", "json")

    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "program_failed"
    assert "train.py:3" in error["message"]
    assert "ValueError" in error["message"]
    assert "Traceback (most recent call last)" in done.stderr
    assert "\x1b" not in done.stderr + done.stdout


def test_file_that_is_no_python_is_shown_without_frames_of_the_engine(stage: Stage) -> None:
    stage.script("import torch\ndef (\n")

    done = stage.run_apart("train.py", "--format", "json")

    assert done.returncode == 2
    assert "train.py:2 in <module>: SyntaxError" in json.loads(done.stdout)["error"]["message"]
    assert "SyntaxError" in done.stderr
    assert "runpy" not in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("print('hello')", "The program used no GPU"),
        ("import sys; sys.exit(3)", "exit code 3.\nIt printed nothing before it ended."),
        ("import sys; sys.exit('no data')", "exit code 1.\nIts last lines are above."),
        ("import nowhere_at_all", "Rehearse in the environment of the program: --python"),
        ("import os; os._exit(4)", "The program ended with code 4 before"),
    ],
)
def test_what_cannot_be_rehearsed_is_said_in_a_sentence(stage, body, sentence) -> None:
    stage.script(body)

    done = stage.run("train.py")

    assert done.returncode == 2
    assert sentence in done.stderr
    assert list(stage.home.iterdir()) == [stage.home / "train.py"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["missing.py"], "missing.py does not exist"),
        (["metrics.json"], "metrics.json is JSON, not a Python program."),
        (["job.sh"], "job.sh is a shell script, not a Python program."),
        (["train.py", "--gpu", "mi300x"], "NVIDIA GPUs"),
        (["train.py", "--capacity", "1GiB", "--unlimited"], "exclude each other"),
        (["train.py", "--python", "/nowhere/python"], "There is no Python at /nowhere/python"),
        (["train.py", "--conf", "max_split_size_mb:x"], "max_split_size_mb"),
        (["train.py", "torchrun", "--gpu", "mi300x"], "NVIDIA GPUs"),
        (["--gpu", "h100", "torchrun", "missing.py", "--gpu"], "missing.py does not exist"),
        (["--gpu", "h100", "python", "-u", "missing.py", "--gpu"], "missing.py does not exist"),
        (["python", "-u"], "python was given no program"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(training, options, sentence) -> None:
    (training.home / "metrics.json").write_text('{"loss": 1}')
    (training.home / "job.sh").write_text("#!/bin/bash\npython train.py\n")

    done = training.run(*options)

    assert done.returncode == 2
    assert sentence in done.stderr


@pytest.mark.slow
def test_only_a_snapshot_that_was_asked_for_is_left_and_none_overwritten(training: Stage) -> None:
    before = sorted(training.home.iterdir())

    unasked = training.json("train.py", "--steps", "1")

    assert sorted(training.home.iterdir()) == before
    assert unasked["rehearsal"]["snapshot"] == ""
    asked = training.json("train.py", "--steps", "1", "--snapshot", "kept.pickle")
    assert asked["rehearsal"]["snapshot"] == "kept.pickle"
    assert (training.home / "kept.pickle").is_file()
    (training.home / "folder").mkdir()
    training.json("train.py", "--steps", "1", "--snapshot", "folder")
    assert [p.suffix for p in (training.home / "folder").iterdir()] == [".pickle"]
    refused = training.run("train.py", "--snapshot", "kept.pickle")
    assert refused.returncode == 2
