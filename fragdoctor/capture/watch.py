"""``fragdoctor.watch``: the memory of each step as a row of a table."""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, Self, TextIO, TypeVar

from fragdoctor.capture.record import need_cuda
from fragdoctor.errors import ConfigError
from fragdoctor.units import format_count, format_size, plural

T = TypeVar("T")

WARM_UP_STEPS: Final = 2
"""Optimizer state and library workspaces appear in the first steps: growth is judged after them."""

HEADINGS: Final = ("step", "allocated", "peak", "reserved", "stranded", "retries")
_WIDTHS: Final = (7, 11, 11, 11, 11, 8)
_CONF_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Figures(NamedTuple):
    """Memory at the end of a step, in bytes.

    ``peak`` is the peak of allocated memory since the program reset it;
    ``stranded`` is ``inactive_split_bytes``: free memory in segments that still hold a live block,
    or None if the allocator does not count it; ``retries`` counts flushes of the cache so far;
    ``headroom`` is what the driver still had free and PyTorch had reserved, or what a memory
    fraction allows if that is less, minus the peak.
    """

    allocated: int
    peak: int
    reserved: int
    stranded: int | None
    retries: int
    headroom: int | None = None


def read_figures(torch: Any, device: int | None) -> Figures:
    """Return the current figures; reading them neither waits for the GPU nor allocates.

    ``device`` is the number of the GPU; None means the current one.
    """
    stats = torch.cuda.memory_stats(device)
    peak = _stat(stats, "allocated_bytes.all.peak")
    reserved = _stat(stats, "reserved_bytes.all.current")
    text = ",".join(os.environ.get(name, "") for name in _CONF_VARIABLES).replace(" ", "").lower()
    is_expandable = "expandable_segments:true" in text  # then PyTorch counts no inactive splits
    return Figures(
        _stat(stats, "allocated_bytes.all.current"),
        peak,
        reserved,
        None if is_expandable else _stat(stats, "inactive_split_bytes.all.current"),
        _stat(stats, "num_alloc_retries"),
        _headroom(torch, device, reserved, peak),
    )


def _headroom(torch: Any, device: int | None, reserved: int, peak: int) -> int | None:
    try:
        free, total = torch.cuda.mem_get_info(device)
    except (AttributeError, RuntimeError):  # an old PyTorch, or a driver that does not say
        return None
    fraction_of = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    allowed = total if fraction_of is None else int(fraction_of(device) * total)
    return max(0, min(int(free) + reserved, allowed) - peak)


