"""Write the words that make up the paths of PyTorch's and Python's own files.

    python tools/library_words.py > fragdoctor/export/library_words.txt

A redacted recording keeps the path of a library's file only if each part of it is such a word.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

NOT_OURS = {
    "site-packages", "dist-packages", "include", "share", "test", "tests", "idle_test", "bin",
    "__pycache__",
}  # fmt: skip


def words(root: Path) -> set[str]:
    """Return the names of all Python files and their folders below ``root``, without suffixes."""
    found: set[str] = set()
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if not NOT_OURS.intersection(parts) and all(p.isidentifier() for p in parts):
            found.update(parts)
    return found


def main() -> None:
    """Print one word per line: first PyTorch's, then, after an empty line, Python's."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("PyTorch is not installed.")
    print("\n".join(sorted(words(Path(spec.origin).parent))))
    print()
    print("\n".join(sorted(words(Path(sysconfig.get_paths()["stdlib"])))))


if __name__ == "__main__":
    main()
