"""Measure a rehearsal's speed and host memory, for models of up to seven billion parameters.

    python benchmarks/bench_rehearse.py [--python PATH] [--steps N]

The models consist of plain ``nn`` modules: transformers made either on the GPU, or on the CPU and
then moved. The time of a step is the median after the first step; the whole time is from the start
of Python to the outcome; host memory is the peak resident memory of the program's process. The
processor may be shared. For the smallest model, the program also takes two real steps on the CPU:
its processor time, imports included, is the unit of the last column.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from statistics import median

CHILD = """
import json, resource, sys, time
from pathlib import Path
from fragdoctor.rehearsal import runner
from fragdoctor.rehearsal.process import RehearsalConditions
from fragdoctor.rehearsal.programs import Program
from fragdoctor.rehearsal.process import rehearsed_gpu

script, python, n_steps, *args = sys.argv[1:]
times = []
gpu = rehearsed_gpu("h100", None, is_unlimited=True)
conditions = RehearsalConditions(gpu=gpu, n_steps=int(n_steps))
program = Program(script, False, args, [python])
start = time.perf_counter()
found = runner.rehearse(
    program, conditions, Path(script).with_name("s.pickle"),
    lambda number, n_bytes: times.append(time.perf_counter()),
)
print(json.dumps({
    "whole": time.perf_counter() - start,
    "first": times[0] - start,
    "steps": [b - a for a, b in zip(times, times[1:])],
    "rss": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10,
    "peak": found.peak_allocated_bytes,
    "events": found.devices[0].n_events,
}))
"""
SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width, n_heads):
            super().__init__()
            self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            self.n_heads = n_heads

        def forward(self, x):
            b, t, c = x.shape
            qkv = self.qkv(self.norm_1(x)).view(b, t, 3, self.n_heads, -1)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
            return x + self.mlp(self.norm_2(x))

    n_layers, width, vocab, length, batch = map(int, sys.argv[1:6])
    place, device, n_steps = sys.argv[6:]
    with torch.device(place):
        net = nn.Sequential(
            nn.Embedding(vocab, width),
            *(Block(width, width // 64) for _ in range(n_layers)),
            nn.Linear(width, vocab),
        ).to(torch.bfloat16)
    net = net.to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    print(sum(p.numel() for p in net.parameters()), "parameters")
    for _ in range(int(n_steps)):
        tokens = torch.randint(vocab, (batch, length), device=device)
        loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1).float(), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    """
)
CASES = {
    "4 layers of 256, made on the GPU": ["4", "256", "8192", "256", "8", "cuda"],
    "20 layers of 2,048, made on the GPU": ["20", "2048", "50257", "1024", "4", "cuda"],
    "20 layers of 2,048, made on the CPU": ["20", "2048", "50257", "1024", "4", "cpu"],
    "32 layers of 4,096, made on the GPU": ["32", "4096", "32000", "2048", "1", "cuda"],
    "32 layers of 4,096, made on the CPU": ["32", "4096", "32000", "2048", "1", "cpu"],
}
SMALLEST = next(iter(CASES))


def ran(*command: str) -> tuple[str, float]:
    """Return the output of a command on one core, and its processor time."""
    before = os.times()
    one_core = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=one_core)
    after = os.times()
    user = after.children_user - before.children_user
    return done.stdout, user + after.children_system - before.children_system


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="one that has PyTorch")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    print("model                                  steps/s  first step    whole  host memory"
          "  peak on the GPU  events a step  of two steps")  # fmt: skip
    for name, args in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "train.py"
            script.write_text(SCRIPT, encoding="utf-8")
            words = [str(script), arguments.python, str(arguments.steps), *args]
            output, seconds = ran(sys.executable, "-c", CHILD, *words, "cuda", "1000000")
            share = ""
            if name == SMALLEST:
                on_cpu = [arguments.python, str(script), *args[:-1], "cpu", "cpu", "2"]
                share = f"{seconds / ran(*on_cpu)[1]:>14.2f}"
        found = json.loads(output)
        print(
            f"{name:<37}{1 / median(found['steps']):>9.1f}{found['first']:>10.1f} s"
            f"{found['whole']:>7.1f} s{found['rss'] / 2**20:>9.0f} MiB"
            f"{found['peak'] / 2**30:>13.2f} GiB{found['events'] / arguments.steps:>15.0f}{share}"
        )


if __name__ == "__main__":
    main()
