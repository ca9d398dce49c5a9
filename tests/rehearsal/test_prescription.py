"""Changes made from outside equal those written into the program, and the cheapest that fits."""

from __future__ import annotations

import json
import re
import sys
import time
from importlib.util import find_spec
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from msgspec.structs import replace
from rehearsal_stage import COMPILING, PREPARED, Stage
from schemas import must_fit

from fragdoctor.errors import ConfigError
from fragdoctor.future.simulator import trace_of
from fragdoctor.inputs.snapshot_reader import read_snapshot
from fragdoctor.model.finding import Location
from fragdoctor.model.prescription import (
    LeftOut,
    Numerics,
    Place,
    Prescription,
    Treatment,
    Tried,
)
from fragdoctor.model.rehearsal import Rehearsal
from fragdoctor.rehearsal import runner
from fragdoctor.rehearsal.prescription import catalogue, search
from fragdoctor.rehearsal.prescription.batch_rows import mixing
from fragdoctor.rehearsal.prescription.checkpoints import Choice, Plan
from fragdoctor.rehearsal.prescription.held import held_lines
from fragdoctor.rehearsal.prescription.need import Need
from fragdoctor.rehearsal.prescription.patch import optimizer_name, patched
from fragdoctor.rehearsal.prescription.search import CureSearch, _parts
from fragdoctor.rehearsal.process import RehearsalConditions, rehearsed_gpu
from fragdoctor.rehearsal.programs import Program
from fragdoctor.report.base import RenderOptions
from fragdoctor.report.text import render
from fragdoctor.report.views.prescription import document, needs_text, shown
from fragdoctor.units import parse_seconds

pytest.importorskip("torch")  # the programs are rehearsed with it

MODEL = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(256, 256), nn.Linear(256, 64)
        self.layers = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

