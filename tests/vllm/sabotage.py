"""Things done wrong on purpose in an engine process, by name: ``{"patch": "swapped_heads"}``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def swapped_heads() -> None:
    """Every layer's first two KV heads change places in the canonical page."""
    from vkvmap.integrations.vllm import setup
    from vkvmap.mapping import CopyRun

    derive = setup.derive_canonical_mappings

    def wrong(layers: Any, *args: Any, **kwargs: Any) -> Any:
        mappings = derive(layers, *args, **kwargs)
        by_layer = {}
        for name, mapping in mappings.by_layer.items():
            heads = layers[name].num_kv_heads
            span = mapping.canonical_page_size_bytes // heads
            order = [1, 0, *range(2, heads)]
            runs = tuple(
                CopyRun(head * span, order[head] * span, span, 1, span, span)
                for head in range(heads)
            )
            by_layer[name] = replace(mapping, runs=runs)
        return replace(mappings, by_layer=by_layer)

    setup.derive_canonical_mappings = wrong


def undescribed_state() -> None:
    """The model's configuration cannot be read, so recurrent state has no description."""
    from vkvmap.integrations.vllm import layers

    layers.published_table = lambda model, names: None


def interleaved_layers() -> None:
    """The CPU backend offers pages of all layers side by side within a block, and only these."""
    from vllm.v1.attention.backends import cpu_attn

    layouts = (cpu_attn.KVCacheLayout.BLHNC,)
    cpu_attn.CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)


def missing_interface() -> None:
    """A release of the engine that has renamed what a spec derives from."""
    from vllm.v1.kv_offload.tiering import spec

    del spec.TieringOffloadingSpec


def failing_store() -> None:
    """The first page of every store cannot be moved, however often it is tried."""
    from vkvmap.integrations.vllm import worker

    make = worker.TransferPlan

    def plan(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        for page in range(made.packed.native.num_pages(0)):
            made.engine.inject_fault(0, 0, page, "made to fail")
        return made

    worker.TransferPlan = plan
