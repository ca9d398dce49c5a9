# Types of the native core. Each part of the core has its own section.

from typing import Any, Protocol

# --- snapshot reader (bind_pickle_reader.cpp) ---

class _Stream(Protocol):
    def readinto(self, buffer: memoryview, /) -> int | None: ...

# args are (kind, message, hint, offset)
class ReadError(Exception): ...

def read_pickle(
    stream: _Stream, *, max_depth: int, max_string_bytes: int, max_unknown_keys: int
) -> dict[str, Any]: ...
def read_json(
    stream: _Stream, *, max_depth: int, max_string_bytes: int, max_unknown_keys: int
) -> dict[str, Any]: ...
