"""Parameter counts against the published ones; configurations that are wrong."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragdoctor.errors import FragdoctorError, InputError, LimitExceeded
from fragdoctor.estimation.bounds import Needs
from fragdoctor.estimation.config_json import (
    MAX_CONFIG_BYTES,
    UncoveredModelError,
    read_config,
    shape_of_config,
)
from fragdoctor.estimation.formula import formula_needs
from fragdoctor.model.workload import Workload

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
BERT = {
    "model_type": "bert",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}


def config(kind: str, dims: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return a configuration from (hidden, layers, heads, key-value heads, ffn, vocabulary)."""
    hidden, layers, heads, kv_heads, ffn, vocab = dims
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        **more,
    }


def gpt2(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


# As on the models' own pages and in their safetensors headers.
PUBLISHED = {
    "llama-7b": (LLAMA, 6_738_415_616),
    "llama2-70b": (config("llama", (8192, 80, 64, 8, 28672, 32000)), 68_976_648_192),
    "llama3-8b": (config("llama", (4096, 32, 32, 8, 14336, 128256)), 8_030_261_248),
    "llama3.2-1b": (
        config("llama", (2048, 16, 32, 8, 8192, 128256), head_dim=64, tie_word_embeddings=True),
        1_235_814_400,
    ),
    "mistral-7b": (config("mistral", (4096, 32, 32, 8, 14336, 32000)), 7_241_732_096),
    "qwen2-0.5b": (
        config("qwen2", (896, 24, 14, 2, 4864, 151936), tie_word_embeddings=True),
        494_032_768,
    ),
    "qwen2-7b": (config("qwen2", (3584, 28, 28, 4, 18944, 152064)), 7_615_616_512),
    "qwen3-0.6b": (
        config(
            "qwen3", (1024, 28, 16, 8, 3072, 151936), head_dim=128, tie_word_embeddings=True,
            attention_bias=False,
        ),
        596_049_920,
    ),
    "gemma-2b": (config("gemma", (2048, 18, 8, 1, 16384, 256000), head_dim=256), 2_506_172_416),
    "gemma2-2b": (config("gemma2", (2304, 26, 8, 4, 9216, 256000), head_dim=256), 2_614_341_888),
    "phi3-mini": (config("phi3", (3072, 32, 32, 32, 8192, 32064)), 3_821_079_552),
    "mixtral-8x7b": (
        config(
            "mixtral", (4096, 32, 32, 8, 14336, 32000), num_local_experts=8, num_experts_per_tok=2
        ),
        46_702_792_704,
    ),
    "qwen1.5-moe": (
        config(
            "qwen2_moe", (2048, 24, 16, 16, 5632, 151936), moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4,
        ),
        14_315_784_192,
    ),
    "gpt2": (gpt2(768, 12, 12), 124_439_808),
    "gpt2-xl": (gpt2(1600, 48, 25), 1_557_611_200),
    "neox-20b": (config("gpt_neox", (6144, 44, 64, 64, 24576, 50432)), 20_554_567_680),
    "pythia-160m": (config("gpt_neox", (768, 12, 12, 12, 3072, 50304)), 162_322_944),
    "gptj-6b": (
        {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400},
        6_050_882_784,
    ),
    "opt-125m": (
        config("opt", (768, 12, 12, 12, 3072, 50272), max_position_embeddings=2048),
        125_239_296,
    ),
    "bloom-560m": (
        {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24, "n_head": 16,
         "vocab_size": 250880},
        559_214_592,
    ),
    "falcon-7b": (
        {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
         "num_attention_heads": 71, "multi_query": True, "parallel_attn": True, "bias": False,
         "vocab_size": 65024, "new_decoder_architecture": False},
        6_921_720_704,
    ),
    "phi-2": (config("phi", (2560, 32, 32, 32, 10240, 51200)), 2_779_683_840),
    "starcoder2-3b": (config("starcoder2", (3072, 30, 24, 2, 12288, 49152)), 3_030_371_328),
    "bert-base": (BERT, 109_482_240),
    "bert-base-mlm": ({**BERT, "architectures": ["BertForMaskedLM"]}, 109_514_298),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    described, published = PUBLISHED[name]

    assert shape_of_config(described, name).n_parameters == published


def test_missing_keys_are_named_together() -> None:
    partial = {k: v for k, v in LLAMA.items() if k not in ("hidden_size", "intermediate_size")}

    with pytest.raises(InputError) as caught:
        shape_of_config(partial, "config.json")

    assert "keys hidden_size or n_embd" in caught.value.message
    assert "intermediate_size" in caught.value.message
    assert "vocab_size" not in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "wide"),
        ("hidden_size", -1),
        ("hidden_size", True),
        ("num_hidden_layers", 10**9),
        ("vocab_size", 2.5),
        ("num_attention_heads", 2**40),
    ],
)
def test_impossible_value_is_refused_with_its_key(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        shape_of_config({**LLAMA, key: value}, "config.json")


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="32 heads cannot share 5"):
        shape_of_config({**LLAMA, "num_key_value_heads": 5}, "config.json")


