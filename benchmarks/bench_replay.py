"""Compare the speed of the replay with our reader and the stock unpickler, in one run.

    python benchmarks/bench_replay.py big.pickle [--unpickle]

``make_big.py`` makes a file; a recording from a real allocator also shows the fidelity. Every
figure is the best of three, in seconds of wall-clock time; the processor may be shared.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fragdoctor.future.search import usual_candidates
from fragdoctor.future.simulator import choose_device, search_settings
from fragdoctor.future.whatif import FairReplay, WhatIf, replay_what_if
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.trace.replay import report
from fragdoctor.trace.reproduction import reproduce
from fragdoctor.trace.trace import Trace

N_RUNS = 3


def best_of(
    function: Callable[..., Any], prepare: Callable[[], Any] | None = None
) -> tuple[float, Any]:
    """Return the shortest time of several calls, and the last result.

    ``prepare`` makes what each call takes, untimed: replays start where earlier ones of the same
    reproduction have left off, so a second search of the same one would cost next to nothing.
    """
    times, result = [], None
    for _ in range(N_RUNS):
        given = () if prepare is None else (prepare(),)
        start = time.perf_counter()
        result = function(*given)
        times.append(time.perf_counter() - start)
    return min(times), result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--unpickle", action="store_true", help="time pickle.load too (trusted!)")
    arguments = parser.parse_args()

    read_s, snapshot = best_of(lambda: read_snapshot(arguments.path))
    device = choose_device(snapshot)
    undo_s, trace = best_of(lambda: Trace.of(snapshot, device))
    model_s, reproduction = best_of(lambda: reproduce(trace))
    what_if = WhatIf(conf="expandable_segments:True")
    whatif_s, _ = best_of(lambda r: replay_what_if(r, what_if), lambda: reproduce(trace))
    confs = usual_candidates(reproduction)
    search_s, _ = best_of(
        lambda r: search_settings(FairReplay(r), confs, WhatIf()), lambda: reproduce(trace)
    )
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

    n_events = trace.n_events
    whole_s = undo_s + model_s
    rows = [
        ("read the file (our reader)", read_s),
        ("undo the trace", undo_s),
        ("find the reproduction (operations, model, comparison)", model_s),
        ("whole replay", whole_s),
        ("one what-if (expandable_segments:True)", whatif_s),
        (f"search over {len(confs)} candidates, 2 threads", search_s),
    ]
    fidelity = report(reproduction)
    print(f"{arguments.path.name}: {n_events:,} events, fidelity {fidelity.share:.4f}")
    for name, seconds in rows:
        print(f"  {name:<52}{seconds:8.3f} s {n_events / seconds / 1e6:8.2f} M events/s")
    print(f"  whole replay / reader: {whole_s / read_s:.2f}")
    print(f"  peak memory of this process: {peak_mib} MiB")
    if arguments.unpickle:
        start = time.perf_counter()
        with arguments.path.open("rb") as stream:
            pickle.load(stream)
        unpickle_s = time.perf_counter() - start
        total_s = read_s + whole_s + search_s
        print(f"  pickle.load, collector on: {unpickle_s:.3f} s")
        print(f"  (read + replay + search) / pickle.load: {total_s / unpickle_s:.2f}")


if __name__ == "__main__":
    main()
