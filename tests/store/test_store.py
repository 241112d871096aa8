"""What is put comes back exactly, or is a miss with a reason."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from functools import partial

import numpy as np
import pytest

from tests.store.small import LAYERS, aligned, content_of, key_of, payload_bytes, small_identity
from vkvmap import CacheView, LayerSpec, LayerTable, RankGrid, derive_canonical_mappings
from vkvmap.errors import FormatError, RegionError, StoreError
from vkvmap.format import ChunkFormat, Witness
from vkvmap.ledger import Ledger
from vkvmap.region import Region, Section
from vkvmap.sections import sections_for
from vkvmap.store import CanonicalStore
from vkvmap.store_files import FileSystem
from vkvmap.store_formats import formats_of
from vkvmap.store_space import Space
from vkvmap.store_upkeep import fsck, gc, ls, stats

IDENTITY = small_identity()
FULL, LATENT = payload_bytes(IDENTITY, "full"), payload_bytes(IDENTITY, "latent")
FILE = 4096 + -(-FULL // 4096) * 4096


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store")


def put(store: CanonicalStore, numbers, group: str = "full") -> list[str]:
    size = {"full": FULL, "latent": LATENT}[group]
    keys = [key_of(number) for number in numbers]
    job = store.put(keys, group, [content_of(key, size) for key in keys])
    assert job.wait(30)
    return job.outcomes


def get(store: CanonicalStore, numbers, group: str = "full") -> list[str]:
    """Outcomes; a hit has been compared with the right bytes, a miss must have left none."""
    size = {"full": FULL, "latent": LATENT}[group]
    keys = [key_of(number) for number in numbers]
    rows = [aligned(size) for _ in keys]
    job = store.get(keys, group, rows)
    assert job.wait(30)
    for key, row, good in zip(keys, rows, job.good, strict=True):
        assert np.array_equal(row, content_of(key, size)) if good else not row.any()
    return job.outcomes


def chunk_file(path: str, number: int) -> str:
    return next(entry.path for entry in ls(path) if entry.key == key_of(number).hex())


# ---- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("sync", ["none", "data", "full"])
def test_what_is_put_comes_back_after_reopening(path, direct, sync):
    with CanonicalStore(path, IDENTITY, direct=direct, sync=sync) as store:
        assert put(store, range(9)) == ["stored"] * 9
        assert put(store, range(5), "latent") == ["stored"] * 5
        assert put(store, [3]) == ["present"]
        assert get(store, range(9)) == ["hit"] * 9
    with CanonicalStore(path, IDENTITY, direct=direct) as store:
        assert get(store, range(11)) == ["hit"] * 9 + ["miss"] * 2
        assert get(store, range(6), "latent") == ["hit"] * 5 + ["miss"]
    assert fsck(path).clean


@pytest.mark.parametrize("padding", [0, 256])
def test_chunks_move_straight_between_rows_and_files(path, padding):
    sections = [
        Section(name, 8, size, -(-size // 4096) * 4096 + padding)
        for name, size in (("full", FULL), ("latent", LATENT))
    ]
    with Region.create(sections) as region, CanonicalStore(path, IDENTITY, region=region) as store:
        keys = [key_of(number) for number in range(4)]
        for index, key in enumerate(keys):
            region.row("full", index)[:] = content_of(key, FULL)
            region.row("latent", index)[:] = content_of(key, LATENT)
        for group in ("full", "latent"):
            assert store.put(keys, group, range(4)).wait(30)
            job = store.get(keys, group, [7, 6, 5, 4])
            assert job.wait(30) and job.good.all()
            assert np.array_equal(region.rows(group)[:4], region.rows(group)[:3:-1])

        with pytest.raises(RegionError, match="row 8"):
            store.put(keys[:1], "full", [8])
        with pytest.raises(RegionError, match="still use this region"):
            region.close()


class Noting(FileSystem):
    def __init__(self) -> None:
        self.direct: list[bool] = []

    def open(self, path, flags):
        if path.endswith((".chunk", ".tmp")):
            self.direct.append(bool(flags & os.O_DIRECT))
        return super().open(path, flags)


def taken_directly(path: str, row: np.ndarray) -> bool:
    """Whether the system itself reads a file into the first page of `row` directly."""
    with open(path, "wb") as file:
        file.write(bytes(4096))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        return os.preadv(fd, [row.data[:4096]], 0) == 4096
    except OSError:
        return False
    finally:
        os.close(fd)


@pytest.mark.parametrize("shift", [0, 1, 4, 64, 256, 512, 1024, 4096])
def test_rows_that_the_device_can_reach_are_moved_directly(path, tmp_path, shift):
    wanted = content_of(key_of(1), FULL)
    row, back = (aligned(FULL + 4096)[shift : shift + FULL] for _ in range(2))
    can = taken_directly(str(tmp_path / "tried"), row)
    row[:] = wanted
    for direct in (True, False):
        files = Noting()
        with CanonicalStore(f"{path}{direct}", IDENTITY, files=files, direct=direct) as store:
            assert store.put([key_of(1)], "full", [row]).wait(30)
            assert store.get([key_of(1)], "full", [back]).wait(30)
        assert np.array_equal(back, wanted)
        assert files.direct == [can and direct] * 2


class Stumbling(FileSystem):
    """Ends every step within a block; what the system then refuses is its own affair."""

    def readv(self, fd, buffers, offset):
        return super().readv(fd, [buffers[0][: 1 + len(buffers[0]) // 2]], offset)

    def writev(self, fd, buffers, offset):
        return super().writev(fd, [buffers[0][: 1 + len(buffers[0]) // 2]], offset)


class Unwilling(FileSystem):
    """Opens files for direct I/O and then does none, as a device below may have it."""

    def __init__(self) -> None:
        self.refused = 0

    def willing(self, fd):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            self.refused += 1
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def readv(self, fd, buffers, offset):
        self.willing(fd)
        return super().readv(fd, buffers, offset)

    def writev(self, fd, buffers, offset):
        self.willing(fd)
        return super().writev(fd, buffers, offset)


@pytest.mark.parametrize("kind", [Stumbling, Unwilling])
def test_what_cannot_be_done_directly_is_done_through_the_page_cache(path, kind):
    files = kind()
    keys, rows = [key_of(number) for number in range(3)], [aligned(FULL) for _ in range(3)]
    for key, row in zip(keys, rows, strict=True):
        row[:] = content_of(key, FULL)
    with CanonicalStore(path, IDENTITY, files=files) as store:
        job = store.put(keys, "full", rows)
        assert job.wait(30) and job.outcomes == ["stored"] * 3, job.reasons
        assert get(store, range(4)) == ["hit"] * 3 + ["miss"]
    if kind is Unwilling:
        can = taken_directly(f"{path}.tried", aligned(FULL))
        assert files.refused == (6 if can else 0)
    with CanonicalStore(path, IDENTITY) as store:
        assert get(store, range(3)) == ["hit"] * 3


def test_an_invalid_call_that_is_not_direct_is_an_error(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, [1])
    files = Failing(readv=errno.EINVAL)
    with CanonicalStore(path, IDENTITY, files=files, direct=False) as store:
        assert get(store, [1]) == ["failed"]


def test_bytes_beyond_a_rows_payload_are_left_alone(path):
    formats = {"latent": ChunkFormat(IDENTITY, "latent")}
    with (
        Region.create([Section("latent", 3, LATENT, 1024)]) as region,
        CanonicalStore(path, IDENTITY, region=region, formats=formats) as store,
    ):
        region.view[region.section("latent").offset :] = 0xEE
        region.row("latent", 0)[:] = content_of(key_of(1), LATENT)
        assert store.put([key_of(1)], "latent", [0]).wait(30)
        assert store.get([key_of(1)], "latent", [1]).wait(30)
        whole = region.view[region.section("latent").offset :][: 3 * 1024].reshape(3, 1024)
        assert np.array_equal(whole[1, :LATENT], content_of(key_of(1), LATENT))
        assert (whole[:2, LATENT:] == 0xEE).all() and (whole[2] == 0xEE).all()


def test_a_stage_loads_its_own_layers_and_leaves_the_others_alone(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, [1])
        right, half = content_of(key_of(1), FULL), FULL // 2
        for layers, mine, others in (
            (["a"], slice(0, half), slice(half, FULL)),
            (["b"], slice(half, FULL), slice(0, half)),
            (["a", "b"], slice(0, FULL), slice(0, 0)),
            (["m", "b"], slice(half, FULL), slice(0, half)),
            (["m"], slice(0, 0), slice(0, FULL)),
            ([], slice(0, 0), slice(0, FULL)),
        ):
            row = aligned(FULL, 0x77)
            job = store.get([key_of(1)], "full", [row], layers=layers)
            assert job.wait(30) and job.outcomes == ["hit"], job.reasons
            assert np.array_equal(row[mine], right[mine]) and (row[others] == 0x77).all()
        with pytest.raises(StoreError, match=r"the model has no layers \['n'\]"):
            store.get([key_of(1)], "full", [row], layers=["a", "n"])
        place = chunk_file(path, 1)
        with open(place, "r+b") as file:
            file.seek(4096 + half + 3)
            file.write(bytes([right[half + 3] ^ 1]))
        row = aligned(FULL, 0x77)
        job = store.get([key_of(1)], "full", [row], layers=["a"])
        assert job.wait(30) and job.outcomes == ["hit"]
        job = store.get([key_of(1)], "full", [row], layers=["b"])
        assert job.wait(30) and job.outcomes == ["damaged"]
        assert np.array_equal(row[:half], right[:half]) and not row[half:].any()


def test_a_short_file_is_damaged_for_the_stage_that_needs_its_end(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, [1])
        os.truncate(chunk_file(path, 1), 4096 + FULL - 1)
        outcomes = []
        for layer in ("a", "b"):
            job = store.get([key_of(1)], "full", [aligned(FULL)], layers=[layer])
            assert job.wait(30)
            outcomes += job.outcomes
        assert outcomes == ["hit", "damaged"]


def test_two_identities_never_see_each_others_chunks(path):
    other = small_identity(revision="abd")
    with CanonicalStore(path, IDENTITY) as store, CanonicalStore(path, other) as second:
        put(store, [1])
        assert second.prefix([key_of(1)], "full") == 0
        assert get(second, [1]) == ["miss"]
        assert second.neighbours() == {IDENTITY.name: 'revision is "abc" there and "abd" here'}


def test_adapter_and_salt_of_one_name_are_different_stores(path):
    with (
        CanonicalStore(path, small_identity(adapter="X")) as one,
        CanonicalStore(path, small_identity(salt="X")) as two,
    ):
        put(one, [1])
        assert get(one, [1]) == ["hit"] and get(two, [1]) == ["miss"]


def test_opaque_rows_come_back_to_their_configuration_only(path):
    def opened(placement: dict) -> CanonicalStore:
        chunk = ChunkFormat.opaque(IDENTITY.opaque(placement), "latent", [("m", LATENT, 1)])
        return CanonicalStore(path, IDENTITY, formats={"latent": chunk})

    with opened({"tp": 2, "block_size": 16}) as one, opened({"tp": 4, "block_size": 16}) as two:
        put(one, [1], "latent")
        assert get(one, [1], "latent") == ["hit"] and get(two, [1], "latent") == ["miss"]
    with CanonicalStore(path, IDENTITY) as canonical:
        assert get(canonical, [1], "latent") == ["miss"]


def test_a_group_with_an_opaque_layer_is_stored_under_its_configuration(path):
    """A canonical row with a hole in it must not be anybody else's canonical row."""
    layers = LayerTable(
        [
            LayerSpec.attention("a", num_kv_heads=3, head_size=8, group="full"),
            LayerSpec.mla("b", row_bytes=32, group="full"),
            LayerSpec.mla("c", row_bytes=32, group="latent"),
        ]
    )
    identity = small_identity(layers=layers)
    views = {
        "a": CacheView.of(np.zeros((4, 2, 16, 2, 16), np.uint8), "split_nhd", 16),
        "b": CacheView.of(np.zeros((4, 16, 32), np.uint8), "mla", 16),
        "c": CacheView.of(np.zeros((4, 16, 32), np.uint8), "mla", 16),
    }
    grid = RankGrid(tp=2)  # three heads do not deal out over two ranks
    mappings = derive_canonical_mappings(layers, views, grid, 0, family="universal")
    assert [refusal.layer for refusal in mappings.refusals] == ["a"]
    formats = formats_of(identity, mappings, written_by={"block": 16})
    assert set(formats) == {"full", "full/private", "latent"}
    assert formats["latent"].identity.name == identity.name
    configured = formats["full"].identity
    assert configured.name == formats["full/private"].identity.name != identity.name
    placement = configured.placement or {}
    assert placement["grid"]["tp"] == 2 and placement["written_by"] == {"block": 16}
    sections = {section.name: section for section in sections_for(mappings, 16, 3)}
    for name, chunk in formats.items():
        assert chunk.payload_bytes == sections[name].payload_bytes
    with (
        Region.create(list(sections.values())) as region,
        CanonicalStore(path, identity, region=region, formats=formats) as store,
        CanonicalStore(path, identity) as canonical,
    ):
        for name in formats:
            job = store.put([key_of(1)], name, [0])
            assert job.wait(30) and job.outcomes == ["stored"]
            job = store.get([key_of(1)], name, [1])
            assert job.wait(30) and job.outcomes == ["hit"]
        assert canonical.lookup([key_of(1)], "latent").all()
        assert not canonical.lookup([key_of(1)], "full").any()
    assert fsck(path).clean and fsck(path).chunks == 3


