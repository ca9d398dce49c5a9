"""Programs to rehearse, in this Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

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


class Stage:
    """A folder with programs, and the command line that rehearses them."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def script(self, body: str, name: str = "train.py") -> Path:
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(body), encoding="utf-8")
        return path

    def run(self, *words: str, python_path: str = "") -> subprocess.CompletedProcess[str]:
        cleared = {k: v for k, v in os.environ.items() if not k.startswith(("PYTORCH", "CUDA"))}
        return subprocess.run(
            [sys.executable, "-m", "fragdoctor", "rehearse", "--python", sys.executable, *words],
            cwd=self.home,
            env={**cleared, "COLUMNS": "80", "PYTHONPATH": python_path},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def json(self, *words: str, code: int = 0) -> dict[str, Any]:
        done = self.run("--format", "json", *words)
        assert done.returncode == code, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def must_pass(self, body: str, *options: str) -> dict[str, Any]:
        """Rehearse a program whose assertions must hold."""
        self.script(body)
        return self.json("--verbose", *options, "train.py")
