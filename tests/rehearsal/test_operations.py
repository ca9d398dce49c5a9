"""Operations, beside what they asked PyTorch 2.12's own allocator for."""

from __future__ import annotations

import pytest
from rehearsal_stage import Stage

torch = pytest.importorskip("torch")

PEAK_AND_ALL_ASKED = {
    "torch.fft.fft(x)": (33554432, 33554432),
    "torch.fft.rfft(x, dim=2)": (34078720, 34078720),
    "torch.fft.rfft2(x, dim=(0, 1))": (41943040, 58720256),
    "torch.fft.rfftn(x)": (53477376, 53477376),
    "torch.fft.fftn(z)": (67108864, 67108864),
    "torch.fft.fftn(z, dim=(1, 2, 3, 4))": (100663296, 100663296),
    "torch.fft.fft2(z.transpose(1, 4))": (67108864, 67108864),
    "torch.fft.fft2(z[:, ::2])": (33554432, 33554432),
    "torch.fft.ifft2(z)": (33554432, 33554432),
    "torch.fft.irfft2(z)": (66060288, 66060288),
    "torch.fft.irfft2(z, dim=(0, 1))": (62914560, 62914560),
    "torch.fft.irfftn(z)": (99614720, 133169152),
    "torch.fft.hfft(z)": (132120576, 132120576),
    "torch.cdist(p, p[:300], p=1).sum().backward()": (476196872, 950243416),
    "torch.cdist(p, p[:300]).sum().backward()": (75824312, 84125640),
    "torch.func.vmap(torch.func.jacrev(F.softplus))(p.detach()[:64, :32])": (532480, 532480),
    "F.pdist(p[:100]).sum().backward()": (30739808, 32312672),
    "p.detach().view(-1).topk(20000)": (892927, 1256209),
    "p.detach().view(-1).topk(20000, sorted=False)": (442003, 443282),
    "p.detach().view(48, -1).topk(5000)": (13494783, 15712700),
    "r.roll(1, 0)": (1572864, 1572864),
    "r.roll((1,2,3),(0,1,2))": (4718592, 4718592),
    "r.transpose(0,1).roll((1,1),(0,1))": (3145728, 4718592),
    "s.roll((1,2),(1,2)).sum().backward()": (3145736, 7864524),
    "torch.fft.fftshift(r)": (6291456, 6291456),
    "r.masked_scatter(mask,r.view(-1)[:1000])": (5119999, 5119999),
    "h.masked_scatter(mask.expand_as(h),h.view(-1)[:1000])": (4333567, 4333567),
    "F.pad(p[None], (3, 3), mode='reflect').sum().backward()": (3158024, 4743376),
    "F.pad(x.mT, (1,) * 6, mode='reflect')": (35734528, 35734528),
    "F.adaptive_max_pool3d(x[0].mT, 3)": (2592, 2592),
    "F.interpolate(v.to(memory_format=torch.channels_last_3d), scale_factor=2)": (
        37748736,
        37748736,
    ),
    "F.adaptive_avg_pool2d(s.mT, 3).sum().backward()": (3145736, 4755464),
    "F.nll_loss(p, i[:1].expand(512), r.view(-1)[:1536:2]).backward()": (1580044, 1587212),
    "F.adaptive_max_pool3d(s.mT[None], 3).sum().backward()": (3145736, 4722056),
    "(p > 0).count_nonzero()": (3539340, 3539340),
    "p.count_nonzero(dim=0)": (3545088, 3545088),
    "d[:384, :384].clone().addmm_(d[:384, ::2], d[:384, :384])": (1179648, 1179648),
    "torch.addmm(d[0].expand(512, 768), d[:, :512], d)": (1572864, 1572864),
    "torch._chunk_cat([d, d[0]], 0, 4)": (1577592, 1577592),
    "torch._chunk_cat([d[:, :100], d[0]], 0, 4)": (412672, 412672),
    "(F.scaled_dot_product_attention(q, q, q) * 2).values().sum().backward()": (7597588, 10970856),
    "d.clone().scatter_reduce_(0, i[:, None].expand(40, 768), d[:40], 'mean')": (3661824, 3661824),
    "d[i[:, None], j]": (24000, 24000),
    "d[i.int(), i.int()]": (1120, 1120),
    "d.clone().index_put_((i[:, None], j), d[0, 0])": (1592064, 1592064),
    "p[i[:, None], j].sum().backward()": (1616073, 1668873),
    "s[:, i[:, None], j].sum().backward()": (2072073, 2580873),
    "r.clone().index_put_((i[:, None], j), r[0, 0], accumulate=True)": (5297665, 5364901),
    "s.mode(1)": (1646592, 1646592),
    "torch.cdist(p[:, :64], p[:300, :64], p=1).sum().backward()": (41580552, 85999704),
    "torch.histc(d)": (796, 796),
    "torch.histc(d, 50, -1, 1)": (200, 200),
    "torch.renorm(d, 2, 0, 1.0)": (1574912, 1574912),
    "torch.renorm(h, 2, 1, 1.0)": (786816, 786816),
    "F.multi_margin_loss(p[:, :100], d[:, 0].long()).backward()": (1777672, 2193416),
    "F.multilabel_margin_loss(p[:, :20], d[:, :20].long()).backward()": (1613832, 1820680),
    "F.adaptive_avg_pool3d(s.mT, 3).sum().backward()": (3145736, 3147464),
    "torch.repeat_interleave(d, d[:, 0].long(), 0, output_size=512)": (1581056, 1586431),
    "d.t().median()": (14240255, 14240260),
    "d[:, ::2].median()": (7124479, 7124484),
    "d.t().aminmax()": (1573260, 1573260),
    "torch.histc(d.t(), 100)": (1573660, 1573660),
    "d.t().abs().multinomial(5)": (4764682, 6341777),
    "F.nll_loss(d.t(), d[0].long())": (1579016, 1579016),
    "d.index_reduce(0, d[0, :10].long(), d[:10], 'mean')": (3539024, 3569744),
    "torch.isin(d, d[0, :7])": (3538944, 3538944),
    "torch.isin(d[0], d[1], assume_unique=True)": (37632, 42239),
    "torch.fake_quantize_per_channel_affine(p, d[0], d[0].int(), 1, -8, 7).sum().backward()": (
        1969152,
        3542228,
    ),
    "torch._fake_quantize_learnable_per_channel_affine(p, d[0], d[1], 1, -8, 7).sum().backward()": (
        4727816,
        6700252,
    ),
    "torch._fake_quantize_learnable_per_tensor_affine(p, d[0,:1], d[1,:1],-8,7).sum().backward()": (
        4718804,
        6685276,
    ),
    "F.scaled_dot_product_attention(*(q.float() for _ in 'qkv')).values().sum().backward()": (
        16716560,
        23489236,
    ),
}
"""Bytes asked for at the peak, above what was there, and in all; `hfft` as on an H200."""


