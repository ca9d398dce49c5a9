"""A stand-in for PyTorch with CUDA, for tests of what runs inside the user's program."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from fragdoctor.recording import history_recorder

FAKE = Path(__file__).parent / "capture" / "fake" / "torch.py"


@pytest.fixture
def fake_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Replace torch by the stand-in; recordings that a test leaves running are discarded."""
    spec = importlib.util.spec_from_file_location("torch", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "torch", module)
    yield module
    history_recorder._watchers.clear()
    history_recorder._observed[:] = [
        seen for seen in history_recorder._observed if seen is not module
    ]
