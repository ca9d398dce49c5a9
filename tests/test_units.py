"""Figures for people: counts agree with their noun, near capacities stay apart."""

from __future__ import annotations

import pytest

from fragdoctor.errors import ConfigError
from fragdoctor.units import (
    GIB,
    MIB,
    format_mebibytes,
    format_size,
    parse_amount,
    parse_size,
    plural,
)


@pytest.mark.parametrize(
    "text", ["24GiB", "24GB", "24g", "24G", "24 GiB", "24gib", " 24 gb ", "24Gi", "24.0 GIB"]
)
def test_size_is_read_in_any_usual_spelling(text: str) -> None:
    assert 24 * GIB == parse_size(text) == parse_amount(text).n_bytes


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("0", 0), ("0GiB", 0), ("512B", 512), ("512 bytes", 512), ("1 byte", 1), ("1.5k", 1536),
     ("0.5 TiB", GIB * 512)],
)  # fmt: skip
def test_size_of_other_units_is_read(text: str, n_bytes: int) -> None:
    assert n_bytes == parse_size(text)


@pytest.mark.parametrize("text", ["24", "24.5", " 1 ", "1073741824"])
def test_number_without_a_unit_is_refused_and_says_what_to_write(text: str) -> None:
    for parse in (parse_size, parse_amount):
        with pytest.raises(ConfigError, match="has no unit") as caught:
            parse(text)
        assert f"Write {text.strip()}GiB" in caught.value.hint


@pytest.mark.parametrize(
    "text", ["", "much", "GiB", "-1GiB", "1e9", "24 xB", "24ib", "1,5GiB", "nan"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_size_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="too large"):
        parse_size("8388608TiB")


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


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(1000 * MIB, "1000.00 MiB"), (GIB - 1, "1.00 GiB"), (GIB, "1.00 GiB"), (1023, "1023 B"),
     (-1000 * GIB, "-1000.00 GiB"), (1024 * GIB, "1.00 TiB"), (None, "unknown")],
)  # fmt: skip
def test_size_has_the_unit_of_pytorchs_message(n_bytes: int | None, text: str) -> None:
    assert format_size(n_bytes) == text


def test_format_mebibytes_a_page_apart_differ() -> None:
    low, high = 6144 * MIB, 6146 * MIB

    assert (format_mebibytes(low), format_mebibytes(high)) == ("6,144 MiB", "6,146 MiB")
    assert format_size(low) == format_size(high)
