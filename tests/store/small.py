"""A small model and chunks whose right content anybody can compute from their key."""

from __future__ import annotations

import hashlib

import numpy as np

from vkvmap.format import ChunkFormat
from vkvmap.identity import Identity
from vkvmap.spec import LayerSpec, LayerTable

LAYERS = LayerTable(
    [
        LayerSpec.attention("a", num_kv_heads=2, head_size=32, group="full"),
        LayerSpec.mla("m", row_bytes=37, group="latent"),
        LayerSpec.attention("b", num_kv_heads=2, head_size=32, group="full"),
    ]
)


def small_identity(**changes) -> Identity:
    settings = {"model": "org/model", "revision": "abc", "layers": LAYERS, "chunk_tokens": 16}
    return Identity(**{**settings, **changes})


def key_of(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def content_of(key: bytes, nbytes: int) -> np.ndarray:
    """The one right payload of `key`."""
    seed = int.from_bytes(hashlib.sha256(b"content" + key).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def payload_bytes(identity: Identity, group: str) -> int:
    return ChunkFormat(identity, group).payload_bytes


def aligned(nbytes: int, fill: int = 0) -> np.ndarray:
    """An array that starts on a page, as region rows do."""
    backing = np.full(nbytes + 4096, fill, np.uint8)
    start = -backing.ctypes.data % 4096
    return backing[start : start + nbytes]
