"""Names of the marks that a rehearsal adds to PyTorch's own, and of Inductor's files."""

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

WORKSPACE: Final = "cuDNN workspace"
"""The ``user_metadata`` of memory that cuDNN is assumed to request; most of it is cuDNN's."""

GENERATED: Final = re.compile(r"(?:^|[/\\])c[a-z2-7]{51}\.py$")
"""Files that Inductor generated: ``code_hash`` in torch/_inductor/codecache.py makes their names
from "c" and 51 base-32 characters of a digest."""
