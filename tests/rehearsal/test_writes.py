"""What the program changes stays in a scratch folder, and the program does not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rehearsal_stage import Stage


def without_fence() -> str:
    """Return why there is no fence here; asked in a process of its own, as it stays."""
    code = "from fragdoctor.rehearsal.fence import restrict_writes; print(restrict_writes(['/']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


WRITES = """
    import glob, os, pathlib, shutil, torch

    net = torch.nn.Linear(512, 512).cuda()
    os.makedirs("ck/sub", exist_ok=True)
    saved = {"net": net.state_dict(), "step": 3, "draws": torch.get_rng_state()}
    torch.save(saved, "ck/sub/3.pt")
    drawn = torch.rand(3)
    assert glob.glob("ck/**/*.pt") == ["ck/sub/3.pt"] and os.listdir("ck") == ["sub"]
    found = torch.load("ck/sub/3.pt")
    assert found["step"] == 3 and found["net"]["weight"].is_cuda
    net.load_state_dict(found["net"])
    torch.set_rng_state(found["draws"])
    assert torch.equal(torch.rand(3), drawn)
    with open("log.txt", "a") as log:
        log.write("more")
    assert open("log.txt").read() == "old more"
    pathlib.Path("a.json").write_text("{}")
    os.rename("a.json", "b.json")
    assert not os.path.exists("a.json") and "b.json" in os.listdir(".")
    os.remove("old.txt")
    shutil.rmtree("old")
    assert not os.path.exists("old.txt") and not os.path.exists("old")
    shutil.rmtree("ck")
    assert not os.path.exists("ck/sub/3.pt")
"""


def prepared(stage: Stage) -> dict[str, str]:
    (stage.home / "old").mkdir()
    for name, text in {"old.txt": "kept", "old/in.txt": "kept", "log.txt": "old "}.items():
        (stage.home / name).write_text(text)
    stage.script(WRITES)
    return {str(p.relative_to(stage.home)): p.read_text() for p in files(stage)}


def files(stage: Stage) -> list:
    return sorted(p for p in stage.home.rglob("*") if p.is_file() and p.suffix != ".pickle")


def test_nothing_is_changed_outside_of_the_scratch_folder(stage: Stage) -> None:
    before = prepared(stage)

    found = stage.json("train.py", apart=True)

    assert {str(p.relative_to(stage.home)): p.read_text() for p in files(stage)} == before
    note = "Checkpoints are written without values, except of small tensors on the CPU."
    assert note in found["rehearsal"]["notes"]


@pytest.mark.slow
def test_with_leave_files_are_changed(stage: Stage) -> None:
    prepared(stage)

    stage.json("train.py", "--allow-writes")

    assert [p.name for p in files(stage)] == ["b.json", "log.txt", "train.py"]
    assert (stage.home / "log.txt").read_text() == "old more"


UNUSUAL = """
    import bz2, io, os, pathlib, posix, sqlite3, subprocess, tarfile, tempfile, torch

    here, x = os.getcwd(), torch.ones(4, device="cuda")
    net = torch.jit.script(torch.nn.Linear(4, 4).cuda())
    torch.jit.save(net, "a.pt")
    net.save("b.pt")
    assert torch.jit.load("a.pt", map_location="cpu")(torch.ones(1, 4)).shape == (1, 4)
    exported = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(1, 4),))
    torch.export.save(exported, "c.pt2")
    assert torch.export.load("c.pt2")
    with torch.profiler.profile() as profiler:
        x * 2
    profiler.export_chrome_trace("trace.json")
    assert os.path.getsize("trace.json")
    torch.from_file("old.txt", shared=True, size=1, dtype=torch.float32).fill_(7)
    assert torch.from_file("old.txt", size=1).item() == 7

    os.symlink(here + "/log.txt", "link")
    pathlib.Path("link").write_text("by a link")
    assert open("log.txt").read() == "by a link"
    open("/proc/self/cwd/proc.txt", "w").write("x")
    assert open("proc.txt").read() == "x"
    os.mkfifo("fifo")
    os.mknod("node")
    assert os.path.exists("fifo") and os.path.exists("node")

    scratch = tempfile.mkdtemp()
    os.rename("log.txt", scratch + "/log.txt")
    assert not os.path.exists("log.txt") and open(scratch + "/log.txt").read() == "by a link"
    os.rename("old", "moved")
    open("moved/in.txt", "a").write("more")
    assert os.listdir("moved") == ["in.txt"] and not os.path.exists("old")
    os.unlink("old.txt", dir_fd=os.open(".", os.O_RDONLY))
    assert "old.txt" not in os.listdir(".")
    os.chmod(os.open("train.py", os.O_RDONLY), 0o700)

    assert sqlite3.connect(":memory:").execute("select 1").fetchone() == (1,)
    with sqlite3.connect("log.sqlite") as database:
        database.execute("create table steps (n int)")
        database.execute("insert into steps values (3)")
    reading = sqlite3.connect("file:log.sqlite?mode=ro", uri=True)
    assert reading.execute("select n from steps").fetchall() == [(3,)]
    with tarfile.open("all.tar.gz", "w:gz") as archive:
        archive.add("train.py")
    assert tarfile.open("all.tar.gz").getnames() == ["train.py"]
    bz2.open("text.bz2", "wb").write(b"x")
    io.FileIO("raw.bin", "w").write(b"abc")
    assert io.FileIO("raw.bin").read() == b"abc"
    assert isinstance(open("raw.bin", "rb").raw, io.FileIO)
    try:
        posix.rename(here + "/train.py", scratch + "/train.py")
    except PermissionError as error:
        assert "--allow-writes" in str(error)
    else:
        raise AssertionError("a real file was lost")
