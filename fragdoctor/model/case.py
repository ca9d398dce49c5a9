"""Everything known about one process, including out-of-memory messages; any part may be missing.

Field names of the messages are a contract (JSON of ``fragdoctor oom``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct, field

from fragdoctor.lazy import regex
from fragdoctor.model.census import Census
from fragdoctor.model.finding import Location
from fragdoctor.model.ledger import Ledger
from fragdoctor.model.snapshot import Snapshot
from fragdoctor.model.story import Scene

NO_FAILURE: Final = "no-failure"
"""``sub_kind`` of the message (of kind ``negative``) that stands for a text without a failure."""

GPU_TABLE: Final = "gpu-table"
"""``sub_kind`` of the message that stands for a table of GPUs next to words about a failure."""
GPU_EMPTY: Final = "gpu-empty"
"""``sub_kind`` of a driver's error where the text shows GPUs with nothing on them."""

UNEVEN: Final = "uneven"
KEPT_MEMORY: Final = "kept-memory"
TOO_MUCH: Final = "too-much"
"""``sub_kind`` of messages that only complain about memory: one GPU holds more than the others,
what was used is not given back, or a program takes too much."""

TRAINING: Final = (
    r"(?:(?<![a-z])(?<!pre[-_])(?<!without )(?<!not )"
    r"train(?!ed (?:model|on|weights|network)|\(False)"
    r"|pretrain(?!ed)|train(?:er|loop)\b|fine[- ]?tun|(?<![\w-])epoch|dreambooth|backward"
    r"|learning.rate|optimi[sz]er|\blosse?s?\b|训练|微调|学習|학습)"
)
"""Words that people and programs only use about training."""

_TRAINS: Final = regex(TRAINING, re.IGNORECASE)

IMAGES: Final = "smaller images"
SEQUENCES: Final = "shorter sequences"
"""What smaller samples are if a text speaks of images or of text."""


class OtherProcess(Struct, frozen=True):
    """A ``Process PID has X memory in use`` sentence. In a container it may be this process."""

    pid: int
    n_bytes: int


class TracebackFrame(Struct, frozen=True):
    """One call in the traceback that ends with a message, as a log prints it; text is hostile.

    Attributes:
        file: path as printed, "" if only the function is known.
        line: line in that file, None if it is not printed.
        function: name of the function, without arguments; "" if it is not printed.
        code: the source line, with whitespace folded; "" if it is not printed.
    """

    file: str
    line: int | None = None
    function: str = ""
    code: str = ""

    @property
    def location(self) -> Location:
        """The line of the call."""
        return Location(self.file, self.line or 0, self.function)


AFTER_ANY_FAILURE: Final = frozenset(
    {"cublas", "cublas-init", "cudnn", "cudnn-init", "cudnn-no-engine", "cudnn-internal"}
)
"""Variants of library errors without figures. A device-side assertion breaks the context, after
which every library call fails, whatever its error says (CUDA's programming guide, Assertion). On
the CPU the same bad index raises an IndexError, which people who have looked for the cause quote as
well."""


class QuotedCode(Struct, frozen=True):
    """What Python code in a text keeps on the GPU, as it is written there (hostile), or "".

    Attributes:
        kept: what a loop adds results with their graph to.
        unused_graph: a call of a model whose graph no backward pass uses, if nothing is trained.
        evaluated_graph: the same beside code that trains.
    """

    kept: str = ""
    unused_graph: str = ""
    evaluated_graph: str = ""


