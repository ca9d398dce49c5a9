"""Combines what all files of a question say into options of an estimate.

* Precision: DeepSpeed keeps 16-bit weights, and fp32 copies next to the optimizer's states
  (https://www.deepspeed.ai/docs/config-json/). FSDP computes in 16 bits on fp32 shards; Accelerate
  casts trained parameters up for that (``Accelerator.prepare_model``). Autocast leaves weights as
  loaded: fp32 weights get 16-bit copies (``amp-bf16``), 16-bit weights get none.
* Adapters are fp32 next to a frozen base, which stays as it was loaded or quantized.
* The GPUs that share states are those of the run, divided by the degrees that split the model.
"""

from __future__ import annotations

import shlex
import stat
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from fragdoctor.errors import ConfigError, FragdoctorError
from fragdoctor.estimation.model_shapes import FoundModel, is_model_name, model_of, preset_of
from fragdoctor.estimation.recipes.entries import DECISIVE, Fact, Reading
from fragdoctor.estimation.recipes.values import AUTO, shown
from fragdoctor.estimation.request import OFFLOADABLE
from fragdoctor.model.recipe import Bearing, Recipe, RecipeUse, UnusedEntry, UsedEntry

_DIRECT: Final = (
    "model", "optimizer", "batch", "seq", "attention", "checkpointing", "dora", "grad_accumulation",
    "tensor_parallel", "sequence_parallel", "context_parallel", "pipeline_parallel",
    "expert_parallel", "inference", "new_tokens", "kv_dtype", "gpu_memory_utilization",
    "max_num_seqs", "max_num_batched_tokens", "dtype", "logits", "expandable_segments",
)  # fmt: skip
_PLAIN: Final = ("fp32", "bf16", "fp16")
_DEGREES: Final = ("tensor_parallel", "pipeline_parallel")


