"""Which module of the model the memory of a rehearsal is for."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from module_programs import HELD_OUT, LOOKED_AT, program
from rehearsal_stage import Stage

from fragdoctor.model.modules import KINDS, OUTSIDE

pytestmark = pytest.mark.usefixtures("stage")


def all_of(modules: list[dict[str, Any]], above: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for module in modules:
        path = f"{above}{module['name']}"
        yield path, module
        yield from all_of(module["children"], f"{path}.")


def must_add_up(found: dict[str, Any]) -> None:
    """Every module is what is in it, every column, and all of them are the peak."""
    for _, module in all_of(found["modules"]):
        assert module["total_bytes"] == sum(module[kind] for kind in KINDS)
        for kind in KINDS if module["children"] else ():
            assert module[kind] == sum(child[kind] for child in module["children"])
    peaks = {d["device"]: d["peak_allocated_bytes"] for d in found["devices"]}
    sums = dict.fromkeys(peaks, 0)
    for module in found["modules"]:
        sums[module["device"]] += module["total_bytes"]
    assert sums == peaks


@pytest.mark.parametrize("name", [*LOOKED_AT, *HELD_OUT])
def test_modules_add_up_to_the_peak_to_the_byte(stage: Stage, name: str) -> None:
    found = stage.must_pass(program(name))

    must_add_up(found)
    inside = [m for m in found["modules"] if m["name"] != OUTSIDE]
    assert sum(m["parameters_bytes"] for m in inside) > 0
    assert all(m["parameters_bytes"] == 0 for m in found["modules"] if m["name"] == OUTSIDE)


def test_equal_layers_are_one_row_and_a_shared_weight_is_of_its_first_module(stage: Stage) -> None:
    found = dict(all_of(stage.must_pass(program("tied_weights"))["modules"]))

    layers = found["GPT.layers.0-3"]
    assert layers["n_modules"] == 4
    assert layers["parameters_bytes"] > 0
    assert layers["activations_bytes"] > 0
    assert found["GPT.layers.0-3.mlp"]["n_modules"] == 4
    assert found["GPT.embed"]["parameters_bytes"] == 2000 * 128 * 4
    assert not found.get("GPT.head", {"parameters_bytes": 0})["parameters_bytes"]


def test_two_models_of_one_class_are_told_apart(stage: Stage) -> None:
    found = stage.must_pass(program("adversaries"))

    names = {m["name"].partition(".")[0] for m in found["modules"]}
    assert names == {"Sequential", "Sequential#2", OUTSIDE}


def test_parts_that_are_called_by_themselves_are_parts_of_their_model(stage: Stage) -> None:
    found = stage.must_pass(program("actor_and_critic"))

    assert {m["name"] for m in found["modules"]} == {"Agent", OUTSIDE}


def test_a_failure_in_the_middle_of_a_step_has_the_modules_of_its_peak(stage: Stage) -> None:
    stage.script(program("gpt"))

    found = stage.json("--fits-on", "84MiB", "train.py", code=1)

    must_add_up(found)
    assert any(m["parameters_bytes"] for m in found["modules"])


def test_what_the_program_dumps_itself_has_no_notes_of_ours(stage: Stage) -> None:
    stage.must_pass(
        program("gpt").replace("\ntrain(", "\ntorch.cuda.memory._record_memory_history()\ntrain(")
        + 'for e in torch.cuda.memory._snapshot()["device_traces"][0]:\n'
        + '    assert "nn.Module" not in e.get("user_metadata", ""), e\n'
    )


def test_notes_stay_with_the_snapshot(stage: Stage) -> None:
    stage.script(program("gpt"))
    stage.json("--snapshot", "kept.pickle", "train.py")

    kept = pickle.loads(Path(stage.home, "kept.pickle").read_bytes())

    notes = {e["user_metadata"] for e in kept["device_traces"][0]}
    assert {
        "nn.Module: GPT.layers.0.qkv",
        "nn.Module: GPT.layers.0.qkv (parameters)",
        "nn.Module: GPT.layers.0.qkv (gradients)",
        "nn.Module: GPT.layers.0.qkv (optimizer)",
    } <= notes


PEER = """
import json
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

