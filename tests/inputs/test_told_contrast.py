"""Tests of what a text says a failure depends on."""

from __future__ import annotations

import pytest

from fragdoctor.inputs.told_contrast import told_contrast
from fragdoctor.model.case import ContrastKind, ToldContrast


@pytest.mark.parametrize(
    ("said", "contrast"),
    [
        (
            "If I turn on `keep_maps`, it crashes with out of memory.",
            ToldContrast(ContrastKind.CHANGE, "keep_maps"),
        ),
        (
            "Training needs 9 GB more. When I remove the --save_features flag it works fine.",
            ToldContrast(ContrastKind.CHANGE, "--save_features flag"),
        ),
        (
            "The same script runs fine in widget 1.4.2, but in widget 1.5.0 it is out of memory.",
            ToldContrast(ContrastKind.VERSION, "widget 1.5.0", "widget 1.4.2"),
        ),
        (
            "After I updated, every run ends with CUDA out of memory.",
            ToldContrast(ContrastKind.VERSION),
        ),
        (
            "CUDA out of memory with num_candidates set to 600.",
            ToldContrast(ContrastKind.RAISED, "num_candidates", at="600"),
        ),
        (
            "CUDA out of memory when I raise the number of rollouts.",
            ToldContrast(ContrastKind.RAISED, "the number of rollouts"),
        ),
        (
            "It works for 20 speakers, but 90 speakers end in CUDA out of memory.",
            ToldContrast(ContrastKind.AMOUNT, "speakers", "20", "90"),
        ),
        (
            "The demo trains fine. With my own dataset I get CUDA out of memory.",
            ToldContrast(ContrastKind.DATA),
        ),
        (
            "CUDA out of memory for longer recordings.",
            ToldContrast(ContrastKind.LARGE, "long recordings"),
        ),
        (
            "RAM fills up; I use a replay buffer.",
            ToldContrast(ContrastKind.BUFFER, "replay buffer"),
        ),
        (
            "CUDA out of memory. The vocabulary has 750,000 entries.",
            ToldContrast(ContrastKind.COUNTED, "entries of the vocabulary"),
        ),
        (
            "CUDA out of memory. The number of class is high.",
            ToldContrast(ContrastKind.COUNTED, "classes"),
        ),
    ],
)
def test_text_says_what_the_failure_depends_on(said, contrast):
    assert told_contrast(said, said) == contrast


@pytest.mark.parametrize(
    "said",
    [
        "If I turn on --fp16, it is out of memory.",  # saves memory
        "Even when I change `max_splits`, it is still out of memory.",  # was tried
        "CUDA out of memory when I raise the batch size.",
        "CUDA 11.8, Python 3.10: out of memory. Before that all was fine.",  # two programs
        "RuntimeError: CUDA out of memory. Tried to allocate 2.50 GiB (3.25 GiB free)",
        "It works for 90 speakers, but 20 speakers end in CUDA out of memory.",
    ],
)
def test_what_was_tried_or_is_no_difference_is_no_contrast(said):
    assert told_contrast(said, said).kind is None
