"""What ``fragdoctor estimate`` says about the configuration files among its inputs."""

from __future__ import annotations

from typing import Final

from fragdoctor.model.recipe import Bearing, Recipe, RecipeUse, UsedEntry
from fragdoctor.report import document as doc
from fragdoctor.report.document import dim, strong
from fragdoctor.units import plural

_MOST_NAMED: Final = 4


def recipe_lead(use: RecipeUse | None) -> list[doc.DocumentBlock]:
    """Return what even a reader of just the answer must know: parts of the files that it omits."""
    if use is None:
        return []
    said = map(_counted, use.files) if use.files else [f"Read as: {use.command}."]
    return [doc.Paragraph(" ".join([*said, *use.notes]))]


def _counted(recipe: Recipe) -> str:
    n_used = sum(not entry.is_default for entry in recipe.used)
    said = f"From {recipe.source} ({recipe.format}): {plural(n_used, 'entry', 'entries')} used"
    left = [entry.key for entry in recipe.unused_that(Bearing.MATTERS)]
    if not left:
        return f"{said}."
    named = ", ".join(left[:_MOST_NAMED])
    more = ", ..." if len(left) > _MOST_NAMED else ""
    return f"{said}; not counted, though memory depends on it: {named}{more}."


def recipe_sections(use: RecipeUse | None) -> list[doc.Section]:
    """Return a section for each file: what its entries became, and which ones were not used."""
    if use is None or not use.files:
        return []
    sections = [_section(i, recipe) for i, recipe in enumerate(use.files)]
    same = [doc.Paragraph(use.command)]
    return [*sections, doc.Section("The same by options", same, id="command")]


def _section(number: int, recipe: Recipe) -> doc.Section:
    used = doc.tabled(
        recipe.used,
        doc.Column("entry", "key", "wrap"),
        doc.Column("value", _value, "wrap"),
        doc.Column("counted as", _became, "wrap"),
    )
    open_ = [*recipe.unused_that(Bearing.MATTERS), *recipe.unused_that(Bearing.UNKNOWN)]
    left = doc.tabled(
        open_,
        doc.Column("not counted", "key", "wrap"),
        doc.Column("value", "value", "wrap"),
        doc.Column("why", lambda entry: entry.reason or "is not known here", "wrap"),
    )
    rest = ", ".join(entry.key for entry in recipe.unused_that(Bearing.NONE))
    idle = doc.Paragraph(dim(f"Not used: {rest}." if rest else ""))
    return doc.Section(
        f"Read from {recipe.source}", [used, left, idle], recipe.format, f"recipe-{number}"
    )


def _value(entry: UsedEntry) -> doc.Content:
    return [entry.value, dim("  not in the file")] if entry.is_default else entry.value


def _became(entry: UsedEntry) -> doc.Content:
    if not entry.overridden_by:
        return entry.option
    won = strong(f"{entry.overridden_by} of the command line")
    return [f"{entry.option}, ", won] if entry.option else won
