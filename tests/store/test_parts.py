"""Rows stored in parts are served whole, by part, or not at all."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.store.small import LAYERS, aligned, content_of, key_of, payload_bytes, small_identity
from vkvmap.configuration import Configuration
from vkvmap.errors import StoreError
from vkvmap.format import ChunkFormat, Witness
from vkvmap.identity import Identity
from vkvmap.ledger import Ledger
from vkvmap.region import Region, Section
from vkvmap.spec import LayerSpec, LayerTable
from vkvmap.store import CanonicalStore
from vkvmap.store_upkeep import fsck, gc, ls

IDENTITY = small_identity()
FULL = payload_bytes(IDENTITY, "full")
PARTS = [["a", "m"], ["b"]]
KEYS = [key_of(number) for number in range(6)]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "store")


def opened(path: str, **how) -> CanonicalStore:
    return CanonicalStore(path, IDENTITY, **{"parts": PARTS, **how})


def put(store: CanonicalStore, keys, layers=None) -> list[str]:
    job = store.put(keys, "full", [content_of(key, FULL) for key in keys], layers=layers)
    assert job.wait(30)
    return job.outcomes


def got(store: CanonicalStore, key: bytes, layers=None) -> tuple[str, np.ndarray]:
    row = aligned(FULL, 0x77)
    job = store.get([key], "full", [row], layers=layers)
    assert job.wait(30)
    return job.outcomes[0], row


def test_what_two_nodes_put_is_one_chunk(path):
    half, right = FULL // 2, content_of(KEYS[0], FULL)
    with opened(path) as store, opened(path) as other:
        assert put(store, KEYS[:2], ["a"]) == ["stored"] * 2
        assert not other.lookup(KEYS, "full").any() and other.keys("full") == []
        assert got(other, KEYS[0])[0] == "miss"
        outcome, row = got(other, KEYS[0], ["a"])
        assert outcome == "hit" and np.array_equal(row[:half], right[:half])
        assert (row[half:] == 0x77).all()
        assert put(other, KEYS[:1], ["b"]) == ["stored"]
        assert store.lookup(KEYS, "full").tolist() == [True] + [False] * 5
        assert store.prefix(KEYS, "full") == 1 and store.keys("full") == KEYS[:1]
        outcome, row = got(store, KEYS[0])
        assert outcome == "hit" and np.array_equal(row, right)
        assert put(store, KEYS[:1]) == ["present"] and put(store, KEYS[1:2]) == ["stored"]
    found = fsck(path)
    assert found.clean and found.chunks == 4


def test_a_miss_of_one_part_leaves_nothing_of_the_others(path):
    with opened(path) as store:
        put(store, KEYS[:1], ["a"])
        outcome, row = got(store, KEYS[0])
        assert outcome == "miss" and not (row[: FULL // 2]).any()


def test_damage_of_one_part_is_the_chunks_and_the_others_still_load(path):
    with opened(path) as store:
        put(store, KEYS[:1])
        place = store._shelves["full"].parts[1].path(KEYS[0])
        os.truncate(place, 5000)
        assert got(store, KEYS[0], ["a"])[0] == "hit"
        outcome, row = got(store, KEYS[0])
        assert outcome == "damaged" and not row.any()
        assert store.snapshot()["damaged"] == 1
        assert not store.lookup(KEYS[:1], "full").any()
        assert put(store, KEYS[:1]) == ["stored"] and got(store, KEYS[0])[0] == "hit"


def test_deleting_a_chunk_deletes_its_parts(path):
    with opened(path) as store:
        put(store, KEYS[:3])
        put(store, KEYS[3:4], ["b"])
        assert store.delete(KEYS[1:5], "full") == 3
        assert store.keys("full") == KEYS[:1] and fsck(path).chunks == 2
        assert gc(path, identity=IDENTITY.part(PARTS[0]).name).chunks == 1


def test_a_part_is_an_ordinary_chunk_of_its_own_layers(path):
    """What a reader that knows nothing of parts makes of one."""
    own = Identity("org/model", "abc", LayerTable([LAYERS["b"]]), 16)
    with opened(path) as store:
        put(store, KEYS[:1])
    with CanonicalStore(path, own) as store:
        chunk = ChunkFormat(own, "full")
        row = aligned(chunk.payload_bytes)
        job = store.get(KEYS[:1], "full", [row])
        assert job.wait(30) and job.outcomes == ["hit"]
        assert np.array_equal(row, content_of(KEYS[0], FULL)[-chunk.payload_bytes :])


def test_parts_and_whole_chunks_are_not_taken_for_each_other(path):
    with opened(path) as store, CanonicalStore(path, IDENTITY) as whole:
        put(store, KEYS[:1])
        put(whole, KEYS[1:2])
        assert not whole.lookup(KEYS[:1], "full").any()
        assert not store.lookup(KEYS[1:2], "full").any()
        assert set(whole.neighbours().values()) == {
            "it has 2 of the 3 layers: a part of chunks that are stored in parts",
            "it has 1 of the 3 layers: a part of chunks that are stored in parts",
        }
        assert store.neighbours() == {IDENTITY.name: "the same model's chunks, stored whole"}


def test_end_to_end_digests_go_with_the_part_that_they_are_about(path):
    witnesses = [Witness(layer, head, bytes([7 * layer + head] * 16)) for layer in (0, 1)
                 for head in (0, 1)]  # fmt: skip
    with Region.create([Section("full", 2, FULL)]) as region:
        region.row("full", 0)[:] = content_of(KEYS[0], FULL)
        formats = {"full": ChunkFormat(IDENTITY, "full")}
        with opened(
            path, region=region, formats=formats, witnesses={"full": lambda row: witnesses}
        ) as store:
            assert store.put(KEYS[:1], "full", [0]).wait(30)
            job = store.get(KEYS[:1], "full", [1])
            assert job.wait(30) and job.witnesses[0] == tuple(witnesses)
            job = store.get(KEYS[:1], "full", [1], layers=["b"])
            assert job.wait(30) and job.witnesses[0] == tuple(witnesses[2:])
            assert np.array_equal(region.row("full", 1), region.row("full", 0))


def test_a_row_that_gets_new_content_between_two_parts_is_not_published_whole(path):
    """The first part is there then, of the old content; the chunk is not."""
    with Region.create([Section("full", 1, FULL), Ledger.section(1, 1)]) as region:
        ledger = Ledger(region)
        formats = {"full": ChunkFormat(IDENTITY, "full")}
        with opened(path, region=region, formats=formats, ledgers={"full": ledger}) as store:
            ledger.finish([0], ledger.begin([0]), 0)
            second = store._shelves["full"].parts[1]
            real = store._backend.put

            def put_then_change(shelf, *arguments):
                if shelf is second:
                    ledger.begin([0])
                return real(shelf, *arguments)

            store._backend.put = put_then_change
            job = store.put(KEYS[:1], "full", [0])
            assert job.wait(30) and job.outcomes == ["incomplete"]
            assert not store.lookup(KEYS[:1], "full").any()


def part_bytes(path: str) -> int:
    """How long the file of one part of the tests' chunks is."""
    sizes = {entry.nbytes for entry in ls(path)}
    assert len(sizes) == 1
    return sizes.pop()


