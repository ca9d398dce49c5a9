"""The treatments that can help a program, judging from what it was seen to use.

What frameworks call them is in ``model/frameworks.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any, Final
from urllib.parse import quote

from fragdoctor.analysis.pairs import Pairs
from fragdoctor.model.finding import Location
from fragdoctor.model.frameworks import HAVE_FUSED, Change, words_of
from fragdoctor.model.prescription import LeftOut, Numerics, Place, Treatment
from fragdoctor.rehearsal.prescription.checkpoints import Plan
from fragdoctor.units import format_count, listed

Traits = Mapping[str, Any]
"""The findings of ``engine/treatments/traits.py``, with what the search has added to them."""

_ADAM: Final = {"Adam", "AdamW"}
_NUMBER: Final = re.compile(r"\[\d+:\d+\]|\.?\d+")
_OWN_LIMIT: Final = re.compile(r"per_process_memory_fraction\s{0,9}:[^,]{0,99},")
_MEMBER: Final = re.compile(r"(.*)\[(\d+)\]")
_DIVIDING: Final = {"lightning", "accelerate"}
"""Frameworks that divide each loss by the number of accumulated batches (2.6 and 1.15)."""
_REPLACED: Final = ("", "ForCausalLMLoss")
"""Losses that there are replacement lines for: the program's own, and one of Transformers."""
LONG_RUN: Final = 3  # of results that are listed
LONG_ENOUGH: Final = 2
"""Updates that show what all of them take: the first one creates the optimizer's state."""
_EXPANDABLE: Final = "expandable_segments:True"
_NO_BATCH: Final = (
    "no DataLoader makes the batches, and no number that does was found; use --batch 32, and "
    "{batch} in the arguments"
)
N_CHUNKS: Final = 16
"""Parts in which a loss over logits is computed; they then need less than the rest of a step."""


_WRITTEN: Final = Path(__file__).parents[1] / "engine" / "treatments" / "written.py"
_FOR_KEEPING: Final = (
    "from torch.utils.checkpoint import CheckpointPolicy, checkpoint",
    "from torch.utils.checkpoint import create_selective_checkpoint_contexts",
    "from torch.utils.flop_counter import flop_registry",
    "",
)


@cache
def _written(name: str) -> tuple[str, ...]:
    """Return a function that the engine runs as the user writes it, without types."""
    module = ast.parse(_WRITTEN.read_text(encoding="utf-8"))
    functions = {one.name: one for one in module.body if isinstance(one, ast.FunctionDef)}
    for node in ast.walk(functions[name]):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    return (*ast.unparse(functions[name]).splitlines(), "")


def checkpointed(traits: Traits, plan: Plan) -> Treatment:
    """Return checkpointing of the modules of a plan."""
    model = _model(traits)
    by_kept: dict[tuple[int, ...], list[int]] = {}
    for choice in plan.choices:
        by_kept.setdefault(choice.kept, []).append(choice.number)
    lines = ["from functools import partial"]
    keeps = any(by_kept)
    lines += _FOR_KEEPING if keeps else ["from torch.utils.checkpoint import checkpoint"]
    lines += _written("keeping") if keeps else ()
    lines += [f"{model}{path}.config.use_cache = False" for path in traits["caches"]]
    specs = []
    for kept, numbers in by_kept.items():
        suffix = f"={'.'.join(map(str, kept))}" if kept else ""
        specs += [f"{number}{suffix}" for number in numbers]
        parts = [traits["parts"][n] for n in numbers]
        written = [part["written"] for part in parts if "piece" not in part]
        if written:
            lines += _checkpointing(written, kept)
    lines += _in_pieces(traits, plan)
    paths = [traits["parts"][choice.number]["path"] for choice in plan.choices]
    blocks = [*traits["blocks"]]
    instead = ""
    if paths == blocks and not keeps:
        instead = words_of(traits["framework"], Change.CHECKPOINT)
    n_kept = sum(bool(choice.kept) for choice in plan.choices)
    return Treatment(
        "checkpoint",
        f"checkpoint {_counted(paths, blocks)}{', some results kept' if n_kept else ''}",
        Numerics.EXACT,
        _share(plan.n_flops, traits),
        lines,
        instead,
        [f"checkpoint:{','.join(specs)}"],
        place=Place.BEFORE_OPTIMIZER,
    )


