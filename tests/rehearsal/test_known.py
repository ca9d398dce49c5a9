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

    assert [a["operation"] for a in found["rehearsal"]["assumptions"]] == ["validation"]


def test_what_was_overwritten_is_known_no_more(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        counter, random = torch.ones(3, device="cuda"), torch.rand(3, device="cuda")
        counter.add_(random)
        assert counter.tolist() == [1 / 2] * 3
        counter.fill_(5)
        assert counter.tolist() == [5, 5, 5]
        counter.normal_()
        assert counter.tolist() == [1 / 2] * 3
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


def test_routes_masks_and_tokens_are_computed(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        tokens = torch.randint(0, 5000, (64, 512))
        route = (tokens * 31 + 7) % 8
        on_gpu = (tokens.cuda() * 31 + 7) % 8
        for expert in range(8):
            n = int((route == expert).sum())
            assert (on_gpu == expert).nonzero().shape == (n, 2)
            assert len(torch.where(on_gpu.reshape(-1) == expert)[0]) == n
        order, _ = on_gpu.reshape(-1).sort()
        assert torch.bincount(order).tolist() == torch.bincount(route.reshape(-1)).tolist()
        both = torch.cat([tokens.cuda(), tokens.cuda()], 1)[:, -5:]
        assert (both.cpu() == tokens[:, -5:]).all()
        rows = torch.arange(64, device="cuda").flip(0)
        assert (tokens.cuda()[rows].cpu() == tokens.flip(0)).all()
        """
    )

    assert not found["rehearsal"]["assumptions"]


def test_choices_among_unknown_values_are_even(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        scores = torch.randn(4096, 8, device="cuda").softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        for expert in range(8):
            assert len(torch.where(chosen == expert)[0]) == 4096 * 2 // 8
        beams = torch.randn(16, 8 * 2000, device="cuda").topk(8).indices
        assert len(beams.unique()) == 16 * 8 and int((beams // 2000).max()) == 7
        """
    )

    said = [a["assumed"] for a in found["rehearsal"]["assumptions"]]
    assert said == ["all 8 are chosen equally often", "128 different ones of 16000 are chosen"]


def test_words_drawn_from_a_vocabulary_do_not_end_the_sentence(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        words = torch.randn(4, 32000, device="cuda").softmax(-1).multinomial(6)
        is_end = torch.isin(words, torch.tensor([2], device="cuda"))
        end = torch.full((4,), 6, device="cuda")
        end[is_end.any(1)] = is_end.int().argmax(1)[is_end.any(1)]
        kept = torch.arange(6, device="cuda").expand(4, -1) <= end[:, None]
        assert kept.cpu().all() and len(words[kept]) == 24
        """
    )

    said = [a["assumed"] for a in found["rehearsal"]["assumptions"]]
    assert said == ["24 different ones of 32000 are chosen"]


def test_choices_put_among_zeros_are_known_and_forgotten_when_written_over(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        for dtype in (torch.float32, torch.bfloat16):
            chosen = torch.randn(1536, 16, device="cuda").topk(4, dim=1).indices
            zeros = torch.zeros([1536, 16], dtype=dtype, device="cuda")
            gates = zeros.scatter(1, chosen, 1)  # 24,576 numbers with fractions
            sizes = gates.long().sum(0).tolist()
            assert sizes == [384] * 16, sizes
            gates.add_(torch.randn_like(gates))
            assert gates.long().sum(0).tolist() == [0] * 16  # unknown: read as zeros
            zeros.add_(torch.randn_like(zeros))
            assert zeros.scatter(1, chosen, 1).long().sum(0).tolist() == [0] * 16
            in_place = torch.full((1536, 16), 0.0, dtype=dtype, device="cuda")
            assert in_place.scatter_(1, chosen, 1).long().sum().item() == 1536 * 4
            other = torch.ones([1536, 16], dtype=dtype, device="cuda")
            assert other.scatter(1, chosen, 1).long().sum(0).tolist() == [0] * 16
        """
    )


def test_weights_put_at_chosen_places_are_taken_for_more_than_0(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        scores = torch.randn(96, 8, device="cuda", requires_grad=True).softmax(1)
        weights, chosen = scores.topk(4, dim=1)
        weights, chosen = weights[:, :3], chosen[:, :3]
        gates = torch.zeros_like(scores, requires_grad=True).scatter(1, chosen, weights)
        assert (gates > 0).sum(0).tolist() == [96 * 3 // 8] * 8  # of the first choices as of all
        rows, experts = torch.nonzero(gates).t()
        parts = torch.randn(96, 16, device="cuda")[rows].split((gates > 0).sum(0).tolist())
        assert [len(part) for part in parts] == [36] * 8
        for choice in chosen.tolist():
            assert len(set(choice)) == 3
        gates.sum().backward()
        few = torch.zeros(4, 8, device="cuda").scatter(1, chosen[:4], weights[:4])
        assert torch.nonzero(few).shape == (12, 2)
        """
    )

    assumed = {a["operation"]: a["count"] for a in found["rehearsal"]["assumptions"]}
    assert assumed == {"choice": 1, "scatter": 1}  # at each line


def test_a_loss_can_be_taken_the_logarithm_of_and_falls(stage: Stage) -> None:
    stage.must_pass(
        """
        import math, torch
        losses = []
        for _ in range(3):
            loss = torch.randn(64, 8, device="cuda").square().mean()
            losses.append(loss.item())
            math.log2(losses[-1]), 1 / losses[-1], math.log(loss.cpu())
        assert losses == sorted(losses, reverse=True) and losses[0] < 1
        scaler = torch.amp.GradScaler("cuda")
        weight = torch.ones(4, device="cuda", requires_grad=True)
        optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
        scaler.scale((weight * 2).sum()).backward()
        scaler.step(optimizer)
        assert optimizer.state[weight]  # the step was taken: gradients are finite
        """
    )


def test_probabilities_add_up_to_1(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        scores = torch.randn(3, 4, device="cuda")
        assert scores.softmax(-1)[0].tolist() == [1 / 4] * 4
        drawn = torch.nn.Softmax(0)(scores.half()).detach().T.cpu()
        assert drawn.shape == (4, 3) and (drawn.sum(1) - 1).abs().max() < 1e-3
        assert scores.tolist()[0][0] == 1 / 2
        """
    )


def test_values_made_up_are_named_where_the_program_fails(stage: Stage) -> None:
    stage.script(
        """
        import torch
        n = torch.randn(100, device="cuda").argmax().item()
        assert 1 / (n - 1)
        """
    )

    done = stage.run("train.py")

    assert done.returncode == 2
    assert "Values on the GPU are made up, which may be why" in done.stderr
    assert "item at train.py:3" in done.stderr


def test_a_mask_keeps_at_most_what_was_put_into_it(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        labels = (torch.rand(2000, device="cuda") * 3).long()
        positive, negative = torch.where(labels >= 1)[0], torch.where(labels == 0)[0]
        masks = [torch.zeros_like(labels, dtype=torch.uint8) for _ in range(2)]
        masks[0][positive[torch.randperm(len(positive), device="cuda")[:128]]] = 1
        masks[1][negative[torch.randperm(len(negative), device="cuda")[:384]]] = 1
        assert torch.where(masks[0] | masks[1])[0].shape == (512,)
        assert torch.where(torch.cat(masks))[0].shape == (512,)
        copied = masks[0].bool()
        assert torch.randn(2000, 4, device="cuda")[copied].shape == (128, 4)
        rows = torch.zeros(2000, 3, dtype=torch.bool, device="cuda")
        rows[positive[:5]] = True
        assert rows.nonzero().shape == (15, 2)
        masks[0] += 1
        assert torch.where(masks[0])[0].shape == (2000,)
        assert torch.where(masks[1] == 0)[0].shape == (2000,)
        """
    )

    assumed = {a["assumed"] for a in found["rehearsal"]["assumptions"]}
    assert assumed == {"all elements are kept", "all elements that can be kept are kept"}


def test_report_says_which_masks_are_too_large_to_be_followed(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        for n in (2**20, 2**20 + 4):
            ids = torch.arange(n, device="cuda")
            print(ids[ids % 4 == 0].shape[0] - n // 4)
        """
    )

    (assumption,) = found["rehearsal"]["assumptions"]
    limit = "values of more than 1,048,576 elements are not followed"
    assert assumption["assumed"] == f"all elements are kept; {limit}"


def test_masks_of_ones_are_known_in_any_type(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import torch
        mask = torch.ones(32, 24, device="cuda")  # as Bart makes one in each step of generate
        assert bool(mask.to(torch.bool).all()) is True
        mask[3, :2] = 0
        assert int(mask.bool().sum()) == 32 * 24 - 2
        assert len(torch.ones(400, device="cuda").nonzero()) == 400
        """
    )

    assert not found["rehearsal"]["assumptions"]


def test_random_integers_are_drawn_without_the_numbers_of_the_program(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        labels = torch.randint(2, 9, (64, 65), device="cuda")
        assert 2 <= labels.min().item() and labels.max().item() < 9
        ignored = labels[:, 1:] == -100
        assert (ignored.numel() - ignored.sum()).item() == 64 * 64
        assert labels.unique().tolist() == [2, 3, 4, 5, 6, 7, 8]
        assert (torch.rand(3) == expected).all()
        """
    )
