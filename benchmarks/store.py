"""The store against plain files of the same bytes, and lookups.

Contenders write or read the same chunks with the same number of threads and the same sync policy
(bytes on the medium before a chunk is reported); the plain ones know neither digests, names in two
steps, capacity nor each other. Bytes are compared before anything is timed.

Where ext4 has no journal, give `--path` a new folder at the top of the file system. Before it makes
a file, such an ext4 looks at every inode in the folder's neighbourhood that was freed within the
last minutes. After some thousand removals, those of earlier runs among them, little else is
measured of writing small chunks; folders at the top get neighbourhoods of their own.

Prediction: a digest costs 1/20 of what the disk costs per byte, and a reservation and a rename some
tens of microseconds per chunk, so ratios are near 1 for chunks of megabytes. Plain buffered writes
copy everything into the page cache first, so the store, which does not, may well be faster.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Report, Result, interleaved, parser, spread
from vkvmap import CacheView, RankGrid, derive_canonical_mappings
from vkvmap.format import ChunkFormat
from vkvmap.identity import Identity
from vkvmap.keys import chunk_keys
from vkvmap.region import Region, Section
from vkvmap.spec import LayerSpec, LayerTable
from vkvmap.store import CanonicalStore
from vkvmap.store_witness import RankWitness

THREADS = 4


def identity_of(chunk_mib: int, layers: int) -> Identity:
    """A model whose chunks have `chunk_mib` MiB in `layers` layers."""
    tokens = chunk_mib * (1 << 20) // layers // (8 * 2 * 128 * 2)
    table = LayerTable(
        LayerSpec.attention(f"layer.{i}", num_kv_heads=8, head_size=128) for i in range(layers)
    )
    return Identity("bench", "1", table, tokens)


class Plain:
    """Files written and read the way one would without a store."""

    def __init__(self, folder: str, rows: list[np.ndarray], *, direct: bool, sync: bool) -> None:
        self.folder, self.rows, self.sync = folder, rows, sync
        self.flags = os.O_DIRECT if direct else 0
        self.pool = ThreadPoolExecutor(THREADS)

    def path(self, index: int) -> str:
        return f"{self.folder}/{index}"

    def write_one(self, index: int) -> None:
        fd = os.open(self.path(index), os.O_WRONLY | os.O_CREAT | self.flags, 0o600)
        try:
            view, done = self.rows[index].data, 0
            while done < len(view):
                done += os.pwrite(fd, view[done:], done)
            if self.sync:
                os.fdatasync(fd)
        finally:
            os.close(fd)

    def read_one(self, index: int) -> None:
        fd = os.open(self.path(index), os.O_RDONLY | self.flags)
        try:
            view, done = self.rows[index].data, 0
            while done < len(view):
                done += os.preadv(fd, [view[done:]], done)
        finally:
            os.close(fd)

    def write(self) -> None:
        list(self.pool.map(self.write_one, range(len(self.rows))))

    def read(self) -> None:
        list(self.pool.map(self.read_one, range(len(self.rows))))

    def clear(self) -> None:
        shutil.rmtree(self.folder)
        os.mkdir(self.folder)


def drop_from_cache(folder: str) -> None:
    """Make the next read of every file below `folder` come from the medium."""
    for place, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(place, name), os.O_RDONLY)
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def throughput(
    report: Report, folder: str, mib: int, chunk_mib: int, rounds: int, small: bool
) -> None:
    identity = identity_of(chunk_mib, 32)
    chunk = identity.chunks["0"].payload_bytes
    count = mib // chunk_mib

    pages = None if small else "transparent"
    with Region.create([Section("0", count, chunk)], huge_pages=pages) as region:
        rows = [region.row("0", i) for i in range(count)]
        seed = np.random.default_rng(0)
        for row in rows:
            row[:] = seed.integers(0, 256, chunk, np.uint8)
        kept = [bytes(row[:: chunk // 64]) for row in rows]
        keys = chunk_keys(np.arange(count * 16), 16)
        plain = {
            name: Plain(f"{folder}/{name}", rows, direct=direct, sync=True)
            for name, direct in (("plain buffered", False), ("plain direct", True))
        }
        for each in plain.values():
            os.mkdir(each.folder)
        with CanonicalStore(f"{folder}/store", identity, region=region, threads=THREADS) as store:

            def put() -> None:
                job = store.put(keys, "0", range(count))
                job.wait()
                assert set(job.outcomes) == {"stored"}, job.outcomes

            def get() -> None:
                job = store.get(keys, "0", range(count))
                job.wait()
                assert job.good.all(), job.reasons

            def clear() -> None:
                store.delete(keys, "0")
                for each in plain.values():
                    each.clear()

            put()
            region.view[region.section("0").offset :] = 0
            get()
            assert [bytes(row[:: chunk // 64]) for row in rows] == kept, "wrong bytes"
            contenders = {"store": put, **{name: each.write for name, each in plain.items()}}
            writes = interleaved(contenders, rounds=rounds, before=clear)
            clear()
            put()
            for each in plain.values():
                each.write()
            contenders = {"store": get, **{name: each.read for name, each in plain.items()}}
            reads = interleaved(contenders, rounds=rounds, before=lambda: drop_from_cache(folder))
            size = count * chunk / 1e9
            for what, samples in (("write", writes), ("cold read", reads)):
                for name in plain:
                    low, mid, high = spread(samples[name], samples["store"])
                    report.add(
                        Result(
                            f"{what} {chunk_mib} MiB chunks, store vs {name}",
                            size / samples["store"].median,
                            "GB/s",
                            size / samples[name].median,
                            mid,
                        ),
                        f"[{low:.2f}..{high:.2f}], {name} {size / samples[name].median:.2f} GB/s",
                    )


def lookups(report: Report, folder: str, rounds: int) -> None:
    identity = identity_of(1, 32)
    keys = chunk_keys(np.arange(64 * 5000), 64)
    row = np.zeros(identity.chunks["0"].payload_bytes, np.uint8)
    with CanonicalStore(f"{folder}/lookup", identity, sync="none") as store:
        there = keys[:1000]
        store.put(there, "0", [row] * len(there)).wait()
        assert store.lookup(keys, "0").tolist() == [i < 1000 for i in range(len(keys))]
        again = there * 20
        for name, asked in (("known keys", again), ("absent keys", keys[1000:])):
            samples = interleaved(
                {"lookup": lambda asked=asked: store.lookup(asked, "0")}, rounds=rounds
            )
            report.add(Result(f"lookups, {name}", len(asked) / samples["lookup"].median, "keys/s"))
        with CanonicalStore(f"{folder}/lookup", identity) as fresh:

            def first_look() -> None:
                fresh._shelves["0"].known.clear()
                fresh.lookup(there, "0")

            samples = interleaved({"lookup": first_look}, rounds=rounds)
            figure = len(there) / samples["lookup"].median
            report.add(Result("lookups, present keys seen for the first time", figure, "keys/s"))


def digests(report: Report, rounds: int) -> None:
    """What checking costs per byte: page digests always, end-to-end ones where asked for."""
    table = LayerTable(
        LayerSpec.attention(f"layer.{i}", num_kv_heads=8, head_size=128) for i in range(8)
    )
    identity = Identity("bench", "1", table, 256)
    chunk = ChunkFormat(identity, "0")
    row = np.random.default_rng(0).integers(0, 256, chunk.payload_bytes, np.uint8)
    arrays = {name: np.zeros((16, 2, 16, 8, 256), np.uint8) for name in table}
    views = {name: CacheView.of(array, "split_nhd", 16) for name, array in arrays.items()}
    mappings = derive_canonical_mappings(table, views, RankGrid(), 0, family="universal")
    witness = RankWitness(mappings, views, "0", 256)
    samples = interleaved(
        {
            "page digests": lambda: chunk.digests(row),
            "end-to-end digests": lambda: witness.stored(0, range(16)),
        },
        rounds=rounds,
    )
    for name, each in samples.items():
        report.add(Result(name, row.nbytes / each.median / 1e9, "GB/s"))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--mib", type=int, default=512, help="bytes per round")
    arguments.add_argument("--path", help="directory on the disk to measure (default: temporary)")
    arguments.add_argument(
        "--small-pages", action="store_true", help="rows on pages of 4 KiB, or the system's"
    )
    asked = arguments.parse_args()
    report = Report(asked.json)
    folder = tempfile.mkdtemp(prefix="vkvmap-bench-", dir=asked.path)
    try:
        lookups(report, folder, asked.rounds)
        digests(report, asked.rounds)
        for chunk_mib in (1, 8, 32):
            throughput(report, f"{folder}", asked.mib, chunk_mib, asked.rounds, asked.small_pages)
            for name in ("store", "plain buffered", "plain direct"):
                shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("not measured: network file systems, other disks, several nodes")
    report.write()


if __name__ == "__main__":
    main()
