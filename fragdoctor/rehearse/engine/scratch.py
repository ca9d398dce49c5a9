"""Scratch memory of kernels that are written out as Python."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch

from fragdoctor.rehearse.engine import memory, session


class Scratch:
    """Scratch memory on the GPU of a tensor; what is left is given back at the end."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.get_device()
        self._stack = memory.stack_here()
        self._operation = session.current().stacks.operation("scratch")
        self._held: list[int] = []

    @property
    def n_multiprocessors(self) -> int:
        """Of the GPU."""
        return session.current().facts.n_multiprocessors

    def take(self, n_bytes: int) -> int:
        """Return the address of new scratch memory.

        Raises:
            torch.OutOfMemoryError: the GPU has no more.
        """
        address = memory.take(self._device, n_bytes, self._operation, self._stack)
        if address:
            self._held.append(address)
        return address

    def give(self, address: int) -> None:
        """Give scratch memory back."""
        if address:
            self._held.remove(address)
            memory.give(address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        while self._held:
            memory.give(self._held.pop())
