"""The engine's other tiers with our pages: an object store, and a peer that is still running.

Both are the engine's own, over NIXL, which install.sh puts beside it. The object store is moto's,
the peer another engine, both on the loopback interface.
"""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engine import Bench, python, transfer, whole_prefix

pytestmark = pytest.mark.vllm

Models = Callable[[str], Path]

PROMPTS = [
    "The quick brown fox jumps over the lazy dog and then some more. " * 4 + "tiers",
    "ZYX " + "another prompt that shares nothing with the others at all, " * 4 + "x",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def bucket() -> Iterator[str]:
    """The address of an empty bucket."""
    port = free_port()
    server = subprocess.Popen(
        [python(), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError):
                request = urllib.request.Request(f"{address}/pages", method="PUT")
                urllib.request.urlopen(request, timeout=5).close()
                break
            assert time.monotonic() < deadline and server.poll() is None, "no object store"
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


def objects(address: str) -> int:
    with urllib.request.urlopen(f"{address}/pages?list-type=2", timeout=10) as answer:
        return answer.read().decode().count("<Key>")


def test_an_object_store_serves_another_tp(bench: Bench, models: Models, bucket: str) -> None:
    tier = {
        "type": "obj",
        "store_config": {
            "bucket": "pages",
            "endpoint_override": bucket,
            "access_key": "nobody",
            "secret_key": "nothing",
            "region": "us-east-1",
        },
    }
    model, config = models("llama"), transfer(tier=tier, verify=True)
    # The engine's tier asks how long each transfer took, which NIXL knows only if told to look.
    told = {"NIXL_TELEMETRY_ENABLE": "y"}
    first = bench.run(model, prompts=PROMPTS, transfer=config, environment=dict(told))
    assert first.cached() == [0, 0]
    assert objects(bucket) == sum(whole_prefix(first, 32)) // 32
    both = bench.run(model, tp=2, prompts=PROMPTS, transfer=config, environment=dict(told))
    assert both.cached() == whole_prefix(both, 32)
    assert both.tokens() == first.tokens()
    assert both.metric("vkvmap_digest_mismatches") == 0 < both.metric("vkvmap_bytes{load}")


def test_a_running_peer_serves_another_tp(bench: Bench, models: Models, tmp_path: Path) -> None:
    model, done = models("llama"), tmp_path / "done"
    ports = free_port(), free_port()

    def task(port: int) -> dict[str, Any]:
        tier = {"type": "p2p", "host": "127.0.0.1", "port": port}
        # Libraries that NIXL's transport brings along may fault while they are unloaded.
        return {"transfer": transfer(tier=tier, verify=True), "exit_at_once": True}

    peer = bench.start(model, prompts=PROMPTS, until=str(done), **task(ports[0]))
    try:
        lines = []
        assert peer.stdout is not None
        for line in peer.stdout:
            lines.append(line)
            if line.startswith("RESULT "):
                break
        source = {"kv_request_id": "one", "remote_host": "127.0.0.1", "remote_port": ports[0]}
        both = bench.run(
            model,
            tp=2,
            prompts=PROMPTS[:1],
            request={"remote_kv_source": source},
            **task(ports[1]),
        )
    finally:
        done.touch()
        output, _ = peer.communicate(timeout=120)
    first = bench.read(peer, "".join(lines) + output)
    assert both.cached() == whole_prefix(both, 32)
    assert both.tokens() == first.tokens()[:1]
    assert both.metric("vkvmap_digest_mismatches") == 0 < both.metric("vkvmap_bytes{load}")