class OomMessage(Struct, frozen=True):
    """One message; None means "not printed and not computable".

    Attributes:
        kind: ``pytorch-caching-allocator``, ``driver-no-figures``, ``cublas``, ``cudnn``, ``nccl``,
            ``kv-cache``, ``jax``, ``tf``, ``ggml``, ``other-framework``, ``host-ram``,
            ``shared-memory`` or ``negative``.
        backend: ``cuda``, ``rocm``, ``xpu``, ``mps``, ``npu``, ``musa``, ``vulkan``, ``cpu``, or
            the framework if nothing else is known (``jax``, ``tf``, ``vllm``, ...).
        is_device_oom: device memory ran out (or was refused); False for host memory, on-chip
            shared memory and errors that are not about memory.
        requested_bytes: requested size; for PyTorch >= 2.1 the segment size, not the tensor's.
        allocated_bytes: as printed; since 2.4 with ``private_pools_bytes`` (see ``live_bytes``).
        reserved_bytes: allocated + reserved but unallocated.
        limit_bytes: memory fraction (``allowed``), MPS ``max allowed``, KV-cache budget, ...
        program_bytes: everything that the compiled program needs at once, if XLA printed it.
        largest_buffer_bytes, largest_buffer: the largest buffer of that program: its size, and its
            shape, operation and source line; hostile text.
        rank: rank printed on the line of the message.
        line: 1-based line in the input where the message starts.
        variant: name of the wording, for example ``torch-1.4``, ``torch-2.1``, ``cudaMallocAsync``,
            ``mps``; the names are stable and listed in ``inputs/wordings``.
        version_low, version_high: PyTorch versions that print this wording ("" is an open end).
        sub_kind: finer than ``kind``, for example ``size-bug`` (more than 1EB),
            ``fraction-rejected``, ``pinned-host``, ``oom-killer``, ``dev-shm``, ``device-assert``.
        free_allocated_hint: the settings that the message itself proposes, or "".
        other_allocations_bytes: MPS only: Metal's memory outside PyTorch's heaps.
        is_warning: whether the framework printed it as a warning, not as a failure.
        n_sequences: requests that a server had in flight or tried at start, if printed.
        intro: text before the message on its line, at most 300 characters; hostile text.
        around: the last lines that the process printed before the message, at most 2,000
            characters; hostile text.
        after: the rest of its line and, if no traceback follows, the lines after it; hostile text.
        frames: the calls that led to it, outermost first, if a traceback is printed with it.
        is_in_handler: whether the traceback says that another exception was being handled.
        text: the message itself, with whitespace folded, at most 2,000 characters; hostile text.
        code: what the Python code in the whole text keeps.
    """

    kind: str
    backend: str
    is_device_oom: bool
    device_index: int | None = None
    requested_bytes: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    process_bytes: int | None = None
    other_processes: Sequence[OtherProcess] = ()
    private_pools_bytes: int | None = None
    limit_bytes: int | None = None
    program_bytes: int | None = None
    largest_buffer_bytes: int | None = None
    largest_buffer: str = ""
    rank: int | None = None
    line: int = 1
    variant: str = ""
    version_low: str = ""
    version_high: str = ""
    sub_kind: str = ""
    free_allocated_hint: str = ""
    other_allocations_bytes: int | None = None
    active_bytes: int | None = None
    is_warning: bool = False
    expandable_is_on: bool | None = None
    kv_tokens_requested: int | None = None
    kv_tokens_capacity: int | None = None
    n_sequences: int | None = None
    intro: str = ""
    around: str = ""
    after: str = ""
    frames: Sequence[TracebackFrame] = ()
    is_in_handler: bool = False
    text: str = ""
    code: QuotedCode = QuotedCode()

    @property
    def said(self) -> str:
        """All text about the failure, in its order: lines before it, itself, lines after it."""
        return f"{self.around} {self.intro} {self.text} {self.after}"

    @property
    def is_of_training(self) -> bool:
        """Whether the text around it or its traceback is about a training run."""
        calls = (f"{f.file} {f.function} {f.code}" for f in self.frames)
        return any(_TRAINS.search(said) for said in (self.said, *calls))

    @property
    def live_bytes(self) -> int | None:
        """Bytes held by live tensors: allocated minus the private pools' free cache (>= 2.4)."""
        if self.allocated_bytes is None:
            return None
        return max(0, self.allocated_bytes - (self.private_pools_bytes or 0))

    @property
    def true_free_bytes(self) -> int | None:
        """``free_bytes``, or None if it is impossible: more than the device has.

        An integrated GPU that shares the host's memory prints a difference that went below zero.
        """
        free, total = self.free_bytes, self.total_bytes
        return None if free is not None and total and free > total else free

    @property
    def is_of_caching_allocator(self) -> bool:
        """Whether it has the figures of PyTorch's caching allocator; MPS has its own allocator."""
        return self.kind == "pytorch-caching-allocator" and self.backend != "mps"

    @property
    def is_of_early_allocator(self) -> bool:
        """Whether the allocator of PyTorch before 1.0 failed, which prints the driver's error."""
        is_early = self.variant in ("torch-0.4", "thc-check")
        return is_early and "thcstorage." in f"{self.text} {self.said}".lower()