def test_the_description_lies_beside_the_chunks(path):
    with CanonicalStore(path, IDENTITY):
        text = open(f"{path}/{IDENTITY.name}/identity.json", encoding="utf-8").read()
        assert text == IDENTITY.json


def test_wrong_input_is_refused_with_its_reason(path):
    with CanonicalStore(path, IDENTITY) as store:
        row = np.zeros(FULL, np.uint8)
        with pytest.raises(
            StoreError, match=r"no group 'x' in this store; it has \['full', 'latent'\]"
        ):
            store.put([b"k"], "x", [row])
        with pytest.raises(FormatError, match=f"row of {FULL - 1} bytes"):
            store.put([b"k"], "full", [row[1:]])
        with pytest.raises(FormatError, match="contiguous"):
            store.put([b"k"], "full", [np.zeros(2 * FULL, np.uint8)[::2]])
        with pytest.raises(StoreError, match="2 keys for 1 rows"):
            store.put([b"k", b"l"], "full", [row])
        with pytest.raises(FormatError, match="hash it"):
            store.put([b"k" * 65], "full", [row])
        with pytest.raises(StoreError, match="without a region"):
            store.put([b"k"], "full", [0])
    with pytest.raises(StoreError, match="closed"):
        store.put([b"k"], "full", [row])