def test_operations_ask_for_what_the_real_ones_do(stage: Stage) -> None:
    stage.must_pass(
        f"""
    import torch
    from torch.nn import functional as F

    x = torch.zeros(4, 8, 64, 64, 32, device="cuda")
    z = torch.zeros(4, 8, 64, 64, 32, dtype=torch.cfloat, device="cuda")
    v = x[:, :, :8]
    p = torch.zeros(512, 768, device="cuda", requires_grad=True)
    s = torch.zeros(8, 64, 64, 12, device="cuda", requires_grad=True)
    r, mask = s.detach(), torch.zeros(8, 64, 1, 1, dtype=torch.bool, device="cuda")
    h, d = r.bfloat16(), p.detach()
    i, j = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (40, 30))
    n = [torch.zeros(length, 12, 64) for length in (37, 512)]
    n = torch.nested.nested_tensor(n, layout=torch.jagged, dtype=torch.half, device="cuda")
    q = n.requires_grad_().transpose(1, 2)
    wanted = {PEAK_AND_ALL_ASKED}
    found = {{}}
    for call in wanted:
        p.grad = s.grad = n.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        eval(call)
        after = torch.cuda.memory_stats()
        found[call] = (
            after["requested_bytes.all.peak"] - before["requested_bytes.all.current"],
            after["requested_bytes.all.allocated"] - before["requested_bytes.all.allocated"],
        )
    assert found == wanted, found
    """
    )


