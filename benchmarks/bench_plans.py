"""``estimate --plan`` beside layouts that others published: ran, recommend or call the least.

    python benchmarks/bench_plans.py

For each layout: what ``estimate`` says of it, and on how many GPUs of that kind ``--plan`` would do
the same. A plan is found if it needs no more GPUs than were published. A sequence that is split
among GPUs which share states, as xtuner's and Megatron's are, is asked for by the part of one.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any, Final, NamedTuple

from fragdoctor.cli.app import invoke
from fragdoctor.errors import FragdoctorError


class Published(NamedTuple):
    """A layout, and where it stands.

    Attributes:
        run: what is trained, as ``fragdoctor estimate`` takes it.
        layout: further options for this layout.
    """

    who: str
    gpu: str
    n_gpus: int
    run: str
    layout: str


XTUNER: Final = "https://github.com/InternLM/xtuner/tree/b934f462/xtuner/configs"
BRIDGE: Final = "https://docs.nvidia.com/nemo/megatron-bridge/nightly/apidocs/bridge"
ZERO: Final = "--dtype deepspeed-bf16 --attention flash --optimizer adamw-fused"
MEGATRON: Final = f"{ZERO} --grad-dtype fp32 --logits 16-bit"
FULL: Final = "--checkpointing full"

PUBLISHED: Final = (
    Published(f"{XTUNER}/llama/llama3_8b", "a100-80g", 2, f"llama-3-8b {ZERO} --seq 4096",
              f"--zero 3 --world-size 2 {FULL}"),
    Published(f"{XTUNER}/llama/llama3_8b", "a100-80g", 4, f"llama-3-8b {ZERO} --seq 8192",
              f"--zero 3 --world-size 4 {FULL}"),
    Published(f"{XTUNER}/llama/llama3_8b", "a100-80g", 8, f"llama-3.1-8b {ZERO} --seq 16384",
              f"--zero 3 --world-size 8 {FULL}"),
    Published(f"{XTUNER}/mixtral", "a100-80g", 16, f"mixtral-8x7b {ZERO} --seq 32768",
              f"--zero 3 --world-size 16 {FULL}"),
    Published(f"{XTUNER}/mixtral", "a100-80g", 1,
              "mixtral-8x7b --dtype int4 --lora 64 --lora-targets all-linear --seq 2048", FULL),
    Published(f"{XTUNER}/deepseek", "a100-80g", 64, f"deepseek-v2 {ZERO} --seq 8192",
              f"--zero 3 --world-size 64 {FULL}"),
    Published(f"{BRIDGE}/bridge.perf_recipes.llama.h100.llama3.html", "h100", 8,
              f"llama-3-8b {MEGATRON} --seq 4096", "--zero 1 --world-size 8"),
    Published(f"{BRIDGE}/bridge.perf_recipes.llama.h100.llama3.html", "h100", 64,
              f"llama-3-70b {MEGATRON} --seq 4096",
              "--zero 1 --world-size 4 --tensor-parallel 4 --pipeline-parallel 4 "
              "--sequence-parallel --grad-accumulation 64"),
    Published(f"{BRIDGE}/bridge.perf_recipes.llama.h100.llama3.html", "h100", 32,
              f"llama-3-70b {MEGATRON} --seq 4096",
              "--zero 1 --world-size 2 --tensor-parallel 4 --pipeline-parallel 4 "
              "--sequence-parallel --grad-accumulation 16"),
    Published(f"{BRIDGE}/bridge.perf_recipes.llama.h100.llama3.html", "h100", 8,
              "llama-3-70b --dtype bf16 --lora 16 --attention flash --logits 16-bit --seq 4096",
              f"--world-size 2 --pipeline-parallel 4 --grad-accumulation 16 {FULL}"),
    Published(f"{BRIDGE}/bridge.perf_recipes.llama.h100.llama31.html", "h100", 1024,
              f"llama-3.1-405b {MEGATRON} --seq 4096",
              "--zero 1 --world-size 16 --tensor-parallel 8 --pipeline-parallel 8 "
              "--sequence-parallel --grad-accumulation 64"),
    Published("https://github.com/epfLLM/Megatron-LLM/issues/52", "a100-80g", 32,
              f"llama-2-70b {MEGATRON} --seq 4096",
              "--zero 1 --world-size 1 --tensor-parallel 8 --pipeline-parallel 4 "
              f"--sequence-parallel --grad-accumulation 16 {FULL}"),
    Published("https://github.com/meta-pytorch/torchtune/issues/987", "a100-80g", 8,
              "llama-2-70b --dtype bf16 --attention flash --optimizer paged-adamw --seq 2048",
              f"--fsdp --world-size 8 {FULL}"),
)  # fmt: skip


def asked(words: str) -> dict[str, Any]:
    """Return what ``fragdoctor estimate`` says to options."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        invoke(["estimate", *words.split(), "--format", "json", "--no-config"])
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def main() -> int:
    """Print a table row for each layout."""
    n_found = 0
    for one in PUBLISHED:
        layout = one.layout.replace("--zero 1 --world-size 1 ", "")
        try:
            fits = asked(f"{one.run} {layout} --gpu {one.gpu}")["gpus"][0]["state"]
            plans = asked(f"{one.run} --gpu {one.gpu} --plan")["plans"]
        except FragdoctorError as refused:
            print(f"{one.who} {one.run}: {refused.message}", file=sys.stderr)
            continue
        best = plans[0] if plans else None
        n_found += best is not None and best["n_gpus"] <= one.n_gpus
        ours = f"{best['n_gpus']}: {best['layout']}" if best else "none"
        print(f"| {one.run.split()[0]} | {one.n_gpus} x {one.gpu} | {fits} | {ours} | {one.who} |")
    print(f"{n_found} of {len(PUBLISHED)} are found on no more GPUs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
