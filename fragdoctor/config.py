"""Settings of a project: ``[tool.fragdoctor]`` of ``pyproject.toml``, or ``fragdoctor.toml``.

The keys are the long options of the commands, without the dashes in front.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from fragdoctor.errors import ConfigError

OWN_FILE: Final = "fragdoctor.toml"
PROJECT_FILE: Final = "pyproject.toml"
MAX_BYTES: Final = 1024 * 1024

Value = str | bool | list[str]


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one file.

    Attributes:
        path: where they were read.
        values: option (``max-peak``) -> text as on the command line, or True / False for a flag,
            or a list for an option that may be repeated.
    """

    path: Path
    values: Mapping[str, Value] = field(default_factory=dict)


def find_config(start: Path) -> Path | None:
    """Return the nearest file with settings, from a directory upwards; None where there is none.

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


def read_config(path: Path, known: Collection[str]) -> Config:
    """Return the settings of a file.

    Args:
        path: ``fragdoctor.toml``, or any other TOML file with a table ``[tool.fragdoctor]``.
        known: options that may be set.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value has no such form.
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
    """Return the settings of a TOML file; None where it has none."""
    try:
        with path.open("rb") as file:
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
            f"{path} is no valid TOML: {e}.", hint="Mend it, or run with --no-config."
        ) from e
    if path.name != PROJECT_FILE and "tool" not in document:
        return document
    tool = document.get("tool")
    table = tool.get("fragdoctor") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise ConfigError(f"{path}: tool.fragdoctor is no table.")
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
    raise ConfigError(
        f"{path}: {key!r} is neither text, a number, true or false, nor a list of texts."
    )


def _unknown(path: Path, key: str, known: Collection[str]) -> ConfigError:
    near = get_close_matches(key.replace("_", "-").lower(), sorted(known), n=1, cutoff=0.6)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(sorted(known))}."
    return ConfigError(f"{path}: there is no setting {key!r}.", hint=hint)
