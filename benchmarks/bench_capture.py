"""Measure what recording costs a training loop, for each way to record, in one run.

    python benchmarks/bench_capture.py [--rounds 30] [--steps 4] [--layers 6]

It needs a CUDA build of PyTorch and a GPU, and none of this project's other dependencies. The ways
take turns, and each is compared with the step without recording in the same round, so that a busy
machine slows both; the result is the median over the rounds, with the quartiles beside it. Printed
are the ratio, the cost per recorded event, the cost of annotations (requested and not, in the same
rounds, and per recorded range), and the time to write a bundle. A step of a larger model has more
arithmetic per allocation: the cost per event carries over to it, but the ratio does not. Steps run
in a second thread, because PyTorch always records the ranges of the thread that enabled recording.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import shutil
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

DEFAULT = "python, 100000 entries (default)"
UNASKED = "python, annotations not asked for"
ASKED = {"global_record_annotations": True}  # PyTorch 2.6
WAYS = {
    "off": None,
    DEFAULT: ("python", "all", 100_000, ASKED),
    UNASKED: ("python", "all", 100_000, {}),
    "python, 10000 entries": ("python", "all", 10_000, ASKED),
    "python, stacks of allocations only": ("python", "alloc", 100_000, ASKED),
    "no stacks": ("python", None, 100_000, ASKED),
    "all (C++ frames too)": ("all", "all", 100_000, ASKED),
}


class Block(nn.Module):
    """A plain transformer block: only its allocations matter here."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm(x))


def record(way: tuple[str, str | None, int, dict[str, bool]] | None) -> None:
    """Switch to another way of recording; None switches it off."""
    torch.cuda.memory._record_memory_history(enabled=None)
    if way is not None:
        stacks, context, n, annotations = way
        torch.cuda.memory._record_memory_history(
            enabled="all", context=context, stacks=stacks, max_entries=n, **annotations
        )


def time_steps(model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> float:
    """Return the seconds per step of n training steps."""
    x = torch.randn(4, 128, 128, device="cuda")
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(n):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / n


def count_events(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the number of events that one step records."""
    record(("python", None, 20_000, {}))
    time_steps(model, optimizer, 1)
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    time_steps(model, optimizer, 2)
    after = len(torch.cuda.memory._snapshot()["device_traces"][0])
    record(None)
    return round((after - before) / 2)


def time_ranges(n: int) -> float:
    """Return the seconds per range of n ranges of ``record_function``."""
    begin = time.perf_counter()
    for _ in range(n):
        with torch.autograd.profiler.record_function("range"):
            pass
    return (time.perf_counter() - begin) / n


def range_cost(n_rounds: int) -> float:
    """Return the seconds that recording the start and end of a range adds to it."""
    added: list[float] = []
    for _ in range(n_rounds):
        record(None)
        without = time_ranges(1000)
        record(WAYS[DEFAULT])
        added.append(time_ranges(1000) - without)
    record(None)
    return statistics.median(added)


def bundle_cost(model: nn.Module, optimizer: torch.optim.Optimizer, n_steps: int) -> str:
    """Return a line on the host memory of a full history, and the time and size of its bundle."""
    recorder = load_recorder()
    home = tempfile.mkdtemp()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    record(WAYS[DEFAULT])
    time_steps(model, optimizer, n_steps)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    instance = recorder(home)
    begin = time.perf_counter()
    instance.on_block_end(None, at_end=True)
    seconds = time.perf_counter() - begin
    size = sum(p.stat().st_size for p in Path(home).rglob("*") if p.is_file())
    record(None)
    shutil.rmtree(home)
    history = f"a full history takes {grown / 1e3:.0f} MB of host memory"
    return f"{history}; its bundle {seconds:.2f} s and {size / 1e6:.1f} MB"


def load_recorder():  # noqa: ANN201 - a factory of this script
    """Return a factory of recorders, loaded by path like in programs under ``run``."""
    home = Path(__file__).parents[1] / "fragdoctor" / "recording"
    spec = importlib.util.spec_from_file_location(
        "recording", home / "__init__.py", submodule_search_locations=[str(home)]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["recording"] = package
    spec.loader.exec_module(package)
    from recording.history_recorder import Recorder
    from recording.record_options import Options

    return lambda directory: Recorder(Options(directory), torch, name="bench")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    model = nn.Sequential(*(Block(128) for _ in range(args.layers))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    time_steps(model, optimizer, 5)
    n_events = count_events(model, optimizer)
    # This comes first, while the process is small: growth in the rounds would hide the history's.
    bundle = bundle_cost(model, optimizer, 1 + 110_000 // n_events)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    with ThreadPoolExecutor(1) as thread:
        for _ in range(args.rounds):
            for name, way in WAYS.items():
                record(way)
                thread.submit(time_steps, model, optimizer, 2).result()
                steps = thread.submit(time_steps, model, optimizer, args.steps)
                times[name].append(steps.result())
                record(None)
    off = statistics.median(times["off"])
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}; {n_events} events a step")
    print(f"a step without recording takes {off * 1e3:.2f} ms; with it, in {args.rounds} rounds:")
    print(f"{'':36}{'ratio':>7}{'quarters':>14}{'us an event':>13}")
    for name, values in times.items():
        if name == "off":
            continue
        ratios = [t / t_off for t, t_off in zip(values, times["off"], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        cost = (ratio - 1) * off / n_events * 1e6
        print(f"{name:36}{ratio:7.2f}{low:8.2f}-{high:.2f} {cost:13.2f}")
    asked = [t / t_off for t, t_off in zip(times[DEFAULT], times[UNASKED], strict=True)]
    low, ratio, high = statistics.quantiles(asked, n=4)
    print(f"asking for annotations: ratio {ratio:.3f} ({low:.3f}-{high:.3f})", end="; ")
    print(f"noting a range: {range_cost(args.rounds) * 1e6:.2f} us")
    print(bundle)


if __name__ == "__main__":
    main()
