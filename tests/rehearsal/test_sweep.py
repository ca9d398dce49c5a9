from __future__ import annotations

import re
import sys
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from rehearsal_stage import TRAINING, Stage
from schemas import must_fit

from fragdoctor.errors import ConfigError
from fragdoctor.model.rehearsal import Rehearsal
from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
from fragdoctor.rehearsal.programs import Program
from fragdoctor.rehearsal.sweep import Batches, Sweep, parse_batches, searched, with_batch

WITH_BATCH = TRAINING + "\n    import sys\n    train(batch=int(sys.argv[1]))\n"


def rehearsal(batch: int, peak_bytes: int, capacity_bytes: int) -> Rehearsal:
    return Rehearsal(
        gpu="", is_known_gpu=False, capacity_bytes=capacity_bytes, conf="",
        fits=peak_bytes <= capacity_bytes, steps=1, stopped="", peak_allocated_bytes=peak_bytes,
        peak_reserved_bytes=peak_bytes, out_of_memory=None, n_ooms=0, devices=(), assumptions=(),
        unmodelled=(), notes=(), snapshot="", torch_version="", python="", batch=batch,
    )  # fmt: skip


def search(low: int, high: int, peak: Any, capacity: int = 1000) -> list[Rehearsal]:
    found: list[Rehearsal] = []
    for size in searched(low, high, found):
        assert size not in {r.batch for r in found}
        found.append(rehearsal(size, peak(size), capacity))
    return found


@pytest.mark.parametrize(
    ("text", "batches"),
    [
        ("16", Batches([16])),
        ("32, 8,8", Batches([8, 32])),
        ("1..512", Batches((1, 512), is_search=True)),
    ],
)
def test_batch_sizes_are_a_list_or_a_range(text: str, batches: Batches) -> None:
    assert parse_batches(text) == batches


@pytest.mark.parametrize("text", ["", "8,", "0", "5..5", "9..1", "0..4", "-1", "eight", "1.5", "٣"])
def test_other_batch_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_batches(text)


def test_batch_takes_its_place_in_the_arguments() -> None:
    program = Program("train.py", is_module=False, args=["--bs={batch}", "x"], pythons=[])

    assert with_batch(program, 8).args == ["--bs=8", "x"]
    with pytest.raises(ConfigError, match=r"no \{batch\}"):
        with_batch(Program("train.py", is_module=False, args=["8"], pythons=[]), 8)


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 30, 31, 100, 499, 500])
@pytest.mark.parametrize("bend", [1.0, 0.5, 2.0])
def test_search_ends_at_the_largest_batch(largest: int, bend: float) -> None:
    found = search(1, 500, lambda b: round(1000 * (b / (largest + 0.5)) ** bend))

    fits = max(r.batch for r in found if r.fits)
    fails = min((r.batch for r in found if not r.fits), default=501)
    assert fits <= largest < fails
    assert fails - fits <= max(1, fits // 32)
    assert len(found) <= 14


def test_search_ends_where_none_or_all_fit() -> None:
    assert [r.batch for r in search(4, 500, lambda _: 2000)] == [4]
    assert max(r.batch for r in search(1, 500, lambda _: 10)) == 500


@pytest.mark.slow
def test_several_gpus_are_one_table(training: Stage) -> None:
    found = training.json("train.py", "--gpu", "h100,600MiB", "--gpu", "24GiB", code=1)

    must_fit(found, "rehearsals")
    assert [r["gpu"] for r in found["rehearsals"]] == ["h100", "600MiB", "24GiB"]
    assert [r["fits"] for r in found["rehearsals"]] == [True, False, True]
    assert found["fits"] is False
    assert found["rehearsals"][1]["out_of_memory"]["location"]["filename"].endswith("train.py")
    assert [p.name for p in training.home.iterdir()] == ["train.py"]  # no snapshot unasked


@pytest.mark.slow
def test_largest_batch_of_a_list_is_named_with_the_line_that_fails(stage: Stage) -> None:
    stage.script(WITH_BATCH)

    done = stage.run(
        "train.py", "--capacity", "400MiB", "--batch", "8192,64,8", "--snapshot", "kept",
        "--", "{batch}",
    )  # fmt: skip

    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith(
        "The largest batch that fits is 64 of those tried; 8,192 does not."
    )
    assert re.search(
        r"fails in step \d, asking for [\d.]+ MiB at train.py:10 in train", done.stdout
    )
    assert sorted(p.name for p in (stage.home / "kept").iterdir()) == [
        "batch-64.pickle",
        "batch-8.pickle",
        "batch-8192.pickle",
    ]


@pytest.mark.slow
def test_settings_and_batches_are_combined(stage: Stage) -> None:
    stage.script(WITH_BATCH)

    found = stage.json(
        "train.py", "--capacity", "1GiB", "--batch", "4,8", "--steps", "1",
        "--conf", "expandable_segments:True", "--conf", "max_split_size_mb:64", "--", "{batch}",
    )  # fmt: skip

    assert [(r["conf"], r["batch"]) for r in found["rehearsals"]] == [
        (conf, batch)
        for conf in ("expandable_segments:True", "max_split_size_mb:64")
        for batch in (4, 8)
    ]


@pytest.mark.slow
def test_program_that_fails_at_one_batch_does_not_hide_the_others(stage: Stage) -> None:
    stage.script("    import sys\n    assert sys.argv[1] != '4', 'not four'\n" + WITH_BATCH)

    found = stage.json("train.py", "--gpu", "24GiB", "--batch", "4,8", "--", "{batch}", code=2)

    assert [r["batch"] for r in found["rehearsals"]] == [8]
    assert found["failed"][0]["batch"] == 4
    assert "not four" in found["failed"][0]["message"]


@pytest.mark.slow
def test_formats_of_ci_have_one_result_a_rehearsal(training: Stage) -> None:
    done = training.run("train.py", "--gpu", "24GiB,600MiB", "--format", "junit")

    suites = list(ET.fromstring(done.stdout))
    assert done.returncode == 1
    assert [s.attrib["name"] for s in suites] == ["train.py (24GiB)", "train.py (600MiB)"]
    assert [s.attrib["failures"] for s in suites] == ["0", "1"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--batch", "1..64", "--", "{batch}"], "Without a limit every batch fits"),
        (["--batch", "8,16", "--gpu", "h100", "--", "--batch-size", "8"], "no {batch}"),
        (["--gpu", "h100,nonsense"], "neither a known GPU nor a size"),
        (["--gpu", "h100,l4", "--snapshot", "."], "is not an empty folder"),
    ],
)
def test_sweeps_that_cannot_be_are_refused_before_anything_runs(training, options, sentence):
    done = training.run("train.py", *options)

    assert done.returncode == 2
    assert sentence in done.stderr


