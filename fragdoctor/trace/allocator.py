"""PyTorch's caching allocator as an object to rehearse on: exact, and without a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from msgspec import Struct

from fragdoctor._native import _ext
from fragdoctor.errors import OutOfMemory, SimulationError
from fragdoctor.lazy import regex
from fragdoctor.model.conf_keys import parse_version
from fragdoctor.model.settings import AllocatorSettings, Era, era_of, parse_conf
from fragdoctor.trace.oom_message import oom_message
from fragdoctor.units import GIB

UNLIMITED: Final = 2**64 - 1
MAX_REQUEST_BYTES: Final = 2**60
MAX_RESERVE_GIB: Final = 2**20
_RESERVE: Final = regex(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)([gG]?)", re.ASCII)


class Block(Struct, frozen=True):
    """A block of a segment.

    Attributes:
        address: device address of its first byte.
        size_bytes: its length; a multiple of 512.
        requested_bytes: what the program asked for; a leftover value if the block is inactive.
        state: ``active_allocated``, ``active_pending_free`` (freed, but another stream may still
            use it) or ``inactive`` (cached).
    """

    address: int
    size_bytes: int
    requested_bytes: int
    state: str


class Segment(Struct, frozen=True):
    """Memory obtained from the driver in one piece, or a mapped range of an expandable segment.

    Attributes:
        address: device address of its first byte.
        total_bytes: its length.
        is_expandable: whether it is a mapped range of an expandable segment.
        stream: the stream whose requests it serves, by the caller's number.
        segment_type: ``small`` (requests up to 1 MiB) or ``large``.
        pool: 0, or the private pool that owns it.
        blocks: the blocks that tile it, by address.
    """

    address: int
    total_bytes: int
    is_expandable: bool
    stream: int
    segment_type: str
    pool: int
    blocks: Sequence[Block]


def _clipped(n_bytes: int) -> int:
    return min(max(n_bytes, 0), UNLIMITED)


def native_config(
    settings: AllocatorSettings,
    *,
    era: Era,
    capacity_bytes: int | None = None,
    device_total_bytes: int | None = None,
    memory_fraction: float | None = None,
) -> _ext.AllocatorConfig:
    """Return the native model's configuration for settings.

    Args:
        settings: the meaning of the setting string; its ``memory_fraction`` is used if the argument
            of that name is None.
        era: tie-breaking, from :func:`era_of`.
        capacity_bytes: what the driver has for PyTorch, in 2 MiB pages; None means unlimited.
        device_total_bytes: memory of the device, the base of fractions and of the reservations of
            expandable segments; None means the capacity.
        memory_fraction: as for ``torch.cuda.set_per_process_memory_fraction``; None means not set.

    Raises:
        SimulationError: if the settings choose another allocator than the native one.
    """
    if settings.backend != "native":
        raise SimulationError(
            f"The model knows only the native allocator, not {settings.backend}.",
            hint="Leave backend out of the settings.",
        )
    config = _ext.AllocatorConfig()
    config.era = int(era)
    # Figures of a damaged file may be negative, or exceed 64 bits.
    config.capacity_bytes = UNLIMITED if capacity_bytes is None else _clipped(capacity_bytes)
    config.device_total_bytes = _clipped(device_total_bytes or 0)
    fraction = settings.memory_fraction if memory_fraction is None else memory_fraction
    if fraction is not None:
        config.memory_fraction = fraction
    split = settings.max_split_bytes
    config.max_split_bytes = UNLIMITED if split is None else split
    config.max_non_split_rounding_bytes = settings.max_non_split_rounding_bytes
    config.large_segment_bytes = settings.large_segment_bytes
    config.garbage_collection_threshold = settings.garbage_collection_threshold
    config.expandable_segments = settings.expandable_segments
    config.roundup_power2_divisions = list(settings.roundup_power2_divisions)
    _set_reserve(config, settings.other.get("expandable_segments_reserve"))
    return config


def _set_reserve(config: _ext.AllocatorConfig, reserve: object) -> None:
    """Set the size of reservations; values that PyTorch 2.15 warns about leave the default."""
    match = _RESERVE.fullmatch(reserve) if isinstance(reserve, str) else None
    if match is None:
        return
    value = float(match.group(1))
    if match.group(2):
        config.reservation_bytes = int(min(value, MAX_RESERVE_GIB) * GIB)
    else:
        config.reservation_fraction = value


class Allocator:
    """The caching allocator of one device, behaving exactly like PyTorch's own.

    Every address, every split and every flush comes out as on a real device whose driver places
    segments at the lowest free address (cudaMalloc from 0x700000000000, expandable segments from
    0x600000000000). Events of other streams count as done when the next request comes.

    Args:
        conf: a ``PYTORCH_CUDA_ALLOC_CONF`` string.
        capacity_bytes: what the driver has for PyTorch: device memory without the context and
            other processes. None means unlimited.
        torch_version: version whose rules and messages apply.
        memory_fraction: as if ``torch.cuda.set_per_process_memory_fraction`` had been called
            first; None means not set.
        device_total_bytes: memory of the device, the base of a fraction; None means the capacity.

    Raises:
        ConfigError: if the version would refuse the setting string.
        SimulationError: if the settings choose another backend.
        ValueError: if the capacity or fraction is out of range.
    """

    def __init__(
        self,
        conf: str = "",
        capacity_bytes: int | None = None,
        torch_version: str = "2.12.1",
        memory_fraction: float | None = None,
        *,
        device_total_bytes: int | None = None,
    ) -> None:
        self.settings = parse_conf(conf, torch_version)
        self.torch_version = torch_version
        self._version = parse_version(torch_version)
        for size in (capacity_bytes, device_total_bytes):
            if size is not None and not 0 <= size < UNLIMITED:
                raise ValueError(f"a capacity must lie between 0 and 2^64 - 2 bytes, not {size}")
        if memory_fraction is not None:
            _check_fraction(memory_fraction)
        config = native_config(
            self.settings,
            era=era_of(torch_version),
            capacity_bytes=capacity_bytes,
            device_total_bytes=device_total_bytes,
            memory_fraction=memory_fraction,
        )
        config.fraction_of_one_counts = self._version < (2, 10, 0)
        self._core = _ext.AllocatorCore(config)
        # Handles are created on first use, and the free sets are ordered by handle.
        self._streams: dict[int, int] = {0: 0}

    def malloc(self, size: int, stream: int = 0) -> int:
        """Return the address of a new block for ``size`` bytes, or 0 for a size of 0.

        Args:
            size: bytes as the program asks for them (not rounded).
            stream: 0 is the default stream; other numbers are separate streams, whose handles are
                ordered by first use.

        Raises:
            OutOfMemory: with the text and figures of PyTorch's error.
            ValueError: if the size or stream is negative.
        """
        if size < 0:
            raise ValueError(f"a size cannot be negative: {size}")
        handle = self._handle(stream)
        if size >= MAX_REQUEST_BYTES:
            raise OutOfMemory(
                "CUDA out of memory. Tried to allocate more than 1EB memory.",
                requested_bytes=size,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
            )
        address = self._core.malloc(size, handle)
        if address is None:
            raise self._out_of_memory()
        return address

    def free(self, address: int) -> None:
        """Give a block back; address 0 is ignored, as by ``cudaFree(nullptr)``.

        Raises:
            SimulationError: if no live block begins at this address.
        """
        if address != 0 and not self._core.free(address):
            raise _unknown(address)

    def record_stream(self, address: int, stream: int) -> None:
        """Note that the block is also used on another stream, as ``Tensor.record_stream`` does.

        When freed, it stays pending; at the next request its events count as done.

        Raises:
            SimulationError: if no live block begins at this address.
        """
        if not self._core.record_stream(address, self._handle(stream)):
            raise _unknown(address)

    def empty_cache(self) -> None:
        """Give cached memory back to the driver, as ``torch.cuda.empty_cache()`` does."""
        self._core.empty_cache()

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        """Limit reserved memory to ``floor(fraction * device memory)`` from now on.

        Raises:
            ValueError: if the fraction is not between 0 and 1.
        """
        _check_fraction(fraction)
        self._core.set_fraction(fraction)

    def set_allocator_settings(self, conf: str) -> None:
        """Change settings at run time, as ``torch.cuda.memory._set_allocator_settings`` does.

        Raises:
            ConfigError: if the version would refuse the string.
        """
        settings = parse_conf(conf, self.torch_version).over(self.settings)
        self._core.set_settings(native_config(settings, era=era_of(self.torch_version)))
        self.settings = settings

    def create_pool(self, *, use_on_oom: bool = False, no_split: bool = False) -> int:
        """Return the number of a new private pool, as ``torch.cuda.MemPool()`` makes one."""
        return self._core.pool_create(use_on_oom, no_split)

    @contextmanager
    def use_pool(self, pool: int) -> Iterator[None]:
        """Serve the requests inside the block from a private pool, as ``use_mem_pool`` does.

        Raises:
            ValueError: if there is no such pool.
        """
        self._core.context_begin(pool)
        try:
            yield
        finally:
            self._core.context_end()

    def drop_pool(self, pool: int) -> None:
        """Drop a private pool; the free part of it goes back to the driver.

        Raises:
            ValueError: if there is no such pool.
        """
        self._core.pool_release(pool, flush=True)

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver."""
        return self._core.reserved_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the blocks handed out (rounded sizes)."""
        return self._core.allocated_bytes

    @property
    def active_bytes(self) -> int:
        """Bytes of the blocks handed out or waiting for other streams."""
        return self._core.active_bytes

    @property
    def requested_bytes(self) -> int:
        """Bytes that the program asked for in the active blocks."""
        return self._core.requested_bytes

    @property
    def alloc_retries(self) -> int:
        """How often the cache had to be flushed for a request."""
        return self._core.alloc_retries

    @property
    def ooms(self) -> int:
        """How often a request failed."""
        return self._core.ooms

    @property
    def driver_calls(self) -> int:
        """Segments obtained and returned, and ranges mapped and unmapped, so far."""
        return self._core.driver_calls

    @property
    def peak_reserved_bytes(self) -> int:
        """The largest ``reserved_bytes`` so far."""
        return self._core.counters()["peak_reserved"]

    @property
    def peak_allocated_bytes(self) -> int:
        """The largest ``allocated_bytes`` so far."""
        return self._core.counters()["peak_allocated"]

    def segments(self) -> list[Segment]:
        """Return the segments by address, as ``torch.cuda.memory_snapshot()`` lists them."""
        numbers = {handle: number for number, handle in self._streams.items()}
        return [
            Segment(
                address=address,
                total_bytes=size,
                is_expandable=expandable,
                stream=numbers.get(stream, stream),
                segment_type="small" if small else "large",
                pool=pool,
                blocks=tuple(Block(a, s, r, _ext.STATE_NAMES[state]) for a, s, r, state in blocks),
            )
            for address, size, expandable, stream, pool, small, blocks in self._core.layout()
        ]

    def _handle(self, stream: int) -> int:
        if stream < 0:
            raise ValueError(f"a stream number cannot be negative: {stream}")
        return self._streams.setdefault(stream, len(self._streams))

    def _out_of_memory(self) -> OutOfMemory:
        figures = self._core.last_oom()
        return OutOfMemory(
            oom_message(figures, self._version),
            requested_bytes=figures["requested_bytes"] or 0,
            alloc_bytes=figures["alloc_bytes"] or 0,
            total_bytes=figures["total_bytes"] or 0,
            free_bytes=figures["free_bytes"] or 0,
            allocated_bytes=figures["allocated_bytes"] or 0,
            reserved_bytes=figures["reserved_bytes"] or 0,
            private_free_bytes=figures["private_free_bytes"] or 0,
            limit_bytes=figures["allowed_bytes"],
        )


def _check_fraction(fraction: float) -> None:
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"a memory fraction must lie between 0 and 1, not {fraction}")


def _unknown(address: int) -> SimulationError:
    return SimulationError(
        f"No live block begins at address {address:#x}.",
        hint="Free what malloc() returned, once.",
    )
