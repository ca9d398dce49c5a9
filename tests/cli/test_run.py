from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from fragdoctor import Cause, diagnose
from fragdoctor.capture.launcher import Ended, Reached

FAKE = Path(__file__).parents[1] / "capture" / "fake"
HEAD = "import torch, sys, os, time\n"


class Runner:
    """Runs programs under ``fragdoctor run``, where ``import torch`` finds a stand-in."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.out = home / "out"

    def script(self, body: str, name: str = "train.py") -> Path:
        path = self.home / name
        path.write_text(HEAD + body, encoding="utf-8")
        return path

    def environment(self, **more: str) -> dict[str, str]:
        cleared = {k: v for k, v in os.environ.items() if not k.startswith(("FRAGDOCTOR", "SLURM"))}
        return {**cleared, "PYTHONPATH": str(FAKE), "COLUMNS": "80", **more}

    def argv(self, *words: str, options: tuple[str, ...] = ("--no-diagnosis",)) -> list[str]:
        return [sys.executable, "-m", "fragdoctor", "run", "-o", str(self.out), *options, *words]

    def run(
        self,
        *words: str,
        options: tuple[str, ...] = ("--no-diagnosis",),
        stdin: bytes | BinaryIO = b"",
        **env: str,
    ) -> subprocess.CompletedProcess[bytes]:
        source = {"input": stdin} if isinstance(stdin, bytes) else {"stdin": stdin}
        return subprocess.run(
            self.argv(*words, options=options),
            env=self.environment(**env),
            cwd=self.home,
            **source,
            capture_output=True,
            timeout=240,
            check=False,
        )

    def bundles(self) -> list[str]:
        return sorted(p.name for p in self.out.iterdir()) if self.out.is_dir() else []

    def manifest(self, bundle: str) -> dict:
        return json.loads((self.out / bundle / "bundle.json").read_text(encoding="utf-8"))


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return Runner(tmp_path)


def without_pid(names: list[str]) -> list[str]:
    return [name.split("-pid")[0] for name in names]


def test_run_of_a_program_that_runs_out_keeps_its_code_and_leaves_one_bundle(runner) -> None:
    script = runner.script("torch.alloc(60)\ntorch.alloc(60)\n")

    done = runner.run(str(script))

    assert 1 == done.returncode
    (bundle,) = runner.bundles()
    assert {p.name for p in (runner.out / bundle).iterdir()} == {
        "bundle.json",
        "oom.txt",
        "snapshot.pickle",
        "sources.json",
        "stats.json",
    }
    manifest = runner.manifest(bundle)
    assert ("oom", True, 1) == (manifest["reason"], manifest["ended_program"], manifest["n_ooms"])
    assert Path(manifest["folder"]).is_dir()
    text = (runner.out / bundle / "oom.txt").read_text(encoding="utf-8")
    assert text.startswith("CUDA out of memory. Tried to allocate 60.00 MiB.")
    assert f"torch.OutOfMemoryError: {text}".encode() in done.stderr
    assert str(runner.out / bundle) not in done.stdout.decode()


def test_run_records_a_program_that_looks_for_torch_before_it_imports_it(runner) -> None:
    script = runner.home / "serve.py"
    script.write_text(
        "import importlib.util, sys\n"
        "assert importlib.util.find_spec('torch') and importlib.util.find_spec('torch')\n"
        "import torch\n"
        "assert not any('fragdoctor_recording' in type(f).__module__ for f in sys.meta_path)\n"
        "torch.alloc(60)\ntorch.alloc(60)\n",
        encoding="utf-8",
    )

    runner.run(str(script))

    assert len(runner.bundles()) == 1


def test_run_prints_the_diagnosis_on_standard_error_only(runner) -> None:
    script = runner.script("torch.alloc(60)\nprint('mine')\ntorch.alloc(60)\n")

    done = runner.run(str(script), options=("--no-rehearse",))

    assert b"mine\n" == done.stdout
    report = done.stderr.decode()
    assert "Not enough capacity (proven)" in report
    assert "train.py:2" in report
    assert report.rstrip().endswith("--format html -o report.html")


def test_failure_that_cannot_be_rehearsed_costs_a_sentence(runner) -> None:
    script = runner.script("torch.alloc(60)\nprint('mine')\ntorch.alloc(60)\n")

    done = runner.run(str(script), options=())

    assert (done.returncode, done.stdout) == (1, b"mine\n")
    last = done.stderr.decode().split("--format html -o report.html", 1)[1].strip().splitlines()
    assert len(last) == 2
    assert last[0].startswith("Rehearsing it on the CPU and trying changes, for at most 5m")
    assert last[1].startswith("No change could be tried: ")


def test_mistake_in_the_time_is_said_before_the_program_runs(runner) -> None:
    script = runner.script("print('mine')\n")

    done = runner.run(str(script), options=("--rehearse-time", "soon"))

    assert (done.returncode, done.stdout) == (2, b"")
    assert b"'soon' is no time" in done.stderr


def test_program_that_succeeds_is_not_rehearsed(runner) -> None:
    done = runner.run(str(runner.script("torch.alloc(60)\n")), options=())

    assert done.returncode == 0
    assert b"Rehearsing" not in done.stderr


def test_run_leaves_output_and_input_of_the_program_byte_for_byte(runner) -> None:
    script = runner.script(
        "data = sys.stdin.buffer.read()\n"
        "sys.stdout.buffer.write(b'\\xff\\x00' + data[::-1])\n"
        "torch.alloc(1)\nsys.exit(7)\n"
    )

    done = runner.run(str(script), stdin=b"a\x00\xfe\r\n")

    assert (7, b"\xff\x00\n\r\xfe\x00a") == (done.returncode, done.stdout)
    assert ["exit"] == without_pid(runner.bundles())


def test_run_of_a_program_that_catches_its_failures_limits_their_bundles(runner) -> None:
    script = runner.script(
        "torch.alloc(50)\n"
        "for _ in range(20):\n"
        "    try: torch.alloc(60)\n"
        "    except torch.OutOfMemoryError: pass\n"
    )

    done = runner.run(str(script))

    assert 0 == done.returncode
    assert ["exit", "oom1", "oom2", "oom3"] == without_pid(runner.bundles())
    assert b"17 further out-of-memory errors" in done.stderr
    assert 20 == runner.manifest(runner.bundles()[0])["n_ooms"]


def test_run_tells_the_last_failure_although_its_bundle_was_one_too_many(runner) -> None:
    script = runner.script(
        "torch.alloc(50)\n"
        "for _ in range(3):\n"
        "    try: torch.alloc(60)\n"
        "    except torch.OutOfMemoryError: pass\n"
        "torch.alloc(70)\n"
    )

    done = runner.run(str(script))

    first = done.stderr.decode().split("the one that explains most first:\n  ")[1].split("\n")[0]
    assert "exit-pid" in first
    assert "70.00 MiB" in (runner.home / first / "oom.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("", "used no GPU"),
        ("torch.cuda.init()", "reserved no memory on a GPU"),
        ("torch.alloc(1); os._exit(0)", "ended by os._exit"),
    ],
)
def test_run_where_nothing_was_recorded_says_why_and_exits_with_2(runner, body, word) -> None:
    done = runner.run(str(runner.script(body)))

    assert 2 == done.returncode
    assert [] == runner.bundles()
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("Nothing was recorded: ")
    assert word in line


def test_run_without_cuda_says_so_and_exits_with_2(runner) -> None:
    done = runner.run(str(runner.script("print('trained')")), FAKE_CUDA="")

    assert (2, b"trained\n") == (done.returncode, done.stdout)
    assert b"PyTorch 2.12.1+fake is built without CUDA; fragdoctor rehearse" in done.stderr


def test_run_of_a_failing_program_keeps_its_code_where_nothing_was_recorded(runner) -> None:
    done = runner.run("--", sys.executable, "-c", "raise SystemExit(9)")

    assert 9 == done.returncode
    assert b"the program did not import torch" in done.stderr


def test_run_in_a_python_without_pytorch_names_that_python(runner) -> None:
    words = "import sys; sys.path[:] = []; import torch"

    done = runner.run("--", sys.executable, "-c", words)

    assert 1 == done.returncode
    assert b"No module named 'torch'" in done.stderr
    assert f"the program's Python, {sys.executable}, has no PyTorch.".encode() in done.stderr


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_run_of_a_python_that_ignores_its_environment_says_so(runner, flag) -> None:
    done = runner.run("--", sys.executable, flag, "-c", "pass")

    assert 2 == done.returncode
    assert b"no Python 3.9 or newer started that reads PYTHONPATH" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("no_such_script.py",), b"no_such_script.py does not exist."),
        (("--", "no-such-program"), b"no-such-program is not a program that can be started."),
    ],
)
def test_run_of_what_is_not_there_is_one_sentence_and_2(runner, words, sentence) -> None:
    done = runner.run(*words)

    assert 2 == done.returncode
    assert sentence in done.stderr
    assert b"Traceback" not in done.stderr


def test_run_of_a_module_passes_its_arguments_on(runner) -> None:
    runner.script("torch.alloc(1); print(sys.argv[1:], __name__)", name="pack.py")

    done = runner.run("-m", "pack", "--lr", "3", "-o", "x", options=("--no-diagnosis",))

    assert (0, b"['--lr', '3', '-o', 'x'] __main__\n") == (done.returncode, done.stdout)


def test_run_leaves_path_and_environment_of_the_program_alone(runner) -> None:
    script = runner.script("torch.alloc(1)\nprint(sys.path)\nprint(os.environ.get('OMP_X'))")
    direct = subprocess.run(
        [sys.executable, str(script)], env=runner.environment(), capture_output=True, check=True
    )

    done = runner.run(str(script))

    assert direct.stdout == done.stdout


def test_run_runs_the_sitecustomize_of_the_program(runner) -> None:
    home = runner.home / "site"
    home.mkdir()
    (home / "sitecustomize.py").write_text("import sys; sys.was_here = __file__\n")
    script = runner.script("torch.alloc(1)\nprint(sys.was_here)\nimport sitecustomize as s\n")

    done = runner.run(str(script), PYTHONPATH=f"{home}{os.pathsep}{FAKE}")

    assert f"{home / 'sitecustomize.py'}\n" == done.stdout.decode()
    assert ["exit"] == without_pid(runner.bundles())


@pytest.mark.slow
def test_run_of_torchrun_children_names_ranks_and_the_first_failure_first(runner) -> None:
    worker = runner.script("torch.alloc(int(sys.argv[1]))\ntorch.alloc(60)\n", "worker.py")
    script = runner.script(
        "import subprocess\n"
        f"for rank, size in (('0', '1'), ('1', '60')):\n"
        "    env = {**os.environ, 'RANK': rank, 'LOCAL_RANK': rank, 'WORLD_SIZE': '2'}\n"
        f"    subprocess.run([sys.executable, {str(worker)!r}, size], env=env)\n"
    )

    done = runner.run(str(script))

    assert ["rank0-exit", "rank1-oom1"] == without_pid(runner.bundles())
    assert (1, 2) == tuple(
        runner.manifest(runner.bundles()[1])[key] for key in ("rank", "world_size")
    )
    assert b"the one that explains most first:\n  out/rank1-oom1-pid" in done.stderr


@pytest.mark.slow
def test_run_of_forked_children_leaves_a_bundle_of_those_that_use_the_gpu(runner) -> None:
    script = runner.script(
        "import multiprocessing as m\n"
        "def work(n):\n"
        "    if n: torch.alloc(n)\n"
        "if __name__ == '__main__':\n"
        "    ps = [m.get_context('fork').Process(target=work, args=(n,)) for n in (0, 5)]\n"
        "    [p.start() for p in ps]; [p.join() for p in ps]\n"
        "    print([p.exitcode for p in ps])\n"
    )

    done = runner.run(str(script))

    assert b"[0, 0]\n" == done.stdout
    assert ["exit"] == without_pid(runner.bundles())


@pytest.mark.slow
def test_run_leaves_nothing_of_children_forked_after_the_gpu_was_used(runner) -> None:
    script = runner.script(
        "torch.alloc(1)\nif os.fork() == 0:\n    sys.exit(0)\nos.wait()\nprint(os.getpid())\n"
    )

    done = runner.run(str(script))

    assert [f"exit-pid{done.stdout.decode().strip()}"] == runner.bundles()


@pytest.mark.slow
def test_run_with_zip_leaves_one_file_that_analyze_reads(runner) -> None:
    script = runner.script("torch.alloc(60)\ntorch.alloc(60)\n")

    runner.run(str(script), options=("--no-diagnosis", "--zip"))

    (name,) = runner.bundles()
    assert zipfile.is_zipfile(runner.out / name)
    assert Cause.CAPACITY is diagnose(runner.out / name).verdict.cause


def test_run_names_its_directory_after_the_program_and_overwrites_nothing(runner) -> None:
    runner.script("torch.alloc(1)", "my train.py")
    argv = [sys.executable, "-m", "fragdoctor", "run", "--no-diagnosis", "my train.py"]

    for _ in range(2):
        subprocess.run(argv, env=runner.environment(), cwd=runner.home, check=True)

    names = [p.name for p in runner.home.iterdir() if p.name.startswith("fragdoctor-my-train-")]
    assert 2 == len(names)


def test_run_puts_the_source_of_the_lines_into_the_bundle_unless_told_not_to(runner) -> None:
    script = runner.script("torch.alloc(60)\ntorch.alloc(60)\n")

    runner.run(str(script), options=("-q",))
    runner.run(str(script), options=("-q", "--no-sources", "--no-census"))

    first, second = sorted(runner.bundles(), key=lambda b: (runner.out / b).stat().st_mtime_ns)
    lines = json.loads((runner.out / first / "sources.json").read_text(encoding="utf-8"))["files"]
    assert "torch.alloc(60)" in lines[str(script)].values()
    assert not (runner.out / second / "sources.json").exists()


def test_run_whose_snapshot_fails_keeps_the_rest_and_the_program_unaware(runner) -> None:
    script = runner.script("torch.alloc(60)\ntorch.alloc(60)\n")

    done = runner.run(str(script), options=("-q",), FAKE_DUMP_FAILS="1")

    assert 1 == done.returncode
    (bundle,) = runner.bundles()
    manifest = runner.manifest(bundle)
    assert ["stats.json", "sources.json", "oom.txt"] == manifest["files"]
    assert ["snapshot.pickle: RuntimeError: the snapshot cannot be taken"] == manifest["problems"]
    assert b"Not enough capacity" in done.stderr  # the message alone tells as much


def test_run_into_a_place_that_cannot_be_written_keeps_the_program_unaware(runner) -> None:
    runner.out.mkdir()
    script = runner.script(
        f"os.rmdir({str(runner.out)!r}); open({str(runner.out)!r}, 'w').close()\n"
        "torch.alloc(1)\nprint('done')\n"
    )

    done = runner.run(str(script))

    assert b"done\n" == done.stdout
    assert b"Nothing was recorded: " in done.stderr
    assert b"Traceback" not in done.stderr


SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)


def _by_default() -> None:
    """Undo what the suite itself was started with: nohup and & let children ignore signals."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _under_nohup() -> None:
    _by_default()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _signalled(
    runner: Runner,
    body: str,
    *numbers: int,
    before: Callable[[], None] = _by_default,
    options: tuple[str, ...] = ("--no-diagnosis",),
    **env: str,
) -> tuple[int, str, str]:
    """Send signals to a program that is ready, or that writes its bundle if that takes time."""
    script = runner.script(f"torch.alloc(1)\n{body}")
    child = subprocess.Popen(
        runner.argv(str(script), options=options),
        env=runner.environment(**env),
        cwd=runner.home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=before,  # noqa: PLW1509 - no thread of the suite holds a lock it needs
    )
    try:
        assert child.stdout is not None
        assert "ready\n" == child.stdout.readline()
        while env and not any(p.name.startswith(".exit") for p in runner.out.glob(".*")):
            time.sleep(0.01)
        for number in numbers:
            child.send_signal(number)
        out, err = child.communicate(timeout=120)
    finally:
        child.kill()
    return child.returncode, out, err


