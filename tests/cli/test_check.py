"""``fragdoctor check`` from files to exit codes, with the real diagnosis."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders import BASE, MIB, alloc, block, frame, oom, pickled, segment, segment_alloc, snapshot
from command_line import Run

STACK = [frame("/src/train.py", 10, "forward"), frame("/src/train.py", 99, "<module>")]


def healthy(n_mib: int = 12, line: int = 10, base: int = BASE) -> bytes:
    """Return a snapshot with one live block in a segment of 20 MiB."""
    stack = [frame("/src/train.py", line, "forward"), frame("/src/train.py", 99, "<module>")]
    size = n_mib * MIB
    return pickled(
        snapshot(
            segment(base, block(size, "active_allocated", frames=stack), block(20 * MIB - size)),
            events=[
                segment_alloc(base, 20 * MIB, frames=stack, time_us=1),
                alloc(base, size, frames=stack, time_us=2),
            ],
        )
    )


def out_of_memory(base: int = BASE, line: int = 10) -> bytes:
    """Return a snapshot of a request that could not fit: all is live."""
    stack = [frame("/src/train.py", line, "forward")]
    return pickled(
        snapshot(
            segment(base, block(20 * MIB, "active_allocated", frames=stack)),
            events=[
                segment_alloc(base, 20 * MIB, frames=stack, time_us=1),
                alloc(base, 20 * MIB, frames=stack, time_us=2),
                oom(64 * MIB, 1 * MIB, frames=stack, time_us=3),
            ],
        )
    )


MESSAGE = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB (GPU 0; "
    "3.81 GiB total capacity; 3.70 GiB already allocated; 10.00 MiB free; 3.75 GiB reserved in "
    "total by PyTorch)\n"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_STEP_SUMMARY", "FRAGDOCTOR_MAX_PEAK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "ok.pickle").write_bytes(healthy())
    (tmp_path / "oom.pickle").write_bytes(out_of_memory())
    return tmp_path


def test_check_of_a_healthy_snapshot_passes(run: Run, here: Path) -> None:
    outcome = run("check", "ok.pickle")

    assert outcome.code == 0
    assert outcome.out.startswith("GPU memory check passed")
    assert "ok  ok.pickle: Healthy" in outcome.out


def test_check_of_an_out_of_memory_fails_with_the_reason(run: Run, here: Path) -> None:
    outcome = run("check", "ok.pickle", "oom.pickle")

    assert outcome.code == 1
    assert "FAILED  oom.pickle: Not enough capacity" in outcome.out
    assert "FD201: " in outcome.out


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--max-peak", "12MiB"), 0),
        (("--max-peak", "11MiB"), 1),
        (("--max-peak", "60%", "--capacity", "20MiB"), 0),
        (("--max-peak", "59%", "--capacity", "20MiB"), 1),
        (("--max-peak", "59%"), 2),  # of what?
        (("--max-stranded", "8MiB"), 0),
        (("--max-stranded", "1MiB"), 1),
        (("--max-stranded", "40%"), 0),
        (("--max-stranded", "39%"), 1),
        (("--max-retries", "0"), 0),
        (("--min-headroom", "8MiB", "--capacity", "20MiB"), 0),
        (("--min-headroom", "50%", "--capacity", "20MiB"), 1),
        (("--min-headroom", "10%"), 2),
        (("--fits-on", "20MiB"), 0),
        (("--fits-on", "10MiB"), 1),
        (("--no-growth",), 0),
        (("--max-peak", "much"), 2),
        (("--max-retries", "-1"), 2),
    ],
)
def test_budget_decides_the_exit_code(
    run: Run, here: Path, options: tuple[str, ...], code: int
) -> None:
    assert code == run("check", "ok.pickle", *options).code


def test_fits_on_says_how_it_was_answered(run: Run, here: Path) -> None:
    outcome = run("check", "ok.pickle", "--fits-on", "10MiB")

    assert "does not fit on 10.00 MiB" in outcome.out
    assert "by replay" in outcome.out


def test_unreadable_file_does_not_stop_the_others(run: Run, here: Path) -> None:
    (here / "empty.pickle").touch()
    (here / "hostile.pickle").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")

    outcome = run("check", "empty.pickle", "hostile.pickle", "oom.pickle", "ok.pickle")

    assert outcome.code == 3
    assert "ERROR   empty.pickle is empty." in outcome.out
    assert "ERROR   hostile.pickle" in outcome.out
    assert "FAILED  oom.pickle: " in outcome.out
    assert "ok      ok.pickle: " in outcome.out
    assert run("check", "empty.pickle", "oom.pickle").code == 2


def test_directory_and_pattern_expand(run: Run, here: Path) -> None:
    (here / "runs/rank0").mkdir(parents=True)
    (here / "runs/.hidden").mkdir()
    (here / "runs/rank0/a.pickle").write_bytes(healthy())
    (here / "runs/.hidden/b.pickle").write_bytes(out_of_memory())
    (here / "runs/message.txt").write_text(MESSAGE)
    (here / "runs/meta.json").write_text('{"lr": 0.1}')

    directory = run("check", "runs")
    pattern = run("check", "runs/**/*.pickle")

    assert directory.code == 1
    assert "ok      runs/rank0/a.pickle" in directory.out
    assert "FAILED  runs/message.txt" in directory.out
    assert "2 files" in directory.out
    assert "1 file: 1 passed" in pattern.out


def test_pattern_and_directory_without_inputs_are_errors(run: Run, here: Path) -> None:
    (here / "empty").mkdir()

    assert run("check", "*.nothing").code == 2
    assert run("check", "empty").code == 2


def test_log_without_a_failure_is_nothing_to_judge(run: Run, here: Path) -> None:
    (here / "train.log").write_text("step 1 loss 0.5\nstep 2 loss 0.4\n")

    outcome = run("check", "train.log")

    assert outcome.code == 2
    assert outcome.out.startswith("Nothing to judge")
    assert "no out-of-memory message" in outcome.out


def test_log_without_a_failure_beside_a_judged_file_passes(run: Run, here: Path) -> None:
    (here / "train.log").write_text("step 1 loss 0.5\nstep 2 loss 0.4\n")
    (here / "run.pickle").write_bytes(healthy())

    outcome = run("check", "train.log", "run.pickle")

    assert outcome.code == 0
    assert "1 passed, 1 with nothing to judge" in outcome.out


def test_caught_failure_passes_with_a_warning(run: Run, samples: Path) -> None:
    outcome = run("check", str(samples / "caught_ooms.pickle"))

    assert outcome.code == 0
    assert "warning FD206:" in outcome.out


def test_standard_input_is_judged(run: Run, here: Path) -> None:
    outcome = run("check", "-", stdin=MESSAGE.encode())

    assert outcome.code == 1
    assert "FAILED  standard input" in outcome.out


def test_select_and_ignore_choose_rules(run: Run, here: Path) -> None:
    assert run("check", "oom.pickle", "--select", "FD2").code == 1
    assert run("check", "oom.pickle", "--select", "FD4,FD5").code == 0
    assert run("check", "oom.pickle", "--ignore", "FD2").code == 0
    assert run("check", "oom.pickle", "--select", "XY1").code == 2


def test_baseline_passes_what_it_knows_and_fails_what_got_worse(run: Run, here: Path) -> None:
    assert run("check", "oom.pickle", "ok.pickle", "--write-baseline", "b.json").code == 0

    same = run("check", "oom.pickle", "ok.pickle", "--baseline", "b.json")
    (here / "ok.pickle").write_bytes(out_of_memory())
    worse = run("check", "oom.pickle", "ok.pickle", "--baseline", "b.json")

    assert same.code == 0
    assert worse.code == 1
    assert "FAILED  ok.pickle" in worse.out
    assert "ok      oom.pickle" in worse.out


def test_baseline_holds_for_another_run_at_other_addresses_and_lines(run: Run, here: Path) -> None:
    run("check", "oom.pickle", "--write-baseline", "b.json", "--fail-on", "warning")
    (here / "next").mkdir()
    (here / "next/oom.pickle").write_bytes(out_of_memory(base=BASE + (1 << 40), line=57))

    outcome = run("check", "next/oom.pickle", "--baseline", "b.json", "--fail-on", "warning")

    assert outcome.code == 0


def test_tolerance_decides_how_much_more_is_worse(run: Run, here: Path) -> None:
    run("check", "ok.pickle", "--write-baseline", "b.json")
    (here / "ok.pickle").write_bytes(healthy(n_mib=14))
    options = ("check", "ok.pickle", "--baseline", "b.json", "--tolerance")

    assert run(*options, "0").code == 1
    assert run(*options, "1MiB").code == 1
    assert run(*options, "2MiB").code == 0


def test_baseline_is_renewed_but_another_file_is_not_overwritten(run: Run, here: Path) -> None:
    (here / "notes.json").write_text("{}")
    run("check", "ok.pickle", "--write-baseline", "b.json")

    assert run("check", "oom.pickle", "--write-baseline", "b.json").code == 0
    assert "oom.pickle" in (here / "b.json").read_text()
    assert run("check", "oom.pickle", "--write-baseline", "notes.json").code == 2
    assert (here / "notes.json").read_text() == "{}"


def test_baseline_is_not_written_when_an_input_is_missing(run: Run, here: Path) -> None:
    outcome = run("check", "ok.pickle", "none.pickle", "--write-baseline", "b.json")

    assert outcome.code == 2
    assert not (here / "b.json").exists()


def test_missing_or_damaged_baseline_is_an_error(run: Run, here: Path) -> None:
    (here / "bad.json").write_text("[1]")

    assert run("check", "ok.pickle", "--baseline", "none.json").code == 2
    assert run("check", "ok.pickle", "--baseline", "bad.json").code == 2


def test_several_reports_are_written_at_once(run: Run, here: Path) -> None:
    outcome = run(
        "check", "oom.pickle", "--report", "sarif=o.sarif", "--report", "junit=o.xml",
        "--report", "json=o.json", "--report", "markdown=o.md", "--report", "github=o.txt",
    )  # fmt: skip

    assert outcome.code == 1
    assert outcome.out.startswith("GPU memory check failed")
    assert json.loads((here / "o.sarif").read_text())["version"] == "2.1.0"
    assert "<testsuites" in (here / "o.xml").read_text()
    assert json.loads((here / "o.json").read_text())["exit_code"] == 1
    assert (here / "o.md").read_text().startswith("## GPU memory check failed")
    assert (here / "o.txt").read_text().startswith("::error ")


@pytest.mark.parametrize(
    "report", ["sarif", "=o.txt", "sarf=o.txt", "sarif=", "text=ok.pickle", "text=no/such/dir"]
)
def test_report_that_cannot_be_written_is_refused_before_the_work(
    run: Run, here: Path, report: str
) -> None:
    assert run("check", "ok.pickle", "--report", report).code == 2


def test_two_reports_to_one_file_are_refused(run: Run, here: Path) -> None:
    assert run("check", "ok.pickle", "--report", "sarif=o", "--report", "junit=o").code == 2


def test_report_does_not_overwrite_without_force(run: Run, here: Path) -> None:
    (here / "o.txt").write_text("mine")

    assert run("check", "ok.pickle", "--report", "text=o.txt").code == 2
    assert run("check", "ok.pickle", "--report", "text=o.txt", "--force").code == 0
    assert "mine" not in (here / "o.txt").read_text()


def test_step_summary_is_appended_to(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = here / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))

    outcome = run("check", "ok.pickle", "--report", f"markdown={summary}")

    assert outcome.code == 0
    assert summary.read_text().startswith("before\n## GPU memory check passed")


@pytest.mark.parametrize("name", ["text", "json", "markdown", "github", "sarif", "junit"])
def test_format_is_printed(run: Run, here: Path, name: str) -> None:
    outcome = run("check", "oom.pickle", "--format", name)

    assert outcome.code == 1
    assert "FD201" in outcome.out
    assert outcome.out.endswith("\n")


@pytest.mark.slow
@pytest.mark.shared
def test_recordings_with_a_failure_fail_and_the_others_pass(run: Run, shared: Path) -> None:
    expected = json.loads((shared / "snapshots/expected.json").read_text())
    healthy_ones = [n for n, e in expected.items() if e.get("cause") == "healthy"]

    outcome = run(
        "check", *(str(shared / "snapshots" / n / "snapshot.pickle") for n in healthy_ones)
    )

    assert healthy_ones
    assert outcome.code == 0, outcome.out
