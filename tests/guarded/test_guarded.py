"""Pages against unmapped memory: one byte too far in either direction would end the process.

Each test runs its transfers in this process, so a fault shows as a crash of the test run, with the
test's name as the last line. That guards do fault is tested in a child.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.guarded.memory import guarded
from tests.worlds import World, worlds
from vkvmap import CacheView, LayerTable, Region, TransferPlan, derive_canonical_mappings
from vkvmap.cache import TensorView
from vkvmap.region import Section
from vkvmap.transfer import Engine


@pytest.mark.parametrize("step", [-1, 0])
def test_a_guard_faults(step: int) -> None:
    code = (
        "from tests.guarded.memory import guarded\n"
        "import ctypes\n"
        f"r, offset, data = guarded(100, against_end={step == 0})\n"
        f"ctypes.c_ubyte.from_address(r.address + offset + ({step} if {step} else 100)).value = 1\n"
    )
    child = subprocess.run([sys.executable, "-c", code], cwd=os.getcwd(), check=False)
    assert child.returncode == -signal.SIGSEGV


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(threads=1)


@settings(max_examples=150)
@given(worlds(legal=True), st.booleans(), st.booleans(), st.integers(0, 3), st.sampled_from([1, 2]))
def test_no_byte_before_or_behind_cache_and_region_is_touched(
    engine: Engine, world: World, cache_end: bool, region_end: bool, padding: int, blocks: int
) -> None:
    view = world.view(blocks)
    tensor = view.tensors[0]
    page = tensor.shape[0] // blocks * tensor.strides[0]
    # Padded blocks, but nothing behind the last one's bytes.
    stride = tensor.strides[0] + padding * (world.kernel_blocks == 1)
    reach = (tensor.shape[0] - 1) * stride + tensor.strides[0]
    storage, at, memory = guarded(reach, against_end=cache_end)
    memory[:] = np.random.default_rng(reach).integers(0, 256, reach, dtype=np.uint8)
    strides = (stride, *tensor.strides[1:])
    moved = TensorView(
        storage.address + at, tensor.shape, strides, 1, (storage.address + at, reach), "cpu", None
    )
    caches = {
        "layer": CacheView.of(
            moved, world.layout, world.block_size, kernel_blocks=world.kernel_blocks
        )
    }
    mappings = derive_canonical_mappings(
        LayerTable([world.spec]), caches, world.grid, 0, family=world.family, strict=True
    )
    tokens = world.block_size * world.shards
    payload = world.spec.canonical_bytes(tokens)
    rows = 2 * blocks
    host, start, region_bytes = guarded(rows * payload, against_end=region_end)
    region_bytes[:] = 0xA5
    with Region.from_buffer(
        host.address + start, rows * payload, host, [Section("0", rows, payload, payload)]
    ) as region:
        with TransferPlan(
            mappings, caches, region, chunk_tokens=tokens, writers="all", engine=engine
        ) as plan:
            ids = np.arange(blocks)
            before = memory.copy()
            plan.store((ids, ids * 2 + 1)).check()
            assert np.array_equal(memory, before)
            saved = [region.row("0", row).copy() for row in range(rows)]
            memory[:] = 0x5A
            plan.load((ids[::-1].copy(), ids * 2 + 1)).check()
    for row in range(0, rows, 2):
        assert np.all(saved[row] == 0xA5)
    for block in range(blocks):
        source = before[(blocks - 1 - block) * stride * world.kernel_blocks :][:page]
        assert np.array_equal(memory[block * stride * world.kernel_blocks :][:page], source)
    gaps = np.ones(reach, dtype=bool)
    for index in range(tensor.shape[0]):
        gaps[index * stride : index * stride + tensor.strides[0]] = False
    assert np.all(memory[gaps] == 0x5A)
