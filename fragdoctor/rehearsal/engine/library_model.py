"""A model from Transformers or Diffusers, built by its class from its configuration alone."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from fragdoctor.errors import ConfigError
from fragdoctor.rehearsal.engine import session

HEADS: Final = (
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModel",
)
"""Auto classes to try for a configuration that names no class; the first that fits is used.

Encoders and pairs of encoder and decoder have a class for causal language models too, which hardly
anybody means.
"""

DIFFUSERS: Final = ("UNet2DModel", "UNet2DConditionModel", "DiTTransformer2DModel", "AutoencoderKL")
"""Classes of Diffusers whose inputs are known here."""

DEFAULT_SEQ: Final = 2048
STORED: Final = ("quantization_config", "compression_config")
OWN_CODE: Final = "Build it in a function of your own: fragdoctor estimate --model pkg.module:build"

_Built = tuple[torch.nn.Module, dict[str, Any]]
"""A model, and the keyword arguments of a call."""


def build(
    text: str,
    *,
    seq: int,
    attention: str,
    is_checkpointed: bool,
    lora_rank: int,
    lora_targets: Sequence[str],
    inference: bool,
) -> _Built:
    """Return the model that a ``config.json`` describes, with random inputs for one sample.

    Args:
        text: the file's text.
        seq: tokens of the sample; 0 = not given.
        attention: ``eager``, or ``sdpa`` if the class has it.
        is_checkpointed: whether each layer is recomputed in the backward pass.
        lora_rank: rank of the adapters, which alone are trained then; 0 = all is trained.
        lora_targets: ``attention``, ``all-linear``, or names of layers.
        inference: whether nothing is trained.

    Raises:
        ConfigError: no library here has the class, or its inputs are not known.
    """
    config = json.loads(text)
    if any(config.get(key) for key in STORED):
        raise ConfigError(
            "The weights are quantized, and the class alone does not tell how they are stored.",
            hint="Leave --rehearse out: the formula counts them.",
        )
    name = config.get("_class_name")
    if name:
        model, inputs = _of_diffusers(config, str(name))
    else:
        model, inputs = _of_transformers(config, seq, attention, inference=inference)
    if lora_rank:
        model = _adapted(model, lora_rank, lora_targets)
    if is_checkpointed:
        _checkpoint(model, has_adapters=lora_rank > 0)
    return model, inputs


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as err:
        raise ConfigError(
            f"{name} cannot be imported by {sys.executable}.",
            hint=f"pip install {name} there, beside torch.",
        ) from err


def _of_transformers(
    config: dict[str, Any], seq: int, attention: str, *, inference: bool
) -> _Built:
    library = _library("transformers")
    kind, names = config.get("model_type"), config.get("architectures") or []
    rest = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
    try:
        made = library.AutoConfig.for_model(kind, **rest)
    except (ValueError, KeyError, TypeError) as err:
        raise ConfigError(
            f"Transformers {library.__version__} has no model of type {str(kind)[:60]!r}.",
            hint=f"Upgrade it. {OWN_CODE}",
        ) from err
    if getattr(made, "decoder_start_token_id", 0) is None:  # files from before Transformers 5
        made.decoder_start_token_id = 0
    # If nothing is requested, each class uses the best implementation that it has.
    how = {"attn_implementation": "eager"} if attention == "eager" else {}
    own = getattr(library, str(names[0]), None) if names else None
    if own is not None:
        model = own._from_config(made, **how)
    else:
        heads = (getattr(library, name) for name in HEADS)
        head = next((h for h in heads if type(made) in h._model_mapping), None)
        if head is None:
            raise ConfigError(f"Transformers has no class for {kind!r}.", hint=OWN_CODE)
        classifier = library.AutoModelForSequenceClassification
        if head is library.AutoModelForMaskedLM and type(made) in classifier._model_mapping:
            head = classifier  # as the formulas assume
            session.note(
                "No class is named, so the step classifies sequences; for masked language "
                'modeling, name the class under "architectures" in a config.json.'
            )
        model = head.from_config(made, **how)
    _note_unread(rest, type(made), model, str(library.__version__))
    return model, _inputs(model, made, seq, inference=inference)


def _note_unread(
    config: Mapping[str, Any], kind: type, model: torch.nn.Module, version: str
) -> None:
    """Note which numbers of a configuration nothing reads: another library version wrote it.

    They become attributes anyway, and the model is built with defaults in their place.
    """
    try:
        default, code = kind(), inspect.getsource(sys.modules[type(model).__module__])
    except (TypeError, ValueError, OSError):  # nothing to compare with
        return
    numbers = [name for name, value in config.items() if type(value) is int]
    unread = [name[:40] for name in numbers if not hasattr(default, name) and name not in code]
    if unread:
        session.note(
            f"Transformers {version} does not read {', '.join(unread[:4])} from the configuration: "
            "it uses its own defaults instead, so the model may differ."
        )


def _inputs(model: torch.nn.Module, config: Any, seq: int, *, inference: bool) -> dict[str, Any]:
    """Return the inputs of one sample, according to the parameters of the model's ``forward``."""
    takes = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "")
    if not seq:
        seq = min(DEFAULT_SEQ, getattr(config, "max_position_embeddings", None) or DEFAULT_SEQ)
        if main != "pixel_values":
            session.note(f"Sequences of {seq} tokens are assumed; --seq sets the length.")
    most = getattr(config, "max_target_positions", seq)  # of Whisper's decoder
    ids = torch.zeros((1, min(seq, most)), dtype=torch.int64)
    if "return_loss" in takes and hasattr(config, "vision_config"):  # pairs of text and image
        text = ids[:, : config.text_config.max_position_embeddings]
        picture = _image(config.vision_config)
        return {"input_ids": text, "pixel_values": picture, "return_loss": not inference}
    found: dict[str, Any]
    if main == "input_ids":
        found = {"input_ids": ids}
    elif main == "pixel_values":
        found = {"pixel_values": _image(config)}
    elif main == "input_features":
        length = 2 * config.max_source_positions
        found = {"input_features": torch.zeros((1, config.num_mel_bins, length))}
    else:
        raise ConfigError(f"The inputs of {type(model).__name__} are unknown here.", hint=OWN_CODE)
    if inference:
        is_pair = "decoder_input_ids" in takes
        return found | ({"decoder_input_ids": ids} if is_pair else {})
    if "labels" in takes:
        has_class = "Classification" in type(model).__name__
        found["labels"] = torch.zeros((1,), dtype=torch.int64) if has_class else ids
    elif "decoder_input_ids" in takes:
        found["decoder_input_ids"] = ids
    return found


