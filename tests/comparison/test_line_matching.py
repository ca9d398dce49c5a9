from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fragdoctor.comparison.lines import (
    LineUse,
    align,
    match_files,
    match_lines,
)
from fragdoctor.model.finding import Location, n_shared, path_parts

FILE = "/home/a/proj/train.py"


def use(
    line: int,
    *sizes: int,
    function: str = "forward",
    file: str = FILE,
    calls: tuple[str, ...] = (),
) -> LineUse:
    told = tuple((size, 1) for size in sizes or (512,))
    return LineUse(
        place=Location(file, line, function),
        peak_bytes=sum(sizes),
        n_peak=len(told),
        now_bytes=0,
        n_now=0,
        n_requests=len(told),
        sizes=told,
        n_sizes=len(told),
        callees=frozenset(calls),
    )


def pairs(before: list[LineUse], after: list[LineUse]) -> set[tuple[int | None, int | None]]:
    def line(uses: list[LineUse], i: int | None) -> int | None:
        place = None if i is None else uses[i].place
        return None if place is None else place.line

    return {(line(before, i), line(after, j)) for i, j in match_lines(before, after)}


def test_lines_below_an_inserted_line_are_the_same_lines() -> None:
    before = [use(10, 1024), use(20, 2048), use(30, 4096)]
    after = [use(10, 1024), use(23, 2048), use(33, 4096)]

    assert pairs(before, after) == {(10, 10), (20, 23), (30, 33)}


def test_new_line_between_others_is_new() -> None:
    before = [use(10, 1024, calls=("linear",)), use(11, 1024, calls=("relu",))]
    after = [
        use(10, 1024, calls=("linear",)),
        use(11, 1024, calls=("dropout",)),
        use(12, 1024, calls=("relu",)),
    ]

    assert pairs(before, after) == {(10, 10), (11, 12), (None, 11)}


def test_line_that_asks_for_more_is_still_the_same_line() -> None:
    before = [use(10, 1000, calls=("linear",)), use(12, 3000, calls=("softmax",))]
    after = [use(15, 1500, calls=("linear",)), use(17, 4500, calls=("softmax",))]

    assert pairs(before, after) == {(10, 15), (12, 17)}


def test_lines_of_other_functions_are_not_matched() -> None:
    before = [use(10, 1024, function="forward")]
    after = [use(10, 2048, function="backward")]

    assert pairs(before, after) == {(10, None), (None, 10)}


def test_file_in_another_directory_is_the_same_file() -> None:
    before = [use(10, 1024, file="/home/a/proj/train.py")]
    after = [use(10, 1024, file="/workspace/train.py")]

    assert pairs(before, after) == {(10, 10)}


def test_files_of_one_name_are_told_apart_by_their_directories() -> None:
    before = [use(1, file="/a/src/nn/layers.py"), use(2, file="/a/src/data/layers.py")]
    after = [use(3, file="/b/src/data/layers.py"), use(4, file="/b/src/nn/layers.py")]

    assert match_files(before, after) == {
        "/a/src/nn/layers.py": "/b/src/nn/layers.py",
        "/a/src/data/layers.py": "/b/src/data/layers.py",
    }


def test_copy_under_another_name_is_known_by_its_functions() -> None:
    before = [use(10, 1024, function="step"), use(20, 4096, function="evaluate")]
    after = [
        use(11, 1024, function="step", file="/b/train_v2.py"),
        use(25, 4096, function="evaluate", file="/b/train_v2.py"),
    ]

    assert pairs(before, after) == {(10, 11), (20, 25)}


def test_unlike_file_of_another_name_is_another_file() -> None:
    before = [use(10, 1024, function="step"), use(20, 4096, function="evaluate")]
    after = [use(11, 333, function="load", file="/b/data.py")]

    assert match_files(before, after) == {}


def test_windows_and_posix_paths_share_their_last_parts() -> None:
    assert n_shared(path_parts("C:\\w\\proj\\train.py"), path_parts("/home/proj/train.py")) == 2


def test_requests_without_a_stack_are_one_line() -> None:
    nothing = LineUse(None, 8, 1, 8, 1, 1, ((8, 1),), 1, frozenset())

    assert match_lines([nothing], [nothing]) == [(0, 0)]


LINES = st.lists(
    st.tuples(
        st.integers(1, 400),
        st.sampled_from([512, 1024, 4096, 65536]),
        st.sampled_from(["linear", "relu", "softmax"]),
    ),
    unique_by=lambda t: t[0],
    max_size=12,
)


@given(LINES, st.integers(0, 50))
@example([(162, 512, "linear"), (165, 512, "linear")], 3)  # one line lands where the other was
def test_moving_a_whole_function_matches_every_line(
    lines: list[tuple[int, int, str]], shift: int
) -> None:
    before = [use(n, size, calls=(call,)) for n, size, call in sorted(lines)]
    after = [use(n + shift, size, calls=(call,)) for n, size, call in sorted(lines)]

    assert pairs(before, after) == {(n, n + shift) for n, _, _ in lines}


@given(LINES, LINES)
def test_every_line_is_in_exactly_one_pair(
    old: list[tuple[int, int, str]], new: list[tuple[int, int, str]]
) -> None:
    before = [use(n, size, calls=(call,)) for n, size, call in sorted(old)]
    after = [use(n, size, calls=(call,)) for n, size, call in sorted(new)]

    found = match_lines(before, after)

    assert sorted(i for i, _ in found if i is not None) == list(range(len(before)))
    assert sorted(j for _, j in found if j is not None) == list(range(len(after)))


@given(LINES, LINES)
def test_alignment_keeps_the_order_of_lines(
    old: list[tuple[int, int, str]], new: list[tuple[int, int, str]]
) -> None:
    before = [use(n, size, calls=(call,)) for n, size, call in sorted(old)]
    after = [use(n, size, calls=(call,)) for n, size, call in sorted(new)]

    found = align(before, after)

    assert found == sorted(found)
    assert [j for _, j in found] == sorted({j for _, j in found})


@pytest.mark.parametrize("n", [0, 150])
def test_function_with_very_many_lines_is_matched_by_number(n: int) -> None:
    before = [use(i, 512) for i in range(1, n + 1)]

    assert pairs(before, before) == {(i, i) for i in range(1, n + 1)}
