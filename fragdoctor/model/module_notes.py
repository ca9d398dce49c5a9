"""The note on an allocation that names a module of the model: a ``user_metadata`` of PyTorch's.

``nn.Module: GPT.layers.3.mlp`` is what that module asked for while it ran; with ``(gradients)``
after it, what its gradients are. ``run --module-paths`` writes the first, a rehearsal both.
"""

from __future__ import annotations

from typing import Final

MODULE_MARK: Final = "nn.Module: "
PARAMETERS: Final = "parameters"
GRADIENTS: Final = "gradients"
OPTIMIZER: Final = "optimizer"
"""What a module holds that is read off it, by the names of ``HoldingKind``."""


def module_note(path: str, held: str = "") -> str:
    """Return the note of a module by its path, ``GPT.layers.3``, and by what it holds there."""
    return f"{MODULE_MARK}{path} ({held})" if held else f"{MODULE_MARK}{path}"


def read_module_note(note: str) -> tuple[str, str] | None:
    """Return the path and what is held, "" if nothing; None where it is no such note."""
    if not note.startswith(MODULE_MARK):
        return None
    path = note.removeprefix(MODULE_MARK)
    for held in (PARAMETERS, GRADIENTS, OPTIMIZER):
        if path.endswith(f" ({held})"):
            return path.removesuffix(f" ({held})"), held
    return path, ""