def test_a_directory_that_everybody_can_write_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(StoreError, match="written by everybody"):
        CanonicalStore(tmp_path, IDENTITY)


def test_files_are_for_their_owner_only(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, [1])
    for folder, folders, names in os.walk(path):
        for name in folders + names:
            assert os.stat(os.path.join(folder, name)).st_mode & 0o077 == 0 or (
                name == "identity.json"  # for people; the folders above it are closed
            )
    assert os.stat(path).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("count", [1, 300])
def test_end_to_end_digests_come_back_with_their_chunk(path, count):
    witnesses = [Witness(n % 2, n, bytes([n % 251] * 16)) for n in range(count)]
    sections = [Section("full", 2, FULL), Section("latent", 2, LATENT)]
    with Region.create(sections) as region:
        for group, size in (("full", FULL), ("latent", LATENT)):
            region.row(group, 0)[:] = content_of(key_of(1), size)
        digests = {group: lambda row: witnesses for group in ("full", "latent")}
        with CanonicalStore(path, IDENTITY, region=region, witnesses=digests) as store:
            for group in ("full", "latent"):
                assert store.put([key_of(1)], group, [0]).wait(30)
                job = store.get([key_of(1)], group, [1])
                assert job.wait(30) and job.good.all()
                assert job.witnesses[0] == tuple(witnesses)
                layer = {"full": "b", "latent": "m"}[group]
                job = store.get([key_of(1)], group, [1], layers=[layer])
                assert job.wait(30) and job.good.all() and job.witnesses[0] == tuple(witnesses)
                assert np.array_equal(region.row(group, 1), region.row(group, 0))
        assert fsck(path).clean and fsck(path).chunks == 2
        with CanonicalStore(path, IDENTITY) as store:
            assert get(store, [1]) == get(store, [1], "latent") == ["hit"]
            os.truncate(chunk_file(path, 1), 4096)
            assert sorted(get(store, [1]) + get(store, [1], "latent")) == ["damaged", "hit"]


