"""What a transfer should take, from published measurements; never a substitute for measuring.

Every number carries a range, because the sources do. They are facts about hardware and drivers of
2025 and 2026 and expire with them; ``vkvmap bench`` measures the machine at hand.

* batched memcpy costs 0.5 to 0.63 us of CPU per descriptor; it reaches 4 to 7 GB/s on copies of 4
  to 16 KiB and 40 to 55 GB/s from 28 KiB on (PCIe Gen5);
* a kernel reads host memory at 35 to 52 GB/s and writes it at 8 to 50 GB/s (PCIe Gen5; the sources
  on writes contradict each other);
* host memory is moved in sectors of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: Copies at least this long go to the copy engine.
COPY_ENGINE_BYTES = 28 * 1024
SECTOR = 64

Range = tuple[float, float]


@dataclass(frozen=True)
class Link:
    """A host link; `gbps` is what large copies reach each way, in GB/s (assumed where noted)."""

    name: str
    gbps: float
    note: str

    @property
    def scale(self) -> float:
        """This link against the one that the measurements were made on."""
        return self.gbps / 55.0


LINKS: Mapping[str, Link] = {
    link.name: link
    for link in (
        Link("pcie4", 26.0, "PCIe Gen4 x16, scaled from measurements published for Gen5"),
        Link("pcie5", 55.0, "PCIe Gen5 x16, from published measurements"),
        Link(
            "c2c",
            380.0,
            "NVLink-C2C, assumed at 85% of 450 GB/s each way and scaled from PCIe Gen5",
        ),
    )
}


@dataclass(frozen=True)
class Estimate:
    """Seconds and GB/s, each from the hopeful to the cautious end."""

    mover: str
    seconds: Range
    gbps: Range


def sector_efficiency(fragment: float) -> float:
    """Useful share of the host sectors that a fragment of that many bytes touches."""
    if fragment <= 0:
        return 1.0
    return fragment / (SECTOR * -(-fragment // SECTOR))


def kernel(link: Link, nbytes: float, fragment: float, *, load: bool) -> Estimate:
    """One launch for everything: bandwidth alone, less what short fragments waste."""
    low, high = (35.0, 52.0) if load else (8.0, 50.0)
    useful = sector_efficiency(fragment)
    return _estimate("kernel", nbytes, (high * link.scale * useful, low * link.scale * useful))


def copy_engine(link: Link, nbytes: float, copies: float) -> Estimate:
    """A descriptor per copy: what it costs to submit, or to move, whichever is longer."""
    if not copies:
        return _estimate("copy_engine", nbytes, (link.gbps, link.gbps))
    each = nbytes / copies
    rates = (55.0, 40.0) if each >= COPY_ENGINE_BYTES else (7.0, 4.0)
    found = []
    for rate, submit in zip(rates, (0.50e-6, 0.63e-6), strict=True):
        wanted = max(nbytes / (rate * link.scale * 1e9), copies * submit)
        found.append(nbytes / wanted / 1e9 if wanted else rate)
    return _estimate("copy_engine", nbytes, (found[0], found[1]))


def chosen(fragment: float) -> str:
    """The mover that `auto` begins with on a GPU, before calibration corrects it."""
    return "copy_engine" if fragment >= COPY_ENGINE_BYTES else "kernel"


def _estimate(mover: str, nbytes: float, gbps: Range) -> Estimate:
    seconds = tuple(nbytes / (rate * 1e9) if rate else 0.0 for rate in gbps)
    return Estimate(mover, (seconds[0], seconds[1]), gbps)
