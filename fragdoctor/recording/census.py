"""A census: every live CUDA storage that Python knows, and the name of what holds it.

It allocates nothing on a GPU, imports nothing and calls nothing of the program. Parameters and
buffers are named by their module, optimizer state by its optimizer, gradients by the module of
their parameters; every other tensor by the shortest way from a name of the program; storages that
only the autograd graph keeps by the tensor whose graph it is; and storages that no name leads to by
the reference cycle.
"""

from __future__ import annotations

import contextlib
import gc
import time
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from .autograd_graph import GraphReader
from .cuda_storages import CudaStorages
from .module_names import ModuleNames, common_path, path_below
from .object_climb import Climb
from .object_names import class_name
from .object_owners import Keeper, Naming
from .object_search import ObjectSearch, class_is, dict_of

FORMAT = "fragdoctor-census"
VERSION = 1
LIMIT_S = 0.5
_SHARES = (0.5, 0.35, 0.45, 0.75)
"""Shares of the time: when sorting out objects, reading tensors, following graphs, and looking for
names must each be done."""

_LEAST_SHARE = 0.1
"""Share of the time that reading gets if sorting out took longer."""

_MAX_STORAGES = 200_000
_MAX_OWNERS = 2_000
_MOST_CLIMBED = 6
_LISTINGS = 6
"""A climb takes at least as long as listing all objects this many times."""

_WORTH_CLIMBING = 0.02
"""Share of all bytes: gradients on their way through C++ have no name, and are small."""


_Claim = tuple[Any, str, list[int]]
"""A module or an optimizer, how it holds storages, and their addresses."""


def take_census(
    torch: Any, step: int = 0, limit_s: float = LIMIT_S, modules: ModuleNames | None = None
) -> dict[str, Any]:
    """Return who holds this process's CUDA storages now, and for which of ``modules``.

    It takes at most ``limit_s`` of one core, within a few hundredths: beyond that, tensors are
    sampled, and unreached storages have no owner. The collector, which may run its code, is paused.

    The census has the form of its file in a bundle, with arrays as its columns: ``time_us`` on the
    clock of a snapshot's events; ``seconds`` that it took; ``step``, optimizer runs before it (0 =
    none, or not counted); ``is_complete``, whether everything was examined in time; ``owners`` who
    hold anything; for each storage ``devices``, ``addresses``, ``sizes`` and ``holders`` (an index
    into ``owners``, or -1 if no name leads to it); ``paths`` of modules, if allocations are noted
    with them too; and for each storage in ``parts`` the index in ``paths`` of the module whose
    parameter, gradient or optimizer state it is, or -1.
    """
    started = time.thread_time()
    time_us = time.time_ns() // 1000
    with without_collector(), torch._C.DisableTorchFunction():
        taking = _Taking(torch, started, limit_s, modules)
        taking.take()
    sizes, devices, held = taking.storages.sizes, taking.storages.devices, taking.held
    rows = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_MAX_STORAGES]
    paths = {path: at for at, path in enumerate(dict.fromkeys(taking.parts.values())) if path}
    return {
        "time_us": time_us,
        "seconds": round(time.thread_time() - started, 4),
        "step": step,
        "is_complete": taking.is_complete and taking.storages.is_complete,
        "owners": [owner._asdict() for owner in taking.owners],
        "devices": array("q", [devices[address] for address in rows]),
        "addresses": array("Q", rows),
        "sizes": array("q", [sizes[address] for address in rows]),
        "holders": array("q", [held.get(address, -1) for address in rows]),
        "paths": [*paths],
        "parts": array("q", [paths.get(taking.parts.get(address, ""), -1) for address in rows]),
    }


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Keep the collector from walking through what is made in a block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Rest(NamedTuple):
    """Tensors that belong to no module and no optimizer, by their IDs, with each one's storage."""

    tensors: dict[int, Any]
    addresses: dict[int, int]
    with_graph: list[Any]
    with_gradient: list[tuple[int, int]]