WAITS = "print('ready', flush=True)\nfor _ in range(300): time.sleep(0.1)\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_run_of_a_program_that_a_signal_ends_leaves_a_bundle_and_its_code(runner, name) -> None:
    number = getattr(signal, name)

    code, _, err = _signalled(runner, WAITS, number)

    assert 128 + number == code
    assert ("KeyboardInterrupt" in err) == (name == "SIGINT")
    (bundle,) = runner.bundles()
    assert bundle.startswith(f"{name.lower()}-pid")
    manifest = runner.manifest(bundle)
    assert ("signal", name) == (manifest["reason"], manifest["signal"])


def test_run_that_was_told_to_ignore_hangups_goes_on(runner) -> None:
    code, _, _ = _signalled(runner, WAITS, signal.SIGHUP, signal.SIGTERM, before=_under_nohup)

    assert 143 == code
    assert ["sigterm"] == without_pid(runner.bundles())


def test_run_of_a_program_that_ignores_hangups_goes_on(runner) -> None:
    script = runner.script(
        "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\ntorch.alloc(1)\n"
        "os.kill(os.getpid(), signal.SIGHUP)\nprint('on')"
    )

    done = runner.run(str(script))

    assert (0, b"on\n") == (done.returncode, done.stdout)
    assert ["exit"] == without_pid(runner.bundles())