LIBRARY = """
    import os
    os.environ["SEEN"] = str(int(os.environ.get("SEEN", "0")) + 1)
    {more}
"""
WITH_LIBRARY = """
    import os, sys
    sys.stdin.read()
    import library
    assert os.environ["SEEN"] == "1", "the program's environment is its own"
    assert not os.path.exists("left"), "what another left is there"
    open("left", "w").close()
    import torch
    x = torch.zeros(int(sys.argv[1]) << 20, device="cuda")
    assert torch.cuda.get_device_name() == sys.argv[2]
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux alone")
@pytest.mark.parametrize("begin", ["import os, sys", "import library, os, sys"])
@pytest.mark.parametrize(
    ("more", "blocker"),
    [
        ("", []),
        (
            "from threading import Event, Thread; Thread(target=Event().wait, daemon=True).start()",
            ["library starts a thread when it is imported"],
        ),
    ],
)
def test_forks_do_what_new_processes_do(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, begin: str, more: str, blocker: list[str]
) -> None:
    stage.script(LIBRARY.replace("{more}", more), "site-packages/library.py")
    monkeypatch.setenv("PYTHONPATH", str(stage.home / "site-packages"))
    monkeypatch.chdir(stage.home)
    gpu = rehearsed_gpu("24GiB", None, is_unlimited=False)
    script = str(stage.script(WITH_LIBRARY.replace("import os, sys", begin)))
    program = Program(script, False, ["{batch}", gpu.kernels.title], [sys.executable])

    def swept(*, forks: bool) -> Any:
        confs = ["", "expandable_segments:True"]
        return Sweep(
            program, RehearsalConditions(gpu), [gpu], confs, Batches([1, 2]), forks=forks
        ).run()

    found = swept(forks=True)

    assert not found.failed
    assert found.rehearsals == swept(forks=False).rehearsals
    assert [r.peak_allocated_bytes >> 20 for r in found.rehearsals] == [4, 8, 4, 8]
    assert found.notes == [f"Each rehearsal imports its libraries again: {b}." for b in blocker]


def test_nothing_fits_where_nothing_could_be_rehearsed(stage: Stage) -> None:
    stage.script("import torch\ntorch.ones(1, device='cuda')\nraise ValueError")
    (stage.home / "kept").mkdir()  # an empty folder will do

    found = stage.json("train.py", "--gpu", "h100,l4", "--snapshot", "kept", code=2)

    assert not found["fits"]
    assert len(found["failed"]) == 2
