"""One rank of a round trip, as a process of its own: ``python -m vkvmap.roundtrip.rank``.

Reads its `RankTask` from standard input, then one line per step from the parent, and answers with
one JSON object per line. It builds its cache and plan like an engine's worker would, and imports
torch only for caches on a GPU.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from vkvmap import cuda
from vkvmap.cache import CacheView, TensorView
from vkvmap.derive import derive_canonical_mappings
from vkvmap.errors import VkvmapError
from vkvmap.layout import CELL
from vkvmap.region import Region
from vkvmap.roundtrip.task import RankReport, RankTask
from vkvmap.roundtrip.truth import POISON, Bytes, Holder, PageTruth
from vkvmap.spec import HEAD, TOKEN
from vkvmap.transfer import Engine
from vkvmap.transfer_plan import TransferPlan

#: Caches start on a page boundary, as allocators of that size do.
_ALIGNMENT = 4096


class DeviceTwin:
    """A copy of host memory on a device, where transfers see it; torch is imported here only."""

    def __init__(self, memory: Bytes, device: str) -> None:
        import torch

        self._host = torch.from_numpy(memory)
        self.tensor = self._host.to(device, copy=True)
        if self.tensor.is_cuda:
            torch.cuda.synchronize()

    @property
    def address(self) -> int:
        """Address of the first byte on the device."""
        return int(self.tensor.data_ptr())

    @property
    def device(self) -> str:
        """The device's name, with its number."""
        return str(self.tensor.device)

    def fetch(self) -> None:
        """Bring the device's bytes back to the host memory that this was made from."""
        self._host.copy_(self.tensor)