def test_unknown_architecture_is_refused_even_with_all_keys() -> None:
    with pytest.raises(UncoveredModelError, match="'zebra'") as caught:
        shape_of_config({**LLAMA, "model_type": "zebra", "hidden_act": "silu"}, "config.json")

    assert "pip install torch transformers" in caught.value.hint


def test_mixture_without_experts_is_refused() -> None:
    with pytest.raises(InputError, match="num_local_experts"):
        shape_of_config({**LLAMA, "model_type": "mixtral"}, "config.json")


def test_text_model_of_a_multimodal_configuration_is_counted() -> None:
    shape = shape_of_config({"model_type": "llava", "text_config": LLAMA}, "config.json")

    assert shape.n_parameters == PUBLISHED["llama-7b"][1]
    assert "multimodal" in shape.assumptions[0]


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_object_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text)

    with pytest.raises(InputError):
        read_config(path)


def test_huge_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * (MAX_CONFIG_BYTES + 1))

    with pytest.raises(LimitExceeded):
        read_config(path)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "7", "x"])


@given(st.dictionaries(st.sampled_from([*LLAMA, "head_dim", "num_key_value_heads"]), values))
def test_any_values_give_a_shape_or_a_sentence(changes: dict[str, object]) -> None:
    described = {**LLAMA, **changes}
    json.dumps(described)

    with contextlib.suppress(FragdoctorError):
        assert shape_of_config(described, "config.json").n_parameters > 0


def test_class_decides_the_activation_where_the_file_is_silent() -> None:
    """``GPT2Config`` takes ``gelu_new``, which is written out in Python and keeps four tensors."""
    sizes = {"hidden_size": 768, "num_hidden_layers": 2, "num_attention_heads": 12}
    config = {"model_type": "gpt2", "vocab_size": 1000, **sizes}

    assert "gelu_new" == shape_of_config(config, "c.json").activation
    assert "gelu" == shape_of_config(config | {"activation_function": "gelu"}, "c.json").activation


def test_head_that_is_not_stated_is_in_the_upper_bound() -> None:
    config = {
        "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30_522,
    }  # fmt: skip

    def needs_of(*classes: str) -> Needs:
        stated = {**config, "architectures": list(classes)} if classes else config
        shape = shape_of_config(stated, "config.json")
        return formula_needs(Workload(shape, dtype="fp32", batch=32, seq=128))

    unknown, none, head = needs_of(), needs_of("BertModel"), needs_of("BertForMaskedLM")
    assert none.high_bytes is not None
    assert unknown.high_bytes is not None
    assert unknown.low_bytes == none.low_bytes < head.low_bytes
    assert unknown.high_bytes == pytest.approx(head.high_bytes, rel=0.01)
    assert none.high_bytes < unknown.high_bytes
    assert {doubt.id for doubt in unknown.doubts} - {doubt.id for doubt in none.doubts} == {"head"}


def test_dropout_of_the_class_counts_where_the_file_is_silent() -> None:
    """OPTConfig drops hidden states, and no attention probabilities."""
    config = {
        "model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12,
        "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50_272,
    }  # fmt: skip
    shape = shape_of_config(config, "config.json")

    assert (shape.hidden_dropout, shape.attention_dropout) == (0.1, 0.0)