def test_a_chunk_whose_parts_do_not_fit_together_is_full_and_evicts_nothing(path):
    with opened(path) as store:
        put(store, KEYS[:1], ["a"])
        put(store, KEYS[1:2], ["b"])
        size = part_bytes(path)
    with opened(path, capacity=2 * size - 1) as store:
        for _ in range(3):
            # Of the first one part is there, of the second the other, of the third none.
            assert put(store, KEYS[:3]) == ["full"] * 3
            assert not store.lookup(KEYS, "full").any()
        assert store.snapshot()["evicted"] == 0
        assert got(store, KEYS[0], ["a"])[0] == got(store, KEYS[1], ["b"])[0] == "hit"
        # What only one stage puts counts beside what the other has put.
        assert put(store, KEYS[:1], ["b"]) == ["full"]
        assert put(store, KEYS[:1], ["a"]) == ["present"]
    with opened(path, capacity=2 * size) as store:
        assert put(store, KEYS[:1]) == ["stored"] and got(store, KEYS[0])[0] == "hit"
        assert store.lookup(KEYS[:1], "full").all()
    with opened(path, capacity=2 * size - 1) as store:
        assert put(store, KEYS[:1]) == ["present"]


def test_a_part_is_not_evicted_to_make_room_for_another_of_its_chunk(path):
    def newest_first(entries):
        return sorted(entries, key=lambda entry: -entry.used_at)

    with opened(path) as store:
        put(store, KEYS[:1])
        size = part_bytes(path)
    for layers in (None, ["a"], ["b"]):
        with opened(path, capacity=3 * size, policy=newest_first, threads=1) as store:
            store.delete(KEYS, "full")
            for index, key in enumerate(KEYS):
                if layers is not None:
                    others = {"a": ["b"], "b": ["a"]}[layers[0]]
                    assert put(store, [key], others) == ["stored"]
                assert put(store, [key], layers) == ["stored"]
                assert store.lookup([key], "full").all(), index
                assert got(store, key)[0] == "hit"
            assert store.snapshot()["evicted"] >= 2 * len(KEYS) - 3


