"""Retries, restarts and errors of CUDA that the table of messages does not know."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.model.story import SceneKind

LITERALS: Final = (
    "retries", "retry", "trying batch", "batch size", "batch_size", "smaller batch", "restart",
    "requeu", "resum", "watchdog", "cuda error", "hip error", "cache flushes",
)  # fmt: skip

_COUNTED: Final = re.compile(
    r"(?:num_alloc_retries|alloc(?:ation|ator)?[ _]retries|cudamalloc retries)"
    r"['\"]?[\s:=|]{1,8}(\d{1,9})"
)
_FLUSHES: Final = re.compile(r"(\d{1,9}) pytorch allocator cache flushes")
_SMALLER: Final = re.compile(
    r"(?:retry|trying|reduc|halv|decreas|lower|shrink|fall(?:ing)? back)[\w ]{0,40}"
    r"(?:micro[- ]?)?batch"
    r"|retry[\w /]{0,40}(?:oom|out of memory|smaller|trial|allocation)"
    r"|(?:oom|out of memory)[^.]{0,60}retry"
    r"|batch[ _]size[\s:=]{0,3}\d{0,8}[^.]{0,30}(?:failed|too large|trying)"
    r"|batch[ _]size (?:reduced|halved|lowered|decreased)"
)
_RESTART: Final = re.compile(
    r"(?<![a-z])restart(?:ing|ed)(?![a-z])[^.]{0,60}"
    r"(?:worker|process|train|trial|job|run|actor|attempt|from|script|agent)"
    r"|(?:worker|process|trial|job|run|training|script)s?[^.]{0,30}(?<![a-z])restart(?:ing|ed)"
    r"|restart_count['\"]?[=:]\s?[1-9]"
    r"|(?<![a-z])resum(?:ing|ed)(?![a-z])[^.]{0,40}(?:from|train|checkpoint|run)"
    r"|requeue?(?:d|ing)"
)
_WATCHDOG: Final = re.compile(r"watchdog[^.]{0,80}(?:timeout|timed out|terminated|exception|hang)")
_ERROR: Final = re.compile(r"(?:cuda|hip) error(?::| \(|\s?\d)")
_NEGATED: Final = re.compile(r"(?:max_restarts|no (?:retry|restart)|without (?:retry|restart))")


def happening_of(plain: str) -> tuple[SceneKind | None, int | None]:  # noqa: PLR0911 - one a kind
    """Return what a line reports and its counter; (None, None) for other lines."""
    lowered = plain[:1000].lower()
    counted = _COUNTED.search(lowered) or _FLUSHES.search(lowered)
    if counted is not None:
        n = int(counted.group(1))
        kind = SceneKind.CACHE_FLUSH if "flushes" in counted.group() else SceneKind.RETRY
        return (kind, n) if n else (None, None)
    if _NEGATED.search(lowered):
        return None, None
    if _WATCHDOG.search(lowered):
        return SceneKind.COLLECTIVE, None
    if _ERROR.search(lowered):
        return SceneKind.CUDA_ERROR, None
    if _RESTART.search(lowered):
        return SceneKind.RESTART, None
    if _SMALLER.search(lowered):
        return SceneKind.RETRY, None
    return None, None
