"""Compare what fragdoctor says about recorded failures with what the programs did.

    python tools/truth_table.py                # compare with the committed table; exit 1 on a fall
    python tools/truth_table.py --write        # make the answers of this tree the committed ones
    python tools/truth_table.py --choose DIR   # choose recordings of record_outlooks.py anew
    python tools/truth_table.py --rehearsals DIR

The last one continues each recording with ``DIR/PROGRAM.pickle``, which
``benchmarks/bench_rehearsals.py --snapshots DIR`` wrote, and prints the table only. The rows of
three programs that read values are counted on their own.

``tests/truth`` holds recordings of the programs in ``benchmarks/outlook_programs`` and, in
``programs/*.json``, what each program did under other settings and capacities. Each recording is
judged whole, from where the model is first called (``late``: history was switched on after the
model was built), and cut to its last half (``cut``: its ring buffer was too small). Neither a GPU
nor PyTorch is needed. ``answers.json`` has the answer for each row, and the table counts these
answers. The command fails if fewer answers are right, or more are wrong, than in the committed
table, and prints the figures that got worse with their rows.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import gzip
import json
import pickle
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
TRUTH = ROOT / "tests" / "truth"
PROGRAMS = ROOT / "benchmarks" / "outlook_programs"
sys.path.insert(0, str(ROOT / "benchmarks"))

from bench_outlook import Judged, WhatIf, first_setting_cures, is_doubtful, judge  # noqa: E402 - no package
from outlook_table import HELD_OUT, ProgramTruth, read_truth  # noqa: E402

from fragdoctor.future.simulator import trace_of  # noqa: E402
from fragdoctor.future.steps import after_setup  # noqa: E402
from fragdoctor.inputs.snapshot_reader import read_snapshot  # noqa: E402

MAX_RECORDINGS: Final = 3
"""Recordings to keep of one program: the first, the last and one in between; more add nothing."""

MAX_BYTES: Final = 120_000
"""Largest size of a compressed recording, so that the repository stays small."""

READ_VALUES: Final = ("sparse_tables", "style_lbfgs", "trl_sft")
"""Programs whose values decide what they ask for. All values are zeros on the recordings' GPU and
are made up in a rehearsal, so the two go different ways (see ``docs/proof.md``)."""

LATE, CUT = "late", "cut"
"""Forms in which recordings come, beside the whole one."""

Answers = dict[str, str]
"""Row -> which half the row belongs to and what is said about it: ``looked will right``, ..."""


def word_of(one: WhatIf) -> str:
    """Return what is said about one what-if, and whether it is right.

    ``beyond`` is a failure predicted for a time after the program's end, which nobody can check.
    """
    is_known = one.state in {"holds", "fails"}
    said = one.state if is_known else one.likely
    if not said:
        return "open"
    return f"{'will' if is_known else 'likely'} {one.compared(said)}"


def answers_of(judged: Judged) -> Iterator[tuple[str, str]]:
    """Yield the rows of one recording: its verdict, its what-ifs, and its promises."""
    name, half = judged.snapshot, judged.split
    if judged.error:
        yield f"{name} verdict", f"{half} verdict error: {judged.error}"
        return
    yield f"{name} verdict", f"{half} verdict {'wrong' if is_doubtful(judged) else 'right'}"
    for one in judged.what_ifs:
        if one.served:
            yield f"{name} {one.conf or 'as it was'} x{one.factor}", f"{half} {word_of(one)}"
        elif one.passes:
            yield f"{name} {one.conf or 'as it was'} x{one.factor}", f"{half} refused wrong"
    if not judged.failed:
        return
    promised = [one for one in judged.advice if one.is_promise and one.passes is not None]
    for one in promised:
        yield f"{name} {one.setting}", f"{half} promise {'kept' if one.passes else 'broken'}"
    if judged.cures and not judged.leaks:
        is_cured = first_setting_cures(judged)
        yield f"{name} first setting", f"{half} curable {'cured' if is_cured else 'missed'}"
        is_kept = any(one.passes for one in promised)
        yield f"{name} promise", f"{half} curable {'promised' if is_kept else 'unpromised'}"


def _judge(work: tuple[ProgramTruth, int, Path | None, str]) -> Judged:
    truth, i, rehearsal, form = work
    recording = truth.recordings[i]
    path = TRUTH / recording.snapshot
    half = truth.split
    if rehearsal is not None and truth.name in READ_VALUES:
        half += "-values"
    if not form:
        judged = judge(truth, recording, TRUTH, rehearsal)
        judged.split = half
        return judged
    # The project's own files, so that it is safe to read them with the stock unpickler.
    data = pickle.loads(gzip.decompress(path.read_bytes()))
    trace = trace_of(read_snapshot(path))
    events = data["device_traces"][trace.device]
    first = len(events) // 2 if form == CUT else after_setup(trace) % len(events)  # 0: no model
    data["device_traces"][trace.device] = events[first:]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / recording.snapshot).write_bytes(gzip.compress(pickle.dumps(data), 1))
        judged = judge(truth, recording, Path(folder), rehearsal)
    judged.snapshot, judged.split = f"{form} {recording.snapshot}", f"{half}-{form}"
    return judged


def judge_all(n_jobs: int, rehearsals: Path | None = None) -> list[Judged]:
    """Judge fragdoctor's answers on every committed recording, or on those with a rehearsal."""
    work = [
        (truth, i, None if rehearsals is None else rehearsals / f"{truth.name}.pickle", form)
        for truth in read_truths()
        for i in range(len(truth.recordings))
        for form in ("", LATE, CUT)
    ]
    if n_jobs == 1:
        return [_judge(one) for one in work]
    with concurrent.futures.ProcessPoolExecutor(n_jobs) as pool:
        return list(pool.map(_judge, work, chunksize=4))


