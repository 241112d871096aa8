"""What a layer caches, told without any parallelism.

A layer is a list of fields; a field is a dense array over named axes, the innermost of which is the
bytes of one element. Nothing here knows ranks, blocks or addresses: the same `LayerTable` describes
the model to every configuration, is what a chunk is laid out by, and what identity is computed from
(DESIGN 2.8).

Invariants of a constructed `LayerSpec`:
 1. its canonical nest places every field exactly once;
 2. the token axis has extent 0 (a block or a chunk gives it one); every other extent is positive;
 3. a sharded axis is a whole number of its indivisible units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vkvmap.errors import SpecError

TOKEN = "token"
HEAD = "head"

#: Bytes per element of the dtypes that KV caches are kept in. Names are torch's; the fp8 flavours
#: are distinct names because their bytes mean different numbers.
DTYPE_BYTES: Mapping[str, int] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True)
class Axis:
    """A named axis. `units` > 0: dealt over tensor-parallel ranks in that many indivisible parts.

    `extent` is global. The token axis has extent 0 and is dealt by context parallelism.
    """

    name: str
    extent: int
    units: int = 0


@dataclass(frozen=True)
class Field:
    """A dense array over `axes` of elements of `elem` bytes."""

    name: str
    axes: tuple[Axis, ...]
    elem: int

    def axis(self, name: str) -> Axis:
        """The axis called `name`; KeyError if the field has none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)


@dataclass(frozen=True)
class Nest:
    """A byte order: loop over `axes` (outermost first), in each step the items of `body` in turn.

    An item is another nest or a field name; a named field's remaining axes follow densely in the
    field's own order. A name ending in ``?`` is dropped where the layer has no such field, and
    ``*`` stands for all fields of the layer, in their order.
    """

    axes: tuple[str, ...]
    body: tuple[Nest | str, ...]

    def leaves(self) -> Iterator[str]:
        """Field names in the order in which they are placed."""
        for item in self.body:
            if isinstance(item, Nest):
                yield from item.leaves()
            else:
                yield item

    def bound_to(self, fields: Sequence[Field]) -> Nest:
        """This nest with ``*`` and ``?`` resolved for `fields`; empty branches disappear."""
        names = [field.name for field in fields]
        body: list[Nest | str] = []
        for item in self.body:
            if isinstance(item, Nest):
                inner = item.bound_to(fields)
                if inner.body:
                    body.append(inner)
            elif item == "*":
                body.extend(names)
            elif not item.endswith("?"):
                body.append(item)
            elif item[:-1] in names:
                body.append(item[:-1])
        return Nest(self.axes, tuple(body))

    def __str__(self) -> str:
        loops = "".join(f"[{axis}]" for axis in self.axes)
        return loops + "(" + ", ".join(str(item) for item in self.body) + ")"


