"""Page layouts: in which order the bytes of a page follow each other.

A layout has parts, one per tensor that a layer is kept in; a part says which axis each tensor
dimension is, and the byte order of its share of the page as a nest of loops over named axes. A
canonical page is described by the same kind of nest, so that a mapping is nothing but two
placements of the same fields.

Pure addressing: no ranks beyond the extents that the caller passes, no tensors, no copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vkvmap.errors import LayoutError, SpecError
from vkvmap.spec import HEAD, TOKEN, Axis, Field, LayerSpec, Nest

BLOCK = "block"
HALF = "kv"  # a tensor dimension that selects an item of the part's body, K or V
CELL = "cell"  # tensor dimensions that must lie densely; the order of their bytes is the layout's
KERNEL_BLOCK = "kernel_block"

#: Bytes of `(field, axis)`: how far that axis extends on this side of a mapping.
ExtentOf = Callable[[Field, Axis], int]


@dataclass(frozen=True)
class Part:
    """One tensor of a layer: what its dimensions are, and the byte order of its share of a page."""

    dims: tuple[str, ...]
    order: Nest


@dataclass(frozen=True)
class Layout:
    """A named page layout.

    Attributes:
        name: what callers declare.
        parts: one per tensor that the layer is kept in.
        encoding: how cells are filled where the shape does not tell (DESIGN 2.6); part of the
            format identity. Empty where the order says it all.
        per_head: the bytes within one head's span of the page are not described, so that tokens
            cannot be cut out of it and no other family can be derived.
    """

    name: str
    parts: tuple[Part, ...]
    encoding: str = ""
    per_head: bool = False

    @property
    def order(self) -> Nest:
        """The page's byte order over all parts."""
        if len(self.parts) == 1:
            return self.parts[0].order
        return Nest((), tuple(part.order for part in self.parts))


def _nest(axes: str, *body: Nest | str) -> Nest:
    return Nest(tuple(axes.split()), body)


def _split(axes: str) -> Nest:
    return _nest("", _nest(axes, "k", "k_scale?"), _nest(axes, "v", "v_scale?"))


def _planar_tail(axes: str) -> Nest:
    return _nest("", _nest(axes, "k", "v"), _nest(axes, "k_scale"), _nest(axes, "v_scale"))


_SPLIT = (BLOCK, HALF, TOKEN, HEAD, CELL)
_PACKED = (BLOCK, HEAD, TOKEN, CELL)
PAGE_DIMS = (BLOCK, CELL)

#: Layouts that engines are known to use. `packed_*` put a (token, head) cell together, `*_scaled`
#: put each scale behind its own half, `*_planar_scales` put all scales behind all values.
LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("split_nhd", (Part(_SPLIT, _split("token head")),)),
        Layout("split_hnd", (Part(_SPLIT, _split("head token")),)),
        Layout("packed_nhd", (Part(_PACKED, _nest("token head", "*")),)),
        Layout("packed_hnd", (Part(_PACKED, _nest("head token", "*")),)),
        Layout(
            "packed_nhd_scaled",
            (Part(_PACKED, _nest("token head", "k", "k_scale", "v", "v_scale")),),
        ),
        Layout(
            "packed_hnd_scaled",
            (Part(_PACKED, _nest("head token", "k", "k_scale", "v", "v_scale")),),
        ),
        Layout("nhd_planar_scales", (Part(PAGE_DIMS, _planar_tail("token head")),)),
        Layout("hnd_planar_scales", (Part(PAGE_DIMS, _planar_tail("head token")),)),
        Layout("mla", (Part((BLOCK, TOKEN, CELL), _nest("token", "*")),)),
        Layout(
            "planar",
            (
                Part(
                    (BLOCK, CELL, CELL), _nest("", _nest("token", "value"), _nest("token", "scale"))
                ),
            ),
        ),
        # vLLM's CPU backend: per head K transposed, then V, under the packed HND shape.
        Layout(
            "cpu_hnd",
            (
                Part(
                    (BLOCK, HEAD, CELL, CELL),
                    _nest("head", _nest("k_dim token", "k"), _nest("token v_dim", "v")),
                ),
            ),
            encoding="k_transposed",
        ),
        # One contiguous span per head whose inside is the kernel's own business.
        Layout(
            "head_spans",
            (Part((BLOCK, HEAD, CELL, CELL), _nest("head", "*")),),
            encoding="undescribed",
            per_head=True,
        ),
        Layout("state", (Part(PAGE_DIMS, _nest("", "*")),)),
        Layout("pages", (Part(PAGE_DIMS, _nest("", "*")),)),
    )
}


