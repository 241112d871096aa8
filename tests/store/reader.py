"""A reader of stored chunks, written from docs/format.md alone: it shares no code with vkvmap.

Slow on purpose: it walks over every element, so that what it does can be compared with the page.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re

import numpy as np
import xxhash

Arrays = dict[str, dict[str, np.ndarray]]


def read(raw: bytes, description: str, group: str, key: bytes) -> Arrays:
    """Layer -> field -> uint8 ``(*axes, elem)`` of the chunk in `raw`; ValueError if it is bad."""

    def number(offset: int, size: int) -> int:
        return int.from_bytes(raw[offset : offset + size], "little")

    def check(holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(what)

    said = json.loads(description)
    check(len(raw) >= 160 and raw[:8] == b"VKVCHUNK" and number(8, 4) == 1, "magic, version")
    header, payload, num_layers, num_pages = (
        number(12, 4),
        number(16, 8),
        number(128, 4),
        number(132, 4),
    )
    tables = 160 + 24 * num_layers + 16 * num_pages + 24 * number(136, 4)
    check(header == -(-tables // 4096) * 4096 <= 16 << 20 and len(raw) >= header, "header bytes")
    blanked = raw[:144] + bytes(16) + raw[160:header]
    check(xxhash.xxh3_128(blanked).digest() == raw[144:160], "header digest")
    check(raw[24:56] == hashlib.sha256(description.encode()).digest(), "identity")
    groups = {entry["name"]: entry for entry in said["groups"]}
    check(number(56, 4) == list(groups).index(group), "group")
    check(raw[64:128] == key.ljust(64, b"\0") and number(60, 2) == len(key), "key")
    check(number(62, 2) & ~1 == 0 and said["placement"] is None, "canonical rows")
    tokens, span = groups[group]["tokens"], groups[group]["span"]
    layers = [x for x in said["layers"] if x["group"] == group and x["kind"] != "opaque"]
    check(len(layers) == num_layers and len(raw) >= header + payload, "length")
    found: Arrays = {}
    cursor, digest_at = 0, 160 + 24 * num_layers
    for index, layer in enumerate(layers):
        has_tokens = any(
            axis == ["token", 0] for field in layer["fields"] for axis in field["axes"]
        )
        pages, at = tokens // span if has_tokens else 1, 160 + 24 * index
        size = number(at + 8, 8)
        check(
            number(at, 8) == cursor and number(at + 16, 4) == pages and size % pages == 0, "table"
        )
        parts = []
        for page in range(pages):
            start = header + cursor + page * (size // pages)
            content = raw[start : start + size // pages]
            check(
                xxhash.xxh3_128(content).digest() == raw[digest_at : digest_at + 16], "page digest"
            )
            parts.append(decode(content, layer, span))
            digest_at += 16
        found[layer["name"]] = {
            name: np.concatenate([part[name] for part in parts]) for name in parts[0]
        }
        cursor += size
    check(cursor == payload and digest_at == 160 + 24 * num_layers + 16 * num_pages, "payload")
    return found


def decode(content: bytes, layer: dict, span: int) -> dict[str, np.ndarray]:
    """Field -> uint8 ``(*axes, elem)`` of one canonical page, by walking its order."""
    fields = {field["name"]: field for field in layer["fields"]}
    extents = {
        name: {axis: span if axis == "token" else extent for axis, extent in field["axes"]}
        for name, field in fields.items()
    }
    arrays = {
        name: np.zeros([*extents[name].values(), field["elem"]], np.uint8)
        for name, field in fields.items()
    }
    every = {axis: extent for sizes in extents.values() for axis, extent in sizes.items()}
    cursor = 0

    def walk(order: tuple, fixed: dict[str, int]) -> None:
        nonlocal cursor
        axes, body = order
        for step in itertools.product(*(range(every[axis]) for axis in axes)):
            at = fixed | dict(zip(axes, step, strict=True))
            for item in body:
                if isinstance(item, tuple):
                    walk(item, at)
                    continue
                loops = [[at[a]] if a in at else range(n) for a, n in extents[item].items()]
                for place in itertools.product(*loops):
                    elem = fields[item]["elem"]
                    arrays[item][place] = np.frombuffer(content, np.uint8, elem, cursor)
                    cursor += elem

    walk(parsed(layer["order"]), {})
    if cursor != len(content):
        raise ValueError("the order covers another number of bytes")
    return arrays


def parsed(text: str) -> tuple:
    """An order as (axes, items), an item being a field's name or another order."""
    words = re.findall(r"[\w.]+|[\[\](),]", text)

    def order() -> tuple:
        axes, items = [], []
        while words[0] == "[":
            axes.append(words[1])
            del words[:3]
        while words.pop(0) != ")":  # "(" the first time, "," after that
            items.append(order() if words[0] in "[(" else words.pop(0))
        return axes, items

    return order()
