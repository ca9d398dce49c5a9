"""Tools for rehearsing programs in tests, with this Python."""

from __future__ import annotations

import atexit
import io
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fragdoctor.cli.app import main
from fragdoctor.rehearsal import runner, sweep
from fragdoctor.rehearsal.prescription import search
from fragdoctor.rehearsal.process import OnStep, RehearsalConditions, Runs
from fragdoctor.rehearsal.programs import Program

TRAINING = """
    import torch
    from torch import nn

    def train(n_steps=1000, batch=64):
        net = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
        optimizer = torch.optim.AdamW(net.parameters())
        for step in range(n_steps):
            x = torch.randn(batch, 1024, device="cuda")
            loss = (net(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print("loss", loss.item())
"""


IMPORTS = """
import torch
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

torch.optim.SGD([torch.ones(1, device="cuda", requires_grad=True)], 0.1).step()
"""
"""A program that loads most of what PyTorch loads for the programs here."""


class PreparedRuns:
    """Runs in forks of processes that have imported PyTorch, one per test worker and machine kind.

    A fork behaves like a new process; ``test_forks_do_what_new_processes_do`` verifies this.
    """

    def __init__(self, imports: str = IMPORTS) -> None:
        self._imports = imports
        self._of_machines: dict[tuple[object, ...], Runs] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="fragdoctor-", ignore_cleanup_errors=True)
        self.place = Path(self._folder.name)  # of all machines, as their runs follow each other
        self.blocker = ""

    def run(
        self,
        program: Program,
        conditions: RehearsalConditions,
        python: str,
        on_step: OnStep | None = None,
    ) -> tuple[int, str]:
        machine = (conditions.n_devices, conditions.torch_version, conditions.allows_writes)
        runs = self._of_machines.get(machine)
        if runs is None:
            runs = self._of_machines[machine] = Runs(forks=True)
            runs.place = self.place
            atexit.register(runs.__exit__)
            with tempfile.TemporaryDirectory() as folder:
                first = Path(folder, "imports.py")
                first.write_text(self._imports, encoding="utf-8")
                plain = replace(conditions, conf="")  # or all forks would have this run's settings
                runs.run(Program(str(first), False, [], [python]), plain, python)
        return runs.run(program, conditions, python, on_step)


PREPARED = PreparedRuns()
COMPILING = PreparedRuns(f"{IMPORTS}import torch._inductor.compile_fx\n")


def use_prepared(patch: pytest.MonkeyPatch, prepared: PreparedRuns = PREPARED) -> None:
    """Make this process rehearse in forks of the prepared processes."""
    for module in (runner, search, sweep):
        patch.setattr(module, "Runs", lambda **_: nullcontext(prepared))


class Stage:
    """A folder with programs, and the command line that rehearses them."""

    def __init__(self, home: Path, prepared: PreparedRuns = PREPARED) -> None:
        self.home = home
        self.prepared = prepared

    def script(self, body: str, name: str = "train.py") -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(body), encoding="utf-8")
        return path

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run the command in this process, and the program in a fork of one that has PyTorch."""
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        with pytest.MonkeyPatch.context() as patch:
            use_prepared(patch, self.prepared)
            patch.chdir(self.home)
            for name in set(os.environ) - set(_environment("")):
                patch.delenv(name)
            patch.setenv("COLUMNS", "80")
            with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
                main(_words(words))
        said, told = (stream.buffer.getvalue().decode() for stream in (out, err))
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), said, told)

    def run_apart(self, *words: str, python_path: str = "") -> subprocess.CompletedProcess[str]:
        """Rehearse like a user: with a new process for the command, and one for the program."""
        return subprocess.run(
            [sys.executable, "-m", "fragdoctor", *_words(words)],
            cwd=self.home,
            env=_environment(python_path),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def json(self, *words: str, code: int = 0, apart: bool = False) -> dict[str, Any]:
        done = (self.run_apart if apart else self.run)("--format", "json", *words)
        assert done.returncode == code, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def must_pass(self, body: str, *options: str) -> dict[str, Any]:
        """Rehearse a program whose assertions must hold."""
        self.script(body)
        return self.json(*options, "train.py")


def _words(words: tuple[str, ...]) -> list[str]:
    return ["rehearse", "--python", sys.executable, *words]


def _environment(python_path: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTORCH", "CUDA"))}
    return {**kept, "COLUMNS": "80", "PYTHONPATH": python_path}
