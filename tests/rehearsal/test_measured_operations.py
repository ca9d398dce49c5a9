"""Operations beside what a real GPU, an H200 with PyTorch 2.11, asked its allocator for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from rehearsal_stage import Stage

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MEASURED = BENCHMARKS / "measured" / "operations_h200.tsv"
STEP = 19
"""Every so many lines are rehearsed here; ``bench_operations.py --h200`` rehearses all."""
NEAR_SHARE, NEAR_BYTES = 0.01, 65536
OTHERWISE = ("conv", "fft", "values", "ctc", "sparse")
"""Families that need cuDNN's library, or that depend on values, which a rehearsal does not have."""


def _peaks(text: str) -> dict[tuple[str, ...], list[int]]:
    """Return the peaks of the passes by operation; none for one that failed."""
    rows = (line.removeprefix("=\t").split("\t") for line in text.splitlines())
    return {
        tuple(row[:3]): [int(n) for n in row[3::2] if n.isdigit()] for row in rows if len(row) > 3
    }


def test_operations_peak_where_those_of_an_h200_do(tmp_path: Path) -> None:
    """Nearly all: what is measured is one version of PyTorch, and others differ a little."""
    for name in ("gpu_operations.py", "operation_inputs.py"):
        shutil.copy(BENCHMARKS / name, tmp_path)
    lines = [
        line
        for line in MEASURED.read_text(encoding="utf-8").splitlines()
        if not line.startswith(OTHERWISE)
    ]
    (tmp_path / "list.tsv").write_text("\n".join(lines[::STEP]), encoding="utf-8")
    command = [sys.executable, "-m", "fragdoctor", "rehearse", "--no-config", "--unlimited"]
    done = subprocess.run(
        [*command, "--gpu", "h200", "--full", "gpu_operations.py", "--", "list.tsv"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    ours = _peaks("\n".join(x for x in done.stderr.splitlines() if x.startswith("=\t")))
    real = _peaks("\n".join(lines[::STEP]))

    far = {
        name: (ours.get(name), peaks)
        for name, peaks in real.items()
        if not _near(ours, name, peaks)
    }

    assert len(ours) == len(real) > 30, done.stderr
    assert len(far) <= len(real) // 8, far


def _near(
    ours: Mapping[tuple[str, ...], list[int]], name: tuple[str, ...], peaks: list[int]
) -> bool:
    found = ours.get(name, [])
    return len(found) == len(peaks) and all(
        abs(a - b) <= max(NEAR_SHARE * b, NEAR_BYTES) for a, b in zip(found, peaks, strict=True)
    )


def test_recurrent_layers_ask_for_what_cudnn_keeps(stage: Stage) -> None:
    """Without the weights copied: they are one buffer, as ``flatten_parameters`` leaves them."""
    stage.must_pass(
        """
        import torch
        from torch import nn

        def asked(work):
            torch.cuda.memory._record_memory_history()
            kept = work()
            events = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(None)
            return [event["size"] for event in events if event["action"] == "alloc"]

        x = torch.zeros(50, 32, 256, device="cuda", requires_grad=True)
        state, out, weights = 65536, 3276800, 6307840
        layer = nn.LSTM(256, 512).cuda()
        found = asked(lambda: layer(x))
        assert found[:5] + found[6:] == [state, state, out, state, state, 16384256], found
        y = layer(x)[0]
        found = asked(lambda: torch.autograd.grad(y, layer.weight_hh_l0, torch.ones_like(y)))
        assert weights in found and found.count(found[-1]) == 2, found
        assert len(asked(lambda: layer.eval()(x))) == 6  # nothing is kept
        found = asked(lambda: nn.GRU(256, 512, 2, bias=False, batch_first=True).cuda()(x))
        assert found[-1] == 256 + 4 * 50 * 32 * (2 * 6 + 1) * 512, found
        layer = nn.RNN(256, 512).cuda().bfloat16()  # never flattened
        assert 2 * (512 * 768 + 1024) in asked(lambda: layer(x.bfloat16()))
        lengths = torch.arange(50, 18, -1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
        assert asked(lambda: nn.GRU(256, 512).cuda()(packed))[-1] == 13566208
        with torch.autocast("cuda", torch.bfloat16):
            layer = nn.GRU(256, 512).cuda()
            found = asked(lambda: layer(x))
            assert found[-1] == 9830656 and 2365440 in found, found
        with torch.backends.cudnn.flags(enabled=False):
            assert len(asked(lambda: layer(x))) > 100  # step by step
        """
    )


def test_attention_of_cudnn_takes_gradients_of_each_head(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        from torch.nn import functional as F

        q, k, v = (
            torch.zeros(2, n, 512, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for n in (8, 2, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(y, (q, k, v), y.detach())
        assert torch.cuda.max_memory_allocated() - before == 1048576 + 2 * 262144 + 4227584
        """,
        "--gpu",
        "h200",
    )


def test_attention_of_one_query_splits_the_keys_between_blocks(stage: Stage) -> None:
    """As in decoding with cuDNN; few keys are not split and need nothing."""
    stage.must_pass(
        """
        import torch
        from torch.nn import functional as F

        def taken(n_heads, n_keys, **options):
            q, k = (
                torch.zeros(1, n_heads, n, 64, dtype=torch.bfloat16, device="cuda", **options)
                for n in (1, n_keys)
            )
            asked = "requested_bytes.all.allocated"
            before = torch.cuda.memory_stats()[asked]
            out = F.scaled_dot_product_attention(q, k, k)
            log_sums = 4 * n_heads if options else 0
            return torch.cuda.memory_stats()[asked] - before - out.nbytes - log_sums - 16

        assert taken(32, 150) == 0
        assert taken(32, 901) == 33920
        assert taken(32, 12001) == 270464
        assert taken(8, 1000, requires_grad=True) == 8576
        """,
        "--gpu",
        "h200",
    )


def test_products_of_groups_take_a_description_of_each_group(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch

        a, b = (
            torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)
            for shape in ((1024, 256), (8, 256, 512))
        )
        ends = torch.arange(128, 1025, 128, device="cuda", dtype=torch.int32)
        before = torch.cuda.memory_allocated()
        y = torch._grouped_mm(a, b, offs=ends)
        assert torch.cuda.max_memory_allocated() - before == 1116672  # 1116640 asked for
        """,
        "--gpu",
        "h200",
    )


def test_determinants_run_pytorch_s_own_code_around_the_factorization(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch

        def asked(work):
            before = torch.cuda.memory_stats()
            torch.cuda.reset_peak_memory_stats()
            work()
            after = torch.cuda.memory_stats()
            return [
                after[f"requested_bytes.all.{figure}"] - before[f"requested_bytes.all.{base}"]
                for figure, base in (("peak", "current"), ("allocated", "allocated"))
            ]

        a = torch.ones(100, 32, 32, device="cuda")
        torch.linalg.solve(a, a)  # cuBLAS's workspace
        assert asked(lambda: torch.linalg.det(a)) == [453328, 453328]
        lu, pivots = torch.linalg.lu_factor(torch.ones(40, 64, 64, device="cuda"))
        b = torch.ones(40, 64, 20, device="cuda")
        assert asked(lambda: torch.linalg.lu_solve(lu, pivots, b)) == [451712, 452864]
        """,
        "--gpu",
        "h200",
    )