def test_run_leaves_the_program_its_own_handler_and_hides_that_of_the_recorder(runner) -> None:
    script = runner.script(
        "torch.alloc(1)\nimport signal\n"
        "def mine(number, frame): print('mine'); sys.exit(5)\n"
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)\n"
        "print(signal.signal(signal.SIGTERM, mine) is signal.SIG_DFL)\n"
        "os.kill(os.getpid(), 15)\ntime.sleep(9)\n"
    )

    done = runner.run(str(script))

    assert (5, b"True\nTrue\nmine\n") == (done.returncode, done.stdout)
    assert ["exit"] == without_pid(runner.bundles())


@pytest.mark.slow
def test_run_of_a_program_that_hangs_outside_python_still_dies_of_sigterm(runner) -> None:
    # A mutex that is locked twice: no signal makes the call return, as in a hanging collective.
    body = (
        "import ctypes\nlibc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "libc.pthread_mutex_lock(mutex)\nprint('ready', flush=True)\n"
        "libc.pthread_mutex_lock(mutex)\n"
    )

    code, _, _ = _signalled(runner, body, signal.SIGTERM)

    assert 143 == code
    assert ["sigterm"] == without_pid(runner.bundles())


@pytest.mark.slow
def test_run_of_a_program_terminated_while_a_bundle_is_written_completes_it(runner) -> None:
    body = "print('ready', flush=True)\n"

    code, _, _ = _signalled(runner, body, signal.SIGTERM, FAKE_DUMP_SECONDS="2")

    assert 143 == code
    assert ["exit"] == without_pid(runner.bundles())


