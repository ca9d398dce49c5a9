"""The note on an allocation that names a module of the model, in PyTorch's ``user_metadata``.

``nn.Module: GPT.layers.3.mlp`` marks memory that the module requested while it ran; with
``(gradients)`` after it, the module's gradients. ``run --module-paths`` writes the first kind, a
rehearsal both.
"""

from __future__ import annotations

from typing import Final

MODULE_MARK: Final = "nn.Module: "
PARAMETERS: Final = "parameters"
GRADIENTS: Final = "gradients"
OPTIMIZER: Final = "optimizer"
"""The kinds of memory that can be read off a module, named as in ``HoldingKind``."""


def module_note(path: str, held: str = "") -> str:
    """Return the note for a module's path, ``GPT.layers.3``, and the kind of memory it holds."""
    return f"{MODULE_MARK}{path} ({held})" if held else f"{MODULE_MARK}{path}"


def read_module_note(note: str) -> tuple[str, str] | None:
    """Return the path and the kind of memory ("" if there is none); None if it is no such note."""
    if not note.startswith(MODULE_MARK):
        return None
    path = note.removeprefix(MODULE_MARK)
    for held in (PARAMETERS, GRADIENTS, OPTIMIZER):
        if path.endswith(f" ({held})"):
            return path.removesuffix(f" ({held})"), held
    return path, ""
