"""The number that sets the batch size, divided where it is: in the program or its arguments."""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import ExitStack
from typing import Any

from fragdoctor.rehearsal.divided_numbers import ARGUMENT, divided
from fragdoctor.rehearsal.engine import put


def install(argument: str, undo: ExitStack) -> None:
    """Divide numbers at lines and columns, ``2:7.8,9.4``, or in the second argument, ``2:@1``."""
    n, _, places = argument.partition(":")
    found = [place for place in places.split(",") if not place.startswith(ARGUMENT)]
    for place in {*places.split(",")} - {*found}:
        at = 1 + int(place.removeprefix(ARGUMENT))
        sys.argv[at] = re.sub(r"\d+\Z", lambda one: str(int(one[0]) // int(n)), sys.argv[at])
    read, script = io.open_code, os.path.realpath(sys.argv[0])

    def open_code(path: str) -> Any:
        """``io.open_code``, with which ``runpy`` reads the program."""
        with read(path) as stream:
            source = stream.read()
        is_program = os.path.realpath(path) == script
        return io.BytesIO(divided(source, int(n), found) if is_program else source)

    put(undo, io, "open_code", open_code)
