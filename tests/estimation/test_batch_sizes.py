"""Batch sizes from names and from the command line."""

from __future__ import annotations

import pytest

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.recordings import batch_in_name, parse_batches


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("batch8.pickle", 8),
        ("runs/bs_16/snapshot.pickle", 16),
        ("b32-long.pickle.gz", 32),
        ("gpt_batch_size=64.pickle", 64),
        ("gpt-8bs.pickle", 8),
        ("micro_batch4/snap.pickle", 4),
        ("run3.pickle", None),
        ("web32.pickle", None),
        ("b8_b16.pickle", None),
        ("snapshot.pickle", None),
    ],
)
def test_batch_in_name(name, batch):
    assert batch_in_name(name) == batch


@pytest.mark.parametrize("text", ["", "4,x", "0,4", "-1", "4.5", "99999999999"])
def test_wrong_batches_are_refused(text):
    with pytest.raises(ConfigError, match="not a list"):
        parse_batches(text)


def test_batches_are_read_in_order():
    assert parse_batches("16, 4,8") == (16.0, 4.0, 8.0)