"""


def test_what_is_written_in_unusual_ways_stays_in_the_scratch_folder(stage: Stage) -> None:
    prepared(stage)
    stage.script(UNUSUAL)
    before = {str(p.relative_to(stage.home)): p.read_bytes() for p in everything(stage)}
    modes = {p: p.stat().st_mode for p in everything(stage)}

    stage.json("train.py")

    assert {str(p.relative_to(stage.home)): p.read_bytes() for p in everything(stage)} == before
    assert {p: p.stat().st_mode for p in everything(stage)} == modes


MOVING = """
    import os, torch

    here = os.getcwd()
    os.makedirs("runs/1")
    os.chdir("runs/1")
    assert os.getcwd() == here + "/runs/1" and os.getcwdb() == os.fsencode(os.getcwd())
    assert open("../../old.txt").read() == "kept"
    open("../../old/new.txt", "a").write("new")
    open("mine.txt", "w").write("mine")
    assert open(here + "/runs/1/mine.txt").read() == open("mine.txt").read() == "mine"
    os.chdir(here)
    open("old/in.txt", "a").write(" and more")
    assert open("old/in.txt").read() == "kept and more" and open("log.txt").read() == "old "
    torch.ones(4, device="cuda")
"""


def test_a_program_in_a_folder_of_its_own_finds_what_lies_beside_it(stage: Stage) -> None:
    prepared(stage)
    stage.script(MOVING)

    assert stage.json("train.py")["rehearsal"]["fits"]


def everything(stage: Stage) -> list:
    return sorted(p for p in stage.home.rglob("*") if not p.is_dir() and p.suffix != ".pickle")


@pytest.mark.skipif(bool(without_fence()), reason="the kernel has no Landlock")
def test_programs_and_workers_that_it_starts_are_held_back(stage: Stage) -> None:
    stage.script(
        """
        import subprocess, torch

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 2

            def __getitem__(self, i):
                with open(f"worker{i}.txt", "w") as file:
                    file.write("x")
                return i

        if __name__ == "__main__":
            torch.ones(1, device="cuda")
            done = subprocess.run("echo x > made.txt", shell=True, capture_output=True, text=True)
            assert "ermission denied" in done.stderr, done.stderr
            said = subprocess.run('echo x > "$TMPDIR/a" && cat "$TMPDIR/a"', shell=True,
                                  capture_output=True, text=True)
            assert said.stdout == "x\\n"
            loader = torch.utils.data.DataLoader(
                Data(), num_workers=1, multiprocessing_context="spawn"
            )
            try:
                list(loader)
            except PermissionError:
                pass
        """
    )

    stage.json("train.py", apart=True)

    assert [p.name for p in everything(stage)] == ["train.py"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_program_and_all_that_it_started(
    stage: Stage, tmp_path: Path, number: int
) -> None:
    (tmp_path / "tmp").mkdir()
    stage.script(
        """
        import subprocess, sys, time, torch
        torch.ones(1, device="cuda")
        child = subprocess.Popen(["sleep", "300"])
        print("started", child.pid, flush=True)
        time.sleep(300)
        """
    )
    words = [sys.executable, "-m", "fragdoctor", "rehearse", "--python", sys.executable]
    running = subprocess.Popen(
        [*words, "--verbose", "train.py"], cwd=stage.home, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )  # fmt: skip
    with running.stderr:
        pid = next(int(line.split()[1]) for line in running.stderr if line.startswith("started"))

        running.send_signal(number)

        assert running.wait(timeout=60) == 128 + number
    assert not list((tmp_path / "tmp").iterdir())
    for _ in range(100):  # its new parent may take a moment
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
                time.sleep(0.1)
                continue
        return
    raise AssertionError("what the program started goes on")


def test_files_that_libraries_open_themselves_are_where_the_program_wrote(stage: Stage) -> None:
    """Those of Rust and C++ (here the same in Python) know nothing of what Python is led to."""
    (stage.home / "pyarrow.py").write_text(
        "def memory_map(path, mode='r'):\n    return str(path)\n"
    )
    (stage.home / "tokenizers").mkdir()
    (stage.home / "tokenizers" / "__init__.py").write_text(
        "from . import models\n"
        "class Tokenizer:\n"
        "    def save(self, path, pretty=True):\n"
        "        self.saved = str(path)\n"
        "    @staticmethod\n"
        "    def from_file(path):\n"
        "        return str(path)\n"
    )
    (stage.home / "tokenizers" / "models.py").write_text(
        "class Model:\n    def save(self, folder, prefix=None):\n        return [folder]\n"
    )

    stage.must_pass("""
    import os, torch
    torch.ones(4, device="cuda")
    os.mkdir("out")
    with open("out/table", "w") as file:
        file.write("rows")

    import pyarrow, tokenizers
    scratch = os.path.dirname(pyarrow.memory_map("out/table"))
    assert scratch != "out" and os.path.isdir(scratch)
    tokenizer = tokenizers.Tokenizer()
    tokenizer.save("out/tokenizer.json")
    assert os.path.dirname(tokenizer.saved) == scratch
    assert tokenizers.Tokenizer.from_file(path="out/table") == scratch + "/table"
    assert tokenizers.models.Model().save("out") == [scratch]
    """)

    assert not (stage.home / "out").exists()


def test_modules_that_the_program_writes_can_be_imported(stage: Stage) -> None:
    """Transformers and evaluate copy a model's or a metric's code into a folder of their cache."""
    (stage.home / "real.py").write_text("value = 1\n")

    stage.must_pass("""
    import importlib, os, sys, torch
    torch.ones(4, device="cuda")
    os.makedirs("cache/written")
    for name in ("__init__", "code"):
        with open(f"cache/written/{name}.py", "w") as file:
            file.write("import os\\n" if name == "__init__" else "value = 3\\n")
    sys.path.append(os.path.abspath("cache"))
    importlib.invalidate_caches()
    from written.code import value
    import real, written.code
    assert (value, real.value) == (3, 1)
    assert written.code.__file__ == os.path.abspath("cache/written/code.py")
    with open("real.py", "w") as file:
        file.write("value = 20\\n")
    assert importlib.reload(real).value == 20
    """)
    assert (stage.home / "real.py").read_text() == "value = 1\n"
    assert not (stage.home / "cache").exists()


def test_extensions_are_built_where_a_compiler_finds_their_sources(stage: Stage) -> None:
    stage.must_pass("""
    import os, subprocess, torch
    from torch.utils import cpp_extension
    torch.ones(4, device="cuda")
    folder = cpp_extension._get_build_directory("mine", verbose=False)
    with open(os.path.join(folder, "main.cpp"), "w") as file:
        file.write("int n;")
    made = subprocess.run(["cp", "main.cpp", "main.o"], cwd=folder)
    assert made.returncode == 0
    with open(os.path.join(folder, "main.o")) as file:
        assert file.read() == "int n;"
    """)
