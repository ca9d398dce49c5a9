"""Started by path in the program's own Python: finds fragdoctor, and runs the program.

Only the package ``fragdoctor`` is made importable, from where it is installed; other packages
installed there (other versions of numpy, say) must not get into the program. It takes precedence
over a fragdoctor in the program's own environment, which may be another version.
"""

from __future__ import annotations

import faulthandler
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


def find_spec(
    name: str, path: Sequence[str] | None = None, *_: object
) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of the package at its location, or of one of its modules."""
    if name.startswith(f"{PACKAGE.name}."):
        return importlib.machinery.PathFinder.find_spec(name, path)
    if name != PACKAGE.name:
        return None
    return importlib.util.spec_from_file_location(
        name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )


def main() -> None:
    """Run what the request says."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the program's Python, not ours
        version = ".".join(map(str, sys.version_info[:2]))
        sys.stderr.write(f"fragdoctor rehearses with Python 3.11 or newer, not {version}.\n")
        sys.exit(2)
    faulthandler.enable()  # if a kernel of the CPU is given an address of the GPU, name the line
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
    from fragdoctor.rehearsal.engine.program import run

    run(request)


if __name__ == "__main__":
    main()