def test_run_of_a_very_long_command_starts_it_as_ever(runner) -> None:
    script = runner.script("print(len(sys.argv))", "long.py")

    result = runner.run(str(script), *["--name=value"] * 40_000)

    assert result.stdout == b"40001\n"


def test_run_around_another_run_says_that_the_inner_one_records(runner) -> None:
    script = runner.script("torch.cuda.init()\n")
    inner = runner.home / "inner"

    result = runner.run(
        "--", sys.executable, "-m", "fragdoctor", "run", "-o", str(inner), str(script)
    )

    assert b"the fragdoctor run inside the program records by itself" in result.stderr


HOLES = {"FAKE_HOLES_MB": "60", "FAKE_DUMP_FAILS": "1"}  # the message alone is diagnosed
CURE = ("--cure", "--no-diagnosis")
FAILS = "torch.alloc(10)\nprint(os.environ.get('PYTORCH_CUDA_ALLOC_CONF'))\ntorch.alloc(40)\n"


def told(done) -> str:
    return done.stderr.decode()


def test_cure_reruns_under_the_best_setting_and_records_it_beside_the_failure(runner) -> None:
    done = runner.run(
        str(runner.script(FAILS)),
        options=CURE,
        FAKE_CURES="expandable_segments:True=0",
        **HOLES,
    )

    assert (0, b"None\nexpandable_segments:True\n") == (done.returncode, done.stdout)
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    assert f"\nRerun 1 of at most 3, under {setting}\n" in told(done)
    assert f"\nCured: the program finished under {setting}\n" in told(done)
    assert ["oom1", "rerun1"] == without_pid(runner.bundles())
    (again,) = (runner.out / "rerun1").iterdir()
    facts = json.loads((again / "bundle.json").read_text(encoding="utf-8"))
    assert "expandable_segments:True" == facts["environment"]["PYTORCH_CUDA_ALLOC_CONF"]


