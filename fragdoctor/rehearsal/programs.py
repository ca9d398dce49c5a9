"""The program that is rehearsed: a script, module or notebook, and the launcher before it.

For a notebook, the cells are run without what is not Python; a launcher of ranks is removed.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct, field

from fragdoctor.errors import ConfigError
from fragdoctor.inputs.classify import InputKind, Wanted, kind_of, something_else

SUFFIX: Final = ".ipynb"
MAX_BYTES: Final = 256 << 20
_MOST_NAMED: Final = 5
# Magics whose cell is Python after the first line.
_OF_PYTHON: Final = ("time", "timeit", "capture", "prun", "memit", "mprun")
_ASSIGNED: Final = re.compile(r"^(\s*)([A-Za-z_][\w, ]*)=\s*[!%].*$")
_HELP: Final = re.compile(r"^\s*(\?{1,2}\s*[\w.]+|[\w.]+\s*\?{1,2})\s*$")


def read_notebook(path: Path) -> tuple[list[str], str]:
    """Return the cells of a notebook as Python, and a sentence on what was left out, or "".

    The cells are read in order, not run; a line that was left out does nothing.

    Raises:
        ConfigError: it is not a notebook, or not one for Python.
    """
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(f"{path} is too large for a notebook.", hint="Clear its outputs.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found = ["".join(c["source"]) for c in content["cells"] if c["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ConfigError(
            f"{path} is not a notebook.", hint="Save it again with Jupyter, or export it as .py."
        ) from err
    metadata = content.get("metadata", {})
    language = metadata.get("language_info", {}).get("name")
    language = str(language or metadata.get("kernelspec", {}).get("language") or "python").lower()
    if language != "python":
        raise ConfigError(f"{path} is a notebook of {language}.", hint="Give one of Python.")
    left_out: list[str] = []
    cells = []
    for number, source in enumerate(found, 1):
        plain, skipped = as_python(source)
        cells.append(plain)
        left_out += [f"{text} (cell {number})" for text in skipped]
    return cells, _note(left_out)


def as_python(source: str) -> tuple[str, list[str]]:
    """Return a cell as Python with the same number of lines, and what was left out of it."""
    lines = re.split(r"\r\n|\r|\n", source)  # Python's line ends; splitlines() has more
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("%%"):
        name = first[2:].split()[0] if first[2:].split() else ""
        if name not in _OF_PYTHON:
            return "\n".join("" for _ in lines), [first]
        lines[next(i for i, line in enumerate(lines) if line.strip())] = ""
    left_out = []
    while (i := _wrong_line(lines)) is not None:
        line, assigned = lines[i], _ASSIGNED.match(lines[i])
        if assigned is not None:
            lines[i] = f"{assigned[1]}{assigned[2].rstrip()} = []"
        elif line.strip().startswith(("%", "!")) or _HELP.match(line):
            lines[i] = f"{line[: len(line) - len(line.lstrip())]}pass"
        else:
            break  # not a magic but an error in the program, which will show
        left_out.append(line.strip())
        while line.endswith("\\") and i + 1 < len(lines):
            i, line = i + 1, lines[i + 1]
            lines[i] = ""
    return "\n".join(lines), left_out


def _wrong_line(lines: list[str]) -> int | None:
    """Return the first line that is not valid Python, or None if all lines are."""
    try:
        ast.parse("\n".join(lines))
    except SyntaxError as err:
        return err.lineno - 1 if err.lineno and err.lineno <= len(lines) else None
    except (ValueError, RecursionError, MemoryError):
        pass
    return None


def _note(left_out: list[str]) -> str:
    if not left_out:
        return ""
    more = len(left_out) - _MOST_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return f"Left out of the notebook: {', '.join(left_out[:_MOST_NAMED])}{rest}"


_ELASTIC: Final = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_ACCELERATE: Final = ("accelerate", "accelerate.commands.launch")
LAUNCHERS: Final = (*_ELASTIC, *_ACCELERATE, "deepspeed")
"""Commands and modules that start the ranks of a distributed run."""
# Options without a value, by the documentation of each; all other options have one.
_MODULE: Final = ("-m", "--module")
_FLAGS: Final = ("--standalone", "--run-path", "--virtual-local-rank", "--use-env")
_ACCELERATE_FLAGS: Final = ("--multi-gpu", "--same-network", "--quiet", "-q", "--debug")
# Options that accelerate passes on in the environment (``accelerate/utils/launch.py``).
_ACCELERATE_VARIABLES: Final = {
    "--mixed-precision": "ACCELERATE_MIXED_PRECISION",
    "--dynamo-backend": "ACCELERATE_DYNAMO_BACKEND",
    "--dynamo-mode": "ACCELERATE_DYNAMO_MODE",
}
# Options that do not change the memory of a rank, or are understood here.
_ACCELERATE_VALUES: Final = (
    *_ACCELERATE_VARIABLES, "--num-processes", "--num-machines", "--machine-rank",
    "--main-process-ip", "--main-process-port", "--num-cpu-threads-per-process", "--gpu-ids",
    "--rdzv-backend", "--rdzv-conf", "--log-dir",
)  # fmt: skip
_NUMBER: Final = re.compile(r"\d{1,5}")
_PYTHON: Final = re.compile(r"python[0-9.]*(?:\.exe)?")
_PYTHON_VALUED: Final = ("-W", "-X")


class Program(Struct, frozen=True):
    """What is rehearsed.

    Attributes:
        target: path of a script, or name of a module.
        is_module: whether it is a module.
        args: the program's own arguments.
        pythons: interpreters to run it with; the first one that can rehearse is used.
        notes: what was left out of it and before it, in sentences.
        sources: the cells, if the target is a notebook.
        title: the name for reports, if that is not the target's name.
    """

    target: str
    is_module: bool
    args: Sequence[str]
    pythons: Sequence[str]
    notes: Sequence[str] = ()
    sources: Sequence[str] | None = None
    title: str = ""

    @classmethod
    def found(
        cls,
        target: str,
        args: Sequence[str],
        python: str | None,
        *,
        is_module: bool,
        note: str = "",
    ) -> Program:
        """Return a program that exists; ``python`` runs it, None means the one on PATH.

        Raises:
            ConfigError: there is no such script, or it is not a notebook.
        """
        notes, sources = [note] if note else [], None
        if is_module:
            return cls(target, is_module, args, pythons(python), notes)
        if not Path(target).is_file():
            raise ConfigError(f"{target} does not exist.", hint="Check the path of the script.")
        kind = kind_of(target)
        is_named = target.endswith((".py", SUFFIX))
        if not (is_named or kind in {None, InputKind.TEXT, InputKind.EMPTY}):
            raise something_else(target, kind, Wanted.PROGRAM)
        if target.endswith(SUFFIX):
            sources, left_out = read_notebook(Path(target))
            notes += [left_out] if left_out else []
        return cls(target, is_module, args, pythons(python), notes, sources)

    @property
    def name(self) -> str:
        """The name for reports."""
        return self.title or Path(self.target).name

    @property
    def kind(self) -> str:
        """How it is run."""
        if self.sources is not None:
            return "notebook"
        return "module" if self.is_module else "script"

    def cells(self) -> list[tuple[str, str]]:
        """Return the name and the source of each cell of a notebook."""
        place = Path(self.target).resolve()
        return [(f"{place}#cell-{n}", source) for n, source in enumerate(self.sources or (), 1)]


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


def takes_options(word: str) -> bool:
    """Return whether the options after a word are its own: a launcher's, or Python's."""
    name = Path(word).name
    return name in LAUNCHERS or _PYTHON.fullmatch(name) is not None


def after_python(words: Sequence[str]) -> tuple[Sequence[str], bool, str | None] | None:
    """Return what an interpreter runs if it is the first word; else None.

    The result is the script or module with its arguments, whether it is a module, and the
    interpreter.

    Raises:
        ConfigError: the interpreter runs no script or module.
    """
    python, *rest = words
    if not _PYTHON.fullmatch(Path(python).name):
        return None
    if rest[:1] == ["-c"]:
        raise ConfigError("A program given with -c cannot be rehearsed.", hint="Put it in a file.")
    flags = [word for word in rest if word not in {"-c", *_PYTHON_VALUED}]
    options, words = _options(python, rest, flags, _PYTHON_VALUED)
    return words, "-m" in options, python


class Launched(Struct, frozen=True):
    """What a launcher was asked to start.

    Attributes:
        launcher: its name.
        words: the script or module, and its arguments.
        is_module: whether it is a module.
        n_local: number of ranks on one machine; None means as many as it has GPUs.
        n_machines: how many machines.
        variables: environment variables that it sets besides the ranks' numbers.
    """

    launcher: str
    words: Sequence[str]
    is_module: bool
    n_local: int | None
    n_machines: int
    variables: Mapping[str, str] = field(default_factory=dict)


def launched(words: Sequence[str]) -> Launched | None:
    """Return what is started if the first word is a launcher of ranks; else None.

    Raises:
        ConfigError: its options do not tell what it sets up.
    """
    name = Path(words[0]).name
    if name not in LAUNCHERS:
        return None
    rest = list(words[1:])
    if rest[:1] == ["--"]:
        del rest[0]
    if name == "deepspeed":
        raise _refused(name, "the configuration")
    if name == "accelerate" and rest[:1] != ["launch"]:
        raise ConfigError(
            "Only accelerate's launch command starts a program.",
            hint="Write for example: accelerate launch --num_processes 2 train.py",
        )
    variables: dict[str, str] = {}
    if name in _ACCELERATE:
        rest = rest[name == "accelerate" :]
        options, words = _options(name, rest, _ACCELERATE_FLAGS, _ACCELERATE_VALUES)
        n_machines = _number(name, options.get("--num-machines", "1")) or 1
        n_ranks = _number(name, options.get("--num-processes", "1")) or 1
        n_local: int | None = max(1, n_ranks // n_machines)
        handed_on = _ACCELERATE_VARIABLES.items()
        variables = {name: options[option] for option, name in handed_on if option in options}
    else:
        options, words = _options(name, rest, _FLAGS)
        n_machines = _number(name, options.get("--nnodes", "1").partition(":")[0]) or 1
        n_local = _number(name, options.get("--nproc-per-node", "1"))
    is_module = any(option in options for option in _MODULE)
    return Launched(name, words, is_module, n_local, n_machines, variables)


def _options(
    name: str, words: Sequence[str], flags: Sequence[str], values: Sequence[str] | None = None
) -> tuple[dict[str, str], list[str]]:
    """Return a launcher's options, named as in its documentation, and the words after them.

    Flags are options without a value, besides ``-m``; ``values`` are those with one (None means
    all others).

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
            f"{name} was given no program.", hint=f"Write for example: {name} train.py"
        )
    return found, words


def _number(name: str, text: str) -> int | None:
    """Return a number of ranks; None if it is the number of GPUs.

    Raises:
        ConfigError: it is neither.
    """
    if text in {"gpu", "auto"}:
        return None
    if not _NUMBER.fullmatch(text) or not int(text):
        raise ConfigError(f"{name} cannot start {text!r} ranks.", hint="Use 1 or more.")
    return int(text)


def _refused(name: str, option: str) -> ConfigError:
    return ConfigError(
        f"The effect of {option} of {name} is not known here.",
        hint="Rehearse the script itself: fragdoctor rehearse train.py --world-size 4 -- ARGS",
    )
