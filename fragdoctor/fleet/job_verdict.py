"""One verdict for the whole job: who is odd, who fails, who fails first, how the others are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from fragdoctor.model.diagnosis import SOUND, Cause
from fragdoctor.model.fleet import DifferenceKind, JobVerdict, RankGroup, RankRow
from fragdoctor.units import format_count, format_size, listed, plural

# Microseconds since 1970 are at least this large; smaller times are from a machine's own clock.
_WALL_CLOCK_US: Final = 10**15
_MAX_NAMED: Final = 4
_MAX_GROUPS: Final = 3


def job_verdict(rows: Sequence[RankRow], groups: Sequence[RankGroup]) -> JobVerdict:
    """Return the verdict for the job in one to three sentences."""
    odd = [row for row in rows if row.is_odd]
    read = [row for row in rows if row.rank.is_read]
    failed = [row for row in read if row.rank.has_failed]
    first = first_failed(failed)
    sentences = _odd_sentences(odd, groups)
    if failed:
        sentences += _failing(read, failed, odd, first)
    elif odd:
        sentences.append("No rank ran out of memory.")
    rest = [row for row in read if not row.is_odd and not row.rank.has_failed]
    sentences += _others(read, rest, groups)
    if len(read) < len(rows):
        sentences.append(f"{plural(len(rows) - len(read), 'rank')} could not be read.")
    return JobVerdict(
        cause=_cause(read, failed, odd, first),
        summary=" ".join(sentences),
        n_ranks=len(rows),
        n_read=len(read),
        n_failed=len(failed),
        first_failed=first.label if first is not None else "",
        odd=tuple(o.label for o in odd),
        failed=tuple(row.label for row in failed),
    )


def first_failed(failed: Sequence[RankRow]) -> RankRow | None:
    """Return the rank that ran out of memory first, or None if their clocks do not show it."""
    if len(failed) == 1:
        return failed[0]
    times = [row.rank.failed_us for row in failed]
    if not times or any(t is None or t < _WALL_CLOCK_US for t in times):
        return None
    earliest = min(t for t in times if t is not None)
    firsts = [row for row in failed if row.rank.failed_us == earliest]
    return firsts[0] if len(firsts) == 1 else None


def _cause(
    read: Sequence[RankRow],
    failed: Sequence[RankRow],
    odd: Sequence[RankRow],
    first: RankRow | None,
) -> Cause:
    if first is not None:
        return first.rank.cause
    unwell = [row for row in read if row.rank.cause not in SOUND]
    among = failed or [row for row in unwell if row.is_odd] or unwell or read
    if not among:
        return Cause.UNKNOWN
    if odd and not failed and not any(row.is_odd for row in unwell) and len(unwell) * 2 < len(read):
        return Cause.HEALTHY
    counts = Counter(row.rank.cause for row in among)
    return min(counts, key=lambda c: (-counts[c], c.value))


def _odd_sentences(odd: Sequence[RankRow], groups: Sequence[RankGroup]) -> list[str]:
    """Return a sentence for each group of odd ranks, for the first few groups."""
    unusual = [g for g in groups if g.is_odd]
    said = []
    for g in unusual[:_MAX_GROUPS]:
        verb = "is" if len(g.labels) == 1 else "are"
        said.append(f"{_capital(names_of(g.labels))} {verb} odd: {_reasons(g)}.")
    n_more = len(odd) - sum(len(g.labels) for g in unusual[:_MAX_GROUPS])
    if n_more:
        said.append(f"{plural(n_more, 'rank')} more {'is' if n_more == 1 else 'are'} odd.")
    return said


def _reasons(group: RankGroup) -> str:
    """Return the weightiest difference in words, with a setting and the verdict if they differ."""
    differences = group.differences
    if not differences:
        return "its memory is unlike that of any other rank"
    lead = differences[0]
    if group.n_failed and lead.kind is DifferenceKind.VERDICT:  # last kind: nothing else differs
        return "it fails with the same memory as the others"
    parts = [lead.text]
    # A sentence of its own says that it fails.
    kinds = (DifferenceKind.SETTING, *(() if group.n_failed else (DifferenceKind.VERDICT,)))
    for kind in kinds:
        parts += [d.text for d in differences[1:] if d.kind is kind][:1]
    return "; ".join(parts)


def _failing(
    read: Sequence[RankRow],
    failed: Sequence[RankRow],
    odd: Sequence[RankRow],
    first: RankRow | None,
) -> list[str]:
    n, labels = len(failed), [row.label for row in failed]
    if n == len(read):
        who = "All of them" if odd else _all(n)
        said = [f"{who} run out of memory." if n > 1 else "It runs out of memory."]
    elif n == 1 and len(odd) == 1 and odd[0].label == labels[0]:
        others = "the other does not" if len(read) == 2 else "the others do not"
        return [f"It runs out of memory, {others}."]
    else:
        verb = "runs" if n == 1 else "run"
        of = "" if n == 1 else f", {format_count(n)} of {format_count(len(read))},"
        said = [f"{_capital(names_of(labels))}{of} {verb} out of memory."]
    if first is not None and n > 1:
        said.append(f"The first is {first.label}: {first.rank.summary}")
    elif not odd:
        said.append(failed[0].rank.summary)
    return said


def _others(
    read: Sequence[RankRow], rest: Sequence[RankRow], groups: Sequence[RankGroup]
) -> list[str]:
    if not rest:
        return []
    n, everyone = len(rest), len(rest) == len(read)
    unwell = Counter(row.rank.cause for row in rest if row.rank.cause not in SOUND)
    usual = [g for g in groups if not g.is_odd and not g.n_failed]
    who = _all(n) if everyone else "The other rank" if n == 1 else f"The {format_count(n)} others"
    verb = "is" if n == 1 else "are"
    if unwell:
        worst = min(unwell, key=lambda c: (-unwell[c], c.value))
        shows = "shows" if unwell[worst] == 1 else "show"
        what = worst.value.replace("_", " ")
        if n == 1:
            return [f"{who} shows: {what}."]
        did = "No rank ran" if everyone else f"{who} did not run"
        count = "each" if unwell[worst] == n else format_count(unwell[worst])
        return [f"{did} out of memory, but {count} of them {shows}: {what}."]
    peaks = _peaks(usual)
    parts = _differing(usual) if everyone else []
    if parts and n == len(usual):
        return [f"{who} are healthy{peaks}.", *parts]
    if len(usual) > 1:
        n_groups = format_count(len(usual))
        alike = f"{who} {verb} healthy, in {n_groups} groups of ranks that are alike{peaks}."
        return [alike, *parts]
    alike = " and alike" if n > 1 else ""
    return [f"{who} {verb} healthy{alike}{peaks}."]


def _differing(usual: Sequence[RankGroup]) -> list[str]:
    """Return how two groups of equal size differ: neither is known to be the odd one."""
    if len(usual) != 2 or len(usual[0].labels) != len(usual[1].labels):
        return []
    first, second = (names_of(g.labels) for g in usual)
    if len(usual[0].labels) == 1:
        lead = "They differ, and neither is odd"
    else:
        lead = "Two groups of equal size differ, and neither is odd"
    return [f"{lead}: {second} against {first}: {_reasons(usual[1])}."]


def _peaks(groups: Sequence[RankGroup]) -> str:
    low = min((g.min_peak_bytes for g in groups if g.min_peak_bytes is not None), default=None)
    high = max((g.max_peak_bytes for g in groups if g.max_peak_bytes is not None), default=None)
    if low is None or high is None:
        return ""
    if format_size(low) == format_size(high):
        return f", with a peak of {format_size(high)}"
    return f", with peaks of {format_size(low)} to {format_size(high)}"


def _all(n: int) -> str:
    return "The rank" if n == 1 else "Both ranks" if n == 2 else f"All {format_count(n)} ranks"


def names_of(labels: Sequence[str]) -> str:
    """Return labels as a list in words: ``ranks 3, 5 and 7``, with at most a few of them."""
    shown, lead = list(labels[:_MAX_NAMED]), ""
    if len(labels) > 1 and all(label.startswith("rank ") for label in shown):
        shown, lead = [label.removeprefix("rank ") for label in shown], "ranks "
    if len(labels) > _MAX_NAMED:
        return f"{lead}{', '.join(shown)} and {format_count(len(labels) - _MAX_NAMED)} more"
    return lead + listed(shown)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if text.startswith(("rank", "host")) else text