def _checkpointing(written: Sequence[str], kept: Sequence[int]) -> list[str]:
    """Return the lines that checkpoint modules while keeping some results of each."""
    more = f", context_fn={_kept(kept)}" if kept else ""
    block = written[0] if len(written) == 1 else "block"
    line = f"{block}.forward = partial(checkpoint, {block}.forward, use_reentrant=False{more})"
    return [line] if len(written) == 1 else [f"for block in {_together(written)}:", f"    {line}"]


def _kept(numbers: Sequence[int]) -> str:
    """Return the call for these results; all of the first are written as a range."""
    n = len(numbers)
    is_run = n > LONG_RUN and [*numbers] == [*range(n)]
    return f"keeping({f'*range({n})' if is_run else ', '.join(map(str, numbers))})"


def _in_pieces(traits: Traits, plan: Plan) -> list[str]:
    """Return the lines that checkpoint pieces of sequential modules."""
    pieces: dict[str, list[str]] = {}
    for choice in plan.choices:
        part = traits["parts"][choice.number]
        if "piece" in part:
            first, end = part["piece"]
            more = f'{{"context_fn": {_kept(choice.kept)}}}' if choice.kept else "{}"
            pieces.setdefault(part["written"], []).append(f"({first}, {end}, {more})")
    lines = ["", *_written("in_pieces")] if pieces else []
    for layers, those in pieces.items():
        lines.append(f"pieces = [{', '.join(those)}]")
        lines.append(f"{layers}.forward = partial(in_pieces, {layers}, pieces)")
    return lines


def _counted(paths: Sequence[str], blocks: Sequence[str]) -> str:
    """Return a description of how many modules these are."""
    # A piece (``model.head[0:3]``) is named in full; ``layers.0`` and ``layers.1`` become the list.
    kinds = list(dict.fromkeys(p if p.endswith("]") else _NUMBER.sub("", p) or p for p in paths))
    where = ", ".join(kinds[:3]) + (", ..." if len(kinds) > 3 else "")
    n = len(paths)
    n_all = len(blocks)
    if n <= n_all and {*paths} <= {*blocks}:
        return f"{'all ' if n == n_all else f'{n} of '}{n_all} blocks ({where})"
    return f"{n} module{'s' if n > 1 else ''} ({where})"


def _together(written: Sequence[str]) -> str:
    """Return what a loop runs over: ``model.layers[0:4]``, or a list of modules."""
    runs: list[tuple[str, str, list[int]]] = []
    for one in written:
        found = _MEMBER.fullmatch(one)
        stem, number = (found[1], int(found[2])) if found else (one, -1)
        if found and runs and runs[-1][0] == stem and runs[-1][2][1] == number - 1:
            runs[-1][2][1] = number
        else:
            runs.append((stem, one, [number, number]))
    pieces = [
        one if first == last else f"*{stem}[{first or ''}:{last + 1}]"
        for stem, one, (first, last) in runs
    ]
    if len(pieces) == 1 and pieces[0].startswith("*"):
        return pieces[0][1:]
    return f"[{', '.join(pieces)}]"


def _share(n_flops: int, traits: Traits) -> float:
    """Return operations as a share of those of the whole training."""
    return float(n_flops / max(traits["n_flops"], 1))


def _model(traits: Traits) -> str:
    """Return the program's name for its model, if it is known."""
    return str(traits["place"]["model"]) if traits["place"] else "model"


def _optimizer(traits: Traits) -> str:
    """Return the program's name for its optimizer, if it is known."""
    return str((traits["place"] or {}).get("optimizer") or "optimizer")


