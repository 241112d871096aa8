"""The engine's own canonical submit path against ours: same process, same block lists.

Llama-3-70B (80 layers, 8 KV heads of 128, bfloat16), rank 3 of TP=8, blocks of 16 tokens, NHD.
Theirs is imported from the installed vLLM and run whole, from a job's block ids to descriptors that
are ready for the driver; only its call is left out, and streams and events, for want of a GPU. Ours
is the integration's worker, from the same ids to a queued transfer; its engine is stalled so that
copying does not compete for the cores. Bytes that both would move are compared first.

Two figures, because each contender runs in the caches that the other has just emptied, and theirs
writes up to 63 MB of descriptors per submission:
* in a row: the mean of a few submissions that follow one of their own kind, as a busy engine makes
  them;
* first: one submission right after the other contender's, where ours pays for their memory.

Not measured, and in their disfavour if it were: the driver's work per descriptor (published: 0.5 us
each for batched copies), and the upload of descriptors.

Run it with the interpreter that has vLLM: ``python benchmarks/vllm_submit.py``.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from benchmarks.harness import Report, Result, Samples, parser, spread
from vkvmap import CacheView, LayerSpec, LayerTable, RankGrid, derive_canonical_mappings
from vkvmap.identity import Identity
from vkvmap.integrations.vllm.options import Options
from vkvmap.integrations.vllm.rows import RowLayout
from vkvmap.integrations.vllm.setup import Setup
from vkvmap.integrations.vllm.worker import VkvmapWorker

TP, RANK, BLOCK_SIZE, HEADS, HEAD_SIZE = 8, 3, 16, 8, 128
PAIR_BYTES = 16  # per block and group, for all layers (DESIGN 3)
IN_A_ROW, WARM_UP = 5, 3
GOAL_TIME, GOAL_BYTES = 100.0, 1000.0
GOAL_BLOCKS, GOAL_LAYOUTS = 1024, ("packed_nhd", "split_nhd")


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on a GPU, which their constructor asks."""

    is_cuda = True


class Idle:
    """A stream and an event that do nothing."""

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, other: object) -> None: ...
    def record(self, stream: object) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...


class Model:
    """Caches, host rows and mappings of one rank; both sides use the same memory layout."""

    def __init__(self, layout: str, layers: int, blocks: int) -> None:
        shape, order = {
            "packed_nhd": ((blocks, BLOCK_SIZE, 1, 2 * HEAD_SIZE), (0, 2, 1, 3)),
            "split_nhd": ((blocks, 2, BLOCK_SIZE, 1, HEAD_SIZE), (0, 1, 2, 3, 4)),
            "packed_hnd": ((blocks, 1, BLOCK_SIZE, 2 * HEAD_SIZE), (0, 1, 2, 3)),
        }[layout]
        self.names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
        self.table = LayerTable(
            LayerSpec.attention(name, num_kv_heads=HEADS, head_size=HEAD_SIZE)
            for name in self.names
        )
        # One allocation for all layers, as the engine makes it.
        backing = torch.zeros((layers, *shape), dtype=torch.bfloat16)
        self.tensors = [backing[layer] for layer in range(layers)]
        self.caches = {
            name: CacheView.of(tensor.permute(order), layout, BLOCK_SIZE)
            for name, tensor in zip(self.names, self.tensors, strict=True)
        }
        self.mappings = derive_canonical_mappings(
            self.table, self.caches, RankGrid(tp=TP), RANK, strict=True
        )
        self.rows = RowLayout.of(self.mappings, {"0": BLOCK_SIZE}, verify=False)
        self.layout, self.num_rows = layout, blocks

    def ours(self) -> tuple[VkvmapWorker, np.ndarray]:
        identity = Identity(
            "bench",
            "1",
            self.table,
            BLOCK_SIZE,
            "native",
            layouts=self.layout,
            spans=BLOCK_SIZE,
        )
        setup = Setup(
            self.mappings, self.caches, self.rows, identity, ("0",), 1, True, (), (), RANK
        )
        host = np.zeros(self.num_rows * self.rows.row_bytes, np.uint8)
        worker = VkvmapWorker(setup, Options(), memoryview(host), self.num_rows, lambda: None)
        return worker, host

    def theirs(self) -> tuple[Any, np.ndarray]:
        """Their handler of one direction, on descriptors only."""
        refs, views = [], []
        host = np.zeros(self.num_rows * self.rows.row_bytes, np.uint8)
        flat = torch.from_numpy(host).view(torch.int8)
        offset = 0
        for index, name in enumerate(self.names):
            mine = self.mappings.by_layer[name]
            runs = tuple(base.CopyRun(**vars(run)) for run in mine.runs)
            theirs = base.CanonicalPageMapping(
                mine.canonical_page_size_bytes,
                mine.local_page_size_bytes,
                runs,
                mine.num_writers,
                mine.writer_index,
                mine.parallelism_agnostic,
            )
            refs.append(base.CanonicalKVCacheRef(index, mine.local_page_size_bytes, theirs))
            size = mine.canonical_page_size_bytes
            views.append(flat.as_strided((self.num_rows, size), (self.rows.row_bytes, 1), offset))
            offset += size
        pages = [t.view(torch.int8).reshape(len(t), -1) for t in self.tensors]
        handler = gpu_worker.SingleDirectionOffloadingHandler(
            gpu_tensors=[page.as_subclass(OnDevice) for page in pages],
            cpu_tensors=views,
            blocks_per_chunk=1,
            layer_refs_per_group=[refs],
            gpu_to_cpu=True,
            canonical_layout=True,
        )
        handler.kept = (host, pages, views)
        return handler, host


