"""Random corruptions through the extension; tests/native does many more under sanitizers."""

from __future__ import annotations

import json
import random

import pytest
from builders import cpp_pickled, pickled, small

from fragdoctor.errors import InputError
from fragdoctor.inputs.snapshot_reader import read_snapshot

SEEDS = {
    "python": pickled(small()),
    "c++": cpp_pickled(small()),
    "json": json.dumps(small()).encode(),
}


@pytest.mark.parametrize("writer", SEEDS)
def test_corrupted_file_gives_an_error_or_a_snapshot(writer):
    chance = random.Random(7)

    for _ in range(2000):
        raw = bytearray(SEEDS[writer])
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(2, len(raw))
            if chance.random() < 0.3:
                del raw[at : at + chance.randint(1, 9)]
            else:
                raw[at] = chance.randrange(256)
        try:
            read_snapshot(bytes(raw))
        except InputError as error:
            assert error.exit_code in {2, 3}  # noqa: PT017
            assert error.offset is not None  # noqa: PT017
