"""How a region is divided: sections of equal rows, and the control page that describes them.

The control page makes a region self-describing, so joining one needs nothing but its descriptor.
It is read from memory that another process wrote: a table is believed only where every section
lies inside the mapping.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vkvmap.errors import RegionError
from vkvmap.foreign import read_json
from vkvmap.region_backing import MAGIC

#: Rows of at least this size start on pages, so that files can be read straight into them.
PAGE = 4096
#: Smaller rows start on lines of their own, so that two ranks never share one.
LINE = 128
# magic, version, bytes of the table, bytes of the region, token, expected joiners, joined
CONTROL = struct.Struct("<8sIIQ16sII")
JOINED_AT = 44
VERSION = 1
MOST_CONTROL = 16 << 20


@dataclass(frozen=True)
class Section:
    """A table of `num_rows` equal rows.

    Attributes:
        name: unique in the region.
        num_rows: rows, each the home of one chunk.
        payload_bytes: bytes of a row that mean something.
        row_stride: bytes from one row to the next; by default the payload rounded up to 4096 (or to
            128 for payloads under a page).
        private: True where rows belong to one rank's configuration (opaque layers).
    """

    name: str
    num_rows: int
    payload_bytes: int
    row_stride: int | None = None
    private: bool = False

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.payload_bytes < 1:
            raise RegionError(
                f"section {self.name!r}: {self.num_rows} rows of {self.payload_bytes} bytes; "
                "both must be positive"
            )
        if self.row_stride is not None and self.row_stride < self.payload_bytes:
            raise RegionError(
                f"section {self.name!r}: row stride {self.row_stride} is less than the payload of "
                f"{self.payload_bytes} bytes"
            )

    @property
    def stride(self) -> int:
        """Bytes from one row to the next."""
        if self.row_stride is not None:
            return self.row_stride
        return round_up(self.payload_bytes, PAGE if self.payload_bytes >= PAGE else LINE)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.stride


@dataclass(frozen=True)
class SectionView:
    """Where a section lies: row `i` is `payload_bytes` bytes at ``address + i * row_stride``.

    `offset` counts from the start of the region.
    """

    name: str
    address: int
    num_rows: int
    row_stride: int
    payload_bytes: int
    private: bool
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.row_stride


def round_up(value: int, unit: int) -> int:
    """`value` rounded up to a multiple of `unit`."""
    return -(-value // unit) * unit


def view_at(section: Section, offset: int) -> SectionView:
    return SectionView(
        section.name,
        0,
        section.num_rows,
        section.stride,
        section.payload_bytes,
        section.private,
        offset,
    )


def check_names(views: Sequence[SectionView]) -> None:
    names = [view.name for view in views]
    if not names or len(set(names)) != len(names):
        raise RegionError(f"sections {names}: at least one, and names must differ")


def lay_out(sections: Sequence[Section]) -> tuple[list[SectionView], bytes, int]:
    """Views without addresses, the JSON table that describes them, and the total bytes."""
    # The table's length depends on the offsets it holds; room for 20 digits each settles that.
    names = sum(len(json.dumps(section.name)) for section in sections)
    offset = round_up(CONTROL.size + names + 128 * len(sections) + 2, PAGE)
    views = []
    for section in sections:
        views.append(view_at(section, offset))
        offset = round_up(offset + section.nbytes, PAGE)
    check_names(views)
    table = [
        [view.name, view.num_rows, view.row_stride, view.payload_bytes, view.private, view.offset]
        for view in views
    ]
    return views, json.dumps(table).encode(), offset


def read_table(head: bytes, nbytes: int) -> tuple[list[SectionView], bytes]:
    """Views and token from the control page of a region of `nbytes`, if it is consistent."""
    wrong = RegionError("that is not a region of this version, or it is damaged")
    if len(head) < CONTROL.size:
        raise wrong
    magic, version, length, stated, token, _, _ = CONTROL.unpack_from(head)
    if magic != MAGIC or version != VERSION or stated != nbytes:
        raise wrong
    try:
        rows = read_json(head[CONTROL.size : CONTROL.size + length])
        views = [
            SectionView(
                str(name),
                0,
                _whole(count),
                _whole(stride),
                _whole(payload),
                bool(private),
                _whole(at),
            )
            for name, count, stride, payload, private, at in rows
        ]
    except (ValueError, TypeError) as error:
        raise wrong from error
    check_names(views)
    for view in views:
        fits = 0 < view.payload_bytes <= view.row_stride and view.num_rows > 0
        if not fits or view.offset < 0 or view.offset + view.nbytes > nbytes:
            raise wrong
    return views, token


def _whole(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def located(views: Sequence[SectionView], base: int) -> list[SectionView]:
    """The same views, for a mapping that starts at address `base`."""
    return [replace(view, address=base + view.offset) for view in views]
