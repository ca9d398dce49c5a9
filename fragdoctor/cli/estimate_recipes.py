"""Configuration files among the inputs of ``fragdoctor estimate``.

Their contents become options of the command, unless the command line gives those options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fragdoctor.cli.estimate_options import (
    EstimateOptions,
    flag_of,
    route_of,
    used,
    used_by_formulas,
)
from fragdoctor.errors import ConfigError, InputError

if TYPE_CHECKING:
    from fragdoctor.model.recipe import RecipeUse

SUFFIXES: Final = (".yaml", ".yml", ".toml", ".json", ".sh", ".bash", ".slurm", ".sbatch")
_DEFAULTS: Final[Mapping[str, Any]] = {
    field.name: field.default for field in fields(EstimateOptions)
}
_NO_QUESTION: Final = ("output", "force", "quiet", "no_color", "output_format", "explain", "args")


def with_recipes(
    chosen: EstimateOptions, given: frozenset[str]
) -> tuple[EstimateOptions, RecipeUse | None]:
    """Return the options completed from files, and what was used of the files (None without any).

    Args:
        chosen: the command's options, whose inputs may include files.
        given: the options on the command line, which take precedence.

    Raises:
        ConfigError: files describe two runs or no model, or hold a value that no option can take.
        InputError: a file cannot be read, or its tool cannot be recognized.
    """
    inputs = chosen.inputs or []
    if len(" ".join(inputs).split()) > 1 and not chosen.args:
        from fragdoctor.estimation.words import is_question

        if is_question(inputs):
            return _with_words(chosen, given, " ".join(inputs))
    # Cheap, before anything is loaded.
    may_be_recipe = any(n.lower().endswith(SUFFIXES) and Path(n).is_file() for n in inputs)
    if not (chosen.args or may_be_recipe):
        return chosen, None
    from fragdoctor.estimation.recipes.question import question_of
    from fragdoctor.estimation.recipes.resolve import resolve, use_of

    readings, given_models = question_of(inputs, chosen.args or "")
    if not readings:
        return chosen, None
    if chosen.rehearse or chosen.model:
        raise ConfigError(
            "Configuration files are estimated by formulas, not rehearsed.",
            hint="Leave --rehearse and --model out, or rehearse the program: fragdoctor rehearse.",
        )
    on_line = {
        name: getattr(chosen, name)
        for name in _DEFAULTS
        if name in given and name not in (*_NO_QUESTION, "inputs")
    }
    if given_models:
        on_line = {"inputs": list(given_models), **on_line}
    is_inference = chosen.inference or any(r.value("inference") for r in readings)
    values, files, notes = resolve(readings, on_line, used_by_formulas(inference=is_inference))
    named = values.pop("model", None)
    models = list(given_models) or ([named] if named else [])
    if not models and not given & {"params", "layers"}:
        raise ConfigError(
            f"{readings[0].source} does not name a known model.",
            hint=f"Add one: fragdoctor estimate {readings[0].source} llama-3.1-8b",
        )
    if named and not given_models:
        _check_model(named, readings[0].source)
    shown = {name: value for name, value in on_line.items() if name != "inputs"}
    use = use_of(files, notes, models, _told(values) | shown)
    return replace(chosen, inputs=models or None, **values), use


def _told(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are part of the question and differ from their defaults."""
    asked = {n: value for n, value in values.items() if n not in (*_NO_QUESTION, "inputs")}
    return {name: value for name, value in asked.items() if value != _DEFAULTS[name]}


def _with_words(
    chosen: EstimateOptions, given: frozenset[str], text: str
) -> tuple[EstimateOptions, RecipeUse]:
    """Return the options completed from a question in words.

    Raises:
        InputError: the question does not name a known model.
    """
    from fragdoctor.estimation.recipes.resolve import use_of
    from fragdoctor.estimation.words import read_question

    asked = read_question(text)
    read = {name: value for name, value in asked.options.items() if name not in given}
    models = [asked.model] if asked.model else []
    meant = replace(chosen, inputs=models or None, **read)
    idle = read.keys() - used(route_of(meant), inference=meant.inference)
    meant = replace(meant, **{name: _DEFAULTS[name] for name in idle})
    left = [f"{flag_of(name)} cannot be combined with the rest." for name in sorted(idle)]
    told = _told({name: getattr(meant, name) for name in _DEFAULTS})
    return meant, use_of((), (*asked.notes, *left), models, told)


def _check_model(named: str, source: str) -> None:
    """Refuse an unknown model in a recipe, and say what to do about it.

    Raises:
        InputError: as without a recipe, adding that another model can be named.
    """
    from fragdoctor.estimation.model_shapes import model_of

    try:
        model_of([named])
    except InputError as e:
        beside = f"fragdoctor estimate {source} config.json"
        e.hint = f"{e.hint} Give its configuration, or a similar model, with the recipe: {beside}"
        raise
