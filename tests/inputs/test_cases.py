from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from command_line import FakePipeline, Run

from fragdoctor.errors import ConfigError, FragdoctorError, InputError
from fragdoctor.inputs.cases import NothingFound, decoded, read_case, read_messages
from fragdoctor.model.case import Overrides

MESSAGE = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 500.00 MiB. GPU 0 has a total "
    "capacity of 3.81 GiB of which 488.00 MiB is free. Process 1 has 3.33 GiB memory in use. Of "
    "the allocated memory 2.67 GiB is allocated by PyTorch, and 673.42 MiB is reserved by PyTorch "
    "but unallocated.\n"
)
STATS = {"allocated_bytes.all.current": 1024, "num_alloc_retries": 3, "num_ooms": 0}
SNAPSHOT: dict[str, Any] = {"segments": [], "device_traces": [[]], "allocator_settings": {}}


def case_of(*paths: Path | str) -> Any:
    return read_case([str(p) for p in paths], Overrides())


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps(SNAPSHOT))
    (tmp_path / "stats.json").write_text(json.dumps(STATS))
    (tmp_path / "oom.txt").write_text(MESSAGE)
    (tmp_path / "README.txt").write_text("Notes about this run.\n")
    (tmp_path / "meta.json").write_text('{"segments": 39, "name": "x"}')
    return tmp_path


def test_case_several_files_are_combined(files: Path) -> None:
    case = case_of(files / "snapshot.pickle", files / "oom.txt", files / "stats.json")

    assert case.snapshot is not None
    assert case.oom.messages[0].requested_bytes == 500 * 2**20
    assert case.stats.entries[0].n_alloc_retries == 3
    assert len(case.sources) == 3


def test_case_directory_of_one_recording_is_one_case(files: Path) -> None:
    case = case_of(files)

    names = [Path(s).name for s in case.sources]
    assert names == ["snapshot.pickle", "stats.json", "oom.txt"]


def test_case_directory_with_several_snapshots_says_so(files: Path) -> None:
    (files / "second.pickle").write_bytes(pickle.dumps(SNAPSHOT))

    with pytest.raises(ConfigError, match="2 snapshots"):
        case_of(files)


def test_case_two_snapshots_says_one_process(files: Path) -> None:
    with pytest.raises(ConfigError, match="one process"):
        case_of(files / "snapshot.pickle", files / "snapshot.pickle")


def test_case_gzip_text_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "train.log.gz"
    path.write_bytes(gzip.compress(MESSAGE.encode()))

    assert len(case_of(path).oom.messages) == 1


def test_case_gzip_snapshot_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "s.pickle.gz"
    path.write_bytes(gzip.compress(pickle.dumps(SNAPSHOT)))

    assert case_of(path).snapshot.provenance.compression == "gzip"


def test_case_two_logs_keep_the_first_cause_of_the_first(tmp_path: Path) -> None:
    first, second = tmp_path / "a.log", tmp_path / "b.log"
    first.write_text(MESSAGE)
    second.write_text(MESSAGE.replace("GPU 0", "GPU 1"))

    log = case_of(second, first).oom

    assert [m.device_index for m in log.messages] == [1, 0]
    assert log.messages[log.primary].device_index == 1


def test_case_series_of_stats_files_is_a_series(files: Path) -> None:
    later = files / "later.json"
    later.write_text(json.dumps({**STATS, "num_alloc_retries": 9}))

    stats = case_of(files / "stats.json", later).stats

    assert stats.is_series
    assert [e.n_alloc_retries for e in stats.entries] == [3, 9]


def test_case_utf16_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "powershell.log"
    path.write_bytes(MESSAGE.encode("utf-16"))

    assert len(case_of(path).oom.messages) == 1


def test_decoded_broken_bytes_are_replaced() -> None:
    assert decoded(b"a\xffb") == "a\ufffdb"


def test_case_pipe_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    if os.fork() == 0:  # pragma: no cover - the child
        with path.open("wb") as file:
            file.write(pickle.dumps(SNAPSHOT))
        os._exit(0)

    case = case_of(path)
    os.wait()

    assert case.snapshot is not None


