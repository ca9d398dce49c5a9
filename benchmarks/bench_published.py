"""Compare estimates with what others measured on real GPUs.

    python benchmarks/bench_published.py [--rows | --calibrate]

Asks ``fragdoctor estimate`` about each row of ``benchmarks/published/`` like a user would, and
prints for both halves: the median error by class, the bias (the median of signed errors), the
shares of figures below, inside and above the printed interval, its median width as a share of its
lower end, and the verdicts on the card for runs that failed or came close to the limit. Advice is
left out: it takes most of the time, and no figure here comes from it. ``--rows`` prints each row of
the half that may be looked at; the rows of the held-out half are never printed. ``--calibrate``
instead prints the spreads for ``fragdoctor.estimation.calibration`` that follow from the half that
may be looked at, and the share of figures in left-out tables that such spreads would cover.

A figure of PyTorch's allocated memory is compared with the allocated peak, one of its reserved
memory with the reserved peak, and one whose kind is not stated with what the driver shows for the
process: reserved memory plus the CUDA context. The interval is the one printed for other people's
programs; verdicts go by what the card must have free, those of servers by whether one sequence of
the stated length has room, as the reports say first: open if only while a step reads a part of it.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import json
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple
from unittest import mock

from fragdoctor.cli.app import invoke
from fragdoctor.errors import FragdoctorError
from fragdoctor.estimation import formula, judge
from fragdoctor.estimation.calibration import SPREADS, kind_of
from fragdoctor.model.gpus import GpuModel, gpu_of
from fragdoctor.model.memory_estimate import Estimate, Fit, FitState, Footprint, state_on
from fragdoctor.model.workload import Workload

FOLDER = Path(__file__).parent / "published"
HALVES = ("looked_at", "held_out")
UNITS = {"GB": 10**9, "GiB": 2**30, "MiB": 2**20}
SAID_BY_SOURCE = {
    # chunked_cross_entropy works on 16-bit logits; bitsandbytes 0.42; gradients are accumulated.
    "Lightning-AI/litgpt": ("--logits 16-bit --grad-accumulation 8", "", {"int4": "int4-0.42"}),
    # Unless configured otherwise, MPT uses flash-attention's loss.
    "mosaicml/llm-foundry": ("--logits kernel", "", {}),
    # TRL's SFTTrainer and BigCode's finetune.py prepare a quantized base like PEFT does.
    **dict.fromkeys(
        ("Hugging Face + FA2", "4bit-transformers-bitsandbytes", "bigcode-project/starcoder"),
        ("", "", {kind: f"{kind}-peft" for kind in ("int4", "int8", "nf4", "int4-0.42")}),
    ),
    # Qwen's own modeling_qwen.py passes the cache as tuples.
    "QwenLM/Qwen/": ("", "--cache tuple", {}),
    "casper-hansen/AutoAWQ": ("", "", {"awq": "awq-fused"}),
    # The loop's variable holds the model's output until the next one is there; in early 2024
    # that had a tuple of keys and values, which training returned too.
    "docs/source/en/model_doc": ("--keep-logits --cache tuple", "", {}),
}
"""Source or table -> what its code does in every row: options for training, options for inference,
and what it means by a dtype."""
SAID_BY_NOTE = {
    "chunked loss": ("--logits", "chunked"),
    "masked language modeling": ("--logits", "fp32"),
    "classification": ("--logits", "none"),
}
SAID_BY_SCRIPT = {
    **dict.fromkeys(("pytorch/torchtitan", "megatron"), ("--expandable-segments",)),
    "refs/a100_80gb.csv": ("--logits", "shifted"),  # Transformers 4.48.1 without Liger's loss
}
"""Part of a note, or of a source, and the options for training that state the same."""
FSDP_KINDS = {
    "Lightning-AI/litgpt": "1-mixed",  # FSDPStrategy wraps whole blocks
    "foundation-model-stack": "1", "AnswerDotAI": "1", "llama-cookbook": "1",
    "torchtune/blob/v0.0.1": "1", "Lightning-AI/lightning-thunder": "1",
    "pytorch/torchtitan": "2", "torchtune/blob/main": "2", "fsdp2_lora": "2",
}  # fmt: skip
"""Which version of FSDP a source's code uses."""
AT_LIMIT = 0.8  # share of the card from which on a run counts as close to the limit


class Outcome(NamedTuple):
    """A row and its estimate; the error is None if the row has no figure."""

    row: Mapping[str, str]
    error: float | None
    share: tuple[float, ...]  # the figure divided by the estimate's lower and upper bound
    side: str  # where the figure is: below, inside or above the interval, or "" without a figure
    width: float  # of the interval, as a share of its lower end
    verdict: str  # right, open, wrong, or "" away from the limit
    refusal: str
    kind: str = ""  # how much is known about the workload: a key of ``SPREADS``


