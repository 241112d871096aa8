"""The independent answer: what every byte of a cache is, by enumerating coordinates.

Nothing here knows runs, strides of pages or offsets. A `Truth` holds a layer's content as plain
arrays indexed by (token, head, ...); a rank's tensor is filled by indexing it the way an engine
does, and a canonical page is spelled out by transposing and concatenating the same arrays. Who
holds which token is answered by asking every token for its owner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkvmap.grid import RankGrid
from vkvmap.spec import LayerSpec

Bytes = NDArray[Any]


# ---- who holds what ------------------------------------------------------------------------------


def owner_of_token(token: int, count: int, interleave: int) -> int:
    """Context shard that holds a canonical token."""
    return (token // interleave) % count


def shard_of(grid: RankGrid, rank: int, dcp_sharded: bool) -> tuple[int, int]:
    """(number of context shards, this rank's shard), counted out rank by rank."""
    dcp = grid.dcp if dcp_sharded else 1
    coordinates = [(p, t) for p in range(grid.pcp) for t in range(grid.tp)]
    pcp_rank, tp_rank = coordinates[rank]
    if grid.pcp_mode == "shards":
        shards = [(p, d) for p in range(grid.pcp) for d in range(dcp)]
        return len(shards), shards.index((pcp_rank, tp_rank % dcp))
    inner = [(t, p) for t in range(grid.tp) for p in range(grid.pcp)]
    return dcp, inner.index((tp_rank, pcp_rank)) % dcp


def tokens_of(grid: RankGrid, rank: int, block_size: int, dcp_sharded: bool) -> list[int]:
    """Canonical tokens of one page on this rank, in slot order."""
    count, mine = shard_of(grid, rank, dcp_sharded)
    interleave = grid.interleave if count > 1 else block_size
    return [t for t in range(block_size * count) if owner_of_token(t, count, interleave) == mine]


def parts_of(units: int, tp: int, tp_rank: int) -> list[int]:
    """Indivisible parts (KV heads, groups) that a tensor-parallel rank holds."""
    if units >= tp:
        return [int(u) for u in np.array_split(np.arange(units), tp)[tp_rank]]
    return [[u for u in range(units) for _ in range(tp // units)][tp_rank]]


def legal(grid: RankGrid, heads: int | None, block_size: int, dcp_sharded: bool) -> bool:
    """Whether the configuration defines who holds what, by looking at every holder."""
    units = 1 if heads is None else heads
    if heads is not None and (units % grid.tp if units >= grid.tp else grid.tp % units):
        return False
    count, _ = shard_of(grid, 0, dcp_sharded)
    if count == 1:
        return True
    if block_size % grid.interleave:
        return False
    seen: dict[int, list[int]] = {}
    for rank in range(grid.size):
        held = [0] if heads is None else parts_of(units, grid.tp, rank % grid.tp)
        for head in held:
            seen.setdefault(head, []).append(shard_of(grid, rank, dcp_sharded)[1])
    return all(
        len({shards.count(index) for index in range(count)}) == 1 and len(set(shards)) == count
        for shards in seen.values()
    )


# ---- content -------------------------------------------------------------------------------------


@dataclass
class Truth:
    """Content of one layer for some tokens (or one state): field -> bytes, element bytes last."""

    fields: dict[str, Bytes]

    def some(self, tokens: list[int], heads: list[int] | None) -> Truth:
        """The part that a rank holds: axis 0 is tokens, axis 1 heads."""
        picked = {}
        for name, array in self.fields.items():
            part = array[tokens]
            picked[name] = part[:, heads] if heads is not None else part
        return Truth(picked)


def truth_of(spec: LayerSpec, tokens: int, content: Any) -> Truth:
    """Content for `tokens` tokens; `content(n)` yields n elements of the wanted dtype."""
    fields = {}
    for this in spec.fields:
        shape = [tokens if a.name == "token" else a.extent for a in this.axes] + [this.elem]
        fields[this.name] = content(int(np.prod(shape))).reshape(shape)
    return Truth(fields)


def counted() -> Any:
    """Content that names every byte by a number of its own."""
    cursor = [0]

    def content(count: int) -> Bytes:
        cursor[0] += count
        return np.arange(cursor[0] - count, cursor[0], dtype=np.int64)

    return content


def drawn(seed: int) -> Any:
    """Random bytes."""
    rng = np.random.default_rng(seed)
    return lambda count: rng.integers(0, 256, count, dtype=np.uint8)


def _rows(array: Bytes) -> Bytes:
    """(token, head, everything else)."""
    return array.reshape(*array.shape[:2], -1)


def _joined(truth: Truth, *names: str) -> Bytes:
    return np.concatenate([_rows(truth.fields[n]) for n in names if n in truth.fields], axis=2)


def _flat(*arrays: Bytes) -> Bytes:
    return np.concatenate([a.reshape(-1) for a in arrays])


def _head_major(array: Bytes) -> Bytes:
    return np.swapaxes(array, 0, 1)


def page(layout: str, truth: Truth) -> Bytes:
    """A page of this content in the layout's own order, one dense array of bytes."""
    f = truth.fields
    if layout == "mla":
        return _flat(f["row"])
    if layout == "planar":
        return _flat(f["value"], f["scale"])
    if layout in ("split_nhd", "split_hnd"):
        order = _head_major if layout == "split_hnd" else np.asarray
        return _flat(order(_joined(truth, "k", "k_scale")), order(_joined(truth, "v", "v_scale")))
    if layout in ("packed_nhd", "packed_hnd"):
        order = _head_major if layout == "packed_hnd" else np.asarray
        return _flat(order(_joined(truth, *f)))
    if layout in ("packed_nhd_scaled", "packed_hnd_scaled"):
        order = _head_major if layout == "packed_hnd_scaled" else np.asarray
        return _flat(order(_joined(truth, "k", "k_scale", "v", "v_scale")))
    if layout in ("nhd_planar_scales", "hnd_planar_scales"):
        order = _head_major if layout.startswith("hnd") else np.asarray
        return _flat(
            order(_joined(truth, "k", "v")),
            order(_joined(truth, "k_scale")),
            order(_joined(truth, "v_scale")),
        )
    if layout == "cpu_hnd":
        heads = []
        for head in range(f["k"].shape[1]):
            heads += [np.swapaxes(f["k"][:, head], 0, 1), f["v"][:, head]]
        return _flat(*heads)
    raise NotImplementedError(layout)


def universal(truth: Truth) -> Bytes:
    """The universal page: token by token, head by head, every field of the cell in turn."""
    pieces = []
    arrays = list(truth.fields.values())
    per_head = all(a.ndim >= 3 for a in arrays) and not {"row", "value"} & set(truth.fields)
    for token in range(arrays[0].shape[0]):
        if per_head:
            for head in range(arrays[0].shape[1]):
                pieces += [a[token, head].reshape(-1) for a in arrays]
        else:
            pieces += [a[token].reshape(-1) for a in arrays]
    return np.concatenate(pieces)


def canonical(family: str, layout: str, truth: Truth) -> Bytes:
    """The canonical page of this content, which is all heads and all tokens of the span."""
    return universal(truth) if family == "universal" else page(layout, truth)


def local_pages(layout: str, truth: Truth, kernel_blocks: int) -> Bytes:
    """A manager block's page: its kernel pages one after the other."""
    tokens = len(next(iter(truth.fields.values())))
    pieces = np.array_split(np.arange(tokens), kernel_blocks)
    return np.concatenate(
        [page(layout, Truth({n: a[p] for n, a in truth.fields.items()})) for p in pieces]
    )


# ---- tensors, indexed as an engine does ----------------------------------------------------------


def write_block(tensor: Bytes, layout: str, block: int, truth: Truth) -> None:
    """Put a kernel block's content into a rank's tensor of bytes, logical dimensions."""
    f = truth.fields
    if layout == "mla":
        tensor[block] = f["row"].reshape(tensor.shape[1:])
    elif layout in ("split_nhd", "split_hnd"):
        tensor[block, 0] = _joined(truth, "k", "k_scale")
        tensor[block, 1] = _joined(truth, "v", "v_scale")
    elif layout in ("packed_nhd", "packed_hnd"):
        tensor[block] = _head_major(_joined(truth, *f))
    elif layout in ("packed_nhd_scaled", "packed_hnd_scaled"):
        tensor[block] = _head_major(_joined(truth, "k", "k_scale", "v", "v_scale"))
    else:
        tensor[block] = page(layout, truth).reshape(tensor.shape[1:])


def tensor_shape(layout: str, blocks: int, truth: Truth) -> tuple[int, ...]:
    """Logical shape of a tensor of bytes for content like `truth` per block."""
    f = truth.fields
    tokens = len(next(iter(f.values())))
    if layout == "mla":
        return blocks, tokens, int(f["row"][0].size)
    if layout == "planar":
        return blocks, tokens, sum(int(a[0].size) for a in f.values())
    heads = next(iter(f.values())).shape[1]
    if layout in ("split_nhd", "split_hnd"):
        return blocks, 2, tokens, heads, _joined(truth, "k", "k_scale").shape[2]
    cell = sum(int(a[0, 0].size) for a in f.values())
    if layout == "cpu_hnd":
        return blocks, heads, tokens, cell
    if layout.endswith("planar_scales"):
        return blocks, heads * tokens * cell
    return blocks, heads, tokens, cell


#: Storage order of the logical dimensions, outermost first, where it is not their own order.
STORED = {
    "split_hnd": (0, 1, 3, 2, 4),
    "packed_nhd": (0, 2, 1, 3),
    "packed_nhd_scaled": (0, 2, 1, 3),
}


def tensor(layout: str, shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> Bytes:
    """A zeroed tensor of bytes with logical dimensions `shape`, stored in `order`."""
    order = order or STORED.get(layout, tuple(range(len(shape))))
    stored = np.zeros([shape[dim] for dim in order], dtype=np.uint8)
    return stored.transpose(np.argsort(order))
