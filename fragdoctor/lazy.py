"""Regular expressions that are compiled when they are first used.

Most are for texts: a recording needs few of them, and to compile them all would delay its report
by a hundredth of a second.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    regex = re.compile
else:

    class regex:  # noqa: N801 - called like re.compile()
        """Has the methods and attributes of ``re.Pattern``."""

        def __init__(self, *given: Any) -> None:
            self._given = given

        def __getattr__(self, name: str) -> Any:
            found = getattr(re.compile(*self._given), name)
            setattr(self, name, found)  # from here on it is found without this method
            return found
