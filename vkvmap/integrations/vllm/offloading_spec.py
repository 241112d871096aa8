"""The offloading spec: what the engine makes one of in every worker, and one in its scheduler.

In a worker it describes the layers, certifies mappings, sizes the rows and makes the worker. In the
scheduler it takes over what the workers decided and otherwise is the engine's own tiering spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from vkvmap.integrations.vllm import metrics, versions
from vkvmap.integrations.vllm.board import SchedulerBoard, WorkerBoard
from vkvmap.integrations.vllm.manager import Manager
from vkvmap.integrations.vllm.options import EngineError, Options
from vkvmap.integrations.vllm.rows import ROW_ALIGNMENT, RowLayout
from vkvmap.integrations.vllm.setup import Setup, read_engine
from vkvmap.integrations.vllm.startup import log_setup, logger
from vkvmap.integrations.vllm.worker import make_worker
from vkvmap.region_backing import check_capacity

_TieringSpec: Any = versions.tiering_spec_class()


class VkvmapOffloadingSpec(_TieringSpec):  # type: ignore[misc]  # the engine has no types here
    """KV offloading whose pages do not depend on the parallel configuration.

    Options: see `Options`, under the key ``vkvmap`` of ``kv_connector_extra_config``, beside the
    engine's own (``cpu_bytes_to_use``, ``blocks_per_chunk``, ``secondary_tiers``, ...).

    Raises:
        EngineError: this engine, or this configuration, cannot be served; the message says why.
    """

    #: The connector that made this spec, if it is ours; set by it.
    connector: Any = None
    config: Any

    def __init__(self, config: Any) -> None:
        self.options = Options.read(config.extra_config)
        _check_budget(config.extra_config)
        # Our rows are neither of the engine's two layouts, and every rank acknowledges every job.
        super().__init__(
            versions.config_with(config, canonical_layout=False, replicated_layout=False)
        )
        self._ours: Any = None
        self._our_manager: Manager | None = None

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's own metrics of its tiers, and ours."""
        definitions: dict[str, Any] = dict(super().build_metric_definitions(extra_config))
        definitions.update(metrics.definitions())
        return definitions

    # ---- worker ---------------------------------------------------------------------------------

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker for `kv_caches`; called once, when the engine has allocated its cache."""
        if self._ours is None:
            self._ours = self._make_worker(kv_caches)
        return self._ours

    def _make_worker(self, kv_caches: Any) -> Any:
        setup = read_engine(self.config, kv_caches, self.options, self.connector)
        log_setup(setup, self.options)
        budget = int(self.extra_config["cpu_bytes_to_use"])
        num_rows = setup.rows.num_rows(budget)
        parallel = self.config.parallel
        if parallel.rank == 0:
            check_capacity(num_rows * setup.rows.row_bytes, directory="/dev/shm")
        prefault = _prefault_bytes(setup.rows, parallel.world_size)
        region = versions.host_region(
            self.config.engine_id, parallel.rank, setup.rows.row_bytes, num_rows, prefault
        )
        with ExitStack() as undo:
            undo.callback(region.cleanup)
            worker = make_worker(setup, self.options, region, num_rows)
            undo.pop_all()  # the region is the worker's to release now
            undo.callback(worker.shutdown)
            worker.board = WorkerBoard(
                self.config.engine_id, parallel.rank, _card(setup, num_rows, prefault)
            )
            undo.pop_all()
        if parallel.rank == 0:
            logger.info(
                "vkvmap: host region %s bytes: %s chunks of %s bytes; mover %s, %s threads",
                f"{num_rows * setup.rows.row_bytes:,}",
                f"{num_rows:,}",
                f"{setup.rows.row_bytes:,}",
                worker.mover,
                worker.threads,
            )
        return worker

    # ---- scheduler ------------------------------------------------------------------------------

    def get_manager(self) -> Any:
        """The engine's manager over the rows that the workers set up."""
        if self._our_manager is None:
            with ExitStack() as undo:
                board = SchedulerBoard(self.config.engine_id, self.config.parallel.world_size)
                undo.callback(board.close)
                self._take_over(board.card)
                inner = super().get_manager()
                undo.callback(inner.shutdown)
                self._our_manager = Manager(inner, board)
                undo.pop_all()
            if self.connector is not None:
                self.connector.vkvmap_manager = self._our_manager
        return self._our_manager

    def _take_over(self, card: Mapping[str, Any]) -> None:
        """Rows, names and layers as the workers' `card` has them."""
        versions.set_rows(self, card["row_bytes"], card["num_rows"], card["prefault"])
        self.config = versions.config_with(
            self.config,
            model=versions.config_with(
                self.config.model, dtype=f"{self.config.model.dtype}+vkvmap-{card['name']}"
            ),
            parallel=versions.config_with(
                self.config.parallel, is_parallelism_agnostic=card["shared"]
            ),
            # Tiers name their folders by these too; a pipeline stage knows its own only.
            groups=tuple(
                versions.config_with(group, layer_names=tuple(names))
                for group, names in zip(self.config.groups, card["layers"], strict=True)
            ),
        )


def _check_budget(extra_config: Mapping[str, Any]) -> None:
    budget = extra_config.get("cpu_bytes_to_use")
    if not isinstance(budget, (int, float)) or isinstance(budget, bool) or budget < 1:
        raise EngineError(
            f"cpu_bytes_to_use={budget!r}: give the bytes of host memory for all workers of this "
            "engine together in kv_connector_extra_config"
        )


def _prefault_bytes(rows: RowLayout, world_size: int) -> int:
    """Bytes of each row that one worker faults in, so that together they touch it once."""
    return -(-rows.row_bytes // world_size // ROW_ALIGNMENT) * ROW_ALIGNMENT


def _card(setup: Setup, num_rows: int, prefault: int) -> dict[str, Any]:
    return {
        "name": setup.identity.name,
        "shared": setup.shared,
        "row_bytes": setup.rows.row_bytes,
        "num_rows": num_rows,
        "prefault": prefault,
        "certified": setup.certified,
        "opaque": len(setup.mappings.layers) - setup.certified,
        "bytes_per_token": setup.bytes_per_token,
        "layers": [
            [spec.name for spec in setup.mappings.layers.in_group(group)] for group in setup.groups
        ],
    }
