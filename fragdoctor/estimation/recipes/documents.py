"""Reads JSON, YAML and TOML into plain mappings, and refuses what no genuine configuration holds.

YAML needs PyYAML. Aliases let a few lines stand for more values than fit in memory, so the text's
events are counted before anything is built from it; only plain scalars, sequences and mappings are
built (``yaml.SafeLoader``).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from fragdoctor.errors import ConfigError, InputError, LimitExceeded, RefusedSnapshot
from fragdoctor.opening import read_bounded
from fragdoctor.units import MIB

MAX_BYTES: Final = MIB
MAX_DEPTH: Final = 32
MAX_NODES: Final = 20_000
"""The most values in a file, each counted as often as aliases repeat it."""

MAX_BITS: Final = 128

Entries = Mapping[str, Any]

YAML_SUFFIXES: Final = (".yaml", ".yml")
_LARGER: Final = "is larger than any genuine configuration"


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        InputError: it cannot be read, or is not UTF-8.
        LimitExceeded: it is larger than 1 MiB.
    """
    data = read_bounded(path, MAX_BYTES)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputError(f"{path} is not text in UTF-8.", offset=e.start) from e


def read_entries(path: Path) -> Entries:
    """Return the contents of a JSON, YAML or TOML file.

    Raises:
        ConfigError: PyYAML is not installed.
        InputError: it cannot be read, or is not a mapping.
        RefusedSnapshot: it holds something that no genuine configuration does.
        LimitExceeded: it is too large, or nested too deeply.
    """
    text, name, suffix = read_text(path), str(path), path.suffix.lower()
    if suffix in YAML_SUFFIXES:
        found = parse_yaml(text, name)
    elif suffix == ".toml":
        found = _parsed(tomllib.loads, text, name, "TOML")
    else:
        found = _parsed(json.loads, text, name, "JSON")
    if not isinstance(found, dict):
        raise InputError(f"{name} does not map names to values.", hint="Give a configuration file.")
    _check_values(found, name)
    return {str(key): value for key, value in found.items()}


def _parsed(parse: Any, text: str, name: str, kind: str) -> Any:
    try:
        return parse(text)
    except RecursionError as e:
        raise _too_deep(name) from e
    except ValueError as e:
        raise InputError(f"{name} is not {kind}: {_first_line(e)}.") from e


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML text, or None if the text is empty.

    Raises:
        ConfigError: PyYAML is not installed.
        InputError: not YAML.
        RefusedSnapshot: a tag that would build something other than plain values, or an alias
            inside the node that it stands for.
        LimitExceeded: aliases, depth or size exceed any genuine configuration.
    """
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore] # stubs may be installed
    except ImportError as e:
        raise ConfigError(
            f"Reading {name} needs PyYAML.", hint="pip install 'fragdoctor[yaml]'"
        ) from e
    try:
        _check_events(yaml, text, name)
        return yaml.safe_load(text)
    except yaml.constructor.ConstructorError as e:
        raise RefusedSnapshot(
            f"{name} asks for more than plain values: {_first_line(e.problem or e)}.",
            hint="Remove the tag (!...) or the key that is not text.",
            offset=getattr(e.problem_mark, "index", None),
        ) from e
    except (yaml.YAMLError, ValueError) as e:
        problem = getattr(e, "problem", None) or e
        mark = getattr(e, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise InputError(f"{name} is not YAML: {_first_line(problem)}{line}.") from e


def _check_events(yaml: Any, text: str, name: str) -> None:
    """Refuse a text that would become too many values, before any value is made.

    An alias counts as many values as the node that it stands for.
    """
    open_nodes: list[tuple[str | None, int]] = []  # anchor and count at the start
    sizes: dict[str | None, int] = {}
    n_nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        anchor = getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == outer for outer, _ in open_nodes):
                raise RefusedSnapshot(f"{name}: the alias *{anchor} contains itself.")
            n_nodes += sizes.get(anchor, 1)
        elif isinstance(event, yaml.NodeEvent):
            n_nodes += 1
            sizes[anchor] = 1
        if isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((anchor, n_nodes - 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            outer, at_start = open_nodes.pop()
            sizes[outer] = n_nodes - at_start
        if len(open_nodes) > MAX_DEPTH:
            raise _too_deep(name)
        if n_nodes > MAX_NODES:
            raise LimitExceeded(f"{name} {_LARGER}: more than {MAX_NODES} values.")


def _check_values(value: Any, name: str) -> None:
    """Refuse nesting and numbers beyond any genuine configuration."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if any(isinstance(inner, int) and inner.bit_length() > MAX_BITS for inner in level):
            raise LimitExceeded(f"{name} holds a number beyond any genuine configuration.")
        if not level:
            return
    raise _too_deep(name)


def _too_deep(name: str) -> LimitExceeded:
    return LimitExceeded(f"{name} is nested deeper than any genuine configuration.")


def _first_line(problem: Any) -> str:
    return str(problem).strip().split("\n", maxsplit=1)[0].rstrip(".")
