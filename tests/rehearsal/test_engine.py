"""What a rehearsed program sees: its own assertions hold, or the rehearsal fails."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from rehearsal_stage import Stage


def test_memory_is_what_pytorch_would_say(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
        free, total = torch.cuda.mem_get_info()
        assert free == 1 << 30
        x = torch.empty(1000, device="cuda")
        assert torch.cuda.memory_allocated() == 4096
        assert torch.cuda.memory_reserved() == 2 << 20
        y = torch.empty(3 << 20, device="cuda")
        assert torch.cuda.memory_reserved() == (2 + 12) << 20
        del y
        assert torch.cuda.max_memory_allocated() == (12 << 20) + 4096
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 2 << 20
        assert torch.cuda.mem_get_info()[0] == (1 << 30) - (2 << 20)
        assert torch.cuda.max_memory_allocated() == 4096
        assert "Allocated memory" in torch.cuda.memory_summary()
        torch.cuda.set_per_process_memory_fraction(0.01)
        try:
            torch.empty(1 << 24, device="cuda")
        except torch.OutOfMemoryError as error:
            assert "10.24 MiB allowed" in str(error), error
        else:
            raise AssertionError("the fraction does not count")
        """,
        "--capacity",
        "1GiB",
    )

    assert found["rehearsal"]["fits"]


def test_code_whose_constants_have_no_hash_stands_in_stacks(stage: Stage) -> None:
    """A compiler writes such code."""
    stage.must_pass(
        """
        import torch

        def made():
            return torch.ones(4, device="cuda")

        code = made.__code__
        made.__code__ = code.replace(co_consts=(*code.co_consts, {}))
        x = made()
        """
    )


def test_tensors_are_plain_and_on_the_gpu(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        x = torch.randn(4, 5, device="cuda", requires_grad=True)
        assert type(x) is torch.Tensor and x.is_cuda and x.device == torch.device("cuda:0")
        y = (x @ x.mT).relu().sum()
        y.backward()
        assert x.grad.shape == (4, 5) and x.grad.is_cuda
        assert y.item() > 0 and x.cpu().shape == (4, 5) and x.tolist()[3][4] > 0
        assert torch.tensor([1, 2], device="cuda").dtype is torch.int64
        try:
            x + torch.ones(4, 5)
        except RuntimeError as error:
            assert "Expected all tensors to be on the same device" in str(error)
        else:
            raise AssertionError("tensors of two devices were added")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (x @ x.mT).dtype is torch.bfloat16
        """
    )


@pytest.mark.slow
def test_streams_scalers_loaders_and_pinned_memory_work(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        def main():
            data = TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.long))
            net = torch.nn.Linear(8, 4).cuda()
            optimizer = torch.optim.AdamW(net.parameters())
            scaler = torch.amp.GradScaler("cuda")
            side = torch.cuda.Stream()
            for x, y in DataLoader(data, 16, num_workers=1, pin_memory=True):
                with torch.cuda.stream(side):
                    x, y = x.cuda(non_blocking=True), y.cuda(non_blocking=True)
                    assert torch.cuda.current_stream() == side
                torch.cuda.current_stream().wait_stream(side)
                x.record_stream(torch.cuda.current_stream())
                with torch.autocast("cuda"):
                    loss = torch.nn.functional.cross_entropy(net(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(); end.record(); torch.cuda.synchronize()
            assert start.elapsed_time(end) > 0
            side.wait_event(event=start); end.wait(stream=side)
            assert side.query() and end.query() and side != torch.cuda.current_stream()

        main()
        """,
        "--steps",
        "99",
    )


@pytest.mark.slow
def test_attention_takes_the_kernel_of_the_gpu(stage: Stage) -> None:
    body = """
        import torch
        from torch.nn.functional import scaled_dot_product_attention as attention
        q = torch.randn(1, 16, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        before = torch.cuda.memory_allocated()
        attention(q, q, q, is_causal=True)
        peak = torch.cuda.max_memory_allocated() - before
        scores = 16 * 4096 * 4096 * 2
        assert (peak < scores // 8) is {fused}, peak
    """
    stage.must_pass(body.replace("{fused}", "True"), "--gpu", "h100")
    stage.must_pass(
        body.replace("{fused}", "False").replace("bfloat16", "float64"), "--gpu", "h100"
    )


