"""Shared vectors: hold this implementation, or any other, against known mappings.

A case is one JSON object per line: the inputs of a derivation, and either the certified mapping (as
a hash of its byte map) or the sizes of the opaque fallback. Nothing of the case but its inputs
reaches the derivation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkvmap.cache import CacheView, TensorView
from vkvmap.derive import derive_canonical_mappings
from vkvmap.errors import FormatError, VkvmapError
from vkvmap.foreign import read_json
from vkvmap.grid import RankGrid
from vkvmap.mapping import CanonicalPageMapping
from vkvmap.spec import LayerSpec, LayerTable

LAYER = "case"
_NUM_BLOCKS = 3
_MOST_PAGE_BYTES = 1 << 24


@dataclass(frozen=True)
class Verdict:
    """Outcome of one case: the differences found, empty if none; `binding` is False for quirks."""

    case_id: Any
    differences: tuple[str, ...]
    binding: bool


def byte_map(mapping: CanonicalPageMapping) -> NDArray[np.int64]:
    """Canonical byte of every local byte, shape ``(local_page_size_bytes,)``; -1 where unmapped."""
    out = np.full(mapping.local_page_size_bytes, -1, dtype=np.int64)
    for run in mapping.runs:
        fragments = np.arange(run.num_fragments, dtype=np.int64)[:, None]
        within = np.arange(run.fragment_size, dtype=np.int64)[None, :]
        local = run.local_offset + fragments * run.local_stride + within
        out[local] = run.canonical_offset + fragments * run.canonical_stride + within
    return out


def view_of(
    layout: str, *, block_size: int, heads: int, cell: int, num_blocks: int = _NUM_BLOCKS
) -> CacheView:
    """A cache view at address 0 of a layout's usual shape: one byte per element.

    Args:
        layout: split_nhd, split_hnd, packed_nhd, packed_hnd or mla.
        cell: bytes of one (token, head) of K, for mla of one row.
    """
    shape: tuple[int, ...]
    order: tuple[int, ...]
    if layout == "mla":
        shape, order = (num_blocks, block_size, cell), (0, 1, 2)
    elif layout.startswith("split"):
        shape = (num_blocks, 2, block_size, heads, cell)
        order = (0, 1, 2, 3, 4) if layout.endswith("nhd") else (0, 1, 3, 2, 4)
    else:
        shape = (num_blocks, heads, block_size, 2 * cell)
        order = (0, 2, 1, 3) if layout.endswith("nhd") else (0, 1, 2, 3)
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return CacheView.of(
        TensorView(0, shape, tuple(strides), 1, (0, prod(shape))), layout, block_size
    )


def mapping_of(case: Mapping[str, Any]) -> CanonicalPageMapping:
    """Derive the mapping that a case asks for."""
    grid = RankGrid(
        tp=case["tp"],
        dcp=case["dcp"],
        pcp=case["pcp"],
        interleave=case["interleave"],
        pcp_mode=case.get("pcp_mode", "shards"),
    )
    cell = case["head_size"] * case["elem"]
    sharded = case.get("dcp_sharded", True)
    if case["kind"] == "mla":
        spec = LayerSpec.mla(LAYER, row_bytes=cell, dcp_sharded=sharded)
        view = view_of("mla", block_size=case["block_size"], heads=1, cell=cell)
    else:
        spec = LayerSpec.attention(
            LAYER,
            num_kv_heads=case["total_kv_heads"],
            head_size=case["head_size"],
            elem=case["elem"],
            dcp_sharded=sharded,
        )
        view = view_of(
            case["layout"], block_size=case["block_size"], heads=case["spec_heads"], cell=cell
        )
    mappings = derive_canonical_mappings(
        LayerTable([spec]), {LAYER: view}, grid, case["rank"], family=case.get("family", "native")
    )
    return mappings.by_layer[LAYER]


def check_case(case: Mapping[str, Any]) -> Verdict:
    """Compare this implementation's answer with the case's."""
    binding = "quirk" not in case
    size = prod(case[name] for name in ("block_size", "spec_heads", "head_size", "elem"))
    if size > _MOST_PAGE_BYTES:
        why = f"a page of {size} bytes: more than {_MOST_PAGE_BYTES} are not compared byte by byte"
        return Verdict(case.get("id"), (why,), binding)
    try:
        mapping = mapping_of(case)
    except VkvmapError as error:
        return Verdict(case.get("id"), (f"raised {error}",), binding)
    seen: dict[str, Any] = {
        "certified": mapping.certified,
        "local_page_size": mapping.local_page_size_bytes,
        "canonical_page_size": mapping.canonical_page_size_bytes,
        "num_writers": mapping.num_writers,
        "writer_index": mapping.writer_index,
        "parallelism_agnostic": mapping.parallelism_agnostic,
    }
    if case.get("certified") and mapping.certified:
        array = byte_map(mapping).astype("<i8")
        seen["byte_map_sha256"] = hashlib.sha256(array.tobytes()).hexdigest()
        seen["first8"] = array[:8].tolist()
        seen["last"] = int(array[-1])
    differences = tuple(
        f"{name}: expected {case[name]}, found {value}"
        for name, value in seen.items()
        if name in case and case[name] != value
    )
    return Verdict(case.get("id"), differences, binding)


def read_cases(path: Path) -> Iterator[dict[str, Any]]:
    """Cases of a JSON-lines file; FormatError names the line that is not one."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                case = read_json(line)
            except ValueError as error:
                raise FormatError(f"{path}, line {number}: not JSON: {error}") from None
            yield _checked(case, f"{path}, line {number}")


_NEEDED = {
    "kind": str, "tp": int, "dcp": int, "pcp": int, "interleave": int, "total_kv_heads": int,
    "block_size": int, "head_size": int, "elem": int, "layout": str, "rank": int,
    "spec_heads": int, "certified": bool,
}  # fmt: skip


def _checked(case: Any, where: str) -> dict[str, Any]:
    if not isinstance(case, dict):
        raise FormatError(f"{where}: a case is a JSON object")
    for name, kind in _NEEDED.items():
        value = case.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FormatError(f"{where}: field {name!r} is {value!r}, {kind.__name__} needed")
    return case


def check_cases(cases: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Check many cases, in order."""
    return [check_case(case) for case in cases]
