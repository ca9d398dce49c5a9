"""The benchmarks measure what they say: the files that they make are genuine ones."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from pathlib import Path

import pytest

import fragdoctor
from fragdoctor.analysis.device import analyze_device
from fragdoctor.future.simulator import trace_of
from fragdoctor.trace.replay import share_of
from fragdoctor.trace.reproduction import reproduce

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from make_big import make_big
    finally:
        sys.path.remove(str(BENCHMARKS))
    path = tmp_path_factory.mktemp("big") / "big.pickle"
    return path, make_big(path, 12_000)


def test_made_file_is_an_ordinary_pickle_that_ends_with_a_failure(big: tuple[Path, int]) -> None:
    path, n_events = big

    with path.open("rb") as file:
        content = pickle.load(file)

    (trace,) = content["device_traces"]
    assert n_events == len(trace)
    assert 12_000 <= n_events <= 16_000
    assert Counter(e["action"] for e in trace)["oom"] == 1
    assert trace[-1]["action"] == "oom"
    # Shared as PyTorch shares it: keys, action names, stacks.
    stacks = {id(e["frames"]) for e in trace}
    assert len(stacks) < 200


def test_made_file_is_consistent_and_reproduced_by_the_model(big: tuple[Path, int]) -> None:
    snapshot = fragdoctor.load(big[0])

    analysis = analyze_device(snapshot, 0)
    reproduction = reproduce(trace_of(snapshot))

    assert analysis.capture.is_consistent
    assert reproduction.comparison["n_failed_equal"] == 1
    assert reproduction.comparison["n_same_address"] == reproduction.comparison["n_requests"]
    assert share_of(reproduction.comparison) > 0.9


@pytest.mark.parametrize("part", range(8))
def test_every_operation_runs_and_nearly_all_ask_for_what_the_real_ones_do(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import bench_operations as bench
    finally:
        sys.path.remove(str(BENCHMARKS))
    lines = bench.MEASURED.read_text(encoding="utf-8").splitlines()[part::8]
    measured = {text: values for text, *values in (line.split("\t") for line in lines)}
    operations = tmp_path / "operations.txt"
    operations.write_text("".join(f"{text}\n" for text in measured), encoding="utf-8")
    monkeypatch.setattr(bench, "OPERATIONS", operations)
    command = [sys.executable, "-m", "fragdoctor", "rehearse", "--no-config", "--unlimited"]

    found = bench.rows_of([*command, "--full", "--gpu", "h100"])

    assert found.keys() == measured.keys()
    stopped = [text for text, values in found.items() if "Error" in values[0]]
    assert stopped in ([], ["torch.ldexp(x2, I(3, 768))"])  # whose 2 is put on a real GPU
    differing = [text for text in found if found[text] != measured[text]]
    assert len(differing) <= 0.05 * len(measured), differing