def test_attention_fails_if_the_program_allows_no_kernel_that_can_serve_it(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention as attention
        q = torch.randn(1, 2, 16, 64, device="cuda")
        for allowed in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(allowed):
                attention(q.half(), q.half(), q.half())
                for given in (q, q[0].half()):
                    try:
                        attention(given, given, given)
                    except RuntimeError as err:
                        assert "No available kernel" in str(err)
                    else:
                        raise AssertionError(allowed)
        """,
        *("--gpu", "h100"),
    )


def test_what_is_pickled_in_memory_has_its_values(stage: Stage) -> None:
    stage.must_pass(
        """
        import pickle
        import torch
        x = torch.ones(8, 4, device="cuda")
        found, lengths = pickle.loads(pickle.dumps((x, torch.arange(3))))
        assert found.is_cuda and found.shape == x.shape and lengths.tolist() == [0, 1, 2]
        torch.save(x, "x.pt", _use_new_zipfile_serialization=False)
        assert torch.load("x.pt").shape == x.shape
        """
    )


def test_torchscript_runs_more_than_twice(stage: Stage) -> None:
    """From the third call on its fuser would compile a kernel."""
    stage.must_pass(
        """
        import torch
        @torch.jit.script
        def gate(x, y):
            return (x * y + x).sigmoid() * y.tanh()
        x = torch.ones(64, 64, device="cuda", requires_grad=True)
        net = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(64, 64)).cuda())
        for _ in range(5):
            gate(net(x), x).sum().backward()
        """
    )


def test_line_that_ended_the_process_is_shown(stage: Stage) -> None:
    stage.script(
        """
        import ctypes
        import torch
        torch.ones(3, device="cuda")
        ctypes.string_at(0)
        """
    )
    ended = stage.run_apart("train.py")
    assert ended.returncode == 2
    assert 'train.py", line 5 in <module>' in ended.stderr
    assert "signal 11" in ended.stderr


@pytest.mark.slow
def test_several_gpus_are_several(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        assert torch.cuda.device_count() == 2
        x = torch.ones(1 << 20, device="cuda:1")
        y = x.to("cuda:0")
        assert torch.cuda.memory_allocated(0) == torch.cuda.memory_allocated(1) == 4 << 20
        assert y.device.index == 0
        """,
        "--devices",
        "2",
    )

    assert [d["peak_allocated_bytes"] for d in found["rehearsal"]["devices"]] == [4 << 20] * 2


@pytest.mark.slow
def test_the_program_may_record_by_itself(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        torch.cuda.memory._record_memory_history(max_entries=100)
        x = torch.ones(1000, device="cuda")
        snapshot = torch.cuda.memory._snapshot()
        actions = [event["action"] for event in snapshot["device_traces"][0]]
        assert actions == ["segment_alloc", "alloc"], actions
        assert snapshot["device_traces"][0][1]["frames"][0]["filename"].endswith("train.py")
        """
    )


@pytest.mark.slow
def test_what_values_decide_is_assumed_and_listed(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        x = torch.rand(100, device="cuda")
        assert x[x > 0].shape == (50,)
        assert torch.unique(x).shape == (100,)
        assert round(x.sum().item(), 9) == 1 / 2
        """,
        "--assume",
        "nonzero=0.5",
    )
    listed = [
        (a["location"]["line"], a["operation"], a["assumed"])
        for a in found["rehearsal"]["assumptions"]
    ]

    assert listed == [
        (4, "nonzero", "0.5 of all are kept"),
        (5, "unique", "all elements are kept"),
        (6, "item", "the values are 1/2, 1/3 and so on: positive, and falling"),
    ]


@pytest.mark.parametrize(
    ("torch_py", "sentence"),
    [
        (
            'raise ImportError("libcudart.so.12: cannot open it")',
            "cannot import PyTorch: libcudart",
        ),
        ('raise ModuleNotFoundError("No module", name="torch")', "has no PyTorch."),
    ],
)
def test_python_without_a_pytorch_that_loads_is_said_so(
    stage: Stage, torch_py: str, sentence: str
) -> None:
    stage.script("import torch")
    stage.script(torch_py, "broken/torch.py")

    done = stage.run_apart("train.py", python_path=str(stage.home / "broken"))

    assert done.returncode == 2
    assert f"The program's Python {sentence}" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_program_raises_an_error_for_does_not_occur(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import unittest
        import torch
        x, y = torch.randn(2, 50, device="cuda")
        assert (x > 0).all(), f"not {x.shape}"
        assert not torch.isnan(y).any() and torch.allclose(x, y)
        if not (x >= 0).all():
            raise ValueError(f"some of {x.shape} are negative")
        if torch.isnan(x).any(): raise ValueError
        def grown():
            if (x > 0).all():
                return True
            raise RuntimeError("it did not grow")
        assert grown() and torch.equal(x, y)
        torch.testing.assert_close(x, y)
        if not (x < y).all():
            unittest.TestCase().fail("some are not less")
        n = 0
        while n < 5 and not (x > y).all():  # nothing is checked here
            n += 1
        assert n == 5
        """
    )

    listed = {a["operation"]: a["assumed"] for a in found["rehearsal"]["assumptions"]}
    assert listed["validation"] == "the values are valid"
    assert listed["equal"] == "both are equal"


@pytest.mark.slow
def test_programs_that_look_at_values_go_on(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        x = torch.randn(64, 8, device="cuda")
        assert torch.isfinite(x.sum())
        torch.distributions.Categorical(logits=x).sample()
        torch.distributions.Normal(x, x.exp()).log_prob(x)
        i = x.argmax(1)
        assert torch.bincount(i, minlength=10).shape == (10,)
        assert torch.bincount(torch.tensor([1, 4, 4], device="cuda")).shape == (5,)
        twice = torch.tensor([2] * 64, device="cuda")
        assert torch.repeat_interleave(x, twice, 0).shape == (128, 8)
        unknown = x[:, 0].abs().long()
        assert torch.repeat_interleave(x, unknown, 0).shape == (64, 8)
        """
    )

    listed = {a["operation"]: a["assumed"] for a in found["rehearsal"]["assumptions"]}
    assert listed["validation"] == "the values are valid"
    assert listed["repeat_interleave"] == "each is repeated once"