def test_product_in_place_takes_the_workspace_of_cublas(stage: Stage) -> None:
    stage.must_pass(
        """
    import torch

    d = torch.zeros(512, 768, device="cuda")
    asked = "requested_bytes.all.allocated"
    before = torch.cuda.memory_stats()[asked]
    d.mv(d[0])  # calls addmv_
    assert torch.cuda.memory_stats()[asked] - before == 33556480
    """
    )


@pytest.mark.skipif(torch.version.cuda is None, reason="zeros without memory are CUDA's own")
def test_tangents_that_are_zero_hold_no_memory(stage: Stage) -> None:
    stage.must_pass(
        """
    import torch
    from torch.nn import functional as F

    d = torch.zeros(512, 768, device="cuda")
    d @ d.T
    before = torch.cuda.memory_stats()
    torch.func.jvp(lambda w: F.linear(d, w), (d,), (d,))
    after = torch.cuda.memory_stats()
    asked = "requested_bytes.all.allocated"
    assert after[asked] - before[asked] == 5767172
    """
    )


def test_nested_tensors_train_with_the_lengths_that_they_have(stage: Stage) -> None:
    stage.must_pass(
        """
    import torch
    from torch.nn import functional as F

    rows = [torch.zeros(n, 64, device="cuda") for n in (3, 5)]
    weight = torch.zeros(32, 64, device="cuda", requires_grad=True)
    padded = F.linear(torch.nested.nested_tensor(rows, layout=torch.jagged), weight)
    padded = padded.to_padded_tensor(0.0)
    assert padded.shape == (2, 5, 32)
    padded.sum().backward()
    assert weight.grad.shape == weight.shape
    """
    )


def test_results_are_laid_out_as_a_gpu_does(stage: Stage) -> None:
    """What comes after them copies what is not in order; strides are those of PyTorch 2.12."""
    stage.must_pass(
        """
    import torch
    from torch.nn import functional as F

    def transposed(*shape):
        return torch.zeros(shape, device="cuda").mT.contiguous().mT

    dense = torch.zeros(512, 768, device="cuda", requires_grad=True)
    other = transposed(512, 768).requires_grad_()
    gradient = transposed(512, 768)
    in_order, by_columns = (768, 1), (1, 512)

    def back(function, x, gradient):
        y = function(x)
        return torch.autograd.grad(y, x, gradient.reshape(y.shape) if y.dim() else None)[0]

    assert other.abs().stride() == by_columns
    assert torch.add(gradient, gradient, out=dense.new_empty(0)).stride() == by_columns
    assert torch.complex(other, other).stride() == by_columns
    assert other.logcumsumexp(1).stride() == in_order
    for function in (F.celu, F.softplus, F.hardtanh, F.hardswish):
        assert back(function, dense, gradient).stride() == by_columns, function
        assert back(function, other, dense.detach()).stride() == in_order, function
    for function in (lambda x: F.layer_norm(x, (768,)), lambda x: F.log_softmax(x, 1)):
        assert back(function, dense, gradient).stride() == in_order, function
    assert back(lambda x: F.mse_loss(x, gradient), other, dense).stride() == in_order
    """
    )


def test_what_has_no_meta_function_is_told_by_two_short_runs_on_the_cpu(stage: Stage) -> None:
    """As the padding of a ``TransformerEncoder`` in evaluation, of which scores are large."""
    stage.must_pass(
        """
        import torch

        scores = torch.empty(400, 4, 300, 300, device="cuda")
        mask = torch.zeros(400, 300, dtype=torch.bool, device="cuda")
        before = torch.cuda.memory_allocated()
        assert torch._masked_softmax(scores, mask, 3, 1).shape == scores.shape
        assert scores.logcumsumexp(0).shape == scores.shape
        assert torch.cuda.max_memory_allocated() - before == 576_716_800
        """
    )


def test_a_kernel_on_the_cpu_that_refuses_ones_gets_other_values(stage: Stage) -> None:
    """Class 1 is past the last one here, and a matrix of ones has no full rank."""
    stage.must_pass(
        """
        import torch
        from torch.nn import functional

        scores = torch.rand(6, 1, device="cuda", requires_grad=True)
        target = torch.zeros(6, 1, dtype=torch.long, device="cuda")
        functional.multilabel_margin_loss(scores, target).backward()
        functional.multi_margin_loss(scores, target[:, 0]).backward()
        assert scores.grad.shape == (6, 1)
        matrices = torch.rand(2, 9, 5, device="cuda"), torch.rand(2, 9, 3, device="cuda")
        assert torch.linalg.lstsq(*matrices, driver="gels").solution.shape == (2, 5, 3)
        """
    )


