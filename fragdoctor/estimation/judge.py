"""Turns footprints into an answer: fits or not, the largest batch, what each measure saves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fragdoctor.estimation.layers import attention_used
from fragdoctor.estimation.optimizers import ADAM_8BIT, ZERO, optimizer_of
from fragdoctor.estimation.precision import AUTOCAST_DOC, QLORA, precision_of
from fragdoctor.model.estimate import Estimate, Fit, Footprint, GpuModel, Saving
from fragdoctor.model.workload import Attention, Workload

CHECKPOINTING: Final = "Chen et al. 2016, https://arxiv.org/abs/1604.06174"
FLASH: Final = "Dao et al. 2022, https://arxiv.org/abs/2205.14135"
LORA: Final = "Hu et al. 2021, https://arxiv.org/abs/2106.09685"
LORA_RANK: Final = 16
SHARDS: Final = 8


@dataclass(frozen=True, slots=True)
class Measure:
    """One change, how to ask for it here, and its price."""

    id: str
    title: str
    option: str
    workload: Workload
    cost: str
    source: str = ""


def measures_for(workload: Workload) -> Sequence[Measure]:
    """Return the measures that are not taken yet and could matter."""
    if workload.inference:
        return _for_inference(workload)
    found: list[Measure] = []
    if workload.shape.has_layers and workload.seq:
        found += _for_activations(workload)
    found += _for_states(workload)
    return found


def _for_activations(workload: Workload) -> list[Measure]:
    found: list[Measure] = []
    if workload.checkpointing == "none":
        found.append(
            Measure("checkpointing", "checkpoint each layer", "--checkpointing full",
                    replace(workload, checkpointing="full"),
                    "about 33 % more compute: each layer runs forward twice", CHECKPOINTING)
        )  # fmt: skip
        if workload.shape.n_layers > 3:
            found.append(
                Measure("checkpointing_sqrt", "checkpoint every sqrt(L) layers",
                        "--checkpointing sqrt", replace(workload, checkpointing="sqrt"),
                        "about 33 % more compute", CHECKPOINTING)
            )  # fmt: skip
    if attention_used(workload, precision_of(workload.dtype)) is not Attention.FLASH:
        sixteen = workload.dtype if precision_of(workload.dtype).compute < 4 else "amp-bf16"
        fused = replace(workload, attention=Attention.SDPA, dtype=sixteen)
        found.append(
            Measure("flash_attention", "fused attention, no S x S scores",
                    "--attention flash" + (f" --dtype {sixteen}" if sixteen != workload.dtype
                                           else ""),
                    fused, "none; usually faster", FLASH)
        )  # fmt: skip
    if workload.batch > 1:
        half = workload.batch // 2
        found.append(
            Measure("half_batch", f"micro batch {half}, gradients accumulated twice",
                    f"--batch {half} --grad-accumulation {2 * workload.grad_accumulation}",
                    replace(workload, batch=half,
                            grad_accumulation=2 * workload.grad_accumulation),
                    "the same result; smaller, slower matrix products",
                    "https://docs.pytorch.org/docs/stable/notes/amp_examples.html")
        )  # fmt: skip
    return found


def _for_states(workload: Workload) -> list[Measure]:
    found: list[Measure] = []
    if precision_of(workload.dtype).compute >= 4:
        found.append(
            Measure("autocast", "autocast to bf16", "--dtype amp-bf16",
                    replace(workload, dtype="amp-bf16"),
                    "weights stay fp32; copies of them in 16 bits", AUTOCAST_DOC)
        )  # fmt: skip
    if precision_of(workload.dtype).weight >= 4 and not workload.lora_rank:
        found.append(
            Measure("bf16", "weights and states in bf16", "--dtype bf16",
                    replace(workload, dtype="bf16"),
                    "small updates are rounded away without fp32 master weights",
                    "Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740")
        )  # fmt: skip
    optimizer = optimizer_of(workload.optimizer)
    if optimizer.copies >= 2:
        found.append(
            Measure("8bit_optimizer", "8-bit AdamW", "--optimizer adamw-8bit",
                    replace(workload, optimizer="adamw-8bit"),
                    "needs bitsandbytes; states are quantised in blocks", ADAM_8BIT)
        )  # fmt: skip
    if optimizer.copies >= 2 and workload.checkpointing == "none" and workload.shape.has_layers:
        found.append(
            Measure(
                "checkpointing_8bit",
                "checkpoint each layer, and 8-bit AdamW",
                "--checkpointing full --optimizer adamw-8bit",
                replace(workload, checkpointing="full", optimizer="adamw-8bit"),
                "both prices together",
                f"{CHECKPOINTING}; {ADAM_8BIT}",
            )
        )
    if optimizer.step_copies and optimizer.name in ("adam", "adamw"):
        found.append(
            Measure("fused_optimizer", "fused AdamW", "--optimizer adamw-fused",
                    replace(workload, optimizer="adamw-fused"),
                    "none: AdamW(fused=True) makes no temporary copy",
                    "https://docs.pytorch.org/docs/stable/optim.html")
        )  # fmt: skip
    if not workload.lora_rank:
        found += _lora(workload)
    found += _sharding(workload)
    return found


def _lora(workload: Workload) -> list[Measure]:
    rank = LORA_RANK
    lora = replace(workload, lora_rank=rank, master_weights=False)
    found = [
        Measure("lora", f"LoRA of rank {rank}", f"--lora {rank}", lora,
                "another way of training: the base stays frozen", LORA)
    ]  # fmt: skip
    if workload.shape.has_layers:
        found.append(
            Measure("qlora", f"QLoRA: 4-bit base, LoRA of rank {rank}",
                    f"--lora {rank} --dtype int4", replace(lora, dtype="int4"),
                    "slower; the base is quantised", QLORA)
        )  # fmt: skip
    return found


def _sharding(workload: Workload) -> list[Measure]:
    world = workload.world_size if workload.world_size > 1 else SHARDS
    found = []
    for stage in (2, 3):
        if workload.zero_stage < stage:
            name = "ZeRO-3 / FSDP" if stage == 3 else "ZeRO-2"
            cost = (
                "parameters travel too: 1.5 times the traffic of data parallelism"
                if stage == 3
                else f"needs {world} GPUs; no more traffic than data parallelism"
            )
            found.append(
                Measure(f"zero{stage}", f"{name} on {world} GPUs",
                        f"--zero {stage} --world-size {world}",
                        replace(workload, zero_stage=stage, world_size=world), cost, ZERO)
            )  # fmt: skip
    return found


def _for_inference(workload: Workload) -> list[Measure]:
    found = []
    if precision_of(workload.dtype).weight >= 4:
        found.append(
            Measure("bf16", "weights in bf16", "--dtype bf16", replace(workload, dtype="bf16"),
                    "none for most models", AUTOCAST_DOC)
        )  # fmt: skip
    for kind, title in (("int8", "weights in 8 bits"), ("int4", "weights in 4 bits")):
        if precision_of(workload.dtype).linear_weight > precision_of(kind).linear_weight:
            found.append(
                Measure(kind, title, f"--dtype {kind}", replace(workload, dtype=kind),
                        "some accuracy", QLORA)
            )  # fmt: skip
    if not workload.kv_dtype and precision_of(workload.dtype).compute > 1:
        found.append(
            Measure("kv8", "KV cache in 8 bits", "--kv-dtype fp8",
                    replace(workload, kv_dtype="fp8"), "some accuracy; the server must support it",
                    "https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache.html")
        )  # fmt: skip
    if workload.batch > 1:
        half = workload.batch // 2
        found.append(
            Measure("half_batch", f"batch {half}", f"--batch {half}",
                    replace(workload, batch=half), "half the sequences at once")
        )  # fmt: skip
    return found


# Memory of a workload, by either estimator.
Footprinter = Callable[[Workload], Footprint]

MAX_BATCH: Final = 1 << 20
MIN_LENGTH: Final = 128


@dataclass(frozen=True, slots=True)
class Estimator:
    """How footprints are found: by formulas over a shape, or by a trace of the user's model.

    Attributes:
        footprint_of: called for the workload, and for it with other batches and settings.
        error: how far off the estimator was on recordings, one sentence.
        measures_of: the changes of a workload that this estimator can answer for.
        varies_length: whether it can answer for another sequence length.
    """

    footprint_of: Footprinter
    error: str = ""
    measures_of: Callable[[Workload], Sequence[Measure]] = measures_for
    varies_length: bool = True


def judged(workload: Workload, estimator: Estimator, gpus: Sequence[GpuModel]) -> Estimate:
    """Return the estimate of a workload on each of the GPUs, and what would save memory."""
    footprint = estimator.footprint_of(workload)
    return Estimate(
        workload=workload,
        footprint=footprint,
        fits=tuple(_fit(workload, footprint, estimator, gpu) for gpu in gpus),
        savings=tuple(_savings(workload, footprint, estimator, gpus)),
        error=estimator.error,
    )


def _fit(workload: Workload, footprint: Footprint, estimator: Estimator, gpu: GpuModel) -> Fit:
    usable, batches = gpu.usable_bytes, []
    for seq in _other_lengths(workload) if estimator.varies_length else ():
        batch = largest_batch(replace(workload, seq=seq), estimator.footprint_of, usable)
        if batch is not None:
            batches.append((seq, batch))
    return Fit(
        gpu=gpu,
        fits=footprint.reserved_bytes <= usable,
        margin_bytes=usable - footprint.reserved_bytes,
        largest_batch=largest_batch(workload, estimator.footprint_of, usable),
        other_lengths=tuple(batches),
    )


def _other_lengths(workload: Workload) -> Sequence[int]:
    seq = workload.seq
    if not seq:
        return ()
    limit = workload.shape.max_positions or 4 * seq
    return tuple(s for s in (seq // 2, 2 * seq, 4 * seq) if MIN_LENGTH <= s <= limit)


def largest_batch(workload: Workload, footprint_of: Footprinter, usable_bytes: int) -> int | None:
    """Return the largest batch whose reserved memory fits; 0 = not even one.

    None where memory does not depend on the batch, as when the layers are not known.
    """
    reserved: dict[int, int] = {}

    def needs(batch: int) -> int:
        if batch not in reserved:
            reserved[batch] = footprint_of(replace(workload, batch=batch)).reserved_bytes
        return reserved[batch]

    if needs(1) > usable_bytes:
        return 0
    low, high = 1, 2
    # Memory is nearly linear in the batch: aim where the line meets the limit, then a bit beyond.
    while needs(high) <= usable_bytes:
        slope = (needs(high) - needs(low)) / (high - low)
        room = (usable_bytes - needs(high)) / slope if slope > 0 else MAX_BATCH
        low, high = high, high + max(1, math.ceil(1.01 * room))
        if high > MAX_BATCH:
            return None
    while high - low > max(1, low // 64):  # to within 2 %: the estimate is no finer
        share = (usable_bytes - needs(low)) / max(1, needs(high) - needs(low))
        aimed = low + round(share * (high - low))
        # Never closer than an eighth to an end, so that each step narrows the range.
        edge = max(1, (high - low) // 8)
        middle = min(max(aimed, low + edge), high - edge)
        low, high = (middle, high) if needs(middle) <= usable_bytes else (low, middle)
    return low


def _savings(
    workload: Workload, footprint: Footprint, estimator: Estimator, gpus: Sequence[GpuModel]
) -> list[Saving]:
    gpu = gpus[0] if gpus else None
    found = [
        _saving(measure, footprint, estimator.footprint_of(measure.workload), gpu)
        for measure in estimator.measures_of(workload)
    ]
    return sorted(found, key=lambda s: -s.saved_bytes)


def _saving(measure: Measure, before: Footprint, after: Footprint, gpu: GpuModel | None) -> Saving:
    return Saving(
        id=measure.id,
        title=measure.title,
        option=measure.option,
        peak_bytes=after.peak_allocated_bytes,
        reserved_bytes=after.reserved_bytes,
        saved_bytes=before.peak_allocated_bytes - after.peak_allocated_bytes,
        cost=measure.cost,
        fits=None if gpu is None else after.reserved_bytes <= gpu.usable_bytes,
        source=measure.source,
    )