@pytest.mark.slow
def test_graphs_and_pools_have_private_memory(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        graph = torch.cuda.CUDAGraph()
        x = torch.ones(1 << 20, device="cuda")
        with torch.cuda.graph(graph):
            y = x + 1
        graph.replay()
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            z = torch.ones(1 << 18, device="cuda")
        pools = {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot()}
        assert pools == {(0, 0), graph.pool(), pool.id}, pools
        assert len(pool.snapshot()) == 1
        """
    )


def test_each_graph_keeps_the_state_of_the_random_numbers(stage: Stage) -> None:
    """Seed and offset, on the default stream, until the graph is reset; shared before 2.12."""
    stage.must_pass(
        """
        import torch
        x = torch.ones(1 << 20, device="cuda")
        is_own = torch.torch_version.TorchVersion(torch.__version__) >= (2, 12)
        graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
        held = [torch.cuda.memory_allocated()]
        for graph in graphs:
            with torch.cuda.graph(graph):
                pass
            held.append(torch.cuda.memory_allocated())
        assert [after - before for before, after in zip(held, held[1:])] == [
            1024, 1024 * is_own
        ]
        assert not is_own or {s["stream"] for s in torch.cuda.memory_snapshot()} == {0}
        graph.reset()
        assert torch.cuda.memory_allocated() == held[-2]
        """
    )


@pytest.mark.slow
def test_recurrent_cells_have_shapes(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        h = torch.ones(8, 16, device="cuda")
        for cell in (torch.nn.GRUCell(16, 16), torch.nn.LSTMCell(16, 16)):
            out = cell.cuda()(h)
            out = out if isinstance(out, torch.Tensor) else out[0]
            out.sum().backward()
            assert cell.bias_hh.grad.shape == cell.bias_hh.shape
        """
    )


def test_recurrent_layers_go_through_the_cells_of_cuda(stage: Stage) -> None:
    # Sizes: PyTorch 2.12.1's own kernels on a simulated GPU.
    stage.must_pass(
        """
        import torch
        torch.backends.cudnn.enabled = False
        for kind, peak in (("LSTM", 77929984), ("GRU", 75624960), ("RNN", 69555712)):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            layer = getattr(torch.nn, kind)(100, 200, 2, dropout=0.4).cuda()
            state = torch.zeros(2, 16, 200, device="cuda")
            state = (state, torch.zeros_like(state)) if kind == "LSTM" else state
            x = torch.zeros(10, 16, 100, device="cuda")
            for _ in range(2):
                out, state = layer(x, state)
                out.sum().backward()
                state = tuple(s.detach() for s in state) if kind == "LSTM" else state.detach()
            assert torch.cuda.max_memory_allocated() == peak, (kind, peak)
            del layer, state, x, out
        """
    )