class _Run(Struct):
    """All facts, and the command line parameters that they become.

    The first reading that states a fact wins, and launch files come last. ``origins`` holds the
    facts that a parameter follows from.
    """

    readings: Sequence[Reading]
    given: Mapping[str, Any]
    facts: dict[str, Fact] = field(default_factory=dict)
    sources: dict[str, Reading] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, Sequence[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def value(self, fact: str) -> Any:
        return self.facts[fact].value if fact in self.facts else None

    def set(self, parameter: str, value: Any, *facts: str) -> None:
        self.settings[parameter], self.origins[parameter] = value, facts


def resolve(
    readings: Sequence[Reading], given: Mapping[str, Any], usable: AbstractSet[str]
) -> tuple[dict[str, Any], Sequence[Recipe], Sequence[str]]:
    """Return the options that files become, what became of each entry, and what is left open.

    Args:
        readings: what each file says.
        given: parameters from the command line and their values; they override the files.
        usable: parameters that this kind of estimate uses; others are listed as not used.

    Raises:
        ConfigError: two files describe two runs, or no option can state a decisive value.
    """
    run = _Run(_in_order(readings), given)
    _collect(run)
    _refuse_unsayable(run)
    _name_model(run)
    for name in _DIRECT:
        if name in run.facts:
            run.set(name, run.value(name), name)
    model = _model(run)
    if run.value("adapter") != "lora":
        run.settings.pop("dora", None)
    else:
        run.set("lora", run.value("rank") or 8, "rank", "adapter")
        if "targets" in run.facts:
            run.set("lora_targets", run.value("targets"), "targets")
    _of_model(run, model)
    n_sharing = _sharing(run)
    if parts := _away(run):
        run.set("offload", ",".join(parts), *(f"offload_{part}" for part in parts))
    _precision(run, n_sharing, model.dtype if model else "")
    kept = {
        name: value
        for name, value in run.settings.items()
        if name == "model" or (name not in given and name in usable)
    }
    files = tuple(_report(run, reading, kept) for reading in readings)
    notes = [*run.notes, *(note for reading in readings for note in reading.notes)]
    return kept, files, tuple(dict.fromkeys(notes))


def _in_order(readings: Sequence[Reading]) -> Sequence[Reading]:
    runs = [reading for reading in readings if not reading.format.is_launch]
    if len(runs) > 1:
        raise ConfigError(
            f"{runs[0].source} and {runs[1].source} describe two runs.",
            hint="Give one of them, plus any files of Accelerate or DeepSpeed.",
        )
    return [*runs, *(reading for reading in readings if reading.format.is_launch)]


def _collect(run: _Run) -> None:
    """Take each fact from the first file that states it, else from the first default."""
    for wants_default in (False, True):
        for reading in run.readings:
            for name, fact in reading.facts.items():
                if fact.is_default is wants_default and name not in run.facts:
                    run.facts[name], run.sources[name] = fact, reading


def _refuse_unsayable(run: _Run) -> None:
    for reading in run.readings:
        for name, (fact, reason) in reading.unsayable.items():
            option, nearest = DECISIVE[name]
            if option not in run.given:
                said = f"{reading.source}: {fact.key} {fact.text!r} {reason}."
                raise ConfigError(said, hint=f"Give what comes closest: {nearest}")
            reading.leave(fact.key, fact.text, reason)


def _sharing(run: _Run) -> int:
    """Set how states are shared, and return the number of GPUs that do, or 1 if it is unknown."""
    engine, stage = run.value("engine"), run.value("stage")
    if stage is None:
        stage = 3 if engine == "fsdp" else 0
    n_nodes, replicas = run.value("n_nodes") or 1, run.value("replicas") or 1
    n = run.given.get("world_size") or run.value("shard_degree")
    if not n:
        total = run.value("n_gpus") or (run.value("gpus_per_node") or 0) * n_nodes
        splits = replicas if stage else 1
        for name in (*_DEGREES, *(() if engine == "fsdp" else ("context_parallel",))):
            splits *= run.given.get(name) or run.value(name) or 1
        n = total // splits if total else 0 if stage else replicas
        if run.value("hybrid"):
            n //= n_nodes
        if stage and not (n or total):
            run.notes.append(
                f"{run.sources.get('engine', run.readings[0]).source}: GPUs share states, but no "
                "file says how many do. One GPU is counted; --world-size N sets it."
            )
    if n > 1:
        of = ("n_gpus", "gpus_per_node", "n_nodes", "shard_degree", "replicas")
        run.set("world_size", n, *of)
    if stage and (n > 1 or _away(run)) and not run.given.keys() & {"zero", "fsdp"}:
        if engine == "fsdp" and stage == 3:
            run.set("fsdp", True, "engine", "stage")
            if run.value("fsdp_kind") and run.value("adapter"):
                run.set("fsdp_kind", run.value("fsdp_kind"), "fsdp_kind")
        else:
            run.set("zero", stage, "engine", "stage")
    return max(1, int(n))


def _away(run: _Run) -> list[str]:
    return [kind for kind in OFFLOADABLE if run.value(f"offload_{kind}")]


def _name_model(run: _Run) -> None:
    """Use the name of a folder as the model if the folder itself is not on this machine."""
    found = run.facts.get("model")
    if found is None or is_model_name(found.value) or not is_model_place(found.value):
        return
    last = str(found.value).rstrip("/").rpartition("/")[2]
    if not Path(found.value).exists() and preset_of(last):
        run.facts["model"] = replace(found, value=last)


def is_model_place(text: str) -> bool:
    """Return whether a recipe's model is a name, a folder or an ordinary file."""
    try:
        mode = Path(text).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):  # a name that no file can have
        return False
    return stat.S_ISDIR(mode) or stat.S_ISREG(mode)


def _model(run: _Run) -> FoundModel | None:
    """Return the model, or None if it is not known yet."""
    named = run.value("model")
    inputs = run.given.get("inputs") or ([named] if named else None)
    if inputs is None:
        return None
    if not is_model_place(named or ""):
        raise ConfigError(
            f"{shown(named)!r} is neither the name nor the folder of a model.",
            hint="Name one on the command line.",
        )
    try:
        return model_of(inputs)
    except FragdoctorError:
        return None  # the estimate will say why


def _of_model(run: _Run, model: FoundModel | None) -> None:
    """Set what depends on the model: its longest sequence, and whether it has experts."""
    if run.value("seq") == AUTO:
        del run.settings["seq"]
        longest = model.shape.max_positions if model else 0
        if longest:
            run.set("seq", longest, "seq")
        else:
            run.notes.append(
                "Sequences may get as long as the model allows, which is not known; set --seq N."
            )
    if "expert_parallel" in run.settings and model and not model.shape.n_experts:
        del run.settings["expert_parallel"]


