"""Figures for people: counts agree with their noun, near capacities stay apart."""

from __future__ import annotations

import pytest

from fragdoctor.units import MIB, format_mebibytes, format_size, plural


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 sizes"), (1, "1 size"), (2, "2 sizes"), (12345, "12,345 sizes")]
)
def test_plural_agrees_with_its_count(n: int, text: str) -> None:
    assert plural(n, "size") == text


def test_plural_irregular_noun_is_given() -> None:
    assert (plural(1, "retry", "retries"), plural(3, "retry", "retries")) == (
        "1 retry",
        "3 retries",
    )


def test_format_mebibytes_a_page_apart_differ() -> None:
    low, high = 6144 * MIB, 6146 * MIB

    assert (format_mebibytes(low), format_mebibytes(high)) == ("6,144 MiB", "6,146 MiB")
    assert format_size(low) == format_size(high)
