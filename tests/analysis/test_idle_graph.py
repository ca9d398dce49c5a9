"""Evaluations that build a graph for nothing, and those that do not."""

from __future__ import annotations

import pytest
from analysis.training_loop import ACTIVATION, N_LAYERS, TrainingLoop, deep_layers, deeply_trained
from builders import MIB

from fragdoctor.analysis.device import analyze_device
from fragdoctor.analysis.result import IdleGraph


def evaluated(
    loop: TrainingLoop, *, builds_graph: bool, n_layers: int = N_LAYERS
) -> IdleGraph | None:
    """Call the model once from another line, and fail there."""
    before = None
    for stack in deep_layers(20, "validate")[:n_layers]:
        result = loop.new(ACTIVATION, stack)
        if before is not None and not builds_graph:
            loop.free(before, stack)
        before = result
    loop.toy.refuse(900 * MIB, 0)
    return analyze_device(loop.snapshot(), 0).idle_graph


def test_find_idle_graph_an_evaluation_that_keeps_what_training_keeps():
    found = evaluated(deeply_trained(), builds_graph=True)

    assert found is not None
    assert found.n_bytes == (N_LAYERS - 8) * ACTIVATION  # the last ones may still be read
    assert found.share == found.usual_share == pytest.approx(1.0)


def test_find_idle_graph_of_an_evaluation_that_fails_early_the_first_half_counts():
    found = evaluated(deeply_trained(), builds_graph=True, n_layers=6)

    assert found is not None
    assert found.n_bytes == 3 * ACTIVATION
    assert evaluated(deeply_trained(), builds_graph=True, n_layers=5) is None  # two are too few
    assert evaluated(deeply_trained(), builds_graph=False, n_layers=6) is None


def test_find_idle_graph_an_evaluation_that_lets_go_builds_none():
    assert evaluated(deeply_trained(), builds_graph=False) is None


def test_find_idle_graph_without_a_backward_pass_to_compare_with_is_unknown():
    assert evaluated(deeply_trained(0), builds_graph=True) is None


def test_find_idle_graph_a_step_of_training_that_fails_builds_its_own():
    loop = deeply_trained()
    for stack in deep_layers(4):
        loop.new(ACTIVATION, stack)
    loop.toy.refuse(900 * MIB, 0)

    assert analyze_device(loop.snapshot(), 0).idle_graph is None
