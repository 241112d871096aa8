"""End-to-end digests: do the bytes in the caches after a load mean what was in them at the store?

Page digests are over canonical bytes, so both sides of a wrong mapping agree on them. A witness is
taken from the *local* pages: one per (layer, KV head, chunk), computed by the ranks that store and
again by the ranks that have loaded. It uses no mapping: cells are found by indexing tensors, and
which token and head a cell is by counting. What must stay true:

 1. a witness is a sum over cells, each weighted by keys of its own for its token, so ranks that
    hold different tokens or heads add up, in any order, to the same number under any configuration;
 2. every cell is counted once: by the replica whose turn its page is when storing, and by each
    complete set of replicas in turn when checking a load, so that no replica goes unchecked.

Off unless somebody makes these objects: they read every page once more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vkvmap.cache import CacheView, TensorView
from vkvmap.errors import SpecError
from vkvmap.format import Witness
from vkvmap.layout import BLOCK, CELL, HALF
from vkvmap.mapping import Mappings
from vkvmap.region import Region, Section
from vkvmap.spec import HEAD, TOKEN, LayerSpec, LayerTable

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
#: (layer position in the group, KV head): what a row of sums stands for.
Entry = tuple[int, int]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def entries_of(layers: LayerTable, group: str) -> list[Entry]:
    """What a group's witnesses are about, in order; layers without heads count as one head."""
    return [
        (position, head)
        for position, spec in enumerate(layers.in_group(group))
        if spec.has_tokens
        for head in range(spec.num_kv_heads or 1)
    ]


class RankWitness:
    """One rank's part of the witnesses of a group.

    Layers whose cells cannot be found by indexing alone (planar pages, transposed encodings,
    opaque state) contribute nothing; `covered` names the others.

    Args:
        mappings: as derived, with replicas taking turns, whatever policy the plan uses.
        caches: layer name -> `CacheView`, in host memory.
        group: the layer group.
        chunk_tokens: T.

    Raises:
        SpecError: a cache is on a device.
    """

    def __init__(
        self, mappings: Mappings, caches: Mapping[str, CacheView], group: str, chunk_tokens: int
    ) -> None:
        self.entries = entries_of(mappings.layers, group)
        self._rank_layers: list[_RankLayer] = []
        for position, spec in enumerate(mappings.layers.in_group(group)):
            if spec.name in caches and mappings.by_layer[spec.name].certified:
                view = caches[spec.name]
                if _indexable(spec, view):
                    self._rank_layers.append(
                        _RankLayer(position, spec, view, mappings, chunk_tokens)
                    )

    @property
    def covered(self) -> frozenset[int]:
        """Positions of the layers that are witnessed here."""
        return frozenset(layer.position for layer in self._rank_layers)

    def stored(self, row: int, blocks: Sequence[int]) -> Words:
        """This rank's part of the witnesses of a chunk that is being stored.

        Args:
            row: the chunk's row in the region, which decides whose turn each page is.
            blocks: the cache block of each of its pages, in token order.

        Returns:
            Sums, uint64 ``(entries, 2)``; the ranks' sums add up to the witness.
        """
        return self._sum(lambda layer, page: layer.is_writer(row * len(blocks) + page), blocks)

    def loaded(self, blocks: Sequence[int], replica: int) -> Words:
        """This rank's part of what replica set `replica` (0, 1, ...) has loaded, or zeros.

        Where layers have fewer replicas than others, set `replica` counts modulo their number.
        """
        return self._sum(lambda layer, page: layer.replica == replica % layer.replicas, blocks)

    @property
    def replicas(self) -> int:
        """Complete replica sets that there are to check."""
        return max((layer.replicas for layer in self._rank_layers), default=1)

    def _sum(self, counts: Callable[[_RankLayer, int], bool], blocks: Sequence[int]) -> Words:
        total = np.zeros((len(self.entries), 2), np.uint64)
        index = {entry: at for at, entry in enumerate(self.entries)}
        for layer in self._rank_layers:
            pages = [page for page in range(len(blocks)) if counts(layer, page)]
            if pages:
                sums = layer.sums(pages, [blocks[page] for page in pages])
                for local, head in enumerate(layer.heads):
                    total[index[layer.position, head]] += sums[local]
        return total


