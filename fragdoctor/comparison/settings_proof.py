"""Which settings differ, and whether they are the cause: replays one run under the other's."""

from __future__ import annotations

from typing import Final

import numpy as np
from msgspec.structs import replace

from fragdoctor.comparison.compared_run import ComparedDevice
from fragdoctor.errors import ConfigError, SimulationError
from fragdoctor.future.simulator import simulation_of
from fragdoctor.future.whatif import FairReplay, WhatIf
from fragdoctor.model.comparison import SettingChange, SettingsProof
from fragdoctor.model.settings import AllocatorSettings, is_same_conf, parse_conf
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.trace.trace import Trace
from fragdoctor.units import MIB, format_count, format_share, format_size


def setting_changes(
    before: AllocatorSettings | None, after: AllocatorSettings | None
) -> tuple[SettingChange, ...] | None:
    """Return the settings that differ, or None if a run does not record its settings."""
    if before is None or after is None or not (before.is_recorded and after.is_recorded):
        return None
    a, b = before.described(), after.described()
    changes = [
        SettingChange(key, a.get(key, "not set"), b.get(key, "not set"))
        for key in dict.fromkeys((*a, *b))
        if a.get(key) != b.get(key)
    ]
    if not changes and not is_same_conf(before.conf, after.conf):
        # The settings are spelled differently, or contain a key that fragdoctor does not know.
        changes = [SettingChange("PYTORCH_CUDA_ALLOC_CONF", before.conf, after.conf)]
    return tuple(changes)


def conf_meaning(settings: AllocatorSettings) -> str:
    """Return a setting string that means these settings.

    It is the recorded string unless the program changed its settings without it afterward.
    """
    try:
        parsed = parse_conf(settings.conf)
    except ConfigError:
        return settings.conf
    keys = ("max_split_bytes", "garbage_collection_threshold", "expandable_segments")
    if all(getattr(parsed, key) == getattr(settings, key) for key in keys):
        return settings.conf
    parts = []
    if settings.expandable_segments:
        parts.append("expandable_segments:True")
    if settings.max_split_bytes is not None:
        parts.append(f"max_split_size_mb:{settings.max_split_bytes // MIB}")
    if settings.garbage_collection_threshold:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}")
    if settings.roundup_is_on:
        divisions = settings.described()["roundup_power2_divisions"]
        parts.append(f"roundup_power2_divisions:{divisions}")
    return ",".join(parts)


SAME_REQUESTS: Final = 0.99
"""From this share on, two runs made the same requests; the rest is how a run ends."""

MIN_DIFFERENCE: Final = 2 * MIB
"""Differences in peak reserved memory below one driver page explain nothing."""


def requests_equal(before: ComparedDevice, after: ComparedDevice) -> float | None:
    """Return the share of the shorter run's requests that both made in the same order.

    Returns None if a run has no requests, or its trace lacks its beginning.
    """
    n = min(len(before.requests), len(after.requests))
    if n == 0 or before.capture.is_truncated or after.capture.is_truncated:
        return None
    differ = np.flatnonzero(before.requests[:n] != after.requests[:n])
    return 1.0 if not len(differ) else float(differ[0] / n)


def prove_settings(  # noqa: PLR0913 - two runs, each with what it needs
    trace: Trace,
    before: ComparedDevice,
    after: ComparedDevice,
    settings: AllocatorSettings,
    equal: float | None,
    *,
    under: str,
) -> tuple[SettingsProof | None, str]:
    """Return what A's requests do under the last run's settings, or None and the reason.

    The trace is run A's, and the settings are those of the last run, which is called ``under``;
    ``equal`` is the share of requests that both made in the same order.
    """
    if before.totals is None or after.totals is None or not len(before.requests):
        return None, "no trace to replay"
    capacity = None if before.capacity_bytes is not None else after.capacity_bytes
    try:
        reproduction = reproduce(trace)
        what_if = WhatIf(conf=conf_meaning(settings), capacity_bytes=capacity)
        fair = FairReplay(reproduction)
        result = fair.replay(what_if)
        own_fits = reproduction.result.fits
        if own_fits and capacity is not None and not result.fits:
            # Was it the setting, or is the other run's device too small for either?
            own_fits = fair.replay(WhatIf(capacity_bytes=capacity)).fits
        simulation = simulation_of(reproduction, (result,))
    except (ConfigError, SimulationError) as error:
        return None, error.message
    if not result.is_conclusive:
        return None, result.note
    own = before.totals.peak_reserved_bytes
    recorded = after.totals.peak_reserved_bytes
    if len(before.requests) < len(after.request_rows):  # over as many requests as A made
        rows, n_bytes = after.totals.reserved_changes()
        n_before = int(np.searchsorted(rows, int(after.request_rows[len(before.requests)])))
        at_start = int(after.totals.at([0])[0, 2])
        recorded = max(at_start, int(n_bytes[:n_before].max(initial=0)))
    difference, moved = recorded - own, result.peak_reserved_bytes - own
    proof = SettingsProof(
        under=under,
        requests_equal=equal or 0.0,
        own_bytes=own,
        result_bytes=result.peak_reserved_bytes,
        recorded_bytes=recorded,
        fits=result.fits,
        accounted=moved / difference if abs(difference) >= MIN_DIFFERENCE else None,
        is_exact=simulation.method == "replay",
        text="",
        own_fits=own_fits,
    )
    return replace(proof, text=_sentence(proof, len(before.requests))), ""


def _sentence(proof: SettingsProof, n_requests: int) -> str:
    own, result, recorded = proof.own_bytes, proof.result_bytes, proof.recorded_bytes
    last, n = proof.under, format_count(n_requests)
    sentence = f"A's {n} requests replayed under {last}'s settings reserve {format_size(result)}"
    sentence += " at the peak" if proof.fits else " at the peak and run out of memory"
    if proof.requests_equal < SAME_REQUESTS:
        moved = result - own
        if abs(moved) < MIN_DIFFERENCE:
            return f"{sentence}, as under A's own: the settings change nothing here."
        word = "less" if moved < 0 else "more"
        return (
            f"{sentence}, {format_size(abs(moved))} {word} than under A's own; what else differs "
            "comes from other requests."
        )
    sentence += f"; {last} recorded {format_size(recorded)} over the same requests"
    return sentence + _outcome(proof)


def _outcome(proof: SettingsProof) -> str:
    """Return what follows from the replay of the same requests."""
    own, result, recorded = proof.own_bytes, proof.result_bytes, proof.recorded_bytes
    if proof.decides:
        how = "are all served" if proof.fits else "are not all served"
        its_own = "they are not" if proof.fits else "they are"
        return f". A's requests {how} under {proof.under}'s settings; under its own, {its_own}."
    if proof.accounted is None:
        return f", and A {format_size(own)}: the settings make no difference to the peak."
    exactly = ", to the byte" if result == recorded else ""
    took = f"{exactly}, and A {format_size(own)} under its own"
    if abs(result - recorded) < MIN_DIFFERENCE:
        return f"{took}: the settings account for all of the difference."
    if proof.accounted <= 0:
        return f"{took}: the settings do not explain the difference."
    share = format_share(min(proof.accounted, 1), 1)
    return f"{took}: the settings account for {share} of the difference."
