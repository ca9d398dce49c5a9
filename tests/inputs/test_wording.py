"""The text by which a wording is found, worked out from its pattern."""

from __future__ import annotations

import pytest

from fragdoctor.inputs.messages import WORDINGS
from fragdoctor.inputs.wordings.allocator_message import CLAUSES
from fragdoctor.inputs.wordings.wording import matches, needle_of, printed_bytes


@pytest.mark.parametrize(
    ("pattern", "needle", "n_before"),
    [
        (r"(?:cuda|hip)failedwith:", "failedwith:", 7),
        (r"diedwith<?signals\.sigkill:9", "signals.sigkill:9", 9),
        (r"[^;]{0,20}nospace(?:left)?x", "nospace", 20),
        (r"(?P<_word>cu|a[b)]){2}memory\d{1,3}", "memory", 8),
        (r"ab{1,2}cdefgh?", "cdefg", 3),
    ],
)
def test_needle_is_the_longest_text_outside_of_groups(
    pattern: str, needle: str, n_before: int
) -> None:
    assert needle_of(pattern) == (needle, n_before)


def test_repetition_without_a_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="int"):
        needle_of(r"[a-z]+outofmemory")


def test_every_wording_has_a_needle() -> None:
    short = {w.pattern for w in WORDINGS if len(needle_of(w.pattern)[0]) < 3}
    assert not short
    assert not [pattern for _, pattern in CLAUSES if not needle_of(pattern)[0]]


def test_matches_are_found_one_after_another() -> None:
    found = matches(r"(?:cuda)?error:<requested_bytes>", "cudaerror:3gbxerror:nonecudaerror:5mb")
    assert [m.group() for m in found] == ["cudaerror:3gb", "cudaerror:5mb"]


@pytest.mark.parametrize(
    ("printed", "n_bytes"),
    [("1900,00mib", 1900 << 20), ("1,5gb", 3 << 29), ("1,024kib", 1 << 20), ("9,437,184", 9 << 20)],
)
def test_comma_is_a_decimal_sign_unless_three_digits_follow(printed: str, n_bytes: int) -> None:
    assert printed_bytes(printed) == n_bytes
