"""Options from the environment and from a configuration file.

The command line takes precedence over ``FRAGDOCTOR_*`` variables, and these over the file. Every
command that has options gets ``--config`` and ``--no-config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperOption

from fragdoctor.cli.commands import whole_group
from fragdoctor.cli.config_file import VARIABLES, Config, Value, nearest_config, read_config
from fragdoctor.cli.options import GENERAL
from fragdoctor.errors import ConfigError

NOT_CONFIGURED: Final = frozenset(
    {"help", "output", "force", "write-baseline", "module", "root", "allow-rehearse"}
)
"""Options of a single run, or permissions, which a project must not give to itself."""
_NO_CONFIG: Final = "fragdoctor.no_config"
_PATHS: Final = frozenset({"baseline"})
_WITHOUT: Final = frozenset({"explain"})
Options = dict[str, dict[str, Any]]


def configure(group: Any) -> Any:
    """Add environment variables, ``--config`` and ``--no-config`` to commands, and return them."""
    for name, own in _options_of(group).items():
        for option, parameter in own.items():
            parameter.envvar = VARIABLES + option.replace("-", "_").upper()
            parameter.show_envvar = False
        _add_options(group.commands[name], name)
    return group


def _options_of(group: Any) -> Options:
    """Return the configurable options by command and long name."""
    return {
        name: {
            long: parameter
            for parameter in command.params
            if isinstance(parameter, TyperOption)
            and (long := max(parameter.opts, key=len).removeprefix("--")) not in NOT_CONFIGURED
        }
        for name, command in group.commands.items()
        if name not in _WITHOUT
    }


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
            envvar=f"{VARIABLES}CONFIG",
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
    path = Path(given) if given else nearest_config()
    if path is None:
        return
    options = _options_of(whole_group())  # the file applies to all commands
    config = read_config(path, {key for own in options.values() for key in own})
    context.default_map = {
        options[name][key].name: value
        for key, value in _usable(context, config, name, options).items()
    }


def _usable(context: Any, config: Config, name: str, options: Options) -> Mapping[str, Value]:
    """Return the settings that apply to this command, checked as if given on the command line."""
    usable: dict[str, Value] = {}
    for key, value in config.values.items():
        wrong = {
            command: _wrong(context, value, own[key], _prepared(config, key, value, own[key]))
            for command, own in options.items()
            if key in own
        }
        if all(wrong.values()):
            raise ConfigError(f"{config.path}: {key}{next(iter(wrong.values()))}")
        if wrong.get(name) == "":
            usable[key] = _prepared(config, key, value, options[name][key])
    return usable


def _wrong(context: Any, value: Value, parameter: Any, prepared: Value) -> str:
    """Return why an option refuses a value, as the end of a sentence, or "" if it accepts it."""
    if isinstance(value, bool) != bool(parameter.is_flag):
        return f" must be {'true or false' if parameter.is_flag else 'text or a number'}."
    if isinstance(value, list) and not parameter.multiple:
        return " takes one value, not a list."
    try:
        if not isinstance(value, bool):
            parameter.type_cast_value(context, prepared)
    except typer.BadParameter as e:
        return f": {e.message}"
    return ""


def _prepared(config: Config, key: str, value: Value, parameter: Any) -> Value:
    """Return a value in the form that the command line would pass on."""
    if isinstance(value, str) and key in _PATHS:
        return str(config.path.parent / value)
    return [value] if isinstance(value, str) and parameter.multiple else value
