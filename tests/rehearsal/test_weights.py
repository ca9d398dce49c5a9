"""Models that are made on the CPU and need more memory than there is."""

from __future__ import annotations

import sys

import pytest
from rehearsal_stage import Stage


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="pages are given back on Linux")
def test_a_large_model_takes_no_memory_of_the_machine(stage: Stage) -> None:
    found = stage.must_pass(
        """
        import copy, resource
        import torch

        def resident():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

        before = resident()
        net = torch.nn.Sequential(*(torch.nn.Linear(8192, 8192) for _ in range(6)))
        assert resident() - before < 800, resident() - before
        net = copy.deepcopy(net).half()
        assert next(net.parameters()).dtype is torch.float16
        assert net[0].bias.to(dtype=torch.float32).dtype is torch.float32
        assert resident() - before < 800, resident() - before
        net.cuda()
        assert torch.cuda.memory_allocated() >> 20 == 6 * 128, torch.cuda.memory_allocated()
        weights = {name: value.cpu() for name, value in net.state_dict().items()}
        assert resident() - before < 800, resident() - before
        """
    )

    assert found["rehearsal"]["notes"] == [
        "Parameters created on the CPU after the first 128 MiB have no values.",
    ]


@pytest.mark.slow
def test_numbers_drawn_after_a_model_was_made_are_as_ever(stage: Stage) -> None:
    made = """
        import torch
        torch.manual_seed(0)
        made = [torch.nn.Embedding(4001, 8191), torch.nn.Linear(8191, 8190)]
        drawn = torch.randint(0, 10**9, (3,)).tolist()
    """
    import torch

    real: dict[str, object] = {}
    state = torch.get_rng_state()
    exec("\n".join(line.strip() for line in made.splitlines()), real)
    torch.set_rng_state(state)

    stage.must_pass(
        made + f"    torch.ones(1, device='cuda')\n        assert drawn == {real['drawn']}"
    )