def test_a_chunk_that_lost_a_part_meanwhile_is_not_called_stored(path):
    with opened(path) as store, opened(path) as other:
        first, second = store._shelves["full"].parts
        real = store._backend.put

        def put_then_lose(shelf, *arguments):
            result = real(shelf, *arguments)
            if shelf is second:
                assert other._space.remove(first.path(KEYS[0]))
            return result

        store._backend.put = put_then_lose
        job = store.put(KEYS[:1], "full", [content_of(KEYS[0], FULL)])
        assert job.wait(30) and job.outcomes == ["full"]
        assert "a part was removed" in job.reasons[0]
        store._backend.put = real
        assert put(store, KEYS[:1]) == ["stored"] and got(store, KEYS[0])[0] == "hit"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([["a", "m"]], "layer 'b' is in none"),
        ([["a", "m", "b"], ["b"]], "layer 'b' is in part 0 and in 1"),
        ([["a", "m", "b", "c"]], "has no layer 'c'"),
    ],
)
def test_parts_that_do_not_divide_the_model_are_refused(path, parts, why):
    with pytest.raises(StoreError, match=why):
        opened(path, parts=parts)


def test_a_part_is_a_run_of_layers(path):
    layers = LayerTable([LayerSpec.mla(name, row_bytes=8, group="0") for name in "abc"])
    with pytest.raises(StoreError, match="what lies between them is not"):
        CanonicalStore(path, small_identity(layers=layers), parts=[["a", "c"], ["b"]])


def test_parts_may_be_given_as_whatever_yields_names_once(path):
    """A store of several groups reads them for each."""
    with opened(path, parts=(iter(names) for names in PARTS)) as store:
        pieces = {group: len(store._shelves[group].pieces) for group in ("full", "latent")}
        assert pieces == {"full": 2, "latent": 1}
        assert put(store, KEYS[:1]) == ["stored"]
    with opened(path) as store:
        assert store.keys("full") == KEYS[:1]


def test_a_stage_names_all_its_layers_and_each_group_takes_its_own(path):
    """Of six layers in two groups, dealt to two stages, no stage's names are of one group."""
    layers = LayerTable(
        LayerSpec.mla(f"layers.{index}.{group}", row_bytes=37, group=group)
        for index in range(3)
        for group in ("latent", "more")
    )
    stages = Configuration.parse("pp=2").stage_layers(layers)
    identity = small_identity(layers=layers)
    with CanonicalStore(path, identity, parts=stages) as store:
        for group, key in (("latent", KEYS[0]), ("more", KEYS[1])):
            nbytes = payload_bytes(identity, group)
            right = content_of(key, nbytes)
            for stage in stages:
                assert not store.lookup([key], group).any()
                job = store.put([key], group, [right], layers=stage)
                assert job.wait(30) and job.outcomes == ["stored"]
            row, joined = aligned(nbytes, 0x77), aligned(nbytes, 0x77)
            for stage in stages:
                own = sum(name.endswith(group) for name in stage)
                job = store.get([key], group, [row], layers=stage)
                assert job.wait(30) and job.outcomes == ["hit"]
                filled = int((row != joined).sum())
                assert nbytes // 3 * (own - 1) < filled <= nbytes // 3 * own
                joined = row.copy()
            assert np.array_equal(row, right)


def test_a_stage_that_splits_a_part_is_refused(path):
    with CanonicalStore(path, IDENTITY) as whole, opened(path) as store:
        for layers in (["a"], ["b"]):
            with pytest.raises(StoreError, match="no pipeline stage splits"):
                put(whole, KEYS[:1], layers)
            assert put(store, KEYS[:1], layers) == ["stored"]
        assert put(whole, KEYS[:1], ["b", "a"]) == ["stored"]
        for layers in ([], ["m"]):
            with pytest.raises(StoreError, match="of no layers of it"):
                put(store, KEYS[:1], layers)
        with pytest.raises(StoreError, match=r"the model has no layers \['n'\], but 3 others"):
            put(store, KEYS[:1], ["a", "n"])
        assert store.try_put(KEYS[:1], "full", [aligned(FULL)], layers=["b"]) is not None
