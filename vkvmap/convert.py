"""Page files of one configuration to canonical chunks, and those to page files of another.

Page files are what is left where every rank wrote its own bytes: one file per rank and chunk,

    <root>/<stage>.<rank>/<group>/<key in hex>.pages

holding, for each layer of that stage and group in model order, the rank's pages of the chunk in
token order, every page in the layout's own byte order without padding. Such files mean nothing
without the configuration that wrote them; canonical chunks do.

Both directions stream: memory is bounded by the batch, whatever the number of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vkvmap.configuration import Configuration
from vkvmap.derive import derive_canonical_mappings
from vkvmap.errors import StoreError
from vkvmap.format import iterate_formats
from vkvmap.identity import Identity
from vkvmap.keys import keys_named
from vkvmap.mapping import Family
from vkvmap.paged import paged_layer, views_of
from vkvmap.region import Region
from vkvmap.sections import sections_for
from vkvmap.store import CanonicalStore, StoreJob
from vkvmap.store_exchange import not_moved, write_whole
from vkvmap.transfer_plan import TransferPlan

Bytes = npt.NDArray[np.uint8]

#: Called with (chunks done, chunks in all) after each batch.
Progress = Callable[[int, int], None]
SUFFIX = ".pages"


@dataclass(frozen=True)
class PageFiles:
    """A folder of per-rank page files and what they mean.

    Attributes:
        root: the folder.
        identity: model, layer table, chunk tokens and family of the canonical side.
        configuration: who wrote the files, or will read them.
    """

    root: Path
    identity: Identity
    configuration: Configuration

    def path(self, stage: int, rank: int, group: str, key: bytes) -> Path:
        """The file of one rank and chunk."""
        index = self.identity.layers.groups.index(group)
        return self.root / f"{stage}.{rank}" / str(index) / f"{key.hex()}{SUFFIX}"

    def keys(self, group: str) -> list[bytes]:
        """Keys of which the first rank that has layers of `group` wrote a file.

        A file whose name is no key is somebody else's and left alone.
        """
        for stage, names in enumerate(self.configuration.stage_layers(self.identity.layers)):
            if any(self.identity.layers[name].group == group for name in names):
                folder = self.path(stage, 0, group, b"x").parent
                return keys_named(file.stem for file in folder.glob(f"*{SUFFIX}"))
        return []


@dataclass
class Converted:
    """What a conversion did; `skipped` says why a chunk was left out, by group and key in hex."""

    chunks: int = 0
    nbytes: int = 0
    skipped: dict[str, str] = field(default_factory=dict)


def to_canonical(
    files: PageFiles,
    store: CanonicalStore,
    *,
    batch_bytes: int = 256 << 20,
    progress: Progress | None = None,
) -> Converted:
    """Join the page files of all ranks into canonical chunks and store them.

    A chunk of which a rank's file is missing or short is skipped.

    Args:
        files: what to read.
        store: where to put chunks; its identity is that of `files`.
        batch_bytes: bytes of canonical chunks in memory at a time.
        progress: told how far it is.

    Raises:
        RefusedError: a layer cannot be certified under this configuration.
        StoreError: the store's identity is another one, or it is full.
    """
    _same_identity(files, store)
    done = Converted()
    total = sum(len(files.keys(group)) for group in files.identity.layers.groups)
    for group in files.identity.layers.groups:
        keys = files.keys(group)
        if not keys:
            continue
        with _Bench(files, group, batch_bytes, len(keys)) as bench:
            for batch in bench.batches(keys):
                rows = [row for row, key in enumerate(batch) if bench.read(key, row, done)]
                bench.move(store=True, rows=len(batch))
                good = [batch[row] for row in rows]
                job = store.put(good, group, [bench.region.row(group, row) for row in rows])
                job.wait()
                _note(done, group, good, job, bench.chunk_bytes)
                if progress is not None:
                    progress(done.chunks + len(done.skipped), total)
    return done


def from_canonical(
    store: CanonicalStore,
    files: PageFiles,
    *,
    keys: Sequence[bytes] | None = None,
    batch_bytes: int = 256 << 20,
    progress: Progress | None = None,
) -> Converted:
    """Cut canonical chunks into page files for every rank of ``files.configuration``.

    Args:
        store: where chunks are.
        files: where to write; existing files of the same keys are replaced.
        keys: which chunks, of every group that has them; default all.
        batch_bytes, progress: as for `to_canonical`.

    Raises:
        RefusedError: a layer cannot be certified under this configuration.
        StoreError: the store's identity is another one, or files cannot be written.
    """
    _same_identity(files, store)
    done = Converted()
    chosen_keys = None if keys is None else frozenset(keys)
    wanted = {}
    for chunk in iterate_formats(files.identity):
        found = store.keys(chunk.group)
        if chosen_keys is not None:
            found = [key for key in found if key in chosen_keys]
        wanted[chunk.group] = found
    total = sum(map(len, wanted.values()))
    for group, chosen in wanted.items():
        if not chosen:
            continue
        with _Bench(files, group, batch_bytes, len(chosen)) as bench:
            for batch in bench.batches(chosen):
                rows = [bench.region.row(group, index) for index in range(len(batch))]
                job = store.get(batch, group, rows)
                job.wait()
                bench.move(store=False, rows=len(batch))
                good = job.good.tolist()
                for index, key in enumerate(batch):
                    if good[index]:
                        bench.write(key, index)
                _note(done, group, batch, job, bench.chunk_bytes)
                if progress is not None:
                    progress(done.chunks + len(done.skipped), total)
    return done


class _Bench:
    """Caches of all ranks of one configuration, side by side, and a region to move through."""

    def __init__(self, files: PageFiles, group: str, batch_bytes: int, chunks: int) -> None:
        self.files, self.group = files, group
        identity, side = files.identity, files.configuration
        self.table = identity.layers
        chunk_tokens = {name: identity.chunks[name].tokens for name in self.table.groups}
        family: Family = identity.family
        members = [spec.name for spec in self.table.in_group(group)]
        first = derive_canonical_mappings(
            self.table,
            views_of(self.table, members, side, 0),
            side.grid,
            0,
            family=family,
            strict=True,
        )
        # Strict: a group of which a layer is not described has been refused by now.
        self.chunk_bytes = identity.chunks[group].payload_bytes
        self.batch = max(1, min(batch_bytes // self.chunk_bytes, chunks))
        sections = [s for s in sections_for(first, chunk_tokens, self.batch) if s.name == group]
        self.region = Region.create(sections, backing="private")
        self.memory: dict[tuple[int, int], dict[str, Bytes]] = {}
        self.plans: dict[tuple[int, int], TransferPlan] = {}
        try:
            for stage, names in enumerate(side.stage_layers(self.table)):
                mine = [name for name in names if name in members]
                for rank in range(side.grid.size if mine else 0):
                    self._add_rank(stage, rank, mine, family, chunk_tokens)
        except BaseException:
            self.close()
            raise

    def _add_rank(
        self, stage: int, rank: int, names: list[str], family: Family, chunk_tokens: dict[str, int]
    ) -> None:
        side, views, arrays = self.files.configuration, {}, {}
        tokens = chunk_tokens[self.group]
        for name in names:
            span = side.block_size
            if self.table[name].has_tokens:
                shard = side.grid.context_shard(rank, dcp_sharded=self.table[name].dcp_sharded)
                span = side.block_size * shard.count
            pages = tokens // span if tokens else 1
            layer = paged_layer(self.table[name], side, rank, num_blocks=self.batch * pages)
            array = np.zeros((self.batch, pages * layer.page_bytes), np.uint8)
            arrays[name] = array
            views[name] = layer.view(array.ctypes.data)
        mappings = derive_canonical_mappings(
            self.table, views, side.grid, rank, family=family, strict=True
        )
        self.memory[stage, rank] = arrays
        self.plans[stage, rank] = TransferPlan(
            mappings, views, self.region, chunk_tokens=chunk_tokens
        )

    def batches(self, keys: Sequence[bytes]) -> Iterator[list[bytes]]:
        for start in range(0, len(keys), self.batch):
            yield list(keys[start : start + self.batch])

    def read(self, key: bytes, row: int, done: Converted) -> bool:
        """Fill row `row` of every rank's cache from its file; False, noted, if one is no good."""
        for (stage, rank), arrays in self.memory.items():
            path = self.files.path(stage, rank, self.group, key)
            expected = sum(array.shape[1] for array in arrays.values())
            try:
                data = np.fromfile(path, np.uint8)
            except OSError as error:
                done.skipped[f"{self.group} {key.hex()}"] = f"{path}: {error.strerror}"
                return False
            if data.size != expected:
                done.skipped[f"{self.group} {key.hex()}"] = (
                    f"{path} has {data.size} bytes, this configuration writes {expected}"
                )
                return False
            start = 0
            for array in arrays.values():
                array[row] = data[start : start + array.shape[1]]
                start += array.shape[1]
        return True

    def write(self, key: bytes, row: int) -> None:
        """Write row `row` of every rank's cache to its file, whole or not at all."""
        for (stage, rank), arrays in self.memory.items():
            path = self.files.path(stage, rank, self.group, key)
            try:
                write_whole(path, [array[row].data for array in arrays.values()])
            except OSError as error:
                raise StoreError(f"cannot write {path}: {error.strerror}") from error

    def move(self, *, store: bool, rows: int) -> None:
        for plan in self.plans.values():
            pages = np.arange(rows * plan.pages_per_chunk[self.group])
            job = plan.store((pages, pages)) if store else plan.load((pages, pages))
            job.check()

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for plan in self.plans.values():
            plan.close()
        self.region.close(force=True)


def _same_identity(files: PageFiles, store: CanonicalStore) -> None:
    if files.identity.name != store.identity.name:
        reason = store.identity.difference(files.identity.json)
        raise StoreError(f"the page files are not of this store's identity: {reason}")


def _note(done: Converted, group: str, keys: Sequence[bytes], job: StoreJob, nbytes: int) -> None:
    """Count the chunks of `nbytes` that `job` moved; say of the others why not."""
    left = not_moved(keys, job)
    done.skipped |= {f"{group} {key.hex()}": reason for key, reason in left}
    done.chunks += len(keys) - len(left)
    done.nbytes += (len(keys) - len(left)) * nbytes
