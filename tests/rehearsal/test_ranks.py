"""One rank of a distributed run by itself."""

from __future__ import annotations

import pytest
from rehearsal_stage import Stage

WRAPPED = {
    "DDP": "DistributedDataParallel(net.cuda(), device_ids=[rank])",
    "static": "DistributedDataParallel(net.cuda(), device_ids=[rank], static_graph=True)",
    "FSDP": "FSDP(net, device_id=rank, use_orig_params=True)",
    "fully_shard": "shard(net)",
}
BODY = """
    import os
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.nn.parallel import DistributedDataParallel

    def shard(net):
        from torch.distributed._composable.fsdp import fully_shard
        from torch.distributed.device_mesh import init_device_mesh
        fully_shard(net.cuda(), mesh=init_device_mesh("cuda", (4,)))
        return net

    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (1, 4, "nccl")
    net = torch.nn.Linear(2048, 2048, bias=False)
    net = {wrapped}
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(3):
        loss = net(torch.randn(8, 2048, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = torch.cuda.memory_allocated() >> 20
    assert {least} <= kept < {least} + 8, kept
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrapped", "least"),
    # Two workspaces of 32 MiB; 16 MiB of weights and two states as large: DDP has them whole and a
    # bucket for gradients, the others a quarter of them.
    [("DDP", 128), ("static", 128), ("FSDP", 76), ("fully_shard", 76)],
)
def test_parallel_training_holds_what_one_rank_does(stage: Stage, wrapped: str, least: int) -> None:
    body = BODY.replace("{wrapped}", WRAPPED[wrapped]).replace("{least}", str(least))

    found = stage.must_pass(body, "--world-size", "4", "--rank", "1", "--steps", "9")

    assert found["rehearsal"]["steps"] == 3
    (note,) = found["rehearsal"]["notes"]
    assert note.startswith("Rank 1 of a distributed run was rehearsed alone: ")


def test_collectives_answer_with_this_ranks_part(stage: Stage) -> None:
    stage.must_pass(
        """
        import torch
        import torch.distributed as dist

        def main(rank, world_size):
            dist.init_process_group("nccl", rank=rank, world_size=world_size,
                                    init_method="tcp://10.0.0.1:1234")
            total = torch.tensor(3.0, device="cuda")
            dist.all_reduce(total)
            assert total.item() == 12.0
            parts = [torch.zeros(2, device="cuda") for _ in range(4)]
            dist.all_gather(parts, torch.ones(2, device="cuda"))
            assert parts[3].tolist() == [1, 1]
            things = [None] * 4
            dist.all_gather_object(things, {"rank": rank})
            assert things == [{"rank": 0}] * 4
            group = dist.new_group([0, 2])
            assert dist.get_world_size(group) == 2
            dist.barrier()

        torch.multiprocessing.spawn(main, args=(4,), nprocs=4)
        """
    )


def test_shapes_are_compared_in_the_memory_that_a_gpu_takes_for_it(stage: Stage) -> None:
    """As an H200 did with one rank: the number, those of all ranks, a flat copy, the shapes."""
    stage.must_pass(
        """
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("nccl", rank=0, world_size=1, init_method="tcp://10.0.0.1:1234")
        net = torch.nn.Linear(20, 30).cuda()
        torch.cuda.memory._record_memory_history(stacks="python")
        DistributedDataParallel(net, device_ids=[0])
        (trace,) = torch.cuda.memory._snapshot()["device_traces"]
        asked = [e["size"] for e in trace if e["action"] in ("alloc", "free_completed")]
        assert asked[:8] == [8, 8, 8, 8, 48, 48, 8, 8]
        """
    )


def test_a_rank_that_is_not_there_is_refused(training: Stage) -> None:
    done = training.run("train.py", "--world-size", "2", "--rank", "2")

    assert done.returncode == 2
    assert "There is no rank 2 of 2." in done.stderr
    assert "--rank needs --world-size." in training.run("train.py", "--rank", "1").stderr


def test_a_launcher_before_the_script_is_left_out(stage: Stage) -> None:
    stage.script(BODY.replace("{wrapped}", WRAPPED["DDP"]).replace("{least}", "128"))
    launcher = ("torchrun", "--nproc-per-node", "4", "train.py")
    found = stage.json("--rank", "1", *launcher)

    assert found["rehearsal"]["fits"]
    assert "torchrun was skipped: rank 1 of 4 was rehearsed." in found["rehearsal"]["notes"]
    refused = stage.run("--world-size", "4", *launcher).stderr
    assert "--world-size and torchrun both say how many ranks there are." in refused