@dataclass(frozen=True)
class LayerSpec:
    """What one layer caches, in the whole model.

    Attributes:
        name: the engine's layer name, unique in the model; how pipeline stages find each other.
        group: layers of a group share block lists and chunks.
        kind: ``"attention"``, ``"mla"``, ``"indexer"``, ``"cells"``, ``"recurrent"``, ``"opaque"``.
        fields: the arrays, in canonical order.
        canonical: the universal byte order.
        dtype: what the bytes mean, for identity only (quantisation and fp8 flavour included).
        dcp_sharded: False where decode context parallelism leaves this layer whole.
        window: sliding window or attention chunk in tokens, for identity and description only.
    """

    name: str
    group: str
    kind: str
    fields: tuple[Field, ...]
    canonical: Nest
    dtype: str
    dcp_sharded: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("a layer needs a name: pipeline stages are matched by it")
        placed = list(self.canonical.leaves())
        names = [field.name for field in self.fields]
        if sorted(placed) != sorted(names) or len(set(names)) != len(names):
            raise SpecError(
                f"layer {self.name!r}: canonical order places {placed}, the fields are {names}; "
                "place every field exactly once"
            )
        for field in self.fields:
            self._check_field(field)

    def _check_field(self, field: Field) -> None:
        if field.elem < 1:
            raise SpecError(f"layer {self.name!r}: field {field.name!r} has elem={field.elem}")
        for axis in field.axes:
            where = f"layer {self.name!r}: axis {axis.name!r} of field {field.name!r}"
            if axis.name == TOKEN:
                if axis.extent or axis.units:
                    raise SpecError(f"{where}: the block gives the token axis its extent; leave 0")
            elif axis.extent < 1:
                raise SpecError(f"{where}: extent {axis.extent} must be positive")
            elif axis.units < 0 or (axis.units and axis.extent % axis.units):
                raise SpecError(f"{where}: {axis.extent} is not a multiple of {axis.units} units")

    # ---- reading ------------------------------------------------------------------------------

    @property
    def has_tokens(self) -> bool:
        """Whether the layer keeps something per token (recurrent state does not)."""
        return any(axis.name == TOKEN for field in self.fields for axis in field.axes)

    @property
    def described(self) -> bool:
        """Whether the fields are known; False only for state that nobody described."""
        return self.kind != "opaque"

    @property
    def num_kv_heads(self) -> int | None:
        """KV heads in the whole model, or None where the layer has no head axis."""
        for field in self.fields:
            for axis in field.axes:
                if axis.name == HEAD:
                    return axis.extent
        return None

    def canonical_bytes(self, tokens: int) -> int:
        """Bytes of the layer's canonical page that spans `tokens` tokens (one state if none)."""
        total = 0
        for field in self.fields:
            size = field.elem
            for axis in field.axes:
                size *= tokens if axis.name == TOKEN else axis.extent
            total += size
        return total

    def renamed(self, name: str, group: str | None = None) -> LayerSpec:
        """The same layer under another name (and group)."""
        return replace(self, name=name, group=self.group if group is None else group)

    def description(self) -> dict[str, Any]:
        """Everything that gives the bytes their meaning, as plain JSON values."""
        return {
            "name": self.name,
            "group": self.group,
            "kind": self.kind,
            "dtype": self.dtype,
            "dcp_sharded": self.dcp_sharded,
            "window": self.window,
            "canonical": str(self.canonical),
            "fields": [
                {
                    "name": field.name,
                    "elem": field.elem,
                    "axes": [[axis.name, axis.extent, axis.units] for axis in field.axes],
                }
                for field in self.fields
            ],
        }

    # ---- kinds --------------------------------------------------------------------------------

    @classmethod
    def attention(
        cls,
        name: str,
        *,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int | None = None,
        dtype: str = "bfloat16",
        elem: int | None = None,
        scale_bytes: int = 0,
        group: str = "0",
        dcp_sharded: bool = True,
        window: int | None = None,
    ) -> LayerSpec:
        """K and V per token and KV head, with `scale_bytes` > 0 one scale per half, token and head.

        `head_size` (and `head_size_v`, if V differs) count elements; `elem` overrides the bytes per
        element that `dtype` implies.
        """
        size = _elem(name, dtype, elem)
        per_cell = (Axis(TOKEN, 0), Axis(HEAD, num_kv_heads, num_kv_heads))
        fields = [
            Field("k", (*per_cell, Axis("k_dim", head_size)), size),
            Field("v", (*per_cell, Axis("v_dim", head_size_v or head_size)), size),
        ]
        if scale_bytes:
            fields += [
                Field("k_scale", per_cell, scale_bytes),
                Field("v_scale", per_cell, scale_bytes),
            ]
        return cls._tokenwise(
            "attention", name, group, (TOKEN, HEAD), fields, dtype, dcp_sharded, window
        )

    @classmethod
    def mla(
        cls,
        name: str,
        *,
        row_bytes: int,
        dtype: str = "bfloat16",
        group: str = "0",
        dcp_sharded: bool = True,
        window: int | None = None,
    ) -> LayerSpec:
        """One latent row of `row_bytes` per token, whole on every tensor-parallel rank."""
        row = Field("row", (Axis(TOKEN, 0), Axis("row_byte", row_bytes)), 1)
        return cls._tokenwise("mla", name, group, (TOKEN,), [row], dtype, dcp_sharded, window)

    @classmethod
    def indexer(
        cls,
        name: str,
        *,
        value_bytes: int,
        scale_bytes: int,
        dtype: str = "float8_e4m3fn",
        group: str = "0",
        dcp_sharded: bool = True,
    ) -> LayerSpec:
        """Sparse-attention index keys: per token `value_bytes` of values and a scale."""
        fields = [
            Field("value", (Axis(TOKEN, 0), Axis("value_byte", value_bytes)), 1),
            Field("scale", (Axis(TOKEN, 0), Axis("scale_byte", scale_bytes)), 1),
        ]
        return cls._tokenwise("indexer", name, group, (TOKEN,), fields, dtype, dcp_sharded, None)

    @classmethod
    def cells(
        cls,
        name: str,
        *,
        num_kv_heads: int,
        cell_bytes: int,
        dtype: str,
        group: str = "0",
        dcp_sharded: bool = True,
        window: int | None = None,
    ) -> LayerSpec:
        """An opaque cell per token and KV head (sub-byte pairs with block scales, for one).

        The cell moves as it is; tokens and heads are still cut between cells.
        """
        axes = (Axis(TOKEN, 0), Axis(HEAD, num_kv_heads, num_kv_heads))
        cell = Field("cell", (*axes, Axis("cell_byte", cell_bytes)), 1)
        return cls._tokenwise(
            "cells", name, group, (TOKEN, HEAD), [cell], dtype, dcp_sharded, window
        )

    @classmethod
    def _tokenwise(
        cls,
        kind: str,
        name: str,
        group: str,
        order: tuple[str, ...],
        fields: Sequence[Field],
        dtype: str,
        dcp_sharded: bool,
        window: int | None,
    ) -> LayerSpec:
        nest = Nest(order, tuple(field.name for field in fields))
        return cls(name, group, kind, tuple(fields), nest, dtype, dcp_sharded, window)

    @classmethod
    def recurrent(
        cls,
        name: str,
        *,
        segments: Sequence[tuple[str, int, int]],
        conv_positions: int,
        temporal: Sequence[tuple[str, int, int]],
        conv_elem: int = 2,
        temporal_elem: int = 4,
        dtype: str = "bfloat16/float32",
        group: str = "state",
    ) -> LayerSpec:
        """Convolution state in segments, then temporal state (DESIGN 2.8).

        Args:
            segments: ``(name, channels, units)`` of each convolution segment in order; `units`
                indivisible parts are dealt over tensor-parallel ranks, replicated where there are
                fewer parts than ranks; 0 keeps the segment whole on every rank.
            conv_positions: remembered positions per channel (kernel width - 1).
            temporal: ``(axis, extent, units)`` of the temporal state, outermost first.
            conv_elem, temporal_elem: bytes per element of either state.

        Canonical order is channels-first, segments in the given order, then the temporal state.
        """
        fields = [
            Field(
                f"conv_{segment}",
                (Axis("channel", channels, units), Axis("position", conv_positions)),
                conv_elem,
            )
            for segment, channels, units in segments
        ]
        if temporal:
            axes = tuple(Axis(axis, extent, units) for axis, extent, units in temporal)
            fields.append(Field("temporal", axes, temporal_elem))
        nest = Nest((), tuple(field.name for field in fields))
        return cls(name, group, "recurrent", tuple(fields), nest, dtype)

    @classmethod
    def mamba1(
        cls,
        name: str,
        *,
        intermediate_size: int,
        state_size: int,
        conv_kernel: int,
        units: int | None = None,
        conv_elem: int = 2,
        temporal_elem: int = 4,
        group: str = "state",
    ) -> LayerSpec:
        """Mamba-1: one convolution segment and a ``(channel, state)`` temporal state.

        Channels are independent, so every channel is a unit of its own unless `units` says else.
        """
        parts = units or intermediate_size
        return cls.recurrent(
            name,
            segments=[("x", intermediate_size, parts)],
            conv_positions=conv_kernel - 1,
            temporal=[("channel", intermediate_size, parts), ("state", state_size, 0)],
            conv_elem=conv_elem,
            temporal_elem=temporal_elem,
            group=group,
        )

    @classmethod
    def mamba2(
        cls,
        name: str,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int,
        n_groups: int,
        conv_kernel: int,
        conv_elem: int = 2,
        temporal_elem: int = 4,
        group: str = "state",
    ) -> LayerSpec:
        """Mamba-2: segments x (by heads) | B | C (by groups), temporal ``(head, dim, state)``."""
        return cls.recurrent(
            name,
            segments=[
                ("x", num_heads * head_dim, num_heads),
                ("b", n_groups * state_size, n_groups),
                ("c", n_groups * state_size, n_groups),
            ],
            conv_positions=conv_kernel - 1,
            temporal=[(HEAD, num_heads, num_heads), ("dim", head_dim, 0), ("state", state_size, 0)],
            conv_elem=conv_elem,
            temporal_elem=temporal_elem,
            group=group,
        )

    @classmethod
    def gated_delta_net(
        cls,
        name: str,
        *,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_kernel: int,
        conv_elem: int = 2,
        temporal_elem: int = 4,
        group: str = "state",
    ) -> LayerSpec:
        """Gated delta net: segments q | k (by key heads) | v (by value heads).

        The temporal state is ``(value head, v_dim, k_dim)``.
        """
        return cls.recurrent(
            name,
            segments=[
                ("q", num_k_heads * head_k_dim, num_k_heads),
                ("k", num_k_heads * head_k_dim, num_k_heads),
                ("v", num_v_heads * head_v_dim, num_v_heads),
            ],
            conv_positions=conv_kernel - 1,
            temporal=[
                (HEAD, num_v_heads, num_v_heads),
                ("v_dim", head_v_dim, 0),
                ("k_dim", head_k_dim, 0),
            ],
            conv_elem=conv_elem,
            temporal_elem=temporal_elem,
            group=group,
        )

    @classmethod
    def kimi_delta_attention(
        cls,
        name: str,
        *,
        num_heads: int,
        head_dim: int,
        conv_kernel: int,
        conv_elem: int = 2,
        temporal_elem: int = 4,
        group: str = "state",
    ) -> LayerSpec:
        """Kimi-style linear attention: q, k and v convolved apart, all by the same heads."""
        channels = num_heads * head_dim
        return cls.recurrent(
            name,
            segments=[(part, channels, num_heads) for part in ("q", "k", "v")],
            conv_positions=conv_kernel - 1,
            temporal=[(HEAD, num_heads, num_heads), ("v_dim", head_dim, 0), ("k_dim", head_dim, 0)],
            conv_elem=conv_elem,
            temporal_elem=temporal_elem,
            group=group,
        )

    @classmethod
    def opaque(
        cls, name: str, *, page_bytes: int, dtype: str = "bytes", group: str = "opaque"
    ) -> LayerSpec:
        """State that nobody described: `page_bytes` per block and rank, carried whole (2.7)."""
        blob = Field("blob", (Axis("blob_byte", page_bytes),), 1)
        return cls(name, group, "opaque", (blob,), Nest((), ("blob",)), dtype)


