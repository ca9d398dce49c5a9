from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.model_shapes import GivenSizes, guessed_shape, parse_count


@pytest.mark.parametrize(
    ("text", "count"),
    [("7B", 7 * 10**9), ("350M", 350 * 10**6), ("1.3e9", 1_300_000_000), (" 70b ", 70 * 10**9),
     ("124439808", 124_439_808), ("1.5 T", 1_500_000_000_000)],
)  # fmt: skip
def test_counts_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "7X", "B", "-7B", "7 B B", "1e99", "0", "nan", "7B\n7B", "\u0667B"]
)
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_count(text)


@given(st.integers(10**6, 2 * 10**12))
def test_guess_has_about_as_many_parameters_as_asked(n: int) -> None:
    shape = guessed_shape(n, GivenSizes(family="llama"))

    assert abs(shape.n_parameters - n) <= 0.2 * n
    assert shape.is_guess
    assert shape.hidden % shape.n_heads == 0


@pytest.mark.parametrize(
    ("text", "layers", "hidden"), [("7B", (28, 36), 4096), ("13B", (36, 44), 5120)]
)
def test_guess_looks_like_the_known_models(text: str, layers: tuple[int, int], hidden: int) -> None:
    shape = guessed_shape(parse_count(text), GivenSizes())

    assert layers[0] <= shape.n_layers <= layers[1]
    assert abs(shape.hidden - hidden) <= 512
    assert shape.n_parameters == parse_count(text)
    assert "guess" in shape.assumptions[0]


@pytest.mark.parametrize("n", [8 * 10**9, 32 * 10**9, 110 * 10**9, 405 * 10**9])
def test_heads_of_a_large_guess_can_be_shared_by_the_gpus_of_a_host(n: int) -> None:
    assert guessed_shape(n, GivenSizes()).n_heads % 8 == 0


def test_dimensions_that_are_given_are_kept() -> None:
    given_by_hand = GivenSizes(
        vocab=8192, layers=6, hidden=512, heads=8, positions=4096, family="gpt"
    )

    shape = guessed_shape(0, given_by_hand)

    # The model of the recorded samples.
    assert shape.n_parameters == 29_401_088
    assert not shape.is_guess
    assert (shape.n_layers, shape.hidden, shape.n_heads, shape.ffn) == (6, 512, 8, 2048)


@pytest.mark.parametrize(
    "given_by_hand",
    [
        GivenSizes(hidden=512),
        GivenSizes(layers=2, hidden=512, heads=7),
        GivenSizes(layers=2, hidden=512, heads=8, kv_heads=3),
        GivenSizes(layers=10**9, hidden=512),
    ],
)
def test_dimensions_that_do_not_go_together_are_refused(given_by_hand: GivenSizes) -> None:
    with pytest.raises(ConfigError):
        guessed_shape(0, given_by_hand)


def test_count_that_contradicts_the_dimensions_is_refused() -> None:
    with pytest.raises(ConfigError, match="not 7,000,000,000"):
        guessed_shape(7 * 10**9, GivenSizes(layers=2, hidden=512, ffn=64))
