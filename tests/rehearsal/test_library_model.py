"""Models built from a configuration, with stand-ins for the libraries: no test downloads them."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.engine import library_model

OPTIONS = {
    "seq": 16, "attention": "sdpa", "is_checkpointed": False, "lora_rank": 0,
    "lora_targets": ("attention",), "inference": False,
}  # fmt: skip


class Configuration(SimpleNamespace):
    """What AutoConfig returns."""


class SelfAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.norm = torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)


class Decoder(torch.nn.Module):
    main_input_name = "input_ids"

    def __init__(self, config: Any, attn_implementation: str = "") -> None:
        super().__init__()
        self.config, self.attention = config, attn_implementation
        self.layer, self.is_checkpointed = SelfAttention(), False

    @classmethod
    def _from_config(cls, config: Any, **how: str) -> Decoder:
        return cls(config, **how)

    def forward(self, input_ids: Any, labels: Any = None) -> Any:
        return input_ids, labels

    def gradient_checkpointing_enable(self) -> None:
        self.is_checkpointed = True


class ImageClassification(Decoder):
    main_input_name = "pixel_values"

    def forward(self, pixel_values: Any, labels: Any = None) -> Any:
        return pixel_values, labels


class Unet(torch.nn.Module):
    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Unet:
        made = cls()
        made.config = SimpleNamespace(**config)
        return made


class _Adapted(torch.nn.Module):
    def __init__(self, base: Any, config: Any) -> None:
        super().__init__()
        self.base, self.config = base, config


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins for Transformers, Diffusers and PEFT in place."""
    transformers = ModuleType("transformers")
    transformers.__version__ = "5.0"  # type: ignore[attr-defined]

    def for_model(kind: str, **rest: Any) -> Configuration:
        if kind != "llama":
            raise ValueError(kind)
        return Configuration(**rest)

    transformers.AutoConfig = SimpleNamespace(for_model=for_model)  # type: ignore[attr-defined]
    for head in (*library_model.HEADS, "AutoModelForSequenceClassification"):
        known = {Configuration: Decoder} if head == "AutoModelForCausalLM" else {}
        made = SimpleNamespace(_model_mapping=known, from_config=Decoder._from_config)
        setattr(transformers, head, made)
    transformers.ImageClassification = ImageClassification  # type: ignore[attr-defined]
    diffusers = ModuleType("diffusers")
    diffusers.UNet2DConditionModel = Unet  # type: ignore[attr-defined]
    diffusers.FluxTransformer2DModel = Unet  # type: ignore[attr-defined]
    peft = ModuleType("peft")
    peft.LoraConfig = SimpleNamespace  # type: ignore[attr-defined]
    peft.get_peft_model = _Adapted  # type: ignore[attr-defined]
    for module in (transformers, diffusers, peft):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def built(config: dict[str, Any], **options: Any) -> Any:
    return library_model.build(json.dumps(config), **{**OPTIONS, **options})


def shapes_of(inputs: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in inputs.items()}


def test_decoder_gets_tokens_and_labels() -> None:
    model, inputs = built({"model_type": "llama", "hidden_size": 4, "torch_dtype": "bfloat16"})

    assert type(model) is Decoder
    assert model.config.hidden_size == 4
    assert not hasattr(model.config, "torch_dtype")
    assert model.attention == ""
    assert shapes_of(inputs) == {"input_ids": (1, 16), "labels": (1, 16)}


def test_encoder_without_a_named_class_classifies_as_the_formulas_assume(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers  # the stand-in

    monkeypatch.setattr(library_model.session, "note", lambda said: None)
    monkeypatch.setattr(transformers.AutoModelForMaskedLM, "_model_mapping", {Configuration: 0})
    classifier = SimpleNamespace(
        _model_mapping={Configuration: 0}, from_config=ImageClassification._from_config
    )
    monkeypatch.setattr(transformers, "AutoModelForSequenceClassification", classifier)

    model, _ = built({"model_type": "llama", "image_size": 4})

    assert type(model) is ImageClassification


def test_decoder_starts_somewhere_and_has_no_more_tokens_than_it_can() -> None:
    config = {"model_type": "llama", "decoder_start_token_id": None, "max_target_positions": 8}
    model, inputs = built(config)

    assert model.config.decoder_start_token_id == 0
    assert shapes_of(inputs) == {"input_ids": (1, 8), "labels": (1, 8)}


def test_numbers_that_the_library_does_not_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    assumptions = SimpleNamespace(note=notes.append)
    current = SimpleNamespace(assumptions=assumptions)
    monkeypatch.setattr(library_model.session, "current", lambda: current)

    built({"model_type": "llama", "hidden_size": 4})
    assert not notes

    unread = f"num_{len(notes)}_of_a_newer_version"  # not a word of the class's own file
    built({"model_type": "llama", "hidden_size": 4, unread: 8, "name": "x"})
    assert len(notes) == 1
    assert f"Transformers 5.0 does not read {unread} from" in notes[0]


def test_inference_has_no_labels_and_eager_attention_is_passed_on() -> None:
    model, inputs = built({"model_type": "llama"}, inference=True, attention="eager")

    assert shapes_of(inputs) == {"input_ids": (1, 16)}
    assert model.attention == "eager"


def test_class_that_the_file_names_is_taken_with_pictures_of_its_size() -> None:
    config = {"model_type": "llama", "architectures": ["ImageClassification"], "image_size": 32}

    assert shapes_of(built(config)[1]) == {"pixel_values": (1, 3, 32, 32), "labels": (1,)}


def test_adapters_go_to_the_matrices_of_attention_and_layers_are_checkpointed() -> None:
    model, _ = built({"model_type": "llama"}, lora_rank=8)

    assert model.config == SimpleNamespace(r=8, target_modules=["query"])
    assert built({"model_type": "llama"}, is_checkpointed=True)[0].is_checkpointed


def test_unet_of_sdxl_gets_prompt_and_sizes() -> None:
    config = {
        "_class_name": "UNet2DConditionModel", "sample_size": 64, "in_channels": 4,
        "cross_attention_dim": 2048, "addition_embed_type": "text_time",
        "projection_class_embeddings_input_dim": 2816, "addition_time_embed_dim": 256,
    }  # fmt: skip
    inputs = built(config)[1]

    assert tuple(inputs["sample"].shape) == (1, 4, 64, 64)
    assert tuple(inputs["encoder_hidden_states"].shape) == (1, 77, 2048)
    assert tuple(inputs["added_cond_kwargs"]["text_embeds"].shape) == (1, 1280)
    assert tuple(inputs["added_cond_kwargs"]["time_ids"].shape) == (1, 6)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "are quantized"),
        ({"model_type": "unheard-of"}, "has no model of type 'unheard-of'"),
        ({"_class_name": "FluxTransformer2DModel"}, "are unknown here"),
        ({"_class_name": "NoSuchModel"}, "are unknown here"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_way_on(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        built(config)

    assert refused.value.hint


def test_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigError, match="transformers cannot be imported") as refused:
        built({"model_type": "llama"})

    assert "pip install transformers" in refused.value.hint
