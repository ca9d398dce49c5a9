"""What an optimizer's step holds, and what is advised about it."""

from __future__ import annotations

from analysis.training_loop import PARAMETERS, UPDATE, TrainingLoop
from builders import MIB, oom

from fragdoctor.analysis.device import analyze_device
from fragdoctor.diagnosis.pipeline import diagnose
from fragdoctor.model.case import Case
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.rules.capacity.optimizer_state import state_in_step

MODEL = sum(PARAMETERS)


def failed_in_step(n_temporaries: int) -> Snapshot:
    """Return a run that fails in its second step, while that many temporaries live."""
    loop = TrainingLoop(foreach=False)
    loop.build()
    loop.step()
    _, *activations = loop.forward()
    loop.backward(activations)
    for _ in range(n_temporaries):
        loop.new(PARAMETERS[1], UPDATE)
    loop.toy.events.append(oom(64 * MIB, 0))
    loop.event_stacks[len(loop.toy.events) - 1] = loop.stack_id(UPDATE)
    return loop.snapshot()


def test_state_in_a_step_is_told_from_temporaries():
    assert state_in_step(analyze_device(failed_in_step(5), 0)) == 2 * MODEL


def test_state_without_phases_is_none():
    loop = TrainingLoop(context="none")
    loop.build()
    loop.step()

    assert state_in_step(analyze_device(loop.snapshot(), 0)) == 0


def test_diagnose_large_step_temporaries_advises_a_fused_optimizer():
    advice = {r.code: r for r in diagnose(Case(snapshot=failed_in_step(5))).recommendations}

    # The request that failed is a temporary itself.
    assert advice["fused-optimizer"].predicted.fits
    assert advice["smaller-optimizer-state"].saves_bytes > 5 * PARAMETERS[1]
