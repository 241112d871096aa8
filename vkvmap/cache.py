"""A rank's paged cache as the caller declares it: tensors, layout, block size.

Only addresses, shapes and strides; the bytes are never touched here. Whether the declaration is
true is for `recognise.py` to say.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from vkvmap.errors import LayoutError, SpecError
from vkvmap.layout import Layout, layout_named

#: Far above any block; token by token work is bounded by it.
MOST_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class TensorView:
    """One tensor's memory: `address` of element 0, `shape`, `strides` in bytes, `itemsize`."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    storage: tuple[int, int]  # (address, bytes) of the allocation it lies in
    device: str = "cpu"
    owner: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.strides) or not self.shape or min(self.shape) < 1:
            raise SpecError(
                f"a tensor of shape {self.shape} with strides {self.strides} holds no blocks; a "
                "cache has a block dimension first and at least one element in every dimension"
            )

    @classmethod
    def of(cls, tensor: Any) -> TensorView:
        """Read a torch tensor or a numpy array (neither library is imported for it).

        Raises SpecError for anything else, and for tensors without dimensions or elements.
        """
        if hasattr(tensor, "data_ptr"):
            item = int(tensor.element_size())
            storage = tensor.untyped_storage()
            return cls(
                int(tensor.data_ptr()),
                tuple(int(n) for n in tensor.shape),
                tuple(int(n) * item for n in tensor.stride()),
                item,
                (int(storage.data_ptr()), int(storage.nbytes())),
                str(tensor.device),
                tensor,
            )
        interface = getattr(tensor, "__array_interface__", None)
        if interface is None:
            raise SpecError(
                f"{type(tensor).__name__} is neither a torch tensor nor a numpy array; wrap what "
                "you have in a TensorView"
            )
        base = tensor
        while getattr(base, "base", None) is not None and hasattr(base.base, "__array_interface__"):
            base = base.base
        return cls(
            int(interface["data"][0]),
            tuple(int(n) for n in tensor.shape),
            tuple(int(n) for n in tensor.strides),
            int(tensor.itemsize),
            (int(base.__array_interface__["data"][0]), int(base.nbytes)),
            "cpu",
            tensor,
        )

    @property
    def bytes_per_index(self) -> int:
        """Bytes that one index of the first dimension covers, padding not counted."""
        return prod(self.shape[1:]) * self.itemsize


@dataclass(frozen=True)
class CacheView:
    """A layer's paged cache on one rank: its tensors, and what the caller declares about them.

    Attributes:
        tensors: one per part of the layout. Dimension order is the layout's; strides are free.
        layout: the declared layout.
        block_size: tokens per manager block; 0 for layers without tokens.
        kernel_blocks: kernel blocks per manager block, lying one after the other.
        raw: the tensors are rows of page bytes; the layout still says what lies where in a page.
    """

    tensors: tuple[TensorView, ...]
    layout: Layout
    block_size: int
    kernel_blocks: int = 1
    raw: bool = False

    @classmethod
    def of(
        cls,
        tensors: Any,
        layout: str | Layout,
        block_size: int = 0,
        *,
        kernel_blocks: int = 1,
        raw: bool = False,
    ) -> CacheView:
        """Declare the layout of a tensor (or of a sequence of tensors, one per part).

        Raises SpecError for unknown layout names, non-positive sizes or a wrong tensor count.
        """
        chosen = layout if isinstance(layout, Layout) else layout_named(layout)
        single = hasattr(tensors, "shape")
        views = tuple(
            t if isinstance(t, TensorView) else TensorView.of(t)
            for t in ((tensors,) if single else tensors)
        )
        if len(views) != len(chosen.parts):
            raise SpecError(
                f"layout {chosen.name!r} keeps a layer in {len(chosen.parts)} tensors, "
                f"{len(views)} were given"
            )
        if block_size < 0 or kernel_blocks < 1:
            raise SpecError(f"block_size={block_size}, kernel_blocks={kernel_blocks}: not a block")
        if block_size > MOST_BLOCK_TOKENS:
            raise SpecError(
                f"block_size={block_size}: a block has at most {MOST_BLOCK_TOKENS} tokens"
            )
        if kernel_blocks > 1 and block_size % kernel_blocks:
            raise SpecError(
                f"block_size={block_size} tokens is not {kernel_blocks} equal kernel blocks"
            )
        return cls(views, chosen, block_size, kernel_blocks, raw)

    @property
    def device(self) -> str:
        """The device that the tensors are on."""
        return self.tensors[0].device

    @property
    def base(self) -> int:
        """Lowest address of block 0; offsets within a page count from here."""
        return min(tensor.address for tensor in self.tensors)

    @property
    def geometry(self) -> tuple[Any, ...]:
        """All that the page's shape depends on, without addresses: layers that agree are alike."""
        shapes = tuple((t.shape[1:], t.strides, t.itemsize, t.shape[:1]) for t in self.tensors)
        return shapes, self.layout, self.block_size, self.kernel_blocks, self.raw


def check_storage(view: CacheView) -> None:
    """Raise LayoutError where a tensor's last element lies outside its allocation."""
    for tensor in view.tensors:
        low, length = tensor.storage
        steps = zip(tensor.shape, tensor.strides, strict=True)
        end = tensor.address + sum((n - 1) * stride for n, stride in steps) + tensor.itemsize
        if tensor.address < low or end > low + length:
            raise LayoutError(
                f"shape {tensor.shape} and strides {tensor.strides} reach bytes "
                f"[{tensor.address - low}, {end - low}) of a storage of {length} bytes"
            )


#: Axis orders of cross-layer tensors: Layer, Block, Head, tokeN, Content.
CROSS_LAYER_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def layer_views(tensor: Any, order: str, num_layers: int) -> tuple[TensorView, ...]:
    """Views ``(block, head, token, content)`` of the layers of one cross-layer tensor.

    Args:
        tensor: five dimensions in the order that `order` names.
        order: one of `CROSS_LAYER_ORDERS`.
        num_layers: checked against the layer dimension.

    Token-major orders (``..NHC``) fit layout ``packed_nhd``, the others ``packed_hnd``.
    """
    if order not in CROSS_LAYER_ORDERS:
        raise SpecError(f"order {order!r}: choose one of {', '.join(CROSS_LAYER_ORDERS)}")
    whole = TensorView.of(tensor)
    if len(whole.shape) != 5:
        raise SpecError(f"a cross-layer tensor has 5 dimensions {order}, not {whole.shape}")
    at = {letter: position for position, letter in enumerate(order)}
    if whole.shape[at["L"]] != num_layers:
        raise SpecError(f"{whole.shape[at['L']]} layers in the tensor, {num_layers} expected")
    pick = [at[letter] for letter in "BHNC"]
    return tuple(
        replace(
            whole,
            address=whole.address + layer * whole.strides[at["L"]],
            shape=tuple(whole.shape[i] for i in pick),
            strides=tuple(whole.strides[i] for i in pick),
        )
        for layer in range(num_layers)
    )
