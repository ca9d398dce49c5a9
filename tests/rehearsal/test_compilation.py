"""``torch.compile``: the memory of the compiled program, without a GPU and without its kernels."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from rehearsal_stage import COMPILING, Stage

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs PyTorch")
has_triton = find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="Inductor needs Triton")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path, COMPILING)


BACKEND = """
    import torch

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
"""
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
def test_a_failure_in_what_inductor_wrote_is_at_a_line_of_the_program(stage: Stage) -> None:
    path = stage.script(
        LAYERS
        + """
    model = torch.compile(Layers().cuda())
    model(torch.ones(1 << 20, 512, device="cuda"))
    """
    )

    place = stage.json("--capacity", "3GiB", "train.py", code=1)["rehearsal"]["out_of_memory"]

    assert place["location"]["filename"].endswith(path.name)
    assert not place["stack"][0]["filename"].endswith(path.name)


@needs_triton
def test_loops_of_a_compiled_function_do_not_part_it(stage: Stage) -> None:
    stage.must_pass(
        LAYERS
        + BACKEND
        + """
    model = Layers().cuda()
    torch.compile(model, backend=backend)(torch.ones(8, 512, device="cuda"))
    assert len(graphs) == 1, len(graphs)
    """
    )


@needs_triton
def test_backward_pass_that_is_traced_is_none_of_the_program(stage: Stage) -> None:
    found = stage.must_pass(
        LAYERS
        + """
    model = torch.compile(Layers().cuda())
    for _ in range(4):
        model(torch.ones(64, 512, device="cuda")).sum().backward()
    """
    )

    assert 4 == found["rehearsal"]["steps"]


@needs_triton
@pytest.mark.slow
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
@pytest.mark.slow
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

    assert any("ran unfused" in n and "no such lowering" in n for n in found["rehearsal"]["notes"])


@needs_triton
@pytest.mark.slow
def test_replayed_graphs_ask_for_nothing_and_own_nothing(stage: Stage) -> None:
    """Once both passes are captured, their results lie in the pool, which is no allocation."""
    stage.must_pass(
        LAYERS
        + """
    model = torch.compile(Layers().cuda(), mode="reduce-overhead")
    x = torch.ones(4096, 512, device="cuda")
    asked, held = [], []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        before = torch.cuda.memory_allocated()
        n = torch.cuda.memory_stats()["allocation.all.allocated"]
        y = model(x)
        asked.append(torch.cuda.memory_stats()["allocation.all.allocated"] - n)
        held.append(torch.cuda.memory_allocated() - before)
        y.sum().backward()
        model.zero_grad()
        del y
    assert asked[3] == asked[4] == 0, asked
    assert held[0] >= size and held[3] == held[4] == 0, held
    """
    )


@needs_triton
@pytest.mark.slow
def test_what_follows_a_replay_spares_what_lives(stage: Stage) -> None:
    """A result that is alive is not overwritten by another function of the same pool."""
    stage.must_pass(
        LAYERS
        + """
    first = torch.compile(lambda x: torch.sin(x) + 1, mode="reduce-overhead")
    second = torch.compile(lambda x: torch.cos(x) * 2, mode="reduce-overhead")
    x = torch.ones(4096, 512, device="cuda")
    for i in range(8):
        torch.compiler.cudagraph_mark_step_begin()
        y = first(x)
        if i > 3:
            before = torch.cuda.memory_allocated()
            z = second(y)
            assert z.data_ptr() != y.data_ptr(), i
            if i == 4:
                assert torch.cuda.memory_allocated() >= before + 2 * size
            del z
        del y
    """
    )


@needs_triton
@pytest.mark.slow
def test_a_result_that_a_later_replay_overwrote_cannot_be_used(stage: Stage) -> None:
    """PyTorch raises an error there; only the shape may be asked for, and a copy lives on."""
    stage.must_pass(
        LAYERS
        + """
    model = torch.compile(Layers().cuda(), mode="reduce-overhead")
    x = torch.ones(64, 512, device="cuda")
    with torch.no_grad():
        first, copy = model(x), model(x).clone()
        last = model(x)
    assert torch.empty_like(first).shape == x.shape
    (copy + last).sum()
    try:
        first.sum()
    except RuntimeError as e:
        assert "overwritten by a subsequent run" in str(e), e
    else:
        raise AssertionError("used after it was overwritten")
    """
    )


@needs_triton
@pytest.mark.slow
def test_trials_of_max_autotune_take_their_buffers(stage: Stage) -> None:
    """A product's inputs and its result are made anew, beside what clears the cache."""
    stage.must_pass(
        """
    import torch

    layer = torch.nn.Linear(2048, 2048).cuda().half()
    x = torch.ones(2048, 2048, device="cuda", dtype=torch.half)
    with torch.no_grad():
        torch.compile(layer, mode="max-autotune-no-cudagraphs")(x)
    size, cache = 2048 * 2048 * 2, torch.cuda.get_device_properties().L2_cache_size
    peak = torch.cuda.max_memory_allocated()
    assert peak >= 5 * size + cache, (peak - cache) / size
    """
    )


