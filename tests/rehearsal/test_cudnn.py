"""Workspaces of convolutions: of cuDNN where this Python has it, else stated copies."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from rehearsal_stage import Stage

torch = pytest.importorskip("torch")

from fragdoctor.rehearsal.engine import cudnn  # noqa: E402

PYTHON = os.environ.get("FRAGDOCTOR_FRAMEWORKS")
has_cudnn = cudnn._library() is not None

REQUESTS = """
    import torch
    from torch import nn

    def requests(op):
        torch.cuda.memory._record_memory_history(enabled=None)
        torch.cuda.memory._record_memory_history(context=None)
        op()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        return [e["size"] for e in events if e["action"] == "alloc"]

    conv = nn.Conv2d(16, 32, 3, padding=1, bias=False).cuda()
    weight = conv.weight.numel() * 4
    x = torch.ones(8, 16, 64, 64, device="cuda", requires_grad=True)
    x_bytes, y_bytes = x.numel() * 4, 8 * 32 * 64 * 64 * 4
"""


@pytest.mark.skipif(has_cudnn, reason="cuDNN is here")
def test_workspaces_without_cudnn_are_copies_and_said_so(stage: Stage) -> None:
    found = stage.must_pass(
        REQUESTS
        + """
    assert requests(lambda: conv(x)) == [y_bytes, x_bytes + weight + y_bytes]
    y = conv(x)
    gradient = torch.ones_like(y)
    copies = x_bytes + weight + y_bytes
    assert requests(lambda: y.backward(gradient)) == [x_bytes, copies, weight, copies]
    """
    )

    assert any("nvidia-cudnn" in note for note in found["rehearsal"]["notes"])


@pytest.mark.skipif(has_cudnn, reason="cuDNN is here")
def test_workspaces_without_cudnn_are_none_with_channels_last(stage: Stage) -> None:
    stage.must_pass(
        REQUESTS
        + """
    conv, x = conv.to(memory_format=torch.channels_last), x.detach()
    x = x.to(memory_format=torch.channels_last)
    assert requests(lambda: conv(x)) == [y_bytes]
    """
    )


@pytest.mark.skipif(has_cudnn, reason="cuDNN is here")
def test_a_workspace_that_cannot_be_had_does_not_end_the_program(stage: Stage) -> None:
    """PyTorch goes on to the next plan."""
    stage.must_pass(
        REQUESTS
        + """
    x = torch.ones(8, 16, 256, 256, device="cuda")
    y_bytes = 2 * x.numel() * 4
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + y_bytes + (2 << 20)) / torch.cuda.mem_get_info()[1]
    )
    assert requests(lambda: conv(x)) == [y_bytes]
    """,
        "--gpu",
        "h100",
    )


def test_workspaces_are_noted_as_what_is_only_thought(stage: Stage) -> None:
    stage.must_pass(
        REQUESTS
        + """
    torch.cuda.memory._record_memory_history()
    conv(x)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    noted = {e["size"]: e["user_metadata"] for e in events if e["action"] == "alloc"}
    assert noted.pop(y_bytes) == ""
    assert set(noted.values()) == {"cuDNN workspace"}, noted
    """
    )


def test_plans_that_are_tried_give_back_what_the_cache_holds(stage: Stage) -> None:
    """Of a new call alone, and in each thread (``run_single_conv`` of ``Conv_v8.cpp``)."""
    stage.must_pass(
        REQUESTS
        + """
    torch.backends.cudnn.benchmark = True

    def kept(op):
        torch.cuda.empty_cache()
        cached = torch.empty(32 << 20, device="cuda")
        del cached
        op()
        return torch.cuda.memory_reserved() >= 128 << 20

    assert [kept(lambda: conv(x)) for _ in range(2)] == [False, True]
    assert [kept(lambda: conv(x).sum().backward()) for _ in range(2)] == [False, True]
    torch.backends.cudnn.benchmark = False
    assert kept(lambda: conv(x[:4]))
    """
    )


def test_other_backends_take_no_workspace(stage: Stage) -> None:
    stage.must_pass(
        REQUESTS
        + """
    torch.backends.cudnn.enabled = False
    assert x_bytes + weight + y_bytes not in requests(lambda: conv(x))
    """
    )


@pytest.mark.parametrize(
    ("shape", "is_channels_last", "strides"),
    [
        ((2, 3, 4, 5), False, (60, 20, 5, 1)),
        ((2, 3, 4, 5), True, (60, 1, 15, 3)),
        ((2, 3, 4, 5, 6), True, (360, 1, 90, 18, 3)),
        ((7, 3, 1, 1), False, (3, 1, 1, 1)),
        ((7, 3, 1, 1), True, (3, 1, 3, 3)),
    ],
)
def test_strides(shape: tuple[int, ...], is_channels_last: bool, strides: tuple[int, ...]) -> None:
    assert cudnn.strides_of(shape, is_channels_last=is_channels_last) == strides


@pytest.mark.skipif(PYTHON is None, reason="FRAGDOCTOR_FRAMEWORKS names no Python with cuDNN")
def test_plans_of_cudnn_are_those_of_a_real_gpu(root: Path) -> None:
    assert PYTHON is not None
    done = subprocess.run(
        [PYTHON, str(root / "benchmarks" / "bench_workspaces.py")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = re.findall(r"^(\w+) +(\d+) .* tensors (\d+),", done.stdout, re.MULTILINE)

    close = {name: int(n) / int(of) for name, of, n in rows}
    assert close["forward"] > 0.85
    assert close["backward_data"] > 0.83
    assert close["backward_filter"] > 0.70
