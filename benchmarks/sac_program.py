"""Train a model of ``unequal_models.py`` with a plan from PyTorch's ``torch.distributed._tools``.

    sac_program.py plan NAME SHARE PLAN.json    # what sac_milp plans with this share of the memory
    sac_program.py run NAME PLAN.json           # trains the model with the plan

Both commands are rehearsed. The runtime of an operator is its counted operations, so that the
solver has the same goal as fragdoctor. Needs PuLP before 3, pwlf, SciPy, and PyTorch 2.13: before,
``sac_milp`` takes the runtime of a module to be less than 100, and finds no plan for these models.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry
from unequal_models import loss_of, made, train

LITTLE: Final = 1e-3


def counted(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Run an operator; return its result, and its counted operations in units of 10^6."""
    kwargs = kwargs or {}
    out = func(*args, **kwargs)
    formula = flop_registry.get(func.overloadpacket)
    # Operators without a formula get a tiny value, because the tools divide by a module's sum.
    return out, formula(*args, **kwargs, out_val=out) / 1e6 if formula else LITTLE


def plan(name: str, share: float) -> dict[str, list[int]]:
    """Return for each module which operators are saved (1) and which are recomputed (0)."""
    model, args, kwargs = made(name)
    mode = FakeTensorMode()
    replace_tensors(model, mode)
    args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
    with mode:
        return decided(model, args, kwargs, share)


def replace_tensors(model: torch.nn.Module, mode: FakeTensorMode) -> None:
    """Replace the tensors of a model by fake ones, because the tools do not work without them."""
    fakes: dict[int, Any] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                fake = torch.nn.Parameter(mode.from_tensor(value.detach()))
                module._parameters[name] = fakes.setdefault(id(value), fake)
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = mode.from_tensor(value)


def decided(model: Any, args: Any, kwargs: Any, share: float) -> dict[str, list[int]]:
    """Return the solver's decisions for a model of fake tensors."""
    from torch.distributed._tools import ilp_utils, sac_estimator, sac_ilp
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    RuntimeEstimator._roofline_estimate = staticmethod(counted)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        loss_of(model, args, kwargs).backward()
        optimizer.step()
        optimizer.zero_grad()

    memory = MemTracker()
    memory.track_external(model, optimizer)
    with memory:
        step()
        memory.reset_mod_stats()
        step()
    runtime = RuntimeEstimator()
    with runtime("operator-level-cost-model"):
        step()
    estimator = sac_estimator.SACEstimator()
    with estimator("operator-level-cost-model"):
        loss = loss_of(model, args, kwargs)
    loss.backward()
    device = torch.device("cuda", 0)
    found = ilp_utils.aggregate_stats(model, memory, runtime, estimator, device)
    graph = ilp_utils.parse_module_info(found)
    peak, _ = ilp_utils.get_peak_memory_runtime_baseline(graph)
    decisions, _, _ = sac_ilp.sac_milp(graph, memory_budget=share * peak / 2**30)
    return {
        path.removeprefix(f"{type(model).__name__}").lstrip("."): policy(
            estimator.sac_mod_stats[path], 1 - dropped
        )
        for path, dropped in decisions.items()
    }


def policy(stats: Any, share: float) -> list[int]:
    """Return which operators of a module are saved, given this share of its memory.

    PyTorch's function fails if in-place operators need more memory; it is then called with more.
    """
    from torch.distributed._tools import sac_ilp

    for more in range(101):
        try:
            found = sac_ilp.get_optimal_checkpointing_policy_per_module(
                stats, min(share + more / 100, 1.0)
            )
        except TypeError:  # the function reads a solution that does not exist
            continue
        if found:
            return found
    return [0] * len(stats.func_names)


def keeping(choices: list[int]) -> Any:
    """Return checkpoint contexts that save the results of operators by their numbers."""
    counts = {False: -1, True: -1}

    def policy(context: Any, *_: Any, **__: Any) -> Any:
        counts[context.is_recompute] += 1
        n = counts[context.is_recompute]
        is_kept = n < len(choices) and choices[n]
        choice = checkpoint.CheckpointPolicy
        return choice.MUST_SAVE if is_kept else choice.PREFER_RECOMPUTE

    return checkpoint.create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=True)


def run(name: str, choices: dict[str, list[int]]) -> None:
    """Train the model with a plan."""
    model, args, kwargs = made(name)
    for path, kept in choices.items():
        module = model.get_submodule(path)
        module.forward = partial(
            checkpoint.checkpoint,
            module.forward,
            use_reentrant=False,
            context_fn=partial(keeping, kept),
        )
    train(model, args, kwargs)


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        choices = plan(sys.argv[2], float(sys.argv[3]))
        Path(sys.argv[4]).write_text(json.dumps(choices))
    else:
        run(sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))
