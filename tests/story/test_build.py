"""The story of whole logs: order, trials, causes and trends."""

from __future__ import annotations

import pytest
import story_logs

from fragdoctor.inputs.messages import find_messages
from fragdoctor.model.finding import Confidence
from fragdoctor.model.story import Direction, SceneKind, TrialOutcome
from fragdoctor.report.views.log_story import trend_text
from fragdoctor.story.build import build_story
from fragdoctor.story.trends import accumulation

GIB = 1024**3


def story_of(text):
    return build_story(find_messages(text))


def trend_of(story, figure):
    known = [t for t in story.trends if t.figure == figure]
    return max(known, key=lambda t: (t.confidence is not None, len(t.points)))


def event(story, kind, rank=None):
    return next(e for e in story.events if e.kind is kind and (rank is None or e.rank == rank))


def test_growing_sweep_tells_growth_from_trial_to_trial():
    story = story_of(story_logs.optuna())

    grown = accumulation(story)
    assert grown is not None
    assert grown.over == "trial"
    assert grown.slope_bytes == pytest.approx(1.6 * GIB, rel=0.01)
    assert grown.confidence is Confidence.LIKELY
    assert [t.outcome for t in story.trials] == [TrialOutcome.FINISHED] * 6 + [
        TrialOutcome.FAILED
    ] * 2
    assert (story.n_ooms, [t.n_ooms for t in story.trials]) == (2, [0] * 6 + [1, 1])
    assert story.is_by_time


def test_level_sweep_tells_no_growth():
    story = story_of(story_logs.optuna(growth=0.0))

    assert accumulation(story) is None


def test_two_trials_are_too_few_for_a_trend():
    story = story_of(story_logs.optuna(n=2))

    assert accumulation(story) is None
    assert {t.direction for t in story.trends} == {Direction.TOO_FEW}


def test_growing_holes_are_told_from_growing_memory():
    story = story_of(story_logs.holes())

    assert trend_of(story, "unallocated").slope_bytes == pytest.approx(0.75 * GIB, rel=0.01)
    assert accumulation(story) is None
    assert trend_of(story, "allocated").direction is Direction.LEVEL


def test_assert_that_comes_first_is_no_consequence_and_later_errors_are():
    story = story_of(story_logs.assert_first())

    first = event(story, SceneKind.DEVICE_ASSERT)
    later = [e for e in story.events if e.caused_by == story.events.index(first)]
    assert first.caused_by is None
    assert [e.kind for e in later] == [SceneKind.OOM, SceneKind.CUDA_ERROR]
    assert later[0].confidence is Confidence.PROVEN
    assert story.events[-1].kind is SceneKind.OOM
    assert story.events[-1].caused_by is None


def test_assert_after_an_oom_follows_from_it_in_the_same_rank_only():
    story = story_of(story_logs.ranks())

    oom = story.events.index(event(story, SceneKind.OOM))
    assert event(story, SceneKind.DEVICE_ASSERT, rank=2).caused_by == oom
    other = event(story, SceneKind.DEVICE_ASSERT, rank=1)
    assert other.caused_by is None
    assert "another rank" in other.reason
    assert event(story, SceneKind.COLLECTIVE, rank=0).caused_by == oom


def test_assert_in_the_next_trial_does_not_follow_from_the_oom():
    text = (
        f"=== Trial 0 ===\n{story_logs.traceback(story_logs.message(20, 1))}"
        f"=== Trial 1 ===\nstep 1\n{story_logs.ASSERT}"
    )

    story = story_of(text)

    found = event(story, SceneKind.DEVICE_ASSERT)
    assert found.caused_by is None
    assert "another trial" in found.reason


def test_assert_right_after_an_oom_of_one_process_follows_from_it():
    text = f"Epoch 1/3\n{story_logs.traceback(story_logs.message(20, 1))}{story_logs.ASSERT}"

    story = story_of(text)

    found = event(story, SceneKind.DEVICE_ASSERT)
    assert (found.caused_by, found.confidence) == (1, Confidence.LIKELY)


def test_assert_long_after_a_recovered_oom_does_not_follow_from_it():
    steps = "".join(f"step {n} loss 0.1\n" for n in range(1500))
    text = story_logs.traceback(story_logs.message(20, 1)) + steps + story_logs.ASSERT

    story = story_of(text)

    assert event(story, SceneKind.DEVICE_ASSERT).caused_by is None


def test_restarts_are_counted_and_separate_the_processes():
    story = story_of(story_logs.torchrun())

    assert (story.n_restarts, story.n_ooms) == (2, 3)
    assert [e.kind for e in story.events].count(SceneKind.RESTART) == story.n_restarts
    times = [e.time_s for e in story.events]
    assert times == sorted(times)
    assert story.duration_s == pytest.approx(2 * 3600 + 4, abs=1)


