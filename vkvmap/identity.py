"""Which bytes may be taken for which: the identity under which chunks are stored.

An identity is everything that changes what the bytes of a chunk mean, and nothing else. Its digest
names the directory (or key prefix) that chunks live under, so chunks of two identities can never be
taken for each other, and its canonical JSON lies beside them for people. No parallel configuration
is part of it, except for opaque data, which means nothing without the one that wrote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vkvmap.chunk import ChunkLayout, number_for
from vkvmap.errors import FormatError, SpecError
from vkvmap.foreign import read_json
from vkvmap.layout import Layout, layout_named
from vkvmap.spec import LayerSpec, LayerTable

FORMAT_VERSION = 1

Family = Literal["native", "universal"]


@dataclass(frozen=True)
class Identity:
    """What the bytes of stored chunks mean.

    Attributes:
        model: the model's name, as its publisher spells it.
        revision: the exact checkpoint: two revisions of one name are two models.
        layers: the whole model's layer table (dtype, sizes and quantised cells are in it).
        chunk_tokens: T, one number or one per group.
        family: canonical byte order, ``"universal"`` or ``"native"``.
        adapter: adapter name and version applied when the cache was computed, or None.
        salt: keeps tenants or experiments apart.
        quantisation: how values become stored numbers where dtypes do not say it all (scale
            granularity, calibration set).
        layouts: native only: page layout, one for all layers or by layer name.
        spans: native only: tokens of a canonical page (block size x context shards), one number or
            one per group; T must be a multiple.
        placement: opaque data only: the full configuration that wrote it, rank included, as plain
            JSON values.
    """

    model: str
    revision: str
    layers: LayerTable
    chunk_tokens: int | Mapping[str, int]
    family: Family = "universal"
    adapter: str | None = None
    salt: str = ""
    quantisation: str = "none"
    layouts: str | Layout | Mapping[str, str | Layout] | None = None
    spans: int | Mapping[str, int] | None = None
    placement: Mapping[str, Any] | None = None
    _json: str = field(init=False, repr=False, compare=False)
    _digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what in ("model", "revision", "adapter", "salt", "quantisation"):
            told = getattr(self, what)
            if not (isinstance(told, str) or (told is None and what == "adapter")):
                raise FormatError(
                    f"identity: {what}={told!r:.60} is {type(told).__name__}; spell it as text, "
                    "so that all who mean the same write the same"
                )
        if not self.model or not self.revision:
            raise FormatError(
                f"identity of model {self.model!r}, revision {self.revision!r}: name both; pages "
                "of another checkpoint under the same name are wrong bytes"
            )
        native = self.family == "native"
        if self.family not in ("native", "universal"):
            raise FormatError(f"family {self.family!r}: choose 'native' or 'universal'")
        if native != (self.layouts is not None) or native != (self.spans is not None):
            raise FormatError(
                f"family {self.family!r} with layouts={self.layouts!r}, spans={self.spans!r}: a "
                "native page means nothing without its layout and span, a universal one has none"
            )
        try:
            text = canonical_json(self._description())
        except SpecError as error:  # of T, spans or a layout: one kind of error for an identity
            raise FormatError(str(error)) from None
        object.__setattr__(self, "_json", text)
        object.__setattr__(self, "_digest", hashlib.sha256(text.encode()).digest())

    # ---- name and description -----------------------------------------------------------------

    @property
    def json(self) -> str:
        """The canonical JSON text that is digested; also what people read."""
        return self._json

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON, 32 bytes."""
        return self._digest

    @property
    def name(self) -> str:
        """The digest in hexadecimal: directory name or key prefix."""
        return self.digest.hex()

    @property
    def chunks(self) -> ChunkLayout:
        """How chunks of this identity are laid out."""
        return ChunkLayout.of(self.layers, self._chunk_tokens())

    def span(self, group: str) -> int:
        """Tokens of one canonical page: the native span, or T; 0 where a group keeps state."""
        tokens = self.chunks[group].tokens
        if self.spans is None or not tokens:
            return tokens
        if isinstance(self.spans, Mapping) and group not in self.spans:
            return tokens
        return number_for(self.spans, group, "spans")

    def opaque(self, placement: Mapping[str, Any]) -> Identity:
        """The identity of the opaque data of one rank of one configuration.

        Args:
            placement: everything that decided which bytes the rank holds and in what order: tp,
                dcp, pcp, interleave, pcp_mode, pipeline stage, rank, block size, tensor strides.
        """
        return Identity(
            self.model,
            self.revision,
            self.layers,
            self.chunk_tokens,
            self.family,
            self.adapter,
            self.salt,
            self.quantisation,
            self.layouts,
            self.spans,
            placement,
        )

    def part(self, names: Collection[str]) -> Identity:
        """The identity of the layers `names` alone, in model order: what a part of a row has."""
        chosen = LayerTable(spec for name, spec in self.layers.items() if name in names)
        return replace(self, layers=chosen)

    def difference(self, other: str) -> str | None:
        """Why chunks described by the JSON text `other` are not ours, or None if they are."""
        if other == self._json:
            return None
        try:
            theirs = read_json(other)
        except ValueError:
            return "its description is not JSON"
        ours = json.loads(self._json)
        if _is_part(theirs, ours):
            some, all_ = len(theirs["layers"]), len(ours["layers"])
            return f"it has {some} of the {all_} layers: a part of chunks that are stored in parts"
        return _first_difference(theirs, ours, "") or "its description is not in canonical form"

    # ---- contents -----------------------------------------------------------------------------

    def _chunk_tokens(self) -> int | Mapping[str, int]:
        if isinstance(self.chunk_tokens, Mapping):
            return self.chunk_tokens
        return {
            group: self.chunk_tokens
            for group in self.layers.groups
            if any(spec.has_tokens for spec in self.layers.in_group(group))
        }

    def _description(self) -> dict[str, Any]:
        groups = []
        for group in self.layers.groups:
            tokens, span = self.chunks[group].tokens, self.span(group)
            if tokens and (span < 1 or tokens % span):
                raise FormatError(
                    f"group {group!r}: chunks of {tokens} tokens are not whole spans of {span}; "
                    "make chunk_tokens a multiple of block size x context shards"
                )
            groups.append({"name": group, "tokens": tokens, "span": span})
        return {
            "format": FORMAT_VERSION,
            "model": self.model,
            "revision": self.revision,
            "adapter": self.adapter,
            "salt": self.salt,
            "quantisation": self.quantisation,
            "family": self.family,
            "groups": groups,
            "layers": [self._layer(spec) for spec in self.layers.values()],
            "placement": None if self.placement is None else dict(self.placement),
        }

    def _layer(self, spec: LayerSpec) -> dict[str, Any]:
        order, encoding = str(spec.canonical), ""
        if self.layouts is not None and spec.described and spec.kind != "recurrent":
            chosen = self.layouts
            if isinstance(chosen, Mapping):
                if spec.name not in chosen:
                    raise FormatError(
                        f"layer {spec.name!r} has no layout; the native family needs one for every "
                        "layer of the model"
                    )
                chosen = chosen[spec.name]
            layout = layout_named(chosen) if isinstance(chosen, str) else chosen
            order, encoding = str(layout.order.bound_to(spec.fields)), layout.encoding
        return {
            "name": spec.name,
            "group": spec.group,
            "kind": spec.kind,
            "dtype": spec.dtype,
            "window": spec.window,
            "order": order,
            "encoding": encoding,
            "fields": [
                {
                    "name": this.name,
                    "elem": this.elem,
                    # How an axis is dealt over ranks is not part of what its bytes mean.
                    "axes": [[axis.name, axis.extent] for axis in this.axes],
                }
                for this in spec.fields
            ],
        }


