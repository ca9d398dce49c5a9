"""The reports of an estimate: schema, widths, and names from strangers."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from estimated_workloads import workload_of
from msgspec.structs import replace
from schemas import must_fit_exactly, schema

from fragdoctor.estimation.judge import judged
from fragdoctor.estimation.request import workload_of as workload_of_request
from fragdoctor.estimation.serving import serving_of
from fragdoctor.model.gpus import GPUS, gpu_of
from fragdoctor.model.memory_estimate import Estimate, PhaseName
from fragdoctor.model.workload import Attention
from fragdoctor.report.base import RenderOptions, Verbosity, render
from fragdoctor.report.json import document_of

WORKLOAD = workload_of(
    {"family": "llama", "hidden": 512, "layers": 4, "heads": 8, "ffn": 1408, "vocab": 8000,
     "dtype": "amp-bf16", "batch": 16, "seq": 1024}
)  # fmt: skip


@cache
def estimate(*gpus: str, **changes: Any) -> Estimate:
    workload = replace(WORKLOAD, **changes)
    return judged(workload, [gpu_of(g) for g in gpus])


@pytest.mark.parametrize(
    ("gpus", "changes"),
    [
        ((), {}),
        (("h100", "1GiB"), {}),
        (("h100",), {"inference": True, "new_tokens": 100}),
        (("h100",), {"zero_stage": 3, "world_size": 8, "checkpointing": "sqrt"}),
        (("h100",), {"lora_rank": 8, "dtype": "int4"}),
    ],
)
def test_document_fits_its_schema_exactly(gpus: tuple[str, ...], changes: dict[str, Any]) -> None:
    document = document_of("estimate", estimate(*gpus, **changes))

    must_fit_exactly(json.loads(json.dumps(document)), "estimate")
    assert (document["fits"] is None) == (not gpus)


def test_gpu_list_fits_its_schema_exactly() -> None:
    must_fit_exactly(document_of("gpus", tuple(GPUS.values())), "gpus")


def test_schema_lists_each_value() -> None:
    definitions = schema("types")["$defs"]

    assert definitions["phase_peak"]["properties"]["name"]["enum"] == [p.value for p in PhaseName]
    attention = schema("types")["$defs"]["workload"]["properties"]["attention"]["enum"]
    assert attention == [a.value for a in Attention]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_text_keeps_to_the_width_and_begins_with_the_verdict(width: int) -> None:
    answer = estimate("h100", "1GiB")

    text = render("estimate", "text", answer, RenderOptions(width=width), explain=True)

    lines = text.splitlines()
    assert lines[0].startswith("Fits on h100 with ")
    assert [line for line in lines if len(line) > width] == []


def test_verdict_that_does_not_fit_says_how_much_is_short_and_what_would_do() -> None:
    answer = estimate("3GiB")

    text = render("estimate", "text", answer, RenderOptions(verbosity=Verbosity.QUIET))

    assert text.startswith("Does not fit on 3GiB: ")
    assert f"What would fit: batch {answer.fits[0].largest_batch}." in text
    assert "Counted: fp32 weights, gradients and states with bf16 operations" in text
    assert text.count("\n") == 1


def test_items_of_the_table_add_up_to_what_is_allocated() -> None:
    document = document_of("estimate", estimate())

    assert sum(i["at_peak_bytes"] for i in document["items"]) == document["peak_allocated_bytes"]


def test_each_item_has_formula_and_source() -> None:
    for item in estimate().footprint.items:
        assert item.formula, item.id
        assert item.source, item.id


def test_name_with_escape_sequences_is_shown_as_text() -> None:
    hostile = replace(WORKLOAD.shape, name="x\x1b[31m", source="\x1b]0;t\x07")

    found = judged(replace(WORKLOAD, shape=hostile), [])
    text = "".join(
        render("estimate", name, found, RenderOptions(), explain=True)
        for name in ("text", "markdown", "html")
    )

    assert "\x1b" not in text
    assert "\x07" not in text


def test_gpu_table_lists_each() -> None:
    text = render("gpus", "text", tuple(GPUS.values()), RenderOptions())

    assert all(f"  {g.name} " in text for g in GPUS.values())


def test_table_lacks_as_much_as_the_first_line() -> None:
    text = render("estimate", "text", estimate("1GiB"), RenderOptions())

    short = re.search(r"at least ([\d.]+ \w+)\s+short", text)
    assert short is not None
    assert f" -{short[1]} " in text


def test_first_lines_say_that_an_encoder_without_a_class_is_a_classifier() -> None:
    asked = judged(workload_of_request(["roberta-base"]), [gpu_of("rtx-4090")])
    text = " ".join(render("estimate", "text", asked, RenderOptions(width=80)).split())

    assert "states, a classifier, adamw" in text
    assert "What decides" not in text


def test_first_lines_say_if_a_server_has_room_only_for_a_prompt_read_in_parts() -> None:
    workload = workload_of_request(["llama-3-8b"], inference=True, seq=32_768, cache="paged")
    serving = serving_of(workload, gpu_of("l4"), utilization=0.9)
    found = replace(judged(workload, [gpu_of("l4")]), serving=serving)

    text = " ".join(render("estimate", "text", found, RenderOptions()).split())

    assert "but none if a step reads a whole prompt" in text.split("One batch alone")[0]


@pytest.mark.parametrize(
    ("options", "way"),
    [
        ({"inference": True, "batch": 4096}, r"batch \d+\."),
        ({"loss": "none", "batch": 64}, r"batch \d+ or checkpoint each layer\."),
    ],
)
def test_first_lines_name_a_batch_and_the_measure_that_alone_is_enough(
    options: dict[str, Any], way: str
) -> None:
    workload = workload_of_request(["roberta-base"], seq=512, dtype="bf16", **options)
    text = render("estimate", "text", judged(workload, [gpu_of("k80")]), RenderOptions())

    assert re.search(f"(What would fit|Surely fits): {way}", " ".join(text.split()))


def test_first_lines_name_the_option_that_settles_what_is_open() -> None:
    def first_words(**options: str) -> tuple[str, str]:
        asked = {"batch": 32, "seq": 256, "attention": "eager", **options}
        workload = workload_of_request(["roberta-base"], **asked)
        text = render("estimate", "text", judged(workload, [gpu_of("k80")]), RenderOptions())
        return text.split(maxsplit=1)[0], " ".join(text.split("Counted:")[0].split())

    verdict, why = first_words()
    assert verdict == "Too"
    assert "What decides: a head over the vocabulary, if there is one (--logits says)." in why
    assert first_words(loss="none")[0] == "Fits"
    assert first_words(loss="fp32")[0] == "Does"
