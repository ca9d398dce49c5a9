"""Finds the snapshots embedded in an HTML page of PyTorch's memory viewer.

Such a page holds ``local_files = [{"name": "snapshot.pickle", "base64": "..."}, ...]``. The page
is read as a stream: nothing of it is interpreted but these entries.
"""

from __future__ import annotations

import binascii
import io
import re
from typing import TYPE_CHECKING, Final

from fragdoctor.errors import NotASnapshot, RefusedSnapshot, TruncatedSnapshot

if TYPE_CHECKING:
    from fragdoctor.inputs.source import ByteStream

_CHUNK_BYTES: Final = 1 << 16
_LONGEST_NAME_BYTES: Final = 4096
# White space and names are bound, and what was matched is never given back: a page of white space
# costs no more than one of anything else.
_START: Final = re.compile(rb"local_files\s{0,64}+=\s{0,64}+\[")
_ENTRY: Final = re.compile(
    rb"\s{0,64}+,?+\s{0,64}+\{\s{0,64}+\"name\"\s{0,64}+:\s{0,64}+"
    rb'"((?>[^"\\]|\\.){0,4096}+)"\s{0,64}+,\s{0,64}+"base64"\s{0,64}+:\s{0,64}+"'
)
_LIST_END: Final = re.compile(rb"\s{0,64}+,?+\s{0,64}+\]")
_PAYLOAD_END: Final = re.compile(rb"\s{0,64}+\}")
_LONGEST_START_BYTES: Final = 256


class PageEntries:
    """Walks over the entries of a page, first to last; each payload is read at most once."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._buffer = bytearray()
        self._at_end = False
        self._n_read = 0
        self.name = ""

    @property
    def offset(self) -> int:
        """Return the position in the page in bytes."""
        return self._n_read - len(self._buffer)

    def find_list(self) -> None:
        """Go to the list of entries.

        Raises:
            NotASnapshot: the page has none.
        """
        while True:
            if match := _START.search(self._buffer):
                del self._buffer[: match.end()]
                return
            del self._buffer[:-_LONGEST_START_BYTES]
            if not self._fill():
                raise NotASnapshot(
                    "The HTML page holds no memory snapshot.",
                    hint="Save it with torch.cuda.memory's viewer, or give the pickle itself.",
                    offset=self.offset,
                )

    def next_payload(self) -> Payload | None:
        """Return the payload of the next entry and set ``name``; None after the last."""
        while True:
            if match := _ENTRY.match(self._buffer):
                self.name = match.group(1).decode("utf-8", "replace")
                del self._buffer[: match.end()]
                return Payload(self)
            if _LIST_END.match(self._buffer):
                return None
            if len(self._buffer) > 3 * _LONGEST_NAME_BYTES or not self._fill():
                return None

    def take(self) -> tuple[bytes, bool]:
        """Return the next base64 characters, and whether the closing quote was reached."""
        if not self._buffer and not self._fill():
            raise TruncatedSnapshot(
                "The HTML page ends in the middle of a snapshot.",
                hint="Save the page again.",
                offset=self.offset,
            )
        end = self._buffer.find(b'"')
        is_last = end >= 0
        text = bytes(self._buffer[: end if is_last else len(self._buffer)])
        del self._buffer[: len(text) + is_last]
        if is_last:
            while not self._buffer and self._fill():
                pass
            if match := _PAYLOAD_END.match(self._buffer):
                del self._buffer[: match.end()]
        return text, is_last

    def _fill(self) -> bool:
        chunk = bytearray(_CHUNK_BYTES)
        n = 0 if self._at_end else self._stream.readinto(memoryview(chunk))
        self._at_end = n == 0
        self._n_read += n
        self._buffer += chunk[:n]
        return n > 0


class Payload(io.RawIOBase):
    """The decoded bytes of one entry."""

    def __init__(self, page: PageEntries) -> None:
        self._page = page
        self._rest = b""  # base64 characters that do not fill a group of four yet
        self._ready = b""
        self._is_done = False

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer as far as what is decoded reaches; 0 is the end."""
        while not self._ready and not self._is_done:
            self._decode_more()
        n = min(len(buffer), len(self._ready))
        buffer[:n] = self._ready[:n]
        self._ready = self._ready[n:]
        return n

    def drain(self) -> None:
        """Read to the end of the payload, so that the next entry can be looked for."""
        while not self._is_done:
            self._page_take()

    def _page_take(self) -> bytes:
        text, self._is_done = self._page.take()
        return text

    def _decode_more(self) -> None:
        text = self._rest + self._page_take().replace(b"\\/", b"/").replace(b"\\n", b"")
        n = len(text) if self._is_done else len(text) // 4 * 4
        self._rest = text[n:]
        try:
            self._ready = binascii.a2b_base64(text[:n], strict_mode=True) if n else b""
        except binascii.Error:
            raise RefusedSnapshot(
                "The snapshot in the HTML page is no valid base64.",
                hint="Save the page again.",
                offset=self._page.offset,
            ) from None
