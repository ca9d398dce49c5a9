"""Random generators of fake GPUs: states without numbers that anything could be drawn from."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Self

import torch

from fragdoctor.rehearse.engine.patching import put

_Generator: Any = torch.Generator


class Generator(_Generator):  # type: ignore[misc]
    """``torch.Generator``; one of a GPU is one of the CPU that says it is on the GPU."""

    def __new__(cls, device: Any = "cpu") -> Self:
        """Make a generator for a device."""
        place = torch.device(device)
        made = _Generator.__new__(cls, "cpu" if place.type == "cuda" else place)
        made._fake_device = place if place.type == "cuda" else None
        return made  # type: ignore[no-any-return]

    def __init__(self, device: Any = "cpu") -> None:
        del device
        super().__init__()

    @property
    def device(self) -> torch.device:
        """The device that it was made for."""
        found = self._fake_device
        if found is None:
            return super().device  # type: ignore[no-any-return]
        return torch.device("cuda", 0 if found.index is None else found.index)

    def get_state(self) -> torch.Tensor:
        """Return a state as a GPU's generator has it: seed and offset."""
        if self._fake_device is None:
            return super().get_state()  # type: ignore[no-any-return]
        return torch.tensor([self.initial_seed() % 2**63, 0]).view(torch.uint8).clone()

    def set_state(self, new_state: torch.Tensor) -> Any:
        """Take a state; a GPU's has nothing in it that matters here."""
        if self._fake_device is None:
            return super().set_state(new_state)
        return self


def install(undo: ExitStack) -> None:
    """Let generators be made for fake GPUs until ``undo`` is closed."""
    put(undo, torch, "Generator", Generator)