BATCH = int("2048")  # no number that could be made smaller
model = Net().cuda()
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(BATCH, 256, device="cuda")
    loss = model(x).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TAUGHT = "teacher = Net().cuda()\n" + LOOP.replace(
    "model(x).float()", "(model(x) - teacher(x)).float()"
)
UNEVEN = """
import torch
from torch import nn
model = nn.Linear(256, 256, device="cuda")
kept = torch.zeros(64 << 18, device="cuda")
optimizer = torch.optim.Adam(model.parameters())
for step in range(8):
    for _ in range(step * step % 7):
        kept[0] = model(torch.ones(64, 256, device="cuda"))[0, 0].detach()
    optimizer.zero_grad()
    model(torch.ones(64, 256, device="cuda")).sum().backward()
    optimizer.step()
"""
CHECKPOINTED = """
import functools
from torch.utils.checkpoint import checkpoint
for block in model.layers[:4]:
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
"""
LOADER = """
data = TensorDataset(torch.zeros(4096, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    for (x,) in DataLoader(data, batch_size=1024):
        loss = model(x.cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
ACCUMULATED = """
data = TensorDataset(torch.zeros(4096, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
i = 0
for epoch in range(2):
    for (x,) in DataLoader(data, batch_size=512):
        loss = model(x.cuda()).square().mean()
        loss.backward()
        i += 1
        if i % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
IN_CLOSURE = """
data = TensorDataset(torch.zeros(4096, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for epoch in range(2):
    for (x,) in DataLoader(data, batch_size=1024):
        def closure():
            loss = model(x.cuda()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            return loss
        assert optimizer.step(closure) is not None
"""
CLOSURE_ACCUMULATED = """
data = TensorDataset(torch.zeros(4096, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
i = 0
for epoch in range(2):
    for (x,) in DataLoader(data, batch_size=512):
        loss = model(x.cuda()).square().mean()
        if i % 2 == 0:
            optimizer.zero_grad()
        loss.backward()
        i += 1
        if i % 2 == 0:
            optimizer.step()
"""
DROPPED = "\nimport gc\ndel optimizer\ngc.collect()\nmodel.zero_grad()\n"
FLAT = "model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(256, 256), nn.GELU())))"
FLAT += ".cuda()\n"
IN_PIECES = """
from functools import partial
from torch.utils.checkpoint import (
    CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
)
def keeping():
    def policy(context, op, *args, **kwargs):
        is_kept = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
    return create_selective_checkpoint_contexts(policy)
def forward(x):
    x = model[0](x)
    x = checkpoint(model[1:3], x, use_reentrant=False)
    for layer in model[3:5]:
        x = layer(x)
    x = checkpoint(model[5:7], x, use_reentrant=False, context_fn=keeping)
    return model[7](x)
model.forward = forward
"""
EVALUATED = """
model.eval()
for step in range(3):
    x = torch.randn(BATCH, 256, device="cuda")
    result = model(x).argmax(-1)
"""
PREDICTED = """
model.eval()
for (x,) in DataLoader(data, batch_size=4096):
    y = model(x.cuda())
"""
LM = MODEL.replace("nn.Linear(256, 64)", "nn.Linear(256, 8192)")
CLASSES = """
from torch.nn import functional as F
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    x = torch.randn(8, BATCH // 8, 256, device="cuda")
    target = torch.zeros(8, BATCH // 8, dtype=torch.long, device="cuda")
    loss = F.cross_entropy(model(x).view(-1, 8192), target.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
SHIFTED = CLASSES.replace(
    "model(x).view(-1, 8192), target.view(-1)",
    "model(x).float()[..., :-1, :].reshape(-1, 8192), target[:, 1:].reshape(-1)",
)
IN_CHUNKS = """
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

def chunked_loss(x, target, n=16):
    def part(x, target):
        return F.cross_entropy(F.linear(x, head.weight, head.bias), target, reduction="sum")
    rows = zip(x.flatten(0, -2).chunk(n), target.flatten().chunk(n))
    return sum(checkpoint(part, *row, use_reentrant=False) for row in rows) / (target != -100).sum()

head = model.head
head.forward = lambda x: x
"""
SHARDED = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
for block in model.layers:
    fully_shard(block)
fully_shard(model)
"""
IN_BACKWARD = """
own = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters() if p.requires_grad}
def update(p):
    own[p].step()
    own[p].zero_grad()
for p in own:
    p.register_post_accumulate_grad_hook(update)
for step in range(4):
    x = torch.randn(BATCH, 256, device="cuda")
    loss = model(x).float().square().mean()
    loss.backward()
"""
FROZEN = "model.first.requires_grad_(False)\n"
ON_HOST = """
def move(device):
    for state in optimizer.state.values():
        for name, value in state.items():
            if value.dim():
                state[name] = value.to(device)
optimizer.register_step_pre_hook(lambda *_: move("cuda"))
optimizer.register_step_post_hook(lambda *_: move("cpu"))
"""
MADE = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
BUFFER = """
memory = torch.zeros(64, BATCH, 256, device="cuda")
for step in range(4):
    memory[step] = torch.randn(BATCH, 256, device="cuda")
    x = memory[step]
    assert x.is_cuda and memory[:2].is_cuda
    loss = model(x).square().mean() + memory[:4].mean()
    loss.backward()
    model.zero_grad()
"""
BUFFER_ON_HOST = """
memory = torch.zeros(64, BATCH, 256, device="cpu")
for step in range(4):
    memory[step] = torch.randn(BATCH, 256, device="cuda")
    x = memory[step]
    loss = model(x.cuda()).square().mean() + memory[:4].mean().cuda()
    loss.backward()
    model.zero_grad()
"""
AS_LOADED = "model.eval()  # as Transformers loads it\n"
IMAGE = """
image = torch.randn(BATCH, 256, device="cuda", requires_grad=True)
model.eval()
optimizer = torch.optim.Adam([image])
for step in range(4):
    loss = model(image).float().square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
MOVED = "model = Net().to('cuda')\n"
IN_BFLOAT16 = "model.to(torch.bfloat16)\n" + LOOP.replace("model(x)", "model(x.bfloat16())")
SLOW_S = 3.0
CALL = "    loss = model(x).float().square().mean()\n"


def rehearsed(home: Path, text: str, *treatments: str, **more: int) -> Rehearsal:
    path = home / "train.py"
    path.write_text(text)
    unlimited = rehearsed_gpu("h100", None, is_unlimited=True)
    conditions = RehearsalConditions(
        gpu=unlimited, treatments=treatments, stops_by_itself=False, **more
    )
    program = Program(str(path), is_module=False, args=[], pythons=[sys.executable])
    return runner.rehearse(program, conditions, home / "s.pickle", None, PREPARED)


def need_of(home: Path, *, goes_on: bool = False) -> Need:
    return Need(trace_of(read_snapshot(home / "s.pickle")), goes_on=goes_on)


def peak(home: Path, text: str, *treatments: str) -> int:
    return rehearsed(home, text, *treatments).peak_allocated_bytes


@pytest.mark.parametrize(
    ("treatment", "before", "after"),
    [
        ("checkpoint:0,1,2,3", LOOP, CHECKPOINTED + LOOP),
        ("checkpoint:2,5=0", FLAT + LOOP, FLAT + IN_PIECES + LOOP),
        ("fused", LOOP, LOOP.replace("1e-3)", "1e-3, fused=True)")),
        ("adafactor", LOOP, LOOP.replace("optim.AdamW", "optim.Adafactor")),
        ("autocast", LOOP,
         LOOP.replace(CALL, f'    with torch.autocast("cuda", torch.bfloat16):\n    {CALL}')),
        ("save-on-cpu", LOOP, LOOP.replace(
            CALL, f"    with torch.autograd.graph.save_on_cpu(pin_memory=True):\n    {CALL}")),
        ("set-to-none", LOOP.replace("zero_grad()", "zero_grad(set_to_none=False)"), LOOP),
        ("accumulate:2", LOADER, ACCUMULATED),
        ("accumulate:2", LOADER.replace("optimizer.zero_grad", "model.zero_grad"), ACCUMULATED),
        ("accumulate:2", IN_CLOSURE, CLOSURE_ACCUMULATED),
        ("accumulate:2", LOADER + DROPPED + LOADER, ACCUMULATED + DROPPED + ACCUMULATED),
        ("step-in-backward", LOOP, IN_BACKWARD),
        ("step-in-backward", FROZEN + LOOP, FROZEN + IN_BACKWARD),
        ("state-on-host", LOOP, LOOP.replace(MADE, MADE + ON_HOST)),
        ("frozen", TAUGHT, TAUGHT.replace("Net()", "Net().requires_grad_(False)")),
        ("bf16-parameters", LOOP, IN_BFLOAT16),
        ("bf16-parameters", MOVED + EVALUATED, MOVED.replace("Net()", "Net().to(torch.bfloat16)")
         + EVALUATED.replace("model(x)", "model(x.bfloat16()).float()")),
        ("checkpoint:0,1,2,3", AS_LOADED + LOOP, AS_LOADED + CHECKPOINTED + LOOP),
        ("save-on-cpu", IMAGE, IMAGE.replace(
            "    loss = model(image)", "    with torch.autograd.graph.save_on_cpu(pin_memory=True):"
            "\n        loss = model(image)")),
    ],
)  # fmt: skip
def test_treatment_from_outside_equals_the_change_in_the_program(
    treatment: str, before: str, after: str, tmp_path: Path
) -> None:
    treated = peak(tmp_path, MODEL + before, treatment)

    assert treated == peak(tmp_path, MODEL + after)
    if treatment not in {"fused", "adafactor"}:  # the peak is in the backward pass
        assert treated < peak(tmp_path, MODEL + before)


def test_mask_that_comes_back_from_the_host_has_to_be_aligned(tmp_path: Path) -> None:
    """PyTorch pads masks, and its kernel refuses one that was saved on the host without gaps."""
    masked = """
import torch
from torch import nn
heads = nn.Linear(256, 256).cuda()
mask = torch.zeros(4, 1, {n}, {n}, device="cuda")
for step in range(3):
    x = heads(torch.randn(4, 8, {n}, 256, device="cuda"))
    nn.functional.scaled_dot_product_attention(x, x, x, mask).sum().backward()
"""
    assert peak(tmp_path, masked.format(n=99))
    assert peak(tmp_path, masked.format(n=100), "save-on-cpu")
    with pytest.raises(ConfigError, match="attn_bias is not correctly aligned"):
        peak(tmp_path, masked.format(n=99), "save-on-cpu")


def test_model_that_no_optimizer_updates_is_named(tmp_path: Path) -> None:
    assert rehearsed(tmp_path, MODEL + TAUGHT, observes=True).traits["frozen"] == ["teacher"]
    assert rehearsed(tmp_path, MODEL + LOOP, observes=True).traits["frozen"] == []


def test_training_is_known_in_the_mode_in_which_models_are_loaded(tmp_path: Path) -> None:
    begun = MODEL + AS_LOADED + LOADER
    traits = traits_of(tmp_path, begun + "torch.set_grad_enabled(False)" + PREDICTED)

    assert traits["trains"]
    assert ([*traits["batches"].values()], [*traits["evaluated"].values()]) == ([1024], [4096])
    assert traits["parts"]
    without = begun.replace("optim.AdamW(model.parameters()", "optim.AdamW([torch.ones(1)]")
    assert not traits_of(tmp_path, without.replace("loss.backward()", "pass"))["trains"]


def test_rounds_between_updates_are_not_skipped(tmp_path: Path) -> None:
    """However many there are: 20 rounds that are equal would be, were they steps."""
    assert rehearsed(tmp_path, MODEL + LOADER, "accumulate:32").steps > 1


GRAPH_UNUSED = (
    LOOP
    + """
kept = []
for step in range(3):
    kept.append(model(torch.randn(BATCH, 256, device="cuda")))
"""
)


def test_calls_that_no_backward_pass_follows_record_no_graph(tmp_path: Path) -> None:
    """The model is in training mode, as in the loop before, whose graph is used."""
    before = MODEL + GRAPH_UNUSED
    after = before.replace("\nkept", "\ntorch.set_grad_enabled(False)\nkept")

    (unused,) = rehearsed(tmp_path, before, observes=True).traits["graphs_unused"]

    assert unused == f"{tmp_path / 'train.py'}:{before.count(chr(10))}"
    assert peak(tmp_path, before, f"no-grad:{quote(unused)}") == peak(tmp_path, after)
    assert peak(tmp_path, after) < peak(tmp_path, before)


GATHERED = """
model.half().eval()
def answered(x):
    return model(x), x.new_zeros(0)
kept = []
with torch.inference_mode():
    for step in range(6):
        y, _ = answered(torch.randn(BATCH, 256, device="cuda").half())
        kept.append(y)
"""
COLLECTED = """
model.half().eval()
kept = []
with torch.no_grad():
    for step in range(6):
        y = model(torch.randn(BATCH, 256, device="cuda").half())
        kept.append(y + 1)
del y
kept = torch.cat(kept)
"""


def test_what_is_collected_on_the_host_is_joined_there(tmp_path: Path) -> None:
    line = f"{tmp_path / 'train.py'}:{(LM + COLLECTED).count(chr(10)) - 2}"

    treated = peak(tmp_path, LM + COLLECTED, f"held-on-host:{line}")

    assert treated == peak(tmp_path, LM + COLLECTED.replace("y + 1", "(y + 1).cpu()"))


def test_results_that_a_program_gathers_are_held_on_the_host(tmp_path: Path) -> None:
    """The last one stays on the GPU until the next call, which does not come."""
    by_hand = GATHERED.replace(
        "kept.append(y)", "kept.append(y if step == 5 else y.cpu())\n        del y"
    )
    as_it_is = rehearsed(tmp_path, LM + GATHERED).peak_allocated_bytes
    ((line, gathers),) = held_lines(read_snapshot(tmp_path / "s.pickle")).items()

    treated = peak(tmp_path, LM + GATHERED, f"held-on-host:{line.filename}:{line.line}")

    assert (LM + GATHERED).split("\n")[line.line - 1] == "    return model(x), x.new_zeros(0)"
    # Blocks end up in other holes, from which up to 1 MiB is not split off.
    assert abs(treated - peak(tmp_path, LM + by_hand)) <= 2**20
    assert treated < as_it_is - 4 * 2 * 2048 * 8192
    assert gathers


CACHED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(256, 256)

    def forward(self, x, cache):
        x = self.first(x)
        return x if cache is None else torch.cat([cache, x])

model = Net().cuda()
history = []
with torch.inference_mode():
    for batch in range(6):
        cache = None
        for step in range(3):
            cache = model(torch.ones(4096, 256, device="cuda"), cache)
        history.append(cache)
"""


def test_caches_of_earlier_batches_are_held_on_the_host(tmp_path: Path) -> None:
    """Also those that a call makes of a cache that is on the host already."""
    place = f"{tmp_path / 'train.py'}:{CACHED.count(chr(10)) - 1}"
    cache_bytes = 3 * 4096 * 256 * 4

    saved_bytes = peak(tmp_path, CACHED) - peak(tmp_path, CACHED, f"held-on-host:{place}")

    assert saved_bytes >= 4 * cache_bytes


def test_pieces_of_a_sequential_end_with_its_products() -> None:
    from torch import nn

    from fragdoctor.recording.module_names import ByIdentity
    from fragdoctor.rehearsal.engine.treatments.blocks import parts_of

    layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(2, 2), nn.ReLU())))
    block = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))

    found = [name for name, _ in parts_of(nn.Sequential(layers, block), ByIdentity())]

    pieces = ["0:5", "0:5.0:3", "0:5.0:3.1:3", "0:5.3:5", "5:8", "5:8.5:7"]
    assert found == ["0", *(f"0.0:8.{piece}" for piece in pieces), "1"]


def test_parts_are_sharded_where_there_are_no_blocks() -> None:
    from torch import nn

    from fragdoctor.rehearsal.engine.treatments.blocks import sharded_units

    flat = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert [path for path, _ in sharded_units(flat)] == ["0", "2"]
    flat[2].weight = flat[0].weight
    assert sharded_units(flat) == []


def test_layers_that_stand_twice_in_a_sequential_are_no_pieces() -> None:
    from torch import nn

    from fragdoctor.recording.module_names import ByIdentity
    from fragdoctor.rehearsal.engine.treatments.blocks import parts_of

    act = nn.ReLU()

    assert parts_of(nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act), ByIdentity()) == []


