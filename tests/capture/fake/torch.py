"""A stand-in for a CUDA build of PyTorch: its memory is a number, its snapshots are genuine."""

import os
import pickle
import sys
import time
import types
from pathlib import Path

__version__ = "2.12.1+fake"
MIB = 1 << 20
TOTAL = int(os.environ.get("FAKE_TOTAL_MB", "100")) * MIB
CONF = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _holes():
    """Return what lies free between live blocks: FAKE_HOLES_MB, less under some settings.

    FAKE_CURES says what is left under which: "expandable_segments:True=0,max_split_size_mb:32=20".
    """
    cures = os.environ.get("FAKE_CURES", "")
    for cure in cures.split(",") if cures else ():
        conf, _, left = cure.rpartition("=")
        if conf in CONF:
            return int(left) * MIB
    return int(os.environ.get("FAKE_HOLES_MB", "0")) * MIB


HOLES = _holes()
ADDRESS = 0x7F0000000000


class OutOfMemoryError(RuntimeError):
    """As PyTorch's: a heap type whose ``__init__`` can be replaced."""


_State = types.SimpleNamespace(
    is_initialized=False,
    recording=None,
    observers=[],
    queued=[],
    blocks=[],
    events=[],
    n_ooms=0,
    n_served=0,
)


def _stack():
    frames, frame = [], sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        frames.append({"filename": code.co_filename, "line": frame.f_lineno, "name": code.co_name})
        frame = frame.f_back
    return frames


def _event(action, address, size, **more):
    if _State.recording:
        _State.events.append(
            {
                "action": action,
                "addr": address,
                "size": size,
                "stream": 0,
                "time_us": int(time.time() * 1e6),
                "frames": _stack(),
                **more,
            }
        )


def _reserved():
    return sum(size for _, size, _ in _State.blocks)


def alloc(n_mib):
    """Allocate, each time a segment of its own; fail as the caching allocator does."""
    _lazy_init()
    size = n_mib * MIB
    free = TOTAL - _reserved() - HOLES
    if size > free:
        _State.n_ooms += 1
        _event("oom", 0, size, device_free=free)
        for observer in _State.observers:
            observer(0, size, TOTAL, free)
        held = _reserved() / MIB
        used = held + HOLES / MIB
        raise OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {n_mib}.00 MiB. GPU 0 has a total capacity of "
            f"{TOTAL / MIB:.2f} MiB of which {free / MIB:.2f} MiB is free. Including non-PyTorch "
            f"memory, this process has {used:.2f} MiB memory in use. Of the allocated "
            f"memory {held:.2f} MiB is allocated by PyTorch, and {HOLES / MIB:.2f} MiB is reserved "
            "by PyTorch but unallocated."
        )
    address = ADDRESS + _reserved()
    _event("segment_alloc", address, size)
    _event("alloc", address, size)
    _State.blocks.append((address, size, _stack()))
    _State.n_served += 1


def _lazy_init():
    if not _State.is_initialized:
        for call in _State.queued:
            call()
        _State.is_initialized = True


def _lazy_call(call):
    if _State.is_initialized:
        call()
    else:
        _State.queued.append(call)


def _record_memory_history(enabled="all", *, global_record_annotations=False, **kwargs):
    kwargs["global_record_annotations"] = global_record_annotations
    _State.recording = kwargs if enabled else None
    if not enabled:
        _State.events.clear()


class _Hooks(dict):
    """Hooks on every optimizer, as ``torch.optim.optimizer`` keeps them."""

    def register(self, hook):
        self[hook] = hook
        return types.SimpleNamespace(remove=lambda: self.pop(hook))


_before_step, _after_step = _Hooks(), _Hooks()


def _snapshot():
    segments = [
        {
            "device": 0,
            "address": address,
            "total_size": size,
            "allocated_size": size,
            "active_size": size,
            "requested_size": size,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": frames,
            "blocks": [
                {
                    "address": address,
                    "size": size,
                    "requested_size": size,
                    "state": "active_allocated",
                    "frames": frames,
                }
            ],
        }
        for address, size, frames in _State.blocks
    ]
    return {"segments": segments, "device_traces": [list(_State.events)]}


def _dump_snapshot(path):
    for _ in range(int(os.environ.get("FAKE_DUMP_SECONDS", "0")) * 20):
        time.sleep(0.05)
    if os.environ.get("FAKE_DUMP_FAILS"):
        raise RuntimeError("the snapshot cannot be taken")
    with Path(path).open("wb") as file:
        pickle.dump(cuda.memory._snapshot(), file)


class Optimizer:
    """What is hooked on all of them is called around its step."""

    def step(self):
        """Call the hooks, and allocate between."""
        for hook in list(_before_step.values()):
            hook(self, (), {})
        alloc(1)
        for hook in list(_after_step.values()):
            hook(self, (), {})


def memory_stats(device=None):
    held = _reserved()
    return {
        **{f"{name}_bytes.all.current": held for name in ("allocated", "reserved", "active")},
        **{f"{name}_bytes.all.peak": held for name in ("allocated", "reserved", "active")},
        "inactive_split_bytes.all.current": HOLES,
        "allocation.all.allocated": _State.n_served,
        "num_ooms": _State.n_ooms,
        "num_alloc_retries": _State.n_ooms,
    }


class _Properties:
    name = "Fake GPU"
    total_memory = TOTAL


version = types.SimpleNamespace(cuda=os.environ.get("FAKE_CUDA", "12.4") or None, hip=None)
cuda = types.SimpleNamespace(
    OutOfMemoryError=OutOfMemoryError,
    _lazy_call=_lazy_call,
    init=_lazy_init,
    is_initialized=lambda: _State.is_initialized,
    is_available=lambda: os.environ.get("FAKE_NO_GPU") is None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_properties=lambda device: _Properties,
    mem_get_info=lambda device: (TOTAL - _reserved(), TOTAL),
    memory_stats=memory_stats,
    reset_peak_memory_stats=lambda device=None: None,
    memory=types.SimpleNamespace(
        _record_memory_history=_record_memory_history,
        _dump_snapshot=_dump_snapshot,
        _snapshot=_snapshot,
    ),
)
optim = types.SimpleNamespace(Optimizer=Optimizer, SGD=type("SGD", (Optimizer,), {}))
register_optimizer_step_pre_hook = _before_step.register
register_optimizer_step_post_hook = _after_step.register
_C = types.SimpleNamespace(
    _cuda_attach_out_of_memory_observer=_State.observers.append,
    _cuda_isHistoryEnabled=lambda: bool(_State.recording),
    _cuda_getMemoryFraction=lambda device: float(os.environ.get("FAKE_FRACTION", "1.0")),
)
