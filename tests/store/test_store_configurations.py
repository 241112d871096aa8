"""Stored under one configuration, reopened by new processes under others: the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vkvmap.store_upkeep import fsck

pytestmark = pytest.mark.store


def deploy(path: str, action: str, configuration: str) -> None:
    task = json.dumps({"path": path, "action": action, "configuration": configuration})
    subprocess.run([sys.executable, "-m", "tests.store.deployment", task], check=True, timeout=300)


STORED = "tp=4,dcp=2,layout=split_nhd,block=16"


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    place = str(tmp_path_factory.mktemp("deployments") / "store")
    deploy(place, "store", STORED)
    assert fsck(place).clean and fsck(place).chunks == 10
    return place


@pytest.mark.parametrize(
    "configuration",
    [
        "tp=2,layout=packed_hnd,block=64",
        "tp=1,pp=2,layout=split_hnd,block=32",
        "tp=2,dcp=1,pp=3+1,layout=packed_nhd,block=16",
        STORED,
    ],
)
def test_chunks_stored_under_one_configuration_load_under_any(path, configuration):
    deploy(path, "load", configuration)


def test_stages_complete_a_chunk_together(tmp_path):
    place = str(tmp_path / "store")
    deploy(place, "store", "tp=1,pp=2,layout=split_hnd,block=32")
    deploy(place, "load", "tp=4,dcp=2,layout=packed_nhd,block=32")
