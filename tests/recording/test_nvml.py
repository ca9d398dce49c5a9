from __future__ import annotations

import ctypes

from fragdoctor.recording.facts import Nvml, _read


class Call:
    """Stands for a function of NVML that knows ``rows`` processes."""

    def __init__(self, rows) -> None:
        self.rows = rows
        self.rooms: list[int] = []

    def __call__(self, handle, count, table) -> int:
        self.rooms.append(count._obj.value if hasattr(count, "_obj") else count.value)
        room = self.rooms[-1]
        pointer = count._obj if hasattr(count, "_obj") else count
        pointer.value = len(self.rows)
        if len(self.rows) > room:
            return 7
        for entry, (pid, n_bytes) in zip(table, self.rows, strict=False):
            entry.pid, entry.n_bytes = pid, n_bytes
        return 0


def test_processes_are_read_and_what_is_not_available_is_none() -> None:
    call = Call([(7, 100), (8, (1 << 64) - 1)])

    found = _read(call, ctypes.c_void_p(1))

    assert [{"pid": 7, "bytes": 100}, {"pid": 8, "bytes": None}] == found


def test_processes_are_asked_for_again_where_there_are_many() -> None:
    call = Call([(n, n) for n in range(300)])

    found = _read(call, ctypes.c_void_p(1))

    assert 300 == len(found or ())
    assert 64 == call.rooms[0]


def test_processes_are_unknown_where_the_driver_refuses() -> None:
    assert _read(lambda *_: 3, ctypes.c_void_p(1)) is None


class Library:
    """Stands for NVML; holds only the functions that it is given."""

    def __init__(self, **functions) -> None:
        self.__dict__.update(functions)


def nvml_with(**functions) -> Nvml:
    found = object.__new__(Nvml)
    found._library = Library(**functions)
    return found


def test_driver_version_is_what_nvml_writes_into_the_buffer() -> None:
    def version(text, length) -> int:
        assert length.value == len(text) == 96  # never more than the buffer holds
        text.value = b"550.54.15"
        return 0

    assert nvml_with(nvmlSystemGetDriverVersion=version).driver_version() == "550.54.15"


def test_driver_version_is_unknown_where_nvml_refuses_or_lacks_the_call() -> None:
    assert nvml_with(nvmlSystemGetDriverVersion=lambda *_: 1).driver_version() is None
    assert nvml_with().driver_version() is None