def read_truths() -> list[ProgramTruth]:
    """Return what the programs did, for all programs with committed recordings."""
    return [read_truth(path) for path in sorted(TRUTH.glob("programs/*.json"))]


def answers(n_jobs: int = 1, rehearsals: Path | None = None) -> Answers:
    """Return the answers of this tree, row by row."""
    return dict(row for judged in judge_all(n_jobs, rehearsals) for row in answers_of(judged))


def counts(said: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Return how often each answer occurs, for each half of the programs."""
    result: dict[str, Counter[str]] = defaultdict(Counter)
    for text in said.values():
        half, word = text.split(" ", 1)
        result[half][word.partition(":")[0]] += 1
    return result


def table(said: Mapping[str, str]) -> list[str]:
    """Return the figures of both halves as lines."""
    lines = []
    for half, n in sorted(counts(said).items(), reverse=True):
        words = [f"{sure} {word}" for sure in ("will", "likely") for word in _SCORES]
        n_said = sum(n[word] for word in words)
        n_curable = n["curable cured"] + n["curable missed"]
        lines.append(f"{half}: {n_said} of {n_said + n['open']} what-ifs said")
        lines += [f"  {word:<14} {n[word]}" for word in words]
        lines.append(f"  refused although the program passes: {n['refused wrong']}")
        lines.append(f"  promises kept {n['promise kept']}, broken {n['promise broken']}")
        lines.append(f"  a setting cures {n_curable}; one is promised to {n['curable promised']},")
        lines.append(f"  and the first one advised cures {n['curable cured']}")
        lines.append(f"  verdicts right {n['verdict right']}, wrong {n['verdict wrong']}")
    return lines


_SCORES: Final = ("right", "wrong", "beyond")
GOOD: Final = ("right", "kept", "cured", "promised")
BAD: Final = ("wrong", "broken", "missed", "unpromised", "error")


def fall(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the figures that are worse than before, each with its rows; may be empty."""
    then, here = counts(before), counts(now)
    words = {(half, word) for part in (then, here) for half in part for word in part[half]}
    lines = []
    for half, word in sorted(words):
        n_before, n_now = then[half][word], here[half][word]
        is_worse = n_now < n_before if word.split()[-1] in GOOD else n_now > n_before
        if not is_worse or word.split()[-1] not in GOOD + BAD:
            continue
        lines.append(f"{half} {word}: {n_before} before, {n_now} now")
        if half.startswith(HELD_OUT):  # nobody looks at the rows of held-out programs
            continue
        lines += [
            f"  {row}: {before.get(row, 'not asked')} -> {now.get(row, 'not asked')}"
            for row in sorted({*before, *now})
            if before.get(row) != now.get(row)
            and f"{half} {word}" in {before.get(row, ""), now.get(row, "").partition(":")[0]}
        ]
    return lines


def committed() -> Answers:
    """Return the committed answers."""
    return dict(json.loads((TRUTH / "answers.json").read_text()))


def commit(said: Answers) -> None:
    """Make these answers the committed ones, and write their table into the docs."""
    (TRUTH / "answers.json").write_text(json.dumps(dict(sorted(said.items())), indent=0) + "\n")
    proof = ROOT / "docs" / "proof.md"
    printed = "\n".join(table(said))
    proof.write_text(
        re.sub(
            r"(?<=```text\n)looked[:-].*?(?=\n```)",
            lambda _: printed,
            proof.read_text("utf-8"),
            flags=re.DOTALL,
        ),
        "utf-8",
    )


def choose(folder: Path) -> None:
    """Copy compressed recordings of each program, and the record of what the program did."""
    (TRUTH / "programs").mkdir(parents=True, exist_ok=True)
    for old in TRUTH.glob("**/*.*"):
        old.unlink()
    for path in sorted(folder.glob("*.json")):
        truth = read_truth(path)
        packed: list[tuple[Any, bytes]] = []
        for recording in truth.recordings:
            data = gzip.compress((folder / recording.snapshot).read_bytes(), 9, mtime=0)
            if len(data) <= MAX_BYTES:
                packed.append((recording, data))
        last = len(packed) - 1
        chosen = sorted({0, last // 2, last}) if packed else []
        rows = []
        for recording, data in (packed[i] for i in chosen[:MAX_RECORDINGS]):
            name = f"{recording.snapshot}.gz"
            (TRUTH / name).write_bytes(data)
            rows.append({**asdict(recording), "snapshot": name})
        if rows:
            fields = {**asdict(truth), "recordings": rows}
            (TRUTH / "programs" / path.name).write_text(json.dumps(fields) + "\n")


def main(argv: Sequence[str]) -> int:
    """Print the table; return 1 if it is worse than the committed one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--choose", type=Path, metavar="DIR")
    parser.add_argument("--rehearsals", type=Path, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(argv)
    if options.choose:
        choose(options.choose)
    said = answers(options.jobs, options.rehearsals)
    print("\n".join(table(said)))
    if options.rehearsals:
        return 0
    if options.choose or options.write:
        commit(said)
        return 0
    worse = fall(committed(), said)
    print("\n".join(worse))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
