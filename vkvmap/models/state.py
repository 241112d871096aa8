"""Readers of models that keep recurrent state: in some layers, or beside attention in all of them.

State is one array per sequence and layer, kept in the dtypes that the configuration gives it. Where
it is cut for tensor parallelism is in its description (`LayerSpec.recurrent`), not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from vkvmap.models.attention import FULL, STATE, Span, attention_layer, mla_layer, span_of_type
from vkvmap.models.config import Config, ModelError
from vkvmap.spec import DTYPE_BYTES, HEAD, LayerSpec


def mamba2_layer(
    c: Config,
    index: int,
    part: str,
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    conv: int,
) -> LayerSpec:
    """Mamba-2 state of one layer, in the engine's dtypes for state."""
    conv_dtype, temporal_dtype = c.state_dtypes
    layer = LayerSpec.mamba2(
        c.layer(index, part),
        num_heads=heads,
        head_dim=head_dim,
        state_size=state,
        n_groups=groups,
        conv_kernel=conv,
        conv_elem=DTYPE_BYTES[conv_dtype],
        temporal_elem=DTYPE_BYTES[temporal_dtype],
        group=STATE,
    )
    return _with_dtype(layer, c)


def _with_dtype(layer: LayerSpec, c: Config) -> LayerSpec:
    return replace(layer, dtype="/".join(c.state_dtypes))


def _elems(c: Config) -> dict[str, int]:
    conv, temporal = c.state_dtypes
    return {"conv_elem": DTYPE_BYTES[conv], "temporal_elem": DTYPE_BYTES[temporal]}


def read_gated_delta_net(c: Config) -> Iterator[LayerSpec]:
    period = c.count("full_attention_interval", default=4)
    types = c.per_layer("layer_types")
    for index in range(c.num_layers):
        kind = types[index] if types is not None else None
        full = (index + 1) % period == 0 if kind is None else span_of_type(c, kind).kind == FULL
        if full:
            yield attention_layer(c, index, Span())
            continue
        layer = LayerSpec.gated_delta_net(
            c.layer(index, "linear_attn"),
            num_k_heads=c.count("linear_num_key_heads"),
            num_v_heads=c.count("linear_num_value_heads"),
            head_k_dim=c.count("linear_key_head_dim"),
            head_v_dim=c.count("linear_value_head_dim"),
            conv_kernel=c.count("linear_conv_kernel_dim"),
            group=STATE,
            **_elems(c),
        )
        yield _with_dtype(layer, c)


def read_kimi_linear(c: Config) -> Iterator[LayerSpec]:
    """Delta attention in some layers, MLA in the others.

    The publisher's files list the former in `linear_attn_config`, from 1; transformers' own have
    `layer_types` and fields of the same meaning.
    """
    types = c.per_layer("layer_types")
    if c.get("linear_attn_config") is None and types is not None:
        linear: Mapping[str, Any] = {
            "kda_layers": [i for i, kind in enumerate(types, 1) if _is_state(c, kind)],
            "num_heads": c.count("linear_num_heads"),
            "head_dim": c.count("linear_head_dim"),
            "short_conv_kernel_size": c.count("linear_conv_kernel_dim"),
        }
    else:
        linear = c.need("linear_attn_config")
    missing = [f for f in ("kda_layers", "num_heads", "head_dim") if not linear.get(f)]
    if missing:
        raise ModelError(f"linear_attn_config lacks {', '.join(missing)}", missing)
    for index in range(c.num_layers):
        if index + 1 not in linear["kda_layers"]:
            yield mla_layer(c, index)
            continue
        layer = LayerSpec.kimi_delta_attention(
            c.layer(index, "self_attn"),
            num_heads=int(linear["num_heads"]),
            head_dim=int(linear["head_dim"]),
            conv_kernel=int(linear.get("short_conv_kernel_size", 4)),
            group=STATE,
            **_elems(c),
        )
        yield _with_dtype(layer, c)


def _is_state(c: Config, kind: str) -> bool:
    return span_of_type(c, kind).kind == STATE


def read_lightning(c: Config) -> Iterator[LayerSpec]:
    """MiniMax-Text-01: linear attention with a ``(head, k, v)`` state, softmax between."""
    types = c.per_layer("layer_types")
    codes = c.per_layer("attn_type_list")
    if types is None and codes is None:
        c.need("attn_type_list", "layer_types")
    for index in range(c.num_layers):
        full = codes[index] == 1 if codes else span_of_type(c, (types or [])[index]).kind == FULL
        if full:
            yield attention_layer(c, index, Span())
            continue
        heads, dim = c.count("num_attention_heads"), c.head_dim
        _, temporal = c.state_dtypes
        layer = LayerSpec.recurrent(
            c.layer(index, "self_attn"),
            segments=[],
            conv_positions=0,
            temporal=[(HEAD, heads, heads), ("k_dim", dim, 0), ("v_dim", dim, 0)],
            temporal_elem=DTYPE_BYTES[temporal],
            group=STATE,
        )
        yield replace(layer, dtype=temporal)


