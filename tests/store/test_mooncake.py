"""Chunks in a real Mooncake cluster: a master process and clients over TCP on the loopback.

Skipped where Mooncake is not installed, unless VKVMAP_REMOTE=1 asks for this lane: then that fails.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.store.small import content_of, key_of, payload_bytes, small_identity
from vkvmap.errors import StoreError
from vkvmap.region import Region, Section

IDENTITY = small_identity()
FULL, LATENT = payload_bytes(IDENTITY, "full"), payload_bytes(IDENTITY, "latent")


def missing() -> str:
    try:
        import mooncake.store  # noqa: F401
    except ImportError as error:
        return str(error)
    return "" if master_program() else "mooncake_master is not on the path"


def master_program() -> str | None:
    return shutil.which(
        "mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    )


pytestmark = [pytest.mark.store]
if os.environ.get("VKVMAP_REMOTE") != "1":
    pytestmark.append(pytest.mark.skipif(bool(missing()), reason=f"no Mooncake: {missing()}"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Cluster:
    """A master with its metadata server."""

    def __init__(self, folder: Path) -> None:
        rpc, http, metrics = free_port(), free_port(), free_port()
        program = master_program()
        assert program, missing()
        self.log = open(folder / "master.log", "wb")
        self.process = subprocess.Popen(
            [
                program,
                f"--rpc_port={rpc}",
                "--rpc_address=127.0.0.1",
                "--enable_http_metadata_server=true",
                "--http_metadata_server_host=127.0.0.1",
                f"--http_metadata_server_port={http}",
                f"--metrics_port={metrics}",
                "--metrics_host=127.0.0.1",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        self.address = {
            "master": f"127.0.0.1:{rpc}",
            "metadata": f"http://127.0.0.1:{http}/metadata",
        }
        for port in (rpc, http):
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    assert not missing(), f"this lane was asked for: {missing()}"
    running = Cluster(tmp_path_factory.mktemp("mooncake"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(cluster):
    from vkvmap.integrations.mooncake import connect

    client = connect(**cluster.address, segment_bytes=64 << 20, buffer_bytes=16 << 20)
    yield client
    client.close()


@pytest.fixture
def region():
    with Region.create([Section("full", 8, FULL), Section("latent", 8, LATENT)]) as region:
        yield region


def opened(client, region=None, identity=IDENTITY):
    from vkvmap.integrations.mooncake import MooncakeStore

    return MooncakeStore(client, identity, region=region, threads=2)


def test_chunks_move_between_rows_and_the_cluster(client, region):
    with opened(client, region) as store:
        for group, size in (("full", FULL), ("latent", LATENT)):
            keys = [key_of(number) for number in range(4)]
            for row, key in enumerate(keys):
                region.row(group, row)[:] = content_of(key, size)
            job = store.put(keys, group, range(4))
            assert job.wait(60) and job.outcomes == ["stored"] * 4, job.reasons
            assert store.lookup([*keys, key_of(9)], group).tolist() == [True] * 4 + [False]
            assert store.prefix([*keys[:2], key_of(9), keys[2]], group) == 2
            job = store.get([*keys, key_of(9)], group, [7, 6, 5, 4, 3])
            assert job.wait(60) and job.outcomes == ["hit"] * 4 + ["miss"], job.reasons
            for row, key in enumerate(keys):
                assert np.array_equal(region.row(group, 7 - row), content_of(key, size))
            job = store.put(keys[:1], group, [0])
            assert job.wait(60) and job.outcomes == ["present"]


def test_rows_outside_the_region_go_through_staging(client):
    key, row = key_of(20), np.zeros(LATENT, np.uint8)
    with opened(client) as store:
        assert store.put([key], "latent", [content_of(key, LATENT)]).wait(60)
        job = store.get([key], "latent", [row])
        assert job.wait(60) and job.good.all(), job.reasons
        assert np.array_equal(row, content_of(key, LATENT))
        assert store.delete([key], "latent") == 1 and store.delete([key], "latent") == 0
        assert not store.lookup([key], "latent").any()


def test_some_layers_are_loaded_and_the_others_left_alone(client, region):
    key, half = key_of(21), FULL // 2
    with opened(client, region) as store:
        region.row("full", 0)[:] = content_of(key, FULL)
        assert store.put([key], "full", [0]).wait(60)
        region.row("full", 1)[:] = 0x77
        job = store.get([key], "full", [1], layers=["b"])
        assert job.wait(60) and job.good.all(), job.reasons
        assert np.array_equal(region.row("full", 1)[half:], content_of(key, FULL)[half:])
        assert (region.row("full", 1)[:half] == 0x77).all()


def test_an_object_is_the_file_of_the_specification(client, tmp_path):
    from vkvmap.store import CanonicalStore
    from vkvmap.store_upkeep import ls

    key = key_of(30)
    with opened(client) as store, CanonicalStore(tmp_path, IDENTITY) as files:
        for each in (store, files):
            assert each.put([key], "latent", [content_of(key, LATENT)]).wait(60)
        entry = next(ls(str(tmp_path)))
        name = f"vkvmap/{os.path.relpath(entry.path, tmp_path)}"
        assert client.get(name) == Path(entry.path).read_bytes()


@pytest.mark.parametrize("place", [3, 100, 4095, 4096, 4096 + FULL - 1])
def test_a_damaged_object_is_a_miss_and_goes(client, place):
    key, row = key_of(40), np.full(FULL, 7, np.uint8)
    with opened(client) as store:
        assert store.put([key], "full", [content_of(key, FULL)]).wait(60)
        name = store._shelves["full"].path(key)
        harmed = bytearray(client.get(name))
        harmed[place] ^= 1
        assert client.remove(name, True) == 0 and client.put(name, bytes(harmed)) == 0
        job = store.get([key], "full", [row])
        assert job.wait(60) and job.outcomes == ["damaged"] and not row.any()
        assert not store.lookup([key], "full").any()


def test_a_short_object_is_a_miss(client):
    key, row = key_of(41), np.zeros(FULL, np.uint8)
    with opened(client) as store:
        client.put(store._shelves["full"].path(key), b"short")
        job = store.get([key], "full", [row])
        assert job.wait(60) and job.outcomes == ["damaged"]


def test_identities_are_kept_apart(client):
    key, row = key_of(50), np.zeros(FULL, np.uint8)
    with opened(client) as store, opened(client, identity=small_identity(salt="x")) as other:
        assert store.put([key], "full", [content_of(key, FULL)]).wait(60)
        job = other.get([key], "full", [row])
        assert job.wait(60) and job.outcomes == ["miss"]


ANOTHER_PROCESS = """
import json, sys
import numpy as np
from tests.store.small import content_of, key_of, payload_bytes, small_identity
from vkvmap.integrations.mooncake import MooncakeStore, connect
client = connect(**json.loads(sys.argv[1]), segment_bytes=0, buffer_bytes=16 << 20)
identity = small_identity()
nbytes = payload_bytes(identity, "full")
with MooncakeStore(client, identity) as store:
    row = np.zeros(nbytes, np.uint8)
    job = store.get([key_of(60)], "full", [row])
    job.wait(60)
    print(job.outcomes, job.reasons)
    assert job.good.all() and np.array_equal(row, content_of(key_of(60), nbytes))
