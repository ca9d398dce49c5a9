"""The formula route against recorded runs: the accuracy that the reports promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from estimated_workloads import recorded_peaks, workload_of
from msgspec.structs import replace

from fragdoctor.estimation.formula import FORMULA_ERROR, INFERENCE_ERROR, formula_footprint

PROMISED = 0.07
# Segments beyond the peak depend on the order of requests down to each temporary.
RESERVED = 0.15

SAMPLES = {
    "healthy_gpt": {"hidden": 512, "layers": 6, "heads": 8, "batch": 8, "seq": 512},
    "checkpoint_off": {"hidden": 512, "layers": 12, "heads": 8, "batch": 8, "seq": 1024},
    "checkpoint_on": {
        "hidden": 512, "layers": 12, "heads": 8, "batch": 8, "seq": 1024, "checkpointing": 1,
    },
    "optimizer_spike": {"hidden": 1024, "layers": 8, "heads": 16, "batch": 1, "seq": 64},
}  # fmt: skip


@pytest.mark.parametrize("row", recorded_peaks(), ids=lambda row: row["settings"]["name"])
def test_peak_of_recorded_run_is_met(row: dict[str, Any]) -> None:
    footprint = formula_footprint(workload_of(row["settings"]))

    recorded = row["peak_allocated_bytes"]
    assert abs(footprint.peak_allocated_bytes - recorded) <= PROMISED * recorded
    if row["peak_reserved_bytes"]:
        assert abs(footprint.reserved_bytes - row["peak_reserved_bytes"]) <= (
            RESERVED * row["peak_reserved_bytes"]
        )


@pytest.mark.parametrize("row", recorded_peaks(), ids=lambda row: row["settings"]["name"])
def test_parameters_of_recorded_run_are_counted_exactly(row: dict[str, Any]) -> None:
    footprint = formula_footprint(workload_of(row["settings"]))

    assert footprint.n_parameters == row["n_parameters"]


def test_promise_names_the_recordings_and_the_error() -> None:
    assert f"on {len(recorded_peaks())} recorded runs" in FORMULA_ERROR
    assert f"peak was within {100 * PROMISED:.0f}%" in FORMULA_ERROR
    assert f"reserved memory within {100 * RESERVED:.0f}%" in FORMULA_ERROR


# Peak allocated of one forward pass under no_grad that keeps keys and values, logits of the last
# token only; recorded as the training runs were.
PREFILLS = [
    ({"hidden": 2048, "layers": 12, "heads": 16, "kv": 4, "ffn": 5632, "vocab": 32000,
      "batch": 4, "seq": 2048}, 1_962_053_632),
    ({"hidden": 1024, "layers": 16, "heads": 16, "kv": 16, "ffn": 2816, "vocab": 32000,
      "batch": 16, "seq": 512}, 1_328_154_624),
    ({"hidden": 4096, "layers": 4, "heads": 32, "kv": 8, "ffn": 14336, "vocab": 128256,
      "batch": 1, "seq": 4096}, 4_402_028_544),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "recorded"), PREFILLS)
def test_peak_of_recorded_prefill_is_met(settings: dict[str, Any], recorded: int) -> None:
    workload = workload_of({"family": "llama", "dtype": "bf16", **settings})

    footprint = formula_footprint(replace(workload, inference=True))

    assert f"{len(PREFILLS)} recorded prefills" in INFERENCE_ERROR
    assert abs(footprint.peak_allocated_bytes - recorded) <= 0.05 * recorded


@pytest.mark.shared
@pytest.mark.parametrize("name", SAMPLES)
def test_peak_of_sample_is_met_within_a_quarter(shared: Path, name: str) -> None:
    import fragdoctor

    recording = shared / "snapshots" / name
    analysis = fragdoctor.analyze_device(fragdoctor.load(recording / "snapshot.pickle"), 0)
    stats = json.loads((recording / "stats.json").read_text(encoding="utf-8"))
    settings = {"family": "gpt", "vocab": 8192, "dtype": "amp-bf16", **SAMPLES[name]}

    estimated = formula_footprint(workload_of(settings)).peak_allocated_bytes

    for recorded in (
        analysis.timeline.peak_allocated_bytes,
        stats["allocated_bytes.all.peak"],
    ):
        assert abs(estimated - recorded) <= 0.25 * recorded