def test_convolutions_without_cudnn_lay_patches_out_as_columns(stage: Stage) -> None:
    # Sizes: PyTorch 2.12.1's own kernels on a simulated GPU.
    stage.must_pass(
        """
        import torch
        from torch.nn import functional as F
        torch.backends.cudnn.enabled = False

        def peaks(of, x, w, bias=None, **how):
            with torch.no_grad():
                gradient = torch.zeros_like(of(x, w, bias, **how))
            found = []
            inputs = [t.requires_grad_() for t in (x, w, bias) if t is not None]
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            y = of(x, w, bias, **how)
            found.append(torch.cuda.max_memory_allocated() - before)
            torch.cuda.reset_peak_memory_stats()
            torch.autograd.grad(y, inputs, gradient)
            return (*found, torch.cuda.max_memory_allocated() - before)

        def zeros(*sizes):
            return torch.zeros(sizes, device="cuda")

        square = torch.zeros(512, 512, device="cuda", requires_grad=True)
        (square @ square).sum().backward()  # cuBLAS has its workspaces
        image, sound = (4, 64, 50, 40), (4, 64, 500)
        for peak, of, x, w, n_bias, how in (
            ((7680000, 9949696), F.conv2d, image, (96, 64, 3, 3), 96, {"padding": 1}),
            ((3072000, 5657088), F.conv2d, image, (96, 64, 1, 1), 96, {}),
            ((6359040, 8629248), F.conv2d, image, (96, 64, 3, 3), 96, {"dilation": 2}),
            ((5926912, 9487360), F.conv2d, image, (96, 32, 3, 3), 96, {"groups": 2}),
            ((1147392, 1733632), F.conv1d, sound, (96, 64, 3), 96, {}),
            ((19035648, 21250560), F.conv3d, (4, 16, 20, 20, 20), (96, 16, 3, 3, 3), 96, {}),
            ((8412160, 10557952), F.conv_transpose2d, image, (64, 32, 4, 4), 32, {"stride": 2}),
            ((773120, 1314304), F.conv_transpose1d, sound, (64, 32, 4), 32, {"stride": 2}),
            ((1494016, 1764864), F.conv_transpose2d, (5, 24, 31, 17), (24, 12, 3, 5), 0,
             {"stride": 3, "padding": 1}),
        ):
            found = peaks(of, zeros(*x), zeros(*w), zeros(n_bias) if n_bias else None, **how)
            assert found == peak, (of, how, found)
        """
    )


def test_one_filter_per_channel_takes_pytorch_s_own_kernels(stage: Stage) -> None:
    """What the allocator of PyTorch 2.12.1 was asked for, forward and backward."""
    stage.must_pass(
        """
        import torch
        from torch import nn

        def requested(net, x):
            net, x = net.cuda(), x.cuda().requires_grad_()
            before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
            y = net(x)
            y.sum().backward()
            assert x.grad.shape == x.shape and net.weight.grad.shape == net.weight.shape
            after = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
            return tuple(y.shape), after - before

        x = torch.randn(4, 64, 28, 28)
        same = requested(nn.Conv2d(64, 64, 3, padding=1, groups=64), x)
        assert same == ((4, 64, 28, 28), 2_411_120), same
        twice = requested(nn.Conv2d(64, 128, 5, stride=2, groups=64, bias=False), x)
        assert twice == ((4, 128, 12, 12), 1_405_448), twice
        cubes = requested(nn.Conv3d(16, 16, 3, groups=16), torch.randn(2, 16, 8, 12, 12))
        assert cubes == ((2, 16, 6, 10, 10), 302_856), cubes
        """
    )


def test_the_fast_path_of_a_transformer_asks_for_what_its_parts_do(stage: Stage) -> None:
    # Sizes: PyTorch 2.12.1's own kernels on a simulated GPU.
    stage.must_pass(
        """
        import torch
        from torch import nn

        def peak(*args, of, **kwargs):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            of(*args, **kwargs)
            return torch.cuda.max_memory_allocated() - before

        x = torch.zeros(4, 64, 128, device="cuda")
        (x[0] @ x[0].T).sum()
        pad = torch.zeros(4, 64, dtype=torch.bool, device="cuda")
        expected = {False: (786432, 919040, 393216), True: (917504, 1050112, 458752)}
        with torch.no_grad():
            for first, sizes in expected.items():
                layer = nn.TransformerEncoderLayer(
                    128, 4, 512, activation="gelu", norm_first=first, batch_first=True
                ).cuda().eval()
                found = peak(x, of=layer), peak(x, of=layer, src_key_padding_mask=pad)
                assert (*found, peak(x.half(), of=layer.half())) == sizes, (first, found)
            heads = nn.MultiheadAttention(128, 4, batch_first=True).cuda().eval()
            assert peak(x, x, x, of=heads) == 917504
            assert peak(x, x, x, of=heads, key_padding_mask=pad, need_weights=False) == 919040
            # The mask becomes one of booleans after the products that it masks were asked for.
            sizes = []
            torch.cuda.memory._record_memory_history(max_entries=100)
            layer.float()(x, src_key_padding_mask=pad)  # which makes numbers of the mask
            for event in torch.cuda.memory._snapshot()["device_traces"][0]:
                sizes += [event["size"]] if event["action"] == "alloc" else []
            at = sizes.index(4 * 64)
            assert sizes[at - 2 : at] == [393216, 4 * 4 * 64 * 64 * 4], sizes
        """
    )


