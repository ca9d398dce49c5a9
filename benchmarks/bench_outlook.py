"""Scores what fragdoctor says of a run's future against what the program did.

    python benchmarks/bench_outlook.py RECORDINGS [--set looked|held-out|all] [--only NAME]
        [--names] [--jobs N] [--json OUT] [--oracle DIR --python PY] [--rehearsals FOLDER]

``record_outlooks.py`` makes RECORDINGS. Each recording is given to ``analyze`` and ``simulate`` as
a user would give it. A program passes if it runs to its end. The programs that are held out are
there to be counted: none of their rows is printed without ``--names``.

With ``--oracle`` and ``--python``, those of ``record_outlooks.py``, settings that were recommended
but not yet tried are tried on the program, and kept in RECORDINGS. With ``--rehearsals`` each
recording is continued with the rehearsal of its program, NAME.pickle in that folder, that
``fragdoctor rehearse --unlimited --snapshot`` left there; those without one are left out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import io
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from outlook_table import HELD_OUT, LOOKED, ProgramTruth, Recording, Try, read_truth, write_truth

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF="
MIN_STEPS_OF_A_LEAK = 3
"""Complete steps from which on a leak can be told from a program that starts."""


@dataclass
class WhatIf:
    """One answer of ``simulate``, and the truth.

    Attributes:
        served: the recorded part fits.
        likely: what an open outlook calls likely: ``holds``, ``fails`` or nothing.
        steps_after: whole steps that the program did after the one under way, before it failed.
        steps_left: those that it has after the one under way when it runs to its end.
    """

    name: str
    snapshot: str
    conf: str
    factor: float
    served: bool
    state: str
    basis: str
    reason: str
    likely: str
    fails_after_steps: int | None
    passes: bool
    steps_after: int
    steps_left: int

    @property
    def score(self) -> str:
        """``right``, ``wrong``, ``open`` or ``beyond``: a failure after the program's end."""
        return self.compared(self.state) if self.state in {"holds", "fails"} else "open"

    def compared(self, said: str) -> str:
        """Return ``right``, ``wrong`` or ``beyond`` for what is said: ``holds`` or ``fails``."""
        if (said == "holds") == self.passes:
            return "right"
        after = self.fails_after_steps
        return (
            "beyond"
            if said == "fails" and after is not None and after > self.steps_left
            else "wrong"
        )


@dataclass
class Advice:
    """One recommendation of ``analyze``; ``passes`` is None where no run has tried it."""

    name: str
    snapshot: str
    rank: int
    code: str
    setting: str
    confidence: str
    fits: bool | None
    state: str
    passes: bool | None
    rejected: bool = False
    likely: str = ""

    @property
    def is_promise(self) -> bool:
        """Whether it is said to let the run finish, surely or likely."""
        said = self.likely if self.state == "open" else self.state
        return not self.rejected and bool(self.setting) and said == "holds"


@dataclass
class Judged:
    """All that was said of one recording.

    Attributes:
        failed: the recorded run ended with a failure.
        cures: settings under which the program passes at the same capacity, of those tried.
        error: why there is no answer.
    """

    name: str
    kind: str
    split: str
    leaks: bool
    snapshot: str
    n_steps: int
    failed: bool
    cures: list[str] = field(default_factory=list)
    cause: str = ""
    confidence: str = ""
    what_ifs: list[WhatIf] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    error: str = ""


def ask(*words: str) -> dict[str, Any]:
    """Run a command of fragdoctor in this process and return its JSON."""
    from fragdoctor.cli.app import invoke

    said = contextlib.redirect_stderr(io.StringIO())  # where the answer was written
    with tempfile.TemporaryDirectory() as folder, said:
        answer = Path(folder) / "answer.json"
        invoke([*words, "--no-config", "--format", "json", "-o", str(answer)])
        return dict(json.loads(answer.read_text()))