def _elem(layer: str, dtype: str, elem: int | None) -> int:
    if elem is not None:
        return elem
    if dtype not in DTYPE_BYTES:
        raise SpecError(
            f"layer {layer!r}: dtype {dtype!r} has no known size; pass elem= (bytes per element) "
            f"or one of {sorted(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[dtype]


class LayerTable(Mapping[str, LayerSpec]):
    """The model's layers in model order, found by name: the whole model's, not one rank's."""

    def __init__(self, layers: Iterable[LayerSpec]) -> None:
        self._layers: dict[str, LayerSpec] = {}
        for layer in layers:
            if layer.name in self._layers:
                raise SpecError(f"layer {layer.name!r} appears twice; names must be unique")
            self._layers[layer.name] = layer
        if not self._layers:
            raise SpecError("a layer table needs at least one layer")

    def __getitem__(self, name: str) -> LayerSpec:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerTable) and self.description() == other.description()

    __hash__ = None  # type: ignore[assignment]  # a mapping compared by value

    @property
    def groups(self) -> tuple[str, ...]:
        """Group names in order of first appearance."""
        return tuple(dict.fromkeys(layer.group for layer in self._layers.values()))

    def in_group(self, group: str) -> tuple[LayerSpec, ...]:
        """The layers of `group`, in model order."""
        return tuple(layer for layer in self._layers.values() if layer.group == group)

    def index(self, name: str) -> int:
        """Position of layer `name` in model order: its layer id."""
        return list(self._layers).index(name)

    def description(self) -> list[dict[str, Any]]:
        """The table as plain JSON values, in model order."""
        return [layer.description() for layer in self._layers.values()]
