"""How a traced model is to be trained."""

from __future__ import annotations

from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen


@frozen
class TrainingSetup:
    """How to train.

    Attributes:
        batch: first dimension of the inputs; None = as the factory gave them.
        input_shape: shape of the one input, where the factory gives none.
        input_dtype: its dtype, a name in ``torch``.
        loss: ``ce``, ``mean`` or "" (what the outputs suggest).
        optimizer: used unless the factory gives one.
        dtype: what the model is converted to, or "" (as built).
        autocast: ``bf16``, ``fp16`` or "".
        grad_accumulation: passes a step.
        inference: one pass without gradients, no training.
        steps: how many; the second is the first with optimizer states there from the start.
        given: names of options that the user insists on: refused where the factory decides.
    """

    batch: int | None = None
    input_shape: tuple[int, ...] = ()
    input_dtype: str = "float32"
    loss: str = ""
    optimizer: str = "adamw"
    dtype: str = ""
    autocast: str = ""
    grad_accumulation: int = 1
    inference: bool = False
    steps: int = 2
    given: frozenset[str] = frozenset()


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the sizes in ``8,1024`` or ``8x1024``; () for "".

    Raises:
        ConfigError: it is something else.
    """
    if not text.strip():
        return ()
    try:
        sizes = tuple(int(part) for part in text.lower().replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigError(
            f"--input-shape wants sizes such as 8,1024, not {text!r}.", hint="Batch comes first."
        )
    return sizes
