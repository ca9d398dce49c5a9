from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import FakePipeline, Run

from fragdoctor import errors
from fragdoctor.cli import exit as exit_codes
from fragdoctor.cli.app import main

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has a total "
    "capacity of 3.81 GiB of which 488.00 MiB is free. Process 1 has 3.33 GiB memory in use. Of "
    "the allocated memory 2.67 GiB is allocated by PyTorch, and 673.42 MiB is reserved by PyTorch "
    "but unallocated."
)


@pytest.fixture
def message(tmp_path: Path) -> str:
    path = tmp_path / "oom.txt"
    path.write_text(MESSAGE)
    return str(path)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InputError("m", hint="h"), 2),
        (errors.NotASnapshot("m", hint="h"), 2),
        (errors.TruncatedSnapshot("m", hint="h", offset=7), 2),
        (errors.RefusedSnapshot("m", hint="h", offset=7), 3),
        (errors.LimitExceeded("m", hint="h", offset=7), 3),
        (errors.ConfigError("m", hint="h"), 2),
        (errors.SimulationError("m", hint="h"), 2),
    ],
)
def test_known_error_is_a_sentence_and_its_code(
    error: errors.FragdoctorError, code: int, run: Run, pipeline: FakePipeline, message: str
) -> None:
    pipeline.error = error

    done = run("analyze", message, "--format", "json")

    offset = "" if error.offset is None else " (byte 7)"
    assert code == done.code
    assert f"Error: m{offset}\nh\n" == done.err
    assert json.loads(done.out) == {
        "error": {"code": error.code, "message": "m", "hint": "h", "offset": error.offset}
    }


def test_known_error_without_json_leaves_standard_output_empty(
    run: Run, pipeline: FakePipeline, message: str
) -> None:
    pipeline.error = errors.InputError("m")

    assert run("analyze", message).out == ""


def test_bug_is_a_traceback_a_line_on_reporting_and_70(
    run: Run, pipeline: FakePipeline, message: str
) -> None:
    pipeline.error = ZeroDivisionError("from \x1b[31m input")

    done = run("analyze", message, "--format=json")

    assert done.code == exit_codes.INTERNAL
    assert "Traceback" in done.err
    assert exit_codes.HOW_TO_REPORT in done.err
    assert "\x1b" not in done.err
    assert json.loads(done.out)["error"]["code"] == "internal_error"


def test_interrupt_is_130_without_traceback(run: Run, pipeline: FakePipeline, message: str) -> None:
    pipeline.error = KeyboardInterrupt()

    done = run("analyze", message)

    assert (done.code, done.err) == (130, "Interrupted.\n")


def test_interrupt_while_modules_load_says_so_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "fragdoctor.cli.console":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "fragdoctor.cli.console", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])

    with pytest.raises(SystemExit) as ended:
        main(["analyze", "x"])

    assert (ended.value.code, capsys.readouterr().err) == (130, "Interrupted.\n")


def test_hostile_error_message_is_escaped_on_the_terminal(
    run: Run, pipeline: FakePipeline, message: str
) -> None:
    pipeline.error = errors.InputError("bad \x1b]0;x\x07 name\u202e")

    done = run("analyze", message)

    assert done.err == "Error: bad \\x1b]0;x\\x07 name\\u202e\n"


@pytest.mark.parametrize(
    "args",
    [
        ("analyz",),
        ("--bogus",),
        ("analyze",),
        ("analyze", "x", "--capacity", "12parsecs"),
        ("analyze", "x", "--capacity", "0"),
        ("analyze", "x", "--format", "sarf"),
        ("analyze", "x", "--device", "-1"),
        ("analyze", "x", "--torch-version", "latest"),
        ("analyze", "x", "--quiet", "--verbose"),
        ("simulate", "x", "--memory-fraction", "1.5"),
        ("simulate", "x", "--memory-fraction", "nan"),
        ("attach", "1", "--wait", "nan"),
        (),
    ],
)
def test_wrong_command_line_is_2_and_says_where_help_is(args: tuple[str, ...], run: Run) -> None:
    done = run(*args)

    assert done.code == 2
    assert done.out == ""
    assert "--help" in done.err or "Give one of them." in done.err
    assert "Traceback" not in done.err


def test_wrong_command_line_with_json_is_json(run: Run) -> None:
    done = run("analyze", "x", "--format", "json", "--capacity", "12parsecs")

    assert json.loads(done.out)["error"]["code"] == "bad_usage"