@needs_triton
def test_inductor_times_padded_products_in_every_build(stage: Stage) -> None:
    """What it makes for that is random and real, while fake tensors are traced around it."""
    found = stage.must_pass(
        """
    import torch

    layer = torch.nn.Linear(512, 1001).cuda()
    x = torch.ones(2048, 512, device="cuda", requires_grad=True)
    torch.compile(layer)(x).sum().backward()
    cache = torch.cuda.get_device_properties().L2_cache_size
    assert torch.cuda.max_memory_allocated() > cache
    """
    )

    assert found["rehearsal"]["notes"] == []


@needs_triton
def test_a_gpu_that_is_full_while_inductor_times_something_ends_the_program(stage: Stage) -> None:
    stage.script(
        """
        import torch

        layer = torch.nn.Linear(512, 1001).cuda()
        torch.compile(layer)(torch.ones(2048, 512, device="cuda", requires_grad=True))
        """
    )

    assert stage.run("train.py", "--capacity", "60MiB").returncode == 1
    assert stage.run("train.py", "--capacity", "200MiB").returncode == 0


@needs_triton
def test_what_a_kernel_only_reads_is_not_copied(stage: Stage) -> None:
    """Without a GPU to compile for, Dynamo takes every argument of a kernel as changed by it."""
    stage.must_pass(
        """
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def double(source, target, n, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(target + at, 2 * tl.load(source + at, at < n), at < n)

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = torch.empty_like(x)
            double[(x.numel() // 1024,)](x, out, x.numel(), block=1024)
            return out

        @staticmethod
        def backward(ctx, gradient):
            return Double.forward(ctx, gradient)

    x = torch.ones(2048, 2048, device="cuda", requires_grad=True)
    torch.compile(Double.apply)(x).backward(x.detach())
    assert torch.cuda.max_memory_allocated() == 3 * x.nbytes  # it, a result, and a gradient
    """
    )


@needs_triton
def test_each_trial_of_a_kernel_copies_what_it_overwrites_where_there_is_room(
    stage: Stage,
) -> None:
    """To the CPU for the first trial, which raises the peak, and on the GPU for the others."""
    stage.must_pass(
        """
    import torch

    x, y = (torch.ones(2048, 2048, device="cuda") for _ in range(2))

    @torch.compile
    def add(x, y):
        x.add_(y.t())

    add(x, y)
    size, cache = 2048 * 2048 * 4, torch.cuda.get_device_properties().L2_cache_size
    peak = torch.cuda.max_memory_allocated()
    assert peak >= 3 * size + cache, (peak - cache) / size
    """
    )


@pytest.mark.skipif(has_triton, reason="Triton is installed")
def test_without_triton_the_program_runs_eagerly_and_says_so(stage: Stage) -> None:
    found = stage.must_pass(
        LAYERS
        + """
    assert kept(torch.compile(Layers().cuda())) >= 9 * size
    """
    )

    assert any("pip install triton" in n for n in found["rehearsal"]["notes"])


@needs_triton
def test_module_that_traced_code_puts_together_parts_no_graph(stage: Stage) -> None:
    """A slice of a ``ModuleList`` is a new list, and what learns of it is no code of the graph."""
    stage.must_pass(
        LAYERS
        + BACKEND
        + """
    class Sliced(Layers):
        def forward(self, x):
            for layer in self.layers[:2]:
                x = torch.tanh(layer(x))
            return x

    torch.compile(Sliced().cuda(), backend=backend)(torch.ones(8, 512, device="cuda"))
    assert len(graphs) == 1, len(graphs)
    """
    )


@needs_triton
@pytest.mark.slow
def test_sequential_that_compiles_itself_runs_as_dynamo_runs_it(stage: Stage) -> None:
    """Dynamo begins no graph in files of ``torch.nn``, and a module is called in one."""
    stage.must_pass(
        BACKEND
        + """
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.GELU())).cuda()
    model.compile(backend=backend)
    model(torch.ones(8, 64, device="cuda"))
    assert not graphs, len(graphs)
    """
    )


@needs_triton
@pytest.mark.slow
def test_equal_layers_that_are_compiled_one_by_one_try_their_kernels_once(stage: Stage) -> None:
    stage.must_pass(
        """
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(512)

        def forward(self, x):
            return self.norm(torch.sin(x) + x.t()).relu()

    cache, found = torch.cuda.get_device_properties().L2_cache_size, []
    torch.cuda.memory._record_memory_history()
    for _ in range(2):
        layer = Layer().cuda()
        layer.compile()
        layer(torch.ones(512, 512, device="cuda", requires_grad=True)).sum().backward()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        found.append(sum(e["action"] == "alloc" and e["size"] == cache for e in events))
        torch._dynamo.reset()  # or the second layer may find the code of the first
    assert found[0] == found[1] > 0, found
    """
    )
