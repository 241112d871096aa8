"""Stored under one configuration, reopened by new processes under others: the same bytes."""

from __future__ import annotations

import os
import shutil

import numpy as np
import pytest

from tests.store.deployment import MODELS, NUM_CHUNKS, deploy, identity_of, parts_of
from tests.store.small import key_of
from vkvmap.store import CanonicalStore
from vkvmap.store_upkeep import fsck, gc, ls

pytestmark = pytest.mark.store

KEYS = [key_of(number) for number in range(NUM_CHUNKS)]
STORED = "tp=4,dcp=2,layout=split_nhd,block=16"


@pytest.fixture(scope="module", params=list(MODELS))
def stored(request, tmp_path_factory) -> tuple[str, str]:
    """A model, and the store that four ranks of two KV heads and two context shards filled."""
    path = str(tmp_path_factory.mktemp(request.param) / "store")
    deploy(path, "store", STORED, model=request.param)
    found = fsck(path)
    assert found.clean and found.chunks == NUM_CHUNKS * len(MODELS[request.param].groups)
    return request.param, path


@pytest.mark.parametrize(
    "configuration",
    [
        "tp=2,layout=packed_hnd,block=64",
        "tp=1,pp=2,layout=split_hnd,block=32",
        "tp=2,dcp=1,pp=3+1,layout=packed_nhd,block=16",
        STORED,
    ],
)
def test_chunks_stored_under_one_configuration_load_under_any(stored, configuration):
    model, path = stored
    if model == "hybrid":
        configuration = configuration.replace("pp=3+1", "pp=4+2")
    deploy(path, "load", configuration, model=model)


def test_every_group_is_looked_up_checked_and_cleaned_on_its_own(stored, tmp_path):
    model, path = stored[0], str(tmp_path / "store")
    shutil.copytree(stored[1], path)
    groups = MODELS[model].groups
    with CanonicalStore(path, identity_of(model)) as store:
        for group in groups:
            assert store.lookup(KEYS, group).all() and store.keys(group) == sorted(KEYS)
            assert store.prefix([*KEYS, key_of(77)], group) == NUM_CHUNKS
        # A group that lost a chunk loses that one; the others keep theirs under the same key.
        first = next(entry for entry in ls(path, folder="0") if entry.key == KEYS[1].hex())
        os.truncate(first.path, 5000)
        assert list(fsck(path).damaged) == [first.path]
        os.utime(first.path, (1, 1))
        assert gc(path, unused_days=1).chunks == 1
        assert store.lookup(KEYS, groups[0]).tolist() == [True, False, True, True, True]
        assert all(store.lookup(KEYS, group).all() for group in groups[1:])
    assert fsck(path).clean


def test_stages_complete_a_chunk_together(tmp_path):
    place = str(tmp_path / "store")
    deploy(place, "store", "tp=1,pp=2,layout=split_hnd,block=32")
    deploy(place, "load", "tp=4,dcp=2,layout=packed_nhd,block=32")


@pytest.mark.parametrize(("model", "parts"), [("latent", "pp=4"), ("hybrid", "pp=6")])
def test_stages_on_nodes_of_their_own_store_chunks_that_any_configuration_loads(
    tmp_path, model, parts
):
    """No node ever holds a whole row; a chunk is there once every stage has stored its parts."""
    path, groups = str(tmp_path / "store"), MODELS[model].groups
    divided = parts_of(model, parts)
    two_nodes = "tp=2,dcp=1,pp=2,layout=split_nhd,block=16"
    deploy(path, "store", two_nodes, model=model, stage=1, parts=parts)
    with CanonicalStore(path, identity_of(model), parts=divided) as store:
        assert fsck(path).chunks > 0
        for group in groups:
            assert not store.lookup(KEYS, group).any() and store.prefix(KEYS, group) == 0
            row = np.zeros(store._shelves[group].chunk.payload_bytes, np.uint8)
            job = store.get(KEYS[:1], group, [row])
            assert job.wait(30) and job.outcomes == ["miss"] and not row.any()
        deploy(path, "store", two_nodes, model=model, stage=0, parts=parts)
        for group in groups:
            assert store.lookup(KEYS, group).all()
    assert fsck(path).clean
    deploy(path, "load", "tp=4,dcp=2,layout=packed_hnd,block=32", model=model, parts=parts)
    three = "tp=1,pp=3,layout=split_hnd,block=64" if model == "hybrid" else "tp=1,pp=3+1,block=64"
    for stage in range(2):
        deploy(path, "load", three, model=model, stage=stage, parts=parts)
