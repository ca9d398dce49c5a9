"""Measure how the time and memory of ``fragdoctor analyze`` grow with the length of the trace.

    python benchmarks/bench_scale.py                       # 10^4 to 10^7 events, in generated files
    python benchmarks/bench_scale.py --max-events 1000000
    python benchmarks/bench_scale.py some.pickle ...       # files of yours, in order of size

Every figure is for the command as a user runs it, in a separate child process: wall-clock time from
start to exit, processor time (two threads replay; the machine may be shared), and the peak resident
set. The needs of a process that has loaded every module but read nothing are measured too, and
subtracted from the processor time and memory per event.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from make_big import make_big

MIB = 1 << 20
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
LIMIT_BYTES = 1.5e9  # the most memory for 10^7 events


@dataclass(frozen=True)
class Run:
    """Time and memory of one run of a command."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def run(arguments: list[str]) -> Run:
    """Return the time and peak memory of one run.

    Raises:
        RuntimeError: the command failed.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile() as shown:
        child = subprocess.Popen(arguments, stdout=shown, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        if child.returncode != 0:
            shown.seek(0)
            raise RuntimeError(shown.read().decode(errors="replace")[-2000:])
    scale = 1 if sys.platform == "darwin" else 1024
    return Run(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * scale)


def best(arguments: list[str], repeats: int) -> Run:
    """Return the shortest time and the largest memory of several runs."""
    runs = [run(arguments) for _ in range(repeats)]
    return Run(
        min(r.seconds for r in runs),
        min(r.cpu_seconds for r in runs),
        max(r.peak_bytes for r in runs),
    )


def n_events_of(path: Path) -> int:
    """Return the number of events in a file, which is read in a separate process."""
    code = "import sys, fragdoctor; print(len(fragdoctor.load(sys.argv[1]).events))"
    found = subprocess.run(
        [sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True
    )
    return int(found.stdout)


def files(options: argparse.Namespace, folder: Path) -> Iterator[Path]:
    """Yield the files to measure; files made here are deleted afterwards."""
    if options.paths:
        yield from sorted(options.paths, key=lambda p: p.stat().st_size)
        return
    for size in SIZES:
        if size <= options.max_events:
            path = folder / f"{size}.pickle"
            make_big(path, size)
            yield path
            path.unlink()


def main() -> int:
    """Print the table; return 1 if 10^7 events need more memory than the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--max-events", type=int, default=SIZES[-1])
    parser.add_argument("--folder", type=Path, help="for the files made here; the largest is 1 GB")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    command = [sys.executable, "-m", "fragdoctor", "analyze"]
    empty = [sys.executable, "-c", "import fragdoctor.diagnosis.pipeline, fragdoctor.report.text"]
    idle = best(empty, 3)
    print(
        f"modules loaded, nothing read: {idle.cpu_seconds:.2f} s, {idle.peak_bytes / MIB:.0f} MiB"
    )
    print(f"{'events':>12} {'file':>10} {'wall':>9} {'cpu':>9} {'peak RSS':>10} {'per event':>20}")
    over = False
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for path in files(options, Path(folder)):
            n, size = n_events_of(path), path.stat().st_size
            result = best([*command, str(path), "-o", os.devnull], options.repeats)
            micros = (result.cpu_seconds - idle.cpu_seconds) / n * 1e6
            n_bytes = (result.peak_bytes - idle.peak_bytes) / n
            over |= n >= SIZES[-1] and result.peak_bytes > LIMIT_BYTES * n / SIZES[-1]
            print(
                f"{n:12,} {size >> 20:6} MiB {result.seconds:7.2f} s {result.cpu_seconds:7.2f} s "
                f"{result.peak_bytes / MIB:6.0f} MiB {micros:8.2f} us {n_bytes:7.0f} B",
                flush=True,
            )
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
