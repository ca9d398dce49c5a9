"""``torch.compile`` in a rehearsal: everything but the kernels.

Dynamo, AOTAutograd with its partitioning of saved tensors, and Inductor with its fusion and buffer
planning run as they are. Kernels are neither compiled nor launched: the wrapper that Inductor
writes requests its buffers, calls PyTorch's own operators for what it does not generate, and frees
memory where it would on a GPU. If a kernel can be launched in several ways, its first launch
briefly takes the buffer that Inductor uses to clear the cache between timings (``benchmark_gpu`` in
``_inductor/runtime/benchmarking.py``).

Inductor's code generation imports Triton, whose wheel needs no GPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes

from fragdoctor.rehearsal.engine import always, graph_trees, put, put_all, session, swap_all, wrap

_NOT_HERE: Final = {
    "compile_threads": 1,
    "force_disable_caches": True,
    "triton.autotune_at_compile_time": False,
}
"""Inductor's settings that would need a GPU, other processes, or files left by earlier runs."""
_LEFT_OUT: Final = (
    "torch.compile was skipped because Triton is not installed in this Python (pip install "
    "triton), so the program ran eagerly. Compiled, it usually needs less."
)
_PARTITIONED: Final = (
    "Inductor could not plan a compiled part of the program ({}). That part ran unfused: what it "
    "keeps for the backward pass is right, but its peak can be a third too high."
)
_EAGER: Final = "torch.compile left part of the program uncompiled: {}."


_LAUNCHER: Final = SimpleNamespace(n_spills=0, n_regs=0)
"""What Inductor reads from a compiled kernel."""


_TUNED: Final[set[str]] = set()
"""Files of kernels that were tried, named by their contents, as in ``AutotuneCache``."""


def _run(tuner: Any, *args: Any, stream: Any = None, **kwargs: Any) -> None:
    """``CachingAutotuner.run``: launch nothing; the first time, try each way to launch the kernel.

    Tensors that the kernel writes in place are copied for a trial. A kernel of the same source has
    none, as when equal layers are compiled one by one: Inductor knows its best way by its file.
    """
    del stream
    if tuner.launchers:
        return
    tuner.launchers = [_LAUNCHER]
    n_variants = len(tuner.configs)
    tunes = n_variants > 1 or tuner.inductor_meta.get("coordinate_descent_tuning")
    source = Path(tuner.filename or "").name  # each graph has a folder of its own
    if not tunes or source in _TUNED:
        return
    _TUNED.add(source)
    for _ in range(n_variants):
        # If a copy would raise the peak, it is made on the CPU; each trial checks this again.
        kept = tuner.copy_args_to_cpu_if_needed(*args, **kwargs)
        _time(partial(tuner.maybe_clone_args, kept, *args, **kwargs))