class LogMarker(Struct, frozen=True):
    """A line of a log that is not a memory failure but belongs to the story.

    Attributes:
        kind: ``device-assert``, ``restart``, ``cache-flush`` (DeepSpeed), ``cudamalloc-warning``
            (2.13), ``killed``, ``nvml-unavailable``, ...
        line: 1-based line.
        rank: rank printed on that line.
        text: the line, with whitespace folded, at most 500 characters; hostile text.
    """

    kind: str
    line: int
    rank: int | None
    text: str


class ServerShare(Struct, frozen=True):
    """One line of a budget that a server printed, or XLA for a program: ``weights``, ..."""

    name: str
    n_bytes: int


class ContrastKind(StrEnum):
    """What differs between a run that a text says works and one that fails."""

    VERSION = "version"
    CHANGE = "change"
    RAISED = "raised"
    DATA = "data"
    AMOUNT = "amount"
    LARGE = "large"
    BUFFER = "buffer"
    COUNTED = "counted"


class ToldContrast(Struct, frozen=True):
    """What a text says a failure depends on, in its own words (hostile).

    Attributes:
        kind: what differs, None if the text does not say.
        fails: what it fails with: an option, a version, a data set.
        works: the version or the amount that works; anything else works without it.
        at: the value at which it fails.
    """

    kind: ContrastKind | None = None
    fails: str = ""
    works: str = ""
    at: str = ""


class ToldSettings(Struct, frozen=True):
    """What a text says of the settings of its run.

    Attributes:
        batch_option: the batch's option as the text spells it; hostile text.
        batch_size: the smallest batch that the text names, None if it names none.
        is_smaller_batch_tried: whether the text says that a smaller batch did not help.
        contrast: what the failure depends on, by its words.
        in_use: measures against a lack of memory that the text says are in use.
        options: options that it shows with a value, as ``max-model-len``; hostile text.
        smaller_samples: what a smaller sample is: "shorter sequences"; empty if it is not clear.
        n_gpus: the most GPUs that the text names.
        visible_gpus: what the text sets CUDA_VISIBLE_DEVICES to, as ``5`` or ``2,3``.
    """

    batch_option: str = ""
    batch_size: int | None = None
    is_smaller_batch_tried: bool = False
    contrast: ToldContrast = ToldContrast()
    in_use: Sequence[str] = ()
    options: frozenset[str] = frozenset()
    smaller_samples: Sequence[str] = ()
    n_gpus: int = 1
    visible_gpus: str = ""

    @property
    def batch_cannot_shrink(self) -> bool:
        """Whether a smaller batch is no advice: it is one already, or less did not help."""
        return self.batch_size == 1 or self.is_smaller_batch_tried


class OomLog(Struct, frozen=True):
    """All messages of one text in the order of the text, and the markers around them.

    ``primary`` is the index of the first cause: the message that a diagnosis should be about.
    ``scenes`` are the lines of the text's story, in order: progress, trials, figures, retries,
    failures. ``server`` is the budget that a server printed at start; ``program`` has the parts of
    a program that XLA printed.
    ``damage`` says why the text was not read to its end, or is "" if it was. ``frameworks`` names
    the frameworks whose commands, imports or lines are anywhere in the text, ``settings`` has what
    it says of the run's settings, and ``ledger`` where memory is.
    """

    messages: Sequence[OomMessage]
    markers: Sequence[LogMarker] = ()
    primary: int = 0
    n_lines: int = 0
    scenes: Sequence[Scene] = ()
    server: Sequence[ServerShare] = ()
    program: Sequence[ServerShare] = ()
    damage: str = ""
    frameworks: Sequence[str] = ()
    settings: ToldSettings = ToldSettings()
    ledger: Ledger = Ledger()


