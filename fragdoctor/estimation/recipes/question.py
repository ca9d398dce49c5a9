"""Reads the inputs of a question: what its configuration files say, and its models."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from fragdoctor.errors import FragdoctorError, InputError, LimitExceeded
from fragdoctor.estimation.recipes import (
    axolotl,
    launch,
    llamafactory,
    torchtitan,
    torchtune,
    trainer,
    vllm,
)
from fragdoctor.estimation.recipes.documents import YAML_SUFFIXES, Entries, read_entries, read_text
from fragdoctor.estimation.recipes.entries import Format, Reading, flat, read
from fragdoctor.estimation.recipes.shell import CommandLine, command_lines
from fragdoctor.estimation.recipes.values import shown

_OF_MODELS: Final = ("architectures", "model_type", "weight_map", "_class_name", "segments")
_SCRIPTS: Final = (".sh", ".bash", ".slurm", ".sbatch")
MAX_REFERENCES: Final = 3
PASTED: Final = "--args"
NOT_HERE: Final = "is missing; what it shares among GPUs or changes is not counted"


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


def is_recipe(path: Path) -> bool:
    """Return whether a file is a program's configuration, by its suffix or, for JSON, its entries.

    JSON that cannot be read is left to the reader of models.
    """
    suffix = path.suffix.lower()
    if suffix in (*YAML_SUFFIXES, ".toml", *_SCRIPTS):
        return True
    if suffix != ".json" or not path.is_file():
        return False
    try:
        entries = read_entries(path)
    except FragdoctorError:
        return False
    return not entries.keys() & set(_OF_MODELS) and format_of(entries) is not None


def question_of(inputs: Sequence[str], pasted: str = "") -> tuple[Sequence[Reading], Sequence[str]]:
    """Return what the configurations and the pasted command line say, and the inputs of a model.

    Raises:
        ConfigError: PyYAML is missing.
        InputError: a file cannot be read, or nothing shows which program it is for.
        RefusedSnapshot: a file holds something that no genuine configuration does.
        LimitExceeded: a file is too large or nested too deeply.
    """
    readings: list[Reading] = []
    models = []
    for text in inputs:
        path = Path(text)
        if not is_recipe(path):
            models.append(text)
        elif path.suffix.lower() in _SCRIPTS:
            readings += _of_commands(read_text(path), text, path.parent)
        else:
            readings += _of_file(path, text)
    if pasted:
        readings += _of_commands(pasted, PASTED, Path())
    return readings, models


def _of_file(path: Path, source: str) -> list[Reading]:
    reading = reading_of(read_entries(path), source)
    return [reading, *_referenced(reading, path.parent)]


def _referenced(reading: Reading, folder: Path, depth: int = 0) -> Iterator[Reading]:
    """Yield what the files that a configuration names say, and note the files that are missing."""
    if depth == MAX_REFERENCES:
        raise LimitExceeded(f"{reading.source} names files that name more and more files.")
    for key, text in reading.references.items():
        if isinstance(text, dict):
            yield reading_of(text, f"{reading.source}, {key}")
            continue
        path = _found(text, folder)
        if path is None:
            reading.leave(key, text, NOT_HERE)
            continue
        inner = reading_of(read_entries(path), str(path))
        reading.leave(key, text)
        yield inner
        yield from _referenced(inner, path.parent, depth + 1)


def _found(text: str, folder: Path) -> Path | None:
    """Return the named file next to the configuration or in the current directory, or None."""
    for path in (folder / text, Path(text)):
        with contextlib.suppress(OSError, ValueError):  # a name that no file can have
            if path.is_file():
                return path
    return None


_PLACE: Final = re.compile(r"\$[\w{(]|<[^<>]+>")


def _of_commands(text: str, source: str, folder: Path) -> list[Reading]:
    """Return what the first command that starts a training or a server says.

    Raises:
        InputError: there is no such command, or it names a file that is missing.
    """
    try:
        found = command_lines(text)
    except ValueError as e:
        raise InputError(f"{source} is not a command line: {e}.") from e
    if not found:
        raise InputError(
            f"{source} starts no known training program or server.",
            hint="Known ones are vllm serve, accelerate launch, torchrun, deepspeed, trl, "
            "axolotl train, llamafactory-cli train, tune run and python SCRIPT.py with options.",
        )
    readings = _of_command(found[0], source, folder)
    if len(found) > 1:
        readings[0].notes.append(f"{source}: only the first of {len(found)} commands was read.")
    return readings


def _of_command(command: CommandLine, source: str, folder: Path) -> list[Reading]:
    entries: Entries = command.program
    readings: list[Reading] = []
    missing: list[str] = []
    for name in command.files:
        path = _found(name, folder)
        if path is None:
            missing.append(name)
            continue
        inside = read_entries(path)
        format_ = format_of(inside)
        if format_ is not None and format_.is_launch:
            readings += _of_file(path, str(path))
        else:
            entries = {**flat(inside), **entries}
    if command.is_server:
        served = {**vllm.plain(entries), **command.environment}
        readings.insert(0, read(vllm.FORMAT, served, source))
    elif entries.keys() - {trainer.PROGRAM}:
        # A file has underscores where a command line has dashes.
        in_file = {k if "." in k else k.replace("-", "_"): v for k, v in entries.items()}
        program = reading_of({**in_file, **command.environment}, source)
        readings[:0] = [program, *_referenced(program, folder)]
    if command.launch:
        started = read(launch.ACCELERATE, command.launch, f"{source}, launcher")
        readings += [started, *_referenced(started, folder)]
    if missing and (not readings or all(reading.format.is_launch for reading in readings)):
        raise InputError(
            f"{missing[0]}, which the command in {source} names, is missing.",
            hint="Run this in its folder, or give the file itself.",
        )
    for name in missing:
        readings[0].leave("--config", name, NOT_HERE)
    _note_places(readings, entries)
    if not readings:
        raise InputError(f"The command in {source} has no options.", hint="Paste all of it.")
    return readings


def _note_places(readings: Sequence[Reading], entries: Entries) -> None:
    open_places = [key for key, value in entries.items() if _PLACE.search(str(value))]
    if open_places and readings:
        names = ", ".join(map(shown, open_places[:5]))
        readings[0].notes.append(f"{readings[0].source}: variables that are not set: {names}.")
    for reading in readings:
        if _PLACE.search(str(reading.value("model") or "")):
            found = reading.facts.pop("model")
            reading.leave(found.key, found.text, "is a variable that is not set")
