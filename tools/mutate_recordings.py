"""Run the whole command line on mutated recordings, in one process, and list what breaks.

    python tools/mutate_recordings.py --files 20000 --seed 1 --out findings

Each file goes through one diagnosis and one further command, in rotation. A finding is exit code
70, an exit code outside the contract, or more than ``--seconds`` of processor time. For each
distinct finding, the first file is kept, with its command line and what the command printed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import gzip
import hashlib
import io
import json
import pickle
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "hostile")]

from mutations import mutated  # noqa: E402

from fragdoctor.cli import exit as exit_codes  # noqa: E402
from fragdoctor.cli.app import invoke  # noqa: E402

CODES = {0, 1, 2, 3}
MAX_EVENTS = 260


class TooSlow(BaseException):
    """Raised by the timer; nothing in the package catches it."""


def bases(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the recordings of a folder, cut to a few hundred events each.

    They are the project's own files, so it is safe to read them with the stock unpickler.
    """
    for path in sorted(folder.glob("*.pickle*")):
        raw = path.read_bytes()
        data = pickle.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        if isinstance(data, dict):
            data["device_traces"] = [t[:MAX_EVENTS] for t in data["device_traces"]]
            data["segments"] = data["segments"][:60]
            yield path.name, data


def commands(path: str, other: str, folder: Path) -> list[list[str]]:
    """Return the command lines that the files go through in rotation."""
    out = str(folder / "out")
    return [
        ["analyze", path],
        ["simulate", path, "--sweep"],
        ["check", path, "--no-growth", "--max-stranded", "5%", "--min-headroom", "1MiB"],
        ["compare", other, path],
        ["export", path, "--format", "snapshot", "--redact", "-o", out, "--force"],
        ["analyze", path, "--format", "html", "-o", out, "--force"],
        ["estimate", path],
        ["analyze", path, "--format", "json", "--capacity", "64MiB"],
        ["export", path, "--format", "trace", "-o", out, "--force"],
        ["simulate", path, "--smallest-capacity", "--edit", "no-stranders", "--edit", "batch:0.5"],
        ["compare", path, other, "--format", "json"],
        ["check", path, "--fits-on", "1GiB", "--format", "sarif"],
        ["export", path, "--format", "csv", "--table", "allocations", "-o", out, "--force"],
        ["export", path, "--format", "speedscope", "-o", out, "--force"],
        ["analyze", path, "--full", "--fail-on", "warning"],
        ["simulate", path, "--format", "json", "--conf", "max_split_size_mb:20,backend:native",
         "--edit", "empty-cache", "--edit", "empty-cache:3", "--capacity", "40MiB"],
        ["analyze", path, "--at", "peak", "--format", "markdown"],
        ["analyze", path, "--continue-with", other],
        ["analyze", other, "--continue-with", path, "--at", "end"],
        ["analyze", path, other, "--workers", "1", "--replay", "all", "-o", f"{out}.html"],
        ["compare", other, path, other, path, "--steps", "1,2,3,4"],
        ["simulate", path, "--steps", "3", "--format", "html", "-o", out, "--force"],
        ["pack", path, "--gpu", "24GiB", "--processes", "3"],
        ["export", path, "--table", "blocks", "-o", out, "--force"],
    ]  # fmt: skip


def run(argv: list[str], seconds: float) -> tuple[str, str]:
    """Return ("", "") if a command line ends properly, else what is wrong and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = exit_codes.run(invoke, argv)
    except TooSlow as e:
        return f"slow: {e}", err.getvalue()
    except BaseException as e:  # noqa: BLE001 - even SystemExit is a finding here
        return f"escaped: {e!r}", err.getvalue()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    said = err.getvalue()
    if code in CODES:
        return "", ""
    lines = [x for x in said.splitlines() if x.strip()]
    places = [x.strip() for x in lines if x.strip().startswith("File ") and "fragdoctor" in x]
    place = places[-1].rpartition("fragdoctor/")[2] if places else ""
    what = next((x for x in reversed(lines) if "Error" in x.split(":")[0]), "")
    return f"exit {code}: {what[:60]} at {place}", said


def _stop(_signum: int, frame: FrameType | None) -> None:
    place = []
    while frame is not None and len(place) < 12:
        place.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        frame = frame.f_back
    raise TooSlow(" < ".join(place))


def main(argv: Sequence[str] | None = None) -> int:
    """Mutate, run and list; return 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--bases", type=Path, default=ROOT / "sample_snapshots")
    parser.add_argument("--out", type=Path, default=Path("findings"))
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGPROF, _stop)
    originals = list(bases(options.bases))
    other = options.out / "other.pickle"
    other.write_bytes(pickle.dumps(originals[0][1], protocol=4))
    path = options.out / "mutated.pickle"
    findings: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    began = time.monotonic()
    for number in range(options.first, options.first + options.files):
        chance = random.Random(f"{options.seed}/{number}")
        name, data = originals[number % len(originals)]
        changed, how = mutated(data, chance)
        raw = pickle.dumps(changed, protocol=4)
        path.write_bytes(raw)
        lines = commands(str(path), str(other), options.out)
        for words in (lines[0], lines[1 + number // len(originals) % (len(lines) - 1)]):
            codes[words[0]] += 1
            wrong, said = run(words, options.seconds)
            if wrong:
                findings[wrong] += 1
                if findings[wrong] == 1:
                    digest = hashlib.sha256(wrong.encode()).hexdigest()[:8]
                    (options.out / f"{digest}.pickle").write_bytes(raw)
                    note = {"what": wrong, "argv": words, "base": name, "number": number,
                            "mutations": how, "said": said[-4000:]}  # fmt: skip
                    (options.out / f"{digest}.json").write_text(json.dumps(note, indent=1))
                    print(f"{number} {digest} {wrong} {words} {how}", flush=True)
        if number % 500 == 499:
            gc.collect()
            seconds = time.monotonic() - began
            print(f"{number + 1} files, {seconds:.0f} s, {len(findings)} findings", flush=True)
    print(f"{options.files} files, commands {dict(codes)}")
    for wrong, n in findings.most_common():
        print(f"{n:6} {wrong}")
    signal.signal(signal.SIGPROF, before)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
