"""Why peak memory does not follow the batch in a straight line, and what spoils a comparison."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from typing import Final

from fragdoctor.estimation.recordings import NO_LINE, Recording
from fragdoctor.model.batch_fit import BatchFit, Curve, Scaling
from fragdoctor.model.finding import Location
from fragdoctor.units import format_share, format_size

# A line is named only where it matters this much to the largest peak.
MATTERS: Final = 0.02
DIFFERENT_CODE: Final = 0.05
SAME_SLOPE: Final = 0.03
UNEVEN_OVERHEAD: Final = 0.05


def line_text(line: Location | None) -> str:
    """Return a line of the program for people, as ``train.py:12 forward``."""
    if line is None:
        return "requests without a stack (mostly the backward pass)"
    return f"{posixpath.basename(line.filename)}:{line.line} {line.function}"


def why_not_linear(fit: BatchFit) -> tuple[str, ...]:
    """Return what bends the peak, each as a sentence; empty where nothing does."""
    return (*_other_lines(fit), *_bent_lines(fit), *_beyond(fit), *_allocator(fit))


def _other_lines(fit: BatchFit) -> list[str]:
    if len(fit.moments) < 2:
        return []
    known = [p.batch for p in fit.points]
    said = []
    for before, after in zip(fit.moments[:-1], fit.moments[1:], strict=True):
        at = after.holds_from or 0.0
        if not min(known) <= at <= 8 * max(known):
            continue
        seen = "" if at <= max(known) else ", beyond what was recorded"
        said.append(
            f"Up to a batch of about {at:.3g} the peak is at {line_text(before.line)} "
            f"({_grows(before.curve)}), above it at "
            f"{line_text(after.line)} ({_grows(after.curve)}){seen}."
        )
    return said


def _grows(curve: Curve) -> str:
    if curve.scaling is Scaling.FIXED:
        return "does not grow with the batch"
    if curve.bend_bytes:
        return f"bends up, at last by {format_size(curve.last_slope_bytes)} a sample"
    return f"grows by about {format_size(curve.per_sample_bytes)} a sample"


def _bent_lines(fit: BatchFit) -> list[str]:
    words = {
        Scaling.FASTER: "grows faster than the batch (did the sequence length or image size grow "
        "with it?)",
        Scaling.SLOWER: "grows more slowly than the batch",
        Scaling.STEPS: "grows in steps (a workspace, or padding to a bucket)",
        Scaling.IRREGULAR: "goes up and down (the shapes differ from run to run)",
    }
    if not fit.lines and len(fit.moments) > 1:
        return [
            (
                "Fewer than two recordings reach their peak at the line that holds it at large "
                "batches, so what each line holds there cannot be compared."
            )
        ]
    top = max(p.peak_allocated_bytes for p in fit.points)
    said = [
        f"{line_text(row.line)} {words[row.curve.scaling]}: "
        f"{' -> '.join(format_size(n) for n in row.n_bytes)}."
        for row in fit.lines
        if row.curve.scaling in words and max(row.n_bytes) >= MATTERS * top
    ]
    return [*said[:4], *([f"So do {len(said) - 4} more lines."] if len(said) > 4 else [])]


def _beyond(fit: BatchFit) -> list[str]:
    """Return whether a bend goes on beyond the recordings, as the replay has it."""
    replay = fit.replay
    is_bent = any(m.curve.bend_bytes for m in fit.moments) or fit.allocated.bend_bytes
    if replay is None or replay.method != "fitted" or not is_bent:
        return []
    near, far = replay.slopes_beyond
    if abs(far - near) <= SAME_SLOPE * max(abs(near), abs(far), 1.0):
        said = (
            f"Replayed beyond the recordings, the peak grows by a steady {format_size(far)} a "
            "sample: the bend is where one moment of the program takes over from another."
        )
    else:
        said = (
            "Replayed beyond the recordings, the peak still bends: "
            f"{format_size(near)} a sample up to twice the largest recorded batch, "
            f"{format_size(far)} up to four times."
        )
    return [said]


def _allocator(fit: BatchFit) -> list[str]:
    known = [p for p in fit.points if not p.is_lower_bound]
    if len(known) < 2:
        return []
    ratios = [p.peak_reserved_bytes / max(1, p.peak_allocated_bytes) for p in known]
    if max(ratios) - min(ratios) < UNEVEN_OVERHEAD:
        return []
    return [
        (
            "Reserved memory does not follow allocated memory evenly: it is "
            f"{min(ratios):.2f} to {max(ratios):.2f} times as much (segments of 2 and 20 MiB, "
            "cached blocks that no later request fits)."
        )
    ]


def warnings_of(recordings: Sequence[Recording], *, is_bound: bool) -> tuple[str, ...]:
    """Return what makes the comparison of the recordings doubtful, each as a sentence."""
    said = [*_failures(recordings, is_bound=is_bound), *_steps(recordings)]
    confs = {r.snapshot.settings.conf for r in recordings if r.snapshot.settings.is_recorded}
    if len(confs) > 1:
        said.append(
            "The allocator settings differ between the recordings: "
            f"{', '.join(repr(c) if c else 'none' for c in sorted(confs))}."
        )
    low = {r.snapshot.provenance.version_low for r in recordings}
    if len(low) > 1:
        said.append("The files were written by different versions of PyTorch.")
    said += _code(recordings)
    said += [
        f"{r.source} shows memory that grows from step to step "
        f"({format_size(r.analysis.growth[0].slope_bytes)} a step): its peak depends on the number "
        "of steps, not on the batch alone."
        for r in recordings
        if r.analysis.growth
    ]
    late = [r.source for r in recordings if r.analysis.capture.is_late_start]
    if late:
        said.append(
            f"{_names(late)} began to record after memory was already in use: an earlier peak is "
            "not in the file."
        )
    return tuple(said)


def _failures(recordings: Sequence[Recording], *, is_bound: bool) -> list[str]:
    failed = [r.source for r in recordings if r.ran_out]
    if not failed:
        return []
    noun = "it needs" if len(failed) == 1 else "they need"
    if is_bound:
        return [
            (
                f"{_names(failed)} ended in an OOM and had to be used all the same: "
                f"{noun} at least what is shown, so the fit is a lower bound and the largest batch "
                "may be smaller."
            )
        ]
    return [
        (
            f"{_names(failed)} ended in an OOM: {noun} at least what is shown (live memory and the "
            "request that failed), and no curve goes through it."
        )
    ]


def _steps(recordings: Sequence[Recording]) -> list[str]:
    complete = [r for r in recordings if not r.ran_out]
    n = [r.analysis.n_steps for r in complete]
    counts = [len(r.lives) for r in complete]
    if len(set(n)) > 1 and all(n):
        return [
            (
                f"The recordings hold different numbers of steps ({min(n)} to {max(n)}): the first "
                "step has no optimizer state yet, and a leak would look like growth with the batch."
            )
        ]
    if counts and max(counts) > 1.5 * min(counts):
        return [
            (
                f"The recordings hold very different numbers of requests ({min(counts):,} to "
                f"{max(counts):,}): perhaps not the same number of steps. The first step has no "
                "optimizer state yet, so one step alone does not reach the peak of a run."
            )
        ]
    return []


def _code(recordings: Sequence[Recording]) -> list[str]:
    if not any(r.has_lines for r in recordings):
        return [
            (
                "No recording holds stacks of the program: which lines grow with the batch is not "
                "known, nor whether all are of the same program."
            )
        ]
    # A run that failed early has not come to all its lines: it must lie within the others.
    base = max(recordings, key=lambda r: (not r.ran_out, len(r.keys)))
    known = set(base.keys)
    worst, where = 0.0, ""
    for r in recordings:
        held = r.held_at(r.totals.peak_allocated_state)
        foreign = sum(n for key, n in held.items() if key not in known and key != NO_LINE)
        share = foreign / max(1, sum(held.values()))
        if share > worst:
            worst, where = share, r.source
    if worst < DIFFERENT_CODE:
        return []
    return [
        (
            f"{format_share(worst, 1.0)} of the peak of {where} comes from lines that "
            f"{base.source} does not have: not the same code, or lines were moved."
        )
    ]


def _names(sources: Sequence[str]) -> str:
    if len(sources) > 3:
        return f"{', '.join(sources[:2])} and {len(sources) - 2} more"
    return " and ".join([", ".join(sources[:-1]), sources[-1]] if sources[1:] else sources)
