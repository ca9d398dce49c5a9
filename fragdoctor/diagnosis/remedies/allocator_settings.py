"""Remedies that are allocator settings, and the memory fraction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Final

from msgspec.structs import replace

from fragdoctor.diagnosis.bench import Attempt, Bench, Effect
from fragdoctor.diagnosis.remedies.remedy import (
    JudgedCase,
    Proposal,
    Remedy,
    Weight,
    best_of,
    helps,
    outcome_text,
)
from fragdoctor.future.search import steps_won, usual_confs
from fragdoctor.future.whatif import WhatIf
from fragdoctor.model.diagnosis import Cause
from fragdoctor.model.finding import Confidence
from fragdoctor.model.settings import is_same_conf
from fragdoctor.rules.fragmentation.drifting_sizes import variety_text
from fragdoctor.units import MIB, format_size, plural

SMALLEST_SPLIT_MB: Final = 32
"""PyTorch's own minimum is 20 or 21 MiB; just above that, every other tensor counts as large."""

LARGEST_SPLIT_MB: Final = 128


class SettingRemedy(Remedy):
    """A key of the setting string, tried with its usual values if there is a trace.

    Attributes:
        key: the key in the setting string, or "" for the defaults.
    """

    key: ClassVar[str]

    def confs(self, case: JudgedCase) -> Sequence[str]:
        """Return the setting strings to try: added to the current settings, and replacing them."""
        if case.is_too_new(self.key):
            return ()
        joined = [case.with_present(conf) for conf in usual_confs(self.key)]
        alone = [case.in_place_of_present(conf) for conf in usual_confs(self.key)]
        return tuple(dict.fromkeys((*joined, *alone)))

    @property
    def untold(self) -> Proposal:
        """The setting where nothing is proposed; it is tried all the same."""
        return self.rejection("", Confidence.POSSIBLE)

    def attempts(self, case: JudgedCase) -> list[Attempt]:
        """Return the run under each value."""
        present = case.settings.conf if case.settings is not None else ""
        return [
            Attempt(WhatIf(conf=conf))
            for conf in self.confs(case)
            if not is_same_conf(conf, present)
        ]

    def judged(
        self, case: JudgedCase, bench: Bench, proposal: Proposal, outcomes: Sequence[Effect]
    ) -> Proposal | None:
        """Return the setting with its best value: recommended, rejected, or left open."""
        outcomes = [o for o in outcomes if o.result.is_conclusive] or outcomes
        best = best_of(bench, outcomes)
        result = best.result
        if not result.is_conclusive:
            reason = result.note.removeprefix("not known: ")
            return proposal.with_caveat(f"A replay cannot answer it: {reason}.")
        if helps(bench.recorded, result):
            return self._accepted(case, bench, best, proposal)
        said = outcome_text(bench.recorded, result)
        if not bench.is_exact and not proposal.is_rejected:
            return proposal.with_caveat(f"An estimate says that it may not be enough: {said}.")
        tried = (one.attempt.what_if.conf or "" for one in outcomes)
        values = ", ".join(dict.fromkeys(conf.rpartition(f"{self.key}:")[2] for conf in tried))
        why = f"Replayed{f' with {values}, at best' if len(outcomes) > 1 else ''}: {said}."
        if proposal.is_rejected and not result.fits:
            why = f"{proposal.recommendation.why} {why}".strip()
        sure = Confidence.PROVEN if bench.is_exact else Confidence.LIKELY
        setting = case.assignment(best.attempt.what_if.conf or "")
        return self.rejection(why, sure, setting, bench.predicted(result))

    def _accepted(
        self, case: JudgedCase, bench: Bench, best: Effect, proposal: Proposal
    ) -> Proposal:
        conf = best.attempt.what_if.conf or ""
        setting = case.assignment(conf)
        if proposal.is_rejected:
            proposal = self.proposal(
                weight=Weight.CURES if not bench.recorded.fits else Weight.HELPS,
                setting=setting,
                why=f"Replayed: {outcome_text(bench.recorded, best.result)}.",
                cost="One environment variable.",
            )
        elif proposal.recommendation.setting != setting:
            # The replay may have found a better value than reasoning alone.
            value = f"{self.key}:{setting.rpartition(f'{self.key}:')[2]}"
            why = f"Of the values replayed, {value} leaves the most room."
            proposal = proposal.saying(title=self.title, setting=setting, why=why)
        accepted = proposal.saying(
            confidence=bench.confidence(best.result), predicted=bench.predicted(best.result)
        )
        dropped = ", ".join(case.replaced_by(conf)) if self.key else ""
        if dropped and not any("takes the place" in c for c in accepted.recommendation.caveats):
            accepted = accepted.with_caveat(f"It takes the place of {dropped}.")
        if case.cause is not Cause.LEAK:
            return accepted
        n = steps_won(best.result.outlook)
        steps = f" by about {plural(n, 'step')}" if n else ""
        why = f"It only postpones the failure{steps}, since memory grows step by step."
        said = accepted.saying(why=f"{why} {accepted.recommendation.why}")
        return replace(said, weight=Weight.MAY_HELP)


