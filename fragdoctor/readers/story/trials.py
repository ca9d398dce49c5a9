"""Which trial of a sweep a line names, and whether it says how that trial began or ended."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.model.story import SceneKind

LITERALS: Final = (
    "trial", "starting run", "sweep", "experiment", "config ", "combination", "fold ",
    "run ",
)  # fmt: skip

_NAME: Final = r"(?P<name>[\w.-]{0,60}\d[\w.-]{0,60})"
# Optuna, Ray Tune, Ax, hand-written loops: "Trial 7 finished", "[trial=7]", "trial_id: ab_00007"
_TRIAL: Final = re.compile(
    r"(?<![\w])trial(?:[ _](?:id|number|no|num|index|name))?['\"]?[\s:=#.(\[-]{1,4}" + _NAME
)
_NUMBERED: Final = re.compile(
    r"(?<![\w/.-])(?P<what>sweep|run|experiment|config|configuration|combination|fold)"
    r"[\s:=#\[(]{1,3}(?P<name>\d{1,9})(?P<total>\s{0,2}(?:/|of)\s{0,2}\d{1,9})?(?![\w.])"
)
_RAY: Final = re.compile(r"(?<![\w])trial (?P<name>[a-z_]\w{0,60}_[0-9a-f]{4,8}_\d{4,6})")
_WANDB: Final = re.compile(r"agent starting run: (?P<name>[a-z0-9]{6,12})(?![\w])")
_BEST: Final = re.compile(r"best(?:\s|_)(?:is\s|value\s|so far\s|of\s)?$")
_END: Final = re.compile(
    r"(?P<failed>fail|error|crash|abort|exception|out of memory|oom)"
    r"|(?P<pruned>prun|stopped early|early.?stop)"
    r"|(?P<end>finish|complet|\bdone\b|\bended\b|succeed|success|terminated)"
    r"|(?P<start>\bstart|\bbegin|launch|running|\bcreated\b)"
)
_HEADLINE: Final = re.compile(r"^[\s=\-#*>~|\[(]{0,40}$")
_NOTHING: Final = frozenset({"with", "of", "in"})


def trial_of(plain: str) -> tuple[str, SceneKind | None]:
    """Return the trial that a line names and what it says of it.

    The kind is None for a line that only names it, such as one with a prefix ``[trial 7]``;
    the name is "" where a line names none.
    """
    lowered = plain[:1000].lower()
    for pattern in (_WANDB, _RAY, _TRIAL, _NUMBERED):
        match = pattern.search(lowered)
        if match is None:
            continue
        if _BEST.search(lowered[max(0, match.start() - 16) : match.start()]):
            continue
        name = match.group("name").strip(".-_")
        if pattern is _WANDB:
            return name, SceneKind.TRIAL_START
        told = _told(lowered, match)
        if pattern is not _NUMBERED:
            return name, told
        # "run 3" also stands in sentences; a count or a headline makes it a trial
        is_counted = bool(match.group("total"))
        is_headline = bool(_HEADLINE.match(lowered[: match.start()]))
        if is_counted or (is_headline and told is not None):
            return name, told or SceneKind.TRIAL_START
    return "", None


def _told(lowered: str, match: re.Match[str]) -> SceneKind | None:
    after = lowered[match.end() : match.end() + 40]
    before = lowered[max(0, match.start() - 24) : match.start()]
    found = _END.search(after) or _END.search(before)
    if found is None:
        is_headline = bool(_HEADLINE.match(before)) and after.strip(" =-#*~|/])0123456789of:") == ""
        return SceneKind.TRIAL_START if is_headline else None
    if found.group("failed"):
        return SceneKind.TRIAL_FAILED
    if found.group("pruned"):
        return SceneKind.TRIAL_PRUNED
    return SceneKind.TRIAL_END if found.group("end") else SceneKind.TRIAL_START
