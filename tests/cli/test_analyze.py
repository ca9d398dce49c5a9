from __future__ import annotations

import pickle
import stat
from pathlib import Path

import diagnoses
import pytest
from command_line import FakePipeline, Run
from toy_allocator import ToyAllocator
from training_runs import training

from fragdoctor.model.snapshot import Snapshot
from fragdoctor.report.base import FORMATS

MESSAGE = "CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has a total capacity of 3.81 GiB"


@pytest.fixture
def message(tmp_path: Path) -> str:
    path = tmp_path / "oom.txt"
    path.write_text(MESSAGE)
    return str(path)


def test_analyze_report_goes_to_standard_output_alone(
    run: Run, pipeline: FakePipeline, message: str
) -> None:
    done = run("analyze", message)

    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Out of memory on GPU 0 at train.py:41 in train_step: ")


@pytest.mark.parametrize("fmt", FORMATS)
def test_analyze_offers_each_format(
    fmt: str, run: Run, pipeline: FakePipeline, message: str
) -> None:
    done = run("analyze", message, "--format", fmt)

    assert done.code == 0
    assert "fragmentation" in done.out.lower()


def test_analyze_reads_the_recording_to_continue_with(
    run: Run, pipeline: FakePipeline, message: str, tmp_path: Path
) -> None:
    other = tmp_path / "healthy.pickle"
    other.write_bytes(pickle.dumps(training(2).data()))

    done = run("analyze", message, "--continue-with", str(other))

    assert done.code == 0
    assert isinstance(pipeline.continue_with, Snapshot)


def test_analyze_continues_no_job_of_several_ranks(run: Run, tmp_path: Path) -> None:
    for name in ("rank0.pickle", "rank1.pickle"):
        (tmp_path / name).write_bytes(pickle.dumps(training(2).data()))

    done = run("analyze", str(tmp_path), "--continue-with", str(tmp_path / "rank0.pickle"))

    assert done.code == 2
    assert "--continue-with takes one recording" in done.err


def test_analyze_refuses_to_continue_with_another_program(run: Run, tmp_path: Path) -> None:
    for name, batch in (("failed.pickle", 2), ("other.pickle", 0)):
        toy = training(batch) if batch else ToyAllocator()
        for line in range(1, 20) if not batch else ():
            toy.malloc(2**20, line=900 + line)
        (tmp_path / name).write_bytes(pickle.dumps(toy.data()))

    done = run(
        "analyze",
        str(tmp_path / "failed.pickle"),
        "--continue-with",
        str(tmp_path / "other.pickle"),
    )

    assert done.code == 2
    assert done.err.count("\n") == 2
    assert "Traceback" not in done.err


def test_analyze_overrides_reach_the_diagnosis(
    run: Run, pipeline: FakePipeline, message: str
) -> None:
    run(
        "analyze", message, "--capacity", "24GiB", "--device", "1",
        "--memory-fraction", "0.5", "--torch-version", "2.4.1+cu121", "--batch", "12",
    )  # fmt: skip

    assert pipeline.case is not None
    overrides = pipeline.case.overrides
    assert overrides.capacity_bytes == 24 * 2**30
    assert (
        overrides.device,
        overrides.memory_fraction,
        overrides.torch_version,
        overrides.batch_size,
    ) == (1, 0.5, "2.4.1", 12)


@pytest.mark.parametrize("flag", ["--full", "--verbose", "-v"])
def test_analyze_full_says_more(flag: str, run: Run, pipeline: FakePipeline, message: str) -> None:
    normal, full = run("analyze", message).out, run("analyze", message, flag).out

    assert "FD301" not in normal
    assert "FD301" in full
    assert "Rules that could not run" in full


