"""Measures that save memory, each with its price, and a search for the cheapest that suffice.

Prices are published ones; if nobody published a number, the price is a phrase.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields, replace

from fragdoctor.estimation.formula import formula_needs
from fragdoctor.estimation.layer import attention_used
from fragdoctor.estimation.states import n_gpus
from fragdoctor.estimation.step import loss_of
from fragdoctor.estimation.training_choices import optimizer_of, precision_of
from fragdoctor.model.memory_estimate import Combination
from fragdoctor.model.workload import Attention, Loss, Workload

LORA_RANK: Final = 16
WORLDS: Final = (2, 4, 8)
MAX_COMBINATIONS: Final = 5
FUSED: Final = "adamw-fused"
"""As fast as plain AdamW, but without the copies in its step."""
# One extra forward pass, on top of a forward and a backward that costs two: Chen et al. 2016.
RECOMPUTATION: Final = 4 / 3
# Raschka 2023, "Finetuning LLMs with LoRA and QLoRA: insights from hundreds of experiments":
# 39% more time than LoRA on 16-bit weights.
QLORA_SLOWDOWN: Final = 1.39


class Measure(Struct, frozen=True):
    """One change, and its price.

    Attributes:
        changes: fields of the workload and their new values.
        slowdown: time of a step relative to the run without the change; None = a step takes longer
            but nobody has published how much in general.
        changes_training: whether other parameters are trained or precision is lost.
    """

    id: str
    title: str
    changes: Mapping[str, Any]
    cost: str = ""
    slowdown: float | None = 1.0
    changes_training: bool = False


_FLAGS: Final = {"lora_rank": "lora", "zero_stage": "zero", "loss": "logits"}
_DEFAULTS: Final = {f.name: f.default for f in fields(Workload)}


def options_of(changes: Mapping[str, Any]) -> str:
    """Return the command line options that set a workload's fields; defaults need no option."""
    words = []
    for name, value in changes.items():
        if value != _DEFAULTS[name] or name == "batch":
            flag = f"--{_FLAGS.get(name, name).replace('_', '-')}"
            text = ",".join(value) if isinstance(value, tuple) else str(value)
            words.append(flag if value is True else f"{flag} {text}")
    return " ".join(words)