def read_jamba(c: Config) -> Iterator[LayerSpec]:
    period = c.count("attn_layer_period")
    offset = c.need("attn_layer_offset")
    for index in range(c.num_layers):
        if index % period == offset:
            yield attention_layer(c, index, Span(), part="attn")
            continue
        layer = LayerSpec.mamba1(
            c.layer(index, "mixer"),
            intermediate_size=c.count("mamba_expand") * c.count("hidden_size"),
            state_size=c.count("mamba_d_state"),
            conv_kernel=c.count("mamba_d_conv"),
            group=STATE,
            **_elems(c),
        )
        yield _with_dtype(layer, c)


#: Decoder layers without a cache, by name and by letter.
_KEEPS_NOTHING = {"mlp", "moe", "-", "E"}


def read_nemotron_h(c: Config) -> Iterator[LayerSpec]:
    """Each decoder layer is one thing: state, attention, or an MLP that keeps nothing.

    `layers_block_type` names them; older files have a letter each in `hybrid_override_pattern`.
    """
    kinds = c.per_layer("layers_block_type")
    if kinds is None:
        kinds = c.per_layer("hybrid_override_pattern")
        if kinds is None:
            c.need("hybrid_override_pattern", "layers_block_type")
    for index, kind in enumerate(kinds or ()):
        if kind in _KEEPS_NOTHING:
            continue
        if kind == "*" or (kind != "M" and span_of_type(c, kind).kind == FULL):
            yield attention_layer(c, index, Span(), part="mixer.attn")
        else:
            yield mamba2_layer(
                c,
                index,
                "mixer",
                heads=c.count("mamba_num_heads"),
                head_dim=c.count("mamba_head_dim"),
                groups=c.count("n_groups"),
                state=c.count("ssm_state_size"),
                conv=c.count("conv_kernel"),
            )


def _bamba_mixer(c: Config, index: int, part: str = "mixer") -> LayerSpec:
    """The Mamba-2 fields as Bamba named them, which Granite and Falcon took over."""
    if c.get("mamba_d_ssm") is not None:
        inner = c.count("mamba_d_ssm")
    else:
        expand = c.count("mamba_expand", "expansion_factor", default=2)
        inner = expand * c.count("hidden_size")
    head_dim = c.get("mamba_d_head", "mamba_headdim")
    if c.get("mamba_n_heads", "n_mamba_heads") is None and isinstance(head_dim, int) and head_dim:
        heads = inner // head_dim
    else:
        heads = c.count("mamba_n_heads", "n_mamba_heads")
    if not isinstance(head_dim, int):  # absent, or "auto"
        if inner % heads:
            raise ModelError(
                f"{inner} state channels do not divide into {heads} heads; give mamba_d_head",
                ["mamba_d_head"],
            )
        head_dim = inner // heads
    return mamba2_layer(
        c,
        index,
        part,
        heads=heads,
        head_dim=head_dim,
        groups=c.count("mamba_n_groups", "mamba_ngroups", default=1),
        state=c.count("mamba_d_state", "state_size"),
        conv=c.count("mamba_d_conv", "conv_dimension"),
    )


def read_granite_hybrid(c: Config) -> Iterator[LayerSpec]:
    types = c.per_layer("layer_types") or c.per_layer("layers_block_type")
    indices = c.get("attn_layer_indices")
    if types is None and indices is None:
        c.need("layer_types", "attn_layer_indices")
    for index in range(c.num_layers):
        full = index in indices if types is None else span_of_type(c, types[index]).kind == FULL
        if full:
            yield attention_layer(c, index, Span())
        else:
            yield _bamba_mixer(c, index)


def read_falcon_h1(c: Config) -> Iterator[LayerSpec]:
    """Attention and state side by side in every layer; the engine numbers the state layers on."""
    for index in range(c.num_layers):
        yield attention_layer(c, index, Span(), part="attn")
        mixer = _bamba_mixer(c, index)
        root = c.prefix.split(".")[0]
        yield mixer.renamed(f"{root}.{c.num_layers + index}.mixer")


def read_zamba2(c: Config) -> Iterator[LayerSpec]:
    """State in every layer, and attention over twice the hidden size in the hybrid ones."""
    types = c.per_layer("layers_block_type") or c.per_layer("layer_types")
    hybrid = c.get("hybrid_layer_ids")
    if types is None and hybrid is None:
        c.need("layers_block_type", "hybrid_layer_ids")
    for index in range(c.num_layers):
        kind = None if types is None else types[index]
        if kind not in (None, "hybrid"):
            span_of_type(c, kind)  # refuses a kind that is not known
        if kind == "hybrid" if types is not None else index in hybrid:
            heads = c.count("num_attention_heads")
            head_dim = c.get("attention_head_dim") or 2 * c.count("hidden_size") // heads
            yield attention_layer(c, index, Span(), part="self_attn.attn", head_dim=head_dim)
        yield _bamba_mixer(c, index)
