"""Parts of ``torch.cuda`` beside memory, which builds without CUDA lack."""

from __future__ import annotations

import pytest
from rehearsal_stage import Stage


def test_marks_tuning_and_figures_of_the_gpu_work(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        from torch.profiler import ProfilerActivity, profile

        x = torch.ones(8, 8, device="cuda")
        nvtx = torch.cuda.nvtx
        with nvtx.range("outer"):
            nvtx.range_push("inner")
            nvtx.range_pop()
        nvtx.mark("here")
        nvtx.range_end(nvtx.range_start("across"))
        with torch.autograd.profiler.emit_nvtx(), torch.cuda.profiler.profile():
            x = x * 2
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            x = x * 2
        profiler.key_averages().table(sort_by="cuda_time_total")
        torch.cuda.tunable.enable(True)
        torch.cuda.tunable.set_max_tuning_duration(7)
        assert not torch.cuda.tunable.is_enabled()  # nothing is timed here
        torch.backends.cuda.cufft_plan_cache.clear()
        assert torch.cuda.utilization() == 0
        taken = torch.cuda.caching_allocator_alloc(1 << 20)
        assert torch.cuda.memory_allocated() > 1 << 20
        torch.cuda.caching_allocator_delete(taken)
        assert torch.cuda.memory_allocated() < 1 << 20
        """
    )


def test_hidden_gpus_are_those_of_this_machine(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stage.must_pass(
        """
        import os, torch
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        model = torch.nn.LSTM(32, 64).cuda()
        model(torch.randn(5, 3, 32, device="cuda"))[0].sum().backward()
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # this speaks of what the program has
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        """
    )


def test_the_configuration_can_be_shown_without_a_driver(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        torch.ones(1, device="cuda")
        assert "built with" in torch.__config__.show()
        from fragdoctor.rehearsal.engine import cuda_api
        def fail():
            raise RuntimeError("CUDA error: CUDA driver version is insufficient")
        cuda_api._show_config = fail
        assert "CUDA Runtime" in torch.__config__.show()
        """
    )


def test_all_that_torch_cuda_asks_of_c_is_there(stage: Stage) -> None:
    stage.must_pass(
        """
        import pathlib, re, torch

        torch.ones(1, device="cuda")
        root = pathlib.Path(torch.__file__).parent
        left_out = {"gds", "green_contexts", "jiterator", "tunable"}
        missing = {
            name
            for folder in ("cuda", "accelerator", "backends/cuda", "backends/cudnn")
            for path in (root / folder).glob("**/*.py") if path.stem not in left_out
            for name in re.findall(r"torch\\._C\\.(\\w+)", path.read_text())
            if not hasattr(torch._C, name)
        }
        assert not missing, missing
        if hasattr(torch.accelerator, "empty_host_cache"):
            torch.accelerator.empty_host_cache()
        if hasattr(torch.accelerator, "get_device_capability"):
            found = torch.accelerator.get_device_capability()["supported_dtypes"]
            assert torch.bfloat16 in found, found
        """
    )


def test_objects_of_torch_cuda_have_all_that_pytorch_declares(stage: Stage) -> None:
    stage.must_pass(
        """
        import ast, pathlib, torch

        declared = ast.parse((pathlib.Path(torch.__file__).parent / "_C/__init__.pyi").read_text())
        classes = {node.name: node for node in declared.body if isinstance(node, ast.ClassDef)}
        kinds = {"_CudaStreamBase": torch.cuda.Stream, "_CudaEventBase": torch.cuda.Event,
                 "_CUDAGraph": torch.cuda.CUDAGraph, "_MemPool": torch.cuda.MemPool,
                 "_CudaDeviceProperties": torch.cuda.get_device_properties(0)}
        for name, kind in kinds.items():
            names = [getattr(node, "name", None) or node.target.id
                     for node in classes[name].body if not isinstance(node, ast.Expr)]
            missing = [n for n in names if not hasattr(kind, n)]
            assert names and not missing, (name, missing)
        assert torch.cuda.Stream.priority_range() == (0, -3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.CUDAGraph.get_currently_capturing_graph() is graph
        assert isinstance(graph.raw_cuda_graph(), int)
        try:
            graph.begin_capture_to_if_node(torch.ones(1, device="cuda"))
        except NotImplementedError as error:
            assert "no conditional part of a CUDA graph" in str(error)
        """
    )


def test_types_of_tensors_make_them_on_the_gpu(stage: Stage) -> None:
    """Programs of years ago choose ``Tensor = torch.cuda.FloatTensor`` where there is a GPU."""
    stage.must_pass(
        """
        import numpy, torch

        Tensor = torch.cuda.FloatTensor
        valid = Tensor(1 << 20, 1).fill_(1.0)
        assert torch.cuda.memory_allocated() == 4 << 20
        assert isinstance(valid, Tensor) and not isinstance(valid, torch.cuda.HalfTensor)
        assert torch.ones(3).type(Tensor).is_cuda and valid.type() == "torch.cuda.FloatTensor"
        assert Tensor(numpy.ones((2, 3))).shape == (2, 3) and Tensor().shape == (0,)
        assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
        torch.set_default_tensor_type("torch.cuda.HalfTensor")
        assert torch.ones(2).is_cuda and torch.ones(2).dtype is torch.float16
        torch.set_default_tensor_type(torch.FloatTensor)
        assert torch.ones(2).is_cpu and torch.ones(2).dtype is torch.float32
        """
    )


def test_storages_are_made_on_the_gpu(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch

        raw = torch.UntypedStorage(3 << 20, device="cuda:0")
        assert torch.cuda.memory_allocated() == 3 << 20 and raw.nbytes() == 3 << 20
        part = torch.empty(0, device="cuda").set_(raw, 256, (1024, 512))
        assert torch.cuda.memory_allocated() == 3 << 20
        raw.resize_(6 << 20)
        assert torch.cuda.memory_allocated() == 6 << 20
        floats = torch.cuda.FloatStorage(1 << 20)
        assert floats.size() == 1 << 20 and torch.cuda.memory_allocated() == 10 << 20
        assert torch.cuda.LongStorage([1, 2]).size() == 2 and torch.cuda.HalfStorage().size() == 0
        assert list(torch.UntypedStorage([7, 8], device="cuda").cpu()) == [7, 8]
        assert torch.UntypedStorage(8).device.type == "cpu"
        """
    )


def test_data_parallel_holds_copies_on_each_gpu(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch

        net = torch.nn.DataParallel(torch.nn.Linear(1024, 1024).cuda(), device_ids=[0, 1])
        y = net(torch.ones(8, 1024, device="cuda"))
        assert y.shape == (8, 1024) and y.get_device() == 0
        assert torch.cuda.max_memory_allocated(1) > 4 << 20
        y.sum().backward()
        assert net.module.weight.grad.shape == (1024, 1024)
        kinds = [torch.float32, torch.float16, torch.float32, torch.float16]
        parts = [torch.ones(4 + i, dtype=kind, device="cuda") for i, kind in enumerate(kinds)]
        from torch.nn.parallel import comm
        first, second = comm.broadcast_coalesced(parts, [0, 1], 32)
        assert all(a is b for a, b in zip(first, parts)), first
        assert [(p.dtype, len(p), p.get_device()) for p in second] == [
            (p.dtype, len(p), 1) for p in parts
        ]
        """,
        "--devices",
        "2",
    )
