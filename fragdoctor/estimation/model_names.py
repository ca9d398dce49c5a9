"""Finds the base that a tuned model or a mirror is named after.

Tuning leaves shapes as they are, and the usual names say so: ``Qwen2.5-7B-Instruct`` is
``Qwen2.5-7B``, whoever uploaded it. A name with any other word (a vision tower, a quantised copy,
a merge) is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_TUNED: Final = frozenset({"instruct", "chat", "it", "hf", "pt", "base", "2507"})
# Continued training of the same shape, published under a name of its own.
_SAME_SHAPE: Final = {
    "llama-3.3-70b": "llama-3.1-70b",
    "meta-llama-3.1-8b": "llama-3.1-8b",
    "meta-llama-3.1-70b": "llama-3.1-70b",
    "meta-llama-3.1-405b": "llama-3.1-405b",
    "mistral-7b-v0.2": "mistral-7b",
    "qwen2.5-coder-": "qwen2.5-",
    "qwen2.5-math-": "qwen2.5-",
    "deepseek-r1-distill-qwen-1.5b": "qwen2.5-1.5b",
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "deepseek-r1": "deepseek-v3",
}


def _plain(name: str) -> str:
    """Return the name of a repository without its owner and the words of tuning."""
    words = name.strip().lower().rpartition("/")[2].split("-")
    return "-".join(word for word in words if word not in _TUNED)


def _letters(name: str) -> str:
    """Return a name without the dashes that people leave out: ``llama3-8b`` is ``llama-3-8b``."""
    parted = re.sub(r"[_ ]", "-", _plain(name))
    return re.sub(r"(?<=[a-z])-(?=\d)|(?<=\d)-(?=[a-z])", "", parted)


def base_of(name: str, known: Iterable[tuple[str, str]]) -> str:
    """Return the known model that a name is a tuned or mirrored copy of; "" = none, or several.

    Args:
        name: as somebody wrote it, with or without an owner.
        known: names and repositories of models.
    """
    wanted = _plain(name)
    for start, base in _SAME_SHAPE.items():
        if wanted == start or (start.endswith("-") and re.fullmatch(rf"{start}[\d.]+b", wanted)):
            wanted = base + wanted[len(start) :]
            break
    spelled = _letters(wanted)
    found = {own for own, hub in known if wanted and spelled in (_letters(own), _letters(hub))}
    return found.pop() if len(found) == 1 else ""