def test_parts_of_several_models_are_checkpointed_each_under_its_own_name(tmp_path: Path) -> None:
    two = "other = Net().cuda()\n" + LOOP.replace("model(x)", "other(model(x)[:, :1] + x)")
    by_hand = CHECKPOINTED.replace("model.layers[:4]", "[*model.layers[4:], *other.layers[:2]]")

    written = [part["written"] for part in traits_of(tmp_path, MODEL + two)["parts"]]

    assert written == [f"{name}.layers[{n}]" for name in ("model", "other") for n in range(6)]
    assert peak(tmp_path, MODEL + two, "checkpoint:4,5,6,7") == peak(
        tmp_path, MODEL + two.replace("\noptimizer", by_hand + "\noptimizer")
    )


def test_settings_of_the_allocator_need_what_a_rehearsal_with_them_does(tmp_path: Path) -> None:
    conf = "expandable_segments:True"
    # Of 21.5 MiB, in a segment of 22: what is left of that is too little to be split off.
    text = MODEL + "kept = torch.ones(43 << 17, device='cuda')\n" + LOOP
    rehearsed(tmp_path, text)
    as_it_is = need_of(tmp_path)
    replayed = as_it_is.bytes(conf=conf), as_it_is.peak_bytes(conf=conf)

    found = rehearsed(tmp_path, text, conf=conf)

    with_them = need_of(tmp_path)
    assert (with_them.bytes(), found.peak_allocated_bytes) == replayed
    assert as_it_is.peak_bytes() > found.peak_allocated_bytes


def test_nothing_follows_the_end_of_a_program(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, UNEVEN)

    assert need_of(tmp_path).bytes() <= found.peak_reserved_bytes
    assert need_of(tmp_path, goes_on=True).bytes() > found.peak_reserved_bytes


def test_random_numbers_that_a_program_does_not_seed_are_the_same_each_time(
    tmp_path: Path,
) -> None:
    text = (
        "import random\nimport numpy as np\nimport torch\n"
        "n = random.randrange(1 << 20) + np.random.randint(1 << 20)\n"
        "kept = torch.zeros(512 * n, device='cuda')\n"
    )

    assert peak(tmp_path, text) == peak(tmp_path, text)


def test_loss_module_of_the_program_is_its_own_loss(tmp_path: Path) -> None:
    text = LM + CLASSES.replace("F.cross_entropy(", "nn.CrossEntropyLoss()(")

    assert traits_of(tmp_path, text)["head"]["loss"] == ""


def test_sharding_from_outside_equals_the_one_written_out(tmp_path: Path) -> None:
    four = {"rank": 0, "world_size": 4, "n_devices": 4}
    model = MODEL.replace("1024", "4096")
    outside = rehearsed(tmp_path, model + LOOP, "fully-shard:4", **four)

    written = rehearsed(tmp_path, model + SHARDED + LOOP, **four)

    assert outside.peak_allocated_bytes == written.peak_allocated_bytes
    alone = rehearsed(tmp_path, model + LOOP).devices[0].allocated_bytes
    assert outside.devices[0].allocated_bytes < 0.5 * alone


def test_parameters_that_stay_whole_equal_those_written_out(tmp_path: Path) -> None:
    four = {"rank": 0, "world_size": 4, "n_devices": 4}
    model = MODEL.replace("1024", "4096")
    written_out = re.sub(r"(fully_shard\(\w+)", r"\1, reshard_after_forward=False", SHARDED)
    outside = rehearsed(tmp_path, model + LOOP, "fully-shard:4:whole", **four)

    written = rehearsed(tmp_path, model + written_out + LOOP, **four)

    assert outside.peak_allocated_bytes == written.peak_allocated_bytes
    gathered_twice = rehearsed(tmp_path, model + LOOP, "fully-shard:4", **four)
    assert outside.peak_allocated_bytes > gathered_twice.peak_allocated_bytes


def test_buffer_on_the_host_from_outside_equals_the_one_written_out(tmp_path: Path) -> None:
    place = f"{tmp_path / 'train.py'}:{MODEL.count(chr(10)) + 2}"

    treated = peak(tmp_path, MODEL + BUFFER, f"held-on-host:{place}")

    assert treated == peak(tmp_path, MODEL + BUFFER_ON_HOST)
    assert treated < peak(tmp_path, MODEL + BUFFER) - 64 * 2048 * 256


def test_parameters_that_the_program_makes_on_the_gpu_are_not_held(tmp_path: Path) -> None:
    text = MODEL.replace("nn.Linear(256, 256)", "nn.Linear(256, 256, device='cuda')")
    rehearsed(tmp_path, text.replace("256, 1024", "256, 1024, device='cuda'") + LOOP)

    assert held_lines(read_snapshot(tmp_path / "s.pickle")) == {}


@pytest.mark.slow
def test_buffer_that_is_too_large_is_held_on_the_host(stage: Stage) -> None:
    stage.script(MODEL + BUFFER)

    found = cure(stage, "250MiB", code=1)

    first = found["cure"]["treatments"][0]
    assert first["code"] == "held-on-host"
    assert f"train.py:{MODEL.count(chr(10)) + 2}" in first["title"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (CLASSES, IN_CHUNKS + CLASSES.replace(
            "F.cross_entropy(model(x).view(-1, 8192), target.view(-1))",
            "chunked_loss(model(x), target)")),
        (SHIFTED, IN_CHUNKS + SHIFTED.replace("F.cross_entropy", "chunked_loss")
            .replace(".float()", "").replace("8192", "256")),
    ],
)  # fmt: skip
def test_loss_in_chunks_from_outside_equals_the_one_written_out(
    before: str, after: str, tmp_path: Path
) -> None:
    treated = peak(tmp_path, LM + before, "chunked-loss:16:head")

    assert treated == peak(tmp_path, LM + after)
    assert treated < 0.7 * peak(tmp_path, LM + before)


