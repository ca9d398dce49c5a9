from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.estimation.tape import Tape, phases_of, reserved_of, rounded
from fragdoctor.model.estimate import PhaseName
from fragdoctor.units import MIB


def test_peak_is_what_is_alive_at_one_moment_not_the_sum_of_maxima() -> None:
    tape = Tape()
    tape.phase(PhaseName.FORWARD)
    first = tape.alloc("a", 3 * MIB)
    tape.free(first)
    tape.alloc("b", 5 * MIB)

    (phase,) = phases_of(tape)

    assert phase.n_bytes == 5 * MIB
    assert [(s.item, s.n_bytes) for s in phase.shares] == [("b", 5 * MIB)]


def test_phase_begins_with_what_is_alive_and_names_its_moment() -> None:
    tape = Tape()
    tape.phase(PhaseName.FORWARD)
    held = tape.alloc("a", MIB, 3)
    tape.phase(PhaseName.BACKWARD)
    tape.moment("here")
    tape.free(tape.alloc("b", 700))
    tape.free(held)

    forward, backward = phases_of(tape)

    assert forward.n_bytes == 3 * MIB
    assert backward.n_bytes == 3 * MIB + 1024
    assert backward.moment == "here"


def test_nothing_is_no_tensor() -> None:
    tape = Tape()

    tape.free(tape.alloc("a", 0))

    assert tape.events == []


sizes = st.lists(st.tuples(st.integers(1, 30 * MIB), st.integers(1, 4), st.booleans()), max_size=30)


@given(sizes)
def test_reserved_covers_the_peak_and_peak_is_the_running_maximum(
    requests: list[tuple[int, int, bool]],
) -> None:
    tape, live, most, open_handles = Tape(), 0, 0, []
    tape.phase(PhaseName.FORWARD)
    for size, count, frees in requests:
        open_handles.append((tape.alloc("a", size, count), rounded(size) * count))
        live += open_handles[-1][1]
        most = max(most, live)
        if frees:
            handle, n_bytes = open_handles.pop(0)
            tape.free(handle)
            live -= n_bytes

    (phase,) = phases_of(tape)

    assert phase.n_bytes == most
    assert reserved_of(tape) >= most
