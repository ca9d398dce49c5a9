"""The number that sets the batch size, divided where it is.

It may be in the program, in its arguments, or in a file that the program imports or reads.
"""

from __future__ import annotations

import io
import os
import re
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fragdoctor.rehearsal.divided_numbers import ARGUMENT, divided
from fragdoctor.rehearsal.engine import put


def install(argument: str) -> None:
    """Divide numbers at lines and columns, ``2:7.8,9.4``, or in the second argument, ``2:@1``.

    The quoted path of a file other than the program may follow: ``2:7.8:conf/train.yaml``. A number
    of batches is multiplied: ``1/2:7.8``.
    """
    divisor, places, *path = argument.split(":")
    n = Fraction(divisor)
    found = [place for place in places.split(",") if not place.startswith(ARGUMENT)]
    for place in {*places.split(",")} - {*found}:
        at = 1 + int(place.removeprefix(ARGUMENT))
        sys.argv[at] = re.sub(r"\d+\Z", lambda one: str(int(int(one[0]) / n)), sys.argv[at])
    target = os.path.realpath(unquote(path[0]) if path else sys.argv[0])
    if not target.endswith(".py") and path:
        file = Path(target)
        file.write_bytes(divided(file.read_bytes(), n, found))  # into the scratch folder
        return
    machinery: Any = sys.modules["_frozen_importlib_external"]  # with functions of its own
    read, cached = machinery._io.open_code, machinery.cache_from_source

    def open_code(path: str) -> Any:
        """``io.open_code``, with which the program and what it imports are read."""
        with read(path) as stream:
            source = stream.read()
        is_target = os.path.realpath(path) == target
        return io.BytesIO(divided(source, n, found) if is_target else source)

    def cache_from_source(path: str, *args: Any, **kwargs: Any) -> Any:
        """``importlib.util.cache_from_source``, without a file for what is divided."""
        if os.path.realpath(path) == target:
            raise NotImplementedError
        return cached(path, *args, **kwargs)

    for owner in (io, machinery._io):
        put(owner, "open_code", open_code)
    put(machinery, "cache_from_source", cache_from_source)