@pytest.mark.parametrize("how", ["label_smoothing=0.1, ignore_index=3", "reduction='sum'"])
def test_lines_of_a_loss_in_chunks_compute_it_as_the_program_does(how: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    text = CLASSES.replace("target.view(-1))", f"target.view(-1), {how})")
    traits = traits_of(tmp_path, LM + text)
    (treatment,) = [one for one in catalogue.simple(traits) if one.code == "chunked-loss"]
    lines = [one.replace("model.head", "head") for one in treatment.lines]
    head = torch.nn.Linear(8, 5, dtype=torch.float64)
    x, target = torch.randn(40, 8, dtype=torch.float64), torch.arange(40) % 5
    names = {"head": head, "x": x, "target": target}
    more = eval(f"dict({how})")
    whole = torch.nn.functional.cross_entropy(head(x), target, **more)
    (gradient,) = torch.autograd.grad(whole, head.weight)

    exec("\n".join(lines), names)

    assert torch.allclose(names["loss"], whole)
    assert torch.allclose(torch.autograd.grad(names["loss"], head.weight)[0], gradient)


def test_logits_that_are_used_otherwise_are_made_then(tmp_path: Path) -> None:
    text = LM + CLASSES.replace("loss = F.cross", "y = model(x).softmax(-1)\n    loss = F.nll")
    text = text.replace("F.nll_entropy(model(x)", "F.nll_loss(y.log()")

    assert peak(tmp_path, text, "chunked-loss:16:head") == peak(tmp_path, text)


def test_checkpoint_and_autocast_work_together(tmp_path: Path) -> None:
    both = CHECKPOINTED + LOOP.replace(
        CALL, f'    with torch.autocast("cuda", torch.bfloat16):\n    {CALL}'
    )

    assert peak(tmp_path, MODEL + LOOP, "checkpoint:0,1,2,3", "autocast") == peak(
        tmp_path, MODEL + both
    )


def test_state_of_8_bit_adam_is_two_bytes_an_element_and_scales(tmp_path: Path) -> None:
    n_elements = 6 * (2 * 256 * 1024 + 1024 + 256) + 256 * 256 + 256 + 64 * 256 + 64
    before, after = (
        rehearsed(tmp_path, MODEL + LOOP, *words).devices[0].allocated_bytes
        for words in ((), ("adamw-8bit",))
    )

    assert before - after == pytest.approx((8 - 2 * (1 + 4 / 256)) * n_elements, rel=0.01)


def cure(
    stage: Stage, capacity: str, *words: str, code: int, apart: bool = False
) -> dict[str, Any]:
    words = ("--cure", "--fits-on", capacity, *words, "train.py")
    found = stage.json(*words, code=code, apart=apart)
    must_fit(found, "prescription")
    return found


def test_cheapest_change_that_fits_is_found_and_its_lines_do_what_was_said(stage: Stage) -> None:
    stage.script(MODEL + LOOP)

    found = cure(stage, "170MiB", code=1)

    assert found["needs_bytes"] > 170 * 2**20
    best = found["cure"]
    (treatment,) = best["treatments"]
    assert treatment["code"] == "checkpoint"
    assert best["numerics"] == "exact"
    assert treatment["extra_compute"] <= 5 / 18  # five of six blocks
    patched = applied(MODEL + LOOP, found["diff"])
    assert "\n".join(treatment["lines"]) in patched
    assert peak(stage.home, patched) == best["peak_allocated_bytes"]
    stage.script(patched)
    assert stage.json("--fits-on", "170MiB", "train.py")["rehearsal"]["fits"]


def test_place_in_another_file_and_a_change_in_fewer_lines_are_said(stage: Stage) -> None:
    made = "\ndef made():\n    return torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
    gelu = "nn.functional.gelu(self.up(x))"
    model = MODEL.replace(gelu, "tanh(torch.sigmoid(torch.sin(self.up(x))))")  # to be made again
    (stage.home / "net.py").write_text(model + made)
    script = LOOP.replace("torch.optim.AdamW(model.parameters(), lr=1e-3)", "made()")
    stage.script("from net import *\nfrom net import made\n" + script)

    found = cure(stage, "225MiB", code=1)

    line = (model + made).count("\n")
    assert found["optimizer_place"]["line"] == line
    assert found["optimizer_place"]["filename"] == str(stage.home / "net.py")
    assert not found["diff"]
    (selective,) = found["cure"]["treatments"]
    assert "=" in selective["specs"][0]
    fitting = [one["treatments"][0] for one in found["tried"] if one["fits"]]
    checkpoints = [one for one in fitting if one["code"] == "checkpoint"]
    whole = next(one for one in checkpoints if "=" not in one["specs"][0])
    assert whole["specs"][0].count(",") < 5  # all six blocks are more than it takes
    assert len(whole["lines"]) == 4


def test_place_and_fewer_lines_are_shown() -> None:
    def one(n_lines: int, compute: float) -> Tried:
        title = f"checkpoint in {n_lines}"
        lines = [f"line {n_lines}"] * n_lines
        part = Treatment("checkpoint", title, Numerics.EXACT, compute, lines)
        return Tried([replace(part, place=Place.BEFORE_OPTIMIZER)], True, 1, 1)

    place = Location("/home/me/mo\x1bdel.py", 283, "")
    tries = [one(24, 0.01), one(20, 0.02), one(4, 0.1)]
    found = Prescription("t.py", "", 1, 2, False, tries, [], optimizer_place=place)

    text = render(document(found), RenderOptions())

    assert text.count("Before mo\\x1bdel.py:283, where the optimizer is made:") == 2
    assert "In fewer lines: checkpoint in 4." in text
    assert text.count("line 24\n") == 24
    assert text.count("line 4\n") == 4
    assert "checkpoint in 20" not in text


def test_place_of_two_changes_is_said_once() -> None:
    parts = [
        Treatment(name, name, Numerics.EXACT, lines=[f"{name}()"], place=Place.BEFORE_OPTIMIZER)
        for name in ("first", "second")
    ]
    tried = Tried([*parts, replace(parts[0], place=Place.OPEN, lines=["with it:"])], True, 1, 1)
    place = Location("/home/me/model.py", 283, "")
    found = Prescription("t.py", "", 1, 2, False, [tried], [], optimizer_place=place)

    text = render(document(found), RenderOptions())

    assert text.count("model.py:283") == 1
    assert text.index("first()") < text.index("second()") < text.index("first:")
    assert text.index("first:") < text.index("with it:")


def applied(text: str, diff: list[str]) -> str:
    """Return a text with the lines of a diff that only adds."""
    lines = text.split("\n")
    at = 0
    for line in diff[2:]:
        if line.startswith("@@"):
            at = int(line.split("+")[1].split(",")[0]) - 1
        elif line.startswith("+"):
            lines.insert(at, line[1:])
            at += 1
        else:
            assert lines[at] == line[1:]
            at += 1
    return "\n".join(lines)


def test_program_that_fits_needs_no_cure(stage: Stage) -> None:
    stage.script(MODEL + LOOP)

    found = cure(stage, "4GiB", code=0)

    assert found["fits"]
    assert found["tried"] == []


@pytest.mark.slow
def test_fewest_gpus_are_found_where_one_does_not_do(stage: Stage) -> None:
    stage.script(MODEL.replace("1024", "8192") + LOOP.replace("BATCH", "8"))

    found = cure(stage, "250MiB", code=1, apart=True)  # in forks of one process, as a user's

    sharded = [one for one in found["tried"] if one["n_gpus"] > 1]
    fits = {one["n_gpus"]: one["fits"] for one in sharded if "gathered" not in one["title"]}
    fewest = min(n for n, is_so in fits.items() if is_so)
    assert fewest == 8  # the batch has eight rows, and is split evenly
    assert fits[4] is False
    assert max(fits) == fewest  # a search that is cut short should not say more of them
    assert found["cure"]["n_gpus"] in {1, fewest}


def test_smaller_batches_are_not_tried_where_what_is_kept_is_too_much(stage: Stage) -> None:
    stage.script(MODEL.replace("1024", "4096") + LOOP.replace("BATCH", "8"))

    found = cure(stage, "80MiB", code=1)

    alone = {one["treatments"][0]["code"] for one in found["tried"] if len(one["treatments"]) == 1}
    assert alone == {*search.KEEPING_LESS, "fully-shard"}
    assert any("state alone take" in note for note in found["notes"])


@pytest.mark.slow
def test_what_a_change_breaks_later_is_no_cure(stage: Stage) -> None:
    stage.script(
        MODEL.replace("1024", "8192")
        + LOOP.replace("BATCH", "8")
        + "for p in model.parameters():\n    assert type(p) is nn.Parameter\n"
    )

    found = cure(stage, "250MiB", code=1, apart=True)  # in forks of one process, as a user's

    sharded = [one for one in found["tried"] if one["n_gpus"] > 1]
    assert sharded
    assert not any(one["fits"] for one in sharded)


FOR = "for step in range(4):"


@pytest.mark.parametrize("n_rounds", [1, 3])
def test_loop_that_makes_no_more_rounds_by_itself_is_given_them(
    stage: Stage, tmp_path: Path, n_rounds: int
) -> None:
    """As the user will write it, whose number of updates stays what it is."""
    loop = LOOP.replace(FOR, FOR.replace("4", str(n_rounds))).replace("BATCH", "int(sys.argv[1])")
    stage.script(MODEL + loop)

    words = ("--batch", "2048", "--fits-on", "140MiB", "--cure")
    found = stage.json(*words, "train.py", "--", "{batch}", code=1)

    best = found["cure"]
    assert best["treatments"][0]["code"] == "accumulate"
    n = int(best["title"].partition(" x ")[2].partition(" ")[0])
    every = f"    if (step + 1) % {n} == 0:\n        optimizer."
    written = LOOP.replace(FOR, f"for step in range({n_rounds * n}):")
    written = written.replace("BATCH", str(2048 // n)).replace("    optimizer.zero_grad()\n", "")
    written = written.replace("    optimizer.", every) + "        optimizer.zero_grad()\n"
    assert best["peak_allocated_bytes"] == peak(tmp_path, MODEL + written)


def test_parts_that_end_before_an_update_of_the_whole_are_no_cure(stage: Stage) -> None:
    loop = LOOP.replace(FOR, "step = 0\nwhile step < 3:\n    step += 1")
    stage.script(MODEL + loop.replace("BATCH", "int(sys.argv[1])"))

    words = ("--batch", "2048", "--fits-on", "140MiB", "--cure")
    found = stage.json(*words, "train.py", "--", "{batch}", code=1)

    parts = [one for one in found["tried"] if one["treatments"][0]["code"] == "accumulate"]
    assert parts
    assert not any(one["fits"] for one in parts)
    assert "second update" in parts[0]["error"]


def test_parts_that_lower_nothing_are_tried_once(stage: Stage) -> None:
    last = "kept = torch.zeros(200 << 18, device='cuda')\n"
    stage.script(MODEL + LOOP.replace("BATCH", "int(sys.argv[1])") + last)

    words = ("--batch", "64", "--fits-on", "100MiB", "--cure")
    found = stage.json(*words, "train.py", "--", "{batch}", code=1)

    parts = [part for one in found["tried"] for part in one["treatments"]]
    assert {part["title"] for part in parts if part["code"] == "accumulate"} == {
        "batch 32 x 2 accumulated"
    }


@pytest.mark.slow
def test_combinations_are_tried_where_nothing_single_fits(stage: Stage) -> None:
    stage.script(MODEL + LOOP.replace("BATCH", "256 * int(sys.argv[1])"))

    words = "--cure", "--fits-on", "68MiB", "--batch", "8", "--format", "json"
    done = stage.run(*words, "train.py", "--", "{batch}")
    found = json.loads(done.stdout)

    assert done.returncode == 1
    codes = [[part["code"] for part in one["treatments"]] for one in found["tried"]]
    assert ["checkpoint", "accumulate"] in codes
    assert ["accumulate"] in codes


@pytest.mark.slow
def test_what_lowers_the_update_is_tried_on_top_of_smaller_batches(stage: Stage) -> None:
    """By itself it saves nothing, as the peak of the unchanged program is elsewhere."""
    stage.script(MODEL + LOADER)

    cure = stage.json("--cure", "--fits-on", "124MiB", "train.py", code=1)["cure"]

    assert [part["code"] for part in cure["treatments"]] == ["accumulate", "fused"]
    assert "x 64 accumulated" not in cure["title"]  # no more parts than necessary


PAIRED = """
import torch
model = torch.nn.Linear(8, 1).cuda()
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.ones(9001, 8, device="cuda"), torch.ones(9001, device="cuda")
for step in range(3):
    loss = (model(x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
AS_WIDE_AS_HIGH = """
import torch
model = torch.nn.Linear(9001, 9001).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(8, 9001, device="cuda")).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("text", "is_told"), [(PAIRED, True), (AS_WIDE_AS_HIGH, False)])
def test_shapes_that_combine_each_row_with_each_are_told(
    stage: Stage, text: str, is_told: bool
) -> None:
    stage.script(text)

    found = stage.json("--cure", "--fits-on", "400MiB", "train.py", code=1)

    told = [one for one in found["tried"] if one["treatments"][0]["code"] == "all-pairs"]
    assert bool(told) is is_told
    assert all(one["fits"] and one["numerics"] == "different" for one in told)
    assert all("9,001 x 9,001 numbers at train.py:7" in one["title"] for one in told)


def test_program_that_fails_is_no_cure_and_ends_with_2(stage: Stage) -> None:
    stage.script(MODEL + "raise ValueError('no')")

    done = stage.run("--cure", "--fits-on", "1GiB", "train.py")

    assert done.returncode == 2
    assert "ValueError: no" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--cure", "--gpu", "a100,h100"),
        ("--cure", "--fits-on", "1GiB", "--snapshot", "x.pickle"),
        ("--cure",),
        ("--cure", "--fits-on", "1GiB", "--time", "soon"),
    ],
)
def test_cure_is_about_one_program_on_one_gpu(stage: Stage, words: tuple[str, ...]) -> None:
    stage.script(MODEL + LOOP)

    assert stage.run(*words, "train.py").returncode == 2


