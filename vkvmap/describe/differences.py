"""Two descriptions of stored pages, compared in full: will their owners understand each other?

A description is an identity's canonical JSON: what an engine would store under, or what lies beside
the chunks of a store. Chunks are shared only where the texts are equal; this module says where they
are not, and what follows from it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkvmap.errors import FormatError
from vkvmap.foreign import read_json

_REASONS = {
    "model": "pages of another model are other numbers",
    "revision": "pages of another checkpoint are other numbers",
    "adapter": "an adapter changes keys and values",
    "salt": "the sides are kept apart on purpose",
    "quantisation": "stored numbers mean different values",
    "family": "the byte order of a page differs",
    "format": "the sides are of incompatible versions",
    "placement": "opaque pages are of one configuration only",
    "tokens": "keys are hashes over a different number of tokens",
    "span": "native pages span different numbers of tokens; universal ones have none",
    "order": "native pages keep their layout; universal ones do not",
    "encoding": "cells are filled differently",
    "dtype": "bytes mean different numbers",
    "window": "layers see different parts of the context",
}


@dataclass(frozen=True)
class Difference:
    """One place where descriptions differ: `where`, both values, and why it matters."""

    where: str
    here: str
    there: str
    why: str


def read_description(path: Path) -> str:
    """The description in a file, in an identity's folder, or in a store that has only one.

    Raises FormatError where there is none, or several.
    """
    if path.is_dir():
        inside = path / "identity.json"
        if not inside.is_file():
            found = sorted(path.glob("*/identity.json"))
            if len(found) != 1:
                names = ", ".join(f.parent.name[:12] for f in found[:4])
                raise FormatError(
                    f"{path} holds {len(found)} identities{f' ({names}, ...)' if found else ''}; "
                    "name the folder of one"
                )
            inside = found[0]
        path = inside
    text = path.read_text(encoding="utf-8").strip()
    try:
        described = read_json(text)
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {error}") from None
    if not isinstance(described, dict) or not {"model", "revision", "layers"} <= described.keys():
        raise FormatError(
            f"{path} does not describe stored pages (model, revision, layers); write one with: "
            "vkvmap identity"
        )
    return text


def digest(text: str) -> str:
    """The name that chunks of this description lie under."""
    return hashlib.sha256(text.encode()).hexdigest()


def differences(here: str, there: str) -> list[Difference]:
    """Every place where two descriptions differ, alike layers reported once."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for path, one, two in _compare(read_json(here), read_json(there), ()):
        key = (_kind(path), _short(one), _short(two))
        found.setdefault(key, []).append(_spelled(path))
    return [
        Difference(
            places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more",
            one,
            two,
            _REASONS.get(kind, "bytes lie elsewhere"),
        )
        for (kind, one, two), places in found.items()
    ]


_MISSING = object()
Step = tuple[str, ...]


def _compare(here: Any, there: Any, path: Step) -> Iterator[tuple[Step, Any, Any]]:
    if isinstance(here, dict) and isinstance(there, dict):
        for key in dict.fromkeys([*here, *there]):
            yield from _compare(here.get(key, _MISSING), there.get(key, _MISSING), (*path, key))
    elif isinstance(here, list) and isinstance(there, list):
        ours, theirs = _named(here), _named(there)
        for key in dict.fromkeys([*ours, *theirs]):
            yield from _compare(ours.get(key, _MISSING), theirs.get(key, _MISSING), (*path, key))
    elif here is _MISSING or there is _MISSING or here != there:
        yield path, here, there


def _named(items: list[Any]) -> dict[str, Any]:
    """Items by their name where they have one, else by position."""
    return {
        str(item["name"]) if isinstance(item, dict) and "name" in item else str(index): item
        for index, item in enumerate(items)
    }


def _kind(path: Step) -> str:
    """What differs, without which layer it is."""
    return path[-1] if path[:1] not in (("layers",), ("groups",)) else "/".join(path[2:] or path)


def _spelled(path: Step) -> str:
    return " ".join(path)


def _short(value: Any) -> str:
    if value is _MISSING:
        return "(nothing)"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
