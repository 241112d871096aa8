"""The name that pages are shared under.

The engine keeps namespaces apart by a handful of fields that do not say what the bytes mean (not
the encoding of a page, nor the layer sizes, nor the checkpoint). Ours joins them: the digest of a
format identity, which contains all of that and no parallelism, except where opaque pages make the
bytes depend on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vkvmap.cache import CacheView
from vkvmap.identity import Identity
from vkvmap.integrations.vllm.options import Options
from vkvmap.mapping import Mappings

#: Version of what this integration puts into a row around the canonical pages.
ROW_FORMAT = 1

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
#: Fields of a configuration that say where it came from and not what the model computes.
_IRRELEVANT = ("transformers_version", "_name_or_path", "_commit_hash", "name_or_path")
_SAMPLE = 4096


def identity(
    mappings: Mappings,
    caches: Mapping[str, CacheView],
    options: Options,
    *,
    model: str,
    revision: str,
    quantisation: str,
    tokens: Mapping[str, int],
    placement: Mapping[str, Any],
) -> Identity:
    """The identity of rows that hold `mappings`.

    Args:
        tokens: tokens per chunk, by group.
        quantisation: weights, cache and compute types, which decide the numbers in the bytes.
        placement: the whole configuration; part of the identity only where layers are opaque.
    """
    salt = f"{options.salt}/row{ROW_FORMAT}{'/digests' if options.verify else ''}"
    native: dict[str, Any] = {}
    if options.family == "native":
        layouts = {name: view.layout for name, view in caches.items()}
        any_layout = next(iter(layouts.values()))
        native["layouts"] = {name: layouts.get(name, any_layout) for name in mappings.layers}
        native["spans"] = _spans(mappings)
    whole = Identity(
        model,
        revision,
        mappings.layers,
        dict(tokens),
        options.family,
        salt=salt,
        quantisation=quantisation,
        **native,
    )
    if all(mapping.certified for mapping in mappings.by_layer.values()):
        return whole
    return whole.opaque(placement)


def _spans(mappings: Mappings) -> dict[str, int]:
    spans: dict[str, int] = {}
    for name, mapping in mappings.by_layer.items():
        group = mappings.layers[name].group
        spans[group] = max(spans.get(group, 0), mapping.span_tokens)
    return spans


def checkpoint(model: str, hf_config: Mapping[str, Any], commit: str | None) -> str:
    """What tells this checkpoint from others under the same name.

    The published configuration, and the commit it was fetched at or else a fingerprint of the
    weight files: names, sizes, and a sample from the start, the middle and the end of each.
    """
    config = {key: value for key, value in hf_config.items() if key not in _IRRELEVANT}
    hashed = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    if commit:
        hashed.update(commit.encode())
    elif os.path.isdir(model):
        for path in sorted(Path(model).iterdir()):
            if path.suffix in _WEIGHTS:
                hashed.update(_fingerprint(path))
    return hashed.hexdigest()[:32]


def _fingerprint(path: Path) -> bytes:
    size = path.stat().st_size
    hashed = hashlib.sha256(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
        for start in sorted({0, max(0, size // 2 - _SAMPLE), max(0, size - _SAMPLE)}):
            file.seek(start)
            hashed.update(file.read(_SAMPLE))
    return hashed.digest()
