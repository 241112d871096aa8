"""``vkvmap mapping``: one page on one rank, from numbers alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from vkvmap.cli.output import EXIT_NO, console, emit_json, size, table, verdict
from vkvmap.cli.params import JSON, OneOf, Positive
from vkvmap.configuration import ATTENTION_LAYOUTS, Configuration
from vkvmap.derive import derive_canonical_mappings
from vkvmap.models import KV_DTYPES
from vkvmap.paged import paged_layer
from vkvmap.spec import LayerSpec, LayerTable

LAYER = "layer"


@click.command()
@click.option("--tp", type=Positive(), default=1, show_default=True, help="Tensor parallel size.")
@click.option("--dcp", type=Positive(), default=1, show_default=True, help="Decode CP size.")
@click.option("--pcp", type=Positive(), default=1, show_default=True, help="Prefill CP size.")
@click.option(
    "--interleave",
    type=Positive(),
    default=1,
    show_default=True,
    help="Consecutive tokens that stay on one context shard.",
)
@click.option(
    "--pcp-mode",
    type=OneOf(("shards", "replicates")),
    default="shards",
    show_default=True,
    help="Whether PCP ranks hold parts of the tokens or replicas.",
)
@click.option("--rank", type=int, default=0, show_default=True, help="Rank within the group.")
@click.option(
    "--kv-heads", type=Positive(), default=8, show_default=True, help="KV heads of the model."
)
@click.option("--head-size", type=Positive(), default=128, show_default=True, help="Elements of K.")
@click.option("--head-size-v", type=Positive(), help="Elements of V, where it differs.")
@click.option(
    "--dtype",
    type=OneOf(KV_DTYPES, "NAME"),
    default="bf16",
    show_default=True,
    help=f"Element type: {', '.join(KV_DTYPES)}.",
)
@click.option("--mla-row", type=Positive(), help="Bytes of an MLA row: the page has no heads.")
@click.option(
    "--block-size", type=Positive(), default=16, show_default=True, help="Tokens a block."
)
@click.option(
    "--layout",
    type=OneOf((*ATTENTION_LAYOUTS, "mla"), "NAME"),
    default="packed_nhd",
    show_default=True,
    help=f"Page layout: {', '.join(ATTENTION_LAYOUTS)}, mla.",
)
@click.option(
    "--family",
    type=OneOf(("native", "universal")),
    default="native",
    show_default=True,
    help="Byte order of the canonical page.",
)
@click.option("--dcp-whole", is_flag=True, help="DCP leaves this layer whole (sliding windows).")
@JSON
def command(
    tp: int,
    dcp: int,
    pcp: int,
    interleave: int,
    pcp_mode: Any,
    rank: int,
    kv_heads: int,
    head_size: int,
    head_size_v: int | None,
    dtype: str,
    mla_row: int | None,
    block_size: int,
    layout: str,
    family: Any,
    dcp_whole: bool,
    as_json: bool,
) -> int:
    """Print the mapping of one page on one rank: sizes, writers and runs, or why it is opaque.

    \b
    vkvmap mapping --tp 8 --kv-heads 4 --block-size 128 --head-size 128 --layout split_nhd --rank 3
    """
    if (layout == "mla") != (mla_row is not None):
        raise click.BadParameter(
            f"layout {layout!r} with --mla-row {mla_row}: rows of MLA and layout 'mla' go "
            "together; write for example --layout mla --mla-row 1152",
            param_hint="'--layout'",
        )
    if mla_row is not None:
        spec = LayerSpec.mla(LAYER, row_bytes=mla_row, dcp_sharded=not dcp_whole)
    else:
        kv = KV_DTYPES[dtype]
        spec = LayerSpec.attention(
            LAYER,
            num_kv_heads=kv_heads,
            head_size=head_size,
            head_size_v=head_size_v,
            dtype=kv.dtype,
            scale_bytes=kv.scale_bytes,
            dcp_sharded=not dcp_whole,
        )
    made = Configuration(
        tp=tp,
        dcp=dcp,
        pcp=pcp,
        interleave=interleave,
        layout=layout,
        block_size=block_size,
        pcp_mode=pcp_mode,
    )
    grid = made.grid
    if not 0 <= rank < grid.size:
        raise click.BadParameter(
            f"rank {rank} is not in a group of tp={tp} x pcp={pcp}; ranks are 0 to {grid.size - 1}",
            param_hint="'--rank'",
        )
    view = paged_layer(spec, made, rank).view()
    result = derive_canonical_mappings(LayerTable([spec]), {LAYER: view}, grid, rank, family=family)
    mapping = result.by_layer[LAYER]
    reason = str(result.refusals[0]) if result.refusals else None
    if as_json:
        emit_json(
            {
                "certified": mapping.certified,
                "reason": reason,
                "family": family,
                "canonical_page_size_bytes": mapping.canonical_page_size_bytes,
                "local_page_size_bytes": mapping.local_page_size_bytes,
                "span_tokens": mapping.span_tokens,
                "num_writers": mapping.num_writers,
                "writer_index": mapping.writer_index,
                "parallelism_agnostic": mapping.parallelism_agnostic,
                "num_fragments": mapping.num_fragments,
                "runs": [asdict(run) for run in mapping.runs],
            }
        )
        return 0 if mapping.certified else EXIT_NO
    out = console()
    answer = verdict(mapping.certified, reason or f"{family} family")
    out.print("certified ", answer, soft_wrap=True)
    out.print(
        f"canonical page {size(mapping.canonical_page_size_bytes)} "
        f"({mapping.span_tokens} tokens), local page {size(mapping.local_page_size_bytes)}, "
        f"{'the same' if mapping.parallelism_agnostic else 'not the same'} under any configuration"
    )
    turn = f"writes page b where b % {mapping.num_writers} == {mapping.writer_index}"
    if mapping.num_writers == 1:
        turn = "writes every page"
    out.print(
        f"{turn}; {_count(mapping.num_fragments, 'fragment')} in {_count(len(mapping.runs), 'run')}"
    )
    columns = ("local", "canonical", "fragment", "count", "local stride", "canonical stride")
    out.print(table(columns, [tuple(asdict(run).values()) for run in mapping.runs], left=0))
    return 0 if mapping.certified else EXIT_NO


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
