"""Options from the environment and from a configuration file.

The command line takes precedence over ``FRAGDOCTOR_*`` variables, and these over the file. Every
command that has options gets ``--config`` and ``--no-config``.

The file is ``fragdoctor.toml``, or ``pyproject.toml`` with a table ``[tool.fragdoctor]``; its keys
are the long options of the commands, without the leading dashes.

To see that nothing is set anywhere takes no typer, which is slow to load.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from fragdoctor.cli.options import GENERAL
from fragdoctor.errors import ConfigError
from fragdoctor.opening import read_bounded

OWN_FILE: Final = "fragdoctor.toml"
PROJECT_FILE: Final = "pyproject.toml"
MAX_BYTES: Final = 1024 * 1024

Value = str | bool | list[str]
"""The value of an option: text as on the command line, True or False for a flag, or a list for an
option that can be repeated."""

NOT_CONFIGURED: Final = frozenset(
    {"help", "output", "force", "write-baseline", "module", "root", "allow-rehearse"}
)
"""Options of a single run, or permissions, which a project must not give to itself."""
PREFIX: Final = "FRAGDOCTOR_"
_NO_CONFIG: Final = "fragdoctor.no_config"
_PATHS: Final = frozenset({"baseline"})
_WITHOUT: Final = frozenset({"explain"})
Options = dict[str, dict[str, Any]]


def find_config(start: Path) -> Path | None:
    """Return the nearest file with settings, from a directory upward, or None.

    Raises:
        ConfigError: a ``pyproject.toml`` on the way is not valid.
        InputError: it cannot be read.
    """
    for directory in (start, *start.parents):
        own = directory / OWN_FILE
        if own.is_file():
            return own
        project = directory / PROJECT_FILE
        if project.is_file() and _table(project) is not None:
            return project
    return None


def nothing_is_set() -> bool:
    """Return whether neither the environment nor a file sets any option.

    Raises:
        ConfigError: as for ``find_config``.
    """
    return not any(name.startswith(PREFIX) for name in os.environ) and _nearest() is None


def _nearest() -> Path | None:
    with suppress(FileNotFoundError):  # the working directory was deleted
        return find_config(Path.cwd())
    return None


def read_config(path: Path, known: Collection[str]) -> dict[str, Value]:
    """Return the settings of a file by option (``max-peak``).

    Args:
        path: ``fragdoctor.toml``, or any other TOML file with a table ``[tool.fragdoctor]``.
        known: options that may be set.

    Raises:
        InputError: the file cannot be read.
        ConfigError: a key is unknown, or a value has the wrong form.
    """
    table = _table(path)
    if table is None:
        raise ConfigError(
            f"{path} has no table [tool.fragdoctor].", hint=f"Add it, or write {OWN_FILE}."
        )
    values: dict[str, Value] = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in known:
            raise _unknown(path, key, known)
        if name in values:
            raise ConfigError(f"{path}: {name!r} is set twice.")
        values[name] = _value(path, key, value)
    return values


def _table(path: Path) -> dict[str, Any] | None:
    """Return the settings of a TOML file, or None if it has none."""
    import tomllib  # most projects have no settings

    try:
        document = tomllib.loads(read_bounded(path, MAX_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise ConfigError(
            f"{path} is not valid TOML: {e}.", hint="Fix it, or run with --no-config."
        ) from e
    if path.name != PROJECT_FILE and "tool" not in document:
        return document
    tool = document.get("tool")
    table = tool.get("fragdoctor") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{path}: tool.fragdoctor is not a table.")
    return table


def _value(path: Path, key: str, value: Any) -> Value:
    if isinstance(value, bool):
        return value
    if isinstance(value, str | int | float):
        return str(path.parent / str(value)) if key in _PATHS else str(value)
    if isinstance(value, list) and all(
        isinstance(v, str | int | float) and not isinstance(v, bool) for v in value
    ):
        return [str(v) for v in value]
    raise ConfigError(f"{path}: {key!r} is not text, a number, true, false or a list of texts.")


def _unknown(path: Path, key: str, known: Collection[str]) -> ConfigError:
    near = get_close_matches(key.replace("_", "-").lower(), sorted(known), n=1, cutoff=0.6)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(sorted(known))}."
    return ConfigError(f"{path}: there is no setting {key!r}.", hint=hint)


def configure(group: Any) -> Any:
    """Add environment variables, ``--config`` and ``--no-config`` to commands, and return them."""
    for name, own in _options_of(group).items():
        for option, parameter in own.items():
            parameter.envvar = PREFIX + option.replace("-", "_").upper()
            parameter.show_envvar = False
        _add_options(group.commands[name], name)
    return group


def _options_of(group: Any) -> Options:
    """Return the configurable options by command and long name."""
    return {
        name: {
            long: parameter
            for parameter in command.params
            if parameter.param_type_name == "option"
            and (long := max(parameter.opts, key=len).removeprefix("--")) not in NOT_CONFIGURED
        }
        for name, command in group.commands.items()
        if name not in _WITHOUT
    }


def _add_options(command: Any, name: str) -> None:
    from typer.core import TyperOption

    def load(context: Any, parameter: Any, value: Any) -> Any:  # noqa: ARG001 - click's signature
        if not context.resilient_parsing:
            _load(context, name, value)
        return value

    command.params += [
        TyperOption(
            param_decls=["--no-config"],
            is_flag=True,
            default=False,
            is_eager=True,
            expose_value=False,
            callback=lambda context, _, value: context.meta.update({_NO_CONFIG: value}),
            help="Read no configuration file",
            rich_help_panel=GENERAL,
        ),
        TyperOption(
            param_decls=["--config"],
            metavar="FILE",
            is_eager=True,
            expose_value=False,
            callback=load,
            envvar=f"{PREFIX}CONFIG",
            show_envvar=False,
            help="Read this file instead of the nearest pyproject.toml or fragdoctor.toml",
            rich_help_panel=GENERAL,
        ),
    ]


def _load(context: Any, name: str, given: str | None) -> None:
    """Use the settings of the file as the defaults of the command.

    Raises:
        ConfigError: the file, a key or a value is wrong.
    """
    if context.meta.get(_NO_CONFIG):
        return
    path = Path(given) if given else _nearest()
    if path is None:
        return
    from fragdoctor.cli.commands import whole_group

    options = _options_of(whole_group())  # the file applies to all commands
    context.default_map = {}
    for key, value in read_config(path, {key for own in options.values() for key in own}).items():
        takers = {command: own[key] for command, own in options.items() if key in own}
        refusals = {command: _refusal(context, option, value) for command, option in takers.items()}
        if all(refusals.values()):
            raise ConfigError(f"{path}: {key}{next(iter(refusals.values()))}")
        if refusals.get(name) == "":
            context.default_map[takers[name].name] = _passed(takers[name], value)


def _refusal(context: Any, option: Any, value: Value) -> str:
    """Return why an option refuses a value, as the end of a sentence, or "" if it accepts it."""
    from typer import BadParameter

    if isinstance(value, bool) != bool(option.is_flag):
        return f" must be {'true or false' if option.is_flag else 'text or a number'}."
    if isinstance(value, list) and not option.multiple:
        return " takes one value, not a list."
    try:
        if not isinstance(value, bool):
            option.type_cast_value(context, _passed(option, value))
    except BadParameter as e:
        return f": {e.message}"
    return ""


def _passed(option: Any, value: Value) -> Value:
    """Return a value in the form that the command line would pass on."""
    return [value] if isinstance(value, str) and option.multiple else value