@pytest.mark.slow
def test_cure_says_which_setting_only_postpones_and_stops_after_three(runner) -> None:
    body = f"{FAILS}torch.alloc(1)\ntorch.alloc(40)\n"

    done = runner.run(
        str(runner.script(body)),
        options=CURE,
        FAKE_CURES="expandable_segments:True=20",
        **HOLES,
    )

    assert 1 == done.returncode
    assert 4 == done.stdout.count(b"\n")
    assert (
        "Rerun 1: out of memory later: 3 allocations served, compared to 1 in the first run."
        in told(done)
    )
    assert "Rerun 2: out of memory at the same point: 1 allocation served" in told(done)
    assert "Not cured, only postponed: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in told(
        done
    )


@pytest.mark.slow
def test_cure_stops_where_the_program_ends_for_another_reason(runner) -> None:
    body = f"{FAILS}sys.exit(7)\n"

    done = runner.run(
        str(runner.script(body)), options=CURE, FAKE_CURES="expandable_segments:True=0", **HOLES
    )

    assert 7 == done.returncode
    assert 2 == done.stdout.count(b"\n")
    assert "Rerun 1: the program ended with exit code 7, but not out of memory." in told(done)


@pytest.mark.slow
def test_cure_goes_on_after_a_setting_that_stops_the_program_before_it_uses_the_gpu(runner) -> None:
    body = "if 'expandable' in os.environ.get('PYTORCH_CUDA_ALLOC_CONF', ''): sys.exit(3)\n" + FAILS

    done = runner.run(
        str(runner.script(body)), options=CURE, FAKE_CURES="max_split_size_mb:32=0", **HOLES
    )

    assert 0 == done.returncode
    assert "Rerun 1: the program ended with exit code 3 before it used the GPU." in told(done)
    assert "max_split_size_mb:32" in told(done).splitlines()[-1]