class Cache:
    """One rank's paged cache in host memory, poisoned, and the truth that belongs into it."""

    def __init__(self, task: RankTask) -> None:
        self.task = task
        self.paged = {name: task.paged(name) for name in task.layers}
        self._starts: dict[str, int] = {}
        end = 0
        for name, layer in self.paged.items():
            self._starts[name] = end
            end += -(-layer.nbytes // _ALIGNMENT) * _ALIGNMENT
        backing = np.empty(end + _ALIGNMENT, np.uint8)
        shift = -backing.ctypes.data % _ALIGNMENT
        self.memory: Bytes = backing[shift : shift + end]
        self.memory[:] = POISON
        side = task.side
        self.holder = Holder(side.tp, side.dcp, side.pcp, side.interleave, side.pcp_mode, task.rank)
        self.twin: DeviceTwin | None = None

    def views(self) -> dict[str, CacheView]:
        """What an engine would register: host memory, or the device's copy of it."""
        twin = self.twin
        address = self.memory.ctypes.data if twin is None else twin.address
        device = "cpu" if twin is None else twin.device
        owner = self.memory if twin is None else twin.tensor
        storage = (address, self.memory.nbytes)
        views = {}
        for name, layer in self.paged.items():
            start = address + self._starts[name]
            tensor = TensorView(
                start, layer.shape, layer.strides, 1, storage, device=device, owner=owner
            )
            views[name] = replace(layer.view(start, storage), tensors=(tensor,))
        return views

    def bytes_of(self, name: str) -> Bytes:
        """All bytes of a layer's tensor with padding, uint8 ``(blocks, stride)``."""
        layer = self.paged[name]
        start = self._starts[name]
        flat = self.memory[start : start + layer.nbytes]
        return flat.reshape(layer.shape[0], layer.strides[0])

    def expected(self, name: str) -> Bytes:
        """What `bytes_of` must be once every page is in its block."""
        layer = self.paged[name]
        spec = self.task.job.table[name]
        truth = PageTruth(
            spec,
            self.task.job.table.index(name),
            self.holder,
            layer.layout.name,
            layer.block_size,
        )
        out = np.full((layer.shape[0], layer.strides[0]), POISON, np.uint8)
        view = np.lib.stride_tricks.as_strided(out, layer.shape, layer.strides)
        for page, block in enumerate(self.task.block_table(spec.group)):
            view[block] = truth.block(page).reshape(layer.shape[1:])
        return out

    def where(self, name: str, position: int) -> str:
        """The byte at `position` of `bytes_of`, in the terms of the layer's tensor."""
        layer = self.paged[name]
        block, within = divmod(position, layer.strides[0])
        if within >= layer.page_bytes:
            return f"layer {name!r}, block {block}, padding byte {within - layer.page_bytes}"
        dims = layer.layout.parts[0].dims
        text = f"layer {name!r}, block {block}"
        for dim, size, stride in sorted(
            zip(dims[1:], layer.shape[1:], layer.strides[1:], strict=True), key=lambda d: -d[2]
        ):
            index, within = divmod(within, stride)
            label = {CELL: "byte", TOKEN: "slot", HEAD: "local head"}.get(dim, dim)
            text += f", {label} {index % size}"
        table = self.task.block_table(self.task.job.table[name].group)
        return text if block in table else f"{text} (a block that nobody named)"


def run(task: RankTask, tell: Any, wait: Any) -> RankReport:
    """Fill or poison, wait for the others, transfer, check. `tell` takes progress events."""
    side = "load" if task.loading else "store"
    report = RankReport(side, task.stage, task.rank)
    cache = Cache(task)
    names = task.layers
    if not task.loading:
        for done, name in enumerate(names):
            cache.bytes_of(name)[:] = cache.expected(name)
            tell({"event": "progress", "done": done + 1, "of": 2 * len(names)})
    if task.job.device != "cpu":
        cache.twin = DeviceTwin(cache.memory, _device(task))
    views = cache.views()
    job = task.job
    mappings = derive_canonical_mappings(
        job.table, views, task.side.grid, task.rank, family=job.family, strict=True
    )
    region = Region.attach(task.region_fd)
    # Map the region's pages before the clock starts, as pinning does in an engine.
    int(region.view[::4096].max(initial=0))
    pinning = cuda.pin(region) if job.device != "cpu" else None
    with Engine(threads=task.threads) as engine:
        plan = TransferPlan(
            mappings,
            views,
            region,
            chunk_tokens=job.chunk_tokens,
            mover=job.mover,
            writers=job.writers,
            engine=engine,
        )
        pairs = {
            group: (task.block_table(group), task.page_ids(group, plan.pages_per_chunk[group]))
            for group in plan.groups
        }
        tell({"event": "ready"})
        wait()
        began = time.perf_counter()
        transfer = plan.load(pairs) if task.loading else plan.store(pairs)
        result = transfer.check()
        seconds = time.perf_counter() - began
        plan.close()
    if pinning is not None:
        pinning.release()
    if cache.twin is not None:
        cache.twin.fetch()
    report = replace(
        report,
        nbytes=int(result["bytes"]),
        fragments=int(result["fragments"]),
        mover=str(result["mover"]),
        seconds=seconds,
    )
    checked = wrong = 0
    first = ""
    for done, name in enumerate(names):
        found, expected = cache.bytes_of(name), cache.expected(name)
        differ = np.flatnonzero(found.reshape(-1) != expected.reshape(-1))
        checked += found.size
        wrong += differ.size
        if differ.size and not first:
            at = int(differ[0])
            first = (
                f"{cache.where(name, at)}: found {found.reshape(-1)[at]:#04x}, "
                f"expected {expected.reshape(-1)[at]:#04x}"
            )
        tell({"event": "progress", "done": len(names) + done + 1, "of": 2 * len(names)})
    region.close(force=True)
    return replace(report, checked=checked, wrong=wrong, first_wrong=first)


def _device(task: RankTask) -> str:
    """The GPU of this rank: ranks take the node's devices in turn."""
    order = task.stage * task.side.grid.size + task.rank
    return f"{task.job.device}:{order % max(1, len(cuda.devices()))}"


def main() -> int:
    """The process: task in, events out."""
    task: RankTask = pickle.load(sys.stdin.buffer)
    out = sys.stdout

    def tell(event: dict[str, Any]) -> None:
        out.write(json.dumps(event) + "\n")
        out.flush()

    def wait() -> None:
        if not sys.stdin.buffer.readline():
            sys.exit(1)  # the parent is gone, so nobody wants the rest

    try:
        report = run(task, tell, wait)
    except (VkvmapError, MemoryError, OSError) as error:
        side = "load" if task.loading else "store"
        text = str(error) or type(error).__name__
        report = RankReport(side, task.stage, task.rank, error=text)
    tell({"event": "report", **asdict(report)})
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