def judge(
    truth: ProgramTruth, recording: Recording, folder: Path, rehearsal: Path | None = None
) -> Judged:
    """Ask about one recording, continued with a rehearsal of the program where there is one."""
    judged = Judged(
        name=truth.name,
        kind=truth.kind,
        split=truth.split,
        leaks=truth.leaks,
        snapshot=recording.snapshot,
        n_steps=recording.run.n_steps,
        failed=not recording.run.passes,
        cures=cures_of(recording),
    )
    source = [str(folder / recording.snapshot)]
    if rehearsal is not None:
        source += ["--continue-with", str(rehearsal)]
    try:
        analysis = ask("analyze", *source)
        judged.cause = analysis["verdict"]["cause"]
        judged.confidence = analysis["verdict"]["confidence"]
        judged.advice = advice_of(judged, recording, analysis)
        if judged.failed:
            judged.what_ifs = what_ifs_of(truth, recording, source)
    except Exception as e:  # noqa: BLE001 - one recording without an answer is a row of the table
        judged.error = f"{type(e).__name__}: {e}"
    return judged


def cures_of(recording: Recording) -> list[str]:
    """Return the settings that let the program pass at the capacity at which it failed."""
    return [
        one.conf
        for one in recording.tries
        if one.passes and one.capacity_bytes == recording.run.capacity_bytes
    ]


def known_settings(recording: Recording) -> dict[str, bool]:
    """Return the settings that were tried at the recorded capacity, and whether each passes."""
    return {
        one.conf: one.passes
        for one in (*recording.tries, *recording.more)
        if one.capacity_bytes == recording.run.capacity_bytes
    }


def advice_of(judged: Judged, recording: Recording, analysis: dict[str, Any]) -> list[Advice]:
    """Return the recommendations, then what was rejected, each with what its setting does."""
    done = known_settings(recording)
    advice = []
    for key in ("recommendations", "rejected"):
        for row in analysis[key]:
            predicted = row["predicted"] or {}
            setting = row["setting"] or ""
            conf = setting.removeprefix(VARIABLE) if setting.startswith(VARIABLE) else ""
            advice.append(
                Advice(
                    name=judged.name,
                    snapshot=judged.snapshot,
                    rank=row["rank"],
                    code=row["code"],
                    setting=setting,
                    confidence=row["confidence"],
                    fits=predicted.get("fits"),
                    state=(predicted.get("outlook") or {}).get("state", ""),
                    passes=done.get(conf) if conf else None,
                    rejected=key == "rejected",
                    likely=(predicted.get("outlook") or {}).get("likely") or "",
                )
            )
    return advice


def what_ifs_of(
    truth: ProgramTruth, recording: Recording, source: Sequence[str]
) -> list[WhatIf]:  # fmt: skip
    """Ask ``simulate`` all that was tried."""
    run = recording.run
    settings = [t for t in recording.tries if t.capacity_bytes == run.capacity_bytes]
    rows = []
    if settings:
        confs = [word for one in settings for word in ("--conf", one.conf)]
        answers = ask("simulate", *source, *confs)["results"]
        rows += [
            what_if(truth, recording, one, answer)
            for one, answer in zip(settings, answers, strict=True)
        ]
    for one in recording.tries:
        if one.capacity_bytes != run.capacity_bytes:
            capacity = "--capacity", f"{one.capacity_bytes}B"
            answers = ask("simulate", *source, *capacity)["results"]
            rows.append(what_if(truth, recording, one, answers[0]))
    return rows


def what_if(
    truth: ProgramTruth, recording: Recording, one: Try, answer: dict[str, Any]
) -> WhatIf:  # fmt: skip
    """Put an answer beside the truth."""
    outlook = answer["outlook"] or {}
    run = recording.run
    return WhatIf(
        name=truth.name,
        snapshot=recording.snapshot,
        conf=one.conf,
        factor=round(one.capacity_bytes / run.capacity_bytes, 2),
        served=bool(answer["fits"]),
        state=outlook.get("state", "none"),
        basis=outlook.get("basis", ""),
        reason=outlook.get("reason", ""),
        likely=outlook.get("likely") or "",
        fails_after_steps=outlook.get("fails_after_steps"),
        passes=one.passes,
        steps_after=one.n_steps - run.n_steps,
        steps_left=truth.n_steps - run.n_steps - 1,
    )


# ---- tables ------------------------------------------------------------------------------------


def share(n: int, of: int) -> str:
    """Return a share in words."""
    return f"{n} of {of}" + (f" ({100 * n / of:.1f} %)" if of else "")