def test_search_ends_when_its_time_is_over(stage: Stage) -> None:
    stage.script(MODEL + LOOP)

    found = cure(stage, "100MiB", "--time", "0.001s", code=1)

    assert found["is_cut_short"]
    assert found["cure"] is None


def test_change_under_way_is_cut_short_when_the_time_is_over(stage: Stage) -> None:
    slow = f"import time\ntime.sleep({SLOW_S})\n"
    stage.script(MODEL + slow + LOOP)

    found = cure(stage, "100MiB", "--time", f"{SLOW_S / 3}s", code=1)

    assert found["is_cut_short"]
    codes = [one["treatments"][0]["code"] for one in found["tried"]]
    assert codes == ["expandable-segments"]  # which is replayed


@pytest.mark.usefixtures("prepared")
def test_unchanged_program_takes_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_try(title: str) -> None:
        titles.append(title)
        if title == "the unchanged program":
            monkeypatch.setattr(time, "monotonic", lambda: now() + 600)

    titles: list[str] = []
    now = time.monotonic
    path = tmp_path / "train.py"
    path.write_text(MODEL + LOOP)
    program = Program(str(path), is_module=False, args=[], pythons=[sys.executable])
    conditions = RehearsalConditions(gpu=rehearsed_gpu("h100", 100 << 20, is_unlimited=False))

    found = search.CureSearch(program, conditions, None, 600, on_try).run()

    assert found.is_cut_short
    assert titles == ["the unchanged program", "expandable segments"]


@pytest.mark.usefixtures("prepared")
@pytest.mark.parametrize(
    ("text", "until", "before"),
    [(LOOP, "fused", "checkpoint"), (GATHERED, "batches of", "keep on the host what train.py")],
)
def test_what_mostly_cures_is_tried_before_what_seldom_does(
    text: str, until: str, before: str, tmp_path: Path
) -> None:
    class UntilError(Exception):
        pass

    def on_try(title: str) -> None:
        titles.append(title)
        if title.startswith(until):
            raise UntilError

    titles: list[str] = []
    path = tmp_path / "train.py"
    path.write_text(LM.replace('int("2048")', "2048") + text)
    program = Program(str(path), is_module=False, args=[], pythons=[sys.executable])
    conditions = RehearsalConditions(gpu=rehearsed_gpu("h100", 130 << 20, is_unlimited=False))

    with pytest.raises(UntilError):
        search.CureSearch(program, conditions, None, 600, on_try).run()

    assert any(title.startswith(before) for title in titles)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("5m", 300), ("1.5h", 5400), ("7", 7)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "0s", "nan", "5 parsecs"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_seconds(text)


def tried(code: str, needs: int, capacity: int = 100, numerics: Numerics = Numerics.EXACT,
          compute: float | None = 0.0) -> Tried:  # fmt: skip
    treatment = Treatment(code, f"{code} {needs}", numerics, compute)
    return Tried([treatment], needs <= capacity, needs, needs)


def test_results_count_more_than_compute_and_known_compute_more_than_unknown() -> None:
    order = sorted(
        [
            tried("a", 1, numerics=Numerics.DIFFERENT),
            tried("b", 1, compute=None),
            tried("c", 1, compute=0.3),
            tried("d", 1, numerics=Numerics.ROUNDING),
        ],
        key=lambda one: one.rank,
    )

    assert [one.treatments[0].code for one in order] == ["c", "b", "d", "a"]


def test_what_is_easy_to_write_comes_first_where_compute_is_the_same() -> None:
    kept = Treatment(
        "kept", "kept", Numerics.EXACT, lines=["..."] * 9, place=Place.BEFORE_OPTIMIZER
    )
    words = Treatment("words", "words", Numerics.EXACT, lines=["..."] * 5, instead="Trainer(n=2)")
    sketch = Treatment("sketch", "sketch", Numerics.EXACT, lines=["..."])

    order = sorted(
        (Tried([one], True, 1, 1) for one in (sketch, kept, words)), key=lambda t: t.rank
    )

    assert [one.title for one in order] == ["words", "kept", "sketch"]


def test_words_of_the_framework_stand_in_place_of_a_sketch() -> None:
    words = Treatment("words", "words", Numerics.EXACT, lines=["for ..."], instead="Trainer(n=2)")
    found = Prescription("train.py", "", 1, 2, False, [Tried([words], True, 1, 1)], [])

    text = render(document(found), RenderOptions())

    assert "Write Trainer(n=2)." in text
    assert "for ..." not in text


def test_program_that_trains_nothing_is_promised_no_gradients() -> None:
    shorter = Treatment("evaluated-in", "batches of 8", Numerics.EXACT)
    found = Prescription(
        "ask.py", "", 1, 2, False, [Tried([shorter], True, 1, 1)], [], trains=False
    )

    text = render(document(found), RenderOptions())

    assert "same results" in text
    assert "gradients" not in text


COMPILED = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

model = Net().cuda()
compiled = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for _ in range(4):
    compiled(torch.randn(8192, 128, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Inductor needs Triton")
def test_compiled_program_needs_what_it_needs_unseen_and_goes_by_its_own_names(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, COMPILING)
    stage.script(COMPILED)
    as_it_is = stage.json("--fits-on", "8GiB", "train.py")

    found = cure(stage, "240MiB", code=1)  # one change is enough: each try compiles anew

    assert found["cure"]
    assert as_it_is["needs_bytes"] == found["needs_bytes"]
    treatments = [part for one in found["tried"] for part in one["treatments"]]
    assert "fused" not in {part["code"] for part in treatments}
    assert "step-in-backward" in {part["code"] for part in treatments}  # nothing is added up
    blocks = [part for part in treatments if part["code"] == "checkpoint"]
    assert any("in model.blocks" in line for part in blocks for line in part["lines"])


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Inductor needs Triton")
def test_compiled_model_with_checkpointed_blocks_is_one_graph(tmp_path: Path) -> None:
    stage = Stage(tmp_path, COMPILING)
    whole = COMPILED.replace("torch.compile(model)", "torch.compile(model, fullgraph=True)")
    lines = CHECKPOINTED.replace("model.layers", "model.blocks")
    stage.script(whole.replace("optimizer =", f"{lines}optimizer =", 1))

    assert stage.json("--fits-on", "8GiB", "train.py")["rehearsal"]["fits"]


def test_of_each_kind_one_is_shown_the_cheapest_that_fits_or_the_least() -> None:
    fitting, larger = tried("a", 90), tried("a", 80)
    failing = [tried("b", 150), tried("b", 120)]

    assert shown([fitting, larger, *failing]) == [fitting, failing[1]]


NOTHING = {
    "head": None, "parts": [], "n_optimizers": 1, "n_passes": 2, "clips": False,
    "scales": False, "schedules": False, "is_distributed": True, "framework": "",
    "trains": True, "evaluated": {},
}  # fmt: skip


def test_what_there_is_nothing_for_is_said_with_its_reason() -> None:
    traits = NOTHING | {
        "checkpoints": True, "blocks": {}, "units": {}, "batches": {}, "autocasts": True,
        "optimizers": ["SGD"],
    }  # fmt: skip

    said = list(catalogue.left_out(traits | {"conf": "expandable_segments:True"}))

    assert LeftOut("checkpoint", "the program already checkpoints") in said
    assert LeftOut("step-in-backward", "gradients are accumulated") in said
    assert {"accumulate", "autocast", "expandable-segments"} <= {one.code for one in said}


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("trainer", ["fsdp=", '"stage": 3', "tp_size=N"]),
        ("lightning", ['strategy="fsdp"', "deepspeed_stage_3", "tensor_parallel_size=N"]),
        ("accelerate", ["fsdp_plugin=", "zero_stage=3", "tp_size=N"]),
    ],
)
def test_changes_over_gpus_are_said_in_the_words_of_the_framework(
    framework: str, words: list[str]
) -> None:
    traits = NOTHING | {
        "checkpoints": True, "batches": {}, "autocasts": True, "optimizers": ["SGD"],
        "framework": framework, "is_distributed": False,
    }  # fmt: skip

    reasons = {one.code: one.reason for one in catalogue.left_out(traits)}

    for code, part in zip(("fully-shard", "zero", "tensor-parallel"), words, strict=True):
        assert part in reasons[code]
        assert "--world-size N" in reasons[code]