def without_advice(workload: Workload, gpus: Sequence[GpuModel]) -> Estimate:
    """Return what ``estimation.judge.judged`` returns, without batches, measures and the map."""
    footprint = formula.formula_footprint(workload)
    fits = tuple(fit_of(footprint, gpu) for gpu in gpus)
    return Estimate(workload, footprint, fits)


def fit_of(footprint: Footprint, gpu: GpuModel) -> Fit:
    """Return whether a footprint fits, without looking for batches that would."""
    most = footprint.needs_high_bytes
    state = state_on(footprint.needs_low_bytes, most, gpu.usable_bytes)
    return Fit(gpu, state is FitState.FITS, gpu.usable_bytes - most, None, state=state)


def asked(row: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Return the report that the command prints for a row, and the kind of the row's workload."""
    model = [] if {"--layers", "--params"} & set(row["options"].split()) else [row["model"]]
    options = shlex.split(row["options"])
    is_inference = "--inference" in options
    for name, (training, inference, means) in SAID_BY_SOURCE.items():
        if name in row["source"] or name in row["table"]:
            if not (is_inference and "Lightning" in name):
                options = [means.get(word, word) for word in options]
            options += shlex.split(inference if is_inference else training)
    if not is_inference:
        if row["note"].startswith(("texts are cut", "texts are shorter")):
            options += ["--varying-lengths"]  # ms-swift pads to a batch's longest text
        said = (("note", SAID_BY_NOTE), ("source", SAID_BY_SCRIPT))
        for column, table in said:
            options += [w for part, words in table.items() if part in row[column] for w in words]
        if "--fsdp" in options:
            kinds = [kind for part, kind in FSDP_KINDS.items() if part in row["source"]]
            options += [word for kind in kinds for word in ("--fsdp-kind", kind)]
    words = [*model, *options, "--gpu", row["gpu"], "--format", "json"]
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.object(judge, "judged", side_effect=without_advice) as judged,
    ):
        invoke(["estimate", *words, "--no-config"])
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found, kind_of(judged.call_args.args[0])


def outcome_of(row: Mapping[str, str]) -> Outcome:
    """Return the outcome of a row."""
    try:
        found, kind = asked(row)
    except FragdoctorError as refused:
        return Outcome(row, None, (0.0, 0.0), "", 0.0, "", str(refused))
    error: float | None = None
    share, side = (0.0, 0.0), ""
    low, high = found["published_low_bytes"], found["published_high_bytes"]
    high = high or low
    measured = 0.0
    if row["figure"]:
        measured = float(row["figure"]) * UNITS[row["unit"]]
        error = _point(found, row["what"]) / measured - 1
        if row["what"] != "cache":
            own = measured - _outside(found, row["what"])
            spread = SPREADS[kind]  # the range includes cache that the needs do not
            share = tuple(f * own / at for f, at in zip(spread, (low, high), strict=True))
            side = "below" if own < low else "inside" if own <= high else "above"
    verdict = _verdict(row, found, measured)
    return Outcome(row, error, share, side, high / low - 1, verdict, "", kind)


def _point(found: Mapping[str, Any], what: str) -> float:
    if what == "cache":
        return float(found["serving"]["cache_bytes"])
    if what == "allocated":
        return float(found["peak_allocated_bytes"])
    return float(found["reserved_bytes"]) + _outside(found, what)


def _outside(found: Mapping[str, Any], what: str) -> int:
    """Return the part of a figure outside PyTorch: ``nvidia-smi`` also counts the CUDA context."""
    return int(found["gpus"][0]["context_bytes"]) if what == "unstated" else 0


def _verdict(row: Mapping[str, str], found: Mapping[str, Any], measured: float) -> str:
    if row["what"] == "cache":
        return ""
    ran = row["ran"] == "yes"
    if ran and row["figure"] and measured < AT_LIMIT * gpu_of(row["gpu"]).total_bytes:
        return ""
    state = found["gpus"][0]["state"]
    if found["serving"]:  # the report's first line is the server's: whether one sequence has room
        read_in_parts, read_whole = (found["serving"][f"sequences{w}"] for w in ("", "_read_whole"))
        state = "fits" if read_in_parts else "does_not_fit"
        if read_in_parts and not read_whole:
            state = "too_close_to_call"
    if state == "too_close_to_call":
        return "open"
    return "right" if (state == "fits") is ran else "wrong"


