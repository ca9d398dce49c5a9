"""Measure what the allocator's cache grows to if the batches of a run differ in length.

    python benchmarks/varying_lengths.py [--checkpointing] [--vocab 151936] [--lengths texts|short]

Trains LoRA adapters on a small Llama for a few hundred steps, like the Trainer of Transformers does
in bf16, and prints reserved memory beyond the allocated peak in units of the largest tensor, which
is the fp32 logits of the longest batch or an activation. The lengths have a log-normal distribution
without lengths over the limit; its mean is above the limit for ``texts``, and a quarter of it for
``short``. This needs torch, transformers and peft, and a GPU or a substitute for one. Nine runs
printed 4.6 to 13.2; ``CACHED_LARGEST`` of ``fragdoctor.estimation.bounds`` is at the lower end.
"""

from __future__ import annotations

import argparse
import math
import random

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SHORTEST = 91
MEANS = {"texts": 1.58, "short": 0.25}
"""Mean of the lengths before the cut, as a multiple of the limit."""
DEVIATION = 0.79  # standard deviation, as a share of the mean


def length_of(kind: str, limit: int, rng: random.Random) -> int:
    """Return the length of the next batch, in tokens."""
    mean = MEANS[kind] * limit
    variance = math.log(1 + DEVIATION**2)
    while True:
        found = int(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance)))
        if SHORTEST <= found <= limit:
            return found


def main() -> None:
    """Train, and print how much was reserved."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--lengths", choices=MEANS, default="texts")
    parser.add_argument("--limit", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=300)
    chosen = parser.parse_args()
    config = LlamaConfig(
        vocab_size=chosen.vocab, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=8,
    )  # fmt: skip
    base = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj"]))
    model.enable_input_require_grads()
    if chosen.checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    rng = random.Random(0)
    for _ in range(chosen.steps):
        tokens = length_of(chosen.lengths, chosen.limit, rng)
        ids = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    beyond = torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()
    largest = chosen.limit * max(4 * chosen.vocab, 4 * config.intermediate_size)
    print(f"{beyond / largest:.1f} of the largest tensor ({largest / 2**20:.0f} MiB)")


if __name__ == "__main__":
    main()
