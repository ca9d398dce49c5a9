"""The allocator settings worth trying on a recorded run: one list for every command.

``analyze`` tries the usual values of each key, ``simulate --sweep`` all values and sensible pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.model.settings import Era, is_same_conf, parse_conf
from fragdoctor.trace.fidelity import Reproduction


@dataclass(frozen=True, slots=True)
class SettingValues:
    """The values of one key, in the order in which guides name them.

    Attributes:
        usual: those that most guides propose; few, since every analysis tries them.
        others: those between and beyond, for a sweep.
    """

    key: str
    usual: tuple[str, ...]
    others: tuple[str, ...] = ()

    def confs(self, *, is_sweep: bool = False) -> tuple[str, ...]:
        """Return the setting strings of the usual values, or of all of them."""
        values = (*self.usual, *self.others) if is_sweep else self.usual
        return tuple(f"{self.key}:{value}" for value in values)


EXPANDABLE: Final = SettingValues("expandable_segments", ("True",))
SPLITS: Final = SettingValues(
    "max_split_size_mb", ("32", "64", "128", "256", "512"), ("20", "48", "96", "192", "384")
)
DIVISIONS: Final = SettingValues(
    "roundup_power2_divisions", ("2", "4", "8"), ("1", "16", "[256:1,512:2,1024:4,>:8]")
)
LARGE_SEGMENTS: Final = SettingValues("large_segment_size_mb", (), ("32", "64", "128"))
THRESHOLDS: Final = SettingValues("garbage_collection_threshold", ("0.6", "0.8"))

FAMILIES: Final = (EXPANDABLE, SPLITS, DIVISIONS, LARGE_SEGMENTS, THRESHOLDS)


def usual_confs(key: str) -> tuple[str, ...]:
    """Return the setting strings with the usual values of a key."""
    return next(f.confs() for f in FAMILIES if f.key == key)


def usual_candidates(
    reproduction: Reproduction, torch_version: str | None = None
) -> tuple[str, ...]:
    """Return each key alone with its usual values, as far as the version knows it."""
    return _known((c for f in FAMILIES for c in f.confs()), reproduction, torch_version)


def sweep_candidates(
    reproduction: Reproduction, torch_version: str | None = None
) -> tuple[str, ...]:
    """Return each key alone over all its values, and sensible pairs.

    Garbage collection does nothing without a memory fraction, so it comes with one where none is
    in force. Expandable segments and ``max_split_size_mb`` exclude each other: oversize rules still
    apply to expandable blocks, and reserved memory can grow without bound.
    """
    divisions, segments = DIVISIONS.confs(is_sweep=True), LARGE_SEGMENTS.confs(is_sweep=True)
    limit = "" if reproduction.conditions.allowed_bytes is not None else _LIMIT
    collect = [f"{conf}{limit}" for conf in THRESHOLDS.confs()]
    wanted = [
        "",
        *EXPANDABLE.confs(),
        *SPLITS.confs(is_sweep=True),
        *divisions,
        *segments,
        *collect,
        *(f"expandable_segments:True,{other}" for other in (*DIVISIONS.confs(), *segments)),
        *(f"max_split_size_mb:{mb},{d}" for mb in (64, 128, 256) for d in DIVISIONS.confs()),
        *(f"max_split_size_mb:{mb},{c}" for mb in (128, 256) for c in collect),
    ]
    return _known(wanted, reproduction, torch_version)


_LIMIT: Final = ",per_process_memory_fraction:0.95"


def _known(
    wanted: Iterable[str], reproduction: Reproduction, torch_version: str | None
) -> tuple[str, ...]:
    """Return the strings that the version accepts, without the recorded one and repetitions.

    Without a version, keys that came after the recording's are left out: an unknown key is an
    error at first use of the device.
    """
    version = torch_version or _version_of(reproduction)
    recorded = reproduction.conditions.settings.conf
    known = []
    for conf in dict.fromkeys(wanted):
        if is_same_conf(conf, recorded):
            continue
        try:
            parse_conf(conf, version)
        except ConfigError:
            continue
        known.append(conf)
    return tuple(known)


def _version_of(reproduction: Reproduction) -> str:
    """Return a version that the recording's is not older than."""
    low = reproduction.trace.snapshot.provenance.version_low
    if low:
        return low if low.count(".") > 1 else f"{low}.0"
    newest = {Era.SEGMENT_COUNTER: "2.13.0", Era.BLOCK_COUNTER: "2.12.0", Era.ADDRESS: "2.1.0"}
    return newest[reproduction.conditions.era]
