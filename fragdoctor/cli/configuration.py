"""Options from the environment and from a configuration file.

The command line wins over ``FRAGDOCTOR_*`` variables, these over the file. Every command that has
options gets ``--config`` and ``--no-config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperOption

from fragdoctor.cli.commands import whole_group
from fragdoctor.config import Config, Value, find_config, read_config
from fragdoctor.errors import ConfigError

NOT_CONFIGURED: Final = frozenset({"help", "output", "force", "write-baseline", "module"})
"""Options of one run, not of a project: they stand on the command line only."""

PREFIX: Final = "FRAGDOCTOR_"

_PATHS: Final = frozenset({"baseline"})
_WITHOUT: Final = frozenset({"explain"})

Options = dict[str, dict[str, Any]]


def configure(group: Any) -> Any:
    """Add environment variables, ``--config`` and ``--no-config`` to the commands; return them."""
    for name, own in _options_of(group).items():
        for option, parameter in own.items():
            parameter.envvar = PREFIX + option.replace("-", "_").upper()
            parameter.show_envvar = False
        _add_options(group.commands[name], name)
    return group


def _options_of(group: Any) -> Options:
    """Return the options that may be configured, by command and long name."""
    return {
        name: _options(command) for name, command in group.commands.items() if name not in _WITHOUT
    }


def _options(command: Any) -> dict[str, Any]:
    """Return the options of a command that may be configured, by their long names."""
    found = {}
    for parameter in command.params:
        if isinstance(parameter, TyperOption):
            long = max(parameter.opts, key=len).removeprefix("--")
            if long not in NOT_CONFIGURED:
                found[long] = parameter
    return found


def _add_options(command: Any, name: str) -> None:
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
            callback=_remember,
            help="Read no configuration file",
        ),
        TyperOption(
            param_decls=["--config"],
            metavar="FILE",
            is_eager=True,
            expose_value=False,
            callback=load,
            envvar=f"{PREFIX}CONFIG",
            show_envvar=False,
            help="Read this file, not the nearest pyproject.toml or fragdoctor.toml",
        ),
    ]


def _remember(context: Any, parameter: Any, value: Any) -> Any:  # noqa: ARG001 - click's signature
    context.meta["fragdoctor.no_config"] = bool(value)
    return value


def _load(context: Any, name: str, given: str | None) -> None:
    """Make the settings of the file the defaults of the command.

    Raises:
        ConfigError: the file, a key or a value is wrong.
    """
    if context.meta.get("fragdoctor.no_config"):
        return
    path = Path(given) if given else _nearest()
    if path is None:
        return
    options = _options_of(whole_group())  # a file is for every command
    config = read_config(path, {key for own in options.values() for key in own})
    context.default_map = {
        options[name][key].name: value
        for key, value in _usable(context, config, name, options).items()
    }


def _nearest() -> Path | None:
    try:
        return find_config(Path.cwd())
    except FileNotFoundError:  # the working directory was deleted
        return None


def _usable(context: Any, config: Config, name: str, options: Options) -> Mapping[str, Value]:
    """Return the settings that this command has, each checked as if it were given by hand."""
    usable: dict[str, Value] = {}
    for key, value in config.values.items():
        sound = [c for c in options if _fits(context, config, key, value, options[c].get(key))]
        if not sound:
            parameters = [own[key] for own in options.values() if key in own]
            _check(context, config, key, value, parameters[0])
        if name in sound:
            usable[key] = _prepared(config, key, value, options[name][key])
    return usable


def _fits(context: Any, config: Config, key: str, value: Value, parameter: Any) -> bool:
    if parameter is None:
        return False
    try:
        _check(context, config, key, value, parameter)
    except ConfigError:
        return False
    return True


def _check(context: Any, config: Config, key: str, value: Value, parameter: Any) -> None:
    """Raise ConfigError where an option would refuse the value."""
    where = f"{config.path}: {key}"
    if isinstance(value, bool) != bool(parameter.is_flag):
        wanted = "true or false" if parameter.is_flag else "text or a number"
        raise ConfigError(f"{where} is to be {wanted}.")
    if isinstance(value, list) and not parameter.multiple:
        raise ConfigError(f"{where} takes one value, not a list.")
    if isinstance(value, bool):
        return
    try:
        parameter.type_cast_value(context, _prepared(config, key, value, parameter))
    except typer.BadParameter as e:
        raise ConfigError(f"{where}: {e.message}") from e


def _prepared(config: Config, key: str, value: Value, parameter: Any) -> Value:
    """Return a value as the command line would pass it on."""
    if isinstance(value, str) and key in _PATHS:
        return str(config.path.parent / value)
    return [value] if isinstance(value, str) and parameter.multiple else value
