"""What ``torch/_inductor/cudagraph_trees.py`` needs from PyTorch's core.

The trees themselves run as they are: a compiled function runs once in the private pool, is captured
there with copies of its inputs, and is replayed from then on, with its results at the addresses
that they had at the capture. Such results own no memory: they are storages at a fixed address.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fragdoctor.rehearsal.engine import allocation, dispatch, nothing, put_all, session

_StoragePointer = int


def _storage(pointer: _StoragePointer) -> torch.UntypedStorage:
    found: torch.UntypedStorage = torch.UntypedStorage._new_with_weak_ptr(pointer)
    return found


def _tensor_at(described: dict[str, Any], storage: torch.UntypedStorage) -> torch.Tensor:
    """``_construct_CUDA_Tensor_From_Storage_And_Metadata``."""
    with torch.no_grad():
        empty = torch.empty(0, dtype=described["dtype"], device=described["device"])
        return empty.set_(
            storage, described["storage_offset"], described["size"], described["stride"]
        )


def _lie_at(tensors: Sequence[Any], addresses: Sequence[Any], indices: Sequence[int]) -> bool:
    """``_tensors_data_ptrs_at_indices_equal``."""
    return all(addresses[i] is None or tensors[i].data_ptr() == addresses[i] for i in indices)


class _PoolState:
    """``_cuda_getCheckpointState``: empty, since the tree names the storages that are alive."""

    __init__ = nothing


class _Owned:
    """Memory that results of replays own again if more is to be captured after them."""

    def __init__(self) -> None:
        self._held: dict[_StoragePointer, Any] = {}

    def restore(
        self, _device: int, _state: _PoolState, _stale: Any, alive: Sequence[_StoragePointer]
    ) -> None:
        """``_cuda_setCheckpointPoolState``: take the memory of live storages in place."""
        now = session.current()
        stack = allocation.stack_here()
        for pointer in dict.fromkeys(alive):
            storage = _storage(pointer)
            address = storage.data_ptr()
            if pointer not in self._held and now.gpus.take_at(address, storage.nbytes(), stack):
                self._held[pointer] = weakref.finalize(storage, self._give, pointer, address)

    def _give(self, pointer: _StoragePointer, address: int) -> None:
        del self._held[pointer]
        allocation.give(address)

    def free(self, pointer: _StoragePointer) -> None:
        """``_free_And_Remove_DeleterFn``: free the memory, even if something still refers to it."""
        if pointer in self._held:
            self._held[pointer]()
        else:
            allocation.disown(_storage(pointer))

    def refuse(self, pointer: _StoragePointer, why: str) -> None:
        """``_set_storage_data_ptr_access_error_msg``: an operation on the storage is an error."""
        dispatch.REFUSED[pointer] = why
        weakref.finalize(_storage(pointer), dispatch.REFUSED.pop, pointer, None)


def install() -> None:
    """Install the functions of the core."""
    owned = _Owned()
    functions: dict[str, Any] = {
        "_construct_CUDA_Tensor_From_Storage_And_Metadata": _tensor_at,
        "_tensors_data_ptrs_at_indices_equal": _lie_at,
        "_free_And_Remove_DeleterFn": owned.free,
        "_cuda_CUDAAllocator_AllocatorState": _PoolState,
        "_cuda_getCheckpointState": _PoolState,
        "_cuda_setCheckpointPoolState": owned.restore,
        "_cuda_cudaCachingAllocator_raw_delete": nothing,
        "_cuda_checkPoolLiveAllocations": lambda *_: True,
        "_has_Standard_Deleter": lambda _: True,
        "_set_storage_access_error_msg": nothing,  # the same is said of its storage
        "_set_storage_data_ptr_access_error_msg": owned.refuse,
        "_cuda_get_conv_benchmark_empty_cache": lambda: True,
        "_cudnn_set_conv_benchmark_empty_cache": nothing,
    }
    put_all(torch._C, functions)