def test_a_gradient_penalty_is_differentiated_in_the_order_of_a_gpu(stage: Stage) -> None:
    # Size: PyTorch 2.12.1's own kernels on a simulated GPU. There backward passes have a thread of
    # their own, which numbers the nodes of ``create_graph`` by itself.
    stage.must_pass(
        """
        import torch
        from torch import nn
        critic = nn.Sequential(
            nn.Linear(3000, 1000), nn.ReLU(), nn.Linear(1000, 300), nn.ReLU(), nn.Linear(300, 1)
        ).cuda()
        for _ in range(2):
            real, fake = (torch.randn(100, 3000, device="cuda") for _ in range(2))
            loss = critic(fake).mean() - critic(real).mean()
            mixed = (0.5 * real + 0.5 * fake).requires_grad_()
            (grad,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            loss = loss + 10 * ((grad.norm(2, dim=1) - 1) ** 2).mean()
            critic.zero_grad()
            loss.backward()
        assert torch.cuda.max_memory_allocated() == 138371072
        assert torch.cuda.max_memory_reserved() == 163577856
        """
    )


def test_modules_may_be_called_with_any_name(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch

        class Net(torch.nn.Linear):
            def forward(self, call, module=None, *, run=0, original=0):
                return super().forward(call) + module

        x = torch.ones(4, 4, device="cuda")
        assert Net(4, 4).cuda()(call=x, module=x, run=1, original=2).shape == (4, 4)
        """
    )


def test_modules_with_buffers_are_copied_deeply(stage: Stage) -> None:
    stage.must_pass(
        """
        import copy
        import torch
        net = torch.nn.BatchNorm2d(1000).cuda()
        before = torch.cuda.memory_allocated()
        copied = copy.deepcopy(net)
        assert copied.running_mean.is_cuda and copied.running_mean.shape == (1000,)
        assert torch.cuda.memory_allocated() == 2 * before
        assert copied.running_var.data_ptr() != net.running_var.data_ptr()
        """
    )


def test_gradients_of_sparse_embeddings_ask_for_what_cuda_s_kernels_do(stage: Stage) -> None:
    # Sizes: PyTorch 2.12.1's own kernels on a simulated GPU.
    stage.must_pass(
        """
        import torch
        from torch import nn

        def asked(action):
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            start = len(trace)
            kept = action()
            trace = torch.cuda.memory._snapshot()["device_traces"][0][start:]
            return [e["size"] for e in trace if e["action"] == "alloc"], kept

        torch.cuda.memory._record_memory_history(stacks="python")
        index = torch.arange(5120, device="cuda")[None]
        values = torch.zeros(5120, 64, device="cuda")
        make = lambda: torch.sparse_coo_tensor(index, values, (50000, 64), check_invariants=False)
        sizes, grad = asked(make)
        assert sizes == [] and grad.is_sparse and grad._nnz() == 5120 and not grad.is_coalesced()
        assert asked(lambda: grad + grad)[0] == [81920, 2621440]
        assert asked(lambda: grad * 2)[0] == [40960, 1310720]
        assert asked(grad.clone)[0] == [1310720, 40960]
        sizes, unique = asked(grad.coalesce)
        assert sizes[:5] == [40960, 40960, 40960, 82431, 1535], sizes
        dense = torch.zeros(50000, 64, device="cuda")
        assert asked(lambda: dense.add_(unique))[0] == []
        assert asked(lambda: dense.sparse_mask(unique))[0] == [4, 1310720, 40960, 1310720]
        assert asked(grad.to_dense)[0] == [12800000]

        table = nn.EmbeddingBag(1000, 8, sparse=True, mode="sum").cuda()
        other = nn.Embedding(1000, 8, sparse=True).cuda()
        for kind in (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad):
            optimizer = kind([*table.parameters(), *other.parameters()], lr=0.1)
            for _ in range(2):
                x = torch.zeros(4, 6, dtype=torch.long, device="cuda")
                (table(x).sum() + other(x).sum()).backward()
                other(x).sum().backward()
                assert other.weight.grad._nnz() == 48
                optimizer.step()
                optimizer.zero_grad()
        """
    )


def test_a_product_of_sparse_matrices_is_refused_with_a_next_step(stage: Stage) -> None:
    stage.script(
        """
        import torch
        i = torch.zeros(2, 9, dtype=torch.long, device="cuda")
        a = torch.sparse_coo_tensor(i, torch.ones(9, device="cuda"), (4, 5))
        torch.sparse.mm(a, a.t())
        """
    )

    done = stage.run("train.py")

    assert done.returncode == 2
    assert "_sparse_matmul with a sparse or nested tensor at train.py:5" in done.stderr
    assert "to_dense()" in done.stderr


def test_replays_of_a_captured_optimizer_are_steps(stage: Stage) -> None:
    stage.script(
        """
        import torch
        w = torch.zeros(1000, 1000, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=0.1)
        for _ in range(3):
            w.sum().backward()
            optimizer.step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            w.sum().backward()
            optimizer.step()
        kept = []
        for i in range(9):
            graph.replay()
            if i > 4:
                kept.append(torch.empty(1 << 26, device="cuda"))
        """
    )

    found = stage.json("train.py", "--capacity", "700MiB", "--steps", "50", code=1)

    # Three runs before the capture, and eight replays.
    assert found["rehearsal"]["out_of_memory"]["step"] == 3 + 8
    assert found["rehearsal"]["out_of_memory"]["location"]["line"] == 16


def test_operations_without_a_meta_function_are_run_on_the_cpu(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        from torch import nn
        def new(*shape):
            return torch.randn(*shape, device="cuda", requires_grad=True)

        state = torch.get_rng_state()
        found = torch.linalg.lstsq(new(4, 6, 3), new(4, 6, 2))
        assert found.solution.shape == (4, 3, 2) and found.solution.is_cuda
        assert torch.geqrf(new(6, 3)).tau.shape == (3,)
        x = new(4, 5)
        torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127).sum().backward()
        assert x.grad.shape == (4, 5)
        assert nn.functional.fractional_max_pool3d(new(2, 3, 8, 8, 8), 2, output_ratio=0.5).is_cuda
        assert torch.equal(torch.get_rng_state(), state), "no random number of the CPU is taken"
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)
        padding = torch.zeros(5, 3, dtype=torch.bool, device="cuda")
        with torch.no_grad():
            seen = encoder.cuda().eval()(new(5, 3, 8), src_key_padding_mask=padding)
        assert seen.shape == (5, 3, 8)
        nn.LSTM(8, 16, 2, bidirectional=True).cuda()(new(5, 3, 8))[0].sum().backward()
        """
    )


