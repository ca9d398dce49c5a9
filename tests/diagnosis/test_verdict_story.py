"""What the story of a log makes of the verdict."""

from __future__ import annotations

import pytest
import story_logs

from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.inputs.messages import find_messages
from fragdoctor.model.case import Case
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence


def diagnosis_of(text):
    return diagnose(Case(oom=find_messages(text)))


def sweep(growth_mib):
    return "".join(
        f"=== Trial {i} ===\nmemory allocated: {1000 + growth_mib * i} MiB\nTrial {i} done\n"
        for i in range(12)
    )


def test_memory_that_accumulates_without_a_failure_yet_is_a_leak_with_advice():
    diagnosis = diagnosis_of(sweep(150))

    assert diagnosis.verdict.cause is Cause.LEAK
    assert diagnosis.verdict.confidence is Confidence.LIKELY
    assert "150.00 MiB a trial" in diagnosis.verdict.summary
    assert "says that memory ran out" in diagnosis.verdict.summary
    assert diagnosis.recommendations[0].code == "free-between-trials"


def test_level_sweep_without_a_failure_is_no_leak_and_gets_no_advice():
    diagnosis = diagnosis_of(sweep(0))

    assert diagnosis.verdict.cause is Cause.NOT_MEMORY
    assert diagnosis.verdict.summary == "Nothing in 36 lines says that memory ran out."
    assert diagnosis.recommendations == ()


def test_assert_in_a_growing_sweep_stays_the_verdict():
    diagnosis = diagnosis_of(sweep(150) + f"Traceback:\n{story_logs.ASSERT}")

    assert diagnosis.verdict.cause is Cause.NOT_MEMORY
    assert "index or label" in diagnosis.verdict.summary


def test_trials_in_processes_of_their_own_are_not_told_to_free_their_memory():
    text = "".join(
        f"Trial t_ab_0000{i} started\n(train pid={500 + i}) epoch 1\n"
        + story_logs.traceback(story_logs.message(20, 1 + i / 4), f"(train pid={500 + i}) ")
        + f"Trial t_ab_0000{i} errored\n"
        for i in range(5)
    )

    diagnosis = diagnosis_of(text)

    assert len(diagnosis.story.trials) == 5
    assert "free-between-trials" not in [r.code for r in diagnosis.recommendations]


@pytest.mark.parametrize(("step_mib", "cause"), [(300, Cause.LEAK), (10, Cause.FRAGMENTATION)])
def test_growth_explains_the_holes_at_a_failure_if_it_is_more_than_the_request(step_mib, cause):
    first = 20000 - 40 * step_mib
    prints = "".join(
        f"step {10 * i} memory allocated: {first + step_mib * i} MiB\n" for i in range(40)
    )

    diagnosis = diagnosis_of(prints + story_logs.traceback(story_logs.message(19.9, 2.8)))

    assert diagnosis.verdict.cause is cause
