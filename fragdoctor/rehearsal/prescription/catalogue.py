"""The treatments that a program may get, from what it was seen to use.

Names of arguments are those of Transformers 4.57, Lightning 2.6 and Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from fragdoctor.model.prescription import LeftOut, Numerics, Treatment

Traits = Mapping[str, Any]
"""What ``engine/treatments/traits.py`` found."""

FORWARD_SHARE: Final = 1 / 3
"""Of the operations of a training step: a backward pass takes twice those of the forward pass
(Kaplan et al., 2020, section 2.1)."""

_BF16: Final = {
    "trainer": "TrainingArguments(bf16=True)",
    "lightning": 'Trainer(precision="bf16-mixed")',
    "accelerate": 'Accelerator(mixed_precision="bf16")',
}
_ADAM: Final = {"Adam", "AdamW"}
_FUSED: Final = {"Adam", "AdamW", "SGD", "Adagrad"}


def checkpointed(traits: Traits, n: int) -> Treatment:
    """Return checkpointing of the first n repeated blocks."""
    groups = traits["blocks"]
    total = sum(group["n"] for group in groups)
    lines = ["import functools", "from torch.utils.checkpoint import checkpoint"]
    if traits["caches"]:
        lines.append("model.config.use_cache = False")
    left, again = n, 0.0
    for group in groups:
        here = min(left, group["n"])
        if not here:
            break
        left -= here
        again += group["n_parameters"] * here / group["n"]
        lines += [
            f"for block in {_container(group)}[{group['first'] or ''}:{group['first'] + here}]:",
            "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)",
        ]
    instead = ""
    if n == total and traits["framework"] == "trainer":
        instead = "TrainingArguments(gradient_checkpointing=True)"
    return Treatment(
        "checkpoint",
        f"checkpoint {'all ' if n == total else f'{n} of '}{total} blocks ({_places(groups)})",
        Numerics.EXACT,
        FORWARD_SHARE * again / max(traits["n_parameters"], 1),
        lines,
        instead,
        [f"checkpoint:{n}"],
    )


def _container(group: Mapping[str, Any]) -> str:
    parts = [part for part in group["path"].split(".") if part]
    path = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)
    inside = f"model{path}"
    return inside if group["is_list"] else f"[*{inside}.children()]"


def _places(groups: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(group["path"] or group["kind"] for group in groups[:3]))


def accumulated(traits: Traits, n: int, batch: int | None) -> Treatment:
    """Return n micro-batches to a step, of a batch in the arguments or of loaders."""
    size = batch or max(traits["batches"])
    micro = max(size // n, 1)
    instead = ""
    if traits["framework"] == "trainer":
        instead = (
            f"TrainingArguments(per_device_train_batch_size={micro}, "
            f"gradient_accumulation_steps={n})"
        )
    elif traits["framework"] == "lightning":
        instead = f"Trainer(accumulate_grad_batches={n}), with batches of {micro}"
    elif traits["framework"] == "accelerate":
        instead = f"Accelerator(gradient_accumulation_steps={n}), with batches of {micro}"
    return Treatment(
        "accumulate",
        f"batch {micro} x {n} accumulated",
        Numerics.EXACT,
        0.0,
        [
            f"for i, batch in enumerate(loader):  # batches of {micro}",
            "    ...",
            f"    (loss / {n}).backward()",
            f"    if (i + 1) % {n} == 0:",
            "        optimizer.step()",
            "        optimizer.zero_grad()",
        ],
        instead,
        [f"accumulate:{n}"],
        batch_divisor=n,
    )


def simple(traits: Traits, conf: str) -> Iterator[Treatment]:
    """Yield the treatments of this program that have no strength to choose, the cheapest first."""
    optimizers = {*traits["optimizers"]}
    trainer = traits["framework"] == "trainer"
    if traits["zeroes"]:
        yield Treatment(
            "set-to-none", "free gradients instead of zeroing them", Numerics.EXACT,
            lines=["optimizer.zero_grad(set_to_none=True)"], specs=["set-to-none"],
        )  # fmt: skip
    if traits["evaluates_with_grad"]:
        yield Treatment(
            "no-grad", "evaluate without a graph", Numerics.EXACT,
            lines=["with torch.no_grad():  # around the evaluation"], specs=["no-grad"],
        )  # fmt: skip
    if "expandable_segments:True" not in conf:
        both = f"{conf},expandable_segments:True" if conf else "expandable_segments:True"
        yield Treatment(
            "expandable-segments", "expandable segments", Numerics.EXACT,
            lines=[f"export PYTORCH_CUDA_ALLOC_CONF={both}"], conf=both,
        )  # fmt: skip
    fusable = sorted(optimizers & _FUSED)
    if fusable:
        yield Treatment(
            "fused", f"fused {fusable[0]}", Numerics.EXACT,
            lines=[f"torch.optim.{fusable[0]}(..., fused=True)"],
            instead='TrainingArguments(optim="adamw_torch_fused")' if trainer else "",
            specs=["fused"],
        )  # fmt: skip
    if traits["trains"]:
        yield Treatment(
            "save-on-cpu", "keep what is saved for the backward pass on the host", Numerics.EXACT,
            None, ["with torch.autograd.graph.save_on_cpu(pin_memory=True):  # forward and loss"],
            specs=["save-on-cpu"],
        )  # fmt: skip
    if traits["trains"] and not traits["autocasts"]:
        yield Treatment(
            "autocast", "autocast to bfloat16", Numerics.ROUNDING,
            lines=['with torch.autocast("cuda", torch.bfloat16):  # forward and loss'],
            instead=_BF16.get(traits["framework"], ""),
            specs=["autocast"],
        )  # fmt: skip
    for name in sorted(optimizers & _ADAM):
        yield Treatment(
            "adamw-8bit", f"8-bit {name}", Numerics.DIFFERENT,
            lines=[f"bitsandbytes.optim.{name}8bit(...)"],
            instead='TrainingArguments(optim="adamw_8bit")' if trainer else "",
            specs=["adamw-8bit"],
        )  # fmt: skip
        yield Treatment(
            "adafactor", f"Adafactor instead of {name}", Numerics.DIFFERENT,
            lines=["torch.optim.Adafactor(...)"], specs=["adafactor"],
        )  # fmt: skip


def left_out(traits: Traits, batch: int | None, conf: str) -> Iterator[LeftOut]:
    """Yield the treatments that there is nothing for here, and why."""
    if traits["checkpoints"]:
        yield LeftOut("checkpoint", "the program checkpoints already")
    elif not traits["blocks"]:
        yield LeftOut("checkpoint", "the model has no repeated blocks")
    if batch is None and not traits["batches"]:
        yield LeftOut(
            "accumulate",
            "no DataLoader makes the batches; give --batch 32, and {batch} in the arguments",
        )
    if traits["autocasts"]:
        yield LeftOut("autocast", "the program uses it already")
    if not {*traits["optimizers"]} & _ADAM:
        yield LeftOut("adamw-8bit, adafactor", "they take the place of Adam and AdamW")
    if "expandable_segments:True" in conf:
        yield LeftOut("expandable-segments", "the program has them already")
    yield LeftOut(
        "FSDP, tensor parallelism, attention kernels, losses in chunks", "not made from outside"
    )
