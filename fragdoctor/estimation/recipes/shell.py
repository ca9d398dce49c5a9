"""Parses command lines, pasted or from a shell script. Nothing is run.

It knows the parts of the shell's language that such scripts use: line continuations, quotes,
comments, ``NAME=value``, ``$NAME``, ``${NAME:-default}``, and the operators between commands.
Anything else stays as written, and then counts as neither a number nor a name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from fragdoctor.errors import LimitExceeded
from fragdoctor.estimation.recipes.entries import ALLOCATOR_RULES
from fragdoctor.estimation.recipes.trainer import PROGRAM

MAX_WORDS: Final = 20_000
MAX_WORD: Final = 10_000
"""The most characters of a word after its variables are replaced; each may double the word."""

_ASSIGNED: Final = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE: Final = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?::?-([^{}$]*))?\})")
_CONTINUED: Final = re.compile(r"\\[ \t]*\n")
_END: Final = "\n;\n"
_BETWEEN: Final = re.compile(r"[();<>|&]+")
_FLAG: Final = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
_OVERRIDE: Final = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)
_PYTHON: Final = re.compile(r"(.*/)?python[0-9.]*")


class CommandLine(Struct, frozen=True):
    """A command that starts a training or a server.

    Attributes:
        launch: options of the launcher: ``accelerate launch``, ``torchrun``, ``deepspeed``.
        program: options of the program, with its name; empty if there is no program.
        files: configuration files that it names, in order.
        environment: variables of the allocator that are set before it.
        is_server: whether it is ``vllm serve`` or similar.
    """

    launch: Mapping[str, Any]
    program: Mapping[str, Any]
    files: Sequence[str] = ()
    environment: Mapping[str, str] = {}
    is_server: bool = False


def command_lines(text: str) -> list[CommandLine]:
    """Return the commands in a text that start a training or a server.

    Raises:
        LimitExceeded: a word becomes larger than any genuine one when variables are replaced.
        ValueError: a quote is not closed.
    """
    found = ((_command_line(words), environment) for words, environment in _commands(text))
    return [replace(one, environment=settings) for one, settings in found if one is not None]


def _commands(text: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield each command, its variables replaced if they were set before, and its environment."""
    variables: dict[str, str] = {}
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = _CONTINUED.sub(" ", "\n".join(lines))
    # A comment takes the end of its line with it, so that a line of its own ends the command.
    lexer = shlex.shlex(joined.replace("\n", _END), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in islice(chain(lexer, ";"), MAX_WORDS):
        if not _BETWEEN.fullmatch(word):
            words.append(_filled_in(word.replace(_END, "\n"), variables))
            continue
        rest = _without_assignments(words, variables)
        yield rest, {name: variables[name] for name in ALLOCATOR_RULES if name in variables}
        words = []


def _filled_in(word: str, variables: Mapping[str, str]) -> str:
    def value_of(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        return variables.get(name, found[3] if found[3] is not None else found[0])

    filled = _VARIABLE.sub(value_of, word)
    if len(filled) > MAX_WORD:
        raise LimitExceeded("A word of the command line is larger than any genuine one.")
    return filled


def _without_assignments(words: list[str], variables: dict[str, str]) -> list[str]:
    rest = words[1:] if words and words[0] in ("export", "env", "local") else words
    for i, word in enumerate(rest):
        found = _ASSIGNED.fullmatch(word)
        if found is None:
            return rest[i:]
        variables[found[1]] = found[2]
    return []


def _command_line(words: Sequence[str]) -> CommandLine | None:
    words = [word for word in words if word.strip()]
    while words and words[0] in _PREFIXES:
        words = words[1:]
    if not words or any(_EVALUATION.search(word) for word in words):
        return None
    first = words[0].rpartition("/")[2]
    second = words[1] if len(words) > 1 else ""
    served = _served(words, first, second)
    if served is not None:
        return _server(served)
    if (first, second) in _LAUNCHERS:
        return _launched(words[2:])
    if first in ("torchrun", "deepspeed"):
        return _launched(words[1:], uses_deepspeed=first == "deepspeed")
    if first in _TRAINERS and second:
        return _program(f"{first} {second}", words[2:])
    return _python(words) if _PYTHON.fullmatch(words[0]) else None


def _served(words: Sequence[str], first: str, second: str) -> Sequence[str] | None:
    """Return the words after ``vllm serve`` or after the image of vLLM's server, or None."""
    if (first, second) == ("vllm", "serve"):
        return words[2:]
    images = [i for i, word in enumerate(words) if word.startswith(_IMAGE)]
    return words[images[0] + 1 :] if images and first in ("docker", "podman") else None


def _python(words: Sequence[str]) -> CommandLine | None:
    rest = [word for word in words[1:] if word not in ("-u", "-O")]
    if len(rest) > 1 and rest[0] == "-m":
        module = rest[1]
        if module.startswith("vllm.entrypoints"):
            return _server(rest[2:])
        if module in _MODULES:
            return _launched(rest[2:])
        return _program(module, rest[2:])
    return _program(rest[0], rest[1:]) if rest and rest[0].endswith(".py") else None


def _server(words: Sequence[str]) -> CommandLine:
    options, others = arguments(words)
    model = next((word for word in others if "=" not in word), None)
    if model is not None:
        options = {"model_tag": model, **options}
    files = [str(options.pop(key)) for key in ("config",) if key in options]
    return CommandLine({}, options, files, is_server=True)


def _launched(words: Sequence[str], *, uses_deepspeed: bool = False) -> CommandLine:
    """Split the launcher's options from the program, which starts at the first non-option word."""
    i = 0
    while i < len(words) and _FLAG.fullmatch(words[i]) and words[i] not in _OF_MODULE:
        has_value = "=" not in words[i] and i + 1 < len(words) and not words[i + 1].startswith("-")
        i += 2 if has_value and not words[i + 1].endswith(".py") else 1
    launch, _ = arguments(words[:i])
    files = [str(launch.pop(key)) for key in ("config_file",) if key in launch]
    rest = list(words[i:])
    if rest and rest[0] in _OF_MODULE:
        rest = rest[1:]
    inner = _program(rest[0], rest[1:]) if rest else None
    if inner is None:
        return CommandLine(launch, {}, files)
    if uses_deepspeed and "deepspeed" not in inner.program:
        launch["use_deepspeed"] = True
    return CommandLine(launch, inner.program, [*files, *inner.files])


_EVALUATION: Final = re.compile(r"(?:^|/)(?:evals?|evaluation)/|(?:^|/)eval\w*\.py$")
"""A program that trains nothing, although programs next to it may, as in TRL's examples."""
_MODULES: Final = (
    "torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch",
)  # fmt: skip
_OF_MODULE: Final = ("-m", "--module")
_IMAGE: Final = "vllm/vllm-openai"
_LAUNCHERS: Final = (("accelerate", "launch"), ("tune", "run"))
_TRAINERS: Final = ("trl", "axolotl", "llamafactory-cli", "lmf")
_PREFIXES: Final = ("sudo", "nohup", "time", "exec", "srun", "uv", "run", "poetry")
_CONFIGS: Final = ("config", "job.config_file", "job.config-file", "config_file", "cfg")


def _program(program: str, words: Sequence[str]) -> CommandLine:
    """Return a program's options; ``name=value`` overrides an entry of its file."""
    options, others = arguments(words)
    files = [str(options.pop(key)) for key in _CONFIGS if isinstance(options.get(key), str)]
    for word in others:
        if _OVERRIDE.fullmatch(word):
            key, _, value = word.partition("=")
            options[key] = value
        elif word.endswith((".yaml", ".yml", ".json", ".toml")):
            files.append(word)
    return CommandLine({}, {PROGRAM: program, **options}, files)


def arguments(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return options with their values, and the words that belong to no option.

    An option with several values gets a list, and an option without a value gets True.
    """
    options: dict[str, Any] = {}
    others: list[str] = []
    key = ""
    for word in words:
        if _FLAG.fullmatch(word):
            name, equals, value = word.lstrip("-").partition("=")
            key = "" if equals else name
            options[name] = value if equals else True
        elif key and not (_OVERRIDE.fullmatch(word) and options[key] is not True):
            before = options[key]
            if before is True:
                options[key] = word
            else:
                options[key] = [*(before if isinstance(before, list) else [before]), word]
        else:
            others.append(word)
    return options, others
