"""Known faults of host memory and stored pages, each as a small input with its right value.

As in `test_faults_mapping`: values are literal, a test is named after what is right, and its first
line says which fault it keeps away.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.store.small import key_of
from tests.store.test_store import Failing
from vkvmap import CacheView, LayerSpec, LayerTable, RankGrid, derive_canonical_mappings
from vkvmap.errors import RegionError
from vkvmap.format import ChunkFormat
from vkvmap.identity import Identity
from vkvmap.ledger import Ledger
from vkvmap.region import Region, Section
from vkvmap.region_backing import check_capacity
from vkvmap.sections import sections_for
from vkvmap.store import CanonicalStore
from vkvmap.store_upkeep import ls

TWO_HEADS = LayerTable([LayerSpec.attention("layer", num_kv_heads=2, head_size=128)])
IDENTITY = Identity("org/model", "abc", TWO_HEADS, 16)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_stored_file_is_as_long_under_every_tp(tp: int, tmp_path) -> None:
    """Fault 5: rows of world size x local page: 16,384 bytes at tp=2, 32,768 at tp=4."""
    local = np.zeros((1, 2, 16, max(1, 2 // tp), 128), np.float16)
    views = {"layer": CacheView.of(local, "split_nhd", 16)}
    mappings = derive_canonical_mappings(
        TWO_HEADS, views, RankGrid(tp=tp), 0, family="universal", strict=True
    )
    sections = sections_for(mappings, 16, 1)
    assert [section.payload_bytes for section in sections] == [16_384]
    with (
        Region.create(sections) as region,
        CanonicalStore(tmp_path, IDENTITY, region=region) as store,
    ):
        assert store.put([b"k"], "0", [0]).wait(30)
    assert [entry.nbytes for entry in ls(str(tmp_path))] == [4096 + 16_384]


def test_a_chunk_is_complete_when_every_writer_has_reported() -> None:
    """Fault 49: marked ready after the first of 4 ranks."""
    with Region.create([Ledger.section(1, 4)]) as region:
        ledger = Ledger(region)
        generation = ledger.begin([0])
        for rank in (0, 1, 2):
            ledger.finish([0], generation, rank)
            assert not ledger.complete([0])[0]
        ledger.finish([0], generation, 3)
        assert ledger.complete([0])[0]


def test_a_row_that_was_reused_gives_back_what_was_stored_from_it(tmp_path) -> None:
    """Fault 50: tokens of other prompts after store(A), evict, load(A)."""
    with (
        Region.create([Section("0", 2, 16_384)]) as region,
        CanonicalStore(tmp_path, IDENTITY, region=region) as store,
    ):
        first, second = (np.random.default_rng(seed).bytes(16_384) for seed in range(2))
        for key, content in ((b"A", first), (b"B", second)):
            region.row("0", 0)[:] = np.frombuffer(content, np.uint8)
            assert store.put([key], "0", [0]).wait(30)
        assert store.get([b"A", b"B"], "0", [1, 0]).wait(30)
        assert region.row("0", 1).tobytes() == first
        assert region.row("0", 0).tobytes() == second


CREATOR = """
import signal, sys
from vkvmap.region import Region, Section
path = sys.argv[1]
region = Region.create([Section("x", 2, 4096)], backing="file", path=path, joiners=1)
joined = Region.attach(path)
print("joined", flush=True)
signal.pause()
"""


def test_a_killed_worker_leaves_no_file(tmp_path) -> None:
    """Fault 54: the name was dropped at clean shutdown only, so SIGKILL left the file."""
    command = [sys.executable, "-c", CREATOR, str(tmp_path / "region")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"joined\n"
        assert os.listdir(tmp_path) == []
        worker.send_signal(signal.SIGKILL)
    assert os.listdir(tmp_path) == []


def test_ranks_are_refused_together_before_any_of_them_takes_memory() -> None:
    """Fault 57: 8 ranks x 60 GB on 400 GB, and each alone passed the check."""
    check_capacity(60 * 10**9, available=400 * 10**9)
    with pytest.raises(RegionError, match="480,000,000,000 bytes"):
        check_capacity(60 * 10**9, copies=8, available=400 * 10**9)


def test_two_revisions_of_one_model_share_nothing(tmp_path) -> None:
    """Fault 58: the revision was not part of the namespace."""
    row = np.zeros(16_384, np.uint8)
    old, new = (Identity("org/model", revision, TWO_HEADS, 16) for revision in ("r1", "r2"))
    with CanonicalStore(tmp_path, old) as before, CanonicalStore(tmp_path, new) as after:
        assert before.put([b"k"], "0", [row]).wait(30)
        assert before.lookup([b"k"], "0").tolist() == [True]
        assert after.lookup([b"k"], "0").tolist() == [False]


def test_an_adapter_is_not_a_salt_of_the_same_name() -> None:
    """Fault 59: untagged strings in one tuple: lora='X' and salt='X' had one key."""
    adapter = Identity("org/model", "abc", TWO_HEADS, 16, adapter="X")
    salt = Identity("org/model", "abc", TWO_HEADS, 16, salt="X")
    assert len({adapter.name, salt.name, IDENTITY.name}) == 3


def test_only_a_file_that_is_too_short_is_removed(tmp_path) -> None:
    """Fault 60: any read error counted as corruption, so good files went and failures came back."""
    chunk = ChunkFormat(IDENTITY, "0")
    row = np.zeros(chunk.payload_bytes, np.uint8)

    def outcome(**errors: int) -> str:
        with CanonicalStore(tmp_path, IDENTITY, files=Failing(**errors)) as store:
            job = store.get([key_of(1)], "0", [row])
            assert job.wait(30)
            return job.outcomes[0]

    with CanonicalStore(tmp_path, IDENTITY) as store:
        assert store.put([key_of(1)], "0", [row]).wait(30)
    place = next(ls(str(tmp_path))).path
    assert outcome(readv=errno.EIO) == "failed" and os.path.exists(place)
    assert outcome(close=errno.EIO) == "hit" and os.path.exists(place)
    os.truncate(place, 4096 + 100)
    assert outcome() == "damaged" and not os.path.exists(place)
    assert outcome() == "miss"
