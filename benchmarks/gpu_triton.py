"""A Triton kernel that copies (source, target, size) triples, one warp each: what engines do today.

Imported only where Triton is.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit
def _copy_triples(sources, targets, words, BLOCK: tl.constexpr):
    triple = tl.program_id(0)
    source = tl.load(sources + triple).to(tl.pointer_type(tl.int32))
    target = tl.load(targets + triple).to(tl.pointer_type(tl.int32))
    count = tl.load(words + triple)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, count, BLOCK):
        active = start + lanes < count
        tl.store(target + start + lanes, tl.load(source + start + lanes, active), active)


def copy_triples(sources: Any, targets: Any, sizes: Any) -> None:
    """Copy on the current stream; int64 addresses and int32 sizes (multiples of 4) on the GPU."""
    _copy_triples[(len(sources),)](sources, targets, sizes // 4, BLOCK=128, num_warps=1)
