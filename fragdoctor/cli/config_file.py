"""The configuration file: where it lies and what it says.

It is ``fragdoctor.toml``, or ``pyproject.toml`` with a table ``[tool.fragdoctor]``; its keys are
the long options of the commands, without the leading dashes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from fragdoctor.errors import ConfigError
from fragdoctor.opening import open_readable

OWN_FILE: Final = "fragdoctor.toml"
PROJECT_FILE: Final = "pyproject.toml"
VARIABLES: Final = "FRAGDOCTOR_"
"""How the names of environment variables begin that set options."""
MAX_BYTES: Final = 1024 * 1024

Value = str | bool | list[str]


class Config(Struct, frozen=True):
    """The settings of one file.

    Attributes:
        path: the file.
        values: option (``max-peak``) -> text as on the command line, True or False for a flag,
            or a list for an option that can be repeated.
    """

    path: Path
    values: Mapping[str, Value] = field(default_factory=dict)


def find_config(start: Path) -> Path | None:
    """Return the nearest file with settings, from a directory upward, or None.

    Raises:
        ConfigError: a ``pyproject.toml`` on the way cannot be read.
    """
    for directory in (start, *start.parents):
        own = directory / OWN_FILE
        if own.is_file():
            return own
        project = directory / PROJECT_FILE
        if project.is_file() and _table(project) is not None:
            return project
    return None


def nearest_config() -> Path | None:
    """Return the nearest file with settings, from the working directory upward, or None.

    Raises:
        ConfigError: as for ``find_config``.
    """
    try:
        return find_config(Path.cwd())
    except FileNotFoundError:  # the working directory was deleted
        return None


def read_config(path: Path, known: Collection[str]) -> Config:
    """Return the settings of a file.

    Args:
        path: ``fragdoctor.toml``, or any other TOML file with a table ``[tool.fragdoctor]``.
        known: options that may be set.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value has the wrong form.
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
    return Config(path, values)


def _table(path: Path) -> dict[str, Any] | None:
    """Return the settings of a TOML file, or None if it has none."""
    import tomllib  # most projects have no settings

    try:
        with BufferedReader(open_readable(path)) as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is too long for a configuration file.")
        document = tomllib.loads(data.decode("utf-8"))
    except OSError as e:
        raise ConfigError(
            f"{path} cannot be read: {e.strerror or e}.", hint="Check --config."
        ) from e
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
        return str(value)
    if isinstance(value, list) and all(
        isinstance(v, str | int | float) and not isinstance(v, bool) for v in value
    ):
        return [str(v) for v in value]
    raise ConfigError(f"{path}: {key!r} is not text, a number, true, false or a list of texts.")


def _unknown(path: Path, key: str, known: Collection[str]) -> ConfigError:
    near = get_close_matches(key.replace("_", "-").lower(), sorted(known), n=1, cutoff=0.6)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(sorted(known))}."
    return ConfigError(f"{path}: there is no setting {key!r}.", hint=hint)
