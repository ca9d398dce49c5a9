"""A plausible transformer for a parameter count, and for whatever dimensions are given.

Decoders of the Llama kind keep hidden / layers near 128 from 1 billion parameters on (7B: 4096
and 32, 13B: 5120 and 40) and near 64 below (GPT-2: 768 and 12); the feed-forward layer takes what
is left.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Final

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.architectures import Dimensions, outside, parameters_of
from fragdoctor.frozen import frozen
from fragdoctor.model.workload import LayerSizes, ModelShape, Norm, shared
from fragdoctor.units import format_count

_COUNT: Final = re.compile(
    r"\s*([0-9]{1,20}(?:\.[0-9]{1,12})?(?:[eE]\+?[0-9]{1,2})?)"
    r"\s*([KMBTG]?)\s*",
                           re.ASCII | re.IGNORECASE)  # fmt: skip
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
MAX_PARAMETERS: Final = 10**14
DEFAULT_VOCAB: Final = 32_000
MIN_LAYERS: Final = 2
MAX_WIDTH: Final = 2**24
MAX_LAYERS: Final = 10_000


@frozen
class Overrides:
    """Dimensions given by hand; 0 and "" = not given."""

    vocab: int = 0
    n_layers: int = 0
    hidden: int = 0
    n_heads: int = 0
    n_kv_heads: int = 0
    ffn: int = 0
    positions: int = 0
    family: str = ""
    dropout: float | None = None

    @property
    def any_given(self) -> bool:
        """Whether a dimension was given."""
        return any((self.vocab, self.n_layers, self.hidden, self.n_heads, self.n_kv_heads,
                    self.ffn, self.positions))  # fmt: skip


def parse_count(text: str) -> int:
    """Return the number that ``7B``, ``350M`` or ``1.3e9`` means.

    Raises:
        ConfigError: it is no count, or none of a model.
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is no parameter count.", hint="Write for example 7B, 350M or 1.3e9."
        )
    value = float(match.group(1)) * _FACTORS[match.group(2).lower()]
    if not 1000 <= value <= MAX_PARAMETERS:
        raise ConfigError(
            f"A model of {text.strip()} parameters is out of range.",
            hint="Write a count from 1K to 100T, for example 7B or 350M.",
        )
    return round(value)