def test_option_that_swallows_the_next_is_named(run: Run) -> None:
    result = run("estimate", "gpt2", "--seq", "--gpu", "t4")

    assert result.code == 2
    assert "--seq needs a value: --gpu follows it." in result.err


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (("analyze", "x", "--html"), "Write --format html."),
        (("analyze", "x", "--gpu", "t4"), "--gpu is an option of rehearse, estimate, pack."),
        (("analyze", "x", "--device", "one"), "'one' is not a whole number."),
        (("analyze", "x", "--memory-fraction", "half"), "'half' is not a number."),
        (("estimate", "gpt2", "--bf16"), "Write --dtype bf16."),
        (("init-ci", "nothere.py"), "nothere.py does not exist."),
        (("analyze", "x", "-format", "html"), "No such option: -format Write --format."),
        (("oom", "x", "--capcity", "1GiB"), "No such option: --capcity Did you mean --capacity?"),
        (("oom", "x", "--edit"), "No such option: --edit See: fragdoctor oom --help"),
        (("rehearse", "x.py", "--bathc"), "Did you mean --batch?"),
        (("analyze", "-full", "x"), "No such option: -full Write --full."),
        (("estimate", "gpt2", "--gpu"), "See: fragdoctor estimate --help"),
        (("x.pickle", "-o"), "See: fragdoctor analyze --help"),
        (("estimate", "gpt2", "--gpu", "4900"), "Did you mean rtx-4090"),
        (("export", "x.pickle", "-o", "x.parquet"), "Name the file .speedscope.json,"),
    ],
)
def test_wrong_word_is_answered_with_the_right_one(
    run: Run, words: tuple[str, ...], answer: str
) -> None:
    result = run(*words)

    assert result.code == 2
    assert answer in result.err.replace("\n", " ")


def test_option_of_a_program_is_told_where_it_goes(run: Run) -> None:
    result = run("rehearse", "train.py", "--lr", "3")

    assert result.code == 2
    assert "No such option: --lr" in result.err
    assert "Options of the program come after two dashes" in result.err


def test_option_of_a_program_that_rehearse_has_too_is_told_where_it_goes(run: Run) -> None:
    result = run("rehearse", "train.py", "--steps")

    assert result.code == 2
    assert "two dashes: rehearse train.py -- --steps" in result.err


def test_command_typo_suggests_the_command(run: Run) -> None:
    assert "Did you mean 'analyze'?" in run("analyz").err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["analyze", "x", "--format", "json"], True),
        (["analyze", "--format=json", "x"], True),
        (["analyze", "x", "--format", "text"], False),
        (["analyze", "--", "--format", "json"], False),
        (["oom", "--format"], False),
    ],
)
def test_wants_json_reads_the_command_line(argv: list[str], expected: bool) -> None:
    assert expected is exit_codes.wants_json(argv)


def test_closed_pipe_is_quiet(root: Path) -> None:
    script = "from fragdoctor.cli.app import main; main(['--help'])"
    read_end, write_end = os.pipe()
    os.close(read_end)

    done = subprocess.run(
        [sys.executable, "-c", script],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    os.close(write_end)

    assert (done.returncode, done.stderr) == (exit_codes.BROKEN_PIPE, "")


def run_outside(root: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which $FRAGDOCTOR is the command."""
    script = "from fragdoctor.cli.app import main; main()"
    env = {**os.environ, "PYTHONPATH": str(root), "FRAGDOCTOR": sys.executable, "SCRIPT": script}
    env.pop("PYTHONUNBUFFERED", None)  # then what fails is not told at the end only
    line = command.replace("$FRAGDOCTOR", '"$FRAGDOCTOR" -c "$SCRIPT"')
    return subprocess.run(
        ["/bin/sh", "-c", line], capture_output=True, text=True, env=env, check=False
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux only")
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ("--help", "There is no space left on the device."),
        ("explain", "There is no space left on the device."),
        ("analyze gone.pickle --format=json", "gone.pickle does not exist."),
    ],
)
def test_full_disk_is_a_sentence(args: str, sentence: str, root: Path) -> None:
    done = run_outside(root, f"$FRAGDOCTOR {args} > /dev/full")

    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: {sentence}")
    assert done.stderr.count("\n") == 2


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("$FRAGDOCTOR explain >&-", 0),
        ("$FRAGDOCTOR --help >&-", 0),
        ("$FRAGDOCTOR oom <&-", 2),
        ("$FRAGDOCTOR analyze gone.pickle 2>&-", 2),
    ],
)
def test_closed_streams_are_no_bug(command: str, code: int, root: Path) -> None:
    done = run_outside(root, command)

    assert done.returncode == code
    assert "Traceback" not in done.stderr
