"""A bundle of a program that runs: by signal, by HTTP, or by its own Python."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fragdoctor.capture.attach import _bundles, bundle_of
from fragdoctor.capture.trigger import listen
from fragdoctor.errors import ConfigError
from fragdoctor.inputs.cases import read_bundle
from fragdoctor.recording.bundle_writer import MANIFEST
from fragdoctor.recording.signals import NUMBER

pytestmark = pytest.mark.skipif(NUMBER is None, reason="no real-time signals")
FAKE = Path(__file__).parent / "fake"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a program and waits until it says that it is ready."""
    started = []

    def call(body: str, *before: str) -> subprocess.Popen[str]:
        script = tmp_path / "train.py"
        script.write_text(f"import os, sys, threading, time, torch\n{body}", encoding="utf-8")
        cleared = {k: v for k, v in os.environ.items() if not k.startswith("FRAGDOCTOR")}
        child = subprocess.Popen(
            [sys.executable, *before, str(script)],
            env={**cleared, "PYTHONPATH": str(FAKE)},
            cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield call
    for child in started:
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            stream.close()


RUN = ("-m", "fragdoctor", "run", "--no-diagnosis", "-o", "out")
WAITS = "torch.alloc(30)\nprint('ready', flush=True)\nsys.stdin.readline()\nprint('went on')\n"


def test_program_under_run_answers_as_often_as_it_is_asked_and_goes_on(start: Start) -> None:
    program = start(WAITS, *RUN)
    found = []

    for _ in range(2):
        with bundle_of(program.pid, 30) as bundle:
            found.append(bundle)

    case = read_bundle(found[0])
    assert case.bundle is not None
    assert case.bundle.reason == "request"
    assert case.snapshot is not None
    assert len(case.snapshot.segments) == 1
    assert found[0] != found[1]
    assert all(bundle.exists() for bundle in found)
    assert program.communicate("\n", timeout=60)[0] == "went on\n"
    assert program.returncode == 0


def test_end_of_a_failed_program_is_told_of_the_failure_not_of_the_request(start: Start) -> None:
    body = (
        "try:\n    torch.alloc(200)\nexcept torch.OutOfMemoryError as e:\n    error = e\n"
        "torch.alloc(30)\nprint('ready', flush=True)\nsys.stdin.readline()\nraise error\n"
    )
    program = start(body, *RUN)

    with bundle_of(program.pid, 30) as bundle:
        asked = bundle
    program.communicate("\n", timeout=60)

    (failure,) = asked.parent.glob("oom1-*")
    assert read_bundle(failure).bundle.ended_program  # type: ignore[union-attr]
    assert not read_bundle(asked).bundle.ended_program  # type: ignore[union-attr]


@pytest.mark.slow
def test_main_thread_that_hangs_outside_of_python_is_stood_in_for(start: Start) -> None:
    body = (
        "import ctypes\ntorch.alloc(30)\nprint('ready', flush=True)\n"
        "mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock\n"
        "lock(mutex)\nlock(mutex)\n"
    )
    program = start(body, *RUN)

    with bundle_of(program.pid, 30) as bundle:
        assert read_bundle(bundle).snapshot is not None


def test_forked_child_is_not_ended_by_the_request(start: Start) -> None:
    body = (
        "torch.alloc(30)\nchild = os.fork()\n"
        "if child: print('ready', flush=True); os.wait(); sys.exit(0)\n"
        "time.sleep(60)\n"
    )
    program = start(body, *RUN)
    (main,) = children_of(program.pid)
    (child,) = children_of(main)

    with pytest.raises(ConfigError, match="did not answer in 1 s"), bundle_of(child, 1):
        pass

    assert (Path("/proc") / str(child)).exists()


def children_of(pid: int) -> list[int]:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()
    return [int(word) for word in words]


def test_several_children_are_named(start: Start) -> None:
    body = (
        "import subprocess\n"
        "if len(sys.argv) == 1:\n"
        "    two = [subprocess.Popen([sys.executable, __file__, 'x'], stdout=subprocess.PIPE)"
        " for _ in range(2)]\n"
        "    for one in two: one.stdout.readline()\n"
        "else:\n    torch.alloc(3)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    program = start(body, *RUN)
    (main,) = children_of(program.pid)

    with pytest.raises(ConfigError, match="children on a GPU") as error, bundle_of(program.pid, 5):
        pass

    assert all(str(child) in error.value.hint for child in children_of(main))
    for child in children_of(main):
        os.kill(child, signal.SIGKILL)


def test_program_that_has_not_used_a_gpu_is_not_sent_a_signal_that_would_end_it(
    start: Start,
) -> None:
    program = start("print('ready', flush=True)\nsys.stdin.readline()\nprint('went on')\n", *RUN)

    with pytest.raises(ConfigError, match="has not used a GPU yet"), bundle_of(program.pid, 5):
        pass

    assert program.communicate("\n", timeout=60)[0] == "went on\n"


def test_program_of_its_own_needs_a_python_that_can(start: Start, monkeypatch) -> None:
    monkeypatch.delattr(sys, "remote_exec", raising=False)
    program = start("print('ready', flush=True)\ntime.sleep(60)\n")

    with pytest.raises(ConfigError, match=r"needs Python 3\.14"), bundle_of(program.pid, 5):
        pass

    assert program.poll() is None


def test_process_that_does_not_exist_is_said() -> None:
    with pytest.raises(ConfigError, match="No process 4194305 runs here"), bundle_of(4194305, 1):
        pass


def remote(program: subprocess.Popen[str]) -> Callable[[int, str], None]:
    """Return what stands for ``sys.remote_exec``: the program runs lines that it is sent."""

    def execute(pid: int, script: str) -> None:
        assert pid == program.pid
        assert program.stdin is not None
        program.stdin.write(f"{script}\n")
        program.stdin.flush()

    return execute


LISTENS = """print('ready', flush=True)
for line in sys.stdin:
    with open(line.strip()) as file: text = file.read()
    exec(text)
"""


def test_program_of_its_own_writes_a_bundle_by_its_own_python(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"before", "line", "file", "text"}
    check = f"assert set(globals()) - before == {own!r}\n"
    program = start(f"torch.alloc(30)\nbefore = set(globals())\n{LISTENS}{check}")
    monkeypatch.setattr(sys, "remote_exec", remote(program), raising=False)

    with bundle_of(program.pid, 30) as bundle:
        case = read_bundle(bundle)

    assert case.snapshot is not None
    assert len(case.snapshot.segments) == 1
    assert not bundle.exists()
    program.communicate(timeout=60)
    assert program.returncode == 0


@pytest.mark.skipif(not hasattr(sys, "remote_exec"), reason="attaching takes Python 3.14")
def test_python_itself_lets_a_busy_program_write_a_bundle(start: Start) -> None:
    body = "torch.alloc(30)\nprint('ready', flush=True)\nwhile True: sum(range(1000))\n"
    program = start(body)

    with bundle_of(program.pid, 30) as bundle:
        case = read_bundle(bundle)

    assert case.snapshot is not None
    assert len(case.snapshot.segments) == 1
    assert program.poll() is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "has not used a GPU yet"),
        ("del sys.modules['torch']\n", "has not imported torch"),
    ],
)
def test_program_without_a_snapshot_says_why(
    start: Start, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    program = start(body + LISTENS)
    monkeypatch.setattr(sys, "remote_exec", remote(program), raising=False)

    with pytest.raises(ConfigError, match=said), bundle_of(program.pid, 30):
        pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(1, "Operation not permitted"), "Operation not permitted"),
        (RuntimeError("Remote debugging is not enabled"), "not enabled"),
    ],
)
def test_refusal_of_python_is_a_sentence(start: Start, monkeypatch, error, said) -> None:
    program = start("print('ready', flush=True)\ntime.sleep(60)\n")

    def execute(pid: int, script: str) -> None:
        raise error

    monkeypatch.setattr(sys, "remote_exec", execute, raising=False)

    with pytest.raises(ConfigError, match=said), bundle_of(program.pid, 30):
        pass


