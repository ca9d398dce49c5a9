"""How far a run has come, as bars, trainers and hand-written loops print it."""

from __future__ import annotations

import re
from typing import Final

LITERALS: Final = ("%|", "epoch", "step", "iter", "batch")

_BAR: Final = re.compile(
    r"(\d{1,3})%\|[^|]{0,300}\|\s{0,4}(\d[\d.]{0,12}[kmg]?)/(\d[\d.]{0,12}[kmg]?)(?![\d.])"
)
_OF: Final = r"(?:\s{0,2}(?:/|of)\s{0,2}(\d{1,12}))?"
_MARK: Final = r"['\"]?[\s:=\[(#]{1,4}"
_EPOCH: Final = re.compile(rf"(?<![a-z])epoch{_MARK}(\d{{1,9}}(?:\.\d{{1,6}})?){_OF}")
_STEP: Final = re.compile(
    r"(?<![a-z])(step|iter|iteration|training_iteration|global_step|batch|update)"
    rf"{_MARK}(\d{{1,12}})(?![\d.]*%){_OF}"
)
_DESCRIPTION: Final = re.compile(r"([a-z][\w \[\]/-]{0,30}?)[:\s]{0,3}$")


def place_of(plain: str) -> str:
    """Return where a run is, such as ``epoch 3/10, step 1200``; "" where a line does not say."""
    lowered = plain.lower()
    parts: list[str] = []
    epoch = _EPOCH.search(lowered)
    if epoch is not None:
        parts.append(_counted("epoch", epoch.group(1), epoch.group(2)))
    bar = _BAR.search(lowered) if "%|" in lowered else None
    if bar is not None:
        name = "" if epoch else _description(lowered[max(0, bar.start() - 40) : bar.start()])
        parts.append(f"{name}{bar.group(2)}/{bar.group(3)}")
        return ", ".join(parts)
    step = _STEP.search(lowered)
    if step is not None:
        name = step.group(1).replace("training_", "").replace("global_", "")
        parts.append(_counted(name, step.group(2), step.group(3)))
    return ", ".join(parts)


def _counted(name: str, value: str, total: str | None) -> str:
    return f"{name} {value}/{total}" if total else f"{name} {value}"


def _description(before: str) -> str:
    match = _DESCRIPTION.search(before)
    return f"{match.group(1).strip()} " if match else ""
