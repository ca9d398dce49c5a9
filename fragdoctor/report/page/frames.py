"""Which frames are the user's own code and which a library's."""

from __future__ import annotations

import re
from typing import Final

from fragdoctor.model.snapshot import Snapshot

_LIBRARY: Final = re.compile(
    r"(^|[\\/])(site-packages|dist-packages|lib[\\/]python\d[^\\/]*|torch)[\\/]"
    r"|^<frozen |^(\?\?|)$|\.(c|cc|cpp|cu|h|hpp|so[.\d]*)$"
)


def library_frames(snapshot: Snapshot) -> list[bool]:
    """Return for each frame of the snapshot whether it is a library's or the interpreter's."""
    texts = {int(i): _LIBRARY.search(snapshot.strings[int(i)]) is not None
             for i in set(snapshot.frames.filename.tolist())}
    return [texts[i] for i in snapshot.frames.filename.tolist()]