def test_a_distribution_takes_its_values_for_valid_and_its_samples_for_accepted(
    stage: Stage,
) -> None:
    found = stage.must_pass(
        """
        import torch
        from torch import distributions as D
        normal = torch.randn(5, 5, device="cuda")
        spread = normal @ normal.mT + torch.eye(5, device="cuda")
        mean = torch.randn(5, device="cuda", requires_grad=True)
        assert D.MultivariateNormal(mean, covariance_matrix=spread).rsample((3,)).shape == (3, 5)
        few = torch.ones(5, device="cuda", requires_grad=True)
        many = torch.rand(300, device="cuda")
        assert D.VonMises(mean, few).sample((3,)).shape == (3, 5)
        assert D.VonMises(many, many + 1).sample().shape == (300,)
        D.Dirichlet(few).rsample().sum().backward()
        D.Gamma(few, few).rsample().sum().backward()
        assert D.Binomial(5, torch.sigmoid(mean)).sample().shape == (5,)
        assert D.kl_divergence(D.Beta(few, few), D.Beta(few, few)).shape == (5,)
        """
    )

    assumed = {a["assumed"] for a in found["rehearsal"]["assumptions"]}
    assert "the values are valid" in assumed


def test_a_product_with_a_sparse_matrix_asks_for_its_indices_and_a_result(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        i = torch.randint(0, 1000, (2, 5000))
        graph = torch.sparse_coo_tensor(i, torch.ones(5000), (1000, 1000)).coalesce().cuda()
        x = torch.randn(1000, 64, device="cuda", requires_grad=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = graph @ x
        matrix, n = 1000 * 64 * 4, graph._nnz()
        more = torch.cuda.max_memory_allocated() - before
        assert torch.cuda.memory_allocated() - before == matrix, "rounded to 512 bytes"
        # Zeros to add to, the result, it and the other matrix by columns, and indices.
        assert 4 * matrix + 4 * n < more < 4 * matrix + 16 * n, (more, matrix, n)
        y.sum().backward()
        assert x.grad.shape == (1000, 64)
        assert torch.ones(4, 5, device="cuda").to_sparse()._nnz() == 20
        """
    )


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton itself is here")
def test_kernels_of_a_triton_are_left_out(stage: Stage) -> None:
    for name in ("triton/__init__.py", "triton/runtime/__init__.py"):
        stage.script("", name.removesuffix("/__init__.py") + "/__init__.py")
    stage.script(
        """
        class KernelInterface:
            def __getitem__(self, grid):
                return lambda *args, **kwargs: self.run(grid=grid, *args, **kwargs)

        class JITFunction(KernelInterface):
            def run(self, *args, **kwargs):
                raise AssertionError("libcuda.so.1 is missing")
        """,
        "triton/runtime/jit.py",
    )
    found = stage.must_pass(
        """
        import torch
        from triton.runtime.jit import JITFunction

        x = torch.ones(1 << 20, device="cuda")
        out = torch.empty_like(x)
        JITFunction()[(4,)](x, out, BLOCK=1024)
        assert torch.cuda.memory_allocated() == 2 * 4 << 20
        """
    )

    assert any("Triton" in note for note in found["rehearsal"]["notes"])


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_of_triton_are_left_out(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        import triton
        import triton.language as tl

        @triton.jit
        def double(x, out, BLOCK: tl.constexpr):
            at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            tl.store(out + at, 2 * tl.load(x + at))

        x = torch.ones(1 << 20, device="cuda")
        out = torch.empty_like(x)
        double[(1024,)](x, out, BLOCK=1024)
        assert torch.cuda.memory_allocated() == 2 * 4 << 20
        """
    )

    assert any("Triton" in note for note in found["rehearsal"]["notes"])


def test_kernels_copy_what_does_not_lie_in_one_piece(stage: Stage) -> None:
    """The requests of PyTorch 2.12.1's own allocator, for slices and for gradients of a cat."""
    stage.must_pass(
        """
        import torch
        import torch.nn.functional as F
        from torch import nn

        conv, up = nn.Conv2d(16, 16, 3, padding=1).cuda(), nn.ConvTranspose2d(16, 8, 2, 2).cuda()
        image, result = 4 * 16 * 24 * 24 * 4, 4 * 16 * 48 * 48 * 4

        def requests(op, sliced=False):
            x = torch.ones(4, 16, 24, 24, device="cuda")
            x = torch.cat([x, x], 1)[:, :16] if sliced else x
            x.requires_grad_(True)
            torch.cuda.memory._record_memory_history(enabled=None)
            torch.cuda.memory._record_memory_history(context=None)
            y = op(x)
            if not sliced:
                both = torch.cat([y, y.detach()], 1)
                both.backward(torch.ones_like(both))
            events = torch.cuda.memory._snapshot()["device_traces"][0]
            made = [e["size"] for e in events if e["action"] == "alloc"]
            return made if sliced else made[made.index(2 * y.numel() * 4) + 2 :]

        assert requests(lambda x: F.interpolate(x, scale_factor=2)) == [image, result]
        assert requests(lambda x: F.pad(x, (2, 2, 2, 2), "reflect")) == [image, 200704]
        assert requests(lambda x: x.softmax(1)) == [image, image]
        # Between them are workspaces, copies of all three tensors where cuDNN is not at hand.
        scratch = {2 * image + 9216, image + 2048 + 294912}
        assert [n for n in requests(conv) if n not in scratch] == [image, image, image, 9216, 64]
        assert [n for n in requests(up) if n not in scratch] == [294912, image, 2048, 32]
        assert requests(lambda x: F.unfold(x, 3)) == [1115136, 1115136]
        assert requests(lambda x: F.max_pool2d(x, 2), sliced=True) == [36864, 73728, image]
        assert requests(lambda x: F.avg_pool2d(x, 2), sliced=True) == [36864, image]
        assert requests(lambda x: F.adaptive_avg_pool2d(x, 12), sliced=True) == [image, 36864]
        assert requests(lambda x: x.cumsum(1), sliced=True) == [image, image]
        assert requests(lambda x: x.roll(3, 2), sliced=True) == [image, image]
        """
    )


def test_products_have_the_dtype_that_is_asked_for(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch

        a = torch.ones(64, 32, device="cuda", dtype=torch.bfloat16)
        b, c = a.t()[:, :16], torch.ones(64, 16, device="cuda")
        assert torch.mm(a, b, out_dtype=torch.float32).dtype is torch.float32
        out = torch.empty(0, device="cuda")
        torch.addmm(c, a, b, out_dtype=torch.float32, out=out)
        assert out.shape == (64, 16)
        """
    )


@pytest.mark.parametrize(
    "call",
    [
        "x.index_add_(0, i, s)",
        "x.index_add(0, i, s)",
        "x.index_copy_(0, i, s)",
        "x.scatter_(0, i[:, None].expand(5, 4), s)",
        "x.scatter_add_(0, i[:, None].expand(5, 4), s)",
        "x.index_put_((i,), s)",
        "x.masked_scatter_(x > 0, s)",
        "x[:4] @ s[:4]",
        "torch.nn.functional.linear(x, s)",
    ],
)
def test_two_types_are_refused_as_a_gpu_refuses_them(stage: Stage, call: str) -> None:
    """As under autocast, where one of them is computed in another type."""
    stage.must_pass(
        f"""
        import torch

        x = torch.zeros(10, 4, device="cuda")
        i = torch.arange(5, device="cuda")
        s = torch.ones(5, 4, device="cuda", dtype=torch.bfloat16)
        try:
            {call}
        except RuntimeError as e:
            assert "type" in str(e), e
        else:
            raise AssertionError("a GPU refuses it")
        """
    )


def test_the_options_of_dynamo_can_be_imported_first(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch._dynamo.config
        from torch._dynamo import config, trace_rules

        torch._dynamo.config.suppress_errors = torch.ones(1, device="cuda").is_cuda
        assert config.suppress_errors and config is torch._dynamo.config and trace_rules
        """
    )


def test_dynamo_is_imported_where_something_of_it_is_needed(stage: Stage) -> None:
    stage.script(
        """
        import sys
        import torch
        from torch.utils.checkpoint import checkpoint

        linear = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.AdamW(linear.parameters())
        x = torch.ones(1, 8, device="cuda")
        checkpoint(linear, x, use_reentrant=False).sum().backward()
        optimizer.step()
        assert "torch._dynamo.eval_frame" not in sys.modules

        import torch._dynamo.trace_rules as rules
        from torch._dynamo import convert_frame

        assert rules is torch._dynamo.trace_rules is convert_frame.trace_rules
        assert rules.__spec__.origin == rules.__file__
        assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
        add = torch.optim.Optimizer.add_param_group.__wrapped__
        assert add.__dynamo_disable is not add
        optimizer.step()
        """
    )
    stage.json("train.py", apart=True)  # forks here have it already


def test_products_with_matrices_by_rows_ask_for_what_cuda_s_do(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        n, nnz = 1000, 5000
        ends = torch.arange(0, nnz + 1, nnz // n)
        graph = torch.sparse_csr_tensor(ends, torch.arange(nnz) % n, torch.ones(nnz), (n, n)).cuda()
        x = torch.randn(n, 64, device="cuda", requires_grad=True)

        def asked(function):
            torch.cuda.memory._record_memory_history(context=None)
            kept = function()
            events = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(enabled=None)
            return [e["size"] for e in events if e["action"] == "alloc"]

        matrix, ends = n * 64 * 4, (n + 1) * 8
        with torch.no_grad():
            assert asked(lambda: graph @ x) == [matrix] * 2
            assert asked(lambda: torch.mv(graph, x[:, 0])) == [n * 4] * 2
            assert asked(lambda: graph * 2) == [nnz * 4, nnz * 8, ends]
            by_columns = asked(lambda: graph.t() @ x)
        # Indices written out, sorted and put together the other way.
        assert by_columns[:5] == [8, 8, 1279, n * 8, ends]
        assert by_columns[5:12] == [nnz * 16, *[nnz * 8] * 6]
        assert by_columns[13:] == [nnz * 16, nnz * 4, ends, ends, n * 8, matrix, matrix]
        (graph @ x).sum().backward()
        assert x.grad.shape == (n, 64)
        """
    )


def test_solvers_copy_what_cusolver_overwrites(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        a, y = torch.eye(600, device="cuda"), torch.ones(600, 1, device="cuda")
        matrix = 600 * 600 * 4

        def copies(function):
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            kept = function()
            made = torch.cuda.max_memory_allocated() - before
            return made // matrix

        torch.linalg.solve_triangular(a, y, upper=False)  # takes cuBLAS's workspace
        assert torch.cuda.memory_allocated() > 32 * 2**20
        assert copies(lambda: torch.linalg.cholesky(a)) == 1
        assert copies(lambda: torch.cholesky_solve(y, a)) == 1
        assert copies(lambda: torch.cholesky_inverse(a)) == 3
        assert copies(lambda: torch.linalg.solve(a, a)) == 3
        assert copies(lambda: torch.linalg.inv(a)) == 3
        assert copies(lambda: torch.linalg.svd(a)) == 5  # with cuSOLVER's workspace
        assert copies(lambda: torch.linalg.svdvals(a)) == 5
        assert copies(lambda: torch.linalg.lstsq(a, y)) == 1
        assert copies(lambda: torch.linalg.matrix_exp(a)) == 14
        """
    )

    (outside,) = found["rehearsal"]["unmodelled"]
    assert "the context, kernels, cuBLAS, cuSOLVER; 779 to 787 MiB" in outside["what"]