def state_layout(spec: LayerSpec, *, channels_first: bool, separate_tensors: bool = True) -> Layout:
    """The layout of a recurrent layer's state in this engine's axis order.

    Args:
        spec: a recurrent layer.
        channels_first: convolution state is ``[channel][position]``; else ``[position][channel]``
            with the segments side by side in every position.
        separate_tensors: convolution and temporal state are two tensors (as engines keep them),
            else one row of bytes.
    """
    convs = [f.name for f in spec.fields if f.name.startswith("conv_")]
    rest = [f.name for f in spec.fields if not f.name.startswith("conv_")]
    conv = Nest((), tuple(convs)) if channels_first else Nest(("position",), tuple(convs))
    temporal = Nest((), tuple(rest))
    name = "state_channels_first" if channels_first else "state_channels_last"
    if separate_tensors and convs and rest:
        return Layout(name, (Part(PAGE_DIMS, conv), Part(PAGE_DIMS, temporal)))
    body = (conv, temporal) if rest else (conv,)
    return Layout(name, (Part(PAGE_DIMS, Nest((), body)),))


# ---- dense placement ---------------------------------------------------------------------------


@dataclass
class Placement:
    """Where a field lies: byte `offset` of its first element, byte step of each of its axes."""

    offset: int
    strides: dict[str, int]


def nest_bytes(nest: Nest, fields: Mapping[str, Field], extent: ExtentOf) -> int:
    """Bytes that `nest` occupies; every field below one loop must give it the same extent."""
    return _place(nest, fields, extent, frozenset(), {}, 0)


def place(
    nest: Nest, fields: Mapping[str, Field], extent: ExtentOf
) -> tuple[dict[str, Placement], int]:
    """Dense placement of every field of `nest`, and the bytes of the whole.

    Raises LayoutError where a loop runs over an axis that a field below it does not have, or where
    two fields below one loop disagree on its extent.
    """
    placements: dict[str, Placement] = {}
    size = _place(nest, fields, extent, frozenset(), placements, 0)
    return placements, size


def _place(
    nest: Nest,
    fields: Mapping[str, Field],
    extent: ExtentOf,
    bound: frozenset[str],
    out: dict[str, Placement],
    offset: int,
) -> int:
    inside = bound | frozenset(nest.axes)
    cursor = offset
    for item in nest.body:
        if isinstance(item, Nest):
            cursor += _place(item, fields, extent, inside, out, cursor)
            continue
        this = fields[item]
        strides: dict[str, int] = {}
        step = this.elem
        for axis in reversed(this.axes):
            if axis.name not in inside:
                strides[axis.name] = step
                step *= extent(this, axis)
        out[item] = Placement(cursor, strides)
        cursor += step
    step = cursor - offset
    for name in reversed(nest.axes):
        count = _loop_extent(nest, name, fields, extent)
        for leaf in nest.leaves():
            out[leaf].strides[name] = step
        step *= count
    return step


def _loop_extent(nest: Nest, name: str, fields: Mapping[str, Field], extent: ExtentOf) -> int:
    extents = set()
    for leaf in nest.leaves():
        this = fields[leaf]
        axis = Axis(KERNEL_BLOCK, 0) if name == KERNEL_BLOCK else None
        for candidate in this.axes:
            if candidate.name == name:
                axis = candidate
        if axis is None:
            raise LayoutError(f"order {nest} loops over {name!r}, field {leaf!r} has no such axis")
        extents.add(extent(this, axis))
    if len(extents) != 1:
        raise LayoutError(
            f"order {nest}: fields {sorted(nest.leaves())} have different extents of {name!r} "
            f"({sorted(extents)}); put them in separate loops"
        )
    return extents.pop()


def layout_named(name: str) -> Layout:
    """The known layout called `name`; SpecError lists the names there are."""
    try:
        return LAYOUTS[name]
    except KeyError:
        raise SpecError(f"unknown layout {name!r}; known: {', '.join(LAYOUTS)}") from None
