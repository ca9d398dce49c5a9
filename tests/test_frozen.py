"""A frozen class is a frozen dataclass with slots, made in less time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.frozen import frozen


@dataclass(frozen=True, slots=True)
class Usual:
    name: str
    sizes: tuple[int, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.strip())


@frozen
class Made:
    name: str
    sizes: tuple[int, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.strip())


@frozen(eq=False, kw_only=True)
class Single:
    value: int


values = st.tuples(st.sampled_from(["a", " a", "b"]), st.lists(st.integers(0, 2)).map(tuple))


@given(values, values)
def test_is_equal_hashed_and_shown_as_a_dataclass(
    a: tuple[str, tuple[int, ...]], b: tuple[str, tuple[int, ...]]
) -> None:
    assert (Usual(*a) == Usual(*b)) == (Made(*a) == Made(*b))
    assert hash(Usual(*a)) == hash(Made(*a))
    assert repr(Usual(*a)).removeprefix("Usual") == repr(Made(*a)).removeprefix("Made")
    assert asdict(Usual(*a)) == asdict(Made(*a))


def test_is_a_dataclass_to_all_who_ask() -> None:
    value = Made("x", (1,), {"k": 2})
    assert is_dataclass(value)
    assert ["name", "sizes", "notes"] == [f.name for f in fields(value)]
    assert Made("y", (1,), {"k": 3}) == replace(value, name="y")
    for other in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
        assert (value, {"k": 2}) == (other, other.notes)


def test_fields_are_set_once() -> None:
    value = Made("x")
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'name'"):
        value.name = "y"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'name'"):
        del value.name
    with pytest.raises(AttributeError):
        value.other = 1  # type: ignore[attr-defined]
    assert not hasattr(value, "__dict__")


def test_without_equality_a_value_equals_only_itself() -> None:
    value = Single(value=1)
    assert value == value  # noqa: PLR0124 - identity is what is asked for
    assert Single(value=1) != value
    assert 2 == len({value, Single(value=1)})


def test_value_of_another_class_is_not_equal() -> None:
    assert Made("x") != Usual("x")


def test_value_that_holds_itself_is_shown() -> None:
    notes: dict[str, Any] = {}
    value = Made("x", (notes,))  # type: ignore[arg-type]
    notes["self"] = value
    assert "..." in repr(value)


@frozen
class Derived(Made):
    more: int = 0


def test_first_value_is_made_as_all_others_are() -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match=r"Derived.__init__\(\) missing 1 required .*: 'name'"):
            Derived()  # type: ignore[call-arg]
        value = Derived(" x", more=2)
        assert ("x", (), {}, 2) == (value.name, value.sizes, value.notes, value.more)
    assert type(Derived("x")) is Derived