def test_convolutions_without_cudnn_are_not_carried_out(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        from torch.nn import functional

        torch.backends.cudnn.enabled = False
        with torch.no_grad():
            large = torch.empty(1, 1, 20000, 20000, device="cuda")
            weight = torch.empty(1, 1, 1, 1, device="cuda")
            assert functional.conv2d(large, weight).shape == large.shape
            x = torch.empty(2, 4, 33, 20, device="cuda").to(memory_format=torch.channels_last)
            weight = torch.empty(6, 4, 5, 3, device="cuda")
            y = functional.conv2d(x, weight, stride=(2, 1), padding=(2, 1))
            assert y.shape == (2, 6, 17, 20) and y.is_contiguous()
            assert functional.conv2d(x, weight, dilation=2).shape == (2, 6, 25, 16)
            x, weight = x[:, :, None], weight[:, :, None]
            assert functional.conv3d(x, weight).shape == (2, 6, 1, 29, 18)
            assert functional.conv3d(x, weight, dilation=(1, 2, 1)).shape == (2, 6, 1, 25, 18)
        """
    )


OTHERS = """
    import torch
    from torch import library

    vision = library.Library("torchvision", "FRAGMENT")
    vision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    vision.define("roi_align(Tensor input, Tensor rois, int height, int width) -> Tensor")

    @library.register_fake("torchvision::roi_align")
    def _(pixels, rois, height, width):
        return pixels.new_empty(rois.shape[0], pixels.shape[1], height, width)

    @library.custom_op("mine::scaled", mutates_args=(), device_types="cuda")
    def scaled(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no CUDA-capable device is detected")

    scaled.register_fake(lambda x: x.new_empty(2, *x.shape))
    more = library.Library("mine", "FRAGMENT")
    more.define("unknown(Tensor x) -> Tensor")
    boxes = torch.rand(100, 4, device="cuda")
"""


def test_operators_of_other_libraries_return_what_their_fakes_say(stage: Stage) -> None:
    found = stage.must_pass(
        OTHERS
        + """
    kept = torch.ops.torchvision.nms(boxes, boxes[:, 0], 0.5)
    assert kept.shape == (100,) and kept.is_cuda and kept.dtype is torch.int64
    pixels = torch.rand(2, 8, 32, 32, device="cuda")
    assert torch.ops.torchvision.roi_align(pixels, boxes, 7, 7).shape == (100, 8, 7, 7)
    assert scaled(boxes).shape == (2, 100, 4) and scaled(boxes).is_cuda
    """
    )

    (note,) = found["rehearsal"]["notes"]
    assert note.startswith("The kernel of mine::scaled needs a GPU: its fake tells")


@pytest.mark.parametrize(
    ("query", "key", "ends", "work"),
    [
        ((2, 300, 8, 64), (2, 300, 8, 64), "None", [2 * 384 * 8 * 64 * 4]),
        (
            (2, 300, 8, 40),
            (2, 300, 2, 40),
            "None",
            [2 * 384 * 8 * 64 * 4, *[2 * 300 * 8 * 40 * 2] * 2],
        ),
        ((700, 4, 256), (700, 4, 256), "torch.tensor([0, 300, 700])", [956 * 4 * 256 * 4]),
    ],
)
def test_the_backward_pass_of_flash_attn_works_in_more_than_its_results(
    stage: Stage, query: tuple[int, ...], key: tuple[int, ...], ends: str, work: list[int]
) -> None:
    """``flash_api.cpp``: the query gradient in float, and each head's gradients of shared keys."""
    name = "_flash_attn_backward" if ends == "None" else "_flash_attn_varlen_backward"
    stage.must_pass(
        f"""
        import torch

        Tensor = torch.Tensor
        @torch.library.custom_op(
            "flash_attn::{name}", mutates_args=("dq", "dk", "dv"), device_types="cuda"
        )
        def backward(
            dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
            dq: Tensor, dk: Tensor, dv: Tensor, ends: Tensor | None,
        ) -> Tensor:
            raise RuntimeError("no CUDA-capable device is detected")

        backward.register_fake(lambda dout, *_: dout.new_empty(256))
        q = torch.empty({query}, dtype=torch.half, device="cuda")
        k = torch.empty({key}, dtype=torch.half, device="cuda")
        ends = {ends}
        before = torch.cuda.memory_allocated()
        sums = backward(q, q, k, k, q, q, q, k, k, ends)
        used = torch.cuda.max_memory_allocated() - before
        assert sum(-(-n // 512) * 512 for n in {work}) <= used <= sum({work}) + 2048, used
        assert torch.cuda.memory_allocated() == before + 512
        """
    )


def test_flash_attention_called_by_its_own_name_works_in_as_much_as_on_a_gpu(stage: Stage) -> None:
    """The figures are from the allocator of PyTorch 2.12.1."""
    stage.must_pass(
        """
        import torch

        def extra_bytes(rows, shared_rows, ends, longest):
            q, k = (torch.empty(s, dtype=torch.half, device="cuda") for s in (rows, shared_rows))
            how = ends, ends, longest, longest, 0.0, True
            out, sums, *state = torch.ops.aten._flash_attention_forward(q, k, k, *how, False)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            made = torch.ops.aten._flash_attention_backward(
                torch.empty_like(out), q, k, k, out, sums, *how, *state[:2]
            )
            return torch.cuda.max_memory_allocated() - before

        ends = torch.tensor([0, 300, 1000], dtype=torch.int32, device="cuda")
        packed, batch = (1000, 8, 64), (2, 500, 8, 64)
        assert extra_bytes(packed, packed, ends, 700) == 6708736
        assert extra_bytes(packed, (1000, 2, 64), ends, 700) == 7220736
        assert extra_bytes(batch, batch, None, 500) == 6225920
        assert extra_bytes(batch, (2, 500, 4, 64), None, 500) == 7249920
        """
    )


def test_an_operator_that_nothing_is_known_of_is_named(stage: Stage) -> None:
    stage.script(OTHERS + "    torch.ops.mine.unknown(boxes)\n")

    done = stage.run("train.py")

    assert done.returncode == 2
    assert "Nothing says what the operator mine::unknown returns: it has no fake" in done.stderr


ASKED = """
        import torch
        from torch import nn
        from torch.nn import functional as F

        def asked(call, *inputs):
            torch.cuda.memory._record_memory_history()
            call(*inputs)
            found = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(None)
            return [event["size"] for event in found if event["action"] == "alloc"]
"""
"""The sizes that a call asks for; stands before scripts with the same indentation."""


def test_what_does_not_lie_in_order_is_copied_as_by_cuda_s_kernels(stage: Stage) -> None:
    """Sizes are those that PyTorch 2.12.1's CUDA build asks for."""
    stage.must_pass(
        ASKED
        + """
        t = torch.ones(64, 300, device="cuda").mT
        image = torch.ones(4, 8, 32, 32, device="cuda").to(memory_format=torch.channels_last)
        assert asked(torch.nonzero, t)[:3] == [76800, 4, 21503]
        assert asked(lambda x: x.cummax(1), t) == [76800, 153600, 76800]
        assert sorted(asked(lambda x: x.median(1), t)) == [1200, 2400, 76800]
        assert asked(lambda x: F.avg_pool1d(x[None], 2), t) == [38400, 76800]
        edges = torch.arange(9.0, device="cuda")
        assert asked(lambda: torch.bucketize(0.5, edges)) == [8, 8, 4]
        assert asked(lambda: torch.bucketize(edges.half(), edges[::2])) == [18, 72, 20, 36]
        order = torch.zeros(200, 1000, dtype=torch.int64, device="cuda")
        assert asked(lambda: torch.searchsorted(order.float(), order.float(), sorter=order)) == [
            800000, 800000, 8, 8, 400, 4, 1600000
        ]
        assert asked(lambda x: F.adaptive_max_pool2d(x, 3), image) == [
            1152, 2304, 1152, 2304, 131072
        ]
        assert asked(
            lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic", antialias=True), image
        ) == [32768, 32768, 131072]

        def backward(y, x):
            torch.autograd.grad(y, x, torch.ones_like(y))

        leaf, at = image.detach().contiguous().requires_grad_(), torch.arange(2, device="cuda")
        assert asked(backward, leaf[at, :, at], leaf) == [
            2048, 131072, 16, 16, 16, 16, 131072, 16, 16, 16, 1
        ]
        pooled, last = F.avg_pool2d(leaf, 2), image[..., ::2, ::2].clone()
        assert asked(lambda: torch.autograd.grad(pooled, leaf, last)) == [131072, 32768]
        rectified = torch.relu(image.requires_grad_())
        first = torch.ones(4, 8, 32, 32, device="cuda")
        found = torch.autograd.grad(rectified, image, first)[0]
        assert found.stride() == image.stride()
        dropped = torch.dropout(leaf, 0.1, train=True)
        assert torch.autograd.grad(dropped, leaf, first.mT)[0].is_contiguous()
        turned = torch.ones(4, 8, 32, 32, device="cuda").mT.requires_grad_()
        normed = F.batch_norm(turned, None, None, training=True)
        assert asked(backward, normed, turned) == [131072] * 4
        for layout in (torch.sparse_csr, torch.sparse_csc):
            assert t.to_sparse(layout=layout)._nnz() == t.numel()
        """
    )


def test_scratch_memory_is_that_of_the_kernels_of_cuda(stage: Stage) -> None:
    """Sizes are those that PyTorch 2.12.1's CUDA build asks for."""
    stage.must_pass(
        ASKED
        + """
        def ones(*shape, **options):
            return torch.ones(shape, device="cuda", **options)

        torch.backends.cudnn.enabled = False
        ones(2, 2) @ ones(2, 2)
        volume, weight, bias = ones(2, 16, 8, 14, 14), ones(16, 8, 2, 2, 2), ones(8)
        assert asked(lambda: F.conv_transpose3d(volume, weight, bias, stride=2)) == [
            200704, 802816, 401408, 50176
        ]
        assert asked(lambda: torch.randperm(300000, dtype=torch.int32, device="cuda")) == [
            1200000, 4, 1200000, 2400000, 2400000, 3665151
        ]
        i = ones(6400, dtype=torch.int64)
        assert asked(torch.embedding_renorm_, ones(100, 1), i, 1.0, 2.0) == [
            51200, 51200, 51200, 121343, 51200, 8, 1023
        ]
        rows = torch.rand(300, 4, device="cuda")
        assert asked(lambda: torch.unique(rows, dim=0))[:3] == [2400, 3071, 1535]
        assert asked(
            lambda: torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
        ) == [2400, 3071, 2400, 2400, 255, 1279, 2408, 1535, 2400, 4800]
        draws = ones(5000)
        assert asked(lambda: torch.multinomial(draws, 2000, replacement=True))[-1] == 1023
        leaf = ones(512, 768, requires_grad=True)
        windows = leaf.unfold(0, 4, 2)
        gradient = torch.ones_like(windows)
        assert asked(lambda: torch.autograd.grad(windows, leaf, gradient)) == [1572864, 4096]
        image = ones(4, 32, 28, 28, requires_grad=True)
        normed = F.batch_norm(image, ones(32), ones(32))
        gradient = ones(28, 28, 32, 4).permute(3, 2, 1, 0)
        assert asked(lambda: torch.autograd.grad(normed, image, gradient)) == [401408]
        hard = F.hardsigmoid(image)
        (found,) = torch.autograd.grad(hard, image, gradient)
        assert found.stride() == gradient.stride()
        mask = ones(512, 768, dtype=torch.bool)
        assert len(asked(lambda: leaf.detach().index_put_((mask,), draws[0]))) > 3

        torch.backends.cudnn.enabled = True
        grid = ones(4, 9, 7, 2, requires_grad=True)
        sampled = F.grid_sample(image, grid, align_corners=True)
        assert sampled.shape == (4, 32, 9, 7)
        sampled.sum().backward()
        assert grid.grad.shape == grid.shape
        cell = nn.LSTMCell(16, 8, bias=False).cuda()
        cell(ones(3, 16))[0].sum().backward()
        assert cell.weight_ih.grad.shape == (32, 16)
        out = torch.empty(0, dtype=torch.int64, device="cuda")
        assert torch.nonzero(rows, out=out) is out and out.shape == (1200, 2)
        assert (ones(5, dtype=torch.int64) // 2).shape == (5,)
        """
    )


def test_parts_put_together_or_separated_at_once_take_lists_of_what_to_copy(stage: Stage) -> None:
    """Sizes are those that PyTorch 2.12.1's CUDA build asks for, as fully_shard calls it."""
    stage.must_pass(
        ASKED
        + """
        def ones(*shape, **options):
            return torch.ones(shape, device="cuda", **options)

        parts = [ones(1000, 700), ones(33), ones(7, 5, 3)]
        halves = [part.bfloat16() for part in parts]
        into = ones(1, 700138), ones(4, 175039)
        assert asked(lambda: torch._chunk_cat(parts, 0, 1, out=into[0])) == [11120]
        assert asked(lambda: torch._chunk_cat(halves, 0, 4, out=into[1])) == [2912]
        narrow = into[0].bfloat16()
        assert asked(lambda: torch._chunk_cat(halves, 0, 1, out=narrow)) == [5648]
        assert asked(lambda: torch._chunk_cat(parts, 0, 1, out=narrow)) == []
        both, sizes = ones(4, 300000, dtype=torch.bfloat16), [100000, 199999, 1]
        outs = [ones(4, size, dtype=torch.bfloat16) for size in sizes]
        assert asked(lambda: torch.split_with_sizes_copy(both, sizes, dim=1, out=outs)) == [2464]
        """
    )


def test_a_tensor_equals_itself_without_a_look(stage: Stage) -> None:
    stage.must_pass(
        ASKED
        + """
        x = torch.ones(500, device="cuda")
        assert asked(torch.equal, x, x.detach().view(500)) == [] and torch.equal(x, x)
        assert asked(torch.equal, x[:10], x[1:11]) == [10, 1]
        assert torch.equal(x[:10], x[1:11])
        asked_for = [10, 40, 40, 40, 40, 40, 40, 10, 10, 10, 10, 1]
        assert asked(torch.allclose, x[:10], x[1:11]) == asked_for
        assert torch.allclose(x[:10], x[1:11])
        assert not torch.allclose(torch.zeros(2, device="cuda"), torch.ones(2, device="cuda"))
        matrix = torch.rand(6, 6, device="cuda", requires_grad=True)
        values, vectors = torch.linalg.eig(matrix)
        (values.abs().sum() + vectors.abs().sum()).backward()  # PyTorch checks values with it
        window = torch.hann_window(64, device="cuda")
        sound = torch.rand(2, 640, device="cuda")
        parts = torch.stft(sound, 64, window=window, return_complex=True)
        assert torch.istft(parts, 64, window=window).shape == (2, 640)  # overlaps are not zero
        """
    )


def test_what_is_not_used_is_freed_in_the_order_of_c(stage: Stage) -> None:
    """As on an H200: results of attention from the first on, temporaries from the last on."""
    stage.must_pass(
        """
        import torch
        from torch.nn import functional as F

        def freed(function, *args):
            torch.cuda.memory._record_memory_history(stacks="python")
            begun = len(torch.cuda.memory._snapshot()["device_traces"][0])
            kept = function(*args)
            trace = torch.cuda.memory._snapshot()["device_traces"][0][begun:]
            return [e["size"] for e in trace if e["action"] == "free_completed"]

        x = torch.ones(2, 8, 128, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None):
            sizes = freed(F.scaled_dot_product_attention, x, x, x)
        assert sizes[-3:] == [2 * 8 * 128 * 4, 8, 8]
        ends = torch.ones(3, dtype=torch.int64, device="cuda")
        many = torch.ones(7000, dtype=torch.int64, device="cuda")
        assert freed(torch.isin, many, ends) == [7000, 21000]
        """
    )


def test_attention_of_cudnn_takes_what_it_did_on_an_h200(stage: Stage) -> None:
    """With shared keys, the gradients for each query are made before they are added up."""
    stage.must_pass(
        """
    import torch
    from torch.nn import functional as F

    def asked(call):
        before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
        result = call()
        return result, torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before

    for n_keys, backward in ((8, 5275904), (2, 5800192)):
        query, key, value = (
            torch.randn(2, n, 512, 64, device="cuda", dtype=torch.half, requires_grad=True)
            for n in (8, n_keys, n_keys)
        )
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            out, forward = asked(
                lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
            )
        gradient = torch.ones_like(out)
        _, found = asked(lambda: out.backward(gradient))
        assert (forward, found) == (1081616, backward), (forward, found)
    """,
        "--gpu", "h200",
    )  # fmt: skip


def test_requests_come_in_the_order_of_cuda_s_kernels(stage: Stage) -> None:
    """Sizes are those that PyTorch 2.12.1's CUDA build asks for."""
    stage.must_pass(
        ASKED
        + """
        def rand(*shape, **options):
            return torch.rand(shape, device="cuda", **options)

        def leaf(*shape, **options):
            return rand(*shape, **options).requires_grad_()

        def backward(y, *inputs, gradient=None):
            gradient = torch.ones_like(y) if gradient is None else gradient
            return asked(lambda: torch.autograd.grad(y, inputs, gradient))

        angles = rand(16)
        assert asked(lambda: 10000 ** angles) == [64, 8]  # the base becomes a tensor
        assert asked(lambda: 1 ** angles) == [64]
        scores, labels = rand(30, 20).mT, torch.zeros(30, 20, dtype=torch.long, device="cuda").mT
        assert asked(lambda: F.multilabel_margin_loss(scores, labels)) == [2400, 4800, 2400, 80, 4]

        volume, filters = leaf(2, 8, 8, 8, 8), leaf(8, 1, 3, 3, 3)
        made = F.conv3d(volume, filters, padding=1, groups=8)
        assert backward(made, volume, filters, gradient=rand(2, 8, 8, 8, 8).mT) == [
            32768, 864, 32768
        ]

        double = {"dtype": torch.double}
        x, weight = leaf(4, 8, 16, **double), leaf(8, **double)
        assert asked(lambda: F.group_norm(x, 2, weight, weight)) == [4096, 64, 64, 256, 256]
        normed = F.group_norm(x, 2, weight, weight)
        assert backward(normed, x, weight)[:6] == [4096, 64, 64, 256, 256, 64]
        assert backward(F.group_norm(x, 2, weight, weight), weight) == [64, 64, 256, 256]
        table = leaf(100, 16, **double)
        seen = torch.zeros(4, 9, dtype=torch.long, device="cuda")
        rows = F.embedding(seen, table, scale_grad_by_freq=True)
        assert 39 * 16 * 8 in backward(rows, table)  # sums are double, too

        turned = rand(4, 16, 8).mT.contiguous().mT.requires_grad_()
        weight = leaf(16)
        normed = torch.native_batch_norm(turned, weight, weight, None, None, True, 0.1, 1e-5)[0]
        gradient = rand(4, 16, 8).mT.contiguous().mT
        found = torch.autograd.grad(normed, turned, gradient, retain_graph=True)[0]
        assert found.is_contiguous()
        assert backward(normed, turned, weight, gradient=gradient) == [2048, 64, 64]
        """
    )


def test_strides_of_single_elements_are_those_of_cuda(stage: Stage) -> None:
    """By them, a gradient is copied into the layout of a convolution's input."""
    stage.must_pass(
        ASKED
        + """
        pooled = torch.rand(2, 32, 1, 1, device="cuda").to(memory_format=torch.channels_last)
        assert pooled.stride() == (32, 1, 32, 32)
        assert (pooled * 2).stride() == (32, 1, 32, 32)
        for function in (F.relu, F.hardsigmoid, F.silu, torch.neg, lambda x: x + x):
            assert function(pooled).stride() == (32, 1, 1, 1), function
        layer = nn.Conv2d(32, 8, 1).cuda()
        out = layer(pooled.requires_grad_())
        gradient = torch.ones(2, 8, 1, 1, device="cuda")
        assert asked(
            lambda: torch.autograd.grad(out, [pooled, *layer.parameters()], gradient)
        )[:3] == [64, 256, 1024]
        """
    )


def test_gradients_are_summed_in_place_after_a_kernel_resized_them(stage: Stage) -> None:
    stage.must_pass(
        ASKED
        + """
        x = torch.rand(40, 37, device="cuda", requires_grad=True)
        loss = F.relu(1 - x).mean() + F.soft_margin_loss(x, torch.ones_like(x))
        one = torch.ones((), device="cuda")
        assert asked(lambda: torch.autograd.grad(loss, x, one)) == [5920] * 7
        storage = torch.empty(0, device="cuda")
        storage.resize_(10).resize_(3)
        assert storage.shape == (3,) and storage.untyped_storage().nbytes() == 40
        """
    )