@pytest.mark.parametrize(
    ("name", "value", "flags", "colored"),
    [
        ("FORCE_COLOR", "1", (), True),
        ("FORCE_COLOR", "1", ("--no-color",), False),
        ("FORCE_COLOR", "0", (), False),
        ("COLUMNS", "100", (), False),
    ],
)
def test_analyze_colour_follows_the_environment(
    name: str,
    value: str,
    flags: tuple[str, ...],
    colored: bool,
    run: Run,
    pipeline: FakePipeline,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)

    assert colored is ("\x1b[" in run("analyze", message, *flags).out)


def test_analyze_no_color_beats_force_color(
    run: Run, pipeline: FakePipeline, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")

    assert "\x1b[" not in run("analyze", message).out


@pytest.mark.parametrize(("columns", "width"), [("120", 120), ("500", 120), ("7", 60), ("x", 80)])
def test_analyze_width_follows_columns(
    columns: str,
    width: int,
    run: Run,
    pipeline: FakePipeline,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    bar = next(ln for ln in run("analyze", message).out.splitlines() if ln.startswith("  [#"))

    assert width - 2 == len(bar)


def test_analyze_output_file_exists_is_refused_before_the_work(
    run: Run, pipeline: FakePipeline, message: str, tmp_path: Path
) -> None:
    target = tmp_path / "report.txt"
    target.write_text("mine")

    done = run("analyze", message, "-o", str(target))

    assert done.code == 2
    assert "--force" in done.err
    assert target.read_text() == "mine"
    assert pipeline.case is None


def test_analyze_force_overwrites_and_keeps_the_mode(
    run: Run, pipeline: FakePipeline, message: str, tmp_path: Path
) -> None:
    target = tmp_path / "report.txt"
    target.write_text("mine")
    target.chmod(0o640)

    assert run("analyze", message, "-o", str(target), "--force").code == 0

    assert target.read_text().startswith("Out of memory")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_analyze_input_is_never_overwritten(run: Run, pipeline: FakePipeline, message: str) -> None:
    done = run("analyze", message, "-o", message, "--force")

    assert done.code == 2
    assert Path(message).read_text() == MESSAGE


@pytest.mark.parametrize("target", ["gone/report.txt", "."])
def test_analyze_output_that_cannot_be_is_a_sentence(
    target: str, run: Run, pipeline: FakePipeline, message: str, tmp_path: Path
) -> None:
    done = run("analyze", message, "-o", str(tmp_path / target))

    assert done.code == 2
    assert "Traceback" not in done.err


def test_analyze_failed_run_leaves_no_file(
    run: Run, pipeline: FakePipeline, message: str, tmp_path: Path
) -> None:
    pipeline.error = ZeroDivisionError()

    run("analyze", message, "-o", str(tmp_path / "report.txt"))

    assert [p.name for p in tmp_path.iterdir()] == ["oom.txt"]


def test_analyze_output_dev_null_is_written(run: Run, pipeline: FakePipeline, message: str) -> None:
    assert run("analyze", message, "-o", "/dev/null").code == 0


@pytest.mark.parametrize(
    ("answer", "flags", "code"),
    [
        (diagnoses.fragmentation, (), 0),
        (diagnoses.fragmentation, ("--fail-on", "warning"), 1),
        (diagnoses.fragmentation, ("--fail-on", "error"), 0),
        (diagnoses.healthy, ("--fail-on", "warning"), 0),
    ],
)
def test_analyze_exit_code_follows_fail_on(
    answer: object,
    flags: tuple[str, ...],
    code: int,
    run: Run,
    pipeline: FakePipeline,
    message: str,
) -> None:
    pipeline.answer = answer  # type: ignore[assignment]

    assert code == run("analyze", message, *flags).code


@pytest.mark.parametrize(
    ("batch", "text"), [("32", "batch of 24 instead of 32"), ("1", "three quarters of")]
)
def test_batch_names_another_in_whole_samples(
    run: Run, samples: Path, batch: str, text: str
) -> None:
    done = run("analyze", str(samples / "capacity_oom.pickle"), "--batch", batch)

    assert text in done.out
