from __future__ import annotations

import pytest

from fragdoctor.model.turns import period_of, whole_rounds


@pytest.mark.parametrize(
    ("turns", "period"),
    [
        ("", 1),
        ("A", 1),
        ("AAAAAAA", 1),
        ("DG", 2),
        ("DGD", 2),
        ("DGDGDGD", 2),
        ("DDDDDG", 6),  # five updates of a critic
        ("DDDDDG" * 2, 6),
        ("DDDDDG" * 3, 6),
        ("DDDDDG" * 20, 6),
        (("A" * 15 + "R") * 3, 1),  # lazy regularization
        ("XAAAAAAA", 1),  # the first is another one
        ("A" * 9 + "C" * 9, 1),  # one after the other
        ("ABC", 3),
        ("AABBCC", 1),
    ],
)
def test_optimizers_come_round_again(turns: str, period: int) -> None:
    assert period == period_of(turns)


@pytest.mark.parametrize(
    ("turns", "whole"), [("A", "A"), ("DGD", "DG"), ("DDDDDGDDD", "DDDDDG"), ("AAAACCC", "AAAACCC")]
)
def test_rounds_are_whole_with_the_rarest_turn(turns: str, whole: str) -> None:
    assert whole == whole_rounds(turns)
