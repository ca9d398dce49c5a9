"""Small files that once took minutes or gigabytes, each as it was found."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import builders
import pytest
from builders import BASE, MIB, frame, segment_alloc
from cli_fixtures import run as run  # noqa: PLC0414 - a fixture
from command_line import Run

sys.path.insert(0, str(Path(__file__).parent))
import dimensions

from fragdoctor.inputs.source import zstd_module

pytestmark = pytest.mark.slow


def _statistics(n_bytes: int) -> bytes:
    one = json.dumps({"allocated_bytes.all.current": 1, "num_ooms": 0})
    return ("[" + ",".join([one] * (n_bytes // len(one))) + "]").encode()


def _packed(data: bytes) -> bytes:
    packed: bytes = zstd_module().compress(data, 19)
    return packed


FILES: dict[str, tuple[str, Callable[[], bytes], int]] = {
    # 5.6 KB each: two minutes and 560 MB; 1.7 GB
    "messages": ("a.txt.zst", lambda: _packed(dimensions.messages(190_000)), 3),
    "statistics": ("a.json.zst", lambda: _packed(_statistics(60 << 20)), 3),
    # 400 KB: 30 s
    "titles": (
        "a.txt",
        lambda: "".join(
            f"memory summary, device ID {i} CUDA OOMs: 1\n" for i in range(9500)
        ).encode(),
        3,
    ),
    "one title again and again": (
        "a.txt",
        lambda: b"Cur Usage Peak Usage\n" + b"memory summary, device ID 0 CUDA OOMs: 1\n" * 9500,
        0,
    ),
    # 64 KB: 16 s
    "white space": ("a.html", lambda: dimensions.page(b" ")(64 << 10), 2),
    "white space in an entry": ("a.html", lambda: dimensions.page(b" " * 30_000 + b"{")(2), 2),
    # 1.2 MB: 18 s
    "devices": ("a.pickle", lambda: dimensions.devices(4000), 3),
    "streams": ("a.pickle", lambda: dimensions.streams(6000), 0),
}


@pytest.mark.parametrize("name", FILES)
def test_small_file_is_soon_done_with(name: str, run: Run, tmp_path: Path) -> None:
    file, make, code = FILES[name]
    path = tmp_path / file
    path.write_bytes(make())
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()

    outcome = run("analyze", str(path))

    assert outcome.code == code, outcome.err
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 300 << 10


def _events(kind: str) -> list[dict[str, Any]]:
    optimizer = [frame("/x/site-packages/torch/optim/adamw.py", 3, "step"), frame("t.py", 9, "f")]
    backward = [frame("/x/site-packages/torch/_tensor.py", 3, "backward"), frame("t.py", 8, "f")]
    rows = {
        "segments alone": [
            segment_alloc(
                BASE + 4 * MIB * i, 2 * MIB, time_us=i, frames=(optimizer, backward)[i % 2]
            )
            for i in range(20)
        ],
        "frees alone": [
            row
            for i in range(20)
            for row in builders.free(BASE + 512 * i, 512, time_us=i, frames=optimizer)
        ],
        "nothing": [],
    }
    return rows[kind]


@pytest.mark.parametrize("has_steps", [False, True])
@pytest.mark.parametrize("kind", ["segments alone", "frees alone", "nothing"])
def test_trace_without_an_allocation_is_judged(
    kind: str, has_steps: bool, run: Run, tmp_path: Path
) -> None:
    data = builders.snapshot(events=_events(kind))
    if has_steps:
        data["external_annotations"] = [
            {"device": 0, "time_us": i, "name": "Optimizer.step#AdamW.step", "stage": stage}
            for i in range(10)
            for stage in ("START", "END")
        ]
    path = tmp_path / "a.pickle"
    path.write_bytes(builders.pickled(data))

    for words in (["analyze"], ["simulate", "--sweep"], ["check"], ["export"]):
        outcome = run(words[0], str(path), *words[1:])

        assert outcome.code in {0, 2}, outcome.err