_NOT_ON_WINDOWS: Final = (
    "It needs Linux: Windows does not have it, and WSL's driver often refuses it."
)


class ExpandableSegments(SettingRemedy):
    """``expandable_segments:True``: the first setting to try against fragmentation."""

    code = "expandable-segments"
    key = "expandable_segments"
    title = "Use expandable segments"

    def confs(self, case: JudgedCase) -> Sequence[str]:
        """Return the setting unless it is already on."""
        return () if case.expandable_is_on else super().confs(case)

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose the setting for fragmentation; otherwise say why it does not help."""
        if not case.is_allocator_case or case.cause is Cause.HEALTHY:
            return
        setting = case.assignment(case.with_present(f"{self.key}:True"))
        needs_upgrade = case.is_too_new(self.key)
        if case.has_marker("expandable-unsupported"):
            against = "The text says that they cannot be used here."
        elif case.expandable_is_on:
            against = "It is on already."
        else:
            against = beyond_holes(case) or (_NOT_ON_WINDOWS if case.runs_on_windows else "")
        if against:
            # Windows is told by a path or by the driver's figures, which fit some Linux machines.
            sure = Confidence.LIKELY if against == _NOT_ON_WINDOWS else Confidence.PROVEN
            yield self.rejection(against, sure, setting=setting)
            return
        is_main = case.cause is Cause.FRAGMENTATION
        if not is_main and not (
            case.cause is Cause.CAPACITY and case.supports(Cause.FRAGMENTATION)
        ):
            return
        r = case.failed_request
        holes = "Live blocks keep free cache in segments that cannot be returned"
        if r is not None:
            free = format_size(r.unallocated_bytes)
            holes = f"{free} is free in holes that are too small for the {r.request_text}"
        title, change = self.title, ""
        if needs_upgrade:
            title = "Upgrade to PyTorch 2.1 or later and use expandable segments"
            setting, change = "", f"then set {setting}"
        # Without a trace the holes are unknown; the setting is still the cheapest thing to try,
        # unless it takes another PyTorch.
        weight = (Weight.HELPS if needs_upgrade else Weight.FITS) if is_main else Weight.MAY_HELP
        if case.has_old_holes:
            weight = Weight.MAY_HELP
        yield self.proposal(
            title=title,
            weight=weight,
            confidence=Confidence.LIKELY if is_main else Confidence.POSSIBLE,
            setting=setting,
            change=change,
            why=f"{holes}; expandable segments grow page by page instead of making new segments.",
            cost="One environment variable; mapping pages makes the first use a little slower.",
            caveats=self._caveats(case),
        )

    def _caveats(self, case: JudgedCase) -> tuple[str, ...]:
        caveats = [*case.version_caveats(self.key), "Not on Windows."]
        if case.backend == "rocm":
            caveats.append("On ROCm it has no effect before builds of the ROCm 7 era.")
        if case.settings is not None and case.settings.max_split_bytes is not None:
            caveats.append(
                "It takes the place of max_split_size_mb: together they can make reserved memory "
                "grow without bound."
            )
        if case.settings is not None and case.settings.garbage_collection_threshold:
            caveats.append("garbage_collection_threshold does not act on expandable segments.")
        caveats.append("Older versions cannot share its tensors between processes (CUDA IPC).")
        return tuple(caveats)


def beyond_holes(case: JudgedCase) -> str:
    """Return why no layout of the cache is enough, or "" if one may be."""
    r = case.failed_request
    if r is None or case.supports(Cause.FRAGMENTATION) or not r.is_beyond_settings:
        return ""
    return f"Even without holes {format_size(-(r.margin_bytes or 0))} would be missing."


class MaxSplitSize(SettingRemedy):
    """``max_split_size_mb``: keeps large blocks whole. A last resort."""

    code = "max-split-size"
    key = "max_split_size_mb"
    title = "Keep large blocks whole"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose the limit for a large fragmented request, never with expandable segments."""
        if not case.is_allocator_case or case.cause is not Cause.FRAGMENTATION:
            return
        r = case.failed_request
        # A power of two well below the request: at most a quarter of it.
        quarter = LARGEST_SPLIT_MB if r is None else r.requested_bytes // (4 * MIB)
        power = 1 << max(quarter.bit_length() - 1, 0)
        megabytes = min(max(power, SMALLEST_SPLIT_MB), LARGEST_SPLIT_MB)
        setting = case.assignment(case.with_present(f"{self.key}:{megabytes}"))
        if case.expandable_is_on:
            why = (
                "Expandable segments are on: they split regardless of it, and both together can "
                "make reserved memory grow without bound."
            )
            yield self.rejection(why, Confidence.PROVEN, setting=setting)
            return
        if case.is_too_new(self.key) or (case.settings and case.settings.max_split_bytes):
            return
        if r is not None and r.requested_bytes < SMALLEST_SPLIT_MB * MIB:
            return
        request = "" if r is None else f" such as the {format_size(r.requested_bytes)} here"
        yield self.proposal(
            weight=Weight.MAY_HELP,
            setting=setting,
            why=f"Blocks of {megabytes} MiB and more are then never split for smaller requests. "
            f"They stay whole for large ones{request}, and can be returned.",
            cost="More calls of cudaMalloc and cudaFree, which are slow.",
            caveats=(
                "A last resort by PyTorch's own documentation; a smaller number has more effect.",
                "Do not combine it with expandable_segments.",
                *case.version_caveats(self.key),
            ),
        )


