"""The census of a bundle, as written and as someone may have written it."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from fragdoctor.errors import InputError
from fragdoctor.inputs.census_reader import read_censuses, read_source_lines
from fragdoctor.model.census import HoldingKind

OWNER = {"name": "agent.buffer", "kind": "container", "n_items": 3, "max_items": 9,
         "class_name": "list", "scope": "train()", "place": ["rl.py", 25, "train"]}  # fmt: skip
CENSUS = {"time_us": 5, "step": 2, "is_complete": True, "owners": [OWNER], "devices": [0, 0],
          "addresses": [1 << 63, 4096], "sizes": [512, 1024], "holders": [0, -1]}  # fmt: skip


def read(*censuses: Any) -> Any:
    value = {"format": "fragdoctor-census", "version": 1, "censuses": list(censuses)}
    return read_censuses(io.BytesIO(json.dumps(value).encode()))


def test_census_is_read_as_it_was_written():
    (found,) = read(CENSUS)

    (owner,) = found.owners
    assert (owner.name, owner.kind, owner.n_items) == ("agent.buffer", HoldingKind.CONTAINER, 3)
    assert owner.max_items == 9
    assert str(owner.place) == "rl.py:25 in train"
    assert found.address.tolist() == [1 << 63, 4096]
    assert found.bytes_by_owner == [512]


def test_censuses_come_in_the_order_of_time():
    assert [c.time_us for c in read({**CENSUS, "time_us": 9}, CENSUS)] == [5, 9]


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [1]}, {"sizes": "many"}, {"sizes": [True, 1]}, {"addresses": [-1, 2]},
        {"addresses": [1 << 70, 2]}, {"devices": [0.5, 1]}, {"holders": None},
    ],
)  # fmt: skip
def test_columns_that_do_not_fit_are_left_out(change: dict[str, Any]):
    assert read({**CENSUS, **change}) == ()


def test_owner_that_makes_no_sense_is_nobody_and_places_beyond_it_are_unknown():
    (found,) = read({**CENSUS, "owners": [7], "holders": [0, 99]})

    assert found.owners[0].name == ""
    assert found.holder.tolist() == [0, -1]


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"format": "fragdoctor-census", "version": 2}'])
def test_what_is_no_census_is_said(data: bytes):
    with pytest.raises(InputError):
        read_censuses(io.BytesIO(data))


def test_source_lines_are_read_and_odd_ones_left_out():
    files = {"train.py": {"25": "loss = f(x)", "x": "no", "7": 3}, "other.py": "no"}
    value = {"format": "fragdoctor-sources", "version": 1, "files": files}

    found = read_source_lines(io.BytesIO(json.dumps(value).encode()))

    assert found == {"train.py": {25: "loss = f(x)"}, "other.py": {}}
