from __future__ import annotations

import random

import pytest

from fragdoctor.inputs.discovery import ranks_of
from fragdoctor.model.fleet import RankSource


def ranks(*names: str) -> list[int | None]:
    found = ranks_of(names)
    return [found[name].rank for name in names]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank3.pickle", 3),
        ("snapshot_rank_03.pickle", 3),
        ("mem-r12.pickle", 12),
        ("host1_rank7_2026-11-21.pickle", 7),
        ("GLOBAL-RANK=1.pkl.gz", 1),
        ("world_size8_rank_2_pid4711.pickle", 2),
        ("run9/rank4/snapshot.pickle", 4),
        ("rank1/again_rank5.pickle", 5),
        ("C:\\jobs\\rank6\\snapshot.pickle", 6),
        ("frank3.pickle", None),
        ("ranks8.pickle", None),
        ("snapshot.3.pickle", None),
        ("local_rank2.pickle", 2),
    ],
)
def test_name_with_the_word_gives_its_rank(name: str, rank: int | None) -> None:
    assert ranks(name) == [rank]


def test_lone_number_that_counts_through_the_names_is_the_rank() -> None:
    assert ranks("s.0.pickle", "s.1.pickle", "s.2.pickle") == [0, 1, 2]


def test_number_that_counts_beside_a_date_and_a_pid_is_the_rank() -> None:
    names = [f"m_20261121T1013{i:02d}_{4711 + i}_{i}.pickle" for i in range(8)]

    assert ranks(*names) == list(range(8))
    assert ranks_of(names)[names[0]].source is RankSource.NUMBER


@pytest.mark.parametrize(
    "names",
    [
        [f"mem_pid{4711 + i}.pickle" for i in range(8)],
        [f"mem_{4711 + i}.pickle" for i in range(8)],
        [f"mem-{29500 + i}.pickle" for i in range(8)],
        [f"2026-11-21_10-00-0{i}.pickle" for i in range(8)],
        [f"snapshot_{1795270000 + i}.pickle" for i in range(8)],
        [f"step{i}.pickle" for i in range(8)],
        [f"iteration_{i}/snapshot.pickle" for i in range(8)],
        ["a0_b1.pickle", "a1_b0.pickle"],
    ],
)
def test_pids_ports_dates_and_steps_are_no_ranks(names: list[str]) -> None:
    assert ranks(*names) == [None] * len(names)


def test_same_number_in_folder_and_name_is_one_statement() -> None:
    assert ranks("gpu0/mem_0.pickle", "gpu1/mem_1.pickle") == [0, 1]


def test_local_ranks_of_two_hosts_stay_local() -> None:
    names = [f"host{h}/local_rank{i}.pickle" for h in range(2) for i in range(2)]

    found = ranks_of(names)

    assert [found[n].rank for n in names] == [None] * 4
    assert [(found[n].host, found[n].local_rank) for n in names] == [
        ("0", 0),
        ("0", 1),
        ("1", 0),
        ("1", 1),
    ]


def test_order_of_the_names_does_not_matter() -> None:
    names = [f"x{i}_rank.{i}.pickle" for i in range(5)] + [f"s.{i}.pickle" for i in range(5)]
    shuffled = random.Random(4).sample(names, len(names))

    assert ranks_of(names) == ranks_of(shuffled)