def _time(call: Callable[[], Any]) -> float:
    """Do what ``benchmark_gpu`` does to time a call, except that nothing is really timed."""
    call()
    torch.cuda.synchronize()
    n_bytes = torch.cuda.get_device_properties().L2_cache_size
    cleared = torch.empty(n_bytes // 4, dtype=torch.int32, device="cuda")
    call()
    del cleared
    return 1.0


def _generated(_compiler: Any, name: str, source: str, *_: Any, **__: Any) -> Any:
    """``AsyncCompile.triton`` that compiles nothing."""
    cache = importlib.import_module("torch._inductor.codecache").PyCodeCache
    return getattr(cache.load(source), name)


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    """``_empty_strided_cuda``, which calls the allocator without going through the dispatcher."""
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _should_pad(original: Callable[..., Any], *args: Any) -> Any:
    """``_should_pad``, which times products of real tensors while fake ones are traced.

    If a mode is active, PyTorch 2.13 finds no kernel behind a fallback.
    """
    with _disable_current_modes():
        return original(*args)


def _compile_fx(
    original: Callable[..., Any], graph: Any, inputs: Any, *args: Any, **options: Any
) -> Any:
    """``compile_fx``; if Inductor fails, only the graph's partitioning is kept."""
    errors = importlib.import_module("torch._dynamo.exc")
    try:
        return original(graph, inputs, *args, **options)
    except (errors.RestartAnalysis, errors.SkipFrame):
        raise  # Dynamo handles it
    except torch.OutOfMemoryError:  # raised by a trial: on a GPU it ends the program
        dynamo: Any = importlib.import_module("torch._dynamo.config")
        dynamo.suppress_errors = False
        raise
    except Exception as e:  # noqa: BLE001 - anything that Inductor cannot handle
        said = f"{type(e).__name__}: {e}".partition("\n")[0][:200].rstrip(". ")
        session.note(_PARTITIONED.format(said))
        backends = importlib.import_module("torch._dynamo.backends.registry")
        return backends.lookup_backend("aot_eager_decomp_partition")(graph, inputs)


_STAND_INS: Final[tuple[tuple[str, str, Any], ...]] = (
    ("async_compile:AsyncCompile", "triton", _generated),
    ("async_compile:AsyncCompile", "warm_pool", classmethod(lambda *_: None)),
    ("async_compile:AsyncCompile", "wakeup", classmethod(lambda *_: None)),
    ("runtime.triton_heuristics:CachingAutotuner", "run", _run),
    ("runtime.benchmarking:benchmarker", "benchmark_gpu", lambda call, **_: _time(call)),
    # PyTorch's own kernels are assumed to be faster than those that templates make.
    ("select_algorithm:TritonTemplateCaller", "benchmark", lambda *_, **__: 2 * _time(bool)),
    ("select_algorithm:TritonTemplateCaller", "precompile", lambda _: None),
    ("runtime.triton_helpers", "set_driver_to_gpu", lambda: None),
)
"""Parts of Inductor that need a GPU or its tools: module and owner, name, and the replacement."""


def _note_conversion(record: logging.LogRecord) -> bool:
    """Note a warning that Dynamo gives up on a part of the program."""
    _, is_given_up, what = record.getMessage().partition("WON'T CONVERT")
    if is_given_up:
        session.note(_EAGER.format(" ".join(what.split()[:4])))
    return True


def _prepare() -> None:
    """Replace what needs a GPU or its tools in Inductor."""
    graph_trees.install()
    put(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided)
    # The engine's own functions run while code is traced, but they are not part of that code.
    importlib.import_module("torch._dynamo.trace_rules").add("fragdoctor")
    triton = importlib.import_module("torch.utils._triton")
    answers = {"has_triton": always(True), "triton_hash_with_backend": always("REHEARSED")}
    there = vars(triton)  # not each version has both
    swap_all({id(there[name]): answer for name, answer in answers.items() if name in there})
    # For this target, Dynamo compiles a user's kernels far enough to see what they write to.
    backend = importlib.import_module("triton.backends.compiler")
    major, minor = torch.cuda.get_device_capability()
    target = backend.GPUTarget("cuda", 10 * major + minor, 32)
    driver = SimpleNamespace(get_current_target=always(target))
    importlib.import_module("triton.runtime").driver.set_active(driver)
    for place, name, value in _STAND_INS:
        module, _, kind = place.partition(":")
        owner: Any = importlib.import_module(f"torch._inductor.{module}")
        owner = getattr(owner, kind) if kind else owner
        if hasattr(owner, name):
            put(owner, name, value)
    padding = importlib.import_module("torch._inductor.fx_passes.pad_mm")
    wrap(padding, "_should_pad", _should_pad)
    planner = importlib.import_module("torch._inductor.compile_fx")
    wrap(planner, "compile_fx", _compile_fx)
    config = importlib.import_module("torch._inductor.config")
    put_all(config, {name: value for name, value in _NOT_HERE.items() if name in config._config})
    put(importlib.import_module("torch._dynamo.config"), "suppress_errors", True)
    logging.getLogger("torch._dynamo.convert_frame").addFilter(_note_conversion)


def install() -> None:
    """Patch ``torch.compile``."""
    prepare, original = cache(_prepare), torch.compile

    def compile_(model: Any = None, **options: Any) -> Any:
        """``torch.compile`` without its kernels."""
        if importlib.util.find_spec("triton") is None:
            session.note(_LEFT_OUT)
            return _as_it_is(model)
        prepare()
        if asked := options.get("options"):
            options["options"] = {k: v for k, v in asked.items() if k not in _NOT_HERE}
        return original(model, **options)

    put(torch, "compile", compile_)  # ``Module.compile`` calls it, too


def _as_it_is(model: Any) -> Any:
    if model is None:  # a decorator with options
        return _as_it_is
    if isinstance(model, torch.nn.Module):
        vars(model)["_orig_mod"] = model  # not as a submodule of itself
    return model