def traits_of(home: Path, text: str, *specs: str) -> dict[str, Any]:
    path = home / "train.py"
    path.write_text(text)
    unlimited = rehearsed_gpu("h100", None, is_unlimited=True)
    conditions = RehearsalConditions(
        gpu=unlimited, observes=True, n_steps=1000, treatments=[*specs]
    )
    program = Program(str(path), is_module=False, args=[], pythons=[sys.executable])
    found = runner.rehearse(program, conditions, home / "s.pickle", None, PREPARED).traits
    return dict(found)


def test_operations_are_counted_forward_and_backward(tmp_path: Path) -> None:
    traits = traits_of(tmp_path, LM + CLASSES)

    of_block = 4 * 2 * 2048 * (2 * 256 * 1024)
    of_head = 4 * 2 * 2048 * 256 * 8192
    of_first = 4 * 2 * 2048 * 256 * 256  # its inputs need no gradient
    for part in traits["parts"]:
        assert sum(p["n_flops"] for c in part["calls"] for p in c["products"]) == of_block
    assert traits["head"] == {
        "path": "head",
        "written": ".head",
        "owner": "",
        "is_cast": False,
        "loss": "",
        "how": {"ignore_index": -100, "label_smoothing": 0.0, "reduction": "mean"},
        "n_flops": of_head,
    }
    assert traits["n_flops"] == 3 * (6 * of_block + of_head) + 2 * of_first


@pytest.mark.parametrize("n_own", [4, 2, 1])
def test_queries_that_share_keys_and_values_cost_as_much_as_with_their_own(
    n_own: int, tmp_path: Path
) -> None:
    traits = traits_of(
        tmp_path,
        f"""
import torch

kind = {{"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}}
q, k = (torch.randn(2, n, 64, 32, **kind) for n in (4, {n_own}))
for _ in range(2):
    y = torch.nn.functional.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    y.sum().backward()
""",
    )

    product = 2 * 2 * 4 * 64 * 64 * 32
    assert traits["n_flops"] == 2 * (2 + 5) * product


def test_batches_are_told_apart_by_what_is_trained_on(tmp_path: Path) -> None:
    traits = traits_of(tmp_path, MODEL + LOADER + PREDICTED)

    assert [1024] == [*traits["batches"].values()]  # of a loader an epoch
    assert [4096] == [*traits["evaluated"].values()]
    accumulated, evaluated = (
        catalogue.accumulated(traits, 2),
        catalogue.evaluated_in(traits, 8),
    )
    assert accumulated.title == "batch 512 x 2 accumulated"
    halved = PREDICTED.replace("4096", "512")
    without = "torch.set_grad_enabled(False)" + PREDICTED.replace("4096", "64")
    (trained,) = traits_of(tmp_path, MODEL + LOADER + without)["batches"]
    assert peak(tmp_path, MODEL + LOADER + without, f"accumulate:2:{trained}") == peak(
        tmp_path, MODEL + ACCUMULATED + without
    )
    assert peak(tmp_path, MODEL + LOADER + PREDICTED, *evaluated.specs) == peak(
        tmp_path, MODEL + LOADER + halved
    )


def test_sparse_gradients_have_traits_as_others_do(tmp_path: Path) -> None:
    traits = traits_of(
        tmp_path,
        """
import torch

table = torch.nn.Embedding(512, 64, sparse=True).cuda()
optimizer = torch.optim.SparseAdam(table.parameters())
for step in range(3):
    optimizer.zero_grad()
    table(torch.zeros(8, dtype=torch.long, device="cuda")).sum().backward()
    optimizer.step()
""",
    )

    assert traits["n_passes"] == 1


def test_batches_of_loaders_that_one_line_makes_are_told_apart_by_their_size(
    tmp_path: Path,
) -> None:
    loaders = "\nboth = [DataLoader(data, batch_size=n) for n in (1024, 4096)]\noptimizer"
    text = LOADER.replace("\noptimizer", loaders) + PREDICTED
    for n, size in enumerate((1024, 4096)):
        text = text.replace(f"in DataLoader(data, batch_size={size})", f"in both[{n}]")

    traits = traits_of(tmp_path, MODEL + text)

    assert [1024] == [*traits["batches"].values()]
    assert [4096] == [*traits["evaluated"].values()]


CLASSES_OF = "torch.nn.functional.cross_entropy(z, y)"
SMOOTHED = CLASSES_OF.replace("y)", "y, label_smoothing=0.1)")
DRAWN = "y = torch.randint(64, (len(x),), device='cuda')"
CHOSEN = "torch.nn.functional.cross_entropy(z[p], y[p])"
SHUFFLED = "p = torch.randperm(len(z), device='cuda')"
FROM = "import torch.nn.functional as F"
OF_ROWS = "loss = model(x.cuda()).square().mean()"


def normed(made: str, used: str) -> str:
    model = MODEL.replace("self.first, ", f"self.norm = nn.{made}\n        self.first, ")
    return model.replace("x = self.first(x)", f"x = self.first(x)\n        x = {used}") + LOADER


def lost(loss: str, *before: str) -> str:
    lines = "\n        ".join(["z = model(x.cuda())", *before, f"loss = {loss}"])
    return MODEL + LOADER.replace(OF_ROWS, lines)


def penalized(score: str) -> str:
    made = "x = x.cuda().requires_grad_()", "z = model(x)"
    return lost(
        "g.square().mean()", *made, f"g, = torch.autograd.grad({score}, x, create_graph=True)"
    )


def test_gradients_that_a_loss_is_made_of_are_no_pass_of_their_own(tmp_path: Path) -> None:
    assert traits_of(tmp_path, penalized("z.sum()"))["n_passes"] == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MODEL + LOADER, ""),
        (lost("-z.softmax(1).log()[:, 0].sum() / len(z) + 0.1 * z.abs().mean()"), ""),
        (lost("(w * z.square().mean() + v) / 3", "w, v = torch.ones(2, device='cuda')"), ""),
        (lost("torch.nn.functional.mse_loss(z, torch.zeros_like(z)) + 0.1 * z.abs().mean()"), ""),
        (lost("torch.nn.functional.huber_loss(z, 0 * z)"), ""),
        (normed("InstanceNorm1d(4)", "self.norm(x.view(-1, 4, 64)).flatten(1)"), ""),
        (normed("BatchNorm1d(256)", "self.norm(x)"), "batch_norm"),
        (lost("torch.nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)).cuda())"), "mm"),
        (lost("(z - z.mean(0)).square().mean()"), "sub"),
        (lost("(z.T @ z - torch.eye(64).cuda()).square().sum()"), "neither a sum"),
        (lost("z.std(0).mean()"), "std"),
        (lost("z.softmax(0).square().mean()"), "_softmax"),
        (lost("z.square().mean().sqrt()"), "sqrt"),
        (lost("(z * m).sum() / m.sum()", "m = x.cuda()[:, :64]"), "div"),
        (lost("z.square().mean() if len(z) > 512 else z.sum()"), "depends on the size"),
        (lost("(z / len(z)).square().sum()"), "neither a sum nor a mean"),
        (lost("z.square().mean() + z.sum()"), "neither a sum nor a mean"),
        (lost("z.square().sum() + model.first.weight.norm()"), "neither a sum nor a mean"),
        (lost("z.square().sum() / len(z) ** 2"), "neither a sum nor a mean"),
        (lost(CLASSES_OF, "y = torch.where(x[:, 0] > 0, 5, -100).cuda()"), "weighs the rows"),
        (lost(CLASSES_OF, "y = torch.where(x[:, 0].cuda() > 0, 5, -100)"), "weighs the rows"),
        (lost(CLASSES_OF, "y = torch.full((len(x),), 5).cuda()"), ""),
        (lost(SMOOTHED, "y = torch.full((len(x),), 5).cuda()"), ""),
        (lost("(z.mean(1) * m).sum() / m.sum()", "m = (torch.arange(len(x)) < 2000).cuda()"), ""),
        (lost("(z.mean(1) * m).sum() / m.sum()", "m = (torch.arange(len(x)) > 9).cuda()"), "nor"),
        (penalized("z.sum()"), ""),
        (penalized("z.mean()"), "neither a sum nor a mean"),
        (lost(CLASSES_OF, DRAWN), ""),
        (lost(SMOOTHED, DRAWN), ""),
        (lost(CLASSES_OF, DRAWN.replace("x),", "x), 9"), "y = y[:, 1:2].flatten()"), ""),
        (lost(CHOSEN, DRAWN, SHUFFLED), ""),
        (lost(CHOSEN, "y = torch.full((len(x),), 5).cuda()", SHUFFLED), ""),
        (lost(CHOSEN, "y = torch.full((len(x),), -100).cuda()", SHUFFLED), "weighs the rows"),
        (lost("(z * z[p]).mean()", SHUFFLED), "different orders"),
        (lost("(z * z.index_select(0, p)).mean()", SHUFFLED), "different orders"),
        (lost("(z[p] * x[p]).mean()", SHUFFLED, "x = x.cuda()[:, :64]"), ""),
        (lost("(z[p] * z.gather(0, p[:, None])).mean()", SHUFFLED), "different orders"),
        (lost("(z + torch.zeros_like(z).index_add_(0, p, z)).mean()", SHUFFLED), "orders"),
        (lost("(z[:, 0] * z[torch.arange(len(z)), y]).mean()", DRAWN), ""),
        (lost("(z[:, 0] * z.gather(1, y[:, None])[:, 0]).mean()", DRAWN), ""),
        (lost("z[z[:, 0] > 0].mean()"), "by their values"),
        (lost("(z[1:] - z[:-1]).square().mean()"), "in proportion"),
        (lost("z.topk(len(z) // 4, 0).values.mean()"), "topk"),
        (lost("(z + z.roll(64)).mean()"), "roll"),
        (lost("(z + z.roll(3, 1)).mean()"), ""),
        (
            lost("F.scaled_dot_product_attention(z, z, z).mean()", FROM, "z = z[None, None]"),
            "atten",
        ),
        (
            lost("F.conv1d(z, z.new_ones(64, 64, 3), padding=1).mean()", FROM, "z = z.T[None]"),
            "conv",
        ),
    ],
)
def test_parts_of_a_batch_add_up_where_each_row_is_by_itself(
    text: str, reason: str, tmp_path: Path
) -> None:
    whole, half = (
        traits_of(tmp_path, made) for made in (text, text.replace("size=1024", "size=512"))
    )

    whole["mixing"], is_sum = mixing(whole["losses"], half["losses"], 2)

    assert not is_sum
    assert reason in whole["mixing"]
    assert bool(reason) == bool(whole["mixing"])
    numerics = Numerics.DIFFERENT if reason else Numerics.EXACT
    assert catalogue.accumulated(whole, 2).numerics is numerics
    assert catalogue.sharded(whole, 2).numerics is numerics