class BundleDevice(Struct, frozen=True):
    """One GPU at the moment when the bundle was written; None means not known.

    Attributes:
        index: PyTorch's device number.
        name: name of the GPU; hostile text.
        total_bytes: size of the device as reported by the driver.
        free_bytes: free for all processes.
        reserved_bytes: held by PyTorch's cache.
        process_bytes: all memory of this process as the driver counts it.
        other_processes: processes on the GPU with another id. In a container, where the driver has
            the host's ids, this process is one of them and ``process_bytes`` is None.
        memory_fraction: set by ``set_per_process_memory_fraction``; None means not known or not
            set.
    """

    index: int
    name: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    process_bytes: int | None = None
    other_processes: Sequence[OtherProcess] = ()
    memory_fraction: float | None = None

    @property
    def limit_bytes(self) -> int | None:
        """What the memory fraction allows, or None if it or the device's size is not known."""
        if self.memory_fraction is None or self.total_bytes is None:
            return None
        return int(self.memory_fraction * self.total_bytes)


class BundleFacts(Struct, frozen=True):
    """The manifest of a bundle, checked; all text is hostile.

    Attributes:
        reason: ``oom``, ``exit``, ``signal``, ``block`` (end of ``fragdoctor.record``) or
            ``request`` (``fragdoctor attach``).
        time: when it was written, ISO 8601 in UTC.
        pid: process id, as the program saw it.
        rank, local_rank, world_size: place in a job of several processes, if it was part of one.
        host: name of the machine.
        folder: where the program was running when its facts were taken; "" means not recorded.
        command: the program's command line.
        versions: versions of ``python``, ``torch``, ``cuda``, ``hip`` and ``driver``, if known.
        environment: the values of environment variables that matter for memory.
        devices: the GPUs on which PyTorch held memory.
        n_ooms: out-of-memory failures of the process so far.
        n_skipped: failures for which no bundle was written.
        max_entries: events kept per GPU; None means the program recorded by itself.
        stacks: ``python`` or ``all``; "" means the program recorded by itself.
        signal: name of the signal, "" if there was none.
        exception: type of the exception that ended the program, "" if there was none.
        oom_device: the device of the failure; None if there was none.
        ended_program: whether this failure ended the program.
        traceback: the lines of the exception that ended the program, innermost first.
        problems: what could not be recorded.
        unusable: files that exist but cannot be read, each with the reason.
    """

    reason: str
    time: str = ""
    pid: int | None = None
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    host: str = ""
    folder: str = ""
    command: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: Sequence[BundleDevice] = ()
    n_ooms: int = 0
    n_skipped: int = 0
    max_entries: int | None = None
    stacks: str = ""
    signal: str = ""
    exception: str = ""
    oom_device: int | None = None
    ended_program: bool = False
    traceback: Sequence[Location] = ()
    problems: Sequence[str] = ()
    unusable: Sequence[str] = ()

    def device(self, index: int | None) -> BundleDevice | None:
        """Return the facts about a device, or None if the bundle has none."""
        return next((d for d in self.devices if d.index == index), None)