def what_if_lines(rows: Sequence[WhatIf]) -> list[str]:
    """Return the table of what-ifs."""
    served = [row for row in rows if row.served]
    scores = Counter(row.score for row in served)
    n_decided = len(served) - scores["open"]
    n_tested = n_decided - scores["beyond"]
    lines = [
        f"what-ifs: {len(rows)}, the recorded part is served in {len(served)}",
        f"  decided                     {share(n_decided, len(served))}",
        f"  right of decided            {share(scores['right'], n_tested)}",
        f"  fail after the program's end, by what is said: {scores['beyond']}",
    ]
    for state in ("holds", "fails"):
        said = [row for row in served if row.state == state and row.score != "beyond"]
        n_right = sum(row.score == "right" for row in said)
        lines.append(f"  {state:<5} right                 {share(n_right, len(said))}")
    for passes, words in ((True, "decided where it passes"), (False, "decided where it fails ")):
        those = [row for row in served if row.passes == passes]
        n = sum(row.score != "open" for row in those)
        lines.append(f"  {words}     {share(n, len(those))}")
    for likely, words in (("holds", "fits"), ("fails", "too much")):
        those = [row for row in served if row.score == "open" and row.likely == likely]
        n_right = sum(row.passes == (likely == "holds") for row in those)
        lines.append(f"  open, likely {words:<8}  right {share(n_right, len(those))}")
    told = [
        row for row in served
        if row.state == "fails" and not row.passes and row.fails_after_steps is not None
    ]  # fmt: skip
    distances = [abs(row.steps_after - (row.fails_after_steps or 0)) for row in told]
    lines += [
        f"  fails_after_steps exact     {share(sum(d == 0 for d in distances), len(told))}",
        f"  ... within one step         {share(sum(d <= 1 for d in distances), len(told))}",
    ]
    refused = [row for row in rows if not row.served]
    n_wrong = sum(row.passes for row in refused)
    lines.append(f"  not served, yet it passes   {share(n_wrong, len(refused))}")
    return lines


def kind_lines(rows: Sequence[Judged]) -> list[str]:
    """Return how much is decided, and decided right, of each kind of program."""
    lines = ["by kind of program: decided; right of decided"]
    for kind in sorted({row.kind for row in rows}):
        served = [one for row in rows if row.kind == kind for one in row.what_ifs if one.served]
        scores = Counter(one.score for one in served)
        n_decided, n_right = len(served) - scores["open"], scores["right"]
        right = share(n_right, n_right + scores["wrong"])
        lines.append(f"  {kind:<11} {share(n_decided, len(served))}; {right}")
    return lines


def advice_lines(rows: Sequence[Judged]) -> list[str]:
    """Return the table of recommendations."""
    failed = [row for row in rows if row.failed and not row.error]
    given = [one for row in failed for one in row.advice if not one.rejected and one.setting]
    lines = [f"settings recommended: {len(given)}"]
    groups: list[tuple[str, Callable[[Advice], bool]]] = [
        ("promised (outlook holds)", lambda one: one.state == "holds"),
        ("outlook open, it fits", lambda one: one.state == "open" and bool(one.fits)),
        ("outlook fails", lambda one: one.state == "fails"),
    ]
    groups += [
        (f"confidence {c}", lambda one, c=c: one.confidence == c)  # type: ignore[misc]
        for c in ("proven", "likely", "possible")
    ]
    for words, belongs in groups:
        those = [one for one in given if belongs(one)]
        known = [one for one in those if one.passes is not None]
        n_right = sum(bool(one.passes) for one in known)
        untried = f", {len(those) - len(known)} not tried" if len(those) > len(known) else ""
        lines.append(f"  {words:<26} the program passes: {share(n_right, len(known))}{untried}")
    thrown = [one for row in failed for one in row.advice if one.rejected]
    known = [one for one in thrown if one.passes is not None]
    n_wrong = sum(bool(one.passes) for one in known)
    lines.append(f"  {'rejected':<26} the program passes: {share(n_wrong, len(known))}")
    curable = [row for row in failed if row.cures and not row.leaks]
    lines.append(f"recordings that a setting cures, leaks aside: {len(curable)} of {len(failed)}")
    for words, is_so in (
        ("a curing one is recommended  ", recommends_cure),
        ("first among settings cures   ", first_setting_cures),
        ("first of all cures           ", first_of_all_cures),
    ):
        lines.append(f"  {words} {share(sum(map(is_so, curable)), len(curable))}")
    return lines


