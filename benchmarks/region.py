"""Faulting a region's memory in: huge pages, collapsed from a touched page each, or small ones.

Every page is there and zero before anything is timed; contenders take turns. Where no huge page is
free, the system moves small pages out of the way first: the greatest of the spread shows it.

Prediction: zeroing is the same work, and 512 times fewer faults are left of the rest.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import Report, Result, interleaved, parser, spread
from vkvmap.region import Region, Section
from vkvmap.region_memory import HugePages


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--mib", type=int, default=1024, help="bytes of the region")
    arguments.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    asked = arguments.parse_args()
    report = Report(asked.json)
    sections = [Section("rows", asked.mib, 1 << 20)]
    for threads in asked.threads:

        def make(kind: HugePages | None, threads: int = threads, look: bool = False) -> None:
            with Region.create(sections, huge_pages=kind, populate_threads=threads) as region:
                assert not look or not region.rows("rows").any()

        make("transparent", look=True)
        make(None, look=True)
        contenders = {"huge": partial(make, "transparent"), "small": partial(make, None)}
        taken = interleaved(contenders, rounds=asked.rounds)
        least, middle, greatest = spread(taken["small"], taken["huge"])
        size = asked.mib / 1024
        report.add(
            Result(
                f"populate {asked.mib} MiB, {threads} thread(s), huge pages against small ones",
                size / taken["huge"].median,
                "GiB/s",
                size / taken["small"].median,
                middle,
            ),
            f"of {size / taken['small'].median:.1f} GiB/s ({least:.2f}-{greatest:.2f})",
        )
    print("not measured: several memory nodes, other kernels")
    report.write()


if __name__ == "__main__":
    main()
