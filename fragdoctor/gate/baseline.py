"""Baselines: what was accepted once, so that a check fails only on what got worse.

A finding is identified by its fingerprint (rule, functions and file base names; no addresses, no
line numbers), a figure by its device. A moved line, another directory or run changes neither.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, ValidationError, convert, field, to_builtins

from fragdoctor.errors import ConfigError
from fragdoctor.gate.budgets import Measures, Reason, measured
from fragdoctor.model.diagnosis import Diagnosis
from fragdoctor.model.finding import Finding, Severity, n_shared, path_parts
from fragdoctor.opening import read_bounded
from fragdoctor.units import MIB, Amount, format_count, format_size

SCHEMA_VERSION: Final = "1.0"
MAX_BYTES: Final = 64 * MIB
DEFAULT_TOLERANCE: Final = Amount(share=0.05)

FLOOR_BYTES: Final = 20 * MIB
"""With a tolerance in percent, changes below one segment of the large pool do not count."""

_TITLES: Final = {
    "peak_bytes": "peak memory",
    "stranded_bytes": "stranded free memory",
    "retries": "allocations that flush the cache",
    "ooms": "out-of-memory failures",
}

Count = Annotated[int, Meta(ge=0)]


class KnownFinding(Struct, frozen=True):
    """A finding that was accepted: all findings with one fingerprint together."""

    code: str
    n_bytes: Count
    severity: Literal["info", "warning", "error"]


class Entry(Struct, frozen=True):
    """What is accepted for one file: figures by device, findings by fingerprint."""

    devices: Mapping[int, Mapping[str, Count | None]]
    findings: Mapping[str, KnownFinding]


class Baseline(Struct, frozen=True):
    """Accepted files by name (with ``/`` between the parts)."""

    files: Mapping[str, Entry] = field(default_factory=dict)

    def find(self, name: str, n_files: int) -> Entry | None:
        """Return the entry of a file, or None if there is none or several fit equally well.

        The name may have changed: the entry that shares most of the last parts of the path is used.
        When one file is checked against a baseline of one file, the names do not matter.
        """
        parts = path_parts(name)
        scores = {other: n_shared(parts, path_parts(other)) for other in self.files}
        best = max(scores.values(), default=0)
        found = [other for other, score in scores.items() if score == best]
        if len(found) == 1 and (best > 0 or n_files == 1):
            return self.files[found[0]]
        return None


def entry_of(diagnosis: Diagnosis, findings: Sequence[Finding]) -> Entry:
    """Return the entry that a baseline keeps for a case."""
    known = _by_fingerprint(findings)
    return Entry(
        {m.device: {name: getattr(m, name) for name in _TITLES} for m in measured(diagnosis)},
        {
            key: KnownFinding(
                known[key][0].code,
                sum(f.n_bytes for f in known[key]),
                max(f.severity for f in known[key]).name.lower(),  # type: ignore[arg-type]
            )
            for key in sorted(known, key=lambda key: (known[key][0].code, key))
        },
    )


def what_got_worse(
    diagnosis: Diagnosis,
    findings: Sequence[Finding],
    entry: Entry,
    *,
    tolerance: Amount = DEFAULT_TOLERANCE,
    fail_on: Severity = Severity.ERROR,
) -> list[Reason]:
    """Return why a case is worse than its baseline: figures and findings beyond the tolerance.

    The findings are those that count (after ``--select`` and ``--ignore``), of severity ``fail_on``
    or above. Bytes may grow by the tolerance; counts may not grow at all.
    """
    worse = [w for m in measured(diagnosis) for w in _figures(m, entry, tolerance)]
    for key, group in _by_fingerprint(findings).items():
        worst = max(group, key=lambda f: (f.severity, f.n_bytes))
        if worst.severity >= fail_on:
            text = _why_worse(entry.findings.get(key), group, worst, tolerance)
            if text:
                worse.append(Reason.of(worst, text))
    return worse


def _figures(m: Measures, entry: Entry, tolerance: Amount) -> list[Reason]:
    known = entry.devices.get(m.device)
    if known is None:
        return []
    worse = []
    for name, title in _TITLES.items():
        is_size = name.endswith("_bytes")
        now, old = getattr(m, name), known.get(name)
        if now is None or old is None or now <= old + (_allowed(old, tolerance) if is_size else 0):
            continue
        shown = format_size if is_size else format_count
        text = f"{title}{m.where} grew from {shown(old)} to {shown(now)}"
        worse.append(Reason(name.removesuffix("_bytes"), text, device=m.device))
    return worse


def _why_worse(
    known: KnownFinding | None, group: Sequence[Finding], worst: Finding, tolerance: Amount
) -> str:
    """Return why a finding counts as worse, or "" if it does not."""
    if known is None:
        return f"new: {worst.message}"
    if Severity[known.severity.upper()] < worst.severity:
        return f"{known.severity} before, {worst.severity.name.lower()} now: {worst.message}"
    now = sum(f.n_bytes for f in group)
    if now > known.n_bytes + _allowed(known.n_bytes, tolerance):
        return f"grew from {format_size(known.n_bytes)} to {format_size(now)}: {worst.message}"
    return ""


def _allowed(old: int, tolerance: Amount) -> int:
    allowed = tolerance.of(old) or 0
    is_share = tolerance.share is not None and tolerance.share > 0
    return max(allowed, FLOOR_BYTES) if is_share else allowed


def _by_fingerprint(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in findings:
        found.setdefault(finding.fingerprint or finding.code, []).append(finding)
    return found


def write_baseline(baseline: Baseline) -> str:
    """Return a baseline as the text of its file: JSON, stable for the same content."""
    files = to_builtins(dict(sorted(baseline.files.items())), str_keys=True)
    document = {"fragdoctor_baseline": SCHEMA_VERSION, "files": files}
    return json.dumps(document, indent=2, ensure_ascii=True) + "\n"


def load_baseline(name: str) -> Baseline:
    """Return the baseline in a file.

    Raises:
        ConfigError: if there is no such file, or it holds no baseline.
        InputError: if it cannot be read.
    """
    if not os.path.exists(name):  # noqa: PTH110 - never raises
        raise ConfigError(
            f"The baseline {name} does not exist.", hint=f"Write it: --write-baseline {name}"
        )
    return read_baseline(read_bounded(name, MAX_BYTES), name)


def read_baseline(text: str | bytes, name: str) -> Baseline:
    """Return the baseline in the text of a file.

    Raises:
        ConfigError: if it is not a baseline, or is one from a newer fragdoctor.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise _no_baseline(name, "it is not JSON") from e
    if not isinstance(document, dict) or "fragdoctor_baseline" not in document:
        raise _no_baseline(name, "the key fragdoctor_baseline is missing")
    version = document["fragdoctor_baseline"]
    if not isinstance(version, str) or version.split(".")[0] != SCHEMA_VERSION.split(".")[0]:
        raise ConfigError(
            f"{name} is a baseline of version {version!s:.20}, but this fragdoctor reads "
            f"{SCHEMA_VERSION}.",
            hint="Rewrite it with --write-baseline.",
        )
    try:
        return Baseline(convert(document.get("files"), dict[str, Entry], str_keys=True))
    except ValidationError as e:
        raise _no_baseline(name, "it was edited or damaged") from e


def _no_baseline(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"{name} is not a fragdoctor baseline: {why}.", hint="Write one with --write-baseline."
    )
