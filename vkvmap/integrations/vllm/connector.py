"""The connector: the engine's own, which also tells it of loads that failed.

Optional. With the engine's connector a failed transfer stops the engine; with this one the request
is recomputed (``kv_load_failure_policy: "recompute"``) or fails alone, and the damaged chunk is not
offered again.
"""

from __future__ import annotations

from typing import Any

from vkvmap.integrations.vllm import versions
from vkvmap.integrations.vllm.jobs import job_blocks

_Connector: Any = versions.connector_class()


class VkvmapConnector(_Connector):  # type: ignore[misc]  # the engine has no types here
    """`OffloadingConnector` with failures; selected by ``kv_connector_module_path``."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.vkvmap_config = vllm_config
        self.vkvmap_manager: Any = None
        self._failed_blocks: set[int] = set()
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            self.connector_worker.spec.connector = self
        if self.connector_scheduler is not None:
            self._jobs = versions.scheduler_jobs(self.connector_scheduler)

    # ---- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Any) -> Any:
        """As the engine does, then take over the reporting of failures."""
        answer = super().register_kv_caches(kv_caches)
        worker = self.connector_worker.worker
        worker.reports_failures = _can_report(self)
        return answer

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Ended transfers; a request whose load failed is both received and failed."""
        requests = dict(self.connector_worker._load_jobs)
        results = super().get_transfer_results(finished_req_ids)
        failed = self.connector_worker.worker.take_failed_loads()
        results.failed_recving |= {requests[job] for job in failed if job in requests}
        return results

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        """Releases without transfer results learn of failures by block ids."""
        answer = super().get_finished(finished_req_ids)
        if not hasattr(_Connector, "get_transfer_results"):
            for pairs in self.connector_worker.worker.take_failed_loads().values():
                self._failed_blocks |= job_blocks(pairs)
        return answer

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Cache blocks of failed loads, once."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed | set(super().get_block_ids_with_load_errors())

    # ---- scheduler ------------------------------------------------------------------------------

    def update_connector_output(self, connector_output: Any) -> Any:
        """Mark what has failed before the engine takes over what has ended."""
        side = self.connector_scheduler
        manager = side.manager
        if hasattr(manager, "failed_jobs"):
            for job_id in manager.failed_jobs():
                status = self._jobs.get(job_id)
                if status is not None:
                    manager.mark_failed(status.keys, stored=status.is_store)
        return super().update_connector_output(connector_output)


def _can_report(connector: Any) -> bool:
    """Whether this release can be told of a failed load at all."""
    if hasattr(_Connector, "get_transfer_results"):
        return hasattr(connector.connector_worker, "_load_jobs")
    one_group = len(connector.connector_worker.spec.config.groups) == 1
    return one_group and hasattr(_Connector, "get_block_ids_with_load_errors")
