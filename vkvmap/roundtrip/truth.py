"""The truth that a round trip is held against: bytes as a function of what they are.

A byte's value is a hash of its coordinates (layer, field, token, head, dim, byte); who holds which
coordinate is decided here by enumerating tokens and heads. Nothing of the mapping code is used: no
runs, no offsets, no strides, so an error there cannot hide behind the same error here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vkvmap.spec import HEAD, TOKEN, Field, LayerSpec

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.int64]

#: What memory holds before anything is written to it; also what must be left where nothing should.
POISON = 0xDB

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Holder:
    """Who a rank is, in the words of a launch script."""

    tp: int
    dcp: int
    pcp: int
    interleave: int
    pcp_mode: str
    rank: int

    def tokens_of(self, page: int, block_size: int, *, sharded: bool) -> Indices:
        """The tokens that lie in slots 0, 1, ... of this rank's block of canonical page `page`.

        Tokens are dealt to context shards `interleave` at a time; a shard keeps what it is dealt.
        """
        shards, mine = self._shard(sharded)
        interleave = self.interleave if shards > 1 else 1
        span = np.arange(page * block_size * shards, (page + 1) * block_size * shards)
        kept: Indices = span[span // interleave % shards == mine]
        return kept

    def _shard(self, sharded: bool) -> tuple[int, int]:
        tp_rank, pcp_rank = self.rank % self.tp, self.rank // self.tp
        dcp = self.dcp if sharded else 1
        if self.pcp_mode == "shards":
            return dcp * self.pcp, pcp_rank * dcp + tp_rank % dcp
        return dcp, (tp_rank * self.pcp + pcp_rank) % dcp

    def part_of(self, extent: int, units: int) -> Indices:
        """Which of an axis's indices this rank holds, where `units` parts are dealt to ranks."""
        everything = np.arange(extent)
        if not units:
            return everything
        unit = everything // (extent // units)
        tp_rank = self.rank % self.tp
        if units >= self.tp:
            held: Indices = everything[unit // (units // self.tp) == tp_rank]
        else:
            held = everything[unit == tp_rank // (self.tp // units)]
        return held


def field_truth(layer: int, number: int, this: Field, indices: Mapping[str, Indices]) -> Bytes:
    """The bytes of one field at the given indices of its axes.

    Args:
        layer: position of the layer in the model.
        number: position of the field in the layer.
        indices: axis name -> global indices, for every axis of the field.

    Returns:
        uint8 ``(len(axis) for every axis but the last ..., len(last axis) * elem)``.
    """
    last = this.axes[-1].name if this.axes else ""
    along = indices[last] if this.axes else np.zeros(1, np.int64)
    flat = (along[:, None] * this.elem + np.arange(this.elem)).ravel()
    words, inverse = np.unique(flat // 8, return_inverse=True)
    with np.errstate(over="ignore"):
        state = (np.uint64(layer) * np.uint64(1_000_003) + np.uint64(number)) * _STEP
        state = state + words.astype(np.uint64) * np.uint64(0xD1342543DE82EF95)
        for depth, axis in enumerate(reversed(this.axes[:-1])):
            factor = np.uint64(0x2545F4914F6CDD1D + 2 * (depth + 1) * 0x5851F42D4C957F2D % 2**63)
            place = indices[axis.name].astype(np.uint64) * (factor | np.uint64(1))
            state = place.reshape(-1, *[1] * state.ndim) + state
        state ^= state >> np.uint64(30)
        state *= _MIX_1
        state ^= state >> np.uint64(27)
        state *= _MIX_2
        state ^= state >> np.uint64(31)
    octets = state.astype("<u8")[..., None].view(np.uint8)
    values: Bytes = octets[..., inverse, flat % 8]
    return values


class PageTruth:
    """What one layer's blocks must hold on one rank, in the terms of its tensor.

    Args:
        spec: the layer.
        layer: its position in the model.
        holder: the rank.
        layout: name of the layout that the tensor is in.
        block_size: tokens per block.
    """

    def __init__(
        self, spec: LayerSpec, layer: int, holder: Holder, layout: str, block_size: int
    ) -> None:
        self.spec, self.layer, self.holder = spec, layer, holder
        self.layout, self.block_size = layout, block_size
        self._parts = {
            axis.name + this.name: holder.part_of(axis.extent, axis.units)
            for this in spec.fields
            for axis in this.axes
            if axis.name != TOKEN
        }

    def block(self, page: int) -> Bytes:
        """Block of canonical page `page`, uint8 in the shape of one block of the tensor."""
        fields = {
            this.name: self._field(number, this, page)
            for number, this in enumerate(self.spec.fields)
        }
        if self.layout == "cpu_hnd":
            return _cpu(fields, self.spec.fields[0].elem)
        return _ARRANGE.get(self.layout, _in_a_row)(fields)

    def _field(self, number: int, this: Field, page: int) -> Bytes:
        # Layers that keep state hold one per page: the page is a coordinate like a token.
        tokens = np.array([page])
        if self.spec.has_tokens:
            sharded = self.spec.dcp_sharded
            tokens = self.holder.tokens_of(page, self.block_size, sharded=sharded)
        indices = {
            axis.name: tokens if axis.name == TOKEN else self._parts[axis.name + this.name]
            for axis in this.axes
        }
        layer = self.layer if self.spec.has_tokens else self.layer + 4096 * (page + 1)
        values = field_truth(layer, number, this, indices)
        names = [axis.name for axis in this.axes]
        if names[-1] in (TOKEN, HEAD):  # one element per cell, such as a scale
            values = values.reshape(*values.shape[:-1], -1, this.elem)
        if names[:2] == [TOKEN, HEAD]:
            return values.reshape(*values.shape[:2], -1)
        if names[:1] == [TOKEN]:
            return values.reshape(values.shape[0], -1)
        return values.reshape(-1)


Fields = Mapping[str, Bytes]


def _cells(fields: Fields, *names: str) -> Bytes:
    """``(token, head, byte)``: what the named fields keep of each, one after the other."""
    return np.concatenate([fields[name] for name in names if name in fields], axis=-1)


def _split(fields: Fields) -> Bytes:
    return np.stack([_cells(fields, "k", "k_scale"), _cells(fields, "v", "v_scale")])


def _packed(fields: Fields) -> Bytes:
    return _head_first(_cells(fields, *fields))


def _packed_scaled(fields: Fields) -> Bytes:
    return _head_first(_cells(fields, "k", "k_scale", "v", "v_scale"))


def _head_first(cells: Bytes) -> Bytes:
    turned: Bytes = cells.transpose(1, 0, 2)
    return turned


def _planar(fields: Fields, order: tuple[int, int, int]) -> Bytes:
    planes = [_cells(fields, "k", "v"), fields["k_scale"], fields["v_scale"]]
    return np.concatenate([plane.transpose(order).ravel() for plane in planes])


def _cpu(fields: Fields, elem: int) -> Bytes:
    k, v = fields["k"], fields["v"]
    tokens, heads = k.shape[:2]
    turned = k.reshape(tokens, heads, -1, elem).transpose(1, 2, 0, 3).reshape(heads, -1)
    rows = v.transpose(1, 0, 2).reshape(heads, -1)
    return np.concatenate([turned, rows], axis=-1).reshape(heads, tokens, -1)


def _latent(fields: Fields) -> Bytes:
    return fields["row"]


def _values_then_scales(fields: Fields) -> Bytes:
    value, scale = fields["value"], fields["scale"]
    return np.concatenate([value.ravel(), scale.ravel()]).reshape(len(value), -1)


def _in_a_row(fields: Fields) -> Bytes:
    return np.concatenate([values.ravel() for values in fields.values()])


_ARRANGE = {
    "split_nhd": _split,
    "split_hnd": _split,
    "packed_nhd": _packed,
    "packed_hnd": _packed,
    "packed_nhd_scaled": _packed_scaled,
    "packed_hnd_scaled": _packed_scaled,
    "nhd_planar_scales": lambda fields: _planar(fields, (0, 1, 2)),
    "hnd_planar_scales": lambda fields: _planar(fields, (1, 0, 2)),
    "mla": _latent,
    "planar": _values_then_scales,
}