def _loss_in_chunks(traits: Traits) -> Treatment:
    """Return the loss over a head's logits, computed in checkpointed parts."""
    head, model = traits["head"], _model(traits)
    logits_of = "lambda x: logits_of(x).float()" if head["is_cast"] else "logits_of"
    how = {**head["how"]}
    n_rows = "" if how.pop("reduction") == "sum" else f" / (target != {how['ignore_index']}).sum()"
    given = "".join(f", {name}={value}" for name, value in how.items())
    loss = f"chunked_loss(x, target, {logits_of}, {N_CHUNKS}{given})"
    lines = [
        "import torch.nn.functional as F",
        "from torch.utils.checkpoint import checkpoint",
        "",
        *_written("chunked_loss"),
        f"head = {model + head['written'] if head['path'] else '...'}",
        "logits_of = head.forward",
        "head.forward = lambda x: x if head.training else logits_of(x)",
    ]
    owner = model + head["owner"]
    if head["loss"]:  # that of Transformers, for labels that are not shifted yet (4.57)
        lines += [
            f"whole = {owner}.loss_function",
            "def in_parts(logits, labels, num_items_in_batch=None, **_):  # x is given to the head",
            "    target = F.pad(labels, (0, 1), value=-100)[..., 1:]",
            "    n = (target != -100).sum() if num_items_in_batch is None else num_items_in_batch",
            f"    return {loss} / n",
            "choice = lambda *a, **k: (in_parts if head.training else whole)(*a, **k)",
            f"{owner}.loss_function = choice",
        ]
    else:
        lines.append(f"loss = {loss}{n_rows}  # x is what the model returns")
    return Treatment(
        "chunked-loss",
        f"loss over {head['path'] or 'the last layer'} in {N_CHUNKS} parts",
        Numerics.EXACT,
        _share(head["n_flops"], traits),
        lines,
        specs=[f"chunked-loss:{N_CHUNKS}:{head['path']}"],
        place=Place.BEFORE_OPTIMIZER if head["loss"] else Place.OPEN,
    )


def _why_not_in_chunks(traits: Traits) -> str:
    """Return why there are no lines for a loss in parts, or "" if there are."""
    if not traits["head"]:
        return "no linear layer followed by cross_entropy of its rows"
    loss = traits["head"]["loss"]
    return f"{PurePath(loss).name} of a library computes it" if loss not in _REPLACED else ""


def held_on_host(line: Location) -> Treatment:
    """Return the treatment that keeps a line's tensors on the host, and moves them when used."""
    place = f"{line.basename}:{line.line}"
    return _simple(
        "held-on-host",
        f"keep on the host what {place} creates",
        Numerics.EXACT,
        f'... .to("cpu")  # what {place} makes, or device="cpu" there',
        '... .to("cuda")  # what is taken out of it, where that is used',
        extra_compute=None,
        specs=[f"held-on-host:{line.filename}:{line.line}"],
    )


def of_fewer_pairs(pairs: Pairs, line: Location | None) -> Treatment:
    """Return the correction of shapes with which each of N numbers meets only one other."""
    n = format_count(pairs.n)
    where = "" if line is None else f" at {line.basename}:{line.line}"
    return _simple(
        "all-pairs",
        f"correct the shapes, or work in parts: {n} x {n} numbers{where}",
        Numerics.DIFFERENT,
        "print(a.shape, b.shape)  # (N, 1) with (N) makes N x N numbers",
        "a.squeeze(-1)  # or b[:, None]: makes N",
        "a.split(1024)  # if all pairs are meant: some rows at a time",
        specs=(),
    )


def batch_size(traits: Traits) -> int:
    """Return the training batch size, of the arguments, loaders or a number; 0 if there is none."""
    number, sizes = traits.get("number") if traits["trains"] else None, traits["batches"].values()
    return traits.get("batch") or max(sizes, default=number.size if number else 0)


def evaluated_size(traits: Traits) -> int:
    """Return the size of batches that nothing is trained on, of loaders or a number; or 0."""
    number = None if traits["trains"] else traits.get("number")
    return max(traits["evaluated"].values(), default=number.size if number else 0)