def _precision(run: _Run, n_sharing: int, stored: str) -> None:
    """Set the one precision that stands for loaded weights, mixed precision and engine together.

    A base that the checkpoint stores quantized stays quantized with adapters and in a server.
    """
    has_adapter = "lora" in run.given or "lora" in run.settings
    keeps = (has_adapter or run.value("inference")) and not run.value("dequantised")
    if run.value("quantised"):
        run.set("dtype", run.value("quantised"), "quantised")
    elif keeps and stored not in ("", *_PLAIN):
        run.settings.pop("dtype", None)
    elif "dtype" not in run.settings and run.facts.keys() & {"weights", "mixed"}:
        weights = run.value("weights")
        if weights == AUTO:
            weights = stored if stored in _PLAIN else "bf16"
            if weights != stored:
                run.notes.append(
                    "Weights are loaded in the dtype of their checkpoint, which is not known here; "
                    "bf16 is counted, and --dtype changes that."
                )
        found = _mixed(run, weights or "fp32", n_sharing, has_adapter=has_adapter)
        run.set("dtype", found, "weights", "mixed", "engine", "dequantised")


def _mixed(run: _Run, weights: str, n_sharing: int, *, has_adapter: bool) -> str:
    """Return the precision of weights that are not quantized: trained, or a frozen base."""
    mixed, engine = run.value("mixed"), run.value("engine")
    is_wide = weights == "fp32"
    if not mixed or (has_adapter and not is_wide):
        return weights
    if engine == "deepspeed":
        return str(mixed) if has_adapter else f"deepspeed-{mixed}"
    if has_adapter or engine != "fsdp":
        return f"amp-{mixed}" if is_wide else weights
    if n_sharing > 1 and run.value("stage") in (None, 3):
        return "fsdp-bf16"  # fp16 has the same sizes
    return f"amp-{mixed}"


def _report(run: _Run, reading: Reading, kept: Mapping[str, Any]) -> Recipe:
    """Return what became of each entry of a file; of several reasons for one, the gravest stays."""
    used, unused = [], list(reading.unused)

    for name, fact in reading.facts.items():
        counted, source = run.facts[name], run.sources[name]
        parameters = [p for p in run.settings if name in run.origins[p]]
        option = ", ".join(_option(p, kept[p]) for p in parameters if p in kept)
        winners = [p for p in parameters if p in run.given]
        if name == "model" and "inputs" in run.given:
            option, winners = "", ["inputs"]
        if source is reading and (option or winners):
            won = ", ".join(_option(p, run.given[p]) for p in winners)
            used.append(UsedEntry(fact.key, fact.text, option, fact.is_default, won))
        elif fact.value == counted.value and not fact.is_default:
            unused.append(UnusedEntry(fact.key, fact.text, Bearing.NONE))
        elif not fact.is_default:
            reason = f"{counted.key} of {source.source} was used"
            unused.append(UnusedEntry(fact.key, fact.text, Bearing.MATTERS, reason))
    named = {key for entry in used for key in entry.key.split(" + ")}
    named |= {entry.key for entry in unused if entry.bearing is not Bearing.NONE}
    left = {
        (entry.key, entry.bearing): entry
        for entry in unused
        if entry.bearing is not Bearing.NONE or entry.key not in named
    }
    return Recipe(reading.source, reading.format.title, tuple(used), tuple(left.values()))


def _option(parameter: str, value: Any) -> str:
    if parameter == "model":
        return "the model"
    if parameter == "inputs":
        return " ".join(map(shlex.quote, value))
    flag = f"--{parameter.replace('_', '-')}"
    if value is True:
        return flag
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{flag} {shlex.quote(text)}"


def use_of(
    files: Sequence[Recipe], notes: Sequence[str], model: Sequence[str], options: Mapping[str, Any]
) -> RecipeUse:
    """Return what the report says about files or words, and the same question as plain options.

    Args:
        files: what the files became; empty for a question in words.
        notes: what they leave open.
        model: the inputs that describe the model.
        options: parameters that differ from their defaults, and their values, in order.
    """
    words = ["fragdoctor estimate", *map(shlex.quote, model)]
    for name, value in options.items():
        if isinstance(value, list | tuple):
            words += [_option(name, one) for one in value]
        elif value is not False and value is not None:
            words.append(_option(name, value))
    return RecipeUse(tuple(files), " ".join(words), tuple(notes))
