"""Reports of ``fragdoctor compare``: the table of formats."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, cast

from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.gate.growth import Growth
    from fragdoctor.model.comparison import Comparison
    from fragdoctor.report.base import RenderOptions


class CompareRenderer(Protocol):
    """One output format: the comparison in, the whole report out."""

    def __call__(
        self, comparison: Comparison, judged: Sequence[Growth], options: RenderOptions
    ) -> str:
        """Return the report, ending in a newline; ``judged`` is empty without a gate."""
        ...


COMPARE_FORMATS: Final = MappingProxyType(
    {
        "text": "fragdoctor.report.compare.text",
        "json": "fragdoctor.report.compare.json",
        "markdown": "fragdoctor.report.compare.markdown",
        "html": "fragdoctor.report.compare.html",
    }
)


def compare_renderer(name: str) -> CompareRenderer:
    """Return the renderer of a format.

    Raises:
        ConfigError: there is no such format.
    """
    module = COMPARE_FORMATS.get(name)
    if module is None:
        near = difflib.get_close_matches(name, COMPARE_FORMATS, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"There is no report format {name!r}.",
            hint=f"{hint}The formats are {', '.join(COMPARE_FORMATS)}.",
        )
    return cast("CompareRenderer", importlib.import_module(module).render_comparison)
