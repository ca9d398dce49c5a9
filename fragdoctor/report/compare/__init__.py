"""Reports of ``fragdoctor compare``: the table of formats."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, cast

from fragdoctor.report.base import module_of

if TYPE_CHECKING:
    from fragdoctor.gate.judgement import Growth
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
    return cast("CompareRenderer", module_of(COMPARE_FORMATS, name, "report").render_comparison)