def test_progress_bar_says_how_far_the_run_had_come():
    story = story_of(story_logs.bars())

    assert [e.place for e in story.events if e.kind is SceneKind.PROGRESS][-1] == "epoch 2, 13/25"


def test_trainer_says_how_far_the_run_had_come():
    story = story_of(story_logs.trainer(fails=True))

    assert story.events[-1].kind is SceneKind.OOM
    assert story.events[-2].place == "190/2000"


@pytest.mark.parametrize(
    "text",
    [
        story_logs.trainer(fails=False),
        story_logs.message(20, 1),
        story_logs.traceback(story_logs.message(20, 1)),
        story_logs.traceback(story_logs.message(20, 1)) * 2,
        "",
    ],
)
def test_healthy_log_and_single_message_have_no_story(text):
    assert story_of(text) is None


def test_clock_that_passes_midnight_goes_on():
    text = "".join(f"{h:02d}:30:00 step {h}\n" for h in (22, 23, 0, 1, 2, 3))
    story = story_of(text + story_logs.traceback(story_logs.message(20, 1)))

    assert [e.place for e in story.events if e.place] == ["step 22", "step 3"]
    assert story.duration_s == pytest.approx(5 * 3600)


def test_level_sweep_without_a_failure_says_that_nothing_accumulates():
    story = story_of(story_logs.optuna(growth=0.0, n_failing=0))

    assert trend_of(story, "allocated").direction is Direction.LEVEL
    assert story.n_ooms == 0


def test_traceback_below_the_failed_line_belongs_to_the_trial_that_failed():
    text = "".join(
        f"[W 2024-05-01 10:0{i}:00,000] Trial {i} failed with parameters: {{}} because of the "
        f"following error: RuntimeError().\n{story_logs.traceback(story_logs.message(20 + i, 1))}"
        if i % 2
        else f"[I 2024-05-01 10:0{i}:00,000] Trial {i} finished with value: 0.1\n"
        for i in range(6)
    )

    story = story_of(text)

    assert [(t.name, t.n_ooms) for t in story.trials] == [
        ("0", 0), ("1", 1), ("2", 0), ("3", 1), ("4", 0), ("5", 1),
    ]  # fmt: skip


def test_traceback_above_the_failed_line_leaves_the_next_one_to_the_next_trial():
    text = "".join(
        story_logs.traceback(story_logs.message(20 + i, 1)) + f"Trial {i} failed\n"
        for i in range(3)
    )

    story = story_of(text)

    assert [(t.name, t.n_ooms) for t in story.trials] == [("0", 1), ("1", 1), ("2", 1)]


def test_lines_about_one_restart_are_one_event_even_with_a_failure_between():
    failed = story_logs.traceback(story_logs.message(21, 0.4))
    text = "step 1\n" * 9 + "Restarting job\n" + failed + "x\n" * 5 + "Restarting worker group\n"

    story = story_of(text + "step 1\n" * 9)

    assert [e.kind for e in story.events].count(SceneKind.RESTART) == story.n_restarts == 1


def test_run_that_resumes_from_a_checkpoint_is_not_restarted():
    text = "Resuming training from checkpoint 7\n" + "step 8 loss 0.1\n" * 9

    story = story_of(text + story_logs.traceback(story_logs.message(21, 0.4)))

    assert story.n_restarts == 0
    assert SceneKind.RESTART not in [e.kind for e in story.events]


def test_same_message_after_each_restart_is_a_failure_each_time():
    failed = story_logs.traceback(story_logs.message(21, 0.4), "[rank1]: ")
    restart = "[default] Worker group FAILED. 2/3 attempts left; will restart worker group\n"
    steps = "[rank1]: step 100 loss 0.4\n" * 3

    story = story_of((steps + failed + restart) * 3)

    assert story.n_ooms == 3
    assert [e.kind for e in story.events].count(SceneKind.RESTART) == 3


def test_end_of_a_trial_is_not_linked_to_the_failure_of_the_next():
    text = "Trial 1 failed with value None.\nTrial 2 starts\n" + story_logs.traceback(
        story_logs.message(20, 1)
    )

    assert event(story_of(text), SceneKind.TRIAL_FAILED).caused_by is None


@pytest.mark.parametrize("is_shared", [False, True])
def test_growth_over_trials_with_a_process_each_is_no_accumulation(is_shared):
    text = "".join(
        f"(train pid={7 if is_shared else 100 + i}) Trial {i} starts\n"
        f"(train pid={7 if is_shared else 100 + i}) Trial {i} GPU memory allocated: {2 + i}.0 GiB\n"
        f"(train pid={7 if is_shared else 100 + i}) Trial {i} finished\n"
        for i in range(8)
    )

    story = story_of(text + story_logs.traceback(story_logs.message(20, 1)))

    assert trend_of(story, "allocated").direction is Direction.GROWS
    assert (accumulation(story) is not None) is is_shared
    assert ("nothing is left over" in trend_text(trend_of(story, "allocated"))) is not is_shared