def test_cure_says_that_a_program_with_settings_of_its_own_ignores_them(runner) -> None:
    body = f"os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'roundup_power2_divisions:4'\n{FAILS}"

    done = runner.run(str(runner.script(body)), options=CURE, **HOLES)

    assert 1 == done.returncode
    assert 2 == done.stdout.count(b"\n")
    assert "the program sets PYTORCH_CUDA_ALLOC_CONF itself" in told(done)


@pytest.mark.slow
def test_cure_replaces_the_other_variables_of_the_allocator(runner) -> None:
    body = f"print(os.environ.get('PYTORCH_ALLOC_CONF'))\n{FAILS}"

    done = runner.run(
        str(runner.script(body)),
        options=CURE,
        PYTORCH_ALLOC_CONF="max_split_size_mb:512",
        FAKE_CURES="expandable_segments:True=0",
        **HOLES,
    )

    assert b"max_split_size_mb:512\nNone\nNone\nexpandable_segments:True\n" == done.stdout


@pytest.mark.slow
def test_cure_gives_each_rerun_the_input_of_the_first(runner, tmp_path) -> None:
    source = tmp_path / "input.txt"
    source.write_text("words\n", encoding="utf-8")
    script = runner.script(f"print(sys.stdin.read(), end='')\n{FAILS}")

    with source.open("rb") as file:
        done = runner.run(
            str(script), options=CURE, stdin=file, FAKE_CURES="expandable_segments:True=0",
            **HOLES,
        )  # fmt: skip

    assert 2 == done.stdout.count(b"words\n")


@pytest.mark.parametrize(
    ("body", "code", "sentence"),
    [
        ("torch.alloc(1)\n", 0, ""),
        ("torch.alloc(1)\nsys.exit(5)\n", 5, "the program did not run out of memory."),
        ("torch.alloc(90)\ntorch.alloc(90)\n", 1, "no setting that goes into an environment"),
    ],
)
def test_cure_reruns_nothing_where_no_setting_can_help(runner, body, code, sentence) -> None:
    done = runner.run(str(runner.script(body)), options=CURE)

    assert code == done.returncode
    assert "Rerun" not in told(done)
    assert sentence in told(done)


def test_cure_reruns_nothing_after_ctrl_c(runner) -> None:
    body = "try: torch.alloc(200)\nexcept torch.OutOfMemoryError: pass\n" + WAITS

    code, _, err = _signalled(runner, body, signal.SIGINT, options=CURE)

    assert 130 == code
    assert "Nothing was rerun: the program was stopped." in err
    assert "Rerun 1" not in err


def test_reason_that_ends_in_a_full_stop_gets_no_second_one() -> None:
    """The allocator cudaMallocAsync says so itself that it cannot record."""
    reached = Reached(n_started=1, torch="2.11.0 13.0", problems=("RuntimeError: no history.",))

    assert reached.why_nothing(Ended(1, False)) == "Nothing was recorded: RuntimeError: no history."


def test_program_that_was_stopped_at_once_is_not_said_to_have_no_python() -> None:
    told = Reached().why_nothing(Ended(1, was_asked_to=True))

    assert told == "Nothing was recorded: the program was stopped before Python had started."
