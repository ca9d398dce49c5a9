"""``torch.compile``: the memory of the compiled program, without a GPU and without its kernels."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from rehearsal_stage import Stage

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
has_triton = find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Inductor needs Triton")

LAYERS = """
    import torch
    from torch import nn

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = torch.sin(torch.tanh(layer(x)) * 2 + 1)
            return x

    def kept(model):
        x = torch.ones(4096, 512, device="cuda")
        for _ in range(2):
            before = torch.cuda.memory_allocated()
            y = model(x)
            made = torch.cuda.memory_allocated() - before
            y.sum().backward()
            model.zero_grad()
            del y
        return made

    size = 4096 * 512 * 4
"""


@needs_triton
def test_compiled_program_keeps_what_its_partition_says(stage: Stage) -> None:
    """Eagerly four results a layer are kept; compiled each layer keeps what its product made."""
    found = stage.must_pass(
        LAYERS
        + """
    eager, compiled = Layers().cuda(), torch.compile(Layers().cuda())
    assert kept(eager) >= 9 * size, kept(eager) / size
    assert kept(compiled) <= 6 * size, kept(compiled) / size
    """
    )

    assert not [n for n in found["rehearsal"]["notes"] if "compile" in n.lower()]


@needs_triton
def test_loops_of_a_compiled_function_do_not_part_it(stage: Stage) -> None:
    stage.must_pass(
        LAYERS
        + """
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = Layers().cuda()
    torch.compile(model, backend=backend)(torch.ones(8, 512, device="cuda"))
    assert len(graphs) == 1, len(graphs)
    """
    )


@needs_triton
@pytest.mark.parametrize(
    "how", ["module.compile()", "module.forward = torch.compile(module.forward)"]
)
def test_compilation_is_asked_for_in_several_ways(stage: Stage, how: str) -> None:
    stage.must_pass(
        LAYERS
        + f"""
    module = Layers().cuda()
    {how}
    assert kept(module) <= 6 * size
    """
    )


@needs_triton
def test_what_inductor_does_not_manage_runs_as_its_partition(stage: Stage) -> None:
    found = stage.must_pass(
        LAYERS
        + """
    import torch._inductor.graph

    def fail(*args, **kwargs):
        raise RuntimeError("no such lowering")

    torch._inductor.graph.GraphLowering.run = fail
    assert kept(torch.compile(Layers().cuda())) >= size
    """
    )

    assert any(
        "its partition" in n and "no such lowering" in n for n in found["rehearsal"]["notes"]
    )


@needs_triton
def test_graphs_and_trials_are_left_out_and_said_so(stage: Stage) -> None:
    found = stage.must_pass(
        LAYERS
        + """
    kept(torch.compile(Layers().cuda(), mode="reduce-overhead"))
    """
    )

    assert any("CUDA graphs" in n for n in found["rehearsal"]["notes"])


@pytest.mark.skipif(has_triton, reason="Triton is installed")
def test_without_triton_the_program_runs_eagerly_and_says_so(stage: Stage) -> None:
    found = stage.must_pass(
        LAYERS
        + """
    assert kept(torch.compile(Layers().cuda())) >= 9 * size
    """
    )

    assert any("pip install triton" in n for n in found["rehearsal"]["notes"])
