"""Arguments of Transformers' Trainer and of TRL, as YAML or on a command line.

Names and defaults are those of ``transformers.TrainingArguments`` (4.57) and of TRL's
``ModelConfig``, ``SFTConfig``, ``DPOConfig`` and ``GRPOConfig`` (0.29):
https://huggingface.co/docs/trl. Axolotl and LLaMA-Factory pass the same arguments on and share the
rules here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from fragdoctor.estimation.recipes import values
from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.entries import Format, Reading, facts
from fragdoctor.estimation.recipes.launch import FSDP_RULES, complete_fsdp, stage
from fragdoctor.model.recipe import Bearing, UnusedEntry

_EVAL_BATCHES: Final = ("per_device_eval_batch_size", "eval_batch_size")


TRAINER_RULES: Final = FSDP_RULES | facts(
    ("batch", values.count, "per_device_train_batch_size", 8),
    ("grad_accumulation", values.count, "gradient_accumulation_steps"),
    ("checkpointing", "full", "gradient_checkpointing"),
    ("optimizer", values.optimizer, "optim", "adamw_torch_fused"),
    ("mixed", "bf16", "bf16"),
    ("mixed", "fp16", "fp16"),
    ("attention", values.attention, "attn_implementation"),
    ("engine", "fsdp", "fsdp"),
    ("logits", "fused", "use_liger_kernel use_liger_loss use_liger"),
)
"""Entries that all programs built on the Trainer share."""


def complete(reading: Reading, entries: Entries) -> None:
    """Derive what all programs built on the Trainer have in common."""
    found = reading.references.get("deepspeed", entries.get("deepspeed") is True)
    if found:
        reading.take("engine", "deepspeed", "deepspeed", found)
    if reading.value("adapter") is None and "adapter" not in reading.unsayable:
        for fact in ("rank", "targets", "dora"):
            reading.drop(fact)
        _excuse(reading, lambda one: one.key.rpartition(".")[2].startswith("lora_"))
    batch = reading.value("batch") or 0
    _excuse(  # an evaluation pass keeps no activations
        reading,
        lambda one: one.key in _EVAL_BATCHES and one.value.isdecimal() and int(one.value) <= batch,
    )
    complete_fsdp(reading, entries)


def _excuse(reading: Reading, is_harmless: Callable[[UnusedEntry], bool]) -> None:
    """Note of entries that would matter that they do not here."""
    for i, entry in enumerate(reading.unused):
        if entry.bearing is Bearing.MATTERS and is_harmless(entry):
            reading.unused[i] = UnusedEntry(entry.key, entry.value, Bearing.NONE)


_PAIRED: Final = ("dpo", "ipo", "orpo", "simpo", "cpo", "rm")
_MORE: Final = ("dpo", "ipo", "kto", "grpo", "gdpo", "ebft", "ppo")
"""Losses that compare with a second model, or generate on the same GPU."""


def count_preferences(reading: Reading, kind: str) -> None:
    """Count the pairs of a preference loss, whose answers go through in one pass."""
    found = reading.facts.pop("batch", None) if kind in _PAIRED else None
    if found is not None:
        reading.derive("batch", 2 * found.value, found, f"{found.text} pairs")
        reading.notes.append(f"{reading.source}: chosen and rejected answers share one pass.")
    if kind in _MORE:
        reading.notes.append(
            f"{reading.source}: a reference model or generation on the same GPU, if there is any, "
            "is not counted; it needs more."
        )


def scales_unquantised(reading: Reading) -> None:
    """Count a 4-bit base without double quantization, so that its scales stay in fp32."""
    found = reading.facts.get("quantised")
    if found is not None and found.value == "int4":
        reading.facts["quantised"] = replace(found, value="nf4")


_RULES: Final = TRAINER_RULES | facts(
    ("model", values.name, "model_name_or_path model"),
    (
        "weights",
        values.dtype,
        "torch_dtype dtype model_init_kwargs.torch_dtype model_init_kwargs.dtype",
    ),
    ("attention", values.attention, "model_init_kwargs.attn_implementation"),
    ("adapter", "lora", "use_peft use_lora lora_enable"),
    ("stage", stage, "zero_stage"),
    ("source", values.count, "max_source_length"),
    ("target", values.count, "max_target_length"),
    ("rank", values.count, "lora_r lora_rank lora_dim"),
    ("targets", values.targets, "lora_target_modules"),
    ("dora", True, "use_dora"),
    ("quantised", "int4", "load_in_4bit use_4bit"),
    ("quantised", "int8", "load_in_8bit"),
    ("seq", values.count, "max_length max_seq_length max_seq_len model_max_length block_size"),
    ("prompt", values.count, "max_prompt_length"),
    ("completion", values.count, "max_completion_length max_new_tokens response_length"),
    ("offload_activations", True, "activation_offloading"),
    ("loss", values.anything, "loss_type"),
    ("nested", True, "use_bnb_nested_quant"),
    ("n_gpus", values.count, "num_processes"),
)

_KINDS: Final = (
    ("grpo", "grpo rloo ppo online xpo nash gkd sdpo gold",
     {"num_generations", "reward_funcs", "max_completion_length"}),
    ("dpo", "dpo orpo cpo simpo reward", {"beta", "max_prompt_length", "precompute_ref_log_probs"}),
    ("kto", "kto", set[str]()),
    ("sft", "sft",
     {"dataset_mixture", "dataset_name", "max_seq_length", "packing", "use_liger_kernel",
      "dataset_text_field", "assistant_only_loss", "max_length", "use_peft"}),
)  # fmt: skip
"""Kind of training -> parts of the names of its programs, and entries that only it has."""
PROGRAM: Final = "(program)"
"""The entry that holds the name of a command line's program."""