def exposition(figures: Figures, n_steps: int, labels: Mapping[str, str]) -> str:
    """Return figures as OpenMetrics text, which Prometheus and OpenTelemetry's collector read.

    The figures are of one GPU; ``labels`` are added to every sample, with plain words as names.
    """
    inside = ",".join(f'{name}="{_label(value)}"' for name, value in labels.items())
    samples = [
        ("allocated_bytes", figures.allocated, "Memory of live tensors at the end of the step."),
        ("peak_allocated_bytes", figures.peak, "Peak of allocated memory since it was reset."),
        ("reserved_bytes", figures.reserved, "Memory that PyTorch has reserved from the driver."),
        ("stranded_free_bytes", figures.stranded, "Free memory in segments with a live block."),
        ("headroom_bytes", figures.headroom, "What could still be allocated at the peak."),
        ("alloc_retries", figures.retries, "Allocations that had to flush the cache first."),
        ("steps", n_steps, "Steps that were watched."),
    ]
    lines = []
    for name, value, text in samples:
        if value is not None:
            full = f"fragdoctor_gpu_memory_{name}"
            kind, end = ("gauge", "") if name.endswith("_bytes") else ("counter", "_total")
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
            lines.append(f"{full}{end}{{{inside}}} {value}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def _label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def steady_growth(held: Sequence[int]) -> float | None:
    """Return the growth per step after the warm-up; 0 if it is not steady, None if too few steps.

    ``held`` are the allocated bytes at the ends of steps. This is the single test of growth.
    """
    from fragdoctor.model.trend import MIN_POINTS, trend_of  # numpy is only for this

    if len(held) < WARM_UP_STEPS - 1 + MIN_POINTS:
        return None
    trend = trend_of(held[WARM_UP_STEPS - 1 :])
    return max(0.0, trend.slope) if trend.goes_on else 0.0


class watch(Generic[T]):  # noqa: N801 - used as a verb: for batch in fragdoctor.watch(loader)
    """Print a table with the GPU memory at the end of each step.

        for batch in fragdoctor.watch(loader):
            train_step(batch)

        with fragdoctor.watch(every=10) as steps:
            while training:
                train_step()
                steps.step()

    The figures are PyTorch's own counters: reading them neither waits for the GPU nor allocates.

    Args:
        items: what to iterate over; None for use as a block with ``step()``.
        every: print every n-th step.
        device: number of the GPU; None means the current one.
        file: where to print; None means standard output.
        metrics: a file that is rewritten after each step with the figures as OpenMetrics text, for
            the textfile collector of Prometheus' node_exporter or OpenTelemetry's collector;
            ``{rank}`` in its name becomes the rank. None writes none.

    Raises:
        ConfigError: if a value is wrong, or PyTorch or CUDA is missing.
    """

    def __init__(
        self,
        items: Iterable[T] | None = None,
        *,
        every: int = 1,
        device: int | None = None,
        file: TextIO | None = None,
        metrics: str | os.PathLike[str] | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(f"every is {every!r}.", hint="Give a number of steps.")
        self._items = items
        self._every = every
        self._device = device
        self._file = file
        self._metrics: Path | None = None
        if metrics is not None:
            self._metrics = Path(os.fspath(metrics).replace("{rank}", os.environ.get("RANK", "0")))
            if not self._metrics.parent.is_dir():
                raise ConfigError(f"{self._metrics.parent} is no folder.", hint="Create it first.")
        self._torch = need_cuda("Watching")
        self._held = array("q")
        self._is_open = False

    def __iter__(self) -> Iterator[T]:
        if self._items is None:
            raise ConfigError(
                "watch() was given nothing to iterate over.",
                hint="Write: for batch in fragdoctor.watch(loader)",
            )
        with self:
            for item in self._items:
                yield item
                self.step()

    def __len__(self) -> int:
        if not isinstance(self._items, Sized):
            raise TypeError("the watched object has no length")
        return len(self._items)

    def __enter__(self) -> Self:
        if not self._is_open:
            self._is_open = True
            self._held = array("q")
            self._print(_row(HEADINGS))
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            self._is_open = False
            self._print(self.summary())

    def step(self) -> Figures:
        """End a step: print its row if it is one of every n, and return its figures."""
        figures = read_figures(self._torch, self._device)
        self._held.append(figures.allocated)
        n = len(self._held)
        if n % self._every == 0 or n == 1:
            sizes = [format_size(v) for v in figures[:3]]
            stranded = "-" if figures.stranded is None else format_size(figures.stranded)
            self._print(_row((format_count(n), *sizes, stranded, format_count(figures.retries))))
        self._export(figures)
        return figures

    def summary(self) -> str:
        """Return one line on whether allocated memory grows."""
        steps = plural(len(self._held), "step")
        rate = steady_growth(self._held)
        if rate is None:
            return f"{steps}: too few to tell whether memory grows."
        after = f"after step {WARM_UP_STEPS}"
        if rate == 0.0:
            return f"{steps}: allocated memory does not grow steadily {after}."
        return f"{steps}: allocated memory grows by {format_size(round(rate))} a step {after}."

    def _export(self, figures: Figures) -> None:
        """Replace the metrics file as a whole: readers never see half of it."""
        if self._metrics is None:
            return
        labels = {"rank": os.environ.get("RANK", "0")}
        if self._device is not None:
            labels["device"] = str(self._device)
        temporary = self._metrics.with_name(f".{self._metrics.name}.{os.getpid()}.tmp")
        text = exposition(figures, len(self._held), labels)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self._metrics)
        except OSError as e:  # monitoring must not end a training run
            print(f"fragdoctor: no metrics: {e}", file=sys.stderr)
            self._metrics = None

    def _print(self, line: str) -> None:
        print(line, file=self._file or sys.stdout, flush=True)


def _stat(stats: Any, name: str) -> int:
    return int(stats.get(name, 0))


def _row(cells: tuple[str, ...]) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
