"""The engine's layers in our words: a model-wide layer table, and a cache view per layer.

Everything is read from what the engine itself states (its spec of each layer, the tensors bound to
it, the platform's encoding) and from the published configuration where the engine states only a
rank's share. What nobody states makes the layer opaque, with a reason; nothing is guessed.

Overlays are ordinary here: layers of different groups may lie at the same addresses, and pages may
be padded or several layers interleave in one block, because views carry addresses and strides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vkvmap.cache import CacheView, TensorView
from vkvmap.errors import Refusal, Refuse, SpecError, VkvmapError
from vkvmap.integrations.vllm import versions
from vkvmap.integrations.vllm.options import EngineError
from vkvmap.layout import LAYOUTS, Layout, state_layout
from vkvmap.models import from_hf_config
from vkvmap.spec import LayerSpec, LayerTable

#: Instruction sets of the CPU backend whose pages are known: K transposed, then V, per head.
_KNOWN_CPU_ISAS = ("vec", "vec16")


@dataclass(frozen=True)
class GroupFacts:
    """One layer group of the engine.

    Attributes:
        name: ours; the engine's number as text.
        layers: names of this rank's layers.
        span_tokens: tokens of one block over all context shards.
    """

    name: str
    layers: tuple[str, ...]
    span_tokens: int


@dataclass(frozen=True)
class LayerFacts:
    """What the engine says of one layer on this rank.

    Attributes:
        spec: the engine's description of the cache.
        tensors: what is bound to the layer.
        rows: the engine's int8 ``(blocks, page bytes)`` view of it.
        kind: name of the layer's class.
        isa: instruction set that the CPU backend fills pages for, or None.
    """

    name: str
    spec: Any
    tensors: tuple[Any, ...]
    rows: Any
    kind: str = ""
    isa: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """What the engine says of the whole model.

    Attributes:
        hf_config: the published configuration, parsed.
        total_kv_heads: KV heads in the whole model.
        cache_dtype: what the cache is kept in, by the engine's name.
        platform: ``"cpu"``, ``"cuda"``, ...
        axes: the engine's name for the order of cache axes, ``""`` if it has none.
        tp, dcp: parallel sizes.
    """

    hf_config: Mapping[str, Any]
    total_kv_heads: int
    cache_dtype: str
    platform: str
    axes: str
    tp: int
    dcp: int


@dataclass(frozen=True)
class Described:
    """The model and this rank's caches in our words.

    Attributes:
        table: the whole model's layers.
        caches: this rank's layers.
        reasons: why layers are opaque already, before any derivation.
    """

    table: LayerTable
    caches: Mapping[str, CacheView]
    reasons: Mapping[str, Refusal]


def describe(
    model: ModelFacts, groups: Sequence[GroupFacts], layers: Mapping[str, LayerFacts]
) -> Described:
    """Describe `layers` (in model order) of `groups`."""
    published = published_table(model, layers)
    group_of = {name: group for group in groups for name in group.layers}
    specs: list[LayerSpec] = []
    caches: dict[str, CacheView] = {}
    reasons: dict[str, Refusal] = {}
    for name, facts in layers.items():
        group = group_of[name]
        try:
            spec, view = _Describer(model, group, facts, published).described()
        except Refuse as refuse:
            reasons[name] = refuse.of(name)
            spec, view = _opaque(group, facts)
        specs.append(spec)
        caches[name] = view
    return Described(LayerTable(specs), caches, reasons)


def published_table(model: ModelFacts, layers: Mapping[str, Any]) -> LayerTable | None:
    """The published configuration as a layer table with the engine's names; None if unreadable."""
    prefix = next(
        (m.group(1) for name in layers if (m := re.match(r"(.+?)\.\d+\.", name))), "model.layers"
    )
    try:
        return from_hf_config(model.hf_config, prefix=prefix)
    except (VkvmapError, KeyError, TypeError, ValueError):
        return None


def _opaque(group: GroupFacts, facts: LayerFacts) -> tuple[LayerSpec, CacheView]:
    spec = LayerSpec.opaque(facts.name, page_bytes=int(facts.rows.shape[1]), group=group.name)
    return spec, CacheView.of(facts.rows, "pages")


