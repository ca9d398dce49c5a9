from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fragdoctor import ConfigError, diagnose, record
from fragdoctor.inputs.cases import read_bundle


def manifest(bundle: Path) -> dict:
    return json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))


def test_record_block_writes_a_bundle_at_its_end(fake_torch, tmp_path, capsys) -> None:
    with record(tmp_path / "b", max_entries=5, stacks="all") as recording:
        fake_torch.alloc(1)
        assert fake_torch._C._cuda_isHistoryEnabled()

    assert (tmp_path / "b",) == recording.bundles
    facts = read_bundle(tmp_path / "b").bundle
    assert ("block", 5, "all") == (facts.reason, facts.max_entries, facts.stacks)
    assert not fake_torch._C._cuda_isHistoryEnabled()
    assert f"fragdoctor: recorded in {tmp_path / 'b'}\n" == capsys.readouterr().err


def test_record_asks_pytorch_for_the_marks_of_every_thread(fake_torch, tmp_path) -> None:
    with record(tmp_path / "b", quiet=True):
        asked = fake_torch._State.recording
        fake_torch.optim.SGD().step()

    assert asked["global_record_annotations"] is True
    assert () == read_bundle(tmp_path / "b").snapshot.annotations  # PyTorch's own, not twice


@pytest.fixture
def old_torch(fake_torch, monkeypatch):
    """Return PyTorch before 2.6, whose recorder has no annotations."""
    record_history = fake_torch.cuda.memory._record_memory_history

    def record_without(
        enabled: str | None = "all", context: str = "all", stacks: str = "all", max_entries: int = 9
    ) -> None:
        record_history(enabled, context=context, stacks=stacks, max_entries=max_entries)

    monkeypatch.setattr(fake_torch.cuda.memory, "_record_memory_history", record_without)
    return fake_torch


def test_record_marks_the_optimizers_runs_where_pytorch_does_not(old_torch, tmp_path) -> None:
    with record(tmp_path / "b", quiet=True):
        for _ in range(3):
            old_torch.optim.SGD().step()
            time.sleep(0.001)
    old_torch.optim.SGD().step()  # no hook is left

    snapshot = read_bundle(tmp_path / "b").snapshot
    name = "Optimizer.step#SGD.step"
    marks = [(a.device, a.name, a.stage) for a in snapshot.annotations]
    assert [(0, name, "START"), (0, name, "END")] * 3 == marks
    begins = [a.time_us for a in snapshot.annotations if a.stage == "START"]
    # Each before the two events of its own run.
    assert [0, 2, 4] == snapshot.events.time_us.searchsorted(begins, side="left").tolist()


def test_record_keeps_as_many_marks_as_events(old_torch, tmp_path) -> None:
    with record(tmp_path / "b", quiet=True, max_entries=2):
        for _ in range(3):
            old_torch.optim.SGD().step()

    assert 2 == len(read_bundle(tmp_path / "b").snapshot.annotations)


def test_record_block_that_runs_out_raises_the_same_error_and_has_its_bundle(
    fake_torch, tmp_path
) -> None:
    fake_torch.alloc(60)
    recording = record(tmp_path / "b", quiet=True)

    with pytest.raises(fake_torch.OutOfMemoryError, match=r"allocate 90\.00 MiB"), recording:
        fake_torch.alloc(90)

    (bundle,) = recording.bundles
    told = manifest(bundle)
    assert told["ended_program"]
    assert __file__ == told["traceback"][-1][0]
    assert "capacity" == diagnose(read_bundle(bundle)).verdict.cause


def test_record_block_with_another_error_tells_its_type(fake_torch, tmp_path) -> None:
    fake_torch.alloc(1)

    with pytest.raises(ValueError, match="mine"), record(tmp_path / "b", quiet=True) as recording:
        raise ValueError("mine")

    assert "builtins.ValueError" == manifest(recording.bundles[0])["exception"]["type"]


def test_record_without_end_leaves_nothing_where_nothing_failed(fake_torch, tmp_path) -> None:
    with record(tmp_path / "b", at_end=False) as recording:
        fake_torch.alloc(1)

    assert () == recording.bundles
    assert [] == list(tmp_path.iterdir())


def test_record_keeps_pytorch_from_importing_its_compiler(fake_torch, tmp_path) -> None:
    # Naming frames, PyTorch asks for torch._inductor, and asking imports it: seconds.
    seen = []
    dump = fake_torch.cuda.memory._dump_snapshot

    def watched(path: str) -> None:
        seen.append(vars(fake_torch).get("_inductor"))
        dump(path)

    fake_torch.cuda.memory._dump_snapshot = watched
    with record(tmp_path / "b", quiet=True):
        fake_torch.alloc(1)

    assert (1, False) == (len(seen), hasattr(seen[0], "codecache"))
    assert "_inductor" not in vars(fake_torch)


def test_record_overwrites_nothing(fake_torch, tmp_path) -> None:
    for _ in range(2):
        with record(tmp_path / "b", quiet=True):
            fake_torch.alloc(1)

    assert {"b", "b-2"} == {p.name for p in tmp_path.iterdir()}