def refusals(tmp_path: Path) -> dict[str, tuple[str, str]]:
    """Return name -> (path, part of the sentence) of inputs that cannot be used."""
    contents: dict[str, tuple[bytes, str]] = {
        "empty.pickle": (b"", "is empty"),
        "blank.txt": (b" \n", "is empty"),
        "model.pt": (b"PK\x03\x04rest", "zip archive"),
        "cat.png": (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", ""),
        "arrays.npz": (b"PK\x03\x04" + bytes(22) + b"\x05\x00\x00\x00a.npyrest", "NumPy archive"),
        "packed.joblib": (b"\x78\x9c\x00\x01rest", "joblib"),
        "cut.pickle": (pickle.dumps(SNAPSHOT)[:-9], ""),
        "evil.pickle": (b"cos\nsystem\n(S'true'\ntR.", ""),
        "evil2.pickle": (b"\x80\x02cos\nsystem\nq\x00.", ""),
    }
    made = {"gone.pickle": (str(tmp_path / "gone.pickle"), "does not exist")}
    for name, (data, sentence) in contents.items():
        (tmp_path / name).write_bytes(data)
        made[name] = (str(tmp_path / name), sentence)
    (tmp_path / "void").mkdir()
    made["void"] = (str(tmp_path / "void"), "holds no snapshot")
    return made


@pytest.mark.parametrize(
    "name",
    [
        "gone.pickle",
        "empty.pickle",
        "blank.txt",
        "model.pt",
        "cat.png",
        "arrays.npz",
        "packed.joblib",
        "cut.pickle",
        "evil.pickle",
        "evil2.pickle",
        "void",
    ],
)
@pytest.mark.parametrize("command", ["analyze", "simulate"])
def test_unusable_input_is_one_sentence_and_a_next_step(
    name: str, command: str, run: Run, tmp_path: Path, pipeline: FakePipeline
) -> None:
    path, sentence = refusals(tmp_path)[name]

    done = run(command, path)

    lines = done.err.splitlines()
    assert done.code in {2, 3}
    assert done.out == ""
    assert lines[0].startswith("Error: ")
    assert 1 <= len(lines) <= 2
    if command == "analyze":
        assert sentence in lines[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file_says_permission_denied(run: Run, files: Path) -> None:
    (files / "oom.txt").chmod(0)

    done = run("analyze", str(files / "oom.txt"))

    assert done.code == 2
    assert "permission denied" in done.err


def test_stdin_snapshot_is_analyzed(run: Run, pipeline: FakePipeline) -> None:
    done = run("analyze", "-", stdin=pickle.dumps(SNAPSHOT))

    assert done.code == 0
    assert pipeline.case is not None
    assert pipeline.case.snapshot is not None
    assert pipeline.case.sources == ("standard input",)


def test_stdin_empty_says_so(run: Run) -> None:
    done = run("analyze", "-")

    assert done.code == 2
    assert "standard input is empty" in done.err


def test_stdin_twice_is_refused(run: Run) -> None:
    assert "given twice" in run("analyze", "-", "-").err


def test_message_as_path_points_to_oom(run: Run) -> None:
    done = run("analyze", MESSAGE)

    assert done.code == 2
    assert "fragdoctor oom" in done.err


def test_path_of_impossible_length_is_a_sentence(run: Run) -> None:
    done = run("analyze", "x" * 5000)

    assert done.code == 2
    assert "Traceback" not in done.err


def test_path_with_null_byte_is_a_sentence() -> None:
    with pytest.raises((FragdoctorError, InputError)):
        case_of("a\x00b")


def test_message_is_read_around_what_a_file_system_lost(tmp_path: Path) -> None:
    text = MESSAGE.encode()
    (tmp_path / "job.log").write_bytes(b"step 1\n" + bytes(700) + text[:50] + b"\0" + text[50:])

    case = case_of(tmp_path / "job.log")

    assert [m.requested_bytes for m in case.oom.messages] == [500 << 20]


def test_document_that_is_cut_off_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text('{"loss": [1, 2,\n')

    with pytest.raises(NothingFound) as raised:
        case_of(tmp_path / "metrics.json")

    assert raised.value.log is None


@pytest.mark.parametrize("name", ["fragmentation_oom.stats.json", "fragmentation_oom.summary.txt"])
def test_message_reader_and_case_reader_agree_about_statistics(name):
    path = str(Path(__file__).parents[2] / "sample_snapshots" / name)

    said, read = read_messages([path], Overrides()), read_case([path], Overrides())

    assert said.stats == read.stats
    assert said.stats is not None
    assert said.oom == read.oom


def test_saved_page_that_quotes_a_message_is_read_by_both_readers(tmp_path):
    page = tmp_path / "thread.html"
    page.write_text(f"<html><body><pre>{MESSAGE}</pre></body></html>")

    said, read = read_messages([str(page)], Overrides()), read_case([str(page)], Overrides())

    assert said.oom == read.oom
    assert said.oom is not None
    assert said.oom.messages[0].requested_bytes == 500 << 20


def test_page_without_a_message_is_no_snapshot(tmp_path):
    page = tmp_path / "thread.html"
    page.write_text("<html><body>hello</body></html>")

    with pytest.raises(InputError, match="holds no memory snapshot"):
        read_case([str(page)], Overrides())


def test_message_that_statistics_quote_is_read_by_both_readers(tmp_path):
    path = tmp_path / "stats.json"
    path.write_text(json.dumps({"allocated_bytes.all.current": 1 << 30, "error": MESSAGE}))

    said, read = read_messages([str(path)], Overrides()), read_case([str(path)], Overrides())

    assert said.oom == read.oom
    assert said.oom is not None
    assert said.oom.messages[0].requested_bytes == 500 << 20
