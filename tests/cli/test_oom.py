from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import diagnoses
import pytest
from command_line import FakePipeline, Run

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has a total "
    "capacity of 3.81 GiB of which 488.00 MiB is free. Process 1 has 3.33 GiB memory in use. Of "
    "the allocated memory 2.67 GiB is allocated by PyTorch, and 673.42 MiB is reserved by PyTorch "
    "but unallocated."
)


def requested(pipeline: FakePipeline) -> int | None:
    assert pipeline.case is not None
    assert pipeline.case.oom is not None
    return pipeline.case.oom.messages[0].requested_bytes


def test_oom_text_argument_is_the_message(run: Run, pipeline: FakePipeline) -> None:
    done = run("oom", MESSAGE)

    assert done.code == 0
    assert requested(pipeline) == 500 * 2**20
    assert done.out.startswith("Out of memory on GPU 0")


def test_oom_unquoted_words_are_joined(run: Run, pipeline: FakePipeline) -> None:
    run("oom", *MESSAGE.split())

    assert requested(pipeline) == 500 * 2**20


def test_oom_existing_file_is_read(run: Run, pipeline: FakePipeline, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(f"step 1\n{MESSAGE}\n")

    run("oom", str(path))

    assert pipeline.case is not None
    assert (str(path),) == pipeline.case.sources
    assert requested(pipeline) == 500 * 2**20


@pytest.mark.parametrize("args", [("oom",), ("oom", "-")])
def test_oom_pipe_is_read(args: tuple[str, ...], run: Run, pipeline: FakePipeline) -> None:
    done = run(*args, stdin=MESSAGE.encode())

    assert requested(pipeline) == 500 * 2**20
    assert "Paste" not in done.err


def test_oom_on_a_terminal_asks_to_paste(run: Run, pipeline: FakePipeline) -> None:
    done = run("oom", stdin=MESSAGE.encode(), is_terminal=True)

    assert "Ctrl-D" in done.err
    assert "Ctrl-D" not in done.out
    assert done.code == 0


def test_oom_empty_standard_input_is_a_sentence(run: Run) -> None:
    done = run("oom", "-")

    assert done.code == 2
    assert "standard input is empty" in done.err


def test_oom_snapshot_points_to_analyze(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps({"segments": [], "device_traces": []}))

    done = run("oom", str(path))

    assert done.code == 2
    assert f"fragdoctor analyze {path}" in done.err


def test_oom_missing_file_is_not_taken_for_a_message(run: Run) -> None:
    done = run("oom", "logs/gone.log")

    assert done.code == 2
    assert "does not exist" in done.err


def test_oom_directory_points_to_analyze(run: Run, tmp_path: Path) -> None:
    assert "fragdoctor analyze" in run("oom", str(tmp_path)).err


def test_oom_json_lists_messages_then_verdict(run: Run, pipeline: FakePipeline) -> None:
    document = json.loads(run("oom", MESSAGE, "--format", "json").out)

    assert document["messages"][0]["requested_bytes"] == 500 * 2**20
    assert document["messages"][0]["other_processes"] == [{"pid": 1, "bytes": 3575560274}]
    assert document["verdict"]["cause"] == "fragmentation"


def test_oom_several_messages_first_cause_on_top(run: Run, pipeline: FakePipeline) -> None:
    log = f"[rank1]: {MESSAGE}\nx\n[rank0]: {MESSAGE.replace('500.00', '600.00')}\n"

    lines = run("oom", "-", stdin=log.encode()).out.splitlines()

    table = lines[next(i for i, line in enumerate(lines) if line.startswith("Messages")) :]
    assert table[2].split()[:6] == ["judged", "1", "1", "0", "500.00", "MiB"]
    assert table[3].split()[:5] == ["3", "0", "0", "600.00", "MiB"]


def test_oom_overrides_reach_the_diagnosis(run: Run, pipeline: FakePipeline) -> None:
    run("oom", MESSAGE, "--capacity", "24GiB", "--device", "1", "--torch-version", "2.4.0+cu121")

    assert pipeline.case is not None
    overrides = pipeline.case.overrides
    assert (
        overrides.capacity_bytes,
        overrides.device,
        overrides.torch_version,
    ) == (24 * 2**30, 1, "2.4.0")


def test_oom_fail_on_counts_findings(run: Run, pipeline: FakePipeline) -> None:
    assert run("oom", MESSAGE, "--fail-on", "warning").code == 1
    assert run("oom", MESSAGE, "--fail-on", "error").code == 0
    pipeline.answer = diagnoses.healthy
    assert run("oom", MESSAGE, "--fail-on", "warning").code == 0


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_oom_pasted_on_a_terminal_ends_at_the_first_ctrl_d() -> None:
    parent, child = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fragdoctor", "oom", "-q"],
        stdin=child, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(child)
    os.write(parent, b"CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    os.write(parent, b"\x04")

    out, asked = process.communicate(timeout=60)
    os.close(parent)

    assert process.returncode == 0
    assert b"Ctrl-D" in asked
    assert b"2.00 GiB" in out


def test_oom_empty_word_is_empty_and_no_directory(run: Run) -> None:
    done = run("oom", "")

    assert done.code == 2
    assert "is empty" in done.err
