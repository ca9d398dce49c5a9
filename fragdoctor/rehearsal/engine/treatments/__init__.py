"""Changes to a program that are applied from outside while it is rehearsed.

Each treatment is a file with an ``install`` that patches what the program calls; the program's own
code stays as it is. ``TREATMENTS`` names them; what each costs, and what the user writes for it, is
defined where they are prescribed (``fragdoctor/rehearsal/prescription``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fragdoctor.rehearsal.engine.calls import after_making
from fragdoctor.rehearsal.engine.treatments import (
    accumulation,
    blocks,
    contexts,
    holding,
    losses,
    numbers,
    optimizers,
    sharding,
    written,
)

TREATMENTS: Final[dict[str, Callable[[str], None]]] = {
    "checkpoint": blocks.checkpoint,
    "accumulate": accumulation.install,
    "batch-number": numbers.install,
    "evaluation-batch": accumulation.split_batches,
    "fused": optimizers.fused,
    "adamw-8bit": optimizers.in_8_bits,
    "adafactor": optimizers.adafactor,
    "autocast": contexts.autocast,
    "bf16-parameters": contexts.bfloat16_parameters,
    "save-on-cpu": contexts.save_on_cpu,
    "no-grad": contexts.no_grad,
    "set-to-none": optimizers.set_to_none,
    "frozen": optimizers.frozen,
    "chunked-loss": losses.in_chunks,
    "step-in-backward": lambda _: after_making(written.step_in_backward),
    "state-on-host": lambda _: after_making(written.state_on_host),
    "held-on-host": holding.on_host,
    "sdpa": contexts.fused_attention,
    "fully-shard": sharding.fully_sharded,
}
"""Each treatment is installed with what follows its name in the spec; most need nothing."""


def apply(specs: Sequence[str]) -> None:
    """Install treatments: ``checkpoint:0,5``, ``autocast``.

    Raises:
        KeyError: there is no such treatment.
    """
    for spec in specs:
        name, _, argument = spec.partition(":")
        TREATMENTS[name](argument)
