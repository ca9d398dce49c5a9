"""The verdict on snapshots made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from analysis.training_loop import (
    ACTIVATION,
    APPLY,
    ENGINE,
    LINEAR,
    TrainingLoop,
    deep_layers,
    deeply_trained,
)
from builders import MIB, alloc, block, columns, frame, free, oom, segment, segment_alloc, snapshot
from oom_messages import case_of, new_style
from oom_snapshots import at, calm, full, holes, late_free, leaking
from rule_inputs import settings_snapshot

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.case import BundleDevice, BundleFacts, Case, Overrides
from fragdoctor.model.diagnosis import Cause, RunState
from fragdoctor.model.finding import Confidence
from fragdoctor.report.base import RenderOptions, render


def test_diagnose_holes_smaller_than_the_request_are_proven_fragmentation():
    verdict = diagnose(Case(snapshot=holes())).verdict

    assert (verdict.cause, verdict.confidence) == (Cause.FRAGMENTATION, Confidence.PROVEN)
    assert "400.00 MiB" in verdict.summary
    assert "40.00 MiB" in verdict.summary


def test_diagnose_full_segments_are_proven_capacity():
    verdict = diagnose(Case(snapshot=full())).verdict

    assert (verdict.cause, verdict.confidence) == (Cause.CAPACITY, Confidence.PROVEN)
    assert "150.00 MiB" in verdict.summary


def test_diagnose_small_unknown_device_says_that_others_may_hold_the_rest():
    verdict = diagnose(Case(snapshot=full())).verdict

    assert Cause.OTHER_PROCESS in verdict.also
    assert "add the OOM message" in verdict.settled_by
    assert "--capacity" not in verdict.settled_by


@pytest.mark.parametrize("given_mib", [500, 1040, 16384])
def test_diagnose_capacity_of_another_card_changes_no_fact(given_mib):
    alone = diagnose(Case(snapshot=full()))
    case = Case(snapshot=full(), overrides=Overrides(capacity_bytes=given_mib * MIB))

    told = diagnose(case)

    assert told.verdict == alone.verdict
    assert told.devices == alone.devices
    assert told.checklist == alone.checklist


@pytest.mark.parametrize(
    ("given_mib", "said"),
    [
        (1060, "1.04 GiB, is not used: the failed request proves that PyTorch could have 1.03 GiB"),
        (16384, "With 16.00 GiB for PyTorch this run would get past its recorded part, 14.8"),
        (500, "With 500.00 MiB for PyTorch this run would run out of memory."),
    ],
)  # fmt: skip
def test_capacity_of_another_card_is_answered_on_the_first_screen(given_mib, said):
    told = diagnose(Case(snapshot=full(), overrides=Overrides(capacity_bytes=given_mib * MIB)))

    assert said in told.notes[0]
    assert said.split()[0] in render("analyze", "text", told, RenderOptions(120))


@pytest.mark.parametrize("given_mib", [500, 24 * 1024])
def test_capacity_of_another_card_changes_no_limit_that_a_bundle_records(given_mib):
    """A fraction is one of the card in the bundle, not of the card that the question is about."""
    facts = BundleFacts(
        "oom", devices=(BundleDevice(0, total_bytes=2080 * MIB, memory_fraction=0.5),)
    )
    own = Overrides(capacity_bytes=2080 * MIB, memory_fraction=0.5)
    asked = Overrides(capacity_bytes=given_mib * MIB, memory_fraction=0.5)

    alone = diagnose(Case(snapshot=full(), bundle=facts, overrides=own))
    told = diagnose(Case(snapshot=full(), bundle=facts, overrides=asked))

    assert told.verdict == alone.verdict
    assert told.devices == alone.devices


def built_twice(*, is_dropped: bool) -> TrainingLoop:
    """Return a program that trains a model, builds it again, and fails in its next step."""
    loop = TrainingLoop()
    first = [loop.new(size, APPLY) for size in WEIGHTS]
    for _ in range(4):
        loop.free(loop.new(ACTIVATION, LINEAR), ENGINE)
        loop.optimizer()
    for old in [*first, *loop.state] if is_dropped else []:
        loop.free(old, APPLY)
    for size in WEIGHTS:
        loop.new(size, APPLY)
    loop.new(ACTIVATION, LINEAR)
    loop.refuse(ACTIVATION, LINEAR)
    return loop


WEIGHTS = (4 * MIB, 6 * MIB, 3 * MIB, 5 * MIB)


def test_model_that_is_held_beside_the_next_is_the_cause_and_goes_first():
    told = diagnose(Case(snapshot=built_twice(is_dropped=False).snapshot()))

    assert (told.verdict.cause, told.verdict.decider) == (Cause.LEAK, "old-model-held")
    assert told.recommendations[0].code == "spare-weights"
    assert "record-snapshot" not in {r.code for r in told.recommendations}

    dropped = diagnose(Case(snapshot=built_twice(is_dropped=True).snapshot())).verdict
    assert dropped.decider != "old-model-held"


def test_line_that_outgrew_its_requests_is_advised_about_instead_of_the_batch():
    """The boxes of one image are compared with all anchors; the batch is as large as ever."""
    match = (frame("assign.py", 7, "overlaps"), frame("train.py", 4, "main"))
    loop = TrainingLoop()
    loop.build()
    for _ in range(4):
        loop.free(loop.new(2 * MIB, match), match)
        loop.step()
    loop.forward()
    loop.refuse(60 * MIB, match)

    told = diagnose(Case(snapshot=loop.snapshot()))

    codes = [r.code for r in told.recommendations]
    assert codes[0] == "limit-request"
    assert "smaller-batch" not in codes


def test_capacity_below_what_a_healthy_run_reserved_is_of_another_card():
    told = diagnose(Case(snapshot=calm(), overrides=Overrides(capacity_bytes=100 * MIB)))

    assert told.devices[0].capacity_bytes is None
    assert "100.00 MiB, is not used: the run reserved" in told.notes[0]


def test_diagnose_message_beside_the_snapshot_names_the_other_process():
    text = new_style(
        "200.00 MiB", "8.00 GiB", "50.00 MiB", "1000.00 MiB", "0 bytes",
        processes="Process 4242 has 6.50 GiB memory in use. ", own="1.30 GiB",
    )  # fmt: skip
    case = case_of(text, snapshot=full())

    verdict = diagnose(case).verdict

    assert (verdict.cause, verdict.confidence) == (Cause.OTHER_PROCESS, Confidence.PROVEN)


def test_diagnose_failure_on_the_second_device_is_about_that_device():
    verdict = diagnose(Case(snapshot=full(device=1))).verdict

    assert (verdict.cause, verdict.device) == (Cause.CAPACITY, 1)


def test_diagnose_much_harmless_cache_is_healthy():
    diagnosis = diagnose(Case(snapshot=calm()))

    assert Cause.HEALTHY is diagnosis.verdict.cause
    assert "and 200.00 MiB of that goes back" in diagnosis.verdict.summary
    assert not diagnosis.recommendations


def test_diagnose_refusal_with_room_on_the_device_is_a_limit():
    verdict = diagnose(Case(snapshot=full(free_mib=4000))).verdict

    assert (verdict.cause, verdict.confidence) == (Cause.MEMORY_LIMIT, Confidence.LIKELY)


def test_diagnose_block_freed_by_the_last_flush_is_pending_frees():
    verdict = diagnose(Case(snapshot=late_free())).verdict

    assert Cause.PENDING_FREES is verdict.cause


def test_diagnose_message_of_another_failure_is_noted():
    text = new_style("7.00 GiB", "24.00 GiB", "50.00 MiB", "23.00 GiB", "0 bytes")

    notes = diagnose(case_of(text, snapshot=full())).notes

    assert any("different runs" in note for note in notes)


def test_diagnose_memory_kept_by_every_step_is_a_leak():
    verdict = diagnose(Case(snapshot=leaking())).verdict

    assert Cause.LEAK is verdict.cause
    assert Cause.CAPACITY in verdict.also
    assert "loop.py:5" in verdict.summary
    assert "24.00 MiB a step" in verdict.summary


def test_diagnose_state_without_history_and_without_holes_asks_for_the_message():
    only_state = columns(snapshot(segment(at(0), block(400 * MIB, "active_allocated"))))

    verdict = diagnose(Case(snapshot=only_state)).verdict

    assert (verdict.cause, verdict.confidence) == (Cause.HEALTHY, Confidence.POSSIBLE)
    assert list(verdict.also) == [Cause.CAPACITY]
    assert "out-of-memory" in verdict.settled_by


def test_diagnose_caught_failure_may_be_healthy():
    events = [
        oom(4000 * MIB, 500 * MIB),
        segment_alloc(at(0), 20 * MIB),
        alloc(at(0), 20 * MIB),
    ]
    data = snapshot(segment(at(0), block(20 * MIB, "active_allocated")), events=events)

    verdict = diagnose(Case(snapshot=columns(data))).verdict

    assert Cause.CAPACITY is verdict.cause
    assert Cause.HEALTHY in verdict.also
    assert "went on" in verdict.summary


def test_diagnose_message_beside_a_snapshot_that_leaks_later_is_a_leak():
    text = new_style("200.00 MiB", "1.00 GiB", "50.00 MiB", "1000.00 MiB", "0 bytes")
    running = leaking(fails=False)

    verdict = diagnose(case_of(text, snapshot=running)).verdict

    assert Cause.LEAK is verdict.cause
    assert Cause.CAPACITY in verdict.also


def test_diagnose_host_kill_beside_a_calm_snapshot_is_host_memory():
    case = case_of("Out of memory: Killed process 812 (python)", snapshot=calm())

    assert Cause.HOST_MEMORY is diagnose(case).verdict.cause


def resumed(n_requests: int):
    """Return a run whose large request failed, and that then worked on."""
    work = [e for _ in range(n_requests) for e in (alloc(at(0), 20 * MIB), *free(at(0), 20 * MIB))]
    events = [
        segment_alloc(at(0), 20 * MIB),
        alloc(at(0), 20 * MIB),
        *free(at(0), 20 * MIB),
        oom(4000 * MIB, 500 * MIB),
        *work,
    ]
    return columns(snapshot(segment(at(0), block(20 * MIB)), events=events))


def test_diagnose_caught_failure_before_much_work_is_healthy():
    verdict = diagnose(Case(snapshot=resumed(200))).verdict

    assert (verdict.cause, verdict.state) == (Cause.HEALTHY, RunState.NEAR_LIMIT)
    assert Cause.CAPACITY in verdict.also
    assert "a request of 3.91 GiB" in verdict.summary
    assert "200 requests were served since" in verdict.summary


def test_diagnose_caught_failure_before_little_work_is_not():
    verdict = diagnose(Case(snapshot=resumed(5))).verdict

    assert (verdict.cause, verdict.state) == (Cause.CAPACITY, RunState.FAILED)


def searching(fits_mib: int, capacity_mib: int = 600):
    """Return a run that halves its batch until it fits, and then works on."""
    line = [frame("finder.py", 7, "forward")]
    size = fits_mib * MIB
    events = [
        oom(4 * size, 500 * MIB, frames=line),
        oom(2 * size, 500 * MIB, frames=line),
        segment_alloc(at(0), size),
        *(
            e
            for _ in range(200)
            for e in (alloc(at(0), size, frames=line), *free(at(0), size, frames=line))
        ),
    ]
    data = columns(snapshot(segment(at(0), block(size)), events=events))
    known = Overrides(capacity_bytes=capacity_mib * MIB)
    return diagnose(Case(snapshot=data, overrides=known)).verdict


def test_diagnose_search_that_ended_well_is_healthy_and_says_where_it_stopped():
    verdict = searching(400)

    assert (verdict.cause, verdict.state) == (Cause.HEALTHY, RunState.FITS)
    assert "requests of 800.00 MiB to 1.56 GiB" in verdict.summary
    assert "finder.py:7 in forward asked for 800.00 MiB without success" in verdict.summary
    assert "served 400.00 MiB from then on" in verdict.summary
    assert verdict.outlook is None  # the replay serves what the search asked for in vain, or fails


def test_diagnose_search_that_left_nothing_to_spare_is_near_the_limit():
    assert searching(580).state is RunState.NEAR_LIMIT


def trials(n_steps: int, *, is_freed: bool = True):
    """Return a run of trials: one fails, another one does steps, the last one fails at once."""
    loop = TrainingLoop()
    loop.build()

    def fail() -> None:
        loop.toy.events.append(oom(100 * MIB, 8 * MIB))

    for count in (1, n_steps):
        for _ in range(count):
            loop.step()
        fail()
    if is_freed:
        for block in (*loop.parameters, *loop.state):
            loop.free(block, ENGINE)
    return diagnose(Case(snapshot=loop.snapshot())).verdict


def test_diagnose_last_of_several_failures_that_trials_got_over_is_healthy():
    verdict = trials(3)

    assert verdict.cause is Cause.HEALTHY
    assert "2 out-of-memory errors (requests of 100.00 MiB)" in verdict.summary
    assert "it let go of its memory after the last" in verdict.summary


@pytest.mark.parametrize(("n_steps", "is_freed"), [(1, True), (3, False)])
def test_diagnose_last_failure_is_not_got_over_without_work_before_or_with_memory_held(
    n_steps, is_freed
):
    assert trials(n_steps, is_freed=is_freed).cause is not Cause.HEALTHY


def test_diagnose_evaluation_that_gathers_its_results_is_a_peak_and_may_gather_on_the_host():
    loop = TrainingLoop()
    loop.build()
    for _ in range(3):
        loop.step()
    loop.evaluate(9)
    loop.toy.events.append(oom(100 * MIB, 8 * MIB))

    found = diagnose(Case(snapshot=loop.snapshot()))

    assert found.verdict.cause is Cause.TRANSIENT_PEAK
    assert "The evaluation keeps what train.py:22 in validate" in found.verdict.summary
    assert "8.00 MiB a batch, " in found.verdict.summary
    assert "gather-on-host" in {r.code for r in found.recommendations}
    assert "free-leak" not in {r.code for r in found.recommendations}


def test_diagnose_retry_with_an_earlier_attempt_still_held_is_about_that_attempt():
    loop = TrainingLoop()
    loop.build()
    for size in (40 * MIB, 15 * MIB):
        loop.forward()
        loop.refuse(size, LINEAR)

    found = diagnose(Case(snapshot=loop.snapshot()))

    assert found.verdict.cause is Cause.TRANSIENT_PEAK
    assert "An earlier attempt that failed still holds 22.00 MiB" in found.verdict.summary
    assert "retry-outside-except" in {r.code for r in found.recommendations}


def test_diagnose_evaluation_that_builds_a_graph_is_a_peak_that_no_grad_lowers():
    loop = deeply_trained()
    for stack in deep_layers(20, "validate"):
        loop.new(ACTIVATION, stack)
    loop.toy.refuse(100 * MIB, 8 * MIB)

    found = diagnose(Case(snapshot=loop.snapshot()))

    assert found.verdict.decider == "evaluation-builds-graph"
    assert found.verdict.cause is Cause.TRANSIENT_PEAK
    assert "The model called at train.py:20 in validate keeps 160.00 MiB" in found.verdict.summary
    assert "drop-idle-graph" in {r.code for r in found.recommendations}


SITE = "/env/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("inner", "within"),
    [
        (["transformers/models/gpt2/modeling_gpt2.py"], "modeling_gpt2.py"),
        (
            ["accelerate/hooks.py", "peft/tuners/lora/layer.py", "transformers/trainer.py"],
            "layer.py",
        ),
        (["transformers/trainer.py", "accelerate/accelerator.py"], None),
        ([], None),
    ],
)
def test_holder_behind_one_call_names_the_line_of_the_library_that_made_it(inner, within):
    stack = [
        frame(f"{SITE}/torch/nn/modules/linear.py", 134, "forward"),
        *(frame(f"{SITE}/{file}", 9, "forward") for file in inner),
        frame("finetune.py", 36, "main"),
        frame(f"{SITE}/fire/core.py", 5, "Fire"),
    ]
    events = [segment_alloc(at(0), 20 * MIB), alloc(at(0), 20 * MIB, frames=stack)]
    live = block(20 * MIB, "active_allocated", frames=stack)
    data = columns(snapshot(segment(at(0), live), events=events))

    (holder,) = diagnose(Case(snapshot=data)).holders

    assert str(holder.location) == "finetune.py:36 in main"
    assert (holder.within.filename.rpartition("/")[2] if holder.within else None) == within


@pytest.mark.parametrize(("n_steps", "is_leak"), [(9, True), (4, True), (3, False)])
def test_diagnose_growth_explains_the_limit_once_the_test_of_growth_sees_it(n_steps, is_leak):
    verdict = diagnose(Case(snapshot=leaking(n_steps, free_mib=400))).verdict

    assert (verdict.cause is Cause.LEAK) == is_leak
    assert (verdict.decider == "growth") == is_leak


@pytest.mark.parametrize(
    ("kept_mib", "cause", "also"),
    [(4, Cause.FRAGMENTATION, Cause.LEAK), (24, Cause.LEAK, Cause.FRAGMENTATION)],
)
def test_diagnose_holes_come_first_where_less_was_kept_than_is_asked_for(kept_mib, cause, also):
    verdict = diagnose(Case(snapshot=leaking(12, kept_mib, hole_mib=40, asked_mib=200))).verdict

    assert cause is verdict.cause
    assert also in verdict.also


@pytest.mark.parametrize(
    ("pool_mib", "cause", "also"),
    [(400, Cause.PRIVATE_POOLS, Cause.LEAK), (200, Cause.LEAK, Cause.PRIVATE_POOLS)],
)
def test_diagnose_private_pools_come_first_where_more_is_free_in_them_than_was_kept(
    pool_mib, cause, also
):
    verdict = diagnose(Case(snapshot=leaking(12, 24, hole_mib=8, pool_mib=pool_mib))).verdict

    assert cause is verdict.cause
    assert also in verdict.also


def test_diagnose_leak_says_how_to_let_go_of_what_is_kept():
    found = diagnose(Case(snapshot=leaking())).recommendations[0]

    assert found.code == "free-leak"
    assert "loop.py:5" in found.title
    assert "loss.item()" not in found.change  # nothing says that a loss is kept


TRUTH = Path(__file__).parents[1] / "truth"


def test_setting_that_carries_a_run_half_as_far_again_shows_that_holes_were_in_the_way():
    verdict = diagnose(
        Case(snapshot=read_snapshot(TRUTH / "kept_checkpoints@94.pickle.gz"))
    ).verdict

    assert verdict.cause is Cause.FRAGMENTATION


@pytest.mark.parametrize(
    ("recording", "confidence"),
    [
        ("unfreeze_layers@75", Confidence.POSSIBLE),  # a setting leaves less than another request
        ("superres_tiles@60", Confidence.LIKELY),  # more than that
        ("vit_amp_adamw@97", Confidence.LIKELY),  # less, but the run likely finishes
    ],
)
def test_holes_are_the_likely_cause_only_if_a_setting_gets_the_run_well_past_them(
    recording, confidence
):
    snapshot = read_snapshot(TRUTH / f"{recording}.pickle.gz")

    verdict = diagnose(Case(snapshot=snapshot)).verdict

    assert (verdict.cause, verdict.confidence) == (Cause.FRAGMENTATION, confidence)


@pytest.mark.parametrize("at", [75, 99])
def test_state_of_layers_that_thaw_is_no_leak(at):
    snapshot = read_snapshot(TRUTH / f"unfreeze_layers@{at}.pickle.gz")

    assert diagnose(Case(snapshot=snapshot)).verdict.cause is not Cause.LEAK


@pytest.mark.parametrize(
    ("recording", "confidence", "alike"),
    [
        ("leak_loss_history@99", Confidence.LIKELY, ""),
        ("leak_shape_cache@94", Confidence.POSSIBLE, "A cache or a buffer that fills up"),
        ("dqn_replay@75", Confidence.POSSIBLE, "A cache or a buffer that fills up"),
    ],
)
def test_growth_that_a_cache_may_explain_is_no_likely_leak(recording, confidence, alike):
    snapshot = read_snapshot(TRUTH / f"{recording}.pickle.gz")

    verdict = diagnose(Case(snapshot=snapshot)).verdict

    assert (verdict.cause, verdict.confidence) == (Cause.LEAK, confidence)
    assert alike in verdict.summary
    assert bool(alike) is ("looks the same" in verdict.summary)


def test_buffer_that_no_setting_makes_fit_is_only_a_possible_leak():
    """Whichever row calls growth a leak, a buffer may have a limit."""
    snapshot = read_snapshot(TRUTH / "leak_growing_cat@27.pickle.gz")

    verdict = diagnose(Case(snapshot=snapshot)).verdict

    assert (verdict.cause, verdict.decider) == (Cause.LEAK, "no-setting-mends")
    assert verdict.confidence is Confidence.POSSIBLE


def test_file_without_stacks_says_what_it_cannot_show():
    notes = diagnose(Case(snapshot=settings_snapshot())).notes

    assert "No stacks were recorded: memory cannot be traced to source lines." in notes