class _Describer:
    """One layer; raises `Refuse` where something is not stated."""

    def __init__(
        self,
        model: ModelFacts,
        group: GroupFacts,
        facts: LayerFacts,
        published: LayerTable | None,
    ) -> None:
        self.model, self.group, self.facts = model, group, facts
        self.published = published.get(facts.name) if published is not None else None
        self.classes = versions.class_names(facts.spec)

    def described(self) -> tuple[LayerSpec, CacheView]:
        if self.facts.spec is None:
            raise Refuse(
                "undescribed",
                f"its module ({self.facts.kind}) does not describe its cache",
                "keep it out of the offloaded groups, or add it to vkvmap",
            )
        if "MambaSpec" in self.classes:
            return self._state()
        if "AttentionSpec" not in self.classes:
            raise Refuse(
                "undescribed",
                f"cache of kind {type(self.facts.spec).__name__} is not known",
                "use a vkvmap that knows it",
            )
        if len(self.facts.tensors) != 1:
            raise Refuse(
                "layout",
                f"it is kept in {len(self.facts.tensors)} tensors, attention in one",
                "use an attention backend with one cache tensor",
            )
        if getattr(self.facts.spec, "tokens_per_state", 1) != 1:
            raise Refuse(
                "undescribed",
                f"a stored state covers {self.facts.spec.tokens_per_state} tokens",
                "describe compressed states before sharing them",
            )
        if self.classes & {"MLAAttentionSpec", "SlidingWindowMLASpec"}:
            return self._latent()
        return self._attention()

    # ---- attention ------------------------------------------------------------------------------

    def _attention(self) -> tuple[LayerSpec, CacheView]:
        spec, dtype = self.facts.spec, self.model.cache_dtype
        tensor = self._tensor()
        heads = self._heads()
        common: dict[str, Any] = {
            "num_kv_heads": heads,
            "group": self.group.name,
            "dcp_sharded": self._dcp_sharded,
            "window": self._window,
        }
        item, sizes = tensor.itemsize, (int(spec.head_size), int(spec.head_size_v))
        dense = sum(sizes) * item
        if len(tensor.shape) == 5 and not self._quantised_cells:
            layer = LayerSpec.attention(
                self.facts.name, head_size=sizes[0], dtype=dtype, elem=item, **common
            )
            return self._with_view(layer, *self._split(tensor))
        if len(tensor.shape) != 4:
            raise Refuse(
                "layout",
                f"a cache of shape {tensor.shape} is not known",
                "use an attention backend that keeps (block, head, token, content)",
            )
        cell = tensor.shape[3] * item
        if cell == dense and not self._quantised_cells:
            layer = LayerSpec.attention(
                self.facts.name,
                head_size=sizes[0],
                head_size_v=sizes[1],
                dtype=dtype,
                elem=item,
                **common,
            )
        elif getattr(spec, "num_head_slots", None) is None and self.model.platform != "cpu":
            # Scales and packed values lie within the (token, head) cell, which moves as it is.
            layer = LayerSpec.cells(self.facts.name, cell_bytes=cell, dtype=dtype, **common)
        else:
            raise Refuse(
                "undescribed",
                f"cells of {cell} bytes for heads of {sizes} elements of {item} bytes",
                "choose a cache dtype without packed cells",
            )
        return self._with_view(layer, tensor, self._packed_layout(tensor, layer))

    def _packed_layout(self, tensor: TensorView, layer: LayerSpec) -> Layout:
        if self.model.platform == "cpu":
            isa = self.facts.isa
            if isa is None:
                raise Refuse(
                    "encoding",
                    "the CPU backend does not say which instruction set its pages are for",
                    "use a release that sets the layer's isa",
                )
            if isa in _KNOWN_CPU_ISAS:
                return LAYOUTS["cpu_hnd"]
            # Tiles of this instruction set are its own business; a head is still one span.
            return replace(LAYOUTS["head_spans"], encoding=f"cpu_{isa}")
        _, head, token, _ = tensor.strides
        if tensor.shape[1] > 1 and tensor.shape[2] > 1:
            return LAYOUTS["packed_hnd" if head > token else "packed_nhd"]
        # One head or one token per block: strides say nothing, the engine's name decides.
        return LAYOUTS["packed_nhd" if "NH" in self.model.axes else "packed_hnd"]

    def _split(self, tensor: TensorView) -> tuple[TensorView, Layout]:
        """K and V as a dimension of its own, before or after the blocks."""
        half = 0 if tensor.shape[0] == 2 and tensor.shape[1] != 2 else 1
        if half == 0:
            order = (1, 0, 2, 3, 4)
            tensor = replace(
                tensor,
                shape=tuple(tensor.shape[i] for i in order),
                strides=tuple(tensor.strides[i] for i in order),
            )
        name = "split_hnd" if tensor.strides[3] > tensor.strides[2] else "split_nhd"
        return tensor, LAYOUTS[name]

    def _heads(self) -> int:
        """KV heads of this layer in the whole model; the engine states the rank's share.

        The published configuration has them per layer, the engine one number for all; whichever
        is taken must give the rank the heads that its tensor has.
        """
        local, tp = int(self.facts.spec.num_kv_heads), self.model.tp
        if tp == 1 or getattr(self.facts.spec, "max_tp_shards", None) == 1:
            return local
        said = self.published.num_kv_heads if self.published is not None else None
        for heads in (said, self.model.total_kv_heads):
            if heads is not None and max(1, heads // tp) == local:
                return heads
        raise Refuse(
            "heads",
            f"the rank holds {local} heads, which is no share over {tp} ranks of the "
            f"{self.model.total_kv_heads} that the model has; what this layer has is not stated",
            "add the model's configuration to vkvmap.models",
        )

    @property
    def _quantised_cells(self) -> bool:
        mode = getattr(self.facts.spec, "kv_quant_mode", None)
        name = getattr(mode, "name", "NONE")
        return name not in ("NONE", "FP8_PER_TENSOR")

    # ---- latent rows ----------------------------------------------------------------------------

    def _latent(self) -> tuple[LayerSpec, CacheView]:
        tensor = self._tensor()
        if len(tensor.shape) == 4 and tensor.shape[1] == 1:
            tensor = replace(
                tensor,
                shape=(tensor.shape[0], *tensor.shape[2:]),
                strides=(tensor.strides[0], *tensor.strides[2:]),
            )
        if len(tensor.shape) != 3:
            raise Refuse(
                "layout",
                f"latent rows in a cache of shape {tensor.shape}",
                "use a backend that keeps (block, token, row)",
            )
        row = tensor.shape[2] * tensor.itemsize
        dtype = str(getattr(self.facts.spec, "cache_dtype_str", None) or self.model.cache_dtype)
        if dtype == "auto":
            dtype = self.model.cache_dtype
        common: dict[str, Any] = {
            "dtype": dtype,
            "group": self.group.name,
            "dcp_sharded": self._dcp_sharded,
        }
        if "Indexer" in self.facts.kind:
            # Index keys are planar in a page: all values, then one 4-byte scale per 128 of them.
            scale = 4 * (row // 132)
            layer = LayerSpec.indexer(
                self.facts.name, value_bytes=row - scale, scale_bytes=scale, **common
            )
            return self._with_view(layer, tensor, LAYOUTS["planar"])
        layer = LayerSpec.mla(self.facts.name, row_bytes=row, window=self._window, **common)
        return self._with_view(layer, tensor, LAYOUTS["mla"])

    # ---- recurrent state ------------------------------------------------------------------------

    def _state(self) -> tuple[LayerSpec, CacheView]:
        spec = self.published
        if spec is None or spec.kind != "recurrent":
            raise Refuse(
                "undescribed",
                f"recurrent state of {self.facts.kind} is not described by the model's "
                "configuration",
                "add the model to vkvmap.models",
            )
        if getattr(self.facts.spec, "tp_replicated", False):
            raise Refuse(
                "undescribed", "its state is replicated", "describe it with units of its own"
            )
        tensors = tuple(TensorView.of(tensor) for tensor in self.facts.tensors)
        convs = [field for field in spec.fields if field.name.startswith("conv_")]
        states = [field for field in spec.fields if not field.name.startswith("conv_")]
        if len(tensors) != bool(convs) + bool(states):
            raise Refuse(
                "layout",
                f"state in {len(tensors)} tensors, {bool(convs) + bool(states)} are described",
                "add this kind of state to vkvmap.models",
            )
        items = [tensor.itemsize for tensor in tensors]
        elems = {field.name: items[0] for field in convs} | {
            field.name: items[-1] for field in states
        }
        layer = replace(
            spec,
            group=self.group.name,
            dtype="/".join(str(tensor.dtype).split(".")[-1] for tensor in self.facts.tensors),
            fields=tuple(replace(field, elem=elems[field.name]) for field in spec.fields),
        )
        layout = state_layout(layer, channels_first=self._channels_first(layer, tensors[0]))
        # Engines pad a page up to the attention page; a state is one block id in all its tensors.
        return layer, CacheView(tensors, layout, 0)

    def _channels_first(self, layer: LayerSpec, conv: TensorView) -> bool:
        fields = [field for field in layer.fields if field.name.startswith("conv_")]
        if not fields:
            return True
        positions = fields[0].axis("position").extent
        if len(conv.shape) == 3 and (conv.shape[1] == positions) != (conv.shape[2] == positions):
            return conv.shape[2] == positions
        raise Refuse(
            "layout",
            f"convolution state of shape {conv.shape} for {positions} positions",
            "set VLLM_SSM_CONV_STATE_LAYOUT so that shapes tell channels from positions",
        )

    # ---- shared ---------------------------------------------------------------------------------

    def _tensor(self) -> TensorView:
        return TensorView.of(self.facts.tensors[0])

    def _with_view(
        self, layer: LayerSpec, tensor: TensorView, layout: Layout
    ) -> tuple[LayerSpec, CacheView]:
        blocks = int(self.facts.rows.shape[0])
        kernel_blocks, rest = divmod(tensor.shape[0], blocks)
        shards = self.model.dcp if self._dcp_sharded else 1
        block_size, uneven = divmod(self.group.span_tokens, shards)
        if rest or uneven or kernel_blocks < 1:
            raise Refuse(
                "kernel-blocks",
                f"{tensor.shape[0]} kernel blocks for {blocks} blocks of "
                f"{self.group.span_tokens} tokens over {shards} shards",
                "choose a block size that the attention backend divides evenly",
            )
        try:
            view = CacheView.of(tensor, layout, block_size, kernel_blocks=kernel_blocks)
        except SpecError as error:
            raise Refuse("layout", str(error), "choose another block size") from None
        return layer, view

    @property
    def _dcp_sharded(self) -> bool:
        said = getattr(self.facts.spec, "dcp_sharded", None)
        return "SlidingWindowSpec" not in self.classes if said is None else bool(said)

    @property
    def _window(self) -> int | None:
        for name in ("sliding_window", "attention_chunk_size"):
            value = getattr(self.facts.spec, name, None)
            if isinstance(value, int):
                return value
        return None


def whole_table(described: LayerTable, published: LayerTable | None, stages: int) -> LayerTable:
    """The model's table, given one pipeline stage's layers.

    Raises:
        EngineError: other stages' layers are not known.
    """
    if stages == 1:
        return described
    groups = described.groups
    if published is None or len(groups) != 1:
        raise EngineError(
            f"{stages} pipeline stages: a chunk is laid out by the whole model, and this stage "
            "knows its own layers only; that needs a model of one layer group that vkvmap.models "
            "can read"
        )
    whole = []
    for name, spec in published.items():
        here = described.get(name)
        pattern = next(iter(described.values()))
        there = replace(spec, group=groups[0], dtype=pattern.dtype, fields=pattern.fields)
        if here is not None and here.description() != replace(there, name=name).description():
            raise EngineError(f"{stages} pipeline stages: layer {name!r} differs from the others")
        if spec.kind != pattern.kind or spec.num_kv_heads != pattern.num_kv_heads:
            raise EngineError(f"{stages} pipeline stages: layers of {name!r}'s kind differ")
        whole.append(there)
    return LayerTable(whole)
