"""What a program decides by values on the GPU, which are made up."""

from __future__ import annotations

import pytest
from rehearsal_stage import Stage

PARTIAL = "only a value on the GPU tells how often the loop at"


def test_a_loop_that_waits_for_a_value_runs_until_it_shows_nothing_new(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        x, n = torch.randn(64, 1 << 14, device="cuda"), 0
        while not x.norm() < 1e-3:
            n += 1
            work = x @ x.T
        assert 20 <= n <= 25, n
        del work
        m = 0
        while x.norm().item() > 1e-9 and m < 100:  # it also ends otherwise
            m += 1
        assert m == 100
        for k in range(50):
            if torch.linalg.vector_norm(x) < 1e-6:
                break
        assert k == 49
        """
    )

    assert found["rehearsal"]["peak_allocated_bytes"] > 64 << 16
    assert not found["rehearsal"]["is_partial"]


@pytest.mark.parametrize(
    "loop",
    [
        "while float(x.norm()) > 1e-3:",
        "for t in range(int(x.abs().long().max())):",
        "n = x.abs().long().max().item()\n        for t in range(n):",
    ],
)
def test_rounds_that_keep_more_are_not_all_of_a_loop(stage: Stage, loop: str) -> None:
    found = stage.must_pass(
        f"""
        import torch
        x, kept = torch.randn(1 << 20, device="cuda"), []
        {loop}
            kept.append(x * 2)
        assert len(kept) >= 20
        """
    )["rehearsal"]

    assert found["is_partial"]
    line = 5 if "\n" in loop else 4
    assert found["partial_reason"].startswith(f"{PARTIAL} train.py:{line} runs")


def test_a_side_that_does_something_is_taken(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        best, right, large = 0.0, 0, []
        for epoch in range(4):
            x = torch.randn(1 << 18, device="cuda")
            if (x > 9).sum().item() == 0:
                continue
            right += (x > 0).sum().item()
            accuracy = right / (x.numel() * (epoch + 1))
            if accuracy > best:
                best = accuracy
                large = [x.clone() for _ in range(16)]
            if x.mean().item() > 100:
                print("it diverges")
                break
        assert large and epoch == 3
        """
    )["rehearsal"]

    assert found["peak_allocated_bytes"] >= 17 << 20
    assert not found["is_partial"]


@pytest.mark.parametrize("read", ["x.norm().cpu().item()", "float(y.cpu())", "max(x[:8].tolist())"])
def test_a_value_copied_to_the_cpu_stays_made_up(stage: Stage, read: str) -> None:
    found = stage.must_pass(
        f"""
        import torch
        x = torch.randn(1 << 18, device="cuda")
        y, taken = x.mean(), 0
        assert torch.tensor([0.5, 4.0]).cuda().tolist() == [0.5, 4.0]
        assert not max(torch.tensor([0.5, 4.0]).tolist()) > 5
        for _ in range(4):
            if {read} > 5:
                taken += 1
                large = [x.clone() for _ in range(16)]
        assert taken == 2
        """
    )["rehearsal"]

    assert found["peak_allocated_bytes"] >= 17 << 20


def test_a_side_that_was_not_seen_is_named(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        x = torch.randn(1 << 20, device="cuda")
        if x.norm() > 1:
            y = x.sigmoid()
        else:
            y = x.repeat(10)
        """
    )["rehearsal"]

    assert found["partial_reason"] == (
        "a value on the GPU decides the branch at train.py:4, and only one side was seen"
    )


def test_a_made_up_number_is_a_number(stage: Stage) -> None:
    stage.must_pass(
        """
        import copy, json, pickle
        import torch
        x = torch.randn(8, device="cuda")
        loss, n = x.sum().item(), int((x > 0).sum())
        assert json.loads(json.dumps([loss, n])) == [0.5, 1]
        assert type(pickle.loads(pickle.dumps(loss))) is float
        assert type(copy.deepcopy(n)) is int and [1, 2][n] == 2
        torch.save({"loss": loss, "n": n}, "state.pt")
        assert torch.load("state.pt") == {"loss": 0.5, "n": 1}
        assert torch.full((n,), loss, device="cuda").shape == (1,)
        assert f"{loss:.2f} {n:d} {loss / 2 + n}" == "0.50 1 1.25"
        """
    )
