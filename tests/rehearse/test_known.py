"""Values that a rehearsal knows, because they were copied to the GPU or follow from constants."""

from __future__ import annotations

from rehearsal_stage import Stage


def test_what_is_copied_comes_back_and_small_values_are_computed(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        x = torch.tensor([3, 1, 2], device="cuda")
        assert x.max().item() == 3 and x.tolist() == [3, 1, 2]
        x += 1
        x[1] = 7
        assert x.cpu().tolist() == [4, 7, 3]
        assert torch.arange(int(x.sum()), device="cuda").shape == (14,)
        many = torch.randint(0, 9, (40, 40))
        assert (many.cuda().cpu() == many).all()
        mask = torch.rand(100) > 0.3
        assert torch.randn(100, 8, device="cuda")[mask.cuda()].shape == (int(mask.sum()), 8)
        ended = torch.full((4,), True, device="cuda")
        unknown = torch.randn(4, device="cuda") > 0
        assert (unknown | ended).all() and not (unknown & ~ended).any() and not unknown.all()
        """
    )

    assert [a["operation"] for a in found["rehearsal"]["assumptions"]] == ["item"]


def test_what_was_overwritten_is_known_no_more(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        counter, random = torch.ones(3, device="cuda"), torch.rand(3, device="cuda")
        counter.add_(random)
        assert counter.tolist() == [0, 0, 0]
        counter.fill_(5)
        assert counter.tolist() == [5, 5, 5]
        counter.normal_()
        assert counter.tolist() == [0, 0, 0]
        lengths = torch.tensor([1, 2, 3], device="cuda")
        place = lengths.data_ptr()
        del lengths
        other = torch.empty(3, dtype=torch.int64, device="cuda")
        assert other.data_ptr() == place and other.tolist() == [0, 0, 0]
        """
    )


def test_gradients_are_added_in_place_where_values_are_followed(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        w = torch.nn.Parameter(torch.ones(8, device="cuda"))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        (w * 2 + w * 3 + w * 4).backward(torch.ones(8, device="cuda"))
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        # ones; three products and two sums; three gradients, which are added in place.
        assert made == 1 + 5 + 3, made
        """
    )