def test_program_that_ends_meanwhile_is_said(start: Start, monkeypatch) -> None:
    program = start("print('ready', flush=True)\n")
    monkeypatch.setattr(sys, "remote_exec", lambda pid, script: program.wait(), raising=False)
    before = time.monotonic()

    with pytest.raises(ConfigError, match="ended before"), bundle_of(program.pid, 60):
        pass

    assert time.monotonic() - before < 30


def test_bundle_that_is_still_being_written_is_none_yet(tmp_path: Path) -> None:
    for name in (".attach-pid7.7.tmp", "attach-pid7"):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).touch()

    assert _bundles(tmp_path, 7) == [tmp_path / "attach-pid7"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def ask(port: int, path: str, **headers: str) -> tuple[int, Any]:
    address = f"http://127.0.0.1:{port}{path}"
    request = urllib.request.Request(address, method="POST", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as e:
        with e:
            return e.code, json.load(e)


def test_bundle_holds_what_happened_in_the_seconds_asked_for(start: Start, tmp_path: Path) -> None:
    port = free_port()
    body = (
        "torch.alloc(30)\nprint('ready', flush=True)\nsys.stdin.readline()\n"
        "torch.alloc(40)\nsys.stdin.readline()\nprint('went on')\n"
    )
    program = start(body, *RUN[:-2], "--listen", str(port), *RUN[-2:])
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()
    before = time.monotonic()
    status, said = ask(port, "/record?seconds=1")

    assert status == 200
    assert time.monotonic() - before >= 1
    (bundle,) = said["bundles"]
    snapshot = read_bundle(tmp_path / bundle).snapshot
    assert snapshot is not None
    assert len(snapshot.segments) == 2
    assert program.communicate("\n", timeout=60)[0] == "went on\n"
    assert program.returncode == 0


def test_others_are_refused_and_the_next_is_answered(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    listen(port)

    assert ask(port, "/record", Origin="http://evil.example")[0] == 400
    assert ask(port, "/record", Host="evil.example")[0] == 400
    for path in ("/", "/record?seconds=-1", "/record?seconds=1e3", "/record?seconds=" + "9" * 400):
        status, said = ask(port, path)
        assert status == 400
        assert said["error"].startswith("Ask with: curl")
    status, said = ask(port, "/record")
    assert (status, said["error"][:26]) == (503, "The program has not used a")
    with pytest.raises(ConfigError, match="cannot be used"):
        listen(port)
    assert capfd.readouterr().err == ""
