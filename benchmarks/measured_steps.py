"""Measure steps of Transformers' models on the GPU at hand, as rows of ``published/``.

    python benchmarks/measured_steps.py [--only TEXT]

Runs again each row whose source is this script: the model is built from its known configuration
with random weights, and makes three training steps of a plain loop (forward, backward, gradients
clipped, step, gradients set to None) on random tokens, or generates twice. Each runs in a process
of its own. Prints the peaks of allocated and reserved memory beside the row's figure, in MiB.
Needs torch, transformers and peft; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import multiprocessing
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fragdoctor.estimation.model_shapes import presets

SOURCE = "benchmarks/measured_steps.py"
FOLDER = Path(__file__).parent / "published"
MIB = 2**20
N_STEPS = 3


def options_of(text: str) -> argparse.Namespace:
    """Return the options of a row; those without a place here are refused."""
    parser = argparse.ArgumentParser()
    for name in ("dtype", "attention", "optimizer", "checkpointing", "lora-targets", "cache"):
        parser.add_argument(f"--{name}", default="")
    for name in ("batch", "seq", "lora", "new-tokens"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--inference", action="store_true")
    parser.add_argument("--keep-logits", action="store_true")
    return parser.parse_args(shlex.split(text))


def model_of(name: str, o: argparse.Namespace) -> Any:
    """Return a model with random weights on the GPU."""
    import torch
    import transformers

    config = dict(presets()[name].config)
    kind = config.pop("model_type")
    built = transformers.AutoConfig.for_model(kind, **config)
    of_head = transformers.AutoModelForCausalLM
    if kind in ("bert", "roberta", "xlm-roberta", "camembert"):
        of_head = transformers.AutoModelForSequenceClassification
    stored = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(o.dtype, torch.float32)
    attention = {"attn_implementation": "eager"} if o.attention == "eager" else {}
    with torch.device("cuda"):  # random weights are made much faster there
        model = of_head.from_config(built, dtype=stored, **attention)
    if o.lora:
        import peft

        names: Any = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"]}.get(o.lora_targets)
        names = names or (
            o.lora_targets if o.lora_targets == "all-linear" else o.lora_targets.split(",")
        )
        model = peft.get_peft_model(model, peft.LoraConfig(r=o.lora, target_modules=names))
    if o.checkpointing == "full":
        model.gradient_checkpointing_enable()
        model.config.use_cache = False
        if o.lora:
            model.enable_input_require_grads()
    return model.to("cuda")


def optimizer_of(name: str, parameters: Any) -> Any:
    """Return the optimizer that a row names."""
    import torch

    optim = torch.optim
    kinds = {
        "adamw": optim.AdamW, "adamw-fused": optim.AdamW, "sgd": optim.SGD,
        "sgd-momentum": optim.SGD, "adafactor": optim.Adafactor, "rmsprop": optim.RMSprop,
        "radam": optim.RAdam, "nadam": optim.NAdam, "adamax": optim.Adamax,
        "adagrad": optim.Adagrad, "adadelta": optim.Adadelta,
    }  # fmt: skip
    more = {"adamw-fused": {"fused": True}, "sgd-momentum": {"momentum": 0.9}}.get(name, {})
    return kinds[name](parameters, lr=1e-5, **more)


def train(model: Any, o: argparse.Namespace) -> None:
    """Make a few steps of a plain loop."""
    import torch

    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(o.optimizer, trained)
    scaler = torch.amp.GradScaler("cuda", enabled=o.dtype == "amp-fp16")
    kind = torch.float16 if o.dtype == "amp-fp16" else torch.bfloat16
    is_autocast = o.dtype.startswith("amp-")
    for _ in range(N_STEPS):
        ids = torch.randint(5, model.config.vocab_size, (o.batch, o.seq)).cuda()
        has_classes = type(model).__name__.endswith("SequenceClassification")
        labels = torch.randint(0, 2, (o.batch,)).cuda() if has_classes else ids.clone()
        with torch.autocast("cuda", kind) if is_autocast else contextlib.nullcontext():
            loss = model(input_ids=ids, labels=labels).loss
        scaler.scale(loss).backward()
        del loss
        if scaler.is_enabled():
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def infer(model: Any, o: argparse.Namespace) -> None:
    """Generate twice, or compute all logits twice."""
    import torch

    model.eval()
    ids = torch.randint(5, model.config.vocab_size, (o.batch, o.seq)).cuda()
    more: dict[str, Any] = {"max_new_tokens": o.new_tokens, "min_new_tokens": o.new_tokens}
    if o.cache == "static":
        more |= {"cache_implementation": "static", "disable_compile": True}
    with torch.no_grad():
        for _ in range(2):
            if not o.new_tokens:
                model(input_ids=ids)
                continue
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
            mask = torch.ones_like(ids)
            model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **more)


def measured(row: Mapping[str, str]) -> tuple[float, float]:
    """Return the peaks of allocated and reserved memory of a row, in MiB."""
    import torch

    torch.manual_seed(1)
    o = options_of(row["options"])
    model = model_of(row["model"], o)
    torch.cuda.reset_peak_memory_stats()
    (infer if o.inference else train)(model, o)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / MIB, torch.cuda.max_memory_reserved() / MIB


def main() -> None:
    """Measure the rows and print them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="rows whose model or options hold this text")
    text = parser.parse_args().only
    for half in ("looked_at", "held_out"):
        with (FOLDER / f"{half}.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["source"] == SOURCE]
        for row in rows:
            if text not in f"{row['model']} {row['options']}":
                continue
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                allocated, reserved = pool.apply(measured, (row,))
            said = f"{row['what']} {row['figure']}"
            print(f"{allocated:9.1f} {reserved:9.1f}  {said:18} {row['model']} {row['options']}")


if __name__ == "__main__":
    main()
