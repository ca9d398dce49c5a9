"""What an entry of a file becomes: the types that the tables of all formats are made of.

A *fact* is what an entry says about the run, under one name for all formats. Most facts are
parameters of the command; ``resolve`` derives parameters from the others:

* ``weights``: dtype that the weights are loaded in (``fp32``, ``bf16``, ``fp16``, ``auto``),
  ``mixed``: dtype of mixed precision, ``quantised``: dtype of a frozen quantized base;
* ``engine``: ``deepspeed`` or ``fsdp``, ``stage``: what it shards (ZeRO 0 to 3);
* ``n_gpus``, ``gpus_per_node``, ``n_nodes``, ``shard_degree``: how many GPUs share the run;
* ``adapter``: ``lora`` or ``none``, ``rank``, ``targets``;
* ``logits``: how the loss gets the logits (``fused``, ``chunked``);
* ``offload_optimizer``, ``offload_parameters``, ``offload_activations``: True.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec import Struct, field

from fragdoctor.estimation.recipes.documents import Entries
from fragdoctor.estimation.recipes.uncounted import may_matter, reason_of
from fragdoctor.estimation.recipes.values import (
    AUTO,
    Convert,
    UnsayableError,
    expandable,
    is_off,
    shown,
    when_on,
)
from fragdoctor.model.recipe import Bearing, UnusedEntry


class Becomes(NamedTuple):
    """The facts that an entry becomes, how its value is converted, and the program's default."""

    facts: Sequence[str]
    convert: Convert
    default: Any = None


def facts(*rows: tuple[str, Any, str] | tuple[str, Any, str, Any]) -> dict[str, Becomes]:
    """Return the rules in rows of facts, their meaning, and the entries that state them.

    The meaning is a conversion of the entry's value, or what the facts are if the entry is on. A
    fourth column is what the program takes if none of the entries is in the file.
    """
    return {
        key: Becomes(of.split(), meaning if callable(meaning) else when_on(meaning), *default[i:])
        for of, meaning, keys, *default in rows
        for i, key in enumerate(keys.split())  # the first one stands for the default
    }


ALLOCATOR_RULES: Final = facts(
    ("expandable_segments", expandable, "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF"),
)
"""Variables of the environment that any program obeys."""


class Fact(Struct, frozen=True):
    """What one entry says."""

    value: Any
    key: str
    text: str
    is_default: bool = False


class Reading(Struct):
    """What one file says.

    Attributes:
        source: the file's name as shown to people.
        facts: the facts by name.
        unsayable: facts that an honest figure needs but no option can state: the entry, and why.
        references: other files that it names or contains: entry -> its value.
        notes: sentences about what it leaves open.
    """

    source: str
    format: Format
    facts: dict[str, Fact] = field(default_factory=dict)
    unsayable: dict[str, tuple[Fact, str]] = field(default_factory=dict)
    unused: list[UnusedEntry] = field(default_factory=list)
    references: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def value(self, fact: str) -> Any:
        """Return the value of a fact, or None if the file does not state it."""
        return self.facts[fact].value if fact in self.facts else None

    def take(self, fact: str, value: Any, key: str, text: Any, *, is_default: bool = False) -> None:
        """Note a fact, unless the file has already stated it."""
        self.facts.setdefault(fact, Fact(value, shown(key), shown(text), is_default))

    def derive(self, fact: str, value: Any, of: Fact, text: str = "") -> None:
        """Note a fact that follows from another one."""
        self.take(fact, value, of.key, text or of.text, is_default=of.is_default)

    def default(self, fact: str, value: Any, key: str, text: Any = None) -> None:
        """Note the program's default for a fact; ``text`` is what to show, if not the value."""
        if fact not in self.unsayable:
            self.take(fact, value, key, value if text is None else text, is_default=True)

    def leave(self, key: str, value: Any, reason: str = "") -> None:
        """Note an entry that becomes nothing, and why if memory depends on it."""
        bearing = Bearing.MATTERS if reason else Bearing.NONE
        self.unused.append(UnusedEntry(shown(key), shown(value), bearing, reason))

    def drop(self, fact: str) -> Fact | None:
        """Remove and return a fact that becomes nothing; a default leaves no trace."""
        found = self.facts.pop(fact, None)
        if found is not None and not found.is_default:
            self.leave(found.key, found.text)
        return found

    def refine_optimizer(self, by: str, becomes: Mapping[Any, Any]) -> None:
        """Replace the optimizer by what another fact makes of it, and use that one up."""
        found, more = self.facts.get("optimizer"), self.facts.get(by)
        if found and more and more.value and found.value in becomes:
            del self.facts["optimizer"], self.facts[by]
            self.derive("optimizer", becomes[found.value], found, f"{found.text}, {by}")
        self.drop(by)


