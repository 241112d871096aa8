"""Readers of models whose layers all keep something per token.

Full attention, windows, chunks, and latent rows. A window is a group of its own, because its blocks
are freed when the others are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vkvmap.models.config import Config, ModelError
from vkvmap.nearest import nearest
from vkvmap.spec import LayerSpec

FULL = "full"
STATE = "state"


@dataclass(frozen=True)
class Span:
    """How far back a layer looks: everything, or `tokens` in a window or a chunk."""

    kind: str = FULL
    tokens: int | None = None

    @property
    def group(self) -> str:
        """Layers whose blocks are freed alike share block lists, hence a group."""
        return self.kind if self.tokens is None else f"{self.kind}-{self.tokens}"


def attention_layer(
    c: Config,
    index: int,
    span: Span,
    *,
    part: str = "self_attn.attn",
    kv_heads: int | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
) -> LayerSpec:
    """K and V of one decoder layer; windows and chunks stay whole under DCP."""
    if c.kv.packed_mla:
        raise ModelError(
            f"layer {c.layer(index, part)!r} is not MLA: kv dtype {c.kv.name!r} packs MLA rows "
            "only; choose another, for example 'fp8'"
        )
    return LayerSpec.attention(
        c.layer(index, part),
        num_kv_heads=kv_heads or c.kv_heads,
        head_size=head_dim or c.head_dim,
        head_size_v=head_dim_v,
        dtype=c.kv.dtype,
        scale_bytes=c.kv.scale_bytes,
        group=span.group,
        dcp_sharded=span.tokens is None,
        window=span.tokens,
    )


_FULL_TYPES = {"full_attention", "attention", "global_attention", "full"}
_STATE_TYPES = {"linear_attention", "mamba", "mamba2", "linear"}


def spans(c: Config, pattern: Callable[[int], bool] | None = None) -> list[Span]:
    """What every layer looks back on.

    `layer_types` decides where the config has it, then `pattern` (index -> is it full attention),
    then one window for all layers, unless `use_sliding_window` is false.
    """
    window = c.get("sliding_window")
    types = c.per_layer("layer_types")
    if types is not None:
        return [span_of_type(c, kind) for kind in types]
    if not window or c.get("use_sliding_window", default=True) is False:
        return [Span()] * c.num_layers
    sliding = Span("window", c.count("sliding_window"))
    if pattern is not None:
        return [Span() if pattern(i) else sliding for i in range(c.num_layers)]
    first = c.get("max_window_layers", default=0) if c.get("use_sliding_window") else 0
    return [sliding if i >= first else Span() for i in range(c.num_layers)]


def span_of_type(c: Config, kind: str) -> Span:
    if kind in _FULL_TYPES:
        return Span()
    if kind == "sliding_attention":
        return Span("window", c.count("sliding_window"))
    if kind == "chunked_attention":
        return Span("chunk", c.count("attention_chunk_size"))
    if kind in _STATE_TYPES:
        return Span(STATE)
    known = sorted(_FULL_TYPES | _STATE_TYPES | {"sliding_attention", "chunked_attention"})
    close = nearest(kind, known)
    hint = f"; did you mean {close!r}?" if close else ""
    raise ModelError(
        f"layer_types has {kind!r}, known are {', '.join(known)}{hint}", ["layer_types"]
    )


def read_dense(c: Config) -> Iterator[LayerSpec]:
    for index, span in enumerate(spans(c)):
        yield attention_layer(c, index, span)


def _every(period: int, *, offset: int) -> Callable[[int], bool]:
    return lambda index: index % period == offset


def read_gemma2(c: Config) -> Iterator[LayerSpec]:
    for index, span in enumerate(spans(c, _every(2, offset=1))):
        yield attention_layer(c, index, span)


def read_gemma3(c: Config) -> Iterator[LayerSpec]:
    period = c.count("sliding_window_pattern", default=6)
    for index, span in enumerate(spans(c, _every(period, offset=period - 1))):
        yield attention_layer(c, index, span)


def read_every_fourth(c: Config) -> Iterator[LayerSpec]:
    """Windows, and full attention every fourth layer unless another period is given."""
    spelled = c.get("sliding_window_pattern")
    if isinstance(spelled, str) and spelled:  # as "LLLG": local three times, then global
        period = len(spelled)
    else:
        period = c.count("sliding_window_pattern", default=4)
    for index, span in enumerate(spans(c, _every(period, offset=period - 1))):
        yield attention_layer(c, index, span)


def read_gpt_oss(c: Config) -> Iterator[LayerSpec]:
    for index, span in enumerate(spans(c, _every(2, offset=1))):
        yield attention_layer(c, index, span, part="attn.attn")


def read_llama4(c: Config) -> Iterator[LayerSpec]:
    """Chunked attention where a layer has rotary positions, full attention where it has none."""
    types = c.per_layer("layer_types")
    rotary = c.per_layer("no_rope_layers") if c.get("no_rope_layers") else None
    period = c.count("no_rope_layer_interval", default=4)
    chunk = Span("chunk", c.count("attention_chunk_size"))
    for index in range(c.num_layers):
        if types is not None:
            span = span_of_type(c, types[index])
        elif rotary is not None:
            span = chunk if rotary[index] else Span()
        else:
            span = Span() if (index + 1) % period == 0 else chunk
        yield attention_layer(c, index, span)


def read_mimo_v2(c: Config) -> Iterator[LayerSpec]:
    """K and V heads of different sizes, and other head counts in the windowed layers."""
    windowed = c.per_layer("hybrid_layer_pattern")
    if windowed is None:
        c.need("hybrid_layer_pattern")
    for index, is_windowed in enumerate(windowed or ()):
        if is_windowed:
            yield attention_layer(
                c,
                index,
                Span("window", c.count("sliding_window")),
                kv_heads=c.count("swa_num_key_value_heads"),
                head_dim=c.count("swa_head_dim"),
                head_dim_v=c.count("swa_v_head_dim"),
            )
        else:
            yield attention_layer(c, index, Span(), head_dim_v=c.count("v_head_dim"))


# ---- latent rows ----------------------------------------------------------------------------


def mla_layer(c: Config, index: int, *, part: str = "self_attn.attn") -> LayerSpec:
    """The latent row of one layer: compressed KV and rotary key."""
    latent, rotary = c.count("kv_lora_rank"), c.count("qk_rope_head_dim")
    if c.kv.packed_mla:
        row = latent + 4 * (latent // 128) + 2 * rotary
        dtype = "fp8_ds_mla"
    elif c.kv.scale_bytes:
        raise ModelError(
            f"kv dtype {c.kv.name!r} scales (token, head) cells, MLA rows have no heads; choose "
            "'fp8', 'fp8_ds_mla' or 'bfloat16'"
        )
    else:
        row = (latent + rotary) * c.kv.elem
        dtype = c.kv.dtype
    return LayerSpec.mla(c.layer(index, part), row_bytes=row, dtype=dtype, group=FULL)


def read_mla(c: Config) -> Iterator[LayerSpec]:
    shared = c.per_layer("indexer_types")
    for index in range(c.num_layers):
        yield mla_layer(c, index)
        # An indexer that is shared with an earlier layer keeps no keys of its own.
        if c.get("index_head_dim") and (shared is None or shared[index] == "full"):
            keys = c.count("index_head_dim")
            yield LayerSpec.indexer(
                c.layer(index, "self_attn.indexer.k_cache"),
                value_bytes=keys,
                scale_bytes=4 * (keys // 128 or 1),
                group=FULL,
            )
