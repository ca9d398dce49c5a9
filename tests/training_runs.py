"""Traces of a made-up training program at a chosen batch size, for which the truth is known."""

from __future__ import annotations

from builders import columns
from toy_allocator import ToyAllocator

from fragdoctor.model.snapshot import Snapshot

MIB = 2**20
# Line numbers of the program.
MODEL, FORWARD, LOSS, BACKWARD = 10, 20, 30, 40
N_PARAMETERS, PARAMETER_BYTES = 4, 12 * MIB
N_LAYERS, ACTIVATION_BYTES = 5, 2 * MIB


def training(batch: int, *, n_steps: int = 3, leak: int = 0):
    """Return the allocator after training.

    Args:
        batch: number of samples; each layer keeps ``ACTIVATION_BYTES`` per sample, the loss twice
            that.
        n_steps: number of training steps.
        leak: bytes that are kept per step.
    """
    toy = ToyAllocator()
    for _ in range(N_PARAMETERS):
        toy.malloc(PARAMETER_BYTES, line=MODEL)
    for _ in range(n_steps):
        kept = [toy.malloc(ACTIVATION_BYTES * batch, line=FORWARD) for _ in range(N_LAYERS)]
        loss = toy.malloc(2 * ACTIVATION_BYTES * batch, line=LOSS)
        gradients = [toy.malloc(PARAMETER_BYTES, line=BACKWARD) for _ in range(N_PARAMETERS)]
        for block in (*reversed(kept), loss):
            toy.free(block)
        for block in gradients:
            toy.free(block)
        if leak:
            toy.malloc(leak, line=60)
    return toy


def recorded(batch: int, **more: int) -> Snapshot:
    """Return the snapshot of a training run; ``more`` are arguments of ``training``."""
    return columns(training(batch, **more).data())


def true_peak(batch: int, **more: int) -> int:
    """Return the peak of allocated bytes that the allocator itself counted."""
    return max(allocated for allocated, _, _ in training(batch, **more).states)