class Counting(FileSystem):
    def __init__(self) -> None:
        self.read = 0

    def readv(self, fd, buffers, offset):
        done = super().readv(fd, buffers, offset)
        self.read += done
        return done


@pytest.mark.parametrize("count", [0, 1, 300])
@pytest.mark.parametrize("appended", [0, 100, 4096, 40960])
def test_a_chunk_is_read_once_with_its_end_to_end_digests(path, count, appended):
    witnesses = [Witness(0, n, bytes([n % 251] * 16)) for n in range(count)]
    with Region.create([Section("full", 2, FULL)]) as region:
        region.row("full", 0)[:] = content_of(key_of(1), FULL)
        files = Counting()
        formats = {"full": ChunkFormat(IDENTITY, "full")}
        digests = {"full": lambda row: witnesses}
        with CanonicalStore(
            path, IDENTITY, region=region, formats=formats, files=files, witnesses=digests
        ) as store:
            assert store.put([key_of(1)], "full", [0]).wait(30)
            file = chunk_file(path, 1)
            size = os.path.getsize(file)
            with open(file, "ab") as more:  # a longer file takes a second look at most
                more.write(bytes([7]) * appended)
            job = store.get([key_of(1)], "full", [1])
            assert job.wait(30) and job.good.all()
            assert job.witnesses.get(0, ()) == tuple(witnesses)
            assert np.array_equal(region.row("full", 1), region.row("full", 0))
            assert files.read <= (size if appended == 0 else 2 * (size + appended))


def test_a_short_file_is_not_filled_up_with_what_was_read_before(path):
    """Its header says that it is longer than the file is; the buffer still holds another's."""
    witnesses = [Witness(0, n, bytes([n % 251] * 16)) for n in range(300)]
    chunk = ChunkFormat(IDENTITY, "full")
    with Region.create([Section("full", 3, FULL)]) as region:
        with CanonicalStore(
            path,
            IDENTITY,
            region=region,
            formats={"full": chunk},
            witnesses={"full": lambda row: witnesses},
            threads=1,
        ) as store:
            for number in (1, 2):
                region.row("full", number)[:] = content_of(key_of(number), FULL)
            assert store.put([key_of(1), key_of(2)], "full", [1, 2]).wait(30)
            os.truncate(chunk_file(path, 2), 4196)
            job = store.get([key_of(1), key_of(2)], "full", [0, 0])
            assert job.wait(30) and job.outcomes == ["hit", "damaged"]
            assert job.reasons[1] == f"4196 of {chunk.header_bytes_with(300)} header bytes"


# ---- lookups ----------------------------------------------------------------------------------


def test_lookup_says_what_is_there(path):
    with CanonicalStore(path, IDENTITY) as store, CanonicalStore(path, IDENTITY) as other:
        put(store, [0, 1, 2, 5])
        keys = [key_of(number) for number in range(7)]
        expected = [True, True, True, False, False, True, False]
        for one in (store, other, store):
            assert one.lookup(keys, "full").tolist() == expected
            assert one.prefix(keys, "full") == 3
            assert not one.lookup(keys, "latent").any()


def test_lookup_notices_what_another_process_removed(path):
    with CanonicalStore(path, IDENTITY) as store, CanonicalStore(path, IDENTITY) as other:
        put(store, range(4))
        keys = [key_of(number) for number in range(4)]
        assert other.lookup(keys, "full").all()
        assert store.delete(keys[1:2], "full") == 1
        assert other.lookup(keys, "full").tolist() == [True, False, True, True]
        assert store.delete(keys[1:2], "full") == 0