def recommends_cure(row: Judged) -> bool:
    """Say whether a setting that cures is among the recommendations."""
    return any(one.passes for one in row.advice if not one.rejected)


def first_setting_cures(row: Judged) -> bool:
    """Say whether the first recommendation of a setting is one that cures."""
    settings = [one for one in row.advice if not one.rejected and one.setting]
    return bool(settings and settings[0].passes)


def first_of_all_cures(row: Judged) -> bool:
    """Say whether the first recommendation is a setting that cures."""
    return bool(row.advice and not row.advice[0].rejected and row.advice[0].passes)


def verdict_lines(rows: Sequence[Judged]) -> list[str]:
    """Return the table of verdicts."""
    answered = [row for row in rows if not row.error]
    failed = [row for row in answered if row.failed]
    fragmented = [row for row in failed if row.cause == "fragmentation"]
    curable = [row for row in failed if row.cures and not row.leaks]
    lines = [
        "verdicts: " + ", ".join(f"{cause} {n}" for cause, n in causes(failed)),
        "  'fragmentation', and no setting that was tried passes  "
        + share(sum(not row.cures for row in fragmented), len(fragmented)),
        "  a setting cures, and it is not called fragmentation    "
        + share(sum(row.cause != "fragmentation" for row in curable), len(curable)),
    ]
    leaking = [row for row in failed if row.leaks]
    for least in (0, MIN_STEPS_OF_A_LEAK):
        those = [row for row in leaking if row.n_steps >= least]
        words = f" after {least} steps and more" if least else ""
        n = sum(row.cause == "leak" for row in those)
        lines.append(f"  leaks called leaks{words}: {share(n, len(those))}")
    sound = [row for row in answered if not row.leaks]
    lines.append(
        f"  others called leaks: {share(sum(row.cause == 'leak' for row in sound), len(sound))}"
    )
    healthy = [row for row in answered if not row.failed]
    n = sum(row.cause == "healthy" for row in healthy)
    lines.append(f"  runs that did not fail called healthy: {share(n, len(healthy))}")
    n_errors = sum(bool(row.error) for row in rows)
    if n_errors:
        lines.append(f"  recordings without an answer: {n_errors}")
    return lines


def causes(rows: Iterable[Judged]) -> list[tuple[str, int]]:
    """Return how often each cause was the verdict."""
    return Counter(row.cause for row in rows).most_common()


def listing(rows: Sequence[Judged]) -> list[str]:
    """Return what is worth a look: what is wrong or open, by reason."""
    what_ifs = [one for row in rows for one in row.what_ifs]
    served = [one for one in what_ifs if one.served]
    lines = []
    for score in ("wrong", "open"):
        those = [one for one in served if one.score == score]
        lines.append(f"{score}: {len(those)}")
        for reason, n in Counter(kind_of_reason(one) for one in those).most_common():
            lines.append(f"  {n:4} {reason}")
            lines += [f"         {one_line(one)}" for one in those if kind_of_reason(one) == reason]
    lines.append("not served, yet it passes:")
    lines += [f"  {one_line(one)}" for one in what_ifs if not one.served and one.passes]
    lines.append("recommended settings with which the program fails:")
    lines += [
        f"  {one.snapshot} #{one.rank} {one.setting} {one.confidence} outlook {one.state}"
        for row in rows
        for one in row.advice
        if not one.rejected and one.passes is False
    ]
    lines.append("verdicts against the truth:")
    lines += [
        f"  {row.snapshot} after {row.n_steps} steps: {row.cause} {row.confidence}"
        f" (leaks: {row.leaks}; cures: {', '.join(row.cures) or 'none'})"
        for row in rows
        if is_doubtful(row)
    ]
    lines += [f"no answer: {row.snapshot} {row.error}" for row in rows if row.error]
    return lines


def kind_of_reason(one: WhatIf) -> str:
    """Return the reason of an outlook without its figures."""
    return re.sub(r"\d[\d.,]*( [KMG]iB)?", "N", one.reason) or "no reason given"


