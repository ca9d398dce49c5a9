"""How every JSON document writes a source line."""

from __future__ import annotations

from typing import Any

from fragdoctor.model.finding import Location


def location_document(location: Location | None) -> dict[str, Any] | None:
    """Return a source line as it stands in JSON; the strings are escaped with the document."""
    if location is None:
        return None
    return {
        "filename": location.filename,
        "line": location.line,
        "function": location.function,
    }