class _Taking:
    """One census in the making: owners claim storages, and the first claim counts.

    Objects are reached through the locals of frames, so no list of all objects may be alive then;
    references tell whether anybody else has a frame's dict of locals (``frame_locals``).
    """

    def __init__(
        self, torch: Any, started: float, limit_s: float, modules: ModuleNames | None
    ) -> None:
        self._torch = torch
        self._modules = modules
        self._path_of: dict[int, str] = {}
        self.parts: dict[int, str] = {}
        self._find_until, self._read_until, self._graph_until, self._search_until = (
            started + share * limit_s for share in _SHARES
        )
        self._deadline = started + limit_s
        self._least_s = _LEAST_SHARE * limit_s
        self._module = torch.nn.Module
        self.storages = CudaStorages(torch)
        self.owners: list[Keeper] = []
        self.held: dict[int, int] = {}
        self.is_complete = True
        self._owner_places: dict[Keeper, int] = {}

    def take(self) -> None:
        """Find everything and name it."""
        found = self.storages.find(self._find_until)
        claims = [*self._of_modules(found.modules), *self._of_optimizers(found.optimizers)]
        claimed = {address for _, _, addresses in claims for address in addresses}
        self._read_until = max(self._read_until, time.thread_time() + self._least_s)
        rest = self._read(found.tensors, claimed)
        self._graph_until = max(self._graph_until, time.thread_time() + self._least_s)
        graphs = self._read_graphs(rest.with_graph, claimed)
        kept = {address for addresses in graphs.kept.values() for address in addresses}
        # Whatever a graph keeps has an owner in any case; the others are searched for to the end.
        needed = {number for number, address in rest.addresses.items() if address not in kept}
        needed |= {id(head) for head, _, _ in claims} | graphs.outputs()
        hidden = {id(found.tensors), id(found.modules), id(found.optimizers), id(rest.tensors)}
        hidden |= {id(rest.with_graph), id(claims)}
        search = ObjectSearch(needed, {*rest.addresses, *graphs.heads}, hidden, self._search_until)
        search.run()
        self.is_complete &= search.is_complete
        naming = Naming(search, self._module)
        for head, kind, addresses in claims:
            place = search.places.get(id(head))
            owner = Keeper("", kind) if place is None else naming.owner_at(place)
            name = f"{owner.name}.state" if owner.name and kind == "optimizer" else owner.name
            named = owner._replace(name=name, kind=kind, class_name=class_name(type(head)))
            self._claim(named, addresses)
        sizes = self.storages.sizes
        places = ((search.places.get(number), a) for number, a in rest.addresses.items())
        leaves = [(place, a, sizes[a]) for place, a in places if place is not None]
        for owner, addresses in naming.owners_of(leaves):
            self._claim(owner, addresses)
        self._name_graphs(search, naming, graphs)
        for number, gradient in rest.with_gradient:
            if number in search.places:
                owner = naming.owner_at(search.places[number])
                self._claim(owner._replace(name=f"{owner.name}.grad"), [gradient])
        self._name_unreached(search, rest, hidden)

    def _read(self, tensors: list[Any], claimed: set[int]) -> _Rest:
        """Read as many tensors as there is time for."""
        rest = _Rest({}, {}, [], [])
        storages = self.storages
        for i, tensor in enumerate(tensors):
            if i % 512 == 511 and time.thread_time() > self._read_until:
                self.is_complete = False
                break
            address = storages.address(tensor)
            if not address or address in claimed:
                continue
            rest.tensors[id(tensor)] = tensor
            rest.addresses[id(tensor)] = address
            if storages.has_graph(tensor):
                rest.with_graph.append(tensor)
            else:
                gradient = storages.gradient(tensor)
                if gradient:
                    rest.with_gradient.append((id(tensor), gradient))
        return rest

    # ---- modules and optimizers -----------------------------------------------------------------

    def _of_modules(self, modules: list[Any]) -> list[_Claim]:
        """Return the outermost modules with their parameters, and with their gradients."""
        names = {id(m): dict_of(m) or {} for m in modules}
        inner = {id(m) for n in names.values() for m in _values(n.get("_modules"))}
        found: list[_Claim] = []
        seen: set[int] = set()
        for top in (m for m in modules if id(m) not in inner):
            parameters: list[Any] = []
            todo = [(top, "" if self._modules is None else self._modules.name_of(top))]
            while todo:
                one, path = todo.pop()
                if id(one) not in seen and id(one) in names:
                    seen.add(id(one))
                    own = _values(names[id(one)].get("_parameters"))
                    own += _values(names[id(one)].get("_buffers"))
                    parameters += own
                    for tensor in self.storages.tensors(own) if path else ():
                        # They and their gradients are this module's; the first of several counts.
                        first = self._path_of.setdefault(id(tensor), path)
                        kept = self.storages.addresses([tensor])
                        for address in (*kept, *self._gradients([tensor])):
                            self._is_part(address, first)
                    inner_modules = _items(names[id(one)].get("_modules"))
                    todo += [
                        (module, path and path_below(path, [name]))
                        for name, module in reversed(inner_modules)
                    ]
            found.append((top, "parameters", self.storages.addresses(parameters)))
            found.append((top, "gradients", self._gradients(parameters)))
        return [claim for claim in found if claim[2]]

    def _is_part(self, address: int, path: str) -> None:
        """Note whose storage it is; if several modules have it, use the module they are all in."""
        before = self.parts.setdefault(address, path)
        if before != path:
            self.parts[address] = common_path(before, path)

    def _gradients(self, parameters: list[Any]) -> list[int]:
        tensors = self.storages.tensors(parameters)
        leaves = (t for t in tensors if not self.storages.has_graph(t))
        return [address for t in leaves if (address := self.storages.gradient(t))]

    def _of_optimizers(self, optimizers: list[Any]) -> list[_Claim]:
        found: list[_Claim] = []
        for one in optimizers:
            addresses: list[int] = []
            for parameter, state in _items((dict_of(one) or {}).get("state")):
                kept = self.storages.addresses(_values(state))
                addresses += kept
                if id(parameter) in self._path_of:
                    for address in kept:
                        self._is_part(address, self._path_of[id(parameter)])
            found.append((one, "optimizer", addresses))
        return [claim for claim in found if claim[2]]

    # ---- graphs, cycles -------------------------------------------------------------------------

    def _read_graphs(self, tensors: list[Any], claimed: set[int]) -> GraphReader:
        """Read what graphs keep that has no owner yet."""

        def unclaimed(values: Iterator[Any]) -> list[int]:
            return [a for a in self.storages.addresses(values) if a not in claimed]

        reader = GraphReader(self._torch, self._graph_until, unclaimed)
        # Autograd uses one thread per GPU; the one that calls here is waiting, but others may take
        # graphs apart while they are being read.
        node = getattr(self._torch._C, "_current_autograd_node", None)
        in_backward = node is not None and node() is not None
        if not in_backward or self._torch.cuda.device_count() <= 1:
            for tensor in tensors:
                reader.read(tensor)
        self.is_complete &= reader.is_complete
        return reader

    def _name_graphs(self, search: ObjectSearch, naming: Naming, graphs: GraphReader) -> None:
        """Claim what only autograd graphs keep, for the tensors whose graphs they are."""
        heads = graphs.heads.items()
        placed = sorted((search.places[t], n) for t, n in heads if t in search.places)
        seen: set[int] = set()
        holders: dict[int, list[tuple[int, list[int]]]] = {}
        for place, node in placed:
            kept = [a for a in graphs.kept_from(node, seen) if a not in self.held]
            if kept:
                holders.setdefault(naming.direct_container(place), []).append((place, kept))
        for at, members in holders.items():
            owner = naming.owner_at(at if len(members) > 1 else members[0][0])
            owner = owner._replace(kind="graph", n_items=len(members))
            for _, kept in members:
                self._claim(owner, kept)

    def _name_unreached(self, search: ObjectSearch, rest: _Rest, hidden: set[int]) -> None:
        """Claim what no user's name leads to: for a cycle, or for a name of a library.

        The largest storages are traced; storages that hang on other instances of the classes of a
        cycle are found from these.
        """
        sizes = self.storages.sizes
        left = [number for number, a in rest.addresses.items() if a not in self.held]
        n_left = sum(sizes[rest.addresses[number]] for number in left)
        if n_left <= _WORTH_CLIMBING * sum(sizes.values()):
            return
        if time.thread_time() + _LISTINGS * self.storages.listing_s > self._deadline:
            self.is_complete = False
            return
        left.sort(key=lambda number: -sizes[rest.addresses[number]])
        climb = Climb(hidden, search.places, self._deadline, self.storages.listing_s)
        for number in left[:_MOST_CLIMBED]:
            if rest.addresses[number] in self.held:
                continue
            found = climb.holder(rest.tensors[number])
            if found is not None:
                name, classes = found
                owner = Keeper(name, "cycle" if classes else "tensor", len(classes))
                below = climb.below(classes, rest.addresses)
                self._claim(owner, [rest.addresses[n] for n in (number, *below)])
        climb.forget()
        self.is_complete &= climb.is_complete

    def _claim(self, owner: Keeper, addresses: list[int]) -> None:
        """Give an owner those storages that have none yet."""
        fresh = [a for a in addresses if a not in self.held]
        if not fresh:
            return
        place = self._owner_places.get(owner)
        if place is None and len(self.owners) < _MAX_OWNERS:
            place = self._owner_places[owner] = len(self.owners)
            self.owners.append(owner)
        for address in fresh:
            self.held[address] = -1 if place is None else place


def _items(names: Any) -> list[tuple[Any, Any]]:
    """Return the items of one of the program's dicts, or [] for anything else."""
    return list(dict.items(names)) if class_is(type(names), dict) else []


def _values(names: Any) -> list[Any]:
    """Return the values of one of the program's dicts, or [] for anything else."""
    return list(dict.values(names)) if class_is(type(names), dict) else []