def measures_for(workload: Workload) -> Sequence[Measure]:
    """Return the measures that could matter and are not in use yet, each on its own."""
    found = [m for m in _on_as_many_gpus(workload) if m.id != "offload_optimizer"]
    if workload.batch > 1:
        found.append(_micro_batch(workload, workload.batch // 2))
    if not workload.inference:
        found += {m.id: m for m in _on_more_gpus(workload)}.values()  # each on the most GPUs
    return found


def _on_as_many_gpus(workload: Workload) -> list[Measure]:
    return _for_inference(workload) if workload.inference else _for_training(workload)


def _on_more_gpus(workload: Workload) -> list[Measure]:
    """Return the ways to share the model among GPUs, each on 2, 4 and 8 or on those at hand."""
    if not workload.inference:
        worlds = (workload.world_size,) if workload.world_size > 1 else WORLDS
        stages = [stage for stage in (2, 3) if workload.zero_stage < stage]
        return [_sharded(stage, world) for world in worlds for stage in stages]
    return [
        Measure(
            "tensor_parallel", f"tensor parallel on {n} GPUs", {"tensor_parallel": n},
            "two reductions per layer between the GPUs",
        )
        for n in WORLDS
        if workload.tensor_parallel == 1 and workload.shape.n_heads % n == 0
    ]  # fmt: skip


def _for_training(workload: Workload) -> list[Measure]:
    precision, optimizer = precision_of(workload.dtype), optimizer_of(workload.optimizer)
    is_full = not workload.lora_rank
    writes = attention_used(workload, precision) is not Attention.FLASH
    narrow = {} if precision.compute < 4 else {"dtype": "amp-bf16"}
    base: dict[str, Any] = {"lora_rank": LORA_RANK, "master_weights": False, "grad_dtype": ""}
    if precision.weight >= 4:
        base["dtype"] = "bf16"
    away = tuple(dict.fromkeys((*workload.offload, "optimizer")))
    rows = (
        (workload.checkpointing == "none",
         Measure("checkpointing", "checkpoint each layer",
                 {"checkpointing": "full"}, "about 33% more compute: layers run forward twice",
                 RECOMPUTATION)),
        (not workload.expandable_segments,
         Measure("expandable_segments", "expandable segments", {"expandable_segments": True},
                 "none: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")),
        (writes and workload.shape.has_flash,
         Measure("flash_attention", "fused attention, no S x S scores",
                 {"attention": Attention.FLASH, **narrow}, "none; usually faster")),
        (workload.shape.has_lm_head and loss_of(workload) is not Loss.FUSED
         and not workload.keeps_logits,
         Measure("fused_loss", "fused loss", {"loss": Loss.FUSED},
                 "needs a kernel of Liger or cut cross-entropy for the model")),
        (precision.compute >= 4,
         Measure("autocast", "autocast to bf16", {"dtype": "amp-bf16"},
                 "weights stay fp32, with copies in 16 bits")),
        (precision.weight >= 4 and is_full,
         Measure("bf16", "weights and states in bf16", {"dtype": "bf16"},
                 "small updates are rounded away without fp32 master weights",
                 changes_training=True)),
        (optimizer.step_copies and optimizer.name in ("adam", "adamw"),
         Measure("fused_optimizer", "fused AdamW", {"optimizer": FUSED},
                 "none: AdamW(fused=True) makes no temporary copy")),
        (optimizer.copies >= 2,
         Measure("8bit_optimizer", "8-bit AdamW",
                 {"optimizer": "adamw-8bit"},
                 "needs bitsandbytes; states are quantized in blocks")),
        ("optimizer" not in workload.offload and optimizer.copies,
         Measure("offload_optimizer", "optimizer states on the host",
                 {"offload": away}, "each step sends all gradients to the host and all weights "
                 "back, and updates on the CPU", None)),
        (is_full,
         Measure("lora", f"LoRA of rank {LORA_RANK}", base,
                 "different training: the base stays frozen", changes_training=True)),
        (not precision.is_quantised,
         Measure("qlora",
                 f"QLoRA: 4-bit base, LoRA of rank {LORA_RANK}" if is_full else "4-bit base",
                 {**(base if is_full else {}), "dtype": "int4"},
                 "about 39% slower than LoRA on 16-bit weights; the base is quantized",
                 QLORA_SLOWDOWN, changes_training=True)),
    )  # fmt: skip
    return [measure for applies, measure in rows if applies]


def _for_inference(workload: Workload) -> list[Measure]:
    precision = precision_of(workload.dtype)
    rows = (
        (precision.weight >= 4,
         Measure("bf16", "weights in bf16", {"dtype": "bf16"}, "none for most models")),
        (not workload.kv_dtype and precision.compute > 1,
         Measure("kv8", "KV cache in 8 bits", {"kv_dtype": "fp8"},
                 "some accuracy; the server must support it")),
        *((precision.linear_weight > precision_of(kind).linear_weight,
           Measure(kind, f"weights in {bits} bits", {"dtype": kind}, "some accuracy",
                   changes_training=True))
          for kind, bits in (("int8", 8), ("int4", 4))),
    )  # fmt: skip
    return [measure for applies, measure in rows if applies]


def _micro_batch(workload: Workload, batch: int) -> Measure:
    if workload.inference:
        return Measure("half_batch", f"batch {batch}", {"batch": batch}, "fewer sequences at once")
    times = -(-workload.batch // batch)
    passes = times * workload.grad_accumulation
    how_often = "twice" if times == 2 else f"{times} times"
    return Measure(
        "half_batch",
        f"micro batch {batch}, gradients accumulated {how_often}",
        {"batch": batch, "grad_accumulation": passes},
        "the same result; smaller, slower matrix products",
    )


def _sharded(stage: int, world: int) -> Measure:
    name, cost = {
        2: ("ZeRO-2", f"needs {world} GPUs; no more traffic than data parallelism"),
        3: ("ZeRO-3 / FSDP", "parameters are sent too: 1.5 times the traffic of data parallelism"),
    }[stage]
    changes = {"zero_stage": stage, "world_size": world}
    return Measure(f"zero{stage}", f"{name} on {world} GPUs", changes, cost)


# The search

Measures = tuple[Measure, ...]


def cheapest_combinations(workload: Workload, usable_bytes: int) -> Sequence[Combination]:
    """Return the cheapest measures, alone or combined, that make a workload fit for certain.

    There is one for each way of running it that differs in more than speed: the same training on
    one GPU, with the optimizer on the host, or on more GPUs; adapters on the weights as they are,
    or on quantized weights. For each way it is the combination that slows a step down least, then
    the one with the fewest measures that cost anything; combinations that only add to another one
    are left out.
    """
    found: list[Measures] = []
    for way in _ways(workload):
        best = _cheapest(workload, way, usable_bytes)
        if best and not any({m.id for m in other} <= {m.id for m in best} for other in found):
            found.append(best)
    found.sort(key=lambda measures: _price(workload, measures))
    return [_combined(workload, measures) for measures in found[:MAX_COMBINATIONS]]


def savings_of(workload: Workload) -> Sequence[Combination]:
    """Return the measures that each alone make a workload need less, the least first."""
    now = formula_needs(workload).high_bytes
    found = (_combined(workload, (measure,)) for measure in measures_for(workload))
    less = (one for one in found if one.needs_high_bytes < now)
    return sorted(less, key=lambda one: one.needs_high_bytes)


def _price(workload: Workload, measures: Measures) -> tuple[int, bool, float, int, int]:
    slowdown = _slowdown(measures)
    return (
        n_gpus(applied(workload, measures)),
        any(m.changes_training for m in measures),
        math.inf if slowdown is None else slowdown,
        sum(not m.cost.startswith("none") for m in measures),
        len(measures),
    )


def _slowdown(measures: Measures) -> float | None:
    """Return the time of a step relative to one without the measures; None = not published."""
    published = [m.slowdown for m in measures if m.slowdown is not None]
    return round(math.prod(published), 2) if len(published) == len(measures) else None


def _ways(workload: Workload) -> Iterator[Sequence[Sequence[Measure | None]]]:
    """Yield the axes of each way; a combination takes one measure, or none, from each axis.

    The last axis distinguishes the way; if that axis has no measure, the way is left out.
    """
    found = {m.id: m for m in _on_as_many_gpus(workload)}
    others = _on_more_gpus(workload)

    def axis(*names: str) -> Sequence[Measure | None]:
        return tuple(found[name] for name in names if name in found)

    def free(*names: str) -> Sequence[Measure | None]:
        return (None, *axis(*names))

    if workload.inference:
        own = (free("bf16", "int8", "int4"), free("kv8"))
        ways: list[Sequence[Sequence[Measure | None]]] = [own, (*own, others)]
    else:
        kept = tuple(
            map(free, ("expandable_segments", "flash_attention", "fused_loss", "checkpointing"))
        )
        optimizer, precision = free("fused_optimizer", "8bit_optimizer"), free("autocast", "bf16")
        ways = [
            (*kept, optimizer, precision),
            (*kept, precision, axis("offload_optimizer")),
            (*kept, optimizer, precision, others),
            (*kept, axis("lora")),
            (*kept, axis("qlora")),
        ]
    yield from (way for way in ways if way[-1])


def _cheapest(
    workload: Workload, axes: Sequence[Sequence[Measure | None]], usable_bytes: int
) -> Measures | None:
    """Return the cheapest choice that fits, with a smaller micro batch only if necessary."""
    choices = [tuple(m for m in choice if m) for choice in product(*axes)]
    choices.sort(key=lambda choice: _price(workload, choice))

    def fits(changed: Workload) -> bool:
        return formula_needs(changed).high_bytes <= usable_bytes

    most = applied(workload, tuple(m for m in (axis[-1] for axis in axes) if m))
    if not fits(replace(most, batch=1)):
        return None
    for batch in dict.fromkeys((workload.batch, 1)):
        smaller = (_micro_batch(workload, batch),) if batch < workload.batch else ()
        for choice in choices:
            measures = (*choice, *smaller)
            if measures and fits(applied(workload, measures)):
                return measures
    return None


def applied(workload: Workload, measures: Measures) -> Workload:
    """Return a workload with several measures, each on top of the one before."""
    for measure in measures:
        workload = replace(workload, **measure.changes)
    return workload


def _combined(workload: Workload, measures: Measures) -> Combination:
    changed = applied(workload, measures)
    needs = formula_needs(changed)
    return Combination(
        measures=tuple(m.id for m in measures),
        title=", ".join(m.title for m in measures),
        option=options_of({k: v for m in measures for k, v in m.changes.items()}),
        slowdown=_slowdown(measures),
        cost="; ".join(dict.fromkeys(m.cost for m in measures if m.cost)),
        changes_training=any(m.changes_training for m in measures),
        n_gpus=n_gpus(changed),
        needs_low_bytes=needs.low_bytes,
        needs_high_bytes=needs.high_bytes,
    )