class WitnessBoard:
    """A section of the region where every rank leaves its sums and the store picks them up."""

    def __init__(self, region: Region, name: str, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        rows = region.rows(name).view(np.uint64)
        self._sums: Words = rows.reshape(len(rows), -1, len(self.entries), 2)

    @staticmethod
    def section(name: str, num_rows: int, num_writers: int, entries: Sequence[Entry]) -> Section:
        """The section to create a region with."""
        return Section(name, num_rows, num_writers * len(entries) * 16)

    def leave(self, row: int, writer: int, sums: Words) -> None:
        """Leave what `writer` (numbered as in the ledger) contributes to chunk row `row`."""
        self._sums[row, writer] = sums

    def witnesses(self, row: int) -> list[Witness]:
        """The witnesses of chunk row `row`, once every writer has left its part."""
        return witnesses_of(self.entries, self._sums[row].sum(axis=0, dtype=np.uint64))


def witnesses_of(entries: Sequence[Entry], sums: Words) -> list[Witness]:
    """Sums over all ranks as they are stored."""
    return [
        Witness(layer, head, sums[at].astype("<u8").tobytes())
        for at, (layer, head) in enumerate(entries)
    ]


def differing(
    stored: Sequence[Witness], found: Sequence[Witness], covered: frozenset[int]
) -> list[Entry]:
    """The (layer, head) whose witnesses differ, of layers that this side covers.

    A stored witness of zeros is of a layer that the storing side did not cover.
    """
    known = {
        (witness.layer, witness.head): witness.digest
        for witness in stored
        if any(witness.digest) and witness.layer in covered
    }
    return [
        (witness.layer, witness.head)
        for witness in found
        if known.get((witness.layer, witness.head), witness.digest) != witness.digest
    ]


@dataclass(frozen=True)
class _Cells:
    """How to index one tensor: its dimensions by name, and the order of fields in a cell."""

    tensor: TensorView
    dims: tuple[str, ...]
    fields: tuple[tuple[int, int], ...]  # (offset in the cell as it lies, bytes), in spec order

    @property
    def as_it_lies(self) -> bool:
        """Whether the cell's own bytes are whole words in the order of the fields."""
        ends = [0, *(offset + size for offset, size in self.fields)]
        return ends[-1] % 8 == 0 and all(
            offset == end for (offset, _), end in zip(self.fields, ends, strict=False)
        )


class _RankLayer:
    """One layer on one rank: which cells it has, and their weighted sums."""

    def __init__(
        self,
        position: int,
        spec: LayerSpec,
        view: CacheView,
        mappings: Mappings,
        chunk_tokens: int,
    ) -> None:
        grid, rank = mappings.grid, mappings.rank
        mapping = mappings.by_layer[spec.name]
        shard = grid.context_shard(rank, dcp_sharded=spec.dcp_sharded)
        span = view.block_size * shard.count
        interleave = shard.interleave if shard.count > 1 else view.block_size
        held = grid.held_units(rank, spec.num_kv_heads, spec.name) if spec.num_kv_heads else (0, 1)
        self.position = position
        self.replica, self.replicas = mapping.writer_index, mapping.num_writers
        self.is_writer = mapping.is_writer
        self.heads = range(*(held or (0, 0)))
        # A slot's token: asked of every token of the span, not computed from the slot.
        owned = [t for t in range(span) if t // interleave % shard.count == shard.index]
        self._tokens = np.array(owned)
        self._span = span
        self._view = view
        self._cells = _cells(spec, view)
        cell_bytes = sum(size for _, size in self._cells.fields)
        self._keys = _keys(chunk_tokens, -(-cell_bytes // 8))

    def sums(self, pages: Sequence[int], blocks: Sequence[int]) -> Words:
        """Sums per held head, uint64 ``(heads, 2)``."""
        words = self._words(blocks)
        tokens = (np.array(pages)[:, None] * self._span + self._tokens).reshape(-1)
        lanes = [np.einsum("thw,tw->h", words, keys[tokens]) for keys in self._keys]
        return np.stack(lanes, axis=1)

    def _words(self, blocks: Sequence[int]) -> Words:
        """Cells of these blocks in token order: uint64 ``(tokens, heads, words)``."""
        cells = self._cells
        tensor, per_block = cells.tensor, self._view.kernel_blocks
        if tensor.device != "cpu":
            raise SpecError(
                f"the cache is on {tensor.device}; end-to-end digests read host memory only"
            )
        kernel = (np.array(blocks)[:, None] * per_block + np.arange(per_block)).reshape(-1)
        array: npt.NDArray[np.unsignedinteger[Any]] = _bytes_of(tensor)
        if cells.as_it_lies and array.shape[-1] % 8 == 0:
            array = array.view("<u8")  # copied about eight times as fast
        array = array[kernel]
        # (block, token, head, half, cell bytes), whatever order the tensor has them in.
        names = cells.dims
        ordered = array.transpose(
            [names.index(name) for name in (BLOCK, TOKEN, HEAD, HALF, CELL) if name in names]
        )
        if HEAD not in names:
            ordered = ordered[:, :, None]
        tokens, heads = ordered.shape[0] * ordered.shape[1], ordered.shape[2]
        flat = ordered.reshape(tokens, heads, -1)
        if not cells.as_it_lies:
            pieces = [flat[:, :, offset : offset + size] for offset, size in cells.fields]
            padding = np.zeros((tokens, heads, -flat.shape[2] % 8), np.uint8)
            flat = np.concatenate([*pieces, padding], axis=2)
        words = flat if flat.dtype.itemsize == 8 else np.ascontiguousarray(flat).view("<u8")
        return words.astype(np.uint64, copy=False)


def _indexable(spec: LayerSpec, view: CacheView) -> bool:
    layout = view.layout
    if len(layout.parts) != 1 or layout.encoding or view.raw or not spec.has_tokens:
        return False
    dims = layout.parts[0].dims
    if TOKEN not in dims or dims.count(CELL) != 1 or (spec.num_kv_heads and HEAD not in dims):
        return False
    tensor = view.tensors[0]
    lying = tensor.shape[dims.index(CELL)] * tensor.itemsize
    if dims[-1] != CELL or tensor.strides[-1] != tensor.itemsize:
        return False
    if HALF in dims:
        lying *= tensor.shape[dims.index(HALF)]
    return lying == sum(_cell_bytes(spec).values())


def _cell_bytes(spec: LayerSpec) -> dict[str, int]:
    sizes = {}
    for this in spec.fields:
        size = this.elem
        for axis in this.axes:
            size *= 1 if axis.name in (TOKEN, HEAD) else axis.extent
        sizes[this.name] = size
    return sizes


def _cells(spec: LayerSpec, view: CacheView) -> _Cells:
    sizes = _cell_bytes(spec)
    offsets, cursor = {}, 0
    for name in view.layout.order.bound_to(spec.fields).leaves():
        offsets[name] = cursor
        cursor += sizes[name]
    fields = tuple((offsets[name], sizes[name]) for name in sizes)
    return _Cells(view.tensors[0], view.layout.parts[0].dims, fields)


def _bytes_of(tensor: TensorView) -> Bytes:
    """The tensor as uint8: its last axis, which is dense, counts bytes."""
    start, nbytes = tensor.storage
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(start))
    return np.lib.stride_tricks.as_strided(
        memory[tensor.address - start :],
        (*tensor.shape[:-1], tensor.shape[-1] * tensor.itemsize),
        (*tensor.strides[:-1], 1),
        writeable=False,
    )


def _keys(tokens: int, words: int) -> Words:
    """Weights of every word of every token, odd, uint64 ``(2, tokens, words)``."""
    count = np.arange(tokens * words * 2, dtype=np.uint64) + np.uint64(1)
    mixed = count * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    odd: Words = (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
    return np.ascontiguousarray(odd.reshape(tokens, words, 2).transpose(2, 0, 1))