SUMMED = 'torch.nn.functional.cross_entropy(z, y, ignore_index=5, reduction="sum")'


@pytest.mark.parametrize(
    "text",
    [
        lost("z.square().sum() / 8 + z.abs().sum()"),
        lost("(z / len(z)).sum() * len(z)"),
        lost('torch.nn.functional.mse_loss(z, torch.zeros_like(z), reduction="sum")'),
        lost(SUMMED, "y = torch.full((len(x),), 5).cuda()"),
    ],
)
def test_parts_of_a_sum_add_up_without_division(text: str, tmp_path: Path) -> None:
    whole, half = (
        traits_of(tmp_path, made) for made in (text, text.replace("size=1024", "size=512"))
    )

    whole["mixing"], whole["is_sum"] = mixing(whole["losses"], half["losses"], 2)

    assert ("", True) == (whole["mixing"], whole["is_sum"])
    accumulated = catalogue.accumulated(whole, 2)
    assert accumulated.numerics is Numerics.EXACT
    assert "    loss.backward()  # a sum over rows" in accumulated.lines
    in_lightning = catalogue.accumulated(whole | {"framework": "lightning", "n_passes": 4}, 2)
    assert "the loss times 2" in in_lightning.instead
    assert "accumulate_grad_batches=8" in in_lightning.instead  # it accumulates four already


def test_parts_of_a_scaled_loss_add_up_though_updates_are_left_out(tmp_path: Path) -> None:
    text = MODEL + LOADER.replace("for epoch", "scaler = torch.amp.GradScaler()\nfor epoch", 1)
    text = text.replace("loss.backward()", "scaler.scale(loss).backward()")
    text = text.replace("optimizer.step()", "scaler.step(optimizer)\n        scaler.update()")
    whole, half = traits_of(tmp_path, text), traits_of(tmp_path, text, "accumulate:2")

    assert mixing(whole["losses"], half["losses"], 2) == ("", False)
    assert catalogue.accumulated(whole | {"clips": True, "schedules": True}, 2).lines[2:] == [
        "    scaler.scale(loss / 2).backward()",
        "    if (i + 1) % 2 == 0:  # clip gradients and step the schedule here, too",
        "        scaler.step(optimizer)",
        "        scaler.update()",
        "        optimizer.zero_grad()",
    ]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_autocast_within_a_forward_pass_is_in_use(is_enabled: bool, tmp_path: Path) -> None:
    cast = f"model.forward = torch.autocast('cuda', enabled={is_enabled})(model.forward)\n"

    traits = traits_of(tmp_path, MODEL + cast + LOOP)

    assert traits["autocasts"] is is_enabled


def test_batches_are_split_into_equal_parts() -> None:
    assert {1: [], 7: [7], 12: [2, 4, 12], 16: [2, 4, 8, 16]} == {
        size: [*_parts(size)] for size in (1, 7, 12, 16)
    }


def test_models_that_are_trained_in_turn_are_not_accumulated_exactly(tmp_path: Path) -> None:
    other = LOADER.replace(
        "        optimizer.step()\n",
        "        optimizer.step()\n        other.zero_grad()\n"
        "        model(x.cuda()).mean().backward()\n        other.step()\n",
    ).replace("for epoch", "other = torch.optim.SGD(model.parameters(), 0.1)\nfor epoch")
    traits = traits_of(tmp_path, MODEL + other)

    assert catalogue.accumulated(traits | {"mixing": ""}, 2).numerics is Numerics.DIFFERENT


def test_batch_is_trained_on_though_another_model_sees_it_first(tmp_path: Path) -> None:
    text = LOADER.replace(
        OF_ROWS, "with torch.no_grad():\n            teacher(x.cuda())\n        " + OF_ROWS
    )

    traits = traits_of(tmp_path, MODEL + "teacher = Net().cuda()\n" + text + PREDICTED)

    assert ([1024], [4096]) == ([*traits["batches"].values()], [*traits["evaluated"].values()])


OWN_NAMES = """
class Run:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=1e-3)

run = Run(model)
del model
for step in range(2):
    run.net(torch.randn(64, 256, device="cuda")).square().mean().backward()
    run.opt.step()
"""


@pytest.mark.parametrize("code", ["state-on-host", "step-in-backward"])
def test_lines_have_the_names_of_the_program_and_do_what_was_said(
    code: str, tmp_path: Path
) -> None:
    text = MODEL + OWN_NAMES
    traits = traits_of(tmp_path, text)
    place = traits["place"]
    place["optimizer"] = optimizer_name(place)
    (treatment,) = [one for one in catalogue.simple(traits) if one.code == code]

    written = patched(text, traits, [treatment])

    assert ("net", "self.opt") == (place["model"], place["optimizer"])
    assert written is not None
    assert peak(tmp_path, text, code) == peak(tmp_path, written)


TWO_MODELS = """
critic = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
other = torch.optim.AdamW(critic.parameters(), lr=1e-3)
for step in range(4):
    for own in (optimizer, other):
        own.zero_grad()
    critic(model(torch.randn(2048, 256, device="cuda"))).mean().backward()
    for own in (optimizer, other):
        own.step()
"""


def test_change_of_models_goes_before_the_last_of_several_optimizers(tmp_path: Path) -> None:
    text = MODEL + TWO_MODELS
    traits = traits_of(tmp_path, text)
    parts = [part["written"] for part in traits["parts"]]
    (number,) = [n for n, written in enumerate(parts) if written == "model.layers[0]"]
    treatment = catalogue.checkpointed(traits, Plan.of([Choice(number, (), 0)]))

    written = patched(text, traits, [treatment])

    assert written is not None
    assert peak(tmp_path, written) == peak(tmp_path, text, *treatment.specs) < peak(tmp_path, text)
    simple = {one.code: one.place for one in catalogue.simple(traits)}
    assert simple["fused"] is simple["state-on-host"] is Place.OPEN


ARGUMENTS = """
class Arguments(dict):
    __slots__ = ()
    __getattr__ = dict.__getitem__
arguments = Arguments(lr=1)
"""


@pytest.mark.parametrize(
    ("made", "name"),
    [
        ("[model]", "nets[0]"),
        ("{'a': model}", "nets['a']"),
        (f"[model]{ARGUMENTS}", "nets[0]"),  # raises KeyError for what it has not
    ],
)
def test_model_in_a_list_is_written_by_its_index(made: str, name: str, tmp_path: Path) -> None:
    text = f"{MODEL}nets = {made}\ndel model\n" + LOOP.replace("model.par", f"{name}.par")

    traits = traits_of(tmp_path, text.replace("model(x)", f"{name}(x)"))

    assert traits["place"]["model"] == name
    assert any(part["written"] == f"{name}.layers[0]" for part in traits["parts"])


