"""Fixtures of the rehearsals' tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal_stage import TRAINING, Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    pytest.importorskip("torch")
    return Stage(tmp_path)


@pytest.fixture
def training(stage: Stage) -> Stage:
    stage.script(TRAINING + "\n    train()\n")
    return stage
