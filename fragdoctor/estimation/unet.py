"""UNets of diffusion models, as Diffusers builds ``UNet2DConditionModel`` and ``UNet2DModel``.

Ronneberger et al. 2015, https://arxiv.org/abs/1505.04597; Ho et al. 2020,
https://arxiv.org/abs/2006.11239; Rombach et al. 2022, https://arxiv.org/abs/2112.10752. One
description serves for the parameters and for the operations: each module appends what it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from fragdoctor.errors import ConfigError
from fragdoctor.estimation.graph import Backward, Call, GraphPlayer, Value
from fragdoctor.estimation.operation_memory import is_adapted
from fragdoctor.estimation.tape import Tape
from fragdoctor.estimation.training_choices import Precision, precision_of
from fragdoctor.estimation.unet_config import unet_of
from fragdoctor.model.workload import ModelShape, ParameterGroup, Role, Unet, UnetBlock, Workload

FP32: Final = 4.0
PROMPT_TOKENS: Final = 77


def unet_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape of a UNet of Diffusers.

    Raises:
        InputError: a value is impossible, or switches something on that is not covered.
    """
    unet = unet_of(config, name)
    built = _Builder(unet, precision_of("fp32"), batch=1, tokens=PROMPT_TOKENS)
    channels = max(block.channels for block in unet.down)
    prompt = f" and each prompt {PROMPT_TOKENS} tokens" if unet.context_width else ""
    size = (
        f"Each picture is {unet.side} x {unet.side} with {unet.in_channels} channels "
        f"(sample_size){prompt}."
    )
    return ModelShape(
        name="unet", source=name, parameters=tuple(built.parameters.values()), hidden=channels,
        has_lm_head=False, fixed_seq=PROMPT_TOKENS if unet.context_width else 1, unet=unet,
        assumptions=(
            size,
            "Workspaces that cuDNN takes for convolutions are not counted.",
        ),
    )  # fmt: skip


class UnetPlayer(GraphPlayer):
    """Writes the tape of a UNet."""

    def __init__(
        self, workload: Workload, unet: Unet, *, bounds: bool = False, tape: Tape | None = None
    ) -> None:
        if workload.checkpointing not in ("none", "full", ""):
            raise ConfigError(
                f"--checkpointing {workload.checkpointing} does not go with a UNet: Diffusers "
                "recomputes each of its blocks.",
                hint="Write --checkpointing full.",
            )
        built = _Builder(
            unet, precision_of(workload.dtype), batch=workload.batch, tokens=workload.seq,
            workload=workload,
        )  # fmt: skip
        super().__init__(workload, built.calls, built.given, bounds=bounds, tape=tape)


