"""Names of the marks that a rehearsal writes beside PyTorch's own, and of Inductor's files."""

from __future__ import annotations

import re
from typing import Final

OURS: Final = "fragdoctor."
"""Begins the names of marks that PyTorch would not have made."""

BACKWARD: Final = OURS + "backward"
"""A backward pass, with whatever it calls: of gradient accumulation, a micro-batch each."""

NO_GRAD: Final = OURS + "no_grad#"
"""Stands before the class of a model whose outermost call keeps nothing for a backward pass:
evaluation, inference, a teacher, what reinforcement learning collects."""

WORKSPACE: Final = "cuDNN workspace"
"""The ``user_metadata`` of memory that cuDNN is thought to ask for: no more than most of it is."""

GENERATED: Final = re.compile(r"(?:^|[/\\])c[a-z2-7]{51}\.py$")
"""Files of what Inductor generated: ``code_hash`` in torch/_inductor/codecache.py, "c" and 51
characters of a digest in base 32."""