def _image(config: Any) -> torch.Tensor:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.zeros((1, getattr(config, "num_channels", 3), height, width))


def _of_diffusers(config: Mapping[str, Any], name: str) -> _Built:
    own = getattr(_library("diffusers"), name, None)
    if own is None or name not in DIFFUSERS:
        raise ConfigError(f"The inputs of {name[:60]} are unknown here.", hint=OWN_CODE)
    model = own.from_config(dict(config))
    made, ids = model.config, torch.zeros((1,), dtype=torch.int64)
    size = made.sample_size
    height, width = (size, size) if isinstance(size, int) else size
    picture = torch.zeros((1, made.in_channels, height, width))
    if name == "AutoencoderKL":
        return model, {"sample": picture}
    if name == "DiTTransformer2DModel":
        return model, {"hidden_states": picture, "timestep": ids, "class_labels": ids}
    inputs: dict[str, Any] = {"sample": picture, "timestep": ids}
    width = getattr(made, "cross_attention_dim", None)
    if width:
        width = width if isinstance(width, int) else width[0]
        inputs["encoder_hidden_states"] = torch.zeros((1, 77, width))
    if getattr(made, "addition_embed_type", None) == "text_time":
        n_ids = 6
        pooled = made.projection_class_embeddings_input_dim - n_ids * made.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {
            "text_embeds": torch.zeros((1, pooled)),
            "time_ids": torch.zeros((1, n_ids)),
        }
    elif getattr(made, "class_embed_type", None) or getattr(made, "num_class_embeds", None):
        inputs["class_labels"] = ids
    return model, inputs


def _adapted(model: torch.nn.Module, rank: int, targets: Sequence[str]) -> torch.nn.Module:
    library = _library("peft")
    wanted: str | list[str] = list(targets)
    if list(targets) == ["all-linear"]:
        wanted = "all-linear"
    elif list(targets) == ["attention"]:
        # Submodules with a matrix, inside modules that are called attention.
        parts = (
            part
            for module in model.modules()
            if "attention" in type(module).__name__.lower()
            for part in module.named_children()
        )
        weights = ((name, getattr(part, "weight", None)) for name, part in parts)
        wanted = sorted({n for n, w in weights if isinstance(w, torch.Tensor) and w.dim() == 2})
    made = library.LoraConfig(r=rank, target_modules=wanted)
    try:
        adapted: torch.nn.Module = library.get_peft_model(model, made)
    except ValueError as err:
        raise ConfigError(
            f"--lora-targets {','.join(targets)} names no layer that PEFT adapts.",
            hint="Choose attention, all-linear, or names of linear layers.",
        ) from err
    return adapted


def _checkpoint(model: torch.nn.Module, *, has_adapters: bool) -> None:
    names = ("gradient_checkpointing_enable", "enable_gradient_checkpointing")
    switches = [getattr(model, name) for name in names if hasattr(model, name)]
    if not switches:
        raise ConfigError(f"{type(model).__name__} has no switch for checkpointing.", hint=OWN_CODE)
    switches[0]()
    if has_adapters and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()  # type: ignore[operator]
