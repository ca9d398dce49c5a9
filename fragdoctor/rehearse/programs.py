"""The program that is rehearsed, and the launcher of ranks that may stand before it."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.frozen import frozen
from fragdoctor.rehearse.notebooks import Notebook

_ELASTIC: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ACCELERATE: Final = ("accelerate", "accelerate.commands.launch")
LAUNCHERS: Final = (*_ELASTIC, *_ACCELERATE, "deepspeed")
"""Commands and modules that start the ranks of a distributed run."""
# Options without a value, by the documentation of each; whatever else begins with a dash has one.
_MODULE: Final = ("-m", "--module")
_FLAGS: Final = ("--standalone", "--run-path", "--virtual-local-rank", "--use-env")
_ACCELERATE_FLAGS: Final = ("--multi-gpu", "--same-network", "--quiet", "-q", "--debug")
# What changes nothing in the memory of a rank, or is understood here.
_ACCELERATE_VALUES: Final = (
    "--num-processes", "--num-machines", "--machine-rank", "--main-process-ip",
    "--main-process-port", "--num-cpu-threads-per-process", "--gpu-ids", "--rdzv-backend",
    "--rdzv-conf", "--mixed-precision", "--log-dir",
)  # fmt: skip
_NUMBER: Final = re.compile(r"\d{1,5}")


@frozen
class Program:
    """What is rehearsed.

    Attributes:
        target: path of a script, or name of a module.
        is_module: which of both.
        args: the program's own arguments.
        pythons: interpreters to run it with, the first that can rehearse is taken.
        notebook: its code, where the target is a notebook.
        note: what was left out before it, a sentence or "".
    """

    target: str
    is_module: bool
    args: Sequence[str]
    pythons: Sequence[str]
    notebook: Notebook | None = None
    note: str = ""

    @property
    def kind(self) -> str:
        """How it is run."""
        if self.notebook is not None:
            return "notebook"
        return "module" if self.is_module else "script"

    @property
    def notes(self) -> list[str]:
        """What was left out, in sentences."""
        of_notebook = "" if self.notebook is None else self.notebook.note
        return [note for note in (self.note, of_notebook) if note]

    def cells(self) -> list[tuple[str, str]]:
        """Return the name and the source of each cell of a notebook."""
        if self.notebook is None:
            return []
        place = Path(self.target).resolve()
        return [(f"{place}#cell-{cell.number}", cell.source) for cell in self.notebook.cells]


def pythons(chosen: str | None) -> list[str]:
    """Return the interpreters that the program may be meant for, the likeliest first.

    Raises:
        ConfigError: there is no such program.
    """
    if chosen is not None:
        found = shutil.which(chosen)
        if found is None:
            raise ConfigError(
                f"There is no Python at {chosen}.", hint="Give --python the path of an interpreter."
            )
        return [found]
    names = (shutil.which("python"), shutil.which("python3"), sys.executable)
    return list(dict.fromkeys(name for name in names if name))


@frozen
class Launched:
    """What a launcher was asked to start.

    Attributes:
        launcher: its name.
        words: the script or module, and its arguments.
        is_module: which of both.
        n_local: ranks of one machine; None = as many as it has GPUs.
        n_machines: how many machines.
        variables: what it puts into the environment beside the ranks' numbers.
    """

    launcher: str
    words: Sequence[str]
    is_module: bool
    n_local: int | None
    n_machines: int
    variables: Mapping[str, str] = field(default_factory=dict)


def launched(words: Sequence[str]) -> Launched | None:
    """Return what is started where the first word is a launcher of ranks; else None.

    Raises:
        ConfigError: what it sets up cannot be told from its options.
    """
    name = Path(words[0]).name
    if name not in LAUNCHERS:
        return None
    rest = list(words[1:])
    if rest[:1] == ["--"]:
        del rest[0]
    if name == "deepspeed":
        raise _refused(name, "the configuration")
    if name in _ACCELERATE:
        return _by_accelerate(name, rest)
    options, words = _options(name, rest, _FLAGS)
    machines = options.get("--nnodes", "1").partition(":")[0]
    n_local = _number(name, options.get("--nproc-per-node", "1"))
    return Launched(name, words, _is_module(options), n_local, _number(name, machines) or 1)


def _by_accelerate(name: str, rest: list[str]) -> Launched:
    if name == "accelerate":
        if rest[:1] != ["launch"]:
            raise ConfigError(
                "Of accelerate's commands only launch starts a program.",
                hint="Write for example: accelerate launch --num_processes 2 train.py",
            )
        del rest[0]
    options, words = _options(name, rest, _ACCELERATE_FLAGS, _ACCELERATE_VALUES)
    n_machines = _number(name, options.get("--num-machines", "1")) or 1
    n_ranks = _number(name, options.get("--num-processes", "1")) or 1
    precision = options.get("--mixed-precision")
    variables = {} if precision is None else {"ACCELERATE_MIXED_PRECISION": precision}
    n_local = max(1, n_ranks // n_machines)
    return Launched(name, words, _is_module(options), n_local, n_machines, variables)


def _is_module(options: Mapping[str, str]) -> bool:
    return any(option in options for option in _MODULE)


def _options(
    name: str, words: Sequence[str], flags: Sequence[str], values: Sequence[str] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Return a launcher's options, named as its documentation has them, and the words after.

    Args:
        name: of the launcher.
        words: what was given to it.
        flags: options without a value, beside ``-m``.
        values: options with one; None = all others.

    Raises:
        ConfigError: an option is not known, or no program follows.
    """
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        option, has_value, value = rest.pop(0).partition("=")
        option = option if option in _MODULE else option.replace("_", "-")
        is_flag = option in {*flags, *_MODULE}
        is_known = values is None or is_flag or option in values
        if option == "--no-python" or not is_known:
            raise _refused(name, option)
        if not has_value and not is_flag:
            value = rest.pop(0) if rest else ""
        found[option] = value
    words = rest[1:] if rest[:1] == ["--"] else rest
    if not words:
        raise ConfigError(
            f"{name} is given no program.", hint=f"Write for example: {name} train.py"
        )
    return found, words


def _number(name: str, text: str) -> int | None:
    """Return a number of ranks; None where it is that of the GPUs.

    Raises:
        ConfigError: it is neither.
    """
    if text in {"gpu", "auto"}:
        return None
    if not _NUMBER.fullmatch(text) or not int(text):
        raise ConfigError(f"{name} cannot start {text!r} ranks.", hint="Write a number from 1 on.")
    return int(text)


def _refused(name: str, option: str) -> ConfigError:
    return ConfigError(
        f"What {option} of {name} sets up is not known here.",
        hint="Rehearse the script itself: fragdoctor rehearse train.py --world-size 4 -- ARGS",
    )
