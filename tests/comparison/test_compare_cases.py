from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runs import Ask, case, columns_of

import fragdoctor
from fragdoctor.comparison import compare_cases as compare_module
from fragdoctor.comparison.compare_cases import compare_cases, compare_runs
from fragdoctor.comparison.compared_run import ComparedRun
from fragdoctor.comparison.explanation import _leaks
from fragdoctor.errors import ConfigError
from fragdoctor.inputs.cases import read_case
from fragdoctor.model.case import Case, Overrides
from fragdoctor.model.comparison import Basis, CauseKind, Comparison, LineChange, LineKind
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence, Location
from fragdoctor.units import MIB

MODEL = (Ask(10, 40, "build"), Ask(12, 20, "build"))
STEP = (Ask(50, 30, calls=("linear",)), Ask(52, 60, calls=("softmax",), kept=False))


def compared(*cases: Case, **more: object) -> Comparison:
    return compare_cases(list(zip("pqrstuv", cases, strict=False)), **more)  # type: ignore[arg-type]


def test_identical_runs_have_no_difference() -> None:
    comparison = compared(case(*MODEL, *STEP), case(*MODEL, *STEP))

    assert comparison.is_same
    assert comparison.summary == "No difference: B peaks 150.00 MiB, as A does."
    assert comparison.causes == ()


def test_edited_line_is_reported_with_both_numbers() -> None:
    after = (*MODEL, Ask(55, 30, calls=("linear",)), Ask(57, 90, calls=("softmax",), kept=False))

    comparison = compared(case(*MODEL, *STEP), case(*after))

    top = comparison.lines[0]
    assert (top.before and top.before.line, top.after and top.after.line) == (52, 57)
    assert (top.kind, top.delta_bytes) == (LineKind.GREW, 30 * MIB)
    assert top.sizes is not None
    assert top.sizes.factor == pytest.approx(1.5)
    assert comparison.summary == (
        "B peaks 30.00 MiB (+20%) higher: train.py:57 in step grew by 30.00 MiB; "
        "settings are the same."
    )


def test_new_line_explains_all_of_it() -> None:
    comparison = compared(case(*MODEL), case(*MODEL, Ask(80, 64, "evaluate")))

    assert comparison.lines[0].kind is LineKind.NEW
    assert comparison.explained_bytes == comparison.delta_bytes == 64 * MIB
    assert [c.kind for c in comparison.causes] == [CauseKind.NEW_CODE]


def test_common_factor_is_a_batch_where_the_model_asks_the_same() -> None:
    doubled = (Ask(50, 60, calls=("linear",)), Ask(52, 120, calls=("softmax",), kept=False))

    comparison = compared(case(*MODEL, *STEP), case(*MODEL, *doubled))

    (cause,) = comparison.causes
    assert (cause.kind, cause.confidence) == (CauseKind.SCALE, Confidence.LIKELY)
    assert "2 lines ask 2 times as much" in cause.text
    assert "batch, sequence or precision" in cause.text
    assert cause.delta_bytes == 90 * MIB


def test_more_blocks_of_the_same_size_are_more_layers() -> None:
    layer = Ask(30, 20, "forward")

    comparison = compared(case(*MODEL, layer, layer), case(*MODEL, *[layer] * 6))

    (cause,) = comparison.causes
    assert cause.kind is CauseKind.MORE_BLOCKS
    assert "2 -> 6" in cause.text


@pytest.mark.parametrize("asks", [STEP, (Ask(60, 10), *STEP), (Ask(70, 50, has_stack=False),)])
def test_parts_add_up_to_the_difference(asks: tuple[Ask, ...]) -> None:
    comparison = compared(case(*MODEL, *STEP), case(*MODEL, *asks))

    assert sum(c.delta_bytes for c in comparison.lines) == comparison.delta_bytes


def test_run_without_stacks_makes_no_line_new() -> None:
    bare = [Ask(a.line, a.mib, a.function, kept=a.kept, has_stack=False) for a in (*MODEL, *STEP)]

    comparison = compared(case(*bare), case(*MODEL, *STEP, Ask(90, 20)))

    assert {c.place for c in comparison.lines} == {None}
    assert comparison.delta_bytes == 20 * MIB
    assert any("no stacks" in note for note in comparison.notes)


def test_message_alone_is_compared_by_its_figures() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
        "capacity of 23.65 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this "
        "process has 22.64 GiB memory in use. Of the allocated memory {} GiB is allocated by "
        "PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated."
    )

    comparison = fragdoctor.compare(text.format("20.00"), text.format("21.00"))

    assert comparison.basis is Basis.NONE
    assert comparison.lines == ()
    assert comparison.summary.startswith("B holds 1.00 GiB (+5.0%) more")
    assert any("no snapshot" in note for note in comparison.notes)


def test_runs_on_other_device_numbers_are_compared() -> None:
    moved = Case(snapshot=columns_of(*MODEL, *STEP, device=1))

    comparison = compared(case(*MODEL), moved)

    assert [r.device for r in comparison.runs] == [0, 1]
    assert any("no device number in common" in note for note in comparison.notes)


def test_one_run_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="One run"):
        compared(case(*MODEL))


@pytest.mark.parametrize("steps", [[1, 2], [3, 2, 1], [1, 1, 2]])
def test_steps_that_do_not_fit_are_refused(steps: list[float]) -> None:
    with pytest.raises(ConfigError, match="steps"):
        compared(case(*MODEL), case(*MODEL), case(*MODEL), steps=steps)