def evaluated_in(traits: Traits, n: int) -> Treatment:
    """Return an n-th of the batches that nothing is trained on."""
    micro = max(evaluated_size(traits) // n, 1)
    lines = [f"DataLoader(..., batch_size={micro})  # of what is not trained on"]
    spec = f"evaluation-batch:{n}:{','.join(traits['evaluated'])}"
    if (number := traits.get("number")) and not traits["evaluated"]:
        lines, spec = number.lines(n), number.spec(n)
    return _simple(
        "evaluation-batch",
        f"batches of {micro} where nothing is trained",
        Numerics.EXACT,
        *lines,
        instead=words_of(traits["framework"], Change.EVALUATION_BATCH),
        specs=[spec],
    )


def _split_numerics(traits: Traits) -> Numerics:
    """Return whether parts of a batch give its gradients: if each row is computed independently.

    If models are trained in turn, each would be trained on what the others were before.
    """
    is_exact = traits.get("mixing") == "" and not traits["alternates"]
    return Numerics.EXACT if is_exact else Numerics.DIFFERENT


def accumulated(traits: Traits, n: int) -> Treatment:
    """Return n micro-batches per step, of a batch size in the arguments or in loaders."""
    micro = max(batch_size(traits) // n, 1)
    words = words_of(traits["framework"], Change.ACCUMULATE)
    # Where a framework accumulates already, each of its batches becomes n.
    n_each = n * max(traits["n_passes"], 1) if traits["framework"] else n
    is_sum = traits.get("is_sum", False)
    number = traits.get("number")
    # A loop of two updates shows what many take; of a single one, there is only that.
    again = ":again" if 0 < traits.get("n_rounds", 0) < LONG_ENOUGH * n else ""
    loop = [f"for i, batch in enumerate(loader):  # batches of {micro}"]
    if number:
        loop = [*number.lines(n), f"for i in range(...):  # {n} rounds an update"]
    if is_sum and traits["framework"] in _DIVIDING:
        words += f", and the loss times {n}, by which it is divided"
    loss, optimizer = "loss" if is_sum else f"(loss / {n})", _optimizer(traits)
    update = [f"{optimizer}.step()"]
    if traits["scales"]:
        loss = f"scaler.scale({loss.strip('()')})"
        update = [f"scaler.step({optimizer})", "scaler.update()"]
    besides = {"clips": "clip gradients", "schedules": "step the schedule"}
    also = " and ".join(text for name, text in besides.items() if traits[name])
    return Treatment(
        "accumulate",
        f"batch {micro} x {n_each} accumulated",
        _split_numerics(traits),
        0.0,
        [
            *loop,
            "    ...",
            f"    {loss}.backward(){'  # a sum over rows' if is_sum else ''}",
            f"    if (i + 1) % {n} == 0:{also and f'  # {also} here, too'}",
            *(f"        {line}" for line in (*update, f"{optimizer}.zero_grad()")),
        ],
        words.format(batch=micro, n=n_each),
        [
            f"accumulate:{n}:{'' if traits.get('batch') else ','.join(traits['batches'])}{again}",
            *([number.spec(n)] if number else []),
        ],
        batch_divisor=n,
    )


def sharded(traits: Traits, n: int, *, stays_whole: bool = False) -> Treatment:
    """Return fully sharded data parallelism over n GPUs, each with its part of the batch.

    Parameters that stay whole until the backward pass are gathered once, as in ZeRO 2.
    """
    model, size = _model(traits), batch_size(traits)
    lines = [
        f"# torchrun --nproc-per-node {n} ...",
        "import torch.distributed as dist",
        "from torch.distributed.fsdp import fully_shard",
        'dist.init_process_group("nccl")  # before anything is on a GPU',
        "torch.cuda.set_device(dist.get_node_local_rank())",
        "# before the optimizer is made:",
    ]
    units = [f"{model}{written}" for written in traits["units"].values()]
    how = ", reshard_after_forward=False" if stays_whole else ""
    if units:
        lines += [f"for part in {_together(units)}:", f"    fully_shard(part{how})"]
    lines.append(f"fully_shard({model}{how})")
    number = traits.get("number")
    if size:
        whose = "" if number else " of a DistributedSampler"
        lines.append(f"# batches of {size // n}{whose} on each GPU")
    return Treatment(
        "fully-shard",
        f"FSDP over {n} GPUs{', parameters gathered once a step' if stays_whole else ''}"
        f"{'' if size else ', the whole batch on each'}",
        _split_numerics(traits) if size else Numerics.DIFFERENT,
        lines=lines,
        specs=[
            f"fully-shard:{n}{':whole' if stays_whole else ''}",
            *([number.spec(n)] if number else []),
        ],
        n_gpus=n,
        batch_divisor=n,
    )


def why_not_sharded(traits: Traits) -> str:
    """Return why a model cannot be sharded from outside, "" if it can."""
    if traits["is_distributed"]:
        return "the program already has several ranks"
    if traits["framework"]:
        return _as_framework_has_it(traits, Change.FSDP)
    return "" if traits["optimizers"] else "there is no optimizer"


def _as_framework_has_it(traits: Traits, change: Change) -> str:
    """Return why a change over GPUs is not made from outside, and the framework's lines for it."""
    words = words_of(traits["framework"], change).replace("{n}", "N")
    return f"the framework starts the ranks: {words}; rehearse that with --world-size N"


def simple(traits: Traits) -> Iterator[Treatment]:  # noqa: C901 - one case per treatment
    """Yield the treatments of this program that have no strength to choose, the cheapest first.

    Those that leave results and work unchanged come first, then those that change when something is
    computed or kept, then those that change results.
    """
    model, optimizer, exact = _model(traits), _optimizer(traits), Numerics.EXACT
    words = partial(words_of, traits["framework"])
    conf = traits.get("conf", "")
    both = f"{conf},{_EXPANDABLE}" if conf else _EXPANDABLE
    is_one = traits["n_optimizers"] == 1  # of several, each has a place
    inside, after = (Place.OPTIMIZER, Place.AFTER_OPTIMIZER) if is_one else (Place.OPEN, Place.OPEN)
    unfused = set() if traits["is_fused"] else {*traits["optimizers"]}

    if traits["zeroes"]:
        title = "free gradients instead of zeroing them"
        yield _simple("set-to-none", title, exact, f"{optimizer}.zero_grad(set_to_none=True)")
    if names := traits["frozen"]:
        title = f"no gradients for {listed(names)}, which no optimizer updates"
        lines = [f"{one}.requires_grad_(False)" for one in names]
        yield _simple("frozen", title, exact, *lines, place=after)
    if lines := traits["graphs_unused"]:
        where = ", ".join(PurePath(one).name for one in lines[:LONG_RUN])
        line = f"with torch.no_grad():  # around the calls in {where}; no backward pass follows"
        spec = f"no-grad:{','.join(map(quote, lines))}"
        yield _simple("no-grad", "evaluate without a graph", exact, line, specs=[spec])
    if _EXPANDABLE not in conf:
        line = f"export PYTORCH_CUDA_ALLOC_CONF={both}"
        title = "expandable segments"
        # What the program may have is given already, and what it needs is asked without a limit.
        conf = _OWN_LIMIT.sub("", both)
        yield _simple("expandable-segments", title, exact, line, specs=(), conf=conf)
    if traits["is_eager"]:
        yield _simple(
            "sdpa", "attention by fused kernels", exact,
            f'{model}.set_attn_implementation("sdpa")', place=Place.BEFORE_OPTIMIZER,
            instead='from_pretrained(..., attn_implementation="sdpa")',
        )  # fmt: skip
    for name in sorted(unfused & {*HAVE_FUSED})[:1]:
        title, line = f"fused {name}", f"torch.optim.{name}(..., fused=True)"
        yield _simple("fused", title, exact, line, instead=words(Change.FUSED), place=inside)
    if not _why_not_in_backward(traits):
        title = "update each parameter in the backward pass"
        lines = [*_written("step_in_backward"), f"step_in_backward({optimizer})"]
        yield _simple("step-in-backward", title, exact, *lines, place=after)
    if not _why_not_in_chunks(traits):
        yield _loss_in_chunks(traits)
    if traits["has_state"]:
        yield _simple(
            "state-on-host", "state of the optimizer on the host between updates", exact,
            *_written("state_on_host"), f"state_on_host({optimizer})",
            extra_compute=None, place=after,
        )  # fmt: skip
    if traits["trains"]:
        title = "keep what is saved for the backward pass on the host"
        line = "with torch.autograd.graph.save_on_cpu(pin_memory=True):  # forward and loss"
        yield _simple("save-on-cpu", title, exact, line, extra_compute=None)
    yield from _inexact(traits)


def _inexact(traits: Traits) -> Iterator[Treatment]:
    """Yield those that change results: lower precisions, then other optimizers."""
    model = _model(traits)
    if traits["trains"] and not traits["autocasts"]:
        yield _simple(
            "autocast", "autocast to bfloat16", Numerics.ROUNDING,
            'with torch.autocast("cuda", torch.bfloat16):  # forward and loss, and evaluations',
            instead=words_of(traits["framework"], Change.BF16),
        )  # fmt: skip
    if traits["has_float32"] and not traits["scales"]:  # scaled gradients have to be in float32
        yield _simple(
            "bf16-parameters", "parameters in bfloat16", Numerics.ROUNDING,
            f"{model}.to(torch.bfloat16)  # before it is on the GPU",
            f"{model}(x.bfloat16()).float()  # numbers that it is given, and what it returns",
            instead=words_of(traits["framework"], Change.BF16_PARAMETERS),
        )  # fmt: skip
    for name in sorted({*traits["optimizers"]} & _ADAM):
        line = f"bitsandbytes.optim.{name}8bit(...)"
        instead = words_of(traits["framework"], Change.STATE_8BIT)
        yield _simple("adamw-8bit", f"8-bit {name}", Numerics.DIFFERENT, line, instead=instead)
        title = f"Adafactor instead of {name}"
        yield _simple("adafactor", title, Numerics.DIFFERENT, "torch.optim.Adafactor(...)")


def _simple(code: str, title: str, numerics: Numerics, *lines: str, **more: Any) -> Treatment:
    """Return a treatment that the engine knows by its code alone."""
    return Treatment(code, title, numerics, lines=list(lines), **{"specs": [code], **more})


def _why_not_in_backward(traits: Traits) -> str:
    """Return why updates in the backward pass would change results, "" if they would not."""
    reasons = {
        "there is no optimizer": not traits["n_optimizers"],
        "there are several optimizers": traits["n_optimizers"] > 1,
        "gradients are accumulated": traits["n_passes"] > 1,
        "all gradients are clipped together": traits["clips"],
        "the loss is scaled": traits["scales"],
        "the learning rate is scheduled": traits["schedules"],
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def left_out(traits: Traits) -> Iterator[LeftOut]:
    """Yield the treatments that do not apply here, and why."""
    sizes = batch_size(traits) or evaluated_size(traits)
    is_in_use = "the program already uses it"
    no_module = "the model calls no module that calls others"
    has_modules = any(part["calls"] for part in traits["parts"])
    checkpoint = "" if has_modules else no_module
    reasons = {
        "checkpoint": "the program already checkpoints" if traits["checkpoints"] else checkpoint,
        "accumulate": "" if sizes else _NO_BATCH,
        "step-in-backward": _why_not_in_backward(traits),
        "chunked-loss": _why_not_in_chunks(traits),
        "autocast": is_in_use if traits["autocasts"] else "",
        "expandable-segments": is_in_use if _EXPANDABLE in traits.get("conf", "") else "",
        "fully-shard": why_not_sharded(traits),
    }
    if traits["framework"] and not traits["is_distributed"]:
        reasons["zero"] = _as_framework_has_it(traits, Change.ZERO)
        reasons["tensor-parallel"] = _as_framework_has_it(traits, Change.TENSOR_PARALLEL)
    yield from (LeftOut(code, reason) for code, reason in reasons.items() if reason)
