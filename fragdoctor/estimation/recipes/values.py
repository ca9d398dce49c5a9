"""Converts what a file holds to what a fact means, and to how the report shows it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.training_choices import PLAIN_DTYPES, optimizer_of
from fragdoctor.model.settings import NO_ROUNDUP, parse_conf

_SHOWN: Final = 80
_OFF: Final = ("", "none", "no", "null", "false", "off", "n", "0")
AUTO: Final = "auto"


class UnsayableError(Exception):
    """A value that no option of an estimate stands for; the text says why, without a period."""


Convert = Callable[[Any], Any]
"""Converts a file's value to a fact's; None = the entry is off. Raises ``UnsayableError``."""


def shown(value: Any) -> str:
    """Return a value as the report shows it: on one line and not too long."""
    if isinstance(value, list):
        is_flat = all(isinstance(one, str | int | float) for one in value)
        text = ", ".join(map(shown, value[:8])) if is_flat else "[...]"
    elif isinstance(value, dict):
        text = "{...}"
    else:
        text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def is_off(value: Any) -> bool:
    """Return whether a value switches something off."""
    return value in (None, False, 0, [], {}) or text_of(value) in _OFF


def text_of(value: Any) -> str:
    """Return a value as lower-case text for comparing names."""
    return str(value).strip().lower()


def anything(value: Any) -> Any:
    """Return a value as it is."""
    return value


def name(value: Any) -> str:
    """Return a name or a path as written."""
    if not isinstance(value, str) or not value.strip():
        raise UnsayableError("is not a name")
    return value.strip()


def _number(value: Any) -> float:
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def count(value: Any) -> int | None:
    """Return a whole number of at least 1, or None for less and for ``auto``."""
    if value == AUTO:
        return None
    number = _number(value)
    if not (abs(number) <= 2**53 and number == int(number)):
        raise UnsayableError("is not a whole number")
    return int(number) if number >= 1 else None


def share(value: Any) -> float:
    """Return a share above 0 and up to 1."""
    if not 0 < (number := _number(value)) <= 1:
        raise UnsayableError("is not a share from 0 to 1")
    return number


def when_on(meaning: Any) -> Convert:
    """Return the conversion of a flag: ``meaning`` if it is set, else None."""
    return lambda value: None if is_off(value) else meaning


def one_of(meanings: Mapping[str, Any], otherwise: str = "is not a known value") -> Convert:
    """Return the conversion of a lower-case name by a table; a value that is off becomes None."""

    def convert(value: Any) -> Any:
        """Return what a name means; raise ``UnsayableError`` for an unknown name."""
        key = text_of(value)
        if key not in meanings and not is_off(value):
            raise UnsayableError(otherwise)
        return meanings.get(key)

    return convert


_OF_TORCH: Final = {f"torch.{name}": kind for name, kind in PLAIN_DTYPES.items()}
dtype: Final = one_of({AUTO: AUTO, **PLAIN_DTYPES, **_OF_TORCH}, "is not a known dtype")
mixed_dtype: Final = one_of(
    {"bf16": "bf16", "fp16": "fp16", "auto": None}, "is not a known mixed precision"
)

_ATTENTION: Final[Mapping[str, str | None]] = {
    "sdpa": "sdpa", "eager": "eager", "xformers": "sdpa", "auto": None, "disabled": "eager",
    "fa2": "flash", "fa3": "flash", "flex_attention": "flash", "flex": "flash", "s2": "flash",
}  # fmt: skip


def attention(value: Any) -> str | None:
    """Return how attention is computed; any kernel that writes no scores counts as ``flash``."""
    key = text_of(value)
    if "flash" in key or "sage" in key:
        return "flash"
    if key not in _ATTENTION:
        raise UnsayableError("is not a known kind of attention; counted as sdpa")
    return _ATTENTION[key]


def optimizer(value: Any) -> str:
    """Return the optimizer for a name or class: ``paged_adamw_8bit``, ``torch.optim.AdamW``."""
    try:
        return optimizer_of(str(value)).name
    except ConfigError as e:
        raise UnsayableError("is not a known optimizer") from e


def expandable(value: Any) -> bool | None:
    """Return True if settings of PyTorch's allocator let segments grow, else None."""
    try:
        settings = parse_conf(str(value))
    except ConfigError as e:
        raise UnsayableError("is refused by PyTorch") from e
    if settings.roundup_power2_divisions != NO_ROUNDUP:
        raise UnsayableError("rounds sizes up, which is not counted; it needs more")
    return settings.expandable_segments or None


_EVERY_LINEAR: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def targets(value: Any) -> str:
    """Return what gets adapters, in the form of ``--lora-targets``; a pattern means everything."""
    names = value if isinstance(value, list) else re.split(r"[\s,]+", str(value).strip())
    if len(names) == 1 and text_of(names[0]) in ("all", "all-linear", "all_linear"):
        return "all-linear"
    if not all(isinstance(one, str) and _NAME.fullmatch(one) for one in names):
        return "all-linear"  # a pattern, which is not run: assume the most that it can match
    if set(_EVERY_LINEAR) <= set(names):
        return "all-linear"
    return "attention" if set(names) == set(_EVERY_LINEAR[:4]) else ",".join(names)