def canonical_json(value: Any) -> str:
    """`value` as canonical JSON: sorted keys, no spaces, UTF-8 without escapes, whole numbers only.

    Raises:
        FormatError: a number that is not whole, or a value that JSON does not have.
    """
    _check_plain(value, "identity")
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str) or not key.isascii():
                raise FormatError(f"{where}: key {key!r} must be an ASCII string")
            _check_plain(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{where}[{index}]")
    elif isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise FormatError(
                f"{where}: {value!r:.60} has half a character (a lone surrogate) at "
                f"{error.start}; UTF-8 has no bytes for it"
            ) from None
    elif not (value is None or isinstance(value, int)):
        raise FormatError(
            f"{where}: {value!r} must be a string, a whole number, true, false or null; anything "
            "else has no single spelling"
        )


def _is_part(theirs: Any, ours: dict[str, Any]) -> bool:
    """Whether `theirs` describes some of the layers of `ours`, and nothing else differently."""
    if not isinstance(theirs, dict) or not isinstance(theirs.get("layers"), list):
        return False
    layers = [layer for layer in ours["layers"] if layer in theirs["layers"]]
    kept = {layer["group"] for layer in layers}
    groups = [group for group in ours["groups"] if group["name"] in kept]
    smaller = len(layers) < len(ours["layers"])
    return smaller and theirs == {**ours, "layers": layers, "groups": groups}


def _first_difference(theirs: Any, ours: Any, where: str) -> str | None:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in sorted(theirs.keys() | ours.keys()):
            if key not in theirs or key not in ours:
                return f"{where}{key} is there on one side only"
            found = _first_difference(theirs[key], ours[key], f"{where}{key}.")
            if found:
                return found
        return None
    if isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (one, two) in enumerate(zip(theirs, ours, strict=True)):
            found = _first_difference(one, two, f"{where}{index}.")
            if found:
                return found
        return None
    if theirs == ours:
        return None
    return f"{where.rstrip('.')} is {_short(theirs)} there and {_short(ours)} here"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
