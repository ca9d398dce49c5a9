"""Compare what fragdoctor says about a run's future with what the program did.

    python benchmarks/bench_outlook.py RECORDINGS --oracle DIR --python PY [--only NAME]

``record_outlooks.py`` makes RECORDINGS. Each recording is given to ``analyze`` and ``simulate`` the
way a user would do it. Run as a program, this tries recommended settings that were not tried yet,
on the allocator of ``record_outlooks.py``, and stores the results in RECORDINGS;
``tools/truth_table.py`` counts the answers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outlook_table import ProgramTruth, Recording, Try, read_truth, write_truth

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF="
MIN_STEPS_OF_A_LEAK = 3
"""Complete steps needed to tell a leak from a program that is still starting."""


@dataclass
class WhatIf:
    """One answer of ``simulate``, and the truth.

    Attributes:
        served: whether the recorded part fits.
        likely: what an open outlook calls likely: ``holds``, ``fails`` or nothing.
        steps_left: whole steps after the current one if the program runs to its end.
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
    steps_left: int

    @property
    def score(self) -> str:
        """``right``, ``wrong``, ``open``, or ``beyond`` for a failure after the program's end."""
        return self.compared(self.state) if self.state in {"holds", "fails"} else "open"

    def compared(self, said: str) -> str:
        """Return ``right``, ``wrong`` or ``beyond`` for an answer of ``holds`` or ``fails``."""
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
    """One recommendation of ``analyze``; ``passes`` is None if no run has tried it."""

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
        """Whether fragdoctor says that this setting surely or likely lets the run finish."""
        said = self.likely if self.state == "open" else self.state
        return not self.rejected and bool(self.setting) and said == "holds"


@dataclass
class Judged:
    """Everything that was said about one recording.

    Attributes:
        failed: whether the recorded run ended with a failure.
        cures: the tried settings under which the program passes at the same capacity.
        error: why there is no answer, or "".
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

    said = contextlib.redirect_stderr(io.StringIO())  # hides the note on where the answer is
    with tempfile.TemporaryDirectory() as folder, said:
        answer = Path(folder) / "answer.json"
        invoke([*words, "--no-config", "--format", "json", "-o", str(answer)])
        return dict(json.loads(answer.read_text()))


def judge(
    truth: ProgramTruth, recording: Recording, folder: Path, rehearsal: Path | None = None
) -> Judged:
    """Ask fragdoctor about one recording, and compare with the truth.

    With a rehearsal of the whole program, advice and what-ifs are continued by it.
    """
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
    source = str(folder / recording.snapshot)
    more = () if rehearsal is None else ("--continue-with", str(rehearsal))
    try:
        analysis = ask("analyze", source, *more)
        judged.cause = analysis["verdict"]["cause"]
        judged.confidence = analysis["verdict"]["confidence"]
        judged.advice = advice_of(judged, recording, analysis)
        if judged.failed:
            judged.what_ifs = what_ifs_of(truth, recording, source, *more)
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
    """Return the recommendations, then the rejected advice, each with whether it really passes."""
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
    truth: ProgramTruth, recording: Recording, *source: str
) -> list[WhatIf]:  # fmt: skip
    """Ask ``simulate`` about everything that was tried; ``source`` begins its arguments."""
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
    """Return an answer together with the truth."""
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
        steps_left=truth.n_steps - run.n_steps - 1,
    )


def first_setting_cures(row: Judged) -> bool:
    """Return whether the first recommended setting cures the failure."""
    settings = [one for one in row.advice if not one.rejected and one.setting]
    return bool(settings and settings[0].passes)


def is_doubtful(row: Judged) -> bool:
    """Return whether a verdict does not fit what the program did."""
    can_show = row.n_steps >= MIN_STEPS_OF_A_LEAK
    return not row.error and (
        (row.cause == "leak") != (row.leaks and can_show and row.failed)
        or (row.failed and (row.cause == "fragmentation") != bool(row.cures and not row.leaks))
        or (not row.failed and row.cause != "healthy")
    )


def try_recommended(
    rows: Sequence[Judged], truths: dict[str, ProgramTruth], options: argparse.Namespace
) -> None:
    """Run the programs under settings that were recommended or rejected but not yet tried."""
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


def main(argv: Sequence[str]) -> None:
    """Try the recommended settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--only", action="append", metavar="NAME", default=[])
    parser.add_argument("--oracle", type=Path, required=True)
    parser.add_argument("--python", required=True)
    options = parser.parse_args(argv)

    truths = {
        path.stem: read_truth(path)
        for path in sorted(options.recordings.glob("*.json"))
        if not options.only or path.stem in options.only
    }
    rows = [
        judge(truth, recording, options.recordings)
        for truth in truths.values()
        for recording in truth.recordings
    ]
    try_recommended(rows, truths, options)


if __name__ == "__main__":
    main(sys.argv[1:])
