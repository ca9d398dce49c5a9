"""Finds the base that a tuned model or a mirror is named after.

Tuning does not change shapes, and common names show the base: ``Qwen2.5-7B-Instruct`` has the shape
of ``Qwen2.5-7B``, whoever uploaded it. So does a quantized copy, and its name usually says how it
is stored. If a name has any other word (a vision tower, a merge), no base is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_TUNED: Final = frozenset({"instruct", "chat", "it", "hf", "pt", "base", "latest"})
_STAMP: Final = re.compile(r"\d{4}")
"""A word that says when a copy was published: ``2407`` is July 2024."""

_TRAINED_FURTHER: Final = {
    "codellama-": "code-llama2-",
    "gemma-": "codegemma- gemma-1.1-",
    "llama-": "vicuna-",
    "llama-3.1-": ("meta-llama-3.1- hermes-3-llama-3.1- llama-3.1-nemotron- "
                   "deepseek-r1-distill-llama-"),
    # The last one is Ollama's: https://ollama.com/library/deepseek-r1/tags.
    "qwen2.5-": ("qwen2- qwen2.5-coder- qwen2.5-math- deepseek-r1-distill-qwen- "
                 "deepseek-r1-distill- deepseek-r1-"),
    "qwen3-": "qwen3-coder-",
    "smollm2-": "smollm-",
    "yi-": "yi-1.5-",
}  # fmt: skip
"""Series of models -> the names of others that were trained further from the same shapes."""
_SAME_SHAPE: Final = {
    name: base for base, names in _TRAINED_FURTHER.items() for name in names.split()
}


_SIZE: Final = r"[\d.]+[bm](?:-a[\d.]+b)?"
"""What follows a name that ends in a dash: ``7b``, ``360m``, ``30b-a3b``."""
_STORED: Final = {
    "awq": "awq", "gptq": "gptq", "4bit": "int4", "8bit": "int8", "fp8": "fp8-weights",
    "int8": "int8", "int4": "", "bnb": "",
}  # fmt: skip
"""Word in a copy's name -> the precision it is stored in, "" = another word says it."""


def _words(name: str) -> list[str]:
    """Return the words of a repository's name without its owner, whatever separates them."""
    return re.split(r"[-_ :]+", name.strip().lower().rpartition("/")[2])


_OF_LLAMA_CPP: Final = re.compile(r"gguf|(?:iq|q)\d(?:k?(?:[01sml]|xx?s)?)?")
"""A word that names a format of llama.cpp: the first word of ``Q4_K_M``."""


def is_of_llama_cpp(name: str) -> bool:
    """Return whether a name belongs to a file or an Ollama tag in a format of llama.cpp."""
    return any(_OF_LLAMA_CPP.fullmatch(word) for word in _words(name.replace(".", "-")))


def stored_in(name: str) -> str:
    """Return the precision that the name of a quantized copy states, or "" if it states none."""
    found = [kind for word in reversed(_words(name)) if (kind := _STORED.get(word))]
    return next((kind for kind in found if kind != "int4"), "int4" if found else "")


def _plain(name: str) -> str:
    """Return a name without its words for tuning and storage, which are never the first word."""
    first, *words = _words(name)
    kept = (w for w in words if not (w in _TUNED or w in _STORED or _STAMP.fullmatch(w)))
    return "-".join((first, *kept))


def _letters(name: str) -> str:
    """Return a name without the dashes that people omit: ``llama3-8b`` is ``llama-3-8b``."""
    return re.sub(r"(?<=[a-z])-(?=\d)|(?<=\d)-(?=[a-z])", "", _plain(name))


def is_series(name: str) -> bool:
    """Return whether several models of different sizes have a name that begins with this one."""
    return f"{_plain(name)}-" in _SAME_SHAPE


def base_of(name: str, known: Iterable[tuple[str, str]]) -> str:
    """Return the known model that a name is a tuned or mirrored copy of; "" = none, or several.

    Args:
        name: the name as the user wrote it, with or without an owner.
        known: names and repositories of known models.
    """
    wanted = _letters(name)
    series = (
        _letters(base + wanted[len(start) :])
        for same, base in _SAME_SHAPE.items()
        if re.fullmatch(rf"{(start := _letters(f'{same}0')[:-1])}{_SIZE}", wanted)
    )
    spelled = [(own, (_letters(own), _letters(other))) for own, other in known]
    for one in filter(None, (wanted, *series)):
        found = {own for own, names in spelled if one in names}
        if found:
            return found.pop() if len(found) == 1 else ""
    return ""
