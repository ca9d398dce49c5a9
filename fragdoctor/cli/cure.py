"""``run --cure``: rerun the failed program with the settings that its recording recommends.

A rerun on the user's own GPU is the strongest proof that a setting helps. Only settings that go
into an environment variable are tried, so that the program itself stays unchanged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from fragdoctor.capture.launcher import Ended
from fragdoctor.errors import InputError
from fragdoctor.inputs.bundles import open_bundle
from fragdoctor.inputs.folders import FoundBundle
from fragdoctor.inputs.stats_reader import read_stats
from fragdoctor.opening import first_free
from fragdoctor.units import format_count, plural

if TYPE_CHECKING:
    from fragdoctor.model.diagnosis import Diagnosis, Recommendation

MAX_RERUNS: Final = 3
SETTINGS: Final = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""Variables with allocator settings. Setting one removes the others: the recommended value includes
what was already set, and PyTorch reads only one variable."""

_FIRST_SIGNAL: Final = 128
_OUT_OF_MEMORY: Final = "OutOfMemoryError"
_SERVED: Final = "allocation.all.allocated"


class RecordedRun(Struct, frozen=True):
    """A program that ran under the recorder, and its bundles, the most telling first.

    ``setting`` is the setting of a rerun, "" for the first run.
    """

    ended: Ended
    bundles: Sequence[FoundBundle]
    setting: str = ""

    @property
    def failure(self) -> FoundBundle | None:
        """The bundle of the failure that ended the run, or None if it ended for another reason."""
        code = self.ended.code
        if not 0 < code < _FIRST_SIGNAL or self.ended.was_asked_to or not self.bundles:
            return None
        first = self.bundles[0]
        is_failure = first.facts.reason == "oom" or first.facts.exception.endswith(_OUT_OF_MEMORY)
        return first if is_failure else None

    @property
    def n_served(self) -> int | None:
        """The number of allocations served before the failure, or None if unknown."""
        if self.failure is None:
            return None
        with contextlib.suppress(InputError), open_bundle(str(self.failure.path)) as files:
            if "stats.json" in files.names:
                with files.open("stats.json") as file:
                    stats = read_stats(file.read()).of_device(self.failure.facts.oom_device)
                return max((s.get(_SERVED) or 0 for s in stats), default=0) or None
        return None

    @property
    def ignores_setting(self) -> bool:
        """Whether the program itself replaced the given settings with its own."""
        name, _, value = self.setting.partition("=")
        seen = (b.facts.environment.get(name) for b in self.bundles)
        return bool(self.setting) and any(v not in (None, value) for v in seen)

    @property
    def is_last(self) -> bool:
        """Whether another rerun would be useless or unwanted.

        A run without a bundle ended before it used the GPU: PyTorch may not know the setting.
        """
        if not self.ended.code or self.ended.was_asked_to or self.ended.code >= _FIRST_SIGNAL:
            return True
        return bool(self.bundles) and (self.failure is None or self.ignores_setting)


Again = Callable[[str, Path], RecordedRun]
"""Reruns the program with a setting and a folder for its bundles."""


def settings_of(recommendations: Sequence[Recommendation]) -> list[str]:
    """Return the recommended allocator settings as ``VARIABLE=value``, the best first."""
    settings = [r.setting for r in recommendations if r.setting.partition("=")[0] in SETTINGS]
    return list(dict.fromkeys(settings))[:MAX_RERUNS]


def rerun(
    first: RecordedRun,
    diagnosis: Diagnosis | None,
    again: Again,
    place: Path,
    say: Callable[[str], None],
) -> int:
    """Rerun a program that ran out of memory until a setting works; return its exit code.

    The diagnosis is that of its recording, or None if the recording cannot be read. ``place`` is
    the folder of the first run's bundles, which are left unchanged.
    """
    code = first.ended.code
    if first.ended.was_asked_to or code >= _FIRST_SIGNAL:
        say("Nothing was rerun: the program was stopped.")
        return code
    if first.failure is None:
        if code:
            say("Nothing was rerun: the program did not run out of memory.")
        return code
    settings = settings_of(diagnosis.recommendations if diagnosis is not None else ())
    if not settings:
        say(
            "Nothing was rerun: the advice for this failure has no setting that goes into an "
            "environment variable."
        )
        return code
    done: list[RecordedRun] = []
    for n, setting in enumerate(settings, 1):
        say("")
        say(f"Rerun {n} of at most {len(settings)}, under {setting}")
        run = again(setting, first_free(place, f"rerun{n}"))
        done.append(run)
        say(f"Rerun {n}: {_told(first, run)}")
        for bundle in run.bundles[:1]:
            say(f"Recorded in {bundle.path}")
        if run.is_last:
            break
    say("")
    say(_summary(first, done))
    return done[-1].ended.code


def environment_with(environ: Mapping[str, str], setting: str) -> dict[str, str]:
    """Return an environment in which this ``VARIABLE=value`` is the only allocator setting."""
    name, _, value = setting.partition("=")
    return {**{k: v for k, v in environ.items() if k not in SETTINGS}, name: value}


def _told(first: RecordedRun, run: RecordedRun) -> str:
    """Return the outcome of a rerun as a sentence."""
    code = run.ended.code
    if not code:
        return "the program finished."
    if run.ended.was_asked_to or code >= _FIRST_SIGNAL:
        return f"the program was stopped (exit code {code})."
    if run.ignores_setting:
        name = run.setting.partition("=")[0]
        return f"the program sets {name} itself, so this setting had no effect."
    if run.failure is None:
        how = ", but not out of memory" if run.bundles else " before it used the GPU"
        return f"the program ended with exit code {code}{how}."
    before, now = first.n_served, run.n_served
    if before is None or now is None:
        return "out of memory again; it is unknown whether at the same point."
    place = "at the same point" if now == before else "later" if now > before else "earlier"
    served = f"{plural(now, 'allocation')} served, compared to {format_count(before)}"
    return f"out of memory {place}: {served} in the first run."


def _summary(first: RecordedRun, done: Sequence[RecordedRun]) -> str:
    """Return a sentence on the setting that lets the program finish, or gets it furthest."""
    last = done[-1]
    if not last.ended.code:
        return f"Cured: the program finished under {last.setting}"
    best = max(done, key=lambda run: run.n_served or 0)
    if (best.n_served or 0) > (first.n_served or inf):
        return f"Not cured, only postponed: {best.setting} passed the point of failure."
    return "Not cured: no rerun is known to have passed the point of failure."
