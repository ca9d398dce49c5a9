"""Patterns that meet text of any length neither backtrack far nor begin anew everywhere.

Every repeat in them is bounded, or never gives back what it took: so a search costs at most a
constant for each character. Names of files and functions are cut to 1,000 characters before they
meet a pattern, and ``classify`` sees the first 4 KiB only.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from re import _constants, _parser
from typing import Any

import pytest

import fragdoctor.inputs
import fragdoctor.story
from fragdoctor.inputs.wordings.wording import compile_squeezed

_SEE_LITTLE = ("classify", "discovery", "remote")
_MOST_OF_NESTED = 20_000


def _modules() -> Iterator[Any]:
    for package in (fragdoctor.inputs, fragdoctor.story):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if found.name.rpartition(".")[2] not in _SEE_LITTLE:
                yield importlib.import_module(found.name)


def _patterns(value: Any) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _patterns(item)
    elif isinstance(value, dict):
        yield from _patterns(list(value.values()))
    elif isinstance(getattr(value, "pattern", None), str):
        yield compile_squeezed(value.pattern)


def _repeats(parsed: Iterable[Any], around: int = 1) -> Iterator[int]:
    """Yield how often the repeats of a parsed pattern may match, those around them included."""
    for op, argument in parsed:
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            _, most, inner = argument
            yield most * around
            yield from _repeats(inner, most * around)
        elif op is _constants.POSSESSIVE_REPEAT:
            _, most, inner = argument
            yield from _repeats(inner, 1)
        elif op is _constants.SUBPATTERN:
            yield from _repeats(argument[3], around)
        elif op is _constants.BRANCH:
            for branch in argument[1]:
                yield from _repeats(branch, around)
        elif op in (_constants.ASSERT, _constants.ASSERT_NOT):
            yield from _repeats(argument[1], around)
        elif op is _constants.ATOMIC_GROUP:
            yield from _repeats(argument, around)


PATTERNS = sorted(
    {
        (module.__name__, pattern.pattern, pattern.flags)
        for module in _modules()
        for name, value in vars(module).items()
        if name != "_ATOM"  # meets our own patterns only
        for pattern in _patterns(value)
    },
    key=str,
)


def _worst(pattern: str | bytes, flags: int) -> int:
    return max(_repeats(_parser.parse(pattern, flags)), default=0)


def test_there_are_patterns() -> None:
    assert len(PATTERNS) > 200


def test_no_repeat_is_unbounded() -> None:
    worst = {(name, pattern): _worst(pattern, flags) for name, pattern, flags in PATTERNS}

    assert {place: n for place, n in worst.items() if n > _MOST_OF_NESTED} == {}


@pytest.mark.parametrize("pattern", [r"\s*x", r"(?:a{0,200}b{0,200}){0,900}", r"(?=.*y)"])
def test_an_unbounded_repeat_is_seen(pattern: str) -> None:
    assert _worst(pattern, 0) > _MOST_OF_NESTED


def test_a_possessive_repeat_is_none() -> None:
    assert _worst(r"\s*+x", 0) == 0
