"""Every file of the catalogue is turned away: right error, offset, one line, little memory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from catalogue import catalogue

from fragdoctor.errors import InputError
from fragdoctor.inputs.snapshot_reader import read_snapshot

CATALOGUE = catalogue()
UNIT = 1 if sys.platform == "darwin" else 1024


def test_catalogue_size_is_at_least_sixty():
    names = [name for name, _, _ in CATALOGUE]

    assert len(names) >= 60
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("name", "data", "error"), CATALOGUE, ids=[e[0] for e in CATALOGUE])
def test_hostile_file_is_turned_away(name, data, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = data() if callable(data) else data
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT

    with pytest.raises(error) as caught:
        read_snapshot(data)

    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT - before
    assert growth < 200 * 2**20
    assert caught.value.exit_code in (2, 3)
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= max(len(data), 200 * 2**20)
    assert caught.value.message.endswith(".")
    assert "\n" not in caught.value.message
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_global_is_named_in_the_sentence():
    attack = next(data for name, data, _ in CATALOGUE if name == "opcode STACK_GLOBAL")

    with pytest.raises(InputError, match=r"names the global os\.system .* nothing was executed"):
        read_snapshot(attack)