class _Builder:
    """Writes down the parameters and the operations of a UNet, module by module."""

    def __init__(
        self,
        unet: Unet,
        precision: Precision,
        *,
        batch: int,
        tokens: int,
        workload: Workload | None = None,
    ) -> None:
        self.unet, self.precision, self.workload = unet, precision, workload
        self.batch, self.tokens = batch, tokens
        self.parameters: dict[str, ParameterGroup] = {}
        self.calls: list[Call] = []
        self.segment, self.n_segments = -1, 0
        self.path = ""
        self.skips: list[tuple[Value, int]] = []
        self.side = unet.side
        c = precision.compute
        each = precision.weight
        self.picture = Value(batch * unet.in_channels * unet.side**2, each)
        self.prompt = Value(batch * tokens * unet.context_width, each)
        self.given = [self.picture, self.prompt] if unet.context_width else [self.picture]
        self.time_width = 4 * unet.down[0].channels
        self.time = Value(batch * self.time_width, c)
        self._build()

    # What modules are made of

    def _parameter(self, name: str, shape: tuple[int, ...], role: Role, slot: str = "unet") -> str:
        full = f"{self.path}{name}"
        self.parameters[full] = ParameterGroup(full, shape, 1, role, layered=False, slot=slot)
        return full

    def _call(self, name: str, inputs: Sequence[Value], n: int, each: float, **how: Any) -> Value:
        out = Value(n, each)
        self._append(name, inputs, (out,), **how)
        return out

    def _append(
        self, name: str, inputs: Sequence[Value], outs: tuple[Value, ...], **how: Any
    ) -> None:
        how.setdefault("segment", self.segment)
        self.calls.append(Call(f"{self.path}{name}", tuple(inputs), outs, **how))

    def _cast(self, x: Value, each: float) -> Value:
        return x if x.bytes_per == each else self._call("cast", [x], x.n_elements, each)

    def _into_product(self, x: Value) -> Value:
        """Return an input as a matrix product or convolution takes it: autocast copies it."""
        return self._cast(x, self.precision.compute)

    def _norm(self, name: str, x: Value, channels: int, n_statistics: int) -> Value:
        if self.precision.is_autocast:
            x = self._cast(x, FP32)
        names = (
            self._parameter(f"{name}.weight", (channels,), Role.NORM),
            self._parameter(f"{name}.bias", (channels,), Role.NORM),
        )
        return self._call(
            name, [x], x.n_elements, x.bytes_per, saves=(x,), saves_for_weights=(x,),
            extras=(n_statistics * FP32, n_statistics * FP32), parameters=names,
        )  # fmt: skip

    def _group_norm(self, name: str, x: Value, channels: int) -> Value:
        return self._norm(name, x, channels, self.batch * self.unet.n_groups)

    def _silu(self, x: Value) -> Value:
        return self._call("silu", [x], x.n_elements, x.bytes_per, saves=(x,))

    def _linear(  # noqa: PLR0913 - a matrix and how it works
        self, name: str, x: Value, rows: int, columns: int, *, bias: bool = True, slot: str = "unet"
    ) -> Value:
        names = [self._parameter(f"{name}.weight", (rows, columns), Role.LINEAR, slot)]
        if bias:
            names.append(self._parameter(f"{name}.bias", (rows,), Role.BIAS))
        narrow = self._into_product(x)
        n = narrow.n_elements // columns * rows
        out = self._call(
            name, [narrow], n, self.precision.compute, saves_for_weights=(narrow,),
            parameters=tuple(names), copies=True,
        )  # fmt: skip
        w = self.workload
        if w is None or not w.lora_rank or not is_adapted(w, names[0], slot):
            return out
        return self._adapted(names[0], x, out, rows, columns)

    def _adapted(self, name: str, x: Value, out: Value, rows: int, columns: int) -> Value:
        """Return the output with what an adapter adds, in the adapter's precision (PEFT)."""
        rank = self.workload.lora_rank if self.workload else 0
        each = self.precision.compute if self.precision.is_autocast else FP32
        wide = self._cast(x, each)
        n_rows = x.n_elements // columns
        down = self._call(
            "lora_A", [wide], n_rows * rank, each, saves_for_weights=(wide,),
            parameters=(f"{name}.lora_A",), copies=True,
        )  # fmt: skip
        up = self._call(
            "lora_B", [down], n_rows * rows, each, saves_for_weights=(down,),
            parameters=(f"{name}.lora_B",), copies=True,
        )  # fmt: skip
        scaled = self._call("scaling", [up], up.n_elements, each)
        widest = max(each, out.bytes_per)
        total = self._call("sum", [out, scaled], out.n_elements, widest, backward=Backward.PASSES)
        return self._cast(total, out.bytes_per)

    def _conv(  # noqa: PLR0913 - a kernel and how it works
        self, name: str, x: Value, into: int, out: int, side: int, *, kernel: int = 3
    ) -> Value:
        names = (
            self._parameter(f"{name}.weight", (out, into, kernel, kernel), Role.OTHER),
            self._parameter(f"{name}.bias", (out,), Role.BIAS),
        )
        x = self._into_product(x)
        n = self.batch * out * side * side
        # One formula gives all gradients of a convolution: frozen weights keep the input too.
        return self._call(
            name, [x], n, self.precision.compute, saves=(x,), saves_for_weights=(x,),
            parameters=names, copies=True,
        )  # fmt: skip

    def _add(self, x: Value, y: Value) -> Value:
        each = max(x.bytes_per, y.bytes_per)
        return self._call("sum", [x, y], x.n_elements, each, backward=Backward.PASSES)

    def _copy(self, name: str, x: Value) -> Value:
        return self._call(name, [x], x.n_elements, x.bytes_per)

    # Modules

    def _resnet(self, name: str, x: Value, into: int, out: int) -> Value:
        outer, self.path = self.path, f"{self.path}{name}."
        self._begin_segment()
        hidden = self._silu(self._group_norm("norm1", x, into))
        hidden = self._conv("conv1", hidden, into, out, self.side)
        time = self._linear("time_emb_proj", self._silu(self.time), out, self.time_width)
        hidden = self._call(
            "time", [hidden, time], hidden.n_elements, hidden.bytes_per, backward=Backward.PASSES
        )
        hidden = self._silu(self._group_norm("norm2", hidden, out))
        hidden = self._conv("conv2", hidden, out, out, self.side)
        if into != out:
            x = self._conv("conv_shortcut", x, into, out, self.side, kernel=1)
        hidden = self._copy("scale", self._add(x, hidden))
        self._end_segment()
        self.path = outer
        return hidden

    def _begin_segment(self) -> None:
        self.segment, self.n_segments = self.n_segments, self.n_segments + 1

    def _end_segment(self) -> None:
        self.segment = -1

    def _attend(  # noqa: PLR0913 - both sides of attention
        self, x: Value, context: Value, width: int, context_width: int, n_heads: int, *, bias: bool
    ) -> Value:
        query = self._linear("to_q", x, width, width, bias=bias, slot="qkv")
        key, value = (
            self._linear(name, context, width, context_width, bias=bias, slot="qkv")
            for name in ("to_k", "to_v")
        )
        n_tokens = query.n_elements // width
        out = Value(query.n_elements, query.bytes_per)
        self._append(
            "attention", [query, key, value], (out,), saves=(query, key, value, out),
            extras=(n_tokens * n_heads * FP32,),
        )  # fmt: skip
        return self._linear("to_out", out, width, width, slot="out")

    def _transformer(self, name: str, x: Value, block: UnetBlock) -> Value:
        """A norm, a projection, transformer blocks over the pixels, and a projection back."""
        outer, self.path = self.path, f"{self.path}{name}."
        width, n_tokens = block.channels, self.batch * self.side**2
        hidden = self._group_norm("norm", x, width)
        project = partial(self._conv, into=width, out=width, side=self.side, kernel=1)
        if self.unet.has_linear_projection:
            hidden = self._linear("proj_in", self._copy("tokens", hidden), width, width)
        else:
            hidden = self._copy("tokens", project("proj_in", hidden))
        for i in range(block.n_transformers):
            inner, self.path = self.path, f"{self.path}blocks.{i}."
            self._begin_segment()
            for j, context in enumerate((None, self.prompt), 1):
                path = self.path
                normed = self._norm(f"norm{j}", hidden, width, n_tokens)
                self.path = f"{path}attn{j}."
                out = self._attend(
                    normed, normed if context is None else context, width,
                    width if context is None else self.unet.context_width, block.n_heads,
                    bias=False,
                )  # fmt: skip
                hidden = self._add(self._copy("scale", out), hidden)
                self.path = path
            normed = self._norm("norm3", hidden, width, n_tokens)
            hidden = self._add(self._gated(normed, width), hidden)
            self._end_segment()
            self.path = inner
        if self.unet.has_linear_projection:
            hidden = self._copy("pixels", self._linear("proj_out", hidden, width, width))
        else:
            hidden = project("proj_out", self._copy("pixels", hidden))
        self.path = outer
        return self._add(hidden, x)

    def _gated(self, x: Value, width: int) -> Value:
        """GEGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202."""
        both = self._linear("ff.in", x, 8 * width, width, slot="up")
        halves = tuple(Value(both.n_elements // 2, both.bytes_per, both) for _ in range(2))
        self._append("halves", [both], halves)
        gate = self._call("gelu", [halves[1]], halves[1].n_elements, both.bytes_per,
                          saves=(halves[1],))  # fmt: skip
        product = self._call("gate", [halves[0], gate], gate.n_elements, both.bytes_per,
                             saves=(halves[0], gate))  # fmt: skip
        return self._linear("ff.out", product, width, 4 * width, slot="down")

    def _pixels(self, name: str, x: Value, block: UnetBlock) -> Value:
        """Attention among pixels: its three matrices read a copy each, laid out as tokens."""
        outer, self.path = self.path, f"{self.path}{name}."
        width = block.channels
        hidden = self._group_norm("group_norm", x, width)
        narrow = self._into_product(hidden)
        q, k, v = (self._copy("tokens", narrow) for _ in range(3))
        heads = [
            self._linear(n, t, width, width, slot="qkv")
            for n, t in (("to_q", q), ("to_k", k), ("to_v", v))
        ]
        out = Value(heads[0].n_elements, heads[0].bytes_per)
        self._append(
            "attention", heads, (out,), saves=(*heads, out),
            extras=(self.batch * self.side**2 * block.n_heads * FP32,),
        )  # fmt: skip
        hidden = self._copy("pixels", self._linear("to_out", out, width, width, slot="out"))
        hidden = self._copy("scale", self._add(hidden, x))
        self.path = outer
        return hidden

    def _attention(self, name: str, x: Value, block: UnetBlock) -> Value:
        if block.attention == "cross":
            return self._transformer(name, x, block)
        return self._pixels(name, x, block) if block.attention else x

    # The whole

    def _build(self) -> None:
        unet, first = self.unet, self.unet.down[0].channels
        self._time_embedding(first)
        hidden = self._conv("conv_in", self.picture, unet.in_channels, first, self.side)
        self.skips.append((hidden, first))
        width = first
        for i, block in enumerate(unet.down):
            self.path = f"down.{i}."
            for j in range(block.n_layers):
                hidden = self._resnet(f"resnets.{j}", hidden, width, block.channels)
                width = block.channels
                hidden = self._attention(f"attentions.{j}", hidden, block)
                self.skips.append((hidden, width))
            if i + 1 < len(unet.down):
                self.side = -(-self.side // 2)
                hidden = self._conv("downsample", hidden, width, width, self.side)
                self.skips.append((hidden, width))
        if unet.middle is not None:
            self.path = "middle."
            hidden = self._resnet("resnets.0", hidden, width, width)
            hidden = self._attention("attentions.0", hidden, unet.middle)
            hidden = self._resnet("resnets.1", hidden, width, width)
        for i, block in enumerate(unet.up):
            self.path = f"up.{i}."
            for j in range(block.n_layers):
                skip, more = self.skips.pop()
                both = self._call(
                    "concatenation", [hidden, skip], hidden.n_elements + skip.n_elements,
                    max(hidden.bytes_per, skip.bytes_per), backward=Backward.CUTS,
                )  # fmt: skip
                hidden = self._resnet(f"resnets.{j}", both, width + more, block.channels)
                width = block.channels
                hidden = self._attention(f"attentions.{j}", hidden, block)
            if i + 1 < len(unet.up):
                self.side *= 2
                n = self.batch * width * self.side**2
                larger = self._call("upsample", [hidden], n, hidden.bytes_per)
                hidden = self._conv("upsample", larger, width, width, self.side)
        self.path = ""
        hidden = self._silu(self._group_norm("conv_norm_out", hidden, width))
        self._conv("conv_out", hidden, width, unet.out_channels, self.side)

    def _time_embedding(self, first: int) -> None:
        """Small tensors, and the parameters that make them."""
        shapes = [
            ("time1", (self.time_width, first)),
            ("time2", (self.time_width, self.time_width)),
        ]
        if self.unet.added_width:
            shapes += [
                ("added1", (self.time_width, self.unet.added_width)),
                ("added2", (self.time_width, self.time_width)),
            ]
        names = []
        for name, shape in shapes:
            names += [
                self._parameter(f"{name}.weight", shape, Role.LINEAR),
                self._parameter(f"{name}.bias", shape[:1], Role.BIAS),
            ]
        if self.unet.n_classes:
            shape = (self.unet.n_classes, self.time_width)
            names.append(self._parameter("classes", shape, Role.EMBEDDING, "embedding"))
        self._append("time embedding", [], (self.time,), parameters=tuple(names), copies=True)
