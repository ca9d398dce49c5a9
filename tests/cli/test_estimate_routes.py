"""``fragdoctor estimate``: an option that the chosen route does not use is refused by name."""

from __future__ import annotations

import json
from typing import NoReturn

import pytest
from command_line import Run

from fragdoctor.cli.commands import whole_group
from fragdoctor.cli.estimate_options import NEEDS, PARAMETERS, Route, flag_of, refuse_unused, used
from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.sweep import Sweep

CONFIG = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 688, "vocab_size": 1000,
}  # fmt: skip
# A value for each option that takes one; the others are switches.
VALUES = {
    "params": "7B", "gpu": "24GiB", "dtype": "bf16", "optimizer": "sgd", "grad_dtype": "bf16",
    "batch": "2", "seq": "128", "attention": "flash", "checkpointing": "full", "lora": "8",
    "lora_targets": "attention", "zero": "2", "world_size": "4", "grad_accumulation": "2",
    "new_tokens": "8", "kv_dtype": "fp8", "family": "gpt", "vocab": "100", "layers": "2",
    "hidden": "64", "heads": "4", "kv_heads": "2", "ffn": "128", "positions": "64",
    "dropout": "0.1", "model": "some.module:build", "loss": "ce", "logits": "fused", "steps": "2",
    "tensor_parallel": "2", "context_parallel": "2", "pipeline_parallel": "2",
    "expert_parallel": "2", "offload": "optimizer", "cache": "paged",
    "gpu_memory_utilization": "0.9", "max_num_seqs": "8", "max_num_batched_tokens": "2048",
    "args": "vllm serve gpt2", "fsdp_kind": "1", "price": "h100=2.5",
}  # fmt: skip
# Options that choose the route themselves.
CHOOSERS = {"list_gpus", "list_models", "model", "inputs", "inference", "rehearse"}


# Each route, with --inference and without it; the lists have none.
WAYS = [(Route.GPUS, False), (Route.MODELS, False)] + [
    (route, inference)
    for route in (Route.MODEL, Route.LIBRARY, Route.FILE, Route.COUNT)
    for inference in (False, True)
]


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[Route, list[str]]:
    """Return the shortest command line of each route."""
    folder = tmp_path_factory.mktemp("inputs")
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    return {
        Route.GPUS: ["--list-gpus"],
        Route.MODELS: ["--list-models"],
        Route.MODEL: ["--model", "some.module:build"],
        Route.LIBRARY: [str(config), "--rehearse"],
        Route.FILE: [str(config)],
        Route.COUNT: ["--params", "7B"],
    }


def words_of(name: str) -> list[str]:
    return [flag_of(name), VALUES[name]] if name in VALUES else [flag_of(name)]


UNUSED = [
    (route, inference, name)
    for route, inference in WAYS
    for name in PARAMETERS
    if name not in used(route, inference=inference) and name not in CHOOSERS
]


@pytest.mark.parametrize(("route", "inference", "name"), UNUSED, ids=str)
def test_unused_option_is_refused_with_its_route(
    run: Run, commands: dict[Route, list[str]], route: Route, inference: bool, name: str
) -> None:
    words = [*commands[route], *(["--inference"] if inference else []), *words_of(name)]
    way = f"{route.value} with --inference" if inference else route.value

    outcome = run("estimate", *words)

    assert outcome.code == 2
    assert f"{flag_of(name)} does not go with {way}." in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("route", [Route.MODEL, Route.GPUS])
def test_input_is_refused_beside_a_model_and_the_list(
    run: Run, commands: dict[Route, list[str]], route: Route
) -> None:
    outcome = run("estimate", *commands[route], "x.json")

    assert outcome.code == 2
    assert f"does not go with {route.value}." in outcome.err


def test_options_that_the_configuration_sets_are_not_refused() -> None:
    refuse_unused(Route.GPUS, frozenset(), inference=False)


def test_several_unused_options_are_one_sentence(
    run: Run, commands: dict[Route, list[str]]
) -> None:
    outcome = run("estimate", *commands[Route.FILE], "--layers", "2", "--steps", "3")

    assert "--layers, --steps do not go with formulas" in outcome.err


@pytest.mark.parametrize(("name", "other"), NEEDS.items())
def test_option_that_needs_another_is_refused_alone(name: str, other: str) -> None:
    way = next(w for w in WAYS if name in used(w[0], inference=w[1]))

    with pytest.raises(ConfigError, match=f"{flag_of(name)} means nothing without"):
        refuse_unused(way[0], {name}, inference=way[1])
    refuse_unused(way[0], {name, other}, inference=way[1])


def test_table_names_every_parameter_of_the_command_and_nothing_else() -> None:
    command = whole_group().commands["estimate"]
    parameters = {p.name for p in command.params} - {"help"}

    assert set(PARAMETERS) == parameters == set().union(*(used(r, inference=i) for r, i in WAYS))


def test_pack_asks_for_a_recording_where_none_is_given(run: Run) -> None:
    done = run("pack", "--gpu", "24GiB")

    assert done.code == 2
    assert "--per-process" in done.err


@pytest.mark.parametrize("words", [["--fsdp"], ["--world-size", "4"]])
def test_one_of_several_gpus_is_rehearsed_where_they_share_all_states(
    run: Run, commands: dict[Route, list[str]], words: list[str]
) -> None:
    outcome = run("estimate", *commands[Route.LIBRARY], *words)

    assert outcome.code == 2
    assert "--fsdp --world-size 8" in outcome.err


def test_rehearsal_of_one_of_several_gpus_shards_the_model(
    run: Run, commands: dict[Route, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def rehearsed(asked: Sweep) -> NoReturn:
        found.append(asked.base)
        raise ConfigError("enough")

    monkeypatch.setattr("fragdoctor.cli.rehearse.diagnosed", rehearsed)
    run("estimate", *commands[Route.LIBRARY], "--fsdp", "--world-size", "16")

    assert [(0, 16, 8, ("fully-shard:1",))] == [
        (one.rank, one.world_size, one.n_devices, one.treatments) for one in found
    ]