class RoundupDivisions(SettingRemedy):
    """``roundup_power2_divisions``: fewer distinct sizes, more reuse."""

    code = "roundup-divisions"
    key = "roundup_power2_divisions"
    title = "Round sizes up to divisions of a power of two"

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Propose the setting for fragmentation, strongly if sizes are seen to drift."""
        if not case.is_allocator_case or case.cause is not Cause.FRAGMENTATION:
            return
        if case.is_too_new(self.key) or (case.settings and case.settings.roundup_is_on):
            return
        sizes = case.context.analysis.sizes if case.context.analysis is not None else None
        if sizes is not None and not sizes.drifting:
            return
        why = "Sizes that differ a little become equal, so that a freed block fits the next one."
        if sizes is not None:
            why = f"{variety_text(sizes)}. {why}"
        yield self.proposal(
            title="Round sizes up to a quarter of a power of two",
            weight=Weight.HELPS if sizes is not None else Weight.MAY_HELP,
            confidence=Confidence.LIKELY if sizes is not None else Confidence.POSSIBLE,
            setting=case.assignment(case.with_present(f"{self.key}:4")),
            why=why,
            cost="A block may be up to a quarter larger than requested.",
            caveats=(
                "Small sizes are not rounded (up to 512 times the divisions).",
                *case.version_caveats(self.key),
            ),
        )


class GarbageCollection(SettingRemedy):
    """``garbage_collection_threshold``: works only under a memory fraction."""

    code = "garbage-collection-threshold"
    key = "garbage_collection_threshold"
    title = "Return old unused segments early"

    def confs(self, case: JudgedCase) -> Sequence[str]:
        """Return the setting strings, or none without a fraction, where the key does nothing."""
        found = super().confs(case)
        return found if case.context.has_memory_fraction else found[:1]

    def propose(self, case: JudgedCase) -> Iterator[Proposal]:
        """Say that the key does nothing where it is set without a limit."""
        present = 0.0 if case.settings is None else case.settings.garbage_collection_threshold
        if present and not case.context.has_memory_fraction and case.cause is not Cause.HEALTHY:
            yield self.rejection(
                "It needs a memory fraction below 1: it is set here and had no effect.",
                Confidence.PROVEN,
                setting=case.assignment(f"{self.key}:{present:g}"),
            )


class DefaultSettings(SettingRemedy):
    """Going back to the defaults if other settings are in force."""

    code = "default-settings"
    key = ""
    title = "Go back to the default settings"

    def confs(self, case: JudgedCase) -> Sequence[str]:
        """Return the empty setting string if something is set."""
        present = case.settings.conf if case.settings is not None else ""
        return () if is_same_conf(present, "") else ("",)
