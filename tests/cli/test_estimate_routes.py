"""``fragdoctor estimate``: an option that the chosen route does not use is refused by name."""

from __future__ import annotations

import json

import pytest
from builders import pickled
from command_line import Run
from training_runs import training

from fragdoctor.cli.commands import whole_group
from fragdoctor.cli.estimate import NEEDS, PARAMETERS, USED, Route, flag_of, refuse_unused
from fragdoctor.errors import ConfigError

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
    "dropout": "0.1", "per_process": "6GB", "processes": "2", "headroom": "1GiB",
    "context": "300MiB", "model": "some.module:build", "input_shape": "8,8",
    "input_dtype": "int64", "loss": "ce", "steps": "2", "batches": "2,4", "capacity": "1GiB",
    "tensor_parallel": "2", "context_parallel": "2", "pipeline_parallel": "2",
    "expert_parallel": "2", "offload": "optimizer", "cache": "paged",
    "gpu_memory_utilization": "0.9", "max_num_seqs": "8", "max_num_batched_tokens": "2048",
}  # fmt: skip
# Options that choose the route themselves.
CHOOSERS = {
    "list_gpus", "list_models", "model", "batches", "inputs", "inference", "per_process",
    "processes",
}  # fmt: skip


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> dict[Route, list[str]]:
    """Return the shortest command line of each route."""
    folder = tmp_path_factory.mktemp("inputs")
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    recordings = [folder / "b2.pickle", folder / "b4.pickle"]
    for path, batch in zip(recordings, (2, 4), strict=True):
        path.write_bytes(pickled(training(batch).data()))
    names = [str(path) for path in recordings]
    return {
        Route.GPUS: ["--list-gpus"],
        Route.MODELS: ["--list-models"],
        Route.FIT: names,
        Route.PACK: names[:1],
        Route.MODEL: ["--model", "some.module:build"],
        Route.MODEL_INFERENCE: ["--model", "some.module:build", "--inference"],
        Route.FILE: [str(config)],
        Route.FILE_INFERENCE: [str(config), "--inference"],
        Route.COUNT: ["--params", "7B"],
        Route.COUNT_INFERENCE: ["--params", "7B", "--inference"],
    }


def words_of(name: str) -> list[str]:
    return [flag_of(name), VALUES[name]] if name in VALUES else [flag_of(name)]


PAIRS = [
    (route, name)
    for route in Route
    for name in PARAMETERS
    if name not in USED[route] and name not in CHOOSERS
]


@pytest.mark.parametrize(("route", "name"), PAIRS, ids=str)
def test_unused_option_is_refused_with_its_route(
    run: Run, commands: dict[Route, list[str]], route: Route, name: str
) -> None:
    outcome = run("estimate", *commands[route], *words_of(name))

    assert outcome.code == 2
    assert f"{flag_of(name)} does not go with {route.value}." in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize("route", [Route.MODEL, Route.GPUS])
@pytest.mark.parametrize("words", [["x.json"], ["--per-process", "6GB"], ["--batches", "2,4"]])
def test_other_questions_are_refused_beside_a_model_and_the_list(
    run: Run, commands: dict[Route, list[str]], route: Route, words: list[str]
) -> None:
    outcome = run("estimate", *commands[route], *words)

    assert outcome.code == 2
    assert f"does not go with {route.value}." in outcome.err


def test_options_that_the_configuration_sets_are_not_refused() -> None:
    refuse_unused(Route.GPUS, frozenset())


def test_several_unused_options_are_one_sentence(
    run: Run, commands: dict[Route, list[str]]
) -> None:
    outcome = run("estimate", *commands[Route.FILE], "--input-shape", "8,8", "--steps", "3")

    assert "--input-shape, --steps do not go with formulas" in outcome.err


@pytest.mark.parametrize(("name", "others"), NEEDS.items())
def test_option_that_needs_another_is_refused_alone(name: str, others: tuple[str, ...]) -> None:
    route = next(route for route in Route if name in USED[route])

    with pytest.raises(ConfigError, match=f"{flag_of(name)} means nothing without"):
        refuse_unused(route, {name})
    refuse_unused(route, {name, others[0]})


def test_table_names_every_parameter_of_the_command_and_nothing_else() -> None:
    command = whole_group().commands["estimate"]
    parameters = {p.name for p in command.params} - {"help"}

    assert set(PARAMETERS) == parameters == set().union(*USED.values())
    assert set(USED) == set(Route)


@pytest.mark.parametrize("words", [["fit"], ["pack"], ["estimate"]])
def test_help_of_each_verb_lists_its_own_options(run: Run, words: list[str]) -> None:
    said = run(*words, "--help").out

    own = {"fit": "--batches", "pack": "--per-process", "estimate": "--params"}
    for verb, option in own.items():
        assert (option in said) == (verb == words[0])


@pytest.mark.parametrize("form", ["text", "json"])
def test_older_spellings_do_what_the_verbs_do(
    run: Run, commands: dict[Route, list[str]], form: str
) -> None:
    recordings, one = commands[Route.FIT], commands[Route.PACK]
    for verb, words in (
        ("fit", [*recordings, "--gpu", "24GiB", "--explain"]),
        ("fit", [*recordings, "--batches", "2,4", "--capacity", "1GiB"]),
        ("fit", recordings),
        ("fit", [*recordings, "--gpu", "24GiB", "--capacity", "1GiB"]),
        ("pack", [*one, "--gpu", "24GiB", "--processes", "3"]),
        ("pack", ["--per-process", "6GB", "--gpu", "24GiB", "--headroom", "1GiB"]),
        ("pack", ["--per-process", "6GB"]),
    ):
        older, newer = (run(v, *words, "--format", form) for v in ("estimate", verb))

        assert (newer.code, newer.out, newer.err) == (older.code, older.out, older.err)


def test_pack_asks_for_a_recording_where_none_is_given(run: Run) -> None:
    done = run("pack", "--gpu", "24GiB")

    assert done.code == 2
    assert "--per-process" in done.err


def test_fit_asks_for_a_second_recording(run: Run, commands: dict[Route, list[str]]) -> None:
    done = run("fit", *commands[Route.PACK])

    assert done.code == 2
    assert "fragdoctor fit b4.pickle b8.pickle" in done.err