def print_half(name: str, outcomes: Sequence[Outcome]) -> None:
    """Print the results of one half."""
    refused = sum(bool(o.refusal) for o in outcomes)
    print(f"\n{name}: {len(outcomes)} rows, {refused} refused")
    groups: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is None:
            continue
        groups[outcome.row["setting"]].append(outcome)
        groups["all"].append(outcome)
        if outcome.row["complete"] == "yes":
            groups["source states everything"].append(outcome)
    columns = ("median", "bias", "below", "inside", "above", "width")
    print(f"  {'class':26} {'n':>4}" + "".join(f"{column:>9}" for column in columns))
    for group, members in sorted(groups.items()):
        errors = [o.error for o in members if o.error is not None]
        print(
            f"  {group:26} {len(members):4} {median(map(abs, errors)):8.1%} "
            f"{median(errors):+8.1%}{_interval(members)}"
        )
    verdicts = [(o.verdict, o.row["ran"]) for o in outcomes if o.verdict]
    counts = {v: sum(found == v for found, _ in verdicts) for v in ("right", "open", "wrong")}
    false_fits = sum(found == "wrong" and ran == "no" for found, ran in verdicts)
    print(f"  at the limit: {counts}, of the wrong ones {false_fits} said that it fits")


def _interval(members: Sequence[Outcome]) -> str:
    """Return the shares of figures on each side of the interval, and its median width."""
    shown = [o for o in members if o.side]
    if not shown:
        return f"{'-':>9}" * 4
    shares = [sum(o.side == s for o in shown) / len(shown) for s in ("below", "inside", "above")]
    return "".join(f"{share:9.0%}" for share in [*shares, median(o.width for o in shown)])


def print_rows(outcomes: Sequence[Outcome]) -> None:
    """Print each row of a half that may be looked at."""
    for o in outcomes:
        said = o.refusal or (
            f"{o.verdict:6}" if o.error is None else f"{o.error:+7.1%} {o.side:6} {o.verdict}"
        )
        print(f"  {o.row['setting']:12} {o.row['model']:16} {said}  {o.row['options']}")


QUANTILES = (0.05, 0.04, 0.03, 0.025, 0.02, 0.01)  # shares left out per side; widest spread last
AIM = 0.9


def quantile(values: Sequence[tuple[float, float]], share: float) -> float:
    """Return the least of (value, weight) pairs with this share of the weight at or below it."""
    passed, total = 0.0, sum(weight for _, weight in values)
    for value, weight in sorted(values):
        passed += weight
        if passed >= share * total:
            return value
    return max(value for value, _ in values)


def _table(outcome: Outcome) -> str:
    return f"{outcome.row['source']}#{outcome.row['table']}"


def spreads_of(outcomes: Sequence[Outcome], left_out: float) -> dict[str, tuple[float, float]]:
    """Return for each kind the quantiles of figures over bounds; each table has equal weight."""
    found = {}
    for kind in SPREADS:
        members = [o for o in outcomes if o.kind == kind]
        n = Counter(map(_table, members))
        low = quantile([(o.share[0], 1 / n[_table(o)]) for o in members], left_out)
        high = quantile([(o.share[1], 1 / n[_table(o)]) for o in members], 1 - left_out)
        found[kind] = (min(1.0, low), max(1.0, high))
    return found


def print_calibration() -> None:
    """Print the spreads of the half that may be looked at, and how they do on left-out tables."""
    with (FOLDER / f"{HALVES[0]}.csv").open(encoding="utf-8", newline="") as file:
        outcomes = [o for o in map(outcome_of, csv.DictReader(file)) if o.side]
    tables = {_table(o) for o in outcomes}
    print(f"{len(outcomes)} figures in {len(tables)} tables")
    for left_out in QUANTILES:
        found = []
        for table in tables:
            others = spreads_of([o for o in outcomes if _table(o) != table], left_out)
            members = [o for o in outcomes if _table(o) == table]
            found.append(
                [
                    o.share[0] >= others[o.kind][0] and o.share[1] <= others[o.kind][1]
                    for o in members
                ]
            )
        rows = mean(is_inside for table in found for is_inside in table)
        each = mean(mean(table) for table in found)
        print(
            f"{left_out:.1%} left out on each side: of tables left out {rows:.0%} of the rows "
            f"inside, {each:.0%} of a table on average"
        )
        if min(rows, each) >= AIM:
            break
    for kind, (low, high) in spreads_of(outcomes, left_out).items():
        print(f"{kind}: x {low:.3f} to x {high:.3f}")


def main() -> int:
    """Print the results of both halves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", action="store_true", help="print the rows that are looked at")
    parser.add_argument("--calibrate", action="store_true", help="print the spreads instead")
    chosen = parser.parse_args()
    if chosen.calibrate:
        print_calibration()
        return 0
    for name in HALVES:
        with (FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            outcomes = [outcome_of(row) for row in csv.DictReader(file)]
        print_half(name, outcomes)
        if chosen.rows and name == HALVES[0]:
            print_rows(outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