def test_growing_line_of_a_series_is_named() -> None:
    cases = [case(*MODEL, *[Ask(50, 20)] * n) for n in (1, 2, 3, 4, 5)]

    comparison = compared(*cases, steps=[100, 200, 300, 400, 500], capacity_bytes=400 * MIB)

    trend = comparison.trend
    assert trend is not None
    assert trend.confidence is Confidence.LIKELY
    assert trend.slope_bytes == pytest.approx(0.2 * MIB)
    assert trend.exhausted_at == pytest.approx(1700)
    assert [t.location.line for t in trend.lines if t.location] == [50]
    assert "train.py:50 in step" in comparison.summary


def test_python_api_takes_two_snapshots_or_more() -> None:
    before, after = columns_of(*MODEL), columns_of(*MODEL, *STEP)

    assert len(fragdoctor.compare(before, after).runs) == 2
    with pytest.raises(ConfigError):
        fragdoctor.compare(before)


@pytest.mark.shared
def test_setting_that_serves_the_failed_request_did_it(shared: Path) -> None:
    names = ("microbench_40mb", "microbench_40mb_expandable")
    cases = [read_case([str(shared / "snapshots" / n)], Overrides()) for n in names]

    comparison = compared(*cases)

    assert comparison.proof is not None
    assert (comparison.proof.own_fits, comparison.proof.fits) == (False, True)
    assert comparison.causes[0].kind is CauseKind.SETTINGS
    assert "all served" in comparison.summary


@pytest.mark.shared
def test_setting_without_effect_is_called_so(shared: Path) -> None:
    names = ("microbench_alternate", "microbench_alternate_expandable")
    cases = [read_case([str(shared / "snapshots" / n)], Overrides()) for n in names]

    comparison = compared(*cases)

    assert comparison.causes == ()
    assert "makes no difference, a replay says" in comparison.summary


TWINS = [
    ("frag_gpt_varlen", "frag_gpt_varlen_expandable"),
    ("frag_gpt_varlen", "frag_gpt_varlen_roundup"),
    ("frag_gpt_varlen", "frag_gpt_varlen_split128"),
]


@pytest.mark.shared
@pytest.mark.parametrize("names", TWINS, ids=lambda names: names[1])
def test_replay_under_the_other_setting_gives_what_the_twin_recorded(
    shared: Path, names: tuple[str, str]
) -> None:
    cases = [read_case([str(shared / "snapshots" / n)], Overrides()) for n in names]

    comparison = compared(*cases)

    assert comparison.requests_equal == 1.0
    assert comparison.proof is not None
    assert comparison.proof.result_bytes == comparison.proof.recorded_bytes
    assert comparison.causes[0].kind is CauseKind.SETTINGS
    assert comparison.causes[0].confidence is Confidence.PROVEN


@pytest.mark.shared
def test_checkpointing_is_seen(shared: Path) -> None:
    names = ("checkpoint_off", "checkpoint_on")
    cases = [read_case([str(shared / "snapshots" / n)], Overrides()) for n in names]

    comparison = compared(*cases)

    assert comparison.causes[0].kind is CauseKind.CHECKPOINTING
    assert "B recomputes activations" in comparison.summary


@pytest.mark.shared
def test_smaller_device_is_no_change_of_the_program(shared: Path) -> None:
    names = ("optimizer_spike", "optimizer_spike_oom")
    cases = [read_case([str(shared / "snapshots" / n)], Overrides()) for n in names]

    comparison = compared(*cases)

    assert [c.kind for c in comparison.causes] == [CauseKind.LENGTH]
    assert comparison.runs[1].verdict.cause is Cause.CAPACITY


def _grown(place: Location) -> LineChange:
    return LineChange(LineKind.GREW, place, place, 0, MIB, 0, 1)


def _pair(*changes: LineChange) -> SimpleNamespace:
    return SimpleNamespace(lines=changes, runs=[SimpleNamespace(letter=one) for one in "AB"])


@pytest.mark.parametrize(
    ("n_steps", "told"),
    [(2, "in B; A has too few steps to tell."), (9, "in B, in A not.")],
)
def test_leak_is_denied_only_of_a_run_with_enough_steps(n_steps: int, told: str) -> None:
    place = Location("train.py", 19, "forward")
    before = SimpleNamespace(growth={}, n_steps=n_steps)
    after = SimpleNamespace(growth={place: MIB}, n_steps=12)

    (cause,) = _leaks(_pair(_grown(place)), before, after)  # type: ignore[arg-type]

    assert cause.text.endswith(told)


def test_lines_that_leak_in_one_run_are_one_cause() -> None:
    small, large = (Location("train.py", line, "forward") for line in (19, 23))
    before = SimpleNamespace(growth={}, n_steps=2)
    after = SimpleNamespace(growth={small: MIB, large: 3 * MIB}, n_steps=12)

    (cause,) = _leaks(_pair(_grown(small), _grown(large)), before, after)  # type: ignore[arg-type]

    assert cause.text.startswith("train.py:23 in forward and 1 more line keep 4.00 MiB more")
    assert cause.delta_bytes == 2 * MIB


def test_series_keeps_the_totals_of_its_ends_only() -> None:
    held: list[ComparedRun] = []

    def watched(compared: Sequence[ComparedRun], **more: Any) -> Comparison:
        held.extend(compared)
        return compare_runs(compared, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "compare_runs", watched)
        compared(*[case(*MODEL, *STEP)] * 4)

    assert [r.devices[0].totals is not None for r in held] == [True, False, False, True]