def kind_of(entries: Mapping[str, Any]) -> str:
    """Return the kind of training: ``sft``, ``dpo``, ``kto``, ``grpo`` or "" (a plain Trainer)."""
    whole = str(entries.get(PROGRAM, ""))
    program = whole.rpartition("/")[2].removesuffix(".py")
    for kind, names, _ in _KINDS:
        if any(name in program for name in names.split()):
            return kind
    kinds = (kind for kind, _, own in _KINDS if entries.keys() & own)
    found = next(kinds, "sft" if _is_trl(whole) else "")
    is_plain = found == "sft" and "model_max_length" in entries and not _is_trl(whole)
    return "" if is_plain else found


def _is_trl(program: str) -> bool:
    """Return whether a program is part of TRL."""
    return program.startswith(("trl/", "trl ")) or "examples/scripts/" in program


def _complete(reading: Reading, entries: Entries) -> None:
    kind = kind_of(entries)
    _defaults(reading, entries, kind)
    nested = reading.drop("nested")
    if kind and nested is None:
        scales_unquantised(reading)
    _own_adapter(reading, entries)
    _length(reading, kind)
    loss = reading.drop("loss")
    if kind == "sft" and loss and "chunked" in loss.text:
        reading.derive("logits", "chunked", loss)
    count_preferences(reading, kind)
    complete(reading, entries)


def _defaults(reading: Reading, entries: Entries, kind: str) -> None:
    """Note the defaults of TRL and the Trainer for missing entries."""
    if kind:
        if "gradient_checkpointing" not in entries:
            reading.default("checkpointing", "full", "gradient_checkpointing", "true")
        if not entries.keys() & {"bf16", "fp16"}:
            reading.default("mixed", "bf16", "bf16", "true")
        if kind != "grpo":
            reading.default("seq", 1024, "max_length")
        else:
            reading.default("completion", 512, "max_completion_length")
    reading.default("weights", "fp32", "dtype", "float32")


def _own_adapter(reading: Reading, entries: Entries) -> None:
    """Decide whether adapters are trained if no entry switches them on.

    TRL trains no adapters without ``use_peft``, whatever else is set; a user's own program that
    gets a rank does.
    """
    rank, program = reading.facts.get("rank"), str(entries.get(PROGRAM, ""))
    if rank is not None and not entries.keys() & {"use_peft", "use_lora", "lora_enable"}:
        if program and not _is_trl(program):
            reading.derive("adapter", "lora", rank)
        else:
            reading.notes.append(
                f"{reading.source}: {rank.key} without use_peft trains no adapters in TRL; --lora "
                f"{rank.value} counts them."
            )
    if reading.value("adapter"):
        text = "as PEFT for Llama: q_proj, v_proj"
        reading.default("rank", 16, "lora_r")
        reading.default("targets", "q_proj,v_proj", "lora_target_modules", text)


def _joined(reading: Reading, *names: str) -> None:
    """Count parts as one sequence, because programs for language models join them."""
    found = [reading.facts.pop(name) for name in names if name in reading.facts]
    if found:
        key, text = " + ".join(p.key for p in found), " + ".join(p.text for p in found)
        default = all(part.is_default for part in found)
        reading.take("seq", sum(p.value for p in found), key, text, is_default=default)


def _length(reading: Reading, kind: str) -> None:
    """Count prompt and completion together if each has a limit of its own."""
    _joined(reading, "source", "target")
    if kind != "grpo":
        reading.drop("prompt")
        reading.drop("completion")
        return
    if "prompt" not in reading.facts:
        reading.notes.append(f"{reading.source}: prompts are unlimited and not counted; set --seq.")
    _joined(reading, "prompt", "completion")


FORMAT: Final = Format(
    title="arguments of TRL or Transformers",
    signs=("model_name_or_path", "per_device_train_batch_size"),
    rules=_RULES,
    sections=("fsdp_config",),
    references=("deepspeed", "accelerate_config"),
    complete=_complete,
)  # fmt: skip