@pytest.mark.parametrize("how", ["lookup", "put", "publish"])
def test_lookup_does_not_promise_for_ever_what_went_while_it_was_seen(path, how, monkeypatch):
    """Another process removes the chunk the moment after it was seen, or has appeared."""
    keys = [key_of(1), key_of(2)]
    with CanonicalStore(path, IDENTITY) as store, CanonicalStore(path, IDENTITY) as other:
        place, space = store._shelves["full"].path(keys[0]), store._space
        if how == "publish":
            publish = space.publish

            def publish_then_lose(source, target, nbytes):
                fresh = publish(source, target, nbytes)
                assert other._space.remove(target)
                store.lookup(keys, "full")  # as another thread does
                return fresh

            monkeypatch.setattr(space, "publish", publish_then_lose)
            assert put(store, [1]) == ["stored"]
        else:
            assert put(other, [1]) == ["stored"]
            access = os.access

            def see_then_lose(name, mode):
                there = access(name, mode)
                if name == place and there:
                    assert other._space.remove(place)
                    store.lookup(keys[1:], "full")
                return there

            monkeypatch.setattr("vkvmap.store_directory.os.access", see_then_lose)
            if how == "put":
                assert put(store, [1]) == ["present"]
            else:
                assert store.lookup(keys, "full").tolist() == [True, False]
        monkeypatch.undo()
        assert not store.lookup(keys, "full").any() and store.prefix(keys, "full") == 0
        assert put(store, [1]) == ["stored"] and store.lookup(keys, "full")[0]


# ---- capacity ---------------------------------------------------------------------------------


def taken(path: str) -> int:
    return sum(
        os.stat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(path)
        for name in names
        if name.endswith((".chunk", ".tmp")) or "quarantine" in folder
    )


def test_what_nobody_read_for_longest_is_evicted_first(path):
    with CanonicalStore(path, IDENTITY, capacity=10 * FILE, threads=1) as store:
        for number in range(10):
            put(store, [number])
            time.sleep(0.002)
        assert get(store, [0]) == ["hit"]
        assert put(store, [10]) == ["stored"]
        keys = [key_of(number) for number in range(11)]
        there = store.lookup(keys, "full").tolist()
        assert there[0] and there[10] and not there[1]
        assert store.snapshot()["evicted"] >= 1
        assert taken(path) <= 10 * FILE


def test_the_directory_never_exceeds_its_capacity(path):
    capacity = 7 * FILE
    stop, worst = threading.Event(), [0]
    looking = Space(path, FileSystem())

    def watch() -> None:
        while not stop.wait(0.001):  # the lock is not fair: who takes it again at once has it alone
            with looking.locked():  # files change names meanwhile
                worst[0] = max(worst[0], taken(path))

    with (
        CanonicalStore(path, IDENTITY, capacity=capacity, sync="none") as store,
        CanonicalStore(path, small_identity(salt="x"), capacity=capacity, sync="none") as other,
    ):
        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        for round_ in range(10):
            outcomes = put(store, range(round_ * 20, round_ * 20 + 20))
            outcomes += put(other, range(round_ * 20, round_ * 20 + 20))
            assert set(outcomes) <= {"stored", "full"}
        stop.set()
        watcher.join()
        assert FILE < worst[0] <= capacity
        assert store.snapshot()["used_bytes"] == taken(path)


