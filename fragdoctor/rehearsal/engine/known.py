"""Values on the GPU that are known: those that were copied there, and what follows from constants.

Tensors of a rehearsed GPU have no memory. But a counter, a scale, a list of lengths, or the flag
that ends a loop is small and comes from the CPU or from constants, and programs read it back. So do
tokens, masks and routes, which decide about shapes; so more integers and booleans are kept. A copy
of such memory is kept on the CPU and follows every operation that writes to it; the first one that
needs an unknown value, or is random, makes it unknown. Random integers are drawn. If some of many
are chosen by unknown values (experts for tokens, words of a vocabulary), the choices are assumed to
be even.

If the values are unknown, an upper limit on the nonzero elements can still be known: five, if five
were put at unknown places into zeros. That limits what a mask keeps.

Memory is known by its address. A Python object for the storage would count as one more owner, and
the autograd engine adds gradients in place only if there is no other owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch

from fragdoctor.rehearsal.engine.marks import in_backward

MOST_COPIED_BYTES: Final = 64 * 1024
"""The largest storage of floating-point numbers whose copied values are kept."""
MOST_COMPUTED: Final = 64
"""The most elements in a tensor of such numbers for which results are computed."""
MOST_WHOLE: Final = 2**20
"""The most integers or booleans in a tensor that are kept and computed with."""
MOST_KEPT: Final = 10_000
"""The most copies that are kept; the oldest are dropped first."""
MOST_KEPT_BYTES: Final = 256 * 2**20
"""The most bytes of these copies together."""
BUDGET: Final = 2**31
"""Elements that a rehearsal computes with, in a few seconds; after that only small tensors."""
_CPU: Final = torch.device("cpu")
# Operations where one operand can decide alone: the value that does (the result is the same).
_DECIDES: Final = {
    "bitwise_and": False, "logical_and": False, "__and__": False,
    "bitwise_or": True, "logical_or": True, "__or__": True,
}  # fmt: skip
# Parts of ``isfinite``, which recognize its operands: losses are assumed to be finite.
_OF_FINITE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "eq": lambda value, other: value is other,
    "ne": lambda _, other: isinstance(other, float) and math.isinf(other),
}
# Operations that choose some of many by value: which of their results holds the indices.
_CHOOSES: Final = {"topk": 1, "argmax": 0, "argmin": 0, "max": 1, "min": 1, "multinomial": 0}
_OVERWRITES: Final = frozenset({"fill_", "zero_"})
# Operations whose result is nonzero only where an operand is.
_ANY: Final = frozenset({"bitwise_or", "logical_or", "__or__", "cat"})
# Operations that write known values at known places: into zeros, they make a map of the choices.
_PUTS: Final = frozenset({"scatter", "scatter_"})
# Operations whose kernels track the values themselves or keep them: gradients are finite.
_BY_THEMSELVES: Final = frozenset(
    {"copy_", "set_", "resize_", "record_stream", "_amp_foreach_non_finite_check_and_unscale_"}
)


class _Rule:
    """What an operation does to values: which of its arguments it writes to."""

    def __init__(self, op: Any) -> None:
        arguments = op._schema.arguments
        name = op.overloadpacket.__name__
        written = [
            (i, a) for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write
        ]
        if name in _BY_THEMSELVES:
            written = []
        self.positions = tuple(i for i, a in written if not a.kwarg_only)
        self.names = tuple(a.name for _, a in written if a.kwarg_only)
        aliases = any(r.alias_info and not r.alias_info.is_write for r in op._schema.returns)
        self.draws = name == "random_"  # of integers: labels and tokens lie between two limits
        random = torch.Tag.nondeterministic_seeded in op.tags and not self.draws
        self.is_followed = not (
            aliases or random or name.startswith(("empty", "_foreach")) or name in _BY_THEMSELVES
        )
        self.chooses = _CHOOSES.get(name)
        self.puts = name in _PUTS
        self.parts = name == "_softmax"
        self.is_placed = name == "_index_put_impl_"
        self.is_any = name.removesuffix("_") in _ANY or name in _ANY
        self.zeroes = name in _OVERWRITES
        self.overwrites = self.zeroes or self.draws or bool(self.names)
        self.decides = _DECIDES.get(name)
        self.is_of_finite = _OF_FINITE.get(name)


_rule_of: Final = cache(_Rule)


class Known:
    """The known values, by GPU and address.

    Attributes:
        assume: called with an operation and what is assumed about its values.
    """

    def __init__(self) -> None:
        self.assume: Callable[[str, str], object] = lambda *_: None
        self._shadows: dict[tuple[int, int], torch.Tensor] = {}
        self._n_set: dict[tuple[int, int], int] = {}
        self._kept_bytes = 0
        self._n_computed = 0
        self._generator = torch.Generator(_CPU)  # the program's own is left as it is

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor on a GPU as a CPU tensor; None = unknown."""
        if not self._shadows or tensor.numel() > MOST_WHOLE:
            return None
        if not tensor.numel():  # nothing in it is unknown
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=_CPU)
        shadow = self._shadows.get(_key(tensor))
        if shadow is None:
            return None
        offset, size, strides = tensor.storage_offset(), tensor.shape, tensor.stride()
        itemsize = tensor.dtype.itemsize
        if offset * itemsize + _extent(size, strides) * itemsize > shadow.numel():
            return None
        found = torch.empty(0, dtype=tensor.dtype, device=_CPU)
        found.set_(shadow.untyped_storage(), offset, size, strides)
        found = found.conj() if tensor.is_conj() else found  # views that only note it
        return torch._neg_view(found) if tensor.is_neg() else found

    def forget(self, tensor: torch.Tensor) -> None:
        """Make the values of a tensor's memory unknown."""
        if (self._shadows or self._n_set) and tensor.numel() <= MOST_WHOLE:
            self._drop(_key(tensor))

    def is_new(self, device: int, address: int) -> None:
        """Note that memory at an address was newly allocated, or that its storage has moved."""
        if self._shadows or self._n_set:
            self._drop((device, address))

    def _drop(self, key: tuple[int, int]) -> None:
        self._n_set.pop(key, None)
        gone = self._shadows.pop(key, None)
        if gone is not None:
            self._kept_bytes -= gone.numel()

    def copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Track a copy from the CPU or a GPU to a GPU."""
        if target.numel() > MOST_WHOLE or not target.numel():
            return
        values = self.of(source) if source.is_cuda else source
        if values is None:
            n_set = self.most_set(source) if _is_whole(target) else None
            self.forget(target)
            if n_set is not None:
                self._limit(target, n_set)
            return
        most = max(MOST_COPIED_BYTES, _most(target) * target.element_size())
        place = self._place(target, overwrites=True, most_bytes=most)
        if place is None:
            self.forget(target)
        else:
            place.copy_(values)

    def serve(
        self, op: Any, handler: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operation with its handler, and track its values."""
        rule = _rule_of(op)
        n_set = self._n_set_by(rule, args) if rule.is_any or rule.is_placed else None
        result = handler(op, *args, **kwargs)
        if rule.puts and self._put(op, rule, _named(args, kwargs), result):
            return result
        if rule.is_of_finite and len(args) == 2 and rule.is_of_finite(*args) and _is_small(result):
            self._settle(result, value=True)
        elif rule.positions or rule.names:
            self._write(op, rule, _named(args, kwargs))
        elif rule.is_followed and self._shadows and _is_small(result):
            self._compute(op, rule, _named(args, kwargs), result)
        if rule.chooses is not None:
            self._choose(rule.chooses, args, result)
        if n_set is not None:
            self._limit(result, n_set)
        if rule.parts and result.numel():
            self._n_set[_key(result)] = result.shape[args[1]]
        return result

    def n_parts(self, tensor: torch.Tensor) -> int | None:
        """Return how many probabilities in a tensor add up to 1, or None if it has none."""
        return self._n_set.get(_key(tensor)) if tensor.is_floating_point() else None

    def most_set(self, tensor: torch.Tensor) -> int | None:
        """Return how many elements of a tensor can be nonzero at most, or None if unknown."""
        if not (self._shadows or self._n_set) or tensor.is_floating_point():
            return None
        values = self.of(tensor) if tensor.is_cuda else tensor
        if values is not None:
            return int(values.count_nonzero())
        n_set = self._n_set.get(_key(tensor))
        return None if n_set is None else min(n_set, tensor.numel())

    def _limit(self, result: torch.Tensor, n_set: int) -> None:
        if self.of(result) is None and result.numel() <= MOST_WHOLE:
            self._n_set[_key(result)] = n_set

    def _n_set_by(self, rule: _Rule, args: tuple[Any, ...]) -> int | None:
        """Return how many elements can be nonzero at most after an operation; None = any number."""
        if not (self._shadows or self._n_set):
            return None
        if rule.is_placed:
            n_set = self.most_set(args[0])
            return None if n_set is None else n_set + _n_placed(*args[:2])
        counts = [self.most_set(tensor) for tensor in _tensors(args)]
        known = [n for n in counts if n is not None]
        return sum(known) if len(known) == len(counts) else None

    def _choose(self, place: int, args: tuple[Any, ...], result: Any) -> None:
        """Assume that choices among unknown values are even."""
        indices = result[place] if isinstance(result, tuple) else result
        scores = args[0]
        if not isinstance(indices, torch.Tensor) or not isinstance(scores, torch.Tensor):
            return
        n, dim = indices.numel(), scores.dim() - 1
        is_of_last = scores.dim() > 1 and scores.shape[:-1] == (
            indices.shape[:dim] if indices.dim() == scores.dim() else indices.shape
        )
        if not is_of_last or not 0 < n <= MOST_WHOLE or self.of(indices) is not None:
            return
        found = self._place(indices, overwrites=True)
        if found is None:
            return
        n_of = scores.shape[-1]
        each = torch.arange(n, device=_CPU)
        if n < n_of:  # the first and the last of a vocabulary are seldom words
            found.copy_(((2 * each + 1) * n_of // (2 * n)).view(indices.shape))
            self.assume("choice", f"{n} different ones of {n_of} are chosen")
        else:
            each += each // n_of  # shifted in each turn: first choices are even, and second ones
            found.copy_((each % n_of).view(indices.shape))
            self.assume("choice", f"all {n_of} are chosen equally often")

    def _put(self, op: Any, rule: _Rule, named: dict[Any, Any], result: Any) -> bool:
        """Track values put among zeros, where unknown numbers with fractions are taken for 1/2."""
        into, put = named[0], named.get(3)
        kept = self.of(into)  # of many zeros, only their number is
        is_zero = self._n_set.get(_key(into)) == 0 if kept is None else not kept.any()
        if not (self._shadows and is_zero):
            return False
        others = {k: v for k, v in named.items() if k not in {0, *rule.names}}
        if not in_backward() and isinstance(put, torch.Tensor) and put.is_floating_point():
            others[3] = 0.5 if self.of(put) is None else put
        given = self._given(others, result)
        if given is None:
            return False
        if others.get(3) is not put:
            self.assume("scatter", "what is put among zeros is not 0")
        made = _run(op, {0: torch.zeros(into.shape, dtype=into.dtype, device=_CPU), **given})
        most = MOST_WHOLE * result.element_size()
        place = self._place(result, overwrites=True, most_bytes=most)
        if place is not None:
            place.copy_(made)
        return place is not None

    def _write(self, op: Any, rule: _Rule, named: dict[Any, Any]) -> None:
        keys = [key for key in (*rule.positions, *rule.names) if key in named]
        written = [named[key] for key in keys]
        targets = [t for t in _tensors(written) if t.is_cuda and t.numel() <= MOST_WHOLE]
        if not targets or self._is_decided(rule, named, targets[0]):
            return
        is_each = len(targets) == len(written) and rule.is_followed
        if is_each and (self._shadows or rule.overwrites):
            drawn = {"generator": self._generator} if rule.draws else {}
            named = {k: v for k, v in (named | drawn).items() if k not in keys}
            given = self._given(named, *targets)
            # One number for all of a tensor, such as a mask of ones, is kept as copies are.
            most = MOST_COPIED_BYTES if rule.zeroes and targets[0].is_floating_point() else None
            places = [
                t.numel() and self._place(t, overwrites=rule.overwrites, most_bytes=most)
                for t in targets
            ]
            if given is not None and all(isinstance(p, torch.Tensor) for p in places):
                try:
                    _run(op, given | dict(zip(keys, places, strict=True)))
                except Exception:  # noqa: BLE001 - the values are then unknown
                    for target in targets:
                        self.forget(target)
                return
        for target in targets:
            self.forget(target)
        value = named.get(1, 0)  # ``fill_``, or ``zero_``
        is_zero = isinstance(value, bool | int | float) and not value
        if rule.zeroes and is_zero and _is_whole(targets[0]):
            self._n_set[_key(targets[0])] = 0

    def _compute(self, op: Any, rule: _Rule, named: dict[Any, Any], result: Any) -> None:
        given = None if self._is_decided(rule, named, result) else self._given(named, result)
        if given is None:
            return
        try:
            values = _run(op, given)
        except Exception:  # noqa: BLE001 - the value is then unknown
            return
        is_one = isinstance(result, torch.Tensor)
        for made, target in [(values, result)] if is_one else zip(values, result, strict=True):
            if made.shape == target.shape and made.dtype == target.dtype and target.numel():
                place = self._place(target, overwrites=True)
                if place is not None:
                    place.copy_(made)

    def _is_decided(self, rule: _Rule, named: dict[Any, Any], result: torch.Tensor) -> bool:
        """Return whether one operand alone decides about all of a result, which is then known."""
        value = rule.decides
        if value is None:
            return False
        operands = (operand for key, operand in named.items() if key not in rule.names)
        for operand in operands:
            if isinstance(operand, torch.Tensor) and operand.numel() == result.numel():
                known = self.of(operand) if operand.is_cuda else operand
                decides = known is not None and (known.all() if value else not known.any())
                if decides and (not value or operand.dtype == result.dtype == torch.bool):
                    return self._settle(result, value=value)
        return False

    def _settle(self, result: torch.Tensor, *, value: bool) -> bool:
        """Make all values of a result known, if there is room to keep them."""
        place = self._place(result, overwrites=True)
        if place is not None:
            place.fill_(value)
        return place is not None

    def _given(self, named: dict[Any, Any], *results: Any) -> dict[Any, Any] | None:
        """Return arguments with known values for GPU tensors; None if one is unknown."""
        tensors = list(_tensors([*named.values()]))
        most = max(map(_most, _tensors(results)), default=0)  # for a mask, all that is compared
        n = 0
        for tensor in tensors:
            if tensor.numel() > max(most, _most(tensor)):
                return None
            n += tensor.numel()
        if n > MOST_COMPUTED and self._n_computed > BUDGET:
            return None
        known: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            values = self.of(tensor) if tensor.is_cuda else tensor
            if values is None:
                return None
            known[id(tensor)] = values
        self._n_computed += n

        def converted(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return known[id(value)]
            if isinstance(value, list | tuple):
                return [converted(item) for item in value]
            return _CPU if isinstance(value, torch.device) else value

        return {name: converted(value) for name, value in named.items()}

    def _place(
        self, tensor: torch.Tensor, *, overwrites: bool, most_bytes: int | None = None
    ) -> torch.Tensor | None:
        """Return where a tensor's values are kept; a new place if all of it is written."""
        found = self.of(tensor)
        if found is not None or not overwrites:
            return found
        n_bytes = tensor.numel() * tensor.element_size()
        most = _most(tensor) * tensor.element_size() if most_bytes is None else most_bytes
        if not _is_whole(tensor) or n_bytes > most:
            return None
        self._drop(_key(tensor))
        while self._shadows and (
            len(self._shadows) >= MOST_KEPT or self._kept_bytes + n_bytes > MOST_KEPT_BYTES
        ):
            self._drop(next(iter(self._shadows)))
        self._shadows[_key(tensor)] = torch.empty(n_bytes, dtype=torch.uint8, device=_CPU)
        self._kept_bytes += n_bytes
        return self.of(tensor)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
    """Return arguments by position or name."""
    return {**dict(enumerate(args)), **kwargs}


def _run(op: Any, named: dict[Any, Any]) -> Any:
    """Run an operation with arguments by position or name."""
    args = [named[key] for key in sorted(key for key in named if isinstance(key, int))]
    kwargs = {key: value for key, value in named.items() if isinstance(key, str)}
    try:
        return op(*args, **kwargs)
    except RuntimeError:  # a number for a tensor: another overload takes it
        return op.overloadpacket(*args, **kwargs)


def _key(tensor: torch.Tensor) -> tuple[int, int]:
    begin: int = tensor.data_ptr() - int(tensor.storage_offset()) * tensor.dtype.itemsize
    return tensor.get_device(), begin


def _n_placed(target: torch.Tensor, places: Sequence[torch.Tensor | None]) -> int:
    """Return how many elements are written by an index of some dimensions, or of all."""
    given = [place for place in places if place is not None]
    if any(place.dtype in (torch.bool, torch.uint8) for place in given):
        return target.numel()
    n = torch.broadcast_shapes(*(place.shape for place in given)).numel()
    shape = [n for n, place in zip(target.shape, places, strict=False) if place is not None]
    return int(n) * (target.numel() // max(1, math.prod(shape)))


def _extent(size: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements a tensor spans."""
    return 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True))


def _is_whole(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers all of its memory, without gaps."""
    extent = _extent(tensor.shape, tensor.stride())
    return not tensor.storage_offset() and tensor.numel() == extent


def _most(tensor: torch.Tensor) -> int:
    """Return the most elements of the tensor's dtype with which results are computed."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return MOST_WHOLE if is_whole else MOST_COMPUTED


def _is_small(result: Any) -> bool:
    if isinstance(result, tuple):
        return any(_is_small(part) for part in result) and all(
            isinstance(part, torch.Tensor) for part in result
        )
    return (
        isinstance(result, torch.Tensor)
        and result.is_cuda
        and result.layout is torch.strided
        and 0 < result.numel() <= _most(result)
    )


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
