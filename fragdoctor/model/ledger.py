"""The ledger of a text: where memory is, by its tables, its launch lines and its words."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

_FIRST: Final = r"(?:\b(?:gpu|gup|cuda|device|rank)[ :_-]{0,2}0\b(?!;| has a)|\b(?:0|first) gpu\b)"
ON_TWO_GPUS: Final = (  # a process that nvidia-smi lists on two GPUs
    r"\b(?P<on>\d{1,2}) (?:\S{1,6} ){0,2}(?P<pid>\d{2,9}) C .{0,1500}?"
    r"\b(?!(?P=on) )\d{1,2} (?:\S{1,6} ){0,2}(?P=pid) C "
)
ON_FIRST: Final = (
    rf"{_FIRST}(?: ?\([^)]{{1,9}}\))?[^.;\n(]{{0,40}}\b(?:more|much|most|first|unbalanced|alone)\b"
    rf"|{_FIRST}[^.;\n(]{{0,60}}\b(?:by|for|in|of|from) (?:each|every|all)\b"
    r"|\b(?:more|most|all|every|each|only|other gpus|process(?:es)?)\b[^.;\n(]{0,60}"
    rf"\b(?:on|in|to|of|onto|running|using) ?(?:the |physical )?{_FIRST}"
    r"|\b(?:all|each|every|workers?|process(?:es)?|ranks?)\b[^.\n]{0,60}\b(?:on|in|to|onto) "
    r"(?:the )?(?:one|same|single) (?:gpu|device|card)\b"
    rf"|{ON_TWO_GPUS}"
    r"|\b(?:un|im)balanced[^.\n]{0,40}\b(?:gpu|memory)"
    r"|\bmemory[^.\n]{0,60}n(?:o|')t average\b"
)
"""The ways in which people say that one of several GPUs, mostly the first, holds more."""


class Ledger(Struct, frozen=True):
    """Where memory is, as far as a text says.

    Attributes:
        free_gpu: a GPU that a table shows with no program on it.
        has_others: whether people say that other programs use a GPU, or that one is free.
        is_chosen: whether the shell chose the GPU, which has an effect whatever the program does.
        n_sharing: the most processes of the program that use one GPU at a time, if it is stated; 2
            stands for several.
        has_several: whether the text speaks of several GPUs.
        has_room: whether the GPU was far from full by a table or by what people say.
        is_wsl: whether the program runs under WSL.
        needs_host: whether it fails only with what takes the host's memory: more DataLoader
            workers, weights that wait there.
    """

    free_gpu: int | None = None
    has_others: bool = False
    is_chosen: bool = False
    n_sharing: int = 1
    has_several: bool = False
    has_room: bool = False
    is_wsl: bool = False
    needs_host: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether several processes of the program share the only GPU."""
        return self.n_sharing > 1 and not self.has_several