def guessed_shape(n_parameters: int, given: Overrides) -> ModelShape:
    """Return a shape with about this many parameters (0 = as the dimensions have it)."""
    is_gpt = given.family == "gpt"
    vocab = given.vocab or _vocab_for(n_parameters)
    layers, hidden = _depth_and_width(n_parameters, vocab, given)
    heads = given.n_heads or max(1, hidden // (128 if hidden >= 2048 else 64))
    if hidden % heads:
        raise ConfigError(
            f"{heads} heads do not divide a hidden size of {hidden}.",
            hint="Give --heads that divide --hidden.",
        )
    kv_heads = given.n_kv_heads or heads
    if kv_heads > heads or heads % kv_heads:
        raise ConfigError(
            f"{heads} heads cannot share {kv_heads} key-value heads.",
            hint="Give --kv-heads that divide --heads.",
        )
    base = Dimensions(
        vocab=vocab, hidden=hidden, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads,
        head_dim=hidden // heads, ffn=1, positions=given.positions if is_gpt else 0,
        is_gated=not is_gpt, norm=Norm.LAYERNORM if is_gpt else Norm.RMSNORM_WRITTEN_OUT,
        qkv_bias=is_gpt, out_bias=is_gpt, mlp_bias=is_gpt, packed_qkv=is_gpt,
        activation="gelu" if is_gpt else "silu", has_rotary=not is_gpt,
    )  # fmt: skip
    ffn = given.ffn or _ffn_for(n_parameters, base)
    return _built(replace(base, ffn=ffn), n_parameters, given)


def _built(d: Dimensions, n_parameters: int, given: Overrides) -> ModelShape:
    groups = parameters_of(d)
    total = sum(g.n_total for g in groups)
    rest = n_parameters - total
    if 0 < rest <= 0.2 * n_parameters:
        groups.append(outside("others", rest))
    elif n_parameters and abs(rest) > 0.2 * n_parameters:
        raise ConfigError(
            f"These dimensions make {format_count(total)} parameters, not "
            f"{format_count(n_parameters)}.",
            hint="Leave --params out, or give fewer dimensions.",
        )
    is_gpt = given.family == "gpt"
    dropout = given.dropout if given.dropout is not None else (0.1 if is_gpt else 0.0)
    return ModelShape(
        name="GPT-like" if is_gpt else "Llama-like",
        source="--params" if n_parameters else "the dimensions given",
        parameters=tuple(groups),
        **shared(d, LayerSizes), max_positions=d.positions, hidden_dropout=dropout,
        is_guess=bool(n_parameters),
        assumptions=_said(d, n_parameters, total + max(0, rest), is_gpt=is_gpt),
    )  # fmt: skip


def _said(d: Dimensions, n_parameters: int, total: int, *, is_gpt: bool) -> tuple[str, ...]:
    kind = "GPT-like" if is_gpt else "Llama-like"
    if not n_parameters:
        return (f"A {kind} decoder of {format_count(total)} parameters.",)
    guess = (
        f"The shape is a guess from the parameter count: a {kind} decoder with {d.n_layers} "
        f"layers, hidden size {d.hidden}, {d.n_heads} heads, feed-forward {d.ffn}, vocabulary "
        f"{d.vocab}; give --layers, --hidden, --heads, --ffn, --vocab for yours."
    )
    return (guess,)


def _vocab_for(n_parameters: int) -> int:
    # An embedding and a head may not eat up a small model.
    if not n_parameters:
        return DEFAULT_VOCAB
    return max(64, min(DEFAULT_VOCAB, n_parameters // 1000 // 64 * 64))


def _depth_and_width(n: int, vocab: int, given: Overrides) -> tuple[int, int]:
    for name, value, limit in (("--layers", given.n_layers, MAX_LAYERS),
                               ("--hidden", given.hidden, MAX_WIDTH)):  # fmt: skip
        if value > limit:
            raise ConfigError(f"{name} {value} is out of range.", hint=f"At most {limit}.")
    if given.n_layers and given.hidden:
        return given.n_layers, given.hidden
    if not n:
        raise ConfigError(
            "A shape needs --layers and --hidden, or --params.",
            hint="For example: fragdoctor estimate --params 7B",
        )
    if given.hidden:
        body = max(0, n - 2 * vocab * given.hidden)
        return max(MIN_LAYERS, round(body / (12 * given.hidden**2))), given.hidden
    ratio = 128 if n >= 10**9 else 64
    layers = given.n_layers or _layers_for(n, vocab, ratio)
    # 12 L H^2 + 2 V H = n, solved for H.
    hidden = (-2 * vocab + math.sqrt(4 * vocab**2 + 48 * layers * n)) / (24 * layers)
    step = 256 if hidden >= 2048 else 128 if hidden >= 1024 else 64
    return layers, max(step, round(hidden / step) * step)


def _layers_for(n: int, vocab: int, ratio: int) -> int:
    """Return the depth at which 12 L H^2 + 2 V H reaches n with H = ratio x L."""
    low, high = MIN_LAYERS, MAX_LAYERS
    while low < high:
        middle = (low + high) // 2
        hidden = ratio * middle
        if 12 * middle * hidden**2 + 2 * vocab * hidden < n:
            low = middle + 1
        else:
            high = middle
    # Known models are as deep as the nearest even number.
    return max(MIN_LAYERS, 2 * round(low / 2))


def _ffn_for(n: int, d: Dimensions) -> int:
    """Return the feed-forward width that fills up the parameter count."""
    usual = 4 * d.hidden if not d.is_gated else round(8 * d.hidden / 3 / 64) * 64
    if not n:
        return max(64, usual)
    one = sum(g.n_total for g in parameters_of(replace(d, ffn=64)))
    two = sum(g.n_total for g in parameters_of(replace(d, ffn=128)))
    fitting = 64 * (1 + (n - one) // (two - one))
    return int(min(max(64, fitting), 2 * usual))
