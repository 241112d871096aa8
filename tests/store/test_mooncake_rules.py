"""What `MooncakeStore` asks of a cluster, and when; a stand-in for the client keeps the objects.

The stand-in runs everywhere and can be made to do what a real cluster does only now and then.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from tests.store.small import content_of, key_of, payload_bytes, small_identity
from vkvmap.format import ChunkFormat
from vkvmap.integrations.mooncake import MooncakeStore
from vkvmap.ledger import Ledger
from vkvmap.region import Region, Section

IDENTITY = small_identity()
FULL = payload_bytes(IDENTITY, "full")
KEY = key_of(1)


class Client:
    """Objects in a dictionary; `asked` and `stored` are called before and after an object comes."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: Callable[[], None] = lambda: None
        self.stored: Callable[[], None] = lambda: None

    def register_buffer(self, address: int, nbytes: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0

    def is_exist(self, name: str) -> int:
        self.asked()
        return int(name in self.objects)

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name in self.objects) for name in names]

    def get_size(self, name: str) -> int:
        return len(self.objects[name]) if name in self.objects else -704

    def remove(self, name: str, force: bool) -> int:
        return 0 if self.objects.pop(name, None) is not None else -704

    def batch_put_from_multi_buffers(self, names, addresses, sizes) -> list[int]:
        pieces = [ctypes.string_at(*piece) for piece in zip(addresses[0], sizes[0], strict=True)]
        self.objects[names[0]] = b"".join(pieces)
        self.stored()
        return [0]

    def batch_get_into_multi_buffers(self, names, addresses, sizes) -> list[int]:
        data, start = self.objects[names[0]], 0
        for address, nbytes in zip(addresses[0], sizes[0], strict=True):
            ctypes.memmove(address, data[start : start + nbytes], nbytes)
            start += nbytes
        return [start]


@pytest.mark.parametrize("when", ["asked", "stored"])
def test_no_reader_gets_a_hit_of_a_row_that_got_new_content(when):
    """Not even one that reads between the moment the object appears and its removal."""
    client, seen = Client(), []
    with Region.create([Section("full", 1, FULL), Ledger.section(1, 1)]) as region:
        ledger = Ledger(region)
        with (
            MooncakeStore(
                client,
                IDENTITY,
                region=region,
                formats={"full": ChunkFormat(IDENTITY, "full")},
                ledgers={"full": ledger},
            ) as store,
            MooncakeStore(client, IDENTITY) as reader,
        ):

            def change() -> None:
                generation = ledger.begin([0])
                region.row("full", 0)[:] = content_of(key_of(2), FULL)
                ledger.finish([0], generation, 0)

            def read() -> None:
                row = np.zeros(FULL, np.uint8)
                job = reader.get([KEY], "full", [row])
                assert job.wait(30)
                seen.append((job.outcomes[0], row))

            def both() -> None:
                if when == "stored":
                    change()
                read()

            region.row("full", 0)[:] = content_of(KEY, FULL)
            ledger.finish([0], ledger.begin([0]), 0)
            if when == "asked":
                client.asked = change
            client.stored = both
            job = store.put([KEY], "full", [0])
            assert job.wait(30) and job.outcomes == ["incomplete"]
            assert "new content" in job.reasons[0]
            client.asked = lambda: None
            read()
    assert not client.objects and seen[-1][0] == "miss"
    # The object that held the right content for a moment could be read then, and nothing else.
    assert [outcome for outcome, _ in seen] == (["miss"] if when == "asked" else ["hit", "miss"])
    for outcome, row in seen:
        assert outcome == "miss" or np.array_equal(row, content_of(KEY, FULL))


def test_a_cluster_that_fails_while_the_store_closes_leaves_the_region_free():
    class Gone(Client):
        def unregister_buffer(self, address: int) -> int:
            raise RuntimeError("master gone")

    with Region.create([Section("full", 1, FULL)]) as region:
        formats = {"full": ChunkFormat(IDENTITY, "full")}
        store = MooncakeStore(Gone(), IDENTITY, region=region, formats=formats)
        assert store.put([KEY], "full", [0]).wait(30)
        with pytest.raises(RuntimeError, match="master gone"):
            store.close()
        region.close()  # a RegionError where a store still uses it
