"""Compare the snapshot reader with the stock unpickler: time and peak memory, in one run.

    python benchmarks/bench_reader.py            # makes its own 1,000,000-event file
    python benchmarks/bench_reader.py some.pickle

Every figure comes from a separate child process. Memory is the growth of the peak resident set
beyond what the process held before it opened the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from make_big import make_big

CHILD = """
import gc, json, pickle, resource, sys, time
mode, path = sys.argv[1:]
if mode == "fragdoctor":
    import fragdoctor.inputs.snapshot_reader as reader
if mode == "stock, gc off":
    gc.disable()
scale = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
start = time.perf_counter()
if mode == "fragdoctor":
    data = reader.read_snapshot(path)
    n = len(data.events)
else:
    with open(path, "rb") as file:
        data = pickle.load(file)  # a file that this benchmark made, or that the user trusts
    n = sum(map(len, data["device_traces"]))
seconds = time.perf_counter() - start
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
print(json.dumps({"seconds": seconds, "bytes": after - before, "n_events": n}))
"""
MODES = ("fragdoctor", "stock, gc off", "stock, gc on")


def measure(mode: str, path: Path, repeats: int) -> dict[str, float]:
    """Return the best time and the largest memory growth of several runs."""
    runs = []
    for _ in range(repeats):
        out = subprocess.run(
            [sys.executable, "-c", CHILD, mode, str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        runs.append(json.loads(out))
    return {
        "seconds": min(r["seconds"] for r in runs),
        "bytes": max(r["bytes"] for r in runs),
        "n_events": runs[0]["n_events"],
    }


def report(path: Path, repeats: int) -> None:
    """Print the comparison."""
    results = {mode: measure(mode, path, repeats) for mode in MODES}
    ours = results["fragdoctor"]
    print(f"{path.stat().st_size / 1e6:.0f} MB, {ours['n_events']:,.0f} events, best of {repeats}")
    for mode, r in results.items():
        print(
            f"{mode:14s} {r['seconds']:7.3f} s  {r['bytes'] / 1e6:7.1f} MB"
            f"  {r['n_events'] / r['seconds'] / 1e6:6.2f} M events/s"
            f"  time x{r['seconds'] / ours['seconds']:.2f}"
            f"  memory x{r['bytes'] / ours['bytes']:.2f}"
        )


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.path:
        report(options.path, options.repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.pickle"
        make_big(path, options.events)
        report(path, options.repeats)


if __name__ == "__main__":
    main()
