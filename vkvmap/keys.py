"""Keys of chunks: one per T tokens, a hash over exactly those tokens and all before them.

Engines bring block hashes of their own; this is for those that have none. The unit is the chunk of
the whole group of ranks, never a rank's local block: with context parallelism a block spans
``block_size * shards`` tokens, so 32 tokens in local blocks of 16 over two shards are one key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from vkvmap.errors import FormatError

#: Longest key that the store takes, in bytes.
MOST_KEY_BYTES = 64


def span_tokens(block_size: int, shards: int) -> int:
    """Tokens that one block spans over all context shards: what a canonical page covers."""
    return block_size * shards


def whole_chunks(num_tokens: int, chunk_tokens: int) -> int:
    """Chunks that `num_tokens` tokens fill; a last, partly filled one has no key."""
    return num_tokens // chunk_tokens


def chunk_keys(
    token_ids: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]],
    chunk_tokens: int,
    *,
    parent: bytes = b"",
) -> list[bytes]:
    """Keys (32 bytes) of the whole chunks that `token_ids` fills, each chained to the one before.

    Args:
        token_ids: tokens of one sequence, from its start, or from where `parent` ends.
        chunk_tokens: T.
        parent: key of the chunk before the first token; empty at the start of a sequence.

    What keeps models, adapters and salts apart is the identity, not the key.
    """
    if chunk_tokens < 1:
        raise FormatError(f"chunk_tokens={chunk_tokens}: a positive number of tokens is needed")
    tokens = np.asarray(token_ids, dtype="<u8")
    keys = []
    for index in range(whole_chunks(len(tokens), chunk_tokens)):
        chunk = tokens[index * chunk_tokens : (index + 1) * chunk_tokens]
        hashed = hashlib.sha256(b"vkvmap chunk key 1\n")
        # A length before each part: no parent and tokens can be spelled as another pair.
        hashed.update(len(parent).to_bytes(4, "little") + parent)
        hashed.update(chunk_tokens.to_bytes(4, "little") + chunk.tobytes())
        parent = hashed.digest()
        keys.append(parent)
    return keys


def check_key(key: bytes) -> bytes:
    """`key`, if it can be stored under: 1 to 64 bytes.

    Raises:
        FormatError: it is empty, longer, or not bytes.
    """
    if not isinstance(key, bytes):
        raise FormatError(f"key {key!r} is not bytes; hash or encode it")
    if not 1 <= len(key) <= MOST_KEY_BYTES:
        raise FormatError(f"key of {len(key)} bytes: 1 to {MOST_KEY_BYTES} are allowed; hash it")
    return key


def key_named(name: str) -> bytes | None:
    """The key that the file name `name` spells, or None: files lie beside strangers' files.

    There is one spelling, lower-case hex: another one leads to another file.
    """
    try:
        key = bytes.fromhex(name)
    except ValueError:
        return None
    return key if key.hex() == name and 1 <= len(key) <= MOST_KEY_BYTES else None


def keys_named(names: Iterable[str]) -> list[bytes]:
    """The keys that `names` spell, in order, without names that spell none."""
    return sorted(key for key in map(key_named, names) if key is not None)
