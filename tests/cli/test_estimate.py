from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import Run

from fragdoctor.cli.estimate_options import EstimateOptions
from fragdoctor.errors import ConfigError
from fragdoctor.model.rehearsal import Rehearsal, RehearsalResult
from fragdoctor.units import GIB

GPT = (
    "--family", "gpt", "--layers", "6", "--hidden", "512", "--heads", "8", "--vocab", "8192",
    "--positions", "4096",
)  # fmt: skip
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 704,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def test_recorded_sample_is_met_through_the_command_line(run: Run) -> None:
    outcome = run(
        "estimate", *GPT, "--dtype", "amp-bf16", "--batch", "8", "--seq", "512",
        "--logits", "16-bit", "--format", "json",
    )  # fmt: skip

    document = json.loads(outcome.out)
    # Peak allocated of the recording healthy_gpt.
    assert abs(document["peak_allocated_bytes"] - 1_292_578_816) <= 0.05 * 1_292_578_816
    assert document["fits"] is None
    assert outcome.code == 0


def test_answer_that_it_does_not_fit_is_an_answer(run: Run, config: str) -> None:
    outcome = run("estimate", config, "--gpu", "600MiB", "--batch", "64")

    assert outcome.code == 0
    assert outcome.out.startswith("Does not fit on 600MiB")


def test_several_gpus_are_compared(run: Run, config: str) -> None:
    outcome = run("estimate", config, "--gpu", "h100", "--gpu", "t4", "--format", "json")

    assert [g["name"] for g in json.loads(outcome.out)["gpus"]] == ["h100", "t4"]


def test_explain_shows_formulas_and_sources(run: Run, config: str) -> None:
    outcome = run("estimate", config, "--explain")

    assert "P x 4 B" in outcome.out
    assert "arxiv.org" in outcome.out
    assert "What one layer keeps" in outcome.out


def test_a_plan_begins_with_the_fewest_gpus(run: Run) -> None:
    words = ["estimate", "llama-3.1-8b", "--dtype", "deepspeed-bf16", "--plan"]
    outcome = run(*words, "--gpu", "h100", "--price", "h100=2")

    assert outcome.out.startswith("Fits on ")
    assert " an hour." in outcome.out
    assert "Will it fit" not in outcome.out  # on one GPU, where it does not
    assert run(*words).err.startswith("Error: --plan asks how many GPUs of a kind.")
    assert "is not a price" in run(*words, "--gpu", "h100", "--price", "h100=x").err


def rehearsal(*, fits: bool) -> RehearsalResult:
    found = Rehearsal(
        gpu="a100-40g", is_known_gpu=True, capacity_bytes=40 * GIB, conf="", fits=fits, steps=2,
        stopped="", peak_allocated_bytes=34 * GIB, peak_reserved_bytes=38 * GIB,
        out_of_memory=None, n_ooms=0, devices=(), assumptions=(), unmodelled=(), notes=(),
        snapshot="", torch_version="", python="",
    )  # fmt: skip
    return RehearsalResult(diagnosis=None, rehearsal=found)  # type: ignore[arg-type]