class MemoryStats(Struct, frozen=True):
    """Statistics of one device at one moment.

    Attributes:
        values: in flat form: ``allocated_bytes.all.peak`` -> int, ``num_alloc_retries`` -> int.
            Figures from a summary are rounded down to the printed unit.
        device: device index, None if the source does not say.
        origin: ``memory_stats`` or ``memory_summary``.
        label: position in a series (step, line), for people; hostile text.
    """

    values: Mapping[str, int]
    device: int | None = None
    origin: str = "memory_stats"
    label: str = ""

    def get(self, key: str) -> int | None:
        """Return one figure, or None if the source lacks it."""
        return self.values.get(key)

    @property
    def allocated_bytes(self) -> int | None:
        """Current bytes of allocated blocks."""
        return self.get("allocated_bytes.all.current")

    @property
    def active_bytes(self) -> int | None:
        """Current bytes of allocated blocks and of freed blocks that wait for other streams."""
        return self.get("active_bytes.all.current")

    @property
    def reserved_bytes(self) -> int | None:
        """Current bytes of all segments."""
        return self.get("reserved_bytes.all.current")

    @property
    def requested_bytes(self) -> int | None:
        """Current requested bytes, before rounding (2.0+)."""
        return self.get("requested_bytes.all.current")

    @property
    def inactive_split_bytes(self) -> int | None:
        """Free bytes in segments that still hold a live block; 0 under expandable segments."""
        return self.get("inactive_split_bytes.all.current")

    @property
    def n_alloc_retries(self) -> int | None:
        """How often the allocator flushed its cache because cudaMalloc failed."""
        return self.get("num_alloc_retries")

    @property
    def n_ooms(self) -> int | None:
        """How often an OutOfMemoryError was raised."""
        return self.get("num_ooms")


class StatsSeries(Struct, frozen=True):
    """Statistics of one input: one per device, or a series over time (JSON lines)."""

    entries: Sequence[MemoryStats] = field(default_factory=tuple)
    is_series: bool = False

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that the entries name, ascending."""
        return tuple(sorted({s.device for s in self.entries if s.device is not None}))

    def of_device(self, device: int | None) -> tuple[MemoryStats, ...]:
        """Return the entries of one device, oldest first; entries without a device match any."""
        return tuple(s for s in self.entries if device is None or s.device in (None, device))


class Overrides(Struct, frozen=True):
    """What the user states because the files may not say it.

    ``batch_size`` is the number of samples in one forward pass.
    """

    capacity_bytes: int | None = None
    device: int | None = None
    memory_fraction: float | None = None
    torch_version: str | None = None
    batch_size: int | None = None


class Case(Struct, frozen=True):
    """Inputs of one diagnosis.

    Attributes:
        snapshot: the memory snapshot, if one was given.
        oom: messages of one text or log, if one was given.
        stats: statistics, if any were given.
        overrides: what the user said on the command line.
        sources: the names of the inputs, in the order given; hostile text.
        bundle: the manifest, if the inputs came as a bundle of ``fragdoctor run``.
        censuses: the bundle's censuses of who held memory by name, earliest first.
        source_lines: the bundle's lines of the program, file -> number -> text; hostile text.
    """

    snapshot: Snapshot | None = None
    oom: OomLog | None = None
    stats: StatsSeries | None = None
    overrides: Overrides = field(default_factory=Overrides)
    sources: Sequence[str] = ()
    bundle: BundleFacts | None = None
    censuses: Sequence[Census] = ()
    source_lines: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @property
    def holds_nothing(self) -> bool:
        """Whether there is nothing but texts without a failure."""
        is_quiet = self.oom is None or not (self.oom.messages or self.oom.markers)
        return self.snapshot is None and self.stats is None and is_quiet

    @property
    def ledger(self) -> Ledger:
        """Where memory is, as far as the text says."""
        return Ledger() if self.oom is None else self.oom.ledger

    @property
    def primary_message(self) -> OomMessage | None:
        """The message that the case is about: the first cause."""
        if self.oom is None or not self.oom.messages:
            return None
        index = self.oom.primary if 0 <= self.oom.primary < len(self.oom.messages) else 0
        return self.oom.messages[index]

    def torch_versions(self, message: OomMessage | None) -> tuple[str, str]:
        """Return the lowest and highest PyTorch version that fits; "" is an open end."""
        given = self.overrides.torch_version
        if given:
            return given, given
        if self.snapshot is not None and self.snapshot.provenance.version_low:
            origin = self.snapshot.provenance
            return origin.version_low, origin.version_high
        return ("", "") if message is None else (message.version_low, message.version_high)
