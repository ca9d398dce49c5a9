"""Tells from a file's entries which program it configures."""

from __future__ import annotations

from typing import Final

from fragdoctor.errors import InputError
from fragdoctor.estimation.recipes import (
    axolotl,
    launch,
    llamafactory,
    torchtitan,
    torchtune,
    trainer,
    vllm,
)
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import Format, Reading, flat, read

FORMATS: Final = (
    launch.DEEPSPEED,
    torchtune.FORMAT,
    torchtitan.FORMAT,
    axolotl.FORMAT,
    llamafactory.FORMAT,
    launch.ACCELERATE,
    trainer.FORMAT,
    vllm.FORMAT,
)
"""The formats in the order in which they are tried: the ones with distinctive names come first."""

KNOWN: Final = (
    "Known are the files of Axolotl, LLaMA-Factory, torchtune, torchtitan, TRL and Transformers, "
    "vLLM, Accelerate and DeepSpeed."
)


def format_of(entries: Entries) -> Format | None:
    """Return the format of a configuration, or None if nothing in it shows the format."""
    for format_ in FORMATS:
        keys = flat(vllm.plain(entries) if format_ is vllm.FORMAT else entries).keys()
        # The name of a section also counts as a key.
        names = {*keys, *(key.partition(".")[0] for key in keys)}
        if any(names.issuperset(sign.split()) for sign in format_.signs):
            return format_
    return None


def reading_of(entries: Entries, source: str) -> Reading:
    """Return what a configuration says.

    Raises:
        InputError: nothing in it shows which program it configures.
    """
    format_ = format_of(entries)
    if format_ is None:
        raise InputError(f"Nothing in {source} shows which program it is for.", hint=KNOWN)
    return read(format_, vllm.plain(entries) if format_ is vllm.FORMAT else entries, source)
