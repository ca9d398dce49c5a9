"""One rank of a data-parallel job: python train_rank.py RANK. Rank 2 is fed longer sequences."""

from __future__ import annotations

import sys

from scenarios import GPT, get_batch, train_step

import torch


def main(rank: int) -> None:
    model = GPT(layers=2, dim=256).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    length = 1536 if rank == 2 else 256
    for _ in range(4):
        train_step(model, optimizer, get_batch(8, length))


if __name__ == "__main__":
    main(int(sys.argv[1]))
