"""Code-level what-ifs, as edits of the list of requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fragdoctor._native import _ext
from fragdoctor.allocator.fidelity import Baseline


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of the code: its name for people, and how it changes the requests."""

    name: str
    apply: Callable[[Baseline], _ext.NativeOps]
