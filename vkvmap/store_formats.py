"""Which format the rows of each region section have, for a rank's mappings.

Canonical rows of a group are everybody's only if every layer of the group is certified here. Where
one is not, its place in the row holds nothing, so the whole group's rows, canonical and private,
are stored under an identity that says who wrote them: nobody else can take a hole for content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vkvmap.format import ChunkFormat
from vkvmap.identity import Identity
from vkvmap.mapping import Mappings
from vkvmap.sections import pages_per_chunk, private_rows, private_section


def formats_of(
    identity: Identity, mappings: Mappings, *, written_by: Mapping[str, Any]
) -> dict[str, ChunkFormat]:
    """Region section -> format, for `CanonicalStore`.

    Args:
        identity: of the model; its chunk tokens are those of the plan.
        mappings: any rank's.
        written_by: what a reader of opaque rows must have in common with their writer beyond the
            rank grid: block size, pipeline stage, cache layout and strides, as plain JSON values.
            Not used while every layer is certified.
    """
    pages = pages_per_chunk(mappings, identity.chunk_tokens)
    private = private_rows(mappings, pages)
    grid = mappings.grid
    formats: dict[str, ChunkFormat] = {}
    for group in identity.layers.groups:
        if group not in pages:
            continue  # another pipeline stage's
        described = identity.chunks[group].payload_bytes > 0
        if group not in private:
            formats[group] = ChunkFormat(identity, group)
            continue
        offsets, payload = private[group]
        names, bounds = list(offsets), [*offsets.values(), payload]
        pieces = [
            (name, (bounds[at + 1] - bounds[at]) // pages[group], pages[group])
            for at, name in enumerate(names)
        ]
        placement = {
            "grid": {
                "tp": grid.tp,
                "dcp": grid.dcp,
                "pcp": grid.pcp,
                "interleave": grid.interleave,
                "pcp_mode": grid.pcp_mode,
                "head_ranges": [
                    [name, [list(held) for held in ranges]]
                    for name, ranges in sorted(grid.head_ranges.items())
                ],
            },
            "carriers": [[name, carrier] for name, carrier in mappings.carrier.items()],
            "opaque": [[name, size, count] for name, size, count in pieces],
            "written_by": dict(written_by),
        }
        configured = identity.opaque(placement)
        formats[private_section(group)] = ChunkFormat.opaque(configured, group, pieces)
        if described:
            formats[group] = ChunkFormat(configured, group)
    return formats