def test_as_much_is_evicted_as_the_new_chunk_needs(path):
    with CanonicalStore(path, IDENTITY, capacity=2 * FILE + FILE // 5) as store:
        for number in range(4):
            assert put(store, [number]) == ["stored"]
            time.sleep(0.002)
        there = store.lookup([key_of(number) for number in range(4)], "full").tolist()
        assert there == [False, False, True, True]


def test_what_never_fits_is_full_and_evicts_nothing(path):
    with CanonicalStore(path, IDENTITY, capacity=2 * FILE) as store:
        put(store, [1])
        assert put(store, [1], "latent") == ["stored"]
    with CanonicalStore(path, IDENTITY, capacity=FILE - 1) as store:
        assert put(store, [2]) == ["full"]
        assert get(store, [1]) == ["hit"]


def test_another_policy_chooses_other_victims(path):
    def newest_first(entries):
        return sorted(entries, key=lambda entry: -entry.used_at)

    with CanonicalStore(path, IDENTITY, capacity=5 * FILE, policy=newest_first) as store:
        for number in range(6):
            put(store, [number])
            time.sleep(0.002)
        there = store.lookup([key_of(number) for number in range(6)], "full").tolist()
        assert there[5] and not there[4]


def test_a_counter_that_a_crash_left_too_high_is_corrected(path):
    with CanonicalStore(path, IDENTITY, capacity=4 * FILE) as store:
        put(store, range(2))
        store._space._add_used(3 * FILE)
        assert put(store, [2]) == ["stored"]
        assert get(store, range(3)) == ["hit"] * 3
        assert store.snapshot()["used_bytes"] == taken(path)


def test_what_a_dead_writer_left_is_gone_when_the_store_is_next_opened(path):
    pid = os.fork()
    if pid == 0:

        class Dying(FileSystem):
            def sync(self, fd: int) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

        store = CanonicalStore(path, IDENTITY, files=Dying())
        store.put([key_of(1)], "full", [content_of(key_of(1), FULL)]).wait(30)
    os.waitpid(pid, 0)
    assert len(os.listdir(f"{path}/tmp")) == 1 and taken(path) == FILE
    with CanonicalStore(path, IDENTITY) as store:
        assert os.listdir(f"{path}/tmp") == [] and store.snapshot()["used_bytes"] == 0
        assert put(store, [1]) == ["stored"] and store.snapshot()["used_bytes"] == FILE


def test_stores_of_one_process_id_do_not_take_each_others_names(path):
    """As processes in containers have it that share a directory: each of them is number 1."""
    opened = [CanonicalStore(path, IDENTITY, sync="none") for _ in range(3)]
    try:
        made = [
            store._space.reserve(10, lambda name: os.open(name, os.O_CREAT | os.O_EXCL))
            for store in opened
        ]
        assert all(made) and len(os.listdir(f"{path}/tmp")) == 3
        for fd, name in made:
            os.close(fd)
            opened[0]._space.abandon(name, 10)
        for number, store in enumerate(opened):
            assert put(store, [number]) == ["stored"]
            os.truncate(chunk_file(path, number), 4096)
            assert get(store, [number]) == ["damaged"]
            assert put(store, [number]) == ["stored"]
            os.truncate(chunk_file(path, number), 4097)
            assert get(store, [number]) == ["damaged"]
        assert stats(path).quarantined == 6 and stats(path).temporaries == 0
    finally:
        for store in opened:
            store.close()


# ---- ledger -----------------------------------------------------------------------------------


def test_only_complete_chunks_are_published(path):
    with Region.create([Section("full", 4, FULL), Ledger.section(4, 2)]) as region:
        ledger = Ledger(region)
        chunk = {"full": ChunkFormat(IDENTITY, "full")}
        with CanonicalStore(
            path, IDENTITY, region=region, formats=chunk, ledgers={"full": ledger}
        ) as store:
            generation = ledger.begin([0])
            ledger.finish([0], generation, 0)
            job = store.put([key_of(0)], "full", [0])
            assert job.wait(30) and job.outcomes == ["incomplete"]
            assert job.reasons[0] == "writers (1,) have not reported"
            ledger.finish([0], generation, 1)
            job = store.put([key_of(0)], "full", [0])
            assert job.wait(30) and job.outcomes == ["stored"]


def test_a_row_that_changes_while_it_is_written_is_not_published(path):
    with Region.create([Section("full", 4, FULL), Ledger.section(4, 1)]) as region:
        ledger = Ledger(region)

        class Meddling(FileSystem):
            def sync(self, fd: int) -> None:
                ledger.begin([0])

        with CanonicalStore(
            path,
            IDENTITY,
            region=region,
            formats={"full": ChunkFormat(IDENTITY, "full")},
            ledgers={"full": ledger},
            files=Meddling(),
        ) as store:
            ledger.finish([0], ledger.begin([0]), 0)
            job = store.put([key_of(0)], "full", [0])
            assert job.wait(30) and job.outcomes == ["incomplete"]
            assert "new content" in job.reasons[0]
    assert not list(ls(path)) and stats(path).temporaries == 0


def test_a_row_that_gets_new_content_while_its_put_waits_is_not_stored(path):
    """Its bytes are whole then, and another key's."""
    with Region.create([Section("full", 2, FULL), Ledger.section(1, 1)]) as region:
        ledger, files = Ledger(region), Stalling()
        with CanonicalStore(
            path,
            IDENTITY,
            region=region,
            formats={"full": ChunkFormat(IDENTITY, "full")},
            ledgers={"full": ledger},
            threads=1,
            files=files,
        ) as store:
            assert put(store, [7]) == ["stored"]

            def fill(number: int) -> None:
                generation = ledger.begin([0])
                region.row("full", 0)[:] = content_of(key_of(number), FULL)
                ledger.finish([0], generation, 0)

            fill(1)
            before = store.get([key_of(7)], "full", [aligned(FULL)])  # the only thread waits in it
            job = store.put([key_of(1)], "full", [0])
            fill(2)
            after = store.put([key_of(2)], "full", [0])
            assert not before.done() and not job.done()
            files.gate.set()
            assert before.wait(30) and job.wait(30) and after.wait(30)
            assert job.outcomes == ["incomplete"] and "new content" in job.reasons[0]
            assert after.outcomes == ["stored"]
            assert get(store, [1, 2]) == ["miss", "hit"]
            with pytest.raises(StoreError, match="its ledger has 1 rows"):
                store.put([key_of(3)], "full", [1])


# ---- faults of one chunk ----------------------------------------------------------------------


class Failing(FileSystem):
    """Fails the named calls with the given error."""

    def __init__(self, **errors: int) -> None:
        self.errors = errors

    def fail(self, call: str) -> None:
        if call in self.errors:
            raise OSError(self.errors[call], os.strerror(self.errors[call]))

    def open(self, path, flags):
        self.fail("open_write" if flags & os.O_CREAT else "open_read")
        return super().open(path, flags)

    def size(self, fd):
        self.fail("size")
        return super().size(fd)

    def readv(self, fd, buffers, offset):
        self.fail("readv")
        return super().readv(fd, buffers, offset)

    def writev(self, fd, buffers, offset):
        self.fail("writev")
        return super().writev(fd, buffers, offset)

    def sync(self, fd):
        self.fail("sync")
        super().sync(fd)

    def rename(self, source, target):
        if target.endswith(".chunk"):
            self.fail("rename")
        super().rename(source, target)

    def close(self, fd):
        super().close(fd)
        self.fail("close")


def test_an_io_error_while_reading_is_a_miss_and_keeps_the_file(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, [1])
    for call in ("size", "readv", "open_read"):
        with CanonicalStore(path, IDENTITY, files=Failing(**{call: errno.EIO})) as store:
            assert get(store, [1]) == ["failed"]
            assert store.snapshot()["failed"] == 1
    with CanonicalStore(path, IDENTITY) as store:
        assert get(store, [1]) == ["hit"]


def test_a_short_file_is_a_miss_and_is_moved_away(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, [1])
        os.truncate(chunk_file(path, 1), FILE - 4096)
        assert get(store, [1]) == ["damaged"]
        assert get(store, [1]) == ["miss"]
        assert store.snapshot()["damaged"] == 1 and stats(path).quarantined == 1
        assert put(store, [1]) == ["stored"] and get(store, [1]) == ["hit"]


def test_a_close_error_after_a_full_read_is_success(path):
    with CanonicalStore(path, IDENTITY, files=Failing(close=errno.EIO)) as store:
        assert put(store, [1]) == ["stored"]
        assert get(store, [1]) == ["hit"]


@pytest.mark.parametrize(
    ("call", "error", "outcome"),
    [
        ("open_write", errno.EACCES, "failed"),
        ("writev", errno.EIO, "failed"),
        ("writev", errno.ENOSPC, "full"),
        ("sync", errno.EIO, "failed"),
        ("sync", errno.EDQUOT, "full"),
        ("rename", errno.EIO, "failed"),
    ],
)
def test_a_failed_write_leaves_nothing(path, call, error, outcome):
    with CanonicalStore(path, IDENTITY, files=Failing(**{call: error})) as store:
        assert put(store, [1]) == [outcome]
        assert get(store, [1]) == ["miss"]
        assert store.snapshot()["used_bytes"] == 0
    assert stats(path).temporaries == 0 and not list(ls(path))


def test_a_write_that_comes_back_with_nothing_written_fails(path):
    class Lazy(FileSystem):
        def writev(self, fd, buffers, offset):
            return super().writev(fd, [buffers[0][:512]], offset) if offset == 0 else 0

    with CanonicalStore(path, IDENTITY, files=Lazy(), direct=False) as store:
        job = store.put([key_of(1)], "full", [content_of(key_of(1), FULL)])
        assert job.wait(30) and job.outcomes == ["failed"]
        assert "at byte 512 came back with nothing written" in job.reasons[0]
        assert get(store, [1]) == ["miss"]
        assert store.snapshot()["used_bytes"] == 0
    assert stats(path).temporaries == 0 and not list(ls(path))


def test_a_chunk_under_another_name_is_never_served(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, [1, 2])
        os.rename(chunk_file(path, 1), chunk_file(path, 2))
        assert get(store, [2]) == ["damaged"]


def test_quarantine_spares_a_good_chunk_that_came_meanwhile(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, [1])
        place = chunk_file(path, 1)
        fd = os.open(place, os.O_RDONLY)
        os.unlink(place)
        put(store, [1])
        assert not store._space.quarantine(place, fd)
        os.close(fd)
        assert get(store, [1]) == ["hit"]


def test_quarantine_keeps_a_bounded_number_of_files(path):
    with CanonicalStore(path, IDENTITY, quarantine_files=3) as store:
        put(store, range(8))
        for number in range(8):
            os.truncate(chunk_file(path, number), 5000)
            assert get(store, [number]) == ["damaged"]
        assert stats(path).quarantined == 3
        assert store.snapshot()["used_bytes"] <= 3 * 5000 + 8 * FILE


# ---- queue ------------------------------------------------------------------------------------


class Stalling(FileSystem):
    def __init__(self) -> None:
        self.gate = threading.Event()

    def readv(self, fd, buffers, offset):
        self.gate.wait()
        return super().readv(fd, buffers, offset)


def test_a_full_queue_says_busy_instead_of_growing(path):
    files = Stalling()
    with CanonicalStore(path, IDENTITY, files=files, threads=1, queue_depth=4) as store:
        put(store, range(4))
        keys, rows = [key_of(number) for number in range(4)], [aligned(FULL) for _ in range(4)]
        first = store.try_get(keys, "full", rows)
        assert first is not None and not first.done() and not first.wait(0.05)
        assert store.try_get(keys[:1], "full", rows[:1]) is None
        one_more = partial(store.get, keys[:1], "full", [aligned(FULL)])
        waiting = threading.Thread(target=one_more, daemon=True)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        files.gate.set()
        assert first.wait(30) and first.good.all()
        waiting.join(30)
        assert not waiting.is_alive()


def test_more_than_the_queue_holds_is_taken_when_it_is_empty(path):
    with CanonicalStore(path, IDENTITY, threads=1, queue_depth=2) as store:
        keys = [key_of(number) for number in range(7)]
        job = store.try_put(keys, "full", [content_of(key, FULL) for key in keys])
        assert job is not None and job.wait(30) and job.good.all()


def test_closing_without_drain_cancels_what_has_not_started(path):
    files = Stalling()
    store = CanonicalStore(path, IDENTITY, files=files, threads=1, queue_depth=8)
    put(store, range(3))
    keys, rows = [key_of(number) for number in range(3)], [aligned(FULL) for _ in range(3)]
    job = store.get(keys, "full", rows)
    time.sleep(0.05)
    threading.Timer(0.2, files.gate.set).start()
    store.close(drain=False)
    assert job.done() and job.outcomes == ["hit", "cancelled", "cancelled"]


def test_an_empty_job_is_done(path):
    with CanonicalStore(path, IDENTITY) as store:
        assert store.put([], "full", []).done()


def test_a_store_is_not_used_across_a_fork(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, [1])
        pid = os.fork()
        if pid == 0:
            try:
                store.get([key_of(1)], "full", [aligned(FULL)])
            except StoreError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def leave_orphan(path: str) -> None:
    """What a writer leaves that is killed before its first byte."""
    space = Space(path, FileSystem())
    made = space.reserve(5000, lambda name: os.open(name, os.O_CREAT | os.O_WRONLY))
    assert made is not None
    os.close(made[0])
    space.close()


# ---- upkeep -----------------------------------------------------------------------------------


def test_ls_and_stats_count_what_is_there(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, range(5))
        put(store, range(3), "latent")
        counted = stats(path)
        assert counted.chunks == 8 and counted.models == {IDENTITY.name: "org/model@abc"}
        assert counted.groups[IDENTITY.name, "0"].chunks == 5
        assert counted.groups[IDENTITY.name, "1"].chunks == 3
        assert counted.nbytes == counted.used == taken(path)
        assert {entry.key for entry in ls(path, folder="1")} == {
            key_of(number).hex() for number in range(3)
        }
        assert not list(ls(path, identity="f" * 64))


def test_fsck_finds_damage_misplaced_and_unknown_files_and_repairs(path):
    with CanonicalStore(path, IDENTITY) as store:
        put(store, range(6))
        flipped, short, moved = (chunk_file(path, number) for number in range(3))
        with open(flipped, "r+b") as file:
            file.seek(FILE - 5000)
            byte = file.read(1)
            file.seek(FILE - 5000)
            file.write(bytes([byte[0] ^ 4]))
        os.truncate(short, 4500)
        os.rename(moved, f"{os.path.dirname(moved)}/{'ab' * 32}.chunk")
        open(f"{path}/{IDENTITY.name}/notes", "w").close()
        leave_orphan(path)
        found = fsck(path)
        assert set(found.damaged) == {flipped, short} and len(found.misplaced) == 1
        assert found.chunks == 3 and found.orphans == 1 and not found.clean
        assert found.unknown == [f"{path}/{IDENTITY.name}/notes"]
        assert fsck(path, repair=True).repaired == 4
        after = fsck(path)
        assert after.clean and after.chunks == 3 and after.orphans == 0
        assert get(store, range(6)) == ["miss"] * 3 + ["hit"] * 3


def test_gc_removes_what_was_asked_for_only(path):
    other = small_identity(salt="x")
    with CanonicalStore(path, IDENTITY) as store, CanonicalStore(path, other) as second:
        put(store, range(4))
        put(second, range(4))
        old = next(e for e in ls(path, identity=IDENTITY.name) if e.key == key_of(2).hex())
        os.utime(old.path, (1, 1))
        assert gc(path, unused_days=1).chunks == 1
        assert gc(path, identity=other.name[:12]).chunks == 4
        assert gc(path).chunks == 0
        assert get(store, range(4)) == ["hit", "hit", "miss", "hit"]
        with pytest.raises(StoreError, match="would remove every chunk"):
            gc(path, identity="")


def test_upkeep_of_something_else_is_refused(tmp_path):
    for function in (stats, fsck, gc):
        with pytest.raises(StoreError, match="not a store directory"):
            function(str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_layers_of_the_model_are_those_of_the_tests():
    assert LAYERS.groups == ("full", "latent")


def test_what_a_store_cannot_serve_is_its_own_error(path, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (str(tmp_path / "file"), "/proc/none/of/these"):
        with pytest.raises(StoreError, match="cannot open a store at"):
            CanonicalStore(place, IDENTITY)
    with pytest.raises(StoreError, match="threads=0"):
        CanonicalStore(path, IDENTITY, threads=0)
    with CanonicalStore(path, IDENTITY) as store:
        with pytest.raises(FormatError, match="not bytes"):
            store.put([key_of(1).hex()], "full", [np.zeros(FULL, np.uint8)])
    for use in (store.snapshot, lambda: store.lookup([key_of(1)], "full")):
        with pytest.raises(StoreError, match="the store is closed"):
            use()
