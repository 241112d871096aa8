"""What a region must hold for a model: sections of canonical rows, and private ones.

A group's canonical rows have one length under every configuration. Opaque pages never lie in them;
they get rows of their own, which hold every rank's bytes and mean nothing to another configuration.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from vkvmap.chunk import ChunkLayout, number_for
from vkvmap.errors import PlanError, SpecError
from vkvmap.mapping import Mappings
from vkvmap.region import Section
from vkvmap.region_sections import LINE


def private_section(group: str) -> str:
    """Name of the section that holds a group's opaque pages."""
    return f"{group}/private"


def pages_per_chunk(mappings: Mappings, chunk_tokens: int | Mapping[str, int]) -> dict[str, int]:
    """Canonical pages per chunk of each group that this rank has layers of.

    Raises PlanError where layers of a group disagree, or where a chunk is not whole pages or
    `chunk_tokens` no whole number.
    """
    pages: dict[str, int] = {}
    decided_by: dict[str, str] = {}
    for name, mapping in mappings.by_layer.items():
        spec = mappings.layers[name]
        tokens = _number(chunk_tokens, spec.group, "chunk_tokens")
        if not spec.has_tokens or not mapping.span_tokens:
            continue
        if tokens < 1 or tokens % mapping.span_tokens:
            raise PlanError(
                f"layer {name!r}: a chunk of {tokens} tokens is not a whole number of pages of "
                f"{mapping.span_tokens} tokens; choose chunk_tokens as a multiple of the span"
            )
        count = tokens // mapping.span_tokens
        if pages.setdefault(spec.group, count) != count:
            raise PlanError(
                f"layer {name!r}: {count} pages per chunk, layer {decided_by[spec.group]!r} of the "
                f"same group has {pages[spec.group]}; layers of one group share their block lists, "
                "so give layers with another block size a group of their own"
            )
        decided_by.setdefault(spec.group, name)
    for name in mappings.by_layer:
        group = mappings.layers[name].group
        if not mappings.layers[name].has_tokens and mappings.layers[name].described:
            if group in pages:
                raise PlanError(
                    f"layer {name!r} keeps one state per chunk, layer {decided_by.get(group)!r} of "
                    f"group {group!r} keeps pages; give state layers a group of their own"
                )
    for name in mappings.by_layer:
        pages.setdefault(mappings.layers[name].group, 1)
    return pages


def sections_for(
    mappings: Mappings,
    chunk_tokens: int | Mapping[str, int],
    num_chunks: int | Mapping[str, int],
    *,
    row_padding: int | Mapping[str, int] = 0,
) -> list[Section]:
    """The sections that a region needs for these mappings; the same on every rank of the group.

    One section of canonical rows per group, as long under every configuration, and one of private
    rows for each group with opaque layers.

    `row_padding`: bytes left free after every canonical row, a multiple of 128; one number, or one
    per group. Without it rows of 4096 bytes and more are whole memory pages apart, so that files
    are read straight into them. 256 makes CPU transfers in fragments of 64 bytes faster and longer
    ones slower (docs/performance.md); files are then read straight into those rows alone that the
    device reaches.

    Raises PlanError as `pages_per_chunk` does, and for a padding or a group that is none.
    """
    padding = _paddings(row_padding, mappings.layers.groups)
    pages = pages_per_chunk(mappings, chunk_tokens)
    chunks = ChunkLayout.of(mappings.layers, chunk_tokens)
    private = private_rows(mappings, pages)
    sections = []
    for group in mappings.layers.groups:
        count = _number(num_chunks, group, "num_chunks")
        if chunks[group].payload_bytes:
            section = Section(group, count, chunks[group].payload_bytes)
            sections.append(replace(section, row_stride=section.stride + padding[group]))
        if group in private:
            payload = private[group][1]
            sections.append(Section(private_section(group), count, payload, private=True))
    return sections


def _paddings(told: int | Mapping[str, int], groups: Collection[str]) -> dict[str, int]:
    if isinstance(told, Mapping) and not set(told) <= set(groups):
        unknown = sorted(set(told) - set(groups), key=str)
        raise PlanError(f"row_padding names {unknown}; the model's groups are {sorted(groups)}")
    paddings = {group: _number(told, group, "row_padding") for group in groups}
    for group, padding in paddings.items():
        if padding < 0 or padding % LINE:
            raise PlanError(
                f"group {group!r}: row_padding={padding}; rows start on multiples of {LINE} bytes, "
                f"so that no two share a line: give 0 or a multiple of {LINE}"
            )
    return paddings


def _number(told: int | Mapping[str, int], group: str, what: str) -> int:
    try:
        return number_for(told, group, what)
    except SpecError as error:
        raise PlanError(str(error)) from None


def private_rows(
    mappings: Mappings, pages: Mapping[str, int]
) -> dict[str, tuple[dict[str, int], int]]:
    """Group -> (carrier layer -> offset in the private row, bytes of the row).

    Only groups with opaque layers; a carrier's pages follow each other as canonical pages do.
    """
    rows: dict[str, tuple[dict[str, int], int]] = {}
    for name, mapping in mappings.by_layer.items():
        if mapping.certified or mappings.carrier[name] != name:
            continue
        group = mappings.layers[name].group
        offsets, cursor = rows.setdefault(group, ({}, 0))
        offsets[name] = cursor
        rows[group] = (offsets, cursor + pages[group] * mapping.canonical_page_size_bytes)
    return rows
