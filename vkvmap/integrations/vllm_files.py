"""The page files of vLLM's own file tier: canonical layouts ``v1-nhd`` and ``v1-hnd``, and ours.

With ``canonical_layout`` and a file-system tier, vLLM (0.32, 0.33) writes one file per chunk,

    <root>/<model, / as _>_<12 hex digits>_r0/<hhh>/<hh>_g<group>/<block hash>.bin

holding one row of its host region: per layer, the canonical pages of `blocks_per_file` blocks, then
whatever is left of the row. That is a chunk of the native family followed by padding, so importing
and exporting moves no byte within it; only names and the identity are translated.

The integration's pages (`vkvmap.integrations.vllm`) lie in such files too. Their namespace has no
format id but our name in its ``dtype``, unless they are of one configuration alone.

The format id names the family of layouts, not the layout: whether K and V of a head lie together
and how a backend fills its cells is for the caller's identity to say. The files carry no checksums:
what is imported is trusted as it lies. One KV cache group is supported; more are refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vkvmap.errors import FormatError, StoreError
from vkvmap.foreign import read_json
from vkvmap.identity import Identity
from vkvmap.keys import key_named
from vkvmap.store import CanonicalStore, StoreJob
from vkvmap.store_exchange import not_moved, write_whole
from vkvmap.store_listing import saying

__all__ = ["Moved", "VllmFiles", "export_files", "import_files"]

Bytes = npt.NDArray[np.uint8]
#: Called with (files done, files in all).
Progress = Callable[[int, int], None]

#: Format ids whose rows are canonical pages.
CANONICAL_FORMATS = ("v1-hnd", "v1-nhd")
#: In the ``dtype`` of a namespace, in front of the name that the integration gave it.
OURS = "+vkvmap-"
_BATCH = 16


@dataclass(frozen=True)
class VllmFiles:
    """A namespace of vLLM's file tier.

    Attributes:
        root: the tier's ``root_dir``.
        model_name, dtype: as vLLM spells them in the namespace's ``config.json``.
        tokens_per_hash: tokens that one block hash covers.
        tokens_per_block: tokens of one block.
        blocks_per_file: blocks of one file.
        layer_names: layers of the one KV cache group, in vLLM's order.
        canonical_format: ``"v1-nhd"`` or ``"v1-hnd"``; empty for pages of the integration's.
        row_bytes: length of a file: the canonical pages, padded as vLLM pads its host rows.
    """

    root: Path
    model_name: str
    dtype: str
    tokens_per_hash: int
    tokens_per_block: int
    blocks_per_file: int
    layer_names: tuple[str, ...]
    canonical_format: str
    row_bytes: int

    @classmethod
    def open(cls, base: Path) -> VllmFiles:
        """Read the namespace whose ``config.json`` lies in `base`.

        Raises:
            FormatError: not such a namespace, not a canonical format, or several groups.
            StoreError: its files cannot be looked at.
        """
        try:
            said = read_json((base / "config.json").read_bytes())
            private = said.get("parallel_agnostic") is False
            groups = said["kv_cache_groups"]
            if len(groups) != 1:
                raise FormatError(f"{base}: {len(groups)} KV cache groups; one is supported")
            made = cls(
                root=base.parent,
                model_name=str(said["model_name"]),
                dtype=str(said["dtype"]),
                tokens_per_hash=int(said["tokens_per_hash"]),
                tokens_per_block=int(groups[0]["tokens_per_block"]),
                blocks_per_file=int(said["blocks_per_file"]),
                layer_names=tuple(str(name) for name in groups[0]["layer_names"]),
                canonical_format=str(said.get("canonical_format", "")),
                row_bytes=0,
            )
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{base} is not a namespace of vLLM's file tier: {error}") from error
        ours = OURS in made.dtype and not made.canonical_format
        if private or not (ours or made.canonical_format in CANONICAL_FORMATS):
            what = "of one configuration" if private else made.canonical_format or "not canonical"
            raise FormatError(
                f"{base}: format {what!r}; canonical layouts {CANONICAL_FORMATS}, and pages that "
                "vkvmap.integrations.vllm shares between configurations, can be imported"
            )
        if made.base != base:
            raise FormatError(f"{base}: its config.json belongs to {made.base.name}")
        sizes = set()
        for path in made.files():
            # An engine may just have dropped it.
            with saying(f"look at {path}"), suppress(FileNotFoundError):
                sizes.add(path.stat().st_size)
        if len(sizes) > 1:
            raise FormatError(f"{base}: files of {sorted(sizes)} bytes; one length is expected")
        return cls(**{**vars(made), "row_bytes": sizes.pop() if sizes else 0})

    # ---- names --------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """What vLLM writes into ``config.json`` and hashes into the name."""
        said = {
            "model_name": self.model_name,
            "tokens_per_hash": self.tokens_per_hash,
            "blocks_per_file": self.blocks_per_file,
            "tp_size": 1,
            "pp_size": 1,
            "pcp_size": 1,
            "dcp_size": 1,
            "dtype": self.dtype,
            "kv_cache_groups": [
                {"tokens_per_block": self.tokens_per_block, "layer_names": list(self.layer_names)}
            ],
            "inference_engine": "vllm",
        }
        if self.canonical_format:
            said["canonical_format"] = self.canonical_format
        return said

    @property
    def base(self) -> Path:
        """The namespace's folder; files lie in the one beside it that ends in ``_r0``."""
        text = json.dumps(self.config, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return self.root / f"{self.model_name.replace('/', '_')}_{digest}"

    def path(self, block_hash: bytes) -> Path:
        """The file of a chunk."""
        name = block_hash.hex()
        return Path(f"{self.base}_r0") / name[:3] / f"{name[3:5]}_g0" / f"{name}.bin"

    def files(self) -> Iterator[Path]:
        """Every file that may be a chunk, in order of name.

        Raises:
            StoreError: they cannot be listed.
        """
        folder = Path(f"{self.base}_r0")
        with saying(f"look at {folder}"):
            found = sorted(folder.glob("*/*_g0/*.bin"))
        yield from found

    def check(self, identity: Identity) -> str:
        """The group of `identity` that these files are chunks of.

        Raises:
            FormatError: says why they are not.
        """
        groups = identity.layers.groups
        if len(groups) != 1 or identity.family != "native":
            raise FormatError("an identity of the native family with one layer group is needed")
        group, tokens = groups[0], self.tokens_per_block * self.blocks_per_file
        layers = tuple(identity.layers)
        payload = identity.chunks[group].payload_bytes
        for what, ours, theirs in (
            ("layers", layers, self.layer_names),
            ("chunk tokens", identity.chunks[group].tokens, tokens),
            ("span", identity.span(group), self.tokens_per_block),
        ):
            if ours != theirs:
                raise FormatError(f"{what} of the identity: {ours}, of vLLM's files: {theirs}")
        if payload > self.row_bytes:
            raise FormatError(f"a chunk has {payload} bytes, vLLM's files have {self.row_bytes}")
        return group


@dataclass
class Moved:
    """How many chunks were moved, and why others were not, by block hash in hex."""

    chunks: int
    skipped: dict[str, str]


def import_files(
    files: VllmFiles, store: CanonicalStore, *, progress: Progress | None = None
) -> Moved:
    """Put vLLM's files into a store whose identity describes the same bytes.

    Raises:
        FormatError: the identity describes something else.
        StoreError: the store is full, or the files cannot be listed.
    """
    group = files.check(store.identity)
    payload = store.identity.chunks[group].payload_bytes
    moved, paths = Moved(0, {}), list(files.files())
    for start in range(0, len(paths), _BATCH):
        keys, rows = [], []
        for path in paths[start : start + _BATCH]:
            key = key_named(path.stem)
            if key is None:
                moved.skipped[path.stem] = "its name is no key; it is somebody else's"
                continue
            try:
                row = np.fromfile(path, np.uint8)
            except OSError as error:  # such as one that an engine has just dropped
                moved.skipped[path.stem] = str(error)
                continue
            if row.size != files.row_bytes:
                moved.skipped[path.stem] = f"{row.size} of {files.row_bytes} bytes"
                continue
            keys.append(key)
            rows.append(row[:payload])
        job = store.put(keys, group, rows)
        job.wait()
        _note(moved, keys, job)
        if progress is not None:
            progress(min(start + _BATCH, len(paths)), len(paths))
    return moved


def export_files(
    store: CanonicalStore,
    files: VllmFiles,
    *,
    keys: Sequence[bytes] | None = None,
    progress: Progress | None = None,
) -> Moved:
    """Write chunks as files that vLLM's file tier reads, and its ``config.json``.

    Files that are there already stay. `keys` chooses chunks; default all of the store's identity.

    Raises:
        FormatError: the identity describes something else.
        StoreError: the files cannot be written; those that were stay.
    """
    group = files.check(store.identity)
    payload = store.identity.chunks[group].payload_bytes
    if keys is None:
        keys = store.keys(group)
    text = json.dumps(files.config, indent=2, sort_keys=True)
    _write(files.base / "config.json", text.encode())
    moved = Moved(0, {})
    rows = np.zeros((_BATCH, files.row_bytes), np.uint8)
    for start in range(0, len(keys), _BATCH):
        batch = list(keys[start : start + _BATCH])
        job = store.get(batch, group, [row[:payload] for row in rows[: len(batch)]])
        job.wait()
        for row, key, good in zip(rows, batch, job.good.tolist(), strict=False):
            if good:
                _write(files.path(key), row.data)
        _note(moved, batch, job)
        if progress is not None:
            progress(start + len(batch), len(keys))
    return moved


def _write(path: Path, content: bytes | memoryview) -> None:
    """Write a whole file, or none, unless it is there."""
    if path.exists():
        return
    try:
        write_whole(path, [content])
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}; make room, or export less") from error


def _note(moved: Moved, keys: Sequence[bytes], job: StoreJob) -> None:
    """Count the chunks that `job` moved; say of the others why not."""
    left = not_moved(keys, job)
    moved.skipped |= {key.hex(): reason for key, reason in left}
    moved.chunks += len(keys) - len(left)
