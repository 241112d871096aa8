"""Chunks: what a store addresses, and what a row of a region holds.

A chunk is T tokens of one layer group, laid out layer by layer in the model-wide layer table, each
layer's canonical pages concatenated in token order (DESIGN 1). Nothing here depends on a rank or a
configuration: a layer has its place in the row even where this configuration keeps it opaque or
another pipeline stage owns it, so a row has one length for everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from typing import Any

from vkvmap.errors import SpecError
from vkvmap.spec import LayerTable


def number_for(told: Any, group: str, what: str) -> int:
    """What `told`, one number or one per group, says for `group`; 0 where it says nothing.

    Raises SpecError for anything but whole numbers; `what` names the argument in it.
    """
    number = told.get(group, 0) if isinstance(told, Mapping) else told
    try:
        if isinstance(number, bool):
            raise TypeError
        return index(number)
    except TypeError:
        raise SpecError(
            f"group {group!r}: {what}={number!r:.60} is {type(number).__name__}; give a whole "
            "number, or a mapping from group to whole numbers"
        ) from None


@dataclass(frozen=True)
class GroupChunk:
    """The chunk of one layer group.

    Attributes:
        group: the group's name.
        tokens: T; 0 for groups that keep state instead of tokens (one state per chunk).
        offsets: layer name -> byte offset of its pages within the chunk.
        sizes: layer name -> its bytes within the chunk.
        payload_bytes: length of the chunk.
    """

    group: str
    tokens: int
    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    payload_bytes: int


@dataclass(frozen=True)
class ChunkLayout:
    """The chunks of a model's groups, by group name."""

    by_group: Mapping[str, GroupChunk]

    @classmethod
    def of(cls, layers: LayerTable, chunk_tokens: int | Mapping[str, int]) -> ChunkLayout:
        """Lay out chunks of `chunk_tokens` tokens (one number, or one per group).

        Raises SpecError where a group with tokens is given none, or no whole number.
        """
        by_group = {}
        for group in layers.groups:
            members = layers.in_group(group)
            tokens = number_for(chunk_tokens, group, "chunk_tokens")
            if any(spec.has_tokens for spec in members) and tokens < 1:
                raise SpecError(f"group {group!r}: chunk_tokens={tokens}, a positive count needed")
            offsets: dict[str, int] = {}
            sizes: dict[str, int] = {}
            cursor = 0
            for spec in members:
                if not spec.described:
                    continue  # undescribed state has no canonical form; it lives in private rows
                offsets[spec.name] = cursor
                sizes[spec.name] = spec.canonical_bytes(tokens)
                cursor += sizes[spec.name]
            by_group[group] = GroupChunk(group, tokens, offsets, sizes, cursor)
        return cls(by_group)

    def __getitem__(self, group: str) -> GroupChunk:
        return self.by_group[group]
