"""The engine's own canonical offloading, made to run on the CPU: nothing of vkvmap is in it.

Scheduler, file tier, names, derivation of mappings and placement in the row are the engine's as
released; only its copying, which needs a GPU, is done here, byte by byte as its mappings say.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class StockSpec(TieringOffloadingSpec):
    """Select with ``canonical_layout: true``."""

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            self._validate_canonical_refs(kv_caches)
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = StockWorker(kv_caches, region)
        return self._worker


class StockWorker(OffloadingWorker):
    """Copies at once; one block to a chunk, one group."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        (refs,) = kv_caches.group_data_refs
        self._layers = [
            (
                kv_caches.tensors[ref.tensor_idx].tensor,
                region.create_next_canonical_view(ref.mapping.canonical_page_size_bytes),
                ref.mapping,
            )
            for ref in refs
        ]
        self._finished: list[Any] = []

    def _move(self, job_id: int, cache: Any, host: Any, store: bool) -> bool:
        moved = 0
        for block, chunk in zip(cache.block_ids.tolist(), host.block_ids.tolist(), strict=True):
            for tensor, rows, mapping in self._layers:
                if store and chunk % mapping.num_writers != mapping.writer_index:
                    continue
                page, row = tensor[block], rows[chunk]
                for run in mapping.runs:
                    for i in range(run.num_fragments):
                        here = run.local_offset + i * run.local_stride
                        there = run.canonical_offset + i * run.canonical_stride
                        size = run.fragment_size
                        source, target = page[here : here + size], row[there : there + size]
                        if store:
                            target.copy_(source)
                        else:
                            source.copy_(target)
                        moved += size
        self._finished.append(TransferResult(job_id, True, moved, 1e-6))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, dst_spec, src_spec, False)

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._layers.clear()
        self._region.cleanup()