def is_doubtful(row: Judged) -> bool:
    """Say whether a verdict deserves a look."""
    can_show = row.n_steps >= MIN_STEPS_OF_A_LEAK
    return not row.error and (
        (row.cause == "leak") != (row.leaks and can_show and row.failed)
        or (row.failed and (row.cause == "fragmentation") != bool(row.cures and not row.leaks))
        or (not row.failed and row.cause != "healthy")
    )


def one_line(one: WhatIf) -> str:
    """Return a what-if as one line."""
    what = f"{one.conf or 'default'} x{one.factor}"
    after = "" if one.fails_after_steps is None else f" after {one.fails_after_steps}"
    truth = "passes" if one.passes else f"fails after {one.steps_after} of {one.steps_left}"
    likely = f", likely {one.likely}" if one.likely else ""
    return f"{one.snapshot} {what}: {one.state}{after}{likely} ({one.basis}); truth: {truth}"


def totals(rows: Sequence[Judged]) -> list[str]:
    """Return all tables."""
    what_ifs = [one for row in rows for one in row.what_ifs]
    n_programs = len({row.name for row in rows})
    n_failed = sum(row.failed for row in rows)
    return [
        f"{n_programs} programs, {len(rows)} recordings, {n_failed} of them of failures",
        *what_if_lines(what_ifs),
        *kind_lines(rows),
        *advice_lines(rows),
        *verdict_lines(rows),
    ]


# ---- running -----------------------------------------------------------------------------------


def try_recommended(
    rows: Sequence[Judged], truths: dict[str, ProgramTruth], options: argparse.Namespace
) -> None:
    """Run the programs under settings that were recommended or rejected but never tried."""
    from record_outlooks import MIB, PROGRAMS, Server, as_try, is_recorded, read_program

    with Server(options.oracle, options.python) as server:
        for row in rows:
            truth = truths[row.name]
            program = read_program(PROGRAMS / f"{row.name}.py")
            table = options.recordings / f"{row.name}.json"
            recording = next(r for r in truth.recordings if r.snapshot == row.snapshot)
            if not row.failed or not is_recorded(program, table):
                continue
            known = known_settings(recording)
            for one in row.advice:
                if one.passes is not None or not one.setting.startswith(VARIABLE):
                    continue
                conf = one.setting.removeprefix(VARIABLE)
                if conf not in known:
                    mib = recording.run.total_bytes // MIB - program.other_mib
                    done = as_try(program, conf, mib, server.run(program, conf, mib))
                    recording.more.append(done)
                    known[conf] = done.passes
                one.passes = known[conf]
            write_truth(table, truth)


def judge_all(
    truths: Iterable[ProgramTruth], folder: Path, n_jobs: int, rehearsals: Path | None = None
) -> list[Judged]:
    """Ask about all recordings; with rehearsals, about those of programs that have one."""
    files = {path.stem: path for path in rehearsals.glob("*.pickle")} if rehearsals else {}
    work = [
        (truth, recording, folder, files.get(truth.name))
        for truth in truths
        if rehearsals is None or truth.name in files
        for recording in truth.recordings
    ]
    if n_jobs == 1:
        return [judge(*one) for one in work]
    with concurrent.futures.ProcessPoolExecutor(n_jobs) as pool:
        return list(pool.map(judge, *zip(*work, strict=True)))


def main(argv: Sequence[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--set", choices=(LOOKED, HELD_OUT, "all"), default=LOOKED)
    parser.add_argument("--only", action="append", metavar="NAME", default=[])
    parser.add_argument("--names", action="store_true", help="list the rows of held-out programs")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--oracle", type=Path)
    parser.add_argument("--python")
    parser.add_argument("--rehearsals", type=Path, metavar="FOLDER")
    options = parser.parse_args(argv)

    truths = {
        path.stem: truth
        for path in sorted(options.recordings.glob("*.json"))
        if not options.only or path.stem in options.only
        if (truth := read_truth(path)).split == options.set or options.set == "all"
    }
    rows = judge_all(truths.values(), options.recordings, options.jobs, options.rehearsals)
    if options.oracle and options.python:
        try_recommended(rows, truths, options)
    shown = [row for row in rows if options.names or row.split == LOOKED]
    if shown:
        print("\n".join(listing(shown)), end="\n\n")
    print("\n".join(totals(rows)))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
