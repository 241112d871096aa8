"""How well the kernel's accesses use host lines and sectors: counted, not measured.

    python -m benchmarks.coalescing

The index code of the kernel itself walks one page of every layer, and each warp-level access is
charged with every 128-byte line and 32-byte sector it touches. Beside that, a prediction: a link
moves at most its rate, and at most what is in flight per round trip. What this model leaves out:
caches, write combining, the host's own memory system, and whether reads travel as lines or as
sectors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.harness import Report, Result, parser
from benchmarks.model_shapes import SHAPES, PlacedShape, Shape
from vkvmap import _C
from vkvmap.calibrate_probe import synthetic_plan

#: The model's link: PCIe Gen5 x16 as published measurements have it.
LINK_GBPS = 55.0
ROUND_TRIP_S = 1.8e-6
#: The kernel's defaults: 8 CTAs of 8 warps, a tile of at most 4 KiB in flight for each.
WARPS = 64

#: Pretended addresses: aligned as allocators align.
CACHE, REGION = 1 << 40, 1 << 41

FRAGMENTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)


@dataclass(frozen=True)
class Row:
    """What one page (of every layer) costs in one direction."""

    name: str
    fragment: int
    direction: str
    bytes: int
    requests: int
    tiles: int
    host_lines: int
    host_sectors: int
    device_sectors: int

    @property
    def useful_host_sectors(self) -> float:
        return self.bytes / (32 * self.host_sectors)

    @property
    def useful_device_sectors(self) -> float:
        return self.bytes / (32 * self.device_sectors)

    @property
    def useful_host_lines(self) -> float:
        return self.bytes / (128 * self.host_lines)

    @property
    def lines_per_request(self) -> float:
        return self.host_lines / self.requests

    @property
    def predicted_gbps(self) -> float:
        """Useful bytes per second if the link carries whole sectors."""
        in_flight = WARPS * self.bytes / self.tiles
        rate = min(LINK_GBPS, in_flight / ROUND_TRIP_S / 1e9)
        return rate * min(1.0, self.useful_host_sectors)


def row_of(name: str, fragment: int, plan: _C.Plan, direction: int) -> Row:
    classes = _C.cuda.count_accesses(plan, direction)
    total = {key: sum(c[key] for c in classes) for key in classes[0]}
    return Row(
        name,
        fragment,
        ("store", "load")[direction],
        *(
            total[k]
            for k in ("bytes", "requests", "tiles", "host_lines", "host_sectors", "device_sectors")
        ),
    )


def model_rows(shapes: Iterable[Shape] = SHAPES) -> list[Row]:
    """Both directions of every model shape."""
    rows = []
    for shape in shapes:
        placed = PlacedShape(shape, 1, 1)
        plan = placed.plan(CACHE, REGION)
        fragment = placed.fragment_bytes()
        rows += [row_of(shape.name, fragment, plan, d) for d in (0, 1)]
    return rows


def sweep_rows(fragments: Iterable[int] = FRAGMENTS) -> list[Row]:
    """Pages of which a rank holds every second fragment, as in the fragment sweep on a GPU."""
    rows = []
    for fragment in fragments:
        page = max(fragment, 64 << 10)
        plan = synthetic_plan(CACHE, page, REGION, 2 * page, page_bytes=page, run_bytes=fragment)
        rows.append(row_of(f"every second {fragment} B", fragment, plan, 1))
    return rows


def table(rows: Iterable[Row]) -> str:
    head = (
        f"{'shape':32} {'dir':5} {'fragment':>8} {'lines/req':>9} {'sectors':>8} {'device':>7} "
        f"{'lines':>6} {'GB/s':>6} {'us/page':>8}"
    )
    lines = [head]
    for r in rows:
        lines.append(
            f"{r.name:32} {r.direction:5} {r.fragment:8d} {r.lines_per_request:9.2f} "
            f"{r.useful_host_sectors:8.1%} {r.useful_device_sectors:7.1%} "
            f"{r.useful_host_lines:6.1%} {r.predicted_gbps:6.1f} "
            f"{r.bytes / r.predicted_gbps / 1e3:8.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    rows = [*sweep_rows(), *model_rows()]
    print(table(rows))
    print(
        f"\nuseful bytes of touched 32-byte host sectors, 32-byte device sectors, 128-byte host "
        f"lines; GB/s predicted for {LINK_GBPS} GB/s, {ROUND_TRIP_S * 1e6} us, {WARPS} warps.\n"
        "Not measured: anything. This is the model that a GPU run is compared with."
    )
    report = Report(options.json)
    for r in rows:
        name = f"coalescing/{r.name}/{r.direction}"
        report.add(Result(f"{name}/host sectors", r.useful_host_sectors, "useful share"))
        report.add(
            Result(
                f"{name}/predicted",
                r.predicted_gbps,
                "GB/s",
                LINK_GBPS,
                r.predicted_gbps / LINK_GBPS,
            )
        )
    report.write()


if __name__ == "__main__":
    main()