def test_head_that_the_program_calls_by_itself_is_found(tmp_path: Path) -> None:
    by_hand = CLASSES.replace("model(x)", "model.head(torch.relu(model.first(x)))")

    assert traits_of(tmp_path, LM + by_hand)["head"]["path"] == ""


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ("loss.backward()", "loss.backward(retain_graph=True)\n    loss.backward()", "accumulated"),
        ("optimizer.step()",
         "torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n    optimizer.step()", "clipped"),
        (MADE, MADE + "torch.optim.lr_scheduler.StepLR(optimizer, 1)\n", "scheduled"),
        (MADE, MADE + "torch.optim.SGD(model.parameters())\n", "several"),
    ],
)  # fmt: skip
def test_updates_in_the_backward_pass_are_left_out_where_they_change_results(
    before: str, after: str, reason: str, tmp_path: Path
) -> None:
    traits = traits_of(tmp_path, MODEL + LOOP.replace(before, after))

    (said,) = [one for one in catalogue.left_out(traits) if "backward" in one.code]
    assert reason in said.reason


def test_a_short_form_is_tried_again_where_the_replay_was_wrong(monkeypatch) -> None:
    """The replay says 95 of 100, the rehearsal 110: the next set may need 85 by replay."""
    monkeypatch.setattr(catalogue, "checkpointed", lambda _, plan: plan)
    limits: list[int] = []
    base = SimpleNamespace(
        traits={}, whole=lambda limit: limits.append(limit) or limit, needs_bytes=lambda _: 95
    )
    needs = iter([110, 99])
    searching = Fake()
    searching._capacity_bytes = 102  # of which 2 are left
    searching._try = lambda *_: tried("checkpoint", next(needs))

    searching._try_whole(base, 98, ())

    assert limits == [98, 85]


def test_sets_of_modules_leave_room_for_what_is_not_known_to_the_byte(monkeypatch) -> None:
    """The replay is right: a set that needs 998 of 1000 fits, but one that needs 990 is safe."""

    class Need(NamedTuple):
        need: int
        cost: int

    monkeypatch.setattr(catalogue, "checkpointed", lambda _, plan: plan)
    plans = [Need(n, 1000 - n) for n in (998, 990, 985)]
    base = SimpleNamespace(
        traits={},
        cheapest=lambda limit: next(p for p in plans if p.need <= limit),
        needs_bytes=lambda plan: plan.need,
    )
    searching = Fake()
    searching._capacity_bytes = 1000
    searching._try = lambda plan: tried("checkpoint", plan.need, 1000)

    assert searching._cheapest_tried(base, {}, ())[1] is plans[1]


def test_what_just_fits_comes_after_what_surely_fits() -> None:
    searching = Fake()
    searching._capacity_bytes = 100
    order = sorted(
        [
            tried("a", 1, numerics=Numerics.DIFFERENT),
            tried("b", 1, compute=None),
            tried("c", 100, compute=0.1),
            tried("d", 99, compute=0.2),
        ],
        key=searching._order,
    )

    assert [one.treatments[0].code for one in order] == ["d", "c", "b", "a"]


class Fake(CureSearch):
    """A search whose rehearsals end as they are told to."""

    def __init__(self, stopped: str = "", *, compiles: bool = False) -> None:
        gpu = rehearsed_gpu("1GiB", None, is_unlimited=False)
        program = Program("t.py", is_module=False, args=[], pythons=[])
        super().__init__(program, RehearsalConditions(gpu=gpu), None, 9.0)
        self._as_it_is = self.ended(stopped)
        self._ends_at, self._compiles = inf, compiles
        self.stopped = ""
        self.observed: list[bool] = []

    def ended(self, stopped: str) -> Any:
        found = runner.Rehearsal(
            "", False, None, "", True, 16, stopped, 1, 1, None, 0, [], [], [], [], "", "", "",
            partial_reason=stopped,
        )  # fmt: skip
        return search._Seen(found, Any, 1)

    def _rehearse(self, conditions: RehearsalConditions, _: Any = ()) -> Any:
        self.observed.append(conditions.observes)
        return self.ended(self.stopped)


@pytest.mark.parametrize(
    ("as_it_is", "changed", "fits"),
    [
        ("", "", True),
        ("", "steps 2 to 12 asked for the same memory", False),
        (
            "steps 2 to 16 asked for the same memory",
            "steps 2 to 12 asked for the same memory",
            True,
        ),
        ("steps 2 to 16 asked for the same memory", "", True),
    ],
)
def test_a_change_is_rehearsed_as_far_as_the_unchanged_program(
    as_it_is: str, changed: str, fits: bool
) -> None:
    searching = Fake(as_it_is)
    searching.stopped = changed

    tried = searching._try(Treatment("fused", "fused", Numerics.EXACT, specs=["fused"]))

    assert tried.fits is fits
    assert ("Not rehearsed as far" in tried.error) is not fits


@pytest.mark.parametrize("is_whole", [True, False])
def test_nothing_is_taken_to_follow_the_end_of_the_program_with_a_change(
    is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change may be stopped earlier, because it already has too much."""
    asked: list[bool] = []

    def need(_: Any, *, goes_on: bool) -> Any:
        asked.append(goes_on)
        return SimpleNamespace(bytes=lambda: 1)

    searching = Fake()
    searching._is_whole, searching._snapshot, searching._runs = is_whole, Path(), None
    stopped = searching.ended("steps 2 to 12 asked for the same memory").found
    monkeypatch.setattr(search.runner, "rehearse", lambda *_: stopped)
    for name in ("read_snapshot", "trace_of"):
        monkeypatch.setattr(search, name, lambda _: None)
    monkeypatch.setattr(search, "Need", need)

    CureSearch._rehearse(searching, searching._conditions)

    assert asked == [not is_whole]


@pytest.mark.parametrize("fits", [True, False])
def test_no_results_are_given_up_where_exact_changes_add_up(fits: bool) -> None:
    asked: list[Any] = []
    kept_away = [Treatment(code, code, Numerics.EXACT, None) for code in ("a", "b")]
    other = [Treatment("autocast", "autocast", Numerics.ROUNDING)]
    searching: Any = Fake()
    searching._can_checkpoint = True
    searching._checkpoint = lambda *parts: asked.append([*parts])
    searching._helping = lambda: kept_away
    searching._as_it_is = SimpleNamespace(found=SimpleNamespace(peak_allocated_bytes=2))
    searching._try = lambda *parts, **_: Tried(parts, fits and len(parts) > 1, 1, 1)

    searching._combine(NOTHING | {"batches": {}}, other)

    assert (other in asked) is not fits


def test_updates_in_the_backward_pass_are_tried_with_checkpoints() -> None:
    step = Treatment("step-in-backward", "step", Numerics.EXACT)
    checkpointed: list[Any] = []
    searching: Any = Fake()
    searching._with_batch = lambda traits: traits
    searching._split = searching._combine = lambda *_: None
    searching._checkpoint = lambda *others: checkpointed.append(others)
    searching._saved_bytes, searching._helping = lambda _: 1, list
    searching._try = lambda *parts, **_: Tried(parts, False, 1, 1)

    searching._lower_peak(NOTHING | {"batches": {}}, [step])

    assert checkpointed == [(), (step,)]


def test_need_of_a_change_that_already_has_too_much_is_a_lower_bound() -> None:
    """It is stopped as soon as its steps repeat, and could have needed more after them."""
    searching = Fake()
    searching._capacity_bytes, searching.stopped = 0, "steps 2 to 12 asked for the same memory"

    tried = searching._try(Treatment("fused", "fused", Numerics.EXACT, specs=["fused"]))

    assert (tried.fits, tried.error, tried.is_lower_bound) == (False, "", True)
    assert needs_text(tried) == "at least 1 B"
    searching.stopped = ""
    ended = searching._try(Treatment("sdpa", "sdpa", Numerics.EXACT, specs=["sdpa"]))
    assert (ended.is_lower_bound, needs_text(ended)) == (False, "1 B")


@pytest.mark.parametrize(("compiles", "observed"), [(False, [True]), (True, [True, False])])
def test_what_was_observed_is_rehearsed_again_only_where_it_is_compiled(
    compiles: bool, observed: list[bool]
) -> None:
    searching = Fake(compiles=compiles)
    fused = Treatment("fused", "fused", Numerics.EXACT, specs=["fused"])

    searching._observe(fused)
    assert searching._observe(fused)
    assert searching._try(fused).fits
    assert searching._try(fused).fits

    assert searching.observed == observed


@pytest.mark.parametrize(("n_bytes", "fits"), [(90, True), (110, False)])
def test_what_fits_but_for_gaps_is_tried_with_expandable_segments(
    n_bytes: int, fits: bool, monkeypatch
) -> None:
    """The tensors of a change take 1 byte at once, and its segments 120 of 100."""
    searching = Fake()
    searching._capacity_bytes = 100
    expandable = Treatment("e", "e", Numerics.EXACT, conf="expandable_segments:True")
    searching._expandable = [expandable]
    need = SimpleNamespace(bytes=lambda _, conf: n_bytes, peak_bytes=lambda _, conf: 1)
    seen = search._Seen(searching.ended("").found, need, 120)
    monkeypatch.setattr(searching, "_rehearse", lambda *_: seen)
    offload = Treatment("o", "o", Numerics.EXACT, specs=["o"])

    assert not searching._try(offload).fits

    (both,) = searching._expanded
    assert both.treatments == (offload, expandable)
    assert both.fits is fits
    assert searching._is_cured(*searching._expanded) is fits