client.close()
"""


def test_another_process_loads_what_this_one_stored(client, cluster):
    key = key_of(60)
    with opened(client) as store:
        assert store.put([key], "full", [content_of(key, FULL)]).wait(60)
        child = subprocess.run(
            [sys.executable, "-c", ANOTHER_PROCESS, json.dumps(cluster.address)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert child.returncode == 0, child.stderr[-2000:]


def test_a_full_cluster_says_so(client):
    big = small_identity(chunk_tokens=16 * 1024)
    nbytes = payload_bytes(big, "full")
    with opened(client, identity=big) as store:
        keys = [key_of(number) for number in range(20)]
        job = store.put(keys, "full", [np.zeros(nbytes, np.uint8)] * 20)
        assert job.wait(120)
        assert set(job.outcomes) == {"stored", "full"}
        store.delete(keys, "full")


def test_a_master_that_died_makes_misses_not_errors(tmp_path):
    from vkvmap.integrations.mooncake import connect

    doomed = Cluster(tmp_path)
    client = connect(**doomed.address, segment_bytes=16 << 20, buffer_bytes=16 << 20)
    with opened(client) as store:
        doomed.close()
        row = np.zeros(FULL, np.uint8)
        job = store.put([key_of(1)], "full", [row])
        assert job.wait(120) and job.outcomes == ["failed"]
        job = store.get([key_of(1)], "full", [row])
        assert job.wait(120) and job.outcomes == ["failed"]
        assert not store.lookup([key_of(1)], "full").any()
    client.close()


def test_no_master_is_an_error_in_words():
    from vkvmap.integrations.mooncake import connect

    with pytest.raises(StoreError, match="no Mooncake master"):
        connect(
            master=f"127.0.0.1:{free_port()}",
            metadata="P2PHANDSHAKE",
            segment_bytes=0,
            buffer_bytes=1 << 20,
        )


def test_nodes_store_the_parts_that_their_layers_fill(client, region):
    """Two stores stand for two nodes: neither has all of a row, the cluster has the chunk."""
    from vkvmap.integrations.mooncake import MooncakeStore

    parts, keys, half = [["a", "m"], ["b"]], [key_of(1001), key_of(1002)], FULL // 2
    for index, key in enumerate(keys):
        region.row("full", index)[:] = content_of(key, FULL)
    with (
        MooncakeStore(client, IDENTITY, region=region, parts=parts) as store,
        MooncakeStore(client, IDENTITY, parts=parts) as other,
    ):
        assert store.put(keys, "full", [0, 1], layers=["a"]).wait(30)
        assert not other.lookup(keys, "full").any()
        assert other.put(keys[:1], "full", [content_of(keys[0], FULL)], layers=["b"]).wait(30)
        assert (
            store.lookup(keys, "full").tolist() == [True, False] and store.prefix(keys, "full") == 1
        )
        region.row("full", 0)[:] = 0
        job = store.get(keys, "full", [0, 1])
        assert job.wait(30) and job.outcomes == ["hit", "miss"]
        assert np.array_equal(region.row("full", 0), content_of(keys[0], FULL))
        row = np.full(FULL, 0x77, np.uint8)
        job = other.get(keys[1:], "full", [row], layers=["a"])
        assert job.wait(30) and job.outcomes == ["hit"]
        assert np.array_equal(row[:half], content_of(keys[1], FULL)[:half])
        assert (row[half:] == 0x77).all()
        assert store.delete(keys, "full") == 2
