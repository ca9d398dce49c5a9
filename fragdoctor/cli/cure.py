"""``run --cure``: the failed program once more, under the settings that its recording recommends.

A rerun on the user's own GPU is the strongest proof that a setting helps. Only settings that an
environment variable can make are tried, so that the program itself stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from fragdoctor.capture.launcher import Ended
from fragdoctor.errors import InputError
from fragdoctor.inputs.bundles import open_bundle
from fragdoctor.inputs.folders import FoundBundle, free_name
from fragdoctor.inputs.stats_reader import read_stats
from fragdoctor.units import format_count, plural

if TYPE_CHECKING:
    from fragdoctor.model.diagnosis import Diagnosis, Recommendation

MAX_RERUNS: Final = 3
SETTINGS: Final = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""Variables with allocator settings. One of them replaces the others: the recommended setting has
what was set already, and PyTorch reads only one."""

_FIRST_SIGNAL: Final = 128
_OUT_OF_MEMORY: Final = "OutOfMemoryError"
_SERVED: Final = "allocation.all.allocated"


class RecordedRun(Struct, frozen=True):
    """A program that ran under the recorder, and the bundles that it left, the most telling first.

    ``setting`` is what it was rerun under, "" for the first run.
    """

    ended: Ended
    bundles: Sequence[FoundBundle]
    setting: str = ""

    @property
    def failure(self) -> FoundBundle | None:
        """The bundle of the failure that ended it; None where it ended for another reason."""
        code = self.ended.code
        if not 0 < code < _FIRST_SIGNAL or self.ended.was_asked_to or not self.bundles:
            return None
        first = self.bundles[0]
        is_failure = first.facts.reason == "oom" or first.facts.exception.endswith(_OUT_OF_MEMORY)
        return first if is_failure else None

    @property
    def n_served(self) -> int | None:
        """Allocations that were served before it failed; None where nothing says so."""
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
        """Whether the program itself put other settings in the place of those given."""
        name, _, value = self.setting.partition("=")
        seen = (b.facts.environment.get(name) for b in self.bundles)
        return bool(self.setting) and any(v not in (None, value) for v in seen)

    @property
    def is_last(self) -> bool:
        """Whether another rerun is of no use, or not wanted.

        A run that left no bundle ended before it used the GPU: PyTorch may not know the setting.
        """
        if not self.ended.code or self.ended.was_asked_to or self.ended.code >= _FIRST_SIGNAL:
            return True
        return bool(self.bundles) and (self.failure is None or self.ignores_setting)


Again = Callable[[str, Path], RecordedRun]
"""Runs the program once more, under a setting and with a folder for its bundles."""


def settings_of(recommendations: Sequence[Recommendation]) -> list[str]:
    """Return the recommended ``VARIABLE=value`` of the allocator, the best first."""
    settings = [r.setting for r in recommendations if r.setting.partition("=")[0] in SETTINGS]
    return list(dict.fromkeys(settings))[:MAX_RERUNS]


def rerun(
    first: RecordedRun,
    diagnosis: Diagnosis | None,
    again: Again,
    place: Path,
    say: Callable[[str], None],
) -> int:
    """Rerun a program that ran out of memory until a setting lets it end; return its exit code.

    The diagnosis is that of its recording, None where that cannot be read. ``place`` is the folder
    of the first run's bundles, which are left as they are.
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
            "Nothing was rerun: no setting that an environment variable can make is recommended "
            "for this failure."
        )
        return code
    done: list[RecordedRun] = []
    for n, setting in enumerate(settings, 1):
        say("")
        say(f"Rerun {n} of at most {len(settings)}, under {setting}")
        run = again(setting, free_name(place / f"rerun{n}"))
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
    """Return an environment with one ``VARIABLE=value`` for the allocator and no other."""
    name, _, value = setting.partition("=")
    return {**{k: v for k, v in environ.items() if k not in SETTINGS}, name: value}


def _passes(first: RecordedRun, run: RecordedRun) -> bool | None:
    """Return whether a rerun got past the point where the first run failed; None if unknown."""
    if not run.ended.code:
        return True
    before, now = first.n_served, run.n_served
    return None if before is None or now is None else now > before


def _told(first: RecordedRun, run: RecordedRun) -> str:
    """Return what became of a rerun, as a sentence."""
    code = run.ended.code
    if not code:
        return "the program came to its end."
    if run.ended.was_asked_to or code >= _FIRST_SIGNAL:
        return f"the program was stopped (exit code {code})."
    if run.ignores_setting:
        name = run.setting.partition("=")[0]
        return f"the program sets {name} itself, so that this setting was not in force."
    if run.failure is None:
        how = ", but not out of memory" if run.bundles else " before it used the GPU"
        return f"the program ended with exit code {code}{how}."
    return _told_failure(_passes(first, run), first.n_served or 0, run.n_served or 0)


def _told_failure(passes: bool | None, n_before: int, n_now: int) -> str:
    if passes is None:
        return "out of memory again; whether at the same point is not known."
    if passes:
        return (
            "it passed the point of failure and ran out of memory later: "
            f"{plural(n_now, 'allocation')} served, against {format_count(n_before)} in the first "
            "run."
        )
    place = "at the same point" if n_now == n_before else "earlier"
    return f"out of memory {place}, after {plural(n_now, 'allocation')}."


def _summary(first: RecordedRun, done: Sequence[RecordedRun]) -> str:
    """Return which setting lets the program end, or got it farthest."""
    last = done[-1]
    if not last.ended.code:
        return f"Cured: the program came to its end under {last.setting}"
    passed = [run for run in done if _passes(first, run)]
    if passed:
        best = max(passed, key=lambda run: run.n_served or 0)
        return f"Not cured, only postponed: {best.setting} passed the point of failure."
    return "Not cured: no rerun is known to have passed the point of failure."