def test_the_best_two_plans_are_rehearsed_on_request(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def rehearse(chosen: EstimateOptions) -> RehearsalResult:
        asked.append((chosen.world_size, chosen.fsdp, chosen.checkpointing, chosen.optimizer))
        if len(asked) == 2:
            raise ConfigError("transformers cannot be imported by python.")
        return rehearsal(fits=True)

    monkeypatch.setattr("fragdoctor.cli.estimate._library_rehearsal", rehearse)
    words = ["estimate", "llama-3.1-8b", "--dtype", "bf16", "--seq", "4096"]
    outcome = run(*words, "--gpu", "a100-40g", "--plan", "--verify")

    assert asked == [(2, True, "full", "adamw-fused"), (4, True, "full", "adamw")]
    assert "rehearsed: one rank fits, peak 34.00 GiB allocated" in outcome.out
    assert "not rehearsed: transformers cannot be imported by python." in outcome.out
    refused = run(*words, "--gpu", "a100-40g", "--verify").err
    assert refused.startswith("Error: --verify means nothing without --plan.")
    server = run(*words, "--gpu", "a100-40g", "--plan", "--verify", "--inference").err
    assert server.startswith("Error: None of the plans can be rehearsed.")


def test_a_training_takes_the_dtype_of_the_file(run: Run, config: str) -> None:
    document = json.loads(run("estimate", config, "--format", "json").out)

    assert document["workload"]["dtype"] == "bf16"


def test_gpus_are_listed(run: Run) -> None:
    assert "a100-40g" in run("estimate", "--list-gpus").out
    listed = json.loads(run("estimate", "--list-gpus", "--format", "json").out)
    assert "h100" in [g["name"] for g in listed["gpus"]]


def test_inference_takes_the_dtype_of_the_file(run: Run, config: str) -> None:
    outcome = run("estimate", config, "--inference", "--new-tokens", "50", "--format", "json")

    document = json.loads(outcome.out)
    assert document["workload"]["dtype"] == "bf16"
    assert "kv_cache" in [i["id"] for i in document["items"]]


def test_assumptions_are_said(run: Run) -> None:
    outcome = run("estimate", "--params", "125M")

    assert "The shape is a guess" in outcome.out
    assert "Sequences of 2048 tokens are assumed" in outcome.out
    assert "precision is assumed to be fp32" in outcome.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "nothing to estimate"),
        (("--params", "many"), "not a parameter count"),
        (("--params", "7B", "--gpu", "toaster"), "neither a known GPU nor a size"),
        (("--params", "7B", "--dtype", "fp7"), "not a known precision"),
        (("--params", "7B", "--optimizer", "magic"), "not a known optimizer"),
        (("--params", "7B", "--zero", "3"), "number of GPUs is missing"),
        (("--params", "7B", "--fsdp", "--zero", "2"), "exclude each other"),
        (("--params", "7B", "--checkpointing", "some"), "not a kind of checkpointing"),
        (("--params", "7B", "--dtype", "int4"), "cannot be trained"),
        (("--params", "7B", "--lora", "8", "--lora-targets", "nose"), "names no matrix"),
        (("--params", "7B", "--new-tokens", "5"), "KV cache"),
        (("--params", "7B", "--seq", "999999999999"), "out of range"),
        (("nowhere.json",), "does not exist"),
        (("llama", "3", "8b", "--qlora"), "QLoRA is --lora 16 --dtype int4"),
        (("llama-3-8b", "--lora", "0"), "range x>=1"),
        (("--params", "7B", "--inference", "--varying-lengths"), "does not go with"),
    ],
)
def test_bad_usage_is_one_sentence_and_exit_2(run: Run, args: tuple[str, ...], words: str) -> None:
    outcome = run("estimate", *args)

    assert outcome.code == 2
    assert words in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 2**30},
        {"num_hidden_layers": 9999},
        {"vocab_size": 2**31},
        {"num_attention_heads": 2**31},
        {"model_type": "mixtral", "num_local_experts": 2**31},
    ],
)
def test_absurd_configuration_ends_in_a_sentence_or_an_answer(
    run: Run, tmp_path: Path, changes: dict[str, object]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))

    outcome = run("estimate", str(path), "--gpu", "h100", "--batch", "1000")

    assert outcome.code in (0, 2)
    assert "Traceback" not in outcome.err


def test_absurd_length_is_an_answer(run: Run, config: str) -> None:
    outcome = run("estimate", config, "--seq", str(2**28), "--attention", "eager", "--gpu", "h100")

    assert outcome.out.startswith("Does not fit")


def test_error_is_json_where_json_was_asked_for(run: Run) -> None:
    outcome = run("estimate", "--params", "many", "--format", "json")

    assert outcome.code == 2
    assert json.loads(outcome.out)["error"]["code"] == "bad_configuration"


def test_input_and_dimensions_exclude_each_other(run: Run, config: str) -> None:
    assert "--layers does not go with formulas" in run("estimate", config, "--layers", "3").err


def test_recording_is_told_from_a_model(run: Run, samples: Path) -> None:
    """It is refused as what it is, with what is read here."""
    snapshot = next(p for p in sorted(samples.rglob("*.pickle")) if p.stat().st_size > 10_000)

    outcome = run("estimate", str(snapshot), "--gpu", "24GiB")

    assert (outcome.code, outcome.out) == (2, "")
    assert f"{snapshot.name} is a pickle, not a model" in outcome.err


def test_report_is_written_once(run: Run, config: str, tmp_path: Path) -> None:
    target = tmp_path / "estimate.txt"

    assert run("estimate", config, "-o", str(target)).code == 0
    assert target.read_text().startswith("Needs ")
    assert run("estimate", config, "-o", str(target)).code == 2
    assert run("estimate", config, "-o", str(target), "--force").code == 0


@pytest.mark.parametrize(
    ("price", "said"),
    [
        ("a100-80g=2", "is for a different GPU than the planned one"),
        ("h100=cheap", "is not a price"),
    ],
)
def test_price_that_cannot_count_is_refused(run: Run, price: str, said: str) -> None:
    outcome = run("estimate", "llama-3.1-8b", "--gpu", "h100", "--plan", "--price", price)

    assert outcome.code == 2
    assert said in " ".join(outcome.err.split())
