"""Reports of ``fragdoctor check``: the table of formats."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, cast

from fragdoctor.report.base import module_of

if TYPE_CHECKING:
    from fragdoctor.gate.judgement import CheckReport
    from fragdoctor.report.base import RenderOptions


class CheckRenderer(Protocol):
    """One output format: the judgement of all files in, the whole report out."""

    def __call__(self, report: CheckReport, options: RenderOptions) -> str:
        """Return the report, ending in a newline."""
        ...


CHECK_FORMATS: Final = MappingProxyType(
    {
        "text": "fragdoctor.report.check.text",
        "json": "fragdoctor.report.check.json",
        "markdown": "fragdoctor.report.check.markdown",
        "github": "fragdoctor.report.github",
        "sarif": "fragdoctor.report.sarif",
        "junit": "fragdoctor.report.junit",
    }
)


def check_renderer(name: str) -> CheckRenderer:
    """Return the renderer of a format.

    Raises:
        ConfigError: there is no such format.
    """
    return cast("CheckRenderer", module_of(CHECK_FORMATS, name, "report").render_check)