def followed(model):
    model, made = model, torch.optim.AdamW(model.parameters())
    def step():
        loss_of(model, torch.randint(0, 2000, (4, 64))).backward()
        made.step()
        made.zero_grad()
    step()
    tracker = MemTracker()
    tracker.track_external(model, made)
    with tracker:
        step()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    each = {s.mod_fqn: s.parameter_mem + s.buffer_mem for s in tracker.memory_tracking.values()}
    return {getattr(k, "value", k): v for k, v in peak.items()}, each

with FakeTensorMode():
    print("PEER", json.dumps(followed(GPT())))
"""


@pytest.mark.slow
def test_memtracker_says_the_same_of_parameters_and_optimizer_state(stage: Stage) -> None:
    """PyTorch's MemTracker, on the same model with fake tensors, is the peer.

    It follows tensors: workspaces of cuBLAS and scratch memory of kernels are not in its figures,
    and it calls everything that a forward pass makes an activation.
    """
    pytest.importorskip("torch.distributed._tools.mem_tracker")
    source = program("gpt").rpartition("\ntrain(")[0]
    script = stage.script(source + PEER, "peer.py")
    said = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=True
    )
    line = next(x for x in said.stdout.splitlines() if x.startswith("PEER "))
    peak, each = json.loads(line.removeprefix("PEER "))

    found = stage.must_pass(program("gpt"))

    blocks = 512  # the least block of the allocator: MemTracker on the CPU rounds nothing
    sums = {kind: sum(m[kind] for m in found["modules"]) for kind in KINDS}
    n_parameters = 2 + 4 * 10
    assert 0 <= sums["parameters_bytes"] - peak["Parameter"] < n_parameters * blocks
    n_counts = 4 * n_parameters  # of steps: one number a parameter, on the CPU
    assert sums["optimizer_state_bytes"] == peak["Optstate"] - n_counts
    modules = dict(all_of(found["modules"]))
    assert modules["GPT.embed"]["parameters_bytes"] == each["GPT.embed"]
    of_layers = sum(each[f"GPT.layers.{i}"] for i in range(4))
    assert 0 <= modules["GPT.layers.0-3"]["parameters_bytes"] - of_layers < 40 * blocks


def test_a_module_may_be_called_with_what_torch_func_wraps(stage: Stage) -> None:
    stage.must_pass("""
    import torch
    from torch.func import functional_call, grad, vmap

    net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()).cuda()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters, x):
        return functional_call(net, parameters, (x[None],)).sum()

    x = torch.ones(4, 512, device="cuda")
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    assert found["0.weight"].shape == (4, 512, 512)
    """)


def test_a_module_may_say_itself_what_it_is_equal_to(stage: Stage) -> None:
    """As a metric of torchmetrics does, whose ``==`` makes a metric with both in it."""
    found = stage.must_pass(
        """
        import torch

        class Metric(torch.nn.Module):
            def __init__(self, *parts):
                super().__init__()
                self.n = 0
                for i, part in enumerate(parts):
                    self.add_module(str(i), part)

            def __hash__(self):
                return hash(("Metric", self.n))

            def __eq__(self, other):
                return Metric(self, other)

            def forward(self, x):
                self.n += 1
                return x * 2

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.line, self.one = torch.nn.Linear(4, 4), Metric()
                self.same, self.other = self.one, Metric()

            def forward(self, x):
                return self.other(self.same(self.one(self.line(x))))

        net = Net().cuda()
        for _ in range(3):
            net(torch.zeros(2, 4, device="cuda")).sum().backward()
        """
    )

    must_add_up(found)
    assert any(path.startswith("Net.line") for path, _ in all_of(found["modules"]))