def spec_pair(blocks: np.ndarray, rows: np.ndarray) -> tuple[Any, Any]:
    """The engine's two halves of a job."""
    cache = base.GPULoadStoreSpec(blocks.tolist(), (len(blocks),), (0,))
    return cache, CPULoadStoreSpec(rows.tolist())


class Theirs:
    """Submits through the engine's handler; what it hands to the driver is kept in `given`."""

    def __init__(self, model: Model) -> None:
        self.handler, self.host = model.theirs()
        self.given: tuple[torch.Tensor, ...] = ()
        self.handler._swap_blocks_batch = self._driver
        idle = Idle()
        gpu_worker.current_platform = SimpleNamespace(
            current_stream=lambda: idle, stream=lambda stream: stream, is_xpu=lambda: False
        )

    def _driver(self, src: Any, dst: Any, sizes: Any, **_: Any) -> None:
        self.given = (src, dst, sizes)

    def submit(self, cache: Any, rows: Any) -> None:
        handler = self.handler
        handler._stream_pool, handler._event_pool = [Idle()], [Idle(), Idle()]
        handler.transfer_async(0, cache, rows)

    def settle(self) -> None:
        """Give the descriptor buffers back, as their `get_finished` does."""
        for transfer in self.handler._transfers:
            buffers = (transfer.batch_src, transfer.batch_dst, transfer.batch_sizes)
            self.handler._buffer_pool.append(buffers)
        self.handler._transfers.clear()

    def move(self) -> None:
        """What the driver would do."""
        for src, dst, size in zip(*(t.numpy() for t in self.given), strict=True):
            ctypes.memmove(int(dst), int(src), int(size))


def check_bytes(layout: str) -> None:
    """Both sides store the same bytes to the same places."""
    model = Model(layout, layers=3, blocks=8)
    rng = np.random.default_rng(1)
    for tensor in model.tensors:
        raw = tensor.view(torch.uint8).numpy()
        raw[:] = rng.integers(0, 256, raw.shape, dtype=np.uint8)
    blocks, rows = rng.permutation(8)[:6], rng.permutation(8)[:6]
    cache, host = spec_pair(blocks, rows)
    theirs = Theirs(model)
    theirs.submit(cache, host)
    theirs.move()
    worker, ours = model.ours()
    worker.submit_store(0, cache, host)
    worker.wait({0})
    worker.shutdown()
    assert ours.any() and np.array_equal(ours, theirs.host), "the two do not move the same bytes"


def measure(layout: str, report: Report, rounds: int) -> None:
    check_bytes(layout)
    model = Model(layout, layers=80, blocks=1100)
    theirs, (worker, _) = Theirs(model), model.ours()
    worker._engine.stall()
    rng = np.random.default_rng(0)
    job = iter(range(1 << 30))
    gc.collect()
    gc.disable()

    def drop() -> None:
        worker._engine.cancel_pending()
        worker._pending.clear()

    def submit_theirs(cache: Any, host: Any) -> None:
        theirs.submit(cache, host)
        theirs.settle()

    def submit_ours(cache: Any, host: Any) -> None:
        worker.submit_store(next(job), cache, host)

    def in_turns(cache: Any, host: Any) -> tuple[dict[str, Samples], dict[str, Samples]]:
        """Seconds of the first submission of a turn, and of the others on average."""
        contenders = {"vllm": submit_theirs, "vkvmap": submit_ours}
        first = {name: Samples() for name in contenders}
        others = {name: Samples() for name in contenders}
        for turn in range(WARM_UP + rounds):
            for name, submit in contenders.items():
                drop()
                start = time.perf_counter()
                submit(cache, host)
                middle = time.perf_counter()
                for _ in range(IN_A_ROW):
                    submit(cache, host)
                end = time.perf_counter()
                if turn >= WARM_UP:
                    first[name].seconds.append(middle - start)
                    others[name].seconds.append((end - middle) / IN_A_ROW)
        return first, others

    for count in (64, 256, 1024):
        cache, host = spec_pair(rng.permutation(1100)[:count], rng.permutation(1100)[:count])
        first, others = in_turns(cache, host)
        theirs.submit(cache, host)
        theirs.settle()
        number, size = len(theirs.given[0]), sum(t.nbytes for t in theirs.given)
        ours = PAIR_BYTES * count
        for kind, samples in (("in a row", others), ("first", first)):
            low, ratio, high = spread(samples["vllm"], samples["vkvmap"])
            name = f"submit {layout}, {count} blocks, {kind}"
            vllm, vkvmap = (samples[who].median * 1e6 for who in ("vllm", "vkvmap"))
            report.add(
                Result(f"{name}: vllm", vllm, "us"), f"{number:,} descriptors, {size:,} bytes"
            )
            report.add(
                Result(f"{name}: vkvmap", vkvmap, "us", vllm, ratio),
                f"({low:.0f}x to {high:.0f}x), {count:,} pairs, {ours:,} bytes: "
                f"{size / ours:,.0f}x",
            )
            if count == GOAL_BLOCKS and layout in GOAL_LAYOUTS:
                for what, value, goal in (
                    ("time", ratio, GOAL_TIME),
                    ("bytes", size / ours, GOAL_BYTES),
                ):
                    verdict = "met" if value >= goal else "MISSED"
                    print(f"  goal {goal:g}x in {what}: {verdict} ({value:,.0f}x)")
    drop()
    gc.enable()
    worker._engine.resume()
    worker.shutdown()


def main() -> None:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    report = Report(arguments.json)
    for layout in ("packed_nhd", "split_nhd", "packed_hnd"):
        measure(layout, report, arguments.rounds)
    report.write()


if __name__ == "__main__":
    main()
