"""The PTX that ships, executed instruction by instruction.

The kernel as the CUDA compiler emitted it runs in the interpreter of tests/ptxsim on random boxes,
against an oracle that walks the boxes byte by byte. Beyond the bytes, every target byte must have
been written exactly once, and no other byte at all.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.cuda_toolchain import CSRC, Workshop, nvcc, run
from tests.ptxsim.ptxsim import Memory, PtxError, PtxSim
from vkvmap import _C
from vkvmap.boxes import Box
from vkvmap.pack import struct, tiles_of

pytestmark = pytest.mark.cuda

SEGMENTS, NO_BLOCK = 32, 2**64 - 1
SEGMENT = np.dtype(
    [(n, "<u4") for n in ("items", "first_layer", "pairs", "first_pair", "tiles", "first_tile")]
)
HEAD = np.dtype(
    [
        ("layers", "<u8"),
        ("tiles", "<u8"),
        ("pairs", "<u8"),
        ("num_segments", "<u4"),
        ("items_per_warp", "<u4"),
        ("extra_items", "<u4"),
        ("reserved", "<u4", 3),
        ("segments", SEGMENT, SEGMENTS),
    ]
)
PAIR = np.dtype([("block", "<u8"), ("row", "<u4"), ("page", "<u4")])
KERNELS = [
    f"vkvmap_{direction}_u{variant}_{pairs}"
    for direction in ("store", "load")
    for variant in ("8_stream", "8_plain", "4_stream")
    for pairs in ("buffer", "params")
]


@pytest.fixture(scope="session")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    def build(draft: Path) -> None:
        source = CSRC / "cuda_kernels.cu"
        run(
            nvcc(), "-std=c++17", "-O3", "-I", CSRC, "-ptx", "-arch=compute_80", source, "-o", draft
        )

    return Workshop(tmp_path_factory).once("kernel.ptx", build).read_text()


def kernel_text(ptx: str, name: str) -> str:
    """One kernel of the module: interpreting begins with parsing, and there are twelve."""
    head = ptx[: ptx.index(".visible .entry")]
    at = ptx.index(f".entry {name}(")
    start = ptx.rindex(".visible", 0, at)
    stop = ptx.find(".visible .entry", at)
    return head + ptx[start : stop if stop > 0 else None]


def byte_pairs(box: Box) -> Iterator[tuple[int, int]]:
    """(cache, canonical) offsets of every byte of a box, by walking it."""

    def walk(
        levels: tuple[tuple[int, int, int], ...], left: int, right: int
    ) -> Iterator[tuple[int, int]]:
        if not levels:
            yield left, right
            return
        count, left_step, right_step = levels[-1]
        for i in range(count):
            yield from walk(levels[:-1], left + i * left_step, right + i * right_step)

    return walk(box.levels, box.left, box.right)


@dataclass
class Layer:
    """Layers of one class: shared tiles, bases of their own."""

    boxes: list[Box]
    alignment: int
    stride: int  # of blocks in the cache
    page: int  # of canonical pages
    count: int


def random_layer(rng: random.Random, alignment: int) -> Layer:
    boxes, left, right = [], alignment * rng.randrange(3), alignment * rng.randrange(3)
    for _ in range(rng.randint(1, 2)):
        fragment = alignment * rng.choice([1, 3, 8, 20, 33, 300 if alignment == 16 else 5])
        inner = rng.randint(1, 12 if fragment < 1000 else 2)
        outer = rng.randint(1, 3)
        gap = fragment + alignment * rng.choice([0, 1, 4])
        rows = inner * gap + alignment * rng.choice([0, 2])
        turned = rng.random() < 0.5
        boxes.append(
            Box(
                left,
                right,
                (
                    (fragment, 1, 1),
                    (inner, outer * fragment if turned else fragment, gap),
                    (outer, fragment if turned else inner * fragment, rows),
                ),
            )
        )
        left += inner * outer * fragment + alignment * rng.randrange(2)
        right += outer * rows + alignment * rng.randrange(2)
    return Layer(boxes, alignment, left + alignment * rng.randrange(3), right, rng.randint(1, 3))


def share(items: int, warps: int) -> tuple[int, int]:
    return divmod(items, warps)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", KERNELS)
def test_the_compiled_kernel_writes_each_target_byte_once(ptx: str, name: str, seed: int) -> None:
    rng = random.Random(f"{name}/{seed}")
    storing, in_params = "_store_" in name, name.endswith("_params")
    alignment = rng.choice([16, 16, 8, 4, 2, 1])
    blocks, rows, pages = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 2)
    layers = [random_layer(rng, alignment) for _ in range(rng.randint(1, 2))]

    random_bytes = np.random.default_rng(seed)
    sim = PtxSim(kernel_text(ptx, name), mem=Memory(1 << 18))
    starts, size, row = [], 0, 0
    for layer in layers:
        for _ in range(layer.count):
            starts.append((size, row))
            size += blocks * layer.stride + 16
            row += pages * layer.page
            size, row = -(-size // 16) * 16, -(-row // 16) * 16
    cache = random_bytes.integers(0, 256, size + 64, np.uint8)
    region = random_bytes.integers(0, 256, rows * row + 64, np.uint8)
    cache_at = sim.mem.put(cache, readonly=storing, align=512)
    region_at = sim.mem.put(region, readonly=not storing, align=512)

    entries = np.zeros(len(starts), struct("LayerEntry"))
    tables, segments, first_layer, first_tile, items = [], [], 0, 0, 0
    count = rng.randint(1, min(blocks, rows * pages))
    chosen = list(
        zip(rng.sample(range(blocks), count), rng.sample(range(rows * pages), count), strict=True)
    )
    pairs = np.array([(b, p // pages, p % pages) for b, p in chosen], PAIR)
    if not in_params and seed % 2:  # a graph's buffer may hold pairs that move nothing
        pairs["block"][rng.randrange(count)] = NO_BLOCK
    for layer in layers:
        tiles = tiles_of(layer.boxes, layer.alignment)
        tables.append(tiles)
        for n in range(first_layer, first_layer + layer.count):
            entries[n]["local_base"], entries[n]["local_stride"] = (
                cache_at + starts[n][0],
                layer.stride,
            )
            entries[n]["host_base"] = region_at + starts[n][1]
            entries[n]["host_row_stride"], entries[n]["host_page_stride"] = row, layer.page
        here = layer.count * count * len(tiles)
        segments.append((here, first_layer, count, 0, len(tiles), first_tile))
        first_layer += layer.count
        first_tile += len(tiles)
        items += here

    ctas, threads = rng.randint(1, 4), rng.choice([32, 64, 96])
    head = np.zeros(1, HEAD)
    head["layers"] = sim.mem.put(entries, readonly=True)
    head["tiles"] = sim.mem.put(np.concatenate(tables), readonly=True)
    head["pairs"] = 0 if in_params else sim.mem.put(pairs, readonly=True)
    head["num_segments"] = len(segments)
    head["segments"][0][: len(segments)] = segments
    head["items_per_warp"], head["extra_items"] = share(items, ctas * threads // 32)
    args = head.tobytes() + (pairs.tobytes() if in_params else b"")
    _, expected_size = next(iter(sim.find(name).params.values()))
    assert HEAD.itemsize <= expected_size and (in_params or HEAD.itemsize == expected_size)
    sim.launch(
        name, ctas, threads, [args.ljust(expected_size, b"\0")], seed=seed, max_steps=200_000
    )

    want_cache, want_region = cache.copy(), region.copy()
    written = np.zeros(len(region if storing else cache), np.uint16)
    n = 0
    for layer in layers:
        for _ in range(layer.count):
            for block, host_row, host_page in pairs.tolist():
                if block == NO_BLOCK:
                    continue
                local = starts[n][0] + block * layer.stride
                host = starts[n][1] + host_row * row + host_page * layer.page
                for box in layer.boxes:
                    for left, right in byte_pairs(box):
                        if storing:
                            want_region[host + right] = cache[local + left]
                            written[host + right] += 1
                        else:
                            want_cache[local + left] = region[host + right]
                            written[local + left] += 1
            n += 1
    np.testing.assert_array_equal(sim.mem.get(cache_at, len(cache)), want_cache)
    np.testing.assert_array_equal(sim.mem.get(region_at, len(region)), want_region)
    target = region_at if storing else cache_at
    np.testing.assert_array_equal(sim.mem.write_counts(target, len(written)), written)
    assert written.max() == 1 or (pairs["block"] == NO_BLOCK).all()


def test_the_parameter_variant_fits_what_the_driver_takes(ptx: str) -> None:
    for name in KERNELS:
        sim = PtxSim(kernel_text(ptx, name), mem=Memory(1 << 12))
        assert sim.find(name).psize <= 32764


# ---- the interpreter itself --------------------------------------------------------------------

PROBE = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry probe(.param .align 8 .b8 probe_param_0[64], .param .u64 probe_param_1)
{
  .reg .pred %p<2>;
  .reg .b32 %r<8>;
  .reg .b64 %rd<8>;
  mov.u32 %r1, %tid.x;
  mov.b64 %rd1, probe_param_0;
  mul.wide.u32 %rd2, %r1, 4;
  add.s64 %rd3, %rd1, %rd2;
  ld.param.u32 %r2, [%rd3+4];
  ld.param.u64 %rd4, [probe_param_1];
  add.s64 %rd5, %rd4, %rd2;
  st.global.u32 [%rd5], %r2;
  ret;
}
"""


def test_the_interpreter_reads_parameters_through_computed_addresses() -> None:
    sim = PtxSim(PROBE)
    words = np.arange(100, 116, dtype=np.uint32)
    out = sim.mem.put(np.zeros(15, np.uint32))
    sim.launch("probe", 1, 15, [words.tobytes(), out])
    np.testing.assert_array_equal(sim.mem.get(out, 60).view(np.uint32), words[1:])


@pytest.mark.parametrize(
    ("threads", "options", "message"),
    [
        (18, {}, "parameter access out of range"),
        (15, {"skew": 2}, "misaligned"),
        (15, {"readonly": True}, "bad write"),
    ],
)
def test_the_interpreter_refuses_what_a_chip_would_not_survive(
    threads: int, options: dict[str, object], message: str
) -> None:
    sim = PtxSim(PROBE)
    out = sim.mem.put(np.zeros(20, np.uint32), **options)
    with pytest.raises(PtxError, match=message):
        sim.launch("probe", 1, threads, [bytes(64), out])


def test_the_tile_struct_is_the_one_that_the_kernel_reads() -> None:
    assert struct("Tile").itemsize == _C.DESCRIPTOR_LAYOUT["Tile"]["size"] == 80