def test_record_decorates_functions_each_call_a_block(fake_torch, tmp_path) -> None:
    @record(tmp_path / "b", quiet=True)
    def work(n: int) -> int:
        """Work."""
        fake_torch.alloc(n)
        return n

    assert (2, 3) == (work(2), work(3))
    assert ("work", "Work.") == (work.__name__, work.__doc__)
    assert {"b", "b-2"} == {p.name for p in tmp_path.iterdir()}


def test_record_decorates_coroutines_until_they_are_done(fake_torch, tmp_path) -> None:
    @record(tmp_path / "b", quiet=True)
    async def work() -> bool:
        await asyncio.sleep(0)
        fake_torch.alloc(1)
        return fake_torch._C._cuda_isHistoryEnabled()

    assert asyncio.run(work())
    assert (tmp_path / "b" / "snapshot.pickle").is_file()


def test_record_gives_a_message_to_its_own_failure_not_to_a_silent_one(
    fake_torch, tmp_path
) -> None:
    # PyTorch catches failures itself while cuDNN looks for a workspace: no exception follows.
    with record(tmp_path / "b", at_end=False, quiet=True) as recording:
        for observer in fake_torch._State.observers:
            observer(0, 5, 100, 1)
        with pytest.raises(fake_torch.OutOfMemoryError):
            fake_torch.alloc(200)

    assert [False, True] == [(b / "oom.txt").exists() for b in recording.bundles]


def test_record_whose_bundle_was_moved_still_writes_the_end(fake_torch, tmp_path) -> None:
    with record(tmp_path / "b", quiet=True) as recording:
        fake_torch.alloc(1)
        with pytest.raises(fake_torch.OutOfMemoryError):
            fake_torch.alloc(200)
        (tmp_path / "b").rename(tmp_path / "moved")

    assert "block" == manifest(recording.bundles[-1])["reason"]


def test_record_nested_lets_the_inner_block_tell_a_failure(fake_torch, tmp_path) -> None:
    with (
        pytest.raises(fake_torch.OutOfMemoryError),
        record(tmp_path / "outer", quiet=True) as outer,
        record(tmp_path / "inner", quiet=True) as inner,
    ):
        fake_torch.alloc(200)

    assert (1, 0) == (len(inner.bundles), len(outer.bundles))


def test_record_nested_keeps_the_outer_recording_on(fake_torch, tmp_path) -> None:
    with record(tmp_path / "outer", max_entries=7, quiet=True):
        with record(tmp_path / "inner", max_entries=3, quiet=True):
            fake_torch.alloc(1)
        assert 7 == fake_torch._State.recording["max_entries"]

    assert fake_torch._State.recording is None
    assert manifest(tmp_path / "inner")["max_entries"] is None


def test_record_leaves_the_programs_own_recording_on(fake_torch, tmp_path) -> None:
    fake_torch.cuda.memory._record_memory_history(max_entries=9)

    with record(tmp_path / "b", quiet=True):
        fake_torch.alloc(1)

    assert 9 == fake_torch._State.recording["max_entries"]


def test_record_that_cannot_write_says_so_and_hides_no_result(fake_torch, tmp_path, capsys) -> None:
    (tmp_path / "file").write_text("")

    with record(tmp_path / "file" / "b") as recording:
        fake_torch.alloc(1)

    assert () == recording.bundles
    assert "fragdoctor: not recorded: " in capsys.readouterr().err
    assert not fake_torch._C._cuda_isHistoryEnabled()


def test_record_hears_no_errors_that_the_program_makes_itself(fake_torch, tmp_path) -> None:
    fake_torch.alloc(1)

    with pytest.raises(fake_torch.OutOfMemoryError), record(tmp_path / "b", quiet=True) as made:
        raise fake_torch.OutOfMemoryError("CUDA out of memory, says the program")

    assert "block" == manifest(made.bundles[0])["reason"]


@pytest.mark.parametrize(
    "arguments", [{"stacks": "c"}, {"max_entries": 0}, {"max_entries": "9"}, {"max_entries": True}]
)
def test_record_with_wrong_values_is_refused(arguments) -> None:
    with pytest.raises(ConfigError):
        record(**arguments)


def test_record_without_brackets_or_on_a_generator_is_refused() -> None:
    with pytest.raises(ConfigError, match="parentheses"):
        record(lambda: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="generator"):

        @record()
        def numbers():
            yield 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda torch: setattr(torch.version, "cuda", None), "built without it"),
        (lambda torch: setattr(torch.cuda, "is_available", lambda: False), "finds none"),
    ],
)
def test_record_without_a_gpu_is_one_sentence(fake_torch, change, sentence) -> None:
    change(fake_torch)

    with pytest.raises(ConfigError, match=sentence), record():
        raise AssertionError("not reached")


def test_record_without_torch_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ConfigError, match="not installed"), record():
        raise AssertionError("not reached")


@pytest.mark.slow
def test_record_with_a_cpu_build_of_torch_is_one_sentence() -> None:
    # In a process of its own: other tests need a stand-in where torch would be.
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    code = (
        "import fragdoctor, torch\n"
        "if torch.version.cuda: raise SystemExit('has cuda')\n"
        "try: fragdoctor.record().__enter__()\n"
        "except fragdoctor.ConfigError as e: print(e.message)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    if "has cuda" in done.stderr:
        pytest.skip("this PyTorch has CUDA")
    assert re.fullmatch(r"Recording needs CUDA; PyTorch \S+ is built without it.\n", done.stdout)
