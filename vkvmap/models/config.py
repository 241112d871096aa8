"""A model's configuration with its gaps, and what its cache is kept in.

`Config.need` names the field that is missing and how to give it; everything else in this package
asks through it, so that a reader of a family is a plain description of that family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vkvmap.errors import SpecError
from vkvmap.spec import DTYPE_BYTES


class ModelError(SpecError):
    """A model cannot be read: `fields` are the config fields that would help."""

    def __init__(self, message: str, fields: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.fields = tuple(fields)


@dataclass(frozen=True)
class KvDtype:
    """What a cache's bytes are.

    Attributes:
        name: what the command line calls it.
        dtype: torch's name, part of every layer's identity.
        scale_bytes: bytes of the scale that follows each half of a (token, head) cell, 0 for none.
        packed_mla: MLA rows are 1-byte latents, a 4-byte scale per 128 of them, and 2-byte rotary
            values (656 bytes for the DeepSeek shape).
    """

    name: str
    dtype: str
    scale_bytes: int = 0
    packed_mla: bool = False

    @property
    def elem(self) -> int:
        """Bytes per element."""
        return DTYPE_BYTES[self.dtype]


#: Names are vLLM's ``--kv-cache-dtype``, with torch's names and usual abbreviations beside them.
KV_DTYPES: Mapping[str, KvDtype] = {
    kv.name: kv
    for kv in (
        KvDtype("bfloat16", "bfloat16"),
        KvDtype("bf16", "bfloat16"),
        KvDtype("float16", "float16"),
        KvDtype("fp16", "float16"),
        KvDtype("float32", "float32"),
        KvDtype("fp32", "float32"),
        KvDtype("fp8", "float8_e4m3fn"),
        KvDtype("fp8_e4m3", "float8_e4m3fn"),
        KvDtype("fp8_e5m2", "float8_e5m2"),
        KvDtype("int8", "int8"),
        KvDtype("fp8_per_token_head", "float8_e4m3fn", scale_bytes=4),
        KvDtype("int8_per_token_head", "int8", scale_bytes=4),
        KvDtype("fp8_ds_mla", "float8_e4m3fn", packed_mla=True),
    )
}


#: Families whose temporal state is float32 unless the configuration says otherwise: the class of
#: one says so, and vLLM does it for both.
FLOAT32_STATE = ("nemotron_h", "kimi_linear", "kimi_k3")

#: Far above any model; what a configuration asks for is bounded before it is made.
MOST_LAYERS = 4096


@dataclass(frozen=True)
class Config:
    """A configuration with its gaps: `need` names the field that is missing, and its remedy."""

    values: Mapping[str, Any]
    kv: KvDtype
    prefix: str

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is present and not null."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        return default

    def need(self, *names: str) -> Any:
        """Like `get`; ModelError where none of `names` is there."""
        value = self.get(*names)
        if value is None:
            family = self.values.get("model_type")
            raise ModelError(
                f"model_type {family!r} needs the field {' or '.join(map(repr, names))}, which the "
                f"configuration does not have; add it, or give it as {names[0]}=VALUE",
                names,
            )
        return value

    def count(self, *names: str, default: int | None = None) -> int:
        """A positive integer; needed unless there is a `default`."""
        value = self.need(*names) if default is None else self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(
                f"field {names[0]!r} is {value!r}; a positive integer is needed", names
            )
        return value

    @property
    def num_layers(self) -> int:
        """Layers of the decoder, drafts not counted."""
        kinds = self.get("layers_block_type")
        if self.get("num_hidden_layers") is None and isinstance(kinds, (list, tuple)) and kinds:
            return len(kinds)
        count = self.count("num_hidden_layers", "n_layer", "n_layers")
        if count > MOST_LAYERS:
            raise ModelError(
                f"num_hidden_layers is {count}; no model has more than {MOST_LAYERS} layers",
                ["num_hidden_layers"],
            )
        return count

    @property
    def kv_heads(self) -> int:
        """KV heads of the whole model: the query heads where the config groups none."""
        return self.count("num_key_value_heads", "num_attention_heads")

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        value = self.get("head_dim", "attention_head_dim")
        if value is not None:
            return self.count("head_dim", "attention_head_dim")
        if self.get("hidden_size") is None or self.get("num_attention_heads") is None:
            raise ModelError(
                f"model_type {self.values.get('model_type')!r} needs the field 'head_dim', or "
                "'hidden_size' and 'num_attention_heads', which the configuration does not have; "
                "add it, or give it as head_dim=VALUE",
                ["head_dim", "hidden_size", "num_attention_heads"],
            )
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if hidden % heads:
            raise ModelError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; "
                "give head_dim",
                ["head_dim"],
            )
        return hidden // heads

    @property
    def model_dtype(self) -> str:
        """The dtype of the weights: what state layers are kept in unless they say otherwise."""
        return str(self.get("dtype", "torch_dtype", default="bfloat16")).removeprefix("torch.")

    @property
    def state_dtypes(self) -> tuple[str, str]:
        """Dtypes of convolution and temporal state."""
        usual = "float32" if self.values.get("model_type") in FLOAT32_STATE else self.model_dtype
        temporal = self.get("mamba_ssm_cache_dtype", "mamba_ssm_dtype", default=usual)
        for dtype in (self.model_dtype, str(temporal)):
            if dtype not in DTYPE_BYTES:
                raise ModelError(
                    f"state dtype {dtype!r} has no known size; give mamba_ssm_cache_dtype as one "
                    f"of {', '.join(DTYPE_BYTES)}",
                    ["mamba_ssm_cache_dtype"],
                )
        return self.model_dtype, str(temporal)

    def layer(self, index: int, part: str) -> str:
        """The engine's name of `part` of decoder layer `index`."""
        return f"{self.prefix}.{index}.{part}"

    def per_layer(self, name: str) -> list[Any] | None:
        """A field with one entry per layer; ModelError where its length is another."""
        values = self.get(name)
        if values is None:
            return None
        if not isinstance(values, (list, tuple, str)) or len(values) < self.num_layers:
            raise ModelError(
                f"field {name!r} has {len(values) if hasattr(values, '__len__') else 'no'} "
                f"entries, num_hidden_layers is {self.num_layers}; give one per layer",
                [name, "num_hidden_layers"],
            )
        return list(values)[: self.num_layers]
