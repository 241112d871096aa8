"""Digests: do the bytes that a load put into the cache mean what was stored?

One 8-byte digest per layer, KV head and token, computed from local pages on both sides: of the
cell's content (K, then V), and of where it belongs. It is written by the rank that stores the page,
into the row, and compared by every rank that loads it. Nothing here uses a mapping: cells are found
by indexing tensors, and which head and token a cell is by counting, so that a wrong mapping cannot
hide itself.

Only for acceptance tests and suspicion: it reads every page once more, in Python.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkvmap.cache import CacheView, TensorView
from vkvmap.grid import RankGrid
from vkvmap.integrations.vllm.options import EngineError
from vkvmap.integrations.vllm.setup import Setup
from vkvmap.spec import LayerSpec

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Digests:
    """Writes and checks the digests of one rank.

    Args:
        setup: what the worker works with.
        memory: uint8, the whole host memory.
        num_rows: rows in it.
    """

    def __init__(self, setup: Setup, memory: NDArray[np.uint8], num_rows: int) -> None:
        self._layers = [
            _LayerDigests(setup, name, memory.reshape(num_rows, -1))
            for name in setup.rows.digests
            if name in setup.caches
        ]

    def write(self, pairs: Mapping[str, tuple[Ids, Ids]]) -> None:
        """Digest what is about to be stored."""
        for layer in self._layers:
            if layer.group in pairs:
                layer.write(*pairs[layer.group])

    def check(self, pairs: Mapping[str, tuple[Ids, Ids]]) -> str | None:
        """What is wrong with what has been loaded: the first difference, or None."""
        for layer in self._layers:
            if layer.group in pairs:
                wrong = layer.check(*pairs[layer.group])
                if wrong:
                    return wrong
        return None


class _LayerDigests:
    def __init__(self, setup: Setup, name: str, rows: NDArray[np.uint8]) -> None:
        spec = setup.mappings.layers[name]
        self.name, self.group = name, spec.group
        self._spec = spec
        self._view = setup.caches[name]
        self._mapping = setup.mappings.by_layer[name]
        self._pages = setup.rows.pages[spec.group]
        heads, tokens = spec.num_kv_heads or 1, setup.rows.tokens[spec.group]
        start = setup.rows.digests[name]
        table = rows[:, start : start + heads * tokens * 8]
        self._table: Words = table.view(np.uint64).reshape(len(rows), heads, tokens)
        self._heads = _held_heads(spec, setup.mappings.grid, setup.mappings.rank)
        shard = setup.mappings.grid.context_shard(setup.mappings.rank, dcp_sharded=spec.dcp_sharded)
        slots = np.arange(self._view.block_size)
        step = shard.interleave if shard.count > 1 else 1
        self._tokens = (slots // step * shard.count + shard.index) * step + slots % step
        self._span = self._view.block_size * shard.count
        seed = zlib.crc32(name.encode())
        rng = np.random.default_rng(seed)
        self._weights: Words = rng.integers(1, 1 << 63, 1 << 16, dtype=np.uint64) | np.uint64(1)

    def write(self, blocks: Ids, pages: Ids) -> None:
        mine = np.array([self._mapping.is_writer(int(page)) for page in pages], bool)
        if mine.any():
            rows, heads, tokens = self._places(pages[mine])
            self._table[rows, heads, tokens] = self._digests(blocks[mine], heads, tokens)

    def check(self, blocks: Ids, pages: Ids) -> str | None:
        rows, heads, tokens = self._places(pages)
        wanted = self._table[rows, heads, tokens]
        wrong = np.argwhere(wanted != self._digests(blocks, heads, tokens))
        if not len(wrong):
            return None
        block, head, token = (int(i) for i in wrong[0])
        return (
            f"layer {self.name!r}, KV head {int(heads[0, head, 0])}, token "
            f"{int(tokens[block, 0, token])} of the chunk in row {int(rows[block, 0, 0])}: block "
            f"{int(blocks[block])} holds other bytes than were stored ({len(wrong)} of "
            f"{wanted.size} cells differ)"
        )

    def _places(self, pages: Ids) -> tuple[Ids, Ids, Ids]:
        """Row, global head and token in the chunk, each broadcast to (page, head, token)."""
        rows = pages[:, None, None] // self._pages
        first = pages % self._pages * self._span
        return rows, self._heads[None, :, None], (first[:, None] + self._tokens)[:, None, :]

    def _digests(self, blocks: Ids, heads: Ids, tokens: Ids) -> Words:
        cells = _cells(self._spec, self._view, blocks)  # (block, head, token, byte)
        short = -cells.shape[-1] % 8
        if short:
            cells = np.pad(cells, [(0, 0)] * 3 + [(0, short)])
        words = np.ascontiguousarray(cells).view(np.uint64)
        mixed = words ^ (words >> np.uint64(29))
        total = (mixed * self._weights[: words.shape[-1]]).sum(axis=-1, dtype=np.uint64)
        place = heads.astype(np.uint64) * np.uint64(1000003) + tokens.astype(np.uint64)
        total = (total + (place + np.uint64(1)) * _GOLDEN) * self._weights[-1]
        return np.asarray(total ^ (total >> np.uint64(32)))


def _held_heads(spec: LayerSpec, grid: RankGrid, rank: int) -> Ids:
    heads, tp_rank = spec.num_kv_heads, rank % grid.tp
    if heads is None:
        return np.zeros(1, np.int64)
    if heads >= grid.tp:
        share = heads // grid.tp
        return np.arange(tp_rank * share, (tp_rank + 1) * share)
    return np.array([tp_rank * heads // grid.tp])


def _cells(spec: LayerSpec, view: CacheView, blocks: Ids) -> NDArray[np.uint8]:
    """Cells of whole blocks, bytes in the order K, V: ``(block, head, token, byte)``."""
    per_block = view.kernel_blocks
    kernel = (blocks[:, None] * per_block + np.arange(per_block)).reshape(-1)
    cells = _kernel_cells(spec, view, view.tensors[0], kernel)
    _, heads, tokens, size = cells.shape
    split = cells.reshape(len(blocks), per_block, heads, tokens, size)
    joined = split.transpose(0, 2, 1, 3, 4)
    return np.asarray(joined.reshape(len(blocks), heads, per_block * tokens, size))


def _kernel_cells(
    spec: LayerSpec, view: CacheView, tensor: TensorView, blocks: Ids
) -> NDArray[np.uint8]:
    content = _gathered(tensor, blocks)  # the view's own dimensions, then the bytes of an element
    name = view.layout.name
    if name == "cpu_hnd":
        n, heads, tokens, _, item = content.shape
        flat = content.reshape(n, heads, -1, item)
        k_size = spec.fields[0].axis("k_dim").extent
        keys = flat[:, :, : tokens * k_size].reshape(n, heads, k_size, tokens, item)
        values = flat[:, :, tokens * k_size :].reshape(n, heads, tokens, -1)
        keys = keys.transpose(0, 1, 3, 2, 4).reshape(n, heads, tokens, -1)
        return np.asarray(np.concatenate([keys, values], axis=-1))
    if name.startswith("packed"):
        return np.asarray(content.reshape(*content.shape[:3], -1))
    if name.startswith("split"):
        n, _, tokens, heads = content.shape[:4]
        both = content.transpose(0, 3, 2, 1, 4, 5)
        return np.asarray(both.reshape(n, heads, tokens, -1))
    if name == "mla":
        return np.asarray(content.reshape(content.shape[0], 1, content.shape[1], -1))
    raise EngineError(
        f"layer {spec.name!r}: pages of layout {name!r} cannot be taken apart into tokens, so "
        "they cannot be verified; turn vkvmap.verify off"
    )


def _gathered(tensor: TensorView, blocks: Ids) -> NDArray[np.uint8]:
    owner: Any = tensor.owner
    if hasattr(owner, "data_ptr"):
        import torch

        # The view may have fewer or other dimensions than the tensor that it was made from.
        size = tensor.itemsize
        as_seen = owner.as_strided(tensor.shape, tuple(step // size for step in tensor.strides))
        picked = as_seen[torch.as_tensor(blocks, device=owner.device)].contiguous().cpu()
        flat = picked.view(torch.uint8).numpy()
        return np.asarray(flat.reshape(*picked.shape, size))
    array: NDArray[Any] = np.ascontiguousarray(owner[blocks])
    viewed: NDArray[np.uint8] = array.view(np.uint8).reshape(*array.shape, tensor.itemsize)
    return viewed
