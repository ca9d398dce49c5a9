"""The fewest GPUs and the ways to use them: each can be asked for, and the cheaper ways lead."""

from __future__ import annotations

import shlex
from itertools import pairwise

import pytest
from msgspec.structs import replace

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.formula import formula_needs, stages_of
from fragdoctor.estimation.plans import plans_of, rehearsed_with
from fragdoctor.estimation.request import workload_of
from fragdoctor.model.gpus import gpu_of
from fragdoctor.model.memory_estimate import Plan
from fragdoctor.model.workload import Workload

CARD = gpu_of("a100-80g")
FIELDS = {
    "--zero": "zero_stage",
    "--world-size": "world_size",
    "--tensor-parallel": "tensor_parallel",
    "--pipeline-parallel": "pipeline_parallel",
    "--context-parallel": "context_parallel",
    "--grad-accumulation": "grad_accumulation",
}


def asked(**changes: object) -> Workload:
    settings = {"inputs": ["llama-3.1-8b"], "dtype": "deepspeed-bf16", "seq": 4096} | changes
    return workload_of(**settings)  # type: ignore[arg-type]


def as_asked_for(workload: Workload, plan: Plan) -> Workload:
    words = shlex.split(plan.option)
    changes: dict[str, object] = {
        FIELDS[flag]: int(value) for flag, value in pairwise(words) if flag in FIELDS
    }
    if "--checkpointing" in words:
        changes["checkpointing"] = "full"
    if "--optimizer" in words:
        changes["optimizer"] = "adamw-fused"
    if "--offload" in words:
        changes["offload"] = ("optimizer",)
    changes["sequence_parallel"] = "--sequence-parallel" in words
    return replace(workload, **changes)  # type: ignore[arg-type]


def test_options_of_a_plan_ask_for_what_it_says() -> None:
    workload = asked()
    plans = plans_of(workload, CARD, None)

    assert plans
    for plan in plans:
        needs = formula_needs(as_asked_for(workload, plan))
        assert (needs.low_bytes, needs.high_bytes) == (plan.needs_low_bytes, plan.needs_high_bytes)
        assert needs.high_bytes is not None
        assert needs.high_bytes <= CARD.usable_bytes


def test_no_fewer_gpus_would_do() -> None:
    workload = asked()
    fewest = min(p.n_gpus for p in plans_of(workload, CARD, None) if "--offload" not in p.option)

    half = fewest // 2
    workload = replace(workload, optimizer="adamw-fused")
    sharded = replace(workload, zero_stage=3, world_size=half, checkpointing="full")
    assert half >= 1
    assert (formula_needs(sharded).high_bytes or 0) > CARD.usable_bytes


@pytest.mark.slow
def test_seventy_billion_parameters_are_trained_on_sixteen_h100() -> None:
    plans = plans_of(asked(inputs=["llama-3.1-70b"], seq=2048), gpu_of("h100"), None)

    assert plans[0].n_gpus == 16
    assert any("ZeRO-3" in p.layout for p in plans)


def test_faster_plans_come_first_and_prices_follow_time() -> None:
    plans = plans_of(asked(), CARD, 2.0)

    fewest = [p for p in plans if p.n_gpus == plans[0].n_gpus]
    times = [p.seconds_per_token for p in fewest]
    assert times == sorted(times)
    for plan in plans:
        assert plan.price_per_hour == 2.0 * plan.n_gpus
        assert plan.price_per_million_tokens == pytest.approx(
            plan.price_per_hour * plan.seconds_per_token * 1e6 / 3600
        )


def test_a_server_of_a_large_model_is_split_by_heads() -> None:
    workload = asked(inputs=["llama-3.1-70b"], dtype="bf16", inference=True, seq=8192)
    best = plans_of(workload, CARD, None)[0]

    assert (best.n_gpus, best.sequences > 0) == (2, True)
    assert "--tensor-parallel 2" in best.option


def test_stages_of_a_pipeline_differ_as_their_layers_do() -> None:
    workload = asked(inputs=["llama-3.1-70b"], grad_accumulation=32)
    workload = replace(workload, pipeline_parallel=8, checkpointing="full")
    needs = {s.stage: formula_needs(s).high_bytes or 0 for s in stages_of(workload)}

    assert set(needs) == {"first", "middle", "last"}
    assert needs["middle"] < needs["first"]  # no embedding, fewer micro batches in flight
    assert formula_needs(workload).high_bytes == max(needs.values())


def test_a_card_without_a_known_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match="The speed of 24GiB is not known"):
        plans_of(asked(), gpu_of("24GiB"), None)


@pytest.mark.parametrize(("model", "fewest"), [("mixtral-8x7b", 16), ("deepseek-v2", 64)])
def test_mixtures_need_as_many_gpus_as_xtuner_says(model: str, fewest: int) -> None:
    """Full fine-tuning on A100s of 80 GB with ZeRO-3, by the README beside each configuration."""
    workload = asked(inputs=[model], seq=8192, optimizer="adamw-fused")

    plans = plans_of(workload, gpu_of("a100-80g"), None)

    assert fewest == min(p.n_gpus for p in plans if "--offload" not in p.option)


def test_plans_that_can_be_rehearsed_are_listed_on_request() -> None:
    workload = asked(dtype="bf16")
    card = gpu_of("a100-40g")

    fastest = plans_of(workload, card, None)
    listed = plans_of(workload, card, None, n_rehearsed=2)

    assert [plan for plan in listed if plan in fastest] == list(fastest)
    found = [options for options in map(rehearsed_with, listed) if options]
    assert len(found) >= 2
    assert found[0] == {
        "world-size": "2", "checkpointing": "full", "optimizer": "adamw-fused"
    }  # fmt: skip


def test_servers_and_split_layers_are_not_rehearsed() -> None:
    serving = plans_of(asked(inference=True, dtype="bf16"), CARD, None)
    assert [rehearsed_with(plan) for plan in serving] == [None] * len(serving)

    plans = plans_of(asked(inputs=["smollm2-360m"], dtype="bf16", batch=4), CARD, None)
    others = [p for p in plans if p.layout.startswith(("replicas", "ZeRO-1", "pipeline"))]
    assert len(others) >= 2
    assert not any(map(rehearsed_with, others))
