"""Names of the marks and notes that we add to PyTorch's own, and of Inductor's files."""

from __future__ import annotations

import re
from typing import Final

OURS: Final = "fragdoctor."
"""Prefix of the names of marks that PyTorch would not have made."""

BACKWARD: Final = OURS + "backward"
"""A backward pass with everything that it calls; one per micro-batch under accumulation."""

NO_GRAD: Final = OURS + "no_grad#"
"""Prefix of the class of a model whose outermost call keeps nothing for a backward pass:
evaluation, inference, a teacher, the rollouts of reinforcement learning."""

PROGRAM: Final = OURS + "program"
"""The program as a whole; a rehearsal that has seen all of it notes its end."""

WORKSPACE: Final = "cuDNN workspace"
"""The ``user_metadata`` of memory that cuDNN is assumed to request; most of it is cuDNN's."""

GENERATED: Final = re.compile(r"(?:^|[/\\])c[a-z2-7]{51}\.py$")
"""Files that Inductor generated: ``code_hash`` in torch/_inductor/codecache.py makes their names
from "c" and 51 base-32 characters of a digest."""

MODULE_MARK: Final = "nn.Module: "
"""Begins the ``user_metadata`` that names a module: ``nn.Module: GPT.layers.3.mlp`` marks memory
that the module requested while it ran; with ``(gradients)`` after it, the module's gradients. ``run
--module-paths`` writes the first kind, a rehearsal both."""

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
