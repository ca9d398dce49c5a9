"""Reports of many ranks: the table of formats."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol, cast

from fragdoctor.errors import ConfigError

if TYPE_CHECKING:
    from fragdoctor.model.fleet import FleetReport
    from fragdoctor.report.base import RenderOptions


class FleetRenderer(Protocol):
    """One output format: the report of a job in, the whole text out."""

    def __call__(self, report: FleetReport, options: RenderOptions) -> str:
        """Return the report, ending in a newline."""
        ...


FLEET_FORMATS: Final = MappingProxyType(
    {
        "text": "fragdoctor.report.fleet.text",
        "json": "fragdoctor.report.fleet.json",
        "markdown": "fragdoctor.report.fleet.markdown",
        "html": "fragdoctor.report.fleet.html",
    }
)


def fleet_renderer(name: str) -> FleetRenderer:
    """Return the renderer of a format.

    Raises:
        ConfigError: many ranks have no report in that format.
    """
    module = FLEET_FORMATS.get(name)
    if module is None:
        raise ConfigError(
            f"There is no {name} report of several ranks.",
            hint=f"The formats are {', '.join(FLEET_FORMATS)}; "
            f"for one file after the other, run: fragdoctor check --format {name}",
        )
    return cast("FleetRenderer", importlib.import_module(module).render_fleet)