class Format(Struct, frozen=True):
    """A program's configuration.

    Attributes:
        title: title for people, such as ``Axolotl recipe``.
        signs: each one or several keys that only files of this program all have. Nested names are
            joined by dots.
        rules: what entries become. An entry inside ``sections`` is also found by its last name.
        sections: nested mappings whose entries may be in ``rules`` without the section's name.
        references: entries that may hold another configuration, or its path.
        complete: derives facts that no single entry states.
        is_launch: whether it describes how a run is started, not what is run.
    """

    title: str
    signs: Sequence[str]
    rules: Mapping[str, Becomes]
    sections: Sequence[str] = ()
    references: Sequence[str] = ()
    complete: Callable[[Reading, Entries], None] = lambda _reading, _entries: None
    is_launch: bool = False

    def rule_of(self, key: str) -> Becomes | None:
        """Return the rule for an entry, or None if it becomes nothing."""
        section, _, last = key.rpartition(".")
        found = self.rules.get(key) or (self.rules.get(last) if section in self.sections else None)
        return found or ALLOCATOR_RULES.get(last)


_DTYPE: Final = ("dtype", "--dtype KIND, as fragdoctor estimate --help lists them.")
DECISIVE: Final[Mapping[str, tuple[str, str]]] = {
    "optimizer": ("optimizer", "--optimizer adamw, or another that keeps as many states."),
    **dict.fromkeys(("quantised", "weights", "mixed"), _DTYPE),
    "adapter": ("lora", "--lora RANK, if adapters of about that size are trained."),
}
"""Facts without which there is no honest figure -> the option that can state them, and how."""


def flat(entries: Entries, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names; lists count as values."""
    found: dict[str, Any] = {}
    for key, value in entries.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def read(format_: Format, entries: Entries, source: str) -> Reading:
    """Return what a configuration says."""
    reading = Reading(source, format_)
    held = {key: entries[key] for key in format_.references if isinstance(entries.get(key), dict)}
    reading.references.update(held)
    given = flat({key: value for key, value in entries.items() if key not in held})
    for key, value in given.items():
        _read_entry(reading, key, value)
    for key, rule in reversed([*format_.rules.items()]):  # before shared rules, its own
        if rule.default is not None:
            reading.default(rule.facts[0], rule.convert(rule.default), key, rule.default)
    format_.complete(reading, given)
    return reading


def _read_entry(reading: Reading, key: str, value: Any) -> None:
    rule = reading.format.rule_of(key)
    if key in reading.format.references and isinstance(value, str) and not is_off(value):
        reading.references[key] = value
    elif rule is not None and value is not None:
        _read_fact(reading, rule, key, value)
    elif is_off(value) or value == AUTO:
        reading.leave(key, value)
    elif not (reason := reason_of(key)) and may_matter(key):
        reading.unused.append(UnusedEntry(shown(key), shown(value), Bearing.UNKNOWN))
    else:
        reading.leave(key, value, reason)


def _read_fact(reading: Reading, rule: Becomes, key: str, value: Any) -> None:
    fact = rule.facts[0]
    try:
        converted = rule.convert(value)
    except UnsayableError as e:
        if fact in DECISIVE:
            reading.unsayable.setdefault(fact, (Fact(None, key, shown(value)), str(e)))
        else:
            reading.leave(key, value, str(e))
        return
    before = reading.facts.get(fact)
    if converted is None or (before and before.value == converted):
        reading.leave(key, value)
    elif before is None:
        for each in rule.facts:
            reading.take(each, converted, key, value)
    else:
        reading.leave(key, value, f"contradicts {before.key}, which was used")
