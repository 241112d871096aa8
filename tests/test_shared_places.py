"""Groups of one plan whose caches lie on the same memory, or beside each other in it."""

import itertools

import numpy as np
import pytest

from vkvmap import (
    CacheView,
    LayerSpec,
    LayerTable,
    RankGrid,
    Region,
    TensorView,
    TransferPlan,
    derive_canonical_mappings,
)
from vkvmap.errors import PlanError
from vkvmap.layout import layout_named
from vkvmap.sections import sections_for

BLOCKS, TOKENS, SIZE = 8, 4, 8


class World:
    """Blocks hold K of places 0 and 1, then V of both; each group names its place."""

    def __init__(self, places: dict[str, int]) -> None:
        self.memory = np.zeros((BLOCKS, 4, TOKENS, 1, SIZE), np.uint16)
        self.places = places
        layer = LayerSpec.attention("layer", num_kv_heads=1, head_size=SIZE)
        table = LayerTable(layer.renamed(f"layer.{group}", group) for group in places)
        views = {f"layer.{group}": self._view(place) for group, place in places.items()}
        mappings = derive_canonical_mappings(
            table, views, RankGrid(), 0, family="universal", strict=True
        )
        self.region = Region.create(sections_for(mappings, TOKENS, BLOCKS))
        self.plan = TransferPlan(mappings, views, self.region, chunk_tokens=TOKENS)

    def of(self, group: str) -> np.ndarray:
        return self.memory[:, self.places[group] :: 2]

    def _view(self, place: int) -> CacheView:
        part = self.memory[:, place::2]
        whole = (self.memory.ctypes.data, self.memory.nbytes)
        tensor = TensorView(part.ctypes.data, part.shape, part.strides, 2, whole)
        return CacheView((tensor,), layout_named("split_nhd"), TOKENS)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *exc: object) -> None:
        self.plan.close()
        self.region.close()


def test_one_block_of_two_groups_beside_each_other_is_loaded_in_one_transfer():
    with World({"a": 0, "c": 1}) as world:
        world.memory[:] = np.random.default_rng(0).integers(0, 1 << 16, world.memory.shape)
        kept = world.memory.copy()
        for _ in range(3):
            world.plan.store({"a": ([5, 2], [1, 2]), "c": ([5, 2], [3, 4])}).check()
            world.memory[:] = 0
            world.plan.load({"a": ([5, 2], [1, 2]), "c": ([5, 2], [3, 4])}).check()
            assert np.array_equal(world.memory[[2, 5]], kept[[2, 5]])
            assert not world.memory[[0, 1, 3, 4, 6, 7]].any()


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_a_block_that_two_groups_share_is_loaded_once_whatever_lies_beside_it(order):
    with World({"a": 0, "b": 0, "c": 1}) as world:
        world.memory[:] = 7
        with pytest.raises(PlanError, match="block 5 is a destination twice"):
            world.plan.load({group: ([5], [1]) for group in order})
        assert (world.memory == 7).all()
        blocks = {"a": 5, "b": 6, "c": 5}
        world.plan.load({group: ([blocks[group]], [1]) for group in order}).check()
        assert not world.memory[5].any() and not world.memory[6, 0::2].any()
        assert (world.memory[6, 1::2] == 7).all()


def test_two_pairs_of_groups_may_each_load_the_same_block_of_their_own_place():
    with World({"a": 0, "b": 0, "c": 1, "d": 1}) as world:
        world.memory[:] = 7
        world.plan.load({"a": ([5], [0]), "c": ([5], [0]), "b": ([6], [0])}).check()
        assert not world.memory[5].any() and not world.memory[6, 0::2].any()
        with pytest.raises(PlanError, match="block 5 is a destination twice"):
            world.plan.load({"a": ([4], [0]), "c": ([5], [0]), "d": ([5], [0])})
