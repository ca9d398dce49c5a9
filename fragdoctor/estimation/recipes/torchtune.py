"""torchtune's recipe YAML (https://docs.pytorch.org/torchtune/stable/deep_dives/configs.html).

A component is the path of a function; the functions for models have the size in their names.
Parameters, gradients, states and adapters are all in ``dtype``, without autocast. The command line
of ``tune run``, not the file, says how many GPUs share them.
"""

from __future__ import annotations

import re
from itertools import product
from typing import Any, Final

from fragdoctor.estimation.model_shapes import preset_of
from fragdoctor.estimation.recipes import values
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import Format, Reading, facts

_MOST_GAPS: Final = 4


def model(value: Any) -> str:
    """Return the known model that a builder such as ``lora_llama3_1_8b`` makes.

    Between two digits, an underscore is a point or a dash: the one that makes a known name.

    Raises:
        UnsayableError: the builder is not known.
    """
    builder = str(value).rpartition(".")[2]
    for prefix in ("qlora_", "lora_"):
        builder = builder.removeprefix(prefix)
    parts = re.split(r"(?<=\d)_(?=\d)", builder)[:_MOST_GAPS]
    for marks in product(".-", repeat=len(parts) - 1):
        found = preset_of("".join(map("".join, zip(parts, (*marks, ""), strict=True))))
        if found is not None:
            return found.name
    raise values.UnsayableError("is not a model whose size is known; name one on the command line")


_LOSSES: Final = ("linearcrossentropy", "chunked", "cewithchunked", "liger")
_RULES: Final = facts(
    ("model", model, "model._component_"),
    ("rank", values.count, "model.lora_rank"),
    ("modules", values.anything, "model.lora_attn_modules"),
    ("mlp", True, "model.apply_lora_to_mlp"),
    ("dora", True, "model.use_dora"),
    ("quantised", "int4", "model.quantize_base"),
    ("seq", values.count, "tokenizer.max_seq_len dataset.max_seq_len max_seq_len"),
    ("batch", values.count, "batch_size", 1),
    ("grad_accumulation", values.count, "gradient_accumulation_steps"),
    ("weights", values.dtype, "dtype"),
    ("optimizer", values.optimizer, "optimizer._component_"),
    ("fused", True, "optimizer.fused"),
    ("momentum", True, "optimizer.momentum"),
    ("checkpointing", "full", "enable_activation_checkpointing"),
    ("offload_activations", True, "enable_activation_offloading"),
    ("offload_parameters offload_optimizer", True, "fsdp_cpu_offload"),
    ("engine", "fsdp", "custom_sharded_layers"),
    ("tensor_parallel", values.count, "tensor_parallel_dim"),
    ("context_parallel", values.count, "context_parallel_dim"),
    ("shard_degree", values.count, "data_parallel_shard_dim"),
    ("replicas", values.count, "data_parallel_replicate_dim"),
    ("expert_parallel", values.count, "expert_parallel_degree"),
    ("gpus_per_node", values.count, "nproc_per_node nproc-per-node"),
    ("n_nodes", values.count, "nnodes"),
    ("offload_optimizer", True, "optimizer_cpu_offload"),
    ("loss", values.anything, "loss._component_"),
)


def _complete(reading: Reading, entries: Entries) -> None:
    _complete_adapter(reading, entries)
    reading.refine_optimizer("fused", {"adamw": "adamw-fused"})
    reading.refine_optimizer("momentum", {"sgd": "sgd-momentum"})
    loss = reading.drop("loss")
    if loss and any(kind in loss.text.lower() for kind in _LOSSES):
        reading.derive("logits", "chunked", loss)
    _complete_sharing(reading)
    if loss and "dpo" in loss.text.lower():
        batch = reading.facts.pop("batch")
        reading.derive("batch", 2 * batch.value, batch, f"{batch.text} pairs")


def _complete_adapter(reading: Reading, entries: Entries) -> None:
    builder = str(entries.get("model._component_", "")).rpartition(".")[2]
    modules, mlp = reading.facts.pop("modules", None), reading.facts.pop("mlp", None)
    if "lora" not in builder and "rank" not in reading.facts:
        return
    reading.take("adapter", "lora", "model._component_", builder)
    reading.default("rank", 8, "model.lora_rank")
    if builder.startswith("qlora"):
        reading.take("quantised", "int4", "model._component_", builder)
    names = modules.value if modules and isinstance(modules.value, list) else []
    plain = ["o_proj" if name == "output_proj" else str(name) for name in names]
    if mlp is not None:
        plain += ["gate_proj", "up_proj", "down_proj"]
    if plain:
        text = f"{values.shown(names)}{', MLP' if mlp else ''}"
        reading.take("targets", values.targets(plain), "model.lora_attn_modules", text)
    reading.notes.append(
        f"{reading.source}: torchtune keeps adapters in its dtype; they are counted in fp32."
    )


def _complete_sharing(reading: Reading) -> None:
    """Note that FSDP is used if an entry would mean nothing without it."""
    for name in ("offload_parameters", "shard_degree", "gpus_per_node", "tensor_parallel"):
        if reading.value(name) is True or (reading.value(name) or 1) > 1:
            reading.default("engine", "fsdp", reading.facts[name].key, "FSDP")
    if "engine" not in reading.facts and "n_gpus" not in reading.facts:
        reading.notes.append(
            f"{reading.source} does not say how many GPUs tune run uses; one is counted. For a "
            "distributed recipe, add --fsdp --world-size N."
        )


FORMAT: Final = Format(
    title="torchtune recipe",
    signs=(
        "model._component_ tokenizer._component_", "model._component_ checkpointer._component_",
        "model._component_ optimizer._component_",
    ),
    rules=_RULES,
    complete=_complete,
)  # fmt: skip
